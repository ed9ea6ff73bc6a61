"""Book one order: the command that `dropq work orders` runs for each message of the demo.

    dropq work orders -- python examples/handle_order.py BOOK

Reads an order, as JSON or as CSV, from standard input, checks it, and appends it to BOOK. An order that is in BOOK
already is not booked again: a message is delivered twice when a consumer dies between its work and its ack.

Exits with 0 when the order is booked, and with 65, which rejects the message, when it cannot be: the last line of
stderr, which dropq keeps, says why. With --returns a negative quantity is goods that come back.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import json
import sys
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

#: The exit status that rejects a message: it is no use to try it again.
REJECT = 65


def main() -> int:
    """Book what is on standard input; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("book", help="the file that orders are booked in")
    parser.add_argument("--returns", action="store_true", help="a negative quantity is goods that come back")
    options = parser.parse_args()
    try:
        orders = list(read(sys.stdin.read()))
        lines = [f"{order['order']},{total(order, options.returns)}" for order in orders]
    except (ValueError, KeyError, TypeError, InvalidOperation) as error:
        print(f"no order: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return REJECT
    book(options.book, lines)
    return 0


def read(text: str) -> Iterator[dict[str, Any]]:
    """Yield the orders of a message: one of JSON, or those of a CSV with a line for each item."""
    if text.lstrip().startswith("{"):
        yield json.loads(text, parse_float=Decimal)
        return
    orders: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(text.splitlines()):
        order = orders.setdefault(row["order"], {"order": row["order"], "items": []})
        item = {"sku": row["sku"], "quantity": int(row["quantity"]), "price": Decimal(row["price"])}
        order["items"].append(item)
    yield from orders.values()


def total(order: dict[str, Any], returns: bool) -> Decimal:
    """Return what an order comes to; raise ValueError when it cannot be right."""
    if not order["items"]:
        raise ValueError(f"order {order['order']} has no items")
    for item in order["items"]:
        if item["quantity"] < 0 and not returns:
            raise ValueError(f"order {order['order']}: quantity {item['quantity']} of {item['sku']}")
    return sum((item["quantity"] * Decimal(item["price"]) for item in order["items"]), Decimal("0.00"))


def book(path: str, lines: list[str]) -> None:
    """Append the lines that are not in a file yet; several may do so at once."""
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = set(file.read().splitlines())
        file.writelines(f"{line}\n" for line in lines if line not in known)


if __name__ == "__main__":
    sys.exit(main())
