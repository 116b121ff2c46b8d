"""Peer of 3_compile.py: GPT-2 of Hugging Face transformers, tuned as its documentation tells.

SDPA attention, torch.compile over model and loss, no dropout; launched, as a Trainer launches it. Autocast
and AdamW are step 3's; the residual stream stays FP32. The weights begin with the ladder's numbers. Under its
own name compiled SDPA attention gets a mask (huggingface/transformers issue 48925); under another it gets
none and passes is_causal.
Source: transformers' pages GPT-2, "GPU" (efficient training) and AttentionInterface.

Run:      python peers/transformers_gpt2.py         Needs: pip install transformers
"""

import importlib
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.benchmark import import_or_skip, launch
from common.model import GPT

transformers = import_or_skip("transformers", "transformers")
step = importlib.import_module("3_compile")


class Whole(torch.nn.Module):
    blocks = ()
    head = property(lambda model: model)  # the one part that step 3 compiles

    def __init__(self, config, block, head, seed, residual_dtype):
        super().__init__()
        attentions = transformers.AttentionInterface()
        attentions.register("sdpa_without_mask", attentions["sdpa"])
        shape = asdict(config) | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        shape |= {
            "n_positions": shape.pop("seq_len"),
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": False,
        }
        theirs = transformers.GPT2Config(**shape, attn_implementation="sdpa_without_mask")
        self.model, ladder = transformers.GPT2LMHeadModel(theirs), GPT(config, block, head, seed)
        with (
            torch.no_grad()
        ):  # both list the same parameters in the same order; matrices of its Conv1D are transposed
            for (name, weight), ours in zip(self.model.named_parameters(), ladder.parameters(), strict=True):
                weight.copy_(ours.T if ".c_" in name and ours.dim() == 2 else ours)

    def forward(self, tokens, targets):
        logits = self.model(tokens).logits  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(args):
    step.GPT = Whole
    return step.main(args)[:3]  # without `capture`: launched


if __name__ == "__main__":
    launch(main)
