"""The run loop: claims messages, gives each to a handler, settles it by what the handler says.

A worker claims a message only for a hand that is free, so that nothing it does not work on is kept from others, and
while a handler runs the lease of its message is renewed. Whatever happens to a handler, its message is settled once,
or given back; a message whose claim was lost is left to whoever has it now. To be stopped is no failure: what ends
by the signal that stops the worker goes back uncounted.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from queue import SimpleQueue
from traceback import format_exception
from typing import TYPE_CHECKING, Protocol

from dropq.durations import format_duration, parse_duration
from dropq.errors import LeaseLost
from dropq.format.layout import WAITING
from dropq.queue.lease_renewer import LeaseRenewer
from dropq.queue.message import Duration, Message, utc
from dropq.storage.watch import RESCAN, Watch

if TYPE_CHECKING:
    from dropq.lifecycle.context import QueueContext
    from dropq.queue.subscription import Subscription

log = logging.getLogger("dropq")

#: What is called with each message. What it returns is not looked at: returning acknowledges.
Handler = Callable[[Message], object]

#: Seconds that a handler which can be cancelled is waited for when its message is to be given back.
CANCEL_LIMIT = 10.0
#: The signals that ask a worker to stop.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Seconds by which a stop's signal may come to a command earlier than to its worker. A command that ends by itself with
#: the status that a shell gives to such a signal is waited for once a worker.
SIGNAL_SPREAD = 1.0
#: Seconds between two looks for it.
SIGNAL_LOOK = 0.01

#: How what was ended by such a signal tells its status: as Python's own subprocesses do, and as shells do.
_BY_STOP = frozenset(status for number in STOPS for status in (-number, 128 + number))

#: How a message that its handler settled itself is counted, by the state that it went to.
_SETTLED = {"processed": "acked", "removed": "acked", **dict.fromkeys(WAITING, "retried")}
#: The outcomes that are logged, in words.
_TOLD = {"retried": "given back", "rejected": "rejected", "failed": "failed"}


class Source(Protocol):
    """What a worker takes messages from: a queue."""

    @property
    def context(self) -> QueueContext:
        """The open queue."""

    def subscribe(self, *, max_backlog: int | None, lease_period: Duration | None) -> Subscription:
        """Begin to receive from it."""


class Retry(Exception):
    """Raised by a handler to give its message back; it is delivered again, and a cancel is counted.

    Args:
        delay: how long it is kept from everybody; None takes the queue's redelivery_delay.
        reason: for whoever reads the log.
    """

    def __init__(self, delay: Duration | None = None, *, reason: str = "to be tried again") -> None:
        super().__init__(reason)
        self.delay = None if delay is None else parse_duration(delay)


class Reject(Exception):
    """Raised by a handler to refuse its message for good: it goes to error/ at once.

    Args:
        reason: for whoever reads error/.
        details: what else is kept with the reason.
    """

    def __init__(self, reason: str, **details: object) -> None:
        super().__init__(reason)
        self.details = details


class Fail(Exception):
    """Raised by a handler that knows why it failed: as any other exception, but without a traceback.

    Args:
        reason: for whoever reads error/.
        details: what else is kept with the reason.
    """

    def __init__(self, reason: str, **details: object) -> None:
        super().__init__(reason)
        self.details = details
        #: How a program ended that the handler ran, as subprocess tells it: -N for the signal N; None for no program.
        self.returncode: int | None = None


class Halt(Exception):
    """Raised by a handler that cannot work on any message: this one goes back uncounted, and the worker ends."""


class Cancelled(Exception):
    """Raised by a handler whose `cancel(message)` was called: its message is lost, or to be given back."""


@dataclass(frozen=True)
class Left:
    """A message that came back in a run that takes each once.

    Attributes:
        id: its id, which several may share that a sender chose it for.
        due: when it may be delivered again; None for at once.
    """

    id: str
    due: datetime | None


@dataclass
class WorkReport:
    """What became of the messages that a worker took.

    Attributes:
        acked, failed, retried, rejected: settled so, by the worker or by the handler itself.
        lost: the claim was gone when the message was to be settled; nothing was changed.
        returned: given back, uncounted, because the worker was to end.
        halted: why the handler could not go on; None when it could.
        stopped: whether the worker was asked to end, as by a signal.
        left: with `until_empty`, the messages that were taken and came back.
    """

    acked: int = 0
    failed: int = 0
    retried: int = 0
    rejected: int = 0
    lost: int = 0
    returned: int = 0
    halted: str | None = None
    stopped: bool = False
    left: list[Left] = field(default_factory=list)


class Stop:
    """Asks a worker to end: once, to finish what runs; twice, to end that too and give it back.

    Args:
        event: ask once as soon as this is set, too; it is looked at once a second.
    """

    def __init__(self, event: threading.Event | None = None) -> None:
        self.times = 0
        self._event = event
        self._wakes: list[Callable[[], None]] = []

    def ask(self) -> None:
        """Ask; any thread and any signal handler may."""
        self.times += 1  # no lock, and no logging: a signal handler may interrupt whoever holds one
        for wake in tuple(self._wakes):
            wake()

    @property
    def asked(self) -> bool:
        """Whether anybody asked."""
        return self.times > 0 or (self._event is not None and self._event.is_set())

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call something, for as long as the block lasts, whenever somebody asks."""
        self._wakes.append(wake)
        try:
            yield
        finally:
            self._wakes.remove(wake)


