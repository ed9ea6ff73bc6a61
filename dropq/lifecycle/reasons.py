"""Why a message is in error/ or expired/: a small file beside the state folders, never in the message.

A reason is written before the message moves, under the message's name and inode. A crash between the two steps leaves a
reason that matches no file and is ignored. Once the file is there, the reason is renamed to where it is found by the
name alone: an editor that writes a new file, or a copy of the whole root, gives the name another inode. In its state
folder no second file has the name. A file that gets the name later brings its own reason, which replaces this one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime

from dropq.format import names
from dropq.format.layout import WITH_REASON
from dropq.format.names import Name
from dropq.storage.clock import time_text
from dropq.storage.failures import describe
from dropq.storage.files import Storage
from dropq.storage.reading import entries, exists, inode, inode_or_none, listing, parse_json, read_small

log = logging.getLogger("dropq")

#: Bytes of a failed command's stderr that are kept, from its end.
STDERR_LIMIT = 8192


class Reasons:
    """The reasons of one queue, in `.dropq/reasons/STATE/DIGEST.json`."""

    def __init__(self, folder: str, storage: Storage) -> None:
        self.folder = folder
        self._storage = storage

    def path(self, state: str, name: str, inode: int | None) -> str:
        """Return the path of a reason: of a file that is about to come, or, if its inode is None, that is there."""
        return f"{self.folder}/{state}/{_file(name, inode)}"

    def record(self, state: str, name: str, inode: int, fields: Mapping[str, object]) -> None:
        """Write why a file is about to move to a state, under a name; `keep` or `withdraw` says how that ended."""
        path, said = self.path(state, name, inode), content(fields, name, inode)
        try:
            self._storage.write_small(path, said)
        except FileNotFoundError:
            self._storage.make_folder(os.path.dirname(path))
            self._storage.write_small(path, said)

    def adopt(self, path: str, state: str, name: str, inode: int) -> None:
        """Make a file the reason of the file that it names; do nothing if it is missing. It is not synced."""
        destination = self.path(state, name, inode)
        self._storage.make_folder(os.path.dirname(destination))
        with suppress(FileNotFoundError):  # RACE: another roll-forward was first
            self._storage.rename(path, destination)

    def copy(self, state: str, name: str, to: str, inode: int) -> bool:
        """Write the reason of a file also for another name, which it is about to get; return False if it has none."""
        said = self.find(state, name, inode)
        if said is None or said.get("inode") != inode:  # else it is about another file, which has this name
            return False
        self.record(state, to, inode, {key: said[key] for key in said if key not in ("name", "inode")})
        return True

    def keep(self, state: str, name: str, inode: int) -> None:
        """File a reason under the name alone, as its file is there now; until then only its inode finds it.

        A crash before leaves the reason where `find` finds it by the inode, and a sweep files it.
        """
        # RACE: it is missing if another process was first, or has taken the message out again. If a person takes the
        # message out by hand at this moment, and a second file of its name comes, that file may get this reason.
        path = self.path(state, name, inode)
        with suppress(FileNotFoundError), self._logging(path, "is found only while its file keeps its inode"):
            self._storage.replace(path, self.path(state, name, None))

    def withdraw(self, state: str, name: str, inode: int) -> None:
        """Remove a reason whose file did not come."""
        path = self.path(state, name, inode)
        with self._logging(path, "explains nothing, and stays until a sweep clears it"):
            self._storage.unlink(path)

    def drop(self, state: str, name: str, inode: int) -> None:
        """Remove the reason of a file that has left; if that fails, a sweep collects it."""
        self.withdraw(state, name, inode)
        path = self.path(state, name, None)
        with self._logging(path, "explains nothing any more, and stays until a sweep clears it"):
            # RACE: another file may have come under the name: its reason stays.
            if not exists(f"{_base(self.folder)}/{state}/{name}"):
                self._storage.unlink(path)

    def find(self, state: str, name: str, inode: int) -> dict[str, object] | None:
        """Return why a file is in a state; None if its reason is missing or cannot be read."""
        by_name = _content(self.path(state, name, None), name)
        if by_name is not None and by_name.get("inode") in (None, inode):
            return by_name
        own = _content(self.path(state, name, inode), name)
        if own is not None and own.get("inode") == inode:
            return own
        return by_name

    def complete(self, state: str, file: str, name: Name) -> Name:
        """Return a name with what a reason in error/ or expired/ adds: tries, and the arrival of a foreign name."""
        if state not in WITH_REASON or name.generated or name.since:
            return name
        number = inode_or_none(f"{_base(self.folder)}/{state}/{file}")
        reason = None if number is None else self.find(state, file, number)
        if reason is None:
            return name
        since = _ms(reason.get("arrived"))
        if not name.foreign:
            return replace(name, since=since)
        return replace(
            name, since=since, delivery_count=_count(reason.get("delivery")), cancels=_count(reason.get("cancels"))
        )

    def unmatched(self, state: str, *, refile: bool = True) -> Iterator[str | None]:
        """Yield the paths of reasons that match no file, and None for each file looked at meanwhile.

        Reasons that are still filed by an inode are not yielded if their files are there; `refile` files them by name.

        RACE: a reason is written before its file arrives. So reasons are listed first, and the file of a young reason
        may still arrive.
        """
        unmatched = set[str]()
        for entry in entries(f"{self.folder}/{state}"):
            unmatched.add(entry.name)
            yield None
        if not unmatched:
            return
        unexplained = False
        try:
            with listing(f"{_base(self.folder)}/{state}") as files:
                for entry in files:
                    unexplained |= (by_name := _file(entry.name, None)) not in unmatched
                    unmatched.discard(by_name)
                    yield None
        except FileNotFoundError:
            return  # a state folder that is missing proves nothing
        for name in unmatched:
            path = f"{self.folder}/{state}/{name}"
            try:
                yield None if unexplained and not self.explains_nothing(state, path, refile=refile) else path
            except OSError as error:
                log.warning("%s is not matched to its file until the next sweep: %s", path, describe(error))

    def explains_nothing(self, state: str, path: str, *, refile: bool) -> bool:
        """Return whether the file of a reason is gone, or has another reason; `refile` as of `unmatched`."""
        content = _content(path)
        if content is None or not explains(f"{_base(self.folder)}/{state}", os.path.basename(path), content):
            return True
        destination = self.path(state, str(content["name"]), None)
        number = inode_or_none(f"{_base(self.folder)}/{state}/{content['name']}")
        if path != destination and content.get("inode") != number and exists(destination):
            return True
        if refile and path != destination:
            with suppress(FileNotFoundError):  # RACE: who moved the file was first, or has taken it out again
                self._storage.replace(path, destination)
        return False

    @contextmanager
    def _logging(self, path: str, outcome: str) -> Iterator[None]:
        """Log an error, and its outcome for a reason: the message itself has moved."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            log.warning("%s %s: %s", path, outcome, describe(error))


