"""Many messages, all or none: stage out of sight, commit by one rename, roll forward by anyone.

A job's files lie in `working/.job-ID/ATTEMPT/`, where no consumer looks. Its commit is the one rename that gives its
manifest its name: before it the job is nothing, after it every listed file will be in target/, whoever has to see to
that. Each rename of the roll-forward is done once, however many roll forward at a time. A folder that is dropped is
first renamed away, so that no manifest can appear in it any more, and only then looked at for one.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import BufferedWriter
from typing import IO, NamedTuple

from dropq.errors import DropqError, NoSuchQueue
from dropq.format import names
from dropq.format.layout import DROP_PREFIX, JOB_PREFIX, STATES
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.transitions import Transitions
from dropq.storage import reading
from dropq.storage.failures import describe, error_context, storage_error
from dropq.storage.files import Draft, refuse_links, run_in_parts

log = logging.getLogger("dropq")

MANIFEST = "manifest.json"
#: Milliseconds for which the ledger remembers that a job was sent: 7 days; and how far a row of jobs came: 30 days.
LEDGER_AGE = 7 * 86_400_000
ROW_AGE = 30 * 86_400_000
#: Bytes that a job id may have once it is encoded.
JOB_ID_LIMIT = 100
#: What is told of an attempt that fails.
UNSENT = "nothing of this attempt was sent"

#: What one of a row of jobs is named by.
_ROW = re.compile(r"([^.]+)\.([0-9]{1,19})")


class Staged(NamedTuple):
    """What an attempt staged: the name of its folder, below the job's, and those of its files."""

    attempt: str
    files: list[str]


@dataclass
class JobsReport:
    """What a sweep did about jobs."""

    finished: int = 0
    dropped: int = 0
    refused: int = 0


@dataclass
class Attempt:
    """One try at one part of a job: a folder of its own, so that two tries never share a name."""

    context: QueueContext
    folder: str
    label: str
    files: list[str] = field(default_factory=list)

    def write_all(self, files: Sequence[str], bodies: Iterable[bytes | memoryview]) -> None:
        """Stage many messages; when one cannot be written, the attempt has failed, and is to be discarded."""
        with error_context(UNSENT):
            self.context.storage.write_all(self.folder, files, bodies)
        self.files += files

    @contextmanager
    def open(self, file: str) -> Iterator[IO[bytes]]:
        """Stage a message piece by piece; one whose block raises is not listed, and goes with the attempt."""
        with error_context(UNSENT):
            fd = self.context.storage.create(f"{self.folder}/{file}")
        with BufferedWriter(Draft(fd, lambda error: storage_error(error, UNSENT))) as body:
            yield body
            body.flush()
            with error_context(UNSENT):
                self.context.storage.sync_file(fd)
        self.files.append(file)

    def finish(self) -> Staged:
        """Make the attempt durable as the queue asks; return what it staged, for the driver to commit."""
        with error_context(UNSENT):
            self.context.storage.sync(self.folder)
        return Staged(self.label, self.files)

    def discard(self) -> None:
        """Remove what it staged."""
        with error_context("what was staged is not sent, and goes with its job"):
            self.context.storage.remove_tree(self.folder)


