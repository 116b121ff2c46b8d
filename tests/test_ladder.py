"""The ladder: of stand-in steps that crash, hang or are missing, and once of the real ones."""

import contextlib
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import FAST, ROOT, STEPS, is_alive

from common import record as schema
from ladder import __main__ as command
from ladder import process, rows, running

OK = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from common.record import Row, Run, write_json
row = Row(Path(__file__).stem, "ok", step_ms=[9.0, 2.0, 2.0], warmup_s=1.0, loss=[3.0, 2.0], source="")
row.note = os.environ.get("OMP_WAIT_POLICY")
write_json(Path(sys.argv[sys.argv.index("--output") + 1]), Run("python x.py", None, None, None, [row]))
"""
BODIES = {
    "ok": OK,
    "lingers": OK + "import time; open('lingers', 'w').close(); time.sleep(600)",
    "crash": "raise SystemExit(3)",
    "hang": "import os, time\nopen('hung' + os.environ.get('RANK', ''), 'w').write(str(os.getpid()))\n"
    "time.sleep(600)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "grandchild": "import subprocess; child = subprocess.Popen(['sleep', '600']); "
    "open('pid', 'w').write(str(child.pid)); raise SystemExit(3)",
    "edited": OK.replace("row.note", "row.code_sha256, row.note").replace(
        "= os.environ", "= 'x', os.environ"
    ),
    "silent": "import time; time.sleep(3)\n" + OK,
}
BODIES["vanishes"] = (
    "import sys, pathlib; output = pathlib.Path(sys.argv[sys.argv.index('--output') + 1])\n"
    "output.with_suffix('.log').unlink()\nraise SystemExit(3)"
)
BODIES["stubborn"] = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + BODIES["hang"]
FIVE_OK = {f"{k}_x": "ok" for k in range(5)}
# The ladder with the meaning of its arguments given: it starts without torch and is quick.
STUB = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); from ladder import __main__ as ladder, rows; "
    "from common import text; "
    "rows.check = lambda *_, **__: json.loads(sys.argv[2]); "
    "text.run_command(lambda: ladder.main(sys.argv[3:]), 'run_all.sh')"
)
WORKLOAD = {
    **{
        "preset": "custom",
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        "seq_len": 32,
        "vocab_size": 256,
        "batch_size": 4,
    },
    **{"parameters": 1000, "tokens_per_step": 128, "flops_per_step": 10**9},
    **{"text": "text", "text_sha256": "0", "seed": 1, "lr": 1e-3, "warmup": 1, "steps": 3},
    **{"gpus": 1, "parallel": None},
}
NEEDED = {f"{k}_x.py": 2**30 for k in range(5)}
FACTS = {
    "pinned": {},
    "device": "a CPU",
    "device_type": "cpu",
    "messages": ["CPU: a stand-in"],
    "gpus": 0,
    "workload": WORKLOAD,
    "free_bytes": 100 * 2**30,
}
FACTS["needed_bytes"] = NEEDED


class Project:
    """A copy of the project with stand-ins for its steps: Project(folder, {"0_x": "ok", ...})."""

    def __init__(self, folder: Path, steps: dict[str, str]):
        self.folder, self.results = folder, folder / "results"
        for name in ("common", "ladder", "report"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "run_all.sh", folder)
        for name, body in steps.items():
            (folder / f"{name}.py").write_text(BODIES[body])

    def start(self, *words, command=None, cwd=None, env=(), roofs=("--no-roofs",), **facts):
        """Start a command: by default the ladder, with these facts about the arguments."""
        stub = [
            sys.executable,
            "-c",
            STUB,
            str(self.folder),
            json.dumps(FACTS | facts),
            *roofs,
            *map(str, words),
        ]
        kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        pipes = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
        }
        environment = {**kept, "PYTHON": sys.executable, **dict(env)}
        return subprocess.Popen(command or stub, cwd=cwd or self.folder, env=environment, **pipes)

    def run(self, *words, **options):
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def only(self):
        """The folder of the only run."""
        (folder,) = [path for path in self.results.iterdir() if path.is_dir() and not path.is_symlink()]
        return folder

    def rows(self):
        """The rows of the only run, by name."""
        return {row["step"]: row for row in json.loads((self.only() / "results.json").read_text())["rows"]}

    def statuses(self):
        return [row["status"] for row in self.rows().values()]


@pytest.fixture
def project(tmp_path):
    return lambda steps, folder=tmp_path / "project": Project(folder, steps)


def wait_until(done, seconds=60):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    return done()


@pytest.mark.slow
def test_rows_that_break_stay_rows_and_leave_no_process(project):
    checkout = project({"0_x": "ok", "1_x": "grandchild", "2_x": "hang", "3_x": "ok", "4_x": "killed"})
    ran = checkout.run("--step-timeout", "3", needed_bytes=NEEDED | {"3_x.py": 300 * 2**30})
    rows = checkout.rows()
    assert ran.returncode == 1 and checkout.statuses() == ["ok", "failed", "timeout", "oom", "oom"], (
        ran.stderr
    )
    assert "exit code 3" in rows["1_x"]["reason"] and "1_x.log" in rows["1_x"]["reason"]
    assert "longer than 3 s: raise --step-timeout" in rows["2_x"]["reason"]
    assert (
        "needs about 300 GiB of 100 free" in rows["3_x"]["reason"]
        and not (checkout.only() / "3_x.log").exists()
    )
    assert "signal 9" in rows["4_x"]["reason"] and rows["0_x"]["note"] == "passive"
    assert wait_until(lambda: not is_alive(int((checkout.folder / "pid").read_text())), 10)


def test_a_row_whose_script_was_edited_meanwhile_keeps_its_time_and_the_report_says_so(project):
    checkout = project({"0_x": "ok", "1_x": "edited"})
    ran = checkout.run()
    assert checkout.statuses() == ["ok", "ok"] and "1_x: 2.0 ms a step" in ran.stdout
    assert "1_x changed after the run began" in ran.stdout


def test_repeat_runs_all_rows_again_and_the_same_command_only_what_is_missing(project):
    checkout, words = project(FIVE_OK), ["--repeat", "2", "--only", "0,1"]
    ran = checkout.run(*words)
    folder = checkout.only()
    assert ran.returncode == 0 and ran.stdout.count("2.0 ms a step") == 4, ran.stderr
    assert checkout.statuses() == ["ok", "ok"] and len(checkout.rows()["0_x"]["passes"]) == 2
    half = (folder / "pass-2" / "1_x.json").read_text()[:99]
    (folder / "pass-2" / "1_x.json").write_text(half)
    before = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(before | {"started_at": "2020-01-01"}))
    again = checkout.run(*words, "--output", folder, "--step-timeout", "77")
    assert again.returncode == 0 and again.stdout.count("2.0 ms a step") == 1
    after = json.loads((folder / "plan.json").read_text())
    assert after == before | {"started_at": "2020-01-01", "limit_s": 77}
    more = checkout.run("--repeat", "2", "--only", "0,1,2", "--output", folder)
    assert more.returncode == 0 and more.stdout.count("2.0 ms a step") == 2, "two passes of one row more"
    assert [*checkout.rows()] == ["0_x", "1_x", "2_x"]


@pytest.mark.parametrize(("becomes", "again"), [("skipped", []), ("ok", ["3_compile", "pass-2/0_fp32"])])
def test_rows_of_a_model_run_again_only_after_a_new_one(becomes, again, tmp_path, monkeypatch):
    statuses = {"0_fp32": "ok", "2_sdpa": "skipped", "3_compile": "ok", "pass-2/0_fp32": "ok"}
    ran = []

    def put(name, status):
        record = {"schema_version": schema.SCHEMA_VERSION, "rows": [{"status": status, "step_ms": [1.0]}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))

    def run_row(self, row, place):
        ran.append(row.output.removesuffix(".json"))
        put(ran[-1], becomes if ran[-1] == "2_sdpa" else "ok")

    monkeypatch.setattr(running.Running, "run_row", run_row)
    monkeypatch.setattr(running, "finish", lambda *_, **__: 0)
    (tmp_path / "pass-2").mkdir()
    for name, status in statuses.items():
        put(name, status)
    planned = [rows.Planned(rows.MODEL_SCRIPT, [], f"{name}.json") for name in statuses]
    facts = {"device": "x", "workload": None, "messages": []}
    plan = running.plan_of("ladder", planned, facts, 9, "./run_all.sh")
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert running.execute(running.Job(plan, planned, facts, "again"), tmp_path) == 0
    assert ran == ["2_sdpa", *again], "a skipped row gives nothing to those behind it"


def test_help_needs_a_python_that_starts(project):
    checkout = project({"0_x": "ok"})
    command = ["bash", str(checkout.folder / "run_all.sh"), "--help"]
    ended = checkout.run(command=command, env={"PYTHON": "/bin/false"})
    assert ended.returncode == 1 and "/bin/false does not start or is older" in ended.stderr
    assert checkout.run(command=command).stdout.startswith("usage")


@pytest.mark.slow
def test_a_folder_continues_with_the_same_plan_alone(project, tmp_path):
    checkout = project(FIVE_OK | {"1_x": "killed"})
    assert checkout.run().returncode == 1
    folder = checkout.only()
    assert "4 of 5 rows are recorded already" in checkout.run("--output", folder).stdout
    for change in ({"script": "x.py"}, {"gpus": 2}):
        plan = json.loads((folder / "plan.json").read_text())
        changed = plan | {"rows": [plan["rows"][0] | change, *plan["rows"][1:]]}
        (folder / "plan.json").write_text(json.dumps(changed))
        ran = checkout.run("--output", folder)
        said = f"{next(iter(change))} of 0_x.json differ"
        assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr
        (folder / "plan.json").write_text(json.dumps(plan))
    (deep := tmp_path / "deep").mkdir()
    (deep / "plan.json").write_text("[" * 100_000)
    (tmp_path / "file").write_text("mine")
    for words, facts, said in (
        ([folder, "--steps", "9"], {}, "arguments of 0_x.json, arguments of 1_x.json"),
        ([deep], {}, "holds files that are of no run"),
        ([tmp_path / "file"], {}, "cannot be used"),
        ([folder], {"workload": WORKLOAD | {"seed": 2}}, "workload differ"),
        ([folder], {"device": "another"}, "device differ"),
    ):
        ran = checkout.run("--output", *words, **facts)
        assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr
    (checkout.folder / "1_x.py").write_text(OK)
    assert "the code of 1_x.py differ" in checkout.run("--output", folder).stderr


@pytest.mark.parametrize(
    "words, said",
    [
        ("--sweep --scaling", "--scaling and --sweep exclude each other"),
        ("--only 7", "give some of 0,1,2,3,4"),
        ("--only=", "give some of 0,1,2,3,4"),
        ("--sweep --repeat 2", "--repeat is for a ladder"),
        ("--sweep --only 3", "--sweep compares steps"),
        ("--sweep --only 3,3", "--sweep compares steps"),
        ("--sweep --n-embd 64", "--sweep chooses the shape"),
        ("--parallel ddp", "--parallel is for several processes"),
        ("--peers --gpus 2", "--peers excludes --gpus"),
        ("--gpus 9999", "--gpus 9999: there "),
        ("--scaling --gpus 9999", "--gpus 9999: there "),
        ("--repeat 0", "is not a whole number"),
    ],
)
def test_options_that_contradict_are_one_line(words, said, project):
    ran = project(FIVE_OK).run(*words.split())
    assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr


@pytest.mark.slow
def test_a_finished_sweep_can_be_continued(project, tmp_path):
    checkout, words = project({"0_x": "ok"}), ["--sweep", "--output", tmp_path / "sweep"]
    pinned = {"--preset": "tiny", "--batch-size": "2"}
    assert checkout.run(*words, pinned=pinned).returncode == 0
    ran = checkout.run(*words, pinned=pinned)
    assert ran.returncode == 0 and "5 of 5 rows are recorded already" in ran.stdout, ran.stderr


def test_rows_that_a_study_gets_later_stand_at_their_place_in_each_run():
    def plan(*steps):
        places = [f"{width}/{step}.json" for width in ("768", "320") for step in steps]
        planned = [{"output": place} for place in places]
        return {"kind": "sweep", "command": "", "started_at": "", "rows": planned, "code": {}}

    merged = running.merge(plan("3_compile", "4_te"), plan("0_baseline", "3_compile"))
    assert [row["output"] for row in merged["rows"]] == [
        f"{width}/{step}.json" for width in ("768", "320") for step in ("0_baseline", "3_compile", "4_te")
    ]
    without_hashes = {name: value for name, value in plan("3_compile").items() if name != "code"}
    assert running.merge(without_hashes, plan("3_compile") | {"code": {"a": "1"}})["code"] == {"a": "1"}


def test_a_sweep_goes_on_where_auto_would_choose_another_shape():
    free, less = (
        {"kind": "sweep", "workload": {"batch_size": size, "text": "x", "seed": 1}} for size in (32, 16)
    )
    assert running.comparable(free, "workload") == running.comparable(less, "workload")
    other = less | {"workload": less["workload"] | {"text": "y"}}
    assert running.comparable(other, "workload") != running.comparable(less, "workload")


def test_the_steps_are_the_files_whose_names_begin_with_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    for name in ("10_late.py", "2_b.py", "2_a.py", "notes.py", "3-x.py", "4_y.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "5_folder.py").mkdir()
    assert rows.scripts() == ["2_a.py", "2_b.py", "10_late.py"] and rows.scripts("10,4") == ["10_late.py"]
    (tmp_path / "2_a.py").write_text('"""für"""\n    def capture(', encoding="latin-1")
    assert rows.captures("2_a.py") and not rows.captures("2_b.py")


def test_runs_are_lists_of_rows():
    a, b = "0_baseline", "3_compile"
    planned = rows.ladder(["--preset", "gpt2"], [f"{a}.py", f"{b}.py", "4_transformer_engine.py"])
    outputs = {row.output: row for row in rows.scaling(planned, 6, None, "cuda")}
    places = ["1", "2-ddp", "2-fsdp", "4-ddp", "4-fsdp", "6-ddp", "6-fsdp", "1-launched"]
    assert list(dict.fromkeys(output.partition("/")[0] for output in outputs)) == places
    assert outputs[f"6-ddp/{a}.json"].gpus == 6 and outputs[f"1/{a}.json"].gpus == 1
    assert outputs[f"4-fsdp/{a}.json"].arguments == ["--preset", "gpt2", "--parallel", "fsdp"]
    assert f"1-launched/{a}.json" not in outputs
    assert outputs[f"1-launched/{b}.json"].arguments[-1] == "--no-capture"
    by_ddp = [row.output.partition("/")[0] for row in rows.scaling(planned, 2, "ddp", "cuda")]
    assert set(by_ddp) == {"1", "2-ddp"}
    assert [row.output for row in rows.repeat(planned, 2)][3:] == [f"pass-2/{row.output}" for row in planned]
    swept = rows.sweep(planned, "cuda")
    assert len(swept) == 3 * 9 and swept[-1].arguments[-1] == "1"
    shapes = [row.output.partition("/")[0] for row in swept[::3]]
    assert shapes == [f"{C}-channels-2048-tokens" for C in (320, 768, 2048, 4096, 8192)] + [
        f"1024-channels-{T}-tokens" for T in (1024, 4096, 16384, 32768)
    ]
    assert [row.arguments[-1] for row in swept[::3]] == ["8"] * 5 + ["32", "8", "2", "1"]
    assert {row.arguments[7] for row in rows.sweep(planned, "cpu")} == {"2", "4", "8"}, "heads of 32 channels"
    words = "--n-layer 2 --n-embd 320 --n-head 5 --seq-len 2048 --batch-size 8"
    assert swept[0].arguments == ["--preset", "gpt2", *words.split()]


# What becomes of a request: whether roofs are asked for, and of its first row the processes and the words.
REQUESTS = {
    "": (True, 1, "--preset tiny --batch-size 2 --profile"),
    "--batch-size 2 --preset=tiny": (True, 1, "--preset tiny --batch-size 2 --profile"),
    "--no-roofs": (False, 1, "--preset tiny --batch-size 2 --profile"),
    "--gpus 2": (False, 2, "--preset tiny --batch-size 2 --profile"),
    "--gpus 2 --parallel fsdp": (False, 2, "--parallel fsdp --preset tiny --batch-size 2 --profile"),
    "--scaling": (False, 1, "--preset tiny --batch-size 2 --profile"),
    "--sweep": (False, 1, "--preset tiny --n-layer 2 --n-embd 320 --n-head 5 --seq-len 2048"),
    "--seed 7": (True, 1, "--seed 7 --preset tiny --batch-size 2 --profile"),
}


@pytest.mark.parametrize("words", REQUESTS)
def test_a_request_becomes_rows(words, monkeypatch):
    roofs, gpus, arguments = REQUESTS[words]
    asked = []
    pinned = {"--preset": "tiny", "--batch-size": "2"}
    facts = FACTS | {"device_type": "cuda", "gpus": 2, "pinned": pinned}
    monkeypatch.setattr(rows, "check", lambda *_, **options: asked.append(options["roofs"]) or facts)
    plan, planned, _, again = command.prepare(command.parse(words.split()))
    assert (asked, planned[0].gpus) == ([roofs], gpus)
    assert " ".join(planned[0].arguments).startswith(arguments)
    assert plan["rows"] == [row._asdict() for row in planned]
    assert plan["command"] == " ".join(["./run_all.sh", *words.split()])
    same, *_ = command.prepare(command.parse(again.split()[1:]))
    assert same["rows"] == plan["rows"], "the command that finishes a run has the same rows"


@pytest.mark.parametrize(
    ("device_type", "kind", "free", "is_left_out"),
    [
        ("cpu", "ladder", 3 * 2**30, True),
        ("cpu", "ladder", 5 * 2**30, False),
        ("cpu", "ladder", None, False),
        ("cuda", "ladder", 3 * 2**30, False),
        ("cpu", "scaling", 3 * 2**30, False),
    ],
)
def test_a_row_that_a_cpu_s_memory_cannot_hold_is_not_started(device_type, kind, free, is_left_out, tmp_path):
    facts = FACTS | {"device_type": device_type, "free_bytes": free, "needed_bytes": {"0_x.py": 4 * 2**30}}
    job = running.Job({"kind": kind}, [], facts, "")
    row = rows.Planned("0_x.py", [], "0_x.json")
    refusal = running.Running(tmp_path, job, process.Stop()).too_large(row)
    assert bool(refusal) is is_left_out
    if refusal:
        assert refusal == ("oom", "needs about 4 GiB of 3 free: try a smaller --batch-size")


STEADY, DRIFTING, WORSE, SLOW = (
    ("ok", [a] * 2 + [b] * 2) for a, b in ((10.0, 10.0), (10.0, 11.0), (10.0, 8.0), (20.0, 20.0))
)
FAILED = ("failed", DRIFTING[1])
ON_GPU = {"device_type": "cuda"}


@pytest.mark.parametrize(
    ("facts", "runs", "stays"),
    [
        (ON_GPU, [DRIFTING, STEADY], 1),
        (ON_GPU, [DRIFTING, DRIFTING, STEADY], 2),
        (ON_GPU, [DRIFTING, DRIFTING, WORSE], 2),
        (ON_GPU, [DRIFTING, SLOW, SLOW], 0),
        (ON_GPU, [DRIFTING, SLOW, FAILED], 0),
        (ON_GPU, [DRIFTING, FAILED], 0),
        (ON_GPU, [STEADY], 0),
        (ON_GPU, [FAILED], 0),
        ({"device_type": "cpu"}, [DRIFTING], 0),
        (ON_GPU | {"kind": "parity"}, [DRIFTING], 0),
    ],
)
def test_a_row_that_drifts_on_a_gpu_runs_again(facts, runs, stays, tmp_path, monkeypatch, capsys):
    job = running.Job({"kind": "ladder", "command": ""} | facts, [], FACTS | facts, "")
    row, ended = rows.Planned("0_x.py", [], "0_x.json"), iter(runs)
    under_way, sketches = running.Running(tmp_path, job, process.Stop()), tmp_path / "0_x.sketches.npz"

    def run_script(row, path, name):
        status, step_ms = next(ended)
        sketches.unlink(missing_ok=True)
        if status == "ok":
            sketches.write_text(str(step_ms))
        content = schema.Row("0_x", status, "why", step_ms=step_ms)
        schema.write_json(path, schema.Run("", None, None, None, [content]))

    monkeypatch.setattr(under_way, "run_script", run_script)
    under_way.run_row(row, "row 1 of 1")
    status, step_ms = runs[stays]
    assert (under_way.recorded(row)["status"], under_way.recorded(row)["step_ms"]) == (status, step_ms)
    assert not sketches.exists() if status == "failed" else sketches.read_text() == str(step_ms)
    assert next(ended, None) is None, "each run was made"
    again = "0_x: the second half of its steps took 10.0% more time, so it runs again"
    assert (again in capsys.readouterr().out) == (len(runs) > 1)


@pytest.mark.parametrize(
    "ended, log, requests, code, said",
    [
        (("failed", "no such preset"), "x.py: error: no such preset\n", 0, 2, "error: no such preset\n"),
        (("failed", "killed by signal 11: see log"), "", 0, 2, "arguments broke: killed by signal 11\n"),
        (
            None,
            "it ended its own way\n",
            0,
            2,
            "its own way\nrun_all.sh: error: the check of the arguments broke: ",
        ),
        (
            ("failed", "killed by signal 6: see log"),
            "it said: error: no\n",
            0,
            2,
            "said: error: no\nrun_all.sh: ",
        ),
        (("interrupted", ""), "", 1, 130, "interrupted: nothing has run yet\n"),
    ],
)
def test_a_check_that_ends_without_an_answer_is_one_line(
    ended, log, requests, code, said, monkeypatch, capsys
):
    def run(command, path, limit_s, stop, *_):
        path.write_text(log)
        stop.requests = requests
        return ended

    monkeypatch.setattr(process, "run", run)
    with pytest.raises(SystemExit) as refused:
        rows.check(["--preset", "none"])
    assert refused.value.code == code and said in capsys.readouterr().err


def test_a_file_that_is_named_nearly_as_a_step_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "check", lambda *_, **__: FACTS)
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    monkeypatch.setattr(running, "code_of", lambda _: None)
    for name in ("0_x.py", "5_my-step.py", "notes.py"):
        (tmp_path / name).write_text("")
    job = command.prepare(command.parse([]))
    assert [row.script for row in job.rows] == ["0_x.py"]
    assert job.facts["messages"][-1].startswith("5_my-step.py is left out: a step is called NUMBER_name.py")


def test_peers_are_rows_of_every_pass(monkeypatch):
    monkeypatch.setattr(rows, "check", lambda *_, **__: FACTS)
    _, planned, *_ = command.prepare(command.parse(["--peers", "--repeat", "2", "--only", "2"]))
    outputs = [row.output for row in planned]
    assert outputs[:2] == ["2_sdpa.json", "peers/nanogpt.json"] and "pass-2/peers/nanogpt.json" in outputs
    assert len(planned) == 2 * (1 + len(rows.peers()))


def test_processes_share_the_cores_and_a_cpu_does_not_spin(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert process.environment("cpu", 1) == {"OMP_WAIT_POLICY": "passive"}
    assert process.environment("cuda", 4) == {"OMP_NUM_THREADS": "2"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert process.environment("cuda", 4) == {}


def test_a_row_finds_the_modules_of_the_user_s_folder(tmp_path, monkeypatch):
    """Also where its process gets a folder of packages that the user's Python lacks."""
    (tmp_path / "packages" / "row").mkdir(parents=True)
    monkeypatch.setattr(process, "PACKAGES", tmp_path / "packages")
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"]
    variables, log = process.environment("cuda", 1), tmp_path / "log"
    assert process.run(command, log, 60, process.Stop(), "a row", variables) is None
    assert log.read_text().strip() == f"{tmp_path}/src:{tmp_path}/packages/row"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM], ids=lambda it: it.name)
