"""Writes measured numbers and generated tables into README and docs: ``python docs/measured.py``.

A page marks a place by ``<!-- name -->`` and ``<!-- / -->``. What is between the marks is returned by the function of that name below, from
the files in ``results/``. A test checks that every page is up to date.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from permuteformer.bench.sweeps import FORMULA
from permuteformer.bench.targets import DOUBLING, TARGETS, worst_doubling
from permuteformer.presets import LM_ROWS, ROWS
from permuteformer.report import bench as report
from permuteformer.report.cells import group_runs, significant, times
from permuteformer.report.runs import load_runs
from permuteformer.report.tables import Table, build_tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PLACE = re.compile(r"(<!-- (\w+) -->)(.*?)(<!-- / -->)", re.DOTALL)
GENERATED: dict[str, Callable[[], str]] = {}

NOT_INSTALLED = "performer-pytorch"
"""A peer in the scaling results that has no times."""


def generated(function: Callable[[], str]) -> Callable[[], str]:
    """Register a function under its name."""
    GENERATED[function.__name__] = function
    return function


def updated(text: str) -> str:
    """Return a page with current numbers and tables."""
    return PLACE.sub(lambda place: place[1] + GENERATED[place[2]]() + place[4], text)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / path).read_text().splitlines()]


def results(sweep: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the results of a sweep of ``permuteformer bench`` by group and row."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines(f"bench/{sweep}.jsonl"):
        found.setdefault(line["group"], {})[line["row"]] = line["result"]
    return found


def milliseconds(result: dict[str, Any] | None) -> str:
    return "" if result is None else significant(1e3 * result["seconds_best"])


def extra_megabytes(result: dict[str, Any]) -> str:
    return significant(max(result["peak_memory_bytes"] - result["ready_memory_bytes"], 0) / 1e6)


# Speed and memory


@generated
def causal_speedup() -> str:
    causal = results("ops")["causal"]
    return f"{causal['sdpa']['seconds_best'] / causal['permuteformer']['seconds_best']:.0f}x"


@generated
def decode_ratio() -> str:
    decode = results("decode")["one token"]
    return f"{decode['permuteformer at 100,000']['seconds_best'] / decode['permuteformer at 100']['seconds_best']:.1f}"


@generated
def speed() -> str:
    """Forward, and forward with backward, of one call of attention; the most important rows."""
    rows = ("permuteformer", FORMULA, "sdpa")
    return table(("milliseconds", "forward", "forward + backward"), [row[:3] for row in _attention_rows("of images", rows)])


@generated
def attention_speed() -> str:
    return table(("milliseconds", "forward", "forward + backward", "extra MB"), _attention_rows())


def _attention_rows(without: str = "?", only: Sequence[str] = ()) -> list[tuple[str, str, str, str]]:
    """Return the times of attention, with and without gradients side by side."""
    groups, suffix = results("ops"), ", with gradients"
    return [
        (
            f"{group.removesuffix(suffix)}, {report.title(row)}",
            milliseconds(groups.get(group.removesuffix(suffix), {}).get(row)),
            milliseconds(both),
            extra_megabytes(both),
        )
        for group, members in groups.items()
        if group.endswith(suffix) and without not in group
        for row, both in members.items()
        if row in (only or members) and row not in (report.MATMUL, "formula-performer")
    ]


@generated
def whole_models() -> str:
    """Latency and training step of models of Long-Range Arena's sizes."""
    sweeps = {"one item": results("latency"), "a training step": results("train")}
    rows = [
        (f"{what}, {report.title(row)}", *(milliseconds(groups[task][row]) for task in groups))
        for what, groups in sweeps.items()
        for row in groups["text"]
    ]
    return table(("milliseconds", *sweeps["one item"]), rows)


@generated
def decoding() -> str:
    rows = [
        (report.title(row), group.removeprefix("one token").removeprefix(" of ") or "259", milliseconds(result))
        for group, found in results("decode").items()
        for row, result in found.items()
    ]
    return table(("model and number of tokens", "vocabulary", "ms per token"), rows)


def by_length(number: int) -> str:
    """Return every second length of a table of times or memory, the last one, and the exponent."""
    found = report.length_tables([line for line in lines("bench/scaling.jsonl") if line["row"] != NOT_INSTALLED])[number]
    lengths = [row for row in found.rows if row[0][0].isdigit()]
    return table(found.headers, [*lengths[::2], *found.rows[len(lengths) - 1 :]])


@generated
def attention_by_length() -> str:
    return by_length(0)


@generated
def model_by_length() -> str:
    return by_length(2)


@generated
def model_memory() -> str:
    return by_length(3)


