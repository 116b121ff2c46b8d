"""Do the rows learn the same? Each row trains with several seeds, and is compared seed by seed.

    python -m anatomy.parity [--rows 0 3 4 dead-mlp-all ...] [--seeds 1 2 3] --output FOLDER [ARGUMENT ...]

A row is a step by its number, a peer by its name, or a variant by that of its patch. The ARGUMENTs are those
of a step (default: --steps 1000 --heldout-every 100). A run is a process of its own. A seed gives all rows
the same weights and batches, so they are compared seed by seed: report/parity.py has the statistics. FOLDER
gets the study, written after each run and continued where it exists, and its report.
"""

import sys
from pathlib import Path

from common.text import OneLineParser, Skip, one_line, portable_command, positive_int, run_command
from ladder import runs
from ladder.patches import variants
from ladder.process import ROOT
from ladder.running import run_study

DEFAULTS = ["--steps", "1000", "--heldout-every", "100"]


def known_rows() -> dict[str, runs.Planned]:
    """What can be trained, by the name that --rows takes: a step's number, a peer, a patch. Outputs are still
    empty."""
    steps = {name.partition("_")[0]: runs.Planned(name, [], "") for name in runs.scripts()}
    peers = {
        path.stem: runs.Planned(f"peers/{path.name}", [], "") for path in sorted(ROOT.glob("peers/*.py"))
    }
    patched = {key: runs.Planned(f"{its['Script']}.py", [], "", patch=key) for key, its in variants().items()}
    return steps | peers | patched


def rows_of(names: list[str], seeds: list[int], arguments: list[str]) -> list[runs.Planned]:
    """Every row with every seed, one seed after the other: a study that ends early holds whole seeds."""
    known, rows = known_rows(), []
    for seed in seeds:
        for name in names:
            row = known[name]
            label = row.patch or Path(row.script).stem
            words = [*DEFAULTS, *arguments, "--seed", str(seed)]
            output = f"{label}, seed {seed}/{Path(row.script).stem}.json"
            rows.append(row._replace(arguments=words, output=output))
    return rows


def main() -> int:
    parser = OneLineParser(prog="python -m anatomy.parity", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=["0", "3", "4"], metavar="NAME", help="default: 0 3 4")
    parser.add_argument(
        "--seeds", nargs="+", type=positive_int, default=[1, 2, 3], metavar="N", help="default: 1 2 3"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="of the study, new or continued"
    )
    parser.add_argument(
        "--step-timeout", type=positive_int, metavar="S", help="seconds for a row (default: 1800)"
    )
    options, arguments = parser.parse_known_args()
    known = known_rows()
    if strangers := [row for row in options.rows if row not in known]:
        parser.error(f"--rows {one_line(strangers[0])}: not one of {', '.join(known)}")
    if any(word.split("=")[0] == "--seed" for word in arguments):
        parser.error("--seed is chosen here: give --seeds")
    command = portable_command("python -m anatomy.parity --output parity", sys.argv[1:])
    rows = rows_of(options.rows, options.seeds, arguments)
    try:
        return run_study(
            "parity", rows, [*DEFAULTS, *arguments], options.output, command, options.step_timeout
        )
    except Skip as error:
        parser.error(str(error))


if __name__ == "__main__":
    run_command(main, "python -m anatomy.parity")
