"""The protocol of scheduler and workers: messages, payloads, bytes.

Entry points: `messages` (the message classes), `wire` (messages to bytes and back), `codec` (trees of arrays to frames
and back), `program` (the functions of a pass and its shards), `code_archive` (the user's modules for other hosts).
Both ends use it: the driver process, worker processes and their supervisors. Nothing here opens a socket.
"""
