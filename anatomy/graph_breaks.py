"""What breaks a graph of torch.compile, and what does a break cost?

Prediction: a break cuts a function into 2 graphs. What lies between them must be written and read again: 2 pointwise
kernels move 2 x (4N + 4N) bytes of FP32, the one kernel of the mended form 4N + 4N, so that a memory-bound function
takes twice as long. Where the break is about a sum, the mended form needs a pass for the sum, too: 16N against 12N
bytes, a third longer. A break also returns to Python, and `.item()`, `print` of a tensor and a branch on one make the
host wait for the GPU: tens of microseconds, which count where kernels are short.
Source: PyTorch's programming model of torch.compile (graph breaks); bytes as in any pointwise roofline.

    python -m anatomy graph-breaks [--n N] [--backend inductor|aot_eager|eager]
"""

from __future__ import annotations

import argparse
import io
import logging
import time
import warnings
from contextlib import redirect_stdout

import torch
from torch._dynamo.exc import TorchDynamoException, Unsupported

from anatomy.experiment import Result, Table, positive, seconds
from common.text import one_line


def first_half(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2 + 1


def second_half(y: torch.Tensor) -> torch.Tensor:
    return y.abs() * 3 - 1


def with_print(x):
    y = first_half(x)
    print("half done:", y[0])
    return second_half(y)


def without_print(x):
    return second_half(first_half(x))


def with_item(x):
    y = first_half(x)
    total = y.sum().item()
    return second_half(y) / total


def without_item(x):
    y = first_half(x)
    return second_half(y) / y.sum()


def with_branch(x):
    y = first_half(x)
    if y.sum() > 0:
        return second_half(y)
    return -second_half(y)


def without_branch(x):
    y = first_half(x)
    return torch.where(y.sum() > 0, second_half(y), -second_half(y))


def with_unsupported(x):
    y = first_half(x)
    started = time.perf_counter()
    y = second_half(y)
    return y if started > 0 else None


CASES = {  # what breaks -> (broken, mended, how, bytes per number of broken and mended)
    "print": (with_print, without_print, "print what the function returns", 16, 8),
    ".item()": (with_item, without_item, "leave the number a tensor", 16, 12),
    "data-dependent branch": (with_branch, without_branch, "torch.where", 16, 12),
    "unsupported call": (with_unsupported, without_print, "read the clock outside", 16, 8),
}
BACKENDS = ("inductor", "aot_eager", "eager")


def detect(function, x: torch.Tensor) -> tuple[int, str, str]:
    """Graph breaks, the reason by its name, and the line of code."""
    torch._dynamo.reset()
    found = torch._dynamo.explain(function)(x)
    if not found.break_reasons:
        return found.graph_break_count, "-", "-"
    reason, line = found.break_reasons[0].reason.splitlines()[0], found.break_reasons[0].user_stack[-1].line
    torch._dynamo.reset()
    try:  # an error names the reason better, but fullgraph=True can take in what would break otherwise
        torch.compile(function, backend="eager", fullgraph=True)(x)
    except Unsupported as error:
        reason = str(error).splitlines()[0]
    return found.graph_break_count, reason, line.strip()


def timed(function, x: torch.Tensor, args: argparse.Namespace) -> float:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=args.backend)
    return seconds(lambda: compiled(x), args.iters)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=positive, help="numbers in the input (default 2^26 on a GPU, 2^22 on a CPU, 2^20)")
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="of torch.compile (default inductor)")


def run(args: argparse.Namespace) -> Result:
    n = args.n or 2 ** (20 if args.quick else 26 if args.device.type == "cuda" else 22)
    x = torch.randn(n, device=args.device, dtype=args.dtype or torch.float32)
    found, detected, costs, sentences = {}, [], [], []
    for name, (broken, mended, how, bytes_broken, bytes_mended) in CASES.items():
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say is in the reason
            logging.disable(logging.WARNING)
            try:
                breaks, reason, line = detect(broken, x)
                left = detect(mended, x)[0]
                same = torch.allclose(broken(x), mended(x), rtol=1e-2 if x.itemsize < 4 else 1e-4)
                times = {"broken_s": timed(broken, x, args), "mended_s": timed(mended, x, args)}
            except TorchDynamoException as error:  # no compiler: what was detected stands
                times = {"broken_s": None, "mended_s": None}
                sentences = [f"No times: {one_line(error)}."]
            finally:
                logging.disable(logging.NOTSET)
        found[name] = {"breaks": breaks, "reason": reason, "line": line, "breaks_mended": left, "same_result": same}
        found[name] |= times
        detected.append([name, "1", str(breaks), "0", str(left), reason, line])
        predicted = f"{bytes_broken / bytes_mended:.2f}x" if args.backend == "inductor" else "-"  # others do not fuse
        costs.append([name, how, f"{bytes_broken}N / {bytes_mended}N", predicted, *["-"] * 4])
        if times["broken_s"] is None:
            continue
        lost, ratio = times["broken_s"] - times["mended_s"], times["broken_s"] / times["mended_s"]
        costs[-1][4:] = [f"{ratio:.2f}x", *(f"{value * 1e3:.3f}" for value in (*times.values(), lost))]
        costly = "takes longer" if ratio > 1.05 else "does NOT take longer here"
        sentences.append(f"With the break, {name}, it {costly}: {ratio:.2f}x the mended time, predicted {predicted}.")
    clean = all(cell["breaks_mended"] == 0 and cell["same_result"] for cell in found.values())
    sentences.append(f"{'Every' if clean else 'NOT every'} mended form is one graph and returns the same numbers.")
    headers = ["what breaks", "breaks predicted", "found", "mended: predicted", "found", "reason by Dynamo", "line"]
    measured = ["predicted", "time", "broken, ms", "mended, ms", "lost, ms"]
    title = f"Cost of a break, N = {n} numbers, backend {args.backend}"
    cost = Table(title, ["what breaks", "mended by", "bytes for FP32", *measured], costs)
    figures = {"n": n, "backend": args.backend, "cases": found}
    return Result([Table("Graph breaks", headers, detected), cost], sentences, figures)
