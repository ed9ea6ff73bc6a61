"""Draw how a topic's message is distributed, as an SVG: `python docs/draw_topics.py > docs/topics.svg`."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT = 900, 300

#: Boxes: a folder, the middle and the width of its box, and what kind it is.
FOLDERS = (
    (".incoming/target/", 110, 60, 160, "wait"),
    (".incoming/processing/", 340, 60, 190, "held"),
    (".incoming/processed/", 780, 60, 190, "end"),
    ("audit.hq/target/", 780, 170, 190, "wait"),
    ("big.hq/target/", 780, 245, 190, "wait"),
)
COLOURS = {
    "wait": ("#e3f2fd", "#1565c0"),
    "held": ("#fff8e1", "#b26a00"),
    "end": ("#e8f5e9", "#2e7d32"),
    "staged": ("#eceff1", "#607d8b"),
}
#: What the staged folder holds: a name, and where its text stands.
STAGED = (("whole", 128), ("KEY~NAME", 178), ("KEY~NAME", 228))

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


def box(name: str, x: int, y: int, width: int, kind: str) -> str:
    """Return the box of a folder."""
    fill, line = COLOURS[kind]
    return (
        f'<rect x="{x - width // 2}" y="{y - 21}" width="{width}" height="42" rx="8" fill="{fill}" stroke="{line}" '
        f'stroke-width="1.5"/><text x="{x}" y="{y + 5}" text-anchor="middle" font-family="monospace" font-size="14" '
        f'fill="{line}">{escape(name)}</text>'
    )


def staged() -> str:
    """Return the staged folder, with the message and its copies in it."""
    fill, line = COLOURS["staged"]
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


def arrow(path: str, label: str, place: tuple[int, int]) -> str:
    """Return an arrow and what it is called."""
    bold = label == BOLD
    colour, width = ("#212121", 2.5) if bold else ("#78909c", 1.4)
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
        f'marker-end="url(#{"big" if bold else "tip"})"/>'
        f'<text x="{place[0]}" y="{place[1]}" text-anchor="middle" font-family="sans-serif" font-size="12" '
        f'font-weight="{"bold" if bold else "normal"}" fill="{colour}">{escape(label)}</text>'
    )


def main() -> None:
    """Print the picture."""
    marker = (
        '<marker id="{0}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="{2}" markerHeight="{2}" '
        'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{1}"/></marker>'
    )
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">')
    print(f"<defs>{marker.format('tip', '#78909c', 9)}{marker.format('big', '#212121', 6)}</defs>")
    print(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    print(staged())
    print("\n".join(arrow(*each) for each in ARROWS))
    print("\n".join(box(*each) for each in FOLDERS))
    print("</svg>")


if __name__ == "__main__":
    main()
