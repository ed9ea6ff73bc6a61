"""What the rig of power cuts and of NFS is made of, as far as it needs no second kernel; see tests/torture/uml.py."""

from __future__ import annotations

import math
import re
import socket
import struct
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from torture import graph_powercut, output_powercut, powercut, record_powercut, root_hosts, uml
from torture.account import Location
from torture.lossy import OPERATIONS, PROCEDURES, Lossy, asked, records
from torture.table import NotRun, Row


def numbers(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def opaque(data: bytes) -> bytes:
    return numbers(len(data)) + data + b"\0" * (-len(data) % 4)


def nfs3(number: int, procedure: int) -> bytes:
    """A request of NFS 3, but for what it is about."""
    return numbers(number, 0, 2, 100003, 3, procedure, 1) + opaque(b"somebody") + numbers(0) + opaque(b"")


def nfs4(number: int, operation: int) -> bytes:
    """A request of NFS 4.2 as a client makes it for a rename: the operation comes fifth."""
    head = numbers(number, 0, 2, 100003, 4, 1, 1) + opaque(b"someone") + numbers(0) + opaque(b"")
    sequence = numbers(53) + b"s" * 16 + numbers(1, 0, 0, 1)
    handle = numbers(22) + opaque(b"handle")
    return head + opaque(b"tag") + numbers(2, 6) + sequence + handle + numbers(32) + handle + numbers(operation, 0)


def fragmented(record: bytes, *, at: int) -> bytes:
    """A record in two fragments."""
    first, last = record[:at], record[at:]
    return numbers(len(first)) + first + numbers(len(last) | 1 << 31) + last


@pytest.mark.parametrize("call", sorted(PROCEDURES))
def test_a_request_is_known_by_what_it_asks_for(call: str) -> None:
    assert asked(nfs3(7, PROCEDURES[call])) == call
    assert asked(nfs4(7, OPERATIONS[call])) == call


def test_other_requests_and_replies_are_nobodys_concern() -> None:
    assert asked(nfs3(7, 1)) is None and asked(nfs4(7, 9)) is None
    assert asked(numbers(7, 1, 0) + b"a reply" * 9) is None
    assert asked(numbers(7, 0, 2, 100000, 3, PROCEDURES["RENAME"])) is None  # another program's
    assert asked(b"") is None and asked(nfs4(7, 29)[:60]) is None


def test_records_are_put_together_from_their_fragments() -> None:
    one, other = socket.socketpair()
    with one, other:
        sent = fragmented(b"a record", at=3) + fragmented(b"another", at=0)
        one.sendall(sent + numbers(40) + b"cut off")
        one.shutdown(socket.SHUT_WR)
        found = list(records(other))
    assert [record for _, record in found] == [b"a record", b"another"]
    assert b"".join(raw for raw, _ in found) == sent


def test_the_reply_to_one_call_is_lost_and_the_connection_with_it() -> None:
    """A server that answers each request by its number: of two, the reply to the rename does not come."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        port = free_port()
        lossy = Lossy(port, server.getsockname()[1])
        lossy.lose("RENAME")
        assert exchange(port, nfs3(1, PROCEDURES["REMOVE"]), nfs3(2, PROCEDURES["RENAME"])) == [1]
        assert lossy.lost == 1
        assert exchange(port, nfs3(2, PROCEDURES["RENAME"]), nfs3(3, 1)) == [2, 3]  # asked again, it is answered
        lossy.lose("LINK")
        lossy.forgive()
        assert exchange(port, nfs3(4, PROCEDURES["LINK"])) == [4]
        assert lossy.lost == 1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def answer(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            for _, record in records(connection):
                connection.sendall(fragmented(record[:4] + numbers(1, 0), at=5))


def exchange(port: int, *requests: bytes) -> list[int]:
    """Ask one thing after another; return the numbers of the replies until the connection ended."""
    replies = []
    with socket.create_connection(("127.0.0.1", port)) as client:
        coming = records(client)
        for request in requests:
            client.sendall(fragmented(request, at=8))
            reply = next(coming, None)
            if reply is None:
                break
            replies.append(int.from_bytes(reply[1][:4]))
    return replies


# -- the guest ---------------------------------------------------------------------------------------------------


def test_only_whole_lines_of_the_task_are_taken_from_a_console() -> None:
    console = b"a kernel talks\r\n@ up\r\n@ sent a b\r\nsomething\r\n@ sent c"
    assert uml.own_lines(console) == ["up", "sent a b"]
    assert uml.own_lines(b"") == []


def test_the_power_is_cut_once_a_guest_has_said_enough_or_rests_or_has_failed() -> None:
    assert not uml._is_ripe(["booted", "up", "sent resting"], 4)
    assert uml._is_ripe(["booted", "up", "sent a", "sent b"], 4)
    assert uml._is_ripe(["up", "resting"], math.inf)
    assert uml._is_ripe(["up", "failed OSError()"], math.inf)


def test_the_first_script_of_a_guest_is_one_that_a_shell_can_read(tmp_path: Path) -> None:
    (tmp_path / "tree/usr/lib/x86_64-linux-gnu").mkdir(parents=True)
    script = uml.script(tmp_path / "a guest", tmp_path / "tree")
    assert str(tmp_path / "tree/usr/lib/x86_64-linux-gnu") in script and f"{uml.PROJECT}/tests" in script
    subprocess.run(["sh", "-n"], input=script.encode(), check=True)


def test_where_the_packages_cannot_be_had_it_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uml, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotRun, match="package of Debian"):
        uml.kernel()


# -- the reckoning -----------------------------------------------------------------------------------------------


def seen(about: dict[str, list[Any]] | None = None, damaged: list[str] | None = None, **states: str) -> dict[str, Any]:
    """What a guest tells of its disk: bodies by the state that each lies in, `-` for `_` in their names."""
    locations = {name.replace("_", "-"): [Location("q", state, f"/{name}")] for name, state in states.items()}
    settled = {name: [p._replace(state="processed") for p in found] for name, found in locations.items()}
    first = {"locations": locations, "damaged": damaged or []}
    return {"first": first, "about": about or {}, "last": {"locations": settled, "damaged": []}}


def test_what_a_power_cut_left_as_it_was_is_nothing_to_complain_of() -> None:
    said = [
        "booted",
        "up",
        "try plain-1 plain-2",
        "sent plain-1 plain-2",
        "take plain-1",
        "acked plain-1",
        "try plain-3",
    ]
    reckoning = powercut.reckon(said, seen(plain_1="processed", plain_2="target"))
    assert reckoning == powercut.Reckoning(returned=2)


def test_a_send_or_a_settlement_that_a_power_cut_took_back_is_found() -> None:
    said = ["try plain-1 plain-2 wide-3 delayed-4", "sent plain-1 plain-2 wide-3 delayed-4"]
    said += ["acked plain-1", "nacked plain-5", "rejected plain-6"]
    about = {"wide-3": [0, 0, False], "plain-5": [0, 0, False], "plain-6": [0, 0, False]}
    there = seen(about, plain_1="processing", wide_3="target", delayed_4="target", plain_5="target", plain_6="error")
    reckoning = powercut.reckon(said, there)
    assert reckoning.lost == ["plain-2"]
    undone = " ".join(reckoning.undone)
    assert len(reckoning.undone) == 5
    for line in ("plain-1 had been acked, and lies in processing", "wide-3 has lost", "delayed-4 had been sent"):
        assert line in undone
    for line in (
        "plain-5 had been nacked, and its name says nothing",
        "plain-6 had been rejected, and nothing says why",
    ):
        assert line in undone


def test_a_body_in_two_places_or_in_part_and_a_job_in_part_are_found() -> None:
    said = ["try job-1 job-2", "take plain-9"]
    there = seen(damaged=["/q/target/x"], job_1="target")
    there["first"]["locations"]["job-1"].append(Location("q", "processing", "/y"))
    there["last"]["locations"]["stuck"] = [Location("q", "processing", "/z")]
    reckoning = powercut.reckon(said, there)
    assert reckoning.doubled == ["job-1"] and reckoning.damaged == ["/q/target/x"]
    assert reckoning.undone == ["of the job ['job-1', 'job-2'] only ['job-1'] is there"]
    assert reckoning.wrong == ["1 messages stay in processing/ for ever"]


def test_a_control_that_loses_nothing_says_that_the_rig_proves_nothing() -> None:
    kept, took = powercut.Reckoning(returned=9), powercut.Reckoning(lost=["a"], undone=["b"], damaged=["c"])
    assert not judged("none", kept).good
    assert judged("none", took).good
    assert judged("file", powercut.Reckoning(lost=["a"], undone=["b"])).good
    assert not judged("file", took).good
    row = judged("full", took)
    assert (row.lost, len(row.wrong)) == (1, 3) and judged("full", kept).good


def judged(durability: str, reckoning: powercut.Reckoning) -> Row:
    return powercut.judged(Row(f"power cut, {durability}"), durability, [reckoning])


# -- the reckoning of a graph ------------------------------------------------------------------------------------

SAID = [
    *("booted", "up", "try m-1", "sent m-1", "try m-2", "sent m-2", "try m-3", "sent m-3", "route start"),
    *("routed start {'on': 2}", "take m-1", "acked m-1", "take m-2", "rejected m-2", "try m-4"),
]


def lying(**locations: str) -> dict[str, Any]:
    """What a look finds: messages by the queue and state that each lies in, several with `+` between."""
    found = {name.replace("_", "-"): list(map(location, where.split("+"))) for name, where in locations.items()}
    return {"locations": found, "damaged": []}


def location(where: str) -> Location:
    queue, _, state = where.partition("/")
    return Location(queue, state, f"/{where}/x")


def graph_seen(first: dict[str, Any] | None = None, last: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return what a guest says of a graph that is in order; arguments replace parts of it."""
    good: dict[str, Any] = {"first": first or lying(m_1="end/processed", m_2="end/error", m_3="middle/target")}
    good |= {"last": last or lying(m_1="end/processed", m_2="end/error", m_3="end/processed"), "swept": True}
    empty: dict[str, Any] = {name: [] for name in ("given", "given_last", "leaked", "removing", "narrow", "spent")}
    return {**empty, **good, **more}


def graph_judged(seen: dict[str, Any], said: list[str] = SAID) -> Row:
    row = Row("power cut, a graph")
    graph_powercut.reckon(row, said, seen)
    return row


def test_a_graph_that_a_power_cut_left_in_order_is_nothing_to_complain_of() -> None:
    assert graph_judged(graph_seen()) == Row("power cut, a graph", cases=3)
    under_way = lying(m_1="end/processed", m_2="end/error", m_3="end/target", m_4="start/target")
    settled = lying(m_1="end/processed", m_2="end/error", m_3="end/processed", m_4="end/processed")
    assert graph_judged(graph_seen(under_way, settled)).good
    taken = lying(m_1="end/processed", m_2="end/error", m_3="end/processed")
    assert graph_judged(graph_seen(taken), [*SAID, "take m-3"]).good


def test_a_message_of_a_graph_that_a_power_cut_lost_or_doubled_is_found() -> None:
    row = graph_judged(graph_seen(lying(m_1="end/processed", m_2="end/error", m_3="middle/target+end/target")))
    assert (row.lost, row.doubled) == (0, 1) and "doubled: m-3" in row.wrong[0]
    row = graph_judged(graph_seen(lying(m_1="end/processed", m_3="middle/target")))
    assert (row.lost, row.doubled) == (1, 0) and "lost: m-2" in row.wrong[0]
    row = graph_judged(graph_seen(last=lying(m_1="end/processed", m_2="end/error")))
    assert row.lost == 1 and row.wrong[0].startswith("last look")
    gone, twice = lying(m_1="end/processed", m_2="end/error"), lying(m_1="end/processed+end/processed", m_2="end/error")
    assert [graph_judged(graph_seen(gone, gone)).lost, graph_judged(graph_seen(twice, twice)).doubled] == [1, 1]
    half = lying(m_1="end/processed", m_2="end/error", m_3="middle/target") | {"damaged": ["/end/target/x"]}
    assert "/end/target/x is not whole" in graph_judged(graph_seen(half)).wrong[0]
    strange = lying(m_1="end/processed", m_2="end/error", m_3="middle/target", m_5="end/target")
    assert "m-5 was never sent" in graph_judged(graph_seen(strange)).wrong[0]


@pytest.mark.parametrize(
    ("first", "objection"),
    [
        (lying(m_1="end/target", m_2="end/error", m_3="middle/target"), "m-1 had been acked, and lies in end/target"),
        (lying(m_1="end/processed", m_2="end/processed", m_3="middle/target"), "m-2 had been rejected, and lies in"),
        (lying(m_1="end/processed", m_2="end/error", m_3="end/processed"), "nobody had settled m-3, and it lies in"),
        (lying(m_1="end/processed", m_2="end/error", m_3="end/processing"), "nobody had settled m-3, and it lies in"),
    ],
)
def test_a_settlement_in_a_graph_that_a_power_cut_undid_is_found(first: dict[str, Any], objection: str) -> None:
    (line,) = graph_judged(graph_seen(first)).wrong
    assert objection in line


@pytest.mark.parametrize(
    ("what", "value", "objection"),
    [
        ("given", ["/start/.dropq/transfers/r/target/x"], "is still to be carried"),
        ("given_last", ["/start/.dropq/transfers/r/target/x"], "is still to be carried"),
        ("leaked", ["credit t-k is spent on nothing"], "is spent on nothing"),
        ("spent", ["t-k"], "credit t-k is spent, and all is settled"),
        ("removing", ["/start/selectors/.on.removed"], "is left"),
        ("narrow", ["m-3"], "m-3 has lost what did not fit its name"),
        ("swept", False, "sweeps do not come to an end"),
        ("last", lying(m_1="end/processed", m_2="end/error", m_3="middle/target"), "m-3 stays in middle/target"),
    ],
)
def test_what_a_power_cut_leaves_in_a_graph_for_good_is_found(what: str, value: Any, objection: str) -> None:
    (line,) = graph_judged(graph_seen(**{what: value})).wrong
    assert objection in line


def test_a_guest_whose_task_fails_makes_a_row_wrong() -> None:
    assert graph_judged(graph_seen(), [*SAID, "failed OSError(5, 'no disk')"]).wrong == ["failed OSError(5, 'no disk')"]


# -- the reckoning of records --------------------------------------------------------------------------------------

SETTLED = ["up", "try b:0 b:1 b:2 b:3", "sent b:0 b:1 b:2 b:3", "take b:0 b:1 b:2 b:3", "acked b:0", "rejected b:1"]
LYING = [["processed", "", "b:0"], ["error", "as it comes", "b:1"], ["target", "", "b:2"], ["target", "", "b:3"]]


def records_judged(first: list[list[str]], said: list[str] = SETTLED, staged: list[str] | None = None) -> Row:
    row = Row("power cut, records")
    last = [["processed" if state == "target" else state, reason, name] for state, reason, name in first]
    record_powercut.reckon(row, said, {"first": first, "last": last, "staged": staged or []})
    return row


def test_records_that_a_power_cut_left_in_order_are_nothing_to_complain_of() -> None:
    assert records_judged(LYING) == Row("power cut, records", cases=4)
    archived_whole = [*LYING[:2], *(["processed", "", f"b:{number}"] for number in range(1, 4))]
    assert records_judged(archived_whole, [*SETTLED, "acked b:2 b:3"]).good


@pytest.mark.parametrize(
    ("first", "said", "wrong"),
    [
        (LYING[1:], "", "b:0 was acked, and is nowhere"),
        ([*LYING[1:], ["target", "", "b:0"]], "", "b:0 was acked, and is in target"),
        ([*LYING, ["target", "", "b:1"]], "", "b:1 was rejected, and is in {'error': 1, 'target': 1}"),
        (LYING, "nacked b:1", "b:1 was nacked, and is in error"),
        ([LYING[0], ["error", "", "b:1"], *LYING[2:]], "", "b:1 was rejected, and nothing says why"),
        ([*LYING, ["error", "as it comes", "c:0"]], "", "c:0 was never sent"),
    ],
)
def test_records_that_a_power_cut_lost_doubled_or_settled_otherwise_are_found(
    first: list[list[str]], said: str, wrong: str
) -> None:
    assert any(wrong in line for line in records_judged(first, [*SETTLED, said] if said else SETTLED).wrong)


def test_a_part_that_a_power_cut_left_in_staged_is_found() -> None:
    assert records_judged(LYING, staged=["0,error~x"]).wrong == ["0,error~x is left in staged/"]


# -- the reckoning of what goes out with an ack -----------------------------------------------------------------------

SENT_ON = [
    *("up", "try keeping-0", "sent keeping-0", "take keeping-0 keeping-0.0 keeping-0.1", "acked keeping-0"),
    *("try forgetting-1", "sent forgetting-1", "take forgetting-1 forgetting-1.0", "acked forgetting-1"),
    *("try loose-2", "sent loose-2", "try keeping-3", "sent keeping-3", "take keeping-3 keeping-3.0"),
]
OUTPUTS = {
    "keeping-0": "keeping/processed",
    "keeping-0.0": "full/target",
    "keeping-0.1": "file/target",
    "forgetting-1.0": "full/target",
    "keeping-3": "keeping/target",
}


def outputs_judged(other: dict[str, str], staged: Sequence[str] = ()) -> Row:
    """Judge what a guest tells, with some in `other` places; "" is nowhere."""
    places = {**OUTPUTS, **other}
    first = lying(**{name: place for name, place in places.items() if place})
    last = lying(**{name: re.sub("target|processing", "processed", place) for name, place in places.items() if place})
    row = Row("power cut, outputs")
    output_powercut.reckon(row, SENT_ON, {"first": first, "last": last, "staged": staged})
    return row


def test_what_went_out_with_an_ack_and_outlived_a_power_cut_is_nothing_to_complain_of() -> None:
    assert outputs_judged({}) == Row("power cut, outputs", cases=3)
    assert outputs_judged({"keeping-3": "keeping/processed", "keeping-3.0": "full/target"}).good
    assert outputs_judged({"loose-2": "loose/target"}).good


@pytest.mark.parametrize(
    ("other", "objection"),
    [
        ({"keeping-0.1": ""}, "a part was sent"),
        ({"keeping-0.0": "", "keeping-0.1": ""}, "it had been acknowledged"),
        ({"keeping-0.1": "file/target+file/target"}, "doubled"),
        ({"keeping-0": "keeping/target"}, "it is to be archived"),
        ({"keeping-3.0": "full/target"}, "it is to be archived"),
        ({"forgetting-1": "forgetting/target"}, "it is to be archived"),
        ({"keeping-3": ""}, "lost"),
        ({"keeping-3": "keeping/processed"}, "nobody had settled it"),
        ({"keeping-9": "keeping/processed"}, "was never sent"),
    ],
)
def test_what_a_power_cut_sent_in_part_without_its_ack_or_not_at_all_is_found(
    other: dict[str, str], objection: str
) -> None:
    assert any(objection in line for line in outputs_judged(other).wrong)


def test_what_a_power_cut_left_staged_of_an_ack_is_found() -> None:
    assert outputs_judged({}, ["whole"]).wrong == ["whole is left in staged/"]


# -- the reckoning of two hosts ----------------------------------------------------------------------------------------

HOSTS_SAID = {
    "a": ["up", "try a1-0", "sent a1-0", "acked b1-0", "try a1-1", "sent a1-1", "kept 1", "try a1-2"],
    "b": ["up", "try b1-0", "sent b1-0", "acked a1-0", "away"],
}
HOSTS_HAVE = {"a": {"b1_0": "processed", "a1_1": "processed"}, "b": {"a1_0": "processed"}}


def hosts_judged(
    a: dict[str, str] | None = None, b: dict[str, str] | None = None, said: str = "", **of_b: list[str]
) -> Row:
    """Judge two hosts, of which one or the other has some messages in other places; and b said one line more."""
    row = Row("two hosts")
    seen: dict[str, dict[str, Any]] = {}
    for host, other in (("a", a or {}), ("b", b or {})):
        places = {name: f"q/{place}" for name, place in {**HOSTS_HAVE[host], **other}.items() if place}
        seen[host] = {"found": lying(**places), "on_the_way": [], "findings": []}
    seen["b"] |= of_b
    root_hosts.reckon(row, {**HOSTS_SAID, "b": [*HOSTS_SAID["b"], *filter(None, [said])]}, seen)
    return row


def test_hosts_that_lost_their_power_and_nothing_else_are_nothing_to_complain_of() -> None:
    assert hosts_judged() == Row("two hosts", cases=3)
    assert hosts_judged(b={"a1_2": "processed"}).good  # its send did not return
    assert hosts_judged(a={"a1_1": ""}, b={"a1_1": "processed"}).good  # the other root had it, unnoticed


@pytest.mark.parametrize(
    ("a", "b", "objection"),
    [
        ({"a1_1": ""}, {}, "a1-1 had been sent, and is lost"),
        ({}, {"a1_1": "processed"}, "a1-1 lies in ['a/processed', 'b/processed']"),
        ({"a1_2": "processed"}, {"a1_2": "target"}, "a1-2 lies in ['a/processed', 'b/target']"),
        ({"a1_1": "processing"}, {}, "a1-1 stays in ['a/processing']"),
        ({"a1_0": "processed"}, {"a1_0": ""}, "a1-0 had been acknowledged on b, and lies in ['a/processed']"),
        ({"c1_0": "processed"}, {}, "c1-0 was never sent"),
    ],
)
def test_what_hosts_lost_doubled_or_kept_is_found(a: dict[str, str], b: dict[str, str], objection: str) -> None:
    row = hosts_judged(a, b)
    assert any(objection in line for line in row.wrong)
    assert (row.lost, row.doubled) == ("is lost" in objection, "', '" in objection)


def test_what_hosts_leave_say_twice_or_fail_at_is_found() -> None:
    assert hosts_judged(on_the_way=["row/target/x"]).wrong == ["b: row/target/x stays on its way"]
    assert hosts_judged(findings=["stray x"]).wrong == ["b: stray x"]
    assert "a1-0 was acknowledged 2 times" in hosts_judged(said="acked a1-0").wrong
    assert hosts_judged(said="failed OSError(5)").wrong == ["failed OSError(5)"]
