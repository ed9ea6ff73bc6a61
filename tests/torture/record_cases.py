"""Bundles that are settled by their records, with something between a program and the file system, as `acts` has it.

Each settlement is one commit: after a crash anywhere and sweeps, all lies as before a commit, or as after it. Then
another consumer takes what waits, by records. In the end each record was acknowledged, or is in error/ once, and two
days later nothing is left over.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from forks import DIED, forked
from helpers import FOLDERS, Clock, died, drop, files, timed

from dropq import DropqError, Message, Queue, Root, StorageError, Subscription
from dropq.lifecycle.processing import claims_in
from dropq.lifecycle.settlement import Claims
from dropq.queue.message import Record
from dropq.queue.outputs import Outputs
from dropq.records.formats import pack
from dropq.routing import credit_audit, registry
from dropq.staging import fan_out
from torture import acts
from torture.acts import Meeting
from torture.calls import Between, come_between
from torture.cases import DAYS, Said
from torture.crashes import Dying, Moment
from torture.faults import UNDONE
from torture.graph_cases import AUDIT_INTERVAL, Books
from torture.table import Row
from torture.topic_cases import LAPSE, TIMING

#: Seconds of a holder's lease, which is over after LAPSE.
LEASE = 60
#: How often all is swept until nothing happens any more.
ROUNDS = 10
#: What errors say of a bundle whose parts are committed and not moved.
COMMITTED = "the message is committed"
HEADER = b"number,text"

_RECORD = re.compile(rb"r(\d\d)")
#: Where a message is not settled, or where it is for people.
_LIVE, _ASIDE = ("target", "delayed", "processing"), ("error", "expired")


def records(many: int) -> list[bytes]:
    """Return records, each of which tells its number."""
    return [b"r%02d" % number for number in range(1, many + 1)]


def numbers(content: bytes) -> tuple[int, ...]:
    """Return the numbers of the records that a body has."""
    return tuple(map(int, _RECORD.findall(content)))


#: What the holder of a bundle says that was to be cut, and gave it all records.
UNCUT = "the bundle is not cut"
#: A file of each message: its state, and the numbers of its records.
World = Counter[tuple[str, tuple[int, ...]]]


def _gone_whole(world: World, state: str) -> World:
    """Return a world in which what waits has gone to a state."""
    return Counter({(state if lies == "target" else lies, found): many for (lies, found), many in world.items()})


@dataclass
class Scene:
    """A root with a bundle, and who holds it."""

    root: Root
    clock: Clock
    case: Case
    #: What its holder has by now.
    kept: list[Subscription] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    loops: list[Iterator[Record]] = field(default_factory=list)
    taken: list[Record] = field(default_factory=list)
    #: What it has staged to send.
    made: list[Outputs] = field(default_factory=list)

    @property
    def queue(self) -> Queue:
        return self.root.queue("q")

    def other(self) -> Queue:
        """Return the queue as another program opens it."""
        return timed(Root(self.root.path, clock=self.clock), TIMING).queue("q")

    def hold(self) -> Message:
        """Let a consumer take the bundle, on a lease."""
        subscription = self.queue.subscribe(lease_period=LEASE)
        message = subscription.receive(timeout=0)
        assert message is not None
        self.kept.append(subscription)
        self.messages.append(message)
        return message

    def take(self, many: int) -> list[Record]:
        """Hold the bundle, and take so many of its records."""
        loop = self.hold().records(self.case.format)
        self.loops.append(loop)
        return [next(loop) for _ in range(many)]


@dataclass(frozen=True)
class Case:
    """How a bundle is settled.

    Attributes:
        before: what its holder does before; nothing of it is on disk but the claim.
        steps: what it does then; each ends in one commit.
        body: the body of the bundle, and its format.
        fields: what else it is sent with.
        options: of the queue.
        file: the name of the file, if a script sends it.
        below: whether the bundle comes under a credit.
        tells: whether it raises an error if the claim is lost.
        whole: where what is not settled goes as a whole if the body cannot be read, beside the places of other steps.
    """

    name: str
    before: Callable[[Scene], object]
    steps: Sequence[Callable[[Scene], object]]
    body: bytes = pack("text", records(6), head=b"")
    format: str = "text"
    fields: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""
    below: bool = False
    tells: bool = True
    whole: str = ""


# -- what holders do -----------------------------------------------------------------------------------------------


def _settle_each(scene: Scene, many: int = 5) -> None:
    """Acknowledge, reject, fail, nack and leave records."""
    for record, verb in zip(scene.take(many), ("ack", "reject", "fail", "nack", "ack"), strict=False):
        getattr(record, verb)(*([verb] if verb in ("reject", "fail") else []))


def _ack_every(scene: Scene) -> None:
    message = scene.hold()
    for record in list(message.records(scene.case.format)):
        record.ack()


def _settle_all(scene: Scene) -> None:
    """Settle all records, one of them as rejected."""
    for record in list(scene.hold().records(scene.case.format)):
        record.reject("bad") if record.number == 2 else record.ack()


def _ack_out_of_order(scene: Scene) -> None:
    taken = scene.take(5)
    taken[3].reject("fourth")
    taken[4].ack()
    taken[1].ack()


def _verb(name: str, *arguments: object) -> Callable[[Scene], object]:
    return lambda scene: getattr(scene.messages[0], name)(*arguments)


def _begin_loop(scene: Scene) -> None:
    """Take the first record in a loop that makes a checkpoint after each."""
    subscription = scene.queue.subscribe(lease_period=LEASE)
    scene.kept.append(subscription)
    scene.loops.append(subscription.records(scene.case.format, timeout=0, checkpoint="0s"))
    scene.taken.append(next(scene.loops[0]))


def _next(scene: Scene) -> None:
    """Acknowledge the record that was taken, and take the next, for which the loop makes a checkpoint."""
    scene.taken[-1].ack()
    scene.taken += [record for record in [next(scene.loops[0], None)] if record is not None]


def _die_over_it(scene: Scene) -> None:
    """Let a bundle come back, as a sweep returns it when its consumer is dead, and another take it."""
    died(scene.hold())
    scene.hold()


def _cut(scene: Scene) -> None:
    """Ask for the records of a bundle that is to be cut: there are none. One that cannot be read then is not cut."""
    if records := list(scene.messages[-1].records(scene.case.format)):
        assert [record.number for record in records] == list(numbers(scene.case.body))
        raise StorageError(f"{UNCUT}; {fan_out.UNSETTLED}")


def _take_all_that_can_be_read(scene: Scene) -> None:
    subscription = scene.queue.subscribe(lease_period=LEASE, max_backlog=None)
    scene.kept.append(subscription)
    scene.loops.append(subscription.records(scene.case.format, timeout=0, checkpoint="1h"))
    for _ in range(3):
        scene.taken.append(next(scene.loops[0]))


def _end_of_what_can_be_read(scene: Scene) -> None:
    for record in scene.taken:
        record.ack()
    assert next(scene.loops[0], None) is None


def _reject_all_that_was_taken(scene: Scene) -> None:
    scene.taken[0].ack()
    scene.taken[1].reject("bad")
    scene.taken[2].fail("bad, too")
    assert next(scene.loops[0], None) is None


_CSV = b"\n".join([HEADER, b'1,"r01\nin two lines"', b"2,r02", b"", b'4,"r04, ""so"""', b"5,r05", b"6,r06", b""])
_LEAVE = _verb("release")
_ONE = pack("text", records(1), head=b"")

