"""Rows: where messages wait that go to queues on other file systems, one row for each of these queues.

A rename cannot lead to another file system. So one rename gives a message to a row, where no consumer can take it, and
a carrier does the rest: the process that moved it, a router, or any sweep of the queue.

The path of another root may lead elsewhere on another host, and a process that looks at a dead mount hangs. So a row to
another root names the host that wrote it, and only a move there, or a sweep by hand, looks at that root. A row to a
peer has no path: only a bridge, which was told where the peer is, carries its messages.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import NamedTuple

from dropq.format.addresses import check_address, layouts
from dropq.format.credits import Via, via_of
from dropq.format.layout import QueueLayout, RootLayout
from dropq.format.transfers import DESTINATION, GIVEN, REFUSED, is_row, own_name_of
from dropq.lifecycle import queue_notes
from dropq.lifecycle.context import QueueContext
from dropq.storage import mounts, reading
from dropq.storage.failures import describe

log = logging.getLogger("dropq")

#: The kind of refusal of a queue that is an older state of itself.
_OLDER = "older-state"


class RowDestination(NamedTuple):
    """A queue that messages go to: its root, its address, and where it lies; `peer` names its root to a bridge."""

    root: RootLayout
    queue: str
    layout: QueueLayout
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A row: where a queue's messages for one other queue wait."""

    folder: str
    #: The root of that queue; "" for the root that the row is in.
    root: str
    queue: str
    #: The mark of that queue, which another queue of its name does not have.
    mark: str
    #: The mark of the queue that the row is in; "" where an older dropq wrote the row.
    source: str
    #: The host that wrote the row; "" as `source`.
    host: str
    #: The instance of the root that the queue is in, whose bridge takes the messages; "" if no bridge does.
    peer: str = ""

    @property
    def name(self) -> str:
        return os.path.basename(self.folder)

    @property
    def given(self) -> str:
        """The folder of the messages."""
        return f"{self.folder}/{GIVEN}"

    @property
    def destination(self) -> str:
        """The queue that they go to, for people."""
        if self.peer:
            return f"queue {self.queue} of root {self.peer}"
        return f"{self.root}/{self.queue}" if self.root else self.queue

    @property
    def is_abroad(self) -> bool:
        """Whether it leads to another root, at which only a move there, a sweep by hand or a bridge looks."""
        return bool(self.root or self.peer)

    @property
    def is_of_this_host(self) -> bool:
        """Whether the path of the other root means here what it means on the host that wrote the row."""
        return not self.root or self.host == mounts.host()

    def leads(self, source: QueueContext, destination: RowDestination) -> bool:
        """Return whether this host may give it a queue's messages for a destination."""
        asked = destination.peer, root_of(source, destination), destination.queue
        is_usable = self.is_of_this_host and self.is_of(source)
        return (self.peer, self.root, self.queue) == asked and is_usable and self.mark in marks_of(destination.layout)

    def is_of(self, source: QueueContext) -> bool:
        """Return whether the queue that it is in made it: a row that was copied from another queue is not used."""
        return not self.source or self.source in marks_of(source.layout)


def marks_of(layout: QueueLayout) -> set[str]:
    return queue_notes.marks_in(layout.private)


def root_of(source: QueueContext, destination: RowDestination) -> str:
    """Return a destination's root as a row names it: "" for the root that the row is in, and for a peer."""
    return "" if destination.peer or destination.root.path == source.root.layout.path else destination.root.path


def own_mark(source: QueueContext) -> str:
    """Return the mark of a queue; give it one if it has none."""
    return min(marks_of(source.layout), default="") or queue_notes.make_known(
        source.root.layout, source.layout.private, source.storage
    )


def rows(layout: QueueLayout, unusable: dict[str, str] | None = None) -> Iterator[Row]:
    """Yield the rows of a queue; put into `unusable` why others cannot be used, by the paths of their files."""
    for entry in list(reading.entries(layout.transfers)):
        if not is_row(entry.name) or not entry.is_dir():
            continue
        try:
            row = read_row(entry.path)
        except (OSError, ValueError) as error:
            if unusable is not None:
                unusable[f"{entry.path}/{DESTINATION}"] = f"nothing is carried from there: {_why(error)}"
            continue
        yield row


def read_row(folder: str) -> Row:
    """Read a row; raise ValueError if it names no queue, or is a link."""
    if link := next(filter(os.path.islink, (folder, f"{folder}/{GIVEN}")), None):
        raise ValueError(f"{link} is a link")
    said = reading.parse_json(reading.read_small(f"{folder}/{DESTINATION}") or b"null")
    if not isinstance(said, Mapping) or not {"queue", "mark"} <= said.keys() or ("root" in said) == ("peer" in said):
        raise ValueError("it names no queue")
    root, queue, mark, *about = (said.get(key, "") for key in ("root", "queue", "mark", "from", "host", "peer"))
    source, written_on, peer = about
    if not all(isinstance(each, str) for each in (root, queue, mark, *about)) or root[:1] not in "/":
        raise ValueError("it names no queue")
    check_address(queue)
    return Row(folder, root, queue, mark, source, written_on, peer)


def _why(error: Exception) -> str:
    return describe(error) if isinstance(error, OSError) else str(error) or type(error).__name__


