"""Which files in a state's folder are no messages, and that no message is taken for one of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from helpers import Make, base, drop, take

from dropq import ConfigError, Message


def test_what_is_no_message_is_passed_over(make: Make) -> None:
    queue = make()
    target = base(queue) / "target"
    for name in ("_SUCCESS", "x.tmp", "x.part", ".hidden", "part-0.crc"):
        (target / name).write_bytes(b"no message")
    (target / "_temporary").mkdir()
    (target / "4.dir.B").mkdir()
    (target / "4.link.B").symlink_to(target / "_SUCCESS")
    os.mkfifo(target / "4.fifo.B")
    (target / "4.empty.B").touch()
    message = take(queue)
    assert (message.id, message.body) == ("empty", b"")
    message.ack()
    assert queue.receive() is None
    assert queue.counts()["target"] == 0
    assert list(queue.browse()) == []
    queue.sweep()
    assert len(os.listdir(target)) == 9


@pytest.mark.parametrize("patterns", [["*.tmp"], ["wip-*", "*.swp"], ["a?", "_done"], ["*[ab]"], []])
def test_what_is_counted_is_what_is_browsed_whatever_is_ignored(make: Make, patterns: list[str]) -> None:
    queue = make(ignore=patterns)
    for name in ("x.tmp", "wip-1", "y.swp", "a1", "_done", "4.za", "tmp", ".hidden"):
        (base(queue) / "target" / name).write_bytes(b"x")
    assert queue.counts()["target"] == len(list(queue.browse()))


def test_ignore_is_configured(make: Make) -> None:
    queue = make(ignore=["*.swp", "wip-*"])
    for name in ("a.swp", "wip-b", "c.tmp"):
        drop(queue, name, name.encode())
    assert take(queue).body == b"c.tmp"
    assert queue.receive() is None


@pytest.mark.parametrize(
    "headers",
    [
        {"type": "tmp"},
        {"type": "part", "priority": 9},
        {"reply_to": "crc"},
        {"correlation_id": "part"},
    ],
)
def test_a_message_whose_last_header_is_an_ignored_suffix_is_received_with_it(
    make: Make, headers: dict[str, Any]
) -> None:
    queue = make()
    queue.send(b"a", **headers)
    message = take(queue)
    assert message.body == b"a"
    assert {
        "type": message.type,
        "reply_to": message.reply_to,
        "correlation_id": message.correlation_id,
    } == {"type": None, "reply_to": None, "correlation_id": None} | {
        header: text for header, text in headers.items() if header != "priority"
    }
    message.nack()
    assert take(queue).redelivered


@pytest.mark.parametrize(
    ("settle", "state"),
    [
        (Message.ack, "processed"),
        (lambda message: message.fail("no good"), "error"),
        (Message.expire, "expired"),
    ],
)
def test_a_settled_message_whose_id_has_an_ignored_suffix_stays_visible(
    make: Make, settle: Callable[[Message], None], state: str
) -> None:
    queue = make()
    queue.send(b"a", message_id="upload.part")
    settle(take(queue))
    assert queue.counts()[state] == 1
    assert [message.id for message in queue.browse(state)] == ["upload.part"]
    assert queue.fsck() == []
    assert [outcome.ok for outcome in queue.requeue(state=state)] == [True]


@pytest.mark.parametrize("pattern", ["*.B", "4.*", "*.[A-Z]", "[0-9]*", "*-*", "9.*", "4.1*", "?.*.T"])
def test_a_pattern_that_would_hide_plain_messages_cannot_be_ignored(make: Make, pattern: str) -> None:
    with pytest.raises(ConfigError, match="cannot be ignored"):
        make(ignore=[pattern])
