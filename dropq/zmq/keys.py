"""Who may speak to a server: from where, or, by CURVE, with which key.

CURVE alone lets in everybody who knows the server's public key. So each socket is a domain of its own that nobody
enters whom the authenticator does not let in, and the authenticator runs before any socket is bound.
"""

from __future__ import annotations

import os
import stat
from ipaddress import ip_address

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from dropq.errors import ConfigError
from dropq.storage import reading

#: The folder of the public keys of those who may use a socket, by the socket's name.
FOLDERS = {"receive": "producers", "send": "consumers", "monitor": "monitors"}
#: The file with the server's own keys.
SECRET = "server.key_secret"


def is_private(address: str) -> bool:
    """Return whether nobody reaches an address but users of this machine, or of a socket only its owner.

    Raises:
        ValueError: it is no address of a kind that a server can have.
    """
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
    try:
        found = os.stat(folder)
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


class Keys:
    """The keys of a server, and of those who may use its sockets.

    Args:
        folder: has `server.key_secret`, and folders `producers`, `consumers` and `monitors` of public keys.

    Raises:
        ConfigError: a file or a folder is missing, or others may read the secret.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._public, self._secret = self._own()
        self._check_folders()
        self._authenticator: ThreadAuthenticator | None = None

    def _own(self) -> tuple[bytes, bytes]:
        path = f"{self._folder}/{SECRET}"
        try:
            if os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"{path} can be read by others than its owner: run `chmod 600 {path}`")
            public, secret = zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: no key can be read: {error}; docs/zeromq.md says how to make one") from error
        if secret is None:
            raise ConfigError(f"{path} has no secret-key; docs/zeromq.md says how to make one")
        return public, secret

    def _check_folders(self) -> None:
        for folder in FOLDERS.values():
            path = f"{self._folder}/{folder}"
            if not reading.is_folder(path):
                raise ConfigError(f"{path} is no folder: it has the public keys of the {folder}, NAME.key each")

    def start(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Begin to let in those who have a key."""
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self.read()

    def read(self) -> None:
        """Read the public keys, also those that came since.

        Raises:
            ConfigError: a folder is missing; those who were let in before still are.
        """
        self._check_folders()
        if self._authenticator is not None:
            for socket, folder in FOLDERS.items():
                self._authenticator.configure_curve(domain=socket, location=f"{self._folder}/{folder}")

    def guard(self, name: str, socket: zmq.Socket[bytes]) -> None:
        """Let nobody use a socket but those whose key is in its folder."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, name.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def stop(self) -> None:
        """Let nobody in any more."""
        if self._authenticator is not None:
            self._authenticator.stop()
