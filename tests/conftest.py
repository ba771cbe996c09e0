"""Settings of the whole suite."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("pipedist", deadline=None)  # how long an example takes says nothing here
settings.load_profile("pipedist")

# A suite that is started in the background has these ignored, and so would have every process
# that the tests start: but what those do with a signal is what is tested.
for number, disposition in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, disposition)
