"""Put the parts of a bundle together: messages of one state become one new message, by one rename.

The parts are renamed out of their state into a folder of `.dropq/reassembly/`, where nobody looks for messages, and the
body of the whole is written there as a draft. The rename of the draft into target/ is the commit. Invariant: a folder
with parts has a draft until they are in the whole, and are removed; who gives up renames the draft first, so that
nobody commits any more, and then the folder, whose name says from then on that parts in it go back. So each record is
in the whole or in its part, and nobody is handed the one while there is the other. `model/reassembly.pml` is the model.

    a crash at             leaves                                   and the next upkeep of a consumer, or sweep,
    making the folder      a folder, maybe with a draft             removes it
    moving the parts in    some in their state, some in the folder  moves them back
    the commit             the draft and the parts, or the message  moves them back, or removes them
    either of the two      some of the parts                        moves, or removes, the others

A part that was moved back has its own name again, and its reason. Only if its reason is over a day old, a sweep that
looks while the part is away removes the reason.
"""

from __future__ import annotations

import heapq
import logging
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedWriter
from typing import IO

from dropq.errors import DropqError
from dropq.format import names
from dropq.format.credits import may_have_via
from dropq.format.layout import STATES, WITH_REASON, QueueLayout
from dropq.format.names import Name
from dropq.format.staged import ALIVE, BACK, DRAFT, DROPPED, reassembled_from
from dropq.lifecycle import ages, credits, naming
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.sending import into_target
from dropq.queue.message import Message
from dropq.records.formats import LARGEST_RECORD, LENGTH, Unreadable, beginning, format_of
from dropq.records.reader import BLOCK, RecordReader
from dropq.storage import liveness, reading
from dropq.storage.failures import describe, error_context, storage_error
from dropq.storage.files import Draft
from dropq.storage.mounts import was_brought_back
from dropq.storage.system_calls import is_missing

log = logging.getLogger("dropq")

