"""Rings of selectors, routes, topics and views: no message goes round, and each comes where it is to.

An administrator makes selectors, topics and views by chance, and writes some by hand, so that rings come about. A plain
model says which of his steps close a ring, and where each message is to lie in the end. Then two administrators close a
ring together, the second between every two calls of the first.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from forks import forked
from helpers import Clock, drop, timed

from dropq import ConfigError, DropqError, Queue, Root
from torture.account import Location, body, look
from torture.acts import Meeting
from torture.calls import come_between
from torture.table import Options, Row
from torture.topic_cases import TIMING

#: How many roots are made by chance; how many steps an administrator takes in each.
LONG, SHORT, STEPS = 200, 6, 24
#: Between how many pairs of calls the second of two administrators works, in the short form.
MEETINGS = 2
#: How often all is routed, at most, until nothing moves any more: as often as the longest way has queues.
ROUNDS = 40
#: What is said of a ring.
ROUND = "messages would go round"
QUEUES = ("one", "two", "three", "four")
TOPICS = {"t": ("again", "audit"), "t.eu": ("west",), "s": ("all",)}
#: The views that may come: what they are on, and where a send to them is published.
VIEWS = {"seen": ("t", "t"), "wide": (r"^t(\.eu)?$", "t.eu"), "late": ("t.us", "t.us")}
#: A topic that may come.
LATE = "t.us"


# -- where messages go, as the papers have it ------------------------------------------------------------------------


@dataclass
class Ways:
    """Which queue sends where, by address; nothing of dropq is used here."""

    queues: set[str] = field(default_factory=set)
    topics: dict[str, list[str]] = field(default_factory=dict)
    views: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: Where the selectors that move lead, those that copy, and the routes in use.
    moves: dict[str, str] = field(default_factory=dict)
    copies: dict[str, list[str]] = field(default_factory=dict)
    routes: dict[str, str] = field(default_factory=dict)

    def there(self, address: str) -> bool:
        return address in self.queues or address in self.topics

    def goals(self) -> list[str]:
        """Return all addresses."""
        return sorted(self.queues | self.topics.keys())

    def sent(self, to: str) -> list[str]:
        """Return where a message goes that is sent to an address."""
        to = self.views[to][1] if to in self.views else to
        return [to] if self.there(to) else []

    def fed(self, topic: str) -> list[str]:
        """Return the receivers of a topic."""
        above = [each for each in self.topics if topic == each or topic.startswith(f"{each}.")]
        on = [view for view, (underlying, _) in self.views.items() if _is_on(underlying, topic)]
        return [*(receiver for each in above for receiver in self.topics[each]), *on]

    def next(self, address: str) -> list[str]:
        """Return where messages may go from an address."""
        if address in self.topics:
            return [*filter(None, [self.routes.get(address)]), *self.fed(address)]
        sent = [*self.copies.get(address, ()), *filter(None, [self.moves.get(address)])]
        return [*filter(None, [self.routes.get(address)]), *(goal for to in sent for goal in self.sent(to))]

    def is_on_a_ring(self, address: str) -> bool:
        ahead, seen = self.next(address), set[str]()
        while ahead:
            here = ahead.pop()
            if here == address:
                return True
            if here not in seen:
                seen.add(here)
                ahead += self.next(here)
        return False

    def flow(self, lying: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
        """Return where messages end that lie somewhere now: the address, and /processed where they end so."""
        ended: Counter[tuple[str, str]] = Counter()
        while lying:
            (address, name), count = lying.popitem()
            for goal in self._one_step(address):
                rests = goal == address or goal.endswith("/processed")
                (ended if rests else lying)[goal, name] += count
        return ended

    def _one_step(self, address: str) -> list[str]:
        """Return where a message goes next from an address, with its copies; the address itself where it rests."""
        used = not self.is_on_a_ring(address)
        if used and address in self.routes:
            return [self.routes[address]]
        if address in self.topics:
            return [f"{address}/processed", *self.fed(address)]
        if not used or not all(map(self.sent, self.copies.get(address, ()))):
            return [address]  # a copy that cannot be made keeps the message
        copied = [goal for to in self.copies.get(address, ()) for goal in self.sent(to)]
        moved = self.sent(self.moves[address]) if address in self.moves else []
        rest = moved or ([f"{address}/processed"] if copied and address not in self.moves else [address])
        return [*copied, *rest]


def _is_on(underlying: str, topic: str) -> bool:
    return topic == underlying if re.fullmatch(r"[\w.]+", underlying) else re.search(underlying, topic) is not None


class ByHand(NamedTuple):
    """A selector or a route that was written by hand: from where it leads to where, what it does, and its file."""

    address: str
    to: str
    op: str
    path: Path


# -- an administrator ------------------------------------------------------------------------------------------------


class Administered:
    """A root, and what its administrator made of it."""

    def __init__(self, folder: Path, seed: str) -> None:
        self.chance = random.Random(seed)
        self.ways = Ways()
        self.wrong: list[str] = []
        self.by_hand: list[ByHand] = []
        self.clock = Clock()
        Root.create(folder)
        (folder / "dropq.toml").write_text('format = 1\n[defaults]\ndurability = "none"\nredelivery_delay = 0\n')
        self.root = timed(Root(folder, clock=self.clock), TIMING)
        for name in QUEUES:
            self.root.create_queue(name)
            self.ways.queues.add(name)
        for name, subscriptions in TOPICS.items():
            topic = self.root.create_topic(name)
            self.ways.topics[name] = [f"{name}/{each}.c" for each in subscriptions]
            self.ways.queues.update(self.ways.topics[name])
            for each in subscriptions:
                topic.create_subscription(each, client_id="c")

    def opened(self) -> Root:
        """Return the root as another program opens it."""
        return timed(Root(self.root.path, clock=self.clock), TIMING)

    def step(self) -> None:
        """Make something; see that it is refused if it closes a ring, and only then."""
        self.chance.choice((self._select, self._select, self._select, self._view, self._topic, self._by_hand))()

    def _select(self) -> None:
        address, to = self.chance.choice(self._queues()), self.chance.choice(self.ways.goals())
        if (op := self._op(address, to)) is None:
            return
        self._add(address, to, op)
        how: dict[str, Any] = {"to": to, "op": op, **_credit(op)}
        name = f"x{self.chance.getrandbits(32)}"
        select = partial(Queue.add_selector, self.opened().queue(address), name, **how)
        if self._refused(f"a selector from {address} to {to}", select, address in self._after(self.ways.sent(to))):
            self._take_away(address, to, op)

    def _after(self, ahead: list[str]) -> set[str]:
        """Return some addresses, and all to which messages may go from there."""
        seen = set[str]()
        while ahead:
            if (here := ahead.pop()) not in seen:
                seen.add(here)
                ahead += self.ways.next(here)
        return seen

    def _view(self) -> None:
        name = self.chance.choice(sorted(VIEWS))
        if name in self.ways.views:
            return
        underlying, target = VIEWS[name]
        self.ways.views[name] = VIEWS[name]
        self.ways.queues.add(name)
        closes = any(self.ways.is_on_a_ring(each) for each in (name, *self.ways.sent(name)))
        options: dict[str, Any] = {"underlying_topic": underlying, "default_publish_target": target}
        if self._refused(f"the view {name}", lambda: self.opened().create_queue(name, **options), closes):
            del self.ways.views[name]
            self.ways.queues.remove(name)

    def _topic(self) -> None:
        if LATE in self.ways.topics:
            return
        self.ways.topics[LATE] = []
        closes = self.ways.is_on_a_ring(LATE)
        if self._refused(f"the topic {LATE}", lambda: self.opened().create_topic(LATE), closes):
            del self.ways.topics[LATE]

    def _by_hand(self) -> None:
        """Write a selector, or a route, as an editor does: nobody can refuse that."""
        if self.chance.random() < 0.4:
            self._route_by_hand(self.chance.choice(self.ways.goals()), self.chance.choice(self.ways.goals()))
            return
        address, to = self.chance.choice(self._queues()), self.chance.choice([*self.ways.goals(), *VIEWS, LATE])
        if (op := self._op(address, to)) is None or (op == "copy" and not self.ways.sent(to)):
            return
        path = Path(self.root.queue(address).layout.selectors, f"y{self.chance.getrandbits(32)}.toml")
        path.parent.mkdir(exist_ok=True)
        credit = "".join(f"{key} = {value}\n" for key, value in _credit(op).items())
        path.write_text(f'to = "{to}"\nop = "{op}"\n{credit}')
        self._add(address, to, op)
        self.by_hand.append(ByHand(address, to, op, path))

    def _route_by_hand(self, address: str, to: str) -> None:
        if address in self.ways.routes or address == to:
            return
        base = Path(self.root.queue(address).layout.base)
        (base / "routing").mkdir(exist_ok=True)
        (base / "routing.properties").write_text("r.selector=TRUE\n")
        (base / "routing" / "r").symlink_to(self.root.queue(to).layout.target)
        (base / "routing" / "r.in-use").touch()
        self.ways.routes[address] = to
        self.by_hand.append(ByHand(address, to, "route", base / "routing" / "r.in-use"))

    def _queues(self) -> list[str]:
        return sorted(self.ways.queues)

    def _op(self, address: str, to: str) -> str | None:
        """Return what a new selector may do: one of a queue moves, others copy, each elsewhere; None for nothing."""
        taken = [goal for each in self.ways.copies.get(address, ()) for goal in self.ways.sent(each)]
        if address == to or set(self.ways.sent(to)) & set(taken):
            return None
        return "copy" if address in self.ways.moves or self.chance.random() < 0.3 else "move"

    def _add(self, address: str, to: str, op: str) -> None:
        if op == "move":
            self.ways.moves[address] = to
        else:
            self.ways.copies.setdefault(address, []).append(to)

    def _take_away(self, address: str, to: str, op: str) -> None:
        if op == "copy":
            self.ways.copies[address].remove(to)
        else:
            del (self.ways.moves if op == "move" else self.ways.routes)[address]

    def _refused(self, what: str, make: Callable[[], object], closes: bool) -> bool:
        try:
            make()
        except ConfigError as error:
            if not closes or ROUND not in str(error):
                self.wrong.append(f"{what} is refused: {error}")
            return True
        except DropqError as error:
            self.wrong.append(f"{what} raises {error!r}")
            return True
        if closes:
            self.wrong.append(f"{what} closes a ring, and is not refused")
        return False

    # -- messages --------------------------------------------------------------------------------------------------

    def send_everywhere(self) -> Counter[tuple[str, str]]:
        """Send to every address, also files of one name; return where each lies."""
        lying: Counter[tuple[str, str]] = Counter()
        root = self.opened()
        for address in self.ways.goals():
            drop(root.queue(address), "report.csv", body(f"dropped in {address}"))
            lying[address, f"dropped in {address}"] += 1
        for address in self.ways.goals():
            for goal in self.ways.sent(address):
                root.queue(address).send(body(f"sent to {address}"))
                lying[goal, f"sent to {address}"] += 1
        return lying

    def route(self) -> None:
        """Route all, in any order, until nothing moves any more."""
        for _ in range(ROUNDS):
            self.clock.advance(100)
            queues = self.opened().queues()
            self.chance.shuffle(queues)
            if not sum(sum(queue.route().values()) for queue in queues):
                return
        self.wrong.append(f"after {ROUNDS} passes of all routers something moves still")

    def judge(self, row: Row, expected: Counter[tuple[str, str]]) -> None:
        """Hold what lies in the root against what is to."""
        found = look(self.root.path)
        self.wrong += [f"{path} is not whole" for path in found.damaged]
        lying = Counter(
            (address_of(location), name) for name, locations in found.locations.items() for location in locations
        )
        row.cases += expected.total()
        row.lost += (expected - lying).total()
        row.doubled += (lying - expected).total()
        self.wrong += [
            f"{name!r} is missing in {address}, {n} times" for (address, name), n in (expected - lying).items()
        ]
        self.wrong += [f"{name!r} lies in {address}, {n} times" for (address, name), n in (lying - expected).items()]

    def judge_health(self) -> None:
        """See that each ring is told, where something of it is not used; and of what waits there, why."""
        for address in self.ways.goals():
            selects = address in self.ways.moves or self.ways.copies.get(address)
            unused = selects or address in self.ways.routes
            why = {explained.why for explained in self.opened().queue(address).explain()}
            if selects and "ready" in why:
                self.wrong.append(f"nobody says why what is in {address} waits")
            reasons = [reason.message for reason in self.opened().queue(address).health().reasons]
            said = any(ROUND in message for message in reasons)
            if said != bool(unused and self.ways.is_on_a_ring(address)):
                self.wrong.append(f"of {address}, health says {reasons}")

    def open_rings(self) -> set[str]:
        """Take away what closes rings, until there are none; return who was on one."""
        on = {address for address in self.ways.goals() if self.ways.is_on_a_ring(address)}
        for address, to, op, path in self.by_hand:
            if address in self._after([to] if op == "route" else self.ways.sent(to)):
                path.unlink()
                self._take_away(address, to, op)
        self.wrong += [f"{address} is on a ring still" for address in on if self.ways.is_on_a_ring(address)]
        return on


def _credit(op: str) -> dict[str, int]:
    return {"credit": 1000} if op == "move" else {}


def address_of(location: Location) -> str:
    """Return the address in which a file lies, and its state unless that is target."""
    topic, _, below = location.queue.removeprefix("topic-root/").replace("/.", "\0.", 1).partition("\0")
    below = below.removeprefix(".incoming").removeprefix(".subscriptions")
    address = f"{topic.replace('/', '.')}{below}"
    return address if location.state == "target" else f"{address}/{location.state}"


def run(options: Options) -> list[Row]:
    """Return a row for rings that one administrator makes, and one for those that two make together."""
    return [by_chance(options), together(options)]


def by_chance(options: Options) -> Row:
    """Let an administrator make rings in many roots; then let him open them."""
    row = Row("rings: selectors, routes, topics and views by chance")
    for number in range(LONG if options.long else SHORT):
        made = Administered(options.folder / "ring", f"{options.seed} {number}")
        for _ in range(STEPS):
            made.step()
        before = made.ways.flow(made.send_everywhere())
        made.route()
        made.judge(row, before)
        made.judge_health()
        on = made.open_rings()
        made.route()
        waited = Counter({lies: count for lies, count in before.items() if lies[0] in on})
        made.judge(row, before - waited + made.ways.flow(waited))
        row.wrong += [f"root {number}: {line}" for line in made.wrong]
        shutil.rmtree(made.root.path)
    return row


# -- two administrators ----------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What an administrator makes: a selector of an address, one of the views, perhaps with a selector, or a topic."""

    kind: str
    address: str
    to: str = ""

    def take(self, root: Root) -> str:
        """Make it; return why it was refused."""
        selector: dict[str, Any] = {"to": self.to, **_credit("move")}
        try:
            if self.kind == "selector":
                root.queue(self.address).add_selector("on", **selector)
            elif self.kind == "view":
                tables = [{"name": "on", **selector}] if self.to else []
                root.create_queue(self.address, underlying_topic=VIEWS[self.address][0], selector=tables)
            else:
                root.create_topic(self.address)
        except DropqError as error:
            return str(error)
        return ""

    def stands(self, root: Root) -> bool:
        """Return whether it is there, as plain system calls see it."""
        if self.kind == "topic":
            return Path(root.path, "topic-root", *self.address.split("."), ".incoming").is_dir()
        address = self.address.replace("t/", "topic-root/t/.subscriptions/")
        return Path(root.path, address, "selectors/on.toml" if self.to else "target").exists()

    def enter(self, ways: Ways) -> None:
        """Let a model have it."""
        if self.kind == "topic":
            ways.topics[self.address] = []
            return
        if self.kind == "view":
            ways.queues.add(self.address)
            ways.views[self.address] = VIEWS[self.address]
        if self.to:
            ways.moves[self.address] = self.to


