"""The view of target/ that consumers take from: an ordered and bounded list of waiting messages.

A view is refreshed when it is used up, or older than `Timing.max_age`, so that an urgent new message is seen. With many
messages, it may get older: listing takes at most about a tenth of the time. A view holds at most `depth` messages, so
its memory does not grow with the queue: first the first of all, and when these are used up, those behind them.

Consumers that compete share the messages by a hash of their names. Within a priority, a consumer begins with its own
share, and continues with what the others have left of theirs. Now and then it takes the oldest message of their shares,
so that the share of a busy or dead consumer does not wait for ever.
"""

from __future__ import annotations

import os
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count, groupby, islice
from operator import itemgetter
from zlib import crc32

from dropq.format import names
from dropq.format.message_file import MessageFile
from dropq.lifecycle.settling import Settling
from dropq.lifecycle.sidecars import Sidecars
from dropq.lifecycle.timing import Timing
from dropq.storage import reading

#: After this many messages, a consumer takes one more: the oldest of the others' shares.
OLDEST_EACH = 32
#: The number of parts in which a consumer takes from the others' shares: two consumers seldom take from the same part.
PARTS = 64
#: A view without a limit keeps the arrival times of at most this many files; of more files it keeps no times.
ARRIVALS_LIMIT = 100_000

#: Messages of one priority: a name, or a message file where the name does not contain its time.
Group = Sequence[str | MessageFile]
Key = tuple[int, str, str]
Keyed = tuple[Key, str | MessageFile]
#: When files arrived, in ms since 1970, by name and inode: another file may come under the same name later.
Arrivals = dict[tuple[str, int], int]

_key = itemgetter(0)


def _priority(keyed: Keyed) -> int:
    return keyed[0][0]


