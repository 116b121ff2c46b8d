"""The ladder: of stand-in steps that crash, hang or are missing, and once of the real ones."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import runs
from conftest import FAST, ROOT, STEPS
from test_process import GRANDCHILD, is_alive, wait_until

OK = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from common.record import Row, Run, Timing, write_run
row = Row(Path(__file__).stem, "", "ok", timing=Timing(1.0, [2.0], 2.0, 2.0, 2.0), tokens_per_s=1.0)
row.model_flops_per_s, row.loss, row.note = 1e9, [3.0, 2.0], os.environ.get("OMP_WAIT_POLICY")
print("said by", row.step)
write_run(Path(sys.argv[sys.argv.index("--output") + 1]), Run("python x.py", None, None, None, [row]))
"""
BODIES = {
    "ok": OK,
    "crash": "raise SystemExit(3)",
    "hang": "import os, time\nopen('hung', 'w').write(str(os.getpid()))\ntime.sleep(600)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "grandchild": GRANDCHILD + "raise SystemExit(3)",
    "filling": OK.replace("print(", "print('x' * 2_000_000); print("),
}
FIVE_OK = {f"{k}_x": "ok" for k in range(5)}
HANGING = FIVE_OK | {"1_x": "hang"}
# The ladder with the meaning of its arguments given, and without a page: it starts without torch and is quick.
STUB = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); sys.modules['matplotlib'] = None; "
    "from ladder import __main__ as ladder; ladder.check = lambda _: json.loads(sys.argv[2]);"
    "sys.exit(ladder.main(sys.argv[3:]))"
)
WORKLOAD = asdict(replace(runs.WORKLOAD, batch_size=4))
FACTS = {
    "notes": [], "pinned": [], "device_type": "cpu", "workload": WORKLOAD, "free_bytes": 100 * 2**30,
    "by_hand_bytes": 2**30, "fused_bytes": 2**30,
}  # fmt: skip


@pytest.fixture
def project(tmp_path):
    """A copy of the project whose steps are chosen by the test: project({"0_x": "ok", ...})."""

    def make(steps, folder=tmp_path / "project"):
        for name in ("common", "ladder", "report"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "run_all.sh", folder)
        for name, body in steps.items():
            (folder / f"{name}.py").write_text(BODIES[body])
        return folder

    return make


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "STEP_TIMEOUT")}
    return {**kept, "PYTHON": sys.executable, **more}


def stub_command(folder, *words, roofs=("--no-roofs",), **facts):
    return [sys.executable, "-c", STUB, str(folder), json.dumps(FACTS | facts), *roofs, *words]


def run(folder, command, **variables):
    env = environment(**variables)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def run_stub(folder, *words, env=(), **facts):
    return run(folder, stub_command(folder, *words, **facts), **dict(env))


def start(folder, command):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    return subprocess.Popen(command, cwd=folder, env=environment(), text=True, **pipes)


def run_folders(folder):
    return [path for path in (folder / "results").iterdir() if path.is_dir() and not path.is_symlink()]


def rows_in(folder):
    """The rows of the only run, by name."""
    (only,) = run_folders(folder)
    return {row["step"]: row for row in json.loads((only / "results.json").read_text())["steps"]}


def statuses(folder):
    return [row["status"] for row in rows_in(folder).values()]


def test_rows_that_break_stay_rows_and_leave_no_process(project):
    folder = project({"0_x": "ok", "1_x": "grandchild", "2_x": "hang", "4_x": "killed"})
    ran = run_stub(folder, env={"STEP_TIMEOUT": "3"}, fused_bytes=60 * 2**30)
    rows = rows_in(folder)
    assert ran.returncode == 1 and list(rows) == ["0_x", "1_x", "2_x", "3_missing", "4_x"]
    assert statuses(folder) == ["ok", "failed", "timeout", "failed", "oom"], "no row waits for a grandchild"
    assert "exit code 3" in rows["1_x"]["reason"] and "1_x.log" in rows["1_x"]["reason"]
    assert "longer than 3 s: raise STEP_TIMEOUT" in rows["2_x"]["reason"]
    assert "3_*.py is missing" in rows["3_missing"]["reason"]
    assert "signal 9" in rows["4_x"]["reason"] and "--batch-size 2" in rows["4_x"]["reason"]
    assert wait_until(lambda: not is_alive(int((folder / "pid").read_text())), 10)


def test_a_step_that_cannot_fit_in_memory_is_not_tried_and_one_that_fits_gets_no_advice_on_its_batch(project):
    folder = project(FIVE_OK | {"2_x": "killed"})
    ran, rows = run_stub(folder, by_hand_bytes=300 * 2**30), rows_in(folder)
    assert ran.returncode == 1 and statuses(folder) == ["oom", "oom", "oom", "ok", "ok"]
    assert rows["0_x"]["reason"] == "needs about 300 GiB of 100 free: not tried, try --batch-size 2"
    assert "said by 0_x" not in ran.stdout
    assert "signal 9" in rows["2_x"]["reason"] and "batch" not in rows["2_x"]["reason"]


