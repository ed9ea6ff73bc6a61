"""Draw how what a filter makes goes out with an ack, as an SVG: `python docs/draw_pipeline.py > docs/pipeline.svg`."""

from __future__ import annotations

from html import escape

from draw_lifecycle import COLOURS, arrow, box, show

HEIGHT = 330

#: Boxes: a folder, the middle and the width of its box, and what kind it is.
FOLDERS = (
    ("scans/target/", 100, 60, 150, "wait"),
    ("scans/processing/", 320, 60, 180, "held"),
    ("scans/processed/", 790, 60, 180, "end"),
    ("texts/working/", 100, 280, 150, "private"),
    ("texts/target/", 790, 230, 180, "wait"),
)
#: What the staged folder holds: a name, and where its text stands.
STAGED = (("whole", 128), ("TOKEN~NAME", 178), ("0.draft", 228))

#: Arrows: a path, a label, and where the label stands. The commit is the bold one.
ARROWS = (
    ("M175,60 L230,60", "claim", (202, 50)),
    ("M290,81 L290,138", "its body", (262, 114)),
    ("M349,169 C385,190 420,222 467,225", "what it writes", (384, 232)),
    ("M175,280 C270,290 370,250 467,236", "an empty file", (270, 302)),
    ("M522,211 L522,197", "", (0, 0)),
    ("M410,70 C440,84 450,124 467,126", "the ack: the one commit", (526, 78)),
    ("M578,178 C630,182 650,226 700,229", "a rename each", (668, 180)),
    ("M578,122 C630,112 650,64 700,61", "last", (668, 100)),
)
BOLD = "the ack: the one commit"


def staged() -> str:
    """Return the staged folder, with the message, a part and a draft in it, and the command that writes the draft."""
    fill, line = COLOURS["private"]
    names = "".join(
        f'<rect x="470" y="{y - 18}" width="104" height="34" rx="5" fill="white" stroke="{line}"/>'
        f'<text x="522" y="{y + 4}" text-anchor="middle" font-family="monospace" font-size="14" fill="{line}">'
        f"{escape(name)}</text>"
        for name, y in STAGED
    )
    return (
        f'<rect x="460" y="98" width="124" height="160" rx="8" fill="{fill}" stroke="{line}" stroke-width="1.5"/>'
        f'{names}<text x="522" y="280" text-anchor="middle" font-family="monospace" font-size="14" '
        f'fill="{line}">scans/.dropq/staged/</text>'
        f'<rect x="230" y="142" width="120" height="42" rx="21" fill="white" stroke="{line}" stroke-width="1.5"/>'
        f'<text x="290" y="168" text-anchor="middle" font-family="monospace" font-size="14" fill="{line}">ocr -</text>'
    )


def main() -> None:
    """Print the picture."""
    arrows = (arrow(path, label, position, label == BOLD) for path, label, position in ARROWS)
    boxes = (box(name, x, y, kind, width=width, height=42, font=14) for name, x, y, width, kind in FOLDERS)
    show(HEIGHT, staged(), *arrows, *boxes)


if __name__ == "__main__":
    main()
