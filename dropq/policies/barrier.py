"""`barrier_expression`: a barrier waits for all messages before it, goes to all subscriptions, and holds all behind it.

A barrier is handed out as a job is sent: staged out of sight, committed by one rename, rolled forward by anyone;
docs/protocol.md has the steps. A folder that is still hidden is dropped by a rename, too: either it is committed, or it
is dropped. Its claim is returned after that, when the holder cannot commit any more.

A crash leaves a folder without a claim, or a claim whose folder is hidden or gone. Such a folder was not committed, or
is done with, and is removed; such a claim is returned to target/. The next attempt does that, or any sweep.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from shlex import quote
from typing import NamedTuple, Unpack

from dropq.errors import LeaseLost, StorageError
from dropq.format import names
from dropq.format.claims import BARRIER, Claim, Location, claim_owner
from dropq.format.layout import DEAD_LETTER, GONE_PREFIX, WITH_REASON
from dropq.format.message_file import MessageFile
from dropq.lifecycle import ages, naming
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.decision import Decision
from dropq.lifecycle.endings import Details, HowReturned, returned
from dropq.lifecycle.holders import claim_status
from dropq.lifecycle.processing import claims_in, committed_files, find_claim, lost, move_out
from dropq.lifecycle.reasons import as_json
from dropq.lifecycle.settlement import BODY_CHANGED, Claims, Settlement
from dropq.policies.backlog import MAY_TAKE, holders_of
from dropq.policies.matching import matcher
from dropq.storage import liveness, reading
from dropq.storage.failures import describe, error_context, storage_error
from dropq.storage.liveness import Signs

log = logging.getLogger("dropq")

#: What sorts messages by time, whatever their priority.
TimeKey = tuple[str, str]

_ACKED, _LEFT, _ASIDE = "acked", "left", "aside"
_WHY = ".why.json"
#: What becomes of a share that could not be settled.
_STAYS = "the share of the barrier is still held"
#: What is done with a barrier that ends so.
_DOES = {_ACKED: "archives it", _LEFT: "returns it", _ASIDE: "sets it aside"}


class Before(NamedTuple):
    """What may keep a barrier waiting, listed in the order in which messages pass."""

    claimed: Collection[MessageFile]
    #: How many messages are committed as a whole, and have not arrived.
    committed: int
    #: The keys of the delayed messages that were delivered before: these are not settled.
    returned: Sequence[TimeKey]

    @classmethod
    def of(cls, context: QueueContext, claimed: Collection[MessageFile]) -> Before:
        """List it, after processing/ and before target/.

        RACE: what a sweep moves from delayed/ to target/ meanwhile is in one listing or in both.
        """
        committed = sum(1 for _ in committed_files(context))
        delayed = map(context.sidecars.file, reading.names_in(context.layout.delayed))
        return cls(claimed, committed, [_time_key(file) for file in delayed if file.name.delivery_count > 0])

    def decide(self, barrier: MessageFile, waiting: int, living: Collection[str]) -> Decision:
        """Return whether the first barrier, behind so many `waiting`, goes to who is `living`; else why not."""
        own = _time_key(barrier)
        claimed, returned = len(self.claimed) + self.committed, sum(key < own for key in self.returned)
        if waiting or claimed or returned:
            verb, was = "is" if claimed == 1 else "are", "was" if returned == 1 else "were"
            before = f"{waiting} wait{'s' * (waiting == 1)}, {claimed} {verb} held, {returned} {was} given back"
            text = f"it is a barrier, and waits until all before it are settled: {before}"
            return Decision(False, "barrier", text, holders_of(self.claimed))
        if not living:
            return Decision(False, "barrier", "it is a barrier, and waits until a consumer subscribes")
        who = "the only subscription" if len(living) == 1 else f"all {len(living)} subscriptions"
        return Decision(True, "ready", f"it is a barrier, and goes to {who} when the next consumer asks")


class Barrier:
    """The barriers of a queue, as one subscription meets them; its methods need the policy lock."""

    def __init__(self, context: QueueContext, subscription: str) -> None:
        assert context.config.barrier_expression is not None
        self._context = context
        self._subscription = subscription
        #: Returns whether a waiting message is a barrier.
        self.matches = matcher(context, context.config.barrier_expression)
        #: Whether a message may be taken: not while a barrier is handed out, nor when it came back in this attempt.
        self.decision = MAY_TAKE
        self._out: Shares | None = None
        self._before = Before((), 0, ())

    def refresh(self, claimed: Collection[MessageFile]) -> bool:
        """Find the barrier that is handed out, if any, by what is in processing/, and finish what a crash left.

        Return whether there was one: what was listed of target/ until now may lack it, and it may be there again.
        """
        self._out, self.decision = None, MAY_TAKE
        found = begun(self._context, (file.claim for file in claimed))
        for shares, claim, is_shown in found:
            if claim is None:
                shares.clear()  # its barrier was settled: the claim is made before the folder is shown
            elif not is_shown:
                # No other consumer hands out a barrier while this one has the lock: the one that claimed it died.
                shares.undo(claim)
                self.decision = shares.behind()  # target/ may have been listed before
            elif unsettled := shares.complete():
                self._out, self.decision = shares, shares.behind(unsettled)
        return bool(found)

    def share(self, owner: str, deadline: int, wanted: Callable[[str], bool]) -> tuple[Claim, Shares] | None:
        """Take the subscription's share of the barrier that is handed out; return it, and what settles it.

        Return None if there is no share to take, or `wanted` returns False for its file name. The lease runs out at a
        deadline in ms since 1970; 0 for never.
        """
        claim = None if self._out is None else self._out.take(self._subscription, owner, deadline, wanted)
        return None if self._out is None or claim is None else (claim, self._out)

    def list_before(self, barrier: MessageFile, claimed: Collection[MessageFile]) -> Decision:
        """List what may keep a barrier waiting; return whether it has to wait, whatever is in delayed/ and target/."""
        layout, self._before = self._context.layout, Before(claimed, 0, ())
        if not claimed:
            reading.ask_server(layout.private)  # on NFS another host may have made staged/ in it just now
            for entry in reading.entries(layout.staged):
                reading.ask_server(entry.path)
            self._before = Before.of(self._context, claimed)
        return self._before._replace(returned=()).decide(barrier, 0, (self._subscription,))

    def hand_out(self, file: MessageFile, waiting: int, *, alone: Callable[[], bool]) -> Decision:
        """Hand out a barrier, unless something is before it; return why nothing else may be taken.

        So many messages are known to be `waiting` before it; `alone` returns whether this consumer still has the lock.
        """
        context = self._context
        found = self._before.decide(file, waiting, (self._subscription,))
        if not found.allowed:
            return found
        token = claim_owner(f"{BARRIER}-{secrets.token_hex(5)}", 0)
        shares = Shares(context, token)
        if not shares.prepare(file, {self._subscription, *Signs(context.layout.consumers).living}):
            return shares.behind()
        claim = None
        try:
            # RACE: with a script that claims the message by `mv`. The process whose rename succeeds has it.
            claim = Claims(context).claim(file, token, 0) if alone() else None
            if claim is not None and shares.commit():
                self._out = shares
        finally:
            if self._out is None:
                shares.drop(claim)
        return shares.behind()


class Shares(Settlement):
    """Settles one barrier's shares, in a folder of their own; the last share settles the barrier."""

    def __init__(self, context: QueueContext, token: str) -> None:
        self._queue = context
        #: The owner of the claim on the barrier.
        self.token = token
        self._folder = f"{context.layout.barriers}/{token}"
        self._hidden = f"{context.layout.barriers}/.{token}"
        self.context = replace(context, layout=context.layout.with_claims_in(self._folder))
        self._claims = Claims(self.context)

    # -- what it keeps waiting -------------------------------------------------------------------------------------

    def behind(self, unsettled: Iterable[Claim] = ()) -> Decision:
        """Return why a message waits behind the barrier, of which these shares are not settled."""
        holders = tuple(sorted(share.subscription for share in unsettled))
        return Decision(False, "barrier", f"it waits until the barrier with the claim {self.token} is settled", holders)

    def decide(self, *, is_shown: bool) -> tuple[Decision, Decision]:
        """Return whether the next attempt ends or returns the barrier, and whether what is behind it may be taken."""
        unsettled = self.claims() if is_shown else []
        behind = self.behind(unsettled)
        if count := len(behind.holders):
            who = "subscription has not settled its" if count == 1 else "subscriptions have not settled their"
            return Decision(False, "barrier", f"{count} {who} share of it", behind.holders), behind
        end = self._end() if is_shown else _LEFT
        how = "all shares of it are settled" if is_shown else "a consumer hands it out just now, or died as it did"
        sweep = f"any consumer, or `dropq sweep {quote(self._queue.name)}`"
        itself = Decision(True, "barrier", f"{how}: {sweep}, {_DOES[end]}")
        return itself, behind if end == _LEFT else MAY_TAKE

    # -- handing out -------------------------------------------------------------------------------------------

    def prepare(self, file: MessageFile, subscriptions: Iterable[str]) -> bool:
        """Link a waiting message for each subscription, in a hidden folder; return False if message or folder is gone.

        RACE: a sweep that takes this process for dead drops the folder, and none of the calls here makes it again.
        """
        _, own_name = naming.next_delivery(self.context, file)
        storage = self.context.storage
        try:
            storage.make_folder(self._hidden)
            for how in (_ACKED, _LEFT, _ASIDE):
                storage.make_folder(f"{self._hidden}/{how}", parents=False)
            for subscription in subscriptions:
                share = self._share(subscription, own_name).filename
                storage.link_or_copy(f"{self._queue.layout.target}/{file.filename}", f"{self._hidden}/{share}")
        except BaseException as error:
            storage.remove_tree(self._hidden)
            if isinstance(error, FileNotFoundError):
                return False
            raise
        return True

    def commit(self) -> bool:
        """Show the folder, whose message is claimed: from here on shares are taken. Return False if it was dropped.

        A listing that a network file system has kept shows all shares or none.
        """
        try:
            # RACE: with a sweep that takes this process for dead, and drops the folder by a rename.
            self.context.storage.rename_folder(self._hidden, self._folder)
        except OSError as error:
            if not reading.is_there(self._folder, self.context.clock):
                if isinstance(error, FileNotFoundError):
                    return False
                raise
        return True

    def drop(self, claim: Claim | None) -> None:
        """Return the claim, if there is one, and remove the hidden folder: only its own process calls this."""
        if claim is not None:
            self._return(claim)
        self.context.storage.remove_tree(self._hidden)

    def is_hidden(self) -> bool:
        """Return whether the folder is there and not committed."""
        return reading.is_there(self._hidden, self.context.clock)

    def undo(self, claim: Claim) -> bool:
        """Return a claim whose folder is hidden or gone; return False if the folder is shown, or the claim is gone."""
        self.clear(hidden=True)
        return not reading.is_there(self._folder, self.context.clock) and self._return(claim)

    def _return(self, claim: Claim) -> bool:
        with suppress(LeaseLost):  # RACE: a sweep returned it, or a script took it
            Claims(self._queue).release(claim, counted=False)
            return True
        return False

    def _share(self, subscription: str, own_name: str) -> Claim:
        """Return a free share: its subscription has not taken it yet, or is to take it again."""
        return Claim(claim_owner(subscription, 0), 0, 0, own_name, self._folder)

    def take(self, subscription: str, owner: str, deadline: int, wanted: Callable[[str], bool]) -> Claim | None:
        """Take the share of a subscription; return None if it has no share that is free and wanted."""
        for share in self.claims():
            if share.subscription != subscription or not _is_free(share) or not wanted(share.own_name):
                continue
            name = self.context.sidecars.parse(share.own_name)
            if name.not_before > self.context.clock.now_ms():
                return None
            taken = Claim(owner, deadline, name.delivery_count + 1, share.own_name, self._folder)
            with suppress(FileNotFoundError):  # RACE: a sweep took the subscription for dead, and gave up its share
                self.context.storage.rename(share.path, taken.path)
                if not name.generated:
                    taken.body = self.context.settling.version(taken.path)
                return taken
        return None

    def claims(self) -> list[Claim]:
        """List the shares that are not settled."""
        return list(claims_in(self.context))

    # -- settling a share --------------------------------------------------------------------------------------

    def archive(self, claim: Claim, *, later: dict[str, None] | None = None) -> Location:
        """Acknowledge a share; the last one archives the barrier, unless somebody wrote to its body meanwhile.

        The barrier is synced when it is settled, not `later`.
        """
        if claim.body is not None:
            with self._barrier_claimed(claim):
                is_changed = self._claims.is_changed(claim)
            if is_changed:
                return self.set_aside(claim, "error", "body_changed", {"detail": BODY_CHANGED})
        self._settle(claim, _ACKED)
        return Location("processed", claim.own_name)

    def give_back(self, claim: Claim, **how: Unpack[HowReturned]) -> Location:
        """Return a share to its subscription, which is to take it again."""
        name, state, reason, details = returned(self.context, claim, **how)
        if reason:
            return self.set_aside(claim, state, reason, details, cancel=how.get("cancel", False))
        again = self._share(claim.subscription, self.context.sidecars.fit(naming.unique(name)))
        with self._barrier_claimed(claim):
            move_out(self.context, claim, self.context.storage.rename, again.path)
        return Location(state, again.own_name)

    def extend(self, claim: Claim, deadline: int) -> Claim:
        """Give a share a new deadline."""
        with self._barrier_claimed(claim):
            return self._claims.extend(claim, deadline)

    def set_aside(
        self, claim: Claim, state: str, reason: str, details: Details | None = None, *, cancel: bool = False
    ) -> Location:
        """Settle a share so that the barrier goes to error/ or expired/, with this reason, when all are settled."""
        why = {"state": state, "reason": reason, "details": {"holder": claim.owner, **(details or {})}}
        try:
            self.context.storage.write_small(f"{self._folder}/{_WHY}", as_json(why))
        except FileNotFoundError as error:
            raise LeaseLost(lost(self.context, claim)) from error
        except OSError as error:
            raise storage_error(error, _STAYS) from error
        self._settle(claim, _ASIDE)
        return Location(state, claim.own_name)

    def _settle(self, claim: Claim, how: str) -> None:
        with self._barrier_claimed(claim):
            move = self.context.storage.rename
            move_out(self.context, claim, lambda path: move(path, f"{self._folder}/{how}/{claim.filename}"))
        try:
            self.complete()
        except (OSError, StorageError) as error:  # the share is settled: the next attempt, or a sweep, goes on
            if isinstance(error, StorageError) and error.location is not None:
                raise  # the barrier is settled, too, only not synced
            log.warning("queue %s: a sweep goes on with the end of a barrier: %s", self._queue.name, describe(error))

    @contextmanager
    def _barrier_claimed(self, claim: Claim) -> Iterator[None]:
        """Raise LeaseLost for a share in the block if the barrier itself was settled or requeued."""
        with error_context(_STAYS):
            if find_claim(self._queue, self.token) is None:
                raise LeaseLost(lost(self.context, claim))
            try:
                yield
            except StorageError as error:
                if reading.is_there(self._folder, self.context.clock):
                    raise
                raise LeaseLost(lost(self.context, claim)) from error

    # -- settling the barrier ----------------------------------------------------------------------------------

    def complete(self) -> list[Claim]:
        """Settle the barrier if all shares are settled; return those that are not.

        RACE: between the consumer that settled the last share, the next attempt, and sweeps. The process whose rename
        succeeds settles the barrier.
        """
        # RACE: a listing may miss a file that is being renamed; two in a row do not.
        if unsettled := self.claims() or self.claims():
            return unsettled
        barrier = find_claim(self._queue, self.token)
        if barrier is not None:
            with suppress(LeaseLost):
                self._settle_barrier(barrier)
        self.clear()
        return []

    def _end(self) -> str:
        """Return how the barrier ends whose shares are settled: as one that was set aside, acknowledged, or left."""
        return next((how for how in (_ASIDE, _ACKED) if reading.names_in(f"{self._folder}/{how}")), _LEFT)

    def _settle_barrier(self, barrier: Claim) -> None:
        if (end := self._end()) == _ASIDE:
            Claims(self._queue).set_aside(barrier, *self._why())
        elif end == _ACKED:
            Claims(self._queue).archive(barrier)
        else:
            left = map(self.context.sidecars.file, reading.names_in(f"{self._folder}/{_LEFT}"))
            delivered = any(share.delivery_count >= barrier.number for share in left)
            # Without a delay, as messages behind the barrier would pass it meanwhile.
            Claims(self._queue).give_back(barrier, counted=delivered, delay=0)

    def _why(self) -> tuple[str, str, Mapping[str, object]]:
        """Return the barrier's state, reason and details, as written when a share was last set aside."""
        try:
            why = reading.parse_json(reading.read_small(f"{self._folder}/{_WHY}") or b"null", any_text=True)
            state, reason, details = why["state"], why["reason"], dict(why["details"])  # type: ignore[index]
            if state in (*WITH_REASON, DEAD_LETTER):
                return state, str(reason), details
        except (ValueError, TypeError, KeyError) as error:  # damaged by a power cut, or by hand
            log.warning("%s/%s is damaged: %s", self._folder, _WHY, error)
        return "error", "rejected", {}

    def clear(self, *, hidden: bool = False) -> None:
        """Remove the folder, or the hidden one, after a rename: others find all of it or nothing, and cannot commit."""
        gone = f"{self._queue.layout.barriers}/{GONE_PREFIX}{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            self.context.storage.rename_folder(self._hidden if hidden else self._folder, gone)
            self.context.storage.remove_tree(gone)

    def sweep(self) -> int:
        """Give back shares whose leases ran out, and give up those of unknown subscriptions; return how many."""
        swept = 0
        now, known = self.context.clock.now_ms(), liveness.known(self._queue.layout.consumers)
        for share in self.claims():
            share.exact = True  # RACE: if it was renewed after the listing, its holder keeps it
            if _is_free(share) and share.subscription not in known:
                swept += self._give_up(share)
            elif share.has_lapsed(now):
                with suppress(LeaseLost):
                    self.give_back(share)
                    swept += 1
        self.complete()
        return swept

    def leave(self, subscription: str) -> int:
        """Give up the shares of one subscription; return how many it had."""
        return sum(self._give_up(share) for share in self.claims() if share.subscription == subscription)

    def _give_up(self, share: Claim) -> bool:
        with suppress(LeaseLost):
            self._settle(share, _LEFT)
            return True
        return False


