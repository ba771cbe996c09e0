"""The data plane of one host: large frames in sealed shared memory instead of in the socket.

The words: a LENDER owns a pool of SEGMENTS (memfd), cut into SLOTS. It copies a frame into a slot
and lends that to a BORROWER, which reads it in place. The loan's number, written by the borrower into
its LEDGER, which the lender can read, gives the slot back. A LINK is the unix socket over which the
two exchange descriptors; it carries neither frames nor messages.

Rules
- A slot is written only while it is not borrowed, and a borrower can't write at all: the
  segment is mapped first, then sealed (SHRINK, GROW, FUTURE_WRITE, SEAL), and the seals are
  checked before it is mapped over there.
- A loan ends when the last view of the frame is gone, however long user code keeps it, or when the
  borrower's process is.
- Segments belong to one process and are never taken over. So a process that was stopped in the middle
  of a write, and wakes after it was replaced, writes to memory that no process reads.
- There is no waiting for a slot: without a free one, a frame travels in the message. Where the peer is on
  another host, or shared memory is off or not available, all frames do. The bytes are the same.
"""
