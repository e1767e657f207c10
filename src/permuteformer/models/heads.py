"""Heads on the backbone: classifiers of sequences and tokens, causal and masked language models, and a matcher of two documents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from permuteformer.models.backbone import PermuteFormerModel, PermuteFormerPreTrainedModel, check_extra
from permuteformer.models.cache import PermuteFormerCache
from permuteformer.models.config import PermuteFormerConfig
from permuteformer.ops.checks import can_read_values
from permuteformer.ops.modules import Dropout, Linear
from permuteformer.ops.sequence_parallel import SequenceGroup


class Pooler(nn.Module):
    """Summarises a sequence as one vector, by the configuration's ``pooling``."""

    sequence: SequenceGroup | None = None
    """As of ``PermuteFormerModel``."""

    def __init__(self, config: PermuteFormerConfig) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.has_global = config.pooling == "cls" and config.has_two_sided_decay
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if config.pooling == "cls" else None

    def arguments(self, given: Tensor | None, attention_mask: Tensor | None, all_tokens: bool = False) -> dict[str, Tensor]:
        """Return arguments of the model for an input ``b l …``: the one token that is pooled, as query and, for CLS, as global token.

        ``all_tokens``: hidden states of all tokens are needed.
        """
        if given is None or given.dim() < 2 or self.pooling == "mean":
            return {}
        mask = _mask(given, attention_mask)
        picked = self._pick(mask).unsqueeze(1)
        found = {} if all_tokens or self.sequence is not None else {"queries": picked}
        if self.has_global:
            is_here = torch.ones_like(picked, dtype=torch.bool)
            if self.sequence is not None:
                is_here = self._is_holder(mask).unsqueeze(1)
            found["global_mask"] = torch.zeros_like(mask).scatter(1, picked, is_here)
        return found

    def forward(self, x: Tensor, attention_mask: Tensor | None, is_picked: bool = False) -> Tensor:
        """Return ``b d`` from hidden states ``b l d``, or ``b 1 d`` of the picked token; the same on all processes of a sequence group."""
        if is_picked:
            return self._dense(x.squeeze(1))
        mask = _mask(x, attention_mask)
        if self.pooling == "mean":
            total, count = x.masked_fill(~mask.unsqueeze(-1), 0).sum(1), mask.sum(1, keepdim=True)
            if self.sequence is not None:
                total, count = self.sequence.total(total), self.sequence.sum_up(count)
            return total / count.clamp(min=1)
        picked = x[torch.arange(len(x), device=x.device), self._pick(mask)]
        if self.sequence is not None:
            picked = self.sequence.total(picked.masked_fill(~self._is_holder(mask).unsqueeze(1), 0))
        return self._dense(picked)

    def _pick(self, real: Tensor) -> Tensor:
        """``b``: the first or the last real token, wherever padding is; 0 where there is none."""
        if self.pooling == "cls":
            return real.long().argmax(-1)
        return torch.where(real, torch.arange(real.shape[1], device=real.device), 0).amax(-1)

    def _is_holder(self, mask: Tensor) -> Tensor:
        """``b``: whether this process of the sequence group holds the picked token."""
        assert self.sequence is not None
        counts = self.sequence.shards(mask, None, mask.shape[0], mask.shape[1], mask.device).tokens.T  # b n
        return self._pick(counts > 0) == self.sequence.rank

    def _dense(self, x: Tensor) -> Tensor:
        return x if self.dense is None else torch.tanh(self.dense(x))


