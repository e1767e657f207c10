"""Sequence parallelism: rows whose tokens are sharded across processes.

A shard needs from the others only the state of their keys, m x (v + 1) numbers per head, so the traffic does not depend on the length.
Masked tokens take no position and no step of the decay: shards may have any lengths from 1, and padding may be anywhere.

Each process differentiates its own loss. The backward pass communicates too, and gives the gradient of the *sum* of the losses of all
processes with respect to the tensors of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from permuteformer.ops import linear
from permuteformer.ops.call import LinearCall, LinearState, Tokens
from permuteformer.ops.checks import without_autocast
from permuteformer.ops.global_tokens import with_global_tokens


class Shards(NamedTuple):
    """Real tokens and segments of each row on all processes, ``n b``, in the order of ranks."""

    tokens: Tensor
    """The number of real tokens."""
    first: Tensor | None = None
    """The segment of the first real token, in packed rows."""
    last: Tensor | None = None
    tokens_of_last: Tensor | None = None
    """Real tokens of the last segment."""

    def before(self, rank: int) -> Tensor:
        """``b``: real tokens of earlier processes in the segment that continues on this one: where its positions start."""
        if self.first is None or self.last is None or self.tokens_of_last is None:
            return self.tokens[:rank].sum(0)
        return torch.where(self.last[:rank] == self.first[rank], self.tokens_of_last[:rank], 0).sum(0)

    def neighbours(self, from_right: bool) -> Tensor | None:
        """``n b``: the segment of the last real token before each shard, or of the first one after it."""
        if self.first is None or self.last is None:
            return None
        none = torch.iinfo(torch.int64).max if from_right else torch.iinfo(torch.int64).min
        if from_right:
            found = torch.where(self.tokens > 0, self.first, none).flip(0).cummin(0).values
        else:
            found = torch.where(self.tokens > 0, self.last, none).cummax(0).values
        found = torch.cat([torch.full_like(found[:1], none), found[:-1]])
        return found.flip(0) if from_right else found

    def passes(self, from_right: bool) -> Tensor | None:
        """``n b`` bool: whether a state crosses each shard: its segment continues beyond, or the shard has no real token."""
        beside, leaving = self.neighbours(from_right), self.first if from_right else self.last
        return None if beside is None or leaving is None else (self.tokens == 0) | (leaving == beside)


class SequenceGroup:
    """Processes that hold one shard each of the same rows, in the order of their ranks.

    All communication goes through this class, which counts it: ``bytes_sent`` and ``messages`` of this process.

    Args:
        group: of ``torch.distributed``, for example one dimension of a device mesh; default: all processes.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun does it for more than one
    >>> SequenceGroup().bytes_sent
    0
    >>> dist.destroy_process_group()
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "sequence parallelism needs several processes: start them with torchrun, and call torch.distributed.init_process_group()"
            )
        self.group: Any = group if group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the group: pass the group that it belongs to")
        self.bytes_sent = 0
        self.messages = 0

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes; gradients are summed likewise."""
        summed: Tensor = _Total.apply(x, self)
        return summed

    def shards(self, mask: Tensor | None, segments: Tensor | None, batch: int, length: int, device: torch.device) -> Shards:
        """Gather the sizes and segments of all shards. Either all processes pass segments, or none."""
        real = torch.ones(batch, length, dtype=torch.bool, device=device) if mask is None else mask
        own = [real.sum(-1)]
        if segments is not None:
            places = torch.arange(length, device=device)
            last = segments.gather(1, torch.where(real, places, 0).amax(-1, keepdim=True))  # b 1
            own += [segments.gather(1, real.long().argmax(-1, keepdim=True))[:, 0], last[:, 0], (real & (segments == last)).sum(-1)]
        sizes = torch.stack(own)
        found = [torch.empty_like(sizes) for _ in range(self.size)]
        self._count(sizes)
        dist.all_gather(found, sizes, group=self.group)
        return Shards(*torch.stack(found, dim=1))

    def sum_up(self, x: Tensor) -> Tensor:
        """Return the sum over the processes, without a gradient."""
        x = x.clone(memory_format=torch.contiguous_format)
        self._count(x)
        dist.all_reduce(x, group=self.group)
        return x

    def exchange(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """Send ``x`` to one process of the group and receive a tensor of the same shape from another; ``None`` for none."""
        operations = []
        if to is not None:
            self._count(x)
            operations.append(self._message(dist.isend, x.contiguous(), to))
        received = None if source is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        if received is not None and source is not None:
            operations.append(self._message(dist.irecv, received, source))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return received

    def _message(self, operation: Callable[..., Any], x: Tensor, other: int) -> dist.P2POp:
        return dist.P2POp(operation, x, dist.get_global_rank(self.group, other), group=self.group)

    def _count(self, x: Tensor) -> None:
        self.bytes_sent += x.numel() * x.element_size()
        self.messages += 1


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run(call: LinearCall, group: SequenceGroup, backend: str | None = None) -> Tensor:
    """Run a call whose rows are sharded across the processes of ``group``: all pass their own shard, and get its output ``b h l v``.

    Positions, where given, are those in the whole row, and segments may continue from one process to the next. Rows are the same on all
    processes; lengths need not be.

    Each process sends, forward and again backward, m x (v + 1) numbers per head and row: in one all-reduce where every token sees every
    other, else to at most 1 + ceil(log2(n - 1)) processes, twice that for a two-sided decay; and forward one number per row, with segments
    four. Global tokens need two more calls, each with one all-reduce, or with segments with a scan.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun does it for more than one
    >>> q = k = v = torch.randn(1, 2, 6, 4)
    >>> call = LinearCall(q, k, v, torch.exp, num_features=4, causal=True)
    >>> torch.allclose(run(call, SequenceGroup()), linear.run(call)[0], atol=1e-5)
    True
    >>> dist.destroy_process_group()
    """
    call.check()  # before anything is sent: the other processes would wait for one that raised
    if call.state is not None:
        raise ValueError("state is for rows on one process: leave it out with sequence parallelism")
    if call.tokens.orders is not None:
        raise ValueError("a two-sided decay on several axes orders whole rows: with axes > 1 sequence parallelism is not supported")
    b, _, length, _ = call.k.shape
    tokens = call.tokens
    shards = group.shards(tokens.mask, tokens.segments, b, length, call.k.device)
    start = shards.before(group.rank)
    if tokens.positions is None:
        tokens = replace(tokens, positions=tokens.count(start, length))
    call = replace(call, tokens=tokens)
    if tokens.global_mask is not None:
        return with_global_tokens(call, lambda part: (_run(part, group, backend), start, start))[0]
    return _run(call, group, backend, shards)


def _run(call: LinearCall, group: SequenceGroup, backend: str | None, shards: Shards | None = None) -> Tensor:
    """Run a call with positions and without global tokens."""
    tokens, (b, _, length, _) = call.tokens, call.k.shape
    if shards is None:  # of the keys of one part of a call with global tokens
        shards = group.shards(tokens.mask, tokens.segments, b, length, call.k.device)

    def keys(from_right: bool) -> Tensor:
        """``b h m v+1``: the state of this shard's keys, or of those of the segment that leaves it, decayed to its edge."""
        leaving = shards.first if from_right else shards.last
        seen = tokens.mask
        if tokens.segments is not None and leaving is not None:
            same = tokens.segments == leaving[group.rank].unsqueeze(-1)
            seen = same if seen is None else same & seen
        part = Tokens(tokens.positions, seen)
        own = replace(call, q=call.q[:, :, :0], tokens=part, query_mask=None, after=None, reverse=from_right)
        own = replace(own, causal=call.log_decay is not None and not from_right)  # a causal decay goes to the last token
        _, state = linear.run(own, backend)
        return torch.cat([state.kv, state.z.unsqueeze(-1)], dim=-1)

    def state(x: Tensor, from_right: bool) -> LinearState:
        segment = shards.neighbours(from_right)
        return LinearState(x[..., :-1], x[..., -1], shards.before(group.rank), None if segment is None else segment[group.rank])

    after = None
    with without_autocast(call.k.device):
        if call.scans:
            before = state(_Scan.apply(keys(False), call.log_decay, shards, group, False), from_right=False)
            if not call.causal:
                after = state(_Scan.apply(keys(True), call.log_decay, shards, group, True), from_right=True)
        else:
            own = keys(False)
            before = state(group.total(own) - own, from_right=False)
    return linear.run(replace(call, state=before, after=after), backend)[0]


