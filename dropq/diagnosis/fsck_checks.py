"""What does not belong into one queue: the checks of fsck, a function for each kind of finding or group of kinds.

A check only reads, and works on a damaged queue, too. Where somebody may still be at work on what it finds, the finding
is `under-way` until an hour has passed without a change.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

from dropq.config.schema import QueueConfig
from dropq.diagnosis.fsck_kinds import KINDS, Finding
from dropq.durations import format_duration
from dropq.errors import DropqError
from dropq.format import names
from dropq.format.claims import is_owner
from dropq.format.layout import (
    DOCTOR_PREFIX,
    FOLDERS,
    KEEPER,
    PRIVATE,
    SETTLED,
    STATES,
    UNFINISHED,
    WAITING,
    WITH_REASON,
    QueueLayout,
    ignoring,
)
from dropq.format.message_file import MessageFile
from dropq.format.transfers import DESTINATION, GIVEN, is_row, list_name, list_number, sent_list
from dropq.lifecycle import ages
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.decision import Decision
from dropq.lifecycle.holders import claim_status
from dropq.lifecycle.settling import is_written_late, tells_writes
from dropq.lifecycle.transfers import read_row, refusal
from dropq.staging import jobs
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.storage.liveness import Signs
from dropq.upkeep import leftovers as sweeps

#: Milliseconds since the last change during which somebody may still be at work.
UNDER_WAY = ages.HOUR
#: Milliseconds without a change after which a send, a job or a script's claim counts as given up.
ABANDONED = ages.DAY

_SCRATCH_DIR = re.compile(rf"(?:{re.escape(PRIVATE)}-)?{DOCTOR_PREFIX}[0-9a-f]{{12}}")


@dataclass(frozen=True)
class Entry:
    """An entry of a folder, as it was listed; `age` is in ms since it was last renamed or changed."""

    state: str
    path: str
    status: os.stat_result
    age: int

    @property
    def name(self) -> str:
        """Its file name."""
        return os.path.basename(self.path)

    @cached_property
    def file(self) -> MessageFile:
        """What its name says."""
        return MessageFile(self.name)

    def finding(self, kind: str, detail: str = "") -> Finding:
        """Return a finding about it."""
        return Finding(kind, self.path, detail or KINDS[kind].says, inode=self.status.st_ino)

    def finding_at_rest(self, kind: str, detail: str = "") -> Finding:
        """Return a finding about it; `under-way` while somebody may still be at work on it."""
        detail = detail or KINDS[kind].says
        if self.age < UNDER_WAY:
            kind, detail = "under-way", f"{KINDS['under-way'].says.format(aged=self.aged)}; if nobody is: {detail}"
        return self.finding(kind, detail)

    @property
    def aged(self) -> str:
        """Its age in words."""
        return format_duration(max(self.age, 0) // 1000)


@dataclass(frozen=True)
class ExaminedQueue:
    """A queue under examination, which may lack folders; `config` is None when it cannot be read."""

    context: QueueContext
    config: QueueConfig | None
    now: int
    #: The owner, the group and the mode of files on NFS that this user may read.
    known_readable: set[tuple[int, int, int]] = field(default_factory=set)

    @property
    def layout(self) -> QueueLayout:
        """Where its folders are, or should be."""
        return self.context.layout

    @cached_property
    def ignored(self) -> Callable[[str], object]:
        """A test, true for names that are never messages; without a configuration, for names with a dot in front."""
        return ignoring(self.config.ignore if self.config else ())

    @cached_property
    def longest(self) -> int:
        """How many bytes a name may have on the file system."""
        try:
            return os.pathconf(self.layout.processing, "PC_NAME_MAX") or names.NAME_MAX  # some on FUSE say 0
        except OSError:
            return names.NAME_MAX  # the folder is missing: another finding

    @cached_property
    def tells_writes(self) -> bool:
        """Whether the times of a file in processed/ tell that it was written to there."""
        return tells_writes(self.layout.processed)

    def entries(self, folder: str, state: str = "") -> Iterator[Entry]:
        """Yield the entries of a folder; a folder that cannot be listed is empty."""
        return entries(folder, self.now, state)


def entries(folder: str, now: int, state: str = "") -> Iterator[Entry]:
    """Yield the entries of a folder, but not a `.keep`, which git needs; a folder that cannot be listed is empty."""
    with _passing_over_closed():
        for entry in reading.looked_at(folder):
            if entry.name == KEEPER:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # RACE: it moved on since the listing
            yield Entry(state, entry.path, status, now - status.st_ctime_ns // 1_000_000)


@contextmanager
def _passing_over_closed() -> Iterator[None]:
    """Pass over a folder that cannot be listed: that is a finding of its own."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP):
            raise


