"""The graph of a root: which messages go where, how many are there, what is stuck and why, in each of its forms."""

from __future__ import annotations

import io
import json
import os
import re
from collections import Counter
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest
from children import unprivileged
from helpers import take
from rich.console import Console

from dropq import Edge, Graph, Node, Queue, Root
from dropq.cli import graph as cli_graph
from dropq.cli import main as cli
from dropq.cli.output import USAGE
from dropq.diagnosis import graph_text
from dropq.format.transfers import DESTINATION, GIVEN

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.create(tmp_path / "root")


def made(root: Root, *names: str) -> list[Queue]:
    return [root.create_queue(name, durability="none") for name in names]


def by_hand(queue: Queue, name: str, text: str) -> None:
    path = Path(queue.layout.selectors) / f"{name}.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def edge(graph: Graph, source: str, to: str) -> Edge:
    (found,) = (edge for edge in graph.edges if (edge.source, edge.to) == (source, to))
    return found


def node(root: Root, name: str) -> Node:
    (found,) = (node for node in root.graph().nodes if node.name == name)
    return found


def stuck(root: Root, name: str) -> tuple[str, ...]:
    """Why messages do not go on from a queue."""
    return node(root, name).stuck


# -- what is in it -------------------------------------------------------------------------------------------------


def test_a_root_without_queues_has_an_empty_graph(root: Root) -> None:
    assert root.graph() == Graph((), ())


def test_queues_topics_subscriptions_views_selectors_routes_and_dead_letters_are_in_it(root: Root) -> None:
    orders, eu, _ = made(root, "orders", "eu", "audit")
    made(root, "letters")
    orders.add_selector("eu", to="eu", filter="region = 'eu'", credit=3)
    orders.add_selector("audit", op="copy", to="audit")
    orders.add_selector("back", op="bounce", filter="n = 1")
    orders.add_selector("rest", to="audit", role="default")
    Path(eu.layout.config_file).write_text('dead_letter_queue = "letters"\n')
    root.create_topic("news").create_subscription("archive", client_id="hq", filter="n > 1")
    root.create_topic("news.eu").create_subscription("desk", client_id="eu")
    root.create_queue("view", underlying_topic="news.eu")
    Path(eu.layout.routes_file).write_text("audit.selector=a = 1\nfolder.selector=a = 2\n")
    os.symlink("../../audit/target", Path(eu.layout.routing) / "audit")
    os.mkdir(Path(eu.layout.routing) / "folder")
    for name in ("audit", "folder"):
        (Path(eu.layout.routing) / f"{name}.in-use").touch()
    graph = root.graph()
    assert {node.name: node.kind for node in graph.nodes} == {
        **dict.fromkeys(("orders", "eu", "audit", "letters"), "queue"),
        **dict.fromkeys(("news", "news.eu"), "topic"),
        **dict.fromkeys(("news/archive.hq", "news.eu/desk.eu"), "subscription"),
        "view": "view",
        "eu/routing/folder": "folder",
        "": "addresses",
    }
    assert set(graph.edges) == {
        Edge("orders", "eu", "move", "eu", "region = 'eu'", "normal", granted=3, free=3),
        Edge("orders", "audit", "copy", "audit", role="normal"),
        Edge("orders", "", "bounce", "back", "n = 1", "normal"),
        Edge("orders", "audit", "move", "rest", role="default", granted=1, free=1),
        Edge("eu", "audit", "route", "audit"),
        Edge("eu", "eu/routing/folder", "route", "folder"),
        Edge("eu", "letters", "dead-letter"),
        Edge("news", "news/archive.hq", "subscription", filter="n > 1"),
        Edge("news.eu", "news/archive.hq", "subscription", filter="n > 1"),
        Edge("news.eu", "news.eu/desk.eu", "subscription"),
        Edge("news.eu", "view", "view"),
    }


