"""What linear attention remembers between calls, and what goes with it: positions and segments that go on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from permuteformer.ops.blocks import Carry
from permuteformer.ops.checks import check_devices


class LinearState(NamedTuple):
    """All that linear attention has to remember of the tokens so far, whatever their number: float32 at least.

    Keys stand in it permuted by their own positions (the absolute frame), so going on needs the next position only.

    >>> from permuteformer import linear_attention
    >>> q = k = v = torch.randn(1, 2, 100, 8)
    >>> _, state = linear_attention(q, k, v, feature_map=torch.exp, causal=True)
    >>> state.kv.shape, state.z.shape, state.next_position    # b h m v, b h m, b
    (torch.Size([1, 2, 8, 8]), torch.Size([1, 2, 8]), tensor([100]))
    """

    kv: Tensor
    """``b h m v``: sum of f(k_j) v_j^T, decayed to the last token."""
    z: Tensor
    """``b h m``: sum of f(k_j), decayed alike: the normaliser."""
    next_position: Tensor
    """``b`` int64: the position of the next token, where consecutive ones are not given."""
    segment: Tensor | None = None
    """``b``: the segment of the last token, where rows hold several."""

    def detach(self) -> LinearState:
        """The same without its history: gradients stop here."""
        return LinearState(*(None if x is None else x.detach() for x in self))  # type: ignore[arg-type]

    def select(self, rows: Tensor) -> LinearState:
        """The state of these batch rows, in this order: for beam search."""
        return LinearState(*(None if x is None else x.index_select(0, rows) for x in self))  # type: ignore[arg-type]


def as_carry(state: LinearState | None, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> Carry:
    """The state as blocks carry it, or nothing yet; ``shape`` is that of its ``kv``."""
    if state is None:
        b, h, m, v = shape
        kv = torch.zeros(b, h, m, v, device=device, dtype=dtype).transpose(-1, -2)  # which the kernel takes without a copy
        return Carry(kv, torch.zeros(b, h, 1, m, device=device, dtype=dtype))
    if not isinstance(state, LinearState):
        raise TypeError(
            f"state must be the LinearState that an earlier call returned, the second of the two it returns; it is {type(state).__name__}"
        )
    _check_state(state, shape, device)
    return Carry(state.kv.to(dtype).transpose(-1, -2), state.z.to(dtype).unsqueeze(-2))


def _check_state(state: LinearState, shape: tuple[int, int, int, int], device: torch.device) -> None:
    if state.kv.shape != shape or state.z.shape != shape[:3] or state.next_position.shape != shape[:1]:
        raise ValueError(
            f"state is of shape {tuple(state.kv.shape)}, but this call needs (batch, heads, features, value size) = {shape}: "
            "pass the state that the same layer returned for the same batch"
        )
    if state.next_position.dtype != torch.int64:
        raise TypeError(f"next_position of the state must be int64; it is {state.next_position.dtype}")
    check_devices(device, "q", {f"{name} of the state": x for name, x in state._asdict().items()})


def count_positions(start: Tensor, length: int, key_mask: Tensor | None) -> Tensor:
    """``b l 1``: consecutive positions from ``start``, ``b``, of the tokens that are shown."""
    steps = torch.arange(length, device=start.device).expand(len(start), -1) if key_mask is None else (key_mask.cumsum(-1) - 1).clamp(min=0)
    return (start[:, None] + steps).unsqueeze(-1)


def position_after(start: Tensor, length: int, positions: Tensor | None, key_mask: Tensor | None, ends: Tensor | None) -> Tensor:
    """``b``: the position after the last token shown of each row."""
    if positions is None:
        return start + (length if key_mask is None else key_mask.sum(-1))
    first = positions[..., 0].expand(len(start), -1)
    if ends is None:
        return first[:, -1] + 1
    return torch.where(ends > 0, first.gather(1, (ends - 1).clamp(min=0).unsqueeze(1)).squeeze(1) + 1, start)


def continued(segments: Tensor, key_mask: Tensor | None, ends: Tensor | None, state: LinearState | None) -> Tensor:
    """Segments with hidden tokens at either end of a row counted to the next one that is shown: they do not begin another."""
    if key_mask is None or ends is None:
        return segments
    begins = key_mask.long().argmax(-1, keepdim=True)  # b 1: the first token that is shown
    segments = torch.where(torch.arange(segments.shape[1], device=segments.device) < begins, segments.gather(1, begins), segments)
    last = segments.gather(1, (ends - 1).clamp(min=0).unsqueeze(1))  # b 1
    if state is not None and state.segment is not None:
        last = torch.where(ends.unsqueeze(1) > 0, last, state.segment.unsqueeze(1))
    places = torch.arange(segments.shape[1], device=segments.device)
    return torch.where(places < ends.unsqueeze(1), segments, last)


def first_segment(segments: Tensor | None, state: LinearState | None) -> Tensor | None:
    """The segment that a state is of: the one it says, else the first of the row, which then goes on from it."""
    if segments is None or state is None:
        return None
    return segments[:, 0] if state.segment is None else state.segment


def last_segment(segments: Tensor | None, state: LinearState | None) -> Tensor | None:
    """The segment that the state after a call is of."""
    if segments is not None:
        return segments[:, -1]
    return None if state is None else state.segment
