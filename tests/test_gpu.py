"""What only a GPU can show: which kernels ran, that the host never waits, and that FP8 is close."""

import re
import warnings

import pytest
import torch
from conftest import STEPS, built, load_step

from common import benchmark, hardware, profile, roofs
from common.model import GPT, GPTConfig

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
if CUDA:  # Transformer Engine may load a cuDNN of its own: before torch loads one, as in the script
    load_step(STEPS[4])
CONFIG = GPTConfig(n_layer=2, n_head=4, n_embd=256, seq_len=512, vocab_size=512)

GEMM = re.compile(r"gemm|nvjet|cutlass_\d+_(simt|tensorop|wmma)|xmma", re.IGNORECASE)
TENSOR_CORE = re.compile(r"nvjet|tensorop|wgmma|16816|1688|bf16|f16|tf32|hmma", re.IGNORECASE)
FP8_GEMM = re.compile(r"nvjet_sm\d+_q|gemm.*(e4m3|e5m2)", re.IGNORECASE)
FUSED_ATTENTION = re.compile(r"sdpa|flash|fmha", re.IGNORECASE)


def fp8_reason():
    """Why FP8 cannot run here, or None."""
    module = load_step(STEPS[4])
    if module.te is None:
        return f"needs Transformer Engine: {module.te_error}"
    available, reason = module.te.is_fp8_available(return_reason=True)
    return None if available else reason


@pytest.fixture(scope="module")
def te_step():
    if reason := fp8_reason():
        pytest.skip(reason)
    return load_step(STEPS[4])


def on_gpu(step, monkeypatch, **overrides):
    if step == STEPS[4] and (reason := fp8_reason()):
        pytest.skip(reason)
    device = torch.device("cuda", 0)
    dtype = hardware.resolve_amp_dtype("auto", device)[0]
    overrides = {"config": CONFIG, "device": device, "amp_dtype": dtype} | overrides
    run = built(step, monkeypatch, **overrides)
    for batch in run.batches[:3]:  # compiled and autotuned
        run.train_step(*batch)
    return run


def traced(step, monkeypatch, **overrides):
    run = on_gpu(step, monkeypatch, **overrides)
    return profile.trace_step(lambda: run.train_step(*run.batches[3]), run.args.device)


@pytest.mark.parametrize("step", STEPS)
def test_matrix_products_run_where_the_step_says(step, monkeypatch):
    gemms = {name for name in traced(step, monkeypatch).kernel_names() if GEMM.search(name)}
    assert gemms
    on_tensor_cores = {name for name in gemms if TENSOR_CORE.search(name)}
    assert on_tensor_cores == (set() if step == STEPS[0] else gemms)


@pytest.mark.parametrize("step", STEPS)
def test_attention_is_fused_from_step_2_on(step, monkeypatch):
    trace = traced(step, monkeypatch)
    names = trace.kernel_names()
    forward = [n for n in names if FUSED_ATTENTION.search(n) and not re.search("bprop|bwd|backward|dot_do_o|dq", n)]
    settings = profile.observed_settings(trace)
    if step in STEPS[:2]:
        assert not forward and settings.attention_kernel == "by hand"
    else:
        assert len(forward) == CONFIG.n_layer
        expected = "cudnn" if torch.cuda.get_device_capability() >= (9, 0) else "flash"
        assert settings.attention_kernel == expected


def test_compiled_kernels_fuse_normalization_and_gelu(monkeypatch):
    names = " ".join(name for name in traced(STEPS[3], monkeypatch).kernel_names() if name.startswith("triton_"))
    assert "native_layer_norm" in names and "gelu" in names


def test_fp8_products_in_blocks_and_head(monkeypatch):
    gemms = [name for name in traced(STEPS[4], monkeypatch).kernel_names() if FP8_GEMM.search(name)]
    # Forward, input gradient and weight gradient of four matrices a block and of the head.
    assert len(gemms) >= 3 * (4 * CONFIG.n_layer + 1)
    if torch.cuda.get_device_capability() == (9, 0):
        assert sum("gelu" in name for name in gemms) == CONFIG.n_layer, "GELU is computed inside its product"


@pytest.mark.parametrize("step", STEPS)
def test_the_host_never_waits(step, monkeypatch):
    run = on_gpu(step, monkeypatch)
    assert profile.count_host_syncs(lambda: run.train_step(*run.batches[3])) == 0


@pytest.mark.parametrize("step", [STEPS[1], STEPS[3]])
def test_loss_scaling_waits_for_the_host(step, monkeypatch):
    run = on_gpu(step, monkeypatch, amp_dtype=torch.float16)
    waits = profile.count_host_syncs(lambda: run.train_step(*run.batches[3]))
    assert waits > 0, "the one exception, and it is counted"


def test_a_host_sync_is_noticed():
    x = torch.ones(1, device="cuda")
    with warnings.catch_warnings():
        assert profile.count_host_syncs(lambda: (x.item(), x.item())) == 2


@pytest.mark.parametrize("step", STEPS)
def test_losses_fall_and_follow_the_baseline(step, monkeypatch):
    def losses(name):
        run = built(name, monkeypatch, config=CONFIG, device="cuda:0", amp_dtype=torch.bfloat16, steps=20)
        return torch.stack([run.train_step(*batch).detach().clone() for batch in run.batches[:20]])

    if step == STEPS[4] and (reason := fp8_reason()):
        pytest.skip(reason)
    baseline, these = losses(STEPS[0]), losses(step)
    assert these[-1] < these[0] - 0.5
    torch.testing.assert_close(these, baseline, rtol=0.03, atol=0)


def test_te_weights_start_equal(te_step):
    plain_step = load_step(STEPS[3])
    with torch.device("cuda"):
        plain = GPT(CONFIG, plain_step.Block, plain_step.Head, 1337)
        fused = GPT(CONFIG, te_step.Block, te_step.Head, 1337)
    pairs = list(zip(plain.parameters(), fused.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)


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
        recipe = te_step.DelayedScaling()
        with torch.autocast("cuda", torch.bfloat16), te_step.te.autocast(enabled=fp8, recipe=recipe):
            y = block(leaf)
        (y * toward).sum().backward()
        return [y.detach(), leaf.grad, *(p.grad for p in block.parameters())]

    expected = output_and_gradients(plain, fp8=False)
    for _ in range(3):  # delayed scaling learns its scales from earlier steps
        quantized = output_and_gradients(fused, fp8=True)
    for one, other in zip(expected, quantized, strict=True):
        error = (one.float() - other.float()).norm() / one.float().norm()
        assert error < 0.1, f"{tuple(one.shape)}: relative error {error:.3f}"
    exact = output_and_gradients(fused, fp8=False)
    for one, other in zip(expected, exact, strict=True):
        error = (one.float() - other.float()).norm() / one.float().norm()
        assert error < 0.02, f"without FP8, {tuple(one.shape)}: relative error {error:.3f}"


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
    assert measured.copy_bytes_per_s > 0


def test_peak_memory_and_events_are_recorded(monkeypatch):
    run = on_gpu(STEPS[2], monkeypatch)
    row = benchmark.run(run.train_step, run.model, run.args)
    assert row.status == "ok" and len(row.timing.step_ms) == run.args.steps
    assert row.peak_reserved_bytes >= row.peak_allocated_bytes > 0
    assert row.host_syncs == 0
    assert row.gpu_state is None or row.gpu_state.sm_clock_mhz > 0
