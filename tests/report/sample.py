"""Run folders and results files as training and benchmarks write them, filled by formulas: the same numbers every time."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from permuteformer.experiments.layout import ATTENTION_MAPS, RUN_FORMAT

SCRIPT = "<script>document.title = 1; throw 2</script>"

ACCURACY = {"kind": "classify", "metric": "accuracy", "greater_is_better": True, "notes": [], "grid": None}
PERPLEXITY = {"kind": "lm", "metric": "perplexity", "greater_is_better": False, "labels": [], "grid": None}
DIGITS = [str(i) for i in range(10)]
TASKS = {
    "text": {
        **ACCURACY,
        "name": "lra-text",
        "title": "film reviews, good or bad",
        "notes": ["the paper validates on the test split, and so does this"],
        "labels": ["bad", "good"],
        "baselines": {"most frequent label": 0.5},
    },
    "image": {
        **ACCURACY,
        "name": "lra-image",
        "title": "CIFAR-10 in gray",
        "labels": DIGITS,
        "baselines": {"most frequent label": 0.1},
        "grid": [32, 32],
    },
    "digits": {
        **ACCURACY,
        "name": "digits",
        "title": "hand-written digits",
        "notes": ["1,797 images of 8 x 8 pixels"],
        "labels": DIGITS,
        "baselines": {"most frequent label": 0.101},
        "grid": [8, 8],
    },
    "lm": {
        **PERPLEXITY,
        "name": "lm-bytes",
        "title": "Python's help, byte by byte",
        "notes": ["perplexity of a byte, not of a word"],
        "baselines": {"uniform": 256.0},
    },
}


def environment(started="2026-03-01T10:00:00+00:00", command=("permuteformer", "train", "lra-text")):
    return {
        "started": started,
        "command": list(command),
        "python": "3.11.7",
        "platform": "Linux x86_64",
        "cpu": "Some CPU @ 2.0 GHz",
        "cores": 2,
        "threads": 2,
        "memory_bytes": 25_000_000_000,
        "device": "cpu",
        "processes": 1,
        "versions": {"torch": "2.13.0", "transformers": "5.22.2", "accelerate": "1.15.0", "permuteformer": "0.1.0"},
    }


def run_folder(
    path: Path,
    column="text",
    row="permuteformer",
    seed=0,
    value=0.66,
    table: str | None = "1",
    preset="small",
    status="finished",
    started="2026-03-01T10:00:00+00:00",
    maps=False,
    lengths=(),
    epochs=10,
    task=None,
    **experiment,
) -> Path:
    """Write a run folder; ``value`` is its final metric. Without a table it is a run outside the tables."""
    path.mkdir(parents=True)
    task = {**TASKS[column], **(task or {})}
    metric = task["metric"]
    shake = random.Random(ascii((column, row, seed)))
    fields = {"task": task["name"], "model": row, "epochs": epochs, "steps": None, "batch_size": 32, "learning_rate": 1e-3, "seed": seed}
    write(
        path / "experiment.json",
        {
            "format": RUN_FORMAT,
            "version": "0.1.0",
            "experiment": {**fields, **experiment},
            "cell": None if table is None else {"table": table, "row": row, "column": column, "seed": seed, "preset": preset},
            "task": task,
            "config": {"hidden_size": 64, "num_hidden_layers": 2, "attention": {"name": "linear"}, "position": [{"name": "permute"}]},
        },
    )
    write(path / "environment.json", environment(started, ("permuteformer", "train", task["name"], "--model", row)))
    final = value + shake.gauss(0, 0.002 if metric == "accuracy" else 0.15)
    chance = 1 / max(1, len(task["labels"])) if metric == "accuracy" else 0
    events = []
    for epoch in range(1, epochs + 1):
        done = epoch / epochs
        for part in range(5):
            step = (epoch - 1) * 100 + part * 20
            loss = 0.3 + 2.5 * math.exp(-step / 150) + shake.gauss(0, 0.04)
            events.append({"event": "train", "step": step, "epoch": step / 100, "loss": loss, "learning_rate": 1e-3, "gradient_norm": 1.0,
                           "tokens_per_second": 2e4, "seconds": step * 0.3, "memory_bytes": 10**9})  # fmt: skip
        score = final - (final - chance) * math.exp(-5 * done) if metric == "accuracy" else final * (1 + 6 * math.exp(-6 * done))
        metrics = {metric: score + shake.gauss(0, 0.003 if metric == "accuracy" else 0.05), "loss": 0.5}
        events.append({"event": "evaluation", "step": epoch * 100, "epoch": epoch, "split": "validation", "metrics": metrics,
                       "seconds": epoch * 30.0 * (1 + len(row) % 3 / 4)})  # fmt: skip
    if status == "finished":
        events.append({"event": "test", "step": epochs * 100, "epoch": epochs, "split": "test", "metrics": {metric: final, "loss": 0.5},
                       "seconds": epochs * 31.0})  # fmt: skip
        for times in lengths:
            grows = 1.6 if row in ("transformer-lm", "performer-lm") else 0.98
            events.append({"event": "length", "length": 256 * times, "times": times,
                           "metrics": {metric: final * grows ** math.log2(times), "loss": 0.5}})  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    result = {
        "status": status,
        "message": None if status == "finished" else "it asked for more than there is",
        "metric": metric,
        "value": final if status == "finished" else None,
        "validation": {metric: final * 1.01},
        "test": {metric: final},
        "best_step": epochs * 100,
        "steps": epochs * 100,
        "epochs": epochs,
        "seconds": epochs * 31.0,
        "tokens": 10**6,
        "parameters": 1_234_567,
        "peak_memory_bytes": 1_500_000_000,
    }
    if status != "not finished":
        write(path / "result.json", result)
    if maps:
        write(path / ATTENTION_MAPS, attention_maps(task, row))
    return path


def attention_maps(task, row, layers=2, heads=4, length=24):
    """A kernel that falls with distance, faster in the first heads; a 2D kernel for images; a map."""
    causal = task["kind"] == "lm"
    distances = list(range(0 if causal else 1 - length, length))
    rates = [[0.97 - 0.06 * head - 0.01 * layer - 0.002 * (len(row) % 7) for head in range(heads)] for layer in range(layers)]
    kernel = [[[0.2 * rate ** abs(d) * (1 + 0.3 * math.cos(d)) for d in distances] for rate in layer] for layer in rates]
    grid = None
    if task["grid"]:
        steps = list(range(1 - task["grid"][0], task["grid"][0]))
        grid = {
            "rows": steps,
            "columns": steps,
            "layers": [[[[rate ** (abs(y) + 0.6 * abs(x)) for x in steps] for y in steps] for rate in layer] for layer in rates],
        }
    words = "the cat sat on the mat and <b>looked</b> at a bird that sang in a tree by $a river$ far away".split()
    maps = []
    for layer in range(layers):
        weights = [[0.0 if causal and j > i else (0.9 - 0.2 * layer) ** abs(i - j) for j in range(length)] for i in range(length)]
        maps.append([[weight / sum(line) for weight in line] for line in weights])
    return {
        "format": 1,
        "kind": task["kind"],
        "length": length,
        "kernel": {"distances": distances, "layers": kernel},
        "kernel_2d": grid,
        "maps": {"tokens": [words[i % len(words)] for i in range(length)], "layers": maps},
    }


def measurement(table, row, column, seconds, length, batch=1, status="finished", preset="small", kind="training", items=None, **result):
    """A line of a results file of a benchmark."""
    work = {"kind": kind, "task": "lra-text", "model": row, "length": length, "batch_size": batch, "items": items, "repeats": 3}
    return {
        "format": 1,
        "table": table,
        "row": row,
        "column": column,
        "seed": 0,
        "preset": preset,
        "kind": "measurement",
        "command": f"permuteformer reproduce --table {table} --row {row}",
        "run": f"table{table}/{column}/{row}-seed0",
        "measurement": work,
        "task": TASKS.get(column, TASKS["text"]),
        "parameters": 1000,
        "environment": environment(),
        "result": {
            "status": status,
            "seconds_best": seconds if status == "finished" else None,
            "seconds_median": seconds,
            "seconds_spread": [seconds, seconds * 1.1] if seconds else None,
            "peak_memory_bytes": int(5e7 + (2e3 if "permute" in row or "performer" in row else 16 * length) * length),
            "repeats": 3,
            "seconds_per_epoch": seconds * items / batch if items and status == "finished" else None,
            "estimated": False,
            **result,
        },
        "evaluations": [],
        "losses": [],
    }


def speeds() -> list[dict]:
    """Tables 2 and 3, and speed by length; the Transformer runs out of memory at the longest."""
    lines = []
    for column, length in (("text", 4000), ("image", 1024)):
        for row, factor in {"transformer": 1.0, "reformer": 0.7, "linformer": 0.5, "performer": 0.57, "permuteformer": 0.58}.items():
            seconds = length * 1e-3 * factor
            lines.append(measurement("2", row, column, seconds, length, 4, items=25_000))
            lines.append(measurement("3", row, column, seconds / 5, length, kind="inference"))
        lines.append(measurement("2", "performer-t5", column, length * 0.05, length, 4, items=25_000, estimated=True))
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        full = length == 16384
        lines.append(measurement("speed", "transformer-lm", str(length), (1e-8 * length + 2e-5) * length, length,
                                 status="out of memory" if full else "finished"))  # fmt: skip
        lines.append(measurement("speed", "performer-lm", str(length), 3e-5 * length, length))
        lines.append(measurement("speed", "permuteformer-lm", str(length), 3.2e-5 * length, length))
    return lines


def write(path: Path, content) -> Path:
    path.write_text(json.dumps(content))
    return path


def lines(path: Path, contents) -> Path:
    path.write_text("".join(json.dumps(content) + "\n" for content in contents))
    return path


def some(folder: Path) -> list[Path]:
    """A little of everything, in seconds."""
    runs = folder / "runs"
    for row, value in {"performer": 0.61, "permuteformer": 0.66}.items():
        for column, scale in (("text", 1.0), ("image", 0.65)):
            for seed in range(2):
                run_folder(runs / f"table1/{column}/{row}-seed{seed}", column, row, seed, value * scale,
                           maps=(column, row, seed) == ("image", "permuteformer", 0))  # fmt: skip
    run_folder(runs / "table1/text/transformer-seed0", "text", "transformer", 0, 0.64, status="out of memory")
    for row, value in {"transformer-lm": 5.03, "permuteformer-lm": 5.42}.items():
        run_folder(runs / f"table4/lm/{row}-seed0", "lm", row, 0, value, "4", lengths=(2, 4, 8, 16), maps=True)
    run_folder(folder / "own" / "mine", "digits", "permuteformer-image", 0, 0.95, None)
    run_folder(folder / "own" / "evil", "digits", SCRIPT, 0, 0.93, None, task={"notes": [SCRIPT], "baselines": {SCRIPT: 0.1}})
    lines(folder / "speed.jsonl", [line for line in speeds() if line["row"] != "linformer"])
    return [runs, folder / "own", folder / "speed.jsonl"]
