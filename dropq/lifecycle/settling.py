"""Whether a file in target/ may still be written to: decided by its times, for all that take messages, and for people.

A program that writes in place, such as an upload, leaves a file whose last change was a write: its ctime equals its
mtime. A rename, a chmod and a copied time change the ctime alone, but for a rename within the same tick of the clock as
the write. Only files under foreign names have to settle: dropq never shows a file before it is whole.
"""

from __future__ import annotations

import os

from dropq.format import names
from dropq.format.claims import BodyVersion
from dropq.lifecycle.timing import Timing
from dropq.storage import reading
from dropq.storage.clock import Clock
from dropq.storage.mounts import mount_of

#: How many files are remembered that were moved in, or whose times are in the future; beyond that, all are forgotten.
REMEMBERED = 10_000
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
    """Return whether a write may follow: the last change was one; or none came yet, as servers may set modes first."""
    return is_written(found) or not found.st_size


def is_written_late(found: os.stat_result) -> bool:
    """Return whether a file in processed/ was written to after its ack, where `tells_writes` holds.

    The ack's rename came in a later clock tick than any write before it. Times in whole seconds tell nothing.
    """
    return is_written(found) and found.st_mtime_ns % 1_000_000_000 != 0


class Settling:
    """Decides when the files of one queue's target/ have settled.

    Args:
        folder: the queue's target/.
        settle_time: seconds that every file waits after its last change; 0 for none; None for none, but where the last
            change was a write.
        clock: the file server's clock.
        timing: how long a file waits whose last change was a write.
    """

    def __init__(self, folder: str, settle_time: float | None, clock: Clock, timing: Timing) -> None:
        self._folder = folder
        self._settle_time = settle_time
        self._clock = clock
        self._written_in_place = timing.written_in_place
        self._shared: bool | None = None
        #: What tells a file from another one of its name, and from itself after a write: its inode and its ctime.
        self._moved_in: dict[str, tuple[int, int]] = {}
        #: The same, and since when the file has stood unchanged, for files whose ctime is in the future.
        self._unchanged: dict[str, tuple[tuple[int, int], int]] = {}

    @property
    def patience(self) -> float:
        """Seconds that a file waits that somebody was seen to write to."""
        return self._written_in_place if self._settle_time is None else self._settle_time

    def due(self, file: str, found: os.stat_result) -> int:
        """Return when a file has settled, if nobody writes to it meanwhile, in ms since 1970; 0 if it has.

        Args:
            file: its name in target/, which is foreign.
            found: what the file system says of it now.
        """
        wait = self._settle_time
        identity = found.st_ino, found.st_ctime_ns
        if wait is None:
            wait = self._written_in_place if _may_go_on(found) and self._moved_in.get(file) != identity else 0
        if not wait:
            return 0
        now, changed = self._clock.now_ms(), found.st_ctime_ns // 1_000_000
        if changed > now:
            changed = self._unchanged_since(file, identity, now)
        due = changed + int(wait * 1000)
        return due if due > now else 0

    def _unchanged_since(self, file: str, identity: tuple[int, int], now: int) -> int:
        """Return since when a file whose ctime is in the future was not changed, as far as this process has seen."""
        known = self._unchanged.get(file)
        if known is None or known[0] != identity:
            if len(self._unchanged) >= REMEMBERED:
                self._unchanged.clear()
            known = self._unchanged[file] = identity, now
        return known[1]

    def note_moved_in(self, file: str) -> None:
        """Note that a file was moved into target/, as an event said: it has settled, unless it is written to again.

        An event may be read late, when another file has the name, which is written in place: only what changed just now
        is taken for what the event is about.
        """
        if names.tells_time(file):
            return
        try:
            found = os.lstat(f"{self._folder}/{file}")
        except OSError:
            return  # RACE: somebody has claimed it
        is_recent = self._clock.now_ms() - found.st_ctime_ns // 1_000_000 < RECENT
        if is_recent and _may_go_on(found):  # it was written in the same tick: its times alone do not tell
            if len(self._moved_in) >= REMEMBERED:
                self._moved_in.clear()
            self._moved_in[file] = found.st_ino, found.st_ctime_ns

    def look(self, path: str) -> os.stat_result:
        """Return what the file server says of a file now, and not what an NFS client remembers.

        Raises:
            FileNotFoundError: it is gone.
        """
        if self._shared is None:
            self._shared = reading.is_shared(os.path.dirname(path))  # the queue may be being deleted
        return reading.status_now(path) if self._shared else os.lstat(path)

    def version(self, path: str) -> BodyVersion:
        """Return the version of a body now, by which `Transitions` sees whether somebody has written to it."""
        found = self.look(path)
        return BodyVersion(found.st_size, found.st_mtime_ns)
