"""Views: queues that get what is published to the topics that their `underlying_topic` names.

What is a view stands in its queue.toml. `.dropq/views/` of the root has an empty file for each, called after the queue,
so that a publisher need not read every queue's configuration: it is made before the view appears, and whenever a view
is opened. A file whose queue is gone, or is no view any more, is removed by a sweep of the root.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

from dropq.config.schema import underlies
from dropq.errors import DropqError, NoSuchQueue
from dropq.format import names
from dropq.format.addresses import ancestors, topic_layout
from dropq.format.escapes import encode
from dropq.format.layout import SUBSCRIPTIONS, VIEW_LINK, RootLayout
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.known_queues import topics
from dropq.lifecycle.open_queue import open_queue
from dropq.storage.files import Storage
from dropq.storage.reading import exists, names_in, written_ms

#: Milliseconds after which a view that is known, and not there, is forgotten.
UNSEEN_AGE = 60_000


def view_names(noted: Iterable[str]) -> list[str]:
    """Return which of the names in `.dropq/views/` are those of queues, in order."""
    return sorted(filter(names.can_name_queue, noted))


def note_view(root: RootLayout, name: str, storage: Storage) -> None:
    """Make a view known to the publishers of its topics."""
    if not exists(f"{root.views}/{name}"):
        storage.make_folder_like(root.views, root.private)
        storage.touch(f"{root.views}/{name}")


def forget_view(root: RootContext, name: str, storage: Storage) -> None:
    """Stop feeding a view that is gone, also by the links of a DropboxMQ.

    RACE: another view of its name may have appeared meanwhile: it is noted again at once.
    """
    layout = root.layout
    storage.unlink(f"{layout.views}/{name}")
    if _expression(root, name) is not None:
        note_view(layout, name, storage)
        link_views(root)
        return
    for topic in topics(layout):
        link = f"{topic_layout(layout.path, topic).home}/{SUBSCRIPTIONS}/{encode(name)}{VIEW_LINK}"
        if os.path.islink(link):
            storage.unlink(link)


def _expression(root: RootContext, name: str) -> str | None:
    """Return which topics a queue is a view on; None if it is no view, or gone."""
    try:
        return open_queue(root, name).config.underlying_topic
    except NoSuchQueue:
        return None


def missing_links(root: RootContext) -> Iterator[tuple[str, str]]:
    """Yield the links by which a DropboxMQ that publishes would feed the views, where they are missing.

    DropboxMQ takes every folder in `.subscriptions/` for a subscription, and follows links. Only a root that it shares
    needs them.

    Yields:
        The path of the link, and the folder that it leads to.
    """
    return ((link, folder) for link, folder, is_needed in _links(root) if is_needed and not exists(link))


def _links(root: RootContext) -> Iterator[tuple[str, str, bool]]:
    """Yield each link by which a view may be fed, the folder it leads to, and whether it feeds the view just once.

    DropboxMQ also feeds the subscriptions of the topics above: so of the topics of a view, the topmost has the link.
    """
    if not exists(f"{root.layout.path}/dropboxmq"):
        return
    for name in view_names(names_in(root.layout.views)):
        try:
            view = open_queue(root, name)
        except DropqError:
            continue
        expression = view.config.underlying_topic
        if expression is None:
            continue
        homes = {topic: topic_layout(root.layout.path, topic) for topic in topics(root.layout)}
        fed = {topic for topic, layout in homes.items() if underlies(expression, topic) and exists(layout.base)}
        for topic, layout in homes.items():
            link = f"{layout.home}/{SUBSCRIPTIONS}/{encode(name)}{VIEW_LINK}"
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
        old = root.clock.now_ms() - written_ms(f"{root.layout.views}/{name}") > UNSEEN_AGE
        if expression is None and old:
            forget_view(root, name, storage)


def is_view(context: QueueContext) -> bool:
    """Return whether a queue is a view on topics."""
    return context.config.underlying_topic is not None
