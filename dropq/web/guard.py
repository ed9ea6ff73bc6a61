"""Who gets an answer, and what a browser may do with it: decided by the request alone, before anything is read.

All paths lie below a key, which no browser sends by itself, and no other site knows. Behind a proxy there is no key:
it alone can connect, and names the user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hmac import compare_digest

from werkzeug import Request

#: The hosts that a page on a TCP port, or at the end of `ssh -L`, is asked for by; the port may be any.
HOST = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]{1,5})?", re.IGNORECASE)
#: Bytes of a form.
FORM_LIMIT = 64 << 10
#: What each answer tells a browser.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
}


class Refused(Exception):
    """Raised for a request that gets no page: the status of the answer, and what it says."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def not_found() -> Refused:
    """Return the answer to each path that is not below the key, and to each that leads to no page: all are alike."""
    return Refused(404, "Not found.")


@dataclass(frozen=True)
class Guard:
    """What a request needs to be answered.

    Attributes:
        key: the first part of each path; "" behind a proxy.
        user_header: the header in which a proxy names the user; "" without a proxy.
    """

    key: str
    user_header: str = ""

    def page_of(self, request: Request) -> str | None:
        """Return the page that is asked for, below the key; None for the key without a slash behind it.

        Raises:
            Refused: the path does not lie below the key, or the host is another.
        """
        path = request.environ.get("PATH_INFO", "")
        if not self.key:
            return str(path.removeprefix("/"))
        _, _, rest = path.partition("/")
        key, slash, page = rest.partition("/")
        if not path.startswith("/") or not compare_digest(key.encode(), self.key.encode()):
            raise not_found()
        if not HOST.fullmatch(request.environ.get("HTTP_HOST", "")):
            raise Refused(421, "This page answers at localhost, 127.0.0.1 and [::1] only.")
        return str(page) if slash else None

    def user_of(self, request: Request) -> str:
        """Return the user whom a proxy names; "" without a proxy."""
        if not self.user_header:
            return ""
        user = request.headers.get(self.user_header, "").strip()
        if not user:
            raise Refused(403, "The proxy names no user: it has to set the header that --proxy-user says.")
        return user.encode("latin-1", "replace").decode("utf-8", "replace")  # a server hands on bytes so

    def check_form(self, request: Request) -> None:
        """Refuse a form that another site may have sent, or that is no plain form."""
        site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
        host = request.environ.get("HTTP_HOST", "")
        ours = (None, f"http://{host}", f"https://{host}")
        if site != "same-origin" if site is not None else origin not in ours:
            raise Refused(403, "This form was sent from another site: nothing was done.")
        if request.mimetype != "application/x-www-form-urlencoded":
            raise Refused(415, "A form has to be application/x-www-form-urlencoded: nothing was done.")
        if (request.content_length or 0) > FORM_LIMIT:
            raise Refused(413, "This form is too long: nothing was done.")
