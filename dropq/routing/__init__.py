"""The router: it moves messages between queues, by the routes and selectors of a queue, or of a whole root."""

from dropq.routing.router import Router, route
from dropq.routing.serve import Routers, Serving

__all__ = ["Router", "Routers", "Serving", "route"]
