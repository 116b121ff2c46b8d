"""What only a GPU can show: which kernels ran, that the host never waits, that FP8 is close, that a replay
trains."""

import json
import os
import re
import statistics
import warnings

import pytest
import torch
from conftest import FAST, ROOT, STEPS, arguments, built, load_step, run_python
from test_parallel import TORCHRUN
from test_row import rehearsed

from common import benchmark, hardware, parallel, profile
from common import proof as sampling
from common.model import GPT, GPTConfig
from common.record import Row, Settings
from common.text import Skip, explain
from predict import roofs
from report import proof

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
if CUDA:  # Transformer Engine may load a cuDNN of its own: before torch loads one, as in the script
    load_step(STEPS[4])
CONFIG = GPTConfig(n_layer=2, n_head=4, n_embd=256, seq_len=512, vocab_size=512)
GPU = {"config": CONFIG, "device": torch.device("cuda", 0), "amp_dtype": torch.bfloat16}

GEMM = re.compile(r"gemm|nvjet|cutlass_\d+_(simt|tensorop|wmma)|xmma", re.IGNORECASE)
TENSOR_CORE = re.compile(r"nvjet|tensorop|wgmma|16816|1688|bf16|f16|tf32|hmma", re.IGNORECASE)
FP8_GEMM = re.compile(r"nvjet_sm\d+_q|gemm.*(e4m3|e5m2)", re.IGNORECASE)
FUSED_FORWARD = re.compile(r"^(?!.*(bprop|bwd|backward|dot_do_o|dq)).*(sdpa|flash|fmha)", re.IGNORECASE)


def fp8_reason():
    """Why FP8 cannot run here, or None."""
    try:
        arguments(STEPS[4], **GPU).require_fp8()
        load_step(STEPS[4]).te.is_fp8_available()
    except Skip as skip:
        return str(skip)
    return None


@pytest.fixture(autouse=True)
def on_a_stream_of_its_own():
    """As a row is: the default stream cannot be captured."""
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.manual_seed(0)
        yield


def on_gpu(step, **overrides):
    if step == STEPS[4] and (reason := fp8_reason()):
        pytest.skip(reason)
    run = built(step, **GPU | overrides)
    run.kept = [run.train_step(*batch) for batch in run.batches[:3]]  # compiled and autotuned
    return run


def trained(training, n):
    """The losses of so many steps."""
    for _ in range(n):
        training.step()
    return training.losses


def kernels(run):
    """The names of the kernels of a launched step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run.train_step(*run.batches[3])
        torch.cuda.synchronize()
    return [launch.name for launch in profile.launches_of(profiler, on_gpu=True)]


@pytest.mark.parametrize("step", STEPS)
def test_products_attention_and_fused_kernels_are_those_of_the_step(step):
    run = on_gpu(step)
    names = kernels(run)
    observed, _ = profile.observe(lambda: run.train_step(*run.batches[3]), run.model, run.args.device)
    gemms = {name for name in names if GEMM.search(name)}
    assert gemms and {n for n in gemms if TENSOR_CORE.search(n)} == (set() if step == STEPS[0] else gemms)
    forward = [name for name in names if FUSED_FORWARD.search(name)]
    assert len(forward) == (0 if step in STEPS[:2] else CONFIG.n_layer)
    assert (observed.attention_kernel == "by hand") == (step in STEPS[:2])
    assert observed.optimizer == "AdamW, fused"
    if step == STEPS[3]:
        compiled = " ".join(name for name in names if name.startswith("triton_"))
        assert "native_layer_norm" in compiled and "gelu" in compiled
    if step == STEPS[4]:
        # Forward, input gradient and weight gradient of four matrices a block and of the head.
        assert len([name for name in names if FP8_GEMM.search(name)]) >= 3 * (4 * CONFIG.n_layer + 1)
        assert observed.fp8_recipe and observed.head == "FP8"


def host_syncs(work):
    """How often `work` makes the host wait for the GPU, by PyTorch's own sync debug mode."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("step", STEPS)
