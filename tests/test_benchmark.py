"""A script's run: its record, what it observes, its progress, and what it says when it cannot run."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import runs
import torch
from conftest import COMPILED, FAST, ROOT, SMALL, STEPS, arguments, built, trace_only

from common import benchmark, data, timing
from common.record import Row
from report.doubts import is_unsteady
from report.sentences import outcome

WITHOUT_PACKAGES = """
import sys
from importlib.machinery import PathFinder

class Blind(PathFinder):
    @classmethod
    def find_spec(cls, name, *rest):
        absent = {"msgspec", "pynvml", "tabulate", "jinja2", "matplotlib"}
        return None if name.partition(".")[0] in absent else PathFinder.find_spec(name, *rest)

sys.meta_path = [Blind if finder is PathFinder else finder for finder in sys.meta_path]
"""


def start(step, output, *words, env=(), **options):
    command = [sys.executable, str(ROOT / f"{step}.py"), *FAST, "--output", str(output), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | dict(env), **pipes, **options)


def run_script(step, output, *words, **options):
    """The exit code, what was printed, the errors and the row of a script."""
    process = start(step, output, *words, **options)
    out, err = process.communicate()
    (row,) = json.loads(output.read_text())["steps"]
    return process.returncode, out, err, row


def test_a_script_writes_its_record_one_result_line_and_progress(tmp_path, text_file):
    output, (reader, writer) = tmp_path / "new" / "record.json", os.pipe()
    env, words = {"LADDER_PROGRESS_FD": str(writer)}, ("--data", str(text_file))
    code, out, err, row = run_script(STEPS[2], output, *words, env=env, cwd=tmp_path, pass_fds=[writer])
    os.close(writer)
    assert code == 0, err
    run = json.loads(output.read_text())
    assert run["schema_version"] == 2 and run["environment"]["device_type"] == "cpu"
    assert str(tmp_path) not in json.dumps({k: v for k, v in run.items() if k != "steps"})
    workload, timing = run["workload"], row["timing"]
    assert workload["preset"] == "custom" and workload["tokens_per_step"] == 64
    assert workload["data"]["name"] == "text.txt" and workload["data"]["tokens"] == 4000
    assert row["step"] == STEPS[2] and row["status"] == "ok" and row["reason"] is None
    assert row["source"] == (ROOT / f"{STEPS[2]}.py").read_text()
    assert len(timing["step_ms"]) == 2 and len(row["loss"]) == 3 and row["peak_rss_bytes"] > 0
    assert timing["p25_ms"] <= timing["median_ms"] <= timing["p75_ms"]
    assert row["tokens_per_s"] == pytest.approx(64 / timing["median_ms"] * 1e3)
    assert row["model_flops_per_s"] == pytest.approx(workload["flops_per_step"] / timing["median_ms"] * 1e3)
    assert row["note"] == "mixed precision is off, as --amp-dtype fp32 asks"
    last = out.strip().splitlines()[-1]
    assert last.startswith(f"{STEPS[2]}: ") and "ms/step" in last
    assert not list(output.parent.glob(".*")), "no temporary file is left"
    with open(reader) as messages:
        lines = [json.loads(line) for line in messages]
    assert [(m["phase"], m["k"], m["n"]) for m in lines][:3] == [("warm-up", 1, 1), ("timed", 1, 2), ("timed", 2, 2)]
    assert lines[1]["rest_s"] is None and lines[2]["rest_s"] > 0


@pytest.mark.parametrize("step", STEPS[3:])
def test_a_script_needs_no_package_but_torch_and_numpy(step, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_PACKAGES)
    env = {"PYTHONPATH": str(tmp_path)}
    code, _, err, row = run_script(step, tmp_path / "record.json", "--profile", env=env)
    assert code == 0 and "Traceback" not in err, err
    if step == STEPS[4]:
        assert row["status"] == "skipped" and "needs an NVIDIA GPU" in row["reason"]
    else:
        assert row["status"] == "ok" and row["profile"]["categories"]["matrix products"]["ms"] > 0
        assert row["settings"]["compiled"] and row["settings"]["optimizer"] == "AdamW, compiled"
        assert (tmp_path / "record.trace.json.gz").stat().st_size > 0


def test_ctrl_c_writes_nothing_and_says_so(tmp_path):
    with start(STEPS[0], tmp_path / "record.json", "--steps", "1000000") as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130 and said.splitlines()[-1] == f"{STEPS[0]}: interrupted, nothing written"
    assert "Traceback" not in said and not list(tmp_path.iterdir())


def test_a_missing_compiler_is_a_failed_row(tmp_path):
    env = {"CXX": "/nonexistent/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    code, out, _, row = run_script(STEPS[3], tmp_path / "record.json", env=env)
    assert code == 1 and row["status"] == "failed" and "apt-get install g++" in row["reason"]
    assert out.strip().splitlines()[-1] == f"{STEPS[3]}: failed: {row['reason']}"


def test_what_ran_is_observed(monkeypatch):
    trace_only(monkeypatch)
    names = ("amp_dtype", "float32_matmul_precision", "attention_kernel", "compiled", "optimizer")
    for step, *expected in (
        (STEPS[0], "float32", "highest", "by hand", False, "AdamW"),
        (STEPS[2], "bfloat16", "high", "flash (CPU)", False, "AdamW"),
        (STEPS[3], "bfloat16", "high", "flash (CPU)", True, "AdamW, compiled"),
    ):
        torch.set_float32_matmul_precision("highest")
        made = built(step, monkeypatch, config=COMPILED, amp_dtype=torch.bfloat16, steps=2, warmup=1)
        found = benchmark.run(made.train_step, made.model, made.args).settings
        assert [getattr(found, name) for name in names] == expected


def test_the_heldout_loss_is_that_of_the_model_and_changes_nothing(monkeypatch):
    trace_only(monkeypatch)
    made = built(STEPS[3], monkeypatch, amp_dtype=torch.float32)
    before = [p.clone() for p in made.model.parameters()]
    found = benchmark.heldout_loss(made.model, made.args)
    starts = data.heldout_starts(made.args.text, SMALL.seq_len)
    ((tokens, targets),) = data.stage_batches(
        data.read_batches(made.args.text, starts.reshape(1, -1), SMALL.seq_len), made.args.device
    )
    with torch.no_grad():
        assert found == pytest.approx(made.model.forward(tokens, targets).item(), rel=1e-6)
    assert all(map(torch.equal, before, made.model.parameters()))
    short = replace(made.args.text, tokens=made.args.text.tokens[:1000])
    assert benchmark.heldout_loss(made.model, replace(made.args, text=short)) is None


def test_settling_ends_when_steps_no_longer_drift_or_after_its_time():
    for ms, fewest, most in ((lambda k: 100 + 50 / (k + 1), 2, 2), (lambda k: 100 + 2 * k, 4, 9)):
        seen = []

        def time_steps(batches, phase, ms=ms, seen=seen):
            seen.append([ms(20 * len(seen) + k) for k in range(len(batches))])
            return seen[-1], []

        passed_s = timing.settle(time_steps, [None], step_ms=100.0)
        assert fewest <= len(seen) <= most and all(len(times) == 20 for times in seen)
        assert passed_s == pytest.approx(sum(map(sum, seen)) / 1e3) and passed_s <= timing.LONGEST_SETTLING_S


def test_a_slowed_row_makes_no_sentence(monkeypatch):
    made = built(STEPS[2], monkeypatch, steps=8, warmup=1)
    slowed = itertools.cycle([0, 3])  # times what the step itself takes, however busy the machine is

    def train_step(tokens, targets):
        began = time.perf_counter()
        loss = made.train_step(tokens, targets)
        time.sleep(next(slowed) * (time.perf_counter() - began))
        return loss

    row, before = benchmark.run(train_step, made.model, made.args), runs.step("0_x")
    row.reference_ms = None  # this machine may be busy, too
    assert is_unsteady(row) and "has no comparison" in outcome(runs.run(before, row), before, row)


def test_a_rehearsal_passes_the_batches_and_trains_nothing():
    x = torch.nn.Parameter(torch.ones(3))
    optimizer, seen = torch.optim.SGD([x], lr=1.0), []

    def train_step(tokens, targets):
        seen.append(tokens)
        (x * tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(TypeError):
        benchmark.rehearsal(train_step, [(2.0, None), (None, None)], optimizer)
    assert seen == [2.0, None] and torch.equal(x, torch.ones(3))
    train_step(0.5, None)
    assert torch.equal(x, torch.full((3,), 0.5)), "it trains again, after an error too"


def test_a_loss_that_is_not_finite_fails_the_row():
    args = arguments(STEPS[0], steps=2, warmup=1)
    with pytest.raises(FloatingPointError, match="training step 1: lower --lr"):
        losses = iter([1.0, float("nan"), 1.0, 1.0])
        benchmark.run(lambda tokens, targets: torch.tensor(next(losses)), torch.nn.Module(), args)


def test_a_profiler_that_fails_costs_the_settings_not_the_row(monkeypatch):
    def broken(*_):
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(benchmark.profile, "trace_step", broken)
    for asked, said in ((False, None), (True, "not observed: no profiler here")):
        args, row = arguments(STEPS[0], profile=asked), Row(STEPS[0])
        assert benchmark.observe(lambda *_: None, (None, None), torch.nn.Identity(), args, row) == said
        assert row.settings.unobserved == "no profiler here" and row.settings.float32_matmul_precision