def given_messages(layout: QueueLayout) -> Iterator[tuple[Row, str]]:
    """Yield the messages that are on their way to other file systems: the row, and the file name in its folder.

    A message whose copy is there already is among them until it is removed here.
    """
    for row in rows(layout):
        for entry in reading.entries(row.given):
            if _is_message(entry):
                yield row, entry.name


def in_transit(layout: QueueLayout) -> dict[str, int]:
    """Return how many messages are on their way to each queue on another file system; `?` if no row says to which."""
    destinations, counts = {row.folder: row.destination for row in rows(layout)}, Counter[str]()
    for entry in list(reading.entries(layout.transfers)):
        if entry.is_dir(follow_symlinks=False):
            given = reading.entries(f"{entry.path}/{GIVEN}")
            counts[destinations.get(entry.path, "?")] += sum(map(_is_message, given))
    return dict(+counts)


def _is_message(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and reading.is_message_file(entry)


def vias_in_transit(layout: QueueLayout) -> Iterator[Via]:
    """Yield the credits under which messages of a queue are on their way; raise OSError if a row cannot be listed."""
    for entry in reading.entries(layout.transfers):
        is_one = is_row(entry.name) and entry.is_dir(follow_symlinks=False)
        for file in reading.names_in(f"{entry.path}/{GIVEN}") if is_one else ():
            if (via := via_of(own_name_of(file) or file)) is not None:
                yield via


class Refusal(NamedTuple):
    """Why the last try gave or carried nothing: `why` in words, and whether the queue is an older state of itself."""

    why: str
    is_older: bool


def refusal(folder: str) -> Refusal | None:
    """Return why the last try gave nothing to a row, or carried nothing from it; None where it succeeded."""
    try:
        said = reading.parse_json(reading.read_small(f"{folder}/{REFUSED}") or b"null", any_text=True)
    except (OSError, ValueError):
        return None
    why = said.get("why") if isinstance(said, Mapping) else None
    return Refusal(why, said.get("kind") == _OLDER) if isinstance(said, Mapping) and isinstance(why, str) else None


def note_refusal(source: QueueContext, folder: str, refused: Refusal | None) -> None:
    """Let `health` and `explain`, which look at no other root, say why the last try failed; None after a success."""
    path = f"{folder}/{REFUSED}"
    if refused == refusal(folder):
        return
    try:
        if refused is None:
            source.storage.unlink(path)
            return
        content = {"format": 1, "kind": _OLDER if refused.is_older else "refused", "why": refused.why}
        source.storage.write_small(path, json.dumps(content).encode())
    except OSError as error:  # what was refused is raised, and what was carried is there, all the same
        log.info("%s is not up to date: %s", path, describe(error))


def way_on(row: Row, queue: str) -> str:
    """Return who carries the messages of a row, and why the last try failed, for `health` and `explain`."""
    if row.peer:
        back = f"`dropq bridge --recall {quote(row.peer)}` brings them back"
        way = f"`dropq bridge` of root {row.peer} carries them; {back}"
    elif not row.is_abroad:
        way = "a router or any sweep carries them"
    elif row.is_of_this_host:
        way = f"`dropq sweep {quote(queue)}` carries them, and no consumer or router does, as they go to another root"
    else:
        way = other_host(row, queue)
    said = refusal(row.folder)
    return way if said is None else f"{way}; the last try: {said.why}"


def other_host(row: Row, queue: str) -> str:
    """Return what to do with a row that another host wrote, or an older dropq, which names no host."""
    who = f"host {row.host} wrote row {row.name}" if row.host else f"an older dropq wrote row {row.name} on some host"
    return (
        f"{who}, and {row.root} may be another disk here: `dropq sweep {quote(queue)}` on that host carries them; if "
        f"it is the same root here, so does `dropq sweep {quote(queue)} --row {row.name}`"
    )


def stalled(context: QueueContext, stalled_for: float = 0, *, unusable: dict[str, str] | None = None) -> Iterator[Row]:
    """Yield the rows in which messages wait for a carrier; `unusable` is as for `rows`.

    A row stays its carriers' if they wrote a list in the last `stalled_for` seconds: consumers may always give to it.
    """
    for row in list(rows(context.layout, unusable)):
        try:
            if stalled_for and context.age_ms(row.folder) < stalled_for * 1000:
                continue
            waits = any(map(_is_message, reading.entries(row.given)))
        except OSError as error:
            if unusable is not None:
                unusable[row.given] = describe(error)
            continue
        if waits:
            yield row


def behind(link: str) -> RowDestination | None:
    """Return the queue whose target/ a symbolic link leads to; None if it leads to anything else.

    A link is followed by a step first: the queue may be a link to another file system itself.
    """
    step = os.path.normpath(f"{os.path.dirname(link)}/{os.readlink(link)}") if os.path.islink(link) else link
    for path in (step, os.path.realpath(link)):
        base = os.path.dirname(path)
        for home in (base, os.path.dirname(base)):  # DropboxMQ's queues have a folder between
            root, name = os.path.split(home)
            if not name or not reading.is_folder(RootLayout(root).private):
                continue
            for layout in layouts(root, name):
                if layout.target == path and not layout.topic and os.path.samefile(path, link):
                    return RowDestination(RootLayout(root), name, layout)
    return None
