"""What a recorded time depends on: code may move, be imported otherwise and be annotated; what runs
counts."""

import re
import shutil

import pytest
from conftest import ROOT

from common import fingerprint
from report.changes import code_of

SAMPLE = '''"""Doc."""
from __future__ import annotations

import math, torch.nn.functional as F
from dataclasses import dataclass
from common import parallel
from common.benchmark import measure
from common.text import import_or_skip

te = import_or_skip("transformer_engine.pytorch", "transformer-engine[pytorch]")
A, *B = 1, 2.5, -3e-5, None, b"x", "text", ...


@dataclass
class Shape:
    """Doc."""

    width: int
    depth: int = 3


def f(x: int, /, *args: str, key=A, **more) -> float:
    """Doc."""
    say(f"{x!r:>{A}} is told")
    if not 0 < x <= 1:
        raise ValueError(f"{x} is wrong")
    with torch.no_grad() as y, open("x"):
        z = [i for i in range(3) if i] + [*args, {**more}, {1: 2}]
    try:
        x @= te.Linear(F.gelu(y), bias=True)[..., 1:2]
    except (OSError, ValueError) as error:
        return lambda a, b=2: a if b else math.inf
    match z:
        case [1, *rest] if rest:
            progress("a message")
        case _:
            del z
    return f"{x + 1:{A}}" "joined" f"{x!r:>{w}.{p}}"


if __name__ == "__main__":
    launch(f)
'''
SAMPLE_SHA256 = "99332c9f9189a12b"  # of any Python from 3.10 on


def sha256(source, root=ROOT, by=fingerprint.ROOTS):
    return fingerprint.row_sha256(source, root, by)


def test_the_serializer_writes_the_same_text_on_every_python():
    assert sha256(SAMPLE, by=()) == SAMPLE_SHA256


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ('"""Doc."""\nfrom', '"""Other."""\nfrom', False),
        ("is told", "is said", False),
        ("is wrong", "is odd", False),
        ("x: int, /", "x: float, /", False),
        (") -> float", ") -> int", False),
        ("    width: int\n", "    width: float\n", False),
        ("    width: int\n", "    breadth: int\n", True),
        ("depth: int = 3", "depth: int = 4", True),
        ("torch.nn.functional as F\n", "torch.nn.functional as G\n", True),  # F is nothing now
        ("math, torch.nn.functional as F\n", "math\nfrom torch.nn import functional as F\n", False),
        ("F.gelu(y)", "F.relu(y)", True),
        ('"transformer_engine.pytorch"', '"another.pytorch"', True),
        ("2.5", "2.6", True),
        ("launch(f)", "launch(f, 1)", False),
        ("def f(x", "def g(x", True),
    ],
)
def test_what_counts_of_a_script(old, new, changes):
    assert SAMPLE.count(old) == 1
    assert (sha256(SAMPLE.replace(old, new), by=()) != sha256(SAMPLE, by=())) is changes


@pytest.fixture
def checkout(tmp_path):
    """A copy of what a row's hash may cover."""
    (tmp_path / "common").mkdir()
    for path in [*ROOT.glob("[0-9]_*.py"), *ROOT.glob("common/*.py")]:
        (tmp_path / path.relative_to(ROOT)).write_text(path.read_text())
    return tmp_path


def rows_that_change(checkout):
    """The scripts and peers whose hash another checkout changes."""
    names = [path.relative_to(ROOT) for path in (*ROOT.glob("[0-9]_*.py"), *ROOT.glob("peers/*.py"))]
    here = {name: sha256((ROOT / name).read_text()) for name in names}
    there = {}
    for name in names:
        text = (checkout / name if (checkout / name).exists() else ROOT / name).read_text()
        there[name] = sha256(text, checkout)
    return sorted(name.stem for name in names if here[name] != there[name])


ALL = sorted(path.stem for path in (*ROOT.glob("[0-9]_*.py"), *ROOT.glob("peers/*.py")))
OF_STEP_3 = ["3_compile", "nanogpt", "torchao_float8", "transformers_gpt2"]  # and te_layer has its own `main`


