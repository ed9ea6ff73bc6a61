"""What dropq needs of a file system: a check a function, which looks it up, or tries it in a scratch folder."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from threading import Barrier

from dropq.diagnosis.doctor_kinds import Diagnosis
from dropq.storage import liveness, reading, system_calls
from dropq.storage.clock import CLOCK_TOLERANCE, ServerClock
from dropq.storage.files import Storage
from dropq.storage.locks import has_second
from dropq.storage.mounts import Mount, mount_of
from dropq.storage.watch import Watch

log = logging.getLogger("dropq")

#: Seconds to wait for what should be there at once: an event, a change in a listing, a lock that is freed.
PATIENCE = 5.0
#: How many syncs are timed; the median counts.
SYNCS = 5
#: How many files two threads race for.
RACES = 20
#: Less room than this is little: a share of the whole, bytes, inodes.
LITTLE, LITTLE_SPACE, FEW_INODES = 0.05, 16 << 20, 1000
#: The errors that end all trials on a file system, with the kind of diagnosis for each.
STOPS = {errno.ENOSPC: "no-room", errno.EDQUOT: "no-room", errno.EROFS: "read-only"}

#: File systems that keep files as objects under a key: they have no rename.
_OBJECT_STORES = re.compile(
    r"fuse\.(s3fs|s3|mount-s3|mountpoint-s3|goofys|gcsfuse|blobfuse2?|rclone|juicefs-s3|ossfs|cosfs)"
)

#: A process that locks a file until it is killed; it prints 0, or the number of the error that refused the lock.
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

#: Names that dropq itself gives: the longest of a claim, a name that ends in a dot, a name with an asterisk.
_CLAIM = "host%2Done-0123456789-0123abcd,1700000000000,1~4.1700000000000000-0123456789.T.0...t%7E.JMSXDeliveryCountI=1&"
OWN_NAMES = (f"{_CLAIM}{'a':b<20}S=".ljust(255, "c"), "4.own+id.T.....tmp.", "4.a*b.T")


@dataclass
class Probe:
    """The examination of one file system by a folder on it, which its diagnoses name.

    Attributes:
        scratch_stems: how the paths begin at which the scratch folder may be made, the best first.
        leased: whether the messages of a queue have leases, by the name of each queue on it.
        settling_briefly: the queues on it that have no `settle_time`.
        stopped: the kind of diagnosis that ended all trials, one of `STOPS`.
        closed: why this user could make no scratch folder.
    """

    path: str
    scratch_stems: list[str] = field(default_factory=list)
    leased: dict[str, bool] = field(default_factory=dict)
    settling_briefly: list[str] = field(default_factory=list)
    found: list[Diagnosis] = field(default_factory=list)
    mount: Mount | None = None
    scratch_dir: str = ""
    stopped: str = ""
    closed: str = ""
    store: Storage = field(default_factory=lambda: Storage("none"))

    def run(self) -> None:
        """Look up what needs no writing; try the rest in a scratch folder, and remove that whatever happens.

        After a kill, `fsck` knows the scratch folder by its name.
        """
        self.mount = mount_of(self.path)
        token = secrets.token_hex(6)
        candidates = [f"{stem}{token}" for stem in self.scratch_stems]
        try:
            refused = self._make_scratch_dir(candidates)
            self.stopped = STOPS.get(refused.errno or 0, "") if refused is not None else ""
            for check in LOOKS:
                self._run(check)
            if refused is None:
                for check in TRIALS:
                    if not self.stopped:
                        self._run(check)
            elif self.stopped:
                self._stop(refused)
            else:
                self.closed = refusal(refused)
        finally:
            for folder in candidates:
                self._remove(folder)

    def _make_scratch_dir(self, candidates: Sequence[str]) -> OSError | None:
        """Make the first scratch folder that can be made; return what refused it where none can."""
        refused = None
        for folder in candidates:
            try:
                self.store.make_folder(folder, parents=False)
            except OSError as error:  # there is no root yet, or this user may not write there
                refused = error
                if error.errno in STOPS:
                    break
            else:
                self.scratch_dir = folder
                return None
        return refused

    def _remove(self, folder: str) -> None:
        try:
            self.store.remove_tree(folder)
        except OSError as error:
            if reading.exists(folder):
                log.warning("%s could not be removed: %s", folder, error.strerror or error)

    def _run(self, check: Callable[[Probe], None]) -> None:
        with self.reporting_errors(check.__name__):
            check(self)

    @contextmanager
    def reporting_errors(self, check: str) -> Iterator[None]:
        """Report the error that cuts the block short, in the name of a check."""
        try:
            yield
        except OSError as error:
            if error.errno in STOPS:
                self._stop(error)
            else:
                self.report("not-tried", f"{check}: {refusal(error)}")

    def _stop(self, error: OSError) -> None:
        """Try nothing more on this file system, and report why, once."""
        self.stopped = STOPS[error.errno or 0]
        if all(diagnosis.kind != self.stopped for diagnosis in self.found):
            self.report(self.stopped, f"a file or folder cannot be made: {error.strerror or error}")

    def report(self, kind: str, found: str, path: str = "") -> None:
        """Add a diagnosis, of the file system unless it is about another path."""
        self.found.append(Diagnosis(kind, path or self.path, found))

    def folders(self, *names: str) -> list[str]:
        """Make folders in the scratch folder; return their paths."""
        paths = [f"{self.scratch_dir}/{name}" for name in names]
        for path in paths:
            self.store.make_folder(path)
        return paths

    def file(self, path: str, content: bytes = b"dropq doctor\n") -> str:
        """Make a file, and return its path."""
        self.store.write_new(path, content)
        return path


def refusal(error: OSError) -> str:
    """Return why a call was refused; raise the error if it says nothing about this call: no more can be tried."""
    if error.errno in STOPS:
        raise error
    return error.strerror or str(error)


# -- what can be looked up -----------------------------------------------------------------------------------------


def mount(probe: Probe) -> None:
    """Report what is mounted, and the types and options with which dropq loses its promises."""
    mount = probe.mount
    if mount is None:
        return
    what = f"{mount.kind} at {mount.point} from {mount.source}"
    if probe.stopped == "read-only" and "ro" in mount.options:
        options = ",".join(option for option in mount.options if option != "rw")  # the device's own may say rw
        probe.report("read-only", f"{what} is mounted read-only ({options})")
    else:
        probe.report("file-system", f"{what} ({','.join(mount.options)})")
    if _OBJECT_STORES.fullmatch(mount.kind):
        probe.report("object-store", f"{mount.kind} keeps files as objects")
    soft = [option for option in ("soft", "softerr") if option in mount.options]
    if soft and mount.kind.startswith("nfs"):
        probe.report("nfs-soft", f"mounted with {soft[0]}")
    if probe.settling_briefly and mount.kind.startswith(("nfs", "cifs", "smb")):
        probe.report("late-writes", f"without settle_time: {', '.join(probe.settling_briefly)}")


def space(probe: Probe) -> None:
    """Report how much room is left for this user."""
    if probe.stopped == "read-only":
        return  # no room is needed
    status = os.statvfs(probe.path)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{_size(free)} of {_size(total)} free" if total else "the file system does not report its size"
    text += f", {status.f_favail:,} of {status.f_files:,} inodes free" if status.f_files else ", inodes as needed"
    rooms = ((free, total, LITTLE_SPACE), (status.f_favail, status.f_files, FEW_INODES))
    rooms_reported = [room for room in rooms if room[1]]
    is_low = any(left < max(whole * LITTLE, least) for left, whole, least in rooms_reported)
    has_none = any(not left for left, _, _ in rooms_reported)
    probe.report("no-room" if has_none else "low-space" if is_low else "space", text)


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


#: The checks that need no writing, in the order of their diagnoses.
LOOKS = (mount, space)


# -- what is tried ---------------------------------------------------------------------------------------------------


def rename(probe: Probe) -> None:
    """Try whether a rename moves a file as it is, and whether only one of two threads that race for a file gets it."""
    here, there = probe.folders("rename-here", "rename-there")
    file = probe.file(f"{here}/file")
    before = reading.inode(file)
    try:
        probe.store.rename(file, f"{there}/file")
    except OSError as error:
        kind = "cross-device" if error.errno == errno.EXDEV else "no-rename"
        probe.report(kind, f"a rename from folder to folder fails: {refusal(error)}")
        return
    if reading.inode(f"{there}/file") != before:
        probe.report("copying-rename", "a renamed file has another inode")
    twice = _won_by_two(probe, here, there)
    if twice:
        probe.report("shared-rename", f"of {RACES} files that two threads renamed, {twice} went to both")
    else:
        probe.report("rename", f"each of {RACES} files that two threads renamed went to one of them")


def _won_by_two(probe: Probe, here: str, there: str) -> int:
    """Let two threads rename the same files; return how many files both got."""
    names = [str(number) for number in range(RACES)]
    for name in names:
        probe.file(f"{here}/{name}")
    start = Barrier(2)

    def take(mine: str) -> set[str]:
        won = set()
        start.wait()
        for name in names:
            try:
                # RACE: on purpose. The thread whose rename succeeds has the file.
                probe.store.rename(f"{here}/{name}", f"{there}/{mine}-{name}")
            except FileNotFoundError:
                continue
            won.add(name)
        return won

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(take, ("first", "second"))
    return len(first & second)


def replace(probe: Probe) -> None:
    """Try a rename that replaces nothing."""
    (folder,) = probe.folders("replace")
    taken, file, free = probe.file(f"{folder}/taken"), probe.file(f"{folder}/file"), f"{folder}/free"
    try:
        # To a free name first: where a name is taken, the kernel says so before it asks the file system.
        system_calls.rename_noreplace(file, free)
        system_calls.rename_noreplace(free, taken)
    except FileExistsError:
        probe.report("noreplace", "a rename can replace nothing (renameat2, RENAME_NOREPLACE)")
    except OSError as error:
        probe.report("no-noreplace", f"no rename that replaces nothing (renameat2): {refusal(error)}")
    else:
        probe.report("broken-noreplace", "a rename that was to replace nothing replaced a file")


def locks(probe: Probe) -> None:
    """Try whether a lock excludes another process, and is freed when that dies; look up which hosts see it."""
    (folder,) = probe.folders("locks")
    path = probe.file(f"{folder}/holder", liveness.mark(folder))
    with _locked_by_another(path) as refused:
        dead_while_locked = liveness.is_dead(folder, "holder")
    if refused:
        probe.report("no-locks", f"no flock: {refused}")
    elif dead_while_locked:
        probe.report("weak-locks", "two processes hold one flock")
    elif _seconds_until(lambda: liveness.is_dead(folder, "holder")) == math.inf:
        probe.report("no-locks", f"a killed process still holds its flock after {PATIENCE:.0f} s")
    else:
        _hosts_that_see_locks(probe, path)


@contextmanager
def _locked_by_another(path: str) -> Iterator[str]:
    """Let another process lock a file, and kill it after the block; yield why it got no lock, "" where it got it."""
    command = [sys.executable, "-I", "-S", "-c", _LOCKER, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            number = int(process.stdout.readline() or -1)
            yield "" if number == 0 else os.strerror(number) if number > 0 else "the process ended"
        finally:
            process.kill()


def _hosts_that_see_locks(probe: Probe, path: str) -> None:
    mount, works = probe.mount, "flock excludes another process and ends with its process"
    if mount is None or not mount.shared:
        if mount is not None and has_second(path):
            probe.report("locks", f"{works}; NFS clients of this host see it")
        else:
            probe.report("unserved-locks", f"{works}; NFS clients of this host would not see it")
    elif not mount.keeps_locks:
        beside = f", but not to programs beside {mount.sharing_locks}" if mount.sharing_locks else ""
        probe.report("locks", f"{works}; {mount.kind} passes locks on to other hosts{beside}")
    else:
        text = f"{works}; as {mount.kind} is mounted, each mount may have locks of its own"
        without = [name for name, leased in probe.leased.items() if not leased]
        if probe.leased and not without:
            probe.report("leased-locks", f"{text}; every queue has a lease_period")
        else:
            probe.report("local-locks", f"{text}; without lease_period: {', '.join(without) or 'no queue yet'}")


def sync(probe: Probe) -> None:
    """Try the syncs of a send, and time them."""
    (folder,) = probe.folders("sync")
    store, times = Storage("full"), []
    for number in range(SYNCS):
        fd = store.create(f"{folder}/{number}")
        try:
            os.write(fd, b"x" * 4096)
            began = time.perf_counter()
            store.sync_file(fd)
        except OSError as error:
            probe.report("no-sync", f"a file cannot be synced: {refusal(error)}")
            return
        finally:
            os.close(fd)
        try:
            store.sync(folder, probe.scratch_dir)
        except OSError as error:
            probe.report("no-folder-sync", f"a folder cannot be synced: {refusal(error)}")
            return
        times.append(time.perf_counter() - began)
    probe.report("sync", f"fsync of a file and two folders takes {median(times) * 1000:.3g} ms")


def listing(probe: Probe) -> None:
    """Try whether a listing shows at once what came and what went."""
    here, there = probe.folders("listing-here", "listing-there")
    file = probe.file(f"{here}/file")
    _listed(there)  # so that a cache of listings may have it
    probe.store.rename(file, f"{there}/file")
    came = _seconds_until(lambda: _listed(there) == ["file"])
    probe.store.rename(f"{there}/file", file)
    went = _seconds_until(lambda: _listed(there) != ["file"])
    if late := max(came, went):
        delay = f"after {late:.1f} s" if late < math.inf else f"not within {PATIENCE:.0f} s"
        probe.report("late-listing", f"a listing shows what came or went {delay}")
    else:
        probe.report("listing", "a listing shows at once what came and what went")


def _listed(folder: str) -> list[str]:
    """Return the names in a folder, as this host may remember them: so does a consumer that looks for messages."""
    with reading.listing(folder) as found:
        return [entry.name for entry in found]


def _seconds_until(condition: Callable[[], bool]) -> float:
    """Wait until a condition holds; return how long that took: 0 for at once, infinity when `PATIENCE` ran out."""
    began, pause = time.monotonic(), 0.005
    if condition():
        return 0.0
    while time.monotonic() - began < PATIENCE:
        time.sleep(pause)
        if condition():
            return time.monotonic() - began
        pause = min(pause * 2, 0.25)
    return math.inf


def events(probe: Probe) -> None:
    """Try whether a file that comes gives an event; where other hosts change files, no event can be relied on."""
    if probe.mount is not None and probe.mount.shared:
        return
    here, there = probe.folders("events-here", "events-there")
    file = probe.file(f"{here}/file")
    watch = Watch(there)
    if not watch.observe():
        probe.report("no-events", "the folder cannot be watched")
        return
    probe.store.rename(file, f"{there}/file")
    if watch.wait(PATIENCE):
        probe.report("events", "a file that comes gives an event")
    else:
        probe.report("no-events", f"a file came, and no event within {PATIENCE:.0f} s")


def clock(probe: Probe) -> None:
    """Compare the file server's clock with this host's."""
    ahead = ServerClock(probe.file(f"{probe.scratch_dir}/clock")).offset()
    if abs(ahead) > CLOCK_TOLERANCE:
        text = f"the file server's clock is {abs(ahead):.3g} s {'ahead of' if ahead > 0 else 'behind'} this host's"
        probe.report("clock-offset", text)
    else:
        probe.report("clock", f"the file server's clock and this host's agree within {CLOCK_TOLERANCE} s")


def names(probe: Probe) -> None:
    """Try whether names come back as they were given."""
    (folder,) = probe.folders("names")
    problems = [problem for name in OWN_NAMES if (problem := _problem_with_name(probe, folder, name)) is not None]
    probe.file(f"{folder}/Case")
    if os.path.lexists(f"{folder}/case"):
        problems.append(("folding-names", "Case and case are one name"))
    for kind, text in problems or [("names", "names of 255 bytes and of either case are kept")]:
        probe.report(kind, text)


def _problem_with_name(probe: Probe, folder: str, name: str) -> tuple[str, str] | None:
    """Try a name; return the kind of its problem, and what was found."""
    try:
        probe.file(f"{folder}/{name}")
    except OSError as error:
        kind = "short-names" if error.errno == errno.ENAMETOOLONG else "changed-names"
        return kind, f"the name {name!a}, of {len(name)} bytes, is refused: {refusal(error)}"
    if name not in reading.names_in(folder):
        return "changed-names", f"the name {name!a} comes back as another"
    return None


#: The checks that work in the scratch folder, in the order of their diagnoses.
TRIALS = (rename, replace, locks, sync, listing, events, clock, names)
