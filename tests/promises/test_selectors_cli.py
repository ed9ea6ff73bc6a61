"""Selectors made, listed and removed: `dropq selector`, how each command refuses, queues that are made with some."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from helpers import Run, take

from dropq import ConfigError, InvalidName, NoSuchQueue, Root
from dropq.cli import completion
from dropq.cli import main as cli
from dropq.diagnosis import fsck
from dropq.lifecycle.credits import queue_of
from dropq.policies.lock import PolicyLock
from dropq.routing import registry


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A root with three queues."""
    root = Root.create(tmp_path / "root")
    for name in ("orders", "eu", "rest"):
        root.create_queue(name, durability="none", redelivery_delay=0)
    return root


def selector_files(root: Root) -> dict[str, str]:
    """The files of all selectors of a root, and what a command left beside them, by queue and name."""
    found = sorted(root.path.glob("*/selectors/*"))
    return {f"{path.parent.parent.name}/{path.name}": path.read_text() for path in found}


# -- add ---------------------------------------------------------------------------------------------------------------


def test_a_selector_is_added_with_all_of_its_options_and_the_path_of_its_file_is_printed(run: Run, root: Root) -> None:
    filter = "region = 'EU'"
    added = run("selector", "add", "orders", "eu", "--to", "eu", "--filter", filter, "--credit", "3")
    assert added == (0, f"{root.path}/orders/selectors/eu.toml\n", "")
    (made,) = root.queue("orders").selectors()
    assert (made.name, made.op, made.to, made.filter, made.credit, made.role) == (
        *("eu", "move", "eu", filter, 3),
        "normal",
    )


def test_copies_bounces_and_roles_are_added_too(run: Run, root: Root) -> None:
    assert run("selector", "add", "orders", "audit", "--op", "copy", "--to", "rest").code == 0
    assert run("selector", "add", "orders", "back", "--op", "bounce", "--filter", "n = 1").code == 0
    assert run("selector", "add", "orders", "others", "--to", "rest", "--role", "default").code == 0
    assert run("selector", "add", "orders", "full", "--to", "rest", "--role", "overflow").code == 0
    added = [(one.name, one.op, one.to, one.credit, one.role) for one in root.queue("orders").selectors()]
    assert added == [
        ("audit", "copy", "rest", None, "normal"),
        ("back", "bounce", None, None, "normal"),
        ("full", "move", "rest", None, "overflow"),
        ("others", "move", "rest", 1, "default"),
    ]


def test_what_was_added_is_printed_as_json(run: Run, root: Root) -> None:
    code, out, err = run("selector", "add", "orders", "eu", "--to", "eu", "--json")
    path = f"{root.path}/orders/selectors/eu.toml"
    assert (code, json.loads(out), err) == (0, {"queue": "orders", "name": "eu", "path": path}, "")


