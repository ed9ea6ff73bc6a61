"""The sending half of a queue: a body goes to working/, and one rename into target/ sends it.

Whatever fails before that rename leaves nothing that a consumer could see, and takes what it wrote away again.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import BufferedWriter
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from dropq import names, storage
from dropq.admission.entry import Entry
from dropq.durations import parse_duration
from dropq.errors import DropqError, QueueFull, StorageError
from dropq.lifecycle import Lifecycle
from dropq.message import Duration
from dropq.names import Name, Typed
from dropq.storage import Draft, storage_error, told

if TYPE_CHECKING:
    from dropq.root import Root

log = logging.getLogger("dropq")

_NOTHING = (None,) * 7
#: What a message of send_many may say: what `send` takes.
_FIELDS = frozenset(
    {
        "body",
        "correlation_id",
        "delay",
        "expires_in",
        "message_class",
        "message_id",
        "priority",
        "properties",
        "reply_to",
        "type",
    }
)
#: Messages that send_many makes durable together.
BATCH = 1000


class Sent(NamedTuple):
    """What became of a send: the message's id, whether the queue took it, and the queue that it went to.

    A queue that is full and discards does not take it: then nothing was sent, and it went to no queue.
    """

    id: str
    accepted: bool
    delivered_to: str


class Producer:
    """What sends to a queue; `Queue` is one."""

    root: Root
    name: str
    #: What lets messages in, from the first send on, and when it is to be asked again, by `time.monotonic()`.
    _entry: Entry | None = None
    _asks_at = 0.0

    @property
    def life(self) -> Lifecycle:
        """The queue's transitions."""
        raise NotImplementedError

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

        Where the queue has a write-lock, or is full and blocks, it waits first; periods count from the call.

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
            QueueFull: the queue is full, and rejects; nothing was sent.
            ValueError: a value that no name can hold; nothing was sent.
        """
        life = self.life
        said = (type, correlation_id, reply_to, expires_in, delay, properties, message_id)
        if said == _NOTHING:
            file, message_id, not_before = self._plain_address(body, priority, message_class)
            if time.monotonic() >= self._asks_at and not self._admit():
                return Sent(message_id, False, "")
        else:
            file, message_id, not_before = self.address(
                body, priority, *said[:-1], message_class, message_id, asks=True
            )
            if not file:
                return Sent(message_id, False, "")
        life.stage(file, body.encode() if isinstance(body, str) else body)
        life.send(file, not_before=not_before)
        if life.storage.syncs_folders:
            life.sent(not_before=not_before)
        return Sent(message_id, True, self.name)

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
            self.send_into(sent, messages)
        except QueueFull as error:
            error.sent = sent
            raise
        return sent

    def send_into(self, sent: list[Sent], messages: Iterable[bytes | str | Mapping[str, Any]]) -> None:
        """Send many messages, as `send_many` does; add what became of each to a list, also where an error ends it."""
        before = len(sent)
        batch: list[bytes | str | Mapping[str, Any]] = []
        try:
            for message in messages:
                batch.append(message)
                if len(batch) == BATCH:
                    self._send_admitted(batch, sent)
                    batch = []
            if batch:
                self._send_admitted(batch, sent)
        except BaseException as error:
            error.add_note(_so_many(sent[before:]))
            raise

    def _send_admitted(self, batch: list[bytes | str | Mapping[str, Any]], sent: list[Sent]) -> None:
        """Send a batch, in as many parts as the queue lets it in; what it discards is passed over."""
        while batch:
            admitted = self._admit(len(batch))
            if admitted:
                self._send_batch(batch[:admitted], sent)
            else:
                sent.append(self._discarded(batch[0]))
            batch = batch[admitted or 1 :]

    def _discarded(self, message: bytes | str | Mapping[str, Any]) -> Sent:
        """Return what is told of a message that is discarded: it is not looked at any more."""
        chosen = message.get("message_id") if isinstance(message, Mapping) else None
        return Sent(chosen or self.root.ids.next(), False, "")

    def _send_batch(self, batch: list[bytes | str | Mapping[str, Any]], sent: list[Sent]) -> None:
        life = self.life
        staged: dict[str, tuple[Sent, int]] = {}
        delayed: set[bool] = set()
        try:
            self._stage_batch(batch, staged)
            for file, (one, not_before) in list(staged.items()):
                sent.append(one)  # first: an interrupt finds it there as soon as it is sent
                life.send(file, not_before=not_before)
                delayed.add(bool(not_before))
                del staged[file]
        except BaseException as error:
            for file, (one, not_before) in staged.items():
                was_there = True
                with suppress(OSError):  # what cannot be taken away now, fsck finds
                    was_there = life.storage.unlink(f"{life.layout.working}/{file}")
                if not sent or sent[-1] is not one:
                    continue
                if was_there or isinstance(error, DropqError):  # its rename was refused, or did not come to pass
                    sent.pop()
                else:
                    delayed.add(bool(not_before))
            raise
        finally:
            for not_before in delayed:
                life.sent(not_before=not_before)

    def _stage_batch(self, batch: list[bytes | str | Mapping[str, Any]], staged: dict[str, tuple[Sent, int]]) -> None:
        life = self.life
        with life.telling("the message was not sent"), life.storage.together(life.layout.working, len(batch)) as each:
            for message in batch:
                if isinstance(message, Mapping):
                    body = _body_of(message)
                    file, message_id, not_before = self.address(**message)
                else:
                    body = message
                    file, message_id, not_before = self._plain_address(body, 4, None)
                # First: an interrupt finds it mostly as its file is being made.
                staged[file] = Sent(message_id, True, self.name), not_before
                life.stage(file, body.encode() if isinstance(body, str) else body, synced=each)

    def send_file(self, path: str | os.PathLike[str] | IO[bytes], *, move: bool = False, **fields: Any) -> Sent:
        """Send a file's content as a message.

        Args:
            path: the file; it is copied, so it stays as it is. One that is open for reading is sent to its end.
            move: move it instead, if it is a path; where it lies on another file system it is copied, then removed.
            fields: the other arguments of `send`.

        Raises:
            StorageError: the file cannot be read; nothing was sent.
            QueueFull: the queue is full, and rejects; nothing was sent, and the file stays where it is.
        """
        source = os.fspath(path) if isinstance(path, str | os.PathLike) else path
        file, message_id, not_before = self.address(b"", **fields, asks=True)
        if not file:
            return Sent(message_id, False, "")
        life, sent = self.life, Sent(message_id, True, self.name)
        staged = f"{life.layout.working}/{file}"
        back_to = source if move and isinstance(source, str) else None
        copied: str | None = None  # what is to be removed after the send
        going = False
        try:
            if back_to is None or not self._adopted(back_to, staged):
                copied = back_to
                back_to = None
                self._copied(source, file)
            going = True
            life.send(file, not_before=not_before, back_to=back_to)
            life.sent(not_before=not_before)
            if copied is not None:
                self._remove_copied(copied)
            return sent
        except BaseException as error:
            with suppress(OSError):  # what cannot be looked at now, fsck finds
                if storage.exists(staged):
                    self._take_back(staged, back_to)
                elif going and not isinstance(error, DropqError):  # an interrupt, after the rename
                    stays = f"; {copied} is still there" if copied is not None and storage.exists(copied) else ""
                    error.add_note(f"message {message_id} was sent{stays}")
            raise

    def _take_back(self, staged: str, back_to: str | None) -> None:
        """Move a staged file that was not sent to where it came from; remove it where it is a copy."""
        try:
            if back_to is None:
                self.life.storage.unlink(staged)
            else:
                self.life.storage.move(staged, back_to)
        except OSError as error:  # what is a copy, fsck finds
            if back_to is not None:
                log.warning("%s was not sent, and is now %s: it was not moved back: %s", back_to, staged, told(error))

    def _remove_copied(self, source: str) -> None:
        try:
            self.life.storage.unlink(source)
        except OSError as error:
            raise storage_error(error, "the message was sent, its source could not be removed") from error

    def _adopted(self, source: str, staged: str) -> bool:
        try:
            if os.path.islink(source) or not os.path.isfile(source):
                raise StorageError(f"{source} is no regular file; nothing was sent", path=source)
            self.life.storage.adopt(source, staged)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise storage_error(error, "nothing was sent") from error
            return False  # another file system, or not ours to move: copy it
        return True

    def _copied(self, source: str | IO[bytes], file: str) -> None:
        try:
            with _reading(source) as reading, self._staged(file) as writing:
                shutil.copyfileobj(reading, writing, storage.READ_SIZE)
        except OSError as error:
            raise storage_error(error, "nothing was sent") from error

    @contextmanager
    def writer(self, **fields: Any) -> Iterator[IO[bytes]]:
        """Write a message piece by piece: it is sent when the block ends, and discarded when it raises.

        Whether the queue has room is seen before the block begins; what it discards is written to nowhere.

        Args:
            fields: the arguments of `send`, but for the body.

        Raises:
            QueueFull: the queue is full, and rejects.
        """
        file, _, not_before = self.address(b"", **fields, asks=True)
        if not file:
            with open(os.devnull, "wb") as nowhere:
                yield nowhere
            return
        with self._staged(file) as writing:
            yield writing
        self.life.send(file, not_before=not_before)
        self.life.sent(not_before=not_before)

    @contextmanager
    def _staged(self, file: str) -> Iterator[IO[bytes]]:
        store, path = self.life.storage, f"{self.life.layout.working}/{file}"
        try:
            fd = store.create(path)
        except OSError as error:
            raise self.life.not_sent(error) from error
        writing = BufferedWriter(Draft(fd, self.life.not_sent))
        try:
            yield writing
            try:
                writing.flush()
                store.sync_file(fd)
                writing.close()
            except OSError as error:
                raise self.life.not_sent(error) from error
        except BaseException:
            with suppress(OSError, DropqError):  # closing says again what flushing said
                writing.close()
            with suppress(OSError):  # what cannot be taken away now, fsck finds
                store.unlink(path)
            raise

    def address(
        self,
        body: bytes | str,
        priority: int = 4,
        type: str | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        expires_in: Duration | None = None,
        delay: Duration | None = None,
        properties: Mapping[str, Any] | None = None,
        message_class: str | None = None,
        message_id: str | None = None,
        *,
        asks: bool = False,
    ) -> tuple[str, str, int]:
        """Return the file name of a message to send, its id, and the time before which it may not be delivered.

        Where it `asks`, the message is good and let in before anything is written; of one that is discarded there is no
        file name.
        """
        life = self.life  # a queue that is refused is refused before the clock writes its probe
        chosen = message_id is not None
        if message_id is not None:
            names.check_message_id(message_id)
        plain, generated, _ = self._plain_address(body, priority, message_class)
        message_id = message_id or generated
        for header, text in (("type", type), ("correlation_id", correlation_id), ("reply_to", reply_to)):
            names.check_text(header, text or "")
        name = Name(
            message_id,
            priority=priority,
            message_class=plain[-1],
            expiration=0 if expires_in is None else self._in(expires_in),
            properties={} if properties is None else _typed(properties),
            correlation_id=correlation_id,
            reply_to=reply_to,
            type=type,
            not_before=0 if delay is None else self._in(delay),
        )
        if asks and not self._admit():
            return "", message_id, 0
        return life.sidecars.fit(life.unique(name, chosen=chosen)), message_id, name.not_before

    def _plain_address(self, body: bytes | str, priority: int, message_class: str | None) -> tuple[str, str, int]:
        """Return what `address` does for a message that has nothing else to say."""
        if message_class is None:
            message_class = "T" if isinstance(body, str) else "B"
        elif message_class not in names.CLASSES or len(message_class) != 1:
            raise ValueError(f"message class {message_class!r}: one of {' '.join(names.CLASSES)}")
        if not -(2**31) <= priority < 2**31:
            raise ValueError(f"priority {priority}: an integer from -2147483648 to 2147483647")
        message_id = self.root.ids.next()
        return names.plain_name(message_id, priority, message_class), message_id, 0

    def admit_job(self, count: int) -> bool:
        """Let in a job of so many messages as a whole, after a wait where one is due; False where it is discarded.

        Raises:
            QueueFull: the queue rejects it, or never has room for so many.
        """
        return bool(self._admit(count, whole=True))

    def _admit(self, count: int = 1, *, whole: bool = False) -> int:
        """Do what `Entry.admit` does; nothing of a message may have been written yet."""
        entry = self._entry
        if entry is None or not entry.is_ours:
            entry = self._entry = Entry(self.name, self.life)
        admitted = entry.admit(count, whole=whole)
        self._asks_at = entry.asks_at
        return admitted

    def plain_addresses(self, count: int, message_class: str) -> list[str]:
        """Return the file names of so many messages that have nothing to say but their class."""
        return [names.plain_name(message_id, 4, message_class) for message_id in self.root.ids.take(count)]

    def _in(self, period: Duration) -> int:
        seconds = parse_duration(period)
        return self.root.clock.now_ms() + int(seconds * 1000) if seconds else 0


def _reading(source: str | IO[bytes]) -> AbstractContextManager[IO[bytes]]:
    return open(source, "rb") if isinstance(source, str) else nullcontext(source)


def _so_many(sent: list[Sent]) -> str:
    """Say how much of a send_many was sent before an error."""
    count = sum(1 for one in sent if one.accepted)
    return f"{count} messages of this send_many were sent before the error"


def _body_of(message: Mapping[str, Any]) -> bytes | str:
    unknown = ", ".join(sorted(map(repr, message.keys() - _FIELDS)))
    if unknown:
        raise ValueError(f"a message of send_many says {unknown}, which send does not take")
    if "body" not in message:
        raise ValueError("a message of send_many has no `body`")
    body: bytes | str = message["body"]
    return body


def _typed(properties: Mapping[str, Any]) -> dict[str, Typed]:
    for name in properties:
        names.check_property_name(name)
    return {name: Typed.of(value) for name, value in properties.items()}
