"""The three sockets of a server, as ZeroMQ's peers see them, and everything that bounds what these peers take of us.

docs/design.md says why they are not libzmq's. Invariant: a connection has at most `ALLOWANCE` bytes of memory here;
what needs more of it comes from one pool for all, but for one message at a time, and where the pool is empty,
connections are not read. Nothing is dropped: a peer that leaves unread what it was sent is not read either.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import selectors
import socket as sockets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dropq.errors import Unavailable
from dropq.storage.files import remove_dead_socket
from dropq.zmq import wire
from dropq.zmq.curve import Broken, Curve
from dropq.zmq.zmtp import CHUNK, ID, REST, Conversation, Got

log = logging.getLogger("dropq")

#: Seconds in which a peer has to say who it is; for which it may stop in a message while others wait for memory, and be
#: at one; for which what was sent may still leave a socket that is closed; in which the log reports the same once.
HANDSHAKE, STALL, LONGEST, LINGER, LOG_EVERY = 5.0, 10.0, 60.0, 1.0, 5.0
#: Seconds between two signs of life on a quiet connection to a consumer, and after which it counts as dead.
HEARTBEAT, HEARTBEAT_TIMEOUT = 5.0, 15.0
#: Seconds of silence after which the kernel asks whether a peer's machine is there; between two tries; and tries.
KEEPALIVE = (30, 10, 3)
#: Bytes of memory for each connection, for all together beside that, and that a peer may leave unread.
ALLOWANCE, POOL, UNREAD = 64 << 10, 64 << 20, 256 << 10
#: Connections that may wait to be accepted, and that are accepted in one round; seconds of a round for other events.
BACKLOG, ACCEPTED, ROUND = 1024, 64, 0.1
#: Seconds after which another thread reads and writes while the one that serves is away.
AWAY = 0.25
#: A share of the process's descriptors is not for connections, and at least so many.
SHARE, KEPT = 4, 48

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Peer:
    """A connection, with the public key by which it was let in; b"" without CURVE."""

    def __init__(self, socket: Socket, connection: sockets.socket, address: str) -> None:
        self.socket = socket
        self.connection = connection
        self.address = address
        self.curve = socket.curve and socket.curve()
        self.talk = Conversation(socket.type, most=socket.most, frames=wire.MOST_FRAMES + 3, curve=self.curve)
        self.got: Got | None = None
        self.out = deque[bytes | memoryview]()
        self.unsent = self.written = 0  # bytes of these, and of all that were sent before
        self.ends = deque[int]()  # where each delivery ends, in all these bytes
        self.taken = 0  # of the pool
        self.moved = self.heard = time.monotonic()  # when bytes came or went, and when they came
        self.begun = self.moved  # when its present message began
        self.asked_at = 0.0  # when it was asked for a sign of life, and has said nothing since
        self.mask = 0  # what the selector looks for
        self.has_ended = False
        self.is_paused = False  # it has said more, which is read once it has read what it was answered
        self.turn = 0  # bytes that may still be read of it in this round, where more may have come

    @property
    def key(self) -> bytes:
        """The public key by which it was let in."""
        return b"" if self.curve is None else self.curve.key

    @property
    def identity(self) -> tuple[bytes, bytes]:
        """What it calls itself, beside its key: nobody gets the answers of another key."""
        return self.key, self.talk.identity

    @property
    def size(self) -> int:
        """The bytes that are kept for it."""
        return self.talk.size + self.unsent + (self.got.size if self.got is not None else 0)

    @property
    def takes(self) -> bool:
        """Whether another delivery may wait here for it."""
        return not self.has_ended and self.talk.is_open and len(self.ends) < self.socket.hwm and self.unsent <= UNREAD


class Socket:
    """One of the sockets receive, send and monitor.

    A body has at most `most` bytes; at most `hwm` messages wait here for each consumer; `curve` makes the server's side
    of a handshake, and None lets in everybody.
    """

    def __init__(self, network: Network, name: str, *, most: int, hwm: int, curve: Callable[[], Curve] | None) -> None:
        self.network = network
        self.name = name
        self.type = b"DEALER" if name == "send" else b"ROUTER"
        self.most = most + ID  # what a message says of itself has room beside its body
        self.hwm = hwm
        self.curve = curve
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most_peers = max((limit - max(limit // SHARE, KEPT)) // 3, 1)
        self.peers = dict[Peer, None]()
        self.named = dict[tuple[bytes, bytes], Peer]()
        self.ready = OrderedDict[Peer, None]()  # have a message for us
        self.takers = OrderedDict[Peer, None]()  # take one from us
        self.listeners = list[sockets.socket]()
        self.accepts = False
        self.used = 0  # of the pool
        self.waiting = dict[Peer, None]()  # for memory
        self.beyond: Peer | None = None  # who has memory beyond the pool
        self.is_behind = False  # whether more may have come than was read


class Network:
    """All sockets of a server, for the thread that serves.

    While that thread is away for longer than `AWAY`, as a slow disk lets it be, another one reads and writes for it, so
    that clients with signs of life see that the server lives.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._sockets = list[Socket]()
        self._new = dict[Peer, float]()  # who is not let in yet, and until when it may try
        self._unflushed = dict[Peer, None]()
        self._ticks_at = 0.0
        self._logs_at = dict[str, float]()
        self._later = list[tuple[selectors.SelectorKey, int]]()
        self._paths = dict[str, int]()
        self._watched: int | None = None
        #: Is held by who reads, writes, or looks for who takes a message.
        self.lock = threading.RLock()
        self._left_at: float | None = time.monotonic()  # when the thread that serves went away
        self._closed = threading.Event()
        self._deputy = threading.Thread(target=self._stand_in, name="dropq-zmq-network", daemon=True)
        self._deputy.start()

    # -- sockets ---------------------------------------------------------------------------------------------------

    def make(self, name: str, *, most: int, hwm: int, curve: Callable[[], Curve] | None = None) -> Socket:
        """Return a socket that is not bound yet; the arguments are those of `Socket`."""
        made = Socket(self, name, most=most, hwm=hwm, curve=curve)
        self._sockets.append(made)
        return made

    def bind(self, socket: Socket, address: str) -> str:
        """Bind a socket, also to a second address; return where, with the port chosen for `*`, or raise Unavailable."""
        scheme, _, where = address.partition("://")
        before = os.umask(0o177)  # nobody else may use an ipc socket
        try:
            listener = _local(where) if scheme == "ipc" else _tcp(where)
            listener.listen(BACKLOG)
        except OSError as error:
            raise Unavailable(f"{address} cannot be bound: {error.strerror or error}") from error
        finally:
            os.umask(before)
        listener.setblocking(False)
        if scheme == "ipc":
            bound = address
            if not where.startswith("@"):
                self._paths[where] = os.lstat(where).st_ino
        else:
            host, port = listener.getsockname()[:2]
            bound = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        with self.lock:
            socket.listeners.append(listener)
            if socket.accepts:
                self._selector.register(listener, _READ, socket)
            self._accept_more(socket)
        return bound

    def watch(self, fd: int) -> None:
        """Let `poll` return when a descriptor of others can be read, and no longer when the one before can."""
        if fd != self._watched:
            if self._watched is not None:
                self._selector.unregister(self._watched)
            self._selector.register(fd, _READ)
            self._watched = fd

    def close(self) -> None:
        """Let what was sent leave, and close all."""
        self._closed.set()
        self._deputy.join()
        self.flush()
        until = time.monotonic() + LINGER
        peers = [peer for socket in self._sockets for peer in socket.peers if not peer.has_ended]
        for socket in self._sockets:
            while socket.listeners:
                socket.listeners.pop().close()
        for peer in peers:
            while peer.unsent and not peer.has_ended and (rest := until - time.monotonic()) > 0:
                peer.connection.settimeout(rest)
                self._write(peer)
            with suppress(OSError):
                peer.connection.shutdown(sockets.SHUT_WR)
            peer.connection.close()
        self._selector.close()
        for path, inode in self._paths.items():
            with suppress(FileNotFoundError):
                if os.lstat(path).st_ino == inode:
                    os.unlink(path)

    # -- rounds ----------------------------------------------------------------------------------------------------

    def poll(self, seconds: float) -> bool | None:
        """Send and read what can be, else wait; return whether a watched descriptor can be read, None for no event."""
        with self.lock:
            self.flush()
            self._left_at = None
        ready = self._selector.select(0 if self._later else max(seconds, 0))
        with self.lock:
            self._left_at = time.monotonic()
            return self._round(ready)

    def _stand_in(self) -> None:
        while not self._closed.wait(AWAY):
            with self.lock:
                if self._left_at is not None and time.monotonic() - self._left_at > AWAY:
                    self._round(self._selector.select(0))
                    self.flush()

    def _round(self, ready: list[tuple[selectors.SelectorKey, int]]) -> bool | None:
        """Serve who is ready, at most for as long as a round is, and do what is due each second."""
        ready, self._later = self._in_turn(ready), []
        is_news = False
        ends = time.monotonic() + ROUND
        for socket in self._sockets:
            socket.is_behind = False
        for at, (key, mask) in enumerate(ready):
            if key.data is None:
                is_news = True
            elif isinstance(key.data, Socket):
                self._accept(key.data, key.fileobj)
            else:
                self._serve(key.data, mask)
            if time.monotonic() > ends:  # the rest first, before those that are quick come again
                self._later = [(key, mask) for key, mask in ready[at + 1 :] if isinstance(key.data, Peer)]
                is_news |= any(key.data is None for key, _ in ready[at + 1 :])
                for socket in self._sockets:
                    socket.is_behind = True
                break
        now = time.monotonic()
        if now >= self._ticks_at:
            self._ticks_at = now + 1
            self._tick(now)
        for socket in self._sockets:
            if socket.waiting and (socket.used < POOL or socket.beyond is None):
                waiting, socket.waiting = socket.waiting, {}
                for peer in waiting:
                    self._settle(peer)
        return is_news if ready else None

    def _in_turn(self, ready: list[tuple[selectors.SelectorKey, int]]) -> list[tuple[selectors.SelectorKey, int]]:
        """Return who is ready, with those first who had no turn in the round before; nobody has two turns."""
        if not self._later:
            return ready
        without_turn = self._without_turn
        peers = [(key, mask) for key, mask in ready if isinstance(key.data, Peer) and key.data not in without_turn]
        return [(key, mask) for key, mask in ready if not isinstance(key.data, Peer)] + self._later + peers

    @property
    def _without_turn(self) -> set[Peer]:
        """Who is ready and had no turn yet."""
        return {key.data for key, _ in self._later}

    def flush(self) -> None:
        """Send what was answered, as far as it goes without waiting."""
        with self.lock:
            unflushed, self._unflushed = self._unflushed, {}
            for peer in unflushed:
                if not peer.has_ended:
                    self._write(peer)
                    self._settle(peer)

    def drop(self, peer: Peer, why: str = "") -> None:
        """End a connection; what had come of it whole can still be taken, unless there is a reason."""
        with self.lock:
            socket = peer.socket
            if why:
                peer.got, peer.is_paused = None, False
                self.log(f"{socket.name}-dropped", "%s: a connection of %s ends: %s", socket.name, name_of(peer), why)
            if not peer.has_ended:
                peer.has_ended = True
                self._look_for(peer, 0)
                peer.connection.close()
                peer.out.clear()
                peer.unsent = peer.turn = 0
                for known in (self._new, socket.waiting):
                    known.pop(peer, None)
                if socket.named.get(peer.identity) is peer:
                    del socket.named[peer.identity]
                socket.takers.pop(peer, None)
            self._go_on(peer)
            if peer.got is None:  # until then its message takes the place of a connection
                socket.ready.pop(peer, None)
                socket.peers.pop(peer, None)
                self._accept_more(socket)
            self._settle(peer)

    def log(self, what: str, text: str, *values: object) -> bool:
        """Log a warning, unless one of its kind was logged a moment ago; return whether it did."""
        now = time.monotonic()
        if now < self._logs_at.get(what, 0.0):
            return False
        self._logs_at[what] = now + LOG_EVERY
        log.warning(text, *values)
        return True

    def _tick(self, now: float) -> None:
        without_turn = self._without_turn  # what they have said was not read yet
        for peer, until in list(self._new.items()):
            if until > now:
                break
            if peer not in without_turn:
                self.drop(peer, f"it did not say who it is within {HANDSHAKE:.0f} s")
        for socket in self._sockets:
            self._accept_more(socket)
            is_short = socket.waiting or (socket.name == "send" and socket.used >= POOL)
            for peer in [peer for peer in socket.peers if peer not in without_turn]:
                stops = is_short and peer.taken and peer not in socket.waiting and peer.got is None
                if stops and (now - peer.moved > STALL or (socket.name != "send" and now - peer.begun > LONGEST)):
                    self.drop(peer, f"it is slow with a message, of {peer.taken >> 10} KiB that others wait for")
                elif socket.name == "send" and peer.talk.is_open and peer.talk.has_pings and not peer.has_ended:
                    self._ask(peer, now)

    def _ask(self, peer: Peer, now: float) -> None:
        if peer.asked_at and now - peer.asked_at >= HEARTBEAT_TIMEOUT:
            self.drop(peer, f"it gave no sign of life for {HEARTBEAT_TIMEOUT:.0f} s")
        elif not peer.asked_at and now - peer.heard >= HEARTBEAT:
            peer.asked_at = now
            self._send(peer, peer.talk.ping())

    # -- connections -----------------------------------------------------------------------------------------------

    def _accept(self, socket: Socket, listener: Any) -> None:
        for _ in range(ACCEPTED if socket.accepts else 0):
            if len(socket.peers) >= socket.most_peers:
                return self._accept_no_more(socket, f"it has {len(socket.peers)} connections")
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    continue  # it has gone already
                return self._accept_no_more(socket, str(error.strerror))
            try:
                self._begin(socket, connection, address)
            except OSError:
                connection.close()  # it has gone already
        return None

    def _begin(self, socket: Socket, connection: sockets.socket, address: Any) -> None:
        connection.setblocking(False)
        where = "a local client"
        if connection.family != sockets.AF_UNIX:
            where = str(address[0])
            idle, interval, tries = KEEPALIVE
            connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
            connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
            connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, interval)
            connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, tries)
            if hasattr(sockets, "TCP_USER_TIMEOUT"):
                connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, idle)
                connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, 1000 * (idle + interval * tries))
        peer = Peer(socket, connection, where)
        socket.peers[peer] = None
        self._new[peer] = time.monotonic() + HANDSHAKE
        self._say(peer)
        self._write(peer)
        self._settle(peer)

    def _accept_no_more(self, socket: Socket, why: str) -> None:
        socket.accepts = False
        for listener in socket.listeners:
            self._selector.unregister(listener)
        self.log(f"{socket.name}-full", "%s: others wait for a connection: %s", socket.name, why)

    def _accept_more(self, socket: Socket) -> None:
        if not socket.accepts and len(socket.peers) < socket.most_peers:
            socket.accepts = True
            for listener in socket.listeners:
                self._selector.register(listener, _READ, socket)

    def _serve(self, peer: Peer, mask: int) -> None:
        """Write to a peer, and read from it, or look no more for what it says until that may be read."""
        if peer.has_ended:
            return
        if mask & _WRITE:
            self._write(peer)
        if mask & _READ and not peer.has_ended:
            if self._may_read(peer):
                peer.turn = REST
                self._read(peer)
            else:
                self._look_for(peer, peer.mask & ~_READ)
                peer.socket.is_behind = True
        self._settle(peer)

    def _may_read(self, peer: Peer) -> bool:
        """Return whether a peer may say more; if it has to wait for memory, note that."""
        socket = peer.socket
        if peer.got is not None or peer.is_paused or peer.unsent > UNREAD or peer in socket.waiting:
            return False
        if peer.size < ALLOWANCE or socket.used < POOL or socket.beyond is peer:
            return True
        if socket.beyond is None:
            socket.beyond = peer
            return True
        socket.waiting[peer] = None
        return False

    def _read(self, peer: Peer) -> None:
        turn, peer.turn = peer.turn, 0
        try:
            data = peer.connection.recv(peer.talk.wants)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop(peer)
            return
        if len(data) >= CHUNK:
            peer.turn = turn - len(data)
            peer.socket.is_behind = True
        peer.heard = time.monotonic()
        if peer.talk.is_between:
            peer.begun = peer.heard
        peer.asked_at = 0.0
        if peer.socket.name != "send":  # there it is what we say that takes memory
            peer.moved = peer.heard
        peer.talk.feed(data)
        self._advance(peer)

    def _advance(self, peer: Peer) -> None:
        """Look for the next message of a peer in what it has said."""
        was_open = peer.talk.is_open
        try:
            peer.got = peer.talk.next()
        except Broken as error:
            self.drop(peer, str(error))
            return
        if peer.talk.is_open and not was_open:
            self._new.pop(peer, None)
            if peer.talk.identity:
                peer.socket.named[peer.identity] = peer
        if peer.talk.out:
            self._say(peer)
        if peer.got is not None:
            peer.socket.ready[peer] = None

    def _go_on(self, peer: Peer) -> None:
        """Look for the next message of a peer, unless it has to read first."""
        if peer.is_paused and peer.unsent <= UNREAD:
            peer.is_paused = False
            self._advance(peer)

    def _say(self, peer: Peer) -> None:
        """Send what the protocol has to say."""
        said, peer.talk.out = peer.talk.out, []
        self._send(peer, said)

    def _send(self, peer: Peer, pieces: Sequence[bytes]) -> None:
        if not peer.has_ended:
            peer.out.extend(filter(None, pieces))
            peer.unsent += sum(map(len, pieces))
            self._unflushed[peer] = None

    def _write(self, peer: Peer) -> None:
        while peer.out:
            pieces = [peer.out[at] for at in range(min(len(peer.out), 64))]
            try:
                count = peer.connection.sendmsg(pieces)
            except (BlockingIOError, TimeoutError):
                return
            except OSError:
                self.drop(peer)
                return
            peer.unsent -= count
            peer.written += count
            peer.moved = time.monotonic()
            while count:
                piece = peer.out.popleft()
                if count < len(piece):
                    peer.out.appendleft(memoryview(piece)[count:])
                    break
                count -= len(piece)
        while peer.ends and peer.ends[0] <= peer.written:
            peer.ends.popleft()

    def _settle(self, peer: Peer) -> None:
        """Count the memory of a peer, and look for what it may do next."""
        socket = peer.socket
        self._go_on(peer)
        taken = 0 if peer.has_ended and peer.got is None else max(peer.size - ALLOWANCE, 0)
        socket.used += taken - peer.taken
        peer.taken = taken
        if socket.beyond is peer and not taken:
            socket.beyond = None
        if peer.has_ended:
            return
        # Where it may not say more now, it is looked for until it does: most often its message is taken before that.
        reads = peer.got is None and peer.unsent <= UNREAD and peer not in socket.waiting
        self._look_for(peer, peer.mask & _READ | (_READ if reads else 0) | (_WRITE if peer.out else 0))
        if socket.name == "send" and peer not in socket.takers and peer.takes:
            socket.takers[peer] = None

    def _look_for(self, peer: Peer, mask: int) -> None:
        if mask == peer.mask:
            return
        if not peer.mask:
            self._selector.register(peer.connection, mask, peer)
        elif mask:
            self._selector.modify(peer.connection, mask, peer)
        else:
            self._selector.unregister(peer.connection)
        peer.mask = mask

    # -- messages --------------------------------------------------------------------------------------------------

    def take(self, socket: Socket) -> tuple[Peer, Got] | None:
        """Return a peer, and a message that it sent; None if none waits. Peers take turns."""
        with self.lock:
            while socket.ready:
                peer, _ = socket.ready.popitem(last=False)
                if (got := peer.got) is not None:
                    peer.got, peer.is_paused = None, True
                    self._go_on(peer)
                    # What has come already shares a sync with this, but for those who had no turn yet.
                    while peer.got is None and peer.turn > 0 and not self._later and self._may_read(peer):
                        self._read(peer)
                    if peer.has_ended:
                        self.drop(peer)
                    self._settle(peer)
                    return peer, got
        return None

    def give(self, peer: Peer, frames: Sequence[bytes]) -> None:
        """Send a message to a peer, at the next `flush`."""
        with self.lock:
            self._send(peer, peer.talk.encoded(frames))