class TargetView:
    """The waiting messages of one folder, in order of delivery.

    Args:
        ignored: returns whether a name is never a message's.
        depth: the most messages that the view holds; None for all.
        settling: leaves out the files that may still be written to; None shows them, too.
    """

    def __init__(
        self,
        folder: str,
        sidecars: Sidecars,
        ignored: Callable[[str], object],
        timing: Timing,
        *,
        depth: int | None = None,
        settling: Settling | None = None,
    ) -> None:
        self._folder = folder
        self._sidecars = sidecars
        self._ignored = ignored
        self._timing = timing
        self.depth = depth
        self._settling = settling
        #: When each file has settled that the last listing left out, in ms since 1970, by its name.
        self.unsettled: dict[str, int] = {}
        #: Whether the last listing found nothing but names that are never a message's.
        self.is_empty = False
        self._arrivals: Arrivals = {}
        self._share = 0, 1
        #: The key of the last message that the view had room for; None where it had room for all.
        self._end: Key | None = None
        self._taken = count(1)
        self._pieces: Iterator[Iterator[MessageFile]] = iter(())
        self._worn_at = 0.0
        #: The rest of the current piece of the view; each message is offered once.
        self.view: Iterator[MessageFile] = iter(())
        #: When the view becomes too old to take from, on the monotonic clock.
        self.fresh_until = 0.0

    @property
    def stale(self) -> bool:
        """Whether the view is too old to take from."""
        return time.monotonic() >= self.fresh_until

    @property
    def worn(self) -> bool:
        """Whether the view was used for longer than a listing takes: a new listing is better then than its rest."""
        return time.monotonic() >= self._worn_at

    def clear(self) -> None:
        """Offer nothing until the next refresh."""
        self.view, self._pieces, self._end = iter(()), iter(()), None
        self.fresh_until = self._worn_at = 0.0
        self.unsettled = {}

    def refresh(self, rank: int = 0, consumers: int = 1) -> None:
        """List the folder again, for one of the consumers that share the messages, by its rank from 0."""
        self._share = rank, consumers
        self._show(behind=None)

    def go_on(self) -> bool:
        """Offer the next piece of the view, or else list the messages behind its end; return False if there are none.

        A piece is a part of the others' shares of a priority, or the next priority.
        """
        piece = next(self._pieces, None)
        if piece is not None:
            self.view = piece
            return True
        if self._end is None:
            return False
        self._show(behind=self._end)
        return True

    def show_settled(self) -> bool:
        """Offer the files that have settled since the listing left them out; return False if none has settled."""
        left_out, self.unsettled = self.unsettled, {}
        keyed: list[Keyed] = []
        for name in left_out:
            file = self._sidecars.file(name, self._folder)
            if arrival := self._arrival(file):
                file.arrival = arrival
                keyed.append((self._order(file), file))
        self.view = self._all_as_files(self._in_order(keyed))
        return bool(keyed)

    def unsettled_before(self, file: MessageFile) -> int:
        """Return how many of the files that the last listing left out come before a message in order of delivery."""
        end, found = self._order(file), 0
        for name in self.unsettled:
            left_out = self._sidecars.file(name, self._folder)
            try:
                left_out.arrival = reading.changed_ms(f"{self._folder}/{name}")
            except FileNotFoundError:
                found += 1  # RACE: a script has just taken it: the next listings tell whether it is settled
            else:
                found += self._order(left_out) < end
        return found

    def _show(self, *, behind: Key | None) -> None:
        started = time.monotonic()
        is_late = reading.on_nfs(self._folder)
        groups, as_files = self._listed(behind, typed=not is_late), self._as_messages if is_late else self._as_files
        rank, consumers = self._share
        if consumers > 1:
            shared = (_divided(group, rank, consumers, self._taken, as_files) for group in groups)
            self._pieces = chain.from_iterable(shared)
        else:
            self._pieces = iter((chain.from_iterable(map(as_files, groups)),))
        self.view = next(self._pieces, iter(()))
        now = time.monotonic()
        self._worn_at = now + (now - started)
        self.fresh_until = now + max(self._timing.max_age, self._timing.listing_share * (now - started))

    def files(self) -> Iterator[MessageFile]:
        """List the folder; return its messages in order: priority descending, then time and sequence, then name."""
        return self._all_as_files(self._listed())

    def names_or_files(self) -> Iterator[str | MessageFile]:
        """List the folder; return its messages in order: as names, or as files where the name contains no time.

        A million names are a list; a million message files take as long to make as the names take to read.
        """
        return chain.from_iterable(self._listed())

    def _all_as_files(self, groups: Iterator[Group]) -> Iterator[MessageFile]:
        return chain.from_iterable(map(self._as_files, groups))

    def _as_messages(self, group: Group) -> Iterator[MessageFile]:
        """Return message files as `_as_files`, and ask of each what it is when it is about to be taken.

        RACE: of a name that is gone the claim fails, which tells that another consumer takes from this view.
        """
        return (file for file in self._as_files(group) if reading.may_be_message(f"{self._folder}/{file.filename}"))

    def _as_files(self, group: Group) -> Iterator[MessageFile]:
        typed = self._sidecars.typed_replies
        file_of = partial(MessageFile, folder=self._folder, typed_replies=typed)
        coded = [item for item in group if isinstance(item, str)]
        plain = names.plain_length(coded[0]) if coded else 0
        if len(coded) == len(group) and {*map(len, coded)} == {plain}:  # all are plain, as in most queues
            return map(partial(file_of, plain=True), coded)
        return (item if isinstance(item, MessageFile) else file_of(item, plain=len(item) == plain) for item in group)

    def _listed(self, behind: Key | None = None, *, typed: bool = True) -> Iterator[Group]:
        """List the folder; return its messages by priority, the highest first, each group in order.

        Unless it is `typed`, other things than files may be among those whose names contain their time: on NFS it would
        take a call for each name to tell.
        """
        first = _FirstNames(self.depth, behind)
        self.unsettled = {}
        others: list[Keyed] = []
        arrivals: Arrivals = {}
        with (reading.look if typed else reading.listing)(self._folder) as entries:
            is_met = False
            while chunk := list(islice(entries, reading.CHUNK)):
                is_met = is_met or any(not self._ignored(entry.name) for entry in chunk)
                odd = first.add(reading.message_files(chunk) if typed else [entry.name for entry in chunk])
                for entry in chunk if odd else ():
                    if entry.name in odd and not self._ignored(entry.name) and reading.is_message_file(entry):
                        others += self._keyed(entry, arrivals, behind)
                if self.depth and len(others) > 2 * self.depth:
                    others, arrivals = self._first(others, arrivals)
        others, self._arrivals = self._first(others, arrivals)
        kept = list(first.names())
        self.is_empty = not (is_met or others or kept or self.unsettled)
        if others:
            return self._in_order([*others, *zip(map(names.order_at_a_glance, kept), kept, strict=True)])
        full = self.depth is not None and len(kept) >= self.depth
        self._end = names.order_at_a_glance(kept[-1]) if full else None
        return _by_priority(kept)

    def _in_order(self, keyed: list[Keyed]) -> Iterator[Group]:
        full = self.depth is not None and len(keyed) >= self.depth
        keyed = sorted(keyed, key=_key)[: self.depth]
        self._end = _key(keyed[-1]) if full else None
        return ([item for _, item in group] for _, group in groupby(keyed, key=_priority))

    def _first(self, others: list[Keyed], arrivals: Arrivals) -> tuple[list[Keyed], Arrivals]:
        """Return the first messages, as many as the view may hold, and when their files arrived."""
        if self.depth is None:
            return others, arrivals if len(arrivals) <= ARRIVALS_LIMIT else {}
        if len(others) <= self.depth:
            return others, arrivals
        others = sorted(others, key=_key)[: self.depth]
        first = {file.filename for _, file in others if isinstance(file, MessageFile)}
        return others, {key: arrival for key, arrival in arrivals.items() if key[0] in first}

    def _keyed(self, entry: os.DirEntry[str], arrivals: Arrivals, behind: Key | None) -> Iterator[Keyed]:
        """Yield an entry's key and message file, unless it is gone, or not `behind`; note when it arrived."""
        file = self._sidecars.file(entry.name, self._folder)
        if not file.name.generated:
            identity = entry.name, entry.inode()
            # A foreign file that is to settle is looked at each time: it may have been written to since.
            known = None if self._settling is not None and file.name.foreign else self._arrivals.get(identity)
            file.arrival = known or self._arrival(file)
            if not file.arrival:
                return
            arrivals[identity] = file.arrival
        key = self._order(file)
        if behind is None or key > behind:
            yield key, file

    def _arrival(self, file: MessageFile) -> int:
        """Return when a file arrived, in ms; 0 if it is gone, or is left out until it has settled."""
        try:
            found = os.lstat(f"{self._folder}/{file.filename}")
        except FileNotFoundError:
            return 0  # RACE: it was claimed after the listing
        if self._settling is not None and (due := self._settling.due(file, found)):
            self.unsettled[file.filename] = due
            return 0
        return found.st_ctime_ns // 1_000_000

    def _order(self, file: MessageFile) -> Key:
        """Return the sort key of a message whose name may not contain its time."""
        return names.order(file.name, file.arrival)


