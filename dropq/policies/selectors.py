"""Selectors: which of them take a waiting message, and how many credits each has left.

The files are read again on each pass, and a selector's own file once more before it spends a credit, so a selector that
was removed moves nothing more.

Invariant: a file that cannot be used takes nothing, and while there is one, no message counts as unroutable. While the
queue is on a circle, none can be used. Nothing is moved here; only a file without a token of its own gets one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from dropq.config.selectors import Selector, name_of, parse, with_token
from dropq.errors import ConfigError, DropqError, StorageError
from dropq.format.credits import Credit, Via, new_token
from dropq.format.layout import RootLayout
from dropq.format.message_file import MessageFile
from dropq.lifecycle import credits
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.queue_notes import is_copied
from dropq.policies.circles import Circles, Version, version_of
from dropq.policies.lock import PolicyLock
from dropq.policies.matching import deciding
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.storage.files import Storage

log = logging.getLogger("dropq")

#: How the file of a selector ends, behind a dot in front, while what it moved returns.
REMOVED = ".removed"
#: The file beside the credits of a selector that says which router spent the last.
LAST = ".last"


class InUse:
    """A selector in use; `version` is what its file was when it was read.

    How many credits are spent is counted by a listing, which takes long where there are many. So this keeps an upper
    bound: the last count, and what it has spent since. The bound holds as long as nobody else spends: the file `.last`
    beside the credits says who did, and is read and written under the policy lock.
    """

    def __init__(self, context: QueueContext, selector: Selector, version: Version) -> None:
        self.selector = selector
        self.version = version
        self.path = path_of(context, selector.name)
        #: The folder of its credits.
        self.folder = f"{context.layout.credits}/{selector.token}"
        self._context = context
        #: Returns whether it takes a waiting message; None where that is not known now.
        self.takes: Callable[[MessageFile], bool | None] = lambda file: True
        if selector.filter is not None:
            self.takes = deciding(selector.filter, context, "target", context)
        self.no_credit = f"it has no credit left of {selector.credit}"
        self._mark = os.urandom(8).hex().encode()
        self._spent = selector.credit or 0  # at the most: it is counted before the first is spent
        self._counted_until = 0.0
        #: How many more messages it is to have, as somebody foresees who moves none.
        self.foreseen = 0
        #: When its credits may be counted again, by `time.monotonic()`, where that took long.
        self.counts_at = 0.0

    @property
    def is_current(self) -> bool:
        """Whether its file is the one that was read."""
        return version_of(self.path) == self.version

    @property
    def busy(self) -> int:
        """How many of its messages are not settled, or were not a moment ago."""
        if self.selector.credit is not None and time.monotonic() >= max(self._counted_until, self.counts_at):
            self._count()
        return self._spent

    @property
    def has_credit(self) -> bool:
        """Whether it may take a message, as far as its credits said a moment ago."""
        limit = self.selector.credit
        if limit is not None and self._spent >= limit and time.monotonic() >= self.counts_at:
            self._count()
        return limit is None or self._spent + self.foreseen < limit

    def may_spend(self) -> bool:
        """Return whether it has a credit left; call this under the policy lock. OSError if that is not known now."""
        path = f"{self.folder}/{LAST}"
        if reading.read_small(path) != self._mark:
            self._context.storage.make_folder(self.folder)
            self._count()  # before the mark: a router that finds its mark relies on its count
            self._context.storage.write_small(path, self._mark)
        limit = self.selector.credit or 0
        if self._spent >= limit:
            self._count()
        return self._spent < limit

    def spend(self, via: Via, credit: Credit) -> None:
        """Make the file of a credit; call this under the policy lock, after `may_spend`."""
        credits.spend(self._context, via, credit)
        self._spent += 1

    def _count(self) -> None:
        began = time.monotonic()
        self._spent = len(credits.spent(self._context.layout, self.selector.token))
        now, timing = time.monotonic(), self._context.timing
        took = now - began
        self._counted_until = now + timing.max_age
        self.counts_at = now + took * timing.listing_share if took > timing.long_attempt else 0.0

    @property
    def out_of_credit(self) -> str:
        """That it has no credit left; "" if it has."""
        return "" if self.has_credit else self.no_credit


class Choice(NamedTuple):
    """Which selectors of a queue a waiting message is for."""

    #: Those that copy it first, all of them at once.
    copying: list[InUse]
    #: Those that may move or bounce it, any one of them.
    moving: list[InUse]
    #: Whether its copies are made, and it is for consumers now.
    stays: bool


class Selectors:
    """The selectors of a queue, as they were at the last refresh; if `read_only`, it gives no token to any."""

    def __init__(self, context: QueueContext, *, read_only: bool = False) -> None:
        self._context = context
        self._read_only = read_only
        self._circles = Circles()
        self._files = reading.Listing(context.layout.selectors, context.clock)
        self._warned: dict[str, str] = {}
        #: Those that can be used, in the order of their names.
        self.in_use: tuple[InUse, ...] = ()
        #: Those that are not used, as the queue is on a circle.
        self.on_circle: tuple[InUse, ...] = ()
        #: Why each of the others takes nothing, by the name of its file.
        self.unusable: dict[str, str] = {}
        #: Whether each file was read: another selector than those in use may want to copy a message first.
        self._are_known = True
        #: Whether some are being removed.
        self.are_removed = False

    def refresh(self) -> None:
        """Read again which selectors there are; give a token to each that has none; log what cannot be used, once."""
        known = {one.selector.name: one for one in self.in_use}
        found, self.unusable, self._are_known = list[InUse](), {}, True
        self.on_circle = ()
        files = self._files.names()
        self.are_removed = any(file[0] == "." and file.endswith(REMOVED) for file in files)
        for name in sorted(filter(None, map(name_of, files))):
            path = path_of(self._context, name)
            try:
                if (one := known.get(name)) is None or not one.is_current:
                    one = self._read(name, path)
                if one is not None:
                    found.append(one)
            except (DropqError, OSError) as error:
                self.unusable[os.path.basename(path)] = describe(error)
                self._are_known &= not isinstance(error, StorageError | OSError)
        second = _second_of_role(one.selector for one in found)
        self.unusable |= {f"{name}.toml": why for name, why in second.items()}
        found = [one for one in found if one.selector.name not in second]
        if found and (circle := self._circles.at(self._context.layout, self._context.timing)):
            self.unusable |= {os.path.basename(one.path): circle for one in found}
            self.on_circle, found = tuple(found), []
        self.in_use = tuple(found)
        self._warned = {file: why for file, why in self._warned.items() if self.unusable.get(file) == why}
        for file, why in self.unusable.items():
            if file not in self._warned and not self._read_only:
                self._warned[file] = why
                log.warning("queue %s: selector %s is passed over: %s", self._context.name, file, why)

    def _read(self, name: str, path: str, *, gives: bool = True) -> InUse | None:
        version, content = version_of(path), _content(path)
        if version is None or content is None:
            return None
        selector = parse(name, content, path, queue=self._context.name)
        owner = (self._context.name, name)
        if selector.credit is not None and credits.queue_of(self._context.root.layout, selector.token) != owner:
            if self._read_only:
                return InUse(self._context, replace(selector, token=new_token()), version)
            if not gives:
                return None  # it is read again at the next refresh
            self._give_token(selector, content, version)
            return self._read(name, path, gives=False)  # RACE: what is there may be another router's
        return InUse(self._context, selector, version)

    def _give_token(self, selector: Selector, content: bytes, version: Version) -> None:
        context, path = self._context, path_of(self._context, selector.name)
        token = reserve_token(context.root.layout, context.name, selector.name, context.storage)
        with PolicyLock(context).acquire() as locked:
            if locked and version_of(path) == version:  # RACE: it may have been removed, or replaced by a script
                edited = with_token(content.decode(), replace(selector, token=token))
                context.storage.write_small(path, edited.encode())

    @property
    def out_of_credit(self) -> bool:
        """Whether one of them has no credit left."""
        return not all(one.has_credit for one in self.in_use)

    @property
    def counts_at(self) -> float:
        """When the first of them is to count its credits again, by `time.monotonic()`; 0 if none is."""
        return min((one.counts_at for one in self.in_use if one.counts_at), default=0.0)

    @property
    def for_waiting(self) -> list[InUse]:
        """Those that are for messages that wait: an overflow selector is for those that are sent."""
        return [one for one in self.in_use if one.selector.role != "overflow"]

    @property
    def may_take(self) -> bool:
        """Whether one of them may take a message, as far as credits say."""
        return any(one.has_credit for one in self.for_waiting)

    def choice(self, file: MessageFile) -> Choice | None:
        """Return which selectors a waiting message is for, the least busy first; None where that is not known now."""
        asked = self.asked(file)
        if asked is None:
            return None
        copying = [one for one in asked if one.selector.op == "copy"]
        moving = [one for one in asked if one.selector.op != "copy"]
        if not asked and (default := self.of_role("default")) is not None:
            moving = [default]
        if len(moving) > 1:
            moving.sort(key=lambda one: (one.busy + one.foreseen, one.selector.name))
        if is_copied(self._context.layout.private, file.name):
            return Choice([], moving, stays=bool(copying))
        return Choice(copying, moving, stays=False)

    def asked(self, file: MessageFile) -> list[InUse] | None:
        """Return the normal selectors that take a waiting message; None where that is not known now."""
        if not self._are_known:
            return None
        found = []
        for one in self.in_use:
            if one.selector.role == "normal" and (taken := one.takes(file)) is not False:
                if taken is None:
                    return None
                found.append(one)
        return found

    def of_role(self, role: str) -> InUse | None:
        """Return the first selector of a role other than normal, if there is one."""
        return next((one for one in self.in_use if one.selector.role == role), None)


def names_in(context: QueueContext) -> list[str]:
    """Return the names of a queue's selectors, in order."""
    return sorted(name for name in map(name_of, reading.names_in(context.layout.selectors)) if name is not None)


