"""Orders of delivery other than by file name: by an expression, or by time alone in a queue with barriers.

Each message is ranked once, when it is first listed, as a body never changes after it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dropq.filters import Value, compile_expression
from dropq.filters.arrays import number
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.view import Arrivals, Group, Key, Keyed, TargetView
from dropq.policies.matching import Lookups
from dropq.storage import reading

#: The highest priority that an expression can give: AMPS's unsigned long.
HIGHEST = 2**64 - 1


class RankedView(TargetView):
    """The waiting messages of one folder, the highest rank first; it ranks all of them before it offers the first."""

    def __init__(self, *view: Any, rank: Callable[[MessageFile], int], **options: Any) -> None:
        super().__init__(*view, **options)
        self._rank = rank

    def _listed(self, behind: Key | None = None, *, typed: bool = True) -> Iterator[Group]:
        self.unsettled = {}
        arrivals: Arrivals = {}
        keyed: list[Keyed] = []
        with reading.look(self._folder) as entries:
            for entry in entries:
                if not self._ignored(entry.name) and reading.is_message_file(entry):
                    keyed += self._keyed(entry, arrivals, behind)
        self._arrivals = arrivals
        return self._in_order(keyed)

    def _order(self, file: MessageFile) -> Key:
        _, time, name = super()._order(file)
        return -self._rank(file), time, name


def by_time(file: MessageFile) -> int:
    """Rank all messages the same, so that only their time counts."""
    return 0


def by_expression(text: str, context: QueueContext) -> Callable[[MessageFile], int]:
    """Return a function that ranks messages by an expression (AMPS's Priority)."""
    expression = compile_expression(text)
    lookups = Lookups(context, reads_bodies=expression.reads_body)
    return lookups.remembering(lambda lookup: unsigned(expression.value(lookup)), changes=expression.changes)


def unsigned(value: Value) -> int:
    """Return the result of an expression as a priority: an unsigned long, as in AMPS; 0 if it is no positive number."""
    result = number(value)
    if result is None or not result > 0:
        return 0
    return HIGHEST if result >= HIGHEST else int(result)
