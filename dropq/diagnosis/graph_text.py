"""A graph in words, and in the languages of Mermaid and Graphviz; every name in it is data from strangers."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence

from dropq.diagnosis.graph_parts import ADDRESSES, BRIDGE, FOLDER, LETTERS, MISSING, PEER, WORK, Edge, Node
from dropq.durations import format_duration
from dropq.lifecycle.decision import count_of

#: What the messages of a state do, in words; the states that are shown, in order.
STATES = {"target": "waiting", "delayed": "delayed", "processing": "held", "error": "in error"}
#: How each kind of node looks in Mermaid and in Graphviz.
_MERMAID = {
    "topic": ("([", "])"),
    "subscription": ("[", "]"),
    "view": ("[[", "]]"),
    FOLDER: ("[/", "/]"),
    MISSING: ("{{", "}}"),
    ADDRESSES: ("(", ")"),
}
_DOT = {"topic": "ellipse", "view": "box3d", FOLDER: "folder", MISSING: "octagon", ADDRESSES: "note"}
#: The characters that mean nothing in a label of Mermaid.
_PLAIN = frozenset(string.ascii_letters + string.digits + " ./,:=-_+()'?!")
#: The colour of what is stuck.
_RED = "#b71c1c"


def title(node: Node) -> str:
    """Return what a node is called."""
    return shown(node.name) if node.name else "return addresses"


def counted(node: Node) -> str:
    """Return in words how many messages a node has, by state; "" if that is not known."""
    if node.kind == MISSING:
        return "missing"
    parts = [f"{count} {word}" for state, word in STATES.items() if (count := node.counts.get(state, 0))]
    return ", ".join(parts) or ("empty" if node.counts else "")


def notes(node: Node) -> list[str]:
    """Return in words which messages are on their way to other file systems, and whether a queue destroys itself."""
    found = [
        f"{count_of(count)} on the way to {shown(destination)}"
        for destination, count in sorted(node.in_transit.items())
    ]
    if node.destroyed_in is not None:
        when = "once no message is held" if node.counts.get("processing") else "at the next sweep"
        if node.destroyed_in:
            when = f"in {format_duration(math.ceil(node.destroyed_in))}"
        found.append(f"nobody needs it: destroys itself {when}")
    elif node.self_destruct:
        found.append("destroys itself when nobody needs it")
    return found


def described(edge: Edge) -> str:
    """Return the kind of an edge and its name; for a selector whose role is not normal, the role, too."""
    role = f" ({edge.role})" if edge.role not in ("", "normal") else ""
    if edge.kind == LETTERS:
        return "dead letters"
    if edge.kind == BRIDGE:
        return "what it wants"
    return "by work" if edge.kind == WORK else f"{edge.kind} {shown(edge.name)}".rstrip() + role


def credit(edge: Edge) -> str:
    """Return in words how many credits a selector has left; "" if it spends no credits."""
    return "" if edge.granted is None else f"{edge.free} of {edge.granted} credit{'s' if edge.granted > 1 else ''} free"


def shown(text: str) -> str:
    r"""Return a text with `\xNN` in place of each byte that no picture can show."""
    return "".join(char if char.isprintable() else _hidden(char) for char in text)


def _hidden(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def _lines(node: Node) -> list[str]:
    kind = f" ({node.kind})" if node.kind not in ("queue", MISSING, ADDRESSES, PEER) else ""
    return list(filter(None, (title(node) + kind, counted(node), *notes(node), *map(shown, node.stuck))))


def lines_of_edge(edge: Edge) -> list[str]:
    """Return what is written about an edge: its kind, its credits, its filter, and why it is stuck."""
    return list(filter(None, (described(edge), credit(edge), shown(edge.filter or ""), shown(edge.stuck))))


def mermaid(nodes: Sequence[Node], edges: Sequence[Edge]) -> str:
    """Return a graph as a flowchart of Mermaid."""
    numbers = {node.name: f"n{number}" for number, node in enumerate(nodes)}
    lines = ["flowchart LR"]
    for node in nodes:
        begin, end = _MERMAID.get(node.kind, ("[", "]"))
        lines.append(f"    {numbers[node.name]}{begin}{_label(_lines(node), _for_mermaid, '<br/>')}{end}")
    for edge in edges:
        arrow = "-.->" if edge.kind in ("copy", LETTERS) else "-->"
        label = _label(lines_of_edge(edge), _for_mermaid, "<br/>")
        lines.append(f"    {numbers[edge.source]} {arrow}|{label}| {numbers[edge.to]}")
    stuck = [numbers[node.name] for node in nodes if node.stuck or node.kind == MISSING]
    if stuck:
        lines += [f"    classDef stuck stroke:{_RED},color:{_RED}", f"    class {','.join(stuck)} stuck"]
    for number, edge in enumerate(edges):
        if edge.stuck:
            lines.append(f"    linkStyle {number} stroke:{_RED},color:{_RED}")
    return "\n".join([*lines, ""])


def _for_mermaid(text: str) -> str:
    """Return a text with an entity for each character that means something to Mermaid, or to HTML; in ASCII."""
    return "".join(char if char in _PLAIN else f"#{ord(char)};" for char in text)


def dot(nodes: Sequence[Node], edges: Sequence[Edge]) -> str:
    """Return a graph in the language of Graphviz."""
    numbers = {node.name: f"n{number}" for number, node in enumerate(nodes)}
    lines = ["digraph dropq {", "    rankdir=LR;", '    node [shape=box, fontname="sans-serif"];']
    lines.append('    edge [fontname="sans-serif", fontsize=10];')
    for node in nodes:
        colour = f', color="{_RED}", fontcolor="{_RED}"' if node.stuck or node.kind == MISSING else ""
        label = _label(_lines(node), _for_dot, "\\n")
        lines.append(f"    {numbers[node.name]} [label={label}, shape={_DOT.get(node.kind, 'box')}{colour}];")
    for edge in edges:
        colour = f', color="{_RED}", fontcolor="{_RED}"' if edge.stuck else ""
        style = ", style=dashed" if edge.kind in ("copy", LETTERS) else ""
        label = _label(lines_of_edge(edge), _for_dot, "\\n")
        lines.append(f"    {numbers[edge.source]} -> {numbers[edge.to]} [label={label}{style}{colour}];")
    return "\n".join([*lines, "}", ""])


def _for_dot(text: str) -> str:
    """Return a text as a quoted string of Graphviz has it, which reads entities of HTML, too; in ASCII."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
    return quoted.encode("ascii", "xmlcharrefreplace").decode()


def _label(lines: list[str], escape: Callable[[str], str], end: str) -> str:
    return f'"{end.join(map(escape, lines))}"'
