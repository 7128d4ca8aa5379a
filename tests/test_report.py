"""Plans and folders as text."""

import json
from dataclasses import replace

from tpconvert.report import folder_rows, folder_text, plan_report, plan_text
from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.manifest import Entry, Manifest
from tpconvert.spec.plan import Boundary, Edit, Plan, Slices, Verdict

FFN = Layout(0, (Block(6),))


def verdict(name, shape, layout=FFN, **more):
    reason = more.pop("reason", "cut along the ffn axis")
    return Verdict(name, shape, "float32", layout, reason, **more)


def small_plan(layers=3, tp=2, odd=None):
    verdicts, boundaries, edits = [], [], []
    for i in range(layers):
        layout = Layout() if i == odd else FFN
        reason = "no rule for fold" if i == odd else "cut along the ffn axis"
        verdicts.append(verdict(f"layers.{i}.up.weight", (6, 4), layout, pattern="mlp", role="column", reason=reason))
        verdicts.append(verdict(f"layers.{i}.norm.weight", (4,), Layout(), reason=f"whole: mean in layers.{i}.norm"))
        boundaries.append(Boundary("copy", f"layers.{i}.up", "input", ("args.0",), shape=(2, 5, 4), dtype="float32"))
        boundaries.append(Boundary("reduce", f"layers.{i}.down", "output", ("",), shape=(2, 5, 4), dtype="float32"))
        edits.append(Edit(f"layers.{i}.up", "width", 6, (Block(6),)))
    return Plan(tp, tuple(verdicts), tuple(boundaries), tuple(edits), notes=("a guess",), source={"name": "toy"})


def test_the_sequence_can_be_parallel_or_there_is_a_reason():
    plan = small_plan(1)
    assert "  sequence  not parallel: its plan was made without looking" in plan_text(plan_report(plan))
    plan = replace(plan, slices=Slices(inputs=(("kwargs.input_ids", 1),)))
    assert "  sequence  can be parallel along dim 1 of input_ids\n" in plan_text(plan_report(plan))


def test_alike_layers_are_one_line():
    rows = plan_report(small_plan(80)).tensors
    assert [(r.name, r.count) for r in rows] == [("layers.*.up.weight", 80), ("layers.*.norm.weight", 80)]


def test_unfolded_every_tensor_has_a_line():
    rows = plan_report(small_plan(3), fold=False).tensors
    assert [r.name for r in rows][:2] == ["layers.0.up.weight", "layers.0.norm.weight"]
    assert len(rows) == 6


def test_a_layer_that_differs_is_told_apart_by_its_number():
    names = {r.name: r.dim for r in plan_report(small_plan(5, odd=2)).tensors}
    assert names["layers.[0-1,3-4].up.weight"] == 0
    assert names["layers.2.up.weight"] is None


def test_sizes_count_what_each_rank_holds():
    report = plan_report(small_plan(1, tp=4))
    assert (report.whole.parameters, report.whole.bytes) == (28, 112)
    assert [s.parameters for s in report.ranks] == [12, 12, 8, 8]
    assert report.cut == 24


def test_a_tied_tensor_is_counted_once():
    plan = Plan(2, (verdict("a", (6, 4)), verdict("b", (6, 4), tied_to="a")))
    report = plan_report(plan)
    assert report.whole.parameters == 24
    assert "b  x1  [6, 4]  dim 0  [3, 4]  the same tensor as a" in plan_text(report)


def test_a_copy_is_a_backward_and_a_reduce_a_forward_all_reduce():
    rows = plan_report(small_plan(3)).traffic
    assert [(r.place, r.count, r.direction, r.collective, r.calls, r.bytes) for r in rows] == [
        ("layers.*", 3, "forward", "all-reduce", 1, 160),
        ("layers.*", 3, "backward", "all-reduce", 1, 160),
    ]


def test_gathers_and_scatters_are_counted_where_they_join_parts():
    common = {"shape": (2, 10), "dtype": "bfloat16", "dim": 1, "blocks": (Block(10),)}
    plan = Plan(
        2,
        (),
        (
            Boundary("gather", "head", "output", ("",), **common),
            Boundary("scatter", "", "input", ("args.0",), **common),
        ),
    )
    rows = plan_report(plan).traffic
    assert [(r.place, r.direction, r.collective, r.bytes) for r in rows] == [
        ("head", "forward", "all-gather", 40),
        ("the root module", "backward", "all-gather", 40),
    ]


def test_a_copy_of_a_span_counts_the_span():
    span = Boundary("copy", "m", "input", ("args.0",), shape=(2, 10), dtype="float32", dim=1, span=(0, 5))
    assert plan_report(Plan(2, (), (span,))).traffic[0].bytes == 40


def test_a_summed_gradient_is_a_backward_collective():
    plan = Plan(2, (verdict("q_norm.weight", (8,), Layout(), sum_grad=True),))
    (row,) = plan_report(plan).traffic
    assert (row.place, row.direction, row.bytes) == ("q_norm", "backward", 32)


def test_the_text_of_a_plan():
    assert (
        plan_text(plan_report(small_plan(3)))
        == """\
toy, tp=2
  whole     84 parameters, 336 B
  per rank  48 parameters, 192 B
  cut       85.7 % of the parameters
  sequence  not parallel: its plan was made without looking for slices

Cut
  layers.*.up.weight  x3  [6, 4]  dim 0  [3, 4]  mlp: column

Whole
  mean in layers.*.norm
    layers.*.norm.weight  x3  [4]

Collectives of one training step, for the traced shapes
  layers.*  x3  forward   1 all-reduce  160 B
  layers.*  x3  backward  1 all-reduce  160 B
  in all        forward   3             480 B
  in all        backward  3             480 B

Integers that change
  layers.*.up.width x3: 6 -> 3

Notes
  a guess"""
    )


def test_a_report_is_json():
    assert json.loads(json.dumps(plan_report(small_plan()).to_json()))["tp"] == 2


def test_nearly_all_is_not_shown_as_all():
    plan = Plan(2, (verdict("a", (6, 10000)), verdict("b", (1,), Layout())))
    assert "99.9 %" in plan_text(plan_report(plan))


def test_the_text_of_a_folder():
    manifest = Manifest(
        2,
        {f"layers.{i}.up.weight": Entry((6, 4), "float32", FFN) for i in range(2)},
        tied={"head": "layers.0.up.weight"},
        source={"name": "toy"},
    )
    assert (
        folder_text(manifest, folder_rows(manifest), where="out")
        == """\
out: 2 ranks, 2 tensors, 0 files, 0 B
  source  toy

Tensors
  layers.*.up.weight  x2  [6, 4]  float32  dim 0  [3, 4]

Tied
  head is layers.0.up.weight"""
    )
