"""What data costs: the time to a first batch, memory, padding; and how fast, and how well, it is generated.

    python benchmarks/data.py imdb --data FOLDER    IMDB: prepared, opened again, padded (needs the reviews in FOLDER)
    python benchmarks/data.py generate              100,000 trees of ListOps, images of Pathfinder
    python benchmarks/data.py whole                 all 200,000 images of Pathfinder, 32 x 32, hard, on all cores
    python benchmarks/data.py pairs --data FOLDER   pairs of halves of articles: what tells their label (needs wiki_en in FOLDER)
    python benchmarks/data.py large                 memory of preparing a text of 2 GB, and of reading windows of it

Results go to results/data/PART.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BATCH_SIZE = 32


def imdb(data: str) -> list[dict[str, Any]]:
    """A process for each start, with a cache that is empty at the first."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "start", "--data", data]
        environment = {**os.environ, "PERMUTEFORMER_CACHE": cache}
        starts = []
        for kind in ("first start", "second start"):
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            starts.append({"kind": kind, **json.loads(output)})
        os.environ["PERMUTEFORMER_CACHE"] = cache
        return [*starts, *(padding(data, by_length) for by_length in (False, True))]


def start(data: str) -> dict[str, Any]:
    """Seconds from the task to its first batch, without importing torch, and the peak of the process."""
    import torch  # noqa: F401

    begin = time.perf_counter()
    from permuteformer.tasks.batches import loader
    from permuteformer.tasks.lra_text import LraText

    task = LraText(data=data)
    next(iter(loader(task, "train", BATCH_SIZE, by_length=True)))
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def padding(data: str, by_length: bool) -> dict[str, Any]:
    """The share of tokens in an epoch's batches that are padding."""
    from permuteformer.tasks.batches import BatchSampler
    from permuteformer.tasks.lra_text import LraText

    lengths = LraText(data=data).lengths("train")
    batches = BatchSampler(len(lengths), BATCH_SIZE, lengths=lengths if by_length else None)
    padded = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    kind = "batches by length" if by_length else "batches as they come"
    return {"kind": kind, "batch_size": BATCH_SIZE, "padding": 1 - int(lengths.sum()) / padded}


def generate() -> list[dict[str, Any]]:
    """ListOps on all cores, Pathfinder on one, which is what its rate is of."""
    from permuteformer.tasks.generators.listops import generate_listops
    from permuteformer.tasks.generators.pathfinder import generate_pathfinder

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        statistics = generate_listops(Path(folder, "listops"))
        seconds = time.perf_counter() - begin
        rows.append({"task": "lra-listops", "items": 100_000, "processes": os.cpu_count(), "seconds": seconds, **statistics})
        for resolution, count in ((32, 2000), (64, 1000), (128, 200)):
            for level in ("easy", "intermediate", "hard"):
                begin = time.perf_counter()
                statistics = generate_pathfinder(Path(folder), resolution=resolution, level=level, count=count, processes=1)
                seconds = time.perf_counter() - begin
                setting = {"task": "lra-pathfinder", "resolution": resolution, "level": level, "items": count, "processes": 1}
                rows.append({**setting, "seconds": seconds, "per_second": count / seconds, **statistics})
    return rows


def whole() -> list[dict[str, Any]]:
    """As many images as the official level has."""
    from permuteformer.tasks.generators.pathfinder import generate_pathfinder

    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        statistics = generate_pathfinder(Path(folder))
        seconds = time.perf_counter() - begin
    return [{"task": "lra-pathfinder", "resolution": 32, "level": "hard", "processes": os.cpu_count(), "seconds": seconds, **statistics}]


