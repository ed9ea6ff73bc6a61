"""What AMPS's description of its queues promises, sentence by sentence from its top to its end, and what dropq does.

Options are spelt as AMPS spells them. Where dropq departs, the docstring says so, and the test is of what dropq does.
One root is one instance of AMPS's, however many hosts and processes share it.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import pytest
from actors import finish, is_stopped, start
from helpers import FRESH, Clock, Make, base, files, lying, make_queue, names_in, reopened, take, until, where

from dropq import ConfigError, LeaseLost, Message, Queue, Subscription
from dropq.format.message_file import MessageFile
from dropq.lifecycle.timing import Timing
from dropq.policies.build import view_of
from dropq.policies.fair_share import FairShare
from dropq.storage import reading
from dropq.upkeep import bulk

SYNC = '{"isSyncPoint": 1}'


def body(message: Message | None) -> str | None:
    """The body of what was received, if anything was."""
    return None if message is None else message.text


def offered(subscription: Subscription, at_most: int = 20) -> list[str]:
    """The bodies that a subscription is given until it is given no more."""
    taken = (body(subscription.receive()) for _ in range(at_most))
    return [text for text in taken if text is not None]


def worked_off(queue: Queue) -> list[str]:
    """The bodies that wait, which are taken and acknowledged, in the order of their delivery."""
    with queue.subscribe() as subscription:
        taken = []
        while (message := subscription.receive()) is not None:
            taken.append(message.text)
            message.ack()
    return taken


def configure(queue: Queue, **options: str) -> Queue:
    """The queue as it is opened with other options, written by hand."""
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in {"durability": "none", **options}.items()]
    Path(queue.layout.home, "queue.toml").write_text("".join(lines))
    return reopened(queue)


def refusal(make: Make, **options: object) -> str:
    """What a queue with such options is refused for."""
    with pytest.raises(ConfigError) as caught:
        make(**options)
    return str(caught.value)


def reason(queue: Queue, state: str) -> object:
    """Why the one message in error/ or expired/ lies there."""
    (message,) = queue.browse(state)
    assert message.reason is not None
    return message.reason["reason"]


# -- Name, MessageType -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["Name", "Topic"])
def test_the_name_of_a_queue_may_be_given_as_name_or_as_topic(make: Make, key: str) -> None:
    """Consumers find a queue by its name, for which there are two keys.

    We depart: neither is required, as a queue is called like its folder, and no other name is allowed.
    """
    queue = make()
    configure(queue, **{key: "q"}).send("a")
    assert body(queue.receive()) == "a"
    with pytest.raises(ConfigError, match=f'{key} = "other": only "q", its folder\'s name, is allowed'):
        configure(queue, **{key: "other"}).send("b")


def test_a_queue_has_a_message_type(make: Make) -> None:
    """How bodies are read. We depart: json where nothing is said, and not an error."""
    plain, text = make(), make(MessageType="text")
    for queue in (plain, text):
        queue.send('{"n": 5}')
    assert [len(list(plain.browse(filter=wanted))) for wanted in ("/n = 5", "/ LIKE 'n'")] == [1, 0]
    assert [len(list(text.browse(filter=wanted))) for wanted in ("/n = 5", "/ LIKE 'n'")] == [0, 1]
    fix = make(MessageType="fix", Filter="/35 = 'D'")
    fix.send("35=D\x0149=BANK\x01")
    assert fix.receive() is not None
    assert "MessageType" in refusal(make, MessageType="protobuf")


# -- UnderlyingTopic, DefaultPublishTarget -----------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["prices", "prices.eu"])
def test_a_queue_may_show_the_messages_of_a_topic(make: Make, topic: str) -> None:
    """A queue may be a view on a topic: it gets what is published there."""
    view = make(UnderlyingTopic=topic)
    published = view.root.create_topic(topic)
    published.publish("a")
    assert body(view.receive()) == "a"
    assert view.send("b").delivered_to == topic
    assert body(view.receive()) == "b"


def test_a_queue_may_show_the_topics_that_a_regular_expression_matches(make: Make) -> None:
    """A regular expression may name several topics, and needs a publish target."""
    assert "set default_publish_target" in refusal(make, UnderlyingTopic="prices.*")
    view = make(UnderlyingTopic="prices.*", DefaultPublishTarget="prices.eu")
    for topic in ("prices.eu", "prices.us", "orders"):
        view.root.create_topic(topic).publish(topic)
    assert [body(view.receive()), body(view.receive()), view.receive()] == ["prices.eu", "prices.us", None]
    assert view.send("b").delivered_to == "prices.eu"


def test_without_an_underlying_topic_a_queue_holds_what_is_sent_to_its_own_name(make: Make) -> None:
    """The topic of a queue is its own where no other is given."""
    queue = make(UnderlyingTopic="unset")
    queue.send("a")
    assert body(queue.receive()) == "a"


def test_the_publish_target_is_one_of_the_topics_of_the_queue(make: Make) -> None:
    """It says where a send to a view goes."""
    assert "none of the topics" in refusal(make, UnderlyingTopic="prices.*", DefaultPublishTarget="orders")
    assert "set underlying_topic" in refusal(make, DefaultPublishTarget="prices")


# -- LeasePeriod -------------------------------------------------------------------------------------------------------


def test_who_takes_a_message_owns_it_for_the_lease_period_and_then_it_returns(make: Make, clock: Clock) -> None:
    """Within the period nobody else is given the message; after it the next one is, and the first has lost it."""
    queue = make(timing=FRESH, LeasePeriod="10s")
    queue.send("a")
    with queue.subscribe() as one, reopened(queue).subscribe() as other:
        message = one.receive()
        assert message is not None
        clock.advance(9)
        assert other.receive() is None
        clock.advance(2)
        assert body(other.receive()) == "a"
        with pytest.raises(LeaseLost):
            message.ack()
        assert names_in(queue, "processing")[0].startswith(other.id)


def test_a_message_is_to_be_acknowledged_within_its_lease_or_another_may_have_it(make: Make, clock: Clock) -> None:
    """An ack in time is final, and whoever needs longer renews the lease: that is for the renewed time alone."""
    queue = make(LeasePeriod="10s")
    queue.send_many(["in time", "renewed"])
    take(queue).ack()
    message = take(queue)
    clock.advance(9)
    message.extend("10s")
    clock.advance(9)
    assert queue.sweep().lapsed == 0
    clock.advance(2)
    assert queue.sweep().lapsed == 1
    assert where(queue) == {"processed": [b"in time"], "target": [b"renewed"]}


def test_the_lease_is_measured_from_the_moment_that_the_message_is_handed_out(make: Make, clock: Clock) -> None:
    """However long a message has waited, whoever takes it has the whole period."""
    queue = make(timing=FRESH, LeasePeriod="10s")
    queue.send("a")
    clock.advance(3600)
    deadline = take(queue).deadline
    assert deadline is not None
    assert deadline.timestamp() * 1000 == pytest.approx(clock.ms + 10_000, abs=1)


def test_without_a_lease_period_leases_do_not_run_out(make: Make, clock: Clock) -> None:
    """A period that is not set never ends: who lives keeps what it holds."""
    queue = make(timing=FRESH)
    queue.send("a")
    message = take(queue)
    assert message.deadline is None
    clock.advance(10**7)
    queue.sweep()
    assert reopened(queue).receive() is None
    message.ack()


# -- Semantics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("semantics", ["at-least-once", "at-most-once"])
def test_a_message_is_with_one_subscriber_at_a_time_whatever_the_semantics(make: Make, semantics: str) -> None:
    """While one has a message, no other is given it."""
    queue = make(Semantics=semantics)
    queue.send("a")
    with queue.subscribe() as one, reopened(queue).subscribe() as other:
        assert body(one.receive()) == "a"
        assert other.receive() is None


def test_at_least_once_a_message_leaves_the_queue_when_it_is_acknowledged_and_not_before(make: Make) -> None:
    """Its consumer removes a message in so many words, after it was processed."""
    queue = make(Semantics="at-least-once")
    queue.send("a")
    message = take(queue)
    queue.sweep()
    assert where(queue) == {"processing": [b"a"]}
    message.ack()
    assert where(queue) == {"processed": [b"a"]}


@pytest.mark.parametrize("how", ["its connection closes", "it returns the message", "its lease runs out"])
def test_at_least_once_a_message_is_delivered_again_when_its_consumer_fails(make: Make, clock: Clock, how: str) -> None:
    """Whatever ends a hold without an ack, the message is there for another try, and says that it was delivered."""
    queue = make(timing=FRESH, LeasePeriod="10s")
    queue.send("a")
    one = queue.subscribe()
    message = one.receive()
    assert message is not None
    if how == "its connection closes":
        one.close()
    elif how == "it returns the message":
        message.nack()
    else:
        clock.advance(11)
    again = reopened(queue).receive()
    assert again is not None
    assert (again.text, again.delivery_count, again.redelivered) == ("a", 2, True)
    one.close()


def test_at_most_once_a_message_leaves_the_queue_as_it_is_delivered(make: Make, clock: Clock) -> None:
    """No second consumer is ever given it, also when the first one fails without a word."""
    queue = make(timing=FRESH, Semantics="at-most-once", LeasePeriod="10s")
    queue.send("a")
    with queue.subscribe() as subscription:
        message = subscription.receive()
        assert where(queue) == {"processed": [b"a"]}
    clock.advance(3600)
    queue.sweep()
    assert body(message) == "a"
    assert queue.receive() is None
    assert where(queue) == {"processed": [b"a"]}


def test_the_semantics_are_at_least_once_where_nothing_is_said(make: Make) -> None:
    """The safe one is the default."""
    queue = make()
    queue.send("a")
    with queue.subscribe() as subscription:
        assert subscription.receive() is not None
    assert where(queue) == {"target": [b"a"]}


# -- MaxBacklog, MaxPerSubscriptionBacklog -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["acknowledged", "expired"])
def test_no_message_is_delivered_at_max_backlog_until_one_is_acknowledged_or_expires(
    make: Make, clock: Clock, how: str
) -> None:
    """The limit is of all consumers together, wherever they run; what leaves the queue makes room.

    What expires while it is held leaves with the next sweep, which consumers make on their way once a second.
    """
    queue = make(timing=FRESH, MaxBacklog=2)
    queue.send("first", expires_in="10s")
    queue.send_many(["second", "third"])
    with queue.subscribe(max_backlog=None) as one, reopened(queue).subscribe(max_backlog=None) as other:
        first = one.receive()
        assert [body(first), body(other.receive())] == ["first", "second"]
        assert [one.receive(), other.receive()] == [None, None]
        if how == "acknowledged" and first is not None:
            first.ack()
        else:
            clock.advance(11)
            assert queue.sweep().expired == 1
        assert body(other.receive()) == "third"
        assert one.receive() is None


def test_max_backlog_does_not_limit_how_many_messages_a_queue_holds(make: Make) -> None:
    """It limits what is handed out. What may wait is another matter: max_unprocessed."""
    queue = make(MaxBacklog=1, MaxPerSubscriptionBacklog=1)
    queue.send_many(str(number) for number in range(50))
    assert len(files(base(queue) / "target")) == 50
    assert len(worked_off(queue)) == 50


def test_without_max_backlog_any_number_is_handed_out(make: Make) -> None:
    """It is not set by default."""
    queue = make()
    queue.send_many(str(number) for number in range(50))
    with queue.subscribe(max_backlog=None) as subscription:
        assert len(subscription.receive_many(50)) == 50


@pytest.mark.parametrize(("queues", "asked", "most"), [(3, 5, 3), (5, 3, 3), (None, 3, 3)])
def test_a_subscription_is_given_what_it_asks_for_or_what_the_queue_allows_whichever_is_lower(
    make: Make, queues: int | None, asked: int, most: int
) -> None:
    """Either may hold the other back, and each subscription has a backlog of its own.

    We depart: where the queue does not say, it is the subscription that says, and not 1.
    """
    queue = make(**({} if queues is None else {"MaxPerSubscriptionBacklog": queues}))
    queue.send_many(str(number) for number in range(20))
    with queue.subscribe(max_backlog=asked) as one, reopened(queue).subscribe(max_backlog=asked) as other:
        assert (len(offered(one)), len(offered(other))) == (most, most)
        one.held[0].ack()
        assert len(offered(one)) == 1


@pytest.mark.parametrize("queues", [None, 5])
def test_a_subscription_that_does_not_say_is_given_one_message_at_a_time(make: Make, queues: int | None) -> None:
    """It has to ask for more, whatever the queue would allow."""
    queue = make(**({} if queues is None else {"MaxPerSubscriptionBacklog": queues}))
    queue.send_many(["a", "b"])
    with queue.subscribe() as subscription:
        assert offered(subscription) == ["a"]


# -- Expiration, ExpirationModel ---------------------------------------------------------------------------------------


def test_a_message_that_is_in_the_queue_for_longer_than_its_expiration_is_not_delivered(
    make: Make, clock: Clock
) -> None:
    """The queue says how long its messages are of use; then they go, with the reason."""
    queue = make(timing=FRESH, Expiration="10s")
    queue.send("a")
    clock.advance(11)
    assert queue.receive() is None
    assert where(queue) == {"expired": [b"a"]}
    assert reason(queue, "expired") == "time_limit"


def test_a_message_may_expire_while_it_is_leased_and_nobody_is_told(make: Make, clock: Clock) -> None:
    """Its holder learns of it when it settles the message, and not before: that changes nothing any more."""
    queue = make(Expiration="10s", LeasePeriod="1h")
    queue.send("a")
    message = take(queue)
    clock.advance(11)
    assert queue.sweep().expired == 1
    assert message.state == "processing"
    with pytest.raises(LeaseLost):
        message.ack()
    assert where(queue) == {"expired": [b"a"]}


def test_without_an_expiration_messages_stay_for_ever(make: Make, clock: Clock) -> None:
    """It is not set by default."""
    queue = make(timing=FRESH)
    queue.send("a")
    clock.advance(10**8)
    assert queue.sweep().expired == 0
    assert body(queue.receive()) == "a"


#: Of each model: the seconds that the queue says, those that a message says, and those that it lives; None is for ever.
MODELS = [
    ("queue", 20, 10, 20),
    ("queue", 20, 30, 20),
    ("latest", 20, 10, 20),
    ("latest", 20, 30, 30),
    ("earliest", 20, 10, 10),
    ("earliest", 20, 30, 20),
    ("default", 20, 10, 10),
    ("default", 20, 30, 30),
    ("default", 20, None, 20),
    ("queue", None, 10, None),
    ("latest", None, 10, None),
    ("earliest", None, 10, 10),
    ("default", None, 10, 10),
    ("default", None, None, None),
]


@pytest.mark.parametrize(("model", "queues", "own", "lives"), MODELS)
def test_the_expiration_model_says_which_of_two_expirations_counts(
    make: Make, clock: Clock, model: str, queues: int | None, own: int | None, lives: int | None
) -> None:
    """The queue's alone, the later, the earlier, or the message's and without one the queue's.

    A queue that has a model and no expiration has one without end.
    """
    queue = make(ExpirationModel=model, **({} if queues is None else {"Expiration": queues}))
    queue.send("a", expires_in=own)
    clock.advance(10**6 if lives is None else lives - 1)
    assert queue.sweep().expired == 0
    if lives is not None:
        clock.advance(2)
        assert queue.sweep().expired == 1


def test_the_messages_own_expiration_counts_where_no_model_is_given(make: Make, clock: Clock) -> None:
    """The model is `default` by default."""
    queue = make(Expiration="20s")
    queue.send("short", expires_in="10s")
    queue.send("long", expires_in="30s")
    clock.advance(25)
    assert queue.sweep().expired == 1
    assert where(queue) == {"expired": [b"short"], "target": [b"long"]}


# -- Filter ------------------------------------------------------------------------------------------------------------


def test_only_messages_that_match_the_filter_are_in_the_queue(make: Make) -> None:
    """Nobody receives the others, whatever it asks for. They stay in target/, untouched, for who looks there."""
    queue = make(Filter="/region = 'EU'")
    queue.send_many(['{"region": "US"}', '{"region": "EU"}'])
    assert worked_off(queue) == ['{"region": "EU"}']
    with queue.subscribe(filter="/region = 'US'") as subscription:
        assert subscription.receive() is None
    assert where(queue)["target"] == [b'{"region": "US"}']


def test_without_a_filter_all_messages_are_in_the_queue(make: Make) -> None:
    """There is none by default."""
    queue = make()
    queue.send_many(['{"region": "US"}', "no json"])
    assert worked_off(queue) == ['{"region": "US"}', "no json"]


def test_a_filter_converts_strings_and_numbers_and_has_functions(make: Make) -> None:
    """What is a string in one message and a number in another is compared as a number; docs/filters.md has the rest."""
    queue = make(Filter="/n > 9 AND UPPER(/region) IN ('EU', 'UK') AND COALESCE(/urgent, 1) = '1'")
    bodies = ['{"n": "10", "region": "eu"}', '{"n": 9, "region": "EU"}', '{"n": 11, "region": "uk", "urgent": ""}']
    queue.send_many(bodies)
    assert worked_off(queue) == [bodies[0], bodies[2]]


# -- RecoveryPoint -----------------------------------------------------------------------------------------------------


@pytest.fixture
def archived(make: Make, clock: Clock) -> tuple[Queue, list[str]]:
    """A queue that archived 0 to 3, an hour between each, of which 0 is older than the queue; and their ids."""
    queue = make()
    ids = []
    for number in range(4):
        made = clock.ms + (number - 1) * 3_600_000 + 60_000
        ids.append(queue.send(str(number), message_id=f"{made:013d}000-0123456789").id)
    clock.advance(4 * 3600)
    worked_off(queue)
    return queue, ids


@pytest.mark.parametrize(
    ("point", "first"),
    [("epoch", 0), ("now", 4), ("creation", 1), ("a bookmark", 2), ("a timestamp", 3), (None, 0)],
)
def test_the_recovery_point_says_from_where_on_the_log_is_read(
    archived: tuple[Queue, list[str]], point: str | None, first: int
) -> None:
    """From its beginning, which is the default, from now or the queue's creation on, from a message, or from a time.

    We depart: the log is the archive, processed/; a bookmark is an id; and it is read when somebody asks for it, with
    `replay`, as no queue has lost its state after a restart.
    """
    queue, ids = archived
    if point == "a bookmark":
        point = ids[2]
    elif point == "a timestamp":
        point = datetime.fromtimestamp(int(ids[3][:13]) / 1000, UTC).isoformat()
    queue = configure(queue, **({} if point is None else {"RecoveryPoint": point}))
    assert [outcome.id for outcome in queue.replay()] == ids[first:]
    assert worked_off(queue) == [str(number) for number in range(first, 4)]


def test_a_recovery_point_that_is_none_of_these_is_refused(make: Make) -> None:
    """A point is one of the five forms."""
    assert "RecoveryPoint" in refusal(make, RecoveryPoint="yesterday")


@pytest.mark.parametrize("point", ["epoch", "now"])
def test_a_queue_that_has_a_record_of_its_state_goes_on_from_that_and_not_from_the_recovery_point(
    make: Make, point: str
) -> None:
    """What was acknowledged does not come again after a restart, and what was not is still there.

    We depart: folders are that record, so it is always there, and counts also where the recovery point was changed.
    """
    queue = make()
    queue.send_many(["acknowledged", "held", "waiting"])
    take(queue).ack()
    take(queue)
    queue.close()
    assert worked_off(configure(queue, RecoveryPoint=point)) == ["held", "waiting"]


# -- FairnessModel -----------------------------------------------------------------------------------------------------


#: A message is left to whose turn it is for as long as it takes.
LEFT = Timing(turn_patience=3600)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Tell when a message was left to whose turn it is."""
    left = threading.Event()

    def telling(decide: Callable[[FairShare, MessageFile], bool]) -> Callable[[FairShare, MessageFile], bool]:
        def noted(self: FairShare, waiting: MessageFile) -> bool:
            another = decide(self, waiting)
            if another:
                left.set()
            return another

        return noted

    for decide in (FairShare.is_anothers, FairShare.is_left):
        monkeypatch.setattr(FairShare, decide.__name__, telling(decide))
    return left


