"""The wire format of the driver and its workers: messages, programs, and trees of arrays as frames.

Entry points: `messages` (every message of the scheduler and the workers), `program` (the functions that a worker
executes for a pass, and the results that it sends), `wire` (a message to bytes and back), `codec` (`encode` and
`decode` for trees), and `code_archive` (user modules that are sent to other hosts). The code runs in the driver process
and in every worker process, and does no I/O on sockets: that is `pipedist.transport`.
"""
