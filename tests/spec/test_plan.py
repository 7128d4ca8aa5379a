import json
from dataclasses import replace

import pytest

from tpconvert.errors import PlanError
from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.plan import Axis, Boundary, Edit, Plan, Rewrite, Slices, Switch, Verdict
from tpconvert.spec.sliced import sliced_form, with_sliced_form

PLAN = Plan(
    2,
    (
        Verdict("up.weight", (8, 4), "float32", Layout(0, (Block(8),)), "cut", axis="mlp:ffn", role="column"),
        Verdict("norm.weight", (4,), "bfloat16", Layout(), "whole", sum_grad=True),
        Verdict("ids", (1, 4), "int64", Layout(), "whole", kind="buffer", persistent=False),
        Verdict("head.weight", (8, 4), "float32", Layout(0, (Block(8),)), "tied", tied_to="up.weight"),
    ),
    boundaries=(
        Boundary("copy", "mlp", "input", ("args.0",), shape=(2, 4), dim=0, span=(0, 2)),
        Boundary("reduce", "", "output", ("",), call=-1),
    ),
    edits=(Edit("attn", "num_heads", 8, (Block(8),), (Block(1),)),),
    rewrites=(Rewrite("attn", "a size is a literal", {"args.0": "tensor"}, ({"op": "view", "args": [1, 2]},), ["n0"]),),
    axes=(Axis("mlp:ffn", "mlp", 8, ("up.weight",)),),
    notes=("a guess",),
    source={"name": "x", "shapes": [[2, 4]]},
)


def test_the_text_gives_the_plan_back():
    assert Plan.loads(PLAN.dumps()) == PLAN


def sliced_plan() -> Plan:
    """``PLAN`` with a form in which a sum is sliced, a copy is further out, and a norm works on slices."""
    norm = replace(PLAN["norm.weight"], sum_grad=False)
    plain = replace(PLAN, verdicts=(PLAN.verdicts[0], norm, *PLAN.verdicts[2:]))
    outer = Boundary("all_gather", "block", "input", ("args.0",), shape=(2, 4), dim=1)
    form = replace(
        plain,
        verdicts=PLAN.verdicts,
        boundaries=(replace(PLAN.boundaries[1], kind="reduce_scatter", dim=1), outer),
        switches=(Switch("drop", "input", True),),
    )
    return with_sliced_form(plain, form, Slices(inputs=(("args.0", 1),)))


def test_the_sliced_form_is_kept_as_what_differs():
    plan = sliced_plan()
    assert [(b.sliced, b.moved) for b in plan.boundaries] == [(None, True), (1, False)]
    assert [b.kind for b in plan.slices.boundaries] == ["all_gather"]
    assert plan["norm.weight"].on_slices and not plan["norm.weight"].sum_grad
    form = sliced_form(plan)
    assert [b.kind for b in form.boundaries] == ["reduce_scatter", "all_gather"]
    assert form.boundaries[0].dim == 1 and form["norm.weight"].sum_grad and form.switches[0].cut
    assert Plan.loads(plan.dumps()) == plan
    assert sliced_form(Plan.loads(plan.dumps())) == form


def test_a_plan_without_a_sliced_form_says_why():
    with pytest.raises(PlanError, match="cannot be sequence parallel: its plan was made without looking for slices"):
        sliced_form(PLAN)


def test_fields_at_their_default_are_left_out():
    first, second = PLAN.to_json()["verdicts"][:2]
    assert "tied_to" not in first and "persistent" not in first
    assert second["layout"] == {} and second["sum_grad"] is True
    assert PLAN.to_json()["verdicts"][2]["persistent"] is False
    assert PLAN.to_json()["boundaries"][0]["span"] == [0, 2]


def test_the_text_has_one_line_a_verdict():
    assert sum(line.strip().startswith('{"name"') for line in PLAN.dumps().splitlines()) == 5  # four verdicts, one axis


def test_a_verdict_is_found_by_name():
    assert PLAN["norm.weight"].dtype == "bfloat16"
    assert "norm.weight" in PLAN and "none" not in PLAN
    with pytest.raises(PlanError, match="no parameter or buffer named none"):
        PLAN["none"]


def test_looking_up_does_not_search():
    verdicts = tuple(Verdict(f"p{i}", (1,), "float32", Layout(), "x") for i in range(20_000))
    plan = Plan(1, verdicts)
    assert all(plan[f"p{i}"] is verdicts[i] for i in range(20_000))  # quadratic time would be minutes


def test_two_verdicts_for_one_name_are_refused():
    with pytest.raises(PlanError, match=r"two verdicts for ids"):
        replace(PLAN, verdicts=(*PLAN.verdicts, PLAN["ids"]))


def test_another_degree_keeps_everything_else():
    other = replace(PLAN, tp=4)
    assert other["up.weight"] == PLAN["up.weight"]
    assert other.tp == 4


