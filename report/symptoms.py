"""Which symptoms of docs/not-faster.md the rows of a run show."""

from __future__ import annotations

import re

from common.record import Row, Run
from report import analysis
from report.analysis import is_timed
from report.doubts import MOST_OF_CEILING, compared, is_unsteady
from report.load import environment_of

PAGE = "docs/not-faster.md"
SLOW_FP8, LARGE_FP8, NAN = "FP8 is slower, or hardly faster", "FP8 needs more memory", "NaN with FP8"
INSTALL = "Transformer Engine does not install"
SLOW_COMPILE, RECOMPILED, LARGE_COMPILE = (
    "Compiled code is slower than eager",
    "It compiles again and again",
    "torch.compile needs more memory",
)
ATTENTION = "Attention takes the math kernel or a masked one"
SLOW_AMP, TF32 = "Mixed precision gains little, or is slower on a CPU", "TF32 is off"
DDP, FSDP = "DDP with compile is slower", "FSDP is far behind DDP"
HOST, MFU, SYNC = "The host is the limit, AdamW first of all", "MFU is over 100%", "A sync in the loop"
TITLES = (SLOW_FP8, LARGE_FP8, NAN, INSTALL, SLOW_COMPILE, RECOMPILED, LARGE_COMPILE, ATTENTION, SLOW_AMP, TF32, DDP,
          FSDP, HOST, MFU, SYNC)  # fmt: skip
MORE = 1.02  # times as long, or as much, as the row before: less is no symptom
MANY_CASTS = 0.2  # of a step
MUCH = 2.0  # times faster than the row before: its casts are then no reason to look further


def pointers(run: Run) -> list[str]:
    """A line for each symptom that a row shows: how it shows, and which entry of the page is about it."""
    found = [
        (row.step, *each) for before, row in analysis.consecutive(run.steps) for each in symptoms(run, before, row)
    ]
    return [f"{step}: {sign}: see {PAGE}, “{title}”" for step, sign, title in found]


def symptoms(run: Run, before: Row | None, row: Row) -> list[tuple[str, str]]:
    """How a row shows a symptom, from it and from the row before, and the title of the entry."""
    if not is_timed(row):
        return _of_reason(row.reason or "")
    return [*_of_one(run, before, row), *(_of_two(run, before, row) if before else [])]


def _of_reason(reason: str) -> list[tuple[str, str]]:
    """What a row without a time shows: a loss that is no number ends its process."""
    if "does not import" in reason:
        return [("no Transformer Engine", INSTALL)]
    said = re.search(r"loss is (nan|inf) at \w+ step \d+", reason)
    return [(said[0], NAN)] if said else []


def _of_one(run: Run, before: Row | None, row: Row) -> list[tuple[str, str]]:
    settings, casts = row.settings, casts_share(row)
    speedup = compared(row, before, run)
    gained = speedup is not None and speedup.ratio > MUCH
    launched = environment_of(run).device_type == "cuda" and not settings.captured
    bound = (analysis.bound(row) or ("",))[0]
    signs = (
        (settings.attention_kernel in ("math", "efficient"), f"attention: {settings.attention_kernel}", ATTENTION),
        (bound == "launch", "the largest part of its time is gaps between kernels", HOST),
        (launched and row.gpu_state and row.gpu_state.while_running is False,
         "the GPU had nothing left to do when its last timed step was launched", HOST),
        (launched and is_unsteady(row), "launched kernel by kernel, and its times spread far", HOST),
        ((analysis.products_share(row, run) or 0) > MOST_OF_CEILING, "products above their ceiling", MFU),
        (row.host_syncs, f"the host waits {row.host_syncs} times a step", SYNC),
        (casts > MANY_CASTS and not gained, f"copies and casts take {casts:.0%} of its profiled step",
         SLOW_FP8 if settings.fp8_recipe else SLOW_AMP),
    )  # fmt: skip
    return [(sign, title) for shown, sign, title in signs if shown]


def casts_share(row: Row) -> float:
    """The share of copies and casts in a profiled step of mixed precision; 0 of any other."""
    if row.profile is None or row.settings.amp_dtype in (None, "float32"):
        return 0.0
    return analysis.category_ms(row)["copies and casts"] / row.profile.step_ms


def _of_two(run: Run, before: Row, row: Row) -> list[tuple[str, str]]:
    """What is slower or larger than before, by what the row added."""
    new, old = row.settings, before.settings
    if new.fp8_recipe and not old.fp8_recipe:
        slow, large = SLOW_FP8, LARGE_FP8
    elif new.compiled and not old.compiled:
        slow, large = DDP if run.workload and run.workload.parallel == "ddp" else SLOW_COMPILE, LARGE_COMPILE
    elif new.amp_dtype != old.amp_dtype:
        slow, large = SLOW_AMP, None
    else:
        return []
    speedup = compared(row, before, run)
    steady = analysis.tells_apart(row, before) and not (is_unsteady(row) or is_unsteady(before))
    slower = steady and speedup and speedup.ratio < 1 / MORE
    peaks = [one.peak_allocated_bytes for one in (before, row)]  # on a CPU a peak holds the compiler too
    larger = all(peaks) and peaks[1] > MORE * peaks[0]
    found = ((slower, f"slower than {before.step}", slow), (larger, f"more memory than {before.step}", large))
    return [(sign, title) for shown, sign, title in found if shown and title]
