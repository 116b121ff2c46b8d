"""What the ladder needs to know of its arguments, as JSON: checked once, before any row, in a process with torch.

python -m ladder.check ARGUMENT ...
"""

from __future__ import annotations

if __name__ == "__main__":
    from common.errors import needs

    needs("torch", "numpy")

import json
import os
import sys
from dataclasses import asdict
from functools import partial

import torch

from common import flops, hardware
from common.arguments import ROOT, parse_args
from common.errors import run_command


def main() -> None:
    """Print notes, what is pinned for every row, the workload, and the memory that a row needs and the host has.

    Exits with code 2 and one line for more processes than a CPU has cores.
    """
    args = parse_args(ROOT / "run_all.sh", "Runs the five steps and tabulates them.")
    cores = os.cpu_count() or 1
    if args.device.type == "cpu" and args.world.size > cores:
        sys.stderr.write(f"run_all.sh: error: --gpus: a CPU runs at most one process a core, here {cores}\n")
        sys.exit(2)
    pinned = ["--preset", args.base_preset] if args.notes else []
    if args.notes and not any(word.startswith("--global-batch-size") for word in sys.argv):
        pinned += ["--batch-size", str(args.batch_size)]
    if args.text.path:  # a file that grows during the run gives every row the same tokens
        pinned += ["--data-tokens", str(len(args.text.tokens))]
    peak = partial(flops.unfused_peak_bytes, args.config, args.batch_size, args.accumulate, args.checkpoint)
    facts = {
        "notes": args.notes,
        "pinned": pinned,
        "device_type": args.device.type,
        "device": hardware.device_name(args.device),
        "gpus": torch.cuda.device_count() if args.device.type == "cuda" else 0,
        "workload": asdict(args.workload()),
        "free_bytes": hardware.free_memory_bytes(args.device),
        "by_hand_bytes": peak(),
        "fused_bytes": peak(scores=False),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    run_command(main, "run_all.sh")
