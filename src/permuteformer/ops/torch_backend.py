"""Linear attention in blocks of PyTorch operations: runs on any device, in any dtype, for any feature map and encoding.

A block of tokens meets a *carry*: the sums of f(k) v^T and f(k) over keys outside the block. It reads the carry, adds the pairs within
itself, and adds its own keys to the carry of the next block. Features exist for one block at a time. The backward pass saves q, k, v and
the carries and runs each block again ("Sub-linear memory", Likhosherstov et al., 2020).

Scores depend on i - j only. Where positions are consecutive, every block counts from its own first token, so that one table of powers
serves all blocks, and the carry is permuted by -C after C tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from permuteformer.ops.call import LinearCall, LinearState, Tokens
from permuteformer.ops.checks import can_read_values, is_traced, without_autocast
from permuteformer.ops.global_tokens import with_global_tokens

Carry = tuple[Tensor, Tensor]
"""``b h v m``: sum of v_j f(k_j)^T, and ``b h 1 m``: sum of f(k_j) (before the encoding for the plain normaliser)."""
Step = Callable[[int, Carry, Sequence[Tensor], Sequence[Tensor]], tuple[Carry, tuple[Tensor, ...]]]
"""Block number, carry, this block's part of each long tensor, shared tensors -> next carry, this block's part of each output."""


def unsupported(call: LinearCall) -> str | None:
    """Return ``None``: this backend runs every call."""
    return None


def run(call: LinearCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``b h n v``, and the state after the last token, ``b h m v`` and ``b h m``."""
    with without_autocast(call.q.device):
        if call.tokens.global_mask is not None:
            return with_global_tokens(call, run)
        if call.tokens.orders is not None:
            return _run_by_axis(call)
        blocks = _Blocks(call)
        queries, keys = (call.q,) if call.q.shape[2] else (), (call.k, call.v)
        outputs: tuple[Tensor, ...] = ()
        right = blocks.frame(blocks.carry(call.after), blocks.last_size - blocks.end)
        if call.reverse:
            carry, _ = blocks.scan(blocks.right, right, keys, last_first=True)
            carry = blocks.frame(carry, blocks.origin)
        else:
            if call.scans and queries and not call.causal:
                _, outputs = blocks.scan(blocks.right, right, (*queries, *keys), last_first=True)
            carry = blocks.frame(blocks.carry(call.state), -blocks.origin)
            if call.scans:
                carry, outputs = blocks.scan(blocks.left, carry, (*queries, *keys, *outputs))
            elif call.k.shape[2]:
                carry, _ = blocks.scan(blocks.left, carry, keys)
            if queries and not call.scans:
                _, outputs = blocks.scan(blocks.read, carry, queries, last_first=True)
            carry = blocks.frame(carry, blocks.end)
        out = outputs[0] if outputs else call.v.new_zeros(*call.q.shape[:3], call.v.shape[-1])
        return out, carry[0].transpose(-1, -2), carry[1].squeeze(-2)


