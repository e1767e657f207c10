"""Language models of WikiText-103 with the paper's sizes and budgets: table 4, figure 2, and the table of lengths."""

from __future__ import annotations

from typing import Any

from permuteformer.experiments.plan import Column, Table

ROWS = ("transformer-lm", "performer-lm", "permuteformer-lm", "permuteformer-lm-no-decay", "permuteformer-lm-no-permutation")
"""Table 4, in the paper's order."""

LENGTH, CONTEXT = 512, 256

OPTIMIZER: dict[str, Any] = {
    "batch_size": 128,  # 65,536 tokens
    "micro_batch_size": 4,  # scores of 512 x 267,744 words are half a GB an item
    "evaluation_batch_size": 4,
    "steps": 50_000,
    "learning_rate": 5e-4,
    "warmup_steps": 4000,
    "warmup_from": 1e-7,
    "adam_beta2": 0.98,
    "weight_decay": 0.01,
}
"""fairseq's recipe, which the paper follows."""


def longer(length: int) -> tuple[int, ...]:
    """Lengths of the table of lengths: 2, 4, 8 and 16 times the trained one."""
    return tuple(length * times for times in (2, 4, 8, 16))


TABLE4 = Table(
    name="4",
    title="perplexity of language models on WikiText-103",
    rows=ROWS,
    columns=(
        Column(
            name="lm",
            task="wikitext-103",
            model="{row}",
            task_options={"length": LENGTH, "context": CONTEXT},
            settings={**OPTIMIZER, "test_lengths": longer(LENGTH)},
        ),
    ),
)

ALSO = {"figure2": "4", "length": "4"}
"""What is drawn from table 4's runs."""
