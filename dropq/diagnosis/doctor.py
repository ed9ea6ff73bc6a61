"""Whether a folder can be a root, or is a good one: what dropq needs of it is tried, what cannot be tried is looked up.

Everything is tried in one private folder, which is gone afterwards, and with one hidden file that goes from folder to
folder of each queue, which is never a message. No message is touched.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import pwd
import re
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from threading import Barrier

from dropq.diagnosis.doctor_kinds import KINDS, LEVELS, Diagnosis, Kind
from dropq.diagnosis.fsck import queues as all_queues
from dropq.errors import DropqError, NoSuchQueue
from dropq.format.layout import DOCTOR_PREFIX, FOLDERS, PRIVATE, QueueLayout
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.queue.open_queue import open_queue
from dropq.storage import liveness, reading, system_calls
from dropq.storage.clock import CLOCK_TOLERANCE, ServerClock
from dropq.storage.files import Storage
from dropq.storage.locks import has_second
from dropq.storage.mounts import Mount, mount_of
from dropq.storage.watch import Watch

__all__ = ["KINDS", "LEVELS", "Diagnosis", "Kind", "doctor"]

log = logging.getLogger("dropq")

#: Seconds that something is waited for that should be there at once: an event, a name in a listing.
PATIENCE = 5.0
#: Seconds that the process that holds a lock may take to begin.
LOCK_PATIENCE = 30.0
#: How often a sync is timed; the middle one counts.
SYNCS = 5
#: How many files two threads race for.
RACES = 20
#: What is little room: a share of the whole, or so few bytes or inodes.
LITTLE, LITTLE_SPACE, FEW_INODES = 0.05, 16 << 20, 1000
#: What keeps from trying anything more on a file system, by what a call is refused with.
STOPS = {errno.ENOSPC: "no-room", errno.EDQUOT: "no-room", errno.EROFS: "read-only"}

#: What keeps files as objects under a key, so that it has no rename.
_OBJECT_STORES = re.compile(
    r"fuse\.(s3fs|s3|mount-s3|mountpoint-s3|goofys|gcsfuse|blobfuse2?|rclone|juicefs-s3|ossfs|cosfs)"
)

#: A process that takes a lock and keeps it until it dies; it tells the number of the error where it gets none.
_LOCKER = """
import fcntl, sys
try:
    file = open(sys.argv[1], "r+b")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError as error:
    print(error.errno or -1, flush=True)
else:
    print(0, flush=True)
sys.stdin.read()
"""

#: What a user may not do who may not write in a folder.
_NOT_MADE = "may not make a file in it"

#: Names as dropq itself gives them: the longest of a claim, one that ends in a dot, one with an asterisk.
_CLAIM = "host%2Done-0123456789-0123abcd,1700000000000,1~4.1700000000000000-0123456789.T.0...t%7E.JMSXDeliveryCountI=1&"
OWN_NAMES = (f"{_CLAIM}{'a':b<20}S=".ljust(255, "c"), "4.own+id.T.....tmp.", "4.a*b.T")


@dataclass
class Bench:
    """A file system under examination: the path that it is about, what is mounted there, where things are tried.

    `queues` are those on it, each with whether its messages have leases; `read_only` is whether a write was refused so.
    """

    path: str
    mount: Mount | None
    folder: str
    queues: dict[str, bool] = field(default_factory=dict)
    read_only: bool = False
    store: Storage = field(default_factory=lambda: Storage("none"))

    def found(self, kind: str, found: str) -> Diagnosis:
        """Return a diagnosis of it."""
        return Diagnosis(kind, self.path, found)

    def refused(self, kind: str, found: str, error: OSError) -> Diagnosis:
        """Return a diagnosis of a call that was refused.

        Raises:
            OSError: what refused it would refuse all that is tried; it tells nothing about this call.
        """
        if error.errno in STOPS:
            raise error
        return self.found(kind, f"{found}: {_said(error)}")

    def folders(self, *names: str) -> list[str]:
        """Make folders of a check's own."""
        paths = [f"{self.folder}/{name}" for name in names]
        for path in paths:
            self.store.make_folder(path)
        return paths

    def file(self, path: str, content: bytes = b"dropq doctor\n") -> str:
        """Make a file, and return its path."""
        self.store.write_new(path, content)
        return path