class Job:
    """A job that sends many messages as one.

    Args:
        context: the queue.
        job_id: what names the job; a second run under the same id sends nothing once the first was sent.
    """

    def __init__(self, context: QueueContext, job_id: str) -> None:
        encoded = names.encode(job_id)
        if not job_id or len(encoded) > JOB_ID_LIMIT:
            raise ValueError(f"job id {job_id!r}: give 1 to {JOB_ID_LIMIT} bytes, as they are encoded")
        self._name(context, job_id, encoded)

    def _name(self, context: QueueContext, job_id: str, key: str) -> None:
        self.id = job_id
        self._context = context
        self._key = key
        self.folder = f"{context.layout.working}/{JOB_PREFIX}{key}"

    @property
    def sent(self) -> bool:
        """Whether a job of this id was committed: what of it is not in target/ yet, the next roll-forward brings.

        Raises:
            StorageError: it cannot be told.
        """
        try:
            # RACE: a job moves on meanwhile, from its folder to a dropped one, and is in the ledger before it leaves
            # that: so look in this order, and list the dropped ones only when it is not in its folder.
            committed = _manifest(self.folder) is not None or any(_manifest(away) for away in self._dropped())
            return committed or _is_in_ledger(self._context, self._key)
        except OSError as error:
            raise storage_error(error, f"whether job {self.id} was sent cannot be told: nothing is sent now") from error

    def begin(self) -> None:
        """Make the job's folder, before its first attempt; that it is there already is no error.

        Raises:
            StorageError: it cannot be made.
        """
        try:
            self._context.storage.make_folder(self.folder, parents=False)
            refuse_links([self.folder])
        except OSError as error:
            raise storage_error(error, f"job {self.id} did not begin, nothing was sent") from error

    def attempt(self, label: str) -> Attempt:
        """Begin a try at a part of the job, in a folder of its own.

        Args:
            label: what it tries, such as a partition's number; a random end is added.

        Raises:
            StorageError: the job did not begin, or it was dropped or sent meanwhile: nothing begins it again.
        """
        unique = f"{names.encode(label)}-{secrets.token_hex(6)}"
        with error_context(f"the attempt at job {self.id} did not begin, nothing of it was sent"):
            self._context.storage.make_folder(f"{self.folder}/{unique}", parents=False)
        return Attempt(self._context, f"{self.folder}/{unique}", unique)

    def commit(self, attempts: Iterable[Staged]) -> int:
        """Send everything that is listed: when this returns, all of it is in target/; return how many were sent.

        Nothing is sent, and what was staged is removed, where a job of this id was sent before.

        Raises:
            StorageError: a listed file is missing, or the job was dropped meanwhile; nothing was sent. Or the
                roll-forward was cut short; then all is sent by the next sweep.
            NoSuchQueue: the queue was deleted meanwhile, and the job with it.
        """
        listed = [staged for staged in attempts if staged.files]
        if not listed or self.sent or not self._write_manifest(listed):
            self.abort()
            return 0
        try:
            finish(self._context, self.folder, cut_short=False)
            for folder in self._dropped():
                finish(self._context, folder)  # RACE: a sweep dropped the job as it was committed
            known = _is_in_ledger(self._context, self._key)  # whoever finishes a job leaves it
        except OSError as error:
            fate = f"job {self.id} is committed: `dropq sweep` finishes it, do not send it again"
            raise storage_error(error, fate) from error
        if not known:
            home = self._context.layout.home
            raise NoSuchQueue(
                f"queue {home} is not there any more, and job {self.id} is committed: it went with the queue; where "
                "that comes back, the next sweep sends the job"
            )
        return sum(len(staged.files) for staged in listed)

    def abort(self) -> bool:
        """Drop the job, unless it was committed: then finish it; return whether it was sent after all.

        Raises:
            StorageError: neither could be done; a sweep does what is left.
        """
        try:
            return any(
                [_drop(self._context, self.folder), *(finish(self._context, folder) for folder in self._dropped())]
            )
        except OSError as error:
            raise storage_error(error, f"`dropq sweep` drops job {self.id}, or finishes it if committed") from error

    def _write_manifest(self, listed: list[Staged]) -> bool:
        """Commit; False where another driver of the same job was first, so that its files count."""
        content = {"format": 1, "job": self.id, "attempts": {staged.attempt: staged.files for staged in listed}}
        draft = f"{self.folder}/.manifest-{secrets.token_hex(6)}"
        try:
            self._context.storage.write_new(draft, json.dumps(content).encode())
            self._context.storage.sync(self.folder, self._context.layout.working)
            # RACE: a sweep may drop the job, and another run of it make the folder anew. The draft goes with what was
            # dropped: that it can still be renamed proves that what was looked at after it was written is there.
            for staged in listed:
                self._check(staged)
            self._context.storage.move(draft, f"{self.folder}/{MANIFEST}")
        except OSError as error:
            if self.sent:
                return False
            gone = " (a sweep, or another run of it, dropped it)" if not reading.exists(self.folder) else ""
            raise storage_error(error, f"job {self.id} was not committed{gone}, nothing was sent") from error
        return True

    def _check(self, staged: Staged) -> None:
        """Refuse an attempt that lacks a file; that each is whole was seen where it was written and closed."""
        folder = f"{self.folder}/{staged.attempt}"
        if missing := set(staged.files).difference(reading.names_in(folder)):
            what = f"{len(missing)} of the staged files are not there, the first"
            raise FileNotFoundError(errno.ENOENT, what, f"{folder}/{min(missing)}")

    def _dropped(self) -> Iterator[str]:
        for entry in list(reading.entries(self._context.layout.working)):
            if entry.name.startswith(DROP_PREFIX) and _key(entry.name) == self._key:
                yield entry.path


