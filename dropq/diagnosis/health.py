"""Whether a queue is well: what waits too long, what failed, what nobody sweeps, what keeps it from working.

It looks and changes nothing: names alone tell nearly all of it, no body is opened, and nothing waits for it or is kept
waiting by it. Whoever watches queues runs it every few minutes, beside consumers at their work.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from dropq.diagnosis import fsck
from dropq.durations import format_duration, parse_duration
from dropq.errors import ConfigError, DropqError, NoSuchQueue, StorageError
from dropq.format import names
from dropq.format.claims import Claim
from dropq.format.layout import SETTLED, UNSETTLED, ignoring
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.queue.message import Duration
from dropq.queue.open_queue import open_queue, refuse_closed
from dropq.staging import jobs
from dropq.storage import liveness, reading
from dropq.storage.failures import describe

__all__ = ["MAX_ERROR", "UNSWEPT", "Health", "Reason", "health", "health_root", "queues"]

#: How many messages may lie in error/ where nobody says: a few bad ones can wait for the morning, while a consumer that
#: fails whatever it gets is soon past it.
MAX_ERROR = 10
#: Milliseconds for which a dead consumer's message, a lapsed lease or a committed job may wait for a sweep.
UNSWEPT = 60_000
#: What each `overflow` does to a send.
_OVERFLOW = {"reject": "sends are refused", "discard": "what is sent is discarded", "block": "senders wait"}

#: Folders of a root that may be closed to whoever looks, and are no queues.
_NO_QUEUES = ("dropboxmq", "topic-root", "lost+found")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a queue is not well, or what is to be known of it: its kind, a sentence with what to do, figure and limit.

    Ages are in seconds; what cannot be measured has neither figure nor limit.
    """

    kind: str
    message: str
    figure: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Health:
    """How a queue is: why it is not well, what else is to be known, its counts, and its oldest waiting message.

    Attributes:
        queue: its name.
        reasons: why it is not well; none where it is.
        notes: what does no harm, but explains much: that it is paused, that senders wait, that it is full.
        counts: how many messages lie in each state; empty for a queue that cannot be read.
        oldest_age: seconds that the oldest message has waited, one that is held without a running lease included; None
            where there is none.
        error: what kept it from being read.
    """

    queue: str
    reasons: tuple[Reason, ...] = ()
    notes: tuple[Reason, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    oldest_age: float | None = None
    error: DropqError | OSError | None = None

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.reasons


def health(
    root: RootContext,
    name: str,
    *,
    max_age: Duration | None = None,
    max_count: int | None = None,
    max_error: int | None = MAX_ERROR,
) -> Health:
    """Tell how a queue is, and change nothing; None sets no limit.

    Args:
        root: the root.
        name: the queue's name.
        max_age: how long a message may wait, from when it was sent or requeued; in delayed/, from when it was due. What
            is held without a running lease waits, too: nothing tells that its holder works on it.
        max_count: how many messages may wait in target/.
        max_error: how many messages may lie in error/.

    Returns:
        What is wrong with it; that it cannot be read, or has a configuration that cannot be used, is told so, too.

    Raises:
        NoSuchQueue: there is no such queue.
    """
    age = None if max_age is None else parse_duration(max_age)
    try:
        look = _Look(open_queue(root, name))
        return Health(
            name,
            tuple(look.reasons(age, max_count, max_error)),
            tuple(look.notes()),
            look.counts,
            look.oldest_age,
        )
    except NoSuchQueue:
        raise
    except (DropqError, OSError) as error:
        return _unusable(root, name, error)


def health_root(
    root: RootContext,
    *,
    max_age: Duration | None = None,
    max_count: int | None = None,
    max_error: int | None = MAX_ERROR,
) -> Iterator[Health]:
    """Tell how each queue of a root is, by name; also those too damaged to be opened, or closed to this user.

    Args:
        root: the root.
        max_age, max_count, max_error: as for `health`.

    Raises:
        OSError: the root cannot be listed.
    """
    for name in queues(root):
        try:
            yield health(root, name, max_age=max_age, max_count=max_count, max_error=max_error)
        except NoSuchQueue as error:
            if reading.exists(f"{root.layout.path}/{name}"):  # RACE: else it was deleted since the listing
                yield _unusable(root, name, error)


# -- what there is -----------------------------------------------------------------------------------------------


def queues(root: RootContext) -> list[str]:
    """Return the names of what is, or may be, a queue, in order: also of those too damaged, or closed to this user."""
    found = set(fsck.queues(root))
    for entry in reading.entries(root.layout.path):
        if entry.name not in found and entry.name not in _NO_QUEUES and names.can_name_queue(entry.name):
            try:
                refuse_closed(root.layout.path, entry.name)
            except StorageError:
                found.add(entry.name)
    return sorted(found)


def _unusable(root: RootContext, name: str, error: DropqError | OSError) -> Health:
    """Tell of a queue that cannot be looked at: what the error says, and what to do about it."""
    text, quoted = "; ".join(str(error).splitlines()), shlex.quote(name)
    kind, way_out = "storage", "" if "`dropq " in text else f"`dropq fsck {quoted}` looks closer"
    if isinstance(error, ConfigError):
        kind, way_out = "configuration", "mend it, then run `dropq config check`"
    elif isinstance(error, NoSuchQueue):
        text, way_out = "target/ and processing/ are missing", f"`dropq fsck {quoted} --repair` makes them"
    elif isinstance(error, OSError):
        text = describe(error)
    if isinstance(error, StorageError | OSError) and error.errno == errno.EACCES:
        way_out = f"`ls -ld {shlex.quote(_closed(f'{root.layout.path}/{name}', error))}` shows who may look"
    why = "; ".join(filter(None, (text, way_out)))
    return Health(name, (Reason(kind, f"it cannot be looked at: {why}"),), error=error)


def _closed(home: str, error: StorageError | OSError) -> str:
    """Return the folder that keeps this user from looking."""
    path = error.path if isinstance(error, StorageError) else os.fsdecode(error.filename or home)
    while path.startswith(f"{home}/"):
        try:
            os.stat(path)
            return path
        except OSError:
            path = os.path.dirname(path)
    return home


# -- one look ------------------------------------------------------------------------------------------------------


class _Look:
    """What one listing of each folder tells of a queue."""

    def __init__(self, context: QueueContext) -> None:
        self._context = context
        self._ignored = ignoring(context.config.ignore)
        self._name = shlex.quote(context.name)
        self._now = context.clock.now_ms()
        # RACE: messages move on while this looks, so that one may be seen twice, or not at all.
        self._waiting, self._delayed, self._held = map(self._files, UNSETTLED)
        self.counts = {
            "target": len(self._waiting),
            "delayed": len(self._delayed),
            "processing": len(self._held),
            **{state: sum(1 for _ in self._messages(state)) for state in (*SETTLED, "working")},
        }

    def _messages(self, state: str) -> Iterator[str]:
        ignored, is_message_file = self._ignored, reading.is_message_file
        for entry in reading.entries(self._context.layout.folder(state)):
            if not ignored(entry.name) and is_message_file(entry):
                yield entry.name

    def _files(self, state: str) -> list[str]:
        return list(self._messages(state))

    @property
    def oldest_age(self) -> float | None:
        """Seconds that the oldest message has waited, held or not; None where there is none."""
        return max((age for age in (self._waiting_age, self._held_age) if age is not None), default=None)

    @cached_property
    def _waiting_age(self) -> float | None:
        """Seconds that the oldest message has waited to be taken, in delayed/ those after it was due."""
        due = (due for due in map(self._due, self._delayed) if due < self._now)
        return self._age([*map(self._since, self._waiting), *due])

    @cached_property
    def _held_age(self) -> float | None:
        """Seconds since the oldest was sent, or requeued, of those that are held without a running lease."""
        return self._age([self._since(file, "processing") for file in self._held if not self._is_leased(file)])

    def _is_leased(self, file: str) -> bool:
        claim = MessageFile(file).claim
        return claim is not None and claim.deadline > self._now

    def _age(self, since: list[int]) -> float | None:
        return max(self._now - min(since), 0) / 1000 if since else None

    def _since(self, file: str, state: str = "target") -> int:
        """Return since when a file counts as waiting, as the protocol has it, in ms."""
        known = names.since_at_a_glance(file)
        if known is not None:
            return known
        name = MessageFile(file).name
        return name.since or name.timestamp or self._changed(f"{self._context.layout.folder(state)}/{file}")

    def _due(self, file: str) -> int:
        """Return when a file of delayed/ was, or will be, due, in ms; one that does not say is due at once."""
        return self._context.sidecars.parse(file).not_before or self._since(file, "delayed")

    def _changed(self, path: str) -> int:
        try:
            return reading.changed_ms(path)
        except FileNotFoundError:
            return self._now  # RACE: it moved on since the listing

    # -- the verdict -------------------------------------------------------------------------------------------

    def reasons(self, max_age: float | None, max_count: int | None, max_error: int | None) -> Iterator[Reason]:
        """Yield why the queue is not well."""
        waiting, failed = self.counts["target"], self.counts["error"]
        age = self.oldest_age
        if age is not None and max_age is not None and age > max_age:
            text, way_out = f"a message has waited for {_told(age)}", self._way_on()
            if age != self._waiting_age:
                text, way_out = f"a message from {_told(age)} ago is held without a lease", self._holders()
            text = f"{text}, over the limit of {format_duration(max_age)}"
            yield Reason("old-message", f"{text}; {way_out}", age, max_age)
        if max_count is not None and waiting > max_count:
            text = f"target/ has {_many(waiting, 'message')}, over the limit of {max_count}"
            yield Reason("many-waiting", f"{text}; {self._way_on()}", waiting, max_count)
        if max_error is not None and failed > max_error:
            text = f"error/ has {_many(failed, 'message')}, over the limit of {max_error}"
            way_out = f"`dropq browse {self._name} --state error` says why"
            yield Reason("many-errors", f"{text}; {way_out}", failed, max_error)
        yield from self._unswept()

    def notes(self) -> Iterator[Reason]:
        """Yield what does no harm, but explains much."""
        if self._pause:
            yield Reason("paused", f"consumers see an empty queue; {self._pause}")
        if reading.is_there(lock := self._context.layout.write_lock, self._context.clock):
            yield Reason("write-lock", f"senders wait, as {lock} says; remove it to let them go on")
        count, most = sum(self.counts[state] for state in UNSETTLED), self._context.config.max_unprocessed
        if most is not None and count >= most:
            text = f"{_many(count, 'message')} waiting, delayed or held, and max_unprocessed is {most}"
            fate = _OVERFLOW[self._context.config.overflow]
            yield Reason("full", f"{text}: {fate}; {self._way_on()}", count, most)

    @cached_property
    def _pause(self) -> str:
        """What ends the pause, where there is one."""
        if reading.is_there(self._context.root.layout.read_lock, self._context.clock):
            return "the whole root is paused: `dropq resume --all` ends that"
        if reading.is_there(self._context.layout.read_lock, self._context.clock):
            return f"it is paused: `dropq resume {self._name}` ends that"
        return ""

    def _way_on(self) -> str:
        """Say what to do where too much waits."""
        if self._pause:
            return self._pause
        if not self._held:
            return f"nothing is in work: start a consumer, then see `dropq ls {self._name}`"
        return f"{len(self._held)} in work: {self._holders()}"

    def _holders(self) -> str:
        return f"`dropq browse {self._name} --explain --state processing` says by whom"

    def _unswept(self) -> Iterator[Reason]:
        """Yield what a sweep would have brought in order, had there been one."""
        dead, lapsed = self._lost_claims()
        for kind, ages, one, whose in (
            ("dead-holder", dead, "message", "held by dead consumers, one for"),
            ("lapsed-lease", lapsed, "message", "held by leases that ran out, one for"),
            ("unfinished-job", self._idle_jobs(), "committed job", "not sent to the end, one idle for"),
        ):
            late = [age for age in ages if age > UNSWEPT]
            if late:
                figure = max(late) / 1000
                text = f"{_many(len(late), one)} {whose} {_told(figure)}, over the limit of {_told(UNSWEPT / 1000)}"
                yield Reason(kind, f"{text}; `dropq sweep {self._name}` sees to it", figure, UNSWEPT / 1000)

    def _lost_claims(self) -> tuple[list[int], list[int]]:
        """Return for how long, in ms, dead consumers have held messages, and leases that ran out have been over.

        When a consumer died is written nowhere: its messages count from when they were claimed, or last renewed.
        """
        claims: dict[str, list[Claim]] = defaultdict(list)
        for file in self._held:
            claim = MessageFile(file, folder=self._context.layout.processing).claim
            if claim is not None and claim.ours:
                claims[claim.subscription].append(claim)
        # RACE: asked for after the claims were listed, so that a holder that is not known has no claim by now. As fsck
        # does, this tries the holder's lock and lets go at once: a sweep that meets it there comes again in a second.
        folder = self._context.layout.consumers
        gone = {one for one in liveness.known(folder) & claims.keys() if liveness.is_dead(folder, one)}
        dead = [self._now - self._changed(claim.path) for one in gone for claim in claims.pop(one)]
        late = self._now - UNSWEPT
        others = (claim for mine in claims.values() for claim in mine if 0 < claim.deadline < late)
        # RACE: what was renewed or settled since the listing is not there any more, under this name.
        return dead, [self._now - claim.deadline for claim in others if reading.exists(claim.path)]

    def _idle_jobs(self) -> Iterator[int]:
        """Yield for how long, in ms, committed jobs have been idle."""
        for folder in jobs.job_folders(self._context.layout.working):
            with suppress(FileNotFoundError):  # not committed; or RACE: somebody finishes it
                if os.lstat(f"{folder}/{jobs.MANIFEST}").st_size:
                    yield jobs.idle_ms(folder, self._now, files=False)


def _told(seconds: float) -> str:
    return format_duration(int(seconds))


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
