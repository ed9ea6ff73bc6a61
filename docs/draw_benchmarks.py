"""Draw what is in docs/benchmarks: spark.* from spark.json, queues* from queues.json, nfs.md from nfs.json.

`make bench-spark`, `make bench` and `make bench-nfs` measure these with ARGS=--write. python docs/draw_benchmarks.py
draws; the pictures of queues need matplotlib, which the extra `bench` has, and tell by a mark which figures they were
drawn from.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "benchmarks"
WIDTH, LEFT, BAR, GAP, TOP = 880, 350, 18, 14, 56
#: Pixels of the ratio 1.
SCALE = 330
COLOURS = {"tmpfs": "#3b6ea5", "disk": "#c17d3a"}

Row = dict[str, Any]


def main() -> int:
    """Write all of it anew; 1 where pictures could not be drawn."""
    for name, text in drawn().items():
        (HERE / name).write_text(text)
    try:
        draw_queues()
    except ModuleNotFoundError as error:
        print(f"the pictures of queues were not drawn: {error}: pip install '.[bench]'", file=sys.stderr)
        return 1
    return 0


def drawn() -> dict[str, str]:
    """Return the content of each file that is made from the figures by this program alone."""
    measured = json.loads((HERE / "spark.json").read_text())
    texts = {"spark.svg": plot(measured), "spark.md": table(measured)}
    if queues := queues_measured():
        texts["queues.md"] = queue_tables(queues)
    if (path := HERE / "nfs.json").exists():
        texts["nfs.md"] = nfs_tables(json.loads(path.read_text()))
    return texts


# -- Spark -----------------------------------------------------------------------------------------------------------


def ratio(row: dict[str, Any]) -> float:
    """Return how a row stands to its goal: as quick as asked for is 1."""
    if row["goal_in"] == "seconds":
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
        where = f"{row['on']}, with pandas" if row["pandas"] else row["on"]
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end">{row["what"]}, {where}</text>',
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
        "`alone` is a sink in Python that throws the rows away, or a source that has them ready: what Spark takes for",
        "any data source in Python.",
        "",
        "| what | on | pandas | against, s | alone, s | dropq, s | lowest, highest | ratio | goal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in measured["rows"]:
        (other, seconds), (_, ours) = row["seconds"].items()
        low, high = row["range"]
        absolute = row["goal_in"] == "seconds"
        alone = format(row["alone"], ".2f") if "alone" in row else ""
        goal = f"{row['goal']} s" if absolute else f"{row['goal']:.2f}"
        lines.append(
            f"| {row['what']} | {row['on']} | {'yes' if row['pandas'] else 'no'} | {other}: {seconds:.2f} | "
            f"{alone} | "
            f"{ours:.2f} | {low:.2f}, {high:.2f} | {'' if absolute else format(row['ratio'], '.2f')} | {goal} |"
        )
    return "\n".join(lines) + "\n"


# -- NFS -------------------------------------------------------------------------------------------------------------

#: What a row's RPCs are counted for, and the heading of the table of such rows; below it, what there is to say.
COUNTED_FOR = {
    "message": ("A message", ""),
    "record": ("A record", ""),
    "command": ("A command of the shell", "On a queue that the client knows since a moment ago, with one message."),
    "look at a deep queue, cold": ("A look at a deep queue", "The client has just mounted, and knows no file."),
    "second": ("A second in which nothing comes", "Once the consumer has waited for some seconds."),
}
LAGS = ("A message of another client", "Seconds from a send on one client to a waiting consumer on the other.")


def nfs_tables(measured: Row) -> str:
    """Return the RPCs of each version as tables."""
    commits = dict.fromkeys(row["commit"] for rows in measured["versions"].values() for row in rows)
    before = dict.fromkeys(kept["commit"] for kept in measured["before"].values())
    lines = [
        "# NFS: the figures",
        "",
        "RPCs that clients of NFS send to the server, counted by their kernel, and NFS 3's locks by a packet socket. A",
        f"real server and two clients run in user-mode-linux; a request and its reply need {measured['rtt_ms']:g} ms.",
        f"{measured['count']} messages of 1 KiB, {measured['deep']:,} in a deep queue; `raw` is the raw loop of system",
        "calls. What a process pays once is left out, and so is the upkeep of each minute. What a consumer asks for",
        "each tenth of a second, and each second, is counted: on a busy machine it is more for a message and less for",
        "a second. Drawn by [draw_benchmarks.py](../draw_benchmarks.py) from [nfs.json](nfs.json); `make bench-nfs`",
        f"measures them again. Now: commit {', '.join(commits)}"
        + (f"; before: {', '.join(before)}." if before else "."),
    ]
    for version, rows in measured["versions"].items():
        was = measured["before"].get(version, {}).get("figures", {})
        for unit, (heading, more) in COUNTED_FOR.items():
            if some := [row for row in rows if row["unit"] == unit and "all" in row]:
                lines += [
                    "",
                    f"## {heading}, {version}",
                    "",
                    *([more, ""] if more else []),
                    *rpcs_of(some, rows, was, measured["kinds"]),
                ]
        if late := [row for row in rows if "lag" in row]:
            lines += ["", f"## {LAGS[0]}, {version}", "", LAGS[1], "", *lags_of(late, was)]
    return "\n".join(lines) + "\n"


def rpcs_of(rows: list[Row], every: list[Row], before: Row, kinds: list[str]) -> Iterator[str]:
    """Yield the lines of a table: a column for each kind of RPC that is in it."""
    kinds = [kind for kind in kinds if any(kind in row["kinds"] for row in rows)]
    raw = {row["case"]: row["all"] for row in every if "all" in row}
    heads = ["", *kinds, "**all**", "raw", "before"]
    yield f"| {' | '.join(heads)} |"
    yield "|---|" + "---:|" * (len(heads) - 1)
    for row in rows:
        cells = [rpcs(row["kinds"].get(kind)) for kind in kinds]
        ends = [f"**{rpcs(row['all'])}**", rpcs(raw.get(row["raw"])), rpcs(before.get(row["case"]))]
        yield f"| {' | '.join([row['title'], *cells, *ends])} |"


def rpcs(count: float | None) -> str:
    """Return a number of RPCs as it stands in a table."""
    if not count:
        return ""
    return f"{count:,.0f}" if count >= 100 else f"{count:.1f}" if count >= 0.1 else f"{count:.2f}"


def lags_of(rows: list[Row], before: Row) -> Iterator[str]:
    """Yield the lines of a table of lags."""
    yield "| | median | p99 | before |"
    yield "|---|---:|---:|---:|"
    for row in rows:
        was = ", ".join(f"{lag:.2f}" for lag in before.get(row["case"], ()))
        yield f"| {row['title']} | {row['lag'][0]:.2f} | {row['lag'][1]:.2f} | {was} |"


# -- queues ------------------------------------------------------------------------------------------------------------

#: What the parts are, for who reads their tables; of a part with more than one table, by the table.
TITLES = {
    "one": "One and one",
    "four": "Four and four",
    "drained": "Four that take",
    "batch": "One by one, and by the thousand",
    "depth": "Many that wait",
    "policies": "Policies",
    "contended": "Policies, and four that take",
    "topics": "Topics",
    "pipeline": "A stage of a pipeline",
    "selecting": "Selectors",
    "records": "Records",
    "zeromq": "Over ZeroMQ",
}
TOLD = {
    "one": "One process sends all, then takes all.",
    "four": "Four processes send while four others take.",
    "drained": "Four processes take what was sent before: none of them ever waits.",
    "batch": "All synced; the ratios are to dropq's one by one.",
    "depth": "A new process takes the first message, then 20,000 more, or as many as there are.",
    "policies": "One process sends all, then takes all; the ratios are to dropq without a policy.",
    "contended": "Four processes take what was sent before; the ratios are to dropq without a policy.",
    "topics": "Microseconds a message. At `full` the raw loop syncs each file, and each folder that a file came to.",
    "pipeline": "Microseconds a message, or a record of a bundle. The ratio is to dropq's own send and ack apart, "
    "which may lose or double a message; `to_raw` is to the loop of the system calls that the stage needs.",
    "selecting": "Microseconds a message. The raw loop renames, and knows no credits; `mv` runs once for each file.",
    "records": "A thousand records in a bundle, a transaction or a pipeline; the ratio is to what is in `against`.",
    "zeromq": "The ratio is to what is in `against`.",
}
#: A table's columns: the key in a row, its title, how it is written.
TABLE = (
    ("what", "queue", "{}"),
    ("waiting", "waiting", "{:,}"),
    ("per_s", "messages/s", "{:,}"),
    ("ratio", "ratio", "{:.2f}"),
    ("range", "lowest, highest", "{0[0]:.2f}, {0[1]:.2f}"),
    ("sending", "sending", "{:.2f}"),
    ("taking", "taking", "{:.2f}"),
    ("like", "same syncs", "{:.2f}"),
    ("wasted", "too late", "{:.3f}"),
    ("start_s", "start, s", "{:.2f}"),
    ("first_s", "first message, s", "{:.3f}"),
    ("each_us", "each, µs", "{:.1f}"),
    ("peak_mb", "memory, MB", "{:.0f}"),
    ("lost", "lost", "{:,}"),
    ("doubled", "doubled", "{:,}"),
    ("note", "", "{}"),
)
#: How a figure stands beside its bar; a line that crosses it is hidden.
BESIDE: Row = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
BESIDE["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
#: The colours of queues, by how their names begin.
FAMILIES = {"raw loop": "#8a8a8a", "dropq": "#3b6ea5", "": "#c17d3a"}


def queues_measured() -> Row | None:
    """Return what `make bench` measured; None where that is not kept."""
    path = HERE / "queues.json"
    return json.loads(path.read_text()) if path.exists() else None


def queue_tables(measured: Row) -> str:
    """Return all figures of queues as tables."""
    lines = [
        "# Queues: the figures",
        "",
        f"{measured['machine']}. Bodies of 1 KiB; medians, and ratios to the raw loop within a round: more is",
        "faster. *Same syncs* is the ratio to the raw loop that makes the same syncs; *too late* is how many claims",
        "failed for each message, as another was first. Drawn by [draw_benchmarks.py](../draw_benchmarks.py)",
        "from [queues.json](queues.json); `make bench` measures anew.",
        "",
        "![dropq to the raw loop](queues-ratio.svg)",
    ]
    for kept in measured["parts"].values():
        for name, medium, rows in tables_of(kept["rows"]):
            head = rows[0]
            fewest = min(row.get("rounds", head.get("rounds")) or 0 for row in rows)
            often = f", {head['rounds']} rounds" if "rounds" in head else ""
            often += f" ({fewest} of slow queues)" if often and fewest < head["rounds"] else ""
            many = f" of {head['messages']:,} messages" if "messages" in head else ""
            lines += ["", f"## {TITLES.get(name, name.capitalize())}{f', {medium}' if medium else ''}", ""]
            lines += [f"{TOLD.get(name, '')} {kept['commit']}, {kept['date']}{often}{many}.".strip(), ""]
            lines += [f"![{TITLES[name]}](queues-{name}.svg)", ""] if (name, medium) in PICTURED else []
            lines += table_of(rows)
    return "\n".join(lines) + "\n"


#: The tables that a picture stands above.
PICTURED = {("one", "tmpfs"), ("four", "tmpfs"), ("depth", "tmpfs")}


def tables_of(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield the tables of a part: what it is called, what it was measured on, its rows."""
    for key in dict.fromkeys((row["part"], row.get("on", "")) for row in rows):
        yield *key, [row for row in rows if (row["part"], row.get("on", "")) == key]


