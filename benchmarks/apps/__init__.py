"""Whole jobs as users write them: ONNX inference, image decoding, word statistics, requests over HTTP.

Each system has a module here with a function per job; the lines of that function are the lines of user code. What all
systems share, such as the decoding of one image, is in `functions` and is not counted. Workers are started before the
clock; each result is compared with that of `plain`, one process without any framework.
"""
