"""What do the usual techniques give, in speed and in memory?

Predict: which of these techniques makes forward and backward of six transformer blocks faster by half, on your machine:
compilation, mixed precision, fused attention, CUDA graphs, channels-last, accumulation of gradients in four parts?

Prediction: speed and memory are ratios to the plain form, and the table has the reason for each technique. Memory is
the peak of forward and backward above weights, their gradients and inputs. Where arithmetic says what the speed should
be, this program predicts it:

- checkpointing runs forward twice; backward counts as two passes. So there are 4 passes instead of 3: 0.75x;
- accumulation in 4 parts does the same work, unless the host needs longer to launch a part than the part takes. The
  time of forward and backward on 16 tokens, which is measured first, is what the host needs. So the parts take 4 times
  that or the plain time, whichever is longer (a CPU does one after the other);
- mixed precision: the profile says which share of the plain step is matrix products. They become faster by the ratio of
  the measured rates, FP32 to BF16, and the rest, which is bytes, by 2;
- CUDA graphs: the time that the kernels keep the GPU busy.

docs/claims.md has what tutorials and papers claim of these techniques, beside what was recorded.

Change: --batch 1 --seq 16, then --batch 32. Which techniques change sides, and what is the limit in either case?
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

from anatomy.attention_forms import attention_by_hand, attention_fused
from anatomy.experiment import (
    NEAR,
    Check,
    Result,
    busy_seconds,
    default_size,
    differ,
    extra_peak_bytes,
    ms,
    seconds,
    size_argument,
    table,
)
from common import profile, roofs
from common.hardware import has_bf16_matrix_instructions
from common.model import GPTConfig
from common.record import ProductRate
from common.text import one_line

REASONS = {  # technique -> why it should be faster, or need less memory
    "torch.compile": "fused pointwise kernels: fewer bytes, same FLOPs",
    "mixed precision": "2 bytes a number, not 4; tensor cores",
    "CNN inference under torch.compile": "folded BatchNorm, fused ReLU: fewer passes",
    "FlashAttention": "(T, T) scores stay on the chip",
    "checkpointing": "4 passes, not 3; memory keeps only inputs of blocks",
    "CUDA graphs": "no launches: about 5 us a kernel, if kernels are small",
    "channels-last": "the layout of the convolutions, so no transposes",
    "gradient accumulation": "activations of a quarter of the batch at a time",
}


def checkpointed(blocks: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def convolutions(args: argparse.Namespace, B: int) -> tuple[nn.Module, torch.Tensor]:
    """Two convolutions with BatchNorm and ReLU, and images for them."""
    gpu, how = args.device.type == "cuda", {"device": args.device, "dtype": args.dtype or torch.float32}
    layers = (nn.Sequential(nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ((3, 64), (64, 128)))
    images = torch.randn(4 * B if gpu else 2, 3, *[112 if gpu else 32] * 2, **how)
    return nn.Sequential(*layers).to(**how), images


def cnn_inference(args: argparse.Namespace, B: int) -> tuple[Callable, Callable]:
    plain, images = convolutions(args, B)
    forms = plain.eval(), torch.compile(plain.eval())
    return tuple(torch.no_grad()(partial(form, images)) for form in forms)


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
        plain, images = convolutions(args, B)
        last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
        return step(plain, images), step(last, images.contiguous(memory_format=torch.channels_last))

    return {
        "CNN inference under torch.compile": partial(cnn_inference, args, B),
        "torch.compile": lambda: (step(blocks), step(torch.compile(copy.deepcopy(blocks)))),
        "FlashAttention": attention,
        "checkpointing": lambda: (step(blocks), step(partial(checkpointed, blocks))),
        "channels-last": layouts,
        "gradient accumulation": lambda: (step(blocks), step(blocks, parts=4)),
        **({"mixed precision": lambda: (step(blocks, amp=False), step(blocks, amp=True))} if bf16 else {}),
        **({"CUDA graphs": graphs} if gpu else {}),
    }


def compare(name: str, build: Callable, few: Callable, args: argparse.Namespace) -> dict:
    """Speed and memory of a technique over its plain form, and the prediction. `few` is the plain step on 16 tokens."""
    try:
        plain, technique = build()
        plain(), technique()  # from here on all gradients exist
        peaks = [extra_peak_bytes(form, args.device) for form in (technique, plain)]
        cell = {"plain_s": seconds(plain, args.iters), "seconds": seconds(technique, args.iters)}
    except (RuntimeError, TorchDynamoException) as error:
        return {"reason": one_line(error)}
    cell |= {"memory": peaks[0] / peaks[1], "speed": cell["plain_s"] / cell["seconds"]}
    cell["predicted_speed"] = predicted_speed(name, plain, cell["plain_s"], few, args)
    if name == "CUDA graphs":
        cell["busy_share"] = busy_seconds(technique, args.device) / cell["seconds"]
    return cell | {"inside_spread": not differ(cell["plain_s"], cell["seconds"])}


def gaps(cell: dict) -> str | None:
    """Why a captured step is slower than its kernels: what the GPU does not spend in them."""
    share = cell.get("busy_share", 1.0)
    said = f"replayed, its kernels run {share:.0%} of the time: between short kernels a graph has gaps"
    return said if share * NEAR < 1 else None


def predicted_speed(name: str, plain: Callable, plain_s: float, few: Callable, args) -> float | None:
    """What arithmetic says of the speed; None where it says nothing, or where only a GPU's profile would."""
    gpu = args.device.type == "cuda"
    if name == "checkpointing":
        return 3 / 4
    if name == "gradient accumulation":
        host_s = seconds(few, args.iters)
        return plain_s / (max(plain_s, 4 * host_s) if gpu else plain_s + 3 * host_s)
    if name == "CUDA graphs":
        return plain_s / busy_seconds(plain, args.device)
    if name == "mixed precision" and gpu:
        kernels = profile.trace_step(plain, args.device).kernels
        busy = sum(kernel["dur"] for kernel in kernels)
        products = sum(k["dur"] for k in kernels if profile.categorize(k["name"]) == "matrix products") / busy
        square = ProductRate(m=4096, n=4096, k=4096)
        bursts = roofs.BURSTS
        fp32, bf16 = (roofs.product_rates(square, p, args.device, 0.1, bursts)[1] for p in ("fp32", "bf16"))
        return 1 / (products * fp32 / bf16 + (1 - products) / 2)
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=REASONS, metavar="NAME", help=f"some of: {', '.join(REASONS)}")
    size_argument(parser, "--layers", "transformer blocks (default 6; 4 on a CPU)")
    size_argument(parser, "--batch", "sequences in a batch (default 8)", default=8)
    size_argument(parser, "--seq", "tokens in a sequence (default: GPU 1024, CPU 256, quick 128)")
    size_argument(parser, "--dmodel", "channels, in heads of 64 or one (default: GPU 1024, CPU 128)")


