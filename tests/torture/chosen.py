"""A plugin of pytest: run only chosen tests, in a given order, and write down how long each that passed took."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

#: Where the ids of the chosen tests are, as a list in JSON; and where a line goes for each test that passed.
CHOSEN, PASSED = "TORTURE_CHOSEN", "TORTURE_PASSED"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the chosen tests, in their order."""
    if CHOSEN not in os.environ:
        return
    chosen = {test: number for number, test in enumerate(json.loads(Path(os.environ[CHOSEN]).read_text()))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = sorted((item for item in items if item.nodeid in chosen), key=lambda item: chosen[item.nodeid])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down a test that passed, with its seconds."""
    if PASSED in os.environ and report.when == "call" and report.passed:
        with Path(os.environ[PASSED]).open("a") as passed:
            passed.write(json.dumps([report.nodeid, report.duration]) + "\n")
