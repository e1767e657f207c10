"""Tables and figures of benchmarks."""

from permuteformer.bench.runner import BLANK
from permuteformer.report import bench


def line(row, seconds, *, group="bidirectional", length=None, status="finished", flops=None):
    result = {**BLANK, "status": status, "seconds_best": seconds, "seconds_median": seconds, "flops": flops}
    if seconds is not None:
        result |= {"seconds_spread": [seconds, 2 * seconds], "peak_memory_bytes": 7_000_000, "ready_memory_bytes": 5_000_000}
    return {"sweep": "ops", "group": group, "row": row, "length": length, "result": result}


LINES = [
    line("permuteformer", 0.002, flops=1e9),
    line("formula", 0.008),
    line("sdpa", None, status="out of memory"),
    line("matmul", 1.0, flops=1e12),
]


def test_comparison_tables_have_ratios_and_shares_of_matmul():
    (table,) = bench.comparison_tables(LINES)
    assert table.headers == ("", "best ms", "median", "slowest", "ratio", "extra MB", "of matmul")
    assert table.rows[0] == ("PermuteFormer", "2.00", "2.00", "4.00", "1.00×", "2.00", "50%")
    assert table.rows[1][:5] == ("formula, eager", "8.00", "8.00", "16.0", "4.00×")
    assert table.rows[2][:2] == ("softmax (SDPA)", "out of memory")
    assert {len(row) for row in table.rows} == {7}


def test_comparison_figures_have_a_row_per_case():
    (figure,) = bench.comparison_figures(LINES)
    assert "PermuteFormer" in figure.svg
    assert "matrix product<" not in figure.svg
    assert figure.png.startswith(b"\x89PNG")


def test_length_tables_have_the_exponent_and_figures_say_where_curves_end():
    lines = [
        *(line("permuteformer", n / 1e6, group="model", length=n, flops=1e6 * n) for n in (512, 1024, 2048, 4096)),
        *(line("transformer", n * n / 1e9, group="model", length=n) for n in (512, 1024, 2048)),
        line("transformer", None, group="model", length=4096, status="out of memory"),
        line("matmul", 1.0, group="matrix product", length=2048, flops=1e12),
    ]
    times, memory = bench.length_tables(lines)
    assert times.headers == memory.headers == ("tokens", "PermuteFormer", "Transformer")
    assert [row[0] for row in times.rows] == ["512", "1,024", "2,048", "4,096", "power of the length"]
    assert times.rows[-1][1:] == ("1.00", "2.00")
    assert times.rows[-2][2] == "out of memory"
    assert [row[1] for row in memory.rows] == ["7.00"] * 4
    (figure,) = bench.length_figures(lines)
    assert "Transformer out of memory at 4,096" in figure.caption
    assert bench.ROOFLINE in figure.svg
