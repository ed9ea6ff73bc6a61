"""Every call to the file system that dropq makes, and a place to come between.

`os` is replaced in each module of dropq, and in those it leaves work to, by whatever stands there of it: nobody has to
list them. What a file object writes and what the kernel does for a single rename go by the same way.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import filelock

from dropq.storage import files as storage_files
from dropq.storage import system_calls

#: Calls that change what lies on disk, or make it durable; `rename` stands for renameat2 too.
CHANGING = frozenset(
    {"open", "write", "rename", "unlink", "link", "mkdir", "rmdir", "fsync", "fchmod", "fchown", "utime", "ftruncate"}
)
#: Calls that only look.
LOOKING = frozenset({"read", "listdir", "scandir", "stat", "lstat", "fstat"})

_WRITES = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class Call:
    """One call: what it is called, what it is about, and how to do it."""

    name: str
    arguments: tuple[Any, ...]
    do: Callable[[], Any]

    @property
    def changes(self) -> bool:
        """Whether it changes something on disk: an open that only reads does not."""
        return self.name in CHANGING and (self.name != "open" or bool(self.arguments[1] & _WRITES))

    def __str__(self) -> str:
        subjects = [part for part in self.arguments if isinstance(part, str)]
        return " ".join([self.name, *("/".join(part.rsplit("/", 2)[1:]) for part in subjects)])


#: What is asked about each call: it does it, or does something else.
Between = Callable[[Call], Any]


class _Os(ModuleType):
    """Stands for `os`: the calls that matter go by `between`."""

    def __init__(self, between: Between) -> None:
        super().__init__("os")
        self._between = between

    def __getattr__(self, name: str) -> Any:
        called = "unlink" if name == "remove" else name
        if called not in CHANGING and called not in LOOKING:
            return getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            real = getattr(os, name)
            if args and isinstance(args[0], int) and not _is_on_disk(args[0]):
                return real(*args, **kwargs)  # a pipe that wakes a thread, or the kernel's events
            return self._between(Call(called, args, lambda: real(*args, **kwargs)))

        setattr(self, name, call)  # one call is one object, as in `os`: Python 3.13 compares them by `is`
        return call


def _is_on_disk(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


class _Raw(io.RawIOBase):
    """A file whose reads and writes go by `between`, for a buffered one to stand on."""

    def __init__(self, between: Between, fd: int, mode: str, *, closes: bool) -> None:
        self._between = between
        self._fd = fd
        self._writes = mode == "wb"
        self._closes = closes

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return not self._writes

    def writable(self) -> bool:
        return self._writes

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._fd, offset, whence)

    def readinto(self, buffer: Any) -> int:
        return int(self._between(Call("read", (self._fd,), lambda: os.readv(self._fd, [buffer]))))

    def write(self, data: Any) -> int:
        content = bytes(data)
        return int(self._between(Call("write", (self._fd, content), lambda: os.write(self._fd, content))))

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._closes:
                os.close(self._fd)


def _open(between: Between, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """Stand for `open`: what dropq opened by itself it reads and writes by calls that can be come between."""
    if isinstance(file, int) and mode == "wb":
        return io.BufferedWriter(_Raw(between, file, mode, closes=kwargs.get("closefd", True)))
    if isinstance(file, int) and mode == "rb":
        return io.BufferedReader(_Raw(between, file, mode, closes=kwargs.get("closefd", True)))
    return open(file, mode, *args, **kwargs)


def come_between(between: Between, *, noreplace: bool = True) -> None:
    """Let every call go by a function from now on, for good: this is for a process that ends soon.

    Args:
        between: what each call goes by.
        noreplace: whether the file system has a rename that replaces nothing.
    """
    stand_in = _Os(between)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("dropq", filelock.__name__) and getattr(module, "os", None) is os:
            module.os = stand_in  # type: ignore[attr-defined]
            module.open = partial(_open, between)  # type: ignore[attr-defined]
    shutil.os = stand_in  # type: ignore[attr-defined]
    real = system_calls.rename_noreplace

    def rename_noreplace(
        source: str, destination: str, folder: int = system_calls.HERE, source_folder: int = system_calls.HERE
    ) -> None:
        if not noreplace:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)
        between(Call("rename", (source, destination), lambda: real(source, destination, folder, source_folder)))

    system_calls.rename_noreplace = rename_noreplace
    whole = system_calls.sync_whole
    system_calls.sync_whole = lambda fd, path: between(Call("fsync", (path,), lambda: whole(fd, path)))
    storage_files.SYNCED_TOGETHER = 2
