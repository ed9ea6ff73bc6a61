"""The record cursor: which records the holder of a bundle has taken, and what became of each.

Nothing of this is on disk until the bundle is settled, by one commit. A record is known by its number. Each record that
was taken is unsettled until a verb settles it; any thread may do so, in any order.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, NamedTuple

from dropq.errors import DropqError, LeaseLost, StorageError
from dropq.records.formats import MAX_RECORD_BYTES, ReadFailed, Unreadable, read_failed
from dropq.records.reader import RawRecord, RecordReader
from dropq.storage.failures import storage_error

#: Bytes of records that are read ahead.
AHEAD = 64 << 10
#: Bytes of memory that a record which waits there needs beside its own.
OVERHEAD = 512
#: Where a record begins and ends in its body.
Span = tuple[int, int]


class Fate(NamedTuple):
    """What is done with a record that was not acknowledged, once it is a message: nack, fail or reject."""

    verb: str
    #: Seconds before the next delivery after a nack; None takes the queue's redelivery_delay.
    delay: float | None = None
    reason: str = ""
    details: Mapping[str, object] = {}

    @property
    def said(self) -> dict[str, object]:
        """What the reason beside the message says."""
        return {"detail": self.reason, **self.details}


class Settled(NamedTuple):
    """A record that was settled and not acknowledged: where it begins and ends, its bytes, what becomes of it."""

    begin: int
    end: int
    data: bytes
    fate: Fate


class RecordCursor:
    """The records of one bundle, as its holder takes and settles them.

    Args:
        file, first, max_bytes: as of `RecordReader`; the file must be seekable.

    Attributes:
        others: the records that were settled and not acknowledged, by number.
        acked, failed: how many were acknowledged, and how many failed or were rejected.
        buffered_bytes: bytes of the others, which wait in memory.
        read_failure: why the body could not be read any further; None if it could.
    """

    def __init__(self, file: IO[bytes], body_format: str, *, first: int = 1, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self.file = file
        self.format = body_format
        self._current: RawRecord | None = None  # the last that was taken, while it is the only unsettled one
        self._unsettled = OrderedDict[int, RawRecord]()  # a dict looks long for its first entry where many were removed
        self.others: dict[int, Settled] = {}
        self.acked = self.failed = self.buffered_bytes = 0
        self._unreadable: Unreadable | None = None
        self._reader = RecordReader(file, body_format, first=first, max_bytes=max_bytes)
        self._records = iter(self._reader)
        self._ahead = deque[RawRecord]()
        self._ended = False
        self._late: dict[int, Span] = {}  # acknowledged behind an unsettled one
        self._first_acked: tuple[int, int] = 0, 0  # number, begin
        self._last_acked = 0  # end
        self._last: RawRecord = first, 0, 0, b""  # that was taken
        self._reads = False
        self.read_failure: ReadFailed | None = None
        self._process = os.getpid()  # a child after a fork would move its parent's position in the file
        self._frozen = 0
        # A signal handler may settle the message while its own thread takes, or settles, a record. So the lock lets
        # that thread in again, and each step below leaves a state from which nothing is lost: at worst a record is both
        # acknowledged and left.
        self._lock = threading.RLock()
        self._version = self._version_now()

    def _version_now(self) -> tuple[int, int, int]:
        found = os.fstat(self.file.fileno())
        return found.st_ino, found.st_size, found.st_mtime_ns

    @property
    def size(self) -> int:
        """How many bytes the body had when it was opened."""
        return self._version[1]

    def is_changed(self, path: str) -> bool:
        """Return whether somebody wrote to the body since it was opened, or put another file in its place."""
        if self._version_now() != self._version:
            return True
        with suppress(FileNotFoundError):  # the claim is gone, or was renewed, as its commit will find
            return os.lstat(path).st_ino != self._version[0]
        return False

    @property
    def head(self) -> bytes:
        """The head of the body; it is known once the first record was asked for."""
        return self._reader.head

    def take(self) -> RawRecord | None:
        """Take the next record, which is then unsettled; return None at the end, or where the rest is unreadable."""
        if self._frozen or not (self._ahead or self._read_to_take()):
            return None
        if self._current is not None:
            self._move_current()
        # RACE: with a thread, or a signal handler, that settles the message. The record is unsettled before it
        # is not ahead any more, and `left` looks ahead first. So it is seen in one of them.
        self._current = self._last = record = self._ahead[0]
        self._ahead.popleft()
        return record

    @property
    def unsettled(self) -> OrderedDict[int, RawRecord]:
        """The records that were taken and are not settled, by number, in order."""
        if self._current is not None:
            self._move_current()
        return self._unsettled

    def _move_current(self) -> None:
        """Let the last record that was taken be one of several unsettled ones."""
        with self._lock:  # RACE: with a thread that settles it
            if (record := self._current) is not None:
                self._unsettled[record[0]] = record
                self._current = None

    def _read_to_take(self) -> bool:
        with self._lock:
            # RACE: with a thread that settles the message, and copies what is left of the same file. It was first.
            return not self._frozen and self._read()

    def _read(self) -> bool:
        """Read some records ahead; return whether there are any.

        An error or an interrupt ends the reader amid the body: `_reads` stays true, and nothing more is read.
        """
        with self._lock:
            if os.getpid() != self._process:
                raise DropqError("the message was received before a fork, by the parent, which reads its records")
            if self.read_failure is not None:
                raise self.read_failure
            if self._reads or self._ended or self.file.closed:
                return False
            self._reads = True
            size = 0
            try:
                for record in self._records:
                    self._ahead.append(record)
                    size += record[2] - record[1]
                    if size > AHEAD:
                        break
                else:
                    self._ended = True
            except Unreadable as error:
                self._unreadable, self._ended = error, True
            except OSError as error:
                last = self._ahead[-1] if self._ahead else self._last
                self.read_failure = read_failed(
                    error, last[2], "what was not read is left, once the message is settled"
                )
                if not self._ahead:  # else it is raised once what was read before is taken
                    raise self.read_failure from error
                return True
            self._reads = False
            return bool(self._ahead)

    @property
    def next(self) -> tuple[int, int] | None:
        """The number and the beginning of what comes after the records that were taken; None if nothing does."""
        with self._lock:
            if not self._ahead and not self._reads:
                with suppress(ReadFailed):  # which `take` raises
                    self._read()
            if self._ahead:
                number, begin, _, _ = self._ahead[0]
                return number, begin
            if self._reads:  # we are in a signal handler, or behind an error: the last record's end begins what is left
                number, _, end, _ = self._last
                framed = self.format == "frames"
                if end and end >= self.size - (not framed):
                    return None  # nothing follows the last record but its line feed
                return number + (framed and end > 0), end
            return None if self.unreadable is None else (self.unreadable.number, self.unreadable.byte)

    @property
    def unreadable(self) -> Unreadable | None:
        """Why the rest cannot be taken apart, once all before it was taken; else None."""
        return None if self._ahead else self._unreadable

    @property
    def is_fresh(self) -> bool:
        """Whether no record was taken."""
        return not self._last[3]

    @property
    def is_settled(self) -> bool:
        """Whether any record was settled."""
        return self.acked > 0 or bool(self.others)

    def ack(self, number: int) -> bool:
        """Acknowledge an unsettled record; return False for any other, or if the bundle is being settled."""
        with self._lock:
            record = self._current
            # Most loops settle each record before they take the next: no other is unsettled, and it ends what is acked.
            if record is not None and record[0] == number and not self._unsettled and not self._frozen:
                if not self.acked:
                    self._first_acked = number, record[1]
                self._last_acked = record[2]
                self.acked += 1
                self._current = None
                return True
            unsettled = self.unsettled
            record = unsettled.get(number)
            if record is None or self._frozen:
                return False
            _, begin, end, _ = record
            if len(unsettled) > 1 and number != next(iter(unsettled)):
                self._late[number] = begin, end
            if not self.acked or number < self._first_acked[0]:
                self._first_acked = number, begin
            if end > self._last_acked:
                self._last_acked = end
            self.acked += 1
            unsettled.pop(number, None)  # a signal handler may have been quicker
            if self._late and not unsettled:
                self._late.clear()
            return True

    def settle(self, number: int, data: bytes, fate: Fate) -> bool:
        """Settle an unsettled record without an ack; return False for any other, or if the bundle is being settled."""
        with self._lock:
            record = self.unsettled.get(number)
            if record is None or self._frozen:
                return False
            self.others[number] = Settled(record[1], record[2], data, fate)
            self.buffered_bytes += len(data) + OVERHEAD
            self.failed += fate.verb != "nack"
            del self.unsettled[number]
            return True

    def forget(self) -> None:
        """Forget what was settled, as all of the message went as a whole."""
        with self._lock:
            self.acked = self.failed = self.buffered_bytes = 0
            self.others.clear()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let no record be taken or settled in the block, which settles the message, and close the body after it.

        An error without effect opens the bundle again.
        """
        with self._lock:
            self._frozen += 1
        try:
            yield
        except BaseException as error:
            if isinstance(error, LeaseLost) or (isinstance(error, StorageError) and error.location is not None):
                self.file.close()
            else:
                with self._lock:
                    self._frozen -= 1
            if isinstance(error, OSError):
                raise storage_error(error, "nothing was settled, and the message is still held") from error
            raise
        self.file.close()

    def left(self) -> tuple[int, int, list[Span]] | None:
        """Return where the rest begins, by number and byte, and the spans settled in it; None without a rest."""
        nearest = self.next  # first, as `take` says
        with self._lock:
            first = list(self.unsettled.values())[:1]  # at once, as another thread may be taking a record
            begin = (first[0][0], first[0][1]) if first else nearest
            if begin is None:
                return None
            settled = [span for number, span in self._late.items() if number > begin[0]]
            settled += [(each.begin, each.end) for number, each in self.others.items() if number > begin[0]]
            return *begin, sorted(settled)

    def acknowledged(self) -> tuple[int, int, int, list[Span]] | None:
        """Return what was acknowledged: its first number, its two ends, and the spans of all else in it; else None."""
        with self._lock:
            if not self.acked:
                return None
            (number, begin), end = self._first_acked, self._last_acked
            others = [(record[1], record[2]) for record in list(self.unsettled.values())]
            others += [(each.begin, each.end) for each in self.others.values()]
            return number, begin, end, sorted(span for span in others if begin < span[0] < end)
