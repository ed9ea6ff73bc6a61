"""Self-destruction: a queue with `self_destruct` goes when its last selector and its last named subscription are gone.

docs/protocol.md has the steps. Invariant: a message is in one place at each moment. Until the queue is removed, or
kept, a crash leaves the name of a deletion that was not decided: a sweep of the root brings the queue back, and the
next one begins again.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from dataclasses import replace

from dropq.carrier.carriers import Carriers
from dropq.errors import DropqError, NoSuchQueue
from dropq.format import names
from dropq.format.addresses import layouts
from dropq.format.layout import KEEPER, WAITING, QueueLayout
from dropq.lifecycle import dead_letters, named
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.folders import begin_deletion, clear, close, deletion_names, restore
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.queue_notes import cut, forget
from dropq.lifecycle.reasons import Reasons
from dropq.policies import selectors
from dropq.routing import registry
from dropq.routing.credit_audit import all_credits
from dropq.staging import jobs
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.topics.views import forget_view
from dropq.upkeep import reassembly
from dropq.upkeep.queues import is_under_way

log = logging.getLogger("dropq")

#: The reason of a dead letter that waited in a queue when the queue destroyed itself.
REASON = "self_destruct"
#: The folders that must be the queue's own: the queue could not be brought back if they were links.
_OWN = ("home", "base", "private", "processing", *WAITING)


def sweep(context: QueueContext) -> bool:
    """Note whether anything needs a queue; destroy it, and return True, if nothing has for `self_destruct_after`."""
    layout = context.layout
    if not context.config.self_destruct or any(os.path.islink(getattr(layout, folder)) for folder in _OWN):
        return False
    try:
        registry.finish_removed(context)
        if is_needed(context):
            named.keep(context)
            return False
        if not reading.exists(layout.kept):
            return False  # it has had nothing that needed it: it is new
        context.storage.touch(layout.alone)
        if left_ms(context) > 0:
            return False
        jobs.sweep(context)
        reassembly.sweep(context)
        if _is_in_use(context):
            return False
        context = open_queue(context.root, context.name)  # its file may say otherwise by now
    except FileNotFoundError:
        if reading.exists(layout.target):
            raise
        return False  # RACE: another sweep destroyed it
    except NoSuchQueue:
        return False  # RACE: the same
    return context.config.self_destruct and _destroy(context)


def sweep_all(root: RootContext) -> Iterator[int]:
    """Sweep each queue of a root; yield for each name how many queues went, 0 or 1.

    A failure is logged, and the next sweep tries again.
    """
    for entry in list(reading.entries(root.layout.path)):
        if not names.can_name_queue(entry.name):
            continue
        try:
            there = (each for each in layouts(root.layout.path, entry.name) if not each.topic)
            if any(reading.exists(layout.kept) for layout in there):
                yield sweep(open_queue(root, entry.name))
        except (OSError, DropqError) as error:
            log.warning("%s: whether it is to destroy itself is not known: %s", entry.path, describe(error))


def is_needed(context: QueueContext) -> bool:
    """Return whether a queue has a selector, or a credit of one, or a named subscription that may be alive."""
    for folder in (context.layout.base, context.layout.private):
        reading.ask_server(folder)  # on NFS another host may have made a folder in it just now
    return bool(
        selectors.names_in(context)
        or registry.removed_in(context)
        or any(True for _ in all_credits(context.layout))
        or named.is_alive(context.layout)
    )


def left_ms(context: QueueContext) -> int:
    """Return for how many ms a queue that was found alone is kept; all of its time if it was not."""
    period = int(context.config.self_destruct_after * 1000)
    try:
        return period - (context.clock.now_ms() - reading.written_ms(context.layout.alone))
    except FileNotFoundError:
        return max(period, 1)


def _is_in_use(context: QueueContext) -> bool:
    """Return whether a message is held, carried elsewhere, or perhaps not read yet by its reader, or a job is sent."""
    layout = context.layout
    return bool(
        reading.names_in(layout.processing) - {KEEPER}
        or is_under_way(layout, None)
        or any(reading.names_in(each.path) for each in reading.entries(layout.held) if each.is_dir())
    )


def _destroy(context: QueueContext) -> bool:
    """Rename a queue away, and remove it once it is empty; return False if something needs it after all."""
    root, store, home = context.root.layout, context.storage, context.layout.home
    undecided, away = deletion_names(context.root, context.layout, context.name)
    try:
        begin_deletion(context, undecided)
    except FileNotFoundError:
        return False  # RACE: another sweep was first
    gone = _moved(context, undecided)
    # RACE: since the last check, a subscription began, a consumer claimed, a job was committed, or another sweep
    # destroyed the queue and a new one has its name. Nothing comes by the name any more: what is seen now decides.
    if is_needed(gone) or left_ms(gone) > 0 or _is_in_use(gone) or not _closed(gone.layout.processing, gone):
        restore(gone.layout, home, gone.storage)
        return False
    _empty(gone)
    Carriers(gone).run()  # what goes to other file systems
    if _has_messages(gone):
        store.unlink(gone.layout.alone)
        forget(root, context.layout.base, gone.layout.private, store)
        kept = f"{root.path}/{cut(context.name)}.deleted-{context.clock.now_ms()}"
        restore(gone.layout, kept, gone.storage)
        log.warning(
            "queue %s has destroyed itself; its messages could go nowhere, and are kept: %s", context.name, kept
        )
    else:
        store.rename_folder(undecided, away)
        clear(root, context.layout.base, context.layout.moved(away), store)
        log.info("queue %s has destroyed itself", context.name)
    if context.config.underlying_topic is not None:
        forget_view(context.root, context.name, store)
    return True


def _moved(context: QueueContext, home: str) -> QueueContext:
    """Return a queue under another name of its folder; for people it keeps its own."""
    layout = context.layout.moved(home)
    store, sidecars = context.storage.at(layout.base), context.sidecars.at(layout)
    return replace(context, layout=layout, storage=store, sidecars=sidecars, reasons=Reasons(layout.reasons, store))


def _closed(folder: str, context: QueueContext) -> bool:
    """Remove an empty folder, into which nothing can come any more; return False if it is not empty."""
    try:
        close(folder, context.storage)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _empty(gone: QueueContext) -> None:
    """Send off the messages that wait, and remove the folders in which they wait."""
    queue = gone.config.dead_letter_queue
    letters = None if queue is None else dead_letters.find_layout(gone.root.layout.path, queue)
    for state in reversed(WAITING):  # what was delayed goes to target/
        folder, stuck = gone.layout.folder(state), set[str]()
        # RACE: a send that was half-way at the rename may still come. When the folder is gone, it fails.
        while not _closed(folder, gone):
            waiting = [entry for entry in reading.entries(folder) if entry.name not in stuck]
            if not waiting:
                break
            stuck |= {entry.name for entry in waiting if not _send_off(gone, state, entry, letters)}


def _send_off(gone: QueueContext, state: str, entry: os.DirEntry[str], letters: QueueLayout | None) -> bool:
    """Return a message to where it came from, else to the dead-letter queue; return whether it went."""
    file = entry.name
    if gone.sidecars.ignored(file) or not reading.is_message_file(entry):
        return False
    try:
        if registry.return_from(gone, gone.layout.folder(state), file):
            return True
    except DropqError as error:
        log.warning("queue %s: message %s does not return to where it came from: %s", gone.name, file, error)
    if letters is None:
        return False
    try:
        Moves(gone).to_dead_letter(gone.sidecars.file(file), REASON, state=state)
    except DropqError as error:
        log.warning("queue %s: message %s is no dead letter: %s", gone.name, file, error)
        return False
    return True


def _has_messages(gone: QueueContext) -> bool:
    """Return whether a queue has messages that would be lost with it."""
    left = (reading.names_in(gone.layout.folder(state)) - {KEEPER} for state in (*WAITING, "error"))
    return any(left) or is_under_way(gone.layout, gone.config.ignore)