def doctor(root: RootContext, *, queues: Iterable[str] | None = None) -> list[Diagnosis]:
    """Try what dropq needs of a root's file system, and what this user may do in its queues; change nothing.

    Args:
        root: the root; any folder that may become one will do.
        queues: the names of those whose folders to try; None tries those of all queues.

    Raises:
        NoSuchQueue: there is no such queue.
        OSError: the root cannot be listed.
    """
    chosen = all_queues(root) if queues is None else list(queues)
    found = [_about_root(root)]
    opened: list[QueueContext] = []
    for name in chosen:
        try:
            opened.append(open_queue(root, name))
        except NoSuchQueue:
            raise
        except DropqError as error:
            found.append(Diagnosis("unusable-queue", f"{root.layout.path}/{name}", "; ".join(str(error).splitlines())))
    places = _file_systems(root, opened)
    for place in places.values():
        found += _examined(place)
    parts: set[str] = set()
    for context in opened:
        found += _queue_folders(context, places[reading.device(context.layout.base)], parts)
    found += _closed(root, places, parts if opened else {"send", "receive"})
    return sorted(found, key=lambda one: one.kind == "no-room")  # which is the last to be told


def _about_root(root: RootContext) -> Diagnosis:
    path = root.layout.path
    if reading.exists(root.layout.config_file):
        return Diagnosis("root", path, f"{path} has a dropq.toml")
    return Diagnosis("no-root", path, f"{path} has no dropq.toml")


def _closed(root: RootContext, places: Mapping[int, _Place], parts: Set[str]) -> Iterator[Diagnosis]:
    """Yield what is closed to this user outside of the queues, as far as the parts that it takes ask for it."""
    for place in places.values():
        if place.closed:
            kind = "closed-root" if "receive" in parts or not parts else "untried"
            yield Diagnosis(kind, place.path, f"{_user()} can make no folder here: {place.closed}")
    layout = root.layout
    wanted = [_or_above(layout.meta)] if "send" in parts else []
    wanted += [_or_above(layout.clock)] if "receive" in parts else []
    shut = [path for path in wanted if reading.exists(layout.private) and not os.access(path, os.W_OK)]
    if shut and not places[reading.device(layout.path)].stopped:
        yield Diagnosis("closed-private", shut[0], f"{_user()} may not write {shut[0]}")


