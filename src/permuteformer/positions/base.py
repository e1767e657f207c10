"""The interface of a position encoding, and the composition of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from permuteformer.ops.permutation import Rotation
from permuteformer.registry import Registry

POSITIONS: Registry[type[PositionEncoding]] = Registry("position encoding", "permuteformer.positions")

Copy = Callable[[Tensor, Tensor], Any]

HOOKS = ("embed", "transform", "bias", "log_decay")
"""Names of the hooks. An attention declares which of them it supports."""


class ExactBuffers(nn.Module):
    """A module whose buffers named in ``exact`` move between devices but keep their dtype: bfloat16 has 3 digits."""

    exact: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: self._buffers.get(name) for name in self.exact}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers.get(name)
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                setattr(self, name, buffer.to(after.device))
        return self


class PositionEncoding(ExactBuffers):
    """Base class of position encodings. Override the hooks that define the encoding; the others do nothing.

    Positions are an int64 tensor ``b l a``, with a axes (1 for text, 2 for an image); b may be 1.

    >>> class Alternate(PositionEncoding):
    ...     def tables(self, positions):
    ...         return 1 - 2 * (positions % 2).unsqueeze(1)    # b 1 l a
    ...     def transform(self, x, tables):
    ...         return x * tables    # b h l m
    >>> encoding = Alternate()
    >>> sorted(encoding.hooks)
    ['transform']
    >>> encoding.transform(torch.ones(1, 1, 3, 2), encoding.tables(torch.tensor([[[0], [1], [2]]]))).tolist()
    [[[[1.0, 1.0], [-1.0, -1.0], [1.0, 1.0]]]]
    """

    keeps_sign: bool = True
    """Whether ``transform`` maps positive features to positive ones (Property 3). If not, linear attention computes its normaliser from
    the features before ``transform``."""

    is_group: bool = False
    """Whether ``transform`` at i + j is ``transform`` at i of ``transform`` at j, and keeps dot products. Then each block of a sequence can
    count from its own first token, and all blocks share one table."""

    two_sided: bool = False
    """Whether the decay is r^|i-j|, for bidirectional attention."""

    num_heads: int | None = None
    """Heads the encoding was built for; ``None`` fits any. Likewise ``feature_size`` and ``axes``."""
    feature_size: int | None = None
    axes: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_fill_buffers)

    @property
    def decay_axes(self) -> int:
        """Axes whose order a two-sided decay counts in; 1 is the sequence order."""
        return self.axes or 1 if self.two_sided else 1

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add positions to embeddings ``b l d``."""
        return x

    def tables(self, positions: Tensor) -> Any:
        """Compute what ``transform`` needs for positions ``b l a``: a tensor or a tuple of tensors."""
        return positions

    def transform(self, x: Tensor, tables: Any) -> Tensor:
        """Apply M_i of equation 7, a linear map of each token's features, to queries or keys ``b h l m``."""
        return x

    def rotation(self) -> Rotation | None:
        """Return ``transform`` as rotations of contiguous features, if it is that: see ``ops.permutation.Rotation``."""
        return None

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return a term per query and key, ``b h l s``: added to the scores of softmax; in linear attention exp(bias) is a factor."""
        raise NotImplementedError(f"{type(self).__name__} has no bias")

    def log_decay(self) -> Tensor | None:
        """Return log r of each head, ``h``: a key one token further away weighs r times as much."""
        return None

    @property
    def reach(self) -> tuple[int, ...] | None:
        """The longest distance, on each axis, that the encoding distinguishes from all shorter ones; ``None`` for any."""
        return None

    def check(self, reach: Sequence[int]) -> None:
        """Raise or warn where ``reach``, the longest distance on each axis between tokens, exceeds what the encoding distinguishes."""

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        """Fill buffers and parameters as the constructor does, by ``copy(tensor, value)``; values are computed on the CPU.

        A module built on the meta device has no values until it is moved and this is called. A loader passes a ``copy`` that skips the
        tensors it loaded.
        """

    @property
    def hooks(self) -> frozenset[str]:
        """The hooks that this encoding overrides."""
        return frozenset(hook for hook in HOOKS if getattr(type(self), hook) is not getattr(PositionEncoding, hook))


def _fill_buffers(encoding: PositionEncoding, incompatible_keys: object) -> None:
    """After ``load_state_dict``, fill the buffers that no state dict holds. (A function, so that layers can be pickled.)"""
    names = encoding._non_persistent_buffers_set
    device = next((x.device for x in (*encoding.buffers(), *encoding.parameters()) if not x.is_meta), torch.device("cpu"))
    for name in names:
        if getattr(encoding, name).is_meta:
            setattr(encoding, name, torch.empty_like(getattr(encoding, name), device=device))
    own = {id(getattr(encoding, name)) for name in names}
    with torch.random.fork_rng(devices=[]):  # loading must not advance the generator
        encoding.reset(lambda tensor, value: tensor.copy_(value) if id(tensor) in own else None)


class Compose(PositionEncoding):
    """Several encodings as one. ``Compose([permute, decay])`` is PermuteFormer; the paper's ablations are shorter lists.

    At most one may define ``transform``, one ``bias``, one ``log_decay``.

    >>> from permuteformer.positions.decay import Decay
    >>> from permuteformer.positions.permute import Permute
    >>> sorted(Compose([Permute(num_heads=2, feature_size=8), Decay(num_heads=2)]).hooks)
    ['log_decay', 'transform']
    """

    def __init__(self, encodings: Iterable[PositionEncoding]) -> None:
        super().__init__()
        parts = list(encodings)
        self.encodings = nn.ModuleList(parts)
        users = {hook: [part for part in parts if hook in part.hooks] for hook in HOOKS}
        for hook, found in users.items():
            if hook != "embed" and len(found) > 1:
                names = " and ".join(type(encoding).__name__ for encoding in found)
                raise ValueError(f"position encodings {names} both define {hook!r}: keep one of them")
        nothing = PositionEncoding()
        self._hooks = frozenset(hook for hook, found in users.items() if found)
        self._embedding = users["embed"]
        # In a dict, so that they are not submodules twice.
        self._by_hook = {hook: found[0] if found else nothing for hook, found in users.items()}
        transform = self._by_hook["transform"]
        self.keeps_sign, self.is_group = transform.keeps_sign, transform.is_group or transform is nothing
        self.num_heads, self.feature_size, self.axes = transform.num_heads, transform.feature_size, transform.axes
        self.two_sided = self._by_hook["log_decay"].two_sided

    @property
    def hooks(self) -> frozenset[str]:
        return self._hooks

    @property
    def decay_axes(self) -> int:
        return self._by_hook["log_decay"].decay_axes

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        for encoding in self._embedding:
            x = encoding.embed(x, positions)
        return x

    def tables(self, positions: Tensor) -> Any:
        return self._by_hook["transform"].tables(positions)

    def transform(self, x: Tensor, tables: Any) -> Tensor:
        return self._by_hook["transform"].transform(x, tables)

    def rotation(self) -> Rotation | None:
        return self._by_hook["transform"].rotation()

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return self._by_hook["bias"].bias(query_positions, key_positions)

    def log_decay(self) -> Tensor | None:
        return self._by_hook["log_decay"].log_decay()

    def check(self, reach: Sequence[int]) -> None:
        for encoding in self.encodings:
            encoding.check(reach)  # type: ignore[operator]
