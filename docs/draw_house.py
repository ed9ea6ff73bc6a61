"""Draw which room of the library imports which as an SVG: `python docs/draw_house.py > docs/house.svg`.

The rooms and their order come from docs/design.md, the arrows from the imports in dropq/: those at the top of a module,
those inside functions, and those for the type checker alone.
"""

from __future__ import annotations

import ast
import re
from html import escape
from pathlib import Path

TOP = Path(__file__).parent.parent
WIDTH, ROW, LEFT, BOX = 900, 40, 20, (150, 28)

#: The rooms, lowest first, each with the beginning of what it knows.
ROOMS = re.findall(r"^\| `dropq/(\w+)[./`]*(?:py`)? \| ([^:;|]+)", (TOP / "docs/design.md").read_text(), re.MULTILINE)


def imported_by(room: str) -> set[str]:
    """Return the rooms that the modules of a room import, apart from itself."""
    names = [name for name, _ in ROOMS]
    folder = TOP / "dropq" / room
    found: set[str] = set()
    for path in folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dropq":
                parts = (node.module or "").split(".")
                found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return (found & set(names)) - {room}


def middle(number: int) -> int:
    """Return the height of a room's middle; the highest room is drawn first."""
    return ROW * (len(ROOMS) - number) - ROW // 2 + 10


def box(number: int, room: str, knows: str) -> str:
    """Return the box of a room, and what it knows."""
    width, height = BOX
    y = middle(number)
    return (
        f'<rect x="{LEFT}" y="{y - height // 2}" width="{width}" height="{height}" rx="6" fill="#e3f2fd" '
        'stroke="#1565c0" stroke-width="1.2"/>'
        f'<text x="{LEFT + width // 2}" y="{y + 5}" text-anchor="middle" font-family="monospace" font-size="14" '
        f'fill="#1565c0">{escape(room)}</text>'
        f'<text x="{LEFT + width + 190}" y="{y + 5}" font-family="sans-serif" font-size="12" fill="#37474f">'
        f"{escape(knows.replace('`', '').strip())}</text>"
    )


def arrow(source: int, target: int) -> str:
    """Return the arc of an import; one that runs upwards is red."""
    x = LEFT + BOX[0]
    begin, end = middle(source), middle(target)
    reach = x + 14 + 11 * abs(source - target)
    colour = "#90a4ae" if target < source else "#b71c1c"
    return (
        f'<path d="M{x},{begin} C{reach},{begin} {reach},{end} {x + 4},{end}" fill="none" stroke="{colour}" '
        'stroke-width="1" marker-end="url(#tip)"/>'
    )


def main() -> None:
    """Print the picture."""
    height = ROW * len(ROOMS) + 20
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">')
    print(
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0,0 L10,5 L0,10 z" fill="#78909c"/></marker></defs>'
    )
    print(f'<rect width="{WIDTH}" height="{height}" fill="white"/>')
    numbers = {room: number for number, (room, _) in enumerate(ROOMS)}
    for room, number in numbers.items():
        for other in sorted(imported_by(room), key=numbers.__getitem__):
            print(arrow(number, numbers[other]))
    for room, knows in ROOMS:
        print(box(numbers[room], room, knows))
    print("</svg>")


if __name__ == "__main__":
    main()
