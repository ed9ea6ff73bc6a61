"""What stands in a queue: counts, ages and holders, by one listing of each folder, in constant memory.

`health`, `top` and `metrics` have this one, and no listing of their own; `ls` has its counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from dropq.durations import format_duration
from dropq.format import names
from dropq.format.claims import Claim, client_of
from dropq.format.layout import ALL_STATES
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.processing import claimed_messages, committed_files
from dropq.lifecycle.transfers import Row, given_messages
from dropq.queue.browsing import since
from dropq.storage import reading
from dropq.storage.clock import utc

if TYPE_CHECKING:
    from dropq.storage.liveness import Signs

#: The ages by which messages are counted, in seconds; the last count is of those that are older.
AGES = (1, 10, 60, 600, 3600, 21_600, 86_400)
#: What these counts are called: at most so old, and older than the one before.
AGE_NAMES = (*map(format_duration, AGES), "older")
#: How many names in processed/ are kept that contain no time.
ODD = 10_000
#: How many waiting messages are held against the queue's filter.
FILTERED_LOOKED_FOR = 10_000
#: From this many deaths of its holders on, a message is reported.
DEATHS = 4


@dataclass
class Marks:
    """What the markers in names tell: dead letters, and messages whose holders die again and again."""

    letters: int = 0
    #: How many have DEATHS, and the most deaths, with the name that tells them.
    killers: int = 0
    worst: tuple[int, str] = (0, "")

    def add(self, files: Iterable[str]) -> None:
        """Take in the names of messages."""
        for file in files:
            self.letters += names.is_letter(file) is not None
            if names.may_have_deaths(file) and (died := MessageFile(file).name.died) >= DEATHS:
                self.killers += 1
                self.worst = max(self.worst, (died, file))


def _no_ages() -> list[int]:
    return [0] * (len(AGES) + 1)


@dataclass
class Waiting:
    """What the names of one state tell: how many there are, and how old they are; the rest goes to `marks`.

    Attributes:
        since: returns since when a message counts as waiting there, in ms, by its file name.
        kept: how many names are kept, to be looked at again.
        by_id: whether `since` is the time in a generated id, unless the name says another.
        oldest: since when the oldest waits, in ms, and its file name; None without messages.
        ages: how many are of each age, see AGES.
        first: the first names.
    """

    now: int
    since: Callable[[str], int]
    marks: Marks
    kept: int = 0
    by_id: bool = True
    count: int = 0
    oldest: tuple[int, str] | None = None
    ages: list[int] = field(default_factory=_no_ages)
    first: list[str] = field(default_factory=list)

    def add(self, files: list[str]) -> None:
        """Take in the names of messages: all together where they are alike, as nearly all are."""
        self.count += len(files)
        self.first += files[: max(self.kept - len(self.first), 0)]
        if names.may_be_marked("\n".join(files)):
            self.marks.add(files)
        times = (names.sent_together(files) if self.by_id else None) or [*map(self.since, files)]
        if not times:
            return
        least = min(times)
        if self.oldest is None or least < self.oldest[0]:
            self.oldest = least, files[times.index(least)]
        times.sort()
        older = len(times)
        for place, age in enumerate(AGES):
            at_most, older = older, bisect_left(times, self.now - age * 1000, 0, older)
            self.ages[place] += at_most - older
        self.ages[-1] += older

    def older_than(self, age: int) -> int:
        """Return how many have waited for longer than one of AGES."""
        return sum(self.ages[AGES.index(age) + 1 :])


def age_class(seconds: float) -> int:
    """Return where in the counts of AGES an age belongs."""
    return bisect_left(AGES, seconds)


class Holder(NamedTuple):
    """A subscription, or a script, that holds messages.

    Attributes:
        held: how many.
        changed: when the first of its claims last changed: it was made, or its lease was renewed.
        status: that of this claim, as `holders.claim_status` has it, or `script`.
    """

    client: str
    subscription: str
    held: int
    changed: datetime
    status: str


class Standing:
    """What one listing of each folder says about a queue.

    RACE: messages move on between these listings, so that a message may be counted twice, or not at all.
    """

    def __init__(self, context: QueueContext) -> None:
        kept = 0 if context.config.filter is None else FILTERED_LOOKED_FOR
        self.context = context
        self.now = context.clock.now_ms()
        #: What the names of messages tell that wait, are delayed or held.
        self.marks = Marks()
        self.waiting = Waiting(self.now, self._since, self.marks, kept=kept)
        self.delayed = Waiting(self.now, self._due, self.marks, by_id=False)
        for state, found in (("target", self.waiting), ("delayed", self.delayed)):
            for files in reading.message_names(context.layout.folder(state), context.config.ignore):
                found.add(files)
        self.claimed = claimed_messages(context)
        self.marks.add(file.filename for file in self.claimed)
        known = {
            "target": self.waiting.count,
            "delayed": self.delayed.count,
            "processing": len(self.claimed) + sum(1 for _ in committed_files(context)),
        }
        #: Milliseconds since the last claim, or end of a claim: each is a rename in processing/. So is a renewal, which
        #: a viewer tells apart, as the owner of the claim stays.
        self.idle_ms = self.now - reading.written_ms(context.layout.processing, gone=self.now)
        #: Whether messages left in the last minute, where a viewer has read the log; else None.
        self.moves: bool | None = None
        #: The first names in processed/ that contain no time: they may be of files that others write to.
        self.odd: list[str] = []
        #: How many messages lie in each state; one that was committed, and whose parts have not all arrived, is held.
        self.counts: Mapping[str, int] = {
            state: known[state] if state in known else self._count(state) for state in ALL_STATES
        }

    def _count(self, state: str) -> int:
        count = 0
        for files in reading.message_names(self.context.layout.folder(state), self.context.config.ignore):
            count += len(files)
            if state == "processed" and len(self.odd) < ODD and not names.all_tell_time(files):
                self.odd += [file for file in files if not names.tells_time(file)][: ODD - len(self.odd)]
        return count

    # -- ages ----------------------------------------------------------------------------------------------------

    @cached_property
    def oldest(self) -> dict[str, float]:
        """Seconds that the oldest message has waited in target/; in delayed/ since it was due; held without a lease."""
        unleased = (file for file in self.claimed if file.claim is None or file.claim.deadline <= self.now)
        since = {
            "target": self.waiting.oldest and self.waiting.oldest[0],
            "delayed": self.delayed.oldest and self.delayed.oldest[0],
            "processing": min((self._since(file.filename, "processing") for file in unleased), default=None),
        }
        late = {state: self.now - ms for state, ms in since.items() if ms is not None}
        return {state: max(ms, 0) / 1000 for state, ms in late.items() if state != "delayed" or ms > 0}

    @property
    def oldest_age(self) -> float | None:
        """Seconds that the oldest message has waited, also held without a running lease; None if no message waits."""
        return max(self.oldest.values(), default=None)

    def _since(self, file: str, state: str = "target") -> int:
        return since(self.context, state, file, self.now)

    def _due(self, file: str) -> int:
        """Return when a delayed message is due, in ms; without a time of its own it is due when it came."""
        due = names.due_at_a_glance(file)
        return due or self.context.sidecars.parse(file).not_before or self._since(file, "delayed")

    def changed(self, path: str) -> int:
        """Return when a file was renamed or changed, in ms; now if it is gone."""
        return reading.changed_ms(path, gone=self.now)  # RACE: a message may move on after the listing

    # -- who holds what ------------------------------------------------------------------------------------------

    @cached_property
    def signs(self) -> Signs:
        """The signs of life of its consumers, read after the claims."""
        from dropq.storage.liveness import Signs  # here, as `ls` needs no locks

        return Signs(self.context.layout.consumers)

    @cached_property
    def holders(self) -> list[Holder]:
        """Who holds messages, those first whose claims have not changed for the longest."""
        found: dict[tuple[str, str], list[Claim | None]] = {}
        for file in self.claimed:
            claim = file.claim
            who = ("a script", "") if claim is None else (claim.owner, "")
            if claim is not None and claim.ours:
                who = (client_of(claim.subscription), claim.subscription)
            found.setdefault(who, []).append(claim)
        held = [Holder(*who, len(claims), *self._oldest_of(claims)) for who, claims in found.items()]
        return sorted(held, key=lambda holder: holder.changed)

    def _oldest_of(self, claims: list[Claim | None]) -> tuple[datetime, str]:
        """Return since when the first of some claims is as it is, and its status."""
        from dropq.lifecycle.holders import claim_status

        ours = [claim for claim in claims if claim is not None and claim.ours]
        if not ours:
            paths = [claim.path for claim in claims if claim is not None]
            return utc(min(map(self.changed, paths), default=self.now)), "script"
        changed, claim = min(((self.changed(claim.path), claim) for claim in ours), key=itemgetter(0))
        return utc(changed), claim_status(claim, self.signs, self.now)

    # -- elsewhere -----------------------------------------------------------------------------------------------

    @cached_property
    def given(self) -> list[tuple[Row, str]]:
        """The messages that are on their way to other file systems: the row, and the file name there."""
        return list(given_messages(self.context.layout))


#: How many values `ages_by` tells apart.
GROUPS = 50


class Ages(NamedTuple):
    """How many messages are of each age, see AGES.

    Attributes:
        of_value: by the value of a property, the largest first; "" stands for a message without it.
        others: of all values beyond the first GROUPS that were met; None if there are none.
        total: of all messages.
    """

    of_value: dict[str, list[int]]
    others: list[int] | None
    total: list[int]


def ages_by(context: QueueContext, state: str, by: str | None) -> Ages:
    """Count the messages of a state by their ages, and by their type or a property, as qshape does.

    It reads names, and sidecars of properties that did not fit there.

    Args:
        by: `type`, or the name of a property; None for all together.
    """
    now, folder = context.clock.now_ms(), context.layout.folder(state)
    found = Ages({}, None, _no_ages())
    others = _no_ages()
    for files in reading.message_names(folder, context.config.ignore):
        for file in files:
            place = age_class((now - since(context, state, file, now)) / 1000)
            found.total[place] += 1
            if by is not None:
                value = _value(context, file, by)
                has_room = value in found.of_value or len(found.of_value) < GROUPS
                (found.of_value.setdefault(value, _no_ages()) if has_room else others)[place] += 1
    ordered = dict(sorted(found.of_value.items(), key=lambda group: -sum(group[1])))
    return Ages(ordered, others if any(others) else None, found.total)


def _value(context: QueueContext, file: str, by: str) -> str:
    name = context.sidecars.file(file).name
    if names.sidecar_of(file):
        name = context.sidecars.full(name)
    if by == "type":
        return name.type or ""
    typed = name.properties.get(by)
    return "" if typed is None else typed.text
