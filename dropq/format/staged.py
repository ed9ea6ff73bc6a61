"""The names of what is staged for one commit: a folder, `CLAIM.ATTEMPT,END~NAME`, and the parts in it, `TOKEN~NAME`.

`.dropq/staged/` has such a folder for each attempt of a holder to turn a claimed message into many files. Once the
claim lies in it as `whole`, the attempt is committed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: The message itself, from the commit on. A folder in its place drops the attempt.
WHOLE = "whole"
#: What may become of the message itself, once all parts are moved.
ENDS = ("processed", "target")

_FOLDER = re.compile(
    rf"([0-9a-z]{{10}}-[0-9a-z]{{1,8}})\.([0-9a-f]{{6}}),({'|'.join(ENDS)})~(.+)", re.ASCII | re.DOTALL
)
_PART = re.compile(r"([0-9a-f]{16})~(.+)", re.ASCII | re.DOTALL)


class StagedFolder(NamedTuple):
    """What the name of a staged folder says.

    Attributes:
        claim: the end of the owner of the claim: the random part of the subscription, and the claim's sequence.
        attempt: six random hex digits.
        end: the state that the message itself ends in.
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


def claim_of(owner: str) -> str:
    """Return the end of a claim's owner, which names the claim in staged folders."""
    rest, _, sequence = owner.rpartition("-")
    return f"{rest.rpartition('-')[2]}-{sequence}"


def part_name(token: str, own_name: str) -> str:
    """Return the name of a part: the token of its receiver, and the file name that it gets there."""
    return f"{token}~{own_name}"


def part_of(file: str) -> tuple[str, str] | None:
    """Return the token of a part's receiver, and its file name there; None for the name of no part."""
    found = _PART.fullmatch(file)
    return None if found is None else (found[1], found[2])