def _mask(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """``b l`` bool of an input or hidden states ``b l …``."""
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if attention_mask is None else attention_mask.bool()


class PermuteFormerForSequenceClassification(PermuteFormerPreTrainedModel):
    """Predicts a label for a sequence.

    >>> config = PermuteFormerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    >>> PermuteFormerForSequenceClassification(config)(torch.tensor([[1, 10, 11]])).logits.shape
    torch.Size([1, 3])
    """

    accepts_loss_kwargs = False  # not every loss takes the number of items, so a Trainer must divide itself

    def __init__(self, config: PermuteFormerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = PermuteFormerModel(config)
        self.pooler = Pooler(config)
        self.dropout = Dropout(config.hidden_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Compute logits of the labels; arguments as of ``PermuteFormerModel``.

        Args:
            labels: ``b`` int64 for one label, ``b`` or ``b n`` float for regression, ``b n`` float for several labels at once
                (``problem_type`` of the configuration, or inferred): gives ``loss``.
            kwargs: for the loss.
        """
        check_extra(kwargs)
        keeps = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        pooled, hidden_states = _pool(self, input_ids, attention_mask, position_ids, inputs_embeds, keeps)
        logits = self.classifier(self.dropout(pooled))
        loss = _loss(self, labels, pooled_logits=logits, **kwargs)
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits, hidden_states=hidden_states)


class PermuteFormerForTokenClassification(PermuteFormerPreTrainedModel):
    """Predicts a label for each token.

    >>> config = PermuteFormerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    >>> PermuteFormerForTokenClassification(config)(torch.tensor([[1, 10, 11]])).logits.shape
    torch.Size([1, 3, 3])
    """

    def __init__(self, config: PermuteFormerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = PermuteFormerModel(config)
        self.dropout = Dropout(config.hidden_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

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
    ) -> TokenClassifierOutput:
        """Compute logits ``b l n``; arguments as of ``PermuteFormerModel``.

        Args:
            labels: ``b l`` int64, -100 to ignore a token: gives ``loss``.
            kwargs: for the loss.
        """
        check_extra(kwargs)
        given = (input_ids, attention_mask, position_ids, inputs_embeds)
        outputs = self.model(*given, use_cache=False, segment_ids=segment_ids, output_hidden_states=output_hidden_states, return_dict=True)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = _loss(self, labels, logits=logits, **kwargs)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class PermuteFormerForCausalLM(PermuteFormerPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Predicts the next token; with linear attention ``generate`` runs on a state of constant size.

    >>> config = PermuteFormerConfig.preset("permuteformer-lm", vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> model = PermuteFormerForCausalLM(config).eval()
    >>> model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, eos_token_id=None).shape
    torch.Size([1, 7])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PermuteFormerConfig) -> None:
        if not config.causal:
            raise ValueError("a causal language model needs causal=True in its configuration: set it, or use a preset ending in -lm")
        super().__init__(config)
        self.model = PermuteFormerModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

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
        """Compute logits of the next tokens; arguments as of ``PermuteFormerModel``.

        Args:
            labels: ``b l``, the tokens themselves (shifted here), -100 to ignore a token: gives ``loss``.
            logits_to_keep: compute logits of the last n tokens only, or of these indices; 0 for all.
            kwargs: for the loss: ``num_items_in_batch``.
        """
        check_extra(kwargs)
        if labels is not None and self.model.sequence is not None and kwargs.get("shift_labels") is None:
            raise ValueError(
                "labels are shifted by one, and the token after the last is on the next process: pass shift_labels, the token after each"
            )
        given = (input_ids, attention_mask, position_ids, inputs_embeds, past_key_values, use_cache, segment_ids)
        outputs = self.model(*given, output_hidden_states=output_hidden_states, return_dict=True)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = _loss(self, labels, logits=logits, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepare inputs as transformers does, without positions: the model counts them from its state."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        if self.config.axes == 1:
            inputs.pop("position_ids", None)
        return inputs

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Create a cache of states, where transformers would create one of keys and values."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is not supported: this model has a cache of states"
            )
        has_state = self.model.has_state
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache and has_state:
            model_kwargs["past_key_values"] = PermuteFormerCache(self.config.num_hidden_layers)
        elif not has_state:
            generation_config.use_cache = False


class PermuteFormerForMaskedLM(PermuteFormerPreTrainedModel):
    """Predicts masked tokens: BERT's dense layer with a norm, and an output tied to the embedding.

    >>> config = PermuteFormerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> PermuteFormerForMaskedLM(config)(torch.tensor([[1, 10, 11]])).logits.shape
    torch.Size([1, 3, 259])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PermuteFormerConfig) -> None:
        if config.causal:
            raise ValueError("a masked language model is bidirectional: set causal=False, or use PermuteFormerForCausalLM")
        super().__init__(config)
        self.model = PermuteFormerModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.dense_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.post_init()

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
        """Compute logits ``b l vocab_size``; arguments as of ``PermuteFormerModel``.

        Args:
            labels: ``b l`` int64: the masked tokens, and -100 for the others: gives ``loss``.
            kwargs: for the loss.
        """
        check_extra(kwargs)
        given = (input_ids, attention_mask, position_ids, inputs_embeds)
        outputs = self.model(*given, use_cache=False, segment_ids=segment_ids, output_hidden_states=output_hidden_states, return_dict=True)
        logits = self.lm_head(self.dense_norm(self.activation(self.dense(outputs.last_hidden_state))))
        loss = _loss(self, labels, logits=logits, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class PermuteFormerForMatching(PermuteFormerPreTrainedModel):
    """Predicts a label for two documents (the retrieval task of Long-Range Arena): one encoder, and two hidden layers on both vectors.

    >>> config = PermuteFormerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> first, second = torch.tensor([[1, 10, 11]]), torch.tensor([[1, 10, 11, 12]])
    >>> PermuteFormerForMatching(config)(first, second).logits.shape
    torch.Size([1, 2])
    """

    accepts_loss_kwargs = False  # as for sequences

    def __init__(self, config: PermuteFormerConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.num_labels = config.num_labels
        self.loss_type = "ForSequenceClassification"  # transformers infers it from the class name
        self.model = PermuteFormerModel(config)
        self.pooler = Pooler(config)
        self.classifier = nn.Sequential(
            nn.Linear(2 * size, 4 * size), nn.ReLU(), nn.Linear(4 * size, 2 * size), nn.ReLU(), nn.Linear(2 * size, config.num_labels)
        )
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor,
        second_input_ids: Tensor,
        attention_mask: Tensor | None = None,
        second_attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        second_position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Compute logits of the labels of pairs.

        Args:
            input_ids: ``b l``: the first documents.
            second_input_ids: ``b l'``: the second documents.
            attention_mask: ``b l``, 1 for real tokens.
            second_attention_mask: ``b l'``.
            position_ids: as of ``PermuteFormerModel``, for models with several axes.
            second_position_ids: likewise for the second documents.
            labels: as of ``PermuteFormerForSequenceClassification``.
            kwargs: for the loss.
        """
        check_extra(kwargs)
        first, _ = _pool(self, input_ids, attention_mask, position_ids)
        second, _ = _pool(self, second_input_ids, second_attention_mask, second_position_ids)
        logits = self.classifier(torch.cat([first, second], dim=-1))
        loss = _loss(self, labels, pooled_logits=logits, **kwargs)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def _pool(
    head: Any,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None = None,
    keeps: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """Run the backbone and pool its output: return ``b d``, and all hidden states if ``keeps``."""
    chosen = head.pooler.arguments(input_ids if inputs_embeds is None else inputs_embeds, attention_mask, keeps)
    given = (input_ids, attention_mask, position_ids, inputs_embeds)
    outputs = head.model(*given, use_cache=False, output_hidden_states=keeps, return_dict=True, **chosen)
    return head.pooler(outputs.last_hidden_state, attention_mask, "queries" in chosen), outputs.hidden_states


def _loss(head: PermuteFormerPreTrainedModel, labels: Tensor | None, **arguments: Any) -> Tensor | None:
    """Check labels and return the loss that transformers has for the head; ``None`` without labels."""
    if labels is None:
        return None
    _check_labels(labels, head.config.vocab_size if hasattr(head, "lm_head") else head.config.num_labels)
    loss: Tensor = head.loss_function(labels=labels, config=head.config, vocab_size=head.config.vocab_size, **arguments)
    return loss


def _check_labels(labels: Tensor, num_labels: int) -> None:
    """Raise where a label is out of range (-100 is ignored, as in transformers)."""
    if labels.dtype not in (torch.int64, torch.int32) or not can_read_values(labels) or num_labels == 1:
        return
    wrong = labels[(labels != -100) & ((labels < 0) | (labels >= num_labels))]
    if wrong.numel():
        raise ValueError(
            f"labels must be from 0 to {num_labels - 1} (num_labels={num_labels}), or -100 to be ignored, got {int(wrong[0])}: set "
            "num_labels in the configuration"
        )
