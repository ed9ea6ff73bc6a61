"""What the tests of the page share: a shop with one of each thing, a server in this process, and each page by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from playwright.sync_api import ConsoleMessage, Dialog, Locator, Page, Request
from waitress.server import create_server
from waitress.wasyncore import close_all

from dropq import Message, Queue, Root
from dropq.web import Application, application

TRACEBACK = 'Traceback (most recent call last):\n  File "ship.py", line 7, in ship\n' + "KeyError: 'street' " * 12


@contextmanager
def served(root: Root, **options: Any) -> Iterator[tuple[str, Application]]:
    """Serve the page of a root in this process; yield its address and the application, once each queue was seen."""
    page = application(root, **options)
    page.site.viewer.wait()
    server: Any = create_server(page, host="127.0.0.1", port=0, threads=8)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with ExitStack() as stack:
            for limit in ("disk.PATIENCE", "acts.SLICE", "acts.FILTERING", "pages.FILTERING"):
                stack.enter_context(patch(f"dropq.web.{limit}", 600.0))  # as long as a busy machine takes
            yield f"http://127.0.0.1:{server.effective_port}{page.link}", page
    finally:
        page.end(0)
        server.trigger.pull_trigger(lambda: close_all(server._map))
        thread.join(60)
        server.task_dispatcher.shutdown()
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def shop(folder: Path) -> Iterator[Root]:
    """Make a root in which there is one of each thing that pages show; messages are held until it ends."""
    root = Root.create(folder)
    options: dict[str, Any] = {"durability": "none", "redelivery_delay": 0}
    orders = root.create_queue("orders", max_deliveries=9, **options)
    letters, still = root.create_queue("letters", **options), root.create_queue("still", **options)
    long = root.create_queue("a" * 120 + ".of-which-the-name-is-long", **options)
    with ExitStack() as stack:
        for number in range(4):
            _failed(orders, number)
        for body, settle in ((b"done", Message.ack), (b"late", Message.expire)):
            orders.send(body, type="order")
            _taken(orders, settle)
        letters.send(b"a letter")
        orders.send(b"held", type="order", priority=9)
        holder = stack.enter_context(orders.subscribe(client_id="packer-of-the-night-shift"))
        assert holder.receive() is not None
        for number in range(3):
            region = {"region": "EU" if number else "US", "amount": 100 * number, "note": "n" * 300}
            orders.send(
                b'{"item": 7}', type="order", properties=region, correlation_id=f"c{number}", reply_to="letters"
            )
        orders.send(b"tomorrow", delay=86_400)
        still.send(b"x" * 200_000)
        still.pause()
        long.send("ü" * 50)
        yield root
        for queue in (orders, letters, still, long):
            queue.close()


def _failed(queue: Queue, number: int) -> None:
    """Let a message fail for good, with all that a handler may say of it."""
    region = "EU" if number % 2 else "US"
    queue.send(b'{"order": 1}', type="order", properties={"region": region, "number": number})
    _taken(queue, lambda message: message.fail("no street", traceback=TRACEBACK, stderr="warning: old file\n" * 9))
    _taken(queue, lambda message: message.reject("no street", traceback=TRACEBACK, stderr="warning: old file\n" * 9))


def _taken(queue: Queue, settle: Callable[[Message], None]) -> None:
    if (message := queue.receive()) is not None:
        settle(message)


class Watch:
    """Sees what a page does beyond showing itself: dialogs, requests to elsewhere, what its console says."""

    def __init__(self, page: Page, address: str) -> None:
        self.requests: list[Request] = []
        self.dialogs: list[str] = []
        self.said: list[str] = []
        self._host = urlsplit(address).netloc
        page.on("request", lambda request: self.requests.append(request))
        page.on("dialog", self._dismiss)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.said.append(str(error)))

    def _dismiss(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def _hear(self, message: ConsoleMessage) -> None:
        if "responded with a status of" not in message.text:  # a page that says what is wrong has such a status
            self.said.append(message.text)

    def check(self) -> None:
        """See that nothing of the kind was there."""
        elsewhere = {request.url for request in self.requests if urlsplit(request.url).netloc != self._host}
        assert not elsewhere, "a page asked another host"
        assert not self.dialogs and not self.said
        assert all(request.resource_type in ("document", "stylesheet") for request in self.requests)


def press(button: Locator) -> None:
    """Press what leads to another page, and wait for that."""
    with button.page.expect_navigation():
        button.click()


#: How each page is come to, from the root's; those behind a form only with buttons.
Way = Callable[[Page, str], Any]


def _press(path: str, button: str, *, of_ticked: bool = False) -> Way:
    def way(page: Page, address: str) -> None:
        page.goto(address + path)
        if of_ticked:
            page.locator("tbody input").first.check()
        buttons = page.get_by_role("button", name=button)
        press(buttons.first if of_ticked else buttons.last)

    return way


def _then(way: Way, act: Callable[[Page], None]) -> Way:
    def both(page: Page, address: str) -> None:
        way(page, address)
        act(page)

    return both


def _to(path: str) -> Way:
    return lambda page, address: page.goto(address + path)


def _message(state: str) -> Way:
    def way(page: Page, address: str) -> None:
        page.goto(f"{address}messages?q=orders&state={state}")
        press(page.locator("tbody a.id").first)

    return way


READ: dict[str, Way] = {
    "the root": _to("?still=1"),
    "a queue": _to("queue?q=orders&still=1"),
    "a paused queue": _to("queue?q=still&still=1"),
    "a queue with a long name": _to("queue?still=1&q=" + "a" * 120 + ".of-which-the-name-is-long"),
    "what waits": _to("messages?q=orders"),
    "what is held": _to("messages?q=orders&state=processing"),
    "what failed": _to("messages?q=orders&state=error&newest=1"),
    "what a filter found": _to("messages?q=orders&state=error&filter=region%20%3D%20'EU'"),
    "nothing": _to("messages?q=orders&state=working"),
    "a filter with a mistake": _to("messages?q=orders&filter=region%20%3D%3D%3D%20" + "'EU'" * 40),
    "a message that waits": _message("target"),
    "a message that failed": _message("error"),
    "a message that is held": _message("processing"),
    "a message that moved on": _to("message?q=orders&state=error&id=" + "7" * 80),
    "the log": _to("log?q=orders"),
    "a problem": _to("queue?q=none"),
}
_PURGE = _press("messages?q=letters&state=target", "Purge all")
ACTED: dict[str, Way] = {
    "a plan for some": _press("messages?q=orders&state=error", "Requeue", of_ticked=True),
    "a plan for all": _press("messages?q=orders&state=error", "Purge"),
    "a plan to purge": _PURGE,
    "a question": _press("queue?q=orders&still=1", "Pause"),
    "what was done": _then(
        _press("messages?q=orders&state=expired", "Requeue", of_ticked=True),
        lambda page: press(page.locator("form button").last),
    ),
    "what was switched": _then(
        _press("queue?q=letters&still=1", "Pause"), lambda page: press(page.get_by_role("button", name="Pause it"))
    ),
}
