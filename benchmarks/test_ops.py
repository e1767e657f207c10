"""Times of the ops, to compare with those of an earlier commit.

    make bench                       saves times in .benchmarks; fails if one is 20 % slower than the last time
    pytest benchmarks/test_ops.py    prints times only

``permuteformer bench ops`` compares with other implementations.
"""

from __future__ import annotations

from typing import Any

import pytest

from permuteformer.bench.subjects import make_op
from permuteformer.bench.sweeps import BIDIRECTIONAL, CAUSAL

SHAPES: dict[str, dict[str, Any]] = {
    "bidirectional": BIDIRECTIONAL,
    "image": {**BIDIRECTIONAL, "length": 1026, "features": 64},
    "causal": CAUSAL,
    "one token": {**CAUSAL, "length": 1},
}


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "with gradients"])
@pytest.mark.parametrize("method", ["permuteformer", "performer", "permuteformer-torch"])
@pytest.mark.parametrize("shape", SHAPES)
def test_op(benchmark: Any, shape: str, method: str, gradients: bool) -> None:
    """Time one call of attention."""
    benchmark(make_op("cpu", method, **SHAPES[shape], gradients=gradients).step)
