"""A process with a launcher, to be killed by a test: prints its pids as one JSON line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path

from pipedist.cluster.launchers.local import LocalLauncher
from pipedist.cluster.launchers.server import ServerProcess
from pipedist.protocol.messages import LogLine
from pipedist.transport.endpoints import ipc_endpoint, private_directory
from tests.cluster.launchers.processes import ids_in
from tests.worker.fake_scheduler import FakeScheduler, program


async def serve() -> None:
    async with FakeScheduler() as scheduler:
        # The tests stop workers, and look at them: that is not to be over before they do.
        launcher = LocalLauncher(scheduler.endpoint, stopped_s_max=600.0)
        async with launcher:
            for name in ("w0", "w1"):
                launcher.start(name, 0)
            joined = [await scheduler.welcome() for _ in range(2)]
            workers = [hello.pid for _, hello in joined]
            if "busy" in sys.argv:
                identity, _ = joined[0]
                pass_id = scheduler.bind(identity, program("tests.worker.replica_functions:maybe_wait"))
                scheduler.assign(identity, pass_id, ["/nonexistent/never"])
                await scheduler.take(LogLine)  # it prints when the call has begun
            if "holding" in sys.argv:  # no signal is answered, and no thread of it runs
                identity, _ = joined[0]
                pass_id = scheduler.bind(
                    identity, program("tests.worker.replica_functions:hold_the_interpreter")
                )
                scheduler.assign(identity, pass_id, [1])
                await scheduler.take(LogLine)
            if "left" in sys.argv:
                identity, _ = joined[0]
                pass_id = scheduler.bind(identity, program("tests.worker.replica_functions:leave_processes"))
                path = Path(os.environ["TMPDIR"], "ids")
                scheduler.assign(identity, pass_id, [str(path)])
                workers += await asyncio.to_thread(ids_in, path)
            if "fork" in sys.argv and os.fork() == 0:
                threading.Event().wait(60)  # holds the launcher's end of the control socket
                os._exit(0)
            print(json.dumps({"workers": workers, "server": launcher.server_pid}), flush=True)
            await asyncio.Event().wait()


def make_directory() -> None:
    """Be between the start of a fork server and the launcher's first message."""
    server = ServerProcess(1)
    with private_directory():
        print(json.dumps({"workers": [], "server": server.pid}), flush=True)
        threading.Event().wait()


async def close() -> None:
    """Be between the end of the launcher and that of its directory."""
    with private_directory() as directory:
        launcher = LocalLauncher(ipc_endpoint(directory))
        async with launcher:
            server = launcher.server_pid
        print(json.dumps({"workers": [], "server": server}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell's background jobs inherit that it is ignored
    if "directory" in sys.argv:
        make_directory()
    elif "closed" in sys.argv:
        asyncio.run(close())
    elif "thread" in sys.argv:
        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        thread.join()
    else:
        asyncio.run(serve())
