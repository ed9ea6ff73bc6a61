"""What is wrong between a root and its peers: looked at in a process of its own, as a mount that hangs lets none go.

Run as a module, it examines one peer, and prints what it found as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from dropq.carrier.bridge import disagreements, opened_peer, shared_queues
from dropq.config.schema import Peer
from dropq.errors import ConfigError, DropqError
from dropq.lifecycle.context import RootContext
from dropq.lifecycle.open_queue import open_queue, open_root
from dropq.storage.failures import describe
from dropq.storage.mounts import mount_of

#: Seconds that a peer may take to answer.
PATIENCE = 5.0


def examined(root: RootContext) -> Iterator[tuple[str, str, str]]:
    """Yield what is found at each peer of a root: its kind, the peer's path, and what was found there."""
    for peer in root.config.peer:
        command = [sys.executable, "-m", "dropq.diagnosis.peers", root.layout.path, *peer]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            said = process.communicate(timeout=PATIENCE)[0]
            found = json.loads(said)
        except subprocess.TimeoutExpired:
            process.kill()  # it is not waited for: it may hang as long as the mount does
            found = [["peer-away", f"peer {peer.name} does not answer for {PATIENCE:.0f} s"]]
        except ValueError:
            found = [["peer-away", f"peer {peer.name} could not be examined"]]
        for kind, text in found:
            yield kind, peer.root, text


def _found(root: RootContext, peer: Peer) -> Iterator[tuple[str, str]]:
    try:
        there = opened_peer(root, peer)
    except ConfigError as error:
        yield "peer-differs", str(error)
        return
    except (DropqError, OSError) as error:
        yield "peer-away", describe(error)
        return
    names = list[str]()
    for own in shared_queues(root):
        names.append(name := own.name)
        try:
            theirs = open_queue(there, name)
        except (DropqError, OSError) as error:
            yield "peer-differs", describe(error)
            continue
        yield from (("peer-differs", f"queue {name}: {wrong}") for wrong in disagreements(own, theirs))
        if own.config.durability != theirs.config.durability:
            said = f"durability is {own.config.durability!r} here, and {theirs.config.durability!r} there"
            yield "peer-unsynced", f"queue {name}: {said}"
    mount = mount_of(peer.root)
    if mount is not None and mount.kind == "fuse.sshfs":
        yield "peer-unsynced", f"peer {peer.name} is mounted by sshfs, which syncs no folder"
    yield "peer", f"peer {peer.name} answers, and names this root; shared queues: {', '.join(names) or 'none'}"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(list(_found(open_root(sys.argv[1], None), Peer(*sys.argv[2:])))))
