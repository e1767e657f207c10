"""The plans: the paper's appendix is in them, names lead to work, and every model exists."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from permuteformer.experiments import PLANS, Experiment, Measurement, published, small, tuning
from permuteformer.experiments.own import defaults

RESULTS = Path(__file__).parents[2] / "results" / "experiments"
APPENDIX = {
    "text": (16, 10, 1e-5, 4000),
    "retrieval": (32, 10, 2e-4, 1000),
    "image": (256, 50, 1e-2, 200),
    "pathfinder": (256, 80, 5e-4, 4000),
}


def test_the_papers_appendix():
    cells = PLANS["paper"].cells(["1"], ["permuteformer"], seeds=1)
    found = {c.column: (c.work.batch_size, c.work.epochs, c.work.learning_rate, c.work.warmup_steps) for c in cells}
    assert found == APPENDIX


def test_the_papers_language_models_see_65536_tokens_an_update():
    (cell,) = PLANS["paper"].cells(["4"], ["permuteformer-lm"], seeds=1)
    assert cell.work.batch_size * cell.work.task_options["length"] == 65_536
    assert cell.work.steps == 50_000


@pytest.mark.parametrize("preset", PLANS)
def test_every_model_of_a_plan_is_a_preset_and_every_task_a_task(preset):
    from permuteformer.models import PRESETS
    from permuteformer.tasks import TASKS

    cells = PLANS[preset].cells()
    assert {cell.work.model for cell in cells} <= set(PRESETS)
    assert {cell.work.task for cell in cells} <= set(TASKS)
    assert all(isinstance(cell.work, (Experiment, Measurement)) for cell in cells)
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("table", ["1", "2", "3", "4"])
def test_every_number_of_the_paper_has_a_cell(table):
    there = {(cell.row, cell.column) for cell in PLANS["paper"].cells([table], seeds=1)}
    wanted = {(row, column) for row, numbers in published.TABLES[table].items() for column in numbers if column != "average"}
    assert there == wanted


def test_without_2d_a_text_is_the_same_run():
    text, image = (PLANS["paper"].cells(["1"], ["permuteformer", "permuteformer-1d"], [column], seeds=1) for column in ("text", "image"))
    assert text[0].key == text[1].key
    assert image[0].key != image[1].key


def test_rows_of_a_table_differ_in_the_model_alone():
    """What is compared is fair: one budget, one learning rate, one order of the data."""
    for plan in PLANS.values():
        for table in plan.tables:
            for column in table.columns:
                works = [{**column.work(table.kind, row, 0).to_json(), "model": None} for row in table.rows if row not in column.apart]
                assert all(work == works[0] for work in works)


def test_the_bias_is_measured_one_item_at_a_time():
    cells = PLANS["paper"].cells(["2"], ["performer", "performer-t5"], ["text"])
    assert [cell.work.batch_size for cell in cells] == [16, 1]
    assert cells[0].work.items == cells[1].work.items == 25_000


def test_settings_of_all_training_can_be_changed():
    plan = PLANS["small"].changed({"precision": "bfloat16"})
    assert {cell.work.precision for cell in plan.cells(["1", "4"])} == {"bfloat16"}
    assert plan.cells(["2"]) == PLANS["small"].cells(["2"])
    assert PLANS["small"].changed({}) is PLANS["small"]


def test_small_has_the_rates_that_were_found():
    """On the Transformer row, by the loss on the validation split."""
    found = {}
    for line in (RESULTS / "tuning" / "results.jsonl").read_text().splitlines():
        record = json.loads(line)
        task, loss = record["table"].removeprefix("rates-"), record["result"]["validation"]["loss"]
        assert record["row"] == "transformer"
        found.setdefault(task, {})[loss] = record["experiment"]["learning_rate"]
    assert {task: rates[min(rates)] for task, rates in found.items()} == small.RATES
    assert all(len(rates) == len(tuning.RATES) for rates in found.values())


def test_figures_and_lengths_are_drawn_from_table_4():
    plan = PLANS["quick"]
    assert plan.cells(["figure2"]) == plan.cells(["length"]) == plan.cells(["4"])


def test_seeds_come_last_and_measurements_have_none():
    cells = PLANS["small"].cells(["4"], seeds=2)
    assert [cell.seed for cell in cells] == [0] * 5 + [1] * 5
    assert {cell.seed for cell in PLANS["small"].cells(["3"], seeds=2)} == {0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tables": ["5"]}, "unknown table of preset 'quick'"),
        ({"rows": ["permuteformr"]}, "unknown row of these tables: 'permuteformr'.*did you mean 'permuteformer'"),
        ({"columns": ["txt"]}, "unknown task of these tables"),
        ({"seeds": 0}, "seeds must be 1 or more; it is 0"),
    ],
)
def test_what_is_not_there_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        PLANS["quick"].cells(**arguments)


def test_the_papers_tasks_are_trained_as_in_the_paper_unless_told():
    usual = {"batch_size": 256, "epochs": 50, "learning_rate": 1e-2, "warmup_steps": 200}
    assert defaults("lra-image", "classify", True)[::2] == ("permuteformer-image", usual)
    assert defaults("images", "classify", True)[0] == "permuteformer-image"
    assert defaults("classify", "classify", False)[0] == "permuteformer-retrieval"


def test_experiments_and_reports_need_no_torch():
    code = "import sys, permuteformer.experiments, permuteformer.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
