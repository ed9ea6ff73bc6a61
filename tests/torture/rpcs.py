"""Counts what NFS clients ask of their server: by the kernel's counters of each mount, and NFS 3's locks on the wire.

The counters are exact, and no busy machine changes them. Locks of NFS 3 are calls of another protocol, NLM, which no
counter of a mount has: a packet socket sees them.
"""

from __future__ import annotations

import ctypes
import re
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

#: The columns of a table of RPCs, and the calls that each counts; a call that none names counts as `other`.
KINDS = {
    "create": ("OPEN", "CREATE"),
    "open": ("OPEN_NOATTR",),
    "write": ("WRITE", "COMMIT"),
    "read": ("READ",),
    "close": ("CLOSE",),
    "setattr": ("SETATTR",),
    "rename": ("RENAME",),
    "delegreturn": ("DELEGRETURN",),
    "lock": ("LOCK", "LOCKT", "LOCKU", "FREE_STATEID", "NLM_TEST", "NLM_LOCK", "NLM_CANCEL", "NLM_UNLOCK"),
    "getattr": ("GETATTR",),
    "readdir": ("READDIR", "READDIRPLUS"),
    "lookup, access": ("LOOKUP", "ACCESS"),
    "link, remove, mkdir, rmdir": ("LINK", "SYMLINK", "REMOVE", "MKDIR", "RMDIR"),
}
OTHER = "other"
#: The program of NLM among those of RPC, and the names of its procedures.
NLM = 100021
NLM_CALLS = {1: "NLM_TEST", 2: "NLM_LOCK", 3: "NLM_CANCEL", 4: "NLM_UNLOCK"}
#: From linux/if_ether.h, linux/if_packet.h and asm/socket.h.
ETH_P_IP, PACKET_HOST, PACKET_STATISTICS, SO_ATTACH_FILTER, SO_RCVBUFFORCE = 0x0800, 0, 6, 26, 33
#: Bytes that may wait in the socket until the next count: some ten thousand calls.
ROOM = 32 << 20
#: How many lines of code an RPC is attributed to.
DEPTH = 5


def by_kind(calls: dict[str, int]) -> dict[str, int]:
    """Return how many calls there were of each kind."""
    kind_of = {call: kind for kind, named in KINDS.items() for call in named}
    kinds: Counter[str] = Counter()
    for call, count in calls.items():
        kinds[kind_of.get(call, OTHER)] += count
    return dict(kinds)


class Rpcs:
    """The RPCs of all NFS mounts of this process' namespace, since they were mounted."""

    def __init__(self) -> None:
        self._locks = LockCalls()

    def now(self) -> Counter[str]:
        """Return how often each call was made so far."""
        return mount_calls(Path("/proc/self/mountstats").read_text()) + self._locks.now()


def mount_calls(stats: str) -> Counter[str]:
    """Return the calls in the text of a `mountstats`, over all its NFS mounts.

    Both versions have a CREATE: of NFS 3 it makes files, of NFS 4 folders; there it is returned as MKDIR.
    """
    calls: Counter[str] = Counter()
    for mount in re.split(r"^device ", stats, flags=re.MULTILINE):
        head, _, counters = mount.partition("per-op statistics")
        for call, count in re.findall(r"^\s+(\w+): (\d+)", counters, re.MULTILINE):
            if int(count):
                calls["MKDIR" if call == "CREATE" and "with fstype nfs4" in head else call] += int(count)
    return calls


class LockCalls:
    """The calls of NLM that went over the loopback device since this was made."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._socket: socket.socket | None = None
        if port := _port_of(NLM):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_IP))
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, ROOM)
            _take_only(self._socket, port)
            self._socket.bind(("lo", ETH_P_IP))
            self._socket.setblocking(False)

    def now(self) -> Counter[str]:
        """Return how often each was made so far."""
        if self._socket is not None:
            for packet in _waiting(self._socket):
                self._calls.update(_lock_calls(packet))
            dropped = struct.unpack("II", self._socket.getsockopt(263, PACKET_STATISTICS, 8))[1]  # 263: SOL_PACKET
            assert not dropped, f"{dropped} packets were not counted"
        return self._calls.copy()


def _port_of(program: int) -> int:
    """Return the port of an RPC program over TCP; 0 if there is none."""
    listed = subprocess.run(["rpcinfo", "-p"], capture_output=True, text=True, check=True).stdout
    found = [line.split() for line in listed.splitlines()[1:]]
    return next((int(port) for number, _, kind, port, *_ in found if (number, kind) == (str(program), "tcp")), 0)


def _take_only(packets: socket.socket, port: int) -> None:
    """Let a packet socket see only what goes to a port of TCP."""
    code = [(0x28, 0, 0, 22), (0x15, 0, 1, port), (0x6, 0, 0, 0xFFFF), (0x6, 0, 0, 0)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
    packets.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(code), ctypes.addressof(program)))


def _waiting(packets: socket.socket) -> Iterator[bytes]:
    """Yield the packets that came; each goes over the loopback device out and in, and counts as it comes in."""
    while True:
        try:
            packet, address = packets.recvfrom(1 << 16)
        except BlockingIOError:
            return
        if address[2] == PACKET_HOST:
            yield packet


def _lock_calls(packet: bytes) -> Iterator[str]:
    """Yield the names of the calls in a packet: head of IP, head of TCP, then records of RPC."""
    start = (packet[0] & 15) * 4
    record = packet[start + (packet[start + 12] >> 4) * 4 :]
    while len(record) >= 28:
        length, _, kind, _, program, _, procedure = struct.unpack(">7I", record[:28])
        if kind == 0 and program == NLM:
            yield NLM_CALLS.get(procedure, "NLM")
        record = record[4 + (length & 0x7FFFFFFF) :]


# -- which line asks -----------------------------------------------------------------------------------------------

#: A call, the function in C that made it, and the lines of the project that led there, the innermost first.
Cause = tuple[str, str, str]


@contextmanager
def traced(rpcs: Rpcs, project: Path) -> Iterator[Counter[Cause]]:
    """Attribute the RPCs of this process, meanwhile, to the lines that cause them.

    A profiler reads the counters at each call of Python. What the kernel sends later than the call that caused it (some
    CLOSE, some DELEGRETURN) is attributed to the next line.
    """
    causes: Counter[Cause] = Counter()
    last = rpcs.now()
    lock = threading.RLock()
    looking = False

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal last, looking
        with lock:
            if looking:
                return
            looking = True
            now = rpcs.now()
            if now != last:
                inner = frame.f_back if event == "call" else frame
                function = getattr(argument, "__name__", "") if event.startswith("c_") else ""
                where = " < ".join(_lines(inner, project))
                for call, count in (now - last).items():
                    causes[call, function, where] += count
                last = now
            looking = False

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield causes
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _lines(frame: FrameType | None, project: Path) -> Sequence[str]:
    """Return the lines of the project on a stack, the innermost first."""
    lines: list[str] = []
    while frame is not None and len(lines) < DEPTH:
        path = frame.f_code.co_filename
        if path.startswith(f"{project}/") and "/.venv/" not in path and path != __file__:
            lines.append(f"{path.removeprefix(f'{project}/')}:{frame.f_lineno}")
            if not path.startswith((f"{project}/dropq/", f"{project}/cli/")):
                break  # the case itself: what runs it says nothing
        frame = frame.f_back
    return lines
