"""What one block of a sequence does in linear attention: the mathematics of the blocked passes.

What the keys outside a block leave behind is a carry of m x (v + 1) numbers a head. A block reads the carry, adds the
pairs within itself, and writes its own keys into the carry for the next block.

Positions cost no table. Scores depend on i - j alone, so where positions are consecutive every block counts from its own
first token (the powers of one block serve all), and the carry is moved by -C when C tokens have passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from permuteformer.ops.checks import can_look_at
from permuteformer.ops.permutation import Rotation


class Transform(Protocol):
    """A linear map of the features of each token by its position: see ``positions.base.PositionEncoding``."""

    @property
    def is_group(self) -> bool: ...

    def tables(self, positions: Tensor) -> Any: ...

    def transform(self, x: Tensor, tables: Any) -> Tensor: ...

    def rotation(self, device: torch.device) -> Rotation | None: ...


class Carry(NamedTuple):
    """What keys outside a block leave behind, decayed to the block's edge."""

    kv: Tensor
    """``b h v m``: sum of v_j f(k_j)^T."""
    z: Tensor
    """``b h 1 m``: sum of f(k_j), or of the features before the transform."""


class Decays(NamedTuple):
    """Powers of r for a block of C tokens, t = 0 … C-1. Every exponent is 0 or more, so none overflows."""

    within: Tensor
    """``h C C``: r^|t - t'|."""
    read: Tensor
    """``h C 1``: r^(t+1), what is left of the carry at token t."""
    write: Tensor
    """``h C 1``: r^(C-1-t), what is left of token t at the block's end."""
    across: Tensor
    """``h 1 1``: r^C."""
    read_right: Tensor
    """``h C 1``: r^(C-t), what is left at token t of the carry from the right."""
    write_right: Tensor
    """``h C 1``: r^t."""

    def of_rows(self, shown: Tensor) -> Decays:
        """The same for rows ``b C`` where only the tokens that are ``shown`` take a step: ``b h …`` in place of ``h …``."""
        powers = torch.cat([self.write_right, self.across], dim=-2)[..., 0]  # h C+1: r^0 … r^C
        count = shown.cumsum(-1)  # b C: steps up to token t, its own among them
        total = count[:, -1:]
        before = (count - 1).clamp(min=0)

        def weight(steps: Tensor) -> Tensor:
            return powers[:, steps].transpose(0, 1)

        return Decays(
            within=weight((count.unsqueeze(-1) - count.unsqueeze(-2)).abs()),
            read=weight(count).unsqueeze(-1),
            write=weight(total - count).unsqueeze(-1),
            across=weight(total).unsqueeze(-1),
            read_right=weight((total - before).clamp(max=shown.shape[-1])).unsqueeze(-1),
            write_right=weight(before).unsqueeze(-1),
        )


class Reach(NamedTuple):
    """Who sees whom where a row holds several segments; ``None`` is everybody."""

    same: Tensor | None
    """``b 1 C C``: tokens t and t' are of one segment."""
    reads: Tensor | None = None
    """``b 1 C 1``: token t is of the segment that the carry is of."""
    writes: Tensor | None = None
    """``b 1 C 1``: token t is of the segment that goes on beyond the block."""
    keeps: Tensor | None = None
    """``b 1 1 1``: the carry's segment goes on beyond the block."""


