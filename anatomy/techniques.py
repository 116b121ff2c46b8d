"""Do the usual claims about speed and memory hold here?

Prediction: CLAIMS has what tutorials and papers claim, as ratios to the plain form, and the reason. Checkpointing, for
example, runs forward twice. Backward counts as two passes, so there are 4 passes instead of 3: 0.75x the speed. A claim
holds if the speed is at least its lower figure, and the memory at most its upper one. Memory is the peak of forward and
backward above weights, their gradients and inputs.

Source: PyTorch's tuning guide, AMP recipe, channels-last tutorial, CUDA graphs blog; FlashAttention (Dao et al., 2022).
Run:    python -m anatomy techniques [--only NAME ...] [--layers N] [--batch B] [--seq T] [--dmodel C]
"""

import argparse
import copy
import importlib
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint

from anatomy.attention_traffic import attention_by_hand, attention_fused
from anatomy.experiment import Result, default_size, extra_peak_bytes, seconds, size_argument, table
from common.hardware import has_bf16_matrix_instructions
from common.model import GPTConfig
from common.text import one_line

CLAIMS = {  # technique -> (speed from, to), (memory from, to), reason
    "torch.compile": ((1.2, 2.0), None, "fused pointwise kernels: fewer bytes, same FLOPs"),
    "mixed precision": ((1.5, 2.0), (0.4, 0.6), "2 bytes a number, not 4; tensor cores"),
    "FlashAttention": ((2.0, 4.0), None, "(T, T) scores stay on the chip"),
    "checkpointing": ((0.7, 0.8), (0.3, 0.5), "4 passes, not 3; memory keeps only inputs of blocks"),
    "CUDA graphs": ((1.5, 2.0), None, "no launches: about 5 us a kernel, if kernels are small"),
    "channels-last": ((1.1, 1.3), None, "the layout of the convolutions, so no transposes"),
    "gradient accumulation": ((0.9, 1.0), (0.2, 0.3), "activations of a quarter of the batch at a time"),
}


