"""Peer of 4_transformer_engine.py: 3_compile.py with torchao's float8 training.

A block's four Linear layers are converted with the tensorwise recipe, which torchao calls its fastest: one
scale a tensor, found from the tensor itself. The head stays BF16, as in torchao's example. Source: torchao's
page "Training" and Float8LinearRecipeName.

Run:      python peers/torchao_float8.py            Needs: pip install torchao
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.benchmark import measure
from common.text import import_or_skip

float8 = import_or_skip("torchao.float8", "torchao")
compiled_step = importlib.import_module("3_compile")
Block = compiled_step.Block  # kept, since main puts another one in its place


def converted(module):
    """A module whose nn.Linear layers, all of them, multiply FP8 from now on."""
    recipe = float8.Float8LinearConfig.from_recipe_name("tensorwise")
    return float8.convert_to_float8_training(module, config=recipe)


def float8_block(config):
    """Takes the place of step 3's Block."""
    return converted(Block(config))


def main(args):
    """Step 3 with other blocks. Returns what a step does. Raises Skip where the device has no FP8."""
    args.require_fp8()
    compiled_step.Block = float8_block
    return compiled_step.main(args)


if __name__ == "__main__":
    measure(main)
