"""Many files, one commit: a claimed message is staged as parts, committed by one rename, and rolled forward.

A part is a copy for a destination, or a message that its holder made of it, or it stays in the queue: a record of a
bundle, or what is left of one. A holder stages the parts in a new folder of `.dropq/staged/`, and commits by renaming
its claim to `whole` in it: a holder that lost the claim cannot. From then on any process may move each part. `whole` is
archived, or unlinked, last, once a listing showed no part. A sweep drops a folder that its holder will not commit: it
makes a fence there, a folder of the name `whole` (on HDFS a file). If a commit and a fence meet, the first to have the
name wins. No staged folder is ever renamed, or removed with anything in it.

    a crash               leaves                                and the next sweep
    before the commit     the claim, and a folder with parts    returns the claim of the dead, then drops the parts
    after the commit      `whole`, and parts that have not gone moves the parts, and then `whole`
    of a sweep that drops  a fence, and parts                   removes the parts, and after a day the folder
"""

from __future__ import annotations

import errno
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from dropq.errors import ConfigError, DropqError, LeaseLost, Unavailable
from dropq.format import names
from dropq.format.claims import Claim, Location, claim_id
from dropq.format.layout import GONE_PREFIX, STATES, WITH_REASON, QueueLayout
from dropq.format.staged import (
    PART_STATES,
    WHOLE,
    OwnPart,
    StagedFolder,
    folder_name,
    is_part,
    is_reason,
    part_draft,
    part_name,
    part_of,
)
from dropq.lifecycle import ages, naming
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.decision import Decision
from dropq.lifecycle.moving import Moves, end_part, end_whole, set_part_aside
from dropq.lifecycle.processing import claims_in, find_claim, is_committed, is_dropped, lost
from dropq.lifecycle.settlement import Claims
from dropq.policies.circles import waypoint_at
from dropq.staging.destinations import (
    DestinationFolder,
    identity_of,
    is_away,
    is_being_removed,
    open_destination,
    take_each,
    tokens,
    words_of,
)
from dropq.staging.named import is_named
from dropq.storage import reading
from dropq.storage.failures import describe, error_context, storage_error
from dropq.storage.files import SYNCED_TOGETHER
from dropq.storage.mounts import was_brought_back
from dropq.storage.system_calls import is_missing

log = logging.getLogger("dropq")

#: What an error says of a message whose copies could not be staged.
UNSTAGED = "the message waits as before, and no receiver has it"
#: Why a message is in error/ if this user cannot copy it.
UNREADABLE = "this user may not read its body, so no copy can be made: give it the right to, and requeue the message"
#: What an error says of a message if what was made of it could not be sent, or its records could not be settled.
UNSETTLED = "nothing was settled, and the message is still held"
#: What an error says of a message that is committed, and whose parts could not be moved.
COMMITTED = "the message is committed: its parts arrive with the next sweep"

#: Writes the copies of a message: called with a folder, its descriptor, and the names that the copies get there.
Write = Callable[[str, int, Sequence[str]], None]


class StagedCopies(NamedTuple):
    """The copies that this process has staged in a folder: the names of the parts, and the destination of each."""

    #: The folder's descriptor: a lookup of its long path for each part takes time.
    at: int
    parts: Sequence[str]
    destinations: Sequence[DestinationFolder]
    #: The file name that each part gets there.
    copied_name: str
    #: The file name that the message itself gets, and the state that it ends in: processed, or target.
    own_name: str
    end: str
    #: The folder that the message was claimed from.
    came_from: str


class StagedOutputs(NamedTuple):
    """What this process has staged to send with an ack: where each part goes; attributes as of `StagedCopies`."""

    parts: Mapping[str, DestinationFolder]
    own_name: str
    came_from: str
    end: str = "sent"


class OwnParts(NamedTuple):
    """What this process has staged in a folder for the queue itself; attributes as of `StagedCopies`."""

    parts: Sequence[OwnPart]
    own_name: str
    end: str
    came_from: str


Staged = StagedCopies | StagedOutputs | OwnParts


@dataclass
class Rolled:
    """What a sweep of staged folders did: how many it rolled forward, and dropped, and could not bring in order.

    `keeps` names a committed folder with a part for the queue itself that cannot be moved now; "" without such.
    """

    forward: int = 0
    dropped: int = 0
    refused: int = 0
    keeps: str = ""

    def refuse(self, folder: str, why: str) -> None:
        """Note a folder that could not be brought in order."""
        self.refused += 1
        with suppress(OSError):
            if is_committed(folder) and any(map(OwnPart.of, reading.names_in(folder))):
                self.keeps = f"{folder}: {why}"


