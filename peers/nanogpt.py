"""Peer of 3_compile.py: nanoGPT's model, compiled whole, as its train.py does, and launched.

BF16 autocast and fused AdamW are step 3's; the residual stream stays FP32, as autocast leaves it. The weights
begin with nanoGPT's own numbers, from the ladder's seed. Source: model.py and train.py of karpathy/nanoGPT.

Run:      PYTHONPATH=nanoGPT python peers/nanogpt.py    Needs: git clone the repository of karpathy/nanoGPT
"""

import importlib
import sys
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.benchmark import import_or_skip, launch
from common.text import Skip

nanogpt = import_or_skip("model")
step = importlib.import_module("3_compile")


class Whole(torch.nn.Module):
    blocks = ()
    head = property(lambda model: model)  # the one part that step 3 compiles

    def __init__(self, config, block, head, seed, residual_dtype):
        super().__init__()
        torch.manual_seed(seed)
        shape = asdict(config)
        self.model = nanogpt.GPT(nanogpt.GPTConfig(shape.pop("seq_len"), **shape, dropout=0.0, bias=True))

    def forward(self, tokens, targets):
        return self.model(tokens, targets)[1]


def main(args):
    if not hasattr(sys.modules.get("model"), "GPTConfig"):
        raise Skip("nanoGPT's model.py does not import: PYTHONPATH must name a clone of karpathy/nanoGPT")
    step.GPT = Whole
    return step.main(args)[:3]  # without `capture`: launched


if __name__ == "__main__":
    launch(main)
