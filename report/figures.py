"""Every figure of a run: a figure is a property of Line, and a column of a table in report/table.py."""

from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median

from common.record import (
    CATEGORIES,
    HALF_FORMATS,
    PATCHED,
    SDPA,
    Environment,
    Profile,
    Row,
    Run,
    Settings,
    middle_half,
)
from report.changes import lines_added
from report.peaks import peak_flops_per_s
from report.proof import limit, verdict

LOSS_WINDOW = 5  # training steps
MARK = "?"  # behind a figure that may be wrong
GAPS = "gaps"  # of the GPU's timeline
GIB = 2**30
# A row learns where no loss is above the first one times this, and the mean of the last five is below it
# times that.
MOST_OF_FIRST_LOSS, LEARNED = (1.1, 0.75)
SAME_LOSS = 0.05  # of the first loss; in all recorded rows, also of FP8, it was 0.4 % at most
LEAST_LOSS = 0.1  # nearer to zero, losses may cancel
DRAWS = 0.999  # the cosine of two passes of a model, below which it draws random numbers
FEWEST_LOSSES = 8  # from which that mean is judged
PROFILE_OFF = 1 / 3  # of the timed step, by which a profiled one may differ
TENSOR_CORES = (8, 0)  # the compute capability from which they multiply BF16 and TF32
WAITS = 0.05  # of a step, from which a GPU is said to wait for its host


@dataclass
class Ratio:
    """How many times faster one row is than another."""

    value: float
    clear: bool  # whether all middle times, or all passes, of one row lie on one side of the other's
    mark: str  # MARK where one of the two may be wrong