def fan_out(
    context: QueueContext,
    claim: Claim,
    destinations: Sequence[DestinationFolder],
    write: Write,
    copied_name: str,
    came_from: str,
    *,
    back_as: str | None = None,
) -> bool | None:
    """Turn a claimed message into a copy for each destination; return whether each has its copy already.

    It returns None if nothing was committed, and the message is still claimed: then the caller begins again, with the
    present destinations. The message itself returns to target/ under the unique name `back_as`; None archives it.

    Raises:
        LeaseLost: the claim is gone; nothing was committed.
        Unavailable: somebody writes to the body; the message is still claimed, and no destination has it.
        StorageError: the copies could not be staged; the same.
    """
    end, own_name = ("processed", claim.own_name) if back_as is None else ("target", back_as)
    with error_context(UNSTAGED):
        folder = _new_folder(context, claim, end, own_name)
        at = reading.open_to_reach(folder)
    parts = [part_name(destination.token, copied_name) for destination in destinations]
    staged = StagedCopies(at, parts, destinations, copied_name, own_name, end, came_from)
    try:
        return _commit_parts(context, claim, folder, staged, lambda: write(folder, at, parts), UNSTAGED)
    finally:
        os.close(at)


def new_folder(context: QueueContext, claim: Claim, own_name: str) -> str:
    """Make the folder for messages that are made of a claimed one; return its path. `own_name`: as of `send`."""
    with context.error_context(UNSETTLED):
        return _new_folder(context, claim, "sent", own_name)


def new_draft(
    context: QueueContext, folder: str, number: int, destination: QueueContext, outcome: str = UNSETTLED
) -> int:
    """Make the draft of a part in working/ of its destination, and move it to a staged folder; return its descriptor.

    So it has the owner, group and mode of a message that is sent there. An error says the `outcome`.

    Raises:
        LeaseLost: a sweep took its holder for dead, and dropped the folder.
        ConfigError: the destination lies where no rename leads to.
        DropqError: this user may not send there, or the file system refused.
    """
    path = f"{destination.layout.working}/{names.plain_name(destination.root.ids.next(), 4, 'B')}"
    with destination.error_context(outcome):
        fd = destination.storage.create(path)
    try:
        _take_in(context, path, f"{folder}/{part_draft(number)}", destination, outcome)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_part(
    context: QueueContext, folder: str, name: str, file: str, body: bytes, destination: QueueContext
) -> None:
    """Write a part under the name that it will have at its destination, and move it to a staged folder as `name`.

    It raises what `new_draft` does.
    """
    working, storage = destination.layout.working, destination.storage
    path = f"{working}/{file}"
    with destination.error_context(UNSETTLED):
        storage.write_new(path, body, sole_in=working)
    _take_in(context, path, f"{folder}/{name}", destination, UNSETTLED)


def _take_in(context: QueueContext, path: str, staged: str, destination: QueueContext, outcome: str) -> None:
    """Move a draft from working/ of its destination to a staged folder; remove it if that fails."""
    try:
        context.storage.rename(path, staged)
    except OSError as error:
        with suppress(OSError):
            destination.storage.unlink(path)
        if error.errno == errno.EXDEV:
            raise ConfigError(
                f"queue {destination.name} lies where no rename from queue {context.name} leads to: what is made of a "
                f"message goes out by one rename; {outcome}"
            ) from error
        raise dropped(os.path.dirname(staged), error, context) from error


def dropped(folder: str, error: OSError, destination: QueueContext) -> DropqError:
    """Return what to raise for a call in a staged folder that failed: LeaseLost if a sweep has dropped that.

    An error of a call on an open file has no path: it gets that of the destination.
    """
    if reading.is_gone(error) and (is_dropped(folder) or not reading.exists(folder)):
        return LeaseLost(f"{folder} was dropped, as a sweep took its holder for dead; nothing was sent")
    if error.filename is None:
        error.filename = destination.layout.base
    return storage_error(error, UNSETTLED)


@contextmanager
def staging(folder: str, destination: QueueContext) -> Iterator[None]:
    """Raise what `dropped` returns for a call of the block that fails."""
    try:
        yield
    except OSError as error:
        raise dropped(folder, error, destination) from error


