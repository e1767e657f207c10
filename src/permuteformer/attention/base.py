"""The contract of an attention: the hole between a layer's projections, and what may be put into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from permuteformer.ops.checks import can_look_at, check_flag, check_whole
from permuteformer.ops.state import count_positions
from permuteformer.positions.base import POSITIONS, Compose, Copy, ExactBuffers, PositionEncoding
from permuteformer.registry import Registry

if TYPE_CHECKING:
    from permuteformer.ops.sequence_parallel import SequenceGroup

ATTENTIONS: Registry[type[Attention]] = Registry("attention", "permuteformer.attention")


class KVState(NamedTuple):
    """What an attention over all keys has to remember: all of them.

    >>> from permuteformer.attention import build
    >>> _, state = build("softmax", hidden_size=8, num_heads=2, causal=True)(torch.randn(1, 5, 8))
    >>> state.k.shape, state.next_position
    (torch.Size([1, 2, 5, 4]), tensor([5]))
    """

    k: Tensor
    """``b h s m``: keys, moved by their positions."""
    v: Tensor
    """``b h s v``."""
    positions: Tensor
    """``b s a``."""
    key_mask: Tensor
    """``b s`` bool."""
    segments: Tensor | None = None
    """``b s``."""

    @property
    def next_position(self) -> Tensor:
        """``b``: the position after the last real token; of a row without one, its first position."""
        places = torch.arange(self.key_mask.shape[1], device=self.key_mask.device)
        last = torch.where(self.key_mask, places, -1).amax(-1)  # b
        after = self.positions[..., 0].gather(1, last.clamp(min=0).unsqueeze(1)).squeeze(1)
        return after + (last >= 0)

    def select(self, rows: Tensor) -> KVState:
        """The state of these batch rows, in this order: for beam search."""
        return KVState(*(None if x is None else x.index_select(0, rows) for x in self))  # type: ignore[arg-type]


class Attention(ExactBuffers):
    """Mixes values by queries and keys. A subclass fills ``mix`` and says what it can do.

    Args:
        num_heads: heads.
        head_size: size of a head's values.
        causal: queries see no key after them.
        position: what positions do in here; an encoding of embeddings is for the model's input, not for this.
        num_features: size of what is dot-producted, where it is not the head size.

    >>> class First(Attention):
    ...     def mix(self, q, k, v, *, positions, key_mask, segments, state):
    ...         return v[:, :, :1].expand_as(v), None    # b h l v: all look at the first token
    >>> First(num_heads=2, head_size=4).modes
    frozenset({'bidirectional'})
    """

    hooks: ClassVar[frozenset[str]] = frozenset()
    """Hooks of a position encoding that ``mix`` honours, of ``positions.HOOKS``."""
    modes: ClassVar[frozenset[str]] = frozenset({"bidirectional"})
    """Of ``"bidirectional"``, ``"causal"``, ``"segments"`` (packed rows), ``"state"`` (going on from earlier tokens) and ``"spread"`` (rows
    whose stretches are on several processes)."""
    shared_query_key: ClassVar[bool] = False
    """Whether queries and keys are one projection."""
    sequence: SequenceGroup | None = None
    """The processes that hold rows together with this one; ``None`` where each has its own."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        causal: bool = False,
        position: PositionEncoding | None = None,
        num_features: int | None = None,
    ) -> None:
        super().__init__()
        check_whole(num_heads=num_heads, head_size=head_size)
        check_flag(causal=causal)
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_features = num_features or head_size
        self.causal = causal
        self.position = position or Compose([])
        self._check_position()
        self.require("causal" if causal else "bidirectional")

    @classmethod
    def feature_size(cls, head_size: int, arguments: Mapping[str, Any]) -> int:
        """Size of what is dot-producted, which a position encoding acts on, for these constructor arguments."""
        return head_size

    @property
    def query_key_size(self) -> int:
        """Size of a head's queries and keys as they come from the projection."""
        return self.head_size

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        positions: Tensor | None,
        key_mask: Tensor | None,
        segments: Tensor | None,
        state: Any,
    ) -> tuple[Tensor, Any]:
        """Output ``b h l v`` and state from queries and keys ``b h l d``, values ``b h l v``.

        ``positions``: ``b l a``, or ``None`` for consecutive ones; ``key_mask``: ``b l`` bool, false for keys that nobody
        sees; ``segments``: ``b l``, tokens see their own segment only; ``state``: what an earlier call returned.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define mix")

    @property
    def chooses(self) -> bool:
        """Whether ``mix_chosen`` is there: the tokens that are asked for cost what they are, and not as much as all."""
        return False

    def mix_chosen(self, q: Tensor, k: Tensor, v: Tensor, *, chosen: Tensor, positions: Tensor | None, key_mask: Tensor | None) -> Tensor:
        """As ``mix`` of whole rows, for the queries ``b h n d`` of the tokens ``chosen``, ``b n``, alone: ``b h n v``."""
        raise NotImplementedError(f"{type(self).__name__} does not define mix_chosen")

    def check_spread(self) -> None:
        """Raise where this attention cannot mix rows whose stretches are on several processes."""
        self.require("spread")

    def spread(self, sequence: SequenceGroup | None) -> None:
        """From now on take every call's tokens for a stretch of rows that these processes hold together; ``None``: for whole rows."""
        if sequence is not None:
            self.check_spread()
        self.sequence = sequence

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        """Fill buffers and parameters of its own as the constructor does; see ``PositionEncoding.reset``."""

    def require(self, *modes: str) -> None:
        """Raise if this attention does not have all of ``modes``."""
        for mode in modes:
            if mode not in self.modes:
                raise ValueError(f"attention {self.name!r} cannot be used with {mode!r}: it has {', '.join(sorted(self.modes))}")

    def require_for(self, **arguments: object) -> None:
        """Raise if an argument of ``mix`` that is a mode by itself is given, and this attention does not have it."""
        self.require(*(mode for mode, value in arguments.items() if value is not None))

    @property
    def name(self) -> str:
        return ATTENTIONS.name_of(type(self))

    @property
    def encodings(self) -> list[PositionEncoding]:
        """The position encodings in here, one by one."""
        return [e for e in self.position.modules() if isinstance(e, PositionEncoding) and not isinstance(e, Compose)]

    def _check_position(self) -> None:
        encodings = self.encodings
        for encoding in encodings:
            for size, here in {"num_heads": self.num_heads, "feature_size": self.num_features}.items():
                made_for = getattr(encoding, size)
                if made_for not in (None, here):
                    raise ValueError(
                        f"position encoding {POSITIONS.name_of(type(encoding))!r} was made for {size}={made_for}, but attention "
                        f"{self.name!r} has {here}: make it with {size}={here}"
                    )
        refused = self.position.hooks - self.hooks
        if refused:
            names = [POSITIONS.name_of(type(e)) for e in encodings if e.hooks & refused]
            advice = "add it to the model's embeddings instead" if refused == {"embed"} else "choose another attention or encoding"
            raise ValueError(
                f"attention {self.name!r} cannot be combined with position encoding {', '.join(map(repr, names))}: it does not "
                f"honour {', '.join(sorted(refused))} (it honours {', '.join(sorted(self.hooks)) or 'no hook'}); {advice}"
            )
        if "log_decay" in self.position.hooks and self.position.two_sided == self.causal:
            raise ValueError(
                f"decay with two_sided={self.position.two_sided} in an attention with causal={self.causal}: r^(i-j) grows without bound "
                "for keys after the query, so a bidirectional model needs r^|i-j|, Decay(num_heads, r, two_sided=True), and a causal one "
                "two_sided=False"
            )


