"""Draw how a topic's message is distributed, as an SVG: `python docs/draw_topics.py > docs/topics.svg`."""

from __future__ import annotations

from html import escape

from draw_lifecycle import COLOURS, arrow, box, show

HEIGHT = 300

#: Boxes: a folder, the middle and the width of its box, and what kind it is.
FOLDERS = (
    (".incoming/target/", 110, 60, 160, "wait"),
    (".incoming/processing/", 340, 60, 190, "held"),
    (".incoming/processed/", 780, 60, 190, "end"),
    ("audit.hq/target/", 780, 170, 190, "wait"),
    ("big.hq/target/", 780, 245, 190, "wait"),
)
#: What the staged folder holds: a name, and where its text stands.
STAGED = (("whole", 128), ("TOKEN~NAME", 178), ("TOKEN~NAME", 228))

#: Arrows: a path, a label, and where the label stands. The commit is the bold one.
ARROWS = (
    ("M190,60 L240,60", "claim", (215, 50)),
    ("M415,83 C430,105 440,124 462,124", "the commit", (390, 124)),
    ("M578,120 C630,110 640,62 680,61", "last", (612, 92)),
    ("M578,174 L680,171", "a rename each", (632, 207)),
    ("M578,226 L680,243", "", (0, 0)),
    ("M300,83 C305,170 380,200 462,200", "copies are written first", (240, 160)),
)
BOLD = "the commit"


def staged() -> str:
    """Return the staged folder, with the message and its copies in it."""
    fill, line = COLOURS["private"]
    names = "".join(
        f'<rect x="470" y="{y - 18}" width="104" height="34" rx="5" fill="white" stroke="{line}"/>'
        f'<text x="522" y="{y + 4}" text-anchor="middle" font-family="monospace" font-size="14" fill="{line}">'
        f"{escape(name)}</text>"
        for name, y in STAGED
    )
    return (
        f'<rect x="460" y="98" width="124" height="164" rx="8" fill="{fill}" stroke="{line}" stroke-width="1.5"/>'
        f'{names}<text x="522" y="284" text-anchor="middle" font-family="monospace" font-size="14" '
        f'fill="{line}">.incoming/.dropq/staged/</text>'
    )


def main() -> None:
    """Print the picture."""
    arrows = (arrow(path, label, position, label == BOLD) for path, label, position in ARROWS)
    boxes = (box(name, x, y, kind, width=width, height=42, font=14) for name, x, y, width, kind in FOLDERS)
    show(HEIGHT, staged(), *arrows, *boxes)


if __name__ == "__main__":
    main()
