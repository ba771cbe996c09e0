"""Reports of runs: one HTML page with everything that a run's folder has.

Entry points: `collect` (`data.py`) reads a folder into plain JSON values, and `page` (`page.py`) makes a page of them,
with the script and the style beside it. `trace_of` (`trace.py`) makes a trace of a folder. The code runs in a process
of its own, which reads the folder.
"""

from pipedist.report.data import collect
from pipedist.report.page import page
from pipedist.report.trace import trace_of

__all__ = ["collect", "page", "trace_of"]
