"""Private files of a queue that nothing needs any more, after a crash or by their age, and how they are removed."""

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
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.processing import claims_in, claims_of
from dropq.policies import barrier, fair_share
from dropq.policies.lock import PolicyLock
from dropq.policies.selectors import LAST
from dropq.policies.wanted import LOOKED
from dropq.staging import destinations
from dropq.storage import liveness, reading


class Leftover(NamedTuple):
    """A private file, or folder, that may be left over: sweeps remove it then, and fsck shows it.

    Attributes:
        age: how old it must be, in ms; a younger one may be needed yet.
        is_left: returns whether nothing needs it, if it is that old.
        remove: removes it; returns how many files or folders went.
        kind: the kind of finding that it is; "" for what fsck does not show, or shows as another kind.
        is_dead: whether nothing needs it even before; it is only kept until it is that old.
    """

    path: str
    age: int
    is_left: Callable[[], bool]
    remove: Callable[[], int]
    kind: str = ""
    is_dead: bool = False

    def is_due(self, context: QueueContext) -> bool:
        """Return whether a sweep removes it now."""
        return not (self.age and context.age_ms(self.path) <= self.age) and self.is_left()


class Kind(NamedTuple):
    """What may lie in a folder of a queue: the fields of `Leftover`, of an entry of the folder.

    Its `row` is that in *What is removed* of docs/protocol.md.
    """

    row: str
    folder: str
    age: int
    is_left: Callable[[QueueContext, os.DirEntry[str]], bool]
    remove: Callable[[QueueContext, os.DirEntry[str]], int]
    kind: str = "leftover"

    def of(self, context: QueueContext, entry: os.DirEntry[str]) -> Leftover:
        """Return an entry of the folder as a possible leftover."""
        is_left, remove = partial(self.is_left, context, entry), partial(self.remove, context, entry)
        return Leftover(entry.path, self.age, is_left, remove, self.kind)


def leftovers(context: QueueContext, *, refile: bool = True) -> Iterator[Iterator[Leftover | None]]:
    """Yield possible leftovers, folder by folder; None for each other file that is looked at.

    With `refile`, it files reasons by the names of their files, where their inodes alone find them.
    """
    for kind in KINDS:
        yield (kind.of(context, entry) for entry in reading.entries(getattr(context.layout, kind.folder)))
    yield _credits(context)
    yield _turns(context)
    yield _held(context)
    for state in WITH_REASON:
        yield _reasons(context, state, refile=refile)


def _turns(context: QueueContext) -> Iterator[Leftover]:
    clear = partial(fair_share.clear, context, liveness.known(context.layout.consumers))
    yield Leftover(context.layout.turns, 0, lambda: True, clear)


def _reasons(context: QueueContext, state: str, *, refile: bool) -> Iterator[Leftover | None]:
    for path in context.reasons.unmatched(state, refile=refile):
        if path is None:
            yield None
            continue
        is_left = partial(context.reasons.explains_nothing, state, path, refile=refile)
        remove = partial(context.storage.unlink, path)
        yield Leftover(path, ages.LEFTOVER, is_left, remove, "orphan-reason", is_dead=True)


def _unlink(context: QueueContext, entry: os.DirEntry[str]) -> int:
    return context.storage.unlink(entry.path)


def _remove_tree(context: QueueContext, entry: os.DirEntry[str]) -> int:
    context.storage.remove_tree(entry.path)
    return 1


