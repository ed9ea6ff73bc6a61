"""The page: who gets an answer, what a form may do, and that neither a disk, nor a client, nor a name stops it.

The application is asked directly where that is enough, and `dropq web` over its sockets where these matter.
"""

from __future__ import annotations

import errno
import html
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlencode
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from children import in_child, unprivileged
from helpers import (
    archive,
    base,
    drop,
    events,
    first_and_long,
    make_queue,
    next_moment,
    open_files,
    sums,
    take,
    until,
    where,
)
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("waitress", reason="the extra web is not installed: pip install 'dropq[web]'")
pytest.importorskip("werkzeug")
pytest.importorskip("jinja2")

from test_cli import environment, process
from test_overview import make_due
from torture.mounts import mounted, passthrough
from torture.table import NotRun
from werkzeug.test import Client, TestResponse

from dropq import Queue, Root
from dropq.cli import main as cli
from dropq.format.layout import ALL_STATES
from dropq.format.printable import escape
from dropq.lifecycle.moving import Moves
from dropq.policies.matching import matcher
from dropq.queue import browsing
from dropq.upkeep import bulk
from dropq.web import Application, acts, application, pages
from dropq.web import app as app_module
from dropq.web import disk as disk_module
from dropq.web.arguments import FILTER_LIMIT, NAMED, VERBS
from dropq.web.guard import FORM_LIMIT, HEADERS
from dropq.web.pages import PAGES

KEY = "0123456789abcdefghijkl"
#: What a browser sends with a form of the page itself.
OURS = {"Sec-Fetch-Site": "same-origin"}
#: A name that anybody may give a file: quotes, a line, a letter that turns the direction, and bytes that are no UTF-8.
ODD = "a\"b'c\\d\n\u202e<b>&" + os.fsdecode(b"\xff\xfe") + ".csv"


#: The pages that tests made, which end with each.
MADE: list[Application] = []


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Let no page look at queues after its test."""
    yield
    while MADE:
        MADE.pop().end(0)


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk, filters and acts have as long as a busy machine takes."""
    monkeypatch.setattr(disk_module, "PATIENCE", 600.0)
    monkeypatch.setattr(acts, "SLICE", 600.0)
    for module in (pages, acts):
        monkeypatch.setattr(module, "FILTERING", 600.0)


class Browser(Client):
    """A client that reads each answer to its end."""

    def open(self, *args: Any, **options: Any) -> TestResponse:
        answer = super().open(*args, buffered=True, **options)
        for _, value in answer.headers:  # else a server cannot send it
            assert value.isascii() and value.isprintable()
        return answer


class Site:
    """A root with a page, and who asks for it."""

    def __init__(self, root: Root, **options: Any) -> None:
        self.root = root
        self.page = application(root, key=KEY, **{"writable": True, **options})
        self.client = Browser(self.page)
        MADE.append(self.page)

    def get(self, path: str = "", **asked: Any) -> TestResponse:
        """Ask for a page, by the parameters of its address."""
        return self.client.get(f"/{KEY}/{path}", query_string=urlencode(asked, errors="surrogateescape"))

    def post(self, headers: dict[str, str] | None = None, /, **form: Any) -> TestResponse:
        """Send a form, as the page itself does."""
        return self.client.post(f"/{KEY}/do", data=form, headers=OURS if headers is None else headers)

    def act(self, verb: str, *files: str, state: str = "error", q: str = "q", **more: Any) -> TestResponse:
        """Do what a plan said: to these files, or to all that lie there."""
        chosen = {"which": "ticked", "id": [escape(file) for file in files]} if files else {"which": "all"}
        confirm = {"confirm": escape(q)} if verb == "purge" else {}
        form = {"verb": verb, "q": escape(q), "state": state, "step": "do", **confirm, **chosen, **more}
        return self.post(**{"until": self.now(), **form})

    def now(self) -> int:
        """The time that a plan would have, made now."""
        return self.root.context.clock.now_ms()

    def looked(self) -> None:
        """Wait until each queue was looked at."""
        self.page.look()
        until(lambda: (seen := self.page.site.viewer.all()) and all(one.last for one in seen), "the first looks")


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    """The queue q of a root, in which what fails ends in error/ at once."""
    return make_queue(tmp_path / "root", redelivery_attempts=0)


@pytest.fixture
def site(queue: Queue) -> Site:
    """The page of the root, with buttons."""
    return Site(queue.root)


def failed(queue: Queue, *bodies: bytes) -> list[str]:
    """Let messages fail; return their files in error/, in the same order."""
    files = list[str]()
    for body in bodies:
        queue.send(body)
        message = take(queue)
        before = {each.file for each in queue.browse("error")}
        message.reject(f"no {body.decode()}")
        files += {each.file for each in queue.browse("error")} - before
    return files


def tree(root: Root) -> dict[str, tuple[int, bytes]]:
    """All files below a root, with their inodes and contents; what tells the server's time is left out."""
    found = {}
    for folder, _, names in os.walk(root.path):
        for name in names:
            path = os.path.join(folder, name)
            if name != "clock" and not name.startswith(".probe"):
                content = (
                    b"" if not os.path.isfile(path) or os.path.getsize(path) > 1 << 20 else Path(path).read_bytes()
                )
                found[path] = (os.lstat(path).st_ino, content)
    return found


