"""Do the rows learn the same? Each row trains with several seeds, and is compared seed by seed.

    python -m anatomy.parity [--rows 0 3 4 dead-mlp-all ...] [--seeds 1 2 3] --output FOLDER [ARGUMENT ...]

A row is a step by its number, a peer by its name, or a variant by that of its patch. The ARGUMENTs are those of a step
(default: --steps 1000 --heldout-every 100). A run is a process of its own. A seed gives all rows the same weights and
batches, so they are compared seed by seed: report/parity.py has the statistics. FOLDER gets the study, written after
each run and continued where it exists, and its report.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from anatomy.ablations import ROOT, Runs, variants, write_script
from common.text import OneLineParser, Skip, one_line, positive_int, run_command

DEFAULTS = ["--steps", "1000", "--heldout-every", "100"]


def main() -> int:
    parser = OneLineParser(prog="python -m anatomy.parity", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=["0", "3", "4"], metavar="NAME", help="default: 0 3 4")
    parser.add_argument("--seeds", nargs="+", type=positive_int, default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="of the study, new or continued")
    options, arguments = parser.parse_known_args()
    scripts = {path.name[0]: path for path in sorted(ROOT.glob("[0-9]_*.py"))}
    scripts |= {path.stem: path for path in sorted(ROOT.glob("peers/*.py"))}
    patches = variants()
    if strangers := [row for row in options.rows if row not in scripts and row not in patches]:
        parser.error(f"--rows {one_line(strangers[0])}: not one of {', '.join([*scripts, *patches])}")
    if any(word.split("=")[0] == "--seed" for word in arguments):
        parser.error("--seed is chosen here: give --seeds")
    try:
        runs = Runs("parity", options.output)
        for seed in options.seeds:  # one after the other: a study that ends early holds whole seeds
            for row in options.rows:
                with tempfile.TemporaryDirectory() as folder:
                    script = scripts.get(row) or write_script(row, patches[row]["Script"], Path(folder))
                    name = row if row in patches else script.stem
                    runs.add(f"{name}, seed {seed}", script, [*DEFAULTS, *arguments, "--seed", str(seed)])
    except Skip as error:
        parser.error(str(error))
    return subprocess.run([sys.executable, "-m", "report", options.output.resolve()], cwd=ROOT).returncode


if __name__ == "__main__":
    run_command(main, "python -m anatomy.parity")
