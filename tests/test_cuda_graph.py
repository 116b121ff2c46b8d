"""A captured training step: where it is launched instead and why, and what a replay refuses."""

import pytest
import torch
from conftest import COMPILED, STEPS, arguments, built, trace_only

from common import benchmark, cuda_graph


class Graph:
    """Stands for a captured graph: counts its replays."""

    replays = 0

    def replay(self):
        self.replays += 1


@pytest.fixture
def recorded():
    """A step as `record` leaves it, without a GPU."""
    optimizer = torch.optim.AdamW([torch.ones(2, requires_grad=True)], lr=1e-3)
    step = cuda_graph.CapturedStep(lambda *_: pytest.fail("a replay launches nothing"), optimizer, None)
    step.graph, step.loss = Graph(), torch.tensor(2.0)
    step.batch, step.hyperparameters = [torch.zeros(2, 4, dtype=torch.int64) for _ in "xy"], step._hyperparameters()
    return step


def test_on_a_cpu_a_step_is_launched_and_nothing_is_said_of_it(monkeypatch):
    trace_only(monkeypatch)
    made = built(STEPS[3], monkeypatch, config=COMPILED, steps=2, warmup=1)
    assert isinstance(made.train_step, cuda_graph.CapturedStep) and made.train_step.graph is None
    assert not any("capturable" in group and group["capturable"] for group in made.train_step.optimizer.param_groups)
    row = benchmark.run(made.train_step, made.model, made.args)
    assert row.note is None and row.settings.captured is False


def test_fp16_is_launched_for_a_reason_and_bf16_is_captured_with_the_count_on_the_gpu():
    optimizer = torch.optim.AdamW([torch.ones(2, requires_grad=True)])
    args = {dtype: arguments(STEPS[3], device="cuda", amp_dtype=dtype) for dtype in (torch.float16, torch.bfloat16)}
    assert "FP16's loss scaling" in cuda_graph.capture(print, optimizer, args[torch.float16]).reason
    assert optimizer.param_groups[0]["capturable"] is False
    assert cuda_graph.capture(print, optimizer, args[torch.bfloat16]).reason is None
    assert optimizer.param_groups[0]["capturable"] is True


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"capture": False}, "--no-capture"),
        ({"parallel": "fsdp", "warmup": 11}, "FSDP2 allocates pinned memory"),
        ({"parallel": "ddp", "warmup": 10}, "DDP needs 11 launched steps first"),
        ({"parallel": "ddp", "warmup": 11}, None),
    ],
)
def test_what_cannot_be_captured_is_launched_and_says_why(given, reason):
    optimizer = torch.optim.AdamW([torch.ones(2, requires_grad=True)])
    args = arguments(STEPS[3], device="cuda", amp_dtype=torch.bfloat16, **given)
    said = cuda_graph.capture(print, optimizer, args).reason
    assert said is None if reason is None else reason in said
    assert optimizer.param_groups[0]["capturable"] is (reason is None)


def test_a_replay_takes_its_batch_and_returns_a_loss_of_its_own(recorded):
    tokens = torch.arange(8).view(2, 4)
    loss = recorded(tokens, tokens + 1)
    assert recorded.graph.replays == 1 and torch.equal(recorded.batch[0] + 1, recorded.batch[1])
    recorded.loss += 1
    assert loss == 2, "the next replay does not change it"


def test_what_a_graph_cannot_follow_is_refused_in_one_line(recorded):
    batch = recorded.batch
    with pytest.raises(cuda_graph.CaptureError, match=r"^the captured step takes \(2, 4\), not \(3, 4\)$"):
        recorded(torch.zeros(3, 4), torch.zeros(3, 4))
    recorded.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(cuda_graph.CaptureError, match=r"^lr of parameter group 0 is 0.5, but .* holds 0.001$"):
        recorded(*batch)
    assert recorded.graph.replays == 0