def said(answer: TestResponse) -> str:
    """What a page says to people: its text without tags."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", answer.text)).split())


# -- a process of its own --------------------------------------------------------------------------------------------


class Web(NamedTuple):
    """A process of `dropq web`, what it printed, and how it is asked."""

    process: subprocess.Popen[bytes]
    printed: str
    key: str
    connect: Callable[[], socket.socket]

    def ask(self, request: bytes) -> bytes:
        """Send bytes; return all that comes back, until the process ends the connection."""
        with self.connect() as connection:
            connection.sendall(request)
            answer = b""
            with suppress(ConnectionResetError):  # it did not read all that was sent
                while data := connection.recv(1 << 16):
                    answer += data
            return answer

    def get(self, path: str = "", *headers: str, host: str = "localhost") -> bytes:
        """Ask for a page below the key."""
        lines = (f"GET /{self.key}/{path} HTTP/1.0", f"Host: {host}", *headers, "", "")
        return self.ask("\r\n".join(lines).encode("latin-1"))

    def post(self, form: dict[str, str], *headers: str) -> bytes:
        """Send a form, as the page itself does."""
        text = urlencode(form)
        lines = (
            *(f"POST /{self.key}/do HTTP/1.0", "Host: localhost", "Sec-Fetch-Site: same-origin", *headers),
            *("Content-Type: application/x-www-form-urlencoded", f"Content-Length: {len(text)}", "", text),
        )
        return self.ask("\r\n".join(lines).encode())


@contextmanager
def served(root: Root, *options: str, **more: Any) -> Iterator[Web]:
    """Run `dropq web` until the block ends; on a free port, if the options do not say where."""
    argv = ["--root", str(root.path), "web", *options]
    if not any(each.startswith("--listen") for each in options):
        argv += ["--listen", "127.0.0.1:0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with process(*argv, **{**pipes, **more}) as child:
        try:
            assert child.stdout is not None
            printed = child.stdout.readline().decode().strip()
            assert printed, child.stderr and child.stderr.read()
            yield Web(child, printed, *reached(printed))
        finally:
            child.kill()


def reached(printed: str) -> tuple[str, Callable[[], socket.socket]]:
    """Return the key that a process printed, and what connects to it."""
    if found := re.fullmatch(r"http://(.+):([0-9]+)/([\w-]{22})/", printed):
        return found[3], lambda: socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=600)
    path, _, link = printed.partition("\t")

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(600)
        connection.connect(path)
        return connection

    return link.strip("/"), connect


def status(answer: bytes) -> int:
    """The status of an answer."""
    return int(answer.split(b" ", 2)[1])


# -- who gets an answer ----------------------------------------------------------------------------------------------


def test_every_path_that_is_not_below_the_key_gets_the_same_answer(site: Site) -> None:
    other_case = KEY.swapcase()
    paths = [
        *(
            "/",
            "/queue",
            "/do",
            "/style.css",
            "/favicon.ico",
            f"/{KEY[:-1]}/",
            f"/{KEY}x/",
            f"//{KEY}/",
            f"/{other_case}/",
        ),
        *("/%2e%2e/", f"/%2e%2e/{KEY}/", f"/?key={KEY}", f"/?{KEY}", f"/x/{KEY}/", f"/{KEY}/nothing", f"/{KEY}//"),
        *(f"/{KEY}/%2e%2e/{KEY}/", f"/{KEY}/queue/", f"/%00{KEY}/", f"/{KEY}\xe9/", f"/{KEY[:-1]}%FF/"),
    ]
    answers = [site.client.open(path, method=method) for path in paths for method in ("GET", "POST")]
    assert {answer.status_code for answer in answers} == {404}
    assert len({(answer.data, tuple(answer.headers)) for answer in answers}) == 1
    for host in ("localhost", "evil.example"):  # who does not know the key learns nothing from the host either
        assert site.client.get("/queue", headers={"Host": host}).data == answers[0].data


def test_without_buttons_and_bodies_their_addresses_are_not_there(queue: Queue) -> None:
    site = Site(queue.root, writable=False, bodies=False)
    nothing = site.get("nothing")
    for answer in (site.get("body", q="q", id="x"), site.get("do"), site.post(verb="pause", q="q", step="do")):
        assert (answer.status_code, answer.data, tuple(answer.headers)) == (404, nothing.data, tuple(nothing.headers))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1:8077", "[::1]", "[::1]:9000", "localhost:65535"])
def test_the_page_answers_to_loopback_by_any_port(site: Site, host: str) -> None:
    assert site.client.get(f"/{KEY}/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "localhost.evil.example", "localhost:80@evil", "localhost, localhost", "localhost ",
     "127.0.0.2", "0.0.0.0", "[::]", "localhost:", "localhost:x", "localhost.", "\u0131localhost", "127.0.0.1.nip.io"],
)  # fmt: skip
def test_to_any_other_host_it_does_not_answer(site: Site, host: str) -> None:
    answer = site.client.get(f"/{KEY}/", environ_overrides={"HTTP_HOST": host.encode().decode("latin-1")})
    assert answer.status_code == 421 and KEY not in answer.text


def test_the_key_without_a_slash_leads_to_the_page(site: Site) -> None:
    answer = site.client.get(f"/{KEY}")
    assert (answer.status_code, answer.headers["Location"]) == (308, f"{KEY}/")  # relative: any prefix does


def test_each_answer_tells_the_browser_what_it_may_do(site: Site, queue: Queue) -> None:
    (file,) = failed(queue, b"x")
    answers = [
        *(
            site.get(),
            site.get("queue", q="q"),
            site.get("messages", q="q"),
            site.get("style.css"),
            site.get("nothing"),
        ),
        *(site.get("message", q="q", state="error", id=file), site.get("body", q="q", state="error", id=file)),
        *(site.get("log", q="q"), site.get("queue", q="nowhere"), site.get("queue", other="1"), site.client.get("/")),
        *(site.post({"Origin": "null"}), site.act("pause", which="ticked", step="plan"), site.client.put(f"/{KEY}/")),
        *(
            site.client.get(f"/{KEY}"),
            site.client.get(f"/{KEY}/", headers={"Host": "evil"}),
            site.client.head(f"/{KEY}/"),
        ),
    ]
    for answer in answers:
        assert HEADERS.items() <= dict(answer.headers).items(), answer.status
        assert "Set-Cookie" not in answer.headers
    assert (
        "default-src 'none'" in HEADERS["Content-Security-Policy"]
        and "script" not in HEADERS["Content-Security-Policy"]
    )
    assert HEADERS["Referrer-Policy"] == "same-origin" and HEADERS["Cache-Control"] == "no-store"


def test_only_what_is_looked_at_asks_for_itself_again(site: Site, queue: Queue) -> None:
    (file,) = failed(queue, b"x")
    site.looked()
    assert site.get().headers["Refresh"] == site.get("queue", q="q").headers["Refresh"] == "5"
    for answer in (
        *(
            site.get(still="1"),
            site.get("queue", q="q", still="1"),
            site.get("messages", q="q"),
            site.get("log", q="q"),
        ),
        *(
            site.get("message", q="q", state="error", id=file),
            site.act("requeue", file),
            site.get("queue", q="nowhere"),
        ),
    ):
        assert "Refresh" not in answer.headers


def test_head_answers_as_get_without_a_body(site: Site, queue: Queue) -> None:
    (file,) = failed(queue, b"body")
    site.looked()
    for path in ("", "queue?q=q&still=1", "messages?q=q", "style.css", f"body?q=q&state=error&id={file}"):
        got, head = (site.client.open(f"/{KEY}/{path}", method=method) for method in ("GET", "HEAD"))
        assert (head.status_code, head.data) == (200, b"")
        assert head.headers["Content-Type"] == got.headers["Content-Type"]
    before = open_files()
    for _ in range(10):
        assert site.client.head(f"/{KEY}/body?q=q&state=error&id={file}").headers["Content-Length"] == "4"
    until(lambda: open_files() <= before, "the files to be closed")


# -- what a form may do ----------------------------------------------------------------------------------------------


def forged(site: Site, file: str) -> dict[str, Callable[[], TestResponse]]:
    """Forms that are not as the page makes them, each of which would remove or move a message."""
    path, now = f"/{KEY}/do", site.now()
    ticked = {"verb": "requeue", "q": "q", "state": "error", "which": "ticked", "id": file, "step": "do", "until": now}
    purge = {**ticked, "verb": "purge", "confirm": "q"}

    def post(form: Any = ticked, headers: dict[str, str] = OURS, **more: Any) -> Callable[[], TestResponse]:
        return lambda: site.client.post(path, data=form, headers=headers, **more)

    def without(*names: str) -> dict[str, Any]:
        return {key: value for key, value in ticked.items() if key not in names}

    text, urlencoded = urlencode(ticked), "application/x-www-form-urlencoded"
    return {
        "another site": post(headers={"Sec-Fetch-Site": "cross-site"}),
        "another port": post(headers={"Sec-Fetch-Site": "same-site"}),
        "typed by a person": post(headers={"Sec-Fetch-Site": "none"}),
        "odd fetch site": post(headers={"Sec-Fetch-Site": "same-origin, cross-site"}),
        "origin null": post(headers={"Origin": "null"}),
        "origin of another": post(headers={"Origin": "http://evil.example"}),
        "origin of another port": post(headers={"Origin": "http://localhost:81"}),
        "origin with a user": post(headers={"Origin": "http://localhost@evil.example"}),
        "origin that is no address": post(headers={"Origin": "http://[evil"}),
        "get": lambda: site.client.get(f"{path}?{text}", headers=OURS),
        "get with a form": lambda: site.client.get(path, data=ticked, headers=OURS),
        "put": lambda: site.client.put(path, data=ticked, headers=OURS),
        "another page": lambda: site.client.post(f"/{KEY}/messages", data=ticked, headers=OURS),
        "override": lambda: site.client.get(f"{path}?{text}", headers={**OURS, "X-HTTP-Method-Override": "POST"}),
        "override in the form": post({**ticked, "_method": "POST"}),
        "in the address": lambda: site.client.post(f"{path}?{text}", data={}, headers=OURS),
        "multipart": post(ticked, content_type="multipart/form-data"),
        "json": post(json.dumps(ticked), content_type="application/json"),
        "text": post(text, content_type="text/plain"),
        "no type": post(text, content_type=""),
        "too long": post({**ticked, "filter": "x" * (FORM_LIMIT + 1)}),
        "no UTF-8": post(b"\xff\xfe=" + text.encode(), content_type=urlencoded),
        "unknown parameter": post({**ticked, "all": "1"}),
        "repeated": post({**ticked, "state": ["error", "error"]}),
        "two queues": post({**ticked, "q": ["q", "other"]}),
        "no verb": post(without("verb")),
        "no queue": post(without("q")),
        "no step": post(without("step")),
        "no id": post(without("id")),
        "no state": post(without("state")),
        "no state of a purge": post({**without("state", "id"), "verb": "purge", "confirm": "q", "which": "all"}),
        "no time": post(without("until")),
        "time of the future": post({**ticked, "until": now + 60_000}),
        "time of the past": post({**ticked, "until": 1}),
        "no time at all": post({**ticked, "until": "soon"}),
        "time below 0": post({**ticked, "until": -1}),
        "odd digits": post({**ticked, "until": "\u0661"}),
        "another verb": post({**ticked, "verb": "delete"}),
        "another state": post({**ticked, "state": "private"}),
        "state that is a path": post({**ticked, "state": "../error"}),
        "of another queue": post({**ticked, "q": "other"}),
        "a queue that is not there": post({**ticked, "q": "nowhere"}),
        "a queue that is a path": post({**ticked, "q": "../root/q"}),
        "an id that is a path": post({**ticked, "id": f"../error/{file}"}),
        "an id that is a folder": post({**ticked, "id": "."}),
        "too many ids": post({**ticked, "id": [file, *map(str, range(NAMED))]}),
        "requeued from target": post({**ticked, "state": "target", "which": "all"}),
        "requeued from working": post({**ticked, "state": "working", "which": "all"}),
        "purged from working": post({**purge, "state": "working", "which": "all"}),
        "purged without its name": post(purge | {"confirm": ""}),
        "purged with another name": post(purge | {"confirm": "Q"}),
        "purged with no name": post({key: value for key, value in purge.items() if key != "confirm"}),
        "a broken filter": post({**ticked, "which": "all", "filter": "a ="}),
        "a filter too long": post({**ticked, "which": "all", "filter": "a" * (FILTER_LIMIT + 1)}),
        "ids and all": post({**ticked, "which": "all"}),
        "a plan": post({**ticked, "step": "plan"}),
        "a plan of all": post({**without("id"), "which": "all", "step": "plan"}),
        "a plan of a purge": post({**purge, "step": "plan"}),
        "a plan of a pause": post({"verb": "pause", "q": "q", "step": "plan"}),
        "pause elsewhere": post({"verb": "pause", "q": "nowhere", "step": "do"}),
    }  # fmt: skip


def test_a_form_that_the_page_did_not_make_does_nothing(site: Site, queue: Queue) -> None:
    (file,) = failed(queue, b"x")
    queue.send(b"waits")
    drop(queue, "draft.csv", b"waits, too")
    (base(queue) / "working" / "draft").write_bytes(b"is being written")
    queue.root.create_queue("other", durability="none")
    next_moment(Path(queue.root.path).parent)
    queue.close()  # which tells the sums
    before, wrong = tree(queue.root), dict[str, str]()
    for name, ask in forged(site, file).items():
        answer = ask()
        if tree(queue.root) != before:
            wrong[name] = "it did something"
            break
        if answer.status_code >= 500 or (answer.status_code == 200) != (
            name.startswith(("a plan", "time of the past", "of another queue", "an id"))
        ):
            wrong[name] = answer.status
    assert not wrong


def test_without_buttons_no_form_does_anything(queue: Queue) -> None:
    site = Site(queue.root, writable=False)
    (file,) = failed(queue, b"x")
    before = tree(queue.root)
    for answer in (
        site.act("requeue", file),
        site.act("purge"),
        site.act("pause"),
        *(ask() for ask in forged(site, file).values()),
    ):
        assert answer.status_code in (404, 405, 400), answer.status
    assert tree(queue.root) == before


def test_a_form_of_a_browser_that_tells_no_site_is_known_by_its_origin(site: Site, queue: Queue) -> None:
    for headers in ({}, {"Origin": "http://localhost"}, {"Origin": "https://localhost"}, OURS):
        assert site.post(headers, verb="pause", q="q", step="do").status_code == 200
        assert site.post(headers, verb="resume", q="q", step="do").status_code == 200
    assert [event.event for event in events(queue)][-2:] == ["paused", "resumed"]


def test_a_form_over_a_proxy_without_a_host_is_not_taken_for_ours(queue: Queue) -> None:
    page = application(queue.root, writable=True, user_header="X-User")
    answer = Browser(page).post(
        "/do", data={"verb": "pause", "q": "q", "step": "do"}, headers={"X-User": "ann", "Origin": "null"},
        environ_overrides={"HTTP_HOST": ""},
    )  # fmt: skip
    assert answer.status_code == 403 and not queue.paused


def test_each_verb_does_what_its_command_does_and_the_log_says_by_what_way(site: Site, queue: Queue) -> None:
    first, second, third = failed(queue, b"a", b"b", b"c")
    next_moment(Path(queue.layout.error))
    plan = site.act("requeue", first, step="plan")
    assert "Requeue 1 message of q, error?" in said(plan) and "Nothing has been done yet" in said(plan)
    assert "1 message requeued" in said(site.act("requeue", first))
    assert "1 message purged" in said(site.act("purge", second))
    assert where(queue) == {"target": [b"a"], "error": [b"c"]}
    paused = list[bool]()
    for verb in ("pause", "resume"):
        site.post(verb=verb, q="q", step="do")
        paused.append(queue.paused)
    assert paused == [True, False]
    assert third in site.get("messages", q="q", state="error").text
    ways = {event.event: event.fields.get("via") for event in events(queue)}
    assert [ways[each] for each in ("requeued", "purged", "paused", "resumed")] == ["web"] * 4
    assert ways["rejected"] is None
    queue.pause()
    assert events(queue)[-1].fields.get("via") is None


def test_the_log_names_whom_the_proxy_names(queue: Queue) -> None:
    client = Browser(application(queue.root, writable=True, user_header="X-User"))
    form = {"verb": "pause", "q": "q", "step": "do"}
    for headers in ({}, {"X-User": ""}, {"X-User": "  "}, {"X_User": ""}, {"User": "ann"}):
        answer = client.post("/do", data=form, headers=headers)
        assert answer.status_code == 403 and not queue.paused
    assert client.post("/do", data=form, headers={"X-User": "ann"}).status_code == 200
    assert client.get("/", headers={"X-User": "<b>ann"}).text.count("&lt;b&gt;ann") == 1
    assert [event.fields.get("via") for event in events(queue)][-1] == "web:ann"
    client.post("/do", data={**form, "verb": "resume"}, headers={"X-User": "zo\u00eb".encode().decode("latin-1")})
    assert [event.fields.get("via") for event in events(queue)][-1] == "web:zo\u00eb"


@pytest.mark.parametrize("name", ["a\\b", "a b", "x\u202ey", "<b>"])
def test_a_queue_of_any_name_can_be_purged_by_the_name_that_is_shown(tmp_path: Path, name: str) -> None:
    root = Root.create(tmp_path)
    root.create_queue("q", durability="none")
    queue = root.create_queue(name, durability="none")
    queue.send(b"x")
    next_moment(tmp_path)
    site = Site(root)
    assert "type the queue's name" in said(site.act("purge", q=name, state="target", step="plan"))
    assert site.act("purge", q=name, state="target", confirm=escape(name) + "x").status_code == 400
    assert where(queue) == {"target": [b"x"]}
    assert site.act("purge", q=name, state="target").status_code == 200
    assert where(queue) == {}


def test_a_purge_is_planned_as_a_purge_whatever_is_ticked_beside_its_button(site: Site, queue: Queue) -> None:
    failed(queue, b"x")
    next_moment(base(queue))
    plan = site.act("purge", to_origin="1", step="plan")
    assert "removed for good" in said(plan) and "goes back" not in said(plan)
    assert "1 message purged" in said(site.act("purge", to_origin="1"))
    assert where(queue) == {}


# -- what was planned, and nothing else ------------------------------------------------------------------------------


def test_what_fails_between_the_plan_and_the_click_is_not_touched(site: Site, queue: Queue) -> None:
    failed(queue, b"a", b"b")
    next_moment(base(queue))
    until_ = site.now()
    next_moment(base(queue))
    failed(queue, b"later")
    assert "2 messages requeued" in said(site.act("requeue", until=until_))
    assert where(queue) == {"target": [b"a", b"b"], "error": [b"later"]}


def test_however_long_an_act_takes_it_touches_nothing_that_came_after_the_plan(
    site: Site, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed(queue, b"a")
    next_moment(base(queue))
    until_ = site.now()
    next_moment(base(queue))
    failed(queue, b"later")
    real = bulk.requeue

    def slow(*args: Any, **options: Any) -> Iterator[bulk.Outcome]:
        next_moment(base(queue))
        next_moment(base(queue))
        yield from real(*args, **options)

    monkeypatch.setattr(bulk, "requeue", slow)
    site.act("requeue", until=until_)
    assert where(queue) == {"target": [b"a"], "error": [b"later"]}


def test_a_second_file_of_a_ticked_name_that_came_later_is_not_touched(site: Site, queue: Queue) -> None:
    drop(queue, "report.csv", b"first")
    take(queue).reject("no")
    next_moment(base(queue))
    until_ = site.now()
    (file,) = os.listdir(queue.layout.error)
    assert site.act("purge", file).status_code == 200
    next_moment(base(queue))
    drop(queue, "report.csv", b"second")
    take(queue).reject("no")
    assert os.listdir(queue.layout.error) == [file]
    site.act("purge", file, until=until_)
    assert where(queue) == {"error": [b"second"]}


def test_a_ticked_file_stands_for_itself_and_for_no_other_of_its_id(site: Site, queue: Queue) -> None:
    (file,) = failed(queue, b"x")
    id = next(queue.browse("error")).id
    (Path(queue.layout.error) / f"3.{id}.B").write_bytes(b"another of that id")
    next_moment(base(queue))
    assert "Purge 1 message" in said(site.act("purge", file, step="plan"))
    assert "1 message purged" in said(site.act("purge", file))
    assert where(queue) == {"error": [b"another of that id"]}


def fill(queue: Queue, count: int, state: str = "error") -> None:
    """Put so many messages there at once."""
    folder = os.open(queue.layout.folder(state), os.O_RDONLY)
    now = int(time.time() * 1e6)
    for number in range(count):
        os.close(os.open(f"4.{now + number:016d}-{number:010d}.B", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=folder))
    os.close(folder)


def hidden(answer: TestResponse) -> dict[str, list[str]]:
    """The fields of the form with which a page goes on."""
    fields: dict[str, list[str]] = {}
    for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', answer.text):
        fields.setdefault(name, []).append(html.unescape(value))
    return fields


@pytest.mark.parametrize("ticked", [False, True])
def test_each_click_does_a_slice_and_going_on_ends_with_the_last_message(
    site: Site, queue: Queue, monkeypatch: pytest.MonkeyPatch, ticked: bool
) -> None:
    fill(queue, 500)
    next_moment(base(queue))
    files = sorted(os.listdir(queue.layout.error)) if ticked else []
    monkeypatch.setattr(acts, "SLICE", 0.05)
    answer, clicks, left = site.act("requeue", *files), 1, 500
    while "Go on" in answer.text:
        assert "nothing goes on by itself" in said(answer)
        lie = queue.counts()["error"]
        assert lie <= left
        left = lie
        answer, clicks = site.post(**hidden(answer)), clicks + 1
        assert answer.status_code == 200 and clicks < 500
    assert "That was all" in said(answer)
    assert queue.counts()["target"] == 500 and queue.counts()["error"] == 0
    assert len([event for event in events(queue) if event.event == "requeued"]) == 500


def test_all_of_many_messages_are_walked_in_the_memory_of_few(
    site: Site, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(queue, 300)
    next_moment(base(queue))
    monkeypatch.setattr(browsing, "DEPTH", 7)
    assert "300 messages requeued" in said(site.act("requeue"))
    fill(queue, 60, "processed")
    drop(queue, "foreign.csv", b"")
    take(queue)
    next_moment(base(queue))
    monkeypatch.setattr(browsing, "DEPTH", 50_000)
    assert "60 messages purged" in said(site.act("purge", state="processed", filter="JMSPriority = 4"))
    assert queue.counts()["processed"] == 0


def test_a_process_that_is_killed_midway_leaves_each_message_in_one_state_and_the_log_tells_which(
    queue: Queue,
) -> None:
    fill(queue, 3000)
    names = {name.split(".")[1] for name in os.listdir(queue.layout.error)}
    next_moment(base(queue))
    with served(queue.root, "--writable") as web:
        now = queue.context.clock.now_ms()
        form = {"verb": "requeue", "q": "q", "state": "error", "which": "all", "step": "do", "until": str(now)}

        def ask() -> None:
            with suppress(OSError, http.client.HTTPException):
                web.post(form)

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: queue.counts()["target"] > 100, "the first messages that are requeued")
        web.process.kill()
        asking.join()
    there = [name.split(".")[1] for state in ("error", "target") for name in os.listdir(queue.layout.folder(state))]
    assert sorted(there) == sorted(names)
    told = [event for event in events(queue) if event.event == "requeued"]
    assert {event.fields["via"] for event in told} == {"web"}
    moved = {name.split(".")[1] for name in os.listdir(queue.layout.target)}
    assert len(moved - {str(event.fields["id"]) for event in told}) <= 1  # the line of one rename may be missing


def test_a_filter_that_matches_few_of_many_ends_with_its_slice(
    site: Site, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(queue, 50)
    next_moment(base(queue))
    held = list[object]()

    def counting(*args: Any) -> Callable[[Any], bool]:
        matches = matcher(*args)

        def test(file: Any) -> bool:
            held.append(file)
            if len(held) == 5:
                monkeypatch.setattr(acts, "SLICE", 0.0)  # as if the time were over
            return bool(matches(file))

        return test

    monkeypatch.setattr(browsing, "matcher", counting)
    monkeypatch.setattr(acts, "SLICE", 600.0)
    answer = site.act("purge", filter="JMSPriority = 9")
    assert "0 messages purged so far" in said(answer) and "There may be more" in said(answer)
    assert len(held) == 5 and not site.page.site.disk._running  # nothing goes on behind
    monkeypatch.setattr(acts, "SLICE", 600.0)
    assert "That was all" in said(site.act("purge", filter="JMSPriority = 9"))


def test_two_processes_that_requeue_the_same_messages_requeue_each_once(queue: Queue) -> None:
    fill(queue, 400)
    next_moment(base(queue))
    form = {"verb": "requeue", "q": "q", "state": "error", "which": "all", "step": "do"}
    form["until"] = str(queue.context.clock.now_ms())
    done = list[int]()

    def requeue(web: Web) -> None:
        (count,) = re.findall(rb"<h1>(\d+) messages? requeued", web.post(form))
        done.append(int(count))

    with served(queue.root, "--writable") as one, served(queue.root, "--writable") as other:
        asking = [threading.Thread(target=requeue, args=(web,)) for web in (one, other)]
        for each in asking:
            each.start()
        for each in asking:
            each.join()
    assert sum(done) == 400 == queue.counts()["target"]
    assert len([event for event in events(queue) if event.event == "requeued"]) == 400


def test_what_was_purged_counts_as_removed_also_if_the_process_ends_at_once(queue: Queue) -> None:
    fill(queue, 3, "target")
    next_moment(base(queue))
    with served(queue.root, "--writable") as web:
        form = {"verb": "purge", "q": "q", "state": "target", "which": "all", "step": "do", "confirm": "q"}
        answer = web.post({**form, "until": str(queue.context.clock.now_ms())})
        assert b"3 messages purged" in answer
        web.process.terminate()
        assert web.process.wait(600) == 0
    assert sums(queue)["removed"] == 3


# -- a disk that does not answer -------------------------------------------------------------------------------------


class Silence:
    """Lets what reads a queue wait, until it is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over = threading.Event()
        self.of = set[str]()
        self.asked = 0
        real = Root.queue

        def queue(root: Root, name: str) -> Queue:
            if name in self.of and not self.over.is_set():
                self.asked += 1
                self.over.wait()
            return real(root, name)

        monkeypatch.setattr(Root, "queue", queue)


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silence]:
    """What lets queues hang; they answer again when the test ends."""
    silence = Silence(monkeypatch)
    yield silence
    silence.over.set()