def run(args: argparse.Namespace) -> Result:
    gpu = args.device.type == "cuda"
    T, C = args.seq or default_size(args, 128, 256, 1024), args.dmodel or default_size(args, 128, 128, 1024)
    layers = args.layers or (6 if gpu else 4)
    builders, few = pairs(args, layers, args.batch, T, C), pairs(args, layers, 1, 16, C)["checkpointing"]()[0]
    cells, rows, sentences, checks = {}, [], [], []
    for name in args.only or REASONS:
        needs = {"reason": "it needs a GPU" if name == "CUDA graphs" else "it needs FP32 weights and BF16 in hardware"}
        cell = cells[name] = compare(name, builders[name], few, args) if name in builders else needs
        row = {"technique": name, "reason": REASONS[name]}
        if "reason" in cell:
            sentences.append(f"{name} was not measured: {cell['reason']}.")
        else:
            speed = f"{cell['speed']:.2f}x{', inside the spread' * cell['inside_spread']}"
            peak = "held" if name == "CUDA graphs" else f"{cell['memory']:.2f}x"  # its pool stays between steps
            row |= {"plain, ms": ms(cell["plain_s"]), "with it, ms": ms(cell["seconds"])}
            row |= {"speed": speed, "memory": peak}
            if cell["predicted_speed"]:
                checks.append(Check(f"speed of {name}", cell["predicted_speed"], cell["speed"], "x", cause=gaps(cell)))
        rows.append(row)
    clear = {name: cell["speed"] > 1 for name, cell in cells.items() if not cell.get("inside_spread", True)}
    for kind, is_faster in (("slower", False), ("faster", True)):
        named = ", ".join(name for name in clear if clear[name] is is_faster)
        sentences.insert(0, f"Beyond the spread, these are {kind} than their plain form: {named or 'none'}.")
    title = f"Ratios to the plain form, batch {args.batch}, length {T}, {C} channels"
    return Result([table(title, rows)], sentences, {"techniques": cells}, checks)
