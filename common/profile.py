"""What an untimed training step really ran, and where its time goes.

Steps run under torch.profiler after the timed ones. The category of a kernel follows from its name, see
CATEGORY_PATTERNS. Matrix products include those of attention where it is written out by hand. Normalization and
pointwise is also what a compiler fused of these, with the casts that it fused in; a CPU's compiled AdamW is among them,
as its compiled regions have no names. Copies and casts include quantization to FP8. Names that no rule knows are other.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from common.block import one_block
from common.hardware import synchronize
from common.record import CATEGORIES, CategoryTime, Kernel, Profile, Settings
from common.text import aligned
from common.traced import Launch

COMPILED_GRAPH = "## Call CompiledFxGraph"  # what a CPU's trace calls a compiled graph
MATRIX_OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_linear_pointwise", "_mkl_linear", "convolution")

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
COMPUTE = ("matrix products", "attention")
MARKER_BYTES = 4093  # copies of this size begin and end a profiled step on the GPU's timeline
# Work that keeps the GPU busy while the host launches a step. It has few launches: the driver's queue is finite.
FILLER_SHAPE = (8192, 65536)  # of a matrix that is multiplied with its transpose
FILLER_PASSES = 36  # over that matrix after each product, for memory traffic
SHORTEST_US = 10  # of a CPU's operator that is drawn
LAUNCH_MARGIN_MS = 50  # the profiler's buffers grow while it records: a later step can take the host longer


@dataclass(frozen=True)
class Trace:
    """One profiled step: Chrome trace events of the operators, and of the GPU kernels."""

    operators: list[dict]
    kernels: list[dict]
    chrome: str  # the whole trace, as text

    def operator_names(self) -> set[str]:
        """Without namespace: `aten::mm` is `mm`."""
        return {event["name"].rpartition("::")[2] for event in self.operators}


def trace_step(step: Callable[[], object], device: torch.device) -> Trace:
    """Run `step` once under torch.profiler. Raises what the profiler raises."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()
        synchronize(device)
    text, by_kind = chrome_trace(profiler)
    return Trace(by_kind["cpu_op"] + by_kind["user_annotation"], by_kind["kernel"], text)


def chrome_trace(profiler: torch.profiler.profile) -> tuple[str, dict[str, list[dict]]]:
    """The Chrome trace as text, and its events by their kind (`cat`)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_text(errors="replace")  # kernel names may hold bytes that are not UTF-8
    by_kind: dict[str, list[dict]] = defaultdict(list)
    for event in json.loads(text, strict=False)["traceEvents"]:
        by_kind[event.get("cat", "")].append(event)
    return text, by_kind


def write_chrome_trace(trace: Trace, path: Path) -> None:
    """For chrome://tracing and ui.perfetto.dev, which read it compressed. Raises OSError."""
    with gzip.open(path, "wt", compresslevel=5) as file:
        file.write(trace.chrome)


def observed_settings(trace: Trace) -> Settings:
    """What a profiled step shows: dtypes, attention, compiler, optimizer."""
    names = trace.operator_names()
    return Settings(
        amp_dtype=_matrix_dtype(trace),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
        attention_kernel=attention_kernel(names),
        compiled=any(name.startswith(("Torch-Compiled Region", COMPILED_GRAPH)) for name in names),
        optimizer=_optimizer(names),
    )


def _matrix_dtype(trace: Trace) -> str | None:
    """The narrowest dtype that PyTorch's own matrix products and any fused attention took."""
    chrome_names = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}
    seen = set()
    for event in trace.operators:
        name = event["name"].rpartition("::")[2]
        if name in MATRIX_OPERATORS or name in ATTENTION_OPERATORS:
            seen |= {chrome_names.get(kind) for kind in event.get("args", {}).get("Input type", [])}
    return next((name for name in ("bfloat16", "float16", "float32") if name in seen), None)


def attention_kernel(operator_names: set[str]) -> str | None:
    """The family of attention kernels that the operators of a step, without namespace, stand for."""
    by_hand = "by hand" if operator_names & {"softmax", "_softmax"} else None
    return next((kernel for name, kernel in ATTENTION_OPERATORS.items() if name in operator_names), by_hand)


def _optimizer(operator_names: set[str]) -> str | None:
    algorithms = {name.partition("#")[2].partition(".")[0] for name in operator_names if name.startswith("Optimizer.")}
    if not algorithms:
        return None
    how = [", fused"] if any(name.startswith("_fused_adam") for name in operator_names) else []
    how += [", foreach"] if any(name.startswith("_foreach_") for name in operator_names) else []
    if not any(name.startswith("Optimizer.step#") for name in operator_names):
        how = [", compiled"]  # the compiler drops the step's own record, zero_grad's stays
    return algorithms.pop() + "".join(how[:1])


def count_host_syncs(step: Callable[[], object]) -> int:
    """How often one `step` makes the host wait for the GPU, by PyTorch's own sync debug mode."""
    previous = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(previous)
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)


