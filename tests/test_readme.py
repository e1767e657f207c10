"""The README's Python runs as it stands, what it adds passes the contract checks, and its numbers are those of the results.

``python tests/test_readme.py`` writes the numbers into the README.
"""

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "results" / "core"


@pytest.fixture
def namespace():
    """What the README's code defines; its registrations are taken back afterwards."""
    from permuteformer import ATTENTIONS, FEATURE_MAPS, POSITIONS

    space: dict = {}
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        exec(compile(block, "README.md", "exec"), space)
    yield space
    POSITIONS.remove("alibi")
    ATTENTIONS.remove("mean")
    del FEATURE_MAPS["softplus"]


def test_the_blocks_run_and_their_additions_hold(namespace):
    import checks

    from permuteformer import build

    assert namespace["y1"].shape == (2, 1, 512)
    assert namespace["positions"].shape == (1, 1024, 2)
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
    there = {path.name for path in (ROOT / "src").rglob("*.py")} - {"__init__.py"}
    assert there <= named, f"not on the README's map: {there - named}"
    assert named - there == {"recall.py", "core.py", "models.py"}


@pytest.mark.parametrize("part", ["recall", "memory", "speed", "import", "orders", "long"])
def test_numbers_are_those_of_the_results(part):
    assert with_numbers(part, README.read_text()) == README.read_text(), "run: python tests/test_readme.py"


def with_numbers(part: str, text: str) -> str:
    """The README with what stands after the mark of ``part`` made from the results."""
    rows = NUMBERS[part]()
    if part in ("import", "long"):  # in a sentence
        return re.sub(rf"<!-- {part} -->.*?(?= times| \(`python)", f"<!-- {part} -->{rows[0]}", text)
    table = "".join(f"| {row} |\n" for row in rows)
    return re.sub(rf"(<!-- {part} -->\n.*\n\|[-|]+\n)(?:\|.*\n)*", lambda found: found[1] + table, text)


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


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
    rows = []
    for row in lines("speed"):
        softmax = row["case"] == "SDPA"
        kind, features = (row["kind"].split()[0], row["values"]) if softmax else (row["kind"], row["features"])
        times = f"{row['forward_ms']:,.0f} | {row['forward_backward_ms']:,.0f}"
        rows.append(f"{row['case']}, {kind}, {row['length']:,} tokens, {features} features | {times}")
    return rows


def imports() -> list[str]:
    return [f"{row['ratio_to_torch']:.2f}" for row in lines("imports") if row["import"] == "PermuteFormerAttention"]


def long() -> list[str]:
    rows = [json.loads(line) for line in (ROOT / "results" / "models" / "long.jsonl").read_text().splitlines()]
    peak = {row["kind"]: f"{row['peak_bytes'] / 2**30:.1f} GiB" for row in rows}
    return [f"{peak['forward + backward']}, and encoding in blocks at {peak['encode in blocks']}"]


def orders() -> list[str]:
    fields = ["mean", "median", "smallest", *(f"lcm_{heads}_heads_median" for heads in (8, 12, 16)), "lcm_16_heads_largest", "bound"]
    return [
        " | ".join([str(row["features"]), *(f"{row[f]:,.0f}" if row[f] < 1e6 else f"{row[f]:.1e}" for f in fields)])
        for row in lines("orders")
    ]


NUMBERS = {"recall": recall, "memory": memory, "speed": speed, "import": imports, "orders": orders, "long": long}

if __name__ == "__main__":
    for part in NUMBERS:
        README.write_text(with_numbers(part, README.read_text()))
