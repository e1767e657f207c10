"""Matching: one label for two documents, read by one encoder (the retrieval task of Long-Range Arena)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

from permuteformer.models.backbone import PermuteFormerModel, PermuteFormerPreTrainedModel, check_extra
from permuteformer.models.classifier import Pooler, check_labels
from permuteformer.models.config import PermuteFormerConfig


class PermuteFormerForMatching(PermuteFormerPreTrainedModel):
    """Both documents through one encoder; their vectors side by side through two layers of relu.

    >>> config = PermuteFormerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> first, second = torch.tensor([[1, 10, 11]]), torch.tensor([[1, 10, 11, 12]])
    >>> PermuteFormerForMatching(config)(first, second).logits.shape
    torch.Size([1, 2])
    """

    accepts_loss_kwargs = False  # as of the sequence classifier

    def __init__(self, config: PermuteFormerConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.num_labels = config.num_labels
        self.loss_type = "ForSequenceClassification"  # transformers would tell it from the class's name
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
        """Logits of the labels of pairs.

        Args:
            input_ids: ``b l``, the first documents.
            second_input_ids: ``b l'``, the second ones.
            attention_mask: ``b l``, 1 for real tokens.
            second_attention_mask: ``b l'``.
            position_ids: as of ``PermuteFormerModel``, for models with several axes.
            second_position_ids: the same of the second documents.
            labels: as of ``PermuteFormerForSequenceClassification``.
            kwargs: for the loss.
        """
        check_extra(kwargs)
        first = (input_ids, attention_mask, position_ids)
        second = (second_input_ids, second_attention_mask, second_position_ids)
        pooled = [self._pool(*document) for document in (first, second)]
        logits = self.classifier(torch.cat(pooled, dim=-1))
        loss = None
        if labels is not None:
            check_labels(labels, self.num_labels)
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def _pool(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        chosen = self.pooler.chosen(input_ids, attention_mask)
        outputs = self.model(input_ids, attention_mask, position_ids, use_cache=False, chosen=chosen, return_dict=True)
        pooled: Tensor = self.pooler(outputs.last_hidden_state, attention_mask, chosen)
        return pooled
