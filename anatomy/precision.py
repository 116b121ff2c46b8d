"""What do the number formats cost and give?

Predict: how much faster than FP32 is a product in TF32, BF16 and FP8? What is its error? What does one outlier do to a
tensor with a single FP8 scale?

Prediction. A format with p bits after the leading one rounds a number by at most u = 2^-(p+1) of it. On average that is
0.4 u: the root mean square, if mantissas are even on a logarithmic scale. A product of two random matrices rounds both
inputs and its output, so its error against FP64 is about 0.4 u x sqrt(3) = 0.7 u. The length of the sums does not
matter, because FP32 holds them. With an output in a finer format the error is 0.4 u x sqrt(2) = 0.6 u. BF16 has u =
2^-8, so its error is 0.3 %. FP16 and TF32 have 2^-11, so 0.03 %. FP8 E4M3 with a BF16 output has 2^-4, so 3.8 %. In
FP32 the sum of K products rounds, too. Its error is a random walk of K steps, 0.4 u x sqrt(K), and less where a kernel
sums in parts. On tensor cores FLOP/s double with every halving of the bits: TF32 1, BF16 and FP16 2, FP8 4. FP32 does
not run there. A product written in Triton in 30 lines should come within 25 % of the vendor's library.

Range: FP16 ends at 65 504 and at 6e-8, FP8 E4M3 at 448 and at 0.002. BF16 has FP32's range and 8 bits of precision. FP8
therefore stores numbers times a scale. Delayed scaling takes the scale from earlier tensors, so it reads 2 bytes and
writes 1 per BF16 number. Current scaling first looks for the largest number, which reads 2 bytes more. Block scaling
looks for it among 128 numbers, which stay in registers if they are one kernel. An outlier is cut off by delayed
scaling, and the other numbers stay as they were. Current scaling makes room for it, so the others move to the smallest
numbers, where FP8 has few digits or none.

Change: --size 512. Which formats are still faster than FP32, and what has become the limit? --size 8192: does the
error of FP32 grow as the square root of K?
Source: Micikevicius et al., Mixed Precision Training (2017) and FP8 Formats for Deep Learning (2022).
Run:    python -m anatomy precision --size 4096
"""

import argparse
from functools import partial

import torch

from anatomy.experiment import Check, Refused, Result, Table, default_size, seconds, size_argument, table, us
from anatomy.precision_causes import of_product, of_recipe
from anatomy.quantize import BLOCK, FP8, RECIPES, fp8_product
from common import hardware, roofs

FORMATS = {  # name: dtype of the inputs, unit roundoff u
    "FP64": (torch.float64, 2.0**-53), "FP32": (torch.float32, 2.0**-24), "TF32": (torch.float32, 2.0**-11),
    "BF16": (torch.bfloat16, 2.0**-8), "FP16": (torch.float16, 2.0**-11), "FP8": (FP8, 2.0**-4),
}  # fmt: skip
EXAMPLES = {"1e5": 1e5, "1000": 1000.0, "1e-8": 1e-8, "1e-4": 1e-4, "1e-40": 1e-40}
RANGES = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16, "FP8 E4M3": FP8,
          "FP8 E5M2": torch.float8_e5m2}  # fmt: skip
OUTLIER = 1e5  # the standard deviation of the other numbers is 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = "edge of the matrices, a multiple of 128 (default: 4096 on a GPU, 512 on a CPU)"
    size_argument(parser, "--size N", f"{size}. With --dtype only it and FP32 run.")


def run(args: argparse.Namespace) -> Result:
    size = args.size or default_size(args, quick=256, cpu=512, gpu=4096)
    if size % BLOCK:
        raise Refused(f"--size {size} is not a multiple of {BLOCK}, which FP8's blocks need")
    products, recipes = matrix_products(size, args), quantization(default_size(args, size, size, 4 * size), args)
    ranges = {name: example(value) for name, value in EXAMPLES.items()}
    figures = {"size": size, "products": products, "ranges": ranges, "quantization": recipes}
    found = checks(**figures, device=args.device)
    return Result(tables(**figures), sentences(products, ranges, recipes["recipes"]), figures, found)


