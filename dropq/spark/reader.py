"""Reading messages as rows: the driver plans which files are read, executors read them, and nothing is moved.

The plan fixes which messages are read. If a file has moved since then, its message is looked for in the states of the
read. Invariant: the rows of bodies are those of all planned messages, or the read fails; where a message itself is the
row, a missing body is null, and a warning reports it. A claimed file is found again after a renewal; if its claim is
gone, the read fails.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import IO, NamedTuple, TypeVar

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from dropq.errors import DropqError, LeaseLost, NoSuchMessage, StorageError
from dropq.format import names
from dropq.format.claims import claim_order
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.processing import claims_in, claims_of
from dropq.queue import browsing
from dropq.queue.bad_bodies import BadBodyNotes
from dropq.spark.arrow_cast import gathered
from dropq.spark.bad_bodies import bad_bodies
from dropq.spark.columns import Columns, MessageColumn, NotText, arrow_schema
from dropq.spark.decoders import LONGEST, parser
from dropq.spark.jms_words import check_words
from dropq.spark.options import ReadOptions
from dropq.spark.planned import LISTINGS, Elsewhere, Identity, Planned, check_planned, mark_of, open_planned, plan
from dropq.spark.workers import freeze_imports
from dropq.storage import reading

log = logging.getLogger("dropq")

#: The most messages of a batch, and the bytes of bodies after which a batch ends.
BATCH_MESSAGES = 5000
BATCH_BYTES = 32 << 20
#: The most messages whose bodies are divided among tasks by their bytes, and the bytes that opening one counts for.
SIZED, OPENING = 10_000, 16 << 10
#: The rows of small bodies that are joined into one batch.
BATCH_ROWS = 10_000

T = TypeVar("T")
Reads = Callable[[str, Identity | None], T]


@dataclass
class Part(InputPartition):
    """The messages that a task reads: files of one state, with what `Planned` says of them."""

    state: str
    files: list[str]
    arrivals: dict[str, int] = field(default_factory=dict)
    identities: dict[str, Identity] = field(default_factory=dict)
    #: Of the queue, as the driver saw it.
    mark: str = ""
    #: Whether the messages are claimed for this read.
    is_claimed: bool = False
    #: The folder of the notes on the messages, where a bad body is to be rejected.
    notes: str = ""


class Share(NamedTuple):
    """What a task reads: so many messages; or so many bytes, if `sizes` has those of the files."""

    most: int
    sizes: Mapping[str, int]


def share(context: QueueContext, planned: Iterable[tuple[str, Planned]], options: ReadOptions) -> Share:
    """Return what a task reads of all planned files, each with its state."""
    found = [(file, state) for state, files in planned for file in files.names]
    if options.body_format is None or not options.partitions < len(found) <= SIZED:
        return Share(max(options.task_messages, -(-len(found) // options.partitions)), {})
    sizes = {file: OPENING + _bytes_of(f"{context.layout.folder(state)}/{file}") for file, state in found}
    return Share(-(-sum(sizes.values()) // options.partitions), sizes)


def _bytes_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:  # RACE: it moved on; the task looks for it
        return 0


def parts(
    state: str, files: Planned, share: Share, mark: str, *, is_claimed: bool = False, notes: str = ""
) -> Iterator[Part]:
    """Yield the planned files of a state in parts for tasks."""
    for chosen in gathered(files.names, lambda file: share.sizes.get(file, 1), share.most):
        arrivals = {name: files.arrivals[name] for name in chosen if name in files.arrivals}
        identities = {name: files.identities[name] for name in chosen if name in files.identities}
        yield Part(state, chosen, arrivals, identities, mark, is_claimed, notes)


class Rows:
    """Reads parts in the executors; the base of the readers of batches and streams."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.schema = arrow_schema(schema)
        self._body_schema = arrow_schema(options.body_columns(schema))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part."""
        freeze_imports()
        if not isinstance(partition, Part) or not partition.files:
            return  # Spark makes a partition of its own if there is nothing to read
        files = _Files(open_planned(self.options, partition.mark).context, partition, self.options.states)
        if self.options.body_format is None:
            yield from self._messages(files)
        else:
            yield from _join_small(self._rows_of_bodies(files, self.options.body_format))
        files.report()

    def _messages(self, files: _Files) -> Iterator[pa.RecordBatch]:
        columns = Columns(self.schema, files.context)
        part, wants_bodies, wants_lengths = files.part, *(name in self.schema.names for name in ("value", "length"))
        for start in range(0, len(part.files), BATCH_MESSAGES):
            chosen = part.files[start : start + BATCH_MESSAGES]
            while chosen:
                values = files.bodies(chosen) if wants_bodies else None
                in_batch = chosen if values is None else chosen[: len(values)]
                lengths = files.lengths(in_batch, values) if wants_lengths else None
                try:
                    batch = columns.batch(part.state, files.folder, in_batch, part.arrivals, lengths, values)
                except NotText as error:
                    where = f"{files.folder}/{in_batch[error.row]} is not UTF-8: {error}"
                    raise DropqError(f"{where}; read it as binary, by a schema with `value binary`") from error
                yield batch
                chosen = chosen[len(in_batch) :]

    def _rows_of_bodies(self, files: _Files, body_format: str) -> Iterator[pa.RecordBatch]:
        parse = parser(body_format, self.options.csv)
        part, notes = files.part, BadBodyNotes(files.context, files.part.notes)
        message = MessageColumn(self.schema, files.context, part.arrivals)
        bad = bad_bodies(self.options, files.folder, message.others, is_claimed=part.is_claimed, notes=notes)
        for file in bad.wanted(part.files):
            body = files.read(file, _body, surely=True)
            if body is None:
                yield from message.added_to(bad.missing(files.missing(file)), part.state, files.folder, file)
                continue
            with body:
                found = bad.rows(file, parse(body, self._body_schema, files.is_rest(file)))
                yield from message.added_to(found, part.state, files.folder, file, os.fstat(body.fileno()).st_size)
        bad.report()


class _Files:
    """Reads the files of a part, also after a rename within the states, and remembers the messages that left."""

    def __init__(self, context: QueueContext, part: Part, states: Sequence[str]) -> None:
        self.context = context
        self.part = part
        self.folder = context.layout.folder(part.state)
        self._states = states
        self._elsewhere = Elsewhere(context, states, part.files)
        self._renewed: dict[str, str] = {}
        self._moved: list[str] = []

    def bodies(self, files: Sequence[str]) -> list[bytes | None]:
        """Return the bodies of the first files, as many as a batch holds, at least one; None for a file that moved."""
        bodies: list[bytes | None] = []
        size = 0
        odd = self.part.identities
        with closing(reading.read_bodies(self.folder, (file for file in files if file not in odd), LONGEST)) as read:
            for file in files:
                found = None if file in odd else next(read)
                body = self.read(file, _value) if found is None else found
                bodies.append(body)
                size += len(body or b"")
                if size > BATCH_BYTES:
                    break
        return bodies[:-1] if len(bodies) > 1 and size > LONGEST else bodies

    def lengths(self, files: Sequence[str], values: Sequence[bytes | None] | None) -> list[int | None]:
        """Return the lengths of bodies in bytes; None for a file that has moved."""
        if values is not None:
            return [None if value is None else len(value) for value in values]
        return [self.read(file, _size) for file in files]

    def read(self, file: str, read_path: Reads[T], *, surely: bool = False) -> T | None:
        """Read a file with a function, which takes a path, and the identity that the file there must have.

        Return None if its message is not claimed, and in no state of the read; `surely` is as of `Elsewhere.paths`.
        """
        identity = self.part.identities.get(file)
        try:
            return read_path(f"{self.folder}/{file}", identity)
        except FileNotFoundError:
            if self.part.is_claimed:
                return self._read_renewed(file, read_path)
        for path in self._elsewhere.paths(file, surely=surely):
            with suppress(FileNotFoundError):
                return read_path(path, identity)
        self._moved.append(file)
        return None

    def missing(self, file: str) -> NoSuchMessage:
        """Return the error for a file whose rows would be missing."""
        states = " and ".join(self._states)
        return NoSuchMessage(
            f"{self.folder}/{file} has left {self.part.state}/ since this read began, and is not in {states}, so its "
            "rows would be missing: a read of all states that messages move to, such as target,processing,processed, "
            "finds it there; claim() and streams keep what they read; badBodies=null makes it a row of nulls"
        )

    def _read_renewed(self, file: str, read_path: Reads[T]) -> T:
        """RACE: a renewal may rename a file between any listing and its opening; the owner in its name stays."""
        claimed = self.context.sidecars.file(file)
        owner = claimed.claim.owner if claimed.claim is not None else ""
        for _ in range(LISTINGS):
            if owner in self._renewed:
                with suppress(FileNotFoundError):
                    return read_path(f"{self.folder}/{self._renewed[owner]}", None)
            self._renewed = {claim.owner: claim.filename for claim in claims_in(self.context)}
        raise LeaseLost(
            f"message {claimed.name.id} was not read: its claim {owner} is gone (its lease ran out, "
            "it expired, or somebody settled it or took it back)"
        )

    def is_rest(self, file: str) -> bool:
        """Return whether a message is what is left of a bundle, as its name says."""
        return names.may_be_part(file) and self.context.sidecars.file(file).name.first > 0

    def report(self) -> None:
        """Log how many messages have left the states of the read between the plan and the reading."""
        if self._moved:
            warning = "%d messages left %s while it was read: the first was %s"
            log.warning(warning, len(self._moved), self.folder, self._moved[0])


def _body(path: str, identity: Identity | None) -> IO[bytes]:
    body = reading.open_body(path)
    if identity is not None:
        try:
            check_planned(os.fstat(body.fileno()), identity, path)
        except FileNotFoundError:
            body.close()
            raise
    return body


def _value(path: str, identity: Identity | None) -> bytes:
    try:
        if identity is None:
            return reading.read_body(path, LONGEST)
        with _body(path, identity) as body:
            if os.fstat(body.fileno()).st_size > LONGEST:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
            return body.read()
    except OSError as error:
        if error.errno == errno.EFBIG:
            problem = f"{path} is longer than the {LONGEST} bytes of a value of Spark"
            way_out = "read it without the column value, or with a bodyFormat"
            raise StorageError(f"{problem}: {way_out}", path=path, errno=error.errno) from error
        raise


def _size(path: str, identity: Identity | None) -> int:
    found = os.lstat(path)
    check_planned(found, identity, path)
    return found.st_size


def _join_small(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for small in gathered(batches, lambda batch: max(batch.num_rows / BATCH_ROWS, batch.nbytes / BATCH_BYTES), 1):
        yield from pa.Table.from_batches(small).combine_chunks().to_batches()


class QueueReader(Rows, DataSourceReader):
    """Reads the messages of some states of a queue, or those of a claiming batch."""

    def partitions(self) -> list[InputPartition]:
        """List the messages, in the driver; return them as parts for tasks."""
        context, claimed = self.options.open().context, self.options.claimed
        if claimed is not None:
            planned = {"processing": batch_files(context, claimed)}
        else:
            states, filter = self.options.states, self.options.filter
            check_words(context, filter, states)
            planned = plan(context, states, lambda state: self._listed(context, state, filter))
        each = share(context, planned.items(), self.options)
        mark, notes = mark_of(context), bad_body_notes(context, claimed).folder if claimed else ""
        return [
            part
            for state, files in planned.items()
            for part in parts(state, files, each, mark, is_claimed=claimed is not None, notes=notes)
        ]

    def _listed(self, context: QueueContext, state: str, filter: str | None) -> browsing.ListedFiles:
        """List the messages of a state that were sent when they are wanted."""
        found = browsing.listed_names(context, state, filter)
        after, before = self.options.sent_after, self.options.sent_before
        if after is None and before is None:
            return found

        def is_wanted(file: str) -> bool:
            name = context.sidecars.file(file).name
            sent = name.timestamp or name.since or found.arrivals.get(file, 0)
            return (after is None or sent > after) and (before is None or sent < before)

        return found._replace(names=[file for file in found.names if is_wanted(file)])


def bad_body_notes(context: QueueContext, claimed: str) -> BadBodyNotes:
    """Return the notes on bad bodies of a claiming batch; `claimed` as for `batch_files`."""
    return BadBodyNotes(context, f"{context.layout.streams}/{claimed.rpartition(':')[0]}/bad")


def batch_files(context: QueueContext, claimed: str) -> Planned:
    """Return the files of a claiming batch, in the order of their claims; LeaseLost if some are not held any more.

    The batch is given by its subscription and how many messages it claimed, separated by a colon.
    """
    subscription, _, count = claimed.rpartition(":")
    by_owner: dict[str, str] = {}
    for _ in range(LISTINGS):  # RACE: a listing may miss files that are being renewed, but not the same files each time
        by_owner |= {claim.owner: claim.filename for claim in claims_of(context, subscription)}
        if len(by_owner) == int(count):
            return listed(context, (by_owner[owner] for owner in sorted(by_owner, key=claim_order)))
    raise LeaseLost(
        f"{len(by_owner)} of the {count} messages that were claimed from queue {context.name} are still held (leases "
        "ran out, or somebody settled or requeued them): another read of the batch would differ from earlier ones"
    )


def listed(context: QueueContext, filenames: Iterable[str]) -> Planned:
    """Return claimed files for a read; if a name has no time, the time of the body counts, which no rename changes."""
    files = [context.sidecars.file(filename, context.layout.processing) for filename in filenames]
    arrivals = {file.filename: arrival for file in files if (arrival := _written_ms(file))}
    return Planned([file.filename for file in files], arrivals)


def _written_ms(file: MessageFile) -> int:
    if names.is_plain(file.own_name):
        return 0
    try:
        time = file.name.timestamp or file.name.since
        return 0 if time else reading.written_ms(f"{file.folder}/{file.filename}")
    except FileNotFoundError:
        return 0  # RACE: its lease is being renewed; or its claim is gone, and then the read fails
