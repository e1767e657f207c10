"""A few seconds of everything, in the environment that the package is installed in. It needs nothing of the repository.

python smoke.py native      # or torch: what is to compute linear attention there
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL = ["--hidden-size", "16", "--num-attention-heads", "2", "--num-hidden-layers", "1", "--intermediate-size", "32", "--max-length", "32"]
SHORT = ["--steps", "4", "--batch-size", "8", "--warmup-steps", "1", "--evaluate-every", "2"]


def main() -> None:
    """Raises at the first thing that does not work."""
    wanted = sys.argv[1]
    import permuteformer

    place = Path(permuteformer.__file__).parent
    assert "site-packages" in place.parts, f"this is to try an installed package, and {place} was imported"
    assert (place / "py.typed").is_file()
    a_layer(wanted)
    with tempfile.TemporaryDirectory() as folder:
        a_model(Path(folder))
        commands(Path(folder), wanted)
    print(f"permuteformer {permuteformer.__version__} works, and {wanted} computes")


def a_layer(wanted: str) -> None:
    """Forward and backward, by whom it is to be, and equal to PyTorch's."""
    import torch

    from permuteformer import PermuteFormerAttention
    from permuteformer.ops.linear import backend_in_use

    assert backend_in_use().split()[0] == wanted, f"{backend_in_use()} computes, and it should be {wanted}"
    torch.manual_seed(0)
    layer = PermuteFormerAttention(64, num_heads=4, causal=True)
    x = torch.randn(2, 300, 64)
    results = []
    for backend in ("auto", "torch"):
        os.environ["PERMUTEFORMER_BACKEND"] = backend
        layer.zero_grad()
        y, _ = layer(x)
        y.square().sum().backward()
        results.append([y.detach(), *(parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None)])
    os.environ.pop("PERMUTEFORMER_BACKEND")
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def a_model(folder: Path) -> None:
    """Saved and loaded it gives the same, and a card lies beside it."""
    import torch

    from permuteformer import PermuteFormerConfig, PermuteFormerForCausalLM

    config = PermuteFormerConfig.preset("permuteformer-lm", vocab_size=50, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    model = PermuteFormerForCausalLM(config).eval()
    model.save_pretrained(folder / "model")
    again = PermuteFormerForCausalLM.from_pretrained(folder / "model").eval()
    tokens = torch.arange(20).unsqueeze(0)
    assert torch.equal(model(tokens).logits, again(tokens).logits)
    assert (folder / "model" / "README.md").is_file()


def commands(folder: Path, wanted: str) -> None:
    """From a table to labels, by the command line."""
    with (folder / "reviews.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "label"])
        table.writerows([f"{'good' if n % 2 else 'bad'} film number {n}", "yes" if n % 2 else "no"] for n in range(200))
    assert "train" in command(folder, "--help")
    info = command(folder, "info")
    assert ("CPU kernel, " in info) == (wanted == "native"), info
    assert info.count("there is no CPU kernel") == (wanted == "torch"), info
    command(folder, "train", "classify", "reviews.csv", "--output", "run", "--quiet", *SMALL, *SHORT)
    command(folder, "report", "run", "--output", "report")
    command(folder, "predict", "run", "reviews.csv", "--output", "labels.csv")
    assert (folder / "report" / "index.html").stat().st_size > 10_000
    assert len((folder / "labels.csv").read_text().splitlines()) == 201


def command(folder: Path, *words: str) -> str:
    """What the program that was installed says."""
    program = Path(sys.executable).with_name("permuteformer")
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(program), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"permuteformer {' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    main()
