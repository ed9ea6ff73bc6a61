"""Handlers that run a command for each record, or for all records of a message."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO

from dropq.lifecycle.reasons import STDERR_LIMIT
from dropq.queue.message import Bundle, Record
from dropq.records.formats import MARK, Unreadable, pack
from dropq.records.reader import RecordReader
from dropq.worker.command import Runner
from dropq.worker.loop import Fail, Halt


class RecordCommand(Runner):
    """A handler that runs a command for each record, which is on its standard input, a line with its line feed."""

    def __call__(self, record: Record) -> None:
        """Run the command; return if it succeeded, else raise the exception that settles the record."""
        is_frame = record._bundle.cursor.format == "frames"
        data = record.data if is_frame else record.data + b"\n"
        self.run(record.message, partial(_written, [data]), record=record.number)


class BundleCommand(Runner):
    """A handler that runs a command for all records of a message, and settles them by what the command reports."""

    def __call__(self, bundle: Bundle) -> None:
        """Run the command, and settle the records if it succeeded; else raise the exception that settles the message.

        If more records failed than max_record_failures allows, the others of these stay unsettled. A message whose
        records cannot be settled one by one fails if any of them fails.
        """
        message, cursor = bundle.message, bundle.cursor
        count, is_plain = _count(bundle)
        with _empty_report() as report:
            stderr = self.run(message, message.open if is_plain else partial(_copied, bundle), failed=report)
            failed = _read(report, count, stderr)
        if failed and bundle.settles_whole:
            number, reason = next(iter(failed.items()))
            raise Fail(f"record {number} of those that it read: {reason or 'failed'}", stderr=stderr)
        most, number = message.context.config.max_record_failures, 0
        while (raw := cursor.take()) is not None:
            number += 1
            if number not in failed:
                cursor.ack(raw[0])
            elif bundle.failures < most:
                Record(bundle, raw[0], raw[3]).fail(failed[number] or f"{self.argv[0]} reported that it failed")


def _reader(bundle: Bundle, body: IO[bytes]) -> RecordReader:
    most = bundle.message.context.config.max_record_bytes
    return RecordReader(body, bundle.cursor.format, first=bundle.message._name.begins, max_bytes=most)


def _count(bundle: Bundle) -> tuple[int, bool]:
    """Return how many records a body has, and whether a command may read it as it is.

    Then it has nothing else, such as an empty line or a byte order mark, and all lines end with a line feed: of a last
    one that does not, a loop in a shell would take no notice.
    """
    count, end, is_plain = 0, 0, True
    with bundle.message.open() as body:
        reader = _reader(bundle, body)
        first = reader.following
        try:
            for raw in reader:
                count, end = count + 1, raw[2]
        except Unreadable:
            is_plain = False
        is_ended = bundle.cursor.format == "frames" or end < body.seek(0, os.SEEK_END)
    is_plain = is_plain and is_ended and not reader.head.startswith(MARK)
    return count, is_plain and reader.following == first + count


def _copied(bundle: Bundle) -> IO[bytes]:
    """Return a file with only the header and the records of a body, each line with its end."""

    def pieces() -> Iterator[bytes]:
        with bundle.message.open() as body, suppress(Unreadable):
            reader = _reader(bundle, body)
            for number, (_, _, _, data) in enumerate(reader):
                if number == 0:
                    yield reader.head.removeprefix(MARK)
                yield pack(bundle.cursor.format, [data])

    return _written(pieces())


def _written(pieces: Iterable[bytes]) -> IO[bytes]:
    """Return a file without a name, with these bytes, at its start."""
    with _halting():
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the command's run closes it
        file.writelines(pieces)
        file.seek(0)
    return file


@contextmanager
def _empty_report() -> Iterator[str]:
    """Make an empty file, which is there until the block ends."""
    with _halting():
        folder = tempfile.TemporaryDirectory(prefix="dropq-", ignore_cleanup_errors=True)
        report = f"{folder.name}/failed"
        open(report, "xb").close()
    with folder:
        yield report


@contextmanager
def _halting() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Halt(f"what the command reads or reports cannot be written to a temporary file: {error}") from error


def _cut(lines: IO[str]) -> Iterator[str]:
    """Yield the lines of a file; of a long one its beginning."""
    while line := lines.readline(2 * STDERR_LIMIT):
        rest = line
        while rest and not rest.endswith("\n"):
            rest = lines.readline(2 * STDERR_LIMIT)
        yield line


def _read(report: str, count: int, stderr: str) -> dict[int, str]:
    """Return why a command failed records, by their numbers among those that it read; Fail if that is unreadable."""
    failed: dict[int, str] = {}
    try:
        with open(report, encoding="utf-8", errors="replace", newline="\n") as lines:
            for at, line in enumerate(_cut(lines), 1):
                number, _, reason = line.removesuffix("\n").partition("\t")
                where = f"line {at} of DROPQ_FAILED"
                if not (number.isascii() and number.isdigit()):
                    raise Fail(f"{where} begins with {number[:80]!r}: write the number of a record", stderr=stderr)
                if len(number) > len(str(count)) or not 1 <= int(number) <= count:
                    raise Fail(f"{where} names record {number[:20]}, and the command has read {count}", stderr=stderr)
                if int(number) in failed:
                    raise Fail(f"{where} names record {number}, which was named before", stderr=stderr)
                failed[int(number)] = reason[:STDERR_LIMIT]
    except OSError as error:
        raise Fail(f"DROPQ_FAILED cannot be read: {error.strerror}", stderr=stderr) from error
    return failed
