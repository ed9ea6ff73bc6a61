"""Many messages, all or none: stage out of sight, commit by one rename, roll forward by anyone.

A job's files lie in `working/.job-ID/ATTEMPT/`, where no consumer looks. One rename, which gives the manifest its name,
commits the job. Invariant: before the commit nothing of the job is sent, and after it every listed file reaches
target/, moved by its driver or by a sweep. Any number of processes may roll forward at once; each file is moved once.
Where the queue is full, the manifest may name the queue of its overflow selector, to whose target/ the files go then:
the commit and the ledger stay where the job began, so no job is sent to both.
To drop a job, its folder is first renamed, so that no manifest can appear in it any more, and then searched for one.

    a crash               leaves                                 and a sweep
    before the commit     a folder without a manifest            drops it after a week without a write if a consumer
                                                                 sweeps; `dropq sweep`, only by `--jobs-older-than`
    after the commit      a manifest, and files that have not    moves the files, and then removes the folder
                          gone
    while it is dropped   a folder that is named so              removes it, or goes on if it has a manifest
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import BufferedWriter
from typing import IO, Any, NamedTuple

from dropq.errors import ConfigError, DropqError, NoSuchQueue, QueueFull, StorageError
from dropq.format import names
from dropq.format.escapes import encode
from dropq.format.layout import DROP_PREFIX, JOB_PREFIX, STATES
from dropq.lifecycle import ages, naming
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.decision import Decision
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.sending import into_target, sent_to
from dropq.storage import reading
from dropq.storage.failures import describe, error_context, storage_error
from dropq.storage.files import Draft, refuse_links
from dropq.storage.mounts import rename_leads

log = logging.getLogger("dropq")

MANIFEST = "manifest.json"
#: How the file of a body begins that has no name yet; no manifest can list it.
DRAFT_PREFIX = ".draft-"
#: Bytes of an encoded job id.
JOB_ID_LIMIT = 100
#: What the error about a failed attempt says of its messages.
UNSENT = "nothing of this attempt was sent"
#: What an error after the commit says of the job.
COMMITTED = "is committed: `dropq sweep` finishes it, do not send it again"

#: The key of an epoch, or of a list of a transfer: its row and its number.
_NUMBERED = re.compile(r"((?:transfer\.)?[^.]+)\.([0-9]{1,19})")
#: How the row of a transfer begins.
_TRANSFER = "transfer."


class StagedAttempt(NamedTuple):
    """What an attempt staged: the name of its folder in the job's folder, and the names of its files."""

    attempt: str
    files: list[str]


@dataclass
class JobsReport:
    """How many jobs a sweep finished, dropped, and could not handle."""

    finished: int = 0
    dropped: int = 0
    refused: int = 0


@dataclass
class Attempt:
    """A try at a part of a job, in a folder of its own, so that two tries never write the same file."""

    context: QueueContext
    folder: str
    label: str
    files: list[str] = field(default_factory=list)

    def write_all(self, files: Sequence[str], bodies: Iterable[bytes | memoryview]) -> None:
        """Stage many messages. If this raises, the attempt has failed, and the caller must discard it."""
        with error_context(UNSENT):
            self.context.storage.write_all(self.folder, files, bodies)
        self.files += files

    @contextmanager
    def open(self, name: Callable[[], str]) -> Iterator[IO[bytes]]:
        """Stage a message piece by piece; if the block raises, the message is not listed.

        `name` returns the name of its file. It is called when the body is complete, as the name may have the number of
        its records.
        """
        draft = f"{self.folder}/{DRAFT_PREFIX}{secrets.token_hex(6)}"
        with error_context(UNSENT):
            fd = self.context.storage.create(draft)
        with BufferedWriter(Draft(fd, lambda error: storage_error(error, UNSENT))) as body:
            yield body
            body.flush()
            with error_context(UNSENT):
                self.context.storage.sync_file(fd)
            size = body.tell()
        file = name()
        with error_context(UNSENT):
            self.context.storage.await_whole(draft, size)
            self.context.storage.rename_guarded(draft, f"{self.folder}/{file}")
        self.files.append(file)

    def finish(self) -> StagedAttempt:
        """Sync the attempt as the queue's durability asks; return what it staged, for the driver to commit."""
        with error_context(UNSENT):
            self.context.storage.sync(self.folder)
        return StagedAttempt(self.label, self.files)

    def discard(self) -> None:
        """Remove what the attempt staged."""
        with error_context("nothing of this attempt is sent; its files are removed with the job"):
            self.context.storage.remove_tree(self.folder)