class Asking(threading.Thread):
    """Asks for one message in a thread of its own, and goes without one for as long as it is the turn of another."""

    def __init__(self, subscription: Subscription) -> None:
        super().__init__(daemon=True)
        self._subscription = subscription
        self._got: str | None = None
        self.start()

    def run(self) -> None:
        self._got = body(self._subscription.receive(15))

    @property
    def got(self) -> str | None:
        """The body of what it was given at last."""
        self.join()
        return self._got


def waiting(queue: Queue, *subscriptions: Subscription) -> None:
    """Let subscriptions find nothing, one after the other; from then on they are known to wait."""
    assert [subscription.receive() for subscription in subscriptions] == [None] * len(subscriptions)
    standings = os.listdir(base(queue) / ".dropq" / "turns")
    assert sorted(name.partition(",")[0] for name in standings if name.endswith(",waits")) == sorted(
        subscription.id for subscription in subscriptions
    )


def test_fast_delivers_to_the_first_subscription_that_is_found(make: Make) -> None:
    """Who asks first is given what there is, although another waits; nobody is asked, and no lock is taken."""
    queue = make(FairnessModel="fast")
    with queue.subscribe(max_backlog=None) as one, reopened(queue).subscribe(max_backlog=None) as other:
        assert other.receive() is None
        queue.send_many(["a", "b", "c"])
        assert offered(one) == ["a", "b", "c"]
    assert not (base(queue) / ".dropq" / "lock").exists()