def test_an_interrupted_run_keeps_its_rows_and_leaves_no_process(number, project):
    checkout = project(FIVE_OK | {"1_x": "hang"})
    running, hung = checkout.start(), checkout.folder / "hung"
    assert wait_until(lambda: hung.exists() and hung.read_text())
    running.send_signal(number)
    out, err = running.communicate(timeout=300)
    assert wait_until(lambda: not is_alive(int(hung.read_text())), 10)
    finishes = f"./run_all.sh --no-roofs --output results/{checkout.only().name} finishes it"
    assert running.returncode == 128 + number and "Traceback" not in err and finishes in out
    assert (checkout.results / "latest").resolve() == checkout.only()
    assert checkout.statuses() == ["ok", "interrupted", "not run", "not run", "not run"]


def test_a_signal_ends_a_report_that_is_written(project):
    checkout = project({"0_x": "ok"})
    (checkout.folder / "report" / "__main__.py").write_text(
        "import time\nopen('writing', 'w')\ntime.sleep(99)"
    )
    running = checkout.start()
    assert wait_until((checkout.folder / "writing").exists)
    running.send_signal(signal.SIGTERM)
    out, err = running.communicate(timeout=20)
    assert running.returncode == 143 and out.endswith(" finishes it\n") and err == ""


@pytest.mark.slow
def test_a_row_that_was_recorded_before_the_user_stopped_it_stands(project):
    checkout = project(FIVE_OK | {"1_x": "lingers"})
    running = checkout.start()
    assert wait_until((checkout.folder / "lingers").exists)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=300)
    assert running.returncode == 130 and checkout.statuses() == ["ok", "ok", "not run", "not run", "not run"]


