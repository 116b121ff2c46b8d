"""Why a kernel of `precision` took longer than its bytes or the library's kernel, measured on a GPU."""

from functools import partial

import torch

from anatomy.experiment import AGAIN, Cause, Check, near, seconds, us
from anatomy.misses import cause_of_miss
from anatomy.quantize import RECIPES


def of_recipe(check: Check, name: str, size: int, device: torch.device) -> Cause:
    """Of a compiled recipe on a (size, size) BF16 tensor: writing single bytes may be slower than a copy."""
    plain = torch.randn(size, size, device=device).bfloat16()
    recipe, n_bytes = torch.compile(RECIPES[name][0], dynamic=False), RECIPES[name][1] * plain.numel()

    def by_cast() -> str | None:
        cast = torch.compile(lambda x: x.view(torch.int16).to(torch.int8), dynamic=False)
        cast_s, at_copy_rate = seconds(partial(cast, plain), AGAIN), check.predicted * 3 * plain.numel() / n_bytes
        if not near(check.predicted + cast_s - at_copy_rate, check.measured):
            return None
        return (
            f"a cast of as many numbers to one byte, without scales, takes {us(cast_s)} us, where a copy of its bytes "
            f"would take {us(at_copy_rate)}: single bytes are written more slowly"
        )

    return cause_of_miss(check, partial(recipe, plain, plain.abs().amax().float()), device, slow_kernels=by_cast)


def of_product(check: Check, size: int, device: torch.device) -> Cause:
    """Of a (size, size) product in Triton: another tile may be faster."""
    from anatomy.product_kernel import product, tiles

    a, b = torch.randn(2, size, size, device=device).bfloat16()

    def by_tiles() -> str:
        times = {tile: seconds(partial(product, a, b, tile), AGAIN) for tile in tiles(device)}
        best = min(times, key=times.get)
        ends = "that is near" if near(times[best], check.predicted) else "so it is not the tile that is slow"
        return (
            f"the fastest of {len(times)} tiles, {' x '.join(map(str, best[:3]))}, takes {us(times[best])} us: {ends}"
        )

    return cause_of_miss(check, partial(product, a, b), device, slow_kernels=by_tiles)
