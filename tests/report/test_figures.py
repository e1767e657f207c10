"""Figures: all that can be drawn is drawn, in colours that follow the page, with units, and the same every time."""

import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from PIL import Image
from report.sample import TASKS, look, run_folder

from permuteformer.experiments.published import TABLES
from permuteformer.report.figure import INK, draw, style
from permuteformer.report.groups import group
from permuteformer.report.load import load, read_run
from permuteformer.report.pictures import figures_of_looks
from permuteformer.report.plots import figures_by_length, figures_of_runs
from permuteformer.report.tables import build_tables

SVG = "{http://www.w3.org/2000/svg}"


def words(figure):
    """All texts of a figure."""
    return [text.text for text in ElementTree.fromstring(figure.svg).iter(f"{SVG}text")]


def named(report, name):
    return next(figure for figure in report.figures if figure.name == name)


def test_everything_is_drawn(report):
    kinds = {figure.name.removeprefix("table-1-small-").removeprefix("table-4-small-") for figure in report.figures}
    assert {"text-bars", "text-by-epoch", "text-loss", "image-bars", "lm-by-epoch", "lm-by-time", "lm-loss", "lm-paper"} <= kinds
    assert {"length-4-small-lm-figure", "speed-time-a-token-training-small-figure", "speed-peak-memory-training-small-figure"} <= kinds
    assert {"look-4-small-lm-kernels", "look-4-small-lm-permuteformer-lm-kernel", "look-4-small-lm-permuteformer-lm-attention"} <= kinds
    assert {"look-1-small-image-permuteformer-grid", "own-runs-digits-by-epoch"} <= kinds
    assert len(kinds) == len(report.figures)


def test_every_axis_has_its_unit(report):
    for name, labels in {
        "table-1-small-text-by-epoch": {"epoch", "validation accuracy (%)"},
        "table-1-small-text-bars": {"test accuracy (%)"},
        "table-1-small-text-loss": {"step (updates)", "training loss (nats)"},
        "table-4-small-lm-loss": {"training loss (nats a token)"},
        "table-4-small-lm-by-time": {"training time (minutes)", "validation perplexity"},
        "length-4-small-lm-figure": {"length (tokens)", "test perplexity"},
        "speed-time-a-token-training-small-figure": {"length (tokens)", "time a token (µs)"},
        "speed-peak-memory-training-small-figure": {"peak memory (MB)"},
        "look-4-small-lm-kernels": {"distance i − j (tokens)", "average attention weight"},
        "look-1-small-image-permuteformer-grid": {"column of i − column of j (pixels)", "row of i − row of j (pixels)", "attention weight"},
    }.items():
        assert labels <= set(words(named(report, name))), name


def test_figures_follow_the_colour_of_the_page(report):
    for figure in report.figures:
        assert INK not in figure.svg
        assert "currentColor" in figure.svg
        assert "#000000" not in figure.svg
        assert INK in figure.svg_file
        assert re.match(r"<svg [^>]*viewBox", figure.svg)
        assert " width=" not in figure.svg[: figure.svg.index(">")]


def test_figures_are_pictures(report):
    for figure in report.figures:
        image = Image.open(io.BytesIO(figure.png)).convert("RGB")
        assert image.width >= 700
        assert image.getpixel((0, 0)) == (255, 255, 255)
        assert len(image.getcolors(image.width * image.height)) > 10
        assert ElementTree.fromstring(figure.svg_file.encode()).tag == f"{SVG}svg"


def test_ids_of_figures_do_not_meet(report):
    ids = [name for figure in report.figures for name in re.findall(r'\bid="([^"]+)"', figure.svg)]
    assert len(ids) == len(set(ids))
    for figure in report.figures:
        for target in re.findall(r'(?:href="|url\()#([^")]+)', figure.svg):
            assert target in ids


def test_rows_differ_by_colour_dashes_and_marker():
    for table in TABLES.values():
        assert len({style(row, 0) for row in table}) == len(table)
        assert len({style(row, 0).marker for row in table}) == len(table)
        assert len({(style(row, 0).color, style(row, 0).dashes) for row in table}) == len(table)
    others = [style(f"other {i}", i) for i in range(12)]
    assert len({(one.color, one.dashes) for one in others}) == 12


def test_a_band_shows_seeds_and_none_is_drawn_for_one(report):
    assert "bands go from the lowest to the highest" in named(report, "table-1-small-text-by-epoch").caption
    assert "bands" not in named(report, "table-4-small-lm-by-epoch").caption


