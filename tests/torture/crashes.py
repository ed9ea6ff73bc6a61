"""A process dies before and after every call to the file system that any verb makes; then the promises are checked."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from forks import DIED

from torture.calls import Call
from torture.cases import Cases, in_settings
from torture.table import Options, Row
from torture.verbs import FEW, Setting, Verb


@dataclass(frozen=True)
class Moment:
    """When a process dies: after so many calls that change something, or in the middle of the next, a write."""

    calls: int
    midway: bool = False

    def __str__(self) -> str:
        return f"{'in the middle of' if self.midway else 'after'} call {self.calls + self.midway}"


@dataclass
class Dying:
    """Counts calls that change something, and ends the process at a moment; nothing is synced, as no power is cut."""

    at: Moment | None
    calls: list[str] = field(default_factory=list)

    def __call__(self, call: Call) -> object:
        if not call.changes:
            return call.do()
        if self.at is not None and len(self.calls) == self.at.calls:
            if self.at.midway and call.name == "write":
                os.write(call.arguments[0], bytes(call.arguments[1])[: len(call.arguments[1]) // 2])
            os._exit(DIED)
        self.calls.append(call.name)
        return None if call.name == "fsync" else call.do()

    def calls_made(self) -> list[str]:
        """Return the calls until now, and count no more."""
        calls, self.calls = self.calls, []
        return calls


def run(options: Options) -> Iterable[Row]:
    """Crash every verb, in each setting; in short, some of them in one, each at a moment."""
    return in_settings(_crash_all, options)


def _crash_all(options: Options, setting: Setting) -> Row:
    chance = random.Random(options.seed)
    cases = Cases(options.folder, setting, Row(f"crash at every call: {setting.name}"))
    verbs = options.shared(cases.verbs())
    for verb in verbs if options.long else chance.sample(verbs, len(verbs)):
        if not options.long and cases.row.kills >= FEW:
            break
        crash(cases, verb, options.some(chance))
    return cases.row


def crash(cases: Cases, verb: Verb, choose: Callable[[list[Moment]], list[Moment]] = list) -> None:
    """Let a verb die at every moment, or at some."""
    dying = Dying(None)
    said = cases.perform(verb, dying, calls=dying.calls_made)
    assert said is not None
    calls, after = said.calls, cases.here()
    moments = [Moment(number) for number in range(1, len(calls))]
    moments += [Moment(number, midway=True) for number, name in enumerate(calls) if name == "write"]
    for moment in choose(moments):
        if cases.perform(verb, Dying(moment)) is None:
            cases.row.kills += 1
            cases.judge(f"{verb} {moment} of {len(calls)}", after)
    if calls and not said.raised:
        cases.perform(verb, Dying(None))
        cases.judge(f"{verb}, done", after)
