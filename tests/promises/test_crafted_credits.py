"""What strangers write into names, token files and credits frees and removes nothing but credits of the message."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import files, take

from dropq import Queue, Root
from dropq.format.credits import Credit, Via


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.create(tmp_path / "root")


@pytest.fixture
def moved(root: Root) -> tuple[Queue, Queue]:
    """A queue and the one that its selector moves to, where a message lies under the only credit."""
    source, goal = root.create_queue("source"), root.create_queue("goal")
    source.add_selector("on", to="goal")
    source.send("a")
    assert source.route() == {"on": 1}
    return source, goal


def credit(source: Queue) -> Path:
    (selector,) = source.selectors()
    folder = Path(source.layout.credits, selector.token)
    (key,) = files(folder)
    return folder / key


def ack_forged(goal: Queue, via: str) -> None:
    """Acknowledge a message whose name says that it came under some credit."""
    Path(goal.layout.target, f"4.forged.B.....JMS_dropq_viaS={via}").write_bytes(b"forged")
    (forged,) = [message for message in (take(goal), take(goal)) if message.body == b"forged"]
    forged.ack()


@pytest.mark.parametrize(
    "via", ["..-..", "%2E%2E%2F-x", "a%2Fb%2Fcd-0123456789", "ABCDEF-0123456789", "abcdef-0123456789x", "-", "abcdef"]
)
def test_a_via_of_another_form_is_none(moved: tuple[Queue, Queue], via: str) -> None:
    source, goal = moved
    ack_forged(goal, via)
    assert credit(source).exists()


def test_a_message_frees_no_credit_of_another(moved: tuple[Queue, Queue]) -> None:
    source, goal = moved
    ack_forged(goal, f"{credit(source).parent.name}-{credit(source).name}")
    assert credit(source).exists()


def test_a_message_frees_no_credit_that_its_own_names_as_below_and_that_is_anothers(moved: tuple[Queue, Queue]) -> None:
    source, goal = moved
    others = Via(credit(source).parent.name, credit(source).name)
    (credit(source).parent / "0123456789").write_bytes(Credit("forged", "goal", (others,)).written)
    ack_forged(goal, f"{others.token}-0123456789")
    assert credit(source).name == others.key, "its own is gone, the other's is there"


def damaged_token(source: Queue, content: object) -> Path:
    token = Path(source.root.path, ".dropq", "tokens", "aaaaaa")
    token.write_text(json.dumps(content))
    return token


@pytest.mark.parametrize(
    "content",
    [
        {"queue": "../outside", "selector": "on"},
        {"queue": "/etc", "selector": "on"},
        {"queue": ".dropq", "selector": "on"},
        {"queue": "", "selector": "on"},
        {"queue": ["source"], "selector": "on"},
        ["source", "on"],
        None,
    ],
)
def test_a_token_file_leads_to_queues_of_this_root_only(
    moved: tuple[Queue, Queue], tmp_path: Path, content: object
) -> None:
    source, goal = moved
    outside = tmp_path / "outside"
    for folder in ("target", ".dropq/credits/aaaaaa"):
        (outside / folder).mkdir(parents=True)
    victim = outside / ".dropq/credits/aaaaaa/0123456789"
    victim.write_bytes(Credit("forged", "goal").written)
    damaged_token(source, content)
    ack_forged(goal, "aaaaaa-0123456789")
    assert victim.exists()


def linked_token_folder(source: Queue, outside: Path) -> None:
    os.symlink(outside, Path(source.layout.credits, "aaaaaa"))


def linked_credits(source: Queue, outside: Path) -> None:
    (outside / "aaaaaa").mkdir()
    os.rename(outside / "0123456789", outside / "aaaaaa" / "0123456789")
    Path(source.layout.credits).rename(f"{source.layout.credits}.aside")
    os.symlink(outside, source.layout.credits)


def linked_key(source: Queue, outside: Path) -> None:
    Path(source.layout.credits, "aaaaaa").mkdir()
    os.symlink(outside / "0123456789", Path(source.layout.credits, "aaaaaa", "0123456789"))


@pytest.mark.parametrize("link", [linked_token_folder, linked_credits, linked_key])
def test_links_on_the_way_to_a_credit_are_not_followed(
    moved: tuple[Queue, Queue], tmp_path: Path, link: Callable[[Queue, Path], None]
) -> None:
    source, goal = moved
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "0123456789").write_bytes(Credit("forged", "goal").written)
    damaged_token(source, {"queue": "source", "selector": "on"})
    link(source, outside)
    ack_forged(goal, "aaaaaa-0123456789")
    assert [path.name for path in outside.rglob("0123456789")] == ["0123456789"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"id": 1}', b"[" * 10_000, b"\xff\xfe"])
def test_a_damaged_credit_stops_no_ack_and_goes_after_two_looks(moved: tuple[Queue, Queue], content: bytes) -> None:
    source, goal = moved
    credit(source).write_bytes(content)
    take(goal).ack()
    assert goal.counts()["processed"] == 1
    assert credit(source).read_bytes() == content
    assert source.sweep().credits == 1
    assert list(files(Path(source.layout.credits, source.selectors()[0].token))) == []


def test_a_token_that_another_selector_has_is_replaced(root: Root, moved: tuple[Queue, Queue]) -> None:
    source, _ = moved
    taken = source.selectors()[0].token
    (other := Path(source.layout.selectors, "other.toml")).write_text(f'# mine\ntoken = "{taken}"\nto = "goal"\n')
    source.send("b")
    assert source.route() == {"other": 1}
    token = {selector.name: selector.token for selector in source.selectors()}["other"]
    assert token != taken
    assert other.read_text() == f'# mine\ntoken = "{token}"\nto = "goal"\n'