class Job:
    """A job that sends many messages, all or none; after that, other runs under its id send nothing."""

    #: What the manifest and the ledger say of the job besides what it sends.
    note: Mapping[str, object] = {}
    #: Whether the job is committed although it sends nothing.
    may_be_empty = False

    def __init__(self, context: QueueContext, job_id: str) -> None:
        key = encode(job_id)
        if not job_id or len(key) > JOB_ID_LIMIT:
            raise ValueError(f"job id {job_id!r}: give 1 to {JOB_ID_LIMIT} bytes, counted in their encoded form")
        self._identify(context, job_id, key)

    def _identify(self, context: QueueContext, job_id: str, key: str) -> None:
        self.id = job_id
        self._context = context
        self._key = key
        self.folder = f"{context.layout.working}/{JOB_PREFIX}{key}"

    @property
    def sent(self) -> bool:
        """Whether a job of this id was committed; the next roll-forward moves what is not in target/ yet."""
        with error_context(f"it is not known whether job {self.id} was sent: nothing is sent now"):
            # RACE: meanwhile a job may move from its folder to a dropped one, and from there to the ledger. Looking in
            # the same order finds it. The dropped folders are listed only after the job was not in its own.
            sent = (
                _manifest(self.folder) is not None
                or any(_manifest(folder) for folder in self._dropped())
                or _is_in_ledger(self._context, self._key)
            )
        return sent

    def ledger_note(self, fate: str) -> Mapping[str, object] | None:
        """Return the note that this job was sent with; None if the ledger does not have the job now, or no note.

        DropqError or StorageError, about an entry that is damaged or cannot be read, say `fate` of what was to be done.
        """
        path = _ledger_entry(self._context, self._key)
        with error_context(fate):
            reading.ask_server(self._context.layout.ledger)
            data = reading.read_small(path, limit=reading.LONG_LIST)
        try:
            content = reading.parse_json(data or b"null")
        except ValueError as error:
            raise DropqError(f"{path} is damaged ({error}): {fate}") from error
        note = content.get("note") if isinstance(content, dict) else None
        return note if isinstance(note, dict) else None

    def begin(self) -> None:
        """Make the job's folder, unless it exists; to be called before the first attempt."""
        with error_context(f"job {self.id} did not begin, nothing was sent"):
            self._context.storage.make_folder(self.folder, parents=False)
            refuse_links([self.folder])

    def attempt(self, label: str) -> Attempt:
        """Begin a try at a part of the job, in a new folder named by `label`.

        StorageError says that the job did not begin, or was dropped or sent meanwhile.
        """
        unique = f"{encode(label)}-{secrets.token_hex(6)}"
        with error_context(f"the attempt at job {self.id} did not begin, nothing of it was sent"):
            self._context.storage.make_folder(f"{self.folder}/{unique}", parents=False)
        return Attempt(self._context, f"{self.folder}/{unique}", unique)

    def commit(self, attempts: Iterable[StagedAttempt], *, overflow: str = "") -> int:
        """Send every listed file; return how many, once all of them are in target/.

        If a job of this id was sent before, send nothing and remove what was staged. With `overflow`, the queue of the
        overflow selector, the whole job goes there.

        Raises:
            QueueFull: the job cannot go to the queue of the overflow selector; nothing was sent.
            StorageError: a listed file is missing, or the job was dropped meanwhile: nothing was sent. Or the
                roll-forward was interrupted: the next sweep finishes it.
            NoSuchQueue: the queue was deleted meanwhile, with the job.
        """
        listed = [staged for staged in attempts if staged.files]
        if not (listed or self.may_be_empty) or self.sent or not self._write_manifest(listed, overflow):
            self.abort()
            return 0
        with error_context(f"job {self.id} {COMMITTED}"):
            finish(self._context, self.folder, interrupted=False)
            for folder in self._dropped():
                finish(self._context, folder)  # RACE: a sweep dropped the job while it was committed
            finished = _is_in_ledger(self._context, self._key)
        if not finished:
            raise NoSuchQueue(
                f"queue {self._context.layout.home} does not exist any more, and committed job {self.id} went with it: "
                "if the queue comes back, the next sweep sends the job"
            )
        return sum(len(staged.files) for staged in listed)

    def abort(self) -> bool:
        """Drop the job, or finish it if it was committed; return whether it was sent. What fails is left to a sweep."""
        with error_context(f"`dropq sweep` drops job {self.id}, or finishes it if committed"):
            sent = [_drop(self._context, self.folder), *(finish(self._context, folder) for folder in self._dropped())]
        return any(sent)

    def _write_manifest(self, listed: list[StagedAttempt], overflow: str = "") -> bool:
        """Commit the job; return False if another run of it was committed first, whose files are sent."""
        attempts = {staged.attempt: staged.files for staged in listed}
        content = {"format": 1, "job": self.id, "attempts": attempts, **({"note": self.note} if self.note else {})}
        if overflow:
            self._check_overflow(overflow)
            content["overflow"] = overflow
        draft, manifest = f"{self.folder}/.manifest-{secrets.token_hex(6)}", json.dumps(content).encode()
        if len(manifest) > reading.LONG_LIST:
            why = f"its manifest has more than {reading.LONG_LIST} bytes: make several jobs"
            raise StorageError(f"job {self.id} was not committed, nothing was sent: {why}", errno=errno.EFBIG)
        try:
            self._context.storage.write_new(draft, manifest)
            self._context.storage.sync(self.folder, self._context.layout.working)
            # RACE: a sweep may drop the job, and another run of it make a new folder. The draft then goes with the old
            # folder. So if it can still be renamed, the files that were checked after it was written are there, too.
            for staged in listed:
                self._check(staged)
            self._context.storage.move(draft, f"{self.folder}/{MANIFEST}")
        except OSError as error:
            if self.sent:
                return False
            gone = " (a sweep, or another run of it, dropped it)" if not reading.exists(self.folder) else ""
            raise storage_error(error, f"job {self.id} was not committed{gone}, nothing was sent") from error
        self._context.log.act("committed", id=self.id, count=sum(map(len, attempts.values())))
        return True

    def _check_overflow(self, overflow: str) -> None:
        try:
            _overflow(self._context, overflow, f"job {self.id} was not sent")
        except (NoSuchQueue, QueueFull) as error:
            raise QueueFull(
                f"job {self.id} was not sent: its queue is full, and it cannot go to queue {overflow}: {error}"
            ) from error

    def _check(self, staged: StagedAttempt) -> None:
        """Raise if a file of an attempt is missing; that the files are complete was checked when they were closed."""
        folder = f"{self.folder}/{staged.attempt}"
        if missing := set(staged.files).difference(reading.names_in(folder)):
            what = f"{len(missing)} of the staged files are missing, the first"
            raise FileNotFoundError(errno.ENOENT, what, f"{folder}/{min(missing)}")

    def _dropped(self) -> Iterator[str]:
        for entry in list(reading.entries(self._context.layout.working)):
            if entry.name.startswith(DROP_PREFIX) and _key(entry.name) == self._key:
                yield entry.path


