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
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby, islice
from operator import itemgetter
from zlib import crc32

from dropq import names, storage
from dropq.filters import compile_filter, for_name
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
#: Names that are listed between two looks at how many have been kept.
CHUNK = 4096

#: Names of one priority; of those that do not tell their time, what they are offered as.
_Group = Sequence[str | Waiting]
_Keyed = tuple[tuple[int, str, str], str | Waiting]

#: The end of a plain name has a fixed length.
_PLAIN_END = len(".0000000000000000-0000000000.B")
#: A name with a generated id, whatever follows.
_GENERATED = re.compile(r"(?:0|-?[1-9]\d{0,8})\.\d{16}-\d{10}\.[MBSPOT]\.", re.ASCII).match

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
        self._plain: frozenset[str] = frozenset()
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
            self._pieces = iter((map(_offered, chain.from_iterable(groups)),))
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
        return map(_offered, chain.from_iterable(self._listed()))

    def _listed(self) -> Iterator[_Group]:
        """List the folder; return what waits by priority, the highest first, each in order."""
        plain, generated = _First(self._depth), _First(self._depth)
        others: list[_Keyed] = []
        seen: dict[tuple[str, int], int] = {}
        ignored, is_message_file, is_plain, known = (
            self._ignored,
            storage.is_message_file,
            names.is_plain,
            self._plain,
        )
        with storage.listing(self._folder) as entries:
            while chunk := list(islice(entries, CHUNK)):
                keep = plain.names.append
                for entry in chunk:
                    name = entry.name
                    if name in known:  # looked at before: a name of this form is one file's for ever
                        keep(name)
                    elif is_plain(name):
                        if not plain.is_before(name) and not ignored(name) and is_message_file(entry):
                            keep(name)
                    elif ignored(name) or not is_message_file(entry):
                        continue
                    elif _GENERATED(name):
                        generated.names.append(name)
                    elif (other := self._other(entry, seen)) is not None:
                        others.append(other)
                plain.cut()
                generated.cut()
                if self._depth and len(others) > 2 * self._depth:
                    others = sorted(others, key=_key)[: self._depth]
        self._arrivals = seen if len(seen) <= ARRIVALS_LIMIT else {}
        self._plain = frozenset(plain.names)
        files = plain.names + generated.names
        groups: Iterator[_Group] = _merged(files, others) if others else _by_priority(files)
        return groups if self._depth is None else _limited(groups, self._depth)

    def _other(self, entry: os.DirEntry[str], seen: dict[tuple[str, int], int]) -> _Keyed | None:
        file, arrival = entry.name, 0
        name = self._sidecars.parse(names.split_claim(file)[1])
        if not name.generated:
            key = file, entry.inode()  # another file may come under the name of one that went
            try:
                arrival = self._arrivals.get(key) or storage.changed_ms(f"{self._folder}/{file}")
            except FileNotFoundError:
                return None  # RACE: somebody claimed it since the listing
            seen[key] = arrival
        return names.order(name, arrival), Waiting(file, arrival)


class _First:
    """The first so many of the names that come by: sorted and cut whenever there are twice as many.

    Args:
        depth: how many; None for all.
    """

    def __init__(self, depth: int | None) -> None:
        self.names: list[str] = []
        self._depth = depth
        self._last, self._start = "", "no priority"

    def is_before(self, name: str) -> bool:
        """Tell whether all that is to be kept comes before a name."""
        return name > self._last and name.startswith(self._start)

    def cut(self) -> None:
        """Keep the first ones, when there are too many."""
        if self._depth is None or len(self.names) <= 2 * self._depth:
            return
        in_order: Iterator[str] = chain.from_iterable(_by_priority(self.names))
        self.names = list(islice(in_order, self._depth))
        self._last = self.names[-1]
        self._start = self._last[: self._last.index(".") + 1]


def matching(filter: str, sidecars: Sidecars, state: str = "target") -> Callable[[Waiting], bool]:
    """Return a test of listed files by a filter, which sees the delivery that is to come, or the last there was.

    Raises:
        InvalidFilter: it cannot be read.
    """
    compiled = compile_filter(filter)
    waits = state in ("target", "delayed")

    def matches(waiting: Waiting) -> bool:
        claim, bare = names.split_claim(waiting.file)
        name = sidecars.full(sidecars.parse(bare))
        seen = max(name.delivery_count, claim.number if claim else 0)
        count = seen + 1 if waits else max(seen, 1)
        return compiled.matches(for_name(name, delivery_count=count, arrival=waiting.arrival or None))

    return matches


def _by_priority(files: Sequence[str]) -> Iterator[list[str]]:
    """Sort names of one priority as plain strings, which is three times as fast as by a key; the highest first."""
    alike: dict[str, list[str]] = {}
    for name in files:
        alike.setdefault(name[: name.index(".")], []).append(name)
    for priority in sorted(alike, key=int, reverse=True):
        yield sorted(alike[priority])


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
    oldest = map(_offered, others)

    def begun(own: list[str | Waiting]) -> Iterator[Waiting]:
        for number, item in enumerate(own, 1):
            yield _offered(item)
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


def _offered(item: str | Waiting) -> Waiting:
    if isinstance(item, Waiting):
        return item
    return Waiting(item, 0, len(item) == item.index(".") + _PLAIN_END)
