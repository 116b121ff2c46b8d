"""Each step's time from what a machine can do: nothing is trained, nothing is fitted to a step's time.

    python -m ladder.predict [--machine h200|FILE] ARGUMENT ...     the ARGUMENTs are those of a step

A prediction is a sum. Matrix products take the time that the roofs give for their shapes. Fused attention
takes its FLOPs over its rate. What lies between passes over memory: the bytes that kernels read and write for
each number of a tensor are counted by hand below, from the scripts (FP32 has 4, BF16 2, FP8 1). Where the
host needs longer to launch the kernels than the GPU to run them, the host's time counts. Under its power
limit a GPU lowers its clock: `slowed_s`.
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import arguments, flops, hardware
from common.model import PRESETS
from common.record import PLAN, PREDICTED, ROOFS, Roofs, read_object, write_json
from common.text import OneLineParser, aligned, run_command, say
from ladder import roofs
from ladder.runs import scripts

SELF = hardware.ROOT / "ladder" / "predict.py"
HOPPER = (9, 0)  # of roofs that were recorded without a capability
COPY = "copy fp32"  # moves 8 bytes a number


class Pass(NamedTuple):
    """Kernels that together move `bytes` for every number of a tensor, see ladder.roofs.sizes."""

    tensor: str
    bytes: int
    kernels: int
    kernel: str | None = (
        None  # of ladder/roofs.py: its measured time counts; without one, that of copies of the bytes
    )


# What the predictor knows of each step: its precision, where it is not mixed; whether it writes the (T, T)
# scores of attention; whether it is captured; and below its kernels. Steps that it does not know are left
# out.
PRECISION = {"0_baseline": "fp32", "4_transformer_engine": "fp8"}
BY_HAND = ("0_baseline", "1_cublas")
CAPTURED = ("3_compile", "4_transformer_engine")
# Kernels of one block. A vector is a bias or less: sums, cleared workspaces.
EAGER = (
    Pass("stream", 24, 4, "to fp32"),  # autocast runs LayerNorm in FP32: its input, in backward its gradient
    # Two LayerNorms in FP32, 8 each; outputs to BF16, backward gradients of inputs, 24; residual adds in
    # BF16, 6 each.
    Pass("stream", 64, 10),
    Pass("stream", 40, 2, "layer norm backward fp32"),
    Pass("hidden", 4, 1, "gelu half"),
    Pass("hidden", 6, 1),  # GELU's backward reads gradient and input, and writes
    Pass("width", 8, 4, "sum over tokens half"),  # the gradient of a bias is a sum over tokens: four biases
    Pass("qkv", 4, 1, "heads half"),  # split's backward joins the gradients of q, k and v
    Pass("weight", 24, 4),  # autocast casts four weights to BF16
    Pass("weight", 24, 4, "to fp32"),  # backward: their gradients to FP32
    Pass("vector", 0, 20),
)
IN_A_BLOCK = {
    "0_baseline": (
        # Forward and backward of / sqrt(D) and of the mask, 8 each; masked_fill copies its input first, 16;
        # softmax 8, backward 12 and a product of gradient and output, 12.
        Pass("scores", 80, 9),
        Pass("stream", 56, 7),  # heads made contiguous: q, k, v, output, three gradients
        Pass("stream", 64, 6),  # two LayerNorms, 8 each; two residual adds and their backward, 12 each
        Pass("stream", 40, 2, "layer norm backward fp32"),
        Pass("hidden", 20, 2),  # GELU, and its backward
        Pass("width", 16, 4),
        Pass("qkv", 8, 1),
        Pass("vector", 0, 12),
    ),
    "1_cublas": (
        # / sqrt(D), forward and backward, 4 each; masked_fill's copies, 8; softmax in FP32, 20, and its
        # product in backward, 12; weights back to BF16, and backward the gradient of scores, 12.
        Pass("scores", 60, 9),
        Pass("scores", 8, 2, "mask half"),
        Pass("scores", 12, 2, "to fp32"),  # autocast runs softmax in FP32: scores, and in backward a gradient
        Pass("stream", 28, 7, "heads half"),
        *EAGER,
    ),
    "2_sdpa": EAGER,
    "3_compile": (
        # LayerNorm, 4; residual add with LayerNorm, 8; residual add, 6; their backward, 8 twice; gradients of
        # LayerNorm's weights and biases, 4 twice.
        Pass("stream", 42, 7),
        Pass("hidden", 4, 1, "gelu half"),
        Pass("hidden", 6, 1),
        Pass("width", 8, 4, "sum over tokens half"),
        Pass("qkv", 4, 1),
        Pass("weight", 48, 8),  # weights to BF16 in forward, their gradients to FP32 in backward
        Pass("vector", 0, 12),
    ),
    "4_transformer_engine": (
        # Two LayerNorms with their backward, 9 each; residual adds, 6 each; attention's output to FP8 in two
        # layouts, LayerNorms' FP8 outputs transposed, 8.
        Pass("stream", 50, 9),
        Pass("hidden", 3, 1, "gelu half"),  # GELU reads BF16 and writes FP8
        Pass("hidden", 4, 2),  # GELU's FP8 output transposed; GELU's backward reads its input while it casts
        Pass("weight", 24, 4),  # four weights read in FP32 and written in FP8 in two layouts
        Pass("width", 16, 4),  # gradients of four outputs read in BF16 and written in FP8 in two layouts
        Pass("weight", 24, 4, "to fp32"),
        Pass("qkv", 4, 1, "heads half"),
        Pass("vector", 0, 29),
    ),
}
# Kernels of one step, outside the blocks. Rows gathered, positions added, and their gradients, 28, with
# LayerNorm; the embedding's gradient cleared, 4, and the tied weight's two gradients added, 12; tokens
# sorted, 30 kernels.
EMBEDDING = (Pass("stream", 36, 5), Pass("stream", 20, 1, "layer norm backward fp32"), Pass("vector", 0, 30))
FUSED_ADAMW = Pass("parameters", 28, 1)  # reads weight, gradient and both moments, writes three
ONCE_EAGER = (
    *EMBEDDING,
    Pass("embedding", 22, 3),  # also the head's weight to BF16
    Pass("embedding", 6, 1, "to fp32"),  # its gradient to FP32
    Pass(
        "logits", 26, 4
    ),  # log-softmax and its backward, 16; the picked ones' gradient cleared, and a cast's backward
    Pass("logits", 6, 1, "to fp32"),  # autocast picks log-probabilities in FP32: all are cast
    FUSED_ADAMW,
)
ONCE_A_STEP = {
    # Log-softmax reads for maximum, sum and output, and writes; its backward as much; a gradient is cleared.
    "0_baseline": (*EMBEDDING, Pass("embedding", 16, 2), Pass("logits", 36, 3), FUSED_ADAMW),
    "1_cublas": ONCE_EAGER,
    "2_sdpa": ONCE_EAGER,
    # Maximum and sum in one pass, and the gradient; the head's weight to BF16, its gradient to FP32.
    "3_compile": (
        Pass("stream", 44, 6),
        Pass("vector", 0, 30),
        Pass("embedding", 28, 4),
        Pass("logits", 6, 2),
        FUSED_ADAMW,
    ),
    # The same in FP8: the weight, and the gradient of the logits, in two layouts.
    "4_transformer_engine": (
        Pass("stream", 37, 5),
        Pass("vector", 0, 30),
        Pass("embedding", 28, 3),
        Pass("logits", 10, 3),
        FUSED_ADAMW,
    ),
}
# Bytes of memory: of each number of (tokens, C) in a block, and outside the blocks; of each logit; of each
# score of a block, and once; of each parameter in AdamW. Found on the records of an H200.
MEMORY = {
    "0_baseline": (64, 0, 12, 4, 12, 16),
    "1_cublas": (30, 0, 10, 7, 8, 16),
    "2_sdpa": (35, 8, 10, 0, 0, 16),
    "3_compile": (31, 12, 2, 0, 0, 16),
    "4_transformer_engine": (27, 12, 4, 0, 0, 16),
}


STEPS = tuple(IN_A_BLOCK)


@dataclass
class Prediction:
    products_ms: float
    attention_ms: float  # fused
    others_ms: float
    host_ms: float  # what the host needs to launch them; 0 where it launches once

    @property
    def busy_ms(self) -> float:
        return self.products_ms + self.attention_ms + self.others_ms

    @property
    def ms(self) -> float:
        return max(self.busy_ms, self.host_ms)


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

        A product costs a launch, bytes that grow with two dimensions at a time, and FLOPs that grow with all
        three, so its time is linear in each dimension. Beyond the grid it grows with the FLOPs. Raises
        ValueError without a grid.
        """
        if (precision, m, n, k) in self.products:
            return self.products[precision, m, n, k]
        if not all(
            (precision, *corner) in self.products for corner in itertools.product(self.axis, repeat=3)
        ):
            raise ValueError(
                "the roofs lack products of this size: python -m ladder.roofs --grid measures all sizes"
            )
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
        """Of one kernel of a pass over `numbers` numbers: measured, or the time of a copy of as many
        bytes."""
        timed = {n: seconds for kernel, n, seconds in self.roofs.kernels if kernel == one.kernel}
        size = numbers if timed else one.bytes / one.kernels * numbers / 8
        timed = timed or {n: seconds for kernel, n, seconds in self.roofs.kernels if kernel == COPY}
        beyond = max(1.0, size / max(timed))
        return beyond * float(np.interp(size / beyond, *zip(*sorted(timed.items()), strict=True)))

    def attention_s(self, T: int, D: int, heads: int) -> float:
        """Of fused causal attention, forward and backward: at the nearest head dimension, between measured
        lengths."""
        nearest = min((dim for _, dim, _ in self.roofs.attention), key=lambda dim: abs(math.log(dim / D)))
        rates = {math.log(length): rate for length, dim, rate in self.roofs.attention if dim == nearest}
        return (
            heads * 6 * T * D * T / float(np.interp(math.log(T), *zip(*sorted(rates.items()), strict=True)))
        )

    def slowed_s(self, products: list[tuple[int, float, int]], rest_s: float, precision: str) -> float:
        """Seconds of products (count, seconds in bursts, FLOPs) under the power limit, with `rest_s` of other
        kernels.

        Back to back, a large product draws the limit's power, and its rate falls from that of bursts to the
        lower one. A step lies between: its load is its products' FLOPs over what the large product would do
        in the whole step, 0 leaves the one rate, 1 the other, and between the two the rate is taken as
        linear, since power is a mean over time. The load depends on the step's time.
        """
        steady = [p for p in self.roofs.products if p.precision == precision and p.flops_per_s]
        square = max(steady, key=lambda p: p.m * p.n * p.k)
        free_s = sum(count * seconds for count, seconds, _ in products)
        work_s = sum(count * work for count, _, work in products) / square.burst_flops_per_s
        lost, slowed_s = 1 - square.flops_per_s / square.burst_flops_per_s, free_s
        for _ in range(20):  # converges: a longer step has less load
            slowed_s = free_s / (1 - min(1.0, work_s / (rest_s + slowed_s)) * lost)
        return slowed_s


