"""Every figure of a run, derived once: one Line a row. Tables, pages and documents only show what stands
here."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, median

from common.record import CATEGORIES, Environment, Roofs, Row, Run, Settings, Study, Workload, middle_half
from report.load import DIFFER
from report.peaks import peak_flops_per_s
from report.promises import HALF_FORMATS, NOT_FUSED, contradiction
from report.proof import limit, verdict

LOSS_WINDOW = 5  # training steps
GAPS = "gaps"  # of the GPU's timeline
PATCHED = ("ablations", "parity")  # kinds of studies whose scripts may be patched
GIB = 2**30
MARK = "?"  # behind a figure that may be wrong
LEGEND = (
    "?: may be wrong: the machine was busy, its host slow at launching, the second half of the steps drifted "
    "by over 5 %, the compiler still worked, rows differ, or a row did not run what its name says"
)
# Times what the reference work takes at best, beyond which something else ran on the machine. Around the rows
# of an idle H200 it varied by 4 %.
BUSY = 1.10
# A host is slow at launching where its launches took so many times as long as at best: on good hosts they
# varied by 1.8 times between rows. Only a row whose GPU waits for it, for this share of a step, is marked.
SLOW_LAUNCH, WAITS = 2.0, 0.05
DRIFT = 0.05
# A row learns where no loss is above the first one times this, and the mean of the last five is below it
# times that.
MOST_OF_FIRST_LOSS, LEARNED = (1.1, 0.75)
ENOUGH_FOR_FP8 = 10  # rehearsed steps
FEWEST_LOSSES = 8  # from which that mean is judged
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
    # What it was made from: of a model that is not ours, the row with all its changes but the last.
    base: "Line | None" = None
    over_before: Ratio | None = None  # over its base, otherwise the nearest row before it that has a time
    over_first: Ratio | None = None  # over the first row that has a time
    over_plain: Ratio | None = None  # over the row where most readers' training stands, see `plain_step`
    gib: float | None = None  # peak of CUDA's allocator; on a CPU of the process
    loss: float | None = None  # mean of the last LOSS_WINDOW training steps, nats
    # Second half of the timed steps against the first, as a share: of the pass with the largest.
    drift: float = 0.0
    slowed: float = 1.0  # its reference work over the fastest of the run: of the pass where it took longest
    slow_launch: float = 1.0  # the same of its launches, where the GPU waits for them
    # Of a step, by kind of kernel; on a GPU with GAPS.
    category_ms: dict[str, float] = field(default_factory=dict)
    # What takes the largest share of a GPU's step: its name, and the share.
    share: tuple[str, float] | None = None
    precision: str = ""  # of its matrix products
    of_roof: float | None = None  # model FLOP/s over the burst rate of bare products in that precision
    mfu: float | None = None  # model FLOP/s over the datasheet's dense peak in that precision
    tokens_per_joule: float | None = None
    same_work: str = ""  # agrees, differs or not proven: by its gradients, see report/proof.py
    note: str = ""  # what qualifies it
    doubts: list[str] = field(default_factory=list)  # why its time may be wrong
    why_untimed: str = ""  # status and reason of a row without a time

    @property
    def mark(self) -> str:
        """What stands behind its figures where they may be wrong."""
        return MARK if self.doubts else ""


@dataclass
class Figures:
    """A run with the figures of its rows."""

    run: Run
    lines: list[Line]  # steps, then peers
    steps: list[Line]
    timed: list[Line]  # steps and peers
    first: Line | None  # the first step that has a time; gains are shown over it and over `plain`
    plain: Line | None
    environment: Environment
    busy: str  # one line with advice where the machine was busy, otherwise empty
    remarks: list[str]  # what is unusual, most important first: a line each, for all rows that share it

    @property
    def timed_steps(self) -> list[Line]:
        return [line for line in self.steps if line.ms]


def derive(run: Run, among: Iterable[Run] = (), is_patched: bool = False) -> Figures:
    """All figures of a run. `among` are runs of the same machine at the same time, for its reference work.
    Where a script `is_patched`, its name promises nothing."""
    fastest = _fastest_reference([run, *among])
    steps = [_line(row, run, fastest) for row in run.rows]
    peers = [_line(row, run, fastest, is_peer=True) for row in run.peers]
    lines, timed = [*steps, *peers], [line for line in [*steps, *peers] if line.ms]
    first = next((line for line in steps if line.ms), None)
    plain = plain_step(steps) if run.is_of_ladder else None
    variables = run.environment.variables if run.environment else {}
    for line in timed:
        line.doubts = _doubts(line, timed, run)
        if not is_patched and (denied := contradiction(line.row, run.is_of_ladder, variables)):
            line.doubts.insert(0, denied)
    _fill_ratios(steps, peers, first, plain)
    environment = run.environment or Environment(device="unknown machine", device_type="unknown")
    busy = _busy(timed) if environment.device_type == "cuda" else ""
    remarks = [*filter(None, [busy]), *_remarks(lines, timed), *dict.fromkeys(run.problems)]
    remarks += filter(None, [_of_processes(run.workload), _of_passes(timed)])
    return Figures(run, lines, steps, timed, first, plain, environment, busy, remarks)


def derive_study(study: Study) -> dict[str, Figures]:
    """The figures of every run of a study. Reference work is compared between all runs of one card."""
    of_card: dict[tuple, list[Run]] = {}
    for run in study.runs.values():
        of_card.setdefault(_card(run), []).append(run)
    figures = {}
    for name, run in study.runs.items():
        is_patched = study.kind in PATCHED and name.partition(",")[0] != run.rows[0].step
        figures[name] = derive(run, of_card[_card(run)], is_patched)
    return figures


def _card(run: Run) -> tuple:
    """What tells the card of a run from others; on a CPU the processor, which several processes share."""
    if run.environment is None:
        return ()
    shared_by = run.workload.gpus if run.workload and run.environment.device_type == "cpu" else 1
    return run.environment.device, run.environment.gpu_uuid, shared_by


def _fill_ratios(steps: list[Line], peers: list[Line], first: Line | None, plain: Line | None) -> None:
    before = None
    for line in [*steps, *peers]:
        line.over_first, line.over_plain = ratio(line, first), ratio(line, plain)
    for k, line in enumerate(steps):
        line.base = _base(line, steps[:k])
        line.over_before = ratio(line, line.base or before)
        before = line if line.ms else before


def _base(line: Line, before: list[Line]) -> Line | None:
    """The timed row before a row that has all its changes but the last one."""
    for other in before:
        if other.ms and line.row.changes and other.row.changes == line.row.changes[:-1]:
            return other
    return None


def plain_step(steps: list[Line]) -> Line | None:
    """Where most readers' training stands: the first step with fused attention that is neither compiled nor
    FP8, in mixed precision unless no step has it. None where there is none."""
    timed = [line for line in steps if line.ms]
    if any(is_mixed(line) for line in timed):
        timed = [line for line in timed if is_mixed(line)]
    for line in timed:
        settings = line.row.settings
        fused = settings.attention_kernel not in NOT_FUSED
        if fused and not settings.compiled and not settings.fp8_recipe:
            return line
    return None


def is_mixed(line: Line) -> bool:
    return line.row.settings.amp_dtype in HALF_FORMATS


def ratio(line: Line, other: Line | None) -> Ratio | None:
    """How many times faster a row is than another; None where one has no time."""
    if other is None or not (line.ms and other.ms):
        return None
    clear = line.high_ms < other.low_ms or line.low_ms > other.high_ms
    return Ratio(other.ms / line.ms, clear, max(line.mark, other.mark))


# --- one row --------------------------------------------------------------------------------------


def _line(row: Row, run: Run, fastest: dict[str, float], is_peer: bool = False) -> Line:
    line = Line(row, row.step, is_peer)
    if row.status != "ok" or not row.step_ms:
        line.why_untimed = f"{row.status}: {row.reason or 'no reason given'}"
        return line
    _fill_times(line)
    _fill_slowness(line, fastest)
    line.loss = fmean(row.loss[-LOSS_WINDOW:]) if row.loss else None
    line.same_work = verdict(row.proof)
    not_learnt = unlearned(row.loss) if run.is_of_ladder else ""  # the rule is of our text and our rate
    line.note = "; ".join(filter(None, [row.note, not_learnt, _other_work(line)]))
    line.gib = row.peak_bytes / GIB if row.peak_bytes else None
    line.precision = _precision(row, run.roofs)
    _fill_profile(line)
    if run.workload:
        _fill_rates(line, run.workload, run)
    return line


def _fill_times(line: Line) -> None:
    """The time of a step, and the range in which its middle times, or those of its passes, lie."""
    passes = [row.step_ms for row in line.row.passes or [line.row]]
    medians = [median(times) for times in passes]
    line.ms, line.passes = median(medians), len(medians)
    ends = medians if len(passes) > 1 else middle_half(passes[0])
    line.low_ms, line.high_ms = min(ends), max(ends)
    line.drift = max((row.drift for row in line.row.passes or [line.row]), key=abs)


def _fill_slowness(line: Line, fastest: dict[str, float]) -> None:
    """How much longer the same work, and the same launches, took around a row than at best."""
    passes = line.row.passes or [line.row]
    for row in passes:
        for kind, ms in reference_ms(row).items():
            line.slowed = max(line.slowed, ms / fastest[kind])
    if "launch" in fastest and waits_for_the_host(line.row):
        line.slow_launch = max((launch_us(row) or 0.0) / fastest["launch"] for row in passes)


def unlearned(losses: list[float]) -> str:
    """How a row fails the rule of learning, in a clause; empty where it does not."""
    if losses and max(losses) > MOST_OF_FIRST_LOSS * losses[0]:
        return f"did not learn as it should: a loss was above {MOST_OF_FIRST_LOSS} times the first"
    if len(losses) >= FEWEST_LOSSES and fmean(losses[-LOSS_WINDOW:]) > LEARNED * losses[0]:
        return f"hardly learned: its last five losses were above {LEARNED} times the first"
    return ""


def _other_work(line: Line) -> str:
    """How a row's work differs from that of the first row, in a clause; empty where it agrees."""
    proof = line.row.proof
    if line.same_work == "differs":
        cosine = f"cosine {proof.cosine:.4f} with that of {proof.against}, and not {limit(proof):.3g} or more"
        return f"differs in its work: gradient of {proof.weight}, {cosine}"
    if line.same_work == "not proven" and not line.is_peer:  # peers may begin with weights of their own
        if proof.cosine is None:
            return f"its work is not proven: it has {proof.paired:.0%} of the weights of {proof.against}"
        return f"its work is not proven: random numbers alone turn gradients of {proof.against}"
    return ""