class Epoch(Job):
    """One of a row of jobs, numbered, each of which comes again until it is sent: such as the epochs of a query.

    The ledger keeps how far a row came. What is below that comes from somebody who has been overtaken, and is refused.

    Args:
        context: the queue.
        row: what names the row.
        number: which of it.
    """

    def __init__(self, context: QueueContext, row: str, number: int) -> None:
        self._row, self._number = names.encode(row), number
        # A dot is in no encoded id: no job of somebody's own is taken for one of a row.
        self._name(context, f"{row}, epoch {number}", f"{self._row}.{number}")

    def begin(self) -> None:
        """Make the job's folder; that it is there already is no error.

        Raises:
            DropqError: a later one of the row was sent.
            StorageError: it cannot be made.
        """
        self._be_next()
        super().begin()

    def commit(self, attempts: Iterable[Staged]) -> int:
        """Send everything that is listed, as any job; the ledger then knows of no earlier one of the row."""
        self._be_next()
        sent = super().commit(attempts)
        with error_context(f"epoch {self._number} of {self._row} is committed: do not send it again"):
            known = _sent_of(self._context, self._row)
            earlier = [number for number in known if number < self._number]
            for number in earlier if self._number in known else ():  # an epoch of nothing is not in the ledger
                self._context.storage.unlink(_ledger_entry(self._context, f"{self._row}.{number}"))
        return sent

    def _be_next(self) -> None:
        with error_context(f"whether a later epoch of {self._row} was sent cannot be told: nothing is sent now"):
            last = max(_sent_of(self._context, self._row), default=-1)
        if last > self._number:
            raise DropqError(
                f"epoch {self._number} of {self._row} was not sent: epoch {last} was sent before it, so that this one "
                "is of a driver that was given up, or of a checkpoint that is older than what was sent. A query with a "
                "new checkpoint sends what it reads anew"
            )


def is_committed(working: str) -> bool:
    """Tell whether a folder working/ holds a job that was committed and is not finished."""
    return any(map(has_manifest, job_folders(working)))


def job_folders(working: str) -> Iterator[str]:
    """Yield the folders of jobs in a folder working/, dropped or not."""
    for entry in reading.entries(working):
        if is_job_name(entry.name) and entry.is_dir(follow_symlinks=False):
            yield entry.path


def is_job_name(name: str) -> bool:
    """Return whether a name in working/ is that of a job's folder, dropped or not."""
    return name.startswith((JOB_PREFIX, DROP_PREFIX))


def has_manifest(folder: str) -> bool:
    """Tell whether a job's folder has its manifest, and not just a name that is reserved for one."""
    reading.ask_server(folder)  # on NFS it may be another host that committed
    try:
        return reading.size_now(f"{folder}/{MANIFEST}") > 0
    except (FileNotFoundError, NotADirectoryError):
        return False


def idle_ms(folder: str, now: int, *, files: bool) -> int:
    """Return for how long nothing has happened in a job's folder, in ms; 0 when it is gone.

    Args:
        folder: the job's folder.
        now: the time, in ms since 1970.
        files: look at each staged file, too. A driver may write to a file for a long time; that changes no folder. A
            roll-forward changes the folders that it takes files from, so that for a committed job they are enough.
    """
    reading.ask_server(folder)
    newest = 0
    for path, attempts, staged in os.walk(folder):
        newest = max([newest, *(_changed(f"{path}/{name}") for name in (*attempts, *(staged if files else ())))])
        if not files:
            break
    # RACE: who finishes a job first renames its folder. Asked for last, a folder that is there had all that it lists.
    changed = _changed(folder)
    return max(now - max(newest, changed), 0) if changed else 0


def sweep(context: QueueContext, *, older_than: float | None = None, stalled_for: float = 0) -> JobsReport:
    """Finish every committed job, and drop those that were not and had no activity for so many seconds.

    Args:
        context: the queue.
        older_than: in seconds; None drops none for its age.
        stalled_for: leave to their drivers the committed jobs in which something moved within so many seconds.
    """
    report = JobsReport()
    for folder in list(job_folders(context.layout.working)):
        name = os.path.basename(folder)
        with _passing_over(report, folder):
            if _manifest(folder) is not None:
                stalled = idle_ms(folder, context.clock.now_ms(), files=False) >= stalled_for * 1000
                report.finished += stalled and finish(context, folder)
            elif (
                name.startswith(DROP_PREFIX)
                or _is_sent(context, _key(name))  # a task came too late
                or _is_given_up(context, folder, older_than)
            ):
                sent = _drop(context, folder)
                report.finished, report.dropped = report.finished + sent, report.dropped + (not sent)
    for entry in list(reading.entries(context.layout.ledger)):
        age = ROW_AGE if _ROW.fullmatch(entry.name.removesuffix(".json")) else LEDGER_AGE
        if context.clock.now_ms() - _changed(entry.path) > age:
            context.storage.unlink(entry.path)
    return report


