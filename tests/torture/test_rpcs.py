"""What counts RPCs, as far as it needs no second kernel; see rpcs.py and nfs_calls.py."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from torture import rpcs
from torture.nfs_calls import CASES, LIMITS, beyond, chosen

STATS = """\
device proc mounted on /proc with fstype proc
device 127.0.0.3:/ mounted on /run/torture/a with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2
\tage:\t12
\txprt:\ttcp 0 0 1 0 0 31 31 0 31 0 2 0 0
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: 0 0 0 0 0 0 0 0 0
\t        OPEN: 7 7 0 1 2 3 4 5 0
\t      CREATE: 2 2 0 1 2 3 4 5 0

device 127.0.0.4:/run/torture/disk mounted on /run/torture/b with fstype nfs statvers=1.1
\tper-op statistics
\t      CREATE: 3 3 0 1 2 3 4 5 0
\t        READ: 4 4 0 1 2 3 4 5 0
"""


def test_the_calls_of_all_mounts_are_added_and_creating_a_folder_is_not_creating_a_file() -> None:
    assert rpcs.mount_calls(STATS) == {"NULL": 1, "OPEN": 7, "MKDIR": 2, "CREATE": 3, "READ": 4}


def test_each_call_is_of_one_kind() -> None:
    named = [call for calls in rpcs.KINDS.values() for call in calls]
    assert len(named) == len(set(named))
    assert rpcs.by_kind({"OPEN": 2, "CREATE": 1, "LOCKU": 1, "NLM_LOCK": 2, "STATFS": 3}) == {
        "create": 3,
        "lock": 3,
        "other": 3,
    }


def record(kind: int, program: int, procedure: int) -> bytes:
    """A record of RPC: a call or a reply, with something behind its head."""
    content = struct.pack(">6I", 7, kind, 2, program, 4, procedure) + b"more"
    return struct.pack(">I", len(content) | 1 << 31) + content


def test_the_calls_for_locks_are_told_from_replies_and_other_programs() -> None:
    records = record(0, 100021, 2) + record(1, 100021, 2) + record(0, 100003, 2) + record(0, 100021, 4)
    packet = bytes([0x45, *bytes(19)]) + bytes([*bytes(12), 0x80, *bytes(19)]) + records
    assert list(rpcs._lock_calls(packet)) == ["NLM_LOCK", "NLM_UNLOCK"]
    assert list(rpcs._lock_calls(packet[:52])) == []


def test_a_choice_of_cases_has_the_raw_rows_that_it_is_compared_with() -> None:
    assert chosen("nack,receive") == ["raw-receive", "raw-move", "receive", "nack"]
    assert chosen("raw-s*") == ["raw-send"]
    assert chosen("*") == list(CASES)
    with pytest.raises(ValueError, match="there is no case sned; there are raw-send"):
        chosen("send,sned")


def test_every_raw_row_and_every_limit_is_of_a_case() -> None:
    assert {case.raw for case in CASES.values()} - {""} <= set(CASES)
    assert set(LIMITS) <= set(CASES)


def row(calls: int, **more: Any) -> dict[str, Any]:
    return {"case": "send", "n": 10, "calls": {"RENAME": calls}, **more}


def test_a_row_beyond_its_limit_is_named_with_what_it_asked_for() -> None:
    version_3, version_4 = (round(10 * limit) for limit in LIMITS["send"])
    assert not list(beyond("v3", [row(version_3)])) and not list(beyond("v4.2", [row(version_4)]))
    (wrong,) = beyond("v3", [row(version_3 + 1)])
    assert wrong.startswith("send, `none`: 4.7 RPCs a message, and 4.6 are its limit: RENAME 47 for 10")
    (wrong,) = beyond("v3", [row(1, broke="OSError: no room")])
    assert wrong == "send, `none`: OSError: no room"
