"""How many bytes go through DRAM: of attention by hand and fused, and of a training step?

Prediction. Attention moves the bytes that attention.py counts: 46 passes over the scores by hand, 12 over q fused. A
training step moves at least its products' operands in 2 bytes each, and 28 bytes a parameter for AdamW.

Nsight Compute (ncu) counts with the GPU's own counters in one launched step, but not the driver's own copies:
    python -m anatomy.traffic [--json FILE] [ARGUMENT ...], with the ARGUMENTs of a step.
"""

import csv
import functools
import importlib
import subprocess
import sys

import torch

from anatomy.attention import by_hand, forward_backward, fused
from anatomy.lab import Lab, add_options
from common import flops, hardware
from common.arguments import parse_args
from common.record import write_json
from common.text import OneLineParser, one_line, run_command, say

ROOT, ATTENTIONS, SHAPE = hardware.ROOT, {"by hand": by_hand, "fused": fused}, (8, 16, 2048, 128)  # B, H, T, D
STEPS = sorted(path.stem for path in ROOT.glob("[0-9]_*.py"))
NCU = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none", "--csv"]
NCU += ["--print-units", "base", "--metrics", "dram__bytes_read.sum,dram__bytes_write.sum"]


def run_one(name, words):
    """Run attention forward and backward, or a training step: to warm up, and once while the profiler counts."""
    if name in ATTENTIONS:
        call = forward_backward(ATTENTIONS[name], SHAPE, torch.bfloat16, torch.device("cuda"))
    else:
        args = parse_args(ROOT / f"{name}.py", None, [*words, "--no-capture"])
        train_step, _ = importlib.import_module(name).main(args)
        call = functools.partial(train_step, *args.batches()[0])
    for _ in range(3):  # warm-up
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def total_bytes(text):
    """Over the kernels of ncu's CSV, which has a line for each kernel and metric."""
    lines = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    return sum(float(line["Metric Value"].replace(",", "")) for line in lines if line["Metric Unit"] == "byte")


def count(lab, name, words, predicted):
    """Add a row of what this command, with `--count NAME`, moves while it profiles."""
    command = [*NCU, sys.executable, "-m", "anatomy.traffic", "--count", name, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line or "ERR" in line]
    why = one_line(errors[-1] if errors else f"no counters, exit code {done.returncode}", 80)
    lab.row(name, total_bytes(done.stdout) or why, predicted, "B")


def main():
    parser = OneLineParser(prog="python -m anatomy.traffic", description=__doc__)
    add_options(parser)
    parser.add_argument("--count", choices=[*ATTENTIONS, *STEPS], help="what runs once while ncu counts")
    options, words = parser.parse_known_args()
    if options.device == "cpu" or options.quick or options.iters or not torch.cuda.is_available():
        parser.error("it needs a GPU and Nsight Compute (ncu), and takes no --device cpu, --quick or --iters")
    if options.count:
        return run_one(options.count, words)
    lab, args, (B, H, T, D) = Lab("traffic", options), parse_args(ROOT / "anatomy/traffic.py", None, words), SHAPE
    lab.title = f"Attention, forward and backward, B {B}, H {H}, T {T}, D {D}, BF16"
    for name, passes in zip(ATTENTIONS, (46, 0), strict=True):
        count(lab, name, [], 2 * B * H * T * (12 * D + passes * T))
    lab.title = "A training step"
    products = flops.matrix_products(args.config, args.batch_size * args.config.seq_len).items()
    least = sum(2 * n * (a * b + a * c + b * c) for (a, b, c), n in products) + 28 * flops.parameters(args.config)
    for name in STEPS:
        count(lab, name, words, least)
    say(lab.tables())
    if options.json:
        write_json(options.json, lab.record(__doc__.partition("\n")[0], ""))


if __name__ == "__main__":
    run_command(main, "python -m anatomy.traffic")