def checkpointed(blocks: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def pairs(args: argparse.Namespace, layers: int, B: int, T: int, C: int) -> dict[str, Callable]:
    """Technique -> a function that builds two forms of forward and backward, plain and with it. A GPU uses BF16."""
    device, dtype, gpu = args.device, args.dtype or torch.float32, args.device.type == "cuda"
    bf16 = has_bf16_matrix_instructions(device) and dtype is torch.float32
    config, step_2 = GPTConfig(layers, 1 if C % 64 else C // 64, C, T, 256), importlib.import_module("2_sdpa")
    blocks = nn.Sequential(*(step_2.Block(config) for _ in range(layers))).to(device, dtype)
    x = torch.randn(B, T, C, device=device, dtype=dtype)

    def step(model: Callable, x: torch.Tensor = x, amp: bool = gpu and bf16, parts: int = 1) -> Callable:
        def forward_backward() -> None:
            for part in x.chunk(parts):
                with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                    loss = model(part).float().square().mean() / parts
                loss.backward()  # adds to gradients that exist already

        return forward_backward

    def attention() -> tuple[Callable, Callable]:
        how = {"device": device, "dtype": torch.bfloat16 if gpu and bf16 else dtype, "requires_grad": True}
        q, k, v = (torch.randn(B, config.n_head, T, config.head_dim, **how) for _ in range(3))
        return tuple(step(lambda _, a=a: a(q, k, v)) for a in (attention_by_hand, attention_fused))

    def graphs() -> tuple[Callable, Callable]:
        small, few = nn.Sequential(*[nn.Linear(64, 64), nn.ReLU()] * 16).to(device), torch.randn(64, 64, device=device)
        graphed = torch.cuda.make_graphed_callables(copy.deepcopy(small), (few,))
        return step(small, few, amp=False), step(graphed, few, amp=False)

    def layouts() -> tuple[Callable, Callable]:
        layers = (nn.Sequential(nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ((3, 64), (64, 128)))
        plain = nn.Sequential(*layers).to(device, dtype)
        images = torch.randn(4 * B if gpu else 2, 3, *[112 if gpu else 32] * 2, device=device, dtype=dtype)
        last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
        return step(plain, images), step(last, images.contiguous(memory_format=torch.channels_last))

    return {
        "torch.compile": lambda: (step(blocks), step(torch.compile(copy.deepcopy(blocks)))),
        "FlashAttention": attention,
        "checkpointing": lambda: (step(blocks), step(partial(checkpointed, blocks))),
        "channels-last": layouts,
        "gradient accumulation": lambda: (step(blocks), step(blocks, parts=4)),
        **({"mixed precision": lambda: (step(blocks, amp=False), step(blocks, amp=True))} if bf16 else {}),
        **({"CUDA graphs": graphs} if gpu else {}),
    }


def compare(build: Callable, args: argparse.Namespace, speed: tuple, memory: tuple | None) -> dict:
    try:
        plain, technique = build()
        plain(), technique()  # from here on all gradients exist
        peaks = [extra_peak_bytes(form, args.device) for form in (technique, plain)]
        ratios = {"memory": peaks[0] / peaks[1]}
        ratios["speed"] = seconds(plain, args.iters) / seconds(technique, args.iters)
    except (RuntimeError, TorchDynamoException) as error:
        return {"reason": one_line(error)}
    return ratios | {"holds": ratios["speed"] >= speed[0] and (memory is None or ratios["memory"] <= memory[1])}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=CLAIMS, metavar="NAME", help=f"some of: {', '.join(CLAIMS)}")
    size_argument(parser, "--layers", "transformer blocks (default 6; 4 on a CPU)")
    size_argument(parser, "--batch", "sequences in a batch (default 8)", default=8)
    size_argument(parser, "--seq", "tokens in a sequence (default: GPU 1024, CPU 256, quick 128)")
    size_argument(parser, "--dmodel", "channels, in heads of 64 or one (default: GPU 1024, CPU 128)")


def run(args: argparse.Namespace) -> Result:
    gpu = args.device.type == "cuda"
    T, C = args.seq or default_size(args, 128, 256, 1024), args.dmodel or default_size(args, 128, 128, 1024)
    builders = pairs(args, args.layers or (6 if gpu else 4), args.batch, T, C)
    cells, rows, sentences = {}, [], []
    for name in args.only or CLAIMS:
        speed, memory, reason = CLAIMS[name]
        needs = {"reason": "it needs a GPU" if name == "CUDA graphs" else "it needs FP32 weights and BF16 in hardware"}
        cell = cells[name] = compare(builders[name], args, speed, memory) if name in builders else needs
        claimed = [f"{low:g}-{high:g}x" for low, high in (speed, memory or speed)]
        row = {"technique": name, "reason": reason, "speed claimed": claimed[0], "speed": "-"}
        row |= {"memory claimed": claimed[1] if memory else "-", "memory": "-", "claim": "not measured"}
        if "reason" in cell:
            sentences.append(f"{name} was not measured: {cell['reason']}.")
        else:
            peak = "held" if name == "CUDA graphs" else f"{cell['memory']:.2f}x"  # its pool stays between steps
            claim = "holds" if cell["holds"] else "does NOT hold"
            row |= {"speed": f"{cell['speed']:.2f}x", "memory": peak, "claim": claim}
        rows.append(row)
    measured = {name: cell["holds"] for name, cell in cells.items() if "holds" in cell}
    broken = ", ".join(name for name, holds in measured.items() if not holds) or "none"
    sentences.insert(0, f"{sum(measured.values())} of {len(measured)} claims hold here. These do not: {broken}.")
    title = f"Ratios to the plain form, batch {args.batch}, length {T}, {C} channels"
    rule = "a claim holds from its lower speed and up to its upper memory"
    return Result([table(f"{title}; {rule}", rows)], sentences, {"techniques": cells})
