"""Linear attention inside a Hugging Face BERT: same class, same weights, same mask, another attention.

transformers looks up the attention function and the mask function of a model by name, so registering two functions is enough, for BERT and
for every other model that uses this interface. To avoid a download, the script trains a small BERT with softmax attention to say whether a
row has more good words than bad ones. Then it swaps the attention and trains for a few more steps.

    python examples/swap_attention.py [--steps 150] [--seed 0]

It prints the accuracy before and after the swap and after the extra steps, the effect of padding on a row, and the time of a forward pass
of softmax attention relative to linear attention, by length. Only the times differ between runs.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertForSequenceClassification

from permuteformer import ATTENTIONS, Permute
from permuteformer.ops.call import Tokens

NAME = "permuteformer"
CLS, WORDS, LENGTH = 1, 32, 48
GOOD, BAD = (2, 10), (10, 18)  # from, to; other words say nothing


def linear(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, None]:
    """Return attention ``b l h d`` of queries, keys and values ``b h l d``, with the signature of transformers, and no weights.

    ``options`` have no effect: there are no weights to drop out, and the normaliser cancels a scale of the scores.
    """
    out, _ = layer.mixer.mix(q, k, v, Tokens(mask=mask), None)
    return out.transpose(1, 2), None


def key_mask(*, attention_mask: Tensor | None, **options: Any) -> Tensor | None:
    """Return the mask for ``linear``: ``b l``, true for real tokens. An l x l mask is never built."""
    return attention_mask


def swap(model: BertForSequenceClassification) -> None:
    """Replace the attention of every layer. It has permutations but no weights, so the projections stay as they are."""
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        heads, size = attention.num_attention_heads, attention.attention_head_size
        attention.mixer = ATTENTIONS["linear"](heads, size, position=Permute(heads, size))
    AttentionInterface.register(NAME, linear)
    AttentionMaskInterface.register(NAME, key_mask)
    model.set_attn_implementation(NAME)


def reviews(size: int) -> dict[str, Tensor]:
    """Return padded rows of 8 to 48 words, and whether good words outnumber bad ones, as arguments of the model."""
    mask = torch.arange(LENGTH) < torch.randint(8, LENGTH + 1, (size, 1))
    words = torch.randint(2, 2 + WORDS, (size, LENGTH)).masked_fill(~mask, 0)
    words[:, 0] = CLS
    good, bad = (((words >= first) & (words < end)).sum(1) for first, end in (GOOD, BAD))
    return {"input_ids": words, "attention_mask": mask.long(), "labels": (good > bad).long()}


def train(model: nn.Module, steps: int, learning_rate: float) -> None:
    """Train with Adam, on new rows at every step."""
    optimizer = torch.optim.Adam(model.train().parameters(), lr=learning_rate)
    for _ in range(steps):
        loss = model(**reviews(32)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, test: dict[str, Tensor]) -> float:
    """Return the accuracy in percent."""
    return 100 * float((model.eval()(**test).logits.argmax(-1) == test["labels"]).double().mean())


@torch.no_grad()
def time_ratio(one: nn.Module, other: nn.Module, length: int) -> float:
    """Return the ratio of the times of a forward pass of one row: best of five each, alternating."""
    row = torch.full((1, length), 2)
    best = dict.fromkeys((one, other), float("inf"))
    for model in (one, other) * 5:
        begin = time.perf_counter()
        model(row)
        best[model] = min(best[model], time.perf_counter() - begin)
    return best[one] / best[other]


def main() -> None:
    """Train, swap, train further; then compare padding and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=150, help="training steps with softmax attention, and half of them after (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="weights and rows (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps must be at least 2; it is {arguments.steps}")
    torch.manual_seed(arguments.seed)
    sizes = {"vocab_size": 2 + WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(**sizes, max_position_embeddings=4096, initializer_range=0.05))
    test = reviews(1000)
    train(model, arguments.steps, 2e-3)
    print(f"softmax attention:             {accuracy(model, test):5.1f} % right")
    softmax = copy.deepcopy(model)
    swap(model)
    print(f"swapped, with the same weights:{accuracy(model, test):6.1f} % right")
    train(model, arguments.steps // 2, 5e-4)
    print(f"after {arguments.steps // 2:3} steps more:          {accuracy(model, test):5.1f} % right")
    with torch.no_grad():
        short = int(test["attention_mask"][0].sum())
        alone = model(test["input_ids"][:1, :short]).logits
        padded = model(test["input_ids"][:2], test["attention_mask"][:2]).logits[:1]
    print(f"a row of {short} tokens, alone and padded to {LENGTH}: logits differ by {(alone - padded).abs().max():.0e}")
    for length in (256, 1024, 4096):
        print(f"{length:4} tokens: softmax attention takes {time_ratio(softmax, model, length):.1f} times as long")


if __name__ == "__main__":
    main()
