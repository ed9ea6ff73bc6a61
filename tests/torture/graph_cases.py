"""Selectors and their credits, with something between a program and the file system, as `acts` has it.

Whoever is left goes on: sweeps, routers and consumers. At no moment is more unsettled than credits were granted. After
the sweeps each message lies in one place, each copy once in each receiver, and there are as many credits as unsettled
messages that came under them. In the end each message has come to its end, once, and no credit is left.
"""

from __future__ import annotations

import gc
import json
import os
import re
import secrets
import shutil
import tomllib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from forks import DIED, forked
from helpers import Clock, drop, other_file_system, timed

from dropq import DropqError, Message, NoSuchQueue, Queue, QueueExists, Root, Subscription
from dropq.format.credits import HOPS_LIMIT
from dropq.lifecycle import credits
from dropq.lifecycle.moving import Moves
from dropq.routing import credit_audit, registry
from dropq.staging import fan_out
from torture import acts
from torture.account import body, in_short, look, name_of
from torture.acts import Meeting
from torture.calls import Between, Call
from torture.cases import DAYS, Said
from torture.faults import UNDONE
from torture.table import Row
from torture.topic_cases import LAPSE, TIMING

#: Seconds between the two audits that must find a credit without a message.
AUDIT_INTERVAL = 0.01
#: How often all is swept, or routed and drained, until nothing happens any more.
ROUNDS = 24
A, B, C = "first", "second", "third"
#: A filter that no message matches.
NEVER = "nobody IS NOT NULL"

_KEY = re.compile(r"[0-9a-z]{10}")
_VIA = re.compile(r"viaS=([0-9a-z]{6}-[0-9a-z]{10})")


# -- the books -----------------------------------------------------------------------------------------------------


@dataclass
class Books:
    """What selectors were granted, what they spent, and what lies under it, as plain system calls see it."""

    #: How many credits each selector has, by its token; the spent credits, each with those below.
    granted: dict[str, int] = field(default_factory=dict)
    spent: dict[str, list[str]] = field(default_factory=dict)
    #: The credit under which each unsettled message came that came under one, by its path.
    unsettled: dict[str, str] = field(default_factory=dict)
    #: The same for messages on their way to another file system, whose copies may be settled there.
    on_the_way: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, *folders: Path) -> Books:
        """Read the books of a root, and of its queues elsewhere; what disappears meanwhile was there."""
        books = cls()
        deleted = [path for folder in folders for path in folder.glob(".*.deleted-*")]
        behind_links = tuple(f"{path.resolve()}/" for path in deleted if path.is_symlink())
        for folder, _, names in chain.from_iterable(map(os.walk, folders)):
            if ".deleted-" in folder or f"{folder}/".startswith(behind_links):
                continue  # a forced delete took its messages away: a look may free their credits first
            above, last = os.path.split(folder)
            if last == "selectors":
                for name in names:
                    if name.endswith(".toml") and not name.startswith("."):
                        books._add_selector(Path(folder, name))
            elif above.endswith("/.dropq/credits"):
                keys = filter(_KEY.fullmatch, names)
                books.spent |= {f"{last}-{key}": _below(Path(folder, key)) for key in keys}
            elif last in ("target", "processing") or folder.endswith("/.dropq/delayed"):
                found = ((name, _VIA.search(name)) for name in names)
                vias = books.on_the_way if "/.dropq/transfers/" in folder else books.unsettled
                vias |= {f"{folder}/{name}": via[1] for name, via in found if via is not None}
        return books

    def _add_selector(self, path: Path) -> None:
        try:
            said = tomllib.loads(path.read_text())
        except FileNotFoundError:
            return  # removed since it was listed
        if said.get("op", "move") == "move" and "token" in said:
            self.granted[said["token"]] = said.get("credit", 1)

    def _under(self, via: str) -> list[str]:
        return [via, *self.spent.get(via, ())]

    def overdrawn(self) -> Iterator[str]:
        """Yield what is wrong at any moment: a message without its credits, and more messages than credits."""
        under: Counter[str] = Counter()
        for path, via in self.unsettled.items():
            for each in self._under(via):
                under[each.partition("-")[0]] += 1
                if each not in self.spent:
                    yield f"credit {each} is free, and {os.path.basename(path)} is not settled"
        spent = Counter(each.partition("-")[0] for each in self.spent)
        for token, granted in self.granted.items():
            if under[token] > granted or spent[token] > granted:
                yield f"{token} was granted {granted}, spent {spent[token]}, and has {under[token]} unsettled messages"

    def leaked(self) -> Iterator[str]:
        """Yield the credits under which no unsettled message came."""
        live = {each for via in chain(self.unsettled.values(), self.on_the_way.values()) for each in self._under(via)}
        for each in sorted(self.spent.keys() - live):
            yield f"credit {each} is spent on nothing"


