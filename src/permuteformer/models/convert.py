"""Convert a Hugging Face BERT or GPT-2 to a PermuteFormer: copy all weights that fit, and replace its attention by linear attention.

The result is a start for fine-tuning (Kasai et al. 2021, "Finetuning pretrained transformers into RNNs"). A converted GPT-2 computes what
the source does only if softmax attention and the source's learned positions are kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permuteformer.formatting import printable
from permuteformer.models.backbone import PermuteFormerModel, PermuteFormerPreTrainedModel
from permuteformer.models.card import NAME, plain_card
from permuteformer.models.config import PermuteFormerConfig
from permuteformer.models.heads import PermuteFormerForCausalLM, PermuteFormerForMaskedLM, PermuteFormerForSequenceClassification
from permuteformer.models.loading import check_fields, check_size, readable_errors, silence_transformers
from permuteformer.positions.learned import Learned
from permuteformer.storage import atomic_folder

FAMILIES = {"bert": "BertModel", "gpt2": "GPT2Model"}
"""Families that can be converted, and the class without a head of each."""

# Our names, and those of both families, in the order of FAMILIES.
FIELDS = {
    "intermediate_size": ("intermediate_size", "n_inner"),
    "hidden_act": ("hidden_act", "activation_function"),
    "hidden_dropout": ("hidden_dropout_prob", "resid_pdrop"),
    "layer_norm_eps": ("layer_norm_eps", "layer_norm_epsilon"),
}
LAYER_MODULES = {
    "attention.query": ("attention.self.query", "attn.c_attn"),
    "attention.key": ("attention.self.key", "attn.c_attn"),
    "attention.value": ("attention.self.value", "attn.c_attn"),
    "attention.output": ("attention.output.dense", "attn.c_proj"),
    "feed_forward_norm": ("attention.output.LayerNorm", "ln_2"),
    "expand": ("intermediate.dense", "mlp.c_fc"),
    "contract": ("output.dense", "mlp.c_proj"),
}
LAYERS = ("encoder.layer", "h")
EMBEDDINGS = ("embeddings.word_embeddings", "wte")
POSITION_TABLES = ("embeddings.position_embeddings.weight", "wpe.weight")
ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attn_pdrop")

MASKED_LM = {
    "dense": "cls.predictions.transform.dense",
    "dense_norm": "cls.predictions.transform.LayerNorm",
    "lm_head": "cls.predictions.decoder",
}
CLASSIFIER = {"pooler.dense": "bert.pooler.dense", "classifier": "classifier"}

KINDS: dict[str, tuple[Any, type[PermuteFormerPreTrainedModel], dict[str, str]]] = {
    "BertModel": (transformers.AutoModel, PermuteFormerModel, {}),
    "BertForMaskedLM": (transformers.AutoModelForMaskedLM, PermuteFormerForMaskedLM, MASKED_LM),
    "BertForPreTraining": (transformers.AutoModelForPreTraining, PermuteFormerForMaskedLM, MASKED_LM),  # Google's checkpoints
    "BertForSequenceClassification": (transformers.AutoModelForSequenceClassification, PermuteFormerForSequenceClassification, CLASSIFIER),
    "GPT2Model": (transformers.AutoModel, PermuteFormerModel, {}),
    "GPT2LMHeadModel": (transformers.AutoModelForCausalLM, PermuteFormerForCausalLM, {"lm_head": "lm_head"}),
}
"""Classes that can be converted: the class that loads each, the class it becomes, and the modules of its head."""

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SAME_FIELDS = (*SIZES[:4], "initializer_range", "tie_word_embeddings", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id")
MAX_LAYERS = 1_000

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt"),
)
ORIGIN = "Converted from a model of another architecture: report.json lists the weights that were taken over; train it before use"

WHY_DROPPED = {
    "token_type_embeddings.": "there are no token types here",
    "pooler.": "only a classifier has a pooler here",
    "seq_relationship.": "there is no next-sentence head here",
    "": "there is nothing like it here",
}
"""Reasons by a part of a tensor's name."""