def sweep(context: QueueContext, claims: Iterable[Claim]) -> int:
    """Give back shares whose leases ran out, and finish what crashes left; return how many shares and barriers.

    The `claims` are what is in processing/. Before this, `give_up` is to give up the shares of subscriptions that are
    found dead. A sweep takes no lock: each step is one rename, which another process may have made first.
    """
    swept = 0
    for name in reading.names_in(context.layout.barriers):
        path = f"{context.layout.barriers}/{name}"
        if name[0] == "." and context.age_ms(path) > ages.DEAD_SHARER:
            if name.startswith(GONE_PREFIX):
                context.storage.remove_tree(path)  # the process that was removing it is dead
            else:
                Shares(context, name[1:]).clear(hidden=True)  # the process that was making it is dead, or stands still
    for shares, claim, is_shown in begun(context, claims):
        if claim is None:
            if context.age_ms(shares.context.layout.processing) > ages.DEAD_SHARER:
                shares.clear()
        elif is_shown:
            swept += shares.sweep()
        elif not shares.is_hidden():
            swept += shares.undo(claim)
    return swept


def give_up(context: QueueContext, subscription: str) -> int:
    """Give up the shares of a subscription that ends, or is dead; return how many it had."""
    return sum(shares.leave(subscription) for shares in all_shares(context))