def table_of(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of a table; rows of other scripts have columns of their own."""
    known = {key for key, _, _ in TABLE}
    columns = [column for column in TABLE if any(column[0] in row for row in rows)]
    others = [key for row in rows for key in row if key not in known | {"part", "on", "rounds", "messages", "skipped"}]
    columns[1:1] = [(key, key, "{}") for key in dict.fromkeys(others) if key not in ("broke", "times")]
    yield f"| {' | '.join(title for _, title, _ in columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        cells = [form.format(plainly(row[key])) if row.get(key) is not None else "" for key, _, form in columns]
        if "skipped" in row:
            cells[0] += f": not measured, {row['skipped']}"
        if "broke" in row:
            cells[0] += f": broke off {row['times']} times of {row['rounds']}: {row['broke']}"
        yield f"| {' | '.join(cells)} |"


def plainly(value: Any) -> Any:
    """Return a value as it stands in a table."""
    return ", ".join(f"{key} {part}" for key, part in value.items()) if isinstance(value, dict) else value


def marks() -> dict[str, str]:
    """Return each picture's file, and the mark of the figures that it is to be drawn from."""
    measured = queues_measured()
    if measured is None:
        return {}
    parts = {name: part["rows"] for name, part in measured["parts"].items()}
    needed = {name: [parts[part] for part in needs] for name, (_, needs) in PICTURES.items() if {*needs} <= {*parts}}
    digests = {name: hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] for name, rows in needed.items()}
    return {f"{name}.{kind}": f"figures {digest}" for name, digest in digests.items() for kind in ("svg", "png")}


