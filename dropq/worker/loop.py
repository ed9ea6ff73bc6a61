"""The run loop: claims messages, calls a handler with each, and settles it by the result.

A worker claims a message only when a thread is free to handle it, so that it keeps no message from others for nothing.
While a handler runs, the worker renews the lease of its message. Invariant: however a handler ends, its message is
settled once, or given back; a message whose claim was lost is left alone. Stopping a worker is not a failure: a message
whose handler ends by the same signal goes back, and the delivery does not count.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from functools import partial
from queue import Empty, SimpleQueue
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from dropq.durations import parse_duration
from dropq.errors import LeaseLost, QueueFull, StorageError, Unavailable
from dropq.format.layout import WAITING
from dropq.format.names import Name
from dropq.format.staged import OwnPart
from dropq.lifecycle.settlement import BODY_CHANGED
from dropq.policies.send_limits import MustWait
from dropq.queue.lease_renewer import LeaseRenewer
from dropq.queue.message import Duration, Message, Record, utc
from dropq.queue.outputs import TooManyOutputs
from dropq.storage.failures import told
from dropq.storage.watch import RESCAN
from dropq.worker.reporter import Handled, Outcome, Reporter, due_ms
from dropq.worker.sending import NotSent, Sending, SendingHandler, Sendings, is_made, why_not_sent
from dropq.worker.sources import Sources, Taken

if TYPE_CHECKING:
    from dropq.queue.offers import CameBack
    from dropq.queue.subscription import Subscription

log = logging.getLogger("dropq")

#: A function that is called with each message, or with each record; when it returns, the message, or the record, is
#: acknowledged. If it returns an `Out`, or several in a list, tuple, set or iterator, or yields them, they are sent by
#: the ack of the message. Whatever else it returns does not count.
Handler = Callable[[Any], object]

#: Seconds to wait for handlers that were cancelled, before their messages are given back.
CANCEL_LIMIT = 10.0
#: The signals that ask a worker to stop.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Seconds to wait for the worker's own signal after a stop signal ended a command, which it may have reached first. For
#: commands that exit with the status of such a signal by themselves, each worker waits only once.
SIGNAL_SPREAD = 1.0
#: Seconds between two checks for the worker's own signal.
SIGNAL_CHECK = 0.01

#: The exit statuses of a program that a stop signal ended: as Python's subprocess reports them, and as shells do.
_STOPPED_STATUSES = frozenset(status for number in STOP_SIGNALS for status in (-number, 128 + number))

#: How a message counts that its handler settled itself, by its state.
SETTLED: dict[str, Outcome] = {"processed": "acked", "removed": "acked", **dict.fromkeys(WAITING, "retried")}


#: The outcome of a record that was not acknowledged, by its holder's verb, unless it was given back too often.
RECORD_OUTCOMES: dict[str, Outcome] = {"nack": "retried", "fail": "failed", "reject": "rejected"}


class Retry(Exception):
    """Raised by a handler to give its message back; the message is delivered again, and a cancel is counted.

    Args:
        delay: how long the message waits before its next delivery; None takes the queue's redelivery_delay.
        reason: goes into the log.
        details: go into the queue's log, too, such as `exit_status` or `stderr`.
    """

    def __init__(self, delay: Duration | None = None, *, reason: str = "to be tried again", **details: object) -> None:
        super().__init__(reason)
        self.details = {"detail": reason, **details}
        self.delay = None if delay is None else parse_duration(delay)


class _Failure(Exception):
    """Keeps a reason, and details of it, which go beside the message in error/."""

    def __init__(self, reason: str, **details: object) -> None:
        super().__init__(reason)
        self.details = details


class Reject(_Failure):
    """Raised by a handler to refuse its message for good: it goes to error/ at once, with the reason and details."""


class Fail(_Failure):
    """Raised by a handler to fail its message, as any other exception does, but without a traceback."""

    #: How a program ended that the handler ran, as subprocess reports it: -N for signal N; None if it ran no program.
    returncode: int | None = None


class Halt(Exception):
    """Raised by a handler that cannot handle any message: the message goes back uncounted, and the worker ends."""


class Cancelled(Exception):
    """Raised by a handler after its `cancel(message)` was called: the message is lost, or goes back uncounted."""


@dataclass(frozen=True)
class Left:
    """A message that came back in a run that takes each message once.

    Attributes:
        id: its id, which is unique only if the sender did not choose it.
        due: when it may be delivered again; None for at once.
    """

    id: str
    due: datetime | None


@dataclass
class WorkReport:
    """How many messages a worker took, by outcome; with `records`, how many records.

    A record counts once its message is settled. What is left of a message, and goes to error/ as a whole, counts as one
    that failed. A handler of messages may settle their records by itself (`message.records()`): those that it does not
    acknowledge count beside the message. What was given back too often, so that it is not delivered again, failed.

    Attributes:
        acked, failed, retried, rejected: settled this way, by the worker or by the handler itself.
        lost: how many messages the worker lost before it settled them; nothing was changed, and no record counts.
        returned: how many messages, or what was left of them, it gave back uncounted, because it ended, or could not
            write what was made of them.
        halted: why the handler could not handle any message; None if it could.
        stopped: whether the worker was asked to stop, as by a signal.
        left: with `until_empty`, the messages that the worker took and that came back, and records that did.
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
    """Asks a worker to stop: once, to finish the running handlers; twice, to cancel them and give their messages back.

    Args:
        event: setting it asks once, too; the worker checks it once a second.
    """

    def __init__(self, event: threading.Event | None = None) -> None:
        self.times = 0
        self._event = event
        self._wakes: list[Callable[[], None]] = []
        self._came = SimpleQueue[None]()  # a handler may put into it amid a wait, and not set an event

    def ask(self) -> None:
        """Ask; any thread and any signal handler may call this."""
        self.times += 1  # no lock and no logging: a signal handler may have interrupted the thread that holds the lock
        self._came.put(None)
        for wake in tuple(self._wakes):
            wake()

    @property
    def asked(self) -> bool:
        """Whether the worker was asked to stop."""
        return self.times > 0 or (self._event is not None and self._event.is_set())

    def wait(self, seconds: float) -> bool:
        """Wait for `ask`, not for the event, for so many seconds at the most; return whether it was called."""
        try:
            self._came.put(self._came.get(timeout=max(seconds, 0)))
        except Empty:
            return False
        return True

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` whenever the worker is asked to stop, until the block ends."""
        self._wakes.append(wake)
        try:
            yield
        finally:
            self._wakes.remove(wake)


@contextmanager
def stop_on_signals(stop: Stop, signals: Iterable[signal.Signals] | None = None) -> Iterator[Stop]:
    """Turn signals into requests to stop until the block ends; only the main thread can do this.

    Args:
        signals: the signals; None is SIGTERM, and SIGINT and SIGHUP unless the parent had the program ignore them, as
            `nohup` does with SIGHUP, and a script with `&` does with SIGINT.
    """
    if signals is None:
        heard = (each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN)
        signals = {signal.SIGTERM, *heard}
    before = {number: signal.signal(number, lambda *_: stop.ask()) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def stop_if_asked(stop: Stop | threading.Event | None) -> Iterator[Stop]:
    """Yield a `Stop` that `stop` asks and, in the main thread, each signal that the program does not handle."""
    default = (signal.SIG_DFL, signal.default_int_handler)
    is_main = threading.current_thread() is threading.main_thread()
    unhandled = [number for number in STOP_SIGNALS if is_main and signal.getsignal(number) in default]
    with stop_on_signals(stop if isinstance(stop, Stop) else Stop(stop), unhandled) as asked:
        yield asked


@dataclass
class Worker:
    """One run of the loop.

    Worker threads handle and settle messages, and take the next message themselves as long as there is one. The calling
    thread waits for messages and hands them to free threads. A lease renewer renews the leases of running messages.
    """

    sources: Sources
    handler: Handler
    stop: Stop
    reporter: Reporter
    _: KW_ONLY
    concurrency: int
    until_empty: bool
    sendings: Sendings = field(default_factory=Sendings)

    def __post_init__(self) -> None:
        self.sources.is_blocked = self.sendings.is_blocked
        self._cancel: Callable[[Message], None] | None = getattr(self.handler, "cancel", None)
        self._watch = self.sources.watch
        self._report = WorkReport()
        self._error: BaseException | None = None
        self._exits_as_if_stopped = False  # a program exited by itself with the status of a stop signal
        self._lock = threading.Lock()
        self._busy = 0  # threads that have a message, or look for one
        self._running: dict[int, Taken] = {}
        self._inbox: SimpleQueue[Taken | None] = SimpleQueue()
        self._ended = threading.Event()

    def run(self) -> WorkReport:
        for subscription in self.sources:
            self.sendings.announce(subscription)
        for _ in range(self.concurrency):
            threading.Thread(target=self._run_thread, name="dropq-worker", daemon=True).start()
        lease = min((each.lease for each in self.sources if each.lease), default=None)
        renewer = LeaseRenewer(lease, self._renew_running) if lease else None
        reported = 0  # how often the worker was asked to stop, as far as the reporter knows
        try:
            while not self._is_done():
                if self.stop.times != reported:
                    reported = self.stop.times
                    self.reporter.stopping(len(self._running))
                elif not self._busy and not self._stopping:
                    self.reporter.idle()
                self._watch.wait(self._pause())
        finally:
            self._ended.set()
            if renewer is not None:
                renewer.stop()
            self._give_back()  # messages are left only after a second request, or an exception
            for _ in range(self.concurrency):
                self._inbox.put(None)
        if self._error is not None:
            raise self._error
        self._report.stopped = self.stop.asked
        return self._report

    # -- the calling thread ----------------------------------------------------------------------------------

    @property
    def _stopping(self) -> bool:
        ends = self._error is not None or self._report.halted is not None
        return ends or self.stop.asked or self._ended.is_set()

    def _is_done(self) -> bool:
        """Take a message for each free thread; return whether there is nothing more to do."""
        idle = self._busy == 0  # read first: a message that comes back while we take others needs another round
        taken = 0
        while self._busy < self.concurrency and (next_one := self._next()) is not None:
            taken += 1
            self._count_busy(1)
            self._inbox.put(next_one)
        if taken:
            self._watch.begin()
        if self.stop.times > 1:
            return True
        return idle and not taken and (self._stopping or (self.until_empty and not any(map(self._waits, self.sources))))

    def _waits(self, subscription: Subscription) -> bool:
        """Return whether messages are kept back for this run; a barrier may wait for what only another run takes."""
        is_kept_back = subscription._is_kept_back and not subscription._waits_for_passed_over
        return is_kept_back or self.sendings.has_waiting(subscription)

    def _next(self) -> Taken | None:
        """Claim a message, unless the worker is stopping."""
        if self._stopping or self.sendings.rests_for:
            return None
        try:
            taken = self.sources.receive()
            if taken is None:
                return None
            message = taken.message
            self._running[id(message)] = taken
            # RACE: the calling thread may be giving messages back. Whichever thread removes the message gives it back.
            if self._ended.is_set() and self._running.pop(id(message), None) is not None:
                message.release(counted=False)
                return None
        except Exception as error:
            self._fail(error)
            return None
        return taken

    def _pause(self) -> float:
        has_free_thread = self._busy < self.concurrency and not self._stopping
        if not has_free_thread:
            return RESCAN  # a thread that gets free wakes us earlier
        attempts = (each._next_attempt for each in self.sources)
        return min(self.sendings.rests_for or min(attempts), self.sendings.pause, RESCAN)

    def _give_back(self) -> None:
        """Cancel the running handlers, if that is possible, and give their messages back."""
        until = time.monotonic() + CANCEL_LIMIT
        while self._busy and self._cancel is not None and time.monotonic() < until:
            for taken in list(self._running.values()):
                self._cancel_handler(taken.message)  # repeated, as a handler may have only just begun
            self._watch.wait(0.1)
        for key, taken in list(self._running.items()):
            if self._running.pop(key, None) is None:
                continue  # RACE: its thread has just finished it
            try:
                taken.message.release(counted=False)
            except LeaseLost:
                continue  # its thread has just settled it, or another consumer has it
            self._given_back(taken)

    def _given_back(self, taken: Taken) -> None:
        """Report a message that was given back, because its handler did not end in time."""
        self._report_end(taken, "returned")

    # -- the worker threads ------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        while (first := self._inbox.get()) is not None:
            taken: Taken | None = first
            while taken is not None:
                message = taken.message
                try:
                    if id(message) in self._running:
                        with (
                            taken.subscription._offers.once(message) if self.until_empty else nullcontext() as came_back
                        ):
                            self._handle_and_settle(taken, came_back)
                except BaseException as error:
                    self._fail(error)
                self._running.pop(id(message), None)
                taken = self._next()
            self._count_busy(-1)
            self._watch.wake()

    def _handle_and_settle(self, taken: Taken, came_back: CameBack | None) -> None:
        message = taken.message
        with self.sendings.of(taken) as sending:
            outcome, why = self._settled(taken, sending)
        if outcome == "acked" and message.state == "error":
            outcome, why = "failed", BODY_CHANGED
        if outcome in ("retried", "returned") and message.state not in WAITING:
            outcome = "failed"  # it was given back too often, so the queue moved it to error/ or expired/
        if self.until_empty and outcome != "lost" and message.state in WAITING:
            self._report_left(message.id, due_ms(message))
        if id(message) in self._running:
            for record in _records_by_handler(message) if outcome != "lost" else ():
                self._count(record)
            self._report_end(taken, outcome, why if outcome in ("failed", "retried", "rejected") else "")

    def _settled(self, taken: Taken, sending: Sending) -> tuple[Outcome, str]:
        """Call the handler with a message, and settle that; return the outcome, and why."""
        message = taken.message
        settled_first = not message.held  # at most once: the message was archived before it was delivered
        outcome, settle, why = self._handle(message, message, sending)
        if outcome != "acked":
            sending.withdraw()
        try:
            if settled_first:
                outcome = outcome if outcome == "acked" else "failed"
                message.ack()
            elif message.held:
                try:
                    settle()
                except (StorageError, Unavailable, ValueError) as error:
                    if outcome != "acked" or not sending.is_used or not message.held:
                        raise
                    outcome, settle, why = self._not_sent(error, message, sending)
                    sending.withdraw()
                    settle()
            else:
                outcome = "lost" if message.state == "processing" else SETTLED.get(message.state, "failed")
                if sending.is_used and outcome != "lost":
                    log.warning("what was made of message %s was not sent, as its handler settled it", message.id)
        except LeaseLost:
            outcome = "lost"
        if sending.is_refused:
            self.sendings.rest(taken.subscription)
        elif sending.is_used and outcome == "acked":
            self.sendings.went_well()
        return outcome, why

    def _handle(
        self, item: Message | Record, message: Message, sending: Sending | None = None
    ) -> tuple[Outcome, Callable[[], None], str]:
        """Call the handler with a message, or a record of it; return the outcome, what settles that, and the reason.

        What it makes of a message is staged by `sending`; nothing can be sent with a record.
        """
        give_back = partial(message.release, counted=False)
        try:
            if sending is not None and isinstance(self.handler, SendingHandler):
                self.handler.stage(message, sending)
            else:
                made = self.handler(item)
                if sending is not None:
                    sending.take(made)
                elif is_made(made):
                    raise TypeError(
                        "a handler of records returned what is to be sent: that takes a handler of messages"
                    )
        except NotSent as error:
            assert sending is not None
            return self._not_sent(error.cause, message, sending)
        except Retry as error:
            return "retried", partial(item._nack, error.delay, error.details), str(error)
        except Reject as error:
            return "rejected", partial(item.reject, str(error), **error.details), str(error)
        except Cancelled:
            return "returned", give_back, ""
        except Halt as error:
            self._report.halted = str(error)
            return "returned", give_back, ""
        except Exception as error:
            if self._is_stopped_by_signal(error):
                return "returned", give_back, ""
            if isinstance(error, Fail):
                return "failed", partial(item.fail, str(error), **error.details), str(error)
            reason = told(error)
            return "failed", partial(item.fail, reason, traceback=_traceback(error)), reason
        except BaseException as error:
            self._fail(error)  # the program ends, maybe because of this message: so the delivery counts
            return "returned", message.release, ""
        if sending is not None and sending.is_used:
            return "acked", sending.ack, "by its handler"
        return "acked", item.ack, "by its handler"

    def _not_sent(
        self, error: Exception, message: Message, sending: Sending
    ) -> tuple[Outcome, Callable[[], None], str]:
        """Return what becomes of a message if what was made of it could not be sent.

        What the handler got wrong fails the message. What another time may be right gives it back, uncounted.
        """
        why = why_not_sent(error)
        if isinstance(error, TooManyOutputs):
            return "failed", partial(message._set_aside, "error", "too_many_outputs", {"detail": why}), why
        if isinstance(error, QueueFull | StorageError | Unavailable | MustWait):
            sending.is_refused = not isinstance(error, MustWait)  # which a stop ended
            log.warning("message %s goes back, as what was made of it was not sent: %s", message.id, why)
        elif not isinstance(error, LeaseLost):
            return "failed", partial(message.fail, why), why
        return "returned", partial(message.release, counted=False), ""

    def _is_stopped_by_signal(self, error: Exception) -> bool:
        """Return whether a handler failed because its program was ended by the signal that stops this worker."""
        status = getattr(error, "returncode", None)
        if status is None and isinstance(error, Fail):
            status = error.details.get("exit_status")
        if not isinstance(status, int) or status not in _STOPPED_STATUSES:
            return False
        if status > 0 and self._exits_as_if_stopped:
            return self.stop.asked
        # RACE: a signal to the whole process group may reach the command first, so wait for our own.
        until = time.monotonic() + SIGNAL_SPREAD
        while not self.stop.asked and time.monotonic() < until and not self._ended.wait(SIGNAL_CHECK):
            pass
        self._exits_as_if_stopped = self._exits_as_if_stopped or (status > 0 and not self.stop.asked)
        return self.stop.asked

    def _report_end(self, taken: Taken, outcome: Outcome, why: str = "") -> None:
        """Report what became of a message."""
        self._tell(Handled(taken.message, outcome, why, time.monotonic() - taken.since))

    def _tell(self, handled: Handled) -> None:
        """Count what became of a message, or of records of it, and report it."""
        self._count(handled.outcome, handled.records or 1)
        try:
            self.reporter.handled(handled)
        except Exception as error:  # such as a full disk: the messages are settled as if nobody listened
            self._fail(error)

    def _report_left(self, id: str, due: int) -> None:
        with self._lock:
            self._report.left.append(Left(id, utc(due) if due else None))

    def _count_busy(self, change: int) -> None:
        with self._lock:
            self._busy += change

    def _count(self, outcome: str, number: int = 1) -> None:
        with self._lock:
            setattr(self._report, outcome, getattr(self._report, outcome) + number)

    def _fail(self, error: BaseException) -> None:
        """End the worker with an error, once the running handlers have finished."""
        log.error("the worker ends: %s: %s", type(error).__name__, error)
        self._error = self._error or error

    # -- the thread of the lease renewer ---------------------------------------------------------------------

    def _renew_running(self) -> None:
        for message, subscription, _ in list(self._running.values()):
            if not message._lock.acquire(blocking=False):
                continue  # its thread settles it, and renews its lease if that takes long: the others do not wait
            try:
                if message.held and subscription.lease:
                    message.extend(subscription.lease)
            except LeaseLost as error:
                log.debug("%s", error)  # or its thread has just settled it
            except Exception as error:  # the next round tries again, and the other messages must be renewed, too
                log.warning("message %s: its lease was not renewed: %s", message.id, error)
            finally:
                message._lock.release()
            if not message.held and message.state == "processing":
                self._cancel_handler(message)  # lost; the next round repeats this, as a handler may have just begun

    def _cancel_handler(self, message: Message) -> None:
        if self._cancel is None:
            return
        try:
            self._cancel(message)
        except Exception:
            log.exception("message %s: its handler could not be cancelled", message.id)


def record_outcome(verb: str, state: str) -> Outcome:
    """Return the outcome of a record that was not acknowledged, by its holder's verb and its state now."""
    outcome = RECORD_OUTCOMES[verb]
    return "failed" if outcome == "retried" and state not in WAITING else outcome  # it was given back too often


def records_of(message: Message, parts: Iterable[OwnPart]) -> Iterator[tuple[Name, str]]:
    """Yield the records of a message among the parts that it became: the name of each, and its state."""
    for part in parts:
        name = message.context.sidecars.parse(part.own_name)
        if name.record and name.id != message.id:
            yield name, part.state


def _records_by_handler(message: Message) -> list[Outcome]:
    """Return how the records count that a handler of messages did not acknowledge."""
    settlement = message._records
    if settlement is None:
        return []
    states = {name.record: state for name, state in records_of(message, settlement.parts)}
    others = settlement.cursor.others.items()
    return [record_outcome(settled.fate.verb, states.get(number, message.state)) for number, settled in others]


def _traceback(error: BaseException) -> str:
    """Return the traceback of an error, from the handler on."""
    trace = error.__traceback__
    return "".join(format_exception(type(error), error, trace.tb_next if trace is not None else None))
