"""The verbs of queues, subscriptions and messages for asyncio: each runs in a thread, and its task waits for it.

A cancelled receive holds no message: what its thread has claimed is back in the queue, uncounted, when the
cancellation arrives. A cancelled ack that waits for room to send changes nothing. Any other verb that is cancelled runs
to its end first, so it never happens by half.

**Threads.** Tasks that wait would use up a pool that others share, such as that of `asyncio.to_thread`; then nobody
could settle. So each `Queue` has threads of its own, made when they are needed: up to `THREADS` for verbs that end
soon, as many for sends, which may wait for room in that queue, as many for replies, and as many for acks that send,
which may wait for room in another; and up to `REQUESTS` for requests, which wait for their answers. Each `Subscription`
has one more, in which one receive waits for a message, and the others wait for their turn. Any number of tasks may
wait, in any number of event loops. The end of the program waits for none of these threads: what they hold then goes
back, as after a crash.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial, wraps
from inspect import signature
from types import TracebackType
from typing import IO, Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import dropq.api
import dropq.queue.bundling
import dropq.queue.message
import dropq.queue.subscription
from dropq.durations import Duration, parse_duration
from dropq.errors import DropqError, LeaseLost
from dropq.format.layout import STATES
from dropq.queue.outputs import Out
from dropq.queue.sender import Sent
from dropq.queue.waiting import Ending
from dropq.storage.liveness import FORKS

__all__ = ["Message", "Queue", "RecordWriter", "Subscription"]

log = logging.getLogger("dropq")

#: How many threads a queue has for verbs that end soon, for sends, for replies, and for acks that send.
THREADS = 8
#: How many requests of a queue wait for their answers at once.
REQUESTS = 64
#: Seconds after which a thread ends that has nothing to do.
IDLE = 5.0

T = TypeVar("T")
P = ParamSpec("P")


def _taking(
    verb: Callable[Concatenate[dropq.api.Queue, P], object],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Queue, P], T]]:
    """Give a verb the parameters of the one for threads, as type checkers and `help` show them."""

    def taking(awaited: Callable[..., T]) -> Callable[Concatenate[Queue, P], T]:
        returned = signature(awaited).return_annotation
        awaited.__signature__ = signature(verb).replace(return_annotation=returned)  # type: ignore[attr-defined]
        return awaited

    return taking


class Queue:
    """A queue, for asyncio. Make it after a fork, not before.

    Args:
        queue: the queue; threads may go on using it. Its other verbs are called by `asyncio.to_thread`.
    """

    def __init__(self, queue: dropq.api.Queue) -> None:
        #: The queue as threads use it.
        self.queue = queue
        self._verbs = _Threads(THREADS, "dropq-verbs")
        self._sends = _Threads(THREADS, "dropq-sends")
        self._replies = _Threads(THREADS, "dropq-replies")
        self._acks = _Threads(THREADS, "dropq-acks")
        self._requests = _Threads(REQUESTS, "dropq-requests")
        self._forks = FORKS.count
        self._own: Subscription | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<aio.Queue of {self.queue!r}>"

    # -- sending ---------------------------------------------------------------------------------------------

    @_taking(dropq.api.Queue.send)
    async def send(self, body: bytes | str, **fields: Any) -> Sent:
        """Send a message, as `dropq.Queue.send` does.

        A cancelled send ends first, so it also waits for room where the queue makes senders wait. The message was then
        sent, unless the cancellation has an error as its cause; `find` shows it to a sender that gave a `message_id`.
        """
        return await self._send(partial(self.queue.send, body, **fields))

    async def send_json(self, value: object, **fields: Any) -> Sent:
        """Send a value as JSON, as `dropq.Queue.send_json` does; cancelled as `send` is."""
        return await self._send(partial(self.queue.send_json, value, **fields))

    async def send_many(self, messages: Iterable[bytes | str | Mapping[str, Any]]) -> list[Sent]:
        """Send messages, as `dropq.Queue.send_many` does, which takes them in a thread; cancelled as `send` is."""
        return await self._send(partial(self.queue.send_many, messages))

    async def send_file(self, path: str | os.PathLike[str] | IO[bytes], *, move: bool = False, **fields: Any) -> Sent:
        """Send a file's content, as `dropq.Queue.send_file` does; cancelled as `send` is."""
        return await self._send(partial(self.queue.send_file, path, move=move, **fields))

    @_taking(dropq.api.Queue.record_writer)  # type: ignore[arg-type]  # a field could be called self
    def record_writer(self, *format: str, **options: Any) -> RecordWriter:
        """Return a writer, with the arguments of `dropq.Queue.record_writer`; `async with` opens and closes it."""
        return RecordWriter(self, partial(self.queue.record_writer, *format, **options))

    async def request(self, body: bytes | str, timeout: Duration | None, **fields: Any) -> Message | None:
        """Send a message and wait for the answer to it, as `dropq.Queue.request` does.

        If the task is cancelled, nothing is held: the temporary queue is gone when the cancellation arrives. The
        request may have been sent, and its answer is refused to its sender. Up to 64 requests wait at once; any other
        waits for its turn, and is sent then.
        """
        ending = Ending()
        act = partial(self.queue._request, partial(self.queue.send, body), timeout, fields, ending)
        answer = await _to_its_end(self._submit(act, self._requests), ending.give_up)
        return None if answer is None else Message(self, answer)

    # -- receiving -------------------------------------------------------------------------------------------

    @_taking(dropq.api.Queue.subscribe)
    def subscribe(self, **options: Any) -> Subscription:
        """Return a subscription, with the arguments of `dropq.Queue.subscribe`; `async with` opens and closes it."""
        return Subscription(self, partial(self.queue.subscribe, **options))

    async def messages(
        self,
        *,
        client_id: str | None = None,
        filter: str | None = None,
        max_backlog: int | None = 1,
        lease_period: Duration | None = None,
    ) -> AsyncIterator[Message]:
        """Yield messages as they come, for ever, on a subscription that ends with the loop; settle each.

        Args:
            client_id, filter, max_backlog, lease_period: as for `dropq.Queue.subscribe`.

        Raises:
            BacklogReached: the loop has not settled as many messages as it may hold; they go back.
        """
        subscription = self.subscribe(
            client_id=client_id, filter=filter, max_backlog=max_backlog, lease_period=lease_period
        )
        try:
            async for message in subscription:
                yield message
        finally:
            await subscription.close()

    async def receive(self, timeout: Duration | None = 0) -> Message | None:
        """Claim the next message, as `dropq.Queue.receive` does; cancelled as `Subscription.receive` is."""
        with self._lock:
            own = self._own = self._own or self.subscribe(max_backlog=None)
        return await own.receive(timeout)

    async def claimed(self, receipt: str) -> Message:
        """Return a held message by its receipt, as `dropq.Queue.claimed` does."""
        return Message(self, await self._run(partial(self.queue.claimed, receipt)))

    async def ack(self, id: str, defer: bool = False) -> bool:
        """Acknowledge a message by its id, as `dropq.Queue.ack` does; a cancelled ack ends first."""
        return await self._run(partial(self.queue.ack, id, defer))

    async def find(self, id: str, states: Iterable[str] = STATES) -> Message:
        """Return a message by its id, its file name or its receipt, as `dropq.Queue.find` does."""
        return Message(self, await self._run(partial(self.queue.find, id, states)))

    async def counts(self) -> dict[str, int]:
        """Return the number of messages in each state."""
        return await self._run(self.queue.counts)

    async def close(self) -> None:
        """End the subscription of `receive`, return what it holds, and remove what `request` keeps for its answers."""
        with self._lock:
            own, self._own = self._own, None
        try:
            if own is not None:
                await own.close()
        finally:
            if self.queue._requesters is not None:
                await self._run(self.queue._end_requests)

    async def __aenter__(self) -> Queue:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # -- private ---------------------------------------------------------------------------------------------

    async def _run(self, act: Callable[[], T], threads: _Threads | None = None) -> T:
        return await _to_its_end(self._submit(act, threads))

    async def _send(self, act: Callable[[], T]) -> T:
        return await self._run(act, self._sends)

    def _submit(self, act: Callable[[], T], threads: _Threads | None = None) -> concurrent.futures.Future[T]:
        if self._forks != FORKS.count:
            raise DropqError(f"{self!r} was made before a fork, and its threads are the parent's: make another here")
        return (threads or self._verbs).submit(act)


