"""Importing is cheap and has no side effects."""

import subprocess
import sys

import pytest

import permuteformer

HEAVY = {"torch", "transformers", "accelerate", "matplotlib", "pyarrow", "scipy"}


def modules_after(statement):
    program = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split())


def test_attention_needs_nothing_heavy_but_torch():
    after = modules_after("from permuteformer import PermuteFormerAttention")
    more = {name.split(".")[0] for name in after - modules_after("import torch")}
    assert more <= {"permuteformer", "difflib", "pkgutil"}


@pytest.mark.parametrize(
    "statement",
    [
        "import permuteformer.cli",  # which imports experiments and presets
        "import permuteformer.report.figure, permuteformer.report.write",
        "from permuteformer.tasks import TASKS; [TASKS[name] for name in TASKS]",
    ],
)
def test_the_command_line_and_what_is_data_import_no_heavy_library(statement):
    assert not modules_after(statement) & HEAVY


def test_public_names():
    assert len(permuteformer.__all__) <= 25
    for name in permuteformer.__all__:
        assert getattr(permuteformer, name) is not None
    assert set(permuteformer.__all__) <= set(dir(permuteformer))
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = permuteformer.nothing


def test_importing_prints_nothing_and_draws_no_random_numbers():
    program = "import torch; a = torch.random.get_rng_state(); import permuteformer.attention; "
    program += "assert torch.equal(a, torch.random.get_rng_state())"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == run.stderr == ""