class _Total(torch.autograd.Function):
    """The sum over the processes. Each term is in the sum of every process, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group.sum_up(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum_up(d_sum), None


class _Scan(torch.autograd.Function):
    """The state that the shards before this one leave at its edge, or those after it: E_p = r^n_(p-1) E_(p-1) + S_(p-1).

    The gradient of S is the same scan in the other direction. With it, the gradient of log r is that of r^n_p E_p, which this process has.
    Where the segment of E ends in a shard, nothing of it crosses.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_decay: Tensor | None, shards: Shards, group: SequenceGroup, from_right: bool) -> Tensor:
        passes = shards.passes(from_right)
        met = _exclusive_scan(x, log_decay, shards.tokens, passes, group, from_right)
        ctx.group, ctx.from_right = group, from_right
        ctx.save_for_backward(met, log_decay, shards.tokens, passes)
        return met

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_met: Tensor) -> tuple[Tensor | None, ...]:
        met, log_decay, tokens, passes = ctx.saved_tensors
        d_x = _exclusive_scan(d_met, log_decay, tokens, passes, ctx.group, not ctx.from_right)
        d_log = None
        if ctx.needs_input_grad[1]:
            rank = ctx.group.rank
            weight = _power(log_decay, tokens, passes, [rank], met) * tokens[rank].view(-1, 1, 1, 1)
            d_log = (weight * d_x * met).sum((0, 2, 3)).to(log_decay.dtype)
        return d_x, d_log, None, None, None


