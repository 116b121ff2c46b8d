"""What does fused attention save?

Predict: at T 1024 and at T 16384, how many times longer does attention by hand take than one fused kernel? How does its
memory grow when the length doubles? What limits both at T 256?

Prediction, for causal attention, forward and backward, of (B, H, T, D) tensors of 2-byte numbers. "By hand" means one
kernel for each operator. Each of these kernels reads or writes the whole (B, H, T, T) tensor of scores. On a GPU that
makes 46 passes over the scores under autocast and 26 without it; attention_forms.py lists them. At B 1, H 16, T 8192,
D 128 the bytes are 46 x 2.1 GB = 99 GB, which take 23 ms at 4.3 TB/s. The products add 12 B H T^2 D = 1.6 TFLOP.

"Fused" means that one kernel keeps the scores on the chip. Forward moves q, k, v and o. Backward reads these and the
gradient of o, and writes those of q, k, v. These are 12 tensors of 34 MB, 0.4 GB in 0.1 ms. It computes the scores a
second time in backward, which makes 14 B H T^2 D, and skips the half above the diagonal: 7 B H T^2 D = 1 TFLOP. Each
score that it computes takes an exponential, B H T^2 in all. A GPU makes 200 times fewer of these a second than FLOPs.
So arithmetic limits the fused kernel. A pass over the scores costs T / D times as much as a pass over q, so the gain
grows with T. Memory grows with T^2 by hand, and with T fused.

The bytes take their number over the copy bandwidth, the FLOPs theirs over the rate of a square product, and so do the
exponentials. This program measures these rates. The work is the sum of the times. Where that is less than the host
needs to launch everything, the host limits the time. The same function at T 16 shows what the host needs, and this
program measures that first, too. The bytes are "least GB" in the table. `python -m anatomy.traffic` counts how many
really move.

Change: --head-dim 32. Which of the two terms changes, and by how much? --nhead 64 --lengths 256: is the host still the
limit?
Source: Dao et al., FlashAttention (2022), section 3; FlashAttention-2 (2023), section 3.1; Shah et al.,
FlashAttention-3 (2024), section 3.2, on exponentials.
Run:    python -m anatomy attention --lengths 256 1024 4096 16384 --batch 1 --nhead 16 --head-dim 128
"""

import argparse
import itertools
from functools import partial

import torch

from anatomy.attention_forms import BACKENDS, Forms, analytic_attention_bytes, exponential_rate
from anatomy.experiment import Check, Result, default_size, differ, expected, ms, size_argument, table
from common import hardware, roofs
from common.errors import is_out_of_memory
from common.record import ProductRate
from common.text import one_line

SHORT = 16  # a length at which only the host's work counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lengths = "sequence lengths T, tokens (default: 256 to 16384 on a GPU, to 2048 on a CPU)"
    size_argument(parser, "--lengths T", lengths, nargs="+")
    size_argument(parser, "--batch B", "sequences (default: 1)", default=1)
    size_argument(parser, "--nhead H", "heads (default: 16 on a GPU, 4 on a CPU)")
    size_argument(parser, "--head-dim D", "numbers per head (default: 128 on a GPU, 64 on a CPU)")


