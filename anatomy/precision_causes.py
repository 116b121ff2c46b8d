"""Why a kernel of `precision` took longer than its bytes or the library's kernel, measured on a GPU."""

from functools import partial

import torch

from anatomy.experiment import AGAIN, Cause, Check, near, seconds, us
from anatomy.misses import cause_of_miss
from anatomy.quantize import RECIPES


def of_recipe(check: Check, name: str, size: int, device: torch.device) -> Cause:
    """Of a compiled recipe on a (size, size) BF16 tensor: its kernels tell which pass is slow."""
    plain = torch.randn(size, size, device=device).bfloat16()
    recipe = torch.compile(RECIPES[name][0], dynamic=False)
    return cause_of_miss(check, partial(recipe, plain, plain.abs().amax().float()), device)


def of_product(check: Check, size: int, device: torch.device) -> Cause:
    """Of a (size, size) product in Triton: another tile may be faster."""
    from anatomy.product_kernel import product, tiles

    a, b = torch.randn(2, size, size, device=device).bfloat16()

    def by_tiles() -> str:
        times = {tile: seconds(partial(product, a, b, tile), AGAIN) for tile in tiles(device)}
        best = min(times, key=times.get)
        ends = "that is within 25 %" if near(times[best], check.predicted) else "so another tile does not suffice"
        tile = f"a tile is what one program computes; the fastest of {len(times)}, {' x '.join(map(str, best[:3]))},"
        return f"{tile} takes {us(times[best])} us: {ends}"

    return cause_of_miss(check, partial(product, a, b), device, slow_kernels=by_tiles)
