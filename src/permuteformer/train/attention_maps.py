"""Attention weights of a trained model, by distance and token by token, small enough to be stored with a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from permuteformer.attention import MultiHeadAttention
from permuteformer.models.backbone import PermuteFormerPreTrainedModel
from permuteformer.ops.call import Tokens
from permuteformer.ops.checks import without_autocast
from permuteformer.tasks import Batch
from permuteformer.tasks.inputs import Image, Input
from permuteformer.train.build import model_inputs

TEXT_LENGTH, IMAGE_LENGTH = 256, 1026
"""Tokens that are used, since every pair of them has a weight. An image of 32 x 32 pixels is complete."""

REACH, REACH_2D = 128, 8
"""Longest distances of the kernels, in each direction."""

MAP_LENGTH = 64
"""Tokens of the maps."""

NOT_LINEAR = 0.01
"""Largest error of weights times values, relative to the largest possible output; rounding errors are far below."""


class NoWeights(ValueError):
    """An attention whose output is not a weighted sum of its values, or is not finite."""


@torch.no_grad()
def attention_maps(model: PermuteFormerPreTrainedModel, input: Input, batch: Batch) -> dict[str, Any]:
    """Return the weights of every layer and head on a batch as JSON. The model must be in evaluation mode.

    ``kernel`` is the mean weight by the distance i − j of query i and key j. In causal models only queries that see all of these distances
    count: earlier ones divide their weight among fewer keys. ``normalised`` says whether the weights of a query add up to 1; they do not if
    an attention has another normaliser (RoFormer) or mixes values first (Linformer), and may be negative there.
    ``kernel_2d``, for images, is the mean weight by (dy, dx), row and column of i minus those of j, of pixels only.
    ``maps`` are the weights of the first item's first tokens, the mean over heads. Of pairs of texts, the first one is used.

    If an attention has no weights, or they are not finite, these are ``None`` and ``reason`` says why.
    """
    batch = _cut(batch, TEXT_LENGTH if input.grid is None else IMAGE_LENGTH).to(model.device)
    line, plane = _pairs_by_distance(batch, model.config.causal), _pairs_by_offset(batch, input)
    layers: list[_LayerMaps] = []
    maps: dict[str, Any] = {"format": 1, "kind": input.kind, "length": int(batch.mask.sum(-1).max()), "items": len(batch), "reason": None}
    try:
        with without_autocast(model.device), _hooks(model.base_model, layers, batch, line, plane):
            given = model_inputs(batch, model.config)
            pooler = getattr(model, "pooler", None)  # which marks global tokens
            marks = {} if pooler is None else pooler.arguments(given["input_ids"], given.get("attention_mask"), all_tokens=True)
            model.base_model(**given, **marks, use_cache=False)
    except NoWeights as error:
        return {**maps, "reason": f"layer {len(layers)}: {error}", "kernel": None, "kernel_2d": None, "maps": None}
    normalised = all(layer.normalised for layer in layers)
    names = [input.name_token(n) for n in batch.input_ids[0][batch.mask[0]][:MAP_LENGTH].tolist()]
    return {
        **maps,
        "kernel": {"distances": line.axes[0], "normalised": normalised, "layers": [layer.line for layer in layers]},
        "kernel_2d": plane and {"rows": plane.axes[0], "columns": plane.axes[1], "layers": [layer.plane for layer in layers]},
        "maps": {"tokens": names, "layers": [layer.map for layer in layers]},
    }


@torch.no_grad()
def attention_weights(
    layer: MultiHeadAttention,
    x: Tensor,
    *,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    global_mask: Tensor | None = None,
) -> Tensor:
    """Return the weight of value j in the output of query i, ``b h l l``; zero for masked tokens. Arguments as of the layer.

    Attention is linear in its values, so the weights are its output for the identity as values. This is checked on the layer's own values;
    ``NoWeights`` is raised if it does not hold.

    >>> from permuteformer import build
    >>> layer = build("linear", ["permute"], hidden_size=32, num_heads=2)
    >>> attention_weights(layer, torch.randn(1, 3, 32)).sum(-1).allclose(torch.ones(1, 2, 3))
    True
    """
    attention, length = layer.attention, x.shape[1]
    ordered = attention.position.decay_axes > 1
    tokens = Tokens.build(x.shape[0], length, x.device, positions=positions, mask=key_mask, global_mask=global_mask, ordered=ordered)
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if key_mask is None else key_mask
    queries, keys = real[:, None, :, None], real[:, None, None, :]
    with without_autocast(x.device):
        projections = (layer.query, layer.query if layer.key is None else layer.key, layer.value)
        q, k, v = (layer.heads(projection(x)) for projection in projections)
        q, k, v = (y.to(torch.promote_types(y.dtype, torch.float32)) for y in (q, k, v))
        identity = torch.eye(length, dtype=v.dtype, device=v.device).expand(*q.shape[:2], -1, -1)
        out = attention.mix(q, k, v, tokens, None)[0].masked_fill(~queries, 0)
        try:
            weights = attention.mix(q, k, identity, tokens, None)[0].masked_fill(~(queries & keys), 0)
        except (RuntimeError, TypeError, ValueError) as error:
            raise NoWeights(f"attention {attention.name!r} does not support values of size {length}: {error}") from error
        if not (weights.isfinite().all() and out.isfinite().all()):
            raise NoWeights(f"the weights of attention {attention.name!r} are not finite")
        v = v.masked_fill(~queries, 0)
        if (weights @ v - out).abs().amax() > NOT_LINEAR * (weights.abs() @ v.abs()).amax():
            raise NoWeights(f"attention {attention.name!r} is not linear in its values, so it has no weights")
    return weights


@dataclass(frozen=True)
class _Pairs:
    """Pairs of tokens, grouped by distance."""

    axes: tuple[list[int], ...]
    """Distances along each axis."""
    groups: list[Tensor]
    """For each item ``n n``: the number of the distance of every pair, from 1; 0 for pairs that do not count."""

    def sums(self, item: int, weights: Tensor) -> Tensor:
        """Return the sums of an item's weights ``h n n`` by distance, ``h d``. On the CPU, where sums are always the same."""
        groups, size = self.groups[item].flatten(), 1 + math.prod(map(len, self.axes))
        return torch.stack([torch.bincount(groups, head.flatten().double(), size)[1:] for head in weights])

    def means(self, sums: list[Tensor]) -> Any:
        """Return the means over all items as lists, ``h d`` or ``h dy dx``; ``None`` for a distance without pairs."""
        total = torch.stack(sums).sum(0)
        count = torch.bincount(torch.cat([groups.flatten() for groups in self.groups]), minlength=1 + total.shape[1])[1:]
        return _rounded((total / count).unflatten(1, [len(axis) for axis in self.axes]))