def _below(path: Path) -> list[str]:
    try:
        return list(json.loads(path.read_bytes())["below"])
    except (ValueError, FileNotFoundError):
        return []  # half written, by who died of it; or free since it was listed


# -- cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting(acts.Setting):
    """How the queues of a graph are configured, and laid out."""

    dropboxmq: bool = False
    #: Whether some queues lie on another file system.
    far: bool = False


#: The queues that lie there, where some do.
FAR = ("end", "audit", "answers", "letters")


SETTINGS = (
    Setting("plain"),
    Setting("no history", {"history": False}),
    Setting("not durable", {"durability": "none"}),
    Setting("no history, not durable", {"history": False, "durability": "none"}),
    Setting("DropboxMQ's layout", dropboxmq=True),
    Setting("no rename that replaces nothing", noreplace=False),
    Setting("two file systems", far=True),
)


def put_in(queue: Queue, folder: Path) -> Queue:
    """Move a new queue into a folder on another file system, and leave a link; return the queue."""
    home = Path(queue.layout.home)
    shutil.move(home, folder / home.name)
    home.symlink_to(folder / home.name)
    return queue.root.queue(queue.name)


@dataclass
class Scene:
    """A root whose queues have selectors, and who works there."""

    root: Root
    clock: Clock
    setting: Setting
    #: Where the queues lie that are on another file system.
    elsewhere: Path
    #: What is kept open.
    kept: list[Subscription] = field(default_factory=list)
    held: list[Message] = field(default_factory=list)

    def other(self) -> Root:
        """Return the root as another program opens it."""
        return timed(Root(self.root.path, clock=self.clock), TIMING)

    def make(self, address: str, **options: Any) -> Queue:
        """Make a queue."""
        options = {"redelivery_delay": 0, **self.setting.options, **options}
        queue = self.root.create_queue(address, dropboxmq=self.setting.dropboxmq, **options)
        return put_in(queue, self.elsewhere) if self.setting.far and address in FAR else queue

    def chain(self, *addresses: str, credit: int = 2) -> None:
        """Make queues, each with a selector to the next."""
        for address in addresses:
            self.make(address)
        for address, to in pairwise(addresses):
            self.queue(address).add_selector("on", to=to, credit=credit)

    def queue(self, address: str) -> Queue:
        """Return a queue."""
        return self.root.queue(address)

    def send(self, address: str, *names: str, **fields: Any) -> None:
        """Send messages."""
        for name in names:
            self.queue(address).send(body(name), **fields)

    def route(self, *addresses: str) -> None:
        """Let a router pass over queues, one after the other."""
        for address in addresses:
            self.queue(address).route()

    def hold(self, address: str) -> None:
        """Let a consumer take a message, and keep it."""
        subscription = self.queue(address).subscribe(lease_period="1h")
        message = subscription.receive(timeout=0)
        assert message is not None
        self.kept.append(subscription)
        self.held.append(message)


