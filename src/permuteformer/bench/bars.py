"""What is to be reached: ratios of two cases of one group, measured in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from permuteformer.bench.sweeps import CURVE, DECAY, FORMULA, TASKS

Result = Mapping[str, Any]
OURS, PERFORMER, TRANSFORMER = "permuteformer", "performer", "transformer"


def seconds(result: Result) -> float | None:
    """The best time."""
    return result.get("seconds_best")


def extra_memory(result: Result) -> float | None:
    """The peak of memory above what was there before the first call: inputs, weights and libraries are not in it."""
    peak, ready = result.get("peak_memory_bytes"), result.get("ready_memory_bytes")
    return None if peak is None or ready is None else max(peak - ready, 1)


def time_of_work(result: Result) -> float | None:
    """Seconds for each multiplication or addition that cannot be done without."""
    best, flops = result.get("seconds_best"), result.get("flops")
    return None if not best or not flops else best / flops


QUANTITIES = {"time": seconds, "extra memory": extra_memory, "time of a floating-point operation": time_of_work}


@dataclass(frozen=True)
class Bar:
    """A case against another, and the most that the ratio may be."""

    group: str
    against: str
    at_most: float
    case: str = OURS
    quantity: str = "time"

    def ratio(self, results: Mapping[str, Result]) -> float | None:
        """What was measured; none where one of them has no result."""
        read = QUANTITIES[self.quantity]
        ours, theirs = (read(results.get(name, {})) for name in (self.case, self.against))
        return None if ours is None or theirs is None else ours / theirs


BARS: Mapping[str, Sequence[Bar]] = {
    "ops": (
        Bar("bidirectional", FORMULA, 1 / 6),
        Bar("bidirectional", "matmul", 1 / 0.6, quantity="time of a floating-point operation"),
        Bar("bidirectional", PERFORMER, 1.03),
        Bar("bidirectional, with gradients", FORMULA, 1 / 4),
        Bar("bidirectional, with gradients", FORMULA, 1 / 4, quantity="extra memory"),
        Bar("causal", "sdpa", 1 / 5),
        Bar("two-sided, with gradients", "permuteformer-torch", 1 / 4),
        Bar("two-sided of images, with gradients", "permuteformer-torch", 1 / 4),
    ),
    "train": (
        *(Bar(task, FORMULA, 1 / times) for task, times in zip(TASKS, (1.1, 1.5, 3.0, 2.0), strict=True)),
        *(Bar(task, PERFORMER, 1.03) for task in TASKS),
        *(Bar(task, OURS, at_most, case=DECAY) for task, at_most in zip(TASKS, (1.4, 1.4, 1.6, 1.6), strict=True)),
        Bar("text", TRANSFORMER, 0.58),
        Bar("retrieval", TRANSFORMER, 0.23),
    ),
    "latency": (
        *(Bar(task, FORMULA, 1 / times) for task, times in zip(TASKS, (1.1, 1.7, 2.5, 2.5), strict=True)),
        *(Bar(task, PERFORMER, 1.03) for task in TASKS),
    ),
    "decode": (
        Bar("one token", "permuteformer at 100", 1.05, case="permuteformer at 100,000"),
        Bar("one token", "transformer at 16,384", 1 / 5, case="permuteformer at 16,384"),
        Bar("one token of 8,192", "hf-gpt2 at 100", 1.0, case="permuteformer at 100"),
    ),
}
"""By sweep."""

DOUBLING = 2.1
"""The most that causal attention may grow by where the length doubles."""


def worst_doubling(lines: Sequence[Mapping[str, Any]], from_length: int = 8192) -> float | None:
    """What our causal attention grew by at most, from one length to one twice as long."""
    ours = {line["length"]: line["result"]["seconds_best"] for line in lines if (line["group"], line["row"]) == (CURVE, OURS)}
    ratios = [ours[2 * n] / ours[n] for n in ours if n >= from_length and ours.get(2 * n) and ours[n]]
    return max(ratios, default=None)
