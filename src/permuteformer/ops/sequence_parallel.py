"""Linear attention of rows that several processes hold together, a stretch each: sequence parallelism.

What a stretch has to know of the others is the state that their keys leave, m x (v + 1) numbers a head: its size does not
depend on the length, so neither does what is sent. Hidden tokens count neither as positions nor as steps of the decay, so
stretches may be of any lengths from 1 on, and padding may stand anywhere.

A process differentiates its own loss; the backward pass communicates too, and gives the gradient of the *sum* of the losses of all
processes with respect to what this process holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from permuteformer.ops.blocks import Transform
from permuteformer.ops.checks import check_attention, without_autocast
from permuteformer.ops.halves import absorb_keys
from permuteformer.ops.linear import linear_attention
from permuteformer.ops.state import LinearState, count_positions


class Stretches(NamedTuple):
    """What all processes have of each row, ``n b``, in their order."""

    tokens: Tensor
    """How many are shown."""
    first: Tensor | None = None
    """The segment of the first token shown, where rows are packed."""
    last: Tensor | None = None
    tokens_of_last: Tensor | None = None
    """How many shown are of the last segment."""

    def before(self, rank: int) -> Tensor:
        """``b``: tokens shown on earlier processes."""
        return self.tokens[:rank].sum(0)

    def before_in_segment(self, rank: int) -> Tensor:
        """``b``: those of them that are of the segment which a process's stretch begins with; it can only be the last of theirs."""
        if self.first is None or self.last is None or self.tokens_of_last is None:
            return self.before(rank)
        return torch.where(self.last[:rank] == self.first[rank], self.tokens_of_last[:rank], 0).sum(0)

    def neighbours(self, from_right: bool) -> Tensor | None:
        """``n b``: the segment of the last token before each stretch, or from the right of the first one after it. It never decreases."""
        if self.first is None or self.last is None:
            return None
        if from_right:
            none = torch.iinfo(torch.int64).max
            shown = torch.where(self.tokens > 0, self.first, none).flip(0).cummin(0).values
        else:
            none = torch.iinfo(torch.int64).min
            shown = torch.where(self.tokens > 0, self.last, none).cummax(0).values
        shown = torch.cat([torch.full_like(shown[:1], none), shown[:-1]])
        return shown.flip(0) if from_right else shown

    def passes(self, from_right: bool) -> Tensor | None:
        """``n b`` bool: whether a state goes on beyond each stretch: its segment does, or nothing is shown there."""
        beside = self.neighbours(from_right)
        leaving = self.first if from_right else self.last
        return None if beside is None or leaving is None else (self.tokens == 0) | (leaving == beside)


