"""One report for all tests that only look at it."""

import pytest
from report.sample import some

from permuteformer.report import build_report
from permuteformer.report.write import write_folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return some(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def report(data):
    return build_report(data)


@pytest.fixture(scope="session")
def folder(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "report"
    write_folder(report, path)
    return path
