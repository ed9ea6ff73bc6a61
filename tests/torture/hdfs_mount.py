"""HDFS as its own FUSE client shows it: `python hdfs_mount.py JARS NAMENODE FOLDER MOUNT [--remember SECONDS]`.

fuse-dfs is written in C, and no package registry has it. This is the same mapping: each call of the kernel becomes the
calls of Hadoop's own Java client that fuse-dfs makes, with its gaps. It writes only at the end of a file, has no fsync
and no links, opens for writing by making the file anew, and finishes a file after the close() has returned.
"""

from __future__ import annotations

import argparse
import errno
import functools
import grp
import itertools
import os
import pwd
import re
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from mfusepy import FUSE, fuse_version_major
from py4j.java_gateway import (  # type: ignore[import-untyped, unused-ignore]
    GatewayParameters,
    JavaGateway,
    launch_gateway,
)
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped, unused-ignore]

from dropq.spark.session import find_java

#: Seconds for which the kernel remembers names and attributes, unless fuse-dfs is told otherwise.
REMEMBERED = 60
#: What Hadoop 2.7 opens by reflection, which newer Javas keep closed.
_OPENED = ("java.lang", "java.net", "java.nio", "java.util", "sun.nio.ch")
#: How the kernel asks for a file's time to be now, in ns.
NOW = (1 << 30) - 1
#: What an exception of Hadoop's becomes, as in libhdfs; all others are EIO.
_ERRORS = {
    "FileNotFoundException": errno.ENOENT,
    "AccessControlException": errno.EACCES,
    "FileAlreadyExistsException": errno.EEXIST,
    "ParentNotDirectoryException": errno.ENOTDIR,
    "PathIsNotEmptyDirectoryException": errno.ENOTEMPTY,
    "IllegalArgumentException": errno.EINVAL,
    "InvalidPathException": errno.EINVAL,
    "UnsupportedOperationException": errno.ENOTSUP,
    "QuotaExceededException": errno.EDQUOT,
}
#: What is known of a file, in the words of Hadoop's client; one question for all of it.
_STATUS = re.compile(
    r"isDirectory=(?P<folder>true|false)(?:; length=(?P<length>\d+);.*?)?; modification_time=(?P<changed>\d+); "
    r"access_time=(?P<read>\d+); owner=(?P<owner>.*?); group=(?P<group>.*?); permission=(?P<mode>[-a-zA-Z]{9})"
)


class Java:
    """A Java that ends with this process.

    Args:
        jars: Hadoop's jars, and those that they need.
        memory: of its heap, as Java has it.
        also: a folder of classes and settings that come before the jars.
    """

    def __init__(self, jars: Path, *, memory: str = "256m", also: Path | None = None) -> None:
        opened = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED]
        options = [f"-Xmx{memory}", "-XX:+UseSerialGC", *opened]
        classes = ":".join([*([str(also)] if also else []), f"{jars}/*"])
        java = os.path.join(find_java().home, "bin", "java")
        self._port, self._process = launch_gateway(
            classpath=classes, javaopts=options, java_path=java, die_on_exit=True, return_proc=True,
            redirect_stdout=None, redirect_stderr=None,
        )  # fmt: skip
        self._gateway = JavaGateway(gateway_parameters=GatewayParameters(port=self._port, auto_convert=True))
        self.jvm: Any = self._gateway.jvm

    def __enter__(self) -> Java:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)

    def configured(self, **settings: object) -> Any:
        """Return a configuration of Hadoop's with these settings."""
        configuration = self.jvm.org.apache.hadoop.conf.Configuration()
        for name, value in settings.items():
            configuration.set(name, str(value))
        return configuration

    def words(self, *words: str) -> Any:
        """Return an array of strings."""
        array = self._gateway.new_array(self.jvm.java.lang.String, len(words))
        for index, word in enumerate(words):
            array[index] = word
        return array

    def client(self, namenode: str) -> Any:
        """Return a new client of a file system, which shares nothing with others."""
        return self.jvm.org.apache.hadoop.fs.FileSystem.newInstance(
            self.jvm.java.net.URI(namenode), self.configured(**{"fs.hdfs.impl.disable.cache": "true"})
        )


