"""What do the number formats cost and give?

Prediction. A format with p bits after the leading one rounds a number by at most u = 2^-(p+1) of it; on
average, the root mean square of mantissas that are even on a logarithmic scale, by 0.4 u. A product of random
matrices rounds both inputs and its output: an error of 0.4 u sqrt(3) = 0.7 u, or 0.4 u sqrt(2) = 0.6 u with
an output in a finer format. BF16 has u = 2^-8, FP16 and TF32 2^-11, FP8 E4M3 2^-4. FP32 (2^-24) holds the
sums of all of them, so their length K matters to FP32 alone: a random walk of K steps, at most 0.4 u sqrt(K).
On tensor cores FLOP/s double with every halving of the bits: TF32 takes twice BF16's time, FP16 as long, FP8
half. FP64 takes twice FP32's on a CPU, on an H200 as long.

FP16 ends at 65 504 and 6e-8, FP8 E4M3 at 448 and 0.002; BF16 has FP32's range. So FP8 stores numbers times a
scale. Delayed scaling takes it from earlier tensors: it reads 2 bytes and writes 1 per BF16 number. Current
scaling first looks for the largest, 2 bytes more; block scaling among 128 numbers, which stay in registers.
Delayed scaling cuts an outlier off, and the others stay as they were. Current scaling makes room for it: the
others get coarse.

Change: --size 512. Which formats are still faster than FP32?
Source: Micikevicius et al., Mixed Precision Training (2017) and FP8 Formats for Deep Learning (2022).
"""

from functools import partial

import torch

from anatomy.lab import rate
from common.hardware import compute_capability, multiply_fp8

FP8, FP8_MAX, BLOCK, OUTLIER = torch.float8_e4m3fn, 448.0, 128, 1e5
FORMATS = {  # name: dtype, u, error over u, time over BF16's on tensor cores, the first GPUs that multiply it
    "BF16": (torch.bfloat16, 2.0**-8, 0.7, 1, (8, 0)),
    "FP16": (torch.float16, 2.0**-11, 0.7, 1, (7, 0)),
    "TF32": (torch.float32, 2.0**-11, 0.6, 2, (8, 0)),
    "FP8": (FP8, 2.0**-4, 0.6, 0.5, (8, 9)),
}


def delayed_scaling(x, amax):
    """FP8 numbers, and the scale that restores x = numbers * scale."""
    return (x.float() * (FP8_MAX / amax)).clamp(-FP8_MAX, FP8_MAX).to(FP8), (amax / FP8_MAX).float()


def current_scaling(x, _=None):
    """FP8 numbers by one scale, which the largest number of this tensor gives, and the scale."""
    return delayed_scaling(x, x.abs().amax().float())


def block_scaling(x, _=None):
    """FP8 numbers by a scale for every BLOCK numbers of a row, and these scales. `x` is (N, K), K a
    multiple of BLOCK; raises RuntimeError for another."""
    blocks = x.view(x.size(0), -1, BLOCK)
    return delayed_scaling(blocks, blocks.abs().amax(-1, keepdim=True).float())


def product_of(name, a, b, native):
    """A call that multiplies two matrices in the format `name`; FP8 in hardware if `native`, else in FP32."""
    if name != "FP8":
        return partial(torch.matmul, a.to(FORMATS[name][0]), b.to(FORMATS[name][0]))
    # The second by columns, for cuBLAS.
    (x, s), (y, t) = (current_scaling(a), current_scaling(b.t().contiguous()))
    if native:
        return partial(multiply_fp8, x, y.t(), s, t)
    return lambda: (x.float() * s) @ (y.float() * t).t()


def relative(x, reference):
    """The norm of the error over the norm of the reference, both in FP64."""
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def products(lab, size):
    """Rows for each format; returns how much faster than FP32 the fastest is."""
    a, b = torch.randn(2, size, size, device=lab.device)
    a64, b64, times = a.double(), b.double(), {"FP32": lab.seconds(lambda: a @ b)}
    exact = a64 @ b64
    lab.title = f"({size}, {size}) products; errors relative to FP64"
    lab.row("FP32: error", relative(a @ b, exact), 0.4 * size**0.5 * 2**-24, "", at_most=True)
    lab.row("FP32: time", times["FP32"])
    lab.row("FP64: time", lab.seconds(lambda: a64 @ b64), times["FP32"] * (1 if lab.gpu else 2))
    for name, (_, u, error, time, first) in FORMATS.items():
        native = compute_capability(lab.device) >= first
        torch.set_float32_matmul_precision("high" if name == "TF32" else "highest")
        product = product_of(name, a, b, native)
        if native or name != "TF32":  # a CPU has no TF32, and emulates the others
            lab.row(f"{name}: error", relative(product(), exact), error * u, "")
        times |= {name: lab.seconds(product)} if native else {}
        lab.row(f"{name}: time", times.get(name, "needs a newer GPU"), times.get("BF16", 0) * time or None)
    torch.set_float32_matmul_precision("highest")
    return times["FP32"] / min(times.values())


def quantization(lab, size):
    plain = torch.randn(size, size, device=lab.device).bfloat16()
    spiked, history = plain.clone(), plain.abs().amax().float()
    spiked[0, 0] = OUTLIER
    lab.title = f"A ({size}, {size}) BF16 tensor to FP8 E4M3; its error, and with one outlier of {OUTLIER:g}"
    for recipe, n_bytes in ((delayed_scaling, 3), (current_scaling, 5), (block_scaling, 3)):
        # On a CPU several kernels: no prediction.
        fast = torch.compile(recipe, dynamic=False) if lab.gpu else recipe
        (x, s), (y, t) = fast(plain, history), fast(spiked, history)
        restored = (y.float() * t).view_as(plain)
        errors = {"error": f"{relative((x.float() * s).view_as(plain), plain):.1%}"}
        errors["of other rows"] = f"{relative(restored[1:], spiked[1:]):.1%}"
        errors["of the outlier"] = f"{relative(restored[0, 0], spiked[0, 0]):.1%}"
        predicted = plain.numel() * n_bytes / rate("copy", lab.device) if lab.gpu else None
        lab.row(recipe.__name__, lab.seconds(partial(fast, plain, history)), predicted, **errors)


def run(lab, size=None):
    faster = products(lab, size or lab.pick(256, 512, 4096))
    quantization(lab, lab.pick(256, 512, 16384))
    return f"The fastest format multiplies {faster:.1f} times as fast as FP32."
