"""Three ways to scale a tensor to FP8, and a product of two such tensors, in plain PyTorch, for `precision`.

Each recipe takes a tensor and the largest magnitude of earlier tensors. It returns FP8 numbers and the scales that
restore the tensor: x = numbers * scales.
"""

from collections.abc import Callable

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
BLOCK = 128  # numbers that share a scale


def delayed_scaling(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.float() * (FP8_MAX / amax)).clamp(-FP8_MAX, FP8_MAX).to(FP8), (amax / FP8_MAX).float()


def current_scaling(x: torch.Tensor, _: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return delayed_scaling(x, x.abs().amax().float())


def block_scaling(x: torch.Tensor, _: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """From an (M, K) tensor: numbers of shape (M, K / BLOCK, BLOCK) and scales of shape (M, K / BLOCK, 1)."""
    blocks = x.view(x.size(0), -1, BLOCK)
    return delayed_scaling(blocks, blocks.abs().amax(-1, keepdim=True).float())


RECIPES = {  # name: recipe, and the bytes that it must read and write of a 2-byte number
    "delayed scaling": (delayed_scaling, 3), "current scaling": (current_scaling, 5),
    f"1 x {BLOCK} blocks": (block_scaling, 3),
}  # fmt: skip


def fp8_product(a: torch.Tensor, b: torch.Tensor, native: bool) -> Callable[[], torch.Tensor]:
    """A function that multiplies a and b, rounded to FP8. Without `native`, FP32 multiplies the rounded numbers."""
    (x, s), (y, t) = current_scaling(a), current_scaling(b.t().contiguous())  # cuBLAS needs the second by columns
    if native:  # a private function, but the only FP8 product of PyTorch
        return lambda: torch._scaled_mm(x, y.t(), s, t, out_dtype=torch.bfloat16, use_fast_accum=True)
    return lambda: (x.float() * s) @ (y.float() * t).t()
