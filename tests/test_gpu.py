"""What only a GPU can show: which kernels ran, that the host never waits, that FP8 is close, that a replay trains."""

import gc
import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import ROOT, STEPS, arguments, built, load_step, scratch
from test_parallel import TORCHRUN

from common import benchmark, cuda_graph, hardware, memory, parallel, passes, profile, roofs
from common.errors import Skip
from common.model import GPT, GPTConfig
from ladder import process, sweep

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
if CUDA:  # Transformer Engine may load a cuDNN of its own: before torch loads one, as in the script
    load_step(STEPS[4])
CONFIG = GPTConfig(n_layer=2, n_head=4, n_embd=256, seq_len=512, vocab_size=512)

GEMM = re.compile(r"gemm|nvjet|cutlass_\d+_(simt|tensorop|wmma)|xmma", re.IGNORECASE)
TENSOR_CORE = re.compile(r"nvjet|tensorop|wgmma|16816|1688|bf16|f16|tf32|hmma", re.IGNORECASE)
FP8_GEMM = re.compile(r"nvjet_sm\d+_q|gemm.*(e4m3|e5m2)", re.IGNORECASE)
FUSED_ATTENTION = re.compile(r"sdpa|flash|fmha", re.IGNORECASE)


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()  # each test loads the scripts anew: the compiler would give up on so many models


def fp8_reason():
    """Why FP8 cannot run here, or None."""
    try:
        available, reason = load_step(STEPS[4]).te.is_fp8_available(return_reason=True)
    except Skip as skip:
        return str(skip)
    return None if available else reason


def skip_without_fp8(step):
    if step == STEPS[4] and (reason := fp8_reason()):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def te_step():
    skip_without_fp8(STEPS[4])
    return load_step(STEPS[4])


def on_gpu(step, monkeypatch, **overrides):
    skip_without_fp8(step)
    device = torch.device("cuda", 0)
    dtype = hardware.resolve_amp_dtype("auto", device)[0]
    run = built(step, monkeypatch, **{"config": CONFIG, "device": device, "amp_dtype": dtype} | overrides)
    for batch in run.batches[:3]:  # compiled and autotuned
        run.train_step(*batch)
    return run


def traced(step, monkeypatch, **overrides):
    run = on_gpu(step, monkeypatch, **overrides)
    return profile.trace_step(lambda: run.train_step(*run.batches[3]), run.args.device)


@pytest.mark.parametrize("step", STEPS)
def test_products_attention_and_fused_kernels_are_those_the_step_says(step, monkeypatch):
    trace = traced(step, monkeypatch)
    names, found = [kernel["name"] for kernel in trace.kernels], profile.observed_settings(trace).attention_kernel
    gemms = {name for name in names if GEMM.search(name)}
    on_tensor_cores = {name for name in gemms if TENSOR_CORE.search(name)}
    assert gemms and on_tensor_cores == (set() if step == STEPS[0] else gemms)
    forward = [n for n in names if FUSED_ATTENTION.search(n) and not re.search("bprop|bwd|backward|dot_do_o|dq", n)]
    if step in STEPS[:2]:
        assert not forward and found == "by hand"
    else:
        assert len(forward) == CONFIG.n_layer
        assert found == ("cudnn" if torch.cuda.get_device_capability() >= (9, 0) else "flash")
    if step == STEPS[3]:
        compiled = " ".join(name for name in names if name.startswith("triton_"))
        assert "native_layer_norm" in compiled and "gelu" in compiled


def test_fp8_products_in_blocks_and_head(monkeypatch):
    gemms = [kernel for kernel in traced(STEPS[4], monkeypatch).kernels if FP8_GEMM.search(kernel["name"])]
    # Forward, input gradient and weight gradient of four matrices a block and of the head.
    assert len(gemms) >= 3 * (4 * CONFIG.n_layer + 1)


@pytest.mark.parametrize("step", STEPS)
def test_the_host_never_waits_launched_or_replayed(step, monkeypatch):
    run = on_gpu(step, monkeypatch)
    assert profile.count_host_syncs(lambda: run.train_step(*run.batches[3])) == 0
    if step in STEPS[3:]:
        run.train_step.record(*run.batches[0])
        assert profile.count_host_syncs(lambda: run.train_step(*run.batches[3])) == 0


@pytest.mark.parametrize("step", [STEPS[1], STEPS[3]])
def test_loss_scaling_waits_for_the_host(step, monkeypatch):
    run = on_gpu(step, monkeypatch, amp_dtype=torch.float16)
    waits = profile.count_host_syncs(lambda: run.train_step(*run.batches[3]))
    assert waits > 0, "the one exception, and it is counted"