@dataclass
class Blocks:
    """A linear attention to be computed: everything about it that no gradient flows to."""

    length: int
    chunk: int
    feature_map: Callable[..., Tensor]
    transform: Transform | None
    positions: Tensor | None
    """``b l a``, or ``None`` for consecutive positions, counted by each block from its first token."""
    key_mask: Tensor | None
    segments: Tensor | None
    first_segment: Tensor | None
    """``b``: the segment that the initial carry is of; ``None`` where there is none."""
    causal: bool
    normalize: bool
    plain_normalizer: bool
    dtype: torch.dtype
    device: torch.device
    last_segment: Tensor | None = None
    """``b``: the segment that the carry from the right of the last block is of; ``None`` where there is none."""

    def __post_init__(self) -> None:
        starts = range(0, self.length, self.chunk)
        self.slices = [slice(start, min(start + self.chunk, self.length)) for start in starts]
        self.sizes = {self.size(0), self.size(len(self.slices) - 1)}
        """The common size of a block, and that of the last one."""
        self._relative: dict[int, Any] = {}
        self._moves: dict[int, Any] = {}
        if self.transform is not None and self.positions is None:
            for size in self.sizes:
                self._relative[size] = self.transform.tables(torch.arange(size, device=self.device).view(1, -1, 1))

    def size(self, n: int) -> int:
        return self.slices[n].stop - self.slices[n].start

    # Features

    def queries(self, n: int, q: Tensor, tables: Any, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Features of a block's queries, for the normaliser and for the scores: ``b h C m`` twice."""
        plain = self.feature_map(self._shown(n, q), *parameters)
        q = plain if self.transform is None else self.transform.transform(plain, tables)
        return (plain if self.plain_normalizer else q), q

    def keys(self, n: int, k: Tensor, v: Tensor, tables: Any, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Features of a block's keys, for the normaliser and for the scores, and its values: nothing where hidden."""
        plain = self._shown(n, self.feature_map(self._shown(n, k), *parameters))
        k = plain if self.transform is None else self.transform.transform(plain, tables)
        return (plain if self.plain_normalizer else k), k, self._shown(n, v)

    def _shown(self, n: int, x: Tensor) -> Tensor:
        """Zero for hidden tokens of a block: not their weight alone, as zero times a NaN in the padding is NaN."""
        x = x.to(self.dtype)
        return x if self.key_mask is None else x.masked_fill(~self.key_mask[:, None, self.slices[n], None], 0)

    def tables(self, n: int) -> Any:
        if self.transform is None:
            return None
        if self.positions is None:
            return self._relative[self.size(n)]
        return self.transform.tables(self.positions[:, self.slices[n]])

    def move(self, carry: Carry, tokens: int) -> Carry:
        """The carry as seen from ``tokens`` further on: its keys' positions count from there."""
        if self.transform is None or self.positions is not None:
            return carry
        if tokens not in self._moves:
            self._moves[tokens] = self.transform.tables(torch.full((1, 1, 1), -tokens, device=self.device))
        return transport(self.transform, carry, self._moves[tokens], self.plain_normalizer)

    def decays(self, n: int, decays: Decays | None) -> Decays | None:
        """Powers of r in block n, where hidden tokens take no step."""
        if decays is None or self.key_mask is None:
            return decays
        return decays.of_rows(self.key_mask[:, self.slices[n]])

    # Reach

    def reach_left(self, n: int) -> Reach:
        """Who sees whom in block n, and how it meets the carry from the left."""
        if self.segments is None:
            return Reach(None)
        block = self.slices[n]
        here = self.segments[:, block]
        same = here[:, None, :, None] == here[:, None, None, :]
        before = self.first_segment if n == 0 else self.segments[:, block.start - 1]
        return self._meet(same, here, here[:, -1], before)

    def reach_right(self, n: int) -> Reach:
        """How block n meets the carry from the right: its first segment may have begun in the block before."""
        if self.segments is None:
            return Reach(None)
        block = self.slices[n]
        here = self.segments[:, block]
        after = self.segments[:, block.stop] if block.stop < self.length else self.last_segment
        return self._meet(None, here, here[:, 0], after)

    @staticmethod
    def _meet(same: Tensor | None, here: Tensor, leaving: Tensor, carried: Tensor | None) -> Reach:
        writes = (here == leaving[:, None])[:, None, :, None]
        if carried is None:  # no carry, or one that is zero
            return Reach(same, None, writes, None)
        return Reach(same, (here == carried[:, None])[:, None, :, None], writes, (leaving == carried)[:, None, None, None])

    # The three things a block does

    def read(self, q_total: Tensor, q: Tensor, carry: Carry, weight: Tensor | None, reads: Tensor | None) -> tuple[Tensor, Tensor]:
        """Numerator ``b h C v`` and normaliser ``b h C 1`` that the carry gives to the queries of a block."""
        numerator, total = q @ carry.kv.transpose(-1, -2), q_total @ carry.z.transpose(-1, -2)
        if weight is not None:
            numerator, total = numerator * weight, total * weight
        if reads is not None:
            numerator, total = numerator.masked_fill(~reads, 0), total.masked_fill(~reads, 0)
        return numerator, total

    def write(
        self, k_total: Tensor, k: Tensor, v: Tensor, carry: Carry, decays: Decays | None, reach: Reach, from_right: bool = False
    ) -> Carry:
        """The carry after the block's keys have joined it."""
        kv, z = carry
        if reach.keeps is not None:
            kv, z = kv.masked_fill(~reach.keeps, 0), z.masked_fill(~reach.keeps, 0)
        if reach.writes is not None:
            k_total, k, v = (x.masked_fill(~reach.writes, 0) for x in (k_total, k, v))
        if decays is None:
            return Carry(kv + v.transpose(-1, -2) @ k, z + k_total.sum(-2, keepdim=True))
        weight = decays.write_right if from_right else decays.write
        new_kv, new_z = (v * weight).transpose(-1, -2) @ k, weight.transpose(-1, -2) @ k_total
        return Carry(kv * decays.across + new_kv, z * decays.across + new_z)

    def within(
        self, queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor, Tensor], decays: Decays | None, same: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Numerator and normaliser from the pairs inside a block."""
        (q_total, q), (k_total, k, v) = queries, keys
        weights = self._weights(q, k, decays, same)
        totals = self._weights(q_total, k_total, decays, same) if self.plain_normalizer else weights
        hides = self.causal or same is not None
        if hides and not (can_look_at(v) and bool(v.sum().isfinite())):
            # A weight of zero does not hide a NaN: take it out, and give it to those who see it.
            bad = ~v.isfinite()
            visible = torch.ones_like(weights[:, :1])
            visible = visible.tril() if self.causal else visible
            visible = visible if same is None else visible.masked_fill(~same, 0)
            numerator = (weights @ v.masked_fill(bad, 0)).masked_fill(visible @ bad.to(v.dtype) > 0, torch.nan)
        else:
            numerator = weights @ v
        return numerator, totals.sum(-1, keepdim=True)

    def _weights(self, q: Tensor, k: Tensor, decays: Decays | None, same: Tensor | None) -> Tensor:
        """Weights of the pairs inside a block, ``b h C C``: zero, whatever a NaN says, where a query does not see a key."""
        scores = q @ k.transpose(-1, -2)
        if decays is not None:
            scores = scores * decays.within
        if self.causal:
            scores = scores.tril()
        return scores if same is None else scores.masked_fill(~same, 0)

    def divide(self, numerator: Tensor, total: Tensor) -> Tensor:
        """Equation 3; zero where a query sees no key."""
        return numerator / total.masked_fill(total == 0, 1) if self.normalize else numerator

    # Blocks as functions of tensors, which the passes below call forward and differentiate

    def scan_block(
        self, n: int, q: Tensor, k: Tensor, v: Tensor, left: Carry, right: Carry | None, decays: Decays | None, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output of block n, and the carry it hands to block n + 1."""
        tables, reach, decays = self.tables(n), self.reach_left(n), self.decays(n, decays)
        queries, keys = self.queries(n, q, tables, parameters), self.keys(n, k, v, tables, parameters)
        numerator, total = self.within(queries, keys, decays, reach.same)
        parts = [self.read(*queries, left, None if decays is None else decays.read, reach.reads)]
        if right is not None:
            weight = None if decays is None else decays.read_right
            parts.append(self.read(*queries, right, weight, self.reach_right(n).reads))
        for part in parts:
            numerator, total = numerator + part[0], total + part[1]
        return self.divide(numerator, total), *self.move(self.write(*keys, left, decays, reach), self.size(n))

    def right_block(
        self, n: int, k: Tensor, v: Tensor, right: Carry, decays: Decays | None, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The carry from the right that block n hands to block n - 1."""
        keys = self.keys(n, k, v, self.tables(n), parameters)
        carry = self.write(*keys, right, self.decays(n, decays), self.reach_right(n), from_right=True)
        return self.move(carry, -self.size(n - 1))

    def sum_block(self, n: int, k: Tensor, v: Tensor, carry: Carry, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The carry with the keys of block n, seen from block n + 1: for attention that sees everything."""
        keys = self.keys(n, k, v, self.tables(n), parameters)
        return self.move(self.write(*keys, carry, None, Reach(None)), self.size(n))

    def key_block(self, n: int, k: Tensor, v: Tensor, weight: Tensor | None, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """What the keys of block n come to by themselves, each by its weight ``b h C 1``. Positions are to be given."""
        k_total, k, v = self.keys(n, k, v, self.tables(n), parameters)
        if weight is None:
            return v.transpose(-1, -2) @ k, k_total.sum(-2, keepdim=True)
        return (v * weight).transpose(-1, -2) @ k, weight.transpose(-1, -2) @ k_total

    def read_block(self, n: int, q: Tensor, carry: Carry, parameters: Sequence[Tensor]) -> Tensor:
        return self.divide(*self.read(*self.queries(n, q, self.tables(n), parameters), carry, None, None))


def transport(transform: Transform, carry: Carry, tables: Any, plain_normalizer: bool) -> Carry:
    """The carry with all its keys' positions moved by what ``tables``, of ``b 1 a`` positions, say."""
    kv = transform.transform(carry.kv, tables)
    return Carry(kv, carry.z if plain_normalizer else transform.transform(carry.z, tables))


def decay_powers(log_decay: Tensor, size: int) -> Decays:
    """Powers of r for a block of ``size`` tokens, from log r ``h``."""
    t = torch.arange(size, device=log_decay.device, dtype=log_decay.dtype)
    log = log_decay[:, None, None]
    return Decays(
        within=(log * (t[:, None] - t).abs()).exp(),
        read=(log * (t + 1)[:, None]).exp(),
        write=(log * (size - 1 - t)[:, None]).exp(),
        across=(log * size).exp(),
        read_right=(log * (size - t)[:, None]).exp(),
        write_right=(log * t[:, None]).exp(),
    )


def block_length(heads: int, features: int, values: int, causal: bool) -> int:
    """Tokens a block: few enough that their features stay in the cache, so many that the carry between blocks is small beside them."""
    cached = min(128 if causal else 512, 2**19 // max(1, heads * features))
    return max(32, cached, -(-features * (values + 1) * 5 // (2 * (features + values))))
