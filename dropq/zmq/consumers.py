"""What consumers get, and what they say of it.

Invariant: at most so many messages are out as are allowed, counted here: a high-water mark bounds nothing, as thousands
fit into the buffers of TCP. A message is out from its delivery until it is settled, or until its time for that is over;
then the lease of its claim is over, too, and a sweep returns it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from dropq.api import Queue
from dropq.errors import DropqError, LeaseLost, NoSuchQueue
from dropq.format.claims import ZMQ
from dropq.queue.message import Message, SettledMessage
from dropq.queue.sender import BATCH
from dropq.queue.subscription import Subscription
from dropq.storage.watch import PAUSE, RESCAN, Watch
from dropq.zmq import wire
from dropq.zmq.sockets import Socket, is_writable, received, sent

log = logging.getLogger("dropq")

#: Seconds for which a late ack counts, and of how many messages at most.
LATE, LATE_MESSAGES = 3600.0, 100_000


class _Out(NamedTuple):
    """A message at a consumer: what settles it, its key, and until when, by `time.monotonic()`."""

    message: Message
    key: bytes
    until: float


class Consumers:
    """The consumers of one queue, which are one subscription.

    Args:
        socket: the DEALER that sends to them.
        queue: has the messages.
        lease: for how long a message is a consumer's, in seconds.
        in_flight: how many messages may be out.
        max_size: the most bytes of a message.
        headers: whether a delivery says in a header what is known of its message.

    Attributes:
        watch: wakes the server when a message may have come.
        acked, late, given_back, expired: how many messages were acknowledged in time, and late; given back; and not
            settled in time.
    """

    def __init__(
        self, socket: Socket, queue: Queue, *, lease: float, in_flight: int, max_size: int, headers: bool
    ) -> None:
        self._socket = socket
        self._queue = queue
        self._lease = lease
        self._in_flight = in_flight
        self._max_size = max_size
        self._headers = headers
        self._out: dict[int, _Out] = {}  # in the order in which they went out, so that the first ends first
        self._by_key: dict[bytes, deque[int]] = {}
        self._count = 0
        self._refused = list[Message]()  # acknowledged, and the file system refused
        self._late: dict[bytes, tuple[str, float]] = {}
        self._blocked = False
        self._looks_at = 0.0
        self._why = ""
        self._subscription: Subscription | None = None
        self.watch = Watch(queue.layout.target, moved_in={queue.layout.target: queue.context.settling.note_moved_in})
        self.acked = self.late = self.given_back = self.expired = 0

    def open(self) -> None:
        """Begin to receive."""
        self._subscription = self._queue.subscribe(
            client_id=f"{ZMQ}{os.getpid()}", max_backlog=self._in_flight, lease_period=self._lease
        )

    def close(self) -> None:
        """Return what is out, and end."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()

    @property
    def out(self) -> int:
        """How many messages are out."""
        return len(self._out) + len(self._refused)

    @property
    def blocked(self) -> bool:
        """Whether no consumer takes a message now."""
        return self._blocked

    @property
    def idle_for(self) -> float:
        """Seconds until there is something to do without news."""
        now = time.monotonic()
        ends = next(iter(self._out.values())).until if self._out else now + RESCAN
        if self.out < self._in_flight and not self._blocked:
            ends = min(ends, self._looks_at)
        return min(max(ends - now, 0.0), RESCAN)

    def look_again(self) -> None:
        """Look for messages at the next `deliver`."""
        self._looks_at = 0.0

    # -- what they say -------------------------------------------------------------------------------------------

    def settle(self, *, readable: bool) -> None:
        """Settle what consumers have said of messages; all acks are made durable by one sync.

        Args:
            readable: whether they have said anything.
        """
        self._forget_ended()
        acked, self._refused = self._refused, []
        for _ in range(BATCH if readable else 0):
            if (got := received(self._socket)) is None:
                break
            settled = wire.read_settlement([got[0].bytes, *got[1]])
            if settled is None:
                continue
            if (message := self._take_out(settled.key)) is None:
                self._settle_late(settled)
            elif settled.acked:
                acked.append(message)
            else:
                self._give_back(message)
        if acked:
            self._ack(acked)

    def _ack(self, messages: list[Message]) -> None:
        self.look_again()
        subscription = self._subscription
        lost = list[Message]()
        try:
            for message in messages:
                if isinstance(message, SettledMessage):
                    message.ack()  # at most once: it was settled before its delivery
            claimed = [message for message in messages if not isinstance(message, SettledMessage)]
            lost = claimed if subscription is None else subscription.ack_many(claimed)
        except DropqError as error:
            self._refused = [message for message in messages if message.held]
            self._pause(f"messages cannot be acknowledged: {error}")
        self.acked += len(messages) - len(lost) - len(self._refused)
        for message in lost:
            self._ack_late(message.id)

    def _give_back(self, message: Message) -> None:
        self.look_again()
        self.given_back += 1
        try:
            message.nack()
        except LeaseLost:
            pass  # it is back already, or was settled before its delivery
        except DropqError as error:
            self._pause(f"message {message.id} cannot be given back: {error}")

    def _settle_late(self, settled: wire.Settled) -> None:
        """Settle a message that is not out any more; ignore what was never out."""
        known = self._late.pop(settled.key, None)
        if known is not None and settled.acked and known[1] > time.monotonic():
            self._ack_late(known[0])

    def _ack_late(self, id: str) -> None:
        """Acknowledge a message whose time was over, where the queue lets others settle what somebody holds."""
        if self._queue.config.leasing != "sublet":
            return
        try:
            self.late += self._queue.ack(id)
        except LeaseLost:
            pass  # several messages have the id: nobody knows which one is meant
        except DropqError as error:
            self._pause(f"message {id} cannot be acknowledged late: {error}")

    def _take_out(self, key: bytes) -> Message | None:
        """Return the message of a key that went out first, which is not out any more; None if there is none."""
        numbers = self._by_key.get(key)
        if numbers is None:
            return None
        out = self._out.pop(numbers.popleft())
        if not numbers:
            del self._by_key[key]
        return out.message

    def _forget_ended(self) -> None:
        """Stop counting messages whose time is over; remember them for late acks."""
        now = time.monotonic()
        while self._out and (out := next(iter(self._out.values()))).until <= now:
            self._take_out(out.key)
            self.expired += 1
            self._late[out.key] = out.message.id, now + LATE
            self.look_again()
        while len(self._late) > LATE_MESSAGES or (self._late and next(iter(self._late.values()))[1] <= now):
            del self._late[next(iter(self._late))]

    # -- what they get -------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Claim messages as long as a consumer takes them and more may be out, and send them."""
        self._blocked = False
        for _ in range(self._in_flight):  # and no more, as acks wait meanwhile
            if self.out >= self._in_flight or time.monotonic() < self._looks_at:
                return
            if not is_writable(self._socket):
                self._blocked = True
                return
            message = self._next()
            if message is not None:
                self._hand_out(message)

    def _next(self) -> Message | None:
        """Claim a message; where there is none, say when to look again."""
        try:
            if self._subscription is None:
                self._queue = self._queue.root.queue(self._queue.name)
                self.open()
                self._why = ""
            assert self._subscription is not None
            if (message := self._subscription.receive()) is None:
                pause = self._subscription._next_look if self.watch.events else PAUSE
                self._looks_at = time.monotonic() + pause
            return message
        except DropqError as error:
            if isinstance(error, NoSuchQueue) and self._subscription is not None:
                with suppress(DropqError):
                    self.close()  # it may be made again
            self._pause(f"nothing can be received: {error}")
            return None

    def _hand_out(self, message: Message) -> None:
        until = time.monotonic() + self._lease
        try:
            frames = self._frames(message)
        except LeaseLost:
            return
        except DropqError as error:
            self._fail(message, f"its body cannot be read: {error}")
            return
        if frames is None:
            return
        if not sent(self._socket, frames):
            self._blocked = True
            with suppress(DropqError):  # a sweep returns it
                message.release(counted=False)
            return
        self._count += 1
        self._out[self._count] = _Out(message, frames[0], until)
        self._by_key.setdefault(frames[0], deque()).append(self._count)

    def _frames(self, message: Message) -> list[bytes] | None:
        """Return the frames of a message; None if it is too large, and lies in error/ now."""
        if (size := message.size()) > self._max_size:
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
        return wire.delivery(os.fsencode(message.id), now, lease, parts, header)

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
        self._looks_at = time.monotonic() + RESCAN
        if why != self._why:
            self._why = why
            log.warning("queue %s: %s", self._queue.name, why)
