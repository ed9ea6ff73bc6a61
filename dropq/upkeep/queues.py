"""Making a root; making a queue and removing it, each by one rename from, or to, a hidden folder.

A delete is undecided until its queue proves empty under the hidden name. The next sweep of the root undoes a delete
that died before that.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dropq.config.load import toml_text, validate_options
from dropq.errors import QueueExists, StorageError
from dropq.format import names
from dropq.format.layout import FOLDERS, KEEPER, UNSETTLED, QueueLayout, RootLayout
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.known_queues import forget, make_known
from dropq.lifecycle.sidecars import collect
from dropq.policies import routes
from dropq.queue import browsing
from dropq.queue.open_queue import find_layout, group_number, open_queue
from dropq.staging import jobs
from dropq.storage import reading
from dropq.storage.failures import describe, error_context, storage_error
from dropq.storage.files import Storage, refuse_links
from dropq.upkeep.sweep import SweepReport

log = logging.getLogger("dropq")

#: Milliseconds after which a delete that is undecided counts as dead.
UNDECIDED_LIMIT = 60_000

_UNDECIDED = re.compile(r"\.(?P<name>.+)\.deleting-(?P<since>[0-9]+)-[0-9a-f]{6}", re.DOTALL)

#: States whose messages keep a queue from being deleted.
TO_WORK_ON = ("working", *UNSETTLED)


def create_root(path: str, *, dropboxmq: bool) -> None:
    """Make a directory a root, as `Root.create` says."""
    layout = RootLayout(path)
    style = 'reply_to_style = "typed"\n' if dropboxmq else ""
    refuse_links((layout.private, layout.meta, layout.queues))
    try:
        Storage().make_folder(layout.path)
        store = _private_store(layout.path)
        for folder in (layout.meta, *(layout.dropboxmq if dropboxmq else ())):
            store.make_folder(folder)
        store.touch(layout.clock)
        reading.ask_server(layout.path)
        if not reading.exists(layout.config_file):
            store.write_small(layout.config_file, f"format = 1\n{style}".encode())
    except OSError as error:
        raise storage_error(error, "the root was not made") from error


def create(root: RootContext, name: str, options: Mapping[str, Any], *, dropboxmq: bool) -> None:
    """Make a queue, as `Root.create_queue` says."""
    home = f"{root.layout.path}/{name}"
    where, root_file = f"options of queue {name}", root.layout.config_file
    config = validate_options(options, where, root=root.config, root_file=root_file)
    group = group_number(config.group)
    store = Storage(config.durability, file_mode=config.file_mode, dir_mode=config.dir_mode, group=group)
    hidden = f"{root.layout.path}/.{_cut(name)}.creating-{os.urandom(6).hex()}"
    layout = (QueueLayout.incoming if dropboxmq else QueueLayout.flat)(hidden)
    try:
        folders = layout.first_folders
        for folder in folders:
            store.make_folder(folder, parents=False, passing=True)  # synced below, each parent once
        store.touch(layout.created)  # its modification time is when the queue was made
        if options:
            store.write_small(layout.config_file, toml_text(options).encode())
        store.sync(*dict.fromkeys(os.path.dirname(folder) for folder in folders[1:]))
        store.move_folder(hidden, home)
    except OSError as error:
        with suppress(OSError):  # fsck finds what cannot be removed now
            store.remove_tree(hidden)
        if isinstance(error, FileExistsError):
            if find_layout(root.layout.path, name) is None:
                raise QueueExists(
                    f"queue {name!r} was not made: {home} is there, and is no queue; move it away, or give another name"
                ) from error
            raise QueueExists(f"queue {name!r} is there already: {home}") from error
        raise storage_error(error, f"queue {name!r} was not made") from error
    with error_context(f"queue {name!r} is made, but a power cut may take it back"):
        store.sync(root.layout.path)
    with suppress(OSError):  # the next sweep of the root notes a queue that cannot be noted now
        make_known(root.layout, _moved(layout, home).private, store)


def delete(root: RootContext, name: str, *, force: bool) -> None:
    """Remove a queue, as `Root.delete_queue` says."""
    context = open_queue(root, name)
    layout = context.layout
    if not force:
        with context.error_context("nothing was removed"):
            jobs.sweep(context)  # what was committed and is not sent yet waits to be worked on
        refuse_unsettled(context)
    mark = f"{root.clock.now_ms()}-{os.urandom(3).hex()}"
    hidden = f"{root.layout.path}/.{_cut(name)}"
    away = f"{hidden}.deleted-{mark}"
    store = context.storage
    try:
        if force:
            store.rename_folder(layout.home, away)
        else:
            undecided = f"{hidden}.deleting-{mark}"
            if _cut(name) != name:
                store.make_folder(layout.private)
                store.write_small(layout.deleting, os.fsencode(name))  # the folder has only a part of it
            store.rename_folder(layout.home, undecided)
            _restore_if_unsettled(context, _moved(layout, undecided))
            store.rename_folder(undecided, away)
        gone = _moved(layout, away)
        forget(root.layout, layout.base, gone.private, store)
        for folder in (gone.target, gone.delayed):
            store.drain(folder)
        store.remove_tree(os.path.realpath(away))  # where the queue is a link, what it leads to goes first
        store.remove_tree(away)
    except OSError as error:
        raise storage_error(error, f"queue {name!r} is not wholly removed: what is left is in {away}") from error


def refuse_unsettled(context: QueueContext) -> None:
    """Raise StorageError if a queue has messages to work on; nothing is changed."""
    with context.error_context("nothing was changed"):
        counts = browsing.counts(context)
        routed = routes.routed(context.layout, context.config.ignore)
    waiting = {state: counts[state] for state in TO_WORK_ON if counts.get(state)}
    waiting |= {f"routing/{name}": count for name, count in routed.items()}
    if waiting:
        listed = ", ".join(f"{count} in {state}" for state, count in waiting.items())
        raise StorageError(
            f"queue {context.name!r} has messages to work on ({listed}): wait until they are done, or give --force; "
            "nothing was removed",
            path=context.layout.home,
            errno=errno.ENOTEMPTY,
        )


def _restore_if_unsettled(context: QueueContext, gone: QueueLayout) -> None:
    """RACE: a send that returned before the rename is not lost: the queue comes back."""
    name, home, store = context.name, context.layout.home, context.storage
    try:
        for folder in (gone.target, gone.delayed, gone.processing):
            store.unlink(f"{folder}/{KEEPER}")
            store.remove_folder(folder)  # from here on whatever was half-way into it fails
        if jobs.is_committed(gone.working):
            raise OSError(errno.ENOTEMPTY, "a job was committed", gone.working)
        if routes.routed(gone, context.config.ignore):
            raise OSError(errno.ENOTEMPTY, "a consumer routed a message", gone.routing)
    except OSError:
        for folder in (gone.target, gone.processing):
            store.make_folder(folder)
        store.move_folder(gone.home, home)
        jobs.sweep(context)
        refuse_unsettled(context)
        raise StorageError(
            f"queue {name!r} holds what is no message in target/ or processing/: `dropq fsck {name} --repair` sets "
            "it aside, or force it; nothing was removed",
            path=home,
            errno=errno.ENOTEMPTY,
        ) from None


def tidy(root: RootContext) -> SweepReport:
    """Do what a sweep does outside of the queues, as `Root.tidy` says."""
    with error_context("the queues are swept; the next sweep goes on with what is the root's"):
        _undo_cut_short_deletes(root)
        return SweepReport(sidecars=sum(collect(root.layout.path, root.layout.meta, Storage(), root.clock)))


def _undo_cut_short_deletes(root: RootContext) -> None:
    """Bring back queues whose delete died before it was decided: a send may have returned just before it."""
    for entry in list(reading.entries(root.layout.path)):
        found = _UNDECIDED.fullmatch(entry.name)
        if found is None or root.clock.now_ms() - int(found["since"]) < UNDECIDED_LIMIT or entry.is_symlink():
            continue
        store = _private_store(entry.path)
        flat, incoming = QueueLayout.candidates(entry.path)
        layout = incoming if os.path.isdir(incoming.base) else flat
        try:
            for folder in FOLDERS:
                store.make_folder(layout.folder(folder))
            name = _whole_name(layout, found["name"])
            store.move_folder(entry.path, f"{root.layout.path}/{name}")
        except OSError as error:
            why = describe(error)
            log.warning("%s: a delete was cut short, and it cannot be undone: %s", entry.path, why)
        else:
            log.warning("queue %s: its delete was cut short, and is undone", name)


def _moved(layout: QueueLayout, home: str) -> QueueLayout:
    return QueueLayout(home, layout.base.replace(layout.home, home, 1))


def _cut(name: str) -> str:
    """Cut a queue's name, so that a file name has room for what is put around it."""
    return os.fsencode(name)[:200].decode(errors="ignore")


def _whole_name(layout: QueueLayout, cut: str) -> str:
    """Return the name of a queue that is being deleted; its folder may have only a part of it."""
    name = os.fsdecode(reading.read_small(layout.deleting) or b"")
    return name if names.can_name_queue(name) and _cut(name) == cut else cut


def _private_store(root: str) -> Storage:
    """Return a storage for a root's private files: every user who may write in the root may write in them."""
    mode = os.stat(root).st_mode & 0o2775
    return Storage(file_mode=mode & 0o664, dir_mode=mode, lenient=True)
