"""Models with sequence parallelism are the models on one process: logits, losses, and the gradients of all weights."""

import re

import pytest
import sharded_models
import torch
from checks import assert_close
from group_processes import Processes
from sharded_models import CASES, OF_ROWS

LENGTHS = {2: [6, 9], 3: [5, 2, 6]}


@pytest.fixture(scope="module", params=LENGTHS, ids="{} processes".format)
def processes(request):
    made = Processes(request.param)
    yield made
    made.close()


def assert_same(name, found, lengths):
    logits, loss, gradients = sharded_models.alone(name, lengths)
    given, labels = sharded_models.batch(name, lengths)
    if CASES[name][0] in OF_ROWS:
        for part in found:
            assert_close(part[0], logits)
            assert_close(part[1], loss)
    else:
        real = given["attention_mask"].bool()
        assert_close(torch.cat([part[0] for part in found], dim=1)[real], logits[real])
        counts = [int((part != -100).sum()) for part in labels.split(lengths, dim=1)]
        assert_close(sum(part[1] * count for part, count in zip(found, counts, strict=True)) / sum(counts), loss)
    for key, gradient in gradients.items():
        assert_close(sum(part[2][key] for part in found), gradient)
    assert all(gradient.abs().max() > 1e-6 for gradient in gradients.values()), "some weight has no effect"


@pytest.mark.parametrize("name", CASES)
def test_as_on_one_process(name, processes):
    lengths = LENGTHS[len(processes.processes)]
    assert_same(name, processes("sharded_models.together", name, lengths), lengths)


@pytest.mark.parametrize("name", ["lm", "cls"])
def test_with_gradient_checkpointing(name, processes):
    lengths = LENGTHS[len(processes.processes)]
    assert_same(name, processes("sharded_models.together", name, lengths, checkpointed=True), lengths)


def test_what_is_not_supported_is_refused(processes):
    expected = {
        "labels": "shift_labels",
        "cache": "use_cache",
        "generate": "does not generate",
        "softmax": "'softmax'.*'sequence_parallel'",
        "bias": "bias",
        "axes": "axes=2",
        "undone": r"\(1, 6\)",
    }
    for messages in processes("sharded_models.refusals"):
        for name, message in expected.items():
            assert re.search(message, messages[name])
