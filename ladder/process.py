"""One command in one process: a time limit, a log, progress, and how it ended."""

import contextlib
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from common.text import PACKAGES, ROOT, one_line, progress

GRACE_S = 10  # between asking a process to end and ending it
POLL_S = 0.2
LEFTOVERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")  # of another launcher
MARK = "LADDER_ROW"  # the variable by which all processes of a row are known


class Stop:
    """Whether the user asked to end: Ctrl-C, a closed terminal, or kill. Asked twice, nothing is waited
    for."""

    def __init__(self):
        self.requests, self.number, self.before = 0, signal.SIGINT, {}

    @property
    def code(self) -> int:
        """The exit code of what a signal has ended: 130 of Ctrl-C."""
        return 128 + self.number

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self.before[number] = signal.signal(number, self._count)

    def listen_no_more(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _count(self, number: int, *_) -> None:
        self.requests, self.number = self.requests + 1, number


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
    variables = {name: value for name, value in variables.items() if name not in os.environ}
    of_rows = PACKAGES / "row"
    if of_rows.exists() and importlib.util.find_spec("pynvml") is None:  # so it shadows nothing of the user's
        variables["PYTHONPATH"] = ":".join(filter(None, [os.environ.get("PYTHONPATH"), str(of_rows)]))
    return variables


def bytecode_variables() -> dict[str, str]:
    """Where a Python may not write bytecode beside torch and has none there, each row would compile torch's
    sources anew, some six seconds: the rows then share a folder of the project's own."""
    torch = importlib.util.find_spec("torch")
    has_bytecode = torch and torch.origin and Path(torch.origin).with_name("__pycache__").exists()
    if has_bytecode or not sys.dont_write_bytecode or sys.pycache_prefix:
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(PACKAGES / "bytecode")}


def script_command(script: Path, words: list[str], processes: int) -> list[str]:
    """The command that runs a script, under torchrun in several processes."""
    path = str(script)
    if processes == 1:
        return [sys.executable, path, *words]
    meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    return [*run, *meet, path, *words]


def run(
    command: list[str], log: Path, limit_s: float, stop: Stop, name: str, variables: dict
) -> tuple[str, str] | None:
    """Run a command in a session of its own; all that it starts ends with it.

    At the limit, or where the user asks, it has GRACE_S seconds to end by itself. Its output goes to `log`.
    Returns None where it ends well, else status and one-line reason of its row. Raises OSError where the log
    cannot be written.
    """
    mark = uuid.uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if name not in LEFTOVERS}
    variables = inherited | bytecode_variables() | variables | {MARK: mark}
    folders = [folder for folder in variables.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if folders:  # those of the user's folder: the command runs in another
        variables["PYTHONPATH"] = os.pathsep.join(str(Path(folder).absolute()) for folder in folders)
    log.unlink(missing_ok=True)
    with log.open("ab") as file:
        began, kill_at = time.monotonic(), math.inf
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=variables,
            start_new_session=True,
            close_fds=False,  # the folder's lock
        )
    try:
        while child.poll() is None:
            time.sleep(POLL_S)
            now = time.monotonic()
            progress(f"{name}: running, {now - began:.0f} s")
            if kill_at == math.inf and (stop.requests or now - began > limit_s):
                kill_at = now + GRACE_S
                os.killpg(child.pid, signal.SIGTERM)
            if stop.requests > 1 or now > kill_at:
                end_all(child.pid, mark)
    finally:
        end_all(child.pid, mark)
        code = child.wait()
        progress("")
    if kill_at == math.inf:
        return how_it_ended(code, log)
    if stop.requests:
        return "interrupted", "ended by Ctrl-C, a closed terminal or kill"
    return "timeout", f"took longer than {limit_s:.0f} s: raise --step-timeout, or lower --steps or the shape"


def end_all(leader: int, mark: str) -> None:
    """Kill a process group, and whatever else inherited the mark: the workers of torchrun and those of a
    compiler have sessions of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for variables in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in variables.read_bytes():
                os.kill(int(variables.parent.name), signal.SIGKILL)


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


def last_line(log: Path, sign: str) -> str:
    """What follows `sign` in the last line of a log that holds it; empty where there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    for line in reversed(lines):
        if sign in line:
            return one_line(line.partition(sign)[2])
    return ""
