"""Why a time may be wrong, and what is unusual in a run: the lines below its table."""

from common.record import AS_IT_IS, DRIFT
from report.figures import MARK, Figures, Line
from report.load import DIFFER
from report.promises import contradiction

# Times what the reference work takes at best, beyond which something else ran on the machine. Around the rows
# of an idle H200 it varied by 4 %.
BUSY = 1.10
# A host is slow at launching where its launches took so many times as long as at best: on good hosts they
# varied by 1.8 times between rows. Only a row whose GPU waits for it is marked.
SLOW_LAUNCH = 2.0
BLOCKING = "CUDA_LAUNCH_BLOCKING"


def of(line: Line, figures: Figures, is_patched: bool) -> list[str]:
    """Why the time of a row may be wrong. Nothing is concluded from times of a CPU, so they bear no doubt."""
    run, doubts = figures.run, []
    variables = figures.environment.variables
    first = figures.first.row if figures.first else line.row
    own = first.settings if first.step == AS_IT_IS else None
    if not is_patched and (denied := contradiction(line.row, run.is_of_ladder, variables, own)):
        doubts.append(denied)
    if any(row.recompiled for row in line.all_passes):
        doubts.append("the compiler worked while it was timed")
    if figures.environment.device_type != "cpu":
        if line.slowed > BUSY:
            doubts.append("the machine was busy")
        if line.slow_launch > SLOW_LAUNCH:
            doubts.append("the host was slow at launching kernels")
        if variables.get(BLOCKING, "0") != "0" and not line.row.settings.captured:
            doubts.append(f"{BLOCKING} made the host wait for every kernel")
        if abs(line.drift) > DRIFT:
            more = "more" if line.drift > 0 else "less"
            doubts.append(f"the second half of the steps took over {DRIFT:.0%} {more} time")
    if any(problem.startswith(DIFFER) for problem in run.problems):
        doubts.append("rows differ in more than their scripts")
    own = line.row.settings
    alike = [
        step.row.settings for step in figures.timed_steps if step.row.settings.amp_dtype == own.amp_dtype
    ]
    kernels = {settings.attention_kernel for settings in alike} - {None, "by hand"}
    if len(kernels) > 1 and own.attention_kernel in kernels and not line.is_peer:
        doubts.append(f"attention ran as {' and '.join(sorted(kernels))}")
    return doubts


def busy(figures: Figures) -> str:
    """What was seen of a busy GPU machine, and advice; empty where it was not busy."""
    worst = max(figures.timed, key=lambda line: line.slowed, default=None)
    if figures.environment.device_type != "cuda" or worst is None or worst.slowed <= BUSY:
        return ""
    took = f"the same work took {worst.slowed:.2f} times as long around {worst.name} as at best"
    return (
        f"The machine was busy: {took}. Figures with {MARK} may be wrong: close other programs and run again"
    )


def remarks(figures: Figures) -> list[str]:
    """What is unusual in a run, most important first: a line each, for all rows that share it."""
    work = figures.run.workload
    texts = [busy(figures), *_of_rows(figures), *dict.fromkeys(figures.run.problems)]
    if work and work.gpus > 1:
        texts.append(f"{work.gpus} processes: tokens/s are of all, TFLOP/s and GiB of each")
    return [*filter(None, [*texts, _of_passes(figures.timed)])]


def _of_rows(figures: Figures) -> list[str]:
    """Other work, doubts with MARK in front, why rows have no time, and notes: `names: text`."""
    names: dict[str, list[str]] = {}
    differing = [line for line in figures.timed if line.same_work == "differs"]
    told = [(line, line.note) for line in differing]
    told += [(line, f"{MARK} {doubt}") for line in figures.timed for doubt in line.doubts]
    told += [(line, line.failure) for line in figures.lines if not line.ms]
    told += [(line, line.note) for line in figures.timed if line not in differing]
    for line, text in told:
        names.setdefault(text, []).append(line.name)
    names.pop("", None)
    texts = []
    for text, rows in names.items():
        who = "all rows" if len(rows) == len(figures.lines) > 2 else ", ".join(rows)
        mark, text = (f"{MARK} ", text[2:]) if text.startswith(MARK) else ("", text)
        texts.append(f"{mark}{who}: {text}")
    return texts


def _of_passes(timed: list[Line]) -> str:
    """How far apart the passes of --repeat lie; empty for one pass."""
    repeated = [line for line in timed if line.passes > 1]
    if not repeated:
        return ""
    apart = max(max(line.medians) / min(line.medians) - 1 for line in repeated)
    counts = [line.passes for line in repeated]
    return f"median of {from_to(min(counts), max(counts))} passes, {apart:.1%} apart at most"


def from_to(least: int, most: int) -> str:
    """`3 to 10`, or `3` where both are the same."""
    return str(least) if least == most else f"{least} to {most}"
