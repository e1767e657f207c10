"""Language models: the next token."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from permuteformer.models.backbone import PermuteFormerModel, PermuteFormerPreTrainedModel, check_extra
from permuteformer.models.cache import PermuteFormerCache
from permuteformer.models.classifier import check_labels
from permuteformer.models.config import PermuteFormerConfig


class PermuteFormerForCausalLM(PermuteFormerPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The backbone and an output over the vocabulary; ``generate`` runs on a state of constant size where attention is linear.

    >>> import torch
    >>> config = PermuteFormerConfig.preset("permuteformer-lm", vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> model = PermuteFormerForCausalLM(config).eval()
    >>> model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, eos_token_id=None).shape
    torch.Size([1, 7])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PermuteFormerConfig) -> None:
        if not config.causal:
            raise ValueError("a causal language model needs causal=True in its configuration: take a preset ending in -lm, or set it")
        super().__init__(config)
        self.model = PermuteFormerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings  # type: ignore[assignment]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: PermuteFormerCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        segment_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next tokens; arguments as of ``PermuteFormerModel``.

        Args:
            labels: ``b l``, the tokens themselves (they are shifted here), -100 where none counts: gives ``loss``.
            logits_to_keep: compute logits of the last so many tokens only, or of these.
            kwargs: for the loss: ``num_items_in_batch``.
        """
        check_extra(kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            segment_ids=segment_ids,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            check_labels(labels, self.config.vocab_size)
            if self.model.sequence is not None and kwargs.get("shift_labels") is None:
                raise ValueError(
                    "labels are shifted by one, and the token after the last is on the next process: give shift_labels too, the token "
                    "after each"
                )
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As transformers has it, but the model counts positions by itself, from its state."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        if self.config.axes == 1:
            inputs.pop("position_ids", None)
        return inputs

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """A cache of states, where transformers would make one of keys and values."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is not for this model: its cache is its states"
            )
        has_state = self.model.has_state
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache and has_state:
            model_kwargs["past_key_values"] = PermuteFormerCache(self.config.num_hidden_layers)
        elif not has_state:
            generation_config.use_cache = False
