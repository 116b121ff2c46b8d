"""docs/guide.md: its blocks of Python run in order and prove what they say; a fault in one is noticed."""

import functools
import json
import re
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT, run_python
from te_signatures import te_calls

GUIDE = ROOT / "docs" / "guide.md"
CUDA = torch.cuda.is_available()
RecompileLimit = torch._dynamo.exc.FailOnRecompileLimitHit


class Block(NamedTuple):
    line: int
    gpu: bool
    source: str


def sections():
    """The blocks of each part that has any."""
    parts, text = {}, GUIDE.read_text()
    for found in re.finditer(r"^```python( gpu)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before = text[: found.start()]
        block = Block(before.count("\n") + 1, bool(found[1]), found[2])
        parts.setdefault(re.findall(r"^## (.*)$", before, re.MULTILINE)[-1], []).append(block)
    return parts


PARTS = sections()
MODEL = next(iter(PARTS.values()))[0]


def run(part, gpu=False, changed=("", "")):
    """Run the blocks of a part after the model, which the first block of all defines; with one text
    replaced."""
    names: dict = {}
    for block in dict.fromkeys((MODEL, *PARTS[part])):
        if gpu or not block.gpu:
            source = block.source.replace(*changed) if changed[0] else block.source
            exec(compile("\n" * block.line + source, str(GUIDE), "exec"), names)
    return names


@pytest.fixture(autouse=True)
def compiled_by_tracing_alone(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=8):  # a new process has it; other tests raise it
        yield
    torch.compiler.reset()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# Before the tests without a GPU: torch remembers whether it has seen one.
@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("part", [part for part in PARTS if any(block.gpu for block in PARTS[part])])
def test_what_the_guide_says_is_true_on_a_gpu(part, monkeypatch):
    from test_gpu import fp8_reason

    if part.startswith("4.") and (reason := fp8_reason()):
        pytest.skip(reason)
    monkeypatch.undo()  # compiled as a reader compiles
    names = run(part, gpu=True)
    if part.startswith("4."):
        multiplied = [loss_in_fp8(names, enabled) for enabled in (True, False)]
        assert multiplied[0] != multiplied[1], "FP8 ran, and not BF16"


def loss_in_fp8(names, enabled):
    with torch.autocast("cuda", torch.bfloat16), names["te"].autocast(enabled=enabled):
        return names["model"](*names["batch"](0)).item()


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_what_the_guide_says_is_true(part, on_a_cpu):
    run(part)


FAULTS = [
    ("1.", "loss = model(x, y) / parts", "loss = model(x, y)"),
    ("1.", "with amp:\n    fresh = layer(x)", "fresh = stale"),
    ("2.", "/ math.sqrt(q.size(-1))", ""),
    ("2.", ", value=-100", ""),
    (
        "2.",
        "generated = F.scaled_dot_product_attention(last, k, v, enable_gqa=True)",
        "generated = attend(last, k, v)",
    ),
    ("3.", "model.compile(fullgraph=True)", "model = torch.compile(model)"),
    ("3.", "torch._dynamo.config.recompile_limit = 2 * len(layers)", "pass"),
    ("3.", "model.load_state_dict(saved)", ""),
    ("3.", 'name.replace("_orig_mod.", "")', "name"),
    ("3.", " if not (name.endswith(masks) and plain[name].dim() > 1)", ""),
    ("3.", " and plain[name].dim() > 1", ""),
    ("3.", '(".mask", ".attn.bias")', '".mask"'),
    ("Several", "(model(x, y) / 2).backward()", "model(x, y).backward()"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "part, right, wrong", FAULTS, ids=[f"{part} {right[:30]}" for part, right, _ in FAULTS]
)
def test_a_fault_in_a_block_is_noticed(part, right, wrong, on_a_cpu):
    (name,) = (name for name in PARTS if name.startswith(part))
    assert any(right in block.source for block in PARTS[name])
    with pytest.raises((AssertionError, AttributeError, RecompileLimit, RuntimeError)):
        run(name, changed=(right, wrong))


@pytest.mark.slow
def test_a_checkpoint_of_a_plain_optimizer_is_resumed(on_a_cpu):
    (part,) = (part for part in PARTS if part.startswith("3."))
    names = run(part)
    plain = torch.optim.AdamW(names["new"]().parameters(), lr=1e-2)
    plain.load_state_dict(names["resumed"]["optimizer"])
    plain.param_groups[0].update(fused=False, capturable=False, lr=1e-2)
    checkpoint = {"model": names["resumed"]["model"], "optimizer": plain.state_dict()}
    continued = names["train_from"](checkpoint, 20, 23)
    group = continued["optimizer"]["param_groups"][0]
    assert isinstance(group["lr"], torch.Tensor) and group["fused"]


UNEQUAL = """
import re, sys, torch, torch.distributed as dist
from pathlib import Path
guide = Path(sys.argv[1]).read_text()
exec(re.search(r"def mean_over_processes.*?return [^\\n]*", guide, re.DOTALL)[0])
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(6, 4)
alone = torch.nn.Linear(4, 4)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model.module.load_state_dict(alone.state_dict())
targets = torch.tensor([1, 0, 2, -100, -100, 3])
halves = x.chunk(2)[dist.get_rank()], targets.chunk(2)[dist.get_rank()]
torch.nn.functional.cross_entropy(alone(x), targets).backward()
same = []
for mean in (mean_over_processes, lambda total, own: total / (own != -100).sum()):
    model.zero_grad()
    total = torch.nn.functional.cross_entropy(model(halves[0]), halves[1], reduction="sum")
    mean(total, halves[1]).backward()
    same.append(torch.allclose(model.module.weight.grad, alone.weight.grad, atol=1e-6))
dist.destroy_process_group()
assert same == [True, False], "as the guide says, and with a mean of each process alone"
"""


@pytest.mark.slow
def test_two_processes_with_unequal_targets_have_the_gradient_of_one(tmp_path):
    (tmp_path / "driver.py").write_text(UNEQUAL)
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "localhost"]
    ran = run_python(*run, tmp_path / "driver.py", GUIDE, timeout=600)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize("version", ["2.9.0", "2.20.2"])
def test_transformer_engine_has_what_the_guide_calls(version):
    signatures = json.loads((ROOT / "tests" / "data" / f"te-{version}.json").read_text())
    found = te_calls("\n".join(block.source for blocks in PARTS.values() for block in blocks))
    assert {name for name, _ in found} >= {
        "LayerNormLinear",
        "Linear",
        "LayerNormMLP",
        "autocast",
        "is_fp8_available",
    }
    for name, call in found:
        accepted = {*signatures[name]["parameters"], *signatures[name]["keyword_only"]}
        assert {keyword.arg for keyword in call.keywords if keyword.arg} <= accepted, name
