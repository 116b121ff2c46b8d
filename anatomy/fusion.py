"""Why does fusion speed up pointwise code?

Prediction, for tensors of N numbers of b bytes. A pointwise kernel computes far faster than it reads and
writes, so its time is that of a copy of as many bytes. For sigmoid(relu(x*w+b)), with w and b as large as x,
eager runs 4 kernels, which read or write 3 + 3 + 2 + 2 tensors: 10 N b bytes. Fused, by a compiler or by hand
in Triton, it is 1 kernel that reads x, w, b and writes y: 4 N b, so it is 2.5 times faster. At N = 2^26 in
FP32 and 4 TB/s: 0.27 ms instead of 0.67.

Some code gains little. x / x.sum() needs the sum before the first quotient: 3 N b bytes in any form. relu(x)
is one kernel of 2 N b already. An epilogue, work inside the kernel of a matrix product, saves only passes
over its output. Many small tensors in one kernel (horizontal fusion) save launches but no bytes: 64 of them
take 64 times as long as one. One call for all is 1 launch, but makes 64 outputs: as long as the same call on
tensors of one number.

Change: --numbers 4096. What limits the four kernels now? --edge 256: does the epilogue matter more?
Source: Ansel et al., PyTorch 2 (ASPLOS 2024), on Inductor's fusion.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from anatomy.lab import tl, triton

if triton:

    @triton.jit
    def gate_kernel(x_ptr, w_ptr, b_ptr, y_ptr, n, BLOCK: tl.constexpr):
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < n
        x, w, b = (
            tl.load(x_ptr + offsets, inside),
            tl.load(w_ptr + offsets, inside),
            tl.load(b_ptr + offsets, inside),
        )
        # Registers hold it until it is stored.
        y = 1 / (1 + tl.exp(-tl.maximum(x.to(tl.float32) * w + b, 0.0)))
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), inside)


def gate_in_triton(x, w, b):
    """sigmoid(relu(x * w + b)) of three tensors of one size, by one kernel."""
    y = torch.empty_like(x)
    gate_kernel[(triton.cdiv(x.numel(), 1024),)](x, w, b, y, x.numel(), BLOCK=1024)
    return y


def gate(x, w, b):
    return torch.sigmoid(torch.relu(x * w + b))


def quotient(x):
    return x / x.sum()


def linear_relu(a, m, c):
    return torch.relu(a @ m + c)


def linear_relu_in_blas(a, m, c):
    return torch._addmm_activation(c, a, m)


class Case(NamedTuple):
    expression: str
    form: str
    function: Callable | None  # None: not on this machine
    inputs: tuple
    host_s: float  # to launch it
    moved: int  # numbers read or written
    product_s: float = 0.0  # of the matrix product inside


def cases(lab, N, E, rand):
    """Every expression in each of its forms: vectors of N numbers, matrices of (E, E)."""
    (x, w, b), number, small = rand(3, N) + 1, rand(1), rand(64, 1024).unbind()
    (a, m), c = rand(2, E, E) / E, rand(E)
    launch_s, each_s = lab.seconds(lambda: number * 2), lab.seconds(lambda: small[0] * 2)
    product_s, numbers = lab.seconds(lambda: a @ m), [number for _ in range(64)]
    together_s = lab.seconds(lambda: torch._foreach_mul(numbers, 2))
    by_hand, compiled = gate_in_triton if lab.gpu and triton else None, torch.compile
    gated, quotients, products = "sigmoid(relu(x*w+b))", "x / x.sum()", "relu(A@B+c)"
    yield Case(gated, "eager", gate, (x, w, b), 4 * launch_s, 10 * N)
    yield Case(gated, "compiled", compiled(gate), (x, w, b), launch_s, 4 * N)
    yield Case(gated, "Triton by hand", by_hand, (x, w, b), launch_s, 4 * N)
    yield Case(quotients, "eager", quotient, (x,), 2 * launch_s, 3 * N)
    yield Case(quotients, "compiled", compiled(quotient), (x,), 2 * launch_s, 3 * N)
    yield Case("relu(x)", "compiled", compiled(torch.relu), (x,), launch_s, 2 * N)
    yield Case(products, "eager", linear_relu, (a, m, c), 3 * launch_s, 4 * E * E, product_s)
    yield Case(products, "compiled", compiled(linear_relu), (a, m, c), 2 * launch_s, 2 * E * E, product_s)
    yield Case(products, "BLAS", linear_relu_in_blas, (a, m, c), launch_s, 0, product_s)
    yield Case("64 small x * 2", "eager", lambda *xs: [x * 2 for x in xs], small, 64 * each_s, 0)
    yield Case("64 small x * 2", "one call", lambda *xs: torch._foreach_mul(xs, 2), small, together_s, 0)


def run(lab, numbers=None, edge=None, dtype=None):
    N, E = numbers or lab.pick(2**22, 2**23, 2**26), edge or lab.pick(512, 1024, 4096)
    dtype, answers = dtype or torch.float32, {}
    lab.title = f"N = {N}, A and B ({E}, {E}), {dtype}"
    for case in cases(lab, N, E, partial(torch.rand, device=lab.device, dtype=dtype)):
        n_bytes, measured = case.moved * dtype.itemsize, "needs a GPU and Triton"
        predicted = lab.expected(case.host_s, case.product_s + (lab.copy_seconds(n_bytes) if n_bytes else 0))
        if case.function:
            answer = answers.setdefault(case.expression, case.function(*case.inputs))
            torch.testing.assert_close(case.function(*case.inputs), answer, rtol=0.02, atol=0.05)
            measured = lab.seconds(partial(case.function, *case.inputs))
        what = f"{case.expression}, {case.form}"
        lab.row(what, measured, predicted, moved=f"{n_bytes / 1e6:.0f} MB")
    faster = lab.rows[0]["measured"] / lab.rows[1]["measured"]
    return f"Compiled, sigmoid(relu(x*w+b)) runs {faster:.2f} times as fast."
