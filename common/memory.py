"""What CUDA's allocator holds over one launched training step, by what it is for.

Parameters, optimizer states and gradients are known by their addresses. Of the rest that a step allocates, activations
are what forward allocates and backward still holds; all else is temporary. What was there before the step and is none
of these is other: batches, workspaces, scales. Source: the allocator's own history, see "Understanding CUDA Memory
Usage" in PyTorch's documentation.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from unittest import mock

import torch

from common.traced import MEMORY_KINDS, MemoryUse

MOST_POINTS = 200
# Allocations of these sizes, freed at once, mark in the history where a part of the step begins.
MARKERS = {4091: "forward", 4079: "backward", 4073: "optimizer"}


@dataclass
class Allocation:
    """A piece of memory; `begin` and `end` are places in the history, None before and after it."""

    address: int
    size: int
    begin: int | None = None
    end: int | None = None


def trace_memory(step: Callable[[], object], model: torch.nn.Module, device: torch.device) -> MemoryUse:
    """Run `step`, launched, on a GPU. Raises what the allocator's history raises."""
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    states = [state for one in optimizers for per_weight in one.state.values() for state in per_weight.values()]
    kinds = dict.fromkeys(_addresses(states), "optimizer") | dict.fromkeys(_addresses(model.parameters()), "parameters")
    index = torch.cuda.current_device() if device.index is None else device.index
    gradients: set[int] = set()

    def marked(size: int, function: Callable) -> Callable:
        def call(*args, **kwargs):
            if MARKERS[size] == "optimizer":
                gradients.update(_addresses(weight.grad for weight in model.parameters()))
            torch.empty(size, dtype=torch.uint8, device=device)
            return function(*args, **kwargs)

        return call

    forward, backward, update = MARKERS
    torch.cuda.synchronize(device)
    held = [segment for segment in torch.cuda.memory._snapshot()["segments"] if segment["device"] == index]
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)
    try:
        with contextlib.ExitStack() as patches:
            for size, holder, name in [
                (backward, torch.Tensor, "backward"),
                *((update, one, "step") for one in optimizers),
            ]:
                patches.enter_context(mock.patch.object(holder, name, marked(size, getattr(holder, name))))
            marked(forward, step)()
        history = torch.cuda.memory._snapshot()["device_traces"][index]
    finally:
        torch.cuda.memory._record_memory_history(None)
    blocks = [block for segment in held for block in segment["blocks"] if block["state"] == "active_allocated"]
    before = [Allocation(block["address"], block["requested_size"]) for block in blocks]
    return memory_use(before, history, kinds, gradients)


def _addresses(tensors: Iterable) -> set[int]:
    """Where the storages of those that are tensors on a GPU begin; of a sharded tensor its own part."""
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return {one.untyped_storage().data_ptr() for one in local if isinstance(one, torch.Tensor) and one.is_cuda}


def memory_use(before: list[Allocation], history: list[dict], kinds: dict[int, str], gradients: set[int]) -> MemoryUse:
    """The record of a step from what was allocated before it, and from the allocator's events in it.

    `kinds` is of addresses that are known before the step, `gradients` are addresses when the optimizer begins. Raises
    ValueError where the history has no beginning.
    """
    marks = {MARKERS[event["size"]]: k for k, event in reversed([*enumerate(history)]) if _is_marker(event)}
    if "forward" not in marks:
        raise ValueError("the allocator's history does not hold the step")
    live, everything = {one.address: one for one in before}, [*before]
    for k, event in enumerate(history):
        if event["action"] == "alloc":
            live[event["addr"]] = Allocation(event["addr"], event["size"], k)
            everything.append(live[event["addr"]])
        elif event["action"] == "free_requested" and event["addr"] in live:
            live.pop(event["addr"]).end = k
    changes: dict[int, list[tuple[str, int]]] = {}
    for one in everything:
        kind = _kind(one, kinds, gradients, marks)
        changes.setdefault(-1 if one.begin is None else one.begin, []).append((kind, one.size))
        changes.setdefault(len(history) if one.end is None else one.end, []).append((kind, -one.size))
    begin_us = history[marks["forward"]]["time_us"]
    at_ms = [max(0.0, (event["time_us"] - begin_us) / 1e3) for event in history]
    points, held = [], dict.fromkeys(MEMORY_KINDS, 0)
    for k in range(-1, len(history)):
        for kind, size in changes.get(k, ()):
            held[kind] += size
        points.append((at_ms[max(k, 0)], tuple(held.values())))
    begins = {f"{name}_ms": at_ms[marks[name]] for name in ("backward", "optimizer") if name in marks}
    peak_ms, peak = max(points, key=lambda point: sum(point[1]))
    thin = _thinned(points)
    by_kind = {kind: [held[k] for _, held in thin] for k, kind in enumerate(MEMORY_KINDS)}
    return MemoryUse([ms for ms, _ in thin], by_kind, sum(peak), peak_ms, **begins)


def _is_marker(event: dict) -> bool:
    return event["action"] == "alloc" and event["size"] in MARKERS


def _kind(one: Allocation, kinds: dict[int, str], gradients: set[int], marks: dict[str, int]) -> str:
    """What an allocation is for, by its address where it is known, otherwise by when it began and ended."""
    backward, update = (marks.get(name, 0) for name in ("backward", "optimizer"))
    begin, end = -1 if one.begin is None else one.begin, float("inf") if one.end is None else one.end
    if one.address in gradients and begin < update < end and one.address not in kinds:
        return "gradients"
    if one.begin is None:
        return kinds.get(one.address, "other")
    return "activations" if begin < backward < end else "temporary"


def _thinned(points: list) -> list:
    """At most MOST_POINTS: of each run of neighbours the one that holds the most memory."""
    size = -(-len(points) // MOST_POINTS)
    runs = (points[k : k + size] for k in range(0, len(points), size))
    return [max(run, key=lambda point: sum(point[1])) for run in runs]
