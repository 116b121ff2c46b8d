"""run_all.sh end to end: the real ladder, and one of stand-in steps that crash, hang, or are missing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, STEPS

TINY = ["--device", "cpu", "--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--seq-len", "64", "--steps", "2"]
TINY += ["--warmup", "1"]
OK_STEP = (ROOT / "0_baseline.py").read_text()
BODIES = {
    "crash": "raise SystemExit(3)",
    "hang": "import time; time.sleep(600)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "oom": OK_STEP.replace("    with args.device:", "    raise torch.OutOfMemoryError\n    with args.device:"),
    "ok": OK_STEP,
}  # fmt: skip


@pytest.fixture
def ladder(tmp_path):
    """A copy of the project whose steps are chosen by the test: ladder({"0_x": "ok", ...})."""
    shutil.copytree(ROOT / "common", tmp_path / "common")
    shutil.copy(ROOT / "run_all.sh", tmp_path)

    def make(steps):
        for name, body in steps.items():
            (tmp_path / f"{name}.py").write_text(BODIES[body])
        return tmp_path

    return make


def environment(**more):
    return {**os.environ, "PYTHON": sys.executable, **more}


def run_all(folder, *words, **more):
    return subprocess.run(
        ["./run_all.sh", *words], cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=400
    )


def results(folder):
    return json.loads((folder / "results" / "latest" / "results.json").read_text())


def test_the_real_ladder_on_a_cpu(tmp_path, text_file):
    for path in [ROOT / "run_all.sh", *ROOT.glob("[0-9]_*.py")]:
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common")
    ran = run_all(tmp_path, *TINY, "--data", str(text_file))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    run = results(tmp_path)
    steps = run["steps"]
    assert run["roofs"]["fp32_flops_per_s"] > 0 and "of roof" in ran.stdout
    assert all(step["profile"]["categories"]["matrix products"]["ms"] > 0 for step in steps[:4])
    assert (tmp_path / "results" / "latest" / f"{STEPS[0]}.trace.json.gz").stat().st_size > 0
    assert [step["step"] for step in steps] == STEPS
    assert [step["status"] for step in steps] == ["ok"] * 4 + ["skipped"]
    first_losses = [step["loss"][0] for step in steps[:4]]
    assert first_losses == pytest.approx([first_losses[0]] * 4, rel=0.01)
    report = (tmp_path / "results" / "latest" / "report.md").read_text()
    assert all(step in report and step in ran.stdout for step in STEPS)
    for step in STEPS:
        assert (tmp_path / "results" / "latest" / f"{step}.log").read_text()


def test_steps_that_break_stay_rows(ladder):
    folder = ladder({"0_x": "ok", "1_x": "crash", "2_x": "hang", "4_x": "oom", "5_x": "killed"})
    ran = run_all(folder, *TINY, "--batch-size", "4", STEP_TIMEOUT="20")
    assert ran.returncode == 1
    rows = {step["step"]: step for step in results(folder)["steps"]}
    assert list(rows) == ["0_x", "1_x", "2_x", "3_missing", "4_x", "5_x"]
    assert [row["status"] for row in rows.values()] == ["ok", "failed", "timeout", "failed", "oom", "oom"]
    assert "exit code 3" in rows["1_x"]["reason"] and "1_x.log" in rows["1_x"]["reason"]
    assert "STEP_TIMEOUT" in rows["2_x"]["reason"]
    assert "3_*.py is missing" in rows["3_missing"]["reason"]
    assert "--batch-size 2" in rows["4_x"]["reason"] and "--batch-size 2" in rows["5_x"]["reason"]


def test_ctrl_c_keeps_finished_rows(ladder):
    folder = ladder({"0_x": "ok", "1_x": "hang", "2_x": "ok"})
    process = subprocess.Popen(
        ["./run_all.sh", *TINY],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(folder.glob("results/*/1_x.log")) and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    rows = {step["step"]: step for step in results(folder)["steps"]}
    assert rows["0_x"]["status"] == "ok" and "ms/step" in output
    assert rows["1_x"]["reason"] == "interrupted" and rows["2_x"]["reason"] == "not run: interrupted"
    assert len(rows) == 5


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        (["--preset", "gpt5"], {}, "invalid choice"),
        (["--lr", "-1"], {}, "finite positive"),
        (["--data", "absent.txt"], {}, "cannot read absent.txt"),
        (["--output", "x.json"], {}, "--output"),
        ([], {"STEP_TIMEOUT": "soon"}, "STEP_TIMEOUT=soon"),
        ([], {"STEP_TIMEOUT": "00"}, "STEP_TIMEOUT=00"),
        ([], {"PYTHON": "/nope"}, "PYTHON=/nope"),
    ],
)
def test_bad_arguments_are_refused_before_any_row(ladder, words, more, said):
    folder = ladder({"0_x": "crash"})
    ran = run_all(folder, *words, **more)
    assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") == 1
    assert not (folder / "results").exists()


def test_two_runs_at_once_write_two_folders(ladder):
    folder = ladder({"0_x": "crash"})
    both = [
        subprocess.Popen(["./run_all.sh", *TINY], cwd=folder, env=environment(), stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [process.wait(timeout=120) for process in both] == [1, 1]
    runs = [path for path in (folder / "results").iterdir() if not path.is_symlink()]
    assert len(runs) == 2 and all((run / "results.json").exists() for run in runs)


def test_a_relative_data_file_is_found_from_another_folder(ladder, tmp_path_factory, text_file):
    folder, elsewhere = ladder({"0_x": "ok"}), tmp_path_factory.mktemp("elsewhere")
    shutil.copy(text_file, elsewhere / "mine.txt")
    ran = subprocess.run(
        [str(folder / "run_all.sh"), *TINY, "--data", "mine.txt"],
        cwd=elsewhere, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert results(folder)["steps"][0]["status"] == "ok", ran.stderr


def test_help_and_setup(ladder):
    folder = ladder({})
    assert "STEP_TIMEOUT" in run_all(folder, "--help").stdout
    assert run_all(folder, "--setup").stdout.strip() == sys.executable


def test_peers_roofs_and_profile_can_be_chosen(ladder):
    folder = ladder({"0_x": "ok"})
    (folder / "peers").mkdir()
    (folder / "peers" / "mine.py").write_text(OK_STEP)
    (folder / "peers" / "broken.py").write_text(BODIES["crash"])
    ran = run_all(folder, *TINY, "--peers", "--no-roofs", "--no-profile")
    run = results(folder)
    assert [(peer["step"], peer["status"]) for peer in run["peers"]] == [("broken", "failed"), ("mine", "ok")]
    assert run["roofs"] is None and run["steps"][0]["profile"] is None and "peer: mine" in ran.stdout


def test_roofs_that_cannot_be_measured_leave_the_table(ladder):
    folder = ladder({f"{index}_x": "ok" for index in range(5)})
    path = folder / "common" / "hardware.py"
    path.write_text(
        path.read_text().replace(
            "def main() -> None:\n", 'def main() -> None:\n    raise SystemExit("no roofs today")\n'
        )
    )
    ran = run_all(folder, *TINY, "--no-profile")
    assert ran.returncode == 0, "a row is not lost for a roof"
    assert "the roofs could not be measured: no roofs today" in ran.stdout and results(folder)["roofs"] is None