def path_of(context: QueueContext, name: str) -> str:
    """Return the path of a selector's file."""
    return f"{context.layout.selectors}/{name}.toml"


def read(context: QueueContext) -> tuple[list[Selector], dict[str, list[str]]]:
    """Return the selectors of a queue, and every problem of each file by its path; nothing is changed."""
    found, problems = list[Selector](), dict[str, list[str]]()
    for name in names_in(context):
        path = path_of(context, name)
        try:
            if (one := _selector(context, name)) is not None:
                found.append(one)
        except ConfigError as error:
            problems[path] = str(error).split("\n")
        except OSError as error:
            problems[path] = [f"{path} cannot be read: {describe(error)}"]
    for name, why in _second_of_role(found).items():
        path = path_of(context, name)
        problems[path] = [f"{path}: {why}"]
    return found, problems


def _second_of_role(selectors: Iterable[Selector]) -> dict[str, str]:
    """Return the names of selectors that are not used, as another before them has their role; and why, by name."""
    first, why = dict[str, str](), dict[str, str]()
    for one in selectors:
        if one.role != "normal" and (other := first.setdefault(one.role, one.name)) != one.name:
            why[one.name] = f"role: {other} is the {one.role} selector already; a queue has one"
    return why


def overflow_of(context: QueueContext) -> Selector | None:
    """Return a queue's overflow selector; None without one that can be used. OSError if that is not known."""
    for name in names_in(context):
        with suppress(ConfigError):
            if (one := _selector(context, name)) is not None and one.role == "overflow":
                return one
    return None


def _selector(context: QueueContext, name: str) -> Selector | None:
    path = path_of(context, name)
    content = _content(path)
    return None if content is None else parse(name, content, path, queue=context.name)


def reserve_token(root: RootLayout, queue: str, name: str, storage: Storage) -> str:
    """Return a new token that is reserved for a selector of a queue; arguments as of `credits.reserve`."""
    while True:
        token = new_token()
        if credits.reserve(root, token, queue, name, storage):
            return token


def _content(path: str) -> bytes | None:
    """Return what a selector's file says; None if it was removed since it was listed, or only reserves its name."""
    with suppress(PermissionError):
        if content := reading.read_small(path):
            return content
    with suppress(FileNotFoundError):  # RACE: it was removed since it was listed
        if not reading.is_reservation(os.lstat(path)):
            return reading.read_small(path)  # RACE: it may be the selector that has replaced its reservation since
    return None
