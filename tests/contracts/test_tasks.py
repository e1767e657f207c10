"""What must hold of every task in the registry."""

import pytest
from small_tasks import SMALL
from task_checks import CHECKS

from permuteformer.tasks import TASKS


@pytest.fixture(params=list(TASKS))
def task(request, tmp_path):
    assert request.param in SMALL, "a new task needs a little data to be tested with"
    return TASKS[request.param](**SMALL[request.param](tmp_path))


@pytest.mark.parametrize("check", CHECKS)
def test_tasks(task, check):
    CHECKS[check](task)
