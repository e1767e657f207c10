"""The README's Python runs as it stands, what it adds passes the contract checks, and its numbers are those of the results.

``python tests/test_readme.py`` writes the numbers into the pages.
"""

import functools
import inspect
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pages
import pytest

from permuteformer.bench.bars import BARS, DOUBLING, worst_doubling
from permuteformer.bench.sweeps import FORMULA
from permuteformer.report import benches
from permuteformer.report.quantities import significant
from permuteformer.report.table import times

ROOT, README = pages.ROOT, pages.README
NUMBERED = ("data", "gpu", "speed", "reliability", "index", "ten-minutes", "not-run", "guides/choosing", "api/index")
PAGES = (README, ROOT / "SECURITY.md", *(ROOT / "docs" / f"{name}.md" for name in NUMBERED))
"""Those that have numbers."""
RESULTS = ROOT / "results" / "core"
MEASURED = ("ops", "train", "latency", "decode")
"""Sweeps of ``permuteformer bench`` whose cases took turns."""


NOT_HERE = "performer-pytorch"
"""A peer that was not installed."""


def test_the_blocks_run_and_their_additions_hold(in_folder):
    import checks

    from permuteformer import build

    namespace = pages.run(README)
    assert namespace["y1"].shape == (2, 1, 512)
    assert namespace["positions"].shape == (1, 1024, 2)
    assert namespace["batch"].positions.shape == (64, 66, 2)
    for attention in ("softmax", "linear"):
        for causal in (False, True):
            layer = build(attention, [("alibi", {})], hidden_size=32, num_heads=2, causal=causal).double()
            names = ["padding", "masked_keys", "all_masked", "batch", "packed", "relative", *(["causal", "resume"] if causal else [])]
            for name in names:
                checks.CHECKS[name](layer)
    layer = build("mean", hidden_size=32, num_heads=2).double()
    for name in ("padding", "masked_keys", "all_masked", "batch"):
        checks.CHECKS[name](layer)
    layer = build("linear", [("permute", {})], hidden_size=32, num_heads=2, causal=True, feature_map="softplus").double()
    for name in ("causal", "padding", "resume", "packed"):
        checks.CHECKS[name](layer)


def test_files_that_the_readme_names_are_there():
    text = README.read_text()
    house = re.search(r"```\nsrc/permuteformer/\n(.*?)```", text, re.DOTALL).group(1)
    named = set(re.findall(r"[a-z0-9_]+\.py", house))
    folders = ("src", "examples", "benchmarks", "release")
    there = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")} - {"__init__.py"}
    assert named == there, f"not on the README's map: {there - named}; not there: {named - there}"


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_the_results(page):
    assert with_numbers(page) == page.read_text(), "run: python tests/test_readme.py"


def with_numbers(page: Path) -> str:
    """The page with what stands after each mark made from the results."""
    text = page.read_text()
    for part in re.findall(r"<!-- (\w+) -->", text):
        rows = NUMBERS[part]()
        if part in ("import", "long", "pairs", "kernel"):  # in a sentence
            text = re.sub(rf"<!-- {part} -->.*?(?= times| \(`python| %)", f"<!-- {part} -->{rows[0]}", text)
        elif part.startswith("output_"):
            text = re.sub(rf"(<!-- {part} -->\n```text\n).*?(?=^```)", lambda found, rows=rows: found[1] + rows[0], text, flags=re.M | re.S)
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
        training = line["kind"] == "training"
        ours, formula, least = (line[name] for name in ("seconds", "formula_seconds", "product_seconds"))
        (asked,) = (bar.at_most for bar in BARS["train" if training else "latency"] if (bar.group, bar.against) == (line["task"], FORMULA))
        inside = line["kernel_share"] * ours
        cells = (f"{significant(1e3 * value)} ({times(formula / value)})" for value in (asked * formula, ours, least))
        parts = (significant(1e3 * value) for value in (inside, ours - inside))
        what = f"{line['task']}, {'a step of training' if training else 'one item'}"
        rows.append(" | ".join([what, significant(1e3 * formula), *cells, *parts]))
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


