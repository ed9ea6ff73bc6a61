"""A file system that has little more than a rename: `python passthrough.py BACKING MOUNT [--offers ...] [--taken EIO]`.

It shows a folder as HDFS and the like show theirs: no links, no locks, no flags of a rename, no modes and no inode
numbers that outlive the mount; a name that is taken is never replaced, and the kernel remembers names and attributes
for a minute. Whatever is offered is passed on as it is.

With `--hdfs` it does all else, too, as HDFS does by its FUSE client, to which hdfs_points.py holds it.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from mfusepy import FUSE

#: What may be offered: hard links, locks (of this mount alone, or of all), modes and times, replacing renames.
OFFERS = ("links", "local-locks", "shared-locks", "modes", "replaces")
#: Seconds for which the kernel may remember names and attributes, which is what HDFS's own client says.
REMEMBERED = 60
#: Bytes of the longest name that HDFS makes.
LONGEST = 255
#: How the kernel asks for a file's time to be now, in ns.
NOW = (1 << 30) - 1
#: Seconds that a file takes to be finished after its close(), where that is late.
FINISHES = 0.02
_TIMES = {"st_atime": "st_atime_ns", "st_mtime": "st_mtime_ns", "st_ctime": "st_ctime_ns"}
_KEPT = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")


class Passthrough:
    """What the kernel asks of the file system, one method each."""

    use_ns = True

    def __init__(self, backing: str, offers: frozenset[str], taken: int) -> None:
        self._backing = backing
        self._offers = offers
        self._taken = taken
        self._one_at_a_time = threading.Lock()
        if "local-locks" not in offers:  # the kernel keeps locks itself for those that have no such method
            self.flock = self._flock

    def _at(self, path: str) -> str:
        return self._backing + path

    def _need(self, offer: str, otherwise: int) -> None:
        if offer not in self._offers:
            raise OSError(otherwise, os.strerror(otherwise))

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, int]:
        found = os.lstat(self._at(path)) if path is not None else os.fstat(fh or 0)
        attributes = {name: int(getattr(found, name)) for name in _KEPT}
        attributes |= {name: getattr(found, exact) for name, exact in _TIMES.items()}
        if "modes" not in self._offers and stat.S_ISREG(found.st_mode):
            attributes["st_mode"] = stat.S_IFREG | 0o644
        return attributes

    def readdir(self, path: str, fh: int) -> Iterator[str]:
        yield from (".", "..", *os.listdir(self._at(path)))

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def rename(self, old: str, new: str) -> None:
        with self._one_at_a_time:
            if "replaces" not in self._offers and os.path.lexists(self._at(new)):
                os.lstat(self._at(old))
                raise OSError(self._taken, os.strerror(self._taken))
            os.rename(self._at(old), self._at(new))

    def link(self, target: str, source: str) -> None:
        self._need("links", errno.EPERM)
        os.link(self._at(source), self._at(target))

    def chmod(self, path: str, mode: int) -> None:
        self._need("modes", errno.ENOSYS)
        os.chmod(self._at(path), mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        self._need("modes", errno.ENOSYS)
        os.chown(self._at(path), uid, gid)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        self._need("modes", errno.ENOSYS)
        read, changed = (time.time_ns() if at == NOW else at for at in times or (NOW, NOW))
        os.utime(self._at(path), ns=(read, changed))

    def create(self, path: str, mode: int, info: Any = None) -> int:
        mode = mode if "modes" in self._offers else 0o644
        with self._one_at_a_time:
            return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._at(path), length)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)

    def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
        """Say that it is done, as those do that have nothing to sync."""

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        return {name: getattr(found, name) for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail")}

    def _flock(self, path: str, fh: int, operation: int) -> None:
        self._need("shared-locks", errno.ENOLCK)
        fcntl.flock(fh, operation | fcntl.LOCK_NB)


class LikeHdfs(Passthrough):
    """What the kernel asks of HDFS's FUSE client, where that answers in another way."""

    def __init__(self, backing: str, offers: frozenset[str], taken: int) -> None:
        super().__init__(backing, offers, taken)
        self._unfinished: Counter[int] = Counter()  # inodes of files that are written
        self._writing: dict[int, int] = {}  # the inode of each open file that is written

    def _at(self, path: str) -> str:
        name = os.path.basename(path)
        if not name.isprintable() and "\udc80" <= max(name) <= "\udcff":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super()._at(path)

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, int]:
        if len(os.fsencode(os.path.basename(path or ""))) > LONGEST:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        attributes = super().getattr(path, fh)
        if stat.S_ISREG(attributes["st_mode"]):
            inode = os.lstat(self._at(path)).st_ino if path is not None else os.fstat(fh or 0).st_ino
            attributes["st_size"] = 0 if self._unfinished[inode] else attributes["st_size"]
            attributes["st_ctime"] = attributes["st_mtime"]  # a rename changes no time
        for name in _TIMES:
            attributes[name] = attributes[name] // 10**9 * 10**9
        return attributes

    def rename(self, old: str, new: str) -> None:
        """Rename a file; whatever is the matter is EIO, also that another client took the file."""
        try:
            super().rename(old, new)
        except OSError:
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from None

    def unlink(self, path: str) -> None:
        """Remove a file; that another client did so is EIO."""
        try:
            super().unlink(path)
        except OSError:
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from None

    def create(self, path: str, mode: int, info: Any = None) -> int:
        name = os.path.basename(path)
        if ":" in name:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if len(os.fsencode(name)) > LONGEST:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._to_write(os.open(self._at(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode))

    def open(self, path: str, flags: int) -> int:
        access = flags & os.O_ACCMODE
        if access == os.O_RDONLY or access == os.O_RDWR:
            return os.open(self._at(path), os.O_RDONLY)
        how = os.O_APPEND if flags & os.O_APPEND else os.O_TRUNC
        return self._to_write(os.open(self._at(path), os.O_WRONLY | how))

    def _to_write(self, fh: int) -> int:
        inode = os.fstat(fh).st_ino
        self._unfinished[inode] += 1
        self._writing[fh] = inode
        return fh

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        if fh not in self._writing:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if os.lseek(fh, 0, os.SEEK_END) != offset:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        return os.write(fh, data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        """Cut to nothing; say that it is done for any other length."""
        if length == 0:
            os.truncate(self._at(path), 0)

    def release(self, path: str, fh: int) -> None:
        """Finish a file; the kernel does not wait for it."""
        inode = self._writing.pop(fh, None)
        if inode is not None:
            time.sleep(FINISHES)
            self._unfinished[inode] -= 1
        os.close(fh)


class _Mounted(FUSE):  # type: ignore[misc, unused-ignore]
    def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
        if flags:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return int(self.rename_fuse_2(old, new) or 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backing")
    parser.add_argument("mount")
    parser.add_argument("--offers", nargs="*", default=[], choices=OFFERS)
    parser.add_argument("--hdfs", action="store_true", help="be like HDFS in all that hdfs_points.py lists")
    parser.add_argument("--taken", default="EEXIST", help="what a rename to a name that is taken says")
    asked = parser.parse_args()
    kind = LikeHdfs if asked.hdfs else Passthrough
    shown = kind(os.path.abspath(asked.backing), frozenset(asked.offers), getattr(errno, asked.taken))
    remembered = {"attr_timeout": REMEMBERED, "entry_timeout": REMEMBERED}
    _Mounted(shown, asked.mount, foreground=True, fsname="dropq-test", subtype="passthrough", **remembered)


if __name__ == "__main__":
    main()
