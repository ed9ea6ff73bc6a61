"""A graph as an SVG, drawn without any package: boxes in layers from left to right, and an arrow for each edge.

An edge leaves its box at a height of its own, runs straight below its text, and then bends to the next layer. An edge
over several layers passes each of them in a lane of its own. An edge that goes back runs below everything.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate, pairwise

from dropq.diagnosis.graph_parts import ADDRESSES, BRIDGE, FOLDER, LETTERS, MISSING, PEER, WORK, Edge, Node
from dropq.diagnosis.graph_text import counted, credit, described, lines_of_edge, notes, shown, title

#: Pixels: around the picture, inside a box, between boxes of a layer, for the bends between two layers.
MARGIN, INSIDE, BETWEEN, BEND = 24, 12, 26, 84
#: Pixels: the height of a line of text, and the least width of a box.
LINE, LEAST = 17, 120
#: Pixels between two edges that end at one box, or run below everything; the height of a lane through a layer.
APART, LANE = 16, 26
#: The most characters of a line of text in a box and on an edge, and the most lines about what is stuck.
IN_BOX, ON_EDGE, STUCK_LINES = 30, 34, 4
#: The size of the text, and how wide a character is, in parts of the size.
SIZE, WIDE = 12, 0.6
#: How often the boxes of each layer are put in order by their neighbours.
ROUNDS = 8

_RED, _GREY, _BLACK = "#b71c1c", "#546e7a", "#263238"
#: The line and the filling of each kind of node.
_BOXES = {
    "queue": ("#1565c0", "#e3f2fd"),
    "topic": ("#2e7d32", "#e8f5e9"),
    "subscription": ("#2e7d32", "#f7fbf7"),
    "view": ("#6a1b9a", "#f3e5f5"),
    FOLDER: ("#5d4037", "#efebe9"),
    MISSING: (_RED, "#ffffff"),
    ADDRESSES: (_GREY, "#ffffff"),
    PEER: ("#00695c", "#e0f2f1"),
}
#: The colour of each kind of edge, and its dashes.
_LINES = {
    "move": ("#1565c0", ""),
    "copy": ("#1565c0", "7 4"),
    "bounce": ("#6a1b9a", ""),
    "route": ("#5d4037", ""),
    "subscription": ("#2e7d32", ""),
    "view": ("#6a1b9a", ""),
    LETTERS: ("#78909c", "2 4"),
    WORK: ("#ef6c00", ""),
    BRIDGE: ("#00695c", "7 4"),
}


@dataclass
class _Line:
    """A line of text, and how it looks."""

    text: str
    colour: str = _BLACK
    bold: bool = False
    mono: bool = False

    @property
    def width(self) -> float:
        cells = sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in self.text)
        return cells * SIZE * (WIDE + 0.04 * self.bold + 0.02 * self.mono)


@dataclass(eq=False)
class _Box:
    """A box in a layer; without a node, a lane through it."""

    node: Node | None
    lines: list[_Line] = field(default_factory=list)
    layer: int = 0
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = LANE
    leaving: list[_Run] = field(default_factory=list)
    coming: list[_Run] = field(default_factory=list)

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(eq=False)
class _Run:
    """An edge, from box to box by way of lanes; an edge that goes back has only its ends."""

    edge: Edge
    stops: list[_Box]
    lines: list[_Line]
    goes_back: bool = False
    begin: float = 0
    end: float = 0
    path: str = ""

    @property
    def room(self) -> int:
        """The height that its text needs on the side of its box."""
        return len(self.lines) * LINE + 10


def svg(nodes: Sequence[Node], edges: Sequence[Edge]) -> str:
    """Return a graph as an SVG, in ASCII."""
    return _Drawing(nodes, edges).text().encode("ascii", "xmlcharrefreplace").decode()


class _Part:
    """The boxes that edges join, directly or by way of others, and these edges, from the height `top` down."""

    def __init__(self, boxes: list[_Box], runs: list[_Run], top: float) -> None:
        self.boxes = boxes
        self.runs = runs
        self._top = top
        self._layers: list[list[_Box]] = []
        self._texts: list[float] = []  # the room for the texts of the edges from each layer
        self.right = self.bottom = 0.0
        self._choose_layers()
        self._add_lanes()
        self._size(self._order_by_neighbours())
        self._place_across()
        self._place_down()
        self._draw_edges()

    # -- layers ------------------------------------------------------------------------------------------------------

    def _choose_layers(self) -> None:
        """Put each box behind all from which edges lead to it; an edge that would close a circle goes back."""
        ahead = defaultdict[_Box, list[_Run]](list)
        for run in self.runs:
            ahead[run.stops[0]].append(run)
        done: dict[_Box, None] = {}  # each after all to which its edges lead
        for first in self.boxes:
            walk = {} if first in done else {first: iter(ahead[first])}
            while walk:
                box, runs = next(reversed(walk.items()))
                if (following := next(runs, None)) is None:
                    del walk[box]
                    done[box] = None
                elif (to := following.stops[1]) in walk:
                    following.goes_back = True
                elif to not in done:
                    walk[to] = iter(ahead[to])
        for box in reversed(done):
            for to in (run.stops[1] for run in ahead[box] if not run.goes_back):
                to.layer = max(to.layer, box.layer + 1)
        for box in ahead.keys() - {run.stops[1] for run in self.runs}:  # it stands close to where it sends
            box.layer = min(run.stops[1].layer for run in ahead[box]) - 1
        self._layers = [[] for _ in range(max(box.layer for box in self.boxes) + 1)]
        for box in self.boxes:
            self._layers[box.layer].append(box)

    def _add_lanes(self) -> None:
        for run in self.runs:
            source, to = run.stops
            lanes = [_Box(None, layer=layer) for layer in range(source.layer + 1, to.layer)]
            for lane in lanes:
                self._layers[lane.layer].append(lane)
            run.stops = [source, *lanes, to]
            for first, second in pairwise(run.stops):
                first.leaving.append(run)
                second.coming.append(run)

    def _order_by_neighbours(self) -> dict[_Box, int]:
        """Order each layer by the mean position of its neighbours: of those before it, then of those behind it."""
        position = {box: number for layer in self._layers for number, box in enumerate(layer)}
        for layer, step in self._to_and_fro():
            means = {box: _mean([position[near] for near in _near(box, step)], position[box]) for box in layer}
            layer.sort(key=means.__getitem__)
            position |= {box: number for number, box in enumerate(layer)}
        return position

    def _to_and_fro(self) -> Iterator[tuple[list[_Box], int]]:
        """Yield each layer to look at what is before it, and then, from the last one on, behind it; again and again."""
        for _ in range(ROUNDS):
            yield from ((layer, -1) for layer in self._layers)
            yield from ((layer, 1) for layer in reversed(self._layers))

    # -- coordinates -------------------------------------------------------------------------------------------------

    def _size(self, position: dict[_Box, int]) -> None:
        """Give each box the room that its text and its edges need, and each edge its order on the side of its boxes."""
        for box in position:
            box.leaving.sort(key=lambda run: (run.goes_back, position[_stop(run, box, 1)]))
            box.coming.sort(key=lambda run: (run.goes_back, position[_stop(run, box, -1)]))
            if box.node is not None:
                edges = sum(run.room for run in box.leaving)
                box.height = max(box.height, edges + 6, len(box.coming) * APART + 10)

    def _place_across(self) -> None:
        back = sum(run.goes_back for run in self.runs)
        x = MARGIN + (back * 6.0 + 24 if back else 0.0)
        for layer in self._layers:
            widest = max(box.width for box in layer)
            for box in layer:
                box.x = x
                box.width = widest  # boxes of a layer are equally wide, so that their edges begin below each other
            begun = [run for box in layer for run in box.leaving if box.node is not None]  # a lane is only passed
            labels = max((line.width for run in begun for line in run.lines), default=0)
            self._texts.append(labels + 20 if labels else 0.0)
            x += widest + self._texts[-1] + BEND
        self.right = x - BEND + (back * 6 + 24 if back else 0)

    def _place_down(self) -> None:
        for layer in self._layers:
            y = self._top
            for box in layer:
                box.y = y
                y += box.height + BETWEEN
        for layer, step in self._to_and_fro():
            self._draw_near(layer, step)
        boxes = [box for layer in self._layers for box in layer]
        lowest = min(box.y for box in boxes)
        for box in boxes:
            box.y += self._top - lowest
            self._place_ends(box)
        self._below = max(box.y + box.height for box in boxes)
        self.bottom = self._below + APART * sum(run.goes_back for run in self.runs)

    def _draw_near(self, layer: list[_Box], step: int) -> None:
        """Move the boxes of a layer towards their neighbours; keep their order, and the room between them."""
        wanted = [_mean([near.middle for near in _near(box, step)], box.middle) - box.height / 2 for box in layer]
        above = [0.0, *accumulate(box.height + BETWEEN for box in layer)]
        groups: list[tuple[float, int]] = []  # of boxes that touch: the sum of where each wants to begin, how many
        for number in range(len(layer)):
            groups.append((wanted[number] - above[number], 1))
            while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
                (last, count), (before, more) = groups.pop(), groups.pop()
                groups.append((last + before, count + more))
        begins = [total / count for total, count in groups for _ in range(count)]
        for box, begin, offset in zip(layer, begins, above, strict=False):
            box.y = begin + offset

    def _place_ends(self, box: _Box) -> None:
        """Find the heights at which edges begin and end at a box."""
        if box.node is None:
            return
        y = box.middle - sum(run.room for run in box.leaving) / 2
        for run in box.leaving:
            y += run.room
            run.begin = y - 6
        y = box.middle - (len(box.coming) - 1) * APART / 2
        for run in box.coming:
            run.end = y
            y += APART

    def _draw_edges(self) -> None:
        back = 0
        for run in self.runs:
            back += run.goes_back
            run.path = self._edge_back(run, back) if run.goes_back else self._edge_on(run)

    def _bend_begins(self, box: _Box) -> float:
        """Return where the edges from the layer of a box bend: behind all of their texts."""
        return box.x + box.width + self._texts[box.layer]

    def _edge_on(self, run: _Run) -> str:
        first, *_, last = run.stops
        x, y = first.x + first.width, run.begin
        path = f"M{x:.0f},{y:.1f}"
        for box, following in pairwise(run.stops):
            bend, end = self._bend_begins(box), following.x
            below = run.end if following is last else following.middle
            half = (bend + end) / 2
            path += f" L{bend:.0f},{y:.1f} C{half:.0f},{y:.1f} {half:.0f},{below:.1f} {end:.0f},{below:.1f}"
            y = below
        return path

    def _edge_back(self, run: _Run, number: int) -> str:
        """Return the path of an edge that goes back, below all boxes; `number` counts these edges from 1."""
        first, last = run.stops[0], run.stops[-1]
        right, left = self._bend_begins(first) + 6 * number, last.x - 18 - 6 * number
        bottom = self._below + APART * number
        return (
            f"M{first.x + first.width:.0f},{run.begin:.1f} L{right - 6:.0f},{run.begin:.1f} "
            f"Q{right:.0f},{run.begin:.1f} {right:.0f},{run.begin + 6:.1f} L{right:.0f},{bottom - 6:.1f} "
            f"Q{right:.0f},{bottom:.1f} {right - 6:.0f},{bottom:.1f} L{left + 6:.0f},{bottom:.1f} "
            f"Q{left:.0f},{bottom:.1f} {left:.0f},{bottom - 6:.1f} L{left:.0f},{run.end + 6:.1f} "
            f"Q{left:.0f},{run.end:.1f} {left + 6:.0f},{run.end:.1f} L{last.x:.0f},{run.end:.1f}"
        )


class _Drawing:
    """The picture of one graph: a part below the other, and below them the boxes without any edge."""

    def __init__(self, nodes: Sequence[Node], edges: Sequence[Edge]) -> None:
        boxes = {node.name: _box(node) for node in nodes}
        self._runs = [_Run(edge, [boxes[edge.source], boxes[edge.to]], _about(edge)) for edge in edges]
        self._boxes = list(boxes.values())
        self._right, self._bottom = 0.0, float(MARGIN)
        alone: list[_Box] = []
        for joined in _joined(self._boxes, self._runs):
            there = set(joined)
            runs = [run for run in self._runs if run.stops[0] in there]
            if not runs:
                alone += joined
                continue
            part = _Part(joined, runs, self._bottom)
            self._right, self._bottom = max(self._right, part.right), part.bottom + MARGIN
        self._lay_out_alone(alone)

    def text(self) -> str:
        """Return the SVG."""
        return "\n".join([*self._head(), *self._arrows(), *self._all_boxes(), "</svg>", ""])

    def _lay_out_alone(self, alone: list[_Box]) -> None:
        widest = max((box.width for box in alone), default=0)
        across = max(int((max(self._right, 820) - MARGIN + BETWEEN) // (widest + BETWEEN)), 1)
        for first in range(0, len(alone), across):
            row = alone[first : first + across]
            for number, box in enumerate(row):
                box.x, box.y, box.width = MARGIN + number * (widest + BETWEEN), self._bottom, widest
                self._right = max(self._right, box.x + widest)
            self._bottom += max(box.height for box in row) + MARGIN

    def _head(self) -> Iterator[str]:
        width, height = round(self._right + MARGIN), round(self._bottom)
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif" font-size="{SIZE}">'
        )
        yield "<defs>"
        for colour in sorted({colour for colour, _ in _LINES.values()} | {_RED}):
            yield (
                f'<marker id="tip-{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
                f'orient="auto" markerUnits="userSpaceOnUse"><path d="M0,0 L10,5 L0,10 z" fill="{colour}"/></marker>'
            )
        yield "</defs>"
        yield f'<rect width="{width}" height="{height}" fill="white"/>'

    def _arrows(self) -> Iterator[str]:
        for number, run in enumerate(self._runs):
            colour, dashes = _LINES[run.edge.kind]
            colour = _RED if run.edge.stuck else colour
            dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
            yield f'<g class="edge" id="edge{number}"><title>{escape(_words(run.edge))}</title>'
            yield (
                f'<path d="{run.path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashed} '
                f'marker-end="url(#tip-{colour[1:]})"/>'
            )
            x, y = run.stops[0].x + run.stops[0].width + 12, run.begin - 5 - (len(run.lines) - 1) * LINE
            yield from (_text(line, x, y + at * LINE) for at, line in enumerate(run.lines))
            yield "</g>"

    def _all_boxes(self) -> Iterator[str]:
        for number, box in enumerate(self._boxes):
            node = box.node
            assert node is not None
            colour, filling = _BOXES[node.kind]
            dashed = ' stroke-dasharray="5 4"' if node.kind in (MISSING, ADDRESSES) else ""
            about = (title(node), node.kind, counted(node), *notes(node), *map(shown, node.stuck))
            yield f'<g class="node" id="node{number}"><title>{escape("; ".join(filter(None, about)))}</title>'
            yield (
                f'<rect x="{box.x:.0f}" y="{box.y:.1f}" width="{box.width:.0f}" height="{box.height:.0f}" '
                f'rx="{16 if node.kind == "topic" else 5}" fill="{filling}" '
                f'stroke="{_RED if node.stuck else colour}" stroke-width="1.5"{dashed}/>'
            )
            y = box.middle - len(box.lines) * LINE / 2 + LINE - 4
            yield from (_text(line, box.x + INSIDE, y + at * LINE) for at, line in enumerate(box.lines))
            yield "</g>"


# -- what is written on it -------------------------------------------------------------------------------------------


def _box(node: Node) -> _Box:
    colour, _ = _BOXES[node.kind]
    lines = [_Line(_short(title(node), IN_BOX), _RED if node.kind == MISSING else colour, bold=True)]
    if node.kind in ("topic", "subscription", "view", FOLDER):
        lines.append(_Line(node.kind, _GREY))
    errors = f"{node.counts['error']} in error" if node.counts.get("error") else ""
    others = ", ".join(part for part in counted(node).split(", ") if part and part != errors)
    lines += [_Line(text, colour) for text, colour in ((others, _BLACK), (errors, _RED)) if text]
    lines += [_Line(text, _GREY) for note in notes(node) for text in _wrapped(note, IN_BOX)]
    lines += [_Line(text, _RED) for stuck in node.stuck for text in _wrapped(stuck, IN_BOX)]
    box = _Box(node, lines)
    box.width = max(LEAST, *(line.width + 2 * INSIDE for line in lines))
    box.height = len(lines) * LINE + 2 * INSIDE - 4
    return box


def _about(edge: Edge) -> list[_Line]:
    colour, _ = _LINES[edge.kind]
    lines = [_Line(_short(described(edge), ON_EDGE), colour, bold=True)]
    if edge.granted is not None:
        lines.append(_Line(credit(edge), _RED if edge.stuck and not edge.free else _BLACK))
    if edge.filter is not None:
        lines.append(_Line(_short(shown(edge.filter), ON_EDGE), _GREY, mono=True))
    return [*lines, *(_Line(text, _RED) for text in _wrapped(edge.stuck, ON_EDGE))]


def _words(edge: Edge) -> str:
    return f"{shown(edge.source)} -> {shown(edge.to) or 'return addresses'}: {'; '.join(lines_of_edge(edge))}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(shown(text), width, max_lines=STUCK_LINES, placeholder=" ...")


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _text(line: _Line, x: float, y: float) -> str:
    weight = ' font-weight="bold"' if line.bold else ""
    family = ' font-family="monospace"' if line.mono else ""
    return f'<text x="{x:.0f}" y="{y:.1f}" fill="{line.colour}"{weight}{family}>{escape(line.text)}</text>'


# -- who stands beside whom ------------------------------------------------------------------------------------------


def _joined(boxes: list[_Box], runs: list[_Run]) -> list[list[_Box]]:
    """Return the boxes in the parts into which edges join them, the largest part first."""
    parts = {box: [box] for box in boxes}
    for run in runs:
        one, other = (parts[box] for box in run.stops)
        if one is not other:
            one += other
            parts |= dict.fromkeys(other, one)
    different = {id(part): part for part in parts.values()}
    return sorted(different.values(), key=len, reverse=True)


def _stop(run: _Run, box: _Box, step: int) -> _Box:
    return run.stops[run.stops.index(box) + step]


def _near(box: _Box, step: int) -> list[_Box]:
    """Return the boxes and lanes beside a box: 1 for the layer behind it, -1 for the one before it."""
    return [_stop(run, box, step) for run in (box.leaving if step > 0 else box.coming) if not run.goes_back]


def _mean(numbers: Sequence[float], none: float) -> float:
    return sum(numbers) / len(numbers) if numbers else none
