"""The settlement of a bundle by its records: one commit, after which each record is where it goes.

The holder of a bundle settles it by the same verbs as any message, of the contract in `dropq/lifecycle/settlement.py`.
If some records were settled, a verb concerns the rest, and parts are staged, committed and moved as
`dropq/staging/fan_out.py` says. If no record was settled, or all in one way, the verb is that of the queue's claims.

A commit copies what is left. If the file system cannot read that, the message is settled as a whole, by one rename:
none of its bytes is lost, and what its records had settled since the last commit does not count.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import IO, Any, NamedTuple, Unpack, cast

from dropq.errors import LeaseLost, Unavailable
from dropq.format import names
from dropq.format.claims import Claim, Location
from dropq.format.layout import DEAD_LETTER, WAITING
from dropq.format.names import Name
from dropq.format.staged import OwnPart
from dropq.lifecycle import naming, reasons
from dropq.lifecycle.endings import Details, Goes, HowReturned, after_delivery, ended_as, returned, why_returned
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.naming import LARGEST
from dropq.lifecycle.processing import lost, move_out
from dropq.lifecycle.settlement import BODY_CHANGED, Claims, Settlement
from dropq.records.formats import ReadFailed, pack
from dropq.records.parts import copy_part
from dropq.records.record_cursor import Fate, RecordCursor, Settled, Span
from dropq.staging.fan_out import settle
from dropq.storage import reading
from dropq.storage.clock import lease_end
from dropq.storage.files import SYNCED_TOGETHER

log = logging.getLogger("dropq")

#: Parts from which on one sync of the file system makes them durable together.
TOGETHER = 4
#: The detail of a reason that says why a message was settled as a whole.
WHOLE = "whole"
#: Bytes that are written between two checks of the lease.
STEP = 8 << 20


class Copied(NamedTuple):
    """A part of the body that is copied: from a byte to a byte, but for the spans that become empty."""

    begin: int
    end: int | None
    empty: list[Span]


@dataclass(frozen=True)
class Part:
    """A part that is to be staged: where it goes, and its body."""

    goes: Goes
    body: bytes | Copied


class RecordSettlement(Settlement):
    """Settles one claimed message by its records, or by `claims` as a whole.

    While parts are written, its lease is renewed for `lease` seconds; None without a lease.
    """

    def __init__(self, claims: Claims, cursor: RecordCursor, lease: float | None) -> None:
        self.context = claims.context
        #: The parts that the message was settled as; empty if it is not settled, or one rename settled it.
        self.parts: list[OwnPart] = []
        #: Why it was settled as a whole although records of it were settled; "" if it was not.
        self.kept_whole = ""
        self.cursor = cursor
        self.claims = claims
        self._lease = lease
        self._bundle_mark = names.random_hex(names.BUNDLE_MARK)

    @contextmanager
    def _frozen(self, claim: Claim) -> Iterator[None]:
        with self.cursor.frozen():
            try:
                yield
            except ValueError as error:
                if not self.cursor.file.closed:
                    raise
                # RACE: a signal handler settled the message, and closed its body.
                raise LeaseLost(lost(self.context, claim)) from error

    # -- the verbs of the message --------------------------------------------------------------------------------

    def archive(self, claim: Claim, *, later: dict[str, None] | None = None) -> Location:
        """Acknowledge what is not settled otherwise."""
        with self._frozen(claim):
            if self._is_changed(claim):
                return self.claims.set_changed_aside(claim)
            if not self.cursor.others:
                return self.claims.archive(claim, later=later)
            if (only := self._only_record()) is not None:
                return self._settle_whole(claim, only.fate)
            return self._commit(claim, None)

    def give_back(self, claim: Claim, **how: Unpack[HowReturned]) -> Location:
        """Return what is left to target/, or to delayed/."""
        with self._frozen(claim):
            if not self.cursor.is_settled:
                return self.claims.give_back(claim, **how)
            why = why_returned(**how) if how.get("counted", True) else None
            return self._or_whole(
                claim,
                lambda: self._commit(claim, returned(self.context, claim, **how), why),
                lambda problem: self.claims.give_back(claim, **_how_whole(how, problem)),
            )

    def release(self, claim: Claim, *, counted: bool = True) -> Location:
        """Return what is left as after a stop: if anything was settled, this delivery does not count for it."""
        with self._frozen(claim):
            if not self.cursor.is_settled:
                return self.claims.release(claim, counted=counted)
            return self._or_whole(
                claim, lambda: self._commit_settled(claim), lambda _: self.claims.release(claim, counted=counted)
            )

    def checkpoint(self, claim: Claim) -> Location:
        """Settle what is settled; what is left waits at its old place, as if it had not been delivered this time."""
        with self._frozen(claim):
            return self._or_whole(claim, lambda: self._commit_settled(claim), partial(self._fail_whole, claim))

    def set_aside(
        self, claim: Claim, state: str, reason: str, details: Details | None = None, *, cancel: bool = False
    ) -> Location:
        """Move what is left to error/, to expired/, or to the dead-letter queue."""
        with self._frozen(claim):
            if not self.cursor.is_settled:
                return self.claims.set_aside(claim, state, reason, details, cancel=cancel)
            name, said = naming.counted(self.context, claim, cancel=cancel), details or {}
            return self._or_whole(
                claim,
                lambda: self._commit(claim, Goes(name, state, reason, said)),
                lambda problem: self.claims.set_aside(claim, state, reason, {**said, WHOLE: problem}, cancel=cancel),
            )

    def extend(self, claim: Claim, deadline: int) -> Claim:
        return self.claims.extend(claim, deadline)

    def cut(self, claim: Claim, at: tuple[int, int], first: int) -> Location:
        """Cut a bundle in two, as a holder died over it, and no record was settled: each half waits for its first try.

        The later half begins with the record at `at`, its number and first byte; `first` is the first record's number.
        """
        number, begin = at
        with self._frozen(claim):
            if self._is_changed(claim):
                return self.claims.set_changed_aside(claim)
            name = naming.counted(self.context, claim, counted=False)
            before = min(name.cut + name.delivery_count, LARGEST)
            name = replace(self._kept_in_order(claim, name), delivery_count=0, cancels=0, died=0, cut=before)
            own = replace(name, first=_capped(number), copy=names.copy_mark(name))
            earlier = Part(Goes(replace(name, first=first, via=""), "target"), Copied(0, begin, []))
            later = Part(Goes(own, "target"), Copied(begin, None, []))
            return self._or_whole(
                claim, lambda: self._settle_as(claim, [earlier, later], heir=later), partial(self._fail_whole, claim)
            )

    # -- a body that cannot be read ------------------------------------------------------------------------------

    def _or_whole(self, claim: Claim, commit: Callable[[], Location], whole: Callable[[str], Location]) -> Location:
        """Settle it by a commit; if its body cannot be read, settle it as a whole, and say why."""
        try:
            return commit()
        except ReadFailed as error:
            problem = (self.cursor.read_failure or error).problem  # the cursor knows best where
            why = f"{problem}; so the message was settled as a whole, and none of its records by itself"
            location = whole(why)
            self.cursor.forget()
            self.kept_whole = why
            log.warning(
                "queue %s: message %s: %s", self.context.name, self.context.sidecars.parse(claim.own_name).id, why
            )
            return location

    def _fail_whole(self, claim: Claim, why: str) -> Location:
        return self.claims.give_back(claim, failure={"detail": why})

    # -- where a record, or what is left, goes -------------------------------------------------------------------

    def _only_record(self) -> Settled | None:
        """Return the one record of a body that has no other, if it was settled without an ack."""
        cursor = self.cursor
        if not cursor.acked and not cursor.unsettled and len(cursor.others) == 1 and cursor.next is None:
            return next(iter(cursor.others.values()))
        return None

    def _settle_whole(self, claim: Claim, fate: Fate) -> Location:
        if fate.verb == "reject":
            return self.claims.set_aside(claim, "error", "rejected", fate.said)
        return self.claims.give_back(claim, **_how(fate))

    def _goes(self, name: Name, fate: Fate) -> Goes:
        if fate.verb == "reject":
            return Goes(name, "error", "rejected", fate.said)
        return after_delivery(self.context, replace(name, cancels=int(fate.verb == "nack")), **_how(fate))

    # -- the commit ----------------------------------------------------------------------------------------------

    def _commit_settled(self, claim: Claim) -> Location:
        return self._commit(claim, Goes(naming.counted(self.context, claim, counted=False), "target"))

    def _commit(self, claim: Claim, rest: Goes | None, why: tuple[str, Details] | None = None) -> Location:
        """Settle all records by one commit; `rest` says where the others go, and `why`; None acknowledges them."""
        cursor = self.cursor
        if rest is not None and cursor.left() is None:
            return self.archive(claim)
        if self._is_changed(claim):
            return self.claims.set_changed_aside(claim)
        parts = [self._part_of(claim, number, each) for number, each in sorted(cursor.others.items())]
        if rest is None:
            location = self._settle_as(claim, parts)
            self._log_records(parts)
            if self.parts:  # else its body was changed meanwhile
                self.context.log.ended("acked", claim.own_name, claim)
            return location
        left, acked = cursor.left(), cursor.acknowledged()
        assert left is not None
        number, begin, empty = left
        name = self._kept_in_order(claim, rest.name)
        goes = rest._replace(name=replace(name, first=_capped(number), via=name.via if rest.state in WAITING else ""))
        heir = Part(goes, Copied(begin, None, empty))
        if acked is not None and self.context.config.history:
            number, begin, end, empty = acked
            name = self._kept_in_order(claim, naming.counted(self.context, claim))
            name = replace(name, first=_capped(number), via="")
            parts.append(Part(Goes(name, "processed"), Copied(begin, end, empty)))
        location = self._settle_as(claim, [*parts, heir], heir=heir)
        self._log_records(parts)
        if self.parts and (why or rest.reason):
            self._log(claim.own_name, location.state, rest, why or (rest.reason, rest.details), claim)
        return location

    def _log_records(self, parts: list[Part]) -> None:
        """Log each record that failed or was given back; the bundle alone counts as a message."""
        others = sorted(self.cursor.others.items())
        for part, own, (_, each) in zip(parts, self.parts, others, strict=False):  # the rest is acknowledged, or left
            self._log(own.own_name, own.state, part.goes, why_returned(**_how(each.fate)))

    def _log(self, own: str, state: str, goes: Goes, why: tuple[str, Details], claim: Claim | None = None) -> None:
        event = ended_as(state, goes.reason) if goes.reason else "returned"
        (reason, said), outcome = why, None if claim else ""
        to = (self.context.config.dead_letter_queue or "") if state == DEAD_LETTER else ""
        self.context.log.ended(event, own, claim, reason=goes.reason or reason, details=said, to=to, outcome=outcome)

    def _is_changed(self, claim: Claim) -> bool:
        """Return whether somebody has written to the body since it was claimed, or since it was opened."""
        return self.cursor.is_changed(claim.path) or self.claims.is_changed(claim)

    def _part_of(self, claim: Claim, number: int, settled: Settled) -> Part:
        name = self.context.sidecars.whole(naming.counted(self.context, claim))
        since = name.since or name.timestamp or self._arrival(claim)
        name = Name(
            f"{name.id}-{number}",
            name.priority,
            name.message_class,
            name.expiration,
            name.correlation_id,
            name.reply_to,
            name.type,
            name.properties,
            delivery_count=name.delivery_count,
            since=since,
            origin=name.origin,
            reason=name.reason,
            copied=name.copied,
            owned=name.owned,
            copy=self._copy_mark(name),
            record=_capped(number),
        )
        body = pack(self.cursor.format, [settled.data], head=self.cursor.head)
        return Part(self._goes(name, settled.fate), body)

    def _kept_in_order(self, claim: Claim, name: Name) -> Name:
        """Return the name of a part that bears the bundle's id: it is coded, and keeps its place in the order."""
        since = name.since if name.generated else name.since or self._arrival(claim)
        return replace(
            name, foreign=False, since=since, copy=self._copy_mark(name), records=0, lapsed="", replayed=False
        )

    def _copy_mark(self, name: Name) -> str:
        """Return the copy mark of a part: another bundle may have an id that is not a generated one, and its time."""
        if not name.generated and not names.bundle_mark(name):
            return (names.credit_mark(name) or self._bundle_mark) + names.random_hex(names.COPY_MARK)
        return names.copy_mark(name)

    def _arrival(self, claim: Claim) -> int:
        return claim.arrival or move_out(self.context, claim, reading.changed_ms)

    def _settle_as(self, claim: Claim, wanted: list[Part], heir: Part | None = None) -> Location:
        """Turn a claimed message into parts; `heir` is the part with the rest of it, and without it it is archived."""
        time = self.context.clock.now_ms()
        parts = [self._own_part(number, part.goes) for number, part in enumerate(wanted)]
        whole = naming.counted(self.context, claim)
        if heir is not None and heir.goes.name.via:
            whole = replace(whole, via="", copy=os.urandom(5).hex())  # what is left bears the credit
        own_name = claim.own_name if whole.delivery_count == 1 and heir is None else self.context.sidecars.fit(whole)

        def write(folder: str) -> None:
            self._write(claim, folder, list(zip(parts, wanted, strict=True)), time)

        try:
            settle(self.context, claim, parts, write, own_name, "processed" if heir is None else "unlink")
        except Unavailable:
            if self._is_changed(claim):
                return self.claims.set_changed_aside(claim)
            raise
        self.parts = self._sent_on(parts, wanted)
        if heir is None:
            return Location("processed", own_name) if self.context.config.history else Location("removed", "")
        left = self.parts[wanted.index(heir)]
        return Location(left.state, left.own_name)

    def _sent_on(self, parts: list[OwnPart], wanted: list[Part]) -> list[OwnPart]:
        """Move the parts that are dead letters on from error/: a commit moves parts within their queue only."""
        letters = {
            part.own_name: each.goes.reason
            for part, each in zip(parts, wanted, strict=True)
            if each.goes.state == DEAD_LETTER
        }
        gone = Moves(self.context).letters_from_error(letters) if letters else ()
        return [part._replace(state=DEAD_LETTER) if part.own_name in gone else part for part in parts]

    def _own_part(self, number: int, goes: Goes) -> OwnPart:
        # The name is unique, so every process computes the same reason path.
        name = goes.name if goes.name.mark else naming.marked(goes.name)
        state = "error" if goes.state == DEAD_LETTER else goes.state
        return OwnPart(number, state, self.context.sidecars.fit(replace(name, copy="") if name.via else name))

    def _write(self, claim: Claim, folder: str, parts: list[tuple[OwnPart, Part]], time: int) -> None:
        """Write the parts into a staged folder, with their reasons."""
        self._renew(claim)
        began, copied = monotonic(), 0
        count = len(parts) + sum(bool(part.goes.reason) for _, part in parts)
        with self.context.storage.together(folder, count if count < TOGETHER else max(count, SYNCED_TOGETHER)) as each:
            for own, part in parts:
                path = f"{folder}/{own}"
                if isinstance(part.body, bytes):
                    self.context.storage.write_new(path, part.body, synced=each)
                else:
                    copied += self._copy(claim, path, part.body, synced=each)
                if part.goes.reason:
                    details = {"owner": claim.owner, "delivery": claim.number, **part.goes.details}
                    why = reasons.why(part.goes.reason, details, time)
                    content = reasons.content(why, own.own_name, reading.inode(path))
                    self.context.storage.write_new(f"{folder}/{own.reason}", content, synced=each)
        self.context.storage.note_copy(copied, monotonic() - began)

    def _copy(self, claim: Claim, path: str, copied: Copied, *, synced: bool) -> int:
        """Copy a part of the body to a new file; return its size."""
        cursor = self.cursor
        file, offset, fd = cursor.file, cursor.file.tell(), self.context.storage.create(path)
        try:
            with open(fd, "wb", closefd=False) as target:
                step = cast(IO[bytes], _Steps(target, lambda: self._renew(claim)))
                copy_part(file, step, cursor.format, head=cursor.head, **copied._asdict())
            if synced:
                self.context.storage.sync_file(fd)
            size = os.lseek(fd, 0, os.SEEK_CUR)
        except ValueError as error:
            raise OSError(errno.EIO, f"{error}; {BODY_CHANGED}", claim.path) from error
        finally:
            os.close(fd)
            file.seek(offset)
        self.context.storage.await_whole(path, size)
        return size

    def _renew(self, claim: Claim) -> None:
        """Renew the lease, so that it lasts while a step is written."""
        if claim.deadline and self._lease:
            self.claims.extend(claim, max(claim.deadline, lease_end(self.context.clock, self._lease)))


def _how(fate: Fate) -> HowReturned:
    """Return how the delivery of a record ended, after a nack or a failure."""
    if fate.verb == "nack":
        return {"cancel": True, "delay": fate.delay, "said": fate.details}
    return {"failure": fate.said}


def _how_whole(how: HowReturned, why: str) -> HowReturned:
    """Return how a delivery ended, with why the message was settled as a whole."""
    if (failure := how.get("failure")) is not None:
        return {**how, "failure": {**failure, WHOLE: why}}
    return {**how, "said": {**how.get("said", {}), WHOLE: why}}


def _capped(number: int) -> int:
    """Return the number of a record as a name has it, in which the largest number stands for all beyond."""
    return min(number, LARGEST)


class _Steps:
    """Writes to a file, and calls `after_each` after each step of many bytes."""

    def __init__(self, target: IO[bytes], after_each: Callable[[], None]) -> None:
        self._target = target
        self._after_each = after_each
        self._written = 0

    def write(self, data: Any) -> int:
        self._target.write(data)
        self._written += len(data)
        if self._written >= STEP:
            self._written = 0
            self._after_each()
        return len(data)
