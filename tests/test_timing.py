"""What is timed, in which order, and what of it the record gets: with steps that take no time at all."""

from pathlib import Path

import pytest
import torch
from conftest import STEPS, arguments

from common import benchmark, timing
from common.kernels import categorize
from common.profile import _covered_ms, _exposed_ms, one_block
from common.record import Kernel, Row


class FakeSteps:
    """Steps of 100 ms; `asked` are the parts that were timed."""

    def __init__(self):
        self.asked = []

    def timed_on_cpu(self, n):
        self.asked.append(n)
        return [100.0] * n

    def timed_on_gpu(self, n, phase, device):
        self.asked.append((phase, n))
        return [100.0] * n, [(1500.0, 600.0), None, (1400.0, 500.0)]


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.setattr(timing, "reference_work", lambda device: timing.Reference(1.0, 2.0, 3.0))


def test_a_gpu_is_timed_for_three_seconds_after_it_has_settled_for_two(reference, monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    steps, row = FakeSteps(), Row("x", peak_bytes=5)
    args = arguments(STEPS[0], steps=4, device="cuda")
    assert timing.time_steps(steps, row, args) == pytest.approx(5.0)
    assert steps.asked == [("settling", 1), ("settling", 19), ("timed", 30)]
    assert row.step_ms == [100.0] * 30 and row.peak_bytes == 7
    assert (row.clock_mhz, row.power_w) == (1450.0, 550.0)
    assert (row.product_ms, row.copy_ms, row.launch_us) == ([1.0] * 2, [2.0] * 2, [3.0] * 2)


def test_a_cpu_is_timed_in_four_parts_each_after_a_step_that_does_not_count(reference):
    steps, row = FakeSteps(), Row("x")
    assert timing.time_steps(steps, row, arguments(STEPS[0], steps=10)) == pytest.approx(1.4)
    assert steps.asked == [1, 2, 1, 3, 1, 2, 1, 3] and len(row.step_ms) == 10
    assert len(row.product_ms) == 5 and row.clock_mhz is None
    trained, row = FakeSteps(), Row("x")
    timing.time_steps(trained, row, arguments(STEPS[0], steps=40, heldout_every=10))
    assert len(row.step_ms) == 10, "its steps were trained before"


def test_milliseconds_of_a_step_are_those_of_the_clock(monkeypatch):
    clock = iter([10.0, 10.25, 11.0])
    steps = timing.Steps(lambda batch: torch.tensor(1.0), [(0,)])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert steps.timed_on_cpu(2) == [250.0, 750.0] and len(steps.losses) == 2


def test_a_row_without_room_for_the_reference_work_has_none(monkeypatch):
    monkeypatch.setattr(timing, "reference_work", lambda device: None)
    row = Row("x")
    timing.time_steps(FakeSteps(), row, arguments(STEPS[0], steps=2))
    assert len(row.step_ms) == 2 and not row.product_ms and not row.copy_ms


def test_the_reference_work_is_a_product_and_a_copy(monkeypatch):
    def count(work, device, total_s):
        made = work()
        return 1.0 if made.dim() == 2 else 2.0

    monkeypatch.setattr(timing, "steady_seconds", count)
    assert timing.reference_work(torch.device("cpu")) == timing.Reference(1e3, 2e3, None)


def test_the_time_of_a_call_is_the_median_of_its_parts(monkeypatch):
    taken = iter([0.01, 0.03, 0.01, 0.02, 9.0, 0.01])
    monkeypatch.setattr(timing, "mean_seconds", lambda work, n, device: next(taken))
    assert timing.steady_seconds(lambda: None, torch.device("cpu"), 0.05) == 0.02
    monkeypatch.setattr(timing, "mean_seconds", lambda work, n, device: 0.5)
    assert timing.steady_seconds(lambda: None, torch.device("cpu"), 0.05) == 0.5


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


def test_the_seconds_of_the_first_steps_are_not_those_of_building(monkeypatch):
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
    monkeypatch.setattr(timing, "reference_work", lambda device: None)
    benchmark.run(main, arguments(STEPS[0], steps=2, warmup=3), row)
    # 100 s of building, and the two launched steps that sample gradients and show what ran; the two timed
    # steps and the steps of warm-up are told apart.
    assert row.warmup_s == 3.0 and 102 <= row.overhead_s < 110


def test_a_result_line_is_of_all_processes_and_memory_has_its_unit():
    row = Row("x", "ok", step_ms=[100.0], loss=[2.0, 1.0], peak_bytes=3 * 2**30, warmup_s=1.0)
    args = arguments(STEPS[0], processes=2, parallel="ddp")
    work = args.workload()
    line = benchmark.result_lines(row, args).splitlines()[-1]
    assert f"{20 * work.tokens_per_step:,} tokens/s" in line
    assert f"{20 * work.flops_per_step / 1e12:.3g} model TFLOP/s" in line and "peak 3.0 GiB" in line
    assert "2 processes" in benchmark.header(args) and "processes" not in benchmark.header(
        arguments(STEPS[0])
    )
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * benchmark.resource.getpagesize()
    assert 0.9 * resident < benchmark.process_peak_bytes() < 64 * 2**30
