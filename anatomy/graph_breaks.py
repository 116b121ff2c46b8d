"""What breaks a graph of torch.compile, and what does a break cost?

Prediction: a break is a place that Dynamo, the part of torch.compile that captures graphs, cannot capture. It cuts the
function into 2 graphs. The kernels of the first one write what lies between them, and those of the second read it
again. So 2 pointwise kernels move 2 x (4N + 4N) bytes of FP32. The mended form has no break. Its one kernel moves
4N + 4N bytes, so that a memory-bound function with a break takes twice as long. Where the break is about a sum, the
mended form also makes a pass for the sum. The bytes are then 16N against 12N, and the break costs a third more.

A break also returns to Python. `.item()`, `print` of a tensor and a branch on a tensor make the host wait for the GPU.
That takes tens of microseconds, which count where kernels are short.

Source: PyTorch's programming model of torch.compile (graph breaks); the bytes are arithmetic.
Run:    python -m anatomy graph-breaks [--n N] [--backend inductor|aot_eager|eager]
"""

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


CASES = {  # cause -> (broken form, mended form, how it is mended, bytes per number of either form)
    "print": (with_print, without_print, "print what the function returns", 16, 8),
    ".item()": (with_item, without_item, "leave the number a tensor", 16, 12),
    "data-dependent branch": (with_branch, without_branch, "torch.where", 16, 12),
    "unsupported call": (with_unsupported, without_print, "read the clock outside", 16, 8),
}
BACKENDS = ("inductor", "aot_eager", "eager")


def detect(function, x: torch.Tensor) -> tuple[int, str, str]:
    """The number of graph breaks, the reason that Dynamo gives, and the line of code."""
    torch._dynamo.reset()
    explanation = torch._dynamo.explain(function)(x)
    if not explanation.break_reasons:
        return explanation.graph_break_count, "-", "-"
    first = explanation.break_reasons[0]
    reason, line = first.reason.splitlines()[0], first.user_stack[-1].line
    torch._dynamo.reset()
    try:  # the error of fullgraph=True has a clearer reason, but this mode captures some breaks, without an error
        torch.compile(function, backend="eager", fullgraph=True)(x)
    except Unsupported as error:
        reason = str(error).splitlines()[0]
    return explanation.graph_break_count, reason, line.strip()


def timed(function, x: torch.Tensor, args: argparse.Namespace) -> float:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=args.backend)
    return seconds(lambda: compiled(x), args.iters)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=positive, help="numbers in the input (default: GPU 2^26, CPU 2^22, quick 2^20)")
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="of torch.compile (default: inductor)")


def run(args: argparse.Namespace) -> Result:
    n = args.n or 2 ** (20 if args.quick else 26 if args.device.type == "cuda" else 22)
    x = torch.randn(n, device=args.device, dtype=args.dtype or torch.float32)
    cases, detected, costs, sentences = {}, [], [], []
    for name, (broken, mended, how, bytes_broken, bytes_mended) in CASES.items():
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they repeat the reason
            logging.disable(logging.WARNING)
            try:
                breaks, reason, line = detect(broken, x)
                left = detect(mended, x)[0]
                same = torch.allclose(broken(x), mended(x), rtol=1e-2 if x.itemsize < 4 else 1e-4)
                times = {"broken_s": timed(broken, x, args), "mended_s": timed(mended, x, args)}
            except TorchDynamoException as error:  # without a compiler the breaks are known, but not the times
                times = {"broken_s": None, "mended_s": None}
                sentences = [f"There are no times: {one_line(error)}."]
            finally:
                logging.disable(logging.NOTSET)
        cases[name] = {"breaks": breaks, "reason": reason, "line": line, "breaks_mended": left, "same_result": same}
        cases[name] |= times
        detected.append([name, "1", str(breaks), "0", str(left), reason, line])
        predicted = (
            f"{bytes_broken / bytes_mended:.2f}x" if args.backend == "inductor" else "-"
        )  # the other backends do not fuse
        costs.append([name, how, f"{bytes_broken}N / {bytes_mended}N", predicted, *["-"] * 4])
        if times["broken_s"] is None:
            continue
        lost, ratio = times["broken_s"] - times["mended_s"], times["broken_s"] / times["mended_s"]
        costs[-1][4:] = [f"{ratio:.2f}x", *(f"{value * 1e3:.3f}" for value in (*times.values(), lost))]
        costly = "takes longer" if ratio > 1.05 else "does NOT take longer"
        sentences.append(f"{name}: the broken form {costly}, {ratio:.2f}x the mended time, predicted {predicted}.")
    clean = all(cell["breaks_mended"] == 0 and cell["same_result"] for cell in cases.values())
    sentences.append(f"{'Every' if clean else 'NOT every'} mended form is one graph and returns the same numbers.")
    headers = ["cause", "breaks predicted", "breaks", "mended, predicted", "mended", "reason that Dynamo gives", "line"]
    measured = ["predicted", "measured", "broken, ms", "mended, ms", "lost, ms"]
    title = f"Cost of a break, N = {n} numbers, backend {args.backend}"
    cost = Table(title, ["cause", "mended by", "bytes for FP32", *measured], costs)
    figures = {"n": n, "backend": args.backend, "cases": cases}
    return Result([Table("Graph breaks", headers, detected), cost], sentences, figures)
