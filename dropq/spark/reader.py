"""Reading messages as rows: the driver lists names once, executors read the files, and nothing is moved.

What is read is fixed when the read is planned. A file that moved on since then is reported, not failed on; one that a
claim holds is found again under its renewed name, and is an error when the claim is gone.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from dropq.api import Queue
from dropq.errors import DropqError, LeaseLost, StorageError
from dropq.format import names
from dropq.format.claims import claim_order
from dropq.format.message_file import MessageFile
from dropq.lifecycle.claims import claims_in, claims_of
from dropq.lifecycle.context import QueueContext
from dropq.queue import browsing
from dropq.spark.columns import Columns, arrow_schema
from dropq.spark.decoders import PARSERS, BadBody
from dropq.spark.options import ReadOptions
from dropq.storage import reading

log = logging.getLogger("dropq")

#: Messages of one batch, at most, and bytes of their bodies after which a batch ends.
BATCH_MESSAGES = 5000
BATCH_BYTES = 32 << 20
#: Bytes that a value of Spark can hold.
LONGEST_VALUE = 2**31 - 1
#: Rows that small bodies are gathered to before they are handed to Spark.
BATCH_ROWS = 10_000
#: How often a claimed file is looked for before its claim is believed to be gone.
LOOKS = 5

T = TypeVar("T")


@dataclass
class Part(InputPartition):
    """The messages that one task reads: the files of a state, and when those came whose names do not tell."""

    state: str
    files: list[str]
    arrivals: dict[str, int] = field(default_factory=dict)
    held: bool = False


def parts(state: str, files: Sequence[MessageFile], size: int, *, held: bool = False) -> Iterator[Part]:
    """Split what was listed into parts of a size."""
    for start in range(0, len(files), size):
        chosen = files[start : start + size]
        arrivals = {file.filename: file.arrival for file in chosen if file.arrival}
        yield Part(state, [file.filename for file in chosen], arrivals, held)


def part_size(messages: int, options: ReadOptions) -> int:
    """Return how many messages a task reads where there are so many."""
    return max(options.task_messages, -(-messages // options.partitions))


class Rows:
    """Reads parts: the half of every reader that runs in the executors.

    Args:
        options: what is read and how.
        schema: the columns of the rows.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.schema = arrow_schema(schema)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part."""
        if not isinstance(partition, Part):
            return  # Spark's own, where there is nothing to read
        files = _Files(self.options.open().context, partition)
        if self.options.body_format is None:
            yield from self._messages(files)
        else:
            yield from _gathered(self._expanded(files, self.options.body_format))
        files.report()

    def _messages(self, files: _Files) -> Iterator[pa.RecordBatch]:
        columns = Columns(self.schema, files.context.sidecars)
        part, wants_bodies, wants_lengths = files.part, *(name in self.schema.names for name in ("value", "length"))
        for start in range(0, len(part.files), BATCH_MESSAGES):
            chosen = part.files[start : start + BATCH_MESSAGES]
            while chosen:
                values = files.bodies(chosen) if wants_bodies else None
                some = chosen if values is None else chosen[: len(values)]
                lengths = files.lengths(some, values) if wants_lengths else None
                yield columns.batch(part.state, files.folder, some, part.arrivals, lengths, values)
                chosen = chosen[len(some) :]

    def _expanded(self, files: _Files, body_format: str) -> Iterator[pa.RecordBatch]:
        parse = PARSERS[body_format]
        for file in files.part.files:
            body = files.reading(file, reading.open_body)
            if body is None:
                continue
            with body:
                yield from self._parsed(parse(body, self.schema), f"{files.folder}/{file}", body_format)

    def _parsed(self, batches: Iterator[pa.RecordBatch], path: str, body_format: str) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except BadBody as error:
            way_out = "read it without bodyFormat, and take it apart with Spark's own functions, to tell bad from good"
            raise DropqError(f"{path} is no {body_format} of this schema: {error}; {way_out}") from error


class _Files:
    """Finds the files of a part, wherever a renewed lease has put them meanwhile, and counts those that moved on."""

    def __init__(self, context: QueueContext, part: Part) -> None:
        self.context = context
        self.part = part
        self.folder = context.layout.folder(part.state)
        self._renewed: dict[str, str] = {}
        self._moved: list[str] = []

    def bodies(self, files: Sequence[str]) -> list[bytes | None]:
        """Return the bodies of the first files, None for one that moved on: as many as a batch holds, at least one.

        Raises:
            StorageError: a body is too long for a value of Spark.
        """
        found: list[bytes | None] = []
        body: bytes | None
        size = 0
        for file in files:
            try:
                body = _value(f"{self.folder}/{file}")
            except FileNotFoundError:
                body = self.reading(file, _value)
            found.append(body)
            size += len(body or b"")
            if size > BATCH_BYTES:
                break
        return found[:-1] if len(found) > 1 and size > LONGEST_VALUE else found

    def lengths(self, files: Sequence[str], values: Sequence[bytes | None] | None) -> list[int | None]:
        """Return how many bytes bodies have, None for one that moved on."""
        if values is not None:
            return [None if value is None else len(value) for value in values]
        return [self.reading(file, _size) for file in files]

    def reading(self, file: str, read: Callable[[str], T]) -> T | None:
        """Read a file; None for one that moved on, unless a claim holds it.

        Raises:
            LeaseLost: the claim that held it is gone.
        """
        try:
            return read(f"{self.folder}/{file}")
        except FileNotFoundError:
            if self.part.held:
                return self._reading_renewed(file, read)
            self._moved.append(file)
            return None

    def _reading_renewed(self, file: str, read: Callable[[str], T]) -> T:
        """RACE: a renewed lease renames a file between any listing and its opening; its claim's owner finds it."""
        claimed = self.context.sidecars.file(file)
        owner = claimed.claim.owner if claimed.claim is not None else ""
        for _ in range(LOOKS):
            if owner in self._renewed:
                try:
                    return read(f"{self.folder}/{self._renewed[owner]}")
                except FileNotFoundError:
                    pass
            self._renewed = {claim.owner: claim.filename for claim in claims_in(self.context)}
        raise LeaseLost(
            f"message {claimed.name.id}: its claim {owner} is gone (its lease ran out, "
            "it expired, or somebody settled or requeued it), and was not read"
        )

    def report(self) -> None:
        """Say which files moved on between the listing and the reading."""
        if self._moved:
            told = f"the first was {self._moved[0]}"
            log.warning("%d messages left %s while it was read: %s", len(self._moved), self.folder, told)


