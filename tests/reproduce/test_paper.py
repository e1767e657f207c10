"""Every row of the paper's tables, at the paper's size: built, and trained for two steps on a little data."""

import math
from dataclasses import replace

import pytest
from accelerate.state import AcceleratorState
from small_tasks import SMALL

from permuteformer.bench.sweeps import Case
from permuteformer.bench.worker import Timer
from permuteformer.experiments import PLANS
from permuteformer.experiments.experiment import RunOptions
from permuteformer.train.loop import train

LITTLE = {
    "steps": 2,
    "epochs": None,
    "batch_size": 2,
    "micro_batch_size": 1,
    "evaluate_every": 2,
    "train_items": 4,
    "validation_items": 1,
    "test_items": 1,
    "warmup_steps": 1,
    "test_lengths": (),
}
CELLS = PLANS["paper"].cells(["1", "4"], seeds=1)
FAST = ("permuteformer", "permuteformer-lm")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A few items of each task, in the layouts of the real data."""
    folder = tmp_path_factory.mktemp("data")
    for task in {cell.work.task for cell in CELLS}:
        SMALL[task](folder)
    return folder


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=f"{cell.row}-{cell.column}", marks=() if cell.row in FAST else pytest.mark.slow) for cell in CELLS]
)
def test_a_row_trains_for_two_steps(cell, data, tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    experiment = replace(cell.work, **LITTLE)
    result = train(experiment, tmp_path / "run", RunOptions(data=str(data), track=(), quiet=True))
    assert (result["status"], result["steps"]) == ("finished", 2)
    assert math.isfinite(result["value"])


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.column) for cell in PLANS["paper"].cells(["2"], ["performer-t5"])])
def test_the_t5_bias_is_measured(cell):
    """Texts are short here: weights of all pairs of 4,000 tokens take many GB."""
    length = 256 if cell.column in ("text", "retrieval") else cell.work.length
    work = replace(cell.work, length=length, model_fields={"num_hidden_layers": 1})
    timer = Timer(Case("model", work.to_json()))
    timer.turn()
    result = timer.result()
    assert result["seconds_per_epoch"] == pytest.approx(result["seconds_best"] * cell.work.items)
