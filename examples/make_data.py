"""Make the data of the demo, in examples/data: the same bytes every time.

    python examples/make_data.py [DIR]

articles.csv is what there is to buy; sales.csv is what five shops sold in a week; orders/ is what customers ordered in
the meantime, each order a file, as JSON or CSV: two of them are returns, two order an article that is not in
articles.csv yet, and one file broke off on its way. resent/ has that one whole.
"""

from __future__ import annotations

import json
import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

HERE = Path(__file__).parent
STORES = ("Aachen", "Bremen", "Dresden", "Kassel", "Ulm")
GOODS = {
    "AP-440": ("Armchair Petrol", "349.00", "seating"),
    "CL-018": ("Clip lamp", "24.90", "lighting"),
    "DT-220": ("Desk, oak, 160 cm", "529.00", "tables"),
    "MG-001": ("Mug", "7.50", "kitchen"),
    "RG-073": ("Rug, wool, 2 x 3 m", "289.00", "textiles"),
    "SH-105": ("Shelf", "89.95", "storage"),
    "ST-012": ("Stool", "39.00", "seating"),
}
CUSTOMERS = ("Anna Weiß", "B. Okafor", "Café Zentral", "D. Marković", "Familie Lindqvist", "J. O'Brien", "李明")
MONDAY = datetime(2025, 6, 2, 8, tzinfo=UTC)
ORDERS = 24
#: Orders that are not like the others, by their place.
AS_CSV = (4, 11, 17)
RETURNS = (8, 19)
BROKEN = 14
NEW = (6, 21)
LAMP = {"sku": "LT-300", "name": "Floor lamp", "quantity": 1, "price": "119.00"}


def main(folder: Path) -> None:
    """Write everything into a folder."""
    rng = random.Random(20250602)
    for name in ("orders", "resent"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "articles.csv").write_text(articles())
    (folder / "sales.csv").write_text(sales(rng))
    for number in range(1, ORDERS + 1):
        order = make_order(rng, number)
        suffix = "csv" if number in AS_CSV else "json"
        body = (as_csv(order) if suffix == "csv" else as_json(order)).encode()
        name = f"order-{order['order']}.{suffix}"
        if number == BROKEN:
            (folder / "resent" / name).write_bytes(body)
            body = body[: len(body) * 2 // 3]
        (folder / "orders" / name).write_bytes(body)


def articles() -> str:
    """Return what there is to buy, and the group that each article is in."""
    lines = (f'{sku},"{name}",{group}\n' for sku, (name, _, group) in GOODS.items())
    return "".join(["sku,name,group\n", *lines])


def sales(rng: random.Random) -> str:
    """Return a week's sales, in order of time."""
    lines = []
    for day in range(6):
        for _ in range(70):
            sold = MONDAY + timedelta(days=day, minutes=rng.randrange(600))
            sku = rng.choice(list(GOODS))
            quantity = rng.choice((1, 1, 1, 2, 2, 4, 6))
            lines.append(f"{sold:%Y-%m-%d %H:%M}:00,{rng.choice(STORES)},{sku},{quantity},{GOODS[sku][1]}\n")
    return "".join(["sold_at,store,sku,quantity,price\n", *sorted(lines)])


def make_order(rng: random.Random, number: int) -> dict[str, object]:
    """Return an order with a few items."""
    sign = -1 if number in RETURNS else 1
    items = [
        {"sku": sku, "name": GOODS[sku][0], "quantity": sign * rng.randint(1, 3), "price": GOODS[sku][1]}
        for sku in rng.sample(list(GOODS), rng.randint(1, 4))
    ]
    if number in NEW:
        items.append(dict(LAMP))
    placed = MONDAY + timedelta(minutes=7 * number)
    return {"order": 1100 + number, "placed": f"{placed:%FT%TZ}", "customer": rng.choice(CUSTOMERS), "items": items}


def as_json(order: dict[str, object]) -> str:
    """Write an order as the web shop does."""
    return json.dumps(order, ensure_ascii=False, indent=2) + "\n"


def as_csv(order: dict[str, object]) -> str:
    """Write an order as the tills do."""
    items = order["items"]
    assert isinstance(items, list)
    lines = [f"{order['order']},{item['sku']},{item['quantity']},{item['price']}\n" for item in items]
    return "".join(["order,sku,quantity,price\n", *lines])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "data")
