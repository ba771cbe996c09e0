"""Carries messages and trees of arrays between the driver process and its workers, over ZeroMQ.

Entry points: `router.Router` in the driver process, one socket for all connections, and `dealer.Dealer` in worker
and supervisor processes, one connection to the router. `endpoints` makes the private directory of ipc sockets, `keys`
reads and writes CURVE keys for TCP, and `config` has all limits. Arrays on one host travel in shared memory, and the
messages refer to them.
"""