def _targets() -> list[tuple[str, str, float, float]]:
    """Return case, quantity, largest allowed ratio and measured ratio of every target."""
    found = []
    for sweep, bars in TARGETS.items():
        groups = results(sweep)
        for bar in bars:
            what = f"{bar.quantity}, {report.title(bar.case)} to {report.title(bar.against)}"
            found.append((f"{sweep}: {bar.group}", what, bar.at_most, bar.ratio(groups[bar.group]) or 0.0))
    doubling = worst_doubling(lines("bench/scaling.jsonl")) or 0.0
    return [*found, ("scaling: causal", "time, PermuteFormer at twice the length, from 8,192 tokens", DOUBLING, doubling)]


@generated
def target_count() -> str:
    return str(len(_targets()))


@generated
def missed_targets() -> str:
    rows = [(case, what, times(most), times(ratio)) for case, what, most, ratio in _targets() if ratio > most]
    return table(("case", "ratio", "at most", "measured"), rows)


@generated
def memory_ratio() -> str:
    ratios = [row["ratio"] for row in lines("core/memory.jsonl")]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


@generated
def import_ratio() -> str:
    (ratio,) = (row["ratio_to_torch"] for row in lines("core/imports.jsonl") if row["import"] == "PermuteFormerAttention")
    return f"{ratio:.2f}"


@generated
def long_training() -> str:
    return _long("forward + backward")


@generated
def long_blocks() -> str:
    return _long("encode in blocks")


def _long(kind: str) -> str:
    (row,) = (row for row in lines("models/long.jsonl") if row["kind"] == kind)
    return f"{row['peak_bytes'] / 2**30:.1f} GiB"


@generated
def orders() -> str:
    columns = {"mean": "mean order", "median": "median", "smallest": "smallest", "max_order": "largest possible"}
    columns |= {f"lcm_{heads}_heads_median": f"median period of {heads} heads" for heads in (8, 16)}
    rows = [
        (row["features"], *(f"{row[c]:,.0f}" if row[c] < 1e6 else f"{row[c]:.1e}" for c in columns)) for row in lines("core/orders.jsonl")
    ]
    return table(("features per head", *columns.values()), rows)


# The paper's tables


@generated
def rows() -> str:
    """The rows of all tables."""
    found = {**ROWS, **LM_ROWS}
    shown = [(f"`{name}`", row.title, ", ".join(row.tables) or "not in the paper") for name, row in found.items()]
    return table(("`--rows`", "model", "tables"), shown)


@functools.cache
def experiment(name: str) -> Table:
    """Return a table of preset small, as reports have it."""
    tables = build_tables(group_runs(load_runs([RESULTS / "experiments" / "small" / "results.jsonl"]).runs))
    return next(table for table in tables if table.name.startswith(name))


def _perplexities() -> dict[str, list[str]]:
    """Return the perplexities of each row, by length."""
    lengths = experiment("length")
    return {row.leads[0]: [lengths.cell(row, column).text for column in lengths.columns] for row in lengths.rows}


@generated
def length_claim() -> str:
    first, *_, last = (cell.split()[0] for cell in _perplexities()["PermuteFormer"])
    return f"{first} per byte at that length and of {last}"


@generated
def table4() -> str:
    perplexity, lengths = experiment("table-4"), _perplexities()
    cells = {row.leads[0]: perplexity.cell(row, perplexity.columns[0]) for row in perplexity.rows}
    rows = [(title, cell.text, lengths[title][-1], cell.paper_text) for title, cell in cells.items()]
    return table(("perplexity", "ours, per byte", "ours at 8,192 bytes", "paper, per word"), rows)


@generated
def length() -> str:
    """Table 4 at all lengths."""
    lengths, perplexity = experiment("length"), experiment("table-4")
    paper = {row.leads[0]: perplexity.cell(row, perplexity.columns[0]).paper_text for row in perplexity.rows}
    headers = ("perplexity per byte at", *(f"{lengths.lengths[column.name]:,.0f}" for column in lengths.columns), "paper, per word")
    return table(headers, [(title, *cells, paper[title]) for title, cells in _perplexities().items()])


@generated
def table1() -> str:
    accuracy = experiment("table-1")
    columns = [column for column in accuracy.columns if column.name in ("text", "retrieval", "image", "pathfinder")]
    rows = []
    for row in accuracy.rows:
        cells = (accuracy.cell(row, column) for column in columns)
        rows.append((row.leads[0], *(f"{cell.text} ({cell.paper_text})" for cell in cells)))
    return table(("accuracy in %: ours (the paper's)", *(column.title for column in columns)), rows)