class RecordWriter:
    """Sends records, many in one message, for asyncio; `Queue.record_writer` makes it, `async with` opens it.

    Each verb runs in a thread, which costs more than `dropq.RecordWriter.write` does: a task that has many records at
    once gives them to that, in a thread of its own. A verb that is cancelled takes its record, or ends, first.
    """

    def __init__(self, queue: Queue, opening: Callable[[], dropq.queue.bundling.RecordWriter]) -> None:
        self._queue = queue
        self._opening = opening
        self._writer: dropq.queue.bundling.RecordWriter | None = None

    async def __aenter__(self) -> RecordWriter:
        self._writer = await self._queue._run(self._opening)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @property
    def writer(self) -> dropq.queue.bundling.RecordWriter:
        """The writer as threads use it.

        Raises:
            DropqError: `async with` has not opened it.
        """
        if self._writer is None:
            raise DropqError("a record writer is opened by `async with`; nothing was taken")
        return self._writer

    async def write(self, record: Any) -> None:
        """Take a record, as `dropq.RecordWriter.write` does."""
        await self._queue._send(partial(self.writer.write, record))

    async def send(self, record: Any) -> Sent:
        """Take a record, and wait until its message is durable; what other tasks send meanwhile shares a message.

        If the task is cancelled, the record was taken, and is sent, unless the cancellation has an error as its cause.

        Raises:
            ValueError, DropqError: as of `dropq.RecordWriter.send`, and of its future.
        """
        return await _to_its_end(await self._queue._send(partial(self.writer.send, record)))

    async def flush(self) -> list[Sent]:
        """Send what was taken, as `dropq.RecordWriter.flush` does."""
        return await self._queue._send(self.writer.flush)

    async def close(self) -> None:
        """Take no more records, and send what was taken, as `dropq.RecordWriter.close` does."""
        await self._queue._send(self.writer.close)


