"""Linux in user mode: a second kernel, as a plain process, whose power can be cut and which serves NFS to itself.

Nothing of the host's kernel is needed, and no rights. The guest's root is the host's own tree, so it runs this Python
and this project; its disks are files. The packages come from Debian (or Ubuntu), and are unpacked, not installed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from helpers import until

from torture.table import NotRun

PROJECT = Path(__file__).parents[2]
#: Where the packages are unpacked, once.
CACHE = Path(os.environ.get("DROPQ_TORTURE_CACHE") or PROJECT / ".torture") / "uml"
PACKAGES = ("user-mode-linux", "nfs-kernel-server", "nfs-common", "rpcbind", "keyutils", "xfsprogs", "btrfs-progs")
#: Libraries that are never taken from elsewhere than from the host: its Python runs with them.
OWN = ("libc6", "libc-bin", "libgcc-s1", "libstdc++6", "libcrypt1", "gcc-")
#: Where libraries lie in a package.
LIBRARIES = ("lib/*-linux-gnu", "usr/lib/*-linux-gnu")
#: What the kernel needs on a processor with AMX, and why.
REGISTERS = Path(__file__).with_name("uml_registers.c")
#: Bytes of a disk, which take room only as they are written: xfs wants so many.
DISK_SIZE = 512 << 20
#: What a line of the guest's begins with, to be told from the kernel's.
MARK = "@ "
#: Seconds in which a guest has to be up; it takes three where nothing else runs.
BOOT = 120.0
#: Seconds that a guest may take for the lines before its power is cut.
PATIENCE = 600.0


def kernel() -> Path:
    """Return the folder with the unpacked packages; fetch them where they are missing.

    Raises:
        NotRun: the machine has not what it takes, or cannot get it.
    """
    tree = CACHE / f"tree-{zlib.crc32(' '.join(PACKAGES).encode()):x}"
    if not tree.exists():
        _fetch(tree)
    if not shutil.which("mkfs.ext4", path=_path()):
        raise NotRun("there is no mkfs.ext4: apt install e2fsprogs")
    return tree


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _fetch(tree: Path) -> None:
    if platform.machine() != "x86_64" or not all(map(shutil.which, ("apt-get", "apt-cache", "dpkg"))):
        raise NotRun("user-mode-linux comes as a package of Debian and Ubuntu for x86_64: run it there")
    archives, unpacked = CACHE / "archives", CACHE / f"tree.{os.getpid()}"
    archives.mkdir(parents=True, exist_ok=True)
    wanted = [*PACKAGES, *_libraries()]
    got = subprocess.run(["apt-get", "download", *wanted], cwd=archives, capture_output=True, text=True)
    if got.returncode:
        last = (got.stderr.strip().splitlines() or ["apt-get said nothing"])[-1]
        raise NotRun(f"the packages {', '.join(PACKAGES)} could not be fetched ({last}): apt-get update, or a network")
    for archive in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg", "-x", archive, unpacked], check=True)
    os.rename(unpacked, tree)


def _libraries() -> list[str]:
    """Return the libraries that the packages need and the host has not."""
    flags = [f"--no-{what}" for what in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
    asked = subprocess.run(["apt-cache", "depends", "--recurse", *flags, *PACKAGES], capture_output=True, text=True)
    needed = {line for line in asked.stdout.splitlines() if line.startswith("lib") and ":" not in line}
    state = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n"], capture_output=True, text=True
    )
    there = {line.split()[0] for line in state.stdout.splitlines() if line.endswith(" installed")}
    return sorted(name for name in needed - there if not name.startswith(OWN))


def _preloaded() -> dict[str, str]:
    """Return what the kernel's environment needs beside the host's: nothing on most processors.

    Raises:
        NotRun: a library is needed, and there is no compiler.
    """
    if "amx_tile" not in Path("/proc/cpuinfo").read_text().split():
        return {}
    library = CACHE / f"registers-{zlib.crc32(REGISTERS.read_bytes()):x}.so"
    if not library.exists():
        if not shutil.which("gcc"):
            raise NotRun("on a processor with AMX user-mode-linux needs a library that is compiled: apt install gcc")
        made = f"{library}.{os.getpid()}"
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", made, REGISTERS, "-ldl"], check=True)
        os.rename(made, library)
    return {"LD_PRELOAD": str(library)}


def make_disk(path: Path, system: str = "ext4") -> Path:
    """Make a file that holds an empty file system: ext4, xfs or btrfs."""
    tree = kernel()
    with open(path, "wb") as file:
        file.truncate(DISK_SIZE)
    environment = {**os.environ, "PATH": f"{tree}/sbin:{_path()}", "LD_LIBRARY_PATH": _libraries_in(tree)}
    command = [f"mkfs.{system}", "-q", "-F" if system == "ext4" else "-f", str(path)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return path


def _libraries_in(tree: Path) -> str:
    return ":".join(str(folder) for pattern in LIBRARIES for folder in sorted(tree.glob(pattern)))


class Guest:
    """A running guest, with one task: a function of a module that it calls, whose result it gives back.

    Args:
        folder: a new folder for what it needs beside the disks; on the host's disk.
        disks: the files that are its disks: one, or two.
        task: the function, as `module:function`; it is called inside with the arguments.
        system: the file system on them.
        mounts: the options with which each is mounted.
        nfs: serve the first disk over NFS.
        memory: how much the guest has.
        wire: a socket of datagrams that is its network, as one end of a cable; it stays open when the power is cut.
    """

    def __init__(
        self,
        folder: Path,
        disks: Sequence[Path],
        task: str,
        *,
        system: str = "ext4",
        mounts: Sequence[str] = (),
        nfs: bool = False,
        memory: str = "512M",
        wire: socket.socket | None = None,
        **arguments: Any,
    ) -> None:
        tree = kernel()
        if " " in "".join(map(str, (folder, *disks))):
            raise NotRun("a path with a space cannot be told to the kernel: name another folder by --folder")
        folder.mkdir(parents=True)
        self._folder, self._console = folder, folder / "console"
        mounts = mounts or ["defaults"] * len(disks)
        job = {"task": task, "system": system, "mounts": mounts, "nfs": nfs, "tree": str(tree), "arguments": arguments}
        (folder / "job.json").write_text(json.dumps(job))
        init = folder / "init"
        init.write_text(script(folder, tree))
        init.chmod(0o755)
        options = [
            f"mem={memory}",
            "rootfstype=hostfs",
            "rootflags=/",
            "rw",
            "quiet",
            "loglevel=1",
            "con=null",
            "ssl=null",
        ]
        options += [f"ubd{letter}={disk}" for letter, disk in zip("ab", disks, strict=False)]
        if wire is not None:
            options.append(f"vec0:transport=fd,fd={wire.fileno()}")
        command = [str(tree / "usr/bin/linux.uml"), *options, f"uml_dir={folder}", f"init={init}"]
        # Its memory is a file: on /dev/shm, where it looks first when nobody says otherwise.
        environment = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "TMP", "TEMP")}
        with open(self._console, "wb") as console:
            self._process = subprocess.Popen(
                [*command, "con0=null,fd:1"],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                pass_fds=[] if wire is None else [wire.fileno()],
                env=environment | _preloaded(),
            )

    def __enter__(self) -> Guest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()

    def cut(self) -> None:
        """Cut its power: all its processes go, at whatever they are."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # a group of its own, by start_new_session
            self._process.wait(60)

    @property
    def runs(self) -> bool:
        """Whether its power is on."""
        return self._process.poll() is None

    def said(self) -> list[str]:
        """Return what the task has said so far, a line each; one that is not whole is left out."""
        return own_lines(self._console.read_bytes())

    def up(self) -> None:
        """Wait until the task runs.

        Raises:
            NotRun: the kernel does not run on this machine, or not this Python on it.
            RuntimeError: it does, but what the task needs could not be set up.
        """
        deadline = time.monotonic() + BOOT
        while "up" not in self.said():
            if self._process.poll() is not None or time.monotonic() > deadline:
                if "booted" in self.said():
                    raise RuntimeError(f"the guest was not set up: {self._end()}")
                last = self._end().splitlines()[-1]
                raise NotRun(f"user-mode-linux does not boot here ({last}): run it where ptrace is allowed")
            time.sleep(0.05)

    def result(self, timeout: float = 600.0) -> Any:
        """Wait until it has ended by itself, and return what the task returned.

        Raises:
            RuntimeError: the task did not return, or not in time.
        """
        self.up()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the guest was not through after {timeout} s: {self._end()}") from None
        try:
            return json.loads((self._folder / "result.json").read_text())
        except (FileNotFoundError, ValueError):
            raise RuntimeError(f"the task in the guest did not return: {self._end()}") from None

    def _end(self) -> str:
        return self._console.read_text(errors="replace")[-2000:].strip() or "it said nothing"


