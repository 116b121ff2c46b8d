"""Figures against numbers from the head; what tables, page, studies and the command make of them."""

import ast
import json
import os
import re
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import runs
from conftest import run_python

from common import fingerprint
from common.kernels import in_words
from common.record import CATEGORIES, Row, Settings, Study
from predict import errors
from report import (
    ablations,
    changes,
    charts,
    compare,
    documents,
    page,
    parity,
    picture,
    scaling,
    sentences,
    story,
    studies,
    sweep,
    table,
)
from report.__main__ import render
from report.figures import derive, derive_study, loss_rule
from report.load import RecordError, load
from report.page import render as page_of
from report.page import time_bars
from report.peaks import peak_flops_per_s
from report.promises import contradiction

sys.path.insert(0, str(runs.ROOT / "docs"))
import tables

PINS = (runs.ROOT / "requirements.txt").read_text()

# --- figures --------------------------------------------------------------------------------------


def test_the_figures_of_a_row_are_what_its_record_says():
    rows = [runs.row("0_baseline", 200.0, profile=runs.profile(200.0)), runs.row("1_cublas", 100.0)]
    fields = {"predicted_ms": 45.0, "power_w": 400.0, "loss": [5.0] * 5 + [3.0, 1.0, 2.0, 1.0, 3.0]}
    third = runs.row("2_sdpa", 50.0, profile=runs.profile(50.0), **fields)
    peer = runs.row("p", 40.0)
    figures = derive(runs.run(*rows, third, peers=[peer], measured=runs.roofs()))
    line = figures.lines[2]
    assert "|".join(table.limit_rows(figures)[2].values()) == "2_sdpa|36|compute 90%|16% of BF16|102|45.0|1.5"
    assert line.mfu is None, "of a device that is not known"
    assert table.limit_rows(figures)[0]["of roof"] == "40% of FP32"
    assert " ".join(table.main_rows(figures)[2].values()) == "2_sdpa 50.0 40,960 160 2.00 4.00 1.00 3.0 2.000"
    assert " ".join(table.category_rows(figures)[1].values()) == "2_sdpa 35.0 10.0 2.5 2.5 50.0"
    assert [*table.roof_rows(figures.run.roofs)[0].values()] == ["FP32", "90", "100"]
    assert sum(line.category_ms.values()) == pytest.approx(50.0) and [*line.category_ms] == [
        *CATEGORIES,
        "gaps",
    ]
    assert line.share == ("compute", pytest.approx(0.9)) and figures.lines[0].share == (
        "compute",
        pytest.approx(0.7),
    )
    assert [*table.main_rows(figures)[3].values()][4:7] == ["-", "5.00", "1.25"]
    assert figures.remarks == [] and not figures.busy and not any(one.mark for one in figures.lines)
    figures = derive(runs.run(third, work=runs.workload(gpus=4, parallel="ddp")))
    four, said = figures.lines[0], "4 processes: tokens/s are of all, TFLOP/s and GiB of each"
    assert (four.tokens_per_s, four.flops_per_s, four.tokens_per_joule) == (
        4 * 40960.0,
        1.6e14,
        line.tokens_per_joule,
    )
    assert figures.remarks == [said]


@pytest.mark.parametrize(
    ("around", "busy"),
    [
        ((20.0, 20.0), False),
        ((21.5, 21.9), False),
        ((22.5, 22.5), True),
        ((20.0, 31.0, 31.0, 31.0, 20.0), True),  # a burst in the middle, on a CPU
        ((20.0, 20.0, 31.0, 20.0, 20.0), False),  # one that less than half of the steps can have felt
    ],
)
def test_slow_reference_work_is_a_busy_machine_and_marks_its_row_and_what_is_divided_by_it(around, busy):
    rows = [runs.row(runs.STEPS[k], 100.0 - k, product_ms=[20.0] * 2, copy_ms=[20.0] * 2) for k in range(3)]
    rows[1].product_ms, rows[1].copy_ms = [*around], [*around]
    figures = derive(runs.run(*rows))
    assert [row["ms"] for row in table.main_rows(figures)] == ["100.0", "99.0" + "?" * busy, "98.0"]
    assert [*table.main_rows(figures)[2].values()][4:6] == ["1.01" + "?" * busy, "1.02"]
    said = [
        text
        for text in figures.remarks
        if re.match("The machine was busy: .* around 1_cublas .* close other", text)
    ]
    assert bool(said) is busy is bool(figures.busy)


def test_a_drift_of_half_the_steps_and_kernels_that_differ_mark_a_row():
    steady, drifting = (runs.row("2_sdpa", step_ms=[100.0] * 2 + [ms] * 2) for ms in (100.0, 106.0))
    faster = runs.row("2_sdpa", step_ms=[106.0] * 2 + [100.0] * 2)
    rows = [replace(steady, passes=[steady, other]) for other in (steady, drifting, faster)]
    said = ["", *(f"the second half of the steps took over 5% {word} time" for word in ("more", "less"))]
    assert ["; ".join(derive(runs.run(row)).lines[0].doubts) for row in rows] == said
    flash = replace(runs.SETTINGS["3_compile"], attention_kernel="flash")
    figures = derive(
        runs.run(runs.row("1_cublas"), runs.row("2_sdpa"), runs.row("3_compile", 50.0, settings=flash))
    )
    assert [line.mark for line in figures.lines] == ["", "?", "?"] and "cudnn and flash" in figures.remarks[0]
    said = "No verdict: 3_compile has the shortest time, and ?: attention ran as cudnn and flash"
    assert sentences.headline(figures) == said
    theirs = replace(runs.workload(), model="user.py")
    in_fp32 = replace(runs.SETTINGS["2_sdpa"], amp_dtype="float32", attention_kernel="efficient")
    figures = derive(runs.run(runs.row("0_fp32", settings=in_fp32), runs.row("2_sdpa"), work=theirs))
    assert [line.mark for line in figures.lines] == ["", ""], "FP32 and BF16 have kernels of their own"


@pytest.mark.parametrize(
    ("fields", "doubted"),
    [
        ({"launch_us": [15.0, 15.0]}, True),
        ({"launch_us": [11.0, 11.0]}, False),
        ({"launch_us": [0.0, 0.0]}, False),
        ({"launch_us": [15.0, 15.0], "settings": runs.SETTINGS["3_compile"]}, False),
        ({"launch_us": [15.0, 15.0], "profile": runs.profile(100.0)}, True),
    ],
)
def test_a_host_that_is_slow_at_launching_marks_a_row_that_waits_for_it(fields, doubted):
    if "profile" in fields:
        fields["profile"].idle_ms = 10.0
    waits = {"step_ms": [80.0, 90.0, 100.0]} if "profile" not in fields else {}
    other = runs.row("1_cublas", launch_us=[6.0, 6.0])
    figures = derive(runs.run(other, runs.row("2_sdpa", **waits, **fields)))
    assert ("launching" in "".join(figures.lines[1].doubts)) is doubted


def test_the_row_that_others_are_compared_with_is_known_by_what_ran():
    mixed, fp32 = runs.SETTINGS["2_sdpa"], replace(runs.SETTINGS["2_sdpa"], amp_dtype="float32")
    rows = [runs.row("0_x"), runs.row("1_x", settings=fp32), runs.row("2_x", settings=mixed)]
    compiled = runs.row("3_x", settings=runs.SETTINGS["3_compile"])
    assert derive(runs.run(*rows, compiled)).plain.name == "2_x"
    assert derive(runs.run(*rows[:2], replace(rows[2], status="oom"))).plain.name == "1_x", "no row is mixed"
    assert derive(runs.run(rows[0], compiled)).plain is None
    assert [*table.main_rows(derive(runs.run(*rows)))[0]][4:7] == ["x above", "x 0_x", "x 2_x"]


