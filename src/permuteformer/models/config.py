"""The configuration of every model: sizes, and an attention and position encodings by name."""

# No "from __future__ import annotations": huggingface_hub checks the types of fields, but not of annotations that are strings.

import copy
import math
from dataclasses import field, fields
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from permuteformer.attention import MultiHeadAttention, build
from permuteformer.models.loading import check_fields, readable_errors
from permuteformer.ops.checks import check_integer
from permuteformer.positions import POSITIONS
from permuteformer.presets import PRESETS
from permuteformer.registry import unknown

FROM_TRANSFORMERS = {
    *("_attn_implementation_internal", "attn_implementation", "_experts_implementation_internal", "experts_implementation"),
    *("_commit_hash", "_name_or_path", "name_or_path", "auto_map", "model_type", "num_labels", "output_attentions", "torch_dtype"),
}
"""Arguments that transformers passes to a configuration besides its fields."""

LIMITS = {
    "vocab_size": 2**27,
    "hidden_size": 2**16,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "intermediate_size": 2**20,
    "axes": 2**4,
}
"""Far beyond any model, and small enough that an untrusted configuration is checked quickly."""
MAX_LABELS = 2**20
MAX_ENCODINGS = 16
MAX_FEATURES = 2**20

DTYPES = ("float32", "float16", "bfloat16", "float64")


