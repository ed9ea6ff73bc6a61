"""Where a message could not be delivered, and why, goes with it from queue to queue, until it is sent anew.

The scenarios are those of "Internal accounting": a service that is missing, and exceptions that selectors route.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import FRESH, Run, drop, take, timed, until

from dropq import InvalidFilter, Message, NoSuchQueue, Queue, Root, Unavailable
from dropq.cli import main as cli
from dropq.filters import compile_filter
from dropq.format.names import parse

#: Of the letters here: the queue that each came from, and why.
ENVELOPE = ("service", "max_deliveries")
#: A property so long that it, and what else need not be in a name, goes to a sidecar.
LONG = {"long": "x" * 200}


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = timed(Root.create(tmp_path / "root"), FRESH)
    (root.path / "dropq.toml").write_text('format = 1\ndead_letter_queue = "dead"\n')
    root = timed(Root(root.path), FRESH)
    root.create_queue("dead", redelivery_delay=0)
    return root


@pytest.fixture
def service(root: Root) -> Queue:
    """A queue whose messages become dead letters when they are given back once."""
    options: dict[str, Any] = {"max_deliveries": 1, "exhausted": "dead-letter", "redelivery_delay": 0}
    return root.create_queue("service", **options)


@pytest.fixture(params=[{}, LONG], ids=["short", "in a sidecar"])
def dead(root: Root, service: Queue, request: pytest.FixtureRequest) -> Queue:
    """The dead-letter queue, with a letter from the service."""
    service.send("a", reply_to="asker", properties=request.param)
    take(service).nack()
    return root.queue("dead")


def envelope(message: Message) -> tuple[str | None, str | None]:
    return message.origin, message.dead_letter_reason


def only(queue: Queue, state: str = "target") -> Message:
    (message,) = queue.browse(state)
    return message


# -- what keeps it, and what drops it ------------------------------------------------------------------------------


def moved(dead: Queue, other: Queue) -> None:
    dead.add_selector("on", to=other.name)
    assert dead.route() == {"on": 1}


def copied(dead: Queue, other: Queue) -> None:
    dead.add_selector("on", op="copy", to=other.name)
    assert dead.route() == {"on": 1}


def moved_by_hand(dead: Queue, other: Queue) -> None:
    assert [outcome.ok for outcome in dead.move(other, state="target")] == [True]


def moved_twice(dead: Queue, other: Queue) -> None:
    between = dead.root.create_queue("between")
    moved(dead, between)
    moved(between, other)


def routed(dead: Queue, other: Queue) -> None:
    os.symlink(other.layout.target, f"{dead.layout.routing}/on")
    Path(dead.layout.routing, "on.in-use").touch()
    Path(dead.layout.base, "routing.properties").write_text("on.selector=TRUE\n")
    assert dead.receive(timeout=0) is None


def moved_by_mv(dead: Queue, other: Queue) -> None:
    (file,) = os.listdir(dead.layout.target)
    os.rename(f"{dead.layout.target}/{file}", f"{other.layout.target}/{file}")


@pytest.mark.parametrize("way", [moved, copied, moved_by_hand, moved_twice, routed, moved_by_mv])
def test_what_moves_a_letter_on_keeps_its_envelope(dead: Queue, way: Callable[[Queue, Queue], None]) -> None:
    other = dead.root.create_queue("other")
    way(dead, other)
    assert envelope(only(other)) == ENVELOPE
    assert only(other).body == b"a"


def test_a_letter_whose_selector_is_removed_comes_back_with_its_envelope(dead: Queue) -> None:
    moved(dead, dead.root.create_queue("other"))
    dead.remove_selector("on")
    assert envelope(only(dead)) == ENVELOPE


def test_a_letter_that_is_set_aside_and_requeued_in_its_queue_keeps_its_envelope(dead: Queue) -> None:
    take(dead).reject("why not")
    assert [outcome.ok for outcome in dead.requeue()] == [True]
    assert envelope(only(dead)) == ENVELOPE


def test_a_letter_of_a_foreign_name_keeps_its_envelope_in_error_and_in_the_archive(root: Root, service: Queue) -> None:
    drop(service, "report.csv", b"a")
    take(service).nack()
    dead = root.queue("dead")
    take(dead).reject("why not")
    assert envelope(only(dead, "error")) == ENVELOPE
    assert [outcome.ok for outcome in dead.requeue()] == [True]
    take(dead).ack()
    assert envelope(only(dead, "processed")) == ENVELOPE
    assert [outcome.ok for outcome in dead.replay(to=service)] == [True]
    assert envelope(only(service)) == ENVELOPE
    assert take(service).id == "report.csv"


def requeued(dead: Queue, other: Queue) -> None:
    take(dead).reject("why not")
    assert cli.main(["--root", str(dead.root.path), "requeue", "dead", "--to", other.name, "--all", "--yes"]) == 0


def requeued_to_origin(dead: Queue, other: Queue) -> None:
    assert [outcome.ok for outcome in dead.requeue(to_origin=True)] == [True]
    dead.root.queue("service").move(other, state="target")


def published(dead: Queue, other: Queue) -> None:
    topic = dead.root.create_topic("news")
    topic.create_subscription("reader", client_id="c")
    dead.move(dead.root.queue("news"), state="target")
    assert topic.queue.sweep().distributed == 1
    dead.root.queue("news/reader.c").move(other, state="target")


def recovered(dead: Queue, other: Queue) -> None:
    topic = dead.root.create_topic("news")
    dead.move(dead.root.queue("news"), state="target")
    assert topic.queue.sweep().distributed == 1
    topic.create_subscription("reader", recovery_point="epoch", client_id="c")
    dead.root.queue("news/reader.c").move(other, state="target")


@pytest.mark.parametrize("way", [requeued, requeued_to_origin, published, recovered])
def test_what_begins_again_has_no_envelope(dead: Queue, way: Callable[[Queue, Queue], None]) -> None:
    other = dead.root.create_queue("other")
    way(dead, other)
    assert envelope(only(other)) == (None, None)
    assert "JMS_dropq_origin" not in json.dumps([json.loads(sidecar.read_text()) for sidecar in sidecars_of(other)])


def sidecars_of(queue: Queue) -> list[Path]:
    """Return the sidecars of the messages that wait in a queue."""
    meta = [message.file.partition("metaS=")[2].partition("&")[0] for message in queue.browse()]
    return [queue.root.path / ".dropq" / "meta" / f"{token}.json" for token in meta if token]


def test_a_replay_to_another_queue_keeps_the_envelope(dead: Queue) -> None:
    other = dead.root.create_queue("other")
    take(dead).ack()
    assert [outcome.ok for outcome in dead.replay(to=other)] == [True]
    assert envelope(only(other)) == ENVELOPE


def test_the_filter_of_a_subscription_sees_the_copy_which_begins_anew(dead: Queue) -> None:
    topic = dead.root.create_topic("news")
    filters = {"anew": "JMS_dropq_reason IS NULL", "letters": "JMS_dropq_origin = 'service'"}
    for name, filter in filters.items():
        topic.create_subscription(name, client_id="c", filter=filter)
    dead.move(dead.root.queue("news"), state="target")
    assert topic.queue.sweep().distributed == 1
    for name, filter in filters.items():
        topic.create_subscription(f"{name}-late", client_id="c", filter=filter, recovery_point="epoch")
    taken = {name: dead.root.queue(f"news/{name}.c").receive(timeout=0) for name in filters}
    assert taken["anew"] is not None and taken["letters"] is None
    assert dead.root.queue("news/anew-late.c").receive(timeout=0) is not None
    assert dead.root.queue("news/letters-late.c").counts()["target"] == 0


def test_a_letter_that_ends_again_says_where_it_ended_first_and_why_it_ended_last(dead: Queue) -> None:
    retry = dead.root.create_queue("retry", unroutable_after="0s")
    moved(dead, retry)
    retry.add_selector("nobody", to="service", filter="FALSE")
    retry.route()
    dead.remove_selector("on")
    assert envelope(only(dead)) == ("service", "unroutable")


def test_letters_that_selectors_try_again_and_again_end_and_say_where_and_why(root: Root, service: Queue) -> None:
    dead = root.queue("dead")
    dead.add_selector("retry", to="service", filter="JMS_dropq_reason = 'max_deliveries'")
    service.send("a")
    tries = 0
    while (message := service.receive(timeout=0)) is not None:
        message.nack()
        dead.route()
        tries += 1
    assert 5 < tries < 20
    (ended,) = [message for queue in (dead, service) for message in queue.browse("error")]
    assert envelope(ended)[0] == "service"
    assert dead.counts()["target"] == service.counts()["target"] == 0


def test_two_dead_letter_queues_that_send_to_each_other_come_to_an_end(root: Root) -> None:
    ring = [root.create_queue(name, max_deliveries=1, exhausted="dead-letter", dead_letter_queue=other)
            for name, other in (("one", "two"), ("two", "one"))]  # fmt: skip
    ring[0].send("a")
    for _ in range(40):
        for queue in ring:
            if (message := queue.receive(timeout=0)) is not None:
                message.nack()
    (ended,) = [message for queue in ring for message in queue.browse("error")]
    assert envelope(ended) == ("one", "max_deliveries")


# -- a bounce ------------------------------------------------------------------------------------------------------


def test_a_bounce_says_which_queue_bounced_a_message(root: Root) -> None:
    service, asker = root.create_queue("closed"), root.create_queue("asker")
    service.add_selector("back", op="bounce", to="asker")
    service.send("a", reply_to="asker")
    assert service.route() == {"back": 1}
    assert envelope(only(asker)) == ("closed", "bounced")
    assert asker.health().notes == (), "what was bounced is no dead letter"
    assert only(asker).reply_to is None


def test_a_bounce_of_a_letter_says_what_the_letter_says(dead: Queue) -> None:
    asker = dead.root.create_queue("asker")
    dead.add_selector("back", op="bounce", to="asker")
    assert dead.route() == {"back": 1}
    assert envelope(only(asker)) == ENVELOPE


def test_a_letter_that_is_bounced_to_a_missing_queue_stays_and_says_where_and_why(dead: Queue) -> None:
    dead.add_selector("back", op="bounce", to="asker")
    dead.route()
    set_aside = only(dead, "error")
    assert envelope(set_aside) == ENVELOPE
    assert set_aside.reason is not None and set_aside.reason["reason"] == "no_return_address"


def test_the_return_address_that_an_older_version_kept_is_left_out(root: Root) -> None:
    name = "4.1748852100000000-7684938284.T....order.JMS_dropq_returnToS=temp-1&colorS=red"
    queue = root.create_queue("queue")
    drop(queue, name, b"a")
    assert dict(only(queue).properties) == {"color": "red"}
    assert parse(name).properties.keys() == {"color"}


# -- filters and commands that read it -------------------------------------------------------------------------------


@pytest.mark.parametrize("body", ["", " AND /n = 1"], ids=["JMS", "AMPS"])
def test_filters_read_the_envelope(root: Root, service: Queue, body: str) -> None:
    for properties in ({}, LONG):
        service.send('{"n": 1}', properties=properties)
        take(service).nack()
    root.queue("missing").send('{"n": 1}')
    dead = root.queue("dead")
    dead.send('{"n": 1}')
    found = {
        filter: len(list(dead.browse(filter=filter + body)))
        for filter in ("JMS_dropq_origin = 'service'", "JMS_dropq_reason = 'no_such_queue'", "JMS_dropq_origin IS NULL")
    }
    assert list(found.values()) == [2, 1, 1]


@pytest.mark.parametrize("text", ["JMS_dropq_orign = 'a'", "/a = 1 OR JMS_dropq_since > 3"])
def test_a_filter_that_names_another_word_of_dropqs_is_refused_and_pointed_at(text: str) -> None:
    with pytest.raises(InvalidFilter, match=r"JMS_dropq_origin, JMS_dropq_reason") as caught:
        compile_filter(text)
    _, shown, caret = str(caught.value).split("\n")
    assert shown[caret.index("^") :].startswith("JMS_dropq_")


def test_selectors_route_exceptions_by_their_reasons_and_origins(root: Root, service: Queue) -> None:
    dead, late, lost = root.queue("dead"), root.create_queue("late"), root.create_queue("lost")
    dead.add_selector("late", to="late", credit=9, filter="JMS_dropq_origin = 'service'")
    dead.add_selector("lost", to="lost", credit=9, filter="JMS_dropq_reason = 'no_such_queue'")
    service.send("late")
    take(service).nack()
    root.queue("printer").send("lost")
    assert dead.route() == {"late": 1, "lost": 1}
    assert (only(late).text, only(lost).text) == ("late", "lost")


def test_a_command_of_work_is_told_the_envelope(dead: Queue, run: Run) -> None:
    script = 'printf "%s %s" "$DROPQ_ORIGIN" "$DROPQ_REASON"'
    done = run("work", "dead", "--until-empty", "--", "sh", "-c", f"{script} > {dead.root.path}/said")
    assert (done.code, (dead.root.path / "said").read_text()) == (0, " ".join(ENVELOPE))


def test_browse_and_show_tell_the_envelope(dead: Queue, run: Run) -> None:
    moved(dead, other := dead.root.create_queue("other"))
    for words in (("browse", "other"), ("show", "other", only(other).id)):
        shown = json.loads(run(*words, "--json").out.splitlines()[0])
        assert (shown["origin"], shown["dead_letter_reason"]) == ENVELOPE


# -- a service that is not there: the article's lookup ----------------------------------------------------------------


@pytest.fixture
def lookup(root: Root) -> Root:
    """A root in which requests to services that are not there go back to who asked."""
    root.queue("dead").add_selector("back", op="bounce", filter="JMS_dropq_reason = 'no_such_queue'")
    return root


def while_routing(root: Root, what: Callable[[], object]) -> None:
    """Do something while a thread routes what becomes a dead letter."""
    ended = threading.Event()

    def route() -> None:
        dead = Root(root.path).queue("dead")
        while not ended.wait(0.01):
            dead.route()

    thread = threading.Thread(target=route)
    thread.start()
    try:
        what()
    finally:
        ended.set()
        thread.join()


def test_who_asks_a_service_that_is_not_there_is_told_which(lookup: Root) -> None:
    def ask() -> None:
        with pytest.raises(NoSuchQueue, match=r"came back: queue printer\.c is not there \(no_such_queue\)"):
            lookup.queue("printer.c").request("a page", timeout=60)

    while_routing(lookup, ask)
    assert lookup.queue("dead").counts()["target"] == 0


def test_who_asks_a_service_that_bounces_is_told_so(lookup: Root) -> None:
    closed = lookup.create_queue("closed")
    closed.add_selector("back", op="bounce")

    def ask() -> None:
        thread = threading.Thread(target=lambda: until(lambda: closed.route() == {"back": 1}, "the bounce"))
        thread.start()
        with pytest.raises(Unavailable, match=r"came back: queue closed did not keep it \(bounced\)"):
            Root(lookup.path).queue("closed").request("a page", timeout=60)
        thread.join()

    while_routing(lookup, ask)


def test_an_answer_that_bears_the_id_of_its_request_is_an_answer(root: Root) -> None:
    service = root.create_queue("working")

    def respond() -> None:
        with Root(root.path).queue("working").subscribe() as subscription:
            message = subscription.receive(timeout=60)
            assert message is not None and message.reply_to is not None
            root.queue(message.reply_to).send("done", message_id=message.id, correlation_id=message.id)
            message.ack()

    thread = threading.Thread(target=respond)
    thread.start()
    answer = service.request("a page", timeout=60)
    thread.join()
    assert answer is not None and answer.text == "done"


def test_a_request_to_a_queue_that_is_away_exits_as_any_send(lookup: Root, run: Run) -> None:
    away = lookup.create_queue("away")
    os.rename(away.layout.home, lookup.path.parent / "disk")
    os.symlink(lookup.path.parent / "no-disk", away.layout.home)
    sent, asked = run("send", "away", input="x"), run("send", "away", "--wait-reply", "5s", input="x")
    assert sent.code == asked.code == 75


@pytest.mark.parametrize(("name", "code", "word"), [("printer", 66, "no_such_queue"), ("closed", 75, "bounced")])
def test_in_the_shell_the_exit_code_says_so(lookup: Root, name: str, code: int, word: str) -> None:
    closed = lookup.create_queue("closed")
    closed.add_selector("back", op="bounce")

    def ask() -> None:
        words = [sys.executable, "-m", "dropq", "send", name, "--wait-reply", "60s", "--root", str(lookup.path)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
            assert asking.stdin is not None
            asking.stdin.close()
            until(lambda: closed.route() or asking.poll() is not None, "the bounce, or the end", timeout=60)
            assert asking.stdout is not None and asking.stderr is not None
            said = asking.stdout.read(), asking.stderr.read().decode()
        assert asking.returncode == code
        assert said[0] == b"" and f"came back: queue {name} " in said[1] and f"({word})" in said[1]

    while_routing(lookup, ask)
