"""What lies between a step's matrix products: kernels that pass over memory, fused attention, launches.

A copy of the same bytes is no measure of these kernels: a cast reads vectors and writes singles, a mask costs
arithmetic on indices, a sum over tokens waits for its own parts. So each is timed alone, at several sizes. What is too
short for a host to launch in time is timed in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import hardware, profile
from common.errors import optional
from common.record import AttentionRate, PassTime
from common.text import one_line, say

SIZES = {"cuda": (2**18, 2**20, 2**22, 2**24, 2**26), "cpu": (2**12, 2**16, 2**20)}  # numbers
WIDTH, HEADS, EDGE = 1024, 16, 512  # channels, heads, and the edge of a square of scores; on a CPU a quarter
VOCABULARY = 2**15
LENGTHS, HEAD_DIMS, TOKENS = (256, 1024, 4096, 16384), (64, 128), {"cuda": 2**15, "cpu": 2**10}
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LAUNCHED_BLOCKS, LAUNCHED_WIDTH, LAUNCHED_STEPS, WARMUP = 8, 64, 20, 5
TRIES, PAUSE_S = 15, 0.3  # of the time of a launch
LAUNCH_FP32 = "launch fp32"
FEW_HEADS = 4  # of one sequence: too little work to fill a large GPU
FEW = f"attention of {FEW_HEADS} heads"
TE_WIDTHS, TE_NORM = (256, 1024), "Transformer Engine's LayerNorm"  # it has tuned kernels for some widths alone
FP8_CAPABILITY = (8, 9)
IN_A_GRAPH = 10  # calls: between two graphs a GPU waits for longer than between two kernels of one
Timer = Callable[[Callable[[], object]], float]


def pass_times(device: torch.device, seconds: Timer) -> list[PassTime]:
    """The time of every kernel at every size. Raises RuntimeError for too little memory, or where a kernel fails."""
    found, sizes = [], SIZES[device.type]
    te = transformer_engine(device)  # first: after torch has loaded a cuDNN, it may not import
    for numbers in sizes:
        for name, work in kernels(numbers, device):
            found.append(PassTime(name, numbers, seconds(work)))
    for length, head_dim in attention_shapes(device):
        attend = attention(1, FEW_HEADS, length, head_dim, device)
        numbers = FEW_HEADS * length * head_dim
        found.append(PassTime(f"{FEW}, {head_dim}", numbers, captured_seconds(attend, device, seconds)))
    try:
        for numbers, width in itertools.product(sizes if te else (), TE_WIDTHS):
            norm_s = captured_seconds(transformer_engine_norm(te, numbers, width, device), device, seconds)
            found.append(PassTime(f"{TE_NORM}, {width}", numbers, norm_s))
    except Exception as error:  # of a package that step 4 alone needs; its errors have no common class
        say(f"{TE_NORM} not measured: {one_line(error, 150)}")
    with contextlib.suppress(RuntimeError):  # launch_seconds, which is called later, says why
        if device.type == "cuda":
            found.append(PassTime(LAUNCH_FP32, 1, launch_times(device)["fp32"]))
    return found


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
        yield f"mask {name}", partial(scores.masked_fill_, mask, 0.0)
        yield f"gelu {name}", partial(F.gelu, tensor, approximate="tanh")
        yield f"gelu backward {name}", partial(aten.gelu_backward, upstream, tensor, approximate="tanh")
        yield f"sum over tokens {name}", partial(tensor.sum, 0)
        split = tensor.view(1, len(x), HEADS, -1).transpose(1, 2)  # (B, H, T, D)
        yield f"heads {name}", split.contiguous
        yield f"softmax of vocabulary {name}", partial(aten._log_softmax, tensor.view(-1, row), -1, False)
    yield "softmax fp32", lambda: aten._softmax(x.view(-1, edge), -1, False)


def transformer_engine(device: torch.device) -> ModuleType | None:
    """The library; None where step 4, which alone has it, is not predicted: without FP8. Where it does not import, None
    and one line that says so."""
    if hardware.compute_capability(device) < FP8_CAPABILITY:
        return None
    te = optional("transformer_engine.pytorch", "transformer-engine[pytorch]")
    if isinstance(te, ModuleType):
        return te
    say(f"{TE_NORM} not measured: transformer_engine does not import")
    return None


def transformer_engine_norm(te: ModuleType, numbers: int, width: int, device: torch.device) -> Callable[[], object]:
    """Its LayerNorm, forward and backward."""
    norm = te.LayerNorm(width).to(device, half_dtype(device))
    x, gradient = torch.randn(2, numbers // width, width, device=device, dtype=half_dtype(device))
    x.requires_grad_()
    return lambda: torch.autograd.grad(norm(x), (x, *norm.parameters()), gradient)


def captured_seconds(work: Callable[[], object], device: torch.device, seconds: Timer) -> float:
    """The time of one call among IN_A_GRAPH in a CUDA graph, as in a captured step; on a CPU, of a call."""
    if device.type != "cuda":
        return seconds(work)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):  # what is allocated at first cannot be captured
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            work()
    return seconds(graph.replay) / IN_A_GRAPH


def half_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cpu" or hardware.has_bf16_matrix_instructions(device) else torch.float16


def attention_rates(device: torch.device, seconds: Timer) -> list[AttentionRate]:
    """FLOP/s of fused causal attention, forward and backward. Raises RuntimeError for too little memory."""
    rates, tokens = [], TOKENS[device.type]
    for length, head_dim in attention_shapes(device):
        attend = attention(tokens // length, HEADS, length, head_dim, device)
        rates.append(AttentionRate(length, head_dim, 6 * length * HEADS * head_dim * tokens / seconds(attend)))
    return rates


def attention_shapes(device: torch.device) -> Iterator[tuple[int, int]]:
    """Every (sequence length, head dimension) at which attention is timed."""
    return itertools.product(filter(TOKENS[device.type].__ge__, LENGTHS), HEAD_DIMS)


def attention(sequences: int, heads: int, length: int, head_dim: int, device: torch.device) -> Callable[[], None]:
    """Fused causal attention, forward and backward."""
    shape = (sequences, heads, length, head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=half_dtype(device), requires_grad=True) for _ in range(3))

    def attend() -> None:
        with sdpa_kernel(KERNELS, set_priority=True):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(y, (q, k, v), y)

    return attend


def launch_seconds(device: torch.device) -> float | None:
    """Host time of a kernel that Python launches in mixed precision; None on a CPU. Raises as `launch_times`."""
    return launch_times(device)["half"] if device.type == "cuda" else None


@cache  # both formats before the first profile: a process that has profiled launches more slowly
def launch_times(device: torch.device) -> dict[str, float]:
    """Host seconds of a kernel that Python launches, in the median of tiny training steps: `fp32`, and `half` in mixed
    precision, whose casts are many and short to launch.

    They run at several moments: other work on the host makes launches slower, and it comes and goes.
    Raises RuntimeError where the profiler shows no kernels.
    """
    steps = {"fp32": tiny_step(device, mixed=False), "half": tiny_step(device, mixed=True)}
    times = {name: [] for name in steps}
    for _ in range(TRIES):
        time.sleep(PAUSE_S)
        for name, step in steps.items():
            times[name] += [host_seconds(step) for _ in range(WARMUP + LAUNCHED_STEPS)][WARMUP:]
    launches = {name: len(profile.trace_step(step, device).kernels) for name, step in steps.items()}
    if not all(launches.values()):
        raise RuntimeError("the profiler shows no kernels")
    return {name: statistics.median(times[name]) / launches[name] for name in steps}


def tiny_step(device: torch.device, mixed: bool) -> Callable[[], None]:
    """A training step whose kernels are short, so that the host's launches are what takes its time."""
    width = LAUNCHED_WIDTH
    parts = [(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(LAUNCHED_BLOCKS)]
    model = nn.Sequential(*(module for part in parts for module in part)).to(device)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(width, width, device=device)

    def step() -> None:
        with torch.autocast(device.type, half_dtype(device), enabled=mixed):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def host_seconds(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started