def decode_times() -> list[str]:
    table = benches.side_by_side_tables(lines("decode", "bench"))[0]
    return [" | ".join(row[:2]) for row in table.rows]


def front() -> list[str]:
    """A few numbers for the first page, each with the file that it is from."""
    ops = {(line["group"], line["row"]): line["result"]["seconds_best"] for line in lines("ops", "bench")}
    best = {line["row"]: line["result"]["seconds_best"] for line in lines("decode", "bench") if line["group"] == "one token"}
    slow = ops["causal", "sdpa"] / ops["causal", "permuteformer"]
    step = 1e3 * best["permuteformer at 100,000"], 1e3 * best["permuteformer at 100"]
    return [
        f"causal attention over 8,192 tokens, against softmax's | {slow:.0f} times as fast | [results](../results/bench/ops.jsonl)",
        f"one more token, after 100,000 and after 100 | {step[0]:.1f} and {step[1]:.1f} ms | [results](../results/bench/decode.jsonl)",
        f"a training step at 131,072 tokens, peak of memory | {long()[0].partition(',')[0]} | [results](../results/models/long.jsonl)",
    ]


def names() -> list[str]:
    """Every public name, where it is, and the first sentence of its docstring."""
    import permuteformer

    found = []
    anchors = {path.rpartition(".")[2]: (page.stem, path) for page, path in pages.documented()}
    kinds = {"ATTENTIONS": "attentions", "POSITIONS": "position encodings", "FEATURE_MAPS": "feature maps"}
    homes = {"ATTENTIONS": "attention.md#by-name", "POSITIONS": "positions.md", "FEATURE_MAPS": "ops.md#feature-maps"}
    for name in permuteformer.__all__:
        if name in kinds:
            found.append(
                f"[`{name}`]({homes[name]}) | {kinds[name]} by name: {', '.join(f'`{key}`' for key in getattr(permuteformer, name))}"
            )
        elif name in anchors:
            page, path = anchors[name]
            sentence = re.split(r"(?<=\.)\s", inspect.getdoc(getattr(permuteformer, name)))[0]
            found.append(f"[`{name}`]({page}.md#{path}) | {' '.join(sentence.split()).replace('``', '`')}")
    return found


def newcomer() -> list[dict]:
    return lines("ten-minutes", "docs")


def minutes() -> list[str]:
    """Seconds of the sections of the page of ten minutes."""
    steps = [step for step in newcomer() if step["section"] != "labels"]
    sections = {name: [step for step in steps if step["section"] == name] for name in dict.fromkeys(step["section"] for step in steps)}
    return [
        f"{name} | {sum(s['seconds'] for s in of):,.0f} | {sum(s['processor_seconds'] for s in of):,.0f} | {max(s['load'] for s in of):.0f}"
        for name, of in {**sections, "all": steps}.items()
    ]


def output(begins: str) -> list[str]:
    """What a command of that page said."""
    return [next(step["output"].lstrip("\n") for step in newcomer() if step["command"].startswith(begins))]


def unrun() -> list[str]:
    """Blocks that are marked as not run."""
    marked = [block for page in pages.PAGES for block in pages.blocks(page) if block.reason]
    firsts = [next(line for line in block.text.splitlines() if line and not line.startswith(("#", "export"))) for block in marked]
    rows = [
        f"{block.page.relative_to(ROOT)} | `{first.partition('  #')[0].rstrip(chr(92)).strip()}` | {block.reason}"
        for block, first in zip(marked, firsts, strict=True)
    ]
    return [*rows, f"{len(rows)} blocks | | "]


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


SOAKED = ("kills", "disk", "clock", "workers", "checkpoints", "readers", "flat", "finite", "fuzz")
"""Parts of the soak that the page about reliability tells of."""


def soaked(part: str) -> tuple[dict, list[dict]]:
    """The header and the lines of a part of the soak, all of which must be well."""
    header, *cases = lines(part, "reliability")
    assert header["scale"] >= 1, f"{part} was not run in full"
    assert all(line["ok"] for line in cases), f"{part}: the page says that all is well"
    return header, cases


