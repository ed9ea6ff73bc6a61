"""The claims in processing/, and the messages there that are committed: who needs them all lists them here.

No two claims ever share a name, so a claim that has left processing/ never comes back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

from dropq.errors import LeaseLost
from dropq.format.claims import Claim, claim_start
from dropq.format.layout import QueueLayout
from dropq.format.message_file import MessageFile
from dropq.format.staged import WHOLE, StagedFolder
from dropq.lifecycle.context import QueueContext
from dropq.storage import reading
from dropq.storage.failures import error_context, storage_error
from dropq.storage.system_calls import is_missing

T = TypeVar("T")
Rest = TypeVarTuple("Rest")

#: How often processing/ is listed before a claim counts as gone.
LISTINGS = 3
#: What this thread's current block of `listing_once` has listed, and how often it may list again.
_listed = threading.local()


def claimed_files(context: QueueContext, start: str = "") -> Iterator[MessageFile]:
    """List all files in processing/ that begin with `start`: of consumers and of scripts, ignored names included."""
    folder = context.layout.processing
    for entry in reading.entries(folder):
        if entry.name.startswith(start) and reading.was_message_file(entry):
            yield context.sidecars.file(entry.name, folder)


def claimed_messages(context: QueueContext) -> list[MessageFile]:
    """List the messages in processing/, of consumers and of scripts."""
    return [file for file in claimed_files(context) if not context.sidecars.ignored(file.filename)]


def committed_files(context: QueueContext) -> Iterator[MessageFile]:
    """List the messages that were committed, and whose parts are not all moved: `ls` counts each as in processing/."""
    return (file for file, _ in committed(context))


def committed(context: QueueContext) -> Iterator[tuple[MessageFile, str]]:
    """List the messages of `committed_files`, each with the path of its body."""
    if not context.layout.topic and not reading.exists(context.layout.staged):
        return  # nothing was ever staged here
    for entry in reading.entries(context.layout.staged):
        staged = StagedFolder.of(entry.name)
        if staged is not None and is_committed(entry.path):
            yield context.sidecars.file(staged.own_name, context.layout.staged), f"{entry.path}/{WHOLE}"


def has_committed(layout: QueueLayout) -> bool:
    """Return whether `committed_files` lists any message."""
    return any(StagedFolder.of(entry.name) and is_committed(entry.path) for entry in reading.entries(layout.staged))


def is_committed(folder: str) -> bool:
    """Return whether the message itself lies in a staged folder, and not a fence, which keeps it out."""
    size = reading.regular_size(f"{folder}/{WHOLE}")
    if size is None or os.path.islink(folder):  # no staged folder is a link
        return False
    return not _is_fence(folder, size)


def is_dropped(folder: str) -> bool:
    """Return whether a fence has the name `whole` in a staged folder; a link is no fence, as a commit may replace it.

    RACE: the holder may commit at any moment: two looks, for no commit and for a name that is taken, prove nothing.
    """
    whole = f"{folder}/{WHOLE}"
    is_folder = reading.is_folder(whole) and not os.path.islink(whole)
    return is_folder or _is_fence(folder, reading.regular_size(whole))


def _is_fence(folder: str, size: int | None) -> bool:
    """Return whether the file `whole` of a staged folder, which has this size, is a fence."""
    fence = os.fsencode(os.path.basename(folder))
    return size == len(fence) and reading.read_small(f"{folder}/{WHOLE}") == fence


def claims_in(context: QueueContext, *, foreign: bool = False) -> Iterator[Claim]:
    """List the claims of dropq's own form, or the `foreign` ones of scripts and DropboxMQ clients, as exact claims."""
    for file in claimed_files(context):
        claim = file.claim
        if claim is not None and claim.ours:
            if not foreign:
                yield claim
        elif foreign and not context.sidecars.ignored(file.filename):
            yield Claim.foreign(file.filename, file.folder, file.name.delivery_count + 1)