def test_round_robin_delivers_to_the_next_subscription(make: Make, left: threading.Event) -> None:
    """Who has had a message leaves the next one to another that waits, and has the one after it."""
    queue = make(FairnessModel="round-robin", timing=LEFT)
    with queue.subscribe(max_backlog=None) as mine, reopened(queue).subscribe(max_backlog=None) as yours:
        one, other = sorted((mine, yours), key=lambda subscription: subscription.id)
        waiting(queue, one, other)
        queue.send_many(["a", "b", "c"])
        assert body(one.receive()) == "a"
        asking = Asking(one)
        assert left.wait()
        assert body(other.receive()) == "b"
        assert asking.got == "c"


def test_round_robin_passes_over_a_subscription_that_cannot_process_the_message(make: Make) -> None:
    """The next one is the next that wants the message and may hold one more."""
    queue = make(FairnessModel="round-robin", timing=LEFT)
    picky, full = reopened(queue).subscribe(filter="JMSPriority > 4"), reopened(queue).subscribe()
    with picky, full, queue.subscribe(max_backlog=None) as one:
        queue.send("a")
        assert body(full.receive()) == "a"
        waiting(queue, picky, one)
        queue.send_many(["b", "c"])
        assert offered(one) == ["b", "c"]


def test_proportional_delivers_to_the_subscription_with_the_lowest_part_of_its_backlog_in_use(
    make: Make, left: threading.Event
) -> None:
    """Of one that holds 1 of 2 and one that holds 1 of 4 the second is next, although its last turn was later."""
    queue = make(FairnessModel="proportional", timing=LEFT)
    with queue.subscribe(max_backlog=2) as small, reopened(queue).subscribe(max_backlog=4) as large:
        queue.send_many(["a", "b"])
        assert [body(small.receive()), body(large.receive())] == ["a", "b"]
        waiting(queue, small, large)
        queue.send_many(["c", "d"])
        asking = Asking(small)
        assert left.wait()
        assert body(large.receive()) == "c"
        assert asking.got == "d"


