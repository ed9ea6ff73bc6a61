"""Which message a planned file is, and which queue was planned to be read: known by what no other can have.

The driver plans which files are read. By the time a task opens them, some have other names, lie in other states, or
have left their names to other messages. Invariant: what a task reads is the planned message, or nothing.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from dropq.api import Queue
from dropq.errors import DropqError, NoSuchQueue
from dropq.format import names
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.queue_notes import marks_in
from dropq.queue.browsing import ListedFiles
from dropq.spark.options import Options
from dropq.storage import reading

#: The states in the order in which messages pass through them.
_IN_ORDER = ("delayed", "target", "processing", "processed", "error", "expired")
#: A state, and the name of a file there.
StateFile = tuple[str, str]
#: How often states are listed for a message before it counts as gone: it may move on while they are listed.
LISTINGS = 5
#: Where a message may be missing, its states are listed again only after so many times as long as the listing took.
PATIENCE = 10
#: How long before a listing a file was renamed, in ms, if its ctime says for sure that it was not renamed since.
RECENT = 1000


# -- queues ------------------------------------------------------------------------------------------------------------


def mark_of(context: QueueContext) -> str:
    """Return the mark of a queue, which no other queue has; "" for a queue without one, such as one made by hand.

    It is "" also where this user may not list `.dropq`.
    """
    try:
        return min(marks_in(context.layout.private), default="")
    except PermissionError:
        return ""


def open_planned(options: Options, mark: str) -> Queue:
    """Open a queue in a task, if it is the one that the driver saw, with its mark; "" if it has none.

    NoSuchQueue if this host sees no such queue at the same path, DropqError if it sees another one there.
    """
    host = f"host {socket.gethostname()}"
    try:
        queue = options.open()
        private = queue.context.layout.private
    except NoSuchQueue as error:
        raise NoSuchQueue(
            f"{host} does not see queue {options.queue} in {options.root}, and the driver sees it there: mount the "
            f"root under this path on each host that runs executors; {error}"
        ) from error
    if mark and not reading.exists(f"{private}/{mark}") and mark not in marks_in(private):
        raise DropqError(
            f"{host} has another root at {options.root} than the driver, or its queue {options.queue} was made anew "
            f"meanwhile: it lacks {private}/{mark}; mount the driver's root under this path on each host that runs "
            "executors"
        )
    return queue


# -- messages ----------------------------------------------------------------------------------------------------------

#: A generated id; or of a message with any other id, or of a part of a bundle: id, numbers, size and time of its body.
Identity = str | tuple[str, int, int, int, int]


class Planned(NamedTuple):
    """The files of a state that are read, in order."""

    names: Sequence[str]
    #: When those arrived, in ms since 1970, whose names have no time.
    arrivals: Mapping[str, int] = {}
    #: Of the messages whose names alone do not tell.
    identities: Mapping[str, Identity] = {}

    def and_then(self, new: Planned) -> Planned:
        """Return this plan and what a later listing adds to it."""
        arrivals, identities = {**self.arrivals, **new.arrivals}, {**self.identities, **new.identities}
        return Planned([*self.names, *new.names], arrivals, identities)


def plan(context: QueueContext, states: Sequence[str], listing: Callable[[str], ListedFiles]) -> dict[str, Planned]:
    """List states so that each message of theirs is there once, although messages move on, or back, meanwhile.

    RACE: one listing may show a file twice, or under its old name and its new one. And a pass over the states, in the
    order in which messages pass through them, misses what goes back during it. So there are passes until one shows no
    message that was sent before and not seen yet, at least two. A message that goes back in each of them may be missed.
    A file that is gone when its identity is asked for has moved since its listing, and is seen in a later one. A file
    that has gone since stays in the plan, unless its message was seen elsewhere.
    """
    if len(states) == 1 and not (found := listing(states[0])).arrivals and names.all_plain(found.names):
        return {states[0]: Planned([*dict.fromkeys(found.names)])}
    begun = context.clock.now_ms()
    plans = {state: Planned([]) for state in states}
    shown: list[tuple[str, Sequence[str]]] = []
    first: dict[Identity, StateFile] = {}
    several: dict[Identity, list[StateFile]] = {}
    for number in range(LISTINGS if len(states) > 1 else 1):
        is_whole = True
        for state in sorted(states, key=_IN_ORDER.index):
            shown.append((state, (found := listing(state)).names))
            new = _planned(context, state, found, plans[state])
            for file in new.names:
                identity = new.identities.get(file) or str(_named_identity(context, file))
                if identity in first:
                    several.setdefault(identity, [first[identity]]).append((state, file))
                else:
                    first[identity] = state, file
                    may_be_old = isinstance(identity, tuple) or int(identity[:13]) < begun
                    is_whole = is_whole and not may_be_old
            plans[state] = plans[state].and_then(new)
        if number and is_whole:
            break
    left = {*_left(context, several, shown, begun)}
    return {
        state: planned._replace(names=[file for file in planned.names if (state, file) not in left])
        for state, planned in plans.items()
    }


def _planned(context: QueueContext, state: str, found: ListedFiles, besides: Planned) -> Planned:
    """Return the plan of a listing: without the files that are gone before they are known, and those planned before.

    A name tells the identity of its message, if it has a time, and is none of a part.
    """
    filenames = [*dict.fromkeys(found.names)]
    if besides.names:
        before = {*besides.names}
        filenames = [file for file in filenames if file not in before]
    joined = "".join(filenames)
    odd = [*filter(names.may_be_part, filenames)] if names.may_be_part(joined) else []
    if found.arrivals:
        odd += [file for file in filenames if file in found.arrivals]
    identities = {file: _identity(context, state, file) for file in odd}
    gone = {file for file, identity in identities.items() if identity is None}
    return Planned(
        [file for file in filenames if file not in gone] if gone else filenames,
        found.arrivals,
        {file: identity for file, identity in identities.items() if isinstance(identity, tuple)},
    )


def _left(
    context: QueueContext,
    several: Mapping[Identity, list[StateFile]],
    shown: Sequence[tuple[str, Sequence[str]]],
    begun: int,
) -> Iterator[StateFile]:
    """Yield the locations that messages have left, of those seen in several; a copy in two locations is in both.

    After a replay, several messages have one id and one body. A file that was listed again after all others had been,
    none of which was renamed since the listings began, was another message than they are, wherever it is now.
    """
    listings = [(state, {*filenames}) for state, filenames in shown] if several else []
    for identity, locations in several.items():
        there: dict[int, StateFile] = {}
        changed = 0
        for state, file in locations:  # RACE: what moves on between two looks counts once, where it was seen last
            path = f"{context.layout.folder(state)}/{file}"
            with suppress(OSError):
                found = os.lstat(path)
                if identity == _identity(context, state, file):
                    there[found.st_ino] = state, file
                    changed = max(changed, found.st_ctime_ns // 1_000_000)
        kept = {*there.values()} or {locations[-1]}
        if changed < begun - RECENT and there:
            seen = {
                (state, file): [number for number, each in enumerate(listings) if each[0] == state and file in each[1]]
                for state, file in locations
            }
            kept |= {
                location
                for location in seen
                if all(seen[location][-1] > seen[other][0] for other in {*seen} - {location})
            }
        yield from (location for location in locations if location not in kept)


def _named_identity(context: QueueContext, file: str) -> str | tuple[str, int, int]:
    """Return what a name tells of a message's identity: all of it, if it has a generated id and is no part."""
    if (sole := names.sole_id(file)) is not None:
        return sole
    name = context.sidecars.file(file).name
    return name.id if name.generated and not name.first else (name.id, name.first, name.record)