def _or_above(path: str) -> str:
    """Return a path, or the nearest folder above it that is there to be seen."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


@dataclass
class _Place:
    """A file system: a folder on it that is told of, and where a folder for trials may be made, the best first.

    `queues` are those on it, each with whether its messages have leases; `told` is what was told of it, `stopped` what
    kept from trying more, and `closed` what refused a folder for trials.
    """

    path: str
    stems: list[str] = field(default_factory=list)
    queues: dict[str, bool] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    stopped: str = ""
    closed: str = ""

    def stop(self, error: OSError) -> Iterator[Diagnosis]:
        """Yield what keeps from trying more; it is told once."""
        self.stopped = STOPS[error.errno or 0]
        if self.stopped not in self.told:
            self.told.add(self.stopped)
            yield Diagnosis(self.stopped, self.path, f"a file or folder cannot be made: {_said(error)}")


def _file_systems(root: RootContext, queues: Iterable[QueueContext]) -> dict[int, _Place]:
    """Return the file systems that a root and its queues lie on, by their device numbers."""
    found: dict[int, _Place] = {}

    def add(path: str, private: str) -> _Place:
        place = found.setdefault(reading.device(path), _Place(path))
        place.stems += [f"{private}/{DOCTOR_PREFIX}", f"{path}/{PRIVATE}-{DOCTOR_PREFIX}"]
        return place

    add(root.layout.path, root.layout.private)
    for context in queues:
        add(context.layout.base, context.layout.private).queues[context.name] = context.config.lease_period is not None
    return found


def _examined(place: _Place) -> Iterator[Diagnosis]:
    """Yield what is found about one file system."""
    bench = Bench(place.path, mount_of(place.path), place.path, place.queues)
    with ExitStack() as stack:
        refused: OSError | None = None
        try:
            bench.folder = stack.enter_context(_workshop(place.stems))
        except OSError as error:
            refused = error
            bench.read_only = error.errno == errno.EROFS
        yield from _tried(place, bench, LOOKS)
        if refused is None:
            yield from _tried(place, bench, TRIALS)
        elif refused.errno in STOPS:
            yield from place.stop(refused)
        else:
            place.closed = _said(refused)


@contextmanager
def _workshop(stems: Sequence[str]) -> Iterator[str]:
    """Make a folder to try things in, and remove it with all that is in it, whatever happens meanwhile.

    What a kill leaves of it `fsck` knows by its name.
    """
    token, store = secrets.token_hex(6), Storage("none")
    folders = [f"{stem}{token}" for stem in stems]
    try:
        yield _first_made(folders, store)
    finally:
        for folder in folders:
            try:
                store.remove_tree(folder)
            except OSError as error:
                if reading.exists(folder):
                    log.warning("%s could not be removed: %s", folder, _said(error))


def _first_made(folders: Sequence[str], store: Storage) -> str:
    for folder in folders:
        try:
            store.make_folder(folder, parents=False)
        except OSError as error:  # no root yet, or not ours to write
            if error.errno in STOPS:
                raise
            refused = error
        else:
            return folder
    raise refused


def _tried(
    place: _Place, bench: Bench, checks: Sequence[Callable[[Bench], Iterable[Diagnosis]]]
) -> Iterator[Diagnosis]:
    for check in checks:
        try:
            for one in check(bench):
                place.told.add(one.kind)
                yield one
        except OSError as error:
            if error.errno in STOPS:
                yield from place.stop(error)
                return
            yield bench.found("not-tried", f"{check.__name__}: {_said(error)}")


def _said(error: OSError) -> str:
    return error.strerror or str(error)


# -- what can be looked up -----------------------------------------------------------------------------------------


def mount(bench: Bench) -> Iterator[Diagnosis]:
    """Tell what is mounted, and what its type and options mean."""
    mount = bench.mount
    if mount is None:
        return
    what = f"{mount.kind} at {mount.point} from {mount.source}"
    if bench.read_only and "ro" in mount.options:
        options = ",".join(option for option in mount.options if option != "rw")  # which the whole device may be
        yield bench.found("read-only", f"{what} is mounted read-only ({options})")
    else:
        yield bench.found("file-system", f"{what} ({','.join(mount.options)})")
    if _OBJECT_STORES.fullmatch(mount.kind):
        yield bench.found("object-store", f"{mount.kind} keeps files as objects")
    soft = [option for option in ("soft", "softerr") if option in mount.options]
    if soft and mount.kind.startswith("nfs"):
        yield bench.found("nfs-soft", f"mounted with {soft[0]}")


def space(bench: Bench) -> Iterator[Diagnosis]:
    """Tell how much room is left for this user."""
    if bench.read_only:
        return  # none is needed
    told = os.statvfs(bench.path)
    free, total = told.f_bavail * told.f_frsize, told.f_blocks * told.f_frsize
    inodes = f"{told.f_favail:,} of {told.f_files:,} inodes free" if told.f_files else "inodes as needed"
    text = f"{_size(free)} of {_size(total)} free, {inodes}"
    low = total > 0 and (free < total * LITTLE or free < LITTLE_SPACE)
    few = told.f_files > 0 and (told.f_favail < told.f_files * LITTLE or told.f_favail < FEW_INODES)
    if (total > 0 and not free) or (told.f_files > 0 and not told.f_favail):
        yield bench.found("no-room", text)
        return
    if low or few:
        yield bench.found("low-space", text)
    else:
        yield bench.found("space", text if total else "the file system does not tell how much")


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


#: What needs no writing, in the order that it is told in.
LOOKS = (mount, space)


# -- what is tried ---------------------------------------------------------------------------------------------------


def rename(bench: Bench) -> Iterator[Diagnosis]:
    """Try whether a rename moves a file as it is, and whether one of two that race for a file gets it."""
    here, there = bench.folders("rename-here", "rename-there")
    file = bench.file(f"{here}/file")
    before = reading.inode(file)
    try:
        bench.store.rename(file, f"{there}/file")
    except OSError as error:
        kind = "cross-device" if error.errno == errno.EXDEV else "no-rename"
        yield bench.refused(kind, "a rename from folder to folder fails", error)
        return
    if reading.inode(f"{there}/file") != before:
        yield bench.found("copying-rename", "a renamed file has another inode")
    twice = _won_by_two(bench, here, there)
    if twice:
        yield bench.found("shared-rename", f"of {RACES} files that two threads renamed, {twice} went to both")
    else:
        yield bench.found("rename", f"one rename moves a file; of two that race for it one gets it, {RACES} times")


def _won_by_two(bench: Bench, here: str, there: str) -> int:
    names = [bench.file(f"{here}/{number}").rpartition("/")[2] for number in range(RACES)]
    start = Barrier(2)

    def take(mine: str) -> set[str]:
        won = set()
        start.wait()
        for name in names:
            try:
                # RACE: on purpose. Whose rename succeeds has the file.
                bench.store.rename(f"{here}/{name}", f"{there}/{mine}-{name}")
            except FileNotFoundError:
                continue
            won.add(name)
        return won

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(take, ("first", "second"))
    return len(first & second)


def replace(bench: Bench) -> Iterator[Diagnosis]:
    """Try a rename that replaces nothing."""
    (folder,) = bench.folders("replace")
    taken, file = bench.file(f"{folder}/taken"), bench.file(f"{folder}/file")
    try:
        # To a free name first: that another is taken the kernel says before it asks the file system.
        system_calls.rename_noreplace(file, f"{folder}/free")
        file = f"{folder}/free"
        system_calls.rename_noreplace(file, taken)
    except FileExistsError:
        yield bench.found("noreplace", "a rename can replace nothing (renameat2, RENAME_NOREPLACE)")
    except OSError as error:
        yield bench.refused("no-noreplace", "no rename that replaces nothing (renameat2)", error)
    else:
        yield bench.found("broken-noreplace", "a rename that was to replace nothing replaced a file")


def locks(bench: Bench) -> Iterator[Diagnosis]:
    """Try whether a lock excludes another process, and goes when its process dies; look up whether it reaches hosts."""
    (folder,) = bench.folders("locks")
    path = bench.file(f"{folder}/holder", liveness.mark(folder))
    refused, while_held, after = _lock_of_another(folder, path)
    if refused:
        yield bench.found("no-locks", f"no flock: {os.strerror(refused) if refused > 0 else 'the process ended'}")
    elif while_held:
        yield bench.found("weak-locks", "two processes hold one flock")
    elif not after:
        yield bench.found("no-locks", f"a killed process still holds its flock after {PATIENCE:.0f} s")
    else:
        yield from _reach(bench, path)


def _lock_of_another(folder: str, path: str) -> tuple[int, bool, bool]:
    """Let another process lock a file; return its error, whether it looks dead while it lives, and once it is dead."""
    name = os.path.basename(path)
    command = [sys.executable, "-I", "-S", "-c", _LOCKER, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            answer = process.stdout.readline()
            if answer.strip() != b"0":
                return int(answer or -1), False, False
            while_held = liveness.is_dead(folder, name)
        finally:
            process.kill()
    return 0, while_held, _seen_after(lambda: liveness.is_dead(folder, name)) < math.inf


def _reach(bench: Bench, path: str) -> Iterator[Diagnosis]:
    """Tell whether locks reach other hosts."""
    mount, works = bench.mount, "flock excludes another process and ends with its process"
    if mount is None or not mount.shared:
        if mount is not None and has_second(path):
            yield bench.found("locks", f"{works}; NFS clients of this host see it")
        else:
            yield bench.found("unserved-locks", f"{works}; NFS clients of this host would not see it")
        return
    if mount.keeps_locks:
        text = f"{works}; as {mount.kind} is mounted, each mount may have locks of its own"
        without = [name for name, leased in bench.queues.items() if not leased]
        if bench.queues and not without:
            yield bench.found("leased-locks", f"{text}; every queue has a lease_period")
        else:
            yield bench.found("local-locks", f"{text}; without lease_period: {', '.join(without) or 'no queue yet'}")
    else:
        beside = f", not to who works beside {mount.sharing_locks}" if mount.sharing_locks else ""
        yield bench.found("locks", f"{works}; {mount.kind} passes locks on to other hosts{beside}")


def sync(bench: Bench) -> Iterator[Diagnosis]:
    """Try fsync, and how long what a send needs of it takes."""
    (folder,) = bench.folders("sync")
    store, took = Storage("full"), []
    for number in range(SYNCS):
        fd = store.create(f"{folder}/{number}")
        try:
            os.write(fd, b"x" * 4096)
            began = time.perf_counter()
            store.sync_file(fd)
        except OSError as error:
            yield bench.refused("no-sync", "a file cannot be synced", error)
            return
        finally:
            os.close(fd)
        try:
            store.sync(folder, bench.folder)
        except OSError as error:
            yield bench.refused("no-folder-sync", "a folder cannot be synced", error)
            return
        took.append(time.perf_counter() - began)
    yield bench.found("sync", f"fsync of a file and two folders takes {median(took) * 1000:.3g} ms")


def listing(bench: Bench) -> Iterator[Diagnosis]:
    """Try whether a listing shows at once what came and what went."""
    here, there = bench.folders("listing-here", "listing-there")
    file = bench.file(f"{here}/file")
    list(reading.files_in(there))  # what is cached of it may be shown again
    bench.store.rename(file, f"{there}/file")
    came = _seen_after(lambda: ["file"] in reading.files_in(there))
    bench.store.rename(f"{there}/file", file)
    went = _seen_after(lambda: ["file"] not in reading.files_in(there))
    if late := [f"{what} {_delay(after)}" for what, after in (("new", came), ("gone", went)) if after]:
        yield bench.found("late-listing", f"a listing tells what is {', what is '.join(late)}")
    else:
        yield bench.found("listing", "a listing shows at once what came and what went")


def _delay(seconds: float) -> str:
    return f"after {seconds:.1f} s" if seconds < math.inf else f"not within {PATIENCE:.0f} s"


def _seen_after(seen: Callable[[], bool]) -> float:
    """Return after how many seconds something is so: 0 for at once, infinity where patience ends."""
    began, pause = time.monotonic(), 0.005
    if seen():
        return 0.0
    while time.monotonic() - began < PATIENCE:
        time.sleep(pause)
        if seen():
            return time.monotonic() - began
        pause = min(pause * 2, 0.25)
    return math.inf


def events(bench: Bench) -> Iterator[Diagnosis]:
    """Try whether a file that comes gives an event here; for other hosts' the type of the file system tells."""
    if bench.mount is not None and bench.mount.shared:
        return  # what other hosts change never gives an event
    here, there = bench.folders("events-here", "events-there")
    file = bench.file(f"{here}/file")
    watch = Watch(there)
    if not watch.observe():
        yield bench.found("no-events", "the folder cannot be watched")
        return
    bench.store.rename(file, f"{there}/file")
    if watch.wait(PATIENCE):
        yield bench.found("events", "a file that comes gives an event")
    else:
        yield bench.found("no-events", f"a file came, and no event within {PATIENCE:.0f} s")