class _FirstNames:
    """Keeps the first of the names that contain their time, in order of delivery; other names are called odd.

    It keeps `depth` names, None for all, and only names behind the key `behind`. Names are bundled by their priority
    and by about a day of their time. Bundles behind the end are dropped as a whole, which costs less than listing them.
    """

    def __init__(self, depth: int | None, behind: Key | None = None) -> None:
        self._depth = depth
        self._behind = behind
        self._bundles: dict[tuple[int, str], list[str]] = {}
        self._count = 0
        self._end: tuple[tuple[int, str], str] | None = None

    def add(self, files: list[str]) -> set[str]:
        """Add names; return the odd names, also those that begin as the others do."""
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
            bundled = files[at:end]
            if not names.all_tell_time(bundled):
                odd.update(file for file in bundled if not names.tells_time(file))
                bundled = [file for file in bundled if file not in odd]
            self._keep(bundle, bundled)
            at = end
        if self._depth is not None and self._count > 2 * self._depth:
            self._cut(self._depth)
        return odd

    def names(self) -> Iterator[str]:
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


def _by_priority(files: list[str]) -> Iterator[Group]:
    """Split ordered names where the priority changes."""
    at = 0
    while at < len(files):
        start = names.priority_start(files[at])
        end = bisect_right(files, 0, at, key=lambda file: 0 if file.startswith(start) else 1)
        yield files[at:end]
        at = end


def _divided(
    group: Group,
    rank: int,
    consumers: int,
    taken: Iterator[int],
    as_files: Callable[[Group], Iterator[MessageFile]],
) -> Iterator[Iterator[MessageFile]]:
    """Yield the messages of one priority: the consumer's own share, then the others' shares in parts.

    In between come the oldest messages of the others' shares. `taken` counts from view to view, so that a consumer that
    takes few messages from each view takes the oldest, too.
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
    random.shuffle(theirs)  # each time: two consumers that meet in one part do not go on to the same next part
    offered: set[str] = set()

    def once(items: Group) -> Iterator[MessageFile]:
        for file in as_files(items):
            if file.filename not in offered:
                offered.add(file.filename)
                yield file

    oldest = once(others)

    def with_oldest(items: Group) -> Iterator[MessageFile]:
        for file in once(items):
            yield file
            if next(taken) % OLDEST_EACH == 0:
                yield from islice(oldest, 1)

    yield from map(with_oldest, [own, *theirs] if own else theirs)


def _number(file: str) -> int:
    """Return a number that is the same for all consumers, and does not depend on a message's place in the order."""
    return crc32(os.fsencode(file))
