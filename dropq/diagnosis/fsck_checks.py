"""What does not belong into one queue: the checks of fsck, a function for each kind of finding or group of kinds.

A check only reads, and works on a damaged queue, too. Where somebody may still be at work on what it finds, the finding
is `under-way` until an hour has passed without a change.
"""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from dropq.config.schema import QueueConfig
from dropq.diagnosis.fsck_kinds import KINDS, Finding
from dropq.durations import format_duration
from dropq.format import names
from dropq.format.claims import is_owner, subscription_of
from dropq.format.layout import (
    DOCTOR_PREFIX,
    DROP_PREFIX,
    FOLDERS,
    GONE_PREFIX,
    KEEPER,
    PRIVATE,
    SETTLED,
    STATES,
    WAITING,
    WITH_REASON,
    QueueLayout,
    ignoring,
)
from dropq.format.message_file import MessageFile
from dropq.lifecycle.reasons import explains
from dropq.staging import jobs
from dropq.storage import liveness, reading

#: Milliseconds since the last change during which somebody may still be at work.
UNDER_WAY = 3_600_000
#: Milliseconds without a change after which a send, a job or a script's claim counts as given up.
ABANDONED = 86_400_000

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp", re.DOTALL)
_SCRATCH_DIR = re.compile(rf"(?:{re.escape(PRIVATE)}-)?{DOCTOR_PREFIX}[0-9a-f]{{12}}")


