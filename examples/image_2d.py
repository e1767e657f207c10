"""Images with two axes of positions: a model trained on small images also works on larger ones.

An image has three lines, all horizontal or all vertical, and 15 % of its pixels are flipped. A classifier reads the pixels row by row and
says which. With ``axes=2`` a position is (column, row), and each axis has its own permutations. With ``axes=1`` positions count along the
sequence: the pixel below is one width further, so in an image of another width it is at another distance. Both models are trained on images
of 10 x 10 pixels.

    python examples/image_2d.py [--steps 450] [--seed 0]

It prints the accuracy of both on new images of 10 x 10 and of 14 x 14 pixels (chance: 50 %).
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from permuteformer import PermuteFormerConfig, PermuteFormerForSequenceClassification
from permuteformer.tokens import PAPER, image_tokens

SIZE, LARGER, LINES, FLIPPED = 10, 14, 3, 0.15


def images(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Return images ``b size size`` of 0 and 255, and whether their lines are vertical."""
    columns = (torch.rand(count, size).argsort(1) < LINES).unsqueeze(1).expand(-1, size, -1)
    down = torch.randint(2, (count,))
    lines = torch.where(down.view(-1, 1, 1) == 1, columns, columns.transpose(1, 2))
    return (lines ^ (torch.rand(count, size, size) < FLIPPED)) * 255, down


def arguments_of(pixels: Tensor, axes: int) -> dict[str, Tensor]:
    """Return images as arguments of a model; with one axis, the model counts positions itself."""
    tokens, positions = image_tokens(pixels)
    return {"input_ids": tokens, "position_ids": positions} if axes == 2 else {"input_ids": tokens}


def train(axes: int, steps: int, seed: int) -> PermuteFormerForSequenceClassification:
    """Train a classifier with one layer."""
    torch.manual_seed(seed)
    config = PermuteFormerConfig(
        vocab_size=PAPER.size,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout=0.0,
        attention={"name": "linear", "feature_multiplier": 4},
        position=[{"name": "permute"}],
        axes=axes,
        pooling="mean",
    )
    model = PermuteFormerForSequenceClassification(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        pixels, down = images(32, SIZE)
        loss = model(**arguments_of(pixels, axes), labels=down).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    return model


@torch.no_grad()
def accuracy(model: PermuteFormerForSequenceClassification, size: int) -> float:
    """Return the accuracy on 500 new images, in percent."""
    pixels, down = images(500, size)
    return 100 * float((model(**arguments_of(pixels, model.config.axes)).logits.argmax(-1) == down).double().mean())


def main() -> None:
    """Train both models and test them on both sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=450, help="training steps of each model (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="weights and images (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1; it is {arguments.steps}")
    for axes, title in {2: "two axes", 1: "one axis"}.items():
        model = train(axes, arguments.steps, arguments.seed)
        for size in (SIZE, LARGER):
            print(f"{title}: {size:2} x {size:2} pixels {accuracy(model, size):5.1f} % right")


if __name__ == "__main__":
    main()
