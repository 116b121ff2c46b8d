"""Peer of 3_compile.py: nanoGPT's model, compiled whole, as its train.py does, and launched.

BF16 autocast and fused AdamW are those of 3_compile.py. The residual stream stays FP32, as autocast leaves
it. nanoGPT draws weights of its own, from the ladder's seed. Source: model.py and train.py of
karpathy/nanoGPT.

Run:      PYTHONPATH=nanoGPT python peers/nanogpt.py    Needs: a clone of karpathy/nanoGPT in this folder
"""

import importlib
import sys
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import hardware
from common.benchmark import measure
from common.text import Skip, import_or_skip

nanogpt = import_or_skip("model")  # the name of nanoGPT's own file
compiled_step = importlib.import_module("3_compile")


class NanoGPT(torch.nn.Module):
    """Takes the place of common.model.GPT in 3_compile.py. That script compiles each of `blocks` and then
    `head`: here there are no blocks, and the head is the whole model."""

    blocks = ()

    def __init__(self, config, block, head, seed, residual_dtype):  # block, head, dtype: unused
        super().__init__()
        torch.manual_seed(seed)
        shape = asdict(config)
        shape["block_size"] = shape.pop("seq_len")
        self.model = nanogpt.GPT(nanogpt.GPTConfig(**shape, dropout=0.0, bias=True))

    @property
    def head(self):
        return self  # so the whole model is compiled

    def forward(self, tokens, targets):
        _, loss = self.model(tokens, targets)
        return loss


def main(args):
    """Step 3 with another model. Returns train_step, model and optimizer."""
    if not hasattr(sys.modules.get("model"), "GPTConfig"):  # no module of this name, or not nanoGPT's
        raise Skip("nanoGPT's model.py does not import: PYTHONPATH must name a clone of karpathy/nanoGPT")
    hardware.CLONES["nanogpt"] = Path(nanogpt.__file__).parent
    compiled_step.GPT = NanoGPT
    train_step, model, optimizer, _ = compiled_step.main(args)
    return train_step, model, optimizer  # without `capture`: each kernel is launched, as train.py does


if __name__ == "__main__":
    measure(main)
