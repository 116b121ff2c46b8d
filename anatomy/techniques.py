"""Do the usual claims about speed and memory hold here?

Prediction: the claims are ranges that tutorials and papers give, speed and memory as ratios to the plain form:

    torch.compile            1.2-2x     pointwise kernels merge: fewer bytes through DRAM, as many FLOPs
    mixed precision          1.5-2x     at 0.5x memory: 2 bytes a number instead of 4, and tensor cores
    FlashAttention           2-4x       the (T, T) scores stay on the chip
    checkpointing            0.7-0.8x   at 0.3-0.5x memory: one more forward, 4 passes instead of 3, is 0.75x
    CUDA graphs              1.5-2x     for small kernels: about 5 us of launching each is gone
    channels-last            1.1-1.3x   for a CNN: the kernels' own layout, no transposes
    gradient accumulation    0.9-1x     in K parts, at about 1/K memory: only one part's activations live at a time

Memory is what a forward and backward allocates at its peak above weights and inputs.
Source: PyTorch's performance tuning guide and AMP recipes; Dao et al., 2022 (FlashAttention); Chen et al., 2016
(checkpointing); PyTorch's blog on CUDA graphs and its tutorial on channels-last.

    python -m anatomy techniques [--only NAME ...] [--layers N] [--batch B] [--seq T] [--dmodel C]
"""

from __future__ import annotations

import argparse
import copy
import importlib
from collections.abc import Callable

import torch
import torch.nn as nn
from torch._dynamo.exc import TorchDynamoException
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from anatomy.attention_traffic import attention_by_hand, attention_fused
from anatomy.experiment import Refused, Result, Table, positive, seconds
from common.hardware import has_bf16_matrix_instructions
from common.model import GPTConfig

CLAIMS = {  # technique -> (speed from, to), (memory from, to) as ratios to the plain form
    "torch.compile": ((1.2, 2.0), None),
    "mixed precision": ((1.5, 2.0), (0.4, 0.6)),
    "FlashAttention": ((2.0, 4.0), None),
    "checkpointing": ((0.7, 0.8), (0.3, 0.5)),
    "CUDA graphs": ((1.5, 2.0), None),
    "channels-last": ((1.1, 1.3), None),
    "gradient accumulation": ((0.9, 1.0), (0.2, 0.3)),
}
PARTS = 4  # of gradient accumulation


