"""The public verbs: a root, the directory that holds queues, and a queue, with what its users do to messages in it.

They know all rooms below, and have no rules of their own: each verb opens what it needs, and asks the room that has the
rule. A queue object may be used by several threads, by a signal handler at any moment of its own thread, and after a
fork: so it has no lock, which one of these could wait for in vain. It opens its folders and its configuration at its
first use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from dropq.config.schema import QueueConfig
from dropq.durations import parse_duration
from dropq.errors import ConfigError, DropqError
from dropq.format import names
from dropq.format.layout import QueueLayout
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.transitions import Transitions
from dropq.queue import browsing
from dropq.queue.browsing import SEARCHED, StateStats
from dropq.queue.message import Duration, Message
from dropq.queue.open_queue import find_layout, open_queue, open_root, queue_names
from dropq.queue.sender import Producer
from dropq.storage.clock import Clock
from dropq.storage.failures import error_context
from dropq.storage.files import Storage

# What sends and counts is imported here; the rest by the verbs that need it, so that a shell's `send` does not wait.
if TYPE_CHECKING:
    from dropq.diagnosis.doctor_kinds import Diagnosis
    from dropq.diagnosis.explain import Explanation
    from dropq.diagnosis.fsck import Finding
    from dropq.diagnosis.health import Health
    from dropq.queue.subscription import Subscription
    from dropq.upkeep.bulk import Outcome
    from dropq.upkeep.sweep import SweepReport

log = logging.getLogger("dropq")

#: What is told where a pause of the whole root, or its end, met an error.
PAUSING = "whether the queues are paused, `dropq ls` tells"

P = ParamSpec("P")
T = TypeVar("T")


def _telling(fate: str) -> Callable[[Callable[Concatenate[Queue, P], T]], Callable[Concatenate[Queue, P], T]]:
    """Let a verb of a queue raise our own errors alone; what the file system refuses is told with this fate."""

    def wrap(verb: Callable[Concatenate[Queue, P], T]) -> Callable[Concatenate[Queue, P], T]:
        @wraps(verb)
        def told(queue: Queue, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with queue.context.error_context(fate):
                return verb(queue, *args, **kwargs)

        return told

    return wrap


class Root:
    """A directory that holds queues.

    Args:
        path: the directory.
        clock: what tells the time; None asks the file server's clock.

    Raises:
        NoSuchQueue: there is no such directory.
        StorageError: it cannot be opened.
        ConfigError: its dropq.toml cannot be used, or was written by a newer dropq.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock | None = None) -> None:
        #: What dropq's own modules need to know of it.
        self.context = open_root(os.path.abspath(os.fspath(path)), clock)
        self.layout = self.context.layout
        self.config = self.context.config
        self.clock = self.context.clock
        self.ids = self.context.ids

    def __repr__(self) -> str:
        return f"<Root {self.layout.path}>"

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, dropboxmq: bool = False, clock: Clock | None = None) -> Root:
        """Make a directory a root; what is there already stays as it is.

        Args:
            path: the directory, made where it is missing.
            dropboxmq: also make what a running DropboxMQ 1.2 needs to share the root.
            clock: as for the constructor.

        Raises:
            StorageError: it cannot be made.
            ConfigError: it is a root already, and one that DropboxMQ cannot share.
        """
        from dropq.upkeep import queues

        queues.create_root(os.path.abspath(os.fspath(path)), dropboxmq=dropboxmq)
        root = cls(path, clock=clock)
        if dropboxmq and root.config.reply_to_style != "typed":
            raise ConfigError(f'{root.layout.config_file}: reply_to_style: DropboxMQ needs reply_to_style = "typed"')
        return root

    @property
    def path(self) -> Path:
        """The directory."""
        return Path(self.layout.path)

    def queue(self, name: str) -> Queue:
        """Return a queue by its name, whether it is there or not: its first use tells."""
        return Queue(self, name)

    def queues(self) -> list[Queue]:
        """Return the queues that are there, by name."""
        return [Queue(self, name) for name in queue_names(self.context)]

    def create_queue(self, name: str, *, dropboxmq: bool = False, **options: Any) -> Queue:
        """Make a queue; it appears whole, by one rename.

        Args:
            name: the queue's name.
            dropboxmq: lay it out as DropboxMQ 1.2 does, with its folders in `incoming/`.
            options: keys of queue.toml, which are written there.

        Raises:
            QueueExists: there is something of that name already.
            InvalidName, ConfigError: the name, or an option, cannot be used; nothing was made.
        """
        from dropq.upkeep import queues

        queue = Queue(self, name)
        queues.create(self.context, name, options, dropboxmq=dropboxmq)
        return queue

    def delete_queue(self, name: str, *, force: bool = False) -> None:
        """Remove a queue with its history; one that has messages to work on is refused.

        The queue is renamed away first, so a send that is half-way fails rather than vanish.

        Args:
            name: the queue's name.
            force: remove it with all that waits and is worked on.

        Raises:
            NoSuchQueue: there is no such queue.
            StorageError: messages wait in it, or it cannot be removed; it stays as it was.
        """
        from dropq.upkeep import queues

        names.check_queue_name(name)
        queues.delete(self.context, name, force=force)

    def sweep(
        self,
        *,
        foreign_older_than: Duration | None = None,
        unleased_older_than: Duration | None = None,
        jobs_older_than: Duration | None = None,
    ) -> SweepReport:
        """Sweep every queue, then collect the metadata files that no name refers to any more.

        Args:
            foreign_older_than, unleased_older_than, jobs_older_than: as for `Queue.sweep`.

        Raises:
            ConfigError, StorageError: of the first queue that cannot be swept, once all others are.
        """
        from dropq.upkeep.sweep import SweepReport

        report = SweepReport()
        errors: list[DropqError] = []
        for queue in self.queues():
            try:
                report.add(
                    queue.sweep(
                        foreign_older_than=foreign_older_than,
                        unleased_older_than=unleased_older_than,
                        jobs_older_than=jobs_older_than,
                    )
                )
            except DropqError as error:  # the other queues are swept all the same
                log.error("queue %s was not swept: %s", queue.name, error)
                errors.append(error)
        if errors:
            raise errors[0]
        report.add(self.tidy())
        return report

    def tidy(self) -> SweepReport:
        """Do what a sweep does beside the queues: undo deletes that were cut short, collect metadata files.

        Raises:
            StorageError: the file system refuses; the next sweep goes on.
        """
        from dropq.upkeep import queues

        return queues.tidy(self.context)

    def health(
        self, *, max_age: Duration | None = None, max_count: int | None = None, max_error: int | None = 10
    ) -> list[Health]:
        """Report of each queue, by name, whether it is well, and why not; also of those that cannot be opened.

        Args:
            max_age, max_count, max_error: as for `Queue.health`.

        Raises:
            StorageError: the root cannot be listed.
        """
        from dropq.diagnosis.health import health_root

        with error_context("nothing was changed"):
            return list(health_root(self.context, max_age=max_age, max_count=max_count, max_error=max_error))

    def doctor(self, queues: Iterable[str] | None = None) -> list[Diagnosis]:
        """Report whether the root's file system is fit for dropq, and what this user may do there.

        It changes no queue, and removes its own files.

        Args:
            queues: the names of those whose folders to try; None tries those of all queues.

        Raises:
            NoSuchQueue: there is no such queue.
            StorageError: the root cannot be listed.
        """
        from dropq.diagnosis.doctor import doctor

        with error_context("no queue was changed"):
            return doctor(self.context, queues=queues)

    def pause(self) -> None:
        """Make the consumers of every queue see an empty queue, until `resume`."""
        with error_context(PAUSING):
            Storage().touch(self.layout.read_lock)

    def resume(self) -> None:
        """Let the consumers of every queue see their queues again."""
        with error_context(PAUSING):
            Storage().unlink(self.layout.read_lock)