def _precision(row: Row, roofs: Roofs | None) -> str:
    """The precision whose roof a row is held against; empty where none was observed, as of a loop that is
    not ours."""
    if row.settings.fp8_recipe:
        return "fp8"
    if row.settings == Settings():
        return ""
    if row.settings.amp_dtype in HALF_FORMATS:
        return "bf16"
    allows_tf32 = row.settings.float32_matmul_precision != "highest"
    return "tf32" if allows_tf32 and roofs and roofs.rate("tf32", burst=True) else "fp32"


def _fill_profile(line: Line) -> None:
    """Where the time of a step goes. A profile whose steps took another time than the timed ones is left
    out."""
    profile = line.row.profile
    if profile is None:
        return
    ms = {name: profile.categories.get(name, 0.0) for name in CATEGORIES} | {GAPS: profile.idle_ms or 0.0}
    whole = sum(ms.values())
    if abs(whole / line.ms - 1) > PROFILE_OFF:
        left_out = (
            f"its profile is left out: profiled steps took {whole:,.1f} ms, the timed ones {line.ms:,.1f}"
        )
        line.note = f"{line.note}; {left_out}" if line.note else left_out
        return
    line.category_ms = ms
    if profile.idle_ms is not None:
        line.share = _largest_share(ms, line.row.settings.attention_kernel not in NOT_FUSED)


