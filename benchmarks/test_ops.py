"""Times of the ops, to be compared with those of an earlier commit: a slowdown shows.

    make bench                       times, kept in .benchmarks; compared with the last ones, where a fifth slower fails
    pytest benchmarks/test_ops.py    times alone

What others take, side by side, is what ``permuteformer bench ops`` measures.
"""

from __future__ import annotations

from typing import Any

import pytest

from permuteformer.bench.subjects import op
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
    """One call of attention."""
    benchmark(op.make("cpu", method, **SHAPES[shape], gradients=gradients).step)
