"""Memory that is used again: never while somebody holds it, and no more of it than was needed at a time."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch

from permuteformer.ops import memory
from permuteformer.ops.memory import SMALLEST_BYTES, UNIT, empty

CPU = torch.device("cpu")
NUMBERS = 3 * UNIT // 4


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    made = memory._Blocks()
    monkeypatch.setattr(memory, "_blocks", made)
    return made


@pytest.mark.parametrize("size", [SMALLEST_BYTES, UNIT - 4, UNIT, UNIT + 4, 3 * UNIT - 4, 10 * UNIT + 4])
def test_of_any_size_it_is_used_again(size):
    place = empty(size // 4, device=CPU).data_ptr()
    assert empty(size // 4, device=CPU).data_ptr() == place


def test_it_is_used_again_when_nobody_holds_it():
    first = empty(3, NUMBERS // 3, device=CPU)
    place = first.data_ptr()
    view = first[1:, :5].t()
    del first
    other = empty(NUMBERS, device=CPU)
    assert other.data_ptr() != place
    del view
    again = empty(NUMBERS, device=CPU)
    assert again.data_ptr() == place
    assert again.shape == (NUMBERS,)
    assert (again.dtype, again.is_contiguous()) == (torch.float32, True)


def test_what_autograd_keeps_is_held():
    x = empty(NUMBERS, device=CPU).fill_(2).requires_grad_()
    y = (x * x).sum()
    del x
    empty(NUMBERS, device=CPU).fill_(5)
    assert y.grad_fn is not None
    assert y.item() == 4 * NUMBERS
    y.backward()


def test_what_nobody_filled_is_nan_where_torch_is_told_so():
    empty(NUMBERS, device=CPU).fill_(1)
    assert empty(NUMBERS, device=CPU).isnan().all()
    torch.use_deterministic_algorithms(False)
    empty(NUMBERS, device=CPU).fill_(1)
    assert (empty(NUMBERS, device=CPU) == 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_numbers(dtype):
    x = empty(2, NUMBERS, device=CPU, dtype=dtype)
    assert (x.dtype, x.shape, x.untyped_storage().nbytes() >= x.nbytes) == (dtype, (2, NUMBERS), True)
    x.fill_(3)
    assert x.sum() == 6 * NUMBERS


def test_small_ones_and_other_devices_are_torch_s(blocks):
    empty(SMALLEST_BYTES // 4 - 1, device=CPU)
    assert empty(NUMBERS, device=torch.device("meta")).is_meta
    assert blocks._most == 0


def test_no_more_is_kept_than_was_in_use_at_a_time(blocks):
    for number in range(1, 30):
        empty(number * UNIT // 4, device=CPU)  # sizes that all differ
    gc.collect()
    held = [empty(NUMBERS, device=CPU) for _ in range(3)]
    assert sum(map(len, blocks._free)) <= blocks._most == 29 * UNIT
    assert blocks._in_use == 3 * 3 * UNIT  # the smallest that fit
    memory.release()
    assert not blocks._free
    assert [x.fill_(n).sum().item() for n, x in enumerate(held)] == [0, NUMBERS, 2 * NUMBERS]


def test_a_much_larger_block_is_not_taken(blocks):
    empty(20 * UNIT // 4, device=CPU)
    empty(2 * UNIT // 4, device=CPU)
    assert sorted(map(len, [*blocks._free, *blocks._ended])) == [2 * UNIT, 20 * UNIT]


def test_threads():
    wrong = []

    def work(value):
        for _ in range(200):
            x = empty(NUMBERS // 2, device=CPU).fill_(value)
            if float(x.sum()) != value * (NUMBERS // 2):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_memory_is_torch_s_error(monkeypatch):
    def refuse(size):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(memory, "_new", refuse)
    assert empty(NUMBERS, device=CPU).shape == (NUMBERS,)
    with pytest.raises(RuntimeError, match="allocate"):
        empty(2**45, device=CPU)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_has_its_own():
    code = """
import os, torch
from permuteformer.ops.memory import empty
x = empty(2**20, device=torch.device("cpu")).fill_(1)
child = os.fork()
if child == 0:
    x[:9] = 2  # by one thread: those of the parent are not in here
    os._exit(0)
os.waitpid(child, 0)
assert (x == 1).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
