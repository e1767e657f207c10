"""The configuration of every model: one backbone, an attention and positions by name."""

from __future__ import annotations

import copy
from dataclasses import field, fields
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from permuteformer.attention import MultiHeadAttention, build
from permuteformer.models.loading import check_fields, one_sentence
from permuteformer.models.presets import PRESETS
from permuteformer.ops.checks import check_whole
from permuteformer.positions import POSITIONS
from permuteformer.registry import unknown

# What transformers itself passes to a configuration besides its fields.
_FROM_TRANSFORMERS = {
    "_attn_implementation_internal",
    "_commit_hash",
    "_experts_implementation_internal",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "torch_dtype",
}

LARGEST = {
    "vocab_size": 2**27,
    "hidden_size": 2**16,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "intermediate_size": 2**20,
    "axes": 2**4,
    "num_labels": 2**20,
}
"""Far beyond any model, and small enough that a configuration of a stranger takes no more than a moment to be looked at."""

MOST_POSITIONS = 16
MOST_FEATURES = 2**20

DTYPES = ("float32", "float16", "bfloat16", "float64")


@strict
class PermuteFormerConfig(PreTrainedConfig):  # type: ignore[misc]
    """What a model is made of.

    Args:
        vocab_size: tokens there are. 259 is the byte tokenizer's: 256 bytes after PAD, CLS and SEP.
        hidden_size: width.
        num_hidden_layers: blocks.
        num_attention_heads: heads of each block.
        intermediate_size: width of the feed-forward.
        hidden_act: activation of the feed-forward, a name of transformers.
        hidden_dropout: dropout on embeddings, and after attention and feed-forward.
        attention: the name of an attention, and its arguments: ``{"name": "linear", "feature_multiplier": 4}``.
        position: names of position encodings, and their arguments: ``[{"name": "permute"}, {"name": "decay"}]``.
        positions_per_layer: draw random positions (permutations) anew for each layer; else all layers share them.
        causal: a token sees no token after it: language models.
        axes: numbers in a position: 1 for text, 2 for images.
        scale_embeddings: multiply embeddings by sqrt(hidden_size), as fairseq does.
        pooling: how a classifier sums up a sequence: its first token through a dense layer and tanh (``"cls"``), the mean of its
            real tokens, or its last real token (for causal models).
        initialization: ``"bert"`` (normal, ``initializer_range``) or ``"fairseq"`` (Xavier; embeddings normal, 1/sqrt(width)).
        initializer_range: deviation of the normal distribution of ``"bert"``.
        layer_norm_eps: epsilon of the layer norms.
        tie_word_embeddings: the output of a language model is its embedding.
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
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> PermuteFormerConfig:
        """The configuration of a row of the paper, with any field overridden: ``permuteformer models`` lists them."""
        if name not in PRESETS:
            raise ValueError(unknown("preset", name, PRESETS))
        return cls(**copy.deepcopy({**PRESETS[name], **overrides}))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As of transformers, but a configuration of another family is refused, where its fields would be taken for this one's."""
        family = config_dict.get("model_type", cls.model_type)
        if family != cls.model_type:
            raise ValueError(
                f"this is a checkpoint of a {family!r:.100} model, not of {cls.model_type!r}: load it with its own class; from BERT and "
                "GPT-2, permuteformer.models.convert takes over the weights that fit"
            )
        with one_sentence():
            check_fields(config_dict)
            _check_kinds(config_dict)
            return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        known = {entry.name for entry in fields(self)}
        check_whole(0, num_labels=(labels := kwargs.get("num_labels") or 0))
        _at_most("num_labels", labels)  # before transformers gives each of them a name
        for key in kwargs:
            if key not in known | _FROM_TRANSFORMERS:
                raise TypeError(unknown("field of PermuteFormerConfig", key, known))
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Raise unless the parts fit together: a layer is made of them, without memory."""
        for name, value in {"attention": [self.attention], "position": self.position}.items():
            for entry in value:
                if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                    raise ValueError(f"{name} must be a name and its arguments, such as {{'name': 'linear'}}; it is {entry!r}")
        check_whole(vocab_size=self.vocab_size, num_hidden_layers=self.num_hidden_layers, intermediate_size=self.intermediate_size)
        for name in LARGEST.keys() - {"num_labels"}:
            _at_most(name, getattr(self, name))
        features = self.attention.get("feature_multiplier", 1)
        if isinstance(features, int) and features * self.hidden_size > MOST_FEATURES:
            raise ValueError(
                f"feature_multiplier times hidden_size must be at most {MOST_FEATURES:,}; they are {features:,} and {self.hidden_size:,}"
            )
        if len(self.position) > MOST_POSITIONS:
            raise ValueError(f"position must be a list of at most {MOST_POSITIONS} encodings; it has {len(self.position):,}")
        if not 0 <= self.hidden_dropout < 1:
            raise ValueError(f"hidden_dropout must be from 0 to below 1; it is {self.hidden_dropout}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(unknown("hidden_act", self.hidden_act, ACT2FN))
        if self.pooling == "last" and not self.causal:
            raise ValueError('pooling="last" is for causal models: in others the last token is no summary; take "cls" or "mean"')
        with torch.device("meta"):
            self.build_layer(0)
            self.build_embedding_positions()

    def build_layer(self, layer: int) -> MultiHeadAttention:
        """The attention of one layer."""
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
        """The position encodings that act on embeddings."""
        structure = {"hidden_size": self.hidden_size, "axes": self.axes}
        specified = [self._position(entry, 0) for entry in self.position if _embeds(entry)]
        return [POSITIONS.build(name, arguments, structure) for name, arguments in specified]

    def _position(self, entry: dict[str, Any], layer: int) -> tuple[str, dict[str, Any]]:
        arguments = dict(entry)
        name = arguments.pop("name")
        if self.positions_per_layer and "seed" in POSITIONS.options(name):
            arguments["seed"] = arguments.get("seed", 0) + layer
        return name, arguments


def _at_most(name: str, value: int) -> None:
    if value > LARGEST[name]:
        raise ValueError(f"{name} must be at most {LARGEST[name]:,}; it is {value:,}")


def _check_kinds(content: dict[str, Any]) -> None:
    """Raise where a field that transformers reads by itself is of a kind that it does not expect."""
    for name in ("dtype", "torch_dtype"):
        if (dtype := content.get(name)) is not None and not (isinstance(dtype, str) and dtype.removeprefix("torch.") in DTYPES):
            raise ValueError(f"{name} must be one of {', '.join(DTYPES)}; it is {dtype!r:.100}")
    for name in ("id2label", "label2id"):
        if not isinstance(labels := content.get(name) or {}, dict):
            raise ValueError(f"{name} must be an object of numbers and names; it is a {type(labels).__name__}")


def _embeds(entry: dict[str, Any]) -> bool:
    return "embed" in vars(POSITIONS[entry["name"]])
