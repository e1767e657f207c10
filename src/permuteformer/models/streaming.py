"""Encoding documents too long for their activations: layer by layer, in blocks of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from permuteformer.attention.base import positions_of, select_tokens
from permuteformer.attention.linear import LinearAttention
from permuteformer.models import fused
from permuteformer.models.backbone import PermuteFormerBlock, PermuteFormerModel
from permuteformer.ops.call import LinearCall, LinearState, Tokens
from permuteformer.ops.checks import check_integer
from permuteformer.ops.linear import run

Part = slice | Tensor
"""Neighbouring tokens, or the indices of tokens, ``b c``."""


@torch.no_grad()
def encode_in_blocks(
    model: PermuteFormerModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    block_size: int = 8192,
) -> Tensor:
    """Return the last hidden states ``b l d`` of an encoder with linear attention, as ``model(...)`` does, in little memory.

    Each layer goes over its hidden states twice, block by block: first for the states that its keys leave, then for the outputs. Only the
    hidden states are as long as the input, and with a two-sided decay on several axes the mixed values. For inference.

    Args:
        model: a bidirectional model with linear attention, without a bias.
        input_ids: ``b l`` int64.
        attention_mask: ``b l``, 1 for real tokens, 0 for padding.
        position_ids: ``b l``, or ``b l a`` for several axes.
        block_size: tokens per block.

    >>> from permuteformer.models.config import PermuteFormerConfig
    >>> model = PermuteFormerModel(PermuteFormerConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)).eval()
    >>> ids = torch.randint(3, 259, (1, 100))
    >>> torch.allclose(encode_in_blocks(model, ids, block_size=32), model(ids).last_hidden_state, atol=1e-5)
    True
    """
    check_integer(block_size=block_size)
    if not isinstance(model, PermuteFormerModel):
        raise TypeError(f"model must be a PermuteFormerModel, got {type(model).__name__}: pass the .model of a model with a head")
    if model.training:
        raise ValueError("the model is in training mode, where dropout is active: call model.eval() first")
    attention = model.blocks[0].attention.attention
    if model.config.causal or not isinstance(attention, LinearAttention) or "bias" in attention.position.hooks:
        raise ValueError(
            f"encode_in_blocks is for bidirectional linear attention without a bias, got causal={model.config.causal}, attention "
            f"{attention.name!r}, hooks {', '.join(sorted(attention.position.hooks)) or 'none'}: run a causal model with past_key_values"
        )
    batch, length = input_ids.shape
    tokens = model.tokens(batch, length, input_ids.device, attention_mask, position_ids)
    tokens = replace(tokens, positions=positions_of(tokens, None, input_ids.unsqueeze(-1)))
    blocks: list[Part] = [slice(start, start + block_size) for start in range(0, length, block_size)]
    x = torch.cat([model.embed(input_ids[:, block], None, _part(tokens, block)) for block in blocks], dim=1)
    for layer in model.blocks:
        _encode_layer(layer, x, tokens, blocks)
    for block in blocks:
        x[:, block] = model.norm(x[:, block])
    return x


def _encode_layer(layer: PermuteFormerBlock, x: Tensor, tokens: Tokens, blocks: list[Part]) -> None:
    """Replace hidden states by those after a layer."""

    def finish(block: Part, out: Tensor) -> None:
        mixed = layer.attention.output(out.transpose(1, 2).flatten(2))
        x[:, block] = layer.feed_forward(x[:, block] + mixed, fused.is_enabled())

    if tokens.orders is None:
        for block, out in zip(blocks, _outputs(layer, x, tokens, blocks), strict=True):
            finish(block, out)
        return
    attention = layer.attention.attention
    mixed = x.new_empty(*x.shape[:2], attention.num_heads, attention.head_size)
    for axis, order in enumerate(tokens.orders):  # each head keeps its outputs in the order of its axis
        parts: list[Part] = [order[:, block] for block in blocks]
        for part, out in zip(parts, _outputs(layer, x, tokens, parts), strict=True):
            rows = torch.arange(len(x), device=x.device).unsqueeze(1)
            mixed[rows, part, axis :: len(tokens.orders)] = out.transpose(1, 2)[:, :, axis :: len(tokens.orders)]
    for block in blocks:
        finish(block, mixed[:, block].transpose(1, 2))


def _outputs(layer: PermuteFormerBlock, x: Tensor, tokens: Tokens, parts: list[Part]) -> Iterator[Tensor]:
    """Yield the output ``b h c v`` of attention for each part of the tokens, in the order of the parts."""
    is_decayed = layer.attention.attention.position.two_sided
    after: list[LinearState | None] = [None]
    total: LinearState | None = None
    for n in reversed(range(len(parts))):  # the states of later keys, or of all keys
        call = _call(layer, x, tokens, parts[n])
        if is_decayed:
            _, found = run(replace(call, q=call.q[:, :, :0], after=after[-1], reverse=True))
            after.append(found)
        else:
            _, total = run(replace(call, q=call.q[:, :, :0], state=total))
    after.reverse()
    state = total
    for n, part in enumerate(parts):
        call = _call(layer, x, tokens, part)
        if is_decayed:
            out, state = run(replace(call, state=state, after=after[n + 1]))
        else:
            out, _ = run(
                replace(call, k=call.k[:, :, :0], v=call.v[:, :, :0], tokens=Tokens(), query_positions=call.tokens.positions, state=total)
            )
        yield out


def _call(layer: PermuteFormerBlock, x: Tensor, tokens: Tokens, part: Part) -> LinearCall:
    """The call of attention within a part of the tokens."""
    here, normed = layer.attention, layer.attention_norm(_select(x, part))
    assert isinstance(here.attention, LinearAttention)
    assert here.key is not None
    q, k, v = (here.heads(projection(normed)) for projection in (here.query, here.key, here.value))
    return here.attention.call(q, k, v, _part(tokens, part))


def _part(tokens: Tokens, part: Part) -> Tokens:
    """Positions and mask of a part of the tokens."""
    return Tokens(*(None if x is None else _select(x, part) for x in (tokens.positions, tokens.mask)))


def _select(x: Tensor, part: Part) -> Tensor:
    return x[:, part] if isinstance(part, slice) else select_tokens(x, part)
