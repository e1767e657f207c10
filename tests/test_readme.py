"""The README's Python runs as it stands, in its order, and what it adds passes the contract checks."""

import re
from pathlib import Path

import checks
import pytest

from permuteformer import ATTENTIONS, FEATURE_MAPS, POSITIONS, build

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture
def namespace():
    """What the README's code defines; its registrations are taken back afterwards."""
    space: dict = {}
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        exec(compile(block, "README.md", "exec"), space)
    yield space
    POSITIONS.remove("alibi")
    ATTENTIONS.remove("mean")
    del FEATURE_MAPS["softplus"]


def test_the_blocks_run_and_their_additions_hold(namespace):
    assert namespace["y1"].shape == (2, 1, 512)
    assert namespace["positions"].shape == (1, 1024, 2)
    for attention in ("softmax", "linear"):
        for causal in (False, True):
            layer = build(attention, [("alibi", {})], hidden_size=32, num_heads=2, causal=causal).double()
            names = ["padding", "hidden_keys", "all_hidden", "batch", "packed", "relative", *(["causal", "resume"] if causal else [])]
            for name in names:
                checks.CHECKS[name](layer)
    layer = build("mean", hidden_size=32, num_heads=2).double()
    for name in ("padding", "hidden_keys", "all_hidden", "batch"):
        checks.CHECKS[name](layer)
    layer = build("linear", [("permute", {})], hidden_size=32, num_heads=2, causal=True, feature_map="softplus").double()
    for name in ("causal", "padding", "resume", "packed"):
        checks.CHECKS[name](layer)


def test_files_that_the_readme_names_are_there():
    text = README.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        assert (README.parent / link).exists(), f"README links to {link}"
    house = re.search(r"```\nsrc/permuteformer/\n(.*?)```", text, re.DOTALL).group(1)
    named = set(re.findall(r"[a-z0-9_]+\.py", house))
    there = {path.name for path in (README.parent / "src").rglob("*.py")} - {"__init__.py"}
    assert there <= named, f"not on the README's map: {there - named}"
    assert named - there == {"recall.py", "core.py"}
