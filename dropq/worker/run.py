"""Runs a worker: on subscriptions of its own, as users call it, or on those that its caller opened."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import TYPE_CHECKING, Literal, Protocol

from dropq.hints import hinting
from dropq.queue.message import Duration
from dropq.worker.loop import Handler, Stop, Worker, WorkReport, stop_if_asked
from dropq.worker.records import BundleWorker, RecordWorker
from dropq.worker.reporter import Reporter
from dropq.worker.sending import IS_ASYNC, Sendings
from dropq.worker.sources import Sources

if TYPE_CHECKING:
    from dropq.queue.outputs import Destinations
    from dropq.queue.subscription import Subscription

#: What a worker calls its handler with.
By = Literal["message", "record", "bundle"]


class Source(Protocol):
    """A queue that a worker receives from."""

    def subscribe(
        self,
        *,
        max_backlog: int | None,
        lease_period: Duration | None,
        filter: str | None,
        client_id: str | None,
        named: bool,
    ) -> Subscription:
        """Open a subscription."""


@hinting
def work(
    queue: Source | Iterable[Source],
    handler: Handler,
    *,
    concurrency: int = 1,
    until_empty: bool = False,
    fair: bool = False,
    filter: str | None = None,
    client_id: str | None = None,
    lease: Duration | None = None,
    poll: bool = False,
    records: bool = False,
    stop: Stop | threading.Event | None = None,
) -> WorkReport:
    """Handle the messages of a queue, or of several, until asked to stop.

    When the handler returns, its message is acknowledged. If it raises `Retry`, the message is given back; `Reject`
    refuses it; `Halt` gives it back and ends the worker; any other exception fails it and keeps the traceback, but for
    `Fail`, which keeps none. If it returns an `Out`, or several in a list, tuple, set or iterator, or yields them,
    these are sent by the commit that acknowledges the message: all, or none. A handler may also settle its message
    itself. `message.held` turns false when the claim is lost; then, and when its message is to be given back, the
    worker calls the handler's method `cancel(message)`, if there is one, in another thread. That method must return at
    once, and the handler raises `Cancelled`.

    SIGTERM, SIGHUP and Ctrl-C ask the worker to stop, if this is the main thread and the program does not handle them:
    the running handlers finish, and the report says `stopped`. After a second signal the worker gives their messages
    back, and does not wait for handlers that cannot be cancelled. If the signal also ended a program that a handler
    ran, so that the handler failed, its message is given back uncounted.

    With `records`, the handler is called with each record of a message, in order, and the worker acknowledges the
    record, gives it back, refuses it or fails it by itself; `cancel` gets the record's message. What became of the
    records is settled by one commit, after the last of them or at a checkpoint, as `Subscription.records` says. A
    worker that is asked to stop finishes the running record and commits what is settled; what is left waits. Of a
    message that is delivered at most once it finishes all records. It rejects a message that is a table.

    Args:
        queue: the queue, or several: a message is taken from the first of them that has one.
        handler: called with each message, or with each record, in a thread of the worker.
        concurrency: how many messages are handled at a time, each in one thread; the queue's
            max_per_subscription_backlog may be lower.
        until_empty: end when nothing waits in target/ and no handler runs. The worker does not wait for delayed
            messages or for messages that others hold, but it waits for those that a limit, a turn or a barrier keeps
            back. A paused queue counts as empty. Each message is taken once at most, and so is each record; the report
            lists in `left` those that came back. What a checkpoint leaves of a message is taken, too.
        fair: take from several queues by turns, instead of in their order.
        filter: as of `Queue.subscribe`.
        client_id: as of `Queue.subscribe`; a worker with one has named subscriptions.
        lease: how long a claim lasts unless it is renewed; None takes the queue's lease, if it has one.
        poll: list target/ twenty times a second instead of waiting for events.
        records: call the handler with each record; the format is the message's type, else text.
        stop: asks the worker to stop; a `threading.Event` asks once, and is seen within a second.

    Raises:
        ValueError: an argument is none that it takes; no message was taken.
        NoSuchQueue, ConfigError: no message was taken.
        StorageError: a message could not be taken or settled; the running handlers finished first.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency {concurrency}: at least 1")
    if iscoroutinefunction(handler) or isasyncgenfunction(handler):
        raise ValueError(IS_ASYNC)
    if not isinstance(records, bool):
        raise ValueError(f"records {records!r}: True calls the handler with each record, False with each message")
    if isinstance(queue, str):
        raise ValueError(f"work takes a queue, not its name: root.queue({queue!r}) returns it")
    queues = list(queue) if isinstance(queue, Iterable) else [queue]
    if not queues:
        raise ValueError("work takes a queue, or several: there is none")
    with ExitStack() as stack:
        # Ctrl-C must not interrupt a claim after the rename, before the subscription knows of it.
        asked = stack.enter_context(stop_if_asked(stop))
        subscriptions = [
            stack.enter_context(
                each.subscribe(
                    max_backlog=concurrency,
                    lease_period=lease,
                    filter=filter,
                    client_id=client_id,
                    named=bool(client_id),
                )
            )
            for each in queues
        ]
        sources = Sources(subscriptions, fair=fair, poll=poll)
        by: By = "record" if records else "message"
        return run(
            sources, handler, asked, concurrency=concurrency, until_empty=until_empty, by=by, client_id=client_id
        )


def run(
    sources: Sources,
    handler: Handler,
    stop: Stop,
    *,
    concurrency: int = 1,
    until_empty: bool = False,
    by: By = "message",
    reporter: Reporter | None = None,
    destinations: Mapping[str, Destinations] | None = None,
    client_id: str | None = None,
) -> WorkReport:
    """Do what `work` does, with subscriptions that the caller opened, and closes.

    Args:
        sources: the subscriptions; each has a max_backlog of at least `concurrency`.
        by: what the handler is called with: each message, each record, or each `Bundle`, whose records it settles.
        reporter: hears what becomes of each message; None logs what did not end well.
        destinations: where messages go that are made of those of a queue, by its name, as far as that is known.
        client_id: the worker's name, under which it publishes to topics.
    """
    kind = {"message": Worker, "record": RecordWorker, "bundle": BundleWorker}[by]
    with stop.waking(sources.watch.wake):
        sendings = Sendings(dict(destinations or {}), lambda: stop.asked, client_id or "")
        worker = kind(
            sources,
            handler,
            stop,
            reporter or Reporter(),
            concurrency=concurrency,
            until_empty=until_empty,
            sendings=sendings,
        )
        return worker.run()
