"""Recall by distance: at every token, name the token DISTANCE places before.

Only the relative position decides, so the task shows what a position encoding can do. Two models of the same size with linear attention are
trained on the same sequences; they differ in their positions:

    PermuteFormer   relative, by permutation and decay
    Performer       absolute, sinusoidal positions added to the embeddings

Both are tested at the trained length and at longer ones. It takes about a minute on two cores:

    python examples/recall.py [--steps 300] [--seed 0] [--output runs/recall]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

from permuteformer import POSITIONS, PermuteFormerAttention, PositionEncoding, build
from permuteformer.machine import environment

matplotlib.use("Agg")
from matplotlib import pyplot

VOCABULARY, DISTANCE, WIDTH, HEADS, FEATURES = 16, 9, 64, 4, 2
LENGTH, BATCH = 128, 16
TEST_LENGTHS = (128, 256, 512, 1024, 2048)
COLOURS = {"PermuteFormer": "#0072b2", "Performer": "#d55e00"}  # distinguishable with colour blindness


class Model(nn.Module):
    """Embedding, two blocks of attention and feed-forward, output over the vocabulary."""

    def __init__(self, attentions: list[nn.Module], position: PositionEncoding | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = position
        self.attentions = nn.ModuleList(attentions)
        self.feed_forwards = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in attentions
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in attentions)
        self.output = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``b l vocabulary`` for tokens ``b l``."""
        x = self.embedding(tokens)
        if self.position is not None:
            x = self.position.embed(x, torch.arange(tokens.shape[1]).view(1, -1, 1))
        for norm, attention, feed_forward in zip(self.norms, self.attentions, self.feed_forwards, strict=True):
            x = x + attention(norm(x))[0]
            x = x + feed_forward(x)
        logits: Tensor = self.output(x)
        return logits


def permuteformer() -> Model:
    """Relative positions: the paper's layer with its defaults."""
    return Model([PermuteFormerAttention(WIDTH, HEADS, causal=True, feature_multiplier=FEATURES, seed=layer) for layer in range(2)], None)


def performer() -> Model:
    """The same linear attention without positions, and absolute positions at the input."""
    layers: list[nn.Module] = [
        build("linear", hidden_size=WIDTH, num_heads=HEADS, causal=True, feature_multiplier=FEATURES) for _ in range(2)
    ]
    return Model(layers, POSITIONS.build("sinusoidal", {}, {"hidden_size": WIDTH}))


MODELS = {"PermuteFormer": permuteformer, "Performer": performer}


def batch(size: int, length: int, generator: torch.Generator) -> Tensor:
    """Return random tokens ``b l``: only the position identifies the target."""
    return torch.randint(VOCABULARY, (size, length), generator=generator)


def train(name: str, steps: int, seed: int) -> tuple[Model, list[float]]:
    """Train a model; return it with its loss at every step."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    losses = []
    for step in range(1, steps + 1):
        tokens = batch(BATCH, LENGTH, generator)
        logits = model(tokens)[:, DISTANCE:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-DISTANCE].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"{name}: step {step} of {steps}, loss {loss.item():.3f}", flush=True)
    return model, losses


@torch.no_grad()
def accuracy(model: Model, length: int, seed: int) -> float:
    """Return the accuracy on 16 new sequences of this length."""
    tokens = batch(16, length, torch.Generator().manual_seed(10_000 + seed))
    predicted = model(tokens)[:, DISTANCE:].argmax(-1)
    return float((predicted == tokens[:, :-DISTANCE]).double().mean())


def plot(results: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw the training loss and the accuracy by length as a PNG."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, result in results.items():
        left.plot(result["loss"], label=name, color=COLOURS[name])
        right.plot(TEST_LENGTHS, [100 * a for a in result["accuracy"]], "o-", label=name, color=COLOURS[name])
    left.axhline(torch.tensor(float(VOCABULARY)).log().item(), color="0.6", linestyle=":", label="guessing")
    right.axhline(100 / VOCABULARY, color="0.6", linestyle=":", label="guessing")
    right.axvline(LENGTH, color="0.8", zorder=0)
    right.annotate("trained\nat this length", (LENGTH, 30), textcoords="offset points", xytext=(6, 0), color="0.4")
    left.set(title=f"Name the token {DISTANCE} places before", xlabel="training step", ylabel="loss (nats a token)", ylim=(0, None))
    right.set(title="Longer than trained", xlabel="sequence length (tokens)", ylabel="accuracy (%)", ylim=(0, 105), xscale="log")
    right.set_xticks(TEST_LENGTHS, [str(length) for length in TEST_LENGTHS])
    right.minorticks_off()
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, test, print a table, draw a figure and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="weights and data (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/recall"), help="folder for results (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1; it is {arguments.steps}")
    results: dict[str, dict[str, list[float]]] = {}
    begin = time.perf_counter()
    for name in MODELS:
        model, losses = train(name, arguments.steps, arguments.seed)
        results[name] = {"loss": losses, "accuracy": [accuracy(model, length, arguments.seed) for length in TEST_LENGTHS]}
    print(f"accuracy (%) by length in tokens, trained at {LENGTH}; guessing: {100 / VOCABULARY:.1f}")
    print("length       ", *(f"{length:6}" for length in TEST_LENGTHS))
    for name, result in results.items():
        print(f"{name:13}", *(f"{100 * share:6.1f}" for share in result["accuracy"]))
    picture, record = arguments.output / "recall.png", arguments.output / "recall.json"
    plot(results, picture)
    facts = {"steps": arguments.steps, "seed": arguments.seed, "lengths": TEST_LENGTHS, "environment": environment()}
    record.write_text(json.dumps({**facts, "results": results}, indent=1))
    print(f"{time.perf_counter() - begin:.0f} s. Picture: {picture}   Numbers: {record}")


if __name__ == "__main__":
    main()