def draw_queues() -> None:
    """Draw the pictures of queues."""
    wanted = marks()
    if not wanted:
        return
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "dropq", "font.family": "sans-serif"}
    matplotlib.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 12, "font.size": 10}
    measured = queues_measured() or {}
    for name, mark in wanted.items():
        stem, _, kind = name.rpartition(".")
        figure = PICTURES[stem][0](measured)
        about = {"Description": mark} | ({"Date": None} if kind == "svg" else {})
        figure.savefig(HERE / name, metadata=about, dpi=120, facecolor="white")


def figures_of(measured: Row, name: str, medium: str) -> list[Row]:
    """Return the rows of a table that have figures."""
    rows = [row for part in measured["parts"].values() for row in part["rows"]]
    return [row for row in rows if row["part"] == name and row.get("on") == medium and "lost" in row]


def bars(name: str) -> Callable[[Row], Any]:
    """Return what draws how many messages a second each queue made, and its ratio to the raw loop."""

    def draw(measured: Row) -> Any:
        from matplotlib.figure import Figure

        tables = [(medium, figures_of(measured, name, medium)) for medium in ("tmpfs", "disk")]
        names = [row["what"] for row in max((rows for _, rows in tables), key=len)]
        figure = Figure(figsize=(12, 1.2 + 0.32 * len(names)), layout="constrained")
        for axes, (medium, rows) in zip(figure.subplots(1, 2, sharey=True), tables, strict=True):
            at = [names.index(row["what"]) for row in rows]
            speeds = [row["per_s"] for row in rows]
            axes.barh(at, speeds, height=0.7, color=[family(row["what"]) for row in rows])
            axes.axvline(speeds[0], color="#8a8a8a", linestyle="--", linewidth=1, zorder=0)
            for y, row in zip(at, rows, strict=True):
                bad = [f"{row[key]:,} {key}" for key in ("lost", "doubled") if row[key]]
                text = f"{row['per_s']:,} · {row['ratio']:.2f}" + "".join(f" · {one}" for one in bad)
                colour = "#a33" if bad else "#333"
                axes.annotate(text, (row["per_s"], y), color=colour, **BESIDE)
            axes.set_xlim(0, max(speeds) * 1.3)
            axes.set_title(f"{medium}: messages/s · ratio to the raw loop", loc="left")
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.locator_params(axis="x", nbins=5)
            axes.set_yticks(range(len(names)), names)
            axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(names) - 0.5, -0.5)
        figure.suptitle(f"{TITLES[name]}: {TOLD[name][0].lower()}{TOLD[name][1:-1]}", fontsize=13)
        return figure

    return draw


