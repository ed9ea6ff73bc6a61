"""Fixtures for pytest, for tests of your own handlers: `from dropq.testing import root`.

`pytest_plugins = ["dropq.testing"]` in a conftest.py gives them to all tests below it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dropq.api import Root

__all__ = ["root"]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Return an empty root in `tmp_path`, which pytest removes; its queues do not sync, so that tests are quick."""
    made = Root.create(tmp_path / "root")
    with open(made.layout.config_file, "a") as config:
        config.write('[defaults]\ndurability = "none"\n')
    return Root(made.path)
