"""Orders of delivery that a file name does not tell: by an expression, or by time alone where there are barriers.

Each message is looked at once, when it is first listed: a body that was sent is never changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from dropq import storage
from dropq.filters import Value, compile_expression
from dropq.lifecycle import Lifecycle, Waiting
from dropq.ready import Lookups, Ready
from dropq.sidecars import Sidecars

#: The highest priority that an expression can give: AMPS's unsigned long.
HIGHEST = 2**64 - 1

_Key = tuple[int, str, str]
_first = itemgetter(0)


class Ranked(Ready):
    """The waiting messages of one folder, ranked by something else than their names.

    It looks at all that waits before it offers the first.

    Args:
        folder, sidecars, ignored, depth: as for `Ready`.
        rank: gives the rank of a waiting message, higher first.
    """

    def __init__(
        self,
        folder: str,
        sidecars: Sidecars,
        ignored: Callable[[str], object],
        *,
        rank: Callable[[Waiting], int],
        depth: int | None = None,
    ) -> None:
        super().__init__(folder, sidecars, ignored, depth=depth)
        self._rank = rank

    def _listed(self, behind: _Key | None = None) -> Iterator[Sequence[str | Waiting]]:
        seen: dict[tuple[str, int], int] = {}
        keyed: list[tuple[_Key, str | Waiting]] = []
        with storage.listing(self._folder) as entries:
            for entry in entries:
                if not self._ignored(entry.name) and storage.is_message_file(entry):
                    keyed += self._ranked(entry, seen)
        self._arrivals = seen
        keyed = sorted((one for one in keyed if behind is None or one[0] > behind), key=_first)[: self.depth]
        self._end = keyed[-1][0] if self.depth is not None and len(keyed) >= self.depth else None
        return ([item for _, item in alike] for _, alike in groupby(keyed, key=lambda one: one[0][0]))

    def _ranked(self, entry: os.DirEntry[str], seen: dict[tuple[str, int], int]) -> Iterator[tuple[_Key, Waiting]]:
        for (_, time, name), waiting in self._other(entry, seen):
            if isinstance(waiting, Waiting):
                yield (-self._rank(waiting), time, name), waiting


def by_time(waiting: Waiting) -> int:
    """Rank all messages alike, so that their time alone counts."""
    return 0


def by_expression(text: str, life: Lifecycle) -> Callable[[Waiting], int]:
    """Rank messages by what an expression says of them, higher first (AMPS's Priority)."""
    expression = compile_expression(text)
    lookups = Lookups(life.sidecars, folder=life.layout.target, message_type=life.config.message_type)
    return lookups.remembering(lambda lookup: unsigned(expression.value(lookup)))


def unsigned(value: Value) -> int:
    """Return what an expression gave as a priority: a whole number from 0 on, 0 for what is none.

    AMPS takes the result for an unsigned long.
    """
    if not isinstance(value, int | float) or value != value or value <= 0:
        return 0
    return HIGHEST if value >= HIGHEST else int(value)
