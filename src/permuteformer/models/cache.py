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
from permuteformer.folders import content_of, write_whole
from permuteformer.ops.state import LinearState
from permuteformer.texts import printable

State = LinearState | KVState

MOST_BYTES = 4 << 30
"""Of a saved state, which is small: it does not grow with the text."""

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
    "after": "b",
    "last_segment": "b",
}
"""Of the tensors of a layer's state."""


class StateLayer(CacheLayerMixin):  # type: ignore[misc]
    """The state of one layer, and how many tokens it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.next_position: Tensor | None = None
        self.last_segment: Tensor | None = None
        self.seen = 0

    def store(self, state: State, next_position: Tensor, tokens: int, segments: Tensor | None = None) -> None:
        """Keep the state after ``tokens`` more, padding among them, where the next real token of each row stands, and its segment."""
        self.state = state
        self.next_position = next_position
        self.last_segment = self.last_segment if segments is None else segments[:, -1]
        self.seen += tokens
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def reset(self) -> None:
        self.state, self.next_position, self.last_segment, self.seen, self.is_initialized = None, None, None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None and self.next_position is not None:
            indices = indices.to(self.next_position.device)
            self.state, self.next_position = self.state.select(indices), self.next_position[indices]
            self.last_segment = None if self.last_segment is None else self.last_segment[indices]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.next_position is not None:
            self.batch_select_indices(torch.arange(len(self.next_position)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("a state does not remember single tokens, so none can be taken back: keep an earlier state instead")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("this cache holds states, not keys and values: the model stores them itself")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("this cache holds states, not keys and values: the model stores them itself")

    def offload(self) -> None:
        raise NotImplementedError("states stay on the device of their layer: they are small")


class PermuteFormerCache(Cache):  # type: ignore[misc]
    """A state a layer. For linear attention its size does not depend on the tokens seen.

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
        """All states as tensors by name, to save with safetensors and go on from elsewhere."""
        tensors = {"seen": torch.tensor([layer.seen for layer in self.layers])}
        for n, layer in enumerate(self.layers):
            if layer.state is not None:
                tensors[f"{n}.next_position"] = layer.next_position.clone()
                if layer.last_segment is not None:
                    tensors[f"{n}.last_segment"] = layer.last_segment.clone()
                # Copies: a file cannot hold one tensor under two names, and layers may share a mask.
                parts = {name: x.clone(memory_format=torch.contiguous_format) for name, x in layer.state._asdict().items() if x is not None}
                tensors |= {f"{n}.{type(layer.state).__name__}.{name}": x for name, x in parts.items()}
        return tensors

    @classmethod
    def from_state_dict(cls, tensors: dict[str, Tensor]) -> PermuteFormerCache:
        """The cache that ``state_dict`` was taken of."""
        if "seen" not in tensors:
            raise ValueError(f"these are not the tensors of a state: 'seen' is not among {sorted(tensors)[:5]}; save cache.state_dict()")
        _check({"seen": tensors["seen"]})
        cache = cls(len(tensors["seen"]))
        kinds = {kind.__name__: kind for kind in (LinearState, KVState)}
        for n, (layer, seen) in enumerate(zip(cache.layers, tensors["seen"].tolist(), strict=True)):
            for name, kind in kinds.items():
                prefix = f"{n}.{name}."
                parts = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
                if parts:
                    state, after, segment = kind(**parts), tensors[f"{n}.next_position"], tensors.get(f"{n}.last_segment")
                    _check({**state._asdict(), "after": after, "last_segment": segment})
                    layer.store(state, after, seen)
                    layer.last_segment = segment
        return cache

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all states to a safetensors file, whole or not at all."""
        write_whole(Path(path), save({name: x.cpu() for name, x in self.state_dict().items()}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device = "cpu") -> PermuteFormerCache:
        """The cache that ``save`` wrote, for a model on ``device``: it goes on as if it had never stopped."""
        try:
            tensors = load(content_of(Path(path), MOST_BYTES))
            return cls.from_state_dict({name: x if name == "seen" else x.to(device) for name, x in tensors.items()})
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            why = printable(str(error))
            raise ValueError(f"{path} does not hold the state of a model, as PermuteFormerCache.save writes it: {why}") from None


def _check(parts: dict[str, Tensor | None]) -> None:
    """Raise unless tensors of a state are of the types and shapes that they must have, and go together."""
    sizes: dict[str, int] = {}
    for name, x in parts.items():
        if x is None:
            continue
        wanted, dtype = SHAPES[name].split(), torch.bool if name == "key_mask" else None if name in ("kv", "z", "k", "v") else torch.int64
        is_right = x.is_floating_point() if dtype is None else x.dtype == dtype
        if not is_right or x.dim() != len(wanted) or any(sizes.setdefault(size, n) != n for size, n in zip(wanted, x.shape, strict=True)):
            raise ValueError(f"{name} must be {SHAPES[name]}, of {dtype or 'floating point'}; it is {x.dtype} of shape {tuple(x.shape)}")


def _flatten(cache: PermuteFormerCache) -> tuple[list[Any], None]:
    return [[layer.state, layer.next_position, layer.last_segment] for layer in cache.layers], None


def _flatten_with_keys(cache: PermuteFormerCache) -> tuple[list[tuple[Any, Any]], None]:
    parts, context = _flatten(cache)
    return [(pytree.SequenceKey(n), part) for n, part in enumerate(parts)], context


def _unflatten(parts: Iterable[Any], context: None) -> PermuteFormerCache:
    layers = list(parts)
    cache = PermuteFormerCache(len(layers))
    for layer, (state, next_position, last_segment) in zip(cache.layers, layers, strict=True):
        layer.state, layer.next_position, layer.last_segment, layer.is_initialized = state, next_position, last_segment, state is not None
    return cache


# So that torch.export sees the tensors in it. The number of tokens seen is left out: a graph would be made for one number only.
pytree.register_pytree_node(
    PermuteFormerCache,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="permuteformer.models.cache.PermuteFormerCache",
)