def try_rename(context: QueueContext, destination: QueueContext) -> None:
    """Try with a file of our own whether a rename leads from a queue to a destination's files; raise as `new_draft`."""
    folder = f"{context.layout.private}/{GONE_PREFIX}{os.urandom(8).hex()}"
    outcome = "no message was touched"
    with context.error_context(outcome):
        context.storage.make_folder(folder, passing=True)
    try:
        os.close(new_draft(context, folder, 0, destination, outcome))
    finally:
        context.storage.remove_tree(folder)


def send(
    context: QueueContext, claim: Claim, folder: str, parts: Mapping[str, DestinationFolder], own_name: str
) -> bool:
    """Acknowledge a claimed message by the commit of what was made of it; return whether each part has arrived already.

    The folder has the `parts`, which say where each goes by its name there, and no drafts. The context has the
    durability that the strictest of its queue and the destinations has. The message is archived as `own_name`.

    Raises:
        LeaseLost: the claim is gone; nothing was sent.
        Unavailable: somebody writes to the body, or a sweep took this process for dead and dropped the folder; the
            message is still claimed.
        StorageError: the same; or, if the error has a `location`, the message is committed.
    """
    staged = StagedOutputs(parts, own_name, context.layout.target)
    try:
        done = _commit_parts(context, claim, folder, staged, lambda: None, UNSETTLED)
    except LeaseLost:
        # The rename of an earlier try may have been done after the file server had refused to answer.
        earlier = _committed_under(context, claim)
        if earlier is None:
            raise
        _log_ack(context, claim)
        return roll_forward(context, earlier)
    if done is None:
        raise Unavailable(f"a sweep took this process for dead, and dropped what was staged; {UNSETTLED}")
    return done


def _log_ack(context: QueueContext, claim: Claim) -> None:
    """Log an ack, once: an ack that was interrupted after its commit may be tried again."""
    if not claim.logged:
        claim.logged = True
        context.log.ended("acked", claim.own_name, claim)


def _committed_under(context: QueueContext, claim: Claim) -> str | None:
    """Return the folder that a claim was committed in; None if it was not, or all its parts have arrived."""
    for entry in reading.entries(context.layout.staged):
        staged = StagedFolder.of(entry.name)
        if staged is not None and staged.claim == claim_id(claim.owner) and is_committed(entry.path):
            return entry.path
    return None


def set_closed_aside(context: QueueContext, claim: Claim) -> bool:
    """Move a claimed message whose copies were not made to error/, if this user may not read it; return whether it was.

    A consumer that cannot read it would fail, too: so it does not keep the messages behind it waiting.
    """
    if not reading.is_closed(claim.path):
        return False
    own = context.sidecars.parse(claim.own_name).id
    log.warning("queue %s: message %s goes to error/: %s", context.name, own, UNREADABLE)
    Claims(context).set_aside(claim, "error", "unreadable", {"detail": UNREADABLE})
    return True


def settle(
    context: QueueContext,
    claim: Claim,
    parts: Sequence[OwnPart],
    write: Callable[[str], None],
    own_name: str,
    end: str,
) -> bool:
    """Turn a claimed message into parts that stay in its queue; return whether each has arrived already.

    `write` writes the parts into a folder, and the reasons beside them, again for each folder that a sweep drops. If
    `end` is `processed`, the message itself is archived as `own_name`; if it is `unlink`, it is removed.

    Raises:
        LeaseLost: the claim is gone; nothing was committed.
        StorageError: the parts could not be staged, and the message is still claimed; or, if the error has a
            `location`, it is committed.
    """
    while True:
        with error_context(UNSETTLED):
            folder = _new_folder(context, claim, end, own_name)
        staged = OwnParts(parts, own_name, end, context.layout.target)
        done = _commit_parts(context, claim, folder, staged, partial(write, folder), UNSETTLED)
        if done is not None:
            return done