@dataclass(frozen=True)
class Seen:
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

    def found(self, kind: str, detail: str = "") -> Finding:
        """Return a finding about it."""
        return Finding(kind, self.path, detail or KINDS[kind].says, inode=self.status.st_ino)

    def settled(self, kind: str, detail: str = "") -> Finding:
        """Return a finding about it; `under-way` while somebody may still be at work on it."""
        detail = detail or KINDS[kind].says
        if self.age < UNDER_WAY:
            kind, detail = "under-way", f"{KINDS['under-way'].says} ({self.aged} ago); if not: {detail}"
        return self.found(kind, detail)

    @property
    def aged(self) -> str:
        """Its age in words."""
        return format_duration(max(self.age, 0) // 1000)


@dataclass(frozen=True)
class Case:
    """A queue under examination; `config` is None when it cannot be read, `meta` is the folder of sidecars."""

    layout: QueueLayout
    config: QueueConfig | None
    meta: str
    now: int

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

    def consumers(self) -> frozenset[str] | None:
        """Return the subscriptions that have a file; None where this user may not list them."""
        try:
            return liveness.known(self.layout.consumers)
        except PermissionError:
            return None

    def look(self, folder: str, state: str = "") -> Iterator[Seen]:
        """Yield the entries of a folder; a folder that cannot be listed is empty."""
        return look(folder, self.now, state)


def look(folder: str, now: int, state: str = "") -> Iterator[Seen]:
    """Yield the entries of a folder, but not a `.keep`, which git needs; a folder that cannot be listed is empty."""
    try:
        for entry in reading.entries(folder):
            if entry.name == KEEPER:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # RACE: it moved on since the listing
            yield Seen(state, entry.path, status, now - status.st_ctime_ns // 1_000_000)
    except (PermissionError, NotADirectoryError):
        return


def examine(case: Case) -> Iterator[Finding]:
    """Yield everything that does not belong into a queue; where private folders are links, yield only those."""
    if linked := list(linked_folders(case.layout.private_folders)):
        yield from linked
        return
    for check in (folders, file_systems, states, holders, working, reasons, leftovers, temporaries, writable_folders):
        yield from check(case)


# -- the folders -----------------------------------------------------------------------------------------------


def folders(case: Case) -> Iterator[Finding]:
    """Find folders that are missing, that are no folders, or that this user may not list."""
    public = [case.layout.folder(name) for name in FOLDERS]
    for path in (*public, *case.layout.private_folders):
        if not os.path.isdir(path):
            if path in public:
                yield _about("not-a-folder" if os.path.lexists(path) else "missing-folder", path)
        elif not os.access(path, os.R_OK | os.X_OK):
            yield _about("unreadable-folder", path)


def _about(kind: str, path: str, more: str = "") -> Finding:
    return Finding(kind, path, f"{KINDS[kind].says}{more}")


def linked_folders(private: Iterable[str]) -> Iterator[Finding]:
    """Find private folders that are symbolic links."""
    for path in private:
        if os.path.islink(path):
            yield _about("linked-folder", path)


def file_systems(case: Case) -> Iterator[Finding]:
    """Find folders that lie on another file system than the first."""
    layout = case.layout
    devices: dict[int, str] = {}
    for path in (*(layout.folder(name) for name in FOLDERS), layout.private, layout.delayed):
        if not os.path.isdir(path):
            continue
        first = devices.setdefault(reading.device(path), path)
        if first == path and len(devices) > 1:
            other = next(iter(devices.values()))
            yield _about("two-filesystems", path, f": {other} lies on another")


def writable_folders(case: Case) -> Iterator[Finding]:
    """Find folders in which everybody may change what others put there: not where the sticky bit is set."""
    layout = case.layout
    for path in dict.fromkeys((layout.home, layout.base, *layout.folders.values(), layout.private)):
        if os.path.isdir(path) and os.stat(path).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            yield _about("world-writable", path)


# -- the state folders -----------------------------------------------------------------------------------------


def states(case: Case) -> Iterator[Finding]:
    """Find what is not a message in the state folders, and what is odd about the messages."""
    links: dict[int, list[Seen]] = defaultdict(list)
    for state in STATES:
        writable: list[Seen] = []
        for seen in case.look(case.layout.folder(state), state):
            if (stray := not_a_message(case, seen)) is not None:
                yield stray
                continue
            yield from (finding for check in ODDITIES if (finding := check(case, seen)) is not None)
            if seen.status.st_nlink > 1:
                links[seen.status.st_ino].append(seen)
            if seen.status.st_mode & stat.S_IWOTH:
                writable.append(seen)
        if writable:
            text = f"everybody on this host may change {len(writable)} files in {state}/: `chmod o-w` them"
            yield writable[0].found("world-writable", text)
    yield from several_links(links.values())


def not_a_message(case: Case, seen: Seen) -> Finding | None:
    """Find an entry of a state folder that is not a message."""
    mode = seen.status.st_mode
    # Uploads are written under ignored names and then renamed, and a name is reserved while a move lasts: somebody may
    # still be at work on these. Nobody is in the middle of making a link, a directory or a fifo.
    if seen.name.startswith("."):
        return seen.settled("hidden")
    if case.ignored(seen.name):
        return seen.settled("ignored")
    if stat.S_ISLNK(mode):
        return seen.found("symlink")
    if stat.S_ISDIR(mode):
        return seen.found("directory")
    if not stat.S_ISREG(mode):
        return seen.found("special-file")
    if seen.state in SETTLED and reading.is_reservation(seen.status):
        return seen.settled("placeholder")
    return None


def unreadable(case: Case, seen: Seen) -> Finding | None:
    """Find a message that this user may not read, or that only root may read."""
    readable = seen.status.st_mode & 0o444 and os.access(seen.path, os.R_OK)
    return None if readable or not os.path.lexists(seen.path) else seen.found("unreadable")


def bad_name(case: Case, seen: Seen) -> Finding | None:
    """Find a name with a part that cannot be read."""
    problems = seen.file.problems
    return seen.found("bad-name", f"{KINDS['bad-name'].says}: {'; '.join(problems)}") if problems else None


def unclaimable_name(case: Case, seen: Seen) -> Finding | None:
    """Find a name that is too long to be claimed on this file system, even when it is shortened."""
    if seen.state not in WAITING:
        return None
    name, length = seen.file.name, len(os.fsencode(seen.file.own_name))
    if length > names.room(name):
        name = names.squeeze(names.shorten(name, "0" * 16)[0])[0]
        length = len(names.write(name))
    room = names.claim_room(name, case.longest)
    if length <= room:
        return None
    return seen.found("unclaimable-name", f"{KINDS['unclaimable-name'].says} of at most {room} bytes")


def foreign_claim(case: Case, seen: Seen) -> Finding | None:
    """Find a message in processing/ that a script or a DropboxMQ client has held for over a day."""
    claim = seen.file.claim
    if seen.state != "processing" or (claim is not None and claim.ours) or seen.age <= ABANDONED:
        return None
    return seen.found("foreign-claim", f"{KINDS['foreign-claim'].says}; held for {seen.aged}")


def sidecar(case: Case, seen: Seen) -> Finding | None:
    """Find a name whose metadata is missing, damaged or closed; in processed/ and expired/ it may be missing."""
    if not seen.file.name.meta:
        return None
    path = f"{case.meta}/{seen.file.name.meta}.json"
    if read_table(path) is not None:
        return None
    kind = unread_sidecar(path)
    if kind == "missing-sidecar" and seen.state in ("processed", "expired"):
        return None
    return seen.found(kind, f"{KINDS[kind].says}: {path}")


def unread_sidecar(path: str) -> str:
    """Return the kind of finding for a sidecar that could not be read."""
    if not os.access(os.path.dirname(path), os.X_OK) and os.path.isdir(os.path.dirname(path)):
        return "unreadable-sidecar"
    if not os.path.lexists(path):
        return "missing-sidecar"
    return "damaged-sidecar" if os.access(path, os.R_OK) else "unreadable-sidecar"


#: The checks of a message; each finds something odd, or returns None.
ODDITIES: tuple[Callable[[Case, Seen], Finding | None], ...] = (
    unreadable,
    bad_name,
    unclaimable_name,
    foreign_claim,
    sidecar,
)


def several_links(groups: Iterable[list[Seen]]) -> Iterator[Finding]:
    """Find files that lie under several names in the state folders."""
    for group in groups:
        # RACE: a message that moved on while the folders were listed was listed twice, but lies in one place.
        there = [seen for seen in group if _same_file(seen)]
        if len(there) > 1:
            others = ", ".join(seen.path for seen in there[1:])
            yield there[0].found("several-links", f"{KINDS['several-links'].says}: {others}")


def _same_file(seen: Seen) -> bool:
    try:
        return reading.inode(seen.path) == seen.status.st_ino
    except FileNotFoundError:
        return False


def holders(case: Case) -> Iterator[Finding]:
    """Find claims whose holder is dead, or unknown and without a lease; not of barriers, which several hold."""
    claims = [
        (seen, claim)
        for seen in case.look(case.layout.processing)
        if (claim := seen.file.claim) is not None and claim.ours and not claim.of_barrier
    ]
    # RACE: a consumer makes its sign of life before its first claim, and settles its last before it removes the sign.
    # As the signs are listed after the claims, a holder that is not known has no claim by now.
    known = case.consumers()
    if known is None:
        return
    dead = {holder for holder in known if liveness.is_dead(case.layout.consumers, holder)}
    for seen, claim in claims:
        if claim.subscription in dead:
            kind = "dead-holder"
        elif claim.subscription not in known and not claim.deadline:
            kind = "unknown-holder"
        else:
            continue
        if os.path.lexists(seen.path):
            yield seen.found(kind, f"{KINDS[kind].says}; held for {seen.aged}")


# -- working/ and .dropq/ --------------------------------------------------------------------------------------


def working(case: Case) -> Iterator[Finding]:
    """Find sends that were given up, and jobs that were given up or not finished."""
    for seen in case.look(case.layout.working, "working"):
        if not jobs.is_job_name(seen.name) or not stat.S_ISDIR(seen.status.st_mode):
            if seen.age > ABANDONED:
                yield seen.found("abandoned-send", f"{KINDS['abandoned-send'].says}; unchanged for {seen.aged}")
        elif seen.name.startswith(DROP_PREFIX) or jobs.has_manifest(seen.path):
            yield replace(seen, age=jobs.idle_ms(seen.path, case.now, files=False)).settled("unfinished-job")
        elif jobs.idle_ms(seen.path, case.now, files=True) > ABANDONED:
            yield seen.found("abandoned-job")


def reasons(case: Case) -> Iterator[Finding]:
    """Find reasons that cannot be read, and reasons of messages that are gone."""
    for state in WITH_REASON:
        for seen in case.look(f"{case.layout.reasons}/{state}"):
            if seen.name.startswith("."):
                continue
            content = read_table(seen.path)
            if content is None:
                if os.path.lexists(seen.path):
                    yield seen.found("damaged-reason")
            elif not explains(case.layout.folder(state), content):
                yield seen.found("orphan-reason")


def leftovers(case: Case) -> Iterator[Finding]:
    """Find what dead consumers left in the private folder."""
    kept = list(case.look(case.layout.held))
    known = case.consumers()
    claimed = {seen.file.claim.owner for seen in case.look(case.layout.processing) if seen.file.claim is not None}
    for seen in kept:
        gone = not is_owner(seen.name) or (known is not None and subscription_of(seen.name) not in known)
        if seen.name not in claimed and gone:
            yield seen.found("leftover")
    yield from (
        seen.found("leftover")
        for seen in case.look(case.layout.private)
        if seen.name.startswith(GONE_PREFIX) and seen.age >= UNDER_WAY
    )


def temporaries(case: Case) -> Iterator[Finding]:
    """Find small files whose writer died before they were finished."""
    layout = case.layout
    private = (layout.private, layout.acks, layout.ledger, *layout.reason_folders)
    streams = (seen.path for seen in look(layout.streams, case.now) if stat.S_ISDIR(seen.status.st_mode))
    return temporaries_in((layout.base, *private, *streams), case.now)


def temporaries_in(paths: Iterable[str], now: int) -> Iterator[Finding]:
    """Find in some folders the unfinished files of dead writers, and the scratch folders of a dead doctor."""
    for path in paths:
        for seen in look(path, now):
            if _TEMPORARY.fullmatch(seen.name):
                yield seen.settled("temporary")
            elif _SCRATCH_DIR.fullmatch(seen.name):
                yield seen.settled("temporary", "`dropq doctor` was killed, and left its scratch folder")


def read_table(path: str) -> dict[str, object] | None:
    """Return the table in a small JSON file of ours; None when it is missing, or has no table."""
    try:
        content = reading.parse_json(reading.read_small(path) or b"null")
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
