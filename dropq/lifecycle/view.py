"""The view of target/ that consumers take from: ordered, bounded, shared out, refreshed when it is used up or old.

A listing serves many claims, because a listing for each claim would cost the square of what waits. The view is as
old as `Timing.max_age` at the most, so that an urgent newcomer is seen; with many messages waiting the age grows with
what a listing costs, so that listing never takes more than about a tenth of the time. It holds `depth` messages at the
most, so that its memory does not grow with what waits: the first of all, and when they are used up those behind them.

Consumers that reach for the same files share them: a hash of a message's name tells whose it is. Each begins, within a
priority, with its own share, and goes on with what the others have left of theirs; and now and then it takes the oldest
of theirs, so that the share of a consumer that is busy, or dead, is passed over for a moment and not for ever.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count, groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar
from zlib import crc32

from dropq.format import names
from dropq.format.layout import WAITING
from dropq.format.message_file import MessageFile
from dropq.lifecycle.sidecars import Sidecars
from dropq.lifecycle.timing import Timing
from dropq.storage import reading

if TYPE_CHECKING:
    from dropq.filters import Lookup

log = logging.getLogger("dropq")

T = TypeVar("T")

#: Of so many messages that a consumer takes from its share, it takes one more from the others': the oldest there.
OLDEST_EACH = 32
#: In so many parts a consumer goes through the others' shares: two are seldom at one part at a time.
PARTS = 64
#: Order keys that a view without a limit keeps for names that do not tell their time; beyond it none is kept.
ARRIVALS_LIMIT = 100_000
#: Files whose answers to a question about their bodies are kept at the least; twice as many at the most.
REMEMBERED = 100_000

#: Names of one priority; of those that do not tell their time, what they are offered as.
_Group = Sequence[str | MessageFile]
_Key = tuple[int, str, str]
_Keyed = tuple[_Key, str | MessageFile]

_key = itemgetter(0)


def _priority(keyed: _Keyed) -> int:
    return keyed[0][0]


class Ready:
    """The waiting messages of one folder, in order of delivery.

    Args:
        folder: the folder, a queue's target/.
        sidecars: what reads names.
        ignored: tells which names are never messages.
        timing: how long it is fresh.
        depth: how many messages it holds at the most; None for all.
    """

    def __init__(
        self,
        folder: str,
        sidecars: Sidecars,
        ignored: Callable[[str], object],
        timing: Timing,
        *,
        depth: int | None = None,
    ) -> None:
        self._folder = folder
        self._sidecars = sidecars
        self._ignored = ignored
        self._timing = timing
        self.depth = depth
        self._arrivals: dict[tuple[str, int], int] = {}
        self._place = 0, 1
        #: The key of the last message that the view had room for; None where it had room for all.
        self._end: _Key | None = None
        self._taken = count(1)
        self._pieces: Iterator[Iterator[MessageFile]] = iter(())
        self._worn_at = 0.0
        #: What is left of the present piece of the view; each message is offered once.
        self.view: Iterator[MessageFile] = iter(())
        #: When the view is too old to take from, on the monotonic clock.
        self.fresh_until = 0.0

    @property
    def stale(self) -> bool:
        """Whether the view is too old to take from."""
        return time.monotonic() >= self.fresh_until

    @property
    def worn(self) -> bool:
        """Whether the view was used for as long as a listing takes: then one is better than others' leavings in it."""
        return time.monotonic() >= self._worn_at

    def clear(self) -> None:
        """Offer nothing until the next refresh."""
        self.view, self._pieces, self._end = iter(()), iter(()), None
        self.fresh_until = self._worn_at = 0.0

    def refresh(self, rank: int = 0, consumers: int = 1) -> None:
        """Make the view anew from a listing, for one of several consumers who know their order.

        Raises:
            OSError: the folder cannot be listed.
        """
        self._place = rank, consumers
        self._show(behind=None)

    def go_on(self) -> bool:
        """Offer the next piece of the view, or else what lies behind it; False where nothing does.

        A piece is what others left of a priority, or the next priority.

        Raises:
            OSError: the folder cannot be listed.
        """
        piece = next(self._pieces, None)
        if piece is not None:
            self.view = piece
            return True
        if self._end is None:
            return False
        self._show(behind=self._end)
        return True

    def _show(self, *, behind: _Key | None) -> None:
        started = time.monotonic()
        groups = self._listed(behind)
        rank, consumers = self._place
        if consumers > 1:
            shared = (_shared_out(group, rank, consumers, self._taken, self._offered) for group in groups)
            self._pieces = chain.from_iterable(shared)
        else:
            self._pieces = iter((self._offered_all(groups),))
        self.view = next(self._pieces, iter(()))
        now = time.monotonic()
        self._worn_at = now + (now - started)
        self.fresh_until = now + max(self._timing.max_age, self._timing.listing_share * (now - started))

    def files(self) -> Iterator[MessageFile]:
        """List the folder; return what waits in order: priority descending, then time and sequence, then name."""
        return self._offered_all(self._listed())

    def _offered_all(self, groups: Iterator[_Group]) -> Iterator[MessageFile]:
        return chain.from_iterable(map(self._offered, groups))

    def _offered(self, group: _Group) -> Iterator[MessageFile]:
        """Return names of one priority as what may be claimed."""
        typed = self._sidecars.typed_replies
        file_of = partial(MessageFile, folder=self._folder, typed_replies=typed)
        coded = [item for item in group if isinstance(item, str)]
        plain = names.plain_length(coded[0]) if coded else 0
        if len(coded) == len(group) and {*map(len, coded)} == {plain}:  # all are plain, as they mostly are
            return map(partial(file_of, plain=True), coded)
        return (item if isinstance(item, MessageFile) else file_of(item, plain=len(item) == plain) for item in group)

    def _listed(self, behind: _Key | None = None) -> Iterator[_Group]:
        """List the folder; return what waits by priority, the highest first, each in order."""
        first = _First(self.depth, behind)
        others: list[_Keyed] = []
        seen: dict[tuple[str, int], int] = {}
        with reading.listing(self._folder) as entries:
            while chunk := list(islice(entries, reading.CHUNK)):
                odd = first.add(reading.message_files(chunk))
                for entry in chunk if odd else ():
                    if entry.name in odd and not self._ignored(entry.name):
                        others += (one for one in self._other(entry, seen) if behind is None or one[0] > behind)
                if self.depth and len(others) > 2 * self.depth:
                    others, seen = self._first(others, seen)
        others, self._arrivals = self._first(others, seen)
        kept = list(first.names())
        full = self.depth is not None and len(kept) + len(others) >= self.depth
        if not others:
            self._end = names.order_at_a_glance(kept[-1]) if full else None
            return _by_priority(kept)
        keyed: list[_Keyed] = [*others, *zip(map(names.order_at_a_glance, kept), kept, strict=True)]
        keyed = sorted(keyed, key=_key)[: self.depth]
        self._end = keyed[-1][0] if full else None
        return ([item for _, item in alike] for _, alike in groupby(keyed, key=_priority))

    def _first(
        self, others: list[_Keyed], seen: dict[tuple[str, int], int]
    ) -> tuple[list[_Keyed], dict[tuple[str, int], int]]:
        """Return as many as the view may hold, in order, and when they came; all, where it may hold all."""
        if self.depth is None:
            return others, seen if len(seen) <= ARRIVALS_LIMIT else {}
        if len(others) <= self.depth:
            return others, seen
        others = sorted(others, key=_key)[: self.depth]
        first = {file.filename for _, file in others if isinstance(file, MessageFile)}
        return others, {key: came for key, came in seen.items() if key[0] in first}

    def _other(self, entry: os.DirEntry[str], seen: dict[tuple[str, int], int]) -> Iterator[tuple[_Key, MessageFile]]:
        """Yield the key of a file whose name is not of our making, and maybe does not tell its time."""
        file = self._sidecars.file(entry.name, self._folder)
        if not file.name.generated:
            key = entry.name, entry.inode()  # another file may come under the name of one that went
            try:
                file.arrival = self._arrivals.get(key) or reading.changed_ms(f"{self._folder}/{entry.name}")
            except FileNotFoundError:
                return  # RACE: somebody claimed it since the listing
            seen[key] = file.arrival
        yield names.order(file.name, file.arrival), file