CASES = (
    Case("settle each", _settle_each, (_LEAVE,)),
    Case("settle each of frames", _settle_each, (_LEAVE,), pack("frames", records(6), head=b""), "frames"),
    Case("settle each of csv", _settle_each, (_LEAVE,), _CSV, "csv"),
    Case("settle each of a foreign file", _settle_each, (_LEAVE,), file="readings.csv"),
    Case(
        "settle each of a bundle with a long name",
        _settle_each,
        (_LEAVE,),
        fields={"properties": {"note": "long " * 80}, "correlation_id": "c" * 60},
    ),
    Case("settle each of a bundle under a credit", _settle_each, (_LEAVE,), below=True),
    Case("settle out of order", _ack_out_of_order, (_LEAVE,)),
    Case("settle all", _settle_all, (_verb("ack"),)),
    Case("settle all under a credit", _settle_all, (_verb("ack"),), below=True),
    Case("settle one record", lambda scene: scene.take(1)[0].reject("bad"), (_verb("release"),), _ONE),
    Case("whole ack", _ack_every, (_verb("ack"),)),
    Case("nack what is left", _settle_each, (_verb("nack", "10s"),)),
    Case("fail what is left", _settle_each, (_verb("fail", "bad"),)),
    Case("reject what is left", _settle_each, (_verb("reject", "bad"),)),
    Case("expire what is left", _settle_each, (_verb("expire"),), below=True),
    Case("ack what is left", _settle_each, (_verb("ack"),)),
    Case("close", _settle_each, (lambda scene: scene.kept[0].close(),), tells=False),
    Case("retry", _settle_each, (_LEAVE,), options={"redelivery_attempts": 3}),
    Case("checkpoints", _begin_loop, (_next,) * 4, pack("text", records(4), head=b""), whole="error"),
    Case(
        "checkpoints under a credit",
        _begin_loop,
        (_next,) * 3,
        pack("text", records(3), head=b""),
        below=True,
        whole="error",
    ),
    Case("cut", _die_over_it, (_cut,), whole="error"),
    Case("cut under a credit", _die_over_it, (_cut,), below=True, whole="error"),
    Case("cut csv", _die_over_it, (_cut,), _CSV, "csv", whole="error"),
    Case(
        "an unreadable end",
        _take_all_that_can_be_read,
        (_end_of_what_can_be_read,),
        pack("frames", records(3), head=b"") + b"\0\0\1\0r04 torn",
        "frames",
    ),
    Case(
        "too many failures",
        _take_all_that_can_be_read,
        (_reject_all_that_was_taken,),
        options={"max_record_failures": 2},
    ),
)