def test_the_host_never_waits_launched_or_replayed(step):
    run = on_gpu(step)
    assert host_syncs(lambda: run.train_step(*run.batches[3])) == 0
    if step in STEPS[3:]:
        replay = run.capture(*run.batches[0])
        assert host_syncs(lambda: replay(*run.batches[3])) == 0


@pytest.mark.parametrize("step", STEPS[3:])
def test_a_captured_step_has_the_losses_of_the_launched_one_and_kept_losses_break_nothing(step):
    losses = []
    for captured in (False, True):
        run = on_gpu(step, steps=12)
        train_step = run.capture(*run.batches[0]) if captured else run.train_step
        losses.append(torch.stack([*run.kept, *(train_step(*batch) for batch in run.batches[3:12])]))
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=0)


@pytest.mark.parametrize("step", STEPS)
def test_a_rehearsed_step_trains_from_the_initial_weights_and_fp8_learns_as_bf16(step):
    plain = built(STEPS[0], **GPU | {"amp_dtype": torch.float32}, steps=8, lr=1e-3)
    expected = torch.stack([plain.train_step(*batch) for batch in plain.batches[:8]])
    if step == STEPS[4] and (reason := fp8_reason()):
        pytest.skip(reason)
    run, row = built(step, **GPU, steps=8, warmup=3, lr=1e-3), Row(step)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    training = rehearsed(run, row)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert row.rehearsed == 10 and row.settings.captured == (True if step in STEPS[3:] else None)
    losses = torch.stack(trained(training, 8))
    assert losses.mean().item() == pytest.approx(expected.mean().item(), rel=0.005)


@pytest.mark.parametrize("step", STEPS)
def test_losses_fall_and_follow_the_baseline(step):
    def losses(name, dtype):
        run = built(name, **GPU | {"amp_dtype": dtype}, steps=20, lr=1e-3)
        return torch.stack([run.train_step(*batch).detach().clone() for batch in run.batches[:20]])

    if step == STEPS[4] and (reason := fp8_reason()):
        pytest.skip(reason)
    baseline, these = losses(STEPS[0], torch.float32), losses(step, torch.bfloat16)
    assert these[-1] < these[0] - 0.5
    assert these.mean().item() == pytest.approx(baseline.mean().item(), rel=0.03)
    assert ((these - baseline).abs() / baseline).median() < 0.03  # a single loss jumps


def test_a_sketch_of_a_large_gradient_is_the_same_each_time_and_close_to_it():
    generator = torch.Generator("cuda").manual_seed(0)
    a, noise = torch.randn(2, 2 * sampling.CHUNK + 5, device="cuda", generator=generator)
    b = a + 0.3 * noise
    sketches = [sampling.sketch(each).cpu().numpy() for each in (a, b, a)]
    assert (sketches[0] == sketches[2]).all()
    exact = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0).item()
    assert 1 - proof.cosine(*sketches[:2]) == pytest.approx(1 - exact, rel=0.3)


def test_scales_of_a_long_training_do_not_decide_whether_fp8_does_the_same_work():
    samples = []
    for step, launched in ((STEPS[0], 0), (STEPS[4], 1200)):
        if step == STEPS[4] and (reason := fp8_reason()):
            pytest.skip(reason)
        run = built(step, **GPU, lr=1e-3)
        initial = benchmark.InitialState(run.model, run.optimizer)
        for k in range(launched):  # more than the scales remember
            run.train_step(*run.batches[k % 4])
        parts = (run.train_step, run.batches[0], initial)
        samples.append(benchmark.sample_gradients(*parts, in_fp8=step == STEPS[4]))
    in_fp8 = Row(STEPS[4], settings=Settings(fp8_recipe="delayed"))
    compared = proof.compare(Row(STEPS[0]), samples[0], in_fp8, samples[1])
    assert proof.verdict(compared) == "agrees", f"{compared.weight} {compared.cosine}"


