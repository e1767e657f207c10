"""A report's folder: there whole, or what was there before stays."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from permuteformer.folders import disk_errors_in_words, folder_lock, new_folder, read_json
from permuteformer.report.content import Report, build_report
from permuteformer.report.html import page
from permuteformer.report.latex import latex
from permuteformer.report.markdown import markdown
from permuteformer.report.spreadsheet import spreadsheet

FORMAT = 1
MARK = "report.json"
"""What says that a folder is a report of ours, and which files are."""


def write_report(
    inputs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], progress: Callable[[str], None] = lambda what: None
) -> Report:
    """Read runs and write their report into the folder ``output``.

    In it are ``index.html``, ``report.md``, ``tables.tex``, ``tables/*.csv`` and ``figures/``. A report that is there is replaced; another
    folder is left alone and refused.
    """
    check_output(Path(output))
    report = build_report(inputs, progress)
    progress("writing")
    write_folder(report, Path(output))
    return report


def write_folder(report: Report, output: Path) -> None:
    """Write the folder of a report, replacing one that was made before."""
    output = Path(os.path.realpath(output))
    elsewhere = "choose another folder with --output"
    fresh, old = (output.with_name(f".{output.name}.{word}") for word in ("next", "old"))
    with disk_errors_in_words(output, elsewhere), ExitStack() as locked:
        output.parent.mkdir(parents=True, exist_ok=True)
        locked.enter_context(folder_lock(output))
        _recover(output, old)
        check_output(output)
        shutil.rmtree(fresh, ignore_errors=True)
        with new_folder(fresh, elsewhere) as folder:
            _fill(folder, report, output)
        _swap(fresh, output, old)
        Path(folder_lock(fresh).lock_file).unlink(missing_ok=True)


def check_output(output: Path) -> None:
    """Raise unless the folder is free, or a report that may be replaced."""
    if not output.exists():
        return
    if not output.is_dir():
        raise FileExistsError(f"{output} is a file: choose a folder with --output")
    if not any(output.iterdir()):
        return
    there = {path.relative_to(output).as_posix() for path in output.rglob("*") if not path.is_dir()}
    mark = read_json(output / MARK)
    if mark.get("made_by") != "permuteformer report" or not isinstance(mark.get("files"), list):
        raise FileExistsError(f"{output} is there and is no report: choose another folder with --output")
    foreign = sorted(there - {MARK, *mark.get("files", [])})
    if foreign:
        names = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        hint = "move them away, or choose another folder with --output"
        raise FileExistsError(f"{output} is a report with other files in it ({names}): {hint}")


def _fill(folder: Path, report: Report, output: Path) -> None:
    contents: dict[str, str | bytes] = {
        "index.html": page(report, output),
        "report.md": markdown(report, output),
        "tables.tex": latex(report.tables),
        **{f"tables/{table.name}.csv": spreadsheet(table) for table in report.tables},
        **{f"figures/{figure.name}.svg": figure.svg_file for figure in report.figures},
        **{f"figures/{figure.name}.png": figure.png for figure in report.figures},
    }
    contents[MARK] = json.dumps({"made_by": "permuteformer report", "format": FORMAT, "files": sorted(contents)}, indent=1)
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))


def _swap(fresh: Path, output: Path, old: Path) -> None:
    """Give the fresh folder its name; should that fail, the old one has it again."""
    if not output.exists():
        fresh.rename(output)
        return
    output.rename(old)
    try:
        fresh.rename(output)
    except BaseException:
        old.rename(output)
        raise
    shutil.rmtree(old)


def _recover(output: Path, old: Path) -> None:
    """What a process that was killed between two names left behind."""
    if old.exists() and not output.exists():
        old.rename(output)
    shutil.rmtree(old, ignore_errors=True)
