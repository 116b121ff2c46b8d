"""Arguments, the record, and what a script says when it cannot run."""

import json
import os
import stat
import subprocess
import sys

import pytest
import torch
from conftest import CPU_STEPS, ROOT, STEPS, arguments, built

from common import benchmark, hardware
from common.model import GPTConfig

FAST = ["--device", "cpu", "--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--seq-len", "32", "--steps", "2"]
FAST += ["--warmup", "1", "--amp-dtype", "fp32"]


def run_script(step, *words, env=None, cwd=ROOT):
    return subprocess.run(
        [sys.executable, str(ROOT / f"{step}.py"), *words],
        capture_output=True, text=True, timeout=300, cwd=cwd, env={**os.environ, **(env or {})},
    )  # fmt: skip


def parse(*words):
    return benchmark.parse_args(ROOT / f"{STEPS[0]}.py", "", list(words))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preset", "gpt5"], "invalid choice"),
        (["--n-embd", "130"], "--n-embd 130 is not divisible by --n-head 4"),
        (["--n-layer", "0"], "--n-layer: '0' is not a whole number"),
        (["--batch-size", "-2"], "--batch-size: '-2' is not a whole number"),
        (["--seq-len", "1.5"], "'1.5' is not a whole number"),
        (["--steps", "0"], "--steps"),
        (["--warmup", "0"], "--warmup"),
        (["--lr", "nan"], "--lr: 'nan' is not a finite positive number"),
        (["--lr", "inf"], "not a finite positive number"),
        (["--lr", "0"], "not a finite positive number"),
        (["--seed", "-1"], "--seed"),
        (["--device", "cuda:99"], "CUDA device"),
        (["--device", "tpu"], "is not one of auto, cpu, cuda, cuda:N"),
        (["--amp-dtype", "fp16"], "needs a GPU"),
        (["--data", "/nonexistent/text.txt"], "cannot read /nonexistent/text.txt"),
        (["--data", "/"], "cannot read /"),
        (["--vocab-size", "100"], "outside the vocabulary"),
        (["--seq-len", "99999999"], "need 100000000"),
        (["--output", "/proc/nowhere/x.json"], "cannot write --output"),
        (["--output", "/"], "--output"),
        (["--output", "/dev/null"], "is not a regular file"),
        (["--output", "/tmp/" + "a" * 300], "too long"),
        (["--batch-size", "9" * 20], "2^31 - 1"),
        (["--batch-size", "0" * 20 + "9" * 20], "2^31 - 1"),
        (["--batch-size", "0" * 5000], "2^31 - 1"),
        (["--device", "cpu:7"], "there is one cpu"),
        (["--nonsense"], "unrecognized arguments"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--device", "cpu", *words)
    complaint = capsys.readouterr().err
    assert caught.value.code == 2
    assert said in complaint and complaint.count("\n") == 1


def test_an_output_that_is_a_folder_or_unwritable_is_refused(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for path in (tmp_path, blocked / "record.json"):
        with pytest.raises(SystemExit) as caught:
            parse("--device", "cpu", "--output", str(path))
        assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    assert blocked.read_text() == ""


@pytest.mark.parametrize(
    ("content", "replaced"),
    [
        ("mine", False),
        ('{"name": "a package"}', False),
        ('{"steps": [{}, {}], "peers": []}', False),  # a whole run
        ('{"experiment": "roofline"}', False),
        ('{"steps": ', False),
        ('{"steps": [{}]}', True),
        ('{"copy_bytes_per_s": 1}', True),  # roofs
        ("", True),
    ],
)
def test_only_a_record_of_one_step_is_replaced(content, replaced, tmp_path, capsys):
    path = tmp_path / "there.json"
    path.write_text(content)
    if replaced:
        parse("--device", "cpu", "--output", str(path))
    else:
        with pytest.raises(SystemExit) as caught:
            parse("--device", "cpu", "--output", str(path))
        assert caught.value.code == 2 and "is no record of this kind" in capsys.readouterr().err
    assert path.read_text() == content


def fake_nvidia_smi(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 999.88\n")
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU here")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_that_torch_cannot_use_is_named(device, tmp_path, monkeypatch, capsys):
    fake_nvidia_smi(tmp_path, monkeypatch)
    with pytest.raises(SystemExit):
        parse("--device", device)
    complaint = capsys.readouterr().err
    assert "driver 999.88" in complaint and torch.__version__ in complaint and "--device cpu" in complaint
    assert parse("--device", "cpu").device.type == "cpu"


# --- arguments ------------------------------------------------------------------------------------


def test_auto_takes_tiny_on_a_cpu_and_says_why():
    args = parse("--device", "cpu")
    assert (args.preset, args.batch_size, args.steps, args.warmup) == ("tiny", 2, 10, 3)
    assert "runs on a CPU" in args.notes[0]


def test_every_field_can_be_overridden():
    args = parse("--device", "cpu", "--n-layer", "3", "--n-embd", "64", "--batch-size", "5", "--lr", "0.5")
    assert (args.config.n_layer, args.config.n_embd, args.batch_size, args.lr) == (3, 64, 5, 0.5)
    assert args.preset == "custom" and args.preset_given == "tiny"


@pytest.mark.parametrize(
    ("free_gib", "preset", "batch_size"),
    [(139, "gpt3-6.7b-slice", 8), (79, "gpt2", 32), (40, "gpt2", 16), (20, "gpt2", 8), (4, "gpt2", 1), (1, "gpt2", 1)],
)
def test_auto_picks_what_fits_a_gpu(free_gib, preset, batch_size, monkeypatch):
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda device: free_gib * 2**30)
    chosen = benchmark._resolve_preset("auto", torch.device("cuda", 0))
    assert chosen[:2] == (preset, batch_size) and str(free_gib) in chosen[2][0]


@pytest.mark.parametrize(
    ("flags", "bf16"), [("fma avx2", False), ("avx512_bf16", True), ("amx_bf16 amx_tile", True), ("", False)]
)
def test_cpu_mixed_precision_needs_bf16_instructions(flags, bf16, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    dtype, note = hardware.resolve_amp_dtype("auto", torch.device("cpu"))
    assert dtype is (torch.bfloat16 if bf16 else torch.float32)
    assert (note is None) is bf16


def test_help_gives_units_and_defaults():
    shown = run_script(STEPS[2], "--help").stdout
    for word in ("--preset", "--n-layer", "--batch-size", "--steps", "--warmup", "--lr", "--seed", "--data"):
        assert word in shown
    assert "default: 30 on a GPU, 10 on a CPU" in shown and "sequences per training step" in shown


# --- the record -----------------------------------------------------------------------------------


def test_a_script_writes_its_record_and_one_result_line(tmp_path, text_file):
    output = tmp_path / "new" / "record.json"
    ran = run_script(STEPS[2], *FAST, "--data", str(text_file), "--output", str(output), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    envelope = json.loads(output.read_text())
    assert envelope["schema_version"] == 1 and len(envelope["steps"]) == 1
    assert str(tmp_path) not in json.dumps({k: v for k, v in envelope.items() if k != "steps"})
    workload, (step,) = envelope["workload"], envelope["steps"]
    assert workload["preset"] == "custom" and workload["tokens_per_step"] == 64
    assert workload["data"]["name"] == "text.txt" and workload["data"]["tokens"] == 4000
    assert step["step"] == STEPS[2] and step["status"] == "ok" and step["reason"] is None
    assert step["source"] == (ROOT / f"{STEPS[2]}.py").read_text()
    timing = step["timing"]
    assert len(timing["step_ms"]) == 2 and len(step["loss"]) == 3
    assert timing["p25_ms"] <= timing["median_ms"] <= timing["p75_ms"]
    assert step["tokens_per_s"] == pytest.approx(64 / timing["median_ms"] * 1e3)
    assert step["model_flops_per_s"] == pytest.approx(workload["flops_per_step"] / timing["median_ms"] * 1e3)
    assert step["settings"]["attention_kernel"] == "flash (CPU)"
    assert step["settings"]["float32_matmul_precision"] == "high"
    assert step["peak_allocated_bytes"] is None and step["peak_rss_bytes"] > 0
    assert step["note"] == "mixed precision is off, as --amp-dtype fp32 asks"
    last = ran.stdout.strip().splitlines()[-1]
    assert last.startswith(f"{STEPS[2]}: ") and "ms/step" in last
    assert not list(output.parent.glob(".*")), "no temporary file is left"


def test_a_reader_who_leaves_costs_nothing(tmp_path):
    output = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / f"{STEPS[0]}.py"), *FAST, "--profile", "--output", str(output)]
    for left in ("stdout", "stderr"):
        kept = "stderr" if left == "stdout" else "stdout"
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            if left == "stdout":
                assert process.stdout.readline().startswith(STEPS[0])  # as head -1: gone after the header's first line
            getattr(process, left).close()
            said = getattr(process, kept).read()
        assert process.returncode == 0 and "Traceback" not in said, said
        assert ("matrix products" if kept == "stderr" else "ms/step") in said
        assert json.loads(output.read_text())["steps"][0]["status"] == "ok"
        output.unlink()


def test_every_record_field_is_documented():
    documented = benchmark.__doc__
    for field in benchmark.step_record(arguments(STEPS[0])):
        assert field in documented, field
    for field in benchmark.workload(arguments(STEPS[0])):
        assert field in documented, field


def test_what_ran_is_observed(monkeypatch):
    expected = {
        STEPS[0]: ("float32", "by hand", False, "AdamW"),
        STEPS[1]: ("bfloat16", "by hand", False, "AdamW"),
        STEPS[2]: ("bfloat16", "flash (CPU)", False, "AdamW"),
        STEPS[3]: ("bfloat16", "flash (CPU)", True, "AdamW, compiled"),
    }
    run = benchmark.run
    for step in CPU_STEPS:
        made = built(step, monkeypatch, amp_dtype=torch.bfloat16, steps=2, warmup=1)
        settings = run(made.train_step, made.model, made.args)["settings"]
        names = ("amp_dtype", "attention_kernel", "compiled", "optimizer")
        assert tuple(settings[name] for name in names) == expected[step], step


def test_priming_passes_the_batches_and_trains_nothing():
    x = torch.nn.Parameter(torch.ones(3))
    optimizer, seen = torch.optim.SGD([x], lr=1.0), []

    def train_step(tokens, targets):
        seen.append(tokens)
        (x * tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    benchmark.prime(train_step, [(2.0, None), (3.0, None)], optimizer)
    assert seen == [2.0, 3.0] and torch.equal(x, torch.ones(3))
    with pytest.raises(TypeError):
        benchmark.prime(train_step, [(None, None)], optimizer)
    train_step(0.5, None)
    assert torch.equal(x, torch.full((3,), 0.5)), "it trains again, after an error too"


def test_a_size_that_a_kernel_cannot_take_is_named():
    args = arguments(
        STEPS[0], config=GPTConfig(n_layer=1, n_head=2, n_embd=64, seq_len=24, vocab_size=250), batch_size=3
    )
    args.require_multiples_of(8, "FP8", vocab=False)
    with pytest.raises(benchmark.Skip, match="FP8 needs --vocab-size divisible by 8, not 250"):
        args.require_multiples_of(8, "FP8")
    with pytest.raises(benchmark.Skip, match="--batch-size x --seq-len divisible by 16, not 72"):
        args.require_multiples_of(16, "FP8")


def test_a_loss_that_is_not_finite_fails_the_row():
    args = arguments(STEPS[0], steps=2, warmup=1)
    with pytest.raises(FloatingPointError, match="training step 1: lower --lr"):
        losses = iter([1.0, float("nan"), 1.0, 1.0])
        benchmark.run(lambda tokens, targets: torch.tensor(next(losses)), torch.nn.Module(), args)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB"), "oom", "try --batch-size 8"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "oom", "try --batch-size 8"),
        (MemoryError(), "oom", "try --batch-size 8"),
        (benchmark.Skip("no GPU"), "skipped", "no GPU"),
        (RuntimeError("InvalidCxxCompiler: No working C++ compiler found in cpp.cxx"), "failed", "apt-get install g++"),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "failed", "install"),
        (RuntimeError("TritonMissing: Cannot find a working triton installation"), "failed", "pip install triton"),
        (RuntimeError("BackendCompilerFailed: cuDNN error at /MHA.cpp:12"), "failed", "cuDNN error"),
        (RuntimeError("line one\nline two"), "failed", "line one"),
    ],
)
def test_an_exception_becomes_a_row(error, status, said):
    outcome = benchmark.explain(error, arguments(STEPS[0], batch_size=9))
    assert outcome["status"] == status and said in outcome["reason"]
    assert "\n" not in outcome["reason"]


