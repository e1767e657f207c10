"""The layer in plain PyTorch: relative positions in your own network.

The task: given a series of readings from 0 to 7, say by how much (mod 8) each reading differs from the one five places before. Only the
relative position identifies that reading. Two small networks differ in one argument:

    permute + decay   PermuteFormer: linear attention whose features are permuted by position
    nothing           Performer: the same linear attention, with sinusoidal positions added to its input

Both are tested on series eight times as long as in training, and the first one reads a series in chunks, passing its state on.

    python examples/layer.py [--steps 150] [--seed 0]

It prints the accuracy of both at both lengths (chance: 12.5 %), and the largest difference between chunks and the whole series.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from permuteformer import POSITIONS, build

READINGS, LAG, WIDTH, HEADS, LENGTH = 8, 5, 64, 4, 64


class Network(nn.Module):
    """Embedding, one layer of attention, output. ``positions`` names the position encodings of the attention."""

    def __init__(self, positions: Sequence[str]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(READINGS, WIDTH)
        self.absolute = None if positions else POSITIONS.build("sinusoidal", {}, {"hidden_size": WIDTH})
        self.attention = build("linear", positions, hidden_size=WIDTH, num_heads=HEADS, causal=True, feature_multiplier=2)
        self.output = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, READINGS))

    def forward(self, readings: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return logits ``b l 8`` for readings ``b l``, and the state to continue from."""
        x = self.embedding(readings)
        if self.absolute is not None:
            x = self.absolute.embed(x, torch.arange(readings.shape[1]).view(1, -1, 1))
        mixed, state = self.attention(x, state=state)
        return self.output(x + mixed), state


def example(size: int, length: int) -> tuple[Tensor, Tensor]:
    """Return series ``b l`` and the targets, from the sixth reading on."""
    readings = torch.randint(READINGS, (size, length))
    return readings, (readings[:, LAG:] - readings[:, :-LAG]) % READINGS


def train(positions: Sequence[str], steps: int, seed: int) -> Network:
    """Train a network on series of 64 readings."""
    torch.manual_seed(seed)
    network = Network(positions)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(steps):
        readings, change = example(32, LENGTH)
        loss = nn.functional.cross_entropy(network(readings)[0][:, LAG:].flatten(0, 1), change.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


@torch.no_grad()
def accuracy(network: Network, length: int) -> float:
    """Return the accuracy on 16 new series."""
    readings, change = example(16, length)
    return float((network(readings)[0][:, LAG:].argmax(-1) == change).double().mean())


@torch.no_grad()
def difference_in_pieces(network: Network, readings: Tensor) -> float:
    """Return the largest difference of logits between a series read in chunks of 300 and the same series read at once."""
    pieces, state = [], None
    for piece in readings.split(300, dim=1):
        logits, state = network(piece, state)
        pieces.append(logits)
    return float((torch.cat(pieces, dim=1) - network(readings)[0]).abs().max())


def main() -> None:
    """Train and test both networks; continue from a state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps of each network (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="weights and series (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1; it is {arguments.steps}")
    networks = {}
    for title, positions in {"PermuteFormer": ["permute", "decay"], "Performer": []}.items():
        networks[title] = train(positions, arguments.steps, arguments.seed)
        for length in (LENGTH, 8 * LENGTH):
            print(f"{title:13}  {length:3} readings: {100 * accuracy(networks[title], length):5.1f} % right")
    difference = difference_in_pieces(networks["PermuteFormer"], example(1, 1000)[0])
    print(f"1,000 readings in four pieces and at once: logits differ by {difference:.0e} at most")


if __name__ == "__main__":
    main()
