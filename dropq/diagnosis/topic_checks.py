"""What health, explain, fsck and doctor find out about topics; everything here only looks."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress

from dropq.config.schema import underlies
from dropq.diagnosis.doctor_kinds import Diagnosis
from dropq.diagnosis.fsck_checks import Entry, ExaminedQueue, entries
from dropq.diagnosis.fsck_kinds import KINDS, Finding
from dropq.errors import DropqError
from dropq.format.addresses import SubscriptionName, topic_layout
from dropq.format.layout import FOLDERS, SUBSCRIPTIONS, QueueLayout
from dropq.format.names import DELETED
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.decision import Decision
from dropq.lifecycle.open_queue import find_layout
from dropq.lifecycle.queue_notes import subscription_folders, topics
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.topics.views import missing_links, opened_views
from dropq.upkeep import deletion

_HALF_MADE = re.compile(r"\..+\.creating-[0-9a-f]{12}", re.DOTALL)
_HALF_DELETED = re.compile(r"\..+\.delet(?:ed|ing)-[0-9]+(-[0-9a-f]+)?", re.DOTALL)


# -- health --------------------------------------------------------------------------------------------


def unlisted(context: QueueContext) -> str:
    """Return why the subscriptions of a topic cannot be listed; "" if they can."""
    try:
        list(subscription_folders(context.root.layout, context.name))
    except OSError as error:
        return describe(error)
    return ""


# -- fsck ----------------------------------------------------------------------------------------------------------


def examine_topic(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find what does not belong into a topic: among its subscriptions, and in the folders where these are made."""
    layout = queue.layout
    if not layout.is_topic:
        return
    for entry in entries(f"{layout.topic}/{SUBSCRIPTIONS}", queue.now):
        yield from _subscription(entry)
    for folder in (layout.new, f"{layout.private}/deleting"):
        for entry in entries(folder, queue.now):
            yield entry.finding_at_rest("leftover")


def _subscription(entry: Entry) -> Iterator[Finding]:
    """Find files and folders among the subscriptions of a topic that are no subscriptions."""
    mode = entry.status.st_mode
    if stat.S_ISLNK(mode):
        if not os.path.isdir(f"{entry.path}/target"):
            yield entry.finding("broken-view-link")
    elif DELETED.search(entry.name) or not stat.S_ISDIR(mode):
        return  # fsck of the root reports what was deleted; a file does no harm there
    elif SubscriptionName.of(entry.name) is None:
        yield entry.finding("not-a-subscription")
    elif reading.exists(QueueLayout(entry.path, entry.path).removed):
        text = "this subscription was removed while a DropboxMQ wrote to it: `dropq sweep` removes the folder"
        yield entry.finding_at_rest("leftover", text)
    elif missing := [name for name in FOLDERS if not os.path.isdir(f"{entry.path}/{name}")]:
        text = f"{KINDS['half-made-subscription'].says}: it has no {', '.join(f'{name}/' for name in missing)}"
        yield entry.finding_at_rest("half-made-subscription", text)


def examine_topic_root(root: RootContext, now: int) -> Iterator[Finding]:
    """Find what is left of topics that were half made or half deleted."""
    for topic in topics(root.layout):
        for entry in entries(topic_layout(root.layout.path, topic).home, now):
            if (found := half_done(root, entry)) is not None:
                yield found


def half_done(root: RootContext, entry: Entry) -> Finding | None:
    """Find a queue, or what is left of one, that was half made or half deleted."""
    mode, found = entry.status.st_mode, Decision(False, "closed")
    with suppress(PermissionError):  # another user's, whose sweep does it
        found = deletion.decide(root, entry.path)
    if not stat.S_ISLNK(mode) and (found.allowed or found.why == "undecided"):
        return entry.finding_at_rest("unfinished-deletion")
    if _HALF_MADE.fullmatch(entry.name):
        return entry.finding_at_rest("half-made-queue")
    if not _HALF_DELETED.fullmatch(entry.name):
        return None
    content = "it is a symbolic link" if stat.S_ISLNK(mode) else "it is no folder"
    if stat.S_ISDIR(mode):
        content = f"it holds {sum(len(files) for _, _, files in os.walk(entry.path))} files"
    return entry.finding_at_rest("half-deleted-queue", f"{KINDS['half-deleted-queue'].says}; {content}")


# -- doctor --------------------------------------------------------------------------------------------------------


def diagnose(root: RootContext) -> Iterator[Diagnosis]:
    """Report what is wrong between topics, views and queues."""
    path = root.layout.path
    for topic in sorted(topics(root.layout)):
        layout = topic_layout(path, topic)
        found = find_layout(path, topic)
        if found is not None and not found.is_topic and reading.exists(layout.target):
            yield Diagnosis("two-of-a-name", layout.home, f"{found.home} is a queue of the same name")
        try:
            subscriptions = reading.subfolders(f"{layout.home}/{SUBSCRIPTIONS}", shared=True)
        except OSError as error:
            yield Diagnosis("unusable-queue", layout.home, f"its subscriptions: {describe(error)}", topic)
            continue
        for entry in subscriptions:
            home = f"{layout.home}/{SUBSCRIPTIONS}/{entry.name}"
            with suppress(OSError):
                if reading.exists(layout.base) and reading.device(home) != reading.device(layout.base):
                    yield Diagnosis("far-receiver", home, f"topic {topic} lies on another file system")
    for link, folder in missing_links(root):
        yield Diagnosis("missing-view-link", link, f"{link} should lead to {folder}")
    for view, expression in opened_views(root):
        yield from _view(root, view, expression)


def _view(root: RootContext, view: QueueContext, expression: str) -> Iterator[Diagnosis]:
    for topic in sorted(topics(root.layout)):
        layout = topic_layout(root.layout.path, topic)
        with suppress(DropqError, OSError):
            if not underlies(expression, topic) or not reading.exists(layout.target):
                continue
            if reading.device(layout.base) != reading.device(view.layout.base):
                yield Diagnosis("far-receiver", view.layout.home, f"topic {topic} lies on another file system")
    target = view.config.default_publish_target or expression
    found = find_layout(root.layout.path, target)
    if found is None or not found.is_topic:
        why = "is not there" if found is None else f"is a queue, {found.home}"
        yield Diagnosis("no-topic", view.layout.home, f"the view is on topic {target}, which {why}")