def pairs(data: str) -> list[dict[str, Any]]:
    """How often the label of a test pair is told by how many words both texts have, weighed by rarity, and by each text alone."""
    import numpy as np

    from permuteformer.tasks.generate import generate as make
    from permuteformer.tasks.lra_retrieval import LraRetrieval

    with tempfile.TemporaryDirectory() as folder:
        os.environ["PERMUTEFORMER_CACHE"] = str(Path(folder, "cache"))
        made = make("lra-retrieval", Path(folder), {}, documents=Path(data, "wiki_en"))
        task = LraRetrieval(data=folder)
        counts: Counter[bytes] = Counter()
        texts: dict[bytes, set[int]] = defaultdict(set)
        for item in task.items("train"):
            for text in (item["first"], item["second"]):
                counts.update(set(text.split()))
                texts[text].add(item["label"])
        weight = {word: float(np.log(len(texts) / count)) for word, count in counts.items()}
        scores = {
            split: np.array(
                [sum(weight.get(w, 0.0) for w in set(i["first"].split()) & set(i["second"].split())) for i in task.items(split)]
            )
            for split in ("train", "test")
        }
        labels = {split: task.items(split).column("label") for split in scores}
        limits = np.unique(scores["train"])
        best = max(limits, key=lambda limit: ((scores["train"] >= limit) == labels["train"]).mean())
        overlap = float(((scores["test"] >= best) == labels["test"]).mean())
    both = sum(found == {0, 1} for found in texts.values()) / len(texts)
    return [
        {
            "task": "lra-retrieval",
            "corpus": "wiki_en",
            "test_accuracy_of_word_overlap": overlap,
            "texts_with_both_labels": both,
            **made.statistics,
        }
    ]


def large() -> list[dict[str, Any]]:
    """Peak memory of two processes: one prepares a text that is larger than what they may need, one reads from it."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.txt")
        with path.open("w") as file:
            for n in range(2 * 10**9 // 10**6):
                file.write(f"{n:09} the quick brown fox jumps over the lazy dog\n" * (10**6 // 54))
        environment = {**os.environ, "PERMUTEFORMER_CACHE": str(Path(folder, "cache"))}
        for kind in ("prepare", "read 1,000 windows"):
            output = subprocess.run(
                [sys.executable, __file__, "windows", "--data", str(path)], check=True, capture_output=True, env=environment
            )
            rows.append({"kind": kind, "text_bytes": path.stat().st_size, **json.loads(output.stdout)})
    return rows


def windows(path: str) -> dict[str, Any]:
    """Prepare the text if need be, read windows at random places, and say what that took. Pages of files that are mapped are not counted:
    the system takes them back when it needs them."""
    import threading

    import numpy as np

    from permuteformer.tasks.lm import Lm

    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.05):
            own = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
            peak = max(peak, int(own.split()[1]) * 1024)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    dataset = Lm(path).dataset("train")
    for n in np.random.default_rng(0).integers(0, len(dataset), 1000):
        dataset[int(n)]
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    return {"seconds": seconds, "peak_bytes": peak}


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["imdb", "generate", "whole", "pairs", "large", "start", "windows"])
    parser.add_argument("--data", default=os.environ.get("PERMUTEFORMER_DATA"), help="the data folder")
    parser.add_argument("--output", type=Path, default=Path("results/data"), help="folder of the JSON lines (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.part in ("start", "windows"):
        print(json.dumps({"start": start, "windows": windows}[arguments.part](arguments.data)))
        return
    needs_data = {"imdb": imdb, "pairs": pairs}
    rows = (
        needs_data[arguments.part](arguments.data)
        if arguments.part in needs_data
        else {"generate": generate, "whole": whole, "large": large}[arguments.part]()
    )
    table = Table("", "", show_header=False)
    for row in rows:
        name, *rest = row.items()
        table.add_row(str(name[1]), "\n".join(f"{key}: {value}" for key, value in rest))
    Console().print(table)
    command = f"python benchmarks/data.py {arguments.part}" + (" --data FOLDER" if arguments.part in needs_data else "")
    setting = {"python": platform.python_version(), "cores": os.cpu_count(), "command": command}
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{arguments.part}.jsonl"
    path.write_text("".join(json.dumps({**row, **setting}) + "\n" for row in rows))
    Console().print(f"written to {path}")


if __name__ == "__main__":
    main()
