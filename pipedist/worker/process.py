"""A worker process, from its first line to its exit code.

The exit code is the reason for the end of the process: see `ExitCode`. If user code ends the process (`sys.exit`,
`os._exit`, a crash), its own code or signal is kept; `CallProgress.is_over` distinguishes the two, because user code
may use any exit code.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from pipedist.core.gpus import VISIBLE
from pipedist.errors import ProtocolError, UsageError
from pipedist.protocol.code_archive import CodeStore, stored_digests
from pipedist.transport.dealer import ConnectionLost, Dealer
from pipedist.transport.endpoints import parse_endpoint
from pipedist.worker import process_setup
from pipedist.worker.commands import Ending
from pipedist.worker.context import set_task
from pipedist.worker.driver import Driver
from pipedist.worker.lease_queue import WorkerLimits
from pipedist.worker.machine import WorkerMachine
from pipedist.worker.process_setup import (
    WORKER_NAME,
    WorkerSettings,
    die_with,
    keep_freed_pages,
    make_hello,
    set_process_name,
)
from pipedist.worker.progress import CallProgress
from pipedist.worker.result_cache import ResultCache

LINGER_S = 2.0  # maximum time to send the last messages
PROBE_S = 1.0  # maximum time to diagnose why no scheduler has replied


class ExitCode(enum.IntEnum):
    """The exit code of a worker process, unless user code ended it."""

    STOPPED = 0
    CONNECTION_LOST = 68  # to the scheduler; the next incarnation may join (EX_NOHOST)
    USAGE = 64  # the endpoint or the key file cannot be used (EX_USAGE)
    UNANSWERED = 69  # no scheduler replied (EX_UNAVAILABLE)
    DEFECT = 70  # an error in pipedist; its traceback is on stderr (EX_SOFTWARE)
    FENCED = 75  # evicted, or a new process is needed; the next incarnation may join (EX_TEMPFAIL)
    PROTOCOL = 76  # the scheduler broke the protocol, or rejected the handshake (EX_PROTOCOL)
    REFUSED = 77  # rejected by the scheduler (EX_NOPERM)


_EXIT_CODES = {
    Ending.STOPPED: ExitCode.STOPPED,
    Ending.REFUSED: ExitCode.REFUSED,
    Ending.UNFIT: ExitCode.FENCED,
    Ending.FENCED: ExitCode.FENCED,
    Ending.UNANSWERED: ExitCode.UNANSWERED,
}


def run_process(
    settings: WorkerSettings,
    progress: CallProgress | None = None,
    cache_file: int | None = None,  # memory for cached results, given to the next incarnation; None: none
    proof: str = "",  # of the worker's name (`pipedist.worker.identity`); "" if the scheduler started it
) -> int:
    """Run a worker until the scheduler stops it; return the exit code.

    Only for a process without other tasks: it takes over signals, sys.stdout and sys.stderr. It never raises;
    errors are printed to stderr.
    """
    set_process_name(WORKER_NAME)
    keep_freed_pages()
    set_task(settings.task)
    process_setup.handle_signals(process_setup.do_nothing)  # also sent by `timeout`, or a closed terminal
    process_setup.detect_copies()
    label = f"pipedist worker {settings.worker}"
    try:
        return _work(settings, progress or CallProgress(), label, cache_file, proof)
    except SystemExit as error:
        _print_to_stderr(f"{label} ends: a task of a replica function called sys.exit({error.code!r})\n")
        return (error.code or 0) & 0xFF if error.code is None or isinstance(error.code, int) else 1
    except ConnectionLost as error:
        _print_to_stderr(f"{label}: {error}\n")
        return ExitCode.CONNECTION_LOST
    except (ProtocolError, UsageError) as error:
        _print_to_stderr(f"{label}: {error}\n")
        return ExitCode.PROTOCOL if isinstance(error, ProtocolError) else ExitCode.USAGE
    except KeyboardInterrupt:
        _print_to_stderr(f"{label} ends: a task of a replica function raised KeyboardInterrupt\n")
        return 128 + signal.SIGINT
    except Exception:
        _print_to_stderr(f"{label} ends because of a bug in pipedist\n{traceback.format_exc()}")
        return ExitCode.DEFECT
    except BaseException as error:
        _print_to_stderr(f"{label} ends: user code raised {type(error).__name__}: {error}\n")
        return 1


def _work(
    settings: WorkerSettings, progress: CallProgress, label: str, cache_file: int | None, proof: str
) -> int:
    if settings.visible is not None:  # before a library reads it
        os.environ[VISIBLE] = settings.visible
    keys = None
    if settings.key_file:
        from pipedist.transport.keys import read_key_file  # most workers are local, and have none

        keys = read_key_file(settings.key_file).client
    identity = f"{settings.worker}.{settings.incarnation}.{os.urandom(8).hex()}".encode()
    dealer = Dealer(settings.endpoint, identity=identity, keys=keys)
    cache = ResultCache()
    if cache_file is not None:
        cache.load(cache_file)
    protocol = WorkerMachine(
        make_hello(
            settings.worker,
            settings.incarnation,
            cached=cache.offers(),
            gpus=settings.gpus,
            code_digests=stored_digests(settings.code_root),
            proof=proof,
            threads=settings.threads,
        ),
        WorkerLimits(join_s=settings.join_s),
    )
    code = CodeStore(settings.code_root, settings.worker)

    def report(text: str) -> None:
        if settings.verbose:
            _print_to_stderr(f"{label} at {settings.endpoint}: {text}\n")

    try:
        driver = Driver(
            dealer,
            protocol,
            threads=settings.threads,
            join_s=settings.join_s,
            progress=progress,
            die=_die,
            report=report,
            diagnose=lambda: _unknown_host(settings.endpoint),
            cache=cache,
            code=code,
        )
        driver.output.install()
        if cache_file is not None:
            signal.signal(signal.SIGTERM, lambda _number, _frame: driver.leave("SIGTERM"))
        ending, reason = driver.run()
    except ConnectionLost:  # also while joining: the scheduler may come back
        _save(cache, cache_file, report)
        raise
    finally:
        dealer.close(LINGER_S)
        code.close()
    if ending in (Ending.FENCED, Ending.UNFIT):
        _save(cache, cache_file, report)
    if ending is Ending.UNANSWERED:
        reason += _why_unanswered(settings.endpoint)
    if ending is Ending.UNANSWERED and len(cache):
        reason += f"; {len(cache)} cached results are dropped"
    if ending is not Ending.STOPPED:
        _print_to_stderr(f"{label}: {ending.value} ({settings.endpoint}): {reason}\n")
    return _EXIT_CODES[ending]


def _unknown_host(endpoint: str) -> str:
    """Return an error if the endpoint's host has no address (it may get one later); else ""."""
    import socket  # rarely needed

    parsed = parse_endpoint(endpoint, bind=False, has_keys=True)
    try:
        if parsed.is_tcp:
            socket.getaddrinfo(parsed.host, None)
    except (OSError, UnicodeError) as error:
        return f"; the host {parsed.host!r} can't be found: {error}"
    return ""