def test_what_the_losses_are_is_told_of_every_kind_of_row():
    fp8, some = runs.SETTINGS["4_transformer_engine"], {"loss": [4.0] * 8}
    plain = runs.row("3_x", rehearsed=10, **some)
    rule = lambda *rows: loss_rule(derive(runs.run(*rows)))  # noqa: E731
    assert rule(plain).endswith("in nats. 10 rehearsed steps came before, whose weights were put back")
    assert rule(plain, runs.row("4_x", rehearsed=10, settings=fp8, **some)).endswith(
        "FP8 keeps the scales that it learnt there"
    )
    for steps, said in ((3, True), (9, True), (10, False)):
        told = rule(plain, runs.row("4_x", rehearsed=steps, settings=fp8, **some))
        assert ("may be too few" in told) is said
    assert (
        "its loss lags" in rule(plain, runs.row("4_x", settings=fp8, **some))
        and rule(runs.row("x", loss=[])) == ""
    )


def test_a_row_that_does_not_learn_says_so():
    losses = {
        "a": [4.0, 4.3, *[2.0] * 8],
        "b": [4.0, 4.5, *[2.0] * 8],
        "c": [4.0, *[3.1] * 9],
        "d": [4.0, 3.9],
    }
    figures = derive(runs.run(*(runs.row(name, loss=loss) for name, loss in losses.items())))
    notes = [line.note.partition(":")[0] for line in figures.lines]
    assert notes == ["", "did not learn as it should", "hardly learned", ""]


# --- tables and sentences -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (
            (2000, 400, 200, 150, 100),
            "4_transformer_engine: 2.0 times faster than AMP + SDPA, 20 times faster than FP32. "
            "FP8 pays here: 1.50 x",
        ),
        (
            (300, 100, 30, 20, 25),
            "3_compile: 1.5 times faster than AMP + SDPA, 15 times faster than FP32. "
            "FP8 does not pay here: 0.80 x",
        ),
        ((300, 100, 30, 28), "3_compile: 1.07 times faster than AMP + SDPA, 11 times faster than FP32"),
        ((300, 100), "1_cublas: 3.0 times faster than FP32"),
        ((100, 99.94), "1_cublas: not clearly faster than FP32"),
        ((300,), "One training step of 0_baseline: 300.0 ms"),
        ((), "No step has a time"),
    ],
)
def test_the_headline_compares_the_fastest_step_with_what_a_reader_has(ms, said):
    assert sentences.headline(derive(runs.ladder(*ms))) == said


def test_no_gain_is_told_of_a_cpu_or_over_a_row_that_may_be_wrong():
    run = runs.ladder(300, 100, 30)
    assert sentences.headline(derive(run)) == "2_sdpa: 10 times faster than FP32"
    run.rows[0].step_ms = [300.0, 300.0, 400.0, 400.0]
    assert sentences.headline(derive(run)) == "One training step of 2_sdpa: 30.0 ms"
    run.environment.device_type = "cpu"
    assert sentences.headline(derive(run)) == sentences.CPU_SHOWS


def test_a_contradiction_names_its_cause():
    run = runs.ladder(300, 100, 30, 20)
    run.rows[3].settings = replace(run.rows[3].settings, compiled=False)
    run.environment = replace(run.environment, variables={"TORCHDYNAMO_DISABLE": "1"})
    (doubt,) = derive(run).lines[3].doubts
    assert doubt.endswith("compile did not run (TORCHDYNAMO_DISABLE=1 switches the compiler off)")
    compiled = Settings(amp_dtype="float32", float32_matmul_precision="highest", compiled=True)
    assert contradiction(Row("0_fp32", settings=compiled), False, {}).endswith(
        "(model() returns a compiled model)"
    )


@pytest.mark.parametrize(
    ("step", "changes", "said"),
    [
        ("0_baseline", {"float32_matmul_precision": "high"}, "TF32 ran too"),
        ("1_cublas", {"amp_dtype": "float32"}, "AMP did not run"),
        (
            "2_sdpa",
            {"attention_kernel": "by hand"},
            "fused attention did not run (attention ran as by hand, whatever was asked)",
        ),
        ("3_compile", {"compiled": False}, "compile did not run"),
        ("4_transformer_engine", {"fp8_recipe": None}, "FP8 did not run"),
        ("2_sdpa", {"attention_kernel": None, "amp_dtype": None}, ""),  # not observed
        ("5_mine", {"compiled": False}, ""),
    ],
)
def test_a_step_whose_settings_deny_its_name_is_marked(step, changes, said):
    settings = replace(runs.SETTINGS.get(step, runs.SETTINGS["2_sdpa"]), **changes)
    (line,) = derive(runs.run(runs.row(step, settings=settings))).lines
    assert line.doubts == ([f"its name is not what ran: {said}"] if said else [])
    figures = derive_study(runs.study("ablations", {"a patch of it": line_run(step, settings)}))
    assert not figures["a patch of it"].lines[0].doubts, "a patched script may do another thing"


def line_run(step, settings):
    return runs.run(runs.row(step, settings=settings))


def test_the_headline_tells_whether_fp8_pays_also_where_the_first_row_is_the_fastest():
    run = runs.run(runs.row("3_compile", 20.0), runs.row("4_transformer_engine", 25.0))
    said = "One training step of 3_compile: 20.0 ms. FP8 does not pay here: 0.80 x"
    assert sentences.headline(derive(run)) == said


def test_a_terminal_shows_a_table_of_100_columns_and_few_lines_below():
    rows = [runs.row(step, 123456.0 / 3**k, note=f"note {k}") for k, step in enumerate(runs.STEPS)]
    rows.append(runs.row("5_late", status="oom", reason="try --batch-size 4"))
    peers = [runs.row("a_peer_with_a_rather_long_name", 0.5)]
    figures = derive(runs.run(*rows, peers=peers, problems=["odd"]))
    text = documents.for_terminal(figures, "results/x/report.html")
    top, _, head, rule, *lines = text.splitlines()
    body, below = lines[:7], lines[8:]
    assert max(map(len, [head, rule, *body])) <= 100 and len(below) == 7
    names = ["step", "ms", "tokens/s", "TFLOP/s", "x above", "x 0_baseline", "x 2_sdpa", "GiB", "loss"]
    assert re.split(r" {2,}", head) == names and "times faster" in top
    assert below[0] == "5_late: oom: try --batch-size 4" and below[2] == "5 more lines in the report"
    assert below[3].startswith("Loss: mean of training steps 6 to 10, in nats. A row in FP8 without")
    assert "half of the (T, T) square" in below[4] and below[4].endswith("results/x/report.html")


def test_a_peer_stands_in_the_same_table_with_its_head_and_launch():
    fp8 = replace(runs.SETTINGS["3_compile"], fp8_recipe="x", head="FP8")
    peer = runs.row("te_layer", 60.0, product_ms=[20.0], settings=replace(fp8, head="BF16"))
    figures = derive(runs.run(runs.row("4_te", 50.0, settings=fp8), peers=[peer]))
    first, second = table.main_rows(figures, detailed=True)
    assert [*first] == [*second] and second["step"] == "te_layer (peer)" and second["x 4_te"] == "0.83"
    shown = (first["head"], second["head"], second["launch"], figures.lines[0].precision)
    assert shown == ("FP8", "BF16", "captured", "fp8")


