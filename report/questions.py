"""A learner's path through anatomy/: which experiment shows which idea, and questions that the records answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from report import findings
from report.records import CPU, GPU, Records
from report.table import pipe_table

CONCEPTS = [  # idea, experiment, step of the ladder
    ("roofline, ridge point, memory-bound", "roofline", "0"),
    ("registers, L1, L2, DRAM, occupancy", "memory-hierarchy", "0"),
    ("strides and layout", "contiguity", "0"),
    ("what the host pays: dispatch, guards, warm-up", "host-cost", "0, 3"),
    ("waiting for the GPU", "sync-points", "0"),
    ("feeding the GPU", "input-pipeline", "0"),
    ("number formats and tensor cores", "precision", "1, 4"),
    ("loss scaling and initialization", "learning", "1"),
    ("fused attention", "attention", "2"),
    ("the backward graph", "autograd", "2"),
    ("fusion of pointwise code", "fusion", "3"),
    ("what a compiler rewrites", "rewrites", "3"),
    ("capturing a graph", "graph-capture", "3"),
    ("graph breaks", "graph-breaks", "3"),
    ("modes of a compiler, CUDA graphs", "compile-modes", "3"),
    ("what a technique gives", "techniques", "1, 2, 3"),
]


class Question(NamedTuple):
    text: str
    experiment: str
    answer: Callable[[Records], str]


def ridge(records: Records) -> str:
    record = records.experiments["roofline"]
    copy = record["copy_bytes_per_s"]
    return (
        f"{record['ridge']:.0f} FLOP per byte: products run at {record['ridge'] * copy / 1e12:.4g} TFLOP/s, and a copy "
        f"moves {copy / 1e12:.2f} TB/s."
    )


def relu_bound(records: Records) -> str:
    row = records.experiments["roofline"]["operations"]["ReLU"]
    reached = f"it has {row['intensity']:g} FLOP per byte and reaches {row['of_roof']:.0%} of its roof"
    return f"Its limit is {row['bound']}: {reached}."


def small_product(records: Records) -> str:
    rows = records.experiments["roofline"]["operations"]
    launch_s = next(row["launch_s"] for name, row in rows.items() if name.startswith("product n"))
    launch = f"On the smallest input the same call takes {launch_s * 1e6:.1f} us: its launch."
    found = findings.small_products(records)
    neither = "Neither arithmetic nor memory. The " if found.verdict == findings.FAILS else "Memory. The "
    return f"{neither}{found.measured}. {launch}"


def chain_bytes(records: Records) -> str:
    record = records.experiments["fusion"]
    eager, compiled = (record["cases"]["sigmoid(relu(x*w+b))"][form] for form in ("eager", "compiled"))
    before, after = (row["bytes"] / record["numbers"] for row in (eager, compiled))
    faster = eager["seconds"] / compiled["seconds"]
    return f"Four kernels move {before:.0f}N bytes and one {after:.0f}N, and the one is {faster:.2f} times as fast."


def tensor_cores(records: Records) -> str:
    products = records.experiments["precision"]["products"]
    ratios = {name: products["FP32"]["seconds"] / products[name]["seconds"] for name in ("TF32", "BF16", "FP8")
              if products[name]["seconds"]}  # fmt: skip
    times = [f"{ratio:.1f} times as fast in {name}" for name, ratio in ratios.items()]
    return f"They are {', '.join(times)}."


def long_attention(records: Records) -> str:
    results = records.experiments["attention"]["attention"]
    longest = max(results["by hand"], key=int)
    fused = min(rows[longest]["seconds"] for name, rows in results.items() if name != "by hand" and longest in rows)
    return f"At T {longest} it takes {results['by hand'][longest]['seconds'] / fused:.0f} times as long."


def other_branch(records: Records) -> str:
    tools = records.experiments["graph-capture"]["tools"]
    traced = tools["torch.jit.trace"]
    return (
        "The right result." if traced["other"] else "A wrong result, without an error: the graph holds one side only."
    )


def nodes(records: Records) -> str:
    fewer, shapes = findings.fewer_nodes(records).measured, findings.fixed_graph(records).measured
    return f"{fewer}. With other batches and lengths attention by hand has {shapes}."


def print_break(records: Records) -> str:
    case = records.experiments["graph-breaks"]["cases"]["print"]
    return f"It takes {case['broken_s'] / case['mended_s']:.1f} times as long as without the print."


def one_outlier(records: Records) -> str:
    recipes = records.experiments["precision"]["quantization"]["recipes"]
    others, itself = (", ".join(f"{row[key]:.1%} with {name}" for name, row in recipes.items())
                      for key in ("elsewhere", "outlier"))  # fmt: skip
    return f"Their relative error is {others}. That of the outlier itself is {itself}."


QUESTIONS = [
    Question("How many FLOPs can this card do in BF16 while it moves one byte?", "roofline", ridge),
    Question("What limits ReLU on 67 million numbers?", "roofline", relu_bound),
    Question("What limits a product of two (256, 256) matrices?", "roofline", small_product),
    Question("How many bytes does sigmoid(relu(x*w+b)) on N FP32 numbers move, as four kernels and as one?", "fusion",
             chain_bytes),
    Question("How many times faster than FP32 are products in TF32, BF16 and FP8?", "precision", tensor_cores),
    Question("How much longer does attention by hand take than fused, at the longest length?", "attention",
             long_attention),
    Question("`torch.jit.trace` records one branch of an `if` on the input. What does its graph give for the other?",
             "graph-capture", other_branch),
    Question("How many backward nodes does fused attention replace? Does the shape matter?", "autograd", nodes),
    Question("What does a `print` in the middle of a compiled function cost?", "graph-breaks", print_break),
    Question("With one outlier of 100 000, how wrong do the other rows of an FP8 tensor become?", "precision",
             one_outlier),
]  # fmt: skip


def path(results: Path) -> str:
    """The map of ideas, and the questions with folded answers."""
    pages = {name: _page(name, results) for _, name, _ in CONCEPTS}
    cells = [
        (idea, f"[`{name}`]({pages[name]})" if pages[name] else f"`{name}`", step) for idea, name, step in CONCEPTS
    ]
    records = Records.read(results / GPU)
    folded = [_folded(number, question, records) for number, question in enumerate(QUESTIONS, 1)]
    headers = ("idea", "experiment", "step of the ladder")
    return "\n\n".join([pipe_table(headers, cells, n_left=3), "### Ten questions", *folded])


def _page(name: str, results: Path) -> str | None:
    """The page of an experiment, from docs/: of the GPU, otherwise of the CPU; None where neither is recorded."""
    pages = (f"results/{machine}/anatomy/{name}.md" for machine in (GPU, CPU))
    return next((page for page in pages if (results.parent / page).exists()), None)


def _folded(number: int, question: Question, records: Records) -> str:
    answer = records.measured(question.answer, "nothing is recorded.")
    page = f"results/{GPU}/anatomy/{question.experiment}.md"
    return (
        f"{number}. {question.text}\n\n<details><summary>Measured</summary>\n\n{answer} [Record]({page})\n\n</details>"
    )