# -- what comes between --------------------------------------------------------------------------------------------


def _lapse(scene: Scene) -> None:
    """Take the living for dead: sweep when their claims have lapsed."""
    scene.clock.advance(LAPSE)
    scene.other().sweep()


def _extend(scene: Scene) -> None:
    """Renew what is held, as another process does that knows the receipt."""
    context = scene.other().context
    for claim in list(claims_in(context)):
        Claims(context).extend(claim, scene.clock.now_ms() + 2000 * LEASE)


def _ack_held(scene: Scene) -> None:
    context = scene.other().context
    for claim in list(claims_in(context)):
        Claims(context).archive(claim)


def _move_back(scene: Scene) -> None:
    """Move what is held back to target/, as a script does by `mv`."""
    layout = scene.other().layout
    for file in sorted(os.listdir(layout.processing)):
        with suppress(FileNotFoundError):
            os.rename(f"{layout.processing}/{file}", f"{layout.target}/{file.partition('~')[2]}")


def _archive_by_hand(scene: Scene) -> None:
    layout = scene.other().layout
    for file in sorted(os.listdir(layout.processing)):
        with suppress(FileNotFoundError):
            os.rename(f"{layout.processing}/{file}", f"{layout.processed}/{file.partition('~')[2]}")


def _consume(scene: Scene) -> None:
    """Take what waits, by records."""
    with scene.other().subscribe() as subscription:
        for record in subscription.records(scene.case.format, timeout=0):
            record.ack()


def _consume_whole(scene: Scene) -> None:
    with scene.other().subscribe() as subscription:
        while (message := subscription.receive(timeout=0)) is not None:
            message.ack()