def test_two_runs_are_compared_by_times_only_where_the_work_is_the_same(tmp_path):
    a = runs.write(tmp_path / "a", runs.ladder(300, 100, commit="abcdef0-dirty"))
    b = runs.write(
        tmp_path / "b", runs.ladder(150, 100, work=runs.workload(steps=50), problems=["rows differ in x"])
    )
    c = runs.write(tmp_path / "c", runs.ladder(150, 30, work=runs.workload(batch_size=9)))
    same, other = (compare.compare(a, of)[0].splitlines() for of in (b, c))
    assert "differs in steps" in same[2] and same[6].split()[1:] == [
        "300.0",
        "150.0?",
        "2.00?",
        *("0.500?", "1.000", "1.000"),
        "1.00",
        "1.00?",
    ]
    assert same[0][-8:] == " changes" and same[1][-7:] == "abcdef0" and same[-1] == "B: rows differ in x"
    assert "differs in batch_size" in other[2] and other[7].split() == [
        "1_cublas",
        "100.0",
        "30.0",
        "3.00",
        "5.00",
    ]
    d = runs.write(tmp_path / "d", runs.run(runs.row("9_x")))
    with pytest.raises(RecordError, match="no row in common"):
        compare.compare(a, d)
    e = runs.write(tmp_path / "e", runs.run(runs.row("0_baseline", 300.0), runs.row("5_mine", 9.0)))
    assert compare.compare(a, e)[0].splitlines()[3:5] == [
        "Only A has a time of 1_cublas.",
        "Only B has a time of 5_mine.",
    ]


# --- the page -------------------------------------------------------------------------------------


def test_a_record_that_leaves_out_defaults_is_the_same_work(tmp_path):
    whole, short = runs.ladder(10.0, 5.0), asdict(runs.ladder(10.0, 5.0))
    for name in ("model", "unit", "gpus", "parallel"):
        del short["workload"][name]
    places = [runs.write(tmp_path / "whole", whole), runs.write(tmp_path / "short", short)]
    for order in (places, places[::-1]):
        assert "The workload is the same" in compare.compare(*order)[0]
    short["rows"][0]["settings"] = {"compiled": True}
    page = page_of(derive(load(runs.write(tmp_path / "partial", short))))
    cells = re.search(r">0_baseline<(.*?)</tr>", page[page.index('id="ran"') :], re.S)[1]
    assert re.findall(r"<td[^>]*>(.*?)</td>", cells)[3] == "True", cells


def test_a_million_losses_are_drawn_in_seconds(tmp_path):
    rows = [runs.row(step, loss=[3.0 - k / 1e6 for k in range(10**6)]) for step in runs.STEPS[:2]]
    folder, began = runs.write(tmp_path, runs.run(*rows)), time.process_time()
    above, _ = charts.loss_figure(derive(load(folder))).axes
    assert time.process_time() - began < 40, "of which most is reading"
    assert [len(line.get_xdata()) for line in above.lines] == [2000, 2000]
    assert above.lines[1].get_xdata()[-1] == 999_501 and above.lines[1].get_ydata()[-1] == 3.0 - 0.9995


def test_a_card_shows_the_code_beside_what_changed_on_the_gpu():
    figures = derive(runs.ladder(200, 100, 100.01, 125))
    second, third, fourth = story.cards(figures)
    assert (
        second.title == "Step 1: why"
        and second.change == ""
        and second.outcome == "2.00 times faster than 0_baseline"
    )
    assert second.code == [("@", ""), ("-", 'x = "0_baseline"'), ("+", 'x = "1_cublas"')]
    assert [*second.categories[0].values()] == ["matrix products", "140.0", "70.0", "-70.0"]
    assert [*second.kernels[0].values()] == ["matrix product, BF16, 128x256 tile", "140.0 → 70.0", "12 → 12"]
    assert third.outcome == "As fast as 1_cublas, within the spread of the times"
    assert fourth.outcome == "1.25 times slower than 2_sdpa"
    (only,) = story.cards(derive(runs.run(runs.row("0_baseline", status="oom"), runs.row("1_cublas"))))
    assert only.outcome == "100.0 ms per step"


def test_a_card_without_code_says_why():
    same, other = (runs.row(name, source="x = 1\n") for name in ("0_a", "1_b"))
    without, skipped = runs.row("2_c", source=None), runs.row("3_d", status="skipped")
    shown = [card.without_code for card in story.cards(derive(runs.run(same, other, without, skipped)))]
    assert shown == ["The code is the same.", "The records hold no source to compare.", ""]


def test_a_kind_of_kernel_that_is_new_or_gone_is_shown():
    rows = story._category_changes({"a": 5.0, "gone": 2.0, "none": 0.0}, {"a": 4.0, "new": 3.0})
    assert [[*row.values()] for row in rows] == [
        ["new", "0.0", "3.0", "+3.0"],
        ["gone", "2.0", "0.0", "-2.0"],
        ["a", "5.0", "4.0", "-1.0"],
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nvjet_sm90_qqtst_192x192_128x4_2x1_v_bz_coopB_bias_TNN", "matrix product, FP8, 192x192 tile"),
        ("cutlass_80_simt_sgemm_128x256_8x4_nn_align1", "matrix product, FP32, 128x256 tile"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "fused attention, backward"),
        ("triton_red_fused_add_native_layer_norm_4", "compiled: add native layer norm"),
        ("void at::native::odd_kernel<4>(int)", "odd_kernel"),
        ("aten::mm", "matrix product (mm)"),
    ],
)
def test_kernels_are_named_in_plain_words(name, words):
    assert in_words(name) == words


def test_the_page_draws_every_bar_to_scale_and_asks_for_nothing():
    figures = derive(runs.ladder(200, 100, measured=runs.roofs()))
    figures.lines[1].row.predicted_ms = 90.0
    html = page_of(figures)
    drawn = re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%" height="100%" fill="#56b4e9"', html)
    assert drawn[:3] == [("70.000", "20.000")] * 2 + [("35.000", "10.000")], (
        "a time and its shares, then the next row"
    )
    assert drawn[-2:] == [("33.333", "16.667"), ("83.333", "16.667")], "of a block: forward, then backward"
    assert 'x1="45.000%"' in html and "100.0 ms, predicted 90.0" in html
    assert "http" not in re.sub(r"xmlns\S+", "", html)
    for part in (
        "Where the time went",
        "Step by step",
        "One transformer block",
        "Roofs",
        "Loss",
        "Peak memory",
    ):
        assert f"<h2>{part}</h2>" in html


def lines_of(axes):
    return [[*map(float, line.get_ydata())] for line in axes.lines]


def test_the_chart_of_losses_shows_each_and_how_far_it_lies_above_the_first():
    rows = [runs.row("0_x", loss=[4.0, 3.0]), runs.row("1_x", loss=[4.5, 2.0])]
    above, below = charts.loss_figure(derive(runs.run(*rows))).axes
    assert lines_of(above) == [[4.0, 3.0], [4.5, 2.0]]
    assert lines_of(below) == [[0.0, 0.0], [0.5, -1.0]] and below.get_ylabel() == "minus 0_x"


