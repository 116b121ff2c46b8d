"""What an untimed training step really ran, and where its time goes.

Steps run under torch.profiler after the timed ones. The category of a kernel follows from its name, see
CATEGORY_PATTERNS. Matrix products include the products of attention where it is written out by hand.
Normalization and pointwise is also what a compiler fused of these, with the casts that it fused in. Copies
and casts include quantization to FP8. Names that no rule knows are other.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity

from common.record import CATEGORIES, Kernel, Profile, Settings
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
# Category -> what the names of its kernels contain. The first pattern that matches wins: the order is part of
# the rule.
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
POINTWISE = (
    r"elementwise|reduce_kernel|triton_|transformer_engine::|at::native|cub::|CompiledF|^aten::|krn_partial"
)
# What the names of attention's backward kernels contain: of cuDNN, FlashAttention, CUTLASS, softmax by hand,
# a CPU.
BACKWARD = r"bprop|bwd|[Bb]ackward|cutlassB|dot_do_o|convert_dq"
OPTIMIZERS = {"_fused_adam": "fused", "_foreach_": "foreach"}  # by how their operators' names begin
PROFILED_STEPS, LONG_STEP_MS, KERNELS_KEPT = 3, 1000, 40
WARM_MS, MOST_WARM = 500, 50  # of steps before those that are profiled
SHORTEST_MS = 0.01  # of a CPU's operator in the timeline of a block


def categorize(name: str) -> str:
    """The category of a kernel, or of a CPU operator, by its name."""
    rest = "normalization and pointwise" if re.search(POINTWISE, name) else "other"
    return next(
        (category for category, pattern in CATEGORY_PATTERNS.items() if re.search(pattern, name)), rest
    )


def observe(step: Callable[[], object], model: torch.nn.Module, device: torch.device) -> Settings:
    """Run `step` once, launched, under torch.profiler: what its operators show. Raises what the profiler
    raises."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()
        torch.get_device_module(device).synchronize()
    operators, seen = set(), set()
    for event in profiler.profiler.kineto_results.events():
        name = event.name().rpartition("::")[2]
        operators.add(name)
        if name in MATRIX_OPERATORS or name in ATTENTION_OPERATORS:
            seen |= {DTYPES.get(dtype) for dtype in event.dtypes()}
    by_hand = "by hand" if operators & {"softmax", "_softmax"} else None
    algorithms = {
        name.partition("#")[2].partition(".")[0] for name in operators if name.startswith("Optimizer.")
    }
    how = [word for mark, word in OPTIMIZERS.items() if any(name.startswith(mark) for name in operators)]
    recipes = {name: recipe for name, module in model.named_modules() if (recipe := _fp8_recipe(module))}
    head = "FP8" if any(name.endswith("lm_head") for name in recipes) else "BF16"
    return Settings(
        amp_dtype=next((name for name in DTYPES.values() if name in seen), None),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
        attention_kernel=next(
            (family for name, family in ATTENTION_OPERATORS.items() if name in operators), by_hand
        ),
        compiled=any(name.startswith(("Torch-Compiled Region", COMPILED_GRAPH)) for name in operators),
        optimizer=", ".join([algorithms.pop(), *how[:1]]) if algorithms else None,
        fp8_recipe=next(iter(recipes.values()), None),
        head=head if recipes else None,
    )


def _fp8_recipe(module: torch.nn.Module) -> str | None:
    """How a module of Transformer Engine or torchao multiplies FP8; None of any other."""
    if getattr(module, "fp8", False):
        return repr(module.fp8_meta.get("recipe"))
    return "torchao" if type(module).__name__ == "Float8Linear" else None


