"""What ``test_sanitizers.py`` runs with a kernel that was built with sanitizers, whose path is the argument."""

import itertools
import sys
from pathlib import Path

import torch
from sublayer_modules import FeedForward, make_attend

from permuteformer.models.dropout import Dropout
from permuteformer.ops import native
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.halves import absorb_keys, attend_to_all
from permuteformer.ops.linear import linear_attention
from permuteformer.ops.sublayers import Chance
from permuteformer.positions.permute import Permute


def main():
    native.FILE = Path(sys.argv[1])
    kernel = native.load()
    assert not isinstance(kernel, str), kernel
    torch.manual_seed(0)
    for name, length, (m, d), causal, masked in itertools.product(
        kernel.instruction_sets, (1, 7, 130, 1100, 2100), ((5, 3), (37, 70)), (False, True), (False, True)
    ):
        kernel.use(name)
        q, k, v = (torch.randn(1, 2, length, size, requires_grad=True) for size in (m, m, d))
        out, state = linear_attention(
            q,
            k,
            v,
            feature_map=relu_eps,
            transform=Permute(2, m),
            causal=causal,
            log_decay=torch.full((2,), -0.1, requires_grad=True) if causal else None,
            key_mask=torch.rand(1, length) > 0.3 if masked else None,
            backend="native",
        )
        (out.sum() + state.kv.sum()).backward()
        with torch.no_grad():
            linear_attention(q, k, v, feature_map=relu_eps, causal=causal, backend="native")
        if not causal:
            positions = torch.arange(length).view(1, -1, 1)
            arguments = {"feature_map": relu_eps, "transform": Permute(2, m), "positions": positions}
            attend_to_all(q[:, :, -1:], k, v, query_positions=positions[:, -1:], backend="native", **arguments).sum().backward()
            absorb_keys(k, v, **arguments).kv.sum().backward()
        Dropout(0.3)(v).sum().backward()
    for name, length, (heads, features), axes in itertools.product(kernel.instruction_sets, (1, 7, 130, 2100), ((4, 20), (2, 40)), (1, 2)):
        kernel.use(name)
        half = make_attend(48, heads, features, length, axes=axes, masked=length > 1)
        some = make_attend(48, heads, features, length, axes=axes, queries=3)
        x, queries = torch.randn(2, length, 48, requires_grad=True), torch.randn(2, 3, 48, requires_grad=True)
        for y in (half.by_kernel(x, None), some.by_kernel(x, queries), FeedForward(48, 272, "gelu").by_kernel(x, None, Chance(3, 2**30))):
            y.sum().backward()


if __name__ == "__main__":
    main()
