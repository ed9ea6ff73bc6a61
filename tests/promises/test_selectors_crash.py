"""No crash, no refused call and no other program makes selectors lose or double a message, or overdraw their credits.

These are some cases of each; `make torture` has all of them, in its part `graph`.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers import FRESH, Clock, first_and_long, other_file_system, take, timed
from torture.graph_cases import CASES, OTHERS, SETTINGS, GraphCases, Setting
from torture.table import Row

from dropq import Queue, Root, StorageError
from dropq.format.credits import Via, via_of
from dropq.lifecycle import credits
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.settlement import Claims
from dropq.routing import credit_audit, registry
from dropq.staging import fan_out
from dropq.storage import reading
from dropq.storage.files import Storage


def few(seed: int, many: int) -> Callable[[list[Any]], list[Any]]:
    """Choose so many at random."""
    chance = random.Random(seed)
    return lambda every: chance.sample(every, min(many, len(every)))


@pytest.mark.parametrize("setting", first_and_long(SETTINGS), ids=lambda setting: setting.name)
def test_a_crash_anywhere_loses_and_doubles_nothing_and_overdraws_no_credit(tmp_path: Path, setting: Setting) -> None:
    if setting.far and not other_file_system(tmp_path):
        pytest.skip("there is no other file system here")
    seed, row = random.randrange(10**6), Row("crash")
    for case in random.Random(seed).sample(CASES, 3):
        GraphCases(tmp_path, setting, row).crash(case, few(seed, 1))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []
    assert row.kills and not row.lost and not row.doubled


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[-2]], ids=lambda setting: setting.name)
def test_a_refused_call_loses_and_doubles_nothing_and_overdraws_no_credit(tmp_path: Path, setting: Setting) -> None:
    seed, row = random.randrange(10**6), Row("fault")
    for case in random.Random(seed).sample(CASES, 3):
        GraphCases(tmp_path, setting, row).refuse(case, few(seed, 2))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []
    assert row.faults and not row.lost and not row.doubled


@pytest.mark.parametrize("other", OTHERS)
def test_two_programs_at_once_settle_each_message_once_and_overdraw_no_credit(tmp_path: Path, other: str) -> None:
    seed, row = random.randrange(10**6), Row("two at once")
    for case in random.Random(seed).sample(CASES, 3):
        GraphCases(tmp_path, SETTINGS[0], row).meet(case, other, few(seed, 1))
    assert [f"seed {seed}: {line}" for line in row.wrong] == []


# -- that it would be seen ---------------------------------------------------------------------------------------------


def tried(tmp_path: Path, name: str, *, meeting: str = "", many: int = 30) -> Row:
    row = Row("control")
    case = next(case for case in CASES if case.name == name)
    cases = GraphCases(tmp_path, SETTINGS[0], row)
    if meeting:
        cases.meet(case, meeting, few(1, many))
    else:
        cases.crash(case, few(1, many))
    return row


def test_a_credit_that_is_freed_before_its_message_is_settled_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Claims.archive

    def early(self: Claims, claim: Any, *args: Any, **options: Any) -> Any:
        credits.free(self.context, claim.own_name)
        return archive(self, claim, *args, **options)

    monkeypatch.setattr(Claims, "archive", early)
    wrong = tried(tmp_path, "ack under two credits").wrong
    assert any("is free, and" in line for line in wrong), wrong


def test_credits_below_that_nobody_frees_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def own_alone(context: Any, file: str) -> None:
        if (via := via_of(file)) is not None:
            credits._remove(context, via, file)

    monkeypatch.setattr(credits, "free", own_alone)
    monkeypatch.setattr(credit_audit.CreditAudit, "run", lambda self: 0)
    wrong = tried(tmp_path, "ack under two credits").wrong
    assert any("is spent on nothing" in line for line in wrong), wrong


def test_a_message_that_is_moved_before_its_credit_is_made_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spend, move_on = credits.spend, Moves.move_on
    late: list[Any] = []

    def moved_first(self: Moves, *args: Any) -> Any:
        moved = move_on(self, *args)
        spend(*late.pop())
        return moved

    monkeypatch.setattr(credits, "spend", lambda *args: late.append(args))
    monkeypatch.setattr(Moves, "move_on", moved_first)
    wrong = tried(tmp_path, "move further", meeting="a sweep", many=1).wrong
    assert any("is free, and" in line for line in wrong), wrong


def test_a_look_that_takes_each_credit_for_idle_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credit_audit, "_live", lambda *_: set())
    wrong = tried(tmp_path, "nack under two credits", meeting="a sweep", many=3).wrong
    assert any("is free, and" in line for line in wrong), wrong


def test_a_copy_that_keeps_its_credit_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def kept(name: Any, **changes: Any) -> Any:
        if "copy" in changes:
            changes.pop("via", None)
        return replace(name, **changes)

    monkeypatch.setattr("dropq.routing.mover.replace", kept)
    wrong = tried(tmp_path, "only copy, under a credit", many=1).wrong
    assert any("is free, and" in line for line in wrong), wrong


def test_a_removed_selector_that_leaves_what_is_further_on_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_bring_back", lambda context, via, *_: credits.unspend(context, via))
    wrong = tried(tmp_path, "remove a selector, its message further on", meeting="a sweep", many=1).wrong
    assert any("is free, and" in line for line in wrong), wrong


# -- one by one --------------------------------------------------------------------------------------------------------


@pytest.fixture
def chained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Queue, Queue, Queue]:
    """Three queues, each with a selector of one credit to the next."""
    monkeypatch.setattr(credit_audit, "AUDIT_INTERVAL", 0.01)
    monkeypatch.setattr(registry, "AUDIT_INTERVAL", 0.01)
    root = timed(Root.create(tmp_path / "root", clock=Clock()), FRESH)
    first, second, third = (root.create_queue(name, durability="none") for name in ("first", "second", "third"))
    first.add_selector("on", to="second")
    second.add_selector("on", to="third")
    return first, second, third


def spent(queue: Queue) -> list[str]:
    return [str(Via(one.token, key)) for one in queue.selectors() for key in credits.spent(queue.layout, one.token)]


def bodies(queue: Queue, state: str = "target") -> list[bytes]:
    return [message.body for message in queue.browse(state)]


class Refusing:
    """Stands for `os`, and refuses to open some names."""

    def __init__(self, number: int, *refused: str) -> None:
        self._number = number
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        if name != "open":
            return getattr(os, name)

        def opening(path: Any, *args: Any, **options: Any) -> int:
            if os.path.basename(path) in self._refused:
                raise OSError(self._number, os.strerror(self._number), path)
            return os.open(path, *args, **options)

        return opening


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_look_leaves_the_credits_that_it_cannot_read_and_those_below(
    chained: tuple[Queue, Queue, Queue], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    first, second, third = chained
    first.send("a")
    first.route()
    second.route()
    before = [*spent(first), *spent(second)]
    assert len(before) == 2
    keys = [via.partition("-")[2] for via in before]
    with monkeypatch.context() as refusing:
        refusing.setattr(reading, "os", Refusing(number, *keys))
        assert (first.sweep().credits, second.sweep().credits) == (0, 0)
    assert [*spent(first), *spent(second)] == before
    take(third).ack()
    assert [*spent(first), *spent(second)] == []


def test_a_message_waits_while_the_credits_under_which_it_came_cannot_be_read(
    chained: tuple[Queue, Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = chained
    first.send("a")
    first.route()
    (key,) = (via.partition("-")[2] for via in spent(first))
    with monkeypatch.context() as refusing:
        refusing.setattr(reading, "os", Refusing(errno.EIO, key))
        with pytest.raises(StorageError, match="stays in target"):
            second.route()
    assert (bodies(second), spent(second)) == ([b"a"], [])
    second.route()
    assert bodies(third) == [b"a"]


def test_the_removal_of_a_copied_file_returns_nothing_of_the_other_selector(
    chained: tuple[Queue, Queue, Queue],
) -> None:
    first, second, _ = chained
    first.send("a")
    first.route()
    shutil.copy(Path(first.layout.selectors, "on.toml"), Path(first.layout.selectors, "copy.toml"))
    assert first.remove_selector("copy")
    assert (bodies(second), len(spent(first))) == ([b"a"], 1)
    assert first.remove_selector("on")
    assert bodies(first) == [b"a"]


def test_a_removal_ends_although_a_router_died_as_it_wrote_beside_the_credits(
    chained: tuple[Queue, Queue, Queue],
) -> None:
    first, _, _ = chained
    first.send("a")
    first.route()
    token = first.selectors()[0].token
    Path(first.layout.credits, token, "..last.0123456789ab.tmp").write_bytes(b"half")
    assert first.remove_selector("on")
    assert (bodies(first), os.listdir(first.layout.credits), os.listdir(first.layout.selectors)) == ([b"a"], [], [])


def test_a_credit_is_free_once_what_was_staged_under_it_is_dropped(
    chained: tuple[Queue, Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = chained
    first.send(b"1\n2\n", type="text")
    first.route()
    message = take(second)
    next(message.records()).ack()
    with monkeypatch.context() as dying:
        dying.setattr(fan_out, "_commit", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            message.nack()
    os.rename(message.path, f"{second.layout.processed}/by hand")
    second.sweep()
    assert len(os.listdir(second.layout.staged)) == 1  # a fence, for a day
    first.root.sweep()
    first.root.sweep()
    assert spent(first) == []


def test_a_message_that_cannot_be_moved_holds_no_other(
    chained: tuple[Queue, Queue, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = chained
    for body in ("bad", "good"):
        first.send(body, properties={"body": body})
    move_on = Moves.move_on

    def refused(self: Moves, file: Any, *args: Any) -> Any:
        if "bad" in file.filename:
            raise StorageError("refused; the message stays in target/")
        return move_on(self, file, *args)

    monkeypatch.setattr(Moves, "move_on", refused)
    with pytest.raises(StorageError, match="refused"):
        first.route()
    assert (bodies(first), bodies(second), len(spent(first))) == ([b"bad"], [b"good"], 1)


@pytest.mark.parametrize("verb", ["unlink", "listing"])
def test_a_refused_call_of_a_router_is_an_error_of_dropq_that_says_where_the_message_is(
    chained: tuple[Queue, Queue, Queue], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    first, second, _ = chained
    first.send("a")

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as refusing:
        if verb == "unlink":
            unlink = mock.Mock(side_effect=chain([OSError(errno.EIO, os.strerror(errno.EIO))], repeat(True)))
            refusing.setattr(Storage, "unlink", unlink)
            refusing.setattr(Moves, "move_on", lambda *_: None)  # as where a consumer was first
            assert first.route() == {}
        else:
            refusing.setattr(credits, "spent", refused)
            with pytest.raises(StorageError, match=r"no message was touched|stays in target"):
                first.route()
    assert (bodies(first), bodies(second)) == ([b"a"], [])
    first.sweep()
    assert first.route() == {"on": 1}
