"""Who may speak to a server: from where, or, by CURVE, with which key.

A key is a file in the folder of a socket. Invariant: after each reading nobody comes in, or stays, whose file is not
there, or cannot be read.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
from ipaddress import ip_address

import zmq.auth
from zmq.utils import z85

from dropq.errors import ConfigError
from dropq.storage import reading
from dropq.zmq.curve import Curve, check

log = logging.getLogger("dropq")

#: The folder of the public keys of those who may use a socket, by the socket's name.
FOLDERS = {"receive": "producers", "send": "consumers", "monitor": "monitors"}
#: Characters of a key in Z85.
Z85_KEY = 40
#: The file with the server's own keys.
SECRET = "server.key_secret"


def is_private(address: str) -> bool:
    """Return whether only users of this machine, or a socket's owner, reach an address; ValueError for another kind."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return not rest.startswith("@") and _is_closed(os.path.dirname(rest) or ".")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port == "*" or (port.isdecimal() and int(port) < 1 << 16)):
        raise ValueError(f"{address!r} is no address: tcp://HOST:PORT and ipc://PATH are allowed")
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_closed(folder: str) -> bool:
    """Return whether nobody else puts a socket of his own into the place of one there, which is 0600 itself."""
    try:
        found = os.stat(folder)
    except OSError:
        return False
    is_own = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return is_own or bool(found.st_mode & stat.S_ISVTX)


class Keys:
    """The keys of a server, and of those who may use its sockets; ConfigError if they cannot be used.

    The folder has `server.key_secret`, and folders `producers`, `consumers` and `monitors` of public keys.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._public, self._secret = self._own()
        self._names = dict[str, dict[bytes, str]]()
        for name in FOLDERS.values():
            if not reading.is_folder(path := f"{folder}/{name}"):
                raise ConfigError(f"{path} is no folder: it has the public keys of the {name}, NAME.key each")
        self.read()

    def _own(self) -> tuple[bytes, bytes]:
        path = f"{self._folder}/{SECRET}"
        try:
            if os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"{path} can be read by others than its owner: run `chmod 600 {path}`")
            public, secret = _keys_in(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: no key can be read: {error}; docs/zeromq.md says how to make one") from error
        if secret is None or not check(public, secret):
            raise ConfigError(f"{path} has no secret-key of its public-key; docs/zeromq.md says how to make one")
        return public, secret

    def read(self) -> None:
        """Read the public keys; log what cannot be read, and let nobody in by it."""
        for socket, folder in FOLDERS.items():
            found = self._names[socket] = {}
            path = f"{self._folder}/{folder}"
            try:
                names = sorted(name for name in os.listdir(path) if name.endswith(".key"))
            except OSError as error:
                log.warning("%s: nobody is let in: %s", path, error.strerror)
                continue
            for name in names:
                try:
                    found[_keys_in(f"{path}/{name}")[0]] = name
                except (OSError, ValueError) as error:
                    log.warning("%s/%s is no public key, and lets nobody in: %s", path, name, error)

    def curve(self, socket: str) -> Curve:
        """Return what lets a client in to a socket, and says nothing to others."""
        return Curve(self._public, self._secret, lambda key: self.name(socket, key))

    def name(self, socket: str, key: bytes) -> str | None:
        """Return the name of the file of a key that a socket lets in; None if there is none."""
        return self._names[socket].get(key)


def _keys_in(path: str) -> tuple[bytes, bytes | None]:
    if not os.path.isfile(path):  # a fifo would hold us up
        raise ValueError("no file is there")
    try:
        public, secret = zmq.auth.load_certificate(path)
        return _raw(public), None if secret is None else _raw(secret)
    except (LookupError, struct.error) as error:
        raise ValueError(f"it is no Z85: {error}") from error


def _raw(key: bytes) -> bytes:
    if len(key) != Z85_KEY:
        raise ValueError(f"a key has {Z85_KEY} characters, and one here has {len(key)}")
    return z85.decode(key)
