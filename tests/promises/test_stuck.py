"""What a stranger leaves in a topic or a queue keeps nothing behind it from its receivers."""

from __future__ import annotations

from pathlib import Path

import pytest
from children import unprivileged
from helpers import FRESH, Clock, base, drop, names_in, timed

from dropq import Queue, Root


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Root:
    made = Root.create(tmp_path / "root", clock=clock)
    made.path.joinpath("dropq.toml").write_text('format = 1\n[defaults]\ndurability = "none"\nredelivery_delay = 0\n')
    return opened(made)


def opened(root: Root) -> Root:
    """The same root as another process opens it."""
    return timed(Root(root.path, clock=root.clock), FRESH)


def drop_closed(queue: Queue, name: str) -> None:
    """Send a file that nobody but a privileged user may read."""
    drop(queue, name, b"closed")
    (base(queue) / "target" / name).chmod(0)


def bodies(queue: Queue) -> list[bytes]:
    return [message.body for message in queue.browse()]


def why_in_error(queue: Queue) -> list[str]:
    return [message.reason["reason"] for message in queue.browse("error")]


# -- a body that is closed to who distributes ------------------------------------------------------------------------


@pytest.mark.parametrize("filter", [None, "/a = 1"])
def test_a_file_that_may_not_be_read_goes_to_error_and_what_is_behind_it_is_distributed(
    root: Root, filter: str | None
) -> None:
    topic = root.create_topic("t")
    copies = topic.create_subscription("s", client_id="c", filter=filter)
    drop_closed(topic.queue, "a.csv")
    drop(topic.queue, "b.csv", b'{"a": 1}')
    unprivileged(lambda: opened(root).sweep())
    assert bodies(copies) == [b'{"a": 1}']
    assert names_in(topic.queue, "error") == ["a.csv"] and why_in_error(topic.queue) == ["unreadable"]


def test_explain_says_of_a_file_that_may_not_be_read_what_becomes_of_it_and_of_no_other(root: Root) -> None:
    topic = root.create_topic("t")
    topic.create_subscription("s", client_id="c", filter="/a = 1")
    drop_closed(topic.queue, "a.csv")
    drop(topic.queue, "b.csv", b"{}")
    said = unprivileged(lambda: [explained.why for explained in opened(root).queue("t").explain()])
    assert said == ["unreadable", "ready"]
    assert unprivileged(lambda: opened(root).queue("t").health().healthy)


def test_a_file_that_may_not_be_read_is_not_tried_again_and_again_by_a_selector_that_copies(root: Root) -> None:
    queue = root.create_queue("q")
    for name in ("x", "y"):
        root.create_queue(name)
        queue.add_selector(name, to=name, op="copy")
    drop_closed(queue, "a.csv")
    drop(queue, "b.csv", b"b")
    unprivileged(lambda: opened(root).queue("q").route())
    assert bodies(root.queue("x")) == bodies(root.queue("y")) == [b"b"]
    assert names_in(queue, "error") == ["a.csv"] and why_in_error(queue) == ["unreadable"]