@pytest.mark.parametrize("semantics", ["at-least-once", "at-most-once"])
def test_the_fairness_model_is_fast_where_nothing_is_said(make: Make, semantics: str) -> None:
    """We depart: AMPS's is proportional or, at most once, round-robin; ours needs no lock."""
    queue = make(Semantics=semantics)
    assert queue.config.fairness_model == "fast"
    queue.send("a")
    take(queue)
    private = base(queue) / ".dropq"
    assert not (private / "lock").exists() and os.listdir(private / "turns") == []


# -- Leasing -----------------------------------------------------------------------------------------------------------


def test_strict_lets_a_client_acknowledge_what_is_leased_to_it_or_to_nobody(make: Make) -> None:
    """Its own, and what waits."""
    queue = make(Leasing="strict")
    held, waits = queue.send_many(["held", "waits"])
    take(queue)
    assert queue.ack(held.id)
    assert reopened(queue).ack(waits.id)
    assert where(queue) == {"processed": [b"held", b"waits"]}


def test_strict_gives_no_effect_to_an_ack_of_what_is_leased_to_another(make: Make) -> None:
    """The other still has it."""
    queue = make(Leasing="strict")
    sent = queue.send("a")
    message = take(queue)
    assert not reopened(queue).ack(sent.id)
    assert where(queue) == {"processing": [b"a"]}
    message.ack()