def predict(step: str, shape, batch_size: int, measured: Roofs, capture: bool = True) -> Prediction:
    """One of STEPS at a shape (a GPTConfig), from a machine's roofs; without `capture` launched.

    Raises ValueError where the roofs lack a part, and for sizes that FP8 cannot multiply.
    """
    machine, numbers = Machine(measured), roofs.sizes(shape, batch_size)
    mixed = "bf16" if "bf16" in machine.precisions else "fp32"
    precision = PRECISION.get(step, mixed)
    if precision not in machine.precisions or not (measured.kernels and measured.attention):
        raise ValueError(f"the roofs lack {precision.upper()} products, kernels or attention")
    capability = measured.environment.compute_capability if measured.environment else None
    unit = hardware.fp8_unit(capability or HOPPER)
    odd = [size for size in (shape.n_embd, batch_size * shape.seq_len, shape.vocab_size) if size % unit]
    if precision == "fp8" and odd:
        raise ValueError(f"FP8 needs channels, tokens and vocabulary divisible by {unit}, not {odd[0]}")
    passes = [(one, shape.n_layer) for one in IN_A_BLOCK[step]] + [(one, 1) for one in ONCE_A_STEP[step]]
    others_s = sum(times * one.kernels * machine.pass_s(one, numbers[one.tensor]) for one, times in passes)
    products = list(products_of(step, shape, batch_size, machine, precision))
    launches = sum(times * one.kernels for one, times in passes) + sum(count for count, _, _ in products)
    attention_s = 0.0
    if step not in BY_HAND:
        heads, D = batch_size * shape.n_head, shape.n_embd // shape.n_head
        attention_s = shape.n_layer * machine.attention_s(shape.seq_len, D, heads)
        launches += 4 * shape.n_layer  # forward, and three kernels backward
    products_s = machine.slowed_s(products, others_s + attention_s, precision)
    host_s = 0.0 if capture and step in CAPTURED else launches * (measured.launch_s or 0.0)
    return Prediction(products_s * 1e3, attention_s * 1e3, others_s * 1e3, host_s * 1e3)


