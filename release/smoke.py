"""Try an installed package: a layer, a model, and the command line, in seconds. It needs nothing of the repository.

python smoke.py native      # or torch: the backend that linear attention must use
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TINY = "--model.hidden-size 16 --model.num-attention-heads 2 --model.num-hidden-layers 1 --model.intermediate-size 32".split()
SHORT = "--steps 2 --batch-size 8 --validation-items 8 --test-items 8 --quiet".split()


def main() -> None:
    """Raise at the first thing that does not work."""
    backend = sys.argv[1]
    import permuteformer

    package = Path(permuteformer.__file__).parent
    assert "site-packages" in package.parts, f"an installed package is to be tried, and {package} was imported"
    assert (package / "py.typed").is_file()
    layer(backend)
    with tempfile.TemporaryDirectory() as folder:
        model(Path(folder))
        (native,) = [line for line in command(Path(folder), "info").splitlines() if "backend native" in line]
        assert ("not supported" in native) == (backend == "torch"), native
        command(Path(folder), "train", "digits", "--output", "run", *TINY, *SHORT)
        assert (Path(folder) / "run" / "result.json").is_file()
    print(f"permuteformer {permuteformer.__version__} works with the backend {backend}")


def layer(backend: str) -> None:
    """Compare outputs and gradients of a layer with those of the backend ``torch``."""
    import torch

    from permuteformer import PermuteFormerAttention
    from permuteformer.ops.linear import backend_in_use

    assert backend_in_use().split()[0] == backend, f"the backend is {backend_in_use()}, expected {backend}"
    torch.manual_seed(0)
    attention = PermuteFormerAttention(64, num_heads=4, causal=True)
    x = torch.randn(2, 300, 64)
    results = []
    for name in ("auto", "torch"):
        os.environ["PERMUTEFORMER_BACKEND"] = name
        attention.zero_grad()
        y, _ = attention(x)
        y.square().sum().backward()
        results.append([y.detach(), *(parameter.grad.clone() for parameter in attention.parameters() if parameter.grad is not None)])
    os.environ.pop("PERMUTEFORMER_BACKEND")
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def model(folder: Path) -> None:
    """Save a model, load it, and compare logits."""
    import torch

    from permuteformer import PermuteFormerConfig, PermuteFormerForCausalLM

    config = PermuteFormerConfig.preset("permuteformer-lm", vocab_size=50, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    saved = PermuteFormerForCausalLM(config).eval()
    saved.save_pretrained(folder / "model")
    loaded = PermuteFormerForCausalLM.from_pretrained(folder / "model").eval()
    tokens = torch.arange(20).unsqueeze(0)
    assert torch.equal(saved(tokens).logits, loaded(tokens).logits)


def command(folder: Path, *words: str) -> str:
    """Return what the installed command prints."""
    program = Path(sys.executable).with_name("permuteformer")
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "300", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(program), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"permuteformer {' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    main()
