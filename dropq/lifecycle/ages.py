"""Who is old when: for how long nothing may change before a sweep takes a process for dead, and a file for left over.

All in milliseconds. `upkeep.steps` says which step of a sweep goes by which, and docs/protocol.md tells other programs.
"""

MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR

#: Who makes or removes a queue, or makes a view known: each takes a few.
DEAD_MAKER = MINUTE
#: Who makes a subscription, or a topic's queue.toml.
DEAD_SUBSCRIBER = HOUR
#: Who hands out a barrier, or ends one; a sweep takes no policy lock.
DEAD_SHARER = MINUTE
#: Who puts parts together, where no lock shows whether it lives.
DEAD_WRITER = MINUTE
#: The driver of a committed job: consumers send the rest of it.
DEAD_DRIVER = 5_000
#: A job that was never committed.
JOB = 7 * DAY
#: What the ledger says of a job; of the last epoch of a query. It is needed while a driver may repeat the job.
LEDGER, EPOCH = 7 * DAY, 30 * DAY
#: A staged folder with nothing in it, whose holder makes another; and the fence of one that was dropped.
EMPTY_STAGED, FENCE = MINUTE, DAY
#: An empty folder in held/ whose subscription lives.
EMPTY_HELD = HOUR
#: A stream that nobody continues.
STREAM = 30 * DAY
#: A sidecar; and between the two passes that must find no reference to it.
SIDECAR, SIDECAR_PASSES = DAY, HOUR
#: What else somebody may need yet.
LEFTOVER = DAY