def products_of(
    step: str, shape, batch_size: int, machine: Machine, precision: str
) -> Iterator[tuple[int, float, int]]:
    """How often a step runs each product, its seconds at the ceiling, and its FLOPs."""
    for mnk, count in flops.matrix_products(shape, batch_size * shape.seq_len).items():
        yield count, machine.product_s(precision, *mnk), 2 * math.prod(mnk)
    for (m, n, k), count in (roofs.batched_products(shape, batch_size) if step in BY_HAND else {}).items():
        least_s = (4 if precision == "fp32" else 2) * (m * n + m * k + n * k) / machine.roofs.copy_bytes_per_s
        yield count * shape.n_layer, max(least_s, machine.product_s(precision, m, n, k)), 2 * m * n * k


def peak_bytes(step: str, shape, batch_size: int) -> int:
    """An estimate of a step's peak memory at a shape (a GPTConfig): within 7 % of a GPU's recorded peaks
    above 2 GiB.

    The peak is AdamW's, or else in the loss or the last block: there 12 bytes a parameter, from step 1 on
    also weights in BF16 and the head's gradient in both formats, and what backward finds.
    """
    tokens, C, parameters = batch_size * shape.seq_len, shape.n_embd, flops.parameters(shape)
    of_block, outside, of_logit, of_score, once, of_parameter = MEMORY[step]
    scores, L = shape.n_head * shape.seq_len, shape.n_layer  # of a token
    saved = tokens * (of_block * L * C + outside * C + of_score * L * scores)
    weights = 12 * parameters
    if PRECISION.get(step) != "fp32":  # also weights in BF16, and the head's gradient in both formats
        weights += 24 * L * C**2 + 6 * shape.vocab_size * C
    return max(
        weights + saved + tokens * max(of_logit * shape.vocab_size, once * scores), of_parameter * parameters
    )


