"""Two processes train as one that takes both batches: with DDP and FSDP2, over gloo, and with micro-batches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import COMPILED, CPU_STEPS, ROOT, arguments, built, trace_only

from common import arguments as command_line
from common import benchmark, cuda_graph, hardware, parallel
from common.errors import Skip

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
SHAPE = {"config": COMPILED, "steps": 3, "warmup": 1}
CASES = [(step, how, 1, False) for step in CPU_STEPS[:3] for how in ("ddp", "fsdp")]  # accumulate, checkpoint
CASES += [(CPU_STEPS[0], "ddp", 2, True), (CPU_STEPS[3], "ddp", 1, False), (CPU_STEPS[3], "fsdp", 2, True)]
DRIVER = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import test_parallel
test_parallel.train_in_processes(sys.argv[1])
"""


def trained(step, patch, **overrides):
    """Losses of three steps, the held-out loss, and the weights after them."""
    trace_only(patch)
    run = built(step, patch, **SHAPE, **overrides)
    losses = [run.train_step(*batch).item() for batch in run.batches[:3]]
    weights = [getattr(p.detach(), "full_tensor", p.detach)() for p in run.model.parameters()]
    return losses, benchmark.heldout_loss(run.model, run.args), torch.cat([w.flatten() for w in weights])


def train_in_processes(output):
    """What each of torchrun's processes runs: every case in turn; the first one writes what came of them."""
    import conftest

    conftest.scratch.append(Path(output).parent)
    world, results = hardware.world(), {}
    args = {"world": world, "batch_size": 2}
    parallel.start(arguments(CPU_STEPS[0], parallel="ddp", **SHAPE, **args))
    for case in CASES:
        step, how, accumulate, checkpoint = case
        choices = {"parallel": how, "accumulate": accumulate, "checkpoint": checkpoint}
        losses, heldout, weights = trained(step, pytest.MonkeyPatch(), **choices, **args)
        given = arguments(step, parallel=how, **args)
        largest = parallel.largest([world.rank, -world.rank], given)
        results[case] = parallel.mean(losses, given), heldout, weights, largest
    if world.rank == 0:
        torch.save(results, output)
    parallel.leave(0, given)


def test_two_processes_train_as_one_with_both_batches(tmp_path, monkeypatch):
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [*TORCHRUN, "--nproc-per-node", "2", str(tmp_path / "driver.py"), str(tmp_path / "out.pt")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-3000:]
    results = torch.load(tmp_path / "out.pt")
    alone = {step: trained(step, monkeypatch, batch_size=4) for step in CPU_STEPS}
    for case, (losses, heldout, weights, largest) in results.items():
        expected = alone[case[0]]
        assert losses == pytest.approx(expected[0], rel=1e-5), case
        assert heldout == pytest.approx(expected[1], rel=1e-5), case
        torch.testing.assert_close(weights, expected[2], rtol=1e-3, atol=1e-5, msg=str(case))
        assert largest == [1.0, 0.0]


def test_of_several_processes_each_has_its_gpu_and_its_share_of_the_batch(monkeypatch, refused):
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    words = ["--device", "cpu", "--n-layer", "1", "--seq-len", "32", "--global-batch-size", "8"]
    args = command_line.parse_args(ROOT / "x.py", None, words)
    assert (args.batch_size, args.parallel, args.world.nodes) == (2, "ddp", 2)
    assert (args.batch_starts() == args.starts_of_all()[:, 2:4]).all() and args.starts_of_all().shape[1] == 8
    assert args.workload().gpus == 4 and args.workload().batch_size == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command_line, "FIRST_SAYS_S", 0)
    for count, more, said in (
        (1, ["--device", "cuda"], "2 processes need as many GPUs, but torch sees 1"),
        (2, ["--device", "cuda:0"], "each process has its own"),
        (2, ["--global-batch-size", "6"], "--global-batch-size 6 is not divisible by 4 processes"),
        (2, ["--accumulate", "3"], "a batch of 2 is not divisible by --accumulate 3"),
        (2, ["--batch-size", "3"], "exclude each other"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert said in refused(command_line.parse_args, ROOT / "x.py", None, [*words, *more])


def test_a_step_of_several_processes_is_launched_and_a_script_that_does_not_divide_it_is_skipped():
    args = arguments(CPU_STEPS[3], device="cuda", world=hardware.World(0, 2, 0, 2), parallel="ddp")
    optimizer = torch.optim.AdamW([torch.ones(2, requires_grad=True)])
    assert cuda_graph.capture(print, optimizer, args).reason.startswith("launched, not captured: ")
    with pytest.raises(Skip, match="does not divide its work"):
        benchmark.run(print, torch.nn.Identity(), args)


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_pytorch_cuts_a_compiled_model_at_ddps_buckets_however_it_is_wrapped(tmp_path):
    """docs/guide.md and docs/not-faster.md say so."""

    def graphs(around, cut=True):
        found = []
        compiled = {"backend": lambda graph, _: found.append(graph) or graph.forward}
        model = Layers()
        if not around:
            model.compile(**compiled)
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2)
        if around:
            model.compile(**compiled)
        with torch._dynamo.config.patch(optimize_ddp=cut):
            model(torch.randn(4, 512))
        torch._dynamo.reset()
        return len(found)

    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert graphs(around=True) == graphs(around=False) > 1 == graphs(around=False, cut=False)
    finally:
        torch.distributed.destroy_process_group()