class _First:
    """The first so many of the names that come by, as far as they tell their time, which the odd ones do not.

    Names are kept together by their priority and by about a day of their time, and all that comes behind is dropped
    by such bundles: a name that is dropped was looked at for less than it takes to list it.

    Args:
        depth: how many; None for all.
        behind: the key of what they come behind; None for the first of all.
    """

    def __init__(self, depth: int | None, behind: _Key | None = None) -> None:
        self._depth = depth
        self._behind = behind
        self._bundles: dict[tuple[int, str], list[str]] = {}
        self._count = 0
        self._end: tuple[tuple[int, str], str] | None = None

    def add(self, files: list[str]) -> set[str]:
        """Keep names; return those that are odd, also where they only begin as the others do."""
        files.sort()
        odd: set[str] = set()
        at = 0
        while at < len(files):
            start = names.start_of(files[at])
            if start is None:
                odd.add(files[at])
                at += 1
                continue
            bundle, behind = start
            end = bisect_left(files, behind, at)
            alike = files[at:end]
            if not names.all_tell_time(alike):
                odd.update(file for file in alike if not names.tells_time(file))
                alike = [file for file in alike if file not in odd]
            self._keep(bundle, alike)
            at = end
        if self._depth is not None and self._count > 2 * self._depth:
            self._cut(self._depth)
        return odd

    def names(self) -> Iterator[str]:
        """Yield the first names in order."""
        self._cut(self._count if self._depth is None else self._depth)
        return chain.from_iterable(self._bundles.values())

    def _keep(self, bundle: tuple[int, str], files: list[str]) -> None:
        if self._behind is not None and bundle <= (self._behind[0], self._behind[1][:5]):
            same = bundle == (self._behind[0], self._behind[1][:5])
            files = files[bisect_right(files, self._behind, key=names.order_at_a_glance) :] if same else []
        if self._end is not None and bundle >= self._end[0]:
            files = files[: bisect_left(files, self._end[1])] if bundle == self._end[0] else []
        if files:
            self._bundles.setdefault(bundle, []).extend(files)
            self._count += len(files)

    def _cut(self, left: int) -> None:
        bundles, self._bundles, self._count = self._bundles, {}, 0
        for bundle in sorted(bundles):
            if not left:
                break
            files = self._bundles[bundle] = sorted(bundles[bundle])[:left]
            left -= len(files)
            self._count += len(files)
            if not left:
                self._end = bundle, files[-1]