def test_what_failed_is_in_the_picture(report):
    assert "out of memory" in words(named(report, "table-1-small-text-bars"))
    assert "Transformer at 16,384: out of memory" in named(report, "speed-time-a-token-training-small-figure").caption


def test_lines_are_means_over_seeds(tmp_path):
    from permuteformer.report.plots import _evaluated, _lines

    for seed in range(2):
        run_folder(tmp_path / str(seed), seed=seed)
    (of_it,) = group(load([tmp_path]).records)
    (line,) = _lines([of_it], lambda record: _evaluated(record, "epoch"))
    scores = [100 * record.evaluations[4]["metrics"]["accuracy"] for record in of_it.records]
    assert line.x[4] == 5
    assert line.y[4] == pytest.approx(sum(scores) / 2)
    assert (line.low[4], line.high[4]) == pytest.approx((min(scores), max(scores)))


def test_the_same_runs_give_the_same_figures(tmp_path):
    run_folder(tmp_path / "a", looks=True)
    run_folder(tmp_path / "b", row="performer")
    groups = group(load([tmp_path]).records)
    (table,) = build_tables(groups)
    for make in (lambda: figures_of_runs(table), lambda: figures_of_looks(groups, [])):
        assert make() == make()


def test_labels_are_no_formulas_and_may_have_any_letters():
    def paint(canvas):
        axes = canvas.subplots()
        axes.plot([1, 2], [1, 2], label="$\\frac{1}{")
        axes.set_xlabel("日本語 <b>&amp;</b> $x$")

    figure = draw("name", "a <b> & c", "", paint)
    assert "日本語 <b>&amp;</b> $x$" in words(figure)
    assert "<b>" not in figure.svg


def test_figures_without_points_are_not_made(tmp_path):
    run = run_folder(tmp_path / "run", epochs=1)
    (run / "metrics.jsonl").write_text("")
    (table,) = build_tables(group(load([run]).records))
    assert figures_of_runs(table) == []
    assert figures_by_length(table) == []


def test_values_that_are_not_finite_do_not_stop_the_drawing(tmp_path):
    run = run_folder(tmp_path / "run")
    bad = '{"event": "evaluation", "step": 5, "epoch": 0.05, "metrics": {"accuracy": NaN}}\n'
    bad += '{"event": "evaluation", "step": 6, "epoch": Infinity, "metrics": {"accuracy": 0.5}}\n{"event": "evaluation", "metrics": 3}\n'
    (run / "metrics.jsonl").write_text(bad + (run / "metrics.jsonl").read_text())
    (table,) = build_tables(group(load([run]).records))
    assert [figure.name.rpartition("-")[2] for figure in figures_of_runs(table)] == ["epoch", "loss"]


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": {"distances": [0, 1], "layers": [[[0.5]]]}},
        {"kernel": {"distances": [0, 1], "layers": [0.5]}},
        {"kernel": {"distances": [0, 1]}},
        {"kernel": [3]},
        {"maps": {"layers": [[1, 2], [3]], "tokens": []}},
        {"maps": {"layers": [["a"]], "tokens": []}},
    ],
)
def test_a_look_of_another_shape_is_left_out_and_told(tmp_path, change):
    record = read_run(run_folder(tmp_path / "run"))
    left_out = []
    figures_of_looks(group([replace(record, looks={**look(TASKS["text"], "performer"), **change})]), left_out)
    assert len(left_out) == 1
    assert left_out[0].startswith("left out: the look into table1/text/permuteformer-seed0")


def test_a_look_without_weights_says_why(tmp_path):
    record = read_run(run_folder(tmp_path / "run"))
    empty = {"format": 1, "reason": "not linear", "kernel": None, "kernel_2d": None, "maps": None}
    left_out = []
    assert figures_of_looks(group([replace(record, looks=empty)]), left_out) == []
    assert "which has no weights (not linear)" in left_out[0]


def test_negative_and_empty_weights_can_be_drawn(tmp_path):
    record = read_run(run_folder(tmp_path / "run"))
    for value in (-0.5, 0.0, float("nan")):
        seen = look(TASKS["digits"], "performer", layers=1, heads=1, length=3)
        seen["maps"]["layers"] = [[[value] * 3] * 3]
        seen["kernel"] = {"distances": [-1, 0, 1], "normalised": False, "layers": [[[value] * 3]]}
        figures = figures_of_looks(group([replace(record, looks=seen)]), [])
        assert len(figures) == 3
        assert "do not add up to 1" in figures[0].caption