def read_roofs(name: str | None) -> tuple[Roofs, int | None, str]:
    """Roofs of a machine in docs/results, of a file, or the newest below results/; the GPU's bytes of memory;
    the file. Raises ValueError, one line."""
    import msgspec

    results = hardware.ROOT / "docs" / "results" / (name or "")
    of_machine = [*results.glob(f"*/{ROOFS}")] if name else []
    measured = [*hardware.ROOT.glob(f"results/*{ROOFS}"), *hardware.ROOT.glob(f"results/*/{ROOFS}")]
    for path in of_machine or (
        [Path(name)] if name else sorted(measured, key=lambda path: -path.stat().st_mtime)
    ):
        try:
            found = msgspec.convert(read_object(path), Roofs)
        except msgspec.ValidationError:
            continue
        if found.products and all(one.burst_flops_per_s > 0 for one in found.products):
            return found, found.environment and found.environment.gpu_memory_bytes, str(path)
    known = " or ".join(sorted({path.parts[-3] for path in hardware.ROOT.glob(f"docs/results/*/*/{ROOFS}")}))
    advice = f"run python -m ladder.roofs --grid, or take --machine {known}"
    raise ValueError(f"{name or 'results/'} holds no roofs that can be read: {advice}")


def row(step: str, one: Prediction, before: Prediction, peak: int, memory: int | None) -> dict[str, str]:
    parts = {"products": one.products_ms, "fused attention": one.attention_ms, "other kernels": one.others_ms}
    parts |= {"gaps": max(0.0, one.host_ms - one.busy_ms)}
    cells = {"ms": f"{one.ms:,.1f}", "x above": f"{before.ms / one.ms:.2f}"}
    cells |= {name: f"{ms:,.1f}" for name, ms in parts.items()}
    held = {"GiB": f"{peak / 2**30:.1f}", "fits": "yes" if peak < 0.97 * memory else "no"} if memory else {}
    return {"step": step} | cells | held  # the estimate of memory is a GPU's


