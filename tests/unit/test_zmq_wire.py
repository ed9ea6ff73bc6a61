"""Frames of PZQ's sockets, to fields and back: every case of the table in docs/zeromq.md."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropq.zmq import wire


@pytest.mark.parametrize(
    ("frames", "id", "headers", "parts"),
    [
        ([b"id", b"", b"body"], b"id", [], [b"body"]),
        ([b"id", b"h1", b"h2", b"", b"a", b"b"], b"id", [b"h1", b"h2"], [b"a", b"b"]),
        ([b"id", b"", b"a", b"", b"b", b""], b"id", [], [b"a", b"", b"b", b""]),
        ([b"id", b"", b""], b"id", [], [b""]),
        ([b"", b"x", b"", b"body"], b"", [b"x"], [b"body"]),  # a REQ, which puts an empty frame in front
        ([b"\xff\x00", b"", b"body"], b"\xff\x00", [], [b"body"]),
    ],
)
def test_a_message_is_an_id_headers_an_empty_frame_and_parts(
    frames: list[bytes], id: bytes, headers: list[bytes], parts: list[bytes]
) -> None:
    assert wire.read_message(frames) == (id, headers, parts)


@pytest.mark.parametrize(
    "frames", [[b"id"], [b"id", b"header"], [b"id", b"h", b"body"], [b"id", b""], [b""], [b"", b"x"]]
)
def test_frames_without_an_empty_one_or_without_a_part_are_no_message(frames: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"^malformed message: no"):
        wire.read_message(frames)


def test_a_thousand_parts_are_a_message_and_one_more_is_too_many() -> None:
    assert len(wire.read_message([b"id", b"", *[b"p"] * 1000]).parts) == 1000
    with pytest.raises(ValueError, match="1001 parts and headers: at most 1000"):
        wire.read_message([b"id", b"", *[b"p"] * 1001])


def test_answers_have_the_id_a_digit_and_an_empty_frame() -> None:
    assert wire.stored(b"id") == [b"id", b"1", b""]
    assert wire.refused(b"id", "größer") == [b"id", b"0", b"", "größer".encode()]


def test_a_delivery_has_a_key_two_numbers_an_empty_frame_and_the_parts() -> None:
    assert wire.delivery(b"key", 1317814800000001, 5000000, [b"a", b"", b"b"]) == [
        *(b"key", b"1317814800000001", b"5000000"),
        *(b"", b"a", b"", b"b"),
    ]
    assert wire.delivery(b"key", 1, 2, [b"a"], b"{}") == [b"key", b"1", b"2", b"{}", b"", b"a"]


@pytest.mark.parametrize(
    ("frames", "settled"),
    [
        ([b"key", b"1"], (b"key", True)),
        ([b"key", b"1", b"more"], (b"key", True)),
        ([b"key", b"0"], (b"key", False)),
        ([b"key", b"OK"], (b"key", False)),
        ([b"key", b"\x01"], (b"key", False)),
        ([b"key", b""], (b"key", False)),
        ([b"", b"key", b"1"], (b"", False)),
        ([b"key"], None),
    ],
)
def test_the_digit_one_acknowledges_and_anything_else_gives_back(
    frames: list[bytes], settled: tuple[bytes, bool] | None
) -> None:
    assert wire.read_settlement(frames) == settled


@pytest.mark.parametrize(
    ("frames", "asks"),
    [([b"", b"MONITOR"], True), ([b"MONITOR"], True), ([b"", b"x", b"MONITOR"], True), ([b"", b"monitor"], False)],
)
def test_the_last_frame_asks_the_monitor(frames: list[bytes], asks: bool) -> None:
    assert wire.is_question(frames) == asks


def test_the_monitor_answers_with_lines() -> None:
    assert wire.figures({"messages": 0, "queue": "orders"}) == [b"", b"messages: 0\nqueue: orders\n"]
    assert wire.complaint("send MONITOR") == [b"", b"error: send MONITOR"]


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=20))
def test_parts_come_out_as_they_went_in(parts: list[bytes]) -> None:
    body, lengths = wire.joined(parts)
    assert body == b"".join(parts)
    assert (wire.parted(body, lengths) if lengths is not None else [body]) == parts


@pytest.mark.parametrize("lengths", ["", "1-", "a", "-1", "1--2", "+3", "1-1", "4", "٣", "99999999999999999999"])
def test_lengths_that_do_not_add_up_take_nothing_apart(lengths: str) -> None:
    with pytest.raises(ValueError, match=r"^zmq_parts "):
        wire.parted(b"abc", lengths)


def test_a_header_says_what_send_takes() -> None:
    said = {"priority": 7, "type": "t", "properties": {"a": 1, "b": True, "c": "x"}, "delay": "1s", "expires_in": 2.5}
    assert wire.fields_of([json.dumps(said).encode()]) == said
    assert wire.fields_of([]) == {}


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ([b"x"], "no JSON"),
        ([b""], "no JSON"),
        ([b"\xff"], "no JSON"),
        ([b"[]"], "no JSON object"),
        ([b"{}", b"{}"], "2 headers"),
        ([b'{"prio": 1}'], "'prio'"),
        ([b'{"priority": "1"}'], "priority is of the wrong type"),
        ([b'{"priority": true}'], "priority is of the wrong type"),
        ([b'{"properties": [1]}'], "properties is of the wrong type"),
        ([b'{"properties": {"zmq_parts": "1-2"}}'], "zmq_parts"),
        ([b'{"delay": NaN}'], "no JSON"),
        ([b"[" * 100_000], "no JSON"),
    ],
)
def test_a_header_that_says_anything_else_is_refused(headers: list[bytes], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        wire.fields_of(headers)
