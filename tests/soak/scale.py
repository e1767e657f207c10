"""How much of the reliability tests is run: a little by default, all of it with ``-m soak``, times ``SOAK_SCALE``."""

import math
import os

import pytest

SCALE, SEED = float(os.environ.get("SOAK_SCALE", 1)), int(os.environ.get("SOAK_SEED", 0))


def sizes(full, short=1):
    """Return the parameters of a test whose size is a number of kills, steps, inputs and so on."""
    return [pytest.param(short, id="short"), pytest.param(math.ceil(full * SCALE), id="full", marks=pytest.mark.soak)]


def cases(names):
    """Return the parameters of a test with one case per name; the first one is run by default too."""
    return [pytest.param(names[0], id=f"short: {names[0]}"), *(pytest.param(name, id=str(name), marks=pytest.mark.soak) for name in names)]
