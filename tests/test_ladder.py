"""The ladder: of stand-in steps that crash, hang or are missing, and once of the real ones."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import runs
import torch
from conftest import FAST, ROOT, STEPS
from test_process import GRANDCHILD, is_alive, wait_until

from common import hardware
from ladder import __main__ as ladder

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
    "lingers": OK + "import time; open('lingers', 'w').close(); time.sleep(600)",
    "crash": "raise SystemExit(3)",
    "hang": "import os, time\nopen('hung' + os.environ.get('RANK', ''), 'w').write(str(os.getpid()))\ntime.sleep(600)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "grandchild": GRANDCHILD + "raise SystemExit(3)",
    "filling": OK.replace("print(", "print('x' * 2_000_000); print("),
}
FIVE_OK = {f"{k}_x": "ok" for k in range(5)}
# The ladder with the meaning of its arguments given, and without a page: it starts without torch and is quick.
STUB = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); sys.modules['matplotlib'] = None; "
    "from ladder import __main__ as ladder; ladder.check = lambda *_: json.loads(sys.argv[2]);"
    "sys.exit(ladder.main(sys.argv[3:]))"
)
WORKLOAD = asdict(replace(runs.WORKLOAD, batch_size=4))
FACTS = {
    "notes": [], "pinned": [], "device_type": "cpu", "workload": WORKLOAD, "free_bytes": 100 * 2**30,
    "by_hand_bytes": 2**30, "fused_bytes": 2**30,
}  # fmt: skip


class Project:
    """A copy of the project with stand-ins for its steps: Project(folder, {"0_x": "ok", ...})."""

    def __init__(self, folder: Path, steps: dict[str, str]):
        self.folder, self.results = folder, folder / "results"
        for name in ("common", "ladder", "report"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "run_all.sh", folder)
        (folder / "docs").mkdir()
        shutil.copy(ROOT / "docs" / "glossary.md", folder / "docs")
        for name, body in steps.items():
            (folder / f"{name}.py").write_text(BODIES[body])

    def start(self, *words, command=None, cwd=None, env=(), roofs=("--no-roofs",), **facts):
        """Start a command: by default the ladder, with these facts about the arguments."""
        stub = [sys.executable, "-c", STUB, str(self.folder), json.dumps(FACTS | facts), *roofs, *words]
        kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "STEP_TIMEOUT")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        environment = {**kept, "PYTHON": sys.executable, **dict(env)}
        return subprocess.Popen(command or stub, cwd=cwd or self.folder, env=environment, **pipes)

    def run(self, *words, **options):
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def folders(self):
        return [path for path in self.results.iterdir() if path.is_dir() and not path.is_symlink()]

    def rows(self):
        """The rows of the only run, by name."""
        (only,) = self.folders()
        return {row["step"]: row for row in json.loads((only / "results.json").read_text())["steps"]}

    def statuses(self):
        return [row["status"] for row in self.rows().values()]


@pytest.fixture
def project(tmp_path):
    return lambda steps, folder=tmp_path / "project": Project(folder, steps)


def test_rows_that_break_stay_rows_and_leave_no_process(project):
    made = project({"0_x": "ok", "1_x": "grandchild", "2_x": "hang", "4_x": "killed"})
    ran = made.run(env={"STEP_TIMEOUT": "3"}, fused_bytes=60 * 2**30)
    rows = made.rows()
    assert ran.returncode == 1 and list(rows) == ["0_x", "1_x", "2_x", "3_missing", "4_x"]
    assert made.statuses() == ["ok", "failed", "timeout", "failed", "oom"], "no row waits for a grandchild"
    assert "exit code 3" in rows["1_x"]["reason"] and "1_x.log" in rows["1_x"]["reason"]
    assert "longer than 3 s: raise STEP_TIMEOUT" in rows["2_x"]["reason"]
    assert "3_*.py is missing" in rows["3_missing"]["reason"]
    assert "signal 9" in rows["4_x"]["reason"] and "--batch-size 2" in rows["4_x"]["reason"]
    assert wait_until(lambda: not is_alive(int((made.folder / "pid").read_text())), 10)


def test_repeat_runs_all_rows_again_and_resume_only_what_is_missing(project):
    made = project(FIVE_OK)
    ran = made.run("--repeat", "2", "--only", "0,1")
    (folder,) = made.folders()
    assert ran.returncode == 0 and json.loads((folder / "plan.json").read_text())["repeat"] == 2
    said = [line for line in ran.stdout.splitlines() if line.startswith(("pass", "said"))]
    assert said == [f"{word}" for k in "12" for x in "01" for word in (f"pass {k} of 2", f"said by {x}_x")]
    (folder / "pass-2" / "1_x.json").unlink()
    again = made.run("--resume", str(folder), roofs=())
    assert again.returncode == 0 and again.stdout.count("said by") == 1 and (folder / "pass-2" / "1_x.json").exists()
    assert made.run("--repeat", "0").returncode == 2


def test_a_step_that_cannot_fit_in_memory_is_not_tried_and_one_that_fits_gets_no_advice_on_its_batch(project):
    made = project(FIVE_OK | {"2_x": "killed"})
    ran, rows = made.run(by_hand_bytes=300 * 2**30), made.rows()
    assert ran.returncode == 1 and made.statuses() == ["oom", "oom", "oom", "ok", "ok"]
    assert rows["0_x"]["reason"] == "needs about 300 GiB of 100 free: not tried, try --batch-size 2"
    assert "said by 0_x" not in ran.stdout
    assert "signal 9" in rows["2_x"]["reason"] and "batch" not in rows["2_x"]["reason"]
    said = made.run("--only", "2", fused_bytes=60 * 2**30, device_type="cuda").stdout
    assert "when host memory runs out" in said and "--batch-size" not in said, "no matter of a GPU's memory"


def test_a_full_disk_is_a_failed_row_with_the_reason(project):
    made = project(FIVE_OK | {"1_x": "filling"})
    made.results.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(made.results)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        ran = made.run()
    finally:
        subprocess.run(["umount", "-l", str(made.results)], check=True)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr, ran.stderr
    assert "1_x: failed: " in ran.stdout and "No space left on device" in ran.stdout


def test_only_the_steps_asked_for_run_and_threads_wait_passively_unless_the_user_chose(project):
    made = project(FIVE_OK | {"0_x": "crash"})
    for chosen, note in (({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")):
        assert made.run("--only", "3,4", env=chosen).returncode == 0
        assert made.statuses() == ["not run"] * 3 + ["ok"] * 2
        assert "--only" in made.rows()["0_x"]["reason"] and made.rows()["3_x"]["note"] == note
        shutil.rmtree(made.results)


def test_resume_runs_the_rows_that_are_not_ok_and_refuses_what_has_changed(project, tmp_path):
    made = project(FIVE_OK | {"1_x": "crash"})
    assert made.run("--no-profile").returncode == 1
    (made.folder / "1_x.py").write_text(OK)
    (only,) = made.folders()
    ran = made.run("--resume", str(only), roofs=())
    assert [line for line in ran.stdout.splitlines() if line.startswith("said by")] == ["said by 1_x"]
    assert ran.returncode == 0 and made.statuses() == ["ok"] * 5
    (edited := tmp_path / "edited").mkdir()
    (edited / "plan.json").write_text((only / "plan.json").read_text().replace('"repeat": 1', '"repeat": "one"'))
    for words, facts, said in (
        ([str(only), "--steps", "9"], {}, "give no others"),
        ([str(only), "--sweep-minutes", "5"], {}, "--sweep-minutes limits a --sweep"),
        ([str(only), "--repeat", "2"], {}, "leave out --repeat"),
        ([str(tmp_path)], {}, "no plan.json"),
        ([str(edited)], {}, "no plan.json that can be read: plan.json: Expected `int`, got `str`"),
        ([str(only)], {"workload": WORKLOAD | {"seed": 2}}, "workload has changed"),
    ):
        ran = made.run("--resume", *words, roofs=(), **facts)
        assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr


def test_peers_are_rows_of_their_own_and_no_row_is_lost_for_a_roof(project, tmp_path):
    (tmp_path / "project" / "peers").mkdir(parents=True)
    made = project(FIVE_OK | {"peers/mine": "ok", "peers/broken": "crash"})
    (made.folder / "common" / "roofs.py").write_text("raise SystemExit('no roofs today')")
    ran = made.run("--peers", roofs=())
    written = json.loads((made.results / "latest" / "results.json").read_text())
    assert [(peer["step"], peer["status"]) for peer in written["peers"]] == [("broken", "failed"), ("mine", "ok")]
    assert ran.returncode == 1 and made.statuses() == ["ok"] * 5 and "mine" in ran.stdout
    assert written["roofs"] is None and "no roofs today" in ran.stdout


def test_two_runs_at_once_write_two_folders_and_a_reader_who_leaves_ends_no_row(project):
    made = project(FIVE_OK)
    both, latest = [made.start() for _ in range(2)], made.results / "latest"
    both[0].stdout.readline()
    both[0].stdout.close()
    both[1].communicate(timeout=120)
    with both[0]:
        said = both[0].stderr.read()
    assert [process.returncode for process in both] == [0, 0] and said == ""
    assert latest.is_symlink()
    one, other = (json.loads((folder / "results.json").read_text())["steps"] for folder in made.folders())
    assert [row["status"] for row in one + other] == ["ok"] * 10
    latest.unlink()
    latest.write_text("mine")
    ran = made.run("--only", "0")
    assert ran.returncode == 0 and "of your own and stays" in ran.stdout and latest.read_text() == "mine"


def test_a_row_that_was_recorded_before_the_user_stopped_it_stands(project):
    made = project(FIVE_OK | {"1_x": "lingers"})
    running = made.start()
    assert wait_until((made.folder / "lingers").exists)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode == 130 and made.statuses() == ["ok", "ok", "not run", "not run", "not run"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupted_run_keeps_its_rows_and_a_killed_one_can_be_reported(number, project):
    made = project(FIVE_OK | {"1_x": "hang"})
    running, hung = made.start(), made.folder / "hung"
    assert wait_until(lambda: hung.exists() and hung.read_text())
    os.killpg(running.pid, number)
    out, err = running.communicate(timeout=60)
    if number == signal.SIGKILL:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(hung.read_text()), signal.SIGKILL)
        assert made.run(command=[sys.executable, "-m", "report", str(*made.folders())]).returncode == 1
    else:
        assert running.returncode == 130 and "Traceback" not in err and "--resume" in out
        assert not is_alive(int(hung.read_text())) and not (made.results / "latest").exists()
    assert made.statuses() == ["ok", "interrupted", "not run", "not run", "not run"]


def test_a_check_of_the_arguments_that_is_killed_is_one_line(project):
    made = project(FIVE_OK)
    (made.folder / "ladder" / "check.py").write_text("import os; os.kill(os.getpid(), 9)")
    ran = made.run(command=[sys.executable, "ladder/__main__.py", *FAST])
    assert ran.returncode == 1 and not made.results.exists()
    assert ran.stderr == "run_all.sh: error: the check of the arguments was killed by signal 9\n"


def test_ctrl_c_before_the_first_row_is_one_line(project):
    made = project(FIVE_OK)
    for path in ("common/arguments.py", "ladder/check.py"):
        (made.folder / path).write_text("import time\nopen('checking', 'w').close()\ntime.sleep(600)")
    running = made.start(command=[sys.executable, "ladder/__main__.py", *FAST])
    assert wait_until((made.folder / "checking").exists)
    os.killpg(running.pid, signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130 and err == "run_all.sh: interrupted\n" and not made.results.exists()


def test_a_process_that_fails_among_several_is_one_line_of_its_row_and_the_others_stand(project):
    made, place = project({"3_ok": "ok"}), "    optimizer = torch.optim"
    faults = {
        "0_killed": "os.kill(os.getpid(), 9)",
        "1_broken": "raise ValueError('no way')",
        "2_nan": "model.module.wte.weight.data.fill_(float('nan'))",
    }
    for name, fault in faults.items():
        code = f"    if args.world.rank == 1:\n        import os\n        {fault}\n{place}"
        (made.folder / f"{name}.py").write_text((ROOT / f"{STEPS[0]}.py").read_text().replace(place, code))
    words = ["--gpus", "2", "--no-roofs", "--no-profile", "--only", "0,1,2,3"]
    ran = made.run(command=["./run_all.sh", *words, *FAST])
    rows, (folder,) = made.rows(), made.folders()
    assert "tokens/s per GPU" in ran.stdout and json.loads((folder / "plan.json").read_text())["gpus"] == 2
    assert ran.returncode == 1 and made.statuses() == ["oom", "failed", "failed", "ok", "not run"], ran.stdout
    assert [rows[name]["reason"] for name in (*faults, "3_ok")] == [
        "rank 1 killed by signal 9, as the system does when host memory runs out",
        "rank 1: no way",
        "loss is nan at training step 0: lower --lr (now 0.001)",
        None,
    ]


def test_several_processes_that_hang_are_all_ended(project):
    made = project({"0_x": "hang"})
    running, hung = made.start("--gpus", "2", "--only", "0"), [made.folder / f"hung{rank}" for rank in "01"]
    assert wait_until(lambda: all(path.exists() and path.read_text() for path in hung))
    os.killpg(running.pid, signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode == 130 and made.statuses()[0] == "interrupted"
    assert not any(is_alive(int(path.read_text())) for path in hung)


def test_the_real_ladder_in_a_hostile_place(project, tmp_path, text_file):
    made = project({}, tmp_path / "a:path with a colon")
    growing = "def main(args):\n    args.text.path.open('ab').write(b'more')"  # the data file grows while it is read
    for step in STEPS:
        code = (ROOT / f"{step}.py").read_text()
        (made.folder / f"{step}.py").write_text(code.replace("def main(args):", growing) if step == STEPS[0] else code)
    for file, few in (("roofs", 'GRID["cpu"] = (64, 256)'), ("passes", 'SIZES["cpu"] = (2**12,)')):  # in seconds
        path = made.folder / "common" / f"{file}.py"
        path.write_text(path.read_text().replace("\n\n\n", f"\n{few}\n\n\n", 1))
    user, site = tmp_path / "user", tmp_path / "site"
    user.mkdir()
    site.mkdir()
    for name in ("tabulate", "torch", "numpy", "common", "json"):
        (user / f"{name}.py").write_text("raise SystemExit('hostile')")
    (site / "sitecustomize.py").write_text("print('a greeting')")
    (user / "link.sh").symlink_to(made.folder / "run_all.sh")
    data = os.fsdecode(b"b\xfccher.txt")  # a name that is not UTF-8
    shutil.copy(text_file, user / data)
    hostile = {"CDPATH": "/:.", "PYTHONPATH": str(site), "PYTHONOPTIMIZE": "2", "LC_ALL": "C"}
    ran = made.run(command=["./link.sh", *FAST, "--only", "0,2,4", "--data", data], cwd=user, env=hostile)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows, latest = made.rows(), made.results / "latest"
    assert [row["status"] for row in rows.values()] == ["ok", "not run", "ok", "not run", "skipped"]
    trained = [rows[STEPS[0]], rows[STEPS[2]]]
    assert all(row["profile"]["categories"]["matrix products"]["ms"] > 0 for row in trained)
    assert trained[0]["loss"][0] == pytest.approx(trained[1]["loss"][0], rel=0.01)
    workloads = [json.loads((latest / f"{row['step']}.json").read_text())["workload"] for row in trained]
    assert workloads[0] == workloads[1] and workloads[0]["data"]["tokens"] == 4000
    assert (user / data).stat().st_size == 4004
    written = json.loads((latest / "results.json").read_text())
    assert written["roofs"]["fp32_flops_per_s"] > 0 and written["environment"]["commit_reason"] == "not a git checkout"
    auto_is_fp32 = not hardware.has_bf16_matrix_instructions(torch.device("cpu"))  # predictions are of auto
    assert [bool(row["predicted_ms"]) for row in rows.values()] == [auto_is_fp32] * 4 + [False]
    assert auto_is_fp32 or "predictions are of --amp-dtype auto" in ran.stdout
    report = (latest / "report.md").read_text()
    assert all(step in report and step in ran.stdout for step in STEPS) and ("predicted ms" in report) is auto_is_fp32
    for name in ("report.html", "speedup.png", "0_baseline.trace.json.gz", "0_baseline.log", f"{STEPS[4]}.log"):
        assert (latest / name).stat().st_size > 0, name


def test_bad_arguments_are_refused_before_any_row_in_one_line(monkeypatch, refused):
    monkeypatch.setattr(ladder, "check", lambda *_: pytest.fail("refused before the arguments of the steps are read"))
    for words, limit, said in (
        (["--output", "x.json"], "9", "--output"),
        (["--resume", "results/none"], "9", "--resume results/none is no folder"),
        (["--only", "9"], "9", "--only '9' names a step that is not there"),
        (["--peers", "--gpus", "2"], "9", "--peers run on one GPU"),
        ([], "soon", "STEP_TIMEOUT=soon"),
        ([], "00", "STEP_TIMEOUT=00"),
        (["--batch-size", "max"], "soon", "STEP_TIMEOUT=soon"),
    ):
        monkeypatch.setenv("STEP_TIMEOUT", limit)
        assert said in refused(ladder.main, words)
    assert "STEP_TIMEOUT" in ladder.build_parser().format_help()


def test_run_all_refuses_what_the_steps_refuse_and_a_python_that_does_not_run_or_is_too_old(project, tmp_path):
    made = project({"0_x": "crash"})
    (tmp_path / "python3").write_text('#!/bin/bash\n[ "$1" = --version ] && echo "Python 3.8.1" || exit 1\n')
    (tmp_path / "python3").chmod(0o755)
    old = {"PYTHON": "", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    for words, env, code, said in (
        (["--data", "absent.txt"], {}, 2, "absent.txt"),
        (["--device", "cpu", "--preset", "tiny", "--gpus", "9999"], {}, 2, "at most one process a core"),
        ([], {"PYTHON": "/nope"}, 2, "PYTHON=/nope"),
        ([], old, 1, "3.8.1 is too old: Python 3.10 or newer is needed"),
    ):
        ran = made.run(command=["./run_all.sh", *words], env=env)
        assert ran.returncode == code and said in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr
    assert not made.results.exists()
    assert made.run(command=["./run_all.sh", "--setup"]).stdout.strip() == sys.executable
