"""Draw the life of a message as an SVG: `python docs/draw_lifecycle.py > docs/lifecycle.svg`."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT = 900, 430

#: Where each folder stands: the middle of its box, and what kind it is.
FOLDERS = {
    "working": (90, 130, "private"),
    "target": (310, 130, "wait"),
    "processing": (560, 130, "held"),
    "processed": (800, 130, "end"),
    ".dropq/delayed": (310, 30, "private"),
    "error": (800, 250, "bad"),
    "expired": (560, 300, "bad"),
}

COLOURS = {
    "private": ("#eceff1", "#607d8b"),
    "wait": ("#e3f2fd", "#1565c0"),
    "held": ("#fff8e1", "#b26a00"),
    "end": ("#e8f5e9", "#2e7d32"),
    "bad": ("#ffebee", "#b71c1c"),
}

#: Arrows: a path, a label, where the label stands, and whether it is bold, as the happy path is.
ARROWS = (
    ("M160,130 L236,130", "send", (199, 122), True),
    ("M380,118 L486,118", "claim", (433, 110), True),
    ("M630,130 L726,130", "ack", (679, 122), True),
    ("M490,146 C460,172 415,172 384,148", "nack · lease over · holder dead", (436, 186), False),
    ("M110,107 C150,60 190,36 236,31", "send with delay", (120, 50), False),
    ("M310,53 L310,103", "due", (328, 84), False),
    ("M545,107 C520,60 440,34 384,31", "nack with delay", (520, 46), False),
    ("M585,107 C600,70 640,70 612,104", "extend", (634, 76), False),
    ("M600,153 C650,210 690,240 726,248", "reject · failed · limits", (722, 208), False),
    ("M560,153 L560,273", "expired", (532, 240), False),
    ("M290,153 C300,250 400,300 486,300", "expired", (330, 262), False),
    (
        "M800,273 C800,400 230,440 265,157",
        "requeue, or mv by hand (from processed/ and expired/ too)",
        (520, 385),
        False,
    ),
)


def box(name: str, x: int, y: int, kind: str, *, width: int = 140, height: int = 46, font: int = 15) -> str:
    """Return the box of a folder."""
    fill, line = COLOURS[kind]
    return (
        f'<rect x="{x - width // 2}" y="{y - height // 2}" width="{width}" height="{height}" rx="8" '
        f'fill="{fill}" stroke="{line}" stroke-width="1.5"/>'
        f'<text x="{x}" y="{y + 5}" text-anchor="middle" font-family="monospace" font-size="{font}" '
        f'fill="{line}">{escape(name)}</text>'
    )


def arrow(path: str, label: str, position: tuple[int, int], bold: bool) -> str:
    """Return an arrow and what it is called."""
    colour, width = ("#212121", 2.5) if bold else ("#78909c", 1.4)
    weight, head = ("bold", "big") if bold else ("normal", "tip")
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" marker-end="url(#{head})"/>'
        f'<text x="{position[0]}" y="{position[1]}" text-anchor="middle" font-family="sans-serif" font-size="12" '
        f'font-weight="{weight}" fill="{colour}">{escape(label)}</text>'
    )


def show(height: int, *parts: str) -> None:
    """Print boxes and arrows as a picture."""
    marker = (
        '<marker id="{0}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="{2}" markerHeight="{2}" '
        'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{1}"/></marker>'
    )
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">')
    print(f"<defs>{marker.format('tip', '#78909c', 9)}{marker.format('big', '#212121', 6)}</defs>")
    print(f'<rect width="{WIDTH}" height="{height}" fill="white"/>')
    print("\n".join(parts))
    print("</svg>")


def main() -> None:
    """Print the picture."""
    boxes = (box(f"{name}/", *where) for name, where in FOLDERS.items())
    show(HEIGHT, *(arrow(*each) for each in ARROWS), *boxes)


if __name__ == "__main__":
    main()
