"""The first process of a guest of user-mode-linux: `python -m torture.guest FOLDER`; see uml.py.

It mounts the disks, serves the first over NFS where that is asked for, does its task, and turns the machine off.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from torture.uml import MARK

#: Where everything is mounted: no folder that the project or its Python can lie in.
MOUNTS = Path("/run/torture")
DISK, SECOND = MOUNTS / "disk", MOUNTS / "second"
#: The number of the system call on x86_64.
FINIT_MODULE = 313
#: What the RPC library is to use: a line of netconfig(5) each.
TRANSPORTS = ("udp tpi_clts v inet udp - -", "tcp tpi_cots_ord v inet tcp - -", "local tpi_cots_ord - loopback - - -")
#: The options that each version is mounted with: no client shares what it keeps with another, as if on two hosts.
V3 = "vers=3,proto=tcp,mountproto=tcp,mountport=20048"
CLIENTS = {"v3": V3, "v3 nolock": f"{V3},nolock", "v4.2": "vers=4.2,proto=tcp,clientaddr=127.0.0.1"}
#: What the addresses of guests at one cable begin with.
NETWORK = "10.9.0"
#: Seconds for which a server that starts leaves files to the clients that had them: the shortest that it takes.
GRACE = "10"


def say(line: str) -> None:
    """Tell the host something, by a channel that no disk of the guest is in."""
    os.write(1, f"{MARK}{line}\n".encode())


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    say("booted")
    try:
        socket.sethostname("guest")
        for device, mount_point, options in zip(
            ("/dev/ubda", "/dev/ubdb"), (DISK, SECOND), job["mounts"], strict=False
        ):
            mount_point.mkdir(parents=True)
            _run("mount", "-t", job["system"], "-o", options, device, str(mount_point))
        if job["nfs"]:
            serve(Path(job["tree"]))
        say("up")
        module, _, function = job["task"].partition(":")
        keep(folder, getattr(import_module(module), function)(DISK, **job["arguments"]))
    except BaseException as error:  # the first process may not end: the kernel would, too
        traceback.print_exc()
        say(f"failed {error!r}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.sync()
        Path("/proc/sysrq-trigger").write_text("o")
        time.sleep(60)  # until it is off


def keep(folder: Path, result: Any) -> None:
    """Hand the task's result to the host."""
    with open(folder / "result.json", "w") as file:
        json.dump(result, file)
        file.flush()
        os.fsync(file.fileno())


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def never_write_back() -> None:
    """Let nothing reach the disk by itself: what is not synced is lost when the power is cut."""
    for what, value in (("writeback", 0), ("expire", 360_000)):
        Path(f"/proc/sys/vm/dirty_{what}_centisecs").write_text(str(value))
    for what in ("background_", ""):
        Path(f"/proc/sys/vm/dirty_{what}ratio").write_text("90")
    with suppress(FileNotFoundError):  # there for xfs alone
        Path("/proc/sys/fs/xfs/xfssyncd_centisecs").write_text("720000")


# -- the network ---------------------------------------------------------------------------------------------------


def plug_in(number: int) -> None:
    """Be the host of a number at the guest's wire: each time that it starts, it has the same addresses.

    Raises:
        FileNotFoundError: the kernel knows of no wire.
    """
    os.stat("/sys/class/net/vec0")
    _run("ip", "link", "set", "vec0", "address", f"02:00:00:00:00:{number:02x}")
    _run("ip", "address", "add", f"{NETWORK}.{number}/24", "dev", "vec0")
    _run("ip", "link", "set", "vec0", "up")


# -- NFS -----------------------------------------------------------------------------------------------------------