@pytest.mark.parametrize("options", [{"Leasing": "sublet"}, {}], ids=["said", "by default"])
def test_sublet_lets_any_client_acknowledge_any_message(make: Make, options: dict[str, str]) -> None:
    """Whoever has it on lease; that one is told when it comes to settle it. This is the default."""
    queue = make(**options)
    held, waits = queue.send_many(["held", "waits"])
    message = take(queue)
    other = reopened(queue)
    assert [other.ack(held.id), other.ack(waits.id)] == [True, True]
    with pytest.raises(LeaseLost):
        message.ack()
    assert where(queue) == {"processed": [b"held", b"waits"]}


@pytest.mark.parametrize("leasing", ["strict", "sublet"])
def test_an_ack_by_a_filter_settles_what_matches_as_the_leasing_allows(make: Make, leasing: str) -> None:
    """What waits, and what is held: that of others with `sublet` alone, and always that of whoever acknowledges."""
    queue = make(Leasing=leasing)
    other, order = reopened(queue), {"order": 7}
    for held in ("own", "other's"):
        queue.send(held, properties=order)
    own, others = take(queue), take(other)
    queue.send("waits", properties=order)
    queue.send("delayed", delay="1h", properties=order)
    queue.send("another order")
    planned = queue.ack_matching("order = 7", dry_run=True)
    outcomes = queue.ack_matching("order = 7")
    assert [outcome.ok for outcome in planned] == [outcome.ok for outcome in outcomes]
    assert own.state == "processed"
    if leasing == "strict":
        assert [outcome.ok for outcome in outcomes].count(False) == 1
        others.ack()
    else:
        assert all(outcome.ok for outcome in outcomes) and len(outcomes) == 4
        with pytest.raises(LeaseLost):
            others.ack()
    assert where(queue) == {"processed": [b"delayed", b"other's", b"own", b"waits"], "target": [b"another order"]}


def test_an_ack_by_a_filter_may_be_tried_and_kept_to_what_waits(make: Make) -> None:
    """AMPS has no such choice. While the queue is paused, what waits stays, as by its id."""
    queue = make()
    queue.send("held")
    message = take(queue)
    queue.send("waits")
    assert len(queue.ack_matching("JMSPriority = 4", dry_run=True)) == 2
    assert where(queue) == {"processing": [b"held"], "target": [b"waits"]}
    queue.pause()
    for dry_run in (True, False):
        (refused,) = queue.ack_matching("JMSPriority = 4", state="target", dry_run=dry_run)
        assert not refused.ok and "paused" in refused.detail
    queue.resume()
    assert [outcome.ok for outcome in queue.ack_matching("JMSPriority = 4", state="target")] == [True]
    assert where(queue) == {"processing": [b"held"], "processed": [b"waits"]}
    message.ack()
    with pytest.raises(ValueError, match="messages are acknowledged in delayed, target, processing"):
        queue.ack_matching("TRUE", state="error")
    topic = queue.root.create_topic("news")
    with pytest.raises(ValueError, match="news is a topic, which nobody consumes"):
        topic.queue.ack_matching("TRUE")


