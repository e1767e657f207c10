"""The two halves of a block by the CPU kernel, where they are nothing but what it knows; see ``ops.sublayers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from permuteformer.attention.base import consecutive, of_tokens
from permuteformer.attention.layer import HOOKS, MultiHeadAttention
from permuteformer.attention.linear import LinearAttention
from permuteformer.models.dropout import Dropout
from permuteformer.ops import sublayers
from permuteformer.ops.backend import Call, Work, asked, why_not_native
from permuteformer.ops.checks import check_chosen, is_eager
from permuteformer.ops.native import load
from permuteformer.ops.sublayers import Linear, Norm

if TYPE_CHECKING:
    from permuteformer.models.backbone import Given, PermuteFormerBlock

FEWEST_TOKENS = 32
"""Of a batch: for fewer, weights are not worth being packed, unless they are few too."""
FEW_WEIGHTS = 2**16
MANY_WEIGHTS = 2**20
"""So many do not stay in the cache of a core with their gradients; then products are better done once, and kept for the backward pass."""
ACTIVATIONS = {type(ACT2FN["gelu"]): "gelu", type(ACT2FN["relu"]): "relu"}


class Known(NamedTuple):
    """Modules that were looked at: a norm, linear maps, and others. It is kept, and what may change is looked at again in every call."""

    modules: tuple[nn.Module, ...]
    kinds: tuple[type[nn.Module], ...]
    """Of the modules: one that is parametrised becomes of another kind."""
    is_known: bool
    """Whether the kernel knows modules of these kinds and sizes."""
    linear: int
    """How many linear maps there are."""
    weights: int
    """Numbers in them."""
    shapes: list[torch.Size | None]
    """Of the weight and bias of the norm and of each linear map; none where there is no bias."""
    hooks: list[dict[int, Any]]
    """Of the modules: all empty, as long as nobody listens to them."""

    @classmethod
    def look(cls, modules: tuple[nn.Module, ...], linear: int, is_known: bool) -> Known:
        """At modules in this order, of which the others are known or not."""
        norm, maps = modules[0], modules[1 : linear + 1]
        sizes = [(each.out_features, each.in_features) for each in maps if type(each) is nn.Linear]
        fits = len(sizes) == linear and not any(size % sublayers.ALIGNED for both in sizes for size in both)
        has_norm = type(norm) is nn.LayerNorm and norm.elementwise_affine and norm.bias is not None
        is_known = is_known and fits and has_norm
        shapes = [None if p is None else p.shape for p in cls._parameters_of(modules[: linear + 1])] if is_known else []
        hooks = [getattr(each, name) for each in modules if each is not None for name in HOOKS]
        return cls(modules, tuple(map(type, modules)), is_known, linear, sum(one * two for one, two in sizes), shapes, hooks)

    @staticmethod
    def _parameters_of(modules: tuple[nn.Module, ...]) -> list[nn.Parameter | None]:
        return [each._parameters[name] for each in modules for name in ("weight", "bias")]

    def is_of(self, modules: tuple[nn.Module, ...]) -> bool:
        """Whether these are the modules that were looked at."""
        return self.modules == modules and self.kinds == tuple(map(type, modules))

    def parts(self, x: Tensor) -> tuple[Norm, list[Linear]] | None:
        """The norm and the linear maps, where the kernel can be given them and ``x`` now."""
        if not self.is_known or any(self.hooks) or x.dtype != torch.float32 or x.device.type != "cpu":
            return None
        if x.numel() == 0 or (self.weights > FEW_WEIGHTS and x.numel() < FEWEST_TOKENS * x.shape[-1]):
            return None
        if self.weights >= MANY_WEIGHTS and torch.is_grad_enabled():
            return None
        if any("forward" in each.__dict__ for each in self.modules):
            return None  # replaced: accelerate brings weights from elsewhere so
        given = self._parameters_of(self.modules[: self.linear + 1])
        for p, shape in zip(given, self.shapes, strict=True):
            if p is None and shape is None:
                continue
            if type(p) is not nn.Parameter or p.dtype != torch.float32 or p.shape != shape or not p.is_contiguous() or not p.is_cpu:
                return None  # sharded, elsewhere, or of another type
        norm = Norm(given[0], given[1], self.modules[0].eps)  # type: ignore[arg-type]
        return norm, list(map(Linear, given[2::2], given[3::2]))  # type: ignore[arg-type]


def is_wanted() -> bool:
    """Whether halves of blocks may be the kernel's in a call of a model: asked once for all of its blocks."""
    return not isinstance(load(), str) and is_eager() and asked(None) in ("auto", "native")


