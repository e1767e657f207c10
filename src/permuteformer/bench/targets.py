"""Performance targets: upper bounds of the ratio between two cases of a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from permuteformer.bench.sweeps import CAUSAL_CURVE, DECAY, FORMULA, MATMUL, OURS
from permuteformer.experiments.paper import COLUMNS

TIME, MEMORY, TIME_PER_FLOP = "time", "extra memory", "time of a floating-point operation"
DOUBLING = 2.1
"""Largest growth of the time of causal attention when the length doubles."""


@dataclass(frozen=True)
class Target:
    """The largest ratio allowed of a case to another one."""

    group: str
    against: str
    at_most: float
    case: str = OURS
    quantity: str = TIME

    def ratio(self, results: Mapping[str, Mapping[str, Any]]) -> float | None:
        """Return the ratio among the results of the group, ``None`` if one is missing."""
        ours, theirs = (quantity(self.quantity, results.get(name, {})) for name in (self.case, self.against))
        return None if ours is None or theirs is None else ours / theirs


TARGETS: Mapping[str, Sequence[Target]] = {
    "ops": (
        Target("bidirectional", FORMULA, 1 / 6),
        Target("bidirectional", MATMUL, 1 / 0.6, quantity=TIME_PER_FLOP),
        Target("bidirectional", "performer", 1.03),
        Target("bidirectional, with gradients", FORMULA, 1 / 4),
        Target("bidirectional, with gradients", FORMULA, 1 / 4, quantity=MEMORY),
        Target("causal", "sdpa", 1 / 5),
        Target("two-sided, with gradients", "permuteformer-torch", 1 / 4),
        Target("two-sided of images, with gradients", "permuteformer-torch", 1 / 4),
    ),
    "train": (
        *(Target(task, FORMULA, 1 / factor) for task, factor in zip(COLUMNS, (1.1, 1.5, 3.0, 2.0), strict=True)),
        *(Target(task, "performer", 1.03) for task in COLUMNS),
        *(Target(task, OURS, at_most, case=DECAY) for task, at_most in zip(COLUMNS, (1.4, 1.4, 1.6, 1.6), strict=True)),
        Target("text", "transformer", 0.58),
        Target("retrieval", "transformer", 0.23),
    ),
    "latency": (
        *(Target(task, FORMULA, 1 / factor) for task, factor in zip(COLUMNS, (1.1, 1.7, 2.5, 2.5), strict=True)),
        *(Target(task, "performer", 1.03) for task in COLUMNS),
    ),
    "decode": (
        Target("one token", "permuteformer at 100", 1.05, case="permuteformer at 100,000"),
        Target("one token", "transformer at 16,384", 1 / 5, case="permuteformer at 16,384"),
        Target("one token of 8,192", "hf-gpt2 at 100", 1.0, case="permuteformer at 100"),
    ),
}
"""Targets by sweep."""


def quantity(name: str, result: Mapping[str, Any]) -> float | None:
    """Return a quantity of a result. Extra memory is the peak above what was allocated before the first call."""
    best, flops = result.get("seconds_best"), result.get("flops")
    if name == TIME:
        return best
    if name == TIME_PER_FLOP:
        return best / flops if best and flops else None
    peak, ready = result.get("peak_memory_bytes"), result.get("ready_memory_bytes")
    return None if peak is None or ready is None else max(peak - ready, 1)


def worst_doubling(lines: Sequence[Mapping[str, Any]], from_length: int = 8192) -> float | None:
    """Return the largest growth of the time of our causal attention from a length to twice that length."""
    found = {line["length"]: line["result"]["seconds_best"] for line in lines if (line["group"], line["row"]) == (CAUSAL_CURVE, OURS)}
    ratios = [found[2 * n] / found[n] for n in found if n >= from_length and found.get(2 * n) and found[n]]
    return max(ratios, default=None)


def measured_ratios(sweep: str, lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, float, float]]:
    """Yield group, description, largest allowed ratio and measured ratio of each target that has results."""
    results: dict[str, dict[str, Any]] = {}
    for line in lines:
        results.setdefault(line["group"], {})[line["row"]] = line["result"]
    for target in TARGETS.get(sweep, ()):
        ratio = target.ratio(results.get(target.group, {}))
        if ratio is not None:
            yield target.group, f"{target.quantity}, {target.case} to {target.against}", target.at_most, ratio
    growth = worst_doubling(lines) if sweep == "scaling" else None
    if growth is not None:
        yield CAUSAL_CURVE, "time, twice the length from 8,192 on", DOUBLING, growth
