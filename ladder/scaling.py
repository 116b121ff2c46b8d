"""One ladder on 1, 2, 4, ... GPUs: its places, each a run folder with a plan of its own, and which rows they need.

A place is named after its number of GPUs and how they share the model: `1`, `2-ddp`, `2-fsdp`. In `1-launched` a row
runs alone without being captured, where a row on several GPUs was not captured either: what is compared is alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from common.record import LAUNCHED_ALONE, Plan
from ladder.shared import row_of

PARALLEL = ("ddp", "fsdp")
SHARDED = "34"  # the steps that run with FSDP2 too, unless the user chose steps
ALONE = "1"


def gpu_counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({most, *(2**k for k in range(most.bit_length()))})


def divide(
    alone: Plan, facts: dict, most: int | None, parallel: str | None, sharded: str | None,
    check: Callable[[list[str], int], dict],
) -> dict[str, tuple[Plan, dict]]:  # fmt: skip
    """Plan and facts of every place, from those of one GPU.

    `most` GPUs, or all; `parallel` names the one way to share the model, if the user chose; `sharded` are the numbers
    of the steps that run with FSDP2 as well as DDP, None for all. Raises ValueError where there is only one GPU.
    """
    most = most or facts["gpus"] or 2  # a CPU has no GPU, but runs two processes
    if most == 1:
        raise ValueError("--scaling needs two GPUs or more; with --device cpu it runs two processes on the CPU")
    rows = [name for name in alone.rows if name not in alone.left_out]
    alone = replace(alone, rows=rows, left_out=[], roofs=False)
    planned = {ALONE: (alone, facts)}
    for gpus in gpu_counts(most)[1:]:
        for how in PARALLEL:
            chosen = [name for name in rows if parallel or how == "ddp" or sharded is None or name[0] in sharded]
            if chosen and parallel in (None, how):
                arguments = [*alone.arguments, "--parallel", how]
                here = check(arguments, gpus)
                plan = replace(alone, rows=chosen, gpus=gpus, arguments=arguments, workload=here["workload"])
                planned[f"{gpus}-{how}"] = plan, here
    planned[LAUNCHED_ALONE] = replace(alone, arguments=[*alone.arguments, "--no-capture"]), facts
    return planned


def is_needed(record: Path, place: Path) -> bool:
    """Whether a row is to run: in `1-launched` only where it was captured on one GPU and launched on several."""
    if place.name != LAUNCHED_ALONE:
        return True
    row = record.relative_to(place)
    captured = {other.name: _captured(other / row) for other in place.parent.iterdir()}
    return captured.pop(ALONE, None) is True and False in captured.values()


def _captured(record: Path) -> bool | None:
    """Whether a row that has a time was captured; None of any other."""
    row = row_of(record)
    return row["settings"]["captured"] if row.get("status") == "ok" else None
