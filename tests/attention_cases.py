"""Calls of linear attention, and what the reference computes for them: shared by the tests of all backends."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch

from permuteformer.ops import reference
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.positions.permute import Permute

B, H, M, V = 2, 3, 10, 4
R = torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)
OPTIONS = {
    "bidirectional": {},
    "causal": {"causal": True},
    "decay": {"causal": True, "log_decay": R.log()},
    "two_sided": {"two_sided": True, "log_decay": R.log()},
}
MODES = tuple(OPTIONS)
MARKS = ("key_mask", "segments", "positions", "global_mask")

every_mode = pytest.mark.parametrize("mode", MODES)


def draw(length, dtype=torch.float64, requires_grad=False):
    """Return q, k, v as projections lay them out: ``b l h d`` seen as ``b h l d``."""
    return [torch.randn(B, length, H, size, dtype=dtype).transpose(1, 2).requires_grad_(requires_grad) for size in (M, M, V)]


def attend(x, mode, tokens=slice(None), **more):
    """Run a mode on some of the tokens of q, k and v and of their marks."""
    more |= {name: more[name][:, tokens] for name in MARKS if more.get(name) is not None}
    arguments = {"feature_map": relu_eps, "transform": Permute(H, M), **OPTIONS[mode], **more}
    return linear_attention(*(t[:, :, tokens] for t in x), **arguments)


@dataclass(unsafe_hash=True)
class Case:
    """A random call. Equal fields make equal tensors."""

    mode: str
    length: int
    axes: int = 1
    masked: bool = False
    packed: bool = False
    has_global: bool = False
    normalize: bool = True
    permuted: bool = True
    far: bool = False
    """Given positions, up to 10^12."""
    heads: int = 3
    features: int = 10
    values: int = 4
    batch: int = 2
    seed: int = 0

    def __post_init__(self):
        torch.manual_seed(self.seed)
        sizes = (self.features, self.features, self.values)
        # As projections lay them out: b l h d seen as b h l d.
        q, k, v = (torch.randn(self.batch, self.length, self.heads, size, dtype=torch.float64).transpose(1, 2) for size in sizes)
        rows = (self.batch, self.length)
        mask = torch.rand(rows) > 0.3 if self.masked else None
        if mask is not None:  # a masked token may hold anything
            q, k, v = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (q, k, v))
        decay = torch.linspace(0.5, 1.0, self.heads, dtype=torch.float64)
        self.tensors, self.mask = (q, k, v), mask
        self.positions = torch.randint(-5, 9, (*rows, self.axes)) if self.axes > 1 else None
        if self.far:
            self.positions = torch.randint(-(10**12), 10**12, (*rows, self.axes))
        self.encoding = Permute(self.heads, self.features, self.axes) if self.permuted else None
        self.log_decay = decay.log() if self.mode in ("decay", "two_sided") else None
        self.segments = (torch.rand(rows) > 0.8).long().cumsum(1) if self.packed else None
        self.global_mask = torch.rand(rows) > 0.8 if self.has_global else None

    @property
    def causal(self):
        return self.mode in ("causal", "decay")

    @property
    def real(self):
        return torch.ones(self.batch, self.length, dtype=torch.bool) if self.mask is None else self.mask

    def run(self, dtype=torch.float64, backend=None, **changes):
        """Output and gradients of q, k, v and log r: a list of tensors in float64. Outputs of masked tokens are zero."""
        inputs = [x.to(dtype).requires_grad_() for x in self.tensors]
        log_decay = None if self.log_decay is None else self.log_decay.clone().requires_grad_()
        given = {
            "feature_map": relu_eps,
            "transform": self.encoding,
            "positions": self.positions,
            "causal": self.causal,
            "log_decay": log_decay,
            "two_sided": self.mode == "two_sided",
            "key_mask": self.mask,
            "segments": self.segments,
            "global_mask": self.global_mask,
            "normalize": self.normalize,
            "backend": backend,
        }
        out, _ = linear_attention(*inputs, **{**given, **changes})
        return self.results(out, [*inputs, log_decay])

    @functools.cache  # noqa: B019 (every backend and instruction set is compared with it)
    def expected(self):
        """The same by the reference. A row with masked tokens is the row without them."""
        inputs = [x.clone().requires_grad_() for x in self.tensors]
        log_decay = None if self.log_decay is None else self.log_decay.clone().requires_grad_()
        rows = []
        for row in range(self.batch):
            real = self.real[row].nonzero().flatten()
            alone = torch.zeros(1, self.heads, 0, self.values, dtype=torch.float64)
            if len(real):
                alone = self._reference(*(x[row : row + 1, :, real] for x in inputs), row, real, log_decay)
            rows.append(torch.zeros(1, self.heads, self.length, self.values, dtype=torch.float64).index_copy(2, real, alone))
        return self.results(torch.cat(rows), [*inputs, log_decay])

    def _reference(self, q, k, v, row, real, log_decay):
        segments = torch.zeros(len(real)) if self.segments is None else self.segments[row, real]
        is_global = torch.zeros(len(real), dtype=torch.bool) if self.global_mask is None else self.global_mask[row, real]
        visible = segments[:, None] == segments
        counted = torch.arange(len(real)) - torch.searchsorted(segments, segments)  # from 0 in every segment
        positions = counted.view(1, -1, 1) if self.positions is None else self.positions[row : row + 1, real]
        decay = None
        if log_decay is not None:
            takes_step = (visible & ~is_global)[None]
            ranks = [reference.ranks(positions, head % self.axes, takes_step) for head in range(self.heads)]
            if self.causal:
                ranks = [torch.arange(len(real))[None]] * self.heads
            decay = reference.decay_weights(log_decay.exp(), torch.stack(ranks, dim=1), is_global[None])
        return reference.attention(
            q,
            k,
            v,
            permutations=axis_permutations(self.encoding) if self.permuted else [],
            positions=positions,
            visible=visible.tril() if self.causal else visible,
            feature_map=relu_eps,
            decay=decay,
            normalize=self.normalize,
        )

    def results(self, out, inputs):
        """The output and gradients of the inputs that are not ``None``; zero where every token is masked."""
        inputs = [x for x in inputs if x is not None]
        hidden = ~self.real[:, None, :, None]
        found = [None] * len(inputs)
        if out.requires_grad:
            found = torch.autograd.grad(out, inputs, self.d_out.to(out.dtype).masked_fill(hidden, 0), allow_unused=True)
        gradients = [torch.zeros_like(x) if d is None else d for x, d in zip(inputs, found, strict=True)]
        return [x.detach().double() for x in (out.masked_fill(hidden, 0), *gradients)]

    @property
    def d_out(self):
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, self.heads, self.length, self.values, dtype=torch.float64, generator=generator)


def axis_permutations(encoding):
    """The permutation of each axis, of all features."""
    identity = torch.arange(encoding.feature_size).expand(encoding.num_heads, -1)
    return [torch.where(encoding.axis == axis, encoding.permutation, identity) for axis in range(encoding.axes)]


def variants(mode, length):
    """All combinations of masks, packing, global tokens and axes for a mode and a length, and positions far away."""
    has_global = (False, True) if mode == "two_sided" else (False,)
    for n, (masked, packed, globals_, axes) in enumerate(itertools.product((False, True), (False, True), has_global, (1, 2))):
        yield Case(mode, length, axes, masked, packed, globals_, normalize=n % 3 != 2, seed=n)
    yield Case(mode, length, axes=3, masked=True, packed=True)
    for axes in (1, 2):
        yield Case(mode, length, axes, far=True)