@pytest.mark.parametrize("verb", ["purge", "ack", "expire", "move", "requeue", "dry purge", "dry ack"])
def test_no_verb_touches_a_message_whose_body_cannot_be_read(
    make: Make, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    queue = make()
    other = queue.root.create_queue("other", durability="none")
    state = "error" if verb == "requeue" else "target"
    for body in ('{"customer": "ann"}', "{}"):
        queue.send(body)
        if state == "error":
            take(queue).reject("no")
    closed = next(iter(queue.browse(state))).path
    read = reading.read_body

    def refused(path: str, *longest: int) -> bytes:
        if path == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return read(path, *longest)

    monkeypatch.setattr(reading, "read_body", refused)
    which = bulk.Selection((state,), filter="/customer IS NULL", dry_run=verb.startswith("dry"))
    verbs: dict[str, Callable[..., Iterator[Any]]] = {
        "purge": bulk.purge, "ack": partial(bulk.ack, subscribe=queue.subscribe), "expire": bulk.expire,
        "move": partial(bulk.move, to=other.context), "requeue": bulk.requeue,
    }  # fmt: skip
    outcomes = list(verbs[verb.removeprefix("dry ")](queue.context, which))
    assert [outcome.ok for outcome in outcomes] == [False, True]
    assert outcomes[0].detail.endswith("cannot be read, or is too long or deep; it was not touched")
    assert os.path.exists(closed)


def test_a_message_whose_body_could_not_be_read_for_a_moment_is_held_against_the_filter_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, read, failures = make(), reading.read_body, iter([OSError(errno.EIO, os.strerror(errno.EIO), "there")])
    queue.send('{"customer": "ann"}')

    def refused_once(path: str, *longest: int) -> bytes:
        for error in failures:
            raise error
        return read(path, *longest)

    monkeypatch.setattr(reading, "read_body", refused_once)
    (outcome,) = bulk.purge(queue.context, bulk.Selection(("target",), filter="/customer IS NULL"))
    assert not outcome.ok and queue.counts()["target"] == 1


def test_a_message_that_is_taken_while_a_filter_reads_it_is_no_failure_of_a_verb_that_does_not_want_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make()
    queue.send_many(["{}", '{"customer": "ann"}'])
    first = next(iter(queue.browse()))

    def taken(path: str, *_: int) -> bytes:
        with suppress(FileNotFoundError):
            os.rename(first.path, base(queue) / "processing" / first.file)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(reading, "read_body", taken)
    assert list(bulk.purge(queue.context, bulk.Selection(("target",), filter="/customer = 'bob'"))) == []
    gone, there = bulk.purge(queue.context, bulk.Selection(("target", "processing"), filter="/customer IS NULL"))
    assert [gone.ok, there.ok] == [False, False]


def test_an_ack_by_a_filter_says_that_a_file_may_still_be_written_to(make: Make) -> None:
    queue = make(settle_time="1h")
    queue.send("sent")
    (base(queue) / "target" / "up.csv").write_bytes(b"x")
    refused, done = sorted(queue.ack_matching("JMSPriority = 4"), key=lambda outcome: outcome.ok)
    assert "it stays in target/: somebody may still write to it" in refused.detail and done.ok


# -- MaxDeliveries, MaxCancels -----------------------------------------------------------------------------------------

#: What becomes of a message that was delivered or cancelled once too often: AMPS's way, and ours.
EXHAUSTED = pytest.mark.parametrize(
    ("options", "state"), [({"exhausted": "expired"}, "expired"), ({}, "error")], ids=["as AMPS", "by default"]
)


@EXHAUSTED
def test_a_message_is_expired_when_its_last_allowed_delivery_ends_without_an_ack(
    make: Make, options: dict[str, str], state: str
) -> None:
    """With two deliveries allowed, the second consumer that goes away without an ack was the last.

    We depart: it goes to error/, where somebody looks at it, unless `exhausted` says expired.
    """
    queue = make(MaxDeliveries=2, **options)
    queue.send("a")
    for _ in range(2):
        assert where(queue) == {"target": [b"a"]}
        with queue.subscribe() as subscription:
            assert subscription.receive() is not None
    assert where(queue) == {state: [b"a"]}
    assert reason(queue, state) == "max_deliveries"


def test_the_last_allowed_delivery_may_be_acknowledged(make: Make) -> None:
    """The bound is on deliveries in vain."""
    queue = make(MaxDeliveries=2)
    queue.send("a")
    take(queue).nack()
    take(queue).ack()
    assert where(queue) == {"processed": [b"a"]}


@EXHAUSTED
def test_a_message_is_expired_when_it_is_cancelled_for_the_last_allowed_time(
    make: Make, clock: Clock, options: dict[str, str], state: str
) -> None:
    """With two cancels allowed, the second does not return it. A lease that runs out is no cancel, nor is an end.

    We depart as above.
    """
    queue = make(timing=FRESH, MaxCancels=2, LeasePeriod="10s", **options)
    queue.send("a")
    take(queue).nack()
    take(queue)
    clock.advance(11)
    queue.sweep()
    with queue.subscribe() as subscription:
        assert subscription.receive() is not None
    assert where(queue) == {"target": [b"a"]}
    take(queue).nack()
    assert where(queue) == {state: [b"a"]}
    assert reason(queue, state) == "max_cancels"


def test_without_these_limits_a_message_is_delivered_and_cancelled_any_number_of_times(make: Make) -> None:
    """0 is the default, and means no limit."""
    queue = make(MaxDeliveries=0)
    queue.send("a")
    for _ in range(20):
        take(queue).nack()
    assert (take(queue).delivery_count, queue.config.max_cancels) == (21, 0)


@pytest.mark.parametrize("key", ["MaxDeliveries", "MaxCancels"])
def test_the_counters_outlive_a_restart(make: Make, key: str) -> None:
    """We depart: AMPS begins again after a restart; here they stand in the file's name, for every host to see."""
    queue = make(**{key: 2})
    queue.send("a")
    for _ in range(2):
        with reopened(queue) as again:
            take(again).nack()
    assert where(queue) == {"error": [b"a"]}


# -- Priority ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("priority", "in_order"),
    [
        ("/priority", ["c", "b", "a"]),
        ("/price * /quantity", ["b", "c", "a"]),
        ("LENGTH(/name) * JMSType", ["a", "b", "c"]),
        ("/name", ["a", "b", "c"]),
    ],
    ids=["a field", "an expression", "a function", "no number"],
)
def test_messages_of_higher_priority_are_delivered_first_whenever_they_were_sent(
    make: Make, priority: str, in_order: list[str]
) -> None:
    """The value of a field of the message, or of an expression, is what counts."""
    queue = make(Priority=priority)
    queue.send('{"name": "a", "priority": 1, "price": 1, "quantity": 1}', type="9")
    queue.send('{"name": "b", "priority": 5, "price": 3, "quantity": 9}', type="5", priority=9)
    queue.send('{"name": "c", "priority": 9, "price": 5, "quantity": 5}', type="1")
    assert [json.loads(text)["name"] for text in worked_off(queue)] == in_order


def test_a_priority_is_an_unsigned_number(make: Make) -> None:
    """Whole, and not below 0. We depart where AMPS would wrap: less than 0 is 0, and so is what is no number."""
    queue = make(Priority="/n")
    values = ["-5", "0.9", '"7"', str(2**64 - 1), "1", '"x"']
    queue.send_many(f'{{"n": {value}}}' for value in values)
    assert worked_off(queue) == [f'{{"n": {values[index]}}}' for index in (3, 2, 4, 0, 1, 5)]


def test_without_a_priority_messages_are_delivered_in_the_order_of_their_coming(make: Make) -> None:
    """We depart: that is so among those of one JMS priority, which the sender may give, and which goes first."""
    queue = make()
    queue.send_many(["a", "b"])
    queue.send("urgent", priority=9)
    queue.send("c")
    assert worked_off(queue) == ["urgent", "a", "b", "c"]


# -- BarrierExpression -------------------------------------------------------------------------------------------------


