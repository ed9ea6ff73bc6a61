"""Routes: a waiting message that one of them takes goes into a folder of `routing/`, and to no consumer.

Invariant: a route that cannot be used takes nothing, so the next route, or a consumer, gets what it would take.
Nothing is changed here: the transitions move the messages.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dropq.errors import InvalidFilter, StorageError
from dropq.format.layout import QueueLayout
from dropq.format.message_file import MessageFile
from dropq.format.names import DO_NOT_ROUTE
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.transfers import behind
from dropq.policies.circles import Circles, circle_at, in_use
from dropq.policies.matching import Lookups
from dropq.storage import reading
from dropq.storage.failures import describe

if TYPE_CHECKING:
    from dropq.filters import Filter, Lookup

log = logging.getLogger("dropq")

#: What the key of a selector ends in.
_SELECTOR = ".selector"


@dataclass(frozen=True, slots=True)
class Route:
    """A route in use, whose messages go to a folder of `routing/`."""

    name: str
    folder: str
    selector: Filter
    #: Whether the folder is a link out of the root, where no sidecar of the root is found. What goes to another file
    #: system takes its sidecar along.
    leaves_root: bool


class _Unusable(Exception):
    """Raised with the reason why a route takes nothing."""


class Routes:
    """The routes of a queue, as they were at the last refresh; `in_use` are those that take messages, in order."""

    def __init__(self, context: QueueContext) -> None:
        self._context = context
        self._properties = _Properties()
        self._circles = Circles()
        self._warned: dict[str, str] = {}
        self.in_use: tuple[Route, ...] = ()
        self._chosen = Lookups(context).asking(self._matching)

    def refresh(self, *, are_there: bool | None = None) -> None:
        """Read again which routes are in use, if `are_there`; log each that cannot be used, once for each reason."""
        context = self._context
        if are_there is None:
            are_there = reading.is_there(context.layout.routes_file, context.clock)
        if not are_there:
            self.in_use, self._warned = (), {}
            return
        circle = partial(self._circles.at, context.layout, context.timing)
        self.in_use, unusable = _examine(context.layout, context.root.layout.path, self._properties, circle)
        names = {*unusable, *(route.name for route in self.in_use)}
        self._warned = {name: why for name, why in self._warned.items() if name in names}
        for name, why in unusable.items():
            self._warn(name, why)

    def taking(self, file: MessageFile, own_name: str) -> Iterator[Route]:
        """Yield the routes that take a waiting message, which would move as `own_name`, in the order to try them."""
        for route in self._chosen(file) if self.in_use else ():
            if route.leaves_root and self._context.sidecars.parse(own_name).meta:
                why = f"route {route.name} does not take it, as it leads out of the root, and the message has a sidecar"
                self._context.sidecars.warn(own_name, [why])
                continue
            yield route

    def skip(self, route: Route, error: StorageError) -> None:
        """Pass over a route until the next refresh: a message could not be moved to it."""
        self.in_use = tuple(other for other in self.in_use if other != route)
        reason = str(error) if error.errno is None else os.strerror(error.errno)  # the same for each message
        self._warn(route.name, f"a message could not be moved to {route.folder}: {reason}")

    def _matching(self, lookup: Lookup) -> list[Route]:
        if str(lookup(DO_NOT_ROUTE)).lower() == "true":
            return []
        return [route for route in self.in_use if route.selector.matches(lookup)]

    def _warn(self, name: str, why: str) -> None:
        if self._warned.get(name) != why:
            self._warned[name] = why
            log.warning("queue %s: route %s is passed over: %s", self._context.name, name, why)


def examine(context: QueueContext) -> tuple[tuple[Route, ...], dict[str, str]]:
    """Return the routes of a queue that are in use and can be used, and why each of the others takes nothing."""
    if not reading.is_there(context.layout.routes_file, context.clock):
        return (), {}
    layout = context.layout
    return _examine(layout, context.root.layout.path, _Properties(), partial(circle_at, layout))


def routed(layout: QueueLayout, ignore: tuple[str, ...]) -> dict[str, int]:
    """Return how many messages lie in each folder of routing/, by its name; what a link leads to is not counted."""
    counts = dict[str, int]()
    with suppress(PermissionError, NotADirectoryError):  # what this user may not list is left out
        for name in sorted(entry.name for entry in reading.entries(layout.routing) if _is_folder(entry)):
            with suppress(PermissionError):
                counts[name] = sum(reading.message_counts(f"{layout.routing}/{name}", ignore))
    return {name: count for name, count in counts.items() if count}


def check_file(path: str) -> list[str]:
    """Return every problem of a routing.properties, and of the routes in use beside it; each names the file."""
    layout, properties = QueueLayout.flat(os.path.dirname(os.path.abspath(path))), _Properties()
    used, found = in_use(layout.routing), list[str]()
    try:
        properties.read(path)
    except _Unusable as error:
        return [f"{path}: {error}"]
    for key in sorted(properties.values):
        name = key.removesuffix(_SELECTOR)
        if name in ("", key) or "/" in name:
            found.append(f"{path}: {key} is not the selector of a route: write ROUTE{_SELECTOR}=...")
        elif name not in used:
            try:
                properties.selector(name)
            except _Unusable as error:
                found.append(f"{path}: {key}: {error}")
    _, unusable = _examine(layout, layout.base, properties, partial(circle_at, layout))
    return [*found, *(f"{path}: route {name}: {why}" for name, why in unusable.items())]


# -- routing.properties --------------------------------------------------------------------------------------------


class _Properties:
    """What routing.properties says; each selector is compiled once, until the file has another content."""

    def __init__(self) -> None:
        self._content: bytes | None = None
        #: The values, by their keys.
        self.values: Mapping[str, str] = {}
        self._compiled: dict[str, Filter] = {}

    def read(self, path: str) -> None:
        """Read the file again, or raise _Unusable."""
        from dropq.format.java_properties import read_properties  # here, as few queues have routes

        try:
            content = reading.read_small(path) or b""
        except OSError as error:
            raise _Unusable(f"{path} cannot be read: {describe(error)}") from error
        if content != self._content:
            self._content, self.values, self._compiled = content, read_properties(content), {}

    def selector(self, name: str) -> Filter:
        """Return the selector of a route; _Unusable if it has none, or one that cannot be used."""
        if name not in self._compiled:
            self._compiled[name] = _compiled(name, self.values.get(f"{name}{_SELECTOR}"))
        return self._compiled[name]


def _compiled(name: str, text: str | None) -> Filter:
    from dropq.filters import compile_selector

    if text is None:
        raise _Unusable(f"routing.properties has no {name}{_SELECTOR}")
    if not text.strip():
        raise _Unusable(f"{name}{_SELECTOR} is empty")
    try:
        return compile_selector(text)
    except InvalidFilter as error:
        raise _Unusable(f"{str(error).splitlines()[0]}, in {text!r}") from error


# -- what is in use, and where it leads ----------------------------------------------------------------------------


def _examine(
    layout: QueueLayout, root: str, properties: _Properties, circle: Callable[[], str]
) -> tuple[tuple[Route, ...], dict[str, str]]:
    """Return the routes that are in use and can be used, and why the others cannot; `circle` says if all make one."""
    routes, unusable, names = list[Route](), dict[str, str](), in_use(layout.routing)
    try:
        properties.read(layout.routes_file)
    except _Unusable as why:
        return (), dict.fromkeys(names, str(why))
    for name in names:
        try:
            selector = properties.selector(name)
            routes.append(Route(name, f"{layout.routing}/{name}", selector, _leaves_root(layout, root, name)))
        except _Unusable as why:
            unusable[name] = str(why)
    if routes and (goes_round := circle()):
        return (), unusable | dict.fromkeys((route.name for route in routes), goes_round)
    return tuple(routes), unusable


def _leaves_root(layout: QueueLayout, root: str, name: str) -> bool:
    """Return whether a route's folder lies out of the root; _Unusable if it leads to no place for messages."""
    folder = f"{layout.routing}/{name}"
    try:
        there, home = os.stat(folder), os.stat(layout.base)
    except FileNotFoundError as error:
        raise _Unusable(f"{folder} is missing, or a link that leads nowhere") from error
    except OSError as error:
        raise _Unusable(f"{folder} cannot be used: {describe(error)}") from error
    if not stat.S_ISDIR(there.st_mode):
        raise _Unusable(f"{folder} is no folder")
    is_far = there.st_dev != home.st_dev
    if is_far and behind(folder) is None:
        raise _Unusable(f"{folder} leads to another file system, and not to the target/ of a queue of a root there")
    real, base = os.path.realpath(folder), os.path.realpath(layout.base)
    if _is_within(real, base) and not _is_within(real, os.path.realpath(layout.routing)):
        raise _Unusable(f"{folder} leads to a folder of the queue itself, {real}")
    return not is_far and not _is_within(real, os.path.realpath(root))


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False  # gone, or unreadable
