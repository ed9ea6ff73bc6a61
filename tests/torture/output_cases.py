"""Messages that go out with an ack, with something between a program and the file system, as `acts` has it.

Each is one commit: after a crash anywhere and sweeps, the message waits, and nothing was sent; or it is archived, and
each message that was made of it is in its queue once, byte for byte. Then consumers take all that waits. Two days later
nothing is left over, and fsck finds nothing.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dropq import DropqError, NoSuchQueue, Out, Retry, Root, StorageError, work
from dropq.diagnosis.fsck import fsck_root, queues
from dropq.queue.outputs import Outputs
from dropq.staging import fan_out
from torture import record_cases
from torture.account import body, in_short, look
from torture.cases import DAYS, Said, open_findings
from torture.faults import ERRORS, LATE, UNDONE, Failing
from torture.record_cases import A_PURGE, COMMITTED, OTHERS, UNDISTURBING, RecordCases, Scene
from torture.topic_cases import LAPSE

#: The queues that messages are made for; the root's dead-letter queue, where it has one; a topic, and its subscription.
OUT, MORE, LETTERS, NEWS, ALL = "out", "more", "letters", "news", "news/all.x"
#: The message, and what is made of it: two of the three are long.
SOURCE, PARTS = "source", {"one": 0, "two": 3_000, "three": 200_000}
ONE, TWO, THREE = PARTS
GONE = "gone"
#: Where an archived topic lies, which has a copy for its subscription.
ARCHIVE = "topic-root/news/.incoming/processed"
#: Where parts may lie, in short.
AT_OUT, AT_MORE, AT_ALL = f"{OUT}/target", f"{MORE}/target", "topic-root/news/.subscriptions/all.x/target"
DEAD, ASIDE = f"{LETTERS}/target", "error"

SETTINGS = record_cases.SETTINGS


@dataclass(frozen=True)
class Case(record_cases.Case):
    """How a message is acknowledged, and what is made of it.

    Attributes:
        parts: where each part is in the end if the message is acknowledged; nothing is sent where there are none.
        letters: whether the root has a dead-letter queue.
    """

    body: bytes = body(SOURCE)
    parts: Mapping[str, str] = field(default_factory=dict)
    letters: bool = True


def out(name: str, to: str, **fields: Any) -> Out:
    """Return a part."""
    return Out(to, body(name, PARTS[name]), **fields)


# -- what holders do -----------------------------------------------------------------------------------------------


def _hold(scene: Scene) -> None:
    scene.hold()


def _hold_wholly(scene: Scene) -> None:
    """Hold a bundle, and acknowledge each of its records."""
    for record in list(scene.hold().records("text")):
        record.ack()


def _ack(*parts: tuple[str, str], **fields: Any) -> Callable[[Scene], object]:
    return lambda scene: scene.messages[0].ack(send=[out(*part, **fields) for part in parts])


def _ack_again(scene: Scene) -> None:
    """Acknowledge it, and once more where the file system refused."""
    sends = [out(ONE, OUT), out(TWO, MORE)]
    try:
        scene.messages[0].ack(send=sends)
    except StorageError:
        if scene.messages[0].held:
            scene.messages[0].ack(send=sends)


def _ack_by_receipt(scene: Scene) -> None:
    """Acknowledge it in another program, which knows its receipt."""
    receipt = scene.messages[0].receipt
    assert receipt is not None
    scene.other().claimed(receipt).ack(send=[out(ONE, OUT), out(TWO, MORE)])


def _work(handler: Callable[[Any], object]) -> Callable[[Scene], object]:
    return lambda scene: work(scene.queue, handler, until_empty=True)


def _yielding(_: object) -> Iterator[Out]:
    yield out(ONE, OUT)
    yield out(THREE, MORE)


def _giving_back(_: object) -> Iterator[Out]:
    yield out(ONE, OUT)
    raise Retry


def _stage(scene: Scene, *, make: bool) -> None:
    """Stage parts for two queues, of which one is deleted then, and perhaps made again."""
    message = scene.hold()
    outputs = Outputs(message, scene.queue._destinations)
    outputs.add_all([out(ONE, OUT), out(TWO, MORE)])
    scene.root.delete_queue(MORE)
    if make:
        scene.root.create_queue(MORE)
    scene.made.append(outputs)


def _commit(scene: Scene) -> None:
    scene.messages[0]._ack_with(scene.made[0])


_TWO = ((ONE, OUT), (TWO, MORE))
_LONG = {"note": "long " * 80, "more": "a" * 120}

CASES = (
    Case("one", _hold, (_ack((THREE, OUT)),), parts={THREE: AT_OUT}),
    Case("three", _hold, (_ack(*_TWO, (THREE, OUT)),), parts={ONE: AT_OUT, TWO: AT_MORE, THREE: AT_OUT}),
    Case(
        "to a topic, under a credit",
        _hold,
        (_ack((ONE, OUT), (TWO, NEWS)),),
        parts={ONE: AT_OUT, TWO: AT_ALL},
        below=True,
    ),
    Case("delayed", _hold, (_ack(*_TWO, delay="1h"),), parts={ONE: f"{OUT}/delayed", TWO: f"{MORE}/delayed"}),
    Case("to its own queue", _hold, (_ack((ONE, "q"), (TWO, OUT)),), parts={ONE: "target", TWO: AT_OUT}),
    Case(
        "with long names", _hold, (_ack(*_TWO, properties=_LONG),), parts={ONE: AT_OUT, TWO: AT_MORE}, fields={
            "properties": _LONG, "correlation_id": "c" * 60,
        },
    ),
    Case("of a foreign file", _hold, (_ack(*_TWO),), parts={ONE: AT_OUT, TWO: AT_MORE}, file="readings.csv"),
    Case("by a receipt", _hold, (_ack_by_receipt,), parts={ONE: AT_OUT, TWO: AT_MORE}),
    Case("of a bundle", _hold_wholly, (_ack(*_TWO),), parts={ONE: AT_OUT, TWO: AT_MORE}),
    Case("once more", _hold, (_ack_again,), parts={ONE: AT_OUT, TWO: AT_MORE}),
    Case(
        "a handler that yields",
        lambda scene: None,
        (_work(_yielding),),
        parts={ONE: AT_OUT, THREE: AT_MORE},
        below=True,
        tells=False,
    ),
    Case("a handler that gives it back", lambda scene: None, (_work(_giving_back),), tells=False),
    Case("a queue that is gone", partial(_stage, make=False), (_commit,), parts={ONE: AT_OUT, TWO: DEAD}),
    Case(
        "a queue that is gone, no dead letters",
        partial(_stage, make=False),
        (_commit,),
        parts={ONE: AT_OUT, TWO: ASIDE},
        letters=False,
    ),
    Case("a queue made anew", partial(_stage, make=True), (_commit,), parts={ONE: AT_OUT, TWO: DEAD}, below=True),
)  # fmt: skip


# -- what comes between --------------------------------------------------------------------------------------------


def _consume(scene: Scene) -> None:
    """Take what was made."""
    for name in (OUT, MORE):
        with suppress(NoSuchQueue), scene.other().root.queue(name).subscribe() as subscription:
            while (message := subscription.receive(timeout=0)) is not None:
                message.ack()


def _delete(scene: Scene) -> None:
    scene.other().root.delete_queue(MORE)


def _make_anew(scene: Scene) -> None:
    _delete(scene)
    scene.other().root.create_queue(MORE)


A_CONSUMER, A_CONSUMER_OF_ALL = "a consumer of what was made", "a consumer of whole messages"
#: What another program does, and where the message may be then if it was not acknowledged by its holder.
WORKS: Mapping[str, tuple[Callable[[Scene], object], str]] = {
    **{name: (other, "") for name, other in OTHERS.items()},
    "an ack from outside": (OTHERS["an ack from outside"], "processed"),
    "a script that archives claims": (OTHERS["a script that archives claims"], "processed"),
    "an expire of what is held": (OTHERS["an expire of what is held"], "expired"),
    A_PURGE: (OTHERS[A_PURGE], GONE),
    A_CONSUMER_OF_ALL: (record_cases.TAKERS[A_CONSUMER_OF_ALL], "processed"),
    A_CONSUMER: (_consume, ""),
    "a delete of a queue": (_delete, ""),
    "a delete of a queue, which is made anew": (_make_anew, ""),
}
#: Those after which a part may be a dead letter.
DELETING = tuple(name for name in WORKS if "delete" in name)


# -- the cases of a setting ----------------------------------------------------------------------------------------


class OutputCases(RecordCases):
    """The cases of one setting; arguments as of `RecordCases`."""

    works: Mapping[str, Callable[[Scene], object]] = {name: other for name, (other, _) in WORKS.items()}
    errors: Mapping[str, tuple[int, ...]] = {**ERRORS, "rename": (*ERRORS["rename"], errno.EXDEV)}
    late = LATE
    #: Whether a call is refused now: then a worker may fail a message.
    _refuses = False

    def refuse(self, case: record_cases.Case, choose: Callable[[list[Failing]], Iterable[Failing]] = list) -> None:
        def chosen(every: list[Failing]) -> Iterable[Failing]:
            self._refuses = True
            return choose([failing for failing in every if case.tells or not failing.lasts])  # a worker waits for ever

        super().refuse(case, chosen)
        self._refuses = False

    def furnished(self, case: record_cases.Case) -> Root:
        assert isinstance(case, Case)
        root = super().furnished(case)
        if case.letters:
            with Path(root.path, "dropq.toml").open("a") as file:
                file.write(f'dead_letter_queue = "{LETTERS}"\n')
            root = self._opened()
        options = {name: value for name, value in self._setting.options.items() if name != "history"}
        for name in (OUT, MORE, LETTERS):
            root.create_queue(name, redelivery_delay=0, **options)
        root.create_topic(NEWS, **options).create_subscription("all", client_id="x")
        return root

    def judge(
        self,
        case: record_cases.Case,
        where: str,
        said: Said | None = None,
        *,
        read_only: bool = False,
        other: str = "",
    ) -> None:
        assert isinstance(case, Case)
        self.row.cases += 1
        died = read_only or said is None or bool(said.raised)
        with self.mounted():
            try:
                wrong = list(self._wrong(case, said if case.tells else None, other, died))
            except (DropqError, OSError) as error:
                wrong = [repr(error)]
        self.row.wrong += [f"{where}: {line}" for line in wrong]

    def _wrong(self, case: Case, said: Said | None, other: str, died: bool) -> Iterator[str]:
        """Yield what is wrong now, after sweeps, once all was received, and days later."""
        yield from self._early(case)
        self._clock.advance(LAPSE)
        self._sweep()
        places = self._places()
        committed = any(places[part] for part in PARTS)
        yield from self._misplaced(case, places, other)
        if said is not None:
            yield from self._untrue(said, other, committed)
        yield from self._wrong_credits()
        received = Counter[str]()
        self._receive(received)
        for _ in range(2):
            self._clock.ms += DAYS
            self._sweep()
            self._receive(received)
        yield from self._came(case, committed, received, other)
        # Who dies may leave a draft in working/, as any sender does.
        yield from (line for line in self._left_over() if not (died and "/working has " in line))
        yield from self._found(died)

    def _places(self) -> dict[str, list[str]]:
        """Return where the message lies, and each part; what a topic has archived is not counted."""
        found = look(self._root)
        self.row.wrong += [f"{path} is not whole" for path in found.damaged]
        places = {name: [in_short(each) for each in found.locations.get(name, [])] for name in (SOURCE, *PARTS)}
        return {name: [each for each in lies if each != ARCHIVE] for name, lies in places.items()}

    def _early(self, case: Case) -> Iterator[str]:
        """Yield what was sent although the message waits, or twice, while parts may be on their way."""
        places = self._places()
        for part in PARTS:
            if len(places[part]) > 1:
                self.row.doubled += 1
                yield f"{part} is in {places[part]}"
        if any(places[part] for part in PARTS) and (live := _live(places[SOURCE])):
            yield f"something was sent, and the message is in {live}"

    def _misplaced(self, case: Case, places: Mapping[str, Sequence[str]], other: str) -> Iterator[str]:
        """Yield what lies elsewhere than it may: all that was made is there once, or nothing is."""
        counts = {part: len(places[part]) for part in self._kept_parts(case, other)}
        committed = any(counts.values())
        self.row.lost += sum(committed and not count for count in counts.values())
        self.row.doubled += sum(count > 1 for count in counts.values())
        if committed and set(counts.values()) != {1}:
            yield f"what was made is in {places}"
        for part, place in case.parts.items():
            refused = {ASIDE} if self._refuses and place == DEAD else set()
            allowed = {place, *refused, *((DEAD, ASIDE) if other in DELETING else ())}
            allowed |= {f"{place.partition('/')[0]}/processed"} if other == A_CONSUMER else set()
            allowed |= {"processed"} if other == A_CONSUMER_OF_ALL and place == "target" else set()
            yield from (f"{part} is in {each}, and may be in {allowed}" for each in places[part] if each not in allowed)
        strange = [part for part in PARTS.keys() - case.parts.keys() if places[part]]
        yield from (f"{part} was not to be made, and is in {places[part]}" for part in strange)
        source = places[SOURCE]
        if committed:
            expected = [["processed"]] if self._setting.history else [[]]
        else:
            settled = WORKS[other][1] if other else ""
            expected = [["target"], ["start/target"], [settled]] if settled else [["target"]]
            expected += [["error"]] if self._refuses and not case.tells else []
            if settled and (settled == GONE or (settled == "processed" and not self._setting.history)):
                expected.append([])
        if list(source) not in expected:
            self.row.lost += not source
            self.row.doubled += len(source) > 1
            yield f"the message is in {source}, and may be in {expected}; {'all' if committed else 'nothing'} was sent"

    def _kept_parts(self, case: Case, other: str) -> list[str]:
        """Return the parts of a case, but for those that another consumer takes and nobody keeps."""
        forgets = other == A_CONSUMER_OF_ALL and not self._setting.history
        return [part for part, place in case.parts.items() if not (forgets and place == "target")]

    def _untrue(self, said: Said, other: str, committed: bool) -> Iterator[str]:
        """Yield what a holder was told that is not so."""
        told = f"its holder was told {said.raised or 'nothing'} {said.words}"
        if not said.raised and not committed:
            yield f"nothing was sent, and {told}"
        if said.raised == "LeaseLost" and (committed or not other):
            yield f"{'all' if committed else 'nothing'} was sent, and {told}"
        if said.raised and COMMITTED in said.words and not committed:
            yield f"nothing was sent, and {told}"
        if said.raised and committed and any(fate in said.words for fate in (*UNDONE, fan_out.UNSETTLED)):
            yield f"all was sent, and {told}"
        if said.raised and other in (*UNDISTURBING, A_CONSUMER):
            yield told

    def _receive(self, received: Counter[str]) -> None:
        """Take all that waits."""
        for queue in self._opened().queues():
            with ExitStack() as stack:
                subscription = stack.enter_context(queue.subscribe(max_backlog=None))
                while (message := subscription.receive(timeout=0)) is not None:
                    received[message.body.split(b" ", 1)[0].decode()] += 1
                    message.ack()

    def _came(self, case: Case, committed: bool, received: Counter[str], other: str) -> Iterator[str]:
        """Yield what was received twice, or after it was settled, and what was not."""
        for name in (SOURCE, *self._kept_parts(case, other)):
            lies, count = self._places()[name], received[name]
            if count > 1 or len(lies) > 1 or (name == SOURCE and committed and count):
                self.row.doubled += 1
                yield f"{name} was received {count} times, and lies in {lies}"
            forgotten = not self._setting.history and (name == SOURCE or case.parts[name] == "target")
            purged = name == SOURCE and other == A_PURGE
            if not (lies or purged or (forgotten and (count or name == SOURCE))) and (committed or name == SOURCE):
                self.row.lost += 1
                yield f"{name} is lost"

    def _found(self, died: bool) -> Iterator[str]:
        """Yield what fsck finds; of what a process leaves that dies, what fsck does not repair."""
        root = self._opened()
        if died:
            fsck_root(root.context, repair=True)
            for name in queues(root.context):
                root.queue(name).fsck(repair=True)
        yield from (f"fsck finds {finding}" for finding in open_findings(root))


def _live(places: Sequence[str]) -> list[str]:
    return [place for place in places if place.rpartition("/")[2] in ("target", "processing", "delayed")]
