"""Draw the graph of a small root as an SVG: `python docs/draw_graph.py > docs/graph.svg`.

Orders go by their region to two queues, under credits, and on from there; one that is too heavy is a dead letter. A
copy of each order goes to a queue of its own. The picture is what `dropq graph --format svg` prints of that root, while
some of the orders are on their way.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from dropq import Root


def build(root: Root) -> None:
    """Make the queues and their selectors; send orders, and let some of them go on."""
    for name in ("orders", "audit", "shipping"):
        root.create_queue(name, durability="none")
    for name in ("eu", "us"):
        root.create_queue(name, durability="none", unroutable_after="0s")
    orders, eu, us = map(root.queue, ("orders", "eu", "us"))
    orders.add_selector("audit", op="copy", to="audit")
    orders.add_selector("eu", to="eu", filter="region = 'eu'", credit=5)
    orders.add_selector("us", to="us", filter="region = 'us'", credit=2)
    for queue in (eu, us):
        queue.add_selector("ship", to="shipping", filter="weight < 30", credit=2)
    for region, weight in (("us", 5), ("eu", 2), ("us", 50), ("eu", 7), ("us", 9), ("eu", 1), ("us", 3), ("us", 8)):
        orders.send("{}", properties={"region": region, "weight": weight})
    for queue in (orders, orders, eu, us, orders):
        queue.route()
    message = root.queue("shipping").receive()
    assert message is not None
    message.ack()
    root.queue("shipping").close()


def main() -> None:
    """Print the picture."""
    with tempfile.TemporaryDirectory() as folder:
        root = Root.create(folder)
        Path(root.layout.config_file).write_text('format = 1\ndead_letter_queue = "letters"\n')
        root = Root(folder)
        root.create_queue("letters", durability="none")
        build(root)
        print(root.graph().svg(), end="")


if __name__ == "__main__":
    main()