def _exclusive_scan(
    x: Tensor, log_decay: Tensor | None, tokens: Tensor, passes: Tensor | None, group: SequenceGroup, from_right: bool
) -> Tensor:
    """The sum of ``x`` over all processes before this one (after it, from the right), each by what the shards between let through.

    By doubling (Hillis and Steele): every process gets the state of its neighbour; then the sum of w processes goes to the process w
    further on, for w = 1, 2, 4, … A ring would take n - 1 steps, and an all-gather n states of memory on each process.
    """
    step = -1 if from_right else 1
    place, last = (group.size - 1 - group.rank if from_right else group.rank), group.size - 1

    def rank(at: int) -> int:
        return last - at if from_right else at

    received = group.exchange(x, rank(place + 1) if place < last else None, rank(place - 1) if place > 0 else None)
    held = torch.zeros_like(x) if received is None else received
    width = 1
    while width < last:
        to = rank(place + width) if place > 0 and place + width <= last else None  # the first has nothing to send
        received = group.exchange(held, to, rank(place - width) if place - width > 0 else None)
        if received is not None:
            between = [group.rank - step * (n + 1) for n in range(width)]
            held = held + received * _power(log_decay, tokens, passes, between, x)
        width *= 2
    return held


def _power(log_decay: Tensor | None, tokens: Tensor, passes: Tensor | None, between: list[int], like: Tensor) -> Tensor:
    """The factor of a state that crosses these shards: r to the power of their tokens, or 0: ``b h 1 1``."""
    power = like.new_ones(tokens.shape[1], 1)
    if log_decay is not None:
        power = (log_decay.to(like.dtype) * tokens[between].sum(0).unsqueeze(-1)).exp()
    if passes is not None:
        power = power * passes[between].all(0).unsqueeze(-1)
    return power[..., None, None]