class Epoch(Job):
    """A job that sends one epoch of a streaming query, or one batch of foreachBatch.

    The ledger keeps the last epoch that was sent. An earlier one comes from a driver that another has overtaken, and is
    refused. `query` also names the job if the query sends several jobs from each batch.
    """

    def __init__(self, context: QueueContext, query: str, number: int) -> None:
        # An encoded id has no dot, so no other job has the key of an epoch.
        self._identify_in(encode(query), number, context, f"{query}, epoch {number}")

    def _identify_in(self, row: str, number: int, context: QueueContext, job_id: str) -> None:
        self._row, self._number = row, number
        self._identify(context, job_id, f"{row}.{number}")

    @property
    def sent(self) -> bool:
        """Whether the epoch was committed, as of `Job.sent`; DropqError if a later one of the query was sent."""
        sent = super().sent
        if not sent:
            # RACE: once a later epoch is in the ledger, this one may leave it. So the later one is looked for second.
            self._refuse_if_overtaken()
        return sent

    def begin(self) -> None:
        """Make the job's folder, unless it exists; DropqError if a later epoch of the query was sent."""
        self._refuse_if_overtaken()
        super().begin()

    def commit(self, attempts: Iterable[StagedAttempt], *, overflow: str = "") -> int:
        """Send every listed file, as `Job.commit` does; then remove earlier epochs from the ledger."""
        self._refuse_if_overtaken()
        count = super().commit(attempts, overflow=overflow)
        with error_context(f"job {self.id} is committed: do not send it again"):
            sent = _sent_numbers(self._context, self._row)
            earlier = [number for number in sent if number < self._number]
            for number in earlier if self._number in sent else ():  # an empty epoch is not in the ledger
                self._context.storage.unlink(_ledger_entry(self._context, f"{self._row}.{number}"))
        return count

    def _refuse_if_overtaken(self) -> None:
        with error_context(f"it is not known whether a job after {self.id} was sent: nothing is sent now"):
            last = max(_sent_numbers(self._context, self._row), default=-1)
        if last > self._number:
            raise DropqError(self._overtaken(last))

    def _overtaken(self, last: int) -> str:
        return (
            f"epoch {self._number} of {self._row} was not sent, as epoch {last} was sent before: this driver was "
            "replaced by another, or its checkpoint is older than what was sent. To send what the query reads "
            "again, start it with a new checkpoint"
        )