def soak_parts() -> list[str]:
    return [f"`{part}` | {header['proves']} | {len(cases)}" for part in SOAKED for header, cases in [soaked(part)]]


def soak_kills() -> list[str]:
    cases = [line["kills"] for line in soaked("kills")[1] if isinstance(line.get("kills"), list)]
    kills = [(kill["phase"], kill["signal"]) for case in cases for kill in case]
    phases = sorted({phase for phase, _ in kills}, key=lambda phase: (-sum(kill[0] == phase for kill in kills), phase))
    rows = [(phase, [kills.count((phase, name)) for name in ("SIGKILL", "SIGTERM")]) for phase in phases]
    rows.append(("in all", [sum(counts[n] for _, counts in rows) for n in range(2)]))
    return [f"{phase} | {counts[0]} | {counts[1]} | {sum(counts)}" for phase, counts in rows]


def soak_damage() -> list[str]:
    cases = [line for line in soaked("checkpoints")[1] if "damaged" in line]
    rows = []
    for name in dict.fromkeys(line["what"].partition(", ")[0] for line in cases):
        of_it = [line for line in cases if line["what"].startswith(name)]
        sums = [sum(line[key] for line in of_it) for key in ("damaged", "noticed", "the one before used")]
        rows.append(" | ".join([f"`{name}`", *map(str, sums)]))
    return rows


def soak_fuzz() -> list[str]:
    counts = ("inputs", "taken", "refused")
    return [" | ".join([line["what"], *(f"{line[name]:,}" for name in counts), str(len(line["findings"]))]) for line in soaked("fuzz")[1]]


def soak_lost() -> list[str]:
    names = ("seconds until the other stopped", "seconds until all stopped")
    return [f"{line['what']} | {next(line[name] for name in names if name in line):.1f}" for line in soaked("workers")[1]]


def soak_flat() -> list[str]:
    rows = []
    for line in soaked("flat")[1]:
        memory, files, threads = ([point[key] for point in line["curve"]] for key in ("memory_bytes", "files", "threads"))
        growth = f"{memory[-1] / 2**20:.0f} | {line['growth_bytes'] / 2**20:+.2f}"
        rows.append(f"{line['what']} | {growth} | {files[0]} – {files[-1]} | {threads[0]} – {threads[-1]}")
    return rows


def soak_finite() -> list[str]:
    cases = soaked("finite")[1]
    titles = {"weight": "a weight", "gradient": "a gradient", "adam": "the state of Adam", "input": "an input"}
    counts = {kind: [line["named"] for line in cases if line["kind"] == kind] for kind in titles}
    return [f"{titles[kind]} | {len(named)} | {sum(named)}" for kind, named in counts.items()]


NUMBERS = {"recall": recall, "memory": memory, "speed": speed, "import": imports, "orders": orders, "long": long}
NUMBERS |= {"bars": bars, "profile": profile, **{f"bench_{sweep}": functools.partial(bench, sweep) for sweep in MEASURED}}
NUMBERS |= {
    name: functools.partial(scaling, part) for part, name in enumerate(("causal_time", "causal_memory", "model_time", "model_memory"))
}
NUMBERS |= {"table1": table1, "table4": table4, "kernel": kernel, "length": length}
NUMBERS |= {"choose_time": functools.partial(scaling, 0), "choose_decode": decode_times, "front": front, "names": names}
NUMBERS |= {"minutes": minutes, "unrun": unrun}
COMMANDS = {"check": "permuteformer data check", "train": "permuteformer train", "labels": "cat labels.csv"}
NUMBERS |= {f"output_{name}": functools.partial(output, begins) for name, begins in COMMANDS.items()}
NUMBERS |= {"soak_parts": soak_parts, "soak_kills": soak_kills, "soak_damage": soak_damage}
NUMBERS |= {"soak_fuzz": soak_fuzz, "soak_lost": soak_lost, "soak_flat": soak_flat, "soak_finite": soak_finite}
NUMBERS |= {"data": data, "listops": listops, "pathfinder": pathfinder, "pairs": pairs}

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_numbers(page))
