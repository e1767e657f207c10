"""The states of a causal model's layers, as transformers expects a cache."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, CacheLayerMixin

from permuteformer.attention import KVState
from permuteformer.formatting import printable
from permuteformer.ops.call import LinearState
from permuteformer.storage import atomic_write, read_bytes

State = LinearState | KVState
KINDS: dict[str, type[State]] = {kind.__name__: kind for kind in (LinearState, KVState)}

MAX_BYTES = 4 << 30
"""Of a saved cache, which is small: it does not grow with the text."""

SHAPES = {
    "seen": "layers",
    "kv": "b h m v",
    "z": "b h m",
    "next_position": "b",
    "segment": "b",
    "k": "b h s m",
    "v": "b h s v",
    "positions": "b s a",
    "key_mask": "b s",
    "segments": "b s",
}
"""Of the tensors of a saved cache."""


class StateLayer(CacheLayerMixin):  # type: ignore[misc]
    """The state of one layer, and how many tokens it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.seen = 0

    def store(self, state: State | None, tokens: int) -> None:
        """Keep the state after ``tokens`` more, padding included."""
        self.state = state
        self.seen += tokens
        self.is_initialized = state is not None

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def reset(self) -> None:
        self.state, self.seen, self.is_initialized = None, 0, False

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(indices.to(self.state[0].device))

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.batch_select_indices(torch.arange(len(self.state[0])).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("a state does not remember single tokens, so none can be removed: keep an earlier cache instead")

    def update(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("this cache holds states, not keys and values: the model stores them itself, on the device of each layer")

    lazy_initialization = offload = update


class PermuteFormerCache(Cache):  # type: ignore[misc]
    """One state per layer. With linear attention its size does not depend on the tokens seen.

    >>> from permuteformer import PermuteFormerConfig, PermuteFormerForCausalLM
    >>> config = PermuteFormerConfig.preset("permuteformer-lm", vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> cache = PermuteFormerForCausalLM(config)(torch.randint(3, 99, (1, 10)), use_cache=True).past_key_values
    >>> type(cache).__name__, cache.get_seq_length()
    ('PermuteFormerCache', 10)
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[StateLayer() for _ in range(num_layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(x.nbytes for layer in self.layers if layer.state is not None for x in layer.state if x is not None)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all states as tensors by name, to save with safetensors."""
        tensors = {"seen": torch.tensor([layer.seen for layer in self.layers])}
        for n, layer in enumerate(self.layers):
            if layer.state is not None:
                # Copies: a file cannot hold one tensor under two names, and layers may share a mask.
                parts = {name: x.clone(memory_format=torch.contiguous_format) for name, x in layer.state._asdict().items() if x is not None}
                tensors |= {f"{n}.{type(layer.state).__name__}.{name}": x for name, x in parts.items()}
        return tensors

    @classmethod
    def from_state_dict(cls, tensors: dict[str, Tensor]) -> PermuteFormerCache:
        """Return the cache whose ``state_dict`` this is."""
        if "seen" not in tensors:
            raise ValueError(f"not the tensors of a cache: 'seen' is missing from {sorted(tensors)[:5]}; save cache.state_dict()")
        _check({"seen": tensors["seen"]})
        cache = cls(len(tensors["seen"]))
        for n, (layer, seen) in enumerate(zip(cache.layers, tensors["seen"].tolist(), strict=True)):
            for name, kind in KINDS.items():
                prefix = f"{n}.{name}."
                parts = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
                if parts:
                    state = kind(**parts)
                    _check(state._asdict())
                    layer.store(state, seen)
        return cache

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all states to a safetensors file, atomically."""
        atomic_write(Path(path), save({name: x.cpu() for name, x in self.state_dict().items()}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device = "cpu") -> PermuteFormerCache:
        """Load the cache that ``save`` wrote, for a model on ``device``."""
        try:
            tensors = load(read_bytes(Path(path), MAX_BYTES))
            return cls.from_state_dict({name: x if name == "seen" else x.to(device) for name, x in tensors.items()})
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a cache that PermuteFormerCache.save wrote: {printable(str(error))}") from None


def _check(parts: dict[str, Tensor | None]) -> None:
    """Raise unless the tensors of a state have the right dtypes and shapes, and fit together."""
    sizes: dict[str, int] = {}
    for name, x in parts.items():
        if x is None:
            continue
        wanted, dtype = SHAPES[name].split(), torch.bool if name == "key_mask" else None if name in ("kv", "z", "k", "v") else torch.int64
        is_right = x.is_floating_point() if dtype is None else x.dtype == dtype
        if not is_right or x.dim() != len(wanted) or any(sizes.setdefault(size, n) != n for size, n in zip(wanted, x.shape, strict=True)):
            raise ValueError(f"{name} must be {SHAPES[name]}, {dtype or 'floating point'}, got {x.dtype} of shape {tuple(x.shape)}")


def _flatten(cache: PermuteFormerCache) -> tuple[list[Any], None]:
    return [layer.state for layer in cache.layers], None


def _flatten_with_keys(cache: PermuteFormerCache) -> tuple[list[tuple[Any, Any]], None]:
    return [(pytree.SequenceKey(n), layer.state) for n, layer in enumerate(cache.layers)], None


def _unflatten(parts: Iterable[Any], context: None) -> PermuteFormerCache:
    states = list(parts)
    cache = PermuteFormerCache(len(states))
    for layer, state in zip(cache.layers, states, strict=True):
        layer.store(state, 0)
    return cache


# So that torch.export sees the tensors. The number of tokens seen is omitted: a graph would be specialised to it.
pytree.register_pytree_node(
    PermuteFormerCache,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="permuteformer.models.cache.PermuteFormerCache",
)