def clock(bench: Bench) -> Iterator[Diagnosis]:
    """Compare the file server's clock with this host's."""
    ahead = ServerClock(bench.file(f"{bench.folder}/clock")).offset()
    if abs(ahead) > CLOCK_TOLERANCE:
        text = f"the file server's clock is {abs(ahead):.3g} s {'ahead of' if ahead > 0 else 'behind'} this host's"
        yield bench.found("clock-offset", text)
    else:
        yield bench.found("clock", f"the file server's clock and this host's agree within {CLOCK_TOLERANCE} s")


def names(bench: Bench) -> Iterator[Diagnosis]:
    """Try whether names come back as they were given."""
    (folder,) = bench.folders("names")
    own = _not_kept(bench, folder, OWN_NAMES)
    if errno.ENAMETOOLONG in own.values():
        yield bench.found("short-names", f"a name of 255 bytes is refused: {os.strerror(errno.ENAMETOOLONG)}")
    elif own:
        yield bench.found("changed-names", _named(own))
    bench.file(f"{folder}/Case")
    folds = os.path.lexists(f"{folder}/case")
    if folds:
        yield bench.found("folding-names", "Case and case are one name")
    if not own and not folds:
        yield bench.found("names", "names of 255 bytes and of either case are kept")


def _not_kept(bench: Bench, folder: str, names: Iterable[str]) -> dict[str, int]:
    """Return the names that were refused, with the number of the error, and those that came back as others, with 0."""
    failed = {}
    for name in names:
        try:
            bench.file(f"{folder}/{name}")
        except OSError as error:
            if error.errno in STOPS:
                raise
            failed[name] = error.errno or 0
        else:
            if name not in reading.names_in(folder):
                failed[name] = 0
    return failed