#: What is there before, and what two administrators make at once.
PAIRS = (
    ((), Step("selector", "one", "two"), Step("selector", "two", "one")),
    ((), Step("selector", "t/again.c", "one"), Step("selector", "one", "t")),
    ((), Step("selector", "t/again.c", "one"), Step("selector", "one", "t.eu")),
    ((), Step("view", "seen", "one"), Step("selector", "one", "t")),
    ((Step("selector", "t/again.c", "one"),), Step("topic", "t.us"), Step("selector", "one", "t.us")),
    (
        (Step("selector", "t/again.c", "one"), Step("view", "late")),
        Step("topic", "t.us"),
        Step("selector", "one", "late"),
    ),
    ((), Step("view", "seen", "t/again.c"), Step("selector", "t/again.c", "t")),
    (
        (Step("selector", "one", "three"), Step("selector", "two", "four")),
        Step("selector", "three", "two"),
        Step("selector", "four", "one"),
    ),
)


def together(options: Options) -> Row:
    """Let a second administrator work between every two calls of the first, or some."""
    row = Row("rings: two administrators at once")
    chance = random.Random(options.seed)
    for before, *pair in PAIRS:
        for first, second in (pair, pair[::-1]):
            calls = _meet(options.folder, row, (before, first, second), -1)
            numbers = range(calls) if options.long else chance.sample(range(calls), MEETINGS)
            for number in numbers:
                _meet(options.folder, row, (before, first, second), number)
    return row


