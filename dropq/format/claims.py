"""Claims: the prefix of a file name in processing/, which says who has the message.

`OWNER,DEADLINE,N~NAME` is a claim's own for ever: no two claims have one owner, and only a renewal changes a deadline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from dropq.format.escapes import encode, is_coded

#: The client's part in the claims of barriers; `client_part` never makes it.
BARRIER = "barrier%"

#: An owner: the client's part, ten characters of the subscription, and the claim's sequence.
_OWNER = r"([\w*%+-]{0,16}-[0-9a-z]{10}-[0-9a-z]{1,8})"
#: The number is 0 only in a share of a barrier that its subscription has not taken yet.
_CLAIM = re.compile(
    rf"{_OWNER},(0|[1-9][0-9]{{0,15}}),((?<=-0,0,)0|[1-9][0-9]{{0,9}})~([^.].*)",
    re.ASCII | re.DOTALL,
)
_DROPBOXMQ_CLAIM = re.compile(r"([\w*%+-]+)~(.+)", re.ASCII | re.DOTALL)
_IS_OWNER = re.compile(_OWNER, re.ASCII).fullmatch


class Location(NamedTuple):
    """Where a message went: a state and its file name there; `removed` and no name where no history is kept."""

    state: str
    filename: str


class Claim:
    """A claim on a message: who has it, until when, for which delivery. Claims of the same prefix are equal.

    Attributes:
        owner: which client, subscription and claim.
        deadline: when its lease runs out, in ms since 1970; 0 for never.
        number: of the delivery.
        ours: whether it has dropq's own form; else a script or a DropboxMQ client made it.
        own_name: the message's file name without the prefix.
        arrival: when the message's file came to target/, in ms, where its name does not tell the time; else 0.
        exact: the claim counts only while its file is called as it was seen.
        filename: the file name in processing/: the claim's receipt.
        path: where that file lies, where the folder was given.
    """

    __slots__ = ("arrival", "deadline", "exact", "filename", "number", "ours", "own_name", "owner", "path")

    def __init__(
        self,
        owner: str,
        deadline: int,
        number: int,
        own_name: str = "",
        folder: str = "",
        arrival: int = 0,
        *,
        ours: bool = True,
    ) -> None:
        self.owner = owner
        self.deadline = deadline
        self.number = number
        self.ours = ours
        self.own_name = own_name
        self.arrival = arrival
        self.exact = False
        self.filename = f"{owner},{deadline},{number}~{own_name}" if ours else f"{owner}~{own_name}"
        self.path = f"{folder}/{self.filename}"

    @classmethod
    def foreign(cls, filename: str, folder: str, number: int) -> Claim:
        """Return the claim of a script, or of a DropboxMQ client, which is to be met as it was seen.

        Args:
            filename: its file name.
            folder: where that lies.
            number: of the delivery that it stands for.
        """
        prefix, own_name = split_claim(filename)
        claim = cls(prefix.owner if prefix else "", 0, number, own_name, ours=False)
        claim.filename, claim.path, claim.exact = filename, f"{folder}/{filename}", True
        return claim

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Claim) and self.prefix == other.prefix

    def __hash__(self) -> int:
        return hash(self.owner)

    def __repr__(self) -> str:
        return f"<Claim {self.filename!r}>"

    @property
    def subscription(self) -> str:
        """The owner without the sequence of the claim: what a live consumer is known by."""
        return subscription_of(self.owner) if self.ours else self.owner

    @property
    def of_barrier(self) -> bool:
        """Whether it is a barrier's, which several subscriptions have a share of."""
        return self.owner.startswith(f"{BARRIER}-")

    @property
    def prefix(self) -> str:
        """What stands before the message's own name in processing/."""
        return f"{self.owner},{self.deadline},{self.number}~" if self.ours else f"{self.owner}~"

    def follow(self, renewed: Claim) -> None:
        """Take over what the claim is called now: its deadline is another."""
        self.deadline, self.number, self.own_name = renewed.deadline, renewed.number, renewed.own_name
        self.filename, self.path = renewed.filename, renewed.path


def split_claim(filename: str, folder: str = "") -> tuple[Claim | None, str]:
    """Split a claim prefix off: our own exact form, or DropboxMQ's `client~` before a coded name.

    What stands before a hidden name is no prefix: without it the file would be no message any more.
    """
    if "~" not in filename:
        return None, filename
    if found := _CLAIM.fullmatch(filename):
        return Claim(found[1], int(found[2]), int(found[3]), found[4], folder), found[4]
    found = _DROPBOXMQ_CLAIM.fullmatch(filename)
    if found and is_coded(found[2]):
        return Claim(found[1], 0, 0, found[2], folder, ours=False), found[2]
    return None, filename


def client_part(client_id: str) -> str:
    """Make the readable start of an owner: the encoded client id, cut to 16 bytes between escapes."""
    return re.sub(r"%.?$", "", encode(client_id)[:16]) or "client"


def claim_owner(subscription: str, n: int) -> str:
    """Write the owner of a subscription's nth claim; no two claims ever share it."""
    return f"{subscription}-{n:x}"


def claim_owners(subscription: str) -> Iterator[str]:
    """Return the owners of a subscription's claims, from its first, as `claim_owner` writes them."""
    return map(f"{subscription}-{{:x}}".format, count(1))  # all in C: a consumer asks for each message


def claim_start(owner: str) -> str:
    """Return what the file name of an owner's claim begins with, whatever its deadline is."""
    return f"{owner},"


def is_owner(text: str) -> bool:
    """Tell whether text is the owner of a claim of dropq's own form."""
    return _IS_OWNER(text) is not None


def subscription_of(owner: str) -> str:
    """Return the subscription that an owner of dropq's own form belongs to."""
    return owner.rpartition("-")[0]


def claim_id(owner: str) -> str:
    """Return the part of an owner that tells its claim from all others, without the client's name."""
    return "-".join(owner.rsplit("-", 2)[1:])


def claim_order(owner: str) -> int:
    """Return what sorts the owners of one subscription in the order of their claims."""
    return int(owner.rpartition("-")[2], 36)
