"""How many bytes does attention move through DRAM, by hand and fused?

    python -m anatomy.attention_traffic [--shape B H T D] [--output FILE]

The program runs forward and backward in BF16. Nsight Compute (ncu) counts the bytes with the GPU's own counters, where
it may read them. The table also has the least bytes that the kernels must move, which is arithmetic.
"""

import argparse
import csv
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import hardware
from common.errors import run_command
from common.record import check_writable, write_json
from common.text import OneLineParser, aligned, one_line, positive_int, say
from ladder.process import module_command

COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


def attention_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention as scores, mask, softmax and product; all (B, H, T, D)."""
    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(diagonal=1)
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v


def attention_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same function as one fused kernel, which is cuDNN's where that runs."""
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTIONS = {"by hand": attention_by_hand, "fused": attention_fused}


def analytic_attention_bytes(
    which: str, B: int, H: int, T: int, D: int, itemsize: int = 2, autocast: bool = True
) -> int:
    """The least bytes of forward and backward: each kernel reads its inputs and writes its output once.

    By hand, a pass moves one (B, H, T, T) tensor of 2-byte numbers; an FP32 tensor counts as two. Under autocast the
    forward passes are: scores 1, scale 2, mask 4 (masked_fill copies first), cast to FP32 3, softmax 4, cast back 3,
    product 1. The backward passes are: products 4, casts 6, softmax 6, mask 4, scale 2. Without autocast there are no
    casts; all numbers have one dtype, and softmax takes 2 passes forward and 3 backward.
    Fused attention moves q, k, v, o forward and q, k, v, o, do, dq, dk, dv backward. By hand moves these as well.
    """
    head_tensor, score_tensor = itemsize * B * H * T * D, itemsize * B * H * T * T
    passes = 40 if autocast else 23
    return 12 * head_tensor + (passes * score_tensor if which == "by hand" else 0)


def count_attention_bytes(which: str, shape: tuple[int, int, int, int]) -> int:
    """The DRAM bytes that the GPU counts in one forward and backward. Raises OSError where it cannot be read."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise OSError("Nsight Compute (ncu) is not installed")
    worker = module_command("anatomy.attention_traffic", "--count", which, "--shape", *map(str, shape))
    counting = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--metrics", ",".join(COUNTERS)]
    done = subprocess.run([*counting, *worker], capture_output=True, text=True, timeout=600)
    rows = csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"'))
    units = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    counts = [row for row in rows if row["Metric Name"] in COUNTERS]
    if not counts:
        errors = [line for line in (done.stdout + done.stderr).splitlines() if "ERR" in line or "rror" in line]
        raise OSError(errors[0].strip("= ") if errors else f"ncu ended with exit code {done.returncode}, no counters")
    return round(sum(float(row["Metric Value"].replace(",", "")) * units[row["Metric Unit"]] for row in counts))


def run_attention(which: str, shape: tuple[int, int, int, int], device: torch.device) -> None:
    """Run forward and backward under BF16 autocast: first to warm up, then while the profiler counts."""
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    upstream_gradient = torch.ones_like(q)

    def forward_backward():
        with torch.autocast(device.type, torch.bfloat16):
            y = ATTENTIONS[which](q, k, v)
        torch.autograd.grad(y, (q, k, v), upstream_gradient)

    forward_backward()
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaProfilerStart()
    forward_backward()
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaProfilerStop()


def count_both(shape: tuple[int, int, int, int]) -> tuple[dict[str, dict], str | None]:
    """Form of attention -> its analytic and its counted bytes; and one line where these could not be counted."""
    figures, reason = {}, None
    for which in ATTENTIONS:
        figures[which] = {"analytic": analytic_attention_bytes(which, *shape), "counters": None}
        try:
            figures[which]["counters"] = count_attention_bytes(which, shape)
        except (OSError, subprocess.SubprocessError) as error:
            reason = f"The DRAM counters could not be read: {one_line(error)}."
    return figures, reason


def traffic_rows(pairs: dict[str, tuple[int, int | None]]) -> list[dict[str, str]]:
    """Rows of a table, from form of attention -> analytic and counted bytes."""
    shown = {which: [f"{n / 1e9:.2f}" if n else "-" for n in pair] for which, pair in pairs.items()}
    return [{"attention": which, "least GB": least, "counted GB": counted} for which, (least, counted) in shown.items()]


def main() -> None:
    parser = OneLineParser(prog="python -m anatomy.attention_traffic", description=__doc__)
    parser.add_argument("--shape", type=positive_int, nargs=4, default=(8, 16, 2048, 128), metavar=("B", "H", "T", "D"))
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--count", choices=ATTENTIONS, help=argparse.SUPPRESS)  # for the process that ncu starts
    args = parser.parse_args()
    if args.count:
        return run_attention(args.count, tuple(args.shape), torch.device("cuda"))
    try:
        if args.output:
            check_writable(args.output, "bytes")
    except ValueError as error:
        parser.error(str(error))
    figures, reason = count_both(tuple(args.shape))
    say(aligned(traffic_rows({which: tuple(counts.values()) for which, counts in figures.items()})))
    if reason:
        say(reason)
    if args.output:
        record = {"shape": dict(zip("BHTD", args.shape, strict=True)), "bytes": figures, "reason": reason}
        environment = hardware.describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        write_json(args.output, record | {"environment": asdict(environment)})


if __name__ == "__main__":
    run_command(main, "python -m anatomy.attention_traffic")
