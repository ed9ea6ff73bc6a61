"""asyncio: a cancelled receive holds nothing, any other cancelled verb has ended, and closing ends every wait."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import aclosing, asynccontextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from children import in_child
from helpers import first_and_long, make_queue, names_in, only_woken, private, until, where

from dropq import BacklogReached, DropqError, LeaseLost, Out, StorageError, aio
from dropq import Queue as ThreadsQueue
from dropq.lifecycle.timing import Timing
from dropq.policies.send_limits import Wait

#: Consumers list target/ for every look, so that what went back is there for the next.
LISTING = Timing(max_age=0, listing_share=0)
#: How many cancellations arrive in all: at any verb, four ways, and at receives that compete.
AT_ANY_VERB, AT_RECEIVES = 1000, 6000
#: How many steps are taken before all messages are counted.
BATCH = 50


@pytest.fixture
def queue(tmp_path: Path) -> ThreadsQueue:
    return make_queue(tmp_path, timing=LISTING)


class Cancelling:
    """Awaits a coroutine, and cancels its task at a suspension.

    Args:
        coroutine: what is awaited.
        at: the suspension, from 1.
        how: `at once`, as soon as it is suspended; `woken`, when what it waits for is done, but before it goes on;
            `twice`, at once and at the next suspension, too; `any time`, a random moment later.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int, how: str) -> None:
        self._coroutine = coroutine
        self._at = at
        self._how = how
        self.suspended = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        inner, step, value = self._coroutine.__await__(), None, None
        while True:
            try:
                value = inner.send(None) if step is None else inner.throw(step)
            except StopIteration as ended:
                return ended.value
            self.suspended += 1
            self._cancel(value)
            try:
                yield value
            except BaseException as error:
                step = error
            else:
                step = None

    def _cancel(self, waits_for: asyncio.Future[Any] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._how == "twice" and self.suspended == self._at + 1:
            task.cancel()
        if self.suspended != self._at:
            return
        if self._how == "woken" and waits_for is not None:
            waits_for.add_done_callback(lambda _: task.cancel())
        elif self._how == "any time":
            asyncio.get_running_loop().call_later(random.random() / 500, task.cancel)
        else:
            task.cancel()


async def cancelled(coroutine: Coroutine[Any, Any, Any], at: int = 1, how: str = "at once") -> bool:
    """Run a coroutine as a task, cancel it at a suspension, and return whether the cancellation arrived."""

    async def run() -> None:
        await Cancelling(coroutine, at, how)

    task = asyncio.create_task(run())
    await asyncio.wait([task])
    if task.cancelled():
        return True
    task.result()
    return False


class Account:
    """What has to be so of every message, whatever was cancelled: where it is, and how often it was delivered."""

    def __init__(self, queue: ThreadsQueue, how: str, seed: int) -> None:
        self.queue = aio.Queue(queue)
        self.how = how
        self.random = random.Random(seed)
        self.delivered: dict[str, int] = {}
        self.settled: set[str] = set()
        self.cancellations = 0
        self.sent = 0

    async def fill(self) -> None:
        while len(self.delivered) < 6:
            self.sent += 1
            sent = await self.queue.send(b"x", message_id=f"m{self.sent}")
            self.delivered[sent.id] = 0

    async def cancel(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.cancellations += await cancelled(coroutine, self.random.choice((1, 1, 1, 2, 3)), self.how)

    def ended(self, message: aio.Message) -> None:
        """Take down what became of a message that a verb has settled."""
        assert not message.held
        if message.state == "processed":
            del self.delivered[message.id]
            self.settled.add(message.id)
        else:
            assert message.state == "target"
            self.delivered[message.id] += 1

    # -- the steps --

    async def receive(self, subscription: aio.Subscription) -> None:
        got: list[aio.Message] = []

        async def receive() -> None:
            if (message := await subscription.receive(self.random.choice((0, 5)))) is not None:
                got.append(message)

        await self.cancel(receive())
        for message in got:
            await message.release(counted=False)

    async def receive_many(self, subscription: aio.Subscription) -> None:
        got: list[aio.Message] = []

        async def receive() -> None:
            got.extend(await subscription.receive_many(3, "5s"))

        await self.cancel(receive())
        await self.cancel(subscription.ack_many(got))
        for message in got:
            self.ended(message)

    async def settle(self, subscription: aio.Subscription) -> None:
        message = await subscription.receive()
        assert message is not None
        verb = self.random.choice((message.ack, message.nack, message.release))
        await self.cancel(verb())
        self.ended(message)

    async def extend(self, subscription: aio.Subscription) -> None:
        message = await subscription.receive()
        assert message is not None
        await self.cancel(message.extend("1h"))
        assert message.held and message.deadline is not None
        await message.release(counted=False)

    async def use(self, subscription: aio.Subscription) -> None:
        message = await subscription.receive()
        assert message is not None

        async def use() -> None:
            async with message:
                assert await message.body() == b"x"

        await self.cancel(use())
        self.ended(message)

    async def subscribe(self, subscription: aio.Subscription) -> None:
        got: list[aio.Message] = []

        async def consume() -> None:
            async with self.queue.subscribe(max_backlog=None) as other:
                while len(got) < 2 and (message := await other.receive()) is not None:
                    got.append(message)

        await self.cancel(consume())
        for message in got:
            self.delivered[message.id] += 1  # closing counts what was handed out

    async def loop(self, subscription: aio.Subscription) -> None:
        got: list[aio.Message] = []

        async def consume() -> None:
            async with aclosing(self.queue.messages()) as messages:  # type: ignore[type-var]
                async for message in messages:
                    got.append(message)
                    await message.ack()
                    return

        await self.cancel(consume())
        for message in got:
            self.ended(message)

    async def send(self, subscription: aio.Subscription) -> None:
        self.sent += 1
        await self.cancel(self.queue.send(b"x", message_id=f"m{self.sent}"))
        self.delivered[f"m{self.sent}"] = 0

    # -- the count --

    async def check(self, subscription: aio.Subscription) -> None:
        assert subscription.held == ()
        threads = self.queue.queue
        assert names_in(threads, "processing") == []
        assert {message.id: message.delivery_count for message in threads.browse()} == self.delivered
        assert {message.id for message in threads.browse("processed")} == self.settled
        assert subscription._opened is not None
        assert private(threads, "consumers") == [subscription._opened.id]
        assert subscription._calls == set() and not subscription._unseen


@pytest.mark.parametrize("how", first_and_long(["any time", "at once", "woken", "twice"]))
def test_whatever_is_cancelled_every_message_is_where_it_should_be(queue: ThreadsQueue, how: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    account = Account(queue, how, seed)
    random.seed(seed)

    async def run() -> None:
        async with account.queue.subscribe(max_backlog=None) as subscription:
            steps = [account.receive, account.receive, account.receive_many, account.settle, account.extend]
            steps += [account.use, account.subscribe, account.loop, account.send]
            while account.cancellations < AT_ANY_VERB:
                for _ in range(BATCH):
                    await account.fill()
                    await account.random.choice(steps)(subscription)
                await account.check(subscription)
                if len(account.settled) > 100:  # what is listed stays short
                    queue.prune(keep_count=0)
                    account.settled.clear()

    asyncio.run(run())


def test_receives_that_compete_and_are_all_cancelled_hold_nothing(queue: ThreadsQueue) -> None:
    queue.send_many([b"x"] * 10)
    cancellations = 0

    async def receive(subscription: aio.Subscription) -> None:
        if (message := await subscription.receive(None)) is not None:
            await message.release(counted=False)

    async def run() -> None:
        nonlocal cancellations
        async with aio.Queue(queue).subscribe(max_backlog=None) as subscription:
            while cancellations < AT_RECEIVES:
                ways = [random.choice([(1, "at once"), (1, "woken"), (1, "twice"), (2, "at once")]) for _ in range(100)]
                cancellations += sum(await asyncio.gather(*(cancelled(receive(subscription), *way) for way in ways)))
                assert subscription.held == () and names_in(queue, "processing") == []
                assert [message.delivery_count for message in queue.browse()] == [0] * 10

    asyncio.run(run())


@pytest.mark.parametrize("how", ["at once", "woken", "twice"])
def test_a_receive_has_a_suspension_for_each_kind_of_cancellation(queue: ThreadsQueue, how: str) -> None:
    """Otherwise the test above would cancel nothing."""
    queue.send(b"x")

    async def run() -> None:
        async with aio.Queue(queue).subscribe() as subscription:
            counting = Cancelling(subscription.receive(), 1000, how)
            message = await asyncio.ensure_future(_awaited(counting))
            assert counting.suspended >= 1
            await message.release(counted=False)
            assert await cancelled(subscription.receive(), 1, how)
            assert subscription.held == () and where(queue) == {"target": [b"x"]}

    asyncio.run(run())
    assert next(queue.browse()).delivery_count == 0


async def _awaited(cancelling: Cancelling) -> Any:
    return await cancelling


# -- waiting -----------------------------------------------------------------------------------------------------------


def waits(subscription: aio.Subscription) -> bool:
    """Whether a thread waits for a message."""
    return subscription._opened is not None and subscription._opened._waiting.waits


async def soon(condition: Callable[[], object], what: str) -> None:
    """Wait in a thread until something is so, while the loop goes on."""
    await asyncio.to_thread(until, condition, what)


@asynccontextmanager
async def waiting(subscription: aio.Subscription, count: int = 1) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Tasks that wait for a message, one in its turn."""
    tasks = [asyncio.create_task(subscription.receive(None)) for _ in range(count)]
    await soon(lambda: waits(subscription) and len(subscription._calls) == count, "all wait")
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_a_message_ends_the_wait_of_one_task(queue: ThreadsQueue) -> None:
    async def run() -> None:
        async with aio.Queue(queue).subscribe(max_backlog=None) as subscription, waiting(subscription, 3) as tasks:
            await subscription.queue.send(b"x")
            done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            (message,) = [task.result() for task in done]
            assert len(others) == 2
            await message.ack()

    asyncio.run(run())
    assert where(queue) == {"processed": [b"x"]}


def test_closing_ends_every_wait_at_once(queue: ThreadsQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = only_woken(monkeypatch)

    async def run() -> None:
        subscription = aio.Queue(queue).subscribe()
        async with subscription, waiting(subscription, 50) as tasks:
            while not waits():
                await asyncio.sleep(0.01)
            await subscription.close()
            assert await asyncio.wait_for(asyncio.gather(*tasks), 30) == [None] * 50
            await subscription.close()
            with pytest.raises(DropqError, match="is closed"):
                await subscription.receive()
        queue.send(b"x")
        assert private(queue, "consumers") == []

    asyncio.run(run())
    assert where(queue) == {"target": [b"x"]}


@pytest.mark.parametrize("first", ["close", "cancel"])
@pytest.mark.parametrize("rounds", range(10))
def test_a_close_and_a_cancellation_at_once_leave_the_message_uncounted_unless_the_task_has_got_it(
    queue: ThreadsQueue, first: str, rounds: int
) -> None:
    got: list[aio.Message | None] = []

    async def run() -> None:
        subscription = aio.Queue(queue).subscribe()
        async with subscription, waiting(subscription) as (task,):
            queue.send(b"x")
            for _ in range(rounds):
                await asyncio.sleep(0)
            closing: asyncio.Task[None] | None = None
            if first == "close":
                closing = asyncio.create_task(subscription.close())
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await (closing or subscription.close())
                got.append(await task)

    asyncio.run(run())
    assert where(queue) == {"target": [b"x"]}
    assert next(queue.browse()).delivery_count == len([message for message in got if message is not None])


def test_what_a_thread_had_claimed_when_the_subscription_was_closed_goes_back_uncounted(queue: ThreadsQueue) -> None:
    async def run() -> None:
        subscription = aio.Queue(queue).subscribe()
        async with subscription, waiting(subscription) as (task,):
            (call,) = subscription._calls
            queue.send(b"x")
            call.future.result(10)  # the loop stands meanwhile: the task has not got it yet
            assert len(subscription.held) == 1
            await subscription.close()
            assert await task is None

    asyncio.run(run())
    assert next(queue.browse()).delivery_count == 0


def test_any_number_of_waiting_tasks_leaves_threads_for_the_others(queue: ThreadsQueue) -> None:
    async def run() -> None:
        both = aio.Queue(queue)
        async with both.subscribe(filter="JMSType = 'none'") as subscription, waiting(subscription, 200):
            before = threading.active_count()
            await both.send(b"x")
            message = await both.receive("5s")
            assert message is not None
            await message.ack()
            assert await asyncio.to_thread(lambda: 7) == 7
            assert threading.active_count() - before <= 4
            await both.close()

    asyncio.run(run())
    assert where(queue) == {"processed": [b"x"]}


def test_a_timeout_ends_a_wait_also_behind_another(queue: ThreadsQueue) -> None:
    async def run() -> None:
        async with aio.Queue(queue).subscribe() as subscription, waiting(subscription):
            assert await subscription.receive("1ms") is None
            assert await subscription.receive(0) is None
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await subscription.receive(None)
            assert len(subscription._calls) == 1

    asyncio.run(run())


def test_a_task_that_is_thrown_away_while_it_waits_holds_nothing(queue: ThreadsQueue) -> None:
    async def run() -> None:
        async with aio.Queue(queue).subscribe() as subscription:
            receiving = subscription.receive(None)
            await cancelled(_started(receiving))
            receiving.close()
            await soon(lambda: not subscription._calls, "its call has ended")
            await subscription.queue.send(b"x")
            message = await subscription.receive("5s")
            assert message is not None and message.delivery_count == 1
            await message.ack()

    asyncio.run(run())


async def _started(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine up to its first suspension."""
    coroutine.send(None)
    await asyncio.sleep(0)


def test_two_loops_share_a_subscription(queue: ThreadsQueue) -> None:
    queue.send_many([b"%03d" % number for number in range(100)])
    seen: list[bytes] = []
    shared = aio.Queue(queue).subscribe(max_backlog=None)

    async def consume() -> None:
        while (message := await shared.receive("50ms")) is not None:
            assert await cancelled(shared.receive(None), 1, "woken")
            async with message:
                seen.append(await message.body())

    threads = [threading.Thread(target=lambda: asyncio.run(consume())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    asyncio.run(shared.close())
    assert sorted(seen) == [b"%03d" % number for number in range(100)]
    assert {message.delivery_count for message in queue.browse("processed")} == {0}  # none was delivered before


def test_a_close_in_one_loop_ends_the_wait_in_another(queue: ThreadsQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = only_woken(monkeypatch)
    shared = aio.Queue(queue).subscribe()
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(asyncio.run(_received(shared))))
    thread.start()
    until(lambda: waits(shared) and looks(), "it waits")
    asyncio.run(shared.close())
    thread.join(30)
    assert got == [None]


async def _received(subscription: aio.Subscription) -> aio.Message | None:
    return await subscription.receive(None)


# -- the verbs ---------------------------------------------------------------------------------------------------------


def test_a_message_has_the_metadata_of_the_message_that_threads_use(queue: ThreadsQueue) -> None:
    queue.send_json({"n": 1}, type="t", correlation_id="c", reply_to="q", priority=7, properties={"p": 2})

    async def run() -> None:
        async with aio.Queue(queue) as both:
            message = await both.receive()
            assert message is not None and message.receipt is not None
            for name in ("id", "path", "priority", "type", "correlation_id", "reply_to", "properties", "timestamp"):
                assert getattr(message, name) == getattr(message.message, name)
            assert (message.type, message.properties, message.delivery_count) == ("t", {"p": 2}, 1)
            assert (await message.json(), await message.text(), await message.size()) == ({"n": 1}, '{"n":1}', 7)
            assert (await both.find(message.id)).state == "processing"
            assert (await message.reply("answer")).delivered_to == "q"
            await (await both.claimed(message.receipt)).ack()
            assert not message.held
            assert (await both.counts())["processed"] == 1

    asyncio.run(run())
    assert where(queue) == {"processed": [b'{"n":1}'], "target": [b"answer"]}


def test_a_block_acknowledges_or_fails_its_message_and_leaves_alone_what_is_settled(queue: ThreadsQueue) -> None:
    queue.send_many([b"1 good", b"2 bad", b"3 rejected"])

    async def run() -> None:
        async with aio.Queue(queue).subscribe() as subscription:
            async with await received(subscription):
                pass
            with pytest.raises(RuntimeError):
                async with await received(subscription):
                    raise RuntimeError("no such item")
            async with await received(subscription) as message:
                await message.reject("by hand")
            assert await message.reason() is not None

    asyncio.run(run())
    assert where(queue) == {"processed": [b"1 good"], "error": [b"2 bad", b"3 rejected"]}
    assert {str(message.reason and message.reason["detail"]) for message in queue.browse("error")} == {
        "RuntimeError: no such item",
        "by hand",
    }


async def received(subscription: aio.Subscription) -> aio.Message:
    message = await subscription.receive()
    assert message is not None
    return message


def test_a_block_that_is_cancelled_gives_its_message_back_and_counts_the_delivery(queue: ThreadsQueue) -> None:
    queue.send(b"x")

    async def run() -> None:
        async with aio.Queue(queue).subscribe() as subscription:
            message = await received(subscription)

            async def use() -> None:
                async with message:
                    await asyncio.Event().wait()

            assert await cancelled(use())

    asyncio.run(run())
    assert [message.delivery_count for message in queue.browse()] == [1]


def test_the_error_of_a_verb_that_was_cancelled_is_the_cause_of_the_cancellation(queue: ThreadsQueue) -> None:
    queue.send(b"x")

    async def run() -> None:
        async with aio.Queue(queue).subscribe() as subscription:
            message = await received(subscription)
            message.message.release()
            with pytest.raises(LeaseLost):
                await message.ack()
            task = asyncio.create_task(message.ack())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as raised:
                await task
            assert isinstance(raised.value.__cause__, LeaseLost)

    asyncio.run(run())


def test_a_loop_that_does_not_settle_its_message_is_told_so(queue: ThreadsQueue) -> None:
    queue.send_many([b"a", b"b"])

    async def run() -> None:
        async for message in aio.Queue(queue).messages():
            assert await message.body() == b"a"

    with pytest.raises(BacklogReached):
        asyncio.run(run())
    assert where(queue) == {"target": [b"a", b"b"]}


def test_a_loop_ends_when_its_subscription_is_closed(queue: ThreadsQueue) -> None:
    queue.send_many([b"a", b"b"])

    async def run() -> None:
        async with aio.Queue(queue).subscribe() as subscription:
            async for message in subscription:
                await message.ack()
                await subscription.close()

    asyncio.run(run())
    assert where(queue) == {"processed": [b"a"], "target": [b"b"]}


def test_at_most_once_the_next_receive_gets_what_a_cancelled_one_had_taken(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, semantics="at-most-once")
    queue.send(b"x")

    async def run() -> None:
        async with aio.Queue(queue).subscribe() as subscription:
            assert await cancelled(subscription.receive(), 1, "woken")
            assert await (await received(subscription)).body() == b"x"

    asyncio.run(run())
    assert where(queue) == {"processed": [b"x"]}


def test_an_error_of_a_receive_is_raised_or_logged_once_and_its_call_is_forgotten(
    queue: ThreadsQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with aio.Queue(queue).subscribe() as subscription:
            opened = subscription._opened
            assert opened is not None

            def refuse(*_: object) -> None:
                raise StorageError("no")

            with monkeypatch.context() as patch:
                patch.setattr(opened, "_receive", refuse)
                with pytest.raises(StorageError):
                    await subscription.receive()
                assert await cancelled(subscription.receive(), 1, "woken")
            assert subscription._calls == set()
            with pytest.raises(ValueError, match="receive_many"):
                await subscription.receive_many(0)

    asyncio.run(run())
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == ["queue q: a receive that was given up failed: no"]


def test_a_queue_that_cannot_be_subscribed_to_says_why(queue: ThreadsQueue) -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match="max_backlog 0"):
            async with aio.Queue(queue).subscribe(max_backlog=0):
                pass

    asyncio.run(run())
    assert private(queue, "consumers") == []


def test_a_child_makes_a_queue_of_its_own(queue: ThreadsQueue) -> None:
    both = aio.Queue(queue)
    asyncio.run(both.send(b"x"))

    def child() -> None:
        with pytest.raises(DropqError, match="before a fork"):
            asyncio.run(both.send(b"y"))
        asyncio.run(aio.Queue(queue).send(b"z"))

    in_child(child)
    assert where(queue) == {"target": [b"x", b"z"]}


def test_dropq_alone_imports_neither_asyncio_nor_what_uses_it() -> None:
    program = "import dropq, sys; print(*{'dropq.aio', 'asyncio', 'pytest'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.split() == []


def program(queue: ThreadsQueue, text: str) -> str:
    """Run a program with a queue `q` for asyncio; return what it prints."""
    begin = f"""
import asyncio, threading
from dropq import Root, aio
queue = Root({str(queue.root.path)!r}).queue({queue.name!r})
q = aio.Queue(queue)
"""
    done = subprocess.run([sys.executable, "-c", begin + text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_receive_that_waits_does_not_keep_a_program_from_ending(queue: ThreadsQueue) -> None:
    text = """
loop = asyncio.new_event_loop()
task = loop.create_task(q.receive(None))
loop.call_later(0.2, loop.stop)
loop.run_forever()
task._log_destroy_pending = False  # asyncio would report the task
print("ends")
"""
    assert program(queue, text) == "ends\n"


def test_a_loop_in_another_thread_settles_and_closes_after_the_main_thread_has_ended(queue: ThreadsQueue) -> None:
    text = """
async def consume():
    async with q.subscribe() as subscription:
        waits.set()
        message = await subscription.receive(None)
        await message.ack()

def send_late():
    main.join()
    queue.send(b"late")

waits, main = threading.Event(), threading.main_thread()
threading.Thread(target=lambda: asyncio.run(consume())).start()
waits.wait()
threading.Thread(target=send_late).start()
"""
    program(queue, text)
    assert where(queue) == {"processed": [b"late"]}


def test_replies_that_wait_for_room_elsewhere_hold_up_no_send(queue: ThreadsQueue) -> None:
    full = queue.root.create_queue("full", durability="none", max_unprocessed=1, overflow="block")
    full.send(b"x")
    queue.send(b"ask", reply_to="full")

    async def main() -> None:
        async with aio.Queue(queue) as q:
            message = await q.receive()
            assert message is not None
            replies = [asyncio.create_task(message.reply(b"answer")) for _ in range(2 * aio.THREADS)]
            await asyncio.sleep(0)
            assert (await q.send(b"not held up")).accepted
            for _ in replies:
                await asyncio.to_thread(until, lambda: full.counts()["target"], "an answer")
                taken = full.receive()
                assert taken is not None
                taken.ack()
            await asyncio.gather(*replies)
            await message.ack()

    asyncio.run(main())
    assert full.counts()["target"] == 1


def test_acks_that_wait_for_room_hold_up_no_other_verb_and_a_cancelled_one_changes_nothing(
    queue: ThreadsQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = queue.root.create_queue("full", durability="none", max_unprocessed=1, overflow="block")
    full.send(b"x")
    number, waiting, pause = aio.THREADS + 1, set[int](), Wait.pause

    def noting(self: Wait, seconds: float) -> None:
        waiting.add(threading.get_ident())
        pause(self, seconds)

    monkeypatch.setattr(Wait, "pause", noting)
    queue.send_many([b"%d" % each for each in range(number + 1)])

    async def main() -> None:
        async with aio.Queue(queue) as q, q.subscribe(max_backlog=None) as subscription:
            *held, other = await subscription.receive_many(number + 1)
            acks = [asyncio.create_task(message.ack(send=Out("full", b"A"))) for message in held]
            await soon(lambda: len(waiting) == aio.THREADS, "all wait but one, whose turn has not come")
            async with asyncio.timeout(60):
                await other.ack()
                for ack in acks:
                    ack.cancel()
                ended = await asyncio.gather(*acks, return_exceptions=True)
            assert {type(each) for each in ended} == {asyncio.CancelledError}
            assert all(message.held for message in held)

    asyncio.run(main())
    assert queue.counts()["target"] == number and where(full) == {"target": [b"x"]}


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_task_gets_the_records_of_one_message_after_the_other_and_settles_each(queue: ThreadsQueue) -> None:
    first = queue.send(b"1\n2\n3\n", type="text").id
    second = queue.send(b"4\n", type="text").id

    async def run() -> list[tuple[str, int]]:
        seen = []
        async with aio.Queue(queue).subscribe() as subscription:
            async for record in subscription.records(timeout=0):
                seen.append((record.message.id, record.number))
                if record.data == b"2":
                    record.reject("two")
                else:
                    record.ack()
        return seen

    assert asyncio.run(run()) == [(first, 1), (first, 2), (first, 3), (second, 1)]
    assert where(queue) == {"processed": [b"1\n2\n3\n", b"4\n"], "error": [b"2\n"]}


def test_the_records_of_a_held_message_are_settled_with_it(queue: ThreadsQueue) -> None:
    queue.send(b"1\n2\n3\n", type="text")

    async def run() -> None:
        async with aio.Queue(queue).subscribe() as subscription:
            message = await received(subscription)
            async for record in message.records():
                if record.number == 2:
                    record.reject("two")
            await message.ack()

    asyncio.run(run())
    assert where(queue) == {"processed": [b"1\n2\n3\n"], "error": [b"2\n"]}


@pytest.mark.parametrize("at", range(1, 8))
def test_a_cancelled_loop_loses_no_record_and_another_gets_the_next(queue: ThreadsQueue, at: int) -> None:
    queue.send(b"1\n2\n3\n4\n", type="text")
    seen: list[int] = []

    async def run() -> None:
        async def loop() -> None:
            async for record in subscription.records(timeout=0):
                seen.append(record.number)
                record.ack()

        async with aio.Queue(queue).subscribe() as subscription:
            await cancelled(loop(), at)
            await loop()

    asyncio.run(run())
    assert seen == [1, 2, 3, 4]
    assert where(queue) == {"processed": [b"1\n2\n3\n4\n"]}


@pytest.mark.parametrize("at", range(1, 8))
def test_a_cancelled_loop_over_a_held_message_loses_no_record(queue: ThreadsQueue, at: int) -> None:
    queue.send(b"1\n2\n3\n4\n", type="text")
    seen: list[int] = []

    async def run() -> None:
        async def loop() -> None:
            async for record in message.records():
                seen.append(record.number)
                record.ack()

        async with aio.Queue(queue).subscribe() as subscription:
            message = await received(subscription)
            await cancelled(loop(), at)
            await loop()

    asyncio.run(run())
    assert seen == [1, 2, 3, 4]
    assert where(queue) == {"processed": [b"1\n2\n3\n4\n"]}


def test_a_loop_over_records_that_settles_none_is_refused_the_next_message(queue: ThreadsQueue) -> None:
    queue.send(b"1\n2\n", type="text")

    async def run() -> None:
        async with aio.Queue(queue).subscribe() as subscription:
            with pytest.raises(BacklogReached, match="2 of its records were taken and are not settled"):
                async for _ in subscription.records(timeout=0):
                    pass

    asyncio.run(run())
    assert where(queue) == {"target": [b"1\n2\n"]}


@pytest.mark.parametrize("verb", ["send", "subscribe", "record_writer"])
def test_help_names_the_arguments_of_the_verb_for_threads(verb: str) -> None:
    assert signature(getattr(aio.Queue, verb)).parameters == signature(getattr(ThreadsQueue, verb)).parameters


def test_a_wrong_argument_is_told_with_the_right_one(queue: ThreadsQueue) -> None:
    async def subscribe() -> None:
        async with aio.Queue(queue).subscribe(prefetch=1):  # type: ignore[call-arg]
            pass

    with pytest.raises(TypeError, match="prefetch") as error:
        asyncio.run(subscribe())
    assert error.value.__notes__ == ["subscribe has no argument prefetch: is it max_backlog?"]