def _pairs_by_distance(batch: Batch, causal: bool) -> _Pairs:
    """Group pairs by i − j; in causal models, those of queries that see every distance."""
    lengths = batch.mask.sum(-1).tolist()
    reach = min(REACH, max(lengths) // 2 if causal else max(lengths) - 1)
    least = 0 if causal else -reach
    groups = []
    for n in lengths:
        i = torch.arange(n)
        distance = i[:, None] - i
        counts = (distance >= least) & (distance <= reach)
        if causal:
            counts[:reach] = False
        groups.append(torch.where(counts, distance - least + 1, 0))
    return _Pairs((list(range(least, reach + 1)),), groups)


def _pairs_by_offset(batch: Batch, input: Input) -> _Pairs | None:
    """Group pairs of pixels by (dy, dx), for images. Special tokens have a position on the grid, but are no pixels."""
    if not isinstance(input, Image) or batch.positions is None:
        return None
    special = torch.tensor([id for id in (input.alphabet.cls, input.alphabet.sep) if id is not None])
    rows, columns = (min(REACH_2D, side - 1) for side in input.grid)
    groups = []
    for ids, mask, positions in zip(batch.input_ids.cpu(), batch.mask.cpu(), batch.positions.cpu(), strict=True):
        is_pixel = ~torch.isin(ids[mask], special)
        x, y = positions[mask].unbind(-1)
        dx, dy = x[:, None] - x, y[:, None] - y
        counts = is_pixel[:, None] & is_pixel & (dx.abs() <= columns) & (dy.abs() <= rows)
        groups.append(torch.where(counts, (dy + rows) * (2 * columns + 1) + dx + columns + 1, 0))
    return _Pairs((list(range(-rows, rows + 1)), list(range(-columns, columns + 1))), groups)


@dataclass(frozen=True)
class _LayerMaps:
    """Summary of a layer's weights: lists ``h d``, ``h dy dx`` and ``l l``."""

    line: Any
    plane: Any
    map: Any
    normalised: bool


@contextmanager
def _hooks(backbone: nn.Module, found: list[_LayerMaps], batch: Batch, line: _Pairs, plane: _Pairs | None) -> Iterator[None]:
    """Summarise the weights of every layer as it is called, so that those of one layer are in memory at a time."""

    def hook(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert isinstance(layer, MultiHeadAttention)
        found.append(_summarise(layer, arguments[0], options["tokens"], batch.mask, line, plane))

    layers = [module for module in backbone.modules() if isinstance(module, MultiHeadAttention)]
    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _summarise(layer: MultiHeadAttention, x: Tensor, tokens: Tokens, mask: Tensor, line: _Pairs, plane: _Pairs | None) -> _LayerMaps:
    """Summarise items one after another: the weights of a batch of images would fill the memory."""
    lines, planes, normalised = [], [], True
    first = torch.empty(0)
    for n, real in enumerate(mask):
        item = slice(n, n + 1)
        positions = None if tokens.positions is None else tokens.positions.expand(len(x), -1, -1)[item]
        global_mask = None if tokens.global_mask is None else tokens.global_mask[item]
        key_mask = None if real.all() else mask[item]
        weights = attention_weights(layer, x[item], positions=positions, key_mask=key_mask, global_mask=global_mask)[0]
        weights = weights[:, real][:, :, real].cpu()  # h n n
        if n == 0:
            first = weights[:, :MAP_LENGTH, :MAP_LENGTH].mean(0)
        lines.append(line.sums(n, weights))
        if plane is not None:
            planes.append(plane.sums(n, weights))
        # If weights have both signs, the rounding error of their sum grows with their size.
        error, size = (weights.sum(-1) - 1).abs(), weights.abs().sum(-1).clamp(min=1)
        normalised = normalised and bool((error < 1e-3 * size).all())
    return _LayerMaps(line.means(lines), plane and plane.means(planes), _rounded(first, digits=2), normalised)


def _cut(batch: Batch, length: int) -> Batch:
    """Return the first tokens of a batch; of pairs, of the first text."""
    positions = None if batch.positions is None else batch.positions[:, :length]
    return Batch(batch.ids, batch.input_ids[:, :length], batch.mask[:, :length], batch.labels, positions)


def _rounded(x: Tensor, digits: int = 3) -> Any:
    """Return nested lists of rounded numbers; ``None`` for NaN."""
    if x.dim():
        return [_rounded(part, digits) for part in x]
    value = x.item()
    if not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}") if value else 0
