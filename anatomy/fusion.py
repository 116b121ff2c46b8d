"""Why does fusion speed up pointwise code?

Predict: how many times faster is sigmoid(relu(x*w+b)) as one kernel than as four? How often does either form read or
write N numbers? What does fusing the bias and ReLU into a large matrix product give?

Prediction, for tensors of N numbers of b bytes. A pointwise kernel computes far faster than it reads and writes, so its
time is its bytes over the copy bandwidth. For sigmoid(relu(x*w+b)), with w and b as large as x:

- eager runs four kernels, which read or write 3 + 3 + 2 + 2 tensors: 10 N b bytes, 40 N in FP32;
- fused is one kernel, which reads x, w, b and writes y: 4 N b bytes, 16 N in FP32, so it is 2.5 times faster. At
  N = 2^26 and 4 TB/s that is 0.67 ms against 0.27 ms.

Some code gains nothing. x / x.sum() needs the sum before the first quotient, so it reads x twice in any form and moves
3 N b bytes. relu(x) alone is already one kernel of 2 N b bytes. A matrix product gains little: its epilogue, which is
work inside the product's kernel, saves only passes over the output. Many small tensors in one kernel (horizontal
fusion) save launches but no bytes: one by one, 64 take 64 times as long as one. One call for all of them is one launch,
but still makes 64 outputs, as the same call on tensors of one number does. So it saves less than 63 launches take. What
one launch takes is measured before each variant, and so is a copy of as many bytes as the variant moves.

Change: --numbers 4096. What limits the four kernels now, and what does fusion save? --edge 256: does the epilogue
matter more for a small product?
Source: the PyTorch documentation of torch.compile; Ansel et al., PyTorch 2 (ASPLOS 2024), on Inductor's fusion.
Run:    python -m anatomy fusion --numbers 67108864 --edge 4096
"""

import argparse
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import NamedTuple

import torch
from torch._inductor.utils import run_and_get_code

from anatomy.experiment import (
    AGAIN,
    Check,
    Result,
    copy_seconds,
    default_size,
    differ,
    expected,
    launches,
    near,
    one_thread,
    seconds,
    size_argument,
    table,
    us,
)
from anatomy.misses import cause_of_miss, time_again
from common import roofs
from common.errors import missing_tool

SMALL, MANY = 1024, 64  # numbers in a small tensor, and how many such tensors
CHAIN, QUOTIENT = "sigmoid(relu(x*w+b))", "x / x.sum()"
KERNEL = r"async_compile\.(?:triton|cpp_pybinding)\(.*?'''(.*?)'''"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size_argument(parser, "--numbers N", "numbers per tensor (default: 2^26 on a GPU, 2^23 on a CPU)")
    size_argument(parser, "--edge N", "edge of the matrices of the product (default: 4096 on a GPU, 1024 on a CPU)")


class Case(NamedTuple):
    expression: str
    variant: str
    function: Callable | str  # or why it cannot run
    inputs: tuple
    numbers: int  # the least that it reads and writes
    unit: Callable  # what the host does
    units: int = 1  # and how often
    product_s: float = 0.0  # of the product in it