#: Empty lines that are written at a time.
GAP = 1 << 16
#: Empty lines, rows or frames that a whole has at most: anybody who sends may write any number into a name.
MOST_EMPTY = 1 << 26
#: What an error says of parts that are not put together.
APART = "the parts stay as they are"
#: What the version before left in `joining/`: a sign of life, the state, the name of the whole.
_OLDER = re.compile(r"([0-9a-f]{16}),(error|expired|processed)~(.+)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """A message that is a part of a bundle, or was a record of one.

    Attributes:
        number: its number if it was a record; else that of its first line, row or frame.
        begins: the number of its first line, row or frame: another one, if somebody made several of a record.
        is_record: whether it was a record: then it has no other.
    """

    bundle: str
    number: int
    begins: int
    is_record: bool
    file: str
    body_format: str

    @classmethod
    def of(cls, message: Message) -> Part | None:
        """Return the part that a message is; None if it is none of a bundle, DropqError if it cannot have records."""
        bundle = bundle_of(message)
        if bundle is None:
            return None
        try:
            body_format = format_of(message.type)
        except ValueError as error:
            raise DropqError(f"{message.file}: {error}; {APART}") from error
        record, begins = message.record_number, message._name.begins
        return cls(bundle, record or begins, begins, record is not None, message.file, body_format)


def bundle_of(message: Message) -> str | None:
    """Return the id of the bundle that a message is a part of, or was a record of; None if it is neither."""
    if message.record_number is None:
        return message.id if message.first_record else None
    bundle, _, number = message.id.rpartition("-")
    return bundle if bundle and number == str(message.record_number) else None


def came(message: Message) -> str:
    """Return what tells apart bundles of one id: since when they wait, and the mark of their parts; else ""."""
    bundle, name = bundle_of(message), message._name
    return "" if bundle is None or Name(bundle).generated else f"{name.since} {names.bundle_mark(name)}"


def join(context: QueueContext, state: str, messages: Sequence[Message], *, keep_expiration: bool = False) -> str:
    """Put the parts of one bundle, which lie in `state`, together as a new message; return its name in target/.

    `why_apart` was asked before, and nothing keeps them apart.

    The records are in the order of their numbers. A missing number becomes an empty line, row or frame. If several
    parts have equal records of a number, the whole has one if the bundle has a generated id, as after a replay. Without
    such an id they may be of two bundles, and are refused. Counters and the queue's clock begin again, and the
    expiration is dropped unless `keep_expiration` keeps that of the first part.

    Raises:
        DropqError: the parts cannot be put together; they stay as they are.
        StorageError: they stay as they are, or a sweep moves them back; or, if the text says so, they are together.
    """
    parts = _sorted(messages)
    first = parts[0]
    name = naming.name_of_whole(context, first.file, first.bundle, first.number, keep_expiration=keep_expiration)
    folder = f"{context.layout.reassembly}/{state},{os.urandom(8).hex()}"
    with error_context(APART):
        context.storage.make_folder(folder)
        alive = liveness.Presence(folder, ALIVE, context.storage)
    try:
        _commit(context, state, folder, parts, name)
        with error_context("the parts are together, in target/; the next sweep removes them"):
            context.storage.sync(context.layout.target)
    finally:
        alive.abandon()
        try:
            _settle(context, folder, state)
        except (OSError, DropqError) as error:
            log.warning("%s stays until a sweep clears it: %s", folder, describe(error))
    return name


def why_apart(messages: Sequence[Message]) -> str:
    """Return why parts cannot be put together, as far as their names tell; else ""."""
    try:
        parts = _sorted(messages)
    except DropqError as error:
        return str(error)
    first = parts[0]
    for part in parts:
        if part.body_format != first.body_format:
            return (
                f"{first.file} is {first.body_format}, and {part.file} is {part.body_format}: parts of several formats "
                f"make no bundle, requeue them without --whole; {APART}"
            )
    return ""


def _sorted(messages: Sequence[Message]) -> list[Part]:
    return sorted(filter(None, map(Part.of, messages)), key=lambda part: (part.number, part.file))


def _commit(context: QueueContext, state: str, folder: str, parts: Sequence[Part], name: str) -> None:
    """Take the parts out of their state, write the body of the whole, and send it."""
    storage, draft = context.storage, f"{folder}/{DRAFT}"
    with error_context(APART):
        fd = storage.create(draft)
    with BufferedWriter(Draft(fd, lambda error: storage_error(error, APART)), BLOCK) as body:
        with error_context(APART):
            storage.sync(folder, context.layout.reassembly)
            for part in parts:
                _take(context, state, part, folder)
        _write(body, folder, parts)
        body.flush()
        with error_context(APART):
            storage.sync_file(fd)
        size = body.tell()
    with error_context(APART):
        storage.await_whole(draft, size)
        storage.sync(context.layout.folder(state), folder)  # no part may be in its state after a power cut
        try:
            # RACE: with a sweep that takes this process for dead. Whichever renames the draft first decides.
            storage.rename_guarded(draft, f"{context.layout.target}/{name}")
        except FileNotFoundError as error:
            if reading.exists(folder):
                raise  # the queue is gone, or its target/
            raise DropqError(f"a sweep took this process for dead while it put parts together; {APART}") from error
    context.log.act("requeued", id=context.sidecars.file(name).name.id, state=state, count=len(parts))


def _take(context: QueueContext, state: str, part: Part, folder: str) -> None:
    """Take a part out of its state: from now on no other process can requeue it."""
    source = f"{context.layout.folder(state)}/{part.file}"
    try:
        context.storage.rename(source, f"{folder}/{part.file}")
    except FileNotFoundError as error:
        if not reading.exists(folder):
            raise
        raise DropqError(f"somebody else took {part.file} out of {state}/ first; {APART}") from error


# -- the body of the whole -----------------------------------------------------------------------------------------


def _write(body: IO[bytes], folder: str, parts: Sequence[Part]) -> None:
    """Write the records of all parts, in order of their numbers."""
    first, body_format = parts[0], parts[0].body_format
    heads: dict[str, bytes] = {}
    following, last, last_from, empty = first.number, b"", first, 0
    is_one = Name(first.bundle).generated
    for number, data, part in _in_order(folder, parts, heads):
        if number < following:
            if data != last or not is_one:
                both = f"different records of number {number}" if data != last else f"a record of number {number} each"
                raise DropqError(
                    f"{last_from.file} and {part.file} have {both}: requeue one of them without --whole, or purge it; "
                    f"{APART}"
                )
            continue
        if not last:
            body.write(beginning(body_format, heads[first.file], data if number == following else b""))
        empty += number - following
        if empty > MOST_EMPTY:
            raise DropqError(
                f"{part.file} has a record of number {number}, and so many numbers before it are missing that the "
                f"whole would have over {MOST_EMPTY} empty records: requeue it without --whole; {APART}"
            )
        _write_empty(body, body_format, number - following)
        body.write(LENGTH.pack(len(data)) + data if body_format == "frames" else data + b"\n")
        following, last, last_from = number + 1, data, part
    if not last:
        body.write(heads.get(first.file, b""))


def _write_empty(body: IO[bytes], body_format: str, count: int) -> None:
    empty = LENGTH.pack(0) if body_format == "frames" else b"\n"
    while count > 0:
        body.write(empty * min(count, GAP))
        count -= GAP


#: The next record of a part: its number and bytes, the index of the part, and its other records.
_Next = tuple[int, bytes, int, Iterator[tuple[int, bytes]]]


def _in_order(folder: str, parts: Sequence[Part], heads: dict[str, bytes]) -> Iterator[tuple[int, bytes, Part]]:
    """Yield the records of all parts in order of their numbers; a part is open only while its records come."""
    upcoming = deque(enumerate(parts))
    heap: list[_Next] = []
    while upcoming or heap:
        while upcoming and (not heap or upcoming[0][1].number <= heap[0][0]):
            index, part = upcoming.popleft()
            _push(heap, index, _records(folder, part, parts[0], heads))
        if heap:
            number, data, index, rest = heapq.heappop(heap)
            yield number, data, parts[index]
            _push(heap, index, rest)


def _push(heap: list[_Next], index: int, records: Iterator[tuple[int, bytes]]) -> None:
    found = next(records, None)
    if found is not None:
        heapq.heappush(heap, (*found, index, records))


def _records(folder: str, part: Part, first: Part, heads: dict[str, bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the number and bytes of each record of a part, and keep its head; DropqError if it cannot be put in."""
    with error_context(APART), reading.open_body(f"{folder}/{part.file}") as body:
        reader = RecordReader(body, part.body_format, first=part.begins, max_bytes=LARGEST_RECORD)
        try:
            for number, _, _, data in reader:
                _check_head(part, reader.head, first, heads)
                if part.is_record and number != part.number:
                    raise DropqError(f"{part.file} was one record, and has several now: requeue it alone; {APART}")
                yield number, data
        except Unreadable as error:
            raise DropqError(f"{part.file}: {error}; requeue it without --whole; {APART}") from error
        _check_head(part, reader.head, first, heads)


def _check_head(part: Part, head: bytes, first: Part, heads: dict[str, bytes]) -> None:
    """Keep the head of a part; raise DropqError if it is another header than that of the first part."""
    kept = heads.setdefault(part.file, head)
    expected = heads.get(first.file, kept)
    if part.body_format == "csv" and kept.removesuffix(b"\n") != expected.removesuffix(b"\n"):
        raise DropqError(f"{first.file} and {part.file} have different headers: requeue them without --whole; {APART}")


# -- roll forward, or back -----------------------------------------------------------------------------------------


def sweep(context: QueueContext) -> tuple[int, int]:
    """Settle the folders of dead processes; return how many were settled, and how many could not be."""
    done = refused = 0
    for parent, settle in ((context.layout.joining, _settle_older), (context.layout.reassembly, _settle_dead)):
        for entry in list(reading.entries(parent)):
            try:
                done += entry.is_dir(follow_symlinks=False) and settle(context, entry.path)
            except (OSError, DropqError) as error:
                refused += 1
                log.warning("%s: %s; the next sweep tries again", entry.path, describe(error))
    return done, refused


def is_under_way(layout: QueueLayout) -> bool:
    """Return whether parts are put together, or lie where a process that died left them."""
    newer = (name for name in reading.names_in(layout.reassembly) if reassembled_from(name) is not None)
    return any(newer) or any(map(_OLDER.fullmatch, reading.names_in(layout.joining)))


def is_left(context: QueueContext, folder: str) -> bool:
    """Return whether nobody puts parts together in a folder any more, so that a sweep goes on, or moves them back."""
    is_one = reassembled_from(os.path.basename(folder)) is not None
    return is_one and (folder.endswith(BACK) or not _may_live(context, f"{folder}/{ALIVE}", folder))


def _settle_dead(context: QueueContext, folder: str) -> bool:
    """Bring a folder in order; return False if the process may be alive that made it."""
    state = reassembled_from(os.path.basename(folder))
    if state is None or not is_left(context, folder):
        return False
    _settle(context, folder, state)
    return True


def _may_live(context: QueueContext, sign: str, folder: str) -> bool:
    """Return whether the process that puts parts together may be alive; without locks, its writing shows it."""
    if reading.exists(sign):
        return not liveness.is_dead(*os.path.split(sign))
    paths = [path for path in (folder, f"{folder}/{DRAFT}") if reading.exists(path)]
    return any(context.age_ms(path) < ages.DEAD_WRITER for path in paths)


def _settle(context: QueueContext, folder: str, state: str) -> None:
    """Remove parts that are in a whole, or move them back, and then remove their folder.

    RACE: any number of processes may do this at once. A part, or a folder, that is gone was ended by another.
    """
    storage, layout, draft = context.storage, context.layout, f"{folder}/{DRAFT}"
    reading.ask_server(layout.reassembly)  # on NFS, another host may have renamed the folder
    parts = _parts_in(folder)  # RACE: listed before the draft is looked for: the draft came before them
    if was_brought_back(draft) and _is_sent(context, draft):
        storage.unlink(draft)
    with suppress(FileNotFoundError):  # RACE: the commit was first, or another process
        storage.rename(draft, f"{folder}/{DROPPED}")
    marks = reading.names_in(folder)
    if DROPPED in marks and not folder.endswith(BACK):
        with suppress(FileNotFoundError):
            storage.rename_folder(folder, folder + BACK)
        folder += BACK
    if is_back := folder.endswith(BACK):
        parts = _parts_in(folder)
    elif DRAFT in marks:
        return  # RACE: its process lives, and begins
    else:
        with suppress(FileNotFoundError):
            storage.sync(layout.target, folder)  # the commit is durable before the first part goes
    for file in parts:
        (_move_back if is_back else _remove_part)(context, f"{folder}/{file}", state)
    with suppress(FileNotFoundError):
        storage.sync(layout.reassembly, layout.folder(state), folder)
        if not _parts_in(folder):
            # RACE: where the name does not say that parts go back, a slow process may just begin, and need its draft.
            kept = set() if is_back else {DRAFT, DROPPED}
            for mark in reading.names_in(folder) - kept:
                storage.remove_tree(f"{folder}/{mark}")
            storage.remove_folder(folder)


def _move_back(context: QueueContext, path: str, state: str) -> None:
    folder, file = context.layout.folder(state), os.path.basename(path)
    try:
        context.storage.move(path, f"{folder}/{file}")
    except FileNotFoundError:
        if not is_missing(path):
            raise  # the folder of the state is missing
        # RACE: another process was first
    except FileExistsError:
        if reading.inode(path) == reading.inode(f"{folder}/{file}"):  # a power cut brought the other name back
            context.storage.unlink(path)
        else:
            copy = naming.copy_name(context, context.sidecars.parse(file))
            context.storage.rename(path, f"{folder}/{copy}")


def _remove_part(context: QueueContext, path: str, state: str) -> None:
    """Remove a part that is in the whole, with its reason and its credits."""
    file = os.path.basename(path)
    with suppress(FileNotFoundError):  # RACE: another process removed it
        inode = reading.inode(path)
        if may_have_via(file):
            credits.free(context, file)
        if state in WITH_REASON:
            context.reasons.drop(state, file, inode)
        context.storage.unlink(path)


def _is_sent(context: QueueContext, draft: str) -> bool:
    """Return whether a draft has another name in a state: a power cut brought this one back."""
    inode = reading.inode(draft)
    folders = [context.layout.folder(state) for state in STATES]
    return any(entry.inode() == inode for folder in folders for entry in reading.entries(folder))


def _parts_in(folder: str) -> list[str]:
    return sorted(file for file in reading.names_in(folder) if not file.startswith("."))


def _settle_older(context: QueueContext, folder: str) -> bool:
    """Settle a folder of the version before: its draft was `.whole` before it was sent, `.dropped` if never sent."""
    if (found := _OLDER.fullmatch(os.path.basename(folder))) is None:
        return False
    owner, state, name = found.groups()
    storage, whole = context.storage, f"{folder}/.whole"
    sign = f"{context.layout.joining}/{owner}"
    reading.ask_server(folder)  # on NFS, another host may have committed it
    if reading.regular_size(whole) is None:
        if _may_live(context, sign, folder):
            return False
        with suppress(FileNotFoundError):  # RACE: its commit was first, or another sweep
            storage.rename(f"{folder}/{DRAFT}", f"{folder}/{DROPPED}")
        reading.ask_server(folder)
    if reading.regular_size(whole) is not None:
        for file in _parts_in(folder):
            _remove_part(context, f"{folder}/{file}", state)
        storage.sync(folder)  # no part comes back once the whole has left
        if was_brought_back(whole) and _is_sent(context, whole):
            storage.unlink(whole)
        into_target(context, whole, context.sidecars.parse(name), unique=True)
        folder_now = f"{context.layout.reassembly}/{state},{owner}"
    else:
        folder_now = f"{context.layout.reassembly}/{state},{owner}{BACK}"
    storage.make_folder(context.layout.reassembly)
    storage.unlink(sign)
    with suppress(FileNotFoundError):  # RACE: another sweep was first
        storage.rename_folder(folder, folder_now)
    _settle(context, folder_now, state)
    return True
