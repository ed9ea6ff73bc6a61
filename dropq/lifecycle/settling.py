"""Whether a file in target/ may still be written to: decided by its times, for all that take messages, and for people.

A program that writes in place, such as an upload, leaves a file whose last change was a write: its ctime equals its
mtime. A rename, a chmod and a copied time change the ctime alone, but for a rename within the same tick of the clock as
the write. Only files under foreign names have to settle: dropq never shows a file before it is whole.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from dropq.format import names
from dropq.format.claims import BodyVersion
from dropq.format.message_file import MessageFile
from dropq.lifecycle.timing import Timing
from dropq.storage import reading
from dropq.storage.clock import Clock
from dropq.storage.mounts import mount_of

#: Bytes for remembering how files looked. Beyond that the oldest is forgotten: its file waits longer.
REMEMBERED = 4 << 20
#: How many bytes it takes to remember a file, besides its name: its two times, its inode, and their place in a table.
_ENTRY = 300
#: Milliseconds within which an event is read, of a file that was moved in.
RECENT = 50


def tells_writes(folder: str) -> bool:
    """Return whether a rename there is known to change the ctime of a file; many FUSE mounts show another time."""
    mount = mount_of(folder)
    return mount is not None and not mount.kind.startswith("fuse")


def is_written(found: os.stat_result) -> bool:
    """Return whether the last change of a file was a write, as far as its times tell."""
    return found.st_ctime_ns == found.st_mtime_ns


def _may_go_on(found: os.stat_result) -> bool:
    """Return whether a write may follow: the last change was one, or, as servers set modes first, nothing came yet."""
    return is_written(found) or not found.st_size


def is_written_late(found: os.stat_result) -> bool:
    """Return whether a file in processed/ was written to after its ack, where `tells_writes` holds.

    The ack's rename came in a later clock tick than any write before it. Times in whole seconds tell nothing.
    """
    return is_written(found) and found.st_mtime_ns % 1_000_000_000 != 0


class Seen(NamedTuple):
    """What was seen of a message that waits: when it has settled, 0 if it has; its body's version, and its inode.

    Of a message whose id is a generated one nobody compares the body: dropq itself wrote it, whole.
    """

    due: int
    body: BodyVersion | None
    inode: int = 0


_WHOLE = Seen(0, None)


def _size(file: str) -> int:
    return sys.getsizeof(file) + _ENTRY


class Settling:
    """Decides when the files of one queue's target/ have settled.

    Every file waits for `settle_time` seconds after its last change; None: only where the last change was a write.
    """

    def __init__(self, folder: str, settle_time: float | None, clock: Clock, timing: Timing) -> None:
        self._folder = folder
        self._settle_time = settle_time
        self._clock = clock
        self._written_in_place = timing.written_in_place
        self._shared: bool | None = None
        #: By name, the inode and ctime of files, and since when they have stood unchanged, in ms since 1970: of files
        #: whose ctime is in the future, and of those that were moved in, since 0.
        self._unchanged: dict[str, tuple[int, int, int]] = {}
        self._size = 0

    @property
    def patience(self) -> float:
        """Seconds that a file waits that somebody was seen to write to."""
        return self._written_in_place if self._settle_time is None else self._settle_time

    def due(self, file: MessageFile, found: os.stat_result) -> int:
        """Return when a file has settled, if nobody writes to it meanwhile, in ms since 1970; 0 if it has."""
        if not file.name.foreign or (self._settle_time is None and not _may_go_on(found)) or not self.patience:
            return 0
        now, changed = self._clock.now_ms(), found.st_ctime_ns // 1_000_000
        inode, changed_ns, since = self._unchanged.get(file.filename, (0, 0, 0))
        if (inode, changed_ns) == (found.st_ino, found.st_ctime_ns):
            changed = since
        elif changed > now:
            self._note(file.filename, found, now)
            changed = now
        due = changed + int(self.patience * 1000)
        return due if due > now else 0

    def note_moved_in(self, file: str) -> None:
        """Note that a file was moved into target/, as an event said: it has settled, unless it is written to again.

        With a settle_time it waits for that all the same. An event may be read late, when another file has the name,
        which is written in place: only what changed just now is taken for what the event is about.
        """
        if self._settle_time is not None or names.tells_time(file):
            return
        try:
            found = os.lstat(f"{self._folder}/{file}")
        except OSError:
            return  # RACE: somebody has claimed it
        is_recent = self._clock.now_ms() - found.st_ctime_ns // 1_000_000 < RECENT
        if is_recent and _may_go_on(found):  # it was written in the same tick: its times alone do not tell
            self._note(file, found, since=0)

    def _note(self, file: str, found: os.stat_result, since: int) -> None:
        self._forget(file)
        self._unchanged[file] = found.st_ino, found.st_ctime_ns, since
        self._size += _size(file)
        while self._size > REMEMBERED:
            self._forget(next(iter(self._unchanged)))

    def _forget(self, file: str) -> None:
        if self._unchanged.pop(file, None) is not None:
            self._size -= _size(file)

    def seen(self, file: MessageFile, folder: str) -> Seen:
        """Look at a message that waits in a folder of the queue, before it is taken from there."""
        if file.plain or file.name.generated:
            return _WHOLE
        found = self.status(f"{folder}/{file.filename}")
        due = self.due(file, found) if folder == self._folder else 0
        return Seen(due, BodyVersion(found.st_size, found.st_mtime_ns), found.st_ino)

    def claimed(self, seen: Seen, path: str) -> BodyVersion | None:
        """Return the version of a claimed body, as it was before the claim, of a file whose body counts.

        RACE: a second file may have taken the name since, and was claimed: then it is the version of that one, now.
        """
        try:
            found = self.status(path)
        except OSError:
            return seen.body  # its ack meets that, too
        return seen.body if found.st_ino == seen.inode else BodyVersion(found.st_size, found.st_mtime_ns)

    def settles_at(self, file: MessageFile) -> int:
        """Return when a file in target/ has settled, in ms since 1970; 0 if it has. Nobody is to take it before."""
        try:
            return self.seen(file, self._folder).due
        except FileNotFoundError:
            return 0  # who takes it will see that it is gone

    def status(self, path: str) -> os.stat_result:
        """Return a file's status from the file server, not from the cache of an NFS client."""
        if self._shared is None:
            self._shared = reading.is_shared(os.path.dirname(path))  # the queue may be being deleted
        return reading.status_now(path) if self._shared else os.lstat(path)

    def version(self, path: str) -> BodyVersion:
        """Return the version of a body now, by which `Claims` sees whether somebody has written to it."""
        found = self.status(path)
        return BodyVersion(found.st_size, found.st_mtime_ns)