def matching(
    filter: str, sidecars: Sidecars, state: str = "target", *, folder: str, message_type: str = "json"
) -> Callable[[MessageFile], bool]:
    """Return a test of a folder's listed files by a filter; what a body answered is remembered.

    Args:
        filter: the filter.
        sidecars: what reads names.
        state: which state the folder is: a filter sees the delivery that is to come, or the last there was.
        folder: where the files lie whose bodies it may read.
        message_type: what bodies are: json, text or binary.

    Raises:
        InvalidFilter: it cannot be read.
        Unavailable: it needs an extra that is not installed.
    """
    from dropq.filters import compile_filter  # few ask for one

    compiled = compile_filter(filter)
    lookups = Lookups(sidecars, state, folder=folder, message_type=message_type)
    return lookups.remembering(compiled.matches) if compiled.reads_body else lookups.asking(compiled.matches)


class Lookups:
    """What filters and expressions are asked about the listed files of one folder.

    Args:
        sidecars: what reads names.
        state: which state the folder is: the delivery that is seen is the one to come, or the last there was.
        folder: where the files lie.
        message_type: what their bodies are: json, text or binary.
    """

    def __init__(self, sidecars: Sidecars, state: str = "target", *, folder: str, message_type: str = "json") -> None:
        self._sidecars = sidecars
        self._waits = state in WAITING
        self._folder = folder
        self._message_type = message_type

    def asking(self, ask: Callable[[Lookup], T]) -> Callable[[MessageFile], T]:
        """Return a question to the name of a file."""
        return lambda file: ask(self._lookup(file, None))

    def remembering(self, ask: Callable[[Lookup], T]) -> Callable[[MessageFile], T]:
        """Return a question to a file's name and body, which remembers what the last `REMEMBERED` files answered.

        RACE: a file that somebody claimed since the listing has no body here; it is asked again when it comes back.
        """
        recent: dict[tuple[str, int], T] = {}
        before: dict[tuple[str, int], T] = {}

        def answer(file: MessageFile) -> T:
            nonlocal recent, before
            key = file.filename, file.arrival  # another file may come under a foreign name
            if key in recent:
                return recent[key]
            if key in before:
                answered, known = before[key], True
            else:
                body = _Body(f"{self._folder}/{file.filename}")
                answered = ask(self._lookup(file, body))
                known = not body.refused
            if known:
                if len(recent) >= REMEMBERED:  # what was not asked for since the last time is forgotten
                    recent, before = {}, recent
                recent[key] = answered
            return answered

        return answer

    def _lookup(self, file: MessageFile, body: _Body | None) -> Lookup:
        from dropq.filters import for_name

        name = self._sidecars.full(file.name)
        if body is not None and file.name.meta and name is file.name:
            body.refused = True  # what its sidecar holds may be there the next time
        seen = file.delivery_count
        count = seen + 1 if self._waits else max(seen, 1)
        return for_name(
            name,
            delivery_count=count,
            arrival=file.arrival or None,
            body=body,
            message_type=self._message_type,
        )


