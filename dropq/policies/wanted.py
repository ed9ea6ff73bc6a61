"""What several roots with the same queue ask of each other: who wants messages, and whose they are.

A subscription that finds nothing says so in a file of `.dropq/wanted/`, and a bridge takes from peers what it wants.
A GroupLocalQueue has one initial_owner: elsewhere, consumers get only what their root took from a peer, and marked.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from dropq.format import names
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.storage import reading
from dropq.storage.failures import describe

log = logging.getLogger("dropq")

#: Seconds between two times that a subscription says what it wants, and for how long that counts.
AGAIN, COUNTS = 1.0, 3.0
#: The most messages that a subscription wants at once.
MOST = 1000
#: The file, in the folder of what is wanted, whose time is that of the last look by a bridge.
LOOKED = ".looked"


class Wanted(NamedTuple):
    """What a subscription wants: so many messages that match its filter; None stands for all."""

    subscription: str
    filter: str | None
    room: int


class Wanting:
    """Says for one subscription that it wants messages; who may not write there, or has no room, says nothing."""

    def __init__(self, context: QueueContext, subscription: str, filter: str | None) -> None:
        self._context = context
        self._path = f"{context.layout.wanted}/{subscription}"
        self._filter = filter
        self._said = b""
        self._again = 0.0

    @property
    def again_in(self) -> float:
        """Seconds until it is time to say it again; not above 0 where it is."""
        return self._again - time.monotonic()

    def say(self, room: int | None) -> None:
        """Say that messages are wanted, for which there is so much room; None for no limit."""
        self._again = time.monotonic() + AGAIN
        content = json.dumps({"format": 1, "filter": self._filter, "room": MOST if room is None else room}).encode()
        storage, folder = self._context.storage, self._context.layout.wanted
        try:
            if content == self._said and storage.renew(self._path):
                return
            if not reading.exists(folder):
                storage.make_folder_like(folder, self._context.layout.private)
                storage.stamp(f"{folder}/{LOOKED}")  # from now on a bridge is missed
            storage.write_small(self._path, content)
            self._said = content
        except OSError as error:
            log.info("no bridge hears that a consumer waits: %s", describe(error))

    def pause(self) -> None:
        """Want nothing until it is said again; the file stays, so to say it again costs one call."""
        if self._said and self._again:
            self._take_back(self._context.storage.date_back)

    def end(self) -> None:
        """Want nothing any more."""
        if self._said:
            self._said = b""
            self._take_back(self._context.storage.unlink)

    def _take_back(self, by: Callable[[str], object]) -> None:
        self._again = 0.0
        try:
            with suppress(FileNotFoundError):  # RACE: a sweep removed it, as it was old
                by(self._path)
        except OSError as error:
            log.info("it is wanted for %d s longer: %s", COUNTS, describe(error))


class Wants:
    """What the subscriptions of a queue want at present; a file is read again only when another is in its place."""

    def __init__(self, context: QueueContext) -> None:
        self._context = context
        self._known: dict[tuple[str, int], Wanted | None] = {}
        self._empty = reading.Standstill(context.layout.wanted, clock=context.clock)

    def now(self) -> list[Wanted]:
        """Return what is wanted, by subscription; anybody who may write there may have written it."""
        found: dict[tuple[str, int], Wanted | None] = {}
        if is_empty := not self._known:
            try:
                if self._empty.lasts():
                    return []
                self._empty.begin()
            except FileNotFoundError:
                return []  # the queue is gone
        since = self._context.clock.now_ms() - int(COUNTS * 1000)
        for entry in reading.entries(self._context.layout.wanted):
            with suppress(FileNotFoundError):  # RACE: its subscription was closed
                if entry.name.startswith("."):
                    continue
                is_empty = False
                status = entry.stat(follow_symlinks=False)
                if status.st_mtime_ns // 1_000_000 >= since:
                    key = entry.name, status.st_ino
                    found[key] = self._known[key] if key in self._known else _read(entry)
        if is_empty:
            self._empty.confirm()
        self._known = found
        return sorted(want for want in found.values() if want is not None)


def _read(entry: os.DirEntry[str]) -> Wanted | None:
    try:
        said = reading.parse_json(reading.read_small(entry.path) or b"null", any_text=True)
    except (OSError, ValueError):
        return None
    filter, room = (said.get("filter"), said.get("room")) if isinstance(said, Mapping) else (None, None)
    is_ours = type(room) is int and room > 0 and isinstance(filter, str | None)
    return Wanted(entry.name, filter, min(room, MOST)) if is_ours else None  # type: ignore[arg-type, type-var]


def is_owner(context: QueueContext) -> bool:
    """Return whether a queue's consumers get all messages, and not only those that its root took from a peer."""
    config = context.config
    return config.replication_type != "GroupLocalQueue" or config.initial_owner == context.root.config.instance


def belonging_here(context: QueueContext) -> Callable[[MessageFile], bool] | None:
    """Return a test of waiting messages: whether the queue's root owns them; None where it owns all."""
    return None if is_owner(context) else is_owned


def is_owned(file: MessageFile) -> bool:
    """Return whether a message's name says that the root that it lies in owns it."""
    return bool(names.may_be_owned(file.filename)) and file.name.owned