def test_a_full_disk_is_a_line_and_no_traceback(project):
    checkout = project(FIVE_OK)
    checkout.results.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(checkout.results)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        ran = checkout.run()
        names = [path.name for path in checkout.results.rglob("*")]
    finally:
        subprocess.run(["umount", "-l", str(checkout.results)], check=True)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    said = re.search(r"No space left on device: '\S+/([^/]+)'", ran.stderr)
    assert said and not [name for name in names if name.startswith(f".{said[1]}")], "no half of a file stays"


@pytest.mark.slow
def test_a_terminal_is_told_each_second_that_a_row_runs(project):
    checkout = project({"0_x": "silent"})
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", STUB, str(checkout.folder), json.dumps(FACTS), "--no-roofs"]
    running = subprocess.Popen(
        command, cwd=checkout.folder, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    last, longest, said = time.monotonic(), 0.0, b""
    while running.poll() is None:
        if select.select([ours], [], [], 0.2)[0]:
            with contextlib.suppress(OSError):
                said += os.read(ours, 4096)
            now = time.monotonic()
            last, longest = now, max(longest, now - last)
    assert longest < 10 and len(set(re.findall(rb"0_x: running, \d s", said))) > 2


def test_help_needs_no_torch_and_a_venv_that_is_not_ours_stays(project, tmp_path):
    checkout = project({})
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    (tmp_path / "argparse.py").write_text("raise SystemExit('executed')")
    env = {"PYTHON": "", "PATH": f"{bare / 'bin'}:{os.environ['PATH']}"}
    ran = checkout.run(command=[str(checkout.folder / "run_all.sh"), "--help"], env=env, cwd=tmp_path)
    assert ran.returncode == 0 and "--output FOLDER" in ran.stdout, ran.stderr
    (checkout.folder / ".venv").mkdir()
    (checkout.folder / ".venv" / "mine").write_text("mine")
    ran = checkout.run(command=["./run_all.sh", "--setup"], env=env)
    assert (
        ran.returncode == 1 and ".venv is not run_all.sh's" in ran.stderr and ran.stderr.count("\n") == 1
    ), ran.stderr
    assert (checkout.folder / ".venv" / "mine").read_text() == "mine"


@pytest.mark.slow
def test_two_processes_that_hang_are_both_ended(project):
    checkout = project({"0_x": "stubborn"})
    running, hung = (
        checkout.start("--gpus", "2", "--only", "0"),
        [checkout.folder / f"hung{rank}" for rank in "01"],
    )
    assert wait_until(lambda: all(path.exists() and path.read_text() for path in hung))
    running.send_signal(signal.SIGTERM)
    time.sleep(1)
    running.send_signal(signal.SIGTERM)  # leaves torchrun no time to end them
    running.communicate(timeout=300)
    assert running.returncode == 143 and checkout.statuses()[0] == "interrupted"
    assert wait_until(lambda: not any(is_alive(int(path.read_text())) for path in hung), 10)


def test_a_row_without_its_log_does_not_end_the_run(project):
    checkout = project({"0_x": "vanishes", "1_x": "ok"})
    assert checkout.run().returncode == 1 and checkout.statuses() == ["failed", "ok"]


def test_a_folder_that_a_run_has_is_not_continued_by_another(project):
    checkout = project({"0_x": "hang"})
    running, hung = checkout.start(), checkout.folder / "hung"
    assert wait_until(lambda: hung.exists() and hung.read_text())
    ran = checkout.run("--output", checkout.only())
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=300)
    assert ran.returncode == 2 and "in use by another run" in ran.stderr and ran.stderr.count("\n") == 1


