"""What is mounted where a path lies is read as Linux tells it, and not guessed where it does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dropq.storage import mounts
from dropq.storage.mounts import Mount, mount_of

TOP = "20 1 0:1 / / rw - ext4 /dev/vda rw\n"


def test_a_mount_is_found_by_its_device_or_its_mount_point(tmp_path: Path) -> None:
    number = os.stat(tmp_path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    inner = tmp_path / "a b"
    inner.mkdir()
    mounts = tmp_path / "mountinfo"

    def kind(path: Path, table: str) -> str | None:
        mounts.write_text(table)
        found = mount_of(str(path), str(mounts))
        return found.kind if found is not None else None

    assert kind(inner, f"{TOP}21 20 {device} / /elsewhere rw shared:1 master:2 - xfs /dev/vdb rw\n") == "xfs"
    outer, escaped = (str(path).replace(" ", "\\040") for path in (tmp_path, inner))
    nested = f"{TOP}21 20 0:2 / {outer} rw - btrfs x rw\n22 21 0:3 / {escaped} rw - nfs4 host:/x rw\n"
    assert kind(inner, nested) == "nfs4"
    assert kind(tmp_path, nested) == "btrfs"
    assert kind(inner, "nonsense\n") is None
    mounts.unlink()
    assert mount_of(str(inner), str(mounts)) is None


def test_of_several_mounts_of_one_device_the_nearest_and_latest_counts(tmp_path: Path) -> None:
    number = os.stat(tmp_path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    mounts = tmp_path / "mountinfo"
    escaped = str(tmp_path).replace(" ", "\\040")
    mounts.write_text(
        f"21 20 {device} / / rw,relatime - xfs /dev/vdb rw\n"
        f"22 20 {device} /a {escaped} rw - xfs /dev/vdb rw\n"
        f"23 20 {device} /a {escaped} ro,noexec - xfs /dev/v\\134b rw,noquota\n"
        f"24 20 {device} /b /elsewhere rw - xfs /dev/vdb rw\n"
    )
    found = mount_of(str(tmp_path), str(mounts))
    assert found == Mount("xfs", str(tmp_path), "/dev/v\\b", ("ro", "noexec", "rw", "noquota"))


def test_no_name_of_a_mount_takes_its_line_apart(tmp_path: Path) -> None:
    """Linux escapes blanks, tabs and ends of lines in names; other characters are white space only to Python."""
    (odd := tmp_path / "a\u2028b\x0bc\rd").mkdir()
    (table := tmp_path / "mountinfo").write_text(f"{TOP}21 20 0:9 / {odd} rw - tmpfs  rw,size=1k\n", newline="\n")
    assert mount_of(str(odd), str(table)) == Mount("tmpfs", str(odd), "", ("rw", "size=1k"))


def test_of_a_mount_that_is_not_above_the_path_only_the_disk_counts(tmp_path: Path) -> None:
    """As in a chroot, where the path's own mount is not listed, and another one of the same disk is."""
    number = os.stat(tmp_path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"21 20 0:1 / /proc rw - proc proc rw\n22 20 {device} /w /elsewhere ro,nosuid - ext4 /dev/vdb rw\n"
    )
    assert mount_of(str(tmp_path), str(mounts)) == Mount("ext4", "/", "/dev/vdb", ("rw",))
    mounts.write_text(f"22 20 {device} / /elsewhere ro - nfs server:/x rw,vers=3,nolock\n")
    found = mount_of(str(tmp_path), str(mounts))
    assert found is not None and found.keeps_locks and found.option("ro") is None


@pytest.mark.parametrize(
    ("kind", "options", "keeps"),
    [
        ("nfs", "rw,vers=3,nolock,proto=tcp", True),
        ("nfs", "rw,vers=3,local_lock=all", True),
        ("nfs4", "rw,local_lock=flock", True),
        ("nfs4", "rw,vers=4.2,local_lock=none", False),
        ("nfs4", "rw,vers=4.2,local_lock=posix", False),
        ("fuse.bindfs", "rw", True),
        ("fuse", "rw", True),
        ("cifs", "rw,nobrl", True),
        ("cifs", "rw", False),
        ("gfs2", "rw,localflocks", True),
        ("beegfs", "rw", True),
        ("9p", "rw", True),
        ("virtiofs", "rw", True),
        ("lustre", "rw,flock", False),
        ("ext4", "rw", False),
    ],
)
def test_locks_may_be_known_to_one_mount_alone_where_it_is_not_known_to_pass_them_on(
    kind: str, options: str, keeps: bool
) -> None:
    assert Mount(kind, options=tuple(options.split(","))).keeps_locks is keeps


def test_options_are_told_by_name() -> None:
    mount = Mount("nfs4", options=("rw", "vers=4.2", "hard"))
    assert (mount.option("vers"), mount.option("hard"), mount.option("soft")) == ("4.2", "", None)
    assert mount.shared and not Mount("ext4").shared


def test_this_machine_tells_what_is_mounted_here(tmp_path: Path) -> None:
    found = mount_of(str(tmp_path))
    assert (found is not None) == os.path.exists(mounts.MOUNTS)
    assert found is None or (str(tmp_path).startswith(found.point) and found.options)


def test_hosts_of_one_name_are_told_apart_by_their_machine_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def host_with(machine: str) -> str:
        (tmp_path / "machine-id").write_text(machine)
        return mounts.host.__wrapped__()

    monkeypatch.setattr(mounts, "_MACHINE", str(tmp_path / "machine-id"))
    one, other = host_with("one"), host_with("other")
    assert one != other
    assert host_with("one") == one
    assert one.startswith(f"{os.uname().nodename}-")
    (tmp_path / "machine-id").unlink()
    assert mounts.host.__wrapped__() not in (one, other)