BERT_NOTES = (
    "BERT's norms follow the residual sum, ours precede each sub-layer: each norm was moved to the sub-layer that reads its output. The "
    "residual path is not normalised any more, so outputs differ from BERT's with any attention: fine-tune before use",
    "BERT adds token type 0 to every token of a single text; here nothing is added",
)


@dataclass(frozen=True)
class ConversionReport:
    """The origin of every tensor of a converted model.

    Args:
        source: the class that was converted.
        target: the class it became.
        taken: tensors of the target that were taken over, and the source's tensor of each (a part of it for GPT-2's ``c_attn``).
        new: tensors of the target that are initialised as in a new model.
        dropped: tensors of the source that are not, or not completely, in the target, and why.
        notes: differences between the computations of source and target.

    >>> print(ConversionReport("A", "B", taken={"embed.weight": "wte.weight"}, dropped={"wpe.weight": "no positions"}))
    A to B: 1 tensors taken over, 0 new, 1 dropped
    taken over
      embed.weight <- wte.weight
    dropped
      wpe.weight: no positions
    """

    source: str
    target: str
    taken: dict[str, str] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = {
            "taken over": [f"{target} <- {source}" for target, source in self.taken.items()],
            "new": self.new,
            "dropped": [f"{name}: {reason}" for name, reason in self.dropped.items()],
            "notes": self.notes,
        }
        counts = f"{len(self.taken)} tensors taken over, {len(self.new)} new, {len(self.dropped)} dropped"
        lines = [f"{self.source} to {self.target}: {counts}"]
        for title, entries in parts.items():
            lines += [title, *(f"  {entry}" for entry in entries)] if entries else []
        return "\n".join(lines)


def convert(source: PreTrainedModel | str | os.PathLike[str], **overrides: Any) -> tuple[PermuteFormerPreTrainedModel, ConversionReport]:
    """Convert a BERT or GPT-2 of Hugging Face to a PermuteFormer.

    Args:
        source: a model of a class in ``KINDS``, the folder of a saved one, or its name on the hub. It is not changed.
        overrides: fields of ``PermuteFormerConfig``, except sizes. Default: linear attention with as many features as the head size,
            positions ``permute`` (and ``decay`` if causal). ``position=[{"name": "learned", "max_length": n}]`` keeps the first n
            positions of the source.

    Returns:
        The model, with the source's dtype and device, in evaluation mode; and the origin of every tensor.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> source = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2))
    >>> model, report = convert(source)
    >>> type(model).__name__, report.dropped
    ('PermuteFormerForCausalLM', {'transformer.wpe.weight': "positions are by 'permute', 'decay' now"})
    """
    if not isinstance(source, (PreTrainedModel, str, os.PathLike)):
        raise TypeError(f"source must be a model, its folder or its name on the hub, got {type(source).__name__}")
    given = _check_model(source) if isinstance(source, PreTrainedModel) else _load(source)
    config = _configure(given, overrides)
    model = KINDS[given.kind][1](config).to(device=given.model.device, dtype=given.model.dtype).eval()
    return model, _copy_weights(given, model)


