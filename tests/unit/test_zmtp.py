"""ZMTP as bytes: messages come out however they were cut, nothing but `Broken` is raised, memory is bounded."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'dropq[zmq]'")

import zmq.auth
from zeromq import GREETING, PING, framed
from zmq.utils import z85

from dropq.zmq.curve import Broken, Curve, _box, _open, check
from dropq.zmq.zmtp import CHUNK, COMMAND, FRAME, ID, Conversation

READY = b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER"
HELLO = GREETING + READY


def said(data: bytes, cuts: list[int], *, most: int = 1 << 20, frames: int = 1000) -> list[tuple[list[bytes], bool]]:
    """Return the messages in what a peer says, cut into pieces."""
    talk = Conversation(b"ROUTER", most=most, frames=frames)
    found, at = [], 0
    for end in [*sorted(cuts), len(data)]:
        while at < end:
            talk.feed(part := data[at : min(end, at + talk.wants)])
            at += len(part)
            while (got := talk.next()) is not None:
                found.append((got.frames, got.whole))
            assert talk.size <= max(COMMAND + CHUNK, most + CHUNK + 2 * ID + FRAME * (frames + 1))
    return found


MESSAGES = st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=5), max_size=6)


@given(messages=MESSAGES, long=st.integers(CHUNK - 2, 3 * CHUNK), cuts=st.lists(st.integers(0, 200_000), max_size=20))
@settings(deadline=None)
def test_messages_come_out_however_they_were_cut(messages: list[list[bytes]], long: int, cuts: list[int]) -> None:
    messages = [*messages, [b"id", b"", b"x" * long], [b"last"]]
    data = HELLO + PING.join(framed(*frames) for frames in messages)
    assert said(data, [cut for cut in cuts if cut < len(data)]) == [(frames, True) for frames in messages]


@given(messages=MESSAGES, long=st.integers(0, 3 * CHUNK), cuts=st.lists(st.integers(0, 200_000), max_size=20))
@example(messages=[], long=3 * CHUNK, cuts=[])
@settings(deadline=None)
def test_of_a_message_that_is_too_long_the_first_frame_is_left(
    messages: list[list[bytes]], long: int, cuts: list[int]
) -> None:
    messages = [*messages, [b"id", b"x" * long], [b"i" * long, b"x" * long], [b"last"]]
    data = HELLO + b"".join(framed(*frames) for frames in messages)
    found = said(data, [cut for cut in cuts if cut < len(data)], most=500, frames=3)
    whole = [sum(map(len, frames)) <= 500 and len(frames) <= 3 for frames in messages]
    assert found == [(frames if good else [frames[0][:ID]], good) for frames, good in zip(messages, whole, strict=True)]


@given(start=st.sampled_from([b"", GREETING, HELLO, HELLO + b"\4"]), data=st.binary(max_size=500))
@settings(deadline=None)
def test_whatever_a_peer_says_nothing_but_broken_is_raised(start: bytes, data: bytes) -> None:
    try:
        said(start + data, [])
    except Broken:
        return


def test_what_was_read_of_a_long_frame_is_not_kept() -> None:
    talk = Conversation(b"ROUTER", most=1 << 20, frames=10)
    data = HELLO + framed(b"id", b"", b"x" * (1 << 20))
    while data:
        talk.feed(data[: talk.wants])
        data = data[talk.wants :]
        while talk.next() is not None:
            pass
    assert talk.size == len(talk._data) == 0


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak ZMTP"),
        (b"\xff" + bytes(8) + b"\x7f\1", "an old ZMTP: version 3, of libzmq 4"),
        (GREETING.replace(b"NULL", b"PLAI"), "asks for b'PLAI', not for NULL"),
        (GREETING + b"\4\6\5HELLO", "begins with b'HELLO'"),
        (GREETING + READY.replace(b"DEALER", b"PUB\0\0\0"), "of type b'PUB"),
        (GREETING + READY.replace(b"\0\0\0\6", b"\0\0\0\7"), "cut short"),
        (GREETING + b"\6" + (COMMAND + 1).to_bytes(8), f"a command of {COMMAND + 1} bytes"),
    ],
)
def test_who_breaks_the_protocol_is_told_apart(data: bytes, why: str) -> None:
    with pytest.raises(Broken, match=why):
        said(data, [])


# -- CURVE -------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Keys."""

    public: bytes
    secret: bytes


def pair() -> Pair:
    """Return new keys."""
    return Pair(*map(z85.decode, zmq.curve_keypair()))


SERVER, CLIENT, OTHER = pair(), pair(), pair()


