"""A Spark stream: check orders, look up what they order, and post what each comes to in each group of articles.

    python examples/enrich_orders.py ROOT CHECKPOINT [--articles CSV] [--continuous [PERIOD]]

It takes what waits in the queue `orders`: a message is an order as JSON, or orders as CSV with a line for each item. A
negative quantity is goods that come back. It sends CSV into the queue `postings`: a line says what an order comes to in
one group of articles, since the book-keeping has an account for each group. Without --continuous it ends when all that
waited is posted, so that cron can run it. Both queues must exist. The articles are read anew for each batch.

What is guaranteed, whenever it is killed, if it is run again with the same CHECKPOINT, and before its leases run out
where others take orders, too:

- Each message is posted, once, and acknowledged; or it lies in error/ with a reason that people understand.
- A message is posted whole or not at all: one bad line rejects it. When it is mended, or its article known, requeue it.
  A CSV whose last line has no line end is taken for broken off; one cut between two lines looks like a whole one.
- What is bad is rejected before the rest is posted. So a batch that comes again after a crash holds what was posted, or
  is still to be, and nothing else, even if more articles are known by then.

What it asks for:

- Articles may be added at any time: below the others, by replacing the file with one mv. One is removed only while no
  batch is unfinished, that is while the stream is ended and holds nothing in processing/. Else a message that was
  posted just before a crash is rejected when its batch comes again, and when it is requeued, it is posted twice.
- No body stops the stream by what is in it, but one of 2 GiB or more does: Spark holds no such value, and the reader
  refuses it. The stream fails until somebody moves that message to error/.

As any message, one of postings may be delivered twice: by `message`, `order` and `group` its lines are told apart.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dropq
import dropq.spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

ARTICLES = Path(__file__).resolve().parent / "data/articles.csv"
#: What a message is read as: its lines, or one that has only a problem.
LINES = "array<struct<order string, sku string, quantity int, price decimal(9,2), problem string>>"
#: The columns of a line: a pattern, and how it is said when something else stands there.
COLUMNS = {
    "order": (r"[\w.-]{1,40}", "a number or a name"),
    "sku": (r"[\w.-]{1,40}", "the number of an article"),
    "quantity": (r"-?[1-9][0-9]{0,5}", "a whole number, and not 0"),
    "price": (r"[0-9]{1,7}(\.[0-9]{1,2})?", "an amount such as 7.50"),
}

Line = tuple[str | None, str | None, int | None, Decimal | None, str | None]


def main() -> None:
    """Run the stream on two local workers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", help="the folder of the queues")
    parser.add_argument("checkpoint", help="the folder in which Spark keeps how far it came: one for each root")
    parser.add_argument("--articles", default=str(ARTICLES), metavar="CSV", help="sku, name and group of each article")
    parser.add_argument("--continuous", nargs="?", const="10 seconds", metavar="PERIOD", help="go on, every 10 seconds")
    options = parser.parse_args()
    for queue in ("orders", "postings"):
        if not dropq.Root(options.root).queue(queue).exists():
            parser.error(f"there is no queue {queue} in {options.root}: dropq --root {options.root} create {queue}")
    spark = dropq.spark.session("local[2]", app="enrich orders")
    dropq.spark.register(spark)
    trigger = {"processingTime": options.continuous} if options.continuous else {"availableNow": True}
    start(spark, options.root, options.checkpoint, options.articles, **trigger).awaitTermination()
    spark.stop()


def start(spark: SparkSession, root: str, checkpoint: str, articles: str, **trigger: Any) -> StreamingQuery:
    """Start the stream."""
    from pyspark.sql.functions import broadcast

    orders = dropq.Root(root).queue("orders")

    def handle(batch: DataFrame, _: int) -> None:
        lines = enriched(checked(batch), articles).persist()
        bad = lines.where("problem is not null")
        reject(bad, orders)
        post(lines.join(broadcast(bad), "receipt", "left_anti"), root)
        lines.unpersist()

    messages = spark.readStream.format("dropq").option("root", root).option("queue", orders.name).load()
    query = messages.writeStream.foreachBatch(handle).option("checkpointLocation", checkpoint)
    return query.trigger(**trigger).start()


