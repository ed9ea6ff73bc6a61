"""What is mounted where, as Linux tells it; elsewhere nothing is told, and what a file system can do is tried."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache

#: Where Linux tells which file system is mounted where; elsewhere there is no such file.
MOUNTS = "/proc/self/mountinfo"

#: File systems on which other hosts, or a folder behind the mount, change files without an event here.
_SHARED = re.compile(
    r"nfs|fuse|cifs|smb|9p|virtiofs|ceph|lustre|gpfs|beegfs|gluster|afs|ocfs2|gfs2|vboxsf|prl_fs|drvfs"
)
#: Of these, those that pass the locks of one host on to the others, unless an option says otherwise; and the name that
#: those have in common who share these locks. NFS has none: its server's own host shares them, by `locks`.
_PASSING_LOCKS = {
    "nfs": "",
    "cifs": "smb",
    "smb": "smb",
    "ceph": "ceph",
    "lustre": "lustre",
    "ocfs2": "ocfs2",
    "gfs2": "gfs2",
}
#: Options by which locks stay on the host that they are taken on.
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
        """Whether others may change it without this host's kernel knowing: other hosts, or who is behind the mount."""
        return _SHARED.match(self.kind) is not None

    @property
    def keeps_locks(self) -> bool:
        """Whether a lock may be known to this mount alone: others share it, and it is not known to pass locks on."""
        return self.shared and (self._passing is None or not _LOCAL_LOCKS.isdisjoint(self.options))

    @property
    def sharing_locks(self) -> str:
        """What those have in common who share its locks; "" for this host's own disks, and for NFS."""
        return self._passing or ""

    @property
    def _passing(self) -> str | None:
        return next((name for start, name in _PASSING_LOCKS.items() if self.kind.startswith(start)), None)

    def option(self, name: str) -> str | None:
        """Return the value of an option, "" for one that has none; None where it is not set."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                return value
        return None


def mount_of(path: str, table: str = MOUNTS) -> Mount | None:
    """Return what a path lies on; None where the system does not tell."""
    path = os.path.realpath(path)
    found, best = None, (False, -1)
    try:
        number = os.stat(path).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        with open(table, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                about, _, more = line.partition(" - ")
                fields, (kind, source, *others) = about.split(), more.split()
                point, is_there = _unescaped(fields[4]), fields[2] == device
                above = f"{path}/".startswith(f"{point.rstrip('/')}/")
                # btrfs and overlays have device numbers that the table does not: there the mount point tells.
                fits = is_there, len(point) if above else -1
                if (is_there or above) and fits >= best:  # of two on one point the later hides the other
                    # One that is not above the path is another mount of the same disk: in a chroot the path's own is
                    # not listed. The two share the options of the disk, and not those of a mount, such as `ro`.
                    options = ",".join([*fields[5:6][:above], *others[-1:]]).split(",")
                    shown = point if above else "/"
                    found, best = Mount(kind, shown, _unescaped(source), tuple(dict.fromkeys(options))), fits
    except (OSError, IndexError, ValueError):
        return None
    return found


@cache
def mount_at(folder: str, device: int) -> Mount | None:
    """Return what a folder lies on; it is looked up once for each device that the folder is found on."""
    return mount_of(folder)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