def profile_steps(step: Callable[[], object], median_ms: float, device: torch.device) -> Profile:
    """The record's profile of a step that took `median_ms` when timed. Raises RuntimeError where it shows no
    kernels.

    The profiler slows the host, so its own gaps are not counted: idle is what the timed median leaves over. A
    GPU that waited is cooler and faster, so steps for WARM_MS run first.
    """
    n_steps = 1 if median_ms > LONG_STEP_MS else PROFILED_STEPS
    on_gpu, warm = device.type == "cuda", min(math.ceil(WARM_MS / median_ms), MOST_WARM)
    schedule = torch.profiler.schedule(wait=0, warmup=warm, active=n_steps, repeat=1)
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
        for k in range(warm + n_steps):
            step()
            if k in (warm - 1, warm + n_steps - 1):
                torch.get_device_module(device).synchronize()
            profiler.step()
    own = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    say(profiler.key_averages().table(own, row_limit=20), sys.stderr)
    launches = launches_of(profiler, on_gpu)
    if not launches:
        raise RuntimeError("the profiler shows no kernels")
    kernels, categories = {}, dict.fromkeys(CATEGORIES, 0.0)
    for one in launches:
        kernel = kernels.setdefault(one.name, Kernel(one.name, one.category, 0.0, 0.0))
        kernel.ms, kernel.launches = kernel.ms + one.ms / n_steps, kernel.launches + 1 / n_steps
        categories[one.category] += one.ms / n_steps
    communication_ms = categories["communication"]
    if on_gpu:  # exposed: overlaps no other kernel
        computing = [one for one in launches if one.category != "communication"]
        categories["communication"] = (_covered_ms(launches) - _covered_ms(computing)) / n_steps
    busy_ms = sum(categories.values())
    idle_ms = max(0.0, median_ms - busy_ms) if on_gpu else None
    longest = sorted(kernels.values(), key=lambda kernel: -kernel.ms)[:KERNELS_KEPT]
    found = Profile(idle_ms, categories, longest, len(launches) / n_steps, communication_ms)
    found.forward, found.backward = one_block(
        [one for one in launches if on_gpu or one.ms >= SHORTEST_MS], n_steps
    )
    return found


def launches_of(profiler: torch.profiler.profile, on_gpu: bool) -> list[Kernel]:
    """By start, every kernel, copy and fill of a GPU; or every operator of a CPU, with the time that it
    spends itself. Operators in an optimizer's step carry its name."""
    found, update_ends = [], 0.0
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        name, ms = event.name, event.self_cpu_time_total / 1e3
        if on_gpu:
            is_kernel = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
            ms = event.time_range.elapsed_us() / 1e3 * is_kernel
        elif name.startswith("Optimizer.step"):
            update_ends = event.time_range.end
        elif event.time_range.end <= update_ends:
            name = f"Optimizer.step: {name}"
        if ms > 0:
            found.append(Kernel(name, categorize(name), ms, start_ms=event.time_range.start / 1e3))
    return found


def _covered_ms(launches: list[Kernel]) -> float:
    """How long at least one of the kernels runs; they are in the order of their start."""
    covered, until = 0.0, 0.0
    for one in launches:
        end = one.start_ms + one.ms
        covered += max(0.0, end - max(one.start_ms, until))
        until = max(until, end)
    return covered


def one_block(launches: list[Kernel], n_steps: int) -> tuple[list[Kernel], list[Kernel]]:
    """Forward and backward of the last block of `n_steps` whose kernels are `launches`, by start.

    A block is what lies between the longest kernels of two consecutive attentions, the first of the two
    included. Both are empty where a step has fewer than two of either.
    """
    halves = []
    for backward in (False, True):
        of_half = [one for one in launches if bool(re.search(BACKWARD, one.name)) == backward]
        attention, total = [one for one in of_half if one.category == "attention"], Counter()
        for one in attention:
            total[one.name] += one.ms
        starts = [one.start_ms for one in attention if one.name == max(total, key=total.get)]
        if len(starts) < 2 * n_steps:
            return [], []
        first, end = starts[-2:]
        halves.append(
            [replace(one, start_ms=one.start_ms - first) for one in launches if first <= one.start_ms < end]
        )
    return tuple(halves)
