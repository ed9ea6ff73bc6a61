"""The page as a WSGI application: which page a request gets, what it may say, and how errors are told."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property, partial
from http import HTTPStatus
from importlib.resources import files
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from werkzeug import Request, Response
from werkzeug.datastructures import MultiDict
from werkzeug.exceptions import HTTPException

from dropq.diagnosis.overview import TICK, Viewer
from dropq.errors import DropqError, NoSuchMessage, NoSuchQueue
from dropq.events.log import VIA
from dropq.format.printable import escape, reason_text, visible
from dropq.storage.failures import describe
from dropq.web import acts, pages, trend
from dropq.web.arguments import Arguments, parse
from dropq.web.guard import FORM_LIMIT, HEADERS, Guard, Refused, not_found
from dropq.web.pages import PAGES, Page, Site
from dropq.web.words import ago, amount, figure, parts, since

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

    from dropq.api import Root

log = logging.getLogger("dropq")

#: Seconds until a page asks for itself again, and where the first look is under way.
REFRESH, FIRST = 5, 1
#: Seconds between two looks at a queue while somebody has a page open, which shows one each REFRESH, and while nobody
#: has; and for how long a page counts as open.
WATCHED, UNWATCHED, OPEN = 2.5, 10.0, 20.0
#: How many times as long as a look took its queue is not looked at: an open page takes a 50th of a processor at most.
RESTS = 50
#: How many bodies may be saved at once, and bytes of a piece.
DOWNLOADS, PIECE = 2, 64 << 10


def application(
    root: Root, *, writable: bool = False, bodies: bool = True, key: str | None = None, user_header: str = ""
) -> Application:
    """Return the page of a root as a WSGI application, for a server with threads.

    Args:
        writable: let people requeue, purge, pause and resume.
        bodies: show bodies, and let people save them.
        key: the first part of each path, which only those may know who may see the page; None makes a new one, which
            `link` has.
        user_header: the header in which a proxy names the user who is logged in. Then there is no key: nobody but the
            proxy may be able to connect.
    """
    guard = Guard("" if user_header else key or secrets.token_urlsafe(16), user_header)
    return Application(Site(root, Viewer(root.context), writable, bodies), guard)


class Application:
    """The page of a root.

    Attributes:
        site: what its pages share.
        link: the path of the root's page, with the key.
    """

    def __init__(self, site: Site, guard: Guard) -> None:
        self.site = site
        self._guard = guard
        self.link = f"/{guard.key}/" if guard.key else "/"
        self._downloads = threading.BoundedSemaphore(DOWNLOADS)
        self._watched = 0.0
        self._lock = threading.Lock()
        self._has_begun = False
        self._ending = threading.Event()
        self._acting, self._acted = 0, threading.Condition()
        optional = {"do": site.writable, "body": site.bodies}
        self._known = {*PAGES, "style.css", *(name for name, is_there in optional.items() if is_there)}

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        request = Request(environ)
        request.max_content_length = request.max_form_memory_size = FORM_LIMIT
        try:
            name, user = self._guard.page_of(request), self._guard.user_of(request)
            known = name is None or name in self._known
            response = self._answer(request, name, user) if known else _plain(not_found())
        except Refused as refused:
            response = _plain(refused)
        response.headers.update(HEADERS)
        return response(environ, start_response)

    def look(self) -> None:
        """Begin to look at the queues, unless that has begun."""
        with self._lock:
            if not self._has_begun:
                self._has_begun = True
                threading.Thread(target=self._keep_looking, daemon=True).start()

    def end(self, grace: float) -> None:
        """Begin no look, and wait for these seconds until acts that run have told what they did."""
        self._ending.set()
        self.site.viewer.close()
        until = time.monotonic() + grace
        with self._acted:
            while self._acting and (left := until - time.monotonic()) > 0:
                self._acted.wait(left)

    def _keep_looking(self) -> None:
        viewer = self.site.viewer
        viewer.rests = RESTS
        while not self._ending.wait(TICK):
            viewer.pause = WATCHED if time.monotonic() - self._watched < OPEN else UNWATCHED
            viewer.refresh()
            self.site.trends.note(viewer)

    def _answer(self, request: Request, name: str | None, user: str) -> Response:
        if name is None:
            return Response(status=308, headers={"Location": self.link[1:]})
        if name == "style.css":
            return Response(self._style, mimetype="text/css")
        self.look()
        try:
            return self._page(request, name, user)
        except Refused as refused:
            status, text = refused.status, str(refused)
        except (DropqError, OSError) as error:
            status, text = _status(error), f"{describe(error)}."
        except HTTPException as error:
            status, text = error.code or 400, "This request cannot be answered: nothing was done."
        except Exception:
            log.exception("a page could not be shown")
            status, text = 500, "This is a fault of dropq: the log of this process has the traceback."
        title = HTTPStatus(status).phrase
        return self._rendered(Page("problem.html", {"title": title, "text": text}, status=status), user)

    def _page(self, request: Request, name: str, user: str) -> Response:
        if name == "do":
            return self._act(request, user)
        if request.method not in ("GET", "HEAD"):
            raise Refused(405, "This page is only read: nothing was done.")
        if name == "body":
            return self._body(parse(_asked(request), ("q", "state", "id")))
        self._watched = time.monotonic()
        page, parameters = PAGES[name]
        return self._rendered(page(self.site, parse(_asked(request), parameters)), user)

    def _act(self, request: Request, user: str) -> Response:
        if request.method != "POST":
            raise Refused(405, "This address takes forms only: nothing was done.")
        self._guard.check_form(request)
        args = parse(request.form, acts.PARAMETERS)
        token = VIA.set(f"web:{user}" if user else "web")
        with self._acted:
            self._acting += 1
        try:
            done = acts.act(self.site, args, self._ending.is_set)
            self.site.viewer.look_soon(args.queue)
            return self._rendered(done, user)
        finally:
            VIA.reset(token)
            with self._acted:
                self._acting -= 1
                self._acted.notify_all()

    def _body(self, args: Arguments) -> Response:
        if not self._downloads.acquire(blocking=False):
            raise Refused(503, f"{DOWNLOADS} bodies are being saved already: try again once one of them is there.")
        try:
            file, size, name = pages.body(self.site, args)
        except BaseException:
            self._downloads.release()
            raise
        response = Response(_pieces(file, size), mimetype="application/octet-stream")
        response.call_on_close(self._downloads.release)
        response.call_on_close(partial(_close, file))
        saved_as = quote(escape(name), safe="")  # a header is ASCII
        response.headers["Content-Disposition"] = f"attachment; filename*=UTF-8''{saved_as}"
        response.content_length = size
        return response

    def _rendered(self, page: Page, user: str) -> Response:
        site = self.site
        shared = {
            "root_name": site.name,
            "writable": site.writable,
            "bodies": site.bodies,
            "user": user,
            "at": datetime.now(UTC),
        }
        text = self._templates.get_template(page.template).render({**shared, **page.shown})
        response = Response(text, page.status, mimetype="text/html")
        if page.refreshes:
            response.headers["Refresh"] = str(FIRST if page.shown["age"] is None else REFRESH)
        return response

    @cached_property
    def _style(self) -> bytes:
        return files("dropq.web").joinpath("style.css").read_bytes()

    @cached_property
    def _templates(self) -> Environment:
        templates = Environment(
            loader=PackageLoader("dropq.web"),
            autoescape=True,
            auto_reload=False,  # else each page asks the disk that dropq lies on
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_shown,
        )
        templates.filters |= {
            **{"name": escape, "reason": reason_text, "parts": parts},
            **{"amount": amount, "figure": figure, "ago": ago, "since": since},
        }
        templates.globals |= {"drawing": trend.drawing, "WIDTH": trend.WIDTH, "HEIGHT": trend.HEIGHT}
        return templates


def _asked(request: Request) -> MultiDict[str, str]:
    """Return the parameters of an address; its bytes need not be encoded."""
    try:
        return request.args
    except UnicodeDecodeError as error:
        raise Refused(400, "The address of this page is no UTF-8.") from error


def _plain(refused: Refused) -> Response:
    """Return an answer in one sentence, without a link: it is the same at each path."""
    return Response(f"{refused}\n", refused.status, mimetype="text/plain")


def _status(error: DropqError | OSError) -> int:
    if isinstance(error, NoSuchQueue | NoSuchMessage):
        return 404
    return 400 if isinstance(error, ValueError) else 503


def _shown(value: Any) -> Any:
    """Make what a template inserts safe to show: no text has a control character, whoever wrote it."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):
        file.close()


def _pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    try:
        while size and (piece := file.read(min(PIECE, size))):
            size -= len(piece)
            yield piece
    except OSError as error:  # the server ends the connection; it would log the path, which has the key
        log.warning("a body could not be saved whole: %s", describe(error))