@pytest.mark.parametrize("step", STEPS[3:])
def test_a_captured_step_has_the_losses_of_the_launched_one(step, monkeypatch):
    losses = []
    for captured in (False, True):
        run = on_gpu(step, monkeypatch, amp_dtype=torch.bfloat16, steps=12)
        if captured:
            run.train_step.record(*run.batches[0])
        losses.append(torch.stack([run.train_step(*batch).detach().clone() for batch in run.batches[3:12]]))
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=0)


@pytest.mark.parametrize("step", STEPS)
def test_the_heldout_loss_leaves_training_as_it_was(step, monkeypatch):
    losses = []
    for looks in (False, True):
        run = on_gpu(step, monkeypatch, amp_dtype=torch.bfloat16, steps=9)
        if step in STEPS[3:]:
            run.train_step.record(*run.batches[0])
        losses.append([run.train_step(*batch).item() for batch in run.batches[3:6]])
        heldout = benchmark.heldout_loss(run.model, run.args) if looks else None
        losses[-1] += [run.train_step(*batch).item() for batch in run.batches[6:9]]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert heldout == pytest.approx(losses[1][3], rel=0.2)


@pytest.mark.parametrize("step", STEPS[3:])
def test_a_captured_row_counts_the_memory_that_a_launched_one_needs(step, monkeypatch):
    peaks = []
    for captured in (True, False):
        run = on_gpu(step, monkeypatch, amp_dtype=torch.bfloat16)
        row = benchmark.run(run.train_step if captured else run.train_step.launch, run.model, run.args)
        assert row.settings.captured is captured
        peaks.append(row.peak_allocated_bytes)
    assert peaks[0] > 0.8 * peaks[1]


@pytest.mark.parametrize("step", STEPS)
def test_losses_fall_and_follow_the_baseline(step, monkeypatch):
    def losses(name):
        run = built(name, monkeypatch, config=CONFIG, device="cuda:0", amp_dtype=torch.bfloat16, steps=20)
        return torch.stack([run.train_step(*batch).detach().clone() for batch in run.batches[:20]])

    skip_without_fp8(step)
    baseline, these = losses(STEPS[0]), losses(step)
    assert these[-1] < these[0] - 0.5
    assert these.mean().item() == pytest.approx(baseline.mean().item(), rel=0.03)
    torch.testing.assert_close(these, baseline, rtol=0.15 if step == STEPS[4] else 0.03, atol=0)  # a single loss jumps


def test_te_weights_start_equal(te_step):
    plain_step = load_step(STEPS[3])
    with torch.device("cuda"):
        plain = GPT(CONFIG, plain_step.Block, plain_step.Head, 1337)
        fused = GPT(CONFIG, te_step.Block, te_step.Head, 1337)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fused.parameters(), strict=True))


def test_fp8_block_is_close_to_the_plain_block(te_step):
    plain_step = load_step(STEPS[3])
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
    for found, limit in ((quantized, 0.1), (exact, 0.02)):
        for one, other in zip(expected, found, strict=True):
            error = (one.float() - other.float()).norm() / one.float().norm()
            assert error < limit, f"{tuple(one.shape)}: relative error {error:.3f}"


@pytest.mark.parametrize("step", STEPS)
def test_a_profile_adds_up_and_knows_its_kernels(step, monkeypatch):
    run = on_gpu(step, monkeypatch)
    found = profile.profile_cuda(lambda: run.train_step(*run.batches[3]), 2, 10.0, run.args.device)
    categories = {name: time.ms for name, time in found.categories.items()}
    assert sum(categories.values()) + found.gpu_idle_ms == pytest.approx(found.step_ms, rel=1e-3)
    assert categories["matrix products"] > 0 and categories["optimizer"] > 0 and categories["loss"] > 0
    assert categories["other"] < 0.03 * found.gpu_busy_ms


def test_roofs_are_measured_in_every_precision():
    measured = roofs.measure({(1024, 1024, 1024): 1}, torch.device("cuda", 0))
    wanted = ["fp32", *(["tf32", "bf16"] if torch.cuda.get_device_capability() >= (8, 0) else [])]
    wanted += ["fp8"] if torch.cuda.get_device_capability() >= (8, 9) else []
    assert all(getattr(measured, f"{precision}_flops_per_s") for precision in wanted)
    assert measured.copy_bytes_per_s > 0 and measured.conditions["bf16"].clock_mhz > 0
    assert measured.square.bf16_flops_per_s <= measured.square.ceilings["bf16"]


