"""How the page writes ages, sizes, counts and sentences, and what it draws of a queue's last ten minutes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("werkzeug", reason="the extra web is not installed: pip install 'dropq[web]'")

from dropq.web.trend import HEIGHT, LEAST, PERIOD, STEP, WIDTH, Trends, drawing
from dropq.web.words import ago, amount, figure, parts, since


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "-"), (0, "0.0 s"), (0.04, "0.0 s"), (9.94, "9.9 s"), (10, "10 s"), (59.9, "59 s"), (60, "1 m")),
        *((3599, "59 m 59 s"), (3600, "1 h"), (3661, "1 h 1 m"), (86_399, "23 h 59 m"), (86_400, "1 d")),
        *((90_061, "1 d 1 h"), (1e9, "11574 d 1 h")),
    ],
)
def test_an_age_has_two_units_at_most(seconds: float | None, text: str) -> None:
    assert ago(seconds) == text


def test_a_time_that_is_still_to_come_was_just_now() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert since(now + timedelta(seconds=5), now) == "0.0 s"
    assert since(now - timedelta(minutes=2), now) == "2 m"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (1 << 50, "1.0 PiB"),
        (1 << 61, "2048.0 PiB"),
    ],
)
def test_an_amount_has_a_unit(size: int, text: str) -> None:
    assert amount(size) == text


@pytest.mark.parametrize(
    ("number", "text"), [(None, "-"), (0, "0"), (1234567, "1,234,567"), (0.04, "0.0"), (1234.56, "1,234.6")]
)
def test_a_figure_has_its_thousands_apart(number: float | None, text: str) -> None:
    assert figure(number) == text


@pytest.mark.parametrize("text", ["", "a", "`a`", "a `b` c", "`a", "a``b", "a `b` `c`"])
def test_commands_of_a_sentence_stand_between_backticks(text: str) -> None:
    found = list(parts(text))
    assert "".join(part for _, part in found) == text.replace("`", "")
    assert [part for is_command, part in found if is_command] == [part for part in text.split("`")[1::2] if part]


class Looks:
    """Stands for a viewer whose looks a test makes."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def look(self, name: str, at: float, count: int | None) -> None:
        """Let a look show so many messages; None for a look that failed."""
        counts = {} if count is None else {"target": count}
        self.seen[name] = SimpleNamespace(name=name, looked=at, last=SimpleNamespace(counts=counts))

    def all(self) -> list[Any]:
        return list(self.seen.values())


def test_a_trend_has_a_point_each_ten_seconds_of_the_last_ten_minutes() -> None:
    looks, trends = Looks(), Trends()
    for second in range(2000):
        looks.look("q", float(second), second)
        trends.note(looks)  # type: ignore[arg-type]
    points = trends.of("q", 1999.0)
    assert len(points) <= PERIOD / STEP + 1
    assert points[0][0] == pytest.approx(PERIOD, abs=STEP) and points[-1][0] < STEP
    assert all(1999.0 - ago == count for ago, count in points)


def test_a_look_that_failed_is_no_point_and_a_queue_that_went_has_none() -> None:
    looks, trends = Looks(), Trends()
    looks.look("q", 0.0, 5)
    looks.seen["new"] = SimpleNamespace(name="new", looked=0.0, last=None)
    trends.note(looks)  # type: ignore[arg-type]
    looks.look("q", 20.0, None)
    trends.note(looks)  # type: ignore[arg-type]
    assert trends.of("q", 20.0) == [(20.0, 5)] and trends.of("new", 20.0) == trends.of("nowhere", 20.0) == []
    del looks.seen["q"]
    trends.note(looks)  # type: ignore[arg-type]
    assert trends.of("q", 30.0) == [] and not trends._points


def test_little_is_not_drawn() -> None:
    assert drawing([]) == drawing([(0.0, 1)]) == drawing([(LEAST - 1, 1), (0.0, 1)]) == ("", "")


@pytest.mark.parametrize("counts", [(0, 0, 0), (5, 0, 10), (1, 1, 1)])
def test_a_drawing_stays_within_its_frame(counts: tuple[int, ...]) -> None:
    line, area = drawing([(PERIOD + 50, counts[0]), (300.0, counts[1]), (0.0, counts[2])])
    placed = [tuple(map(float, point.split(","))) for point in line.split()]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in placed)
    assert [x for x, _ in placed] == [0.0, WIDTH / 2, WIDTH]
    assert placed[1][1] >= placed[2][1] - 0.1 or counts[1] > counts[2]
    assert area.startswith(f"0.0,{HEIGHT} ") and area.endswith(f"{WIDTH:.1f},{HEIGHT}")
