"""What consumers get, and what they say of it.

Invariant: at most so many messages are out as are allowed, counted here: a high-water mark bounds nothing, as thousands
fit into the buffers of TCP. A message is out from its delivery until it is settled, or until its time for that is over
and what consumers said until then was read; then it is given back. Its key names it and no other message, at each
delivery by any server: `Name.distinction` has the rule.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from dropq.api import Queue
from dropq.errors import DropqError, LeaseLost, NoSuchQueue
from dropq.format.claims import ZMQ, claim_id
from dropq.queue.by_id import Delivered, ack_delivered
from dropq.queue.message import Message, SettledMessage
from dropq.queue.sender import BATCH
from dropq.queue.subscription import Subscription
from dropq.storage.failures import describe
from dropq.storage.watch import PAUSE, RESCAN, Watch
from dropq.zmq import wire
from dropq.zmq.sockets import Socket, is_writable, received, sent

log = logging.getLogger("dropq")

#: Seconds for which a late ack counts, and of how many messages at most.
LATE, LATE_MESSAGES = 3600.0, 100_000
#: Seconds by which a claim outlives the time of its message at a consumer: until then no sweep takes it for lost, and
#: what came in time can be read, however many frames are before it.
SPARE = 1.0
#: Seconds after which the server calls itself late, and for which it then listens to what came in time.
STALLED, LISTENS = 0.02, 0.1


class _Out(NamedTuple):
    """A message at a consumer: what settles it, what settles it without its claim, and until when it is out."""

    message: Message
    delivered: Delivered
    until: float


class _Late(NamedTuple):
    """A message that was not settled in time, until when that is remembered, and whether an ack of it counts still."""

    delivered: Delivered
    until: float
    counts: bool = True


class Consumers:
    """The consumers of one queue, which are one subscription; `lease` is the server's, what follows is of `Terms`."""

    def __init__(
        self, socket: Socket, queue: Queue, *, lease: float, in_flight: int, max_size: int, headers: bool
    ) -> None:
        self._socket = socket
        self._queue = queue
        self._lease = lease
        self._in_flight = in_flight
        self._max_size = max_size
        self._headers = headers
        self._out: dict[bytes, _Out] = {}  # by key, in the order in which they went out: the first ends first
        self._refused = list[_Out]()  # acknowledged, and the file system refused
        self._late: dict[bytes, _Late] = {}
        self._listens_until = 0.0
        #: Whether no consumer takes a message now.
        self.blocked = False
        self._attempt_at = 0.0
        self._why = ""
        self._subscription: Subscription | None = None
        #: Wakes the server when a message may have come.
        self.watch = Watch(queue.layout.target, moved_in={queue.layout.target: queue.context.settling.note_moved_in})
        #: How many messages were acknowledged in time, and late; given back; and not settled in time.
        self.acked = self.late = self.given_back = self.expired = 0

    def open(self) -> None:
        """Begin to receive."""
        self._subscription = self._queue.subscribe(
            client_id=f"{ZMQ}{os.getpid()}", max_backlog=self._in_flight, lease_period=self._lease + SPARE
        )

    def close(self) -> None:
        """Return what is out, and end."""
        for out in self._out.values():
            self._give_back(out.message)
        self._out.clear()
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()

    @property
    def out(self) -> int:
        """How many messages are out."""
        return len(self._out) + len(self._refused)

    @property
    def are_due(self) -> bool:
        """Whether a message is out, or an ack that the file system refused is worth another try."""
        return bool(self._out) or any(time.monotonic() < out.until + SPARE for out in self._refused)

    @property
    def idle_for(self) -> float:
        """Seconds until there is something to do without news."""
        now = time.monotonic()
        ends = self._first_end
        if ends <= now:
            ends = self._listens_until
        elif self.out < self._in_flight and not self.blocked:
            ends = min(ends, self._attempt_at)
        return min(max(ends - now, 0.0), RESCAN)

    def attempt_again(self) -> None:
        """Try to receive at the next `deliver`."""
        self._attempt_at = 0.0

    # -- what they say -------------------------------------------------------------------------------------------

    def settle(self, *, readable: bool) -> None:
        """Settle what consumers have said of messages, if anything; all acks are made durable by one sync."""
        acked, self._refused = self._refused, []
        read = 0
        for settled in self._said() if readable else ():
            read += 1
            if settled is None:
                continue
            if (out := self._out.pop(settled.key, None)) is None:
                self._settle_late(settled)
            elif settled.acked:
                acked.append(out)
                self._end_late(settled.key)
            else:
                self._give_back(out.message, cancel=True)
        if acked:
            self._ack(acked)
        self._return_ended(all_read=read < BATCH and not self._socket.is_behind)

    def _said(self) -> Iterator[wire.Settled | None]:
        """Read what consumers have said, at most a batch: a flood must not keep the server from the rest."""
        for _ in range(BATCH):
            if (got := received(self._socket)) is None:
                return
            yield wire.read_settlement(got[1].frames)

    def _ack(self, acked: list[_Out]) -> None:
        self.attempt_again()
        subscription = self._subscription
        lost = list[Message]()
        messages = [out.message for out in acked]
        try:
            for message in messages:
                if isinstance(message, SettledMessage):
                    message.ack()  # at most once: it was settled before its delivery
            claimed = [message for message in messages if not isinstance(message, SettledMessage)]
            lost = claimed if subscription is None else subscription.ack_many(claimed)
        except DropqError as error:
            self._refused = [out for out in acked if out.message.held]
            self._pause(f"messages cannot be acknowledged: {error}")
        self.acked += len(messages) - len(lost) - len(self._refused)
        for out in acked if lost else ():
            if out.message in lost:
                self._ack_late(out.delivered)

    def _give_back(self, message: Message, *, cancel: bool = False) -> None:
        """Let a message come again at once, as PZQ does, whatever the queue's redelivery_delay is."""
        self.attempt_again()
        self.given_back += cancel
        try:
            message._give_back(cancel=cancel, delay=0)
        except LeaseLost:
            pass  # it is back already, or was settled before its delivery
        except DropqError as error:
            self._pause(f"message {message.id} cannot be given back: {error}")

    def _settle_late(self, settled: wire.Settled) -> None:
        """Settle a message that is not out any more; ignore what was never out."""
        known = self._late.get(settled.key)
        if known is not None and settled.acked and known.counts:
            self._end_late(settled.key)
            self._ack_late(known.delivered)

    def _end_late(self, key: bytes) -> None:
        """Let no late ack of a message count any more; its key stays known."""
        if (known := self._late.get(key)) is not None:
            self._late[key] = known._replace(counts=False)

    def _ack_late(self, delivered: Delivered) -> None:
        """Acknowledge a message whose time was over, where the queue lets others settle what somebody holds."""
        if self._queue.config.leasing != "sublet" or self._subscription is None:
            return
        try:
            self.late += ack_delivered(self._queue.context, delivered, self._subscription)
        except (DropqError, OSError) as error:
            self._pause(f"message {delivered.id} cannot be acknowledged late: {describe(error)}")

    @property
    def _first_end(self) -> float:
        """When the time of the first message that is out is over."""
        return next(iter(self._out.values())).until if self._out else math.inf

    def _return_ended(self, *, all_read: bool) -> None:
        """Give back messages whose time is over, once what came in time was read; remember them for late acks."""
        begun = time.monotonic()
        if self._first_end <= begun:
            late_by = begun - self._first_end
            if not self._listens_until and late_by > STALLED:
                # The process may have stood still, and read nothing meanwhile.
                self._listens_until = begun + LISTENS
            if begun < self._listens_until or not (all_read or late_by > SPARE):
                return
        self._listens_until = 0.0
        while self._first_end <= begun and time.monotonic() < begun + LISTENS:  # and no longer, as acks wait meanwhile
            key, out = next(iter(self._out.items()))
            del self._out[key]
            self.expired += 1
            self._late.pop(key, None)
            self._late[key] = _Late(out.delivered, begun + LATE)
            self._give_back(out.message)
        while len(self._late) > LATE_MESSAGES or (self._late and next(iter(self._late.values())).until <= begun):
            del self._late[next(iter(self._late))]

    # -- what they get -------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Claim messages as long as a consumer takes them and more may be out, and send them."""
        self.blocked = False
        for number in range(self._in_flight):  # and no more, as acks wait meanwhile
            now = time.monotonic()
            if self.out >= self._in_flight or now < self._attempt_at:
                return
            if now >= self._first_end:  # what was said of it is read before a sweep may return it
                return
            if not is_writable(self._socket):
                self.blocked = True
                return
            message = self._next()
            if message is not None:
                self._hand_out(message)
                if number == 0:  # at once, before more is looked for; the rest goes together
                    self._socket.network.flush()

    def _next(self) -> Message | None:
        """Claim a message; where there is none, say when to try again."""
        try:
            if self._subscription is None:
                self._queue = self._queue.root.queue(self._queue.name)
                self.open()
                self._why = ""
            assert self._subscription is not None
            if (message := self._subscription.receive()) is None:
                pause = self._subscription._next_attempt if self.watch.events else PAUSE
                self._attempt_at = time.monotonic() + pause
            return message
        except DropqError as error:
            if isinstance(error, NoSuchQueue) and self._subscription is not None:
                with suppress(DropqError):
                    self.close()  # it may be made again
            self._pause(f"nothing can be received: {error}")
            return None

    def _hand_out(self, message: Message) -> None:
        try:
            body = message._reading(self._queue.context.settling.version)
            delivered = Delivered(message.id, message._distinction, body)
            key = self._key(message, delivered)
            frames = self._frames(message, key, body.size)
        except LeaseLost:
            return
        except (DropqError, ValueError) as error:  # a fault of one message ends no server
            self._fail(message, f"it cannot be read: {error}")
            return
        if frames is None:
            return
        until = time.monotonic() + self._lease
        if not sent(self._socket, frames):
            self.blocked = True
            with suppress(DropqError):  # a sweep returns it
                message.release(counted=False)
            return
        self._out[key] = _Out(message, delivered, until)

    def _key(self, message: Message, delivered: Delivered) -> bytes:
        """Return what names a message that goes out, and no other that is or was out."""
        key = os.fsencode(delivered.id + delivered.distinction)
        known = self._out.get(key) or self._late.get(key)
        if known is not None and known.delivered != delivered:  # somebody copied the file of a message under its name
            return key + b"/" + os.fsencode(claim_id(message.owner or ""))
        if self._out.pop(key, None) is not None:  # a sweep returned the message meanwhile
            self.expired += 1
        return key

    def _frames(self, message: Message, key: bytes, size: int) -> list[bytes] | None:
        """Return the frames of a message; None if it is too large, and lies in error/ now."""
        if size > self._max_size:
            self._fail(message, f"its body has {size} bytes, and --max-size lets {self._max_size} out", final=True)
            return None
        body = message.body
        parts = [body]
        if (lengths := message.properties.get(wire.PARTS)) is not None:
            try:
                parts = wire.parted(body, str(lengths))
            except ValueError as error:
                log.warning("message %s goes out as one part: %s", message.id, error)
        header = wire.header_of(message) if self._headers else None
        now, lease = time.time_ns() // 1000, round(self._lease * 1_000_000)
        return wire.delivery(key, now, lease, parts, header)

    def _fail(self, message: Message, why: str, *, final: bool = False) -> None:
        """Fail a message that cannot be sent, or reject it; what was settled before its delivery is gone."""
        log.warning("message %s is not sent: %s", message.id, why)
        try:
            (message.reject if final else message.fail)(why)
        except LeaseLost:
            pass
        except DropqError as error:
            self._pause(f"message {message.id} stays where it is: {error}")

    def _pause(self, why: str) -> None:
        """Do nothing for a second that may fail again; log why, unless the log says so already."""
        self._attempt_at = time.monotonic() + RESCAN
        if why != self._why:
            self._why = why
            log.warning("queue %s: %s", self._queue.name, why)