class TransferJob(Epoch):
    """A job that sends one list of messages that came from another file system; no other row of lists is named `row`.

    It is in the ledger even if it sends nothing, and its last list stays there for good: a list that comes a second
    time is refused, whenever that is.
    """

    may_be_empty = True

    def __init__(self, context: QueueContext, row: str, number: int) -> None:
        self._identify_in(f"{_TRANSFER}{row}", number, context, f"transfer {row}, list {number}")

    def send(self, attempt: StagedAttempt, note: Mapping[str, object]) -> int:
        """Send every listed file, as `commit` does; let the ledger keep a note, as JSON, beside the number."""
        self.note = note
        return self.commit([attempt])

    def sent_note(self) -> Mapping[str, object] | None:
        """Return the note that this list was sent with; None where the ledger does not have the list now."""
        return self.ledger_note("nothing is removed where the messages came from")

    def _overtaken(self, last: int) -> str:
        return (
            f"{self.id} was not sent to {self._context.layout.home}, as list {last} was sent before: the folder of the "
            "lists is a copy of another queue's, or an older state of its own; nothing was removed"
        )


def is_committed(working: str) -> bool:
    """Return whether a folder working/ has a job that was committed and is not finished."""
    return any(map(has_manifest, job_folders(working)))


def job_folders(working: str) -> Iterator[str]:
    """Yield the folders of the jobs in a folder working/, including dropped ones."""
    for entry in reading.entries(working):
        if is_job_name(entry.name) and entry.is_dir(follow_symlinks=False):
            yield entry.path


def is_job_name(name: str) -> bool:
    """Return whether a name in working/ is that of a job's folder, dropped or not."""
    return name.startswith((JOB_PREFIX, DROP_PREFIX))


def has_manifest(folder: str) -> bool:
    """Return whether a job's folder has a manifest; an empty file only reserves its name."""
    reading.ask_server(folder)  # on NFS, another host may have committed the job
    try:
        return reading.size_now(f"{folder}/{MANIFEST}") > 0
    except (FileNotFoundError, NotADirectoryError):
        return False


def idle_ms(folder: str, now: int, *, files: bool) -> int:
    """Return how long ago a job's folder last changed, in ms; 0 if it is gone.

    With `files`, look at each staged file, too: a driver may write to one for a long time, which changes no folder. A
    roll-forward changes folders, so for a committed job their times are enough.
    """
    reading.ask_server(folder)
    newest = 0
    for path, attempts, staged in os.walk(folder):
        paths = (f"{path}/{name}" for name in (*attempts, *(staged if files else ())))
        newest = max([newest, *(reading.changed_ms(each, gone=0) for each in paths)])
        if not files:
            break
    # RACE: a roll-forward that is finished first renames the folder. If the folder still exists now, the walk above saw
    # all of it.
    changed = reading.changed_ms(folder, gone=0)
    return max(now - max(newest, changed), 0) if changed else 0


