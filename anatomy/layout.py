"""What does a layout cost, and what does a compiler rewrite?

Prediction, for an (M, K) input that is a transposed view. Transposing swaps strides and moves nothing. A
matrix product takes as long as on a contiguous input: BLAS reads either layout. A pointwise operation on this
input alone, too: its output gets the same strides. With a contiguous operand it reads one of both out of
order, as a negation into a contiguous output does: what that takes longer is measured first. A sum takes as
long if its kernel reads whole lines. `.contiguous()` costs a copy first. A convolution takes at most as long
in channels-last, as tensor cores multiply.

Inductor, the compiler behind torch.compile, drops what nobody reads, computes constants and equal expressions
once, and fuses pointwise operations: each leaves 1 kernel. Products stay calls of BLAS: relu(A @ B) + c is 2
launches, four products with one input stay 4, two in a row 2. Eager rounds each intermediate result, a fused
kernel the last alone. The results of x * w, + b and + x have variances 1, 2 and 3: so fused, it errs sqrt(3 /
6) = 0.71 times as much.

Change: --m 64 --k 262144 and --m 262144 --k 64 have the same bytes. Which loses more in x + y?
Source: PyTorch's documentation of tensor views; Ansel et al., PyTorch 2 (ASPLOS 2024), on Inductor's passes.
"""

from functools import partial

import torch
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code

REWRITES = {  # what: (function of two square matrices, kernels when compiled)
    "dead code": (lambda x, w: (torch.sin(x) * 3, x + w)[1], 1),
    "constants: 2 * 3 * x + 4 * 0.5 + w": (lambda x, w: 2 * 3 * x + torch.full_like(x, 4) * 0.5 + w, 1),
    "equal expressions: sin(x) * w + sin(x)": (lambda x, w: torch.sin(x) * w + torch.sin(x), 1),
    "two outputs of one input": (lambda x, w: (x + w, x - w), 1),
    "relu(x @ w) + x": (lambda x, w: torch.relu(x @ w) + x, 2),
    "relu(x @ w + b), b a vector": (lambda x, w: torch.relu(x @ w + w[0]), 2),
    "four products with one input": (lambda x, w: [x @ part for part in w.chunk(4, dim=1)], 4),
    "two products in a row": (lambda x, w: (x @ w) @ w, 2),
}


def kernels_of(function, *inputs):
    """How many kernels the compiled function launches: generated ones, and calls of BLAS."""
    torch._dynamo.reset()
    metrics.reset()
    _, codes = run_and_get_code(torch.compile(function, dynamic=False), *inputs)
    in_blas = sum(code.count(f"extern_kernels.{name}(") for code in codes for name in ("mm", "addmm", "bmm"))
    return metrics.generated_kernel_count + in_blas


def strides(lab, M, N, K, dtype):
    """Rows for a contiguous input and its transposed view; returns how much longer x + y takes with the
    view."""
    x = torch.randn(M, K, device=lab.device, dtype=dtype or torch.float32)
    view, y = x.t().contiguous().t(), torch.randn_like(x)  # the same numbers, stored by columns
    right, negate = (
        torch.randn(K, N, device=lab.device, dtype=x.dtype) / K**0.5,
        partial(torch.neg, out=y.clone()),
    )
    copy_s, lost_s = (
        lab.seconds(view.contiguous),
        lab.seconds(partial(negate, view)) - lab.seconds(partial(negate, x)),
    )
    operations = {
        "x @ w": right.__rmatmul__,
        "x * 2": partial(torch.mul, other=2),
        "sum": partial(torch.sum, dim=-1),
    }
    lab.title = (
        f"A ({M}, {K}) transposed view, times ({K}, {N}), {x.dtype}; predicted from the contiguous input"
    )
    for name, operation in {**operations, "x + y": y.add}.items():
        plain_s, view_s = lab.seconds(partial(operation, x)), lab.seconds(partial(operation, view))
        first_s = lab.seconds(lambda operation=operation: operation(view.contiguous()))
        lab.row(name, view_s, plain_s + (lost_s if name == "x + y" else 0.0))
        lab.row(f"{name}, .contiguous() first", first_s, plain_s + copy_s)
    return view_s / plain_s


def run(lab, m=None, n=None, k=None, dtype=None):
    size, edge, last = lab.pick(512, 1000, 4096), lab.pick(128, 512, 4096), torch.channels_last
    ratio = strides(lab, m or size, n or size, k or size, dtype)
    how = {"device": lab.device, "dtype": torch.float16 if lab.gpu else torch.float32}
    images, convolution = (
        torch.randn(lab.pick(2, 2, 32), 64, 64, 64, **how),
        torch.nn.Conv2d(64, 128, 3, **how),
    )
    plain_s = lab.seconds(partial(convolution, images))
    convolved = partial(convolution.to(memory_format=last), images.to(memory_format=last))
    lab.row("convolution, channels-last", lab.seconds(convolved), plain_s, at_most=True)
    x, w, b = torch.randn(3, edge, edge, device=lab.device) / edge**0.5
    lab.title = f"Kernels when compiled, ({edge}, {edge}) matrices"
    for what, (function, kernels) in REWRITES.items():
        lab.row(what, kernels_of(function, x, w), kernels, "")

    def summed(x, w, b):
        return x * w + b + x

    x, w, b = torch.randn(3, edge, edge, device=lab.device).bfloat16()
    exact = summed(x.double(), w.double(), b.double())
    errors = [
        (form(x, w, b).double() - exact).norm() for form in (summed, torch.compile(summed, dynamic=False))
    ]
    lab.row(
        "error of x * w + b + x in BF16, over eager's", (errors[1] / errors[0]).item(), (3 / 6) ** 0.5, ""
    )
    return f"x + y takes {ratio:.2f} times as long where x is a transposed view."
