"""Two runs beside each other: two machines, two versions, or two shapes."""

from __future__ import annotations

from pathlib import Path

from tabulate import tabulate

from common.analysis import is_timed, median_ms, quartiles_ms, why_untimed
from common.record import RecordError, empty_step_record

SHAPE_FIELDS = (
    "preset", "n_layer", "n_head", "n_embd", "seq_len", "vocab_size", "batch_size", "parameters", "tokens_per_step",
    "flops_per_step", "lr",
)  # fmt: skip
# What may differ while a median still means the same: how many steps were timed, and where the text came from.
HARMLESS_FIELDS = ("warmup", "steps", "data")


def compare(a: dict, b: dict, names: tuple[str, str]) -> str:
    """Text of the ratios of two envelopes, step by step.

    The same workload: times, with the ratio that the quartiles allow at least and at most. Two shapes: speedups
    over the first row that both have, because times of different work say nothing about each other. Raises
    RecordError where neither can be compared.
    """
    ours, theirs = a["workload"], b["workload"]
    differing = sorted(field for field in ours.keys() | theirs.keys() if ours.get(field) != theirs.get(field))
    serious = [field for field in differing if field not in HARMLESS_FIELDS]
    other = [field for field in serious if field not in SHAPE_FIELDS]
    if other:
        raise RecordError(f"{names[0]} and {names[1]} ran different workloads: {', '.join(other)} differ")
    pairs = _pairs(a, b)
    if not any(map(_both_timed, pairs)):
        raise RecordError(f"{names[0]} and {names[1]} have no step in common that has a time in both")
    lines = [f"{letter}: {_describe(run, name)}" for letter, run, name in (("A", a, names[0]), ("B", b, names[1]))]
    if serious:
        lines += [f"The shapes differ ({', '.join(serious)}): speedups are compared, times are not.", ""]
        return "\n".join([*lines, _speedup_table(pairs)])
    if differing:
        lines.append(f"Both ran the same work, but {', '.join(differing)} differ.")
    return "\n".join(
        [
            *lines,
            "",
            _time_table(pairs),
            "",
            "A / B above 1: B is faster. The range takes the quartiles against each other.",
        ]
    )


def _pairs(a: dict, b: dict) -> list[tuple[dict, dict]]:
    """The rows of both runs by name; a row that only one has gets a counterpart that says so."""
    rows_a, rows_b = ({row["step"]: row for row in [*run["steps"], *run["peers"]]} for run in (a, b))
    names = rows_a | rows_b
    return [(rows_a.get(name) or _missing(name, "A"), rows_b.get(name) or _missing(name, "B")) for name in names]


def _missing(name: str, where: str) -> dict:
    return empty_step_record(name, None) | {"status": "absent", "reason": f"not in {where}"}


def _both_timed(pair: tuple[dict, dict]) -> bool:
    return all(map(is_timed, pair))


def _describe(run: dict, name: str) -> str:
    environment = run["environment"]
    commit = (environment.get("commit") or "unknown")[:10]
    return f"{name}: {environment.get('device')}, torch {environment.get('torch')}, commit {commit}"


def _time_table(pairs: list[tuple[dict, dict]]) -> str:
    rows = []
    for x, y in pairs:
        if not (is_timed(x) and is_timed(y)):
            rows.append([x["step"], *_cells(x), *_cells(y), "-", "-"])
            continue
        (low_x, high_x), (low_y, high_y) = quartiles_ms(x), quartiles_ms(y)
        ratio = f"{median_ms(x) / median_ms(y):.3f}"
        rows.append([x["step"], *_cells(x), *_cells(y), ratio, f"{low_x / high_y:.3f} to {high_x / low_y:.3f}"])
    return _drawn(rows, ["step", "A ms", "B ms", "A / B", "range"])


def _cells(row: dict) -> list[str]:
    return [f"{median_ms(row):.1f}" if is_timed(row) else why_untimed(row)]


def _speedup_table(pairs: list[tuple[dict, dict]]) -> str:
    first_a, first_b = next(filter(_both_timed, pairs))
    rows = []
    for x, y in pairs:
        speedups = [
            median_ms(first) / median_ms(row) if is_timed(row) else None for first, row in ((first_a, x), (first_b, y))
        ]
        said = [f"{s:.2f}x" if s else why_untimed(row) for s, row in zip(speedups, (x, y), strict=True)]
        rates = [f"{row['model_flops_per_s'] / 1e12:,.4g}" if is_timed(row) else "-" for row in (x, y)]
        rows.append([x["step"], *said, f"{speedups[1] / speedups[0]:.3f}" if all(speedups) else "-", *rates])
    said = f"Speedups are over {first_a['step']}, the first row that has a time in both.\n\n"
    return said + _drawn(rows, ["step", "A speedup", "B speedup", "B / A", "A TFLOP/s", "B TFLOP/s"])


def _drawn(rows: list[list[str]], headers: list[str]) -> str:
    align = ["left", *["right"] * (len(headers) - 1)]
    return tabulate(rows, headers, disable_numparse=True, colalign=align)


def names_of(folders: tuple[Path, Path]) -> tuple[str, str]:
    """What to call two run folders: their own names, or with their parents' where those are equal."""
    a, b = (folder.resolve() for folder in folders)
    return (a.name, b.name) if a.name != b.name else (f"{a.parent.name}/{a.name}", f"{b.parent.name}/{b.name}")
