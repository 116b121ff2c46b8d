"""What does fusion do to the backward graph?

Predict: how many backward nodes does an attention layer have with attention by hand, with fused attention, and
compiled? Which of these counts changes with the batch or the length?

Prediction: autograd keeps one node for each differentiable operator. Causal attention by hand has two products of 4-D
tensors. Each product is 2 expands, 2 reshapes, a bmm and a view, which is 6 nodes. Transpose, scale, mask and softmax
bring the sum to 16 nodes. A reshape is two nodes where it merges batch and heads by a copy, which adds 3 nodes for
q, k, v from batch 2 and 2 heads on. Fused attention is 1 node. So attention by hand needs 18 nodes more, and 15 at
batch 1. It needs one more where the fused kernel returns the heads in an order that merges without a copy. The order is
looked up first. A compiled layer is 1 node.

The length changes none of these counts, because nodes are operators and not numbers. It changes what the nodes save:
by hand they save the softmax, a (B, H, T, T) tensor of B H T^2 x 4 bytes in FP32.

Change: --batch 1, --nhead 8 and --seq 2048, one after the other: which counts change, and which bytes?
Source: PyTorch's notes on autograd mechanics (saved tensors); Dao et al., 2022, FlashAttention (no T^2 memory).
Run:    python -m anatomy autograd [--batch B] [--seq T] [--dmodel C] [--nhead H] [--picture]
"""

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

from anatomy.attention_forms import attention_by_hand
from anatomy.experiment import Check, Refused, Result, Table, size_argument, table
from common.profile import backward_graph
from common.text import one_line

SDPA_NODE = re.compile(r"ScaledDotProduct\w*Backward0")


class CausalSelfAttention(nn.Module):
    """The attention layer of the training scripts, with the attention itself as an argument."""

    def __init__(self, n_embd: int, n_head: int, attention):
        super().__init__()
        self.n_head, self.attention = n_head, attention
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.qkv(x).split(C, dim=-1))
        return self.proj(self.attention(q, k, v).transpose(1, 2).reshape(B, T, C))


