"""Every figure of a run, derived once: one Line a row. Tables, pages and documents only show what stands
here."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, median, quantiles

from common.record import CATEGORIES, Environment, Roofs, Row, Run, Workload
from report.load import DIFFER

LOSS_WINDOW = 5  # training steps
GAPS = "gaps"  # of the GPU's timeline
GIB = 2**30
MARK = "?"  # behind a figure that may be wrong
LEGEND = (
    "?: may be wrong: the machine was busy, its host slow at launching, the second half of the steps drifted "
    "by over 5 %, or rows differ"
)
# Times what the reference work takes at best, beyond which something else ran on the machine. Around the rows
# of an idle H200 it varied by 2 %, and on two idle cores of a shared host by 17 % in four of five runs (in
# the fifth by 53 %).
BUSY = {"cuda": 1.10, "cpu": 1.25}
# A host is slow at launching where its launches took so many times as long as at best: on good hosts they
# varied by 1.8 times between rows. Only a row whose GPU waits for it, for this share of a step, is marked.
SLOW_LAUNCH, WAITS = 2.0, 0.05
DRIFT, FEWEST_STEPS_OF_DRIFT = 0.05, 4
MOST_OF_FIRST_LOSS, LEARNED = (
    1.1,
    0.75,
)  # times the first loss: none is above, and the mean of the last five is below
ENOUGH_FOR_FP8 = 10  # rehearsed steps
FEWEST_LOSSES = 8  # from which that mean is judged
NOT_FUSED = (None, "by hand")  # attention kernels
PROFILE_OFF = 1 / 3  # of the timed step, by which a profiled one may differ


@dataclass
class Ratio:
    """How many times faster one row is than another."""

    value: float
    clear: bool  # whether all middle times, or all passes, of one row lie on one side of the other's
    mark: str  # MARK where one of the two may be wrong


@dataclass
class Line:
    """The figures of one row. What its record does not hold is None or empty."""

    row: Row
    name: str
    is_peer: bool = False
    ms: float | None = None  # median of the timed steps; of several passes, the median of their medians
    low_ms: float | None = None  # smallest and largest median of the passes; of one pass, the quartiles
    high_ms: float | None = None
    passes: int = 1  # of --repeat
    tokens_per_s: float | None = None  # of all GPUs
    flops_per_s: float | None = None  # model FLOPs of one GPU, by the convention of common/flops.py
    over_before: Ratio | None = None  # over the nearest row before it that has a time
    over_first: Ratio | None = None  # over the first row that has a time
    over_plain: Ratio | None = None  # over the row where most readers' training stands, see `plain_step`
    gib: float | None = None  # peak of CUDA's allocator; on a CPU of the process
    loss: float | None = None  # mean of the last LOSS_WINDOW training steps, nats
    drift: float = (
        0.0  # second half of the timed steps against the first, as a share: of the pass with the largest
    )
    slowed: float = 1.0  # its reference work over the fastest of the run: of the pass where it took longest
    slow_launch: float = 1.0  # the same of its launches, where the GPU waits for them
    category_ms: dict[str, float] = field(
        default_factory=dict
    )  # of a step, by kind of kernel; on a GPU with GAPS
    share: tuple[str, float] | None = (
        None  # what takes the largest share of a GPU's step: its name, and the share
    )
    precision: str = ""  # of its matrix products
    of_roof: float | None = None  # model FLOP/s over the burst rate of bare products in that precision
    tokens_per_joule: float | None = None
    error: float | None = None  # of the prediction, as a share of the measured time
    note: str = ""  # what qualifies it
    doubt: str = ""  # why its time may be wrong
    mark: str = ""  # MARK where there is a doubt
    why_untimed: str = ""  # status and reason of a row without a time


@dataclass
class Figures:
    """A run with the figures of its rows."""

    run: Run
    lines: list[Line]  # steps, then peers
    steps: list[Line]
    timed: list[Line]  # steps and peers
    first: Line | None  # these two: what ratios are over
    plain: Line | None
    environment: Environment
    busy: str  # one line with advice where the machine was busy, otherwise empty
    remarks: list[str]  # what is unusual, most important first: a line each, for all rows that share it


def figures(run: Run, among: Iterable[Run] = ()) -> Figures:
    """Derive all figures of a run. `among` are runs of the same machine at the same time, for its reference
    work."""
    base = _fastest_reference([run, *among])
    steps = [_line(row, run, base) for row in run.rows]
    peers = [_line(row, run, base, is_peer=True) for row in run.peers]
    lines, timed = [*steps, *peers], [line for line in [*steps, *peers] if line.ms]
    first = next((line for line in steps if line.ms), None)
    plain = plain_step(steps)
    _doubt(run, timed)
    before = None
    for line in lines:
        line.over_before = None if line.is_peer else ratio(line, before)
        line.over_first, line.over_plain = ratio(line, first), ratio(line, plain)
        before = line if line.ms else before
    environment = run.environment or Environment(device="unknown machine", device_type="unknown")
    busy = _busy(timed, busy_limit(run))
    remarks = [*filter(None, [busy]), *_remarks(lines, timed), *dict.fromkeys(run.problems)]
    if run.workload and run.workload.gpus > 1:
        remarks.append(f"{run.workload.gpus} processes: tokens/s are of all, TFLOP/s and GiB of each")
    if repeated := [line for line in timed if line.passes > 1]:
        apart = max(line.high_ms / line.low_ms - 1 for line in repeated)
        counts = sorted({line.passes for line in repeated})
        passes = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        remarks.append(f"median of {passes} passes, {apart:.1%} apart at most")
    return Figures(run, lines, steps, timed, first, plain, environment, busy, remarks)


def plain_step(steps: list[Line]) -> Line | None:
    """Where most readers' training stands: the first step with fused attention that is neither compiled nor
    FP8, in mixed precision unless no step has it. None where there is none."""
    timed = [line for line in steps if line.ms]
    if any(is_mixed(line) for line in timed):
        timed = [line for line in timed if is_mixed(line)]
    found = (line.row.settings for line in timed)
    plain = [s.attention_kernel not in NOT_FUSED and not s.compiled and not s.fp8_recipe for s in found]
    return next((line for line, fits in zip(timed, plain, strict=True) if fits), None)


def is_mixed(line: Line) -> bool:
    return line.row.settings.amp_dtype in ("bfloat16", "float16")


def ratio(line: Line, other: Line | None) -> Ratio | None:
    """How many times faster a row is than another; None where one has no time."""
    if other is None or not (line.ms and other.ms):
        return None
    clear = line.high_ms < other.low_ms or line.low_ms > other.high_ms
    return Ratio(other.ms / line.ms, clear, max(line.mark, other.mark))


# --- one row --------------------------------------------------------------------------------------


def _line(row: Row, run: Run, base: dict[str, float], is_peer: bool = False) -> Line:
    line = Line(row, row.step, is_peer)
    if row.status != "ok" or not row.step_ms:
        line.why_untimed = f"{row.status}: {row.reason or 'no reason given'}"
        return line
    passes = row.passes or [row]
    timings = [one.step_ms for one in passes]
    medians = [median(times) for times in timings]
    line.ms, line.passes = median(medians), len(medians)
    ends = medians if len(medians) > 1 else timings[0]
    if len(medians) == 1 < len(ends):
        ends = quantiles(ends, method="inclusive")
    line.low_ms, line.high_ms = min(ends), max(ends)
    line.drift = max(map(_drift, timings), key=abs)
    line.slowed = max((ms / base[kind] for one in passes for kind, ms in _work(one).items()), default=1.0)
    if "launch" in base and _waits_for_the_host(row):
        line.slow_launch = max((launch_us(one) or 0.0) / base["launch"] for one in passes)
    line.loss = fmean(row.loss[-LOSS_WINDOW:]) if row.loss else None
    line.note = "; ".join(filter(None, [row.note, unlearned(row.loss)]))
    line.gib = row.peak_bytes / GIB if row.peak_bytes else None
    line.error = row.predicted_ms / line.ms - 1 if row.predicted_ms else None
    line.precision = _precision(row, run.roofs)
    _fill_profile(line)
    if run.workload:
        _fill_rates(line, run.workload, run.roofs)
    return line


def _drift(times: list[float]) -> float:
    half = len(times) // 2
    return median(times[-half:]) / median(times[:half]) - 1 if len(times) >= FEWEST_STEPS_OF_DRIFT else 0.0


def unlearned(losses: list[float]) -> str:
    """How a row fails the rule of learning, in a clause; empty where it does not."""
    if losses and max(losses) > MOST_OF_FIRST_LOSS * losses[0]:
        return f"did not learn as it should: a loss was above {MOST_OF_FIRST_LOSS} times the first"
    if len(losses) >= FEWEST_LOSSES and fmean(losses[-LOSS_WINDOW:]) > LEARNED * losses[0]:
        return f"hardly learned: its last five losses were above {LEARNED} times the first"
    return ""


def _precision(row: Row, roofs: Roofs | None) -> str:
    """The precision whose roof a row is held against."""
    if row.settings.fp8_recipe:
        return "fp8"
    if row.settings.amp_dtype in ("bfloat16", "float16"):
        return "bf16"
    exact = row.settings.float32_matmul_precision == "highest" or not (
        roofs and roofs.rate("tf32", burst=True)
    )
    return "fp32" if exact else "tf32"


def _fill_profile(line: Line) -> None:
    """Where the time of a step goes."""
    profile = line.row.profile
    if profile is None:
        return
    ms = {name: profile.categories.get(name, 0.0) for name in CATEGORIES} | {GAPS: profile.idle_ms or 0.0}
    whole = sum(ms.values())
    if abs(whole / line.ms - 1) > PROFILE_OFF:
        line.note = "; ".join(
            filter(None, [line.note, f"its profile is left out: its steps took {whole:,.1f} ms"])
        )
        return
    line.category_ms = ms
    if profile.idle_ms is None:
        return
    fused = 0.0 if line.row.settings.attention_kernel in NOT_FUSED else ms["attention"]
    shares = {"compute": ms["matrix products"] + fused, GAPS: ms[GAPS], "communication": ms["communication"]}
    shares["other kernels"] = whole - sum(
        shares.values()
    )  # most of them pass over memory; only counters show it
    largest = max(shares, key=shares.get)
    line.share = (largest, shares[largest] / whole) if whole else None


def _fill_rates(line: Line, work: Workload, roofs: Roofs | None) -> None:
    """Tokens and FLOPs a second, and how near they come to the roofs."""
    row, seconds = line.row, line.ms / 1e3
    line.tokens_per_s = work.gpus * work.tokens_per_step / seconds
    line.flops_per_s = work.flops_per_step / seconds
    if row.power_w:
        line.tokens_per_joule = work.tokens_per_step / seconds / row.power_w
    ceiling = roofs.rate(line.precision, burst=True) if roofs else None
    line.of_roof = line.flops_per_s / ceiling if ceiling else None


# --- whether to trust it --------------------------------------------------------------------------


def _work(row: Row) -> dict[str, float]:
    """What should take the same time around every row, in ms.

    Each is the median of the times before, within and after the timed steps, as the row's own time is a
    median.
    """
    kinds = {"product": row.product_ms, "copy": row.copy_ms}
    return {kind: median(times) for kind, times in kinds.items() if times and all(times)}


def launch_us(row: Row) -> float | None:
    """Microseconds of a launch around a row's steps; None where it was not measured."""
    return median(row.launch_us) if row.launch_us and all(us > 0 for us in row.launch_us) else None


