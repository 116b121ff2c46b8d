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
import time

import torch
from torch._dynamo.exc import TorchDynamoException, Unsupported

from anatomy.experiment import Result, quiet, seconds, size_argument, table
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
    size_argument(parser, "--n", "numbers in the input (default: GPU 2^26, CPU 2^22, quick 2^20)")
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="of torch.compile (default: inductor)")


def run(args: argparse.Namespace) -> Result:
    n = args.n or 2 ** (20 if args.quick else 26 if args.device.type == "cuda" else 22)
    x = torch.randn(n, device=args.device, dtype=args.dtype or torch.float32)
    cases, detected, costs, sentences = {}, [], [], []
    for name, (broken, mended, how, bytes_broken, bytes_mended) in CASES.items():
        cost = {"cause": name, "mended by": how, "bytes for FP32": f"{bytes_broken}N / {bytes_mended}N"}
        predicted = f"{bytes_broken / bytes_mended:.2f}x" if args.backend == "inductor" else "-"  # others do not fuse
        costs.append(cost | {"predicted": predicted})
        with quiet():  # the warnings repeat the reason
            breaks, reason, line = detect(broken, x)
            left = detect(mended, x)[0]
            same = torch.allclose(broken(x), mended(x), rtol=1e-2 if x.itemsize < 4 else 1e-4)
            try:
                broken_s, mended_s = timed(broken, x, args), timed(mended, x, args)
            except TorchDynamoException as error:  # without a compiler the breaks are known, but not the times
                broken_s = mended_s = None
                sentences = [f"There are no times: {one_line(error)}."]
        detected.append({"cause": name, "breaks predicted": 1, "breaks": breaks, "mended, predicted": 0})
        detected[-1] |= {"mended": left, "reason that Dynamo gives": reason, "line": line}
        cases[name] = {"breaks": breaks, "reason": reason, "line": line, "breaks_mended": left, "same_result": same}
        cases[name] |= {"broken_s": broken_s, "mended_s": mended_s}
        if broken_s is None:
            continue
        ratio, times = broken_s / mended_s, {"broken": broken_s, "mended": mended_s, "lost": broken_s - mended_s}
        costs[-1] |= {"measured": f"{ratio:.2f}x"} | {f"{what}, ms": f"{s * 1e3:.3f}" for what, s in times.items()}
        costly = "takes longer" if ratio > 1.05 else "does NOT take longer"
        sentences.append(f"{name}: the broken form {costly}, {ratio:.2f}x the mended time, predicted {predicted}.")
    clean = all(cell["breaks_mended"] == 0 and cell["same_result"] for cell in cases.values())
    sentences.append(f"{'Every' if clean else 'NOT every'} mended form is one graph and returns the same numbers.")
    title = f"Cost of a break, N = {n} numbers, backend {args.backend}"
    figures = {"n": n, "backend": args.backend, "cases": cases}
    return Result([table("Graph breaks", detected), table(title, costs)], sentences, figures)