class Client:
    """A client of CURVE, whose words a test may change."""

    def __init__(self, own: Pair = CLIENT) -> None:
        self.own, self.short = own, pair()
        self.curve = Curve(*SERVER, lambda key: "me.key" if key == CLIENT.public else None)
        self.vouched = self.short.public + SERVER.public

    def hello(self) -> bytes:
        """Return its HELLO."""
        box = _box(bytes(64), b"CurveZMQHELLO---" + (1).to_bytes(8), SERVER.public, self.short.secret)
        return b"\5HELLO\1\0" + bytes(72) + self.short.public + (1).to_bytes(8) + box

    def initiate(self, welcome: bytes) -> bytes:
        """Return its INITIATE."""
        text = _open(welcome[24:], b"WELCOME-" + welcome[8:24], SERVER.public, self.short.secret)
        self.theirs, self.cookie = text[:32], text[32:]
        nonce = os.urandom(16)
        vouch = nonce + _box(self.vouched, b"VOUCH---" + nonce, self.theirs, self.own.secret)
        said = self.own.public + vouch + READY[8:]
        box = _box(said, b"CurveZMQINITIATE" + (2).to_bytes(8), self.theirs, self.short.secret)
        return b"\x08INITIATE" + self.cookie + (2).to_bytes(8) + box

    def shake(self, change: Callable[[bytes], bytes] = bytes) -> bytes | None:
        """Shake hands; return what the server learns."""
        welcome, _ = self.curve.shake(b"HELLO", self.hello(), b"")
        _, properties = self.curve.shake(b"INITIATE", change(self.initiate(welcome)), b"")
        return properties

    def message(self, number: int, frame: bytes, flags: int = 0) -> bytes:
        """Return a frame as it is sent."""
        nonce = number.to_bytes(8)
        box = _box(bytes([flags]) + frame, b"CurveZMQMESSAGEC" + nonce, self.theirs, self.short.secret)
        return b"\7MESSAGE" + nonce + box


def test_who_has_a_key_is_let_in_and_heard_once() -> None:
    client = Client()
    assert client.shake() == READY[8:]
    assert (client.curve.key, client.curve.name) == (CLIENT.public, "me.key")
    assert client.curve.opened(client.message(3, b"one")) == (0, b"one")
    for message in (
        client.message(3, b"again"),
        client.message(2, b"before"),
        client.message(4, b"x")[:-1],
        b"",
        b"\7MESSAGE",
    ):
        with pytest.raises(Broken):
            client.curve.opened(message)


def test_a_box_has_a_bit_of_its_own_for_a_command() -> None:
    client = Client()
    client.shake()
    assert client.curve.opened(client.message(3, b"\4PING\0\0", 2)) == (4, b"\4PING\0\0")
    assert client.curve.opened(client.message(4, b"one", 1)) == (1, b"one")
    for flags, boxed in ((0, 0), (1, 1), (4, 2)):
        said = client.curve.boxed(flags, b"x")
        text = _open(said[16:], b"CurveZMQMESSAGES" + said[8:16], client.theirs, client.short.secret)
        assert text == bytes([boxed]) + b"x"


def flipped(data: bytes, at: int) -> bytes:
    """Return data with another bit."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_who_has_no_key_or_says_something_else_is_not_let_in() -> None:
    with pytest.raises(Broken, match="its key is not allowed"):
        Client(OTHER).shake()
    for at in (10, 60, 104, 112, 113, 150, 250, -1):
        client = Client()
        with pytest.raises(Broken):
            client.shake(lambda said, at=at: flipped(said, at % len(said)))  # type: ignore[misc]
        assert client.curve.key == b""
    for vouched in (CLIENT.public + SERVER.public, OTHER.public + SERVER.public):
        client = Client()
        client.vouched = vouched
        with pytest.raises(Broken):
            client.shake()
    client = Client()
    client.vouched = client.short.public + OTHER.public  # what it said to another server
    with pytest.raises(Broken):
        client.shake()


def test_a_handshake_goes_one_way() -> None:
    client = Client()
    for name, command in ((b"INITIATE", bytes(300)), (b"READY", b""), (b"HELLO", client.hello()[:-1])):
        with pytest.raises(Broken):
            client.curve.shake(name, command, b"")
    client.shake()
    for name, command in ((b"HELLO", client.hello()), (b"INITIATE", bytes(300))):
        with pytest.raises(Broken):
            client.curve.shake(name, command, b"")


def test_what_was_said_in_a_hello_to_another_server_does_not_count() -> None:
    client = Client()
    for at in (6, 80, 112, 120):
        with pytest.raises(Broken):
            Client().curve.shake(b"HELLO", flipped(client.hello(), at), b"")


def test_keys_of_a_server_are_a_pair() -> None:
    assert check(*SERVER)
    assert not check(SERVER.public, OTHER.secret)
    assert not check(SERVER.public, b"")
