"""Orders of delivery that a file name does not tell: by an expression, or by time alone where there are barriers.

Each message is looked at once, when it is first listed: a body that was sent is never changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from dropq.filters import Value, compile_expression
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.sidecars import Sidecars
from dropq.lifecycle.timing import Timing
from dropq.lifecycle.view import Lookups, Ready
from dropq.storage import reading

#: The highest priority that an expression can give: AMPS's unsigned long.
HIGHEST = 2**64 - 1

_Key = tuple[int, str, str]
_first = itemgetter(0)


class Ranked(Ready):
    """The waiting messages of one folder, ranked by something else than their names.

    It looks at all that waits before it offers the first.

    Args:
        folder, sidecars, ignored, timing, depth: as for `Ready`.
        rank: gives the rank of a waiting message, higher first.
    """

    def __init__(
        self,
        folder: str,
        sidecars: Sidecars,
        ignored: Callable[[str], object],
        timing: Timing,
        *,
        rank: Callable[[MessageFile], int],
        depth: int | None = None,
    ) -> None:
        super().__init__(folder, sidecars, ignored, timing, depth=depth)
        self._rank = rank

    def _listed(self, behind: _Key | None = None) -> Iterator[Sequence[str | MessageFile]]:
        seen: dict[tuple[str, int], int] = {}
        keyed: list[tuple[_Key, str | MessageFile]] = []
        with reading.listing(self._folder) as entries:
            for entry in entries:
                if not self._ignored(entry.name) and reading.is_message_file(entry):
                    keyed += self._ranked(entry, seen)
        self._arrivals = seen
        keyed = sorted((one for one in keyed if behind is None or one[0] > behind), key=_first)[: self.depth]
        self._end = keyed[-1][0] if self.depth is not None and len(keyed) >= self.depth else None
        return ([item for _, item in alike] for _, alike in groupby(keyed, key=lambda one: one[0][0]))

    def _ranked(self, entry: os.DirEntry[str], seen: dict[tuple[str, int], int]) -> Iterator[tuple[_Key, MessageFile]]:
        for (_, time, name), file in self._other(entry, seen):
            yield (-self._rank(file), time, name), file


def by_time(file: MessageFile) -> int:
    """Rank all messages alike, so that their time alone counts."""
    return 0


def by_expression(text: str, context: QueueContext) -> Callable[[MessageFile], int]:
    """Rank messages by what an expression says of them, higher first (AMPS's Priority)."""
    expression = compile_expression(text)
    lookups = Lookups(context.sidecars, folder=context.layout.target, message_type=context.config.message_type)
    return lookups.remembering(lambda lookup: unsigned(expression.value(lookup)))


def unsigned(value: Value) -> int:
    """Return what an expression gave as a priority: a whole number from 0 on, 0 for what is none.

    AMPS takes the result for an unsigned long.
    """
    if not isinstance(value, int | float) or value != value or value <= 0:
        return 0
    return HIGHEST if value >= HIGHEST else int(value)
