"""Circles: ways on which a message would come back to the queue that it left, by selectors, routes and topics alone.

Filters, credits and pauses do not count: they change. Where such a way leads back, each round may double what goes
round, so nobody makes a circle, and who meets one uses no selector and no route of a queue on it.

A bounce and a dead letter are no part of a way: hops are counted, which ends what goes round by them, by workers, by
scripts, or through other roots.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar, cast

from dropq.config import selectors as files
from dropq.config.load import load_queue
from dropq.config.schema import RootConfig, underlies
from dropq.errors import DropqError
from dropq.format import names
from dropq.format.addresses import ancestors, layouts, subscription_layout, topic_layout
from dropq.format.layout import IN_USE, SUBSCRIPTIONS, TOPIC_ROOT, QueueLayout, RootLayout
from dropq.lifecycle.queue_notes import linked_queue, subscription_folders
from dropq.lifecycle.timing import Timing
from dropq.storage import reading

T = TypeVar("T")
#: What tells whether a file has changed.
Version = tuple[int, int, int]


class View(NamedTuple):
    """On which topics a queue is a view, and to which its sends are published."""

    underlying: str
    target: str


class Waypoint(NamedTuple):
    """Where messages may lie on their way: a queue, topic or subscription of a root, by its address."""

    root: str
    address: str
    layout: QueueLayout

    @property
    def key(self) -> str:
        """What tells it from others, by whatever links it was reached."""
        return os.path.realpath(self.layout.base)


class Planned(NamedTuple):
    """A queue or topic that is to be made: where, what it will be a view on, and where its selectors will send."""

    waypoint: Waypoint
    view: View | None = None
    sends_to: tuple[str, ...] = ()


class Circles:
    """Finds circles, as if what is `planned` were there; what files say is read again only when they have changed."""

    def __init__(self, planned: Planned | None = None) -> None:
        self._planned = planned
        self._read: dict[str, tuple[Version, object]] = {}
        self._circle = ""
        self._refresh_at = 0.0

    def at(self, layout: QueueLayout, timing: Timing) -> str:
        """Return that a queue is on a circle, in words; "" if it is on none. A search that took long is kept for long.

        RACE: what closes a circle after this refresh is met by the next. Until then messages may go round.
        """
        if (began := time.monotonic()) >= self._refresh_at:
            self._circle = words(self.through(waypoint_at(layout.base)))
            took = time.monotonic() - began
            self._refresh_at = began + took * (timing.listing_share + 1) if took > timing.long_attempt else 0.0
        return self._circle

    def through(self, start: Waypoint, to: str | None = None) -> list[str]:
        """Return the addresses on a circle through a waypoint, which is the first and the last; none if there is none.

        With `to`, only a circle by a selector there that sends to this address counts.
        """
        firsts = self._next(start) if to is None else self._sent(start.root, to)
        return self._way([[start, each] for each in firsts], start)

    def by_topic(self, start: Waypoint, end: Waypoint) -> list[str]:
        """Return the addresses on a way from a topic, where messages at a waypoint may come to, to an end; or none."""
        ahead, seen = [start], set[str]()
        while ahead:
            here = ahead.pop()
            if here.layout.is_topic and (way := self._way([[here]], end)):
                return way
            if here.key not in seen:
                seen.add(here.key)
                ahead += self._next(here)
        return []

    def _way(self, ahead: list[list[Waypoint]], end: Waypoint) -> list[str]:
        """Return the addresses on a way that begins as one of some ways, and leads to an end."""
        home, seen = end.key, set[str]()
        while ahead:
            way = ahead.pop()
            here = way[-1].key
            if here == home:
                return [each.address for each in way]
            if here not in seen:
                seen.add(here)
                ahead += [[*way, each] for each in self._next(way[-1])]
        return []

    def through_new(self, waypoint: Waypoint) -> list[str]:
        """Return the addresses on a circle through a new queue or topic, or through the topic of a new view."""
        starts = {each.key: each for each in (waypoint, *self._sent(waypoint.root, waypoint.address))}
        return next(filter(None, map(self.through, starts.values())), [])

    # -- one step --------------------------------------------------------------------------------------------------

    def _next(self, waypoint: Waypoint) -> Iterator[Waypoint]:
        """Yield where messages go from a waypoint. A file that cannot be read leads nowhere; its user reports it."""
        with suppress(OSError, DropqError):
            yield from self._routed(waypoint)
        with suppress(OSError, DropqError):
            yield from self._fed(waypoint) if waypoint.layout.is_topic else self._selected(waypoint)

    def _selected(self, waypoint: Waypoint) -> Iterator[Waypoint]:
        if self._planned is not None and waypoint[:2] == self._planned.waypoint[:2]:
            for to in self._planned.sends_to:
                yield from self._sent(waypoint.root, to)
        for name in sorted(filter(None, map(files.name_of, reading.names_in(waypoint.layout.selectors)))):
            path = f"{waypoint.layout.selectors}/{name}{files.SUFFIX}"
            address = self._known(path, partial(_sends_to, name, path, waypoint.address))
            if address is not None:
                yield from self._sent(waypoint.root, address)

    def _routed(self, waypoint: Waypoint) -> Iterator[Waypoint]:
        routing = waypoint.layout.routing
        for name in in_use(routing) if os.path.exists(waypoint.layout.routes_file) else ():
            link = f"{routing}/{name}"
            behind = _behind(link, waypoint.root) if os.path.islink(link) and os.path.isdir(link) else waypoint
            if behind.key != waypoint.key:  # a route to its own queue cannot be used
                yield behind

    def _fed(self, topic: Waypoint) -> Iterator[Waypoint]:
        root = RootLayout(topic.root)
        for above in ancestors(topic.address):
            layout = topic_layout(root.path, above)
            for folder in subscription_folders(root, above):
                yield Waypoint(root.path, f"{above}/{folder}", subscription_layout(layout, folder))
            for entry in reading.entries(f"{layout.home}/{SUBSCRIPTIONS}"):
                if entry.is_symlink() and (name := linked_queue(root, entry.path)) is not None:
                    yield from self._found(root.path, name)
        for name in filter(names.can_name_queue, reading.names_in(root.views)):
            for waypoint in self._found(root.path, name):
                yield from self._if_underlying(waypoint, topic.address)
        if self._planned is not None and self._planned.waypoint.root == root.path:
            yield from self._if_underlying(self._planned.waypoint, topic.address)

    def _if_underlying(self, waypoint: Waypoint, topic: str) -> Iterator[Waypoint]:
        view = self._view(waypoint)
        with suppress(DropqError):  # nothing is distributed to it then
            if view is not None and underlies(view.underlying, topic):
                yield waypoint

    def _sent(self, root: str, address: str) -> Iterator[Waypoint]:
        """Yield where a message goes that is sent to an address: of a view, to its topic."""
        for waypoint in self._found(root, address):
            view = self._view(waypoint)
            yield from (waypoint,) if view is None else self._found(root, view.target)

    def _found(self, root: str, address: str) -> Iterator[Waypoint]:
        if self._planned is not None and (root, address) == self._planned.waypoint[:2]:
            yield self._planned.waypoint
            return
        for layout in layouts(root, address):
            if os.path.isdir(layout.target):
                yield Waypoint(root, address, layout)
                return

    def _view(self, waypoint: Waypoint) -> View | None:
        if waypoint.layout.topic:
            return None
        if self._planned is not None and waypoint[:2] == self._planned.waypoint[:2]:
            return self._planned.view
        return self._known(waypoint.layout.config_file, partial(_view, waypoint))

    def _known(self, path: str, read: Callable[[], T | None]) -> T | None:
        """Return what a file says; None if it is not there, or cannot be used."""
        try:
            if (version := version_of(path)) is None:
                return None
            if path not in self._read or self._read[path][0] != version:
                self._read[path] = version, read()
        except (OSError, DropqError):
            return None
        return cast(T, self._read[path][1])


def version_of(path: str) -> Version | None:
    """Return what tells whether a file has changed; None if it is missing."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def circle_at(layout: QueueLayout) -> str:
    """Return that a queue is on a circle, in words; "" if it is on none."""
    return words(Circles().through(waypoint_at(layout.base)))