def checks(size: int, products: dict, ranges: dict, quantization: dict, device: torch.device) -> list[Check]:
    """Errors against their formulas, rates against BF16 by the bits, lost numbers, and recipes by their bytes."""
    errors = [Check(f"error of {name} / u", *(row[key] / FORMATS[name][1] for key in ("predicted_error", "error")), "",
                    at_most=name == "FP32")  # less where a kernel sums in parts
              for name, row in products.items() if row["error"] and name in FORMATS]  # fmt: skip
    bf16 = products.get("BF16", {}).get("seconds")
    bits = {"TF32": 2, "FP16": 1, "FP8": 0.5}  # of BF16's time, on tensor cores
    tensor_cores = products.get("TF32", {}).get("seconds")
    times = [Check(f"time of {name}", bits[name] * bf16, products[name]["seconds"], "us")
             for name in bits if tensor_cores and bf16 and products[name]["seconds"]]  # fmt: skip
    if by_hand := products.get("BF16, by hand in Triton"):
        find = partial(of_product, size=size, device=device)
        times.append(Check("time of BF16, by hand in Triton", bf16, by_hand["seconds"], "us", find_cause=find))
    lost = [Check(f"formats that treat {name} unlike predicted", 0, len({*row["predicted_lost"]} ^ {*row["lost"]}), "")
            for name, row in ranges.items()]  # fmt: skip
    recipes = [Check(f"{name}, {quantization['how']}", row["predicted_s"], row["seconds"], "us",
                     find_cause=partial(of_recipe, name=name, size=quantization["shape"][0], device=device))
               for name, row in quantization["recipes"].items() if quantization["how"] == "compiled"]  # fmt: skip
    return [*errors, *times, *lost, *recipes]


def tables(size: int, products: dict, ranges: dict, quantization: dict) -> list[Table]:
    product_rows = [{
        "format": name, "TFLOP/s": f"{2e-12 * size**3 / row['seconds']:.3g}" if row["seconds"] else row["reason"],
        "MB of A, B, C": f"{row['bytes'] / 1e6:.2f}", "error": f"{row['error']:.1e}" if row["error"] else "-",
        "predicted error": f"{row['predicted_error']:.1e}" if row["predicted_error"] else "-",
    } for name, row in products.items()]  # fmt: skip
    range_rows = [{"number": name, **row["becomes"], "predicted to be lost in": ", ".join(row["predicted_lost"]) or "-"}
                  for name, row in ranges.items()]  # fmt: skip
    recipe_rows = [{
        "recipe": name, "us": us(row["seconds"]), "predicted us": us(row["predicted_s"]),
        "error without an outlier": f"{row['error']:.2%}", "with it, error of other rows": f"{row['elsewhere']:.2%}",
        "and of the outlier": f"{row['outlier']:.2%}",
    } for name, row in quantization["recipes"].items()]  # fmt: skip
    title = f"A {quantization['shape']} BF16 tensor to FP8 E4M3, {quantization['how']}; the outlier is {OUTLIER:g}"
    return [
        table(f"({size}, {size}) products; error relative to FP64 (Frobenius norm)", product_rows),
        table("What a number becomes", range_rows),
        table(title, recipe_rows),
    ]


def matrix_products(size: int, args: argparse.Namespace) -> dict[str, dict]:
    a, b = torch.randn(2, size, size, dtype=torch.float64, device=args.device)
    reference, products = a @ b, {}
    before = torch.get_float32_matmul_precision()
    for name, (dtype, u) in FORMATS.items():
        if args.dtype and name != "FP32" and (dtype is not args.dtype or name == "TF32"):
            continue
        reason = roofs.unavailable(name.lower(), args.device) if name in ("TF32", "FP8") else None
        output = 2 if name == "FP8" else dtype.itemsize  # FP8 products have a BF16 output
        factor = {"FP64": 0, "FP32": 0.4 * size**0.5, "TF32": 0.6, "FP8": 0.6}.get(name, 0.7)
        row = products[name] = {"bytes": size**2 * (2 * dtype.itemsize + output), "predicted_error": factor * u}
        row |= {"reason": reason, "seconds": None, "error": None}
        if reason and name == "TF32":
            continue
        torch.set_float32_matmul_precision("high" if name == "TF32" else "highest")
        if name == "FP8":
            product = fp8_product(a.float(), b.float(), native=reason is None)
        else:
            product = partial(torch.matmul, a.to(dtype), b.to(dtype))
        row["error"] = relative(product().double(), reference)
        row["seconds"] = None if reason else seconds(product, args.iters)
    torch.set_float32_matmul_precision(before)
    if args.device.type == "cuda" and hardware.package_version("triton") and "BF16" in products and size % 256 == 0:
        products["BF16, by hand in Triton"] = by_hand(a.bfloat16(), b.bfloat16(), reference, products["BF16"], args)
    return products