def cut_power(
    folder: Path, module: str, system: str, mounts: Sequence[str], *, lines: float, pause: float, **own_lines: Any
) -> tuple[list[str], Any]:
    """Run `work` of a module in a guest until its power is cut; then boot it again, and run `inspect` there.

    Args:
        folder: a new folder.
        module: the module.
        system: the file system on its disks.
        mounts: the options with which each disk is mounted until the cut.
        lines: after how many of its lines the power is cut, if it has not said before that it rests.
        pause: how many seconds later.
        told: the arguments of `work`.

    Returns:
        The lines that it had said, and what `inspect` returned.
    """
    folder.mkdir()
    disks = [make_disk(folder / f"disk-{number}", system) for number in range(len(mounts))]
    with Guest(folder / "cut", disks, f"{module}:work", system=system, mounts=mounts, **own_lines) as guest:
        guest.up()
        until(lambda: _is_ripe(guest.said(), lines), "the guest to say enough", timeout=PATIENCE)
        time.sleep(pause)  # the moment is left to chance: between two lines, too
        guest.cut()
        said = guest.said()
    with Guest(folder / "again", disks, f"{module}:inspect", system=system) as guest:
        seen = guest.result()
    for disk in disks:
        disk.unlink()
    return said, seen


def _is_ripe(said: list[str], lines: float) -> bool:
    return len(said) >= lines or any(line.partition(" ")[0] in ("resting", "failed") for line in said)


def own_lines(console: bytes) -> list[str]:
    """Return the lines of a console that are a task's own, and whole."""
    whole = console.decode(errors="replace").rpartition("\n")[0]
    return [line.rstrip("\r").removeprefix(MARK) for line in whole.split("\n") if line.startswith(MARK)]


def script(folder: Path, tree: Path) -> str:
    """Return what the guest runs first: it mounts what Python needs, and goes on in Python."""
    python_path = f"{PROJECT}:{PROJECT}/tests:{PROJECT}/tests/spark"
    path = f"{tree}/sbin:{tree}/usr/sbin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    lines = [
        "#!/bin/sh",
        f"export PATH='{path}' LD_LIBRARY_PATH='{_libraries_in(tree)}' PYTHONPATH='{python_path}'",
        "export PYTHONDONTWRITEBYTECODE=1 HOME=/run LANG=C.UTF-8",
        "mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t tmpfs tmpfs /run; cd /run",
        "[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd",
        f"exec '{sys.executable}' -m torture.guest '{folder}'",
    ]
    return "\n".join(lines) + "\n"