def _named(failed: dict[str, int]) -> str:
    told = (f"{name!a} {f'is refused ({os.strerror(number)})' if number else 'comes back as another'}"
            for name, number in failed.items())  # fmt: skip
    return "; ".join(told)


#: What is tried in a folder of its own, in the order that it is told in.
TRIALS = (rename, replace, locks, sync, listing, events, clock, names)


# -- the folders of a queue ------------------------------------------------------------------------------------------


@dataclass
class _Access:
    """Which folders of a queue this user may not list, or not make and remove a file in; with what was said to that."""

    unlisted: dict[str, str] = field(default_factory=dict)
    unwritten: dict[str, str] = field(default_factory=dict)

    def parts(self, layout: QueueLayout) -> set[str]:
        """Return which parts this user can take in a queue; to receive takes all."""
        parts = set()
        if self.unwritten.keys().isdisjoint((layout.working, layout.target)):
            parts.add("send")
        if not self.unlisted:
            parts.add("look")
        if not self.unlisted and not self.unwritten:
            parts.add("receive")
        return parts

    def settles(self, layout: QueueLayout) -> bool:
        """Whether this user may write where only consumers do."""
        return not self.unwritten.keys() >= {layout.processing, layout.processed, layout.expired, layout.error}


def _queue_folders(context: QueueContext, place: _Place, parts: set[str]) -> Iterator[Diagnosis]:
    """Yield what this user may do in a queue's folders, and whether a rename leads from each to the next.

    Adds to the parts that this user takes in some queue.
    """
    layout, store = context.layout, context.storage
    every = [layout.folder(state) for state in (*FOLDERS, "delayed")] + [layout.private]
    folders = [folder for folder in every if reading.exists(folder)]
    kept = [folder for folder in _kept_in(layout) if folder not in folders]
    listed = [*folders, *(folder for folder in kept if folder != layout.base)]
    hidden = f"{PRIVATE}-{DOCTOR_PREFIX}{secrets.token_hex(6)}"
    try:
        access = _Access({folder: refused for folder in listed if (refused := _unlisted(folder, hidden))})
        if not place.stopped:
            access.unwritten = {folder: said for folder in folders if (said := _unwritten(store, folder, hidden))}
            access.unwritten |= {folder: _NOT_MADE for folder in kept if not os.access(folder, os.W_OK | os.X_OK)}
            yield from _part(context, access, parts)
            yield from _way(context, folders, access, hidden)
    except OSError as error:
        if error.errno not in STOPS:
            raise
        yield from place.stop(error)
    finally:
        for folder in folders:
            with _left(folder):
                store.unlink(f"{folder}/{hidden}")