class _Body:
    """Reads a file's body for a filter.

    Attributes:
        refused: whether it, or what else is known of the message, could not be read, which may be otherwise the next
            time.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.refused = False

    def __call__(self) -> bytes:
        from dropq.filters import LIMIT

        try:
            return reading.read_body(self._path, LIMIT)
        except OSError as error:
            if error.errno == errno.EFBIG:
                log.warning("filters see only NULLs in %s: it is longer than %d MiB", self._path, LIMIT >> 20)
            else:
                self.refused = True
            raise


def _by_priority(files: list[str]) -> Iterator[_Group]:
    """Part names that are in order where the priority changes."""
    at = 0
    while at < len(files):
        start = names.priority_start(files[at])
        end = bisect_right(files, 0, at, key=lambda file: 0 if file.startswith(start) else 1)
        yield files[at:end]
        at = end


def _shared_out(
    group: _Group,
    rank: int,
    consumers: int,
    taken: Iterator[int],
    offered: Callable[[_Group], Iterator[MessageFile]],
) -> Iterator[Iterator[MessageFile]]:
    """Yield the messages of one priority: its own share, then the others' by parts; now and then the oldest of theirs.

    What was taken is counted from view to view: who takes few from each comes to the oldest too.
    """
    own: list[str | MessageFile] = []
    others: list[str | MessageFile] = []
    parts: dict[int, list[str | MessageFile]] = {}
    for item in group:
        number = _number(item if isinstance(item, str) else item.filename)
        if number % consumers == rank:
            own.append(item)
        else:
            others.append(item)
            parts.setdefault(number // consumers % PARTS, []).append(item)
    theirs = list(parts.values())
    random.shuffle(theirs)  # anew each time: who meets another in one part does not follow him to the next
    begun: set[str] = set()

    def once(items: _Group) -> Iterator[MessageFile]:
        for file in offered(items):
            if file.filename not in begun:
                begun.add(file.filename)
                yield file

    oldest = once(others)

    def with_oldest(items: _Group) -> Iterator[MessageFile]:
        for file in once(items):
            yield file
            if next(taken) % OLDEST_EACH == 0:
                yield from islice(oldest, 1)

    yield from map(with_oldest, [own, *theirs] if own else theirs)


def _number(file: str) -> int:
    """Return a number that is the same to all consumers, and tells nothing of a message's place in the order."""
    return crc32(os.fsencode(file))