def block_length(heads: int, features: int, values: int, scans: bool, device: str = "cpu") -> int:
    """Return tokens per block: few enough that features stay in the cache of a CPU, enough that carries are few."""
    if device == "cuda":
        return 128 if scans else 2**14
    cached = min(128 if scans else 512, 2**19 // max(1, heads * features))
    return max(32, cached, -(-features * (values + 1) * 5 // (2 * (features + values))))


def _run_by_axis(call: LinearCall) -> tuple[Tensor, Tensor, Tensor]:
    """Sort each head's tokens by the order of its axis, and run the call on the sorted features without an encoding."""
    tokens, heads = call.tokens, call.k.shape[1]
    assert tokens.orders is not None
    axes, _, length = tokens.orders.shape
    order = tokens.orders[torch.arange(heads, device=tokens.orders.device) % axes].transpose(0, 1)  # b h l
    blocks = _Blocks(replace(call, chunk_size=length))
    (q, plain_q), (k, plain_k, v) = blocks.queries(0, call.q, call.parameters), blocks.keys(0, call.k, call.v, call.parameters)
    # Masked tokens are last in every order, so the sorted masks and segments are those of any axis.
    given = (tokens.mask, tokens.segments, call.query_mask)
    mask, segments, query_mask = (None if x is None else x.gather(1, tokens.orders[0]) for x in given)
    sort = order.unsqueeze(-1)
    changes: dict[str, Any] = {"feature_map": _identity, "parameters": (), "encoding": None, "query_mask": query_mask}
    changes["tokens"] = Tokens(mask=mask, segments=segments)

    def attend(q: Tensor, k: Tensor, v: Tensor, normalizer: str) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.gather(2, sort.expand_as(x)) for x in (q, k, v))
        out, kv, z = run(replace(call, q=q, k=k, v=v, normalizer=normalizer, **changes))
        return torch.empty_like(out).scatter(2, sort.expand_as(out), out), kv, z

    if call.normalizer != "plain":
        out, kv, z = attend(q, k, v, call.normalizer)
        return out.to(call.v.dtype), kv, z
    out, kv, _ = attend(q, k, v, "none")
    total, z, _ = attend(plain_q, plain_k, torch.ones_like(v[..., :1]), "none")
    return _divide(out, total).to(call.v.dtype), kv, z.squeeze(-1)


def _identity(x: Tensor) -> Tensor:
    return x


def _divide(numerator: Tensor, total: Tensor) -> Tensor:
    """Equation 3; zero where a query sees no key."""
    return numerator / total.masked_fill(total == 0, 1)


class _Powers(NamedTuple):
    """Powers of r in a block, where masked tokens take no step. Every exponent is 0 or more, so none overflows."""

    within: Tensor
    """``b h C C``: between two tokens of the block."""
    read: Tensor
    """``b h C 1``: from the block's left edge to each token."""
    write: Tensor
    """``b h C 1``: from each token to the right edge."""
    across: Tensor
    """``b h 1 1``: across the block."""
    read_right: Tensor
    write_right: Tensor


class _Reach(NamedTuple):
    """Which tokens of a block see a carry in a packed row; ``None`` for all."""

    reads: Tensor | None = None
    """``b 1 C 1``: tokens of the carry's segment."""
    writes: Tensor | None = None
    """``b 1 C 1``: tokens of the segment that continues beyond the block."""
    keeps: Tensor | None = None
    """``b 1 1 1``: the carry's segment continues beyond the block."""


class _Blocks:
    """The blocks of a call: features, powers of r, visibility, and the steps of a scan."""

    def __init__(self, call: LinearCall) -> None:
        self.call, self.tokens = call, call.tokens
        (b, h, length, _), size = call.k.shape, call.v.shape[-1]
        self.length = length
        self.chunk = call.chunk_size or block_length(b * h, call.num_features, size, call.scans, call.k.device.type)
        self.slices = self._cut(length)
        encoding, is_step = call.encoding, call.causal and length == 1
        counted = self.tokens.positions is None and call.query_positions is None and length > 0
        self.is_relative = encoding is not None and encoding.is_group and counted and not is_step and _is_one_run(self.tokens.mask)
        self.positions = call.positions() if encoding is not None and not self.is_relative and length else None
        self.origin = self.end = torch.zeros((), dtype=torch.int64, device=call.k.device)  # of the row's first and last edge
        if self.is_relative:
            mask, after = self.tokens.mask, self.tokens.next_position(call.start, length, call.first_segment)
            self.origin, self.end = call.start, after
            if mask is not None:
                index = torch.arange(1, length + 1, device=mask.device)
                self.origin = call.start - mask.long().argmax(-1)
                self.end = after + length - torch.where(mask, index, 0).amax(-1)
        self._tables: dict[tuple[int, int], Any] = {}

    def _cut(self, length: int) -> list[slice]:
        return [slice(start, min(start + self.chunk, length)) for start in range(0, length, self.chunk)]

    def size(self, n: int) -> int:
        """Return the tokens of block n."""
        return int(self.slices[n].stop - self.slices[n].start)

    @property
    def last_size(self) -> int:
        """Tokens of the last block."""
        return self.size(len(self.slices) - 1) if self.slices else 0

    def scan(self, step: Step, carry: Carry, xs: Sequence[Tensor], last_first: bool = False) -> tuple[Carry, tuple[Tensor, ...]]:
        """Run ``step`` over the blocks of the long tensors ``xs``; its gradient runs each block again."""
        call = self.call
        slices = self.slices if xs[0].shape[2] == self.length else self._cut(xs[0].shape[2])
        order = range(len(slices) - 1, -1, -1) if last_first else range(len(slices))
        shared = (*call.parameters, *(() if call.log_decay is None else (call.log_decay,)))
        if not is_traced() and not (torch.is_grad_enabled() and _is_trained(call.encoding)):
            kv, z, *outputs = _Scan.apply(_ScanPlan(step, slices, order, len(xs)), *carry, *xs, *shared)
            return (kv, z), tuple(outputs)
        parts: dict[int, tuple[Tensor, ...]] = {}
        for n in order:  # a compiler itself decides what to save
            carry, parts[n] = step(n, carry, [x[:, :, slices[n]] for x in xs], shared)
        return carry, tuple(torch.cat(part, dim=2) for part in zip(*(parts[n] for n in sorted(parts)), strict=True))

    # Steps: arguments and results as of ``Step``.

    def left(self, n: int, carry: Carry, xs: Sequence[Tensor], shared: Sequence[Tensor]) -> tuple[Carry, tuple[Tensor, ...]]:
        """Output of block n from the carry from the left, its own pairs, and sums over later tokens; without queries, the carry only."""
        *q, k, v = xs[: 2 if len(xs) == 2 else 3]
        keys, powers, reach = self.keys(n, k, v, shared), self._powers(n, shared), self._reach_left(n)
        outputs: tuple[Tensor, ...] = ()
        if q:
            queries = self.queries(n, q[0], shared)
            parts = [self._within(n, queries, keys, powers), self._read(queries, carry, powers and powers.read, reach.reads)]
            parts += [(xs[3], xs[4])] if len(xs) == 5 else []
            outputs = (self._finish(*(sum(part[1:], part[0]) for part in zip(*parts, strict=True))),)
        carry = self._write(keys, carry, powers and powers.write, powers, reach)
        return self._move(carry, self.size(n)), outputs

    def right(self, n: int, carry: Carry, xs: Sequence[Tensor], shared: Sequence[Tensor]) -> tuple[Carry, tuple[Tensor, ...]]:
        """Sums over keys after block n for its queries: numerators ``b h C v`` and weights ``b h C 1``; and the carry to the left."""
        *q, k, v = xs
        keys, powers, reach = self.keys(n, k, v, shared), self._powers(n, shared), self._reach_right(n)
        outputs = self._read(self.queries(n, q[0], shared), carry, powers and powers.read_right, reach.reads) if q else ()
        carry = self._write(keys, carry, powers and powers.write_right, powers, reach)
        return self._move(carry, -self.size(n - 1) if n else 0), outputs

    def read(self, n: int, carry: Carry, xs: Sequence[Tensor], shared: Sequence[Tensor]) -> tuple[Carry, tuple[Tensor, ...]]:
        """Output of block n from the sum over all keys."""
        carry = self._move(carry, -self.size(n)) if self.is_relative else carry
        return carry, (self._finish(*self._read(self.queries(n, xs[0], shared), carry, None, None)),)

    # Features

    def queries(self, n: int, q: Tensor, shared: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Features of a block's queries for the scores and for the normaliser, ``b h C m`` each."""
        apart = self.call.query_positions
        mask = None if apart is not None else self.tokens.mask if self.call.query_mask is None else self.call.query_mask
        plain = self._features(n, q, shared, mask)
        if self.call.encoding is None:
            return plain, plain
        tables = self._table(n) if apart is None else self.call.encoding.tables(apart[:, n * self.chunk : (n + 1) * self.chunk])
        x = self.call.encoding.transform(plain, tables)
        return x, (plain if self.call.normalizer == "plain" else x)

    def keys(self, n: int, k: Tensor, v: Tensor, shared: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Features of a block's keys for the scores and for the normaliser, and its values; zero for masked tokens."""
        plain = self._features(n, k, shared, self.tokens.mask)
        x = plain if self.call.encoding is None else self.call.encoding.transform(plain, self._table(n))
        return x, (plain if self.call.normalizer == "plain" else x), self._masked(n, v, self.tokens.mask)

    def _features(self, n: int, x: Tensor, shared: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        return self._masked(n, self.call.feature_map(self._masked(n, x, mask), *shared[: len(self.call.parameters)]), mask)

    def _masked(self, n: int, x: Tensor, mask: Tensor | None) -> Tensor:
        """Zero for masked tokens: a weight of zero would not hide a NaN in the padding."""
        x = x.to(self.call.dtype)
        return x if mask is None else x.masked_fill(~mask[:, None, self.slices[n], None], 0)

    def _table(self, n: int) -> Any:
        assert self.call.encoding is not None
        if self.is_relative:
            return self._relative_table(0, self.size(n))
        assert self.positions is not None
        return self.call.encoding.tables(self.positions[:, self.slices[n]])

    def _relative_table(self, start: int, stop: int) -> Any:
        """Tables of positions start … stop - 1, which all blocks of this size share."""
        assert self.call.encoding is not None
        if (start, stop) not in self._tables:
            positions = torch.arange(start, stop, device=self.call.k.device).view(1, -1, 1)
            self._tables[start, stop] = self.call.encoding.tables(positions)
        return self._tables[start, stop]

    # Carries

    def carry(self, state: LinearState | None) -> Carry:
        """Return a state as a carry; zeros for none."""
        call = self.call
        if state is not None:
            return state.kv.to(call.dtype).transpose(-1, -2), state.z.to(call.dtype).unsqueeze(-2)
        (b, h, _, v), m = call.v.shape, call.num_features
        return torch.zeros(b, h, v, m, device=call.v.device, dtype=call.dtype), torch.zeros(
            b, h, 1, m, device=call.v.device, dtype=call.dtype
        )

    def frame(self, carry: Carry, shift: Tensor) -> Carry:
        """Shift the positions of a carry's keys, ``b``, between the absolute frame and that of a block."""
        encoding = self.call.encoding
        if not self.is_relative or encoding is None or shift.dim() == 0:
            return carry
        return self._transform(carry, encoding.tables(shift.view(-1, 1, 1)))

    def _move(self, carry: Carry, tokens: int) -> Carry:
        """The carry as seen from ``tokens`` further on."""
        if not self.is_relative or not tokens:
            return carry
        return self._transform(carry, self._relative_table(-tokens, 1 - tokens))

    def _transform(self, carry: Carry, tables: Any) -> Carry:
        encoding = self.call.encoding
        assert encoding is not None
        kv, z = carry
        return encoding.transform(kv, tables), z if self.call.normalizer == "plain" else encoding.transform(z, tables)

    def _read(self, queries: Sequence[Tensor], carry: Carry, weight: Tensor | None, reads: Tensor | None) -> tuple[Tensor, Tensor]:
        """Numerators ``b h C v`` and weights ``b h C 1`` that the carry gives the queries of a block."""
        parts = queries[0] @ carry[0].transpose(-1, -2), queries[1] @ carry[1].transpose(-1, -2)
        if weight is not None:
            parts = parts[0] * weight, parts[1] * weight
        return parts if reads is None else (parts[0].masked_fill(~reads, 0), parts[1].masked_fill(~reads, 0))

    def _write(self, keys: Sequence[Tensor], carry: Carry, weight: Tensor | None, powers: _Powers | None, reach: _Reach) -> Carry:
        """The carry with the block's keys added."""
        (k, k_total, v), (kv, z) = keys, carry
        if reach.keeps is not None:
            kv, z = kv.masked_fill(~reach.keeps, 0), z.masked_fill(~reach.keeps, 0)
        if reach.writes is not None:
            k, k_total, v = (x.masked_fill(~reach.writes, 0) for x in (k, k_total, v))
        if powers is None or weight is None:
            return kv + v.transpose(-1, -2) @ k, z + k_total.sum(-2, keepdim=True)
        return kv * powers.across + (v * weight).transpose(-1, -2) @ k, z * powers.across + weight.transpose(-1, -2) @ k_total

    # Pairs within a block

    def _within(self, n: int, queries: Sequence[Tensor], keys: Sequence[Tensor], powers: _Powers | None) -> tuple[Tensor, Tensor]:
        """Numerators and weights from the pairs inside a block."""
        (q, q_total), (k, k_total, v) = queries, keys
        segments = None if self.tokens.segments is None else self.tokens.segments[:, self.slices[n]]
        same = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]

        def visible(x: Tensor) -> Tensor:
            x = x.tril() if self.call.causal else x
            return x if same is None else x.masked_fill(~same, 0)

        def weights(q: Tensor, k: Tensor) -> Tensor:
            scores = q @ k.transpose(-1, -2)
            return visible(scores if powers is None else scores * powers.within)

        pairs = weights(q, k)
        totals = (weights(q_total, k_total) if self.call.normalizer == "plain" else pairs).sum(-1, keepdim=True)
        if not (self.call.causal or same is not None) or (can_read_values(v) and bool(v.sum().isfinite())):
            return pairs @ v, totals
        # A weight of zero does not hide a NaN: compute without it, and give it to the queries that see it.
        bad = ~v.isfinite()
        seen = visible(torch.ones_like(pairs[:, :1])) @ bad.to(v.dtype) > 0
        return (pairs @ v.masked_fill(bad, 0)).masked_fill(seen, torch.nan), totals

    def _finish(self, numerator: Tensor, total: Tensor) -> Tensor:
        return (numerator if self.call.normalizer == "none" else _divide(numerator, total)).to(self.call.v.dtype)

    def _powers(self, n: int, shared: Sequence[Tensor]) -> _Powers | None:
        if self.call.log_decay is None:
            return None
        log, mask = shared[-1].to(self.call.dtype).view(-1, 1, 1), self.tokens.mask
        real = torch.ones(1, self.size(n), dtype=torch.int64, device=log.device) if mask is None else mask[:, self.slices[n]].long()
        count = real.cumsum(-1).view(len(real), 1, -1, 1)  # b 1 C 1: steps up to each token, its own among them
        total, before = count[:, :, -1:], count - real.view_as(count)
        exponents = ((count - count.transpose(-1, -2)).abs(), count, total - count, total, total - before, before)
        return _Powers(*((log * exponent).exp() for exponent in exponents))

    def _reach_left(self, n: int) -> _Reach:
        if self.tokens.segments is None:
            return _Reach()
        here = self.tokens.segments[:, self.slices[n]]
        before = self.tokens.segments[:, self.slices[n].start - 1] if n else self.call.first_segment
        return _meet(here, here[:, -1], before)

    def _reach_right(self, n: int) -> _Reach:
        if self.tokens.segments is None:
            return _Reach()
        block, last = self.slices[n], None if self.call.after is None else self.call.after.segment
        here = self.tokens.segments[:, block]
        return _meet(here, here[:, 0], self.tokens.segments[:, block.stop] if block.stop < self.length else last)


def _meet(here: Tensor, leaving: Tensor, carried: Tensor | None) -> _Reach:
    writes = (here == leaving[:, None])[:, None, :, None]
    if carried is None:  # the carry is zero
        return _Reach(None, writes, None)
    return _Reach((here == carried[:, None])[:, None, :, None], writes, (leaving == carried)[:, None, None, None])


def _is_one_run(mask: Tensor | None) -> bool:
    """Return whether the real tokens of every row are neighbours, so that positions follow from the first one."""
    if mask is None:
        return True
    begins = torch.nn.functional.pad(mask, (1, 0))[:, :-1] < mask
    return can_read_values(mask) and not bool((begins.sum(-1) > 1).any())


def _is_trained(encoding: Any) -> bool:
    """Return whether the transform of an encoding has parameters: their gradient needs autograd through all blocks at once."""
    parts = getattr(encoding, "encodings", [encoding])
    return any(p.requires_grad for part in parts if "transform" in getattr(part, "hooks", ()) for p in part.parameters())


@dataclass(frozen=True)
class _ScanPlan:
    step: Step
    slices: Sequence[slice]
    order: range
    inputs: int
    """How many tensors are long; the others are shared by all blocks."""


class _Scan(torch.autograd.Function):
    """A scan whose backward pass runs each block again, from the carry that it met."""

    @staticmethod
    def forward(ctx: Any, plan: _ScanPlan, kv: Tensor, z: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        xs, shared = tensors[: plan.inputs], tensors[plan.inputs :]
        carry, met, outputs = (kv, z), list[Tensor](), list[Tensor]()
        needs_grad = any(ctx.needs_input_grad)
        for n in plan.order:
            if needs_grad:
                met += carry
            block = plan.slices[n]
            carry, parts = plan.step(n, carry, [x[:, :, block] for x in xs], shared)
            if parts and not outputs:
                outputs = [_like(part, xs[0].shape[2]) for part in parts]
            for output, part in zip(outputs, parts, strict=True):
                output[:, :, block] = part
        ctx.plan = plan
        ctx.save_for_backward(*tensors, *met)
        return (*carry, *outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_kv: Tensor, d_z: Tensor, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        plan: _ScanPlan = ctx.plan
        needs = ctx.needs_input_grad[3:]
        saved = ctx.saved_tensors
        tensors, met = saved[: len(needs)], saved[len(needs) :]
        xs, shared = tensors[: plan.inputs], [x.detach().requires_grad_(n) for x, n in zip(tensors, needs, strict=True)][plan.inputs :]
        d_xs = [torch.empty_like(x) if need else None for x, need in zip(xs, needs, strict=False)]
        d_shared = [torch.zeros_like(x) if x.requires_grad else None for x in shared]
        d_carry = (d_kv, d_z)
        with without_autocast(d_kv.device):
            for place, n in reversed(list(enumerate(plan.order))):
                block = plan.slices[n]
                leaves = [x[:, :, block].detach().requires_grad_(need) for x, need in zip(xs, needs, strict=False)]
                carry = tuple(x.detach().requires_grad_() for x in met[2 * place : 2 * place + 2])
                with torch.enable_grad():
                    after, parts = plan.step(n, carry, leaves, shared)
                d_parts = [d[:, :, block] for d in d_outputs]
                inputs = (*carry, *leaves, *shared)
                *d_carry, d_rest = _gradients((*after, *parts), (*d_carry, *d_parts), inputs)  # type: ignore[assignment]
                for d_x, found in zip(d_xs, d_rest, strict=False):
                    if d_x is not None:
                        d_x[:, :, block] = found
                for total, found in zip(d_shared, d_rest[len(leaves) :], strict=True):
                    if total is not None:
                        total += found
        return None, *d_carry, *d_xs, *d_shared


def _gradients(outputs: Sequence[Tensor], d_outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of the two tensors of a carry, and of the other inputs; zero where an input needs none."""
    reached = [(y, d.to(y.dtype)) for y, d in zip(outputs, d_outputs, strict=True) if y.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad([y for y, _ in reached], wanted, [d for _, d in reached], allow_unused=True) if reached else ())
    all_found = [next(found, None) if x.requires_grad else None for x in inputs]
    kv, z, *rest = (torch.zeros_like(x) if d is None else d for x, d in zip(inputs, all_found, strict=True))
    return kv, z, rest


def _like(part: Tensor, length: int) -> Tensor:
    """An output ``b h l v`` for blocks like ``part``, laid out so that merging the heads copies nothing."""
    b, h, _, size = part.shape
    return part.new_empty(b, length, h, size).transpose(1, 2)