def convert_checkpoint(source_path: str | os.PathLike[str], output_path: str | os.PathLike[str], **overrides: Any) -> ConversionReport:
    """Convert a saved model to a folder for ``from_pretrained``, with its tokenizer and the report in ``report.json``.

    The folder is written atomically. The tokenizer of a model on the hub is not copied.

    Args:
        source_path: the folder of a BERT or GPT-2, or its name on the hub.
        output_path: a folder that does not exist yet, or is empty.
        overrides: as of ``convert``.
    """
    output = Path(output_path)
    if output.is_symlink() or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
        raise FileExistsError(f"output_path {str(output)!r} exists and is not an empty folder: choose another one, nothing is overwritten")
    model, report = convert(source_path, **overrides)
    with atomic_folder(output) as partial:
        model.save_pretrained(partial)
        (partial / NAME).write_text(plain_card(model, ORIGIN), encoding="utf-8")
        for name in TOKENIZER_FILES:  # copied as data, never run
            if (Path(source_path) / name).is_file():
                shutil.copyfile(Path(source_path) / name, partial / name)
        (partial / "report.json").write_text(json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if output.exists():
            output.rmdir()  # raises if it was filled in the meantime
    return report


class _Source(NamedTuple):
    model: PreTrainedModel
    kind: str
    missing: frozenset[str] = frozenset()
    """Tensors of the model that its checkpoint lacks: transformers initialised them."""
    unread: frozenset[str] = frozenset()
    """Tensors of the checkpoint that the model has no place for."""

    @property
    def column(self) -> int:
        """The place of its family in the tables."""
        return list(FAMILIES).index(self.model.config.model_type)


def _check_model(model: PreTrainedModel) -> _Source:
    """Check a model in memory."""
    kind = next((kind.__name__ for kind in type(model).__mro__ if kind.__name__ in KINDS), type(model).__name__)
    _check_kind(kind, model.config.to_dict())
    for name, weight in model.named_parameters():
        if weight.is_meta:
            raise ValueError(f"source has no values in {name!r}, which is on the meta device: load its weights first")
        if not weight.is_floating_point():
            raise ValueError(f"source has {weight.dtype} in {name!r}: load it without quantization")
    return _Source(model, kind)


def _load(source: str | os.PathLike[str]) -> _Source:
    """Load a model from a folder or the hub."""
    path = os.fspath(source)
    is_folder = os.path.isdir(path)
    if not is_folder and (isinstance(source, os.PathLike) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path)):
        raise FileNotFoundError(f"source {path!r} is not a folder: pass the folder of a saved BERT or GPT-2, or its name on the hub")
    if is_folder and not os.path.isfile(os.path.join(path, "config.json")):
        raise FileNotFoundError(f"source {path!r} has no config.json: pass a folder that save_pretrained wrote")
    try:
        with readable_errors(path):
            fields, _ = transformers.PreTrainedConfig.get_config_dict(path)
            check_fields(fields)
            # Older checkpoints do not name their class: they are read as the model without a head.
            kind = str((fields.get("architectures") or [FAMILIES.get(fields.get("model_type", ""), "model")])[0])
    except OSError as error:
        reason = "has no readable config.json" if is_folder else "is neither a folder nor a model on the hub"
        raise FileNotFoundError(f"source {path!r} {reason}") from error
    _check_kind(kind, fields)
    try:
        with readable_errors(path), silence_transformers():
            _check_size(path, kind, fields)
            # Older checkpoints are pickles; transformers reads them by torch.load with weights_only=True.
            model, info = KINDS[kind][0].from_pretrained(path, output_loading_info=True, trust_remote_code=False)
    except OSError as error:
        raise FileNotFoundError(f"source {path!r} has a configuration, but no weights that can be loaded") from error
    return _Source(model, kind, frozenset(info["missing_keys"]), frozenset(info["unexpected_keys"]))


def _check_kind(kind: str, fields: dict[str, Any]) -> None:
    """Raise unless a class and its configuration can be converted."""
    name, family = printable(kind), str(fields.get("model_type") or "")
    if family not in FAMILIES:
        raise ValueError(f"source must be of the family 'bert' or 'gpt2', got {name} of the family {family!r:.100}")
    if fields.get("add_cross_attention"):
        raise ValueError(f"source must not have cross-attention, got {name} with add_cross_attention=True")
    if family == "bert" and fields.get("is_decoder"):
        raise ValueError(f"source must be an encoder if it is a BERT, got {name} with is_decoder=True: convert a GPT-2 for a decoder")
    if kind not in KINDS:
        raise ValueError(f"source must be one of {', '.join(KINDS)}, got {name}, whose head has no counterpart")


