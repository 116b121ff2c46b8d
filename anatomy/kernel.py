"""What must the author of a kernel get right: enough work in flight, and large tiles?

Prediction. Bytes take a latency to arrive, so a multiprocessor moves as many as it has asked for in that time
(Little's law). Programs on it, its occupancy, ask one by one: a copy by p times as many programs is p times
as fast, until it reaches the rate of DRAM.

A product of (n, n) matrices in tiles of (t, t) loads each row of one input and each column of the other n / t
times: 4 n^3 / t bytes in BF16. At 64 bytes a clock, which is what L2 gives each multiprocessor, small tiles
wait for L2, and large ones reach the time of the library's product. A tile's numbers are in registers: too
large a one has no room.

Change: --edge 1024. Which tile is best where 256 of (64, 64) must feed all multiprocessors?
Source: NVIDIA, CUDA C++ Best Practices Guide, on occupancy; Triton's tutorial on matrix multiplication.
"""

from functools import partial

import torch

from anatomy.lab import LARGE_COPY, rate, tl, triton
from common.hardware import clock_and_power

LARGEST_TILE = 256
L2_BYTES_A_CLOCK = 64  # to each multiprocessor, of Ampere and Hopper

if triton:

    @triton.jit
    def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        for block in range(tl.program_id(0), n // BLOCK, tl.num_programs(0)):
            offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(y_ptr + offsets, tl.load(x_ptr + offsets))

    @triton.jit
    def product_kernel(a_ptr, b_ptr, c_ptr, n, TILE: tl.constexpr, DEPTH: tl.constexpr):
        rows = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
        columns, k = tl.program_id(0) * TILE + tl.arange(0, TILE)[None, :], tl.arange(0, DEPTH)
        total = tl.zeros((TILE, TILE), tl.float32)
        for start in range(0, n, DEPTH):
            a = tl.load(a_ptr + rows * n + start + k[None, :])
            total = tl.dot(a, tl.load(b_ptr + (start + k[:, None]) * n + columns), total)
        tl.store(c_ptr + rows * n + columns, total.to(tl.bfloat16))


def run(lab, edge=None):
    if not (lab.gpu and triton):
        lab.row("a copy, a product", "needs a GPU and Triton")
        return "Kernels are written for GPUs here."
    processors, edge = torch.cuda.get_device_properties(lab.device).multi_processor_count, edge or 4096
    x, y = torch.ones(2, LARGE_COPY["cuda"] // 8, device=lab.device)
    lab.title, alone = f"A copy by programs of 4 warps on each of {processors} multiprocessors", None
    for programs in (1, 2, 4, 8, 16):
        copy = partial(copy_kernel[(processors * programs,)], x, y, x.numel(), BLOCK=1024, num_warps=4)
        reached = 2 * x.nbytes / lab.device_seconds(copy, 10)
        predicted = min(rate("copy", lab.device), programs * alone) if alone else None
        lab.row(f"{programs} programs", reached, predicted, "B/s")
        alone = alone or reached
    if edge % LARGEST_TILE:
        raise ValueError(f"--edge {edge} is no multiple of the largest tile, {LARGEST_TILE}")
    lab.title = f"A product of ({edge}, {edge}) matrices in BF16"
    a, b, c = torch.randn(3, edge, edge, device=lab.device, dtype=torch.bfloat16)
    library_s = lab.device_seconds(lambda: torch.matmul(a, b, out=c))
    expected, times = c.clone(), []
    clock_mhz, _ = clock_and_power(lab.device) or (0, 0)  # no prediction without NVML
    l2_rate = processors * L2_BYTES_A_CLOCK * clock_mhz * 1e6
    lab.row("the library's", library_s, 2 * edge**3 / rate("bf16", lab.device))
    for tile in (16, 32, 64, 128, LARGEST_TILE):
        grid, warps = (edge // tile, edge // tile), max(1, min(8, tile // 16))
        product = partial(
            product_kernel[grid], a, b, c, edge, TILE=tile, DEPTH=max(16, min(64, tile)), num_warps=warps
        )
        times.append(lab.device_seconds(product, 10))
        torch.testing.assert_close(c, expected, rtol=0.02, atol=0.5)
        predicted_s = max(library_s, 4 * edge**3 / tile / l2_rate) if l2_rate else None
        lab.row(f"tiles of ({tile}, {tile})", times[-1], predicted_s)
    return f"The best tile takes {min(times) / library_s:.2f} times as long as the library's product."
