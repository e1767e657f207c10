"""Contracts of every task in the registry."""

import ast
import json
from pathlib import Path

import pytest
import torch
from small_tasks import SMALL
from task_checks import CHECKS, some

import permuteformer
from permuteformer.models.tokenizer import tokenizer_of_words
from permuteformer.tasks import TASKS
from permuteformer.tasks.inputs import classification_from_json
from permuteformer.tasks.language import windows_from_json

PACKAGE = Path(permuteformer.__file__).parent
KINDS = {"classify", "match", "lm"}
"""Kinds of inputs, three of which are names of tasks too."""


@pytest.fixture(params=list(TASKS))
def task(request, tmp_path):
    assert request.param in SMALL, "add small data to tests/small_tasks.py"
    return TASKS[request.param](**SMALL[request.param](tmp_path))


@pytest.mark.parametrize("check", CHECKS)
def test_tasks(task, check):
    CHECKS[check](task)


def test_input_is_restored_from_the_run_folder(task, tmp_path):
    described = json.loads(json.dumps(task.describe()))
    assert described["name"] in TASKS
    content, before = described["input"], task.input
    if content.get("tokenizer") == "words":
        tokenizer_of_words(before.tokenizer.words).save_pretrained(tmp_path)
    if content["input"] == "Windows":
        after = windows_from_json(content, tmp_path)
    else:
        after = classification_from_json(content, tuple(described["labels"]), tmp_path)
    items = task.items("test")[:3]
    assert torch.equal(after.collate(items).input_ids, before.collate(items).input_ids)
    assert (after.vocab_size, after.max_length, after.pad_id) == (before.vocab_size, before.max_length, before.pad_id)
    assert after.to_json() == before.to_json()
    assert after.texts(items[0]) == before.texts(items[0])
    ids = range(min(before.vocab_size, 20))
    assert [after.name_token(id) for id in ids] == [before.name_token(id) for id in ids]


def test_random_batch_is_shaped_as_a_batch_of_items(task):
    input, found = task.input, some(task, "train")
    batch = input.random_batch(len(found), found.input_ids.shape[1])
    for name in ("input_ids", "mask", "labels", "positions"):
        drawn, real = getattr(batch, name), getattr(found, name)
        assert (drawn is None) == (real is None)
        assert drawn is None or (drawn.shape, drawn.dtype) == (real.shape, real.dtype)
    assert (batch.second_input_ids is None) == (found.second_input_ids is None)
    assert int(batch.input_ids.max()) < input.vocab_size


@pytest.mark.parametrize("package", ["train", "bench", "report"])
def test_package_names_no_task(package):
    """A task is named by a string that is no kind of input, or by its class."""
    names = set(TASKS) - KINDS
    classes = {TASKS[name].__name__ for name in TASKS}
    files = sorted((PACKAGE / package).rglob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            place = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in names, f"{place} names the task {node.value!r}"
            elif isinstance(node, (ast.Name, ast.Attribute, ast.alias)):
                named = {ast.Name: "id", ast.Attribute: "attr", ast.alias: "name"}[type(node)]
                assert getattr(node, named) not in classes, f"{place} names a task's class"
