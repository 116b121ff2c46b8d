"""What do the usual techniques give, in speed and in memory?

Predict: which of these techniques makes forward and backward of six transformer blocks faster by half, on your machine:
compilation, mixed precision, fused attention, CUDA graphs, channels-last, accumulation of gradients in four parts?

Prediction: speed and memory are ratios to the plain form, and the table has the reason for each technique. Memory is
the peak of forward and backward above weights, their gradients and inputs. A CUDA graph has no such peak: its pool of
memory stays. Where arithmetic says how long forward and backward should take, this program predicts it. The time on 16
tokens, which is measured first, is what the host needs to launch everything. A GPU takes that or the time of the work,
whichever is longer. A CPU does one after the other, so a plain time holds the host's time once. On a GPU the plain form
is in BF16, but for mixed precision, where it is in FP32.

- checkpointing runs forward twice; backward counts as two passes. So the work is 4 passes instead of 3;
- accumulation in 4 parts does the same work, and the host launches it 4 times, which is 3 times more;
- mixed precision: the profile says which share of the plain step is matrix products. They become faster by the ratio of
  the measured rates, FP32 to BF16, and the rest, which is bytes, by 2;
- CUDA graphs: the time that the kernels keep the GPU busy. The host launches two graphs, about 8 kernels of the loss,
  and 32 additions, because each of the 16 layers has two gradients. A kernel on one number tells the time of a launch.

docs/claims.md has what tutorials and papers claim of these techniques, beside what was recorded.

Change: --batch 1 --seq 16, then --batch 32. Which techniques change sides, and what is the limit in either case?
Source: PyTorch's tuning guide, AMP recipe, channels-last tutorial, CUDA graphs blog; FlashAttention (Dao et al., 2022).
Run:    python -m anatomy techniques [--only NAME ...] [--layers N] [--batch B] [--seq T] [--dmodel C]
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch._dynamo.exc import TorchDynamoException

from anatomy.experiment import (
    Check,
    Result,
    busy_seconds,
    default_size,
    differ,
    expected,
    extra_peak_bytes,
    ms,
    seconds,
    size_argument,
    table,
)
from anatomy.misses import cause_of_miss, time_again
from anatomy.technique_forms import GRAPHED_LAYERS, pairs
from common import profile, roofs
from common.record import ProductRate
from common.text import one_line

LOSS_LAUNCHES = 8  # of a square, a mean and a division, forward and backward
TECHNIQUES = {  # name -> what it is measured on, and why it should be faster, or need less memory
    "torch.compile": ("the blocks", "fused pointwise kernels: fewer bytes, same FLOPs"),
    "mixed precision": ("the blocks", "2 bytes a number, not 4; tensor cores"),
    "CNN inference under torch.compile": ("two convolutions", "folded BatchNorm, fused ReLU: fewer passes"),
    "FlashAttention": ("attention alone", "(T, T) scores stay on the chip"),
    "checkpointing": ("the blocks", "4 passes, not 3; memory keeps only inputs of blocks"),
    "CUDA graphs": ("16 small linear layers", "the host launches two graphs, not each kernel"),
    "channels-last": ("two convolutions", "the layout of the convolutions, so no transposes"),
    "gradient accumulation": ("the blocks", "activations of a quarter of the batch at a time"),
}


def measured(build: Callable, args: argparse.Namespace) -> tuple[tuple, dict]:
    """Both forms that `build` makes, and the second timed again; its speed and memory over the first, or `reason`."""
    try:
        forms = plain, technique = build()
        plain(), technique()  # from here on all gradients exist
        peaks = [extra_peak_bytes(form, args.device) for form in (technique, plain)]
        cell = {"plain_s": seconds(plain, args.iters), "seconds": seconds(technique, args.iters)}
        again = time_again(technique)
    except (RuntimeError, TorchDynamoException) as error:
        return (), {"reason": one_line(error)}
    cell |= {"memory": peaks[0] / peaks[1], "speed": cell["plain_s"] / cell["seconds"]}
    return (*forms, again), cell | {"inside_spread": not differ(cell["plain_s"], cell["seconds"])}


def host_and_work(name: str, plain: Callable, plain_s: float, host_s: dict, args) -> tuple[float, float] | None:
    """What arithmetic says of the host's time and that of the work; None where it says nothing, or where only a GPU's
    profile would. `host_s` is the time on 16 tokens, plain and with checkpointing; and of a launch."""
    gpu = args.device.type == "cuda"
    if name == "checkpointing":
        return (host_s[name], 4 / 3 * busy_seconds(plain, args.device)) if gpu else (0, 4 / 3 * plain_s)
    if name == "gradient accumulation":
        return (4 if gpu else 3) * host_s["plain"], plain_s
    if name == "CUDA graphs":
        return (2 + 2 * GRAPHED_LAYERS + LOSS_LAUNCHES) * host_s["a launch"], busy_seconds(plain, args.device)
    if name == "mixed precision" and gpu:
        kernels = profile.trace_step(plain, args.device).kernels
        busy = sum(kernel["dur"] for kernel in kernels)
        products = sum(k["dur"] for k in kernels if profile.categorize(k["name"]) == "matrix products") / busy
        square = ProductRate(m=4096, n=4096, k=4096)
        bursts = roofs.BURSTS
        fp32, bf16 = (roofs.product_rates(square, p, args.device, 0.1, bursts)[1] for p in ("fp32", "bf16"))
        return host_s["plain"], plain_s * (products * fp32 / bf16 + (1 - products) / 2)
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(TECHNIQUES)
    parser.add_argument("--only", nargs="+", choices=TECHNIQUES, metavar="NAME", help=f"some of: {names}")
    size_argument(parser, "--layers", "transformer blocks (default 6; 4 on a CPU)")
    size_argument(parser, "--batch", "sequences in a batch (default 8)", default=8)
    size_argument(parser, "--seq", "tokens in a sequence (default: GPU 1024, CPU 256, quick 128)")
    size_argument(parser, "--dmodel", "channels, in heads of 64 or one (default: GPU 1024, CPU 128)")


def run(args: argparse.Namespace) -> Result:
    gpu = args.device.type == "cuda"
    T, C = args.seq or default_size(args, 128, 256, 1024), args.dmodel or default_size(args, 128, 128, 1024)
    layers = args.layers or (6 if gpu else 4)
    builders, few = pairs(args, layers, args.batch, T, C), pairs(args, layers, 1, 16, C)["checkpointing"]()
    host_s = {name: seconds(form, args.iters) for name, form in zip(("plain", "checkpointing"), few, strict=True)}
    one = torch.ones(1, device=args.device)
    host_s["a launch"] = seconds(lambda: one * 2, args.iters)
    cells, forms, rows, sentences = {}, {}, [], []
    for name in args.only or TECHNIQUES:
        if name in builders:
            forms[name], cells[name] = measured(builders[name], args)
        else:
            needed = "a GPU" if name == "CUDA graphs" else "FP32 weights and BF16 in hardware"
            cells[name] = {"reason": f"it needs {needed}"}
        of, reason = TECHNIQUES[name]
        rows.append({"technique": name, "of": of, "reason": reason} | shown(name, cells[name]))
        if "reason" in cells[name]:
            sentences.append(f"{name} was not measured: {cells[name]['reason']}.")
    clear = {name: cell["speed"] > 1 for name, cell in cells.items() if not cell.get("inside_spread", True)}
    for kind, is_faster in (("slower", False), ("faster", True)):
        named = ", ".join(name for name in clear if clear[name] is is_faster)
        sentences.insert(0, f"Beyond the spread, these are {kind} than their plain form: {named or 'none'}.")
    title = f"Ratios to the plain form; {layers} blocks, batch {args.batch}, length {T}, {C} channels. "
    title += f"The blocks on 16 tokens: {ms(host_s['plain'])} ms, with checkpointing {ms(host_s['checkpointing'])} ms"
    figures = {"techniques": cells, "host_s": host_s}
    return Result([table(title, rows)], sentences, figures, checks(cells, forms, host_s, args))


def checks(cells: dict, forms: dict, host_s: dict, args: argparse.Namespace) -> list[Check]:
    """After all times are taken: some predictions need the profiler, which makes later launches slower."""
    found = []
    for name, cell in cells.items():
        if "reason" in cell:
            continue
        plain, technique, again = forms[name]
        if times := host_and_work(name, plain, cell["plain_s"], host_s, args):
            limit = ", limited by the host" if args.device.type == "cuda" and times[0] > times[1] else ""
            find = partial(cause_of_miss, call=technique, device=args.device, again=again)
            what, predicted = f"{name}, forward and backward{limit}", expected(*times, args.device)
            found.append(Check(what, predicted, cell["seconds"], "ms", find_cause=find))
    return found


def shown(name: str, cell: dict) -> dict:
    """The cells of a row of the table; none where there are no times."""
    if "reason" in cell:
        return {}
    peak = "its pool stays" if name == "CUDA graphs" else f"{cell['memory']:.2f}x"  # so a step adds nothing
    row = {"plain, ms": ms(cell["plain_s"]), "with it, ms": ms(cell["seconds"])}
    return row | {"speed": f"{cell['speed']:.2f}x{', inside the spread' * cell['inside_spread']}", "memory": peak}
