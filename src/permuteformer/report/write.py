"""Writes the folder of a report: complete, or as it was before."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from permuteformer.report.content import Report, build_report
from permuteformer.report.render import csv_table, html_page, latex_tables, markdown_page
from permuteformer.storage import atomic_folder, folder_lock, read_own_json, readable_disk_errors

FORMAT = 1
MARK = "report.json"
"""The file that marks a folder as a report, and lists its files."""
ADVICE = "choose another folder with --output"


def write_report(
    inputs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], progress: Callable[[str], None] = lambda what: None
) -> Report:
    """Read runs and write their report into the folder ``output``: HTML, Markdown, LaTeX, CSV and figures.

    An earlier report there is replaced; any other folder with files is refused.
    """
    check_output(Path(output))
    report = build_report(inputs, progress)
    progress("writing")
    write_folder(report, Path(output))
    return report


def write_folder(report: Report, output: Path) -> None:
    """Write the folder of a report, and replace an earlier report."""
    output = Path(os.path.realpath(output))
    new, old = (output.with_name(f".{output.name}.{word}") for word in ("new", "old"))
    with readable_disk_errors(output, ADVICE), ExitStack() as stack:
        output.parent.mkdir(parents=True, exist_ok=True)
        stack.enter_context(folder_lock(output))
        if old.exists() and not output.exists():  # a process was killed while it replaced the report
            old.rename(output)
        check_output(output)
        for leftover in (old, new):
            shutil.rmtree(leftover, ignore_errors=True)
        with atomic_folder(new, ADVICE) as folder:
            _write_files(folder, report, output)
        _replace(output, new, old)


def check_output(output: Path) -> None:
    """Raise unless the folder is empty or missing, or a report that may be replaced."""
    if not output.exists():
        return
    if not output.is_dir():
        raise FileExistsError(f"{output} is a file: {ADVICE}")
    found = {path.relative_to(output).as_posix() for path in output.rglob("*") if not path.is_dir()}
    if not found and not any(output.iterdir()):
        return
    mark = read_own_json(output / MARK)
    if mark.get("made_by") != "permuteformer report" or not isinstance(mark.get("files"), list):
        raise FileExistsError(f"{output} already exists and is not a report: {ADVICE}")
    if foreign := sorted(found - {MARK, *mark["files"]}):
        names = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise FileExistsError(f"{output} is a report that also has other files ({names}): move them away, or {ADVICE}")


def _write_files(folder: Path, report: Report, output: Path) -> None:
    contents: dict[str, str | bytes] = {
        "index.html": html_page(report, output),
        "report.md": markdown_page(report, output),
        "tables.tex": latex_tables(report.tables),
        **{f"tables/{table.name}.csv": csv_table(table) for table in report.tables},
        **{f"figures/{figure.name}.svg": figure.svg_file for figure in report.figures},
        **{f"figures/{figure.name}.png": figure.png for figure in report.figures},
    }
    contents[MARK] = json.dumps({"made_by": "permuteformer report", "format": FORMAT, "files": sorted(contents)}, indent=1)
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _replace(output: Path, new: Path, old: Path) -> None:
    """Rename the new folder to ``output``; if that fails, the old one keeps its name."""
    if not output.exists():
        new.rename(output)
        return
    output.rename(old)
    try:
        new.rename(output)
    except BaseException:
        old.rename(output)
        raise
    shutil.rmtree(old)
