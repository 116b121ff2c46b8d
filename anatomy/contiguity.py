"""What does a transposed view cost?

Predict: a (4096, 4096) matrix is contiguous, or it is a transposed view of one. How much longer does the view take in a
matrix product, in x * 2, in x + y with a contiguous y, and in a sum over its last dimension?

Prediction, for an (M, K) input. Transposing moves nothing, because it only swaps the strides. What the next operation
costs, as a multiple of its time on a contiguous input, depends on the operation:

- A matrix product takes 1x. BLAS, the library of matrix products, reads either layout.
- A pointwise operation on this input alone takes 1x. Its output gets the same strides, so both are read in the order
  in which they are stored.
- A pointwise operation with a contiguous operand must read one tensor out of order. Negating the view into a contiguous
  output does just that. So its extra time is measured first, and it is the prediction.
- A sum over the last dimension takes 1x if the kernel sums many rows at once: then it reads whole lines of memory.

`.contiguous()` first copies. Its prediction is the measured copy plus the operation on a contiguous input that no cache
holds, since the copy needs the caches as well. It pays where the view loses more than the copy takes.

Change: --m 64 --k 262144 and --m 262144 --k 64: the bytes are the same. Which shape loses more in x + y?
Source: the PyTorch documentation on tensor views and strides; the rest is arithmetic.
Run:    python -m anatomy contiguity --m 4096 --n 4096 --k 4096
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import torch

from anatomy.experiment import AGAIN, Check, Result, default_size, less, near, seconds, size_argument, table, us
from anatomy.misses import cause_of_miss

COPY, NEGATION = "copy to contiguous", "negation into a contiguous output"
SUM = "sum over the last dimension"
COLD_BYTES = 2**28  # of inputs that take turns: more than most caches hold


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = "(default: 4096 on a GPU, 1000 on a CPU)"
    size_argument(parser, "--m N", f"rows of the input {default}")
    size_argument(parser, "--n N", f"columns of the matrix it is multiplied by {default}")
    size_argument(parser, "--k N", f"columns of the input {default}")


def run(args: argparse.Namespace) -> Result:
    size = default_size(args, quick=1000, cpu=1000, gpu=4096)
    M, N, K = args.m or size, args.n or size, args.k or size
    dtype = args.dtype or torch.float32
    contiguous = torch.randn(M, K, device=args.device, dtype=dtype)
    stored = contiguous.t().contiguous()  # (K, M)
    view = stored.t()  # (M, K) again, the same numbers as `contiguous`
    operand, right = torch.randn_like(contiguous), torch.randn(K, N, device=args.device, dtype=dtype) / K**0.5
    operations = {
        COPY: lambda x: x.clone(memory_format=torch.contiguous_format),
        NEGATION: partial(torch.neg, out=torch.empty_like(contiguous)),
        "matrix product": lambda x: x @ right,
        "pointwise, alone": lambda x: x * 2,
        "pointwise, with a contiguous operand": lambda x: x + operand,
        SUM: lambda x: x.sum(-1),
    }
    figures, rows, checks = {}, [], []
    for name, operation in operations.items():
        torch.testing.assert_close(operation(view).clone(), operation(contiguous), rtol=0.05, atol=0.05)
        row = figures[name] = {"contiguous_s": seconds(partial(operation, contiguous), args.iters)}
        row |= {"view_s": seconds(partial(operation, view), args.iters)}
        row["ratio"] = row["view_s"] / row["contiguous_s"]
        cells = {"operation": name, "contiguous us": us(row["contiguous_s"]), "view us": us(row["view_s"])}
        cells["view / contiguous"] = f"{row['ratio']:.2f}x"
        if name not in (COPY, NEGATION):
            row["cold_s"] = seconds(in_turn(operation, contiguous), args.iters)
            first = partial(lambda f: f(view.contiguous()), operation)
            row["contiguous_first_s"] = seconds(first, args.iters)
            cells[".contiguous() first us"] = us(row["contiguous_first_s"])
            for check, call in zip(predicted(name, row, figures), (partial(operation, view), first), strict=True):
                slow = partial(by_direction, check, stored) if name == SUM else lambda: None
                check.find_cause = partial(cause_of_miss, call=call, device=args.device, slow_kernels=slow)
                checks.append(check)
        rows.append(cells)
    title = f"A ({M}, {K}) input, contiguous and as a transposed view; matrix product with ({K}, {N}); {dtype}"
    shared = view.data_ptr() == stored.data_ptr()
    shape = {"m": M, "n": N, "k": K, "copy_bytes": 2 * M * K * dtype.itemsize}  # read and written
    shape |= {"view_shares_memory": shared, "operations": figures}
    return Result([table(title, rows)], sentences(figures, shared), shape, checks)


def by_direction(check: Check, stored: torch.Tensor) -> str | None:
    """Whether a sum over the first dimension of the contiguous base, which adds up the same numbers in the same order,
    takes as long as that of the view over the last."""
    first_s = seconds(partial(stored.sum, 0), AGAIN)
    if not near(first_s, check.measured) or near(first_s, check.predicted):
        return None
    return f"over the first dimension of the contiguous base the same sum takes {us(first_s)} us, too"


def in_turn(operation: Callable, x: torch.Tensor) -> Callable[[], object]:
    """A call of the operation on one of many copies of x, so that no cache holds the next one."""
    copies = itertools.cycle([x.clone() for _ in range(max(2, -(-COLD_BYTES // x.nbytes)))])
    return lambda: operation(next(copies))


def predicted(name: str, row: dict, figures: dict) -> list[Check]:
    copy, negation = figures[COPY], figures[NEGATION]
    lost = negation["view_s"] - negation["contiguous_s"] if name == "pointwise, with a contiguous operand" else 0
    return [
        Check(f"view, {name}", row["contiguous_s"] + lost, row["view_s"], "us"),
        Check(f".contiguous() first, {name}", row["cold_s"] + copy["view_s"], row["contiguous_first_s"], "us"),
    ]


def sentences(figures: dict, shared: bool) -> list[str]:
    rest = {name: row for name, row in figures.items() if "contiguous_first_s" in row}
    pays = [name for name, row in rest.items() if less(row["contiguous_first_s"], row["view_s"])]
    loses = [name for name, row in figures.items() if less(row["contiguous_s"], row["view_s"])]
    lost = ", ".join(f"{name} ({figures[name]['ratio']:.2f}x)" for name in loses) or "none"
    return [
        f"The view {'shares' if shared else 'does not share'} the memory of its base. These operations lose time, "
        f"beyond the spread: {lost}.",
        f"`.contiguous()` pays even for a single use in: {', '.join(pays)}."
        if pays
        else "`.contiguous()` pays for no single use here. Several uses would share one copy.",
    ]
