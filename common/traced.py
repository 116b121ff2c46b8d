"""A part of the record: what a step shows over its time, one block's kernels and the memory that it holds."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_KINDS = ("parameters", "optimizer", "other", "gradients", "activations", "temporary")  # see common/memory.py


@dataclass
class Launch:
    """A kernel as it ran once; on a CPU an operator that does its work itself."""

    name: str
    category: str  # one of CATEGORIES
    start_ms: float  # since its half of the block began
    ms: float


@dataclass
class Block:
    """What one transformer block ran: from one attention's longest kernel to the next one's, see common/block.py."""

    forward: list[Launch]
    forward_ms: float
    backward: list[Launch]
    backward_ms: float


@dataclass
class MemoryUse:
    """What CUDA's allocator held over one launched step, at most 200 points, see common/memory.py."""

    ms: list[float]  # of the host, since the step began
    bytes: dict[str, list[int]]  # by MEMORY_KINDS, one number a point
    peak_bytes: int
    peak_ms: float
    backward_ms: float | None = None  # when backward began
    optimizer_ms: float | None = None