def _waits_for_the_host(row: Row) -> bool:
    """Whether the GPU waits for the launches of a row: by its profile, or without one by steps that are far
    slower than its fastest."""
    if row.settings.captured:
        return False
    if row.profile and row.profile.idle_ms is not None:
        return row.profile.idle_ms > WAITS * median(row.step_ms)
    return median(row.step_ms) > (1 + WAITS) * min(row.step_ms)


def _fastest_reference(runs: list[Run]) -> dict[str, float]:
    """The least that each kind of reference work, and launches, took around any row."""
    rows = (row for run in runs for row in [*run.rows, *run.peers] if row.status == "ok")
    passes = [one for row in rows for one in row.passes or [row]]
    work = [_work(one) for one in passes] + [{"launch": us} for us in map(launch_us, passes) if us]
    return {kind: min(one[kind] for one in work if kind in one) for kind in set().union(*work)}


def busy_limit(run: Run) -> float:
    return BUSY.get(run.environment.device_type if run.environment else "", BUSY["cuda"])


def _doubt(run: Run, timed: list[Line]) -> None:
    """Tell of every row why its time may be wrong."""
    differ = any(problem.startswith(DIFFER) for problem in run.problems)
    kernels = {line.row.settings.attention_kernel for line in timed if not line.is_peer} - {*NOT_FUSED}
    for line in timed:
        half = (
            f"the second half of the steps took over {DRIFT:.0%} {'more' if line.drift > 0 else 'less'} time"
        )
        mixed = len(kernels) > 1 and line.row.settings.attention_kernel in kernels and not line.is_peer
        why = {
            "the machine was busy": line.slowed > busy_limit(run),
            "the host was slow at launching kernels": line.slow_launch > SLOW_LAUNCH,
            half: abs(line.drift) > DRIFT,
            "rows differ in more than their scripts": differ,
            f"attention ran as {' and '.join(sorted(kernels))}": mixed,
        }
        line.doubt = "; ".join(text for text, holds in why.items() if holds)
        line.mark = MARK if line.doubt else ""