@dataclass(eq=False)
class Line:
    """One row of a run, with its figures. What its record does not hold is None or empty."""

    row: Row
    run: Run
    is_peer: bool = False
    # The least that the reference work, in ms, and a launch, in us, took around any row.
    fastest: dict[str, float] = field(default_factory=dict)
    # Of a step, the one that it is made from: of a model, the row with all its changes but the last; of a
    # script, the earlier one to which it adds the fewest lines.
    base: "Line | None" = None
    before: "Line | None" = None  # the base if it has a time, otherwise the nearest step before that has one
    first: "Line | None" = None  # the first step of the run that has a time
    doubts: list[str] = field(default_factory=list)  # why its time may be wrong, see report/doubts.py

    @property
    def name(self) -> str:
        return self.row.step

    @property
    def mark(self) -> str:
        """What stands behind its figures where they may be wrong."""
        return MARK if self.doubts else ""

    @property
    def failure(self) -> str:
        """Status and reason of a row without a time."""
        return "" if self.ms else f"{self.row.status}: {self.row.reason or 'no reason given'}"

    # --- time -------------------------------------------------------------------------------------

    @property
    def all_passes(self) -> list[Row]:
        """The passes of --repeat, or the row itself."""
        return self.row.passes or [self.row]

    @cached_property
    def medians(self) -> list[float]:
        """The median time of a step in each pass, ms; empty for a row without a time."""
        is_timed = self.row.status == "ok" and self.row.step_ms
        return [median(each.step_ms) for each in self.all_passes] if is_timed else []

    @cached_property
    def ms(self) -> float | None:
        """Median of the timed steps; of several passes, the median of their medians."""
        return median(self.medians) if self.medians else None

    @property
    def passes(self) -> int:
        return len(self.medians) or 1

    @cached_property
    def range_ms(self) -> tuple[float, float]:
        """The smallest and the largest median of the passes; of one pass, the quartiles."""
        ends = self.medians if self.passes > 1 else middle_half(self.all_passes[0].step_ms)
        return min(ends), max(ends)

    @property
    def drift(self) -> float:
        """Second half of the timed steps against the first, as a share: of the pass with the largest."""
        return max((each.drift for each in self.all_passes), key=abs) if self.ms else 0.0

    @property
    def over_before(self) -> Ratio | None:
        return ratio(self, self.before)

    @property
    def over_first(self) -> Ratio | None:
        return ratio(self, self.first)

    # --- rates ------------------------------------------------------------------------------------

    @property
    def tokens_per_s(self) -> float | None:
        """Of all GPUs."""
        work = self.run.workload
        return work.gpus * work.tokens_per_step / self.ms * 1e3 if self.ms and work else None

    @property
    def flops_per_s(self) -> float | None:
        """Model FLOPs of one GPU, by the convention of common/flops.py."""
        return self.run.workload.flops_per_step / self.ms * 1e3 if self.ms and self.run.workload else None

    @property
    def tokens_per_joule(self) -> float | None:
        if not (self.tokens_per_s and self.row.power_w):
            return None
        return self.tokens_per_s / self.run.workload.gpus / self.row.power_w

    @property
    def precision(self) -> str:
        """Of its matrix products; empty where none was observed, as of a loop that is not ours."""
        settings = self.row.settings
        if settings.fp8_recipe:
            return "fp8"
        if settings == Settings(captured=settings.captured):
            return ""
        if settings.amp_dtype in HALF_FORMATS:
            return "bf16"
        in_tf32 = settings.float32_matmul_precision != "highest" and self.capability >= TENSOR_CORES
        return "tf32" if in_tf32 else "fp32"

    @property
    def capability(self) -> tuple[int, int]:
        """The GPU's compute capability; (0, 0) of a CPU."""
        machine = self.run.environment
        return tuple((machine and machine.compute_capability) or (0, 0))

    @property
    def roofline_share(self) -> float | None:
        """Model FLOP/s over the burst rate of bare products in that precision."""
        ceiling = self.run.roofs.rate(self.precision, burst=True) if self.run.roofs else None
        return self.flops_per_s / ceiling if self.flops_per_s and ceiling else None

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s over the datasheet's dense peak in that precision."""
        machine = self.run.environment
        peak = peak_flops_per_s(machine.device, self.precision) if machine else None
        return self.flops_per_s / peak if self.flops_per_s and peak else None

    # --- memory, loss, work -----------------------------------------------------------------------

    @property
    def gib(self) -> float | None:
        """Peak of CUDA's allocator; on a CPU of the process."""
        return self.row.peak_bytes / GIB if self.ms and self.row.peak_bytes else None

    @property
    def loss(self) -> float | None:
        """Mean of the last LOSS_WINDOW training steps, nats."""
        return fmean(self.row.loss[-LOSS_WINDOW:]) if self.ms and self.row.loss else None

    @property
    def same_work(self) -> str:
        """agrees, differs or not proven: by its gradients, see report/proof.py, and by its first loss: one
        that is scaled leaves their direction."""
        if not self.ms:
            return ""
        by_gradients = verdict(self.row.proof)
        return "differs" if by_gradients == "agrees" and self._loss_differs else by_gradients

    @property
    def _loss_differs(self) -> bool:
        """Whether its loss of the first training step, from the same weights, is not that of the first row;
        of a model that draws random numbers it may not be."""
        if not (self.first and self.first.row.loss and self.row.loss) or self.is_peer:
            return False
        draws = (self.row.proof.repeated or 1.0) < DRAWS if self.row.proof else False
        apart = abs(self.row.loss[0] - self.first.row.loss[0])
        return not draws and apart > SAME_LOSS * max(LEAST_LOSS, abs(self.first.row.loss[0]))

    @property
    def note(self) -> str:
        """What qualifies a row that has a time."""
        if not self.ms:
            return ""
        # The rule of learning is of our text and our rate.
        unlearned = learning_failure(self.row.loss) if self.run.is_of_ladder else ""
        return "; ".join(
            filter(None, [self.row.note, unlearned, self._other_work(), self._profile_left_out()])
        )

    def _other_work(self) -> str:
        """How its work differs from that of the first row, in a clause; empty where it agrees."""
        proof = self.row.proof
        if self.same_work == "differs" and verdict(proof) == "agrees":
            losses = f"{self.row.loss[0]:.4g}, and that of {self.first.name} {self.first.row.loss[0]:.4g}"
            return f"differs in its work: its first loss is {losses}"
        if self.same_work == "differs":
            cosine = (
                f"cosine {proof.cosine:.4f} with that of {proof.against}, and not {limit(proof):.3g} or more"
            )
            return f"differs in its work: gradient of {proof.weight}, {cosine}"
        if self.same_work == "not proven" and not self.is_peer:  # peers may begin with weights of their own
            if proof.cosine is None:
                of = f"{proof.paired:.0%} of the weights of {proof.against}"
                return f"its work is not proven: gradients of {of} can be compared"
            return f"its work is not proven: random numbers alone turn gradients of {proof.against}"
        return ""

    # --- where the time of a step goes ------------------------------------------------------------

    @property
    def profile(self) -> Profile | None:
        """Its profile, if that is of steps that took about as long as the timed ones."""
        return self.row.profile if self.ms and not self._profile_left_out() else None

    def _profile_left_out(self) -> str:
        """Why a profile is not shown, in a clause."""
        if not (self.ms and self.row.profile):
            return ""
        whole = sum(parts_of(self.row.profile).values())
        if abs(whole / self.ms - 1) <= PROFILE_OFF:
            return ""
        return f"its profile is left out: profiled steps took {whole:,.1f} ms, the timed ones {self.ms:,.1f}"

    @cached_property
    def category_ms(self) -> dict[str, float]:
        """Of a step, by kind of kernel; on a GPU with GAPS."""
        return parts_of(self.profile) if self.profile else {}

    @property
    def share(self) -> tuple[str, float] | None:
        """What takes the largest share of a GPU's step: its name, and the share."""
        ms = self.category_ms
        if not ms or self.profile.idle_ms is None:
            return None
        whole, is_fused = sum(ms.values()), self.row.settings.has_run(SDPA)
        compute = ms["matrix products"] + (ms["attention"] if is_fused else 0.0)
        shares = {"compute": compute, GAPS: ms[GAPS], "communication": ms["communication"]}
        # Most of these pass over memory, but only hardware counters would show it.
        shares["other kernels"] = whole - sum(shares.values())
        largest = max(shares, key=shares.get)
        return largest, shares[largest] / whole

    # --- the machine around it --------------------------------------------------------------------

    @property
    def slowed(self) -> float:
        """Its reference work over the fastest of the run: of the pass where it took longest."""
        times = [ms / self.fastest[kind] for row in self.all_passes for kind, ms in reference_ms(row).items()]
        return max([1.0, *times]) if self.ms else 1.0

    @property
    def slow_launch(self) -> float:
        """The same of its launches, where the GPU waits for them."""
        if not self.ms or "launch" not in self.fastest or not waits_for_the_host(self.row):
            return 1.0
        return max((launch_us(row) or 0.0) / self.fastest["launch"] for row in self.all_passes)


