"""The forecast: what the selectors of a queue will do with its waiting messages, by the plans of the mover.

It was true when the folders were listed. Ask it about messages in the order of delivery: it counts the credits that
earlier messages will take.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from dropq.format.credits import HOPS_LIMIT, Credit, Via
from dropq.format.layout import RootLayout
from dropq.format.message_file import MessageFile
from dropq.lifecycle import credits
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.decision import count_of
from dropq.lifecycle.transfers import vias_in_transit
from dropq.policies.selectors import InUse
from dropq.routing.credit_audit import all_credits, vias_in
from dropq.routing.plans import Plan, Planner

#: Why a selector takes no more, though it has a credit now.
TAKEN_BEFORE = "messages before this one take the credits that it has left"


class Whereabouts:
    """Where the messages are that were moved under credits, as each queue was when it was first listed."""

    def __init__(self, root: RootLayout) -> None:
        self._root = root
        self._known: dict[str, tuple[frozenset[Via], dict[Via, Credit]]] = {}
        self._on_the_way: set[Via] = set()

    def of(self, spent: dict[Via, Credit]) -> dict[str, int]:
        """Return how many messages each queue has under these credits, by address; "" stands for nowhere.

        A message on its way to a queue on another file system counts as in that queue.
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
        """Return the credits under which messages are in a queue, and those that it has spent itself."""
        if address not in self._known:
            self._known[address] = frozenset(), {}
            layout = credits.layout_of(self._root, address)
            with suppress(OSError):  # this user may not list it
                if layout is not None:
                    spent = {via: said for via, said in all_credits(layout) if said is not None}
                    self._known[address] = frozenset(vias_in(layout)), spent
                    self._on_the_way.update(vias_in_transit(layout))
        return self._known[address]

    def in_words(self, queue: str, token: str) -> str:
        """Return in words which queues hold the messages of the credits that a selector of a queue has spent."""
        lying = self.of({via: said for via, said in self._of(queue)[1].items() if via.token == token})
        lost = lying.pop("", 0)
        parts = [f"{address} holds {count_of(count)}" for address, count in sorted(lying.items())]
        return ", ".join([*parts, *([f"{count_of(lost)} cannot be found"] if lost else [])])


class Forecast(Planner):
    """What will become of the waiting messages of a queue; ask about them in the order of delivery."""

    def __init__(self, context: QueueContext, whereabouts: Whereabouts | None = None) -> None:
        super().__init__(context, read_only=True)
        self._whereabouts = whereabouts or Whereabouts(context.root.layout)
        #: Why selectors take nothing, by name, as found for the messages asked about so far.
        self.refused: dict[str, str] = {}
        self.refresh()

    def of(self, file: MessageFile) -> Plan:
        """Return what will become of a waiting message; ask once about each."""
        plan = self.plan(file)
        self.refused |= {name: why for name, why in plan.refused.items() if why != TAKEN_BEFORE}
        for one in plan.by if plan.why == "move" else ():
            one.foreseen += 1
        return plan

    def why_without_credit(self, one: InUse) -> str:
        """Return that a selector has no credit left, and which queues hold its messages; "" if it has a credit."""
        if not (out := one.out_of_credit):
            return ""
        if one.foreseen:
            return TAKEN_BEFORE
        whereabouts = self._whereabouts.in_words(self._context.name, one.selector.token)
        return f"{out}: {whereabouts}" if whereabouts else out


def way_here(context: QueueContext, file: MessageFile) -> str:
    """Return, as the end of a sentence, which queue and selector a message came from under a credit."""
    via = Via.of(file.name.via)
    if via is None:
        return ""
    with suppress(OSError):  # this user may not read it
        if (owner := credits.queue_of(context.root.layout, via.token)) is not None:
            return f"; it came from {owner[0]} by selector {owner[1]}"
    return f"; it came under the credit {via} of a selector that is not known"