def test_bars_of_memory_and_of_a_block_have_one_scale():
    lines = derive(runs.ladder(200, 100)).lines
    lines[1].gib = 1.5
    small = page.memory_bars(lines)[1]
    assert (small.label, small.boxes[0].width) == ("1.5 GiB", 50.0)
    block = page.block_bar(lines[0])
    assert [box.x for box in block.boxes] == pytest.approx([0, 100 / 3, 50, 250 / 3])
    assert [box.width for box in block.boxes] == pytest.approx([100 / 3, 50 / 3] * 2)
    assert block.label == "forward 3.00 ms, backward 3.00 ms" and "matrix product" in block.boxes[0].title


# --- the picture ----------------------------------------------------------------------------------

SLICE = "gpt3-6.7b-slice"


@pytest.fixture(scope="module")
def recorded():
    return derive(load(runs.ROOT / "docs" / "results" / "h200" / SLICE))


def drawn(figures, narrow):
    """The texts of a picture, and of each bar its height and its parts: (name, width)."""
    figure = picture.picture(figures, narrow)
    (axes,) = figure.axes
    assert [*figure.get_size_inches()] == pytest.approx([axes.get_xlim()[1] / 100, axes.get_ylim()[0] / 100])
    parts = [part for part in axes.patches if part.get_gid() in (*CATEGORIES, "gaps", "step")]
    bars = {}
    for part in parts:
        bars.setdefault(part.get_y(), []).append((part.get_gid(), part.get_width(), part.get_height()))
    return axes.texts, [*bars.values()], [part for part in axes.patches if part.get_gid() == "break"]


@pytest.mark.parametrize("narrow", [False, True])
def test_the_picture_has_the_lines_of_the_scripts_and_bars_as_long_as_the_times(narrow, recorded):
    drawn_texts, bars, breaks = drawn(recorded, narrow)
    texts, (first, *others) = [text.get_text() for text in drawn_texts], recorded.steps
    assert (
        len(bars) == len(recorded.steps)
        and len(breaks) == 1
        and {part[2] for bar in bars for part in bar} == {16.0}
    )
    longest = sum(width for _, width, _ in bars[0])
    layout = picture.LAYOUTS[narrow]
    assert longest == pytest.approx(layout.bars_right - layout.bars_left), (
        "step 0 reaches the end, and is broken"
    )
    scales = [sum(width for _, width, _ in bar) / line.ms for bar, line in zip(bars[1:], others, strict=True)]
    assert scales == pytest.approx([scales[0]] * len(scales)), "one scale for all others"
    for bar, line in zip(bars[1:], others, strict=True):
        share = line.category_ms["matrix products"] / sum(line.category_ms.values())
        assert {name: width for name, width, _ in bar}["matrix products"] == pytest.approx(
            share * scales[0] * line.ms
        )
    assert f"{first.ms:,.0f} ms (bar cut short)" in texts and [
        text for text in texts if text.endswith(f"{others[-1].over_first.value:.1f} x")
    ]
    for line in recorded.steps:
        assert line.name in texts
    grey = [text.get_text() for text in drawn_texts if text.get_color() == charts.SOFT][-3:]
    assert [line.partition(" = ")[0] for line in grey] == ["scores", "weights", "y"], "of step 0, attention"
    shown = grey + [text[2:] for text in texts if text[:2] == "+ "]
    sources = "\n".join(line.row.source for line in recorded.steps)
    assert len(shown) > 15
    assert all(
        text.removesuffix("…") in sources or re.fullmatch(r"\.\.\. \d+ more lines, and", text)
        for text in shown
    )


def test_the_picture_leaves_out_what_is_no_change_of_code():
    before = runs.row("0_x", source='"""Doc."""\nimport a\n\nx = 1\nloss = f(x)\n')
    after = runs.row(
        "1_x", source='"""Other."""\nimport b\n\n# why\nx = 1  # one\nwith amp:\n    loss = f(x)\n'
    )
    assert (
        changes.added_groups(before, after) == [["with amp:"]] and changes.added_groups(after, before) == []
    )
    assert changes.added_groups(runs.row("0_x", source=None), after) == []
    many = "from m import (\n    one,\n    two,\n)\n" + "".join(f"x = {k % 3}\n" for k in range(300))
    longer = [runs.row("0_x", source=text) for text in (many[many.index("x") :], f"y = 2\n{many}")]
    assert changes.added_groups(*longer) == [["y = 2"]], "whatever is frequent in a long source"


def test_ids_of_a_page_are_its_own_and_every_link_leads_to_a_section(recorded):
    html = page_of(recorded)
    ids = re.findall(r'<section id="([^"]+)"', html)
    assert all(html.count(f'id="{name}"') == 1 for name in ids)
    assert set(re.findall(r'<a href="#([^"]+)"', html)) <= set(ids) and len(ids) > 5


@pytest.mark.skipif(
    f"matplotlib=={matplotlib.__version__}" not in PINS, reason="another matplotlib draws other bytes"
)
def test_the_site_and_the_pictures_of_readme_are_of_the_record(recorded):
    assert (runs.ROOT / "docs" / "index.html").read_text() == page_of(recorded)
    drawn = {path.name: path.read_text() for path in (tables.RESULTS / tables.SITE).glob("steps-*.svg")}
    expected = picture.picture(recorded, True, *tables.THEMES["dark"])
    assert drawn["steps-narrow-dark.svg"] == charts.svg(expected, as_paths=True) and len(drawn) == 4


def test_the_reports_beside_records_are_of_the_records():
    folders = sorted(path.parent for path in tables.RESULTS.glob("*/*/results.json"))
    assert len(folders) > 20
    for folder in folders:
        place = str(folder.relative_to(tables.RESULTS))
        record = tables.record(place)
        if isinstance(record, Study):
            text = documents.study_as_markdown(record, studies.KINDS[record.kind].tables(record))
        else:
            text = documents.as_markdown(tables.figures(place))
        assert (folder / "report.md").read_text() == text, f"{place}: docs/renew.sh writes it"


def test_long_sources_are_compared_in_no_time():
    began = time.process_time()
    old, new = (
        runs.row(name, source="".join(f"x = {i * k % 3}\n" for i in range(3000)))
        for name, k in (("a", 1), ("b", 2))
    )
    changes.added_groups(old, new)
    assert time.process_time() - began < 15


def test_a_picture_of_any_rows_is_drawn():
    skipped = runs.row("4_x", status="skipped", reason="no FP8")
    for rows in ([skipped], [runs.row("0_x"), skipped], [runs.row("0_x", 9.0, source="(")]):
        texts, bars, _ = drawn(derive(runs.run(*rows)), False)
        assert len(bars) == sum(row.status == "ok" for row in rows)
        assert ("skipped" in [text.get_text() for text in texts]) == (skipped in rows)


def test_a_bar_that_is_much_longer_than_all_others_is_broken():
    broken, whole = (derive(runs.ladder(first, 100.0, 50.0)).lines for first in (161.0, 159.0))
    assert picture.axis_end(broken) == pytest.approx(115.0) and picture.axis_end(whole) == 159.0


@pytest.mark.parametrize("words", ["", "--only 3,4", "--only=3,4"])
def test_a_part_of_the_ladder_is_no_row_of_the_cards(words):
    run = replace(runs.ladder(200, 100), command=f"./run_all.sh {words}")
    assert table.fits_cards(derive(run)) is not bool(words)


