"""Which host this is, and what is mounted where, as Linux reports it; elsewhere this is unknown, and callers try."""

from __future__ import annotations

import hashlib
import os
import re
import time
from dataclasses import dataclass, replace
from functools import cache, lru_cache

#: Where Linux lists what is mounted; other systems have no such file.
MOUNTS = "/proc/self/mountinfo"

#: Where Linux gives each boot of a host an id of its own.
_BOOT = "/proc/sys/kernel/random/boot_id"
#: What tells this host from others of its name; not every host has it.
_MACHINE = "/etc/machine-id"

#: File systems whose files change without an event here: other hosts, or programs behind the mount, change them.
_SHARED = re.compile(
    r"nfs|fuse|cifs|smb|9p|virtiofs|ceph|lustre|gpfs|beegfs|gluster|afs|ocfs2|gfs2|vboxsf|prl_fs|drvfs"
)
#: The shared file systems that pass the locks of one host on to the others, unless an option says otherwise; and a name
#: for all that share those locks. NFS has none: its server's own host shares its locks, see `locks`.
_PASSING_LOCKS = {
    "nfs": "",
    "cifs": "smb",
    "smb": "smb",
    "ceph": "ceph",
    "lustre": "lustre",
    "ocfs2": "ocfs2",
    "gfs2": "gfs2",
}
#: Options that keep a lock on the host that took it.
_LOCAL_LOCKS = frozenset({"nolock", "nobrl", "localflock", "localflocks", "local_lock=all", "local_lock=flock"})


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system: its type, where it is mounted, what is mounted there, and with which options."""

    kind: str
    point: str = "/"
    source: str = ""
    options: tuple[str, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether other hosts, or programs behind the mount, may change it without this host's kernel knowing."""
        return _SHARED.match(self.kind) is not None

    @property
    def finishes_late(self) -> bool:
        """Whether a close() may return before the file is whole: FUSE waits for no more than its own process says."""
        return self.kind.startswith("fuse")

    @property
    def is_nfs(self) -> bool:
        """Whether an NFS server has it: that makes a rename durable before it answers."""
        return self.kind.startswith("nfs")

    @property
    def keeps_locks(self) -> bool:
        """Whether a lock may be known to this mount alone: it is shared, and not known to pass locks on."""
        return self.shared and (self._passing is None or not _LOCAL_LOCKS.isdisjoint(self.options))

    @property
    def sharing_locks(self) -> str:
        """The name for all that share its locks; "" for this host's own disks, and for NFS."""
        return self._passing or ""

    @property
    def _passing(self) -> str | None:
        return next((name for start, name in _PASSING_LOCKS.items() if self.kind.startswith(start)), None)

    def option(self, name: str) -> str | None:
        """Return the value of an option, "" for an option without a value; None when it is not set."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                return value
        return None


def mount_of(path: str, table: str = MOUNTS) -> Mount | None:
    """Return the mount that a path lies on; None where the system does not report mounts."""
    path = os.path.realpath(path)
    found, best = None, (False, -1)
    try:
        number = os.stat(path).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        with open(table, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            lines = _parsed(file.read())
    except (OSError, IndexError, ValueError):
        return None
    for on, mount, of_disk in lines:
        point, is_there = mount.point, on == device
        above = f"{path}/".startswith(f"{point.rstrip('/')}/")
        # The table lacks the device numbers of btrfs and overlays: there the mount point decides.
        fits = is_there, len(point) if above else -1
        if (is_there or above) and fits >= best:  # of two on one point the later hides the other
            # A mount that is not above the path is another mount of the same disk: in a chroot the path's own mount is
            # not listed. The two share the disk's options, but not a mount's own, such as `ro`.
            found, best = mount if above else replace(mount, point="/", options=of_disk), fits
    return found


@lru_cache(maxsize=1)
def _parsed(table: str) -> list[tuple[str, Mount, tuple[str, ...]]]:
    """Return for each mount of a table its device number, the mount, and the options of its file system alone."""
    found = []
    for line in filter(None, table.split("\n")):
        about, _, more = line.partition(" - ")
        fields, (kind, source, *others) = about.split(" "), more.split(" ")
        of_disk = others[-1:]
        options = tuple(dict.fromkeys(",".join([*fields[5:6], *of_disk]).split(",")))
        mount = Mount(kind, _unescaped(fields[4]), _unescaped(source), options)
        found.append((fields[2], mount, tuple(dict.fromkeys(",".join(of_disk).split(",")))))
    return found


def rename_leads(source: str, target: str) -> bool:
    """Return whether a rename leads from one folder to another: both lie on one mount of one file system."""
    if os.stat(source).st_dev != os.stat(target).st_dev:
        return False
    mounts = mount_of(source), mount_of(target)
    return None in mounts or mounts[0] == mounts[1]


@cache
def boot_id() -> bytes:
    """Return the id of this boot of the host; where the system has none, the name of the host."""
    try:
        with open(_BOOT, "rb") as file:
            return file.read(64).strip()
    except OSError:
        return os.uname().nodename.encode()


@cache
def host() -> str:
    """Return the name of this host with a digest of its machine id: two hosts of one name differ."""
    name = os.uname().nodename
    try:
        with open(_MACHINE, "rb") as file:
            machine = file.read(64)
    except OSError:
        machine = b""
    return f"{name}-{hashlib.sha256(os.fsencode(name) + machine).hexdigest()[:12]}"


@cache
def mount_at(folder: str, device: int) -> Mount | None:
    """Return the mount that a folder lies on; look it up once for each device that the folder was found on."""
    return mount_of(folder)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def was_brought_back(path: str) -> bool:
    """Return whether a power cut may have brought back this name of a file, which was renamed before.

    On btrfs a renamed file may have both names then, until both folders are synced. A link that somebody made since
    this machine was started changed the file's ctime.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    if found.st_nlink < 2 or found.st_ctime > started_at():
        return False
    mount = mount_of(path)
    return mount is not None and mount.kind == "btrfs"


def started_at() -> float:
    """Return when this machine was started, in seconds since 1970; 0 where the system does not tell."""
    boot_clock = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if boot_clock is None else time.time() - time.clock_gettime(boot_clock)
