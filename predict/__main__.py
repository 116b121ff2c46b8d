"""Each step's time from what a machine can do: nothing is trained, and no measured time of a step is used.

    python -m predict [--machine h200|FILE] ARGUMENT ...     the ARGUMENTs are those of a step

A prediction is a sum. Matrix products take the time that the roofs give for their shapes. Fused attention
takes its FLOPs over its rate. What lies between are passes over memory, which predict/step_kernels.py counts.
Where the host needs longer to launch the kernels than the GPU to run them, the host's time counts. Under its
power limit a GPU lowers its clock: see Machine.slowdown.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common import flops, hardware
from common.model import PRESETS
from common.options import build_parser, parse_args
from common.record import ROOFS, Roofs, read_object
from common.text import PACKAGES, OneLineParser, aligned, run_command, say
from predict import roofs
from predict.machine import Machine
from predict.step_kernels import STEPS, Step

SELF = Path("python -m predict")  # whose name messages begin with
ATTENTION_KERNELS = 4  # fused, of a block: forward, and three backward
ALIGNED = 8  # by which sizes of a fast product divide
FITS = 0.97  # of a GPU's memory


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


def predict(name: str, shape, batch_size: int, measured: Roofs, capture: bool = True) -> Prediction:
    """One of STEPS at a shape (a GPTConfig), from a machine's roofs; without `capture` launched.

    Raises ValueError where the roofs lack a part, and for sizes that FP8 cannot multiply.
    """
    step, machine, numbers = STEPS[name], Machine(measured), roofs.sizes(shape, batch_size)
    precision = step.precision or ("bf16" if "bf16" in machine.precisions else "fp32")
    capability = measured.environment.compute_capability or (0, 0)  # of a CPU
    if precision == "fp8" and capability < hardware.FP8_CAPABILITY:
        raise ValueError(hardware.NO_FP8)
    if precision not in machine.precisions or not (measured.kernels and measured.attention):
        lacking = f"{precision.upper()} products, kernels or attention"
        raise ValueError(f"the roofs lack {lacking}: python -m predict.roofs measures them")
    if precision == "fp8":
        check_fp8(shape, batch_size, hardware.fp8_unit(capability))
    products = list(products_of(name, shape, batch_size, machine, precision))
    attention_s, launches = 0.0, sum(count for count, _, _ in products)
    kernels, others_s = sum_of_passes(step, shape.n_layer, numbers, machine)
    launches += kernels
    load_s = sum(count * work for count, _, work in products) / machine.large(precision).burst_flops_per_s
    if not step.attention_by_hand:
        attention_s, attention_load_s = fused_attention(shape, batch_size, machine)
        load_s += attention_load_s
        launches += ATTENTION_KERNELS * shape.n_layer
    products_s = sum(count * seconds for count, seconds, _ in products)
    slowdown = machine.slowdown(products_s + attention_s, load_s, others_s, precision)
    products_s, attention_s = slowdown * products_s, slowdown * attention_s
    launch_s = 0.0 if capture and step.captured else measured.launch_s or 0.0
    return Prediction(products_s * 1e3, attention_s * 1e3, others_s * 1e3, launches * launch_s * 1e3)


def sum_of_passes(step: Step, n_layer: int, numbers: dict[str, int], machine: Machine) -> tuple[int, float]:
    """How many kernels lie between the products of a step, and their seconds."""
    kernels, seconds = 0, 0.0
    for passes, times in ((step.in_a_block, n_layer), (step.once, 1)):
        for each in passes:
            kernels += times * each.kernels
            seconds += times * each.kernels * machine.pass_s(each, numbers[each.tensor])
    return kernels, seconds


def fused_attention(shape, batch_size: int, machine: Machine) -> tuple[float, float]:
    """Seconds of a step's fused attention in bursts, and those in which the large product would do its
    FLOPs. It is in 16 bits in every step, or on a device without them in FP32."""
    D, precision = shape.n_embd // shape.n_head, "bf16" if "bf16" in machine.precisions else "fp32"
    heads = shape.n_layer * batch_size * shape.n_head
    work = flops.attention_flops(heads, shape.seq_len, D)
    return machine.attention_s(shape.seq_len, D, heads), work / machine.large(precision).burst_flops_per_s


def check_fp8(shape, batch_size: int, unit: int) -> None:
    """Raises ValueError for sizes that cannot be multiplied in FP8, which must divide by `unit`."""
    for size in (shape.n_embd, batch_size * shape.seq_len, shape.vocab_size):
        if size % unit:
            raise ValueError(f"FP8 needs channels, tokens and vocabulary divisible by {unit}, not {size}")


def products_of(
    name: str, shape, batch_size: int, machine: Machine, precision: str
) -> Iterator[tuple[int, float, int]]:
    """How often a step runs each product, its seconds at the ceiling, and its FLOPs."""
    for mnk, count in flops.matrix_products(shape, batch_size * shape.seq_len).items():
        yield count, machine.product_s(precision, *mnk), 2 * math.prod(mnk)
    if STEPS[name].attention_by_hand:
        for (m, n, k), count in roofs.batched_products(shape, batch_size).items():
            moved = (4 if precision == "fp32" else 2) * (m * n + m * k + n * k)  # bytes
            seconds = max(moved / machine.roofs.copy_bytes_per_s, machine.product_s(precision, m, n, k))
            yield count * shape.n_layer, seconds, 2 * m * n * k


def peak_bytes(name: str, shape, batch_size: int) -> int:
    """An estimate of a step's peak memory at a shape (a GPTConfig): within 7 % of a GPU's recorded peaks
    above 2 GiB.

    The peak is AdamW's, or else in the loss or the last block: there 12 bytes a parameter, from step 1 on
    also weights in BF16 and the head's gradient in both formats, and what backward finds.
    """
    step, memory, parameters = STEPS[name], STEPS[name].memory, flops.parameters(shape)
    tokens, C, L = batch_size * shape.seq_len, shape.n_embd, shape.n_layer
    scores = shape.n_head * shape.seq_len  # of a token
    weights = 12 * parameters
    if step.precision != "fp32":
        weights += 24 * L * C**2 + 6 * shape.vocab_size * C
    saved = tokens * (memory.in_blocks * L * C + memory.outside * C + memory.of_score * L * scores)
    largest = tokens * max(memory.of_logit * shape.vocab_size, memory.of_last_score * scores)
    return max(weights + saved + largest, 16 * parameters)


def read_roofs(name: str | None) -> tuple[Roofs, str]:
    """Roofs of a machine in docs/results, of a file, or the newest below results/, and their file. Raises
    ValueError, one line."""
    sys.path.append(str(PACKAGES / "report"))
    import msgspec

    if name is None:
        paths = (hardware.ROOT / "results").glob(f"*{ROOFS}")
        paths = sorted(paths, key=lambda path: -path.stat().st_mtime)
    else:
        paths = [*(hardware.ROOT / "docs" / "results" / name).glob(f"*/{ROOFS}")] or [Path(name)]
    for path in paths:
        try:
            measured = msgspec.convert(read_object(path), Roofs)
        except msgspec.ValidationError:
            continue
        if measured.products and measured.environment:
            return measured, str(path)
    known = " or ".join(sorted({path.parts[-3] for path in hardware.ROOT.glob(f"docs/results/*/*/{ROOFS}")}))
    advice = f"run python -m predict.roofs, or take --machine {known}"
    raise ValueError(f"{name or 'results/'} holds no roofs that can be read: {advice}")


def unaligned(shape, batch_size: int) -> list[str]:
    """The sizes of a shape that slow its products down: tensor cores read 8 numbers of 16 bits at a time.

    Source: NVIDIA's "Matrix Multiplication Background", section 3.1.
    """
    sizes = {"channels": shape.n_embd, "tokens": batch_size * shape.seq_len, "vocabulary": shape.vocab_size}
    return [f"{name} {size}" for name, size in sizes.items() if size % ALIGNED]


def predict_all(args, measured: Roofs) -> tuple[dict[str, Prediction], dict[str, str]]:
    """Every step that the roofs suffice for, and why others are left out. Raises ValueError where none is
    left."""
    predictions, left_out = {}, {}
    for name in STEPS:
        try:
            predictions[name] = predict(name, args.config, args.batch_size, measured, args.capture)
        except ValueError as error:
            left_out[name] = str(error)
        except (ArithmeticError, TypeError) as error:
            left_out[name] = f"the roofs are damaged: {error}"
    if not predictions:
        raise ValueError(next(iter(left_out.values())))
    return predictions, left_out


def table(predictions: dict[str, Prediction], args, gpu_bytes: int | None) -> list[dict[str, str]]:
    """A row a step. The estimate of memory is a GPU's."""
    rows, before = [], next(iter(predictions.values()))
    for name, prediction in predictions.items():
        row = {"step": name, "ms": f"{prediction.ms:,.1f}", "x above": f"{before.ms / prediction.ms:.2f}"}
        row["products"] = f"{prediction.products_ms:,.1f}"
        row["fused attention"] = f"{prediction.attention_ms:,.1f}"
        row["other kernels"] = f"{prediction.others_ms:,.1f}"
        row["gaps"] = f"{max(0.0, prediction.host_ms - prediction.busy_ms):,.1f}"
        if gpu_bytes:
            peak = peak_bytes(name, args.config, args.batch_size)
            row |= {"GiB": f"{peak / 2**30:.1f}", "fits": "yes" if peak < FITS * gpu_bytes else "no"}
        rows.append(row)
        before = prediction
    return rows


