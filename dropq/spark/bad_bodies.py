"""What becomes of a body that does not fit the schema: the option badBodies.

Invariant: no row of a bad body goes on, unless the read fails. A message that has left the read fails it, or is a row
of nulls, too. So where a read may go past a bad body, the rows of each body wait until all of it was parsed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from shlex import quote

import pyarrow as pa  # type: ignore[import-untyped]

from dropq.errors import DropqError
from dropq.queue.bad_bodies import BadBodyNotes
from dropq.queue.stream_journal import batch_key
from dropq.spark.arrow_cast import BadBody
from dropq.spark.options import ReadOptions

log = logging.getLogger("dropq")


@dataclass
class BadBodies:
    """The bodies of a part that a task reads, claimed for a batch or not: one that is bad fails the query."""

    options: ReadOptions
    folder: str
    is_claimed: bool

    def wanted(self, files: Iterable[str]) -> Iterable[str]:
        """Return the files that are to be read."""
        return files

    def rows(self, file: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a body; DropqError names the message of a bad one, and says how to go past it."""
        try:
            yield from batches
        except BadBody as error:
            raise DropqError(f"{self.folder}/{file} {self._problem(error)}; {self._way_out(file)}") from error

    def missing(self, error: DropqError) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a message that has left the read, or fail the read with the given error."""
        raise error

    def report(self) -> None:
        """Log how many bodies of the part were bad."""

    def _problem(self, error: BadBody) -> str:
        return f"cannot be read as {self.options.body_format} with this schema: {error}"

    def _way_out(self, file: str) -> str:
        if not self.is_claimed:
            return "badBodies=null makes it a row of nulls, and a read without bodyFormat has its bytes"
        arguments = f"{quote(self.options.queue)} {quote(file)} --root {quote(self.options.root)}"
        return f"`dropq reject {arguments}` rejects this message, and badBodies=reject every such message"


@dataclass
class Rejected(BadBodies):
    """The bodies of a part: a message whose body is bad has no rows, and is rejected when its batch is settled.

    A body that an earlier try of the task found bad is not read again, so that each try has the same rows.
    """

    notes: BadBodyNotes
    bad: list[str] = field(default_factory=list)

    def wanted(self, files: Iterable[str]) -> Iterable[str]:
        known = self.notes.keys()
        return (file for file in files if batch_key(file) not in known)

    def rows(self, file: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            whole = list(batches)
        except BadBody as error:
            reason = f"the body {self._problem(error)}"
            self.notes.add(batch_key(file), reason)
            self.bad.append(f"{file}: {reason}")
        else:
            yield from whole

    def report(self) -> None:
        if self.bad:
            warning = "%d messages in %s will be rejected, and have no rows: the first is %s"
            log.warning(warning, len(self.bad), self.folder, self.bad[0])


@dataclass
class Nulls(BadBodies):
    """The bodies of a part: one that is bad is a row of nulls, with the error in the column for that, if any."""

    schema: pa.Schema

    def rows(self, file: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            whole = list(batches)
        except BadBody as error:
            yield self._nulls(f"{self.folder}/{file} {self._problem(error)}")
        else:
            yield from map(self._with_column, whole)

    def missing(self, error: DropqError) -> Iterator[pa.RecordBatch]:
        yield self._nulls(str(error))

    def _nulls(self, problem: str) -> pa.RecordBatch:
        readable = os.fsencode(problem).decode("utf-8", "replace")
        return pa.RecordBatch.from_pylist([{self.options.corrupt_column: readable}], schema=self.schema)

    def _with_column(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        index = self.schema.get_field_index(self.options.corrupt_column)
        if index < 0:
            return batch
        column = self.schema.field(index)
        return batch.add_column(index, column, pa.nulls(batch.num_rows, column.type))


def bad_bodies(
    options: ReadOptions, folder: str, schema: pa.Schema, *, is_claimed: bool, notes: BadBodyNotes
) -> BadBodies:
    """Return what becomes of the bad bodies of a part; the notes name those that are to be rejected."""
    if options.bad_bodies == "reject":
        return Rejected(options, folder, is_claimed, notes)
    if options.bad_bodies == "null":
        return Nulls(options, folder, is_claimed, schema)
    return BadBodies(options, folder, is_claimed)
