"""The README's Python runs as it stands, what it adds passes the contract checks, and its numbers are those of the results.

``python tests/test_readme.py`` writes the numbers into the pages.
"""

import functools
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from permuteformer.bench.bars import BARS, DOUBLING, worst_doubling
from permuteformer.report import benches
from permuteformer.report.quantities import significant
from permuteformer.report.table import times

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DATA_PAGE = ROOT / "docs" / "data.md"
PAGES = (README, DATA_PAGE, *(ROOT / "docs" / f"{name}.md" for name in ("gpu", "speed")))
"""Those that have numbers."""
RESULTS = ROOT / "results" / "core"
MEASURED = ("ops", "train", "latency", "decode")
"""Sweeps of ``permuteformer bench`` whose cases took turns."""


NOT_HERE = "performer-pytorch"
"""A peer that was not installed."""


@pytest.fixture
def namespace(monkeypatch, tmp_path):
    """What the README's code defines; its registrations are taken back afterwards."""
    from permuteformer import ATTENTIONS, FEATURE_MAPS, POSITIONS

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield run(README)
    POSITIONS.remove("alibi")
    ATTENTIONS.remove("mean")
    del FEATURE_MAPS["softplus"]


def run(page: Path) -> dict:
    space: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, page.name, "exec"), space)
    return space


def test_the_data_page_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(DATA_PAGE)["batch"].input_ids.shape == (64, 66)


def test_the_training_page_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(ROOT / "docs" / "training.md")["result"]["status"] == "finished"


def test_the_blocks_run_and_their_additions_hold(namespace):
    import checks

    from permuteformer import build

    assert namespace["y1"].shape == (2, 1, 512)
    assert namespace["positions"].shape == (1, 1024, 2)
    assert namespace["batch"].positions.shape == (64, 66, 2)
    for attention in ("softmax", "linear"):
        for causal in (False, True):
            layer = build(attention, [("alibi", {})], hidden_size=32, num_heads=2, causal=causal).double()
            names = ["padding", "hidden_keys", "all_hidden", "batch", "packed", "relative", *(["causal", "resume"] if causal else [])]
            for name in names:
                checks.CHECKS[name](layer)
    layer = build("mean", hidden_size=32, num_heads=2).double()
    for name in ("padding", "hidden_keys", "all_hidden", "batch"):
        checks.CHECKS[name](layer)
    layer = build("linear", [("permute", {})], hidden_size=32, num_heads=2, causal=True, feature_map="softplus").double()
    for name in ("causal", "padding", "resume", "packed"):
        checks.CHECKS[name](layer)


