"""What health, explain and fsck find in `.dropq/staged/`, where one commit moves many files; they only look."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from shlex import quote

from dropq.diagnosis.fsck_checks import UNDER_WAY, Entry, ExaminedQueue
from dropq.diagnosis.fsck_kinds import Finding
from dropq.format.claims import claim_id
from dropq.format.staged import DRAFT, WHOLE, OwnPart, StagedFolder, is_part, is_reason, part_of, reassembled_from
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.processing import committed
from dropq.staging import fan_out
from dropq.staging.fan_out import left_to_owner
from dropq.storage import reading
from dropq.upkeep import reassembly

# -- health and explain --------------------------------------------------------------------------------------------


def left_to_owners(context: QueueContext) -> Iterator[str]:
    """Yield the parts of committed messages that only another user's processes can move, and why."""
    for _, path in committed(context):
        folder = os.path.dirname(path)
        for file in sorted(reading.names_in(folder)):
            if (part := part_of(file)) is None:
                continue
            with suppress(OSError, ValueError):  # the log, and fsck, say what is wrong with the folder
                if why := left_to_owner(context, f"{folder}/{file}", part[0], os.geteuid):
                    yield f"{folder}/{file}: {why}"


def reassembly_ages(context: QueueContext, now: int) -> Iterator[int]:
    """Yield for how long, in ms, nothing has changed where the parts of a bundle are put together."""
    for entry in reading.entries(context.layout.reassembly):
        # RACE: it was put together, or its parts were moved back
        changed = max(reading.changed_ms(path, gone=0) for path in (entry.path, f"{entry.path}/{DRAFT}"))
        if changed and reassembly.is_left(context, entry.path):
            yield now - changed


def waits_for(context: QueueContext, path: str) -> str:
    """Return what a message of `committed` waits for; `path` is that of its body."""
    folder = os.path.dirname(path)
    files = reading.names_in(folder) - {WHOLE}
    states = Counter(part.state for part in map(OwnPart.of, files) if part is not None)
    copies = sum(part_of(file) is not None for file in files)
    left = [f"{count} for {state}/" for state, count in sorted(states.items())]
    left += [f"{copies} for {'receivers' if context.layout.is_topic else 'other queues'}"] if copies else []
    kept = [why for why in left_to_owners(context) if why.startswith(f"{folder}/")]
    others = sum(not is_part(file) and not is_reason(file) for file in files)
    parts = f"parts of it have not arrived: {', '.join(left)}" if left else "all parts of it have arrived"
    sweep, fsck = f"`dropq sweep {quote(context.name)}`", f"`dropq fsck {quote(context.name)}`"
    strays = f"; {fsck} says what else lies there" if others else ""
    if kept:
        return f"it is committed, and {parts}: {'; '.join(kept)}{strays}"
    return f"it is committed, and {parts}: any consumer, or {sweep}, goes on, or logs why it cannot{strays}"


# -- fsck ----------------------------------------------------------------------------------------------------------


def examine_staged(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find commits whose parts have not arrived, folders that nobody will commit, and files that are none of these."""
    folders = list(queue.entries(queue.layout.staged))
    # RACE: after staged/: a claim goes from processing/ to staged/, so what is in neither listing was never committed.
    owners = {
        claim_id(entry.file.claim.owner)
        for entry in queue.entries(queue.layout.processing)
        if entry.file.claim is not None and entry.file.claim.ours
    }
    for entry in folders:
        staged = StagedFolder.of(entry.name)
        if staged is None or not stat.S_ISDIR(entry.status.st_mode):
            yield entry.finding("not-staged")
            continue
        strays = [stray.finding("not-staged") for stray in queue.entries(entry.path) if _is_stray(stray)]
        fence = f"{entry.path}/{WHOLE}"
        if not os.path.islink(fence):
            strays += [stray.finding("not-staged") for stray in queue.entries(fence)]
        yield from strays
        has_claim = staged.claim in owners
        if fan_out.decide(queue.context, entry.path, has_claim=has_claim).why == "committed":
            yield entry.finding_at_rest("unfinished-commit")
        elif not has_claim and not strays and reading.exists(entry.path):
            yield entry.finding_at_rest("leftover")


def examine_reassembly(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find parts of bundles that nobody puts together any more, and what does not belong there."""
    for entry in queue.entries(queue.layout.reassembly):
        if reassembled_from(entry.name) is None or not stat.S_ISDIR(entry.status.st_mode):
            yield entry.finding("not-staged")
            continue
        found = list(queue.entries(entry.path))
        yield from (stray.finding("not-staged") for stray in found if _is_no_part(stray))
        at_rest = min([entry.age, *(each.age for each in found if each.name == DRAFT)])
        if at_rest < UNDER_WAY or reassembly.is_left(queue.context, entry.path):
            yield replace(entry, age=at_rest).finding_at_rest("unfinished-join")


def _is_no_part(entry: Entry) -> bool:
    """Return whether an entry of a folder of `reassembly/` is neither a part, nor a draft, nor a sign of life."""
    hidden = entry.name.startswith(".") and entry.name.lstrip(".") not in ("draft", "dropped", "alive")
    return hidden or not stat.S_ISREG(entry.status.st_mode)


def _is_stray(entry: Entry) -> bool:
    """Return whether an entry of a staged folder is neither a part, nor a reason, nor the message, nor a fence."""
    mode = entry.status.st_mode
    if entry.name == WHOLE:
        return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
    return not stat.S_ISREG(mode) or not (is_part(entry.name) or is_reason(entry.name))


#: The checks of what is staged, in the order of their findings.
CHECKS = (examine_staged, examine_reassembly)
