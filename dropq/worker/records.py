"""Workers that settle a message by its records: the handler gets each record, or the bundle as a whole.

Nothing of a record is on disk before its message is settled. So a record counts, and is reported, only then.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dropq.durations import parse_duration
from dropq.errors import LeaseLost, NoSuchMessage, StorageError
from dropq.format.layout import WAITING, WITH_REASON
from dropq.format.names import Name
from dropq.queue.message import Bundle, Message
from dropq.records.formats import ReadFailed
from dropq.worker.loop import SETTLED, Worker, record_outcome, records_of
from dropq.worker.reporter import Handled, Outcome, Part, due_ms
from dropq.worker.sources import Taken

if TYPE_CHECKING:
    from dropq.queue.offers import CameBack

#: The reasons for which the rest of a bundle goes to error/ as one message.
_OF_THE_REST = ("too_many_records", "unreadable", "body_changed")
#: The reason of a record that the handler settled itself.
_BY_HANDLER = "by its handler"

#: For how many bundles, at most, a worker remembers how many of their records failed.
REMEMBERED = 1000


@dataclass
class Run:
    """The work at one message.

    Attributes:
        taken: the message, and where it came from.
        bundle: its records; None until they are opened, or if they do not count.
        notes: why records were not acknowledged, and how long the handler had each, by number.
        was_held: whether it is settled after its delivery; False at most once.
        by_handler: whether the handler settled the message itself.
    """

    taken: Taken
    bundle: Bundle | None = None
    notes: dict[int, tuple[str, float]] = field(default_factory=dict)
    was_held: bool = True
    by_handler: bool = False

    @property
    def names(self) -> Iterator[tuple[Name, str]]:
        """The records that became messages: the name of each, and its state."""
        return records_of(self.taken.message, self.bundle.parts if self.bundle is not None else ())

    def results(self) -> Iterator[Handled]:
        """Yield what became of the records, now that the message is settled."""
        message, bundle = self.taken.message, self.bundle
        if bundle is None:
            return
        cursor, seconds = bundle.cursor, time.monotonic() - self.taken.since
        is_acked = message.state in ("processed", "removed")
        acked = cursor.acked + (len(cursor.unsettled) if self.by_handler and is_acked else 0)
        if not self.was_held:
            acked -= len(self.notes)
            for why, took in self.notes.values():
                yield Handled(message, "failed", why, took)
        if acked or (is_acked and cursor.is_fresh and cursor.unreadable is None):
            yield Handled(message, "acked", "", seconds, records=acked)
        parts = {name.record: Part(name.id, state, name.not_before) for name, state in self.names}
        for number, settled in sorted(cursor.others.items()):
            part = parts.get(number)
            outcome = record_outcome(settled.fate.verb, message.state if part is None else part.state)
            why, took = self.notes.get(number, (settled.fate.reason or _BY_HANDLER, seconds))
            yield Handled(message, outcome, why, took, part=part)


class RecordWorker(Worker):
    """A worker that calls its handler with each record of a message."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._runs: dict[int, Run] = {}
        self._failures: dict[Hashable, int] = {}  # of the last bundles that a checkpoint left in part

    def _handle_and_settle(self, taken: Taken, came_back: CameBack | None) -> None:
        message = taken.message
        run = self._runs[id(message)] = Run(taken, was_held=message.held)
        try:
            outcome, why = self._work_at(run)
            if not run.was_held:
                message.ack()
        except (LeaseLost, NoSuchMessage):
            outcome, why = "lost", ""
        finally:
            del self._runs[id(message)]
        if outcome in ("returned", "retried") and message.state not in WAITING:
            outcome = "failed"  # it was given back too often, or it cannot be given back
        if outcome == "lost":
            run.bundle = None
        bundle = run.bundle
        is_left = outcome is None and not run.by_handler and message.state in WAITING
        if is_left and bundle is not None and bundle.parts:  # by a checkpoint, or by a cut
            self._remember(bundle)
        else:
            is_left = False
        if came_back is not None:
            came_back.is_to_be_taken = is_left
            self._leave(run, came_back, outcome)
        if id(message) in self._running:
            self._report_records(run)
            if outcome is not None:
                self._report_end(taken, outcome, why)

    def _leave(self, run: Run, came_back: CameBack, outcome: Outcome | None) -> None:
        """Leave the messages that came back to other consumers, and report them."""
        message = run.taken.message
        for name, state in run.names:
            if state in WAITING:
                came_back.records.append(name)
                self._report_left(name.id, name.not_before)
        if outcome != "lost" and message.state in WAITING and not came_back.is_to_be_taken:
            self._report_left(message.id, due_ms(message))

    def _report_records(self, run: Run) -> None:
        for handled in run.results():
            self._tell(handled)

    def _given_back(self, taken: Taken) -> None:
        run = self._runs.get(id(taken.message))
        if run is not None:
            self._report_records(run)
        super()._given_back(taken)

    # -- one message ---------------------------------------------------------------------------------------------

    def _work_at(self, run: Run) -> tuple[Outcome | None, str]:
        """Handle the records of a message and settle it; return how it counts itself, None for its records alone."""
        message = run.taken.message
        try:
            run.bundle = self._open(run.taken)
        except ValueError as error:  # a table
            return self._refuse(message, "rejected", str(error))
        except StorageError as error:
            return self._refuse(message, "failed", str(error))
        try:
            outcome, why = self._handle_records(run, run.bundle)
        except LeaseLost:
            if run.was_held:
                raise
            outcome, why = None, ""  # at most once, the rest that cannot be read cannot be rejected
        except ReadFailed as error:
            return self._refuse(message, "failed", error.problem)
        return self._end_of(run, run.bundle) if outcome is None else (outcome, why)

    def _open(self, taken: Taken) -> Bundle:
        message, config = taken.message, taken.message.context.config
        return Bundle(
            message,
            None,
            lease=taken.subscription.lease,
            checkpoint=parse_duration(config.checkpoint),
            failures=self._failures.pop(_key(message, message._identity), 0),
        )

    def _remember(self, bundle: Bundle) -> None:
        """Remember how many records of a bundle have failed, for when this worker takes what is left of it."""
        with self._lock:
            self._failures[_key(bundle.message, bundle.identity)] = bundle.failures
            if len(self._failures) > REMEMBERED:  # others took those that were left first
                del self._failures[next(iter(self._failures))]

    def _refuse(self, message: Message, outcome: Outcome, reason: str) -> tuple[Outcome, str]:
        """Fail or reject what is left of a message."""
        if message.held:
            (message.reject if outcome == "rejected" else message.fail)(reason)
        return outcome, reason

    def _handle_records(self, run: Run, bundle: Bundle) -> tuple[Outcome | None, str]:
        """Call the handler with each record; return what becomes of the message, None if its records say that."""
        message = run.taken.message
        for record in bundle:
            if self._ended.is_set() or (run.was_held and self._stopping):
                if message.held:
                    message.release(counted=False)
                return "returned", ""
            began = time.monotonic()
            outcome, settle, why = self._handle(record, message)
            if outcome == "returned":
                if message.held:
                    settle()
                return "returned", ""
            if run.was_held and not message.held:
                run.by_handler = True
                break
            if outcome != "acked":
                run.notes[record.number] = why, time.monotonic() - began
                if bundle.settles_whole and run.was_held:  # others share it: it fails as a whole
                    run.bundle = None
                    settle()
                    return "failed", why
                if not run.was_held:  # nothing can be given back
                    settle = record.ack
            if record.number in bundle.cursor.unsettled:
                settle()
        return None, ""

    def _end_of(self, run: Run, bundle: Bundle) -> tuple[Outcome | None, str]:
        """Return how a settled message counts, besides its records; None if it does not."""
        message = run.taken.message
        if message.state == "processing":
            return "lost", ""
        if run.by_handler:
            if bundle.settles_whole:
                run.bundle = None  # its records were not settled one by one
            outcome = SETTLED.get(message.state, "failed")
            return (None, "") if outcome == "acked" else (outcome, _BY_HANDLER)
        if not run.was_held:
            unreadable = bundle.cursor.unreadable
            return (None, "") if unreadable is None else ("failed", str(unreadable))
        if bundle.kept_whole:
            return "failed", bundle.kept_whole
        reason = (message.reason or {}) if message.state in WITH_REASON else {}
        if reason.get("reason") not in _OF_THE_REST:
            return None, ""
        if reason["reason"] == "body_changed":
            run.bundle = None  # nothing of it was settled
        return "failed", f"{reason['reason']}: {reason.get('detail')}"


class BundleWorker(RecordWorker):
    """A worker that calls its handler with the bundle of each message; the handler settles all records, or raises."""

    def __post_init__(self) -> None:
        super().__post_init__()
        settle = self.handler
        self.handler = lambda message: settle(self._runs[id(message)].bundle)

    def _handle_records(self, run: Run, bundle: Bundle) -> tuple[Outcome | None, str]:
        message, cursor = run.taken.message, bundle.cursor
        if bundle._cut():
            return None, ""
        if cursor.next is None or cursor.unreadable is not None:  # it has no records
            bundle._commit()
            return None, ""
        outcome, settle, why = self._handle(message, message)
        if outcome == "acked":
            bundle._commit()
            return None, ""
        run.bundle = None  # no record counts
        if message.held:
            settle()
        return outcome if run.was_held else "failed", why


def _key(message: Message, identity: tuple[str, int]) -> Hashable:
    """Return a key of a message that no other has in any queue of a worker, even under the same id."""
    return message.context.layout.home, identity
