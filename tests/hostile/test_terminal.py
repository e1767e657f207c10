"""Whatever a terminal or a spreadsheet would interpret is escaped, and brackets are not markup."""

import csv
import io
import json
import os
import pty
import re
import sys

import pytest
from commands import run
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from small_data import ROWS, write

from permuteformer.console import PlainConsole, description_column
from permuteformer.formatting import escape_cell, escape_terminal, printable
from permuteformer.train.predict import Prediction, csv_lines

CONTROL = {
    "color": "\x1b[31m",
    "link": "\x1b]8;;http://a\x07b\x1b]8;;\x07",
    "clipboard": "\x1b]52;c;eA==\x07",
    "title": "\x1b]0;a\x07",
    "C1": "\x9b31m",
    "return": "\r",
    "backspace": "\b\b\b",
    "bell": "\x07",
    "right to left": "\u202e",
    "isolate": "\u2066",
    "mark": "\u200f",
    "line": "\u2028",
    "delete": "\x7f",
    "surrogate": "\ud800",
}
MARKUP = ["[red]", "[/]", "[/red]", "[link=http://a]b[/link]", ":smile:", "[bold"]
HARMLESS = "Größe 日本 👩‍👩‍👧 naïve \u00a0 fin"
BAD = "[/] \x1b[31m"


def assert_escaped(shown, styled=False):
    """Check that there are no control characters except line ends; in a terminal, also colors of the library's own."""
    plain = re.sub(r"\r?\x1b\[[0-9;?]*[A-Za-z]", "", shown) if styled else shown
    for line in plain.replace("\r\n", "\n").split("\n"):
        assert escape_terminal(line) == line


def shown_by(*words, code=0):
    output = run(*words, code=code)
    assert_escaped(output)
    return output


@pytest.mark.parametrize("text", CONTROL.values(), ids=CONTROL)
def test_control_characters_are_escaped(text):
    for shown in (printable(f"a{text}b"), escape_terminal(f"a{text}b")):
        assert shown.isprintable()
        assert shown.startswith("a\\")
    assert escape_terminal(HARMLESS + "\n\t" + HARMLESS) == HARMLESS + "\n\t" + HARMLESS


@pytest.mark.parametrize("terminal", [True, False])
def test_the_console_escapes_everything_it_prints(terminal):
    file = io.StringIO()
    console = PlainConsole(file=file, force_terminal=terminal, width=200)
    for text in [*CONTROL.values(), *MARKUP]:
        table = Table(title=f"title {text}", caption=text)
        table.add_column(f"column {text}")
        table.add_row(f"cell {text}")
        table.add_row(Text(text, style="red"))
        console.print(f"line {text}", style="red", soft_wrap=True)
        console.print(table)
        console.rule(Text(text))
        with console.status(Text(text)) as status:
            status.update(Text(f"more {text}"))
        with Progress(description_column(), console=console) as progress:
            progress.add_task(f"bar {text}", total=1)
    shown = file.getvalue()
    assert_escaped(shown, styled=terminal)
    assert all(shown.count(text) >= 5 for text in [*MARKUP, "\\x1b[31m"])


