"""What a trained model looks at: attention weights, by distance and token by token, small enough to be kept beside a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from permuteformer.attention import MultiHeadAttention
from permuteformer.models.backbone import PermuteFormerPreTrainedModel
from permuteformer.ops.call import Tokens
from permuteformer.ops.checks import without_autocast
from permuteformer.tasks import Batch, Task
from permuteformer.tasks.base import Classification
from permuteformer.tasks.language import LanguageModelling
from permuteformer.texts import printable
from permuteformer.tokens import PAPER
from permuteformer.train.build import inputs

ITEMS = 8
"""Of a batch, the first so many are looked at."""

TEXT_LENGTH, IMAGE_LENGTH = 256, 1026
"""Tokens that a sequence is cut to: there is a weight for every pair of them. An image of 32 x 32 with CLS and SEP is whole."""

REACH, REACH_2D = 128, 8
"""The longest distances of the kernels, each way."""

MAP_LENGTH = 64
"""Tokens of the maps."""

NOT_LINEAR = 0.01
"""How far weights times values may be off an attention's output, as a share of the largest it could be: rounding is far below."""


class NoWeights(ValueError):
    """An attention whose output is not its values, weighted and summed, or is not finite."""


def look(model: PermuteFormerPreTrainedModel, task: Task, batch: Batch) -> dict[str, Any]:
    """The weights of every layer and head on a batch of the task, as plain data. The model is left as it was.

    ``kernel``: the mean weight by the distance i − j of query i and key j. Of causal models, the mean over queries that see all of these
    distances: earlier ones share their weight out among fewer keys, which would make short distances look heavier than they are.
    ``normalised`` says whether the weights of a query add up to 1. They do not where an attention has another normaliser (RoFormer) or
    mixes values before it weighs them (Linformer), and may be negative there.

    ``kernel_2d``: of tasks with a grid, the mean weight by (dy, dx), the row and the column of i less those of j, of pixels only.

    ``maps``: the first item's first tokens, the mean over heads. Of tasks with two documents, the first is looked at.

    Where weights cannot be had, or are not finite, these are ``None``, and ``reason`` says why.
    """
    if not isinstance(model, PermuteFormerPreTrainedModel):
        raise TypeError(f"model must be one of permuteformer.models, without a wrapper around it; it is {type(model).__name__}")
    batch = _cut(batch, TEXT_LENGTH if task.grid is None else IMAGE_LENGTH).to(model.device)
    lengths = batch.key_mask.sum(-1).tolist()
    if not all(lengths):
        raise ValueError(f"every item of batch must have a real token; they have {', '.join(map(str, lengths))}")
    line = _along_the_line(batch, model.config.causal)
    plane = _on_the_plane(batch, task)
    found: list[_Seen] = []
    looks: dict[str, Any] = {"format": 1, "kind": task.kind, "length": max(lengths), "items": len(batch), "reason": None}
    try:
        with _unchanged(model), _watching(model.base_model, found, batch, line, plane):
            given = inputs(batch, model.config, "lm" if task.kind == "lm" else "classify")
            pooler = getattr(model, "pooler", None)  # which marks global tokens
            marks = {} if pooler is None else pooler.arguments(given["input_ids"], given.get("attention_mask"), all_tokens=True)
            model.base_model(**given, **marks, use_cache=False)
    except NoWeights as error:
        return {**looks, "reason": f"layer {len(found)}: {error}", "kernel": None, "kernel_2d": None, "maps": None}
    return {
        **looks,
        "kernel": {
            "distances": line.distances[0],
            "normalised": all(seen.normalised for seen in found),
            "layers": [_rounded(seen.line) for seen in found],
        },
        "kernel_2d": None
        if plane is None
        else {
            "rows": plane.distances[0],
            "columns": plane.distances[1],
            "layers": [_rounded(seen.plane) for seen in found],
        },
        "maps": {
            "tokens": [_token(task, n) for n in batch.input_ids[0][batch.key_mask[0]][:MAP_LENGTH].tolist()],
            "layers": [_rounded(seen.map, digits=2) for seen in found],
        },
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

    Attention is linear in its values, so the weights are its output for the identity as values. That is checked on the layer's own values;
    ``NoWeights`` is raised where it does not hold.

    >>> from permuteformer import build
    >>> layer = build("linear", ["permute"], hidden_size=32, num_heads=2)
    >>> attention_weights(layer, torch.randn(1, 3, 32)).sum(-1).allclose(torch.ones(1, 2, 3))
    True
    """
    attention, length = layer.attention, x.shape[1]
    tokens = Tokens.build(
        *(x.shape[0], length, x.device),
        positions=positions,
        mask=key_mask,
        global_mask=global_mask,
        ordered=attention.position.decay_axes > 1,
    )
    shown = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if key_mask is None else key_mask
    queries, keys = shown[:, None, :, None], shown[:, None, None, :]
    with without_autocast(x.device):
        projections = (layer.query, layer.query if layer.key is None else layer.key, layer.value)
        q, k, v = (_wide(layer.heads(projection(x))) for projection in projections)
        identity = torch.eye(length, dtype=v.dtype, device=v.device).expand(*q.shape[:2], -1, -1)
        out = attention.mix(q, k, v, tokens, None)[0].masked_fill(~queries, 0)
        try:
            weights = attention.mix(q, k, identity, tokens, None)[0].masked_fill(~(queries & keys), 0)
        except (RuntimeError, TypeError, ValueError) as error:
            raise NoWeights(f"attention {attention.name!r} does not mix values of size {length}: {error}") from error
        if not (weights.isfinite().all() and out.isfinite().all()):
            raise NoWeights(f"the weights of attention {attention.name!r} are not finite")
        v = v.masked_fill(~queries, 0)
        if (weights @ v - out).abs().amax() > NOT_LINEAR * (weights.abs() @ v.abs()).amax():
            raise NoWeights(f"attention {attention.name!r} is not linear in its values, so it has no weights")
    return weights


@dataclass(frozen=True)
class _Pairs:
    """Pairs of real tokens of each item, sorted into those of the same distance."""

    distances: tuple[list[int], ...]
    """On each axis."""
    places: list[Tensor]
    """Of each item, its pairs as places in the weights ``n n`` made flat,"""
    numbers: list[Tensor]
    """and the number of the distance of each."""

    @property
    def count(self) -> Tensor:
        """How many pairs there are of every distance."""
        size = math.prod(map(len, self.distances))
        return torch.stack([torch.bincount(numbers, minlength=size) for numbers in self.numbers]).sum(0)

    def total(self, item: int, weights: Tensor) -> Tensor:
        """``h d``: the sum over an item's pairs of every distance, of its weights ``h n n``. On the CPU, where sums are always the same."""
        places, numbers = self.places[item], self.numbers[item]
        size = math.prod(map(len, self.distances))
        return torch.stack([torch.bincount(numbers, head.flatten()[places].double(), size) for head in weights])

    def mean(self, total: Tensor) -> Tensor:
        """``h d`` or ``h dy dx``: not a number, where there is no pair of a distance."""
        mean: Tensor = (total / self.count).unflatten(1, [len(axis) for axis in self.distances])
        return mean


def _along_the_line(batch: Batch, causal: bool) -> _Pairs:
    """Pairs by i − j. Of causal models, those of queries that see every distance."""
    lengths = batch.key_mask.sum(-1).tolist()
    reach = min(REACH, max(lengths) // 2 if causal else max(lengths) - 1)
    least = 0 if causal else -reach
    pairs = _Pairs((list(range(least, reach + 1)),), [], [])
    for n in lengths:
        i = torch.arange(n)
        distance = i[:, None] - i
        kept = (distance >= least) & (distance <= reach)
        if causal:
            kept[:reach] = False
        pairs.places.append(kept.flatten().nonzero().flatten())
        pairs.numbers.append(distance[kept] - least)
    return pairs


def _on_the_plane(batch: Batch, task: Task) -> _Pairs | None:
    """Pairs of pixels by (dy, dx), for tasks with a grid. What stands around the pixels has a place on the grid, but is not one."""
    if task.grid is None or batch.positions is None:
        return None
    alphabet = task.input.alphabet if isinstance(task, Classification) else None
    others = [] if alphabet is None else [n for n in (alphabet.cls, alphabet.sep) if n is not None]
    rows, columns = (min(REACH_2D, side - 1) for side in task.grid)
    pairs = _Pairs((list(range(-rows, rows + 1)), list(range(-columns, columns + 1))), [], [])
    for ids, mask, positions in zip(batch.input_ids.cpu(), batch.key_mask.cpu(), batch.positions.cpu(), strict=True):
        is_pixel = ~torch.isin(ids[mask], torch.tensor(others, dtype=torch.int64))
        x, y = positions[mask].unbind(-1)
        dx, dy = x[:, None] - x, y[:, None] - y
        kept = is_pixel[:, None] & is_pixel & (dx.abs() <= columns) & (dy.abs() <= rows)
        pairs.places.append(kept.flatten().nonzero().flatten())
        pairs.numbers.append(((dy + rows) * (2 * columns + 1) + dx + columns)[kept])
    return pairs


@dataclass(frozen=True)
class _Seen:
    """What is kept of a layer's weights: ``h d``, ``h dy dx`` and ``l l``."""

    line: Tensor
    plane: Tensor | None
    map: Tensor
    normalised: bool


@contextmanager
def _watching(backbone: nn.Module, found: list[_Seen], batch: Batch, line: _Pairs, plane: _Pairs | None) -> Iterator[None]:
    """Every layer's weights are summed up as it is called, so that one layer's are there at a time."""

    def watch(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert isinstance(layer, MultiHeadAttention)
        found.append(_see(layer, arguments[0], options["tokens"], batch.key_mask, line, plane))

    layers = [module for module in backbone.modules() if isinstance(module, MultiHeadAttention)]
    hooks = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _see(layer: MultiHeadAttention, x: Tensor, tokens: Tokens, key_mask: Tensor, line: _Pairs, plane: _Pairs | None) -> _Seen:
    """Items one after another: weights of a whole batch of images would fill the memory."""
    lines, planes, normalised = [], [], True
    shown = torch.empty(0)
    for row, real in enumerate(key_mask):
        item = slice(row, row + 1)
        at = None if tokens.positions is None else tokens.positions.expand(len(x), -1, -1)[item]
        marked = None if tokens.global_mask is None else tokens.global_mask[item]
        mask = None if real.all() else key_mask[item]
        weights = attention_weights(layer, x[item], positions=at, key_mask=mask, global_mask=marked)[0]
        weights = weights[:, real][:, :, real].cpu()  # h n n
        if row == 0:
            shown = weights[:, :MAP_LENGTH, :MAP_LENGTH].mean(0)
        lines.append(line.total(row, weights))
        if plane is not None:
            planes.append(plane.total(row, weights))
        # Where weights are of both signs, their sum is as exact as they are large.
        off, size = (weights.sum(-1) - 1).abs(), weights.abs().sum(-1).clamp(min=1)
        normalised = normalised and bool((off < 1e-3 * size).all())
    on_plane = None if plane is None else plane.mean(torch.stack(planes).sum(0))
    return _Seen(line.mean(torch.stack(lines).sum(0)), on_plane, shown, normalised)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """The model does not train, and afterwards every part of it does what it did, and random numbers go on as if nothing had been."""
    training = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad(), without_autocast(device):
        model.eval()
        try:
            yield
        finally:
            for module, was in training.items():
                module.training = was


def _cut(batch: Batch, length: int) -> Batch:
    """The first items, and of them the first tokens; of two documents, the first."""
    return replace(
        batch,
        ids=batch.ids[:ITEMS],
        input_ids=batch.input_ids[:ITEMS, :length],
        key_mask=batch.key_mask[:ITEMS, :length],
        labels=batch.labels[:ITEMS],
        positions=None if batch.positions is None else batch.positions[:ITEMS, :length],
        second_input_ids=None,
        second_key_mask=None,
    )


def _token(task: Task, n: int) -> str:
    """A token for a person: a word, a character, the number of a byte that is none, or the shade of a pixel."""
    if isinstance(task, LanguageModelling) and task.unit == "words":
        return printable(task.vocabulary[n], 30)
    if not isinstance(task, (LanguageModelling, Classification)):
        return str(n)
    alphabet = PAPER if isinstance(task, LanguageModelling) else task.input.alphabet
    if n in (alphabet.cls, alphabet.sep):
        return "[CLS]" if n == alphabet.cls else "[SEP]"
    value = n - alphabet.first
    if not 0 <= value < alphabet.count:
        return "[PAD]" if n == alphabet.pad else str(n)
    if task.grid is not None:
        return str(value)
    if alphabet.count == 256:
        return printable(chr(value)) if value < 128 else f"\\x{value:02x}"
    return printable(task.words(dict.fromkeys(task.columns, bytes([value])))[0], 30)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rounded(x: Tensor | None, digits: int = 3) -> Any:
    """Nested lists of numbers of so many digits; ``None`` for what is not a number."""
    if x is None:
        return None
    if x.dim():
        return [_rounded(part, digits) for part in x]
    value = x.item()
    if not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}") if value else 0
