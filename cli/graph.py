"""The command that shows how messages go from queue to queue, and what is stuck."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import output
from .options import option
from .output import Record
from .shell import Shell, UsageError

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from dropq import Edge, Graph, Node

    Format = str
else:  # typer takes the choices from here
    Format = Literal["mermaid", "dot", "svg"]

#: The states whose messages a line counts.
STATES = ("target", "delayed", "processing", "error")
#: The columns of a line: of a queue, or of how messages go from there to another.
COLUMNS = ("kind", "queue", "name", "to", "filter", "role", "granted", "free", *STATES, "stuck", "notes")


def graph(
    ctx: typer.Context,
    format: Annotated[
        Format | None, option("--format FORMAT", "Print it for a drawing program: mermaid, dot or svg.")
    ] = None,
) -> None:
    """Show how messages go between queues, and what is stuck.

    It shows queues, topics with their subscriptions, views, selectors, routes and dead letters, with the numbers of
    messages, how many credits of each selector are free, what is on its way to other file systems, and which queues
    destroy themselves. On a terminal it is a tree. Elsewhere it is a line for each queue, and one for each selector,
    route or subscription by which messages leave it. It changes nothing.
    """
    shell = Shell(ctx)
    if format is not None and shell.json:
        raise UsageError("give --json or --format, but not both")
    shell.check_root()
    found = shell.root.graph()
    if format is not None:
        text = {"mermaid": found.mermaid, "dot": found.dot, "svg": found.svg}[format]()
        output.put(text.rstrip("\n"))
    elif shell.on_terminal:
        from rich.console import Console

        console = Console(highlight=False, file=sys.stdout)
        for tree in _trees(found):
            console.print(tree)
    else:
        shell.show(_records(found, as_json=shell.json), COLUMNS)
    if not found.nodes:
        shell.report_no_queues()


def _records(graph: Graph, *, as_json: bool) -> Iterator[Record]:
    from dropq.diagnosis.graph_text import notes

    for node in graph.nodes:
        stuck = list(node.stuck)
        about: Record = {"kind": node.kind, "queue": node.name, **node.counts}
        if as_json:
            leaving = {key: getattr(node, key) for key in ("in_transit", "self_destruct", "destroyed_in")}
            yield {**about, "stuck": stuck, **leaving}
        else:
            yield {**about, "stuck": "; ".join(stuck), "notes": "; ".join(notes(node))}
    for edge in graph.edges:
        about = {key: getattr(edge, key) for key in ("name", "to", "filter", "role", "granted", "free")}
        stuck = [edge.stuck] if edge.stuck else []
        yield {"kind": edge.kind, "queue": edge.source, **about, "stuck": stuck if as_json else edge.stuck}


# -- on a terminal ---------------------------------------------------------------------------------------------------


def _trees(graph: Graph) -> Iterator[Tree]:
    """Yield the trees of a graph: first of queues to which no queue sends, then of circles.

    Below a queue is where its messages go. That is shown once; a circle ends where it comes back.
    """
    from rich.tree import Tree

    nodes = {node.name: node for node in graph.nodes}
    leaving: defaultdict[str, list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        leaving[edge.source].append(edge)
    led_to = {edge.to for edge in graph.edges}
    shown = set[str]()
    for node in sorted(graph.nodes, key=lambda node: (node.name not in leaving, node.name in led_to)):
        if node.name in shown:
            continue
        shown.add(node.name)
        tree = Tree(_with_stuck(_counted(node), *node.stuck), guide_style="dim")
        under_way = [(tree, iter(leaving[node.name]))]
        while under_way:
            branch, edges = under_way[-1]
            if (following := next(edges, None)) is None:
                under_way.pop()
                continue
            to = following.to
            below = branch.add(_about_edge(following, nodes[to], again=to in shown and bool(leaving[to])))
            if to not in shown:
                shown.add(to)
                under_way.append((below, iter(leaving[to])))
        yield tree


def _counted(node: Node) -> Text:
    """Return the name of a node, how many messages it has, and notes about it."""
    from rich.text import Text

    from dropq.diagnosis.graph_text import counted, notes, title

    kind = f" ({node.kind})" if node.kind in ("topic", "subscription", "view", "folder") else ""
    return Text.assemble(
        (title(node), "bold"),
        (kind, "dim"),
        f"  {counted(node)}" if counted(node) else "",
        *((f"  {note}", "dim") for note in notes(node)),
    )


def _about_edge(edge: Edge, to: Node, *, again: bool) -> Text:
    from rich.text import Text

    from dropq.diagnosis.graph_text import credit, described, shown

    text = Text.assemble((described(edge), "cyan"), " → ", _counted(to), ("  (see above)" if again else "", "dim"))
    about = ", ".join(filter(None, (credit(edge), shown(edge.filter or ""))))
    if about:
        text.append(f"\n{about}", "dim")
    return _with_stuck(text, edge.stuck, *to.stuck)


def _with_stuck(text: Text, *stuck: str) -> Text:
    from dropq.diagnosis.graph_text import shown

    for why in filter(None, stuck):
        text.append(f"\n{shown(why)}", "red")
    return text
