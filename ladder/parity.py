"""Do the rows learn the same? Each row trains with several seeds, and is compared seed by seed.

    python -m ladder.parity [--rows 3 4 cold-scales ...] [--seeds 1 2 3] [--output FOLDER] [ARGUMENT ...]

A row is a step by its number, a peer by its name, or a variant by that of its patch. The ARGUMENTs are those
of a step (default: --steps 2000 --heldout-every 100 --seconds 1). A run is a process of its own. A seed gives
all rows the same weights and batches, so they are compared seed by seed: report/parity.py has the statistics.
The same command with its FOLDER finishes an interrupted study, and another one adds rows or seeds to it."""

from collections import Counter
from pathlib import Path

from common.text import OneLineParser, Skip, one_line, positive_int, run_command
from ladder import rows, running
from ladder.patches import variants

DEFAULTS = ["--steps", "2000", "--heldout-every", "100", "--seconds", "1"]


def known_rows() -> dict[str, rows.Planned]:
    """What can be trained on one GPU, by the name that --rows takes: a step's number, or its file's name
    where two have the number, a peer, a patch. Outputs are still empty."""
    scripts, known = rows.scripts(), {}
    steps_with = Counter(map(rows.number_of, scripts))
    for name in scripts:
        number = rows.number_of(name)
        known[str(number) if steps_with[number] == 1 else Path(name).stem] = rows.Planned(name, [], "")
    known |= {Path(name).stem: rows.Planned(name, [], "") for name in rows.peers()}
    for key, head in variants().items():
        known[key] = rows.Planned(f"{head['Script']}.py", [], "", patch=key)
    return known


def rows_of(names: list[str], seeds: list[int], arguments: list[str]) -> list[rows.Planned]:
    """Every row with every seed, one seed after the other: a study that ends early holds whole seeds. Raises
    Skip, one line, for a name of no row."""
    known, planned = known_rows(), []
    for name in names:
        if name not in known:
            raise Skip(f"--rows {one_line(name)}: not one of {', '.join(known)}")
    for seed in dict.fromkeys(seeds):
        for name in dict.fromkeys(names):
            row = known[name]
            label = row.patch or Path(row.script).stem
            words = [*DEFAULTS, *arguments, "--seed", str(seed)]
            output = f"{label}, seed {seed}/{Path(row.script).stem}.json"
            planned.append(row._replace(arguments=words, output=output))
    return planned


def main() -> int:
    parser = OneLineParser(prog="python -m ladder.parity", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=["0", "3", "4"], metavar="NAME", help="default: 0 3 4")
    text = "default: 1 2 3"
    parser.add_argument("--seeds", nargs="+", type=positive_int, default=[1, 2, 3], metavar="N", help=text)
    running.add_options(parser)
    options, arguments = parser.parse_known_args()
    if any(word.split("=")[0] == "--seed" for word in arguments):
        parser.error("--seed is chosen here: give --seeds")
    try:
        planned = rows_of(options.rows, options.seeds, arguments)
        return running.run_study("parity", planned, [*DEFAULTS, *arguments], options)
    except Skip as error:
        parser.error(str(error))


if __name__ == "__main__":
    run_command(main, "python -m ladder.parity")
