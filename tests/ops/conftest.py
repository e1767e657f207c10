"""What tests of the CPU kernel share."""

import pytest

from permuteformer.ops.native import load

KERNEL = load()
SETS = [] if isinstance(KERNEL, str) else KERNEL.instruction_sets


@pytest.fixture(params=SETS)
def instruction_set(request):
    KERNEL.use(request.param)
    yield request.param
    KERNEL.use(SETS[0])
