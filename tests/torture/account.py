"""Whether a root keeps the promises, as plain system calls see it; nothing of dropq is used here.

A body says what it is called, how long it is and what it sums up to. So one that is half there shows by itself, and so
does one that lies in two places.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

#: The folders of a queue in which a message is kept, and the two below others of which that is true.
STATES = ("target", "processing", "processed", "expired", "error")
DELAYED, ROUTING = "delayed", "routing"
#: How a file ends, in the folder of routes, that switches one on.
SWITCH = ".in-use"
#: Where files lie that nobody has sent yet, or that somebody set aside.
WORKING, ASIDE = "working", "set-aside"


def body(name: str, size: int = 0) -> bytes:
    """Return a body of about so many bytes, at least 40, that tells its name."""
    filler = (hashlib.sha256(name.encode()).hexdigest() * (size // 64 + 1))[:size]
    return f"{name} {len(filler)} {_sum(name, filler)}\n{filler}".encode()


def name_of(content: bytes) -> str | None:
    """Return the name that a body, or the string that is its JSON, tells; None when it is not whole."""
    if content.startswith(b'"'):
        try:
            content = json.loads(content).encode()
        except ValueError:
            return None
    head, end, filler = content.decode("latin-1").partition("\n")
    try:
        name, length, total = head.rsplit(" ", 2)
    except ValueError:
        return None
    return name if end and (length, total) == (str(len(filler)), _sum(name, filler)) else None


def _sum(name: str, filler: str) -> str:
    return hashlib.sha256(f"{name}\n{filler}".encode()).hexdigest()[:16]


class Location(NamedTuple):
    """Where a file lies: in which queue and state, by which path."""

    queue: str
    state: str
    path: str


@dataclass
class Found:
    """What lies in a root: where each whole body lies, and the paths of bodies that are not whole."""

    locations: dict[str, list[Location]] = field(default_factory=lambda: defaultdict(list))
    damaged: list[str] = field(default_factory=list)
    #: What was not sent, or was set aside, by path: no promise is about it but that it is not half in a state.
    beside: list[str] = field(default_factory=list)

    def states(self) -> dict[str, str]:
        """Return the one state that each body is in, after its queue where that is not `q`."""
        return {name: in_short(locations[0]) for name, locations in self.locations.items()}


def in_short(location: Location) -> str:
    """Return a location in short: its state, after its queue where that is not `q`."""
    return location.state if location.queue == "q" else f"{location.queue}/{location.state}"


def look(root: Path, *elsewhere: Path) -> Found:
    """Return what lies in a root, and in other folders with queues of it; no symbolic link is followed."""
    found = Found()
    for top in map(str, (root, *elsewhere)):
        for folder, _, names in os.walk(top):
            if names and (location := _location(folder[len(top) :].strip("/").split("/"))):
                _look_into(folder, sorted(names), location, found)
    return found


def _look_into(folder: str, names: list[str], location: Location, found: Found) -> None:
    for name in names:
        path = os.path.join(folder, name)
        content = _content(path)
        if location.state == ROUTING and name.endswith(SWITCH):
            continue
        if content is None or (name.startswith(".") and location.state not in (WORKING, ASIDE)):
            continue
        known = name_of(content)
        if location.state in (WORKING, ASIDE):
            found.beside.append(path)
        elif known is None:
            found.damaged.append(path)
        else:
            found.locations[known].append(location._replace(path=path))


def plainly(found: Found) -> dict[str, Any]:
    """Return what lies in a root as JSON has it, for another process."""
    return {"locations": found.locations, "damaged": found.damaged}


def found_in(plain: dict[str, Any]) -> Found:
    """Return what `plainly` has made plain."""
    found = Found(damaged=plain["damaged"])
    for name, locations in plain["locations"].items():
        found.locations[name] = [Location(*location) for location in locations]
    return found


def _location(parts: list[str]) -> Location | None:
    """Return the queue and the state that a folder of a root is of; None for those that hold no messages."""
    for at, part in enumerate(parts):
        if part == WORKING:
            return Location(_queue(parts[:at]), WORKING, "")
        if part == ".dropq":
            below = parts[at + 1 : at + 2]
            return Location(_queue(parts[:at]), below[0], "") if below in ([DELAYED], [ASIDE]) else None
        if part in (*STATES, ROUTING) and (queue := _queue(parts[:at])):
            return Location(queue, part, "")
    return None


def _queue(parts: list[str]) -> str:
    queue = "/".join(part for part in parts if part != "incoming")
    return queue[1:].partition(".delet")[0] if queue.startswith(".") else queue  # one on its way to being deleted


def _content(path: str) -> bytes | None:
    """Return what a regular file holds; None for what is none, is gone, or only reserves a name."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or (about.st_size == 0 and not about.st_mode & 0o777):
            return None
        return file.read()


@dataclass
class Account:
    """What became of bodies: those that are lost, those that are there twice, and what else is wrong."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.doubled or self.wrong)

    def add(self, other: Account) -> None:
        """Take in what another account says."""
        self.lost += other.lost
        self.doubled += other.doubled
        self.wrong += other.wrong

    def __str__(self) -> str:
        in_short = {"lost": self.lost, "doubled": self.doubled, "wrong": self.wrong}
        return "; ".join(f"{what}: {', '.join(names[:5])} ({len(names)})" for what, names in in_short.items() if names)


def judge(found: Found, *, must: Collection[str], may: Collection[str] = ()) -> Account:
    """Hold what lies in a root against what was sent.

    Args:
        found: what lies there.
        must: bodies that have to lie in exactly one state: their sends returned, and nobody removed them.
        may: bodies that may lie in one state, or nowhere: their sends, or their removals, did not return.
    """
    account = Account(lost=sorted(set(must) - found.locations.keys()))
    account.doubled = sorted(name for name, locations in found.locations.items() if len(locations) > 1)
    account.wrong = [f"{path} is not whole" for path in found.damaged]
    strange = found.locations.keys() - set(must) - set(may)
    account.wrong += [
        f"{name} was never sent, and lies in {in_short(found.locations[name][0])}" for name in sorted(strange)
    ]
    return account
