"""A matrix product by hand in Triton, for `precision`. The import needs Triton, and the call needs a GPU.

After Triton's tutorial on matrix multiplication: tiles of the output in groups, so that L2 keeps what neighbours read.
"""

import torch
import triton
import triton.language as tl

GROUP = 8  # rows of tiles that run together
HOPPER, OTHERS = (256, 128, 64, 8), (128, 128, 32, 4)  # tile of M, N and K, and warps: what their shared memory holds
MORE = (128, 256, 64, 8), (128, 128, 64, 8), (128, 128, 64, 4)  # of Hopper


@triton.jit
def kernel(a_ptr, b_ptr, c_ptr, M, N, K, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, GROUP: tl.constexpr):
    tile, across = tl.program_id(0), tl.cdiv(N, TN)
    group = tile // (GROUP * across)
    rows_in_group = min(tl.cdiv(M, TM) - group * GROUP, GROUP)
    inside = tile % (GROUP * across)
    row, column = group * GROUP + inside % rows_in_group, inside // rows_in_group
    m, n, k = row * TM + tl.arange(0, TM), column * TN + tl.arange(0, TN), tl.arange(0, TK)
    a_tile, b_tile = a_ptr + m[:, None] * K + k[None, :], b_ptr + k[:, None] * N + n[None, :]
    total = tl.zeros((TM, TN), tl.float32)
    for _ in range(0, K, TK):
        total = tl.dot(tl.load(a_tile), tl.load(b_tile), total)
        a_tile += TK
        b_tile += TK * N
    tl.store(c_ptr + m[:, None] * N + n[None, :], total.to(c_ptr.dtype.element_ty))


def tiles(device: torch.device) -> list[tuple[int, int, int, int]]:
    """Tiles that this GPU can hold; the first is the one to use."""
    return [HOPPER, *MORE, OTHERS] if torch.cuda.get_device_capability(device)[0] == 9 else [OTHERS]


def product(a: torch.Tensor, b: torch.Tensor, tile: tuple[int, int, int, int] | None = None) -> torch.Tensor:
    """a @ b of contiguous (M, K) and (K, N) matrices with 16-bit numbers, whose edges are multiples of 256."""
    (M, K), N = a.shape, b.size(1)
    TM, TN, TK, warps = tile or tiles(a.device)[0]
    c = torch.empty(M, N, device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(M, TM) * triton.cdiv(N, TN),)
    kernel[grid](a, b, c, M, N, K, TM=TM, TN=TN, TK=TK, GROUP=GROUP, num_warps=warps, num_stages=3)
    return c