A_SWEEP, A_THIEF, A_PURGE = "a sweep", "a sweep that takes the living for dead", "a purge"
#: What another program does that changes nothing for the holder, or takes the claim away.
OTHERS: Mapping[str, Callable[[Scene], object]] = {
    A_SWEEP: lambda scene: scene.other().sweep(),
    "an extend from outside": _extend,
    A_THIEF: _lapse,
    "an ack from outside": _ack_held,
    "a requeue of what is held": lambda scene: scene.other().requeue(state="processing"),
    "an expire of what is held": lambda scene: scene.other().expire(state="processing"),
    "a script that moves claims back": _move_back,
    "a script that archives claims": _archive_by_hand,
    A_PURGE: lambda scene: scene.other().purge(state="processing"),
}
#: Those that leave the claim to its holder.
UNDISTURBING = (A_SWEEP, "an extend from outside")
#: Those that take what waits: whatever has arrived.
TAKERS: Mapping[str, Callable[[Scene], object]] = {
    "a consumer by records": _consume,
    "a consumer of whole messages": _consume_whole,
}


# -- the cases of a setting ----------------------------------------------------------------------------------------

SETTINGS = (
    acts.Setting("plain"),
    acts.Setting("no history", {"history": False}),
    acts.Setting("not durable", {"durability": "none"}),
    acts.Setting("no history, not durable", {"history": False, "durability": "none"}),
    acts.Setting("no rename that replaces nothing", noreplace=False),
    acts.Setting("no rename replaces, one to a folder leads into it", noreplace=False, into_folders=True),
)


