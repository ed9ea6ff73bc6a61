"""What strangers and accidents do to a root with a topic, a view and selectors, a story each; then all is counted.

Each story is told in a root of its own. In the end each message lies once in each place that is to have it, and was
received there once; and what was refused meanwhile was refused in words.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from children import few_descriptors, unprivileged
from forks import DIED, forked
from helpers import Clock, drop, timed

from dropq import DropqError, Queue, QueueExists, Root
from torture.account import body, look, name_of
from torture.calls import come_between
from torture.crashes import Dying, Moment
from torture.rings import address_of, met
from torture.table import Options, Row
from torture.topic_cases import LAPSE, TIMING

#: How often all is swept and routed, at most, until nothing waits any more.
ROUNDS = 12
#: Calls before which something happens, in the short form; in the long form, before each.
MOMENTS = 2
#: How many receivers a topic has that has more than a process has descriptors, and by how many threads it is fed.
MANY, THREADS = 120, 8
#: Seconds for which a disk is away, or a root is maintained.
LONG = 3 * 86_400

TOPIC, ALL, URGENT, VIEW = "news", "news/all.x", "news/urgent.x", "view"
FILTER = "JMSPriority >= 7"
START, END, AUDIT = "start", "end", "audit"


@dataclass
class Scene:
    """A root with a topic, of which a view gets all, and a queue whose selectors copy and move."""

    path: Path
    clock: Clock = field(default_factory=Clock)
    #: Where each body is to lie in the end, and the bodies that are to lie everywhere or nowhere, as their sender died.
    expected: Counter[tuple[str, str]] = field(default_factory=Counter)
    perhaps: list[Counter[tuple[str, str]]] = field(default_factory=list)
    #: What was received meanwhile.
    received: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: How many processes died of what they did.
    kills: int = 0
    wrong: list[str] = field(default_factory=list)

    @classmethod
    def built(cls, folder: Path, *, dropboxmq: bool) -> Scene:
        """Make the root."""
        scene = cls(folder)
        Root.create(folder, dropboxmq=dropboxmq)
        defaults = '[defaults]\ndurability = "none"\nredelivery_delay = 0\n'
        with (folder / "dropq.toml").open("a") as file:
            file.write(defaults)
        topic = scene.root.create_topic(TOPIC)
        topic.create_subscription("all", client_id="x")
        topic.create_subscription("urgent", client_id="x", filter=FILTER)
        for name in (START, END, AUDIT):
            scene.root.create_queue(name)
        scene.root.create_queue(VIEW, underlying_topic=TOPIC)
        scene.root.queue(START).add_selector("on", to=END, credit=1000)
        scene.root.queue(START).add_selector("audit", to=AUDIT, op="copy")
        return scene

    @property
    def root(self) -> Root:
        """The root as another program opens it."""
        return timed(Root(self.path, clock=self.clock), TIMING)

    def publish(self, name: str, *, priority: int = 4) -> bool | None:
        """Publish a message; return whether its receivers have it."""
        self.expect(TOPIC, name, priority)
        return self.root.topic(TOPIC).publish(body(name), priority=priority).distributed

    def send(self, name: str) -> None:
        """Send a message to the first queue of the graph."""
        self.expect(START, name)
        self.root.queue(START).send(body(name))

    def drop(self, address: str, file: str, name: str) -> None:
        """Send a file as a script does."""
        self.expect(address, name)
        drop(self.root.queue(address), file, body(name))

    def expect(self, address: str, name: str, priority: int = 4) -> None:
        """Note where a message is to lie in the end that was sent to an address."""
        self.expected.update((location, name) for location in self.locations(address, priority))

    def locations(self, address: str, priority: int = 4) -> list[str]:
        """Return where a message is to lie in the end that was sent to an address."""
        urgent = [URGENT] if priority >= 7 else []
        return {TOPIC: [TOPIC, ALL, VIEW, *urgent], START: [END, AUDIT]}.get(address, [address])

    def refused(self, words: str, act: Callable[[], object]) -> None:
        """Do what is to be refused, in words."""
        try:
            act()
        except DropqError as error:
            if words not in str(error):
                self.wrong.append(f"is refused by {error!r}, without {words!r}")
            return
        self.wrong.append(f"is not refused: {words!r}")

    def untold(self, words: str, address: str) -> list[str]:
        """Return that it is not told why what is at an address stays there, if it is not."""
        queue = self.root.queue(address)
        said = [f"{explained.why}: {explained.detail}" for explained in queue.explain()]
        said += [reason.message for reason in queue.health().reasons]
        return [] if any(words in line for line in said) else [f"of {address} nobody says {words!r}: {said}"]

    def go_on(self) -> None:
        """Sweep and route, until nothing waits that is to go on."""
        for _ in range(ROUNDS):
            self.clock.advance(LAPSE)
            self.root.sweep()
            for queue in self.root.queues():
                queue.route()
            if not any(self.root.queue(each).counts()[state] for each in (TOPIC, START) for state in _UNSETTLED):
                return
        self.wrong.append(f"after {ROUNDS} sweeps something waits still")

    def receive(self, address: str) -> None:
        """Receive what waits at an address, and acknowledge it."""
        self.received.update((address, name) for name in _drained(self.root.queue(address)))

    def judge(self, row: Row) -> None:
        """Go on, receive all, and hold what lies in the root against what is to."""
        self.go_on()
        queues = self.root.queues()
        passed_on = {START, *(queue.name for queue in queues if queue.layout.is_topic)}
        for queue in queues:
            if queue.name not in passed_on:
                self.receive(queue.name)
        found = look(self.path)
        self.wrong += [f"{path} is not whole" for path in found.damaged]
        lying = Counter(
            (_location(address_of(location)), name) for name, at in found.locations.items() for location in at
        )
        for each in self.perhaps:
            if not (each - lying) or any(lies in lying for lies in each):
                self.expected += each
        row.cases += self.expected.total()
        row.kills += self.kills
        lost, doubled = self.expected - lying, lying - self.expected
        row.lost += lost.total()
        row.doubled += doubled.total()
        self.wrong += [f"{name!r} is missing in {address}" for address, name in lost]
        self.wrong += [
            f"{name!r} lies in {address} {count} times too often" for (address, name), count in doubled.items()
        ]
        for (address, name), count in (self.expected | self.received).items():
            if address not in passed_on and "/error" not in address and self.received[address, name] != count:
                self.wrong.append(f"{name!r} was received {self.received[address, name]} times from {address}")


_UNSETTLED = ("target", "processing", "delayed")


def _location(address: str) -> str:
    return address.removesuffix("/processed")


def _drained(queue: Queue) -> Iterator[str]:
    with queue.subscribe(max_backlog=None) as subscription:
        while (message := subscription.receive()) is not None:
            yield name_of(message.body) or message.file
            message.ack()


# -- stories ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Teller:
    """Tells stories, each in a new root.

    Args:
        options: how the part is run.
        row: what counts them.
    """

    options: Options
    row: Row

    def tell(self, name: str, story: Callable[[Scene], object], *, dropboxmq: bool = False) -> None:
        """Tell a story and judge it."""
        folder = self.options.folder / "hard"
        scene = Scene.built(folder, dropboxmq=dropboxmq)
        story(scene)
        scene.judge(self.row)
        self.row.wrong += [f"{name}: {line}" for line in scene.wrong]
        shutil.rmtree(folder)

    def moments(self, count: int) -> list[int]:
        """Return before which of so many calls something is to happen."""
        chance = random.Random(self.options.seed)
        return list(range(count)) if self.options.long else sorted(chance.sample(range(count), min(count, MOMENTS)))

    def tell_at_each(
        self,
        name: str,
        count: Callable[[Scene], int],
        story: Callable[[Scene, int], object],
        *,
        dropboxmq: bool = False,
    ) -> None:
        """Tell a story at each call of an act, or at some; `count` does the act, and returns the number of calls."""
        scene = Scene.built(self.options.folder / "hard", dropboxmq=dropboxmq)
        calls = count(scene)
        shutil.rmtree(self.options.folder / "hard")
        for number in self.moments(calls):
            what = f"{name}, call {number + 1} of {calls}"
            self.tell(what, lambda scene, number=number: story(scene, number), dropboxmq=dropboxmq)  # type: ignore[misc]


def _counted(folder: Path, act: Callable[[], object]) -> int:
    """Return how many calls an act makes that change something."""

    def counting() -> None:
        dying = Dying(None)
        come_between(dying)
        act()
        (folder / "calls").write_text(str(len(dying.calls)))

    assert forked(counting) == 0
    return int((folder / "calls").read_text())


def _dies(scene: Scene, act: Callable[[], object], number: int) -> None:
    """Let a process die of an act, after so many calls that change something."""

    def die() -> None:
        come_between(Dying(Moment(number)))
        act()

    assert forked(die) == DIED
    scene.kills += 1


def few(teller: Teller) -> None:
    """A topic has more receivers than this process has descriptors, and eight threads publish at once."""

    def story(scene: Scene) -> None:
        topic = scene.root.topic(TOPIC)
        more = [topic.create_subscription(f"s{number}", client_id="x").name for number in range(MANY)]
        names = [f"by thread {number}" for number in range(THREADS)]

        def publish() -> None:
            few_descriptors()
            own = scene.root.topic(TOPIC)
            with ThreadPoolExecutor(THREADS) as threads:
                assert all(sent.distributed for sent in threads.map(own.publish, map(body, names)))

        if forked(publish):
            scene.wrong.append("not all is distributed at once")
        for name in names:
            scene.expect(TOPIC, name)
            scene.expected.update((address, name) for address in more)

    teller.tell("few descriptors", story)


def closed(teller: Teller) -> None:
    """A receiver is closed to who publishes: by its folder, its target/, or its configuration."""
    for address in (ALL, VIEW, AUDIT):
        for below, mode in (("", 0), ("target", 0o555), ("queue.toml", 0)):
            teller.tell(f"{address}/{below} is closed", partial(_closed, address=address, below=below, mode=mode))


def _closed(scene: Scene, *, address: str, below: str, mode: int) -> None:
    path = Path(scene.root.queue(address).layout.base, below)
    if below == "queue.toml" and not path.exists():
        path.write_text("")
    before = path.stat().st_mode
    path.chmod(mode)

    def act() -> list[bool | None]:
        scene.send("sent")
        done = [scene.publish("published"), scene.publish("urgent", priority=8)]
        for queue in (TOPIC, START):
            scene.root.queue(queue).route()
        return done

    done = unprivileged(act)
    scene.expect(START, "sent")
    scene.expect(TOPIC, "published")
    scene.expect(TOPIC, "urgent", 8)
    if address in (ALL, VIEW):
        if done != [False, False]:
            scene.wrong.append(f"publish says {done}")
        scene.wrong += unprivileged(lambda: scene.untold(address, TOPIC))
    path.chmod(before)


def unreadable(teller: Teller) -> None:
    """Among files that scripts sent are some that nobody here may read."""

    def story(scene: Scene) -> None:
        for address in (TOPIC, START):
            for number in range(9):
                name, file = f"{number} in {address}", f"report-{number}.csv"
                drop(scene.root.queue(address), file, body(name))
                if number % 3:
                    scene.expect(address, name)
                    continue
                Path(scene.root.queue(address).layout.target, file).chmod(0)
                scene.expected[f"{address}/error", name] += 1

        def act() -> None:
            for _ in range(3):
                for address in (TOPIC, START):
                    scene.root.queue(address).route()
            scene.root.sweep()

        unprivileged(act)
        for address in (TOPIC, START):
            error = Path(scene.root.queue(address).layout.error)
            for path in error.iterdir():
                path.chmod(0o644)
            said = {(message.reason or {}).get("reason") for message in scene.root.queue(address).browse("error")}
            if said != {"unreadable"}:
                scene.wrong.append(f"in error/ of {address} the reasons are {said}")

    teller.tell("bodies that cannot be read", story)


def ignored(teller: Teller) -> None:
    """Receivers ignore names that the topic, or the queue before them, does not."""

    def story(scene: Scene) -> None:
        for address in (ALL, VIEW, END, AUDIT):
            with Path(scene.root.queue(address).layout.config_file).open("a") as file:
                file.write('ignore = ["*.part", "*.tmp"]\n')
        for address in (TOPIC, START):
            with Path(scene.root.queue(address).layout.config_file).open("a") as file:
                file.write("ignore = []\n")
            for file_name in ("batch.part", "x.tmp", "report.csv"):
                scene.drop(address, file_name, f"{file_name} in {address}")

    teller.tell("names that receivers ignore", story)


def equal_names(teller: Teller) -> None:
    """Files of one name are sent everywhere, again and again."""

    def story(scene: Scene) -> None:
        for number in range(4):
            for address in (TOPIC, ALL, VIEW, START, END, AUDIT):
                target = Path(scene.root.queue(address).layout.target)
                if (target / "report.csv").exists():  # a script must not replace it, so a consumer takes it first
                    scene.receive(address)
                scene.drop(address, "report.csv", f"{number} in {address}")
                scene.root.queue(address).route()
                scene.root.sweep()

    teller.tell("equal names", story)


def moved(teller: Teller) -> None:
    """A root is moved by `cp -a` with what its programs left as they died, committed or not."""

    def act(scene: Scene) -> None:
        topic = scene.root.topic(TOPIC)
        topic.publish(body("published"), priority=8)
        scene.root.queue(START).route()

    def count(scene: Scene) -> int:
        scene.send("sent")
        return _counted(teller.options.folder, lambda: act(scene))

    def story(scene: Scene, number: int) -> None:
        scene.send("sent")
        scene.perhaps.append(Counter((location, "published") for location in scene.locations(TOPIC, 8)))
        _dies(scene, lambda: act(scene), number)
        old = scene.path.with_name("old")
        scene.path.rename(old)
        subprocess.run(["cp", "-a", old, scene.path], check=True)
        shutil.rmtree(old)

    teller.tell_at_each("a root moved by cp -a", count, story)


def dying_view(teller: Teller) -> None:
    """A view dies half-way: who makes it, fills it, or removes it, is killed; what is published waits for it."""

    def remove(scene: Scene) -> None:
        scene.root.delete_queue(VIEW)

    def removing(scene: Scene, number: int) -> None:
        _dies(scene, lambda: remove(scene), number)
        scene.publish("meanwhile")
        scene.clock.advance(LAPSE)
        scene.root.sweep()
        if not scene.root.queue(VIEW).exists():
            del scene.expected[VIEW, "meanwhile"]
        scene.publish("afterwards")
        if not scene.root.queue(VIEW).exists():
            del scene.expected[VIEW, "afterwards"]

    def make(scene: Scene) -> None:
        scene.root.create_queue("late", underlying_topic=TOPIC)

    def calls_of_making(scene: Scene) -> int:
        scene.publish("before")
        return counted(partial(make, scene))

    def making(scene: Scene, number: int) -> None:
        scene.publish("before")
        _dies(scene, lambda: make(scene), number)
        there = scene.root.queue("late").exists()
        scene.publish("meanwhile")
        scene.clock.advance(LAPSE)
        scene.root.sweep()
        try:
            make(scene)
        except QueueExists:
            if not there:
                scene.wrong.append("it was not there, and cannot be made")
        scene.publish("afterwards")
        scene.expected.update(("late", name) for name in ("before", "meanwhile", "afterwards"))

    counted = partial(_counted, teller.options.folder)
    teller.tell_at_each("a view is removed", lambda scene: counted(partial(remove, scene)), removing)
    teller.tell_at_each("a view is made", calls_of_making, making)


def _on_a_disk_that_is_away(path: Path) -> None:
    path.rename(path.parent.parent / "disk")


def _behind_a_link_that_leads_nowhere(path: Path) -> None:
    _on_a_disk_that_is_away(path)
    path.symlink_to(path.parent.parent / "no such disk" / path.name)


def _beneath_an_empty_mount_point(path: Path) -> None:
    _on_a_disk_that_is_away(path)
    path.mkdir()


def away(teller: Teller) -> None:
    """The disk of a queue is away for days, while others go on."""
    for leave in (_on_a_disk_that_is_away, _behind_a_link_that_leads_nowhere, _beneath_an_empty_mount_point):
        for address in (VIEW, END, AUDIT):
            teller.tell(f"{address} lies {leave.__name__[1:]}", partial(_away, address=address, leave=leave))


def _away(scene: Scene, *, address: str, leave: Callable[[Path], None]) -> None:
    opened = scene.root.queue(address)
    scene.send("before")
    scene.publish("before too")
    leave(scene.path / address)
    for queue in (opened, scene.root.queue(address)):
        scene.refused(f"queue {address} is", lambda queue=queue: queue.send(body("nowhere")))  # type: ignore[misc]
    scene.send("meanwhile")
    distributed = scene.publish("meanwhile too")
    if distributed != (address != VIEW):
        scene.wrong.append(f"publish says {distributed}")
    for _ in range(3):
        scene.root.queue(START).route()
        scene.clock.advance(LONG)
        scene.root.sweep()
    scene.wrong += scene.untold(address, TOPIC if address == VIEW else START)
    path = scene.path / address
    path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
    (scene.path.parent / "disk").rename(path)


def maintenance(teller: Teller) -> None:
    """A root is maintained for days: nobody routes and nobody works. A router comes back a moment before the worker."""

    def story(scene: Scene) -> None:
        desk = scene.root.create_queue("desk")
        desk.add_selector("never", to=END, filter="nobody IS NOT NULL")
        scene.root.queue("desk").route()
        with desk.subscribe() as worker:
            worker.receive()
        for number in range(3):
            desk.send(body(f"{number}"))
            scene.expected["desk", f"{number}"] += 1
        scene.clock.advance(LONG)
        scene.root.queue("desk").route()
        scene.receive("desk")

    teller.tell("maintenance", story)


def creators(teller: Teller) -> None:
    """Two programs make a topic, or a queue, of one name at once: one makes it, as it asked for, and one is refused."""

    def make(root: Root, kind: str, deliveries: int) -> str:
        try:
            (root.create_topic if kind == "topic" else root.create_queue)("both", max_deliveries=deliveries)
        except QueueExists as error:
            return str(error)
        return ""

    def meet(scene: Scene, number: int, kind: str) -> int:
        both = (partial(make, scene.root, kind, deliveries) for deliveries in (1, 2))
        calls, said = met(teller.options.folder, number, *both)
        if kind == "topic":
            scene.root.topic("both").create_subscription("s", client_id="x")
        made = scene.root.queue("both/s.x" if kind == "topic" else "both")
        scene.root.queue("both").send(body("to both"))
        scene.expected.update({(address, "to both") for address in ("both", made.name)})
        if said.count("") != 1 or made.config.max_deliveries != said.index("") + 1:
            scene.wrong.append(f"they hear {said}, and it has max_deliveries = {made.config.max_deliveries}")
        return calls

    for kind in ("topic", "queue"):
        story = partial(meet, kind=kind)
        teller.tell_at_each(f"two make a {kind}", partial(story, number=-1), story)


def beside_a_jar(teller: Teller) -> None:
    """A topic of DropboxMQ's layout is published to by both, while consumers claim in between: each copy comes once."""

    def consume(scene: Scene) -> str:
        names = [(each, name) for each in (ALL, URGENT, VIEW) for name in _drained(scene.root.queue(each))]
        with (teller.options.folder / "received").open("a") as file:
            file.writelines(json.dumps(name) + "\n" for name in names)
        return ""

    def publish(scene: Scene) -> str:
        scene.root.topic(TOPIC).publish(body("of dropq"), priority=8)
        return ""

    def meet(scene: Scene, number: int) -> int:
        (teller.options.folder / "received").write_text("")
        for linked in Path(scene.path, "topic-root", TOPIC, ".subscriptions").iterdir():
            base = linked / "incoming" if (linked / "incoming").exists() else linked
            draft = base / "working" / "8.jar-1.B"  # as the jar does: one subscription after the other
            draft.write_bytes(body("of the jar"))
            draft.rename(base / "target" / draft.name)
        scene.expected.update((address, "of the jar") for address in (ALL, URGENT, VIEW))
        calls, _ = met(teller.options.folder, number, partial(publish, scene), partial(consume, scene))
        scene.expect(TOPIC, "of dropq", 8)
        for line in (teller.options.folder / "received").read_text().splitlines():
            scene.received[tuple(json.loads(line))] += 1
        return calls

    teller.tell_at_each("beside a jar", partial(meet, number=-1), meet, dropboxmq=True)


#: The stories, each by what it tells.
STORIES: dict[str, Callable[[Teller], None]] = {
    "few descriptors": few,
    "receivers that this user cannot open": closed,
    "bodies that cannot be read": unreadable,
    "names that only receivers ignore": ignored,
    "equal foreign names": equal_names,
    "a root moved by cp -a": moved,
    "a view that dies half-way": dying_view,
    "disks that are away": away,
    "maintenance longer than unroutable_after": maintenance,
    "two creators at once": creators,
    "a topic beside a jar's layout": beside_a_jar,
}


def run(options: Options) -> list[Row]:
    """Return a row for each story."""
    return [run_story(options, name) for name in STORIES]


def run_story(options: Options, name: str) -> Row:
    """Tell a story; return what it came to."""
    row = Row(f"hardships: {name}")
    STORIES[name](Teller(options, row))
    return row
