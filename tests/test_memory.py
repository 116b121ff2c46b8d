"""Memory over a step, from events as CUDA's allocator writes them."""

import pytest
import torch
from conftest import STEPS, built

from common.memory import MARKERS, MOST_POINTS, Allocation, memory_use, trace_memory
from common.traced import MEMORY_KINDS

FORWARD, BACKWARD, OPTIMIZER = MARKERS
KINDS = {1: "parameters", 2: "optimizer"}


def history(*events):
    """Events a microsecond apart: ("alloc", address, size) or ("free", address); a marker is a size alone."""
    listed = []
    for event in events:
        pair = [("alloc", 999, event), ("free", 999)] if isinstance(event, int) else [event]
        for _, address, *size in pair:
            known = {"action": "alloc" if size else "free_requested", "addr": address, "size": size[0] if size else 0}
            listed.append(known | {"time_us": 1000 + 1000 * len(listed)})
            if not size:
                listed.append(known | {"action": "free_completed", "time_us": 1000 + 1000 * len(listed)})
    return listed


STEP = history(
    FORWARD, ("alloc", 10, 500), ("alloc", 11, 70), ("free", 11), BACKWARD, ("alloc", 12, 100), ("alloc", 13, 30),
    ("free", 13), ("free", 10), OPTIMIZER, ("alloc", 14, 8), ("free", 14), ("free", 12),
)  # fmt: skip
BEFORE = [Allocation(1, 100), Allocation(2, 200), Allocation(3, 7)]


def test_each_allocation_has_its_kind_and_all_add_up():
    use = memory_use(BEFORE, STEP, KINDS, {12})
    most = {kind: max(use.bytes[kind]) for kind in MEMORY_KINDS}
    marker = max(MARKERS)
    assert most["parameters"] == 100 and most["optimizer"] == 200 and most["other"] == 7
    assert most["activations"] == 500 and most["gradients"] == 100 and most["temporary"] == marker
    assert {use.bytes[kind][-1] for kind in ("activations", "temporary", "gradients")} == {0}
    assert use.bytes["parameters"] == [100] * len(use.ms), "what was there before stays"


def test_the_peak_has_its_place_between_the_parts_of_the_step():
    step = [event for event in STEP if event["size"] not in (BACKWARD, OPTIMIZER)]
    use = memory_use(BEFORE, STEP, KINDS, {12})
    assert 0 < use.backward_ms < use.optimizer_ms <= use.ms[-1] and use.ms[0] == 0
    totals = [sum(sizes) for sizes in zip(*use.bytes.values(), strict=True)]
    assert use.peak_bytes == max(totals) and use.ms[totals.index(max(totals))] == use.peak_ms
    assert memory_use(BEFORE, step, KINDS, set()).backward_ms is None
    with pytest.raises(ValueError, match="does not hold the step"):
        memory_use(BEFORE, step[3:], KINDS, set())


def test_many_events_are_thinned_and_the_peak_stays():
    blips = [event for k in range(900) for event in (("alloc", 100 + k, 1000 + k), ("free", 100 + k))]
    use = memory_use(BEFORE, history(FORWARD, ("alloc", 9, 9000), *blips), KINDS, set())
    assert len(use.ms) <= MOST_POINTS and max(map(sum, zip(*use.bytes.values(), strict=True))) == use.peak_bytes
    assert use.peak_bytes == 307 + 9000 + 1899 and use.ms == sorted(use.ms)


def test_a_bucket_that_holds_gradients_between_steps_counts_as_gradients():
    use = memory_use([*BEFORE, Allocation(4, 50)], STEP, KINDS, {4, 12})
    assert min(use.bytes["gradients"]) == 50 and max(use.bytes["gradients"]) == 150


@pytest.fixture
def events(monkeypatch):
    """CUDA's allocator as if every allocation of a marker went through it: the sizes and switches, in order."""
    seen, empty = [], torch.empty
    listed = lambda: [{"action": "alloc", "addr": k, "size": size, "time_us": k}  # noqa: E731
                      for k, size in enumerate(seen) if isinstance(size, int)]  # fmt: skip
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [], "device_traces": [listed()]})
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled, **_: seen.append(str(enabled)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: [seen.append(size[0]), empty(*size, **how)][1])
    return seen


def test_a_step_is_marked_where_its_parts_begin_and_is_itself_again_afterwards(events, monkeypatch):
    run = built(STEPS[1], monkeypatch)
    backward, before = torch.Tensor.backward, [weight.detach().clone() for weight in run.model.parameters()]
    use = trace_memory(lambda: run.train_step(*run.batches[0]), run.model, torch.device("cpu"))
    marks = [size for size in events if size in MARKERS or isinstance(size, str)]
    assert marks == ["all", FORWARD, BACKWARD, OPTIMIZER, "None"] and use.backward_ms < use.optimizer_ms
    assert torch.Tensor.backward is backward, "nothing stays patched"
    assert any((a != b).any() for a, b in zip(before, run.model.parameters(), strict=True)), "the step trained"
    run.train_step(*run.batches[0])
    assert [size for size in events if size in MARKERS] == [FORWARD, BACKWARD, OPTIMIZER]


def test_a_step_that_fails_leaves_nothing_patched_and_the_history_off(events):
    backward = torch.Tensor.backward

    def fail():
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        trace_memory(fail, torch.nn.Linear(1, 1), torch.device("cpu"))
    assert torch.Tensor.backward is backward and events[-1] == "None"
