"""What a run shows and what it ran on, in sentences."""

from common.record import AS_IT_IS, FP8, GRAPH, PATCHED, SDPA, WORTH, Environment, Workload
from report.cells import gain, milliseconds
from report.doubts import from_to
from report.figures import (
    LOSS_WINDOW,
    MARK,
    Figures,
    Line,
    Ratio,
    is_mixed,
    learning_failure,
    ratio,
    waits_for_the_host,
)
from report.table import VERSIONS

CPU_SHOWS = "A CPU shows how each step works, and not what it gains on a GPU"
ENOUGH_FOR_FP8 = 10  # rehearsed steps
CONVENTION = "TFLOP/s count the model's FLOPs, with half of attention's (T, T) square"
CONVENTION_OF_LOOP = "TFLOP/s count the whole (T, T) square of attention"
CONVENTION_OF_MODEL = (
    "TFLOP/s are by PyTorch's counter, with the whole (T, T) square of attention. Loading of batches is not "
    "timed"
)
UNCOUNTED = "PyTorch's counter does not know all FLOPs of this model. Loading of batches is not timed"


def headline(figures: Figures) -> str:
    """What a run shows: the fastest step against AMP + SDPA and against the first, and whether FP8 pays; or
    why it shows nothing. No gain is told of a figure that may be wrong, and none of a CPU."""
    timed = figures.timed_steps
    if not timed:
        return "No step has a time"
    if figures.environment.device_type == "cpu":
        return CPU_SHOWS if figures.run.is_of_ladder else f"{CPU_SHOWS}{what_a_gpu_tries(figures)}"
    if not figures.run.is_of_ladder:
        return decision(timed)
    best = min(timed, key=lambda line: line.ms)
    if best.doubts:
        return f"No verdict: {best.name} has the shortest time, and {MARK}: {best.doubts[0]}"
    if objection := _objection_to_work(best):
        return f"No verdict: {best.name} has the shortest time, and {objection}"
    others = dict.fromkeys(line for line in (figures.plain, figures.first) if line and line is not best)
    timed = [line for line in timed if not _objection_to_work(line)]
    sure = [line for line in others if line in timed and not line.doubts]
    if not sure:
        return f"One training step of {best.name}: {milliseconds(best.ms)} ms{_whether_fp8_pays(timed)}"
    gains = ", ".join(f"{_times_faster(best, line)} than {_in_words(line)}" for line in sure)
    return f"{best.name}: {gains}{_whether_fp8_pays(timed)}"


def _objection_to_work(line: Line) -> str:
    """Why the time of a step of the ladder decides nothing, as a clause; empty if it may."""
    if line.same_work == "differs":
        return "differs in its work"
    learns_less = learning_failure(line.row.loss) and not learning_failure(line.first.row.loss)
    return "did not learn as the first row did" if learns_less else ""


def what_a_gpu_tries(figures: Figures) -> str:
    """The changes of a run's rows, in a sentence behind another; empty without any."""
    rows = [row for row in figures.run.rows if row.changes and row.step not in (AS_IT_IS, PATCHED)]
    # These are skipped on a CPU for the CPU's sake, others for the model's.
    rows = [row for row in rows if row.status != "skipped" or row.changes[-1] in (GRAPH, FP8)]
    *words, last = [row.changes[-1] for row in rows] or [""]
    changes = f"{', '.join(words)} and {last}" if words else last
    return f". On a GPU it tries {changes}, and says which to take" if last else ""