def test_the_front_table_and_a_card_are_of_the_record(recorded):
    words = ["a", "b", "c", "d", "e"]
    rows = table.front_rows(recorded, words)
    assert [*rows[0]] == [
        "script",
        "what it adds",
        "code lines added",
        "ms",
        "x the row above",
        "x FP32",
        "GiB",
    ]
    assert [row["code lines added"] for row in rows][:3] == ["-", "4", "1"] and [
        row["what it adds"] for row in rows
    ] == words
    card = table.card_row(recorded)
    gains = [float(gain) for gain in card["gains, step by step"].partition(" = ")[0].split(" x ")]
    assert np.prod(gains) == pytest.approx(recorded.steps[-1].over_first.value, rel=0.02) and len(gains) == 4
    assert not re.search("GPU-|[0-9a-f]{8}", " ".join(card.values())), "nothing that identifies a card"
    rows = [("oom", 0), ("ok", 100.0), ("ok", 50.0), ("oom", 0), ("ok", 25.0), ("skipped", 0)]
    run = runs.run(*(runs.row(f"{k}_x", ms, status) for k, (status, ms) in enumerate(rows)))
    cells = [*table.card_row(derive(run)).values()]
    assert cells[2:5] == ["oom", "25.0", "fits x 2.00 x oom x fits = -"]
    assert card["device"] in documents.for_terminal(recorded, "x").splitlines()[-1], (
        "a finished run prints it"
    )


# --- studies --------------------------------------------------------------------------------------


def test_what_a_gpu_loses_among_several_adds_up():
    two, graph = runs.workload(gpus=2, parallel="ddp"), {"settings": runs.SETTINGS["3_compile"]}
    alone, beside = (
        runs.row("2_sdpa", ms, profile=runs.profile(ms), product_ms=[ms]) for ms in (100.0, 125.0)
    )
    beside.profile.categories["communication"], beside.profile.communication_ms = 2.5, 20.0
    beside.profile.idle_ms = 3.75
    one = runs.run(runs.row("1_cublas", 50.0), runs.row("2_sdpa", 80.0, **graph))
    rows = [
        runs.row("1_cublas", 50.0, profile=runs.profile(50.0), **graph),
        beside,
        runs.row("3_compile", 0, "oom"),
    ]
    places = {
        "1": one,
        "1-launched": runs.run(alone, runs.row("3_compile")),
        "2-ddp": runs.run(*rows, work=two),
    }
    rows = scaling.scaled(study := runs.study("scaling", places))
    assert [row.share() for row in rows] == ["-", "100.0 %*", "-", "-", "80.0 %?", "-", "-"]
    (row,), (*_, main, _, _) = scaling.lost_rows(rows), scaling.main_rows(rows)
    assert [*main.values()][3:] == ["125.0?", "80.0 %?", "16,384", "64", "2.5", "17.5", "3.0"]
    assert " ".join(row.values()).endswith("2 20.0 % 14.0 % 4.0 % 1.0 % 2.0 % -1.0 %")
    assert "the machine was busy (2-ddp, 2_sdpa)" in documents.study_remarks(study, {}), (
        "next to another place"
    )
    beside.profile.categories["matrix products"] += 11.0  # of 125 ms
    assert scaling.lost_rows(scaling.scaled(study)), "the rest is -9.8 %"
    beside.profile.categories["matrix products"] += 1.0
    assert scaling.lost_rows(scaling.scaled(study)) == [], "kernels explain too little"


def test_a_place_whose_rows_never_ran_keeps_its_name():
    lost = replace(runs.run(runs.row("2_sdpa", status="not run")), workload=None)
    study = runs.study("scaling", {"1": runs.run(runs.row("2_sdpa")), "2-ddp": lost, "2-fsdp": lost})
    assert [row.names()["how"].split(",")[0] for row in scaling.scaled(study)] == ["alone", "DDP", "FSDP2"]
    assert [row.gpus for row in scaling.scaled(study)] == [1, 2, 2]


def test_a_profile_that_took_another_time_than_the_steps_is_left_out():
    rows = [
        runs.row(runs.STEPS[k], 100.0, profile=runs.profile(ms)) for k, ms in enumerate((100.0, 60.0, 140.0))
    ]
    good, *bad = derive(runs.run(*rows)).lines
    assert good.category_ms and ["left out" in one.note and not one.category_ms for one in bad] == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("NVIDIA H200", "fp8", 1978.9),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA H100 PCIe", "bf16", None),
        ("NVIDIA H200 NVL", "bf16", None),
        ("NVIDIA GH200 480GB", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
    ],
)
def test_mfu_is_over_the_datasheet_s_peak_of_a_whole_known_card(device, precision, tflops):
    assert peak_flops_per_s(device, precision) == (tflops and tflops * 1e12)


def test_without_an_observed_format_there_is_no_mfu():
    rows = [runs.row("a", settings=Settings(amp_dtype=dtype)) for dtype in ("bfloat16", None)]
    known, unknown = derive(runs.run(*rows, device="NVIDIA H200")).lines
    assert known.mfu and unknown.mfu is None


def test_runs_on_equal_terms_stand_side_by_side():
    fp8 = Settings(captured=True, residual_dtype="bfloat16", head="FP8", fp8_recipe="torchao, tensorwise")
    delayed = replace(fp8, fp8_recipe="recipe_type=DelayedScaling", residual_dtype="float32")
    rows = {"a": runs.row("x", 50.0, settings=fp8), "b": runs.row("y", 100.0, settings=delayed)}
    study = runs.study("ablations", {name: runs.run(row) for name, row in rows.items()})
    first, second = ablations.equal_rows(study, "a", "b")
    assert [*first.values()] == ["a", "x", "captured", "BF16", "FP8", "current", "50.0", "1.00"]
    assert [*second.values()][3:] == ["FP32", "FP8", "delayed", "100.0", "0.50"]


def test_a_sweep_shows_gains_by_width_and_how_near_old_predictions_came():
    shapes = {}
    for width, ms in ((128, (90.0, 100.0, 100.0)), (256, (200.0, 100.0, 50.0))):
        rows = [runs.row(f"{k}_x", t, predicted_ms=t * (1.1, 0.7, 1.0)[k]) for k, t in enumerate(ms)]
        shapes[f"w{width}"] = runs.run(*rows, work=runs.workload(n_embd=width))
    late = [
        runs.row("0_x"),
        runs.row("1_x", status="oom"),
        runs.row("2_x", 50.0),
        runs.row("3_x", status="skipped"),
    ]
    shapes["late"] = runs.run(*late, work=runs.workload(n_embd=512))
    shapes["dead"] = replace(runs.run(*late[1:2]), workload=None)
    long = runs.run(runs.row("0_x", status="oom"), work=runs.workload(n_embd=64, seq_len=4096, batch_size=1))
    study = runs.study("sweep", {"long": long, **shapes})
    assert [shape.run.workload.n_embd for shape in sweep.shapes(study)] == [128, 256, 512, 64], (
        "by tokens first"
    )
    study = runs.study("sweep", shapes)
    cells = [[*sweep.gain_cells(figures).values()][5:] for figures in sweep.shapes(study)]
    said = ["90.0 0.90 1.00 100.0", "200.0 2.00 2.00 50.0", "100.0 oom fits skipped 50.0"]
    assert [" ".join(row) for row in cells] == said, "2.00 would be over step 0"
    recorded = [figures.run for figures in sweep.shapes(study)]
    guess = errors.constant_guess(recorded)
    assert guess == pytest.approx({"1_x": 1.45, "2_x": 1.5}), "of 0.9 and 2.0, of 1.0 and 2.0"
    cells = errors.error_cells(recorded, guess)
    assert [*cells.values()] == ["6", "10 %", "30 %", "44 %", "57 %", "39 %", "61 %", "-"], (
        "the guess is off by 61, 27, 50 and 25 %"
    )
    rows = [runs.row(f"{k}_x", ms, predicted_ms=ms) for k, ms in enumerate((100.0, 40.0, 20.0))]
    rows[1] = runs.row("1_x", status="oom")
    assert not [*errors.gains(runs.run(*rows))], "5.00 would be over step 0"


