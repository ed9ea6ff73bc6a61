"""What is claimed in processing/: the only loop over that folder's claims.

A claim's name is its own for ever, so a claim that has left processing/ never comes back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dropq.format.claims import Claim, claim_start
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.storage import reading

#: The claims that this thread has listed in the present block of `listing_once`.
_listed = threading.local()


def claimed_files(context: QueueContext, start: str = "") -> Iterator[MessageFile]:
    """Yield the files in processing/, whoever put them there, by a listing; names that are ignored too.

    Args:
        context: the queue.
        start: what their names begin with.
    """
    folder = context.layout.processing
    for entry in reading.entries(folder):
        if entry.name.startswith(start) and reading.was_message_file(entry):
            yield context.sidecars.file(entry.name, folder)


def claims_in(context: QueueContext, *, foreign: bool = False) -> Iterator[Claim]:
    """Yield the claims of dropq's own form, by a listing.

    Args:
        context: the queue.
        foreign: yield instead those of scripts and of DropboxMQ clients, to be met as they were seen.
    """
    for file in claimed_files(context):
        claim = file.claim
        if claim is not None and claim.ours:
            if not foreign:
                yield claim
        elif foreign and not context.sidecars.ignored(file.filename):
            yield Claim.foreign(file.filename, file.folder, file.name.delivery_count + 1)


def find_claim(context: QueueContext, owner: str) -> Claim | None:
    """Return a claim by its owner and sequence, whatever its deadline is by now."""
    found = (file.claim for file in claimed_files(context, claim_start(owner)))
    return next((claim for claim in found if claim is not None), None)


def claims_of(context: QueueContext, subscription: str) -> list[Claim]:
    """Return the claims of a subscription, by a listing."""
    return [claim for claim in claims_in(context) if claim.subscription == subscription]


@contextmanager
def listing_once(context: QueueContext) -> Iterator[None]:
    """Look up all claims that this thread misses in the block by one listing; it makes no claims there.

    A claim that has left processing/ never comes back, so a claim that the listing lacks is gone. A claim that was
    renewed since is looked up in another listing, which serves the rest of the block.
    """
    around = dict(vars(_listed))  # a signal handler's block interrupts its own thread's
    _listed.folder, _listed.claims = context.layout.processing, None
    try:
        yield
    finally:
        vars(_listed).clear()
        vars(_listed).update(around)


def renewed(context: QueueContext, claim: Claim) -> Claim | None:
    """Return what a claim is called now that is not where it was; None where it is gone."""
    owner = claim.owner
    if getattr(_listed, "folder", None) != context.layout.processing:
        return find_claim(context, owner)
    listed: dict[str, Claim] | None = _listed.claims
    if listed is None or (owner in listed and listed[owner].path == claim.path):
        listed = _listed.claims = {found.owner: found for found in claims_in(context)}
    return listed.get(owner)
