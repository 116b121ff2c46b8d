"""What does torch.compile rewrite, and what does it leave as it is?

Predict: which of these become fewer kernels: a result that nobody reads, 2 * 3 * x, the same sine twice, relu(A @ B) +
c, four products with one input, two products in a row? Do the numbers change?

Prediction. Inductor, the compiler behind torch.compile, drops what nobody reads (dead code), computes constants once
(constant folding), computes equal expressions once, and fuses pointwise operations with each other, over their inputs
too. Each of these leaves 1 kernel. It does not take matrix products apart: they stay calls of BLAS. So relu(A @ B) + c
is 2 launches, the product and one pointwise kernel, unless BLAS takes the epilogue. Four products with one input
stay 4, and two products in a row stay 2.

Numbers: eager rounds every intermediate result to the format, and a fused kernel keeps it in FP32. For random x, w and
b the results of x * w, + b and + x have variances 1, 2 and 3, and each rounding errs in proportion to its result. Eager
rounds all three, a fused kernel only the last. So with BF16 inputs it has sqrt(3 / 6) = 0.71 of eager's error.

Change: add a print between the two pointwise operations of a case: how many kernels now? --edge 64: does a small
product change anything?
Source: the documentation of torch.compile; Ansel et al., PyTorch 2 (ASPLOS 2024), on Inductor's passes.
Run:    python -m anatomy rewrites [--edge N] [--only NAME ...]
"""

import argparse
from collections.abc import Callable

import torch
from torch._inductor.utils import run_and_get_code

from anatomy.experiment import Check, Result, launches, seconds, size_argument, table, us
from common.errors import missing_tool


def dead_code(x, w):
    torch.sin(x) * 3  # nobody reads this
    return x + w


def constant_folding(x, w):
    return 2 * 3 * x + torch.full_like(x, 4) * 0.5 + w


def common_subexpression(x, w):
    return torch.sin(x) * w + torch.sin(x)


def two_outputs(x, w):
    return x + w, x - w


def product_epilogue(x, w):
    return torch.relu(x @ w) + x


def one_input(x, w):
    return [x @ part for part in w.chunk(4, dim=1)]


def products_in_a_row(x, w):
    return (x @ w) @ w


CASES: dict[str, tuple[Callable, int]] = {  # name -> function, and the kernels that the compiled form should launch
    "dead code": (dead_code, 1),
    "constant folding": (constant_folding, 1),
    "common subexpression": (common_subexpression, 1),
    "two outputs of one input": (two_outputs, 1),
    "relu(x @ w) + x": (product_epilogue, 2),
    "four products with one input": (one_input, 4),
    "two products in a row": (products_in_a_row, 2),
}
NUMBERS = "x * w + b + x"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size_argument(parser, "--edge N", "edge of the square matrices (default: 4096 on a GPU, 512 on a CPU)")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help=f"some of: {', '.join(CASES)}")


def compiled(function: Callable, inputs: tuple, device: torch.device) -> tuple[Callable, int]:
    """The compiled function, and how many kernels it launches; on a CPU generated kernels and calls of BLAS."""
    torch._dynamo.reset()
    fast = torch.compile(function, dynamic=False)
    _, (code, *_) = run_and_get_code(fast, *inputs)
    if device.type == "cuda":
        return fast, launches(lambda: fast(*inputs), device)
    generated = code.count("async_compile.cpp")
    return fast, generated + sum(code.count(f"extern_kernels.{name}(") for name in ("mm", "addmm", "bmm"))


def run(args: argparse.Namespace) -> Result:
    device, dtype = args.device, args.dtype or torch.float32
    edge = args.edge or (4096 if device.type == "cuda" else 512)
    x, w = torch.randn(2, edge, edge, device=device, dtype=dtype) / edge**0.5
    figures, rows, checks = {}, [], []
    try:
        for name in args.only or CASES:
            function, predicted = CASES[name]
            fast, count = compiled(function, (x, w), device)
            torch.testing.assert_close(fast(x, w), function(x, w), rtol=0.02, atol=0.02)
            plain = launches(lambda f=function: f(x, w), device)
            times = {"eager_s": seconds(lambda f=function: f(x, w), args.iters)}
            times["compiled_s"] = seconds(lambda f=fast: f(x, w), args.iters)
            figures[name] = {"eager_launches": plain, "launches": count} | times
            checks.append(Check(f"kernels of {name}", predicted, count, ""))
            rows.append({"case": name, "eager launches": plain, "compiled launches": count})
            rows[-1] |= {"eager us": us(times["eager_s"]), "compiled us": us(times["compiled_s"])}
        errors = rounding(edge, device)
    except Exception as error:  # the errors of torch.compile have no common class
        if reason := missing_tool(error):
            return Result([], [f"Nothing was compiled: {reason}."], {"cases": figures})
        raise
    ratio = errors["compiled"] / errors["eager"]
    checks.append(Check(f"error of {NUMBERS} in BF16, over eager's", (3 / 6) ** 0.5, ratio, ""))
    tables = [table(f"Eager and compiled, ({edge}, {edge}) matrices, {dtype}", rows)]
    tables.append(table(f"Error of {NUMBERS} in BF16 against FP64, relative",
                        [{"form": form, "error": f"{error:.2e}"} for form, error in errors.items()]))  # fmt: skip
    return Result(tables, sentences(figures, errors), {"edge": edge, "cases": figures, "errors": errors}, checks)


def rounding(edge: int, device: torch.device) -> dict[str, float]:
    """The relative error of a pointwise expression of BF16 numbers, in eager and compiled."""
    x, w, b = torch.randn(3, edge, edge, device=device).bfloat16()

    def function(x, w, b):
        return x * w + b + x

    exact = function(x.double(), w.double(), b.double())
    forms = {"eager": function, "compiled": torch.compile(function, dynamic=False)}
    return {name: ((form(x, w, b).double() - exact).norm() / exact.norm()).item() for name, form in forms.items()}


def sentences(figures: dict, errors: dict) -> list[str]:
    fewer = [name for name, row in figures.items() if row["launches"] < row["eager_launches"]]
    same = [name for name in figures if name not in fewer]
    same_error = errors["compiled"] == errors["eager"]
    compiled = f"the compiled form of {NUMBERS} has"
    numbers = (
        f"In BF16 {compiled} the error of eager." if same_error else
        f"The numbers are not the same: in BF16 {compiled} {errors['compiled'] / errors['eager']:.2f} of eager's error."
    )  # fmt: skip
    return [
        f"Compiled, these launch fewer kernels: {', '.join(fewer) or 'none'}.",
        f"These launch as many as before: {', '.join(same) or 'none'}.",
        numbers,
    ]
