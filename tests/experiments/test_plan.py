"""Plans: they match the paper's appendix and numbers, are fair, and every hyperparameter and row is written once."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import permuteformer
from permuteformer.experiments import PLANS, published, small
from permuteformer.presets import PRESETS
from permuteformer.tasks import TASKS

SOURCE = Path(permuteformer.__file__).parent
RESULTS = Path(__file__).parents[2] / "results" / "experiments"


def test_hyperparameters_of_the_paper():
    """Batch size, epochs, learning rate and warm-up steps of the appendix."""
    cells = PLANS["paper"].cells(["1"], ["permuteformer"], seeds=1)
    found = {c.column: (c.work.batch_size, c.work.epochs, c.work.learning_rate, c.work.warmup_steps) for c in cells}
    assert found == {
        "text": (16, 10, 1e-5, 4000),
        "retrieval": (32, 10, 2e-4, 1000),
        "image": (256, 50, 1e-2, 200),
        "pathfinder": (256, 80, 5e-4, 4000),
    }
    (cell,) = PLANS["paper"].cells(["4"], ["permuteformer-lm"], seeds=1)
    assert (cell.work.steps, cell.work.batch_size * cell.work.task_options["length"]) == (50_000, 65_536)


@pytest.mark.parametrize("preset", PLANS)
def test_cells_name_existing_presets_and_tasks(preset):
    cells = PLANS[preset].cells()
    assert {cell.work.model for cell in cells} <= set(PRESETS)
    assert {cell.work.task for cell in cells} <= set(TASKS)
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("table", ["1", "2", "3", "4"])
def test_every_number_of_the_paper_has_a_cell(table):
    cells = {(cell.row, cell.column) for cell in PLANS["paper"].cells([table], seeds=1)}
    assert cells == {(row, column) for row, numbers in published.TABLES[table].items() for column in numbers if column != "average"}


def test_without_2d_text_is_the_same_work_and_images_are_not():
    text, image = (PLANS["paper"].cells(["1"], ["permuteformer", "permuteformer-1d"], [column], seeds=1) for column in ("text", "image"))
    assert text[0].key == text[1].key
    assert image[0].key != image[1].key


def test_rows_of_a_column_differ_only_in_the_model():
    for plan in PLANS.values():
        for table in plan.tables:
            for column in table.columns:
                rows = [row for row in table.rows if row not in column.row_settings]
                works = [{**column.work(table.kind, row, 0).to_json(), "model": None} for row in rows]
                assert all(work == works[0] for work in works)


def test_the_t5_bias_is_measured_with_one_item_per_batch():
    cells = PLANS["paper"].cells(["2"], ["performer", "performer-t5"], ["text"])
    assert [(cell.work.batch_size, cell.work.items) for cell in cells] == [(16, 25_000), (1, 25_000)]


def test_settings_replace_those_of_training_only():
    plan = PLANS["small"].with_settings({"precision": "bfloat16"})
    assert {cell.work.precision for cell in plan.cells(["1", "4"])} == {"bfloat16"}
    assert plan.cells(["2"]) == PLANS["small"].cells(["2"])
    assert PLANS["small"].with_settings({}) == PLANS["small"]


def test_small_uses_the_learning_rates_with_the_lowest_validation_loss():
    found = {}
    for line in (RESULTS / "tuning" / "results.jsonl").read_text().splitlines():
        record = json.loads(line)
        losses = found.setdefault(record["table"].removeprefix("rates-"), {})
        losses[record["result"]["validation"]["loss"]] = record["experiment"]["learning_rate"]
        assert record["row"] == "transformer"
    assert {task: rates[min(rates)] for task, rates in found.items()} == small.RATES
    tried = {table.name.removeprefix("rates-"): len(table.columns) for table in PLANS["tuning"].tables}
    assert {task: len(rates) for task, rates in found.items()} == tried


def test_figure_2_and_lengths_come_from_table_4():
    plan = PLANS["quick"]
    assert plan.cells(["figure2"]) == plan.cells(["length"]) == plan.cells(["4"])


def test_seeds_come_last_and_measurements_have_one():
    assert [cell.seed for cell in PLANS["small"].cells(["4"], seeds=2)] == [0] * 5 + [1] * 5
    assert {cell.seed for cell in PLANS["small"].cells(["3"], seeds=2)} == {0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tables": ["5"]}, "table.*'quick'.*'5'"),
        ({"rows": ["permuteformr"]}, "row.*'permuteformr'.*'permuteformer'"),
        ({"columns": ["digit"]}, "task.*'digit'.*'digits'"),
        ({"seeds": 0}, "seeds.*0"),
    ],
)
def test_unknown_parts_of_a_plan_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PLANS["quick"].cells(**arguments)


NEW_ROW = '"performer-sinusoidal": Row("A new row", ("1", "3"), lambda task: _fields(LINEAR_4X, SINUSOIDAL)),'
EDITS = [
    ("permuteformer.tokens", "\nTEXT_LENGTH = 4000", "\nTEXT_LENGTH = 3990"),
    ("permuteformer.tokens", "\nIMAGE_SIDE = 32", "\nIMAGE_SIDE = 64"),
    ("permuteformer.presets", "\nLM_LENGTH = 512", "\nLM_LENGTH = 500"),
    ("permuteformer.presets", "\nROWS: dict[str, Row] = {", f"\nROWS: dict[str, Row] = {{{NEW_ROW}"),
    ("permuteformer.tasks.lra_text", '"batch_size": 16', '"batch_size": 18'),
]
PROGRAM = """
import importlib.util, json, sys
edits = json.loads(sys.argv[1])
for name in dict.fromkeys(name for name, _, _ in edits):
    spec = importlib.util.find_spec(name)
    source = spec.loader.get_source(name)
    for _, old, new in [edit for edit in edits if edit[0] == name]:
        assert source.count(old) == 1, f"{name} has {source.count(old)} times {old}"
        source = source.replace(old, new)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    exec(compile(source, spec.origin, "exec"), module.__dict__)

