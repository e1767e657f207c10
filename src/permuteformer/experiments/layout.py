"""File names of run folders and results: training writes them, reports read them."""

from __future__ import annotations

RUN_FORMAT = 2
"""Version of the layout of run folders."""
FORMAT = 1
"""Version of the layout of results files."""

EXPERIMENT = "experiment.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"
ATTENTION_MAPS = "attention_maps.json"
LOG = "log.txt"
CHECKPOINTS = "checkpoints"

RESULTS = "results.jsonl"
"""Results of many runs."""
RESULTS_MAPS = "attention_maps.jsonl"
"""Attention maps of many runs."""
