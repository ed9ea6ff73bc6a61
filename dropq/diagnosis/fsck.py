"""Find what does not belong into a root or a queue, and set it aside on request; nothing is ever deleted.

Checks only read, and work on queues that are too damaged to be opened. `_repaired` alone changes something: it makes a
missing folder, with the owner and mode of the queue's own, or renames what is not a message into `.dropq/set-aside/`,
where it keeps its path.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shlex
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from dropq.config.load import load_queue
from dropq.config.schema import QueueConfig
from dropq.diagnosis import fsck_checks, selector_checks, staged_checks, topic_checks
from dropq.diagnosis.fsck_checks import Entry, ExaminedQueue, entries
from dropq.diagnosis.fsck_kinds import KINDS, Finding, Kind
from dropq.errors import ConfigError, DropqError
from dropq.format import names
from dropq.format.addresses import layouts
from dropq.format.layout import FOLDERS, PRIVATE, SUBSCRIPTIONS, TOPIC_ROOT, QueueLayout
from dropq.format.names import DELETED
from dropq.lifecycle import ages, dead_letters, ephemeral
from dropq.lifecycle.context import RootContext
from dropq.lifecycle.open_queue import context_of, open_queue
from dropq.lifecycle.queue_notes import absences, addresses, remedy, scan
from dropq.storage import reading
from dropq.storage.failures import error_context
from dropq.storage.files import Storage

__all__ = ["KINDS", "Finding", "Kind", "fsck", "fsck_root", "queues"]

#: What an error says when something cannot be listed.
UNFINISHED = "the rest was not checked, and nothing was changed"
#: What a DropboxMQ leaves of the temporary queue, or topic, of a request.
_OF_REQUEST = re.compile(r"temp-.+\.deleted-[0-9]+")
#: Folders of a root that are no queues and belong there.
_KNOWN = ("dropboxmq", TOPIC_ROOT)
#: A command for a queue in the sentence of a kind of finding.
_OF_QUEUE = re.compile("(`dropq [a-z]+ )QUEUE")


def fsck(root: RootContext, name: str, *, repair: bool = False) -> list[Finding]:
    """Find what does not belong into a queue, however damaged it is; NoSuchQueue if nothing looks like a queue.

    With `repair`, it makes missing folders, and sets aside what is certainly not a message.
    """
    layout = _layout(root, name) or open_queue(root, name).layout
    config, found = _config(root, name, layout)
    settings = config or QueueConfig()
    store = Storage(settings.durability, file_mode=settings.file_mode, dir_mode=settings.dir_mode)
    with error_context(UNFINISHED):
        context = context_of(root, name, layout, settings, store)
        examined = ExaminedQueue(context, config, root.clock.now_ms())
        linked = [fsck_checks.about("linked-folder", path) for path in layout.private_folders if os.path.islink(path)]
        checks = (
            *fsck_checks.CHECKS,
            *staged_checks.CHECKS,
            topic_checks.examine_topic,
            selector_checks.examine_selectors,
        )
        found += linked or chain.from_iterable(check(examined) for check in checks)
        own = None if config is None else config.dead_letter_queue
        if own not in _letters_of_root(root):
            found += _absent_letters(root, layout.config_file, own)
    found = [_with_queue(finding, name) for finding in found]
    if not repair:
        return [_repairable(finding, f"dropq fsck {shlex.quote(name)} --repair") for finding in found]
    repaired = [_repaired(finding, layout.base, store) for finding in found]
    if count := sum(finding.repaired for finding in repaired):
        with suppress(OSError, DropqError):  # what is left may keep it from being opened
            open_queue(root, name).log.act("repaired", count=count)
    return repaired


def fsck_root(root: RootContext, *, repair: bool = False) -> list[Finding]:
    """Find what does not belong into a root; its queues are checked one by one, see `queues`.

    With `repair`, it sets aside what a process left that died while it made a queue or wrote a small file.
    """
    layout, now = root.layout, root.clock.now_ms()
    with error_context(UNFINISHED):
        found = list(fsck_checks.temporaries_in((layout.path, layout.private, layout.meta), now))
        found += [*_not_queues(root, now), *_left_queues(root, now), *_sidecars(root, now)]
        for queue in _letters_of_root(root):
            found += _absent_letters(root, layout.config_file, queue)
        found += [*_deleted_topics(f"{layout.path}/{TOPIC_ROOT}", now), *topic_checks.examine_topic_root(root, now)]
        found += selector_checks.examine_tokens(layout, now)
    found = list(_summed_up(found))
    if not repair:
        return [_repairable(finding, "dropq fsck --repair") for finding in found]
    return [_repaired(finding, layout.path, Storage()) for finding in found]


def queues(root: RootContext) -> list[str]:
    """Return the names of all queues, in order; also of those that are too damaged to be opened."""
    with error_context(UNFINISHED):
        there = set(addresses(root.layout))
    return sorted(name for name in there if _layout(root, name) is not None)


# -- opening what cannot be opened -----------------------------------------------------------------------------


def _layout(root: RootContext, name: str) -> QueueLayout | None:
    """Return where a queue's folders are, or should be; None when nothing looks like a queue."""
    possible = layouts(root.layout.path, name)
    whole = [layout for layout in possible if os.path.isdir(layout.target)]
    damaged = [
        layout
        for layout in possible
        if sum(map(os.path.isdir, map(layout.folder, FOLDERS))) > 1 or os.path.lexists(layout.config_file)
    ]
    return next(iter(whole + damaged), None)


