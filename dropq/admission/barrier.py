"""`barrier_expression`: a message that waits for all before it, goes to everybody, and holds what is behind it.

A barrier is handed out as topics and jobs are: staged out of sight, committed by one rename, rolled forward by anyone.

    .dropq/barriers/TOKEN/SHARE            a link to the message for each subscription that lives: its share
    processing/TOKEN,0,N~NAME              the message itself; its claim is the commit
    .dropq/barriers/TOKEN/acked|left|aside/SHARE      shares that are settled; when no other is left, the message is

A share is named as a claim, `SUBSCRIPTION-SEQ,DEADLINE,N~NAME`; its SEQ is 0 until the subscription takes it. It is
settled as any message is, by one rename. The message itself is archived when one of its shares was acknowledged and
none set aside, goes to error/ or expired/ when one was, and returns to target/ when all who had one are gone.

What a crash leaves: a folder without a claim was not committed, or is done with, and is removed; a claim without a
folder is returned. Both are seen to by whoever looks next, and by any sweep.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress

from dropq import consumers, names, storage
from dropq.admission import wanting
from dropq.errors import LeaseLost, StorageError
from dropq.lifecycle import Held, Lifecycle, Place, Rest, T, Waiting
from dropq.names import Claim, Name

log = logging.getLogger("dropq")

#: Milliseconds after which a folder without a claim is removed by a sweep, which does not take the policy lock.
STAGING_AGE = 60_000

_ACKED, _LEFT, _ASIDE = "acked", "left", "aside"
_WHY = ".why.json"


class Barrier:
    """What the barriers of a queue are to one subscription; all of it is to be called under the policy lock.

    Args:
        life: the queue's transitions.
        subscription: its id.
    """

    def __init__(self, life: Lifecycle, subscription: str) -> None:
        assert life.config.barrier_expression is not None
        self._life = life
        self._subscription = subscription
        self._matches = wanting(life, life.config.barrier_expression)
        self._out: Shares | None = None
        self._delayed: list[tuple[str, str]] = []

    def look(self, held: Collection[str]) -> None:
        """See whether a barrier is out, by what lies in processing/, and finish what a crash left half-done."""
        self._out = None
        for shares in all_shares(self._life):
            # RACE: where there are no locks, or the lock file was removed, it may have been claimed since the listing.
            is_claimed = any(file.startswith(f"{shares.token},") for file in held)
            if not is_claimed and self._life.find_claim(shares.token) is None:
                shares.clear()  # nobody stages a barrier while we have the lock
            elif not shares.complete():
                self._out = shares

    @property
    def is_out(self) -> bool:
        """Whether a barrier is handed out: nothing else is, until it is settled."""
        return self._out is not None

    def is_one(self, waiting: Waiting) -> bool:
        """Tell whether a waiting message is a barrier."""
        return self._matches(waiting)

    def share(self, owner: str, deadline: int, wanted: Callable[[str], bool]) -> tuple[Held, Lifecycle] | None:
        """Take the subscription's share of the barrier that is out, and what settles it; None where it has none.

        Args:
            owner: what identifies the claim.
            deadline: when its lease runs out, in ms since 1970; 0 for never.
            wanted: returns whether a share is to be taken, by its file name.
        """
        if self._out is None:
            return None
        held = self._out.take(self._subscription, owner, deadline, wanted)
        return None if held is None else (held, self._out)

    def look_at_delayed(self) -> None:
        """See what was given back and is delayed: that is not settled.

        It is to be called before target/ is listed: what a sweep lets in meanwhile is seen here or there.
        """
        delayed = storage.names_in(self._life.layout.delayed)
        self._delayed = [_place(self._life, file) for file in delayed if _was_delivered(self._life, file)]

    def hand_out(self, waiting: Waiting, *, alone: Callable[[], bool]) -> None:
        """Hand out a barrier that is the first of what waits, while nothing is held, unless it has to wait.

        Args:
            waiting: the barrier.
            alone: tells whether the policy lock is still ours.
        """
        life = self._life
        if any(place < _place(life, waiting.file, waiting.arrival) for place in self._delayed):
            return
        token = names.owner(f"{names.BARRIER}-{secrets.token_hex(5)}", 0)
        shares = Shares(life, token)
        staged = shares.prepare(waiting, {self._subscription, *_alive(life)})
        # The commit. Who dies before it leaves a folder that belongs to no claim.
        # RACE: a script that takes the message by `mv`; whose rename succeeds has it.
        if not staged or not alone() or life.claim(waiting, token, 0) is None:
            shares.clear()
        else:
            self._out = shares

    def leave(self) -> None:
        """Give up what the subscription has of barriers: it ends."""
        give_up(self._life, self._subscription)


class Shares(Lifecycle):
    """The shares of one barrier: a life of their own, in a folder of their own, at whose end the barrier is settled.

    Args:
        life: the queue's transitions, which settle the barrier itself.
        token: what claims the barrier.
    """

    def __init__(self, life: Lifecycle, token: str) -> None:
        self._queue = life
        #: What claims the barrier.
        self.token = token
        self._folder = f"{life.layout.barriers}/{token}"
        super().__init__(
            life.layout.holding_in(self._folder),
            life.config,
            storage=life.storage,
            sidecars=life.sidecars,
            reasons=life.reasons,
            clock=life.clock,
        )

    # -- handing out -------------------------------------------------------------------------------------------

    def prepare(self, waiting: Waiting, subscriptions: Iterable[str]) -> bool:
        """Link a waiting message for each subscription; False when it is gone.

        The folder is hidden until it is whole: a listing that a network file system keeps shows all shares or none.
        """
        _, file = self.next_delivery(waiting.file)
        hidden = f"{self._queue.layout.barriers}/.{self.token}"
        try:
            for folder in (hidden, f"{hidden}/{_ACKED}", f"{hidden}/{_LEFT}", f"{hidden}/{_ASIDE}"):
                self.storage.make_folder(folder)
            for subscription in subscriptions:
                share = self._share(subscription, file).filename
                self.storage.link_or_copy(f"{self._queue.layout.target}/{waiting.file}", f"{hidden}/{share}")
            self.storage.rename_folder(hidden, self._folder)
        except BaseException as error:
            self.storage.remove_tree(hidden)
            if isinstance(error, FileNotFoundError):
                return False
            raise
        return True

    def _share(self, subscription: str, file: str) -> Held:
        """Return a share that its subscription has not taken yet, or is to take again."""
        return Held(self._folder, Claim(names.owner(subscription, 0), 0, 0), file)

    def take(self, subscription: str, owner: str, deadline: int, wanted: Callable[[str], bool]) -> Held | None:
        """Take the share of a subscription; None when it has none that is free and wanted."""
        for share in self.held():
            if share.claim.subscription != subscription or not _is_free(share) or not wanted(share.file):
                continue
            name = self.sidecars.parse(share.file)
            if name.not_before > self.clock.now_ms():
                return None
            taken = Held(self._folder, Claim(owner, deadline, name.delivery_count + 1), share.file)
            with suppress(FileNotFoundError):  # RACE: a sweep took the subscription for dead
                self.storage.rename(share.path, taken.path)
                return taken
        return None

    def held(self) -> list[Held]:
        """Return the shares that are not settled."""
        split = (names.split_claim(file) for file in storage.names_in(self._folder))
        return [Held(self._folder, claim, file) for claim, file in split if claim is not None]

    # -- settling a share --------------------------------------------------------------------------------------

    def archive(self, held: Held, *, synced: bool = True) -> Place:
        """Acknowledge a share; the last one archives the barrier."""
        self._settle(held, _ACKED)
        return Place("processed", held.file)

    def archived(self, place: Place | None = None, fate: str = "") -> None:
        """Do nothing: a share is no message, and the barrier is made durable when it is settled."""

    def _put_back(self, held: Held, name: Name) -> Place:
        """Return a share to its subscription, which is to take it again."""
        again = self._share(held.claim.subscription, self.sidecars.fit(self.unique(name)))
        self._leave(held, self.storage.rename, again.path)
        return Place("delayed" if name.not_before else "target", again.file)

    def set_aside(
        self,
        held: Held,
        state: str,
        reason: str,
        details: Mapping[str, object] | None = None,
        *,
        cancel: bool = False,
    ) -> Place:
        """Refuse a share: the barrier goes to error/ or expired/ when all are settled, with this reason."""
        why = {"state": state, "reason": reason, "details": {"holder": held.claim.owner, **(details or {})}}
        try:
            self.storage.write_small(f"{self._folder}/{_WHY}", json.dumps(why).encode())
        except FileNotFoundError as error:
            raise LeaseLost(self._lost(held)) from error
        self._settle(held, _ASIDE)
        return Place(state, held.file)

    def _settle(self, held: Held, how: str) -> None:
        self._leave(held, lambda path: self.storage.rename(path, f"{self._folder}/{how}/{held.filename}"))
        self.complete()

    def _leave(self, held: Held, move: Callable[[str, *Rest], T], *args: *Rest) -> T:
        if self._queue.find_claim(self.token) is None:
            raise LeaseLost(self._lost(held))  # somebody settled, or requeued, the barrier itself
        try:
            return super()._leave(held, move, *args)
        except StorageError as error:
            if storage.is_there(self._folder, self.clock):
                raise
            raise LeaseLost(self._lost(held)) from error

    # -- settling the barrier ----------------------------------------------------------------------------------

    def complete(self) -> bool:
        """Settle the barrier when no share is left; tell whether none is.

        RACE: whoever settled the last share, whoever looks next, and sweeps; whose rename succeeds settles it.
        """
        if self.held() or self.held():  # RACE: a listing may miss a file that is being renamed; two in a row do not
            return False
        barrier = self._queue.find_claim(self.token)
        if barrier is not None:
            with suppress(LeaseLost):
                self._settle_barrier(barrier)
        self.clear()
        return True

    def _settle_barrier(self, barrier: Held) -> None:
        if storage.names_in(f"{self._folder}/{_ASIDE}"):
            self._queue.set_aside(barrier, *self._why())
        elif storage.names_in(f"{self._folder}/{_ACKED}"):
            self._queue.archive(barrier)
        else:
            delivered = any(
                _number(file) >= barrier.claim.number for file in storage.names_in(f"{self._folder}/{_LEFT}")
            )
            self._queue.give_back(barrier, counted=delivered, delay=0)  # not delayed: what is behind it would pass it

    def _why(self) -> tuple[str, str, Mapping[str, object]]:
        """Return where the barrier goes, with the reason and its details, as the last to set a share aside wrote it."""
        try:
            said = storage.parse_json(storage.read_small(f"{self._folder}/{_WHY}") or b"null")
            state, reason, details = said["state"], said["reason"], dict(said["details"])  # type: ignore[index]
            if state in ("error", "expired"):
                return state, str(reason), details
        except (ValueError, TypeError, KeyError) as error:  # it was cut off by a power cut, or by hand
            log.warning("%s/%s is damaged: %s", self._folder, _WHY, error)
        return "error", "rejected", {}

    def clear(self) -> None:
        """Remove the folder, whole: its claim, if it is made in this moment, finds all of it or nothing."""
        gone = f"{self._queue.layout.barriers}/.gone-{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            self.storage.rename_folder(self._folder, gone)
            self.storage.remove_tree(gone)

    def sweep(self) -> int:
        """Give back what outlived its lease, and give up what nobody can take any more; return how many there were."""
        seen_to = 0
        now, known = self.clock.now_ms(), consumers.known(self._queue.layout.consumers)
        for share in self.held():
            share.as_seen = True  # RACE: whoever renewed it since the listing keeps it
            with suppress(LeaseLost):
                if _is_free(share) and share.claim.subscription not in known:
                    self._settle(share, _LEFT)
                    seen_to += 1
                elif 0 < share.claim.deadline <= now:
                    self.give_back(share)
                    seen_to += 1
        self.complete()
        return seen_to

    def leave(self, subscription: str) -> int:
        """Give up the shares of one subscription; return how many it had."""
        left = 0
        for share in self.held():
            if share.claim.subscription == subscription:
                with suppress(LeaseLost):
                    self._settle(share, _LEFT)
                    left += 1
        return left


def sweep(life: Lifecycle, claims: Iterable[Held]) -> int:
    """Give back shares whose leases ran out, and finish what crashes left; return how many there were.

    The shares of the dead are given up before their deaths are forgotten, by `give_up`. It takes no lock: each step is
    one rename, which somebody else may have made.

    Args:
        life: the queue's transitions.
        claims: what lies in processing/.
    """
    seen_to = 0
    for name in storage.names_in(life.layout.barriers):
        path = f"{life.layout.barriers}/{name}"
        if name[0] == "." and life.age_ms(path) > STAGING_AGE:
            life.storage.remove_tree(path)  # who was making it, or removing it, is dead
    for shares in all_shares(life):
        if life.find_claim(shares.token) is not None:
            seen_to += shares.sweep()
        elif life.age_ms(shares.layout.processing) > STAGING_AGE:
            shares.clear()
    for held in claims:
        if held.claim.of_barrier and not storage.is_there(f"{life.layout.barriers}/{held.claim.owner}", life.clock):
            with suppress(LeaseLost):
                life.give_back(held, counted=False, delay=0)
                seen_to += 1
    return seen_to


def give_up(life: Lifecycle, subscription: str) -> int:
    """Give up the shares of a subscription that ends, or is dead; return how many it had."""
    return sum(shares.leave(subscription) for shares in all_shares(life))


def sharers(life: Lifecycle) -> set[str]:
    """Return the subscriptions that have a share of a barrier, taken or not."""
    return {share.claim.subscription for shares in all_shares(life) for share in shares.held()}


def find_share(life: Lifecycle, owner: str) -> tuple[Held, Lifecycle] | None:
    """Return the share of a barrier that a claim took, and what settles it."""
    for shares in all_shares(life):
        if (share := shares.find_claim(owner)) is not None:
            return share, shares
    return None


def all_shares(life: Lifecycle) -> Iterator[Shares]:
    """Yield the shares of each barrier that is out, or staged; a hidden folder is not whole, or not any more."""
    for entry in storage.entries(life.layout.barriers):
        if entry.name[0] != "." and entry.is_dir(follow_symlinks=False):
            yield Shares(life, entry.name)


def give_up_old(life: Lifecycle, known: Collection[str], seconds: float) -> int:
    """Give up shares without a lease whose holders have no sign of life, and that were taken so long ago."""
    given_up = 0
    for shares in all_shares(life):
        for share in shares.held():
            unknown = not share.claim.deadline and share.claim.subscription not in known
            if unknown and life.age_ms(share.path) >= seconds * 1000:
                given_up += shares.leave(share.claim.subscription)
    return given_up


def _is_free(share: Held) -> bool:
    return share.filename.startswith(f"{names.owner(share.claim.subscription, 0)},")


def _number(file: str) -> int:
    """Return the number of the last delivery of a share."""
    claim, name = names.split_claim(file)
    return max(names.parse(name).delivery_count, claim.number if claim is not None else 0)


def _was_delivered(life: Lifecycle, file: str) -> bool:
    return life.sidecars.parse(names.split_claim(file)[1]).delivery_count > 0


def _place(life: Lifecycle, file: str, arrival: int = 0) -> tuple[str, str]:
    """Return what sorts a message by time alone."""
    _, time, name = names.order(life.sidecars.parse(names.split_claim(file)[1]), arrival)
    return time, name


def _alive(life: Lifecycle) -> Iterator[str]:
    """Yield the subscriptions that live, and those of which nobody here can tell."""
    for subscription in consumers.known(life.layout.consumers):
        if not consumers.is_dead(life.layout.consumers, subscription):
            yield subscription