def _kept_in(layout: QueueLayout) -> list[str]:
    """Return where consumers write what is private: folders that are there, or above those that are made when needed.

    Nothing is tried in them: a file there would be taken for a sign of life, or for a body.
    """
    own = (layout.consumers, layout.held, *layout.reason_folders, layout.delayed)
    return list(dict.fromkeys(map(_or_above, own)))


def _part(context: QueueContext, access: _Access, parts: set[str]) -> Iterator[Diagnosis]:
    """Yield which part this user can take in a queue, where it is not that of who may do everything."""
    layout, own = context.layout, access.parts(context.layout)
    if "receive" not in own and access.settles(layout):
        for folder, said in {**access.unwritten, **access.unlisted}.items():
            yield Diagnosis("closed-folder", folder, f"{_user()} {said}")
        return
    parts |= own
    if not own:
        closed = "; ".join(f"{os.path.basename(folder)}/: {said}" for folder, said in access.unwritten.items())
        yield Diagnosis("no-part", layout.base, f"{_user()} can take no part in {context.name}: {closed}")
    elif "receive" not in own:
        others = [part for part in ("send", "look", "receive") if part not in own]
        text = f"{_user()} may {' and '.join(sorted(own, reverse=True))} in {context.name}, not {' or '.join(others)}"
        yield Diagnosis("part", layout.base, text)
    delayed = _or_above(layout.delayed)
    if "send" in own and not os.access(delayed, os.W_OK | os.X_OK):
        missing = "" if delayed == layout.delayed else f"{layout.delayed} is missing: "
        yield Diagnosis("closed-delayed", delayed, f"{missing}{_user()} may not write in {delayed}")