@strict
class PermuteFormerConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configuration of a model.

    Args:
        vocab_size: number of tokens. 259 is the byte tokenizer's: PAD, CLS, SEP and 256 bytes.
        hidden_size: width.
        num_hidden_layers: blocks.
        num_attention_heads: heads of each block.
        intermediate_size: width of the feed-forward.
        hidden_act: activation of the feed-forward, a name of transformers.
        hidden_dropout: dropout on embeddings, and after attention and feed-forward.
        attention: the name of an attention, and its arguments: ``{"name": "linear", "feature_multiplier": 4}``.
        position: names of position encodings, and their arguments: ``[{"name": "permute"}, {"name": "decay"}]``.
        positions_per_layer: draw other random positions (permutations) for each layer; default: all layers share them.
        causal: a token sees itself and earlier tokens only: language models.
        axes: numbers per position: 1 for text, 2 for images.
        scale_embeddings: multiply embeddings by sqrt(hidden_size), as fairseq does.
        pooling: how a classifier summarises a sequence: its first token through a dense layer and tanh (``"cls"``), the mean of its
            real tokens, or its last real token (for causal models).
        initialization: ``"bert"`` (normal, ``initializer_range``) or ``"fairseq"`` (Xavier; embeddings normal, 1/sqrt(width)).
        initializer_range: standard deviation of the normal distribution of ``"bert"``.
        layer_norm_eps: epsilon of the layer norms.
        tie_word_embeddings: use the embedding as the output of a language model.
        use_cache: return states from causal models.

    >>> PermuteFormerConfig.preset("permuteformer-lm", vocab_size=1000).hidden_size
    512
    """

    model_type = "permuteformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 259
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    hidden_act: str = "gelu"
    hidden_dropout: float | int = 0.1
    attention: dict[str, Any] = field(default_factory=lambda: {"name": "linear"})
    position: list[dict[str, Any]] = field(default_factory=lambda: [{"name": "permute"}])
    positions_per_layer: bool = False
    causal: bool = False
    axes: int = 1
    scale_embeddings: bool = False
    pooling: Literal["cls", "mean", "last"] = "cls"
    initialization: Literal["bert", "fairseq"] = "bert"
    initializer_range: float | int = 0.02
    layer_norm_eps: float | int = 1e-5
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "PermuteFormerConfig":
        """Return the configuration of a preset, with any field overridden: ``permuteformer models`` lists them."""
        if name not in PRESETS:
            raise ValueError(unknown("preset", name, PRESETS))
        return cls(**copy.deepcopy({**PRESETS[name], **overrides}))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build as transformers does, but refuse a configuration of another family, whose fields have other meanings."""
        family = config_dict.get("model_type", cls.model_type)
        if family != cls.model_type:
            raise ValueError(
                f"this is a checkpoint of a {family!r:.100} model, not of {cls.model_type!r}: load it with its own class, or convert a "
                "BERT or GPT-2 by permuteformer.models.convert"
            )
        with readable_errors():
            check_fields(config_dict)
            _check_types(config_dict)
            return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        labels = kwargs.get("num_labels") or 0
        check_integer(0, num_labels=labels)
        _check_limit("num_labels", labels, MAX_LABELS)  # before transformers gives each label a name
        known = {entry.name for entry in fields(self)}
        for key in kwargs:
            if key not in known | FROM_TRANSFORMERS:
                raise TypeError(unknown("field of PermuteFormerConfig", key, known))
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Raise unless all fields are valid and the parts fit together: build one layer on the meta device."""
        for name, entries in {"attention": [self.attention], "position": self.position}.items():
            for entry in entries:
                if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                    raise ValueError(f"{name} must be a name and its arguments, such as {{'name': 'linear'}}, got {entry!r}")
        check_integer(vocab_size=self.vocab_size, num_hidden_layers=self.num_hidden_layers, intermediate_size=self.intermediate_size)
        for name, limit in LIMITS.items():
            _check_limit(name, getattr(self, name), limit)
        multiplier = self.attention.get("feature_multiplier", 1)
        if isinstance(multiplier, int):
            _check_limit("feature_multiplier times hidden_size", multiplier * self.hidden_size, MAX_FEATURES)
        if len(self.position) > MAX_ENCODINGS:
            raise ValueError(f"position must be a list of at most {MAX_ENCODINGS} encodings, got {len(self.position):,}")
        if not 0 <= self.hidden_dropout < 1:
            raise ValueError(f"hidden_dropout must be from 0 to below 1, got {self.hidden_dropout}")
        for name in ("initializer_range", "layer_norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(unknown("hidden_act", self.hidden_act, ACT2FN))
        if self.pooling == "last" and not self.causal:
            raise ValueError('pooling="last" is for causal models: set causal=True, or use "cls" or "mean"')
        with torch.device("meta"):
            self.build_layer(0)
            self.build_embedding_positions()

    @property
    def has_two_sided_decay(self) -> bool:
        """Whether attention has a two-sided decay, and so global tokens."""
        with torch.device("meta"):
            return self.build_layer(0).attention.position.two_sided

    def build_layer(self, layer: int) -> MultiHeadAttention:
        """Build the attention of one layer."""
        attention = dict(self.attention)
        return build(
            attention.pop("name"),
            [self._position(entry, layer) for entry in self.position if not _embeds(entry)],
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            causal=self.causal,
            axes=self.axes,
            **attention,
        )

    def build_embedding_positions(self) -> list[Any]:
        """Build the position encodings that act on embeddings."""
        structure = {"hidden_size": self.hidden_size, "axes": self.axes}
        specified = [self._position(entry, 0) for entry in self.position if _embeds(entry)]
        return [POSITIONS.build(name, arguments, structure) for name, arguments in specified]

    def _position(self, entry: dict[str, Any], layer: int) -> tuple[str, dict[str, Any]]:
        """Return the name and the arguments of an encoding; each layer has its own seed with ``positions_per_layer``."""
        arguments = dict(entry)
        name = arguments.pop("name")
        if self.positions_per_layer and "seed" in POSITIONS.options(name):
            arguments["seed"] = arguments.get("seed", 0) + layer
        return name, arguments


def _embeds(entry: dict[str, Any]) -> bool:
    return "embed" in vars(POSITIONS[entry["name"]])


def _check_limit(name: str, value: int, limit: int) -> None:
    if value > limit:
        raise ValueError(f"{name} must be at most {limit:,}, got {value:,}")


def _check_types(content: dict[str, Any]) -> None:
    """Raise if a field that transformers reads itself has a type that it does not expect."""
    for name in ("dtype", "torch_dtype"):
        dtype = content.get(name)
        if dtype is not None and not (isinstance(dtype, str) and dtype.removeprefix("torch.") in DTYPES):
            raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, got {dtype!r:.100}")
    for name in ("id2label", "label2id"):
        labels = content.get(name) or {}
        if not isinstance(labels, dict):
            raise ValueError(f"{name} must be an object of ids and names, got {type(labels).__name__}")
