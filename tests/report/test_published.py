"""The paper's numbers agree with the averages and ratios that it prints."""

import math

import pytest

from permuteformer.experiments.published import COLUMN_TITLES, FIGURE2, TABLES
from permuteformer.presets import ROW_TITLES

TASKS = ("text", "retrieval", "image", "pathfinder")


@pytest.mark.parametrize("row", TABLES["1"])
def test_averages_of_table_1_are_means_of_its_columns(row):
    means, deviations = zip(*(TABLES["1"][row][task] for task in TASKS), strict=True)
    average, deviation = TABLES["1"][row]["average"]
    assert average == pytest.approx(sum(means) / 4, abs=0.0101)  # all five are rounded
    if deviation is None:
        assert deviations == (None,) * 4
    else:  # as of independent runs
        assert deviation == pytest.approx(math.hypot(*deviations) / 4, abs=0.0051)


RATIOS = {
    "reformer": ((0.70, 0.45, 1.15, 0.85), (0.42, 0.67, 4.10, 3.47)),
    "linformer": ((0.52, 0.20, 0.54, 0.38), (0.28, 0.21, 1.01, 1.08)),
    "nystromformer": ((0.53, 0.24, 0.58, 0.36), (0.33, 0.46, 2.14, 2.35)),
    "performer": ((0.57, 0.23, 0.50, 0.34), (0.42, 0.25, 0.92, 0.98)),
    "permuteformer": ((0.58, 0.23, 0.50, 0.34), (0.43, 0.26, 0.91, 1.00)),
}


@pytest.mark.parametrize("row", RATIOS)
def test_ratios_of_tables_2_and_3(row):
    for table, ratios in zip((TABLES["2"], TABLES["3"]), RATIOS[row], strict=True):
        for task, ratio in zip(TASKS, ratios, strict=True):
            assert table[row][task][0] / table["transformer"][task][0] == pytest.approx(ratio, abs=0.0051)


def test_figure_2_ends_at_table_4():
    assert set(FIGURE2) == set(TABLES["4"])
    for row, values in FIGURE2.items():
        assert len(values) == 31
        assert values[-1] == TABLES["4"][row]["lm"][0]


def test_every_row_and_column_has_a_title():
    for table in TABLES.values():
        assert set(table) <= set(ROW_TITLES)
        assert {column for row in table.values() for column in row} <= set(COLUMN_TITLES)
