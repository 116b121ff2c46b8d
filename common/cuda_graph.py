"""A whole training step captured once as a CUDA graph and replayed: one launch in place of one per kernel.

A script asks for it with `train_step = cuda_graph.capture(train_step, optimizer, args)`. Warm-up steps are still
launched one kernel at a time; `launch` then calls `record`, and every later call replays. Source: PyTorch's notes on
CUDA semantics, section "Whole-network capture".
"""

from collections.abc import Callable

import torch

from common.arguments import DDP_WARMUP, Arguments
from common.text import one_line


class CaptureError(RuntimeError):
    """A step cannot be captured, or not be replayed as asked; the message is one line that names the cause."""


def capture(train_step: Callable, optimizer: torch.optim.Optimizer, args: Arguments) -> "CapturedStep":
    """`train_step` with capture asked for; AdamW becomes capturable: it counts its steps on the GPU, where a replay can
    count on. Where no capture can be, the step is launched, and `reason` tells why."""
    reason = None
    if args.device.type != "cuda":
        reason = "only a GPU has CUDA graphs"
    elif not args.capture:
        reason = "launched, not captured: --no-capture"
    elif args.parallel == "fsdp":
        reason = "launched, not captured: FSDP2 allocates pinned memory of the host, which no CUDA graph can hold"
    elif args.parallel == "ddp" and args.warmup < DDP_WARMUP:
        reason = f"launched, not captured: DDP needs {DDP_WARMUP} launched steps first, --warmup {DDP_WARMUP}"
    else:
        for group in optimizer.param_groups:
            group["capturable"] = True
    return CapturedStep(train_step, optimizer, reason)


class CapturedStep:
    """A training step that is launched until `record` has captured it, and replayed from then on.

    Calls take tokens and targets, each (B, T) int64 on the device, and return the loss, a scalar of its own. A replay
    reads and writes the tensors that were captured: CaptureError is raised where a parameter, the optimizer's states or
    one of its options was replaced afterwards, as `load_state_dict` of an optimizer does, and for another shape.
    """

    def __init__(self, launch: Callable, optimizer: torch.optim.Optimizer, reason: str | None):
        self.launch, self.optimizer, self.reason = launch, optimizer, reason
        self.graph: torch.cuda.CUDAGraph | None = None

    def record(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """Capture one step; nothing is trained by it. Raises torch.OutOfMemoryError, and CaptureError with the cause:
        it leaves CUDA's random numbers and allocator in a state in which this process cannot train on."""
        self.batch = [tokens.clone(), targets.clone()]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what launched steps left would count with the graph's own memory
        torch.cuda.reset_peak_memory_stats()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        own = None if stream == torch.cuda.default_stream() else stream  # the default stream cannot be captured
        try:
            with torch.cuda.graph(graph, stream=own):
                self.loss = self.launch(*self.batch).detach()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a capture that could not end leaves its own
            # Ending a broken capture raises another error.
            cause = error.__context__ if error.__context__ and "capture" in str(error) else error
            if not isinstance(cause, RuntimeError) or isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise CaptureError(f"the step cannot be captured as a CUDA graph: {one_line(cause, 150)}") from cause
        self.graph, self.held = graph, self._constants()

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            return self.launch(tokens, targets)
        if tokens.shape != self.batch[0].shape:
            raise CaptureError(f"the captured step takes {tuple(self.batch[0].shape)}, not {tuple(tokens.shape)}")
        now = self._constants()
        for name in now | self.held if now != self.held else ():
            if now.get(name) != self.held.get(name):
                raise CaptureError(f"{name} changed after the step was captured: capture it again")
        self.batch[0].copy_(tokens)
        self.batch[1].copy_(targets)
        self.graph.replay()
        return self.loss.clone()

    def release(self) -> None:
        """Launch from now on, and give back the graph's memory."""
        self.graph = self.loss = None
        torch.cuda.empty_cache()

    def _constants(self) -> dict:
        """What the graph holds: the options of the optimizer by value, tensors by their place in memory."""
        held = {"the optimizer's state": id(self.optimizer.state)}
        for k, group in enumerate(self.optimizer.param_groups):
            for name, value in group.items():
                tensors = value if name == "params" else [value] if isinstance(value, torch.Tensor) else None
                place = f"{name} of parameter group {k}"
                held[place] = value if tensors is None else [tensor.data_ptr() for tensor in tensors]
        return held
