"""ZMTP 3, the protocol of ZeroMQ, as bytes alone: what a peer sends goes in, its messages come out.

Invariant: before its peer is let in, a conversation keeps at most a greeting and a command; then, at most a chunk and a
message that is not too long. Of a longer one it keeps the first bytes of the first frame alone, to answer it by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dropq.zmq.curve import Broken, Curve

#: The most bytes that are read at once, but for the rest of a long frame, of which as many as `REST` are.
CHUNK, REST = 32 << 10, 1 << 20
#: The most bytes of a command; of the frame that names an answer; and what a frame counts beside its bytes.
COMMAND, ID, FRAME = 4096, 64 << 10, 64
#: The bits of the byte that begins a frame.
_MORE, _LONG, _COMMAND = 1, 2, 4
#: The types of sockets that may speak to a socket of a type.
_PEERS = {b"ROUTER": (b"REQ", b"DEALER", b"ROUTER"), b"DEALER": (b"REP", b"DEALER", b"ROUTER")}
#: What begins short frames, by the first byte and the length.
_SHORT = [[bytes((flags, size)) for size in range(256)] for flags in range(8)]


class Got(NamedTuple):
    """A message of a peer, and its size in bytes; of one that is too long, and so not `whole`, the first `ID` bytes."""

    frames: list[bytes]
    whole: bool
    size: int


class Conversation:
    """What is said on one connection of a ROUTER or a DEALER.

    A message has at most so many bytes and frames; `curve` says who may speak, and None lets in everybody.
    """

    def __init__(self, type: bytes, *, most: int, frames: int, curve: Curve | None = None) -> None:
        self._type = type
        self._most = most
        self._most_frames = frames
        self._curve = curve
        self._data = b""
        self._at = 0
        self._long = bytearray()  # what is kept of a frame that is longer than a chunk, and how much may be
        self._room = 0
        self._missing = 0
        self._flags = 0
        self._frames = list[bytes]()
        self._bytes = 0
        self._whole = True
        self._greeted = False
        mechanism = b"NULL" if curve is None else b"CURVE"
        self._mechanism = mechanism.ljust(20, b"\0")
        #: What is to be sent to the peer before anything else.
        self.out = [b"\xff" + bytes(8) + b"\x7f\3\1" + self._mechanism + bytes([curve is not None]) + bytes(31)]
        #: Whether the peer is let in, and what it calls itself.
        self.is_open = False
        self.identity = b""
        #: Whether the peer knows signs of life, and how many it has answered.
        self.has_pings = False
        self.pongs = 0

    @property
    def size(self) -> int:
        """How many bytes of its peer it keeps."""
        return len(self._data) - self._at + len(self._long) + self._bytes + FRAME * len(self._frames)

    @property
    def is_between(self) -> bool:
        """Whether nothing of a message has come that is not whole."""
        return not self._frames and not self._missing and self._at == len(self._data)

    @property
    def wants(self) -> int:
        """How many bytes may be fed now."""
        return min(max(self._missing, CHUNK), REST)

    def feed(self, data: bytes) -> None:
        """Take what the peer has sent, once `next` returns None."""
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def next(self) -> Got | None:
        """Return the next message; None if more has to be fed. Broken if the connection has to end."""
        if not self._greeted and not self._greet():
            return None
        while (data := self._frame()) is not None:
            flags = self._flags
            if self._curve is not None and self.is_open:
                flags, data = self._curve.opened(data)
            if flags & _COMMAND or not self.is_open:
                self._obey(data)
                continue
            self._keep(data)
            if not flags & _MORE:
                got = Got(self._frames, self._whole, self._bytes + FRAME * len(self._frames))
                self._frames, self._bytes, self._whole = [], 0, True
                return got
        if self._at == len(self._data):
            self._data, self._at = b"", 0  # which may be much, and nobody counts it
        return None

    def encoded(self, frames: Sequence[bytes], flags: int = 0) -> list[bytes]:
        """Return a message, or a command, as it is sent: in one piece, but for long frames."""
        pieces = list[bytes]()
        last, size = len(frames) - 1, 0
        for at, frame in enumerate(frames):
            first = flags | (_MORE if at < last else 0)
            if self._curve is not None and self.is_open:
                first, frame = 0, self._curve.boxed(first, frame)
            length = len(frame)
            size += length
            pieces.append(_SHORT[first][length] if length < 256 else b"%c%b" % (first | _LONG, length.to_bytes(8)))
            pieces.append(frame)
        return [b"".join(pieces)] if size < CHUNK else pieces

    def ping(self) -> list[bytes]:
        """Return a question for a sign of life."""
        return self.encoded([b"\4PING\0\0"], _COMMAND)

    def _greet(self) -> bool:
        greeting = self._data[:64]
        if not (b"\xff".startswith(greeting[:1]) and (len(greeting) < 10 or greeting[9] & 1)):
            raise Broken("it does not speak ZMTP")
        if len(greeting) > 10 and greeting[10] < 3:
            raise Broken("it speaks an old ZMTP: version 3, of libzmq 4, is needed")
        if len(greeting) < 64:
            return False
        if greeting[12:32] != self._mechanism:
            raise Broken(
                f"it asks for {greeting[12:32].rstrip(bytes(1))!r}, not for {self._mechanism.decode().strip(chr(0))}"
            )
        self._greeted = True
        self._at = 64
        self.has_pings = (greeting[10], greeting[11]) >= (3, 1)
        if self._curve is None:
            self.out += self.encoded([b"\5READY" + self._properties()], _COMMAND)
        return True

    def _frame(self) -> bytes | None:
        """Return the bytes of the next frame, and note its flags."""
        data, at = self._data, self._at
        if self._missing:
            return self._rest()
        have = len(data) - at
        if have < 2:
            return None
        flags, begin = data[at], at + 2
        size = data[at + 1]
        if flags & _LONG:
            if have < 9:
                return None
            size, begin = int.from_bytes(data[at + 1 : at + 9]), at + 9
        if size > COMMAND and (not self.is_open or (flags & _COMMAND and self._curve is None)):
            raise Broken(f"it sends a command of {size} bytes")
        self._flags = flags
        if begin + size <= len(data):
            self._at = begin + size
            return data[begin : begin + size]
        if size < CHUNK:
            return None
        if self._curve is not None and size > self._most + 2 * CHUNK:
            raise Broken(f"it sends a frame of {size} bytes")
        if self._curve is None and self._bytes + size > self._most:
            self._whole = False
        self._room = size if self._whole or self._curve is not None else 0 if self._frames else ID
        self._missing, self._at = size, begin
        return self._rest()

    def _rest(self) -> bytes | None:
        """Return a long frame, once it is there; of one that is too long, what is kept."""
        part = self._data[self._at : self._at + self._missing]
        self._at += len(part)
        self._missing -= len(part)
        self._long += part[: self._room - len(self._long)]
        if self._missing:
            return None
        data, self._long = bytes(self._long), bytearray()
        return data

    def _keep(self, data: bytes) -> None:
        """Keep a frame of a message, or no more than the first if the message is too long."""
        self._bytes += len(data)
        if self._bytes > self._most or len(self._frames) >= self._most_frames:
            self._whole = False
        if self._whole or not self._frames:
            self._frames.append(data)
        if not self._whole:
            self._frames = [self._frames[0][:ID]]
            self._bytes = len(self._frames[0])

    def _obey(self, data: bytes) -> None:
        length = data[0] if data else 0
        name, rest = data[1 : 1 + length], data[1 + length :]
        if self.is_open:
            if name == b"PING":
                self.out += self.encoded([b"\4PONG" + rest[2:18]], _COMMAND)
            self.pongs += name == b"PONG"
        elif self._curve is not None:
            answer, properties = self._curve.shake(name, data, self._properties())
            self.out += self.encoded([answer], _COMMAND)
            if properties is not None:
                self._let_in(properties)
        elif name == b"READY":
            self._let_in(rest)
        else:
            raise Broken(f"it begins with {name!r:.80}")

    def _properties(self) -> bytes:
        said = {b"Socket-Type": self._type, b"Identity": b""}
        return b"".join(b"%c%b%b%b" % (len(key), key, len(value).to_bytes(4), value) for key, value in said.items())

    def _let_in(self, properties: bytes) -> None:
        said = dict[bytes, bytes]()
        at = 0
        while at < len(properties):
            begin = at + 1 + properties[at]
            end = begin + 4 + int.from_bytes(properties[begin : begin + 4])
            if end > len(properties):
                raise Broken("its properties are cut short")
            said[properties[at + 1 : begin].lower()] = properties[begin + 4 : end]
            at = end
        if (type := said.get(b"socket-type", b"")) not in _PEERS[self._type]:
            raise Broken(f"it is a socket of type {type!r:.80}")
        self.identity = said.get(b"identity", b"")[:255]
        self.is_open = True
