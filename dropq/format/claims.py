"""Claims: the prefix of a file name in processing/, which says who holds the message.

Invariant: `OWNER,DEADLINE,N~NAME` is unique for ever. No two claims share an owner, and only a renewal changes a
deadline.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from dropq.format.escapes import encode, is_coded

#: The client's part of a barrier's owner; `client_part` never returns it.
BARRIER = "barrier%"
#: How the owner begins of a claim of a router, which delivers nothing; no encoded client id ends so.
ROUTER = "router%"
#: How the client of a server for ZeroMQ begins; its process id follows.
ZMQ = "zmq-"

#: An owner: the client's part, ten random characters of the subscription, and the claim's sequence.
_OWNER = r"([\w*%+-]{0,16}-[0-9a-z]{10}-[0-9a-z]{1,8})"
#: The delivery number is 0 only in a share of a barrier that its subscription has not taken yet.
_CLAIM = re.compile(
    rf"{_OWNER},(0|[1-9][0-9]{{0,15}}),((?<=-0,0,)0|[1-9][0-9]{{0,9}})~([^.].*)",
    re.ASCII | re.DOTALL,
)
#: A claim's file name, and the version of its body.
_WITH_BODY = re.compile(r"(.+)/([0-9]{1,19})-(-?[0-9]{1,19})", re.ASCII | re.DOTALL)
#: The owner of a claim of a server for ZeroMQ. A longer client id that is cut to 16 bytes may leave twelve digits.
_OF_ZMQ = re.compile(rf"{ZMQ}[0-9]{{1,10}}-[0-9a-z]{{10}}-[0-9a-z]{{1,8}}", re.ASCII).fullmatch
_DROPBOXMQ_CLAIM = re.compile(r"([\w*%+-]+)~(.+)", re.ASCII | re.DOTALL)
_IS_OWNER = re.compile(_OWNER, re.ASCII).fullmatch


class Location(NamedTuple):
    """Where a message went: a state and its file name there, or `removed` and "" where no history is kept."""

    state: str
    filename: str


class BodyVersion(NamedTuple):
    """The size of a body in bytes, and when it was last written, in nanoseconds since 1970: a write changes it."""

    size: int
    written: int

    def __str__(self) -> str:
        return f"{self.size}-{self.written}"


class Claim:
    """A claim on a message: who holds it, until when, for which delivery. Claims with the same prefix are equal.

    Attributes:
        owner: names the client, the subscription and the claim.
        deadline: when the lease ends, in ms since 1970; 0 for never.
        number: the number of the delivery, from 1.
        ours: whether dropq made the claim; else a script or a DropboxMQ client did.
        own_name: the message's file name without the prefix.
        arrival: when the message's file came to target/, in ms, if its name has no time; else 0.
        taken: when this process made it, in seconds on the monotonic clock; 0 if it did not.
        logged: whether the log has its end already, although the ack of its message may be tried again.
        died: whether it ends as its holder died, or lost its lease.
        body: the version of its body before anybody was given it, where its id is not a generated one; None if that is
            not known, or nobody is to compare it.
        exact: whether the claim is lost as soon as its file has another name; else it is looked for by its owner.
        filename: the file name in processing/.
        path: the path of that file, if the folder was given.
    """

    __slots__ = (
        *("arrival", "body", "deadline", "died", "exact", "filename", "logged", "number", "ours", "own_name", "owner"),
        "path",
        "taken",
    )

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
        self.taken = 0.0
        self.died = self.logged = False
        self.body: BodyVersion | None = None
        self.exact = False
        self.filename = f"{owner},{deadline},{number}~{own_name}" if ours else f"{owner}~{own_name}"
        self.path = f"{folder}/{self.filename}"

    @classmethod
    def foreign(cls, filename: str, folder: str, number: int) -> Claim:
        """Return the claim of a script or of a DropboxMQ client, which is lost as soon as its file is renamed."""
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
        """The subscription that holds the claim; of a foreign claim, the owner."""
        return subscription_of(self.owner) if self.ours else self.owner

    @property
    def of_barrier(self) -> bool:
        """Whether it is the claim of a barrier, whose message several subscriptions share."""
        return self.owner.startswith(f"{BARRIER}-")

    @property
    def of_router(self) -> bool:
        """Whether it is the claim of a router, which delivers the message to nobody."""
        return self.owner.startswith(f"{ROUTER}-")

    @property
    def of_zmq(self) -> bool:
        """Whether it is the claim of a server for ZeroMQ, whose messages come again at once."""
        return _OF_ZMQ(self.owner) is not None

    def has_lapsed(self, now: int) -> bool:
        """Return whether its lease ran out before a time, in ms since 1970."""
        return 0 < self.deadline <= now

    @property
    def receipt(self) -> str:
        """What proves the claim to another process: its file name, and behind a slash the version of its body."""
        return self.filename if self.body is None else f"{self.filename}/{self.body}"

    @property
    def prefix(self) -> str:
        """The part of the file name before the message's own name."""
        return f"{self.owner},{self.deadline},{self.number}~" if self.ours else f"{self.owner}~"

    def follow(self, renewed: Claim) -> None:
        """Take over the names of the claim after a renewal."""
        self.deadline, self.number, self.own_name = renewed.deadline, renewed.number, renewed.own_name
        self.filename, self.path = renewed.filename, renewed.path


