"""The archive of a queue from a point on, oldest first: a replay sends it again, and a recovery begins with it."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

from dropq.config.schema import POINTS, recovery_point
from dropq.format import names
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.lifecycle.context import QueueContext
from dropq.storage import reading
from dropq.storage.clock import time_of
from dropq.upkeep.retention import kept_files

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Archived(NamedTuple):
    """A file in processed/: its message's time, in thousandths of a ms as in ids, and which message it is.

    A message that was replayed and acknowledged has several files. Only one message has a generated id. A sender may
    give any other id twice, and the parts of a bundle share its id: then the size and time of the body, which a copy
    keeps, identify the message. `bundle` is the generated id that a part has; None for any other message.
    """

    time: int
    file: str
    message: Hashable
    bundle: str | None


def since(context: QueueContext, point: str) -> Iterator[Archived]:
    """Yield what a queue has archived from a point on, by time alone, the oldest first.

    A message's time is its id's, else since when it counted as waiting, else when its file came to the archive.

    Args:
        point: `epoch`, all; `now`, nothing; `creation` of the queue, all where it was made by hand; an id that dropq
            made, that message included; an ISO 8601 date or time, in UTC where it does not say.
    """
    with context.error_context("nothing was changed"):
        begin = _time(context, point)
        found = sorted(_archived(context)) if begin < math.inf else []
    return (archived for archived in found if archived.time >= begin)


def checked(point: str | date) -> str:
    """Return a point to begin at as text; ValueError lists the forms."""
    try:
        return recovery_point(point)
    except ValueError:
        raise ValueError(f"{point!r} is no point to begin at: give {POINTS}") from None


def _archived(context: QueueContext) -> Iterator[Archived]:
    for file, status in kept_files(context, context.layout.processed):
        name = context.sidecars.file(file).name
        time = names.moment(name, status.st_ctime_ns // 1_000_000)
        yield Archived(time, file, _identity(name, status), name.id if name.generated and name.first else None)


def identity_of(file: MessageFile, context: QueueContext, state: str) -> Hashable:
    """Return a key that is equal for a message and its copies; None if the file is gone."""
    if file.name.generated and not file.name.first:
        return file.name.id
    try:
        return _identity(file.name, os.stat(f"{context.layout.folder(state)}/{file.filename}", follow_symlinks=False))
    except FileNotFoundError:
        return None


def _identity(name: Name, status: os.stat_result) -> Hashable:
    if name.generated and not name.first:
        return name.id
    return name.id, name.first, status.st_size, status.st_mtime_ns


def _time(context: QueueContext, point: str) -> float:
    """Return the time that a point stands for, in the unit of `Archived.time`."""
    match checked(point):
        case "epoch":
            return 0
        case "now":
            return math.inf
        case "creation":
            return reading.written_ms(context.layout.created, gone=0) * 1000  # 0 if it was made by hand
        case text if names.Name(text).generated:
            return names.moment(names.Name(text), 0)
        case text:
            return (time_of(text) - _EPOCH) // timedelta(milliseconds=1) * 1000
