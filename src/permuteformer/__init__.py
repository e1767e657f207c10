"""PermuteFormer: relative positions for linear attention, at any length.

Public names load their module when first used, so that importing the package costs little more than importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from permuteformer.version import __version__

if TYPE_CHECKING:
    from permuteformer.attention import ATTENTIONS, Attention, KVState, MultiHeadAttention, PermuteFormerAttention, build
    from permuteformer.models import (
        ByteTokenizer,
        PermuteFormerConfig,
        PermuteFormerForCausalLM,
        PermuteFormerForMaskedLM,
        PermuteFormerForMatching,
        PermuteFormerForSequenceClassification,
        PermuteFormerForTokenClassification,
        PermuteFormerModel,
    )
    from permuteformer.ops.call import LinearState
    from permuteformer.ops.feature_map import FEATURE_MAPS, feature_map
    from permuteformer.ops.linear import linear_attention
    from permuteformer.positions import POSITIONS, Compose, PositionEncoding
    from permuteformer.positions.decay import Decay
    from permuteformer.positions.permute import Permute

_MODULES = {
    "permuteformer.attention": ("ATTENTIONS", "Attention", "KVState", "MultiHeadAttention", "PermuteFormerAttention", "build"),
    "permuteformer.models": (
        "ByteTokenizer",
        "PermuteFormerConfig",
        "PermuteFormerForCausalLM",
        "PermuteFormerForMaskedLM",
        "PermuteFormerForMatching",
        "PermuteFormerForSequenceClassification",
        "PermuteFormerForTokenClassification",
        "PermuteFormerModel",
    ),
    "permuteformer.ops.feature_map": ("FEATURE_MAPS", "feature_map"),
    "permuteformer.ops.linear": ("linear_attention",),
    "permuteformer.ops.call": ("LinearState",),
    "permuteformer.positions": ("POSITIONS", "Compose", "PositionEncoding"),
    "permuteformer.positions.decay": ("Decay",),
    "permuteformer.positions.permute": ("Permute",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ATTENTIONS",
    "FEATURE_MAPS",
    "POSITIONS",
    "Attention",
    "ByteTokenizer",
    "Compose",
    "Decay",
    "KVState",
    "LinearState",
    "MultiHeadAttention",
    "Permute",
    "PermuteFormerAttention",
    "PermuteFormerConfig",
    "PermuteFormerForCausalLM",
    "PermuteFormerForMaskedLM",
    "PermuteFormerForMatching",
    "PermuteFormerForSequenceClassification",
    "PermuteFormerForTokenClassification",
    "PermuteFormerModel",
    "PositionEncoding",
    "__version__",
    "build",
    "feature_map",
    "linear_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
