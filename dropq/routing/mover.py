"""The mover: what the selectors of a queue do with a message that waits in it.

A MOVE spends a credit, a file that it makes first, and then renames the message into the other queue's target/: a crash
leaves the message in one of the two, and at worst a credit too many, which a look removes. A COPY is a commit of many,
as the distribution of a topic is. A BOUNCE is one rename. A message that no selector takes now stays where it is.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from dropq.config.selectors import Selector, may_return_to
from dropq.errors import ConfigError, DropqError, InvalidName, LeaseLost, NoSuchQueue, Unavailable
from dropq.format.addresses import check_address
from dropq.format.claims import Claim, router_claims
from dropq.format.credits import HOPS_LIMIT, Credit, Via
from dropq.format.message_file import MessageFile
from dropq.format.names import TOPIC_REPLY
from dropq.lifecycle import credits
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.expiry import has_expired
from dropq.lifecycle.giving import row_to
from dropq.lifecycle.known_queues import copied_in, is_copied, refuse_away
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.transfers import Goal, own_mark
from dropq.lifecycle.transitions import Transitions
from dropq.policies.lock import PolicyLock
from dropq.policies.selectors import InUse, Selectors, path_of
from dropq.policies.send_limits import SendLimits
from dropq.routing.unroutable import Unroutable
from dropq.staging.copies import LEASE, Renewal
from dropq.staging.fan_out import fan_out, set_closed_aside
from dropq.staging.receivers import Receiver, give_word, make_known
from dropq.storage import reading
from dropq.storage.clock import lease_end
from dropq.storage.failures import describe
from dropq.storage.mounts import rename_leads
from dropq.topics.publishing import outlet

log = logging.getLogger("dropq")

#: Seconds after which the router opens a queue that it sends to again, to see its configuration.
OPEN_FOR = 1.0


#: Why a message stays that its selectors cannot be found for.
UNREADABLE = "which selectors take it is not known: a selector, the body or the sidecar cannot be read now"
ONE_IS_UNUSABLE = "no selector takes it, and one of them cannot be used"


def return_address(context: QueueContext, file: MessageFile) -> str:
    """Return the address that a message is bounced to; "" if it has none."""
    return (context.sidecars.full(file.name).reply_to or "").removeprefix(TOPIC_REPLY)


def why_not_bounced(context: QueueContext, selector: Selector, address: str) -> str:
    """Return why a return address counts as none; "" if a bounce may go there.

    Reply-to is data of whoever sent the message: a router does not lend its rights to it.
    """
    if not address or may_return_to(selector, address):
        return ""
    return (
        f"selector {selector.name} returns nothing to {address}: if it may, add that to `to` in "
        f"{path_of(context, selector.name)}"
    )


class Target:
    """A queue that messages are sent to.

    Args:
        source: the queue that they come from.
        address: its address.

    Raises:
        DropqError: it is not there, or cannot be used.
    """

    def __init__(self, source: QueueContext, address: str) -> None:
        named = open_queue(source.root, address)
        self.context = outlet(named).context  # of a view on topics, the topic's
        own = SendLimits(self.context.name, self.context)
        is_view = named.layout.home != self.context.layout.home
        self._limits = SendLimits(address, named, then=own) if is_view else own
        self.opened_at = time.monotonic()
        self._source = source

    @cached_property
    def is_near(self) -> bool:
        """Whether a rename leads there from the queue that messages come from."""
        return rename_leads(self._source.layout.private, self.context.layout.target)

    def why_not(self) -> str:
        """Return why it takes no message now; "" if it takes one, which is then counted."""
        return "" if self._limits.has_room() else f"{self.context.name} is full, or makes senders wait"


class Mover:
    """Does what the selectors of one queue say.

    Args:
        context: the queue.

    Attributes:
        moved: how many messages each selector moved, copied or bounced until now.
        held_by: why the message that was looked at last stays; "" if it went.
    """

    def __init__(self, context: QueueContext) -> None:
        self._context = context
        self._transitions = Transitions(context)
        self.selectors = Selectors(context)
        self._lock = PolicyLock(context)
        self._targets: dict[str, Target] = {}
        self._owners = router_claims()
        self._unroutable = Unroutable(context)
        self.moved: Counter[str] = Counter()
        self.held_by = ""

    def look(self) -> None:
        """Look again which selectors there are."""
        self.selectors.look()
        self._unroutable.refresh()
        for one in self.selectors.in_use:
            if one.selector.credit is not None and not reading.exists(one.folder):
                self._context.storage.make_folder(one.folder)  # so that a watch sees when a credit is free again

    @property
    def credit_folders(self) -> list[str]:
        """The folders of its selectors' credits: when a file leaves one of them, a credit is free again."""
        folders = (one.folder for one in self.selectors.in_use if one.selector.credit is not None)
        return list(filter(reading.exists, folders))

    def take(self, file: MessageFile) -> bool:
        """Do what the selectors say with a waiting message; return whether it has left its place in target/.

        Raises:
            StorageError: it stays in target/; or it was moved and not synced, as the error says.
        """
        self.held_by = ""
        if not self.selectors.serves_waiting:
            return False
        with self._context.error_context("the message stays in target/, unless another process took it"):
            return not self._transitions.settles_at(file) and self._take(file)

    def _take(self, file: MessageFile) -> bool:
        choice = self.selectors.choice(file)
        if choice is None:
            return self._hold(UNREADABLE)
        if has_expired(self._context, file):
            return self._transitions.expire_waiting(file)
        if choice.copying:
            return self._copy(file, choice.copying, last=not choice.moving)
        if choice.moving:
            return self._move_one(file, choice.moving)
        return False if choice.stays else self._take_unroutable(file)

    # -- move, bounce ------------------------------------------------------------------------------------------------

    def _move_one(self, file: MessageFile, movers: Sequence[InUse]) -> bool:
        if file.name.hops >= HOPS_LIMIT:
            return self._set_aside(file, "hop_limit", {"hops": file.name.hops})
        why = list[str]()
        for one in movers:
            done = self._try(file, one)
            if isinstance(done, str):
                why.append(f"selector {one.selector.name}: {done}")
                continue
            self.moved[one.selector.name] += done
            return True
        return self._hold("; ".join(why))

    def _try(self, file: MessageFile, one: InUse) -> bool | str:
        """Move a message by a selector; return False if another process took it first, or why it stays."""
        if why := one.out_of_credit:
            return why
        try:
            if one.selector.op == "bounce":
                return self._bounce(file, one.selector)
            target = self._target(one.selector.to or "")
            return target.why_not() or self._move(file, one, target)
        except (NoSuchQueue, ConfigError, Unavailable) as error:
            return str(error)

    def _move(self, file: MessageFile, one: InUse, target: Target) -> bool | str:
        """Move a message under a credit; return False if another process took it first, or why it stays."""
        context, selector = self._context, one.selector
        via = Via.new(selector.token)
        with self._lock.held(lambda: None) as locked:
            if not locked:
                return f"another process holds the lock {context.layout.lock}"
            if not one.is_current:
                return "it was changed just now"  # RACE: the next look reads it again
            with context.error_context("the message stays in target/"):
                if not one.may_spend():
                    return f"it has no credit left of {selector.credit}"
                below = credits.below(context, file.filename)[: HOPS_LIMIT - 1]
                copied = is_copied(self._context.layout.private, file.name)
                one.spend(via, Credit(file.name.id, target.context.name, below, copied=copied))
            try:
                gone = self._transitions.move_on(file, target.context, via) is None
            except DropqError:
                with suppress(OSError):  # of the look, whose error would hide this one
                    if reading.exists(f"{context.layout.target}/{file.filename}"):
                        self._give_back(via)
                raise
            if gone:
                self._give_back(via)  # RACE: a consumer or another router took it
        return not gone

    def _give_back(self, via: Via) -> None:
        """Remove the credit of a message that was not moved; what cannot be removed now, a look removes."""
        try:
            credits.give_back(self._context, via)
        except OSError as error:
            log.info("queue %s: credit %s is free only after a look: %s", self._context.name, via, describe(error))

    def _bounce(self, file: MessageFile, selector: Selector) -> bool | str:
        """Move a message to its return address; return False if it is gone, or why it stays."""
        address = return_address(self._context, file)
        details: dict[str, object] = {"return_address": address} if address else {}
        if why := why_not_bounced(self._context, selector, address):
            log.warning("queue %s: message %s is not bounced: %s", self._context.name, file.name.id, why)
            self._set_aside(file, "no_return_address", {**details, "detail": why})
            return False
        try:
            check_address(address)
            target = self._target(address)
        except InvalidName:
            target = None
        except NoSuchQueue:
            refuse_away(self._context.root.layout, address, "the message waits for it")
            target = None
        if target is None or target.context.layout.home == self._context.layout.home:
            self._set_aside(file, "no_return_address", details)
            return False
        return self._transitions.bounce(file, target.context) is not None

    def _target(self, address: str) -> Target:
        """Return a queue that messages go to; it is opened again after a while.

        Raises:
            DropqError: it cannot be used.
        """
        known = self._targets.get(address)
        if (
            known is None
            or time.monotonic() - known.opened_at >= OPEN_FOR
            or not reading.exists(known.context.layout.target)
        ):
            self._targets.pop(address, None)
            known = self._targets[address] = Target(self._context, address)
        return known

    # -- copy --------------------------------------------------------------------------------------------------------

    def _copy(self, file: MessageFile, copies: Sequence[InUse], *, last: bool) -> bool:
        """Make all copies of a message by one commit; return False if it stays.

        Args:
            file: the message.
            copies: the selectors that copy it.
            last: whether no other selector takes it: then it is archived, unless somebody is subscribed.
        """
        context, transitions = self._context, self._transitions
        if file.name.hops >= HOPS_LIMIT:
            return self._set_aside(file, "hop_limit", {"hops": file.name.hops})
        try:
            targets = [self._target(one.selector.to or "") for one in copies]
            receivers = list(map(self._receiver, targets))
            with context.error_context("the message stays in target/"):
                mark = own_mark(context)
        except DropqError as error:
            return self._hold(f"its copies wait: {error}")
        claim = transitions.claim(file, next(self._owners), lease_end(context.clock, LEASE))
        if claim is None:
            return True  # RACE: a consumer or another router took it
        copied, back = self._copied_names(file, claim, mark)
        archived = last and not self._unroutable.has_subscriptions
        try:
            renew = Renewal(transitions, claim)
            for receiver in receivers:
                make_known(context.layout, receiver, context.storage)

            def write(folder: str, at: int, parts: Sequence[str]) -> None:
                for part, target in zip(parts, targets, strict=True):
                    renew()
                    like = target.context.storage if target.is_near else None
                    context.storage.copy(claim.path, f"{folder}/{part}", like=like, between=renew)

            done = fan_out(
                context, claim, receivers, write, copied, context.layout.target, back_as=None if archived else back,
            )  # fmt: skip
        except LeaseLost:
            return True  # RACE: a sweep took this process for dead: the next look does it again
        except BaseException as error:
            # What somebody writes to is not tried again at once: its new name would not let it settle.
            delay = context.settling.patience if isinstance(error, Unavailable) else 0
            with suppress(LeaseLost):
                if isinstance(error, DropqError | OSError) and set_closed_aside(context, claim):
                    return True
                transitions.give_back(claim, counted=False, delay=delay)
            raise
        if done is None:
            with suppress(LeaseLost):
                transitions.give_back(claim, counted=False, delay=0)
            return True
        self.moved.update(one.selector.name for one in copies)
        return True

    def _copied_names(self, file: MessageFile, claim: Claim, mark: str) -> tuple[str, str]:
        """Return the name of the copies of a claimed message, and the name under which it waits in the marked queue."""
        sidecars = self._context.sidecars
        name = sidecars.parse(claim.own_name)
        letter = replace(sidecars.whole(name), reason="", origin="") if name.reason else name
        copied = replace(
            letter.unmarked, delivery_count=0, cancels=0, died=0, not_before=0, via="", hops=name.hops + 1, cut=0,
            copy=os.urandom(5).hex(), foreign=False, since=self._context.clock.now_ms(), copied="", replayed=False,
        )  # fmt: skip
        back = replace(
            name.unmarked, copied=copied_in(mark), copy="" if name.via else os.urandom(5).hex(), foreign=False
        )
        if not name.generated and not name.since:
            back = replace(back, since=file.arrival or reading.changed_ms(claim.path))  # keeps its place in the order
        return sidecars.fit(copied), sidecars.fit(back)

    def _receiver(self, known: Target) -> Receiver:
        """Open what gets a copy: the queue, or the row for it if it lies on another file system."""
        target, path = known.context, self._context.root.layout.path
        try:
            folder = target.layout.base
            if not known.is_near:
                folder = row_to(self._context, Goal(target.root.layout, target.name, target.layout)).folder
            else:
                give_word(target)
            return Receiver(path, os.path.relpath(folder, path))
        except OSError as error:
            raise target.refused(error, "the message stays in target/") from error

    # -- none ----------------------------------------------------------------------------------------------------------

    def _take_unroutable(self, file: MessageFile) -> bool:
        """Set a message aside that no selector takes, once it is unroutable."""
        if why := ONE_IS_UNUSABLE if self.selectors.unusable else self._unroutable.why_not(file):
            return self._hold(why)
        return self._set_aside(file, "unroutable", {})

    def _set_aside(self, file: MessageFile, reason: str, details: dict[str, object]) -> bool:
        """Make a dead letter of a message that cannot be delivered; return True: it has left its place."""
        self._transitions.to_dead_letter(file, reason, details)
        return True

    def _hold(self, why: str) -> bool:
        self.held_by = why
        return False
