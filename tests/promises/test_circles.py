"""A circle of selectors, routes, topics, subscriptions and views: nobody makes one, and nothing goes round on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers import FRESH, Clock, Run, base, names_in, timed

from dropq import ConfigError, Queue, Root, Topic
from dropq.lifecycle import folders
from dropq.policies import selectors
from dropq.routing import registry
from dropq.topics import subscriptions
from dropq.topics.views import show_view


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Root:
    Root.create(tmp_path / "root").path.joinpath("dropq.toml").write_text(
        '[defaults]\ndurability = "none"\nredelivery_delay = 0\n'
    )
    return opened(tmp_path / "root", clock)


def opened(path: Path, clock: Clock) -> Root:
    return timed(Root(path, clock=clock), FRESH)


def topic_with(root: Root, *subscriptions: str, name: str = "t") -> Topic:
    topic = root.create_topic(name)
    for each in subscriptions:
        topic.create_subscription(each, client_id="c")
    return topic


def by_hand(queue: Queue, to: str, name: str = "back", op: str = "move") -> None:
    """Write the file of a selector, as an editor does."""
    Path(queue.layout.selectors).mkdir(exist_ok=True)
    Path(queue.layout.selectors, f"{name}.toml").write_text(f'to = "{to}"\nop = "{op}"\n')


def by_route(queue: Queue, to: Queue, name: str = "back") -> None:
    routing = base(queue) / "routing"
    routing.mkdir(exist_ok=True)
    (base(queue) / "routing.properties").write_text(f"{name}.selector=TRUE\n")
    (routing / name).symlink_to(base(to) / "target")
    (routing / f"{name}.in-use").touch()


# -- circles, by the last edge of each ---------------------------------------------------------------------------------


def through_a_topic(root: Root) -> tuple[Queue, str]:
    topic_with(root, "again", "audit")
    return root.queue("t/again.c"), "t"


def through_a_topic_below(root: Root) -> tuple[Queue, str]:
    topic_with(root, "again", "audit")
    topic_with(root, name="t.eu")
    return root.queue("t/again.c"), "t.eu"


def through_a_view(root: Root) -> tuple[Queue, str]:
    topic_with(root, "audit")
    root.create_queue("view", underlying_topic="t")
    root.create_queue("queue").add_selector("on", to="t")
    return root.queue("view"), "queue"


def through_a_send_to_a_view(root: Root) -> tuple[Queue, str]:
    topic_with(root, "again", "audit")
    root.create_queue("view", underlying_topic="t")
    return root.queue("t/again.c"), "view"


def through_a_route(root: Root) -> tuple[Queue, str]:
    topic_with(root, "again", "audit")
    by_route(root.create_queue("queue"), root.topic("t").queue, "on")
    return root.queue("t/again.c"), "queue"


def through_a_linked_queue(root: Root) -> tuple[Queue, str]:
    topic = topic_with(root, "audit")
    linked = root.create_queue("linked")
    (base(topic.queue).parent / ".subscriptions" / "linked.x").symlink_to(base(linked))
    return linked, "t"


def through_a_branch(root: Root) -> tuple[Queue, str]:
    """Two ways lead from the topic to the queue that closes the circle."""
    topic_with(root, "left", "right", "audit")
    meet = root.create_queue("meet")
    for side in ("left", "right"):
        root.queue(f"t/{side}.c").add_selector("on", to="meet")
    return meet, "t"


#: How each circle is made but for one selector: its queue and where it is to send; and the way round.
CIRCLES: dict[str, tuple[Callable[[Root], tuple[Queue, str]], str]] = {
    "topic": (through_a_topic, "t/again.c -> t -> t/again.c"),
    "topic below": (through_a_topic_below, "t/again.c -> t.eu -> t/again.c"),
    "view": (through_a_view, "view -> queue -> t -> view"),
    "send to a view": (through_a_send_to_a_view, "t/again.c -> t -> t/again.c"),
    "route": (through_a_route, "t/again.c -> queue -> t -> t/again.c"),
    "linked queue": (through_a_linked_queue, "linked -> t -> linked"),
    "branch": (through_a_branch, "meet -> t -> t/"),
}


@pytest.mark.parametrize("case", CIRCLES)
@pytest.mark.parametrize("op", ["move", "copy"])
def test_a_selector_that_closes_a_circle_is_refused(root: Root, case: str, op: str) -> None:
    build, way = CIRCLES[case]
    queue, to = build(root)
    with pytest.raises(ConfigError, match=f"messages would go round: {way}"):
        queue.add_selector("back", to=to, op=op)
    assert not queue.selectors()


@pytest.mark.parametrize("case", CIRCLES)
def test_on_a_circle_that_was_made_by_hand_nothing_goes_round_and_health_names_it(
    root: Root, clock: Clock, case: str, run: Run
) -> None:
    build, way = CIRCLES[case]
    queue, to = build(root)
    by_hand(queue, to)
    text = f"messages would go round: {way}"
    assert text in run("config", "check").out
    root = opened(root.path, clock)
    queue = root.queue(queue.name)
    root.topic("t").publish("once")
    for _ in range(5):
        clock.advance(100)
        for each in root.queues():
            each.route()
    assert len(names_in(root.queue("t/audit.c"), "target")) == 1
    assert sum(len(names_in(each, "target")) for each in root.queues()) <= 3
    assert sum(len(names_in(each, "processed")) for each in root.queues()) == 1  # the topic's
    assert any(text in reason.message for reason in queue.health().reasons if reason.kind == "selector")
    by_hand(queue, "elsewhere")
    root.create_queue("elsewhere")
    for each in root.queues() * 2:
        each.route()
    assert names_in(root.queue("elsewhere"), "target")  # the circle is open: what waited goes on


def test_on_a_circle_of_routes_through_a_topic_nothing_goes_round(root: Root, clock: Clock) -> None:
    topic = topic_with(root, "again", "audit")
    again = root.queue("t/again.c")
    by_route(again, topic.queue)
    topic.publish("once")
    for _ in range(5):
        assert not again.route()
        topic.queue.route()
    assert [len(names_in(root.queue(f"t/{each}.c"), "target")) for each in ("again", "audit")] == [1, 1]
    (reason,) = again.health().reasons
    assert reason.kind == "route" and "messages would go round: t/again.c -> t -> t/again.c" in reason.message


def test_a_way_that_meets_itself_and_leads_nowhere_back_is_no_circle(root: Root) -> None:
    through_a_branch(root)
    root.create_queue("end")
    root.queue("meet").add_selector("on", to="end")
    by_route(root.create_queue("aside"), root.queue("meet"))
    root.topic("t").publish("once")
    for name in ("t/left.c", "t/right.c", "meet", "aside"):
        root.queue(name).route()
    assert len(names_in(root.queue("end"), "target")) == 1  # one under credit, and the other waits for it
    assert len(names_in(root.queue("meet"), "target")) == 1


def test_a_queue_or_topic_that_would_close_a_circle_is_not_made(root: Root) -> None:
    topic_with(root, "again", "more")
    by_hand(root.queue("t/again.c"), "view")
    with pytest.raises(ConfigError, match=r"messages would go round: t -> t/again\.c -> t"):
        root.create_queue("view", underlying_topic="t")
    assert not root.queue("view").exists() and not names_in_views(root)
    by_hand(root.queue("t/more.c"), "t.eu")
    with pytest.raises(
        ConfigError, match=r"'t\.eu' was not made: messages would go round: t\.eu -> t/more\.c -> t\.eu"
    ):
        root.create_topic("t.eu")
    assert not (root.path / "topic-root" / "t" / "eu").exists()
    by_hand(root.create_queue("queue"), "maker")
    with pytest.raises(ConfigError, match="maker -> queue -> maker"):
        root.create_queue("maker", selector=[{"name": "on", "to": "queue"}])


def names_in_views(root: Root) -> list[str]:
    folder = root.path / ".dropq" / "views"
    return sorted(each.name for each in folder.iterdir()) if folder.exists() else []


def test_of_two_who_close_a_circle_together_one_is_refused_and_the_other_may_be_too(root: Root) -> None:
    one, two = root.create_queue("one"), root.create_queue("two")
    reserve = selectors.reserve_token

    def meanwhile(*arguments: object) -> str:
        with mock.patch.object(selectors, "reserve_token", reserve):
            two.add_selector("on", to="one")
        return reserve(*arguments)  # type: ignore[arg-type]

    with (
        mock.patch.object(selectors, "reserve_token", meanwhile),
        pytest.raises(ConfigError, match="was made, and is removed again: messages would go round: one -> two -> one"),
    ):
        one.add_selector("on", to="two")
    assert not one.selectors() and not registry.removed_in(one.context)
    assert [each.to for each in two.selectors()] == ["one"]


def test_a_selector_that_closes_no_circle_is_made_though_its_queue_is_on_one(root: Root) -> None:
    one, two = root.create_queue("one"), root.create_queue("two")
    root.create_queue("aside")
    for queue, to in ((one, "two"), (two, "one")):
        by_hand(queue, to)
    one.add_selector("on", to="aside")
    assert [each.name for each in one.selectors()] == ["back", "on"]


def test_of_two_who_close_a_circle_together_a_view_is_removed_again_that_comes_later(root: Root) -> None:
    topic_with(root, "audit")
    one = root.create_queue("one")

    def meanwhile(*arguments: Any) -> None:
        one.add_selector("on", to="t")
        show_view(*arguments)

    with (
        mock.patch("dropq.upkeep.queues.show_view", meanwhile),
        pytest.raises(ConfigError, match="'view' was made, and is removed again: messages would go round: view -> one"),
    ):
        root.create_queue("view", underlying_topic="t", selector=[{"name": "on", "to": "one"}])
    assert not root.queue("view").exists() and not names_in_views(root)
    assert [each.to for each in one.selectors()] == ["t"]


def test_of_two_who_close_a_circle_together_a_topic_is_removed_again_that_comes_later(root: Root) -> None:
    topic_with(root, "again")
    one = root.create_queue("one")
    root.queue("t/again.c").add_selector("on", to="one")
    root.create_queue("view", underlying_topic="t.eu")
    build = folders.building

    def meanwhile(*arguments: Any, **how: Any) -> Any:
        one.add_selector("on", to="view")
        return build(*arguments, **how)

    with (
        mock.patch.object(subscriptions, "building", meanwhile),
        pytest.raises(
            ConfigError, match=r"'t\.eu' was made, and is removed again: messages would go round: t\.eu -> t/"
        ),
    ):
        root.create_topic("t.eu")
    assert not (root.path / "topic-root" / "t" / "eu").exists()


def test_a_copy_of_what_is_published_has_made_the_hops_of_the_message(root: Root) -> None:
    topic_with(root, "sub")
    start = root.create_queue("start")
    start.add_selector("on", to="t")
    start.send("x")
    start.route()
    root.topic("t").queue.route()
    (name,) = names_in(root.queue("t/sub.c"), "target")
    assert "JMS_dropq_hopsI=1" in name