def sweep(context: QueueContext, *, older_than: float | None = None, stalled_for: float = 0) -> JobsReport:
    """Finish the committed jobs, but for those in which something changed in the last `stalled_for` seconds.

    Drop the others that have been idle for `older_than` seconds; None drops none for its age.
    """
    report = JobsReport()
    for folder in list(job_folders(context.layout.working)):
        try:
            found = decide(context, folder, older_than=older_than, stalled_for=stalled_for)
            if found.allowed:
                goes_on = found.why == "committed"
                sent = finish(context, folder) if goes_on else _drop(context, folder)
                report.finished += sent
                report.dropped += not (goes_on or sent)
        except (OSError, DropqError) as error:
            report.refused += 1
            log.warning("job %s: %s; the next sweep tries again", folder, describe(error))
    for entry in list(reading.entries(context.layout.ledger)):
        if entry.name.startswith(_TRANSFER):
            continue  # the last list of a transfer is remembered for good
        age = ages.EPOCH if _NUMBERED.fullmatch(entry.name.removesuffix(".json")) else ages.LEDGER
        if context.clock.now_ms() - reading.changed_ms(entry.path, gone=0) > age:
            context.storage.unlink(entry.path)
    return report


def decide(context: QueueContext, folder: str, *, older_than: float | None = None, stalled_for: float = 0) -> Decision:
    """Return whether a sweep, with these arguments, brings a job in order.

    The job is `committed`, `dropped`, `sent` before, so that a task came too late, or only `begun`. DropqError says
    that its manifest cannot be used, or its folder cannot be looked at.
    """
    with context.error_context("the job stays as it is"):
        now = context.clock.now_ms()
        if _manifest(folder) is not None:
            return Decision(idle_ms(folder, now, files=False) >= stalled_for * 1000, "committed")
        name = os.path.basename(folder)
        if name.startswith(DROP_PREFIX):
            return Decision(True, "dropped")
        if _is_sent(context, _key(name)):
            return Decision(True, "sent")
        # The folders alone show that most jobs are active; the files of the others are checked, too.
        return Decision(
            older_than is not None
            and all(idle_ms(folder, now, files=files) >= older_than * 1000 for files in (False, True)),
            "begun",
        )


def _is_sent(context: QueueContext, key: str) -> bool:
    """Return whether the ledger has a job, or a later job of its row."""
    job = _NUMBERED.fullmatch(key)
    overtaken = job is not None and max(_sent_numbers(context, job[1]), default=-1) > int(job[2])
    return overtaken or _is_in_ledger(context, key)


def _is_in_ledger(context: QueueContext, key: str) -> bool:
    reading.ask_server(context.layout.ledger)  # on NFS, another host may have sent the job
    return reading.exists(_ledger_entry(context, key))


def _sent_numbers(context: QueueContext, row: str) -> list[int]:
    jobs = (_NUMBERED.fullmatch(name.removesuffix(".json")) for name in reading.names_in(context.layout.ledger))
    return [int(job[2]) for job in jobs if job and job[1] == row]


def finish(context: QueueContext, folder: str, *, interrupted: bool = True) -> bool:
    """Roll a committed job forward and remove its folder; return False if it has no manifest.

    RACE: any number of processes may do this at once. Each file is moved by the first rename; the others find it gone.
    An earlier roll-forward may have been `interrupted`, maybe by a power cut.
    """
    manifest = _manifest(folder)
    if manifest is None:
        return False
    try:
        context.storage.sync(folder)  # the manifest must be durable before the first rename
    except FileNotFoundError:
        return False  # RACE: another process renamed the folder, and finishes the job
    listed, destination = _listed(manifest, folder), _destination(context, manifest)
    if interrupted:
        _unlink_sent_names(context, destination, folder, listed)
    context.storage.sync(*sorted(_send_all(context, destination, folder, listed)))
    context.storage.make_folder(context.layout.ledger)
    entry = _ledger_entry(context, _key(os.path.basename(folder)))
    content = {key: manifest[key] for key in ("job", "note") if key in manifest}
    context.storage.write_small(entry, json.dumps(content).encode())
    _remove(context, folder, listed)
    return True