def with_nearest_preset(words: list[str]) -> list[str]:
    """Arguments for another machine than this one: fields left out are the nearest preset's."""
    if any(word.partition("=")[0] == "--preset" for word in words):
        return words
    n_embd = build_parser("python -m predict", None).parse_known_args(words)[0].n_embd or 768
    return [
        *words,
        "--preset",
        min(PRESETS, key=lambda name: abs(math.log(PRESETS[name][0].n_embd / n_embd))),
    ]


def main() -> None:
    parser = OneLineParser(prog="python -m predict", description=__doc__)
    text = "whose roofs: a folder of docs/results, or a file (default: the newest results/*roofs.json)"
    parser.add_argument("--machine", metavar="NAME", help=text)
    options, words = parser.parse_known_args()
    if options.machine:
        words = with_nearest_preset(words)
    try:
        measured, file = read_roofs(options.machine)
        args = parse_args(SELF, __doc__, words, trains=False)
        predictions, left_out = predict_all(args, measured)
    except ValueError as error:
        parser.error(str(error))
    for name, reason in left_out.items():
        say(f"{name} is not predicted: {reason}")
    if sizes := unaligned(args.config, args.batch_size):
        say(f"{', '.join(sizes)}: not divisible by {ALIGNED}, so the real step is slower than predicted here")
    gpu_bytes = measured.environment.gpu_memory_bytes
    file = file.removeprefix(f"{hardware.ROOT}/")
    say(f"{aligned(table(predictions, args, gpu_bytes))}\n")
    say(f"milliseconds a step of {args.config}, batch {args.batch_size}, from the roofs in {file}")


if __name__ == "__main__":
    run_command(main, "python -m predict")