def _meet(folder: Path, row: Row, steps: tuple[tuple[Step, ...], Step, Step], number: int) -> int:
    """Let two administrators meet before the Nth call of the first, and judge; return how many calls he makes."""
    before, *both = steps
    made = Administered(folder / "ring", str(number))
    for step in before:
        assert not step.take(made.root)
        step.enter(made.ways)

    calls, said = met(folder, number, *(partial(step.take, made.opened()) for step in both))
    for step, words in zip(both, said, strict=True):
        if step.stands(made.root):
            step.enter(made.ways)
        if step.stands(made.root) == bool(words):
            made.wrong.append(
                f"{step} stands, and is told {words!r}" if words else f"nothing is told, and {step} is gone"
            )
    if any(map(made.ways.is_on_a_ring, made.ways.goals())):
        made.wrong.append("both stand, and make a ring")
    expected = made.ways.flow(made.send_everywhere())
    made.route()
    made.judge(row, expected)
    row.wrong += [f"{both[0]}, {both[1]} before call {number + 1} of {calls}: {line}" for line in made.wrong]
    shutil.rmtree(made.root.path)
    return calls


def met(folder: Path, number: int, first: Callable[[], str], second: Callable[[], str]) -> tuple[int, list[str]]:
    """Let two programs meet, in a child: the second works before the Nth call of the first, or after it.

    Returns:
        How many calls the first makes, and what each of them says.
    """

    def meet() -> None:
        said: list[str] = []
        meeting = Meeting(number, lambda: said.append(second()))
        come_between(meeting)
        own, calls = first(), len(meeting.calls)
        meeting.at = -1
        if not said:
            said.append(second())
        (folder / "said").write_text(json.dumps([calls, own, *said]))

    assert forked(meet) == 0
    calls, *said = json.loads((folder / "said").read_text())
    return int(calls), said
