"""The paper's numbers, as printed in its tables and its Figure 2, and the names that people read.

A number is (mean, standard deviation over runs), the latter None where the paper gives none. Accuracies are in percent.
"""

from __future__ import annotations

Number = tuple[float, float | None]

ROW_TITLES: dict[str, str] = {
    "transformer": "Transformer",
    "transformer-sinusoidal": "Transformer, sinusoidal positions",
    "reformer": "Reformer",
    "linformer": "Linformer",
    "nystromformer": "Nyströmformer",
    "performer": "Performer",
    "roformer": "RoFormer",
    "permuteformer": "PermuteFormer",
    "permuteformer-decay": "PermuteFormer with two-sided r",
    "permuteformer-1d": "PermuteFormer without 2D",
    "permuteformer-orthogonal": "PermuteFormer without Property 3",
    "performer-t5": "Performer, T5-style positions",
    "transformer-lm": "Transformer",
    "performer-lm": "Performer",
    "permuteformer-lm": "PermuteFormer",
    "permuteformer-lm-no-decay": "PermuteFormer without r",
    "permuteformer-lm-no-permutation": "PermuteFormer without P",
}
"""Rows for people, in the paper's order."""

COLUMN_TITLES: dict[str, str] = {
    "text": "Text",
    "retrieval": "Retrieval",
    "image": "Image",
    "pathfinder": "Pathfinder",
    "average": "Average",
    "lm": "Language model",
}
"""Columns for people, in the paper's order."""

TABLE1: dict[str, dict[str, Number]] = {
    "transformer": {
        "text": (63.99, 0.23),
        "retrieval": (80.02, 0.26),
        "image": (42.83, 1.42),
        "pathfinder": (72.40, 1.65),
        "average": (64.81, 0.55),
    },
    "transformer-sinusoidal": {
        "text": (64.06, 0.17),
        "retrieval": (79.81, 0.33),
        "image": (43.30, 1.52),
        "pathfinder": (73.00, 1.83),
        "average": (65.04, 0.60),
    },
    "reformer": {
        "text": (64.88, None),
        "retrieval": (78.64, None),
        "image": (43.29, None),
        "pathfinder": (69.36, None),
        "average": (64.04, None),
    },
    "linformer": {
        "text": (55.91, None),
        "retrieval": (79.37, None),
        "image": (37.84, None),
        "pathfinder": (67.60, None),
        "average": (60.18, None),
    },
    "nystromformer": {
        "text": (65.52, None),
        "retrieval": (79.56, None),
        "image": (41.58, None),
        "pathfinder": (70.94, None),
        "average": (64.40, None),
    },
    "performer": {
        "text": (63.95, 0.42),
        "retrieval": (79.82, 0.30),
        "image": (43.08, 1.74),
        "pathfinder": (72.63, 1.08),
        "average": (64.87, 0.53),
    },
    "roformer": {
        "text": (66.00, 0.17),
        "retrieval": (75.27, 0.55),
        "image": (26.16, 1.09),
        "pathfinder": (58.87, 0.26),
        "average": (56.57, 0.31),
    },
    "permuteformer": {
        "text": (65.95, 0.26),
        "retrieval": (80.66, 0.26),
        "image": (43.02, 0.52),
        "pathfinder": (72.91, 1.00),
        "average": (65.64, 0.30),
    },
    "permuteformer-1d": {
        "text": (65.95, 0.26),
        "retrieval": (80.66, 0.26),
        "image": (36.10, 0.95),
        "pathfinder": (65.72, 0.59),
        "average": (62.10, 0.29),
    },
    "permuteformer-orthogonal": {
        "text": (50.27, None),
        "retrieval": (70.62, None),
        "image": (10.00, None),
        "pathfinder": (50.05, None),
        "average": (45.24, None),
    },
}
"""Accuracy on Long-Range Arena, in percent; Reformer, Linformer and Nyströmformer are from Xiong et al. (2021)."""

TABLE2: dict[str, dict[str, Number]] = {
    "transformer": {"text": (622, None), "retrieval": (2404, None), "image": (26, None), "pathfinder": (180, None)},
    "reformer": {"text": (437, None), "retrieval": (1086, None), "image": (30, None), "pathfinder": (153, None)},
    "linformer": {"text": (323, None), "retrieval": (483, None), "image": (14, None), "pathfinder": (68, None)},
    "nystromformer": {"text": (332, None), "retrieval": (566, None), "image": (15, None), "pathfinder": (65, None)},
    "performer": {"text": (354, None), "retrieval": (553, None), "image": (13, None), "pathfinder": (61, None)},
    "permuteformer": {"text": (361, None), "retrieval": (550, None), "image": (13, None), "pathfinder": (62, None)},
    "performer-t5": {"text": (28585, None), "retrieval": (81070, None), "image": (3697, None), "pathfinder": (24601, None)},
}
"""Seconds that an epoch of training takes, on 8 V100 GPUs; that of T5-style positions is estimated."""