@dataclass(frozen=True)
class Case:
    """What a program does that something comes between, and what is to come of it."""

    name: str
    before: Callable[[Scene], object]
    act: Callable[[Scene], object]
    #: Where each message may be in the end, if no other program comes between.
    ends: Mapping[str, tuple[str, ...]]
    #: What is done once more after it.
    again: Callable[[Root], object] = lambda root: None
    #: Where each message gets a copy, all or none at a time.
    copies: tuple[str, ...] = ()
    #: The messages that it settles or distributes, so that without a history nothing of them may be left.
    settles: tuple[str, ...] = ()
    #: Whether it removes them for good.
    removes: bool = False


def _moved_twice(scene: Scene) -> None:
    """Let the first message be two queues further on."""
    scene.chain("start", "middle", "end")
    scene.send("start", A)
    scene.route("start", "middle")


def _moved_once_of_three(scene: Scene) -> None:
    scene.chain("start", "middle", "end")
    scene.send("start", A)
    scene.route("start")


def _with_another(scene: Scene) -> None:
    _moved_twice(scene)
    scene.make("aside")


def _move_by_hand(scene: Scene) -> None:
    scene.queue("end").move(scene.queue("aside"))


def _held_twice(scene: Scene) -> None:
    _moved_twice(scene)
    scene.hold("end")


def _settling(name: str, settle: Callable[[Message], object], *ends: str) -> Case:
    """Return the case of a verb that settles a message with credits below."""
    return Case(
        f"{name} under two credits",
        _held_twice,
        lambda scene: settle(scene.held[0]),
        {A: ("end/processed", *ends)},
        settles=(A,) if name in ("ack", "fail", "reject", "expire") else (),
    )


def _two_chained(scene: Scene) -> None:
    scene.chain("start", "end")
    scene.send("start", A, B, C)


def _foreign(scene: Scene) -> None:
    scene.chain("start", "end")
    drop(scene.queue("start"), "report.csv", body(A))
    drop(scene.queue("end"), "report.csv", body(B))


def _alike(scene: Scene) -> None:
    scene.chain("start", "end")
    scene.send("start", A, B, message_id="same " * 15)


def _published(scene: Scene) -> None:
    scene.chain("start", "middle")
    topic = scene.root.create_topic("news", redelivery_delay=0, **scene.setting.options)
    topic.create_subscription("one", client_id="x")
    topic.create_subscription("two", client_id="x")
    scene.queue("middle").add_selector("out", to="news")
    scene.send("start", A)
    scene.route("start")


def _copied(scene: Scene, *addresses: str, first: str = "start") -> None:
    for address in ("audit", "stats"):
        scene.make(address)
        scene.queue(first).add_selector(address, op="copy", to=address)
    scene.send("start", A)
    scene.route(*addresses)


def _copied_and_moved(scene: Scene) -> None:
    scene.chain("start", "end")
    _copied(scene)


def _copied_only(scene: Scene) -> None:
    scene.make("start", max_deliveries=1)
    _copied(scene)


def _copied_under_a_credit(scene: Scene) -> None:
    scene.chain("start", "middle")
    _copied(scene, "start", first="middle")


def _copied_for_a_consumer(scene: Scene) -> None:
    scene.make("start", max_deliveries=1)
    scene.kept.append(scene.queue("start").subscribe())
    _copied(scene)


def _bounced(scene: Scene) -> None:
    scene.chain("start", "middle")
    scene.make("answers")
    scene.queue("middle").add_selector("back", op="bounce", to="*")
    scene.send("start", A, reply_to="answers")
    scene.send("start", B)
    scene.route("start")


def _unroutable(scene: Scene) -> None:
    scene.make("middle", unroutable_after="0s")
    scene.make("start")
    scene.queue("start").add_selector("on", to="middle")
    scene.make("end")
    scene.queue("middle").add_selector("never", to="end", filter=NEVER)
    scene.send("start", A)
    scene.route("start")


