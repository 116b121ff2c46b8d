"""Where the time of a step goes: categories by name, the GPU's timeline, what binds."""

import gzip
import json

import pytest
import torch
from conftest import ROOT, STEPS, built

from common import profile

RECORDS = sorted((ROOT / "docs" / "results").glob("*/*/results*.json"))
CATEGORIES = {
    "nvjet_sm90_qqtsq_192x128_128x5_1x2_h_bz_coopA_geluauxbias_auxt_TNN": "matrix products",
    "void transformer_engine::unary_kernel<&(float transformer_engine::gelu<float>)>": "normalization and pointwise",
    "triton_per_fused_add_native_layer_norm_backward_nll_loss_forward_3": "normalization and pointwise",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26": "attention",
    "void cunn_SoftMaxForward<8, float, at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>": "loss",
    "triton_poi_fused_cat_transpose_view_9": "copies and casts",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "void multi_tensor_apply_kernel<CopyFunctor<c10::BFloat16, float>, at::native::Copy<float>>": "copies and casts",
    "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>": "copies and casts",
    "at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**)": "copies and casts",
    "void transformer_engine::unary_kernel<&transformer_engine::dispatch::fp8::detail::identity>": "copies and casts",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "communication",
    "memcpy128": "copies and casts",
    "memset32": "copies and casts",
    "memcpy32_post": "copies and casts",
    "somebodys_new_kernel": "other",
}


def test_a_kernel_has_the_category_its_name_says():
    assert {name: profile.categorize(name) for name in CATEGORIES} == CATEGORIES


def test_recorded_profiles_add_up_and_leave_little_unknown():
    records = [json.loads(path.read_text()) for path in RECORDS]
    steps, peers = ([row["profile"] for run in records for row in run[kind]] for kind in ("steps", "peers"))
    for found in filter(None, [*steps, *peers]):
        categories = {name: value["ms"] for name, value in found["categories"].items()}
        assert sum(categories.values()) + (found["gpu_idle_ms"] or 0.0) == pytest.approx(found["step_ms"], rel=1e-3)
        recorded = {kernel["name"]: kernel["category"] for kernel in found["kernels"]}
        assert all(known in (profile.categorize(name), "other") for name, known in recorded.items()), "or not yet known"
        on_gpu = found["gpu_idle_ms"] is not None  # a CPU's operators hold what the backward engine frees
        assert found in peers or not on_gpu or categories["other"] < 0.03 * found["step_ms"]


def event(name, ts, dur, **args):
    return {"name": name, "ts": ts, "dur": dur, "args": args}


def marker(ts):
    return event("Memcpy DtoD (Device -> Device)", ts, 1, bytes=profile.MARKER_BYTES)


def test_idle_and_overlap_are_counted_once():
    steps = [
        event("before", 0, 50), marker(50),  # the step: 51 to 151
        event("gemm", 51, 40), event("sdpa", 71, 40), event("Memset", 80, 5), event("gemm", 131, 10), marker(151),
        event("between", 160, 100), marker(300),  # 301 to 401
        event("gemm", 301, 50), event("layer_norm", 360, 20), marker(401),
    ]  # fmt: skip
    found = profile.summarize_timeline(steps, 2)
    ms = {name: value.ms for name, value in found.categories.items() if value.launches}
    expected = {"matrix products": 0.05, "attention": 0.01, "normalization and pointwise": 0.01, "copies and casts": 0}
    assert ms == pytest.approx(expected) and found.step_ms == pytest.approx(0.1) and found.kernels_per_step == 3
    assert found.gpu_busy_ms == pytest.approx(0.07) and found.gpu_idle_ms == pytest.approx(0.03)
    with pytest.raises(ValueError, match="lost work: 1 of 2 markers"):
        profile.summarize_timeline([marker(0), event("gemm", 1, 1)], 1)


def test_communication_counts_where_it_overlaps_no_other_kernel():
    all_reduce = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    kernels = [event(all_reduce, 11, 50), event("gemm", 21, 20), event("gemm", 51, 30), event(all_reduce, 81, 10)]
    found = profile.summarize_timeline([marker(0), *kernels, marker(101)], 1)
    assert found.categories["communication"].ms == pytest.approx(0.03) and found.gpu_idle_ms == pytest.approx(0.02)
    assert found.categories["matrix products"].ms == pytest.approx(0.05) and found.communication_ms == 0.06
    assert profile.bound_by(found)[1]["communication"] == pytest.approx(0.3)


def test_what_binds_is_the_largest_share_and_softmax_by_hand_is_no_arithmetic():
    for first, ms, norm, binds in (
        ("gemm", 60, 20, "compute"),
        ("gemm", 20, 60, "memory"),
        ("gemm", 20, 20, "launch"),
        ("cunn_SoftMaxForward", 60, 1, "memory"),
    ):
        timeline = [marker(0), event(first, 1, ms * 1e3), event("layer_norm", 1 + ms * 1e3, norm * 1e3), marker(9e4)]
        name, shares = profile.bound_by(profile.summarize_timeline(timeline, 1))
        assert name == binds and sum(shares.values()) == pytest.approx(1)


def test_fused_attention_has_fewer_autograd_nodes(monkeypatch):
    nodes = {}
    for step in (STEPS[0], STEPS[2]):
        run = built(step, monkeypatch)
        nodes[step] = profile.attention_autograd_nodes(run.model, lambda run=run: run.train_step(*run.batches[0]))
    assert nodes[STEPS[0]] > nodes[STEPS[2]] > 1
    assert profile.attention_autograd_nodes(torch.compile(run.model), lambda: None) == 1, "one node for everything"


def test_a_cpu_profile_keeps_the_optimizers_operators_apart_and_says_nothing_of_a_gpu(tmp_path):
    weights = [torch.ones(64, requires_grad=True) for _ in range(3)]
    optimizer, square = torch.optim.AdamW(weights), torch.ones(64, 64)

    def step():
        for weight in weights:
            weight.grad = weight.detach() * 2
        optimizer.step()
        return square @ square

    found = profile.profile_cpu(step, 2)
    categories = {kernel.name: kernel.category for kernel in found.kernels}
    assert found.categories["optimizer"].launches > 10 and found.categories["matrix products"].launches >= 1
    assert categories["aten::mul"] == "normalization and pointwise" and found.gpu_busy_ms is None
    assert categories["Optimizer.step: aten::mul_"] == "optimizer"
    assert sum(time.ms for time in found.categories.values()) == pytest.approx(found.step_ms)
    assert "matrix products" in profile.kernel_table(found)
    profile.write_chrome_trace(profile.trace_step(step, torch.device("cpu")), tmp_path / "x.json.gz")
    with gzip.open(tmp_path / "x.json.gz", "rt") as file:
        assert any(event.get("name") == "aten::mm" for event in json.load(file)["traceEvents"])
