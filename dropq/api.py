"""`Root`, a directory that holds queues, and `Queue` and `Topic`, with the verbs that users call.

A verb has no rule of its own: it opens what it needs, and calls the room that has the rule. Several threads may share a
queue object, a signal handler may use it at any moment, and a child may use it after a fork. So it has no lock, for
which a handler or a child could wait for ever. It opens its folders and its configuration at its first use.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropq.config.load import has_dropboxmq
from dropq.config.schema import QueueConfig
from dropq.durations import parse_duration
from dropq.errors import ConfigError, DropqError, NoSuchQueue, QueueFull, Unavailable
from dropq.format import names
from dropq.format.addresses import SubscriptionName, check_address, check_client_id, check_topic_name
from dropq.format.layout import STATES, QueueLayout
from dropq.hints import hinting
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.open_queue import find_layout, open_queue, open_root, queue_names
from dropq.lifecycle.queue_notes import refuse_away, topics
from dropq.lifecycle.sending import Outlet
from dropq.policies.send_limits import SendLimits, limits_of_sends
from dropq.queue import browsing
from dropq.queue.browsing import StateStats
from dropq.queue.message import Duration, Message
from dropq.queue.sender import Sender, Sent
from dropq.storage.clock import Clock
from dropq.storage.failures import error_context
from dropq.storage.files import Storage

# Imported here: what sends and counts. Each other verb imports what it needs, so that a shell's `send` starts quickly.
if TYPE_CHECKING:
    from dropq.config.selectors import Selector
    from dropq.diagnosis.doctor_kinds import Diagnosis
    from dropq.diagnosis.explain import Explanation
    from dropq.diagnosis.fsck_kinds import Finding
    from dropq.diagnosis.graph import Graph
    from dropq.diagnosis.health import Health
    from dropq.diagnosis.overview import Look
    from dropq.lifecycle.ephemeral import EphemeralMarker
    from dropq.queue.bundling import RecordWriter
    from dropq.queue.outputs import Destinations
    from dropq.queue.subscription import Subscription
    from dropq.queue.waiting import Ending
    from dropq.topics.publishing import Publishing
    from dropq.upkeep.bulk import Outcome
    from dropq.upkeep.requests import Requesters, Send
    from dropq.upkeep.steps import SweepReport
    from dropq.worker.loop import Stop

log = logging.getLogger("dropq")

#: How the errors of `pause` and `resume` end, of a root and of a queue.
_ROOT_PAUSE = "`dropq ls` shows whether the queues are paused"
_QUEUE_PAUSE = "`dropq ls` shows whether the queue is paused"


class Root:
    """A directory that holds queues.

    Args:
        clock: an object whose `now_ms()` returns milliseconds since 1970 UTC; None takes the file server's clock.

    Raises:
        NoSuchQueue: there is no such directory.
        StorageError: the directory cannot be opened.
        ConfigError: its dropq.toml cannot be used, or was written by a newer dropq.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock | None = None) -> None:
        #: What dropq's own modules need to know of the root.
        self.context = open_root(os.path.abspath(os.fspath(path)), clock)
        self.layout = self.context.layout
        self.clock = self.context.clock

    def __repr__(self) -> str:
        return f"<Root {self.layout.path}>"

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, dropboxmq: bool = False, clock: Clock | None = None) -> Root:
        """Make a directory a root; what is in it already stays as it is.

        Args:
            path: the directory; it is created if it is missing.
            dropboxmq: also make what a running DropboxMQ 1.2 needs to share the root.

        Raises:
            StorageError: the root cannot be made.
            ConfigError: the directory is a root already, and DropboxMQ cannot share it.
        """
        from dropq.upkeep import queues

        queues.create_root(os.path.abspath(os.fspath(path)), dropboxmq=dropboxmq)
        root = cls(path, clock=clock)
        if dropboxmq and root.context.config.reply_to_style != "typed":
            raise ConfigError(f'{root.layout.config_file}: reply_to_style: DropboxMQ needs reply_to_style = "typed"')
        return root

    @property
    def path(self) -> Path:
        """The directory."""
        return Path(self.layout.path)

    def queue(self, name: str) -> Queue:
        """Return the queue of a name; its first use opens it, and raises NoSuchQueue if it is not there."""
        return Queue(self, name)

    def queues(self) -> list[Queue]:
        """Return the queues of the root, ordered by name."""
        return [Queue(self, name) for name in queue_names(self.context)]

    def topic(self, name: str, *, client_id: str | None = None) -> Topic:
        """Return a `Topic`; its first use opens it, and raises NoSuchQueue if it is not there."""
        return Topic(self, name, client_id=client_id)

    def create_topic(self, name: str, **options: Any) -> Topic:
        """Create a topic; it appears complete, by one rename.

        Args:
            name: its name; dots part it from the topics above it, whose subscriptions get what is published to it.
            options: keys of queue.toml, which are written there: those of what is published, and defaults of the
                topic's subscriptions.

        Raises:
            QueueExists: a topic, or a queue, of that name is there already.
            InvalidName, ConfigError: the name, or an option, cannot be used; nothing was created.
        """
        from dropq.upkeep import queues

        queues.create_topic(self.context, name, options)
        return self.topic(name)

    def create_queue(
        self, name: str, *, dropboxmq: bool | None = None, selector: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> Queue:
        """Create a queue; it appears complete, by one rename.

        Args:
            dropboxmq: lay it out as DropboxMQ 1.2 does, with its folders in `incoming/`; None does so where a DropboxMQ
                shares the root.
            selector: its selectors, each a table with a name and the arguments of `Queue.add_selector`.
            options: keys of queue.toml, which are written there.

        Raises:
            QueueExists: something of that name is there already.
            InvalidName, ConfigError: the name, a selector or an option cannot be used; nothing was created.
            NoSuchQueue: a queue that a selector sends to is not there; nothing was created.
            Unavailable: `underlying_topic` is a regular expression, and RE2 is not installed; nothing was created.
        """
        from dropq.upkeep import queues

        names.check_queue_name(name)
        shared = has_dropboxmq(self.layout.path) if dropboxmq is None else dropboxmq
        queues.create(self.context, name, options, dropboxmq=shared, selector=selector)
        return Queue(self, name)

    def delete_queue(self, name: str, *, force: bool = False) -> None:
        """Remove a queue with its history; refuse while messages wait, are delayed or are held.

        The queue is renamed first, so that a send under way fails instead of vanishing. A topic goes when it has no
        subscriptions any more; a subscription goes as by `Topic.unsubscribe`.

        Args:
            name: the address of a queue, a topic or a subscription.
            force: remove it with all of its messages.

        Raises:
            NoSuchQueue: there is no such queue.
            StorageError: messages are in the queue, or it cannot be removed; it stays as it was.
        """
        from dropq.upkeep import queues

        check_address(name)
        queues.delete(self.context, name, force=force)

    def sweep(
        self,
        *,
        foreign_older_than: Duration | None = None,
        unleased_older_than: Duration | None = None,
        jobs_older_than: Duration | None = None,
        ephemeral_older_than: Duration | None = None,
    ) -> SweepReport:
        """Do `Queue.sweep` for every queue, then remove the metadata files that no name refers to any more.

        Raises:
            ConfigError, StorageError: the error of the first queue that cannot be swept; the others were swept.
        """
        from dropq.upkeep.steps import SweepReport

        report = SweepReport()
        errors: list[DropqError] = []
        for queue in self.queues():
            try:
                report.add(
                    queue.sweep(
                        foreign_older_than=foreign_older_than,
                        unleased_older_than=unleased_older_than,
                        jobs_older_than=jobs_older_than,
                        ephemeral_older_than=ephemeral_older_than,
                    )
                )
            except DropqError as error:  # the other queues can be swept
                if not queue.exists() and (isinstance(error, NoSuchQueue) or names.is_temporary(queue.name)):
                    continue  # RACE: its requester, or the sweep of its topic, removed it since it was listed
                log.error("queue %s was not swept: %s", queue.name, error)
                errors.append(error)
        report.add(self.tidy())
        if errors:
            raise errors[0]
        return report

    def tidy(self) -> SweepReport:
        """Do a sweep's work outside the queues: undo interrupted deletes, remove what requesters left, unused metadata.

        Raises:
            StorageError: the file system refused; the next sweep goes on.
        """
        from dropq.upkeep.sweep import tidy

        return tidy(self.context)

    def health(
        self,
        *,
        max_age: Duration | None = None,
        max_count: int | None = None,
        max_error: int | None = 0,
        still: Duration | None = None,
    ) -> list[Health]:
        """Report what `Queue.health` says of each queue, ordered by name, also of those that cannot be opened.

        Raises:
            StorageError: the root cannot be listed.
        """
        from dropq.diagnosis.health import Limits, health_root

        with error_context("nothing was changed"):
            return list(health_root(self.context, Limits.of(max_age, max_count, max_error, still)))

    def overview(self) -> list[Look]:
        """Look at each queue, four at a time: counts, ages, holders, rates, what is wrong, and why it stands still.

        A queue that cannot be read, or does not answer within 5 s, has an error in its health. The rate of what comes
        takes two looks: `dropq top` keeps looking. Nothing is changed.

        Raises:
            StorageError: the root cannot be listed.
        """
        from dropq.diagnosis.overview import overview

        with error_context("nothing was changed"):
            return overview(self.context)

    def graph(self) -> Graph:
        """Return the queues of the root, how messages go from one to another, and what is stuck and why.

        Queues that cannot be opened are in it, too. Nothing is changed.

        Raises:
            StorageError: the root cannot be listed.
        """
        from dropq.diagnosis.graph import graph

        with error_context("nothing was changed"):
            return graph(self.context)

    def doctor(self, queues: Iterable[str] | None = None) -> list[Diagnosis]:
        """Report whether the root's file system is fit for dropq, and what this user may do there.

        The doctor changes no queue, and removes its own files.

        Args:
            queues: names of the queues whose folders to try; None tries all queues.

        Raises:
            NoSuchQueue: there is no such queue.
            StorageError: the root cannot be listed.
        """
        from dropq.diagnosis.doctor import doctor

        with error_context("no queue was changed"):
            return doctor(self.context, queues=queues)

    def pause(self) -> None:
        """Make the consumers of every queue see an empty queue until `resume`."""
        with error_context(_ROOT_PAUSE):
            Storage().touch(self.layout.read_lock)

    def resume(self) -> None:
        """Let the consumers of every queue see their queues again."""
        with error_context(_ROOT_PAUSE):
            Storage().unlink(self.layout.read_lock)


class Queue(Sender):
    """A queue of a root; its name is its folder's.

    Verbs on many messages return what became of each. They act on the messages of a `state`; on those with one of the
    `ids`, which may be file names and receipts, too, or on all if that is None; and only on those that match a
    `filter`: InvalidFilter if it cannot be read. With `dry_run` they change nothing, and return what would be done.

    Raises:
        InvalidName: the name cannot be the name of a queue.
    """

    def __init__(self, root: Root, name: str) -> None:
        check_address(name)
        self.root = root
        self.name = name
        self._context: QueueContext | None = None
        self._opened: Outlet | None = None
        self._own: Subscription | None = None
        #: Whether it is a topic's own: what is published to a topic that is not there is no dead letter.
        self._is_topic = False
        #: Whether it takes what the overflow selector of another queue sends: it rejects what it has no room for, and
        #: its own selector is not followed.
        self._is_overflow = False
        #: What the end of a subscription does beyond returning what it holds.
        self._at_end: Callable[[], None] | None = None
        self._requesters: Requesters | None = None
        self._sends_to: Destinations | None = None
        self._overflowing: dict[str, Queue] = {}

    def __repr__(self) -> str:
        return f"<Queue {self.name!r} in {self.root.path}>"

    # -- opening ---------------------------------------------------------------------------------------------

    @property
    def context(self) -> QueueContext:
        """What dropq's own modules need to know of the queue, which this opens if it is not open yet.

        Raises:
            NoSuchQueue: there is no such queue in the root.
            ConfigError: its configuration cannot be used.
            StorageError: a folder is missing, or lies on another file system.
        """
        context = self._context
        if context is None:
            # RACE: threads that open the queue at the same moment get equal results; the last of them stays.
            context = self._context = open_queue(self.root.context, self.name, self)
            if context.config.underlying_topic is not None:
                from dropq.topics.views import keep_noted

                keep_noted(context)
        return context

    @property
    def _outlet(self) -> Outlet:
        """What sends: what is sent to a topic, or to a view on topics, is published."""
        if self._opened is None:
            context = self.context
            if context.layout.is_topic or context.config.underlying_topic is not None:
                from dropq.topics.publishing import outlet

                self._opened = outlet(context)
            else:
                self._opened = Outlet(context)
        return self._opened

    def _limits_of_sends(self) -> SendLimits:
        if self._is_overflow:
            return SendLimits(self.name, self._destination, rejects=True, waits=self._waits)
        return limits_of_sends(self.context, self._destination, waits=self._waits)

    def _overflow(self, full: QueueFull) -> Sender | None:
        from dropq.config.selectors import Selector

        selector = full.overflow
        if not isinstance(selector, Selector):
            return None
        if (to := selector.to) is None:
            from dropq.queue.bounced_sends import BouncingSender

            return BouncingSender(self.context, full, selector)
        other = self._overflowing.get(to)
        if other is None or not other.exists():
            other = self.root.queue(to)
            other._is_overflow, other._waits = True, self._waits
            try:
                _ = other._destination  # opens it
            except NoSuchQueue as error:
                raise QueueFull(
                    f"queue {self.name} is full, and its overflow selector sends to {other.name}, which is not there: "
                    "nothing was sent"
                ) from error
            self._overflowing = {other.name: other}
        return other

    def _missing_queue_sender(self) -> Sender | None:
        if self.exists():
            return None
        from dropq.queue.missing_queue import missing_queue_sender

        # To a topic, or to a view, whose topic is missing.
        publishes = self._is_topic or (self._opened is not None and type(self._opened) is not Outlet)
        return missing_queue_sender(self.root.context, self.name, publishes=publishes)

    @property
    def _destinations(self) -> Destinations:
        """Where the messages go that are made of its own."""
        if self._sends_to is None:  # RACE: threads may make two, which are equal
            from dropq.queue.outputs import Destinations

            self._sends_to = Destinations(self.context, self.root.queue)
        return self._sends_to

    @property
    def layout(self) -> QueueLayout:
        """Where the queue's folders are."""
        return self.context.layout

    @property
    def config(self) -> QueueConfig:
        """The queue's configuration, as it was when this object opened the queue."""
        return self.context.config

    def exists(self) -> bool:
        """Return whether the queue is there."""
        return find_layout(self.root.layout.path, self.name) is not None

    # -- sending records -------------------------------------------------------------------------------------

    def record_writer(
        self,
        format: str = "jsonl",
        *,
        max_records: int = 1000,
        max_bytes: int = 1 << 20,
        linger: Duration | None = None,
        header: bytes | str | None = None,
        **fields: Any,
    ) -> RecordWriter:
        """Return a writer that sends records, many in one message; close it, or use it in a `with` block.

        A message is sent when it has as many records or bytes as it may have, when its first record has waited as long
        as it may, and by `flush`, `send` and the end of the block.

        Args:
            format: jsonl, text, csv or frames; it is the type of the messages.
            max_records, max_bytes: what a message has at most; a larger record is a message by itself.
            linger: how long a record waits for others; None for as long as it takes.
            header: of csv, the first row, with the names of the columns.
            fields: the other arguments of `send`, but for `type` and `message_id`.

        Raises:
            ValueError: an unknown format, a limit below 1, csv without a header, or a value that no name can hold.
            NoSuchQueue: the queue is not there, and nothing takes its messages instead.
        """
        from dropq.queue.bundling import RecordWriter

        return RecordWriter(
            self, format, max_records=max_records, max_bytes=max_bytes, linger=linger, header=header, **fields
        )

    # -- asking ----------------------------------------------------------------------------------------------

    def request(self, body: bytes | str, timeout: Duration | None, **fields: Any) -> Message | None:
        """Send a message and wait for the answer to it: what a consumer gives to `Message.reply`, or `dropq reply`.

        The answer comes to a temporary queue, `temp-ID` in the same root, which the request names as its reply_to. It
        is recognised by its correlation id; any other message there is dropped, with a warning in the log. The queue is
        removed when no answer came, else by `close`, at the latest when this process ends: an answer that comes later
        is refused to its sender. The request stays where it is; give it an `expires_in` if nobody should answer later.

        Args:
            body: as for `send`.
            timeout: how long to wait for the answer after the request was sent, above 0; None waits for ever.
            fields: the other arguments of `send`, but for reply_to.

        Returns:
            The answer, settled already, with its body; None if no answer came in that time.

        Raises:
            NoSuchQueue: as of `send`; or the request came back, as it was sent to a missing queue: where the root has a
                dead-letter queue, it goes there first, and comes back if a selector bounces it.
            StorageError: as of `send`; or the temporary queue could not be made, and nothing was sent.
            Unavailable: the request came back for another reason, which the error names, with the queue.
            QueueFull: the queue is full, and rejects or discards; nothing was sent.
            ValueError: a timeout of 0, a reply_to, or a value that no name can hold; nothing was sent.
        """
        return self._request(partial(self.send, body), timeout, fields)

    def _request(
        self, send: Send, timeout: Duration | None, fields: Mapping[str, Any], ending: Ending | None = None
    ) -> Message | None:
        from dropq.upkeep.requests import Requesters, request

        requesters = self._requesters
        if requesters is None:  # RACE: threads may make two; the one that is not kept ends what it keeps
            requesters = self._requesters = Requesters()
        try:
            asked = self.context
        except NoSuchQueue:
            if (sender := self._missing_queue_sender()) is None:
                raise
            asked = sender._destination
        return request(
            asked, send, _seconds(timeout), fields, requesters=requesters, public=self.root.queue, ending=ending
        )

    # -- receiving -------------------------------------------------------------------------------------------

    @hinting
    def subscribe(
        self,
        *,
        client_id: str | None = None,
        named: bool = False,
        filter: str | None = None,
        max_backlog: int | None = 1,
        lease_period: Duration | None = None,
        detached: bool = False,
    ) -> Subscription:
        """Begin to receive; close the subscription, or leave its `with` block, to return what it holds.

        Args:
            client_id: who receives, for people who read processing/; None takes the names of host and process.
            named: the client comes back: a queue with `self_destruct` stays while it is here, and for
                `self_destruct_after` when it has gone. It has a client_id.
            filter: receive only messages that match it, and the queue's own filter.
            max_backlog: how many messages the subscription may hold at once; None takes the queue's
                max_per_subscription_backlog, which may be no limit.
            lease_period: how long each claim lasts, at least 1ms; None takes the queue's lease_period, which may be
                unset: then claims do not run out.
            detached: claims outlive the process, as those of a shell command do; they must have a lease.

        Raises:
            ConfigError: a detached subscription has no lease.
            InvalidFilter: the filter cannot be read, or is empty.
            Unavailable: a filter needs an extra that is not installed.
            ValueError: max_backlog is below 1, or lease_period is 0 or no period; or named without a client_id, or
                detached.
        """
        from dropq.queue.subscription import Subscription
        from dropq.upkeep.sweep import QuickSweep

        context = self.context
        return Subscription(
            context,
            client_id=client_id,
            named=named,
            filter=filter,
            max_backlog=max_backlog,
            lease_period=lease_period,
            detached=detached,
            sweep=QuickSweep(context),
            at_end=self._at_end,
        )

    @hinting
    def receive(self, timeout: Duration | None = 0) -> Message | None:
        """Claim the next message, on a subscription of this object's own, without limit, that `close` ends.

        Args:
            timeout: how long to wait for a message: 0 looks once, None waits for ever.

        Returns:
            The message, or None, as `Subscription.receive` does.
        """
        own = self._own
        if own is None or own._inherited:
            own = self._own_subscription()
        return own.receive(timeout)

    def _own_subscription(self) -> Subscription:
        before = self._own  # None, or after a fork the parent's
        opened = self.subscribe(max_backlog=None)
        # RACE: threads, and a signal handler, may open subscriptions at the same moment: all use the first that is
        # kept. Nothing can come between the test and the assignment, because no call is made there.
        if self._own is before:
            self._own = opened
            return opened
        opened.close()
        return self._own_subscription() if self._own is None or self._own._inherited else self._own

    def claimed(self, receipt: str) -> Message:
        """Return a held message by its receipt, or, where leasing is `sublet`, by its id; any process may settle it.

        Raises:
            LeaseLost: nobody holds such a message, or several of the id are held: the text has their receipts.
        """
        from dropq.queue import by_id

        with self.context.error_context("nothing was changed"):
            return by_id.claimed(self.context, receipt, self._own)

    def ack(self, id: str, defer: bool = False) -> bool:
        """Acknowledge a message by its id, whether it is held, waits or is delayed; return False if it is not there.

        This lists folders: receipts are quicker. If several messages of the id are held, or several parts of a bundle
        wait, they are settled by their receipts. With strict leasing it leaves a message alone that another consumer
        holds. While the queue is paused it leaves messages alone that wait or are delayed.

        Args:
            id: the message's id.
            defer: if the message is not there yet, return False and remember the ack for deferred_ack_expiration: the
                message is archived when it comes, and not delivered. Parts of a bundle are passed over: they are here,
                or come, as before, and the ack is remembered for a message of the id that is no part.

        Raises:
            LeaseLost: several messages of the id are held, or several parts of a bundle wait; nothing was changed.
            ValueError: the ack cannot be deferred: dropq did not make this id, which another message may have, or the
                queue is a topic.
        """
        from dropq.queue import by_id

        with self.context.error_context(by_id.UNCERTAIN):
            return by_id.ack(self.context, id, own=self._own, subscribe=self._subscribe_to_ack, defer=defer)

    def _subscribe_to_ack(self) -> Subscription:
        return self.subscribe(client_id="ack")

    # -- looking ---------------------------------------------------------------------------------------------

    def browse(self, state: str = "target", filter: str | None = None) -> Iterator[Message]:
        """Yield the messages of a state that match a filter, in order of delivery; change nothing.

        Args:
            state: target, delayed, processing, processed, error, expired or working.

        Raises:
            InvalidFilter: the filter cannot be read; the error points at the column.
        """
        yield from browsing.browse(self.context, state, filter)

    def explain(self, state: str | None = None, filter: str | None = None) -> Iterator[Explanation]:
        """Explain for each message that is not settled, and matches a filter, why it still waits, or who holds it.

        Args:
            state: target, delayed or processing; None for all three.

        Raises:
            InvalidFilter: the filter cannot be read; the error points at the column.
        """
        from dropq.diagnosis.explain import explain

        yield from explain(self.context, state, filter)

    def find(self, id: str, states: Iterable[str] = STATES) -> Message:
        """Return the first of the messages that `find_all` returns; NoSuchMessage if there is none."""
        return self.find_all(id, states)[0]

    def find_all(self, id: str, states: Iterable[str] = STATES) -> list[Message]:
        """Return the messages of an id in the first state that has any, in order of delivery.

        Args:
            id: an id, which a sender may have given to several messages, a file name or a receipt.
            states: where to look, in this order.

        Raises:
            NoSuchMessage: no such message is in any of the states.
        """
        with self.context.error_context("nothing was changed"):
            return browsing.find_all(self.context, id, states)

    def routed(self) -> dict[str, int]:
        """Return the number of messages in each folder of routing/ that has any; a link to another queue counts there.

        `counts` leaves these out: they have left the queue's states.
        """
        from dropq.policies.routes import routed

        with self.context.error_context("nothing was changed"):
            return routed(self.layout, self.config.ignore)

    def in_transit(self) -> dict[str, int]:
        """Return the number of messages on their way to each queue on another file system.

        `counts` leaves these out: they have left the queue's states. Any sweep of the queue goes on with what was left
        on the way.
        """
        from dropq.lifecycle.transfers import in_transit

        with self.context.error_context("nothing was changed"):
            return in_transit(self.layout)

    def counts(self) -> dict[str, int]:
        """Return the number of messages in each state, by one listing of each folder."""
        with self.context.error_context("nothing was changed"):
            return browsing.counts(self.context)

    def stats(self) -> dict[str, StateStats]:
        """Return count, bytes and oldest time of each state; this looks at every file."""
        with self.context.error_context("nothing was changed"):
            return browsing.stats(self.context)

    # -- routing -----------------------------------------------------------------------------------------------

    def route(self) -> dict[str, int]:
        """Apply routes and selectors to each waiting message, once; return how many messages each of them took.

        Other messages stay in target/. Consumers do this, too, so it is for a queue without consumers. In a topic, it
        distributes what waits.

        Raises:
            StorageError: target/ cannot be listed; or a message was moved, but not synced.
        """
        from dropq.routing import route
        from dropq.upkeep.sweep import QuickSweep

        return route(self.context, sweep=QuickSweep(self.context, routes=False))

    def add_selector(
        self,
        name: str,
        *,
        to: str | Sequence[str] | None = None,
        op: str = "move",
        filter: str | None = None,
        credit: int | None = None,
        role: str = "normal",
    ) -> Selector:
        """Add a selector, which takes waiting messages from the next pass of a router on; return it.

        Args:
            name: its name: letters, digits, - and _.
            to: the address that it sends to; of a bounce, one or more return addresses that it goes to, by default
                `temp-*`: a `*` at the end stands for the rest of a name.
            op: move, copy or bounce.
            filter: which messages it takes; None for all.
            credit: how many messages that it moved may be unsettled at a time; None is 1. Only a move has credits.
            role: normal; default, which takes what no other takes; or overflow, which takes what a full queue would
                refuse.

        Raises:
            InvalidName: no selector can have the name.
            ConfigError: an option cannot be used, or messages would go round; the error names each.
            NoSuchQueue: there is no queue of the address.
            QueueExists: the queue has a selector of this name, or another of its role.
            Unavailable: another process keeps the policy lock of the queue; nothing was changed.
        """
        from dropq.routing import registry

        options = {"to": to, "op": op, "filter": filter, "credit": credit, "role": role}
        return registry.add(self.context, name, {key: value for key, value in options.items() if value is not None})

    def selectors(self) -> list[Selector]:
        """Return the selectors of the queue, in the order of their names; a file that cannot be used is left out."""
        from dropq.policies import selectors

        with self.context.error_context("nothing was changed"):
            return selectors.read(self.context)[0]

    def remove_selector(self, name: str) -> bool:
        """Remove a selector; return to this queue the messages that it moved and that are not settled.

        A consumer that holds such a message loses its claim. A file that is removed by hand returns nothing.

        Returns:
            Whether all of them are back; any router or sweep brings back those that are still under way.

        Raises:
            NoSuchQueue: the queue has no such selector.
            Unavailable: another process keeps the policy lock; nothing was changed.
        """
        from dropq.routing import registry

        return registry.remove(self.context, name)

    # -- keeping it in order -----------------------------------------------------------------------------------

    def requeue(
        self,
        ids: Iterable[str] | None = None,
        *,
        state: str | None = None,
        filter: str | None = None,
        to_origin: bool = False,
        whole: bool = False,
    ) -> list[Outcome]:
        """Move messages back into target/ as new ones, without counts and expirations.

        Args:
            state: where they lie: error, expired, processed, or processing, whose holders lose their claims; dead
                letters that go to their origin may lie in target and delayed, too. None is error, and target with
                `to_origin`.
            to_origin: move each dead letter to the queue that it came from, and nothing else; one whose queue is not
                there stays.
            whole: put the parts of each bundle that lie in the state together as one new message of its id, in the
                order of their numbers. What was a record of a bundle is put in at its number. A number that no part has
                becomes an empty line, row or frame. Parts that have different formats, headers or records of one number
                stay as they are.

        Raises:
            ValueError: messages of that state cannot be requeued; or `whole` is given with `to_origin`.
        """
        from dropq.upkeep import bulk

        which = bulk.Selection((bulk.requeued_from(state, to_origin=to_origin),), ids, filter)
        return list(bulk.requeue(self.context, which, to_origin=to_origin, whole=whole))

    def replay(
        self,
        start: str | date | None = None,
        *,
        filter: str | None = None,
        ids: Iterable[str] | None = None,
        to: Queue | None = None,
        dry_run: bool = False,
    ) -> list[Outcome]:
        """Send copies of archived messages, each once and oldest first. The archive stays.

        The copies are marked as redelivered. They have no expirations of their own, and the queue's starts again.

        Args:
            start: where to begin: `epoch`, `now`, `creation`, an id that dropq made, an ISO 8601 date or time (UTC if
                it names no zone); None takes the queue's recovery_point, else `epoch`, also if ids are given.
            to: the queue that they go to; None is this queue.

        Raises:
            ValueError: start is no point to begin at.
        """
        from dropq.upkeep import bulk

        which = bulk.Selection(("processed",), ids, filter, dry_run=dry_run)
        return list(bulk.replay(self.context, which, start, to=None if to is None else to.context))

    def move(
        self,
        goal: Queue,
        ids: Iterable[str] | None = None,
        *,
        state: str = "target",
        filter: str | None = None,
        dry_run: bool = False,
    ) -> list[Outcome]:
        """Move messages to another queue, the `goal`, with their counters and expirations.

        Raises:
            ValueError: `state` is working, where senders still write; nothing was moved.
        """
        from dropq.upkeep import bulk

        which = bulk.Selection((state,), ids, filter, dry_run=dry_run)
        return list(bulk.move(self.context, which, to=goal.context))

    def ack_matching(self, filter: str, *, state: str | None = None, dry_run: bool = False) -> list[Outcome]:
        """Acknowledge messages that wait, are delayed or are held, each as by its id.

        Other holders lose their claims: when they settle, they get LeaseLost. With strict leasing what they hold stays.

        Args:
            state: target, delayed or processing; None for all three.

        Raises:
            ValueError: messages of that state cannot be acknowledged.
        """
        from dropq.upkeep import bulk

        which = bulk.Selection(bulk.UNFINISHED if state is None else (state,), None, filter, dry_run=dry_run)
        return list(bulk.ack(self.context, which, subscribe=self._subscribe_to_ack, own=self._own))

    def expire(
        self,
        ids: Iterable[str] | None = None,
        *,
        state: str | None = None,
        filter: str | None = None,
        dry_run: bool = False,
    ) -> list[Outcome]:
        """Move messages that wait, are delayed or are held to expired/.

        Holders lose their claims: when they settle, they get LeaseLost.

        Args:
            state: target, delayed or processing; None for all three.

        Raises:
            ValueError: messages of that state cannot be expired.
        """
        from dropq.upkeep import bulk

        states = bulk.UNFINISHED if state is None else (state,)
        return list(bulk.expire(self.context, bulk.Selection(states, ids, filter, dry_run=dry_run)))

    def purge(
        self,
        ids: Iterable[str] | None = None,
        *,
        state: str = "target",
        filter: str | None = None,
        older_than: Duration | None = None,
        dry_run: bool = False,
    ) -> list[Outcome]:
        """Remove messages for good.

        Args:
            older_than: only messages that came to the state longer ago than this.
        """
        from dropq.upkeep import bulk

        which = bulk.Selection((state,), ids, filter, _seconds(older_than), dry_run)
        return list(bulk.purge(self.context, which))

    def prune(
        self,
        *,
        state: str = "processed",
        keep_age: Duration | None = None,
        keep_count: int | None = None,
        dry_run: bool = False,
    ) -> list[Outcome]:
        """Remove the oldest messages of a state for good.

        Args:
            keep_age: keep messages that came to the state in this time; None takes history_age, for processed/ alone.
            keep_count: how many messages to keep; None takes max_history, for processed/ alone.
        """
        from dropq.upkeep import bulk

        age = _seconds(keep_age)
        return list(bulk.prune(self.context, state=state, keep_age=age, keep_count=keep_count, dry_run=dry_run))

    def sweep(
        self,
        *,
        foreign_older_than: Duration | None = None,
        unleased_older_than: Duration | None = None,
        jobs_older_than: Duration | None = None,
        ephemeral_older_than: Duration | None = None,
        row: str = "",
    ) -> SweepReport:
        """Return messages of dead consumers and lapsed leases, deliver delayed messages, expire, prune, finish jobs.

        Args:
            foreign_older_than: also return claims that scripts or DropboxMQ clients made longer ago than this.
            unleased_older_than: also return older claims that have neither a lease nor a known holder.
            jobs_older_than: also drop jobs that were never committed, and idle for longer than this.
            ephemeral_older_than: also remove the queue if it is temporary, no lock tells here whether its requester is
                alive, and that has not touched it for this long. It is always removed if its requester is known to be
                dead.
            row: also carry this row of `.dropq/transfers/` to another root, although another host wrote it, or an older
                dropq: its path must lead here to the same root.
        """
        from dropq.upkeep.sweep import sweep

        with self.context.error_context("the sweep did not come to its end: the next one goes on"):
            return sweep(
                self.context,
                foreign_older_than=_seconds(foreign_older_than),
                unleased_older_than=_seconds(unleased_older_than),
                jobs_older_than=_seconds(jobs_older_than),
                ephemeral_older_than=_seconds(ephemeral_older_than),
                row=row,
            )

    def fsck(self, repair: bool = False) -> list[Finding]:
        """Find what does not belong in the queue; with `repair`, set it aside. Nothing is ever deleted."""
        from dropq.diagnosis.fsck import fsck

        return fsck(self.root.context, self.name, repair=repair)

    def health(
        self,
        *,
        max_age: Duration | None = None,
        max_count: int | None = None,
        max_error: int | None = 0,
        still: Duration | None = None,
    ) -> Health:
        """Report whether the queue is well, and why not; change nothing.

        Args:
            max_age: how long a message may wait; None sets no limit.
            max_count: how many messages may wait in target/; None sets no limit.
            max_error: how many messages may lie in error/; None sets no limit.
            still: for how long messages may wait while nobody takes or settles one; None only notes it, after a minute.

        Raises:
            NoSuchQueue: there is no such queue; any other error is in the result.
        """
        from dropq.diagnosis.health import Limits, health

        return health(self.root.context, self.name, Limits.of(max_age, max_count, max_error, still))

    def doctor(self) -> list[Diagnosis]:
        """Report whether the queue's file system is fit for dropq, and what this user may do in the queue.

        The doctor changes no queue, and removes its own files.

        Raises:
            NoSuchQueue: there is no such queue.
        """
        return self.root.doctor([self.name])

    def pause(self) -> None:
        """Make consumers see an empty queue until `resume`; senders go on."""
        with self.context.error_context(_QUEUE_PAUSE):
            if self.context.storage.touch(self.layout.read_lock):
                self.context.log.act("paused")

    def resume(self) -> None:
        """Let consumers see the queue again."""
        with self.context.error_context(_QUEUE_PAUSE):
            if self.context.storage.unlink(self.layout.read_lock):
                self.context.log.act("resumed")

    @property
    def paused(self) -> bool:
        """Whether consumers see an empty queue, because this queue or the root is paused."""
        with self.context.error_context("nothing was changed"):
            return self.context.paused

    def close(self) -> None:
        """End the subscription of `receive`, return what it holds, and remove what `request` keeps for its answers."""
        own, self._own = self._own, None
        try:
            if own is not None:
                own.close()
        finally:
            self._end_requests()
            if self._opened is not None:
                self._opened.close()
            if self._context is not None:
                self._context.log.sums.tell()

    def _end_requests(self) -> None:
        requesters, self._requesters = self._requesters, None
        if requesters is not None:
            requesters.end()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Topic:
    """A topic of a root: each of its subscriptions gets what is published to it, as do those of the topics above it.

    Args:
        name: the topic's name; dots part it from the topics above it.
        client_id: who publishes and subscribes with this object; None for a client without a name.

    Raises:
        InvalidName: a topic cannot have the name.
    """

    def __init__(self, root: Root, name: str, *, client_id: str | None = None) -> None:
        check_topic_name(name)
        if client_id is not None:
            check_client_id(client_id)
        self.root = root
        self.name = name
        self.client_id = client_id
        #: The queue of what is published and not distributed yet, with the verbs of any queue.
        self.queue = Queue(root, name)
        self.queue._is_topic = True
        if client_id:
            self.queue._marks = {"from_client": client_id}

    def __repr__(self) -> str:
        return f"<Topic {self.name!r} in {self.root.path}>"

    def exists(self) -> bool:
        """Return whether the topic is there."""
        found = find_layout(self.root.layout.path, self.name)
        return found is not None and found.is_topic

    @property
    def _context(self) -> QueueContext:
        try:
            context = self.queue.context
        except NoSuchQueue as error:
            refuse_away(self.root.layout, self.name, "nothing was changed")
            near = get_close_matches(self.name, topics(self.root.layout), n=1)
            hint = f"is it {near[0]!r}? " if near and near[0] != self.name else ""
            raise NoSuchQueue(
                f"no topic {self.name!r} in {self.root.path}: {hint}`dropq topic ls` shows which there are, "
                f"`dropq topic create {self.name}` makes one"
            ) from error
        if not context.layout.is_topic:
            raise NoSuchQueue(f"{self.name!r} is a queue, and no topic: {context.layout.home}")
        return context

    def publish(self, body: bytes | str, *, timeout: Duration | None = None, **fields: Any) -> Sent:
        """Publish a message; once this returns it is sent, as durably as the topic's configuration asks.

        It returns when all receivers have the message. It does not wait for a topic that is paused, nor for a receiver
        that is full: then `distributed` is False in what it returns, and the message is not to be sent again.

        Args:
            body: as for `Queue.send`.
            timeout: how long to wait for the end of a pause, or for a full receiver; None does not wait.
            fields: the other arguments of `Queue.send`.

        Raises:
            NoSuchQueue, StorageError, QueueFull, ValueError: as of `Queue.send`; nothing was published.
        """
        with self._patient(timeout):
            return self.queue.send(body, **fields)

    @contextmanager
    def _patient(self, timeout: Duration | None) -> Iterator[None]:
        """Let each publish of this thread wait for so long."""
        patience = self._publishing.patience
        before = getattr(patience, "seconds", None)  # of a publish that a signal handler interrupted
        patience.seconds = _seconds(timeout)
        try:
            yield
        finally:
            patience.seconds = before

    @property
    def _publishing(self) -> Publishing:
        from dropq.topics.publishing import Publishing

        _ = self._context  # a queue that has the topic's name is refused
        publishing = self.queue._outlet
        assert isinstance(publishing, Publishing)
        return publishing

    @hinting
    def subscribe(
        self,
        name: str,
        *,
        client_id: str | None = None,
        filter: str | None = None,
        durable: bool = True,
        no_local: bool = False,
        recovery_point: str | date | None = None,
        max_backlog: int | None = 1,
        lease_period: Duration | None = None,
    ) -> Subscription:
        """Begin to receive what is published from now on; make the subscription, unless it is there.

        A durable subscription is a folder, and goes on getting messages while no consumer receives. A later call with
        its name and client id shares it. If that call has another filter, another `no_local` or another topic, it first
        removes the subscription and its messages, as JMS has it, unless its routes took messages. A subscription that
        is not durable is for this call alone, and goes when it is closed.

        Args:
            name: the subscription's name.
            client_id: whose it is; None takes the topic object's. A durable one needs a client id.
            filter: only messages that match it come into the subscription.
            durable: keep the subscription, and fill it, while no consumer receives.
            no_local: leave out what is published under the same client id.
            recovery_point: where a new subscription begins in what the topic has archived: `epoch`, `now`, `creation`,
                an id that dropq made, an ISO 8601 date or time; None is the topic's recovery_point, else `now`.
            max_backlog, lease_period: as for `Queue.subscribe`.

        Raises:
            NoSuchQueue: there is no such topic.
            InvalidName, InvalidFilter, ConfigError: the name or the filter cannot be used.
            Unavailable: the subscription of before is in use.
            StorageError: it was not made; or the routes of the subscription of before took messages.
            ValueError: a durable subscription has no client id.
        """
        subscription = self._subscription(name, client_id, no_local=no_local, durable=durable)
        queue = self._made(subscription, filter, recovery_point, durable=durable)
        return queue.subscribe(client_id=subscription.client_id, max_backlog=max_backlog, lease_period=lease_period)

    def create_subscription(
        self,
        name: str,
        *,
        client_id: str | None = None,
        filter: str | None = None,
        no_local: bool = False,
        recovery_point: str | date | None = None,
    ) -> Queue:
        """Make a durable subscription, as `subscribe` does, but receive nothing yet; return its queue."""
        subscription = self._subscription(name, client_id, no_local=no_local, durable=True)
        return self._made(subscription, filter, recovery_point, durable=True)

    def _made(
        self,
        subscription: SubscriptionName,
        filter: str | None,
        recovery_point: str | date | None,
        *,
        durable: bool,
        force: bool = False,
    ) -> Queue:
        from dropq.topics import subscriptions
        from dropq.upkeep.archived import checked
        from dropq.upkeep.recovery import recover_if_needed

        if filter is not None:
            from dropq.filters import check_chooses, compile_filter

            check_chooses(filter)
            with suppress(Unavailable):  # who distributes may have the extra that this process lacks
                compile_filter(filter)
        address, marker = subscriptions.subscribe(
            self._context,
            subscription,
            {} if filter is None else {"filter": filter},
            recovery_point=self._context.config.recovery_point if recovery_point is None else checked(recovery_point),
            is_ephemeral=not durable,
            force=force,
        )
        queue = self.root.queue(address)
        with error_context(f"subscription {address} is made, and what the topic archived comes with the next sweep"):
            recover_if_needed(queue.context)
        if marker is not None:
            queue._at_end = partial(_remove, self.root, queue.layout, marker)
        return queue

    def _subscription(self, name: str, client_id: str | None, *, no_local: bool, durable: bool) -> SubscriptionName:
        client_id = client_id or self.client_id
        if durable:
            if client_id is None:
                raise ValueError(
                    f"subscription {name!r} of topic {self.name}: a durable subscription needs a client_id, by which "
                    "it is found again; nothing was made"
                )
            return SubscriptionName(name, client_id, no_local)
        unique = secrets.token_hex(3)
        host = socket.gethostname().split(".")[0][:9]
        return SubscriptionName(f"{name}-{unique}", client_id or f"{host}-{os.getpid()}", no_local)

    def unsubscribe(self, name: str, *, client_id: str | None = None, force: bool = False) -> None:
        """Remove a durable subscription with what it holds; a copy that is on its way ends in the topic's error/.

        Args:
            name: the subscription's name.
            client_id: whose it is; None takes the topic object's.
            force: also remove the messages that its routes took, in its routing/.

        Raises:
            NoSuchQueue: there is no such subscription.
            Unavailable: it is in use; nothing was changed.
            StorageError: its routes took messages, and `force` is false; nothing was changed.
            ValueError: there is no client id.
        """
        from dropq.topics import subscriptions

        with error_context("no subscription was removed"):
            found = self._found(name, client_id)
        for queue in found:
            subscriptions.remove(self.root.context, queue.name, force=force)

    def _found(self, name: str, client_id: str | None) -> list[Queue]:
        """Return the topic's own subscriptions of a name and client: with local messages, without, or both."""
        from dropq.topics import subscriptions

        wanted = self._subscription(name, client_id, no_local=False, durable=True)
        found = [each for each in subscriptions.of_client(self.root.context, wanted, self.name) if self._has(each)]
        if not found:
            if not self.exists():
                _ = self._context  # raises what is wrong with the topic
            raise NoSuchQueue(
                f"topic {self.name} has no subscription {name!r} of client {wanted.client_id!r}: "
                f"{self._nearest(wanted)}`dropq topic ls {self.name}` shows which it has"
            )
        return [self.root.queue(address) for address in found]

    def _nearest(self, wanted: SubscriptionName) -> str:
        """Return a hint at the subscription with the most similar name and client; "" if none is similar."""
        folders = [queue.name.partition("/")[2] for queue in self.subscriptions()]
        near = get_close_matches(wanted.folder, folders, n=1)
        found = SubscriptionName.of(near[0]) if near else None
        return "" if found is None else f"is it {found.name!r} of client {found.client_id!r}? "

    def _has(self, address: str) -> bool:
        return address.startswith(f"{self.name}/")

    def subscriptions(self) -> list[Queue]:
        """Return the topic's own subscriptions, ordered by name."""
        return [queue for queue in self.root.queues() if self._has(queue.name)]

    def close(self) -> None:
        """Close what the object has opened."""
        self.queue.close()

    def __enter__(self) -> Topic:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def route(root: Root, *, once: bool = False, stop: Stop | threading.Event | None = None) -> dict[str, dict[str, int]]:
    """Serve the routes and selectors of every queue and subscription of a root, and distribute what is published.

    It runs until it is asked to stop. A queue that comes later, or gets its first route or selector, is served within
    about a second; among thousands of queues within about five. A queue that cannot be served, or is deleted, is
    skipped, with a warning in the log. A message that no route and no selector takes stays in target/. SIGTERM, SIGHUP
    and Ctrl-C ask to stop, if this is the main thread and the program does not handle them.

    Args:
        once: end after one pass over each queue.
        stop: asks to stop; a `threading.Event` is seen within a second.

    Returns:
        How many messages each route and each selector took, by its name, and by the address of its queue.

    Raises:
        StorageError: the root cannot be listed; what was moved stays moved.
    """
    from dropq.routing import Routers, Serving
    from dropq.routing.serve import serve_once
    from dropq.upkeep.sweep import sweeps_of_routers
    from dropq.worker.loop import stop_if_asked

    routers = Routers(root.context, sweep=sweeps_of_routers())
    serving = Serving(routers)
    with stop_if_asked(stop) as asked, asked.waking(serving.wake):
        try:
            if once:
                serve_once(routers, lambda: asked.asked)
            else:
                serving.run(lambda: asked.asked)
        finally:
            routers.close()
    return {address: dict(taken.routes + taken.selectors) for address, taken in routers.taken.items() if any(taken)}


def _remove(root: Root, layout: QueueLayout, marker: EphemeralMarker) -> None:
    from dropq.topics import subscriptions

    marker.end()
    with suppress(NoSuchQueue):  # RACE: a sweep was first
        subscriptions.take_away(root.context, layout, force=True)


def _seconds(period: Duration | None) -> float | None:
    return None if period is None else parse_duration(period)


#: What `subscribe` imports.
_OF_CONSUMERS = ("dropq.queue.subscription", "dropq.upkeep.sweep")


def _finish_imports() -> None:
    """Import before a fork what consumers need, and wait for what other threads are importing.

    They are not in the child, which would wait for the end of such an import for ever.
    """
    if threading.active_count() > 1:
        for name in (*_OF_CONSUMERS, *filter(_is_of_ours, [*sys.modules])):
            with suppress(ImportError):
                import_module(name)  # returns at once where it was imported


def _is_of_ours(module: str) -> bool:
    return module.startswith(("dropq.", "watchdog."))  # the library that a wait for messages imports, too


os.register_at_fork(before=_finish_imports)