def test_a_study_tells_once_what_is_unusual_in_its_rows():
    large = runs.row("0_x", status="oom", reason="large")
    odd = runs.row("1_x", step_ms=[1.0] * 5 + [2.0] * 5, note="odd")
    a, b = (
        runs.run(large, runs.row("1_x", loss=[4.0] * 10)),
        runs.run(large, odd, runs.row("2_x"), problems=["lost"]),
    )
    study = replace(runs.study("sweep", {"a": a, "b": b}), command="x && y")
    text, files = render(Path("f"), study)
    page, learned = (
        files["report.md"].decode(),
        "hardly learned: its last five losses were above 0.75 times the first",
    )
    drift = "the second half of the steps took over 5% more time"
    said = f"oom: large (a, 0_x; b, 0_x)\n{learned} (a, 1_x)\nodd (b, 1_x)\n{drift} (b, 1_x)\nlost"
    assert said in text and text.endswith("\n\nReport: f/report.md") and "\n\n\n" not in text + page
    assert said in page.replace("\n- ", "\n") and page.endswith("Run it again:\n\n    x\n    y\n")
    assert page.startswith("# Sweep, 2 runs\n\nThe first run: GPU, ") and "TFLOP/s" not in page


def trained(step, last, heldout=(3.0, 2.0), **fields):
    """A run of 40 steps whose losses end at `last`, tested after 10 and 20 of 50 ms each."""
    tests = [(10 * (k + 1), loss) for k, loss in enumerate(heldout)]
    row = runs.row(step, 50.0, loss=[9.0] * 30 + [last] * 10, heldout=tests, **fields)
    return runs.run(row)


def test_losses_are_compared_seed_by_seed_by_a_margin_that_was_set_beforehand():
    fp8 = {"settings": Settings(fp8_recipe="delayed")}
    runs_by_name = {}
    for seed in (1, 2, 3):
        runs_by_name[f"0_x, seed {seed}"] = trained("0_x", 2.0 + seed)
        runs_by_name[f"1_x, seed {seed}"] = trained("1_x", 2.001 + seed + 0.001 * seed)  # 0.002, 0.003, 0.004
        runs_by_name[f"2_fp8, seed {seed}"] = trained("2_fp8", 2.1 + seed + 0.001 * seed, **fp8)
        runs_by_name[f"dead, seed {seed}"] = trained("1_x", 2.0 + seed + 0.1 * seed)
    runs_by_name["10_x, seed 1"] = trained("10_x", 2.0)
    runs_by_name["10_x, seed 2"] = runs.run(runs.row("10_x", status="oom"))
    runs_by_name["peer, seed 1"], runs_by_name["peer_fp8, seed 1"] = (
        trained("peer", 2.0),
        trained("peer_fp8", 2.0, **fp8),
    )
    study = runs.study("parity", runs_by_name)
    of = parity.compared_with(study)
    assert of == {"0_x": None, "1_x": "0_x", "2_fp8": "1_x", "10_x": "0_x", "dead": "1_x"} | {
        "peer": "0_x",
        "peer_fp8": "10_x",
    }
    assert [*of] == ["0_x", "1_x", "2_fp8", "10_x", "dead", "peer", "peer_fp8"]
    lines = {row["row"]: row for row in parity.difference_rows(study)}
    cells = [*lines["1_x"].values()][1:7]
    assert cells == ["3.002", "0_x", "3", "+0.0030", "+0.0005 to +0.0055", "equivalent"], (
        "the loss of seed 1, which all have"
    )
    assert lines["2_fp8"]["difference"] == "+0.0990" and lines["2_fp8"]["verdict"] == "different"
    assert lines["dead"]["verdict"] == "undecided", "a mean beyond the margin, and an interval around zero"
    assert lines["10_x"]["difference"] == "-1.0000" and lines["10_x"]["verdict"] == "undecided", "one seed"
    assert lines["1_x"]["held-out: difference"] == "+0.0000" and lines["0_x"]["verdict"] == "-"


@pytest.mark.parametrize(
    "mean, half, verdict",
    [
        (0.004, 0.006, "equivalent"),
        (-0.004, 0.0061, "undecided"),
        (0.009, 0.002, "undecided"),  # leaves out zero, within the margin in the mean
        (-0.011, 0.0109, "different"),
        (0.011, 0.012, "undecided"),
        (0.0, None, "undecided"),
    ],
)
def test_a_verdict_goes_by_interval_and_margin(mean, half, verdict):
    assert parity.Difference(3, mean, half).verdict == verdict and parity.MARGIN == 0.01


def test_seconds_until_a_loss_are_of_every_seed():
    runs_by_name = {
        f"0_x, seed {seed}": trained("0_x", 2.0, (4.0, 2.0), warmup_s=7.0 + seed) for seed in (1, 2)
    }
    runs_by_name["1_x, seed 1"] = trained("1_x", 2.0, (4.0, 2.0, 1.8), warmup_s=1.0)
    runs_by_name["1_x, seed 2"] = trained("1_x", 2.0, (4.0, 2.1, 2.05), warmup_s=1.0)
    runs_by_name["1_x, seed 3"] = trained("1_x", 2.0, (2.4, 2.0, 1.8), warmup_s=1.0)
    study = runs.study("parity", runs_by_name)
    first, second = parity.seconds_rows(study)
    assert "1.5 nats" not in first, "which no row reaches"
    assert [*first.values()] == ["0_x", "2", "0.9", "0.9", "not reached: 2 of 2", "1.0", "9.0"]
    assert second["2.5 nats"] == f"{(0.875 + (10 + 15 / 1.9) * 0.05 + 0.5) / 3:.1f}"
    assert second["1.9 nats"] == "not reached: 1 of 3" and second["last loss of 0_x"] == "not reached: 1 of 2"
    assert parity.seconds_until(study.runs["1_x, seed 1"].rows[0], 1.9) == pytest.approx(1.25)
    in_steps = parity.until_rows(study, parity.steps_until, ",.0f")[0]
    assert [*in_steps.values()] == ["0_x", "2", "18", "19", "not reached: 2 of 2", "20"]
    assert parity.picture(study)[:4] == b"\x89PNG"
    (axes,) = parity.curves_figure(study).axes
    shown = [[2.0], pytest.approx([4.1 / 2, 3.85 / 2])]
    assert lines_of(axes) == shown, "from the second test on, of the two seeds that both have"


def test_held_out_losses_are_compared_after_as_many_steps_and_after_as_many_seconds():
    runs_by_name = {}
    for seed in (1, 2, 3):
        runs_by_name[f"0_x, seed {seed}"] = trained("0_x", 2.0, (4.0, 2.0))
        faster = runs.row("1_x", 25.0, loss=[2.0] * 40, heldout=[(10, 4.1 + seed), (20, 2.1 + seed / 10)])
        runs_by_name[f"1_x, seed {seed}"] = runs.run(faster)
    study = runs.study("parity", runs_by_name)
    half, end = parity.progress_rows(study, "1_x", "0_x", parts=2)
    assert [half["training steps"], half["seconds"], end["seconds"]] == ["10", "0.2", "0.5"]
    spread = 4.303 / 3**0.5
    assert [half["difference"], half["95 % interval"]] == [
        "+2.100",
        f"{2.1 - spread:+.3f} to {2.1 + spread:+.3f}",
    ]
    assert [end["difference"], end["after as many seconds"]] == ["+0.300", "-1.700"]
    _, slower = parity.progress_rows(study, "0_x", "1_x", parts=2)
    assert slower["difference"] == "-0.300" and slower["after as many seconds"] == "-", "the other has ended"
    early = parity.progress_rows(study, "1_x", "0_x", parts=4)[0]
    assert early["training steps"] == "5" and early["difference"] == "-", "the first test is at 10"
    runs_by_name["0_x, seed 1"].rows[0].step_ms = [10.0] * 3
    _, end = parity.progress_rows(study, "1_x", "0_x", parts=2)
    assert end["difference"] == "+0.300" and end["after as many seconds"] == "-", "one seed has ended"


