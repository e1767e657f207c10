"""Sequence parallelism: two processes hold a shard of a row each, and the traffic does not grow with its length.

The script starts two processes on this machine, connected by gloo. They hold 200 and 300 tokens of a row of 500, then 1,200 and 1,800 of a
row of 3,000, and make a training step of a language model together. The first process makes the same step alone.

    python examples/sequence_parallel.py [--seed 0]

It prints the losses, the largest difference between the gradients (in float64), and the bytes that each process sent.
To train on many processes: ``torchrun --nproc-per-node 2 -m permuteformer train … --sequence-parallel 2``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy

from permuteformer import PermuteFormerConfig, PermuteFormerForCausalLM
from permuteformer.models.parallel import set_sequence_group
from permuteformer.ops.sequence_parallel import SequenceGroup

PROCESSES = 2


def gradients(model: PermuteFormerForCausalLM, tokens: Tensor, following: Tensor, length: int) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of these tokens of a row and its gradients. ``following``: the token after each, which may be on another process."""
    model.zero_grad()
    loss = cross_entropy(model(tokens, use_cache=False).logits[0], following[0], reduction="sum") / length
    loss.backward()
    return loss.detach(), [weight.grad for weight in model.parameters() if weight.grad is not None]


def step(rank: int, length: int, seed: int) -> None:
    """Make one step on both processes, and on the first one alone."""
    torch.manual_seed(seed)  # the same weights and the same row everywhere
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "hidden_dropout": 0.0}
    attention = {"name": "linear", "feature_multiplier": 2}
    model = PermuteFormerForCausalLM(PermuteFormerConfig.preset("permuteformer-lm", vocab_size=259, **sizes, attention=attention)).double()
    row = torch.randint(3, model.config.vocab_size, (1, length + 1))
    tokens, following = row[:, :-1], row[:, 1:]
    cut = 2 * length // 5
    part = slice(cut) if rank == 0 else slice(cut, None)

    group = SequenceGroup()
    set_sequence_group(model, group)
    loss, found = gradients(model, tokens[:, part], following[:, part], length)
    sent = torch.tensor(group.bytes_sent)
    for tensor in (loss, *found):  # the whole is the sum of the parts
        dist.all_reduce(tensor)
    of_each = [torch.zeros_like(sent) for _ in range(PROCESSES)]
    dist.all_gather(of_each, sent)

    if rank == 0:
        set_sequence_group(model, None)
        loss_alone, found_alone = gradients(model, tokens, following, length)
        apart = max(float((a - b).abs().max()) for a, b in zip(found, found_alone, strict=True))
        print(f"{length:5,} tokens: loss {loss:.12f} on two processes, {loss_alone:.12f} on one; gradients differ by {apart:.0e} at most")
        print(f"              bytes sent: {', '.join(f'{int(count):,}' for count in of_each)}", flush=True)


def work(rank: int, meeting: str, seed: int) -> None:
    """Run one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=PROCESSES)
    try:
        for length in (500, 3_000):
            step(rank, length, seed)
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Start the processes and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="weights and row (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # they find each other by a file in it
        spawn(work, args=(str(Path(folder) / "meeting"), arguments.seed), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