def _check_size(path: str, kind: str, fields: dict[str, Any]) -> None:
    """Raise if the configuration of a folder describes a far larger model than its weight files hold."""
    files = [file for ending in ("*.safetensors", "*.bin") for file in Path(path).glob(ending) if file.is_file()]
    if not files:
        return
    config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    if config.num_hidden_layers > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers must be at most {MAX_LAYERS:,}, got {config.num_hidden_layers:,}")
    with torch.device("meta"):
        needed = sum(weight.numel() for weight in KINDS[kind][0].from_config(config, trust_remote_code=False).parameters())
    check_size(needed, sum(file.stat().st_size for file in files))


def _configure(source: _Source, overrides: dict[str, Any]) -> PermuteFormerConfig:
    """Return the configuration: the source's sizes, our attention and positions, and the overrides."""
    given = source.model.config
    fields = {name: getattr(given, name) for name in SAME_FIELDS}
    fields |= {name: getattr(given, names[source.column]) for name, names in FIELDS.items()}
    fields |= {"causal": True, "pooling": "last"} if given.model_type == "gpt2" else {"causal": False, "pooling": "cls"}
    if fields["intermediate_size"] is None:
        fields["intermediate_size"] = 4 * given.hidden_size  # GPT-2's default
    for name in SIZES:
        if overrides.get(name, fields[name]) != fields[name]:
            advice = ", and call resize_token_embeddings on the converted model" if name == "vocab_size" else ""
            raise ValueError(f"{name} must be the source's {fields[name]}, got {overrides[name]!r}: leave it out{advice}")
    if source.kind == "BertForSequenceClassification" and not overrides.keys() & {"num_labels", "id2label", "label2id"}:
        fields |= {"id2label": dict(given.id2label), "label2id": dict(given.label2id), "problem_type": given.problem_type}
    causal = overrides.get("causal", fields["causal"])
    fields["attention"] = {"name": "linear", "feature_multiplier": 1}
    fields["position"] = [{"name": "permute"}, {"name": "decay"}] if causal else [{"name": "permute"}]
    config = PermuteFormerConfig(**{**fields, **overrides})
    for entry in config.position:
        if entry["name"] == "learned" and entry["max_length"] > given.max_position_embeddings:
            raise ValueError(
                f"max_length of position 'learned' must be at most the source's {given.max_position_embeddings}, got "
                f"{entry['max_length']}: use a relative encoding for longer inputs"
            )
    return config


def _copy_weights(source: _Source, model: PermuteFormerPreTrainedModel) -> ConversionReport:
    """Copy the tensors that fit, and report on every tensor of both models."""
    report = ConversionReport(source.kind, type(model).__name__, notes=_notes(source, model.config))
    here, there = model.state_dict(), dict(source.model.named_parameters(remove_duplicate=False))
    embedding = source.model.get_input_embeddings().weight
    used = set[int]()  # by identity, since tied tensors have several names
    for target, name in _tensor_names(source, model):
        if name in source.missing or name not in there:
            continue
        value = _convert_tensor(source.model, name, target, there[name].detach())
        if target.endswith("axis_tables.0.weight"):
            value = value[: len(here[target])]  # the first positions
        if target == "lm_head.weight" and model.config.tie_word_embeddings and there[name] is not embedding:
            reason = "the output is tied to the embedding here"
        elif target not in here:
            reason = f"there is no {target} here"
        elif here[target].shape != value.shape:
            reason = f"{target} is {list(here[target].shape)} here, and would be {list(value.shape)}"
        else:
            here[target].copy_(value)
            report.taken[target] = name
            used.add(id(there[name]))
            continue
        report.dropped[name] = "; ".join(filter(None, [report.dropped.get(name), reason]))
    report.new.extend(name for name in here if name not in report.taken)
    left = [name for name, weight in there.items() if id(weight) not in used and name not in source.missing]
    for name in (*left, *sorted(source.unread)):
        report.dropped.setdefault(name, _why_dropped(name, model.config))
    return report


