"""Continue a text later, in another process: save the state of a language model to a file.

The script trains a small byte-level model for a few seconds on Python's own help texts, so its output resembles English. The model
generates 200 bytes at once. Then it generates the first 100 again and saves its state; a new process loads model and state and generates
the rest.

    python examples/streaming.py [--steps 100] [--output runs/streaming]

It prints the text, whether both ways gave the same bytes, and the size of the state after 100 and after 100,000 tokens: it is the same,
because the state is a sum over keys and values. The text depends on the version of Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers.utils import logging

from permuteformer import PermuteFormerConfig, PermuteFormerForCausalLM
from permuteformer.models import PermuteFormerCache
from permuteformer.tokens import PAPER

PROMPT, HALF, WHOLE = b"The ", 100, 200
MODEL, STATE, TEXT = "model", "state.safetensors", "text.bin"


def tokens_of(text: bytes) -> Tensor:
    """Return the tokens of bytes, ``1 l``."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unsqueeze(0) + PAPER.first


def train(text: bytes, steps: int) -> PermuteFormerForCausalLM:
    """Train a language model with two layers on windows of the text."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    attention = {"name": "linear", "feature_multiplier": 4}  # enough features for positions not to repeat within 100,000 tokens
    model = PermuteFormerForCausalLM(PermuteFormerConfig.preset("permuteformer-lm", vocab_size=PAPER.size, **sizes, attention=attention))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    tokens = tokens_of(text)[0]
    for step in range(1, steps + 1):
        rows = tokens[torch.randint(len(tokens) - 256, (8, 1)) + torch.arange(256)]
        loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step} of {steps}: {loss.item():.2f} nats a byte", file=sys.stderr)
    model.eval()
    return model


@torch.inference_mode()
def write(model: PermuteFormerForCausalLM, cache: PermuteFormerCache, text: bytes, length: int) -> bytes:
    """Continue the text to this length. The cache has seen all but its last byte, before and after."""
    while len(text) < length:
        logits = model(tokens_of(text[-1:]), past_key_values=cache).logits[0, -1, PAPER.first :]
        chance = torch.Generator().manual_seed(len(text))  # seeded by the position, so no random state has to be saved
        text += bytes([int(torch.multinomial((logits / 0.5).softmax(-1), 1, generator=chance))])
    return text


def begin(model: PermuteFormerForCausalLM) -> PermuteFormerCache:
    """Return the state after all but the last byte of the prompt."""
    cache: PermuteFormerCache = model(tokens_of(PROMPT[:-1]), use_cache=True).past_key_values
    return cache


def resume(folder: Path) -> None:
    """Run the second process; it reads everything from the folder."""
    model = PermuteFormerForCausalLM.from_pretrained(folder / MODEL)
    cache = PermuteFormerCache.load(folder / STATE)
    (folder / TEXT).write_bytes(write(model, cache, (folder / TEXT).read_bytes(), WHOLE))


@torch.inference_mode()
def state_bytes(model: PermuteFormerForCausalLM, length: int) -> int:
    """Return the size of the state after ``length`` tokens, read in chunks of 10,000."""
    cache = PermuteFormerCache(model.config.num_hidden_layers)
    for piece in torch.full((1, length), PAPER.first).split(10_000, dim=1):
        model(piece, past_key_values=cache, logits_to_keep=1)
    return cache.nbytes


def main() -> None:
    """Train, generate at once and in two processes, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/streaming"), help="folder of model, state and text (default: %(default)s)"
    )
    parser.add_argument("--go-on", action="store_true", help="what the second process is started with")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1; it is {arguments.steps}")
    folder = arguments.output
    logging.disable_progress_bar()
    if arguments.go_on:
        resume(folder)
        return
    model = train(" ".join(" ".join(topics.values()).split()).encode(), arguments.steps)
    in_one_go = write(model, begin(model), PROMPT, WHOLE)
    print(in_one_go.decode(errors="replace"))
    model.save_pretrained(folder / MODEL)
    cache = begin(model)
    (folder / TEXT).write_bytes(write(model, cache, PROMPT, HALF))
    cache.save(folder / STATE)
    subprocess.run([sys.executable, __file__, "--go-on", "--output", folder], check=True)
    same = (folder / TEXT).read_bytes() == in_one_go
    print(f"\nbytes {HALF + 1} to {WHOLE} by a second process, from {folder / STATE}: {'the same' if same else 'NOT the same'}")
    for length in (100, 100_000):
        print(f"the state after {length:7,} tokens: {state_bytes(model, length):,} bytes")


if __name__ == "__main__":
    main()
