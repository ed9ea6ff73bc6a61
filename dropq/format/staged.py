"""The names of what is staged for one commit: a folder, `CLAIM.ATTEMPT,END~NAME`, and the parts in it.

`.dropq/staged/` has such a folder for each attempt of a holder to turn a claimed message into many files. Once the
claim lies in it as `whole`, the attempt is committed. A part for a destination is `TOKEN~NAME`, and `K.draft` while it
is written; a part that stays in the queue is `K,STATE~NAME`, and beside it `K.reason` may say why it goes there.

`.dropq/reassembly/` has a folder `STATE,TOKEN` for each attempt to put parts that lay in STATE together again; `.back`
behind it says that they go back.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dropq.format.layout import SETTLED

#: The message itself, from the commit on. A folder in its place drops the attempt.
WHOLE = "whole"
#: What may become of the message itself, once all parts are moved: `sent` is `processed` where the parts are messages
#: that were made of it.
ENDS = ("processed", "target", "unlink", "sent")
#: The states that a part of a bundle may go to.
PART_STATES = ("error", "expired", "target", "delayed", "processed")

#: The body of a whole until it is sent, what that becomes of parts that go back, and the sign of life of who writes it.
DRAFT, DROPPED, ALIVE = ".draft", ".dropped", ".alive"
#: How the name of a folder ends whose parts go back.
BACK = ".back"

#: A file name that a message may get: neither the folder itself nor the one above it.
_OWN_NAME = r"(?!\.\.?\Z)([^/]+)"
_FOLDER = re.compile(
    rf"([0-9a-z]{{10}}-[0-9a-z]{{1,8}})\.([0-9a-f]{{6}}),({'|'.join(ENDS)})~{_OWN_NAME}", re.ASCII | re.DOTALL
)
_PART = re.compile(rf"([0-9a-f]{{16}})~{_OWN_NAME}", re.ASCII | re.DOTALL)
_OWN_PART = re.compile(rf"(0|[1-9][0-9]{{0,8}}),({'|'.join(PART_STATES)})~{_OWN_NAME}", re.ASCII | re.DOTALL)
_REASSEMBLY = re.compile(rf"({'|'.join(SETTLED)}),[0-9a-f]{{16}}(?:{re.escape(BACK)})?", re.ASCII)
_REASON = re.compile(r"(?:0|[1-9][0-9]{0,8})\.reason", re.ASCII)
_PART_DRAFT = re.compile(r"(?:0|[1-9][0-9]{0,8})\.draft", re.ASCII)


class StagedFolder(NamedTuple):
    """What the name of a staged folder says.

    Attributes:
        claim: the id of the claim, as of `claims.claim_id`.
        attempt: six random hex digits.
        end: the state that the message itself ends in; `unlink` removes it, and `sent` is processed.
        own_name: the message's file name.
    """

    claim: str
    attempt: str
    end: str
    own_name: str

    @classmethod
    def of(cls, folder: str) -> StagedFolder | None:
        """Return what a folder's name says; None if it is that of no staged folder."""
        found = _FOLDER.fullmatch(folder)
        return None if found is None else cls(*found.groups())


def folder_name(claim: str, attempt: str, end: str, own_name: str) -> str:
    """Return the name of a staged folder; arguments as of `StagedFolder`."""
    return f"{claim}.{attempt},{end}~{own_name}"


def reassembled_from(folder: str) -> str | None:
    """Return the state that the parts lay in, from the name of a folder of `reassembly/`; None for any other name."""
    found = _REASSEMBLY.fullmatch(folder)
    return None if found is None else found[1]


def part_name(token: str, own_name: str) -> str:
    """Return the name of a part: the token of its destination, 16 hex digits, and the file name that it gets there."""
    return f"{token}~{own_name}"


def part_draft(number: int) -> str:
    """Return the name of a part for a destination while it is written; parts are numbered from 0."""
    return f"{number}.draft"


def part_of(file: str) -> tuple[str, str] | None:
    """Return the token of a part's destination, and its file name there; None for the name of no part."""
    found = _PART.fullmatch(file)
    return None if found is None else (found[1], found[2])


class OwnPart(NamedTuple):
    """What the name says of a part that stays in its queue.

    Attributes:
        number: which part it is, from 0.
        state: the state that it goes to.
        own_name: its file name there.
    """

    number: int
    state: str
    own_name: str

    def __str__(self) -> str:
        return f"{self.number},{self.state}~{self.own_name}"

    @property
    def reason(self) -> str:
        """The name of the file that says why it goes there."""
        return f"{self.number}.reason"

    @classmethod
    def of(cls, file: str) -> OwnPart | None:
        """Return what a file's name says; None if it is that of no such part."""
        found = _OWN_PART.fullmatch(file)
        return None if found is None else cls(int(found[1]), found[2], found[3])


def is_reason(file: str) -> bool:
    """Return whether a file says why a part goes where it goes."""
    return _REASON.fullmatch(file) is not None


def is_part(file: str) -> bool:
    """Return whether a file is a part, of either kind, or a draft of one."""
    return part_of(file) is not None or OwnPart.of(file) is not None or _PART_DRAFT.fullmatch(file) is not None
