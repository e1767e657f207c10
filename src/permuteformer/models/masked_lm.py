"""Masked language models: the tokens that were hidden."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import can_return_tuple

from permuteformer.models.backbone import PermuteFormerModel, PermuteFormerPreTrainedModel, check_extra
from permuteformer.models.classifier import check_labels
from permuteformer.models.config import PermuteFormerConfig


class PermuteFormerForMaskedLM(PermuteFormerPreTrainedModel):
    """The backbone, BERT's dense layer with a norm, and an output over the vocabulary tied to the embedding.

    >>> import torch
    >>> config = PermuteFormerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> PermuteFormerForMaskedLM(config)(torch.tensor([[1, 10, 11]])).logits.shape
    torch.Size([1, 3, 259])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PermuteFormerConfig) -> None:
        if config.causal:
            raise ValueError("a masked language model sees both sides: set causal=False, or take PermuteFormerForCausalLM")
        super().__init__(config)
        self.model = PermuteFormerModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.dense_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
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
        labels: Tensor | None = None,
        segment_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Logits ``b l vocab_size``; arguments as of ``PermuteFormerModel``.

        Args:
            labels: ``b l`` int64: the hidden tokens, and -100 for the others: gives ``loss``.
            kwargs: for the loss.
        """
        check_extra(kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            segment_ids=segment_ids,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = self.lm_head(self.dense_norm(self.activation(self.dense(outputs.last_hidden_state))))
        loss = None
        if labels is not None:
            check_labels(labels, self.config.vocab_size)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
