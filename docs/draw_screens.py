"""Draw what a terminal shows as SVGs, from real runs: `python docs/draw_screens.py` writes docs/screen-*.svg.

Each picture is a session of its own in an empty folder, on a terminal of 80 columns. Ids and times are the run's.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from html import escape
from pathlib import Path

from rich.style import Style
from rich.text import Text

DOCS = Path(__file__).parent
COLUMNS, LINES = 80, 40
#: Pixels of a character, and around all.
ACROSS, DOWN, MARGIN = 8.4, 19, 14

#: A terminal's red and yellow by their numbers, for a dark ground.
COLOURS = {1: "#ff7b7b", 3: "#f0c674"}

#: What a terminal does not show in the end: another screen, which was left; what moves the cursor, and clears lines.
MOVES = re.compile(r"\x1b\[\?1049h.*?\x1b\[\?1049l|\x1b\[[HJK]", re.DOTALL)

#: What a session does unseen, then the commands that are shown.
SESSIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "work": (
        """
        dropq create orders --set redelivery_attempts=2
        for region in EU US; do echo '{"item": 7}' | dropq send orders -p region=$region; done
        echo 'not an order' | dropq send orders
        echo 'a broken one' | dropq send orders --priority 2
        printf '%s\\n' '#!/bin/sh' 'sleep 0.2; case $(cat) in *item*) ;; a*) exit 65 ;; *) exit 1 ;; esac' > handle
        chmod +x handle
        """,
        ("dropq work orders --until-empty -- ./handle", "dropq ls orders"),
    ),
    "top": (
        """
        for queue in orders invoices imports nightly; do dropq create $queue --set redelivery_attempts=0; done
        dropq create small --set max_unprocessed=3
        seq 400 | dropq send orders --lines
        dropq work orders --until-empty -j 4 -q -- true
        seq 12 | dropq send orders --lines
        dropq receive orders -n 4 --lease 5m
        seq 3 | dropq send invoices --lines
        dropq work invoices --until-empty -q -- false || true
        seq 90 | dropq send nightly --lines
        dropq pause nightly
        seq 3 | dropq send small --lines
        """,
        ("dropq top -n 1",),
    ),
    "explain": (
        """
        dropq create jobs --set max_backlog=1 --set priority=/urgency
        echo '{"urgency": 1}' | dropq send jobs
        echo '{"urgency": 5}' | dropq send jobs
        echo '{"urgency": 3}' | dropq send jobs --delay 1h
        dropq receive jobs --lease 5m
        """,
        ("dropq browse jobs --explain",),
    ),
}


def ran(script: str, folder: Path, *, shown: bool) -> str:
    """Run a script in a folder; return what it shows on a terminal."""
    commands = Path(sys.executable).parent
    environment = {"PATH": f"{commands}:{os.defpath}", "HOME": str(folder), "TERM": "xterm-256color"}
    if not shown:
        subprocess.run(["sh", "-ec", script], cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
        return ""
    leader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (LINES, COLUMNS))
    child = subprocess.Popen(
        ["sh", "-c", script], cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    text = b"".join(chunks(leader))
    os.close(leader)
    child.wait()
    return MOVES.sub("", text.decode().replace("\r\n", "\n"))


def chunks(leader: int) -> Iterator[bytes]:
    """Yield what comes from a terminal, until nobody has its other end."""
    while True:
        try:
            chunk = os.read(leader, 1 << 16)
        except OSError:  # how Linux reports the end
            return
        if not chunk:
            return
        yield chunk


def span(text: str, style: Style) -> str:
    """Return a part of a line as SVG."""
    number = style.color.number if style.color is not None else None
    colour = f' fill="{COLOURS[number]}"' if number is not None else ""
    weight = ' font-weight="bold"' if style.bold else ""
    return f"<tspan{colour}{weight}>{escape(text)}</tspan>"


def drawn(session: str) -> str:
    """Return what a terminal showed, with colours as escape sequences, as an SVG."""
    whole = Text.from_ansi(session.rstrip("\n")).split("\n", allow_blank=True)
    lines = [part for line in whole for part in line.divide(range(COLUMNS, len(line), COLUMNS))]
    width, height = COLUMNS * ACROSS + 2 * MARGIN, len(lines) * DOWN + 2 * MARGIN
    rows = []
    for number, line in enumerate(lines):
        parts, at = [], 0
        for piece in line.spans:
            style = piece.style if isinstance(piece.style, Style) else Style.parse(piece.style)
            parts += [escape(line.plain[at : piece.start]), span(line.plain[piece.start : piece.end], style)]
            at = piece.end
        text = "".join(parts) + escape(line.plain[at:])
        rows.append(f'<text xml:space="preserve" x="{MARGIN}" y="{MARGIN + (number + 0.75) * DOWN:.0f}">{text}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
            'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="14" fill="#d8dee9">',
            f'<rect width="{width:.0f}" height="{height}" rx="6" fill="#20242c"/>',
            *rows,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Run the sessions and draw each."""
    for name, (unseen, commands) in SESSIONS.items():
        with tempfile.TemporaryDirectory(prefix="dropq-screen-") as above:
            (folder := Path(above) / "work").mkdir()
            ran(f"dropq init . && {unseen.strip()}", folder, shown=False)
            shown = (f"$ {command}\n{ran(command, folder, shown=True)}" for command in commands)
            (DOCS / f"screen-{name}.svg").write_text(drawn("\n".join(shown)))


if __name__ == "__main__":
    main()
