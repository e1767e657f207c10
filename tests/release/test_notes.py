"""The version stands in one place, and what else names it agrees."""

import sys
from pathlib import Path

import yaml

import permuteformer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "release"))
import distributions  # noqa: E402
import notes  # noqa: E402


def test_version_citation_and_changelog_agree():
    assert distributions.version() == permuteformer.__version__
    assert notes.disagreements(permuteformer.__version__) == []
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


def test_what_does_not_agree_is_said(tmp_path):
    (tmp_path / "CITATION.cff").write_text("version: 1.0.0\n")
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.0.1] - 2026\n\n- Mended.\n\n## [1.0.0] - 2025\n\n- Made.\n")
    assert notes.section("1.0.1", tmp_path) == "- Mended."
    assert notes.section("1.0.0", tmp_path) == "- Made."
    found = notes.disagreements("1.0.1", tmp_path)
    assert any("version.py says" in line for line in found)
    assert "the release is 1.0.1, and CITATION.cff says 1.0.0" in found
    assert "CHANGELOG.md has no section [2.0.0], or nothing is in it" in notes.disagreements("2.0.0", tmp_path)
    assert "CHANGELOG.md has no section [Unreleased], or nothing is in it" in notes.disagreements("2.0.0.dev1", tmp_path)


def test_the_citation_is_of_the_paper():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert cited["license"] == "Apache-2.0"
    paper = cited["preferred-citation"]
    assert paper["title"].startswith("PermuteFormer")
    assert paper["year"] == 2021
    assert paper["authors"][0]["family-names"] == "Chen"