def _round_and_round(scene: Scene) -> None:
    """Let a message have made all hops that it may: a person moves it back each time, as selectors may not."""
    scene.chain("start", "middle", credit=20)
    scene.send("start", A)
    start, middle = (Path(scene.queue(name).layout.target) for name in ("start", "middle"))
    for _ in range(HOPS_LIMIT):
        scene.route("start")
        for file in middle.iterdir():
            file.rename(start / re.sub("JMS_dropq_viaS=[^&]*&", "", file.name))  # a message there has no credit


def _to_be_added(scene: Scene) -> None:
    scene.make("start")
    scene.make("end")
    scene.send("start", A)


def _add(root: Root) -> None:
    with suppress(QueueExists):
        root.queue("start").add_selector("on", to="end", credit=2)


def _moved_once(scene: Scene) -> None:
    _two_chained(scene)
    scene.route("start")


def _with_a_route(scene: Scene) -> None:
    scene.chain("start", "middle")
    scene.send("start", A)
    scene.route("start")
    base = Path(scene.queue("middle").layout.base)
    (base / "routing" / "R").mkdir()
    (base / "routing.properties").write_text("R.selector=JMSPriority > 0\n")
    (base / "routing" / "R.in-use").touch()


def _with_a_route_to_a_queue(scene: Scene) -> None:
    _with_a_route(scene)
    scene.make("end")
    folder = Path(scene.queue("middle").layout.routing, "R")
    folder.rmdir()
    folder.symlink_to(os.path.relpath(scene.queue("end").layout.target, folder.parent))


def _with_letters(scene: Scene) -> None:
    """Let the last of three queues have a dead-letter queue, and hold a message whose last delivery it is."""
    scene.make("letters")
    scene.chain("start", "middle")
    scene.make("last", max_deliveries=1, exhausted="dead-letter", dead_letter_queue="letters")
    scene.queue("middle").add_selector("on", to="last")
    scene.send("start", A)
    scene.route("start", "middle")
    scene.hold("last")


def _dead(module: object, step: str, act: Callable[[], object]) -> None:
    """Let a program die as it comes to a step."""
    with mock.patch.object(module, step, side_effect=lambda *_, **__: os._exit(DIED)):
        assert forked(act) == DIED


def _leftovers(scene: Scene) -> None:
    """Let programs die after a message was settled, before a message was moved, and as a selector is removed."""
    scene.chain("start", "middle", "end", credit=3)
    scene.send("start", A, B)
    scene.route("start", "middle")
    _dead(credits, "free", lambda: _settle(scene.other().queue("end")))
    scene.send("middle", C)
    _dead(Moves, "move_on", lambda: scene.other().queue("middle").route())
    _dead(registry, "finish", lambda: scene.other().queue("start").remove_selector("on"))


def _half_copied(scene: Scene) -> None:
    """Let a router die that has committed copies, and not moved them."""
    _copied_and_moved(scene)
    _dead(fan_out, "roll_forward", lambda: scene.other().queue("start").route())


def _settle(queue: Queue) -> None:
    """Receive all that waits, and settle it."""
    with queue.subscribe(max_backlog=None) as subscription:
        while (message := subscription.receive(timeout=0)) is not None:
            message.ack()


def _pass_by(scene: Scene) -> None:
    """Subscribe, and find nothing."""
    with scene.queue("start").subscribe(filter=NEVER) as subscription:
        assert subscription.receive(timeout=0) is None


def _late(scene: Scene) -> None:
    """Let a message under two credits be late."""
    scene.chain("start", "middle", "end")
    scene.send("start", A, expires_in="1h")
    scene.route("start", "middle")
    scene.clock.advance(3601)


def _late_on_the_way(scene: Scene) -> None:
    scene.chain("start", "middle", "end")
    scene.send("start", A, expires_in="1h")
    scene.route("start")
    scene.clock.advance(3601)


def _routing(*addresses: str) -> Callable[[Scene], object]:
    return lambda scene: scene.route(*addresses)


def _removing(address: str) -> Callable[[Scene], object]:
    return lambda scene: scene.queue(address).remove_selector("on")


def _ends(*locations: str, of: tuple[str, ...] = (A,)) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(of, locations)


