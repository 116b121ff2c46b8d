"""Each step's time from what a machine can do: nothing is trained, nothing is fitted to a step's time.

    python -m ladder.predict [--machine h200|FILE] [--output FILE] ARGUMENT ...     the ARGUMENTs are those of a step

A prediction is a sum. Matrix products take the time that the roofs give for their shapes. Fused attention takes its
FLOPs over its rate. What lies between passes over memory: the bytes that a kernel reads and writes for each number of
a tensor are counted by hand below, from the scripts (FP32 has 4, BF16 2, FP8 1). Where the host needs longer to launch
the kernels than the GPU to run them, the host's time counts. Under its power limit a GPU lowers its clock: `slowed_s`.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import arguments, flops, hardware
from common.record import (
    CATEGORIES,
    MERGED,
    ROOFS,
    AttentionRate,
    KernelTime,
    ProductRate,
    Roofs,
    read_object,
    write_json,
)
from common.text import OneLineParser, aligned, run_command, say
from ladder import roofs
from ladder.runs import BY_HAND, scripts

POINTWISE, COPIES, ATTENTION = "normalization and pointwise", "copies and casts", "attention"
LOSS, OPTIMIZER = "loss", "optimizer"
CAPTURED = "34"
COPY = "copy fp32"  # moves 8 bytes a number
FUSED_LAUNCHES = 4  # of attention: forward, and three kernels backward
FOREACH_NUMBERS = 320 * 65536  # that one launch of a foreach kernel takes: 320 blocks of 64 Ki numbers


@dataclass(frozen=True)
class Pass:
    """Kernels that each move `bytes` for every number of a tensor, see ladder.roofs.sizes."""

    tensor: str
    bytes: int
    kernels: int
    category: str  # of common.record.CATEGORIES
    kernel: str | None  # of ladder/roofs.py: its measured time counts; without one, the time of a copy of these bytes
    most: int | None = None  # numbers that one launch takes


# --- kernels of one block -------------------------------------------------------------------------

BY_HAND_FP32 = (
    Pass("scores", 8, 2, POINTWISE, None),  # scores / sqrt(D) reads and writes, forward and backward
    Pass("scores", 8, 2, COPIES, None),  # masked_fill copies its input first, forward and backward
    Pass("scores", 8, 2, POINTWISE, "mask fp32"),  # masked_fill then reads and writes the copy, forward and backward
    Pass("scores", 8, 1, ATTENTION, "softmax fp32"),  # softmax reads and writes
    Pass("scores", 12, 1, POINTWISE, None),  # softmax backward first multiplies gradient and output
    Pass("scores", 12, 1, ATTENTION, None),  # softmax backward reads that and the output, and writes
    Pass("stream", 8, 7, COPIES, "heads fp32"),  # heads made contiguous: q, k, v, output, three gradients
)
BY_HAND_BF16 = (
    Pass("scores", 4, 2, POINTWISE, None),  # scores / sqrt(D) reads and writes, forward and backward
    Pass("scores", 4, 2, COPIES, None),  # masked_fill copies its input first, forward and backward
    Pass("scores", 4, 2, POINTWISE, "mask half"),  # masked_fill then reads and writes the copy, forward and backward
    Pass("scores", 6, 2, COPIES, "to fp32"),  # autocast runs softmax in FP32: scores, and in backward a gradient
    Pass("scores", 8, 1, ATTENTION, "softmax fp32"),  # softmax reads and writes FP32
    Pass("scores", 6, 2, COPIES, "to half"),  # weights back to BF16; backward: the gradient of scores
    Pass("scores", 12, 1, POINTWISE, None),  # softmax backward first multiplies gradient and output
    Pass("scores", 12, 1, ATTENTION, None),  # softmax backward reads that and the output, and writes
    Pass("stream", 4, 7, COPIES, "heads half"),  # heads made contiguous: q, k, v, output, three gradients
)
EAGER_FP32 = (
    Pass("stream", 8, 2, POINTWISE, "layer norm fp32"),  # LayerNorm reads and writes, twice in a block
    Pass("stream", 20, 2, POINTWISE, "layer norm backward fp32"),  # its backward reads gradient and input, twice
    Pass("stream", 12, 4, POINTWISE, None),  # residual adds read two and write one; backward adds the two branches
    Pass("hidden", 8, 1, POINTWISE, "gelu fp32"),  # GELU reads and writes
    Pass("hidden", 12, 1, POINTWISE, "gelu backward fp32"),  # its backward reads gradient and input, writes
    Pass("width", 4, 4, POINTWISE, "sum over tokens fp32"),  # the gradient of a bias is a sum over tokens: four biases
    Pass("qkv", 8, 1, COPIES, "heads fp32"),  # split's backward joins the gradients of q, k and v
    Pass("vector", 0, 12, COPIES, None),  # workspaces of products and of sums are cleared
)
EAGER_BF16 = (
    Pass("stream", 6, 4, COPIES, "to fp32"),  # autocast runs LayerNorm in FP32: its input, in backward its gradient
    Pass("stream", 8, 2, POINTWISE, "layer norm fp32"),  # LayerNorm reads and writes FP32
    Pass("stream", 20, 2, POINTWISE, "layer norm backward fp32"),  # its backward reads gradient and input, twice
    Pass("stream", 6, 4, COPIES, "to half"),  # LayerNorm's output to BF16; backward: the gradient of its input
    Pass("stream", 6, 4, POINTWISE, None),  # residual adds read two and write one; backward adds the two branches
    Pass("hidden", 4, 1, POINTWISE, "gelu half"),  # GELU reads and writes
    Pass("hidden", 6, 1, POINTWISE, "gelu backward half"),  # its backward reads gradient and input, writes
    Pass("width", 2, 4, POINTWISE, "sum over tokens half"),  # the gradient of a bias is a sum over tokens: four biases
    Pass("qkv", 4, 1, COPIES, "heads half"),  # split's backward joins the gradients of q, k and v
    Pass("weight", 6, 4, COPIES, "to half"),  # autocast casts four weights to BF16
    Pass("weight", 6, 4, COPIES, "to fp32"),  # backward: their gradients to FP32
    Pass("vector", 0, 8, COPIES, None),  # the same of four biases
    Pass("vector", 0, 12, COPIES, None),  # workspaces of products and of sums are cleared
)
COMPILED = (
    Pass("stream", 4, 1, POINTWISE, None),  # the first LayerNorm reads and writes
    Pass("stream", 8, 1, POINTWISE, None),  # residual add and second LayerNorm: reads two, writes sum and output
    Pass("stream", 6, 1, POINTWISE, None),  # the last residual add reads two and writes one
    Pass("stream", 8, 2, POINTWISE, None),  # their backward in one kernel: reads gradient, input, other branch; writes
    Pass("stream", 4, 2, POINTWISE, None),  # gradients of LayerNorm's weight and bias read gradient and input
    Pass("hidden", 4, 1, POINTWISE, "gelu half"),  # GELU reads and writes
    Pass("hidden", 6, 1, POINTWISE, "gelu backward half"),  # its backward reads gradient and input, writes
    Pass("width", 2, 4, POINTWISE, "sum over tokens half"),  # the gradient of a bias is a sum over tokens: four biases
    Pass("qkv", 4, 1, COPIES, None),  # the gradients of q, k and v are joined
    Pass("weight", 6, 8, COPIES, None),  # weights to BF16 in forward, their gradients to FP32 in backward
    Pass("vector", 0, 12, COPIES, None),  # casts of biases; sums of a second stage; a buffer cleared for attention
)
TRANSFORMER_ENGINE = (
    Pass(
        "stream", 9, 2, POINTWISE, roofs.TE_NORM
    ),  # LayerNorm reads BF16 and writes FP8; its backward reads two, writes one
    Pass("stream", 6, 4, POINTWISE, None),  # residual adds read two and write one; backward adds the two branches
    Pass("hidden", 3, 1, POINTWISE, "gelu half"),  # GELU reads BF16 and writes FP8
    Pass("stream", 4, 1, COPIES, None),  # attention's output to FP8 in two layouts, for the projection
    Pass("stream", 2, 2, COPIES, None),  # LayerNorm's FP8 output transposed for the weight gradient
    Pass("hidden", 2, 1, COPIES, None),  # GELU's FP8 output transposed for the weight gradient
    Pass("weight", 6, 4, COPIES, None),  # four weights read in FP32 and written in FP8 in two layouts
    Pass("width", 4, 4, COPIES, None),  # gradients of four outputs read in BF16 and written in FP8 in two layouts
    Pass("hidden", 2, 1, COPIES, None),  # one of them also reads the input of GELU, whose backward is in that kernel
    Pass("weight", 6, 4, COPIES, "to fp32"),  # weight gradients to FP32
    Pass("qkv", 4, 1, COPIES, "heads half"),  # split's backward joins the gradients of q, k and v
    Pass("vector", 0, 16, COPIES, None),  # four biases and LayerNorm's four vectors to BF16, their gradients to FP32
    Pass("vector", 0, 4, POINTWISE, None),  # the second stages of four bias sums
    Pass("vector", 0, 9, COPIES, None),  # buffers of products, attention and largest values are cleared
)
# --- kernels of one step, outside the blocks --------------------------------------------------------

EMBEDDING = (
    Pass("stream", 8, 1, POINTWISE, None),  # rows of the token embedding are gathered
    Pass("stream", 8, 1, POINTWISE, None),  # positions are added
    Pass("stream", 4, 1, POINTWISE, None),  # the gradient of positions is a sum over sequences
    Pass("stream", 8, 1, POINTWISE, None),  # gradient rows are added to the rows of their tokens
    Pass("embedding", 4, 1, COPIES, None),  # the embedding's gradient is cleared first
    Pass("embedding", 12, 1, POINTWISE, None),  # the tied weight's two gradients are added
    Pass("vector", 0, 30, POINTWISE, None),  # tokens are sorted, so that equal ones are summed together
)
LAST_NORM_FP32 = (
    Pass("stream", 8, 1, POINTWISE, "layer norm fp32"),  # the last LayerNorm reads and writes
    Pass("stream", 20, 1, POINTWISE, "layer norm backward fp32"),  # and its backward, as in a block
)
LAST_NORM_COMPILED = (
    Pass("stream", 4, 1, POINTWISE, None),  # the last LayerNorm reads and writes
    Pass("stream", 12, 1, POINTWISE, None),  # its backward, with the gradients of its weight and bias in another kernel
)
LAST_NORM_TE = (Pass("stream", 9, 1, POINTWISE, roofs.TE_NORM),)  # the last LayerNorm, forward and backward
LOSS_FP32 = (
    Pass("logits", 16, 1, LOSS, "softmax of vocabulary fp32"),  # log-softmax reads for maximum, sum and output; writes
    Pass("logits", 4, 1, COPIES, None),  # the gradient of the picked log-probabilities is cleared first
    Pass("logits", 16, 1, LOSS, None),  # backward reads the gradient for its sum, again, and the output, and writes
)
LOSS_BF16 = (
    Pass("logits", 8, 1, LOSS, "softmax of vocabulary half"),  # log-softmax reads for maximum, sum and output; writes
    Pass("logits", 6, 1, COPIES, "to fp32"),  # autocast picks log-probabilities in FP32: all are cast
    Pass("logits", 4, 1, COPIES, None),  # the gradient of the picked ones is cleared first, in FP32
    Pass("logits", 6, 1, COPIES, "to half"),  # backward of that cast
    Pass("logits", 8, 1, LOSS, None),  # backward reads the gradient for its sum, again, and the output, and writes
    Pass("embedding", 6, 1, COPIES, "to half"),  # the head's weight to BF16
    Pass("embedding", 6, 1, COPIES, "to fp32"),  # its gradient to FP32
)
LOSS_COMPILED = (
    Pass("logits", 2, 1, LOSS, "softmax of vocabulary half"),  # maximum and sum in one pass; exponentials bound it
    Pass("logits", 4, 1, LOSS, None),  # the gradient from logits, maximum and sum: reads and writes
)
LOGITS_BF16 = (Pass("embedding", 6, 2, COPIES, None),)  # the head's weight to BF16, its gradient to FP32
LOGITS_FP8 = (
    Pass("logits", 4, 1, COPIES, None),  # the gradient of the logits read in BF16 and written in FP8 in two layouts
    Pass("embedding", 12, 1, COPIES, None),  # the head's weight to FP8 in two layouts; its gradient to FP32
)
FOREACH_ADAMW = (
    Pass("parameters", 8, 2, OPTIMIZER, None, FOREACH_NUMBERS),  # decay scales the weight, beta2 the second moment
    Pass("parameters", 12, 1, OPTIMIZER, None, FOREACH_NUMBERS),  # lerp: gradient and first moment, written
    Pass("parameters", 12, 1, OPTIMIZER, None, FOREACH_NUMBERS),  # addcmul: gradient and second moment, written
    Pass("parameters", 8, 3, OPTIMIZER, None, FOREACH_NUMBERS),  # square root, bias correction and eps, in a copy
    Pass("parameters", 16, 1, OPTIMIZER, None, FOREACH_NUMBERS),  # addcdiv: weight, first moment and root, written
)
FUSED_ADAMW = (
    Pass("parameters", 28, 1, OPTIMIZER, None),  # one kernel reads weight, gradient and both moments, writes three
)
ONCE_EAGER = (*EMBEDDING, *LAST_NORM_FP32, *LOSS_BF16, *FOREACH_ADAMW)
IN_A_BLOCK = {  # by the first character of a script's name: kernels of one block
    "0": BY_HAND_FP32 + EAGER_FP32,
    "1": BY_HAND_BF16 + EAGER_BF16,
    "2": EAGER_BF16,
    "3": COMPILED,
    "4": TRANSFORMER_ENGINE,
}
ONCE_A_STEP = {
    "0": (*EMBEDDING, *LAST_NORM_FP32, *LOSS_FP32, *FOREACH_ADAMW),
    "1": ONCE_EAGER,
    "2": ONCE_EAGER,
    "3": (*EMBEDDING, *LAST_NORM_COMPILED, *LOSS_COMPILED, *LOGITS_BF16, *FUSED_ADAMW),
    "4": (*EMBEDDING, *LAST_NORM_TE, *LOSS_COMPILED, *LOGITS_FP8, *FUSED_ADAMW),
}


@dataclass
class Prediction:
    category_ms: dict[str, float]  # by common.record.CATEGORIES
    launches: int
    host_ms: float  # what the host needs to launch them; 0 where it launches once

    @property
    def ms(self) -> float:
        return max(sum(self.category_ms.values()), self.host_ms)


class Machine:
    """Times of products, kernels and attention of any size, from roofs."""

    def __init__(self, measured: Roofs):
        self.roofs = measured
        self.products = {
            (p.precision, p.m, p.n, p.k): 2 * p.m * p.n * p.k / p.burst_flops_per_s for p in measured.products
        }
        self.precisions = {p.precision for p in measured.products}
        on_gpu = any(key[1:] == (roofs.SQUARE["cuda"],) * 3 for key in self.products)
        self.axis = roofs.GRID["cuda" if on_gpu else "cpu"]

    def product_s(self, precision: str, m: int, n: int, k: int) -> float:
        """Of a product at its ceiling: measured, or linear in M, N and K between its neighbours in the grid.

        A product costs a launch, bytes that grow with two dimensions at a time, and FLOPs that grow with all three, so
        its time is linear in each dimension. Beyond the grid it grows with the FLOPs. Raises ValueError without a grid.
        """
        if (precision, m, n, k) in self.products:
            return self.products[precision, m, n, k]
        if not all((precision, *corner) in self.products for corner in itertools.product(self.axis, repeat=3)):
            raise ValueError("the roofs lack products of this size: python -m ladder.roofs --grid measures all sizes")
        axis, total = self.axis, 0.0
        beyond = math.prod(max(1.0, size / axis[-1]) for size in (m, n, k))
        corners = []  # of each dimension: (size in the grid, weight) twice
        for size in (m, n, k):
            size = min(max(size, axis[0] / 2), axis[-1])
            upper = next((i for i, edge in enumerate(axis[1:-1], 1) if edge >= size), len(axis) - 1)
            share = (size - axis[upper - 1]) / (axis[upper] - axis[upper - 1])
            corners.append(((axis[upper - 1], 1 - share), (axis[upper], share)))
        for corner in itertools.product(*corners):
            weight = math.prod(weight for _, weight in corner)
            total += weight * self.products[(precision, *(edge for edge, _ in corner))]
        return beyond * total

    def pass_s(self, one: Pass, numbers: float) -> float:
        """Of one kernel of a pass over `numbers` numbers: measured, or the time of a copy of as many bytes."""
        timed = {k.numbers: k.seconds for k in self.roofs.kernels if k.kernel == one.kernel}
        size = numbers if timed else one.bytes * numbers / 8
        timed = timed or {k.numbers: k.seconds for k in self.roofs.kernels if k.kernel == COPY}
        beyond = max(1.0, size / max(timed))
        return beyond * float(np.interp(size / beyond, *zip(*sorted(timed.items()), strict=True)))

    def attention_s(self, T: int, D: int, heads: int) -> float:
        """Of fused causal attention, forward and backward: at the nearest head dimension, between measured lengths."""
        nearest = min({rate.head_dim for rate in self.roofs.attention}, key=lambda dim: abs(math.log(dim / D)))
        rates = {math.log(r.seq_len): r.flops_per_s for r in self.roofs.attention if r.head_dim == nearest}
        return heads * 6 * T * D * T / float(np.interp(math.log(T), *zip(*sorted(rates.items()), strict=True)))

    def slowed_s(self, products: list[tuple[int, float, int]], rest_s: float, precision: str) -> float:
        """Seconds of products (count, seconds in bursts, FLOPs) under the power limit, with `rest_s` of other kernels.

        Back to back, a large product draws the limit's power, and its rate falls from that of bursts to the lower one.
        A step lies between: its load is its products' FLOPs over what the large product would do in the whole step, 0
        leaves the one rate, 1 the other, and between the two the rate is taken as linear, since power is a mean over
        time. The load depends on the step's time.
        """
        square = max(
            (p for p in self.roofs.products if p.precision == precision and p.flops_per_s),
            key=lambda p: p.m * p.n * p.k,
        )
        free_s = sum(count * seconds for count, seconds, _ in products)
        work_s = sum(count * work for count, _, work in products) / square.burst_flops_per_s
        lost, slowed_s = 1 - square.flops_per_s / square.burst_flops_per_s, free_s
        for _ in range(20):  # converges: a longer step has less load
            slowed_s = free_s / (1 - min(1.0, work_s / (rest_s + slowed_s)) * lost)
        return slowed_s


def predict(step: str, shape, batch_size: int, measured: Roofs) -> Prediction:
    """One step at a shape (a GPTConfig), from the roofs of a machine. Raises ValueError where they lack a part."""
    machine, numbers, number = Machine(measured), roofs.sizes(shape, batch_size), step[0]
    mixed = "bf16" if "bf16" in machine.precisions else "fp32"
    precision = {"0": "fp32", "4": "fp8"}.get(number, mixed)
    if precision not in machine.precisions or not (measured.kernels and measured.attention):
        raise ValueError(f"the roofs lack {precision.upper()} products, kernels or attention")
    seconds, launches = dict.fromkeys(CATEGORIES, 0.0), 0
    for one, times in [*((p, shape.n_layer) for p in IN_A_BLOCK[number]), *((p, 1) for p in ONCE_A_STEP[number])]:
        parts = math.ceil(numbers[one.tensor] / one.most) if one.most else 1
        seconds[one.category] += times * one.kernels * parts * machine.pass_s(one, numbers[one.tensor] / parts)
        launches += times * one.kernels * parts
    products = list(products_of(number, shape, batch_size, machine, precision))
    launches += sum(count for count, _, _ in products)
    if number not in BY_HAND:
        heads, D = batch_size * shape.n_head, shape.n_embd // shape.n_head
        seconds[ATTENTION] += shape.n_layer * machine.attention_s(shape.seq_len, D, heads)
        launches += shape.n_layer * FUSED_LAUNCHES
    seconds["matrix products"] = machine.slowed_s(products, sum(seconds.values()), precision)
    launch_s = measured.launch_s.get("fp32" if precision == "fp32" else "bf16", 0.0)
    host_s = 0.0 if number in CAPTURED else launches * launch_s
    return Prediction({name: s * 1e3 for name, s in seconds.items()}, launches, host_s * 1e3)


def products_of(
    number: str, shape, batch_size: int, machine: Machine, precision: str
) -> Iterator[tuple[int, float, int]]:
    """How often a step runs each product, its seconds at the ceiling, and its FLOPs."""
    for mnk, count in flops.matrix_products(shape, batch_size * shape.seq_len).items():
        yield count, machine.product_s(precision, *mnk), 2 * math.prod(mnk)
    for (m, n, k), count in (roofs.batched_products(shape, batch_size) if number in BY_HAND else {}).items():
        least_s = (4 if precision == "fp32" else 2) * (m * n + m * k + n * k) / machine.roofs.copy_bytes_per_s
        yield count * shape.n_layer, max(least_s, machine.product_s(precision, m, n, k)), 2 * m * n * k


def read_roofs(name: str | None) -> tuple[Roofs, str]:
    """Roofs of a machine in docs/results, of a file, or the newest below results/. Raises ValueError, one line."""
    results = hardware.ROOT / "docs" / "results" / (name or "")
    of_machine = [*results.glob(f"*/{ROOFS}"), *results.glob(f"*/{MERGED}")] if name and results.is_dir() else []
    measured = [*hardware.ROOT.glob(f"results/*{ROOFS}"), *hardware.ROOT.glob(f"results/*/{ROOFS}")]
    found = of_machine or ([Path(name)] if name else sorted(measured, key=lambda path: -path.stat().st_mtime))
    for path in found:
        content = read_object(path)
        content = content.get("roofs") or content
        try:
            of_kind = {"products": ProductRate, "kernels": KernelTime, "attention": AttentionRate}
            parts = {part: [kind(**one) for one in content[part]] for part, kind in of_kind.items()}
            return Roofs(**content | parts | {"environment": None}), str(path)
        except (KeyError, TypeError):
            continue
    raise ValueError(
        f"{name or 'results/'} holds no roofs that can be read: python -m ladder.roofs --grid measures them"
    )


def main() -> None:
    parser = OneLineParser(prog="python -m ladder.predict", description=__doc__)
    text = "whose roofs: a folder of docs/results, or a file (default: the newest roofs below results/)"
    parser.add_argument("--machine", metavar="NAME", help=text)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the milliseconds there, by step")
    given, words = parser.parse_known_args()
    args = arguments.parse_args(hardware.ROOT / "ladder" / "predict.py", __doc__, words, trains=False)
    found, why = {}, {}
    try:
        measured, path = read_roofs(given.machine)
    except ValueError as error:
        parser.error(str(error))
    for step in (name.removesuffix(".py") for name in scripts()):
        try:
            found[step] = predict(step, args.config, args.batch_size, measured)
        except ValueError as error:
            why[step] = str(error)
        except (ArithmeticError, LookupError, TypeError) as error:
            why[step] = f"the roofs are damaged ({type(error).__name__}): measure them again"
    if not found or (given.output and not given.output.name):
        parser.error("--output names no file" if found else f"{path}: {next(iter(why.values()))}")
    rows = []
    for step, one in found.items():
        busy = sum(one.category_ms.values())
        parts = {"products": one.category_ms["matrix products"], "attention": one.category_ms[ATTENTION]}
        parts |= {"other kernels": busy - sum(parts.values()), "gaps": max(0.0, one.host_ms - busy)}
        rows.append(
            {"step": step, "predicted ms": f"{one.ms:.2f}", **{name: f"{ms:.2f}" for name, ms in parts.items()}}
        )
    say("\n".join(f"{step} is not predicted: {reason}" for step, reason in why.items()) + "\n" * bool(why), end="")
    say(f"{aligned(rows)}\n\nmilliseconds a step of {args.config}, batch {args.batch_size}, from the roofs in {path}")
    if given.output:
        write_json(given.output, {step: one.ms for step, one in found.items()})


if __name__ == "__main__":
    run_command(main, "python -m ladder.predict")