def predict_all(args, measured: Roofs) -> tuple[dict[str, Prediction], dict[str, str]]:
    """Every step that the roofs suffice for, and why others are left out. Raises ValueError where none is
    left."""
    found, why = {}, {}
    here = [name.removesuffix(".py") for name in scripts()]
    for step in (step for step in STEPS if step in here):
        try:
            found[step] = predict(step, args.config, args.batch_size, measured, args.capture)
        except (ValueError, ArithmeticError, TypeError) as error:
            why[step] = str(error) if isinstance(error, ValueError) else f"the roofs are damaged: {error}"
    if not found:
        raise ValueError(next(iter(why.values())))
    return found, why


def of_plan(folder: Path) -> dict:
    """Milliseconds by row of a run folder's plan; of a sweep by its runs and rows. Roofs are measured
    first."""
    plan, found = read_object(folder / PLAN), {}
    for planned in plan["rows"]:
        place = str(Path(planned["output"]).parent)
        if place not in found:
            args = arguments.parse_args(SELF, None, planned["arguments"], trains=False)
            if not (folder / ROOFS).exists():
                roofs.record(args, plan["kind"] == "sweep", folder / ROOFS)
            measured = read_roofs(str(folder / ROOFS))[0]
            found[place] = {step: one.ms for step, one in predict_all(args, measured)[0].items()}
    return found if plan["kind"] == "sweep" else found.get(".", {})


def main() -> None:
    parser = OneLineParser(prog="python -m ladder.predict", description=__doc__)
    text = "whose roofs: a folder of docs/results, or a file (default: the newest roofs below results/)"
    parser.add_argument("--machine", metavar="NAME", help=text)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)  # the ladder's run folder
    given, words = parser.parse_known_args()
    if given.machine and "--preset" not in " ".join(
        words
    ):  # another card's: fields left out are the nearest preset's
        n_embd = arguments.build_parser(parser.prog, None).parse_known_args(words)[0].n_embd or 768
        words += ["--preset", min(PRESETS, key=lambda name: abs(math.log(PRESETS[name][0].n_embd / n_embd)))]
    try:
        if given.plan:
            return write_json(given.plan / PREDICTED, of_plan(given.plan))
        measured, memory, path = read_roofs(given.machine)
        args = arguments.parse_args(SELF, __doc__, words, trains=False)
        found, why = predict_all(args, measured)
    except ValueError as error:
        parser.error(str(error))
    rows, before = [], next(iter(found.values()))
    for step, one in found.items():
        rows.append(row(step, one, before, peak_bytes(step, args.config, args.batch_size), memory))
        before = one
    say("".join(f"{step} is not predicted: {reason}\n" for step, reason in why.items()), end="")
    where = Path(path).relative_to(hardware.ROOT) if hardware.ROOT in Path(path).parents else path
    say(
        f"{aligned(rows)}\n\n"
        f"milliseconds a step of {args.config}, batch {args.batch_size}, from the roofs in {where}"
    )


if __name__ == "__main__":
    run_command(main, "python -m ladder.predict")