class RecordCases(acts.Acts[Case, Scene]):
    """The cases of one setting.

    Args:
        folder: where each case makes its root.
        setting: the setting.
        row: what counts them.
    """

    #: What another program does, by its name.
    works: Mapping[str, Callable[[Scene], object]] = {**OTHERS, **TAKERS}

    def __init__(self, folder: Path, setting: acts.Setting, row: Row) -> None:
        super().__init__(folder, setting, row)
        self._setting = setting
        self._root = folder / "root"
        self._worlds: dict[tuple[str, str], list[World]] = {}

    # -- what is done ----------------------------------------------------------------------------------------------

    def enter(self, case: Case) -> Scene:
        root = self.furnished(case)
        options = {"redelivery_delay": 0, **self._setting.options, **case.options}
        queue = root.create_queue("q", **options)
        scene = Scene(root, self._clock, case)
        if case.file:
            drop(queue, case.file, case.body)
        elif case.below:
            start = root.create_queue("start", **options)
            start.add_selector("on", to="q", credit=1)
            start.send(case.body, type=case.format, **case.fields)
            start.route()
        else:
            queue.send(case.body, type=case.format, **case.fields)
        case.before(scene)
        return scene

    def furnished(self, case: Case) -> Root:
        """Make a root, with what a case needs in it beside its queue."""
        return timed(Root.create(self._root, clock=self._clock), TIMING)

    def act(self, case: Case, scene: Scene) -> object:
        for step in case.steps:
            step(scene)
        return None

    @contextmanager
    def mounted(self) -> Iterator[None]:
        with (
            super().mounted(),
            mock.patch.object(credit_audit, "AUDIT_INTERVAL", AUDIT_INTERVAL),
            mock.patch.object(registry, "AUDIT_INTERVAL", AUDIT_INTERVAL),
        ):
            yield

    def meet(self, case: Case, other: str, choose: Callable[[list[int]], list[int]] = list) -> None:
        """Let another program work between every two calls, or some."""
        work = self.works[other]
        said = self.undisturbed(case, Meeting(-1))

        def meeting(number: int, scene: Scene) -> Between:
            return Meeting(number, partial(work, scene))

        for number in choose(list(range(len(said.calls)))):
            what = self.perform(case, partial(meeting, number))
            assert what is not None
            self.judge(case, f"{case.name}, {other} before call {number + 1} of {len(said.calls)}", what, other=other)

    def crash_twice(self, case: Case, choose: Callable[[list[Moment]], list[Moment]] = list) -> None:
        """Let it die at some moments, and the sweep after each at some, too."""
        said = self.undisturbed(case, Dying(None))
        for moment in choose([Moment(number) for number in range(len(said.calls))]):
            number = 0
            while number >= 0:
                if self.perform(case, lambda _, moment=moment: Dying(moment)) is not None:  # type: ignore[misc]
                    break
                self._clock.advance(LAPSE)
                died = self._sweep_until(Moment(number))
                self.row.kills += 1 + died
                self.judge(case, f"{case.name}, dead {moment} of {len(said.calls)}, its sweep {Moment(number)}")
                number = number + 1 if died else -1

    def _sweep_until(self, moment: Moment) -> bool:
        """Let a sweep die at a moment; return False if it came to its end before."""

        def sweep() -> None:
            with self.mounted():
                root = self._opened()
                come_between(Dying(moment), noreplace=self._setting.noreplace)
                root.sweep()
                os._exit(0)  # what is mounted stays so for the others

        return forked(sweep) == DIED

    # -- judging ---------------------------------------------------------------------------------------------------

    def judge(
        self, case: Case, where: str, said: Said | None = None, *, read_only: bool = False, other: str = ""
    ) -> None:
        self.row.cases += 1
        with self._kept():
            worlds = self.worlds(case, other)
        self.row.wrong += [f"{where}: {line}" for line in self._judged(case, said, other, worlds)]

    def worlds(self, case: Case, other: str = "") -> list[World]:
        """Return what lies where before the first commit and after each, with what another program did then or not."""
        found = []
        for work in ("", other) if other in OTHERS else ("",):
            if (case.name, work) not in self._worlds:
                self._worlds[case.name, work] = [
                    self._world_after(case, number, work) for number in range(len(case.steps) + 1)
                ]
            found += self._worlds[case.name, work]
        return found

    def _world_after(self, case: Case, number: int, work: str) -> World:
        def act(scene: Scene) -> None:
            for step in case.steps[:number]:
                step(scene)
            if work:
                OTHERS[work](scene)

        said = self.perform(replace(case, steps=(act,)), lambda _: lambda call: call.do())
        assert said is not None and not said.raised, (case.name, said)
        with self.mounted():
            self._clock.advance(LAPSE)
            self._sweep()
        return self._world()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep what a case has left, and the time that it is, while others are done in the block."""
        aside, now = self._folder / "aside", self._clock.ms
        self._root.rename(aside)
        yield
        shutil.rmtree(self._root, ignore_errors=True)
        aside.rename(self._root)
        self._clock.ms = now

    def _judged(self, case: Case, said: Said | None, other: str, worlds: list[World]) -> Iterator[str]:
        many = len(case.steps) + 1
        with self.mounted():
            try:
                yield from self._counted()
                self._clock.advance(LAPSE)
                self._sweep()
                world = self._world()
                if other not in TAKERS:
                    told = said if case.tells else None
                    yield from self._fits(case, world, told, worlds[:many], worlds[many:], other)
                yield from self._wrong_credits()
                received = Counter[int]()
                yield from self._drain(case, received)
                self._clock.ms += DAYS
                self._sweep()
                self._clock.ms += DAYS
                self._sweep()
            except (DropqError, OSError) as error:
                yield repr(error)
                return
        yield from self._account(case, world, received, other)
        yield from self._left_over()

    def _fits(
        self, case: Case, world: World, said: Said | None, worlds: list[World], met: list[World], other: str
    ) -> Iterator[str]:
        """Yield what does not lie as before a commit, or as after it, or is not as the holder was told."""
        allowed = [*worlds, *met]
        if said is not None and not said.raised:
            allowed = [worlds[-1], *met[-1:]]
        elif said is not None and len(worlds) == 2:
            if said.raised == "LeaseLost":
                allowed = met[:1] or worlds[:1]
            elif COMMITTED in said.words:
                allowed = [worlds[-1], *met[-1:]]
            elif not other and any(fate in said.words for fate in (*UNDONE, fan_out.UNSETTLED)):
                allowed = worlds[:1]
        if said is not None and said.unread and said.raised in ("", "LeaseLost") and case.whole:
            allowed = [*allowed, *(_gone_whole(each, case.whole) for each in worlds[:-1])]
        if world not in allowed:
            outcome = "" if said is None else f" (the holder was told {said.raised or 'nothing'} {said.words})"
            yield f"{dict(world)}, and may be {[dict(each) for each in allowed]}{outcome}"
        if said is not None and UNCUT in said.words and not said.unread:
            yield f"its body could be read, and it was not cut: {said.words}"
        if said is not None and other in UNDISTURBING and said.raised:
            yield f"its holder was told {said.raised}: {said.words}"

    def _world(self) -> World:
        return Counter((state, numbers(content)) for state, content in self._lying())

    def _lying(self) -> Iterator[tuple[str, bytes]]:
        for queue in ("q", "start"):
            for state, folder in FOLDERS.items():
                for content in files(self._root / queue / folder).values():
                    yield state if queue == "q" else f"{queue}/{state}", content

    def _opened(self) -> Root:
        return timed(Root(self._root, clock=self._clock), TIMING)

    def _sweep(self) -> None:
        quiet = 0
        for _ in range(ROUNDS):
            quiet = 0 if self._opened().sweep().total else quiet + 1
            if quiet > 1:  # a queue that was swept first may see only now what another has dropped
                return
        self.row.wrong.append(f"{ROUNDS} sweeps do not come to an end")

    def _counted(self) -> Iterator[str]:
        """Yield what is counted wrongly while parts may be on their way."""
        queue = self._opened().queue("q")
        found = Counter(state for state, _ in self._lying())
        folder = Path(queue.layout.staged)
        for each in folder.iterdir() if folder.exists() else ():
            whole = each / "whole"
            found["processing"] += whole.is_file() and whole.read_bytes() != os.fsencode(each.name)
        counts = queue.counts()
        for state in (*_LIVE, *_ASIDE, "processed"):
            if counts.get(state, 0) != found[state] and self._setting.noreplace:  # else names may be reserved
                yield f"counts() has {counts.get(state)} in {state}, and there are {found[state]}"

    def _wrong_credits(self) -> Iterator[str]:
        books = Books.of(self._root)
        yield from books.overdrawn()
        yield from books.leaked()

    def _drain(self, case: Case, received: Counter[int]) -> Iterator[str]:
        """Take all that waits, by records; yield what has another number than it was sent with."""
        queue = self._opened().queue("q")
        for _ in range(ROUNDS):
            with queue.subscribe() as subscription:
                for record in subscription.records(case.format, timeout=0):
                    (number,) = numbers(record.data)
                    received[number] += 1
                    if number != (record.message._name.record or record.number):
                        yield f"record {number} came as number {record.number}"
                    record.ack()
            self._clock.advance(LAPSE)
            self._opened().sweep()
        for message in queue.browse("error"):
            if message.reason is None:
                yield f"{message.file} is in error/ without a reason"

    def _account(self, case: Case, world: World, received: Counter[int], other: str) -> Iterator[str]:
        """Yield the records that are lost, or doubled, or came again after they were settled."""
        final = self._world()
        for number in numbers(case.body):
            live, aside, _ = _counts(world, number)
            _, dead, archived = _counts(final, number)
            if live + aside > 1 or dead > 1 or received[number] > 1 or (dead and received[number]):
                self.row.doubled += 1
                yield f"record {number} is in {world}, then in {final}, and was received {received[number]} times"
            settled = not self._setting.history or other == A_PURGE
            if not (dead or archived or received[number] or settled):
                self.row.lost += 1
                yield f"record {number} is lost"

    def _left_over(self) -> Iterator[str]:
        """Yield what is still there after days that nobody needs."""
        yield from Books.of(self._root).leaked()
        for folder, folders, names in os.walk(self._root):
            last, below = os.path.basename(folder), os.path.relpath(folder, self._root)
            in_private = os.path.basename(os.path.dirname(folder)) == ".dropq"
            if in_private and last in ("staged", "consumers", "delayed") and (folders or names):
                yield f"{below} has {[*folders, *names]}"
            if not in_private and last in ("target", "processing", "working") and (folders or names):
                yield f"{below} has {[*folders, *names]}"
            if strange := [name for name in (*folders, *names) if name.startswith(".gone-")]:
                yield f"{below} has {strange}"


def _counts(world: World, number: int) -> tuple[int, int, int]:
    """Return how many files have a record and are to be worked on, are set aside, and are archived."""
    counts = Counter(state for state, found in world.elements() if number in found)
    return sum(counts[state] for state in _LIVE), sum(counts[state] for state in _ASIDE), counts["processed"]
