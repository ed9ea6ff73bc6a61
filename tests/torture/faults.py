"""Every call to the file system that any verb makes is refused once, or from then on; then the promises are checked.

A verb that meets a fault does what it was asked all the same, or raises a StorageError that tells what became of the
message. What it tells is held against the disk.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torture.calls import Call
from torture.cases import GONE, Before, Cases, Said, States, in_settings
from torture.table import Options, Row
from torture.verbs import FEW, Setting, Verb

_ANY = (errno.EIO, errno.EACCES, errno.ESTALE)
_OPENED = (*_ANY, errno.EMFILE)
_CHANGED = (*_ANY, errno.EROFS)
_GROWN = (*_CHANGED, errno.ENOSPC)
#: What each call may be refused with.
ERRORS: Mapping[str, tuple[int, ...]] = {
    "open": (*_GROWN, errno.EMFILE),
    "listdir": _OPENED,
    "scandir": _OPENED,
    "write": (errno.EIO, errno.ENOSPC, errno.ESTALE),
    "fsync": (errno.EIO, errno.ENOSPC),
    "mkdir": _GROWN,
    "link": _GROWN,
    "rename": _GROWN,
    "unlink": _CHANGED,
    "rmdir": _CHANGED,
}
#: What a rename may be answered with that was done: by a soft mount, or as a FUSE process ends.
LATE = (errno.EIO, errno.ESTALE)
#: Errors that say what is not true when a call was refused for no reason of dropq's own.
UNTRUE = ("LeaseLost", "NoSuchQueue", "NoSuchMessage", "QueueExists", "QueueFull", "InvalidName")
#: Verbs that do what they were asked when they return without an error; others do what they can, and say it in a log.
PROMPT = ("Message.", "Queue.send", "Queue.writer", "Job.commit", "Epoch.commit")
#: What a fate says of what was to be sent or settled: that nothing was done, or that it was.
UNDONE = (
    "not sent",
    "nothing was sent",
    "not committed",
    "is still held",
    "nothing was changed",
    "the message stays in",
)
DONE = ("is visible", "is settled", "was sent, its source")
#: What is said of a job that a sweep brings to its end, and of a send of many that sent some.
COMMITTED, SOME = "is committed", "of this send_many were sent"


#: Verbs that choose among what waits: after a fault they may have taken another message than they would have.
CHOOSING = (
    "Queue.receive",
    "Queue.ack",
    "Subscription.receive",
    "Subscription.receive_many",
    "Journal.next_batch",
    "work",
)


@dataclass
class Failing:
    """Refuses the Nth call, and perhaps all of its kind from then on."""

    at: int = 0
    error: int = errno.EIO
    lasts: bool = False
    late: bool = False  #: whether a rename is done before it is refused, as where only its answer is lost
    calls: list[str] = field(default_factory=list)
    refused: str = ""

    def __call__(self, call: Call) -> object:
        self.calls.append(call.name)
        if len(self.calls) == self.at:
            self.refused = call.name
        again = self.lasts and len(self.calls) > self.at > 0 and self._is_alike(call)
        if len(self.calls) == self.at or again:
            if self.late and call.name == "rename":
                call.do()
            path = next((part for part in call.arguments if isinstance(part, str)), None)
            raise OSError(self.error, os.strerror(self.error), path)
        return None if call.name == "fsync" else call.do()

    def _is_alike(self, call: Call) -> bool:
        """Tell whether a call is of the kind that was refused; a read-only disk, or a full one, refuses several."""
        if self.error == errno.EROFS:
            return call.changes and call.name != "fsync"
        if self.error == errno.ENOSPC:
            return call.changes and call.name in ("open", "write", "mkdir", "link", "rename")
        return call.name == self.refused

    def calls_made(self) -> list[str]:
        """Return the calls until now, and refuse no more."""
        calls, self.calls, self.at, self.refused = self.calls, [], 0, ""
        return calls


def run(options: Options) -> Iterable[Row]:
    """Refuse half of the calls of every verb, in each setting; in short, a call of some, in one."""
    return in_settings(_refuse_all, options)


def _refuse_all(options: Options, setting: Setting) -> Row:
    chance = random.Random(options.seed)
    cases = Cases(options.folder, setting, Row(f"faults at calls: {setting.name}"))
    verbs = options.shared(cases.verbs())
    for verb in verbs if options.long else chance.sample(verbs, len(verbs)):
        if not options.long and cases.row.faults >= FEW:
            break
        refuse(cases, verb, chance, options.some(chance, 2))
    return cases.row


def refuse(cases: Cases, verb: Verb, chance: random.Random, choose: Callable[[list[int]], list[int]] = list) -> None:
    """Refuse every call of a verb, or some, each with an error that is left to chance."""
    whole = Failing()
    said = cases.perform(verb, whole, calls=whole.calls_made)
    assert said is not None
    calls, after, raised = said.calls, cases.here(), said.raised
    for number in sorted(choose(list(range(1, len(calls) + 1)))):
        name = calls[number - 1]
        failing = Failing(number, chance.choice(ERRORS.get(name, _ANY)), lasts=chance.random() < 0.5)
        failing.late = failing.error in LATE and chance.random() < 0.5
        said = cases.perform(verb, failing, calls=failing.calls_made)
        assert said is not None
        cases.row.faults += 1
        kind = errno.errorcode[failing.error] + " from then on" * failing.lasts + ", too late" * failing.late
        where = f"{verb}: {kind} at call {number} of {len(calls)}, {name}"
        cases.row.wrong += [f"{where}: {line}" for line in untrue(verb, said, cases, after, raised)]
        cases.judge(where, after, chooses=verb.name in CHOOSING)
        if COMMITTED in said.words and (missing := _missing(cases.look(), after.swept, "#")):
            cases.row.wrong.append(f"{where}: says {said.words!r}, and after a sweep {missing}")


def untrue(verb: Verb, said: Said, cases: Cases, after: Before, usually: str) -> Iterable[str]:
    """Yield what a verb says that is not so."""
    if said.raised == usually:
        if not usually and verb.name.startswith(PROMPT) and (missing := _missing(cases.look(), after.found)):
            yield f"returned, and {missing}"
        return
    if said.raised in UNTRUE or not said.raised:
        yield f"says {said.raised or 'nothing'}: {said.words}"
    elif said.raised == "ConfigError" and "cannot be read" in said.words:
        return
    elif said.raised != "StorageError":
        yield f"raises {said.raised}: {said.words}"
    elif "; " not in said.words and ": " not in said.words:
        yield f"does not tell what became of the message: {said.words}"
    elif verb.name.startswith(PROMPT):
        if any(fate in said.words for fate in UNDONE) and SOME not in said.words and (done := _done(cases, after)):
            yield f"says {said.words!r}, and {done}"
        if any(fate in said.words for fate in DONE) and (missing := _missing(cases.look(), after.found)):
            yield f"says {said.words!r}, and {missing}"


def _missing(found: States, after: States, among: str = "") -> str:
    """Return what is not as it is after the verb."""
    named = (name for name in after if among in name and found.get(name) != after[name])
    return ", ".join(f"{name} is {found.get(name, GONE)}" for name in named)


def _done(cases: Cases, after: Before) -> str:
    """Return what is as it is only after the verb."""
    found, before = cases.look(), cases.before.found
    changed = {name for name in after.found.keys() | before.keys() if after.found.get(name) != before.get(name)}
    moved = (name for name in sorted(changed) if found.get(name, GONE) == after.found.get(name, GONE))
    return ", ".join(f"{name} is {found.get(name, GONE)}" for name in moved)