def decision(timed: list[Line]) -> str:
    """Which changes a model should take, what they give together, and which it should leave."""
    first = timed[0]
    changed = [line for line in timed if line.row.changes and line.name != AS_IT_IS]
    if not changed:
        return "No change has a time"
    taken = taken_of(timed)
    others = [line for line in changed if line not in taken]
    if not taken:
        if any(map(_is_doubtful, others)):
            return _not_taken(others)
        return f"Take none of the changes. {_not_taken(others)}"
    whole = taken[-1].over_first
    if taken[-1] is not first and not whole.mark and whole.value <= 1:
        return f"Take none of the changes: together they are not faster, {gain(whole)} x"
    # A later row keeps what did not slow the model, also where it is hardly worth it.
    held = taken[-1].row.changes
    included = [line for line in others if line.row.changes[-1] in held]
    left = [line for line in others if line not in included]
    if taken[-1] is first:
        sentence = f"Nothing tells what {first.row.changes[-1]} gives: no row before it has a time"
    else:
        sentence = f"Take {', '.join(line.row.changes[-1] for line in taken)}"
        if not whole.mark:
            sentence += f": {gain(whole)} x{f' over {first.name}' if first.row.changes else ''}"
    if included:
        sentence += f", with {_gains(included)}"
        if undecided := [line.row.changes[-1] for line in included if _is_doubtful(line)]:
            sentence += f"; {' and '.join(undecided)} not decided, because figures with {MARK} may be wrong"
    return f"{sentence}. {_not_taken(left)}" if left else sentence


def taken_of(timed: list[Line]) -> list[Line]:
    """The rows whose changes are worth it, and the first one, whose change nothing judges. Where a row's time
    may be wrong, or later rows keep its change though it is slower, the change is judged with that of the
    next sure row, against the last sure one before."""
    changed = [line for line in timed if line.row.changes and line.name != AS_IT_IS]
    differing = {line.row.changes[-1] for line in changed if line.same_work == "differs"}
    taken, sure, waiting = [], timed[0], []
    for line in changed:
        if differing & {*line.row.changes}:
            continue
        if line is timed[0]:
            taken.append(line)
        elif line.doubts or (_is_slower(line) and _is_kept(line, changed)):
            waiting.append(line)
        else:
            held = [other for other in waiting if other.row.changes[-1] in line.row.changes]
            if _is_worth(ratio(line, sure) if held else line.over_before):
                taken += [*held, line]
            sure, waiting = line, []
    return taken


def _not_taken(lines: list[Line]) -> str:
    """`Leave out CUDA graph (1.02 x). Not decided, because times overlap: AMP (1.18 x)`."""
    doubtful = [line for line in lines if _is_doubtful(line)]
    undecided = [line for line in lines if _is_undecided(line) and line not in doubtful]
    left = [line for line in lines if line not in [*undecided, *doubtful]]
    sentences = [f"Leave out {_gains(left)}"] if left else []
    if undecided:
        sentences.append(f"Not decided, because times overlap: {_gains(undecided)}")
    if doubtful:
        sentences.append(f"Not decided, because figures with {MARK} may be wrong: {_gains(doubtful)}")
    return ". ".join(sentences)


def _gains(lines: list[Line]) -> str:
    """`CUDA graph (1.02 x), FP8 (its work differs)`."""
    return ", ".join(f"{line.row.changes[-1]} ({_what_of(line)})" for line in lines)


def _what_of(line: Line) -> str:
    """What a change that is not recommended gives, or why it is not."""
    before = line.before
    if line.same_work == "differs":
        return "its work differs"
    if before and _is_slower(before) and before.row.changes[-1] in line.row.changes:
        return f"with {before.row.changes[-1]} {gain(ratio(line, before.before))} x"
    waits = _is_slower(line) and waits_for_the_host(line.row)
    return f"{gain(line.over_before)} x{', where the GPU waits for its host' if waits else ''}"


def _is_doubtful(line: Line) -> bool:
    """Whether what a change gives rests on a figure that may be wrong."""
    return line.same_work != "differs" and line.over_before is not None and bool(line.over_before.mark)


def _is_undecided(line: Line) -> bool:
    """Whether a change may be worth it, but its times overlap with those before it."""
    faster = line.over_before
    may_be_worth = faster is not None and faster.value >= WORTH and not faster.clear
    return may_be_worth and line.same_work != "differs"


def _is_slower(line: Line) -> bool:
    return line.over_before is not None and line.over_before.clear and line.over_before.value < 1


def _is_kept(line: Line, changed: list[Line]) -> bool:
    """Whether a later row has its change, too."""
    return any(line.row.changes[-1] in later.row.changes for later in changed[changed.index(line) + 1 :])


def _is_worth(faster: Ratio | None) -> bool:
    return faster is not None and faster.value >= WORTH and faster.clear and not faster.mark