def until_found(look: Callable[[], T]) -> T:
    """Return what a look at processing/ finds; if it finds nothing, look again.

    RACE: a listing may pass over a claim that is renamed meanwhile, as its lease is renewed.
    """
    for _ in range(LISTINGS - 1):
        if found := look():
            return found
    return look()


def find_claim(context: QueueContext, owner: str) -> Claim | None:
    """Return the claim with this owner and sequence, whatever its deadline is by now."""

    def look() -> Claim | None:
        claims = (file.claim for file in claimed_files(context, claim_start(owner)))
        return next((claim for claim in claims if claim is not None), None)

    return until_found(look)


def claims_of(context: QueueContext, subscription: str) -> list[Claim]:
    return [claim for claim in claims_in(context) if claim.subscription == subscription]


@contextmanager
def listing_once(context: QueueContext) -> Iterator[None]:
    """Let the same listings serve all calls of `renewed` in the block; the block must make no claims.

    A claim that has left processing/ never comes back, so a claim that is in none of them is gone. If a claim was
    renewed after them, new listings serve the rest of the block.
    """
    outer = dict(vars(_listed))  # a signal handler's block may interrupt a block of the same thread
    _listed.folder, _listed.claims, _listed.left = context.layout.processing, {}, LISTINGS
    try:
        yield
    finally:
        vars(_listed).clear()
        vars(_listed).update(outer)


def renewed(context: QueueContext, claim: Claim) -> Claim | None:
    """Return a claim whose file has another name by now, by that name; None if it is gone."""
    owner = claim.owner
    if getattr(_listed, "folder", None) != context.layout.processing:
        return find_claim(context, owner)
    listed: dict[str, Claim] = _listed.claims
    if owner in listed and listed[owner].path == claim.path:
        listed.clear()
        _listed.left = LISTINGS

    def look() -> Claim | None:
        if owner not in listed and _listed.left:
            _listed.left -= 1
            listed.update((found.owner, found) for found in claims_in(context))
        return listed.get(owner)

    return until_found(look)


def move_out(context: QueueContext, claim: Claim, move: Callable[[str, *Rest], T], *args: *Rest) -> T:
    """Move a claimed file by `move(path, ...)`; if its lease was renewed, move it under its new name."""
    while True:
        try:
            return move(claim.path, *args)
        except FileExistsError:
            raise
        except OSError as error:
            find_renewed(context, claim, error)


def find_renewed(context: QueueContext, claim: Claim, error: OSError) -> None:
    """Let a claim take over its new name if it could not be moved because its lease was renewed.

    Raises:
        LeaseLost: the claim is gone.
        StorageError: the move failed for another reason.
    """
    try:
        if not isinstance(error, FileNotFoundError):
            raise error
        now = None if claim.exact else renewed(context, claim)
        if now is None or now.path == claim.path:
            raise error
        claim.follow(now)
    except FileNotFoundError as missing:
        # RACE: a sweep, an expiry or an administrator was first. No two claims ever share a name, so this move
        # cannot have touched a later claim on the message.
        with error_context(f"the message stays in processing/ as {claim.filename}, if it is still held"):
            if not reading.exists(context.layout.processing):
                fate = "the queue is not where it was: the message went with it, and is still held"
                raise storage_error(missing, fate) from missing
            if not is_missing(claim.path):
                fate = f"the folder it should go to is missing; the message stays in processing/ as {claim.filename}"
                raise storage_error(missing, fate) from missing
        raise LeaseLost(lost(context, claim)) from missing
    except OSError as refused:
        raise storage_error(refused, f"the message stays in processing/ as {claim.filename}") from refused


def lost(context: QueueContext, claim: Claim, did: str = "settled or requeued", unchanged: str = "changed") -> str:
    """Return the text of the error for a claim that is gone: what somebody else may have done, and we have not."""
    return (
        f"message {context.sidecars.parse(claim.own_name).id}: claim {claim.owner} on queue {context.layout.home} is "
        f"gone (its lease ran out, it expired, or somebody else {did} it); nothing was {unchanged}"
    )
