"""Views: queues that get what is published to the topics that their `underlying_topic` names.

`.dropq/views/` of the root has a note of each view, its `underlying_topic`, so that a publisher need not read every
queue's configuration, and a view that cannot be opened holds only the topics that this names. It is written before the
view appears, and again when a view is opened and its note says something else. A sweep of the root removes the note of
a queue that is gone, or is no view any more; that of a view that is away stays.

A view appears, and is forgotten, under a lock: so each view has a file. Without locks, a view that appears while an
older one of its name is forgotten may lack it for a moment: so the file is written again after the view has appeared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from dropq.config.schema import underlies
from dropq.errors import DropqError, NoSuchQueue
from dropq.format import names
from dropq.format.addresses import ancestors, topic_layout
from dropq.format.escapes import encode
from dropq.format.layout import SUBSCRIPTIONS, VIEW_LINK, RootLayout
from dropq.lifecycle import ages
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.queue_notes import is_shared, topics, why_away
from dropq.policies.lock import Lock
from dropq.storage.files import Storage
from dropq.storage.reading import exists, names_in, read_small, written_ms


def view_names(noted: Iterable[str]) -> list[str]:
    """Return which of the names in `.dropq/views/` are those of queues, in order."""
    return sorted(filter(names.can_name_queue, noted))


@contextmanager
def _alone(root: RootContext) -> Iterator[None]:
    """Keep others from making and forgetting views for a block, where there are locks."""
    with ExitStack() as stack:
        with suppress(OSError, DropqError):  # such as that this user may not: then the order of the steps must do
            lock = Lock(root.layout.views_lock, _storage(root.layout), root.timing.lock_patience)
            stack.enter_context(lock.acquire())
        yield


def show_view(root: RootContext, name: str, expression: str, move: Callable[[], None]) -> None:
    """Let a view appear by `move`, after the publishers of its topics know it: they publish to it from then on."""
    with _alone(root):
        note_view(root.layout, name, expression)
        move()
        # RACE: without locks a sweep may have found no view just before, and have removed the note.
        note_view(root.layout, name, expression)


def _storage(root: RootLayout) -> Storage:
    return Storage(file_mode=os.stat(root.path).st_mode & 0o664, lenient=True)


def note_view(root: RootLayout, name: str, expression: str) -> None:
    """Make a view known to the publishers of its topics, and which these are; everybody in the root may read it."""
    storage = _storage(root)
    if not exists(root.views):
        storage.make_folder_like(root.views, root.private)
    storage.write_small(f"{root.views}/{name}", expression.encode())


def keep_noted(view: QueueContext) -> None:
    """Note a view that was opened, unless its note is right; this user may lack the right to."""
    expression = view.config.underlying_topic
    with suppress(OSError):  # the next user who may, and opens the view, does it
        if expression is not None and noted_expression(view.root.layout, view.name) != expression:
            note_view(view.root.layout, view.name, expression)


def noted_expression(root: RootLayout, name: str) -> str:
    """Return which topics a noted view is on, by its note; "" if that is not known."""
    return (read_small(f"{root.views}/{name}") or b"").decode(errors="replace")


def forget_view(root: RootContext, name: str, storage: Storage) -> None:
    """Stop feeding a view that is gone, also by the links of a DropboxMQ.

    RACE: another view of its name may have appeared meanwhile, or appear now where there are no locks: it stays noted.
    So does one that went away, and may come back: as what it was, since a note without topics would hold all of them.
    """
    layout, known = root.layout, ""
    with _alone(root):
        if _expression(root, name) is None:
            with suppress(OSError):  # this user may not read it, and nothing is known
                known = noted_expression(layout, name)
            storage.unlink(f"{layout.views}/{name}")
        expression = _expression(root, name)
        if expression is not None:
            if expression or known:
                note_view(layout, name, expression or known)
            link_views(root)
            return
        for topic in topics(layout):
            link = f"{topic_layout(layout.path, topic).home}/{SUBSCRIPTIONS}/{encode(name)}{VIEW_LINK}"
            if os.path.islink(link):
                storage.unlink(link)


def _expression(root: RootContext, name: str) -> str | None:
    """Return which topics a queue is a view on; None if it is no view, or gone; "" if that is not known now."""
    try:
        return open_queue(root, name).config.underlying_topic
    except NoSuchQueue:
        return "" if why_away(root.layout, name) else None
    except DropqError:
        return ""


def missing_links(root: RootContext) -> Iterator[tuple[str, str]]:
    """Yield the missing links by which a DropboxMQ that publishes would feed the views, each with its destination.

    DropboxMQ takes every folder in `.subscriptions/` for a subscription, and follows links. Only a root that it shares
    needs them.
    """
    return ((link, folder) for link, folder, is_needed in _links(root) if is_needed and not exists(link))


def opened_views(root: RootContext) -> Iterator[tuple[QueueContext, str]]:
    """Yield the views that can be opened, each with its `underlying_topic`."""
    for name in view_names(names_in(root.layout.views)):
        try:
            view = open_queue(root, name)
        except DropqError:
            continue
        if (expression := view.config.underlying_topic) is not None:
            yield view, expression


def _links(root: RootContext) -> Iterator[tuple[str, str, bool]]:
    """Yield each link by which a view may be fed, the folder it leads to, and whether it feeds the view just once.

    DropboxMQ also feeds the subscriptions of the topics above: so of the topics of a view, the topmost has the link.
    """
    if not is_shared(root.layout):
        return
    for view, expression in opened_views(root):
        homes = {topic: topic_layout(root.layout.path, topic) for topic in topics(root.layout)}
        fed = {topic for topic, layout in homes.items() if underlies(expression, topic) and exists(layout.base)}
        for topic, layout in homes.items():
            link = f"{layout.home}/{SUBSCRIPTIONS}/{encode(view.name)}{VIEW_LINK}"
            yield link, view.layout.base, topic in fed and fed.isdisjoint(ancestors(topic)[1:])


def link_views(root: RootContext) -> None:
    """Make the links by which a DropboxMQ feeds the views; then remove those by which it would feed one twice."""
    storage = Storage()
    links = list(_links(root))
    for link, folder, is_needed in links:
        if is_needed and not exists(link):
            storage.make_folder(os.path.dirname(link))
            storage.link_folder(os.path.relpath(folder, os.path.dirname(link)), link)
    for link, _, is_needed in links:
        if not is_needed and os.path.islink(link):
            storage.unlink(link)


def tidy_views(root: RootContext) -> None:
    """Forget the views that are gone, or are no views any more.

    RACE: a view is known before it appears: so one that is not there is forgotten after a minute.
    """
    storage = Storage()
    with suppress(OSError, DropqError):  # `dropq doctor` names the links that are missing
        link_views(root)
    for name in view_names(names_in(root.layout.views)):
        expression = _expression(root, name)
        old = root.clock.now_ms() - written_ms(f"{root.layout.views}/{name}") > ages.DEAD_MAKER
        if expression is None and old:
            forget_view(root, name, storage)