@contextmanager
def _passing_over(report: JobsReport, job: str) -> Iterator[None]:
    """Go on with the other jobs when one cannot be seen to: the next sweep tries again."""
    try:
        yield
    except (OSError, DropqError) as error:
        report.refused += 1
        log.warning("job %s: %s; the next sweep tries again", job, describe(error))


def _is_given_up(context: QueueContext, folder: str, older_than: float | None) -> bool:
    """Return whether a job that is not committed is old enough to be dropped.

    Its folders are asked first: they show of most jobs that they go on, without a look at each file.
    """
    if older_than is None:
        return False
    now = context.clock.now_ms()
    return all(idle_ms(folder, now, files=files) >= older_than * 1000 for files in (False, True))


def _is_sent(context: QueueContext, key: str) -> bool:
    """Tell whether the ledger knows a job as sent; one of a row is, too, if a later one was."""
    row = _ROW.fullmatch(key)
    later = row is not None and max(_sent_of(context, row[1]), default=-1) > int(row[2])
    return later or _is_in_ledger(context, key)


def _is_in_ledger(context: QueueContext, key: str) -> bool:
    reading.ask_server(context.layout.ledger)  # on NFS it may be another host that sent the job
    return reading.exists(_ledger_entry(context, key))


def _sent_of(context: QueueContext, row: str) -> list[int]:
    """Return which jobs of a row the ledger knows as sent."""
    found = (_ROW.fullmatch(name.removesuffix(".json")) for name in reading.names_in(context.layout.ledger))
    return [int(match[2]) for match in found if match and match[1] == row]


def finish(context: QueueContext, folder: str, *, cut_short: bool = True) -> bool:
    """Roll a committed job forward and remove its folder; False where it has no manifest.

    RACE: any number of processes may do this at once. A rename that finds nothing was done by another.

    Args:
        context: the queue.
        folder: the job's folder.
        cut_short: it may have been begun before, maybe before a power cut.
    """
    manifest = _manifest(folder)
    if manifest is None:
        return False
    try:
        context.storage.sync(folder)  # the manifest is durable before the first rename, whoever wrote it
    except FileNotFoundError:
        return False  # RACE: somebody else took the folder away, and finishes it
    listed = _listed(manifest, folder)
    if cut_short:
        _remove_what_was_sent(context, folder, listed)
    context.storage.sync(*sorted(_send_all(context, folder, listed)))
    context.storage.make_folder(context.layout.ledger)
    entry = _ledger_entry(context, _key(os.path.basename(folder)))
    context.storage.write_small(entry, json.dumps({"job": manifest.get("job")}).encode())
    _remove(context, folder, listed)
    return True


def _remove_what_was_sent(context: QueueContext, folder: str, listed: Mapping[str, list[str]]) -> None:
    """Remove the old names of files that were sent before a power cut, where that brought them back, as btrfs does.

    Only what lies in a state of this queue was sent: another name may as well be that of a backup.
    """
    paths = (f"{folder}/{attempt}/{file}" for attempt, files in listed.items() for file in files)
    twice = [path for path in paths if reading.has_another_name(path)]
    if not twice:
        return
    states = map(context.layout.folder, STATES)
    sent = {entry.inode() for state in states for entry in reading.entries(state)}
    for path in twice:
        with suppress(FileNotFoundError):  # RACE: another roll-forward was first
            if reading.inode(path) in sent:
                context.storage.unlink(path)


def _send_all(context: QueueContext, folder: str, listed: Mapping[str, list[str]]) -> set[str]:
    """Rename what is listed to where it is sent to; return those folders."""
    destinations, seen = {context.layout.target}, set[str]()
    for attempt, files in listed.items():
        source = f"{folder}/{attempt}"
        apart = {file for file in files if names.may_be_delayed(file)} | seen.intersection(files)
        for file in apart:
            destination = Transitions(context).sent_to(context.sidecars.parse(file).not_before)
            destinations.add(destination)
            _send(context, f"{source}/{file}", f"{destination}/{file}", taken=file in seen)
        at_once = [file for file in files if file not in apart] if apart else files
        run_in_parts(at_once, partial(_send_some, context, source))
        seen.update(files)
    return destinations


