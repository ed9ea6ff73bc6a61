"""`max_backlog`: how many messages may be held at once, by all consumers together (AMPS's MaxBacklog).

Whatever lies in processing/ counts, whoever put it there; a script that claims by `mv` obeys no limit, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from dropq.format.message_file import MessageFile

#: So many names a listing gets by one call of the kernel, however long they are.
AT_ONCE = 100
#: How often more are listed anew.
AGAIN = 2


class Backlog:
    """The limit of one queue.

    Args:
        most: how many messages may lie in processing/.
    """

    def __init__(self, most: int) -> None:
        self._most = most

    def has_room(self, claimed: Collection[MessageFile], again: Callable[[], Collection[MessageFile]]) -> bool:
        """Tell whether one more may be taken; to be asked under the policy lock.

        Args:
            claimed: what lies in processing/.
            again: lists that anew. RACE: a listing that takes more than one call of the kernel may miss a claim that is
                being renewed; it has the same owner before and after, so several listings are laid together.
        """
        if len(claimed) < min(self._most, AT_ONCE):
            return True
        owners = {_owner(file) for file in claimed}
        for _ in range(AGAIN):
            if len(owners) >= self._most:
                break
            owners |= {_owner(file) for file in again()}
        return len(owners) < self._most


def _owner(file: MessageFile) -> str:
    return file.claim.owner if file.claim is not None and file.claim.ours else file.filename
