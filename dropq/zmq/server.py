"""A queue for clients of PZQ: one process, one loop, three sockets.

Each round settles what consumers have said, stores what producers have sent, answers the monitor, and delivers, in this
order: so an ack makes room before a message is looked for. Nothing waits for one of them but the poll for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from dropq.api import Queue
from dropq.errors import ConfigError, Unavailable
from dropq.worker.loop import Stop
from dropq.zmq.consumers import Consumers
from dropq.zmq.keys import FOLDERS, Keys, is_private
from dropq.zmq.monitor import Monitor
from dropq.zmq.producers import Producers
from dropq.zmq.sockets import Network, Socket

log = logging.getLogger("dropq")

#: Seconds for which a message is a consumer's, where neither the server nor the queue says it: PZQ's default.
ACK_TIMEOUT = 5.0
#: Where PZQ's own monitor asks: bound beside the default address, unless another server has it.
PZQ_MONITOR = "ipc:///tmp/pzq-monitor"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How a queue is served.

    Attributes:
        receive, send, monitor: where producers, consumers and monitors connect: `tcp://HOST:PORT` or `ipc://PATH`.
        ack_timeout: for how long a message is a consumer's, in seconds; None takes the queue's lease_period, else 5 s.
        in_flight: how many messages may be out at once.
        hwm: how many messages of each producer may wait to be read, and for each consumer to be sent, beside those on
            the way.
        max_size: the most bytes of a message.
        keys: the folder of the keys of those who may connect; None lets in everybody who reaches the sockets.
        headers: whether a header in JSON says something of a message, both ways.
        insecure: let everybody in, also from elsewhere.
    """

    receive: str = "tcp://127.0.0.1:11131"
    send: str = "tcp://127.0.0.1:11132"
    monitor: str = "tcp://127.0.0.1:11133"
    ack_timeout: float | None = None
    in_flight: int = 100
    hwm: int = 10
    max_size: int = 64 << 20
    keys: str | None = None
    headers: bool = False
    insecure: bool = False


class Server:
    """Serves a queue until it is asked to stop.

    ConfigError if an address is open to others, and there are no usable keys; ValueError if it is no address.
    """

    def __init__(self, queue: Queue, terms: Terms) -> None:
        self._queue = queue
        self._terms = terms
        self._lease = terms.ack_timeout or queue.config.lease_period or ACK_TIMEOUT
        self._keys = None if terms.keys is None else Keys(terms.keys)
        self._rereads = False
        self._wake: Callable[[], object] = bool
        for name in FOLDERS:
            address = getattr(terms, name)
            if not is_private(address) and self._keys is None and not terms.insecure:
                raise ConfigError(
                    f"--{name} {address} is open to others, who could take and send messages: give --keys DIR, or "
                    "--insecure if everybody may"
                )

    def reread_keys(self) -> None:
        """Read the keys again; a signal handler may call this."""
        self._rereads = True
        self._wake()

    @contextmanager
    def opened(self) -> Iterator[dict[str, str]]:
        """Bind the sockets, and begin to receive; yield where each is bound. Unavailable: nothing was claimed."""
        network = self._network = Network()
        try:
            made = {name: self._made(name) for name in FOLDERS}
            bound = {name: network.bind(socket, getattr(self._terms, name)) for name, socket in made.items()}
            if self._terms.monitor == Terms.monitor:
                try:
                    network.bind(made["monitor"], PZQ_MONITOR)
                except Unavailable as error:
                    log.info("monitors have one address: %s", error)
            self._open(made)
            try:
                yield bound
            finally:
                self._producers.end()
                self._consumers.close()
        finally:
            network.close()

    def _made(self, name: str) -> Socket:
        """Return a socket; what consumers and monitors say has no body."""
        curve = None if self._keys is None else partial(self._keys.curve, name)
        most = self._terms.max_size if name == "receive" else 0
        return self._network.make(name, most=most, hwm=self._terms.hwm, curve=curve)

    def _open(self, made: dict[str, Socket]) -> None:
        terms, queue = self._terms, self._queue
        self._sockets = made
        own = queue.root.queue(queue.name)
        self._producers = Producers(made["receive"], own, max_size=terms.max_size, headers=terms.headers)
        self._consumers = Consumers(
            made["send"],
            queue,
            lease=self._lease,
            in_flight=terms.in_flight,
            max_size=terms.max_size,
            headers=terms.headers,
        )
        self._watch = self._consumers.watch
        self._wake = self._watch.wake
        counted = queue.root.queue(queue.name)
        self._monitor = Monitor(made["monitor"], counted, self._producers, self._consumers, self._watch.wake)
        self._consumers.open()

    def run(self, stop: Stop) -> None:
        """Serve until it is asked to stop, and what is out then is settled or over; asked twice, return at once."""
        send, receive, monitor = (self._sockets[name] for name in ("send", "receive", "monitor"))
        with stop.waking(self._watch.wake):
            while stop.times < 2 and not (stop.asked and not self._consumers.are_due):
                reads = self._producers.blocked_for is None and not stop.asked
                waits = send.ready or monitor.ready or (reads and receive.ready)
                # While no consumer takes anything, what comes into target/ is no news, and would be a round each time.
                self._network.watch(self._watch.waker if self._consumers.blocked else self._watch.fileno())
                news = self._network.poll(0 if waits else self._idle_for)
                if news:
                    self._consumers.attempt_again()
                if news is not False:  # before the look; where nothing happens, it watches the folder that is there now
                    self._watch.wait(0)
                self._consumers.settle(readable=bool(send.ready))
                self._producers.serve(reads=reads)
                self._network.flush()  # before the search for messages, which takes longer
                self._monitor.serve()
                if not stop.asked:
                    self._consumers.deliver()
                if self._rereads:
                    self._read_keys()

    @property
    def _idle_for(self) -> float:
        """Seconds until there is something to do without news."""
        blocked_for = self._producers.blocked_for
        return self._consumers.idle_for if blocked_for is None else min(self._consumers.idle_for, blocked_for)

    def _read_keys(self) -> None:
        """Read the keys again, and end the connections of those whose key is not there any more."""
        self._rereads = False
        if self._keys is not None:
            self._keys.read()
            log.warning("the keys were read again")
            for name, socket in self._sockets.items():
                for peer in list(socket.peers):
                    if peer.key and self._keys.name(name, peer.key) is None:
                        self._network.drop(peer, "its key was taken away")
