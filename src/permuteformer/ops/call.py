"""One call of linear attention: the tokens of a batch, the state between calls, and ``LinearCall``, which every backend runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from permuteformer.ops.checks import can_read_values, check_devices, check_integer, check_shape
from permuteformer.ops.permutation import Rotation

NORMALIZERS = ("transformed", "plain", "none")


class Transform(Protocol):
    """A linear map of the features of each token by its position: see ``positions.base.PositionEncoding``."""

    @property
    def is_group(self) -> bool: ...

    def tables(self, positions: Tensor) -> Any: ...

    def transform(self, x: Tensor, tables: Any) -> Tensor: ...

    def rotation(self) -> Rotation | None: ...


@dataclass(frozen=True)
class Tokens:
    """Positions and visibility of the tokens of a batch: built and checked once per model call, shared by all layers.

    >>> Tokens.build(2, 3, mask=torch.tensor([[True, True, False], [True, True, True]])).count(torch.zeros(2).long(), 3)[..., 0]
    tensor([[0, 1, 1],
            [0, 1, 2]])
    """

    positions: Tensor | None = None
    """``b l a`` or ``1 l a`` int64; ``None`` counts the real tokens."""
    mask: Tensor | None = None
    """``b l`` bool: true for real tokens."""
    segments: Tensor | None = None
    """``b l`` int64, non-decreasing: tokens see their own segment only. A masked token has the segment of its neighbour."""
    global_mask: Tensor | None = None
    """``b l`` bool: tokens that take no step of a two-sided decay and have weight 1 in both directions (CLS)."""
    queries: Tensor | None = None
    """``b n`` int64: the tokens to compute outputs for; ``None`` for all."""
    orders: Tensor | None = None
    """``a b l`` int64: the tokens in the order of each axis, for a two-sided decay on several axes."""

    @classmethod
    def build(
        cls,
        batch: int,
        length: int,
        device: torch.device | str = "cpu",
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        global_mask: Tensor | None = None,
        queries: Tensor | None = None,
        axes: int | None = None,
        ordered: bool = False,
        mask_name: str = "key_mask",
    ) -> Tokens:
        """Check the arguments and return tokens.

        Args:
            axes: the number of axes that positions must have; any if ``None``.
            ordered: compute ``orders``, which needs positions.
            mask_name: what the caller calls ``mask``, for messages.
        """
        given = {"positions": positions, mask_name: mask, "segments": segments, "global_mask": global_mask, "queries": queries}
        check_devices(torch.device(device), "the input", given)
        if positions is not None:
            rows = 1 if positions.dim() == 3 and len(positions) == 1 else batch
            check_shape("positions", positions, torch.int64, batch=rows, length=length, axes=-1 if axes is None else axes)
        elif axes is not None and axes > 1:
            raise ValueError(f"positions are needed with {axes} axes: pass int64 of shape ({batch}, {length}, {axes})")
        for name, x in ((mask_name, mask), ("global_mask", global_mask)):
            if x is not None:
                check_shape(name, x, torch.bool, batch=batch, length=length)
        if segments is not None:
            check_shape("segments", segments, torch.int64, batch=batch, length=length)
            if can_read_values(segments) and (segments.diff(dim=1) < 0).any():
                raise ValueError("segments must not decrease along a row: number the packed sequences of a row 0, 1, 2, … in order")
            segments = segments if mask is None else _fill_masked(segments, mask)
        if queries is not None:
            check_shape("queries", queries, torch.int64, batch=batch, queries=-1)
            if can_read_values(queries) and not bool(((queries >= 0) & (queries < length)).all()):
                raise ValueError(f"queries must be token indices from 0 to {length - 1}, got {queries.tolist()!r:.100}")
        tokens = cls(positions, mask, segments, global_mask, queries)
        return tokens._with_orders(batch) if ordered else tokens

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Tokens:
        """Move all tensors to ``device``."""
        fields = (self.positions, self.mask, self.segments, self.global_mask, self.queries, self.orders)
        return Tokens(*(None if x is None else x.to(device, non_blocking=non_blocking) for x in fields))

    def count(self, start: Tensor, length: int, carried: Tensor | None = None) -> Tensor:
        """Return consecutive positions of the real tokens, ``b l 1``.

        Args:
            start: ``b``: the position of the first real token of each row.
            length: tokens of a row.
            carried: ``b``: the segment that continues from ``start``; the first of each row if ``None``. Others count from 0.
        """
        if self.mask is None and self.segments is None:
            return (start.unsqueeze(-1) + torch.arange(length, device=start.device)).unsqueeze(-1)
        real = self._real(start, length)
        count = real.cumsum(-1)
        start = start.unsqueeze(-1)
        if self.segments is not None:
            begins = F.pad(self.segments.diff(dim=1) != 0, (1, 0))
            count = count - torch.where(begins, count - real, 0).cummax(-1).values
            first = self.segments[:, :1] if carried is None else carried.unsqueeze(-1)
            start = torch.where(self.segments == first, start, 0)
        return (start + (count - 1).clamp(min=0)).unsqueeze(-1)

    def next_position(self, start: Tensor, length: int, carried: Tensor | None = None) -> Tensor:
        """Return the position after the last real token of each row, ``b``; ``start`` for a row without one. Arguments as of ``count``."""
        if self.positions is None and self.segments is None:
            return start + (length if self.mask is None else self.mask.sum(-1))
        positions = self.count(start, length, carried) if self.positions is None else self.positions
        after = positions[..., 0].expand(len(start), -1) + 1
        if self.mask is None:
            return after[:, -1]
        last = torch.where(self.mask, torch.arange(length, device=start.device), 0).amax(-1, keepdim=True)
        return torch.where(self.mask.any(-1), after.gather(1, last).squeeze(1), start)

    def _real(self, like: Tensor, length: int) -> Tensor:
        return torch.ones(len(like), length, dtype=torch.int64, device=like.device) if self.mask is None else self.mask.long()

    def _with_orders(self, batch: int) -> Tokens:
        """Sort the tokens of each segment by each axis, masked and global tokens last."""
        if self.positions is None:
            raise ValueError("positions are needed to order tokens by axis: pass int64 of shape (batch, length, axes)")
        _, length, axes = self.positions.shape
        positions = self.positions.expand(batch, -1, -1)
        first = torch.arange(length, device=positions.device).expand(batch, -1)
        last = None if self.mask is None else ~self.mask
        if self.global_mask is not None:
            last = self.global_mask if last is None else self.global_mask | last
        orders = []
        for axis in range(axes):
            slower = [positions[..., other] for other in range(axes) if other != axis]
            order = first
            for key in (positions[..., axis], *slower, last, self.segments):  # the last key counts most: every sort is stable
                if key is not None:
                    order = order.gather(1, key.gather(1, order).argsort(dim=-1, stable=True))
            orders.append(order)
        return Tokens(self.positions, self.mask, self.segments, self.global_mask, self.queries, torch.stack(orders))


def _fill_masked(segments: Tensor, mask: Tensor) -> Tensor:
    """Give masked tokens the segment of the real token before them, or of the first one: padding must not begin a segment."""
    index = torch.arange(segments.shape[1], device=segments.device)
    before = torch.where(mask, index, -1).cummax(-1).values
    return segments.gather(1, torch.where(before < 0, mask.long().argmax(-1, keepdim=True), before))


class LinearState(NamedTuple):
    """Everything linear attention remembers of the tokens so far: constant size, float32 or float64.

    Keys are permuted by their own positions (the absolute frame), so continuing needs the next position only.

    >>> from permuteformer import linear_attention
    >>> q = k = v = torch.randn(1, 2, 100, 8)
    >>> _, state = linear_attention(q, k, v, feature_map=torch.exp, causal=True)
    >>> state.kv.shape, state.z.shape, state.next_position    # b h m v, b h m, b
    (torch.Size([1, 2, 8, 8]), torch.Size([1, 2, 8]), tensor([100]))
    """

    kv: Tensor
    """``b h m v``: sum of f(k_j) v_j^T, decayed to the last token."""
    z: Tensor
    """``b h m``: sum of f(k_j), decayed likewise: the normaliser."""
    next_position: Tensor
    """``b`` int64: the position of the next token, where positions are counted."""
    segment: Tensor | None = None
    """``b`` int64: the segment of the last token, in packed rows."""

    def detach(self) -> LinearState:
        """Return the state without its autograd history."""
        return LinearState(*(None if x is None else x.detach() for x in self))  # type: ignore[arg-type]

    def select(self, rows: Tensor) -> LinearState:
        """Return the state of these batch rows, in this order: for beam search."""
        return LinearState(*(None if x is None else x.index_select(0, rows) for x in self))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class LinearCall:
    """A call of linear attention. ``tokens`` are checked already; ``check`` checks the rest.

    Keys without queries (n = 0) compute the state only. Queries without keys (l = 0) read ``state`` and need ``query_positions``.

    >>> from permuteformer.ops.linear import run
    >>> q = k = v = torch.randn(1, 2, 10, 4)
    >>> out, state = run(LinearCall(q, k, v, torch.exp, num_features=4, causal=True))
    >>> out.shape, state.kv.shape
    (torch.Size([1, 2, 10, 4]), torch.Size([1, 2, 4, 4]))
    """

    q: Tensor
    """Queries ``b h n d``, any strides."""
    k: Tensor
    """Keys ``b h l d``."""
    v: Tensor
    """Values ``b h l v``."""
    feature_map: Callable[..., Tensor]
    num_features: int
    """m, known without evaluating the feature map."""
    parameters: tuple[Tensor, ...] = ()
    """Further arguments of ``feature_map``, which get gradients."""
    encoding: Transform | None = None
    normalizer: str = "transformed"
    """Sum of weights to divide by: of features after the encoding (``"transformed"``), before it (``"plain"``), or ``"none"``."""
    tokens: Tokens = Tokens()
    query_positions: Tensor | None = None
    """``b n a``: positions of the queries, where they are not those of the keys."""
    query_mask: Tensor | None = None
    """``b l`` bool: real queries, where they are not the real keys of ``tokens.mask``."""
    causal: bool = False
    log_decay: Tensor | None = None
    """log r, ``h``: weights r^(i-j) if causal, else r^|i-j|."""
    state: LinearState | None = None
    """The tokens before."""
    after: LinearState | None = None
    """The tokens after, decayed to the first of them (bidirectional with a decay or segments)."""
    reverse: bool = False
    """Keys without queries: decay the state to the first token instead of the last."""
    chunk_size: int | None = None

    @property
    def scans(self) -> bool:
        """Whether weights depend on the order of tokens, so that a state runs along the sequence; else one sum serves all queries."""
        return self.causal or self.log_decay is not None or self.tokens.segments is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums: float32 at least."""
        return torch.promote_types(self.v.dtype, torch.float32)

    @property
    def start(self) -> Tensor:
        """``b``: where counted positions begin."""
        return torch.zeros(len(self.k), dtype=torch.int64, device=self.k.device) if self.state is None else self.state.next_position

    @property
    def first_segment(self) -> Tensor | None:
        """``b``: the segment of ``state``; the row's first one if the state does not say, or the row has no real token."""
        segments, state, mask = self.tokens.segments, self.state, self.tokens.mask
        if segments is None or state is None:
            return None
        if state.segment is None:
            return segments[:, 0]
        if mask is None or self.query_mask is not None:
            return state.segment
        return torch.where(mask.any(-1), state.segment, segments[:, 0])

    def positions(self) -> Tensor:
        """Return the positions of the keys, given or counted: ``b l a``."""
        given = self.tokens.positions
        return self.tokens.count(self.start, self.k.shape[2], self.first_segment) if given is None else given

    def next_state(self, kv: Tensor, z: Tensor) -> LinearState:
        """Return the state after the last token."""
        segments, before = self.tokens.segments, None if self.state is None else self.state.segment
        segment = before if segments is None else segments[:, -1]
        if segments is not None and before is not None and self.tokens.mask is not None:
            segment = torch.where(self.tokens.mask.any(-1), segments[:, -1], before)
        return LinearState(kv, z, self.tokens.next_position(self.start, self.k.shape[2], self.first_segment), segment)

    def check(self) -> None:
        """Raise unless the arguments fit together."""
        q, k, v = self.q, self.k, self.v
        if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3] or _rows(q) != _rows(k):
            raise ValueError(
                "q, k and v must have shapes (batch, heads, length, size), with one length for k and v and one size for q and k, got "
                f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
            )
        if not (q.is_floating_point() and k.is_floating_point() and v.is_floating_point()):
            raise TypeError(f"q, k and v must be floating point, got {q.dtype}, {k.dtype}, {v.dtype}")
        check_devices(q.device, "q", {"k": k, "v": v, "log_decay": self.log_decay, "query_positions": self.query_positions})
        if q.shape[2] != k.shape[2] and q.shape[2] and self.query_positions is None:
            raise ValueError(f"query_positions are needed for {q.shape[2]} queries and {k.shape[2]} keys: they are different tokens")
        if self.query_positions is not None and self.scans:
            raise ValueError("query_positions are for attention without a decay and segments: pass a query for every key")
        if self.normalizer not in NORMALIZERS:
            raise ValueError(f"normalizer must be one of {', '.join(NORMALIZERS)}, got {self.normalizer!r}")
        if self.log_decay is not None and self.log_decay.shape != k.shape[1:2]:
            raise ValueError(f"log_decay must have shape ({k.shape[1]},), one number per head, got {tuple(self.log_decay.shape)}")
        if self.tokens.global_mask is not None and (self.causal or self.log_decay is None):
            raise ValueError("global_mask is for a two-sided decay: without one, or with causal=True, leave it out")
        if self.tokens.orders is not None and (self.state is not None or self.after is not None):
            raise ValueError("state and after are for one axis: with a two-sided decay on several axes, pass whole rows")
        if self.after is not None and (self.causal or not self.scans):
            raise ValueError("after holds later tokens: it is for a bidirectional call with a decay or segments")
        if self.after is not None and self.tokens.segments is not None and self.after.segment is None:
            raise ValueError("after needs a segment in a call with segments: else every segment would see it")
        if self.chunk_size is not None:
            check_integer(chunk_size=self.chunk_size)
        for name, state in (("state", self.state), ("after", self.after)):
            if state is not None:
                self._check_state(name, state)

    def _check_state(self, name: str, state: Any) -> None:
        if not isinstance(state, LinearState):
            raise TypeError(f"{name} must be the LinearState that an earlier call returned, got {type(state).__name__}")
        b, h, _, v = self.v.shape
        shape = (b, h, self.num_features, v)
        if state.kv.shape != shape or state.z.shape != shape[:3] or state.next_position.shape != (b,):
            raise ValueError(
                f"{name} has shape {tuple(state.kv.shape)}, but this call needs (batch, heads, features, value size) = {shape}: pass the "
                "state that the same layer returned for the same batch"
            )
        if state.next_position.dtype != torch.int64:
            raise TypeError(f"next_position of the {name} must be int64, got {state.next_position.dtype}")
        check_devices(self.q.device, "q", {f"{field} of the {name}": x for field, x in state._asdict().items()})


def _rows(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], x.shape[3]
