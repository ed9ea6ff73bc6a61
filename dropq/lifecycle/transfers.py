"""Where the messages of a queue wait that go to queues on other file systems: one row for each of these queues.

A rename cannot lead to another file system. So a message is given to a row by one rename, from which moment no consumer
can take it, and a carrier does the rest: who moved it, a router, or any sweep of the queue.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dropq.format.addresses import layouts
from dropq.format.credits import Via, via_of
from dropq.format.layout import GONE_PREFIX, QueueLayout, RootLayout
from dropq.format.transfers import GIVEN, GOAL, is_row, own_name_of
from dropq.lifecycle import known_queues
from dropq.lifecycle.context import QueueContext
from dropq.storage import reading
from dropq.storage.failures import describe

log = logging.getLogger("dropq")


class Goal(NamedTuple):
    """A queue that messages go to: its root, its address, and where it lies."""

    root: RootLayout
    queue: str
    layout: QueueLayout


@dataclass(frozen=True, slots=True)
class Row:
    """A row: where a queue's messages for one other queue wait.

    Attributes:
        folder: its folder.
        root: the root of that queue; "" for the root that the row is in.
        queue: the queue's address.
        mark: the queue's mark, which another queue of its name does not have.
    """

    folder: str
    root: str
    queue: str
    mark: str

    @property
    def given(self) -> str:
        """The folder of the messages."""
        return f"{self.folder}/{GIVEN}"

    @property
    def goal(self) -> str:
        """The queue that they go to, for people."""
        return f"{self.root}/{self.queue}" if self.root else self.queue


def row_to(source: QueueContext, goal: Goal) -> Row:
    """Return the row of a queue's messages for another queue; make it if there is none.

    RACE: two processes at once may make two rows to one queue. Both are used from then on.

    Raises:
        OSError: the row cannot be read or made.
    """
    root = "" if goal.root.path == source.root.layout.path else goal.root.path
    marks = known_queues.marks_in(goal.layout.private)
    for row in rows(source.layout):
        if (row.root, row.queue) == (root, goal.queue) and row.mark in marks:
            return row
    mark = known_queues.make_known(goal.root, goal.layout.private, source.storage.at(goal.layout.base))
    return _make(source, root, goal.queue, mark)


def _make(source: QueueContext, root: str, queue: str, mark: str) -> Row:
    """Make a row, which appears complete."""
    storage, layout = source.storage, source.layout
    token = secrets.token_hex(8)
    draft, folder = f"{layout.private}/{GONE_PREFIX}{token}", f"{layout.transfers}/{token}"
    storage.make_folder(layout.transfers)
    storage.make_folder(f"{draft}/{GIVEN}")
    content = {"format": 1, "root": root, "queue": queue, "mark": mark}
    storage.write_small(f"{draft}/{GOAL}", json.dumps(content).encode())
    storage.rename_folder(draft, folder)
    storage.sync(layout.transfers)
    return Row(folder, root, queue, mark)


def rows(layout: QueueLayout) -> Iterator[Row]:
    """Yield the rows of a queue; log those that cannot be read."""
    for entry in list(reading.entries(layout.transfers)):
        if not is_row(entry.name) or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            content: Any = reading.parse_json(reading.read_small(f"{entry.path}/{GOAL}") or b"null")
            root, queue, mark = (content[key] for key in ("root", "queue", "mark"))
            if not (isinstance(root, str) and isinstance(queue, str) and isinstance(mark, str)):
                raise ValueError("it names no queue")
            if os.path.islink(f"{entry.path}/{GIVEN}"):
                raise ValueError(f"{GIVEN}/ is a link")
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s/%s cannot be used, and nothing is carried from there: %s", entry.path, GOAL, _why(error))
            continue
        yield Row(entry.path, root, queue, mark)


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
    """Return how many messages are on their way to each queue on another file system.

    What lies in a row that cannot be read, or in a folder there that is no row, is on its way to `?`.
    """
    goals, counts = {row.folder: row.goal for row in rows(layout)}, Counter[str]()
    for entry in list(reading.entries(layout.transfers)):
        if entry.is_dir(follow_symlinks=False):
            given = reading.entries(f"{entry.path}/{GIVEN}")
            counts[goals.get(entry.path, "?")] += sum(map(_is_message, given))
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


def stalled(context: QueueContext, stalled_for: float = 0) -> Iterator[Row]:
    """Yield the rows in which messages wait for a carrier.

    Args:
        context: the queue.
        stalled_for: leave a row to its carriers if they wrote a list in this many seconds. Consumers may give messages
            to it all the time.
    """
    for row in list(rows(context.layout)):
        if stalled_for and context.age_ms(row.folder) < stalled_for * 1000:
            continue
        if any(map(_is_message, reading.entries(row.given))):
            yield row


def behind(link: str) -> Goal | None:
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
                    return Goal(RootLayout(root), name, layout)
    return None
