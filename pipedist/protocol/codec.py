"""Trees of arrays to frames and back, without a copy of what is large.

A payload is a list of frames. The first, its HEADER, is msgpack: the tree itself. msgpack's C code
writes the types that it knows (None, bool, int, float, str, bytes, list, dict); the encoder translates
the others:

- A tuple, namedtuple, dataclass, slice or range is a list that begins with a MARK (an
  extension type of one byte). A mark anywhere else is malformed.
- An int beyond 64 bits, a complex, a NumPy scalar and a small array are extension types that
  hold their bytes.
- A list of like items (the results of a range of calls) is written as columns, so that one array
  stands for the arrays at one place of all items: `pipedist.protocol.columns`.
- An array of more than `INLINE_BYTES_MAX` is an extension type that names a frame and an
  offset. From `FRAME_BYTES_MIN` on it has a frame of its own, which IS the array's memory;
  those between are copied together into shared frames, because a frame costs more than a copy.

Received frames are checked before use: the header is parsed once without making objects (so a list
that claims a billion elements must have them), then decoded; then every dtype, shape, offset and class
is checked against the frames. Nothing is ever unpickled.

Values keep every bit: NaN payloads, -0.0, lone surrogates. Arrays become little-endian and
C-contiguous. `bytearray` and `memoryview` come back as `bytes`.
"""

from __future__ import annotations

from pipedist.protocol.decoder import decode
from pipedist.protocol.encoder import UnsendableError, encode
from pipedist.protocol.layout import Frame

__all__ = ["Frame", "UnsendableError", "decode", "encode"]