def _config(root: RootContext, name: str, layout: QueueLayout) -> tuple[QueueConfig | None, list[Finding]]:
    config = None
    try:
        config = load_queue(name, root.config, root.layout.config_file, layout)
        open_queue(root, name)  # this host alone may refuse it, as where it does not know a group
    except ConfigError as error:
        return config, [Finding("configuration", layout.config_file, "; ".join(str(error).splitlines()))]
    except DropqError:
        pass  # the checks find what is wrong with its folders
    return config, []


# -- the root ----------------------------------------------------------------------------------------------------


def _not_queues(root: RootContext, now: int) -> Iterator[Finding]:
    """Find folders that are no queues, and what is left of queues that were half made or half deleted."""
    known = {*queues(root), *_KNOWN}
    for entry in entries(root.layout.path, now):
        if (found := topic_checks.half_done(root, entry)) is not None:
            yield found
        elif not entry.name.startswith(".") and entry.name not in known and os.path.isdir(entry.path):
            yield entry.finding("deleted-queue" if DELETED.search(entry.name) else "not-a-queue")


def _letters_of_root(root: RootContext) -> set[str]:
    """Return the dead-letter queues that dropq.toml names."""
    named = (root.config.dead_letter_queue, root.config.defaults.get("dead_letter_queue"))
    return {queue for queue in named if isinstance(queue, str)}


def _absent_letters(root: RootContext, file: str, queue: str | None) -> Iterator[Finding]:
    """Find a dead-letter queue that a configuration file names, and that is not there."""
    if queue is not None and dead_letters.find_layout(root.layout.path, queue) is None:
        of_root = file == root.layout.config_file and queue == root.config.dead_letter_queue
        sends = ", and sends to queues that do not exist are refused" if of_root else ""
        says = f"{KINDS['absent-letters'].says}{sends}; {remedy(root.layout, queue)}"
        yield Finding("absent-letters", file, says)


def _deleted_topics(folder: str, now: int) -> Iterator[Finding]:
    """Find topics and subscriptions that a DropboxMQ deleted, in a folder and in the topics below it."""
    for entry in entries(folder, now):
        if not stat.S_ISDIR(entry.status.st_mode):
            continue
        if DELETED.search(entry.name):
            yield entry.finding("deleted-queue")
        elif not entry.name.startswith("."):
            yield from _deleted_topics(entry.path, now)
        elif entry.name == SUBSCRIPTIONS:
            yield from (sub.finding("deleted-queue") for sub in entries(entry.path, now) if DELETED.search(sub.name))


def _summed_up(found: list[Finding]) -> Iterator[Finding]:
    """Yield findings; sum up the temporary queues that a DropboxMQ deleted in one finding: it leaves one a request."""
    of_requests = list[Finding]()
    for each in found:
        if each.kind == "deleted-queue" and _OF_REQUEST.match(os.path.basename(each.path)):
            of_requests.append(each)
        else:
            yield each
    if of_requests:
        first = min(of_requests, key=lambda each: each.path)
        others = f"this and {len(of_requests) - 1} other temporary queues: " if len(of_requests) > 1 else ""
        yield replace(first, detail=f"{others}{first.detail}")