def test_a_full_disk_is_a_failed_row_with_the_reason(project):
    folder = project(FIVE_OK | {"1_x": "filling"})
    (folder / "results").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder / "results")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        ran = run_stub(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder / "results")], check=True)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr, ran.stderr
    assert "1_x: failed: " in ran.stdout and "No space left on device" in ran.stdout


def test_only_the_steps_asked_for_run_and_threads_wait_passively_unless_the_user_chose(project):
    folder = project(FIVE_OK | {"0_x": "crash"})
    for chosen, note in (({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")):
        ran = run_stub(folder, "--only", "3,4", env=chosen)
        assert ran.returncode == 0 and statuses(folder) == ["not run"] * 3 + ["ok"] * 2
        assert "--only" in rows_in(folder)["0_x"]["reason"] and rows_in(folder)["3_x"]["note"] == note
        shutil.rmtree(folder / "results")


def test_resume_runs_the_rows_that_are_not_ok_and_refuses_what_has_changed(project, tmp_path):
    folder = project(FIVE_OK | {"1_x": "crash"})
    assert run_stub(folder, "--no-profile").returncode == 1
    (folder / "1_x.py").write_text(OK)
    (only,) = run_folders(folder)
    ran = run_stub(folder, "--resume", str(only), roofs=())
    assert [line for line in ran.stdout.splitlines() if line.startswith("said by")] == ["said by 1_x"]
    assert ran.returncode == 0 and statuses(folder) == ["ok"] * 5
    for words, facts, said in (
        ([str(only), "--steps", "9"], {}, "leave out --steps"),
        ([str(tmp_path)], {}, "no plan.json"),
        ([str(only)], {"workload": WORKLOAD | {"seed": 2}}, "workload has changed"),
    ):
        ran = run_stub(folder, "--resume", *words, roofs=(), **facts)
        assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr


def test_peers_are_rows_of_their_own_and_no_row_is_lost_for_a_roof(project):
    folder = project(FIVE_OK)
    (folder / "common" / "roofs.py").write_text("raise SystemExit('no roofs today')")
    (folder / "peers").mkdir()
    (folder / "peers" / "mine.py").write_text(OK)
    (folder / "peers" / "broken.py").write_text(BODIES["crash"])
    ran = run_stub(folder, "--peers", roofs=())
    written = json.loads((folder / "results" / "latest" / "results.json").read_text())
    assert [(peer["step"], peer["status"]) for peer in written["peers"]] == [("broken", "failed"), ("mine", "ok")]
    assert ran.returncode == 1 and statuses(folder) == ["ok"] * 5 and "mine" in ran.stdout
    assert written["roofs"] is None and "no roofs today" in ran.stdout


def test_two_runs_at_once_write_two_folders_and_a_reader_who_leaves_ends_no_row(project):
    folder = project(FIVE_OK)
    both = [start(folder, stub_command(folder)) for _ in range(2)]
    both[0].stdout.readline()
    both[0].stdout.close()
    both[1].communicate(timeout=120)
    with both[0]:
        said = both[0].stderr.read()
    assert [process.returncode for process in both] == [0, 0] and said == ""
    assert (folder / "results" / "latest").is_symlink()
    one, other = (json.loads((made / "results.json").read_text())["steps"] for made in run_folders(folder))
    assert [row["status"] for row in one + other] == ["ok"] * 10
    (folder / "results" / "latest").unlink()
    (folder / "results" / "latest").write_text("mine")
    ran = run_stub(folder, "--only", "0")
    assert ran.returncode == 0 and "of your own and stays" in ran.stdout
    assert (folder / "results" / "latest").read_text() == "mine"


def hanging(folder):
    """A ladder whose second row hangs, and the process that hangs."""
    process = start(folder, stub_command(folder))
    assert wait_until(lambda: (folder / "hung").exists() and (folder / "hung").read_text())
    return process, int((folder / "hung").read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_an_interrupted_run_keeps_its_rows_and_leaves_no_process(number, project):
    folder = project(HANGING)
    ladder, row = hanging(folder)
    os.killpg(ladder.pid, number)
    out, err = ladder.communicate(timeout=60)
    assert ladder.returncode == 130 and "Traceback" not in err and "--resume" in out
    assert statuses(folder) == ["ok", "interrupted", "not run", "not run", "not run"]
    assert not (folder / "results" / "latest").exists() and not is_alive(row)


def test_ctrl_c_before_the_first_row_is_one_line(project):
    folder = project(FIVE_OK)
    for path in (folder / "common" / "arguments.py", folder / "ladder" / "check.py"):
        path.write_text("import time\nopen('checking', 'w').close()\ntime.sleep(600)")
    ladder = start(folder, [sys.executable, str(folder / "ladder" / "__main__.py"), *FAST])
    assert wait_until((folder / "checking").exists)
    os.killpg(ladder.pid, signal.SIGINT)
    _, err = ladder.communicate(timeout=60)
    assert ladder.returncode == 130 and err == "run_all.sh: interrupted\n" and not (folder / "results").exists()


def test_a_killed_ladder_can_be_reported(project):
    folder = project(HANGING)
    ladder, row = hanging(folder)
    ladder.kill()
    ladder.communicate()
    with contextlib.suppress(ProcessLookupError):
        os.kill(row, signal.SIGKILL)
    (only,) = run_folders(folder)
    ran = run(folder, [sys.executable, "-m", "report", str(only)])
    assert ran.returncode == 1 and statuses(folder) == ["ok", "interrupted", "not run", "not run", "not run"]


def test_the_real_ladder_in_a_hostile_place(project, tmp_path, text_file):
    folder = project({}, tmp_path / "a:path with a colon")
    for step in STEPS:
        shutil.copy(ROOT / f"{step}.py", folder)
    first = (folder / f"{STEPS[0]}.py").read_text()  # and the data file grows while it runs
    growing = first.replace("def main(args):", "def main(args):\n    args.text.path.open('ab').write(b'more')")
    (folder / f"{STEPS[0]}.py").write_text(growing)
    user, site = tmp_path / "user", tmp_path / "site"
    for name in ("tabulate", "torch", "numpy", "common", "json"):
        user.mkdir(exist_ok=True)
        (user / f"{name}.py").write_text("raise SystemExit('hostile')")
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('a greeting')")
    (user / "link.sh").symlink_to(folder / "run_all.sh")
    data = os.fsdecode(b"b\xfccher.txt")  # a name that is not UTF-8
    shutil.copy(text_file, user / data)
    hostile = {"CDPATH": "/:.", "PYTHONPATH": str(site), "PYTHONOPTIMIZE": "2", "LC_ALL": "C"}
    ran = run(user, ["./link.sh", *FAST, "--only", "0,2,4", "--data", data], **hostile)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows, latest = rows_in(folder), folder / "results" / "latest"
    assert [row["status"] for row in rows.values()] == ["ok", "not run", "ok", "not run", "skipped"]
    trained = [rows[STEPS[0]], rows[STEPS[2]]]
    assert all(row["profile"]["categories"]["matrix products"]["ms"] > 0 for row in trained)
    assert trained[0]["loss"][0] == pytest.approx(trained[1]["loss"][0], rel=0.01)
    workloads = [json.loads((latest / f"{row['step']}.json").read_text())["workload"] for row in trained]
    assert workloads[0] == workloads[1] and workloads[0]["data"]["tokens"] == 4000
    assert (user / data).stat().st_size == 4004
    written = json.loads((latest / "results.json").read_text())
    assert written["roofs"]["fp32_flops_per_s"] > 0 and written["environment"]["commit_reason"] == "not a git checkout"
    report = (latest / "report.md").read_text()
    assert all(step in report and step in ran.stdout for step in STEPS)
    for name in ("report.html", "speedup.png", "0_baseline.trace.json.gz", "0_baseline.log", f"{STEPS[4]}.log"):
        assert (latest / name).stat().st_size > 0, name


def test_bad_arguments_are_refused_before_any_row(project):
    folder = project({"0_x": "crash"})
    for words, variables, said in (
        (["--data", "absent.txt"], {}, "absent.txt"),
        (["--output", "x.json"], {}, "--output"),
        (["--only", "9"], {}, "--only 9 names no step"),
        ([], {"STEP_TIMEOUT": "soon"}, "STEP_TIMEOUT=soon"),
        ([], {"STEP_TIMEOUT": "00"}, "STEP_TIMEOUT=00"),
        ([], {"PYTHON": "/nope"}, "PYTHON=/nope"),
    ):
        ran = run(folder, ["./run_all.sh", *words], **variables)
        assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr
    assert not (folder / "results").exists()
    assert "STEP_TIMEOUT" in run(folder, ["./run_all.sh", "--help"]).stdout
    assert run(folder, ["./run_all.sh", "--setup"]).stdout.strip() == sys.executable


def test_a_python_that_is_too_old_is_named_with_what_is_needed(project, tmp_path):
    (tmp_path / "python3").write_text('#!/bin/bash\n[ "$1" = --version ] && echo "Python 3.8.1" || exit 1\n')
    (tmp_path / "python3").chmod(0o755)
    ran = run(tmp_path, [project({}) / "run_all.sh"], PYTHON="", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1
    assert "Python 3.8.1 is too old: Python 3.10 or newer is needed" in ran.stderr