def _largest_share(ms: dict[str, float], fused_attention: bool) -> tuple[str, float]:
    """What takes the largest share of a GPU's step, and the share."""
    whole = sum(ms.values())
    compute = ms["matrix products"] + (ms["attention"] if fused_attention else 0.0)
    shares = {"compute": compute, GAPS: ms[GAPS], "communication": ms["communication"]}
    # Most of these pass over memory, but only hardware counters would show it.
    shares["other kernels"] = whole - sum(shares.values())
    largest = max(shares, key=shares.get)
    return largest, shares[largest] / whole


def _fill_rates(line: Line, work: Workload, run: Run) -> None:
    """Tokens and FLOPs a second, and how near they come to the roofs."""
    row, seconds = line.row, line.ms / 1e3
    line.tokens_per_s = work.gpus * work.tokens_per_step / seconds
    line.flops_per_s = work.flops_per_step / seconds
    if row.power_w:
        line.tokens_per_joule = work.tokens_per_step / seconds / row.power_w
    ceiling = run.roofs.rate(line.precision, burst=True) if run.roofs else None
    line.of_roof = line.flops_per_s / ceiling if ceiling else None
    peak = peak_flops_per_s(run.environment.device, line.precision) if run.environment else None
    line.mfu = line.flops_per_s / peak if peak else None