def _way(context: QueueContext, folders: Sequence[str], access: _Access, hidden: str) -> Iterator[Diagnosis]:
    """Yield what keeps a message from its way through the folders that this user may write, or from being read."""
    layout, parts = context.layout, access.parts(context.layout)
    open_ones = [folder for folder in folders if folder not in access.unwritten]
    found = list(_way_through(context.storage, open_ones, hidden))
    if "receive" in parts:
        found += _stuck(open_ones)
    if "look" in parts:
        found += _unread(context)
    yield from found
    if not found and "receive" in parts:
        text = f"{_user()} may list, create and rename in all {len(folders)} folders of {os.path.basename(layout.home)}"
        yield Diagnosis("folders", layout.base, text)


def _stuck(folders: Iterable[str]) -> Iterator[Diagnosis]:
    """Yield the folders out of which this user may rename only what is its own."""
    for folder in folders:
        status = os.stat(folder)
        if status.st_mode & stat.S_ISVTX and os.geteuid() not in (0, status.st_uid):
            yield Diagnosis("sticky-folder", folder, f"the folder has the sticky bit, and {_user()} is not its owner")


def _unread(context: QueueContext) -> Iterator[Diagnosis]:
    """Tell where others' messages belong to a group, to be read by it alone, of which this user is not."""
    status, mode = os.stat(context.layout.working), context.config.file_mode
    handed_on = status.st_mode & stat.S_ISGID and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not handed_on or mode is None or mode & stat.S_IROTH or os.geteuid() == 0:
        return
    if status.st_gid not in (os.getegid(), *os.getgroups()):
        text = f"others' messages have mode {mode:04o} and group {status.st_gid}, of which {_user()} is not a member"
        yield Diagnosis("foreign-group", context.layout.working, text)


@contextmanager
def _left(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.ENOTDIR, errno.EROFS):  # nothing was made there
            log.warning("a hidden file could not be removed from %s: %s", folder, _said(error))


def _unlisted(folder: str, hidden: str) -> str:
    """Return why a folder may not be listed, or not be entered; nothing where both may."""
    try:
        with reading.listing(folder) as found:
            next(found, None)
        with suppress(FileNotFoundError):
            os.lstat(f"{folder}/{hidden}")
    except OSError as error:
        return f"may not list it: {_said(error)}"
    return ""


def _unwritten(store: Storage, folder: str, hidden: str) -> str:
    """Return what may not be done in a folder of making and removing a file; nothing where both may.

    Raises:
        OSError: there is no room, or the file system is read-only.
    """
    done = _NOT_MADE
    try:
        os.close(store.create(f"{folder}/{hidden}"))
        done = "may not remove a file from it"
        store.unlink(f"{folder}/{hidden}")
    except OSError as error:
        if error.errno in STOPS:
            raise
        return f"{done}: {_said(error)}"
    return ""


def _way_through(store: Storage, folders: Sequence[str], hidden: str) -> Iterator[Diagnosis]:
    """Let a hidden file go from each folder to the next."""
    for here, there in pairwise(folders):
        if not reading.exists(f"{here}/{hidden}"):
            os.close(store.create(f"{here}/{hidden}"))
        try:
            store.rename(f"{here}/{hidden}", f"{there}/{hidden}")
        except OSError as error:
            if error.errno in STOPS:
                raise
            kind = "cross-device" if error.errno == errno.EXDEV else "no-rename"
            yield Diagnosis(kind, there, f"a rename from {os.path.basename(here)}/ to it fails: {_said(error)}")


def _user() -> str:
    """Return who runs this."""
    number = os.geteuid()
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
