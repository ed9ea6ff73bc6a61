"""A short storm, and what notes are held to prove."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from torture import storm
from torture.notes import Notes, ProcessNotes, broken
from torture.table import Options

Line = tuple[int, str]


def test_nothing_is_lost_or_handed_to_two_in_a_storm(tmp_path: Path) -> None:
    rows = list(storm.run(Options(tmp_path, seed=1, long=False)))
    assert [line for row in rows for line in row.wrong] == []
    assert all(row.good and row.cases for row in rows) and len(rows) == len(storm.SETTINGS)
    assert sum(row.kills for row in rows) >= storm.SHORT


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ProcessNotes]:
    """Read what a process noted, given as times in ms and words."""

    def read(*lines: Line) -> ProcessNotes:
        path = tmp_path / str(len(os.listdir(tmp_path)))
        path.write_text("".join(f"{at * 1_000_000} {words}\n" for at, words in lines))
        return ProcessNotes.read(path)

    return read


def quarrels(*processes: ProcessNotes, end: int = 1000) -> list[str]:
    claims = [(claim, end * 1_000_000) for one in processes for claim in one.claims]
    return sorted({what.rpartition(": ")[2] for _, what in broken(claims)})


def got(at: int, owner: str, *, until: int = 0) -> Line:
    return at, f"got body {owner} {until} {at * 1_000_000}"


def ends(owner: str, begun: int, done: int, *, verb: str = "ack", how: str = "did") -> Iterable[Line]:
    return (begun, f"do {verb} {owner}"), (done, f"{how} {verb} {owner}")


def test_what_was_noted_is_read(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    notes("try", "a", "b")
    notes("sent", "a", "b")
    notes("got", "a", "me", 5, 1)
    notes("half", "strange")
    read = ProcessNotes.read(tmp_path / "notes")
    assert (read.tried, read.sent, read.half) == ({"a", "b"}, {"a", "b"}, ["strange"])
    assert [(claim.name, claim.owner, claim.open) for claim in read.claims] == [("a", "me", True)]
    assert read.leased


@pytest.mark.parametrize(
    ("lines", "within"),
    [
        ([(1, "idle")], None),
        ([(1, "try a")], "send"),
        ([(1, "try a"), (2, "sent a")], None),
        ([(1, "ask")], "receive"),
        ([(1, "ask"), (2, "idle")], None),
        ([(1, "do sweep")], "sweep"),
        ([got(1, "me")], "holding"),
        ([got(1, "me"), (2, "do ack me")], "ack"),
        ([got(1, "me"), *ends("me", 2, 3)], None),
        ([got(1, "me"), *ends("me", 2, 3, how="lost")], None),
        ([got(1, "me"), (2, "do leave me")], None),
        ([got(1, "me"), (2, "do extend me")], "extend"),
        ([got(1, "me"), (2, "do extend me"), (3, "did extend me 9")], "holding"),
    ],
)
def test_the_last_notes_tell_what_a_process_was_in_the_middle_of(
    read: Callable[..., ProcessNotes], lines: list[Line], within: str | None
) -> None:
    assert read(*lines).within == within


def test_a_line_that_is_not_whole_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("1 try a\n2 sent a")
    assert ProcessNotes.read(tmp_path / "notes").sent == set()


def test_one_holder_after_another_is_no_quarrel(read: Callable[..., ProcessNotes]) -> None:
    late = read(got(10, "a", until=50), *ends("a", 90, 91, how="lost"))
    nacked = read(got(55, "b", until=95), *ends("b", 60, 61, verb="nack"))
    acked = read(got(62, "c", until=99), (70, "do extend c"), (71, "did extend c 190"), *ends("c", 150, 151))
    assert quarrels(late, nacked, acked) == []


def test_two_acks_of_one_message_are_told(read: Callable[..., ProcessNotes]) -> None:
    one, other = read(got(1, "a"), *ends("a", 2, 9)), read(got(5, "b"), *ends("b", 6, 7))
    assert "both acknowledged it" in quarrels(one, other)


def test_a_delivery_after_an_ack_is_told(read: Callable[..., ProcessNotes]) -> None:
    one, other = read(got(1, "a"), *ends("a", 2, 3)), read(got(5, "b"))
    assert quarrels(one, other) == ["delivered again after its ack had returned"]


def test_two_holders_on_leases_that_had_not_run_out_are_told(read: Callable[..., ProcessNotes]) -> None:
    assert quarrels(read(got(1, "a")), read(got(5, "b", until=9))) == ["both held it on leases that had not run out"]
    assert quarrels(read(got(1, "a", until=5)), read(got(5, "b", until=9))) == []
    assert quarrels(read(got(1, "a")), read(got(5, "b")), end=5) == [], "the first was dead by then"
    renewed = read(got(1, "a", until=3), (2, "do extend a"), (3, "did extend a 20"))
    assert quarrels(renewed, read(got(5, "b"))) == ["both held it on leases that had not run out"]


def test_a_holder_that_lost_its_claim_and_settles_it_all_the_same_is_told(read: Callable[..., ProcessNotes]) -> None:
    late = read(got(1, "a", until=10), *ends("a", 30, 31))
    other = read(got(20, "b", until=60), *ends("b", 40, 41, verb="nack"))
    assert quarrels(late, other) == ["both held it at a time, and both settled it"]


def test_a_claim_that_is_lost_before_its_lease_has_run_out_is_told(read: Callable[..., ProcessNotes]) -> None:
    early = read(got(1, "a", until=90), *ends("a", 30, 31, how="lost"))
    assert quarrels(early) == ["a lost it 59 ms before its lease had run out"]
    assert quarrels(read(got(1, "a", until=20), *ends("a", 30, 31, how="lost"))) == []
