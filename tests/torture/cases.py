"""A verb is called in a process of its own, in a scene, with something between it and the file system; then the
promises are checked on disk.

Nobody lists where messages may be: each may be where it was before the verb or where it is after it, or in between in
processing/. Once a sweep has been, each is where a sweep takes it from one of the two; and what fsck is then asked to
repair is in order.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from forks import DIED, forked, pool
from helpers import Clock

from dropq import DropqError, Finding, Root
from dropq.diagnosis.fsck import fsck_root, queues
from torture.account import Found, body, judge, look
from torture.calls import Between, Call, come_between
from torture.table import Options, Row
from torture.verbs import AFTER, SETTINGS, Setting, Verb, build, verbs

#: How a child ends: when it could say what became of the verb, and when it was to die.
SAID = 0
GONE, BESIDE = "gone", "beside the queues"
#: What the scene calls a message that a process held which died: a sweep returns others as it returns this one.
HELD = "held by the dead"
#: Milliseconds after which whatever was left counts as left.
DAYS = 2 * 86_400_000

#: Where each body lies.
States = Mapping[str, str]


class Before(NamedTuple):
    """Where bodies lie, and where they do once a sweep has been."""

    found: States
    swept: States


@dataclass(frozen=True)
class Said:
    """What became of a verb: the calls that it made, and what it raised, by class and in words.

    `unread` is whether the read of a file was refused.
    """

    calls: list[str]
    raised: str = ""
    words: str = ""
    unread: bool = False


def _do(call: Call) -> object:
    return call.do()


class Cases:
    """The cases of one setting.

    Args:
        folder: where each case makes its root.
        setting: how the queue is configured.
        row: what counts them.
        apart: where a child says what became of a verb; None is the same folder.
    """

    def __init__(self, folder: Path, setting: Setting, row: Row, *, apart: Path | None = None) -> None:
        self.row = row
        self._root = folder / "root"
        self._said = (apart or folder) / "said"
        self._setting = setting
        self._clock = Clock()
        self.perform(None)
        self.before = self.here()

    def verbs(self) -> list[Verb]:
        """Return the verbs that there are."""
        scene = build(self._fresh(), self._setting, Clock())
        found = verbs(scene)
        scene.queue.close()
        return found

    def perform(
        self,
        verb: Verb | None,
        between: Between = _do,
        *,
        calls: Callable[[], list[str]] = list,
        first: Callable[[], object] = lambda: None,
    ) -> Said | None:
        """Call a verb in a child of its own; return what became of it, or None when the child died of what it met.

        Args:
            verb: what is called; None only sets the scene.
            between: what each call to the file system goes by.
            calls: what tells, in the child, which calls there were.
            first: what is done, in the child, once the scene is set.
        """
        self._fresh()
        begun = self._clock.ms = Clock().ms
        sys.stdout.flush()
        status = forked(lambda: self._in_the_child(verb, between, calls, first))
        self._clock.ms = begun + AFTER * 1000
        if status not in (SAID, DIED):
            raise RuntimeError(f"{verb}: the process ended with {status}")
        return None if status == DIED else Said(**json.loads(self._said.read_text()))

    def _in_the_child(
        self, verb: Verb | None, between: Between, calls: Callable[[], list[str]], first: Callable[[], object]
    ) -> None:
        logging.disable()
        ended: list[str] = []
        threading.excepthook = lambda thread: ended.append(repr(thread.exc_value))
        scene = build(self._root, self._setting, self._clock)
        first()
        come_between(between, noreplace=self._setting.noreplace)
        said = Said([])
        try:
            if verb is not None:
                verb.call(scene)
        except Exception as error:
            words = "; ".join([str(error), *getattr(error, "__notes__", ())])
            said = Said([], "refused" if isinstance(error, ValueError) else type(error).__name__, words)
        if ended:
            said = Said([], "an error that ended a thread", "; ".join(ended))
        content = json.dumps({"calls": calls(), "raised": said.raised, "words": said.words})
        self._said.write_text(content)
        os._exit(SAID)

    def _fresh(self) -> Path:
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir(parents=True)
        return self._root

    # -- what is looked at -------------------------------------------------------------------------------------------

    def look(self) -> dict[str, str]:
        """Return where each body lies."""
        return self._states(look(self._root))

    def _states(self, found: Found) -> dict[str, str]:
        return self._source(found) | found.states()

    def _source(self, found: Found) -> dict[str, str]:
        """Return where a file is that was to be moved into a queue and did not come there: it is never lost either."""
        whole = body("source", 100_000)
        paths = [path for path in (str(self._root / "source"), *found.beside) if _holds(path, whole)]
        return {"source": BESIDE} if paths else {}

    def here(self) -> Before:
        """Return where each body lies now, and where it does once a sweep has been."""
        return Before(self.look(), self._states(self._swept()))

    def _swept(self) -> Found:
        """Sweep as it is done by cron, and look again."""
        for root in self._roots():
            root.sweep()
        return look(self._root)

    def _roots(self) -> list[Root]:
        paths = [self._root, self._root / "far", self._root / "new root"]
        return [Root(path, clock=self._clock) for path in paths if (path / "dropq.toml").exists()]

    # -- what is checked ---------------------------------------------------------------------------------------------

    def judge(self, where: str, after: Before, *, chooses: bool = False) -> None:
        """Check what is left: before a sweep, after one, and once fsck has been days later.

        Args:
            where: what is judged, in words.
            after: where bodies are when the verb met nothing.
            chooses: the verb may have taken another message of those that waited.
        """
        self.row.cases += 1
        taken = self._taken(after) if chooses else set[str]()
        found = self._see(where, look(self._root), *self.before, *after, between={"processing", *taken})
        back = self.before.swept[HELD] if self.before.found.get(HELD) == "processing" else "delayed"
        returned = dict(self.before.swept) | {name: back for name, state in found.items() if state == "processing"}
        try:
            swept = self._swept()
            found = self._see(f"{where}, swept", swept, self.before.swept, after.swept, returned, between=taken)
            self._judge_jobs(where, found)
            self._repair(where, after.swept, swept.locations.keys())
        except (DropqError, OSError) as error:
            self.row.wrong.append(f"{where}: {error!r}")

    def _taken(self, after: Before) -> set[str]:
        """Return where messages come that the verb takes."""
        pairs = ((self.before.found, after.found), (self.before.swept, after.swept))
        return {now.get(name, GONE) for was, now in pairs for name in was if now.get(name) != was[name]}

    def _see(self, where: str, found: Found, *allowing: States, between: Set[str]) -> States:
        """Count what is elsewhere than allowed, and what is there twice; return where each body lies."""
        states = self._states(found)
        self._allow(where, states, *allowing, between=between)
        self.row.count(judge(found, must=(), may=found.locations.keys()), where)
        return states

    def _allow(self, where: str, found: States, *allowing: States, between: Set[str]) -> None:
        """Count what is elsewhere than allowed; what was there before, and is on its way, may be in between."""
        before, takes = allowing[0], len(between) > 1
        for name in {name for states in (found, *allowing) for name in states}:
            location, allowed = found.get(name, GONE), {states.get(name, GONE) for states in allowing}
            if name in before and (takes or len(allowed) > 1):
                allowed |= between
            if location not in allowed:
                self.row.lost += location == GONE
                self.row.wrong.append(f"{where}: {name!r} is {location}, and may be {' or '.join(sorted(allowed))}")

    def _judge_jobs(self, where: str, found: States) -> None:
        """See that of what is one job all is sent, or none."""
        sent = Counter(name.partition("#")[0] for name in found if "#" in name)
        self.row.wrong += [f"{where}: of {job} a part is sent" for job, parts in sent.items() if parts != 2]

    def _repair(self, where: str, after: States, there: Set[str]) -> None:
        """See that days later nothing is left that fsck finds and does not repair, and that no message goes by that.

        What a delete that died was to remove may be set aside.
        """
        self._clock.ms += DAYS
        for root in self._roots():
            root.sweep(foreign_older_than="1d", unleased_older_than="1d", jobs_older_than="1d")
            if findings(root, repair=True):
                self.row.wrong += [f"{where}: fsck leaves {finding}" for finding in open_findings(root)]
        self.row.count(judge(look(self._root), must=there & after.keys(), may=there), f"{where}, repaired")


def in_settings(part: Callable[[Options, Setting], Row], options: Options) -> Iterable[Row]:
    """Return the row of each setting, in processes of their own; in short, of one that is left to chance."""
    if not options.long:
        return [part(options, random.Random(options.seed).choice(SETTINGS))]
    with pool() as processes:
        return list(processes.map(part, *zip(*options.apart(SETTINGS), strict=True)))


def findings(root: Root, *, repair: bool = False) -> list[Finding]:
    """Return what fsck finds in a root and in its queues."""
    found = fsck_root(root.context, repair=repair)
    for name in queues(root.context):
        found += root.queue(name).fsck(repair=repair)
    return found


def open_findings(root: Root) -> list[str]:
    """Return what fsck finds in a root and its queues, and nobody has repaired."""
    return [f"{finding.kind} {finding.path}" for finding in findings(root) if finding.open]


def _holds(path: str, content: bytes) -> bool:
    try:
        return Path(path).read_bytes() == content
    except FileNotFoundError:
        return False
