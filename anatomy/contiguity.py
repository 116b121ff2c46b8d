"""What does a transposed view cost?

Prediction, for an (M, K) input of b bytes a number. The view itself moves nothing: only its strides change. Then

- matrix product: BLAS takes either layout by a flag, so 1x;
- pointwise, alone: the output takes over the strides of its input and both are walked in storage order, so 1x;
- pointwise with a contiguous operand, and copy to contiguous: one side is strided whatever the order. A cache line of
  64 bytes holds 16 FP32 numbers; where it is gone before the other 15 are asked for it travels again: 1x to 16x;
- sum over the last dimension: the same bytes, each row in strides. Summing whole columns at once avoids the loss, and
  a kernel is free to do so: 1x to 16x, too.

`.contiguous()` first adds a copy, 2 M K b bytes: predicted as the copy measured below plus the operation on a
contiguous input. It pays where the view loses more than that.

Source: the PyTorch documentation on tensor views and strides; the rest is arithmetic.
Run:    python -m anatomy contiguity --m 4096 --n 4096 --k 4096
"""

from __future__ import annotations

import argparse

import torch

from anatomy.experiment import Result, Table, default_size, positive, seconds, us

TOLERANCE = 1.25  # times within this factor of each other are called equal
CACHE_LINE = 64  # bytes; a GPU's sectors are 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = "(default: 4096 on a GPU, 1024 on a CPU)"
    parser.add_argument("--m", type=positive, metavar="N", help=f"rows of the input {default}")
    parser.add_argument("--n", type=positive, metavar="N", help=f"columns of the matrix it is multiplied by {default}")
    parser.add_argument("--k", type=positive, metavar="N", help=f"columns of the input {default}")


def run(args: argparse.Namespace) -> Result:
    size = default_size(args, quick=512, cpu=1024, gpu=4096)
    M, N, K = args.m or size, args.n or size, args.k or size
    dtype = args.dtype or torch.float32
    contiguous = torch.randn(M, K, device=args.device, dtype=dtype)
    stored = contiguous.t().contiguous()  # (K, M)
    view = stored.t()  # (M, K) again, the same numbers as `contiguous`
    other, right = torch.randn_like(contiguous), torch.randn(K, N, device=args.device, dtype=dtype) / K**0.5
    worst = float(CACHE_LINE // dtype.itemsize)
    operations = {  # name: function, least and most that the view may take, as a multiple of contiguous
        "matrix product": (lambda x: x @ right, 1.0, 1.0),
        "pointwise, alone": (lambda x: x * 2, 1.0, 1.0),
        "pointwise, with a contiguous operand": (lambda x: x + other, 1.0, worst),
        "sum over the last dimension": (lambda x: x.sum(-1), 1.0, worst),
        "copy to contiguous": (lambda x: x.clone(memory_format=torch.contiguous_format), 1.0, worst),
    }
    figures = {}
    for name, (operation, low, high) in operations.items():
        torch.testing.assert_close(operation(view), operation(contiguous), rtol=0.05, atol=0.05)
        figures[name] = {
            "contiguous_s": seconds(lambda f=operation: f(contiguous), args.iters),
            "view_s": seconds(lambda f=operation: f(view), args.iters),
            "contiguous_first_s": seconds(lambda f=operation: f(view.contiguous()), args.iters),
            "predicted": [low, high],
        }
    copy = figures["copy to contiguous"]
    del copy["contiguous_first_s"]  # it would copy twice
    rows = []
    for name, found in figures.items():
        found["ratio"] = found["view_s"] / found["contiguous_s"]
        low, high = found["predicted"]
        found["holds"] = low / TOLERANCE <= found["ratio"] <= high * TOLERANCE
        row = [name, us(found["contiguous_s"]), us(found["view_s"]), f"{found['ratio']:.2f}x"]
        row.append(f"{low:.0f}x" if low == high else f"{low:.0f}x to {high:.0f}x")
        if first := found.get("contiguous_first_s"):
            found["predicted_first_s"] = found["contiguous_s"] + copy["view_s"]
            row += [us(first), us(found["predicted_first_s"])]
        rows.append(row + ["-"] * (7 - len(row)))
    headers = ["operation", "contiguous us", "view us", "view / contiguous", "predicted"]
    headers += [".contiguous() first us", "predicted us"]
    title = f"A ({M}, {K}) input, contiguous and as a transposed view; matrix product with ({K}, {N}); {dtype}"
    shared = view.data_ptr() == stored.data_ptr()
    shape = {"m": M, "n": N, "k": K, "copy_bytes": 2 * M * K * dtype.itemsize}  # read and written
    return Result(
        [Table(title, headers, rows)],
        sentences(figures, shared),
        shape | {"view_shares_memory": shared, "operations": figures},
    )


def sentences(figures: dict, shared: bool) -> list[str]:
    missed = [f"{name} ({found['ratio']:.2f}x)" for name, found in figures.items() if not found["holds"]]
    pays = [
        name for name, found in figures.items()
        if "contiguous_first_s" in found and found["contiguous_first_s"] * TOLERANCE < found["view_s"]
    ]  # fmt: skip
    loss = max(figures, key=lambda name: figures[name]["ratio"])
    return [
        f"The view {'shares' if shared else 'does not share'} the memory of what it was made from. What reads it loses "
        f"most in: {loss}, {figures[loss]['ratio']:.2f} times the contiguous time.",
        f"Outside the predicted range, with {TOLERANCE - 1:.0%} for noise: {', '.join(missed)}."
        if missed
        else f"Every ratio is in its predicted range, with {TOLERANCE - 1:.0%} for noise.",
        f"A single use already pays for `.contiguous()` in: {', '.join(pays)}."
        if pays
        else "Here `.contiguous()` pays for no operation that reads its input once; more uses share one copy.",
    ]