def run(args: argparse.Namespace) -> Result:
    device = args.device
    gpu_dtype = torch.bfloat16 if hardware.has_bf16_matrix_instructions(device) else torch.float16
    dtype = args.dtype or (gpu_dtype if device.type == "cuda" else torch.float32)
    autocast = dtype in (torch.bfloat16, torch.float16)
    longest = default_size(args, quick=512, cpu=2048, gpu=16384)
    lengths = sorted(set(args.lengths or (2**i for i in range(8, 15) if longest >= 2**i)))
    B, H, D = args.batch, args.nhead or default_size(args, 4, 4, 16), args.head_dim or default_size(args, 64, 64, 128)
    edge = default_size(args, quick=512, cpu=1024, gpu=8192)
    copy_rate = roofs.copy_rate(device)
    square, precision = ProductRate(m=edge, n=edge, k=edge), "bf16" if autocast else "fp32"
    _, product_rate = roofs.product_rates(square, precision, device, 0.1, roofs.BURSTS)
    exps = exponential_rate(device)
    forms = Forms(B, H, D, device, dtype, autocast, args.iters, copy_rate)
    results, missing, rows, host = {}, {}, [], {}
    for T, name in itertools.product(lengths, ("by hand", *BACKENDS)):
        if name in missing:
            continue
        fused = name not in ("by hand", "SDPA math")
        form, gpu = "fused" if fused else "by hand", device.type == "cuda"
        n_bytes = analytic_attention_bytes(form, B, H, T, D, dtype.itemsize, autocast, gpu)
        moving, computing = n_bytes / copy_rate, (7 if fused else 12) * B * H * T * T * D / product_rate
        computing += B * H * T * T / exps if fused and exps else 0
        try:
            if name not in host:
                host[name] = forms.measure(name, SHORT)["seconds"]
            row = forms.measure(name, T)
        except RuntimeError as error:
            if is_out_of_memory(error):
                rows.append({"T": T, "attention": name, "ms": "out of memory"})
            else:  # this backend has no kernel for any length
                missing[name] = one_line(error)
            continue
        work = moving + computing
        limit = "the host" if host[name] > work else "arithmetic" if computing > moving else "memory"
        row |= {"bytes": n_bytes, "predicted_s": expected(host[name], work, device), "limit": limit}
        results.setdefault(name, {})[T] = row
        cells = {"T": T, "attention": name, "ms": ms(row["seconds"]), "predicted ms": ms(row["predicted_s"])}
        rows.append(cells | {"peak MiB": f"{row['peak_bytes'] / 2**20:.1f}", "least GB": f"{n_bytes / 1e9:.3f}"})
    rows += [{"T": "all", "attention": name, "ms": "no kernel here"} for name in missing]
    title = f"Causal attention, forward and backward, B {B}, H {H}, D {D}, {dtype}{', autocast' * autocast}"
    rates = f"copy {copy_rate / 1e9:.0f} GB/s, product {product_rate / 1e12:.3g} TFLOP/s"
    rates += f", {exps / 1e9:.3g} exponentials a ns" if exps else ", exponentials not counted: they need Triton"
    hosts = ", ".join(f"{name} {ms(s)}" for name, s in host.items())
    shown = table(f"{title}; {rates}; the host needs, in ms: {hosts}", rows)
    figures = {"B": B, "H": H, "D": D, "attention": results, "missing": missing, "host_s": host}
    figures |= {"copy_bytes_per_s": copy_rate, "product_flops_per_s": product_rate, "exponentials_per_s": exps}
    return Result([shown], sentences(results), figures, predicted(results, forms))


def fastest(results: dict[str, dict[int, dict]], T: int) -> str | None:
    """The fused kernel with the shortest time at this length."""
    fused = [name for name, rows in results.items() if name not in ("by hand", "SDPA math") and T in rows]
    return min(fused, key=lambda name: results[name][T]["seconds"], default=None)


def predicted(results: dict, forms: Forms) -> list[Check]:
    """A check for each length by hand and of the fastest fused kernel."""
    checks = []
    for T in sorted({T for rows in results.values() for T in rows}):
        for name in filter(None, ("by hand" if T in results.get("by hand", {}) else None, fastest(results, T))):
            row = results[name][T]
            checks.append(Check(f"T {T}, {name}", row["predicted_s"], row["seconds"], "ms"))
            checks[-1].find_cause = partial(forms.cause, name=name, T=T)
    return checks


def sentences(results: dict[str, dict[int, dict]]) -> list[str]:
    byhand = results.get("by hand", {})
    both = sorted(T for T in byhand if fastest(results, T))
    if not both:
        return ["No length ran both by hand and fused, so this run compares nothing."]
    lines, (first, last) = [], (both[0], both[-1])
    for T in dict.fromkeys((first, last)):
        hand, fused = byhand[T], results[best := fastest(results, T)][T]
        time, predicted_ratio, memory = (hand[k] / fused[k] for k in ("seconds", "predicted_s", "peak_bytes"))
        times = f"{time:.1f} times as long ({predicted_ratio:.1f} predicted)"
        lines.append(
            f"At T {T} the fastest fused kernel is {best}. Attention by hand takes "
            f"{times if differ(hand['seconds'], fused['seconds']) else 'as long, within the spread,'} "
            f"and {memory:.1f} times the memory. Predicted limits: {hand['limit']} by hand, {fused['limit']} fused."
        )
    if first < last:
        grown = {n: results[n][last]["peak_bytes"] / results[n][first]["peak_bytes"]
                 for n in ("by hand", best) if first in results[n]}  # fmt: skip
        by_kind = " and ".join(f"x{ratio:.1f} {name}" for name, ratio in grown.items())
        lines.append(f"From T {first} to {last} the length grows x{last / first:g}, peak memory {by_kind}.")
    return lines
