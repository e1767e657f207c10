"""Explanations of a model's answer as a figure, and as a page that needs no other file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from permuteformer.report.cells import shorten
from permuteformer.report.explain import Explanation, format_value, largest_spans, largest_value, place, strength, visible
from permuteformer.report.figure import BLUE, ORANGE, Figure, draw
from permuteformer.report.render import environment

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

MAX_SPANS = 14
CLASSES = {2: "for2", 1: "for1", 0: "", -1: "against1", -2: "against2"}


def explanation_page(explanation: Explanation, title: str, message: str) -> str:
    """Return the page: the message, the texts with marks or the image, and the spans with the largest values."""
    largest, is_image = largest_value(explanation), bool(explanation["grid"])
    rows = []
    for part, span in largest_spans(explanation, MAX_SPANS):
        measured = "" if span["measured"] is None else format_value(span["measured"], largest)
        text = [] if is_image else [visible(span["text"])]
        rows.append([*text, place(explanation, part, span), format_value(span["value"], largest), measured])
    template = environment(autoescape=True).get_template("explain.html.j2")
    return template.render(
        title=visible(title),
        message=message,
        answers="; ".join(f"{visible(answer)} {100 * share:.1f} %" for answer, share in explanation["answers"].items()),
        parts=[] if is_image else [(part["name"], list(_pieces(explanation, part))) for part in explanation["parts"]],
        figure=explanation_figure(explanation, title),
        headers=[*([] if is_image else ["text"]), "where", "value", "if blanked"],
        rows=rows,
    )


def explanation_figure(explanation: Explanation, title: str) -> Figure:
    """Draw the values of an image's pixels over the image; of a text, the spans with the largest values."""
    return _image_figure(explanation, title) if explanation["grid"] else _text_figure(explanation, title)


def _pieces(explanation: Explanation, part: Mapping[str, Any]) -> list[tuple[str, str, float, str]]:
    """Return the spans of a text: CSS class, text, value, and the white space after it."""
    largest, separator = largest_value(explanation), "" if explanation["unit"] == "bytes" else " "
    pieces = []
    for span in part["spans"]:
        text = separator.join(part["tokens"][n] for n in span["places"]) + separator
        text = "".join(c if c in "\n\t" else visible(c) for c in text)
        word = text.rstrip() or text
        pieces.append((CLASSES[strength(span["value"], largest)], word, span["value"], text[len(word) :]))
    return pieces


def _text_figure(explanation: Explanation, title: str) -> Figure:
    spans = [span for _, span in largest_spans(explanation, MAX_SPANS)][::-1]
    names = [shorten(visible(span["text"]).strip() or visible(span["text"]), 18) for span in spans]

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        axes.barh(range(len(spans)), [s["value"] for s in spans], color=[ORANGE if s["value"] > 0 else BLUE for s in spans], height=0.7)
        for n, span in enumerate(spans):
            if span["measured"] is not None:
                axes.plot([span["measured"]], [n], "k|", markersize=11, markeredgewidth=2)
        axes.set_yticks(range(len(spans)), names)
        axes.set_xlabel(f"for or against {shorten(visible(explanation['answer']), 20)} (log-odds)")

    caption = f"The {len(spans)} spans with the largest values. Strokes are the change if a span is blanked."
    return draw("explained", title, caption, paint, 1.0 + 0.24 * len(spans))


def _image_figure(explanation: Explanation, title: str) -> Figure:
    import numpy as np

    (part,) = explanation["parts"]
    pixels = np.array([int(shade) for shade in part["tokens"]], dtype=np.float64).reshape(explanation["grid"])
    values = np.array(part["values"], dtype=np.float64).reshape(explanation["grid"])
    largest = float(np.abs(values).max()) or 1.0

    def paint(canvas: Canvas) -> None:
        left, right = canvas.subplots(1, 2)
        for axes in (left, right):
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axes.grid(visible=False)
            axes.set_xticks([])
            axes.set_yticks([])
        opacity = 0.25 + 0.7 * (np.abs(values) / largest) ** 0.5
        overlay = right.imshow(values, cmap="PuOr_r", vmin=-largest, vmax=largest, alpha=opacity, interpolation="nearest")
        left.set_title("image")
        right.set_title(f"for or against {shorten(visible(explanation['answer']), 20)}")
        canvas.colorbar(overlay, ax=[left, right], shrink=0.8).set_label("log-odds per pixel")

    caption = "Orange pixels are for the answer, purple ones against it. Their values add up to the difference given above."
    return draw("explained", title, caption, paint, 2.6)
