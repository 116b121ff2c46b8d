"""A whole training step captured once as a CUDA graph and replayed: one launch in place of one per kernel.

Source: PyTorch's notes on CUDA semantics, section "Whole-network capture".
"""

from collections.abc import Callable

import torch

from common.arguments import DDP_WARMUP, Arguments


def capture(train_step: Callable, optimizer: torch.optim.Optimizer, args: Arguments) -> "CapturedStep":
    """`train_step` with capture asked for; AdamW becomes capturable: it counts its steps on the GPU, where a replay can
    count on. Where no capture can be, the step is launched, and `reason` tells why."""
    reason = None
    if args.device.type != "cuda" or not args.capture:
        reason = ""  # launched as asked, or on a CPU
    elif args.parallel == "fsdp":
        reason = "launched, not captured: FSDP2 allocates pinned memory of the host, which no CUDA graph can hold"
    elif args.parallel == "ddp" and args.warmup < DDP_WARMUP:
        reason = f"launched, not captured: DDP needs {DDP_WARMUP} launched steps first, --warmup {DDP_WARMUP}"
    else:
        for group in optimizer.param_groups:
            group["capturable"] = True
    return CapturedStep(train_step, optimizer, reason)


class CapturedStep:
    """A training step that is launched until `launch` of common/benchmark.py calls `record`, and replayed from then on.

    Calls take tokens and targets, each (B, T) int64 on the device, and return the loss, a scalar of its own. A replay
    reads and writes the tensors that were captured: RuntimeError is raised for another shape, and where a parameter,
    the optimizer's states or one of its options was replaced afterwards, as `load_state_dict` of an optimizer does.
    """

    def __init__(self, launch: Callable, optimizer: torch.optim.Optimizer, reason: str | None):
        self.launch, self.optimizer, self.reason = launch, optimizer, reason
        self.graph: torch.cuda.CUDAGraph | None = None

    def record(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """Capture one step; nothing is trained by it. Raises what broke the capture: it leaves CUDA's random numbers
        and allocator in a state in which this process cannot train on."""
        self.batch = [tokens.clone(), targets.clone()]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what launched steps left would count with the graph's own memory
        torch.cuda.reset_peak_memory_stats()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        own = None if stream == torch.cuda.default_stream() else stream  # the default stream cannot be captured
        try:
            with torch.cuda.graph(graph, stream=own):
                self.loss = self.launch(*self.batch).detach()
        except RuntimeError as error:  # ending a broken capture raises an error of its own
            raise (error.__context__ if "capture" in str(error) else None) or error from None
        self.graph, self.held = graph, self._options()

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            return self.launch(tokens, targets)
        if tokens.shape != self.batch[0].shape or self._options() != self.held:
            raise RuntimeError("another shape, parameter or option of the optimizer than captured: capture it again")
        self.batch[0].copy_(tokens)
        self.batch[1].copy_(targets)
        self.graph.replay()
        return self.loss.clone()

    def release(self) -> None:
        """Launch from now on, and give back the graph's memory."""
        self.graph = self.loss = None
        torch.cuda.empty_cache()

    def _options(self) -> list:
        """What the graph holds of the optimizer: parameters and other tensors by their place, options by value."""
        place = torch.Tensor.data_ptr
        groups = [group | {"params": list(map(place, group["params"]))} for group in self.optimizer.param_groups]
        tensors = [place(x) for group in groups for x in group.values() if isinstance(x, torch.Tensor)]
        return [id(self.optimizer.state), tensors, groups]
