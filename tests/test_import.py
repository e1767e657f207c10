import importlib
import subprocess
import sys

import permuteformer


def modules_after(statement):
    program = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split())


def test_importing_brings_torch_and_nothing_else_that_is_heavy():
    assert "torch" not in modules_after("import permuteformer")
    after = modules_after("from permuteformer import PermuteFormerAttention")
    more = {name.split(".")[0] for name in after - modules_after("import torch")}
    assert more <= {"permuteformer", "difflib", "pkgutil"}, "the package imports more than torch does"


def test_public_names():
    assert len(permuteformer.__all__) <= 25
    for name in permuteformer.__all__:
        assert getattr(permuteformer, name) is not None
    assert set(permuteformer.__all__) <= set(dir(permuteformer))
    try:
        permuteformer.nothing  # noqa: B018
    except AttributeError as error:
        assert "has no attribute 'nothing'" in str(error)  # noqa: PT017
    else:
        raise AssertionError("an unknown name was found")


def test_nothing_is_printed_and_no_random_state_is_used_on_import():
    program = "import torch; a = torch.random.get_rng_state(); import permuteformer.attention; "
    program += "assert torch.equal(a, torch.random.get_rng_state())"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == run.stderr == ""
    assert importlib.import_module("permuteformer").__version__
