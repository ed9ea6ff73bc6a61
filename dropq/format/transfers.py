"""The names of what goes to a queue on another file system, in `.dropq/transfers/`.

ROW/                a row of lists of messages from this queue to one other; ROW is 16 random hex digits
ROW/to.json         which queue that is
ROW/N.json          a list; the newest alone counts
ROW/target/         the messages, each as `TOKEN~NAME`, which no file ever had before
"""

from __future__ import annotations

import re

from dropq.format.escapes import is_coded

#: The file of a row that says where its messages go.
GOAL = "to.json"
#: The folder of a row that has its messages. A copy for many receivers comes there as it comes to a queue.
GIVEN = "target"

_ROW = re.compile(r"[0-9a-f]{16}", re.ASCII)
_LIST = re.compile(r"([1-9][0-9]{0,17})\.json", re.ASCII)
_GIVEN = re.compile(r"[0-9a-f]{16}~([^/]+)", re.ASCII | re.DOTALL)


def is_row(name: str) -> bool:
    """Return whether a name is that of a row's folder."""
    return _ROW.fullmatch(name) is not None


def list_name(number: int) -> str:
    """Return the name of a list."""
    return f"{number}.json"


def list_number(name: str) -> int | None:
    """Return the number of a list by its name; None for the name of no list."""
    found = _LIST.fullmatch(name)
    return None if found is None else int(found[1])


def given_name(token: str, own_name: str) -> str:
    """Return the name of a message that is given; `token` is 16 random hex digits."""
    return f"{token}~{own_name}"


def own_name_of(given: str) -> str | None:
    """Return the message's own file name by the name that it was given under; None for any other name."""
    found = _GIVEN.fullmatch(given)
    return found[1] if found is not None and is_coded(found[1]) else None
