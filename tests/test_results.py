"""Committed results are small, and say how they were made: revision, whether the tree was clean, threads, and the backend.

``python tests/test_results.py`` makes new results small.
"""

import json
import re
from pathlib import Path

import pytest

from permuteformer.experiments.layout import RESULTS_MAPS

RESULTS = Path(__file__).parent.parent / "results"
MAPS = sorted(RESULTS.rglob(RESULTS_MAPS))
RECORDS = {path.relative_to(RESULTS).as_posix(): path for path in sorted({*RESULTS.rglob("*.jsonl")} - {*MAPS})}
WITH_TOKENS = ("small", "lm")
"""Preset and column whose maps from token to token are kept; of others, only the means by distance."""
SHOWN = ("bench-scaling-causal-attention.svg", "bench-scaling-model.svg")
"""Figures that pages show; ``permuteformer bench`` draws the others."""
INCOMPLETE = {
    *(f"bench/{name}.jsonl" for name in ("ablation", "decode", "latency", "ops", "scaling", "shares", "train")),
    *(f"core/{name}.jsonl" for name in ("imports", "memory", "orders")),
    *(f"data/{name}.jsonl" for name in ("generate", "imdb", "large", "pairs", "whole")),
    *(f"experiments/{name}/results.jsonl" for name in ("quick", "small", "tuning")),
    *("docs/quickstart.jsonl", "examples/seconds.jsonl", "models/long.jsonl"),
}
"""Files from before records had all of this. Remove a file from the list when it is measured again."""


def missing(record):
    found = {**record, **record.get("environment", {})}
    complete = {
        "revision": re.fullmatch(r"[0-9a-f]{40}", str(found.get("revision"))),
        "clean": isinstance(found.get("clean"), bool),
        "threads": isinstance(found.get("threads"), int),
        "backend": isinstance(found.get("backend"), str),
    }
    return [name for name, is_complete in complete.items() if not is_complete]


@pytest.mark.parametrize("name", [name for name in RECORDS if not name.startswith("reliability/")])
def test_records_say_how_they_were_made(name):
    records = [json.loads(line) for line in RECORDS[name].read_text().splitlines()]
    assert records
    incomplete = {what for record in records for what in missing(record)}
    assert bool(incomplete) == (name in INCOMPLETE), incomplete


def test_the_list_of_incomplete_files_is_current():
    assert RECORDS.keys() >= INCOMPLETE


def test_results_are_small():
    assert {path.name for path in (RESULTS / "bench").iterdir() if path.suffix != ".jsonl"} <= {*SHOWN}
    for path in MAPS:
        assert path.read_text() == small_maps(path), "run: python tests/test_results.py"


def small_maps(path):
    lines = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if (path.parent.name, record["column"]) != WITH_TOKENS:
            record["attention_maps"]["maps"] = None
        lines.append(json.dumps(record, separators=(",", ":"), sort_keys=True) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    for path in MAPS:
        path.write_text(small_maps(path))
    for path in (RESULTS / "bench").iterdir():
        if path.suffix in (".png", ".svg") and path.name not in SHOWN:
            path.unlink()