class _Threads:
    """Up to `most` threads that call functions, made when they are needed.

    The threads of `concurrent.futures` would keep the program from ending while a receive waits. They take no calls
    once the main thread has ended, although event loops in other threads still have messages to settle.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._calls: deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._threads = self._free = 0

    def submit(self, act: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Let a thread call a function; return what becomes of the call."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._changed:
            if self._free <= len(self._calls) and self._threads < self._most:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._threads += 1
            self._calls.append((future, act))
            self._changed.notify()
        return future

    def _run(self) -> None:
        while (call := self._next()) is not None:
            future, act = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(act())
                except BaseException as error:
                    future.set_exception(error)
            del call, future, act  # nothing is kept alive by a thread that waits

    def _next(self) -> tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None:
        """Wait for a call; return None if none has come, and let the thread end."""
        with self._changed:
            if not self._calls:
                self._free += 1
                self._changed.wait_for(lambda: self._calls, IDLE)
                self._free -= 1
            if self._calls:
                return self._calls.popleft()
            self._threads -= 1
            return None


async def _to_its_end(call: concurrent.futures.Future[T], give_up: Callable[[], object] | None = None) -> T:
    """Wait for a call that runs in a thread; raise a cancellation only when the call has ended, from its error.

    If the wait is cancelled, `give_up` makes the call end soon.
    """
    ended = asyncio.wrap_future(call)
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except BaseException as error:
            if give_up is not None and not call.cancel():
                give_up()
            if not isinstance(error, asyncio.CancelledError):
                raise  # the task was thrown away: nobody can wait
            cancelled = error
    if call.cancelled():
        raise cancelled or asyncio.CancelledError  # its turn had not come
    if cancelled is not None:
        raise cancelled from ended.exception()
    return ended.result()


def _looked_at(ended: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging the error of a call: its task raises the error, or `_return` logs it."""
    if not ended.cancelled():
        ended.exception()


