"""FUSE file systems to run on: how each is mounted, what it offers, and how it is taken away again whatever happens."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from helpers import until

from torture.table import NotRun

PASSTHROUGH = Path(__file__).with_name("passthrough.py")
APT = "apt install fuse3 bindfs mergerfs fuse-overlayfs"


@dataclass(frozen=True)
class Kind:
    """A kind of file system: its program, what that is started with, and how many folders it shows as one.

    One that does not follow what changes in those folders says so, and is not asked to. Where the folders show nothing
    by themselves, `behind` makes them show what the file system has.
    """

    name: str
    program: str
    command: Callable[[list[Path], Path], list[str]]
    folders: int = 1
    follows: bool = True
    behind: Callable[[list[Path]], AbstractContextManager[None]] = lambda folders: nullcontext()


def _bindfs(folders: list[Path], mount: Path) -> list[str]:
    return ["bindfs", "-f", str(folders[0]), str(mount)]


def _mergerfs(*options: str) -> Callable[[list[Path], Path], list[str]]:
    def command(folders: list[Path], mount: Path) -> list[str]:
        chosen = ",".join(("cache.files=off", *options))
        return ["mergerfs", "-f", "-o", chosen, ":".join(map(str, folders)), str(mount)]

    return command


def _overlay(folders: list[Path], mount: Path) -> list[str]:
    upper, lower, work = folders
    return ["fuse-overlayfs", "-f", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}", str(mount)]


def passthrough(*offers: str, taken: str = "EEXIST", hdfs: bool = False) -> Kind:
    """Return the kind that has nothing but what is offered, and is like HDFS in all else if asked."""

    def command(folders: list[Path], mount: Path) -> list[str]:
        how = ["--taken", taken, *(["--hdfs"] if hdfs else []), "--offers", *offers]
        return [sys.executable, str(PASSTHROUGH), str(folders[0]), str(mount), *how]

    return Kind("passthrough like HDFS" if hdfs else "passthrough", sys.executable, command)


HDFS_LIKE = passthrough("local-locks", "modes", taken="EIO", hdfs=True)
BINDFS = Kind("bindfs", "bindfs", _bindfs)
MERGERFS = Kind("mergerfs", "mergerfs", _mergerfs("category.create=rand"), folders=2)
#: A new file goes where its folder is; so the folders of a queue may end on different branches.
MERGERFS_BY_PATH = Kind("mergerfs", "mergerfs", _mergerfs("category.create=epff"), folders=2)
OVERLAY = Kind("fuse-overlayfs", "fuse-overlayfs", _overlay, folders=3, follows=False)


class Mounted:
    """A file system of a kind that is mounted: `path` shows what lies in `folders`."""

    def __init__(self, kind: Kind, path: Path, folders: list[Path]) -> None:
        self.kind = kind
        self.path = path
        self.folders = folders
        self._log = path.with_name(f"{path.name}.log")
        self.mount()

    def mount(self) -> None:
        """Start its process, and wait until it shows the folders."""
        with open(self._log, "ab") as log:
            command = self.kind.command(self.folders, self.path)
            self._daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(
            lambda: os.path.ismount(self.path) or self._daemon.poll() is not None,
            f"{self.kind.name} mounted",
            timeout=60,
        )
        if not os.path.ismount(self.path):
            raise NotRun(f"{self.kind.name} cannot mount: {self._log.read_text().strip()[-200:]}")

    def kill(self) -> None:
        """Kill its process: whatever is asked of the mount fails from now on, until it is mounted again."""
        self._daemon.kill()
        self._daemon.wait(10)

    def stop(self) -> None:
        """Let whatever is asked of the mount wait from now on, until it goes on."""
        self._daemon.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it answer again."""
        self._daemon.send_signal(signal.SIGCONT)

    def unmount(self) -> None:
        """Take it away, also where its process died, or somebody has a file open."""
        unmounted(self.path)
        try:
            self._daemon.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()

    def again(self) -> None:
        """Mount it anew after its process was killed."""
        self.unmount()
        self.mount()


def unmounted(path: Path) -> None:
    """Take a mount away, also where its process died, or somebody has a file open."""
    with suppress(FileNotFoundError):
        if not _run("fusermount3", "-u", str(path)) and not _run("fusermount", "-u", str(path)):
            _run("umount", "-l", str(path))


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=20).returncode == 0


@contextmanager
def mounted(kind: Kind, folder: Path) -> Iterator[Mounted]:
    """Mount a kind below a folder for as long as the block lasts.

    Raises:
        NotRun: this machine cannot.
    """
    needs(kind)
    folder.mkdir(parents=True, exist_ok=True)
    folders = [folder / f"behind{number}" for number in range(kind.folders)]
    mount = folder / "mount"
    for path in (*folders, mount):
        path.mkdir(exist_ok=True)
    with kind.behind(folders):
        shown = Mounted(kind, mount, folders)
        try:
            yield shown
        finally:
            shown.unmount()


@contextmanager
def second(first: Mounted) -> Iterator[Mounted]:
    """Mount the folders of another once more, as another host does."""
    path = first.path.with_name("second")
    path.mkdir()
    shown = Mounted(first.kind, path, first.folders)
    try:
        yield shown
    finally:
        shown.unmount()


def needs(kind: Kind) -> None:
    """Raise NotRun where a kind cannot be mounted here, with what to install."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        raise NotRun(f"/dev/fuse: {error.strerror}: modprobe fuse, as root or in a container that may mount") from None
    if not shutil.which(kind.program):
        raise NotRun(f"no {kind.name}: {APT}")
    if not shutil.which("fusermount3") and not shutil.which("fusermount"):
        raise NotRun("no fusermount3: apt install fuse3")
    if kind.program == sys.executable:
        if importlib.util.find_spec("mfusepy") is None:
            raise NotRun("no mfusepy: make setup, or pip install '.[dev]'")
        found = subprocess.run([sys.executable, "-c", "import mfusepy"], capture_output=True, text=True, timeout=20)
        if found.returncode:
            raise NotRun(f"mfusepy cannot be used ({found.stderr.strip().rpartition(chr(10))[2]}): apt install fuse3")


# -- what it offers ------------------------------------------------------------------------------------------


def probed(path: Path) -> dict[str, bool]:
    """Return which of the calls that dropq can do without work on a file system."""
    folder = path / "probe"
    folder.mkdir()
    one, two = str(folder / "one"), str(folder / "two")
    for file in (one, two):
        Path(file).write_bytes(b"")
    fd = os.open(one, os.O_RDWR)
    try:
        found = {
            "links": _works(lambda: os.link(one, f"{one}-link")),
            "locks": _works(lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)),
            "modes": _works(lambda: os.fchmod(fd, 0o600)),
        }
    finally:
        os.close(fd)
    # An open file would be put out of the way first.
    found["replaces"] = _works(lambda: os.rename(one, two))
    found["flags"] = _works(lambda: _flagged(two, str(folder / "three")))
    shutil.rmtree(folder)
    return found


def in_words(found: dict[str, bool]) -> str:
    """Return in words what a probe found."""
    return f"has {', '.join(what for what, works in found.items() if works) or 'none of the five'}"


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True


def _flagged(source: str, destination: str) -> None:
    """Rename with the flag that replaces nothing."""
    import ctypes

    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    if renameat2(-100, os.fsencode(source), -100, os.fsencode(destination), 1) != 0:
        raise OSError(ctypes.get_errno() or errno.EINVAL, source)
