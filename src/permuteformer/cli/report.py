"""The command that makes a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from permuteformer.cli.terminal import console, errors_in_words, say


def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, folders with run folders, or .jsonl results files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write. A report that is there is replaced.")] = Path("report"),
) -> None:
    """Tables, figures and a page from runs, with the paper's numbers beside them.

    OUTPUT gets index.html, which needs nothing beside it, report.md, tables.tex, tables/*.csv and figures/.
    """
    from permuteformer.report import print_tables, write_report

    with errors_in_words():
        with console.status("reading runs") as status:
            made = write_report(folders, output, progress=lambda what: status.update(Text(what)))
        print_tables(made.tables, console)
    for sentence in made.left_out:
        say(sentence, style="yellow")
    say(f"{made.summary} The report: {output / 'index.html'}")