def split_claim(filename: str, folder: str = "") -> tuple[Claim | None, str]:
    """Split off a claim prefix: our own exact form, or DropboxMQ's `client~` before a coded name.

    Before a name that begins with a dot there is no prefix: without it, the file would not be a message any more.
    """
    if "~" not in filename:
        return None, filename
    if match := _CLAIM.fullmatch(filename):
        return Claim(match[1], int(match[2]), int(match[3]), match[4], folder), match[4]
    match = _DROPBOXMQ_CLAIM.fullmatch(filename)
    if match and is_coded(match[2]):
        return Claim(match[1], 0, 0, match[2], folder, ours=False), match[2]
    return None, filename


def split_receipt(text: str) -> tuple[str, BodyVersion | None]:
    """Split a receipt into the claim's file name and the version of its body; None where the text has none."""
    match = _WITH_BODY.fullmatch(text)
    if match is None or not _CLAIM.fullmatch(match[1]):
        return text, None
    return match[1], BodyVersion(int(match[2]), int(match[3]))


def client_part(client_id: str) -> str:
    """Return the readable start of an owner: the encoded client id, cut to 16 bytes without splitting an escape."""
    return re.sub(r"%.?$", "", encode(client_id)[:16]) or "client"


def router_claims() -> Iterator[str]:
    """Return the owners of the claims of a new router, in the form of `claim_owner`."""
    return claim_owners(f"{ROUTER}-{secrets.token_hex(5)}")


def client_of(subscription: str) -> str:
    """Return the readable start of a subscription's id."""
    return subscription.rpartition("-")[0]


def claim_owner(subscription: str, n: int) -> str:
    """Return the owner of a subscription's nth claim; n is in hexadecimal, where a reader allows digits up to z."""
    return f"{subscription}-{n:x}"


def claim_owners(subscription: str) -> Iterator[str]:
    """Return the owners of a subscription's claims, from the first on, in the form of `claim_owner`."""
    return map(f"{subscription}-{{:x}}".format, count(1))  # runs in C only, as each message needs an owner


def claim_start(owner: str) -> str:
    """Return how the file name of an owner's claim begins, whatever its deadline is."""
    return f"{owner},"


def is_owner(text: str) -> bool:
    """Return whether a text has the form of an owner that dropq makes."""
    return _IS_OWNER(text) is not None


def subscription_of(owner: str) -> str:
    """Return the subscription that an owner made by dropq belongs to."""
    return owner.rpartition("-")[0]


def claim_id(owner: str) -> str:
    """Return an owner without the client's part; this is unique, too."""
    return "-".join(owner.rsplit("-", 2)[1:])


def claim_order(owner: str) -> int:
    """Return a sort key: it sorts the owners of one subscription in the order of their claims."""
    return int(owner.rpartition("-")[2], 36)