def categorize(name: str) -> str:
    """The category of a kernel, or of a CPU operator, by its name."""
    rest = "normalization and pointwise" if re.search(POINTWISE, name) else "other"
    return next((category for category, pattern in CATEGORY_PATTERNS.items() if re.search(pattern, name)), rest)


def profile_cuda(step: Callable[[], object], n_steps: int, median_ms: float, device: torch.device) -> Profile:
    """The record's profile of `n_steps`, without what only the operators show. Raises what the profiler raises.

    Profiling slows the host. To keep that from showing as idle time, only the GPU is traced, and each step is queued
    while the GPU runs the step before and, where launching takes long, other work: a GPU that only waits cools down,
    and then runs the step several percent faster.
    """
    marker = torch.zeros(2, MARKER_BYTES, dtype=torch.uint8, device=device)
    keep_busy = _keep_busy(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        step()  # untraced between markers: how long the host takes under the profiler
        launch_ms = (time.perf_counter() - started) * 1e3
        for _ in range(n_steps):
            if 2 * launch_ms > median_ms:  # else each step queues while the one before runs
                keep_busy(3 * launch_ms + LAUNCH_MARGIN_MS - median_ms)
            marker[0].copy_(marker[1])
            step()
            marker[0].copy_(marker[1])
        torch.cuda.synchronize(device)
    _, by_kind = chrome_trace(profiler)
    profile = summarize_timeline(by_kind["kernel"] + by_kind["gpu_memcpy"] + by_kind["gpu_memset"], n_steps)
    profile.bound_by, profile.shares = bound_by(profile)
    return profile


def _keep_busy(device: torch.device) -> Callable[[float], None]:
    """A function that queues arithmetic and memory traffic, in turn, for about the milliseconds it is given."""
    # Products alone would leave the GPU hotter, and its clock lower, than a step finds it.
    matrix = torch.rand(FILLER_SHAPE, device=device, dtype=torch.float16)
    product = matrix.new_empty(FILLER_SHAPE[0], FILLER_SHAPE[0])

    def fill():
        torch.mm(matrix, matrix.t(), out=product)
        for _ in range(FILLER_PASSES):
            matrix.mul_(1)

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    fill()
    begin.record()
    fill()
    end.record()
    torch.cuda.synchronize(device)
    fill_ms = begin.elapsed_time(end)

    def keep_busy(ms: float) -> None:
        for _ in range(math.ceil(ms / fill_ms)):
            fill()

    return keep_busy


def summarize_timeline(events: list[dict], n_steps: int) -> Profile:
    """Busy and idle time and kernels, per step, of the GPU's work between each pair of markers.

    Where kernels overlap, each instant belongs to the kernel that began first, and to communication only where nothing
    else runs, so that the categories and the idle time add up to the step. Raises ValueError where the markers are
    missing.
    """
    events = sorted(events, key=lambda event: event["ts"])
    markers = [e for e in events if e.get("args", {}).get("bytes") == MARKER_BYTES and "Memcpy" in e["name"]]
    if len(markers) != 2 * n_steps:
        raise ValueError(f"the profiler lost work: {len(markers)} of {2 * n_steps} markers are in its trace")
    times, total, communication_us = defaultdict(list), 0.0, 0.0
    for first, last in zip(markers[::2], markers[1::2], strict=True):
        cursor = begin = first["ts"] + first["dur"]
        total += last["ts"] - begin
        inside, covered, exchanges = [event for event in events if begin <= event["ts"] < last["ts"]], [], []
        for event in inside:
            if categorize(event["name"]) == "communication":
                exchanges.append(event)
            else:
                covered.append(_new_span(event, cursor))
                cursor = covered[-1][1]
                times[event["name"]].append((cursor - covered[-1][0]) / 1e3)
        cursor = begin
        for event in exchanges:
            start, cursor = _new_span(event, cursor)
            overlap = sum(max(0.0, min(cursor, b) - max(start, a)) for a, b in covered)
            times[event["name"]].append((cursor - start - overlap) / 1e3)
            communication_us += event["dur"]
    profile = _per_step(times, total / 1e3, n_steps)
    profile.gpu_busy_ms = sum(kernel.ms for kernel in profile.kernels)
    profile.gpu_idle_ms = profile.step_ms - profile.gpu_busy_ms
    profile.communication_ms = communication_us / 1e3 / n_steps
    profile.block = one_block([_launch(event["name"], event["ts"], event["dur"]) for event in inside])
    return profile


def _launch(name: str, start_us: float, us: float) -> Launch:
    return Launch(name, categorize(name), start_us / 1e3, us / 1e3)


def _new_span(event: dict, cursor: float) -> tuple[float, float]:
    """Begin and end of what an event adds to a timeline that is full up to `cursor`, in microseconds."""
    return max(event["ts"], cursor), max(event["ts"] + event["dur"], cursor)


def profile_cpu(step: Callable[[], object], n_steps: int) -> Profile:
    """Like `profile_cuda`, of a CPU: operators instead of kernels, each without the time of operators inside it."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(n_steps):
            step()
    events = profiler.events()
    optimizer = [event.time_range for event in events if event.name.startswith("Optimizer.step")]
    times = defaultdict(list)
    for event in events:
        inside = any(span.start < event.time_range.start and event.time_range.end <= span.end for span in optimizer)
        name = f"Optimizer.step: {event.name}" if inside else event.name
        times[name].append(event.self_cpu_time_total / 1e3)
    times = {name: own for name, own in times.items() if sum(own) > 0}
    profile = _per_step(times, sum(map(sum, times.values())), n_steps)
    profile.block = one_block(_working(events), n_steps)
    return profile


def _working(events: list) -> list[Launch]:
    """A CPU's operators in order that spend half of their time or more in themselves, without those inside them."""
    launches, until_us = [], 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        span = event.time_range
        if span.start >= until_us and 2 * event.self_cpu_time_total >= event.cpu_time_total >= SHORTEST_US:
            launches.append(_launch(event.name, span.start, event.cpu_time_total))
            until_us = span.end
    return launches


def _per_step(times: dict[str, list[float]], total_ms: float, n_steps: int) -> Profile:
    """The profile of `n_steps` that took `total_ms`, from the milliseconds of every launch of each kernel."""
    kernels = [Kernel(name, categorize(name), sum(own) / n_steps, len(own) / n_steps) for name, own in times.items()]
    categories = {name: CategoryTime() for name in CATEGORIES}
    for kernel in kernels:
        categories[kernel.category].ms += kernel.ms
        categories[kernel.category].launches += kernel.launches
    return Profile(
        step_ms=total_ms / n_steps,
        steps=n_steps,
        categories=categories,
        kernels=sorted(kernels, key=lambda kernel: -kernel.ms),
        kernels_per_step=sum(kernel.launches for kernel in kernels),
    )


def bound_by(profile: Profile) -> tuple[str, dict[str, float]]:
    """`compute`, `memory` or `launch`, and the share of the profiled step that each has: the largest names the bound.

    Compute is the time in matrix products and fused attention. Memory is the time in all other kernels, which read
    and write whole tensors for a few operations each. Launch is the gaps on the GPU's timeline: the GPU waits for the
    host or, in a replay, from kernel to kernel. Communication, of several processes, is what overlaps nothing else.
    """
    softmax = sum(k.ms for k in profile.kernels if k.category == "attention" and "softmax" in k.name.lower())
    compute = sum(profile.categories[name].ms for name in COMPUTE) - softmax
    exchange = profile.categories["communication"].ms
    times = {"compute": compute, "memory": profile.gpu_busy_ms - compute - exchange, "launch": profile.gpu_idle_ms}
    times |= {"communication": exchange} if exchange else {}
    shares = {name: ms / profile.step_ms for name, ms in times.items()}
    return max(shares, key=shares.get), shares


def backward_graph(output: torch.Tensor, end: torch.Tensor | None = None) -> dict:
    """Each backward node from `output` to the node that made `end`, with the nodes that it hands gradients to.

    Leaves (AccumulateGrad) are no operators and are left out, and so is the node of `end`.
    """
    left_out = (None, None if end is None else end.grad_fn)

    def operators(nodes) -> list:
        return [node for node in nodes if node not in left_out and type(node).__name__ != "AccumulateGrad"]

    edges, waiting = {}, operators([output.grad_fn])
    while waiting:
        node = waiting.pop()
        if node not in edges:
            edges[node] = operators(n for n, _ in node.next_functions)
            waiting += edges[node]
    return edges


def attention_autograd_nodes(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> int | None:
    """Nodes of the backward graph between output and input of the first block's attention; None where it has none.

    A model or a block that is compiled as a whole has a single node for everything.
    """
    if any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in model.modules()):
        return 1
    attention = next((module for module in model.modules() if type(module).__name__ == "CausalSelfAttention"), None)
    if attention is None:
        return None
    counts = []  # taken at once: Python's view of a custom Function ends with the graph
    handle = attention.register_forward_hook(lambda _, x, y: counts.append(len(backward_graph(y, x[0]))))
    try:
        step()
    finally:
        handle.remove()
    return counts[0]


def kernel_table(profile: Profile, rows: int = 20) -> str:
    """The kernels that take the most time, and the categories, as text. Raises ImportError without tabulate."""

    def cells(launches: float, ms: float) -> dict[str, str]:
        return {"launches": f"{launches:.0f}", "ms/step": f"{ms:.3f}", "share": f"{ms / profile.step_ms:.1%}"}

    longest = profile.kernels[:rows]
    kernels = [{"kernel": k.name[:70], "category": k.category, **cells(k.launches, k.ms)} for k in longest]
    categories = [{"category": n, **cells(t.launches, t.ms)} for n, t in profile.categories.items() if t.launches]
    if profile.gpu_idle_ms is not None:
        categories.append({"category": "gaps", **cells(0, profile.gpu_idle_ms)})
    parts = [aligned(kernels, n_left=2), aligned(categories)]
    if any(kernel.name.startswith(COMPILED_GRAPH) for kernel in profile.kernels):
        parts.append("On a CPU, what the compiler fused has no name and counts as pointwise; so does a compiled AdamW.")
    return "\n\n".join(parts)
