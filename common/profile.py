"""What an untimed training step really ran, and where its time goes.

Steps run under torch.profiler after the timed ones. The category of a kernel follows from its name, see
CATEGORY_PATTERNS. Matrix products include the products of attention where it is written out by hand. Normalization and
pointwise is also what a compiler fused of these, with the casts that it fused in. Copies and casts include quantization
to FP8. Names that no rule knows are other.
"""

import math
import os
import re
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from common.hardware import synchronize
from common.record import CATEGORIES, Block, CategoryTime, Kernel, Launch, Profile, Settings
from common.text import say

COMPILED_GRAPH = "## Call CompiledFxGraph"  # what a CPU's trace calls a compiled graph
MATRIX_OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_linear_pointwise", "_mkl_linear")
DTYPES = {"c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32"}  # by the profiler's names
# Operator that is dispatched to -> the kernel family that runs.
ATTENTION_OPERATORS = {
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_cudnn_attention_forward": "cudnn",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash (CPU)",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_attention_math": "math",
    "FusedAttnFunc": "cudnn",  # Transformer Engine's
}
# Category -> what the names of its kernels contain. The first pattern that matches wins: the order is part of the rule.
CATEGORY_PATTERNS = {
    "communication": r"nccl|gloo|^c10d::|^FSDP::(all_gather|post_backward_reduce)\b",
    "optimizer": r"multi_tensor_apply(?!.*native::Copy<)|adam|triton_for_fused|_foreach_|Optimizer\.",
    "normalization and pointwise": r"layer_norm|LayerNorm|normalization::|GammaBeta|reduce_dbias"
    r"|^(?!nvjet|.*gemm).*gelu",
    "loss": r"nll_loss|log_softmax|LogSoftMax|cross_entropy|softmax_warp_\w+<[^<>]*\d+, true",
    "attention": r"sdpa|flash|fmha|attention|dot_do_o|convert_dq|SoftMax|softmax",
    "matrix products": r"gemm|nvjet|cutlass_\d+_(simt|tensorop|wmma)|xmma|splitKreduce|gemv|dot_kernel|cublas"
    r"|^aten::(mm|addmm|bmm|baddbmm|linear)$|mkldnn|_linear_pointwise|onednn|mkl_linear",
    "copies and casts": r"quantize_mxfp8|direct_copy|_copy_kernel|CatArray|FillFunctor|Memcpy|Memset"
    r"|^mem(cpy|set)\d+(_post)?$|delayed_scaling|fp8::detail::identity|native::Copy<|chunk_cat|split_with_sizes_copy"
    r"|transpose_\w*kernel|triton_poi_fused(_+(to_copy|t|cat|unsafe_view|view|transpose|clone|permute))+_\d+$"
    r"|^aten::(copy_|_to_copy|to|cat|fill_|zero_|clone|contiguous|zeros_like)$",
}
# What is left of PyTorch's, Triton's and Transformer Engine's own kernels is pointwise or a plain reduction.
POINTWISE = r"elementwise|reduce_kernel|triton_|transformer_engine::|at::native|cub::|CompiledF|^aten::|krn_partial"
# What the names of attention's backward kernels contain: of cuDNN, FlashAttention, CUTLASS, softmax by hand, a CPU.
BACKWARD = r"bprop|bwd|[Bb]ackward|cutlassB|dot_do_o|convert_dq"
OPTIMIZERS = {"_fused_adam": "fused", "_foreach_": "foreach"}  # by how their operators' names begin
KERNELS_KEPT = 40
WARM_MS = 500  # of steps before those that are profiled
SHORTEST_MS = 0.01  # of a CPU's operator in the timeline of a block


def categorize(name: str) -> str:
    """The category of a kernel, or of a CPU operator, by its name."""
    rest = "normalization and pointwise" if re.search(POINTWISE, name) else "other"
    return next((category for category, pattern in CATEGORY_PATTERNS.items() if re.search(pattern, name)), rest)


# --- what ran -------------------------------------------------------------------------------------


