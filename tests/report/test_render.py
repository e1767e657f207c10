"""HTML, Markdown, LaTeX, CSV and the terminal: complete, and untrusted text is escaped."""

import csv
import io
import json
import re
from html.parser import HTMLParser

import pytest
from markupsafe import escape
from report.sample import SCRIPT, run_folder
from rich.console import Console

from permuteformer.formatting import escape_markdown
from permuteformer.report.content import build_report
from permuteformer.report.render import csv_table, escape_latex, html_page, latex_tables, markdown_page
from permuteformer.report.terminal import print_tables

VOID = {"meta", "br", "path", "use", "image", "rect"}


class Reader(HTMLParser):
    """Elements with their attributes, links, ids and texts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.ids, self.links, self.texts, self.open = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, attributes))
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes["href"]] if "href" in attributes else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def text(report, folder):
    return (folder / "index.html").read_text()


@pytest.fixture(scope="module")
def read(text):
    return Reader(text)


def test_the_page_is_well_formed_and_its_links_lead_somewhere(read, folder):
    assert read.open == []
    assert len(read.ids) == len(set(read.ids))
    for link in read.links:
        if link.startswith("#"):
            assert link[1:] in read.ids
        elif link.startswith("figures/"):
            assert (folder / link).is_file()
        else:
            assert (folder / link).exists(), link  # a run, seen from the report


def test_the_page_loads_nothing(text, read):
    for tag, attributes in read.elements:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base", "form")
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert tag != "image" or attributes["xlink:href"].startswith("data:image/png")
    assert not re.search(r"@import|url\((?!#)", text)
    assert [tag for tag, _ in read.elements].count("script") == 1
    policy = next(attributes["content"] for tag, attributes in read.elements if attributes.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy


def test_a_label_that_is_a_script_stays_text(text, read, report, folder):
    assert SCRIPT in read.texts  # as a text, not as an element
    assert SCRIPT not in text
    assert SCRIPT not in re.sub(r"`[^`]*`", "", (folder / "report.md").read_text())  # commands are code
    for file in (folder / "figures").glob("*.svg"):
        assert "<script" not in file.read_text()


def test_numbers_lead_to_their_runs(read, report):
    table = report.tables[0]
    for row in table.rows:
        for column in table.columns:
            cell = table.cell(row, column)
            if cell.text:
                assert f"#{cell.anchor}" in read.links
    for run in report.runs:
        assert any(run.name in words for words in read.texts)


def test_the_page_has_everything_of_a_run(text):
    for words in (
        "permuteformer train lra-text --model performer",
        "learning_rate: 0.001",
        "hidden_size: 64",
        "Some CPU @ 2.0 GHz",
        "2.13.0",
    ):
        assert words in text
    assert "test at 4,096" in text
    assert "it asked for more than there is" in text


def test_cells_show_the_papers_number_the_best_and_failures(text, report):
    assert "paper 65.95 ± 0.26" in text
    best = report.tables[0].cells["permuteformer", "text"]
    assert best.best
    assert f'<td class="value best" data-value="{best.mean!r}"><a href="#{best.anchor}">{best.text}</a> <small>(2)</small>' in text
    assert '<td class="value failed" data-value=""><a href="#runs-1-small-transformer-text">out of memory</a>' in text
    assert str(escape(report.tables[0].agreement.sentence)) in text


def test_markdown_has_tables_links_and_figures(report, folder):
    text = (folder / "report.md").read_text()
    for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (folder / link).is_file()
    assert text.count("![") == len(report.figures)
    anchors = re.findall(r'<a id="([^"]+)">', text)
    for target in re.findall(r"\]\(#([^)]+)\)", text):
        assert target in anchors
    best = report.tables[0].cells["permuteformer", "text"]
    assert f"[**{best.text}**](#{best.anchor}) (2)<br>paper 65.95 ± 0.26" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    assert escape_markdown("a|b\\*[c](d) `e` <f> $g$") == r"a\|b\\\*\[c\](d) \`e\` &lt;f&gt; \$g\$"


def test_latex_is_escaped_and_balanced(report, folder):
    text = (folder / "tables.tex").read_text()
    assert text == latex_tables(report.tables)
    assert escape_latex("50% & a_b #1 {x} \\y ~^ <z> $ ± ö") == (
        r"50\% \& a\_b \#1 \{x\} \textbackslash{}y \textasciitilde{}\textasciicircum{} \textless{}z\textgreater{} \$ $\pm$ ö"
    )
    assert escape_latex("\u65e5") == r"\texttt{U+65E5}"
    for block in re.findall(r"\\begin\{tabular\}\{(\w+)\}\n(.*?)\\end\{tabular\}", text, re.DOTALL):
        columns, body = len(block[0]), block[1]
        assert body.startswith("\\toprule\n")
        for line in (line for line in body.splitlines() if line.endswith(r"\\")):
            cells = re.split(r"(?<!\\)&", line)
            assert len(cells) + sum("multicolumn{2}" in cell for cell in cells) == columns
    stripped = re.sub(r"\\[\\{}$%&#_]", "", text)
    assert stripped.count("{") == stripped.count("}")
    assert stripped.count("$") % 2 == 0
    assert r"\textbf{" in text
    assert "<script" not in text


def test_csv_has_whole_numbers_and_no_formulas(report, folder):
    table = report.tables[0]
    rows = list(csv.DictReader(io.StringIO(csv_table(table))))
    row = next(row for row in rows if (row["row"], row["column"]) == ("permuteformer", "text"))
    cell = table.cells["permuteformer", "text"]
    assert (float(row["mean"]), float(row["deviation"]), int(row["seeds"])) == (cell.mean, cell.deviation, 2)
    assert (row["paper_mean"], row["paper_deviation"], row["unit"]) == ("65.95", "0.26", "%")
    assert row["runs"] == "table1/text/permuteformer-seed0; table1/text/permuteformer-seed1"
    failed = next(row for row in rows if row["row"] == "transformer")
    assert (failed["mean"], failed["seeds"], failed["shown"]) == ("", "0", "out of memory")
    assert {file.stem for file in (folder / "tables").iterdir()} == {table.name for table in report.tables}


def test_the_terminal_shows_the_tables(report):
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    print_tables(report.tables, console)
    shown = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())
    for words in ("Table 1: accuracy on Long-Range Arena", "paper 65.95 ± 0.26", "out of memory", "Own runs", SCRIPT):
        assert words in shown
    assert report.tables[0].agreement.details in re.sub(r"\s*\n\s*", " ", shown)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_tables_fit_in_the_terminal(report, width):
    console = Console(file=io.StringIO(), width=width)
    print_tables(report.tables[:1], console)
    shown = console.file.getvalue()
    assert all(len(line) <= width for line in shown.splitlines())
    for column in report.tables[0].columns:
        assert column.title in shown


def test_bad_labels_and_values_come_through_every_writer(tmp_path):
    names = [
        "x" * 5000,
        "\ud800\u202e",
        "a|b",
        '"><img src=x onerror=alert(1)>',
        "}\\end{table}",
        "日本語",
        "%s{}{0}",
        "=cmd()",
        "[b]\x1b[2J\x07",
    ]
    for i, name in enumerate(names):
        run = run_folder(tmp_path / f"run{i}", row=name, epochs=2, task={"title": name, "notes": [name], "baselines": {name: float("inf")}})
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps({**result, "value": float("nan"), "seconds": float("inf")}))
    report = build_report([tmp_path])
    for text in (html_page(report, tmp_path), markdown_page(report, tmp_path), latex_tables(report.tables), *map(csv_table, report.tables)):
        text.encode("utf-8")
        assert not set(text) & {"\u202e", "\x1b", "\x07"}
    assert any("\n'=cmd()," in csv_table(table) for table in report.tables)  # a text for a spreadsheet
    console = Console(file=io.StringIO(), width=200)
    print_tables(report.tables, console)
    assert r"[b]\x1b[2J\x07" in console.file.getvalue()  # neither markup nor control codes
    assert "\x1b" not in console.file.getvalue()
    read = Reader(html_page(report, tmp_path))
    assert read.open == []
    assert not any(tag == "img" for tag, _ in read.elements)
    assert len(read.ids) == len(set(read.ids))
    assert all(cell.text == "not finite" for cell in report.tables[0].cells.values())


def test_the_page_is_the_same_every_time(report, folder):
    assert html_page(report, folder) == (folder / "index.html").read_text()
