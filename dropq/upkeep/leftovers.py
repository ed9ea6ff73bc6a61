"""What crashes leave in a queue's private folder, or in selectors/, and what removes it when nothing needs it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from dropq.config.selectors import token_in
from dropq.format.claims import is_owner, subscription_of
from dropq.format.credits import is_token
from dropq.format.layout import GONE_PREFIX, UNFINISHED, WITH_REASON
from dropq.lifecycle import ages, early_acks
from dropq.lifecycle.claims import claims_in, claims_of
from dropq.lifecycle.context import QueueContext
from dropq.policies import barrier, fair_share
from dropq.policies.lock import PolicyLock
from dropq.policies.selectors import LAST
from dropq.staging import destinations
from dropq.storage import liveness, reading

#: A private file, or a folder of such files, and what removes it if nothing needs it; that returns whether it did.
Leftover = tuple[str, Callable[[], int]]


def leftovers(context: QueueContext) -> Iterator[Leftover]:
    """Yield what may be a leftover."""
    layout = context.layout
    for kind in KINDS:
        for entry in reading.entries(getattr(layout, kind.folder)):
            yield entry.path, partial(_remove_old, context, kind, entry)
    yield layout.turns, partial(fair_share.clear, context, liveness.known(layout.consumers))
    yield from _held(context)
    for state in WITH_REASON:
        for path in context.reasons.unmatched(state):
            yield path or layout.reasons, partial(_remove_reason, context, state, path)


class Kind(NamedTuple):
    """What may lie in a folder of a queue: `remove` takes it away, once it is older than `age` ms, if nothing needs it.

    Its `row` is that in *What is removed* of docs/protocol.md.
    """

    row: str
    folder: str
    age: int
    remove: Callable[[QueueContext, os.DirEntry[str]], int]


def _remove_old(context: QueueContext, kind: Kind, entry: os.DirEntry[str]) -> int:
    is_young = kind.age and context.age_ms(entry.path) <= kind.age
    return 0 if is_young else kind.remove(context, entry)


def _remove_given_up_name(context: QueueContext, entry: os.DirEntry[str]) -> bool:
    if not entry.name.startswith(GONE_PREFIX):
        return False
    context.storage.remove_tree(entry.path)
    return True


def _remove_receiver(context: QueueContext, entry: os.DirEntry[str]) -> bool:
    """Remove the file of a receiver that is gone, or a draft of such a file."""
    is_draft, root = entry.name.startswith("."), context.root.layout.path
    if not context.layout.is_topic or (not is_draft and destinations.is_needed(root, context.layout, entry.name)):
        return False
    return context.storage.unlink(entry.path)


def _remove_sign_of_life(context: QueueContext, entry: os.DirEntry[str]) -> bool:
    """Remove a sign of life that never appeared, or that has another mount's lock while its subscription holds nothing.

    A subscription that is alive all the same makes it again before its next claim.
    """
    if entry.name.startswith(".nfs"):
        return False
    if not entry.name.startswith("."):
        if liveness.is_verifiable(context.layout.consumers, entry.name):
            return False
        if claims_of(context, entry.name) or entry.name in barrier.sharers(context):
            return False
    return context.storage.unlink(entry.path)


def _remove_stream(context: QueueContext, entry: os.DirEntry[str]) -> bool:
    if not entry.is_dir(follow_symlinks=False):
        return False
    if any(context.age_ms(each.path) <= ages.STREAM for each in reading.entries(entry.path)):
        return False
    context.storage.remove_tree(entry.path)
    return True


def _remove_ack(context: QueueContext, entry: os.DirEntry[str]) -> bool:
    # RACE: an ack that is given again at this moment may go, too.
    return early_acks.is_over(context, entry.name) and context.storage.unlink(entry.path)


def _remove_unfinished(context: QueueContext, entry: os.DirEntry[str]) -> bool:
    """Remove a small file whose writer was killed before the file had its own name."""
    is_one = UNFINISHED.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
    return bool(is_one) and context.storage.unlink(entry.path)


def _clear_credits(context: QueueContext, folder: os.DirEntry[str]) -> int:
    """Remove unfinished files beside the credits of a token; remove the folder if no selector has the token any more.

    No credit is removed: that is for a credit audit.
    """
    is_link = os.path.islink(context.layout.credits) or not folder.is_dir(follow_symlinks=False)
    if is_link or not is_token(folder.name):
        return 0
    removed = sum(_remove_old(context, UNFINISHED_FILE, entry) for entry in reading.entries(folder.path))
    if context.age_ms(folder.path) <= ages.LEFTOVER or _may_be_needed(context, folder):
        return removed
    # RACE: a router with a selector's file that was put back makes the folder and the mark again, under the same lock.
    with PolicyLock(context).held(lambda: None) as locked:
        if not locked or _may_be_needed(context, folder):
            return removed
        context.storage.unlink(f"{folder.path}/{LAST}")
        context.storage.remove_folder(folder.path)
    return removed + 1


def _may_be_needed(context: QueueContext, folder: os.DirEntry[str]) -> bool:
    """Return whether a folder of credits has more than the mark in it, or a selector's file has its token."""
    if reading.names_in(folder.path) - {LAST}:
        return True
    files = (entry for entry in reading.entries(context.layout.selectors) if entry.is_file())
    return any(token_in(reading.read_small(file.path) or b"") == folder.name for file in files)


