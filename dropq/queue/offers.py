"""What a subscription may take, in order of delivery: the queue's view, without messages that it leaves to others.

A queue without special rules offers its view as it is. Consumers that race for messages share the view for a while:
each begins with its own part of it.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dropq.errors import LeaseLost, NoSuchQueue, StorageError
from dropq.format.claims import Claim, claim_id
from dropq.format.layout import WAITING
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.lifecycle import early_acks, naming
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.expiry import has_expired
from dropq.lifecycle.moving import Moves
from dropq.policies.build import view_of
from dropq.policies.filter_rest import FILTERED, FilterRest
from dropq.policies.matching import matcher
from dropq.policies.routes import Routes
from dropq.policies.wanted import belonging_here
from dropq.storage import reading
from dropq.storage.failures import error_context, storage_error
from dropq.storage.liveness import Presence

if TYPE_CHECKING:
    from dropq.queue.message import Message

log = logging.getLogger("dropq")

#: Seconds for which consumers share the view, after one of them was quicker than another.
SHARING = 1.0
#: After this many lost races, list target/ again; double the number until a claim succeeds: as on NFS, a listing may
#: show names for a while that are gone, and then no listing is better.
LOSSES = 8
#: Seconds after which an empty target/ may be quiet: sooner, its next change might have the time of its last.
QUIET_AFTER = reading.SETTLED_NS / 1_000_000_000
#: How many files that cannot be claimed are remembered; when there are more, each is tried, and logged, again.
UNCLAIMABLE = 1000
#: Seconds for which a consumer puts messages aside after a listing, before it offers what it found.
TIDYING = 1.0
#: What becomes of messages when an attempt fails.
UNTOUCHED = "no message was touched"


@dataclass
class CameBack:
    """What came back of a message that was handled by records, see `Offers.once`.

    Attributes:
        records: the names of its records that came back, each as a message.
        is_to_be_taken: whether the rest of the message may be taken again, as no handler has had it.
    """

    records: list[Name] = field(default_factory=list)
    is_to_be_taken: bool = False


class Offers:
    """The messages that one subscription may take.

    Args:
        presence: the subscription's sign of life; None if its claims outlive it.
        owners: the owners of its next claims.
        deadline: returns when the lease of a claim made now runs out, in ms since 1970; 0 for never.

    Attributes:
        view: the rest of the present piece of the view; each message is offered once.
        listings: how many listings there were until now.
        losses: how many races for a message were lost since the last claim.
        routes: the queue's routes, as `attend` saw them last.
        frozen: whether it offers only what waited at one moment.
        is_quiet: whether target/ was empty, and has not changed since: then nothing else is asked of the file server.
        puts_aside: whether it puts aside what the queue's filter keeps from every consumer, where the queue asks that.
    """

    def __init__(
        self,
        context: QueueContext,
        presence: Presence | None,
        *,
        filter: str | None,
        owners: Iterator[str],
        deadline: Callable[[], int],
    ) -> None:
        self._context = context
        self._moves = Moves(context)
        self._presence = presence
        self.owners = owners
        self.deadline = deadline
        self._rest = FilterRest(context)
        of_queue = self._belongs if self._rest.is_put_aside else self._rest.matches
        self._matches = _all_of(belonging_here(context), of_queue, None if filter is None else matcher(context, filter))
        self._target = view_of(context, depth=context.config.target_queue_depth or context.timing.view_depth)
        self._acks = reading.Listing(context.layout.acks, context.clock)
        self._acked: frozenset[str] = frozenset()  # ids whose acks came before them
        self._returned: set[tuple[str, str]] = set()  # ids, each with what tells a file from its twins
        self._returning: list[str] = []  # ids of messages that may be about to come back
        self._unclaimable: set[str] = set()  # files whose claims would have too long a name here
        self._refused: StorageError | None = None
        self._shares_until = 0.0
        self._list_at = LOSSES
        self._again: MessageFile | None = None
        self.listings = 0
        self.losses = 0
        self.routes = Routes(context)
        self.frozen = False
        self._standstill = reading.Standstill(context.layout.target, clock=context.clock)
        self.is_quiet = self.puts_aside = False
        self._tidies_until = 0.0
        self._may_be_quiet_at = time.monotonic() + QUIET_AFTER
        self.view: Iterator[MessageFile] = iter(())

    # -- listing ---------------------------------------------------------------------------------------------

    @property
    def fresh_until(self) -> float:
        """When the view is too old to take from, by `time.monotonic()`."""
        return self._target.fresh_until

    @property
    def are_shared(self) -> bool:
        """Whether the subscription shares the view with other consumers at present."""
        return time.monotonic() < self._shares_until

    @property
    def are_settling(self) -> bool:
        """Whether a file waits that somebody may still write to, and that is offered later."""
        return bool(self._target.unsettled)

    @property
    def settles_in(self) -> float:
        """Seconds until such a file may be offered, if nobody writes to it meanwhile; infinity where there is none."""
        due = min(self._target.unsettled.values(), default=None)
        return math.inf if due is None else (due - self._context.clock.now_ms()) / 1000

    def settling_before(self, file: MessageFile) -> int:
        """Return how many such files come before a message in the order of delivery."""
        with error_context(UNTOUCHED):
            return self._target.unsettled_before(file)

    def look_for_change(self) -> None:
        """Ask whether target/ is as empty as it was."""
        with untouched(self._context):
            self.is_quiet = not self.frozen and self._standstill.lasts()

    def attend(self, *, holds: bool = False) -> None:
        """Read which routes are in use; list again if the view is too old; offer nothing while the queue is paused.

        While target/ is quiet, an attempt counts as if it had listed it. Who `holds` messages shows that it lives.
        """
        if self.is_quiet:
            self.listings += 1
            if holds and self._presence is not None:
                self._presence.keep()
            return
        with error_context(UNTOUCHED):
            paused, has_routes = self._context.switches()
            self.routes.refresh(are_there=has_routes)
        if self._target.stale and not self.frozen:
            self.refresh(paused=paused)
        elif paused:
            self._clear()

    def freeze(self) -> None:
        """Offer from now on only what waits at this moment."""
        self._target.depth = None  # only a later listing could find what lies behind a bounded view
        self.refresh()
        self.frozen = True

    def more(self, listings: int) -> bool:
        """Offer the next piece of the view, or what lies behind it, or a new listing; return False at the end.

        An attempt to receive lists once: `listings` is how many there were when it began.
        """
        if self.frozen and self._show_settled():
            return True
        listed = self.frozen or self.listings > listings
        if not listed and self._target.worn:
            self.refresh()  # better than the others' parts of the view: they took some of these messages
            return True
        if self._go_on():
            return True
        if listed:
            return False
        self.refresh()
        return True

    def refresh(self, *, paused: bool | None = None) -> None:
        """List target/ again, unless the queue is `paused`; None asks whether it is."""
        self.listings += 1
        self._again = None
        self._refused = None  # a message that still waits is met again
        with error_context(UNTOUCHED):
            is_paused = self._context.paused if paused is None else paused
        if is_paused:
            self._standstill.end()
            self._clear()
            return
        with untouched(self._context):
            if self._presence is not None:
                self._presence.keep()  # before the listing: what is claimed from it is claimed by the living
            if time.monotonic() > self._may_be_quiet_at:
                self._standstill.begin()
            sharing = self._presence if self.are_shared else None
            self._target.refresh(*(sharing.position() if sharing is not None else (0, 1)))
            if self._target.is_empty:
                self._standstill.confirm()
            else:
                self._standstill.end()
                self._may_be_quiet_at = time.monotonic() + QUIET_AFTER
            self._acked = self._acks.names()  # RACE: after the messages that it may be about
        self._tidies_until = time.monotonic() + TIDYING
        self._compose()

    def _show_settled(self) -> bool:
        """Offer files that waited when the view was frozen, and have settled since."""
        if self.settles_in > 0:
            return False
        with untouched(self._context):
            if not self._target.show_settled():
                return False
        self._compose()
        return True

    def _go_on(self) -> bool:
        with untouched(self._context):
            if not self._target.go_on():
                return False
            self._again = None
            self._acked = self._acks.names()
        self._compose()
        return True

    def _compose(self) -> None:
        """Offer the view as it is, or filtered by the tests that are needed now."""
        view = self._target.view
        asks = self._matches or self._acked or self._unclaimable or self._returned or self._returning
        self.view = filter(self._takes, view) if asks else view

    def _clear(self) -> None:
        self._target.clear()
        self._again = None
        self._compose()

    def next(self) -> MessageFile | None:
        """Return the message that was put back, else the next of the view, wanted or not; None at its end."""
        again, self._again = self._again, None
        return next(self._target.view, None) if again is None else again

    def put_back(self, file: MessageFile) -> None:
        """Let `next` return a message again that it returned last."""
        self._again = file

    def is_gone(self, file: MessageFile) -> bool:
        """Return whether a message has left target/ since it was listed."""
        with error_context(UNTOUCHED):
            return not reading.exists(f"{self._context.layout.target}/{file.filename}")

    # -- what is taken ---------------------------------------------------------------------------------------

    def _takes(self, file: MessageFile) -> bool:
        return not self.settle_acked(file) and self.wants(file)

    def settle_acked(self, file: MessageFile) -> bool:
        """Archive a message whose ack came before it; return False if it is to be delivered."""
        if not self._acked or file.name.id not in self._acked:
            return False
        try:
            return early_acks.settle(self._context, file, next(self.owners), self.deadline())
        except StorageError as error:
            self.pass_over(file, error)
            return True

    def wants(self, file: MessageFile) -> bool:
        """Return whether its filter, and what it remembers, let the subscription take a message."""
        return (
            (self._matches is None or self._matches(file))
            and file.filename not in self._unclaimable
            and not self.has_returned(file)
        )

    def _belongs(self, file: MessageFile) -> bool:
        """Return whether a message matches the queue's filter; put it aside if that is due."""
        assert self._rest.matches is not None
        if self._rest.matches(file):
            return True
        tidies = self.puts_aside and time.monotonic() < self._tidies_until
        try:
            with error_context("the message stays in target/"):
                if tidies and not has_expired(self._context, file) and self._rest.is_due(file):
                    self._moves.put_aside(file, FILTERED)
        except StorageError as error:
            self.pass_over(file, error)
        return False

    # -- what comes back -------------------------------------------------------------------------------------

    @property
    def passes_over(self) -> bool:
        """Whether it remembers messages that came back, and leaves them to others."""
        return bool(self._returned)

    @contextmanager
    def once(self, message: Message) -> Iterator[CameBack]:
        """Do not take this message again in this run if it comes back within the block.

        The same holds for each record of it that becomes a message. Within the block, take no message of its id.
        """
        sidecars = self._context.sidecars
        claimed = sidecars.parse(message.name)
        is_marked = claimed.generated or claimed.mark or message.owner is None
        mark = claimed.mark if is_marked else claim_id(str(message.owner))  # under which it returns if it is lost
        self._returning.append(claimed.id)  # the listing that finds it again also composes the view again
        came_back = CameBack()
        try:
            yield came_back
        finally:
            self._returned.update((name.id, name.mark) for name in came_back.records)
            if came_back.is_to_be_taken:
                pass
            elif message.state in WAITING:
                name = sidecars.parse(message.name)
                self._returned.add((name.id, name.mark))
            elif message.state == "processing":  # lost
                self._returned.add((claimed.id, mark))
            self._returning.remove(claimed.id)

    def has_returned(self, file: MessageFile) -> bool:
        """Return whether a message came back before, or may be coming back at this moment."""
        if not self._returned and not self._returning:
            return False
        name = file.name
        bundle = name.id.removesuffix(f"-{name.record}") if name.record else name.id
        return bundle in self._returning or (name.id, name.mark) in self._returned

    def expire(self, file: MessageFile) -> bool:
        """Move a message to expired/ if its time is over, and it has settled; return whether its time is over."""
        if not has_expired(self._context, file):
            return False
        if self.defer(file):
            return True
        try:
            self._moves.expire_waiting(file)
        except StorageError as error:
            log.warning("an expired message is passed over: %s", error)  # the others are as good as before
        return True

    # -- what goes to a route --------------------------------------------------------------------------------

    def route(self, file: MessageFile, claim: Claim) -> bool:
        """Move a claimed message into the folder of the first route that takes it; return False to deliver it.

        A crash before the move leaves the claim, and any sweep returns the message. `file` is how it waited.
        """
        for route in self.routes.taking(file, claim.own_name):
            try:
                self._moves.route(claim, route.folder)
            except LeaseLost:
                return True  # RACE: a sweep returned it; it was not delivered
            except StorageError as error:
                if error.location is None:
                    self.routes.skip(route, error)
                    continue
                self.pass_over(file, error)
            return True
        return False

    def route_waiting(self, file: MessageFile) -> str | None:
        """Move a waiting message, unclaimed, into the folder of the first route that takes it; return the route's name.

        It returns None if no route took the message: none wants it, somebody may still write to it, it has expired, or
        another process moved it.

        Raises:
            StorageError: the file cannot be looked at; no message was touched.
        """
        _, own_name = naming.next_delivery(self._context, file)
        for route in self.routes.taking(file, own_name):
            if self.expire(file) or self.defer(file):
                return None
            try:
                return None if self._moves.route_waiting(file, route.folder) is None else route.name
            except StorageError as error:
                if error.location is not None:
                    self.pass_over(file, error)
                    return route.name
                self.routes.skip(route, error)
        return None

    # -- what becomes of a claim -----------------------------------------------------------------------------

    def pass_over(self, file: MessageFile, error: StorageError) -> None:
        """Go on with the other messages; `raise_refused` raises the error later.

        If the file system has no room for a claim's name, only another name helps: this is logged once.
        """
        if error.errno != errno.ENAMETOOLONG:
            self._refused = self._refused or error
            return
        if len(self._unclaimable) >= UNCLAIMABLE:
            self._unclaimable.clear()
        self._unclaimable.add(file.filename)
        self._compose()
        log.warning(
            "queue %s: message %r is passed over, as this file system has no room for the name of a claim on it; "
            "`dropq fsck %s` says which name is short enough (%s)",
            *(self._context.name, file.filename, self._context.name, error),
        )

    def raise_refused(self) -> None:
        """Raise the first error of a claim since the last listing, as there is no other message to take."""
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def defer(self, file: MessageFile) -> bool:
        """Offer a file later if it could not be claimed because somebody writes to it again; return whether so."""
        with error_context(UNTOUCHED):
            due = self._context.settling.settles_at(file)
        if due:
            self._target.unsettled[file.filename] = due
        return bool(due)

    def lose(self) -> None:
        """Share the view with the other consumers for a while: one of them was quicker."""
        now = time.monotonic()
        begins = now >= self._shares_until
        self._shares_until = now + SHARING
        self._list_at = LOSSES if not self.losses else self._list_at
        self.losses += 1
        if (begins or (self.losses >= self._list_at and self._target.worn)) and not self.frozen:
            self._list_at = 2 * max(self.losses, LOSSES)
            self.refresh()


@contextmanager
def untouched(context: QueueContext) -> Iterator[None]:
    """Raise dropq's own error when a call in the block fails; where a file is missing, the queue is gone."""
    try:
        yield
    except FileNotFoundError as error:
        raise NoSuchQueue(f"queue {context.name} is not there any more: {context.layout.home}") from error
    except OSError as error:
        raise storage_error(error, UNTOUCHED) from error


def _all_of(*tests: Callable[[MessageFile], bool] | None) -> Callable[[MessageFile], bool] | None:
    asked = [test for test in tests if test is not None]
    return (lambda file: all(test(file) for test in asked)) if asked else None
