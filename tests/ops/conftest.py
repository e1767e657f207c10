"""Fixtures of the CPU kernel."""

import pytest

from permuteformer.ops.native import load

KERNEL = load()
SETS = [] if isinstance(KERNEL, str) else KERNEL.instruction_sets


@pytest.fixture(params=SETS)
def instruction_set(request):
    KERNEL.use(request.param)
    yield request.param
    KERNEL.use(SETS[0])


@pytest.fixture(params=["torch", *(f"native {name}" for name in SETS)])
def backend(request):
    """A backend and the dtype it is compared in: PyTorch in float64, the CPU kernel with each instruction set in float32."""
    import torch

    name, _, instruction_set = request.param.partition(" ")
    if name == "torch":
        yield name, torch.float64
        return
    KERNEL.use(instruction_set)
    yield name, torch.float32
    KERNEL.use(SETS[0])