def _is_of_no_receiver(context: QueueContext, entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is the file of a receiver that is gone, or a draft of such a file."""
    is_draft, root = entry.name.startswith("."), context.root.layout.path
    return is_draft or not destinations.is_needed(root, context.layout, entry.name)


def _is_sign_of_nobody(context: QueueContext, entry: os.DirEntry[str]) -> bool:
    """Return whether a sign of life never appeared, or has another mount's lock, and its subscription holds nothing.

    A subscription that is alive all the same makes it again before its next claim.
    """
    if entry.name.startswith(".nfs") or liveness.announcer(entry.name) in liveness.known(context.layout.consumers):
        return False
    return entry.name.startswith(".") or not (
        liveness.is_verifiable(context.layout.consumers, entry.name)
        or claims_of(context, entry.name)
        or entry.name in barrier.sharers(context)
    )


def _is_old_stream(context: QueueContext, entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and all(
        context.age_ms(each.path) > ages.STREAM for each in reading.entries(entry.path)
    )


def _is_old_ack(context: QueueContext, entry: os.DirEntry[str]) -> bool:
    return early_acks.is_over(context, entry.name)  # RACE: an ack that is given again at this moment may go, too


def _is_unfinished(context: QueueContext, entry: os.DirEntry[str]) -> bool:
    """Return whether it is a small file whose writer was killed before the file had its own name."""
    return bool(UNFINISHED.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)


def _credits(context: QueueContext) -> Iterator[Leftover]:
    """Yield the unfinished files beside credits, and the folders of credits; a credit is removed by an audit alone."""
    if os.path.islink(context.layout.credits):
        return
    for folder in reading.entries(context.layout.credits):
        if is_token(folder.name) and folder.is_dir(follow_symlinks=False):
            yield from (UNFINISHED_FILE.of(context, entry) for entry in reading.entries(folder.path))
            yield FOLDER_OF_CREDITS.of(context, folder)


def _remove_credits(context: QueueContext, folder: os.DirEntry[str]) -> bool:
    # RACE: a router with a selector's file that was put back makes the folder and the mark again, under the same lock.
    with PolicyLock(context).acquire(lambda: None) as locked:
        if not locked or not _is_of_no_selector(context, folder):
            return False
        context.storage.unlink(f"{folder.path}/{LAST}")
        context.storage.remove_folder(folder.path)
    return True


def _is_of_no_selector(context: QueueContext, folder: os.DirEntry[str]) -> bool:
    """Return whether a folder of credits has at most the mark in it, and no selector's file has its token."""
    if reading.names_in(folder.path) - {LAST}:
        return False
    files = (entry for entry in reading.entries(context.layout.selectors) if entry.is_file())
    return not any(token_in(reading.read_small(file.path) or b"") == folder.name for file in files)


def _held(context: QueueContext) -> Iterator[Leftover]:
    """Yield files that holders keep for messages that are not claimed any more."""
    kept = list(reading.entries(context.layout.held))
    # RACE: a holder is known before it claims, and has its claim before a folder in held/. Asked for in this order, a
    # folder without either is of a holder that is gone.
    claimed = {claim.owner for claim in claims_in(context)} if kept else set()
    known = liveness.known(context.layout.consumers) if kept else frozenset()
    for entry in kept:
        if not is_owner(entry.name) or entry.name in claimed:
            continue
        if subscription_of(entry.name) in known:
            yield EMPTY_HELD.of(context, entry)
        else:
            # What was delivered at most once, without a history, stays for a day: its holder may yet read it.
            age, remove = ages.LEFTOVER * _holds_the_only_copy(entry), partial(_remove_tree, context, entry)
            yield Leftover(entry.path, age, lambda: True, remove, "leftover", is_dead=True)


def _is_empty(context: QueueContext, folder: os.DirEntry[str]) -> bool:
    return folder.is_dir(follow_symlinks=False) and not reading.names_in(folder.path)


def _remove_empty(context: QueueContext, folder: os.DirEntry[str]) -> bool:
    """Remove a folder that is empty; return False for any other.

    RACE: its holder may be about to put a message there, if it was stopped for an hour in between: then that is
    refused, and the message goes back.
    """
    try:
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


UNFINISHED_FILE = Kind("`.gone-*`", "selectors", ages.LEFTOVER, _is_unfinished, _unlink, "")
FOLDER_OF_CREDITS = Kind("`credits/TOKEN/`", "credits", ages.LEFTOVER, _is_of_no_selector, _remove_credits)
EMPTY_HELD = Kind("`held/OWNER/`", "held", ages.EMPTY_HELD, _is_empty, _remove_empty)

#: What lies under the names of folders of the queue.
KINDS = (
    Kind("`.gone-*`", "private", ages.LEFTOVER, lambda _, entry: entry.name.startswith(GONE_PREFIX), _remove_tree),
    Kind("`consumers/CLIENT-RANDOM`", "consumers", ages.LEFTOVER, _is_sign_of_nobody, _unlink),
    Kind("`streams/STREAM/`", "streams", ages.STREAM, _is_old_stream, _remove_tree),
    Kind("`acks/ID`", "acks", 0, _is_old_ack, _unlink, ""),
    UNFINISHED_FILE,
    Kind("`receivers/TOKEN`", "receivers", ages.LEFTOVER, _is_of_no_receiver, _unlink),
    Kind("`wanted/SUB`", "wanted", ages.UNWANTED, lambda _, entry: entry.name != LOOKED, _unlink, ""),
)
#: How old leftovers are, by their rows in *What is removed*.
AGES = {kind.row: (kind.age,) for kind in (*KINDS, FOLDER_OF_CREDITS) if kind.age} | {
    "`held/OWNER/`": (ages.EMPTY_HELD, ages.LEFTOVER),
    "reasons": (ages.LEFTOVER,),
}
