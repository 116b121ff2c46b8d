"""What lies between a step's matrix products: kernels that pass over memory, fused attention, launches.

A copy of the same bytes is no measure of these kernels: a cast reads vectors and writes singles, a mask costs
arithmetic on indices, a sum over tokens waits for its own parts. So each is timed alone, at several sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import hardware, profile
from common.record import AttentionRate, PassTime

SIZES = {"cuda": (2**18, 2**20, 2**22, 2**24, 2**26), "cpu": (2**12, 2**16, 2**20)}  # numbers
WIDTH, HEADS, EDGE = 1024, 16, 512  # channels, heads, and the edge of a square of scores; on a CPU a quarter
VOCABULARY = 2**15
LENGTHS, HEAD_DIMS, TOKENS = (256, 1024, 4096, 16384), (64, 128), {"cuda": 2**15, "cpu": 2**10}
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LAUNCHED_BLOCKS, LAUNCHED_WIDTH, LAUNCHED_STEPS = 8, 64, 20
Timer = Callable[[Callable[[], object]], float]


def pass_times(device: torch.device, seconds: Timer) -> list[PassTime]:
    """The time of every kernel at every size. Raises RuntimeError for too little memory."""
    return [
        PassTime(name, numbers, seconds(work))
        for numbers in SIZES[device.type]
        for name, work in kernels(numbers, device)
    ]


def kernels(numbers: int, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each kernel by name, over a tensor of about so many numbers, with its backward where that is another kernel.

    Names end in the format of the tensor that they are counted over. `copy fp32` is what all others are compared with.
    """
    aten, row, shrink = torch.ops.aten, min(numbers, VOCABULARY), 1 if device.type == "cuda" else 4
    half, width, edge = half_dtype(device), WIDTH // shrink, EDGE // (4 * shrink if numbers < EDGE**2 else shrink)
    x, gradient, out = (torch.randn(numbers // width, width, device=device) for _ in range(3))
    weight, mean_rstd = torch.ones(width, device=device), torch.ones(2, len(x), 1, device=device)
    yield "copy fp32", lambda: torch.neg(x, out=out)  # of copy_ a GPU's copy engines would be a part
    yield "layer norm fp32", lambda: aten.native_layer_norm(x, [width], weight, weight, 1e-5)
    yield (
        "layer norm backward fp32",
        lambda: aten.native_layer_norm_backward(gradient, x, [width], *mean_rstd, weight, weight, [True] * 3),
    )
    low, low_gradient = x.to(half), gradient.to(half)
    yield "to half", lambda: x.to(half)
    yield "to fp32", lambda: low.to(torch.float32)
    for name, tensor, upstream in (("fp32", x, gradient), ("half", low, low_gradient)):
        scores = tensor.view(-1, edge, edge)
        mask = torch.ones(edge, edge, dtype=torch.bool, device=device).triu(1)
        yield f"mask {name}", lambda: scores.masked_fill_(mask, 0.0)  # noqa: B023, timed before the next one is made
        yield f"gelu {name}", lambda: F.gelu(tensor, approximate="tanh")  # noqa: B023
        yield f"gelu backward {name}", lambda: aten.gelu_backward(upstream, tensor, approximate="tanh")  # noqa: B023
        yield f"sum over tokens {name}", lambda: tensor.sum(0)  # noqa: B023
        split = tensor.view(1, len(x), HEADS, -1).transpose(1, 2)  # (B, H, T, D)
        yield f"heads {name}", split.contiguous
        yield f"softmax of vocabulary {name}", lambda: aten._log_softmax(tensor.view(-1, row), -1, False)  # noqa: B023
    yield "softmax fp32", lambda: aten._softmax(x.view(-1, edge), -1, False)


def half_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cpu" or hardware.has_bf16_matrix_instructions(device) else torch.float16


def attention_rates(device: torch.device, seconds: Timer) -> list[AttentionRate]:
    """FLOP/s of fused causal attention, forward and backward. Raises RuntimeError for too little memory."""
    rates, tokens = [], TOKENS[device.type]
    for length in filter(tokens.__ge__, LENGTHS):
        for head_dim in HEAD_DIMS:
            shape = (tokens // length, HEADS, length, head_dim)
            q, k, v = (torch.randn(shape, device=device, dtype=half_dtype(device)) for _ in range(3))
            q, k, v = (t.requires_grad_() for t in (q, k, v))

            def attend(q=q, k=k, v=v) -> None:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                torch.autograd.grad(y, (q, k, v), y)

            with sdpa_kernel(KERNELS, set_priority=True):
                rate = 6 * length * HEADS * head_dim * tokens / seconds(attend)
            rates.append(AttentionRate(length, head_dim, rate))
    return rates


def launch_seconds(device: torch.device) -> float | None:
    """Host time of a kernel that Python launches, in the mean of a tiny mixed-precision training step.

    Raises RuntimeError where the profiler shows no kernels.
    """
    if device.type != "cuda":
        return None
    width = LAUNCHED_WIDTH
    parts = [(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(LAUNCHED_BLOCKS)]
    model = nn.Sequential(*(module for part in parts for module in part)).to(device)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(width, width, device=device)

    def step() -> None:
        with torch.autocast(device.type, half_dtype(device)):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    launches = len(profile.trace_step(step, device).kernels)
    if not launches:
        raise RuntimeError("the profiler shows no kernels")
    started = time.perf_counter()
    for _ in range(LAUNCHED_STEPS):
        step()
    hardware.synchronize(device)
    return (time.perf_counter() - started) / LAUNCHED_STEPS / launches