def _destination(context: QueueContext, manifest: Mapping[str, Any]) -> QueueContext:
    """Return the queue that a committed job goes to: where its manifest says, if that can be; else its own.

    RACE: if the overflow selector or its queue goes meanwhile, some files go to each of the two queues, each file once.
    """
    overflow, job = manifest.get("overflow"), manifest.get("job")
    if not overflow:
        return context
    try:
        return _overflow(context, overflow, f"job {job} {COMMITTED}")
    except (NoSuchQueue, QueueFull) as error:
        log.warning("job %s goes to queue %s itself: %s", job, context.name, error)
        return context


def _overflow(context: QueueContext, address: object, fate: str) -> QueueContext:
    """Return the queue that a queue's overflow selector sends to, for files that were staged in the queue.

    Any user who may write in working/ may write an `address` into a manifest. So it counts only while the selector,
    which such a user may not write, says the same. An error says `fate` of the job if that is not known now.

    Raises:
        QueueFull: the selector does not send to that address, or the files of a job cannot be renamed there.
        NoSuchQueue: there is no such queue.
        ConfigError, StorageError: it cannot be opened now, or the selectors cannot be read.
    """
    from dropq.policies.selectors import overflow_of  # here, as few jobs find their queue full

    with context.error_context(fate):
        to = selector.to if (selector := overflow_of(context)) else None
    if to is None or to != address:
        raise QueueFull(f"queue {context.name} has no overflow selector that sends there")
    try:
        other = open_queue(context.root, to)
    except (ConfigError, StorageError) as error:
        raise type(error)(f"{error}; {fate}") from error
    if other.config.underlying_topic is not None:
        raise QueueFull(f"{to} is a view on topics, which a job does not publish through")
    with other.error_context(fate):
        is_near = rename_leads(context.layout.working, other.layout.target)
    if not is_near:
        raise QueueFull(f"{to} is on another file system, where a rename cannot go")
    return replace(other, storage=context.storage.at(other.layout.base))


def _unlink_sent_names(
    context: QueueContext, destination: QueueContext, folder: str, listed: Mapping[str, list[str]]
) -> None:
    """Unlink staged names of files that were sent before a power cut, which on btrfs may bring the old names back.

    A file was sent if its inode is in a state folder of this queue, or of the job's destination. Else its second name
    may be that of a backup.
    """
    paths = (f"{folder}/{attempt}/{file}" for attempt, files in listed.items() for file in files)
    with_two_names = [path for path in paths if reading.has_another_name(path)]
    if not with_two_names:
        return
    states = {queue.layout.folder(state) for queue in (context, destination) for state in STATES}
    sent = {entry.inode() for state in states for entry in reading.entries(state)}
    for path in with_two_names:
        with suppress(FileNotFoundError):  # RACE: another roll-forward was first
            if reading.inode(path) in sent:
                context.storage.unlink(path)


def _send_all(
    context: QueueContext, destination: QueueContext, folder: str, listed: Mapping[str, list[str]]
) -> set[str]:
    """Rename the listed files into the job's destination, target/ or delayed/; return the folders that got any.

    A name with a sidecar is written as the destination has names: a DropboxMQ that reads it there knows no sidecars.
    """
    folders, seen = {destination.layout.target}, set[str]()
    is_own = destination is context
    is_apart = names.may_be_delayed if is_own else names.may_be_marked
    for attempt, files in listed.items():
        source = f"{folder}/{attempt}"
        apart = {file for file in files if is_apart(file)} | seen.intersection(files)
        for file in apart:
            name = destination.sidecars.parse(file)
            into = sent_to(destination, name.not_before)
            folders.add(into)
            own = file
            if name.meta and not is_own:
                destination.sidecars.make_known()
                own = destination.sidecars.fit(name)
            _send(destination, f"{source}/{file}", f"{into}/{own}", taken=file in seen)
        at_once = [file for file in files if file not in apart] if apart else files
        # RACE: the queue of the overflow selector may be deleted meanwhile. A rename into its open folder would lose
        # the file with that queue; a rename by path fails, and the next sweep sends the file to this queue.
        left = (
            destination.storage.rename_all_exclusive(source, destination.layout.target, at_once) if is_own else at_once
        )
        for file in left:
            _send(destination, f"{source}/{file}", f"{destination.layout.target}/{file}")
        seen.update(files)
    return folders


