"""Two processes train as one that takes both batches, also after a rehearsal: with DDP and FSDP2, over
gloo."""

import os
import sys

import pytest
import torch
from conftest import CPU_STEPS, ROOT, built, run_python
from test_row import rehearsed

from common import parallel
from common.record import Row

TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
HOW = ("ddp", "fsdp")
# The compiled step both ways, and what comes before it, which shares its parallel code, one way each.
CASES = [(step, HOW[k % 2]) for k, step in enumerate(CPU_STEPS[:-1])] + [(CPU_STEPS[-1], how) for how in HOW]
DRIVER = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import test_parallel
test_parallel.train_in_processes(sys.argv[1])
"""


def trained(step, **overrides):
    """Losses of three steps, and the weights after them."""
    run = built(step, steps=3, **overrides)
    return train(run), weights(run)


def train(run):
    return [run.train_step(*batch).item() for batch in run.batches[:3]]


def weights(run):
    whole = [getattr(p.detach(), "full_tensor", p.detach)() for p in run.model.parameters()]
    return torch.cat([weight.flatten() for weight in whole])


def trained_after_a_rehearsal(step, **overrides):
    """The same of a model that was rehearsed and put back."""
    run = built(step, steps=3, **overrides)
    assert rehearsed(run, Row(step)).train_step is run.train_step
    return train(run), weights(run)


def train_in_processes(output):
    """What each of torchrun's processes runs: every case in turn; the first one writes what came of them."""
    import conftest

    rank, results = int(os.environ["RANK"]), {}
    place = {"rank": rank, "processes": int(os.environ["WORLD_SIZE"])}
    parallel.start(conftest.arguments(CPU_STEPS[0], parallel="ddp", **place))
    for step, how in CASES:
        losses, whole = trained(step, parallel=how, **place)
        again, whole_again = trained_after_a_rehearsal(step, parallel=how, **place)
        largest = parallel.across([rank, -rank], "max")
        same = again == losses and torch.equal(whole, whole_again)
        results[step, how] = parallel.across(losses, "avg"), whole, largest, same
    if rank == 0:
        torch.save(results, output)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_as_one_with_both_batches(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    words = ["--nproc-per-node", "2", tmp_path / "driver.py", tmp_path / "out.pt"]
    ran = run_python(*TORCHRUN, *words, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=500)
    assert ran.returncode == 0, ran.stderr[-3000:]
    results = torch.load(tmp_path / "out.pt")
    alone = {step: trained(step, batch_size=4) for step in CPU_STEPS}
    for (step, how), (losses, whole, largest, same) in results.items():
        assert losses == pytest.approx(alone[step][0], rel=1e-5), (step, how)
        torch.testing.assert_close(whole, alone[step][1], rtol=1e-3, atol=1e-4, msg=f"{step} {how}")
        assert largest == [1.0, 0.0]
        assert same, f"{step} {how}: a rehearsal changed the losses or the weights"


def test_a_script_on_a_cpu_starts_again_with_threads_that_sleep(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for device in ("cuda", "cpu", "cpu"):
        parallel.wait_passively(torch.device(device))
    ((program, words),) = started
    assert words[0] == program and words[1:] == sys.orig_argv[1:]
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.delenv("OMP_WAIT_POLICY")