class _Call:
    """A receive in a thread: a task takes its messages, or the call is given up, and they go back.

    RACE: the task takes; its cancellation gives up, and so does a close, perhaps in another loop. The first decides.
    """

    def __init__(self) -> None:
        self.given_up = False
        self._taken = False
        self._lock = threading.Lock()
        self.future: concurrent.futures.Future[list[dropq.queue.message.Message]]

    def take(self) -> bool:
        """Return whether the messages are the task's; False if the call was given up."""
        with self._lock:
            self._taken = not self.given_up
            return self._taken

    def give_up(self) -> bool:
        """Return whether the messages go back; False if the task has them."""
        with self._lock:
            self.given_up = not self._taken
            return self.given_up


class _Taker:
    """Takes the records of a message for tasks; the next task gets the record that a cancelled task was to get."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._ahead: dropq.queue.message.Record | None = None

    async def next(self, records: Iterator[dropq.queue.message.Record]) -> dropq.queue.message.Record | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return ahead
        call = self._queue._submit(partial(next, records, None))
        try:
            return await _to_its_end(call)
        except asyncio.CancelledError:
            if call.done() and not call.cancelled() and call.exception() is None:
                self._ahead = call.result()
            raise


class Subscription:
    """A consumer of one queue, for asyncio; `Queue.subscribe` makes it, and `async with` opens and closes it."""

    def __init__(self, queue: Queue, opening: Callable[[], dropq.queue.subscription.Subscription]) -> None:
        self.queue = queue
        self._opening = opening
        self._opened: dropq.queue.subscription.Subscription | None = None
        self._waiter = _Threads(1, "dropq-receive")
        self._calls: set[_Call] = set()
        self._unseen: deque[dropq.queue.message.Message] = deque()
        self._taker = _Taker(queue)
        self._closed = False
        self._lock = threading.Lock()
        self._use = threading.RLock()  # held in threads alone, while the subscription is opened or closed

    # -- receiving -------------------------------------------------------------------------------------------

    async def receive(self, timeout: Duration | None = 0) -> Message | None:
        """Claim the next message, as `dropq.Subscription.receive` does; return None also if it was closed meanwhile.

        If the task is cancelled, it holds nothing: what was claimed is in the queue again, and was not counted, before
        the cancellation arrives. At most once, where nothing can go back, the next receive gets it.

        Raises:
            DropqError: the subscription is closed.
        """
        messages = await self._receive(1, timeout)
        return messages[0] if messages else None

    async def receive_many(self, n: int, timeout: Duration | None = 0) -> list[Message]:
        """Claim up to n messages: wait for the first, then take as many of the others as are there.

        Cancelled as `receive` is: it holds none of them.

        Raises:
            ValueError: n is below 1, or more than the subscription may hold.
            DropqError: the subscription is closed.
        """
        return await self._receive(n, timeout)

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages as they come, until it is closed; settle each before the loop goes on.

        Raises:
            BacklogReached: it holds as many messages as it may, and all were handed to loops of this task: no other
                can come. They stay held.
        """
        while not self._closed:
            messages = await self._receive(1, None, looper=asyncio.current_task())
            if not messages:
                return
            yield messages[0]

    async def records(
        self, format: str | None = None, timeout: Duration | None = None, checkpoint: Duration | None = None
    ) -> AsyncIterator[dropq.queue.message.Record]:
        """Yield the records of one message after the other, as `dropq.Subscription.records` does, until it is closed.

        A record's verbs are not awaited: they change nothing on disk. Their commit happens as the loop goes on, in a
        thread. A task that is cancelled in the loop loses no record: another loop gets it.

        Args, Raises: as of `dropq.Subscription.records`.
        """
        checkpoint = None if checkpoint is None else parse_duration(checkpoint)  # before a message is taken
        while not self._closed:
            opened = await self.queue._run(self._open)
            bundle = opened._bundle
            if bundle is None or not bundle.message.held:  # else an earlier loop left it
                self._taker = _Taker(self.queue)
                messages = await self._receive(1, timeout)
                if not messages:
                    return
                opening = partial(opened._open_bundle, messages[0].message, format, checkpoint)
                bundle = await self.queue._run(opening)
            records = iter(bundle)
            while (record := await self._taker.next(records)) is not None:
                yield record
            opened._check_bundle(bundle)

    async def ack_many(self, messages: Iterable[Message]) -> list[Message]:
        """Acknowledge messages, made durable by one sync; return those whose claims were gone.

        A cancelled ack_many ends first: `held` is false of those that it acknowledged.
        """
        by_object = {id(each.message): each for each in messages}
        unwrapped = [each.message for each in by_object.values()]
        lost = await self.queue._run(lambda: self._open().ack_many(unwrapped))
        return [by_object[id(message)] for message in lost]

    @property
    def held(self) -> tuple[Message, ...]:
        """The messages that it has handed out and that are not settled."""
        opened = self._opened
        return () if opened is None else tuple(Message(self.queue, message) for message in opened.held)

    # -- opening and ending ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Return what it holds to target/, counted as a delivery, and end; closing twice is no error.

        Receives that wait return None at once, and what their threads have claimed goes back uncounted. A cancelled
        close ends first.
        """
        await self.queue._run(partial(self._end, self._give_up_all()))

    async def __aenter__(self) -> Subscription:
        try:
            await self.queue._run(self._open)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, GeneratorExit):  # the task was thrown away: nobody can wait
            self._end(self._give_up_all())
        else:
            await self.close()

    # -- private ---------------------------------------------------------------------------------------------

    async def _receive(self, n: int, timeout: Duration | None, looper: object = None) -> list[Message]:
        seconds = None if timeout is None else parse_duration(timeout)
        messages = await self._attempt(n, 0, looper)
        if not messages and seconds != 0 and not self._closed:
            messages = await self._attempt(n, seconds, looper)
        return messages

    async def _attempt(self, n: int, seconds: float | None, looper: object) -> list[Message]:
        """Look once for n messages, or wait for the first of them."""
        call = self._begin(n, seconds, looper)
        ended = asyncio.wrap_future(call.future)
        ended.add_done_callback(_looked_at)
        try:
            done, _ = await asyncio.wait([ended], timeout=seconds or None)
            if not done and not call.future.cancel():  # it is its turn, and its thread knows the time, too
                await asyncio.wait([ended])
        except BaseException as error:
            call.give_up()
            self._abandon(call)
            if isinstance(error, asyncio.CancelledError):
                await self.queue._run(partial(self._return, call))
            else:  # the task was thrown away: nobody can wait
                call.future.add_done_callback(lambda _: self._return(call))
            raise
        if not call.take():
            return []  # it was closed, and what was claimed goes back
        self._calls.discard(call)
        if call.future.cancelled():
            return []  # its time was over before its turn came
        messages = call.future.result()
        if looper is not None and self._opened is not None:
            for message in messages:
                self._opened._note_loop(message, looper)
        return [Message(self.queue, message) for message in messages]

    def _begin(self, n: int, seconds: float | None, looper: object) -> _Call:
        """Let a thread receive: a thread for verbs if it only looks, else the subscription's own thread."""
        call = _Call()
        until = None if seconds is None else time.monotonic() + seconds
        claim = partial(self._claim, call, n, until, looper)
        with self._lock:
            if self._closed:
                raise DropqError(f"a subscription on queue {self.queue.queue.name} is closed: open another")
            call.future = self.queue._submit(claim, None if seconds == 0 else self._waiter)
            self._calls.add(call)
        return call

    def _claim(self, call: _Call, n: int, until: float | None, looper: object) -> list[dropq.queue.message.Message]:
        """In a thread: receive, unless the call is given up."""
        subscription = self._open()
        if call.given_up:
            return []
        if self._unseen:
            with suppress(IndexError):  # RACE: another thread took it
                return [self._unseen.popleft()]
        if looper is not None:
            subscription._check_loop(looper)
        left = None if until is None else max(until - time.monotonic(), 0)
        messages = subscription._receive_many(n, left, lambda: call.given_up)
        for message in messages:
            _ = message.id  # reads the name, and perhaps a file, once and here
        return messages

    def _abandon(self, call: _Call) -> None:
        """Let a call that was given up end soon; this does not wait for it."""
        opened = self._opened
        # RACE: a thread that has not opened it yet sees afterwards that the call was given up.
        if not call.future.cancel() and opened is not None:
            opened._waiting.wake()

    def _return(self, call: _Call) -> None:
        """In a thread: wait for a call that was given up, and return what it claimed. A second time changes nothing."""
        messages: list[dropq.queue.message.Message] = []
        try:
            messages = call.future.result()
        except concurrent.futures.CancelledError:
            pass  # it had not begun
        except Exception as error:
            log.warning("queue %s: a receive that was given up failed: %s", self.queue.queue.name, error)
        with self._use:
            if call not in self._calls:
                return  # RACE: a close and a cancellation both return it
            self._calls.discard(call)
            for message in messages:
                self._put_back(message)

    def _put_back(self, message: dropq.queue.message.Message) -> None:
        if not message.held:
            self._unseen.append(message)  # it was settled before it was delivered
            return
        try:
            message.release(counted=False)
        except LeaseLost:
            pass  # its lease ran out, and it has gone back
        except DropqError as error:
            what = "a receive that was given up stays held until the subscription is closed"
            log.warning("message %s of %s: %s", message.id, what, error)

    def _open(self) -> dropq.queue.subscription.Subscription:
        """In a thread: return the subscription, opened by the first that needs it."""
        with self._use:
            if self._opened is None:
                if self._closed:
                    raise DropqError(f"a subscription on queue {self.queue.queue.name} is closed: open another")
                self._opened = self._opening()
            return self._opened

    def _give_up_all(self) -> list[_Call]:
        """End all receives; return the calls whose messages no task has."""
        with self._lock:
            self._closed = True
            calls = [call for call in list(self._calls) if call.give_up()]
        for call in calls:
            self._abandon(call)
        return calls

    def _end(self, calls: Iterable[_Call]) -> None:
        """In a thread: return messages that no task has, uncounted; close the subscription, which returns the rest."""
        for call in calls:
            self._return(call)
        with self._use:
            if self._opened is not None:
                self._opened.close()
            if self._unseen:
                ids = ", ".join(message.id for message in self._unseen)
                log.warning("queue %s: settled at most once, and received by nobody: %s", self.queue.queue.name, ids)
                self._unseen.clear()


