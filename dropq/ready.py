"""The view of target/ that consumers take from: ordered, bounded, shared out, refreshed when it is used up or old.

A listing serves many claims, because a listing for each claim would cost the square of what waits. The view is as
old as `MAX_AGE` at the most, so that an urgent newcomer is seen; with many messages waiting the age grows with
what a listing costs, so that listing never takes more than about a tenth of the time. It holds the first `DEPTH`
messages at the most, so that its memory does not grow with what waits.

Consumers that reach for the same files take turns: a hash of a message's name tells whose turn it is first, second, and
so on. Each begins, within a priority, with what is its own first
turn, and goes on with what those before it have left; and now and then it takes the oldest of all, so that what waits
for the turn of a consumer that is busy, or dead, is passed over for a moment and not for ever.
"""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby, islice
from operator import itemgetter
from zlib import crc32

from dropq import names, storage
from dropq.lifecycle import Waiting
from dropq.sidecars import Sidecars

#: Seconds after which a view is refreshed although it is not used up.
MAX_AGE = 0.1
#: A view is kept at least this many times as long as its listing took.
LISTING_SHARE = 10
#: How many messages a view holds at the most, where the queue does not say (`target_queue_depth`).
DEPTH = 100_000
#: Of so many messages that a consumer takes from its share, it takes one more from the others': the oldest there.
OLDEST_EACH = 32
#: Order keys that are kept for names that do not tell their time; beyond it they are looked up again.
ARRIVALS_LIMIT = 100_000

#: Names of one priority; of those that do not tell their time, what they are offered as.
_Group = Sequence[str | Waiting]
_Keyed = tuple[tuple[int, str, str], str | Waiting]

