"""Progress bars, and trackers."""

import io
import re
from functools import partial

import pytest
from processes import UPDATE, Command, signal_at
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train.runs import record, terminal_output, tiny, words

from permuteformer.train.log import Display


def screen(raw):
    """Return the lines that a terminal showed at any time."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw)
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


def test_bars_with_large_numbers_fit_80_columns():
    out = io.StringIO()
    with Display(50_000, "perplexity", False, Console(file=out, width=80, force_terminal=True)) as display:
        display.step(49_998, 12.3456, 9.87e5, 79_900_000_000)
        with display.evaluating("validation", 123_456) as advance:
            advance(200_000)
            display._bars.refresh()
        display.evaluated("validation", 1.5, {"perplexity": 12345.678, "loss": 9.421}, True)
        display.step(49_999, 12.3456, 9.87e5, 79_900_000_000)
        display._bars.refresh()
    shown = screen(out.getvalue())
    assert not [line for line in shown if "…" in line or len(line) > 80]
    assert any("123456/123456" in line for line in shown), "no more items than there are"
    assert "validation, epoch 1.50: perplexity 1.235e+04, loss 9.421 (best)" in shown
    assert any(re.fullmatch(r"training ━+[╸╺]?━* 49999/50000 \S+ left", line) for line in shown), shown
    assert "loss 12.3456 · perplexity 1.235e+04 · 987 k tokens/s · 79.9 GB" in shown


def test_bars_fit_a_terminal_of_80_columns(tmp_path):
    shown, _ = terminal_output(*words(tiny(steps=30)), "--output", tmp_path / "run", stream=2)
    bars = [line for line in screen(shown.decode()) if "━" in line or "tokens/s" in line]
    assert not [line for line in bars if "…" in line or len(line) > 80]
    assert any(re.fullmatch(r"training ━+ 30/30 0:00:00 left", line) for line in bars)
    assert any(re.fullmatch(r"loss \d\.\d{4} · accuracy 0\.\d+ · [\d,.]+( k)? tokens/s · [\d.]+ [MG]B", line) for line in bars)


def test_quiet_run_prints_nothing(tmp_path):
    assert Command(*words(tiny(steps=2)), "--quiet", "--output", tmp_path / "run").end() == ""


def test_tensorboard_has_the_metrics_of_every_step_once_after_a_kill(tmp_path):
    folder = tmp_path / "run"
    command = words(tiny("lm", steps=13, evaluate_every=4, test_lengths=(96,)))
    killed = Command(*command, "--output", folder, before=partial(signal_at, name=UPDATE, number=11))
    assert killed.wait() == [-9], killed.text  # logged until step 10, saved at 8
    Command("resume", folder).end()
    seen, lines = EventAccumulator(str(folder / "tensorboard" / "permuteformer")).Reload(), record(folder, "train")
    assert [line["step"] for line in lines] == list(range(1, 14))
    for name in ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "seconds", "memory_bytes"):
        points = [(point.step, point.value) for point in seen.Scalars(f"train/{name}")]
        assert points == [(line["step"], pytest.approx(line[name])) for line in lines]
    for title, event in (("validation", "evaluation"), ("test", "test"), ("test at 96 tokens", "length")):
        points = [(point.step, point.value) for point in seen.Scalars(f"{title}/perplexity")]
        assert points == [(line["step"], pytest.approx(line["metrics"]["perplexity"])) for line in record(folder, event)]
