"""What does fusion do to the backward graph?

Prediction: autograd keeps one node per differentiable operator. Causal attention by hand is two products of 4-D
tensors, each 2 expands + 2 reshapes + bmm + view = 6 nodes, and transpose, scale, mask, softmax: 16 nodes. Where batch
and heads merge by a copy, a reshape is two nodes: 3 more for q, k, v from batch 2 on. Fused attention is 1 node, so by
hand needs 18 nodes more (15 at batch 1; one more where the fused kernel returns heads in an order that merges without
a copy). A compiled block is 1 node in all. Nodes are operators, not numbers: the length changes none of this.
What they change is what the nodes save: by hand the softmax, one (B, H, T, T) tensor of B H T^2 x 4 bytes in FP32.
Source: PyTorch's notes on autograd mechanics (saved tensors); Dao et al., 2022, FlashAttention (no T^2 memory).

    python -m anatomy autograd [--batch B] [--seq T] [--dmodel C] [--nhead H] [--picture]
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections import Counter
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.exc import TorchDynamoException

from anatomy.attention_traffic import attention_by_hand
from anatomy.experiment import Refused, Result, Table, positive
from common.profile import backward_graph
from common.text import one_line


class CausalSelfAttention(nn.Module):
    """The ladder's attention block with the attention itself as an argument."""

    def __init__(self, n_embd: int, n_head: int, attention):
        super().__init__()
        self.n_head, self.attention = n_head, attention
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.qkv(x).split(C, dim=-1))
        return self.proj(self.attention(q, k, v).transpose(1, 2).reshape(B, T, C))


def observe(block: nn.Module, x: torch.Tensor) -> tuple[dict, int]:
    """The backward graph of one forward, and the bytes it saves, weights left out and each storage once."""
    saved, weights = {}, {p.untyped_storage().data_ptr() for p in block.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = block(x.requires_grad_())
    return backward_graph(y), sum(saved.values())


def draw(edges: dict, name: str) -> dict[str, str]:
    """Attachments: the graph in Graphviz's language, and as SVG where Graphviz is installed."""
    number = {node: i for i, node in enumerate(edges)}
    lines = [f'n{i} [shape=box, label="{type(node).__name__}"];' for node, i in number.items()]
    lines += [f"n{number[node]} -> n{number[n]};" for node, following in edges.items() for n in following]
    files = {f"{name}.dot": "\n".join(["digraph {", *lines, "}"])}
    if shutil.which("dot"):
        files[f"{name}.svg"] = subprocess.check_output(["dot", "-Tsvg"], input=files[f"{name}.dot"], text=True)
    return files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=positive, metavar="B", help="sequences in a batch (default 8; 2 in quick form)")
    parser.add_argument("--seq", type=positive, metavar="T", help="tokens in a sequence (default 1024; 128)")
    parser.add_argument("--dmodel", type=positive, default=256, metavar="C", help="channels (default 256)")
    parser.add_argument("--nhead", type=positive, default=4, metavar="H", help="heads, a divisor of C (default 4)")
    parser.add_argument("--picture", action="store_true", help="also draw the graphs: .dot files, .svg with Graphviz")


def run(args: argparse.Namespace) -> Result:
    B, T = args.batch or (2 if args.quick else 8), args.seq or (128 if args.quick else 1024)
    C, H, dtype = args.dmodel, args.nhead, args.dtype or torch.float32
    if C % H:
        raise Refused(f"--dmodel {C} is not divisible by --nhead {H}")
    shapes, found, pictures, sentences = [(B, T), (2 * B, T), (B, 2 * T), (1, T)], {}, {}, []
    for name in ("by hand", "fused", "compiled"):
        attention = attention_by_hand if name == "by hand" else partial(F.scaled_dot_product_attention, is_causal=True)
        block = CausalSelfAttention(C, H, attention).to(args.device, dtype)
        if name == "compiled":
            torch._dynamo.reset()
            block, shapes = torch.compile(block), shapes[:1]  # another shape would compile another graph
        try:
            seen = [observe(block, torch.randn(b, t, C, device=args.device, dtype=dtype)) for b, t in shapes]
        except TorchDynamoException as error:
            sentences.append(f"Compiled is missing: {one_line(error)}.")
            continue
        pictures |= draw(seen[0][0], f"autograd-{name.replace(' ', '-')}") if args.picture else {}
        cells = [{"nodes": len(edges), "saved_bytes": saved} for edges, saved in seen]
        found[name] = {"kinds": Counter(type(node).__name__ for node in seen[0][0]), "shapes": shapes, "cells": cells}
    hand, fused = found["by hand"]["cells"], found["fused"]["cells"]
    kinds = sorted(set().union(*(variant["kinds"] for variant in found.values())))
    named = re.compile(r"ScaledDotProduct\w*Backward0")
    sdpa = {kind: count for kind, count in found["fused"]["kinds"].items() if named.fullmatch(kind)}
    more = 18 if B > 1 else 15, hand[0]["nodes"] - fused[0]["nodes"]
    saved = B * H * T * T * dtype.itemsize, hand[0]["saved_bytes"] - fused[0]["saved_bytes"]
    one = found["compiled"]["cells"][0]["nodes"] if "compiled" in found else None
    figures = {"variants": found, "sdpa_nodes": sdpa, "more_nodes": more, "more_saved_bytes": saved}
    tables = [
        Table("Prediction and measurement", ["what", "predicted", "measured"], [
            ["nodes that by hand has more than fused", *map(str, more)],
            ["ScaledDotProduct*Backward0 nodes in fused", "1", str(sum(sdpa.values()))],
            ["nodes of the compiled block", "1", str(one or "-")],
            ["MB that by hand saves more than fused", *(f"{value / 1e6:.2f}" for value in saved)],
        ]),
        Table(f"Backward nodes of an attention block by kind, batch {B}, length {T}", ["kind", *found], [
            *([kind, *(str(v["kinds"][kind]) for v in found.values())] for kind in kinds),
            ["all", *(str(v["cells"][0]["nodes"]) for v in found.values())],
        ]),
        Table("The same for other shapes: nodes / MB saved for backward", ["shape", "by hand", "fused"], [
            [f"batch {b}, length {t}", *(f"{cell['nodes']} / {cell['saved_bytes'] / 1e6:.2f}" for cell in (h, f))]
            for (b, t), h, f in zip([(B, T), (2 * B, T), (B, 2 * T), (1, T)], hand, fused, strict=True)
        ]),
    ]  # fmt: skip
    same = all(len({cell["nodes"] for cell in cells[:3]}) == 1 for cells in (hand, fused))
    sentences += [
        f"Fused attention is the node {', '.join(sdpa)}; by hand the block has {more[1]} nodes more."
        if sdpa
        else "No ScaledDotProduct*Backward0 node: SDPA fell back to single operators for this dtype and device.",
        f"Twice the batch or length {'leaves' if same else 'does NOT leave'} the number of nodes as it is; what they "
        f"save by hand grows {hand[2]['saved_bytes'] / hand[0]['saved_bytes']:.1f}x with twice the length, fused "
        f"{fused[2]['saved_bytes'] / fused[0]['saved_bytes']:.1f}x.",
    ]
    if hand[3]["nodes"] != hand[0]["nodes"]:
        sentences.append(f"Batch 1 is the exception, {hand[3]['nodes']} nodes by hand: no copy merges batch and heads.")
    if one:
        sentences.append(f"Of the compiled block autograd sees {one} node{'' if one == 1 else 's'}.")
    return Result(tables, sentences, figures, pictures)