_ENDS, _BACK = _ends("end/processed"), _ends("start/processed", "end/processed")
_COPIES = ("audit", "stats")

CASES = (
    Case("move", _two_chained, _routing("start"), _ends("end/processed", of=(A, B, C))),
    Case("move a foreign file", _foreign, _routing("start"), _ends("end/processed", of=(A, B))),
    Case("move equal ids", _alike, _routing("start"), _ends("end/processed", of=(A, B))),
    Case("move further", _moved_once_of_three, _routing("middle"), _ENDS),
    Case(
        "move to a topic",
        _published,
        _routing("middle", "news"),
        _ends("topic-root/news/.incoming/processed"),
        copies=("news/one.x", "news/two.x"),
        settles=(A,),
    ),
    _settling("ack", lambda message: message.ack()),
    _settling("fail", lambda message: message.fail("f"), "end/error"),
    _settling("reject", lambda message: message.reject("r"), "end/error"),
    _settling("expire", lambda message: message.expire(), "end/expired"),
    _settling("nack", lambda message: message.nack()),
    _settling("release", lambda message: message.release()),
    Case("requeue what is held", _held_twice, lambda scene: scene.queue("end").requeue(state="processing"), _ENDS),
    Case("purge", _moved_twice, lambda scene: scene.queue("end").purge(), _ENDS, removes=True),
    Case("move by hand", _with_another, _move_by_hand, _ends("end/processed", "aside/processed")),
    Case(
        "expire what waits",
        _moved_twice,
        lambda scene: scene.queue("end").expire(),
        _ends("end/processed", "end/expired"),
    ),
    Case("expire by a sweep", _late, lambda scene: scene.queue("end").sweep(), _ends("end/expired", "end/processed")),
    Case("expire by a router", _late_on_the_way, _routing("middle"), _ends("middle/expired", "end/processed")),
    Case("copy and move", _copied_and_moved, _routing("start"), _ENDS, copies=_COPIES),
    Case("only copy", _copied_only, _routing("start"), _ends("start/processed"), copies=_COPIES, settles=(A,)),
    Case(
        "only copy, under a credit",
        _copied_under_a_credit,
        _routing("middle"),
        _ends("middle/processed"),
        copies=_COPIES,
        settles=(A,),
    ),
    Case(
        "copy for a consumer",
        _copied_for_a_consumer,
        _routing("start"),
        _ends("start/processed"),
        copies=_COPIES,
        settles=(A,),
    ),
    Case("bounce", _bounced, _routing("middle"), {A: ("answers/processed",), B: ("middle/error",)}),
    Case("unroutable", _unroutable, _routing("middle"), _ends("middle/error")),
    Case("too many hops", _round_and_round, _routing("start"), _ends("start/error")),
    Case("route into a folder", _with_a_route, _routing("middle"), _ends("middle/routing")),
    Case("route to another queue", _with_a_route_to_a_queue, _routing("middle"), _ENDS),
    Case(
        "nack into the dead-letter queue",
        _with_letters,
        lambda scene: scene.held[0].nack(),
        _ends("letters/processed", "last/error"),  # if it refuses the message
        settles=(A,),
    ),
    Case("add a selector", _to_be_added, lambda scene: _add(scene.root), _ENDS, again=_add),
    Case("remove a selector", _moved_once, _removing("start"), _ends("start/processed", "end/processed", of=(A, B, C))),
    Case("remove a selector, its message further on", _moved_twice, _removing("start"), _BACK),
    Case("remove a selector, its message held", _held_twice, _removing("start"), _BACK),
    Case("remove the second of two", _moved_twice, _removing("middle"), _ends("middle/processed", "end/processed")),
    Case("delete a queue", _moved_twice, lambda scene: scene.root.delete_queue("end", force=True), _ENDS, removes=True),
    Case(
        "sweep",
        _leftovers,
        lambda scene: scene.root.sweep(),
        _ends("end/processed", of=(A, C)) | _ends("start/processed", of=(B,)),
        settles=(A,),
    ),
    Case("sweep half a copy", _half_copied, lambda scene: scene.root.sweep(), _ENDS, copies=_COPIES),
    Case("consume and route", _two_chained, _pass_by, _ends("end/processed", of=(A, B, C))),
)