def cases(N: int, E: int, dtype: torch.dtype, device: torch.device, iters: int) -> list[Case]:
    """Every expression and variant; the eager form of an expression comes first."""
    x, w, b = torch.rand(3, N, device=device, dtype=dtype) + 1  # so that no sum to divide by is near zero
    matrices = *torch.randn(2, E, E, device=device, dtype=dtype) / E**0.5, torch.randn(E, device=device, dtype=dtype)
    small = tuple(torch.randn(MANY, SMALL, device=device, dtype=dtype))
    product_s = seconds(lambda: matrices[0] @ matrices[1], iters)
    one = torch.ones(1, device=device, dtype=dtype)
    launch, each = partial(torch.mul, one, 2), partial(torch.mul, small[0], 2)
    together = partial(torch._foreach_mul, [one] * MANY, 2)

    def gate(x, w, b):
        return torch.sigmoid(torch.relu(x * w + b))

    def normalize(x):
        return x / x.sum()

    def linear_relu(a, w, c):
        return torch.relu(a @ w + c)

    def epilogue(a, w, c):
        return torch._addmm_activation(c, a, w)  # inside the product's kernel, where BLAS has that

    gemm, many = "relu(A@B+c)", f"{MANY} small x*2"
    return [
        Case(CHAIN, "eager", gate, (x, w, b), 10 * N, launch, 4),
        Case(CHAIN, "compiled", gate, (x, w, b), 4 * N, launch),
        Case(CHAIN, "Triton by hand", triton_gate(device), (x, w, b), 4 * N, launch),
        Case(QUOTIENT, "eager", normalize, (x,), 3 * N, launch, 2),
        Case(QUOTIENT, "compiled", normalize, (x,), 3 * N, launch, 2),
        Case("relu(x)", "eager", torch.relu, (x,), 2 * N, launch),
        Case("relu(x)", "compiled", torch.relu, (x,), 2 * N, launch),
        Case(gemm, "eager", linear_relu, matrices, 4 * E * E, launch, 3, product_s),  # passes over the output
        Case(gemm, "compiled", linear_relu, matrices, 2 * E * E, launch, 2, product_s),
        Case(gemm, "BLAS epilogue", epilogue, matrices, 0, launch, 1, product_s),
        Case(many, "eager", lambda *xs: [x * 2 for x in xs], small, 2 * MANY * SMALL, each, MANY),
        Case(many, "_foreach_mul", lambda *xs: torch._foreach_mul(xs, 2), small, 2 * MANY * SMALL, together),
    ]


def run(args: argparse.Namespace) -> Result:
    device, dtype = args.device, args.dtype or torch.float32
    N = args.numbers or default_size(args, quick=2**23, cpu=2**23, gpu=2**26)
    E = args.edge or default_size(args, quick=512, cpu=1024, gpu=4096)
    copy_rate, copy_of = roofs.copy_rate(device), cache(partial(copy_seconds, device=device))
    timed, code, answers = [], "", {}
    for case in cases(N, E, dtype, device, args.iters):
        function, n_bytes, kernels = case.function, case.numbers * dtype.itemsize, []
        if case.variant == "compiled":
            function, kernels = compiled(function, case.inputs)
            code = code or "\n".join(kernels)
        if isinstance(function, str):
            timed.append((case, function, n_bytes, 0, 0.0, 0.0, 0.0, None))
            continue
        call = partial(function, *case.inputs)
        torch.testing.assert_close(call(), answers.setdefault(case.expression, call()), rtol=0.02, atol=0.05)
        host_s = case.units * seconds(case.unit, args.iters)
        with one_thread() if len(case.inputs) == MANY else nullcontext():  # threads do not share so small tensors
            moving_s = copy_of(n_bytes) if n_bytes and case.units < MANY else 0  # such a unit moves bytes itself
        measured_s, again = seconds(call, args.iters), time_again(call)
        timed.append((case, call, n_bytes, len(kernels), moving_s, host_s, measured_s, again))
    results, rows, checks = {}, [], []
    for case, call, n_bytes, generated, moving_s, host_s, measured_s, again in timed:  # after all times: it profiles
        cells = {"expression": case.expression, "variant": case.variant}
        if isinstance(call, str):
            rows.append(cells | {"least MB": f"{n_bytes / 1e6:.1f}", "measured us": call})
            continue
        call()  # compiles again: each look at generated code forgets what was compiled before
        # The trace of a CPU does not show the functions that the compiler generates.
        n_launches = launches(call, device) + (generated if device.type == "cpu" else 0)
        predicted_s = expected(host_s, case.product_s + moving_s, device)
        checks.append(Check(f"{case.expression}, {case.variant}", predicted_s, measured_s, "us"))
        slow = {"slow_kernels": partial(parts_alone, checks[-1], case)} if case.expression == QUOTIENT else {}
        checks[-1].find_cause = partial(cause_of_miss, call=call, device=device, again=again, **slow)
        result = {"launches": n_launches, "bytes": n_bytes, "seconds": measured_s, "predicted_s": predicted_s}
        results.setdefault(case.expression, {})[case.variant] = result
        copied = us(moving_s) if moving_s else "-"
        cells |= {"launches": n_launches, "least MB": f"{n_bytes / 1e6:.1f}", "a copy of them us": copied}
        cells |= {"predicted us": us(predicted_s), "measured us": us(measured_s)}
        if not case.product_s and predicted_s > host_s:
            rate = n_bytes / measured_s
            cells |= {"GB/s": f"{rate / 1e9:.1f}", "of copy": f"{rate / copy_rate:.0%}"}
        rows.append(cells)
    title = f"N = {N}, A and B ({E}, {E}), {dtype}; copy {copy_rate / 1e9:.1f} GB/s; least MB: besides the product A@B"
    figures = {"copy_bytes_per_s": copy_rate, "numbers": N, "edge": E, "cases": results}
    listings = {f"What torch.compile made of {CHAIN}:": code} if code else {}
    return Result([table(title, rows)], sentences(figures), figures, checks, listings=listings)