from permuteformer.bench.sweeps import models
from permuteformer.experiments import PLANS
from permuteformer.presets import PRESETS, ROW_TITLES
from permuteformer.report.cells import row_order
from permuteformer.tasks import TASKS
print(json.dumps({
    "presets": PRESETS,
    "plans": {name: [[cell.table, cell.row, cell.column, cell.work.to_json()] for cell in plan.cells()] for name, plan in PLANS.items()},
    "titles": ROW_TITLES,
    "first": sorted(ROW_TITLES, key=row_order)[0],
    "lengths": {name: TASKS[name]().input.max_length for name in ("lra-text", "lra-retrieval", "lra-image", "lra-pathfinder")},
    "benches": [case.to_json() for cases in models("inference", against=list(ROW_TITLES)[:2]).values() for case in cases.values()],
}))
"""


@pytest.fixture(scope="module")
def edited():
    """Presets, plans, titles and benches of a source in which the lines of ``EDITS`` are changed, one place each."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(EDITS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_row_is_added_in_one_place(edited):
    row = "performer-sinusoidal"
    assert {f"{row}-{task}" for task in ("text", "retrieval", "image", "pathfinder")} < set(edited["presets"])
    cells = {(plan, cell[0]) for plan, cells in edited["plans"].items() for cell in cells if cell[1] == row}
    assert cells == {("paper", "1"), ("paper", "3"), ("small", "1"), ("small", "3")}
    assert edited["titles"][row] == "A new row"
    assert edited["first"] == row
    assert f"{row}-image" in [case["options"]["model"] for case in edited["benches"]]


def values(content, *names):
    """Return the values of these names at any depth."""
    if isinstance(content, dict):
        own = [content[name] for name in names if name in content]
        return own + [value for part in content.values() for value in values(part, *names)]
    return [value for part in content for value in values(part, *names)] if isinstance(content, list) else []


def test_lengths_of_texts_and_images_are_written_once(edited):
    lengths = values([edited["presets"], edited["plans"]["paper"], edited["benches"]], "length", "max_length")
    lengths = {*lengths, *edited["lengths"].values()}
    assert {3990, 64**2 + 2} <= lengths
    assert not {4000, 4001, 1024, 1025, 1026} & lengths


def test_the_batch_size_of_a_task_is_written_once(edited):
    cells = [(table, row, work) for table, row, column, work in edited["plans"]["paper"] if column == "text" and table in "12"]
    assert {table for table, _, _ in cells} == {"1", "2"}
    assert {work["batch_size"] for _, row, work in cells if row != "performer-t5"} == {18}


def test_the_length_of_language_models_is_written_once(edited):
    works = [work for table, _, _, work in edited["plans"]["paper"] if table == "4"]
    assert all(work["task_options"] == {"length": 500, "context": 250} for work in works)
    assert all(work["test_lengths"] == [1000, 2000, 4000, 8000] for work in works)
    assert 512 not in values(edited["presets"], "length", "max_length")


@pytest.mark.parametrize(
    ("number", "packages", "files"),
    [
        # the map phi; two independent implementations for reading and comparison have it too
        (1e-3, ("ops", "attention", "positions", "models", "bench"), {"ops/feature_map.py", "ops/minimal.py", "bench/eager.py"}),
        (267_744, (".",), {"presets.py"}),
    ],
)
def test_a_constant_of_the_paper_is_in_no_other_file(number, packages, files):
    paths = {path for package in packages for path in (SOURCE / package).rglob("*.py")}
    found = {path.relative_to(SOURCE).as_posix() for path in paths if number in _constants(path)}
    assert found == files


def _constants(path):
    found = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return {value for value in found if isinstance(value, (int, float))}
