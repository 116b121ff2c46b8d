"""Each rung's step time from what this machine can do: nothing is trained, nothing is fitted.

A prediction is a sum. Matrix products take the time that the roofs give for their shapes. Fused attention takes its
FLOPs over its rate. What lies between passes over memory, see ladder/counts.py. Where the host needs longer to launch
the kernels than the GPU to run them, the host's time counts. Under its power limit a GPU lowers its clock, see
`_slowed`. One process, one micro-batch, no checkpointing.
"""

from __future__ import annotations

if __name__ == "__main__":
    from common.errors import needs

    needs("torch", "numpy", "msgspec", "tabulate")

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from common import arguments, flops, hardware, passes
from common.errors import run_command
from common.record import CATEGORIES, Roofs, Workload, describe_shape, read_object, write_json
from common.roofs import product_seconds
from common.text import OneLineParser, aligned, one_line, say
from ladder import counts
from ladder.counts import BY_HAND
from report.load import MERGED, PREDICTIONS, ROOFS, convert, read_json, read_run

STEPS = ("0_baseline", "1_cublas", "2_sdpa", "3_compile", "4_transformer_engine")
CAPTURED = "34"
MIXED = ("bf16", "fp32")  # what mixed precision multiplies, the first that the machine has
FUSED_LAUNCHES = 4  # of attention: forward, and three kernels backward
BATCHED_BYTES = {"fp32": 4, "bf16": 2}
COPY = "copy fp32"  # moves 8 bytes a number


@dataclass
class Prediction:
    step: str
    category_ms: dict[str, float]  # by common.record.CATEGORIES
    launches: int
    host_ms: float  # what the host needs to launch them; 0 where it launches once

    @property
    def ms(self) -> float:
        return max(sum(self.category_ms.values()), self.host_ms)


def predict(shape: Workload, roofs: Roofs) -> dict[str, Prediction]:
    """Every step that the machine of these roofs can run, by name. Raises ValueError where the roofs lack a part, or
    hold figures that no machine has."""
    if shape.gpus > 1 or shape.accumulate > 1 or shape.checkpoint:
        raise ValueError("only one process, one micro-batch and no checkpointing are predicted")
    copied = COPY in {one.kernel for one in roofs.passes}
    if not (roofs.grid and roofs.copy_bytes_per_s and roofs.ceilings and copied and roofs.attention):
        raise ValueError("these roofs lack products, passes or attention: measure them with python -m common.roofs")
    steps = [step for step in STEPS if step[0] != "4" or "fp8" in roofs.ceilings]
    try:
        return {step: _predict_step(step, shape, roofs) for step in steps}
    except (ArithmeticError, AttributeError, IndexError, TypeError, RuntimeError) as error:
        raise ValueError(f"these roofs are damaged ({type(error).__name__}): measure them again") from None


def _predict_step(step: str, shape: Workload, roofs: Roofs) -> Prediction:
    seconds, launches = dict.fromkeys(CATEGORIES, 0.0), 0
    numbers = counts.sizes(shape)
    moved = [(one, shape.n_layer) for one in counts.IN_A_BLOCK[step[0]]]
    for one, times in moved + [(one, 1) for one in counts.ONCE_A_STEP[step[0]]]:
        size = numbers[one.tensor]
        parts = math.ceil(size / one.most) if one.most else 1
        seconds[one.category] += times * one.kernels * parts * pass_seconds(roofs, one, size / parts, shape.n_embd)
        launches += times * one.kernels * parts
    products = list(_products(step, shape, roofs))
    launches += sum(count for count, _, _ in products)
    if step[0] not in BY_HAND:
        seconds["attention"] += shape.n_layer * _fused_seconds(shape, roofs)
        launches += shape.n_layer * FUSED_LAUNCHES
    seconds["matrix products"] = _slowed(products, sum(seconds.values()), _precision(step, roofs), roofs)
    host_s = 0.0 if step[0] in CAPTURED else launches * _launch_seconds(step, roofs)
    return Prediction(step, {name: s * 1e3 for name, s in seconds.items()}, launches, host_s * 1e3)


def _launch_seconds(step: str, roofs: Roofs) -> float:
    """What the host needs to launch one kernel of a step; older roofs know it of mixed precision alone."""
    fp32 = _timed(roofs, passes.LAUNCH_FP32).get(1) if _precision(step, roofs) == "fp32" else None
    return fp32 or roofs.launch_s or 0.0


def _precision(step: str, roofs: Roofs) -> str:
    """What the products of a step multiply on this machine."""
    mixed = next(name for name in MIXED if name in roofs.ceilings)
    return {"0": "fp32", "4": "fp8"}.get(step[0], mixed)