def test_te_weights_start_equal_and_its_first_gradients_are_counted():
    run = on_gpu(STEPS[4])
    plain_step = load_step(STEPS[3])
    with torch.device("cuda"):
        plain = GPT(CONFIG, plain_step.Block, plain_step.Head, 1337)
        fused = GPT(CONFIG, run.module.Block, run.module.Head, 1337)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fused.parameters(), strict=True))
    zeros = []
    for tokens, targets in run.args.batches()[:3]:
        with torch.autocast("cuda", torch.bfloat16), run.module.te.autocast():
            fused(tokens, targets).backward()
        zeros.append(sum(int((p.grad == 0).sum()) for p in fused.blocks.parameters()))
        fused.zero_grad()
    assert zeros[2] < zeros[0], "the first scale is 1, and small gradients round to zero"


@pytest.mark.parametrize("seed", range(4))
def test_fp8_block_is_close_to_the_plain_block(seed):
    te_step, plain_step = on_gpu(STEPS[4]).module, load_step(STEPS[3])
    torch.manual_seed(seed)
    with torch.device("cuda"):
        plain, fused = plain_step.Block(CONFIG), te_step.Block(CONFIG)
        x = torch.randn(4, CONFIG.seq_len, CONFIG.n_embd)
        toward = torch.randn_like(x)
    with torch.no_grad():
        for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
            a.copy_(b)

    def output_and_gradients(block, fp8):
        leaf = x.bfloat16().requires_grad_()
        block.zero_grad()
        with torch.autocast("cuda", torch.bfloat16), te_step.te.autocast(enabled=fp8):
            y = block(leaf)
        (y * toward).sum().backward()
        return [y.detach(), leaf.grad, *(p.grad for p in block.parameters())]

    expected = output_and_gradients(plain, fp8=False)
    for _ in range(3):  # delayed scaling learns its scales from earlier steps
        quantized = output_and_gradients(fused, fp8=True)
    exact = output_and_gradients(fused, fp8=False)

    def largest_error(computed):
        errors = [
            (a.float() - b.float()).norm() / a.float().norm() for a, b in zip(expected, computed, strict=True)
        ]
        return max(errors).item()

    # FP8's three digits of a product's inputs: 0.083 to 0.097 in four seeds. What a wrong block gives is far
    # above.
    with torch.no_grad():
        fused.attn.proj.weight.mul_(1.25)
    wrong = output_and_gradients(fused, fp8=True)
    assert largest_error(quantized) < 0.13 < 0.2 < largest_error(wrong)
    assert largest_error(exact) < 0.02


@pytest.mark.parametrize("step", STEPS)
def test_a_row_holds_what_the_gpu_did(step, tmp_path):
    if step == STEPS[4] and (reason := fp8_reason()):
        pytest.skip(reason)
    words = [word for word in FAST if word not in ("--device", "cpu")]
    shape = ["--n-embd", "256", "--n-head", "4", "--seq-len", "512"]
    ran = run_python(ROOT / f"{step}.py", *words, *shape, "--profile", "--output", tmp_path / "r.json")
    assert ran.returncode == 0, ran.stderr[-2000:]
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    profiled = row["profile"]
    categories = profiled["categories"]
    assert sum(categories.values()) + profiled["idle_ms"] == pytest.approx(
        max(sum(categories.values()), statistics.median(row["step_ms"])), rel=1e-3
    )
    assert categories["matrix products"] > 0 and categories["optimizer"] > 0 and categories["loss"] > 0
    assert categories["other"] < 0.03 * sum(categories.values())
    for half in ("forward", "backward"):
        assert profiled[half][0]["category"] == "attention"
    assert sum(row["step_ms"]) >= 2500 and sum(row["settling_ms"]) >= 6000
    assert row["overhead_s"] < 8 and row["settings"]["captured"] == (step in STEPS[3:])
    assert row["peak_bytes"] > 0 and len(row["product_ms"]) == 2
    if hardware.clock_and_power(torch.device("cuda", 0)):
        assert 50 < row["power_w"] < 1500 and 100 < row["clock_mhz"] < 3000


