"""Take pictures of the page in a real Chromium: `python docs/draw_web.py [FOLDER]` writes docs/web/*.png.

They show a copy of sample_root, in which ten minutes of work go by on a clock of their own: each run draws the same.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

from playwright.sync_api import sync_playwright
from waitress.server import create_server

from dropq import Root
from dropq.lifecycle.timing import Timing
from dropq.web import Application, application

DOCS = Path(__file__).parent
#: When the work begins, in ms since 1970: a Monday morning, after all that lies in sample_root.
BEGIN = 1_748_857_000_000
#: For how many steps it goes on, and how many ms each takes.
STEPS, STEP = 61, 10_000
#: Consumers look and sweep for each message, not as often as the time allows that it takes to draw.
AT_ONCE = Timing(max_age=0, listing_share=0, sweep_interval=0, sweep_share=0)
#: Milliseconds that the browser waits for a page, on a busy machine.
PATIENCE = 600_000
#: A message of sample_root that failed.
FAILED = "4.1748852460000000-7692592605.T.....JMSXDeliveryCountI%3D2"


class Picture(NamedTuple):
    """A picture: its page, its width and its colours."""

    path: str
    width: int = 1200
    scheme: str = "light"


PICTURES = {
    "root": Picture(""),
    "root-dark": Picture("", scheme="dark"),
    "queue": Picture("queue?q=orders"),
    "queue-narrow": Picture("queue?q=orders", width=360),
    "messages": Picture("messages?q=orders&state=error&newest=1"),
    "message": Picture(f"message?q=orders&state=error&id={FAILED}"),
}


class Clock:
    """A clock that is set by hand."""

    ms = BEGIN

    def now_ms(self) -> int:
        """Return the time that was set."""
        return self.ms


def work(root: Root, clock: Clock, page: Application) -> None:
    """Let ten minutes go by: orders come, some fail, a few wait; look at the queues each ten seconds."""
    chance, site = random.Random(7), page.site
    orders, invoices = root.queue("orders"), root.queue("invoices")
    site.viewer.wait()
    with orders.subscribe() as consumer, invoices.subscribe() as bookkeeper:
        for step in range(STEPS):
            for _ in range(chance.randrange(12) if step < 40 else 9):
                orders.send(b'{"item": 7}', type="order", properties={"region": chance.choice(("EU", "US"))})
            for _ in range(chance.randrange(6, 12) if step < 40 else 3):
                if (message := consumer.receive()) is None:
                    break
                if chance.randrange(60):
                    message.ack()
                else:
                    assert message._claim is not None
                    message._claim.taken = 0.0  # how long it really took differs from run to run
                    message.fail("no answer from stock:5432")
            invoices.send(b"invoice", type="invoice")
            if step % 2 and (message := bookkeeper.receive()) is not None:
                message.ack()
            for queue in (orders, invoices):
                queue.context.log.sums.tell()
            clock.ms += STEP
            for seen in site.viewer.all():
                seen.last, seen.looked = seen.look(), clock.ms / 1000
            site.trends.note(site.viewer)
    clock.ms += 1400  # so old are the looks that the pictures show


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the page of a copy of sample_root after the work; yield its address."""
    clock, root_folder = Clock(), folder / "shop"
    shutil.copytree(DOCS.parent / "sample_root", root_folder)
    with ExitStack() as stack:
        time = SimpleNamespace(monotonic=lambda: clock.ms / 1000)
        now = SimpleNamespace(now=lambda zone: datetime.fromtimestamp(clock.ms / 1000, UTC))
        stack.enter_context(patch("dropq.web.pages.time", time))
        stack.enter_context(patch("dropq.web.app.datetime", now))
        root = Root(root_folder, clock=clock)
        root.context.ids._random.seed(1)
        root.context = replace(root.context, timing=AT_ONCE)
        page = application(root, writable=True, key="key")
        stack.enter_context(patch.object(page, "look"))  # it has looked
        work(root, clock, page)
        server = create_server(page, host="127.0.0.1", port=0)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.effective_port}{page.link}"
        server.close()


def main(folder: Path) -> None:
    """Take the pictures."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("there is no chromium: apt-get install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made, served(Path(made)) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=PATIENCE)
        for name, picture in PICTURES.items():
            scheme = "dark" if picture.scheme == "dark" else "light"
            view = browser.new_page(viewport={"width": picture.width, "height": 600}, color_scheme=scheme)
            view.set_default_timeout(PATIENCE)
            view.goto(address + picture.path)
            view.screenshot(path=folder / f"{name}.png", full_page=True)
            view.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "web")
