"""A PermuteFormer out of a Hugging Face BERT or GPT-2: all weights that fit are taken over, the attention becomes linear.

After Kasai et al. 2021, "Finetuning pretrained transformers into RNNs": what comes out is a start for fine-tuning. Only with softmax
attention and the source's learned positions does a converted GPT-2 compute what the source does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from permuteformer.models.backbone import PermuteFormerModel, PermuteFormerPreTrainedModel
from permuteformer.models.card import NAME, plain_card
from permuteformer.models.causal_lm import PermuteFormerForCausalLM
from permuteformer.models.classifier import PermuteFormerForSequenceClassification
from permuteformer.models.config import PermuteFormerConfig
from permuteformer.models.loading import check_fields, check_size, in_words, quietly
from permuteformer.models.masked_lm import PermuteFormerForMaskedLM
from permuteformer.positions.learned import Learned
from permuteformer.texts import printable

# The source's class, what loads it, and what it becomes. BertForPreTraining is what Google's own checkpoints are.
KINDS: dict[str, tuple[Any, type[PermuteFormerPreTrainedModel]]] = {
    "BertModel": (AutoModel, PermuteFormerModel),
    "BertForMaskedLM": (AutoModelForMaskedLM, PermuteFormerForMaskedLM),
    "BertForPreTraining": (AutoModelForPreTraining, PermuteFormerForMaskedLM),
    "BertForSequenceClassification": (AutoModelForSequenceClassification, PermuteFormerForSequenceClassification),
    "GPT2Model": (AutoModel, PermuteFormerModel),
    "GPT2LMHeadModel": (AutoModelForCausalLM, PermuteFormerForCausalLM),
}
_BASE = {"bert": "BertModel", "gpt2": "GPT2Model"}
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
MOST_LAYERS = 1_000
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class ConversionReport:
    """What became of every tensor.

    Args:
        source: the class that was converted.
        target: the class it became.
        taken: the target's tensors that were taken over, and the source's tensor each is from (a part of it for GPT-2's ``c_attn``).
        new: the target's tensors that the source has nothing for: as in a new model.
        dropped: the source's tensors that are not, or not wholly, in the target, and why.
        notes: where the target computes something else with what was taken over.

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
            "to know": self.notes,
        }
        counts = f"{len(self.taken)} tensors taken over, {len(self.new)} new, {len(self.dropped)} dropped"
        lines = [f"{self.source} to {self.target}: {counts}"]
        for title, entries in parts.items():
            lines += [title, *(f"  {entry}" for entry in entries)] if entries else []
        return "\n".join(lines)


def convert(source: PreTrainedModel | str | os.PathLike[str], **overrides: Any) -> tuple[PermuteFormerPreTrainedModel, ConversionReport]:
    """Start a PermuteFormer from a BERT or GPT-2 of Hugging Face.

    Args:
        source: a model of a class in ``KINDS``, a folder that one was saved to, or its name on the hub. It is not changed.
        overrides: fields of ``PermuteFormerConfig``. If not given, attention is linear with as many features as a head is wide, and
            positions are ``permute`` (and ``decay`` where causal). ``position=[{"name": "learned", "max_length": n}]`` keeps the
            first n of the source's positions. Sizes are the source's.

    Returns:
        The model, of the source's dtype and device, in evaluation mode as after ``from_pretrained``; and what became of every tensor.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> source = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2))
    >>> model, report = convert(source)
    >>> type(model).__name__, report.dropped
    ('PermuteFormerForCausalLM', {'transformer.wpe.weight': "positions are by 'permute', 'decay' now"})
    """
    if isinstance(source, PreTrainedModel):
        _check_family(source.config.to_dict(), type(source).__name__)
        given = _Source(source, _kind_of(source))
        _check_weights(source)
    elif isinstance(source, (str, os.PathLike)):
        given = _load(source)
    else:
        _check_family({"model_type": getattr(source, "model_type", None)}, type(source).__name__)
        raise TypeError(f"source is {type(source).__name__}, which has no weights: give a model, the folder of one, or its name on the hub")
    config = _configure(given, overrides)
    model = KINDS[given.kind][1](config).to(device=given.model.device, dtype=given.model.dtype).eval()
    return model, _take_over(given, model)


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)