def test_roofs_are_measured_in_every_precision():
    args = arguments(STEPS[0], **GPU)
    measured = roofs.measure(args)
    for precision in ("fp32", "tf32", "bf16", *(["fp8"] if fp8_reason() is None else [])):
        assert 0 < measured.rate(precision) <= measured.rate(precision, burst=True), measured.notes
    assert measured.copy_bytes_per_s > 1e11 and 2e-6 < measured.launch_s < 2e-4
    assert {name for name, _, _ in measured.kernels} >= {"copy fp32", "gelu half"} and measured.attention


def break_a_capture():
    x = torch.ones(2, 2, device="cuda", requires_grad=True)
    assert host_syncs(lambda: (x[0, 0].item(), x[0, 0].item())) == 2

    def train_step(tokens, targets):
        return tokens.sum() * x.sum().item()

    batch = [torch.ones(2, 2, dtype=torch.int64, device="cuda")] * 2

    def capture(tokens, targets):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            train_step(tokens, targets)

    args = arguments(STEPS[3], **GPU)
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        pytest.raises(RuntimeError, match="cannot be captured, --no-capture"),
    ):
        benchmark.capture_step(capture, batch, args, Row("x"))


def test_a_host_sync_is_noticed_and_cannot_be_captured():
    # In a process of its own: it leaves a broken capture.
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    code += "import test_gpu; test_gpu.break_a_capture()"
    ended = run_python("-c", code, timeout=300)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("step", STEPS)
def test_too_large_a_batch_is_a_row_that_ran_out_of_memory(step):
    if step == STEPS[4] and (reason := fp8_reason()):
        pytest.skip(reason)
    args, row = arguments(step, **GPU, batch_size=2**16, steps=1), Row(step)
    args.batches = lambda: [[torch.zeros(2**16, 512, dtype=torch.int64, device="cuda")] * 2] * 3
    module = load_step(step)
    with pytest.raises(Exception) as caught:
        benchmark.measure_row(module.main, args, row)
    assert explain(caught.value)[0] == "oom"


OF_TWO = {**GPU, "batch_size": 2, "warmup": 11, "steps": 6}


def train_in_processes(output):
    """What each of torchrun's processes runs: steps 3 and 4, captured and launched; the first one writes the
    losses."""
    rank, results = int(os.environ["RANK"]), {}
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    place = {**OF_TWO, "device": device, "rank": rank, "processes": 2, "parallel": "ddp"}
    parallel.start(arguments(STEPS[3], **place))
    for step in STEPS[3:] if fp8_reason() is None else STEPS[3:4]:
        for capture in (True, False):
            run = built(step, capture=capture, **place)
            row = Row(step)
            training = rehearsed(run, row)
            assert (row.note is None) == capture == bool(row.settings.captured) and row.rehearsed == 11
            losses = [loss.item() for loss in trained(training, 6)]
            results[step, capture] = parallel.across(losses, "avg")
    if rank == 0:
        torch.save(results, output)
    os._exit(0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_captured_step_of_two_processes_trains_as_launched_and_as_one_process(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import test_gpu; "
    (tmp_path / "driver.py").write_text(f"{code}test_gpu.train_in_processes({str(tmp_path / 'losses')!r})")
    ran = run_python(*TORCHRUN, "--nproc-per-node", "2", tmp_path / "driver.py", timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for (step, _), losses in torch.load(tmp_path / "losses").items():
        run = built(step, capture=False, **OF_TWO | {"batch_size": 4})
        expected = [loss.item() for loss in trained(rehearsed(run, Row(step)), 6)]
        off = 0.02 if step == STEPS[4] else 0.01  # in FP8 each process has scales of its own half
        assert losses == pytest.approx(expected, rel=off), (step, losses, expected)
