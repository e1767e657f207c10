"""The contract of a position encoding, and the composition of several."""

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
"""What an encoding can do to a model. An attention says which of them it honours."""


class ExactBuffers(nn.Module):
    """Buffers named in ``exact`` move between devices, but keep their dtype when a model is cast: bfloat16 has 3 digits of them."""

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
    """Where tokens are, told to attention. Override the hooks that say what the encoding is; the others do nothing.

    Positions are an int64 tensor ``b l a``, with a axes (1 for text, 2 for an image); b may be 1. An encoding sees
    positions and nothing of width, prefix or length, so that the caller decides alone where a token stands.

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

    keeps_sign: ClassVar[bool] = True
    """Whether ``transform`` maps positive features to positive ones (Property 3). Where it does not, linear attention
    takes its normaliser from the features before ``transform``."""

    is_group: ClassVar[bool] = False
    """Whether ``transform`` at i + j is ``transform`` at i of ``transform`` at j, and keeps dot products. Then blocks of
    a sequence can each count from their own first token, with the tables of one block for all."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_refill)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the position to embeddings ``b l d``."""
        return x

    def tables(self, positions: Tensor) -> Any:
        """What ``transform`` has to know of these positions: ``b l a`` to one tensor or a tuple of them."""
        return positions

    def transform(self, x: Tensor, tables: Any) -> Tensor:
        """M_i x_i of equation 7 for queries or keys ``b h l m``: a linear map of each token's features."""
        return x

    def rotation(self, device: torch.device) -> Rotation | None:
        """``transform`` as rotations of neighbouring features, where it is one: see ``ops.permutation.Rotation``."""
        return None

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """A term for each query and key, ``b h l s``: added to the scores of softmax, as its exponential a factor of a kernel."""
        raise NotImplementedError(f"{type(self).__name__} has no bias")

    def log_decay(self) -> Tensor | None:
        """log r of each head, ``h``: a key one token further away weighs r times as much."""
        return None

    num_heads: int | None = None
    """Heads it was made for; ``None`` fits any. So with ``feature_size`` and ``axes``."""
    feature_size: int | None = None
    axes: int | None = None

    @property
    def reach(self) -> tuple[int, ...] | None:
        """The longest distance, on each axis, that it tells apart from all shorter ones; ``None`` for any."""
        return None

    two_sided: bool = False
    """Whether the decay runs both ways, r^|i-j|, as an encoder needs it."""

    def check(self, reach: Sequence[int]) -> None:
        """Raise or warn where ``reach``, the longest distance on each axis between tokens that see each other, is too long to tell."""

    def reset(self, copy: Copy = Tensor.copy_) -> None:
        """Fill buffers and parameters as the constructor does, by ``copy(tensor, value)``.

        Values are computed on the CPU wherever the module is. A module made on the meta device has no values until it is
        moved and this is called; whoever loads some of them passes a ``copy`` that leaves those alone.
        """

    @property
    def hooks(self) -> frozenset[str]:
        """The hooks this encoding uses: those its class overrides."""
        return frozenset(hook for hook in HOOKS if getattr(type(self), hook) is not getattr(PositionEncoding, hook))


def _refill(encoding: PositionEncoding, incompatible_keys: object) -> None:
    """After a state dict was loaded: fill the buffers that no state dict holds (a function of its own, so that layers can be pickled)."""
    names = encoding._non_persistent_buffers_set
    device = next((x.device for x in (*encoding.buffers(), *encoding.parameters()) if not x.is_meta), torch.device("cpu"))
    for name in names:
        if getattr(encoding, name).is_meta:
            setattr(encoding, name, torch.empty_like(getattr(encoding, name), device=device))
    own = {id(getattr(encoding, name)) for name in names}
    with torch.random.fork_rng(devices=[]):  # what is drawn for others is thrown away, and is not to show in what is drawn next
        encoding.reset(lambda tensor, value: tensor.copy_(value) if id(tensor) in own else None)


class Compose(PositionEncoding):
    """Several encodings as one. ``Compose([permute, decay])`` is PermuteFormer; the paper's ablations are shorter lists.

    At most one may transform, one bias, one decay: two of a kind would be applied one over the other unseen.

    >>> from permuteformer.positions.decay import Decay
    >>> from permuteformer.positions.permute import Permute
    >>> sorted(Compose([Permute(num_heads=2, feature_size=8), Decay(num_heads=2)]).hooks)
    ['log_decay', 'transform']
    """

    def __init__(self, encodings: Iterable[PositionEncoding]) -> None:
        super().__init__()
        self.encodings = nn.ModuleList(encodings)
        self._users = {hook: [n for n, encoding in enumerate(self._all()) if hook in encoding.hooks] for hook in HOOKS}
        for hook, users in self._users.items():
            if hook != "embed" and len(users) > 1:
                names = " and ".join(type(self.encodings[n]).__name__ for n in users)
                raise ValueError(f"position encodings {names} both define {hook!r}: keep one of them")
        self._hooks = frozenset(hook for hook, users in self._users.items() if users)

    @property
    def hooks(self) -> frozenset[str]:
        return self._hooks

    @property
    def keeps_sign(self) -> bool:  # type: ignore[override]
        return all(encoding.keeps_sign for encoding in self._all())

    @property
    def is_group(self) -> bool:  # type: ignore[override]
        return all(encoding.is_group for encoding in self._of("transform"))

    @property
    def two_sided(self) -> bool:  # type: ignore[override]
        return any(encoding.two_sided for encoding in self._of("log_decay"))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        for encoding in self._of("embed"):
            x = encoding.embed(x, positions)
        return x

    def tables(self, positions: Tensor) -> Any:
        for encoding in self._of("transform"):
            return encoding.tables(positions)
        return super().tables(positions)

    def transform(self, x: Tensor, tables: Any) -> Tensor:
        for encoding in self._of("transform"):
            x = encoding.transform(x, tables)
        return x

    def rotation(self, device: torch.device) -> Rotation | None:
        for encoding in self._of("transform"):
            return encoding.rotation(device)
        return None

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        for encoding in self._of("bias"):
            return encoding.bias(query_positions, key_positions)
        return super().bias(query_positions, key_positions)

    def log_decay(self) -> Tensor | None:
        for encoding in self._of("log_decay"):
            return encoding.log_decay()
        return None

    def check(self, reach: Sequence[int]) -> None:
        for encoding in self._all():
            encoding.check(reach)

    def _all(self) -> list[PositionEncoding]:
        return list(self.encodings)  # type: ignore[arg-type]

    def _of(self, hook: str) -> list[PositionEncoding]:
        """The encodings that define ``hook``: one or none, but for ``embed``."""
        encodings = self._all()
        return [encodings[n] for n in self._users[hook]]
