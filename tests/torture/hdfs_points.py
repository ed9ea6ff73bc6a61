"""How HDFS by its FUSE client differs from a disk, point by point: HDFS and the passthrough are both held to it.

Each point does something on a mount, and returns in words what came of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

Point = Callable[[Path, Path], str]
#: Each point, by what comes of it on HDFS.
POINTS: dict[Point, str] = {}


def _on_hdfs(answer: str) -> Callable[[Point], Point]:
    def known(point: Point) -> Point:
        POINTS[point] = answer
        return point

    return known


def differences(here: Path, there: Path) -> Iterator[str]:
    """Return in what a mount is not as HDFS is.

    Args:
        here: a folder on the mount.
        there: the same folder on another mount of the same file system.
    """
    for point, answer in POINTS.items():
        name = point.__name__.strip("_")
        (here / name).mkdir()
        if (found := point(here / name, there / name)) != answer:
            yield f"{point.__name__}: {found}, not {answer}"


@_on_hdfs("EIO, both as before")
def rename_to_a_name_that_is_taken(here: Path, there: Path) -> str:
    one, two = _file(here / "one", b"1"), _file(here / "two", b"2")
    said = _error(lambda: os.rename(one, two))
    return f"{said}, {'both as before' if (one.read_bytes(), two.read_bytes()) == (b'1', b'2') else 'changed'}"


@_on_hdfs("EIO, and it seems to be there")
def rename_of_what_another_client_took(here: Path, there: Path) -> str:
    one = _file(here / "one", b"1")
    os.rename(there / "one", there / "two")
    said = _error(lambda: os.rename(one, here / "three"))
    return f"{said}, and it seems to be {'there' if os.path.lexists(one) else 'gone'}"


@_on_hdfs("EIO")
def removal_of_what_another_client_removed(here: Path, there: Path) -> str:
    one = _file(here / "one", b"1")
    os.unlink(there / "one")
    return _error(lambda: os.unlink(one))


@_on_hdfs("EISDIR, where it was")
def rename_to_the_name_of_a_folder(here: Path, there: Path) -> str:
    file = _file(here / "file", b"1")
    (here / "folder").mkdir()
    said = _error(lambda: os.rename(file, here / "folder"))  # the kernel's word, where it knows that this is a folder
    return f"{said}, {'where it was' if file.exists() else 'elsewhere'}"


@_on_hdfs("EINVAL")
def rename_with_a_flag(here: Path, there: Path) -> str:
    from dropq.storage.system_calls import rename_noreplace

    _file(here / "one", b"1")
    return _error(lambda: rename_noreplace(f"{here}/one", f"{here}/two"))


@_on_hdfs("the same time")
def time_of_what_is_renamed(here: Path, there: Path) -> str:
    (here / "one").mkdir()  # the time of a file is set once more when it is finished
    os.utime(here / "one", (1e9, 1e9))
    os.rename(here / "one", here / "two")
    return "the same time" if os.stat(here / "two").st_mtime == 1e9 else "another time"


@_on_hdfs("whole seconds")
def grain_of_times(here: Path, there: Path) -> str:
    os.utime(here, ns=(10**18 + 5, 10**18 + 5))
    return "whole seconds" if os.stat(here).st_mtime_ns == 10**18 else "finer than seconds"


@_on_hdfs("EPERM ENOSYS")
def links(here: Path, there: Path) -> str:
    file = _file(here / "one", b"1")
    return " ".join(_error(partial(call, file, here / call.__name__)) for call in (os.link, os.symlink))


@_on_hdfs("locked here, locked there")
def locks_of_two_hosts(here: Path, there: Path) -> str:
    _file(here / "one", b"")
    with open(here / "one", "rb") as one, open(there / "one", "rb") as two:
        said = [_error(partial(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB)) for file in (one, two)]
    return ", ".join(f"{each or 'locked'} {where}" for each, where in zip(said, ("here", "there"), strict=True))


@_on_hdfs("0 of 5 bytes")
def size_before_its_end(here: Path, there: Path) -> str:
    fd = _opened(here / "one")
    try:
        os.write(fd, b"12345")
        return f"{os.stat(here / 'one').st_size} of 5 bytes"
    finally:
        os.close(fd)


@_on_hdfs("done, 0 of 5 bytes")
def sync_before_its_end(here: Path, there: Path) -> str:
    fd = _opened(here / "one")
    try:
        os.write(fd, b"12345")
        said = _error(lambda: os.fsync(fd)) or "done"
        return f"{said}, {os.stat(here / 'one').st_size} of 5 bytes"
    finally:
        os.close(fd)


@_on_hdfs("ENOTSUP")
def write_not_at_the_end(here: Path, there: Path) -> str:
    fd = _opened(here / "one")
    try:
        os.write(fd, b"12345")
        return _error(lambda: os.pwrite(fd, b"x", 2))
    finally:
        os.close(fd)


@_on_hdfs("cut")
def open_to_write(here: Path, there: Path) -> str:
    file = _file(here / "one", b"12345")
    os.close(os.open(file, os.O_WRONLY))
    return _now(there / "one")


@_on_hdfs("EBADF, as before")
def open_to_read_and_write(here: Path, there: Path) -> str:
    file = _file(here / "one", b"12345")
    fd = os.open(file, os.O_RDWR)
    try:
        said = _error(lambda: os.write(fd, b"x"))
    finally:
        os.close(fd)
    return f"{said}, {_now(there / 'one')}"


@_on_hdfs("done, as before")
def cut_to_a_length(here: Path, there: Path) -> str:
    file = _file(here / "one", b"12345")
    said = _error(lambda: os.truncate(file, 2)) or "done"
    return f"{said}, {_now(there / 'one')}"


@_on_hdfs("EINVAL, EIO, EINVAL")
def names_with_a_colon_or_too_long_or_no_text(here: Path, there: Path) -> str:
    names = (b"a:b", b"x" * 256, b"\xff")
    return ", ".join(_error(partial(_opened, os.fsencode(here) + b"/" + name)) for name in names)


@_on_hdfs("ENOTEMPTY")
def remove_a_folder_that_is_not_empty(here: Path, there: Path) -> str:
    (here / "folder").mkdir()
    _file(here / "folder/one", b"1")
    return _error(lambda: os.rmdir(here / "folder"))


@_on_hdfs("30 names")
def list_of_many_names(here: Path, there: Path) -> str:
    for number in range(30):  # HDFS tells them in several parts
        (here / f"{number}").mkdir()
    return f"{len(set(os.listdir(here)))} names"


def _opened(path: Path | bytes) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)


def _file(path: Path, content: bytes) -> Path:
    """Write a file, and wait until it is there for all."""
    from dropq.storage.files import Storage

    Storage("none").write_new(str(path), content)
    return path


def _now(file: Path) -> str:
    return "as before" if file.read_bytes() == b"12345" else "cut"


def _error(call: Callable[[], object]) -> str:
    """Return the name of the error that a call raises, "" if it raises none."""
    try:
        call()
    except OSError as error:
        return "ENOTSUP" if error.errno == errno.EOPNOTSUPP else errno.errorcode[error.errno or 0]
    return ""
