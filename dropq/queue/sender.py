"""The sending half of a queue: a body goes to working/, and one rename into target/ sends it.

If a step before that rename fails, the sender removes the staged file; no consumer could see it.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from io import BufferedWriter
from itertools import islice
from typing import IO, Any, NamedTuple, TypeVar

from dropq.durations import Duration, parse_duration
from dropq.errors import DropqError, NoSuchQueue, QueueFull, StorageError
from dropq.format import names
from dropq.format.typed import Typed, check_text
from dropq.hints import hinting
from dropq.lifecycle import naming
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.sending import Outlet
from dropq.policies.send_limits import SendLimits
from dropq.storage import reading
from dropq.storage.failures import error_context
from dropq.storage.files import Draft
from dropq.storage.reading import READ_SIZE

T = TypeVar("T")
#: A file that is sent: its path, or what is open for reading.
Source = str | os.PathLike[str] | IO[bytes]

#: The errors of a rename of a file that may be copied instead.
_NOT_OURS = frozenset({errno.EXDEV, errno.EACCES, errno.EPERM})

#: Messages that send_many makes durable together.
BATCH = 1000


class Headers(NamedTuple):
    """What a sender says of a message, beside its body: the other arguments of `Sender.send`, which explains them."""

    priority: int = 4
    type: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    expires_in: Duration | None = None
    delay: Duration | None = None
    properties: Mapping[str, Any] | None = None
    message_class: str | None = None
    message_id: str | None = None


#: The headers of a message that has nothing but a body.
PLAIN = Headers()


class Sent(NamedTuple):
    """What became of a send: the message's id, whether the queue took it, and the queue or topic that it went to.

    A queue that is full and discards does not take it: then nothing was sent, and it went to no queue. Of what is
    published to a topic, `distributed` says whether every receiver has it, or a route of the topic took it; False: they
    will get it, and it is not to be sent again. Elsewhere it is None.
    """

    id: str
    accepted: bool
    delivered_to: str
    distributed: bool | None = None


class Sender:
    """Sends to a queue; `Queue` is a sender."""

    name: str
    #: What its messages' names say besides the arguments of a send, by attribute of `Name`.
    _marks: Mapping[str, Any] = {}
    #: The limits of sends, from the first send on, and when to ask them again, by `time.monotonic()`.
    _limits: SendLimits | None = None
    _asks_at = 0.0
    #: Whether it waits if the queue makes senders wait; else it raises MustWait.
    _waits = True
    #: The senders that took its messages while it was full, by name.
    _overflowing: Mapping[str, Sender] = {}
    #: What sends, once the queue is open.
    _opened: Outlet | None = None

    def __init__(self, destination: QueueContext) -> None:
        self.name, self._opened = destination.name, Outlet(destination)

    @property
    def _outlet(self) -> Outlet:
        assert self._opened is not None
        return self._opened

    @property
    def _destination(self) -> QueueContext:
        """The queue that messages are sent to: of a view on topics, the topic's."""
        return self._outlet.context

    @property
    def _overflow_destinations(self) -> frozenset[str]:
        """The queues and topics that got messages because the queue was full."""
        return frozenset(other._destination.name for other in self._overflowing.values())

    def _missing_queue_sender(self) -> Sender | None:
        """Return the dead-letter sender if the queue is missing, and not away; else, or without such a queue, None."""
        return None

    def _overflow(self, full: QueueFull) -> Sender | None:
        """Return the sender to the queue of the overflow selector; None without one."""
        return None

    def _instead(self, refused: QueueFull | NoSuchQueue) -> Sender:
        """Return the sender to use instead of this, whose queue is full or missing; raise the error without one."""
        other = self._overflow(refused) if isinstance(refused, QueueFull) else self._missing_queue_sender()
        if other is None:
            raise refused
        return other

    def _to_who_takes(self, send: Callable[[Sender], T], *, once: bool = False) -> T:
        """Call `send` with this sender; or, if its queue is full or missing, with the sender to use instead.

        A call that can be made only `once`, as it reads a stream, is preceded by a check that the queue is there; it
        asks for room before it reads anything.
        """
        sender = (self._missing_queue_sender() or self) if once else self
        try:
            return send(sender)
        except (QueueFull, NoSuchQueue) as refused:
            if once and isinstance(refused, NoSuchQueue):
                raise
            return send(self._instead(refused))

    @hinting
    def send(
        self,
        body: bytes | str,
        *,
        priority: int = 4,
        type: str | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        expires_in: Duration | None = None,
        delay: Duration | None = None,
        properties: Mapping[str, Any] | None = None,
        message_class: str | None = None,
        message_id: str | None = None,
    ) -> Sent:
        """Send a message: once this returns, it is in target/, as durable as the queue's configuration asks.

        Where the queue has a write-lock, or is full and blocks, it waits first; periods count from the call. If
        the queue is not there, and the root has a dead-letter queue, the message becomes a dead letter there, which
        neither expires nor is delayed: `delivered_to` says so.

        Args:
            body: bytes, or text, which is sent as UTF-8 and as class T.
            priority: higher is delivered first; any 32-bit integer.
            type, correlation_id, reply_to: the JMS headers of these names.
            expires_in: how long it may wait before it expires.
            delay: how long it is kept from consumers.
            properties: the sender's own, by name; bool, int, float, str, or `Typed`.
            message_class: one of M B S P O T.
            message_id: an id of the sender's own; None generates one.

        Raises:
            NoSuchQueue, StorageError: the message was not sent, unless the error says that it is visible.
            Unavailable: the queue is away, or an unfinished delete hides it; nothing was sent.
            QueueFull: the queue is full, and rejects; nothing was sent.
            ValueError: a value that no name can hold; nothing was sent.
        """
        headers = Headers(
            priority, type, correlation_id, reply_to, expires_in, delay, properties, message_class, message_id
        )
        try:
            return self._send(body, headers)
        except (QueueFull, NoSuchQueue) as refused:
            return self._instead(refused)._send(body, headers)

    def _send(self, body: bytes | str, headers: Headers) -> Sent:
        outlet = self._opened or self._outlet  # a queue that is refused is refused before all else
        if headers == PLAIN and not self._marks:
            message_id, not_before = outlet.context.root.ids.next(), 0
            file = names.plain_name(message_id, 4, "T" if isinstance(body, str) else "B")
            if time.monotonic() >= self._asks_at and not self._admit():
                return Sent(message_id, False, "")
        else:
            file, message_id, not_before = self._address_of(body, headers, asks=True)
            if not file:
                return Sent(message_id, False, "")
        data = body if isinstance(body, bytes) else bytes_of(body)
        distributed = outlet.send_new(file, data, not_before=not_before)
        return Sent(message_id, True, outlet.context.name, distributed)

    def send_json(self, value: object, **fields: Any) -> Sent:
        """Send a value as compact JSON in UTF-8, as class T.

        Args:
            value: what JSON can hold: None, bool, int, float, str, and lists and dicts of these.
            fields: the other arguments of `send`.

        Raises:
            ValueError: a part of the value cannot be JSON, which the error names; nothing was sent.
            NoSuchQueue, StorageError, QueueFull: as of `send`.
        """
        from dropq.format.json_body import to_json

        try:
            text = to_json(value)
        except ValueError as error:
            raise ValueError(f"send_json: {error}; nothing was sent") from error
        return self.send(text, **fields)

    def send_many(self, messages: Iterable[bytes | str | Mapping[str, Any]]) -> list[Sent]:
        """Send many messages; each batch is synced once, which at durability `full` is quicker than one by one.

        Args:
            messages: bodies, or mappings with a `body` and the other arguments of `send`.

        Raises:
            NoSuchQueue, StorageError, ValueError: what was sent until then stays sent; a note on the error says how
                many messages that is. Whatever `messages` itself raises comes with the same note.
            QueueFull: the same, and the error has what was sent.
        """
        if isinstance(messages, bytes | str | Mapping):
            raise ValueError("send_many takes several messages, such as a list of bodies; send takes one")
        sent: list[Sent] = []
        try:
            self._send_into(sent, messages)
        except BaseException as error:
            count = sum(1 for one in sent if one.accepted)
            error.add_note(f"{count} messages of this send_many were sent before the error")
            if isinstance(error, QueueFull):
                error.sent = sent
            raise
        return sent

    def _send_into(self, sent: list[Sent], messages: Iterable[bytes | str | Mapping[str, Any]]) -> None:
        """Send many messages, as `send_many` does; add what became of each to a list, also where an error ends it."""
        rest = iter(messages)
        while batch := list(islice(rest, BATCH)):
            self._send_batch_to_who_takes(batch, sent)

    def _send_batch_to_who_takes(self, batch: list[bytes | str | Mapping[str, Any]], sent: list[Sent]) -> None:
        before = len(sent)
        self._to_who_takes(lambda sender: sender._send_admitted(batch[len(sent) - before :], sent))

    def _send_admitted(self, batch: list[bytes | str | Mapping[str, Any]], sent: list[Sent]) -> None:
        """Send a batch, in as many parts as the queue lets it in; what it discards is passed over."""
        while batch:
            admitted = self._admit(len(batch))
            if admitted:
                self._send_batch(batch[:admitted], sent)
            else:
                chosen = batch[0].get("message_id") if isinstance(batch[0], Mapping) else None
                sent.append(Sent(chosen or self._destination.root.ids.next(), False, ""))
            batch = batch[admitted or 1 :]

    def _send_batch(self, batch: list[bytes | str | Mapping[str, Any]], sent: list[Sent]) -> None:
        context = self._destination
        staged: dict[str, tuple[Sent, int]] = {}
        delayed: set[bool] = set()
        try:
            self._stage_batch(batch, staged)
            for file, (one, not_before) in list(staged.items()):
                sent.append(one)  # first: an interrupt finds it there as soon as it is sent
                if (distributed := self._outlet.send(file, not_before=not_before)) is not None:
                    sent[-1] = one._replace(distributed=distributed)
                delayed.add(bool(not_before))
                del staged[file]
        except BaseException as error:
            for file, (one, not_before) in staged.items():
                path, was_there = f"{context.layout.working}/{file}", True
                with suppress(OSError):  # what cannot be taken away now, fsck finds
                    was_there = reading.exists(path)  # RACE: NFS may lose the reply to the unlink
                    context.storage.unlink(path)
                if not sent or sent[-1] is not one:
                    continue
                if was_there or isinstance(error, DropqError):  # its rename was refused, or did not come to pass
                    sent.pop()
                else:
                    delayed.add(bool(not_before))
            raise
        finally:
            for not_before in delayed:
                self._outlet.sent(not_before=not_before)

    def _stage_batch(self, batch: list[bytes | str | Mapping[str, Any]], staged: dict[str, tuple[Sent, int]]) -> None:
        context = self._destination
        with (
            context.error_context("the message was not sent"),
            context.storage.together(context.layout.working, len(batch)) as each,
        ):
            for message in batch:
                if isinstance(message, Mapping) or self._marks:
                    body, headers = _parts_of(message) if isinstance(message, Mapping) else (message, PLAIN)
                    file, message_id, not_before = self._address_of(body, headers)
                else:
                    body, message_id, not_before = message, context.root.ids.next(), 0
                    file = names.plain_name(message_id, 4, "T" if isinstance(body, str) else "B")
                # First: an interrupt finds it mostly as its file is being made.
                staged[file] = Sent(message_id, True, context.name), not_before
                self._outlet.stage(file, bytes_of(body), synced=each)

    def send_file(self, path: str | os.PathLike[str] | IO[bytes], *, move: bool = False, **fields: Any) -> Sent:
        """Send a file's content as a message, with the file's own name in the property `filename`.

        Args:
            path: the file; it is copied, so it stays as it is. One that is open for reading is sent to its end, and
                gives no name.
            move: move it instead, if it is a path; where it lies on another file system it is copied, then removed.
            fields: the other arguments of `send`; `properties` with a `filename` give the message another name, or none
                with "".

        Raises:
            StorageError: the file cannot be read; nothing was sent.
            QueueFull: the queue is full, and rejects; nothing was sent, and the file stays where it is.
        """
        sent: list[Sent] = []
        self._send_file_into(sent, path, move=move, **fields)
        return sent[0]

    def _send_file_into(self, sent: list[Sent], path: Source, *, move: bool = False, **fields: Any) -> None:
        """Send a file, as `send_file` does; add what became of it to a list, also where an error follows the send."""
        once = not isinstance(path, str | os.PathLike)
        self._to_who_takes(lambda sender: sender._send_one_file(sent, path, move=move, **fields), once=once)

    def _send_one_file(self, sent: list[Sent], path: Source, *, move: bool = False, **fields: Any) -> None:
        source = os.fspath(path) if isinstance(path, str | os.PathLike) else path
        filename = os.path.basename(source) if isinstance(source, str) else ""
        file, message_id, not_before = self._address_of(b"", Headers(**fields), asks=True, filename=filename)
        if not file:
            sent.append(Sent(message_id, False, ""))
            return
        one = Sent(message_id, True, self._destination.name)
        moved = source if move and isinstance(source, str) else None
        if moved is not None and self._adopted(moved):
            try:
                self._send_staged(sent, one, file, not_before, adopted=moved)
            except StorageError as error:
                if one in sent or error.errno not in _NOT_OURS:
                    raise
            else:
                return
        with (
            error_context("nothing was sent"),
            open(source, "rb") if isinstance(source, str) else nullcontext(source) as body,
            self._staged(file) as writing,
        ):
            shutil.copyfileobj(body, writing, READ_SIZE)
        self._send_staged(sent, one, file, not_before)
        if moved is not None:
            try:
                with error_context("the message was sent, its source could not be removed"):
                    self._destination.storage.unlink(moved)
            except KeyboardInterrupt as interrupt:
                stays = f"; {moved} is still there" if reading.exists(moved) else ""
                interrupt.add_note(f"message {message_id} was sent{stays}")
                raise

    def _send_staged(self, sent: list[Sent], one: Sent, file: str, not_before: int, *, adopted: str = "") -> None:
        """Send a staged or adopted file; add the result to a list; if it was not sent, remove a staged file."""
        staged, is_sent = adopted or f"{self._destination.layout.working}/{file}", False
        try:
            sent.append(one)  # first: an interrupt finds it there as soon as it is sent
            distributed = self._outlet.send(file, not_before=not_before, adopted=adopted)
            is_sent = True
            self._outlet.sent(not_before=not_before)
            if distributed is not None:
                sent[sent.index(one)] = one._replace(distributed=distributed)
        except BaseException as error:
            with suppress(OSError):  # what cannot be looked at now, fsck finds
                if reading.exists(staged):
                    if not adopted:
                        self._destination.storage.unlink(staged)
                elif one in sent and not isinstance(error, DropqError):  # an interrupt, after the rename
                    is_sent = True
                    error.add_note(f"message {one.id} was sent")
            if one in sent and not is_sent:
                sent.remove(one)
            raise

    def _adopted(self, source: str) -> bool:
        """Make a file fit to be sent by a rename; return False if it has to be copied instead."""
        try:
            if os.path.islink(source) or not os.path.isfile(source):
                raise StorageError(f"{source} is no regular file; nothing was sent", path=source)
            if reading.device(source) != reading.device(self._destination.layout.target):
                return False
            self._destination.storage.adopt(source)
        except FileNotFoundError as error:
            raise self._destination.refused(error, "nothing was sent") from error
        except OSError:
            return False  # not ours
        return True

    @contextmanager
    def writer(self, **fields: Any) -> Iterator[IO[bytes]]:
        """Write a message piece by piece: it is sent when the block ends, and discarded when it raises.

        Whether the queue has room is seen before the block begins; what it discards is written to nowhere. The
        arguments are those of `send`, but for the body.

        Raises:
            QueueFull: the queue is full, and rejects.
        """
        with ExitStack() as stack:
            yield self._to_who_takes(lambda sender: stack.enter_context(sender._writer(**fields)), once=True)

    @contextmanager
    def _writer(self, **fields: Any) -> Iterator[IO[bytes]]:
        file, _, not_before = self._address_of(b"", Headers(**fields), asks=True)
        if not file:
            with open(os.devnull, "wb") as nowhere:
                yield nowhere
            return
        with self._staged(file) as writing:
            yield writing
        self._outlet.send(file, not_before=not_before)
        self._outlet.sent(not_before=not_before)

    @contextmanager
    def _staged(self, file: str) -> Iterator[IO[bytes]]:
        store, path = self._destination.storage, f"{self._destination.layout.working}/{file}"
        try:
            fd = store.create(path)
        except OSError as error:
            raise self._outlet.not_sent(error) from error
        writing = BufferedWriter(Draft(fd, self._outlet.not_sent))
        try:
            yield writing
            try:
                writing.flush()
                store.sync_file(fd)
                size = writing.tell()
                writing.close()
                store.await_whole(path, size)
            except OSError as error:
                raise self._outlet.not_sent(error) from error
        except BaseException:
            with suppress(OSError, DropqError):  # closing says again what flushing said
                writing.close()
            with suppress(OSError):  # what cannot be taken away now, fsck finds
                store.unlink(path)
            raise

    def _address(self, body: bytes | str, **fields: Any) -> tuple[str, str, int]:
        """Return the file name of a message to send, its id, and the time before which it may not be delivered."""
        return self._address_of(body, Headers(**fields))

    def _address_of(
        self, body: bytes | str, headers: Headers, *, asks: bool = False, records: int = 0, filename: str = ""
    ) -> tuple[str, str, int]:
        """Do what `_address` does; where it `asks`, the message is let in before anything is written.

        Of a message that is discarded there is no file name. The name says how many `records` the body has, if any, and
        the `filename` of the file that is sent.
        """
        # First: a queue that is refused is refused before the clock writes its probe.
        outlet = self._opened or self._outlet
        context, given = outlet.context, headers.message_id
        if chosen := given is not None:
            names.check_message_id(given)
            given = str.__str__(given)  # of an Enum its value, here and below
        known: dict[str, Any] = {"message_class": _class_of(body, headers), "priority": int(headers.priority)}
        known["id"] = message_id = given or context.root.ids.next()
        for header in ("type", "correlation_id", "reply_to"):
            if (text := getattr(headers, header)) is not None:
                check_text(header, text)
                known[header] = str.__str__(text)
        known |= self._marks
        if records:
            known["records"] = records
        if headers.expires_in is not None:
            known["expiration"] = self._in(headers.expires_in)
        if headers.properties is not None:
            known["properties"] = dict(map(_property, headers.properties.items()))
        not_before = 0
        if headers.delay is not None:
            known["not_before"] = not_before = self._in(headers.delay)
        if asks and time.monotonic() >= self._asks_at and not self._admit():
            return "", message_id, 0
        made = names.make(known)
        made = context.sidecars.with_filename(naming.unique(made, chosen=True) if chosen else made, filename)
        return context.sidecars.fit(made), message_id, not_before

    def _admit_job(self, count: int) -> Sender | None:
        """Let in a job of `count` messages as a whole, after a wait if the queue makes senders wait.

        Return the sender that lets it in: this, or that of the overflow selector; None if the job is discarded.
        """
        try:
            return self if self._admit(count, whole=True) else None
        except QueueFull as full:
            other = self._instead(full)
            return other if other._admit(count, whole=True) else None

    def _admit(self, count: int = 1, *, whole: bool = False) -> int:
        """Do what `SendLimits.admit` does; nothing of a message may have been written yet."""
        limits = self._send_limits()
        admitted = limits.admit(count, whole=whole)
        self._asks_at = limits.asks_at
        return admitted

    def _send_limits(self) -> SendLimits:
        limits = self._limits
        if limits is None or not limits.is_ours:
            limits = self._limits = self._limits_of_sends()
        return limits

    def _stop_waiting(self) -> None:
        """Raise MustWait from now on if the queue makes senders wait; a signal handler may call this."""
        self._waits = False
        if self._limits is not None:
            self._limits.stop_waiting()
        for other in self._overflowing.values():
            other._stop_waiting()

    def _limits_of_sends(self) -> SendLimits:
        return SendLimits(self._destination.name, self._destination, waits=self._waits)

    def _plain_addresses(self, count: int, message_class: str) -> list[str]:
        return [names.plain_name(message_id, 4, message_class) for message_id in self._destination.root.ids.take(count)]

    def _in(self, period: Duration) -> int:
        seconds = parse_duration(period)
        return self._destination.clock.now_ms() + int(seconds * 1000) if seconds else 0


