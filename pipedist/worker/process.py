"""A worker process, from its first line to its exit code.

A process ends in one of these ways, and its exit code says which: see `ExitCode`. Whatever user
code does to end it (`sys.exit`, `os._exit`, a crash) ends it with that code or signal; that it was user
code is seen by what the process has not noted (`Progress.is_over`), as any code may be a user's.
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
from pipedist.transport.dealer import ConnectionLost, Dealer
from pipedist.transport.endpoints import parse_endpoint
from pipedist.worker import forks
from pipedist.worker.code_store import CodeStore, held
from pipedist.worker.commands import Ending
from pipedist.worker.context import set_task
from pipedist.worker.driver import Driver
from pipedist.worker.heap import keep_freed_pages
from pipedist.worker.hello import make_hello
from pipedist.worker.kernel import WORKER_NAME, die_with, set_process_name
from pipedist.worker.limits import Limits
from pipedist.worker.machine import WorkerMachine
from pipedist.worker.progress import Progress
from pipedist.worker.result_cache import KeptResults
from pipedist.worker.settings import WorkerSettings

LINGER_S = 2.0
"""How long the last messages may take to leave."""

PROBE_S = 1.0
"""How long it is tried to find out why nobody has answered."""


class ExitCode(enum.IntEnum):
    """How a worker process ended, where user code did not end it."""

    STOPPED = 0
    CONNECTION_LOST = 68
    """The scheduler is gone, or lets this connection down; the next incarnation may join (EX_NOHOST)."""
    USAGE = 64
    """The endpoint or the key file can't be used (EX_USAGE)."""
    UNANSWERED = 69
    """No scheduler answered (sysexits: EX_UNAVAILABLE)."""
    DEFECT = 70
    """An error in pipedist; its traceback is on stderr (EX_SOFTWARE)."""
    FENCED = 75
    """Put out, or not fit for what was assigned; the next incarnation may join (EX_TEMPFAIL)."""
    PROTOCOL = 76
    """The scheduler broke the protocol, or refused the handshake (EX_PROTOCOL)."""
    REFUSED = 77
    """Not let in (EX_NOPERM)."""


_EXIT_CODES = {
    Ending.STOPPED: ExitCode.STOPPED,
    Ending.REFUSED: ExitCode.REFUSED,
    Ending.UNFIT: ExitCode.FENCED,
    Ending.FENCED: ExitCode.FENCED,
    Ending.UNANSWERED: ExitCode.UNANSWERED,
}


def run_process(
    settings: WorkerSettings,
    progress: Progress | None = None,
    kept_file: int | None = None,
    proof: str = "",
) -> int:
    """Be a worker until the scheduler says stop; return the process's exit code.

    Args:
        kept_file: descriptor of memory through which an incarnation hands its kept results on to the next;
            None: there is none, or nobody will ask for them. SIGTERM is then the scheduler's to answer;
            otherwise the process ends when what it runs is over.
        proof: that its name is its own (`pipedist.worker.names`); "" where the scheduler started it.

    Only for a process that does nothing else: signals, sys.stdout and sys.stderr become the
    worker's. Never raises; what goes wrong is printed to stderr.
    """
    set_process_name(WORKER_NAME)
    keep_freed_pages()
    set_task(settings.task)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the scheduler's to answer
    forks.answer(forks.pass_over)  # a terminal that is closed, `timeout`, `systemctl stop` signal it too
    forks.watch()
    label = f"pipedist worker {settings.worker}"
    try:
        return _work(settings, progress or Progress(), label, kept_file, proof)
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
        _print_to_stderr(f"{label} ends because of a defect in pipedist\n{traceback.format_exc()}")
        return ExitCode.DEFECT
    except BaseException as error:
        _print_to_stderr(f"{label} ends: user code raised {type(error).__name__}: {error}\n")
        return 1


