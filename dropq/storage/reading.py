"""Read what lies in a root: no function here changes anything."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import stat
import sys
import time
import tomllib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import IO, NamedTuple

from dropq.format.layout import ignored_ends, ignoring
from dropq.storage.clock import Clock
from dropq.storage.mounts import Mount, mount_at
from dropq.storage.system_calls import FOLDER, READ, Asked, ask, closing, open_file

#: Nanoseconds after which the next change of a folder gets another time than the last, on any file system.
SETTLED_NS = 2_000_000_000
#: The mode of an empty file that reserves its name for a move: nobody may open it, and messages have no sticky bit.
RESERVED_MODE = 0o1000
#: How deeply JSON may be nested.
DEPTH = 50
#: How many entries of a folder are read together.
CHUNK = 4096
#: The most bytes of a small file of ours, and of one that lists the messages of a job, a batch or a transfer.
SMALL = 1 << 20
LONG_LIST = 512 << 20
#: The errors of a file that is there and cannot be read: closed to this user, a link, a folder, a socket.
CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO})
#: Bytes that one read of a body asks for.
READ_SIZE = 1 << 16
#: Seconds for which a folder is known to lie on a disk of its kind.
KIND_AGE = 10.0
#: By folder: until when that is known, and the disk.
_kinds: dict[str, tuple[float, Mount | None]] = {}
#: To look up names below a folder, not to list it: over NFS that asks nothing. Not every system has it.
_TO_REACH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


def ask_server(folder: str) -> None:
    """Make the next lookup of a name in a folder, or its next listing, go to the file server.

    An NFS client remembers for up to a minute which names a folder lacks, and uses that for an open, too. When the
    folder itself is opened, the client asks the server whether the folder changed, and forgets those names after a
    change. It also asks when the user may not open the folder.

    RACE: NFS 3 sees a change by its time alone. A name that is looked up between two changes within one tick of the
    server's clock, and comes with the second, is missed until the next change. A listing shows it.
    """
    gone = contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError)
    with gone, closing(_open_folder(folder)) as fd:
        _forget_listing(fd)


def know(folder: str) -> frozenset[str] | None:
    """Ask the file server what a small folder has in it now, if others may have changed it.

    Return the names in it, as far as a listing was made; else None. Over NFS one listing brings what each name is, too:
    to ask for them one by one takes a call for each.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        mount = _mount(folder)
        if mount is not None and not mount.shared:
            return None
        with closing(_open_folder(folder)) as fd:
            _forget_listing(fd)
            return frozenset(os.listdir(fd)) if mount is not None and mount.is_nfs else None
    return None