def test_messages_are_counted_and_credits_that_are_free(root: Root) -> None:
    source, goal = made(root, "source", "goal")
    source.add_selector("on", to="goal", credit=3)
    for body in "abcd":
        source.send(body)
    source.route()
    take(goal)
    taken = take(goal)
    taken.reject("no")
    graph = root.graph()
    counts = {node.name: {state: n for state, n in node.counts.items() if n} for node in graph.nodes}
    assert counts == {"source": {"target": 1}, "goal": {"target": 1, "processing": 1, "error": 1}}
    assert (edge(graph, "source", "goal").granted, edge(graph, "source", "goal").free) == (3, 1)
    assert edge(graph, "source", "goal").stuck == "", "the next router moves what waits"


def test_dead_letters_of_the_whole_root_are_shown_for_queues_that_can_have_any(root: Root) -> None:
    (Path(root.path) / "dropq.toml").write_text('format = 1\ndead_letter_queue = "letters"\n')
    root = Root(root.path)
    made(root, "letters", "plain", "goal")
    root.create_queue("limited", exhausted="dead-letter")
    root.create_queue("source").add_selector("on", to="goal")
    letters = {edge.source for edge in root.graph().edges if edge.kind == "dead-letter"}
    assert letters == {"limited", "source"}
    root.delete_queue("letters")
    assert edge(root.graph(), "limited", "letters").stuck == "letters is missing"


def in_transit(queue: Queue, goal: str, count: int) -> None:
    """Let messages of a queue be on their way to a queue of another root, which nobody carries there."""
    row = Path(queue.layout.transfers) / "0123456789abcdef"
    (row / GIVEN).mkdir(parents=True)
    root, _, name = goal.rpartition("/")
    (row / DESTINATION).write_text(json.dumps({"format": 1, "root": root, "queue": name, "mark": "abc"}))
    for number in range(count):
        (row / GIVEN / f"4.179538308937500{number}-7523895424.B").write_bytes(b"x")


def test_messages_on_their_way_to_other_file_systems_are_counted_by_where_they_go(root: Root) -> None:
    source, _ = made(root, "source", "goal")
    assert node(root, "source").in_transit == {}
    in_transit(source, "/mnt/far/eu", 2)
    assert node(root, "source").in_transit == {"/mnt/far/eu": 2}
    assert node(root, "goal").in_transit == {}


def test_a_queue_that_destroys_itself_says_so_and_once_it_is_alone_when(root: Root) -> None:
    made(root, "plain", "goal")
    queue = root.create_queue("queue", self_destruct=True, self_destruct_after=100)
    queue.add_selector("on", to="goal")
    assert [(node(root, name).self_destruct, node(root, name).destroyed_in) for name in ("plain", "queue")] == [
        (False, None),
        (True, None),
    ]
    queue.remove_selector("on")
    root.sweep()
    left = node(root, "queue").destroyed_in
    assert left is not None and 0 < left <= 100
    aged = Path(queue.layout.alone)
    os.utime(aged, (aged.stat().st_mtime - 200,) * 2)
    assert node(root, "queue").destroyed_in == 0
    queue.add_selector("on", to="goal")
    assert node(root, "queue").destroyed_in is None


# -- what is stuck -------------------------------------------------------------------------------------------------


def test_a_selector_without_credit_is_stuck_once_a_message_waits_for_it(root: Root) -> None:
    source, goal = made(root, "source", "goal")
    source.add_selector("on", to="goal")
    source.send("a")
    source.route()
    assert edge(root.graph(), "source", "goal").stuck == ""
    source.send("b")
    source.send("c")
    says = "no credit left of 1: goal holds 1 message; 2 messages waiting"
    assert edge(root.graph(), "source", "goal").stuck == says
    take(goal).ack()
    assert edge(root.graph(), "source", "goal").stuck == ""