@pytest.mark.parametrize(
    ("file", "old", "new", "rows"),
    [
        ("common/text.py", "def one_line", "def another", []),  # no timed step runs through it
        ("common/profile.py", "PROFILED_STEPS, LONG_STEP_MS", "PROFILED, LONG_STEP_MS", []),  # it observes
        ("common/benchmark.py", "# between questions", "# now and then, between questions", []),
        ("common/clock.py", "def launch_us(device: torch.device)", "def launch_us(device)", []),
        ("common/benchmark.py", "the step cannot be captured", "no capture", []),  # of a raise
        ("common/benchmark.py", "capturing a step as", "making it", []),  # of progress
        ("common/benchmark.py", "SETTLING_S = 6", "SETTLING_S = 7", ALL),
        ("common/benchmark.py", "REHEARSED = 10", "REHEARSED = 11", ALL),
        (
            "common/hardware.py",
            "torch.cuda.power_draw(device) / 1e3",
            "1.0",
            ALL,
        ),  # read while steps are timed
        ("common/data.py", "HELDOUT_SHARE, HELDOUT_SEQUENCES = 0.05", "HELDOUT_SHARE, X = 0.04", ALL),
        ("common/model.py", "residual_std = 0.02", "residual_std = 0.03", ALL),
        ("common/options.py", "WARMUP, DDP_WARMUP = 3, 11", "WARMUP, DDP_WARMUP = 1, 11", ALL),
        ("common/options.py", "self.steps + 1, whole_batch", "1, whole_batch", ALL),
        ("common/clock.py", "import torch\n", "import torch\n\ntorch.backends.cudnn.benchmark = True\n", ALL),
        ("2_sdpa.py", "betas", "beta", ["2_sdpa"]),
        ("3_compile.py", "Step 3: blocks", "Step 3: all blocks", []),
        ("3_compile.py", "fullgraph=True", "fullgraph=False", OF_STEP_3),
    ],
)
def test_the_rows_that_an_edit_makes_stale(file, old, new, rows, checkout):
    text = (checkout / file).read_text()
    assert text.count(old) == 1
    (checkout / file).write_text(text.replace(old, new))
    assert rows_that_change(checkout) == rows


def test_a_definition_may_move_between_modules_and_be_imported_otherwise(checkout):
    benchmark, steps = (checkout / "common" / f"{name}.py" for name in ("benchmark", "steps"))
    text = benchmark.read_text()
    moved = re.search(r"(?ms)^class Training:.*?(?=^def measure_row)", text)[0]
    text = text.replace(moved, "").replace(
        "import torch\n\n", "import torch\n\nfrom common import steps as s\n"
    )
    benchmark.write_text(text.replace("Training(train_step", "s.Training(train_step"))
    steps.write_text(f"from collections.abc import Callable\nimport torch\n\n{moved}")
    script = checkout / "2_sdpa.py"
    text = script.read_text().replace(
        "from common import parallel\n", "from common.parallel import distribute\n"
    )
    script.write_text(text.replace("parallel.distribute(", "distribute("))
    assert rows_that_change(checkout) == []


@pytest.mark.parametrize(
    ("module", "changed"),
    [
        ("def g(): return {}\n\ndef rehearse(g=g): return g()\n", "1"),  # a default is read outside
        ("g = {}\ndef rehearse(): return [g for g in ()], g\n", "1"),  # a comprehension has its own names
        ("if x:\n    def g(): return {}\n\ndef rehearse(): return g()\n", "1"),
        ("async def g(): return {}\n\ndef rehearse(): return g()\n", "1"),
        ("@g({})\ndef rehearse(): pass\n", "1"),
    ],
)
def test_what_a_root_reaches_counts(module, changed, tmp_path):
    def hashed(value):
        (folder := tmp_path / value / "common").mkdir(parents=True)
        (folder / "a.py").write_text(module.replace("{}", value))
        return sha256("", folder.parent, ("rehearse",))

    assert hashed("0") != hashed(changed)


def test_a_module_beside_the_steps_counts_where_one_imports_it(checkout):
    step = "from helper import twice\n\n\ndef main():\n    return twice(1)\n"
    hashes = []
    for factor, other in ((2, 1), (2, 2), (3, 2)):
        text = f"def twice(x):\n    return {factor} * x\n\n\ndef other():\n    return {other}\n"
        (checkout / "helper.py").write_text(text)
        fingerprint.read_modules.cache_clear()
        hashes.append(sha256(step, checkout))
    assert hashes[0] == hashes[1] != hashes[2] and rows_that_change(checkout) == []
    fingerprint.read_modules.cache_clear()


def test_a_star_import_is_refused():
    with pytest.raises(ValueError, match=r"from x import \*"):
        sha256("from x import *")


def test_two_definitions_of_one_root_are_refused(checkout):
    (checkout / "common" / "more.py").write_text("def rehearse():\n    pass\n")
    with pytest.raises(ValueError, match="common/ has 2 definitions of rehearse, and not one"):
        sha256("x = 1", checkout)


@pytest.mark.parametrize("text", ["x = (", "from math import *\n"])
def test_a_step_that_is_being_written_ends_no_other_row(text, tmp_path):
    shutil.copytree(ROOT / "common", tmp_path / "common")
    (tmp_path / "5_mine.py").write_text(text)
    (tmp_path / ".#2_sdpa.py").symlink_to("me@host.1:2")  # as Emacs marks a file that it has not saved
    (tmp_path / "common" / ".#data.py").symlink_to("me@host.1:2")
    fingerprint.read_modules.cache_clear()
    source = (ROOT / "2_sdpa.py").read_text()
    assert fingerprint.row_sha256(source, tmp_path) == fingerprint.row_sha256(source, ROOT)
    with pytest.raises((SyntaxError, ValueError)):
        fingerprint.row_sha256(text, tmp_path)


def test_the_code_of_a_source_has_no_comments_and_docstrings():
    source = '"""Doc."""\n\nx = 1  # one\n\n\ndef f():\n    """More."""\n    return "text"\n'
    assert code_of(source) == ["x = 1", "def f():", '    return "text"'] and code_of("def broken(:") == []