def _commit_parts(
    context: QueueContext,
    claim: Claim,
    folder: str,
    staged: Staged,
    write: Callable[[], None],
    outcome: str,
) -> bool | None:
    """Stage parts, commit them and move them; return what `fan_out` does."""
    is_tried = False
    try:
        _stage(context, folder, staged.came_from, write)
        if claim.body is not None and Claims(context).is_changed(claim):
            withdraw(context, folder)
            raise Unavailable(f"{claim.path}: somebody writes to it, so its copies were not sent; {outcome}")
        is_tried = True
        if not _commit(context, claim, folder):
            return None  # RACE: a sweep took this holder for dead, and dropped the folder
    except LeaseLost:
        raise  # sweeps see to the folder
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not reading.exists(folder) and reading.exists(claim.path):
            return None  # RACE: it was empty for a while, and a sweep took it for nobody's
        if not is_tried:
            withdraw(context, folder)
        # RACE: a file server may do the rename of the commit after it refused to answer. Then the parts are needed. If
        # it does not, a sweep drops them once the claim is gone.
        if reading.is_gone(error) and find_claim(context, claim.owner) is None:
            raise LeaseLost(lost(context, claim, "took", "committed")) from error
        raise storage_error(error, outcome) from error
    except BaseException:
        if not is_tried:
            withdraw(context, folder)
        raise
    if isinstance(staged, StagedOutputs):
        _log_ack(context, claim)
    elif isinstance(staged, StagedCopies) and staged.end == "processed":
        context.log.ended("moved", claim.own_name, intended=True)
    return roll_forward(context, folder, staged=staged)


def _new_folder(context: QueueContext, claim: Claim, end: str, own_name: str) -> str:
    attempt = f"{random.getrandbits(24):06x}"
    folder = f"{context.layout.staged}/{folder_name(claim_id(claim.owner), attempt, end, own_name)}"
    context.storage.make_folder(folder, passing=True)
    return folder


def _stage(context: QueueContext, folder: str, came_from: str, write: Callable[[], None]) -> None:
    write()
    if came_from == context.layout.target:  # after the commit, no name of it may come back there
        context.storage.sync(context.layout.processing, context.layout.target)
    context.storage.sync(folder, context.layout.staged)


def _commit(context: QueueContext, claim: Claim, folder: str) -> bool:
    """Rename a claim to `whole`; return False if the folder was dropped before."""
    whole = f"{folder}/{WHOLE}"
    while True:
        try:
            # RACE: with a sweep that drops the folder: whichever has the name `whole` first decides.
            context.storage.commit(claim.path, whole)
            return True
        except FileNotFoundError as error:
            if is_committed(folder):
                return True  # RACE: NFS lost the reply
            now = find_claim(context, claim.owner)
            if now is not None and now.path != claim.path:
                claim.follow(now)
                continue
            if now is None and _was_rolled_forward(context, folder):
                return True  # RACE: NFS lost the reply, and a sweep was quicker than we
            if now is not None:
                raise  # the folder is gone
            raise LeaseLost(lost(context, claim, "took", "committed")) from error
        except OSError as error:
            if is_committed(folder) and not reading.exists(claim.path):
                return True
            if reading.exists(whole):
                return False
            if (
                reading.is_gone(error)
                and find_claim(context, claim.owner) is None
                and _was_rolled_forward(context, folder)
            ):
                return True  # RACE: as above: where the folder is gone, the answer to a rename into it is ESTALE
            raise


def _was_rolled_forward(context: QueueContext, folder: str) -> bool:
    """Return whether a folder that had parts was committed: it has neither parts nor a fence now.

    RACE: checked in this order, as a sweep that drops the folder makes the fence before it removes the parts.
    """
    return (
        not any(map(is_part, reading.names_in(folder)))
        and not reading.exists(f"{folder}/{WHOLE}")
        and reading.exists(context.layout.staged)
    )


def withdraw(context: QueueContext, folder: str) -> None:
    """Remove what was staged and will not be committed; only its holder may, while it has the claim.

    RACE: a signal handler may raise between the commit and its return, and an error of a rename that was done may leave
    that unknown. What was committed stays, and a sweep rolls it forward.
    """
    try:
        if is_committed(folder):
            return
        for file in sorted(reading.names_in(folder) - {WHOLE}, key=is_reason, reverse=True):  # a reason before its part
            context.storage.unlink(f"{folder}/{file}")
        context.storage.remove_folder(folder)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            log.warning("%s stays until a sweep clears it: %s", folder, describe(error))


# -- roll forward --------------------------------------------------------------------------------------------------


def roll_forward(context: QueueContext, folder: str, *, staged: Staged | None = None) -> bool:
    """Move each part of a committed message to where it goes, then end the message; return whether all is done.

    RACE: any number of processes may do this at once. Each part is moved by the first rename; the others find it gone.

    If this process has just staged the parts, `staged` has them; else they are listed, and their destinations are read.

    Raises:
        StorageError: what is moved may not be durable; a sweep goes on. The error has a `location`.
    """
    try:
        return _roll_forward(context, folder, staged)
    except OSError as error:
        failed = storage_error(error, COMMITTED)
        failed.location = Location("committed", os.path.basename(folder))
        raise failed from error


