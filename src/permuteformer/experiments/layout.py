"""The files of a run folder, and the number of their layout: training writes them, reports read them."""

from __future__ import annotations

FORMAT = 1
"""Of run folders and of results files. Another number is another layout."""

EXPERIMENT, ENVIRONMENT, METRICS, RESULT, LOOKS, LOG = (
    "experiment.json",
    "environment.json",
    "metrics.jsonl",
    "result.json",
    "looks.json",
    "log.txt",
)
CHECKPOINTS = "checkpoints"

RESULTS, LOOKS_OF_RESULTS = "results.jsonl", "looks.jsonl"
"""Of many runs together."""