TABLE3: dict[str, dict[str, Number]] = {
    "transformer": {"text": (72.03, None), "retrieval": (20.23, None), "image": (3.28, None), "pathfinder": (3.89, None)},
    "reformer": {"text": (30.60, None), "retrieval": (13.57, None), "image": (13.44, None), "pathfinder": (13.49, None)},
    "linformer": {"text": (19.82, None), "retrieval": (4.33, None), "image": (3.31, None), "pathfinder": (4.20, None)},
    "nystromformer": {"text": (23.55, None), "retrieval": (9.28, None), "image": (7.01, None), "pathfinder": (9.14, None)},
    "performer": {"text": (30.20, None), "retrieval": (5.09, None), "image": (3.01, None), "pathfinder": (3.80, None)},
    "permuteformer": {"text": (31.18, None), "retrieval": (5.18, None), "image": (2.99, None), "pathfinder": (3.89, None)},
}
"""Milliseconds from a sample to its output."""

TABLE4: dict[str, dict[str, Number]] = {
    "transformer-lm": {"lm": (30.18, None)},
    "performer-lm": {"lm": (36.87, None)},
    "permuteformer-lm": {"lm": (32.49, None)},
    "permuteformer-lm-no-decay": {"lm": (35.76, None)},
    "permuteformer-lm-no-permutation": {"lm": (33.08, None)},
}
"""Perplexity on the test split of WikiText-103."""

# fmt: off
FIGURE2: dict[str, tuple[float, ...]] = {
    "transformer-lm": (
        207.49, 82.46, 53.75, 44.53, 39.86, 37.29, 35.65, 34.6, 33.95, 33.15,
        32.59, 32.32, 32.15, 31.71, 31.45, 31.32, 31.03, 31.03, 31.04, 30.78,
        30.74, 30.54, 30.66, 30.48, 30.46, 30.41, 30.3, 30.31, 30.05, 30.1,
        30.18,
    ),
    "performer-lm": (
        318.12, 171.05, 106.47, 79.76, 67.51, 59.17, 54.19, 50.67, 48.29, 46.53,
        44.52, 43.38, 42.66, 41.52, 40.88, 40.38, 40.01, 39.51, 39.3, 39.01,
        38.82, 38.28, 38.22, 37.79, 37.82, 37.53, 37.39, 37.13, 37.18, 36.9,
        36.87,
    ),
    "permuteformer-lm": (
        207.83, 92.74, 59.1, 48.27, 43.46, 40.23, 38.59, 37.49, 36.56, 35.78,
        35.17, 34.79, 34.79, 34.18, 33.96, 33.8, 33.43, 33.47, 33.26, 33.24,
        33.04, 32.91, 32.94, 32.78, 32.82, 32.85, 32.64, 32.57, 32.6, 32.53,
        32.49,
    ),
    "permuteformer-lm-no-decay": (
        300.64, 147.64, 92.68, 67.09, 55.54, 49.28, 46.19, 44.23, 42.6, 41.27,
        40.33, 39.71, 39.34, 38.72, 38.24, 37.9, 37.57, 37.29, 37.11, 37.12,
        36.89, 36.54, 36.59, 36.32, 36.18, 36.21, 36.02, 36.04, 35.79, 35.88,
        35.76,
    ),
    "permuteformer-lm-no-permutation": (
        229.12, 107.64, 68.17, 53.13, 47.01, 43.04, 40.66, 39.41, 38.18, 37.2,
        36.5, 36.02, 35.53, 35.14, 34.94, 34.69, 34.26, 34.23, 33.93, 33.96,
        33.8, 33.62, 33.58, 33.36, 33.54, 33.39, 33.33, 33.13, 33.14, 33.11,
        33.08,
    ),
}
"""Perplexity on the test split of WikiText-103 after each epoch, from the first to the 31st."""
# fmt: on

TABLES: dict[str, dict[str, dict[str, Number]]] = {"1": TABLE1, "2": TABLE2, "3": TABLE3, "4": TABLE4}
"""By number."""

UNITS = {"1": "%", "2": "s, on 8 V100 GPUs", "3": "ms", "4": "perplexity"}
"""Of the numbers of each."""


def published(table: str, row: str, column: str) -> Number | None:
    """The paper's number for a cell, if it has one.

    >>> published("1", "permuteformer", "text")
    (65.95, 0.26)
    """
    return TABLES.get(table, {}).get(row, {}).get(column)
