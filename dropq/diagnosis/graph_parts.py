"""What a graph is made of: nodes, where messages can be, and edges, by which they go from one to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: The kinds of nodes that are no queues: a missing queue, a route's folder, the return addresses of messages, a peer.
MISSING, FOLDER, ADDRESSES, PEER = "missing", "folder", "addresses", "peer"
#: The kinds of edges that dead letters take, what living workers make of messages, and what bridges of a peer take.
LETTERS, WORK, BRIDGE = "dead-letter", "work", "bridge"


@dataclass(frozen=True, slots=True)
class Node:
    """Where messages can be.

    Attributes:
        name: the address of a queue, topic or subscription; the path of a route's folder; "" for the return addresses
            that messages name themselves.
        kind: queue, topic, subscription, view; missing, folder, addresses or peer.
        counts: how many messages lie in each state, as `Queue.counts` says; of a folder, in target; empty where that is
            not known.
        stuck: why messages do not go on from there.
        in_transit: how many messages are on their way to each queue on another file system, as `Queue.in_transit` says.
        self_destruct: whether the queue destroys itself when it has no selector and no named subscription any more.
        destroyed_in: in how many seconds a sweep may destroy it, if the last sweep found neither; else None.
    """

    name: str
    kind: str
    counts: Mapping[str, int] = field(default_factory=dict)
    stuck: tuple[str, ...] = ()
    in_transit: Mapping[str, int] = field(default_factory=dict)
    self_destruct: bool = False
    destroyed_in: float | None = None


@dataclass(frozen=True, slots=True)
class Edge:
    """How messages go from one node to another.

    Attributes:
        source: the name of the node that they leave.
        to: the name of the node that they go to.
        kind: move, copy or bounce, by a selector; route; subscription or view, of a topic; dead-letter; work, as
            living workers say; bridge, of a queue that a peer shares.
        name: the name of the selector or the route; "" of any other.
        filter: which messages take it; None for all, and for a route.
        role: of a selector, when it is asked: normal, default or overflow; else "".
        granted: how many credits a selector has; None if it spends no credits.
        free: how many of them it may still spend.
        stuck: why messages do not take it; "" if they do, or if no message waits for it.
    """

    source: str
    to: str
    kind: str
    name: str = ""
    filter: str | None = None
    role: str = ""
    granted: int | None = None
    free: int | None = None
    stuck: str = ""
