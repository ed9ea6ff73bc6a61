"""`fairness_model`: which consumer takes the next message; consumers know each other only through the queue.

Each subscription has a file in `.dropq/turns/`, whose name is a `Ticket`, and whose content is the filter. A consumer
lists the folder under the policy lock, and leaves a message to the subscription whose turn it is for at most
`Timing.turn_patience`. Who does not come for its turn is passed over until it asks again: so a consumer that is stopped
delays the others only for a moment.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from dropq.errors import DropqError
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.policies.matching import matcher
from dropq.storage import liveness, reading
from dropq.storage.failures import describe
from dropq.storage.watch import Watch, events_reach

log = logging.getLogger("dropq")

_TICKET = re.compile(r"([\w*%+-]+),(\d+),(\d+),(waits|busy)", re.ASCII)


class Ticket(NamedTuple):
    """How many messages a subscription may hold (0: any number), its last turn (0: none), and whether it waits."""

    subscription: str
    allowed: int
    turn: int = 0
    waits: bool = False

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.subscription},{self.allowed},{self.turn},{'waits' if self.waits else 'busy'}"


class FairShare:
    """The turns of one subscription, which may hold as many messages as are `allowed`; None for any number.

    Others do not wait for one that is not `lasting` from one attempt to the next.
    """

    def __init__(
        self, context: QueueContext, subscription: str, *, allowed: int | None, filter: str | None, lasting: bool
    ) -> None:
        self._context = context
        self._folder = context.layout.turns
        self._filter = filter or ""
        self._lasting = lasting
        self.are_proportional = context.config.fairness_model == "proportional"
        self._own = Ticket(subscription, allowed or 0)
        self._others: list[Ticket] = []
        self._last = 0
        self._claimed: Counter[str] = Counter()
        self._wants: dict[str, Callable[[MessageFile], bool] | None] = {}
        self._left_to: Ticket | None = None
        self._since = 0.0

    def refresh(self, claimed: Iterable[MessageFile]) -> None:
        """Read the turns of all subscriptions; call it first, under the policy lock, with what is in processing/."""
        tickets = _tickets(self._folder)
        self._own = tickets.pop(self._own.subscription, self._own._replace(waits=False))
        self._others = [other for other in tickets.values() if other.waits]
        self._last = max((other.turn for other in tickets.values()), default=0)
        if self.are_proportional and self._others:
            self._claimed = Counter(file.claim.subscription for file in claimed if file.claim is not None)

    def rivals(self, file: MessageFile) -> list[Ticket]:
        """Return the other subscriptions that wait, would take a message, and come before this one: the next first."""
        before = (one for one in self._others if not self._lasting or self._rank(one) < self._rank(self._own))
        return sorted((one for one in before if self._takes(one, file)), key=self._rank)

    def is_left(self, file: MessageFile) -> bool:
        """Return whether a message stays for another subscription now, and pass over nobody: that needs the lock.

        Without it, who asks again before the message is claimed would get all its time once more.
        """
        first = next(iter(self.rivals(file)), None)
        return first is not None and not self._is_found_dead(first) and self._has_time(first)

    def is_anothers(self, file: MessageFile) -> bool:
        """Return whether a message is to be left to another subscription, which waits and would take it."""
        while rivals := self.rivals(file):
            first = rivals[0]
            if not self._is_passed_over(first):
                return True
            self._others.remove(first)
        self._left_to = None
        return False

    def took(self) -> None:
        """Count a turn: the subscription is behind all others now."""
        self._become(self._own._replace(turn=max(self._last, self._own.turn) + 1, waits=False))

    @property
    def are_shared(self) -> bool:
        """Whether another subscription waited when turns were last read."""
        return bool(self._others)

    def wake_next(self) -> None:
        """Wake the subscription that comes next; call it without the lock, which that one takes."""
        if self._others and self._events_reach:
            following = min(self._others, key=self._rank)
            liveness.ring(self._context.layout.consumers, following.subscription, self._context.storage)

    @cached_property
    def _events_reach(self) -> bool:
        return events_reach(self._context.layout.consumers)

    @cached_property
    def turn(self) -> Watch:
        """Waits until another subscription wakes this one."""
        sign_of_life = f"{self._context.layout.consumers}/{self._own.subscription}"
        watch = Watch(touched=[sign_of_life], poll=not reading.exists(sign_of_life))  # a command has none
        watch.observe()
        return watch

    def ask(self) -> None:
        """Note that the subscription waits; may be called without the lock."""
        if self._lasting and not self._own.waits:
            self._become(self._own._replace(waits=True))

    def leave(self) -> None:
        """Remove the subscription's file: it ends."""
        for file in reading.names_in(self._folder):
            if file.startswith(f"{self._own.subscription},"):
                with suppress(OSError):  # if it stays, another consumer or a sweep removes it, as that of a dead one
                    self._context.storage.unlink(f"{self._folder}/{file}")

    def _rank(self, ticket: Ticket) -> tuple[float, int, str]:
        """Return what sorts subscriptions: the smallest part of what they may hold, then the longest without a turn."""
        part = self._claimed[ticket.subscription] / ticket.allowed if self.are_proportional and ticket.allowed else 0.0
        return part, ticket.turn, ticket.subscription

    def _takes(self, other: Ticket, file: MessageFile) -> bool:
        """Return whether a message passes the filter of another subscription; the filter is read once."""
        if other.subscription not in self._wants:
            self._wants[other.subscription] = self._filter_of(other)
        wants = self._wants[other.subscription]
        return wants is None or wants(file)

    def _filter_of(self, other: Ticket) -> Callable[[MessageFile], bool] | None:
        try:
            text = (reading.read_small(f"{self._folder}/{other.file}") or b"").decode(errors="surrogatepass")
            return matcher(self._context, text) if text else None
        except (DropqError, ValueError) as error:  # it may need an extra: the subscription counts as taking all
            log.warning("%s takes turns by a filter that cannot be read here: %s", other.subscription, error)
            return None

    def _is_passed_over(self, first: Ticket) -> bool:
        """Return whether the subscription whose turn it is loses it: it is dead, or did not come for long enough."""
        if self._is_found_dead(first):
            self._context.storage.unlink(f"{self._folder}/{first.file}")
            return True
        if self._has_time(first):
            return False
        self._rename(first, first._replace(waits=False))
        return True

    def _is_found_dead(self, first: Ticket) -> bool:
        return self._left_to != first and liveness.is_dead(self._context.layout.consumers, first.subscription)

    def _has_time(self, first: Ticket) -> bool:
        now = time.monotonic()
        if self._left_to != first:
            self._left_to, self._since = first, now
        return now - self._since < self._context.timing.turn_patience

    def _become(self, ticket: Ticket) -> None:
        if not self._lasting:
            return
        try:
            self._write(ticket)
        except OSError as error:  # the turn may get lost, but not the message that was claimed
            log.warning("the turn of %s is not kept: %s", ticket.subscription, describe(error))
        self._own = ticket

    def _write(self, ticket: Ticket) -> None:
        if not self._rename(self._own, ticket):
            # RACE: another consumer passed it over, or a sweep removed it as a dead one's; or it is not made yet.
            known = _tickets(self._folder).get(ticket.subscription)
            if known is None or not self._rename(known, ticket):
                self._context.storage.make_folder(self._folder)
                draft = f"{self._folder}/.{ticket.subscription}"
                content = self._filter.encode(errors="surrogatepass")
                self._context.storage.write_small(f"{self._folder}/{ticket.file}", content, by=draft)

    def _rename(self, before: Ticket, after: Ticket) -> bool:
        try:
            self._context.storage.rename(f"{self._folder}/{before.file}", f"{self._folder}/{after.file}")
        except FileNotFoundError:
            return False
        return True


def _tickets(folder: str) -> dict[str, Ticket]:
    found = filter(None, map(_TICKET.fullmatch, reading.names_in(folder)))
    return {each[1]: Ticket(each[1], int(each[2]), int(each[3]), each[4] == "waits") for each in found}


def clear(context: QueueContext, known: Collection[str]) -> int:
    """Remove the files of subscriptions that are not known any more; return how many there were."""
    folder = context.layout.turns
    gone = [file for file in reading.names_in(folder) if file.lstrip(".").partition(",")[0] not in known]
    for file in gone:
        context.storage.unlink(f"{folder}/{file}")
    return len(gone)
