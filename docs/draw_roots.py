"""Draw three ways to join roots as an SVG: `python docs/draw_roots.py > docs/roots.svg`."""

from __future__ import annotations

from draw_lifecycle import arrow, box, show

HEIGHT = 250

#: Boxes: a root, the middle of its box, and what kind it is: the one that owns what is sent, or another.
ROOTS = (
    ("north", 80, 90, "wait"),
    ("south", 230, 90, "wait"),
    ("hub", 445, 160, "wait"),
    ("east", 380, 60, "end"),
    ("west", 510, 60, "end"),
    ("shop", 660, 90, "end"),
    ("centre", 820, 90, "wait"),
)
#: Arrows show where messages go: a path, a label, and where the label stands.
ARROWS = (
    ("M124,82 L184,82", "", (0, 0)),
    ("M186,98 L126,98", "what the other wants", (155, 130)),
    ("M388,79 L424,140", "", (0, 0)),
    ("M436,140 L400,79", "", (0, 0)),
    ("M502,79 L466,140", "what is wanted", (445, 108)),
    ("M454,140 L490,79", "", (0, 0)),
    ("M704,90 L774,90", "all, at once", (739, 78)),
)
#: Headings, and what is below each layout.
TEXTS = (
    ("a pair", 155, 24, "bold"),
    ("each names the other", 155, 215, "normal"),
    ("a hub with spokes", 445, 24, "bold"),
    ("spokes name the hub alone", 445, 215, "normal"),
    ("a site that only publishes", 740, 24, "bold"),
    ("a GroupLocalQueue of the centre", 740, 215, "normal"),
)


def main() -> None:
    """Print the picture."""
    texts = (
        f'<text x="{x}" y="{y}" text-anchor="middle" font-family="sans-serif" font-size="14" font-weight="{weight}" '
        f'fill="#212121">{text}</text>'
        for text, x, y, weight in TEXTS
    )
    arrows = (arrow(path, label, position, bold=False) for path, label, position in ARROWS)
    boxes = (box(name, x, y, kind, width=88, height=38) for name, x, y, kind in ROOTS)
    show(HEIGHT, *texts, *arrows, *boxes)


if __name__ == "__main__":
    main()
