"""A script's run: its record, what it observes, and what it prints when it cannot run."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import FAST, ROOT, STEPS, arguments, built, load_step, run_python

from common import benchmark, profile
from common.kernels import categorize
from common.model import GPTConfig
from common.record import Row, Settings
from common.text import explain

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


def run_script(step, output, *words, **options):
    """The exit code, what was printed, the errors and the row of a script."""
    done = run_python(ROOT / f"{step}.py", *FAST, "--output", output, *words, **options)
    (row,) = json.loads(output.read_text())["rows"]
    return done.returncode, done.stdout, done.stderr, row


def test_a_script_writes_its_record_and_one_result_line(tmp_path, text_file):
    output = tmp_path / "new" / "record.json"
    code, out, err, row = run_script(STEPS[2], output, "--data", str(text_file))
    assert code == 0, err
    run = json.loads(output.read_text())
    assert run["schema_version"] == 3 and run["environment"]["device_type"] == "cpu"
    assert str(tmp_path) not in json.dumps({k: v for k, v in run.items() if k != "rows"})
    workload = run["workload"]
    assert (workload["preset"], workload["tokens_per_step"], workload["text"]) == ("custom", 64, "text.txt")
    assert row["step"] == STEPS[2] and row["status"] == "ok" and row["reason"] is None
    assert row["source"] == (ROOT / f"{STEPS[2]}.py").read_text()
    assert len(row["step_ms"]) == len(row["loss"]) == 4 and row["rehearsed"] == 3
    assert row["overhead_s"] > 0 and row["peak_bytes"] > 2**26 and 0.1 < min(row["step_ms"]) < 2000
    last, ms, work = (
        out.strip().splitlines()[-1],
        sum(sorted(row["step_ms"])[1:3]) / 2,
        workload["flops_per_step"],
    )
    assert (
        f"{STEPS[2]}: {ms:.1f} ms/step, {64e3 / ms:,.0f} tokens/s, {work / ms / 1e9:.3g} model TFLOP/s"
        in last
    )
    assert not list(output.parent.glob(".*")), "no temporary file is left"


@pytest.mark.parametrize("failed_before", [False, True])
def test_the_process_that_failed_first_keeps_the_record(failed_before, tmp_path, monkeypatch):
    args = arguments(STEPS[0], output=tmp_path / "record.json", rank=1, processes=2)
    args.output.write_text('{"rows": [], "started_at": "of an earlier run"}')

    def fail(*_):
        if failed_before:
            args.output.write_text('{"rows": [{"reason": "rank 0: the cause"}]}')
        raise RuntimeError("lost the others")

    monkeypatch.setattr(benchmark, "measure_row", fail)
    assert benchmark.run_and_record(None, args) == 1
    expected = (
        r"rank 0: the cause" if failed_before else r"rank 1: test_benchmark\.py, line \d+: lost the others"
    )
    assert re.fullmatch(expected, json.loads(args.output.read_text())["rows"][0]["reason"])


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS[3:])
def test_a_script_needs_no_package_but_torch_and_numpy(step, tmp_path, inductor):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_PACKAGES)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    code, _, err, row = run_script(step, tmp_path / "record.json", "--profile", env=env)
    assert code == 0 and "Traceback" not in err, err
    if step == STEPS[4]:
        assert row["status"] == "skipped" and "needs an NVIDIA GPU" in row["reason"]
    else:
        assert row["status"] == "ok" and row["profile"]["categories"]["matrix products"] > 0
        assert row["settings"]["compiled"] and row["settings"]["optimizer"] == "AdamW, fused"


def test_ctrl_c_writes_nothing_and_one_line(tmp_path):
    command = [sys.executable, str(ROOT / f"{STEPS[0]}.py"), *FAST, "--steps", "1000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--output", str(tmp_path / "record.json")], **pipes) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130 and said.splitlines()[-1] == f"{STEPS[0]}: interrupted"
    assert "Traceback" not in said and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_missing_compiler_is_a_failed_row(tmp_path, inductor):
    env = {
        "CXX": str(ROOT / "tests" / "no such folder" / "g++"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    }
    code, out, err, row = run_script(STEPS[3], tmp_path / "record.json", env=os.environ | env)
    assert code == 1 and row["status"] == "failed" and "C++ compiler" in row["reason"]
    assert "Traceback" in err and out.strip().splitlines()[-1] == f"{STEPS[3]}: failed: {row['reason']}"


@pytest.mark.slow
def test_a_reader_who_leaves_costs_no_record(tmp_path):
    command = f"{sys.executable} {STEPS[2]}.py {' '.join(FAST)} --output {tmp_path}/r.json"
    subprocess.run(f"{command} | head -0", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (tmp_path / "r.json").exists()


def test_what_ran_is_observed():
    seen = []
    names = (
        "amp_dtype",
        "float32_matmul_precision",
        "attention_kernel",
        "compiled",
        "optimizer",
        "fp8_recipe",
    )
    for step, *expected in (
        (STEPS[0], "float32", "highest", "by hand", False, "AdamW, fused", None),
        (STEPS[1], "bfloat16", "high", "by hand", False, "AdamW, fused", None),
        (STEPS[2], "bfloat16", "high", "flash (CPU)", False, "AdamW, fused", None),
        (STEPS[3], "bfloat16", "high", "flash (CPU)", True, "AdamW, fused", None),
    ):
        torch.set_float32_matmul_precision("highest")
        run = built(step, amp_dtype=torch.bfloat16)
        run.model.blocks[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        run.train_step(*run.batches[0])
        observed, _ = profile.observe(
            lambda run=run: run.train_step(*run.batches[0]), run.model, run.args.device
        )
        assert [*(getattr(observed, name) for name in names), str(seen[-1])] == [
            *expected,
            f"torch.{expected[0]}",
        ]
        assert {bool(part._compiled_call_impl) for part in (*run.model.blocks, run.model.head)} == {
            expected[3]
        }


@pytest.mark.parametrize("step", [STEPS[0], STEPS[3]])
def test_the_residual_stream_is_seen_in_the_step_itself_whatever_its_autocast(step):
    run = built(step)
    run.model.residual_dtype = torch.float16

    def train_step(tokens, targets):
        assert len(tokens) == len(targets) == 1, "as few sequences as FP8 multiplies"
        with torch.autocast("cpu", torch.float16):
            run.model(tokens, targets)

    assert profile.residual_dtype(train_step, run.batches[0], run.model) == "float16"
    assert profile.residual_dtype(train_step, run.batches[0], torch.nn.Linear(2, 2)) is None
    assert profile.residual_dtype(train_step, run.batches[0][:1], run.model) is None, "of another model"


def test_the_precision_is_that_of_products_alone():
    linear, half = torch.nn.Linear(8, 8), torch.ones(8, dtype=torch.bfloat16)
    observed, _ = profile.observe(
        lambda: linear(torch.ones(2, 8)) + (half * half), linear, torch.device("cpu")
    )
    assert (observed.amp_dtype, observed.attention_kernel, observed.optimizer) == ("float32", None, None)


def test_held_out_losses_are_of_the_training_and_its_steps_are_not_trained_twice():
    args, row = arguments(STEPS[2], steps=40, heldout_every=15), Row(STEPS[2])
    benchmark.measure_row(load_step(STEPS[2]).main, args, row)
    assert [done for done, _ in row.heldout] == [0, 15, 30, 40] and len(row.loss) == 40
    assert row.heldout[-1][1] < row.heldout[0][1] - 0.5 and abs(row.heldout[0][1] - row.loss[0]) < 0.1
    assert len(row.step_ms) == 10


def test_held_out_losses_of_a_cold_row_tell_how_many_steps_were_trained():
    row = Row(STEPS[2])
    benchmark.measure_row(
        load_step(STEPS[2]).main, arguments(STEPS[2], steps=2, warmup=3, heldout_every=1, cold=True), row
    )
    assert [done for done, _ in row.heldout] == [3]


def main_of(losses):
    """`main` of a stand-in script whose steps return these losses."""

    def main(args):
        weight = torch.nn.Parameter(torch.ones(1))
        return (
            lambda tokens, targets: torch.tensor(next(losses)),
            torch.nn.Module(),
            torch.optim.SGD([weight]),
        )

    return main


def test_a_loss_that_is_not_finite_is_a_failed_row_whose_record_has_the_losses_before(tmp_path):
    losses = itertools.chain([9.0] * 2, [1.0, 2.0, float("nan")], itertools.repeat(1.0))
    args = arguments(STEPS[0], output=tmp_path / "record.json")
    assert benchmark.run_and_record(main_of(losses), args) == 1
    (row,) = json.loads(args.output.read_text())["rows"]
    assert (
        row["status"] == "failed"
        and row["reason"] == "loss is nan at training step 2: lower --lr (now 0.004)"
    )
    assert row["loss"] == [1.0, 2.0]


def test_a_record_that_cannot_be_written_and_too_little_memory_have_their_codes(monkeypatch):
    def measure_row(main, args, row, initial_state):
        row.status, row.step_ms, row.loss, row.peak_bytes, row.warmup_s = "ok", [1.0], [1.0], 1, 1.0
        return {}

    monkeypatch.setattr(benchmark, "measure_row", measure_row)
    with pytest.raises(FileNotFoundError):
        benchmark.run_and_record(None, arguments(STEPS[0]))
    assert explain(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))[0] == "oom"


@pytest.mark.parametrize(
    "amp, note", [(True, None), (False, "FP32, because this CPU does not multiply BF16")]
)
def test_a_row_in_tf32_says_that_bf16_is_missing_only_where_it_is(monkeypatch, amp, note):
    settings = Settings(float32_matmul_precision="high", amp_dtype="float32")
    monkeypatch.setattr(profile, "observe", lambda *_: (settings, None))
    args = arguments(STEPS[0], amp_dtype=torch.bfloat16 if amp else torch.float32)
    row = Row("1_cublas")
    benchmark.measure_row(main_of(itertools.repeat(1.0)), args, row)
    assert row.note == note


def test_a_profiler_that_fails_costs_what_it_would_have_shown_and_not_the_row(monkeypatch):
    def broken(*_):
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(profile, "observe", broken)
    row = Row(STEPS[0])
    benchmark.measure_row(main_of(itertools.repeat(1.0)), arguments(STEPS[0]), row)
    assert row.status == "ok" and "not observed: no profiler here" in row.note


POINTWISE, COPIES = "normalization and pointwise", "copies and casts"
CATEGORIES = {
    "triton_tem_fused_addmm_gelu_3": "matrix products",
    "nvjet_sm90_qqtsq_192x128_128x5_1x2_h_bz_coopA_geluauxbias_auxt_TNN": "matrix products",
    "void transformer_engine::unary_kernel<&(float transformer_engine::gelu<float>)>": POINTWISE,
    "triton_per_fused_add_native_layer_norm_backward_nll_loss_forward_3": POINTWISE,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26": "attention",
    "void cunn_SoftMaxForward<8, float, at::native::LogSoftMaxForwardEpilogue>": "loss",
    "triton_poi_fused_cat_transpose_view_9": COPIES,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "void multi_tensor_apply_kernel<CopyFunctor<c10::BFloat16, float>, at::native::Copy<float>>": COPIES,
    "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>": COPIES,
    "void transformer_engine::unary_kernel<&transformer_engine::dispatch::fp8::detail::identity>": COPIES,
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "communication",
    "memset32": COPIES,
    "somebodys_new_kernel": "other",
}


def test_a_kernel_has_the_category_of_its_name():
    assert {name: categorize(name) for name in CATEGORIES} == CATEGORIES


def test_a_profile_adds_up_and_holds_a_block():
    run = built(STEPS[0], config=GPTConfig(2, 2, 64, 256, 256))
    observed = profile.profile_steps(lambda: run.train_step(*run.batches[0]), 200.0, run.args.device)
    kept, total = sum(kernel.ms for kernel in observed.kernels), sum(observed.categories.values())
    assert (
        observed.categories["optimizer"] > 0
        and len(observed.kernels) <= 40
        and 0.8 * total < kept < 1.001 * total
    )
    for half in (observed.forward, observed.backward):
        assert half[0].category == "attention" and half[0].start_ms == 0 < half[-1].start_ms


@pytest.mark.parametrize(("device_type", "asked"), [("cpu", ["CPU"]), ("cuda", ["CPU", "CUDA"])])
def test_the_profiler_is_asked_for_the_kernels_of_a_gpu_alone_where_there_is_one(
    device_type, asked, monkeypatch
):
    class Asked(Exception):
        pass

    def profiler(activities, **_):
        raise Asked([activity.name for activity in activities])

    monkeypatch.setattr(torch.profiler, "profile", profiler)
    with pytest.raises(Asked) as raised:
        profile.observe(print, torch.nn.Module(), torch.device(device_type))
    assert raised.value.args[0] == asked


def test_the_kernels_of_a_gpu_are_its_events_by_start_in_milliseconds():
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(name, start_us, us, device=cuda, is_user_annotation=False):
        time_range = SimpleNamespace(start=start_us, elapsed_us=lambda: us)
        return SimpleNamespace(
            name=name, device_type=device, is_user_annotation=is_user_annotation, time_range=time_range
        )

    events = [event("b", 4000, 500), event("a", 2000, 250), event("none", 1000, 0), event("host", 1, 1, cpu)]
    events.append(event("ProfilerStep#1", 1, 9000, is_user_annotation=True))
    observed = profile.launches_of(SimpleNamespace(events=lambda: events), on_gpu=True)
    assert [(kernel.name, kernel.ms, kernel.start_ms) for kernel in observed] == [
        ("a", 0.25, 2.0),
        ("b", 0.5, 4.0),
    ]


def test_the_profiler_waits_for_the_gpu_before_and_after_the_steps_that_count(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: done.append("wait"))
    profile._profiled(lambda: done.append("step"), 2, 250.0, torch.device("cpu"))
    assert done == ["step", "step", "wait", "step", "step", "wait"], "two steps of warming take 500 ms"
