"""Encoding documents too long for their activations: layer by layer, in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from permuteformer.attention.layer import MultiHeadAttention
from permuteformer.attention.linear import LinearAttention
from permuteformer.models import fused
from permuteformer.models.backbone import PermuteFormerModel
from permuteformer.ops.checks import check_whole
from permuteformer.ops.halves import absorb_keys, read_state
from permuteformer.ops.state import LinearState


@torch.no_grad()
def encode_in_blocks(
    model: PermuteFormerModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    block_size: int = 8192,
) -> Tensor:
    """The last hidden states ``b l d`` of an encoder with linear attention, as ``model(...)`` gives them.

    Of all that is computed, only the hidden states themselves are as long as the input: each layer goes over them twice, block by block,
    first summing up its keys, then reading the sum. For inference.

    Args:
        model: a bidirectional model with linear attention, without a decay or a bias.
        input_ids: ``b l`` int64.
        attention_mask: ``b l``, 1 for real tokens, 0 for padding.
        position_ids: ``b l``, or ``b l a`` for several axes.
        block_size: tokens at a time.

    >>> from permuteformer.models.config import PermuteFormerConfig
    >>> model = PermuteFormerModel(PermuteFormerConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)).eval()
    >>> ids = torch.randint(3, 259, (1, 100))
    >>> torch.allclose(encode_in_blocks(model, ids, block_size=32), model(ids).last_hidden_state, atol=1e-5)
    True
    """
    check_whole(block_size=block_size)
    if not isinstance(model, PermuteFormerModel):
        raise TypeError(f"model must be a PermuteFormerModel, not {type(model).__name__}: a model with a head has one as its .model")
    if model.training:
        raise ValueError("the model is in training mode, where dropout is on: call model.eval() first")
    attention = model.blocks[0].attention.attention
    hooks = attention.position.hooks
    if model.config.causal or not isinstance(attention, LinearAttention) or hooks & {"log_decay", "bias"}:
        raise ValueError(
            "encoding in blocks is for bidirectional linear attention without a decay or a bias; this model has causal="
            f"{model.config.causal}, attention {attention.name!r}, {', '.join(sorted(hooks)) or 'no position'}. A causal model can be fed "
            "piece by piece through past_key_values"
        )
    batch, length = input_ids.shape
    key_mask = model.key_mask(attention_mask, batch, length)
    positions = model.positions(position_ids, key_mask, None, None, batch, length, input_ids.device)
    blocks = [slice(start, start + block_size) for start in range(0, length, block_size)]
    x = torch.empty(batch, length, model.config.hidden_size, dtype=model.dtype, device=input_ids.device)
    for block in blocks:
        x[:, block] = model.embed(input_ids[:, block], None, positions[:, block])
    for layer in model.blocks:
        state: LinearState | None = None
        for block in blocks:
            mask = None if key_mask is None else key_mask[:, block]
            state = _absorb(layer.attention, layer.attention_norm(x[:, block]), positions[:, block], mask, state)
        assert state is not None
        for block in blocks:
            mixed = _read(layer.attention, layer.attention_norm(x[:, block]), positions[:, block], state)
            x[:, block] = layer.feed_forward(x[:, block] + mixed, fused.is_wanted())
    for block in blocks:
        x[:, block] = model.norm(x[:, block])
    return x


def _absorb(layer: MultiHeadAttention, x: Tensor, positions: Tensor, key_mask: Tensor | None, state: LinearState | None) -> LinearState:
    attention = layer.attention
    assert isinstance(attention, LinearAttention)
    k, v = layer.heads(layer.key(x)), layer.heads(layer.value(x))  # type: ignore[misc]
    return absorb_keys(k, v, positions=positions, key_mask=key_mask, state=state, **attention.features)


def _read(layer: MultiHeadAttention, x: Tensor, positions: Tensor, state: LinearState) -> Tensor:
    attention = layer.attention
    assert isinstance(attention, LinearAttention)
    q = layer.heads(layer.query(x))
    out = read_state(q, state, positions=positions, normalize=attention.normalize, **attention.features)
    return layer.merge(out)