def test_commands_on_data(tmp_path):
    words = [*(text for text in CONTROL.values() if text != "\ud800"), *MARKUP]
    rows = [{"text": f"text {n} {words[n % len(words)]}", "label": f"label {words[n % 10]}"} for n in range(60)]
    path = tmp_path / "a\x1b[31m [red] \u202e.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "label \\x1b[31m" in shown_by("data", "check", "classify", path)
    assert "text " in shown_by("data", "show", "classify", path, "--count", 60)
    assert "'[/] \\x1b[31m'" in shown_by("data", "show", "classify", path, "--split", BAD, code=1)
    path.write_text('{"text\x1b[31m[/]": 1}\n{"a": "\x1b]8;;x"}')
    shown_by("data", "check", "classify", path, code=1)
    shown_by("data", "list", "--data", tmp_path / BAD)
    assert "too long" in shown_by("data", "list", "--data", "é" * 300, code=1)
    assert len(shown_by("data", "check", "images", "é" * 5000, code=1)) < 3000
    shown_by("data", "check", "classify", f"missing {BAD}", code=1)
    shown_by("data", "check", BAD, code=1)
    shown_by("data", "check", "classify", path, f"--{BAD}", code=2)


def test_commands_on_runs(text_run, tmp_path):
    folder = text_run.rename(tmp_path / "run \x1b[31m [red] \u202e")
    table = write(tmp_path / "new.csv", ROWS[:3])
    assert "labels\\x1b.csv" in shown_by("predict", folder, table, "--output", tmp_path / "labels\x1b.csv")
    assert "\\x1b[31m [red]" in shown_by("inspect", folder)
    for name, content, command in (
        ("experiment.json", {"format": BAD, "version": "\u202e"}, "resume"),
        ("model/config.json", {"model_type": BAD}, "inspect"),
        ("model/config.json", {"model_type": "permuteformer", "\x1b[31m": 1}, "inspect"),
    ):
        before = (folder / name).read_bytes()
        (folder / name).write_text(json.dumps(content))
        shown_by("predict", folder, table, code=1)
        shown_by(command, folder, code=1)
        (folder / name).write_bytes(before)
    shown_by("generate", folder, code=1)


def test_reports(tmp_path):
    hostile = "\x1b[31m[/] \u202e </script>"
    record = {"format": 1, "kind": "training", "seed": 0, **dict.fromkeys(("run", "table", "row", "column", "preset"), hostile)}
    record |= {
        "result": {"status": hostile, "message": hostile, "test": {"accuracy": 0.5}},
        "task": {"metric": hostile, "notes": [hostile]},
    }
    (tmp_path / "results.jsonl").write_text(json.dumps(record))
    assert "[/]" in shown_by("report", tmp_path / "results.jsonl", "--output", tmp_path / "report")
    for path in (tmp_path / "report").rglob("*"):
        assert path.name.isascii()
        if path.suffix in (".html", ".md", ".tex", ".csv", ".svg"):
            text = path.read_text()
            assert not set("\x1b\u202e\x9b") & set(text), path
            assert path.suffix != ".html" or text.count("</script>") == 1
    (tmp_path / "experiment.json").write_text(json.dumps({"format": "\x1b[31m", "version": "\x1b[31m" + "é" * 5000}))
    assert len(shown_by("report", tmp_path, code=1)) < 1000


def test_a_terminal(tmp_path):
    """Bars and colors are for terminals only, so this one is a terminal."""
    title = "\x1b]0;owned\x07"
    table = tmp_path / f"a{title} [red].jsonl"
    rows = [{"text": f"{n} {title}", "label": f"{title} {n % 3} [/]"} for n in range(60)]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="100")
        os.execv(sys.executable, [sys.executable, "-m", "permuteformer", "data", "check", "classify", str(table)])
    shown = b""
    try:
        while piece := os.read(terminal, 4096):
            shown += piece
    except OSError:  # so Linux says that the other side has closed
        pass
    os.waitpid(pid, 0)
    os.close(terminal)
    assert b"all items can be read" in shown
    assert b"\x1b]0;" not in shown
    assert rb"\x1b]0;owned\x07" in shown


CELLS = ("=1+1", "+a", "-a", "@SUM(1)", "\t=1", "\r=1", "'=1", "''=1", "＝1", "-1", "+1.5e3", "good", "", "'", "'a", "a=b", "-", "a\rb\n")


@pytest.mark.parametrize("text", CELLS)
def test_no_cell_is_a_formula_and_nothing_is_lost(text):
    lines = list(csv_lines([Prediction(2, text, text, 0.75, (0.25, 0.75), cut=False)], ["a", text]))
    _, row = csv.reader(io.StringIO("".join(lines), newline=""))
    for cell in row[1:3]:
        is_number = re.fullmatch(r"[+-]?\d+(\.\d+)?(e\d+)?", cell)
        assert cell == escape_cell(text)
        assert is_number or not cell.startswith(("=", "+", "-", "@", "\t", "\r", "＝"))
        assert text == (cell[1:] if re.match(r"'+[=+\-@\t\r＝＋－＠]", cell) and not is_number else cell)
