"""What data costs: the time to a first batch, memory, padding; and how fast, and how well, it is generated.

    python benchmarks/data.py imdb --data FOLDER    IMDB: prepared, opened again, padded (needs the reviews in FOLDER)
    python benchmarks/data.py generate              100,000 trees of ListOps, images of Pathfinder

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


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["imdb", "generate", "start"])
    parser.add_argument("--data", default=os.environ.get("PERMUTEFORMER_DATA"), help="the data folder")
    parser.add_argument("--output", type=Path, default=Path("results/data"), help="folder of the JSON lines (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.part == "start":
        print(json.dumps(start(arguments.data)))
        return
    rows = imdb(arguments.data) if arguments.part == "imdb" else generate()
    table = Table("", "", show_header=False)
    for row in rows:
        name, *rest = row.items()
        table.add_row(str(name[1]), "\n".join(f"{key}: {value}" for key, value in rest))
    Console().print(table)
    command = f"python benchmarks/data.py {arguments.part}" + (" --data FOLDER" if arguments.part == "imdb" else "")
    setting = {"python": platform.python_version(), "cores": os.cpu_count(), "command": command}
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{arguments.part}.jsonl"
    path.write_text("".join(json.dumps({**row, **setting}) + "\n" for row in rows))
    Console().print(f"written to {path}")


if __name__ == "__main__":
    main()
