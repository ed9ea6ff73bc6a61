"""Sends to a full queue whose overflow selector bounces: each message goes to its own return address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, NoReturn

from dropq.config.selectors import Selector, may_return_to
from dropq.errors import DropqError, QueueFull
from dropq.format.addresses import check_address
from dropq.format.names import TOPIC_REPLY
from dropq.format.typed import check_text
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.sending import Outlet
from dropq.policies.send_limits import MustWait, SendLimits
from dropq.queue.sender import Headers, Sender, Sent, Source

#: Why such a message could not be delivered.
OVERFLOW = "overflow"
#: The headers that are left out of it.
_NOT_SENT: dict[str, Any] = {"reply_to": None, "delay": None, "expires_in": None}


class _Returning(Sender):
    """Sends to a return address, which is asked for room, and never waited for."""

    def __init__(self, destination: QueueContext, origin: str) -> None:
        super().__init__(destination)
        self._marks = {"origin": origin, "reason": OVERFLOW, "hops": 1}
        self._limits = SendLimits(self.name, destination, rejects=True, waits=False)

    def _admit(self, count: int = 1, *, whole: bool = False) -> int:
        try:
            return super()._admit(count, whole=whole)
        except MustWait as error:
            raise QueueFull(f"{error}: nothing was sent") from error


class BouncingSender(Sender):
    """Sends each message to its return address, without that address, and with the full queue as its origin.

    There it neither expires nor is delayed. A message is refused as by any full queue if it has no return address, if
    the selector does not return to it, or if that queue is missing or full. So is what has no return address of its
    own: a job, and records.
    """

    def __init__(self, queue: QueueContext, full: QueueFull, selector: Selector) -> None:
        self.name = queue.name
        self._queue, self._full, self._selector = queue, full, selector
        self._open: dict[str, Sender] = {}

    @property
    def _outlet(self) -> Outlet:
        self._refuse("what is sent has no return address")

    def _admit(self, count: int = 1, *, whole: bool = False) -> int:
        self._refuse("what is sent has no return address")

    def _send(self, body: bytes | str, headers: Headers) -> Sent:
        return self._to(headers.reply_to)._send(body, headers._replace(**_NOT_SENT))

    def _send_admitted(self, batch: list[bytes | str | Mapping[str, Any]], sent: list[Sent]) -> None:
        for message in batch:
            fields: Mapping[str, Any] = message if isinstance(message, Mapping) else {"body": message}
            self._to(fields.get("reply_to"))._send_admitted([{**fields, **_NOT_SENT}], sent)

    def _send_one_file(self, sent: list[Sent], path: Source, *, move: bool = False, **fields: Any) -> None:
        self._to(fields.get("reply_to"))._send_one_file(sent, path, move=move, **{**fields, **_NOT_SENT})

    @contextmanager
    def _writer(self, **fields: Any) -> Iterator[IO[bytes]]:
        with self._to(fields.get("reply_to"))._writer(**{**fields, **_NOT_SENT}) as writing:
            yield writing

    def _to(self, reply_to: str | None) -> Sender:
        if reply_to is not None:
            check_text("reply_to", reply_to)
        address = (reply_to or "").removeprefix(TOPIC_REPLY)
        if not address:
            self._refuse("the message has no return address")
        if not may_return_to(self._selector, address):
            self._refuse(f"the selector returns nothing to {address}: add that to its `to` if it may")
        sender = self._open.get(address)
        if sender is None:
            try:
                check_address(address)
                destination = open_queue(self._queue.root, address)
            except DropqError as error:
                self._refuse(str(error), error)
            if destination.layout.home == self._queue.layout.home:
                self._refuse("the return address is the full queue itself")
            sender = self._open[address] = _Returning(destination, self._queue.name)
        return sender

    def _refuse(self, why: str, cause: DropqError | None = None) -> NoReturn:
        raise QueueFull(f"{self._full}; {why}") from cause
