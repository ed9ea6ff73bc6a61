"""The graph of a root: its queues are nodes, edges lead to where messages go from there; and what is stuck, and why.

A graph is a listing: it changes nothing, takes no lock, and was true when the folders were listed. A queue that cannot
be read is in it, with the reason.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from dropq.diagnosis.graph_parts import ADDRESSES, BRIDGE, FOLDER, LETTERS, MISSING, PEER, WORK, Edge, Node
from dropq.diagnosis.graph_svg import svg
from dropq.diagnosis.graph_text import dot, mermaid
from dropq.diagnosis.health import destroyed_in, queues
from dropq.diagnosis.selector_checks import may_have_letters
from dropq.diagnosis.work_checks import Workers, what_blocks
from dropq.errors import DropqError, NoSuchQueue
from dropq.format.addresses import layouts
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.decision import count_of
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.transfers import in_transit
from dropq.policies import routes
from dropq.policies.selectors import InUse
from dropq.policies.send_limits import SendLimits
from dropq.queue import browsing
from dropq.routing.forecast import Forecast, Whereabouts
from dropq.routing.registry import removed_in
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.topics.distribution import Distributor
from dropq.topics.receiver_topics import gets_from

#: How many waiting messages of a queue with selectors are looked at, from the first on.
LOOKED_AT = 100


@dataclass(frozen=True, slots=True)
class Graph:
    """The nodes of a root, queues first, by name; and the edges between them, by the nodes that they lead from."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def mermaid(self) -> str:
        """Return the graph as a flowchart of Mermaid."""
        return mermaid(self.nodes, self.edges)

    def dot(self) -> str:
        """Return the graph in the language of Graphviz."""
        return dot(self.nodes, self.edges)

    def svg(self) -> str:
        """Return the graph as an SVG: boxes in layers from left to right, an arrow for each edge."""
        return svg(self.nodes, self.edges)


def graph(root: RootContext) -> Graph:
    """Return the graph of a root, and change nothing; OSError if the root cannot be listed."""
    return _Listing(root).graph()