def test_a_study_too_short_for_its_measure_has_a_report():
    rows = [runs.row("0_x", loss=[3.0] * 3, heldout=[(1, 3.0), (3, 2.0)], warmup_s=None)]
    study = runs.study("parity", {"0_x, seed 1": runs.run(*rows)})
    assert "| 0_x" in documents.study_as_markdown(study, parity.tables(study))


# --- the command and the documents ----------------------------------------------------------------


def report(*words):
    return run_python("-m", "report", *words)


def test_the_interval_is_student_s_and_rows_without_a_difference_are_seen_once_in_twenty():
    for v, p, expected in ((1, 0.975, 12.706), (2, 0.975, 4.303), (9, 0.975, 2.262), (5, 0.8, 0.920)):
        assert parity.t_quantile(p, v) == pytest.approx(expected, abs=1e-3)
    assert parity.interval([0.1, 0.2, 0.3]) == pytest.approx([0.2, 4.303 * 0.1 / 3**0.5], rel=1e-3)
    drawn = np.random.default_rng(0).normal(size=(1000, 4))
    seen = np.mean([abs(mean) > half for mean, half in map(parity.interval, drawn.tolist())])
    assert seen == pytest.approx(0.05, abs=0.02)


@pytest.mark.slow
def test_the_command_writes_into_a_run_folder_and_its_code_tells_how_the_rows_ended(tmp_path):
    folder = runs.plan(tmp_path / "a", "0_baseline", "1_cublas", "2_sdpa")
    runs.put(folder, runs.row("0_baseline"))
    runs.put(folder, runs.row("1_cublas", status="skipped", reason="no FP8"))
    ended = report(folder)
    assert (ended.returncode, ended.stderr) == (1, "") and "0_baseline" in ended.stdout, (
        "2_sdpa is still to run"
    )
    written = {path.name for path in folder.iterdir()} - {"plan.json", "0_baseline.json", "1_cublas.json"}
    assert written == {"results.json", "report.md", "report.html", "steps.png"}
    runs.put(folder, runs.row("2_sdpa"))
    assert report(folder).returncode == 0
    runs.put(folder, runs.row("2_sdpa", status="oom", reason="too large"))
    assert report(folder).returncode == 1 and load(folder).rows[2].status == "oom"
    odd = {"1": runs.run(runs.row("2_sdpa"), problems=["rows differ in x"])}
    recorded = runs.write(tmp_path / "b", runs.study("scaling", odd))
    before, ended = (recorded / "results.json").read_bytes(), report(recorded)
    assert ended.returncode == 0 and (recorded / "results.json").read_bytes() == before
    assert report("--compare", folder, folder).returncode == 0
    for words in ((), (tmp_path,), (folder, "--compare", folder, folder), ("--compare", folder, recorded)):
        ended = report(*words)
        assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (2, "", 1)


