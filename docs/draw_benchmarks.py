"""Draw docs/benchmarks/spark.svg and spark.md from spark.json, which `make bench-spark ARGS=--write` measures.

python docs/draw_benchmarks.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "benchmarks"
WIDTH, LEFT, BAR, GAP, TOP = 860, 330, 18, 14, 56
#: Pixels of the ratio 1.
SCALE = 330
COLOURS = {"tmpfs": "#3b6ea5", "disk": "#c17d3a"}


def main() -> None:
    """Write all of it anew."""
    for name, text in drawn().items():
        (HERE / name).write_text(text)


def drawn() -> dict[str, str]:
    """Return the content of each file that is made from the figures."""
    measured = json.loads((HERE / "spark.json").read_text())
    return {"spark.svg": plot(measured), "spark.md": table(measured)}


def ratio(row: dict[str, Any]) -> float:
    """Return how a row stands to its goal: as quick as asked for is 1."""
    if row["what"].startswith("small job"):
        return float(row["goal"]) / float(row["seconds"]["dropq"])
    return float(row["ratio"]) / float(row["goal"])


def plot(measured: dict[str, Any]) -> str:
    """Return a bar for each row: how quick it was, where 1 is what was asked for."""
    rows = measured["rows"]
    height = TOP + len(rows) * (BAR + GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="16" y="24" font-size="16">Spark and dropq: speed, where 1 is the goal</text>',
        f'<text x="16" y="42" fill="#666">{measured["machine"]}; medians of {measured["rounds"]} rounds</text>',
    ]
    for number, row in enumerate(rows):
        y = TOP + number * (BAR + GAP)
        value = ratio(row)
        length = min(value, 1.4) * SCALE
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end">{row["what"]}, {row["on"]}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.0f}" height="{BAR}" fill="{COLOURS[row["on"]]}"/>',
            f'<text x="{LEFT + length + 6:.0f}" y="{y + 13}" fill="#333">{value:.2f}</text>',
        ]
    bottom = TOP + len(rows) * (BAR + GAP)
    x = LEFT + SCALE
    parts += [
        f'<line x1="{x}" y1="{TOP - 6}" x2="{x}" y2="{bottom}" stroke="#a33" stroke-dasharray="4 3"/>',
        f'<text x="{x}" y="{bottom + 16}" text-anchor="middle" fill="#a33">goal</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def table(measured: dict[str, Any]) -> str:
    """Return the figures as a table."""
    lines = [
        "# Spark: the figures",
        "",
        f"{measured['machine']}; medians of {measured['rounds']} rounds, durability `none`. Drawn by",
        "[draw_benchmarks.py](../draw_benchmarks.py) from [spark.json](spark.json); `make bench-spark` measures anew.",
        "",
        "![speed against the goals](spark.svg)",
        "",
        "| what | on | against, s | dropq, s | lowest, highest | ratio | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in measured["rows"]:
        (other, seconds), (_, ours) = row["seconds"].items()
        low, high = row["range"]
        small = row["what"].startswith("small job")
        goal = f"{row['goal']} s" if small else f"{row['goal']:.2f}"
        lines.append(
            f"| {row['what']} | {row['on']} | {other}: {seconds:.2f} | {ours:.2f} | {low:.2f}, {high:.2f} | "
            f"{'' if small else format(row['ratio'], '.2f')} | {goal} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