def _open_folder(path: str) -> int:
    """Open a folder; if it seems to be missing, open the folder above, and try again."""
    try:
        return os.open(path, FOLDER)
    except FileNotFoundError:
        above = os.path.dirname(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.close(os.open(above, FOLDER))
        return os.open(path, FOLDER)


def _forget_listing(fd: int) -> None:
    """Drop this host's cached listing of an open folder: within a tick of its server NFS 3 takes it for new.

    Other file systems keep none, and nothing happens.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it is advice: where it fails, nothing is cached either
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def open_to_reach(path: str) -> int:
    """Open a folder that this process has made, to reach what is in it, and return its descriptor."""
    return os.open(path, _TO_REACH)


def listing(folder: str) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
    """List a folder, in no order; on NFS the listing may come from this host's cache."""
    return os.scandir(folder)


def entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield what lies in a folder now, in no order; a missing folder is empty."""
    asked = not _asks_as_it_lists(folder)
    if asked:
        ask_server(folder)
    try:
        found = listing(folder)
    except FileNotFoundError:
        if asked or not on_nfs(folder):
            return
        ask_server(folder)  # the client may remember that it was missing
        try:
            found = listing(folder)
        except FileNotFoundError:
            return
    with found:
        yield from found  # type: ignore[misc]


@contextmanager
def look(folder: str) -> Iterator[Iterator[os.DirEntry[str]]]:
    """List a folder to look at each entry once: over NFS, a hundred of them come by one call, with their attributes.

    An NFS client asks for names alone as soon as nobody looks at the attributes of those that came last, and for what
    an entry is or how long its file is, it takes a call more each. So each is looked at as it comes. A listing that
    the client remembers may be without attributes, and is not used.
    """
    try:
        mount = _mount(folder)
    except FileNotFoundError:
        ask_server(folder)  # an NFS client may remember that it was missing
        mount = _mount(folder)
    is_on_nfs = mount is not None and mount.is_nfs
    if is_on_nfs:
        ask_server(folder)
    with listing(folder) as found:
        yield map(_looked_at, found) if is_on_nfs else found


def _looked_at(entry: os.DirEntry[str]) -> os.DirEntry[str]:
    with contextlib.suppress(OSError):  # it is gone: whoever asks for what it was hears that
        entry.stat(follow_symlinks=False)  # the entry remembers it
    return entry


def looked_at(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield what `look` lists; a missing folder is empty."""
    try:
        with look(folder) as found:
            yield from found
    except FileNotFoundError:
        return


def on_nfs(folder: str) -> bool:
    """Return whether a folder lies on NFS, where the names of a folder come without what each of them is."""
    try:
        mount = _mount(folder)
    except OSError:
        return False
    return mount is not None and mount.is_nfs


def _asks_as_it_lists(folder: str) -> bool:
    """Return whether a listing of a folder is never older than its beginning: on this host's own disk, and on NFS 4."""
    try:
        mount = _mount(folder)
    except OSError:
        return False
    return mount is not None and (not mount.shared or mount.kind == "nfs4")


def _mount(folder: str) -> Mount | None:
    """Return the mount of a folder; to ask for it may take a call: the answer is kept for `KIND_AGE`."""
    now = time.monotonic()
    known = _kinds.get(folder)
    if known is None or now > known[0]:
        mount = mount_at(folder, os.stat(folder).st_dev)
        if len(_kinds) > CHUNK:
            _kinds.clear()
        known = _kinds[folder] = now + KIND_AGE, mount
    return known[1]


class Standstill:
    """Whether a folder has not changed since it was listed, asked of the file server by one call.

    It asks nothing, and says no, where a file system may change a folder and leave its time: as many FUSE mounts do.
    """

    def __init__(self, folder: str, *, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._noted: Asked | None = None
        self._mark: Asked | None = None

    def begin(self) -> None:
        """Note how the folder is before it is listed; `confirm` it after the listing."""
        self.end()
        found = self._now()
        # When the folder changed just now, its next change may have the same time.
        if found is not None and self._clock.now_ms() * 1_000_000 - found.changed_ns > SETTLED_NS:
            self._noted = found

    def confirm(self) -> None:
        """Let what `begin` noted hold until the folder changes: it was listed whole, with nothing to do."""
        self._mark = self._noted

    def end(self) -> None:
        """Forget what was noted."""
        self._noted = self._mark = None

    def lasts(self) -> bool:
        """Return whether the folder has not changed since the `begin` that was confirmed.

        FileNotFoundError if it is missing, and the folder above it.
        """
        return self._mark is not None and self._mark == self._now()

    @property
    def is_on_nfs(self) -> bool:
        """Whether to ask takes a call of a file server."""
        return on_nfs(os.path.dirname(self._folder))

    def _now(self) -> Asked | None:
        """Return what the file server says of the folder, or None where that tells nothing.

        Of a missing folder it returns what is said of the one above, which changes when the folder is made.
        """
        above = os.path.dirname(self._folder)
        mount = _mount(above)
        if mount is None or (mount.shared and not mount.is_nfs):
            return None
        try:
            return ask(self._folder, follows=True)
        except FileNotFoundError:
            return ask(above, follows=True)


class Subfolder(NamedTuple):
    """A folder in a folder, or a link: its name, and the number that tells it from another one of its name."""

    name: str
    inode: int
    is_link: bool


def subfolders(folder: str, *, shared: bool) -> list[Subfolder]:
    """Return the folders and links in a folder now, in no order; none if it is missing. Other hosts may share it."""
    if shared:
        ask_server(folder)
    try:
        found = os.scandir(folder)
    except FileNotFoundError:
        return []
    with found:
        return [
            Subfolder(entry.name, entry.inode(), is_link)
            for entry in found
            if (is_link := entry.is_symlink()) or entry.is_dir(follow_symlinks=False)
        ]


class Subfolders:
    """The folders and links in a folder, which other hosts may share; listed again when it may have changed."""

    def __init__(self, folder: str, clock: Clock, *, shared: bool) -> None:
        self.folder = folder
        self._shared = shared
        self._found: list[Subfolder] = []
        self._standstill = Standstill(folder, clock=clock)

    def now(self) -> list[Subfolder]:
        """Return what lies in the folder now; the same list as before where nothing was made, renamed or removed."""
        try:
            if not self._standstill.lasts():
                self._standstill.begin()
                self._found = subfolders(self.folder, shared=self._shared)
                self._standstill.confirm()
        except FileNotFoundError:  # the folder above is missing, too
            return []
        return self._found


def is_shared(folder: str) -> bool:
    """Return whether other hosts may change what lies in a folder, as far as its mount shows."""
    mount = mount_at(folder, os.stat(folder).st_dev)
    return mount is None or mount.shared


def user_name(number: int) -> str:
    """Return the name of a user on this host; the number of one that has none."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def names_in(folder: str) -> frozenset[str]:
    """Return the names of everything in a folder now; a missing folder is empty."""
    try:
        with closing(_open_folder(folder)) as fd:
            _forget_listing(fd)
            return frozenset(os.listdir(fd))
    except FileNotFoundError:
        return frozenset()


class Listing:
    """The names in a folder that other hosts may share, listed again when it has changed; a missing folder is empty."""

    def __init__(self, folder: str, clock: Clock, *, shared: bool = True) -> None:
        self._folder = folder
        self._clock = clock
        self._shared = shared
        self._names = frozenset[str]()
        self._changed: tuple[int, int] | None = None

    def names(self) -> frozenset[str]:
        """Return the names."""
        try:
            if not self._shared and _version(os.stat(self._folder)) == self._changed:
                return self._names
            fd = _open_folder(self._folder)
        except FileNotFoundError:
            return frozenset()
        with closing(fd):
            changed = _version(os.fstat(fd))
            if changed != self._changed:
                _forget_listing(fd)
                now = self._clock.now_ms() * 1_000_000  # before the listing: what comes after the listing is younger
                self._names = frozenset(os.listdir(fd))
                # When a folder changed just now, its next change may have the same time.
                self._changed = changed if now - changed[1] > SETTLED_NS else None
        return self._names


def _version(status: os.stat_result) -> tuple[int, int]:
    """Return what changes when a folder is another one, or something in it is made, renamed or removed."""
    return status.st_ino, status.st_ctime_ns


def files_in(folder: str) -> Iterator[list[str]]:
    """Yield the names of the regular files in a folder, in lists of at most `CHUNK`; a missing folder is empty."""
    found = looked_at(folder)
    while chunk := list(islice(found, CHUNK)):
        yield message_files(chunk)


def message_names(folder: str, patterns: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the names of the messages in a folder, in lists of at most `CHUNK`. `patterns` match ignored names."""
    ignored, ends = ignoring(patterns), ignored_ends(patterns)
    for files in files_in(folder):
        yield [name for name in files if name[0] != "." and not ((ends is None or name[-1] in ends) and ignored(name))]


def message_counts(folder: str, patterns: tuple[str, ...]) -> Iterator[int]:
    """Count the messages in a folder by their names; yield a count for each chunk. `patterns` match ignored names."""
    return map(len, message_names(folder, patterns))


def message_files(entries: Sequence[os.DirEntry[str]]) -> list[str]:
    """Return the names of the entries that are regular files."""
    try:
        return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:
        return [entry.name for entry in entries if is_message_file(entry)]


def is_message_file(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a regular file, from the listing alone where the listing says it."""
    try:
        return entry.is_file(follow_symlinks=False)
    except OSError:
        return False  # gone, or unreadable: not a message now


def may_be_message(path: str) -> bool:
    """Return whether a file is a regular one, or is gone: the claim of it fails then, and says that."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # unreadable: not a message now


def was_message_file(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a regular file, or has gone since the listing.

    Where a listing does not say what an entry is, as on NFS, a claim that was renewed after the listing is not found by
    its name, but is still held.
    """
    return is_message_file(entry) or may_be_message(entry.path)


def open_body(path: str, *, buffering: int = -1) -> IO[bytes]:
    """Open a message's body for reading; OSError (ELOOP) for a symbolic link. This does not wait for a fifo."""
    fd = open_file(path, READ)
    try:
        return open(fd, "rb", buffering)
    except OSError as error:  # a folder
        os.close(fd)
        error.filename = path
        raise


def readable_size(path: str) -> int | None:
    """Return how long a regular file is that this user may read; None for anything else. It follows no link."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) and os.access(path, os.R_OK) else None


def is_closed(path: str) -> bool:
    """Return whether a file is there that this user may not read."""
    try:
        os.close(open_file(path, READ))
    except PermissionError:
        return True
    except OSError:
        pass  # gone, or a link: who reads it says so
    return False


def size_now(path: str) -> int:
    """Return the size of a file in bytes, as the file server knows it; nobody may open a reservation."""
    return status_now(path).st_size


def status_now(path: str) -> os.stat_result:
    """Return what the file server says of a file; open it, as NFS caches what lstat returns."""
    try:
        fd = open_file(path, READ)
    except PermissionError:
        return os.lstat(path)
    with closing(fd):
        return os.fstat(fd)


def regular_size(path: str) -> int | None:
    """Return the size of a regular file in bytes, as the server knows it; None for anything else, or nothing."""
    try:
        found = status_now(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        found = os.lstat(path)  # a link, or a socket
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def is_gone(error: OSError) -> bool:
    """Return whether a file may be gone; for a file that is open, an NFS client reports that as ESTALE."""
    return error.errno in (errno.ENOENT, errno.ESTALE)


def read_body(path: str, limit: int | None = None) -> bytes:
    """Read a message's body whole; OSError (EFBIG), unread, if it is longer than the limit."""
    try:
        fd = os.open(path, READ)
    except BlockingIOError:
        fd = open_file(path, READ)
    try:
        return _read_open(fd, path, limit)
    finally:
        os.close(fd)


def read_bodies(folder: str, names: Iterable[str], limit: int | None = None) -> Generator[bytes | None]:
    """Yield the bodies of messages in one folder, each read when it is asked for.

    A body that cannot be read, or has more bytes than the limit, is None; `read_body` of its path then raises the
    error, or finds the body after all.

    RACE: while this runs, bodies come from the folder that was opened, even after it was renamed, as a queue is that is
    deleted. A reader by paths that is a little quicker reads the same bodies.
    """
    try:
        below = os.open(folder, FOLDER)
    except OSError:
        yield from (None for _ in names)
        return
    with closing(below):
        for name in names:
            body: bytes | None = None
            with contextlib.suppress(OSError):
                # To look up a short body's whole path would take a fifth of the time of reading the body.
                fd = os.open(name, READ, dir_fd=below)
                try:
                    body = _read_open(fd, name, limit)
                finally:
                    os.close(fd)
            yield body


def _read_open(fd: int, path: str, limit: int | None) -> bytes:
    body = os.read(fd, READ_SIZE)
    if not (more := os.read(fd, READ_SIZE)):
        return body
    if limit is not None and os.fstat(fd).st_size > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    chunks = [body, more]
    while more := os.read(fd, READ_SIZE):
        chunks.append(more)
    return b"".join(chunks)


class _TooLong(OSError, ValueError):
    """Raised for a file that is longer than any of ours: it cannot be read, and is damaged."""


def read_small(path: str, limit: int = SMALL) -> bytes | None:
    """Read a small file of ours; return None when there is no such file.

    Raises:
        OSError: the file cannot be read, or is no regular file; with EFBIG, it is longer than `limit`, and was not
            read: that is a ValueError, too, as it is damaged.
    """
    try:
        with open_body(path) as file:
            return read_opened(file, path, limit)
    except FileNotFoundError:
        return None


def read_opened(file: IO[bytes], path: str, limit: int = SMALL) -> bytes:
    """Read a small file of ours that is open; arguments and errors as of `read_small`."""
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    if found.st_size > limit:
        raise _TooLong(errno.EFBIG, f"it is longer than {limit} bytes", path)
    return file.read(max(found.st_size, READ_SIZE))  # the kernel's own files say that they are empty


def find_below(folder: str, *names: str) -> int | None:
    """Do what `open_below` does, for a folder that will not be listed.

    An NFS client opens each folder by a call, and finds it without, unless it remembers that the folder is missing.
    """
    found = open_below(folder, *names, flags=_TO_REACH)
    return open_below(folder, *names) if found is None else found


def open_below(folder: str, *names: str, flags: int = FOLDER) -> int | None:
    """Open a folder below another by one name after the other; return its descriptor, None if it is not there.

    OSError (ELOOP or ENOTDIR) if one of the names is a link, or no folder; the folder's own path may have links.
    """
    fd = None
    try:
        fd = os.open(folder, flags)
        for name in names:
            below = os.open(name, flags | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = below
    except OSError as error:
        if fd is not None:
            os.close(fd)
        if isinstance(error, FileNotFoundError):
            return None
        error.filename = "/".join((folder, *names))
        raise
    return fd


def read_in(folder: int, name: str, limit: int = 4096, *, strict: bool = False) -> bytes | None:
    """Read a small file of ours in an open folder; return None when there is no such file, or it may not be opened.

    If `strict`, return None only when there is no such file, or it is a link, a socket or another thing that is none.
    """
    try:
        fd = os.open(name, READ, dir_fd=folder)
    except OSError as error:
        if strict and not isinstance(error, FileNotFoundError) and error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        return None
    with closing(fd):
        return os.read(fd, limit) if stat.S_ISREG(os.fstat(fd).st_mode) else None


def parse_json(data: bytes, *, any_text: bool = False) -> object:
    """Read JSON that anybody may have written; ValueError if it is damaged, or nested more deeply than any of ours.

    Text that no path can have is a ValueError, too, unless `any_text` will do, as none of it becomes a path.
    """
    try:
        content: object = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _check(content, DEPTH, any_text=any_text or (data.isascii() and b"\\" not in data))
    return content


def _check(content: object, left: int, *, any_text: bool) -> None:
    """Refuse what is nested too deeply and, unless `any_text`, text that no path can have."""
    if not left:
        raise ValueError("it is nested too deeply")
    inner = [*content.keys(), *content.values()] if isinstance(content, dict) else content
    for value in inner if isinstance(inner, list) else ():
        if isinstance(value, str):
            if not any_text:
                check_path(value)
        elif isinstance(value, dict | list):
            _check(value, left - 1, any_text=any_text)


def check_path(text: str) -> None:
    """Raise ValueError for text that no path can have: calls of the file system raise errors of several kinds."""
    if "\0" in text:
        raise ValueError("it has a NUL, which no name can have")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ValueError(f"it has {text[error.start]!r}, which no name can have") from error


def parse_toml(text: str) -> dict[str, object]:
    """Read TOML that anybody may have written; ValueError if it is damaged, or nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def changed_ms(path: str, *, gone: int | None = None) -> int:
    """Return when a file was last renamed or changed, its ctime in ms; `gone`, if given, for a missing one."""
    return _ms_of(path, "st_ctime_ns", gone)


def written_ms(path: str, *, gone: int | None = None) -> int:
    """Return when a file's content was last written: its mtime; otherwise as `changed_ms`."""
    return _ms_of(path, "st_mtime_ns", gone)


def _ms_of(path: str, time: str, gone: int | None) -> int:
    try:
        found: int = getattr(os.lstat(path), time)
    except FileNotFoundError:
        if gone is None:
            raise
        return gone
    return found // 1_000_000


def read_with_times(path: str, limit: int) -> tuple[bytes, tuple[int, int]]:
    """Read a file whole, or raise OSError (EFBIG) unread; return it, and what `times` says of it."""
    with closing(open_file(path, READ)) as fd:
        found = os.fstat(fd)
        if found.st_size > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        body = os.read(fd, found.st_size + 1)
        while len(body) != found.st_size and (more := os.read(fd, READ_SIZE)):
            body += more
    return body, (found.st_atime_ns, found.st_mtime_ns)


def times(path: str) -> tuple[int, int]:
    """Return when a file was last read and last written, in nanoseconds since 1970."""
    found = os.lstat(path)
    return found.st_atime_ns, found.st_mtime_ns


def is_reservation(status: os.stat_result) -> bool:
    """Return whether a file only reserves its name for a move: it is empty, and has the mode of reservations."""
    return not status.st_size and status.st_mode == stat.S_IFREG | RESERVED_MODE


def inode(path: str) -> int:
    """Return a file's inode number."""
    return os.lstat(path).st_ino


def inode_or_none(path: str) -> int | None:
    """Return a file's inode number; None if it is gone, or closed to this user."""
    try:
        return inode(path)
    except OSError:
        return None


def inode_behind(path: str) -> int:
    """Return the inode number of what a link leads to; 0 if it leads nowhere."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def has_another_name(path: str) -> bool:
    """Return whether a file exists, and has another name, too."""
    try:
        return os.lstat(path).st_nlink > 1
    except FileNotFoundError:
        return False


def exists(path: str) -> bool:
    """Return whether a path exists, as far as this host knows: an NFS client may know too little; see `is_there`."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_there(path: str, clock: Clock) -> bool:
    """Return whether a path exists that another host may have made or removed just now; `clock` as of `those_there`."""
    folder, name = os.path.split(path)
    return name in those_there(folder, (name,), clock)


def those_there(folder: str, names: Sequence[str], clock: Clock) -> list[str]:
    """Return which names exist that another host may have made or removed just now, such as a read-lock.

    A folder that changed a moment ago by the server's clock is listed: see `ask_server`. A file that this user may not
    open exists, too.
    """
    try:
        mount = mount_at(folder, os.stat(folder).st_dev)
        if mount is None or mount.shared:
            with closing(_open_folder(folder)) as fd:
                if clock.now_ms() * 1_000_000 - os.fstat(fd).st_mtime_ns <= SETTLED_NS:
                    _forget_listing(fd)
                    listed = os.listdir(fd)
                    return [name for name in names if name in listed]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError:
        pass  # the failed open asked the server, too
    return [name for name in names if _opens(f"{folder}/{name}")]


def _opens(path: str) -> bool:
    """Return whether a file exists; to open a file that this host knows asks the server."""
    try:
        os.close(open_file(path, READ))
    except FileNotFoundError:
        return False
    except OSError:
        return exists(path)
    return True


def is_folder(path: str) -> bool:
    """Return whether a path is a folder, or a link to a folder."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def device(path: str) -> int:
    """Return the number of the file system that a path lies on."""
    return os.stat(path).st_dev
