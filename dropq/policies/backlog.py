"""`max_backlog`: how many messages all consumers together may hold at once (AMPS's MaxBacklog).

Every message in processing/ counts. A script that claims by `mv` is counted, but not limited.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from dropq.format.message_file import MessageFile
from dropq.lifecycle.decision import Decision

#: The kernel returns at least this many names by one call, however long they are.
AT_ONCE = 100
#: How often to list again when there are more.
AGAIN = 2
MAY_TAKE = Decision(True, "ready")


class Backlog:
    """The limit of one queue: at `most` so many messages may lie in processing/."""

    def __init__(self, most: int) -> None:
        self._most = most

    def decide(self, claimed: Collection[MessageFile], again: Callable[[], Collection[MessageFile]]) -> Decision:
        """Return whether one more message may be claimed, by what is in processing/; `again` lists that again.

        Call it under the policy lock, or to explain.

        RACE: a listing of more than one kernel call may miss a claim that is being renewed. The claim keeps its owner,
        so the owners of several listings are counted together.
        """
        if len(claimed) < min(self._most, AT_ONCE):
            return MAY_TAKE
        owners = {_owner(file) for file in claimed}
        for _ in range(AGAIN):
            if len(owners) >= self._most:
                break
            owners |= {_owner(file) for file in again()}
        if len(owners) < self._most:
            return MAY_TAKE
        text = f"{len(owners)} held, as many as max_backlog allows"
        return Decision(False, "backlog", text, holders_of(claimed))


def holders_of(claimed: Iterable[MessageFile]) -> tuple[str, ...]:
    """Return who holds what is in processing/, each once."""
    claims = (file.claim for file in claimed)
    return tuple(dict.fromkeys(claim.subscription if claim else "a script" for claim in claims))


def _owner(file: MessageFile) -> str:
    return file.claim.owner if file.claim is not None and file.claim.ours else file.filename
