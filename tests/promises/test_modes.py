"""Files and folders are created with the modes and the group that the root or the queue says."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from helpers import Make, base, take

from dropq import Root, StorageError


def _another_group() -> int:
    if os.geteuid() == 0:
        return 4711
    others = [group for group in os.getgroups() if group != os.getegid()]
    if not others:
        pytest.skip("this user is in one group alone")
    return others[0]


@pytest.mark.host
@pytest.mark.parametrize("where_said", ["queue.toml", "dropq.toml"])
def test_modes_and_group_of_what_is_created(tmp_path: Path, where_said: str) -> None:
    group = _another_group()
    said: dict[str, Any] = {"file_mode": "0640", "dir_mode": "2770", "group": group, "durability": "none"}
    root = Root.create(tmp_path)
    if where_said == "dropq.toml":
        (tmp_path / "dropq.toml").write_text(
            f'format = 1\n[defaults]\nfile_mode = "0640"\ndir_mode = "2770"\ngroup = {group}\ndurability = "none"\n'
        )
        root, said = Root(tmp_path), {}
    queue = root.create_queue("q", **said)
    queue.send(b"a", properties={"long": "x" * 300})
    queue.send(b"b", delay="1h")
    with queue.writer() as out:
        out.write(b"c")
    source = tmp_path / "source"
    source.write_bytes(b"d")
    source.chmod(0o600)
    queue.send_file(source, move=True)
    take(queue).reject("r")
    messages = [path for state in ("target", "error", ".dropq/delayed") for path in (base(queue) / state).iterdir()]
    assert len(messages) == 4
    for path in messages:
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o640, group), path
    for path in [base(queue), *base(queue).rglob("*")]:
        if path.is_dir():
            assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o2770, group), path
    queue.close()


def mode(path: str) -> int:
    return os.stat(path).st_mode & 0o7777


def test_a_sign_of_life_has_the_modes_and_the_group_of_the_queue(make: Make) -> None:
    others = [group for group in os.getgroups() if group != os.getegid()]
    group = 65534 if os.geteuid() == 0 else others[0] if others else os.getegid()
    queue = make(file_mode="0660", dir_mode="2770", group=group)
    with queue.subscribe():
        [consumer] = os.scandir(queue.layout.consumers)
        assert mode(consumer.path) == 0o660
        assert consumer.stat().st_gid == group


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_private_folders_of_a_root_have_the_modes_of_the_root(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "root"
    path.mkdir()
    path.chmod(0o2775)
    before = os.umask(umask)
    try:
        layout = Root.create(path).layout
    finally:
        os.umask(before)
    assert [mode(folder) for folder in (layout.private, layout.meta)] == [0o2775] * 2
    assert [mode(file) for file in (layout.clock, layout.config_file)] == [0o664] * 2


def test_a_root_is_made_where_there_are_no_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fd: int, mode: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "fchmod", refused)
    Root.create(tmp_path / "root").create_queue("q").send(b"a")
    with pytest.raises(StorageError, match="was not made"):
        Root(tmp_path / "root").create_queue("private", file_mode=0o600, dir_mode=0o700)