# --- whether to trust it --------------------------------------------------------------------------


def reference_ms(row: Row) -> dict[str, float]:
    """Milliseconds of the work that is the same around every row.

    Each is the median of the times before, within and after the timed steps, as the row's own time is a
    median.
    """
    times = {"product": row.product_ms, "copy": row.copy_ms}
    return {kind: median(ms) for kind, ms in times.items() if ms and all(ms)}


def launch_us(row: Row) -> float | None:
    """Microseconds of a launch around a row's steps; None where it was not measured."""
    return median(row.launch_us) if row.launch_us and all(us > 0 for us in row.launch_us) else None


def waits_for_the_host(row: Row) -> bool:
    """Whether the GPU waits for the launches of a row: by its profile, or without one by steps that are far
    slower than its fastest."""
    if row.settings.captured:
        return False
    if row.profile and row.profile.idle_ms is not None:
        return row.profile.idle_ms > WAITS * median(row.step_ms)
    return median(row.step_ms) > (1 + WAITS) * min(row.step_ms)


def _fastest_reference(runs: list[Run]) -> dict[str, float]:
    """The least that each kind of reference work, in ms, and a launch, in us, took around any row."""
    fastest: dict[str, float] = {}
    rows = [row for run in runs for row in [*run.rows, *run.peers] if row.status == "ok"]
    passes = [each for row in rows for each in row.passes or [row]]
    for row in passes:
        for kind, time in (reference_ms(row) | {"launch": launch_us(row)}).items():
            if time:
                fastest[kind] = min(time, fastest.get(kind, time))
    return fastest


def _doubts(line: Line, timed: list[Line], run: Run) -> list[str]:
    """Why the time of a row may be wrong. Nothing is concluded from times of a CPU, so they bear no doubt."""
    doubts = []
    if any(row.recompiled for row in line.row.passes or [line.row]):
        doubts.append("the compiler worked while it was timed")
    if run.environment is None or run.environment.device_type == "cuda":
        if line.slowed > BUSY:
            doubts.append("the machine was busy")
        if line.slow_launch > SLOW_LAUNCH:
            doubts.append("the host was slow at launching kernels")
        if abs(line.drift) > DRIFT:
            more = "more" if line.drift > 0 else "less"
            doubts.append(f"the second half of the steps took over {DRIFT:.0%} {more} time")
    if any(problem.startswith(DIFFER) for problem in run.problems):
        doubts.append("rows differ in more than their scripts")
    alike = [step.row.settings for step in timed if not step.is_peer]
    alike = [settings for settings in alike if settings.amp_dtype == line.row.settings.amp_dtype]
    kernels = {settings.attention_kernel for settings in alike} - {*NOT_FUSED}
    if len(kernels) > 1 and line.row.settings.attention_kernel in kernels and not line.is_peer:
        doubts.append(f"attention ran as {' and '.join(sorted(kernels))}")
    return doubts