def _roll_forward(context: QueueContext, folder: str, staged: Staged | None) -> bool:
    committed = staged or StagedFolder.of(os.path.basename(folder))
    if committed is None:
        return False
    sends = committed.end == "sent"
    end = "processed" if sends else committed.end
    if sends and staged is None:  # a destination may ask for more than this queue
        context = replace(context, storage=context.storage.at_least("full"))
    storage, layout, whole = context.storage, context.layout, f"{folder}/{WHOLE}"
    mover = _Mover(context, folder, staged, sends=sends)
    try:
        storage.sync(folder, layout.processing)  # the commit is durable before the first move
        if staged is None or staged.came_from == layout.working:
            storage.sync(layout.working)
        if isinstance(committed, StagedFolder):
            _unlink_old_claim(context, whole, committed.claim)
        if not mover.move_all():
            return False
        mover.sync()
    except FileNotFoundError:
        if reading.exists(folder):
            raise
        return reading.exists(layout.staged)  # RACE: another roll-forward removed it, or a delete took the topic away
    if staged is None:
        _unlink_if_ended(context, whole, committed.own_name, end)
    end_whole(context, whole, committed.own_name, end)
    if end == "target":
        storage.sync(layout.target)
    try:
        storage.remove_folder(folder)
    except OSError as error:
        log.debug("%s stays until a sweep clears it: %s", folder, describe(error))
    return True


def _drop_reasons(context: QueueContext, folder: str) -> None:
    for file in filter(is_reason, reading.names_in(folder)):
        context.storage.unlink(f"{folder}/{file}")


def _unlink_old_claim(context: QueueContext, whole: str, claim: str) -> None:
    """Unlink the claim of a message that is committed, which on btrfs a power cut may bring back.

    RACE: none: the name of a claim is never used again.
    """
    if reading.has_another_name(whole):
        for found in claims_in(context):
            if claim_id(found.owner) == claim and reading.inode(found.path) == reading.inode(whole):
                context.storage.unlink(found.path)
                context.storage.sync(context.layout.processing)


def _unlink_if_ended(context: QueueContext, whole: str, own_name: str, end: str) -> None:
    """Unlink the name `whole` of a message that is where it ends already, which on btrfs a power cut may bring back."""
    if end == "unlink":
        return
    folders = [context.layout.folder(state) for state in (STATES if end == "target" else (end,))]
    with suppress(FileNotFoundError):  # RACE: another roll-forward was first
        if was_brought_back(whole) and _lies_in(folders, whole, context, own_name):
            context.storage.unlink(whole)


def _lies_in(folders: Iterable[str], path: str, context: QueueContext, own_name: str) -> bool:
    """Return whether a file has another name of the same message in one of these folders."""
    inode, bears = reading.inode(path), names.bears(context.sidecars.parse(own_name).id)
    return any(entry.inode() == inode and bears(entry.name) for folder in folders for entry in reading.entries(folder))


