"""Classifiers: a label for a sequence, or for each of its tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast, TokenClassifierOutput
from transformers.utils import can_return_tuple

from permuteformer.models.backbone import PermuteFormerModel, PermuteFormerPreTrainedModel, check_extra
from permuteformer.models.config import PermuteFormerConfig
from permuteformer.models.dropout import Dropout
from permuteformer.ops.checks import is_looked_through
from permuteformer.ops.sequence_parallel import SequenceGroup


class Pooler(nn.Module):
    """A sequence as one vector, by the configuration's ``pooling``."""

    sequence: SequenceGroup | None = None
    """As of ``PermuteFormerModel``."""

    def __init__(self, config: PermuteFormerConfig) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if config.pooling == "cls" else None

    def chosen(self, given: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """``b 1``: the one token of each row of the model's input, ``b l …``, that this looks at; ``None`` where it looks at more."""
        if given is None or given.dim() < 2 or self.pooling == "mean" or self.sequence is not None:
            return None
        return self._pick(_mask(given, attention_mask)).unsqueeze(1)

    def forward(self, x: Tensor, attention_mask: Tensor | None, chosen: Tensor | None = None) -> Tensor:
        """``b d`` of hidden states ``b l d``, or ``b 1 d`` of the tokens ``chosen``; the same on all processes where rows are spread."""
        if chosen is not None:
            return self._dense(x.squeeze(1))
        mask = _mask(x, attention_mask)
        counts = mask.sum(1, keepdim=True)  # b n: real tokens of each process
        if self.sequence is not None:
            counts = self.sequence.stretches(mask, None, x.shape[0], x.shape[1], x.device).tokens.T
        if self.pooling == "mean":
            total = self._of_all(x.masked_fill(~mask.unsqueeze(-1), 0).sum(1))
            return total / counts.sum(1, keepdim=True).clamp(min=1)
        picked = x[torch.arange(len(x), device=x.device), self._pick(mask)]
        if self.sequence is not None:
            picked = picked.masked_fill((self._pick(counts > 0) != self.sequence.rank).unsqueeze(1), 0)
        return self._dense(self._of_all(picked))

    def _pick(self, there: Tensor) -> Tensor:
        """``b``: the real token that stands for its row, wherever padding stands; 0 where there is none."""
        if self.pooling == "cls":
            return there.long().argmax(-1)
        return torch.where(there, torch.arange(there.shape[1], device=there.device), 0).amax(-1)

    def _dense(self, x: Tensor) -> Tensor:
        return x if self.dense is None else torch.tanh(self.dense(x))

    def _of_all(self, x: Tensor) -> Tensor:
        """The sum over the processes that hold the rows."""
        return x if self.sequence is None else self.sequence.total(x)


def _mask(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """``b l`` bool of an input or hidden states ``b l …``."""
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if attention_mask is None else attention_mask.bool()


class PermuteFormerForSequenceClassification(PermuteFormerPreTrainedModel):
    """A label for a sequence.

    >>> config = PermuteFormerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    >>> PermuteFormerForSequenceClassification(config)(torch.tensor([[1, 10, 11]])).logits.shape
    torch.Size([1, 3])
    """

    accepts_loss_kwargs = False  # not every loss here takes the number of items, so a Trainer is to divide by itself

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
        """Logits of the labels; arguments as of ``PermuteFormerModel``.

        Args:
            labels: ``b`` int64 for one label, ``b`` or ``b n`` float for regression, ``b n`` float for several labels at once
                (``problem_type`` in the configuration, or told from these): gives ``loss``.
            kwargs: for the loss.
        """
        check_extra(kwargs)
        all_wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        chosen = None if all_wanted else self.pooler.chosen(input_ids if inputs_embeds is None else inputs_embeds, attention_mask)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            chosen=chosen,
            return_dict=True,
        )
        logits = self.classifier(self.dropout(self.pooler(outputs.last_hidden_state, attention_mask, chosen)))
        loss = None
        if labels is not None:
            check_labels(labels, self.num_labels)
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class PermuteFormerForTokenClassification(PermuteFormerPreTrainedModel):
    """A label for each token.

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
        """Logits ``b l n``; arguments as of ``PermuteFormerModel``.

        Args:
            labels: ``b l`` int64, -100 where none counts: gives ``loss``.
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
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            check_labels(labels, self.num_labels)
            loss = self.loss_function(logits, labels, self.config, **kwargs)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


def check_labels(labels: Tensor, num_labels: int) -> None:
    """Raise where a label is none of the model's (-100 is ignored, as in all of transformers)."""
    if labels.dtype not in (torch.int64, torch.int32) or labels.device.type != "cpu" or is_looked_through() or num_labels == 1:
        return
    wrong = labels[(labels != -100) & ((labels < 0) | (labels >= num_labels))]
    if wrong.numel():
        raise ValueError(
            f"labels must be from 0 to {num_labels - 1} (num_labels={num_labels}), or -100 to be ignored; there is {int(wrong[0])}: set "
            "num_labels in the configuration"
        )