def _work(settings: WorkerSettings, progress: Progress, label: str, kept_file: int | None, proof: str) -> int:
    if settings.visible is not None:  # before anything that reads it is loaded
        os.environ[VISIBLE] = settings.visible
    keys = None
    if settings.key_file:
        from pipedist.transport.keys import read_key_file  # most workers are local, and need none

        keys = read_key_file(settings.key_file).client
    identity = f"{settings.worker}.{settings.incarnation}.{os.urandom(8).hex()}".encode()
    dealer = Dealer(settings.endpoint, identity=identity, keys=keys)
    kept = KeptResults()
    if kept_file is not None:
        kept.load(kept_file)
    protocol = WorkerMachine(
        make_hello(
            settings.worker,
            settings.incarnation,
            kept.offers(),
            settings.gpus,
            held(settings.code_root),
            proof,
            settings.threads,
        ),
        Limits(join_s=settings.join_s),
    )
    code = CodeStore(settings.code_root, settings.worker)

    def tell(text: str) -> None:
        if settings.tells:
            _print_to_stderr(f"{label} at {settings.endpoint}: {text}\n")

    try:
        driver = Driver(
            dealer,
            protocol,
            threads=settings.threads,
            join_s=settings.join_s,
            progress=progress,
            die=_die,
            tell=tell,
            doubt=lambda: _unknown_host(settings.endpoint),
            kept=kept,
            code=code,
        )
        driver.output.install()
        if kept_file is not None:
            signal.signal(signal.SIGTERM, lambda _number, _frame: driver.leave("it was told to leave"))
        ending, reason = driver.run()
    except ConnectionLost:  # also while it joins: who was there may come back
        _hand_on(kept, kept_file, tell)
        raise
    finally:
        dealer.close(LINGER_S)
        code.close()
    if ending in (Ending.FENCED, Ending.UNFIT):
        _hand_on(kept, kept_file, tell)
    if ending is Ending.UNANSWERED:
        reason += _why_unanswered(settings.endpoint)
    if ending is Ending.UNANSWERED and len(kept):
        reason += f"; {len(kept)} finished calls that were kept for a scheduler are given up"
    if ending is not Ending.STOPPED:
        _print_to_stderr(f"{label}: {ending.value} ({settings.endpoint}): {reason}\n")
    return _EXIT_CODES[ending]


def _unknown_host(endpoint: str) -> str:
    """Return that an endpoint's host has no address, "" if it has one; it may get one later."""
    import socket  # seldom needed

    parsed = parse_endpoint(endpoint, bind=False, has_keys=True)
    try:
        if parsed.is_tcp:
            socket.getaddrinfo(parsed.host, None)
    except (OSError, UnicodeError) as error:
        return f"; the host {parsed.host!r} can't be found: {error}"
    return ""


def _why_unanswered(endpoint: str) -> str:
    """Return what else is to be said where nobody has answered: how far one gets; "" if nothing is known."""
    import socket  # seldom needed

    parsed = parse_endpoint(endpoint, bind=False, has_keys=True)
    if not parsed.is_tcp:
        return ""
    if unknown := _unknown_host(endpoint):
        return unknown
    try:
        socket.create_connection((parsed.host, parsed.port), timeout=PROBE_S).close()
    except ConnectionRefusedError:
        return "; nothing listens there: is the run there, and is this its port?"
    except TimeoutError:
        return "; nothing comes back from there: is a firewall in between, or is the address another host's?"
    except OSError as error:
        return f"; there is no way to it: {error.strerror}"
    return "; something listens there that does not speak as a run of pipedist does"


def _hand_on(kept: KeptResults, file: int | None, tell: Callable[[str], None]) -> None:
    """Leave what is kept to the next incarnation."""
    if file is None or not len(kept):
        return
    try:
        kept.save(file)
    except OSError as error:  # they are done again
        tell(f"{len(kept)} finished calls can't be kept: {error}")
    else:
        tell(f"{len(kept)} finished calls are kept for whoever goes on with the run")


def _die(text: str) -> None:
    _print_to_stderr(f"a worker ends because of a defect in pipedist\n{text}")
    os._exit(ExitCode.DEFECT)


def _print_to_stderr(text: str) -> None:
    stream = sys.__stderr__
    if stream is None:
        return
    with contextlib.suppress(OSError):  # nobody reads it any more: no reason to end
        stream.write(text)
        stream.flush()


def main(arguments: Mapping[str, Any]) -> None:
    """Run the worker process of a supervisor, then exit.

    Args:
        arguments: `parent`, the supervisor's process id; `progress`, `kept`, `proof` and `code`, see
            `pipedist.worker.supervisor.WorkerProcess`; `settings`, the fields of `WorkerSettings`.
    """
    die_with(int(arguments["parent"]))
    sys.path.extend(arguments["code"])  # a copy of the spec's modules comes after what is installed
    os.dup2(2, 1)  # what user code writes to descriptor 1 must not mix with the supervisor's output
    settings = WorkerSettings(**arguments["settings"])
    with open(int(arguments["proof"]), "rb") as memory:  # closed at once: user code does not inherit it
        proof = os.pread(memory.fileno(), os.fstat(memory.fileno()).st_size, 0).decode()
    progress = Progress(int(arguments["progress"]))
    code = run_process(settings, progress, int(arguments["kept"]), proof)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            with contextlib.suppress(OSError):  # its reader is gone
                stream.flush()
    if isinstance(code, ExitCode):  # any other code is user code's, even if it has the same value
        progress.end()
    os._exit(code)
