"""Filters of queues, subscriptions and commands, as functions of a message file; and what filters see of a file."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from dropq.format.layout import WAITING
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.reasons import Reasons
from dropq.storage import reading

if TYPE_CHECKING:
    from dropq.filters import Lookup
    from dropq.filters.message_types import MessageType

log = logging.getLogger("dropq")

T = TypeVar("T")

#: The results of a filter or an expression are kept for at least this many files, and at most twice as many.
REMEMBERED = 100_000


def matcher(context: QueueContext, filter: str, state: str = "target") -> Callable[[MessageFile], bool]:
    """Return a function that tests messages of a state by a filter; errors as of `compile_filter` and `Lookups`."""
    from dropq.filters import compile_filter  # here, as few queues have a filter

    compiled = compile_filter(filter)
    lookups = Lookups(context, state, reads_bodies=compiled.reads_body, reasons=context.reasons)
    if not compiled.reads_body:
        return lookups.asking(compiled.matches)
    return lookups.remembering(compiled.matches, changes=compiled.changes)


def deciding(
    filter: str, context: QueueContext, state: str, into: QueueContext, reasons: Reasons | None = None
) -> Callable[[MessageFile], bool | None]:
    """Return a function that tests messages that lie in one queue, before they enter the same or another.

    None says that it cannot tell now; of messages that stay in their queue, it cannot tell what is longer than filters
    read, or nested too deeply, either. Errors, and `reasons`, as of `Lookups`.
    """
    from dropq.filters import compile_filter

    compiled = compile_filter(filter)
    lookups = Lookups(context, state, reads_bodies=compiled.reads_body, into=into, reasons=reasons)
    return lookups.deciding(compiled.matches) if compiled.reads_body else lookups.asking(compiled.matches)


class Lookups:
    """What filters and expressions see of the listed files of one folder.

    Args:
        context: the queue that they lie in.
        state: their state: of waiting messages a filter sees the next delivery, of others the last.
        reads_bodies: whether they look into bodies, and not at names alone.
        into: the queue whose filter it is, which says what bodies are; None for their own.
        reasons: why its messages failed, which also tell the tries and the arrival of foreign files; None for none.

    Raises:
        Unavailable: the message type needs an extra that is not installed.
    """

    def __init__(
        self,
        context: QueueContext,
        state: str = "target",
        *,
        reads_bodies: bool = False,
        into: QueueContext | None = None,
        reasons: Reasons | None = None,
    ) -> None:
        from dropq.filters import message_type

        self._sidecars = context.sidecars
        self._state = state
        self._reasons = reasons
        self._waits = state in WAITING
        self._folder = context.layout.folder(state)
        config = (into or context).config
        kind = config.message_type if reads_bodies else "binary"  # which nobody looks into
        self._message_type = message_type(kind, config.field_separator)
        self._queue = (into or context).name
        self._enters = into is not None and into is not context

    def asking(self, ask: Callable[[Lookup], T]) -> Callable[[MessageFile], T]:
        """Return a function that applies `ask` to a file's name."""
        return lambda file: ask(self._lookup(file, None))

    def remembering(self, ask: Callable[[Lookup], T], *, changes: bool = False) -> Callable[[MessageFile], T]:
        """Return a function that applies `ask` to a file's name and body; it remembers the last `REMEMBERED` results.

        It remembers nothing if a result `changes` with the time.

        RACE: a file that was claimed after the listing has no body here; its result is not remembered.
        """
        recent: dict[tuple[str, int], T] = {}
        before: dict[tuple[str, int], T] = {}

        def answer(file: MessageFile) -> T:
            nonlocal recent, before
            key = file.filename, file.arrival  # another file may come under a foreign name
            if key in recent:
                return recent[key]
            if key in before:
                answered, known = before[key], True
            else:
                body = self._body(file)
                answered = ask(self._lookup(file, body))
                known = not (body.refused or changes)
            if known:
                if len(recent) >= REMEMBERED:  # forget the results that were not asked for since the last time
                    recent, before = {}, recent
                recent[key] = answered
            return answered

        return answer

    def deciding(self, ask: Callable[[Lookup], bool]) -> Callable[[MessageFile], bool | None]:
        """Return a function that applies `ask` to a file's name and body; None where the body cannot be read now."""

        def answer(file: MessageFile) -> bool | None:
            body = self._body(file)
            answered = ask(self._lookup(file, body))
            return None if body.refused or (body.content.unread and not self._enters) else answered

        return answer

    def _body(self, file: MessageFile) -> _Body:
        return _Body(f"{self._folder}/{file.filename}", self._message_type)

    def _lookup(self, file: MessageFile, body: _Body | None) -> Lookup:
        from dropq.filters import for_name

        name = self._sidecars.full(file.name)
        if body is not None and file.name.meta and name is file.name:
            body.refused = True  # its sidecar may be readable the next time
        if self._enters:  # as a copy, which begins anew
            name = replace(name, origin="", reason="") if name.reason else name
        deliveries = file.delivery_count
        if self._reasons is not None:
            name = self._reasons.complete(self._state, file.filename, name)
            deliveries = max(deliveries, name.delivery_count)
        count = deliveries + 1 if self._waits else max(deliveries, 1)
        return for_name(
            name,
            delivery_count=count,
            arrival=file.arrival or None,
            body=None if body is None else body.content,
            queue=self._queue,
        )


class _Body:
    def __init__(self, path: str, message_type: MessageType) -> None:
        from dropq.filters import Body

        self._path = path
        self._longest = message_type.longest
        self.content = Body(self._read, message_type)
        #: Whether the body, or the message's sidecar, could not be read now, so that the result may change.
        self.refused = False

    def _read(self) -> bytes:
        try:
            return reading.read_body(self._path, self._longest)
        except OSError as error:
            if error.errno == errno.EFBIG:
                log.warning("filters see only NULLs in %s: it is longer than %d MiB", self._path, self._longest >> 20)
            else:
                self.refused = True
            raise