def _tensor_names(source: _Source, model: PermuteFormerPreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield names of tensors of the target, and of the tensors of the source that they come from, if these exist."""
    column, layers = source.column, source.model.config.num_hidden_layers
    here = "model." if model.base_model is not model else ""
    there = f"{source.model.base_model_prefix}." if source.model.base_model is not source.model else ""
    modules = {"embed_tokens": EMBEDDINGS[column]}
    for n in range(layers):
        modules[f"layers.{n}.attention_norm"] = _norm_before(source.model.config, n)
        modules |= {f"layers.{n}.{target}": f"{LAYERS[column]}.{n}.{names[column]}" for target, names in LAYER_MODULES.items()}
    modules["norm"] = _norm_before(source.model.config, layers)
    modules = {here + target: there + module for target, module in modules.items()} | KINDS[source.kind][2]
    for target, module in modules.items():
        for tensor in ("weight", "bias"):
            yield f"{target}.{tensor}", f"{module}.{tensor}"
    for n, encoding in enumerate(model.base_model.position.encodings):
        if isinstance(encoding, Learned) and encoding.axes == 1:
            yield f"{here}position.encodings.{n}.axis_tables.0.weight", there + POSITION_TABLES[column]
            break  # further tables are new


def _norm_before(config: Any, n: int) -> str:
    """Return the norm whose output layer n reads; after the last layer, the final norm.

    BERT's norms follow a sub-layer, ours precede one: each goes to the sub-layer that reads its output. So every sub-layer reads through
    the norm it was trained with, but our residual path bypasses the norms.
    """
    if config.model_type == "gpt2":
        return f"h.{n}.ln_1" if n < config.num_hidden_layers else "ln_f"
    return f"encoder.layer.{n - 1}.output.LayerNorm" if n else "embeddings.LayerNorm"


def _convert_tensor(source: PreTrainedModel, name: str, target: str, x: Tensor) -> Tensor:
    """Return the target's tensor: GPT-2's ``Conv1D`` is a transposed linear layer, and ``c_attn`` is three of them side by side."""
    if not isinstance(source.get_submodule(name.rpartition(".")[0]), Conv1D):
        return x
    x = x.t()
    module = target.split(".")[-2]
    if ".c_attn." in name:
        x = x.chunk(3)[("query", "key", "value").index(module)]
    if module == "query":  # we divide products by the root of the head size: scale queries so that they are the source's
        config = source.config
        scale = 1.0 if config.scale_attn_weights else (config.hidden_size // config.num_attention_heads) ** 0.5
        x = x * (scale / (int(target.split(".")[-4]) + 1) if config.scale_attn_by_inverse_layer_idx else scale)
    return x


def _why_dropped(name: str, config: PermuteFormerConfig) -> str:
    if name.endswith(POSITION_TABLES):
        names = ", ".join(repr(entry["name"]) for entry in config.position)
        return f"positions are by {names} now" if names else "there are no positions now"
    return next(reason for part, reason in WHY_DROPPED.items() if part in name)


def _notes(source: _Source, config: PermuteFormerConfig) -> list[str]:
    """Return differences between the computations of source and target."""
    given, notes = source.model.config, []
    if config.attention["name"] != "softmax":
        notes.append(f"attention was softmax and is {config.attention['name']!r}: fine-tune before use")
    if given.model_type == "bert":
        notes += BERT_NOTES
    elif not given.scale_attn_weights or given.scale_attn_by_inverse_layer_idx:
        notes.append("the source scales its attention in its own way: queries were multiplied so that products stay the same")
    if given.model_type == "gpt2" and given.embd_pdrop != given.resid_pdrop:
        notes.append(f"dropout of embeddings was {given.embd_pdrop} and is {config.hidden_dropout}, as everywhere")
    if dropout := getattr(given, ATTENTION_DROPOUT[source.column]):
        notes.append(f"there is no dropout of attention weights here; it was {dropout}")
    return notes
