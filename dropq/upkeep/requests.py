"""Requests: a message is sent with the name of a temporary queue as its reply-to, and the answer is awaited there.

The queue appears whole, and locked, before the request is sent; it goes when the wait ends without an answer. So an
answer that comes too late meets a missing queue, and its sender is told. After an answer the queue is kept for the next
request of the same queue object: making and removing one takes longer than the rest of a request. One request uses it
at a time; threads, and a signal handler that interrupts a request, take or make another, so nobody waits for a lock.
"""

from __future__ import annotations

import io
import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import IO, Any

from dropq.errors import DropqError, LeaseLost, NoSuchQueue, QueueFull, Unavailable
from dropq.format.claims import Location
from dropq.lifecycle import ephemeral
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.dead_letters import NO_SUCH_QUEUE
from dropq.lifecycle.open_queue import open_queue
from dropq.queue.message import Message, SettledMessage
from dropq.queue.sender import Sent
from dropq.queue.subscription import Subscription
from dropq.queue.waiting import Ending
from dropq.storage.failures import describe
from dropq.storage.liveness import FORKS
from dropq.upkeep import deletion, queues
from dropq.upkeep.sweep import QuickSweep

log = logging.getLogger("dropq")

#: Sends the request, with the fields that it is given.
Send = Callable[..., Sent]


class Reply(SettledMessage):
    """The answer to a request: it is settled, and this object has its body, which so outlives its queue."""

    __slots__ = ("_body",)

    def __init__(self, message: Message) -> None:
        super().__init__(message._settlement, Location("removed", message.name), delivery=message.delivery_count)
        self._body = message.body
        _ = self.id  # reads the name, and perhaps a file, while they are there

    @property
    def body(self) -> bytes:
        """Its whole body."""
        return self._body

    def open(self) -> IO[bytes]:
        """Open its body, to read it piece by piece."""
        return io.BytesIO(self._body)

    def size(self) -> int:
        """Return the length of its body in bytes."""
        return len(self._body)


class Requester:
    """A temporary queue and the subscription on it; `public` returns what users get as the queue of an answer."""

    def __init__(self, asked: QueueContext, public: Callable[[str], object]) -> None:
        self._forks = FORKS.count
        self._root = asked.root  # not the queue: its object would never go, and this with it
        self._asked = asked.name
        self.name, self._marker = queues.create_temporary(asked)
        try:
            # The root's defaults are for queues that people make: a filter or a barrier would keep the answer back.
            root = replace(asked.root, config=replace(asked.root.config, defaults={}))
            self._context = open_queue(root, self.name, public(self.name))
            self._subscription = Subscription(self._context, max_backlog=1, sweep=QuickSweep(self._context))
        except BaseException:
            self._remove()
            raise

    @property
    def is_ours(self) -> bool:
        """Whether this process made it, and not its parent before a fork."""
        return self._forks == FORKS.count

    def is_there(self) -> bool:
        """Note that the queue is used now; return False if somebody has removed it."""
        try:
            return ephemeral.touch(self._context.layout, self._context.storage)
        except OSError as error:  # a wait can go on without a touch; what cannot, says so itself
            log.debug("queue %s: its marker cannot be touched: %s", self.name, describe(error))
            return True

    def ask(self, send: Send, fields: Mapping[str, Any], seconds: float | None, ending: Ending) -> Reply | None:
        """Send a request and wait for its answer; return None if none came in time, or it was given up.

        Raises:
            NoSuchQueue, Unavailable: the request itself came back, as it was sent to a missing queue, or was bounced.
        """
        if ending.has_come():
            return None
        sent = send(**fields, reply_to=self.name)
        if not sent.accepted:
            raise QueueFull(f"queue {self._asked} is full, and discards what is sent; nothing was sent")
        wanted = fields.get("correlation_id") or sent.id
        until = math.inf if seconds is None else time.monotonic() + seconds
        while not ending.has_come():
            left = until - time.monotonic()
            message = self._next(min(max(left, 0), ephemeral.TOUCH_INTERVAL), sent, ending)
            if message is None and left <= ephemeral.TOUCH_INTERVAL:
                return None
            if message is not None and (reply := self._taken(message, wanted, sent.id)) is not None:
                return reply
        return None

    def _next(self, seconds: float, sent: Sent, ending: Ending) -> Message | None:
        ending.wake = self._subscription._waiting.wake
        removed: NoSuchQueue | None = None
        try:
            message = self._subscription._receive(seconds, ending.has_come)
            if message is not None or self.is_there():
                return message
        except NoSuchQueue as error:
            removed = error
        raise NoSuchQueue(
            f"the queue {self.name} for the answer to message {sent.id} was removed: the request was sent, and its "
            "answer cannot come"
        ) from removed

    def _taken(self, message: Message, wanted: str, sent: str) -> Reply | None:
        """Settle a message; return it if it is the answer; raise an error if it is the request."""
        reply = Reply(message)
        with suppress(LeaseLost):  # somebody removed our sign of life; what comes back goes with the queue
            message.ack()
        if reply.id == sent and reply.dead_letter_reason is not None:
            raise _came_back(reply)
        # A JMS client writes an id as the header JMSMessageID has it.
        if reply.correlation_id in (wanted, f"ID:{wanted}"):
            return reply
        dropped = "queue %s: message %s was dropped: its correlation id is %r, and the request's is %r"
        log.warning(dropped, self.name, reply.id, reply.correlation_id, wanted)
        return None

    def end(self) -> None:
        """Remove the queue with its messages; if that fails, a sweep removes it."""
        if not self.is_ours:
            return
        try:
            self._subscription.close()
        except DropqError as error:
            log.debug("queue %s: its subscription did not end well: %s", self.name, error)  # all of it goes below
        self._remove()

    def _remove(self) -> None:
        self._marker.end()
        try:
            deletion.remove(self._root, self.name)
        except (OSError, DropqError) as error:
            log.warning("queue %s is not wholly removed, a sweep does it: %s", self.name, describe(error))