class _Mover:
    """Moves the parts of one committed message to where they go; `staged` has them if this process has staged them.

    `sends` says whether its parts for destinations are messages that its holder made of it.
    """

    def __init__(self, context: QueueContext, folder: str, staged: Staged | None, *, sends: bool) -> None:
        self._context = context
        self._folder = folder
        self._staged = staged
        self._sends = sends
        self._came_to = set[str]()  # the folders that outputs of this process came to
        self._destinations: dict[str, DestinationFolder] = {}
        self._owner: int | None = None
        self._read_words: Counter[str] | None = None

    def move_all(self) -> bool:
        """Move the parts; return whether all of them have left the folder."""
        staged = self._staged
        if isinstance(staged, OwnParts):
            return self._move_each(map(str, staged.parts))
        if isinstance(staged, StagedCopies):
            left = take_each(staged.destinations, staged.at, staged.parts, staged.copied_name, self._context.storage)
            if left:
                self._destinations = {destination.token: destination for destination in staged.destinations}
            return self._move_each(left)
        if isinstance(staged, StagedOutputs):
            self._destinations = {destination.token: destination for destination in staged.parts.values()}
            return self._move_each([part for part in staged.parts if not self._is_sent(part, staged.parts[part])])
        # RACE: a process that does not list the folder again after the last move could archive the message too early.
        # So the listing that ends the loop is made after the moves.
        while files := sorted(file for file in reading.names_in(self._folder) - {WHOLE} if not is_reason(file)):
            if not self._move_each(files):
                return False
        _drop_reasons(self._context, self._folder)  # whose parts were moved
        return True

    def _is_sent(self, part: str, destination: DestinationFolder) -> bool:
        """Send a message that this process has made; return False if that fails, to try it as any process does."""
        try:
            self._send(destination, f"{self._folder}/{part}", part.partition("~")[2])
        except OSError:
            return False
        return True

    def _move_each(self, files: Iterable[str]) -> bool:
        """Move what is in the folder beside the message; return whether all of it has left."""
        done = True
        for file in files:
            try:
                done = self._move(file) and done
            except (OSError, ValueError, DropqError) as error:
                done = False
                log.warning("%s/%s stays there until a sweep can move it: %s", self._folder, file, describe(error))
        return done

    def sync(self) -> None:
        """Make the moves durable, also those of another roll-forward, which may not have synced them yet."""
        storage = self._context.storage
        if not storage.syncs_folders:
            return
        if isinstance(self._staged, OwnParts):
            self._sync_own({part.state for part in self._staged.parts})
        elif isinstance(self._staged, StagedOutputs):
            for folder in self._came_to:
                with suppress(FileNotFoundError):  # RACE: its queue was removed, which the part had come to
                    storage.sync(folder)
        elif self._sends:
            storage.sync_whole(self._folder)
        elif self._staged is None:
            # Who finds no part left does not know where the parts went: those of a topic to its receivers, others here.
            self._sync_own(PART_STATES)
            self._sync_known()
        else:
            for destination in self._staged.destinations:
                with suppress(FileNotFoundError):  # RACE: it was removed, and took the part along
                    destination.sync(storage)
        storage.sync(self._folder)

    def _sync_own(self, states: Collection[str]) -> None:
        """Sync the state folders that parts may have been moved to, and those of their reasons."""
        folders = [self._context.layout.folder(state) for state in states]
        folders += [f"{self._context.reasons.folder}/{state}" for state in states if state in WITH_REASON]
        self._context.storage.sync(*filter(reading.is_folder, folders))

    def _sync_known(self) -> None:
        """Sync all that parts of this message may have been moved to."""
        found = tokens(self._context.layout)
        try:
            for token in found if len(found) < SYNCED_TOGETHER else ():
                if (destination := self._find(token)) is not None:
                    destination.sync(self._context.storage)
        except (OSError, ValueError) as error:  # one of them cannot be opened, and may be none of this message's
            log.debug("%s: all of its file system is synced, as %s", self._folder, describe(error))
        else:
            if len(found) < SYNCED_TOGETHER:
                return
        self._context.storage.sync_whole(self._folder)

    def _move(self, file: str) -> bool:
        source = f"{self._folder}/{file}"
        if (part := OwnPart.of(file)) is not None:
            return self._move_own(source, part)
        found = part_of(file)
        if found is None:
            raise ValueError("it is no part of a message: look at it, then move it by hand")
        token, own_name = found
        if token not in self._destinations and (why := left_to_owner(self._context, source, token, self._whose)):
            raise ValueError(why)
        destination = self._destinations.get(token) or self._find(token)
        if destination is None:
            return self._set_aside(source, token, own_name)
        if was_brought_back(source) and self._has_arrived(source, destination, own_name):
            self._context.storage.unlink(source)
            return True
        try:
            self._take(destination, source, own_name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise
            if is_missing(source):
                return True  # RACE: another roll-forward moved it
            if open_destination(self._root, destination.identity, self._words) is not None:
                raise  # the destination stands: NFS says ESTALE of a folder for a moment, or its target/ is missing
            return self._set_aside(source, token, own_name)
        return True

    def _whose(self) -> int:
        """Return who owns a file that this process makes there, which a file server may decide; ask that once."""
        if self._owner is None:
            self._owner = self._context.storage.owner_of_new(self._context.layout.private)
        return self._owner

    def _move_own(self, source: str, part: OwnPart) -> bool:
        """Move a part to the state that it goes to; return True, also where another roll-forward moved it."""
        if not isinstance(self._staged, OwnParts):  # this process has not made it
            if reading.regular_size(source) is None:
                if not reading.exists(source):
                    return True  # RACE: another roll-forward moved it
                raise ValueError("it is no regular file: look at it, then remove it")
            folders = [self._context.layout.folder(state) for state in STATES]
            if was_brought_back(source) and _lies_in(folders, source, self._context, part.own_name):
                self._context.storage.unlink(source)
                return True
        end_part(self._context, source, part.state, part.own_name, f"{self._folder}/{part.reason}")
        return True

    def _has_arrived(self, source: str, destination: DestinationFolder, own_name: str) -> bool:
        folders = QueueLayout.flat(f"{self._root}/{destination.identity.path}").folders
        return _lies_in([folders[state] for state in STATES], source, self._context, own_name)

    def _take(self, destination: DestinationFolder, source: str, own_name: str) -> None:
        """Rename a part into a destination's target/; if its name is taken by another message, under a new name."""
        storage = self._context.storage
        if self._sends:
            return self._send(destination, source, own_name)
        with suppress(FileExistsError):
            if destination.take(source, own_name, storage):
                return
        copy = naming.copy_name(self._context, self._context.sidecars.parse(own_name))
        destination.take_as(source, copy, storage)

    def _send(self, destination: DestinationFolder, source: str, own_name: str) -> None:
        """Rename a message that was made of this one into its queue, by the queue's path.

        RACE: with a delete, which renames the queue first: then the path leads nowhere, and the part stays. If another
        queue of the name was made since the comparison, it gets the message.
        """
        if not destination.is_there(self._root):
            raise FileNotFoundError(errno.ENOENT, "the queue is gone", destination.path)
        context, storage, folder = self._context, self._context.storage, f"{destination.path}/target"
        if names.may_be_marked(own_name) and context.sidecars.parse(own_name).not_before:
            folder = QueueLayout.flat(destination.path).delayed
            storage.make_folder(folder)
        try:
            storage.rename_guarded(source, f"{folder}/{own_name}")
        except FileExistsError:  # somebody copied it there by hand: both stay
            storage.rename_guarded(source, f"{folder}/{naming.copy_name(context, context.sidecars.parse(own_name))}")
        self._came_to.add(folder)

    def _find(self, token: str) -> DestinationFolder | None:
        identity = identity_of(self._context.layout, token)
        return None if identity is None else open_destination(self._root, identity, self._words)

    def _set_aside(self, source: str, token: str, own_name: str) -> bool:
        """Move the part of a destination that is gone to error/; return False if the destination may come back.

        RACE: a delete may hide a view, and bring it back at once: so the view is looked for once more.
        """
        known_here = self._destinations.get(token)
        identity = identity_of(self._context.layout, token) if known_here is None else known_here.identity
        if identity is not None and (
            is_being_removed(self._root, identity)
            or open_destination(self._root, identity, self._words) is not None
            or is_away(self._context.root.layout, identity)
        ):
            return False
        if not reading.exists(source):
            return True  # RACE: another roll-forward moved it
        destination = token if identity is None else identity.path
        if self._sends:
            origin = waypoint_at(f"{self._root}/{destination}").address if identity is not None else destination
            Moves(self._context).part_to_dead_letters(source, own_name, origin)
            return True
        name = self._context.sidecars.parse(own_name)
        set_part_aside(self._context, source, name, "receiver_gone", {"receiver": destination})
        log.warning("receiver %s is gone: its copy of %s is in error/", destination, own_name)
        return True

    @property
    def _root(self) -> str:
        return self._context.root.layout.path

    def _words(self) -> Counter[str]:
        """Return the words of the root's folders; they are read once."""
        if self._read_words is None:
            self._read_words = words_of(self._context.root.layout)
        return self._read_words


def left_to_owner(context: QueueContext, part: str, token: str, whose: Callable[[], int]) -> str:
    """Return why a sweep leaves a part to its owner; "" if it moves it. `whose` returns who owns files made there."""
    identity, staged = identity_of(context.layout, token), StagedFolder.of(os.path.basename(os.path.dirname(part)))
    if identity is None:
        if staged is None or staged.end != "sent":
            return ""  # it goes to error/ here
    elif is_named(context, identity):
        return ""
    try:
        owners = {os.lstat(path).st_uid for path in (part, os.path.dirname(part))}
    except FileNotFoundError:
        return ""  # RACE: another roll-forward moved it
    if owners == {whose()}:
        return ""
    who = ", ".join(f"user {owner}" for owner in sorted(owners))
    where = "a queue that has no file any more" if identity is None else identity.path
    return f"{who} staged it for {where}, which no configuration names: only processes of that user move it"


# -- sweeping ------------------------------------------------------------------------------------------------------


def sweep(context: QueueContext) -> Rolled:
    """Roll committed folders forward, drop those that nobody will commit, and remove empty ones."""
    rolled = Rolled()
    folders = [entry for entry in reading.entries(context.layout.staged) if entry.is_dir(follow_symlinks=False)]
    if not folders:
        return rolled
    # RACE: after staged/: a claim goes from processing/ to staged/, so what is in neither listing was never committed.
    claims = {claim_id(claim.owner) for claim in claims_in(context)}
    for entry in folders:
        staged = StagedFolder.of(entry.name)
        if staged is None:
            continue  # fsck reports it
        try:
            _sweep_folder(context, entry.path, staged.claim in claims, rolled)
        except (OSError, DropqError, ValueError) as error:
            rolled.refuse(entry.path, describe(error))
            log.warning("%s: %s; the next sweep tries again", entry.path, describe(error))
    return rolled


def decide(context: QueueContext, folder: str, *, has_claim: bool) -> Decision:
    """Return whether a sweep goes on with a staged folder, or clears it, and in which state it is.

    It is `committed`, or its holder, whose claim is there, may yet commit it (`claimed`). Else it was `dropped`, or
    nothing is in it (`empty`), or nobody will commit what was `staged`.
    """
    if is_committed(folder):
        return Decision(True, "committed")
    if is_dropped(folder):
        return Decision(not has_claim and context.age_ms(f"{folder}/{WHOLE}") > ages.FENCE, "dropped")
    if has_claim:
        return Decision(False, "claimed")
    if not any(map(is_part, reading.names_in(folder))):
        return Decision(context.age_ms(folder) > ages.EMPTY_STAGED, "empty")
    return Decision(True, "staged")


def _sweep_folder(context: QueueContext, folder: str, has_claim: bool, rolled: Rolled) -> None:
    found = decide(context, folder, has_claim=has_claim)
    if found.why == "committed":
        _go_on(context, folder, rolled)
    elif found.why == "dropped":
        _clear_dropped(context, folder, wholly=found.allowed)
    elif found.allowed and found.why == "empty":
        _clear_empty(context, folder)
    if found.why != "staged" or _has_claim(context, folder):
        return
    try:
        # RACE: with its holder's commit, if that is alive: whichever has the name `whole` first decides.
        context.storage.fence(f"{folder}/{WHOLE}", os.fsencode(os.path.basename(folder)), context.layout.private)
    except FileExistsError:
        if is_committed(folder):
            _go_on(context, folder, rolled)
        return
    rolled.dropped += 1
    _clear_dropped(context, folder, wholly=False)


def _has_claim(context: QueueContext, folder: str) -> bool:
    """Return whether the claim of a staged folder is in processing/.

    RACE: a listing may pass over a claim that is renamed meanwhile, as its lease is renewed: so this one is asked for.
    """
    staged = StagedFolder.of(os.path.basename(folder))
    return staged is not None and any(claim_id(claim.owner) == staged.claim for claim in claims_in(context))


def _go_on(context: QueueContext, folder: str, rolled: Rolled) -> None:
    done = roll_forward(context, folder)
    rolled.forward += done
    if not done:
        rolled.refuse(folder, "a part of it cannot be moved, as the log says")


def _clear_dropped(context: QueueContext, folder: str, *, wholly: bool) -> None:
    """Empty a dropped folder but for its fence; remove both `wholly` after a day, unless the claim is still there.

    RACE: without the fence a holder that has its claim could commit the empty folder.
    """
    files = reading.names_in(folder) - {WHOLE}
    ours = {file for file in files if is_part(file) or is_reason(file)}
    for file in ours:
        context.storage.unlink(f"{folder}/{file}")
    # What belongs to no commit stays, and keeps the folder; fsck reports it.
    if files == ours and wholly:
        fence = f"{folder}/{WHOLE}"
        if reading.regular_size(fence) is None:
            context.storage.remove_folder(fence)
        else:
            context.storage.unlink(fence)
        context.storage.remove_folder(folder)


def _clear_empty(context: QueueContext, folder: str) -> None:
    """Remove a folder without parts: what was in it was moved, or its holder makes another."""
    _drop_reasons(context, folder)  # a process died between a reason and its part
    try:
        context.storage.remove_folder(folder)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        # RACE: its holder has begun to stage