def _products(step: str, shape: Workload, roofs: Roofs) -> Iterable[tuple[int, float, int]]:
    """How often a step runs each product, its seconds at the ceiling, and its FLOPs."""
    precision = _precision(step, roofs)
    exact = {(s.m, s.n, s.k): 2 * s.m * s.n * s.k / s.ceilings[precision] for s in roofs.shapes}
    for mnk, count in flops.matrix_products(shape, shape.batch_size * shape.seq_len).items():
        seconds = exact[mnk] if mnk in exact else product_seconds(roofs.grid, precision, *mnk)
        yield count, seconds, 2 * math.prod(mnk)
    if step[0] in BY_HAND:  # batched over sequences and heads: one tall product each
        T, D = shape.seq_len, shape.n_embd // shape.n_head
        rows = shape.batch_size * shape.n_head * T
        least = BATCHED_BYTES[precision] * rows * (T + 2 * D) / roofs.copy_bytes_per_s
        for mnk, count in (((rows, T, D), 2), ((rows, D, T), 4)):  # scores and their gradient; the other four
            seconds = max(least, product_seconds(roofs.grid, precision, *mnk))
            yield count * shape.n_layer, seconds, 2 * math.prod(mnk)


def _slowed(products: list[tuple[int, float, int]], rest_s: float, precision: str, roofs: Roofs) -> float:
    """Seconds of all products under the power limit.

    Alone, at their ceiling, the clock is at its highest; back to back they draw the limit's power, and their rate
    falls to the second figure of the roofs. A step lies between. Its load is its products' FLOPs, over what the large
    square product would do at its ceiling in the whole step: 0 leaves the ceiling, 1 the rate back to back, and
    between the two the rate is taken as linear, since power is a mean over time. The load depends on the step's time.
    """
    free_s = sum(count * seconds for count, seconds, _ in products)
    work_s = sum(count * work for count, _, work in products) / roofs.square.ceilings[precision]
    lost = 1 - getattr(roofs, f"{precision}_flops_per_s") / roofs.ceilings[precision]
    slowed_s = free_s
    for _ in range(20):  # converges: a longer step has less load
        load = min(1.0, work_s / (rest_s + slowed_s))
        slowed_s = free_s / (1 - load * lost)
    return slowed_s


def pass_seconds(roofs: Roofs, one: counts.Pass, numbers: float, width: int) -> float:
    """The time of one kernel of a pass over `numbers` numbers: measured, or that of a copy of as many bytes. Of a
    kernel that was measured at some widths, the nearest one counts."""
    of_kernel = one.kernel and (_timed(roofs, one.kernel) or _nearest(roofs, one.kernel, width)[1])
    timed = of_kernel or _timed(roofs, COPY)
    size = numbers if of_kernel else one.bytes * numbers / 8
    beyond = max(1.0, size / max(timed))
    return beyond * float(np.interp(size / beyond, *zip(*sorted(timed.items()), strict=True)))


def _timed(roofs: Roofs, kernel: str) -> dict[int, float]:
    """Seconds of a kernel, by the numbers in its tensor."""
    return {timed.numbers: timed.seconds for timed in roofs.passes if timed.kernel == kernel}


def _nearest(roofs: Roofs, kernel: str, size: int) -> tuple[int, dict[int, float]]:
    """Of a kernel that was timed at several sizes, the size whose ratio to `size` is nearest to 1, and its seconds. Of
    two that are as near, the smaller."""
    named = (timed.kernel.rpartition(", ") for timed in roofs.passes)
    sizes = {int(last) for name, _, last in named if name == kernel and last.isdecimal()}
    nearest = min(sorted(sizes), key=lambda one: abs(math.log(one / size)), default=0)
    return nearest, _timed(roofs, f"{kernel}, {nearest}")