@contextmanager
def stop_on_signals(stop: Stop, *signals: signal.Signals) -> Iterator[Stop]:
    """Take signals as requests to stop for as long as the block lasts; to be called in the main thread.

    Args:
        stop: what is asked.
        signals: which; SIGTERM, SIGINT and SIGHUP when none is given, the last only where `nohup` does not ignore it.
    """
    before = {}
    for number in signals or (number for number in STOPS if not _is_ignored_hangup(number)):
        before[number] = signal.signal(number, lambda *_: stop.ask())
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _is_ignored_hangup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def work(
    queue: Source,
    handler: Handler,
    *,
    concurrency: int = 1,
    until_empty: bool = False,
    lease: Duration | None = None,
    poll: bool = False,
    stop: Stop | threading.Event | None = None,
) -> WorkReport:
    """Handle a queue's messages until asked to stop.

    A handler that returns acknowledges its message. If it raises `Retry`, its message is given back; `Reject` refuses
    the message, `Halt` gives it back and ends the worker, any other exception fails it, with the traceback kept (`Fail`
    without). A handler may also settle its message itself. It may look at `message.held`, which turns false when the
    claim is lost. If the handler has a method `cancel(message)`, that is called then, and when a message is to be given
    back, from another thread; it must return at once, and the handler raises `Cancelled`.

    SIGTERM, SIGHUP and Ctrl-C, in the main thread and where the program has no handler of its own for them, are
    requests to stop: what runs is finished, and the report says `stopped`. A second one gives back what runs, and
    leaves handlers that cannot be cancelled to the end of the process. A message whose handler fails because that
    signal ended a program that it ran is given back, too, uncounted.

    Args:
        queue: the queue.
        handler: called with each message, in another thread than the caller's.
        concurrency: how many messages are handled at a time; the queue's max_per_subscription_backlog may be lower.
        until_empty: end when nothing waits in target/ and nothing runs here; delayed messages, and what others hold,
            are not waited for, but what a limit, a turn or a barrier keeps back is. A paused queue is empty. Each
            message is taken once at the most: the report says which came back, and are `left`.
        lease: after which a claim runs out unless it is renewed; None takes the queue's, which may have none.
        poll: look for messages twenty times a second instead of waiting for events.
        stop: asks the worker to end; a `threading.Event` asks once, and is seen within a second.

    Raises:
        NoSuchQueue, ConfigError: nothing was taken.
        StorageError: a message could not be taken or settled; what ran was finished first.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency {concurrency}: at least 1")
    asked = stop if isinstance(stop, Stop) else Stop(stop)
    with ExitStack() as stack:
        # Ctrl-C must not break a claim in two: between the rename and its being known to the subscription.
        if free := _signals_that_nobody_takes():
            stack.enter_context(stop_on_signals(asked, *free))
        subscription = stack.enter_context(queue.subscribe(max_backlog=concurrency, lease_period=lease))
        watch = Watch(queue.context.layout.target, poll=poll)
        stack.enter_context(asked.waking(watch.wake))
        return _Worker(subscription, handler, watch, asked, concurrency=concurrency, until_empty=until_empty).run()


def _signals_that_nobody_takes() -> list[signal.Signals]:
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in STOPS if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)]


class _Worker:
    """One run of the loop: hands handle and settle, and take the next message themselves while there is one.

    The calling thread wakes hands when something may have come, and a lease renewer renews the leases of what runs.
    """

    def __init__(
        self,
        subscription: Subscription,
        handler: Handler,
        watch: Watch,
        stop: Stop,
        *,
        concurrency: int,
        until_empty: bool,
    ) -> None:
        self._subscription = subscription
        self._handler = handler
        self._cancel: Callable[[Message], None] | None = getattr(handler, "cancel", None)
        self._watch = watch
        self._stop = stop
        self._concurrency = concurrency
        self._until_empty = until_empty
        self._report = WorkReport()
        self._error: BaseException | None = None
        self._exits_as_stopped = False  # a program of the handler's ends by itself with what a stop's signal gives
        self._lock = threading.Lock()
        self._busy = 0  # hands that have, or look for, a message
        self._running: dict[int, Message] = {}
        self._given: SimpleQueue[Message | None] = SimpleQueue()
        self._ended = threading.Event()

    def run(self) -> WorkReport:
        for _ in range(self._concurrency):
            threading.Thread(target=self._hand, name="dropq-hand", daemon=True).start()
        lease = self._subscription.lease
        renewer = LeaseRenewer(lease, partial(self._renew_running, lease)) if lease else None
        try:
            while not self._over():
                self._watch.wait(self._pause())
        finally:
            self._ended.set()
            if renewer is not None:
                renewer.stop()
            self._give_back()  # nothing is left but after a second request, or an exception
            for _ in range(self._concurrency):
                self._given.put(None)
        if self._error is not None:
            raise self._error
        self._report.stopped = self._stop.asked
        return self._report

    # -- the calling thread ----------------------------------------------------------------------------------

    @property
    def _stopping(self) -> bool:
        ends = self._error is not None or self._report.halted is not None
        return ends or self._stop.asked or self._ended.is_set()

    def _over(self) -> bool:
        """Take a message for each free hand; tell whether there is nothing more to do."""
        idle = self._busy == 0  # before the look: what is given back while we look makes for another round
        taken = 0
        while self._busy < self._concurrency and (message := self._next()) is not None:
            taken += 1
            self._count_busy(1)
            self._given.put(message)
        if taken:
            self._watch.begin()
        if self._stop.times > 1:
            return True
        # What a barrier waits for may have come back in this run: that is for another run to take.
        waits = self._subscription.held_up and not self._subscription.waits_for_passed_over
        return idle and not taken and (self._stopping or (self._until_empty and not waits))

    def _next(self) -> Message | None:
        """Claim a message, unless the worker is to end."""
        if self._stopping:
            return None
        try:
            message = self._subscription.receive()
            if message is None:
                return None
            self._running[id(message)] = message
            # RACE: what was claimed while the calling thread looks for what to give back is seen by it, or by us.
            if self._ended.is_set() and self._running.pop(id(message), None) is not None:
                message.release(counted=False)
                return None
        except Exception as error:
            self._fail(error)
            return None
        return message

    def _pause(self) -> float:
        looks = self._busy < self._concurrency and not self._stopping
        return self._subscription.next_look if looks else RESCAN  # or a hand that becomes free wakes us

    def _give_back(self) -> None:
        """End what runs, where that can be done, and give it back."""
        until = time.monotonic() + CANCEL_LIMIT
        while self._busy and self._cancel is not None and time.monotonic() < until:
            for message in list(self._running.values()):
                self._end(message)  # again and again: its handler may only just begin
            self._watch.wait(0.1)
        for key, message in list(self._running.items()):
            if self._running.pop(key, None) is None:
                continue  # RACE: its hand was done with it just now
            try:
                message.release(counted=False)
            except LeaseLost:
                continue  # its hand settled it just now, or it is somebody else's
            self._count("returned")

    # -- hands -----------------------------------------------------------------------------------------------

    def _hand(self) -> None:
        while (given := self._given.get()) is not None:
            message: Message | None = given
            while message is not None:
                try:
                    if id(message) in self._running:
                        with self._subscription.once(message) if self._until_empty else nullcontext():
                            self._work_on(message)
                except BaseException as error:
                    self._fail(error)
                self._running.pop(id(message), None)
                message = self._next()
            self._count_busy(-1)
            self._watch.wake()

    def _work_on(self, message: Message) -> None:
        settled_first = not message.held  # at most once: nothing can be changed any more
        outcome, settle, why = self._handle(message)
        try:
            if settled_first:
                outcome = outcome if outcome == "acked" else "failed"
                message.ack()
            elif message.held:
                settle()
            else:
                outcome = "lost" if message.state == "processing" else _SETTLED.get(message.state, "failed")
        except LeaseLost:
            outcome = "lost"
        if outcome in ("retried", "returned") and message.state not in WAITING:
            outcome = "failed"  # it was given back too often: the queue has set it aside
        if self._until_empty and outcome != "lost" and message.state in WAITING:
            self._leave(message)
        if outcome == "lost":
            log.warning("message %s: its claim was lost while it was handled; nothing was changed", message.id)
        elif outcome in _TOLD:
            log.warning("message %s %s (%s), try %d, %s", *_fate(message, _TOLD[outcome], why))
        if id(message) in self._running:
            self._count(outcome)

    def _handle(self, message: Message) -> tuple[str, Callable[[], None], str]:
        """Call the handler; return how the message counts, what settles it so, and why."""
        give_back = partial(message.release, counted=False)
        try:
            self._handler(message)
        except Retry as error:
            return "retried", partial(message.nack, error.delay), str(error)
        except Reject as error:
            return "rejected", partial(message.reject, str(error), **error.details), str(error)
        except Cancelled:
            return "returned", give_back, ""
        except Halt as error:
            self._report.halted = str(error)
            return "returned", give_back, ""
        except Exception as error:
            if self._is_stop(error):
                return "returned", give_back, ""
            if isinstance(error, Fail):
                return "failed", partial(message.fail, str(error), **error.details), str(error)
            reason = f"{type(error).__name__}: {error}"
            return "failed", partial(message.fail, reason, traceback=_traceback(error)), reason
        except BaseException as error:
            self._fail(error)  # the program is to end: it may be the message that ends it, so the delivery counts
            return "returned", message.release, ""
        return "acked", message.ack, "by its handler"

    def _is_stop(self, error: Exception) -> bool:
        """Tell whether what a handler ran was ended by the signal that stops this worker."""
        status = getattr(error, "returncode", None)
        if status is None and isinstance(error, Fail):
            status = error.details.get("exit_status")
        if not isinstance(status, int) or status not in _BY_STOP:
            return False
        if status > 0 and self._exits_as_stopped:
            return self._stop.asked
        # RACE: who signals a whole group may come to the command first; our own signal is waited for.
        until = time.monotonic() + SIGNAL_SPREAD
        while not self._stop.asked and time.monotonic() < until and not self._ended.wait(SIGNAL_LOOK):
            pass
        self._exits_as_stopped = self._exits_as_stopped or (status > 0 and not self._stop.asked)
        return self._stop.asked

    def _leave(self, message: Message) -> None:
        """Leave a message that came back to another run."""
        due = _due(message)
        with self._lock:
            self._report.left.append(Left(message.id, utc(due) if due else None))

    def _count_busy(self, change: int) -> None:
        with self._lock:
            self._busy += change

    def _count(self, outcome: str) -> None:
        with self._lock:
            setattr(self._report, outcome, getattr(self._report, outcome) + 1)

    def _fail(self, error: BaseException) -> None:
        """End the worker by an error, once what runs is finished."""
        log.error("the worker ends: %s: %s", type(error).__name__, error)
        self._error = self._error or error

    # -- the thread of the lease renewer ---------------------------------------------------------------------

    def _renew_running(self, lease: float) -> None:
        for message in list(self._running.values()):
            self._renew(message, lease)

    def _renew(self, message: Message, lease: float) -> None:
        try:
            if message.held:
                message.extend(lease)
        except LeaseLost as error:
            log.debug("%s", error)  # or its hand settled it just now
        except Exception as error:  # there is time for another try, and there are other messages
            log.warning("message %s: its lease was not renewed: %s", message.id, error)
        if not message.held and message.state == "processing":
            self._end(message)  # lost; again at the next round, as its handler may only just begin

    def _end(self, message: Message) -> None:
        if self._cancel is None:
            return
        try:
            self._cancel(message)
        except Exception:
            log.exception("message %s: its handler could not be cancelled", message.id)


def _due(message: Message) -> int:
    """Return when a message that was given back may be delivered again, in ms since 1970; 0 for at once."""
    return message.context.sidecars.parse(message.file).not_before if message.state == "delayed" else 0


def _fate(message: Message, what: str, why: str) -> tuple[str, str, str, int, str]:
    """Return what is logged of a message: its id, what became of it, why, which try it was, and what comes next."""
    then = f"it is in {message.state}/"
    if message.state == "target":
        then = "again at once"
    elif due := _due(message):
        wait = max(due - message.context.clock.now_ms(), 0) / 1000
        then = f"again in {format_duration(round(wait, 1))}"
    return message.id, what, why, message.delivery_count, then


def _traceback(error: BaseException) -> str:
    """Return an error's traceback from the handler on."""
    trace = error.__traceback__
    return "".join(format_exception(type(error), error, trace.tb_next if trace is not None else None))
