"""The interface of an attention, which a layer puts between its projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from permuteformer.ops.call import Tokens
from permuteformer.ops.checks import can_read_values, check_flag, check_integer
from permuteformer.positions.base import POSITIONS, Compose, Copy, ExactBuffers, PositionEncoding
from permuteformer.registry import Registry

if TYPE_CHECKING:
    from permuteformer.ops.sequence_parallel import SequenceGroup

ATTENTIONS: Registry[type[Attention]] = Registry("attention", "permuteformer.attention")


class KVState(NamedTuple):
    """The state of an attention that needs all keys: the keys and values themselves.

    >>> from permuteformer.attention import build
    >>> _, state = build("softmax", hidden_size=8, num_heads=2, causal=True)(torch.randn(1, 5, 8))
    >>> state.k.shape, state.next_position
    (torch.Size([1, 2, 5, 4]), tensor([5]))
    """

    k: Tensor
    """``b h s m``: keys, transformed by their positions."""
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
        return Tokens(self.positions, self.key_mask).next_position(self.positions[:, 0, 0], self.key_mask.shape[1])

    @property
    def segment(self) -> Tensor | None:
        """``b``: the segment of the last token."""
        return None if self.segments is None else self.segments[:, -1]

    def select(self, rows: Tensor) -> KVState:
        """Return the state of these batch rows, in this order: for beam search."""
        return KVState(*(None if x is None else x.index_select(0, rows) for x in self))  # type: ignore[arg-type]


class Attention(ExactBuffers):
    """Base class of attentions. A subclass defines ``mix``, and declares the hooks and modes that it supports.

    Args:
        num_heads: heads.
        head_size: size of a head's values.
        causal: queries see no key after them.
        position: the position encoding inside attention. Encodings of embeddings belong to the model's input.
        num_features: size of the vectors whose products are scores, where it is not the head size.

    >>> class First(Attention):
    ...     def mix(self, q, k, v, tokens, state):
    ...         return v[:, :, :1].expand_as(v), None    # b h l v: every token attends to the first
    >>> First(num_heads=2, head_size=4).modes
    frozenset({'bidirectional'})
    """

    hooks: ClassVar[frozenset[str]] = frozenset()
    """Hooks of a position encoding that ``mix`` supports, of ``positions.HOOKS``."""
    modes: ClassVar[frozenset[str]] = frozenset({"bidirectional"})
    """Of ``"bidirectional"``, ``"causal"``, ``"segments"`` (packed rows), ``"state"`` (continuing from earlier tokens) and
    ``"sequence_parallel"``."""
    shared_query_key: ClassVar[bool] = False
    """Whether queries and keys are one projection."""
    sequence: SequenceGroup | None = None
    """The processes that hold the shards of each row; ``None`` without sequence parallelism."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        causal: bool = False,
        position: PositionEncoding | None = None,
        num_features: int | None = None,
    ) -> None:
        super().__init__()
        check_integer(num_heads=num_heads, head_size=head_size)
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
        """Return the size of the vectors whose products are scores, for these constructor arguments."""
        return head_size

    @property
    def query_key_size(self) -> int:
        """Size of a head's queries and keys as the projection gives them."""
        return self.head_size

    def mix(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, state: Any) -> tuple[Tensor, Any]:
        """Return the output ``b h l v`` and the state after the last token.

        Args:
            q: queries ``b h l d``; ``b h n d`` of ``tokens.queries``, which are given only where ``can_select`` returns true.
            k: keys ``b h l d``.
            v: values ``b h l v``.
            tokens: positions, mask and segments, checked.
            state: what an earlier call returned, or ``None``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define mix")

    def can_select(self, tokens: Tokens) -> bool:
        """Return whether ``mix`` can compute the outputs of ``tokens.queries`` alone."""
        return False

    def check_sequence_parallel(self) -> None:
        """Raise where this attention does not support sequence parallelism."""
        self.require("sequence_parallel")

    def set_sequence_group(self, sequence: SequenceGroup | None) -> None:
        """Take the tokens of every call for a shard of rows that these processes hold together; ``None`` for whole rows."""
        if sequence is not None:
            self.check_sequence_parallel()
        self.sequence = sequence

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        """Fill buffers and parameters of its own as the constructor does; see ``PositionEncoding.reset``."""

    def require(self, *modes: str) -> None:
        """Raise if this attention does not support all of ``modes``."""
        for mode in modes:
            if mode not in self.modes:
                raise ValueError(f"attention {self.name!r} does not support {mode!r}: it supports {', '.join(sorted(self.modes))}")

    @property
    def name(self) -> str:
        """The name in the registry."""
        return ATTENTIONS.name_of(type(self))

    @property
    def encodings(self) -> list[PositionEncoding]:
        """The position encodings, one by one."""
        return [e for e in self.position.modules() if isinstance(e, PositionEncoding) and not isinstance(e, Compose)]

    def _check_position(self) -> None:
        for encoding in self.encodings:
            for size, here in {"num_heads": self.num_heads, "feature_size": self.num_features}.items():
                built_for = getattr(encoding, size)
                if built_for not in (None, here):
                    raise ValueError(
                        f"position encoding {POSITIONS.name_of(type(encoding))!r} was built for {size}={built_for}, but attention "
                        f"{self.name!r} has {here}: build it with {size}={here}"
                    )
        refused = self.position.hooks - self.hooks
        if refused:
            names = [POSITIONS.name_of(type(e)) for e in self.encodings if e.hooks & refused]
            advice = "add it to the model's embeddings instead" if refused == {"embed"} else "choose another attention or encoding"
            raise ValueError(
                f"attention {self.name!r} does not support position encoding {', '.join(map(repr, names))}: it has no hook "
                f"{', '.join(sorted(refused))} (its hooks: {', '.join(sorted(self.hooks)) or 'none'}); {advice}"
            )
        if "log_decay" in self.position.hooks and self.position.two_sided == self.causal:
            raise ValueError(
                f"decay with two_sided={self.position.two_sided} does not fit causal={self.causal}: r^(i-j) grows without bound for keys "
                "after the query, so a bidirectional model needs r^|i-j|, Decay(num_heads, r, two_sided=True), and a causal one "
                "two_sided=False"
            )


def select_tokens(x: Tensor, queries: Tensor) -> Tensor:
    """Return ``b n …``: the tokens ``queries``, ``b n``, of ``x``, ``b l …``.

    >>> select_tokens(torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.tensor([[0, 2], [1, 1]]))
    tensor([[5, 7],
            [9, 9]])
    """
    return x[torch.arange(len(x), device=x.device).unsqueeze(1), queries]


def positions_of(tokens: Tokens, state: Any, like: Tensor) -> Tensor:
    """Return the positions ``b l a`` of the tokens of ``like``, ``b … l d``: given, or counted from the state."""
    b, length = like.shape[0], like.shape[-2]
    if tokens.positions is not None:
        return tokens.positions.expand(b, -1, -1)
    if state is None:
        return tokens.count(torch.zeros(b, dtype=torch.int64, device=like.device), length)
    return tokens.count(state.next_position, length, state.segment)


def append(state: Any, k: Tensor, v: Tensor, positions: Tensor, tokens: Tokens) -> KVState:
    """Return a state with these keys and values added."""
    mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if tokens.mask is None else tokens.mask
    new = KVState(k, v, positions, mask, tokens.segments)
    if state is None:
        return new
    if not isinstance(state, KVState):
        raise TypeError(f"state must be the KVState that this layer returned, got {type(state).__name__}")
    if state.k.shape[:2] != k.shape[:2] or state.k.shape[-1] != k.shape[-1] or state.k.device != k.device:
        raise ValueError(
            f"state has keys of shape {tuple(state.k.shape)} on {state.k.device}, but this call has {tuple(k.shape)} on {k.device}: pass "
            "the state that the same layer returned for the same batch"
        )
    segments, old = new.segments, state.segments
    if segments is not None or old is not None:
        # Where only one of them has segments, the neighbouring segment continues.
        old = segments[:, :1].expand(-1, state.k.shape[2]) if old is None else old  # type: ignore[index]
        segments = old[:, -1:].expand(-1, k.shape[2]) if segments is None else segments
        segments = torch.cat([old, segments], dim=1)
    return KVState(
        torch.cat([state.k, k], dim=2),
        torch.cat([state.v, v], dim=2),
        torch.cat([state.positions, positions], dim=1),
        torch.cat([state.key_mask, mask], dim=1),
        segments,
    )


def visible(state: KVState, length: int, causal: bool) -> Tensor:
    """Return which of the state's keys each of its last ``length`` tokens sees: bool ``b 1 l s``."""
    size = state.k.shape[2]
    mask = state.key_mask[:, None, None, :].expand(-1, 1, length, size)
    if causal:
        mask = mask & torch.ones(length, size, dtype=torch.bool, device=mask.device).tril(size - length)
    if state.segments is not None:
        mask = mask & (state.segments[:, None, size - length :, None] == state.segments[:, None, None, :])
    return mask


def finite(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys and values with zeros for what is not finite, and where that was, ``b h s``: a weight of zero would not hide it.

    Traced graphs, and GPUs without waiting, cannot read values: they get everything as it is.
    """
    if not can_read_values(k) or bool((k.sum() + v.sum()).isfinite()):
        return k, v, None
    bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    return k.masked_fill(bad.unsqueeze(-1), 0), v.masked_fill(bad.unsqueeze(-1), 0), bad


def poison(out: Tensor, visible: Tensor, bad: Tensor) -> Tensor:
    """Set the queries of ``out`` (``b h l v``) to NaN that see a key which was not finite, as ``finite`` returned them."""
    return out.masked_fill((visible & bad.unsqueeze(-2)).any(-1, keepdim=True), torch.nan)
