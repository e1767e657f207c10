"""What an answer came from, as a picture and as a page that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from permuteformer.report.explained import Explained, largest, level, number, place, shown, strongest, top_spans
from permuteformer.report.figure import BLUE, ORANGE, Figure, draw
from permuteformer.report.groups import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

BARS = 14
"""Spans of the picture of a text."""

CLASSES = {2: "for2", 1: "for1", 0: "", -1: "against1", -2: "against2"}


def explained_page(explained: Explained, title: str, told: str) -> str:
    """The page: what was found in words, the texts with their marks or the picture, and the spans that counted most."""
    style = files("permuteformer.report").joinpath("explained.css").read_text(encoding="utf-8")
    figure = explained_figure(explained, title)
    parts = [] if explained["grid"] else [_text(explained, part) for part in explained["parts"]]
    answers = "; ".join(f"{shown(answer)} {100 * share:.1f} %" for answer, share in explained["answers"].items())
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(shown(title))}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>",
            f"<h1>{escape(shown(title))}</h1>\n<p>{escape(told)}</p>\n<p class='muted'>Answers: {escape(answers)}.</p>",
            *parts,
            f"<figure>{figure.svg}<figcaption class='muted'>{escape(figure.caption)}</figcaption></figure>",
            _table(explained),
            "</main>\n</body>\n</html>\n",
        ]
    )


def explained_figure(explained: Explained, title: str) -> Figure:
    """The heat of an image beside and over it; of a text, the words that counted most."""
    return _image_figure(explained, title) if explained["grid"] else _text_figure(explained, title)


def _text(explained: Explained, part: Mapping[str, Any]) -> str:
    most, between = largest(explained), "" if explained["unit"] == "bytes" else " "
    pieces = []
    for span in part["spans"]:
        text = between.join(part["tokens"][n] for n in span["places"]) + between
        visible = escape("".join(c if c in "\n\t" else shown(c) for c in text))
        word = visible.rstrip() or visible
        kind = CLASSES[level(span["value"], most)]
        pieces.append(f'<mark class="{kind}" title="{span["value"]:+.4f}">{word}</mark>{visible[len(word) :]}' if kind else visible)
    name = f"<h2>{escape(part['name'])}</h2>" if len(explained["parts"]) > 1 else ""
    legend = "Orange spoke for the answer, blue (underlined with dots or waves) against it; the strongest are darkest."
    return f'{name}<p class="muted">{legend}</p>\n<p class="text">{"".join(pieces)}</p>'


def _table(explained: Explained) -> str:
    most, rows = largest(explained), []
    for part, span in top_spans(explained, BARS):
        name, place_of = strongest(part, span)
        word = "" if explained["grid"] else f"<td>{escape(shown(span['text']))}</td>"
        byte = "" if explained["grid"] else f"<td>{escape(name)} ({number(part['values'][place_of], most)})</td>"
        taken = "" if span["measured"] is None else number(span["measured"], most)
        cells = f'<td class="number">{number(span["value"], most)}</td><td class="number">{taken}</td>'
        rows.append(f"<tr>{word}<td>{escape(place(explained, part, span))}</td>{cells}{byte}</tr>")
    leads = ["where", "value", "blanked out"] if explained["grid"] else ["word", "where", "value", "blanked out", "most of it"]
    head = "".join(f'<th scope="col">{lead}</th>' for lead in leads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _text_figure(explained: Explained, title: str) -> Figure:
    top = top_spans(explained, BARS)[::-1]
    names = [shorten(shown(span["text"]).strip() or shown(span["text"]), 18) for _, span in top]

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        values = [span["value"] for _, span in top]
        axes.barh(range(len(top)), values, color=[ORANGE if value > 0 else BLUE for value in values], height=0.7)
        measured = [(n, span["measured"]) for n, (_, span) in enumerate(top) if span["measured"] is not None]
        axes.plot([value for _, value in measured], [n for n, _ in measured], "k|", markersize=11, markeredgewidth=2)
        axes.set_yticks(range(len(top)), names)
        axes.set_xlabel(f"for or against {shorten(shown(explained['answer']), 20)} (log-odds)")

    caption = f"The {len(top)} spans that counted most: bars are their values, strokes what was measured by blanking them out."
    return draw("explained", title, caption, paint, 1.0 + 0.24 * len(top))


def _image_figure(explained: Explained, title: str) -> Figure:
    import numpy as np

    (part,) = explained["parts"]
    pixels = np.array([int(shade) for shade in part["tokens"]], dtype=np.float64).reshape(explained["grid"])
    heat = np.array(part["values"], dtype=np.float64).reshape(explained["grid"])
    most = float(np.abs(heat).max()) or 1.0

    def paint(canvas: Canvas) -> None:
        left, right = canvas.subplots(1, 2)
        left.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        left.set_title("image")
        right.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        strength = (np.abs(heat) / most) ** 0.5
        drawn = right.imshow(heat, cmap="PuOr_r", vmin=-most, vmax=most, alpha=0.25 + 0.7 * strength, interpolation="nearest")
        right.set_title(f"for or against {shorten(shown(explained['answer']), 20)}")
        for axes in (left, right):
            axes.grid(visible=False)
            axes.set_xticks([])
            axes.set_yticks([])
        canvas.colorbar(drawn, ax=[left, right], shrink=0.8).set_label("log-odds a pixel")

    caption = "Orange pixels spoke for the answer, purple ones against it; all of them add up to the difference that is told above."
    return draw("explained", title, caption, paint, 2.6)
