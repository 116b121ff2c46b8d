"""What does a transposed view cost?

Prediction, for an (M, K) input of b bytes a number. Transposing moves nothing, because it only swaps the strides. What
the next operation costs, as a multiple of its time on a contiguous input, depends on the operation:

- A matrix product takes 1x. BLAS, the library of matrix products, reads either layout.
- A pointwise operation on this input alone takes 1x. Its output gets the same strides, so both are read in the order
  in which they are stored.
- A pointwise operation with a contiguous operand, and a copy to contiguous, take 1x to 16x. One of the tensors is read
  or written in strides. A cache line of 64 bytes holds 16 FP32 numbers, and it travels up to 16 times if it leaves the
  cache between uses.
- A sum over the last dimension takes 1x to 16x, too. The bytes are the same but each row lies in strides. A kernel
  avoids the loss if it sums many rows at once.

`.contiguous()` first copies 2 M K b bytes. Its prediction is the measured copy plus the operation on a contiguous
input. It pays where the view loses more than the copy takes.

Source: the PyTorch documentation on tensor views and strides; the rest is arithmetic.
Run:    python -m anatomy contiguity --m 4096 --n 4096 --k 4096
"""

import argparse
from functools import partial

import torch

from anatomy.experiment import Result, default_size, seconds, size_argument, table, us

TOLERANCE = 1.25  # two times that differ by less than this factor count as equal
CACHE_LINE = 64  # bytes on a CPU; a GPU moves 32 at a time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = "(default: 4096 on a GPU, 1024 on a CPU)"
    size_argument(parser, "--m N", f"rows of the input {default}")
    size_argument(parser, "--n N", f"columns of the matrix it is multiplied by {default}")
    size_argument(parser, "--k N", f"columns of the input {default}")


def run(args: argparse.Namespace) -> Result:
    size = default_size(args, quick=512, cpu=1024, gpu=4096)
    M, N, K = args.m or size, args.n or size, args.k or size
    dtype = args.dtype or torch.float32
    contiguous = torch.randn(M, K, device=args.device, dtype=dtype)
    stored = contiguous.t().contiguous()  # (K, M)
    view = stored.t()  # (M, K) again, the same numbers as `contiguous`
    operand, right = torch.randn_like(contiguous), torch.randn(K, N, device=args.device, dtype=dtype) / K**0.5
    worst = float(CACHE_LINE // dtype.itemsize)
    operations = {  # name: function, and the least and the most time of the view as a multiple of contiguous
        "matrix product": (lambda x: x @ right, 1.0, 1.0),
        "pointwise, alone": (lambda x: x * 2, 1.0, 1.0),
        "pointwise, with a contiguous operand": (lambda x: x + operand, 1.0, worst),
        "sum over the last dimension": (lambda x: x.sum(-1), 1.0, worst),
        "copy to contiguous": (lambda x: x.clone(memory_format=torch.contiguous_format), 1.0, worst),
    }
    figures = {}
    for name, (operation, low, high) in operations.items():
        torch.testing.assert_close(operation(view), operation(contiguous), rtol=0.05, atol=0.05)
        contiguous_s = seconds(partial(operation, contiguous), args.iters)
        view_s = seconds(partial(operation, view), args.iters)
        ratio = view_s / contiguous_s
        figures[name] = {"contiguous_s": contiguous_s, "view_s": view_s, "predicted": [low, high], "ratio": ratio}
        figures[name]["holds"] = low / TOLERANCE <= ratio <= high * TOLERANCE
    rows, copy_s = [], figures["copy to contiguous"]["view_s"]
    for name, (operation, low, high) in operations.items():
        row = figures[name]
        cells = {"operation": name, "contiguous us": us(row["contiguous_s"]), "view us": us(row["view_s"])}
        cells["view / contiguous"] = f"{row['ratio']:.2f}x"
        cells["predicted"] = f"{low:.0f}x" if low == high else f"{low:.0f}x to {high:.0f}x"
        if name != "copy to contiguous":  # it would copy twice
            first_s = seconds(lambda f=operation: f(view.contiguous()), args.iters)
            row |= {"contiguous_first_s": first_s, "predicted_first_s": row["contiguous_s"] + copy_s}
            cells |= {".contiguous() first us": us(first_s), "predicted us": us(row["predicted_first_s"])}
        rows.append(cells)
    title = f"A ({M}, {K}) input, contiguous and as a transposed view; matrix product with ({K}, {N}); {dtype}"
    shared = view.data_ptr() == stored.data_ptr()
    shape = {"m": M, "n": N, "k": K, "copy_bytes": 2 * M * K * dtype.itemsize}  # read and written
    shape |= {"view_shares_memory": shared, "operations": figures}
    return Result([table(title, rows)], sentences(figures, shared), shape)


def sentences(figures: dict, shared: bool) -> list[str]:
    missed = [f"{name} ({result['ratio']:.2f}x)" for name, result in figures.items() if not result["holds"]]
    pays = [
        name
        for name, row in figures.items()
        if row.get("contiguous_first_s", row["view_s"]) * TOLERANCE < row["view_s"]
    ]
    loss = max(figures, key=lambda name: figures[name]["ratio"])
    return [
        f"The view {'shares' if shared else 'does not share'} the memory of its base. The operation that loses "
        f"most is: {loss}, with {figures[loss]['ratio']:.2f} times the contiguous time.",
        f"These ratios are outside their predicted range, with {TOLERANCE - 1:.0%} for noise: {', '.join(missed)}."
        if missed
        else f"Every ratio is in its predicted range, with {TOLERANCE - 1:.0%} for noise.",
        f"`.contiguous()` pays even for a single use in: {', '.join(pays)}."
        if pays
        else "`.contiguous()` pays for no single use here. Several uses would share one copy.",
    ]