def test_a_credit_that_is_held_up_further_on_names_the_queue_that_holds_the_message(root: Root) -> None:
    source, goal, _ = made(root, "source", "goal", "end")
    source.add_selector("on", to="goal")
    goal.add_selector("on", to="end")
    source.send("a")
    source.route()
    goal.route()
    source.send("b")
    says = "no credit left of 1: end holds 1 message; 1 message waiting"
    assert edge(root.graph(), "source", "goal").stuck == says


def test_queues_that_are_full_missing_paused_or_closed_to_senders_are_stuck(root: Root) -> None:
    source, _ = made(root, "source", "paused")
    root.create_queue("full", max_unprocessed=1).send("x")
    source.add_selector("full", to="full", filter="n = 1")
    by_hand(source, "missing", 'to = "gone"\nfilter = "n = 2"\n')
    source.send("a", properties={"n": 1})
    root.queue("paused").pause()
    Path(root.queue("paused").layout.write_lock).touch()
    graph = root.graph()
    assert edge(graph, "source", "full").stuck == "full is full, or makes senders wait; 1 message waiting"
    assert edge(graph, "source", "gone").stuck == "gone is missing"
    assert [node.kind for node in graph.nodes if node.name == "gone"] == ["missing"]
    assert stuck(root, "full") == ("full: max_unprocessed is 1",)
    assert stuck(root, "paused") == ("paused", "senders wait for its write-lock")


def test_a_broken_selector_and_what_no_selector_takes_are_stuck(root: Root) -> None:
    source, _ = made(root, "source", "goal")
    source.add_selector("eu", to="goal", filter="region = 'eu'")
    source.send("us", properties={"region": "us"})
    source.send("asia", properties={"region": "asia"})
    assert stuck(root, "source") == (
        "2 messages: no selector takes it; when routers have looked for 60 s without a subscription it is unroutable, "
        "and none says in .dropq/routers that it looks",
    )
    by_hand(source, "broken", 'to = "goal"\nfilter = "n ="\n')
    first, second = stuck(root, "source")
    assert first.startswith("selector broken: its file cannot be used: filter: ")
    assert second == "2 messages: no selector takes it, and one of them cannot be used: broken.toml"


def test_a_route_that_takes_nothing_a_removed_selector_and_a_full_receiver_are_stuck(root: Root) -> None:
    (source,) = made(root, "source")
    Path(source.layout.routes_file).write_text("urgent.selector=x >\n")
    (Path(source.layout.routing) / "urgent.in-use").touch()
    assert edge(root.graph(), "source", "source/routing/urgent").stuck.startswith("it takes nothing: bad selector")
    by_hand(source, "on", 'to = "source2"\n')
    os.rename(f"{source.layout.selectors}/on.toml", f"{source.layout.selectors}/.on.removed")
    assert stuck(root, "source") == ("selector on is removed, and what it moved has not all returned",)
    topic = root.create_topic("news")
    copies = topic.create_subscription("s", client_id="c")
    Path(copies.layout.config_file).write_text("max_unprocessed = 1\n")
    topic.publish("first")
    topic.publish("second")
    (says,) = stuck(root, "news")
    assert says.startswith("1 message not distributed: ") and "news/s.c" in says


def test_a_queue_that_cannot_be_read_is_in_it_with_the_reason(root: Root) -> None:
    source, goal = made(root, "source", "goal")
    source.add_selector("on", to="goal")
    Path(goal.layout.config_file).write_text("lease_period = \n")
    assert stuck(root, "goal")[0].startswith("it cannot be read: line 1: ")
    assert edge(root.graph(), "source", "goal").kind == "move"


def test_a_folder_that_is_closed_to_this_user_is_in_it_with_the_reason(root: Root) -> None:
    source, goal = made(root, "source", "goal")
    source.add_selector("on", to="goal")
    for folder in (goal.layout.error, source.layout.selectors):
        os.chmod(folder, 0)

    def look() -> str:
        return repr([(node.name, node.stuck) for node in Root(root.path).graph().nodes])

    seen = unprivileged(look)
    for folder in (goal.layout.error, source.layout.selectors):
        os.chmod(folder, 0o755)
    assert "('goal', ('it cannot be read whole: Permission denied" in seen
    assert "('source', ('it cannot be read whole: Permission denied" in seen


