"""Figures: complete, in the colours of the page, with units, and reproducible."""

import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from PIL import Image
from report.sample import TASKS, attention_maps, run_folder

from permuteformer.experiments.published import TABLES
from permuteformer.report.cells import group_runs
from permuteformer.report.curves import length_figures, lines_of, training_figures
from permuteformer.report.figure import INK, draw, style
from permuteformer.report.maps import map_figures
from permuteformer.report.runs import load_runs, read_run
from permuteformer.report.tables import build_tables

SVG = "{http://www.w3.org/2000/svg}"


def texts(figure):
    """All texts of a figure."""
    return [text.text for text in ElementTree.fromstring(figure.svg).iter(f"{SVG}text")]


def named(report, name):
    return next(figure for figure in report.figures if figure.name == name)


def test_everything_is_drawn(report):
    kinds = {figure.name.removeprefix("table-1-small-").removeprefix("table-4-small-") for figure in report.figures}
    assert {"text-bars", "text-by-epoch", "text-loss", "image-bars", "lm-by-epoch", "lm-by-time", "lm-loss", "lm-paper"} <= kinds
    assert {"length-4-small-lm-figure", "speed-time-per-token-training-small-figure", "speed-peak-memory-training-small-figure"} <= kinds
    assert {"maps-4-small-lm-kernels", "maps-4-small-lm-permuteformer-lm-kernel", "maps-4-small-lm-permuteformer-lm-attention"} <= kinds
    assert {"maps-1-small-image-permuteformer-grid", "own-runs-digits-by-epoch"} <= kinds
    assert len(kinds) == len(report.figures)


def test_every_axis_has_its_unit(report):
    for name, labels in {
        "table-1-small-text-by-epoch": {"epoch", "validation accuracy (%)"},
        "table-1-small-text-bars": {"test accuracy (%)"},
        "table-1-small-text-loss": {"step (updates)", "training loss (nats)"},
        "table-4-small-lm-loss": {"training loss (nats per token)"},
        "table-4-small-lm-by-time": {"training time (minutes)", "validation perplexity"},
        "length-4-small-lm-figure": {"length (tokens)", "test perplexity"},
        "speed-time-per-token-training-small-figure": {"length (tokens)", "time per token (µs)"},
        "speed-peak-memory-training-small-figure": {"peak memory (MB)"},
        "maps-4-small-lm-kernels": {"distance i − j (tokens)", "average attention weight"},
        "maps-1-small-image-permuteformer-grid": {"column of i − column of j (pixels)", "row of i − row of j (pixels)", "attention weight"},
    }.items():
        assert labels <= set(texts(named(report, name))), name


def test_figures_are_pictures_that_follow_the_colour_of_the_page(report):
    for figure in report.figures:
        assert INK not in figure.svg
        assert "currentColor" in figure.svg
        assert "#000000" not in figure.svg
        assert INK in figure.svg_file
        assert re.match(r"<svg [^>]*viewBox", figure.svg)
        assert " width=" not in figure.svg[: figure.svg.index(">")]
        assert ElementTree.fromstring(figure.svg_file.encode()).tag == f"{SVG}svg"
        image = Image.open(io.BytesIO(figure.png)).convert("RGB")
        assert image.width >= 700
        assert image.getpixel((0, 0)) == (255, 255, 255)
        assert len(image.getcolors(image.width * image.height)) > 10


def test_ids_of_figures_are_unique(report):
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


def test_seeds_and_failures_are_shown(report):
    assert "bands" in named(report, "table-1-small-text-by-epoch").caption
    assert "bands" not in named(report, "table-4-small-lm-by-epoch").caption
    assert "out of memory" in texts(named(report, "table-1-small-text-bars"))
    assert "Transformer at 16,384: out of memory" in named(report, "speed-time-per-token-training-small-figure").caption


