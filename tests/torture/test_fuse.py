"""On a FUSE file system that has nothing but rename; `make test-fuse` runs on it and on others at length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torture import fuse
from torture.mounts import Mounted, needs, passthrough
from torture.table import NotRun, Options, Row


@pytest.mark.parametrize("test", fuse.SHORT_FORM)
def test_where_there_is_nothing_but_rename(tmp_path: Path, test: Callable[[Mounted, Row, Options], None]) -> None:
    kind = passthrough()
    try:
        needs(kind)
    except NotRun as reason:
        pytest.skip(str(reason))
    row = fuse.tested(test.__name__, Options(tmp_path, long=False), test, kind)
    if row.not_run:
        pytest.skip(row.not_run)
    assert row.good, "\n".join(row.wrong)
    assert row.cases > 0