def peak_bytes(work: Callable, device: torch.device) -> int:
    """Bytes that `work` allocates at its peak above what is there before it."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def pairs(args: argparse.Namespace, layers: int, B: int, T: int, C: int) -> dict[str, Callable]:
    """Technique -> a function that builds (plain, technique); each then runs forward and backward once.

    On a GPU that has BF16 all run in mixed precision, as on the ladder, except where that is the question.
    """
    device, dtype, gpu = args.device, args.dtype or torch.float32, args.device.type == "cuda"
    bf16 = has_bf16_matrix_instructions(device) and dtype is torch.float32
    config = GPTConfig(layers, max(1, C // 64), C, T, vocab_size=256)
    Block = importlib.import_module("2_sdpa").Block
    blocks = nn.Sequential(*(Block(config) for _ in range(layers))).to(device, dtype)
    x = torch.randn(B, T, C, device=device, dtype=dtype)

    def step(model: Callable, x: torch.Tensor = x, amp: bool = gpu and bf16, parts: int = 1) -> Callable:
        def forward_backward() -> None:
            for part in x.chunk(parts):
                with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                    loss = model(part).float().square().mean() / parts
                loss.backward()  # into gradients that are there already

        return forward_backward

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def attention() -> tuple[Callable, Callable]:
        shape = (B, config.n_head, T, config.head_dim)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        return tuple(step(lambda _, a=a: a(*narrow(q, k, v))) for a in (attention_by_hand, attention_fused))

    def narrow(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [t.to(torch.bfloat16) if gpu and bf16 else t for t in tensors]

    def mixed() -> tuple[Callable, Callable]:
        if not bf16:
            raise RuntimeError("needs FP32 weights and a device with BF16 matrix instructions")
        return step(blocks, amp=False), step(blocks, amp=True)

    def graphs() -> tuple[Callable, Callable]:
        if not gpu:
            raise RuntimeError("CUDA graphs need a GPU")
        small = nn.Sequential(*(m for _ in range(16) for m in (nn.Linear(64, 64), nn.ReLU()))).to(device)
        few = torch.randn(64, 64, device=device)
        graphed = torch.cuda.make_graphed_callables(copy.deepcopy(small), (few,))
        return step(small, few, amp=False), step(graphed, few, amp=False)

    def layouts() -> tuple[Callable, Callable]:
        sizes = [(3, 64), (64, 64), (64, 128), (128, 128)]
        parts = [(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()) for a, b in sizes]
        plain = nn.Sequential(*(m for part in parts for m in part)).to(device, dtype)
        images = torch.randn(4 * B if gpu else B, 3, *[112 if gpu else 32] * 2, device=device, dtype=dtype)
        last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
        return step(plain, images), step(last, images.contiguous(memory_format=torch.channels_last))

    return {
        "torch.compile": lambda: (step(blocks), step(torch.compile(copy.deepcopy(blocks)))),
        "mixed precision": mixed,
        "FlashAttention": attention,
        "checkpointing": lambda: (step(blocks), step(checkpointed)),
        "CUDA graphs": graphs,
        "channels-last": layouts,
        "gradient accumulation": lambda: (step(blocks), step(blocks, parts=PARTS)),
    }


def compare(build: Callable, speed: tuple, memory: tuple | None, args: argparse.Namespace) -> dict:
    try:
        plain, technique = build()
        found = {"memory": peak_bytes(technique, args.device) / peak_bytes(plain, args.device)}
        found["speed"] = seconds(plain, args.iters) / seconds(technique, args.iters)
    except (RuntimeError, TorchDynamoException) as error:
        return {"reason": str(error).strip().splitlines()[0]}
    return found | {"holds": found["speed"] >= speed[0] and (memory is None or found["memory"] <= memory[1])}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=CLAIMS, metavar="NAME", help=f"some of: {', '.join(CLAIMS)}")
    parser.add_argument("--layers", type=positive, help="transformer blocks (default 6; 4 on a CPU)")
    parser.add_argument("--batch", type=positive, help="sequences in a batch (default 8)", default=8)
    parser.add_argument("--seq", type=positive, help="tokens in a sequence (default 1024 on a GPU, 256 on a CPU; 128)")
    parser.add_argument("--dmodel", type=positive, help="channels, in heads of 64 (default 1024; 128 on a CPU)")


def run(args: argparse.Namespace) -> Result:
    gpu = args.device.type == "cuda"
    T = args.seq or (128 if args.quick else 1024 if gpu else 256)
    C = args.dmodel or (1024 if gpu else 128)
    if C > 64 and C % (C // 64):
        raise Refused(f"--dmodel {C} does not divide into {C // 64} heads")
    builders = pairs(args, args.layers or (6 if gpu else 4), args.batch, T, C)
    found, rows, sentences = {}, [], []
    for name, (speed, memory) in CLAIMS.items():
        if args.only and name not in args.only:
            continue
        cell = found[name] = compare(builders[name], speed, memory, args)
        claimed = f"{speed[0]:g}-{speed[1]:g}x"
        least = f"{memory[0]:g}-{memory[1]:g}x" if memory else "-"
        if "reason" in cell:
            rows.append([name, claimed, "-", least, "-", "not measured"])
            sentences.append(f"{name} was not measured: {cell['reason']}.")
            continue
        better = cell["speed"] > speed[1] or (memory and cell["memory"] < memory[0])
        verdict = ("holds, and more" if better else "holds") if cell["holds"] else "does NOT hold here"
        rows.append([name, claimed, f"{cell['speed']:.2f}x", least, f"{cell['memory']:.2f}x", verdict])
    measured = [name for name, cell in found.items() if "holds" in cell]
    broken = [name for name in measured if not found[name]["holds"]]
    sentences.insert(0, f"{len(measured) - len(broken)} of {len(measured)} claims that were measured hold here.")
    if broken:
        sentences.insert(1, f"Not here, at these sizes: {', '.join(broken)}.")
    headers = ["technique", "speed claimed", "measured", "memory claimed", "measured", "verdict"]
    title = f"Speed and memory as ratios to the plain form, batch {args.batch}, length {T}, {C} channels"
    return Result([Table(title, headers, rows)], sentences, {"techniques": found})