def bytes_of(body: bytes | str) -> bytes:
    """Return the bytes of a body: of text those of UTF-8; TypeError for what is neither."""
    if isinstance(body, str):
        return body.encode()
    try:
        memoryview(body)
    except TypeError:
        raise TypeError(f"a body is bytes or str, not {type(body).__name__}: `send_json` sends JSON") from None
    return body


def _property(given: tuple[str, object]) -> tuple[str, Typed]:
    """Return the name and the value of a property; ValueError, with the name, for what no file name can hold."""
    name, value = given
    try:
        typed = Typed.of(value)
    except ValueError as error:
        raise ValueError(f"property {name!r}: {error}") from error
    names.check_property(name, typed)
    return str.__str__(name), typed


def _class_of(body: bytes | str, headers: Headers) -> str:
    """Return the class of a message, after a look at its priority: ValueError where no name can hold either."""
    message_class = headers.message_class
    if message_class is None:
        message_class = "T" if isinstance(body, str) else "B"
    elif message_class not in names.CLASSES or len(message_class) != 1:
        raise ValueError(f"message class {message_class!r}: one of {' '.join(names.CLASSES)}")
    is_number = isinstance(headers.priority, int) and not isinstance(headers.priority, bool)
    if not is_number or not -(2**31) <= headers.priority < 2**31:
        raise ValueError(f"priority {headers.priority!r}: an integer from -2147483648 to 2147483647")
    return str.__str__(message_class)


def _parts_of(message: Mapping[str, Any]) -> tuple[bytes | str, Headers]:
    unknown = ", ".join(sorted(map(repr, message.keys() - {"body", *Headers._fields})))
    if unknown:
        raise ValueError(f"a message of send_many says {unknown}, which send does not take")
    if "body" not in message:
        raise ValueError("a message of send_many has no `body`")
    return message["body"], Headers(**{key: value for key, value in message.items() if key != "body"})
