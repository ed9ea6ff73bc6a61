"""A process dies before and after every call to the file system that any verb makes; then the promises are checked.

Nobody lists the verbs, nor where their messages may be: each may be where it was before the verb or where it is after
it, or in between in processing/; once a sweep has been, it is where a sweep takes it from one of the two. And what fsck
is then asked to repair is in order.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from helpers import Clock

from dropq import DropqError, Root, ready
from dropq.fsck import fsck, fsck_root, queues
from dropq.sweep import QuickSweep
from torture.account import Account, Found, body, judge, look
from torture.calls import Call, come_between
from torture.table import Options, Row
from torture.verbs import AFTER, SETTINGS, Setting, Verb, build, verbs

DONE, DIED, REFUSED = 0, 77, 78
GONE, BESIDE = "gone", "beside the queues"
#: Milliseconds after which whatever a crash left counts as left.
DAYS = 2 * 86_400_000
#: Cases of a verb and a setting in the short form.
SAMPLE = 2


@dataclass(frozen=True)
class Moment:
    """When a process dies: after so many calls that change something, or in the middle of the next, a write."""

    calls: int
    midway: bool = False

    def __str__(self) -> str:
        return f"{'in the middle of' if self.midway else 'after'} call {self.calls + self.midway}"


class Dying:
    """Counts calls that change something, and ends the process at a moment; nothing is synced, as no power is cut."""

    def __init__(self, at: Moment | None) -> None:
        self.calls: list[str] = []
        self._at = at

    def __call__(self, call: Call) -> object:
        if not call.changes:
            return call.do()
        if self._at is not None and len(self.calls) == self._at.calls:
            if self._at.midway and call.name == "write":
                os.write(call.arguments[0], bytes(call.arguments[1])[: len(call.arguments[1]) // 2])
            os._exit(DIED)
        self.calls.append(call.name)
        return None if call.name == "fsync" else call.do()


#: Where each body lies.
States = Mapping[str, str]


class Before(NamedTuple):
    """Where bodies lie when nothing is done, and when a sweep is all that is."""

    found: States
    swept: States


def run(options: Options) -> Iterable[Row]:
    """Crash every verb in every setting."""
    chance = random.Random(options.seed)
    for setting in SETTINGS:
        row = Row(f"crash at every call: {setting.name}")
        cases = Cases(options.folder, setting, row)
        for verb in cases.verbs():
            cases.crash(verb, None if options.long else (SAMPLE, chance))
        yield row


class Cases:
    """The crashes of one setting.

    Args:
        folder: where each case makes its root.
        setting: how the queue is configured.
        row: what counts them.
    """

    def __init__(self, folder: Path, setting: Setting, row: Row) -> None:
        self._root = folder / "root"
        self._setting = setting
        self._row = row
        self._said = folder / "said"
        self._clock = Clock()
        self._before = self._baseline()

    def verbs(self) -> list[Verb]:
        """Return the verbs that change something."""
        clock = Clock()
        scene = build(self._fresh(), self._setting, clock)
        found = verbs(scene)
        scene.queue.close()
        return found

    def crash(self, verb: Verb, sample: tuple[int, random.Random] | None = None) -> None:
        """Let a verb die everywhere, or at some moments that are left to chance."""
        outcome, calls = self._perform(verb, None)
        after, swept = self._look(), self._swept()
        moments = [Moment(number) for number in range(1, len(calls))]
        moments += [Moment(number, midway=True) for number, name in enumerate(calls) if name == "write"]
        if sample is not None and len(moments) > sample[0]:
            moments = sample[1].sample(moments, sample[0])
        for moment in moments:
            where = f"{verb} {moment} of {len(calls)}"
            ended, _ = self._perform(verb, moment)
            if ended == DIED:
                self._row.kills += 1
                self._judge(where, after, swept)
        if outcome == DONE and calls:
            self._perform(verb, None)
            self._judge(f"{verb}, done", after, swept)

    def _baseline(self) -> Before:
        self._perform(None, None)
        return Before(self._look(), self._swept())

    def _fresh(self) -> Path:
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir(parents=True)
        return self._root

    def _perform(self, verb: Verb | None, at: Moment | None) -> tuple[int, list[str]]:
        """Call a verb in a child of its own; return how that ended, and the calls that it made."""
        self._fresh()
        begun = self._clock.ms = Clock().ms
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            os._exit(self._in_the_child(verb, at))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self._clock.ms = begun + AFTER * 1000
        if status not in (DONE, DIED, REFUSED):
            raise RuntimeError(f"{verb} at {at}: the process ended with {status}")
        return status, [] if status == DIED else json.loads(self._said.read_text())

    def _in_the_child(self, verb: Verb | None, at: Moment | None) -> int:
        try:
            QuickSweep.due = True  # type: ignore[assignment,method-assign]
            scene = build(self._root, self._setting, self._clock)
            ready.MAX_AGE, ready.LISTING_SHARE = 0.0, 0
            dying = Dying(at)
            come_between(dying, noreplace=self._setting.noreplace)
            try:
                if verb is not None:
                    verb.call(scene)
                ended = DONE
            except (DropqError, ValueError):
                ended = REFUSED
            calls, dying.calls = dying.calls, []
            self._said.write_text(json.dumps(calls))
            return ended
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            return 1

    # -- what is checked ---------------------------------------------------------------------------------------------

    def _look(self) -> dict[str, str]:
        found = look(self._root)
        return self._source(found) | found.states()

    def _source(self, found: Found) -> dict[str, str]:
        """Return where a file is that was to be moved into a queue and did not come there: it is never lost either."""
        whole = body("source", 100_000)
        places = [path for path in (str(self._root / "source"), *found.beside) if _holds(path, whole)]
        return {"source": BESIDE} if places else {}

    def _swept(self) -> dict[str, str]:
        """Sweep as it is done by cron, and look again."""
        for root in self._roots():
            root.sweep()
        return self._look()

    def _roots(self) -> list[Root]:
        paths = [self._root, self._root / "far", self._root / "new root"]
        return [Root(path, clock=self._clock) for path in paths if (path / "dropq.toml").exists()]

    def _judge(self, where: str, after: States, swept: States) -> None:
        """Check what a crash left: before a sweep, after one, and once fsck has been days later."""
        self._row.cases += 1
        self._count(where, self._look(), self._before.found, after, between="processing")
        self._row.count(self._doubled(), where)
        try:
            self._count(f"{where}, swept", self._swept(), self._before.swept, swept)
            self._row.count(self._doubled(), f"{where}, swept")
            self._count_jobs(where)
            self._repair(where)
        except DropqError as error:
            self._row.wrong.append(f"{where}: {error!r}")

    def _doubled(self) -> Account:
        found = look(self._root)
        return judge(found, must=(), may=found.places.keys())

    def _count(
        self,
        where: str,
        found: Mapping[str, str],
        before: Mapping[str, str],
        after: Mapping[str, str],
        between: str = "",
    ) -> None:
        for name in before.keys() | after.keys() | found.keys():
            place, allowed = found.get(name, GONE), {before.get(name, GONE), after.get(name, GONE)}
            if len(allowed) > 1 and GONE not in (before.get(name, GONE),):
                allowed.add(between)
            if place not in allowed:
                self._row.lost += place == GONE
                self._row.wrong.append(f"{where}: {name!r} is {place}, and may be {' or '.join(sorted(allowed))}")

    def _count_jobs(self, where: str) -> None:
        """See that of what is one job all is sent, or none."""
        sent = Counter(name.partition("#")[0] for name in self._look() if "#" in name)
        self._row.wrong += [f"{where}: of {job} a part is sent" for job, parts in sent.items() if parts != 2]

    def _repair(self, where: str) -> None:
        """See that days later nothing is left that fsck finds and does not repair, and that no message goes by that."""
        there = look(self._root).places.keys()
        self._clock.ms += DAYS
        for root in self._roots():
            root.sweep(foreign_older_than="1d", unleased_older_than="1d", jobs_older_than="1d")
            fsck_root(root, repair=True)
            for queue in queues(root):
                fsck(queue, repair=True)
            for finding in self._open(root):
                self._row.wrong.append(f"{where}: fsck leaves {finding}")
        self._row.count(judge(look(self._root), must=there), f"{where}, repaired")

    def _open(self, root: Root) -> Iterator[str]:
        findings = [*fsck_root(root), *(finding for queue in queues(root) for finding in fsck(queue))]
        yield from (f"{finding.kind} {finding.path}" for finding in findings if finding.open)


def _holds(path: str, content: bytes) -> bool:
    try:
        return Path(path).read_bytes() == content
    except FileNotFoundError:
        return False