def _with_errnos(methods: type) -> type:
    """Let each method raise an errno for what Hadoop's client raises."""
    for name, method in list(vars(methods).items()):
        if not name.startswith("_") and callable(method):
            setattr(methods, name, _with_errno(method))
    return methods


def _with_errno(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Py4JJavaError as error:
            raised = str(error.java_exception.getClass().getSimpleName())
            if raised == "RemoteException":  # a server's exception of a kind that the client does not know
                raised = str(error.java_exception.getClassName()).rpartition(".")[2]
            number = _ERRORS.get(raised, errno.EIO)
            raise OSError(number, os.strerror(number)) from None

    return called


@_with_errnos
class HdfsFiles:
    """What the kernel asks of the file system, one method each; what is missing here, fuse-dfs does not have."""

    use_ns = True

    def __init__(self, java: Java, namenode: str, folder: str) -> None:
        self._jvm = java.jvm
        self._fs = java.client(namenode)
        self._folder = folder.rstrip("/")
        self._fs.mkdirs(self._at("/"))
        self._open: dict[int, tuple[Any, bool, threading.Lock]] = {}
        self._numbers = itertools.count(1)

    def _at(self, path: str) -> Any:
        try:
            path.encode()
        except UnicodeEncodeError:  # HDFS keeps names in UTF-8
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from None
        return self._jvm.org.apache.hadoop.fs.Path(f"{self._folder}{path}".rstrip("/") or "/")

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        try:
            status = _STATUS.search(self._fs.getFileStatus(self._at(path)).toString())
        except Py4JJavaError as error:
            if error.java_exception.getClass().getSimpleName() in ("IllegalArgumentException", "InvalidPathException"):
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
            raise
        assert status is not None
        is_folder = status["folder"] == "true"
        changed = int(status["changed"]) // 1000 * 10**9  # libhdfs tells whole seconds
        return {
            "st_mode": (stat.S_IFDIR if is_folder else stat.S_IFREG) | _mode(status["mode"]),
            "st_nlink": 2 if is_folder else 1,
            "st_size": 4096 if is_folder else int(status["length"]),
            "st_uid": _id(pwd.getpwnam, status["owner"]),
            "st_gid": _id(grp.getgrnam, status["group"]),
            "st_mtime": changed,
            "st_ctime": changed,
            "st_atime": int(status["read"]) // 1000 * 10**9,
        }

    def readdir(self, path: str, fh: int) -> list[str]:
        found = self._fs.listStatus(self._at(path))
        return [".", "..", *(str(one.getPath().getName()) for one in found)]

    def mkdir(self, path: str, mode: int) -> None:
        _done(self._fs.mkdirs(self._at(path)))
        self.chmod(path, mode)

    def rmdir(self, path: str) -> None:
        if len(self._fs.listStatus(self._at(path))):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        _done(self._fs.delete(self._at(path), True))  # a file that comes in between goes with it

    def unlink(self, path: str) -> None:
        _done(self._fs.delete(self._at(path), True))

    def rename(self, old: str, new: str) -> None:
        _done(self._fs.rename(self._at(old), self._at(new)))

    def chmod(self, path: str, mode: int) -> None:
        short = mode & 0o1777
        self._fs.setPermission(self._at(path), self._jvm.org.apache.hadoop.fs.permission.FsPermission(f"{short:o}"))

    def chown(self, path: str, uid: int, gid: int) -> None:
        owner = None if uid in (-1, 2**32 - 1) else pwd.getpwuid(uid).pw_name
        group = None if gid in (-1, 2**32 - 1) else grp.getgrgid(gid).gr_name
        self._fs.setOwner(self._at(path), owner, group)

    def utimens(self, path: str, times: tuple[int, int]) -> None:
        # "Now" comes as a number of its own; the FUSE that fuse-dfs is built with has this host's time in its place.
        read, changed = (int(time.time() if at == NOW else at // 10**9) * 1000 for at in times)
        self._fs.setTimes(self._at(path), changed, read)

    def create(self, path: str, mode: int, info: Any = None) -> int:
        """Make a file anew, whether it is there or not: HDFS's client in C knows no O_EXCL."""
        number = self._keep(self._fs.create(self._at(path), True), writes=True)
        self.chmod(path, mode)
        return number

    def open(self, path: str, flags: int) -> int:
        access = flags & os.O_ACCMODE
        if access == os.O_RDONLY or (access == os.O_RDWR and self._fs.exists(self._at(path))):
            return self._keep(self._fs.open(self._at(path)), writes=False)
        if flags & os.O_APPEND:
            return self._keep(self._fs.append(self._at(path)), writes=True)
        return self._keep(self._fs.create(self._at(path), True), writes=True)

    def _keep(self, stream: Any, *, writes: bool) -> int:
        number = next(self._numbers)
        self._open[number] = stream, writes, threading.Lock()
        return number

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        stream, writes, lock = self._open[fh]
        if writes:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        with lock:
            stream.seek(offset)
            limited = self._jvm.org.apache.commons.io.input.BoundedInputStream(stream, size)
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(limited))

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        stream, writes, lock = self._open[fh]
        if not writes:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        with lock:
            if stream.getPos() != offset:
                raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
            stream.write(data)
        return len(data)

    def flush(self, path: str, fh: int) -> None:
        """Do what a close() waits for: of a file that is written, whole chunks are sent, and no more."""
        stream, writes, lock = self._open[fh]
        if writes:
            with lock:
                stream.flush()

    def release(self, path: str, fh: int) -> None:
        """Finish a file; the kernel asks for it, and does not wait."""
        stream, _, _ = self._open.pop(fh)
        stream.close()

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        """Make a file anew if it is to be empty; say that any other length is done."""
        if length == 0:
            self.unlink(path)
            self._fs.create(self._at(path), True).close()

    def statfs(self, path: str) -> dict[str, int]:
        found = self._fs.getStatus()
        size = 4096
        whole, left = int(found.getCapacity()) // size, int(found.getRemaining()) // size
        return {"f_bsize": size, "f_frsize": size, "f_blocks": whole, "f_bfree": left, "f_bavail": left}


class _Mounted(FUSE):  # type: ignore[misc, unused-ignore]
    def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
        if flags:  # fuse-dfs is built with a FUSE that has none
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return int(self.rename_fuse_2(old, new) or 0)


def _done(answer: object) -> None:
    """Raise EIO for a False, as libhdfs does, whatever was the matter."""
    if not answer:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _mode(letters: str) -> int:
    bits = sum(1 << bit for bit, letter in enumerate(reversed(letters)) if letter not in "-T")
    return bits | (stat.S_ISVTX if letters[-1] in "tT" else 0)


def _id(find: Any, name: str) -> int:
    try:
        found: int = find(name)[2]
    except KeyError:
        return 99  # whom the system does not know is nobody, to fuse-dfs
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("jars", type=Path)
    parser.add_argument("namenode")
    parser.add_argument("folder")
    parser.add_argument("mount")
    parser.add_argument("--remember", type=int, default=REMEMBERED)
    asked = parser.parse_args()
    with Java(asked.jars) as java:
        shown = HdfsFiles(java, asked.namenode, asked.folder)
        options = {"attr_timeout": asked.remember, "entry_timeout": asked.remember}
        if fuse_version_major == 2:  # a file that is emptied is opened so, as FUSE 3 does it: fuse-dfs asks for that
            options["atomic_o_trunc"] = True
        _Mounted(shown, asked.mount, foreground=True, fsname="hdfs", subtype="fuse_dfs", **options)


if __name__ == "__main__":
    main()
