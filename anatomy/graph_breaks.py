"""What breaks a graph of torch.compile, and what does a break cost?

Predict: how many times longer does a memory-bound function take with a break in its middle? Which of print, .item(), a
branch on a tensor and a call that cannot be captured costs most, and why?

Prediction: a break is a place that Dynamo, the part of torch.compile that captures graphs, cannot capture. It cuts the
function into 2 graphs. The kernels of the first one write what lies between them, and those of the second read it
again. So 2 pointwise kernels move 2 x (4N + 4N) bytes for N numbers in FP32. The mended form is the same function,
written without the break. Its one kernel moves 4N + 4N bytes, so that a memory-bound function with a break takes twice
as long. Where the function needs a sum, the mended form also makes a pass for the sum. The bytes are then 16N against
12N, and the break costs a third more.

A break also returns to Python, and what breaks the graph runs there: `.item()`, `print` of a tensor and a branch on a
tensor make the host wait for the GPU. The return to Python and the wait do not depend on N. So this program measures
both forms on 64 numbers, which is the host's time, and a copy of as many bytes. A form takes the longer of the two;
where the host waits for the GPU, and on a CPU, it takes their sum. A print, which also writes, should cost most.

Change: --n 65536. Now a break costs the host more than the kernels take: which ratio is far from that of the bytes?
Source: PyTorch's programming model of torch.compile (graph breaks); the bytes are arithmetic.
Run:    python -m anatomy graph-breaks [--n N] [--backend inductor|aot_eager|eager]
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch._dynamo.exc import TorchDynamoException, Unsupported

from anatomy.experiment import (
    AGAIN,
    Cause,
    Check,
    Result,
    copy_seconds,
    default_size,
    differ,
    expected,
    ms,
    near,
    quiet,
    seconds,
    size_argument,
    table,
)
from anatomy.misses import cause_of_miss
from common import roofs
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
    time.perf_counter()  # kept, its number would be a guard, so that every call compiles the second half again
    return second_half(y)


FEW = 64  # numbers of an input on which only the host's work counts
WAITS = ("print", ".item()", "data-dependent branch")  # causes at which the host waits for the GPU
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


def timed(function, x: torch.Tensor, args: argparse.Namespace) -> tuple[list[float], list[Callable[[], object]]]:
    """The times of the compiled function on FEW numbers and on all of them, and these two calls."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=args.backend, dynamic=False)
    calls = [partial(compiled, x[:FEW].clone()), partial(compiled, x)]
    return [seconds(call, args.iters) for call in calls], calls


def cause(check: Check, on_few: Callable, on_all: Callable, expect: Callable[[float], float], device) -> Cause:
    """Why a form missed what `expect` made of the time on FEW numbers: that time may have changed since."""
    host_s = seconds(on_few, AGAIN)
    if not near(expect(host_s), check.measured):
        return cause_of_miss(check, on_all, device)
    then = f"with that {ms(expect(host_s))} ms are predicted"
    return f"timed again, {FEW} numbers take {ms(host_s)} ms: the host's speed had changed, and {then}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size_argument(parser, "--n", "numbers in the input (default: 2^26 on a GPU, 2^23 on a CPU)")
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="of torch.compile (default: inductor)")


def run(args: argparse.Namespace) -> Result:
    n = args.n or default_size(args, quick=2**23, cpu=2**23, gpu=2**26)
    x = torch.randn(n, device=args.device, dtype=args.dtype or torch.float32)
    rate = roofs.copy_rate(args.device)
    cases, detected, costs, sentences, checks = {}, [], [], [], []
    for name, (broken, mended, how, *bytes_each) in CASES.items():
        costs.append({"cause": name, "mended by": how, "bytes for FP32": "{}N / {}N".format(*bytes_each)})
        with quiet():  # the warnings repeat the reason
            breaks, reason, line = detect(broken, x)
            left = detect(mended, x)[0]
            same = torch.allclose(broken(x), mended(x), rtol=1e-2 if x.itemsize < 4 else 1e-4)
            try:
                forms = {"broken": timed(broken, x, args), "mended": timed(mended, x, args)}
            except TorchDynamoException as error:  # without a compiler the breaks are known, but not the times
                forms, sentences = {}, [f"There are no times: {one_line(error)}."]
        detected.append({"cause": name, "breaks": breaks, "breaks of the mended form": left})
        detected[-1] |= {"reason that Dynamo gives": reason, "line": line}
        checks.append(Check(f"breaks by {name}", 1, breaks, ""))
        cases[name] = {"breaks": breaks, "reason": reason, "line": line, "breaks_mended": left, "same_result": same}
        if not forms:
            continue
        for (form, ((host_s, measured_s), calls)), each in zip(forms.items(), bytes_each, strict=True):
            n_bytes = each / 4 * n * x.itemsize
            moving = copy_seconds(n_bytes, args.device)
            waits = form == "broken" and name in WAITS
            expect = moving.__add__ if waits else partial(expected, work_s=moving, device=args.device)
            predicted_s = expect(host_s)
            cases[name] |= {f"{form}_s": measured_s, f"{form}_host_s": host_s, f"{form}_predicted_s": predicted_s}
            costs[-1] |= {f"{form}, ms": ms(measured_s), f"{form} on {FEW} numbers": ms(host_s)}
            if args.backend == "inductor":  # the others do not fuse, so that their bytes are not these
                checks.append(Check(f"time with {name}, {form}", predicted_s, measured_s, "ms"))
                find = partial(cause, on_few=calls[0], on_all=calls[1], expect=expect, device=args.device)
                checks[-1].find_cause = find
        sentences.append(cost_of(name, cases[name]))
    clean = all(cell["breaks_mended"] == 0 and cell["same_result"] for cell in cases.values())
    sentences.append(f"{'Every' if clean else 'NOT every'} mended form is one graph and returns the same numbers.")
    title = f"Cost of a break, N = {n} numbers, backend {args.backend}, copy {rate / 1e9:.0f} GB/s"
    figures = {"n": n, "backend": args.backend, "cases": cases}
    return Result([table("Graph breaks", detected), table(title, costs)], sentences, figures, checks)


def cost_of(name: str, case: dict) -> str:
    broken_s, mended_s = case["broken_s"], case["mended_s"]
    if not differ(broken_s, mended_s):
        return f"{name}: broken and mended form take the same time within the spread."
    host = (case["broken_host_s"] - case["mended_host_s"]) / (broken_s - mended_s)
    where = f" Of what it loses, {host:.0%} is there on {FEW} numbers, too." if 0 < host <= 1 else ""
    return f"{name}: the broken form takes {broken_s / mended_s:.2f}x the mended time.{where}"
