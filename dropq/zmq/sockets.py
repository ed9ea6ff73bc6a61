"""The three sockets of a server: how they are bound, and how whole messages are read from them without waiting."""

from __future__ import annotations

import os
import socket as sockets
import stat
from collections.abc import Sequence
from typing import TypeAlias

import zmq

from dropq.errors import Unavailable

Socket: TypeAlias = "zmq.Socket[bytes]"

#: Milliseconds for which what was sent may still leave a socket that is closed.
LINGER = 1000
#: Answers that may wait for one producer. A ROUTER drops what is beyond this, so it is more than any producer sends
#: before it reads; what is dropped is counted.
ANSWERS = 100_000
#: Milliseconds between two signs of life on a quiet connection to a consumer, and after which it counts as dead.
HEARTBEAT, HEARTBEAT_TIMEOUT = 5000, 15_000

#: The flags of each call, as plain numbers: to join those of pyzmq takes longer than the call.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _POLLOUT = int(zmq.EVENTS), int(zmq.POLLOUT)


def make(context: zmq.Context[Socket], name: str, *, hwm: int, max_size: int) -> Socket:
    """Return a socket that is not bound yet.

    Args:
        context: what it belongs to.
        name: receive, send or monitor.
        hwm: how many messages may wait here for each consumer, and of each producer, beside those on the way.
        max_size: the most bytes that a message may have. A frame of twice as many ends its connection; what is between
            can be answered.
    """
    made = context.socket(zmq.DEALER if name == "send" else zmq.ROUTER)
    made.setsockopt(zmq.LINGER, LINGER)
    made.setsockopt(zmq.MAXMSGSIZE, 2 * max_size)
    if name == "send":
        made.setsockopt(zmq.SNDHWM, hwm)
        made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT)
    else:
        made.setsockopt(zmq.ROUTER_MANDATORY, 1)
        made.setsockopt(zmq.RCVHWM, hwm + 1)  # with keys, the frame that names the peer counts, too
        made.setsockopt(zmq.SNDHWM, ANSWERS)
    return made


def bind(socket: Socket, address: str) -> str:
    """Bind a socket; return where it is bound, with the port that was chosen for `*`.

    Raises:
        Unavailable: something else is there, or the address cannot be bound.
    """
    before = os.umask(0o077)  # whoever may not enter the folder of an ipc socket may not use the socket either
    try:
        if address.startswith("ipc://") and not address.startswith("ipc://@"):
            _refuse_taken(address.removeprefix("ipc://"))
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.bind(address)
    except zmq.ZMQError as error:
        raise Unavailable(f"{address} cannot be bound: {error.strerror}") from error
    finally:
        os.umask(before)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _refuse_taken(path: str) -> None:
    """Refuse a path where something is: bind would remove it, also a socket that another server uses."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise Unavailable(f"ipc://{path} cannot be bound: {path} is there, and is no socket")
    except FileNotFoundError:
        return
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return  # left by a server that is dead
    raise Unavailable(f"ipc://{path} cannot be bound: another server uses it")


def received(socket: Socket) -> tuple[zmq.Frame, list[bytes]] | None:
    """Return the first frame of a message, and the others; None if none waits."""
    try:
        first = frame = socket.recv(_NOBLOCK, copy=False)
    except zmq.Again:
        return None
    frames = list[bytes]()
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame.bytes)
    return first, frames


def is_writable(socket: Socket) -> bool:
    """Return whether a peer takes another message now."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLOUT)


def sent(socket: Socket, frames: Sequence[bytes]) -> bool:
    """Send a message; return False if nobody takes it now. A large last frame is not copied."""
    last = len(frames) - 1
    try:
        for frame in frames[:last]:
            socket.send(frame, _MORE)
        socket.send(frames[last], _NOBLOCK, copy=len(frames[last]) < zmq.COPY_THRESHOLD)
    except zmq.Again:
        return False
    return True


def answered(socket: Socket, peer: bytes, frames: Sequence[bytes]) -> bool:
    """Answer a peer of a ROUTER; return False if it leaves too many answers unread. One that is gone needs none."""
    try:
        return sent(socket, [peer, *frames])
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
    return True


def name_of(peer: zmq.Frame) -> str:
    """Return where a message came from, and by which key, as far as its connection says so."""
    found = []
    for key in ("Peer-Address", "User-Id"):
        try:
            found.append(str(peer.get(key)))
        except (zmq.ZMQError, KeyError):  # an ipc socket has no address, a client without CURVE no key
            continue
    return " ".join(filter(None, found)) or "a local client"
