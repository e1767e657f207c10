"""Records the reliability tests: with ``--record`` each of them appends one line to ``results/reliability/soak.jsonl``."""

import functools
import json
from pathlib import Path

import pytest
from soak.scale import SCALE, SEED
from train.conftest import whole

__all__ = ["whole"]

RECORD = Path(__file__).parents[2] / "results" / "reliability" / "soak.jsonl"


def pytest_addoption(parser):
    parser.addoption("--record", action="store_true", help="append one line per reliability test to results/reliability/soak.jsonl")


def pytest_configure(config):
    if config.getoption("--record") and not hasattr(config, "workerinput"):  # workers report to the main process
        config.pluginmanager.register(Recorder())


@pytest.fixture
def counts(record_property):
    """Return a dictionary of numbers for the record."""
    numbers = {}
    record_property("counts", numbers)
    return numbers


class Recorder:
    """A plugin of pytest."""

    @functools.cached_property
    def circumstances(self):
        from permuteformer.machine import environment

        found = environment()
        kept = {name: found[name] for name in ("python", "platform", "cores", "versions", "revision", "clean")}
        return {"date": found["started"][:10], "scale": SCALE, "seed": SEED, **kept}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            name, properties = report.nodeid.removeprefix("tests/soak/"), dict(report.user_properties)
            line = {"name": name, "outcome": report.outcome, "seconds": round(report.duration, 1), **properties, **self.circumstances}
            RECORD.parent.mkdir(exist_ok=True)
            with RECORD.open("a") as file:
                file.write(json.dumps(line) + "\n")