def damaged(path, value):
    data = PLAN.to_json()
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.loads(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (["format"], 99, "format 99"),
        (["format"], True, "format True"),
        (["tp"], 0, "tp is 0"),
        (["tp"], "2", "tp is '2'"),
        (["tp"], True, "tp is True"),
        (["verdict"], [], "there is no key 'verdict'; did you mean verdicts?"),
        (["verdicts"], None, "verdicts: null is not a list"),
        (["verdicts", 0], "up.weight", r'verdicts\[0\]: "up.weight" is not a mapping'),
        (["verdicts", 0, "layuot"], 1, r"verdicts\[0\] \(up.weight\): there is no key 'layuot'; did you mean layout?"),
        (
            ["verdicts", 0, "shape"],
            [7, 4],
            r"up.weight.: the layout .* does not fit its shape .* 8 rows of 7",
        ),
        (["verdicts", 0, "shape"], ["8", 4], r'up.weight.\.shape\[0\]: "8" is not a whole number'),
        (["verdicts", 1, "shape"], [-4], r"norm.weight.: shape is \[-4\], with a size below 0"),
        (["verdicts", 0, "layout"], {"dim": 0, "blocks": [[-8, 1]]}, "no block"),
        (["verdicts", 0, "layout"], {"dim": 2, "blocks": [[8, 1]]}, "which has no dim 2"),
        (["verdicts", 0, "layout"], {"dim": True, "blocks": [[8, 1]]}, "no layout"),
        (["verdicts", 0, "layout"], {"dim": 0, "block": [[8, 1]]}, "no layout"),
        (["verdicts", 1, "layout"], None, r"norm.weight.\.layout: None is no layout"),
        (["verdicts", 0, "kind"], "gradient", r'kind: "gradient" is not one of parameter, buffer'),
        (["verdicts", 1, "sum_grad"], "no", 'sum_grad: "no" is not true or false'),
        (["verdicts", 0, "axis"], "mlp:fnn", "there is no axis mlp:fnn; did you mean mlp:ffn?"),
        (
            ["verdicts", 3, "tied_to"],
            "up.wight",
            "no verdict; did you mean up.weight?",
        ),
        (["verdicts", 3, "tied_to"], "norm.weight", "tied to norm.weight, so both must have one shape"),
        (["verdicts", 0, "name"], "norm.weight", "two verdicts for norm.weight"),
        (["boundaries", 0, "kind"], "sum", r'boundaries\[0\] \(mlp\).kind: "sum" is not one of reduce, reduce_scatter'),
        (["boundaries", 0, "side"], "inside", "side"),
        (["boundaries", 0, "slots"], "args.0", 'slots: "args.0" is not a list'),
        (["boundaries", 0, "slots"], [], "needs slots"),
        (["boundaries", 0, "dim"], 2, "dim is 2"),
        (["boundaries", 0, "dim"], None, "of a span needs a dim"),
        (["boundaries", 0, "span"], [0, 3], r"span is \[0, 3\] of 2 rows"),
        (["boundaries", 0, "span"], [0], "not a list of 2"),
        (["boundaries", 0, "call"], 1, "call 1 of 1"),
        (["boundaries", 1, "kind"], "gather", "a gather needs a dim"),
        (["boundaries", 1, "axis"], "mlp", "there is no axis mlp"),
        (["edits", 0, "value"], 6, "num_heads is 6, and its blocks count 8 / 1"),
        (["edits", 0, "per"], [[0, 1]], "count 8 / 0"),
        (["rewrites", 0, "nodes"], {}, "not a list"),
        (["axes"], [{"name": "mlp:ffn", "pattern": "mlp", "size": 8, "parameters": []}] * 2, "two of that name"),
        (["unreached"], "mlp", "unreached: .mlp. is not a list"),
        (
            ["slices"],
            {"rows": True, "sequences": True},
            "slices: slices are of rows or of whole sequences, not of both",
        ),
        (["slices"], {"inputs": [["args.0", "1"]]}, r"slices.inputs\[0\]\[1\]"),
        (
            ["slices"],
            {"boundaries": [{"kind": "all_gather", "module": "", "side": "input", "slots": ["0"]}]},
            r"slices.boundaries\[0\]: a all_gather needs a dim",
        ),
    ],
)
def test_a_damaged_plan_says_what_is_wrong(path, value, text):
    with pytest.raises(PlanError, match=text) as error:
        Plan.from_json(damaged(path, value), "my.json")
    assert str(error.value).startswith("my.json: ")
    assert "make the plan again" in error.value.hint


def test_a_degree_that_the_layouts_cannot_be_dealt_to_is_refused():
    with pytest.raises(PlanError, match=r"verdicts\[0\] \(up.weight\): 8 units cannot be shared by 12 ranks"):
        Plan.from_json(damaged(["tp"], 12))


def test_a_name_that_occurs_twice_is_refused():
    with pytest.raises(PlanError, match="the name 'tp' occurs twice"):
        Plan.loads('{"format": 1, "tp": 2, "tp": 4, "verdicts": []}')


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3", "null", '"x"', "[" * 5000])
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(PlanError, match=r"^plan\.json: .* Make one with: tpconvert plan"):
        Plan.loads(text)
