"""The sweeps of ``permuteformer bench`` as data: groups of cases that are compared with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from permuteformer.experiments.paper import COLUMNS, accuracy_column
from permuteformer.presets import ROWS, TASK_MODELS
from permuteformer.registry import unknown


@dataclass(frozen=True)
class Case:
    """A call to time.

    >>> Case("op", {"method": "sdpa", "length": 512}).to_json()
    {'subject': 'op', 'options': {'method': 'sdpa', 'length': 512}}
    """

    subject: str
    """Name of the function that makes it, in ``bench.subjects.SUBJECTS``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of this function."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return asdict(self)


Groups = Mapping[str, Mapping[str, Case]]
"""Cases by the name of their group and by row. The cases of a group are compared with the first one."""
Curves = Mapping[str, Mapping[str, Mapping[int, Case]]]
"""Cases by group, row and length."""

SWEEPS = ("ops", "train", "latency", "decode", "scaling")

TRANSFORMERS_PEERS = {
    "hf-nystromformer": "Nystromformer",
    "hf-longformer": "Longformer",
    "hf-bigbird": "BigBird",
    "hf-modernbert": "ModernBert",
}
"""Rows that are models of transformers, and the names of their classes."""
PEERS = (*TRANSFORMERS_PEERS, "performer-pytorch")
"""Rows that are models of other libraries."""
OURS = "permuteformer"
FORMULA = "formula"
"""The row with the paper's formulas in eager PyTorch."""
DECAY = "permuteformer-decay"
"""The row with a two-sided decay."""
MATMUL = "matmul"
"""A matrix product, for the rate of this machine."""

DTYPES = ("float32", "bfloat16", "float16")
BATCHES = {"text": 1, "retrieval": 1, "image": 4, "pathfinder": 4}
"""Items per training step."""

OP = {"batch": 1, "heads": 8, "values": 64}
BIDIRECTIONAL = {**OP, "length": 4096, "features": 256}
CAUSAL = {**OP, "length": 8192, "features": 64, "causal": True}
TWO_SIDED = {**BIDIRECTIONAL, "two_sided": True}
TWO_SIDED_IMAGES = {"batch": 4, "heads": 4, "length": 1024, "features": 64, "values": 16, "two_sided": True}

BYTES = {"vocab_size": 259}
"""A small vocabulary, so that decoding measures the layers and not the output."""
SUBWORDS = {"vocab_size": 8192}

LENGTHS = tuple(2**n for n in range(9, 21))
"""Lengths of scaling: 512 to 1,048,576."""
CAUSAL_CURVE = "causal attention"
SCALING_SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}


def ops(dtype: str = "float32") -> Groups:
    """Return one call of attention, without and with gradients."""
    if dtype not in DTYPES:
        raise ValueError(unknown("dtype", dtype, DTYPES))
    linear = (OURS, "performer", "permuteformer-torch")
    formulas = (*linear, FORMULA, "formula-performer", "sdpa")

    def group(shape: dict[str, Any], methods: Sequence[str], gradients: bool) -> dict[str, Case]:
        cases = {method: Case("op", {"method": method, **shape, "gradients": gradients, "dtype": dtype}) for method in methods}
        return {**cases, MATMUL: Case("op", {"method": MATMUL, "dtype": dtype})}

    return {
        "bidirectional": group(BIDIRECTIONAL, formulas, gradients=False),
        "bidirectional, with gradients": group(BIDIRECTIONAL, formulas, gradients=True),
        "causal": group(CAUSAL, (*linear, "sdpa"), gradients=False),
        "causal, with gradients": group(CAUSAL, (*linear, "sdpa"), gradients=True),
        "two-sided": group(TWO_SIDED, linear, gradients=False),
        "two-sided, with gradients": group(TWO_SIDED, linear, gradients=True),
        "two-sided of images, with gradients": group(TWO_SIDED_IMAGES, linear, gradients=True),
    }


def models(kind: str, tasks: Sequence[str] = (), against: Sequence[str] = ()) -> Groups:
    """Return models of Long-Range Arena's sizes, by task: a ``"training"`` step, or ``"inference"`` on one item."""
    groups = {}
    rows = _rows(against, (DECAY, "performer", "transformer", FORMULA))
    for task in tasks or COLUMNS:
        if task not in COLUMNS:
            raise ValueError(unknown("task", task, COLUMNS))
        length, batch_size = TASK_MODELS[task].length, BATCHES[task] if kind == "training" else 1
        groups[task] = {row: model(row, task, kind, length, batch_size) for row in rows}
    return groups


def model(row: str, task: str, kind: str, length: int, batch_size: int) -> Case:
    """Return a row of the paper, the formula or a peer on a task."""
    common = {"task": accuracy_column(task).task, "kind": kind, "length": length, "batch_size": batch_size}
    if row in PEERS:
        return Case("peer", {"peer": row, **common, "model": f"permuteformer-{task}"})
    if row == FORMULA:
        return Case("formula", {**common, "model": f"permuteformer-{task}"})
    return Case("model", {**common, "model": f"{row}-{task}"})


def decode(positions: Sequence[int] = (100, 16_384, 100_000)) -> Groups:
    """Return one more token, by position. The Transformer, whose cache grows, stops at 20,000."""

    def case(row: str, position: int) -> Case:
        return Case("decode", {"model": f"{row}-lm", "position": position, "model_fields": BYTES})

    rows = {f"{OURS} at {position:,}": case(OURS, position) for position in positions}
    rows |= {f"transformer at {position:,}": case("transformer", position) for position in positions if position <= 20_000}
    ours = Case("decode", {"model": "permuteformer-lm", "position": positions[0], "model_fields": SUBWORDS})
    gpt2 = Case("decode", {**ours.options, "peer": "hf-gpt2"})
    place = f"at {positions[0]:,}"
    return {"one token": rows, "one token of 8,192": {f"{OURS} {place}": ours, f"hf-gpt2 {place}": gpt2}}


def scaling(lengths: Sequence[int] = (), against: Sequence[str] = ()) -> Curves:
    """Return curves by length: causal attention alone, and models of the retrieval task's size that classify a text."""
    lengths = lengths or LENGTHS
    if min(lengths) < 4:  # a text between its special tokens
        raise ValueError(f"lengths must be at least 4, got {min(lengths)}")

    def case(row: str, length: int) -> Case:
        found = model(row, "text", "inference", length, 1)
        return Case(found.subject, {**found.options, "model_fields": SCALING_SIZES})

    rows = _rows(against, ("performer", "transformer", *PEERS))
    return {
        "matrix product": {MATMUL: {2048: Case("op", {"method": MATMUL})}},
        CAUSAL_CURVE: {
            row: {n: Case("op", {**CAUSAL, "method": row, "length": n}) for n in lengths} for row in (OURS, "performer", "sdpa")
        },
        "model": {row: {n: case(row, n) for n in lengths} for row in rows},
    }


def _rows(against: Sequence[str], default: Sequence[str]) -> list[str]:
    """Return our row and the rows to compare it with, each once."""
    known = (*ROWS, FORMULA, *PEERS)
    for row in against:
        if row not in known:
            raise ValueError(unknown("row", row, known))
    return list(dict.fromkeys((OURS, *(against or default))))