def _busy(timed: list[Line], limit: float) -> str:
    """What was seen of a busy machine, and advice; empty where it was not busy."""
    worst = max(timed, key=lambda line: line.slowed, default=None)
    if worst is None or worst.slowed <= limit:
        return ""
    took = f"the same work took {worst.slowed:.2f} times as long around {worst.name} as at best"
    return (
        f"The machine was busy: {took}. Figures with {MARK} may be wrong: close other programs and run again"
    )


def loss_rule(lines: list[Line]) -> str:
    """What the losses of these rows are, in a sentence; empty where none has any."""
    rows = [line.row for line in lines if line.row.loss]
    if not rows:
        return ""
    last = max(len(row.loss) for row in rows)
    steps = dict.fromkeys((max(1, last - LOSS_WINDOW + 1), last))
    words = f"Loss: mean of training steps {' to '.join(map(str, steps))}, in nats"
    rehearsed = sorted({row.rehearsed for row in rows})
    in_fp8 = [row.rehearsed for row in rows if row.settings.fp8_recipe]
    if any(rehearsed):
        counts = " to ".join(map(str, dict.fromkeys((rehearsed[0], rehearsed[-1]))))
        words += f". {counts} rehearsed steps came before, whose weights were put back"
    if any(in_fp8):
        words += "; FP8 keeps the scales that it learnt there"
    if any(0 < steps < ENOUGH_FOR_FP8 for steps in in_fp8):
        words += f", though fewer than {ENOUGH_FOR_FP8} may be too few for it"
    if 0 in in_fp8:
        words += ". A row in FP8 without a rehearsal begins with unknown scales, and its loss lags"
    return words


def _remarks(lines: list[Line], timed: list[Line]) -> list[str]:
    """Why rows have no time, doubts with MARK in front, and notes: `names: text`, each text once."""
    said = [("", line.why_untimed, line) for line in lines if not line.ms]
    said += [(f"{MARK} ", doubt, line) for line in timed if line.doubt for doubt in line.doubt.split("; ")]
    said += [("", line.note, line) for line in timed if line.note]
    names: dict[tuple[str, str], list[str]] = {}
    for mark, text, line in said:
        names.setdefault((mark, text), []).append(line.name)
    return [
        f"{mark}{'all rows' if len(of) == len(lines) > 2 else ', '.join(of)}: {text}"
        for (mark, text), of in names.items()
    ]