class _Plain(Generic[T]):
    """A property that a message for asyncio has from the message that threads use."""

    def __init__(self, of: Callable[[dropq.queue.message.Message], T]) -> None:
        self.of = cast("property", of)
        self.__doc__ = self.of.__doc__

    @overload
    def __get__(self, message: None, owner: type) -> _Plain[T]: ...
    @overload
    def __get__(self, message: Message, owner: type) -> T: ...
    def __get__(self, message: Message | None, owner: type) -> T | _Plain[T]:
        return self if message is None else cast("T", self.of.__get__(message.message))


def _awaited(
    verb: Callable[Concatenate[dropq.queue.message.Message, P], T],
) -> Callable[Concatenate[Message, P], Coroutine[Any, Any, T]]:
    """Return a verb of a message for asyncio: the one that threads use, with its help, in a thread."""

    @wraps(verb)
    async def awaited(message: Message, /, *args: P.args, **kwargs: P.kwargs) -> T:
        act: Callable[P, T] = getattr(message.message, verb.__name__)
        return await message.queue._run(partial(act, *args, **kwargs))

    return awaited


class Message:
    """A message, for asyncio: its metadata are plain properties, and what reads or moves its file is awaited.

    A verb that settles it, or renews its lease, raises what `dropq.Message.ack` raises. If its task is cancelled, the
    verb ends first: when the cancellation arrives, `held` and `state` say what became of the message, and an error of
    the verb is the cancellation's cause.
    """

    def __init__(self, queue: Queue, message: dropq.queue.message.Message) -> None:
        self.queue = queue
        #: The message as threads use it.
        self.message = message
        self._taker = _Taker(queue)

    def __repr__(self) -> str:
        return f"<aio.Message of {self.message!r}>"

    id = _Plain(dropq.queue.message.Message.id)
    name = _Plain(dropq.queue.message.Message.name)
    file = _Plain(dropq.queue.message.Message.file)
    path = _Plain(dropq.queue.message.Message.path)
    state = _Plain(dropq.queue.message.Message.state)
    receipt = _Plain(dropq.queue.message.Message.receipt)
    held = _Plain(dropq.queue.message.Message.held)
    priority = _Plain(dropq.queue.message.Message.priority)
    type = _Plain(dropq.queue.message.Message.type)
    message_class = _Plain(dropq.queue.message.Message.message_class)
    correlation_id = _Plain(dropq.queue.message.Message.correlation_id)
    filename = _Plain(dropq.queue.message.Message.filename)
    reply_to = _Plain(dropq.queue.message.Message.reply_to)
    properties = _Plain(dropq.queue.message.Message.properties)
    timestamp = _Plain(dropq.queue.message.Message.timestamp)
    expiration = _Plain(dropq.queue.message.Message.expiration)
    not_before = _Plain(dropq.queue.message.Message.not_before)
    since = _Plain(dropq.queue.message.Message.since)
    delivery_count = _Plain(dropq.queue.message.Message.delivery_count)
    cancels = _Plain(dropq.queue.message.Message.cancels)
    deaths = _Plain(dropq.queue.message.Message.deaths)
    redelivered = _Plain(dropq.queue.message.Message.redelivered)
    record_count = _Plain(dropq.queue.message.Message.record_count)
    first_record = _Plain(dropq.queue.message.Message.first_record)
    record_number = _Plain(dropq.queue.message.Message.record_number)
    deadline = _Plain(dropq.queue.message.Message.deadline)
    owner = _Plain(dropq.queue.message.Message.owner)
    origin = _Plain(dropq.queue.message.Message.origin)
    dead_letter_reason = _Plain(dropq.queue.message.Message.dead_letter_reason)

    async def body(self) -> bytes:
        """Return its whole body."""
        return await self.queue._run(lambda: self.message.body)

    async def text(self) -> str:
        """Return its body as UTF-8 text; bytes that are not UTF-8 become U+FFFD."""
        return await self.queue._run(lambda: self.message.text)

    async def reason(self) -> Mapping[str, object] | None:
        """Return why it lies in error/ or expired/, as `dropq.Message.reason` does; None if that is unknown."""
        return await self.queue._run(lambda: self.message.reason)

    async def records(self, format: str | None = None) -> AsyncIterator[dropq.queue.message.Record]:
        """Take its body apart into records, as `dropq.Message.records` does; their verbs are not awaited.

        A task that is cancelled in the loop loses no record: another loop gets it.

        Args, Raises: as of `dropq.Message.records`.
        """
        records = await self.queue._run(partial(self.message.records, format))
        while (record := await self._taker.next(records)) is not None:
            yield record

    async def reply(self, body: bytes | str, **fields: Any) -> Sent:
        """Send an answer, as `dropq.Message.reply` does; cancelled as `Queue.send` is."""
        return await self.queue._run(partial(self.message.reply, body, **fields), self.queue._replies)

    async def ack(self, *, send: Out | Iterable[Out] = ()) -> None:
        """Acknowledge it, and send what was made of it, as `dropq.Message.ack` does.

        If it is cancelled while it waits for room, nothing was sent, and the message is still held.
        """
        if send == ():
            return await self.queue._run(self.message.ack)
        ending = Ending()
        act = partial(self.message._ack_sending, send, ending.has_come)
        await _to_its_end(self.queue._submit(act, self.queue._acks), ending.give_up)

    json = _awaited(dropq.queue.message.Message.json)
    size = _awaited(dropq.queue.message.Message.size)
    nack = _awaited(dropq.queue.message.Message.nack)
    release = _awaited(dropq.queue.message.Message.release)
    fail = _awaited(dropq.queue.message.Message.fail)  # type: ignore[arg-type]  # a detail could be called self
    reject = _awaited(dropq.queue.message.Message.reject)  # type: ignore[arg-type]  # a detail could be called self
    expire = _awaited(dropq.queue.message.Message.expire)
    extend = _awaited(dropq.queue.message.Message.extend)

    async def __aenter__(self) -> Message:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Acknowledge it, or fail it on an exception; a cancelled task gives it back, unless it is settled."""
        leave = partial(self.message.__exit__, kind, error, trace)
        if isinstance(error, GeneratorExit):  # the task was thrown away: nobody can wait
            leave()
        else:
            await self.queue._run(leave)
