"""The page: what waits, how old it is, who holds it, why it stands, what failed and how; and verbs that put it right.

HTML and a style sheet, without a script, a login or a store: it shows the look and the log, and acts by the library's
verbs. `dropq web` serves it; another WSGI server may, too.
"""

from dropq.web.app import Application, application

__all__ = ["Application", "application"]
