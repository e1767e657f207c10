"""Predict the cost of sharding sequences across GPUs. Nothing is run: the assumptions are the constants below.

    python benchmarks/scaling.py    prints the predictions

Tests compare operations, weights and bytes with what the code does. Seconds depend on the constants of the machine, none of which was
measured here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LAYERS, HIDDEN, HEADS, FEATURES, VALUES, FEED_FORWARD, VOCABULARY = 6, 512, 8, 64, 64, 1024, 259
"""``permuteformer-lm`` on bytes."""
BLOCK = 128
"""Tokens whose pairs are formed: ``ops.torch_backend`` chooses it."""

PEAK_FLOPS = 312e12
"""Per second and GPU: products in bfloat16 of an A100."""
UTILISATION = 0.3
"""The share of the peak that training reaches."""
LINK = 25e9
"""Bytes per second between GPUs of different machines: 200 Gbit/s. Links within a machine are faster."""
LATENCY = 20e-6
"""Seconds from the start of a message to its first byte."""
MEMORY = 80e9
"""Bytes per GPU."""

LENGTHS = {"1 M": 2**20, "16 M": 2**24, "128 M": 2**27, "1 B": 2**30}
GPUS = (8, 64, 512, 4096)
NUMBER = 4
"""Bytes of a number in a state or an activation: float32."""

STATE_BYTES = NUMBER * HEADS * FEATURES * (VALUES + 1)
"""Bytes that a process sends per layer and sequence."""


@dataclass(frozen=True)
class Flops:
    """Multiplications and additions of the matrix products of a causal layer, per token of a forward pass."""

    projections: int = 4 * HIDDEN * HEADS * (FEATURES + VALUES)
    """Query, key, value, output."""
    feed_forward: int = 4 * HIDDEN * FEED_FORWARD
    attention: int = 4 * HEADS * FEATURES * (VALUES + 1) + 2 * BLOCK * HEADS * (FEATURES + VALUES)
    """Reading the state, writing into it, and the pairs within a block."""
    care: int = 2 * BLOCK * HEADS * VALUES
    """Finding values that are not finite, so that a weight of zero hides them: a product on a GPU; a CPU looks first."""
    sharding: int = 2 * HEADS * FEATURES * (VALUES + 1)
    """The sum over keys that is sent before the pass begins."""

    @property
    def forward(self) -> int:
        return self.projections + self.feed_forward + self.attention + self.care + self.sharding

    @property
    def training(self) -> int:
        """A product has two gradients; the backward pass of attention also runs its blocks again."""
        return 3 * (self.projections + self.feed_forward) + 4 * (self.attention + self.sharding) + 2 * self.care


FLOPS = Flops()
STEP_FLOPS = LAYERS * (FLOPS.training + FLOPS.forward) + 3 * 2 * HIDDEN * VOCABULARY
"""Of a training step, per token: all layers, with a second forward pass for gradient checkpointing, and the output over the vocabulary."""


def parameters() -> int:
    """Return the number of weights and biases; the output shares the weights of the embedding."""
    features, values = HEADS * FEATURES, HEADS * VALUES
    projections = (HIDDEN + 1) * (2 * features + values) + (values + 1) * HIDDEN
    feed_forward = (HIDDEN + 1) * FEED_FORWARD + (FEED_FORWARD + 1) * HIDDEN
    norm = 2 * HIDDEN
    return LAYERS * (projections + feed_forward + 2 * norm) + norm + VOCABULARY * HIDDEN


def rounds(gpus: int) -> int:
    """Return the rounds of the scan over processes: to the next process, and then to those 1, 2, 4, … further away."""
    return 0 if gpus == 1 else 1 + math.ceil(math.log2(max(gpus - 1, 1)))


@dataclass(frozen=True)
class Step:
    """Predictions for a training step on one sequence of ``tokens``, sharded over GPUs, with gradient checkpointing."""

    tokens: int
    gpus: int

    @property
    def scans(self) -> int:
        """Messages with a state: forward, forward again and backward."""
        return 3 * LAYERS * rounds(self.gpus)

    @property
    def communicating(self) -> float:
        """Seconds for states, counts, and the gradients of the weights. None of it overlaps with computation."""
        turns = math.ceil(math.log2(self.gpus))
        states = self.scans * (LATENCY + STATE_BYTES / LINK)
        counts = (2 * LAYERS + 1) * turns * LATENCY
        gradients = 2 * turns * LATENCY + 2 * (self.gpus - 1) / self.gpus * NUMBER * parameters() / LINK
        return states + counts + gradients

    @property
    def seconds(self) -> float:
        return math.ceil(self.tokens / self.gpus) * STEP_FLOPS / (PEAK_FLOPS * UTILISATION) + self.communicating

    @property
    def memory(self) -> float:
        """Bytes per GPU."""
        kept = LAYERS * HIDDEN + 4 * HIDDEN + 2 * HEADS * (FEATURES + VALUES) + 2 * FEED_FORWARD
        return NUMBER * (math.ceil(self.tokens / self.gpus) * (kept + 3 * VOCABULARY) + 4 * parameters())


def seconds_table() -> str:
    """Return seconds per step, and the share of communication."""
    lines = ["| tokens of a sequence | " + " | ".join(f"{gpus:,} GPUs" for gpus in GPUS) + " |", "|---" * (len(GPUS) + 1) + "|"]
    for name, tokens in LENGTHS.items():
        steps = [Step(tokens, gpus) for gpus in GPUS]
        cells = [f"{step.seconds:.2g} s, {step.communicating / step.seconds:.1%}" if step.memory <= MEMORY else "memory" for step in steps]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def communication_table() -> str:
    """Return what a GPU sends, which does not depend on the length."""
    lines = ["| GPUs | rounds of a scan | bytes a GPU sends in a step, at most | seconds of all communication |", "|---|---|---|---|"]
    for gpus in GPUS:
        step = Step(2**20, gpus)
        megabytes = step.scans * STATE_BYTES / 1e6
        lines.append(f"| {gpus:,} | {rounds(gpus)} | {megabytes:.1f} MB | {step.communicating * 1e3:.1f} ms |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{seconds_table()}\n\n{communication_table()}")
