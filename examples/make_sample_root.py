"""Make sample_root/: the same bytes every time.

    python examples/make_sample_root.py [DIR]

DIR's README.md stays; all else in it is made anew. What git does not keep is done without: a `.keep` lies in each
folder, reasons are about a file of a name rather than an inode, and no claim needs a living holder.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from dropq.format import names
from dropq.format.claims import Claim
from dropq.format.layout import FOLDERS, KEEPER, QueueLayout, RootLayout
from dropq.format.names import Name
from dropq.format.typed import Typed
from dropq.lifecycle.reasons import Reasons
from dropq.storage.files import Storage

TOP = Path(__file__).parent.parent
#: Monday, 2 June 2025, 08:00 UTC, in ms since 1970: when the first message was sent.
MORNING = 1748851200000
MINUTE = 60_000

ROOT_TOML = """\
# The configuration of this root. `dropq config show QUEUE` tells every value that is in force, and where it is from.
format = 1

[defaults]                      # of every queue; a queue.toml beside a queue's folders goes before
lease_period = "5m"             # who takes a message has five minutes for it, or renews its lease
redelivery_delay = "0s"
"""
ORDERS_TOML = """\
# What customers ordered: by the web shop as JSON, by the tills as CSV.
redelivery_attempts = 1         # a handler that fails gets the message once more, then it goes to error/
max_deliveries = 5              # however it comes back, the fifth delivery is the last
history_age = "3650d"           # the tax office wants processed/ for ten years
"""
INVOICES_TOML = """\
# Shared with a DropboxMQ client of long ago, and so in its layout: the folders lie in incoming/.
history = true                  # an invoice that was booked stays in processed/
"""


class Writer:
    """Writes one queue's messages where they belong.

    Args:
        root: the root's folder.
        layout: the queue's paths.
        config: what its queue.toml says.
    """

    def __init__(self, root: Path, layout: QueueLayout, config: str) -> None:
        self.meta = Path(RootLayout(str(root)).meta)
        self.layout = layout
        for folder in (*FOLDERS, "routing"):
            path = Path(layout.base, folder)
            path.mkdir(parents=True)
            (path / KEEPER).touch()
        Path(layout.config_file).write_text(config)

    def put(self, state: str, name: Name | str, body: str, *, claim: Claim | None = None) -> str:
        """Write a message into a state; return its file name."""
        file = name if isinstance(name, str) else self._fit(name)
        prefix = claim.prefix if claim is not None else ""
        Path(self.layout.folder(state), prefix + file).write_text(body)
        return file

    def explain(self, state: str, file: str, **reason: object) -> None:
        """Write why a message lies in a state."""
        path = Path(Reasons(self.layout.reasons, Storage("none")).path(state, file, None))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"name": file, "inode": None, **reason}, indent=1) + "\n")

    def _fit(self, name: Name) -> str:
        """Return the file name; what is over its budget goes to a sidecar with a name that is always the same."""
        file = names.file_name(name)
        if len(file) <= names.NAME_BUDGET:
            return file
        token = f"{names.parse(file).id[-10:]:0>16}"
        short, content = names.shorten(name, token)
        (self.meta / f"{token}.json").write_text(json.dumps(content, indent=1) + "\n")
        return names.file_name(short)


def message_id(minute: float, number: int) -> str:
    """Return an id of the form that dropq generates."""
    return f"{MORNING + int(minute * MINUTE):013d}000-{number * 7_654_321 % 10**10:010d}"


def order(number: int, *items: tuple[str, int, str]) -> str:
    """Return an order as the web shop writes it."""
    table = [{"sku": sku, "quantity": quantity, "price": price} for sku, quantity, price in items]
    return json.dumps({"order": number, "items": table}, indent=2) + "\n"


def make_orders(root: Path) -> None:
    """Write the queue orders: flat, as dropq makes queues, with messages in every state."""
    queue = Writer(root, QueueLayout.flat(str(root / "orders")), ORDERS_TOML)

    def named(minute: float, number: int, **fields: object) -> Name:
        return Name(id=message_id(minute, number), message_class="T", **fields)  # type: ignore[arg-type]

    queue.put("target", named(61, 1007), order(1007, ("MG-001", 6, "7.50")))
    express = {"customer": Typed.of("Café Zentral"), "express": Typed.of(True), "total": Typed.of(349.0)}
    queue.put(
        "target",
        named(64, 1008, priority=9, correlation_id="basket-77", type="order", properties=express),
        order(1008, ("AP-440", 1, "349.00")),
    )
    queue.put(
        "target",
        named(66, 1009, type="csv", expiration=4102444800000),
        "order,sku,quantity,price\n1009,SH-105,2,89.95\n",
    )
    note = (
        "Deliver to the yard; the lift is out of order, please ring twice at the door of the workshop behind the house"
    )
    queue.put(
        "target",
        named(70, 1010, type="order", properties={"customer": Typed.of("Familie Lindqvist"), "note": Typed.of(note)}),
        order(1010, ("DT-220", 1, "529.00"), ("CL-018", 2, "24.90")),
    )
    queue.put("target", "report.csv", "order,sku,quantity,price\n2001,ST-012,4,39.00\n2002,MG-001,2,7.50\n")

    claim = Claim("till-k3v9x0q2mz-7", MORNING + 45 * MINUTE, 1)
    queue.put("processing", named(40, 1006, type="order"), order(1006, ("RG-073", 1, "289.00")), claim=claim)

    queue.put("processed", named(2, 1001, type="order"), order(1001, ("CL-018", 1, "24.90")))
    queue.put("processed", named(9, 1002, delivery_count=2), order(1002, ("MG-001", 12, "7.50")))
    queue.put("processed", "2025-06-01.csv", "order,sku,quantity,price\n1998,SH-105,1,89.95\n1999,ST-012,2,39.00\n")

    quote = queue.put(
        "expired",
        named(12, 1003, type="offer", expiration=MORNING + 27 * MINUTE),
        json.dumps({"offer": 1003, "sku": "RG-073", "price": "249.00", "valid": "15 minutes"}, indent=2) + "\n",
    )
    queue.explain("expired", quote, reason="time_limit", time="2025-06-02T08:27:00.412+00:00")

    whole = order(1004, ("DT-220", 2, "529.00"))
    broken = queue.put("error", named(15, 1004, type="order", delivery_count=1), whole[: len(whole) // 2])
    queue.explain(
        "error",
        broken,
        reason="rejected",
        time="2025-06-02T08:15:03.127+00:00",
        owner="till-k3v9x0q2mz-4",
        delivery=1,
        detail="exit status 65",
        exit_status=65,
        stderr="no order: Expecting property name enclosed in double quotes: line 5 column 7 (char 53)\n",
    )
    failed = queue.put("error", named(21, 1005, delivery_count=2), order(1005, ("ST-012", 8, "39.00")))
    queue.explain(
        "error",
        failed,
        reason="failed",
        time="2025-06-02T08:22:41.900+00:00",
        owner="till-k3v9x0q2mz-6",
        delivery=2,
        detail="exit status 1",
        exit_status=1,
        stderr="connecting to the book-keeping ... refused\n",
    )


def make_invoices(root: Path) -> None:
    """Write the queue invoices: in DropboxMQ's layout, with names as DropboxMQ 1.2 writes them."""
    queue = Writer(root, QueueLayout.incoming(str(root / "invoices")), INVOICES_TOML)
    start = MORNING + 90 * MINUTE
    queue.put("target", f"4.{start}000-0233369069.T..PO-4711..invoice.totalD=4790%2E5&currencyS=EUR", "Invoice 88\n")
    queue.put("target", f"7.{start + 3105}000-1163024957.T....invoice.reminderI=2&currencyS=EUR", "Invoice 61, again\n")
    queue.put("target", f"4.{start + 9001}001-0002022660.B", "%PDF-1.4 (a scan)\n")
    queue.put("processed", f"4.{start - 500}000-0669644229.T.....JMSXDeliveryCountI=1", "Invoice 87\n")
    queue.put("error", f"4.{start - 200}000-0952823855.T.....JMSXDeliveryCountI=2", "Invoice ??\n")


def main(root: Path) -> None:
    """Make the root."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if path.name != "README.md":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (root / "dropq.toml").write_text(ROOT_TOML)
    meta = Path(RootLayout(str(root)).meta)
    meta.mkdir(parents=True)
    (meta / KEEPER).touch()
    make_orders(root)
    make_invoices(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TOP / "sample_root")