# -- what comes between --------------------------------------------------------------------------------------------


@dataclass
class Looking(Meeting):
    """Lets another program work before the Nth call, and looks at the books after every call."""

    folders: tuple[Path, ...] = ()
    wrong: list[str] = field(default_factory=list)

    def __call__(self, call: Call) -> object:
        done = super().__call__(call)
        if call.changes:
            self.wrong += [line for line in Books.of(*self.folders).overdrawn() if line not in self.wrong]
        return done

    def seen(self) -> list[str]:
        """Return what was wrong at some moment."""
        return self.wrong


def _route_all(root: Root) -> None:
    for queue in root.queues():
        with suppress(NoSuchQueue):
            queue.route()


def _settle_all(root: Root) -> None:
    """Settle what waits where no selector takes it."""
    for queue in root.queues():
        with suppress(NoSuchQueue):
            if not queue.context.layout.is_topic and not queue.selectors():
                _settle(queue)


def _take_by_hand(scene: Scene) -> None:
    """Settle as a script does, by `mv`, a message of each queue."""
    for queue in scene.other().queues():
        layout = queue.context.layout
        for file in sorted(os.listdir(layout.target))[:1]:
            os.rename(f"{layout.target}/{file}", f"{layout.processing}/{file}")
            os.rename(f"{layout.processing}/{file}", f"{layout.processed}/{file}")


def _lapse(scene: Scene) -> None:
    """Take the living for dead: sweep when their claims have lapsed."""
    scene.clock.advance(LAPSE)
    scene.other().sweep()


def _remove(scene: Scene) -> None:
    with suppress(NoSuchQueue):
        scene.other().queue("start").remove_selector("on")


A_SCRIPT, A_REMOVAL, A_CONSUMER = "a script that moves files", "a removal of a selector", "a consumer"
#: What another program does.
OTHERS: Mapping[str, Callable[[Scene], object]] = {
    "a router": lambda scene: _route_all(scene.other()),
    "a sweep": lambda scene: scene.other().sweep(),
    "a sweep that takes the living for dead": _lapse,
    A_CONSUMER: lambda scene: _settle_all(scene.other()),
    A_SCRIPT: _take_by_hand,
    A_REMOVAL: _remove,
}


# -- the cases of a setting ----------------------------------------------------------------------------------------


