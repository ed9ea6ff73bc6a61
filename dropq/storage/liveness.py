"""Which subscriptions are alive: each locks a file of its own, its sign of life, for as long as its process lives.

The kernel frees the lock when the process dies, however it dies. A sweep that gets the lock knows that the subscription
is dead. A subscription without a file, such as that of a shell command, has only its leases.

Two mounts of a folder may not know each other's locks, so the file says who knows this lock: its mark. A sweep that
finds another mark than its own mount's learns nothing from the lock.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

from dropq.storage import locks
from dropq.storage.files import Storage
from dropq.storage.locks import LockFile, ProcessLock
from dropq.storage.mounts import boot_id, mount_at
from dropq.storage.reading import device, entries, inode, names_in, parse_json, read_small

log = logging.getLogger("dropq")

#: How many addresses of a subscription are read: a stranger may have written more.
MOST_ANNOUNCED = 64


class _Forks:
    """Counts the forks between the process that imported this module and this one, without a system call."""

    count = 0

    def one_more(self) -> None:
        self.count += 1


FORKS = _Forks()
os.register_at_fork(after_in_child=FORKS.one_more)


class Presence:
    """A subscription's sign of life, held from construction until `end`."""

    def __init__(self, folder: str, subscription: str, storage: Storage) -> None:
        self._folder = folder
        self._path = f"{folder}/{subscription}"
        self._storage = storage
        self._announces = False
        #: The locks that are held: one, and more if the folder was replaced for a while; none without locks.
        self._locks = self._make()

    def _make(self) -> list[ProcessLock]:
        draft = f"{self._folder}/.{os.path.basename(self._path)}"
        self._storage.make_folder(self._folder)
        lock = ProcessLock(draft)
        try:
            # With the queue's modes: others of its group must open the file to find out that we are dead.
            self._storage.write_new(draft, mark(self._folder), synced=False)
            lock.acquire()
            # RACE: a sweep forgets a file that nobody has locked; so the file gets its name when it is locked.
            # One is there under that name after a FUSE mount came back, which numbers its files anew.
            self._storage.replace(draft, self._path)
        except OSError as error:
            lock.release()
            self._storage.unlink(draft)
            if isinstance(error, FileNotFoundError):
                self._remove_ghost()
            if not locks.are_missing(error):
                raise
            log.warning("%s: no locks on this file system: only leases free what a dead consumer holds", self._folder)
            return []
        return [lock]

    def _remove_ghost(self) -> None:
        """Remove the empty folders that were made where a queue was renamed away, so that it can come back."""
        path = self._folder
        if names_in(os.path.dirname(path)) != {os.path.basename(path)}:
            return
        with suppress(OSError):  # something else is in it
            for _ in range(3):
                self._storage.remove_folder(path)
                path = os.path.dirname(path)

    def keep(self) -> None:
        """Make a new sign of life if somebody took the file away, so that a sweep will see our death.

        The old lock stays held: if the folder comes back, we were never dead.
        """
        if not self._locks:
            return
        with suppress(FileNotFoundError):
            found = inode(self._path)
            if any(lock.inode == found for lock in self._locks):
                return
        try:
            made = self._make()
        except FileNotFoundError:
            return  # the queue is gone, or away for a moment: the next look at the queue raises
        log.warning("%s was taken away: it was made again", self._path)
        for lock in self._locks:
            if lock.has_a_name:
                made.append(lock)  # its file went with the folder, and may come back with it
            else:
                lock.release()
        self._locks = made

    @property
    def is_locked(self) -> bool:
        """Whether it shows that this process lives; False where the file system has no locks."""
        return any(lock.is_locked for lock in self._locks)

    def position(self) -> tuple[int, int]:
        """Return its number, from 0, among the subscriptions that have a sign of life, and how many they are."""
        own = os.path.basename(self._path)
        seen = sorted({own, *known(self._folder)})
        return seen.index(own), len(seen)

    def announce(self, addresses: Iterable[str]) -> None:
        """Write beside the sign of life where the messages of the subscription go."""
        content = json.dumps({"to": list(addresses)}).encode()
        self._storage.write_small(_announcement(self._folder, os.path.basename(self._path)), content)
        self._announces = True

    def end(self) -> None:
        """Remove the sign of life; call it when no message is held any more."""
        if self._announces:
            self._storage.unlink(_announcement(self._folder, os.path.basename(self._path)))
        if self.is_locked:
            self._storage.unlink(self._path)  # before the lock is freed: after that a sweep may take it
            self.abandon()

    def abandon(self) -> None:
        """Free the lock, but leave the file: the next sweep finds it dead, and returns the messages it held."""
        for lock in self._locks:
            lock.release()