class _Listing:
    """One listing of a root."""

    def __init__(self, root: RootContext) -> None:
        self._root = root
        self._whereabouts = Whereabouts(root.layout)
        self._nodes: dict[str, Node] = {}
        self._edges: list[Edge] = []
        self._opened: dict[str, QueueContext] = {}
        self._in_transit: dict[str, dict[str, int]] = {}
        self._destroyed_in: dict[str, float | None] = {}

    def graph(self) -> Graph:
        """Look at each queue and the edges that begin there; make a node of any other place where an edge ends."""
        for name in queues(self._root):
            self._open(name)
        self._by_target = {os.path.realpath(each.layout.target): name for name, each in self._opened.items()}
        for name, context in self._opened.items():
            self._nodes[name] = self._node(name, context)
        for edge in self._edges:
            if edge.to not in self._nodes:
                self._nodes[edge.to] = Node(edge.to, MISSING if edge.to else ADDRESSES)
        nodes = sorted(
            self._nodes.values(), key=lambda node: (node.kind in (MISSING, FOLDER, ADDRESSES, PEER), node.name)
        )
        edges = sorted(self._edges, key=lambda edge: (edge.source, edge.kind == LETTERS, edge.kind, edge.name, edge.to))
        return Graph(tuple(nodes), tuple(edges))

    def _open(self, name: str) -> None:
        try:
            self._opened[name] = open_queue(self._root, name)
        except (DropqError, OSError) as error:
            if isinstance(error, NoSuchQueue) and not reading.exists(layouts(self._root.layout.path, name)[0].home):
                return  # RACE: it was deleted since the listing
            self._nodes[name] = Node(name, "queue", stuck=(f"it cannot be read: {_without_path(describe(error))}",))

    def _node(self, name: str, context: QueueContext) -> Node:
        """Return the node of a queue; note the edges that begin there."""
        stuck, counts = list[str](), dict[str, int]()
        for find in (
            self._counts,
            self._standstill,
            self._leaving,
            self._selectors,
            self._routes,
            self._receivers,
            self._letters,
            self._work,
        ):
            try:
                stuck += find(context, counts) or ()
            except (DropqError, OSError) as error:
                stuck.append(f"it cannot be read whole: {_without_path(describe(error))}")
        return Node(
            name,
            _kind(context),
            counts,
            tuple(dict.fromkeys(stuck)),
            in_transit=self._in_transit.get(name, {}),
            self_destruct=context.config.self_destruct,
            destroyed_in=self._destroyed_in.get(name),
        )

    # -- what a queue has ----------------------------------------------------------------------------------------

    def _counts(self, context: QueueContext, counts: dict[str, int]) -> None:
        counts |= browsing.counts(context)

    def _standstill(self, context: QueueContext, counts: dict[str, int]) -> Iterator[str]:
        """Yield what keeps consumers or senders of a queue from going on."""
        if context.paused:
            yield "paused"
        refusals = SendLimits(context.name, context).refusals()
        if "write-lock" in refusals:
            yield "senders wait for its write-lock"
        if "full" in refusals:
            yield f"full: max_unprocessed is {context.config.max_unprocessed}"
        if context.layout.is_topic and counts.get("target") and (why := Distributor(context).what_blocks()):
            yield f"{count_of(counts['target'])} not distributed: {why}"

    def _leaving(self, context: QueueContext, counts: dict[str, int]) -> None:
        """Note which messages are on their way to other file systems, and when the queue destroys itself."""
        self._in_transit[context.name] = in_transit(context.layout)
        if context.config.replication_type != "LocalQueue":
            for peer in self._root.config.peer:
                name = f"root {peer.name}"
                self._nodes[name] = Node(name, PEER)
                self._edges.append(Edge(context.name, name, BRIDGE))
        self._destroyed_in[context.name] = destroyed_in(context)

    # -- the edges from it ----------------------------------------------------------------------------------------

    def _selectors(self, context: QueueContext, counts: dict[str, int]) -> Iterator[str]:
        """Note the selectors of a queue; yield which cannot be used, and which messages no selector takes."""
        for name in removed_in(context):
            yield f"selector {name} is removed, and what it moved has not all returned"
        forecast = Forecast(context, self._whereabouts)
        unusable = dict(forecast.selectors.unusable)
        for one in forecast.selectors.on_circle:
            yield unusable.pop(os.path.basename(one.path))
            self._edges.append(self._edge_of(context, one, forecast, 0))
        for file, why in sorted(unusable.items()):
            yield f"selector {file.removesuffix('.toml')}: its file cannot be used: {_without_path(why)}"
        if not forecast.selectors.in_use:
            return
        waiting, untaken = Counter[str](), Counter[str]()
        for message in islice(browsing.listed(context, "target"), LOOKED_AT) if counts.get("target") else ():
            plan = forecast.of(message)
            if plan.why == "stay":
                waiting.update(plan.selectors)
                untaken.update(() if plan.by else (plan.detail,))
        for one in forecast.selectors.in_use:
            self._edges.append(self._edge_of(context, one, forecast, waiting[one.selector.name]))
        for says, count in untaken.items():
            yield f"{count_of(count)}: {says}"

    def _edge_of(self, context: QueueContext, one: InUse, forecast: Forecast, waiting: int) -> Edge:
        selector = one.selector
        stuck = forecast.refused.get(selector.name, "") if waiting else forecast.why_unreachable(one.selector.to)
        if stuck and waiting:
            stuck = f"{stuck.removeprefix('it has ')}; {count_of(waiting)} waiting"
        return Edge(
            source=context.name,
            to=selector.to or "",
            kind=selector.op,
            name=selector.name,
            filter=selector.filter,
            role=selector.role,
            granted=selector.credit,
            free=None if selector.credit is None else max(selector.credit - one.busy, 0),
            stuck=stuck,
        )

    def _routes(self, context: QueueContext, counts: dict[str, int]) -> Iterator[str]:
        """Note the routes of a queue that are in use, and the folders that they lead to."""
        in_use, unusable = routes.examine(context)
        routed = routes.routed(context.layout, context.config.ignore)
        for route in in_use:
            to = self._by_target.get(os.path.realpath(route.folder))
            if to is None:
                to = self._folder(context, route.name, route.folder, routed.pop(route.name, 0))
            self._edges.append(Edge(context.name, to, "route", route.name))
        for name, why in sorted(unusable.items()):
            to = self._folder(context, name, f"{context.layout.routing}/{name}", routed.pop(name, 0))
            self._edges.append(Edge(context.name, to, "route", name, stuck=f"it takes nothing: {_without_path(why)}"))
        for name, count in sorted(routed.items()):
            yield f"{count_of(count)} in routing/{name}, and no route of this name is in use"

    def _folder(self, context: QueueContext, name: str, folder: str, count: int) -> str:
        """Note the folder of a route; return what it is called."""
        if os.path.islink(folder):
            to = os.path.realpath(folder)
            self._nodes[to] = Node(to, FOLDER)
        else:
            to = f"{context.name}/routing/{name}"
            self._nodes[to] = Node(to, FOLDER, {"target": count})
        return to

    def _receivers(self, context: QueueContext, counts: dict[str, int]) -> None:
        if (kind := _kind(context)) in ("view", "subscription"):
            for name, topic in self._opened.items():
                if topic.layout.is_topic and gets_from(context, name):
                    self._edges.append(Edge(name, context.name, kind, filter=context.config.filter))

    def _letters(self, context: QueueContext, counts: dict[str, int]) -> None:
        """Note where the dead letters of a queue go, if it can have any, or names a queue for its own."""
        letters = context.config.dead_letter_queue
        if letters is not None and may_have_letters(context):
            stuck = "" if letters in self._opened else f"{letters} is missing"
            self._edges.append(Edge(context.name, letters, LETTERS, stuck=stuck))

    def _work(self, context: QueueContext, counts: dict[str, int]) -> None:
        addresses = {address for told in Workers(context).to.values() for address in told}
        for address in sorted(addresses):
            self._edges.append(Edge(context.name, address, WORK, stuck=what_blocks(context, [address])))


def _kind(context: QueueContext) -> str:
    if context.config.underlying_topic is not None:
        return "view"
    return "topic" if context.layout.is_topic else "subscription" if context.layout.is_subscription else "queue"


def _without_path(why: str) -> str:
    """Return the first line of a problem, without the path of its file in front."""
    line = why.partition("\n")[0]
    path, colon, rest = line.partition(": ")
    return rest if colon and path.startswith("/") else line