def _left_queues(root: RootContext, now: int) -> Iterator[Finding]:
    """Find temporary queues whose requesters are dead, or, where locks do not work, that nobody has touched."""
    for entry in entries(root.layout.path, now):
        if not names.is_temporary(entry.name):
            continue
        for layout in layouts(root.layout.path, entry.name):
            with suppress(PermissionError):  # another user's, whose own sweeps see to it
                yield from _left_queue(root, entry, layout)


def _left_queue(root: RootContext, entry: Entry, layout: QueueLayout) -> Iterator[Finding]:
    with ephemeral.left(layout, root.clock) as is_left:
        pass
    if is_left:
        yield entry.finding("left-queue")
        return
    with ephemeral.left(layout, root.clock, fsck_checks.ABANDONED / 1000) as is_old:
        pass
    if is_old:
        yield entry.finding(
            "left-queue",
            "the requester of this temporary queue has not touched it for over a day, and no lock tells here whether "
            "it is alive: `dropq sweep --ephemeral-older-than 1d` removes the queue",
        )


def _sidecars(root: RootContext, now: int) -> Iterator[Finding]:
    """Find sidecars that cannot be read, old sidecars to which no name refers, and queues that are not there."""
    there = [entry for entry in entries(root.layout.meta, now) if not entry.name.startswith(".")]
    every = {entry.name.removesuffix(".json") for entry in there}
    used: Collection[str] = every  # maybe by a queue that is not there, or cannot be listed
    try:
        below = scan(root.layout.path)
    except OSError:
        pass
    else:
        away = [Finding("absent-queue", path, says) for path, says in absences(root.layout, below)]
        yield from away
        used = every if away else below.references
    for entry in there:
        if kind := fsck_checks.sidecar_problem(entry.path):
            yield entry.finding(kind)
        elif entry.name.removesuffix(".json") not in used and entry.age > ages.SIDECAR:
            yield entry.finding("unreferenced-sidecar")


# -- what to do, and repair -------------------------------------------------------------------------------------


def _with_queue(finding: Finding, name: str) -> Finding:
    detail = _OF_QUEUE.sub(lambda match: match[1] + shlex.quote(name), finding.detail)
    return replace(finding, detail=detail)


def _repairable(finding: Finding, command: str) -> Finding:
    does = {"make": "makes it", "set aside": "sets it aside"}.get(KINDS[finding.kind].repair)
    return finding if does is None else replace(finding, detail=f"{finding.detail}; `{command}` {does}")


def _repaired(finding: Finding, base: str, store: Storage) -> Finding:
    """Repair what was found, where that is possible; return the finding with the outcome."""
    try:
        match KINDS[finding.kind].repair:
            case "make":
                store.make_folder_like(finding.path, base)
                done = "made"
            case "set aside":
                done = f"set aside: {_set_aside(finding, base, store)}"
            case _:
                return finding
    except OSError as error:
        return replace(finding, detail=f"{finding.detail}; not repaired: {error.strerror or error}")
    return replace(finding, detail=f"{finding.detail}; {done}", repaired=True)


def _set_aside(finding: Finding, base: str, store: Storage) -> str:
    """Rename what was found into set-aside/, under its path below `base`; return its new path."""
    aside = f"{base}/{PRIVATE}/set-aside/{os.path.relpath(finding.path, base)}"
    folder, name = os.path.split(aside)
    if os.path.realpath(folder) != folder.replace(base, os.path.realpath(base), 1):
        raise OSError(errno.ELOOP, "a symbolic link leads elsewhere", folder)
    try:
        _move(finding.path, aside, store)
    except FileExistsError:
        aside = f"{folder}/{secrets.token_hex(6)}/{name}"
        _move(finding.path, aside, store)
    if reading.inode(aside) != finding.inode:
        # RACE: somebody put another file in its place since it was listed. That file goes back.
        _move(aside, finding.path, store)
        raise OSError("another file lies there now")
    store.sync(os.path.dirname(aside), os.path.dirname(finding.path))
    return aside


def _move(source: str, destination: str, store: Storage) -> None:
    store.make_folder(os.path.dirname(destination))
    is_folder = os.path.isdir(source) and not os.path.islink(source)
    (store.move_folder if is_folder else store.move)(source, destination)
