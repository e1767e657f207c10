"""Predict the cost of sharding rows across GPUs. Nothing is run: this is arithmetic, and its assumptions are the constants below.

    python benchmarks/scaling.py predict    the tables of docs/scaling.md

FLOP and bytes are those of the code, and tests compare them with what it counts; seconds rest on ``MACHINE``.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """``permuteformer-lm`` on bytes: the numbers of its preset."""

    layers: int = 6
    hidden: int = 512
    heads: int = 8
    features: int = 64
    values: int = 64
    feed_forward: int = 1024
    vocabulary: int = 259
    block: int = 128
    """Tokens whose pairs are formed: ``ops.torch_backend`` chooses it."""


@dataclass(frozen=True)
class Machine:
    """A GPU among others. None of these numbers was measured here."""

    flops: float = 312e12
    """A second at most: bfloat16 products of an A100."""
    utilisation: float = 0.3
    """The share of it that training reaches."""
    link: float = 25e9
    """Bytes a second from one GPU to one of another machine: 200 Gbit/s. Within a machine it is faster, which is left out."""
    latency: float = 20e-6
    """Seconds from the start of a message to its first byte."""
    memory: float = 80e9


MODEL, MACHINE = Model(), Machine()
LENGTHS = {"1 M": 2**20, "16 M": 2**24, "128 M": 2**27, "1 B": 2**30}
GPUS = (8, 64, 512, 4096)
NUMBER = 4
"""Bytes of a number of a state, and of an activation: float32."""


@dataclass(frozen=True)
class Flops:
    """Multiplications and additions of matrix products a token, forwards."""

    projections: int
    """Query, key, value, output."""
    feed_forward: int
    attention: int
    """Reading the carry, writing into it, and the pairs within a block."""
    care: int
    """Finding values that are not finite, so that a weight of zero hides them: a product on a GPU; a CPU looks first."""
    sharding: int
    """The keys summed up once more, to be sent before the pass begins."""

    @property
    def forward(self) -> int:
        """All of them."""
        return self.projections + self.feed_forward + self.attention + self.care + self.sharding

    @property
    def training(self) -> int:
        """Forwards and backwards. A product has two more in the backward pass; attention runs its blocks again besides."""
        return 3 * (self.projections + self.feed_forward) + 4 * (self.attention + self.sharding) + 2 * self.care


def layer_flops(model: Model = MODEL) -> Flops:
    """Of a causal layer."""
    features, values, carry = model.heads * model.features, model.heads * model.values, model.heads * model.features * (model.values + 1)
    return Flops(
        projections=2 * model.hidden * (2 * features + 2 * values),
        feed_forward=4 * model.hidden * model.feed_forward,
        attention=4 * carry + 2 * model.block * (features + values),
        care=2 * model.block * values,
        sharding=2 * carry,
    )


def step_flops(model: Model = MODEL) -> int:
    """Of a training step, a token: all layers, forwards twice for gradient checkpointing, and the output over the vocabulary."""
    layer = layer_flops(model)
    return model.layers * (layer.training + layer.forward) + 3 * 2 * model.hidden * model.vocabulary


def parameters(model: Model = MODEL) -> int:
    """Weights and biases; the output is the embedding."""
    features, values = model.heads * model.features, model.heads * model.values
    projections = (model.hidden + 1) * (2 * features + values) + (values + 1) * model.hidden
    feed_forward = (model.hidden + 1) * model.feed_forward + (model.feed_forward + 1) * model.hidden
    norm = 2 * model.hidden
    return model.layers * (projections + feed_forward + 2 * norm) + norm + model.vocabulary * model.hidden


def state_bytes(model: Model = MODEL) -> int:
    """What one process hands over at a time, of one layer and one row."""
    return NUMBER * model.heads * model.features * (model.values + 1)


def rounds(gpus: int) -> int:
    """Turns of the scan over processes: to the neighbour, and then to those 1, 2, 4, … further on."""
    return 0 if gpus == 1 else 1 + math.ceil(math.log2(max(gpus - 1, 1)))


@dataclass(frozen=True)
class Step:
    """A training step of one row, as predicted."""

    computing: float
    """Seconds."""
    communicating: float
    """Seconds: states, counts, and the gradients of the weights; nothing of it is hidden behind computing."""
    sent: int
    """Bytes that a GPU hands over for states."""
    memory: float
    """Bytes of a GPU, with gradient checkpointing."""

    @property
    def seconds(self) -> float:
        return self.computing + self.communicating


def step(tokens: int, gpus: int, model: Model = MODEL, machine: Machine = MACHINE) -> Step:
    """One row of so many tokens, spread over so many GPUs."""
    own = math.ceil(tokens / gpus)
    scans = 3 * model.layers * rounds(gpus)  # forwards, forwards again, backwards
    turns = math.ceil(math.log2(gpus)) if gpus > 1 else 0
    states = scans * (machine.latency + state_bytes(model) / machine.link)
    counts = (2 * model.layers + 1) * turns * machine.latency
    gradients = 2 * turns * machine.latency + 2 * (gpus - 1) / gpus * NUMBER * parameters(model) / machine.link
    kept = model.layers * model.hidden + 4 * model.hidden + 2 * model.heads * (model.features + model.values) + 2 * model.feed_forward
    memory = NUMBER * (own * (kept + 3 * model.vocabulary) + 4 * parameters(model))
    computing = own * step_flops(model) / (machine.flops * machine.utilisation)
    return Step(computing, states + counts + gradients, scans * state_bytes(model), memory)


def seconds_table() -> str:
    """Seconds a step, and the share that communicating takes of it."""
    lines = ["| tokens of a row | " + " | ".join(f"{gpus:,} GPUs" for gpus in GPUS) + " |", "|---" * (len(GPUS) + 1) + "|"]
    for name, tokens in LENGTHS.items():
        found = [step(tokens, gpus) for gpus in GPUS]
        cells = [f"{s.seconds:.2g} s, {s.communicating / s.seconds:.1%}" if s.memory <= MACHINE.memory else "memory" for s in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def communication_table() -> str:
    """What is sent for states, whatever the length."""
    lines = ["| GPUs | turns of a scan | bytes a GPU sends in a step, at most | seconds of all communication |", "|---|---|---|---|"]
    for gpus in GPUS:
        found = step(2**20, gpus)
        lines.append(f"| {gpus:,} | {rounds(gpus)} | {found.sent / 1e6:.1f} MB | {found.communicating * 1e3:.1f} ms |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["predict"])
    parser.parse_args()
    print(f"{seconds_table()}\n\n{communication_table()}")


if __name__ == "__main__":
    main()