def feed_forward(block: PermuteFormerBlock, x: Tensor) -> Tensor | None:
    """``x + dropout(feed-forward(norm(x)))``; ``None`` where the kernel does not know it."""
    here = block._modules
    modules: Any = (here["feed_forward_norm"], here["expand"], here["contract"], here["activation"], here["dropout"])
    *_, activation, dropout = modules
    if block.known_feed_forward is None or not block.known_feed_forward.is_of(modules):
        block.known_feed_forward = Known.look(modules, 2, type(activation) in ACTIVATIONS and type(dropout) is Dropout)
    parts = block.known_feed_forward.parts(x)
    if parts is None or (chance := dropout.draw()) is None:
        return None
    norm, (expand, contract) = parts
    return sublayers.feed_forward(x, norm, expand, contract, ACTIVATIONS[type(activation)], chance)


def attend(block: PermuteFormerBlock, x: Tensor, given: Given, chosen: Tensor | None) -> Tensor | None:
    """``x + dropout(attention(norm(x)))`` of the tokens ``chosen``, or of all; ``None`` where the kernel does not know it."""
    here = block._modules
    layer: Any = here["attention"]
    inside = layer._modules
    attention: Any = inside.get("attention")
    linear = (inside.get("query"), inside.get("key"), inside.get("value"), inside.get("output"))
    modules: Any = (here["attention_norm"], *linear, layer, attention, here["dropout"])
    if block.known_attention is None or not block.known_attention.is_of(modules):
        block.known_attention = Known.look(modules, 4, _is_known(layer, attention) and type(here["dropout"]) is Dropout)
    parts = block.known_attention.parts(x)
    if parts is None or not attention.chooses:
        return None
    is_turned = "transform" in attention.position.hooks
    rotation = attention.position.rotation(x.device) if is_turned else None
    if (is_turned and rotation is None) or (chance := block.dropout.draw()) is None:
        return None
    if given.reach is None:
        given.reach = layer.check(x, given.positions, given.key_mask, None, None, chosen)
    attention.position.check(given.reach)
    positions, queries, query_positions = given.positions, None, None
    if chosen is not None:
        b, length, _ = x.shape
        check_chosen(chosen, b, length)
        positions = consecutive(None, b, length, x.device, given.key_mask) if positions is None else positions.expand(b, -1, -1)
        queries, query_positions = of_tokens(x, chosen), of_tokens(positions, chosen)
    name = attention.feature_map.__name__
    work = Work(rotation, None, positions, given.key_mask, name, attention.normalize, causal=False, query_positions=query_positions)
    norm, (query, key, value, output) = parts
    return sublayers.attend(x, queries, norm, query, key, value, output, attention.num_heads, work, chance)


def _is_known(layer: nn.Module, attention: nn.Module) -> bool:
    """Whether the kernel knows this kind of attention."""
    if type(layer) is not MultiHeadAttention or type(attention) is not LinearAttention or attention.has_random_features:
        return False
    chunks = attention.chunk_size is not None
    call = Call(torch.empty(0), attention.feature_map, None, None, plain_normalizer=attention.plain_normalizer, chunk_size=chunks)
    return not why_not_native(call)
