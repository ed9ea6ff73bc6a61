"""How long a consumer or a sender relies on what it saw, and waits for others; tests pass in another one.

No promise depends on these values: they weigh how soon something is seen against what it costs to look.
"""

from __future__ import annotations

from dataclasses import dataclass

from dropq.storage.watch import RESCAN


@dataclass(frozen=True)
class Timing:
    """The seconds, shares and counts by which the verbs of a root pace themselves."""

    #: Seconds after which a view of target/ is refreshed although it is not used up, and locks are looked for again.
    max_age: float = 0.1
    #: A view, or a count, is kept this many times as long as its listing took.
    listing_share: float = 10
    #: Seconds for which a count of messages is relied on at the most.
    count_age: float = 1.0
    #: How many messages a view holds at the most, where the queue does not say (`target_queue_depth`).
    view_depth: int = 100_000
    #: Seconds of a processor after which an attempt that found nothing was long: a waiting consumer then lets
    #: `listing_share` times as much pass before the next.
    long_attempt: float = 0.02

    #: Seconds that a file of target/ waits whose last change was a write, where the queue has no `settle_time`.
    written_in_place: float = 2.0

    #: Seconds between two sweeps that a consumer makes on the way.
    sweep_interval: float = 1.0
    #: The same over NFS, while target/ is empty and nothing is to be brought back: only a delayed message may come.
    quiet_interval: float = 2.5
    #: The next sweep comes after at least this many times what the last one took.
    sweep_share: float = 10
    #: Seconds before a new consumer looks whether upkeep is due: a consumer of one message has no time for it.
    first_upkeep: float = 1.0

    #: Seconds that a message waits at least after its holder died, or lost its lease; twice as long after each death.
    after_death: float = 1.0

    #: Seconds for which a message is left to the consumer whose turn it is.
    turn_patience: float = 0.1
    #: Seconds that a receive waits for other consumers to take their turns.
    turns_wait: float = 0.2
    #: Seconds that an attempt waits for the policy lock: its holder needs a millisecond, unless it was stopped in
    #: between.
    lock_patience: float = 1.0
    #: Seconds of a sender's wait after which the log says why it waits.
    first_word: float = 1.0

    def rest(self, took: float) -> float:
        """Return for how many seconds to rest after an attempt that moved nothing, and took so many of a processor."""
        return min(took * self.listing_share, RESCAN) if took > self.long_attempt else 0.0
