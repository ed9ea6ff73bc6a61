"""`max_backlog`: how many messages may be held at once, by all consumers together (AMPS's MaxBacklog).

Whatever lies in processing/ counts, whoever put it there; a script that claims by `mv` obeys no limit, and is counted.
"""

from __future__ import annotations

from collections.abc import Collection


class Backlog:
    """The limit of one queue.

    Args:
        most: how many messages may lie in processing/.
    """

    def __init__(self, most: int) -> None:
        self._most = most

    def has_room(self, held: Collection[str]) -> bool:
        """Tell whether one more may be taken, by what lies in processing/; to be asked under the policy lock."""
        return len(held) < self._most