def _send(context: QueueContext, source: str, destination: str, *, taken: bool = False) -> None:
    """Rename a staged file to its destination, or into target/ under another name if its own is taken there."""
    try:
        if not taken:
            return context.storage.rename_guarded(source, destination)
    except FileExistsError:
        pass
    except FileNotFoundError:
        if reading.exists(source):
            raise  # the folder of the destination is missing
        return None  # RACE: another roll-forward was first
    name = context.sidecars.parse(os.path.basename(destination))
    into_target(context, source, naming.unique(name, chosen=True))


def _drop(context: QueueContext, folder: str) -> bool:
    """Finish or remove a job that nobody can commit any more; return whether it was committed."""
    if not (dropped := _rename_to_drop(context, folder)):
        return False
    if finish(context, dropped):
        return True
    context.storage.remove_tree(dropped)
    context.log.act("dropped", name=os.path.basename(folder))
    return False


def _remove(context: QueueContext, folder: str, listed: Mapping[str, list[str]]) -> None:
    """Remove a finished job's folder, unless a listed file is still in it."""
    if not (dropped := _rename_to_drop(context, folder)):
        return
    if any(not reading.names_in(f"{dropped}/{attempt}").isdisjoint(files) for attempt, files in listed.items()):
        # RACE: the queue was renamed and renamed back meanwhile, so that some renames did not find their files.
        finish(context, dropped)
        return
    context.storage.remove_tree(dropped)


def _rename_to_drop(context: QueueContext, folder: str) -> str:
    """Rename a job's folder, so that nobody commits it; return its path, or "" if another process was first."""
    dropped = _drop_path(folder)
    try:
        context.storage.rename_folder(folder, dropped)
    except FileNotFoundError:
        return ""  # RACE: another process finished or dropped it
    return dropped


def _drop_path(folder: str) -> str:
    parent, name = os.path.split(folder)
    return f"{parent}/{DROP_PREFIX}{_key(name)}-{secrets.token_hex(6)}"


def _key(name: str) -> str:
    """Return the encoded job id in the name of a job's folder, dropped or not."""
    if name.startswith(DROP_PREFIX):
        return name.removeprefix(DROP_PREFIX).rpartition("-")[0]
    return name.removeprefix(JOB_PREFIX)


def _manifest(folder: str) -> Mapping[str, Any] | None:
    """Return the manifest of a job's folder, which has `attempts`; None if there is none."""
    path = f"{folder}/{MANIFEST}"
    try:
        if os.path.islink(folder) or not has_manifest(folder):
            return None  # or RACE: the name is only reserved, for a rename that follows, or that a crash prevented
        data = reading.read_small(path, limit=reading.LONG_LIST)
        if data is None:
            return None
        content = reading.parse_json(data, any_text=True)  # each name in it is checked
    except ValueError as error:
        raise DropqError(f"{path} is damaged ({error}): set it aside by hand, then sweep again") from error
    if not isinstance(content, dict) or not isinstance(content.get("attempts"), dict):
        raise DropqError(f"{path} lists no files: set it aside by hand, then sweep again")
    return content


def _listed(manifest: Mapping[str, Any], job: str) -> dict[str, list[str]]:
    """Return the names of files that a manifest lists, by the folder of their attempt; skip anything else.

    An attempt that is a symbolic link is skipped, too. Otherwise a user who may write in working/ could have a sweep,
    with the rights of another user, send files from elsewhere.
    """
    listed: dict[str, list[str]] = {}
    for attempt, files in manifest["attempts"].items():
        is_attempt = _is_name(attempt) and not os.path.islink(f"{job}/{attempt}")
        named = [file for file in files if _is_name(file)] if isinstance(files, list) and is_attempt else []
        if named:
            listed[attempt] = named
        if len(named) < (len(files) if isinstance(files, list) else 1):
            log.warning("job %s: entries of its manifest under %r are not names of staged files: skipped",
                        manifest.get("job"), attempt)  # fmt: skip
    return listed


def _is_name(name: object) -> bool:
    if not isinstance(name, str) or name == "" or name[0] == "." or "/" in name or "\0" in name:
        return False
    if name.isascii():  # which most names are: a job may list a hundred thousand
        return True
    try:
        return bool(os.fsencode(name))
    except UnicodeEncodeError:  # half of a surrogate pair, which no file name has
        return False


def _ledger_entry(context: QueueContext, key: str) -> str:
    return f"{context.layout.ledger}/{key}.json"
