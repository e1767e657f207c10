import os
import signal

# A shell that starts the tests in the background makes them and their processes ignore Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# bfloat16 products kill the process on virtual machines that advertise AMX without granting it; set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Kernels for a GPU are compared with float64: products in full float32, and where there is no GPU, in Triton's interpreter on the CPU.
# Triton looks at this when it is imported.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("tests", deadline=None, max_examples=40, derandomize=True)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in every run; uninitialised memory is NaN, so that reading it shows."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the test processes share the cores
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A separate cache, also for processes that tests start, and no data folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    for name in ("PERMUTEFORMER_DATA", "PERMUTEFORMER_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """A current folder with a little of the data that pages name; what pages register is removed afterwards."""
    import pages

    from permuteformer import ATTENTIONS, FEATURE_MAPS, POSITIONS
    from permuteformer.tasks import TASKS

    before = [set(ATTENTIONS), set(POSITIONS), set(TASKS)], set(FEATURE_MAPS)
    pages.write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERMUTEFORMER_DATA", str(tmp_path / "FOLDER"))
    yield tmp_path
    for registry, names in zip((ATTENTIONS, POSITIONS, TASKS), before[0], strict=True):
        for name in set(registry) - names:
            registry.remove(name)
    for name in set(FEATURE_MAPS) - before[1]:
        del FEATURE_MAPS[name]