def parts_alone(check: Check, case: Case) -> str | None:
    """Whether `QUOTIENT` takes longer by what its sum and its quotient, each alone, take longer than their bytes."""
    (x,), pick = case.inputs, torch.compile if case.variant == "compiled" else lambda function: function
    sum_s, copy_s = seconds(partial(pick(torch.sum), x), AGAIN), copy_seconds(2 * x.nbytes, x.device)
    quotient_s = seconds(partial(pick(torch.div), x, x.sum()), AGAIN)
    said = f"alone, its sum takes {us(sum_s)} us and its quotient {us(quotient_s)}; a copy of x takes {us(copy_s)}"
    return said if near(check.predicted + sum_s + quotient_s - 1.5 * copy_s, check.measured) else None


def triton_gate(device: torch.device) -> Callable | str:
    try:
        from anatomy.fusion_kernel import gate
    except ImportError:
        return "Triton is not installed"
    return gate if device.type == "cuda" else "needs a GPU"


def compiled(function: Callable, inputs: tuple) -> tuple[Callable | str, list[str]]:
    """The compiled function and the code of its kernels; or one line that says which tool is missing."""
    try:
        fast = torch.compile(function, dynamic=False)
        _, (text, *_) = run_and_get_code(fast, *inputs)
    except Exception as error:  # the errors of torch.compile have no common class
        if reason := missing_tool(error):
            return reason, []
        raise
    kernels = re.findall(KERNEL, text, re.DOTALL)  # which begin at one of these marks:
    return fast, [k[max(0, k.find("@triton.jit"), k.find('extern "C"')) :].strip() for k in kernels]


def sentences(figures: dict) -> list[str]:
    lines, copy_rate, beyond_copy = [], figures["copy_bytes_per_s"], False
    for expression, variants in figures["cases"].items():
        eager = variants["eager"]
        for variant, result in variants.items():
            beyond_copy |= result["bytes"] > 1.1 * copy_rate * result["seconds"]
            if variant != "eager":
                speed = f"the speed is {eager['seconds'] / result['seconds']:.2f}x that of eager"
                if not differ(eager["seconds"], result["seconds"]):
                    speed = "the difference to eager is inside the spread"
                lines.append(
                    f"{expression}, {variant}: {speed}, {eager['predicted_s'] / result['predicted_s']:.2f}x predicted. "
                    f"Kernels launched: eager {eager['launches']}, this variant {result['launches']}."
                )
    faster = "Some rows are faster than a copy: a cache held their bytes, or something slowed the copy."
    return lines + [faster] * beyond_copy