@generated
def previous_token() -> str:
    """The largest mean weight that a head gives to the token before."""
    kernels = {line["row"]: line["attention_maps"]["kernel"]["layers"] for line in lines("experiments/small/attention_maps.jsonl")}
    most = [max(head[1] for layer in kernels[row] for head in layer) for row in ("transformer-lm", "permuteformer-lm")]
    return "{:.0f} % of its weight, in the PermuteFormer {:.0f} %".format(*(100 * weight for weight in most))


# Data


@generated
def data_times() -> str:
    first, second, unsorted, by_length = lines("data/imdb.jsonl")
    large = {row["kind"]: row for row in lines("data/large.jsonl")}
    images = lines("data/generate.jsonl")[1:]
    rate = next(row["per_second"] for row in images if (row["resolution"], row["level"]) == (32, "hard"))
    peaks = [f"{large[kind]['peak_bytes'] / 1e6:.0f} MB" for kind in ("prepare", "read 1,000 windows")]
    rows = [
        ("IMDB, 50,000 reviews: from files to the first batch", f"{first['seconds']:.1f} s, {first['peak_bytes'] / 1e6:.0f} MB"),
        ("the same from the cache", f"{second['seconds']:.1f} s"),
        ("share of padding, without and with `--by-length`", f"{unsorted['padding']:.0%}, {by_length['padding']:.0%}"),
        (f"memory to prepare {large['prepare']['text_bytes'] / 1e9:.0f} GB of text, and to read it", f"{peaks[0]}, {peaks[1]}"),
        ("Pathfinder, 32 x 32, hard, one core", f"{rate:.0f} images per second"),
    ]
    return table(("on two cores", ""), rows)


@generated
def listops_length() -> str:
    return f"{lines('data/generate.jsonl')[0]['length']['mean']:,.0f}"


@generated
def listops_first() -> str:
    return f"{100 * lines('data/generate.jsonl')[0]['first_token_score']['test']:.1f} %"


@generated
def word_overlap() -> str:
    return f"{100 * lines('data/pairs.jsonl')[0]['test_accuracy_of_word_overlap']:.0f} %"


@generated
def quickstart_minutes() -> str:
    return f"{sum(step['seconds'] for step in lines('docs/quickstart.jsonl')) / 60:.0f} minutes"


@generated
def quickstart_accuracy() -> str:
    outputs = "".join(step["output"] for step in lines("docs/quickstart.jsonl"))
    return f"{float(re.findall(r'accuracy on the test split: ([.0-9]+)', outputs)[-1]):.0%}".replace("%", " %")


EXAMPLES = {
    "layer": ("the layer in a network of plain PyTorch", r"([\d.]+) % right", "at 8 times the trained length {1} % right, Performer {3} %"),
    "swap_attention": (
        "linear attention inside a BERT of transformers",
        r"([\d.]+) % right",
        "{0} % right; swapped {1} %; after 75 steps {2} %",
    ),
    "finetune_csv": ("pretraining, then fine-tuning on 24 rows", r"([\d.]+) % right", "fine-tuned {2} % right, from new weights {3} %"),
    "streaming": (
        "a text continued by another process from a saved state",
        r"([\d,]+) bytes",
        "a state of {0} bytes after 100 and 100,000 tokens",
    ),
    "image_2d": ("positions with two axes", r"([\d.]+) % right", "on larger images two axes are {1} % right, one axis {3} %"),
    "sequence_parallel": (
        "a sequence sharded over two processes",
        r"bytes sent: ([\d,]+),",
        "{0} bytes sent, for 500 and for 3,000 tokens",
    ),
}
"""By name: what it shows, where its numbers are in its output, and a sentence with them."""


@generated
def examples() -> str:
    seconds = {row["example"]: row["cpu_seconds"] for row in lines("examples/seconds.jsonl")}
    rows = []
    for name, (shows, pattern, result) in EXAMPLES.items():
        numbers = re.findall(pattern, (RESULTS / "examples" / f"{name}.txt").read_text())
        rows.append((f"[{name}.py](../examples/{name}.py)", shows, result.format(*numbers), f"{seconds[name]:.0f}"))
    return table(("example", "shows", "measured", "seconds of one core"), rows)


# Predictions


@functools.cache
def cost_model() -> ModuleType:
    """Return benchmarks/scaling.py as a module."""
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses need it
    spec.loader.exec_module(module)
    return module


@generated
def predicted_seconds() -> str:
    return f"\n{cost_model().seconds_table()}\n"


@generated
def predicted_extra() -> str:
    flops = cost_model().FLOPS
    return f"{4 * flops.sharding / (flops.training - 4 * flops.sharding):.1%}".replace("%", " %")


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text()))
