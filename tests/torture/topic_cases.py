"""Topics, with something between a program and the file system: it dies, a call is refused, or another program works.

Whoever is left goes on: a sweep, the same verb once more where that is harmless, and consumers that take all there is.
Then each subscription has got each message exactly once, and two days later nothing is left over.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from forks import DIED, forked
from helpers import FRESH, Clock, timed

from dropq import DropqError, NoSuchQueue, Queue, QueueExists, Root, Subscription
from dropq.api import Topic
from dropq.staging import fan_out
from dropq.staging.jobs import Job
from torture import acts, faults
from torture.account import body, look, name_of
from torture.acts import Meeting
from torture.calls import Between
from torture.cases import DAYS, Said
from torture.faults import UNDONE
from torture.table import Row

#: What only the filtered subscription gets, besides those that get everything, says so in its name.
URGENT = "urgent"
FILTER = "JMSPriority >= 7"
#: What was published, got and settled; what was distributed; and what scripts published that nobody distributed.
OLD, GIVEN, WAITS = ("old", f"old, {URGENT}"), ("given",), ("waits", f"waits, {URGENT}")
#: What a distributor that died had claimed, and perhaps committed.
LEFT = f"left, {URGENT}"
NEW = f"new, {URGENT}"
#: The longest that a program waits for the policy lock of another that cannot go on meanwhile.
TIMING = replace(FRESH, lock_patience=0.01)

ALL, SOME, TOP, MADE, MOVED = "a.b/all.x", "a.b/some.x", "a/top.x", "a.b/made.y", "a/all.x"
VIEW = "view"
#: How long a distributor's claim lasts, and a bit.
LAPSE = 61


@dataclass(frozen=True)
class Setting(acts.Setting):
    """How a topic is configured, and what its file system can do."""

    #: Whether a view on the topic gets what is published, too.
    view: bool = False


SETTINGS = (
    Setting("plain"),
    Setting("no history, modes, a view", {"history": False, "file_mode": "0640"}, view=True),
    Setting("no rename that replaces nothing", noreplace=False),
    Setting("no rename replaces, one to a folder leads into it", noreplace=False, into_folders=True),
)


@dataclass
class Scene:
    """A root with a topic below another, and who works there."""

    root: Root
    clock: Clock
    topic: Topic
    reader: Subscription

    def other(self) -> Root:
        """Return the root as another program opens it."""
        return timed(Root(self.root.path, clock=self.clock), TIMING)


_EVERYTHING = (*OLD, *GIVEN, *WAITS)
#: What each subscription is to get in the end, of what was published before.
Gets = Mapping[str, Sequence[str]]
_STANDING: Gets = {ALL: _EVERYTHING, SOME: _EVERYTHING, TOP: _EVERYTHING}
_WITH_LEFT: Gets = dict.fromkeys(_STANDING, (*_EVERYTHING, LEFT))
_WITHOUT: Gets = {SOME: _EVERYTHING, TOP: _EVERYTHING}


@dataclass(frozen=True)
class Case:
    """What a program does that something comes between, and what is to come of it."""

    name: str
    act: Callable[[Scene], object]
    #: What is done before, and what is done once more after it.
    before: Callable[[Scene], object] = lambda scene: None
    again: Callable[[Root], object] = lambda root: None
    #: Messages that it publishes; and whether it is all of them, or none.
    publishes: tuple[str, ...] = ()
    whole: bool = True
    #: The subscriptions that there are in the end, and what each gets of what was published before.
    gets: Gets = field(default_factory=lambda: _STANDING)
    #: The subscription that it makes for what comes later, which gets nothing of what others distribute before.
    makes: str = ""
    #: Whether it writes in working/, where a program that dies leaves its draft, as any sender does.
    drafts: bool = False
    #: Messages that it settles in the subscription `ALL`.
    settles: tuple[str, ...] = ()
    #: Messages of which a copy may lie in the topic's error/, as its receiver is gone.
    told: tuple[str, ...] = ()


def wants(address: str, name: str) -> bool:
    """Return whether a subscription gets a message."""
    return URGENT in name or address != SOME


# -- what is done --------------------------------------------------------------------------------------------------


def _sweep(scene: Scene) -> None:
    scene.topic.queue.sweep()


def _publish_many(scene: Scene) -> None:
    scene.topic.queue.send_many([{"body": body(name), "priority": 8} for name in (NEW, f"{NEW} 2")])


def _publish_job(scene: Scene) -> None:
    job = Job(scene.topic.queue.context, "job")
    job.begin()
    attempt = job.attempt("only")
    attempt.write_all([f"8.job-{number}.B" for number in range(2)], [body(name) for name in (NEW, f"{NEW} 2")])
    job.commit([attempt.finish()])
    _sweep(scene)


def _receive(scene: Scene) -> None:
    message = scene.reader.receive()
    assert message is not None
    message.ack()


def _subscribe(root: Root, **how: Any) -> Queue:
    return root.topic("a.b").create_subscription("made", client_id="y", **how)


def _filtered(root: Root) -> Queue:
    return root.topic("a.b").create_subscription("all", client_id="x", filter=FILTER)


def _moved(root: Root) -> Queue:
    return root.topic("a").create_subscription("all", client_id="x")


def _unsubscribe(root: Root, name: str = "all") -> None:
    with suppress(NoSuchQueue):
        root.topic("a.b").unsubscribe(name, client_id="x")


def _create(root: Root) -> None:
    with suppress(QueueExists):
        root.create_topic("a.c", max_deliveries=3)


def _pass_by(scene: Scene) -> None:
    """Subscribe for a moment."""
    with scene.root.topic("a.b").subscribe("passing", client_id="y", durable=False) as passing:
        passing.receive()


def _free(scene: Scene) -> None:
    """Let the reader end, as a subscription that is in use is not removed."""
    scene.reader.close()


def _die(scene: Scene, step: str) -> None:
    """Let a distributor die before a step of its distribution."""
    with mock.patch.object(fan_out, step, side_effect=lambda *_, **__: os._exit(DIED)):
        assert forked(lambda: scene.other().topic("a.b").publish(body(LEFT), priority=9)) == DIED


def _uncommitted(scene: Scene) -> None:
    _die(scene, "_commit")


def _committed(scene: Scene) -> None:
    _die(scene, "roll_forward")


def _committed_and_free(scene: Scene) -> None:
    _free(scene)
    _committed(scene)


def _half_made(scene: Scene) -> None:
    """Let a program die that has made a subscription with a recovery point, and not filled it."""
    with mock.patch("dropq.upkeep.recovery._begin_again", side_effect=lambda *_: os._exit(DIED)):
        assert forked(lambda: _subscribe(scene.other(), recovery_point="epoch")) == DIED


CASES = (
    Case("publish", lambda scene: scene.topic.publish(body(NEW), priority=8), publishes=(NEW,)),
    Case("publish at length", lambda scene: scene.topic.publish(body(NEW, 1 << 21), priority=8), publishes=(NEW,)),
    Case("publish many", _publish_many, publishes=(NEW, f"{NEW} 2"), whole=False),
    Case("publish by a job", _publish_job, publishes=(NEW, f"{NEW} 2")),
    Case("distribute by a sweep", _sweep),
    Case("distribute by a receive", _receive, settles=_EVERYTHING),
    Case("roll forward", _sweep, before=_committed, gets=_WITH_LEFT),
    Case("drop what was not committed", _sweep, before=_uncommitted, gets=_WITH_LEFT),
    Case(
        "subscribe", lambda scene: _subscribe(scene.root), again=_subscribe, gets={**_STANDING, MADE: WAITS}, makes=MADE
    ),
    Case(
        "subscribe from the beginning",
        lambda scene: _subscribe(scene.root, recovery_point="epoch"),
        before=_committed,
        again=lambda root: _subscribe(root, recovery_point="epoch"),
        gets={**_WITH_LEFT, MADE: (*_EVERYTHING, LEFT)},
        drafts=True,
    ),
    Case(
        "go on with a recovery",
        lambda scene: scene.root.queue(MADE).sweep(),
        before=_half_made,
        gets={**_STANDING, MADE: _EVERYTHING},
        drafts=True,
    ),
    Case(
        "subscribe under another filter",
        lambda scene: _filtered(scene.root),
        before=_free,
        again=_filtered,
        gets={**_WITHOUT, ALL: (WAITS[1],)},
        makes=ALL,
    ),
    Case(
        "subscribe to another topic",
        lambda scene: _moved(scene.root),
        before=_free,
        again=_moved,
        gets={**_WITHOUT, MOVED: WAITS},
        makes=MOVED,
    ),
    Case(
        "unsubscribe",
        lambda scene: scene.topic.unsubscribe("all", client_id="x"),
        before=_committed_and_free,
        again=_unsubscribe,
        gets=dict.fromkeys(_WITHOUT, (*_EVERYTHING, LEFT)),
        told=(LEFT,),
    ),
    Case("subscribe for a moment", _pass_by, told=_EVERYTHING),
    Case("create a topic", lambda scene: scene.root.create_topic("a.c", max_deliveries=3), again=_create),
)

#: What others come between: what distributes, and what changes who gets what.
MEETING = tuple(case for case in CASES if case.name not in ("publish many", "publish by a job", "create a topic"))


# -- what comes between --------------------------------------------------------------------------------------------


def _lapse(scene: Scene) -> None:
    """Take the living for dead: sweep when their claims have lapsed."""
    scene.clock.advance(LAPSE)
    scene.other().topic("a.b").queue.sweep()


def _long_after(scene: Scene) -> None:
    """Take the living for dead, and come again when no fence stands any more."""
    _lapse(scene)
    scene.clock.ms += DAYS
    scene.other().topic("a.b").queue.sweep()


def _distribute(scene: Scene) -> None:
    with scene.other().queue(TOP).subscribe() as consumer:
        consumer.receive()


#: What another program does, what is done once more if it could not, and how that changes what each gets.
Other = tuple[Callable[[Scene], object], Callable[[Root], object], Callable[[Gets], Gets]]
OTHERS: Mapping[str, Other] = {
    "a sweep that takes the living for dead": (_lapse, lambda root: None, lambda gets: gets),
    "such a sweep, and one after days": (_long_after, lambda root: None, lambda gets: gets),
    "a consumer": (_distribute, lambda root: None, lambda gets: gets),
    "a recovery": (
        lambda scene: _subscribe(scene.other(), recovery_point="epoch"),
        lambda root: _subscribe(root, recovery_point="epoch"),
        lambda gets: {**gets, MADE: gets[TOP]},
    ),
    "an unsubscribe": (
        lambda scene: _unsubscribe(scene.other(), "some"),
        lambda root: _unsubscribe(root, "some"),
        lambda gets: {address: names for address, names in gets.items() if address != SOME},
    ),
}


# -- the cases of a setting ----------------------------------------------------------------------------------------


class TopicCases(acts.Acts[Case, Scene]):
    """The cases of one setting.

    Args:
        folder: where each case makes its root.
        setting: the setting.
        row: what counts them.
    """

    def __init__(self, folder: Path, setting: Setting, row: Row) -> None:
        super().__init__(folder, setting, row)
        self._setting = setting
        self._received: Counter[tuple[str, str]] = Counter()

    def meet(self, case: Case, other: str, choose: Callable[[list[int]], list[int]] = list) -> None:
        """Let another program work between every two calls, or some."""
        work, again, change = OTHERS[other]
        said = self.undisturbed(case, Meeting(-1))

        def both(root: Root) -> None:
            case.again(root)
            again(root)

        spared = (*case.told, *(name for name in (*_EVERYTHING, LEFT, *case.publishes) if other == "an unsubscribe"))
        met = replace(case, again=both, gets=change(case.gets), told=spared)

        def meeting(number: int, scene: Scene) -> Between:
            return Meeting(number, partial(work, scene))

        late = (case.makes,) if self._setting.history else (case.makes, MADE)  # what has no archive cannot catch up
        for number in choose(list(range(len(said.calls)))):
            what = self.perform(case, partial(meeting, number))
            assert what is not None
            self.judge(met, f"{case.name}, {other} before call {number + 1} of {len(said.calls)}", what, late=late)

    def enter(self, case: Case) -> Scene:
        scene = build(self._folder / "root", self._setting, self._clock)
        case.before(scene)
        return scene

    def act(self, case: Case, scene: Scene) -> object:
        return case.act(scene)

    # -- judging -------------------------------------------------------------------------------------------------

    def judge(
        self, case: Case, where: str, said: Said | None = None, *, late: Collection[str] = (), read_only: bool = False
    ) -> None:
        """Let others go on, then see that each subscription got each message exactly once, and what is left over."""
        self.row.cases += 1
        self._received.clear()
        with self.mounted():
            try:
                if said is not None:
                    self._clock.advance(LAPSE)  # a distributor that ended with an error may have left its claim
                self._go_on(case)
            except (DropqError, OSError) as error:
                self.row.wrong.append(f"{where}: {error!r}")
                return
        died = read_only or said is None or bool(said.raised)
        wrong = [*self._wrong_reports(case, said), *self._account(case, late), *self._left_over(case, died)]
        self.row.wrong += [f"{where}: {line}" for line in wrong]

    def _go_on(self, case: Case) -> None:
        case.again(self._root())
        self._root().sweep()
        for queue in self._root().queues():
            if "/" in queue.name or queue.name == VIEW:
                with suppress(NoSuchQueue):  # of a holder that died: a sweep removed it meanwhile
                    self._drain(queue)
        for _ in range(2):
            self._clock.ms += DAYS
            self._root().sweep()

    def _root(self) -> Root:
        return timed(Root(self._folder / "root", clock=self._clock), TIMING)

    def _drain(self, queue: Queue) -> None:
        with queue.subscribe(max_backlog=None) as subscription:
            while (message := subscription.receive()) is not None:
                self._received[queue.name, name_of(message.body) or message.file] += 1
                message.ack()

    def _account(self, case: Case, late: Collection[str]) -> Iterator[str]:
        """Yield what is lost or doubled; those in `late` may have come too late for what was distributed before."""
        lying = self._lying()
        there = {address for address, _ in lying} | {address for address, _ in self._received}
        published = {name for name in case.publishes if any((address, name) in lying for address in there)}
        if not self._setting.history:
            published = {name for address, name in self._received if name in case.publishes}
        if case.whole and published and published != set(case.publishes):
            yield f"a part is published: {sorted(published)}"
        gets = {**case.gets, VIEW: case.gets[TOP]} if self._setting.view else case.gets
        for address, before in gets.items():
            for name in (*before, *published):
                yield from self._judge_one(case, address, name, lying[address, name], late)
        expected = {(address, name) for address, names in gets.items() for name in (*names, *published)}
        for (address, name), count in lying.items():
            if address not in gets and not address.endswith((".incoming", "error")):
                yield f"{name!r} lies in {address}, which is to be gone"
            elif address in gets and (address, name) not in expected:
                yield f"{name!r} lies in {address} {count} times"
        yield from self._judge_topic(case, lying, published)

    def _judge_one(self, case: Case, address: str, name: str, lies: int, late: Collection[str]) -> Iterator[str]:
        received = self._received[address, name]
        wanted = int(wants(address, name))
        if address == MADE and not self._setting.history and name in (*OLD, *GIVEN, LEFT):
            return  # nothing is archived to begin with; LEFT may come before it or after
        settled = name in OLD or (address == ALL and name in case.settles) or name == LEFT
        found = lies if self._setting.history else received
        if found > wanted:
            self.row.doubled += 1
            yield f"{address} got {name!r} {found} times"
        elif found < wanted and (self._setting.history or not settled) and address not in late:
            self.row.lost += 1
            yield f"{address} did not get {name!r}"
        if received > wanted:
            self.row.doubled += 1
            yield f"{name!r} was received {received} times from {address}"

    def _judge_topic(self, case: Case, lying: Counter[tuple[str, str]], published: set[str]) -> Iterator[str]:
        aside = {name: count for (address, name), count in lying.items() if address == "error"}
        for name, count in aside.items():
            if count > case.told.count(name):
                self.row.doubled += 1
                yield f"{name!r} lies in the topic's error/ {count} times"
        if self._setting.history:
            for name in (*_EVERYTHING, *published):
                if lying["a.b/.incoming", name] != 1:
                    yield f"the topic has {name!r} {lying['a.b/.incoming', name]} times"

    def _lying(self) -> Counter[tuple[str, str]]:
        """Return how often each body lies in each subscription, the topic, and the topic's error/."""
        found = look(self._folder / "root")
        self.row.wrong += [f"{path} is not whole" for path in found.damaged]
        lying: Counter[tuple[str, str]] = Counter()
        for name, locations in found.locations.items():
            for location in locations:
                topic, _, below = location.queue.removeprefix("topic-root/").replace("/.", "\0.", 1).partition("\0")
                subscription = below.removeprefix(".subscriptions/")
                address = f"{topic.replace('/', '.')}/{subscription}" if below else topic
                if subscription == ".incoming" and location.state == "error":
                    address = "error"
                lying[address, name] += 1
        return lying

    def _left_over(self, case: Case, died: bool) -> Iterator[str]:
        """Yield what is still there after days that nobody needs; who `died` could not remove a draft."""
        for folder, folders, names in os.walk(self._folder / "root"):
            last = os.path.basename(folder)
            below = os.path.relpath(folder, self._folder / "root")
            in_private = os.path.basename(os.path.dirname(folder)) == ".dropq"
            if in_private and last in ("staged", "new", "deleting", "consumers", "delayed") and (folders or names):
                yield f"{below} has {[*folders, *names]}"
            drafted = died and last == "working" and (case.publishes or case.drafts)
            holds = not in_private and last in ("target", "processing", "working") and not drafted
            if holds and (folders or names):
                yield f"{below} has {[*folders, *names]}"
            strange = [name for name in (*folders, *names) if name.startswith(".gone-")]
            if strange:
                yield f"{below} has {strange}"

    def _wrong_reports(self, case: Case, said: Said | None) -> Iterator[str]:
        """Yield what a publish said that is not so."""
        if said is None or not case.publishes:
            return
        there = {name for _, name in (*self._lying(), *self._received)} & {*case.publishes}
        undone = faults.SOME not in said.words and any(fate in said.words for fate in UNDONE)
        if said.raised and undone and there:
            yield f"says {said.words!r}, and {sorted(there)} is there"
        if not said.raised and there != {*case.publishes}:
            self.row.lost += 1
            yield f"returned, and only {sorted(there)} is there"
        if said.raised and said.raised != "StorageError":
            yield f"raises {said.raised}: {said.words}"