#: The end of a plain name has a fixed length.
_PLAIN_END = len(".0000000000000000-0000000000.B")
#: A name with a generated id, whatever follows.
_GENERATED = re.compile(r"(?:0|-?[1-9]\d{0,8})\.\d{16}-\d{10}\.[MBSPOT](?:\.|\Z)", re.ASCII).match
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
        self._depth = depth
        self._arrivals: dict[tuple[str, int], int] = {}
        self._kept: frozenset[str] = frozenset()
        #: Whether names have been met that begin as ours do, and are others': each is looked at as it comes.
        self._looks_closely = False
        self._pieces: Iterator[Iterator[Waiting]] = iter(())
        self._listed_at = self._worn_at = 0.0
        #: What is left of the present piece of the view; each message is offered once a view.
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
        self.view, self._pieces = iter(()), iter(())
        self.fresh_until = self._worn_at = 0.0

    def refresh(self, rank: int = 0, consumers: int = 1) -> None:
        """Make the view anew from a listing, for one of several consumers who know their order.

        Raises:
            OSError: the folder cannot be listed.
        """
        started = time.monotonic()
        groups = self._listed()
        if consumers > 1:
            self._pieces = (piece for group in groups for piece in _shared_out(group, rank, consumers))
        else:
            self._pieces = iter((chain.from_iterable(map(_offered, groups)),))
        self.view = next(self._pieces, iter(()))
        now = time.monotonic()
        self._worn_at = now + (now - started)
        self.fresh_until = now + max(MAX_AGE, LISTING_SHARE * (now - started))

    def go_on(self) -> bool:
        """Offer the next piece of the view: what others left of a priority, or the next priority; False at its end."""
        piece = next(self._pieces, None)
        if piece is None:
            return False
        self.view = piece
        return True

    def waiting(self) -> Iterator[Waiting]:
        """List the folder; return what waits in order: priority descending, then time and sequence, then name."""
        return chain.from_iterable(map(_offered, self._listed()))

    def _listed(self) -> Iterator[_Group]:
        """List the folder; return what waits by priority, the highest first, each in order."""
        first = _First(self._depth)
        others: list[_Keyed] = []
        seen: dict[tuple[str, int], int] = {}
        with storage.listing(self._folder) as entries:
            while chunk := list(islice(entries, storage.CHUNK)):
                files = storage.message_files(chunk)
                ours = [*filter(self._is_ours, files)] if self._looks_closely else files
                odd = first.add(ours)
                if ours is not files:
                    odd = set(files).difference(ours)
                for entry in chunk if odd else ():
                    if entry.name in odd and not self._ignored(entry.name):
                        others += self._other(entry, seen)
                if self._depth and len(others) > 2 * self._depth:
                    others = sorted(others, key=_key)[: self._depth]
        kept = list(first.names())
        if not self._looks_closely and not all(file in self._kept or self._is_ours(file) for file in kept):
            self._looks_closely = True
            return self._listed()
        self._arrivals = seen if len(seen) <= ARRIVALS_LIMIT else {}
        self._kept = frozenset(kept)
        groups: Iterator[_Group] = _merged(kept, others) if others else _by_priority(kept)
        return groups if self._depth is None else _limited(groups, self._depth)

    def _is_ours(self, file: str) -> bool:
        return _GENERATED(file) is not None and not self._ignored(file)

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
    """

    def __init__(self, depth: int | None) -> None:
        self._depth = depth
        self._bundles: dict[tuple[int, str], list[str]] = {}
        self._count = 0
        self._end: tuple[tuple[int, str], str] | None = None

    def add(self, files: list[str]) -> set[str]:
        """Keep names; return those that are odd."""
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
            self._keep((-int(found[1]), found[2]), files[at:end])
            at = end
        if self._depth is not None and self._count > 2 * self._depth:
            self._cut(self._depth)
        return odd

    def names(self) -> Iterator[str]:
        """Yield the first names in order."""
        self._cut(self._count if self._depth is None else self._depth)
        return chain.from_iterable(self._bundles.values())

    def _keep(self, bundle: tuple[int, str], files: list[str]) -> None:
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


def matching(filter: str, sidecars: Sidecars, state: str = "target") -> Callable[[Waiting], bool]:
    """Return a test of listed files by a filter, which sees the delivery that is to come, or the last there was.

    Raises:
        InvalidFilter: it cannot be read.
    """
    from dropq.filters import compile_filter, for_name  # few ask for one

    compiled = compile_filter(filter)
    waits = state in ("target", "delayed")

    def matches(waiting: Waiting) -> bool:
        claim, bare = names.split_claim(waiting.file)
        name = sidecars.full(sidecars.parse(bare))
        seen = max(name.delivery_count, claim.number if claim else 0)
        count = seen + 1 if waits else max(seen, 1)
        return compiled.matches(for_name(name, delivery_count=count, arrival=waiting.arrival or None))

    return matches


def _by_priority(files: list[str]) -> Iterator[_Group]:
    """Part names that are in order where the priority changes."""
    at = 0
    while at < len(files):
        start = files[at][: files[at].index(".") + 1]
        end = bisect_right(files, 0, at, key=lambda file: 0 if file.startswith(start) else 1)
        yield files[at:end]
        at = end


def _merged(files: Sequence[str], others: list[_Keyed]) -> Iterator[_Group]:
    """Sort all by their keys, where some names do not tell their time."""
    keyed = others
    for name in files:
        priority, _, rest = name.partition(".")
        keyed.append(((-int(priority), rest[:16], name), name))
    keyed.sort(key=_key)
    for _, alike in groupby(keyed, key=_priority):
        yield [item for _, item in alike]


def _limited(groups: Iterator[_Group], most: int) -> Iterator[_Group]:
    for group in groups:
        yield group[:most]
        most -= len(group)
        if most <= 0:
            return


def _shared_out(group: _Group, rank: int, consumers: int) -> Iterator[Iterator[Waiting]]:
    """Yield the messages of one priority by turns; now and then the oldest of those that are others' first turn."""
    turns: dict[int, list[str | Waiting]] = {}
    others = []
    for item in group:
        turn = _turn(item if isinstance(item, str) else item.file, rank, consumers)
        turns.setdefault(turn, []).append(item)
        if turn:
            others.append(item)
    oldest = _offered(others)

    def begun(own: list[str | Waiting]) -> Iterator[Waiting]:
        for number, waiting in enumerate(_offered(own), 1):
            yield waiting
            if number % OLDEST_EACH == 0:
                yield from islice(oldest, 1)

    for turn in sorted(turns):
        yield begun(turns[turn])


def _turn(file: str, rank: int, consumers: int) -> int:
    """Return how many consumers may take a message before it is this one's turn, which the digits of a hash tell."""
    number, turn = crc32(os.fsencode(file)), 0
    while number and number % consumers != rank:
        number //= consumers
        turn += 1
    return turn


def _offered(group: _Group) -> Iterator[Waiting]:
    """Yield names of one priority as what may be claimed."""
    plain = 0
    for item in group:
        if isinstance(item, Waiting):
            yield item
        else:
            plain = plain or item.index(".") + _PLAIN_END
            yield Waiting(item, 0, len(item) == plain)