class SequenceGroup:
    """Processes that hold one stretch each of the same rows, in the order of their ranks.

    Everything that is sent goes through here, and is counted: ``bytes_sent`` is what this process handed over, ``messages`` how often.

    Args:
        group: of ``torch.distributed``, for example one of a device mesh; all processes if it is not given.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun does it for more than one
    >>> SequenceGroup().bytes_sent
    0
    >>> dist.destroy_process_group()
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "a sequence is shared out over processes, and there are none: start them with torchrun, and call "
                "torch.distributed.init_process_group() first"
            )
        self.group: Any = group if group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this process is not in the group: give it the group that it is in")
        self.bytes_sent = 0
        self.messages = 0

    def total(self, x: Tensor) -> Tensor:
        """The sum of a tensor over the processes; gradients are summed alike."""
        summed: Tensor = _Total.apply(x, self)
        return summed

    def stretches(self, key_mask: Tensor | None, segments: Tensor | None, batch: int, length: int, device: torch.device) -> Stretches:
        """What all of them have of each row. All give segments, or none."""
        shown = torch.ones(batch, length, dtype=torch.bool, device=device) if key_mask is None else key_mask
        own = [shown.sum(-1)]
        if segments is not None:
            places = torch.arange(length, device=device)
            last = segments.gather(1, torch.where(shown, places, 0).amax(-1, keepdim=True))  # b 1
            own += [segments.gather(1, shown.long().argmax(-1, keepdim=True))[:, 0], last[:, 0], (shown & (segments == last)).sum(-1)]
        told = torch.stack(own)
        found = [torch.empty_like(told) for _ in range(self.size)]
        self._count(told)
        dist.all_gather(found, told, group=self.group)
        return Stretches(*torch.stack(found, dim=1))

    def sum_up(self, x: Tensor) -> Tensor:
        """The sum over the processes, without a gradient."""
        x = x.clone(memory_format=torch.contiguous_format)
        self._count(x)
        dist.all_reduce(x, group=self.group)
        return x

    def exchange(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """Send ``x`` to one process of the group, and get what another sends here, of the same shape; ``None`` for nobody."""
        operations = []
        if to is not None:
            self._count(x)
            operations.append(self._message(dist.isend, x.contiguous(), to))
        arrived = None if source is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        if arrived is not None and source is not None:
            operations.append(self._message(dist.irecv, arrived, source))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return arrived

    def _message(self, operation: Callable[..., Any], x: Tensor, other: int) -> dist.P2POp:
        return dist.P2POp(operation, x, dist.get_global_rank(self.group, other), group=self.group)

    def _count(self, x: Tensor) -> None:
        self.bytes_sent += x.numel() * x.element_size()
        self.messages += 1


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sequence_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: SequenceGroup,
    *,
    feature_map: Callable[..., Tensor],
    parameters: Sequence[Tensor] = (),
    transform: Transform | None = None,
    positions: Tensor | None = None,
    causal: bool = False,
    log_decay: Tensor | None = None,
    two_sided: bool = False,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    normalize: bool = True,
    plain_normalizer: bool = False,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """``linear_attention`` of rows whose stretches are on the processes of ``group``: all call it with their own, and get their own output.

    Arguments as of ``linear_attention``, of this process's stretch; positions, where they are given, are those in the whole row, and
    segments may go on from one process to the next. Rows are the same on all processes, lengths need not be. Output ``b h l v``; a hidden
    token's means nothing.

    Sent, forwards and again backwards: m x (v + 1) numbers a head and row, in a sum over all processes where attention sees everything;
    else to 1 + ceil(log2(n - 1)) processes at most, and twice that where it sees both sides; and forwards one number a row, with
    segments four.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun does it for more than one
    >>> q = k = v = torch.randn(1, 2, 6, 4)
    >>> out = sequence_parallel_attention(q, k, v, SequenceGroup(), feature_map=torch.exp, causal=True)
    >>> torch.allclose(out, linear_attention(q, k, v, feature_map=torch.exp, causal=True)[0], atol=1e-5)
    True
    >>> dist.destroy_process_group()
    """
    # Before anything is sent, else the others would wait for a process that has raised.
    check_attention(q, k, v, positions, causal, log_decay, two_sided, key_mask, segments)
    b, _, length, _ = q.shape
    stretches = group.stretches(key_mask, segments, b, length, q.device)
    start = stretches.before(group.rank)
    own_positions = count_positions(start, length, key_mask) if positions is None else positions
    features: dict[str, Any] = {
        "feature_map": feature_map,
        "parameters": parameters,
        "transform": transform,
        "plain_normalizer": plain_normalizer,
    }

    def keys(steps: Tensor | None, segment: Tensor | None) -> Tensor:
        """``b h m v+1``: what this stretch's keys leave, or those of a segment, each decayed by so many steps."""
        shown = key_mask
        if segments is not None and segment is not None:
            same = segments == segment[group.rank].unsqueeze(-1)
            shown = same if key_mask is None else same & key_mask
        own = absorb_keys(k, v, positions=own_positions, key_mask=shown, log_decay=log_decay, steps=steps, backend=backend, **features)
        return torch.cat([own.kv, own.z.unsqueeze(-1)], dim=-1)

    def state(x: Tensor, segment: Tensor | None = None) -> LinearState:
        return LinearState(x[..., :-1], x[..., -1], start, None if segment is None else segment[group.rank])

    after = None
    with without_autocast(q.device):
        if causal or two_sided or segments is not None:
            number = count_positions(torch.zeros_like(start), length, key_mask)[..., 0]  # b l: of each token in its stretch
            own = keys((stretches.tokens[group.rank].unsqueeze(-1) - 1 - number).clamp(min=0), stretches.last)
            before = state(_Scan.apply(own, log_decay, stretches, group, False), stretches.neighbours(from_right=False))
            if not causal:
                own = keys(number, stretches.first)
                after = state(_Scan.apply(own, log_decay, stretches, group, True), stretches.neighbours(from_right=True))
        else:
            own = keys(None, None)
            before = state(group.total(own) - own)
    out, _ = linear_attention(
        q,
        k,
        v,
        positions=positions,
        causal=causal,
        log_decay=log_decay,
        two_sided=two_sided,
        key_mask=key_mask,
        segments=segments,
        normalize=normalize,
        state=before,
        after=after,
        chunk_size=chunk_size,
        backend=backend,
        **features,
    )
    return out


