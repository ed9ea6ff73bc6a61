"""What the selectors of a queue do with a waiting message: routers act on this decision, and `explain` shows it.

A planner changes nothing, and takes no lock. If a plan fails because another router was first, the router asks again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from dropq.config.selectors import may_return_to
from dropq.errors import DropqError, InvalidName, NoSuchQueue
from dropq.format.addresses import check_address
from dropq.format.credits import HOPS_LIMIT
from dropq.format.layout import RootLayout
from dropq.format.message_file import MessageFile
from dropq.format.names import TOPIC_REPLY
from dropq.lifecycle import dead_letters
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.decision import Decision
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.queue_notes import why_away
from dropq.policies.selectors import InUse, Selectors, path_of
from dropq.policies.send_limits import SendLimits
from dropq.routing.unroutable import Unroutable
from dropq.storage import reading
from dropq.storage.mounts import rename_leads
from dropq.topics.publishing import outlet

#: Seconds after which a queue that is sent to is opened again, to see its configuration.
OPEN_FOR = 1.0

#: Why a message stays when its selectors are not known.
UNREADABLE = "which selectors take it is not known: a selector, the body or the sidecar cannot be read now"
ONE_IS_UNUSABLE = "no selector takes it, and one of them cannot be used"


class Destination:
    """A queue that messages of `source` are sent to; DropqError if it is not there, or cannot be used."""

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
        """Whether a rename leads there from the source."""
        return rename_leads(self._source.layout.private, self.context.layout.target)

    def why_not(self) -> str:
        """Return why it takes no message now; "" if it takes a message, which is then counted."""
        return "" if self._limits.admit_one() else f"{self.context.name} is full, or makes senders wait"


@dataclass(frozen=True, slots=True)
class Plan(Decision):
    """What a router does with a waiting message, if anything.

    Attributes:
        why: `copy`, `move`, `bounce`; `set-aside` if it cannot be delivered; `leave` if consumers get it; `stay`.
        by: the selectors that copy, move or bounce it; if it stays, those that it waits for.
        destinations: where it goes, one for each selector.
        is_last: whether no selector takes it once it is copied: then it is archived, unless somebody is subscribed.
        reason, details: why it is set aside, as its dead letter says.
        refused: why selectors that match it do not take it, by name.
    """

    by: tuple[InUse, ...] = ()
    destinations: tuple[Destination, ...] = ()
    is_last: bool = False
    reason: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def selectors(self) -> tuple[str, ...]:
        """The names of the selectors."""
        return tuple(one.selector.name for one in self.by)


LEAVE = Plan(False, "leave")


class Planner:
    """Decides what the selectors of one queue do with its waiting messages; if `read_only`, it notes nothing."""

    def __init__(self, context: QueueContext, *, read_only: bool = False) -> None:
        self._context = context
        self._destinations: dict[str, Destination] = {}
        self.selectors = Selectors(context, read_only=read_only)
        self.unroutable = Unroutable(context, read_only=read_only)

    def refresh(self) -> None:
        """Read the selectors again, and whether anybody is subscribed."""
        self.selectors.refresh()
        if self.selectors.in_use:
            self.unroutable.refresh()

    def plan(self, file: MessageFile, passed: Mapping[str, str] | None = None) -> Plan:
        """Return what is to be done with a waiting message; `passed` says why selectors failed to take it, by name."""
        selectors = self.selectors
        if not selectors.for_waiting:
            broken = "; ".join(f"{name} cannot be used: {why}" for name, why in sorted(selectors.unusable.items()))
            return Plan(False, "stay", f"no selector takes it: {broken}") if broken else LEAVE
        choice = selectors.choice(file)
        if choice is None:
            return Plan(False, "stay", UNREADABLE)
        if (choice.copying or choice.moving) and file.name.hops >= HOPS_LIMIT:
            hops = file.name.hops
            return _set_aside(file, "hop_limit", f"it was moved {hops} times", {"hops": hops})
        if choice.copying:
            return self._copied(choice.copying, is_last=not choice.moving)
        if choice.moving:
            return self._moved(file, choice.moving, passed or {})
        return LEAVE if choice.stays else self._untaken(file)

    def why_unreachable(self, address: str | None) -> str:
        """Return why no message can go to a queue, whatever its limits; "" if messages can, or for a bounce."""
        found = None if address is None else self._find(address)
        return found if isinstance(found, str) else ""

    def _copied(self, copying: list[InUse], *, is_last: bool) -> Plan:
        found = [self._find(one.selector.to or "") for one in copying]
        refused = {one.selector.name: why for one, why in zip(copying, found, strict=True) if isinstance(why, str)}
        if refused:
            says = f"its copies wait: {'; '.join(refused.values())}"
            by = (one for one in copying if one.selector.name in refused)
            return Plan(False, "stay", says, by=tuple(by), refused=refused)
        says = f"the next router copies it to {', '.join(one.selector.to or '' for one in copying)}"
        destinations = tuple(destination for destination in found if isinstance(destination, Destination))
        return Plan(True, "copy", says, by=tuple(copying), destinations=destinations, is_last=is_last)

    def _moved(self, file: MessageFile, moving: list[InUse], passed: Mapping[str, str]) -> Plan:
        refused = dict[str, str]()
        for one in moving:
            name = one.selector.name
            decided = passed.get(name) or (
                self._bounced(file, one) if one.selector.op == "bounce" else self._sent_on(one)
            )
            if isinstance(decided, Plan):
                return decided
            refused[name] = decided
        says = "; ".join(f"selector {name}: {why}" for name, why in refused.items())
        return Plan(False, "stay", says, by=tuple(moving), refused=refused)

    def _sent_on(self, one: InUse) -> Plan | str:
        """Return the plan to move a message by a selector; or why the selector does not move it."""
        address = one.selector.to or ""
        if why := self.why_without_credit(one):
            return why
        destination = self._find(address)
        if isinstance(destination, str):
            return destination
        says = f"the next router moves it to {address} by selector {one.selector.name}"
        return destination.why_not() or Plan(True, "move", says, by=(one,), destinations=(destination,))

    def why_without_credit(self, one: InUse) -> str:
        """Return that a selector has no credit left; "" if it has a credit."""
        return one.out_of_credit

    def _bounced(self, file: MessageFile, one: InUse) -> Plan | str:
        """Return the plan to move a message to its return address, or to set it aside; or why it waits for the queue.

        The sender of the message chose its reply-to: a router does not lend its rights to that.
        """
        context, name = self._context, one.selector.name
        address = (context.sidecars.full(file.name).reply_to or "").removeprefix(TOPIC_REPLY)
        no_way, bounces = partial(_set_aside, file, "no_return_address"), f"selector {name} bounces it, and"
        if not address:
            return no_way(f"{bounces} it has no return address", {})
        details = {"return_address": address}
        if not may_return_to(one.selector, address):
            path = path_of(context, name)
            why = f"selector {name} returns nothing to {address}: if it may, add that to `to` in {path}"
            return no_way(why, {**details, "detail": why})
        try:
            check_address(address)
            destination = self._destination(address)
        except InvalidName as error:
            return no_way(f"{bounces} {error}", details)
        except NoSuchQueue:
            away = why_away(context.root.layout, address)
            return away or no_way(f"{bounces} {address} is missing", details)
        except DropqError as error:
            return str(error)
        if destination.context.layout.home == context.layout.home:
            return no_way(f"{bounces} its return address is this queue", details)
        says = f"the next router bounces it to {address} by selector {name}"
        return Plan(True, "bounce", says, by=(one,), destinations=(destination,))

    def _untaken(self, file: MessageFile) -> Plan:
        if self.selectors.unusable:
            return Plan(False, "stay", f"{ONE_IS_UNUSABLE}: {', '.join(sorted(self.selectors.unusable))}")
        if why := self.unroutable.why_not(file):
            return Plan(False, "stay", why)
        return _set_aside(file, "unroutable", "no selector takes it", {})

    # -- where messages go ---------------------------------------------------------------------------------------------

    def _find(self, address: str) -> Destination | str:
        """Return a queue that messages go to; or why no message can go there."""
        try:
            return self._destination(address)
        except NoSuchQueue:
            return missing(self._context.root.layout, address)
        except DropqError as error:
            return str(error)

    def _destination(self, address: str) -> Destination:
        """Return a queue that messages go to, opened again after a while, or raise DropqError."""
        known = self._destinations.get(address)
        if (
            known is None
            or time.monotonic() - known.opened_at >= OPEN_FOR
            or not reading.exists(known.context.layout.target)
        ):
            self._destinations.pop(address, None)
            known = self._destinations[address] = Destination(self._context, address)
        return known


def missing(root: RootLayout, address: str) -> str:
    """Return in words that a queue is not there."""
    return why_away(root, address) or f"{address} is missing"


def _set_aside(file: MessageFile, reason: str, why: str, details: Mapping[str, object]) -> Plan:
    end = "moves it to error/" if dead_letters.why_no_more(file.name) else "makes a dead letter of it"
    return Plan(True, "set-aside", f"{why}: the next router {end}", reason=reason, details=details)
