"""On FUSE file systems that have nothing but rename; `make test-fuse` runs on them and on others at length."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers import until

from dropq.storage.files import Storage
from torture import fuse, hdfs_points
from torture.mounts import HDFS_LIKE, Kind, Mounted, mounted, needs, passthrough, second
from torture.table import NotRun, Options, Row

pytestmark = pytest.mark.host


def needed(kind: Kind) -> None:
    """Skip the test where a kind of file system cannot be mounted."""
    try:
        needs(kind)
    except NotRun as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    ("test", "kind"),
    [
        *((test, passthrough()) for test in fuse.SHORT_FORM),
        (fuse.every_verb, HDFS_LIKE),
        (fuse.killed_daemon, HDFS_LIKE),
    ],
    ids=lambda value: getattr(value, "name", None) or value.__name__,
)
def test_where_there_is_nothing_but_rename(
    tmp_path: Path, test: Callable[[Mounted, Row, Options], None], kind: Kind
) -> None:
    needed(kind)
    row = fuse.tested(test.__name__, Options(tmp_path, long=False), test, kind)
    if row.not_run:
        pytest.skip(row.not_run)
    assert row.good, "\n".join(row.wrong)
    assert row.cases > 0


def test_the_passthrough_is_like_hdfs_in_every_point(tmp_path: Path) -> None:
    needed(HDFS_LIKE)
    with mounted(HDFS_LIKE, tmp_path) as fs, second(fs) as other:
        assert list(hdfs_points.differences(fs.path, other.path)) == []


def test_what_another_client_took_is_gone_where_all_errors_are_the_same(tmp_path: Path) -> None:
    needed(HDFS_LIKE)
    storage = Storage()
    with mounted(HDFS_LIKE, tmp_path) as fs, second(fs) as other:

        def taken(name: str) -> str:
            fuse.written(fs.path / name, b"1")
            os.rename(other.path / name, other.path / f"{name}-taken")
            return str(fs.path / name)

        for act in (storage.rename, storage.move, storage.commit):
            path = taken(act.__name__)
            with pytest.raises(FileNotFoundError) as gone:
                act(path, f"{path}-ours")
            assert gone.value.filename == path


def test_a_file_that_is_renewed_keeps_its_content_where_to_open_for_writing_empties_it(tmp_path: Path) -> None:
    needed(HDFS_LIKE)
    with mounted(HDFS_LIKE, tmp_path) as fs:
        storage = Storage()
        storage.write_new(f"{fs.path}/marker", b"12345")
        assert storage.renew(f"{fs.path}/marker")
        assert not storage.renew(f"{fs.path}/gone")
        assert (fs.folders[0] / "marker").read_bytes() == b"12345"


def _closes_too_early(folder: Path) -> bool:
    early = folder / f"early-{time.monotonic_ns()}"
    early.write_bytes(b"12345")
    return early.stat().st_size == 0  # on a busy machine it may be finished by now


def test_a_file_is_whole_before_it_can_be_sent_where_a_close_returns_too_early(tmp_path: Path) -> None:
    needed(HDFS_LIKE)
    with mounted(HDFS_LIKE, tmp_path) as fs:
        until(partial(_closes_too_early, fs.path), "a file that is not whole when it is closed")
        storage = Storage()
        storage.write_new(f"{fs.path}/new", b"12345")
        storage.write_all(str(fs.path), ["one", "two"], [b"12345", b"12345"])
        storage.copy(__file__, f"{fs.path}/copy")
        sizes = {name: os.stat(fs.path / name).st_size for name in ("new", "one", "two", "copy")}
        assert sizes == {"new": 5, "one": 5, "two": 5, "copy": os.stat(__file__).st_size}
