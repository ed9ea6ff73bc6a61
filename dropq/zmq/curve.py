"""CURVE, by which a server and its clients know each other, and hide from others what they say (RFC 25, 26 of ZeroMQ).

The cryptography is libsodium's. Invariant: a client is let in only with a key that is allowed at the
end of its handshake; what it sends after that is opened in the order in which it was sent, or ends its connection.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable

from nacl.bindings import (
    crypto_box,
    crypto_box_afternm,
    crypto_box_beforenm,
    crypto_box_keypair,
    crypto_box_open,
    crypto_box_open_afternm,
    crypto_scalarmult_base,
)
from nacl.exceptions import CryptoError

from dropq.errors import DropqError

#: Bytes of a key.
KEY = 32
#: The bits of the byte that begins a frame, and of the one in a box: more follow; it is a command.
_MORE, _COMMAND, _BOXED_COMMAND = 1, 4, 2


class Broken(DropqError):
    """Raised where a peer breaks the protocol, or is not let in: its connection has to end."""


def _box(text: bytes, nonce: bytes, *keys: bytes) -> bytes:
    """Return a box: from a secret key to a public one, or by what both have made of them."""
    try:
        return (crypto_box if len(keys) == 2 else crypto_box_afternm)(text, nonce, *keys)
    except CryptoError as error:
        raise Broken("its key is none") from error


def _open(box: bytes, nonce: bytes, *keys: bytes) -> bytes:
    """Open a box, by the keys of the one who made it and of us, or by what both have made of them."""
    try:
        return (crypto_box_open if len(keys) == 2 else crypto_box_open_afternm)(box, nonce, *keys)
    except CryptoError as error:
        raise Broken("it does not have the keys that it says") from error


def check(public: bytes, secret: bytes) -> bool:
    """Return whether keys are a pair."""
    return len(secret) == KEY and crypto_scalarmult_base(secret) == public


class Curve:
    """The server's side of one connection, by its own public and secret key.

    `name_of` returns the name of a client's key, or None if nobody may come in with it. They are `name` and `key` once
    the client has come in.
    """

    def __init__(self, public: bytes, secret: bytes, name_of: Callable[[bytes], str | None]) -> None:
        self._public = public
        self._secret = secret
        self._name_of = name_of
        self._cookie = b""
        self._client = b""  # the key that the client made for this connection
        self._own = b""  # and the secret one that the server made for it
        self._shared = b""
        self._sent = self._seen = 0
        self.key = b""
        self.name = ""

    def shake(self, name: bytes, command: bytes, properties: bytes) -> tuple[bytes, bytes | None]:
        """Answer a command of the handshake with the server's properties, or raise Broken if it is not let in.

        Return the answer, and what the client says of itself, once it is let in.
        """
        if name == b"HELLO" and not self._cookie and len(command) == 200:
            return self._welcome(command), None
        if name == b"INITIATE" and self._cookie and not self._shared and len(command) >= 257:
            return self._ready(command, properties)
        raise Broken(f"it sends {name!r:.80} where a handshake has to go on")

    def _welcome(self, hello: bytes) -> bytes:
        self._client, nonce = hello[80:112], hello[112:120]
        self._seen = int.from_bytes(nonce)
        if hello[6:8] != b"\1\0" or any(_open(hello[120:], b"CurveZMQHELLO---" + nonce, self._client, self._secret)):
            raise Broken("its HELLO is none")
        public, self._own = crypto_box_keypair()
        self._cookie, nonce = os.urandom(96), os.urandom(16)
        box = _box(public + self._cookie, b"WELCOME-" + nonce, self._client, self._secret)
        return b"\7WELCOME" + nonce + box

    def _ready(self, initiate: bytes, properties: bytes) -> tuple[bytes, bytes]:
        self._see(initiate[105:113])
        text = _open(initiate[113:], b"CurveZMQINITIATE" + initiate[105:113], self._client, self._own)
        key, said = text[:KEY], text[128:]
        vouch = _open(text[48:128], b"VOUCH---" + text[32:48], key, self._own)
        known = hmac.compare_digest(initiate[9:105], self._cookie)
        name = self._name_of(key)
        if not known or not hmac.compare_digest(vouch, self._client + self._public) or name is None:
            raise Broken("its key is not allowed")
        self._shared, self.key, self.name = crypto_box_beforenm(self._client, self._own), key, name
        nonce = self._nonce()
        return b"\5READY" + nonce + _box(properties, b"CurveZMQREADY---" + nonce, self._shared), said

    def boxed(self, flags: int, frame: bytes) -> bytes:
        """Return a frame as it is sent."""
        nonce = self._nonce()
        said = flags & _MORE | (_BOXED_COMMAND if flags & _COMMAND else 0)
        return b"\7MESSAGE" + nonce + _box(bytes((said,)) + frame, b"CurveZMQMESSAGES" + nonce, self._shared)

    def opened(self, message: bytes) -> tuple[int, bytes]:
        """Return the flags and the bytes of a frame; Broken if the client did not send it, or sent it before."""
        self._see(message[8:16])
        text = _open(message[16:], b"CurveZMQMESSAGEC" + message[8:16], self._shared)
        if not message.startswith(b"\7MESSAGE") or not text:
            raise Broken("it sends no MESSAGE")
        return text[0] & _MORE | (_COMMAND if text[0] & _BOXED_COMMAND else 0), text[1:]

    def _see(self, nonce: bytes) -> None:
        number = int.from_bytes(nonce)
        if len(nonce) != 8 or number <= self._seen:
            raise Broken("it sends a number twice")
        self._seen = number

    def _nonce(self) -> bytes:
        self._sent += 1
        return self._sent.to_bytes(8)
