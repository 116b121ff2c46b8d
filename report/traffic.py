"""DRAM bytes that the GPU counted: of attention, and of each step's longest kernels."""

from __future__ import annotations

import re
from pathlib import Path

from report.kernels import readable
from report.load import RecordError, read_json
from report.table import bullets, commit_name, markdown, pipe_table

LIMITED_BY_MEMORY = 0.8  # of a copy's bandwidth
MULTIPLIES = r"matrix product|fused attention, (for|back)ward$"  # in words
STEP_TRAFFIC = "step-traffic-"  # begins the name of a record
ATTENTION = (
    "*Analytic* is the least that either form must read and write, by arithmetic; *counted* is what the GPU's counters "
    "saw of its kernels; *copies* are those that the driver makes, which the counters leave out."
)
HOW = (
    "Nsight Compute counted, with the GPU's own counters, the bytes that each kernel of one training step reads "
    "from DRAM and writes to it; bytes that a cache holds are not among them. The step is launched, after a few "
    "that warm up. Copies that the driver makes are no kernels, and are left out. Under the counters each kernel runs "
    "alone, with pauses between, so the times add up to less than a timed step takes. Bytes over time is a bandwidth, "
    "and that of a large copy on the same GPU gives the scale: "
    f"some kernels exceed it a little. A kernel that reaches {LIMITED_BY_MEMORY:.0%} of it counts here as limited by "
    "memory. One far below waits for something else: its arithmetic, a cache, or the way in which it reads and "
    "writes. Which of these was not counted. The lines leave out matrix products and fused attention, all of which "
    "are far below. A kernel's launches are added up, and the ten largest sums of each step are kept. Kernels of "
    "one name in words share a row."
)


def read_traffic(path: Path) -> dict:
    """What python -m anatomy.traffic wrote. Raises RecordError where a part of it was not counted."""
    traffic = read_json(path)
    for name, part in {"attention": traffic, **traffic.get("steps", {})}.items():
        if part.get("reason"):
            raise RecordError(f"{path.name} lacks {name}: {part['reason']}")
    return traffic


def sections(results: Path) -> list[str]:
    """Headings and tables of what python -m anatomy.traffic recorded; empty where it recorded nothing."""
    parts = []
    for path in sorted(results.glob("*/attention-traffic.json")):
        attention = read_traffic(path)
        parts += [f"## DRAM bytes of attention, recorded in `{path.parent.name}`, {_commit(attention)}", ATTENTION]
        parts.append(_attention_table(attention))
    paths = sorted(results.glob(f"*/{STEP_TRAFFIC}*.json"))
    parts += ["## DRAM bytes of the longest kernels", HOW] if paths else []
    for path in paths:
        traffic, name = read_traffic(path), path.stem.removeprefix(STEP_TRAFFIC)
        parts.append(f"### {name}, recorded in `{path.parent.name}`, {_commit(traffic)}")
        parts += ["\n".join(bullets(counted(traffic))).strip(), _step_table(traffic)]
    return parts


def of_run(folder: Path) -> list[str]:
    """What the counters say of the steps of a recorded run's shape; nothing where they were not read."""
    path = folder.parent / f"{STEP_TRAFFIC}{folder.name}.json"
    if not path.exists():
        return []
    traffic = read_traffic(path)
    return [*counted(traffic), f"Counted at {_commit(traffic)}."]


def _commit(traffic: dict) -> str:
    environment = traffic["environment"]
    return f"commit {commit_name(environment['commit'], environment['dirty'], 7)}"


def counted(traffic: dict) -> list[str]:
    """What the counters say of each step, in a line: which of its longest kernels memory limits, and for how long."""
    lines = []
    for script, step in traffic["steps"].items():
        moving = [one for one in _by_words(step) if not re.match(MULTIPLIES, one["name"])]
        limited = [one for one in moving if _of_copy(one, traffic) >= LIMITED_BY_MEMORY]
        parts = [
            f"{script} moves {step['bytes'] / 1e9:,.0f} GB",
            _named("At memory's limit", limited, traffic),
            _named("Below memory's limit", [one for one in moving if one not in limited], traffic),
        ]
        lines.append(f"{'. '.join(filter(None, parts))}.")
    return lines


def _named(what: str, kernels: list[dict], traffic: dict) -> str:
    if not kernels:
        return ""
    names = "; ".join(f"{one['name']} ({_of_copy(one, traffic):.0%})" for one in kernels)
    return f"{what} for {1e3 * sum(one['seconds'] for one in kernels):.1f} ms: {names}"


def _of_copy(moved: dict, traffic: dict) -> float:
    """Bandwidth of what moved these bytes in these seconds, as a share of a copy's."""
    return moved["bytes"] / moved["seconds"] / traffic["copy_bytes_per_s"]


def _by_words(step: dict) -> list[dict]:
    """The longest kernels of a step, those of one name in words added up; the longest first."""
    found: dict[str, dict] = {}
    for kernel in step["kernels"]:
        name = readable(kernel["name"])
        known = found.setdefault(name, {"launches": 0, "bytes": 0, "seconds": 0})
        found[name] = {key: known[key] + kernel[key] for key in known}
    return sorted(({"name": name} | kernel for name, kernel in found.items()), key=lambda one: -one["seconds"])


def _attention_table(traffic: dict) -> str:
    shape = ", ".join(f"{name} {size}" for name, size in traffic["shape"].items())
    cells = []
    for which, counts in traffic["bytes"].items():
        gb = (
            "-" if counts[kind] is None else f"{counts[kind] / 1e9:.2f}" for kind in ("analytic", "counters", "copies")
        )
        cells.append((f"attention {which}, {shape}", *gb))
    table = pipe_table(("forward and backward, BF16", "analytic GB", "counted GB", "copies GB"), cells)
    by_hand, fused = (moved_bytes(traffic, which) for which in ("by hand", "fused"))
    if not (by_hand and fused):
        return table
    more = fused / traffic["bytes"]["fused"]["analytic"]
    return (
        f"{table}\n\nWith its copies, by hand moves {by_hand / fused:.0f} times the bytes of fused. Fused moves "
        f"{more:.1f} times its least; which kernels move the rest was not counted."
    )


def moved_bytes(traffic: dict, which: str) -> float | None:
    """What a form of attention moves through DRAM, its copies included; None where that was not counted."""
    counts = traffic["bytes"][which]
    return counts["counters"] and counts["counters"] + counts["copies"]


def _step_table(traffic: dict) -> str:
    cells = [
        (script, markdown(kernel["name"]), kernel["launches"], f"{kernel['seconds'] * 1e3:.2f}",
         f"{kernel['bytes'] / 1e9:.2f}", f"{_of_copy(kernel, traffic):.0%}")
        for script, step in traffic["steps"].items() for kernel in _by_words(step)
    ]  # fmt: skip
    return pipe_table(("step", "kernel", "launches", "ms", "GB", "of a copy's bandwidth"), cells, n_left=2)
