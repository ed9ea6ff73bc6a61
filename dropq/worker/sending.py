"""What a handler makes of a message: it is staged as it comes, and goes out by the ack of the message.

A worker takes nothing from a queue while a destination of its messages takes nothing, and for a while after something
could not be staged, such as on a full disk: no message is delivered for work that could not be kept.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, ValuesView
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from io import IOBase
from math import inf
from types import GeneratorType
from typing import cast

from dropq.errors import DropqError
from dropq.lifecycle.endings import growing
from dropq.policies.build import view_of
from dropq.policies.send_limits import LOG_WAIT_EVERY, MustWait
from dropq.queue.message import Message
from dropq.queue.outputs import Destinations, Out, Outputs, OutputWriter
from dropq.queue.subscription import Subscription
from dropq.staging.fan_out import UNSETTLED
from dropq.worker.sources import Taken

log = logging.getLogger("dropq")

#: Seconds after which a destination that takes nothing is asked again.
RECHECK = 0.1
#: Seconds for which a worker takes nothing, at least, after something could not be staged.
LEAST_REST = 1.0
#: What is said of an async handler.
IS_ASYNC = "the handler is async, and a worker calls plain functions: see dropq.aio for async consumers"


class NotSent(Exception):
    """Raised when what a handler made could not be staged; its cause says why."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def why_not_sent(error: Exception) -> str:
    """Return why a message could not be staged, without what the error says of the message: that goes back now."""
    return str(error).removesuffix(f"; {UNSETTLED}")


@contextmanager
def not_sent() -> Iterator[None]:
    """Raise NotSent for what keeps a message from being staged."""
    try:
        yield
    except (DropqError, MustWait, ValueError, TypeError) as error:
        raise NotSent(error) from error


def is_made(made: object) -> bool:
    """Return whether what a handler returned is messages to send: an `Out`, several, or an iterator of them.

    Raises:
        TypeError: it is what an async function returns, which would never run, or messages lie deeper in it.
    """
    if isinstance(made, Coroutine | AsyncIterator):
        raise TypeError(IS_ASYNC)
    if isinstance(made, Mapping | list | tuple | set | frozenset | ValuesView):
        values = list(made.values() if isinstance(made, Mapping) else made)  # other threads may change it
        if not isinstance(made, Mapping) and any(isinstance(each, Out) for each in values):
            return True
        deeper = (part for each in values for part in (each if isinstance(each, list | tuple | set) else (each,)))
        if any(isinstance(part, Out) for part in deeper):
            raise TypeError("the handler returned Outs within other containers: return them in one list")
        return False
    return isinstance(made, Out) or (isinstance(made, Iterator) and not isinstance(made, IOBase))


@dataclass
class Sending:
    """What is made of one message."""

    _message: Message
    _destinations: Callable[[], Destinations]
    _outputs: Outputs | None = None
    #: Whether the handler made something of the message, and whether that could not be staged, and may be later.
    is_used: bool = False
    is_refused: bool = False

    def withdraw(self) -> None:
        """Remove what was staged; call it while the message is held."""
        if self._outputs is not None:
            self._outputs.withdraw()

    @property
    def outputs(self) -> Outputs:
        """What is sent with the ack.

        Raises:
            NotSent: nothing can be sent with it.
        """
        self.is_used = True
        if self._outputs is None:
            with not_sent():
                self._outputs = Outputs(self._message, self._destinations())
        return self._outputs

    def take(self, made: object) -> None:
        """Stage what a handler returned, if that is messages to send; run an iterator to its end.

        Raises:
            NotSent: it could not be staged; whatever a generator raises comes as it is.
        """
        if not is_made(made):
            return
        if isinstance(made, Iterator):
            with closing(made) if isinstance(made, GeneratorType) else nullcontext():
                for out in made:
                    self._add([out])
        else:
            self._add([made] if isinstance(made, Out) else cast("Iterable[Out]", made))

    def begin(self, out: Out) -> OutputWriter | None:
        """Begin a message whose body is written piece by piece; None if its queue discards it. Raise NotSent if not."""
        with not_sent():
            return self.outputs.begin(out)

    def _add(self, outs: Iterable[Out]) -> None:
        with not_sent():
            self.outputs.add_all(outs)

    def ack(self) -> None:
        """Acknowledge the message, and send what was made of it."""
        self._message._ack_with(self.outputs)