def serve(tree: Path, *, kept: Path | None = None) -> None:
    """Serve the disk over NFS, by the kernel's server, on all the versions that it has.

    Args:
        tree: where the packages are.
        kept: where the server keeps which clients it has, to know them when it starts again after a power cut; then it
            leaves to them for `GRACE` what they had open. Without it nothing is kept.
    """
    _run("ip", "link", "set", "lo", "up")
    _configure(kept)
    for module in ("nfsd", "nfsv3", "nfsv4"):
        load(tree, module)
    _run("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
    _run("mount", "-t", "rpc_pipefs", "sunrpc", "/var/lib/nfs/rpc_pipefs")
    _run("rpcbind", "-w")
    _run("rpc.statd", "--no-notify")
    _run("exportfs", "-ra")
    _run("rpc.mountd", "-p", "20048")
    if kept is None:
        start_server()
    else:
        _run("rpc.nfsd", "-G", GRACE, "-L", GRACE, "8")
        _run("sm-notify")  # of NFS 3: who had locks here is to take them again


def start_server() -> None:
    """Let the kernel serve what is exported."""
    _run("rpc.nfsd", "8")
    Path("/proc/fs/nfsd/v4_end_grace").write_text("Y")  # nobody has anything to reclaim


def _configure(kept: Path | None) -> None:
    """Put folders of our own over those in which the server looks: nothing of the host's is read or written."""
    etc = Path("/run/etc")
    etc.mkdir()
    for name in ("group", "hosts", "services", "protocols", "rpc", "ld.so.cache", "localtime"):
        if os.path.exists(f"/etc/{name}"):
            shutil.copy(f"/etc/{name}", etc)
    (etc / "netconfig").write_text("".join(f"{line}\n" for line in TRANSPORTS))
    users = Path("/etc/passwd").read_text()
    (etc / "passwd").write_text(f"{users}_rpc:x:0:0::/:/bin/false\nstatd:x:0:0::/:/bin/false\n")
    # Names are not looked up anywhere else: there is nobody to answer.
    (etc / "nsswitch.conf").write_text("".join(f"{what}: files\n" for what in ("passwd", "group", "hosts", "services")))
    (etc / "exports").write_text(f"{DISK} *(rw,sync,no_root_squash,no_subtree_check,insecure,fsid=0)\n")
    _run("mount", "--bind", str(etc), "/etc")
    _run("mount", "-t", "tmpfs", "tmpfs", "/var/lib")
    if kept is not None:
        Path("/var/lib/nfs").mkdir()
        _run("mount", "--bind", str(kept), "/var/lib/nfs")
    for name in ("sm", "sm.bak", "rpc_pipefs", "v4recovery"):
        Path("/var/lib/nfs", name).mkdir(parents=True, exist_ok=True)
    for name in ("etab", "rmtab", "state"):
        Path("/var/lib/nfs", name).touch()


def load(tree: Path, module: str) -> None:
    """Load a module of the kernel, and before it what it needs."""
    (listed,) = tree.glob("usr/lib/uml/modules/*/modules.dep")
    needs = dict(line.split(":", 1) for line in listed.read_text().splitlines())
    path = next(path for path in needs if path.endswith(f"/{module}.ko"))
    loaded = {line.split()[0] for line in Path("/proc/modules").read_text().splitlines()}
    for file in [*reversed(needs[path].split()), path]:
        if Path(file).stem not in loaded:
            with open(listed.parent / file, "rb") as opened:
                if ctypes.CDLL(None, use_errno=True).syscall(FINIT_MODULE, opened.fileno(), b"", 0):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), file)


def mount(version: str, name: str, *, port: int = 2049, options: str = "", server: int | None = None) -> Path:
    """Mount the disk by NFS, as a client of its own: by another address of the server, and under another name.

    Else clients of one kernel find out that their server is the same, and become one, connection and all.

    Args:
        version: one of CLIENTS.
        name: the client's.
        port: where the server listens.
        options: more options of the mount, such as `actimeo=0`.
        server: the number at the wire of the guest whose disk it is; None for this one.
    """
    folder = MOUNTS / name
    folder.mkdir()
    address = f"127.0.0.{len(list(MOUNTS.iterdir()))}" if server is None else f"{NETWORK}.{server}"
    exported = "/" if version.startswith("v4") else str(DISK)
    own = socket.gethostname()
    if server is None:
        socket.sethostname(f"client-{name}")
    try:
        words = [CLIENTS[version], "nosharecache", f"port={port}", *filter(None, [options])]
        _run("mount.nfs", f"{address}:{exported}", str(folder), "-o", ",".join(words))
    finally:
        socket.sethostname(own)
    return folder


if __name__ == "__main__":
    main(Path(sys.argv[1]))