def observe(step: Callable[[], object], model: torch.nn.Module, device: torch.device) -> tuple[Settings, object]:
    """Run `step` once, launched, under torch.profiler: what its operators show, and the profiler. Raises what that
    raises."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()
        synchronize(device)
    operators, seen = set(), set()
    for event in profiler.profiler.kineto_results.events():
        name = event.name().rpartition("::")[2]
        operators.add(name)
        if name in MATRIX_OPERATORS or name in ATTENTION_OPERATORS:
            seen |= {DTYPES.get(dtype) for dtype in event.dtypes()}
    by_hand = "by hand" if operators & {"softmax", "_softmax"} else None
    algorithms = {name.partition("#")[2].partition(".")[0] for name in operators if name.startswith("Optimizer.")}
    how = [word for mark, word in OPTIMIZERS.items() if any(name.startswith(mark) for name in operators)]
    recipes = {name: recipe for name, module in model.named_modules() if (recipe := _fp8_recipe(module))}
    head = "FP8" if any(name.endswith("lm_head") for name in recipes) else "BF16"
    settings = Settings(
        amp_dtype=next((name for name in DTYPES.values() if name in seen), None),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
        attention_kernel=next((family for name, family in ATTENTION_OPERATORS.items() if name in operators), by_hand),
        compiled=any(name.startswith(("Torch-Compiled Region", COMPILED_GRAPH)) for name in operators),
        optimizer=", ".join([algorithms.pop(), *how[:1]]) if algorithms else None,
        fp8_recipe=next(iter(recipes.values()), None),
        head=head if recipes else None,
    )
    return settings, profiler


def _fp8_recipe(module: torch.nn.Module) -> str | None:
    """How a module of Transformer Engine or torchao multiplies FP8; None of any other."""
    if getattr(module, "fp8", False):
        return repr(module.fp8_meta.get("recipe"))
    return "torchao" if type(module).__name__ == "Float8Linear" else None


def count_host_syncs(work: Callable[[], object]) -> tuple[object, int]:
    """What `work` returns, and how often it makes the host wait for the GPU, by PyTorch's own sync debug mode."""
    if not torch.cuda.is_initialized():
        return work(), 0
    previous = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            found = work()
        finally:
            torch.cuda.set_sync_debug_mode(previous)
    return found, sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)


def write_memory_snapshot(step: Callable[[], object], path: Path) -> None:
    """What CUDA's allocator did in one launched step, for pytorch.org/memory_viz. Raises OSError, RuntimeError."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        step()
        write_by_rename(torch.cuda.memory._dump_snapshot, path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def write_by_rename(write: Callable[[str], object], path: Path) -> None:
    """Have a library write a file beside `path`, then rename it: never through a link, never half a file."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-") as folder:
        write(f"{folder}/{path.name}")
        os.replace(f"{folder}/{path.name}", path)


# --- where the time goes --------------------------------------------------------------------------


def profile_steps(step: Callable[[], object], n_steps: int, median_ms: float, device: torch.device) -> Profile:
    """The record's profile of `n_steps`, each of `median_ms` when timed. Raises what the profiler raises.

    The profiler slows the host, so its own gaps are not counted: idle is what the timed median leaves over. A GPU that
    waited is cooler and faster, so steps for WARM_MS run first. Raises RuntimeError where no kernel is in the trace.
    """
    if device.type == "cpu":
        return profile_cpu(step, n_steps)
    warm = math.ceil(WARM_MS / median_ms)
    schedule = torch.profiler.schedule(wait=0, warmup=warm, active=n_steps, repeat=1)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], schedule=schedule) as profiler:
        for k in range(warm + n_steps):
            step()
            if k in (warm - 1, warm + n_steps - 1):
                torch.cuda.synchronize(device)
            profiler.step()
    say(profiler.key_averages().table("self_device_time_total", row_limit=20), sys.stderr)
    launches = gpu_launches(profiler)
    if not launches:
        raise RuntimeError("the profiler shows no kernels")
    found = _per_step([(launch, launch.ms) for launch in launches], n_steps)
    exchange = found.categories["communication"]
    found.communication_ms = exchange.ms
    computing = [launch for launch in launches if launch.category != "communication"]
    exchange.ms = (_covered_ms(launches) - _covered_ms(computing)) / n_steps  # exposed: overlaps no other kernel
    busy_ms = sum(category.ms for category in found.categories.values())
    found.idle_ms = max(0.0, median_ms - busy_ms)
    found.step_ms = busy_ms + found.idle_ms
    found.block = one_block(launches, n_steps)
    return found


