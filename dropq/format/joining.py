"""The names of what is being put together: a folder `OWNER,STATE~NAME` of `.dropq/joining/`, and the files in it.

OWNER is the sign of life of the process that puts it together, STATE where the parts lay, and NAME the file name that
the whole gets in target/. In the folder are the parts, under their own names, and one file that says how far it is.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: The body of the whole while it is written. The rename of this file decides.
DRAFT = ".draft"
#: The body of the whole once the parts are put together: it is a message from now on, and they are none.
WHOLE = ".whole"
#: What was the draft of parts that are not put together: they go back.
DROPPED = ".dropped"

_FOLDER = re.compile(r"([0-9a-f]{16}),(error|expired|processed)~(.+)", re.ASCII | re.DOTALL)


class JoiningFolder(NamedTuple):
    """What the name of a folder says: see the module."""

    owner: str
    state: str
    own_name: str

    @classmethod
    def of(cls, folder: str) -> JoiningFolder | None:
        """Return what a folder's name says; None if it is that of no such folder."""
        found = _FOLDER.fullmatch(folder)
        return None if found is None else cls(*found.groups())

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"{self.owner},{self.state}~{self.own_name}"