def _identity(context: QueueContext, state: str, file: str) -> Identity | None:
    """Return what no other message has, whatever name its file has by now; None if the file is gone.

    A generated id is one message's. Any other id may be given twice, and the parts of a bundle bear its id: size and
    time of the body, which no rename changes, tell these messages apart.
    """
    if isinstance(named := _named_identity(context, file), str):
        return named
    try:
        return *named, *context.settling.version(f"{context.layout.folder(state)}/{file}")
    except FileNotFoundError:
        return None


def check_planned(found: os.stat_result, identity: Identity | None, path: str) -> None:
    """Raise FileNotFoundError if a file is not the planned one, but that of another message that has its name now."""
    if isinstance(identity, tuple) and identity[-2:] != (found.st_size, found.st_mtime_ns):
        raise FileNotFoundError(errno.ENOENT, "another message has this name now, or its body changed", path)


class Elsewhere:
    """Finds messages that left the files that they were planned in, in the states of a read."""

    def __init__(self, context: QueueContext, states: Sequence[str], files: Sequence[str]) -> None:
        self._context = context
        self._states = states
        self._files = files
        self._paths: dict[object, list[str]] = {}
        self._again = 0.0

    def paths(self, file: str, *, surely: bool) -> Iterator[str]:
        """Yield where a planned message may be now, for as long as the caller does not find it there.

        If `surely`, list the states until it can be nowhere; else some time must pass between two listings.
        """
        named = _named_identity(self._context, file)
        for _ in range(LISTINGS):
            yield from self._paths.get(named, ())
            if not surely and time.monotonic() < self._again:
                return
            self._list()
        yield from self._paths.get(named, ())

    def _list(self) -> None:
        started, context = time.monotonic(), self._context
        self._paths = {_named_identity(context, file): [] for file in self._files}
        for state in self._states:
            folder = context.layout.folder(state)
            for file in reading.names_in(folder):
                if (known := self._paths.get(_named_identity(context, file))) is not None:
                    known.append(f"{folder}/{file}")
        now = time.monotonic()
        self._again = now + PATIENCE * (now - started)