# -- the scene -----------------------------------------------------------------------------------------------------


def build(folder: Path, setting: Setting, clock: Clock) -> Scene:
    """Make a root in which a topic and the one above it have subscriptions, and something lies everywhere."""
    folder.mkdir()
    root = timed(Root.create(folder, clock=clock), TIMING)
    options = {"redelivery_delay": 0, **setting.options}
    root.create_topic("a", **options)
    topic = root.create_topic("a.b", **options)
    everybody = [
        topic.create_subscription("all", client_id="x"),
        topic.create_subscription("some", client_id="x", filter=FILTER),
        root.topic("a").create_subscription("top", client_id="x"),
    ]
    if setting.view:
        everybody.append(root.create_queue(VIEW, underlying_topic="a.b", **options))
    for name in OLD:
        topic.publish(body(name), priority=8 if URGENT in name else 4)
    for queue in everybody:
        with queue.subscribe(max_backlog=None) as subscription:
            while (message := subscription.receive()) is not None:
                message.ack()
    for name in GIVEN:
        topic.publish(body(name))
    for number, name in enumerate(WAITS):
        file = f"8.script-{number}.B" if URGENT in name else f"script {number}.csv"
        draft = Path(topic.queue.layout.working, file)
        draft.write_bytes(body(name))
        draft.rename(Path(topic.queue.layout.target, file))
    return Scene(root, clock, topic, everybody[0].subscribe(lease_period="1h"))