def _held(context: QueueContext) -> Iterator[Leftover]:
    """Yield what holders have of messages that are not claimed any more."""
    kept = list(reading.entries(context.layout.held))
    # RACE: a holder is known before it claims, and has its claim before a folder in held/. Asked for in this order, a
    # folder without either is of a holder that is gone.
    claimed = {claim.owner for claim in claims_in(context)} if kept else set()
    known = liveness.known(context.layout.consumers) if kept else frozenset()
    for entry in kept:
        if is_owner(entry.name) and entry.name not in claimed:
            remove = _remove_empty if subscription_of(entry.name) in known else _remove_held
            yield entry.path, partial(remove, context, entry)


def _remove_held(context: QueueContext, entry: os.DirEntry[str]) -> bool:
    """Remove what a dead consumer held.

    What was delivered at most once, without a history, stays for a day: its holder may yet read it.
    """
    if _holds_the_only_copy(entry) and context.age_ms(entry.path) <= ages.LEFTOVER:
        return False
    context.storage.remove_tree(entry.path)
    return True


def _remove_empty(context: QueueContext, folder: os.DirEntry[str]) -> bool:
    """Remove a folder that has been empty for a while; return False for any other.

    RACE: its holder may be about to put a message there, if it was stopped for an hour in between: then that is
    refused, and the message goes back.
    """
    try:
        is_folder = folder.is_dir(follow_symlinks=False)
        if not is_folder or context.age_ms(folder.path) <= ages.EMPTY_HELD or reading.names_in(folder.path):
            return False
        context.storage.remove_folder(folder.path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _holds_the_only_copy(folder: os.DirEntry[str]) -> bool:
    try:
        return folder.is_dir(follow_symlinks=False) and any(
            entry.stat(follow_symlinks=False).st_nlink == 1 for entry in reading.entries(folder.path)
        )
    except OSError:
        return False  # RACE: its reader, or another sweep, removed it


def _remove_reason(context: QueueContext, state: str, path: str | None) -> bool:
    """Remove the reason of a file that is gone; in a copied root, file it by its file's new inode."""
    if path is None or context.age_ms(path) <= ages.LEFTOVER or context.reasons.refile(state, path):
        return False
    return context.storage.unlink(path)


UNFINISHED_FILE = Kind("`.gone-*`", "selectors", ages.LEFTOVER, _remove_unfinished)

#: What lies under the names of folders of the queue.
KINDS = (
    Kind("`.gone-*`", "private", ages.LEFTOVER, _remove_given_up_name),
    Kind("`consumers/CLIENT-RANDOM`", "consumers", ages.LEFTOVER, _remove_sign_of_life),
    Kind("`streams/STREAM/`", "streams", ages.STREAM, _remove_stream),
    Kind("`acks/ID`", "acks", 0, _remove_ack),
    UNFINISHED_FILE,
    Kind("`credits/TOKEN/`", "credits", 0, _clear_credits),
    Kind("`receivers/TOKEN`", "receivers", ages.LEFTOVER, _remove_receiver),
)
#: How old leftovers are, by their rows in *What is removed*.
AGES = {kind.row: (kind.age,) for kind in KINDS if kind.age} | {
    "`credits/TOKEN/`": (ages.LEFTOVER,),
    "`held/OWNER/`": (ages.EMPTY_HELD, ages.LEFTOVER),
    "reasons": (ages.LEFTOVER,),
}
