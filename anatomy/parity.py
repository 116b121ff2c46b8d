"""Do the rows learn the same? Each row trains with several seeds, and is compared with the first one.

    python -m anatomy.parity [--rows 0 3 4 dead-mlp-all ...] [--seeds 1 2 3] --output FILE [ARGUMENT ...]

A row is a step by its number, a peer by its name, or a variant by that of its patch. The ARGUMENTs are those of a step
(default: --steps 1000 --heldout-every 100). A run is a process of its own; FILE is a study, written after each, and
continued where it exists. Compared are the held-out loss at the end and the mean of the first training losses:

- A seed gives all rows the same weights and batches, so the differences d_1 ... d_n to the first row are paired. Their
  95 % interval is mean(d) +- t(0.975, n - 1) s / sqrt(n), where s is their standard deviation and t Student's (section
  1.3.5.2 of NIST/SEMATECH's e-Handbook of Statistical Methods). A difference is seen where it does not hold zero.
- The smallest difference that such a study sees in 8 of 10 cases is (t(0.975, n - 1) + t(0.8, n - 1)) s / sqrt(n):
  section 7.2.2.2, solved for the difference. Where none is seen, this could have been there.
- Seconds until the highest loss that a run of the first row ends with, rounded up to 0.1 nats.
"""

import functools
import math
import tempfile
from pathlib import Path

import numpy as np

from anatomy.ablations import ROOT, Runs, variants, write_script
from common.text import OneLineParser, Skip, aligned, one_line, positive_int, run_command, say

FIRST = 50  # training losses: later, rows that round otherwise drift apart
DEFAULTS = {"--steps": "1000", "--heldout-every": "100"}
MEASURES = {"held-out": lambda row: row["heldout"][-1][1], "first": lambda row: float(np.mean(row["loss"][:FIRST]))}


@functools.cache
def t_quantile(p: float, v: int) -> float:
    """The p-quantile of Student's t with v degrees of freedom, whose density at sqrt(v) tan(x) is as cos(x)^(v - 1)."""
    x = np.linspace(-np.pi / 2, np.pi / 2, 400_001)
    mass = np.cumsum(np.cos(x) ** (v - 1))
    return math.sqrt(v) * math.tan(np.interp(p, mass / mass[-1], x))


def interval(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean, half of the 95 % interval, and the smallest difference seen in 8 of 10 cases. Needs two of them."""
    n = len(differences)
    error, t = differences.std(ddof=1) / math.sqrt(n), t_quantile(0.975, n - 1)
    return differences.mean(), t * error, (t + t_quantile(0.8, n - 1)) * error


def seconds_to(target: float, row: dict) -> float:
    """Seconds of training until a held-out loss is reached, by steps between two evaluations; NaN where it is not."""
    steps, nats = np.array(row["heldout"], dtype=float).T
    below = np.flatnonzero(nats <= target)
    if not len(below):
        return math.nan
    pair = slice(max(0, below[0] - 1), below[0] + 1)
    return np.interp(target, nats[pair][::-1], steps[pair][::-1]) * np.median(row["step_ms"]) / 1e3


def table(runs: Runs) -> str:
    """A line for each row with what is ok in the study; the first one is what the others are compared with."""
    rows: dict[str, dict[int, dict]] = {}
    for name, run in runs.by_name.items():
        if runs.row(name)["status"] == "ok" and runs.row(name)["heldout"]:
            rows.setdefault(name.rpartition(", seed ")[0], {})[run["workload"]["seed"]] = runs.row(name)
    if not rows:
        return "No run is ok and has a held-out loss."
    first, lines = next(iter(rows.values())), []
    target = math.ceil(10 * max(map(MEASURES["held-out"], first.values()))) / 10
    for name, by_seed in rows.items():
        line = {"row": name, "seeds": str(len(by_seed))}
        for measure, of in MEASURES.items():
            differences = np.array([of(row) - of(first[seed]) for seed, row in by_seed.items() if seed in first])
            cells = ["-"] * 3
            if by_seed is not first and len(differences) > 1:
                mean, reach, smallest = interval(differences)
                cells = [f"{mean:+.4f} +- {reach:.4f}", "yes" if abs(mean) > reach else "no", f"{smallest:.4f}"]
            cells.insert(0, f"{np.mean([of(row) for row in by_seed.values()]):.4f}")
            for what, cell in zip(("loss", "difference", "seen", "could see"), cells, strict=True):
                line[f"{measure}: {what}"] = cell
        seconds = np.mean([seconds_to(target, row) for row in by_seed.values()])
        lines.append(line | {f"s to {target:g}": "-" if math.isnan(seconds) else f"{seconds:.1f}"})
    return aligned(lines)


def main() -> int:
    parser = OneLineParser(prog="python -m anatomy.parity", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=["0", "3", "4"], metavar="NAME", help="default: 0 3 4")
    parser.add_argument("--seeds", nargs="+", type=positive_int, default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the study, written or continued")
    options, arguments = parser.parse_known_args()
    scripts = {path.name[0]: path for path in sorted(ROOT.glob("[0-9]_*.py"))}
    scripts |= {path.stem: path for path in sorted(ROOT.glob("peers/*.py"))}
    patches = variants()
    if strangers := [row for row in options.rows if row not in scripts and row not in patches]:
        parser.error(f"--rows {one_line(strangers[0])}: not one of {', '.join([*scripts, *patches])}")
    arguments += [word for pair in DEFAULTS.items() if pair[0] not in arguments for word in pair]
    try:
        runs = Runs("parity", options.output)
        for seed in options.seeds:  # one after the other: a study that ends early holds whole seeds
            for row in options.rows:
                with tempfile.TemporaryDirectory() as folder:
                    script = scripts.get(row) or write_script(row, patches[row]["Script"], Path(folder))
                    name = row if row in patches else script.stem
                    runs.add(f"{name}, seed {seed}", script, [*arguments, "--seed", str(seed)])
    except Skip as error:
        parser.error(str(error))
    say(table(runs))
    return int(any(runs.row(name)["status"] not in ("ok", "skipped") for name in runs.by_name))


if __name__ == "__main__":
    run_command(main, "python -m anatomy.parity")