#: Command lines of `selector add` that are refused: the arguments, the exit code, and what the error has in it.
REFUSED = {
    "to itself": (["orders", "x", "--to", "orders"], 78, "x: to: orders is the selector's own queue"),
    "in a circle": (["rest", "x", "--to", "orders"], 78, "messages would go round: rest -> orders -> rest"),
    "to a queue that is missing": (["orders", "x", "--to", "uk"], 66, "no queue 'uk'"),
    "in a queue that is missing": (["uk", "x", "--to", "eu"], 66, "no queue 'uk'"),
    "to nowhere": (["orders", "x"], 78, "x: to: give the address of the queue or topic"),
    "a bounce to a star within a name": (["orders", "x", "--op", "bounce", "--to", "a*b"], 78, "x: to: 'a*b': a *"),
    "a move to two": (["orders", "x", "--to", "eu", "--to", "rest"], 2, "only a bounce goes to several addresses"),
    "a filter that does not parse": (["orders", "x", "--to", "eu", "--filter", "region ="], 2, "expected a value"),
    "no credit": (["orders", "x", "--to", "eu", "--credit", "0"], 78, "x: credit: 0 is no number from 1 to"),
    "a credit of many": (["orders", "x", "--to", "eu", "--credit", "many"], 2, "'many' is not a whole number"),
    "a credit of a copy": (["orders", "x", "--op", "copy", "--to", "eu", "--credit", "1"], 78, "credit: a copy spends"),
    "a copy as the default": (["orders", "x", "--op", "copy", "--to", "eu", "--role", "default"], 78, "x: role: "),
    "a second default": (["orders", "x", "--to", "eu", "--role", "default"], 73, "a selector there, with role default"),
    "a name that is taken": (["orders", "there", "--to", "eu"], 73, "`dropq selector rm orders there` removes it"),
    "a name that no selector has": (["orders", "a b", "--to", "eu"], 2, "'a b' cannot name a selector"),
    "of a topic": (["news", "x", "--to", "eu"], 78, "news is a topic, and has no selectors"),
    "an unknown operation": (["orders", "x", "--to", "eu", "--op", "jump"], 2, "'jump' is not one of"),
    "an unknown role": (["orders", "x", "--to", "eu", "--role", "spare"], 2, "'spare' is not one of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_selector_that_cannot_be_is_refused_with_the_reason_and_nothing_is_made(
    case: str, run: Run, root: Root
) -> None:
    arguments, code, why = REFUSED[case]
    root.create_topic("news")
    root.queue("orders").add_selector("there", to="rest", role="default")
    before = selector_files(root)
    ran = run("selector", "add", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert why in ran.err
    assert selector_files(root) == before


def test_send_says_what_went_to_the_queue_of_an_overflow_selector(run: Run, root: Root, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("1\n2\n3\n")
    Path(root.path, "dropq.toml").write_text('dead_letter_queue = "rest"\n')
    root.create_queue("small", durability="none", max_unprocessed=1).add_selector("on", to="rest", role="overflow")
    code, out, err = run("send", "small", "--lines", f"{tmp_path}/lines")
    assert (code, len(out.splitlines()), err) == (0, 3, "overflowed=2: queue small was full; they went to rest\n")
    code, out, err = run("send", "small", "--json", f"{tmp_path}/lines")
    assert (json.loads(out)["delivered_to"], err) == ("rest", "overflowed=1: queue small was full; they went to rest\n")
    assert run("send", "rest", "-q", f"{tmp_path}/lines") == (0, "", "sent=1\n")


# -- ls ----------------------------------------------------------------------------------------------------------------


def test_ls_shows_what_selectors_do_and_their_free_credits(run: Run, root: Root) -> None:
    orders = root.queue("orders")
    orders.add_selector("eu", to="eu", filter="region = 'EU'", credit=3)
    orders.add_selector("audit", op="copy", to="rest")
    root.queue("eu").add_selector("back", op="bounce")
    orders.send("a", properties={"region": "EU"})
    while orders.route():
        pass
    lines = ["orders\taudit\tcopy\trest\t\tnormal\t\t\n", "orders\teu\tmove\teu\tregion = 'EU'\tnormal\t3\t2\n"]
    assert run("selector", "ls", "orders") == (0, "".join(lines), "")
    assert run("selector", "ls") == (0, "eu\tback\tbounce\ttemp-*\t\tnormal\t\t\n" + "".join(lines), "")
    first, second = map(json.loads, run("selector", "ls", "orders", "--json").out.splitlines())
    assert (first["credit"], first["free"], first["filter"]) == (None, None, None)
    assert second == {
        **{"queue": "orders", "name": "eu", "op": "move", "to": "eu", "filter": "region = 'EU'"},
        **{"role": "normal", "credit": 3, "free": 2},
    }
    take(root.queue("eu")).ack()
    assert json.loads(run("selector", "ls", "orders", "--json").out.splitlines()[1])["free"] == 3


def test_ls_says_where_there_are_none_and_how_to_make_one(run: Run, root: Root) -> None:
    code, out, err = run("selector", "ls")
    assert (code, out) == (0, "") and err.startswith(f"{root.path} has no selectors: `dropq selector add ")
    assert run("selector", "ls", "orders").err.startswith("queue orders has no selectors: ")
    assert run("selector", "ls", "uk").code == 66


def test_ls_names_each_file_that_cannot_be_used_and_lists_the_others(run: Run, root: Root) -> None:
    orders = root.queue("orders")
    orders.add_selector("eu", to="eu")
    broken = Path(orders.layout.selectors, "broken.toml")
    broken.write_text('to = "eu"\ncredit = 0\n')
    code, out, err = run("selector", "ls")
    assert (code, out) == (1, "orders\teu\tmove\teu\t\tnormal\t1\t1\n")
    assert err == f"error: {broken}: credit: 0 is no number from 1 to 1000000\n"


# -- rm ----------------------------------------------------------------------------------------------------------------


def test_rm_returns_what_was_not_settled_and_says_how_much_that_was(run: Run, root: Root) -> None:
    orders = root.queue("orders")
    orders.add_selector("eu", to="eu", credit=3)
    for body in "abc":
        orders.send(body)
    orders.route()
    take(root.queue("eu")).ack()
    code, out, err = run("selector", "rm", "orders", "eu")
    assert (code, out) == (0, "eu\t2\n") and "unsettled=2" in err
    assert [message.text for message in orders.browse()] == ["b", "c"]
    assert (selector_files(root), os.listdir(orders.layout.credits)) == ({}, [])


def test_rm_prints_json(run: Run, root: Root) -> None:
    root.queue("orders").add_selector("eu", to="eu")
    removed = run("selector", "rm", "orders", "eu", "--json")
    assert json.loads(removed.out) == {"queue": "orders", "name": "eu", "unsettled": 0, "returned": True}


def test_rm_refuses_what_is_not_there_and_names_what_is(run: Run, root: Root) -> None:
    root.queue("orders").add_selector("eu", to="eu")
    code, out, err = run("selector", "rm", "orders", "ue")
    assert (code, out) == (66, "") and "queue orders has no selector ue: eu; nothing was changed" in err
    assert run("selector", "rm", "uk", "eu").code == 66
    assert run("selector", "rm", "orders", "../eu").code == 2
    assert list(selector_files(root)) == ["orders/eu.toml"]


def test_rm_exits_with_75_while_something_is_under_way_and_ls_says_so(
    run: Run, root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = root.queue("orders")
    orders.add_selector("eu", to="eu")
    orders.send("a")
    orders.route()
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_bring_back", lambda *args: None)  # as where another process moves it on
        patch.setattr(registry.remove, "__kwdefaults__", {"patience": 0.0})
        code, out, err = run("selector", "rm", "orders", "eu")
    assert (code, out) == (75, "eu\t1\n") and "`dropq selector rm orders eu` waits for it again" in err
    assert "selector eu of orders is removed, and what it moved is on its way back" in run("selector", "ls").err
    assert run("selector", "rm", "orders", "eu").code == 0
    assert [message.text for message in orders.browse()] == ["a"]


def test_rm_exits_with_75_while_another_holds_the_policy_lock(run: Run, root: Root) -> None:
    orders = root.queue("orders")
    orders.add_selector("eu", to="eu")
    with PolicyLock(orders.context).acquire(lambda: None) as locked:
        assert locked
        ran = run("selector", "rm", "orders", "eu")
    assert ran.code == 75 and "is held by another process; nothing was changed" in ran.err
    assert list(selector_files(root)) == ["orders/eu.toml"]


# -- completion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("rm", "orders", ""), ["audit", "eu"]),
        (("rm", "orders", "e"), ["eu"]),
        (("rm", "rest", ""), []),
        (("add", "orders", "e"), []),
        (("add", "orders", "x", "--to", ""), ["eu", "orders", "rest"]),
        (("add", "orders", "x", "--op", ""), ["move", "copy", "bounce"]),
        (("add", "orders", "x", "--role=d"), ["--role=default"]),
    ],
)
def test_a_shell_completes_selectors_queues_operations_and_roles(
    words: tuple[str, ...],
    offered: list[str],
    root: Root,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root.queue("orders").add_selector("eu", to="eu")
    root.queue("orders").add_selector("audit", op="copy", to="rest")
    monkeypatch.setenv("_DROPQ_COMPLETE", "complete_zsh")
    monkeypatch.setattr(sys, "argv", ["dropq", "--root", str(root.path), "selector", *words])
    completion.register()
    with pytest.raises(SystemExit):
        cli.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("plain\t") for line in lines if line] == offered


# -- a queue that is made with selectors -------------------------------------------------------------------------------


def test_a_queue_is_made_with_selectors_which_have_tokens_of_their_own(root: Root) -> None:
    tables: list[dict[str, object]] = [
        {"name": "eu", "to": "eu", "filter": "region = 'EU'", "credit": 3},
        {"name": "rest", "to": "rest"},
        {"name": "audit", "op": "copy", "to": "orders"},
    ]
    made = root.create_queue("in", selector=tables, max_backlog=5)
    audit, eu, rest = made.selectors()
    assert (eu.to, eu.filter, eu.credit, rest.credit, audit.op) == ("eu", "region = 'EU'", 3, 1, "copy")
    assert len({eu.token, rest.token}) == 2 and audit.token == ""
    assert [queue_of(root.layout, one.token) for one in (eu, rest)] == [("in", "eu"), ("in", "rest")]
    made.send("a", properties={"region": "EU"})
    while made.route():
        pass
    assert made.counts()["target"] == 0
    assert fsck.fsck(root.context, "in") == []


#: Selectors that no new queue can have, with what the error has in it.
NO_NEW: dict[str, tuple[object, str]] = {
    "no tables": ("eu", "options of queue in: selector: give a list of tables, each with a name"),
    "no name": ([{"to": "eu"}], "give a list of tables, each with a name"),
    "a name that no selector has": ([{"name": "a/b", "to": "eu"}], "'a/b' cannot name a selector"),
    "two of a name": ([{"name": "x", "to": "eu"}] * 2, "two selectors have the name x: a queue has one"),
    "two defaults": (
        [{"name": name, "to": "eu", "role": "default"} for name in "xy"],
        "two selectors have the role default: a queue has one",
    ),
    "to itself": ([{"name": "x", "to": "in"}], "x: to: in is the selector's own queue"),
    "to a queue that is missing": ([{"name": "x", "to": "uk"}], "no queue 'uk'"),
    "in a circle": ([{"name": "x", "to": "back"}], "messages would go round: in -> back -> in"),
    "a bad filter": ([{"name": "x", "to": "eu", "filter": "region ="}], "selector x: filter: "),
    "no credit": ([{"name": "x", "to": "eu", "credit": 0}], "selector x: credit: 0 is no number"),
    "an unknown key": ([{"name": "x", "to": "eu", "credits": 1}], "credits: there is no such key; is it credit?"),
    "another's token": ([{"name": "x", "to": "eu", "token": "abc123"}], "token: leave it out"),
}


@pytest.mark.parametrize("case", NO_NEW)
def test_a_queue_with_selectors_that_cannot_be_is_not_made(case: str, root: Root) -> None:
    back = root.create_queue("back")
    Path(back.layout.selectors).mkdir()
    Path(back.layout.selectors, "on.toml").write_text('to = "in"\n')
    tables, why = NO_NEW[case]
    with pytest.raises((InvalidName, ConfigError, NoSuchQueue), match=re.escape(why)):
        root.create_queue("in", selector=tables)  # type: ignore[arg-type]
    assert not root.queue("in").exists()
    assert not root.path.joinpath(".dropq", "tokens").exists()


def test_create_takes_selectors_as_tables_and_refuses_anything_else_by_name(run: Run, root: Root) -> None:
    tables = '[{name = "eu", to = "eu", credit = 2}]'
    assert run("create", "in", "--set", f"selector={tables}").code == 0
    assert [(one.name, one.credit) for one in root.queue("in").selectors()] == [("eu", 2)]
    code, out, err = run("create", "out", "--set", "selector=eu")
    assert (code, out) == (78, "") and "options of queue out: selector: give a list of tables" in err
    topic = run("topic", "create", "news", "--set", f"selector={tables}")
    assert topic.code == 78 and "`dropq selector add QUEUE NAME` writes it" in topic.err
