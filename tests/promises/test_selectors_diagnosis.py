"""What health and `config check` say of selectors; fsck is in test_fsck.py, the graph in test_graph.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers import Clock, take

from dropq import Queue, Root
from dropq.cli import main as cli
from dropq.cli.output import CONFIGURATION, OK
from dropq.diagnosis.health import Health

MINUTE = 60.0


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Root:
    root = Root.create(tmp_path / "root", clock=clock)
    for name in ("source", "goal"):
        root.create_queue(name, durability="none")
    return root


@pytest.fixture
def source(root: Root) -> Queue:
    return root.queue("source")


def by_hand(queue: Queue, name: str, text: str) -> Path:
    """Write a file into the folder of selectors, as a person does."""
    path = Path(queue.layout.selectors) / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def reasons(health: Health) -> dict[str, str]:
    return {reason.kind: reason.message for reason in health.reasons}


# -- health --------------------------------------------------------------------------------------------------------


def test_a_queue_whose_selectors_work_is_well(source: Queue) -> None:
    source.add_selector("on", to="goal")
    source.send("a")
    source.route()
    assert source.health(max_age=0).healthy


def test_what_is_unroutable_is_explained_as_the_next_router_finds_it(source: Queue, clock: Clock) -> None:
    source.add_selector("on", to="goal", filter="n = 1")
    source.send("a")
    waits = "no selector takes it; when routers have looked for 60 s without a subscription it is unroutable"
    clock.advance(MINUTE)
    note = Path(source.layout.routers)
    assert whys(source) == [("selector", f"{waits}, and none says in .dropq/routers that it looks")]
    assert not note.exists(), "to explain is no look"
    source.route()
    os.utime(note, ns=(clock.ms * 1_000_000,) * 2)
    assert whys(source) == [("selector", waits)]
    clock.advance(MINUTE)
    assert whys(source) == [("selector", "no selector takes it: the next router makes a dead letter of it")]
    source.route()
    assert source.counts()["error"] == 1


def test_routers_that_cannot_note_that_they_look_make_nothing_unroutable(root: Root, clock: Clock) -> None:
    source = root.create_queue("closed", unroutable_after=0)
    source.add_selector("on", to="goal", filter="n = 1")
    source.send("a")
    clock.advance(MINUTE)
    note = Path(source.layout.routers)
    note.mkdir()
    source.route()
    ((_, detail),) = whys(source)
    assert detail == f"no selector takes it; since when routers look cannot be read and noted: Is a directory at {note}"
    note.rmdir()
    source.route()
    assert source.counts()["error"] == 1


def test_who_may_only_read_finds_a_queue_well_whose_routers_look(
    source: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.add_selector("on", to="goal", filter="n = 1")
    source.send("a")
    source.route()
    os.utime(source.layout.routers, ns=(clock.ms * 1_000_000,) * 2)
    monkeypatch.setattr(os, "access", lambda path, mode, **_: not mode & os.W_OK)  # as a monitor's user
    assert reasons(source.health()) == {}
    waits = "no selector takes it; when routers have looked for 60 s without a subscription it is unroutable"
    assert whys(source) == [("selector", waits)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("to = ", "on.toml: this is no TOML"),
        ('to = "goal"\nfilter = "n ="\n', "on.toml: filter: "),
        ('to = "source"\n', "on.toml: to: source is the selector's own queue"),
        ('to = "gone"\n', "selector on: gone is missing"),
    ],
)
def test_a_selector_that_takes_nothing_is_reported(source: Queue, text: str, says: str) -> None:
    by_hand(source, "on.toml", text)
    found = reasons(source.health())
    assert list(found) == ["selector"]
    assert says in found["selector"]


def test_a_message_that_waits_too_long_for_a_credit_is_reported_with_the_queue_that_holds_it_up(
    source: Queue, clock: Clock
) -> None:
    source.add_selector("on", to="goal", filter="n IS NULL")
    source.send("a")
    source.send("b")
    source.route()
    clock.advance(10 * MINUTE)
    assert source.health(max_age="1h").healthy
    found = reasons(source.health(max_age="5m"))
    assert list(found) == ["old-message"]
    assert "selector on has no credit left of 1 for goal" in found["old-message"]
    source.add_selector("more", to="goal", filter="n = 1")
    assert "credit" not in reasons(source.health(max_age="5m"))["old-message"], "another selector could take it"


def test_a_queue_whose_selectors_nobody_serves_needs_a_router_and_no_consumer(root: Root, source: Queue) -> None:
    source.send("a")
    consumer, router = "start a consumer", "no router serves it: start `dropq route source`"
    source.add_selector("full", to="goal", role="overflow")
    assert consumer in reasons(source.health(max_count=0))["many-waiting"], "an overflow selector takes nothing there"
    source.add_selector("on", to="goal")
    said = reasons(source.health(max_count=0))["many-waiting"]
    assert router in said and consumer not in said
    source.route()
    assert source.health(max_count=0).healthy


def test_a_queue_with_routes_needs_a_consumer_or_a_router(root: Root) -> None:
    queue = root.create_queue("routed")
    base = Path(queue.layout.base)
    (base / "routing" / "hi").mkdir(parents=True)
    (base / "routing" / "hi.in-use").touch()
    (base / "routing.properties").write_text("hi.selector=JMSPriority > 4\n")
    queue.send("a")
    said = reasons(queue.health(max_count=0))["many-waiting"]
    assert "start a consumer, or `dropq route routed`, which moves only what the routes take" in said


def test_a_full_queue_says_whether_an_overflow_selector_takes_what_is_sent(root: Root) -> None:
    full, _ = root.create_queue("full", max_unprocessed=1), root.create_queue("spare")
    full.send("a")
    full.add_selector("over", to="spare", role="overflow")
    (note,) = full.health().notes
    assert "max_unprocessed is 1: selector over takes what is sent to spare" in note.message
    assert "refused" not in note.message
    root.delete_queue("spare")
    (note,) = full.health().notes
    assert "sends are refused" in note.message


def test_a_removed_selector_that_is_not_finished_is_reported_after_a_minute(source: Queue, clock: Clock) -> None:
    source.add_selector("on", to="goal")
    os.rename(f"{source.layout.selectors}/on.toml", f"{source.layout.selectors}/.on.removed")
    assert source.health().healthy
    clock.advance(2 * MINUTE)
    assert list(reasons(source.health())) == ["removed-selector"]
    source.sweep()
    assert source.health().healthy


# -- explain -------------------------------------------------------------------------------------------------------


def whys(queue: Queue) -> list[tuple[str, str]]:
    return [(explanation.why, explanation.detail) for explanation in queue.explain()]


def test_a_message_that_waits_for_a_credit_is_explained_by_the_queue_that_holds_the_last_message(
    root: Root, source: Queue
) -> None:
    source.add_selector("on", to="goal")
    for body in "abc":
        source.send(body)
    assert whys(source) == [
        ("selector", "the next router moves it to goal by selector on"),
        *[("selector", "selector on: messages before this one take the credits that it has left")] * 2,
    ]
    source.route()
    assert whys(source) == [("selector", "selector on: it has no credit left of 1: goal holds 1 message")] * 2
    ((why, detail),) = whys(root.queue("goal"))
    assert why == "ready" and detail.endswith("; it came from source by selector on")
    take(root.queue("goal"))
    assert whys(root.queue("goal"))[0][1].endswith("; it came from source by selector on"), "also while it is held"


def test_a_credit_that_is_held_up_further_on_is_explained_by_the_last_queue(root: Root, source: Queue) -> None:
    end = root.create_queue("end")
    source.add_selector("on", to="goal", credit=2)
    root.queue("goal").add_selector("on", to="end")
    for body in "abc":
        source.send(body)
    source.route()
    root.queue("goal").route()
    says = "selector on: it has no credit left of 2: end holds 1 message, goal holds 1 message"
    assert whys(source) == [("selector", says)]
    (lost,) = Path(end.layout.target).iterdir()
    lost.unlink()
    assert whys(source)[0][1].endswith(": goal holds 1 message, 1 message cannot be found")


def test_a_message_waits_for_each_selector_that_takes_it_and_each_has_its_reason(root: Root, source: Queue) -> None:
    root.create_queue("full", max_unprocessed=1).send("x")
    source.add_selector("busy", to="goal")
    source.send("a")
    source.route()
    source.add_selector("full", to="full")
    by_hand(source, "missing.toml", 'to = "gone"\n')
    source.send("b")
    ((why, detail),) = whys(source)
    assert why == "selector"
    assert sorted(detail.split("; ")) == [
        "selector busy: it has no credit left of 1: goal holds 1 message",
        "selector full: full is full, or makes senders wait",
        "selector missing: gone is missing",
    ]


def test_copies_defaults_bounces_and_messages_that_no_selector_takes_are_explained(root: Root, source: Queue) -> None:
    source.add_selector("audit", op="copy", to="goal", filter="n = 1")
    source.add_selector("back", op="bounce", to="*", filter="n = 2")
    for n, reply_to in ((1, None), (2, "goal"), (2, None), (3, None)):
        source.send("x", properties={"n": n}, reply_to=reply_to)
    assert [detail for _, detail in whys(source)] == [
        "the next router copies it to goal",
        "the next router bounces it to goal by selector back",
        "selector back bounces it, and it has no return address: the next router makes a dead letter of it",
        "no selector takes it; when routers have looked for 60 s without a subscription it is unroutable, "
        "and none says in .dropq/routers that it looks",
    ]
    by_hand(source, "broken.toml", "to = ")
    assert whys(source)[3][1] == "no selector takes it, and one of them cannot be used: broken.toml"
    (Path(source.layout.selectors) / "broken.toml").unlink()
    source.add_selector("rest", to="goal", role="default")
    assert whys(source)[3][1] == "the next router moves it to goal by selector rest"
    source.route()
    assert [why for why, _ in whys(source)] == [], "and so it comes about"


def test_an_explanation_of_selectors_changes_nothing_and_warns_of_nothing(
    source: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    by_hand(source, "broken.toml", "to = ")
    path = by_hand(source, "new.toml", 'to = "goal"\n')
    source.send("a")
    before = sorted(source.root.path.rglob("*"))
    assert whys(source) == [("selector", "the next router moves it to goal by selector new")]
    assert sorted(source.root.path.rglob("*")) == before
    assert path.read_text() == 'to = "goal"\n', "only a router gives it a token"
    assert caplog.records == []


def test_a_consumer_may_take_what_waits_for_a_selector(source: Queue) -> None:
    source.add_selector("on", to="goal")
    source.send("a")
    with source.subscribe():
        assert [why for why, _ in whys(source)] == ["ready"]


# -- config check --------------------------------------------------------------------------------------------------


def checked(root: Root, capsys: pytest.CaptureFixture[str], *files: Path) -> tuple[int, list[tuple[str, str]]]:
    """Run `config check`; return its exit code, and each problem, with its file below the root."""
    code = cli.main(["--root", str(root.path), "--json", "config", "check", *map(str, files)])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return code, [
        (os.path.relpath(line["file"], root.path), line["problem"].removeprefix(line["file"]).lstrip(": "))
        for line in lines
    ]


def test_the_files_of_selectors_are_checked(root: Root, source: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    source.add_selector("on", to="goal")
    assert checked(root, capsys) == (OK, [])


WRONG = {
    'to = "goal"\nfilter = "n ="\n': "filter: ",
    'to = "goal"\ncredit = 0\n': "credit: 0 is no number",
    'to = "goal"\nop = "copy"\ncredit = 3\n': "credit: a copy spends no credits",
    'to = "goal"\ntoken = "../../"\n': "token: ",
    'too = "goal"\nto = "goal"\n': "too: there is no such key; is it to?",
    'to = "source"\n': "to: source is the selector's own queue",
    'to = "go': "this is no TOML",
    'to = "gone"\n': "to: gone is missing",
    'to = "goal"\nrole = "default"\n': "role: first is the default selector already",
    'to = "back"\n': "to: messages would go round: source -> back -> source",
}


@pytest.mark.parametrize(("text", "says"), WRONG.items())
def test_a_problem_of_a_selector_is_found_with_its_file_and_key(
    root: Root, source: Queue, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    source.add_selector("first", to="goal", role="default")
    root.create_queue("back").add_selector("on", to="source")
    path = by_hand(source, "second.toml", text)
    code, found = checked(root, capsys)
    problems = dict(found)
    assert code == CONFIGURATION
    assert problems.pop("source/selectors/second.toml").startswith(says)
    assert list(problems) == (["back/selectors/on.toml"] if "round" in says else [])
    if "missing" not in says and "round" not in says and "already" not in says:
        alone, of_file = checked(root, capsys, path)
        assert alone == CONFIGURATION and of_file[0][1].startswith(says), "the file alone shows it"


def test_the_selectors_of_a_queue_that_cannot_be_opened_hide_no_other_problem(
    root: Root, source: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(source, "on.toml", 'to = "gone"\n')
    Path(source.layout.config_file).write_text("lease_period = \n")
    by_hand(root.queue("goal"), "on.toml", "to = 1\n")
    code, found = checked(root, capsys)
    assert code == CONFIGURATION
    assert sorted(file for file, _ in found) == ["goal/selectors/on.toml", "source/queue.toml"]


def test_what_is_moved_on_is_not_held_up_by_a_look(source: Queue) -> None:
    source.add_selector("on", to="goal")
    source.send("a")
    assert source.route() == {"on": 1}
    before = {path: path.read_bytes() for path in source.root.path.rglob("*") if path.is_file()}
    assert source.health().healthy and source.fsck() == []
    after = {path: path.read_bytes() for path in source.root.path.rglob("*") if path.is_file()}
    assert before == after
    take(source.root.queue("goal")).ack()


def test_a_bounce_to_a_queue_that_cannot_be_opened_waits_and_is_explained(root: Root) -> None:
    source, broken = root.create_queue("returns"), root.create_queue("broken")
    source.add_selector("back", op="bounce", to="*")
    source.send("1", reply_to="broken")
    os.rmdir(broken.layout.processing)
    (waiting,) = source.explain(state="target")
    assert waiting.why == "selector"
    assert broken.layout.processing in waiting.detail
    assert source.route() == {}
    assert source.counts()["target"] == 1


def test_a_bounce_to_a_queue_that_is_not_there_is_foretold_as_a_dead_letter(root: Root) -> None:
    source = root.create_queue("returns")
    source.add_selector("back", op="bounce", to="*")
    source.send("1", reply_to="nobody")
    (waiting,) = source.explain(state="target")
    assert "nobody is missing: the next router makes a dead letter of it" in waiting.detail


def test_a_queue_behind_a_link_that_leads_nowhere_is_told_by_the_link(root: Root, tmp_path: Path) -> None:
    source = root.create_queue("orders")
    goal = Path(root.create_queue("far").layout.home)
    source.add_selector("on", to="far")
    goal.rename(tmp_path / "disk")
    goal.symlink_to(tmp_path / "disk")
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    source.send("1")
    (waiting,) = source.explain(state="target")
    assert f"{goal} is a link to {tmp_path}/disk, which is not there" in waiting.detail
    assert f"{goal} is a link to {tmp_path}/disk, which is not there" in waiting.detail
