"""What a step's arguments mean on this machine, as JSON: it imports torch, and the process of the ladder does
not.

python -m ladder.facts ARGUMENT ...
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from common import flops, hardware
from common.arguments import Arguments, parse_args
from common.text import run_command, say
from ladder.predict import STEPS, peak_bytes
from ladder.process import ROOT
from ladder.runs import scripts

CPU_FLOPS_PER_S = 1.5e10  # model FLOPs of one core in FP32 with attention by hand, as recorded for `tiny`
LONG_S = 60  # a step


def main() -> None:
    args = parse_args(ROOT / "run_all.sh", None)
    known = [name for name in scripts() if name.removesuffix(".py") in STEPS]
    needed = {
        name: peak_bytes(name.removesuffix(".py"), args.config, args.batch_size) * args.processes
        for name in known
    }
    facts = {
        # The free memory, and with it auto's choice, may change from row to row.
        "pinned": ["--preset", args.preset, "--batch-size", str(args.batch_size)],
        "device_type": args.device.type,
        "device": hardware.device_name(args.device),
        "gpus": torch.cuda.device_count() if args.device.type == "cuda" else 0,
        "workload": asdict(args.workload()),
        "free_bytes": hardware.free_memory_bytes(args.device),
        "needed_bytes": needed,  # of the steps that the predictor knows
        "said": told(args),
    }
    say(json.dumps(facts))


def told(args: Arguments) -> list[str]:
    """What a user should know before the first row: the device, and what to expect of it."""
    device = f"{hardware.device_name(args.device)}, torch {torch.__version__}"
    if args.device.type == "cuda":
        return [f"GPU: {device}"]
    lines = [f"CPU: {device}. This run shows how each step works, and not what it gains on a GPU"]
    if shutil.which("nvidia-smi") or Path("/dev/dxg").exists():
        lines.append(
            "There seems to be an NVIDIA GPU, but this torch cannot use it: is its driver new enough?"
        )
    seconds = flops.flops_per_step(args.config, args.batch_size) / (CPU_FLOPS_PER_S * torch.get_num_threads())
    if seconds > LONG_S:
        whole = seconds * (args.warmup + args.steps) / 60
        lines.append(
            f"A training step of this shape takes about {seconds / 60:.0f} minutes here, "
            f"and a row {whole:,.0f}"
        )
        lines.append("A row ends after 30 minutes (--step-timeout). A smaller shape shows the same")
    return lines


if __name__ == "__main__":
    run_command(main, "run_all.sh")