def received(socket: Socket) -> tuple[Peer, Got] | None:
    """Do `take` on the network of a socket."""
    return socket.network.take(socket)


def is_writable(socket: Socket) -> bool:
    """Return whether a peer takes another message now."""
    with socket.network.lock:
        if not _has_takers(socket):
            socket.network.flush()  # who has taken what was on its way takes more
        return _has_takers(socket) and socket.used < POOL


def _has_takers(socket: Socket) -> bool:
    while socket.takers and not next(iter(socket.takers)).takes:
        socket.takers.popitem(last=False)
    return bool(socket.takers)


def sent(socket: Socket, frames: Sequence[bytes]) -> bool:
    """Send a message to the peer whose turn it is, at the next `flush`; return False if nobody takes it now."""
    with socket.network.lock:  # nobody else ends a connection meanwhile
        if not is_writable(socket):
            return False
        peer, _ = socket.takers.popitem(last=False)
        socket.network.give(peer, frames)
        peer.ends.append(peer.written + peer.unsent)
        if peer.takes:
            socket.takers[peer] = None
    return True


def answered(peer: Peer, frames: Sequence[bytes]) -> None:
    """Answer a peer; if it has gone, the one who came since with its identity and its key, if any."""
    if peer.has_ended:
        peer = peer.socket.named.get(peer.identity, peer)
    peer.socket.network.give(peer, frames)


def name_of(peer: Peer) -> str:
    """Return where a message came from, and by which key, once it is known."""
    return f"{peer.address} {peer.curve.name}".rstrip() if peer.curve is not None else peer.address


def _tcp(where: str) -> sockets.socket:
    """Return a socket that is bound to HOST:PORT."""
    host, _, port = where.rpartition(":")
    asked = None if host == "*" else host.strip("[]")
    family = sockets.AF_INET6 if "[" in host else sockets.AF_INET
    found = sockets.getaddrinfo(
        asked, 0 if port == "*" else int(port), family, sockets.SOCK_STREAM, 0, sockets.AI_PASSIVE
    )
    listener = sockets.socket(*found[0][:3])
    listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
    listener.bind(found[0][4])
    return listener


def _local(path: str) -> sockets.socket:
    """Return a socket that is bound to a path; what a dead server left there is removed."""
    is_abstract = path.startswith("@")
    if not is_abstract:
        remove_dead_socket(path)
    listener = sockets.socket(sockets.AF_UNIX)
    listener.bind("\0" + path[1:] if is_abstract else path)
    return listener