def mark(folder: str) -> bytes:
    """Return who knows the locks in a folder; two mounts with the same mark know each other's locks.

    The mark is empty on this host's own disks and on NFS. It is a name for another file system that passes locks on to
    all its hosts. Otherwise it names the kernel and the mount that know the lock.
    """
    number = device(folder)
    mount = mount_at(folder, number)
    if mount is None:
        return b""
    if mount.keeps_locks:
        return b"%s %d\n" % (boot_id(), number)
    return f"{mount.sharing_locks}\n".encode() if mount.sharing_locks else b""


def is_verifiable(folder: str, subscription: str) -> bool:
    """Return whether a subscription's lock shows here if it is alive: its file must have this mount's mark."""
    try:
        return (read_small(f"{folder}/{subscription}") or b"") == mark(folder)
    except OSError:
        return False


def _announcement(folder: str, subscription: str) -> str:
    return f"{folder}/.{subscription}.to"


def announced(folder: str, subscription: str) -> list[str]:
    """Return where the messages of a subscription go, as far as it told that."""
    try:
        said = parse_json(read_small(_announcement(folder, subscription)) or b"")
    except (OSError, ValueError):
        return []
    addresses = said.get("to") if isinstance(said, dict) else None
    some = addresses[:MOST_ANNOUNCED] if isinstance(addresses, list) else []
    return [each for each in some if isinstance(each, str)]


def announcer(name: str) -> str:
    """Return the subscription that a file beside the signs of life is of; "" for any other file."""
    return name[1:-3] if name.startswith(".") and name.endswith(".to") else ""


def known(folder: str) -> frozenset[str]:
    """Return the subscriptions that have a file, alive or dead; leave out drafts and files that NFS keeps: a dot."""
    return frozenset(entry.name for entry in entries(folder) if entry.name[0] != ".")


def is_dead(folder: str, subscription: str) -> bool:
    """Return whether a subscription that has a file is dead, and change nothing; False where this is unknown."""
    try:
        with dead(folder, subscription) as found:
            return found
    except OSError:
        return False


class Signs:
    """The signs of life in a folder; each is looked at once, when somebody asks for it."""

    def __init__(self, folder: str) -> None:
        #: The subscriptions that have one, alive or dead.
        self.known = known(folder)
        #: Whether a subscription has a sign and is dead; False where that is unknown.
        self.is_dead = cache(lambda one: one in self.known and is_dead(folder, one))
        #: Whether a subscription has a sign, and its lock shows here if it is alive.
        self.is_verifiable = cache(lambda one: one in self.known and is_verifiable(folder, one))

    @property
    def living(self) -> list[str]:
        """The subscriptions that live, or may live: behind some mounts that cannot be seen from here."""
        return sorted(one for one in self.known if not self.is_dead(one))


@contextmanager
def dead(folder: str, subscription: str) -> Iterator[bool]:
    """Yield whether a subscription is dead; keep others from finding it dead, too, while its claims are returned."""
    try:
        file = LockFile(f"{folder}/{subscription}", folder)
    except (FileNotFoundError, PermissionError, BlockingIOError):
        # It ended by itself. Or it is another user's, whose own sweeps, or its leases, see to it. Or the NFS server has
        # just asked a client to give the file back, and the next sweep sees.
        yield False
        return
    try:
        # RACE: several sweeps at once; the one that gets the lock returns what the dead subscription held. One that
        # gets it after that finds the file gone: the first forgot the dead.
        yield _locks(file) and is_verifiable(folder, subscription) and file.has_its_name
    finally:
        file.close()


def _locks(file: LockFile) -> bool:
    try:
        return file.lock()
    except OSError as error:
        if not locks.are_missing(error):
            raise
        return False


def ring(folder: str, subscription: str, storage: Storage) -> None:
    """Wake a subscription that waits for its turn: where events come, a new time of its sign of life is one."""
    with suppress(OSError):  # it looks again without that, a moment later
        storage.renew(f"{folder}/{subscription}")


def forget_dead(folder: str, subscription: str, storage: Storage) -> None:
    """Remove the file of a dead subscription that holds nothing any more; call it inside `dead`."""
    storage.unlink(_announcement(folder, subscription))
    storage.unlink(f"{folder}/{subscription}")