def _busy(timed: list[Line]) -> str:
    """What was seen of a busy machine, and advice; empty where it was not busy."""
    worst = max(timed, key=lambda line: line.slowed, default=None)
    if worst is None or worst.slowed <= BUSY:
        return ""
    took = f"the same work took {worst.slowed:.2f} times as long around {worst.name} as at best"
    return (
        f"The machine was busy: {took}. Figures with {MARK} may be wrong: close other programs and run again"
    )


def loss_rule(figures: Figures) -> str:
    """What the losses of a run are, in a sentence; empty where no row has any."""
    rows = [line.row for line in figures.timed if line.row.loss]
    if not rows:
        return ""
    every, last = max((row.loss_every, len(row.loss)) for row in rows)
    steps = _from_to(max(0, last - LOSS_WINDOW) * every + 1, last * every)
    unit = ", in nats" if figures.run.is_of_ladder else ""
    words = f"Loss: mean of training steps {steps}{unit}"
    rehearsed = [row.rehearsed for row in rows]
    in_fp8 = [row.rehearsed for row in rows if row.settings.fp8_recipe]
    if any(rehearsed):
        counts = _from_to(min(rehearsed), max(rehearsed))
        words += f". {counts} rehearsed steps came before, whose weights were put back"
    if any(in_fp8):
        words += "; FP8 keeps the scales that it learnt there"
    if any(0 < steps < ENOUGH_FOR_FP8 for steps in in_fp8):
        words += f", though fewer than {ENOUGH_FOR_FP8} may be too few for it"
    if 0 in in_fp8:
        words += ". A row in FP8 without a rehearsal begins with unknown scales, and its loss lags"
    return words


def _from_to(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _of_processes(work: Workload | None) -> str:
    """What the figures of several processes are; empty for one."""
    if work is None or work.gpus == 1:
        return ""
    return f"{work.gpus} processes: tokens/s are of all, TFLOP/s and GiB of each"


def _of_passes(timed: list[Line]) -> str:
    """How far apart the passes of --repeat lie; empty for one pass."""
    repeated = [line for line in timed if line.passes > 1]
    if not repeated:
        return ""
    apart = max(line.high_ms / line.low_ms - 1 for line in repeated)
    counts = [line.passes for line in repeated]
    return f"median of {_from_to(min(counts), max(counts))} passes, {apart:.1%} apart at most"


def _remarks(lines: list[Line], timed: list[Line]) -> list[str]:
    """Doubts with MARK in front, why rows have no time, and notes: `names: text`, each text once."""
    names: dict[str, list[str]] = {}
    for line in timed:
        if line.same_work == "differs":
            names.setdefault(line.note, []).append(line.name)
    marks = {}
    for line in timed:
        for doubt in line.doubts:
            names.setdefault(doubt, []).append(line.name)
            marks[doubt] = f"{MARK} "
    for line in lines:
        if not line.ms:
            names.setdefault(line.why_untimed, []).append(line.name)
    for line in timed:
        if line.note and line.same_work != "differs":
            names.setdefault(line.note, []).append(line.name)
    remarks = []
    for text, rows in names.items():
        who = "all rows" if len(rows) == len(lines) > 2 else ", ".join(rows)
        remarks.append(f"{marks.get(text, '')}{who}: {text}")
    return remarks