def _fused_seconds(shape: Workload, roofs: Roofs) -> float:
    """One layer's fused attention, forward and backward, at the nearest head dimension, between measured lengths: at
    the rate of many heads, and no less than what a few of them take, which do not fill the GPU."""
    T, D = shape.seq_len, shape.n_embd // shape.n_head
    one_head = 6 * T * D * T  # FLOPs, by the convention of common/flops.py
    nearest = min({rate.head_dim for rate in roofs.attention}, key=lambda dim: abs(math.log(dim / D)))
    many = {rate.seq_len: rate.flops_per_s for rate in roofs.attention if rate.head_dim == nearest}
    seconds = [shape.batch_size * shape.n_head * one_head / _between(many, T)]
    head_dim, few = _nearest(roofs, passes.FEW, D)
    if few:
        lengths = {numbers // (passes.FEW_HEADS * head_dim): numbers for numbers in few}
        rates = {length: 6 * length * numbers / few[numbers] for length, numbers in lengths.items()}
        seconds.append(passes.FEW_HEADS * one_head / _between(rates, T))
    return max(seconds)


def _between(rates: dict[int, float], length: int) -> float:
    """A rate at any length: between those of its neighbours, by the logarithm of the length."""
    lengths, of_length = zip(*sorted(rates.items()), strict=True)
    return float(np.interp(math.log(length), [*map(math.log, lengths)], of_length))


def read_roofs(path: Path) -> Roofs:
    """Roofs from what common.roofs wrote, or from a run's results.json. Raises RecordError."""
    content = read_json(path)
    content = content.get("roofs") or content if isinstance(content, dict) else content
    return convert(content, Roofs, path.name)


def measured_roofs() -> Path:
    """What python -m common.roofs wrote below results/, otherwise the newest roofs of a run. Raises ValueError."""
    asked, found = arguments.ROOT / "results" / ROOFS, [*arguments.ROOT.glob(f"results/*/{ROOFS}")]
    if not (asked.exists() or found):
        raise ValueError("no roofs below results/: measure them with python -m common.roofs, or give --roofs FILE")
    return asked if asked.exists() else max(found, key=lambda path: path.stat().st_mtime)


def predict_records(machine: Path) -> dict[str, dict[str, Prediction]]:
    """Predictions for every recorded run below a machine's folder, by run; empty without roofs that hold a grid."""
    runs = {path.parent.name: read_run(path) for path in sorted(machine.glob(f"*/{MERGED}"))}
    measured = [run.roofs for run in runs.values() if run.roofs and run.roofs.grid]
    return {name: predict(run.workload, measured[0]) for name, run in runs.items()} if measured else {}


def record_predictions(results: Path) -> Iterable[Path]:
    """Write the predictions beside the records of each machine; the paths."""
    for machine in sorted(path for path in results.iterdir() if path.is_dir()):
        if predicted := predict_records(machine):
            written = {run: [asdict(one) | {"ms": one.ms} for one in rows.values()] for run, rows in predicted.items()}
            write_json(machine / PREDICTIONS, written)
            yield machine / PREDICTIONS


def describe(predictions: dict[str, Prediction]) -> str:
    """A table: the time of each step, and what it is made of."""
    rows = []
    for step, one in predictions.items():
        ms, busy = one.category_ms, sum(one.category_ms.values())
        shown = {"products": ms["matrix products"], "attention": ms["attention"], "optimizer": ms["optimizer"]}
        parts = {"other kernels": busy - sum(shown.values()), "gaps": max(0.0, one.host_ms - busy)}
        cells = {name: f"{part:.2f}" for name, part in (shown | parts).items()}
        rows.append({"step": step, "predicted ms": f"{one.ms:.2f}", **cells})
    return aligned(rows)


def main() -> None:
    parser = OneLineParser(
        prog="python -m ladder.predict",
        usage="%(prog)s [-h] [--roofs FILE] [--json FILE] [ARGUMENT ...] | --records DIR",
        description=__doc__,
        epilog="ARGUMENTs choose the workload: --preset, --n-embd, ...; python 0_baseline.py --help lists them",
    )
    text = "what common.roofs wrote, or results.json of a run (default: results/roofs.json, else the newest of a run)"
    parser.add_argument("--roofs", type=Path, metavar="FILE", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times there, in milliseconds by step")
    text = "predict every recorded run below docs/results, for python -m report.documents"
    parser.add_argument("--records", type=Path, metavar="DIR", help=text)
    own, rest = parser.parse_known_args()
    if any(word.partition("=")[0] == "--output" for word in rest):
        parser.error("--output is of a step's record: --json FILE writes predictions")
    if own.records and (rest or own.json or own.roofs):
        parser.error(f"--records takes no other argument{f', but here is {rest[0]}' if rest else ''}")
    if own.records:
        written = list(record_predictions(own.records)) if own.records.is_dir() else []
        if not written:
            parser.error(f"--records {own.records} holds no machine's folder with runs and their roofs")
        say("\n".join(f"written to {path}" for path in written))
        return
    args = arguments.parse_args(Path("ladder/predict.py"), __doc__, rest)
    try:
        auto = hardware.resolve_amp_dtype("auto", args.device)[0]
        if not args.capture or args.amp_dtype is not auto or auto is torch.float16:
            raise ValueError("predictions are of --amp-dtype auto where that is no FP16, and of captured steps")
        path = own.roofs or measured_roofs()
        predictions = predict(args.workload(), read_roofs(path))
    except (ValueError, KeyError) as error:
        parser.error(str(error) if isinstance(error, ValueError) else f"{path} lacks {error}")
    made = read_object(path)
    known = ((made.get("environment") or {}).get("device"), made.get("started_at"))
    measured = "".join(f", {one_line(what)}" for what in known if what)
    say(f"{describe(predictions)}\n\nmilliseconds a step of {args.preset}: {describe_shape(args.workload())}")
    say(f"from the roofs in {path}{measured}; whether the model fits the memory is not predicted")
    say("docs/performance.md shows how far such predictions were off; --roofs FILE takes others")
    if own.json:
        try:
            write_json(own.json, {step: one.ms for step, one in predictions.items()})
        except OSError as error:
            parser.error(f"cannot write --json {own.json}: {error.strerror or error}")


if __name__ == "__main__":
    run_command(main, "python -m ladder.predict")