def test_lines_are_means_over_seeds(tmp_path):
    for seed in range(2):
        run_folder(tmp_path / str(seed), seed=seed)
    (group,) = group_runs(load_runs([tmp_path]).runs)
    (line,) = lines_of([group], lambda run: [(e["step"], e["epoch"], 100 * e["metrics"]["accuracy"]) for e in run.evaluations[:-1]])
    scores = [100 * run.evaluations[4]["metrics"]["accuracy"] for run in group.runs]
    assert line.x[4] == 5
    assert line.y[4] == pytest.approx(sum(scores) / 2)
    assert (line.low[4], line.high[4]) == pytest.approx((min(scores), max(scores)))


def test_the_same_runs_give_the_same_figures(tmp_path):
    run_folder(tmp_path / "a", maps=True)
    run_folder(tmp_path / "b", row="performer")
    groups = group_runs(load_runs([tmp_path]).runs)
    (table,) = build_tables(groups)
    for make in (lambda: training_figures(table), lambda: map_figures(groups, [])):
        assert make() == make()


def test_labels_are_not_formulas_and_may_have_any_characters():
    def paint(canvas):
        axes = canvas.subplots()
        axes.plot([1, 2], [1, 2], label="$\\frac{1}{")
        axes.set_xlabel("日本語 <b>&amp;</b> $x$")

    figure = draw("name", "a <b> & c", "", paint)
    assert "日本語 <b>&amp;</b> $x$" in texts(figure)
    assert "<b>" not in figure.svg


def test_figures_without_points_are_not_made(tmp_path):
    run = run_folder(tmp_path / "run", epochs=1)
    (run / "metrics.jsonl").write_text("")
    (table,) = build_tables(group_runs(load_runs([run]).runs))
    assert training_figures(table) == []
    assert length_figures(table) == []


def test_values_that_are_not_finite_do_not_stop_the_drawing(tmp_path):
    run = run_folder(tmp_path / "run")
    bad = '{"event": "evaluation", "step": 5, "epoch": 0.05, "metrics": {"accuracy": NaN}}\n'
    bad += '{"event": "evaluation", "step": 6, "epoch": Infinity, "metrics": {"accuracy": 0.5}}\n{"event": "evaluation", "metrics": 3}\n'
    (run / "metrics.jsonl").write_text(bad + (run / "metrics.jsonl").read_text())
    (table,) = build_tables(group_runs(load_runs([run]).runs))
    assert [figure.name.rpartition("-")[2] for figure in training_figures(table)] == ["epoch", "loss"]


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": {"distances": [0, 1], "layers": [[[0.5]]]}},
        {"kernel": {"distances": [0, 1], "layers": [0.5]}},
        {"kernel": {"distances": [0, 1]}},
        {"kernel": [3]},
        {"maps": {"layers": [[1, 2], [3]], "tokens": []}},
        {"maps": {"layers": [["a"]], "tokens": []}},
        {"reason": "not linear", "kernel": None, "kernel_2d": None, "maps": None},
    ],
)
def test_maps_of_another_shape_are_skipped_with_a_message(tmp_path, change):
    record = read_run(run_folder(tmp_path / "run"))
    skipped = []
    map_figures(group_runs([replace(record, maps={**attention_maps(TASKS["text"], "performer"), **change})]), skipped)
    (message,) = skipped
    assert "table1/text/permuteformer-seed0" in message
    assert change.get("reason", "") in message


def test_negative_and_empty_weights_can_be_drawn(tmp_path):
    record = read_run(run_folder(tmp_path / "run"))
    for value in (-0.5, 0.0, float("nan")):
        seen = attention_maps(TASKS["digits"], "performer", layers=1, heads=1, length=3)
        seen["maps"]["layers"] = [[[value] * 3] * 3]
        seen["kernel"] = {"distances": [-1, 0, 1], "normalised": False, "layers": [[[value] * 3]]}
        figures = map_figures(group_runs([replace(record, maps=seen)]), [])
        assert len(figures) == 3
        assert "do not add up to 1" in figures[0].caption
