"""What a training step really ran: operators, kernels, host synchronizations.

Nothing here is timed into the result; one extra step is run under torch.profiler.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

MATRIX_OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_linear_pointwise", "_mkl_linear", "convolution")

# Operator that PyTorch dispatches to -> the kernel family that runs.
ATTENTION_OPERATORS = {
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_cudnn_attention_forward": "cudnn",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash (CPU)",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_attention_math": "math",
}


@dataclass(frozen=True)
class Trace:
    """One profiled step: Chrome trace events of the operators, and of the GPU kernels."""

    operators: list[dict]
    kernels: list[dict]

    def operator_names(self) -> set[str]:
        """Without namespace: `aten::mm` is `mm`."""
        return {event["name"].rpartition("::")[2] for event in self.operators}

    def kernel_names(self) -> list[str]:
        return [event["name"] for event in self.kernels]


def trace_step(step: Callable[[], object], device: torch.device) -> Trace:
    """Run `step` once under torch.profiler. Raises what the profiler raises."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its stages on stderr tell a reader nothing
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        # Kernel names may hold bytes that are not UTF-8.
        events = json.loads(path.read_text(errors="replace"), strict=False)["traceEvents"]
    by_category: dict[str, list[dict]] = {}
    for event in events:
        by_category.setdefault(event.get("cat", ""), []).append(event)
    operators = by_category.get("cpu_op", []) + by_category.get("user_annotation", [])
    return Trace(operators, kernels=by_category.get("kernel", []))


def observed_settings(trace: Trace) -> dict:
    """What the profiled step shows of the record's `settings`: dtypes, attention, compiler, optimizer."""
    names = trace.operator_names()
    return {
        "amp_dtype": _matrix_dtype(trace),
        "attention_kernel": _attention_kernel(names),
        "compiled": any(name.startswith(("Torch-Compiled Region", "## Call CompiledFxGraph")) for name in names),
        "optimizer": _optimizer(names),
    }


def _matrix_dtype(trace: Trace) -> str | None:
    """The narrowest dtype that PyTorch's own matrix products and fused attention took."""
    chrome_names = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}
    seen = set()
    for event in trace.operators:
        name = event["name"].rpartition("::")[2]
        if name in MATRIX_OPERATORS or name in ATTENTION_OPERATORS:
            seen |= {chrome_names.get(kind) for kind in event.get("args", {}).get("Input type", [])}
    return next((name for name in ("bfloat16", "float16", "float32") if name in seen), None)


def _attention_kernel(operator_names: set[str]) -> str | None:
    for operator, kernel in ATTENTION_OPERATORS.items():
        if operator in operator_names:
            return kernel
    return "by hand" if operator_names & {"softmax", "_softmax"} else None


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
