"""The names of what goes to a queue on another file system, in `.dropq/transfers/`.

ROW/                a row of lists of messages from this queue to one other; ROW is 16 random hex digits
ROW/to.json         which queue that is, and which queue and host wrote it
ROW/N.json          a list; the newest alone counts
ROW/target/         the messages, each under the name of a part, `TOKEN~NAME`, which no file ever had before
ROW/refused.json    why the last try gave or carried nothing
ROW.ended/          a row that somebody ended by hand: what the ledger there says of it is no news
"""

from __future__ import annotations

import re
from functools import lru_cache

from dropq.format.escapes import is_coded
from dropq.format.layout import DROP_PREFIX, JOB_PREFIX
from dropq.format.staged import part_of

#: The file of a row that says where its messages go.
DESTINATION = "to.json"
#: The file of a row that says why the last try gave or carried nothing.
REFUSED = "refused.json"
#: What the name of a row that was ended by hand ends in.
ENDED = ".ended"
#: The folder of a row that has its messages. A copy for many receivers comes there as it comes to a queue.
GIVEN = "target"

#: How many names are remembered: those of some lists, as each step of a carrier asks for them.
_KNOWN = 4096

_ROW = re.compile(r"[0-9a-f]{16}", re.ASCII)
_LIST = re.compile(r"([1-9][0-9]{0,17})\.json", re.ASCII)
_ENTRY = re.compile(r"transfer\.([0-9a-f]{16})\.([1-9][0-9]{0,17})\.json", re.ASCII)
_JOB = re.compile(
    rf"(?:{re.escape(JOB_PREFIX)}|{re.escape(DROP_PREFIX)})transfer\.([0-9a-f]{{16}})\.([1-9][0-9]{{0,17}})"
    r"(?:-[0-9a-f]+)?",
    re.ASCII,
)


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


def sent_list(entry: str) -> tuple[str, int] | None:
    """Return the row and the number of a list by the name of its entry in a ledger; None for any other name."""
    return _row_and_number(_ENTRY.fullmatch(entry))


def list_of_job(folder: str) -> tuple[str, int] | None:
    """Return the row and the number of a list by the name of its job's folder; None for any other name."""
    return _row_and_number(_JOB.fullmatch(folder))


def _row_and_number(found: re.Match[str] | None) -> tuple[str, int] | None:
    return None if found is None else (found[1], int(found[2]))


@lru_cache(_KNOWN)
def own_name_of(given: str) -> str | None:
    """Return the message's own file name by the name that it was given under; None for any other name."""
    part = part_of(given)
    return part[1] if part is not None and is_coded(part[1]) else None
