"""Ages: for how long nothing may change before a sweep takes a process for dead, and a file for left over.

All are in milliseconds. `upkeep.steps` says which step of a sweep uses which age; docs/protocol.md lists them.
"""

MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR

#: A process that makes or removes a queue, or makes a view known: each takes a few milliseconds.
DEAD_MAKER = MINUTE
#: A process that makes a subscription, or a topic's queue.toml.
DEAD_SUBSCRIBER = HOUR
#: A process that hands out a barrier, or ends it; a sweep takes no policy lock.
DEAD_SHARER = MINUTE
#: A process that puts parts together, where no lock shows whether it is alive.
DEAD_WRITER = MINUTE
#: The driver of a committed job: consumers send the rest of it.
DEAD_DRIVER = 5_000
#: A job that was never committed.
JOB = 7 * DAY
#: The ledger's entry for a job; for the last epoch of a query. It is needed while a driver may repeat the job.
LEDGER, EPOCH = 7 * DAY, 30 * DAY
#: An empty staged folder, whose holder makes another; the fence of a staged folder that was dropped.
EMPTY_STAGED, FENCE = MINUTE, DAY
#: A file in wanted/ whose subscription was killed, and so did not remove it.
UNWANTED = MINUTE
#: An empty folder in held/ whose subscription lives.
EMPTY_HELD = HOUR
#: A stream that nobody continues.
STREAM = 30 * DAY
#: A sidecar; the time between the two passes that must find no reference to it.
SIDECAR, SIDECAR_PASSES = DAY, HOUR
#: Any other file that somebody may still need.
LEFTOVER = DAY