def test_a_look_changes_nothing(root: Root) -> None:
    source, _ = made(root, "source", "goal")
    by_hand(source, "on", 'to = "goal"\n')
    source.send("a")
    before = {path: path.read_bytes() for path in root.path.rglob("*") if path.is_file()}
    graph = root.graph()
    assert (graph.mermaid(), graph.dot(), graph.svg()) == (graph.mermaid(), graph.dot(), graph.svg())
    assert {path: path.read_bytes() for path in root.path.rglob("*") if path.is_file()} == before


# -- its forms -----------------------------------------------------------------------------------------------------

ODD = 'we"ird <b>&amp; [x] `#1` | end; naïve'


@pytest.fixture
def graph(root: Root) -> Graph:
    """A graph with a circle, a node by itself, and names and filters that mean something in each form."""
    first, second, odd, _ = made(root, "first", "second", ODD, "alone")
    by_hand(first, "on", 'to = "second"\nfilter = "a < 1 AND b = \'\\"|]\' AND c <> \'&lt;\'"\n')
    by_hand(second, "on", f"to = '{ODD}'\ncredit = 5\n")
    by_hand(odd, "back", 'to = "first"\n')
    by_hand(odd, "gone", 'to = "gone"\n')
    by_hand(second, "far", 'to = "first"\nfilter = "x = 1"\n')
    first.send("a", properties={"a": 0})
    return root.graph()


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def edge_counts(graph: Graph) -> Counter[tuple[str, str]]:
    return Counter((edge.source, edge.to) for edge in graph.edges)


def test_mermaid_has_each_node_and_edge_once_and_no_name_breaks_it(graph: Graph) -> None:
    head, *lines = graph.mermaid().splitlines()
    assert head == "flowchart LR"
    called, edges = dict[str, str](), Counter[tuple[str, str]]()
    for line in lines:
        if node := re.fullmatch(r' {4}(n\d+)(?:\[|\{\{)"([^"<>&`|\[\]]*(?:<br/>[^"<>&`|\[\]]*)*)"(?:\]|\}\})', line):
            assert node[1] not in called
            called[node[1]] = _plain(node[2])[0]
        elif arrow := re.fullmatch(r' {4}(n\d+) -->\|"[^"|`]*"\| (n\d+)', line):
            edges[called[arrow[1]], called[arrow[2]]] += 1
        else:
            assert re.fullmatch(r" {4}(classDef stuck|class [n\d,]+ stuck|linkStyle \d+) ?.*", line), line
    assert (list(called.values()), edges) == (names(graph), edge_counts(graph))


def _plain(label: str) -> list[str]:
    """Return the lines of a label of Mermaid, as a browser shows them."""
    return [re.sub(r"#(\d+);", lambda code: chr(int(code[1])), line) for line in label.split("<br/>")]


def test_graphviz_has_each_node_and_edge_once_and_no_name_breaks_it(graph: Graph) -> None:
    text = r'"((?:[^"\\]|\\.)*)"'
    called, edges = dict[str, str](), Counter[tuple[str, str]]()
    first, *lines, last = graph.dot().splitlines()
    assert (first, last) == ("digraph dropq {", "}")
    for line in lines:
        if node := re.fullmatch(rf" {{4}}(n\d+) \[label={text}, shape=\w+[^\]\[]*\];", line):
            assert node[1] not in called
            label = unescape(re.split(r"(?<!\\)\\n", node[2])[0])
            called[node[1]] = re.sub(r"\\(.)", r"\1", label)
        elif arrow := re.fullmatch(rf" {{4}}(n\d+) -> (n\d+) \[label={text}[^\]\[]*\];", line):
            edges[called[arrow[1]], called[arrow[2]]] += 1
        else:
            assert re.fullmatch(r" {4}(rankdir=LR|(node|edge) \[[^\]]*\]);", line), line
    assert (list(called.values()), edges) == (names(graph), edge_counts(graph))


