"""One command in one process: a time limit, a log, progress, and how it ended."""

import contextlib
import ctypes
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from common.text import one_line, progress

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 10  # between asking a process to end and ending it
POLL_S = 0.2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux, see prctl(2)
LAUNCHER = re.compile(r"(RANK|WORLD_SIZE|LOCAL_RANK)$|(MASTER|PET|TORCHELASTIC|GROUP|ROLE|LOCAL_WORLD)_")
GENERATIONS = 10  # of processes that started each other


class Stop:
    """Whether the user asked to end: Ctrl-C, a closed terminal, or kill. Asked twice, nothing is waited
    for."""

    def __init__(self):
        self.requests, self.before = 0, {}

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self.before[number] = signal.signal(number, self._count)

    def listen_no_more(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _count(self, *_) -> None:
        self.requests += 1


def environment(device_type: str, processes: int) -> dict[str, str]:
    """Variables of a row, without those that the user chose.

    OpenMP threads wait without spinning on a CPU: on a shared host, threads that spin were seen to make a
    step five times slower. Several processes divide the processor's cores.
    """
    variables = {}
    if device_type == "cpu":
        variables["OMP_WAIT_POLICY"] = "passive"
    if processes > 1:
        variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    return {name: value for name, value in variables.items() if name not in os.environ}


def without_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that torchrun or a job launcher has left: with them a row would wait for
    processes that are not there."""
    return {name: value for name, value in variables.items() if not LAUNCHER.match(name)}


def script_command(script: Path, words: list[str], processes: int) -> list[str]:
    """The command that runs a script, under torchrun in several processes."""
    path = str(script)
    if processes == 1:
        return [sys.executable, path, *words]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    return module_command("torch.distributed.run", "--nproc-per-node", str(processes), *meet, path, *words)


def module_command(name: str, *words: str) -> list[str]:
    """The command that runs a module of this project, in its folder: `python -m` imports what lies where it
    starts."""
    return [sys.executable, "-m", name, *words]


def run(
    command: list[str], log: Path, limit_s: float, stop: Stop, name: str, variables: dict
) -> tuple[str, str] | None:
    """Run a command in a session of its own; what it starts ends with it, and it ends with this process.

    At the limit, or where the user asks, it has GRACE_S seconds to end by itself. Its output goes to `log`.
    Returns None where it ends well, else status and one-line reason of its row. Raises OSError where the log
    cannot be written.
    """
    bystanders = _children()  # whatever a shell had started before it became this process
    child, began, kill_at = _start(command, log, variables), time.monotonic(), math.inf
    try:
        while child.poll() is None:
            time.sleep(POLL_S)
            now = time.monotonic()
            progress(f"{name}: running, {now - began:.0f} s")
            if kill_at == math.inf and (stop.requests or now - began > limit_s):
                kill_at = now + GRACE_S
                _signal_session(child, signal.SIGTERM)
            if stop.requests > 1 or now > kill_at:
                _signal_session(child, signal.SIGKILL)
    finally:
        _signal_session(child, signal.SIGKILL)  # compiler workers
        code = child.wait()
        _end_orphans(bystanders)
        progress("")
    if kill_at == math.inf:
        return how_it_ended(code, log)
    if stop.requests:
        return "interrupted", "ended by Ctrl-C, a closed terminal or kill"
    return "timeout", f"took longer than {limit_s:.0f} s: raise --step-timeout, or lower --steps or the shape"


def _start(command: list[str], log: Path, variables: dict) -> subprocess.Popen:
    log.unlink(missing_ok=True)
    where = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": ROOT, "start_new_session": True}
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # workers of a torchrun that is killed come to this process
        # Torchrun then ends its workers.
        where["preexec_fn"] = partial(prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    with log.open("ab") as file:
        environment = without_launcher(os.environ) | variables
        return subprocess.Popen(command, stdout=file, env=environment, **where)


def how_it_ended(code: int, log: Path) -> tuple[str, str] | None:
    """Status and reason of a command that ended by itself with this exit code; None where it ended well."""
    if code == -signal.SIGKILL or last_line(log, "exitcode  : -9"):  # torchrun tells of a worker
        return "oom", "killed by signal 9, as the system does when host memory runs out"
    if code < 0:
        return "failed", f"killed by signal {-code}: see {log.name}"
    if code == 0:
        return None
    reason = last_line(log, ": error: ") or last_line(log, ": failed: ")
    return "failed", reason or f"ended with exit code {code} and no record: see {log.name}"


def _signal_session(child: subprocess.Popen, number: int) -> None:
    """Signal all processes of a child's session; with SIGKILL also those of torchrun's workers, which have
    sessions of their own and which it then cannot end."""
    leaders, listed = [child.pid], Path(f"/proc/{child.pid}/task/{child.pid}/children")
    if number == signal.SIGKILL and child.returncode is None and listed.exists():
        leaders += map(int, listed.read_text().split())
    for leader in reversed(leaders):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of it is left
            os.killpg(leader, number)


def _children() -> set[int]:
    """The children of this process; empty where the system does not list them."""
    with contextlib.suppress(OSError):
        lists = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
        return {int(pid) for pids in lists for pid in pids}
    return set()


def _end_orphans(bystanders: set[int]) -> None:
    """End what a killed row left behind: children of this process that were none before the row. What an
    orphan has started becomes a child in its turn."""
    for _ in range(GENERATIONS):  # not for ever: one that this user may not end stays
        for orphan in _children() - bystanders:
            with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)


def last_line(log: Path, sign: str) -> str:
    """What follows `sign` in the last line of a log that holds it; empty where there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    for line in reversed(lines):
        if sign in line:
            return one_line(line.rpartition(sign)[2])
    return ""