def test_files_that_the_readme_names_are_there():
    text = README.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        assert (ROOT / link).exists(), f"README links to {link}"
    house = re.search(r"```\nsrc/permuteformer/\n(.*?)```", text, re.DOTALL).group(1)
    named = set(re.findall(r"[a-z0-9_]+\.py", house))
    there = {path.name for folder in ("src", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")} - {"__init__.py"}
    assert named == there, f"not on the README's map: {there - named}; not there: {named - there}"


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_the_results(page):
    assert with_numbers(page) == page.read_text(), "run: python tests/test_readme.py"


def with_numbers(page: Path) -> str:
    """The page with what stands after each mark made from the results."""
    text = page.read_text()
    for part in re.findall(r"<!-- (\w+) -->", text):
        rows = NUMBERS[part]()
        if part in ("import", "long", "pairs", "kernel", "registers"):  # in a sentence
            text = re.sub(rf"<!-- {part} -->.*?(?= times| \(`python| %| registers)", f"<!-- {part} -->{rows[0]}", text)
        else:
            table = "".join(f"| {row} |\n" for row in rows)
            text = re.sub(rf"(<!-- {part} -->\n.*\n\|[-|]+\n)(?:\|.*\n)*", lambda found, table=table: found[1] + table, text)
    return text


def lines(name: str, folder: str = "core") -> list[dict]:
    return [json.loads(line) for line in (ROOT / "results" / folder / f"{name}.jsonl").read_text().splitlines()]


def recall() -> list[str]:
    records = [json.loads((RESULTS / f"recall-seed{seed}" / "recall.json").read_text())["results"] for seed in (0, 1, 2)]
    rows = []
    for name in records[0]:
        lengths = zip(*(record[name]["accuracy"] for record in records), strict=True)
        cells = [f"{100 * statistics.mean(a):.1f} ({100 * min(a):.1f} – {100 * max(a):.1f})" for a in lengths]
        rows.append(" | ".join([name, *cells]))
    return rows


def memory() -> list[str]:
    return [f"{row['kind']}, {row['length']:,} tokens, {row['features']} features a head | {row['ratio']:.2f}" for row in lines("memory")]


def speed() -> list[str]:
    """The ops, with and without gradients side by side."""
    best = {(line["group"], line["row"]): line["result"]["seconds_best"] for line in lines("ops", "bench")}
    return [
        f"{kind}, {benches.title(row)} | {1e3 * best[kind, row]:,.0f} | {1e3 * best[f'{kind}, with gradients', row]:,.0f}"
        for kind, row in best
        if row != "matmul" and not kind.endswith("gradients")
    ]


def bench(sweep: str) -> list[str]:
    tables = benches.side_by_side_tables(lines(sweep, "bench"))
    return [" | ".join([table.title.removeprefix(f"{sweep}: "), *row]) for table in tables for row in table.rows]


def scaling(part: int) -> list[str]:
    """A line a length, and the power of the length that times grow with."""
    there = [line for line in lines("scaling", "bench") if line["row"] != NOT_HERE]
    return [" | ".join(row) for row in benches.length_tables(there)[part].rows]


def profile() -> list[str]:
    rows = []
    for line in lines("shares", "bench"):
        ours, least, formula = (1e3 * line[name] for name in ("seconds", "product_seconds", "formula_seconds"))
        shares = (f"{100 * share:.0f} %" for share in line["shares"].values())
        kind = "a step of training" if line["kind"] == "training" else "one item"
        milliseconds = (significant(value) for value in (formula, ours, least))
        rows.append(" | ".join([f"{line['task']}, {kind}", *milliseconds, *shares, times(formula / ours), times(formula / least)]))
    return rows


def bars() -> list[str]:
    rows = []
    for sweep in MEASURED:
        results: dict = {}
        for line in lines(sweep, "bench"):
            results.setdefault(line["group"], {})[line["row"]] = line["result"]
        for bar in BARS[sweep]:
            what = f"{bar.quantity}, {benches.title(bar.case)} to {benches.title(bar.against)}"
            rows.append((f"{sweep}: {bar.group}", what, bar.at_most, bar.ratio(results[bar.group])))
    rows.append(
        ("scaling: causal attention", "time, PermuteFormer at twice the length", DOUBLING, worst_doubling(lines("scaling", "bench")))
    )
    return [
        f"{group} | {what} | {times(at_most)} | {times(ratio)} | {'reached' if ratio <= at_most else 'missed'}"
        for group, what, at_most, ratio in rows
    ]


def imports() -> list[str]:
    return [f"{row['ratio_to_torch']:.2f}" for row in lines("imports") if row["import"] == "PermuteFormerAttention"]


def long() -> list[str]:
    peak = {row["kind"]: f"{row['peak_bytes'] / 2**30:.1f} GiB" for row in lines("long", "models")}
    return [f"{peak['forward + backward']}, and encoding in blocks at {peak['encode in blocks']}"]


def orders() -> list[str]:
    fields = ["mean", "median", "smallest", *(f"lcm_{heads}_heads_median" for heads in (8, 12, 16)), "lcm_16_heads_largest", "bound"]
    return [
        " | ".join([str(row["features"]), *(f"{row[f]:,.0f}" if row[f] < 1e6 else f"{row[f]:.1e}" for f in fields)])
        for row in lines("orders")
    ]


def data() -> list[str]:
    first, second, unsorted, by_length = lines("imdb", "data")
    large = {row["kind"]: row for row in lines("large", "data")}
    trees, *images = lines("generate", "data")
    (whole,) = lines("whole", "data")
    rate = next(row["per_second"] for row in images if (row["resolution"], row["level"]) == (32, "hard"))
    text = large["prepare"]["text_bytes"] / 1e9
    peaks = [f"{large[kind]['peak_bytes'] / 1e6:.0f} MB" for kind in ("prepare", "read 1,000 windows")]
    return [
        f"IMDB, all 50,000 reviews: from files to the first batch | {first['seconds']:.1f} s, {first['peak_bytes'] / 1e6:.0f} MB",
        f"the same, at the second start | {second['seconds']:.1f} s",
        f"padding in batches of {by_length['batch_size']}, as they come, and by length | "
        f"{100 * unsorted['padding']:.0f} %, {100 * by_length['padding']:.1f} %",
        f"memory to prepare {text:.0f} GB of text, and to read windows of it | {peaks[0]}, {peaks[1]}",
        f"ListOps, 100,000 trees | {trees['seconds']:.0f} s",
        f"Pathfinder, 32 x 32, hard, on one core | {rate:.0f} images a second",
        f"the same, all {whole['images']:,} images, on two cores | {whole['seconds']:.0f} s",
    ]


@functools.cache
def experiments() -> list[Any]:
    """The tables of the runs in small, as reports have them."""
    from permuteformer.report.groups import group
    from permuteformer.report.load import load
    from permuteformer.report.tables import build_tables

    return list(build_tables(group(load([ROOT / "results" / "experiments" / "small" / "results.jsonl"]).records)))


def experiment(name: str) -> Any:
    return next(table for table in experiments() if table.name.startswith(name))


def table1() -> list[str]:
    """A cell is ours (the paper's); empty where it has not been run."""
    table = experiment("table-1")
    columns = {column.name: column for column in table.columns}
    rows = []
    for row in table.rows:
        cells = [table.cell(row, columns[name]) if name in columns else None for name in ("text", "retrieval", "image", "pathfinder")]
        shown = (f"{cell.text} ({cell.paper_text})" if cell and cell.text else "" for cell in cells)
        rows.append(" | ".join([row.leads[0], *shown]))
    return rows


def table4() -> list[str]:
    table = experiment("table-4")
    (column,) = table.columns
    cells = [(row.leads[0], table.cell(row, column)) for row in table.rows]
    return [f"{title} | {cell.text} {cell.detail} | {cell.paper_text}" for title, cell in cells]


def kernel() -> list[str]:
    """The most that any head gives the token before, on average."""
    looks = {line["row"]: line["looks"]["kernel"] for line in lines("looks", "experiments/small")}
    most = [max(head[1] for layer in looks[row]["layers"] for head in layer) for row in ("transformer-lm", "permuteformer-lm")]
    return [" and ".join(f"{100 * weight:.0f}" for weight in most)]


def length() -> list[str]:
    table = experiment("length")
    return [" | ".join([row.leads[0], *(table.cell(row, column).text for column in table.columns)]) for row in table.rows]


def registers() -> list[str]:
    found = lines("compile", "gpu")
    assert not any(row["spill_stores_bytes"] or row["spill_loads_bytes"] for row in found), "the page says that none spills"
    return [str(max(row["registers"] for row in found))]


FACTS = {"accepted": "8.3 %", "mean": "1,035", "median": "954", "p10": "577", "p90": "1,643"}
FREQUENCIES = ".168 .087 .078 .082 .089 .087 .077 .073 .088 .169"


def listops() -> list[str]:
    made = lines("generate", "data")[0]
    labels = " ".join(f"{share:.3f}".removeprefix("0") for share in made["labels"].values())
    return [
        f"trees of 500 to 2,000 symbols | {100 * made['accepted']:.1f} % | {FACTS['accepted']}",
        *(f"length, {name} | {made['length'][name]:,.0f} | {FACTS[name]}" for name in ("mean", "median", "p10", "p90")),
        f"values 0 to 9 | {labels} | {FREQUENCIES}",
        f"right from the first token | {100 * made['first_token_score']['test']:.1f} % of 2,000 | 37.25 % of the official 2,000",
    ]


def pathfinder() -> list[str]:
    return [
        f"{row['resolution']}, {row['level']} | {row['per_second']:.0f} | {row['connected']:.3f} | {row['mean']:.1f} | "
        f"{100 * row['lit']:.1f} % | {row['distractors']:.2f} | {row['paddles']:.0f} | {100 * row['markers_on_ends']:.0f} %"
        for row in lines("generate", "data")[1:]
    ]


def pairs() -> list[str]:
    return [f"{100 * lines('pairs', 'data')[0]['test_accuracy_of_word_overlap']:.0f}"]


NUMBERS = {"recall": recall, "memory": memory, "speed": speed, "import": imports, "orders": orders, "long": long}
NUMBERS |= {"bars": bars, "profile": profile, **{f"bench_{sweep}": functools.partial(bench, sweep) for sweep in MEASURED}}
NUMBERS |= {
    name: functools.partial(scaling, part) for part, name in enumerate(("causal_time", "causal_memory", "model_time", "model_memory"))
}
NUMBERS |= {"table1": table1, "table4": table4, "kernel": kernel, "length": length, "registers": registers}
NUMBERS |= {"data": data, "listops": listops, "pathfinder": pathfinder, "pairs": pairs}

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_numbers(page))
