"""Checks of model folders before anything is built from them, and readable errors for what cannot be loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import nn
from transformers.utils import logging

from permuteformer.formatting import printable
from permuteformer.storage import read_json

if TYPE_CHECKING:
    from permuteformer.models.config import PermuteFormerConfig

SPARE = 2**26
"""Parameters that a model may have beyond those of its weight files, such as a new head."""

CODE_FIELDS = tuple(
    f"{before}{kind}_implementation{after}" for kind in ("attn", "experts") for before, after in (("", ""), ("_", ""), ("_", "_internal"))
)
"""Fields of a configuration for which transformers downloads a kernel, which is a program, if the value is the name of a repository."""
BUILT_IN = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "grouped_mm", "batched_mm")
"""Values of these fields that download nothing."""


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise if a configuration asks for code of others."""
    for name in CODE_FIELDS:
        value = fields.get(name)
        if value not in BUILT_IN:
            raise ValueError(f"{name}={printable(repr(value))} may ask for code of others: remove it from config.json")
    if fields.get("quantization_config") is not None:
        raise ValueError("quantization_config is not supported, since it needs other libraries: use a model that is not quantized")


def check_folder(folder: Path, kind: type[PermuteFormerConfig]) -> None:
    """Raise unless configuration and weights can be read and their sizes agree. Only the headers of weight files are read."""
    fields = read_json(folder / "config.json")
    if not isinstance(fields, dict):
        raise ValueError(f"config.json must be an object, got {type(fields).__name__}")
    sizes = [size for file in _weight_files(folder) for size in _tensor_sizes(file)]
    config = kind.from_dict(fields)
    if not sizes:
        return
    if config.num_hidden_layers > len(sizes):
        raise ValueError(
            f"config.json has num_hidden_layers={config.num_hidden_layers:,}, but there are only {len(sizes):,} weight tensors"
        )
    check_size(_model_size(config), sum(sizes))


def check_size(needed: int, stored: int) -> None:
    """Raise if a model is far larger than its weight files: transformers would allocate and initialise the rest."""
    if needed > 2 * stored + SPARE:
        raise ValueError(
            f"config.json describes a model of {needed:,} parameters, but the weights have {stored:,}: they do not belong together"
        )


@contextmanager
def readable_errors(source: Any = None) -> Iterator[None]:
    """Turn every error except lack of memory into a ``ValueError``, ``TypeError`` or ``FileNotFoundError`` of one printable line.

    ``source``: the folder that is loaded, to name it in the message.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        message = " ".join(str(first).split()).removesuffix(".")
        if "ignore_mismatched_sizes" in message:
            message = "the weights have other sizes than config.json says"
        elif type(first) not in (ValueError, TypeError) or not message:
            message = f"{type(first).__name__}: {message}"
        message = printable(message, 500)
        if source is not None:
            message = f"{printable(str(source))} cannot be loaded ({message}): copy the folder again, or download it again"
        kind = FileNotFoundError if isinstance(first, OSError) else TypeError if isinstance(first, TypeError) else ValueError
        raise kind(message) from error


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Switch off the progress bar and the reports of transformers, which print untrusted names unescaped."""
    bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _model_size(config: PermuteFormerConfig) -> int:
    """Return about how many parameters and buffers a model has, from one layer on the meta device."""
    with torch.device("meta"):
        layer, embeddings = config.build_layer(0), config.build_embedding_positions()
    of_layer = _count(layer) + 2 * config.hidden_size * config.intermediate_size
    return config.vocab_size * config.hidden_size + config.num_hidden_layers * of_layer + sum(map(_count, embeddings))


def _count(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a model: one file, or those that an index names."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists() or not index.exists():
        return [single] if single.exists() else []
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) and name == os.path.basename(name) for name in names.values()):
        raise ValueError(f"weight_map of {index.name} must hold names of files in the folder")
    return [folder / name for name in sorted(set(names.values()))]


def _tensor_sizes(file: Path) -> list[int]:
    """Return the number of elements of every tensor, from the header."""
    if not file.is_file():
        raise FileNotFoundError(f"file not found: {printable(file.name)}")
    with safe_open(file, framework="pt") as opened:
        return [torch.Size(opened.get_slice(name).get_shape()).numel() for name in opened.keys()]  # noqa: SIM118
