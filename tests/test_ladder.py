"""The ladder: of stand-in steps that crash, hang or are missing, and once of the real ones."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, STEPS
from test_process import GRANDCHILD, is_alive, wait_until

TINY = ["--device", "cpu", "--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--seq-len", "32", "--steps", "2"]
TINY += ["--warmup", "1", "--amp-dtype", "fp32"]
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
BASELINE = (ROOT / f"{STEPS[0]}.py").read_text()
BODIES = {
    "ok": OK,
    "crash": "raise SystemExit(3)",
    "hang": "import os, time\nopen('hung', 'w').write(str(os.getpid()))\ntime.sleep(600)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "grandchild": GRANDCHILD + "raise SystemExit(3)",
    "baseline": BASELINE,
    "growing": BASELINE.replace("def main(args):", "def main(args):\n    args.text.path.open('ab').write(b'more')"),
    "filling": OK.replace("print(", "print('x' * 2_000_000); print("),
}
FIVE_OK = {f"{k}_x": "ok" for k in range(5)}
HANGING = FIVE_OK | {"1_x": "hang"}
# The ladder with the meaning of its arguments given: it starts without torch.
STUB = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); from ladder import __main__ as ladder; "
    "ladder.check = lambda _: json.loads(sys.argv[2]); sys.exit(ladder.main(sys.argv[3:]))"
)
WORKLOAD = {
    "preset": "tiny", "n_layer": 2, "n_head": 4, "n_embd": 128, "seq_len": 1024, "vocab_size": 256, "batch_size": 4,
    "parameters": 600_000, "tokens_per_step": 2048, "flops_per_step": 8_400_000_000, "seed": 1, "lr": 0.001,
    "warmup": 1, "steps": 3, "data": {"name": "text", "tokens": 10_000, "batches_sha256": "0"},
    "gpus": 1, "parallel": None,
}  # fmt: skip
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


def stub_command(folder, *words, **facts):
    return [sys.executable, "-c", STUB, str(folder), json.dumps(FACTS | facts), "--no-roofs", *words]


def resume_command(folder, run):
    return [word for word in stub_command(folder, "--resume", str(run)) if word != "--no-roofs"]


def run_stub(folder, *words, env=None, **facts):
    command = stub_command(folder, *words, **facts)
    return subprocess.run(
        command, cwd=folder, env=environment(**(env or {})), capture_output=True, text=True, timeout=300
    )


def start_stub(folder):
    command = stub_command(folder)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment(), text=True, start_new_session=True, **pipes)


def run_all(folder, *words, cwd=None, script="run_all.sh", env=None):
    command = [str(folder / script), *words]
    env = environment(**(env or {}))
    return subprocess.run(command, cwd=cwd or folder, env=env, capture_output=True, text=True, timeout=400)


def run_folders(folder):
    return [path for path in (folder / "results").iterdir() if path.is_dir() and not path.is_symlink()]


def rows_in(folder):
    """The rows of the only run, by name."""
    (only,) = run_folders(folder)
    run = json.loads((only / "results.json").read_text())
    return {row["step"]: row for row in run["steps"]}


def statuses(folder):
    return [row["status"] for row in rows_in(folder).values()]


# --- rows that end badly --------------------------------------------------------------------------


def test_rows_that_break_stay_rows(project):
    folder = project({"0_x": "ok", "1_x": "crash", "2_x": "hang", "4_x": "killed"})
    ran = run_stub(folder, env={"STEP_TIMEOUT": "3"}, fused_bytes=60 * 2**30)
    rows = rows_in(folder)
    assert ran.returncode == 1 and list(rows) == ["0_x", "1_x", "2_x", "3_missing", "4_x"]
    assert statuses(folder) == ["ok", "failed", "timeout", "failed", "oom"]
    assert "exit code 3" in rows["1_x"]["reason"] and "1_x.log" in rows["1_x"]["reason"]
    assert "longer than 3 s: raise STEP_TIMEOUT" in rows["2_x"]["reason"]
    assert "3_*.py is missing" in rows["3_missing"]["reason"]
    assert "signal 9" in rows["4_x"]["reason"] and "--batch-size 2" in rows["4_x"]["reason"]


def test_a_killed_row_that_needs_little_memory_gets_no_advice_on_its_batch(project):
    folder = project(FIVE_OK | {"2_x": "killed"})
    assert run_stub(folder).returncode == 1
    assert "signal 9" in rows_in(folder)["2_x"]["reason"] and "batch" not in rows_in(folder)["2_x"]["reason"]


def test_a_step_that_cannot_fit_in_host_memory_is_not_tried(project):
    folder = project(FIVE_OK)
    ran = run_stub(folder, by_hand_bytes=300 * 2**30)
    assert ran.returncode == 1 and statuses(folder) == ["oom", "oom", "ok", "ok", "ok"]
    said = rows_in(folder)["0_x"]["reason"]
    assert said == "needs about 300 GiB of 100 free: not tried, try --batch-size 2" and "said by 0_x" not in ran.stdout


def test_a_crashed_steps_grandchild_neither_delays_the_next_row_nor_lives_on(project):
    folder = project(FIVE_OK | {"1_x": "grandchild"})
    assert run_stub(folder, env={"STEP_TIMEOUT": "60"}).returncode == 1
    assert statuses(folder) == ["ok", "failed", "ok", "ok", "ok"]
    assert wait_until(lambda: not is_alive(int((folder / "pid").read_text())), 10)


def test_a_reader_who_leaves_ends_no_row(project):
    folder = project(FIVE_OK)
    with start_stub(folder) as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0 and said == "" and statuses(folder) == ["ok"] * 5


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


# --- which rows run -------------------------------------------------------------------------------


def test_only_the_steps_asked_for_run(project):
    folder = project(FIVE_OK | {"0_x": "crash"})
    ran = run_stub(folder, "--only", "3,4")
    assert ran.returncode == 0 and statuses(folder) == ["not run"] * 3 + ["ok"] * 2
    assert "--only" in rows_in(folder)["0_x"]["reason"]


def test_resume_runs_the_rows_that_are_not_ok(project):
    folder = project(FIVE_OK | {"1_x": "crash"})
    assert run_stub(folder, "--no-profile").returncode == 1
    (folder / "1_x.py").write_text(OK)
    (only,) = run_folders(folder)
    ran = subprocess.run(resume_command(folder, only), cwd=folder, env=environment(), capture_output=True, text=True)
    assert [line for line in ran.stdout.splitlines() if line.startswith("said by")] == ["said by 1_x"]
    assert ran.returncode == 0 and statuses(folder) == ["ok"] * 5


def test_a_run_that_cannot_be_resumed_is_refused(project, tmp_path):
    folder = project(FIVE_OK)
    run_stub(folder)
    (only,) = run_folders(folder)
    resume = resume_command(folder, only)
    changed = json.dumps(FACTS | {"workload": WORKLOAD | {"seed": 2}})
    for command, said in (
        ([*resume, "--steps", "9"], "leave out --steps"),
        ([*resume[:-1], str(tmp_path)], "no plan.json"),
        ([*resume[:4], changed, *resume[5:]], "workload has changed"),
    ):
        ran = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr


def test_peers_are_rows_of_their_own(project):
    folder = project(FIVE_OK)
    (folder / "peers").mkdir()
    (folder / "peers" / "mine.py").write_text(OK)
    (folder / "peers" / "broken.py").write_text(BODIES["crash"])
    ran = run_stub(folder, "--peers")
    run = json.loads((folder / "results" / "latest" / "results.json").read_text())
    assert [(peer["step"], peer["status"]) for peer in run["peers"]] == [("broken", "failed"), ("mine", "ok")]
    assert ran.returncode == 1 and run["roofs"] is None and "mine" in ran.stdout


def test_roofs_that_cannot_be_measured_leave_the_table(project):
    folder = project(FIVE_OK)
    (folder / "common" / "roofs.py").write_text("raise SystemExit('no roofs today')")
    command = [word for word in stub_command(folder) if word != "--no-roofs"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0 and "no roofs today" in ran.stdout, "a row is not lost for a roof"


def test_threads_wait_passively_unless_the_user_chose(project):
    folder = project(FIVE_OK)
    run_stub(folder, "--only", "0")
    assert rows_in(folder)["0_x"]["note"] == "passive"
    shutil.rmtree(folder / "results")
    run_stub(folder, "--only", "0", env={"OMP_WAIT_POLICY": "active"})
    assert rows_in(folder)["0_x"]["note"] == "active"


def test_two_runs_at_once_write_two_folders(project):
    folder = project(FIVE_OK)
    both = [start_stub(folder) for _ in range(2)]
    for process in both:
        process.communicate(timeout=120)
    assert [process.returncode for process in both] == [0, 0]
    assert len(run_folders(folder)) == 2 and (folder / "results" / "latest").is_symlink()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_users_own_results_latest_stays(kind, project):
    folder = project(FIVE_OK)
    latest = folder / "results" / "latest"
    latest.parent.mkdir()
    latest.mkdir() if kind == "folder" else latest.write_text("mine")
    ran = run_stub(folder)
    assert ran.returncode == 0 and "of your own and stays" in ran.stdout
    assert not latest.is_symlink() and (latest.is_dir() or latest.read_text() == "mine")


# --- interrupted ----------------------------------------------------------------------------------


def hanging(folder):
    """A ladder whose second row hangs, and the process that hangs."""
    process = start_stub(folder)
    assert wait_until(lambda: (folder / "hung").exists() and (folder / "hung").read_text())
    return process, int((folder / "hung").read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_run_keeps_its_rows_and_leaves_no_process(number, project):
    folder = project(HANGING)
    ladder, row = hanging(folder)
    os.killpg(ladder.pid, number)
    out, err = ladder.communicate(timeout=60)
    assert ladder.returncode == 130 and "Traceback" not in err and "--resume" in out
    assert statuses(folder) == ["ok", "interrupted", "not run", "not run", "not run"]
    assert not (folder / "results" / "latest").exists() and not is_alive(row)


def test_a_second_ctrl_c_gives_no_traceback(project):
    folder = project(HANGING)
    (folder / "1_x.py").write_text("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + BODIES["hang"])
    ladder, row = hanging(folder)
    for _ in range(3):
        os.killpg(ladder.pid, signal.SIGINT)
        wait_until(lambda: ladder.poll() is not None, 0.5)
    _, err = ladder.communicate(timeout=60)
    assert ladder.returncode == 130 and err == "" and not is_alive(row)


def test_ctrl_c_before_the_first_row_is_one_line(project):
    folder = project(FIVE_OK)
    checking = "import time\nopen('checking', 'w').close()\ntime.sleep(600)"
    (folder / "common" / "arguments.py").write_text(checking)
    command = [sys.executable, str(folder / "ladder" / "__main__.py"), *TINY]
    ladder = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
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
    ran = subprocess.run([sys.executable, "-m", "report", str(only)], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 1 and statuses(folder) == ["ok", "interrupted", "not run", "not run", "not run"]


# --- run_all.sh -----------------------------------------------------------------------------------


def test_the_real_ladder_in_a_hostile_place(project, tmp_path, text_file):
    folder = project({}, tmp_path / "a:path with a colon")
    for step in STEPS:
        shutil.copy(ROOT / f"{step}.py", folder)
    user, site = tmp_path / "user", tmp_path / "site"
    for name in ("tabulate", "torch", "numpy", "common", "json"):
        user.mkdir(exist_ok=True)
        (user / f"{name}.py").write_text("raise SystemExit('hostile')")
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('a greeting')")
    (user / "link.sh").symlink_to(folder / "run_all.sh")
    shutil.copy(text_file, user / "mine.txt")
    hostile = {"CDPATH": "/:.", "PYTHONPATH": str(site), "PYTHONOPTIMIZE": "2"}
    ran = run_all(user, *TINY, "--data", "mine.txt", cwd=user, script="link.sh", env=hostile)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows, latest = rows_in(folder), folder / "results" / "latest"
    assert [row["status"] for row in rows.values()] == ["ok"] * 4 + ["skipped"]
    assert all(row["profile"]["categories"]["matrix products"]["ms"] > 0 for row in list(rows.values())[:4])
    first_losses = [row["loss"][0] for row in list(rows.values())[:4]]
    assert first_losses == pytest.approx([first_losses[0]] * 4, rel=0.01)
    run = json.loads((latest / "results.json").read_text())
    assert run["roofs"]["fp32_flops_per_s"] > 0 and run["environment"]["commit_reason"] == "not a git checkout"
    report = (latest / "report.md").read_text()
    assert all(step in report and step in ran.stdout and (latest / f"{step}.log").read_text() for step in STEPS)
    assert all(
        (latest / name).stat().st_size > 0 for name in ("report.html", "speedup.png", "0_baseline.trace.json.gz")
    )


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_data_file_may_have_a_name_that_is_not_utf8(locale, project, text_file):
    folder = project(FIVE_OK | {"0_x": "baseline"})
    name = os.fsdecode(b"b\xfccher.txt")
    shutil.copy(text_file, folder / name)
    words = ["--no-roofs", "--no-profile", "--data", name]
    ran = run_all(folder, *TINY, *words, env={"LC_ALL": locale})
    assert ran.returncode == 0 and statuses(folder) == ["ok"] * 5, ran.stdout + ran.stderr


def test_a_data_file_that_grows_gives_every_row_the_same_tokens(project, text_file):
    folder = project(FIVE_OK | {"0_x": "growing", "1_x": "baseline"})
    ran = run_all(folder, *TINY, "--no-roofs", "--no-profile", "--data", str(text_file))
    assert ran.returncode == 0 and statuses(folder) == ["ok"] * 5, ran.stdout + ran.stderr
    assert text_file.stat().st_size == 4004
    (only,) = run_folders(folder)
    first, second = (json.loads((only / f"{name}.json").read_text())["workload"] for name in ("0_x", "1_x"))
    assert first == second and first["data"]["tokens"] == 4000


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        (["--preset", "gpt5"], {}, "invalid choice"),
        (["--data", "absent.txt"], {}, "absent.txt"),
        (["--output", "x.json"], {}, "--output"),
        (["--only", "9"], {}, "--only 9 names no step"),
        ([], {"STEP_TIMEOUT": "soon"}, "STEP_TIMEOUT=soon"),
        ([], {"STEP_TIMEOUT": "00"}, "STEP_TIMEOUT=00"),
        ([], {"PYTHON": "/nope"}, "PYTHON=/nope"),
    ],
)
def test_bad_arguments_are_refused_before_any_row(words, more, said, project):
    folder = project({"0_x": "crash"})
    ran = run_all(folder, *words, env=more)
    assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr
    assert not (folder / "results").exists()


def test_help_and_setup(project):
    folder = project({})
    assert "STEP_TIMEOUT" in run_all(folder, "--help").stdout
    assert run_all(folder, "--setup").stdout.strip() == sys.executable


def fake_python(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="would also install for the GPU")
def test_a_venv_without_pip_is_made_again(project, tmp_path):
    folder = project({})
    fake_python(folder / ".venv" / "bin" / "python", "exit 1")
    installs = f'echo "$@" >> "{tmp_path}/installed"'
    made = f'mkdir -p "$3/bin"; printf "#!/bin/bash\\n%s\\n" {installs!r} > "$3/bin/python"; chmod +x "$3/bin/python"'
    body = f'case "$1$2" in -mvenv) {made} ;; *torch*) exit 1 ;; *) exit 0 ;; esac'
    fake_python(tmp_path / "bin" / "python3", body)
    ran = run_all(folder, "--setup", env={"PYTHON": "", "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"})
    assert ran.returncode == 0 and ran.stdout.strip() == str(folder / ".venv" / "bin" / "python"), ran.stderr
    assert "requirements.txt" in (tmp_path / "installed").read_text()


def test_a_python_that_is_too_old_is_named_with_what_is_needed(project, tmp_path):
    fake_python(tmp_path / "bin" / "python3", '[ "$1" = --version ] && echo "Python 3.8.1" || exit 1')
    ran = run_all(project({}), env={"PYTHON": "", "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"})
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1
    assert "Python 3.8.1 is too old: Python 3.10 or newer is needed" in ran.stderr
