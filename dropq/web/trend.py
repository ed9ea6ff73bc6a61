"""How many messages waited in each queue in the last ten minutes, as looks found it; kept in memory alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dropq.diagnosis.overview import Viewer

#: Seconds that a trend goes back, and between two of its points.
PERIOD, STEP = 600.0, 10.0
#: Seconds that are worth a drawing.
LEAST = 30.0
#: The size of a drawing, in its own units.
WIDTH, HEIGHT = 120, 24

#: A point of a trend: how many seconds ago it was, and how many messages waited.
Point = tuple[float, int]


class Trends:
    """The trends of the queues that a viewer looks at."""

    def __init__(self) -> None:
        self._points: dict[str, deque[tuple[float, int]]] = {}

    def note(self, viewer: Viewer) -> None:
        """Take in the last looks."""
        seen = {one.name: one for one in viewer.all()}
        for name in self._points.keys() - seen.keys():
            del self._points[name]
        for name, one in seen.items():
            if one.last is None or "target" not in one.last.counts:
                continue
            points = self._points.setdefault(name, deque())
            if points and one.looked - points[-1][0] < STEP:
                continue
            points.append((one.looked, one.last.counts["target"]))
            while one.looked - points[0][0] > PERIOD:
                points.popleft()

    def of(self, name: str, now: float) -> list[Point]:
        """Return the trend of a queue, the oldest point first."""
        return [(now - at, count) for at, count in tuple(self._points.get(name, ()))]


def drawing(points: Sequence[Point]) -> tuple[str, str]:
    """Return the points of an SVG polyline, of which the right edge is now, and of the area below it.

    They are empty while there is less than LEAST to draw.
    """
    if not points or points[0][0] - points[-1][0] < LEAST:
        return "", ""
    most = max(count for _, count in points) or 1
    placed = [(WIDTH * (1 - min(ago, PERIOD) / PERIOD), (HEIGHT - 2) * (1 - count / most) + 1) for ago, count in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    return line, f"{placed[0][0]:.1f},{HEIGHT} {line} {placed[-1][0]:.1f},{HEIGHT}"
