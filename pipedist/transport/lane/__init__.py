"""The lane: how messages travel between a Router and a Dealer on one host, without ZeroMQ.

ZeroMQ hands each message to a thread of its own and back, on both ends: four more wake-ups for a
round trip. A LANE is a unix SOCK_STREAM socket on which both ends write and read themselves.

Rules
- The Dealer makes the pair of sockets, and hands one end to the Router together with its first
  packet on the link (`pipedist.transport.shared_memory`). So a lane is there exactly where a link
  is, belongs to the identity and the process of that link, and nobody else can connect to it.
- A peer has one road for its whole life, chosen by the Dealer when it is opened: the lane where it
  gets a link, else ZeroMQ. There is no change from one to the other, and so nothing to overtake.
- The Router never waits: what the socket does not take stays in the peer's outbox. A Dealer waits
  until the socket has taken its message.
- The sizes of a message are known, and checked, before memory is made for it.
"""
