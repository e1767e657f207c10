"""The tables as LaTeX, to be put into a paper with ``\\input``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from permuteformer.report.table import Cell, Column, Row, Table

_CHARACTERS = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "µ": r"$\mu$",
    "−": "$-$",
    "–": "--",
    "·": r"$\cdot$",
    "…": r"\ldots{}",
}


def latex(tables: Sequence[Table]) -> str:
    """All tables; booktabs is needed."""
    head = "% Tables by permuteformer report. In the preamble: \\usepackage[T1]{fontenc} and \\usepackage{booktabs}\n"
    return head + "".join("\n" + "\n".join(_table(table)) + "\n" for table in tables)


def escaped(text: str) -> str:
    """A text that LaTeX sets as it is; characters that its fonts lack are told by their number.

    >>> escaped("100% of a_b ± 2")
    '100\\\\% of a\\\\_b $\\\\pm$ 2'
    """
    return "".join(_CHARACTERS.get(c) or (c if ord(c) < 0x180 else rf"\texttt{{U+{ord(c):04X}}}") for c in text)


def _table(table: Table) -> Iterator[str]:
    columns = [(column, table.has_paper(column)) for column in table.columns]
    form = "l" * len(table.leads) + "".join("rr" if paper else "r" for _, paper in columns)
    yield from (r"\begin{table*}", r"\centering\small\setlength{\tabcolsep}{4pt}", rf"\begin{{tabular}}{{{form}}}", r"\toprule")
    yield from _head(table, columns)
    yield r"\midrule"
    for row in table.rows:
        yield " & ".join([*map(escaped, row.leads), *_cells(table, row, columns)]) + r" \\"
    yield from (r"\bottomrule", r"\end{tabular}")
    told = [table.agreement.sentence] if table.agreement is not None else []
    told += [note if note.endswith(".") else f"{note}." for note in table.notes]
    if told:
        yield rf"\par\smallskip\parbox{{0.95\linewidth}}{{\footnotesize {escaped(' '.join(told))}}}"
    caption = f"{table.title}. {table.caption}".replace("are below ours", "are beside ours")
    yield from (rf"\caption{{{escaped(caption)}}}", rf"\label{{tab:{table.name}}}", r"\end{table*}")


def _head(table: Table, columns: Sequence[tuple[Column, bool]]) -> Iterator[str]:
    first = [rf"\multicolumn{{2}}{{c}}{{{escaped(column.title)}}}" if paper else escaped(column.title) for column, paper in columns]
    yield " & ".join([*map(escaped, table.leads), *first]) + r" \\"
    if any(paper for _, paper in columns):
        rules, place = [], len(table.leads) + 1
        for _, paper in columns:
            if paper:
                rules.append(rf"\cmidrule(lr){{{place}-{place + 1}}}")
            place += 2 if paper else 1
        yield "".join(rules)
        yield " & ".join([""] * len(table.leads) + ["ours & paper" if paper else "ours" for _, paper in columns]) + r" \\"


def _cells(table: Table, row: Row, columns: Sequence[tuple[Column, bool]]) -> Iterator[str]:
    for column, paper in columns:
        cell = table.cell(row, column)
        yield _ours(cell)
        if paper:
            yield escaped(cell.paper_shown)


def _ours(cell: Cell) -> str:
    shown = escaped(cell.text)
    shown = rf"\textbf{{{shown}}}" if cell.best else rf"\emph{{{shown}}}" if shown and cell.mean is None else shown
    return " ".join(part for part in (shown, escaped(cell.detail), escaped(f"[{cell.remark}]") if cell.remark else "") if part)