class _Total(torch.autograd.Function):
    """The sum over the processes. What a process holds is in the sum of each, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group.sum_up(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum_up(d_sum), None


class _Scan(torch.autograd.Function):
    """What the stretches before this one leave at its edge, or those after it: E_p = r^n_(p-1) E_(p-1) + S_(p-1).

    So the gradient of S runs the other way by the same decay; with it, dS_p = d E_(p+1) all told, the gradient of log r is that of
    r^n_p E_p, which this process has: nothing more is sent. Where the segment of E ends in a stretch, nothing of it passes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_decay: Tensor | None, stretches: Stretches, group: SequenceGroup, from_right: bool) -> Tensor:
        passes = stretches.passes(from_right)
        met = _exclusive_scan(x, log_decay, stretches.tokens, passes, group, from_right)
        ctx.group, ctx.from_right = group, from_right
        ctx.save_for_backward(met, log_decay, stretches.tokens, passes)
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
    """The sum of ``x`` of all processes before this one (after it, from the right), each by what those between let pass.

    By doubling (Hillis and Steele): all get the state of their neighbour; then what w processes came to passes to the process w further on,
    for w = 1, 2, 4, … A ring would take n - 1 turns, and gathering all states n - 1 of them in the memory of each.
    """
    step = -1 if from_right else 1
    place, last = (group.size - 1 - group.rank if from_right else group.rank), group.size - 1

    def rank(at: int) -> int:
        return last - at if from_right else at

    arrived = group.exchange(x, rank(place + 1) if place < last else None, rank(place - 1) if place > 0 else None)
    held = torch.zeros_like(x) if arrived is None else arrived
    width = 1
    while width < last:
        to = rank(place + width) if place > 0 and place + width <= last else None  # the first has nothing to pass on
        arrived = group.exchange(held, to, rank(place - width) if place - width > 0 else None)
        if arrived is not None:
            between = [group.rank - step * (n + 1) for n in range(width)]
            held = held + arrived * _power(log_decay, tokens, passes, between, x)
        width *= 2
    return held


def _power(log_decay: Tensor | None, tokens: Tensor, passes: Tensor | None, between: list[int], like: Tensor) -> Tensor:
    """What passes these stretches: r to the power of their tokens, or nothing, ``b h 1 1``."""
    power = like.new_ones(tokens.shape[1], 1)
    if log_decay is not None:
        power = (log_decay.to(like.dtype) * tokens[between].sum(0).unsqueeze(-1)).exp()
    if passes is not None:
        power = power * passes[between].all(0).unsqueeze(-1)
    return power[..., None, None]