def boxes(picture: ElementTree.Element) -> dict[str, tuple[float, float, float, float]]:
    """The boxes of a picture, by the beginning of their titles: left, top, right and bottom."""
    found = {}
    for group in picture.findall(f"{SVG}g[@class='node']"):
        title, box = group.findtext(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None and box is not None
        x, y, width, height = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        found[title.split("; ")[0]] = (x, y, x + width, y + height)
    return found


def test_the_picture_has_each_node_and_edge_once_and_says_what_each_is(graph: Graph) -> None:
    picture = ElementTree.fromstring(graph.svg())
    titles = [group.findtext(f"{SVG}title") for group in picture.findall(f"{SVG}g[@class='node']")]
    assert [str(title).partition("; queue")[0].partition("; missing")[0] for title in titles] == names(graph)
    edges = picture.findall(f"{SVG}g[@class='edge']")
    assert [str(group.findtext(f"{SVG}title")).partition(": ")[0] for group in edges] == [
        f"{edge.source} -> {edge.to}" for edge in graph.edges
    ]
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert "1 waiting" in texts and "5 of 5 credits free" in texts and "gone is missing" in texts
    assert graph.svg().isascii()


def test_boxes_of_the_picture_lie_within_it_and_do_not_overlap(graph: Graph) -> None:
    picture = ElementTree.fromstring(graph.svg())
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    lying = list(boxes(picture).values())
    assert len(lying) == len(graph.nodes)
    for number, (left, top, right, bottom) in enumerate(lying):
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        for other in lying[number + 1 :]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert apart


def test_messages_go_from_left_to_right_in_the_picture_but_for_circles() -> None:
    nodes = tuple(Node(name, "queue") for name in "abcde")
    edges = tuple(Edge(pair[0], pair[1], "move", "m") for pair in ("ab", "bc", "cd", "ad", "da", "ee"))
    lying = boxes(ElementTree.fromstring(Graph(nodes, edges).svg()))
    assert lying["a"][2] < lying["b"][0] < lying["c"][0] < lying["d"][0]


def test_a_topic_with_a_thousand_subscriptions_is_drawn() -> None:
    nodes = (Node("topic", "topic"), *(Node(f"topic/s{number}.c", "subscription") for number in range(1000)))
    edges = tuple(Edge("topic", node.name, "subscription") for node in nodes[1:])
    assert len(boxes(ElementTree.fromstring(Graph(nodes, edges).svg()))) == 1001


def test_a_long_circle_is_drawn_too() -> None:
    nodes = tuple(Node(str(number), "queue") for number in range(200))
    edges = tuple(Edge(str(number), str((number + 1) % 200), "move", "on") for number in range(200))
    assert len(boxes(ElementTree.fromstring(Graph(nodes, edges).svg()))) == 200


#: Nodes that have notes, and what these say.
NOTED = [
    (
        Node("a", "queue", in_transit={"/mnt/far/eu": 1, "near": 2}),
        ["1 message on the way to /mnt/far/eu", "2 messages on the way to near"],
    ),
    (Node("b", "queue", self_destruct=True), ["destroys itself when nobody needs it"]),
    (Node("c", "queue", self_destruct=True, destroyed_in=24.1), ["nobody needs it: destroys itself in 25s"]),
    (Node("d", "queue", self_destruct=True, destroyed_in=0), ["nobody needs it: destroys itself at the next sweep"]),
    (
        Node("e", "queue", {"processing": 1}, self_destruct=True, destroyed_in=0),
        ["nobody needs it: destroys itself once no message is held"],
    ),
    (Node("f", "queue"), []),
]


@pytest.mark.parametrize(("noted", "notes"), NOTED)
def test_each_form_says_what_is_on_its_way_elsewhere_and_which_queue_destroys_itself(
    noted: Node, notes: list[str]
) -> None:
    graph = Graph((noted,), ())
    (line,) = (line for line in graph.mermaid().splitlines() if line.startswith("    n0["))
    (label,) = re.findall('"(.*)"', line)
    assert _plain(label)[1:] == [*filter(None, [graph_text.counted(noted)]), *notes]
    assert all(note in graph.dot() for note in notes) and graph.dot().count("itself") == len(re.findall("itself", line))
    (group,) = ElementTree.fromstring(graph.svg()).findall(f"{SVG}g[@class='node']")
    assert str(group.findtext(f"{SVG}title")).endswith("; ".join(notes) or "; queue")
    assert " ".join(notes) in " ".join(text.text or "" for text in group.findall(f"{SVG}text"))
    shown = io.StringIO()
    for tree in cli_graph._trees(graph):
        Console(file=shown, width=200).print(tree)
    assert shown.getvalue().strip().endswith("  ".join(notes) or "f")


# -- the command ---------------------------------------------------------------------------------------------------


def run(root: Root, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["--root", str(root.path), "graph", *words]) == 0
    return capsys.readouterr().out


def test_the_command_prints_a_line_for_each_node_and_edge(
    root: Root, graph: Graph, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line.split("\t") for line in run(root, capsys).splitlines()]
    assert [line[1] for line in lines[: len(graph.nodes)]] == names(graph)
    assert ["move", "second", "on", ODD, "", "normal", "5", "5", "", "", "", "", "", ""] in lines
    found = [json.loads(line) for line in run(root, capsys, "--json").splitlines()]
    assert [one["queue"] for one in found] == [*names(graph), *(edge.source for edge in graph.edges)]
    first = next(node for node in graph.nodes if node.name == "first")
    leaving = {"in_transit": {}, "self_destruct": False, "destroyed_in": None}
    assert {"kind": "queue", "queue": "first", **first.counts, "stuck": list(first.stuck), **leaving} in found
    (gone,) = (one for one in found if one.get("to") == "gone")
    assert (gone["stuck"], gone["granted"], gone["role"]) == (["gone is missing"], 1, "normal")


def test_the_command_prints_what_is_on_its_way_and_which_queue_destroys_itself(
    root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = root.create_queue("queue", self_destruct=True)
    in_transit(queue, "/mnt/far/eu", 1)
    lines = [line.split("\t") for line in run(root, capsys).splitlines()]
    assert lines[0][-1] == "1 message on the way to /mnt/far/eu; destroys itself when nobody needs it"
    (found,) = (json.loads(line) for line in run(root, capsys, "--json").splitlines())
    assert (found["in_transit"], found["self_destruct"], found["destroyed_in"]) == ({"/mnt/far/eu": 1}, True, None)


def test_lines_and_the_tree_say_which_selectors_are_asked_last(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    source, _, _ = made(root, "source", "rest", "spare")
    source.add_selector("others", to="rest", role="default")
    source.add_selector("full", to="spare", role="overflow")
    lines = [line.split("\t")[:6] for line in run(root, capsys).splitlines() if line.startswith("move")]
    assert lines == [
        ["move", "source", name, to, "", role]
        for name, to, role in [("full", "spare", "overflow"), ("others", "rest", "default")]
    ]
    shown = io.StringIO()
    for tree in cli_graph._trees(root.graph()):
        Console(file=shown, width=200).print(tree)
    assert "move full (overflow) → spare" in shown.getvalue()
    assert "move others (default) → rest" in shown.getvalue()


@pytest.mark.parametrize("form", ["mermaid", "dot", "svg"])
def test_the_command_prints_each_form(root: Root, graph: Graph, capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert run(root, capsys, "--format", form) == getattr(graph, form)()
    assert cli.main(["--root", str(root.path), "graph", "--json", "--format", form]) == USAGE


def test_the_command_refuses_a_folder_that_is_no_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--root", str(tmp_path), "graph"]) == 66
    assert "no queues" in capsys.readouterr().err
