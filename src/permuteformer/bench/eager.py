"""The paper's formulas in eager PyTorch, for comparison: the cost of the model if nothing is fused.

All features are stored, powers of permutations come from a table of all positions, and a gather permutes. The model around attention is
that of the paper's Long-Range Arena experiments: BERT with norms before the sublayers.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

from permuteformer.models import PermuteFormerConfig
from permuteformer.positions.permute import Permute

EPSILON = 1e-3
"""Added by the paper's feature map."""


def eager_attention(q: Tensor, k: Tensor, v: Tensor, index: Tensor | None, key_mask: Tensor | None = None) -> Tensor:
    """Return equation 11, or equation 2 without an ``index``: ``b h l m``, ``b h l m``, ``b h l v`` to ``b h l v``."""
    if index is not None:
        q, k = q.gather(-1, index.expand(len(q), -1, -1, -1)), k.gather(-1, index.expand(len(k), -1, -1, -1))
    q, k = F.relu(q) + EPSILON, F.relu(k) + EPSILON
    if key_mask is not None:
        k = k * key_mask[:, None, :, None]
    return q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2).unsqueeze(-1))


class EagerLayer(nn.Module):
    """Attention and feed-forward network, each with a norm before it."""

    def __init__(self, config: PermuteFormerConfig) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        features = width * config.attention["feature_multiplier"]
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = nn.Linear(width, features), nn.Linear(width, features), nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, config.intermediate_size), nn.Linear(config.intermediate_size, width)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, index: Tensor | None, key_mask: Tensor | None) -> Tensor:
        """Map ``b l d`` to ``b l d``."""
        normed = self.attention_norm(x)
        q, k, v = (f(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = eager_attention(q, k, v, index, key_mask)
        x = x + self.dropout(self.output(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.dropout(self.contract(F.gelu(self.expand(self.norm(x)))))
        return out


class EagerModel(nn.Module):
    """Embeddings, layers, a norm, a dense layer with tanh on the first token, and a head for one text or two."""

    def __init__(self, config: PermuteFormerConfig, kind: str, positions: Tensor) -> None:
        super().__init__()
        width, names = config.hidden_size, [encoding["name"] for encoding in config.position]
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.learned = nn.Parameter(torch.randn(positions.shape[1], width) / 50) if "learned" in names else None
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(EagerLayer(config) for _ in range(config.num_hidden_layers))
        self.norm, self.pooler = nn.LayerNorm(width), nn.Linear(width, width)
        sizes = (2 * width, 4 * width, 2 * width, config.num_labels)
        first, second, third = (nn.Linear(*pair) for pair in pairwise(sizes))
        pair_head = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)
        self.head = pair_head if kind == "match" else nn.Linear(width, config.num_labels)
        features = width // config.num_attention_heads * config.attention["feature_multiplier"]
        table = Permute(config.num_attention_heads, features, config.axes).tables(positions) if "permute" in names else None
        self.register_buffer("index", table)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        second_input_ids: Tensor | None = None,
        second_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Return logits, and the loss if labels are given."""
        pooled = self._pool(input_ids, attention_mask)
        if second_input_ids is not None:
            pooled = torch.cat([pooled, self._pool(second_input_ids, second_attention_mask)], dim=-1)
        logits = self.head(pooled)
        return SequenceClassifierOutput(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)

    def _pool(self, input_ids: Tensor, key_mask: Tensor | None) -> Tensor:
        x = self.embedding(input_ids)
        x = self.dropout(x if self.learned is None else x + self.learned)
        for layer in self.layers:
            x = layer(x, self.index, key_mask)
        return torch.tanh(self.pooler(self.norm(x)[:, 0]))