# -- the folders -----------------------------------------------------------------------------------------------


def folders(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find folders that are missing, that are no folders, or that this user may not list."""
    public = [queue.layout.folder(name) for name in FOLDERS]
    for path in (*public, *queue.layout.private_folders):
        if not os.path.isdir(path):
            if path in public:
                yield about("not-a-folder" if os.path.lexists(path) else "missing-folder", path)
        elif not os.access(path, os.R_OK | os.X_OK):
            yield about("unreadable-folder", path)


def about(kind: str, path: str, more: str = "") -> Finding:
    """Return a finding about a path: the sentence of its kind, and more about it."""
    return Finding(kind, path, f"{KINDS[kind].says}{more}")


def file_systems(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find folders that lie on another file system than the first."""
    layout = queue.layout
    by_device: dict[int, str] = {}
    for path in filter(os.path.isdir, (*map(layout.folder, FOLDERS), layout.private, layout.delayed)):
        by_device.setdefault(reading.device(path), path)
    first, *others = by_device.values() or ("",)
    yield from (about("two-filesystems", path, f": {first} lies on another") for path in others)


def writable_folders(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find folders in which everybody may change what others put there: not where the sticky bit is set."""
    layout = queue.layout
    for path in dict.fromkeys((layout.home, layout.base, *layout.folders.values(), layout.private)):
        if os.path.isdir(path) and os.stat(path).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            yield about("world-writable", path)


# -- the state folders -----------------------------------------------------------------------------------------


def states(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find what is not a message in the state folders, and what is odd about the messages."""
    links: dict[int, list[Entry]] = defaultdict(list)
    for state in STATES:
        writable: list[Entry] = []
        for entry in queue.entries(queue.layout.folder(state), state):
            if (stray := not_a_message(queue, entry)) is not None:
                yield stray
                continue
            yield from (finding for check in ODDITIES if (finding := check(queue, entry)) is not None)
            if entry.status.st_nlink > 1:
                links[entry.status.st_ino].append(entry)
            if entry.status.st_mode & stat.S_IWOTH:
                writable.append(entry)
        if writable:
            text = f"everybody on this host may change {len(writable)} files in {state}/: `chmod o-w` them"
            yield writable[0].finding("world-writable", text)
    yield from several_links(links.values())


def not_a_message(queue: ExaminedQueue, entry: Entry) -> Finding | None:
    """Find an entry of a state folder that is not a message."""
    mode = entry.status.st_mode
    # Uploads are written under ignored names and then renamed, and a name is reserved while a move lasts: somebody may
    # still be at work on these. Nobody is in the middle of making a link, a directory or a fifo.
    if entry.name.startswith("."):
        return entry.finding_at_rest("hidden")
    if queue.ignored(entry.name):
        return entry.finding_at_rest("ignored")
    if stat.S_ISLNK(mode):
        return entry.finding("symlink")
    if stat.S_ISDIR(mode):
        return entry.finding("directory")
    if not stat.S_ISREG(mode):
        return entry.finding("special-file")
    if entry.state in SETTLED and reading.is_reservation(entry.status):
        return entry.finding_at_rest("placeholder")
    return None


def unreadable(queue: ExaminedQueue, entry: Entry) -> Finding | None:
    """Find a message that this user may not read, or that only root may read."""
    readable = entry.status.st_mode & 0o444 and _may_read(queue, entry)
    return None if readable or not os.path.lexists(entry.path) else entry.finding("unreadable")


def _may_read(queue: ExaminedQueue, entry: Entry) -> bool:
    """Return whether this user may read a file; over NFS, where only the server knows, ask it once for files alike.

    So an access control list that closes one of many files alike to this user is not seen there.
    """
    alike = entry.status.st_uid, entry.status.st_gid, entry.status.st_mode
    if alike in queue.known_readable:
        return True
    may_read = os.access(entry.path, os.R_OK)
    if may_read and reading.on_nfs(os.path.dirname(entry.path)):
        queue.known_readable.add(alike)
    return may_read


def bad_name(queue: ExaminedQueue, entry: Entry) -> Finding | None:
    """Find a name with a part that cannot be read."""
    problems = entry.file.problems
    return entry.finding("bad-name", f"{KINDS['bad-name'].says}: {'; '.join(problems)}") if problems else None


def unclaimable_name(queue: ExaminedQueue, entry: Entry) -> Finding | None:
    """Find a name that is too long to be claimed on this file system, even when it is shortened."""
    if entry.state not in WAITING:
        return None
    name, length = entry.file.name, len(os.fsencode(entry.file.own_name))
    budget = queue.layout.name_budget
    if length > names.room(name, budget):
        length = len(names.squeeze(names.shorten(name, "0" * 16, budget)[0])[0])
    room = names.claim_room(name, queue.longest)
    if length <= room:
        return None
    return entry.finding("unclaimable-name", f"{KINDS['unclaimable-name'].says} of at most {room} bytes")


def foreign_claim(queue: ExaminedQueue, entry: Entry) -> Finding | None:
    """Find a message in processing/ that a script or a DropboxMQ client has held for over a day."""
    claim = entry.file.claim
    if entry.state != "processing" or (claim is not None and claim.ours) or entry.age <= ABANDONED:
        return None
    return entry.finding("foreign-claim", f"{KINDS['foreign-claim'].says}; held for {entry.aged}")


def written_after_ack(queue: ExaminedQueue, entry: Entry) -> Finding | None:
    """Find a message under a foreign name that was written to in processed/."""
    if entry.state != "processed" or not entry.file.name.foreign or not queue.tells_writes:
        return None
    return entry.finding("written-after-ack") if is_written_late(entry.status) else None


def sidecar(queue: ExaminedQueue, entry: Entry) -> Finding | None:
    """Find a name whose metadata is missing, damaged or closed; in processed/ and expired/ it may be missing."""
    path = f"{queue.context.root.layout.meta}/{entry.file.name.meta}.json"
    kind = sidecar_problem(path) if entry.file.name.meta else ""
    if not kind or (kind == "missing-sidecar" and entry.state in ("processed", "expired")):
        return None
    return entry.finding(kind, f"{KINDS[kind].says}: {path}")


def sidecar_problem(path: str) -> str:
    """Return the kind of finding for a sidecar that cannot be read; "" for any other."""
    if read_table(path) is not None:
        return ""
    if not os.access(os.path.dirname(path), os.X_OK) and os.path.isdir(os.path.dirname(path)):
        return "unreadable-sidecar"
    if not os.path.lexists(path):
        return "missing-sidecar"
    return "damaged-sidecar" if os.access(path, os.R_OK) else "unreadable-sidecar"


#: The checks of a message; each finds something odd, or returns None.
ODDITIES = (unreadable, bad_name, unclaimable_name, foreign_claim, written_after_ack, sidecar)


def several_links(groups: Iterable[list[Entry]]) -> Iterator[Finding]:
    """Find files that lie under several names in the state folders."""
    for group in groups:
        # RACE: a message that moved on while the folders were listed was listed twice, but lies in one place.
        there = [entry for entry in group if _same_file(entry)]
        if len(there) > 1:
            others = ", ".join(entry.path for entry in there[1:])
            yield there[0].finding("several-links", f"{KINDS['several-links'].says}: {others}")


def _same_file(entry: Entry) -> bool:
    try:
        return reading.inode(entry.path) == entry.status.st_ino
    except FileNotFoundError:
        return False


def holders(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find claims whose holder is dead, or unknown and without a lease; not of barriers, which several hold."""
    entries = list(queue.entries(queue.layout.processing))
    try:
        signs = Signs(queue.layout.consumers)
    except PermissionError:
        return  # this user may not list them
    for entry in entries:
        if (claim := entry.file.claim) is None or not claim.ours:
            continue
        kind = {"dead": "dead-holder", "unleased": "unknown-holder"}.get(claim_status(claim, signs, queue.now))
        is_elsewhere = kind == "unknown-holder" and claim.subscription in signs.known  # on another mount
        if kind is not None and not is_elsewhere and os.path.lexists(entry.path):
            yield entry.finding(kind, f"{KINDS[kind].says}; held for {entry.aged}")


# -- working/ and .dropq/ --------------------------------------------------------------------------------------


def working(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find sends that were given up, and jobs that were given up or not finished."""
    for entry in queue.entries(queue.layout.working, "working"):
        if not jobs.is_job_name(entry.name) or not stat.S_ISDIR(entry.status.st_mode):
            if entry.age > ABANDONED:
                yield entry.finding("abandoned-send", f"{KINDS['abandoned-send'].says}; unchanged for {entry.aged}")
            continue
        why = ""
        try:
            found = jobs.decide(queue.context, entry.path, older_than=ABANDONED / 1000)
        except (OSError, DropqError) as error:
            found, why = Decision(False, "committed"), describe(error)  # its manifest cannot be used, or read
        if found.why != "begun":
            idle = jobs.idle_ms(entry.path, queue.now, files=False)
            yield replace(entry, age=idle).finding_at_rest("unfinished-job", why)
        elif found.allowed:
            yield entry.finding("abandoned-job")


def reasons(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find reasons that cannot be read."""
    for state in WITH_REASON:
        for entry in queue.entries(f"{queue.layout.reasons}/{state}"):
            if entry.name.startswith("."):
                continue
            if read_table(entry.path) is None and os.path.lexists(entry.path):
                yield entry.finding("damaged-reason")


def leftovers(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find files that a sweep removes because nothing needs them, or keeps for a day although their holder is dead."""
    for found in sweeps.leftovers(queue.context, refile=False):
        with _passing_over_closed():
            for one in found:
                if one is None or not one.kind or not (one.is_left() if one.is_dead else one.is_due(queue.context)):
                    continue
                if one.kind == "leftover" or read_table(one.path) is not None:  # else it is a damaged reason
                    yield about(one.kind, one.path)
    for entry in queue.entries(queue.layout.held):
        if not is_owner(entry.name):
            yield entry.finding(
                "leftover", "this lies among what consumers hold, and belongs to none: no sweep moves it"
            )


def temporaries(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find small files whose writer died before they were finished."""
    layout = queue.layout
    private = (layout.private, layout.acks, layout.ledger, layout.selectors, layout.named, *layout.reason_folders)
    streams = (entry.path for entry in entries(layout.streams, queue.now) if stat.S_ISDIR(entry.status.st_mode))
    return temporaries_in((layout.base, *private, *streams), queue.now)


def temporaries_in(paths: Iterable[str], now: int) -> Iterator[Finding]:
    """Find in some folders the unfinished files of dead writers, and the scratch folders of a dead doctor."""
    for path in paths:
        for entry in entries(path, now):
            if UNFINISHED.fullmatch(entry.name):
                yield entry.finding_at_rest("temporary")
            elif _SCRATCH_DIR.fullmatch(entry.name):
                yield entry.finding_at_rest("temporary", "`dropq doctor` was killed, and left its scratch folder")


def transfers(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find messages for other file systems that nobody carries, and files in their folders that are no messages."""
    for row in queue.entries(queue.layout.transfers):
        if not is_row(row.name):
            if os.path.isdir(given := f"{row.path}/{GIVEN}") and reading.names_in(given):
                yield about("damaged-transfer", row.path, ": its name is not that of a row, 16 hex digits")
            continue
        where = "a queue"
        try:
            where = read_row(row.path).queue
        except (OSError, ValueError):
            yield about("damaged-transfer", f"{row.path}/{DESTINATION}")
        lists = [number for number in map(list_number, reading.names_in(row.path)) if number is not None]
        newest = f"{row.path}/{list_name(max(lists))}" if lists else ""
        if lists and read_table(newest) is None and os.path.lexists(newest):  # RACE: a newer one may have replaced it
            yield about("damaged-transfer", newest)
        late = []
        for entry in queue.entries(f"{row.path}/{GIVEN}"):
            if (stray := not_a_message(queue, entry)) is not None:
                yield stray
                continue
            yield from (finding for check in (unreadable, sidecar) if (finding := check(queue, entry)) is not None)
            if entry.age > ABANDONED:
                late.append(entry)
        refused = refusal(row.path)
        if late:
            why = f": {refused.why}" if refused else ""
            text = f"{KINDS['unfinished-move'].says}; {len(late)} go to {where}{why}"
            yield late[0].finding("unfinished-move", text)
        elif refused is not None and refused.is_older:
            yield row.finding("older-state", refused.why)


def arrived_lists(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find lists of other queues that arrived here and cannot be read."""
    for entry in queue.entries(queue.layout.ledger):
        if sent_list(entry.name) and read_table(entry.path, reading.LONG_LIST) is None and os.path.lexists(entry.path):
            yield entry.finding("damaged-list")  # RACE: a list that has just been replaced by a newer one is none


def read_table(path: str, limit: int = reading.SMALL) -> dict[str, object] | None:
    """Return the table in a small JSON file of ours; None when it is missing, or has no table."""
    try:
        content = reading.parse_json(reading.read_small(path, limit) or b"null")
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


#: The checks of a queue, in the order of their findings.
CHECKS = (
    folders,
    file_systems,
    states,
    holders,
    working,
    reasons,
    leftovers,
    temporaries,
    transfers,
    arrived_lists,
    writable_folders,
)