def by_hand(a: torch.Tensor, b: torch.Tensor, reference: torch.Tensor, library: dict, args) -> dict:
    """The row of a product whose kernel is written in Triton."""
    from anatomy.product_kernel import product

    row = {"error": relative(product(a, b).double(), reference), "seconds": seconds(partial(product, a, b), args.iters)}
    return library | row


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x - reference).norm() / reference.norm()).item()


def quantization(size: int, args: argparse.Namespace) -> dict:
    """For each recipe its time and its errors: without an outlier, then in the rows beside one, and of the outlier."""
    plain = torch.randn(size, size, device=args.device).bfloat16()
    spiked = plain.clone()
    spiked[0, 0] = OUTLIER
    history, rate = plain.abs().amax().float(), roofs.copy_rate(args.device)
    results, how = {}, "eager: several kernels each"
    for name, (recipe, bytes_each) in RECIPES.items():
        if args.device.type == "cuda" and hardware.package_version("triton"):
            recipe, how = torch.compile(recipe, dynamic=False), "compiled"
        (x, s), (y, t) = recipe(plain, history), recipe(spiked, history)
        restored, spiked_restored = (x.float() * s).view_as(plain), (y.float() * t).view_as(plain)
        results[name] = {
            "seconds": seconds(partial(recipe, plain, history), args.iters),
            "predicted_s": size**2 * bytes_each / rate,
            "error": relative(restored, plain.float()),
            "elsewhere": relative(spiked_restored[1:], spiked[1:].float()),
            "outlier": abs(spiked_restored[0, 0].item() / spiked[0, 0].item() - 1),
        }
    return {"shape": (size, size), "how": how, "recipes": results}


def example(value: float) -> dict:
    """What a number becomes in each format, and which formats should lose it according to their range."""
    becomes = {name: torch.tensor(value).to(dtype).float().item() for name, dtype in RANGES.items()}
    info = {name: torch.finfo(dtype) for name, dtype in RANGES.items()}
    lost = [n for n, f in info.items() if value > 1.1 * f.max or value < 0.5 * f.smallest_normal * f.eps]
    wrong = [name for name, x in becomes.items() if not abs(x - value) <= 0.5 * value]
    return {"becomes": {k: f"{x:.6g}" for k, x in becomes.items()}, "predicted_lost": lost, "lost": wrong}


def sentences(products: dict, ranges: dict, recipes: dict) -> list[str]:
    errors = {name: row["error"] / row["predicted_error"] for name, row in products.items() if row["error"]}
    off = [f"{name} ({ratio:.1f}x)" for name, ratio in errors.items() if not 0.5 <= ratio <= 2]
    timed = {name: row["seconds"] for name, row in products.items() if row["seconds"]}
    faster = [f"{name} {timed['FP32'] / s:.2g}x" for name, s in timed.items() if name != "FP32"]
    wrong = [name for name, row in ranges.items() if row["lost"] != row["predicted_lost"]]
    worst = max(recipes, key=lambda name: recipes[name]["elsewhere"])
    best = min(recipes, key=lambda name: recipes[name]["elsewhere"] + recipes[name]["outlier"])
    return [
        f"The speed of a product against FP32: {', '.join(faster)}." if faster else "Only FP32 ran.",
        f"The errors are within a factor of two of their predictions, except: {', '.join(off) or 'none'}.",
        "Numbers out of a format's range became zero, infinite or wrong by more than half, as predicted, except: "
        f"{', '.join(wrong) or 'none'}.",
        f"One outlier gives the other rows an error of {recipes[worst]['elsewhere']:.1%} with {worst}. With {best} it "
        f"is {recipes[best]['elsewhere']:.1%}, and the error of the outlier {recipes[best]['outlier']:.1%}.",
    ]