def test_what_is_short_is_timed_as_a_graph_so_that_the_host_does_not_count(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setitem(passes.SIZES, "cuda", (2**18,))
    timed = passes.pass_times(device, partial(roofs.steady_seconds, device=device, for_s=2e-3))
    of = {one.kernel: one.seconds for one in timed if one.numbers in (2**18, 4 * 1024 * 64)}
    assert 1e-6 < of["copy fp32"] < of[f"{passes.FEW}, 64"] < 1e-3
    norms = [of[name] for name in of if name.startswith(passes.TE_NORM)]
    assert len(norms) == (len(passes.TE_WIDTHS) if find_spec("transformer_engine") else 0)
    assert all(of["layer norm fp32"] < seconds < 1e-4 for seconds in norms)
    launched = [one.seconds for one in timed if one.kernel == passes.LAUNCH_FP32]
    assert all(2e-6 < seconds < 2e-4 for seconds in [*launched, passes.launch_seconds(device)]) and len(launched) == 1


def test_a_process_that_measures_roofs_imports_transformer_engine_before_torch_loads_a_cudnn():
    if reason := fp8_reason():
        pytest.skip(reason)
    code = """
from functools import partial
import torch
from common import passes, roofs
passes.SIZES["cuda"], passes.LENGTHS, device = (2**18,), (256,), torch.device("cuda", 0)
timed = passes.pass_times(device, partial(roofs.steady_seconds, device=device, for_s=2e-3))
print(sorted(one.kernel for one in timed))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert all(f"{passes.TE_NORM}, {width}" in done.stdout for width in passes.TE_WIDTHS), done.stdout + done.stderr


def test_peak_memory_and_events_are_recorded(monkeypatch):
    run = on_gpu(STEPS[2], monkeypatch)
    row = benchmark.run(run.train_step, run.model, run.args)
    assert row.status == "ok" and len(row.timing.step_ms) == run.args.steps
    assert row.peak_allocated_bytes > 0
    assert row.host_syncs == 0
    assert row.gpu_state is None or row.gpu_state.sm_clock_mhz > 0
    assert row.timing.settling_s > 1 and min(row.reference_ms.product_ms + row.reference_ms.copy_ms) > 0
    if hardware.nvml_value(run.args.device, "TotalEnergyConsumption"):
        assert 50 < row.power_w < 1500 and 100 < row.clock_mhz < 3000 and row.tokens_per_joule > 0


def break_a_capture():
    x = torch.ones(2, 2, device="cuda", requires_grad=True)
    assert profile.count_host_syncs(lambda: (x[0, 0].item(), x[0, 0].item())) == 2

    def train_step(tokens, targets):
        scale = x.sum().item()
        return tokens.sum() * scale

    batch = [torch.ones(2, 2, dtype=torch.int64, device="cuda")] * 2
    step = cuda_graph.CapturedStep(train_step, torch.optim.SGD([x], lr=1.0), None)
    with pytest.raises(cuda_graph.CaptureError, match=r"scale = x\.sum\(\)\.item\(\)") as caught:
        step.record(*batch)
    assert "\n" not in str(caught.value) and step.graph is None


def test_a_host_sync_is_noticed_and_cannot_be_captured():  # in a process of its own: it leaves a broken capture
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import test_gpu; test_gpu.break_a_capture()"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("step", STEPS[2:])
def test_recomputed_blocks_train_as_kept_ones(step, monkeypatch):
    def losses(checkpoint):
        run = on_gpu(step, monkeypatch, checkpoint=checkpoint)
        assert parallel.is_checkpointed(run.model) is checkpoint
        return [run.train_step(*batch).item() for batch in run.batches[3:6]]

    assert losses(True) == pytest.approx(losses(False), rel=0.01)


OF_TWO = {"config": CONFIG, "batch_size": 2, "warmup": 11, "steps": 6}


def train_in_processes(output):
    """What each of torchrun's processes runs: steps 3 and 4, captured and launched; the first one writes the losses."""
    scratch.append(Path(output).parent)
    world, results = hardware.world(), {}
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    given = {"device": device, "amp_dtype": torch.bfloat16, "world": world, "parallel": "ddp", **OF_TWO}
    parallel.start(arguments(STEPS[3], **given))
    for step in STEPS[3:] if fp8_reason() is None else STEPS[3:4]:
        for capture in (True, False):
            run = built(step, pytest.MonkeyPatch(), capture=capture, **given)
            assert (run.train_step.reason is None) == capture
            losses = [run.train_step(*batch).item() for batch in run.batches[: run.args.warmup]]
            if capture:
                run.train_step.record(*run.batches[0])
            losses += [run.train_step(*batch).item() for batch in run.batches[run.args.warmup : -1]]
            results[step, capture] = parallel.mean(losses, run.args)
            run.train_step.release()
    if world.rank == 0:
        torch.save(results, output)
    parallel.leave(0, run.args)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_captured_step_of_two_processes_trains_as_launched_and_as_one_process(tmp_path, monkeypatch):
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import test_gpu; "
    (tmp_path / "driver.py").write_text(f"{code}test_gpu.train_in_processes({str(tmp_path / 'losses')!r})")
    command = [*TORCHRUN, "--nproc-per-node", "2", str(tmp_path / "driver.py")]
    ran = subprocess.run(command, env=os.environ, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for (step, _), losses in torch.load(tmp_path / "losses").items():
        one = OF_TWO | {"batch_size": 4, "device": torch.device("cuda", 0), "amp_dtype": torch.bfloat16}
        run = built(step, monkeypatch, capture=False, **one)
        expected = [run.train_step(*batch).item() for batch in run.batches[:-1]]
        assert losses == pytest.approx(expected, rel=0.01), (step, losses, expected)


@pytest.mark.parametrize("step", [STEPS[0], *STEPS[3:]])
def test_after_a_shape_without_memory_the_next_one_trains_as_alone(step, tmp_path):
    skip_without_fp8(step)
    shape = ["--n-layer", "2", "--n-head", "4", "--n-embd", "256", "--seq-len", "256", "--vocab-size", "1024"]
    words = [*shape, "--warmup", "2", "--steps", "3", "--quick"]

    def rows(place, *batches):
        todo = []
        for batch in batches:
            output = str(tmp_path / place / f"{batch}.json")
            todo.append(
                {"name": str(batch), "words": [*words, "--batch-size", str(batch)], "output": output, "seconds": 0}
            )
        sweep.run_cells(ROOT / f"{step}.py", todo, tmp_path / f"{place}.log", 300, process.Stop(), {})
        return [json.loads(Path(cell["output"]).read_text())["steps"][0] for cell in todo]

    first, without, after = rows("all", 4, 2**17, 8)
    (alone,) = rows("alone", 8)
    assert [row["status"] for row in (first, without, after, alone)] == ["ok", "oom", "ok", "ok"]
    assert after["loss"] == pytest.approx(alone["loss"], rel=0.01)
    assert after["peak_allocated_bytes"] == pytest.approx(alone["peak_allocated_bytes"], rel=0.1)
    assert after["settings"]["captured"] == (step in STEPS[3:]) and after["gpu_state"]


@pytest.mark.parametrize("step", STEPS)
def test_memory_over_a_launched_step_adds_up_to_the_allocators_peak(step, monkeypatch):
    gc.collect()  # optimizers of earlier tests
    run = on_gpu(step, monkeypatch)
    launch, weights = getattr(run.train_step, "launch", run.train_step), list(run.model.parameters())
    of_weights = sum(weight.numel() * weight.element_size() for weight in weights)
    torch.cuda.reset_peak_memory_stats()
    use = memory.trace_memory(lambda: launch(*run.batches[-1]), run.model, run.args.device)
    assert use.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.02)
    assert use.bytes["parameters"][0] == pytest.approx(of_weights, rel=0.02)
    assert use.bytes["optimizer"][0] == pytest.approx(2 * of_weights, rel=0.02)
    assert max(use.bytes["gradients"]) == pytest.approx(of_weights, rel=0.1)
    assert max(use.bytes["activations"]) > 0 and 0 < use.backward_ms < use.optimizer_ms


@pytest.mark.parametrize("step", STEPS)
def test_the_profile_of_a_gpu_holds_a_block_with_attention_and_products(step, monkeypatch):
    run = on_gpu(step, monkeypatch)
    found = profile.profile_cuda(lambda: run.train_step(*run.batches[-1]), 2, 1.0, run.args.device).block
    for half, ms in ((found.forward, found.forward_ms), (found.backward, found.backward_ms)):
        assert half[0].category == "attention" and half[-1].start_ms < ms
        assert "matrix products" in {launch.category for launch in half}
