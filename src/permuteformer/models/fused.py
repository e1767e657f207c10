"""The two halves of a model's block by the CPU kernel, where their modules are plain; see ``ops.fused_block``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from permuteformer.attention.base import positions_of, select_tokens
from permuteformer.attention.layer import MultiHeadAttention
from permuteformer.attention.linear import LinearAttention
from permuteformer.ops import fused_block, native_backend
from permuteformer.ops.call import Tokens
from permuteformer.ops.checks import is_eager
from permuteformer.ops.modules import Dropout, Linear, has_kernel

if TYPE_CHECKING:
    from permuteformer.models.backbone import PermuteFormerBlock

MIN_TOKENS = 32
"""Tokens of a batch below which packing the weights costs more than it saves, unless the weights are few too."""
FEW_WEIGHTS = 2**16
MANY_WEIGHTS = 2**20
"""Weights that do not stay in the cache of a core with their gradients; training is then faster by modules."""
ACTIVATIONS = {type(ACT2FN["gelu"]): "gelu", type(ACT2FN["relu"]): "relu"}
LINEAR = (nn.Linear, Linear)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_enabled() -> bool:
    """Return whether blocks may be fused in a call of a model: decided once for all of its blocks."""
    return is_eager() and has_kernel()


class Eligibility(NamedTuple):
    """Whether modules can be fused: a norm, linear maps, and others. Kept with a block; what may change is checked again in every call."""

    modules: tuple[nn.Module, ...]
    kinds: tuple[type[nn.Module], ...]
    """Types of the modules: a parametrized module has another type."""
    is_eligible: bool
    maps: int
    """The number of linear maps."""
    weights: int
    """The number of their weights."""
    shapes: list[torch.Size | None]
    """Of the weight and bias of the norm and of each map; ``None`` for a missing bias."""
    hooks: list[dict[int, Any]]
    """Of the modules: all empty unless one has a hook."""

    @classmethod
    def of(cls, modules: tuple[nn.Module, ...], maps: int, is_eligible: bool) -> Eligibility:
        """Inspect modules in this order; ``is_eligible``: whether those after the maps are."""
        norm, linear = modules[0], modules[1 : maps + 1]
        sizes = [(each.out_features, each.in_features) for each in linear if isinstance(each, nn.Linear) and type(each) in LINEAR]
        fits = len(sizes) == maps and not any(size % fused_block.ALIGNED for both in sizes for size in both)
        has_norm = type(norm) is nn.LayerNorm and norm.elementwise_affine and norm.bias is not None
        is_eligible = is_eligible and fits and has_norm
        shapes = [None if p is None else p.shape for p in cls._parameters_of(modules[: maps + 1])] if is_eligible else []
        hooks = [getattr(each, name) for each in modules if each is not None for name in HOOKS]
        return cls(modules, tuple(map(type, modules)), is_eligible, maps, sum(one * two for one, two in sizes), shapes, hooks)

    @staticmethod
    def _parameters_of(modules: tuple[nn.Module, ...]) -> list[nn.Parameter | None]:
        return [each._parameters[name] for each in modules for name in ("weight", "bias")]

    def matches(self, modules: tuple[nn.Module, ...]) -> bool:
        """Return whether these are the modules that were inspected."""
        return self.modules == modules and self.kinds == tuple(map(type, modules))

    def parts(self, x: Tensor) -> tuple[fused_block.Norm, list[fused_block.Linear]] | None:
        """Return the norm and the maps for the kernel, or ``None`` where it cannot have them or ``x`` in this call."""
        if not self.is_eligible or any(self.hooks) or x.dtype != torch.float32 or x.device.type != "cpu" or x.numel() == 0:
            return None
        if self.weights > FEW_WEIGHTS and x.numel() < MIN_TOKENS * x.shape[-1]:
            return None
        if self.weights >= MANY_WEIGHTS and torch.is_grad_enabled():
            return None
        if any("forward" in each.__dict__ for each in self.modules):
            return None  # replaced, as accelerate does to load weights
        parameters = self._parameters_of(self.modules[: self.maps + 1])
        for p, shape in zip(parameters, self.shapes, strict=True):
            if p is None and shape is None:
                continue
            if type(p) is not nn.Parameter or p.dtype != torch.float32 or p.shape != shape or not p.is_contiguous() or not p.is_cpu:
                return None  # sharded, elsewhere, or of another dtype
        norm = fused_block.Norm(parameters[0], parameters[1], self.modules[0].eps)  # type: ignore[arg-type]
        return norm, list(map(fused_block.Linear, parameters[2::2], parameters[3::2]))  # type: ignore[arg-type]


def feed_forward(block: PermuteFormerBlock, x: Tensor) -> Tensor | None:
    """Return ``x + dropout(feed-forward(norm(x)))``, or ``None`` where the kernel cannot compute it."""
    here = block._modules
    modules: Any = (here["feed_forward_norm"], here["expand"], here["contract"], here["activation"], here["dropout"])
    *_, activation, dropout = modules
    if block.feed_forward_eligibility is None or not block.feed_forward_eligibility.matches(modules):
        block.feed_forward_eligibility = Eligibility.of(modules, 2, type(activation) in ACTIVATIONS and type(dropout) is Dropout)
    parts = block.feed_forward_eligibility.parts(x)
    if parts is None or (chance := dropout.draw()) is None:
        return None
    norm, (expand, contract) = parts
    return fused_block.feed_forward(x, norm, expand, contract, ACTIVATIONS[type(activation)], chance)


def attend(block: PermuteFormerBlock, x: Tensor, tokens: Tokens) -> Tensor | None:
    """Return ``x + dropout(attention(norm(x)))`` of ``tokens.queries``, or of all tokens; ``None`` where the kernel cannot compute it."""
    here = block._modules
    layer: Any = here["attention"]
    inside = layer._modules
    attention: Any = inside.get("attention")
    maps = tuple(inside.get(name) for name in ("query", "key", "value", "output"))
    modules: Any = (here["attention_norm"], *maps, layer, attention, here["dropout"])
    if block.attention_eligibility is None or not block.attention_eligibility.matches(modules):
        block.attention_eligibility = Eligibility.of(modules, 4, _is_plain(layer, attention) and type(here["dropout"]) is Dropout)
    parts = block.attention_eligibility.parts(x)
    if parts is None or attention.sequence is not None:
        return None
    if attention.position.two_sided and not (tokens.queries is not None and attention.can_select(tokens)):
        return None  # a decay; global tokens have none
    encoding = attention.encoding
    rotation = None if encoding is None else encoding.rotation()
    if (encoding is not None and rotation is None) or (chance := block.dropout.draw()) is None:
        return None
    positions, queries, query_positions = tokens.positions, None, None
    if tokens.queries is not None:
        positions = positions_of(tokens, None, x)
        queries, query_positions = select_tokens(x, tokens.queries), select_tokens(positions, tokens.queries)
    cycles, of_head = (None, None) if rotation is None else rotation
    number, normalize = native_backend.MAPS[attention.feature_map.__name__], attention.normalizer != "none"
    mixing = fused_block.Attention(attention.num_heads, number, normalize, cycles, of_head, positions, query_positions, tokens.mask)
    norm, linear = parts
    return fused_block.attend(x, queries, norm, tuple(linear), mixing, chance)  # type: ignore[arg-type]


def _is_plain(layer: nn.Module, attention: nn.Module) -> bool:
    """Return whether the kernel has this attention."""
    if type(layer) is not MultiHeadAttention or type(attention) is not LinearAttention or attention.causal:
        return False
    is_known = native_backend.has_map(attention.feature_map) and attention.normalizer != "plain" and attention.chunk_size is None
    return is_known and "bias" not in attention.position.hooks
