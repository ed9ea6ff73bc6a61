"""The view of target/ that consumers take from: ordered, and refreshed when it is empty or old.

A listing serves many claims, because a listing for each claim would cost the square of what waits. The view is as
old as `max_age` at the most, so that an urgent newcomer is seen; with many messages waiting the age grows with
what a listing costs, so that listing never takes more than about a tenth of the time.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator

from dropq import names, storage
from dropq.filters import compile_filter, for_name
from dropq.lifecycle import Waiting
from dropq.sidecars import Sidecars

#: Seconds after which a view is refreshed although it is not used up.
MAX_AGE = 0.1
#: A view is kept at least this many times as long as its listing took.
LISTING_SHARE = 10
#: Order keys that are kept for names that do not tell their time; beyond it they are looked up again.
ARRIVALS_LIMIT = 100_000

#: The end of a plain name has a fixed length.
_PLAIN_END = len(".0000000000000000-0000000000.B")
#: A name with a generated id, whatever follows.
_GENERATED = re.compile(r"(?:0|-?[1-9]\d{0,8})\.\d{16}-\d{10}\.[MBSPOT]\.", re.ASCII).match


class Ready:
    """The waiting messages of one folder, in order of delivery.

    Args:
        folder: the folder, a queue's target/.
        sidecars: what reads names.
        ignored: tells which names are never messages.
    """

    def __init__(self, folder: str, sidecars: Sidecars, ignored: Callable[[str], object]) -> None:
        self._folder = folder
        self._sidecars = sidecars
        self._ignored = ignored
        self._arrivals: dict[tuple[str, int], int] = {}
        self._plain: frozenset[str] = frozenset()
        #: What is left of the view; each message is offered once a view.
        self.view: Iterator[Waiting] = iter(())
        #: When the view is too old to take from, on the monotonic clock.
        self.fresh_until = 0.0

    @property
    def stale(self) -> bool:
        """Whether the view is too old to take from."""
        return time.monotonic() >= self.fresh_until

    def clear(self) -> None:
        """Offer nothing until the next refresh."""
        self.view = iter(())
        self.fresh_until = 0.0

    def refresh(self) -> None:
        """Make the view anew from a listing.

        Raises:
            OSError: the folder cannot be listed.
        """
        started = time.monotonic()
        self.view = self.waiting()
        now = time.monotonic()
        self.fresh_until = now + max(MAX_AGE, LISTING_SHARE * (now - started))

    def waiting(self) -> Iterator[Waiting]:
        """List the folder; return what waits in order: priority descending, then time and sequence, then name."""
        plain: list[str] = []
        generated: list[str] = []
        others: list[tuple[tuple[int, str, str], Waiting]] = []
        seen: dict[tuple[str, int], int] = {}
        ignored, is_message_file, known = self._ignored, storage.is_message_file, self._plain
        is_plain = names.is_plain
        with storage.listing(self._folder) as entries:
            for entry in entries:
                name = entry.name
                if name in known:  # looked at before: a name of this form is one file's for ever
                    plain.append(name)
                    continue
                if ignored(name) or not is_message_file(entry):
                    continue
                if is_plain(name):
                    plain.append(name)
                elif _GENERATED(name):
                    generated.append(name)
                elif (other := self._other(entry, seen)) is not None:
                    others.append(other)
        self._arrivals = seen if len(seen) <= ARRIVALS_LIMIT else {}
        self._plain = frozenset(plain)
        if others:
            return _merged(plain, generated, others)
        return _sorted(plain, generated)

    def _other(
        self, entry: os.DirEntry[str], seen: dict[tuple[str, int], int]
    ) -> tuple[tuple[int, str, str], Waiting] | None:
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


def _sorted(plain: list[str], generated: list[str]) -> Iterator[Waiting]:
    """Sort names of one priority as plain strings, which is three times as fast as by a key."""
    groups: dict[str, list[str]] = {}
    for names_alike in (plain, generated):
        priorities = {name[: name.index(".")] for name in names_alike}
        for priority in priorities:
            start = f"{priority}."
            alike = [name for name in names_alike if name.startswith(start)] if len(priorities) > 1 else names_alike
            groups.setdefault(priority, []).extend(alike)
    for priority in sorted(groups, key=int, reverse=True):
        length = len(priority) + _PLAIN_END
        for name in sorted(groups[priority]):
            yield Waiting(name, 0, len(name) == length)


def _merged(
    plain: list[str], generated: list[str], others: list[tuple[tuple[int, str, str], Waiting]]
) -> Iterator[Waiting]:
    """Sort all by their keys, where some names do not tell their time."""
    keyed = others
    for names_alike, is_plain in ((plain, True), (generated, False)):
        for name in names_alike:
            priority, _, rest = name.partition(".")
            keyed.append(((-int(priority), rest[:16], name), Waiting(name, 0, is_plain)))
    keyed.sort()
    return (waiting for _, waiting in keyed)
