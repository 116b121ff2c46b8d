"""Peer of 4_transformer_engine.py: the compiled step 3 with torchao's float8 training.

A block's four Linear layers are converted with the tensorwise recipe, which torchao calls its fastest. The
head stays BF16, as in torchao's example. All else is step 3's. Source: torchao's page "Training" and
Float8LinearRecipeName.

Run:      python peers/torchao_float8.py            Needs: pip install torchao
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.benchmark import import_or_skip, launch

float8 = import_or_skip("torchao.float8", "torchao")
step = importlib.import_module("3_compile")
Block, Head = step.Block, step.Head


def converted(part):
    recipe = float8.Float8LinearConfig.from_recipe_name("tensorwise")
    return float8.convert_to_float8_training(part, config=recipe)


def main(args):
    args.require_fp8()
    step.Block = lambda config: converted(Block(config))
    return step.main(args)


if __name__ == "__main__":
    launch(main)