@dataclass
class Figures:
    """A run with the figures of its rows."""

    run: Run
    lines: list[Line]  # steps, the patched file of a model, and peers
    environment: Environment

    @property
    def steps(self) -> list[Line]:
        return [line for line in self.lines if not line.is_peer and line.name != PATCHED]

    @property
    def patched(self) -> Line | None:
        return next((line for line in self.lines if line.name == PATCHED), None)

    @property
    def timed(self) -> list[Line]:
        """Steps and peers that have a time."""
        return [line for line in self.lines if line.ms]

    @property
    def timed_steps(self) -> list[Line]:
        return [line for line in self.steps if line.ms]

    @property
    def first(self) -> Line | None:
        """The first step that has a time; gains are shown over it and over `plain`."""
        return next(iter(self.timed_steps), None)

    @property
    def plain(self) -> Line | None:
        """Where most readers' training stands: the first step with fused attention that is neither compiled
        nor FP8, in mixed precision unless no step has it. None where there is none, and of another model."""
        timed = self.timed_steps if self.run.is_of_ladder else []
        for line in [line for line in timed if is_mixed(line)] or timed:
            settings = line.row.settings
            if settings.has_run(SDPA) and not settings.compiled and not settings.fp8_recipe:
                return line
        return None


def base_of(line: Line, earlier: list[Line]) -> Line | None:
    """Of these steps before it, the one that a step is made from. Of a model, whose row has no such step, and
    of scripts whose records hold no source, the one before."""
    if line.row.changes:
        alike = [other for other in earlier if other.ms and other.row.changes == line.row.changes[:-1]]
        return next(iter([*alike, *earlier[-1:]]), None)
    with_source = [other for other in earlier[::-1] if other.row.source and other.row.status != "not run"]
    if not (line.row.source and with_source):
        return earlier[-1] if earlier else None
    return min(with_source, key=lambda other: len(lines_added(other.row.text, line.row.text)))


def is_mixed(line: Line) -> bool:
    return line.row.settings.amp_dtype in HALF_FORMATS


def ratio(line: Line, other: Line | None) -> Ratio | None:
    """How many times faster a row is than another; None where one has no time."""
    if other is None or not (line.ms and other.ms):
        return None
    (low, high), (others_low, others_high) = line.range_ms, other.range_ms
    return Ratio(other.ms / line.ms, high < others_low or low > others_high, max(line.mark, other.mark))


def learning_failure(losses: list[float]) -> str:
    """How a row fails the rule of learning, in a clause; empty where it does not."""
    if losses and max(losses) > MOST_OF_FIRST_LOSS * losses[0]:
        return f"did not learn as it should: a loss was above {MOST_OF_FIRST_LOSS} times the first"
    if len(losses) >= FEWEST_LOSSES and fmean(losses[-LOSS_WINDOW:]) > LEARNED * losses[0]:
        return f"hardly learned: its last five losses were above {LEARNED} times the first"
    return ""


def parts_of(profile: Profile) -> dict[str, float]:
    """Milliseconds of a profiled step by kind of kernel, and its gaps."""
    return {name: profile.categories.get(name, 0.0) for name in CATEGORIES} | {GAPS: profile.idle_ms or 0.0}


# --- the reference work ---------------------------------------------------------------------------


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


def fastest_reference(runs: list[Run]) -> dict[str, float]:
    """The least that each kind of reference work, in ms, and a launch, in us, took around any row."""
    fastest: dict[str, float] = {}
    rows = [row for run in runs for row in [*run.rows, *run.peers] if row.status == "ok"]
    for one_pass in [each for row in rows for each in row.passes or [row]]:
        for kind, time in (reference_ms(one_pass) | {"launch": launch_us(one_pass)}).items():
            if time:
                fastest[kind] = min(time, fastest.get(kind, time))
    return fastest
