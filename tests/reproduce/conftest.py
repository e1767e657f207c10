import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache of one's own, also for the processes that are started."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    for name in ("PERMUTEFORMER_DATA", "PERMUTEFORMER_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return folder
