"""Several optimizers as one, as a file may return them: Muon for matrices, AdamW for the rest."""

import torch


class Optimizers:
    """What a training step, its rehearsal and the proof use of an optimizer, of all of them in turn."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> dict:
        """The states of all weights; each is the optimizer's own."""
        return {weight: state for each in self.optimizers for weight, state in each.state.items()}

    def register_step_pre_hook(self, hook):
        """Before the first of them steps, when every weight has its gradient."""
        return self.optimizers[0].register_step_pre_hook(hook)


def each_of(optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that a training step has."""
    return getattr(optimizer, "optimizers", [optimizer])
