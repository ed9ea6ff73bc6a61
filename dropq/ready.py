"""The view of target/ that consumers take from: ordered, bounded, shared out, refreshed when it is used up or old.

A listing serves many claims, because a listing for each claim would cost the square of what waits. The view is as
old as `MAX_AGE` at the most, so that an urgent newcomer is seen; with many messages waiting the age grows with
what a listing costs, so that listing never takes more than about a tenth of the time. It holds `DEPTH` messages at the
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
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count, groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar
from zlib import crc32

from dropq import names, storage
from dropq.lifecycle import Waiting
from dropq.sidecars import Sidecars

if TYPE_CHECKING:
    from dropq.filters import Lookup

log = logging.getLogger("dropq")

T = TypeVar("T")

#: Seconds after which a view is refreshed although it is not used up.
MAX_AGE = 0.1
#: A view is kept at least this many times as long as its listing took.
LISTING_SHARE = 10
#: How many messages a view holds at the most, where the queue does not say (`target_queue_depth`).
DEPTH = 100_000
#: Of so many messages that a consumer takes from its share, it takes one more from the others': the oldest there.
OLDEST_EACH = 32
#: In so many parts a consumer goes through the others' shares: two are seldom at one part at a time.
PARTS = 64
#: Order keys that a view without a limit keeps for names that do not tell their time; beyond it none is kept.
ARRIVALS_LIMIT = 100_000
#: Files whose answers to a question about their bodies are kept at the least; twice as many at the most.
REMEMBERED = 100_000

#: Names of one priority; of those that do not tell their time, what they are offered as.
_Group = Sequence[str | Waiting]
_Key = tuple[int, str, str]
_Keyed = tuple[_Key, str | Waiting]

#: The end of a plain name has a fixed length.
_PLAIN_END = len(".0000000000000000-0000000000.B")
#: A name with a generated id, whatever follows.
_GENERATED = re.compile(r"(?:0|-?[1-9]\d{0,8})\.\d{16}-\d{10}\.[MBSPOT](?:\.|\Z)", re.ASCII).match
#: The same of many names, each with a NUL behind it: at once, and without a way back.
_ALL_GENERATED = re.compile(
    r"(?>(?:0|-?[1-9]\d{0,8}+)\.\d{16}-\d{10}\.[MBSPOT](?>\.[^\0]*+)?+\0)*+", re.ASCII
).fullmatch
#: What such a name begins with: its priority, and its time as far as about a day.
_BEGIN = re.compile(r"(0|-?[1-9]\d{0,8})\.(\d{5})", re.ASCII).match
_key = itemgetter(0)


def _priority(keyed: _Keyed) -> int:
    return keyed[0][0]


class Ready:
    """The waiting messages of one folder, in order of delivery.

    Args:
        folder: the folder, a queue's target/.
        sidecars: what reads names.
        ignored: tells which names are never messages.
        depth: how many messages it holds at the most; None for all.
    """

    def __init__(
        self, folder: str, sidecars: Sidecars, ignored: Callable[[str], object], *, depth: int | None = None
    ) -> None:
        self._folder = folder
        self._sidecars = sidecars
        self._ignored = ignored
        self.depth = depth
        self._arrivals: dict[tuple[str, int], int] = {}
        self._place = 0, 1
        #: The key of the last message that the view had room for; None where it had room for all.
        self._end: _Key | None = None
        self._taken = count(1)
        self._pieces: Iterator[Iterator[Waiting]] = iter(())
        self._worn_at = 0.0
        self._again: Waiting | None = None
        #: What is left of the present piece of the view, beside what was put back; each message is offered once.
        self.view: Iterator[Waiting] = iter(())
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
        self.view, self._pieces, self._end, self._again = iter(()), iter(()), None, None
        self.fresh_until = self._worn_at = 0.0

    def next(self) -> Waiting | None:
        """Return what was put back, else the next message of the present piece of the view; None where none is left."""
        again, self._again = self._again, None
        return next(self.view, None) if again is None else again

    def put_back(self, waiting: Waiting) -> None:
        """Let `next` return a message again that it returned last: there is room for one."""
        self._again = waiting

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
            self._pieces = chain.from_iterable(_shared_out(group, rank, consumers, self._taken) for group in groups)
        else:
            self._pieces = iter((chain.from_iterable(map(_offered, groups)),))
        self.view, self._again = next(self._pieces, iter(())), None
        now = time.monotonic()
        self._worn_at = now + (now - started)
        self.fresh_until = now + max(MAX_AGE, LISTING_SHARE * (now - started))

    def waiting(self) -> Iterator[Waiting]:
        """List the folder; return what waits in order: priority descending, then time and sequence, then name."""
        return chain.from_iterable(map(_offered, self._listed()))

    def _listed(self, behind: _Key | None = None) -> Iterator[_Group]:
        """List the folder; return what waits by priority, the highest first, each in order."""
        first = _First(self.depth, behind)
        others: list[_Keyed] = []
        seen: dict[tuple[str, int], int] = {}
        with storage.listing(self._folder) as entries:
            while chunk := list(islice(entries, storage.CHUNK)):
                odd = first.add(storage.message_files(chunk))
                for entry in chunk if odd else ():
                    if entry.name in odd and not self._ignored(entry.name):
                        others += (one for one in self._other(entry, seen) if behind is None or one[0] > behind)
                if self.depth and len(others) > 2 * self.depth:
                    others, seen = self._first(others, seen)
        others, self._arrivals = self._first(others, seen)
        kept = list(first.names())
        full = self.depth is not None and len(kept) + len(others) >= self.depth
        if not others:
            self._end = _keyed(kept[-1])[0] if full else None
            return _by_priority(kept)
        keyed = sorted(chain(others, map(_keyed, kept)), key=_key)[: self.depth]
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
        first = {waiting.file for _, waiting in others if isinstance(waiting, Waiting)}
        return others, {key: came for key, came in seen.items() if key[0] in first}

    def _other(self, entry: os.DirEntry[str], seen: dict[tuple[str, int], int]) -> Iterator[_Keyed]:
        """Yield the key of a file whose name is not of our making, and maybe does not tell its time."""
        file, arrival = entry.name, 0
        name = self._sidecars.parse(names.split_claim(file)[1])
        if not name.generated:
            key = file, entry.inode()  # another file may come under the name of one that went
            try:
                arrival = self._arrivals.get(key) or storage.changed_ms(f"{self._folder}/{file}")
            except FileNotFoundError:
                return  # RACE: somebody claimed it since the listing
            seen[key] = arrival
        yield names.order(name, arrival), Waiting(file, arrival)


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
            found = _BEGIN(files[at])
            if found is None:
                odd.add(files[at])
                at += 1
                continue
            end = bisect_left(files, f"{found[0][:-1]}{chr(ord(found[0][-1]) + 1)}", at)
            alike = files[at:end]
            if not _ALL_GENERATED("\0".join([*alike, ""])):
                odd.update(file for file in alike if not _GENERATED(file))
                alike = [file for file in alike if file not in odd]
            self._keep((-int(found[1]), found[2]), alike)
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
            files = files[bisect_right(files, self._behind, key=lambda file: _keyed(file)[0]) :] if same else []
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
) -> Callable[[Waiting], bool]:
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
        self._waits = state in ("target", "delayed")
        self._folder = folder
        self._message_type = message_type

    def asking(self, ask: Callable[[Lookup], T]) -> Callable[[Waiting], T]:
        """Return a question to the name of a file."""
        return lambda waiting: ask(self._lookup(waiting, None))

    def remembering(self, ask: Callable[[Lookup], T]) -> Callable[[Waiting], T]:
        """Return a question to a file's name and body, which remembers what the last `REMEMBERED` files answered.

        RACE: a file that somebody claimed since the listing has no body here; it is asked again when it comes back.
        """
        recent: dict[tuple[str, int], T] = {}
        before: dict[tuple[str, int], T] = {}

        def answer(waiting: Waiting) -> T:
            nonlocal recent, before
            key = waiting.file, waiting.arrival  # another file may come under a foreign name
            if key in recent:
                return recent[key]
            if key in before:
                answered, known = before[key], True
            else:
                body = _Body(f"{self._folder}/{waiting.file}")
                answered = ask(self._lookup(waiting, body))
                known = not body.refused
            if known:
                if len(recent) >= REMEMBERED:  # what was not asked for since the last time is forgotten
                    recent, before = {}, recent
                recent[key] = answered
            return answered

        return answer

    def _lookup(self, waiting: Waiting, body: _Body | None) -> Lookup:
        from dropq.filters import for_name

        claim, bare = names.split_claim(waiting.file)
        parsed = self._sidecars.parse(bare)
        name = self._sidecars.full(parsed)
        if body is not None and parsed.meta and name is parsed:
            body.refused = True  # what its sidecar holds may be there the next time
        seen = max(name.delivery_count, claim.number if claim else 0)
        count = seen + 1 if self._waits else max(seen, 1)
        return for_name(
            name,
            delivery_count=count,
            arrival=waiting.arrival or None,
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
            return storage.read_body(self._path, LIMIT)
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
        start = files[at][: files[at].index(".") + 1]
        end = bisect_right(files, 0, at, key=lambda file: 0 if file.startswith(start) else 1)
        yield files[at:end]
        at = end


def _keyed(file: str) -> _Keyed:
    """Return a name that tells its time with the key that `names.order` gives to it."""
    priority, _, rest = file.partition(".")
    return (-int(priority), rest[:16], file), file


def _shared_out(group: _Group, rank: int, consumers: int, taken: Iterator[int]) -> Iterator[Iterator[Waiting]]:
    """Yield the messages of one priority: its own share, then the others' by parts; now and then the oldest of theirs.

    What was taken is counted from view to view: who takes few from each comes to the oldest too.
    """
    own: list[str | Waiting] = []
    others: list[str | Waiting] = []
    parts: dict[int, list[str | Waiting]] = {}
    for item in group:
        number = _number(item if isinstance(item, str) else item.file)
        if number % consumers == rank:
            own.append(item)
        else:
            others.append(item)
            parts.setdefault(number // consumers % PARTS, []).append(item)
    theirs = list(parts.values())
    random.shuffle(theirs)  # anew each time: who meets another in one part does not follow him to the next
    begun: set[str] = set()

    def once(items: _Group) -> Iterator[Waiting]:
        for waiting in _offered(items):
            if waiting.file not in begun:
                begun.add(waiting.file)
                yield waiting

    oldest = once(others)

    def with_oldest(items: _Group) -> Iterator[Waiting]:
        for waiting in once(items):
            yield waiting
            if next(taken) % OLDEST_EACH == 0:
                yield from islice(oldest, 1)

    yield from map(with_oldest, [own, *theirs] if own else theirs)


def _number(file: str) -> int:
    """Return a number that is the same to all consumers, and tells nothing of a message's place in the order."""
    return crc32(os.fsencode(file))


def _offered(group: _Group) -> Iterator[Waiting]:
    """Yield names of one priority as what may be claimed."""
    plain = 0
    for item in group:
        if isinstance(item, Waiting):
            yield item
        else:
            plain = plain or item.index(".") + _PLAIN_END
            yield Waiting(item, 0, len(item) == plain)