class Requesters:
    """The requesters that a queue object keeps for its next requests; they end with it, or with the program."""

    def __init__(self) -> None:
        self._idle: list[Requester] = []
        weakref.finalize(self, _end_all, self._idle)

    def take(self) -> Requester | None:
        """Take a requester whose queue is there, for the caller alone; return None if there is none."""
        while (requester := _popped(self._idle)) is not None:
            if requester.is_ours and requester.is_there():
                return requester
            requester.end()
        return None

    def keep(self, requester: Requester) -> None:
        """Keep one for a next request."""
        self._idle.append(requester)

    def end(self) -> None:
        """End those that are kept."""
        _end_all(self._idle)


def _came_back(request: Reply) -> DropqError:
    queue, reason, came_back = request.origin, request.dead_letter_reason, f"request {request.id} came back"
    if reason == NO_SUCH_QUEUE:
        return NoSuchQueue(f"{came_back}: queue {queue} is not there ({reason}); send it again when its service runs")
    return Unavailable(f"{came_back}: queue {queue} did not keep it ({reason}); send it again later")


def _popped(idle: list[Requester]) -> Requester | None:
    with suppress(IndexError):  # RACE: other threads take theirs at the same moment, each another one
        return idle.pop()
    return None


def _end_all(idle: list[Requester]) -> None:
    while (requester := _popped(idle)) is not None:
        requester.end()


def request(
    asked: QueueContext,
    send: Send,
    seconds: float | None,
    fields: Mapping[str, Any],
    *,
    requesters: Requesters,
    public: Callable[[str], object],
    ending: Ending | None = None,
) -> Reply | None:
    """Send a request and wait for its answer, as `Queue.request` says; `ending` ends it before its time.

    What users get as the queue of the answer, by its name, is `public`.
    """
    if fields.get("reply_to") is not None:
        raise ValueError("a request has a reply_to of its own: leave it out, or use send; nothing was sent")
    if seconds == 0:
        raise ValueError("a request needs a timeout above 0, or None to wait for ever; nothing was sent")
    fields = {name: value for name, value in fields.items() if name != "reply_to"}
    # Only ids that dropq makes never come again: the answer to an earlier request could have another's.
    may_share = fields.get("correlation_id") is None and fields.get("message_id") is None
    requester = (requesters.take() if may_share else None) or Requester(asked, public)
    reply = None
    try:
        reply = requester.ask(send, fields, seconds, ending or Ending())
    finally:
        if reply is not None and may_share:
            requesters.keep(requester)
        else:
            requester.end()
    return reply