def test_a_barrier_is_delivered_to_all_current_subscribers_once_every_earlier_message_is_acknowledged(
    make: Make,
) -> None:
    """So all workers know that all before it is done. Who subscribes later has no part in it.

    What AMPS's description leaves open: what is behind waits until all who were given it have settled it.
    """
    queue = make(BarrierExpression="/isSyncPoint IS NOT NULL")
    queue.send_many(["before", SYNC, "behind"])
    with queue.subscribe(max_backlog=None) as one, reopened(queue).subscribe(max_backlog=None) as other:
        message = one.receive()
        assert (body(message), one.receive(), other.receive()) == ("before", None, None)
        assert message is not None
        message.ack()
        shares = [one.receive(), other.receive()]
        assert [body(share) for share in shares] == [SYNC, SYNC]
        with reopened(queue).subscribe() as later:
            assert later.receive() is None
        for share in shares:
            assert share is not None
            assert other.receive() is None
            share.ack()
        assert body(other.receive()) == "behind"


def test_a_barrier_expression_is_evaluated_once_for_each_message(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a consumer looks. A restart looks anew, with the same result, as bodies do not change."""
    queue = make(BarrierExpression="/isSyncPoint IS NOT NULL")
    queue.send_many(["before", SYNC])
    read: Counter[str] = Counter()
    read_body = reading.read_body

    def counted(path: str, limit: int | None = None) -> bytes:
        read[os.path.basename(path)] += 1
        return read_body(path, limit)

    monkeypatch.setattr(reading, "read_body", counted)
    with queue.subscribe(max_backlog=None) as subscription:
        assert [subscription.receive() is None for _ in range(10)] == [False, *[True] * 9]
    assert set(read.values()) == {1}


def test_without_a_barrier_expression_no_message_is_a_barrier(make: Make) -> None:
    """There is none by default."""
    queue = make()
    queue.send_many(["before", SYNC, "behind"])
    with queue.subscribe(max_backlog=None) as subscription:
        assert offered(subscription) == ["before", SYNC, "behind"]


@pytest.mark.parametrize(
    "options",
    [
        {"Priority": "/n", "BarrierExpression": "/n = 1"},
        {"TargetQueueDepth": 1000, "Priority": "/n"},
        {"TargetQueueDepth": 1000, "BarrierExpression": "/n = 1"},
    ],
    ids=lambda options: " and ".join(options),
)
def test_what_asks_for_another_order_or_for_all_messages_cannot_stand_together(
    make: Make, options: dict[str, object]
) -> None:
    """A priority, a barrier and a bounded view exclude each other, whichever is said first."""
    assert all(key in refusal(make, **options) for key in options)


# -- FileBackedMetadata ------------------------------------------------------------------------------------------------


def test_metadata_is_kept_in_files(make: Make) -> None:
    """It may be asked for. We depart: it is so in any case, and cannot be otherwise."""
    for queue in (make(FileBackedMetadata="enabled"), make()):
        queue.send("a", properties={"n": 7}, correlation_id="c")
        take(queue).nack()
        queue.close()
        message = take(reopened(queue))
        assert (message.properties, message.correlation_id, message.delivery_count) == ({"n": 7}, "c", 2)
    assert "FileBackedMetadata" in refusal(make, FileBackedMetadata="disabled")


# -- TargetQueueDepth --------------------------------------------------------------------------------------------------


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Queue]:
    """A queue of which a consumer keeps a thousand messages, with two more behind them."""
    with make_queue(tmp_path, TargetQueueDepth=1000) as queue:
        queue.send_many([*(str(number) for number in range(1000)), {"body": "behind", "type": "mine"}, "last"])
        yield queue


def test_no_more_than_the_target_depth_is_kept_of_what_waits(deep: Queue) -> None:
    """A consumer remembers the first so many, in their order, and no more of them."""
    view = view_of(deep.context, depth=deep.config.target_queue_depth)
    view.refresh()
    kept = [file.filename for file in view.view]
    assert (len(kept), kept) == (1000, names_in(deep, "target")[:1000])


def test_messages_behind_the_target_depth_come_when_those_before_them_are_settled(deep: Queue) -> None:
    """Nothing is kept from anybody for good."""
    with deep.subscribe(max_backlog=None) as subscription:
        subscription.ack_many(subscription.receive_many(1000))
    assert worked_off(deep) == ["behind", "last"]


def test_messages_behind_the_target_depth_are_found_by_a_filter_and_can_be_looked_at(deep: Queue) -> None:
    """We depart: in AMPS they cannot be had, queried or deleted, and a filter that matches none before them starves.

    Here a consumer goes on to what lies behind, when nothing of what it keeps is for it.
    """
    with deep.subscribe(filter="JMSType = 'mine'") as subscription:
        assert body(subscription.receive()) == "behind"
    (message,) = deep.browse(filter="JMSType = 'mine'")
    assert deep.ack(message.id)
    assert where(deep)["processed"] == [b"behind"]


def test_without_a_target_depth_all_messages_are_active(tmp_path: Path) -> None:
    """It is not set by default. A consumer keeps 100,000 then, and finds those behind them as above."""
    queue = make_queue(tmp_path)
    queue.send_many(str(number) for number in range(1001))
    with queue.subscribe(max_backlog=None) as subscription:
        assert len(subscription.receive_many(2000)) == 1001


def test_the_target_depth_is_at_least_a_thousand(make: Make) -> None:
    """Fewer would be used up too soon."""
    assert "a whole number from 1000" in refusal(make, TargetQueueDepth=999)


# -- DeferredAckExpiration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "seconds"),
    [({"DeferredAckExpiration": "15m"}, 900), ({"DeferredAckExpiration": "2h"}, 7200), ({}, 86_400)],
    ids=["15m", "2h", "1d by default"],
)
@pytest.mark.parametrize("in_time", [True, False], ids=["in time", "too late"])
def test_an_ack_of_a_message_that_is_not_in_the_queue_is_remembered_for_so_long(
    make: Make, clock: Clock, options: dict[str, str], seconds: int, in_time: bool
) -> None:
    """A message that comes within that time is settled and delivered to nobody; one that comes later is delivered.

    We depart: whoever acknowledges asks for it, and it holds for one message with an id of dropq's.
    """
    queue = make(timing=FRESH, **options)
    message_id = f"{clock.ms:013d}000-0123456789"
    assert queue.ack(message_id, defer=True) is False
    clock.advance(seconds + (-5 if in_time else 5))
    queue.sweep()
    queue.send("a", message_id=message_id)
    assert body(queue.receive()) == (None if in_time else "a")
    assert where(queue) == {"processed" if in_time else "processing": [b"a"]}


# -- GroupLocalQueue: see test_roots.py -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["InitialOwner", "GroupLocalQueueDomain"])
@pytest.mark.parametrize("kind", ["Queue", "LocalQueue"])
def test_only_a_group_local_queue_has_an_initial_owner_and_a_domain(make: Make, key: str, kind: str) -> None:
    refused = refusal(make, **{key: "a", "ReplicationType": kind})
    assert key in refused and f"the queue is a {kind}" in refused


# -- all of it at once -------------------------------------------------------------------------------------------------


class Rules(NamedTuple):
    """What is asked of a queue, beside the rules that all have, and what its first messages make of their consumers."""

    options: dict[str, Any]
    first: tuple[str, ...] = ("die",)
    replayed: bool = False


RULES = {
    "strict": Rules({"Leasing": "strict", "LeasePeriod": "1m"}),
    "sublet": Rules({"Leasing": "sublet", "LeasePeriod": "1m"}),
    "leases that run out": Rules({"LeasePeriod": "1s"}, ("hang", "hang")),
    "a limit of deliveries": Rules({"LeasePeriod": "1m", "MaxDeliveries": 3}, ("poison",)),
    "a replay": Rules({"LeasePeriod": "1m"}, replayed=True),
}


class Crew:
    """Three consumers of a queue, of whom the dead are replaced.

    Args:
        queue: the queue.
        notes: where they leave their notes.
    """

    def __init__(self, queue: Queue, notes: Path) -> None:
        self._queue = queue
        self._notes = notes
        self._actors: list[Popen[bytes]] = []
        self._ended: list[Popen[bytes]] = []
        self.killed: list[int] = []

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until something is so, with three at work."""

        def looked() -> object:
            self._complete()
            return condition()

        until(looked, what)

    def until_settled(self, count: int) -> None:
        """Wait until so many messages are settled."""
        self.until(lambda: self._settled() >= count, f"{count} messages to be settled")

    def _complete(self) -> None:
        self._ended += [actor for actor in self._actors if actor.poll() is not None]
        self._actors = [actor for actor in self._actors if actor.poll() is None]
        while len(self._actors) < 3:
            self._actors.append(start("obey", Path(self._queue.root.path), self._notes))

    def _settled(self) -> int:
        return sum(len(os.listdir(base(self._queue) / state)) for state in ("processed", "expired", "error"))

    @property
    def hanging(self) -> list[int]:
        """The ids of the processes that hang."""
        return [actor.pid for actor in self._actors if is_stopped(actor.pid)]

    def kill_one(self) -> None:
        """Kill one that does not hang, wherever it is just now."""
        actor = next(actor for actor in self._actors if not is_stopped(actor.pid))
        self.killed.append(actor.pid)
        actor.kill()

    def wake(self) -> None:
        """Let those that hang go on, until each has found that it lost its lease."""
        for pid in self.hanging:
            os.kill(pid, signal.SIGCONT)
            until(lambda pid=pid: any((self._notes / "lost").glob(f"*.{pid}")), "who hung to lose its lease")  # type: ignore[misc]

    def dismiss(self) -> None:
        """Let all come to their end; none ended by itself but those that were killed."""
        (self._notes / "stop").touch()
        assert {actor.wait() for actor in (*self._actors, *self._ended)} == {0, -signal.SIGKILL}

    def finish(self) -> None:
        finish(*self._actors, *self._ended)


@pytest.fixture
def crews() -> Iterator[list[Crew]]:
    """The consumers of a test, who end with it."""
    crews: list[Crew] = []
    yield crews
    for crew in crews:
        crew.finish()


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
@pytest.mark.crashes
def test_consumers_of_whom_some_are_killed_keep_all_rules_at_once(
    tmp_path: Path, crews: list[Crew], rules: Rules
) -> None:
    """No more is held than MaxBacklog says, and nothing by two; each message ends in one place, and nothing stays."""
    options = {"MaxBacklog": 3, "FairnessModel": "round-robin", "Priority": "/n", **rules.options}
    queue = make_queue(tmp_path / "root", **options)
    sent = send_wishes(queue, rules.first)
    expected = Counter(sent.values())
    crews.append(crew := Crew(queue, tmp_path / "notes"))
    if "hang" in rules.first:
        crew.until(lambda: crew.hanging, "a consumer to hang")
    for count in (8, 20):
        crew.until_settled(count)
        crew.kill_one()
    if rules.replayed:
        expected += Counter(sent[outcome.id] for outcome in queue.replay() if outcome.ok)
    crew.until_settled(expected.total())
    crew.wake()
    crew.dismiss()

    queue.sweep()
    found = lying(base(queue))
    assert Counter(itertools.chain.from_iterable(found.values())) == expected
    assert found.keys() == ({"processed", "error"} if "poison" in rules.first else {"processed"})
    assert all("JMSXDeliveryCountI=3" in name for name in names_in(queue, "error"))
    assert sum(b"poison" in text for text in found["processed"]) == 0
    assert os.listdir(tmp_path / "notes" / "violations") == []
    acked = Counter(sent[name.rpartition(".")[0]] for name in os.listdir(tmp_path / "notes" / "acked"))
    assert acked <= Counter(found["processed"])
    signs, turns = (os.listdir(base(queue) / ".dropq" / folder) for folder in ("consumers", "turns"))
    # Who was killed as it made its sign of life left the draft of it, which a sweep removes a day later.
    drafts = [name for name in signs if name[0] == "." and int(name.split("-")[-2]) in crew.killed]
    assert (signs, turns) == (drafts, [])


def send_wishes(queue: Queue, first: tuple[str, ...]) -> dict[str, bytes]:
    """Send what says what is to be done with it, some of it first of all; return the bodies by their ids."""
    wishes = [{"n": 99, "do": wish, "number": -number} for number, wish in enumerate(first, 1)]
    usual = ("ack", "return", "elsewhere", "ack")
    wishes += [{"n": 7 * number % 10, "do": usual[number % 4], "number": number} for number in range(30)]
    bodies = [json.dumps(wish) for wish in wishes]
    return {sent.id: text.encode() for sent, text in zip(queue.send_many(bodies), bodies, strict=True)}