def words(circle: list[str]) -> str:
    """Return a circle in words; "" for none."""
    return f"messages would go round: {' -> '.join(circle)}" if circle else ""


def in_use(routing: str) -> list[str]:
    """Return the names of the routes that are in use, in order; a folder that cannot be listed has none."""
    with suppress(PermissionError, NotADirectoryError):
        found = reading.names_in(routing)
        return sorted(name.removesuffix(IN_USE) for name in found if name.endswith(IN_USE) and name != IN_USE)
    return []


def _sends_to(name: str, path: str, queue: str) -> str | None:
    content = reading.read_small(path)
    return files.parse(name, content, path, queue=queue).to if content else None


def _view(waypoint: Waypoint) -> View | None:
    config = load_queue(waypoint.address, RootConfig(), "", waypoint.layout)
    topics = config.underlying_topic
    return None if topics is None else View(topics, config.default_publish_target or topics)


# -- from paths to waypoints --------------------------------------------------------------------------------------


def waypoint_at(base: str, root: str = "") -> Waypoint:
    """Return what lies in a folder with a target/; where that is not known, a queue of `root` that has no name."""
    above, is_topical, below = base.rpartition(f"/{TOPIC_ROOT}/")
    if is_topical:
        home, folder = os.path.split(below)
        is_subscription = os.path.basename(home) == SUBSCRIPTIONS
        topic = (os.path.dirname(home) if is_subscription else home).replace("/", ".")
        layout = topic_layout(above, topic)
        if not is_subscription:
            return Waypoint(above, topic, layout)
        return Waypoint(above, f"{topic}/{folder}", subscription_layout(layout, folder))
    for layout in (QueueLayout.flat(base), QueueLayout.incoming(os.path.dirname(base))):
        above, name = os.path.split(layout.home)
        if layout.base == base and reading.is_folder(RootLayout(above).private):
            return Waypoint(above, name, layout)
    return Waypoint(root or os.path.dirname(base), base, QueueLayout.flat(base))


def _behind(link: str, root: str) -> Waypoint:
    """Return the queue whose target/ a link leads to; follow it by a step first, as the queue may be a link itself."""
    step = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
    near = waypoint_at(os.path.dirname(step), root)
    return near if near.address[0] != "/" else waypoint_at(os.path.dirname(os.path.realpath(link)), root)
