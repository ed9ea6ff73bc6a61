"""Credits as names and files have them: `TOKEN-KEY`, and what the file of a spent credit says; text only.

A selector is known by its token. A credit that it spends on a message is a file `.dropq/credits/TOKEN/KEY` of the queue
that the message left, and the message bears `TOKEN-KEY` in its name until it is settled.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping
from typing import NamedTuple

from dropq.format.addresses import is_address
from dropq.format.claims import split_claim
from dropq.format.names import PACK, parse

#: How often a message may go from queue to queue by selectors, and as a dead letter: one hop more is unroutable.
HOPS_LIMIT = 16

_ALPHABET = string.digits + string.ascii_lowercase
_TOKEN = re.compile(r"[0-9a-z]{6}")
_KEY = re.compile(r"[0-9a-z]{10}")
_VIA = re.compile(r"([0-9a-z]{6})-([0-9a-z]{10})")


class Via(NamedTuple):
    """A credit, by the token of its selector and its own key."""

    token: str
    key: str

    def __str__(self) -> str:
        return f"{self.token}-{self.key}"

    @classmethod
    def of(cls, text: str) -> Via | None:
        """Return the credit that a text names; None for any other text."""
        found = _VIA.fullmatch(text)
        return None if found is None else cls(*found.groups())

    @classmethod
    def new(cls, token: str) -> Via:
        """Return a credit that nobody has named before."""
        return cls(token, "".join(secrets.choice(_ALPHABET) for _ in range(10)))


class Credit(NamedTuple):
    """What the file of a spent credit says.

    Attributes:
        id: the id of the message that it was spent on.
        to: the address of the queue that the message went to.
        below: the credits under which the message had come before, the latest first.
        copied: whether the selectors that copy had copied the message before.
    """

    id: str
    to: str
    below: tuple[Via, ...] = ()
    copied: bool = False

    @classmethod
    def read(cls, value: object) -> Credit | None:
        """Return what a file says; None if it is damaged, or says what no credit says."""
        if not isinstance(value, Mapping):
            return None
        id, to, below = value.get("id"), value.get("to"), value.get("below", [])
        if not isinstance(id, str) or not isinstance(to, str) or not isinstance(below, list) or not is_address(to):
            return None
        vias = [Via.of(one) if isinstance(one, str) else None for one in below[:HOPS_LIMIT]]
        return cls(id, to, tuple(via for via in vias if via is not None), copied=value.get("copied") is True)

    @property
    def written(self) -> bytes:
        """The content of its file."""
        said = {"id": self.id, "to": self.to, "below": [str(via) for via in self.below]}
        return json.dumps(said | ({"copied": True} if self.copied else {})).encode()


def new_token() -> str:
    """Return a token for a selector; whether it is taken, its file shows."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(6))


def is_token(text: object) -> bool:
    """Return whether a selector can have a token."""
    return isinstance(text, str) and _TOKEN.fullmatch(text) is not None


def is_key(text: str) -> bool:
    """Return whether a file can be that of a credit, by its name."""
    return _KEY.fullmatch(text) is not None


def may_have_via(filename: str) -> bool:
    """Return whether a file name may say under which credit its message came."""
    return "_viaS=" in filename or PACK in filename


def via_of(filename: str) -> Via | None:
    """Return the credit under which a message came, by its file name in any state; None if it came under none."""
    return Via.of(parse(split_claim(filename)[1]).via) if may_have_via(filename) else None