class SendingHandler(ABC):
    """A handler of messages that stages what it makes by itself, piece by piece."""

    @abstractmethod
    def stage(self, message: Message, sending: Sending) -> None:
        """Stage what it makes of a message; return if it is to be acknowledged, else raise as a handler does."""

    def __call__(self, message: Message) -> None:
        """Refuse to run without what stages its output."""
        raise TypeError(f"a {type(self).__name__} sends with the acks of messages: give it to a worker of messages")


@dataclass
class Sendings:
    """What one worker sends, and when it takes nothing because of that.

    Attributes:
        destinations: of queues by name, as far as they are known.
        given_up: whether the worker is to stop.
        client_id: the name of the worker; "" without one.
    """

    destinations: dict[str, Destinations] = field(default_factory=dict)
    given_up: Callable[[], bool] = bool
    client_id: str = ""
    _why: dict[str, str] = field(default_factory=dict)
    _logs_at: float = 0.0
    _failures: int = 0
    _rests_until: float = 0.0

    @contextmanager
    def of(self, taken: Taken) -> Iterator[Sending]:
        """Yield what is made of a message; remove what was not sent when the block ends."""
        sending = Sending(taken.message, lambda: self._destinations_of(taken))
        try:
            yield sending
        finally:
            sending.withdraw()

    def _destinations_of(self, taken: Taken) -> Destinations:
        queue = taken.message.queue
        found = self.destinations.get(queue.name)
        if found is None:
            found = self.destinations[queue.name] = Destinations(
                queue.context,
                queue.root.queue,
                given_up=self.given_up,
                on_new=partial(self.announce, taken.subscription),
                client_id=self.client_id,
            )
        return found

    def announce(self, subscription: Subscription) -> None:
        """Write beside a subscription's sign of life where its messages go."""
        found = self.destinations.get(subscription._context.name)
        if found is not None and found.addresses:
            with suppress(OSError):  # it only informs
                if (presence := subscription._presence) is not None:
                    presence.announce(found.addresses)

    def rest(self, subscription: Subscription) -> None:
        """Take nothing for a while, which grows, as something could not be staged."""
        if self.rests_for:
            return  # other threads met the same
        config = subscription._context.config
        first, limit = max(config.redelivery_delay, LEAST_REST), max(config.redelivery_delay_limit, LEAST_REST)
        self._rests_until = time.monotonic() + growing(first, config.redelivery_backoff, self._failures, limit)
        self._failures += 1

    def went_well(self) -> None:
        """Note that something was sent: the next rest is a short one."""
        self._failures = 0

    @property
    def rests_for(self) -> float:
        """Seconds for which the worker takes nothing yet; 0 if it may take something."""
        return max(self._rests_until - time.monotonic(), 0.0)

    @property
    def pause(self) -> float:
        """Seconds after which to ask again, while a destination takes nothing."""
        return RECHECK if any(self._why.values()) else inf

    def is_blocked(self, subscription: Subscription) -> bool:
        """Return whether a destination takes nothing, so that nothing is to be taken from a queue; log why."""
        context = subscription._context
        found = self.destinations.get(context.name)
        why = found.what_blocks() if found is not None else ""
        if why and (why != self._why.get(context.name) or time.monotonic() >= self._logs_at):
            self._logs_at = time.monotonic() + LOG_WAIT_EVERY
            log.warning("nothing is taken from queue %s: %s", context.name, why)
        self._why[context.name] = why
        return bool(why)

    def has_waiting(self, subscription: Subscription) -> bool:
        """Return whether messages wait that are not taken, as a destination takes nothing."""
        context = subscription._context
        if (not self._why.get(context.name) and not self.rests_for) or context.paused:
            return False
        return any(map(subscription._offers.wants, view_of(context).files()))
