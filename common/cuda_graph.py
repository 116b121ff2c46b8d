"""A whole training step captured once as a CUDA graph and replayed: one launch in place of one per kernel.

A script asks for it with `train_step = cuda_graph.capture(train_step, optimizer, args)`. Warm-up steps are still
launched one kernel at a time; benchmark.run then calls `record`, and every later call replays. Source: PyTorch's notes
on CUDA semantics, section "Whole-network capture".
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from common.arguments import DDP_WARMUP, Arguments
from common.text import one_line


class CaptureError(RuntimeError):
    """A step cannot be captured, or not be replayed as asked; the message is one line that names the cause."""


def capture(train_step: Callable, optimizer: torch.optim.Optimizer, args: Arguments) -> CapturedStep:
    """`train_step` with capture asked for. Where that cannot be, the step is launched, and `reason` says why."""
    if args.device.type != "cuda":
        reason = "only a GPU has CUDA graphs"
    elif not args.capture:
        reason = "launched, not captured: --no-capture"
    elif args.parallel == "fsdp":
        reason = "launched, not captured: FSDP2 allocates pinned memory of the host, which no CUDA graph can hold"
    elif args.parallel == "ddp" and args.warmup < DDP_WARMUP:
        reason = f"launched, not captured: DDP needs {DDP_WARMUP} launched steps first, --warmup {DDP_WARMUP}"
    elif args.checkpoint:
        reason = "launched, not captured: recomputing blocks was not shown to work in a CUDA graph"
    elif args.amp_dtype is torch.float16:
        reason = "launched, not captured: FP16's loss scaling makes the host wait for whether a gradient overflowed"
    else:
        reason = None
        for group in optimizer.param_groups:
            group["capturable"] = True  # AdamW counts its steps on the GPU, where a replay can count on
    return CapturedStep(train_step, optimizer, reason)


class CapturedStep:
    """A training step that is launched until `record` has captured it, and replayed from then on.

    Calls take tokens and targets, each (B, T) int64 on the device, and return the loss, a scalar of its own. A replay
    writes to the tensors that were captured: parameters and the optimizer's states must not be replaced afterwards, as
    `load_state_dict` of an optimizer does. A changed option of the optimizer or another shape raises CaptureError.
    """

    def __init__(self, launch: Callable, optimizer: torch.optim.Optimizer, reason: str | None):
        self.launch, self.optimizer, self.reason = launch, optimizer, reason
        self.graph: torch.cuda.CUDAGraph | None = None

    def record(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """Capture one step; nothing is trained by it.

        Raises torch.OutOfMemoryError, and CaptureError that names the line of the script and its error. A capture that
        failed leaves CUDA's random numbers and allocator in a state in which this process cannot train on.
        """
        self.batch = [tokens.clone(), targets.clone()]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what launched steps left would count beside the graph's own memory
        torch.cuda.reset_peak_memory_stats()
        graph, stream, first = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), None
        own = None if stream == torch.cuda.default_stream() else stream  # the default stream cannot be captured
        try:
            with torch.cuda.graph(graph, stream=own):
                try:
                    self.loss = self.launch(*self.batch).detach()
                except BaseException as error:
                    first = error  # ending a broken capture raises another
                    raise
        except RuntimeError as error:
            torch.cuda.set_stream(stream)
            first = first or error
            if not isinstance(first, RuntimeError) or isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise CaptureError(f"the step cannot be captured as a CUDA graph: {_cause(first)}") from first
        self.graph, self.hyperparameters = graph, self._hyperparameters()

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            return self.launch(tokens, targets)
        for captured, given in zip(self.batch, (tokens, targets), strict=True):
            if given.shape != captured.shape:
                raise CaptureError(f"the captured step takes {tuple(captured.shape)}, not {tuple(given.shape)}")
        now, held = self._hyperparameters(), self.hyperparameters
        for name in now | held if now != held else ():
            if now.get(name) != held.get(name):
                raise CaptureError(f"{name} is {now.get(name)}, but the captured step holds {held.get(name)}")
        self.batch[0].copy_(tokens)
        self.batch[1].copy_(targets)
        self.graph.replay()
        return self.loss.clone()

    def release(self) -> None:
        """Launch from now on, and give back the graph's memory."""
        self.graph = self.loss = None
        torch.cuda.empty_cache()

    def _hyperparameters(self) -> dict:
        """What the graph holds as constants: every option of the optimizer that is no tensor."""
        return {
            f"{name} of parameter group {k}": value
            for k, group in enumerate(self.optimizer.param_groups)
            for name, value in group.items()
            if name != "params" and not isinstance(value, torch.Tensor)
        }


def _cause(error: BaseException) -> str:
    """The line of the training script that was running, and its error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "-packages" not in frame.filename]
    where = f"{frames[-1].line!r}: " if frames and frames[-1].line else ""
    return f"{where}{one_line(error, 150)}"
