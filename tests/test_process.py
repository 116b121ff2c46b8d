"""One process of the ladder: its output, its limit, what it leaves behind, and how it ended."""

import os
import signal
import sys
import threading
import time

import pytest

from ladder import process

GRANDCHILD = "import subprocess; child = subprocess.Popen(['sleep', '600']); "
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
GRANDCHILD += "open('pid', 'w').write(str(child.pid)); "


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run Python code as the ladder runs a row: run(code) gives how it ended and what it showed."""
    monkeypatch.chdir(tmp_path)

    def start(code, limit_s=60, stop=None, **options):
        shown = []
        command = [sys.executable, "-c", code]
        ended = process.run(command, tmp_path / "x.log", limit_s, stop or process.Stop(), show=shown.append, **options)
        return ended, b"".join(shown)

    return start


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def wait_until(done, seconds=60):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    return done()


def test_output_is_shown_and_logged_with_the_errors(run, tmp_path):
    ended, shown = run("import sys; print('out'); sys.stderr.write('err\\n'); sys.exit(3)")
    assert ended.code == 3 and shown == b"out\n" and not (ended.stopped or ended.timed_out)
    assert all(word in (tmp_path / "x.log").read_bytes() for word in (b"out", b"err"))
    code, seen = "import os; fd = int(os.environ['LADDER_PROGRESS_FD']); ", []
    run(code + "os.write(fd, b'nonsense\\n{\"k\":'); os.write(fd, b' 1}\\n')", progress=seen.append)
    assert seen == [{"k": 1}], "progress has a pipe of its own; nonsense is left out"


def test_a_process_past_its_limit_is_ended_and_one_that_will_not_end_is_killed(run, monkeypatch):
    ended, _ = run("import time; time.sleep(600)", limit_s=0.5)
    assert ended.timed_out and ended.code == -signal.SIGTERM
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    ended, _ = run(DEAF + "time.sleep(600)", limit_s=2)
    assert ended.timed_out and ended.code == -signal.SIGKILL


def test_asked_twice_to_stop_nothing_is_waited_for(run):
    stop = process.Stop()
    threading.Timer(2, lambda: [stop._count(), stop._count()]).start()
    ended, _ = run(DEAF + "time.sleep(600)", stop=stop)
    assert ended.stopped and ended.code == -signal.SIGKILL


def test_how_a_process_ended_is_a_status_and_a_line(tmp_path):
    for ended, log, status, said in (
        (process.Ended(-15, 1, stopped=True), "", "interrupted", "ended by Ctrl-C"),
        (process.Ended(-15, 1, timed_out=True), "", "timeout", "longer than 7 s"),
        (process.Ended(-9, 1), "", "oom", "signal 9"),
        (process.Ended(-11, 1), "", "failed", "SIGSEGV: see x.log"),
        (process.Ended(3, 1), "", "failed", "exit code 3 and no record: see x.log"),
        (process.Ended(1, 1), "a\n0_x: failed: cannot write: No space\n\n", "failed", "cannot write: No space"),
    ):
        (tmp_path / "x.log").write_text(log)
        found, reason = process.describe(ended, 7, tmp_path / "x.log")
        assert found == status and said in reason
