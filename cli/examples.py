"""An example or two for the help of each command. The tests run them in a root with the queues orders
and invoices, which has the selector back, and the topic news, which has the subscription archive of the client hq."""

from __future__ import annotations

#: Lines for a shell, by the command's name. RECEIPT stands for what `dropq receive` printed.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("dropq init .", "dropq create returns", "dropq ls"),
    "init": ("dropq init shop",),
    "create": ("dropq create returns --set lease_period=5m --set redelivery_attempts=2",),
    "delete": ("dropq delete invoices --dry-run", "dropq delete invoices --force --yes"),
    "doctor": ("dropq doctor --root /mnt/queues", "dropq doctor orders"),
    "config": ("dropq config show orders", "dropq config check"),
    "config show": ("dropq config show orders", "dropq config show orders lease_period"),
    "config check": ("dropq config check", "dropq config check orders/queue.toml"),
    "ls": ("dropq ls", "dropq ls orders --json"),
    "health": ("dropq health --max-age 1h --max-count 1000",),
    "browse": ("dropq browse orders --filter \"customer = 'Café Zentral'\"", "dropq browse orders --explain"),
    "show": ("dropq show orders report.csv",),
    "cat": ("dropq cat orders report.csv",),
    "tail": ("dropq tail orders -n 3", "dropq tail -f orders --state error --filter 'JMSXDeliveryCount > 1'"),
    "graph": ("dropq graph", "dropq graph --format mermaid"),
    "send": (
        "echo '{\"item\": 7}' | dropq send orders -p customer=ann --priority 6",
        "dropq send orders *.csv",
        "echo 'how many?' | dropq send orders --wait-reply 30s",
    ),
    "receive": ("dropq receive orders -n 10 --wait 30s --lease 5m",),
    "ack": ("dropq ack orders RECEIPT", "dropq receive orders | dropq ack orders -"),
    "nack": ("dropq nack orders RECEIPT --delay 5m",),
    "fail": ("dropq fail orders RECEIPT --reason 'the till did not answer'",),
    "reject": ("dropq reject orders RECEIPT --reason 'no such customer'",),
    "extend": ("dropq extend orders RECEIPT --by 5m",),
    "reply": ("echo 42 | dropq reply orders RECEIPT",),
    "topic": ("dropq topic create sales.eu", "dropq topic ls"),
    "topic create": ("dropq topic create sales.eu", "dropq topic create sales.us --set expiration=1d"),
    "topic publish": (
        "echo '{\"total\": 1200}' | dropq topic publish news -p region=eu",
        "dropq topic publish news --timeout 30s *.csv",
    ),
    "topic subscribe": (
        "dropq topic subscribe news audit --client-id hq",
        "dropq topic subscribe news big --client-id hq --filter '/total > 1000' --no-local",
    ),
    "topic unsubscribe": (
        "dropq topic unsubscribe news archive --client-id hq --dry-run",
        "dropq topic unsubscribe news archive --client-id hq --yes",
    ),
    "topic ls": ("dropq topic ls", "dropq topic ls news --json"),
    "selector": ("dropq selector add orders onward --to invoices --credit 10", "dropq selector ls"),
    "selector add": (
        "dropq selector add orders eu --to invoices --filter \"region = 'EU'\" --credit 10",
        "dropq selector add orders audit --op copy --to invoices",
        "dropq selector add orders back --op bounce --role default",
    ),
    "selector ls": ("dropq selector ls", "dropq selector ls orders --json"),
    "selector rm": ("dropq selector rm invoices back",),
    "work": (
        "dropq work orders invoices -- wc -c {}",
        "dropq work orders -j 4 --until-empty --timeout 1m -- grep -q item",
    ),
    "route": ("dropq route orders --once", "dropq route --once"),
    "wait": (
        "dropq wait orders --empty --timeout 1h",
        "dropq wait orders --count 1 --filter 'JMSPriority = 4' --timeout 30s",
    ),
    "requeue": (
        "dropq requeue orders --all --dry-run",
        "dropq requeue orders --all --yes",
        "dropq requeue orders --state target --to-origin --all --dry-run",
    ),
    "replay": ("dropq replay orders --from 2025-06-02T09:00Z --dry-run", "dropq replay orders --to invoices --yes"),
    "move": ("dropq move orders invoices report.csv", "dropq move orders invoices --all --dry-run"),
    "expire": ("dropq expire orders report.csv", "dropq expire orders --filter \"customer = 'ann'\" --dry-run"),
    "purge": ("dropq purge orders --state error --older-than 30d --yes",),
    "prune": ("dropq prune orders --keep-age 7d --dry-run", "dropq prune --keep-count 1000 --yes"),
    "pause": ("dropq pause orders", "dropq pause --all"),
    "resume": ("dropq resume orders", "dropq resume --all"),
    "sweep": ("dropq sweep", "dropq sweep orders --unleased-older-than 1d"),
    "fsck": ("dropq fsck", "dropq fsck orders --repair --yes"),
}
