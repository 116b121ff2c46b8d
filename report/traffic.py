"""DRAM bytes that the GPU counted, for docs/performance.md: of attention, and of each step's longest kernels."""

from __future__ import annotations

from pathlib import Path

from report.kernels import readable
from report.load import RecordError, read_json
from report.table import markdown, pipe_table


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
        parts += ["## DRAM bytes of attention", _traffic_table(read_traffic(path))]
    for path in sorted(results.glob("*/step-traffic-*.json")):
        name = path.stem.removeprefix("step-traffic-")
        title = f"## DRAM bytes of the longest kernels: {name}, recorded in `{path.parent.name}`"
        parts += [title, *_step_traffic(read_traffic(path))]
    return parts


def _traffic_table(traffic: dict) -> str:
    shape = ", ".join(f"{name} {size}" for name, size in traffic["shape"].items())
    cells = []
    for which, counts in traffic["bytes"].items():
        gb = (f"{counted / 1e9:.2f}" if counted else "-" for counted in (counts["analytic"], counts["counters"]))
        cells.append((f"attention {which}, {shape}", *gb))
    return pipe_table(("forward and backward, BF16", "analytic GB", "counted GB"), cells)


def _step_traffic(traffic: dict) -> list[str]:
    """The kernels of every step that was counted, with their share of a copy's bandwidth."""
    steps, rate = traffic["steps"], traffic["copy_bytes_per_s"]
    cells = [
        (script, markdown(readable(kernel["name"])), kernel["launches"], f"{kernel['seconds'] * 1e3:.2f}",
         f"{kernel['bytes'] / 1e9:.2f}", f"{kernel['bytes'] / kernel['seconds'] / rate:.0%}")
        for script, step in steps.items() for kernel in step["kernels"]
    ]  # fmt: skip
    lines = [
        f"- {script}: the whole step moves {step['bytes'] / 1e9:.1f} GB in {step['seconds'] * 1e3:.1f} ms of kernels, "
        f"{step['bytes'] / step['seconds'] / rate:.0%} of a copy's bandwidth."
        for script, step in steps.items()
    ]
    headers = ("step", "kernel", "launches", "ms", "GB", "of a copy's bandwidth")
    return [pipe_table(headers, cells, n_left=2), "\n".join(map(markdown, lines))]
