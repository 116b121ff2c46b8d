"""When is an operation compute-bound, and when memory-bound?

Prediction. An operation of F FLOPs that moves Q bytes takes at least F / peak and at least Q / bandwidth
seconds: this is the roof. Its two parts meet at the ridge, where F / Q is peak / bandwidth. With 700 TFLOP/s
in BF16 and 4.2 TB/s that is 167 FLOP per byte. For numbers of b bytes, of which each is read or written once,
F / Q is

- 1 / 2b for ReLU, 5 / 2b for softmax and 8 / 2b for LayerNorm: 0.25 to 2 in BF16, far left of the ridge;
- 2 n^3 / 3 n^2 b = 2n / 3b for a product of (n, n) matrices: in BF16 it crosses 167 at n = 500;
- 2 B H T^2 D / 4 B H T D b = T / 2b for causal attention, fused: it crosses 167 at T = 670.

A third bound is in no roofline: the host launches the operation, which takes as long as the same operation on
the smallest input. That is measured first. On a GPU the longest of the three counts.

Change: --dtype float32 moves the ridge. Which operations change sides?
Source: Williams, Waterman and Patterson, Roofline (CACM 2009).
"""

from functools import partial

import torch
import torch.nn.functional as F

from anatomy.lab import rate, shown

CHANNELS, H, D = 1024, 16, 64
# FP16 runs at BF16's rate.
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}


def operations(lab, dtype, N, T):
    """Name -> function, its inputs, the smallest inputs, FLOPs, and the least bytes that it moves."""
    rand, b = partial(torch.randn, device=lab.device, dtype=dtype), dtype.itemsize
    x, row, weight, bias = rand(N // CHANNELS, CHANNELS), rand(1, CHANNELS), rand(CHANNELS), rand(CHANNELS)
    yield "ReLU", torch.relu, (x,), (row,), N, 2 * N * b
    # max, subtract, exp, sum, divide
    yield "softmax", partial(torch.softmax, dim=-1), (x,), (row,), 5 * N, 2 * N * b
    yield "LayerNorm", lambda x: F.layer_norm(x, (CHANNELS,), weight, bias), (x,), (row,), 8 * N, 2 * N * b
    for n in lab.pick((32, 128, 512), (32, 128, 512, 1024), (256, 512, 1024, 2048, 4096, 8192)):
        yield f"product, n = {n}", torch.matmul, rand(2, n, n), rand(2, 16, 16), 2 * n**3, 3 * n * n * b
    attention = partial(F.scaled_dot_product_attention, is_causal=True)
    qkv, shortest = rand(3, 1, H, T, D), rand(3, 1, 1, 16, D)
    yield f"attention, T = {T}", attention, qkv, shortest, 2 * H * T * T * D, 4 * H * T * D * b


def run(lab, numbers=None, length=None, dtype=None):
    dtype = dtype or (torch.bfloat16 if lab.amp else torch.float32)
    T, N = length or lab.pick(512, 1024, 4096), numbers or lab.pick(2**22, 2**23, 2**26)
    N = max(1, N // CHANNELS) * CHANNELS
    bandwidth, peak = rate("copy", lab.device), rate(PRECISIONS[dtype], lab.device)
    lab.title = f"{dtype}, copy {shown(bandwidth, 'B/s')}, product {shown(peak, 'FLOP/s')}"
    for name, function, inputs, smallest, flops, n_bytes in operations(lab, dtype, N, T):
        launch_s = lab.seconds(partial(function, *smallest))
        bounds = {"launch": launch_s, "memory": n_bytes / bandwidth, "arithmetic": flops / peak}
        roof_s = max(bounds["memory"], bounds["arithmetic"])
        measured_s = lab.seconds(partial(function, *inputs))
        cells = {"FLOP/byte": f"{flops / n_bytes:.3g}", "bound by": max(bounds, key=bounds.get)}
        lab.row(name, measured_s, lab.expected(launch_s, roof_s), **cells)
    return f"The ridge of this machine is at {peak / bandwidth:.0f} FLOP per byte."
