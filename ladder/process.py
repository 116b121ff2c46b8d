"""One command in one process: a time limit, a log, progress, and how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.text import PROGRESS_FD, OneLineParser, one_line

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 10  # between asking a process to end and ending it
POLL_S = 0.2
# `python -m` would put the user's folder before the standard library. A path in PYTHONPATH must not hold a colon.
RUN_MODULE = (
    "import sys; root, name = sys.argv[1:3]; del sys.argv[1:3]; sys.path[:] = [root, *filter(None, sys.path)]; "
    "import runpy; runpy.run_module(name, run_name='__main__', alter_sys=True)"
)


# What torchrun says of the process that failed first.
ROOT_CAUSE = re.compile(r"Root Cause.*?\n +rank +: (\d+).*?\n +exitcode +: (-?\d+)", re.DOTALL)


class Stop:
    """Whether the user asked to end: Ctrl-C, a closed terminal, or kill. Asked twice, nothing is waited for."""

    def __init__(self):
        self.requests = 0

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._count)

    def _count(self, *_) -> None:
        self.requests += 1


@contextlib.contextmanager
def lock(plan: Path, parser: OneLineParser) -> Iterator[None]:
    """Keep every other ladder from the folder of a plan. Exits where one is at work in it."""
    with plan.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.error(f"another run_all.sh is at work in {plan.parent}")
        except OSError:  # a file system without locks
            pass
        yield


@dataclass
class Ended:
    """How a process ended: its exit code (negative: a signal), seconds, and whether it was ended from here."""

    code: int
    seconds: float
    timed_out: bool = False
    stopped: bool = False


def passive_waits(device_type: str) -> dict[str, str]:
    """OpenMP threads wait without spinning on a CPU, unless the user chose: on a shared host, threads that spin were
    seen to make a step five times slower."""
    chosen = device_type != "cpu" or "OMP_WAIT_POLICY" in os.environ
    return {} if chosen else {"OMP_WAIT_POLICY": "passive"}


def share_of_threads(processes: int) -> dict[str, str]:
    """Several processes divide the processor's cores, unless the user chose."""
    chosen = processes == 1 or "OMP_NUM_THREADS" in os.environ
    return {} if chosen else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}


def first_of(processes: int) -> dict[str, str]:
    """The variables by which a process that torchrun did not start takes itself for the first of so many."""
    size = str(processes)
    several = {"RANK": "0", "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": size}
    return several if processes > 1 else {}


def script_command(script: Path, words: list[str], processes: int) -> list[str]:
    """The command that runs a script, under torchrun in several processes; they meet at a port that is free."""
    if processes == 1:
        return [sys.executable, str(script), *words]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    return module_command("torch.distributed.run", "--nproc-per-node", str(processes), *meet, str(script), *words)


def module_command(name: str, *words: str) -> list[str]:
    """The command that runs a module of this project from any folder."""
    return [sys.executable, "-c", RUN_MODULE, str(ROOT), name, *words]


def run(
    command: list[str],
    log: Path,
    limit_s: float,
    stop: Stop,
    *,
    environment: dict[str, str] | None = None,
    show: Callable[[bytes], None] = lambda _: None,
    progress: Callable[[dict], None] = lambda _: None,
    grace_s: float | None = None,
) -> Ended:
    """Run a command in a session of its own; what it starts ends with it.

    At the limit, or where the user asks, it has `grace_s` seconds to end by itself. Its output is appended to `log`;
    `show` gets what it writes to stdout, `progress` the JSON lines that it writes to the file descriptor named by
    PROGRESS_FD. Raises OSError where the log cannot be written.
    """
    reader, writer = os.pipe()
    with log.open("ab") as file, open(reader, "rb", buffering=0) as messages:
        variables = {**os.environ, **(environment or {}), PROGRESS_FD: str(writer)}
        variables.pop("PYTHONSAFEPATH", None)  # a script finds common/ beside itself
        started = time.monotonic()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, env=variables,
            pass_fds=(writer,), start_new_session=True, bufsize=0,
        )  # fmt: skip
        os.close(writer)
        ended = Ended(0, 0.0)

        def on_output(data: bytes) -> None:
            file.write(data)
            file.flush()
            show(data)

        try:
            with selectors.DefaultSelector() as selector:
                selector.register(child.stdout, selectors.EVENT_READ, on_output)
                selector.register(messages, selectors.EVENT_READ, _lines_to(progress))
                _follow(child, selector, started + limit_s, stop, ended, grace_s or GRACE_S)
        finally:
            _signal_session(child, signal.SIGKILL)  # compiler workers, data loaders
            child.wait()
            child.stdout.close()
        ended.code, ended.seconds = child.returncode, time.monotonic() - started
        return ended


def _follow(child: subprocess.Popen, selector, deadline: float, stop: Stop, ended: Ended, grace_s: float) -> None:
    """Pass on what a process writes until it has ended; end it at the deadline, or where the user asks."""
    kill_at = None
    while True:
        running = child.poll() is None
        ready = selector.select(POLL_S if running else 0)
        for key, _ in ready:
            if data := os.read(key.fd, 65536):
                key.data(data)
            else:
                selector.unregister(key.fileobj)
        if not running and not ready:
            return  # a grandchild may still hold the output open: it is not waited for
        if running and not selector.get_map():
            time.sleep(POLL_S / 4)
        now = time.monotonic()
        if running and kill_at is None and (stop.requests or now > deadline):
            ended.stopped, ended.timed_out = bool(stop.requests), not stop.requests
            _signal_session(child, signal.SIGTERM)
            kill_at = now + grace_s
        if running and kill_at is not None and (stop.requests > 1 or now > kill_at):
            _signal_session(child, signal.SIGKILL)


def _signal_session(child: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of it is left
        os.killpg(child.pid, number)


def _lines_to(progress: Callable[[dict], None]) -> Callable[[bytes], None]:
    pending = b""

    def on_data(data: bytes) -> None:
        nonlocal pending
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):  # no progress
                progress(json.loads(line))

    return on_data


def last_line(log: Path, sign: str = "") -> str:
    """The last line of a log that says anything and holds `sign`; empty where there is none."""
    lines = _end_of(log).splitlines()
    return one_line(next((line for line in reversed(lines) if line.strip() and sign in line), ""))


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16384))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def describe(ended: Ended, limit_s: float, log: Path) -> tuple[str, str]:
    """Status and one-line reason of a process that left no record."""
    if ended.stopped:
        return "interrupted", "ended by Ctrl-C, a closed terminal or kill"
    if ended.timed_out:
        return "timeout", f"took longer than {limit_s:.0f} s"
    causes = ROOT_CAUSE.findall(_end_of(log))
    who, code = (f"rank {causes[-1][0]} ", int(causes[-1][1])) if causes and ended.code > 0 else ("", ended.code)
    if code == -signal.SIGKILL:
        return "oom", f"{who}killed by signal 9, as the system does when host memory runs out"
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        return "failed", f"{who}killed by {known.get(-code, f'signal {-code}')}: see {log.name}"
    # The script's own last line, where it could not write its record.
    sign = ": error: " if code == 2 else ": failed: "
    reason = (last_line(log, sign) if causes else last_line(log)).partition(sign)[2]
    return "failed", reason or f"{who}ended with exit code {code} and no record: see {log.name}"


@contextlib.contextmanager
def busy_host(count: int, variable: str) -> Iterator[dict[str, str]]:
    """Processes that do nothing but compute, while the block runs; the variable that says so in the record."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield {variable: f"{count} processes that compute without end"} if busy else {}
    finally:
        for child in busy:
            child.kill()
            child.wait()
