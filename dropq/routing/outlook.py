"""What the selectors of a queue will do with the messages that wait there: a look at what the mover decides by.

Nothing is changed, and no lock is taken: it was true when the folders were listed. The outlook counts the credits that
the messages before another one will take, as long as it is asked in the order of delivery.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from dropq.errors import DropqError, NoSuchQueue
from dropq.format.credits import HOPS_LIMIT, Credit, Via
from dropq.format.layout import RootLayout
from dropq.format.message_file import MessageFile
from dropq.lifecycle import credits, dead_letters
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.known_queues import why_away
from dropq.lifecycle.transfers import vias_in_transit
from dropq.policies.selectors import InUse, Selectors
from dropq.routing.looks import all_credits, vias_in
from dropq.routing.mover import (
    ONE_IS_UNUSABLE,
    UNREADABLE,
    Target,
    return_address,
    why_not_bounced,
)
from dropq.routing.unroutable import Unroutable


def missing(root: RootLayout, address: str) -> str:
    """Return that a queue is not there, in words."""
    return why_away(root, address) or f"{address} is missing"


class Whereabouts:
    """Where the messages lie that were moved under credits, as each queue was when it was first looked at.

    Args:
        root: the root.
    """

    def __init__(self, root: RootLayout) -> None:
        self._root = root
        self._known: dict[str, tuple[frozenset[Via], dict[Via, Credit]]] = {}
        self._on_the_way: set[Via] = set()

    def spent_by(self, context: QueueContext, token: str) -> dict[Via, Credit]:
        """Return the credits that a selector of a queue has spent, with what each says; a damaged one is left out."""
        return {via: said for via, said in self._of(context.name)[1].items() if via.token == token}

    def of(self, spent: dict[Via, Credit]) -> dict[str, int]:
        """Return how many messages lie under some credits, by the address of the queue; by "" those found nowhere.

        What is on its way to a queue on another file system counts as there.
        """
        found = Counter[str]()
        ahead = {via: said.to for via, said in spent.items()}
        for _ in range(HOPS_LIMIT + 1):
            further = dict[Via, str]()
            for via, address in ahead.items():
                lying, gone_on = self._of(address)
                if via in lying or via in self._on_the_way:
                    found[address] += 1
                    continue
                upper = next((upper for upper, said in gone_on.items() if via in said.below), None)
                if upper is None:
                    found[""] += 1
                else:
                    further[upper] = gone_on[upper].to
            ahead = further
        return dict(found)

    def _of(self, address: str) -> tuple[frozenset[Via], dict[Via, Credit]]:
        """Return the credits under which messages lie in a queue, and those that it has spent itself."""
        if address not in self._known:
            self._known[address] = frozenset(), {}
            layout = credits.layout_of(self._root, address)
            with suppress(OSError):  # this user may not list it
                if layout is not None:
                    spent = {via: said for via, said in all_credits(layout) if said is not None}
                    self._known[address] = frozenset(vias_in(layout)), spent
                    self._on_the_way.update(vias_in_transit(layout))
        return self._known[address]

    def told(self, spent: dict[Via, Credit]) -> str:
        """Return in words which queues hold the messages of some credits."""
        lying = self.of(spent)
        lost = lying.pop("", 0)
        parts = [f"{address} holds {_messages(count)}" for address, count in sorted(lying.items())]
        return ", ".join([*parts, *([f"{_messages(lost)} cannot be found"] if lost else [])])


@dataclass(frozen=True, slots=True)
class Prospect:
    """What will become of a waiting message.

    Attributes:
        says: what the next router does with it, or why it stays.
        stays: whether it stays for now.
        selectors: the names of the selectors that it waits for, or that take it.
    """

    says: str
    stays: bool
    selectors: tuple[str, ...] = ()


class Outlook:
    """What will become of the waiting messages of a queue, which are asked about in the order of delivery.

    Args:
        context: the queue.
        whereabouts: where the messages of its spent credits lie.

    Attributes:
        selectors: the selectors.
        refused: why selectors take nothing, by their names, once a message was asked about that waits for them.
    """

    def __init__(self, context: QueueContext, whereabouts: Whereabouts | None = None) -> None:
        self._context = context
        self._whereabouts = whereabouts or Whereabouts(context.root.layout)
        self._targets: dict[str, Target] = {}
        self._refusals: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._taken = Counter[str]()
        self._unroutable = Unroutable(context, only_looks=True)
        self._unroutable.refresh()
        self.selectors = Selectors(context, only_looks=True)
        self.selectors.look()

    def of(self, file: MessageFile) -> Prospect | None:
        """Return what will become of a waiting message; None if the selectors leave it to consumers."""
        selectors = self.selectors
        if not selectors.serves_waiting:
            broken = [f"{name} cannot be used: {why}" for name, why in sorted(selectors.unusable.items())]
            return Prospect(f"no selector takes it: {'; '.join(broken)}", stays=True) if broken else None
        choice = selectors.choice(file)
        if choice is None:
            return Prospect(UNREADABLE, stays=True)
        if not choice.copying and choice.stays and not choice.moving:
            return None
        if (choice.copying or choice.moving) and file.name.hops >= HOPS_LIMIT:
            return _ended(f"it was moved {file.name.hops} times", file)
        if choice.copying:
            return self._copied(choice.copying)
        return self._moved(file, choice.moving) if choice.moving else self._untaken(file)

    def _copied(self, copying: list[InUse]) -> Prospect:
        names = tuple(one.selector.name for one in copying)
        if refused := {one.selector.name: why for one in copying if (why := self.unreachable(one))}:
            self.refused |= refused
            return Prospect(f"its copies wait: {'; '.join(refused.values())}", stays=True, selectors=tuple(refused))
        goals = ", ".join(one.selector.to or "" for one in copying)
        return Prospect(f"the next router copies it to {goals}", stays=False, selectors=names)

    def _moved(self, file: MessageFile, moving: list[InUse]) -> Prospect:
        why = list[str]()
        for one in moving:
            name, credit = one.selector.name, one.selector.credit
            bounces = one.selector.op == "bounce"
            refused = self._away(file, one) if bounces else self._out_of_credit(one) or self.unreachable(one)
            if refused:
                self.refused[name] = refused
            elif bounces:
                return Prospect(self._bounced(file, one), stays=False, selectors=(name,))
            elif credit is not None and one.busy + self._taken[name] >= credit:
                refused = "messages before this one take the credits that it has left"
            elif refused := self._targets[one.selector.to or ""].why_not():
                self.refused[name] = refused
            else:
                self._taken[name] += 1
                text = f"the next router moves it to {one.selector.to} by selector {name}"
                return Prospect(text, stays=False, selectors=(name,))
            why.append(f"selector {name}: {refused}")
        return Prospect("; ".join(why), stays=True, selectors=tuple(one.selector.name for one in moving))

    def _out_of_credit(self, one: InUse) -> str:
        if not (out := one.out_of_credit):
            return ""
        held = self._whereabouts.told(self._whereabouts.spent_by(self._context, one.selector.token))
        return f"{out}: {held}" if held else out

    def unreachable(self, one: InUse) -> str:
        """Return why no message can go to the queue that a selector sends to; "" if one can, or it is a bounce."""
        address = one.selector.to
        if address is None or address in self._targets:
            return ""
        if address not in self._refusals:
            try:
                target = Target(self._context, address)
            except NoSuchQueue:
                self._refusals[address] = missing(self._context.root.layout, address)
            except DropqError as error:
                self._refusals[address] = str(error)
            else:
                self._targets[address] = target
                return ""
        return self._refusals[address]

    def _away(self, file: MessageFile, one: InUse) -> str:
        """Return why a bounce waits for the queue that it goes to; "" if it goes there, or nowhere."""
        root, address = self._context.root.layout, return_address(self._context, file)
        if not address or why_not_bounced(self._context, one.selector, address):
            return ""
        return "" if credits.layout_of(root, address) is not None else why_away(root, address)

    def _bounced(self, file: MessageFile, one: InUse) -> str:
        name = one.selector.name
        if not (address := return_address(self._context, file)):
            return _ended(f"selector {name} bounces it, and it has no return address", file).says
        if why := why_not_bounced(self._context, one.selector, address):
            return _ended(why, file).says
        if credits.layout_of(self._context.root.layout, address) is None:
            return _ended(f"selector {name} bounces it, and {address} is missing", file).says
        return f"the next router bounces it to {address} by selector {name}"

    def _untaken(self, file: MessageFile) -> Prospect:
        if self.selectors.unusable:
            broken = ", ".join(sorted(self.selectors.unusable))
            return Prospect(f"{ONE_IS_UNUSABLE}: {broken}", stays=True)
        if why := self._unroutable.why_not(file):
            return Prospect(why, stays=True)
        return _ended("no selector takes it", file)


def _ended(why: str, file: MessageFile) -> Prospect:
    """Return that the next router finds that a message cannot be delivered, and why."""
    end = "moves it to error/" if dead_letters.why_no_more(file.name) else "makes a dead letter of it"
    return Prospect(f"{why}: the next router {end}", stays=False)


def _messages(count: int) -> str:
    return f"{count} message{'' if count == 1 else 's'}"


def came_from(context: QueueContext, file: MessageFile) -> str:
    """Return from which queue, and by which selector, a message came under a credit; "" if it came under none."""
    via = Via.of(file.name.via)
    if via is None:
        return ""
    with suppress(OSError):  # this user may not read it
        if (owner := credits.queue_of(context.root.layout, via.token)) is not None:
            return f"it came from {owner[0]} by selector {owner[1]}"
    return f"it came under the credit {via} of a selector that is not known"