def test_tables_of_documents_hold_one_state_of_the_code(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for name, code in (("a", "1111111"), ("b", "1111111"), ("c", "2222222"), ("d", "1")):
        problems = [tables.DIFFER] if name == "d" else []
        run = runs.ladder(200, 100, 25, measured=runs.roofs(), problems=problems)
        run.rows[0].code_sha256 = code
        runs.write(tmp_path / "m" / name, run)
    for make in (tables.ladder, tables.categories, tables.limits, tables.roofs):
        assert make("m/a").startswith("| ")
    assert tables.gains("m/a", "m/b").splitlines()[-1].split(" | ")[-2].strip() == "4.00"
    with pytest.raises(ValueError, match=r"m/a, m/c: 0_baseline is of several states of the code"):
        tables.gains("m/a", "m/c")
    with pytest.raises(ValueError, match="m/d: rows differ in"):
        tables.gains("m/d")
    times = tables.milliseconds(list(runs.STEPS[1:3]), "m/a", "m/b").splitlines()
    assert times[0].split()[1::2] == ["workload", *runs.STEPS[1:3]]
    assert [row.split()[1::2] for row in times[2:]] == [["m/a", "100.0", "25.0"], ["m/b", "100.0", "25.0"]]
    kernels = tables.figures("m/a").lines[0].row.profile.kernels
    (row,) = tables.kernels(runs.STEPS[0], kernels[0].name, "m/a").splitlines()[2:]
    assert row.split()[1::2] == ["m/a", kernels[0].name, f"{kernels[0].ms:.1f}"]
    named = (("0", "0", 9.0), ("1", "1", 5.0), ("x", "1", 7.0), ("y", "lost", 3.0))
    variants = {name: runs.run(runs.row(step, ms)) for name, step, ms in named}
    runs.write(tmp_path / "m" / "x", runs.study("ablations", variants))
    assert tables.ablations("m/x").split()[-8::2] == ["5.00", "7.00", "+2.0", "0"]
    variants |= {"1, 2 GPUs": runs.run(runs.row("1", 4.0), work=runs.workload(gpus=2))}
    variants |= {"z": runs.run(runs.row("1", 6.0), work=runs.workload(gpus=2))}
    shown = ablations.variant_rows(runs.study("ablations", variants), "x", "z")
    assert [[*row.values()][1:4] for row in shown] == [["1", "5.00", "7.00"], ["1, 2 GPUs", "4.00", "6.00"]]


def test_losses_of_variants_stand_by_training_step_and_need_as_many():
    of = {"a": [9.0, 7.004], "cold": [9.0, 8.5], "short": [9.0]}
    study = runs.study("ablations", {name: runs.run(runs.row(name, loss=loss)) for name, loss in of.items()})
    warm, cold = ablations.loss_rows(study, "a", "cold")
    assert warm == {"loss in training step": "a", "1": "9.00", "2": "7.00"} and cold["2"] == "8.50"
    with pytest.raises(ValueError, match="a, short trained different numbers of steps"):
        ablations.loss_rows(study, "a", "short")


def test_a_machine_that_is_busy_around_one_variant_marks_its_difference():
    quiet, busy = (runs.row("1_x", ms, product_ms=[work] * 2) for ms, work in ((50.0, 20.0), (60.0, 40.0)))
    for card, mark in (("a", "?"), ("b", "")):
        named = {"1_x": runs.run(quiet, gpu_uuid="a"), "x": runs.run(busy, gpu_uuid=card)}
        study = runs.study("ablations", named)
        (row,) = ablations.variant_rows(study)
        assert row["difference, ms"] == f"+10.0{mark}", "the work of another card is another time"
        assert ("the machine was busy (x)" in documents.study_remarks(study, {})) is bool(mark)


def test_a_confirmation_is_told_of_the_code_that_it_confirmed(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    runs.write(tmp_path / "m" / "told", runs.run(runs.row("1_x", code_sha256="1")))
    told = "GPU, measured 2026-01-01 at commit abcdef0"
    for code, confirmed in (("1", ", confirmed 2026-01-01 at commit 1234567"), ("2", "")):
        again = runs.run(runs.row("1_x", code_sha256=code), commit="123456789")
        runs.write(tmp_path / "m" / "told-confirmation", again)
        tables.record.cache_clear()
        assert tables.measured("m/told") == told + confirmed
    assert tables.warmups("m/told", "1_x") == "1.5 s", "of a single pass"
    tables.record.cache_clear()


def test_the_first_table_of_an_experiment_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = (
        "# Anatomy\n\n## a: Why?\n\nTitle\n\n| x |\n|---|\n| 1 |\n\nMore\n\n| y |\n\n## b: What?\n\n| z |\n"
    )
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "report.md").write_text(page)
    with pytest.raises(ValueError, match="m has no experiment c"):
        tables.experiment("m", "c")
    assert tables.experiment("m", "a") == "| x |\n|---|\n| 1 |" and tables.experiment("m", "b") == "| z |"


def test_a_machine_s_records_are_of_one_kind_of_card(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    tables.record.cache_clear()
    runs.write(tmp_path / "h200" / "gpt2", runs.run(runs.row("x"), device="NVIDIA H200"))
    assert tables.of_another_device("h200", "NVIDIA H200") == tables.of_another_device("new", "T4") == 0
    assert tables.of_another_device("h200", "NVIDIA H100") == 1
    assert "h200 has records of NVIDIA H200, and this is NVIDIA H100" in capsys.readouterr().out
    tables.record.cache_clear()


def row_of(step, source, measured_by=fingerprint.ROOTS, **fields):
    """A row as the present code leaves it, of this source."""
    code = fingerprint.row_sha256(source, runs.ROOT, measured_by)
    return runs.row(step, source=source, code_sha256=code, **fields)


def test_a_record_is_stale_when_a_step_a_peer_or_a_patch_has_other_code(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    tables.record.cache_clear()
    present = {"peer": ("", "nanogpt"), "patch": ("cold-scales", runs.STEPS[4])}
    for kind, (variant, step) in present.items():
        source = tables.present_source(variant, step)
        assert "cold" in source or not variant
        for name, text in (("same", f"{source}\n# a comment"), ("other", f"{source}\nx = 1")):
            for ending, seed in (("", ""), ("-seed", ", seed 1")):
                studied = runs.study("ablations", {f"{variant or step}{seed}": runs.run(row_of(step, text))})
                runs.write(tmp_path / kind / f"{name}{ending}", studied)
    changes = (runs.ROOT / "mine" / "changes.py").read_text()
    for name, text in (("same", changes), ("other", changes.replace("optimizer.step()", "pass"))):
        function = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
        source = f"{ast.get_source_segment(text, function)}\n\n\ndef fp8(model):\n    of_its_own(model)\n"
        brought = runs.run(row_of(runs.STEPS[2], source), work=runs.workload(model="x.py"))
        runs.write(tmp_path / "model" / name, brought)
    for name, added in (("same", "# a comment"), ("other", "x = 1")):
        states = [row_of(step, f"{text}\n{added}", ()) for step, text in tables.loop_states().items()]
        runs.write(tmp_path / "loop" / name, runs.run(*states, work=runs.workload(model="loop.py")))
    clock = fingerprint.row_sha256("", runs.ROOT, fingerprint.CLOCKS)
    for name, code in (("same", clock), ("other", "0123")):
        (tmp_path / "anatomy" / name).mkdir(parents=True)
        (tmp_path / "anatomy" / name / "anatomy.json").write_text(json.dumps({"code_sha256": code}))
    assert tables.stale() == ["anatomy/other", "loop/other", "model/other"] + [
        f"{kind}/other{ending}" for kind in ("patch", "peer") for ending in ("", "-seed")
    ]
    assert tables.stale("a/b") == ["a/b"] and not tables.stale("model/same", "anatomy/same")
    assert tables.present().count("/same") == 7
    tables.record.cache_clear()


def test_the_command_names_the_records_that_are_stale_and_what_it_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    tables.record.cache_clear()
    runs.write(tmp_path / "of" / "old", runs.run(runs.row("x", code_sha256="0123")))
    source = (runs.ROOT / "2_sdpa.py").read_text()
    runs.write(tmp_path / "of" / "new", runs.run(row_of("2_sdpa", source)))

    def said(*words):
        monkeypatch.setattr(sys, "argv", ["tables.py", *words])
        return tables.main(), capsys.readouterr().out

    assert said("--stale") == (1, "of/old: of other code\n")
    assert said("--stale", "of/new") == (0, "every record is of the present code\n")
    assert said("--stale", "of/no") == (1, "of/no: not recorded\n")
    monkeypatch.setattr(sys, "argv", ["tables.py", "--fresh"])
    assert tables.main() == 2 and capsys.readouterr().err.count("\n") == 1
    assert said("--help")[0] == 0
    tables.record.cache_clear()


def test_a_table_of_several_cards_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    tables.record.cache_clear()
    for name, uuid in (("a", "1"), ("b", "2"), ("c", None)):
        runs.write(tmp_path / "of" / name, runs.run(runs.row("x"), gpu_uuid=uuid))
    assert tables.several_cards("of/a", "of/b", "of/c") == "\n\nRecorded on 2 cards."
    assert tables.several_cards("of/a", "of/c") == tables.several_cards("of/c") == ""
    tables.record.cache_clear()


def test_a_bar_without_a_profile_says_so_and_a_remark_of_all_rows_names_none():
    figures = derive(runs.run(*(runs.row(step, note="odd") for step in runs.STEPS[:3])))
    assert [bar.label for bar in time_bars(figures.lines)] == ["100.0 ms, without a profile"] * 3
    assert "all rows: odd" in figures.remarks
    two = derive(runs.run(*(runs.row(step, note="odd") for step in runs.STEPS[:2])))
    assert f"{runs.STEPS[0]}, {runs.STEPS[1]}: odd" in two.remarks


def test_the_page_of_a_run_tells_what_its_losses_are():
    assert "Loss: mean of training steps 6 to 10" in documents.as_markdown(derive(runs.ladder(100, 50)))


def test_words_of_a_record_are_no_emphasis():
    assert documents.markdown("M.__init__() of *a*") == r"M.\_\_init\_\_() of \*a\*"
    assert documents.markdown("n_embd") == "n_embd", "within a word it is none"


def test_a_table_of_markdown_has_one_column_to_the_left():
    text = documents.pipe([{"step": "a", "ms": "1"}])
    left, right = text.splitlines()[1].strip("|").split("|")
    assert left.startswith(":") and right.endswith(":") and not right.startswith(":")
    assert all(
        cell.startswith(":")
        for cell in documents.pipe([{"a": "x", "b": "y"}], 2).splitlines()[1].strip("|").split("|")
    )


def test_a_notebook_s_backend_and_a_broken_matplotlibrc_cost_no_report(tmp_path):
    (tmp_path / "matplotlibrc").write_bytes(b"backend: \xff\xfe")
    env = os.environ | {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "MPLCONFIGDIR": str(tmp_path),
        "MATPLOTLIBRC": str(tmp_path / "matplotlibrc"),
    }
    folder = runs.write(tmp_path / "run", runs.ladder(300, 100))
    ran = run_python("-m", "report", folder, env=env)
    assert ran.returncode == 0 and (folder / "steps.png").exists(), ran.stderr
