"""The mover: what the selectors of a queue do with a message that waits in it.

A MOVE spends a credit, a file that it makes first, and then renames the message into the other queue's target/: a crash
leaves the message in one of the two, and at worst a credit too many, which an audit removes. A COPY is a commit of
many, as the distribution of a topic is. A BOUNCE is one rename. A message that no selector takes now stays where it is.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from dropq.errors import ConfigError, DropqError, LeaseLost, NoSuchQueue, Unavailable
from dropq.format.claims import Claim, router_claims
from dropq.format.credits import HOPS_LIMIT, Credit, Via
from dropq.format.message_file import MessageFile
from dropq.lifecycle import credits
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.expiry import has_expired
from dropq.lifecycle.giving import row_to
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.queue_notes import copied_in, is_copied
from dropq.lifecycle.settlement import Claims
from dropq.lifecycle.transfers import RowDestination, own_mark
from dropq.policies.lock import PolicyLock
from dropq.policies.selectors import InUse
from dropq.routing.plans import Destination, Plan, Planner
from dropq.staging.copies import LEASE, Renewal
from dropq.staging.destinations import DestinationFolder, give_word, make_known
from dropq.staging.fan_out import fan_out, set_closed_aside
from dropq.storage import reading
from dropq.storage.clock import lease_end
from dropq.storage.failures import describe

log = logging.getLogger("dropq")


class Mover:
    """Does what the selectors of one queue say."""

    def __init__(self, context: QueueContext, moved: Counter[str]) -> None:
        self._context = context
        self._moves = Moves(context)
        self._planner = Planner(context)
        self.selectors = self._planner.selectors
        self._lock = PolicyLock(context, keeps_open=True)
        self._made = set[str]()
        self._owners = router_claims()
        #: How many messages each selector moved, copied or bounced until now.
        self.moved = moved
        #: Why the last message given to `take` stays; "" if it left.
        self.blocked_by = ""

    def refresh(self) -> None:
        """Read the selectors again."""
        self._planner.refresh()
        for one in self.selectors.in_use:
            if one.selector.credit is not None and one.folder not in self._made:
                self._context.storage.make_folder(one.folder)  # so that a watch sees when a credit is free again
                self._made.add(one.folder)

    @property
    def credit_folders(self) -> list[str]:
        """The folders of its selectors' credits: when a file leaves one of them, a credit is free again."""
        folders = (one.folder for one in self.selectors.in_use if one.selector.credit is not None)
        return list(filter(reading.exists, folders))

    def rest(self) -> None:
        """Close the file of its lock, until it moves a message again."""
        self._lock.close()

    def take(self, file: MessageFile) -> bool:
        """Do what the selectors say with a waiting message; return whether it has left target/."""
        self.blocked_by = ""
        if not self.selectors.for_waiting:
            return False
        with self._context.error_context("the message stays in target/, unless another process took it"):
            return not self._context.settling.settles_at(file) and self._take(file)

    def _take(self, file: MessageFile) -> bool:
        if has_expired(self._context, file):
            return self._moves.expire_waiting(file)
        passed = dict[str, str]()
        while (plan := self._planner.plan(file, passed)).why in ("move", "bounce"):
            (one,), (destination,) = plan.by, plan.destinations
            done = self._try(file, one, destination)
            if not isinstance(done, str):
                if done:
                    self.moved[one.selector.name] += 1
                return True
            passed[one.selector.name] = done
        if plan.why == "copy":
            return self._copy(file, plan)
        if plan.why == "set-aside":
            return self._set_aside(file, plan)
        self.blocked_by = plan.detail
        return False

    def _try(self, file: MessageFile, one: InUse, destination: Destination) -> bool | str:
        """Move a message by a selector; return False if another process took it first, or why it stays."""
        try:
            if one.selector.op == "bounce":
                return self._moves.bounce(file, destination.context) is not None
            return self._move(file, one, destination)
        except (NoSuchQueue, ConfigError, Unavailable) as error:
            return str(error)

    def _set_aside(self, file: MessageFile, plan: Plan) -> bool:
        """Make a dead letter of a message that cannot be delivered; return True, as it has left target/."""
        if plan.reason == "no_return_address" and (why := plan.details.get("detail")):
            log.warning("queue %s: message %s is not bounced: %s", self._context.name, file.name.id, why)
        self._moves.to_dead_letter(file, plan.reason, plan.details)
        return True

    # -- move --------------------------------------------------------------------------------------------------------

    def _move(self, file: MessageFile, one: InUse, destination: Destination) -> bool | str:
        """Move a message under a credit; return False if another process took it first, or why it stays."""
        context = self._context
        via = Via.new(one.selector.token)
        with self._lock.acquire() as locked:
            if not locked:
                return f"another process holds the lock {context.layout.lock}"
            if not one.is_current:
                return "it was changed just now"  # RACE: the next refresh reads it again
            with context.error_context("the message stays in target/"):
                if not one.may_spend():
                    return one.no_credit
                below = credits.below(context, file.filename)[: HOPS_LIMIT - 1]
                copied = is_copied(self._context.layout.private, file.name)
                id = context.sidecars.full(file.name).id  # a longer name, as in a subscription, has no stand-in for it
                one.spend(via, Credit(id, destination.context.name, below, copied=copied))
            try:
                gone = self._moves.move_on(file, destination.context, via) is None
            except DropqError:
                with suppress(OSError):  # of the refresh, whose error would hide this one
                    if reading.exists(f"{context.layout.target}/{file.filename}"):
                        self._unspend(via)
                raise
            if gone:
                self._unspend(via)  # RACE: a consumer or another router took it
        return not gone

    def _unspend(self, via: Via) -> None:
        """Remove the credit of a message that was not moved; what cannot be removed now, an audit removes."""
        try:
            credits.unspend(self._context, via)
        except OSError as error:
            log.info("queue %s: credit %s is free only after an audit: %s", self._context.name, via, describe(error))

    # -- copy --------------------------------------------------------------------------------------------------------

    def _copy(self, file: MessageFile, plan: Plan) -> bool:
        """Make all copies of a message by one commit; return False if it stays."""
        context, claims = self._context, Claims(self._context)
        try:
            to = {
                (folder := self._folder_for(destination)).token: (folder, destination)
                for destination in plan.destinations
            }
            folders, destinations = zip(*to.values(), strict=True)  # two selectors may copy it to one queue: once
            with context.error_context("the message stays in target/"):
                mark = own_mark(context)
        except DropqError as error:
            self.blocked_by = f"its copies wait: {error}"
            return False
        claim = claims.claim(file, next(self._owners), lease_end(context.clock, LEASE))
        if claim is None:
            return True  # RACE: a consumer or another router took it
        copied, back = self._copied_names(file, claim, mark)
        archived = plan.is_last and not self._planner.unroutable.has_subscriptions
        try:
            renew = Renewal(claims, claim)
            for folder in folders:
                make_known(context.layout, folder, context.storage)

            def write(folder: str, at: int, parts: Sequence[str]) -> None:
                for part, destination in zip(parts, destinations, strict=True):
                    renew()
                    like = destination.context.storage if destination.is_near else None
                    context.storage.copy(claim.path, f"{folder}/{part}", like=like, between=renew)

            done = fan_out(
                context, claim, folders, write, copied, context.layout.target, back_as=None if archived else back,
            )  # fmt: skip
        except LeaseLost:
            return True  # RACE: a sweep took this process for dead: the next pass does it again
        except Unavailable as error:  # somebody writes to it: tried again at once, it would have no time to settle
            log.info("queue %s: a message waits for its copies: %s", context.name, error)
            with suppress(LeaseLost):
                claims.give_back(claim, counted=False, delay=context.settling.patience)
            return True
        except BaseException as error:
            with suppress(LeaseLost):
                if isinstance(error, DropqError | OSError) and set_closed_aside(context, claim):
                    return True
                claims.give_back(claim, counted=False, delay=0)
            raise
        if done is None:
            with suppress(LeaseLost):
                claims.release(claim, counted=False)
            return True
        self.moved.update(plan.selectors)
        return True

    def _copied_names(self, file: MessageFile, claim: Claim, mark: str) -> tuple[str, str]:
        """Return the name of a claimed message's copies, and the name under which the message itself waits again."""
        sidecars = self._context.sidecars
        name = sidecars.parse(claim.own_name)
        copied = replace(
            name.unmarked, delivery_count=0, cancels=0, died=0, not_before=0, via="", hops=name.hops + 1, cut=0,
            copy=os.urandom(5).hex(), foreign=False, since=self._context.clock.now_ms(), copied="", replayed=False,
            owned=False,
        )  # fmt: skip
        back = replace(
            name.unmarked, copied=copied_in(mark), copy="" if name.via else os.urandom(5).hex(), foreign=False
        )
        if not name.generated and not name.since:
            back = replace(back, since=file.arrival or reading.changed_ms(claim.path))  # keeps its place in the order
        return sidecars.fit(copied), sidecars.fit(back)

    def _folder_for(self, known: Destination) -> DestinationFolder:
        """Open the folder that gets a copy: of the queue, or of the row for it on another file system."""
        destination, path = known.context, self._context.root.layout.path
        try:
            folder = destination.layout.base
            if not known.is_near:
                folder = row_to(
                    self._context, RowDestination(destination.root.layout, destination.name, destination.layout)
                ).folder
            else:
                give_word(destination)
            return DestinationFolder(path, os.path.relpath(folder, path))
        except OSError as error:
            raise destination.refused(error, "the message stays in target/") from error
