"""The router: it moves messages between queues, by the routes of a queue that nobody consumes."""

from dropq.routing.router import Router, route

__all__ = ["Router", "route"]
