"""Whether what a run, a cache and a report consist of is what it would be had nobody disturbed them."""

from __future__ import annotations

import re
from pathlib import Path

from permuteformer.train import checkpoint
from soak.processes import record, result, steps

LEFT = re.compile(r"\.(partial|new|replaced|removed|next|old)$")
"""Names of what is being made, which nobody reads."""

TIMES = ("result.json", "metrics.jsonl", "environment.json", "README.md", "state.json", "sums.json", ".lock")
"""Files of a run that say when and how it was carried out, besides what came of it."""


BESIDE = ("tensorboard/", "log.txt")
"""What tells of a run, and of every time that it went on."""


def files(folder: Path) -> dict[str, bytes]:
    """The files below a folder, by their paths; without locks."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found} if folder.exists() else {}


def left_over(folder: Path) -> list[str]:
    """What was being made, and is there still."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if LEFT.search(path.name))


def different_run(run: Path, whole: Path) -> list[str]:
    """In what a run that has ended differs from an undisturbed one: weights, Adam's state, looks, metrics, result."""
    ours, theirs = ({name: content for name, content in files(folder).items() if not name.startswith(BESIDE)} for folder in (run, whole))
    wrong = sorted(ours.keys() ^ theirs.keys())
    wrong += [name for name in ours.keys() & theirs.keys() if Path(name).name not in TIMES and ours[name] != theirs[name]]
    wrong += [name for name, read in (("metrics", record), ("result", result), ("checkpoints", steps)) if read(run) != read(whole)]
    return wrong


def wrongly_believed(run: Path, cache: Path, whole: Path, whole_cache: Path) -> list[str]:
    """What a killed process left under a name that is believed, and that is not whole."""
    wrong = []
    for step in checkpoint.steps(run / "checkpoints"):
        try:
            checkpoint.load(run / "checkpoints", step)
        except checkpoint.Damaged as error:
            wrong.append(str(error))
    if (run / "model").exists():
        model, theirs = files(run / "model"), files(whole / "model")
        if model.keys() != theirs.keys() or model["model.safetensors"] != theirs["model.safetensors"]:
            wrong.append("model")
    if (run / "result.json").exists() and (result(run) != result(whole) or not (run / "model").exists()):
        wrong.append("result.json")
    entries = [path for path in cache.iterdir() if not path.name.startswith(".")] if cache.exists() else []
    return wrong + [f"cache: {entry.name}" for entry in entries if files(entry) != files(whole_cache / entry.name)]