def test_out_of_memory_at_batch_1_names_something_else():
    outcome = benchmark.explain(MemoryError(), arguments(STEPS[0], batch_size=1))
    assert "--seq-len" in outcome["reason"] and "--batch-size" not in outcome["reason"]


def test_a_missing_compiler_is_a_failed_row(tmp_path):
    output = tmp_path / "record.json"
    env = {
        "CXX": "/nonexistent/g++",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    }
    ran = run_script(STEPS[3], *FAST, "--output", str(output), env=env)
    assert ran.returncode == 1
    (step,) = json.loads(output.read_text())["steps"]
    assert step["status"] == "failed" and "apt-get install g++" in step["reason"]
    assert ran.stdout.strip().splitlines()[-1] == f"{STEPS[3]}: failed: {step['reason']}"


def test_step_4_is_skipped_without_a_gpu(tmp_path):
    output = tmp_path / "record.json"
    ran = run_script(STEPS[4], *FAST, "--output", str(output))
    (step,) = json.loads(output.read_text())["steps"]
    assert ran.returncode == 0 and step["status"] == "skipped" and "needs an NVIDIA GPU" in step["reason"]


def test_the_commit_is_null_with_a_reason_where_git_cannot_tell(monkeypatch, tmp_path):
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    said = hardware.commit()
    assert said["commit"] is None and said["commit_reason"]


def test_a_profiler_that_fails_costs_the_settings_not_the_row(monkeypatch):
    def broken(*_):
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(benchmark.profile, "trace_step", broken)
    for asked, said in ((False, None), (True, "not profiled: no profiler here")):
        args = arguments(STEPS[0], profile=asked)
        observed, note = benchmark.observe(lambda: None, torch.nn.Identity(), 1.0, args)
        assert observed["settings"]["unobserved"] == "no profiler here" and note == said
        assert observed["settings"]["float32_matmul_precision"] and "profile" not in observed
