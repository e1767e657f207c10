"""Run by ``test_sanitizers.py`` with the path of a kernel that was built with sanitizers."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import torch
from attention_cases import MODES, Case
from block_modules import FeedForward, attention_half

from permuteformer.ops import native
from permuteformer.ops.call import LinearCall, Tokens
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.fused_block import Chance
from permuteformer.ops.linear import run
from permuteformer.ops.modules import Dropout, Linear
from permuteformer.positions.permute import Permute


def main():
    native.FILE = Path(sys.argv[1])
    kernel = native.load()
    assert not isinstance(kernel, str), kernel
    torch.manual_seed(0)
    sizes = ((5, 3), (37, 70))
    for name, mode, length, (m, d) in itertools.product(kernel.instruction_sets, MODES, (1, 7, 130, 2100), sizes):
        kernel.use(name)
        marks = {"masked": length > 1, "packed": length > 7, "has_global": mode == "two_sided" and length < 2100}
        for case in (
            Case(mode, length, heads=2, features=m, values=d, batch=1),
            Case(mode, length, 2, heads=2, features=m, values=d, **marks),
        ):
            case.run(torch.float32, "native")
        call = LinearCall(
            *(x.float() for x in case.tensors), relu_eps, m, encoding=Permute(2, m), causal=case.causal, log_decay=case.log_decay
        )
        with torch.no_grad():
            _, state = run(call, "native")
            if case.causal:
                run(replace(call, q=call.q[:, :, :1], k=call.k[:, :, :1], v=call.v[:, :, :1], state=state), "native")
            elif mode == "two_sided":
                run(replace(call, q=call.q[:, :, :0], reverse=True), "native")
            else:
                positions = torch.arange(length).view(1, -1, 1)
                run(replace(call, q=call.q[:, :, -1:], tokens=Tokens(positions), query_positions=positions[:, -1:]), "native")
        Dropout(0.3)(call.v.requires_grad_()).sum().backward()
    for name, length, (heads, features), axes in itertools.product(kernel.instruction_sets, (1, 7, 130, 2100), ((4, 20), (2, 40)), (1, 2)):
        kernel.use(name)
        half = attention_half(48, heads, features, length, axes=axes, masked=length > 1)
        some = attention_half(48, heads, features, length, axes=axes, queries=3)
        x, queries = torch.randn(2, length, 48, requires_grad=True), torch.randn(2, 3, 48, requires_grad=True)
        for y in (half.fused(x), some.fused(x, queries), FeedForward(48, 272, "gelu").fused(x, None, Chance(3, 2**30))):
            y.sum().backward()
        with torch.no_grad():
            Linear(48, features + 1)(queries)


if __name__ == "__main__":
    main()