def convert_checkpoint(source_path: str | os.PathLike[str], output_path: str | os.PathLike[str], **overrides: Any) -> ConversionReport:
    """Convert a saved model into a folder that ``from_pretrained`` reads, with its tokenizer, and the report in ``report.json``.

    The folder appears when it is complete, or not at all. The tokenizer of a model from the hub is not copied.

    Args:
        source_path: the folder of a BERT or GPT-2, or its name on the hub.
        output_path: a folder that does not exist yet, or is empty.
        overrides: as of ``convert``.
    """
    output = Path(output_path)
    if output.is_symlink() or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
        raise FileExistsError(f"output_path {str(output)!r} exists and is not an empty folder: nothing is overwritten; name another one")
    model, report = convert(source_path, **overrides)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.parent / f".{output.name}.{uuid.uuid4().hex}"  # next to it, since a rename does not cross file systems
    unfinished.mkdir()
    try:
        model.save_pretrained(unfinished)
        origin = "Converted from a model of another architecture: report.json says which weights were taken over; it is to be trained on"
        (unfinished / NAME).write_text(plain_card(model, origin), encoding="utf-8")
        for name in TOKENIZER_FILES:  # they are data; nothing of them is run
            if (Path(source_path) / name).is_file():
                shutil.copyfile(Path(source_path) / name, unfinished / name)
        (unfinished / "report.json").write_text(json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if output.exists():
            output.rmdir()  # raises if somebody has filled it meanwhile
        unfinished.rename(output)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return report


class _Source(NamedTuple):
    """What is converted."""

    model: PreTrainedModel
    kind: str
    """A name in ``KINDS``."""
    missing: frozenset[str] = frozenset()
    """Tensors of the model that its checkpoint does not hold: transformers made them up."""
    unread: frozenset[str] = frozenset()
    """Tensors of the checkpoint that the model has no place for."""


def _load(source: str | os.PathLike[str]) -> _Source:
    path = os.fspath(source)
    is_folder = os.path.isdir(path)
    if not is_folder and (isinstance(source, os.PathLike) or not _HUB_NAME.fullmatch(path)):
        raise FileNotFoundError(f"source {path!r} is not a folder: give the folder a BERT or GPT-2 was saved to, or its name on the hub")
    if is_folder and not os.path.isfile(os.path.join(path, "config.json")):
        raise FileNotFoundError(f"source {path!r} has no config.json: give the folder that save_pretrained wrote")
    try:
        with in_words(path):
            fields, _ = PreTrainedConfig.get_config_dict(path)
            check_fields(fields)
            # A checkpoint that does not say what it is (older ones) is taken for the model without a head.
            saved_as = str((fields.get("architectures") or [_BASE.get(fields.get("model_type", ""), "model")])[0])
    except OSError as error:
        reason = "has no config.json that can be read" if is_folder else "is neither a folder here nor a model that can be had from the hub"
        raise FileNotFoundError(f"source {path!r} {reason}") from error
    _check_family(fields, saved_as)
    if saved_as not in KINDS:
        raise ValueError(_not_a_kind(saved_as))
    try:
        with in_words(path), quietly():
            _check_size(path, KINDS[saved_as][0], fields)
            # Older checkpoints are pickles; transformers reads them by torch.load with weights_only=True.
            model, info = KINDS[saved_as][0].from_pretrained(path, output_loading_info=True, trust_remote_code=False)
    except OSError as error:
        raise FileNotFoundError(f"source {path!r} has a configuration, but no weights that can be loaded") from error
    return _Source(model, saved_as, frozenset(info["missing_keys"]), frozenset(info["unexpected_keys"]))


def _check_size(path: str, kind: Any, fields: dict[str, Any]) -> None:
    """Raise where the configuration of a folder tells of far more than its weights hold."""
    files = [file for ending in ("*.safetensors", "*.bin") for file in Path(path).glob(ending) if file.is_file()]
    if not files:
        return
    held = sum(file.stat().st_size for file in files)
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    if config.num_hidden_layers > MOST_LAYERS:
        raise ValueError(f"config.json tells of {config.num_hidden_layers:,} layers; the limit is {MOST_LAYERS:,}")
    with torch.device("meta"):
        check_size(sum(weight.numel() for weight in kind.from_config(config, trust_remote_code=False).parameters()), held)


def _check_family(fields: dict[str, Any], name: str) -> None:
    """Raise unless a configuration is that of a BERT encoder or a GPT-2."""
    family = str(fields.get("model_type") or "")
    if family not in _BASE:
        what = f"{printable(name)} of the family {family!r:.100}" if family else f"{printable(name)}, of no family"
        raise ValueError(f"source is a {what}: only 'bert' and 'gpt2' can be converted")
    if fields.get("add_cross_attention"):
        raise ValueError(f"source is a {name} with cross-attention, which has no place here: convert a model without it")
    if family == "bert" and fields.get("is_decoder"):
        raise ValueError(f"source is a {name} with is_decoder=True: a BERT can be converted as an encoder only; for a decoder take a GPT-2")


def _kind_of(source: PreTrainedModel) -> str:
    for ancestor in type(source).__mro__:
        if ancestor.__name__ in KINDS:
            return ancestor.__name__
    raise ValueError(_not_a_kind(type(source).__name__))


def _not_a_kind(name: str) -> str:
    return f"source is a {printable(name)}, whose head has no counterpart: what can be converted is {', '.join(KINDS)}"


def _check_weights(source: PreTrainedModel) -> None:
    for name, weight in source.named_parameters():
        if weight.is_meta:
            raise ValueError(f"source has no values in {name!r} (it is on the meta device): load its weights first")
        if not weight.is_floating_point():
            raise ValueError(f"source has {weight.dtype} in {name!r}: load it without quantization")


def _configure(source: _Source, overrides: dict[str, Any]) -> PermuteFormerConfig:
    """The configuration: the source's sizes, our attention and positions, and what was asked for."""
    given = source.model.config
    if given.model_type == "gpt2":
        family: dict[str, Any] = {
            "intermediate_size": given.n_inner if given.n_inner is not None else 4 * given.hidden_size,
            "hidden_act": given.activation_function,
            "hidden_dropout": given.resid_pdrop,
            "layer_norm_eps": given.layer_norm_epsilon,
            "pooling": "last",
            "causal": True,
        }
    else:
        family = {
            "intermediate_size": given.intermediate_size,
            "hidden_act": given.hidden_act,
            "hidden_dropout": given.hidden_dropout_prob,
            "layer_norm_eps": given.layer_norm_eps,
            "pooling": "cls",
            "causal": False,
        }
    alike = (
        *(size for size in _SIZES if size != "intermediate_size"),
        *("initializer_range", "tie_word_embeddings", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"),
    )
    fields = {**family, **{name: getattr(given, name) for name in alike}}
    for name in _SIZES:
        if name in overrides and overrides[name] != fields[name]:
            advice = "; call resize_token_embeddings on the converted model" if name == "vocab_size" else ""
            raise ValueError(
                f"{name}={overrides[name]!r} does not fit the source, whose {name} is {fields[name]}: weights are taken over as they "
                f"are, so leave it out{advice}"
            )
    if source.kind == "BertForSequenceClassification" and not overrides.keys() & {"num_labels", "id2label", "label2id"}:
        fields |= {"id2label": dict(given.id2label), "label2id": dict(given.label2id), "problem_type": given.problem_type}
    causal = overrides.get("causal", fields["causal"])
    fields["attention"] = {"name": "linear", "feature_multiplier": 1}
    fields["position"] = [{"name": "permute"}, {"name": "decay"}] if causal else [{"name": "permute"}]
    config = PermuteFormerConfig(**{**fields, **overrides})
    for entry in config.position:
        if entry["name"] == "learned" and entry["max_length"] > given.max_position_embeddings:
            raise ValueError(
                f"position 'learned' with max_length={entry['max_length']} does not fit the source, whose table has "
                f"{given.max_position_embeddings} positions: take that many or fewer, or a relative encoding, which has no end"
            )
    return config


class _Part(NamedTuple):
    """A tensor of the target, and how it is had from one of the source."""

    target: str
    source: str
    take: Callable[[Tensor], Tensor] = lambda x: x


def _take_over(source: _Source, model: PermuteFormerPreTrainedModel) -> ConversionReport:
    """Copy what fits, and say what became of every tensor on both sides."""
    report = ConversionReport(source.kind, type(model).__name__, notes=_notes(source.model.config, model.config))
    here, there = model.state_dict(), dict(source.model.named_parameters(remove_duplicate=False))
    embedding = source.model.get_input_embeddings().weight
    tied = model.config.tie_word_embeddings
    used = set[int]()  # by identity, since tied tensors have several names
    for target, name, take in _parts(source.model, model):
        if name in source.missing:
            continue
        given = take(there[name].detach())
        if target == "lm_head.weight" and tied and there[name] is not embedding:
            reason = "the output is tied to the embedding here"
        elif target not in here:
            reason = f"there is no {target} here"
        elif here[target].shape != given.shape:
            reason = f"{target} is {_shape(here[target])} here, and would be {_shape(given)}"
        else:
            here[target].copy_(given)
            report.taken[target] = name
            used.add(id(there[name]))
            continue
        report.dropped[name] = "; ".join(filter(None, [report.dropped.get(name), reason]))
    report.new.extend(name for name in here if name not in report.taken)
    left = [name for name, weight in there.items() if id(weight) not in used and name not in source.missing]
    for name in (*left, *sorted(source.unread)):
        report.dropped.setdefault(name, _why_dropped(name, model.config))
    return report


def _shape(x: Tensor) -> str:
    return "x".join(map(str, x.shape))


def _parts(source: PreTrainedModel, model: PermuteFormerPreTrainedModel) -> Iterator[_Part]:
    """Every tensor of the target that the source may have something for."""
    there = f"{source.base_model_prefix}." if source.base_model is not source else ""
    here = "model." if model.base_model is not model else ""
    backbone = _gpt2_parts if source.config.model_type == "gpt2" else _bert_parts
    for part in backbone(source.config):
        yield _Part(here + part.target, there + part.source, part.take)
    table = "wpe.weight" if source.config.model_type == "gpt2" else "embeddings.position_embeddings.weight"
    for n, encoding in enumerate(model.base_model.position.encodings):
        if isinstance(encoding, Learned) and encoding.axes == 1:
            length = encoding.max_length
            yield _Part(f"{here}position.encodings.{n}.axis_tables.0.weight", there + table, lambda x, length=length: x[:length])  # type: ignore[misc]
            break  # a second table on top of it starts as a new one
    if isinstance(model, PermuteFormerForCausalLM):
        yield _Part("lm_head.weight", "lm_head.weight")
    elif isinstance(model, PermuteFormerForMaskedLM):
        yield from _both("dense", "cls.predictions.transform.dense")
        yield from _both("dense_norm", "cls.predictions.transform.LayerNorm")
        yield from _both("lm_head", "cls.predictions.decoder")
    elif isinstance(model, PermuteFormerForSequenceClassification):
        yield from _both("pooler.dense", "bert.pooler.dense")
        yield from _both("classifier", "classifier")


def _both(target: str, source: str, take: Callable[[Tensor], Tensor] = lambda x: x) -> Iterator[_Part]:
    for tensor in ("weight", "bias"):
        yield _Part(f"{target}.{tensor}", f"{source}.{tensor}", take)


def _bert_parts(config: Any) -> Iterator[_Part]:
    """BERT's norms stand after a sub-layer, ours before one: each goes to the sub-layer that reads its output.

    So every sub-layer reads through the norm it was trained with. What differs is that our residual path goes past the norms.
    """
    yield _Part("embed_tokens.weight", "embeddings.word_embeddings.weight")
    norm = "embeddings.LayerNorm"
    for n in range(config.num_hidden_layers):
        here, there = f"layers.{n}", f"encoder.layer.{n}"
        yield from _both(f"{here}.attention_norm", norm)
        for name in ("query", "key", "value"):
            yield from _both(f"{here}.attention.{name}", f"{there}.attention.self.{name}")
        yield from _both(f"{here}.attention.output", f"{there}.attention.output.dense")
        yield from _both(f"{here}.feed_forward_norm", f"{there}.attention.output.LayerNorm")
        yield from _both(f"{here}.expand", f"{there}.intermediate.dense")
        yield from _both(f"{here}.contract", f"{there}.output.dense")
        norm = f"{there}.output.LayerNorm"
    yield from _both("norm", norm)


def _gpt2_parts(config: Any) -> Iterator[_Part]:
    """GPT-2 is pre-norm as we are. Its Conv1D is a linear layer with the weight transposed, ``c_attn`` three of them side by side."""
    yield _Part("embed_tokens.weight", "wte.weight")
    for n in range(config.num_hidden_layers):
        here, there = f"layers.{n}", f"h.{n}"
        yield from _both(f"{here}.attention_norm", f"{there}.ln_1")
        for third, name in enumerate(("query", "key", "value")):
            scale = _query_scale(config, n) if name == "query" else 1.0
            yield from _both(
                f"{here}.attention.{name}",
                f"{there}.attn.c_attn",
                lambda x, third=third, scale=scale: _transposed(x).chunk(3)[third] * scale,  # type: ignore[misc]
            )
        yield from _both(f"{here}.attention.output", f"{there}.attn.c_proj", _transposed)
        yield from _both(f"{here}.feed_forward_norm", f"{there}.ln_2")
        yield from _both(f"{here}.expand", f"{there}.mlp.c_fc", _transposed)
        yield from _both(f"{here}.contract", f"{there}.mlp.c_proj", _transposed)
    yield from _both("norm", "ln_f")


def _transposed(x: Tensor) -> Tensor:
    return x.t() if x.dim() == 2 else x


def _query_scale(config: Any, layer: int) -> float:
    """What queries are multiplied by, so that dividing by the root of the head size, as we always do, gives the source's products."""
    scale = 1.0 if config.scale_attn_weights else float((config.hidden_size // config.num_attention_heads) ** 0.5)
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale


def _why_dropped(name: str, config: PermuteFormerConfig) -> str:
    if "wpe." in name or "position_embeddings." in name:
        names = ", ".join(repr(entry["name"]) for entry in config.position)
        return f"positions are by {names} now" if names else "there are no positions now"
    if "token_type_embeddings." in name:
        return "there are no token types here"
    if "pooler." in name:
        return "only a classifier has a pooler here"
    if "seq_relationship." in name:
        return "there is no next-sentence head here"
    return "there is nothing like it here"


def _notes(given: Any, config: PermuteFormerConfig) -> list[str]:
    """Where the target computes something else with what it took over, by the configurations of both."""
    notes: list[str] = []
    if config.attention["name"] != "softmax":
        notes.append(f"attention was softmax and is {config.attention['name']!r}: fine-tune before use")
    if given.model_type == "bert":
        notes.append(
            "BERT's norms stand after the residual sum, here they stand before each sub-layer: embeddings.LayerNorm became the first "
            "attention_norm, attention.output.LayerNorm the feed_forward_norm of its layer, output.LayerNorm the attention_norm of the "
            "next layer, the last one the final norm. Sub-layers read through the norms they were trained with, but the residual path "
            "is not normalised any more, so outputs differ from BERT's with any attention: fine-tune before use"
        )
        notes.append("BERT adds token type 0 to every token of a single text; here nothing is added")
        attention_dropout = given.attention_probs_dropout_prob
    else:
        if not given.scale_attn_weights or given.scale_attn_by_inverse_layer_idx:
            notes.append("the source scales its attention in its own way: queries were multiplied so that it comes out the same")
        attention_dropout = given.attn_pdrop
        if given.embd_pdrop != given.resid_pdrop:
            notes.append(f"dropout of embeddings was {given.embd_pdrop} and is {config.hidden_dropout}, as everywhere")
    if attention_dropout:
        notes.append(f"there is no dropout of attention weights here; it was {attention_dropout}")
    return notes
