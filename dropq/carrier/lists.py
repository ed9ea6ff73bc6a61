"""Carry messages from a folder of one queue into a queue on another file system, each once, also after crashes.

The messages go in numbered lists. A list is written once, beside the messages, and replaces nothing. Its messages are
copied into a job of that queue, whose commit is one rename; the ledger there keeps the number of the list, and what
tells it from any other list of that number. Then the messages are removed here, and the next list may be written.

A list may also name messages that go back to the queue that gave them: it is settled by renames here, and no other
queue sees it. A message is never in both kinds of list at once.

Invariant: list N+1 is written only when list N is settled: it is in the ledger there, and nothing of it that was sent
is left here; or its messages went back, and none of them is left here.
List N is removed only when list N+1 is there, and of several lists only the newest counts. So if a carrier wakes up
late, the other queue refuses its list, and it writes no list here. Any number of carriers may do any step at any time.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from dropq.errors import DropqError, NoSuchQueue
from dropq.format.layout import GONE_PREFIX, STATES, QueueLayout
from dropq.format.names import is_plain
from dropq.format.transfers import ENDED, list_name, list_number, own_name_of
from dropq.lifecycle import naming
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.sending import into_target
from dropq.lifecycle.transfers import Row, marks_of
from dropq.staging.jobs import Attempt, StagedAttempt, TransferJob
from dropq.storage import reading

#: A list has at most this many messages, and is full once they have this many bytes.
LIST_LENGTH = 1000
LIST_BYTES = 64 << 20

#: What an error says if a list could not be carried.
_GIVEN = "the messages stay where they are until a sweep carries them"


@dataclass(frozen=True, slots=True)
class List:
    """A list: its number, a token that no other list of that number has, and its messages, by their names here.

    `back` says that they go back to the queue that gave them.
    """

    number: int
    token: str
    given: tuple[str, ...]
    back: bool = False


@dataclass(frozen=True)
class Carrier:
    """Carries the messages in a folder of a queue into another queue."""

    source: QueueContext
    #: Has their lists, and in the folder `given` the messages, each of whose names is given once, for ever.
    row: Row
    destination: QueueContext
    #: Of `source`; the ledger of `destination` keeps it, as an older state of `source` may lack the row.
    mark: str
    #: For a bridge: whether the root of `destination` owns what arrives.
    owned: bool = False
    #: Whether all that is here goes back.
    recalls: bool = False
    #: The names in `destination` of what this carrier sent, by the names in `given`.
    arrived: dict[str, str] = field(default_factory=dict)
    #: The names in `given` that somebody wrote to while they were copied: another carrier takes them.
    written: set[str] = field(default_factory=set)

    def run(self) -> Iterator[int]:
        """Carry all messages in the folder, a list at a time; yield how many messages of each this carrier sent.

        After an error those of the list at hand are still here, or in the other queue; then the next carrier removes
        them here.
        """
        with self.source.error_context(_GIVEN):
            if not any(map(reading.is_message_file, reading.entries(self.given))):
                return
        while True:
            newest = self._newest()
            if newest is not None:
                try:
                    yield self._settle(newest)
                except DropqError:
                    if (now := self._newest()) is None or now.number == newest.number:
                        raise
                    continue  # RACE: other carriers went on meanwhile
            with self.source.error_context(_GIVEN):
                if not self._list(newest):
                    return

    @property
    def given(self) -> str:
        """The folder that the messages lie in."""
        return self.row.given

    @property
    def _way_out(self) -> str:
        """How to end a row by hand."""
        target, row = self.source.layout.target, self.row
        return f"move what is left there to {target}, and rename {row.folder} to {row.name}{ENDED}"

    # -- the lists ---------------------------------------------------------------------------------------------------

    def _newest(self) -> List | None:
        """Return the newest list, which alone counts; None without a list."""
        while True:
            with self.source.error_context(_GIVEN):
                number = max(self._numbers(), default=None)
                if number is None:
                    return None
                path = f"{self.row.folder}/{list_name(number)}"
                data = reading.read_small(path, limit=reading.LONG_LIST)
                if data is None or (self.row.peer and not self._is_newest(number)):
                    continue  # RACE: a newer one was written, and this one removed
            try:
                return _parsed(number, reading.parse_json(data))
            except ValueError as error:
                raise DropqError(
                    f"{path} is damaged ({error}), so it is not known which messages are in "
                    f"{self.destination.layout.home} already: remove those from {self.given}, {self._way_out}; "
                    "nothing was changed"
                ) from error

    def _is_newest(self, number: int) -> bool:
        """Return whether no newer list is there. One listing may miss a list that is being written.

        RACE: a carrier that comes late writes a list of a number that is free again. No job refuses it where lists go
        back, as no other queue knows those.
        """
        return max((*self._numbers(), *self._numbers()), default=0) == number

    def _numbers(self) -> list[int]:
        return [number for number in map(list_number, reading.names_in(self.row.folder)) if number is not None]

    def _list(self, newest: List | None) -> bool:
        """List the messages in the folder, in place of the newest list, which is settled; return False without any."""
        storage, layout = self.source.storage, self.source.layout
        last = 0 if newest is None else newest.number
        given = going_back = self._going_back(newest)
        given = given or self._waiting()
        if not given:
            return False
        # What was removed here, and what was moved here, must not come back or go by a power cut once it is listed.
        storage.sync(self.given, *filter(reading.is_folder, map(layout.folder, STATES)))
        content = {"format": 1, "list": secrets.token_hex(8), "given": given, **({"back": True} if going_back else {})}
        draft = f"{layout.private}/{GONE_PREFIX}{secrets.token_hex(8)}"
        storage.write_new(draft, json.dumps(content).encode())
        path = f"{self.row.folder}/{list_name(last + 1)}"
        try:
            # RACE: with other carriers. The first has the number. If one comes so late that newer lists exist, and
            # this number is free again, its list does not count.
            if not storage.rename_exclusive(draft, path):
                storage.link(draft, path)
        except FileExistsError:
            return True
        finally:
            storage.unlink(draft)
        storage.sync(self.row.folder)
        for number in self._numbers():
            if number <= last:
                storage.unlink(f"{self.row.folder}/{list_name(number)}")
        return True

    def _going_back(self, newest: List | None) -> list[str]:
        """Return the names of messages that go back to the queue that gave them.

        A bridge sends back what its newest list left here: no consumer would get it here. If it recalls, it sends all
        back. A carrier within one root sends nothing back.
        """
        if not self.row.peer:
            return []
        here = reading.names_in(self.given)
        if not self.recalls:
            here &= frozenset() if newest is None or newest.back else frozenset(newest.given)
        return sorted(name for name in here if own_name_of(name) is not None)[:LIST_LENGTH]

    def _waiting(self) -> list[str]:
        """Return the names of enough messages for a list; leave out those that this user may not read.

        A bridge lists those, too, and sends them back, as the list leaves them here.
        """
        given = list[tuple[str, str]]()
        size = 0
        for entry in reading.entries(self.given):
            if len(given) >= LIST_LENGTH or size >= LIST_BYTES:
                break
            if not reading.is_message_file(entry):
                continue
            try:
                length = entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue  # RACE: somebody took it
            file = self._given_name(entry.name) if self.row.peer or os.access(entry.path, os.R_OK) else None
            if file is not None and file not in self.written:
                given.append((own_name_of(file) or "", file))
                size += length
        return [file for _, file in sorted(given)]  # copies come there in the order of their own names

    def _given_name(self, file: str) -> str | None:
        """Return the name of a message in the folder; give it a new one if a script moved it there under its own.

        Return None for a name that is ignored, and for what somebody has taken.
        """
        if own_name_of(file) is not None:
            return file
        if self.source.sidecars.ignored(file):
            return None
        name = self.source.sidecars.file(file).name
        return Moves(self.source).give(f"{self.given}/{file}", name, self.given)

    # -- one list: copy, commit, remove ------------------------------------------------------------------------------

    def _settle(self, listed: List) -> int:
        """Send the messages of the newest list, unless that is done, and remove them here; return how many it sent."""
        if listed.back:
            return self._send_back(listed)
        job = TransferJob(self.destination, self.row.name, listed.number)
        count = 0
        if was_sent := job.sent:
            job.abort()  # which rolls it forward if that is not done
        else:
            count = self._send(job, listed)
        note = job.sent_note()
        if note is None or note.get("list") != listed.token:
            raise DropqError(
                f"{self.destination.layout.home} has another list {listed.number} of this row than {self.row.folder}, "
                "which is a copy of another queue's folder, or an older state of its own: remove from "
                f"{self.given} what that queue has already, {self._way_out}; nothing was removed"
            )
        left = note.get("left")
        if not isinstance(left, list) or not all(isinstance(file, str) for file in left):
            raise DropqError(
                f"{self.destination.layout.ledger}: what it says of list {listed.number} of row {self.row.name} is "
                "damaged, so it is not known which messages are there already; nothing was removed"
            )
        kept = set(left)
        with self.destination.error_context("the messages are there, and the next carrier removes them here"):
            self.destination.storage.sync(self.destination.layout.ledger)
        with self.source.error_context("the messages were carried, and the next carrier removes them here"):
            # Of a list that was sent before most often nothing is here, and to remove what is gone takes a call, too.
            here = reading.names_in(self.given) if was_sent else frozenset(listed.given)
            for file in listed.given:
                if file in here and file not in kept:
                    self.source.storage.unlink(f"{self.given}/{file}")
        return count

    def _send_back(self, listed: List) -> int:
        """Move the messages of a list back to the queue that gave them; return 0, as none was sent."""
        for given in listed.given:
            name = self.source.sidecars.parse(own_name_of(given) or given)
            into_target(self.source, f"{self.given}/{given}", name)
        with self.source.error_context(_GIVEN):
            self.source.storage.sync(self.given)
        return 0

    def _send(self, job: TransferJob, listed: List) -> int:
        """Copy the messages of a list into its job, and commit that; return how many were sent, 0 if by another."""
        try:
            staged, copies = self._stage(job, listed)
        except (DropqError, OSError):
            if not job.sent:
                raise
            job.abort()  # RACE: another carrier has sent the list meanwhile
            return 0
        try:
            left = [file for file in listed.given if file not in copies]
            note: dict[str, object] = {"list": listed.token, "left": left, "from": self.mark}
            if self.row.peer:
                note["peer"] = self.source.root.config.instance
            count = job.send(staged, note)
        except (DropqError, OSError):
            if job.abort() or job.sent:  # RACE: the same
                return 0
            raise
        if count:
            self.arrived.update(copies)
        return count

    def _stage(self, job: TransferJob, listed: List) -> tuple[StagedAttempt, dict[str, str]]:
        """Copy the messages of a list into its job; return them as they are staged, and the names of the copies.

        If that fails, nothing of it is left, and what other carriers have copied stays.
        """
        with self.source.error_context(_GIVEN):
            self.source.storage.sync(self.row.folder)  # its writer may have died before it did
        job.begin()
        attempt = job.attempt("list")
        try:
            with self.destination.error_context("nothing was carried"):
                # RACE: from here on, no queue that takes the place of this one has the attempt
                refuse_another(self.row, self.destination.layout)
            with self.destination.error_context(_GIVEN):
                copies, before = self._copy(attempt, listed)
                # RACE: a person who takes a listed message away by hand from here on has a second copy, and what a
                # process writes to it from here on is removed with it.
                for file in self._left(before):
                    self.destination.storage.unlink(f"{attempt.folder}/{copies.pop(file)}")
            attempt.files += copies.values()
            return attempt.finish(), copies
        except (DropqError, OSError):
            with suppress(DropqError, OSError):  # of the removal: a sweep drops what stays
                attempt.discard()
                self.destination.storage.remove_folder(job.folder)  # unless another carrier is in it
            raise

    def _copy(self, attempt: Attempt, listed: List) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
        """Copy the messages of a list that are there into a job.

        Return their names, and of each how long it was before, and when it was written.
        """
        storage = self.destination.storage
        copies: dict[str, str] = {}
        before: dict[str, tuple[int, int]] = {}
        taken: set[str] = set()
        keeps_names = not self.owned and storage.refuses_to_replace(self.destination.layout.private)
        with storage.together(attempt.folder, len(listed.given)) as each:
            for given in listed.given:
                path = f"{self.given}/{given}"
                own = own_name_of(given) or given
                try:
                    file = own
                    if not (keeps_names and is_plain(own)):
                        name = self.source.sidecars.parse(own)
                        file = naming.name_of_copy(self.source, path, name, self.destination, owned=self.owned)
                    if file in taken:  # two messages of one id
                        file = naming.copy_name(self.destination, self.destination.sidecars.parse(file))
                    found = storage.copy(path, f"{attempt.folder}/{file}", synced=each)
                except FileNotFoundError:
                    if reading.exists(path):
                        raise  # the job was dropped, or sent by another carrier
                    continue
                except PermissionError:
                    if os.access(path, os.R_OK):
                        raise
                    continue  # another user's, who listed it: it stays for a carrier that may read it
                except OSError:
                    if not self.row.peer or not reading.exists(attempt.folder):
                        raise
                    continue  # it is no file, cannot be read, or finds no room: it goes back
                copies[given], before[given] = file, (found.st_size, found.st_mtime_ns)
                taken.add(file)
        return copies, before

    def _left(self, before: Mapping[str, tuple[int, int]]) -> list[str]:
        """Return which copied messages do not go with this list: they are gone, or somebody wrote to them meanwhile."""
        left = []
        for given, was in before.items():
            try:
                found = self.source.settling.status(f"{self.given}/{given}")
                if (found.st_size, found.st_mtime_ns) == was:
                    continue
                self.written.add(given)
            except FileNotFoundError:
                pass
            left.append(given)
        return left


def refuse_another(row: Row, found: QueueLayout) -> None:
    """Raise NoSuchQueue if a row leads to another queue than its messages were given to."""
    if row.mark not in marks_of(found):
        raise NoSuchQueue(
            f"{found.home} is another queue than the one that the messages in {row.given} were given to: bring that "
            "one back, or move them to a target/; nothing was carried"
        )


def _parsed(number: int, content: object) -> List:
    """Return a list; each of its messages is a name in one folder, and no path."""
    token, given = map(content.get, ("list", "given")) if isinstance(content, Mapping) else (None, None)
    if not isinstance(token, str) or not token:
        raise ValueError("it has no 'list'")
    if not isinstance(given, list) or not all(isinstance(name, str) and own_name_of(name) for name in given):
        raise ValueError("it lists no messages")
    return List(number, token, tuple(given), back=isinstance(content, Mapping) and content.get("back") is True)