def observe(block: nn.Module, x: torch.Tensor) -> tuple[dict, int]:
    """The backward graph of one forward, and the bytes it saves. Weights do not count, shared memory counts once."""
    saved, weights = {}, {p.untyped_storage().data_ptr() for p in block.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = block(x.requires_grad_())
    return backward_graph(y), sum(saved.values())


def draw(edges: dict, name: str) -> dict[str, str]:
    """Attachments: the graph as a .dot file for Graphviz, and as SVG where Graphviz is installed."""
    number = {node: i for i, node in enumerate(edges)}
    lines = [f'n{i} [shape=box, label="{type(node).__name__}"];' for node, i in number.items()]
    lines += [f"n{number[node]} -> n{number[n]};" for node, following in edges.items() for n in following]
    files = {f"{name}.dot": "\n".join(["digraph {", *lines, "}"])}
    if shutil.which("dot"):
        files[f"{name}.svg"] = subprocess.check_output(["dot", "-Tsvg"], input=files[f"{name}.dot"], text=True)
    return files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size_argument(parser, "--batch B", "sequences in a batch (default 8, quick 2)")
    size_argument(parser, "--seq T", "tokens in a sequence (default 1024, quick 128)")
    size_argument(parser, "--dmodel C", "channels (default 256)", default=256)
    size_argument(parser, "--nhead H", "heads, a divisor of C (default 4)", default=4)
    parser.add_argument("--picture", action="store_true", help="also draw the graphs: .dot files, .svg with Graphviz")


def run(args: argparse.Namespace) -> Result:
    B, T = args.batch or (2 if args.quick else 8), args.seq or (128 if args.quick else 1024)
    C, H, dtype = args.dmodel, args.nhead, args.dtype or torch.float32
    if C % H:
        raise Refused(f"--dmodel {C} is not divisible by --nhead {H}")
    shapes = [(B, T), (2 * B, T), (B, 2 * T), (1, T)]
    q = torch.randn(B, T, H, C // H, device=args.device, dtype=dtype, requires_grad=True).transpose(1, 2)
    in_order = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).is_contiguous()
    predicted = (15 if 1 in (B, H) else 18) + (in_order and H > 1)  # with one head no form needs a copy
    variants, pictures, sentences = {}, {}, []
    for name in ("by hand", "fused", "compiled"):
        attention = attention_by_hand if name == "by hand" else partial(F.scaled_dot_product_attention, is_causal=True)
        block = CausalSelfAttention(C, H, attention).to(args.device, dtype)
        if name == "compiled":
            torch._dynamo.reset()
            block, shapes = torch.compile(block), shapes[:1]  # another shape would compile another graph
        try:
            graphs = [observe(block, torch.randn(b, t, C, device=args.device, dtype=dtype)) for b, t in shapes]
        except TorchDynamoException as error:
            sentences.append(f"The compiled layer is missing: {one_line(error)}.")
            continue
        first_graph = graphs[0][0]
        pictures |= draw(first_graph, f"autograd-{name.replace(' ', '-')}") if args.picture else {}
        cells = [{"nodes": len(edges), "saved_bytes": saved} for edges, saved in graphs]
        kinds = Counter(type(node).__name__ for node in first_graph)
        variants[name] = {"kinds": kinds, "shapes": shapes, "cells": cells}
    hand, fused = (variants[name]["cells"][0] for name in ("by hand", "fused"))
    compiled = variants["compiled"]["cells"][0]["nodes"] if "compiled" in variants else None
    figures = {
        "variants": variants,
        "sdpa_nodes": {kind: n for kind, n in variants["fused"]["kinds"].items() if SDPA_NODE.fullmatch(kind)},
        "more_nodes": (predicted, hand["nodes"] - fused["nodes"]),
        "more_saved_bytes": (B * H * T * T * dtype.itemsize, hand["saved_bytes"] - fused["saved_bytes"]),
    }
    return Result(
        tables(figures), sentences + conclusions(figures, compiled), figures, checks(figures, compiled), pictures
    )


def checks(figures: dict, compiled: int | None) -> list[Check]:
    more_bytes = [n / 1e6 for n in figures["more_saved_bytes"]]
    return [
        Check("nodes that by hand has more than fused", *figures["more_nodes"], ""),
        Check("ScaledDotProduct*Backward0 nodes in fused", 1, sum(figures["sdpa_nodes"].values()), ""),
        *([Check("nodes of the compiled layer", 1, compiled, "")] if compiled else []),
        Check("what by hand saves more than fused", *more_bytes, "MB"),
    ]


def tables(figures: dict) -> list[Table]:
    variants = figures["variants"]
    hand, fused = variants["by hand"], variants["fused"]
    kinds = sorted(set().union(*(variant["kinds"] for variant in variants.values())))
    by_kind = [{"kind": kind} | {name: v["kinds"][kind] for name, v in variants.items()} for kind in kinds]
    by_kind.append({"kind": "all"} | {name: v["kinds"].total() for name, v in variants.items()})
    by_shape = []
    for (b, t), *cells in zip(hand["shapes"], hand["cells"], fused["cells"], strict=True):
        shown = (f"{cell['nodes']} / {cell['saved_bytes'] / 1e6:.2f}" for cell in cells)
        by_shape.append(dict(zip(("shape", "by hand", "fused"), (f"batch {b}, length {t}", *shown), strict=True)))
    return [
        table(f"Backward nodes of an attention layer by kind, {by_shape[0]['shape']}", by_kind),
        table("The same for other shapes: nodes / MB saved for backward", by_shape),
    ]


def conclusions(figures: dict, compiled: int | None) -> list[str]:
    hand, fused = (figures["variants"][name]["cells"] for name in ("by hand", "fused"))
    same = all(len({cell["nodes"] for cell in cells[:3]}) == 1 for cells in (hand, fused))
    growth = [cells[2]["saved_bytes"] / cells[0]["saved_bytes"] for cells in (hand, fused)]
    lines = [
        f"Fused attention is the node {', '.join(figures['sdpa_nodes'])}. By hand the layer has "
        f"{figures['more_nodes'][1]} nodes more."
        if figures["sdpa_nodes"]
        else "There is no ScaledDotProduct*Backward0 node: for this dtype and device SDPA runs as single operators.",
        f"Twice the batch or length {'leaves' if same else 'does NOT leave'} the number of nodes as it is. With twice "
        f"the length, the bytes that they save grow {growth[0]:.1f}x by hand and {growth[1]:.1f}x fused.",
    ]
    if hand[3]["nodes"] != hand[0]["nodes"]:
        lines.append(f"Batch 1 has {hand[3]['nodes']} nodes by hand, because no copy merges batch and heads.")
    return lines + ([f"Nodes of the compiled layer, for autograd: {compiled}."] if compiled else [])