def sharers(context: QueueContext) -> set[str]:
    """Return the subscriptions that have a share of a barrier, taken or not."""
    return {share.subscription for shares in all_shares(context) for share in shares.claims()}


def begun(context: QueueContext, claims: Iterable[Claim | None]) -> list[tuple[Shares, Claim | None, bool]]:
    """List the barriers that somebody began to hand out: their claims, if there are, and whether shares are shown."""
    shown = list(all_shares(context))
    claimed = {claim.owner: claim for claim in claims if claim is not None and claim.of_barrier}
    # RACE: without locks, or after the lock file was removed, it may have been claimed after the listing.
    found = [(each, claimed.pop(each.token, None) or find_claim(context, each.token), True) for each in shown]
    return [*((Shares(context, claim.owner), claim, False) for claim in claimed.values()), *found]


def handed_out(context: QueueContext, claimed: Iterable[MessageFile]) -> dict[str, tuple[Decision, Decision]]:
    """Return what `Shares.decide` says of each barrier that is handed out, by the owner of its claim in `claimed`."""
    found = begun(context, (file.claim for file in claimed))
    return {shares.token: shares.decide(is_shown=is_shown) for shares, claim, is_shown in found if claim is not None}


def find_share(context: QueueContext, owner: str) -> tuple[Claim, Shares] | None:
    """Return the share with this claim owner, and what settles it; None if there is none."""
    for shares in all_shares(context):
        if (share := find_claim(shares.context, owner)) is not None:
            return share, shares
    return None


def all_shares(context: QueueContext) -> Iterator[Shares]:
    """Yield the shares of each barrier that is handed out; hidden folders are being made or removed."""
    for entry in reading.entries(context.layout.barriers):
        if entry.name[0] != "." and entry.is_dir(follow_symlinks=False):
            yield Shares(context, entry.name)


def give_up_old(context: QueueContext, signs: Signs, seconds: float) -> int:
    """Give up shares without a lease whose holders show no sign of life, and that are this old; return how many."""
    given_up = 0
    for shares in all_shares(context):
        for share in shares.claims():
            if claim_status(share, signs, 0) == "unleased" and context.age_ms(share.path) >= seconds * 1000:
                given_up += shares.leave(share.subscription)
    return given_up


def _is_free(share: Claim) -> bool:
    return share.owner == claim_owner(share.subscription, 0)


def _time_key(file: MessageFile) -> TimeKey:
    _, time, name = names.order(file.name, file.arrival)
    return time, name