def why(reason: str, details: Mapping[str, object], ms: int) -> dict[str, object]:
    """Return what is kept with a message that goes to error/ or expired/ for a reason, at a time in ms since 1970."""
    return {**details, "reason": reason, "time": time_text(ms)}


def content(fields: Mapping[str, object], name: str, inode: int) -> bytes:
    """Return the content of the reason of a file with a name and an inode."""
    return as_json({**fields, "name": name, "inode": inode})


def as_json(said: object) -> bytes:
    """Return what a handler may have said as JSON: bytes as text, what JSON does not have as Python shows it."""

    def shown(value: object) -> str:
        return value.decode(errors="replace") if isinstance(value, bytes) else repr(value)

    return json.dumps(said, default=shown).encode()


def explains(folder: str, file: str, reason: Mapping[str, object]) -> bool:
    """Return whether a reason, whose own file name is `file`, is about a file that is in a folder.

    A reason that is filed by an inode is about a file with another inode only if no second file can have the name.
    """
    name = reason.get("name")
    if not isinstance(name, str) or os.path.basename(name) != name:
        return False
    try:
        number = inode(f"{folder}/{name}")
    except (OSError, ValueError):
        return False
    return file == _file(name, None) or reason.get("inode") == number or names.is_unique(name)


def _file(name: str, inode: int | None) -> str:
    digest = hashlib.sha256(f"{'' if inode is None else inode}/".encode() + os.fsencode(name)).hexdigest()[:32]
    return f"{digest}.json"


def _ms(time: object) -> int:
    """Return the time in a reason, in ms since 1970; 0 if the text, which others may have written, is no time."""
    try:
        return max(int(datetime.fromisoformat(str(time)).timestamp() * 1000), 0)
    except (ValueError, OverflowError):
        return 0


def _count(number: object) -> int:
    """Return a count in a reason; 0 if no name could hold it."""
    return number if type(number) is int and 0 <= number < 1 << 31 else 0


def _base(folder: str) -> str:
    """Return the folder that contains the state folders: two above a queue's reasons."""
    return os.path.dirname(os.path.dirname(folder))


def _content(path: str, name: str | None = None) -> dict[str, object] | None:
    """Return what a reason says; None if it is missing, about another name, or damaged by hand, which fsck reports."""
    try:
        content = parse_json(read_small(path) or b"null", any_text=True)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and name in (None, content.get("name")) else None
