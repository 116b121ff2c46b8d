"""The order of a row: the rehearsal leaves weights and optimizer as they were, a capture is replayed on the
batch that it is given, and what is timed are training steps one after the other."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import CPU_STEPS, STEPS, arguments, built, load_step

from common import benchmark, clock
from common.benchmark import Training
from common.kernels import categorize
from common.profile import _covered_ms, _exposed_ms, one_block
from common.record import Kernel, Row
from common.text import Skip

HOW = {"fused": {"fused": True}, "foreach": {"foreach": True}, "one by one": {"foreach": False}}


def addresses(optimizer):
    states = [state for states in optimizer.state.values() for state in states.values()]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [tensor.data_ptr() for tensor in (*weights, *states) if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("name", HOW)
def test_weights_come_back_in_place_and_the_optimizer_forgets(name):
    def train():
        for k in range(3):
            (weight.sin().sum() * (k + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach().clone()

    weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))
    before, optimizer = weight.detach().clone(), torch.optim.AdamW([weight], lr=0.1, **HOW[name])
    initial = benchmark.InitialState(torch.nn.Module(), optimizer)
    trained, places = train(), addresses(optimizer)
    assert not torch.equal(trained, before)
    initial.restore()
    assert torch.equal(weight, before) and addresses(optimizer) == places
    assert not any(state.any() for state in optimizer.state[weight].values())
    assert torch.equal(train(), trained), "it trains again as it did at first"


def rehearsed(run, row):
    """The training of a step whose rehearsal was undone."""
    training, initial = (
        Training(run.train_step, run.batches),
        benchmark.InitialState(run.model, run.optimizer),
    )
    benchmark.rehearse(training, [run.capture] if run.capture else [], run.args, row)
    row.rehearsed = len(training.losses)
    initial.restore()
    training.losses.clear()
    return training


@pytest.mark.parametrize("step", CPU_STEPS)
def test_losses_after_a_rehearsal_are_bitwise_those_without_one(step):
    run, again, row = built(step), built(step), Row(step)
    losses = [run.train_step(*batch).item() for batch in run.batches]
    training = rehearsed(again, row)
    for _ in again.batches:
        training.step()
    assert [loss.item() for loss in training.losses] == losses and losses[-1] < losses[0]
    assert (row.rehearsed, row.note, row.settings.captured) == (again.args.warmup, None, None)


def test_cold_the_launched_steps_are_training_steps():
    warm, cold = Row(STEPS[2]), Row(STEPS[2])
    for row, how in ((warm, False), (cold, True)):
        benchmark.measure_row(load_step(STEPS[2]).main, arguments(STEPS[2], cold=how), row)
    assert warm.loss == cold.loss and len(cold.loss) == 6
    assert (warm.rehearsed, cold.rehearsed) == (2, 0)
    assert "--cold" in cold.note and "--cold" not in (warm.note or "")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"parallel": "ddp"}, None),
        ({"parallel": "fsdp"}, "launched, not captured: FSDP2 allocates pinned memory"),
        ({"capture": False}, "launched, not captured: --no-capture"),
    ],
)
def test_what_is_not_captured_has_its_reason(given, reason):
    told = benchmark.why_launched(arguments(STEPS[3], **given))
    assert told is None if reason is None else told.startswith(reason)


@pytest.fixture
def graph(monkeypatch):
    """In place of a torch.cuda.CUDAGraph: the step is captured by running it once."""
    graph = SimpleNamespace(replay=None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    return graph


@pytest.mark.parametrize("step", STEPS[3:4])
def test_a_replay_reads_the_batch_that_it_is_given_and_returns_a_loss_of_its_own(step, graph):
    run, read = built(step), []
    first, second = run.batches[:2]
    forward = run.model.forward
    run.model.forward = lambda tokens, targets: read.append((tokens, targets)) or forward(tokens, targets)
    replay = run.capture(*first)
    ((tokens, targets),) = read
    assert torch.equal(tokens, first[0]) and tokens.data_ptr() != first[0].data_ptr(), (
        "memory of the graph's own"
    )
    seen = []
    graph.replay = lambda: seen.append((tokens.clone(), targets.clone()))
    losses = [replay(*second) for _ in range(2)]
    assert all(torch.equal(a, b) for pair in seen for a, b in zip(pair, second, strict=True)), (
        "copied before the replay"
    )
    assert losses[0].data_ptr() != losses[1].data_ptr() and not losses[0].requires_grad


@pytest.mark.parametrize("step", CPU_STEPS)
def test_a_loss_that_is_kept_holds_no_graph_of_autograd(step):
    run = built(step)
    assert not run.train_step(*run.batches[0]).requires_grad


def test_a_failed_capture_is_one_line_with_its_cause(monkeypatch):
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)

    def capture(tokens, targets):
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("the capture was invalidated")

    with pytest.raises(
        RuntimeError, match="cannot be captured, --no-capture launches it: operation not permitted"
    ):
        benchmark.capture_step(capture, (1, 2), arguments(STEPS[3]), Row("x"))


def test_step_4_is_skipped_before_anything_is_built():
    with pytest.raises(Skip, match="needs an NVIDIA GPU"):
        built(STEPS[4])


@pytest.mark.parametrize(("step_s", "expected"), [(0.0, 10), (0.6, 3)])
def test_on_a_gpu_ten_steps_are_rehearsed_unless_they_are_long(step_s, expected, monkeypatch):
    run, row, replays = built(STEPS[2], warmup=3), Row(STEPS[2]), []
    before = [weight.clone() for weight in run.model.parameters()]
    clock = iter(step_s * k for k in range(9))
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(clock))
    run.args.device, run.capture = torch.device("cuda"), run.train_step
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(synchronize=lambda: None))
    replay = lambda *batch: replays.append(batch) or run.train_step(*batch)  # noqa: E731
    monkeypatch.setattr(benchmark, "capture_step", lambda capture, batch, args, row: replay)
    training = rehearsed(run, row)
    assert row.settings.captured and row.rehearsed == expected and len(replays) == expected - 3
    assert training.train_step is replay
    weights = zip(run.model.parameters(), before, strict=True)
    assert all(torch.equal(weight, first) for weight, first in weights), "the weights came back"
    run.args.capture, clock = False, iter(step_s * k for k in range(9))
    rehearsed(run, row)
    assert row.settings.captured is False and "--no-capture" in row.note


class FakeTraining:
    """Steps that take no time."""

    def __init__(self):
        self.losses = []

    def step(self):
        self.losses.append(torch.tensor(1.0))


def test_a_gpu_is_timed_for_three_seconds_after_it_has_settled_for_six(monkeypatch):
    asked = []

    def run_between_events(training, n, device):
        asked.append(n)
        return [100.0] * n, [(1500.0, 600.0), (1400.0, 500.0)]

    monkeypatch.setattr(benchmark, "run_between_events", run_between_events)
    monkeypatch.setattr(clock, "reference_work", lambda device: (1.0, 2.0, 3.0))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    row = Row("x", peak_bytes=5)
    benchmark.time_on_gpu(FakeTraining(), 4, arguments(STEPS[0], device="cuda"), row)
    assert asked == [1, 59, 30] and row.settling_ms == [100.0] * 60 and row.step_ms == [100.0] * 30
    assert row.peak_bytes == 7 and (row.clock_mhz, row.power_w) == (1450.0, 550.0)
    assert (row.product_ms, row.copy_ms, row.launch_us) == ([1.0] * 2, [2.0] * 2, [3.0] * 2)
    monkeypatch.setattr(clock, "reference_work", lambda device: None)
    benchmark.time_on_gpu(FakeTraining(), 40, arguments(STEPS[0], device="cuda"), row := Row("x"))
    assert len(row.step_ms) == 40 and not row.product_ms, "no room for the reference work"


def test_times_of_a_cpu_are_those_of_its_clock(monkeypatch):
    ticks, training, row = iter([10.0, 10.25, 11.0]), FakeTraining(), Row("x")
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(ticks))
    benchmark.time_on_cpu(training, 2, arguments(STEPS[0]), row)
    assert row.step_ms == [250.0, 750.0] and len(training.losses) == 2
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * benchmark.resource.getpagesize()
    assert 0.9 * resident < row.peak_bytes < 64 * 2**30


@pytest.mark.parametrize(("compiled", "regions", "left"), [([0], 1, 0), ([2, 0], 2, 0), ([1, 1, 1], 3, 1)])
def test_a_region_in_which_the_compiler_worked_is_timed_again_at_most_twice(
    compiled, regions, left, monkeypatch
):
    counts, row, timed = torch._dynamo.utils.counters["stats"], Row("x"), []

    def time_on_cpu(training, n, args, row):
        counts["unique_graphs"] += compiled[len(timed)]
        timed.append(n)
        training.step()
        row.step_ms = [float(len(timed))]

    monkeypatch.setattr(benchmark, "time_on_cpu", time_on_cpu)
    benchmark.measure_row(load_step(STEPS[2]).main, arguments(STEPS[2], steps=1), row)
    assert len(timed) == regions and row.recompiled == left and row.step_ms == [float(regions)]


def test_steps_go_through_the_batches_in_turn():
    seen = []
    training = Training(lambda batch: seen.append(batch) or torch.tensor(1.0), [("a",), ("b",)])
    for _ in range(3):
        training.step()
    assert seen == ["a", "b", "a"]


def test_the_time_of_a_call_is_the_median_of_its_parts(monkeypatch):
    taken = iter([0.01, 0.03, 0.01, 0.02, 9.0, 0.01])
    monkeypatch.setattr(clock, "mean_seconds", lambda work, n, device: next(taken))
    assert clock.steady_seconds(lambda: None, torch.device("cpu"), 0.05) == 0.02
    monkeypatch.setattr(clock, "mean_seconds", lambda work, n, device: 0.5)
    assert clock.steady_seconds(lambda: None, torch.device("cpu"), 0.05) == 0.5


def test_communication_counts_where_nothing_else_runs():
    def kernel(category, start_ms, ms):
        return Kernel("x", category, ms, start_ms=start_ms)

    both = [kernel("communication", 0.0, 4.0), kernel("matrix products", 1.0, 2.0), kernel("loss", 2.0, 3.0)]
    assert _covered_ms(both) == 5.0, "0 to 5, once where two overlap"
    assert _exposed_ms(both) == 1.0, "0 to 1"


def test_a_block_lies_between_the_longest_kernels_of_two_attentions():
    names = ("fmha_fwd", "gemm", "fmha_fwd", "fmha_bwd", "gemm_bwd", "fmha_bwd")
    launches = [Kernel(name, categorize(name), 1.0, start_ms=10.0 + k) for k, name in enumerate(names)]
    forward, backward = one_block(launches, 1)
    assert [(launch.name, launch.start_ms) for launch in forward] == [("fmha_fwd", 0.0), ("gemm", 1.0)]
    assert [launch.name for launch in backward] == ["fmha_bwd", "gemm_bwd"]
    assert one_block(launches, 2) == ([], [])


def test_the_seconds_of_the_rehearsal_are_not_those_of_building(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: clock[0])

    def main(args):
        clock[0] += 100
        weight = torch.nn.Parameter(torch.zeros(1))
        return step, torch.nn.Module(), torch.optim.SGD([weight])

    def step(tokens, targets):
        clock[0] += 1
        return torch.tensor(1.0)

    row = Row("x")
    benchmark.measure_row(main, arguments(STEPS[0], steps=2, warmup=3), row)
    # 100 s of building, and the two steps that show what ran and sample gradients.
    assert row.warmup_s == 3.0 and row.overhead_s == 102.0 and row.step_ms == [1000.0] * 2


def test_a_result_line_is_of_all_processes_and_memory_has_its_unit():
    row = Row("x", "ok", step_ms=[100.0], loss=[2.0, 1.0], peak_bytes=3 * 2**30, warmup_s=1.0)
    args = arguments(STEPS[0], processes=2, parallel="ddp")
    work = args.workload()
    line = benchmark.result_lines(row, args).splitlines()[-1]
    assert f"{20 * work.tokens_per_step:,} tokens/s" in line
    assert f"{20 * work.flops_per_step / 1e12:.3g} model TFLOP/s" in line and "peak 3.0 GiB" in line
    assert "2 processes" in args.about()[-1] and "processes" not in "".join(arguments(STEPS[0]).about())
