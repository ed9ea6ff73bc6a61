"""Group commit: many records become one message, a bundle, which costs the system calls of one message.

Invariant: a record that was taken is in the writer until the rename that sends its bundle, and in the queue from then
on. One bundle is sent at a time, the oldest first. A bundle that a queue refuses stays as it is, with its name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dropq.durations import Duration, parse_duration
from dropq.errors import DropqError, QueueFull
from dropq.queue.sender import Headers, Sender, Sent
from dropq.records.formats import LENGTH, MAX_RECORD_BYTES, check_record, csv_head, format_of, pack
from dropq.records.rows import LINE_FEED
from dropq.storage.liveness import FORKS

log = logging.getLogger("dropq")

#: Records and bytes that a bundle has at most.
MAX_RECORDS, MAX_BYTES = 1000, 1 << 20
#: While so many times `max_bytes` wait, no more records are taken.
MOST_WAITING = 4
#: How many bundles `flush` remembers.
REMEMBERED = 10_000
#: Seconds after which the writer's thread tries again to send what the queue refused.
RETRY = 1.0
#: After a send, the writer's thread waits for this share of the time that the send took, so that the threads whose
#: records were sent can give it the next. Without that they miss the next send, and there are twice as many sends.
GATHERED = 0.25


@dataclass(slots=True, eq=False)
class _Bundle:
    """The records of one message.

    Attributes:
        size: how many bytes its body has.
        future: what becomes of its records; None if nobody waits for that.
        since: when its first record was taken, by `time.monotonic()`.
        home: the queue for which it has its name; "" while it has no name.
        file, id, not_before: the name, the message's id, and when it may be delivered, in ms.
        sent: what became of it, once it is visible, or discarded.
    """

    size: int
    records: list[bytes] = field(default_factory=list)
    future: Future[Sent] | None = None
    since: float = 0.0
    home: str = ""
    file: str = ""
    id: str = ""
    not_before: int = 0
    sent: list[Sent] = field(default_factory=list)


class RecordWriter:
    """Sends records, many in one message; `Queue.record_writer` makes it.

    Close it, or leave its `with` block: that sends what was written, also when an exception ends the block, as a file
    keeps what was written to it. Any threads may share it. In a child after a fork it sends nothing, and refuses
    records. A signal handler may use it, but for the moments in which the handler's own thread is inside of it: then it
    raises DropqError, and the handler raises an exception, such as SystemExit, to let the end of the block send.
    """

    def __init__(
        self,
        queue: Sender,
        format: str = "jsonl",
        *,
        max_records: int = MAX_RECORDS,
        max_bytes: int = MAX_BYTES,
        linger: Duration | None = None,
        header: bytes | str | None = None,
        **fields: Any,
    ) -> None:
        for name, limit in (("max_records", max_records), ("max_bytes", max_bytes)):
            if limit < 1:
                raise ValueError(f"{name} is {limit}, and must be 1 or more")
        for name, why in (("type", "it is the format"), ("message_id", "each bundle gets an id of its own")):
            if name in fields:
                raise ValueError(f"a record writer takes no {name}: {why}")
        self._queue = queue
        self._format = format_of(None, format)
        self._headers = Headers(type=self._format, **fields)
        self._head = _head(self._format, header)
        self._max_records, self._max_bytes = max_records, max_bytes
        self._most = MOST_WAITING * max_bytes
        self._linger = None if linger is None else parse_duration(linger)
        self._longest = MAX_RECORD_BYTES
        self._framing = LENGTH.size if self._format == "frames" else 1
        self._in_lines = self._format in ("jsonl", "text")
        queue._to_who_takes(self._check_headers)

        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._turn = threading.Lock()
        self._forks = FORKS.count
        self._thread: threading.Thread | None = None
        # What follows is read and changed with the lock.
        #: The bundles: the last takes records, the others are full. One append ends the last.
        self._bundles = deque([_Bundle(len(self._head))])
        self._buffered = 0
        self._sent: deque[tuple[Sent, int]] = deque(maxlen=REMEMBERED)
        self._unsynced: list[Exception] = []
        self._closed = False
        #: Whether a thread is in `_take`: if it is this thread, a signal handler has come in between.
        self._is_taking = False
        #: Which thread is sending; 0 for none.
        self._sending = 0
        #: Whether a caller of `send` sends what others wait for, or the writer's thread does.
        self._leads = self._is_handed_over = False
        self._retries_at = 0.0

    def __repr__(self) -> str:
        return f"<RecordWriter of {self._format} to {self._queue.name!r}>"

    def _check_headers(self, sender: Sender) -> None:
        """Raise ValueError if no name can hold the headers, before any record is taken; note how long one may be."""
        sender._address_of(b"", self._headers)
        self._longest = sender._destination.config.max_record_bytes

    # -- taking ------------------------------------------------------------------------------------------------------

    def write(self, record: Any) -> None:
        """Take a record, and send it with others; `flush` and the end of the block tell what became of it.

        Args:
            record: bytes, or text, which is sent as UTF-8; in jsonl also any other value that JSON can hold.

        Raises:
            ValueError: the format cannot hold the record; it was not taken.
            QueueFull, StorageError, NoSuchQueue: the queue refuses what was written before, and four times `max_bytes`
                wait; the record was not taken.
            DropqError: the writer is closed, or is the parent's; the record was not taken.
        """
        if self._take(record):
            self._send_full()

    def send(self, record: Any) -> Future[Sent]:
        """Take a record, and return what becomes of it: done when its bundle is as durable as the queue asks.

        Without `linger` it is sent at once, with what else was taken: by this thread; or, if another thread is sending,
        together with all that comes meanwhile. With `linger` it waits for others. Records of one message may share a
        future. If the queue refuses its bundle, the future has the error, and the record stays in the writer, for the
        next flush. An error that says that the message is visible means that the record was sent.

        Args:
            record: as of `write`.

        Raises:
            ValueError, QueueFull, StorageError, NoSuchQueue, DropqError: as of `write`; the record was not taken.
        """
        awaited: list[Future[Sent]] = []
        fills = self._take(record, awaited)
        if self._linger is None:
            self._send_for_all()
        elif fills:
            self._send_full()
        return awaited[0]

    def _take(self, record: Any, awaited: list[Future[Sent]] | None = None) -> bool:
        """Put a record into the last bundle, its future into `awaited`, or raise; return whether a bundle is full."""
        data = record if type(record) is bytes else self._encoded(record)
        size = len(data)
        if not (self._in_lines and 1 < size <= self._longest and LINE_FEED not in data):  # most pass without a call
            check_record(data, self._format, self._longest)
        if self._forks != FORKS.count:
            self._check_process()
        while self._buffered >= self._most:
            self._make_room()
        size += self._framing
        with self._lock:
            if self._is_taking:
                raise _inside()
            self._is_taking = True
            try:
                if self._closed:
                    raise DropqError(f"{self!r} is closed; the record was not taken")
                bundle, fills = self._bundles[-1], False
                if bundle.size + size > self._max_bytes and bundle.records:
                    bundle, fills = self._next_bundle(), True
                records = bundle.records
                if not records:
                    bundle.since = time.monotonic()
                    if self._linger is not None:
                        self._call_thread()  # it sends the bundle after `linger`
                records.append(data)
                bundle.size += size
                self._buffered += size
                if awaited is not None:
                    bundle.future = bundle.future or _future()
                    awaited.append(bundle.future)
                if len(records) < self._max_records and bundle.size < self._max_bytes:
                    return fills
                self._next_bundle()
                return True
            finally:
                self._is_taking = False

    def _encoded(self, record: Any) -> bytes:
        if isinstance(record, str):
            return record.encode()
        if isinstance(record, bytes | bytearray | memoryview):
            return bytes(record)
        if self._format != "jsonl":
            raise ValueError(f"a record of {self._format} is bytes or text, and not {type(record).__name__}")
        from dropq.format.json_body import to_json

        return to_json(record).encode()

    def _next_bundle(self) -> _Bundle:
        """End the last bundle, unless it is empty; return the bundle that takes records now."""
        if self._bundles[-1].records:
            self._bundles.append(_Bundle(len(self._head)))
        return self._bundles[-1]

    def _make_room(self) -> None:
        """Send the full bundles; if there is no room then, raise the error that refused them."""
        if (refused := self._send_full()) is not None and self._buffered >= self._most:
            refused.add_note("the record was not taken")
            raise self._with_notes(refused)

    # -- sending -----------------------------------------------------------------------------------------------------

    def flush(self) -> list[Sent]:
        """Send what was taken; return the bundles that were sent since the last flush, the last 10,000 at most.

        Raises:
            QueueFull, StorageError, NoSuchQueue: what waits was not sent, and stays for the next flush; or a bundle is
                visible, and was not synced, as the error says. Notes on the error say how much was sent, and waits.
            DropqError: the writer is the parent's.
        """
        self._check_process()
        self._flush()
        return [sent for sent, _ in self._take_sent()]

    def _take_sent(self) -> list[tuple[Sent, int]]:
        """Return the bundles that were sent since the last time, each with the number of its records."""
        with self._lock:
            sent = list(self._sent)
            self._sent.clear()
        return sent

    def _flush(self) -> None:
        if (refused := self._send_all()) is not None:
            raise self._with_notes(refused)
        with self._lock:
            unsynced, self._unsynced = self._unsynced, []
        if unsynced:
            for other in unsynced[1:]:
                unsynced[0].add_note(str(other))
            raise self._with_notes(unsynced[0])

    def close(self) -> None:
        """Take no more records, and send what was taken; `flush` tells what was sent.

        Raises:
            QueueFull, StorageError, NoSuchQueue: as of `flush`, which may be called again.
        """
        if self._forks != FORKS.count:
            return  # what was taken is the parent's to send
        self._check_outside()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._flush()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _send_all(self) -> Exception | None:
        """Send what was taken until now; return the error of a queue that refuses it."""
        refused = self._send_full()
        if refused is None:
            with self._lock:
                self._next_bundle()  # not before: what waits behind a refused bundle goes on to grow
            refused = self._send_full()
        return refused

    def _send_full(self) -> Exception | None:
        """Send the full bundles; return the error of a queue that refuses one: it stays, and so do those behind it."""
        self._check_outside()
        try:
            while len(self._bundles) > 1:
                self._send_first()
        except Exception as refused:
            self._retries_at = time.monotonic() + RETRY
            refused.add_note(f"{self._waiting()} records wait in the writer: the next flush sends them")
            for future in self._awaited(forget=True):
                future.set_exception(refused)
            return refused
        return None

    def _send_first(self) -> None:
        """Send the first bundle, if it is full: other threads wait until that is done."""
        error: BaseException | None = None
        this_thread = threading.get_ident()
        with self._turn:
            self._sending = this_thread  # no call comes before it, in which a signal handler could come in between
            try:
                if len(self._bundles) == 1:
                    return  # RACE: another thread sent it
                bundle = self._bundles[0]
                try:
                    # A signal handler may have ended an empty one; or an interrupt came when it had just been sent.
                    if bundle.records and not bundle.sent:
                        self._queue._to_who_takes(lambda sender: self._send_to(sender, bundle))
                except BaseException as raised:
                    if not bundle.sent:
                        raise
                    error = raised
                future = self._drop(bundle, error)
            finally:
                self._sending = 0
        if future is not None:
            if error is None:
                future.set_result(bundle.sent[0])
            else:
                future.set_exception(error if isinstance(error, Exception) else _interrupted(bundle.sent[0]))
        if error is not None and not isinstance(error, Exception):
            raise error

    def _drop(self, bundle: _Bundle, error: BaseException | None) -> Future[Sent] | None:
        """Drop the first bundle, which was sent, or discarded by the queue; return its future."""
        with self._lock:
            self._bundles.popleft()
            self._buffered -= bundle.size - len(self._head)
            if bundle.sent:
                self._sent.append((bundle.sent[0], len(bundle.records)))
            if isinstance(error, Exception):
                self._unsynced.append(error)
            future, bundle.future = bundle.future, None
            return future

    def _send_to(self, sender: Sender, bundle: _Bundle) -> None:
        """Send a bundle; note in it what became of it, also where an error follows the send."""
        context, count = sender._destination, len(bundle.records)
        if bundle.home != context.layout.home:
            headers = self._headers._replace(message_id=bundle.id) if bundle.home else self._headers
            address = sender._address_of(b"", headers, asks=True, records=count)
            bundle.file, bundle.id, bundle.not_before = address
            takes = bool(bundle.file)
            bundle.home = context.layout.home if takes else ""
        else:
            takes = sender._admit() > 0
            with context.error_context("the message was not sent"):
                context.storage.unlink(f"{context.layout.working}/{bundle.file}")  # the last try may have left it
        if not takes:
            bundle.sent.append(Sent(bundle.id, False, ""))
            return
        sender._outlet.stage(bundle.file, pack(self._format, bundle.records, head=self._head))
        sender._send_staged(bundle.sent, Sent(bundle.id, True, context.name), bundle.file, bundle.not_before)

    def _awaited(self, *, forget: bool = False) -> list[Future[Sent]]:
        """Return the futures of the records that wait; `forget` them if the queue refuses these, which stay."""
        with self._lock:
            futures = [bundle.future for bundle in self._bundles if bundle.future is not None]
            for bundle in self._bundles if forget else ():
                bundle.future = None
        return futures

    # -- threads that share a commit -----------------------------------------------------------------------------------

    def _send_for_all(self) -> None:
        """Send what was taken, unless another thread is doing that; what comes meanwhile is for the writer's thread."""
        with self._lock:
            if self._leads or self._is_handed_over:
                return
            if self._sending == threading.get_ident():  # a signal handler came in between
                return self._hand_over()
            self._leads = True
        try:
            self._send_all()
        finally:
            with self._lock:
                self._leads = False
                if self._awaited():
                    self._hand_over()

    def _hand_over(self) -> None:
        self._call_thread()  # first: where no thread can start, the next `send` sends what waits
        self._is_handed_over = True

    def _call_thread(self) -> None:
        """Wake the writer's thread; start it if it does not run."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="dropq-records", daemon=True)
            thread.start()  # first: where no thread can start, the next record tries again, and `close` waits for none
            self._thread = thread
        self._changed.notify_all()

    def _run(self) -> None:
        """Send what others wait for, and what has lingered, until the writer is closed."""
        was_refused = False
        while self._wait_until_due():
            began = time.monotonic()
            refused = self._send_all()
            with self._changed:
                if self._is_handed_over:
                    self._changed.wait(GATHERED * (time.monotonic() - began))
            if refused is not None and not was_refused:
                log.warning("%r: %d records wait, and are tried again: %s", self, self._waiting(), refused)
            was_refused = refused is not None

    def _wait_until_due(self) -> bool:
        """Wait until something is to be sent by the writer's thread; return False if the writer was closed."""
        with self._changed:
            while not self._closed:
                self._is_handed_over = self._is_handed_over and bool(self._awaited())
                due = self._due()
                if due is not None and due <= time.monotonic():
                    return True
                self._changed.wait(None if due is None else due - time.monotonic())
            return False

    def _due(self) -> float | None:
        """Return when the writer's thread is to send, by `time.monotonic()`; None if nothing waits for it."""
        if self._is_handed_over:
            return 0.0
        first = self._bundles[0]
        if self._linger is None or not first.records:
            return None
        return max(first.since + self._linger, self._retries_at)

    # -- private -----------------------------------------------------------------------------------------------------

    def _waiting(self) -> int:
        """Return how many records were taken and not sent."""
        with self._lock:
            return sum(len(bundle.records) for bundle in self._bundles)

    def _with_notes(self, error: Exception) -> Exception:
        with self._lock:
            sent = [one for one, _ in self._sent]
        error.add_note(f"{len(sent)} bundles were sent since the last flush that ended well")
        if isinstance(error, QueueFull):
            error.sent = sent
        return error

    def _check_process(self) -> None:
        if self._forks != FORKS.count:
            raise DropqError(f"{self!r} was made before a fork, and is the parent's: make another here")

    def _check_outside(self) -> None:
        """Raise DropqError if a signal handler has come between what this thread does in the writer."""
        with self._lock:
            if self._is_taking or self._sending == threading.get_ident():
                raise _inside()


def _future() -> Future[Sent]:
    """Return a future that cannot be cancelled, as what was taken is sent."""
    future: Future[Sent] = Future()
    future.set_running_or_notify_cancel()
    return future


def _head(body_format: str, header: bytes | str | None) -> bytes:
    if body_format == "csv":
        return csv_head(header.encode() if isinstance(header, str) else header or b"")
    if header is not None:
        raise ValueError(f"{body_format} has no header: only csv has one")
    return b""


def _inside() -> DropqError:
    return DropqError(
        "a signal handler cannot use a record writer while its own thread is inside of it; nothing was changed: raise "
        "an exception in the handler, and the end of the writer's block sends what was written"
    )


def _interrupted(sent: Sent) -> DropqError:
    fate = "the message is visible, but a power cut may take it back: do not send it again"
    return DropqError(f"the sync of message {sent.id} was interrupted: {fate}")