def gpu_launches(profiler: torch.profiler.profile) -> list[Launch]:
    """Every kernel, copy and fill that ran on the GPU, by its start, in ms since any moment."""
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    on_gpu = [event for event in events if not getattr(event, "is_user_annotation", False)]
    spans = sorted((e.time_range.start / 1e3, e.time_range.elapsed_us() / 1e3, e.name) for e in on_gpu)
    return [Launch(name, categorize(name), start_ms, ms) for start_ms, ms, name in spans]


def _covered_ms(launches: list[Launch]) -> float:
    """How long at least one of the kernels runs; they are in the order of their start."""
    covered, until = 0.0, 0.0
    for launch in launches:
        end = launch.start_ms + launch.ms
        covered += max(0.0, end - max(launch.start_ms, until))
        until = max(until, end)
    return covered


def profile_cpu(step: Callable[[], object], n_steps: int) -> Profile:
    """Like `profile_steps`, of a CPU: operators instead of kernels, each without the time of operators inside it."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(n_steps):
            step()
    say(profiler.key_averages().table("self_cpu_time_total", row_limit=20), sys.stderr)
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    updates = [event.time_range for event in events if event.name.startswith("Optimizer.step")]
    timed, drawn, until_us = [], [], 0.0
    for event in events:
        span, own_ms = event.time_range, event.self_cpu_time_total / 1e3
        inside = any(update.start < span.start and span.end <= update.end for update in updates)
        name = f"Optimizer.step: {event.name}" if inside else event.name
        launch = Launch(name, categorize(name), span.start / 1e3, event.cpu_time_total / 1e3)
        timed += [(launch, own_ms)] if own_ms > 0 else []
        if span.start >= until_us and 2 * own_ms >= launch.ms >= SHORTEST_MS:  # works itself, is no part of one drawn
            drawn.append(launch)
            until_us = span.end
    found = _per_step(timed, n_steps)
    found.block = one_block(drawn, n_steps)
    return found


def _per_step(timed: list[tuple[Launch, float]], n_steps: int) -> Profile:
    """The profile of `n_steps`, from every launch and the milliseconds that count of it."""
    kernels, categories = {}, {name: CategoryTime() for name in CATEGORIES}
    for launch, ms in timed:
        kernel = kernels.setdefault(launch.name, Kernel(launch.name, launch.category, 0.0, 0.0))
        for total in (kernel, categories[launch.category]):
            total.ms += ms / n_steps
            total.launches += 1 / n_steps
    longest = sorted(kernels.values(), key=lambda kernel: -kernel.ms)[:KERNELS_KEPT]
    total_ms = sum(category.ms for category in categories.values())
    return Profile(total_ms, None, categories, longest, len(timed) / n_steps)


def one_block(launches: list[Launch], n_steps: int) -> Block | None:
    """The last block of `n_steps` whose kernels are `launches`, by start, in ms since any moment.

    A block is what lies between the longest kernels of two consecutive attentions, the first of the two included: once
    in forward, once in backward. None where a step has fewer than two of either.
    """
    halves = []
    for backward in (False, True):
        total, attention = defaultdict(float), []
        for k, launch in enumerate(launches):
            if launch.category == "attention" and bool(re.search(BACKWARD, launch.name)) == backward:
                attention.append(k)
                total[launch.name] += launch.ms
        main = [k for k in attention if launches[k].name == max(total, key=total.get)]
        if len(main) < 2 * n_steps:
            return None
        begin, end = main[-2:]
        start_ms = launches[begin].start_ms
        halves.append([replace(launch, start_ms=launch.start_ms - start_ms) for launch in launches[begin:end]])
        halves.append(launches[end].start_ms - start_ms)
    return Block(*halves)