def test_queues_that_hang_keep_no_other_page_waiting_and_come_back_by_themselves(
    site: Site, silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "PATIENCE", 0.5)
    silence.of = {f"dead{number}" for number in range(5)}
    for name in silence.of:
        site.root.create_queue(name, durability="none")
    site.root.create_queue("well", durability="none").send(b"x")
    site.looked()
    answers = dict[str, int]()

    def answers_well(name: str) -> bool:
        return site.get("messages", q=name).status_code == 200

    def ask(name: str) -> None:
        answers[name] = site.get("messages", q=name).status_code

    asking = [threading.Thread(target=ask, args=(name,)) for name in sorted(silence.of) * 2]
    monkeypatch.setattr(disk_module.Disk.ask, "__defaults__", (0.5,))
    for each in asking:
        each.start()
    for path in ("", "queue?q=dead0&still=1"):
        assert site.client.get(f"/{KEY}/{path}").status_code == 200
    for each in asking:
        each.join()
    assert set(answers.values()) == {503}
    until(lambda: site.get("messages", q="well").status_code == 200, "a page of a queue that answers")
    threads, asked = threading.active_count(), silence.asked
    for name in sorted(silence.of)[: asked // 2] * 5:
        answer = site.get("log", q=name)
        assert answer.status_code == 503
    assert site.get("messages", q="well").status_code == 200
    assert threading.active_count() <= threads + 5 * disk_module.OF_ONE  # none more than so many for each queue
    assert silence.asked <= 5 * disk_module.OF_ONE
    silence.over.set()
    for name in silence.of:
        until(partial(answers_well, name), "the queue that hung")


def test_a_queue_that_hangs_is_asked_by_two_threads_and_then_by_none(
    site: Site, silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "PATIENCE", 0.2)
    monkeypatch.setattr(disk_module.Disk.ask, "__defaults__", (0.2,))
    silence.of = {"q"}
    for _ in range(10):
        answer = site.get("messages", q="q")
        assert answer.status_code == 503 and "dropq doctor" in said(answer)
    assert silence.asked <= disk_module.OF_ONE


def test_only_two_listings_of_a_queue_run_at_once_and_others_wait_or_are_refused(
    site: Site, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed(queue, b"x")
    running, most, lock, go_on = 0, 0, threading.Lock(), threading.Event()
    real = browsing.excerpt

    def listing(*args: Any, **options: Any) -> browsing.Excerpt:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        go_on.wait()
        with lock:
            running -= 1
        return real(*args, **options)

    monkeypatch.setattr(pages, "excerpt", listing)
    codes: list[int] = []
    asking = [
        threading.Thread(target=lambda: codes.append(site.get("messages", q="q", state="error").status_code))
        for _ in range(10)
    ]
    for each in asking:
        each.start()
    until(lambda: running == disk_module.OF_ONE, "two listings")
    assert site.get().status_code == 200
    go_on.set()
    for each in asking:
        each.join()
    assert most == disk_module.OF_ONE and set(codes) <= {200, 503} and 200 in codes


def test_two_bodies_are_saved_at_once(site: Site, queue: Queue) -> None:
    (file,) = failed(queue, b"body")
    path = f"/{KEY}/body?q=q&state=error&id={file}"
    unread = [Client(site.page).get(path) for _ in range(2)]
    assert site.client.get(path).status_code == 503
    assert site.get().status_code == site.get("messages", q="q").status_code == 200
    unread[0].close()
    assert site.client.get(path).data == b"body"
    unread[1].close()
    for _ in range(5):  # what could not be opened counts no longer either
        assert site.get("body", q="q", state="error", id="nothing").status_code == 404
        assert site.get("body", q="q", state="error").status_code == 400
    assert site.client.get(path).data == b"body"


def test_a_process_without_a_thread_to_spare_says_so_and_goes_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.looked()
    with monkeypatch.context() as patch:

        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", start)
        for _ in range(disk_module.THREADS + 1):
            assert site.get("messages", q="q").status_code == 503
        make_due(site.page.site.viewer)
        site.page.site.viewer.refresh()
        assert site.get().status_code == 200
        looked = site.page.site.viewer.all()[0].looked
    assert site.get("messages", q="q").status_code == 200
    make_due(site.page.site.viewer)
    until(lambda: site.page.site.viewer.all()[0].looked > looked, "the next look")


def delete(queue: Queue) -> None:
    queue.close()
    queue.root.delete_queue("q", force=True)


def replace_by_file(queue: Queue) -> None:
    shutil.rmtree(queue.layout.error)
    Path(queue.layout.error).touch()


def empty(queue: Queue) -> None:
    shutil.rmtree(queue.root.path)
    os.mkdir(queue.root.path)


LEFT: dict[str, Callable[[Queue], object]] = {
    "the root is renamed": lambda queue: os.rename(queue.root.path, f"{queue.root.path}-away"),
    "the queue is deleted": delete,
    "its configuration is broken": lambda queue: (base(queue) / "queue.toml").write_text("nonsense = [\n"),
    "the root's configuration is broken": lambda queue: (Path(queue.root.path) / "dropq.toml").write_text("x = ["),
    "a folder is gone": lambda queue: shutil.rmtree(queue.layout.error),
    "a folder is a file": replace_by_file,
    "all is empty": empty,
}


@pytest.mark.parametrize("what", LEFT)
def test_what_happens_to_the_root_is_said_in_a_sentence(site: Site, queue: Queue, what: str) -> None:
    (file,) = failed(queue, b"x")
    next_moment(base(queue))
    site.looked()
    LEFT[what](queue)
    refused_before(site, file)


def refused_before(site: Site, file: str) -> None:
    """Ask for all pages of a queue that has come to grief: what they say, they say without a fault."""
    answers = {
        "root": site.get(),
        "queue": site.get("queue", q="q"),
        **{state: site.get("messages", q="q", state=state) for state in ALL_STATES},
        "newest": site.get("messages", q="q", state="error", newest="1"),
        "filter": site.get("messages", q="q", state="error", filter="a = 1"),
        "message": site.get("message", q="q", state="error", id=file),
        "body": site.get("body", q="q", state="error", id=file),
        "log": site.get("log", q="q"),
        "log of one": site.get("log", q="q", id=file),
        **{verb: site.act(verb, step="plan", until=1) for verb in ("requeue", "purge")},
        "pause": site.post(verb="pause", q="q", step="do"),
    }
    assert {
        name: answer.status for name, answer in answers.items() if answer.status_code not in (200, 404, 400, 503)
    } == {}
    assert answers["root"].status_code == 200
    for answer in answers.values():
        assert "fault of dropq" not in answer.text and "Traceback" not in answer.text


@pytest.mark.parametrize("what", ["renamed", "unmounted"])
def test_a_root_that_goes_is_not_shown_as_one_without_queues(site: Site, queue: Queue, what: str) -> None:
    site.looked()
    os.rename(queue.root.path, f"{queue.root.path}-away")
    if what == "unmounted":
        os.mkdir(queue.root.path)

    def text() -> str:
        make_due(site.page.site.viewer)
        return said(site.get())

    until(lambda: "cannot be listed" in text() and "is mounted" in text(), "the root's absence")
    assert "Make one" not in text()
    if what == "unmounted":
        os.rmdir(queue.root.path)
    os.rename(f"{queue.root.path}-away", queue.root.path)
    until(lambda: "None of 1 queue" in text() and "cannot be listed" not in text(), "the root to be back")


def test_a_queue_that_is_deleted_goes_from_the_page(site: Site, queue: Queue) -> None:
    site.looked()
    queue.close()
    queue.root.delete_queue("q", force=True)

    def text() -> str:
        make_due(site.page.site.viewer)
        return said(site.get())

    until(lambda: "No queues" in text() and "Make one" in text(), "the next look")
    assert site.get("queue", q="q").status_code == site.get("messages", q="q").status_code == 404


@pytest.mark.parametrize("folder", ["", "q", "q/error", "q/.dropq"])
def test_who_may_not_read_a_folder_is_told(queue: Queue, folder: str) -> None:
    (file,) = failed(queue, b"x")
    path = Path(queue.root.path) / folder
    path.chmod(0)
    try:
        site = Site(queue.root)
        unprivileged(lambda: refused_before(site, file))
    finally:
        path.chmod(0o755)


@pytest.mark.host
def test_a_root_that_hangs_is_said_and_the_process_ends_all_the_same(tmp_path: Path) -> None:
    """Its disk is a FUSE file system whose process was stopped."""
    try:
        with mounted(passthrough("links", "local-locks", "modes", "replaces"), tmp_path / "mount") as fs:
            root = Root.create(fs.path / "root")
            queue = root.create_queue("q")
            queue.send(b"x")
            with served(root) as web:
                until(lambda: b'href="queue?q=q"' in web.get(), "the first look")
                fs.stop()
                try:
                    codes: list[int] = []
                    paths = ("messages?q=q", "log?q=q", "messages?q=other", "log?q=other")
                    asking = [
                        threading.Thread(target=lambda path=path: codes.append(status(web.get(path)))) for path in paths
                    ]
                    for each in asking:
                        each.start()
                    while any(each.is_alive() for each in asking):
                        for path in ("", "queue?q=q"):  # neither waits for the disk, which answers nobody
                            assert status(web.get(path)) == 200
                    assert codes == [503] * 4
                    threads = threads_of(web)
                    for path in paths * 3:
                        assert status(web.get(path)) == 503
                    assert threads_of(web) <= threads + 1
                    fs.go_on()
                    until(lambda: status(web.get("messages?q=q")) == 200, "the disk to answer again")
                    fs.stop()
                    with ExitStack() as stack:
                        asked = [stack.enter_context(web.connect()) for _ in paths]
                        for connection, path in zip(asked, paths, strict=True):
                            connection.sendall(f"GET /{web.key}/{path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                        for connection in asked:  # its thread hangs, and nobody waits for it any more
                            assert connection.recv(12) == b"HTTP/1.0 503"
                        web.process.send_signal(signal.SIGTERM)
                        until(lambda: has_ended(web.process.pid), "the process to end")
                finally:
                    fs.go_on()
                assert web.process.wait(600) == 0
    except NotRun as reason:
        pytest.skip(str(reason))


def threads_of(web: Web) -> int:
    """How many threads a process has."""
    return len(os.listdir(f"/proc/{web.process.pid}/task"))


def has_ended(pid: int) -> bool:
    """Whether a process has ended itself.

    The kernel keeps a thread whose request the process of the file system has read, and so what is left of the whole,
    until that answers.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


# -- bodies ----------------------------------------------------------------------------------------------------------


def put(queue: Queue, name: str, body: bytes = b"", state: str = "error") -> Path:
    """Put a file into a state."""
    path = Path(queue.layout.folder(state)) / name
    path.write_bytes(body)
    return path


BODIES = {
    "none": b"",
    "NULs": b"a\0b",
    "no UTF-8": b"\xff\xfe<b>",
    "markup": b"<script>alert(1)</script>",
    "long": b"x" * 70_000,
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_is_shown_as_text_and_saved_byte_for_byte(site: Site, queue: Queue, kind: str) -> None:
    body = BODIES[kind]
    put(queue, "a.bin", body)
    shown = site.get("message", q="q", state="error", id="a.bin")
    assert shown.status_code == 200
    assert "<script" not in shown.text and "\0" not in shown.text and "<b>" not in shown.text
    saved = site.get("body", q="q", state="error", id="a.bin")
    assert saved.data == body and saved.headers["Content-Length"] == str(len(body))
    assert saved.headers["Content-Type"] == "application/octet-stream"
    assert saved.headers["Content-Disposition"].startswith("attachment")


def test_a_sparse_body_of_a_gibibyte_takes_no_memory(site: Site, queue: Queue) -> None:
    path = put(queue, "a.bin", b"begin")
    os.truncate(path, 1 << 30)
    shown = site.get("message", q="q", state="error", id="a.bin")
    assert "The first 64.0 KiB of 1.0 GiB" in said(shown) and len(shown.data) < 1 << 20
    with Client(site.page).get(f"/{KEY}/body?q=q&state=error&id=a.bin") as answer:
        assert answer.headers["Content-Length"] == str(1 << 30)
        assert next(answer.iter_encoded()).startswith(b"begin")
    assert site.client.head(f"/{KEY}/body?q=q&state=error&id=a.bin").headers["Content-Length"] == str(1 << 30)


def test_what_is_no_file_is_no_message(site: Site, queue: Queue, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = Path(queue.layout.error)
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(secret)
    (folder / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
    for name in ("fifo", "link", "folder", "socket", "../../secret", "/etc/passwd", "../error/link", ".", "", ".."):
        for page in ("message", "body"):
            answer = site.get(page, q="q", state="error", id=name)
            assert answer.status_code == 404 and "secret" not in answer.text.replace(html.escape(name), "")
    assert "0 messages" in said(site.get("messages", q="q", state="error"))


def test_a_body_that_goes_or_is_closed_meanwhile_is_told(
    site: Site, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = failed(queue, b"body")
    real = type(queue).find_all

    def found_and_then(act: Callable[[Path], object]) -> None:
        def find_all(self: Queue, *args: Any) -> Any:
            found = real(self, *args)
            for each in found:
                act(Path(each.path))
            return found

        monkeypatch.setattr(type(queue), "find_all", find_all)

    found_and_then(lambda path: path.rename(path.with_name("elsewhere")))  # as another who takes it
    assert site.get("message", q="q", state="error", id=file).status_code in (200, 404)
    found_and_then(lambda path: path.unlink())
    answer = site.get("body", q="q", state="error", id="elsewhere")
    assert answer.status_code == 404 and "fault" not in answer.text


def test_a_message_that_moved_on_is_shown_where_it_lies_now(site: Site, queue: Queue) -> None:
    (file,) = failed(queue, b"body")
    id = next(queue.browse("error")).id
    list(queue.requeue([id]))
    with queue.subscribe() as subscription:
        message = subscription.receive()
        assert message is not None
        answer = site.get("message", q="q", state="error", id=id)
        assert answer.status_code == 404 and "It lies in processing/ now" in said(answer)
        assert site.get("body", q="q", state="error", id=file).status_code == 404
        held = site.get("message", q="q", state="processing", id=id)
        assert held.status_code == 200 and "body" in said(held)
        message.ack()


def test_a_body_that_its_user_may_not_read_is_told(site: Site, queue: Queue) -> None:
    (file,) = failed(queue, b"body")
    (Path(queue.layout.error) / file).chmod(0)

    def asked() -> tuple[int, str, int]:
        shown = site.get("message", q="q", state="error", id=file)
        return shown.status_code, said(shown), site.get("body", q="q", state="error", id=file).status_code

    shown, text, saved = unprivileged(asked)
    assert (shown, saved) == (200, 503) and "Permission denied" in text


def test_a_body_that_cannot_be_read_to_its_end_is_cut_and_no_log_has_the_key(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(queue.root)
    (file,) = failed(queue, b"body")
    real = pages.body

    class Broken:
        def __init__(self, file: Any) -> None:
            self.close = file.close

        def read(self, size: int) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def broken(*args: Any) -> Any:
        file, size, name = real(*args)
        return Broken(file), size, name

    monkeypatch.setattr(pages, "body", broken)
    assert site.get("body", q="q", state="error", id=file).data == b""
    assert "could not be saved whole" in caplog.text and KEY not in caplog.text


NAMES = [
    ODD,
    "\u65e5\u672c",
    '";evil="',
    "a\r\nSet-Cookie: x=1",
    "\u202egpj.exe",
    "x" * 255,
    "é\u2028",
    "%41%0d%0a",
    "-rf",
    " ",
    "'",
    "\\x41",
    "a b+c&d=e#f?g",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_any_bytes_is_shown_and_its_links_lead_to_it(site: Site, queue: Queue, name: str) -> None:
    put(queue, name, b"body of it")
    put(queue, "another", b"")
    listed = site.get("messages", q="q", state="error")
    assert "\u202e" not in listed.text and "Set-Cookie" not in listed.headers
    links = [html.unescape(link) for link in re.findall(r'href="(message\?[^"]+)"', listed.text)]
    pages_ = [site.client.get(f"/{KEY}/{link}") for link in links]
    (page,) = (page for page in pages_ if "body of it" in said(page))
    (save,) = re.findall(r'href="(body\?[^"]+)"', page.text)
    saved = site.client.get(f"/{KEY}/{html.unescape(save)}")
    assert saved.data == b"body of it"
    disposition = saved.headers["Content-Disposition"]
    assert disposition.startswith("attachment; filename*=UTF-8''") and '"' not in disposition
    assert "Set-Cookie" not in saved.headers and disposition.count(";") == 1
    next_moment(base(queue))
    (ticked,) = (
        value for value in re.findall(r'name="id" value="([^"]*)"', listed.text) if html.unescape(value) != "another"
    )
    form = {"verb": "purge", "q": "q", "state": "error", "which": "ticked", "confirm": "q", "step": "do"}
    assert "1 message purged" in said(site.post(**form, until=site.now(), id=html.unescape(ticked)))
    assert os.listdir(queue.layout.error) == ["another"]


BODY_FILTERS = [
    "/price > 5",
    "/a/b = 'secret'",
    "/secret IS NOT NULL",
    "LENGTH(/a) > 0",
    "NOT (/a = 1) OR JMSPriority = 4",
]


@pytest.mark.parametrize("message_type", ["json", ""])
def test_without_bodies_none_is_shown_saved_planned_with_or_filtered_by(tmp_path: Path, message_type: str) -> None:
    options: dict[str, Any] = {"message_type": message_type} if message_type else {}
    queue = make_queue(tmp_path / "root", redelivery_attempts=0, **options)
    site = Site(queue.root, bodies=False)
    body = b'{"price": 7, "a": {"b": "secret"}, "secret": 1}'
    queue.send(body)
    take(queue).reject("no")
    (file,) = os.listdir(queue.layout.error)
    next_moment(base(queue))
    before = tree(queue.root)
    for answer in (
        *(site.get("message", q="q", state="error", id=file), site.get("messages", q="q", state="error")),
        *(
            site.get("body", q="q", state="error", id=file),
            site.act("purge", file, step="plan"),
            site.get("log", q="q"),
        ),
    ):
        assert "secret" not in answer.text and "price" not in answer.text and "Save it" not in answer.text
    for filter in BODY_FILTERS:
        for answer in (
            site.get("messages", q="q", state="error", filter=filter),
            *(site.act(verb, filter=filter, step=step) for verb in ("requeue", "purge") for step in ("plan", "do")),
        ):
            assert answer.status_code == 400 and "1 message" not in said(answer)
    assert tree(queue.root) == before
    with_bodies = Site(queue.root)
    if message_type:
        assert "1 of 1 match" in said(with_bodies.get("messages", q="q", state="error", filter="/price > 5"))


# -- whatever is asked -----------------------------------------------------------------------------------------------


TEXTS = st.one_of(
    st.text(max_size=60),
    st.sampled_from(
        [
            "",
            "\0",
            "../q",
            "q",
            "q/x",
            "t",
            "t/s.c",
            "\\xff",
            "\\",
            "a\\x00",
            "%",
            "é" * 2001,
            "9" * 16,
            "1" * 15,
            "\ud7ff",
        ]
    ),
    st.sampled_from(["JMSPriority = 4", "a LIKE '('", "(" * 900, "NOT " * 250, "/a/b[0] > 1", "a = 1 AND", "BEYOND"]),
)
VALUES: dict[str, st.SearchStrategy[str]] = {
    **dict.fromkeys(("q", "id", "filter", "confirm", "until"), TEXTS),
    "state": st.one_of(st.sampled_from(ALL_STATES), TEXTS),
    "event": st.one_of(st.sampled_from(["", "failed", "purged"]), TEXTS),
    **dict.fromkeys(("newest", "still", "to_origin"), st.one_of(st.just("1"), TEXTS)),
    "verb": st.one_of(st.sampled_from(VERBS), TEXTS),
    "which": st.one_of(st.sampled_from(["ticked", "all"]), TEXTS),
    "step": st.one_of(st.sampled_from(["plan", "do"]), TEXTS),
}
ASKED = st.lists(
    st.one_of(*(st.tuples(st.just(name), values) for name, values in VALUES.items()), st.tuples(TEXTS, TEXTS)),
    max_size=6,
)
PROBE = "prObe-74"


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A page of a queue with a message in each state."""
    queue = make_queue(tmp_path_factory.mktemp("fuzzed") / "root", redelivery_attempts=0)
    failed(queue, b"x")
    archive(queue, b"y")
    queue.send(b"z", properties={"a": 1})
    queue.send(b"late", delay=3600)
    topic = queue.root.create_topic("t", durability="none")
    topic.subscribe("s", client_id="c").close()
    topic.publish(b"x")
    put(queue, ODD, b"odd")
    return Site(queue.root)


def check(answer: TestResponse) -> None:
    """No fault, all headers, and no script."""
    assert answer.status_code in (200, 308, 400, 403, 404, 405, 413, 415, 421, 503), answer.text
    assert HEADERS.items() <= dict(answer.headers).items()
    assert "<script" not in answer.text and "\u202e" not in answer.text


@settings(max_examples=150)
@given(page=st.sampled_from(["", "queue", "messages", "message", "log", "body", "do"]), asked=ASKED)
def test_whatever_an_address_says_there_is_no_fault(fuzzed: Site, page: str, asked: list[tuple[str, str]]) -> None:
    answer = fuzzed.client.get(f"/{KEY}/{page}", query_string=urlencode(asked, errors="surrogatepass"))
    check(answer)


@settings(max_examples=100)
@given(page=st.sampled_from(["", "queue", "messages", "message", "log", "body"]), raw=st.binary(max_size=60))
def test_whatever_bytes_an_address_has_there_is_no_fault(fuzzed: Site, page: str, raw: bytes) -> None:
    check(fuzzed.client.get(f"/{KEY}/{page}", environ_overrides={"QUERY_STRING": (b"q=q&id=" + raw).decode("latin-1")}))
    check(fuzzed.client.get(f"/{KEY}/{page}", environ_overrides={"PATH_INFO": f"/{KEY}/" + raw.decode("latin-1")}))


@settings(max_examples=150)
@given(asked=ASKED, whole=st.booleans())
def test_whatever_a_form_says_there_is_no_fault(fuzzed: Site, asked: list[tuple[str, str]], whole: bool) -> None:
    form = [("q", "q"), ("verb", "requeue"), ("state", "error"), ("step", "plan"), ("which", "all")] if whole else []
    given_names = {name for name, _ in asked}
    text = urlencode([*((key, value) for key, value in form if key not in given_names), *asked], errors="surrogatepass")
    check(fuzzed.client.post(f"/{KEY}/do", data=text, content_type="application/x-www-form-urlencoded", headers=OURS))


@pytest.mark.parametrize("page", [*PAGES, "body", "do"])
@pytest.mark.parametrize("name", [*VALUES, PROBE])
def test_what_is_refused_is_not_repeated(fuzzed: Site, page: str, name: str) -> None:
    values = (PROBE, f"{PROBE}/..", "\0" + PROBE, PROBE * 300)
    for value in values:
        asked = {"q": "q", "state": "error", "id": "x", "verb": "requeue", "step": "plan", "which": "all", name: value}
        if page != "do":
            asked = {
                key: each
                for key, each in asked.items()
                if key in (*PAGES.get(page, (None, ("q", "state", "id")))[1], name)
            }
            answer = fuzzed.get(page, **asked)
        else:
            answer = fuzzed.post(**asked)
        check(answer)
        if answer.status_code == 400 and name != "filter":  # which is shown in its field, to be put right
            assert PROBE not in answer.text


def test_what_a_stranger_writes_beside_messages_is_no_fault(site: Site, queue: Queue) -> None:
    (file,) = failed(queue, b"x")
    reasons = Path(queue.layout.reasons) / "error"
    log = next(Path(queue.layout.log).iterdir())
    site.looked()
    odd: list[object] = [
        None,
        1,
        "x",
        [],
        [1],
        {},
        {"reason": 5},
        {"reason": {"a": 1}, "traceback": 7, "stderr": []},
        True,
    ]
    odd += [
        {"traceback": "\u202e\x1b[0m", "detail": "<script>"},
        {"arrived": "x", "delivery": -1, "inode": "x"},
        {"reason": 1e308},
    ]
    lines = [{"event": "failed", "time": "2026-01-01", "id": 5, "seconds": "x", "count": {}, "via": 1, "owner": None}]
    lines += [{"event": "rejected", "time": "9999-12-31T23:59:59.999999", "id": "\u202e<script>", "seconds": 1e300}]
    lines += [{"event": "purged", "time": "0001-01-01T00:00:00+23:59", "traceback": "<script>", "count": 1 << 60}]
    with open(log, "a") as out:
        for line in lines:
            out.write(json.dumps(line) + "\n")
        out.write('{"time": "2026-01-01", "event": "failed", "seconds": 1e999}\n' + "[" * 5000 + "\n")
    for content in odd:
        for reason in reasons.iterdir():
            whole = {"name": file, **content} if isinstance(content, dict) else content
            reason.write_text(json.dumps(whole))
        for answer in (
            *(site.get("messages", q="q", state="error"), site.get("message", q="q", state="error", id=file)),
            *(site.get("log", q="q"), site.get("queue", q="q"), site.get("messages", q="q", state="error", newest="1")),
        ):
            check(answer)
            assert answer.status_code == 200


def test_long_reasons_make_no_long_list(site: Site, queue: Queue) -> None:
    queue.send_many([b"x"] * 20)
    for _ in range(20):
        take(queue).reject("no, " + "x" * 500_000)
    for page in (site.get("messages", q="q", state="error"), site.get("messages", q="q", state="error", newest="1")):
        assert "no, xxx" in page.text and len(page.data) < 200_000
    (file, *_) = os.listdir(queue.layout.error)
    assert "x" * 500_000 in site.get("message", q="q", state="error", id=file).text


def test_names_that_tell_any_time_are_no_fault(site: Site, queue: Queue) -> None:
    for number, name in enumerate(
        ["4.9999999999999999-0000000001.B", "4.0000000000000000-0000000001.B",
         "-999999999.1795940105402001-3959586867.O",
         "4.1795940105402001-3959586867.B..x.JMS_dropq_sinceL=9999999999999&JMSExpirationL=99999999999999",
         "4.1795940105402001-3959586868.B..x.JMSExpirationL=99999999999999999999", "%", "~", "..a", "a~b~c.B"]
    ):  # fmt: skip
        for state in ("error", "target", "processing", "processed", "expired"):
            put(queue, f"{name}{number if number > 5 else ''}", b"", state)
    for state in ALL_STATES:
        for newest in ({}, {"newest": "1"}):
            listed = site.get("messages", q="q", state=state, **newest)
            check(listed)
            assert listed.status_code == 200
            for link in re.findall(r'href="(message\?[^"]+)"', listed.text):
                answer = site.client.get(f"/{KEY}/{html.unescape(link)}")
                check(answer)
                assert answer.status_code == 200


# -- what the page says is what the library says ---------------------------------------------------------------------


def test_the_first_pages_show_the_figures_that_top_shows(tmp_path: Path) -> None:
    root = Root.create(tmp_path)
    for name, count in (("a", 3), ("b", 1200), ("bad", 0)):
        fill(root.create_queue(name, durability="none", redelivery_attempts=0), count, "target")
    failed(root.queue("bad"), b"x")
    root.queue("a").pause()
    site = Site(root)
    site.looked()
    command = [sys.executable, "-m", "dropq", "--root", str(tmp_path), "--json", "top"]
    records = [json.loads(line) for line in subprocess.check_output(command, env=environment()).splitlines()]
    shown = site.get()
    rows = [
        [said_of(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)] for row in rows_of(shown)
    ]
    assert [row[:2] for row in rows] == [[record["queue"], record["state"]] for record in records]
    looks = {look.queue: look for look in root.overview()}
    for row, record in zip(rows, records, strict=True):
        counts = looks[record["queue"]].counts
        assert counts == record["counts"]
        names = ("target", "processing", "delayed", "error")
        assert [int(row[place].replace(",", "")) for place in (2, 6, 7, 8)] == [counts[name] for name in names]
        page = said(site.get("queue", q=record["queue"]))
        for state in ALL_STATES:
            assert f"{state} {counts[state]:,}" in page
        for one in (*record["reasons"], *record["notes"]):
            assert " ".join(one["message"].replace("`", "").split()) in page.replace("( ", "(")
    assert "1,203" in said(shown)


def rows_of(answer: TestResponse) -> list[str]:
    """The rows of the table of a page."""
    return re.findall(r"<tr>(.*?)</tr>", answer.text.partition("<tbody>")[2].partition("</tbody>")[0], re.DOTALL)


def said_of(part: str) -> str:
    """What a part of a page says to people."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", part)).split())


def shown_command(answer: TestResponse) -> str:
    """The command line that a page shows at its end."""
    (command,) = re.findall(r"The same on the command line: <code>(.*?)</code>", answer.text, re.DOTALL)
    return html.unescape(command)


def run_shown(site: Site, command: str, *more: str) -> list[dict[str, Any]]:
    """Run a command line in a shell, with JSON where the page has words."""
    words = subprocess.check_output(["sh", "-c", command.replace("dropq ", "printf '%s\\0' ", 1)], cwd="/")
    argv = [os.fsdecode(word) for word in words.split(b"\0")[:-1]]
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with redirect_stdout(out):
        code = cli.main(["--root", str(site.root.path), "--json", argv[0], *more, *argv[1:]])
    out.flush()
    assert code == 0, command
    return [json.loads(each) for each in out.buffer.getvalue().splitlines()]


@pytest.mark.parametrize(
    "name", first_and_long(["$(touch x)`id`", "-rf", "it's", "q", "a b", "a\\b", "x\u202ey", "a;b&c|d>e", "*"], 3)
)
def test_the_command_that_a_page_shows_does_the_same(tmp_path: Path, name: str) -> None:
    root = Root.create(tmp_path / "root")
    queue = root.create_queue(name, durability="none", redelivery_attempts=0)
    for number in range(3):
        queue.send(b"x", properties={"region": 'EU\'s "n" $x' if number else "x"})
        take(queue).reject("no")
    put(queue, ODD)
    next_moment(base(queue))
    site = Site(root)
    site.looked()
    everything = sorted(each.id for each in queue.browse("error"))
    for asked in ({}, {"newest": "1"}, {"filter": "region LIKE 'EU''s \"n\" $%'"}):
        page = site.get("messages", q=escape(name), state="error", **asked)
        ids = [html.unescape(id) for id in re.findall(r'<th scope="row"><a class="id"[^>]*>([^<]*)</a>', page.text)]
        found = run_shown(site, shown_command(page))
        assert [escape(each["id"]) for each in found] == (ids[::-1] if "newest" in asked else ids)
        assert len(ids) == (2 if "filter" in asked else 4)
    for page in (site.get(), site.get("queue", q=escape(name))):
        assert run_shown(site, shown_command(page))[0]["queue"] == name
    for file in (each.file for each in queue.browse("error")):
        page = site.get("message", q=escape(name), state="error", id=escape(file))
        assert run_shown(site, shown_command(page))[0]["id"] in everything
    log = site.get("log", q=escape(name))
    assert len(run_shown(site, shown_command(log))) == len(rows) if (rows := re.findall(r"<li><p>", log.text)) else True
    plan = site.act("purge", ODD, q=name, step="plan")
    done = run_shown(site, shown_command(plan), "--yes")
    assert [each["id"] for each in done if each.get("ok", True)] and not (Path(queue.layout.error) / ODD).exists()
    plan = site.act("requeue", q=name, step="plan", filter="region = 'x'")
    run_shown(site, shown_command(plan), "--yes")
    assert (queue.counts()["target"], queue.counts()["error"]) == (1, 2)
    plan = site.post(verb="pause", q=escape(name), step="plan")
    run_shown(site, shown_command(plan))
    assert queue.paused


# -- in another server -----------------------------------------------------------------------------------------------


class Quiet(WSGIRequestHandler):
    """Logs no request."""

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def embedded(page: Application) -> Iterator[Callable[..., tuple[int, bytes]]]:
    """Serve a page by another WSGI server; what this yields asks it."""
    with make_server("127.0.0.1", 0, page, handler_class=Quiet) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()

        def ask(path: str, method: str = "GET", body: str | None = None, **headers: str) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection("localhost", server.server_port, timeout=600)
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            assert HEADERS.items() <= dict(answer.getheaders()).items()
            data = answer.read()
            connection.close()
            return answer.status, data

        try:
            yield ask
        finally:
            server.shutdown()
            serving.join()
            page.end(0)


def test_another_server_serves_the_page_as_it_is(queue: Queue) -> None:
    page = application(queue.root)
    with embedded(page) as ask:
        until(lambda: b'href="queue?q=q"' in ask(page.link)[1], "the first look")
        assert re.fullmatch(r"/[\w-]{22}/", page.link)
        assert ask("/")[0] == ask(page.link + "do", "POST", "verb=pause&q=q&step=do")[0] == 404
        shutil.rmtree(queue.root.path)
        make_due(page.site.viewer)
        until(lambda: b"cannot be listed" in ask(page.link)[1], "the next look")
        until(lambda: b"unread" in ask(page.link + "queue?q=q")[1], "the next look at the queue")
        assert ask(page.link + "messages?q=q")[0] == 404 and ask(page.link)[0] == 200


def test_another_server_may_log_people_in(queue: Queue) -> None:
    page = application(queue.root, user_header="X-User", writable=True)
    assert page.link == "/"
    with embedded(page) as ask:
        assert ask("/")[0] == 403 and ask("/", X_User="ann")[0] == 200
        form = {"Content_Type": "application/x-www-form-urlencoded", "X_User": "ann"}
        assert ask("/do", "POST", "verb=pause&q=q&step=do", **form, Sec_Fetch_Site="cross-site")[0] == 403
        assert not events(queue)[1:]
        assert ask("/do", "POST", "verb=pause&q=q&step=do", **form)[0] == 200
    assert queue.paused
    assert events(queue)[-1].fields["via"] == "web:ann"


def test_a_key_of_ones_own_is_the_same_in_each_process(queue: Queue) -> None:
    first, second = (application(queue.root, key=KEY) for _ in range(2))
    assert first.link == second.link == f"/{KEY}/"
    assert application(queue.root).link != application(queue.root).link


def test_the_page_may_lie_below_a_prefix(site: Site, queue: Queue) -> None:
    (file,) = failed(queue, b"x")
    site.looked()
    for page in (site.get(), site.get("queue", q="q"), site.get("messages", q="q", state="error"),
                 site.get("message", q="q", state="error", id=file), site.get("log", q="q")):  # fmt: skip
        for link in re.findall(r'(?:href|action|src)="([^"]*)"', page.text):
            assert not link.startswith("/") and "//" not in link and KEY not in link


# -- where it listens, and who gets there ----------------------------------------------------------------------------


def ran(root: Path | str, *options: str) -> tuple[int, str]:
    """Run `dropq web` with options that it refuses; return its exit code and what it said."""
    out = io.StringIO()
    with redirect_stderr(out):
        code = cli.main(["--root", str(root), "web", *options])
    return code, out.getvalue()


REFUSED: dict[tuple[str, ...], tuple[int, str]] = {
    **{
        (f"--listen={address}",): (78, "--listen")
        for address in ("0.0.0.0:0", "[::]:0", "example.org:80", "192.0.2.1:80", "127.0.0.2:80", "*:80")
    },
    **{
        (f"--listen={address}", "--proxy-user=X-User"): (78, "--proxy-user")
        for address in ("127.0.0.1:0", "0.0.0.0:0", "[::]:0", "[::1]:0", "example.org:80", "192.0.2.1:80", "8077")
    },
    ("--proxy-user=X-User",): (78, "--proxy-user"),
    **{
        (f"--listen={address}",): (2, "--listen")
        for address in ("8077", ":8077", "localhost", "127.0.0.1:99999", "127.0.0.1:x", "127.0.0.1:", "unix:", "")
    },
    **{
        (f"--proxy-user={header}", "--listen=unix:x.sock"): (2, "--proxy-user")
        for header in ("", " ", "X User", "X-User:", "X_User", "X-\u00fcser")
    },
    ("--listen=unix:/nowhere/x.sock",): (73, "/nowhere/x.sock"),
    (f"--listen=unix:/tmp/{'x' * 200}",): (73, "it cannot be had"),
}  # fmt: skip


@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_an_unsafe_way_to_listen_is_refused_with_the_options_name(queue: Queue, options: tuple[str, ...]) -> None:
    code, told = ran(queue.root.path, *options)
    assert (code, REFUSED[options][1] in told) == (REFUSED[options][0], True), told


def test_what_is_no_root_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        assert ran(path, "--listen=127.0.0.1:0")[0] == 66


def test_an_address_that_is_taken_is_refused(queue: Queue, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert ran(queue.root.path, f"--listen=127.0.0.1:{taken.getsockname()[1]}")[0] == 73
    for kind in ("file", "folder"):
        path = tmp_path / kind
        path.mkdir() if kind == "folder" else path.write_text("kept")
        assert ran(queue.root.path, f"--listen=unix:{path}")[0] == 73 and path.exists()


def test_a_socket_of_the_dead_is_replaced_and_one_of_the_living_is_not(queue: Queue, tmp_path: Path) -> None:
    path = tmp_path / "web.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    with served(queue.root, f"--listen=unix:{path}") as web:
        assert path.stat().st_mode & 0o777 == 0o600
        assert status(web.get()) == 200 and status(web.get(host="evil")) == 421
        assert ran(queue.root.path, f"--listen=unix:{path}")[0] == 73
        assert status(web.get()) == 200
        web.process.send_signal(signal.SIGTERM)
        assert web.process.wait(600) == 0
    assert not path.exists()


def test_an_address_is_taken_from_the_moment_it_is_bound(tmp_path: Path) -> None:
    from dropq.errors import QueueExists
    from dropq.web.server import bound

    path = tmp_path / "web.sock"
    with bound(f"unix:{path}", for_proxy=True):  # and not only once its server runs
        with pytest.raises(QueueExists):
            bound(f"unix:{path}", for_proxy=True)
        assert path.stat().st_mode & 0o777 == 0o660
    with bound("127.0.0.1:0", for_proxy=False) as first, pytest.raises(QueueExists):
        bound(f"127.0.0.1:{first.getsockname()[1]}", for_proxy=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_process(queue: Queue, number: signal.Signals) -> None:
    with served(queue.root) as web:
        assert status(web.get()) == 200
        web.process.send_signal(number)
        assert web.process.wait(600) == 0


def test_a_proxy_names_the_user_over_its_socket(queue: Queue, tmp_path: Path) -> None:
    path = tmp_path / "web.sock"
    with served(queue.root, f"--listen=unix:{path}", "--proxy-user", "X-User", "--writable") as web:
        assert (web.printed, web.key) == (f"{path}\t/", "")
        assert path.stat().st_mode & 0o777 == 0o660

        def ask(path: str, *headers: str) -> bytes:
            return web.ask("\r\n".join([f"GET {path} HTTP/1.0", *headers, "", ""]).encode())

        assert status(ask("/")) == status(ask("/", "X_User: ann")) == status(ask("/", "X-User: ")) == 403
        assert status(ask("/", "X-User: ann", "Host: any.example")) == 200
        form = "verb=pause&q=q&step=do"
        lines = ["POST /do HTTP/1.0", "Host: x", "X-User: ann", "Content-Type: application/x-www-form-urlencoded",
                 f"Content-Length: {len(form)}", "", form]  # fmt: skip
        assert status(web.ask("\r\n".join(lines).encode())) == 200
    assert events(queue)[-1].fields["via"] == "web:ann"


@pytest.fixture
def another_user() -> int:
    """A user whom permissions bind, and who owns nothing here."""
    if os.geteuid() != 0:
        pytest.skip("to act as another user takes root")
    return 60001


def as_user(user: int, function: Callable[[], Any]) -> Any:
    """Run a function as another user."""

    def bound() -> Any:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        return function()

    return in_child(bound)


@pytest.mark.host
def test_another_user_gets_nothing_without_the_key(queue: Queue, another_user: int) -> None:
    with served(queue.root, "--writable") as web:
        folder = Path(f"/proc/{web.process.pid}")

        def asked() -> tuple[set[bytes], dict[str, bytes | None]]:
            answers = {
                web.ask(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                for path in ("/", "/do", "/queue?q=q")
            }
            answers = {re.sub(rb"Date: [^\r]*", b"", answer) for answer in answers}
            seen = dict[str, bytes | None]()
            for name in ("cmdline", "environ", "stat", "status", "maps", "comm", "mem"):
                try:
                    seen[name] = (folder / name).read_bytes()
                except OSError:
                    seen[name] = None
            seen["ps"] = subprocess.run(["ps", "axeww"], capture_output=True).stdout if shutil.which("ps") else b""
            return answers, seen

        answers, seen = as_user(another_user, asked)
        (answer,) = answers
        assert status(answer) == 404
        assert web.key.encode() not in answer
        for name, content in seen.items():
            assert content is None or web.key.encode() not in content, name
        assert seen["environ"] is None and seen["cmdline"] and b"web" in seen["cmdline"]
    assert not queue.paused


@pytest.mark.host
def test_another_user_cannot_connect_to_a_socket(queue: Queue, another_user: int) -> None:
    with TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        for number, options in enumerate(([], ["--proxy-user", "X-User"])):
            path = f"{folder}/{number}.sock"
            with served(queue.root, f"--listen=unix:{path}", *options) as web:

                def connects(connect: Callable[[], socket.socket] = web.connect) -> bool:
                    try:
                        connect().close()
                    except PermissionError:
                        return False
                    return True

                assert connects() and not as_user(another_user, connects)


def test_the_key_is_neither_in_the_log_nor_in_the_environment_of_the_process(queue: Queue) -> None:
    (file,) = failed(queue, b"x")
    with served(queue.root) as web:
        folder, key = Path(f"/proc/{web.process.pid}"), web.key.encode()
        odd = b"POST /" + key + b"/do HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: odd\r\n"
        for request in (b"GET / HTTP/9.9\r\n", b"\0\xff\r\n", b"GET /" + key + b"/x\xff?\xff HTTP/1.1\r\n", odd):
            web.ask(request + b"Connection: close\r\n\r\n")
        with web.connect() as connection:  # and goes in the midst of the answer
            connection.sendall(
                f"GET /{web.key}/body?q=q&state=error&id={file} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()
            )
        assert status(web.get()) == 200
        if folder.exists():
            assert key not in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        web.process.terminate()
        assert web.process.stderr is not None
        assert key not in web.process.stderr.read()


# -- clients that are slow, or odd -----------------------------------------------------------------------------------


def test_requests_that_are_no_http_are_refused_and_do_nothing(queue: Queue) -> None:
    (file,) = failed(queue, b"x")
    next_moment(base(queue))
    with served(queue.root, "--writable") as web:
        now = queue.context.clock.now_ms()
        form = f"verb=requeue&q=q&state=error&which=ticked&id={file}&step=do&until={now}".encode()
        before, close = tree(queue.root), b"Connection: close\r\n"
        start = b"POST /" + web.key.encode() + b"/do HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: same-origin\r\n"
        typed = start + b"Connection: close\r\nContent-Type: application/x-www-form-urlencoded\r\n"
        chunk = b"%x\r\n%s\r\n0\r\n\r\n"
        long = form + b"&filter=" + b"x" * (65 << 10)
        refused = {
            "two hosts": b"GET /%s/ HTTP/1.0\r\nHost: localhost\r\nHost: evil\r\n\r\n" % web.key.encode(),
            "absolute": b"GET http://evil/" + web.key.encode() + b"/ HTTP/1.1\r\nHost: evil\r\n" + close + b"\r\n",
            "65 KiB": typed + b"Content-Length: %d\r\n\r\n" % len(long) + long,
            "65 KiB in chunks": typed + b"Transfer-Encoding: chunked\r\n\r\n" + chunk % (len(long), long),
            "a length that is none": typed + b"Content-Length: -1\r\n\r\n" + form,
            "two lengths": typed + b"Content-Length: 1\r\nContent-Length: %d\r\n\r\n" % len(form) + form,
            "chunked, no type": start + close + b"Transfer-Encoding: chunked\r\n\r\n" + chunk % (len(form), form),
            "a header of 20 KiB": typed + b"X: %s\r\nContent-Length: %d\r\n\r\n%s" % (b"x" * 20480, len(form), form),
            "no length": typed + b"\r\n" + form,
            "a length beyond the form's end": typed + b"Content-Length: 1\r\n\r\n" + form,
        }  # fmt: skip
        for name, request in refused.items():
            answer = web.ask(request)
            assert 400 <= status(answer) < 500, name
            assert web.key.encode() not in answer
            assert tree(queue.root) == before, name
        absolute = (
            b"GET http://localhost/" + web.key.encode() + b"/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        assert status(web.ask(absolute)) == 200
        chunked = typed + b"Transfer-Encoding: chunked\r\n\r\n" + chunk % (len(form), form)
        assert status(web.ask(chunked)) == 200  # it is a form like any
    assert queue.counts()["target"] == 1


def test_clients_that_go_in_the_midst_of_an_answer_end_nothing(queue: Queue) -> None:
    with served(queue.root) as web:
        for path in (f"/{web.key}/", "/", f"/{web.key}/messages?q=q") * 10:
            with web.connect() as connection:
                connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )  # the end is a reset
        assert status(web.get()) == 200 and web.process.poll() is None


def test_connections_that_send_slowly_and_clients_that_do_not_read_keep_nobody_waiting(queue: Queue) -> None:
    path = put(queue, "a.bin")
    os.truncate(path, 1 << 30)
    with served(queue.root) as web, ExitStack() as stack:
        slow = [stack.enter_context(web.connect()) for _ in range(200)]
        request = f"GET /{web.key}/ HTTP/1.0\r\nHost: localhost\r\n".encode()
        for byte in request[:20]:
            for connection in slow:
                connection.sendall(bytes([byte]))
        unread = [stack.enter_context(web.connect()) for _ in range(20)]
        for connection in unread:
            text = f"GET /{web.key}/body?q=q&state=error&id=a.bin HTTP/1.0\r\nHost: localhost\r\n\r\n"
            connection.sendall(text.encode())
        first = [connection.recv(12) for connection in unread]
        assert first.count(b"HTTP/1.0 200") == 2 and first.count(b"HTTP/1.0 503") == 18
        assert status(web.get()) == 200
        assert status(web.get("messages?q=q&state=error")) == 200
        assert resident(web) < 200
        for connection in unread:
            connection.close()
        until(lambda: status(web.get("body?q=q&state=error&id=nothing")) == 404, "a download to end")


def resident(web: Web) -> int:
    """How many MiB of memory a process has in use at most until now."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{web.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


@pytest.mark.long
def test_many_failed_messages_are_shown_in_little_memory(queue: Queue) -> None:
    (file,) = failed(queue, b"x")
    fill(queue, 100_000)
    with served(queue.root, "--writable") as web:
        codes: list[int] = []
        path = "messages?q=q&state=error&newest=1"
        asking = [threading.Thread(target=lambda: codes.append(status(web.get(path)))) for _ in range(10)]

        def answers_well(path: str) -> bool:
            return status(web.get(path)) == 200

        for each in asking:
            each.start()
        for each in asking:
            each.join()
        assert set(codes) <= {200, 503}
        until(lambda: b"100,001" in web.get(path), "the list")
        for path in (f"message?q=q&state=error&id={file}", "messages?q=q&state=error&filter=a%3D1", "queue?q=q"):
            until(partial(answers_well, path), "the page")
        form = {"verb": "requeue", "q": "q", "state": "error", "which": "ticked", "id": file, "step": "do"}
        answer = web.post({**form, "until": str(queue.context.clock.now_ms())})
        assert b"1 message requeued" in answer
        assert resident(web) < 200


def test_requests_leave_no_file_open(site: Site, queue: Queue) -> None:
    (file,) = failed(queue, b"x")
    site.looked()

    def ask() -> None:
        for path in ("", "queue?q=q", "messages?q=q&state=error", f"message?q=q&state=error&id={file}", "log?q=q",
                     f"body?q=q&state=error&id={file}", "messages?q=nowhere", "body?q=q&id=nothing"):  # fmt: skip
            site.client.get(f"/{KEY}/{path}")
        site.act("requeue", file, step="plan")

    ask()
    before, threads = open_files(), threading.active_count()
    for _ in range(10):
        ask()
    until(lambda: open_files() <= before and threading.active_count() <= threads + 1, "files and threads to be closed")


# -- what people are told --------------------------------------------------------------------------------------------


def test_failures_are_shown_beside_many_acts_and_acts_beside_many_failures(site: Site, queue: Queue) -> None:
    failed(queue, *(b"%d" % number for number in range(12)))
    for _ in range(12):
        queue.pause()
        queue.resume()
    site.looked()
    shown = said(site.get("queue", q="q"))
    assert "no 11" in shown and "no 1 " not in shown
    assert "paused" in shown.partition("Last acts")[2] and "None in the log" not in shown


def test_a_failure_leads_to_its_message(site: Site, queue: Queue) -> None:
    (file,) = failed(queue, b"x")
    site.looked()
    (link,) = re.findall(r'href="(message\?[^"]*)"', site.get("queue", q="q").text)
    shown = site.client.get(f"/{KEY}/{html.unescape(link)}")
    assert shown.status_code == 200 and "Why it lies in error" in said(shown) and file


def test_what_was_asked_of_the_log_is_found_behind_many_other_lines(site: Site, queue: Queue) -> None:
    failed(queue, b"x")
    (log,) = Path(queue.layout.log).iterdir()
    line = log.read_text().splitlines()[-1].replace('"rejected"', '"purged"')
    with log.open("a") as file:
        file.write(f"{line}\n" * ((2 << 20) // len(line)))
    assert "no x" in said(site.get("log", q="q", event="rejected"))


def test_an_error_in_the_midst_of_an_act_leaves_out_nothing_that_was_done(
    site: Site, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = failed(queue, b"a", b"b", b"c")
    remove, done = Moves.remove, list[str]()

    def broken(self: Moves, state: str, name: str, event: str) -> bool:
        if len(done) == 2:
            raise OSError(5, os.strerror(5), name)
        done.append(name)
        return remove(self, state, name, event)

    monkeypatch.setattr(Moves, "remove", broken)
    shown = said(site.act("purge", *files, step="do", until=site.now(), confirm="q"))
    assert "2 messages purged so far" in shown and "Input/output error" in shown
    assert queue.counts()["error"] == 1


def test_a_plan_to_move_dead_letters_back_counts_nothing_else(site: Site, queue: Queue) -> None:
    queue.send_many([b"x"] * 3)
    assert "Requeue 0 messages" in said(site.act("requeue", state="target", which="all", step="plan", to_origin=1))


def test_head_of_a_body_keeps_no_download_from_another(site: Site, queue: Queue) -> None:
    (file,) = failed(queue, b"x")
    path = f"/{KEY}/body?{urlencode({'q': 'q', 'state': 'error', 'id': file})}"
    for _ in range(app_module.DOWNLOADS + 1):
        assert site.client.head(path).status_code == 200
    assert site.client.get(path).data == b"x"


def test_after_an_act_the_queue_is_looked_at_at_once(site: Site, queue: Queue) -> None:
    site.looked()
    site.page.site.viewer.pause = 3600.0
    site.looked()
    assert site.post(verb="pause", q="q", step="do").status_code == 200
    until(lambda: "Resume" in said(site.get("queue", q="q")), "the look after the pause")