def _value(path: str) -> bytes:
    try:
        return reading.read_body(path, LONGEST_VALUE)
    except OSError as error:
        if error.errno == errno.EFBIG:
            what = f"{path} is longer than the {LONGEST_VALUE} bytes of a value of Spark"
            way_out = "read it without the column value, or with a bodyFormat"
            raise StorageError(f"{what}: {way_out}", path=path, errno=error.errno) from error
        raise


def _size(path: str) -> int:
    return os.lstat(path).st_size


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join the batches of small bodies."""
    gathered: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        gathered.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= BATCH_ROWS or size >= BATCH_BYTES:
            yield from _joined(gathered)
            gathered, rows, size = [], 0, 0
    yield from _joined(gathered)


def _joined(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if len(batches) == 1:
        yield batches[0]
    elif batches:
        yield from pa.Table.from_batches(batches).combine_chunks().to_batches()


class QueueReader(Rows, DataSourceReader):
    """Reads the messages of some states of a queue as they were listed once, or those that a claiming batch holds."""

    def partitions(self) -> list[InputPartition]:
        """List the messages, in the driver, and share them out.

        Raises:
            NoSuchQueue, StorageError: the queue cannot be listed.
            LeaseLost: a claiming batch does not hold all of its messages any more.
        """
        queue = self.options.open()
        if self.options.claimed is not None:
            listed = {"processing": held(queue, self.options.claimed)}
        else:
            states, filter = self.options.states, self.options.filter
            found = {state: list(browsing.listed(queue.context, state, filter)) for state in states}
            listed = _each_once(queue.context, found)
        size = part_size(sum(map(len, listed.values())), self.options)
        is_held = self.options.claimed is not None
        return [part for state, files in listed.items() for part in parts(state, files, size, held=is_held)]


def _each_once(context: QueueContext, listed: dict[str, list[MessageFile]]) -> dict[str, list[MessageFile]]:
    """Drop from what was listed first what had moved on to a later state when that was listed."""
    seen = set[str]()
    for state, files in reversed(listed.items()):
        folder = context.layout.folder(state)
        listed[state] = [
            file for file in files if file.own_name not in seen or reading.exists(f"{folder}/{file.filename}")
        ]
        seen.update(file.own_name for file in files)
    return listed


def held(queue: Queue, claimed: str) -> list[MessageFile]:
    """Return what a claiming batch holds, in the order that it was claimed in.

    Args:
        queue: the queue.
        claimed: the batch's subscription and how many messages it holds, with a colon between.

    Raises:
        LeaseLost: some of them are not held any more.
    """
    subscription, _, count = claimed.rpartition(":")
    found: dict[str, str] = {}
    for _ in range(LOOKS):  # RACE: a listing may miss files whose leases are being renewed, but not the same each time
        found |= {claim.owner: claim.filename for claim in claims_of(queue.context, subscription)}
        if len(found) == int(count):
            return listed(queue.context, (found[owner] for owner in sorted(found, key=claim_order)))
    raise LeaseLost(
        f"{len(found)} of the {count} messages that were claimed from queue {queue.name} are still held (leases ran "
        "out, or somebody settled or requeued them): what was read before and what could be read now differ"
    )


def listed(context: QueueContext, files: Iterable[str]) -> list[MessageFile]:
    """Return claimed files as they are read; where a name tells no time, its body does, which no rename changes."""
    found = [context.sidecars.file(filename, context.layout.processing) for filename in files]
    for file in found:
        file.arrival = _written(file)
    return found


def _written(file: MessageFile) -> int:
    if names.is_plain(file.own_name):
        return 0
    try:
        known = file.name.timestamp or file.name.since
        return 0 if known else reading.written_ms(f"{file.folder}/{file.filename}")
    except FileNotFoundError:
        return 0  # RACE: its lease was renewed this moment, or is gone, which the reader will find
