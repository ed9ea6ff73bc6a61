"""`dropq bridge`: take from other roots what consumers of this one want."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from dropq.config.schema import Peer
from dropq.errors import ConfigError

from . import output
from .options import QueueNames, option
from .output import NEGATIVE, OK
from .shell import Shell, UsageError, despite_closed_stdout

if TYPE_CHECKING:
    from dropq.worker.loop import Stop

#: The columns of what came.
COLUMNS = ("queue", "peer", "taken")
#: Seconds between two checks of the processes of several peers; until one that ended is begun again; and for which they
#: are waited for at the end.
CHECK, BEGIN_AGAIN, PATIENCE = 0.2, 10.0, 5.0


def bridge(
    ctx: typer.Context,
    names: QueueNames = None,
    once: Annotated[bool, option("--once", "End after one pass.")] = False,
    peers: Annotated[
        list[str] | None,
        option("--peer NAME=PATH", "Serve only this peer, and find it at this path; may be repeated."),
    ] = None,
    recall: Annotated[str | None, option("--recall PEER", "Bring back what is on its way to this peer.")] = None,
    proxied: Annotated[
        bool, option("--proxied", "With --recall: also where the peer does not answer; what it has comes twice.")
    ] = False,
) -> int:
    """Take from other roots what consumers of this one want.

    dropq.toml names the other roots as [[peer]], and queue.toml which queues they share, as docs/several-roots.md says.
    Without QUEUE it serves all queues that several roots share. Each peer is served by a process of its own, so that
    one whose disk hangs keeps no other waiting. With --peer it serves only those that are named.

    It runs until a SIGTERM, SIGHUP or Ctrl-C, and then prints how many messages came. --once exits with 75 when a peer
    does not answer, or a queue is paused or full, and with 78 when two roots disagree.
    """
    from dropq.carrier.bridge import shared_queues

    if proxied and recall is None:
        raise UsageError("--proxied goes with --recall PEER")
    if proxied and peers:
        raise UsageError("--proxied asks no peer: leave --peer out")
    if once and recall is not None:
        raise UsageError("give --once or --recall, not both")
    shell = Shell(ctx)
    chosen = list(map(output.unescape, names or ()))
    known = [] if proxied else _peers(shell, peers or ())
    if chosen and recall is None:
        shared_queues(shell.root.context, chosen)  # what is wrong here is reported once
    return _serve(shell, chosen, known, once=once, recall=recall, proxied=proxied)


def _serve(
    shell: Shell, names: Sequence[str], known: Sequence[Peer], *, once: bool, recall: str | None, proxied: bool
) -> int:
    from dropq.carrier.bridge import Bridge, end_rows
    from dropq.carrier.bridge import recall as recalled
    from dropq.worker.loop import Stop, stop_on_signals

    if recall is not None:
        context, peers = shell.root.context, [peer for peer in known if peer.name == recall]
        if not peers and not proxied:
            raise ConfigError(f"{shell.root.layout.config_file} names no peer {recall}: --proxied needs none")
        back = end_rows(context, recall, names) if proxied else recalled(context, peers[0], names)
        output.note(f"recalled={back}")
        return OK
    with despite_closed_stdout(), stop_on_signals(Stop()) as stop:
        if len(known) > 1:
            return _serve_apart(shell, names, known, stop, once=once)
        served = Bridge(shell.root.context, known[0], names)
        try:
            served.once(stop.wait) if once else served.run(stop.wait)
        finally:
            records = (
                {"queue": name, "peer": known[0].name, "taken": count}
                for name, count in sorted(served.taken.items())
                if count
            )
            shell.show(records, COLUMNS)
            output.flush()
            output.note(f"taken={served.taken.total()}")
    return OK


def _peers(shell: Shell, given: Sequence[str]) -> list[Peer]:
    """Return the peers to serve: those of dropq.toml, or those of them that are named, at the paths that are given."""
    config, file = shell.root.context.config, shell.root.layout.config_file
    if not config.peer:
        raise ConfigError(f"{file} names no other root: write instance, and a [[peer]] with its name and root")
    if not given:
        return list(config.peer)
    found = []
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise typer.BadParameter(f"{text!r} is no NAME=PATH", param_hint="'--peer'")
        if name not in {peer.name for peer in config.peer}:
            raise ConfigError(f"{file} names no peer {name}: write a [[peer]] with its name and root")
        found.append(Peer(name, os.path.abspath(path)))
    return found


def _serve_apart(shell: Shell, names: Sequence[str], peers: Sequence[Peer], stop: Stop, *, once: bool) -> int:
    """Serve each peer by a process of its own, until all have ended, or a signal came; return their code, or 1."""

    before = ["--root", str(shell.root.path), *["--json"] * shell.json]
    command = [sys.executable, "-m", "dropq", *before, "bridge", *["--once"] * once]
    behind = ["--", *map(output.escape, names)]

    def begin(peer: Peer) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, "--peer", f"{peer.name}={peer.root}", *behind], stdin=subprocess.DEVNULL)

    running = {peer: begin(peer) for peer in peers}
    codes: dict[Peer, int] = {}
    while running and not stop.wait(CHECK):
        for peer, process in list(running.items()):
            if (code := process.poll()) is not None:
                codes[peer] = code
                del running[peer]
                if not once:
                    output.note(f"the bridge to {quote(peer.name)} ended with {code}; it begins again")
                    if not stop.wait(BEGIN_AGAIN):
                        running[peer] = begin(peer)
    for process in running.values():
        process.terminate()
    for peer, process in running.items():
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            output.note(f"the bridge to {quote(peer.name)} does not end: its disk may hang; it is left")
            process.kill()
    failed = {max(code, NEGATIVE) for code in codes.values() if code}  # a negative code is the signal that ended it
    return output.verdict([*failed]) if once else OK