class Queue(Producer):
    """A queue of a root.

    Args:
        root: the root.
        name: the queue's name, which is its folder's.

    Raises:
        InvalidName: it cannot be the name of a queue.
    """

    def __init__(self, root: Root, name: str) -> None:
        names.check_queue_name(name)
        self.root = root
        self.name = name
        self._opened: Transitions | None = None
        self._own: Subscription | None = None

    def __repr__(self) -> str:
        return f"<Queue {self.name!r} in {self.root.path}>"

    # -- opening ---------------------------------------------------------------------------------------------

    @property
    def context(self) -> QueueContext:
        """What dropq's own modules need to know of it; opens the queue when that was not done.

        Raises:
            NoSuchQueue: there is no such queue in the root.
            ConfigError: its configuration cannot be used.
            StorageError: a folder is missing, or lies on another file system.
        """
        return self._transitions.context

    @property
    def _transitions(self) -> Transitions:
        opened = self._opened
        if opened is None:
            # RACE: threads that open it at once open the same queue; any of their results will do.
            opened = self._opened = Transitions(open_queue(self.root.context, self.name, self))
        return opened

    @property
    def layout(self) -> QueueLayout:
        """Where its folders are."""
        return self.context.layout

    @property
    def config(self) -> QueueConfig:
        """Its configuration, as it was when the queue was opened."""
        return self.context.config

    def exists(self) -> bool:
        """Tell whether the queue is there."""
        return find_layout(self.root.layout.path, self.name) is not None

    # -- receiving -------------------------------------------------------------------------------------------

    def subscribe(
        self,
        *,
        client_id: str | None = None,
        filter: str | None = None,
        max_backlog: int | None = 1,
        lease_period: Duration | None = None,
        detached: bool = False,
    ) -> Subscription:
        """Begin to receive; close the subscription, or leave its `with` block, to return what it holds.

        Args:
            client_id: who receives, for people who read processing/; None takes host and process.
            filter: other messages are left to others, as those are that the queue's own filter does not match.
            max_backlog: how many messages it may hold at once; None for as many as the queue's cap allows.
            lease_period: after which a claim runs out, at least 1ms; None takes the queue's, which may have none.
            detached: its claims outlive the process, as those of a shell command; they must have a lease.

        Raises:
            ConfigError: a detached subscription without a lease.
            InvalidFilter: the filter cannot be read, or is empty.
            Unavailable: a filter needs an extra that is not installed.
            ValueError: max_backlog is below 1, or lease_period is 0 or no period.
        """
        from dropq.queue.subscription import subscribe
        from dropq.upkeep.sweep import QuickSweep

        context = self.context
        return subscribe(
            context,
            client_id=client_id,
            filter=filter,
            max_backlog=max_backlog,
            lease_period=lease_period,
            detached=detached,
            sweep=QuickSweep(context),
        )

    def receive(self, timeout: Duration | None = 0) -> Message | None:
        """Claim the next message, on a subscription that lives as long as this object.

        Args:
            timeout: how long to wait for one: 0 looks once, None waits for ever.

        Returns:
            The message, or None, as `Subscription.receive` does.
        """
        own = self._own
        if own is None or own.inherited:
            own = self._own_subscription()
        return own.receive(timeout)

    def _own_subscription(self) -> Subscription:
        before = self._own  # None, or after a fork the parent's
        opened = self.subscribe(max_backlog=None)
        # RACE: threads, and a signal handler, that open one at once: all use the first that is kept. Nothing comes in
        # between looking and keeping, as nothing is called there.
        if self._own is before:
            self._own = opened
            return opened
        opened.close()
        return self._own_subscription() if self._own is None or self._own.inherited else self._own

    @_telling("nothing was changed")
    def claimed(self, receipt: str) -> Message:
        """Take up a claim by its receipt, or, where leasing is `sublet`, by the message's id.

        Raises:
            LeaseLost: there is no such claim.
        """
        from dropq.queue import by_id

        return by_id.claimed(self.context, receipt, self._own)

    @_telling("whether the message was acknowledged, `dropq show` tells")
    def ack(self, id: str, defer: bool = False) -> bool:
        """Acknowledge a message by its id, wherever it is held, waits or is delayed; False when it is nowhere.

        With strict leasing a message that somebody else holds is left alone; while the queue is paused, one that waits
        or is delayed is. It takes a listing: receipts are quicker.

        Args:
            id: the message's id.
            defer: remember the ack of a message that is not here yet, for deferred_ack_expiration: it is archived once
                it comes, and not delivered. This still returns False then: nothing was acknowledged so far.

        Raises:
            ValueError: the ack of an id that dropq did not make cannot be deferred: another message may come under it.
        """
        from dropq.queue import by_id

        subscribe = partial(self.subscribe, client_id="ack")
        return by_id.ack(self.context, id, own=self._own, subscribe=subscribe, defer=defer)

    # -- looking ---------------------------------------------------------------------------------------------

    def browse(self, state: str = "target", filter: str | None = None) -> Iterator[Message]:
        """Yield the messages of a state in order of delivery, without touching any.

        Args:
            state: the state.
            filter: only what it matches.

        Raises:
            InvalidFilter: the filter cannot be read; the error points at the column.
        """
        yield from browsing.browse(self.context, state, filter)

    def explain(self, state: str | None = None, filter: str | None = None) -> Iterator[Explanation]:
        """Say of each message that is not settled why nobody is handed it, or who holds it.

        Args:
            state: target, delayed or processing; None for all three.
            filter: only what it matches.

        Raises:
            InvalidFilter: the filter cannot be read; the error points at the column.
        """
        from dropq.diagnosis.explain import explain

        yield from explain(self.context, state, filter)

    @_telling("nothing was changed")
    def find(self, id: str, states: Iterable[str] = SEARCHED) -> Message:
        """Return a message by its id, its file name or its receipt, wherever it lies.

        Of several in one state it is the first in order of delivery.

        Raises:
            NoSuchMessage: it is in none of the states.
        """
        return self.find_all(id, states)[0]

    @_telling("nothing was changed")
    def find_all(self, id: str, states: Iterable[str] = SEARCHED) -> list[Message]:
        """Return the messages of an id in the first state that has any, in order of delivery.

        Args:
            id: an id, which a sender may have given to several, a file name or a receipt.
            states: where to look, in this order.

        Raises:
            NoSuchMessage: there is none in any of the states.
        """
        return browsing.find_all(self.context, id, states)

    @_telling("nothing was changed")
    def counts(self) -> dict[str, int]:
        """Return how many messages lie in each state, by one listing of each folder."""
        return browsing.counts(self.context)

    @_telling("nothing was changed")
    def stats(self) -> dict[str, StateStats]:
        """Return count, bytes and oldest message of each state; it looks at every file."""
        return browsing.stats(self.context)

    # -- keeping it in order -----------------------------------------------------------------------------------

    def requeue(
        self, ids: Iterable[str] | None = None, *, state: str = "error", filter: str | None = None
    ) -> list[Outcome]:
        """Move messages back into target/ as if they were new; return what became of each.

        Args:
            ids: which; None takes all of the state.
            state: where they lie: error, expired, processed, or processing, whose holders lose their claims.
            filter: only what it matches.
        """
        from dropq.upkeep import bulk

        return list(bulk.requeue(self.context, ids=ids, state=state, filter=filter))

    def replay(
        self,
        start: str | date | None = None,
        *,
        filter: str | None = None,
        ids: Iterable[str] | None = None,
        to: Queue | None = None,
        dry_run: bool = False,
    ) -> list[Outcome]:
        """Send archived messages again, each once and oldest first; return what became of each. The archive stays.

        They come as redelivered ones, without their own expirations, and the queue's clock starts again.

        Args:
            start: `epoch`, `now`, `creation`, an id that dropq made, an ISO 8601 date or time (UTC where it does not
                say); None is the queue's recovery_point, or all where ids are given.
            filter: a JMS selector: only what it matches.
            ids: which; None takes all from the point on.
            to: the queue that they go to; None is this one.
            dry_run: only say what would be done.

        Raises:
            ValueError: start is no point to begin at.
        """
        from dropq.upkeep.replay import replay

        goal = None if to is None else to.context
        return list(replay(self.context, start, ids=ids, filter=filter, to=goal, dry_run=dry_run))

    def move(
        self,
        goal: Queue,
        ids: Iterable[str] | None = None,
        *,
        state: str = "target",
        filter: str | None = None,
        dry_run: bool = False,
    ) -> list[Outcome]:
        """Move messages to another queue, with their counters and expirations; return what became of each.

        Args:
            goal: the queue that they go to.
            ids: which; None takes all of the state.
            state: where they lie.
            filter: only what it matches.
            dry_run: only say what would be done.
        """
        from dropq.upkeep import bulk

        return list(bulk.move(self.context, goal.context, ids=ids, state=state, filter=filter, dry_run=dry_run))

    def purge(
        self,
        ids: Iterable[str] | None = None,
        *,
        state: str = "target",
        filter: str | None = None,
        older_than: Duration | None = None,
        dry_run: bool = False,
    ) -> list[Outcome]:
        """Remove messages for good; return what became of each.

        Args:
            ids: which; None takes all of the state.
            state: where they lie.
            filter: only what it matches.
            older_than: only what came to the state longer ago.
            dry_run: only say what would be done.
        """
        from dropq.upkeep import bulk

        age = _seconds(older_than)
        return list(bulk.purge(self.context, ids=ids, state=state, filter=filter, older_than=age, dry_run=dry_run))

    def prune(
        self,
        *,
        state: str = "processed",
        keep_age: Duration | None = None,
        keep_count: int | None = None,
        dry_run: bool = False,
    ) -> list[Outcome]:
        """Remove the oldest messages of a state for good; return what became of each.

        Args:
            state: where they lie.
            keep_age: how long a message stays there; None takes the queue's history_age.
            keep_count: how many stay there; None takes the queue's max_history.
            dry_run: only say what would be done.
        """
        from dropq.upkeep import bulk

        age = _seconds(keep_age)
        return list(bulk.prune(self.context, state=state, keep_age=age, keep_count=keep_count, dry_run=dry_run))

    @_telling("the sweep did not come to its end: the next one goes on")
    def sweep(
        self,
        *,
        foreign_older_than: Duration | None = None,
        unleased_older_than: Duration | None = None,
        jobs_older_than: Duration | None = None,
    ) -> SweepReport:
        """Return what the dead held and what outlived its lease, deliver the delayed, expire, finish jobs, prune.

        Args:
            foreign_older_than: also return claims that scripts or DropboxMQ clients made so long ago.
            unleased_older_than: also return claims without lease and known holder that are so old.
            jobs_older_than: also drop jobs that were not committed and had no activity for so long.
        """
        from dropq.upkeep.sweep import sweep

        return sweep(
            self.context,
            foreign_older_than=_seconds(foreign_older_than),
            unleased_older_than=_seconds(unleased_older_than),
            jobs_older_than=_seconds(jobs_older_than),
        )

    def fsck(self, repair: bool = False) -> list[Finding]:
        """Find what does not belong, and set it aside where asked; nothing is ever deleted."""
        from dropq.diagnosis.fsck import fsck

        return fsck(self.root.context, self.name, repair=repair)

    def health(
        self, *, max_age: Duration | None = None, max_count: int | None = None, max_error: int | None = 10
    ) -> Health:
        """Report whether the queue is well, and why not; change nothing.

        Args:
            max_age: how long a message may wait; None sets no limit.
            max_count: how many messages may wait in target/; None sets no limit.
            max_error: how many messages may lie in error/; None sets no limit.

        Raises:
            NoSuchQueue: there is no such queue; any other error is in what this returns.
        """
        from dropq.diagnosis.health import health

        return health(self.root.context, self.name, max_age=max_age, max_count=max_count, max_error=max_error)

    def doctor(self) -> list[Diagnosis]:
        """Report whether the queue's file system is fit for dropq, and what this user may do in the queue.

        It changes no queue, and removes its own files.

        Raises:
            NoSuchQueue: there is no such queue.
        """
        return self.root.doctor([self.name])

    @_telling("whether the queue is paused, `dropq ls` tells")
    def pause(self) -> None:
        """Make consumers see an empty queue, until `resume`; senders go on."""
        self.context.storage.touch(self.layout.read_lock)

    @_telling("whether the queue is paused, `dropq ls` tells")
    def resume(self) -> None:
        """Let consumers see the queue again."""
        self.context.storage.unlink(self.layout.read_lock)

    @property
    @_telling("nothing was changed")
    def paused(self) -> bool:
        """Whether consumers see an empty queue: by this queue's read-lock or the root's."""
        return self.context.paused

    def close(self) -> None:
        """Return what this object's own subscription holds."""
        own, self._own = self._own, None
        if own is not None:
            own.close()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _seconds(period: Duration | None) -> float | None:
    return None if period is None else parse_duration(period)
