"""Choose the row that a message for another file system goes to; an older state of a queue gives nothing.

The ledger of the other queue keeps the number of the last list of each row for good. A queue that lacks a row which the
ledger has from it, or whose newest list of the row has a lower number, came from a backup, or is a copy of another
queue: what it would give may be in the other queue already.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from dropq.errors import StorageError
from dropq.format.layout import GONE_PREFIX, QueueLayout
from dropq.format.transfers import DESTINATION, ENDED, GIVEN, list_number, list_of_job, sent_list
from dropq.lifecycle import queue_notes
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.transfers import Refusal, Row, RowDestination, marks_of, note_refusal, own_mark, root_of, rows
from dropq.storage import mounts, reading


class OlderState(StorageError):
    """Raised where a queue is an older state of itself, or a copy: nothing was given or carried."""


def row_to(source: QueueContext, destination: RowDestination, asked: dict[str, int] | None = None) -> Row:
    """Return the row of a queue's messages for another queue; make it if there is none.

    `asked` notes when each row was last changed, as its ledger was checked: unchanged, it is used without a check.

    RACE: two processes at once may make two rows to one queue. Both are used from then on.

    Raises:
        OlderState: the queue is an older state of itself: nothing may be given.
        OSError: the row cannot be read or made, or the ledger cannot be read.
    """
    asked = {} if asked is None else asked
    row = next((row for row in rows(source.layout) if row.leads(source, destination)), None)
    changed = 0 if row is None else os.stat(row.folder).st_mtime_ns
    if row is not None and asked.get(row.folder) == changed:
        return row
    refuse_older(source, destination)
    if row is None:
        return _make(source, destination)
    note_refusal(source, row.folder, None)
    asked[row.folder] = changed
    return row


def _make(source: QueueContext, destination: RowDestination, name: str = "") -> Row:
    storage, layout = source.storage, source.layout
    token = secrets.token_hex(8)
    draft, folder = f"{layout.private}/{GONE_PREFIX}{token}", f"{layout.transfers}/{name or token}"
    mark = queue_notes.make_known(destination.root, destination.layout.private, storage.at(destination.layout.base))
    root = root_of(source, destination)
    row = Row(folder, root, destination.queue, mark, own_mark(source), mounts.host(), destination.peer)
    storage.make_folder(layout.transfers)
    storage.make_folder(f"{draft}/{GIVEN}")
    where = {"peer": row.peer} if row.peer else {"root": row.root}
    content = {**where, "queue": row.queue, "mark": mark, "from": row.source, "host": row.host}
    storage.write_small(f"{draft}/{DESTINATION}", json.dumps({"format": 1, **content}).encode())
    storage.move_folder(draft, folder)
    storage.sync(layout.transfers)
    return row


def refuse_older(source: QueueContext, destination: RowDestination) -> None:
    """Refuse to give, or to carry, if the ledger of the other queue is ahead of a row of this one.

    Raises:
        OlderState: it is. The row says so from now on, and is made again if it is missing: `health` looks only here.
        OSError: the ledger cannot be read.
    """
    # RACE: with carriers. A list is written here before the ledger there has it, so the ledger is read first.
    sent, layout = _sent_lists(destination.layout), source.layout
    reading.ask_server(layout.transfers)
    here = reading.names_in(layout.transfers)
    own = marks_of(layout)
    for name, (last, path) in sorted(sent.items()):
        if name + ENDED in here:
            continue
        said = _source_of(path) if destination.peer or name not in here else {}
        if name not in here and said.get("from") not in own:
            continue
        if destination.peer and said.get("from") in own and said.get("peer") not in (None, source.root.config.instance):
            raise OlderState(
                f"{source.layout.home} has been in root {said.get('peer')}, and is in root "
                f"{source.root.config.instance} now: it was copied, or the root has another name. Nothing is given: "
                "give the root its name again, or make the queue of the copy anew"
            )
        folder = f"{layout.transfers}/{name}"
        # RACE: one listing may miss the newest list, if that replaces another meanwhile.
        number = max(newest_list(folder), newest_list(folder))
        if number < last:
            why = _why(source, destination, name, number, last)
            if name not in here:
                with suppress(FileExistsError):  # RACE: another process makes it
                    _make(source, destination, name)
            note_refusal(source, folder, Refusal(why, is_older=True))
            raise OlderState(why)


def _why(source: QueueContext, destination: RowDestination, name: str, here: int, there: int) -> str:
    folder = f"{source.layout.transfers}/{name}"
    way_out = f"move what is left in {folder}/{GIVEN} to {source.layout.target}, and rename {folder} to {name}{ENDED}"
    if destination.peer:
        recall = f"dropq bridge {shlex.quote(destination.queue)} --recall {shlex.quote(destination.peer)} --proxied"
        way_out = f"then run `{recall}` in this root"
    return (
        f"{source.layout.home} is an older state of itself, as from a backup, or a copy: the last list of row {name} "
        f"is {here} here, and {there} in {destination.layout.home}. Nothing is given or carried: remove here "
        f"what that queue has already, {way_out}"
    )


def newest_list(folder: str) -> int:
    """Return the number of the newest list of a row; 0 if there is none."""
    reading.ask_server(folder)
    return max((number for file in reading.names_in(folder) if (number := list_number(file)) is not None), default=0)


def _sent_lists(layout: QueueLayout) -> dict[str, tuple[int, str]]:
    """Return the number and the file of the last list of each row, in the ledger of a queue or committed there."""
    reading.ask_server(layout.ledger)
    in_ledger = [(sent_list(entry), f"{layout.ledger}/{entry}") for entry in reading.names_in(layout.ledger)]
    found = dict[str, tuple[int, str]]()
    for known, path in (*in_ledger, *_committed(layout)):
        if known is not None:
            row, number = known
            found[row] = max(found.get(row, (0, "")), (number, path))
    return found


def _committed(layout: QueueLayout) -> Iterator[tuple[tuple[str, int], str]]:
    for folder in reading.names_in(layout.working):
        if (known := list_of_job(folder)) is None:
            continue
        path = f"{layout.working}/{folder}/manifest.json"
        with suppress(FileNotFoundError, NotADirectoryError), _unless_closed():
            if reading.size_now(path) > 0:
                yield known, path


def _source_of(path: str) -> Mapping[str, str]:
    """Return a list's note: `from`, the mark of its queue, if that is known, and `peer`, the instance of its root.

    Anybody who may write there can make a list that is damaged, and it must not keep others from giving.
    """
    said = None
    with suppress(ValueError), _unless_closed():
        said = reading.parse_json(reading.read_small(path, limit=reading.LONG_LIST) or b"null")
    note = said.get("note") if isinstance(said, Mapping) else None
    return {key: text for key, text in note.items() if isinstance(text, str)} if isinstance(note, Mapping) else {}


@contextmanager
def _unless_closed() -> Iterator[None]:
    """Pass over a file that is there and cannot be read; a storage that does not answer raises."""
    try:
        yield
    except OSError as error:
        if error.errno not in reading.CLOSED:
            raise
