"""A rehearsal leaves weights and optimizer as they were, and a capture is replayed on the batch that it is
given."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from conftest import CPU_STEPS, STEPS, arguments, built, load_step

from common import benchmark, rehearsal
from common.record import Row
from common.text import Skip

OPTIMIZERS = {
    "AdamW, fused": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    "AdamW, foreach": lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=True),
    "AdamW, one by one": lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=False),
    "SGD with momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "Adafactor": lambda weights: torch.optim.Adafactor(weights, lr=0.1),
}


def addresses(optimizer):
    states = [state for states in optimizer.state.values() for state in states.values()]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [tensor.data_ptr() for tensor in (*weights, *states) if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_come_back_in_place_and_the_optimizer_forgets(name):
    def train(optimizer):
        for k in range(3):
            (weight.sin().sum() * (k + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach().clone()

    weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))
    before, optimizer = weight.detach().clone(), OPTIMIZERS[name]([weight])
    initial = rehearsal.InitialState(optimizer)
    trained, places = train(optimizer), addresses(optimizer)
    assert not torch.equal(trained, before)
    initial.restore()
    assert torch.equal(weight, before) and addresses(optimizer) == places
    tensors = [state for state in optimizer.state[weight].values() if isinstance(state, torch.Tensor)]
    assert tensors and not any(tensor.any() for tensor in tensors)
    assert torch.equal(train(optimizer), trained), "it trains again as it did at first"


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.Adagrad(weights, initial_accumulator_value=0.1),
        lambda weights: torch.optim.NAdam(weights, lr=0.1),
        lambda weights: torch.optim.Rprop(weights),
        lambda weights: torch.optim.ASGD(weights, lr=0.1),
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.5),
    ],
)
def test_an_optimizer_whose_states_do_not_begin_at_zero_begins_anew(make):
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))
    optimizer = make([weight])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    initial, trained = rehearsal.InitialState(optimizer), []
    for _ in range(2):
        for _ in range(3):
            weight.sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(weight.detach().clone())
        scheduler.step()
        initial.restore()
    assert torch.equal(*trained), "with the first rate too"
    with pytest.raises(
        Skip, match=f"states of {type(optimizer).__name__} may not begin at zero.* give --cold"
    ):
        rehearsal.check_states(optimizer)


class Empty(torch.nn.Module):
    """A model without members, whose buffers come and go."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def __len__(self):
        return 0


def test_a_buffer_that_a_forward_makes_is_left_and_others_come_back():
    weight, model = torch.nn.Parameter(torch.ones(2)), Empty()
    initial = rehearsal.InitialState(torch.optim.SGD([weight], 0.1), model)
    model.mean = model.mean + 1
    model.register_buffer("mask", torch.ones(2))
    initial.restore()
    assert not model.mean.any() and model.mask.all()


@pytest.mark.parametrize("step", CPU_STEPS)
def test_losses_after_a_rehearsal_are_bitwise_those_without_one(step, traced_only):
    run, again = built(step), built(step)
    losses = [run.train_step(*batch).item() for batch in run.batches]
    row = Row(step)
    steps, _ = rehearsal.rehearse(
        again.train_step, again.optimizer, again.capture, again.batches, again.args, row
    )
    for _ in steps.run(len(again.batches), "test"):
        pass
    assert [loss.item() for loss in steps.losses] == losses and losses[-1] < losses[0]
    assert (row.rehearsed, row.note, row.settings.captured) == (again.args.warmup, None, None)


def test_cold_the_launched_steps_are_training_steps():
    warm, cold = Row(STEPS[2]), Row(STEPS[2])
    for row, how in ((warm, False), (cold, True)):
        benchmark.run(load_step(STEPS[2]).main, arguments(STEPS[2], cold=how), row)
    assert warm.loss == cold.loss and len(cold.loss) == 6
    assert (
        (warm.rehearsed, cold.rehearsed) == (2, 0)
        and "--cold" in cold.note
        and "--cold" not in (warm.note or "")
    )


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
    told = rehearsal.why_launched(arguments(STEPS[3], **given))
    assert told is None if reason is None else told.startswith(reason)


@pytest.fixture
def graph(monkeypatch):
    """In place of a torch.cuda.CUDAGraph: the step is captured by running it once."""
    graph = SimpleNamespace(replay=None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the current stream")
    return graph


@pytest.mark.parametrize("step", STEPS[3:4])
def test_a_replay_reads_the_batch_that_it_is_given_and_returns_a_loss_of_its_own(step, graph, traced_only):
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
def test_a_loss_that_is_kept_holds_no_graph_of_autograd(step, traced_only):
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
        rehearsal.captured(capture, (1, 2), arguments(STEPS[3]), Row("x"))


def test_step_4_is_skipped_before_anything_is_built():
    with pytest.raises(Skip, match="needs an NVIDIA GPU"):
        built(STEPS[4])


@pytest.mark.parametrize(("step_s", "rehearsed"), [(0.01, 10), (0.6, 3)])
def test_on_a_gpu_ten_steps_are_rehearsed_unless_they_are_long(step_s, rehearsed, monkeypatch):
    run = built(STEPS[2], warmup=3)
    before = [weight.clone() for weight in run.model.parameters()]
    run.args.device = torch.device("cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(rehearsal, "captured", lambda capture, batch, args, row: capture)
    monkeypatch.setattr(rehearsal, "launch_steps", launched_in(step_s, rehearsal.launch_steps))
    row, replays = Row(STEPS[2]), []
    replay = lambda *batch: replays.append(batch) or run.train_step(*batch)  # noqa: E731
    steps, _ = rehearsal.rehearse(run.train_step, run.optimizer, replay, run.batches, run.args, row)
    assert row.settings.captured and row.rehearsed == rehearsed and len(replays) == rehearsed - 3
    assert not steps.losses and steps.train_step is replay
    weights = zip(run.model.parameters(), before, strict=True)
    assert all(torch.equal(weight, first) for weight, first in weights), "the weights came back"
    run.args.capture = False
    rehearsal.rehearse(run.train_step, run.optimizer, replay, run.batches, run.args, row)
    assert row.settings.captured is False and "--no-capture" in row.note


def launched_in(step_s, launch):
    """The real launched steps, said to take so many seconds each."""

    def launch_steps(steps, args):
        launch(steps, args)
        return step_s

    return launch_steps


def test_the_last_of_the_launched_steps_tells_how_long_one_is(monkeypatch):
    clock = iter([0.0, 5.0, 5.0, 6.0, 6.0, 6.25, 6.25])
    monkeypatch.setattr(rehearsal.time, "perf_counter", lambda: next(clock))
    steps = rehearsal.Steps(lambda batch: torch.tensor(1.0), [(0,)])
    assert rehearsal.launch_steps(steps, arguments(STEPS[2], warmup=3)) == 0.25 and len(steps.losses) == 3
