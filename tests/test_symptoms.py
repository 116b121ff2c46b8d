"""docs/not-faster.md: its entries, the fields they name, the rows that point to them."""

import dataclasses
import re
import typing
from types import SimpleNamespace

import pytest
import runs
import torch
from conftest import ROOT
from test_page import Page

from common import benchmark
from common import record as r
from common.record import GpuState
from report import page, symptom_examples, symptoms, table

PAGE = (ROOT / "docs" / "not-faster.md").read_text()
ENTRIES = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def field_type(kind, name):
    """The type of a field of a dataclass, without None; KeyError where it has no such field."""
    hint = typing.get_type_hints(kind)[name]
    return next((one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)), None)


def test_every_title_has_an_entry_an_example_and_a_thread():
    assert tuple(ENTRIES) == symptoms.TITLES and set(symptom_examples.EXAMPLES) == set(symptoms.TITLES)
    for title, entry in ENTRIES.items():
        for part in ("See it", "Cause", "Mend", "Discussed"):
            assert f"- **{part}.**" in entry, title
        assert re.search(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)", entry), title
        assert f"[{title}](#{symptom_examples.anchor(title)})" in PAGE


@pytest.mark.parametrize("title", ENTRIES)
def test_the_fields_that_an_entry_names_are_in_the_record(title):
    told = re.search(r"See it\.\*\*(.*)", ENTRIES[title])[1]
    named = [name for name in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)*)`", told) if "_" in name or "." in name]
    for name in named:
        first, *rest = name.split(".")
        kind = r.Run if first in ("workload", "roofs", "environment") else r.Row
        for part in (first, *rest):
            kind = field_type(kind, part)


def signs(*rows, **environment):
    made = runs.run(*rows, **environment)
    return [title for title in symptoms.TITLES if any(f"“{title}”" in line for line in symptoms.pointers(made))]


def test_a_row_points_to_what_it_shows_and_a_fair_one_to_nothing():
    half, fp8 = r.Settings("bfloat16", captured=True), r.Settings("bfloat16", captured=True, fp8_recipe="x")
    fair = runs.step("2_a", settings=half)
    assert signs(fair, runs.step("3_b", 90.0, settings=fp8)) == []
    for title, row in {
        symptoms.SLOW_FP8: runs.step("4_b", 110.0, settings=fp8),
        symptoms.LARGE_FP8: runs.step("4_b", settings=fp8, peak_allocated_bytes=4 * 2**30),
        symptoms.INSTALL: runs.step("4_b", status="skipped", reason="transformer_engine does not import (x): pip"),
        symptoms.SLOW_COMPILE: runs.step("3_b", 110.0, settings=dataclasses.replace(half, compiled=True)),
        symptoms.ATTENTION: runs.step("2_b", settings=dataclasses.replace(half, attention_kernel="math")),
        symptoms.SLOW_AMP: runs.step(
            "1_b", settings=half, profile=runs.profile(100.0, categories=("matrix products", "copies and casts"))
        ),
        symptoms.HOST: runs.step("2_b", settings=half, profile=runs.profile(100.0, bound_by="launch")),
        symptoms.SYNC: runs.step("2_b", settings=half, host_syncs=2),
    }.items():
        assert signs(fair, row) == [title]
    casting = runs.profile(40.0, categories=("matrix products", "copies and casts"))
    assert signs(fair, runs.step("1_b", 40.0, settings=half, profile=casting)) == [], "it gained much all the same"
    wide = runs.step("3_b", 110.0, settings=dataclasses.replace(half, compiled=True))
    wide.timing.p25_ms = 99.0
    assert signs(fair, wide) == [], "not slower by more than its spread"
    for loss in ("nan", "inf"):
        alone = SimpleNamespace(world=SimpleNamespace(size=1), lr=1e-4)
        with pytest.raises(FloatingPointError) as raised:
            benchmark.mean_losses([torch.tensor(float(loss))], alone)
        assert signs(fair, runs.step("4_b", status="failed", reason=str(raised.value))) == [symptoms.NAN]
    launched = runs.step("2_b", settings=dataclasses.replace(half, captured=False))
    assert signs(fair, launched) == []
    launched.gpu_state = GpuState(while_running=False)
    assert signs(fair, launched) == [symptoms.HOST] and signs(fair, launched, device_type="cpu") == []
    launched.gpu_state, launched.timing.p75_ms = None, 150.0
    assert signs(fair, launched) == [symptoms.HOST] and signs(fair, launched, device_type="cpu") == []


def test_every_report_says_it():
    made = runs.run(runs.step("2_a", host_syncs=2))
    (line,) = symptoms.pointers(made)
    assert line == "2_a: the host waits 2 times a step: see docs/not-faster.md, “A sync in the loop”"
    assert line in table.render_text(made) and line in table.render_markdown(made)
    assert line in " ".join("".join(Page(page.render(made)).text).split())


def test_an_example_keeps_the_mark_of_a_doubted_time(tmp_path):
    rows = [
        runs.step(name, ms, profile=runs.profile(ms))
        for name, ms in (("3_compile", 50.0), ("4_transformer_engine", 80.0))
    ]
    rows[1].timing.step_ms = [80.0] * 10 + [100.0] * 10
    runs.write(runs.run(*rows), tmp_path / symptom_examples.GPU / "narrow")
    lines = symptom_examples.examples_table(tmp_path).splitlines()
    assert any("narrow: 3_compile 50.0 ms, 4_transformer_engine 80.0? (" in line for line in lines) and lines[
        -1
    ].startswith("? : see the serious")


def test_where_nothing_is_recorded_the_page_says_so(tmp_path):
    empty = symptom_examples.examples_table(tmp_path)
    assert empty.count("nothing is recorded") == len(symptoms.TITLES)
