"""Why is fusion the lever for pointwise code?

Prediction, for tensors of N numbers of b bytes. A pointwise kernel computes in no time and waits for memory, so its
time is its bytes over the copy bandwidth. sigmoid(relu(x*w+b)) with w and b as large as x:

- eager, four kernels: 3 + 3 + 2 + 2 tensors read or written, 10 N b = 40 N bytes in FP32;
- fused, one kernel: x, w, b read, y written, 4 N b = 16 N bytes: 2.5 times faster. At N = 2^26 and 4 TB/s that is
  0.67 ms against 0.27 ms.

What fusion cannot do: x / x.sum() needs the sum before the first quotient, so x is read twice either way, 3 N b; and
relu(x) alone is one kernel already, 2 N b. A product's epilogue saves passes over its output only; many small tensors
in one kernel (horizontal fusion) save launches and no bytes.

Source: the PyTorch documentation of torch.compile; Ansel et al., PyTorch 2 (ASPLOS 2024), on Inductor's fusion.
Run:    python -m anatomy fusion --numbers 67108864 --edge 4096
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial

import torch
from torch._inductor.utils import run_and_get_code

from anatomy.experiment import Result, Table, default_size, launches, positive, seconds, us
from common import roofs
from common.errors import missing_tool

SMALL, MANY = 1024, 64  # numbers in a small tensor, and how many of those
KERNEL = r"async_compile\.(?:triton|cpp_pybinding)\(.*?'''(.*?)'''"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    numbers = "numbers per tensor (default: 2^26 on a GPU, 2^23 on a CPU)"
    parser.add_argument("--numbers", type=positive, metavar="N", help=numbers)
    edge = "edge of the matrices of the product (default: 4096 on a GPU, 1024 on a CPU)"
    parser.add_argument("--edge", type=positive, metavar="N", help=edge)


def run(args: argparse.Namespace) -> Result:
    device, dtype = args.device, args.dtype or torch.float32
    N = args.numbers or default_size(args, quick=2**22, cpu=2**23, gpu=2**26)
    E = args.edge or default_size(args, quick=512, cpu=1024, gpu=4096)
    x, w, b = torch.rand(3, N, device=device, dtype=dtype) + 1  # no sum near zero to divide by
    matrices = *torch.randn(2, E, E, device=device, dtype=dtype) / E**0.5, torch.randn(E, device=device, dtype=dtype)
    small = list(torch.randn(MANY, SMALL, device=device, dtype=dtype))
    copy_rate = roofs.copy_rate(device)
    product_s = seconds(lambda: matrices[0] @ matrices[1], args.iters)
    launch_s = seconds(lambda: small[0] * 2, args.iters)

    def gate(x, w, b):
        return torch.sigmoid(torch.relu(x * w + b))

    def normalize(x):
        return x / x.sum()

    def linear_relu(a, w, c):
        return torch.relu(a @ w + c)

    def epilogue(a, w, c):
        return torch._addmm_activation(c, a, w)  # inside the product's kernel, where BLAS has that

    def loop(*tensors):
        return [t * 2 for t in tensors]

    def foreach(*tensors):
        return torch._foreach_mul(tensors, 2)

    chain, gemm, many = "sigmoid(relu(x*w+b))", "relu(A@B+c)", f"{MANY} small x*2"
    # expression, variant, function, its arguments, numbers read and written at least, and seconds besides these
    cases = [
        (chain, "eager", gate, (x, w, b), 10 * N, 0),
        (chain, "compiled", gate, (x, w, b), 4 * N, 0),
        (chain, "Triton by hand", triton_gate(device), (x, w, b), 4 * N, 0),
        ("x / x.sum()", "eager", normalize, (x,), 3 * N, 0),
        ("x / x.sum()", "compiled", normalize, (x,), 3 * N, 0),
        ("relu(x)", "eager", torch.relu, (x,), 2 * N, 0),
        ("relu(x)", "compiled", torch.relu, (x,), 2 * N, 0),
        (gemm, "eager", linear_relu, matrices, 4 * E * E, product_s),  # passes over the output, besides the product
        (gemm, "compiled", linear_relu, matrices, 2 * E * E, product_s),
        (gemm, "BLAS epilogue", epilogue, matrices, 0, product_s),
        (many, "eager", loop, small, 2 * MANY * SMALL, MANY * launch_s),
        (many, "_foreach_mul", foreach, small, 2 * MANY * SMALL, launch_s),
    ]
    figures, rows, code, expected = {}, [], "", {}
    for expression, variant, function, inputs, numbers, base_s in cases:
        n_bytes, kernels = numbers * dtype.itemsize, []
        if variant == "compiled":
            function, kernels = compiled(function, inputs)
            code = code or "\n".join(kernels)
        if isinstance(function, str):  # why it cannot run
            rows.append([expression, variant, "-", f"{n_bytes / 1e6:.1f}", "-", function, "-", "-"])
            continue
        expected.setdefault(expression, function(*inputs))  # eager comes first
        torch.testing.assert_close(function(*inputs), expected[expression], rtol=0.02, atol=0.05)
        call = partial(function, *inputs)
        # A CPU's trace does not show generated functions.
        n_launches = launches(call, device) + (len(kernels) if device.type == "cpu" else 0)
        found = {"launches": n_launches, "bytes": n_bytes, "seconds": seconds(call, args.iters)}
        figures.setdefault(expression, {})[variant] = found | {"predicted_s": base_s + n_bytes / copy_rate}
        rate = n_bytes / found["seconds"]
        row = [expression, variant, str(n_launches), f"{n_bytes / 1e6:.1f}", us(base_s + n_bytes / copy_rate)]
        reached = ["-", "-"] if base_s else [f"{rate / 1e9:.1f}", f"{rate / copy_rate:.0%}"]
        rows.append([*row, us(found["seconds"]), *reached])
    headers = ["expression", "variant", "launches", "least MB", "predicted us", "measured us", "GB/s", "of copy"]
    title = f"N = {N}, A and B ({E}, {E}), {dtype}; copy {copy_rate / 1e9:.1f} GB/s; least MB: beside the product A@B"
    figures = {"copy_bytes_per_s": copy_rate, "numbers": N, "edge": E, "cases": figures}
    listings = {f"What torch.compile made of {chain}:": code} if code else {}
    return Result([Table(title, headers, rows)], sentences(figures), figures, listings=listings)


def triton_gate(device: torch.device) -> Callable | str:
    try:
        from anatomy.fusion_kernel import gate as written_by_hand
    except ImportError:
        return "Triton is not installed"
    return written_by_hand if device.type == "cuda" else "needs a GPU"


def compiled(function: Callable, inputs: tuple) -> tuple[Callable | str, list[str]]:
    """The function compiled, and the kernels it was given; or why not."""
    try:
        fast = torch.compile(function, dynamic=False)
        _, (text, *_) = run_and_get_code(fast, *inputs)
    except Exception as error:  # torch.compile's errors have no common class
        if reason := missing_tool(error):
            return reason, []
        raise
    starts = ("@triton.jit", 'extern "C"')  # what comes before is set-up
    kernels = re.findall(KERNEL, text, re.DOTALL)
    return fast, [k[max(0, *(k.find(start) for start in starts)) :].strip() for k in kernels]


def sentences(figures: dict) -> list[str]:
    said, copy_rate, fast = [], figures["copy_bytes_per_s"], False
    for expression, variants in figures["cases"].items():
        eager = variants["eager"]
        for variant, found in variants.items():
            fast |= found["bytes"] > 1.1 * copy_rate * found["seconds"]
            if variant != "eager":
                said.append(
                    f"{expression}, {variant}: {eager['seconds'] / found['seconds']:.2f}x the speed of eager, "
                    f"{eager['predicted_s'] / found['predicted_s']:.2f}x predicted; "
                    f"launches: {eager['launches']} to {found['launches']}."
                )
    beyond = "In places more bytes a second than a copy reached: a cache held them, or something slowed the copy."
    return [*said, beyond] if fast else said
