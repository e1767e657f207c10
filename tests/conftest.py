import os
import signal

# A shell that starts the tests in the background has them and all that they start ignore Ctrl-C, which some tests send.
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
    """The same numbers in every run, and memory that nobody filled is NaN, so that reading it shows."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the test processes share the cores
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache of one's own, also for the processes that are started, and no data folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    for name in ("PERMUTEFORMER_DATA", "PERMUTEFORMER_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """An empty folder to be in, with a little of the data that pages name; what pages register is taken back afterwards."""
    import pages

    from permuteformer import ATTENTIONS, FEATURE_MAPS, POSITIONS

    before = [set(ATTENTIONS), set(POSITIONS), set(FEATURE_MAPS)]
    pages.write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERMUTEFORMER_DATA", str(tmp_path / "FOLDER"))
    yield tmp_path
    for registry, names in zip((ATTENTIONS, POSITIONS), before, strict=False):
        for name in set(registry) - names:
            registry.remove(name)
    for name in set(FEATURE_MAPS) - before[2]:
        del FEATURE_MAPS[name]