def _why_unanswered(endpoint: str) -> str:
    """Return the result of a connection attempt; "" if it is unknown."""
    import socket  # rarely needed

    parsed = parse_endpoint(endpoint, bind=False, has_keys=True)
    if not parsed.is_tcp:
        return ""
    if unknown := _unknown_host(endpoint):
        return unknown
    try:
        socket.create_connection((parsed.host, parsed.port), timeout=PROBE_S).close()
    except ConnectionRefusedError:
        return "; no process listens there. Check that the run has started, and that this is its port"
    except TimeoutError:
        return "; the connection timed out. Check the address, and the firewalls in between"
    except OSError as error:
        return f"; it cannot be reached: {error.strerror}"
    return "; the process that listens there is not a run of pipedist"


def _save(cache: ResultCache, file: int | None, report: Callable[[str], None]) -> None:
    if file is None or not len(cache):
        return
    try:
        cache.save(file)
    except OSError as error:  # these calls will be re-executed
        report(f"{len(cache)} finished calls cannot be kept: {error}")
    else:
        report(f"{len(cache)} finished calls are kept for the resumed run")


def _die(text: str) -> None:
    _print_to_stderr(f"a worker ends because of a bug in pipedist\n{text}")
    os._exit(ExitCode.DEFECT)


def _print_to_stderr(text: str) -> None:
    stream = sys.__stderr__
    if stream is None:
        return
    with contextlib.suppress(OSError):  # its reader is gone: no reason to end
        stream.write(text)
        stream.flush()


def main(arguments: Mapping[str, Any]) -> None:
    """Run the worker process of a `pipedist.worker.supervised_process.WorkerProcess`, then exit."""
    die_with(int(arguments["parent"]))
    process_setup.life = int(arguments["life"])
    os.set_inheritable(process_setup.life, False)
    sys.path.extend(arguments["code"])  # copies of the spec's modules come after installed packages
    os.dup2(2, 1)  # output of user code to descriptor 1 must not mix with the supervisor's output
    settings = WorkerSettings(**arguments["settings"])
    with open(int(arguments["proof"]), "rb") as memory:  # closed at once: user code must not inherit it
        proof = os.pread(memory.fileno(), os.fstat(memory.fileno()).st_size, 0).decode()
    progress = CallProgress(int(arguments["progress"]))
    code = run_process(settings, progress, int(arguments["cache"]), proof)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            with contextlib.suppress(OSError):  # its reader is gone
                stream.flush()
    if isinstance(code, ExitCode):  # any other code is user code's, even if it has the same value
        progress.end()
    os._exit(code)