def loss_rule(figures: Figures) -> str:
    """What the losses of a run are, in a sentence; empty where no row has any."""
    rows = [line.row for line in figures.timed if line.row.loss]
    if not rows:
        return ""
    every, last = max((row.loss_every, len(row.loss)) for row in rows)
    trained, work = last * every, figures.run.workload
    if work:  # the last window may be a part of one
        trained = min(trained, work.steps)
    steps = from_to(max(0, last - LOSS_WINDOW) * every + 1, trained)
    unit = ", in nats" if figures.run.is_of_ladder else ""
    words = f"Loss: mean of training steps {steps}{unit}"
    rehearsed = [row.rehearsed for row in rows]
    in_fp8 = [row.rehearsed for row in rows if row.settings.fp8_recipe]
    if any(rehearsed):
        counts = from_to(min(rehearsed), max(rehearsed))
        words += f", after a rehearsal of {counts} steps, which was undone"
    if any(in_fp8):
        words += "; FP8 keeps the scales that it found there"
    if any(0 < steps < ENOUGH_FOR_FP8 for steps in in_fp8):
        words += f", though fewer than {ENOUGH_FOR_FP8} may be too few for it"
    if 0 in in_fp8:
        words += ". A row in FP8 without a rehearsal begins with unknown scales, and its loss lags"
    return words


def convention(figures: Figures) -> str:
    """What TFLOP/s count."""
    if figures.run.is_of_ladder:
        return CONVENTION
    if figures.timed_steps and not any(line.flops_per_s for line in figures.timed_steps):
        return UNCOUNTED
    return CONVENTION_OF_LOOP if figures.run.workload.model == "loop.py" else CONVENTION_OF_MODEL


def _whether_fp8_pays(timed: list[Line]) -> str:
    """A clause on the fastest step in FP8, against the fastest one without; empty where one is missing."""
    in_fp8 = [line for line in timed if line.row.settings.fp8_recipe]
    others = [line for line in timed if not line.row.settings.fp8_recipe]
    if not in_fp8 or not others:
        return ""
    faster = ratio(min(in_fp8, key=lambda line: line.ms), min(others, key=lambda line: line.ms))
    if faster.mark:
        return ""
    if not faster.clear:
        return ". FP8 gains nothing clear here"
    return f". FP8 {'pays' if faster.value > 1 else 'does not pay'} here: {gain(faster)} x"


def _times_faster(line: Line, other: Line) -> str:
    faster = ratio(line, other)
    if not faster.clear:
        return "not clearly faster"
    if faster.value >= 10:
        return f"{faster.value:.0f} times faster"
    return f"{faster.value:.{1 if faster.value >= 1.25 else 2}f} times faster"


def _in_words(line: Line) -> str:
    """What a reader calls a row: AMP + SDPA, FP32; or its name."""
    settings = line.row.settings
    if is_mixed(line) and settings.has_run(SDPA) and not settings.compiled:
        return "AMP + SDPA"
    if settings.amp_dtype == "float32" and settings.float32_matmul_precision == "highest":
        return "FP32"
    return line.name


def describe_machine(environment: Environment) -> str:
    """The device, the versions of what ran on it, and the commit."""
    versions = [f"{name} {environment.versions[name]}" for name in VERSIONS if name in environment.versions]
    commit = environment.commit or "unknown"
    changed = " with uncommitted changes" if commit.endswith("-dirty") else ""
    return ", ".join([environment.device, *versions, f"commit {commit[:7]}{changed}"])


def describe_workload(work: Workload | None) -> str:
    if work is None:
        return "workload unknown"
    names = ("n_layer", "n_head", "n_embd", "seq_len", "vocab_size", "batch_size")
    parts = [f"{name} {getattr(work, name)}" for name in names if getattr(work, name)]
    if work.model:
        parts.append(f"{work.tokens_per_step:,} {work.unit} a step")
    if work.lr:
        parts.append(f"learning rate {work.lr:.2g}")
    parts.append(f"{work.parameters / 1e6:,.1f} M parameters")
    parts += [f"{work.steps} trained steps", work.text if work.model else f"text: {work.text}"]
    if work.gpus > 1:
        parts.append(f"{work.gpus} processes by {work.parallel}")
    return f"{work.model or work.preset}: {', '.join(parts)}"