def family(what: str) -> str:
    """Return the colour of a queue."""
    return next(colour for start, colour in FAMILIES.items() if what.startswith(start))


def ratios(measured: Row) -> Any:
    """Draw dropq's ratios to the raw loop, and to the one that makes the same syncs."""
    from matplotlib.figure import Figure

    cases = [(part, medium) for part in ("one", "four") for medium in ("tmpfs", "disk")]
    tables = {case: [row for row in figures_of(measured, *case) if row["what"].startswith("dropq")] for case in cases}
    names = list(dict.fromkeys(row["what"] for rows in tables.values() for row in rows))
    figure = Figure(figsize=(12, 1.6 + 0.5 * len(names)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, title in zip(panels, ("ratio", "like"), ("no syncs", "the same syncs"), strict=True):
        for number, ((part, medium), rows) in enumerate(tables.items()):
            style = {"color": COLOURS[medium], "marker": "o" if part == "one" else "s"}
            at = [names.index(row["what"]) + 0.16 * (number - 1.5) for row in rows if key in row]
            values = [row[key] for row in rows if key in row]
            label = f"{TITLES[part].lower()}, {medium}"
            axes.scatter(values, at, label=label, s=36, facecolor=style["color"] if part == "one" else "white", **style)
            if key == "ratio":
                axes.hlines(at, *zip(*(row["range"] for row in rows), strict=True), color=style["color"], zorder=0)
        axes.axvline(1, color="#8a8a8a", linestyle="--", linewidth=1, zorder=0)
        axes.set_xlim(left=0)
        axes.set_title(f"to the raw loop with {title}", loc="left")
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("dropq's speed, where the raw loop's is 1: medians; lines: lowest to highest", fontsize=13)
    return figure


def over_depth(measured: Row) -> Any:
    """Draw what a message, the first message and memory cost by how many wait."""
    from matplotlib.figure import Figure

    rows = figures_of(measured, "depth", "tmpfs")
    wanted = (("each_us", "each message, µs"), ("first_s", "the first message, s"), ("peak_mb", "memory, MB"))
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, 3), wanted, strict=True):
        for what in dict.fromkeys(row["what"] for row in rows):
            points = [(row["waiting"], row[key]) for row in rows if row["what"] == what]
            axes.plot(*zip(*points, strict=True), marker="o", color=family(what), label=what)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(0, 1.1 * max(row[key] for row in rows))
        axes.set_title(title, loc="left")
        axes.set_xlabel("messages waiting")
        axes.grid(axis="y", color="#ddd")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("Many that wait, tmpfs", fontsize=13)
    return figure


#: The pictures: what draws each, and the parts that it shows.
PICTURES: dict[str, tuple[Callable[[Row], Any], tuple[str, ...]]] = {
    "queues-one": (bars("one"), ("one",)),
    "queues-four": (bars("four"), ("four",)),
    "queues-ratio": (ratios, ("one", "four")),
    "queues-depth": (over_depth, ("depth",)),
}


if __name__ == "__main__":
    sys.exit(main())