def consecutive(state: Any, batch: int, length: int, device: torch.device, key_mask: Tensor | None) -> Tensor:
    """Positions ``b l 1`` of the tokens shown, that go on from ``state``, or start at 0."""
    start = torch.zeros(batch, dtype=torch.int64, device=device) if state is None else state.next_position
    return count_positions(start, length, key_mask)


def of_tokens(x: Tensor, chosen: Tensor) -> Tensor:
    """``b n …``: what ``x``, ``b l …``, has of the tokens ``chosen``, ``b n``.

    >>> of_tokens(torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.tensor([[0, 2], [1, 1]]))
    tensor([[5, 7],
            [9, 9]])
    """
    return x[torch.arange(len(x), device=x.device).unsqueeze(1), chosen]


def append(state: KVState | None, new: KVState) -> KVState:
    """The keys of ``state``, if any, and then the new ones."""
    if state is None:
        return new
    if not isinstance(state, KVState):
        raise TypeError(
            f"state must be the KVState that this layer returned, the second of the two it returns; it is {type(state).__name__}"
        )
    if state.k.shape[:2] != new.k.shape[:2] or state.k.shape[-1] != new.k.shape[-1] or state.k.device != new.k.device:
        raise ValueError(
            f"state holds keys of shape {tuple(state.k.shape)} on {state.k.device}, but this call has {tuple(new.k.shape)} on "
            f"{new.k.device}: pass the state that the same layer returned for the same batch"
        )
    segments = None
    if new.segments is not None or state.segments is not None:
        # Where only one side has segments, what it touches goes on: the first of the new ones, or the last of the old.
        old, more = state.segments, new.segments
        old = more[:, :1].expand(-1, state.k.shape[2]) if old is None and more is not None else old
        more = old[:, -1:].expand(-1, new.k.shape[2]) if more is None and old is not None else more
        assert old is not None
        assert more is not None
        segments = torch.cat([old, more], dim=1)
    return KVState(
        torch.cat([state.k, new.k], dim=2),
        torch.cat([state.v, new.v], dim=2),
        torch.cat([state.positions, new.positions], dim=1),
        torch.cat([state.key_mask, new.key_mask], dim=1),
        segments,
    )


def visible(state: KVState, length: int, causal: bool) -> Tensor:
    """Which of the state's keys each of its last ``length`` tokens sees: bool ``b 1 l s``."""
    size = state.k.shape[2]
    mask = state.key_mask[:, None, None, :].expand(-1, 1, length, size)
    if causal:
        mask = mask & torch.ones(length, size, dtype=torch.bool, device=mask.device).tril(size - length)
    if state.segments is not None:
        mask = mask & (state.segments[:, None, size - length :, None] == state.segments[:, None, None, :])
    return mask


def finite(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values without what is not finite, and where it was, ``b h s``: a weight of zero would not hide it.

    A compiled graph, and a GPU without waiting for it, cannot look at values, and takes them as they are.
    """
    if not can_look_at(k) or bool((k.sum() + v.sum()).isfinite()):
        return k, v, None
    bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    return k.masked_fill(bad.unsqueeze(-1), 0), v.masked_fill(bad.unsqueeze(-1), 0), bad


def poison(out: Tensor, visible: Tensor, bad: Tensor) -> Tensor:
    """NaN for the queries of ``out`` (``b h l v``) that see a key which was not finite, as ``finite`` found them."""
    return out.masked_fill((visible & bad.unsqueeze(-2)).any(-1, keepdim=True), torch.nan)