def test_what_a_shell_started_before_is_left_alone(project):
    checkout = project({"0_x": "ok", "1_x": "grandchild"})
    stub = [sys.executable, "-c", STUB, str(checkout.folder), json.dumps(FACTS), "--no-roofs"]
    line = f"sleep 600 >/dev/null 2>&1 & echo $! > bystander; exec {shlex.join(stub)}"
    ran = checkout.run(command=["sh", "-c", line])
    bystander = int((checkout.folder / "bystander").read_text())
    assert ran.returncode == 1 and is_alive(bystander) and checkout.statuses() == ["ok", "failed"]
    os.kill(bystander, signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_worker_is_named(project):
    checkout = project({"0_x": "killed"})
    assert checkout.run("--gpus", "2", "--only", "0").returncode == 1
    assert checkout.statuses()[0] == "oom" and "signal 9" in checkout.rows()["0_x"]["reason"]


@pytest.mark.slow
def test_the_real_ladder_and_a_step_more_in_a_hostile_place(project, tmp_path, text_file):
    """The step as docs/steps.md says under "Add a step of your own"."""
    checkout = project({}, tmp_path / "a:path with a colon")
    for step in STEPS:
        shutil.copy(ROOT / f"{step}.py", checkout.folder)
    script = (checkout.folder / f"{STEPS[2]}.py").read_text()
    mine = script.replace("Step 2:", "Step 5:", 1).replace("1e-5", "1e-8")
    (checkout.folder / "5_mine.py").write_text(mine)
    (elsewhere := tmp_path / "else" / "where").mkdir(parents=True)
    for name in ("statistics", "report", "argparse"):
        (elsewhere / f"{name}.py").write_text("raise SystemExit('the user has files of this name')")
    ran = checkout.run(
        command=[str(checkout.folder / "run_all.sh"), "--data=../../text.txt", *FAST],
        cwd=elsewhere,
        env={"PYTHONSAFEPATH": "1"},
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    rows, run = checkout.rows(), json.loads((checkout.results / "latest" / "results.json").read_text())
    assert checkout.statuses() == ["ok"] * 4 + ["skipped", "ok"]
    assert len({round(row["loss"][0], 2) for row in rows.values() if row["loss"]}) == 1
    assert (
        run["roofs"] is None and ran.stdout.startswith("CPU: ") and "not what it gains on a GPU" in ran.stdout
    )
    assert rows[STEPS[0]]["profile"]["categories"]["matrix products"] > 0
    written = {path.name for path in checkout.only().iterdir()}
    assert written >= {"report.html", "report.md", "plan.json", "steps.svg"}
    page = (checkout.only() / "report.html").read_text()
    assert "<h3>Step 5: " in page and "&#34;eps&#34;: 1e-8" in page
    shown = [line for line in ran.stdout.splitlines() if re.match(rf"({STEPS[2]}|5_mine) +\d", line)]
    assert len(shown) == 2 and max(map(len, shown)) <= 100
    wrong = checkout.run("--only", "7")
    assert wrong.returncode == 2 and "give some of 0,1,2,3,4,5" in wrong.stderr