def checked(batch: DataFrame) -> DataFrame:
    """Return the lines of all messages; one that cannot be read is a line with a problem."""
    from pyspark.sql import functions as f

    lines = f.explode(f.udf(read_lines, LINES, useArrow=False)("value")).alias("line")
    receipt = f.substring_index("path", "/", -1).alias("receipt")
    return batch.select(f.col("id").alias("message"), receipt, lines).select("message", "receipt", "line.*")


def enriched(lines: DataFrame, articles: str) -> DataFrame:
    """Add name and group of each article; it is a problem when there is no such article."""
    from pyspark.sql import functions as f

    known = lines.sparkSession.read.csv(articles, schema="sku string, name string, `group` string", header=True)
    unknown = f.when(f.isnull("group"), f.format_string("order %s: there is no article %s", "order", "sku"))
    found = lines.join(f.broadcast(known.dropDuplicates(["sku"])), "sku", "left")
    return found.withColumn("problem", f.coalesce("problem", unknown))


def reject(bad: DataFrame, orders: dropq.Queue) -> None:
    """Move the messages of bad lines to error/, each with a problem of its own as the reason."""
    problems = {line.receipt: line.problem for line in bad.select("receipt", "problem").collect()}
    for receipt, problem in problems.items():
        with suppress(dropq.LeaseLost):  # its lease ran out: the consumer that has it now judges it
            orders.claimed(receipt).reject(problem)


def post(lines: DataFrame, root: str) -> None:
    """Send what lines come to by order and group, whole groups to a message, unless this batch was sent before."""
    from pyspark.sql import functions as f

    text = f.concat_ws(", ", f.sort_array(f.collect_list(f.format_string("%d %s", "quantity", "name"))))
    amount = f.sum(f.col("quantity") * f.col("price"))
    by_group = lines.repartition(4, "group").groupBy("message", "order", "group")
    postings = by_group.agg(text.alias("text"), amount.alias("amount")).sortWithinPartitions("group", "order")
    writer = postings.write.format("dropq").mode("append").option("root", root).option("queue", "postings")
    writer.option("messagePer", "partition").option("bodyFormat", "csv").option("jobId", "{query}-{batch}").save()


def read_lines(body: bytes) -> list[Line]:
    """Return the lines of a message, or one that says why it has none: nothing in a body stops the stream."""
    try:
        return [to_line(item) for item in items(body.decode("utf-8-sig"))]
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, csv.Error) as error:
        problem = f"broken off, or no order at all: {error}"
    except ValueError as error:
        problem = str(error)
    return [(None, None, None, None, problem)]


def items(text: str) -> Iterator[dict[str | None, Any]]:
    """Yield the items of an order as JSON, or of orders as CSV, each with the number of its order."""
    number = {}
    if text.lstrip().startswith("{"):
        order = json.loads(text, parse_float=str, object_pairs_hook=once)
        found, number = order.get("items"), {"order": order.get("order")}
    else:
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        heading = list(rows.fieldnames or ())
        if not COLUMNS.keys() <= {*heading}:
            raise ValueError(f"neither JSON nor a CSV with the columns {', '.join(COLUMNS)}")
        if twice := [column for column in COLUMNS if heading.count(column) > 1]:
            raise ValueError(f"the heading has the column {twice[0]} more than once")
        if not text.endswith(("\n", "\r")):
            raise ValueError("broken off: the last line has no line end")
        found = list(rows)
    if not found or not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ValueError("there are no items in it")
    yield from ({**item, **number} for item in found)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raise ValueError where something is in it twice, and nobody can tell which is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice[0]!r:.40} is there more than once")
    return found


def to_line(item: dict[str | None, Any]) -> Line:
    """Return an item as a line; raise ValueError where it cannot be right."""
    where = f"order {item.get('order')!r:.40}, article {item.get('sku')!r:.40}"
    if None in item:  # where csv keeps what has no heading
        raise ValueError(f"{where}: the line has more fields than the heading; an amount is written as 7.50")
    for column, (pattern, wanted) in COLUMNS.items():
        value = item.get(column)
        if value is None or not re.fullmatch(pattern, str(value)):
            raise ValueError(f"{where}: {column} is {value!r:.40}, not {wanted}")
    return str(item["order"]), str(item["sku"]), int(item["quantity"]), Decimal(item["price"]), None


if __name__ == "__main__":
    main()