class GraphCases(acts.Acts[Case, Scene]):
    """The cases of one setting.

    Args:
        folder: where each case makes its root.
        setting: the setting.
        row: what counts them.
    """

    def __init__(self, folder: Path, setting: Setting, row: Row) -> None:
        super().__init__(folder, setting, row)
        self._setting = setting
        self._root = folder / "root"
        self._elsewhere = (other_file_system(folder) or folder) / f"dropq-{secrets.token_hex(6)}"
        #: The root, and the folder of its queues that lie elsewhere.
        self._folders = (self._root, self._elsewhere)
        weakref.finalize(self, shutil.rmtree, self._elsewhere, ignore_errors=True)
        self._received: Counter[tuple[str, str]] = Counter()

    def meet(self, case: Case, other: str, choose: Callable[[list[int]], list[int]] = list) -> None:
        """Let another program work between every two calls, or some."""
        said = self.undisturbed(case, Meeting(-1))
        looking = Looking(0, folders=self._folders)

        def meeting(number: int, scene: Scene) -> Between:
            looking.at, looking.work = number, partial(OTHERS[other], scene)
            return looking

        for number in choose(list(range(len(said.calls)))):
            what = self.perform(case, partial(meeting, number), looking.seen)
            assert what is not None
            where = f"{case.name}, {other} before call {number + 1} of {len(said.calls)}"
            if other != A_SCRIPT:
                self.row.wrong += [f"{where}: {line}" for line in what.calls]
            self.judge(case, where, what, other=other)

    def enter(self, case: Case) -> Scene:
        root = timed(Root.create(self._root, clock=self._clock, dropboxmq=self._setting.dropboxmq), TIMING)
        if self._setting.far:
            shutil.rmtree(self._elsewhere, ignore_errors=True)
            self._elsewhere.mkdir()
        scene = Scene(root, self._clock, self._setting, self._elsewhere)
        case.before(scene)
        return scene

    def act(self, case: Case, scene: Scene) -> object:
        return case.act(scene)

    @contextmanager
    def mounted(self) -> Iterator[None]:
        with (
            super().mounted(),
            mock.patch.object(credit_audit, "AUDIT_INTERVAL", AUDIT_INTERVAL),
            mock.patch.object(registry, "AUDIT_INTERVAL", AUDIT_INTERVAL),
            mock.patch.object(registry, "PATIENCE", 1.0),
        ):
            yield

    # -- judging -------------------------------------------------------------------------------------------------

    def judge(
        self, case: Case, where: str, said: Said | None = None, *, read_only: bool = False, other: str = ""
    ) -> None:
        self.row.cases += 1
        self._received.clear()
        wrong = [*self._judged(case, said, other)]
        self.row.wrong += [f"{where}: {line}" for line in wrong]

    def _judged(self, case: Case, said: Said | None, other: str) -> Iterator[str]:
        if other != A_SCRIPT:
            yield from Books.of(*self._folders).overdrawn()
        yield from self._wrong_reports(case, said, other)
        with self.mounted():
            try:
                self._clock.advance(LAPSE)  # a router may have left its claim
                self._sweep()
                yield from self._account(case, other)
                yield from Books.of(*self._folders).leaked()
                case.again(self._opened())
                self._finish()
                gc.collect()  # what routed a topic lives until then, and has a sign of life
                self._clock.ms += DAYS
                self._sweep()
            except (DropqError, OSError) as error:
                yield repr(error)
                return
        yield from self._account(case, other, at_the_end=True)
        yield from self._left_over(case)

    def _opened(self) -> Root:
        return timed(Root(self._root, clock=self._clock), TIMING)

    def _sweep(self) -> None:
        for _ in range(ROUNDS):
            if not self._opened().sweep().total:
                return
        self.row.wrong.append(f"{ROUNDS} sweeps do not come to an end")

    def _finish(self) -> None:
        """Route all, and receive what nobody routes, until nothing waits."""
        for _ in range(ROUNDS):
            root = self._opened()
            _route_all(root)
            for queue in root.queues():
                if not queue.context.layout.is_topic and all(one.op == "copy" for one in queue.selectors()):
                    self._drain(queue)
            root.sweep()
            if not any(queue.counts()[state] for queue in root.queues() for state in ("target", "delayed")):
                return

    def _drain(self, queue: Queue) -> None:
        with queue.subscribe(max_backlog=None) as subscription:
            while (message := subscription.receive(timeout=0)) is not None:
                self._received[queue.name, name_of(message.body) or message.file] += 1
                message.ack()

    def _lying(self) -> Iterator[tuple[str, str, str]]:
        """Yield each body, the address that it lies in, and the place."""
        found = look(*self._folders)
        self.row.wrong += [f"{path} is not whole" for path in found.damaged]
        for name, locations in found.locations.items():
            for location in locations:
                topic, _, subscription = location.queue.removeprefix("topic-root/").partition("/.subscriptions/")
                yield name, f"{topic}/{subscription}" if subscription else topic, in_short(location)

    def _account(self, case: Case, other: str, *, at_the_end: bool = False) -> Iterator[str]:
        """Yield what is lost or doubled, or is not where it is to be in the end."""
        lying = list(self._lying())
        for name in case.ends:
            locations = [location for each, address, location in lying if each == name and address not in case.copies]
            received = sum(
                count
                for (address, each), count in self._received.items()
                if each == name and address not in case.copies
            )
            there = len(locations) + (0 if self._setting.history else received)
            needed = 0 if case.removes or (name in case.settles and not self._setting.history) else 1
            if there > 1 or received > 1:
                self.row.doubled += 1
                yield f"{name!r} lies in {locations}, and was received {received} times"
            if there < needed and not self._untold(other) and not self._settled_by_copies(case, name, lying, other):
                self.row.lost += 1
                yield f"{name!r} is lost"
            if at_the_end and not other and self._setting.history and not case.removes:
                yield from (f"{name!r} ends in {location}" for location in locations if location not in case.ends[name])
            yield from self._judge_copies(case, name, lying, other, at_the_end=at_the_end)
        strange = {name for name, _, _ in lying} - case.ends.keys()
        yield from (f"{name!r} was never sent" for name in sorted(strange))

    def _judge_copies(
        self, case: Case, name: str, lying: list[tuple[str, str, str]], other: str, *, at_the_end: bool
    ) -> Iterator[str]:
        found = self._copies(case, name, lying)
        if any(count > 1 for count in found):
            self.row.doubled += 1
            yield f"{name!r} has copies: {found}"
        uncopied = other in (A_SCRIPT, A_REMOVAL)  # they may take it away before its copies are made
        needed = 1 if at_the_end and not uncopied and not self._untold(other) else 0
        if any(count < needed for count in found) or (not other and len(set(found)) > 1):
            self.row.lost += 1
            yield f"of the copies of {name!r}, some are missing: {found}"

    def _copies(self, case: Case, name: str, lying: list[tuple[str, str, str]]) -> list[int]:
        """Return how many copies of a message each queue has, or had, that a case copies to."""
        lies = Counter(address for each, address, _ in lying if each == name)
        return [max(lies[address], self._received[address, name]) for address in case.copies]

    def _settled_by_copies(self, case: Case, name: str, lying: list[tuple[str, str, str]], other: str) -> bool:
        """Return whether only copies were left to take a message after a removal: they settle it once all exist."""
        copies = self._copies(case, name, lying)
        return other == A_REMOVAL and not self._setting.history and bool(copies) and min(copies) > 0

    def _untold(self, other: str) -> bool:
        """Return whether another program may have settled something that leaves no trace."""
        return not self._setting.history and other in (A_SCRIPT, A_CONSUMER)

    def _wrong_reports(self, case: Case, said: Said | None, other: str) -> Iterator[str]:
        """Yield what a verb that settles says that is not so."""
        if said is None or other or case.before is not _held_twice or not case.settles:
            return
        waiting = {name for name, _, location in self._lying() if location.endswith(("/target", "/processing"))}
        waits = not waiting.isdisjoint(case.settles)
        if not said.raised and waits:
            yield "returned, and it is not settled"
        if said.raised and not waits and any(fate in said.words for fate in UNDONE):
            yield f"says {said.words!r}, and it is settled"

    def _left_over(self, case: Case) -> Iterator[str]:
        """Yield what is still there after days that nobody needs."""
        yield from Books.of(*self._folders).leaked()
        for folder, folders, names in chain.from_iterable(map(os.walk, self._folders)):
            last, below = os.path.basename(folder), os.path.relpath(folder, self._root)
            if ".deleted-" in below or (case.removes and below.startswith("..")):
                continue  # of a delete that could not remove all, or died before it removed what is behind a link
            in_private = os.path.basename(os.path.dirname(folder)) == ".dropq"
            if in_private and last in ("staged", "consumers", "delayed") and (folders or names):
                yield f"{below} has {[*folders, *names]}"
            if not in_private and last in ("target", "processing", "working") and (folders or names):
                yield f"{below} has {[*folders, *names]}"
            if last == "selectors" and (hidden := [name for name in names if name.endswith(".removed")]):
                yield f"{below} has {hidden}"
            if strange := [name for name in (*folders, *names) if name.startswith(".gone-")]:
                yield f"{below} has {strange}"
