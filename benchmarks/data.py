"""Time to the first batch, memory and padding of data, and speed and statistics of generated data.

    python benchmarks/data.py imdb --data FOLDER    IMDB: prepared, opened again, padded (needs the reviews in FOLDER)
    python benchmarks/data.py generate              100,000 trees of ListOps, images of Pathfinder
    python benchmarks/data.py whole                 all 200,000 images of Pathfinder, 32 x 32, hard, on all cores
    python benchmarks/data.py pairs --data FOLDER   pairs of halves of articles: what predicts their label (needs wiki_en in FOLDER)
    python benchmarks/data.py large                 memory of preparing a text of 2 GB, and of reading windows of it

Results go to results/data/PART.jsonl.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from permuteformer.machine import environment, peak_memory, resident_memory
from permuteformer.tasks import GenerateOptions
from permuteformer.tasks.generators.listops import generate_listops
from permuteformer.tasks.generators.pathfinder import generate_pathfinder
from permuteformer.tasks.lm import Lm
from permuteformer.tasks.lra_retrieval import LraRetrieval
from permuteformer.tasks.lra_text import LraText
from permuteformer.train.data import BatchSampler

BATCH_SIZE = 32
Row = dict[str, Any]


def imdb(folder: Path, data: str) -> list[Row]:
    """Return time and memory of two starts, the first with an empty cache, and the padding."""
    starts = [{"kind": kind, **_in_new_process(_first_batch, data)} for kind in ("first start", "second start")]
    lengths = LraText(data=data).lengths("train")
    paddings = []
    for kind, given in (("batches as they come", None), ("batches by length", lengths)):
        batches = BatchSampler(len(lengths), BATCH_SIZE, lengths=given)
        padded = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
        paddings.append({"kind": kind, "batch_size": BATCH_SIZE, "padding": 1 - int(lengths.sum()) / padded})
    return [*starts, *paddings]


def _first_batch(data: str) -> Row:
    begin = time.perf_counter()
    task = LraText(data=data)
    items = task.items("train")
    first = next(iter(BatchSampler(len(items), BATCH_SIZE, lengths=task.lengths("train"))))
    task.input.collate([items[n] for n in first])
    return {"seconds": time.perf_counter() - begin, "peak_bytes": peak_memory(torch.device("cpu"))}


def generate(folder: Path, data: str) -> list[Row]:
    """Return speed and statistics of ListOps on all cores, and of Pathfinder on one core."""
    begin = time.perf_counter()
    statistics = generate_listops(folder, GenerateOptions()).statistics
    seconds = time.perf_counter() - begin
    rows = [{"task": "lra-listops", "items": 100_000, "processes": os.cpu_count(), "seconds": seconds, **statistics}]
    for resolution, count in ((32, 2000), (64, 1000), (128, 200)):
        for level in ("easy", "intermediate", "hard"):
            counts = {"train": count * 8 // 10, "validation": count // 10, "test": count // 10}
            begin = time.perf_counter()
            statistics = generate_pathfinder(folder, GenerateOptions(counts=counts, processes=1), resolution, level).statistics
            seconds = time.perf_counter() - begin
            setting = {"task": "lra-pathfinder", "resolution": resolution, "level": level, "items": count, "processes": 1}
            rows.append({**setting, "seconds": seconds, "per_second": count / seconds, **statistics})
    return rows


def whole(folder: Path, data: str) -> list[Row]:
    """Return speed and statistics of as many images as the official level has."""
    begin = time.perf_counter()
    statistics = generate_pathfinder(folder, GenerateOptions()).statistics
    seconds = time.perf_counter() - begin
    return [{"task": "lra-pathfinder", "resolution": 32, "level": "hard", "processes": os.cpu_count(), "seconds": seconds, **statistics}]


def pairs(folder: Path, data: str) -> list[Row]:
    """Return how often the rare words that both texts share, and how often a text alone, predict the label of a test pair."""
    task = LraRetrieval(data=str(folder))
    made = task.generate(GenerateOptions(documents=Path(data, "wiki_en")))
    counts: Counter[bytes] = Counter()
    labels_of: dict[bytes, set[int]] = defaultdict(set)
    for item in task.items("train"):
        for text in (item["first"], item["second"]):
            counts.update(set(text.split()))
            labels_of[text].add(item["label"])
    weight = {word: float(np.log(len(labels_of) / count)) for word, count in counts.items()}

    def overlap(item: Row) -> float:
        return sum(weight.get(word, 0.0) for word in set(item["first"].split()) & set(item["second"].split()))

    scores = {split: np.array([overlap(item) for item in task.items(split)]) for split in ("train", "test")}
    labels = {split: task.rows(split).column("label") for split in scores}
    best = max(np.unique(scores["train"]), key=lambda limit: ((scores["train"] >= limit) == labels["train"]).mean())
    accuracy = float(((scores["test"] >= best) == labels["test"]).mean())
    both = sum(found == {0, 1} for found in labels_of.values()) / len(labels_of)
    found = {"test_accuracy_of_word_overlap": accuracy, "texts_with_both_labels": both}
    return [{"task": "lra-retrieval", "corpus": "wiki_en", **found, **made.statistics}]


def large(folder: Path, data: str) -> list[Row]:
    """Return time and memory of two processes: one prepares a text of 2 GB, one reads from it."""
    path = folder / "text.txt"
    with path.open("w") as file:
        for n in range(2 * 10**9 // 10**6):
            file.write(f"{n:09} the quick brown fox jumps over the lazy dog\n" * (10**6 // 54))
    size = path.stat().st_size
    return [{"kind": kind, "text_bytes": size, **_in_new_process(_windows, str(path))} for kind in ("prepare", "read 1,000 windows")]


def _windows(path: str) -> Row:
    """Prepare the text if the cache has none, and read windows at random places.

    The pages of mapped files do not count as memory: the system takes them back when it needs them.
    """
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.05):
            peak = max(peak, resident_memory("RssAnon") or 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    windows = Lm(path=path).items("train")
    for n in np.random.default_rng(0).integers(0, len(windows), 1000):
        windows[int(n)]
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    return {"seconds": seconds, "peak_bytes": peak}


def _in_new_process(function: Any, argument: str) -> Row:
    """Call a function in a new process, because the peak memory of a process never falls."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        row: Row = pool.apply(function, (argument,))
    return row


PARTS = {"imdb": imdb, "generate": generate, "whole": whole, "pairs": pairs, "large": large}


def main() -> None:
    """Run one part, with an empty cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--data", default=os.environ.get("PERMUTEFORMER_DATA", ""), help="the data folder")
    parser.add_argument("--output", type=Path, default=Path("results/data"), help="folder of the JSON lines (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PERMUTEFORMER_CACHE"] = str(Path(folder, "cache"))
        rows = PARTS[arguments.part](Path(folder), arguments.data)
    for row in rows:
        print(row)
    command = f"python benchmarks/data.py {arguments.part}" + (" --data FOLDER" if arguments.part in ("imdb", "pairs") else "")
    made_by = {"command": command, "environment": environment()}
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"{arguments.part}.jsonl").write_text("".join(json.dumps({**row, **made_by}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
