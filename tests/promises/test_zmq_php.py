"""Clients in PHP, as PZQ's own are: the same sockets, frames and calls, on PHP's own binding of libzmq."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import until, where

from dropq import Queue, Root

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'dropq[zmq]'")
pytestmark = pytest.mark.host

from zeromq import Served, served  # noqa: E402

#: PZQ's producer: an XREQ socket that polls for the answer to each message; prints each answer.
PRODUCER = """
$socket = new ZMQSocket(new ZMQContext(), ZMQ::SOCKET_XREQ);
$socket->connect($argv[1]);
$poll = new ZMQPoll();
$poll->add($socket, ZMQ::POLL_IN);
foreach (json_decode($argv[2]) as $i => $parts) {
    $socket->sendMulti(array_merge(array("id-$i", ""), $parts));
    $r = $w = array();
    $poll->poll($r, $w, 60000);
    echo json_encode($socket->recvMulti()), "\\n";
}
"""
#: PZQ's consumer: an XREP socket; it drops what is out of time, gives back the first delivery, acknowledges the rest,
#: and prints each.
CONSUMER = """
$socket = new ZMQSocket(new ZMQContext(), ZMQ::SOCKET_XREP);
$socket->connect($argv[1]);
for ($i = 0; $i < $argv[2]; $i++) {
    $parts = $socket->recvMulti();
    if (microtime(true) - $parts[2] / 1000000 > $parts[3] / 1000000) { $i--; continue; }
    $socket->sendMulti(array($parts[0], $parts[1], $i ? "1" : "0"));
    echo json_encode(array_slice($parts, 1)), "\\n";
}
"""
#: PZQ's monitor: a REQ socket, whose answer is taken apart by lines and ": ".
MONITOR = """
$socket = new ZMQSocket(new ZMQContext(), ZMQ::SOCKET_REQ);
$socket->connect($argv[1]);
$socket->send("MONITOR");
foreach (array_filter(explode("\\n", $socket->recv())) as $line) {
    $pieces = explode(": ", $line);
    $data[$pieces[0]] = $pieces[1];
}
echo json_encode($data), "\\n";
"""


@pytest.fixture(autouse=True, scope="module")
def _php() -> None:
    if shutil.which("php") is None:
        pytest.skip("PHP is not installed: apt-get install php-cli php-zmq")
    if "zmq" not in subprocess.run(["php", "-m"], capture_output=True, text=True, check=True).stdout.split():
        pytest.skip("PHP has no zmq: apt-get install php-zmq")


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    """A queue."""
    return Root.create(tmp_path / "root").create_queue("orders", durability="none")


@pytest.fixture
def serving(queue: Queue) -> Iterator[Served]:
    """A server of the queue, with the defaults."""
    with served(queue, ack_timeout=60) as serving:
        yield serving


def php(script: str, *arguments: object) -> list[Any]:
    """Run a script, and return what it prints."""
    line = ["php", "-r", script, "--", *map(str, arguments)]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert (ran.returncode, ran.stderr) == (0, "")
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_a_producer_gets_an_answer_to_each_message(serving: Served, queue: Queue) -> None:
    bodies = [["body"], ["head", "", "body"], [""]]
    assert php(PRODUCER, serving.bound["receive"], json.dumps(bodies)) == [[f"id-{n}", "1", ""] for n in range(3)]
    assert sorted(where(queue)["target"]) == [b"", b"body", b"headbody"]


def test_a_consumer_gets_back_at_once_what_it_gives_back(serving: Served, queue: Queue) -> None:
    php(PRODUCER, serving.bound["receive"], json.dumps([["head", "", "body"]]))
    first, again = php(CONSUMER, serving.bound["send"], 2)
    (key, _, timeout, *parts), (same, _, _, *other) = first, again
    assert (parts, timeout) == (["", "head", "", "body"], "60000000")
    assert (same, other) == (key, parts)
    until(lambda: where(queue) == {"processed": [b"headbody"]}, "the ack")


def test_a_monitor_gets_the_lines_that_it_knows(serving: Served, queue: Queue) -> None:
    queue.send(b"body")
    (data,) = php(MONITOR, serving.bound["monitor"])
    assert (data["messages"], data["messages_in_flight"], data["db_size"]) == ("1", "0", "4")
    assert {"in_flightdb_size", "syncs", "expired_messages"} <= data.keys()