def _send_some(context: QueueContext, source: str, files: Iterable[str]) -> None:
    place, target = context.storage.place, context.layout.target
    for file in files:
        try:
            place(f"{source}/{file}", f"{target}/{file}")
        except (FileExistsError, FileNotFoundError):
            _send(context, f"{source}/{file}", f"{target}/{file}")


def _send(context: QueueContext, source: str, destination: str, *, taken: bool = False) -> None:
    """Rename a staged file into target/; where two made the same name, however unlikely, both get there."""
    try:
        if not taken:
            return context.storage.place(source, destination)
    except FileExistsError:
        pass
    except FileNotFoundError:
        if reading.exists(source):
            raise  # it is target/ that is missing
        return None  # RACE: another roll-forward was first
    transitions = Transitions(context)
    name = context.sidecars.parse(os.path.basename(destination))
    transitions.into_target(source, transitions.unique(name, chosen=True))


def _drop(context: QueueContext, folder: str) -> bool:
    """Take a job's folder out of the way, then look for a manifest there: what was committed is sent all the same."""
    away = _away(folder)
    try:
        context.storage.rename_folder(folder, away)
    except FileNotFoundError:
        return False  # RACE: finished, or dropped, by somebody else
    if finish(context, away):
        return True
    context.storage.remove_tree(away)
    return False


def _remove(context: QueueContext, folder: str, listed: Mapping[str, list[str]]) -> None:
    """Remove a finished job's folder, once nothing that it lists is left in it."""
    away = _away(folder)
    try:
        context.storage.rename_folder(folder, away)
    except FileNotFoundError:
        return  # RACE: another roll-forward is removing it
    if any(not reading.names_in(f"{away}/{attempt}").isdisjoint(files) for attempt, files in listed.items()):
        # RACE: the queue was renamed away and back while its files were sent: what was not found then is here.
        finish(context, away)
        return
    context.storage.remove_tree(away)


def _away(folder: str) -> str:
    parent, name = os.path.split(folder)
    return f"{parent}/{DROP_PREFIX}{_key(name)}-{secrets.token_hex(6)}"


def _key(name: str) -> str:
    """Return the encoded job id that a job's folder is named by, dropped or not."""
    if name.startswith(DROP_PREFIX):
        return name.removeprefix(DROP_PREFIX).rpartition("-")[0]
    return name.removeprefix(JOB_PREFIX)


def _manifest(folder: str) -> Mapping[str, object] | None:
    path = f"{folder}/{MANIFEST}"
    try:
        if os.path.islink(folder) or not has_manifest(folder):
            return None  # no job's folder; or RACE: reserved for a rename that is to come, or that a crash cut off
        data = reading.read_small(path, limit=-1)
        content = reading.parse_json(data) if data is not None else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise DropqError(f"{path} is damaged ({error}): set it aside by hand, then sweep again") from error
    if data is None:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("attempts"), dict):
        raise DropqError(f"{path} lists no files: set it aside by hand, then sweep again")
    return content


def _listed(manifest: Mapping[str, object], job: str) -> dict[str, list[str]]:
    """Return the files that a manifest lists, by the folder of their attempt; what is no name of one is left out.

    So is an attempt that is a symbolic link: who may write in working/ is not to choose by one which files of
    elsewhere are sent, by the rights of whoever sweeps.
    """
    attempts = manifest.get("attempts")
    listed: dict[str, list[str]] = {}
    for attempt, files in attempts.items() if isinstance(attempts, dict) else ():
        is_attempt = _is_name(attempt) and not os.path.islink(f"{job}/{attempt}")
        named = [file for file in files if _is_name(file)] if isinstance(files, list) and is_attempt else []
        if named:
            listed[attempt] = named
        if len(named) < (len(files) if isinstance(files, list) else 1):
            log.warning("job %s: its manifest lists in %r what are no names of staged files: passed over",
                        manifest.get("job"), attempt)  # fmt: skip
    return listed


def _is_name(name: object) -> bool:
    if not isinstance(name, str) or name == "" or name[0] == "." or "/" in name or "\0" in name:
        return False
    try:
        return bool(os.fsencode(name))
    except UnicodeEncodeError:  # half of a pair, which no file system has
        return False


def _changed(path: str) -> int:
    try:
        return reading.changed_ms(path)
    except FileNotFoundError:
        return 0


def _ledger_entry(context: QueueContext, key: str) -> str:
    return f"{context.layout.ledger}/{key}.json"
