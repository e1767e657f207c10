"""What a terminal would obey is not printed as it is, wherever it comes from; and brackets are brackets."""

import csv
import io
import json
import os
import pty
import re
import sys

import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from small_data import ROWS, write
from typer.testing import CliRunner

from permuteformer.cli import app
from permuteformer.terminal import PlainConsole, described
from permuteformer.texts import for_markdown, for_spreadsheet, for_terminal, printable
from permuteformer.train.outputs import csv_lines
from permuteformer.train.predict import Prediction

OBEYED = {
    "colour": "\x1b[31m",
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
    "half": "\ud800",
}
MARKUP = ["[red]", "[/]", "[/red]", "[link=http://a]b[/link]", ":smile:", "[bold"]
HARMLESS = "Größe 日本 👩‍👩‍👧 naïve \u00a0 fin"


def is_safe(shown, styled=False):
    """No control characters but line ends; of a terminal, colours of our own are left out first."""
    plain = re.sub(r"\r?\x1b\[[0-9;?]*[A-Za-z]", "", shown) if styled else shown
    return all(for_terminal(line) == line for line in plain.replace("\r\n", "\n").split("\n"))


@pytest.mark.parametrize("text", OBEYED.values(), ids=OBEYED)
def test_texts_are_escaped(text):
    for shown in (printable(f"a{text}b"), for_terminal(f"a{text}b")):
        assert shown.isprintable()
        assert shown.startswith("a\\")
    assert for_terminal(HARMLESS + "\n\t" + HARMLESS) == HARMLESS + "\n\t" + HARMLESS


@pytest.mark.parametrize("terminal", [True, False])
def test_the_console_obeys_no_text(terminal):
    file = io.StringIO()
    console = PlainConsole(file=file, force_terminal=terminal, width=200)
    for text in [*OBEYED.values(), *MARKUP]:
        table = Table(title=f"title {text}", caption=text)
        table.add_column(f"column {text}")
        table.add_row(f"cell {text}")
        table.add_row(Text(text, style="red"))
        console.print(f"line {text}", style="red", soft_wrap=True)
        console.print(table)
        console.rule(Text(text))
        with console.status(Text(text)) as status:
            status.update(Text(f"more {text}"))
        with Progress(described(), console=console) as progress:
            progress.add_task(f"bar {text}", total=1)
    shown = file.getvalue()
    assert is_safe(shown, styled=terminal)
    for text in MARKUP:
        assert shown.count(text) >= 5
    assert "\\x1b[31m" in shown


