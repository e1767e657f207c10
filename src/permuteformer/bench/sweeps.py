"""What ``permuteformer bench`` measures, as data: groups of cases that are compared with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from permuteformer.bench.case import Case
from permuteformer.experiments.lra import LENGTHS, ROWS, TASK_OPTIONS
from permuteformer.registry import unknown

TASKS = tuple(LENGTHS)
PEERS = ("hf-nystromformer", "hf-longformer", "hf-bigbird", "hf-modernbert", "performer-pytorch")
"""Models of other libraries; see ``bench.subjects.peer``."""

FORMULA = "formula"
"""The row that is the paper's formulas in eager PyTorch."""

DTYPES = ("float32", "bfloat16", "float16")
BATCHES = {"text": 1, "retrieval": 1, "image": 4, "pathfinder": 4}
"""Items of a training step."""

SIDE_BY_SIDE = ("ops", "train", "latency", "decode")
SWEEPS = (*SIDE_BY_SIDE, "scaling")

OP = {"batch": 1, "heads": 8, "values": 64}
BIDIRECTIONAL = {**OP, "length": 4096, "features": 256}
CAUSAL = {**OP, "length": 8192, "features": 64, "causal": True}
TWO_SIDED = {**BIDIRECTIONAL, "two_sided": True}
OF_IMAGES = {"batch": 4, "heads": 4, "length": 1024, "features": 64, "values": 16, "two_sided": True}

DECODER = {"vocab_size": 259}
"""Bytes, so that the work is in the six layers, 512 wide, and not in the vocabulary."""
SUBWORDS = {"vocab_size": 8192}
DECAY = "permuteformer-decay"
"""The row with a two-sided decay."""

SCALING = tuple(2**n for n in range(9, 21))
"""Lengths, from 512 to 1,048,576."""
CURVE = "causal attention"


@dataclass(frozen=True)
class Group:
    """Cases that are compared, by the names that tables call them by."""

    name: str
    cases: Mapping[str, Case]


def ops(dtype: str = "float32") -> list[Group]:
    """One call of attention: forward, and forward with backward."""
    if dtype not in DTYPES:
        raise ValueError(unknown("dtype", dtype, DTYPES))
    linear = ("permuteformer", "performer", "permuteformer-torch")
    matmul = {"matmul": Case("op", {"method": "matmul", "dtype": dtype})}

    def group(name: str, shape: dict[str, Any], methods: Sequence[str], gradients: bool) -> Group:
        made = {method: Case("op", {"method": method, **shape, "gradients": gradients, "dtype": dtype}) for method in methods}
        return Group(name, {**made, **matmul})

    return [
        group("bidirectional", BIDIRECTIONAL, (*linear, FORMULA, "formula-performer", "sdpa"), gradients=False),
        group("bidirectional, with gradients", BIDIRECTIONAL, (*linear, FORMULA, "formula-performer", "sdpa"), gradients=True),
        group("causal", CAUSAL, (*linear, "sdpa"), gradients=False),
        group("causal, with gradients", CAUSAL, (*linear, "sdpa"), gradients=True),
        group("two-sided", TWO_SIDED, linear, gradients=False),
        group("two-sided, with gradients", TWO_SIDED, linear, gradients=True),
        group("two-sided of images, with gradients", OF_IMAGES, linear, gradients=True),
    ]


def models(kind: str, tasks: Sequence[str] = (), against: Sequence[str] = ()) -> list[Group]:
    """Whole models of Long-Range Arena's sizes: a step of ``"training"``, or ``"inference"`` on one item."""
    groups = []
    rows = ["permuteformer", *_rows(against, (DECAY, "performer", "transformer", FORMULA))]
    for task in tasks or TASKS:
        if task not in TASKS:
            raise ValueError(unknown("task", task, TASKS))
        groups.append(Group(task, {row: model(row, task, kind, LENGTHS[task], BATCHES[task] if kind == "training" else 1) for row in rows}))
    return groups


def model(row: str, task: str, kind: str, length: int, batch_size: int) -> Case:
    """A row of the paper, the formula, or a peer, on a task."""
    common = {"task": f"lra-{task}", "task_options": TASK_OPTIONS[task], "kind": kind, "length": length, "batch_size": batch_size}
    if row == FORMULA or row in PEERS:
        of_it: dict[str, Any] = {"peer": row} if row in PEERS else {}
        return Case("peer" if row in PEERS else "formula", {**of_it, **common, "model": f"permuteformer-{task}"})
    return Case("model", {**common, "model": f"{row}-{task}"})


def decode(positions: Sequence[int] = (100, 16_384, 100_000)) -> list[Group]:
    """One more token: of PermuteFormer at every position, of the Transformer while its cache is of a sensible size."""

    def case(row: str, position: int) -> Case:
        return Case("decode", {"model": f"{row}-lm", "position": position, "model_fields": DECODER})

    rows = {f"permuteformer at {position:,}": case("permuteformer", position) for position in positions}
    rows |= {f"transformer at {position:,}": case("transformer", position) for position in positions if position <= 20_000}
    ours = Case("decode", {"model": "permuteformer-lm", "position": positions[0], "model_fields": SUBWORDS})
    theirs = Case("decode", {**ours.options, "peer": "hf-gpt2"})
    name = f"at {positions[0]:,}"
    return [Group("one token", rows), Group("one token of 8,192", {f"permuteformer {name}": ours, f"hf-gpt2 {name}": theirs})]


def scaling(lengths: Sequence[int] = (), against: Sequence[str] = ()) -> dict[str, dict[str, dict[int, Case]]]:
    """By kind of curve, row and length: causal attention by itself, and whole models of the retrieval task's size that classify a text."""
    lengths = lengths or SCALING
    for length in lengths:
        if length < 4:
            raise ValueError(f"lengths must be 4 or more, with room for a text between its special tokens; there is {length}")
    op = {row: {n: Case("op", {**CAUSAL, "method": row, "length": n}) for n in lengths} for row in ("permuteformer", "performer", "sdpa")}
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}

    def case(row: str, length: int) -> Case:
        made = model(row, "text", "inference", length, 1)
        return Case(made.subject, {**made.options, "model_fields": sizes})

    rows = ("permuteformer", *_rows(against, ("performer", "transformer", *PEERS)))
    whole = {row: {n: case(row, n) for n in lengths} for row in rows}
    return {"matrix product": {"matmul": {2048: Case("op", {"method": "matmul"})}}, CURVE: op, "model": whole}


def _rows(against: Sequence[str], default: Sequence[str]) -> list[str]:
    """Rows to compare with, without repeats; raises where one is not known."""
    known = (*ROWS, DECAY, "performer-t5", FORMULA, *PEERS)
    for row in against:
        if row not in known:
            raise ValueError(unknown("row", row, known))
    return [row for row in dict.fromkeys(against or default) if row != "permuteformer"]
