"""Caches of tests are their own, and hold nothing of another test."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    for name in ("PERMUTEFORMER_DATA", "PERMUTEFORMER_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return folder