def invoke(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert is_safe(result.output), result.output
    return result.output


@pytest.fixture
def hostile_table(tmp_path, monkeypatch):
    """Labels and texts, and a name, that want to be obeyed."""
    monkeypatch.setenv("PERMUTEFORMER_CACHE", str(tmp_path / "cache"))
    words = [*(text for text in OBEYED.values() if text != "\ud800"), *MARKUP]
    rows = [{"text": f"text {n} {words[n % len(words)]}", "label": f"label {words[n % 10]}"} for n in range(60)]
    path = tmp_path / "a\x1b[31m [red] \u202e.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_commands_about_data(hostile_table, tmp_path):
    assert "label \\x1b[31m" in invoke("data", "check", "classify", hostile_table)
    assert "text " in invoke("data", "show", "classify", hostile_table, "--count", 60)
    assert "it is '[/] \\x1b[31m'" in invoke("data", "show", "classify", hostile_table, "--split", "[/] \x1b[31m")
    hostile_table.write_text('{"text\x1b[31m[/]": 1}\n{"a": "\x1b]8;;x"}')
    invoke("data", "check", "classify", hostile_table)
    invoke("data", "list", "--data", tmp_path / "[/] \x1b[31m")
    assert "too long" in invoke("data", "list", "--data", "é" * 300)
    for words in (["classify", "no such \x1b[31m [/]"], ["\x1b[31m[/]"], ["classify", hostile_table, "--set", "\x1b[31m[/]=1"]):
        assert invoke("data", "check", *words)


def test_commands_about_models(text_run, tmp_path):
    renamed = text_run.rename(tmp_path / "run \x1b[31m [red] \u202e")
    table = tmp_path / "new.csv"
    write(table, ROWS[:3])
    assert "labels\\x1b.csv" in invoke("predict", renamed, table, "--output", tmp_path / "labels\x1b.csv")
    assert "\\x1b[31m [red]" in invoke("inspect", renamed)
    for name, content in (
        ("experiment.json", {"format": "\x1b[31m[/]", "version": "\u202e"}),
        ("model/config.json", {"model_type": "\x1b[31m[/]"}),
        ("model/config.json", {"model_type": "permuteformer", "\x1b[31m": 1}),
    ):
        before = (renamed / name).read_bytes()
        (renamed / name).write_text(json.dumps(content))
        assert invoke("predict", renamed, table)
        assert invoke("inspect", renamed) if name != "experiment.json" else invoke("resume", renamed)
        (renamed / name).write_bytes(before)
    for words in (
        ["predict", "\x1b[31m[/]", "a"],
        ["generate", renamed],
        ["resume", "\x9b[/]"],
        ["inspect", "\u202e[/]"],
        ["models", "\x1b[/]"],
    ):
        assert invoke(*words)


def test_reports_of_another_format(tmp_path):
    """Found by fuzzing: the version was told as it is."""
    (tmp_path / "experiment.json").write_text(json.dumps({"format": "\x1b[31m", "version": "\x1b[31m" + "é" * 5000}))
    assert len(invoke("report", tmp_path)) < 1000


def test_reports(tmp_path):
    hostile = "\x1b[31m[/] \u202e </script>"
    record = {
        "format": 1,
        "kind": "training",
        "run": hostile,
        "table": hostile,
        "row": hostile,
        "column": hostile,
        "seed": 0,
        "preset": hostile,
    }
    record |= {
        "result": {"status": hostile, "message": hostile, "test": {"accuracy": 0.5}},
        "task": {"metric": hostile, "notes": [hostile]},
    }
    (tmp_path / "results.jsonl").write_text(json.dumps(record))
    shown = invoke("report", tmp_path / "results.jsonl", "--output", tmp_path / "report")
    assert "[/]" in shown
    for path in (tmp_path / "report").rglob("*"):
        assert path.name.isascii()
        if path.suffix in (".html", ".md", ".tex", ".csv", ".svg"):
            text = path.read_text()
            assert not set("\x1b\u202e\x9b") & set(text), path
            assert path.suffix != ".html" or text.count("</script>") == 1


def test_complaints_about_words():
    for words in (
        ["resume", "a", "b\x1b[31m[/]"],
        ["resume", "--x\x1b[31m[/]"],
        ["\x1b[31m"],
        ["models", "--length", "\x1b[31m"],
        ["bench", "\u202e"],
    ):
        assert invoke(*words)


def test_a_terminal_itself(tmp_path):
    """Bars and colours are for a terminal only, so one is made."""
    table = tmp_path / "a\x1b]0;owned\x07 [red].jsonl"
    title = "\x1b]0;owned\x07"
    rows = [{"text": f"{n} {title}", "label": f"{title} {n % 3} [/]"} for n in range(60)]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parent, child = pty.openpty()
    pid = os.fork()
    if pid == 0:
        os.close(parent)
        os.login_tty(child) if hasattr(os, "login_tty") else [os.setsid(), *(os.dup2(child, n) for n in range(3))]
        os.environ.update(PERMUTEFORMER_CACHE=str(tmp_path / "cache"), TERM="xterm-256color", COLUMNS="100")
        os.execv(sys.executable, [sys.executable, "-m", "permuteformer", "data", "check", "classify", str(table)])
    os.close(child)
    shown = b""
    while True:
        try:
            piece = os.read(parent, 4096)
        except OSError:  # so Linux tells that the other side has ended
            break
        if not piece:
            break
        shown += piece
    os.waitpid(pid, 0)
    os.close(parent)
    assert b"all items can be read" in shown
    assert b"\x1b]0;" not in shown
    assert rb"\x1b]0;owned\x07" in shown


def spreadsheet_text(cell):
    """What a program makes of a cell: the rule of ``for_spreadsheet``, the other way round."""
    return cell[1:] if re.match(r"'+[=+\-@\t\r＝＋－＠]", cell) and not re.fullmatch(r"[+-]?\d+", cell) else cell


CELLS = ("=1+1", "+a", "-a", "@SUM(1)", "\t=1", "\r=1", "'=1", "''=1", "＝1", "-1", "+1.5e3", "good", "", "'", "'a", "a=b", "-", "a\rb\n")


@pytest.mark.parametrize("text", CELLS)
def test_no_cell_is_a_formula_and_nothing_is_lost(text):
    lines = list(csv_lines([Prediction(2, text, text, 0.75, (0.25, 0.75), cut=False)], ["a", text]))
    _, row = csv.reader(io.StringIO("".join(lines), newline=""))
    for cell in row[1:3]:
        assert cell == for_spreadsheet(text)
        assert spreadsheet_text(cell) == text
        number = re.fullmatch(r"[+-]?\d+(\.\d+)?(e\d+)?", cell)
        assert number or not cell.startswith(("=", "+", "-", "@", "\t", "\r", "＝"))


def test_markdown_is_text():
    for text in ("`a`", "a|b", "<b>", "[a](http://b)", "**a**", "$x$", "# a", "~~a~~", "![a](b)", "a\\b", "&lt;"):
        shown = for_markdown(text)
        assert not re.search(r"(?<!\\)[`|*\[\]$#~!]|<|>|&(?!lt;|gt;|amp;)", shown)
