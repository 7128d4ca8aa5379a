"""Every op rule against the op itself: cut each dim that it leaves free, and compare every rank with the whole.

A rule that leaves a dim free that must be whole, joins dims that are not one, or calls an op linear that is not,
gives values or gradients that differ.
"""

import tomllib
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.rules.cases import CASES, SPELLINGS
from tests.rules.one import Case, agrees, analyse, case, flow_of, free_dims, parameter_atoms, shared_sum
from tpconvert.analyze.axes.run import Rule
from tpconvert.analyze.capture.parts import SPREADS
from tpconvert.analyze.ops.rules import POINTWISE, Rules, load_rules, rules_folder

RULES = load_rules()
WHOLE = {
    name: entry["whole"]
    for entry in tomllib.loads((rules_folder() / "ops.toml").read_text())["op"]
    if "whole" in entry
    for name in entry["names"].split()
}
"""Ops that stay whole, and why."""
FREE = tomllib.loads(Path(__file__).with_name("free.toml").read_text())
EACH = [pytest.param(name, use, id=f"{name}-{i}") for name, uses in CASES.items() for i, use in enumerate(uses)]


def same(name: str, other: str) -> bool:
    """Whether two names have one rule, wherever it was written."""
    one, two = RULES.get(name), RULES.get(other)
    return one is not None and two is not None and replace(one, origin="") == replace(two, origin="")


def test_every_rule_has_a_case_or_is_another_spelling() -> None:
    rest = {name for name, rule in RULES.items() if not rule.through} - set(CASES) - set(SPELLINGS) - set(WHOLE)
    assert rest == {"_grouped_mm"}  # no kernel for float64
    assert all(CASES.values())
    for name, other in SPELLINGS.items():
        assert same(name, other), name


@pytest.mark.parametrize(("name", "use"), EACH)
def test_a_case_runs_the_op_it_is_named_for(name: str, use: Case) -> None:
    trace = analyse(use).trace
    last = set(trace.outputs.values())  # the products with parameters that every case ends in
    ops = {node.meta["op"] for node in trace.nodes if node not in last}
    in_parts = name in SPREADS and {"mean", "square"} <= ops
    assert name in ops or in_parts or any(same(op, name) or op.rstrip("_") == name for op in ops), ops


@pytest.mark.parametrize(("name", "use"), EACH)
def test_each_dim_left_free_can_be_cut_alone(name: str, use: Case) -> None:
    ax = analyse(use)
    for atom in parameter_atoms(ax):
        flow = flow_of(ax, atom)
        for tp in (2, 3):
            assert flow is None or atom.n < tp or agrees(flow, tp, atom), f"{atom.n} indices on {tp} ranks"


@pytest.mark.parametrize(("name", "use"), EACH)
def test_operands_that_are_pending_sums_go_through_or_are_summed_first(name: str, use: Case) -> None:
    for count in (1, 2, 3):
        for summed in combinations(use.floating, count):
            ax = analyse(use, frozenset(summed))
            atom = shared_sum(ax)
            assert not ax.blocked.get(atom)
            flow = flow_of(ax, atom)
            assert flow is None or agrees(flow, 2, atom), f"operands {summed} are sums"


@pytest.mark.parametrize(("name", "use"), EACH)
def test_a_pending_sum_beside_a_cut_dim_is_right_or_refused(name: str, use: Case) -> None:
    for i in use.floating:
        ax = analyse(use, frozenset([i]))
        atom = shared_sum(ax)
        for other in parameter_atoms(ax):
            if other is not atom and other not in ax.multiplies[atom]:
                flow = flow_of(ax, atom, other)
                assert flow is None or agrees(flow, 2, atom, other), f"operand {i} is a sum, {other.n} indices are cut"


@pytest.mark.parametrize("name", CASES)
def test_a_rule_leaves_free_what_it_can(name: str) -> None:
    assert [free_dims(analyse(use)) for use in CASES[name]] == FREE[name]


# -- the comparison itself can fail --------------------------------------------------------------------------------


def changed(**rules: Rule) -> Rules:
    return Rules({**RULES, **rules})


def right(use: Case, rules: Rules, summed: frozenset[int] = frozenset()) -> bool:
    ax = analyse(use, summed, rules)
    atoms = [shared_sum(ax)] if summed else parameter_atoms(ax)
    flows = {atom: flow_of(ax, atom) for atom in atoms}
    try:
        return all(flow is None or agrees(flow, 2, atom) for atom, flow in flows.items())
    except RuntimeError:  # sizes that do not fit
        return False


def test_a_rule_that_forgets_to_block_is_caught() -> None:
    use = case(lambda x: F.softmax(x, dim=-1), (3, 5))
    assert right(use, RULES)
    assert not right(use, changed(softmax=POINTWISE))


def test_a_rule_that_forgets_to_contract_is_caught() -> None:
    def carry(ax, node, a):  # type: ignore[no-untyped-def]
        ax.unify(ax.of(a["input"])[1], ax.of(a["other"])[0], node)
        return [ax.of(a["input"])[0], ax.of(a["other"])[1]]

    use = case(torch.mm, (3, 5), (5, 7))
    assert right(use, RULES)
    assert not right(use, changed(mm=Rule(carry, ("input", "other"))))


def test_a_rule_that_joins_the_wrong_dims_is_caught() -> None:
    use = case(lambda x: x.transpose(0, 1), (3, 3))
    assert right(use, RULES)
    assert not right(use, changed(transpose=Rule(lambda ax, node, a: ax.of(a["input"]), ("input",))))


@pytest.mark.parametrize("kind", ["linear", "joint"])
def test_a_rule_that_calls_an_op_linear_which_is_not_is_caught(kind: str) -> None:
    use = case(F.relu, (3, 5))
    rule = Rule(POINTWISE.apply, ("input",), **{kind: frozenset({"input"})})
    assert right(use, RULES, frozenset([0]))
    assert not right(use, changed(relu=rule), frozenset([0]))


def test_an_op_without_a_rule_blocks_everything_it_touches() -> None:
    use = case(lambda x, y: torch.linalg.svdvals(x) * y[:, 0], (3, 5), (3, 7))
    ax = analyse(use)
    assert not any(flow_of(ax, a) for a in parameter_atoms(ax) if a.n in (3, 5))
    reasons = [blocked.why for _, blocked in ax.blocks]
    assert "linalg_svdvals: no rule for this op (add one with --rules)" in reasons


def recurrent(kind: type[torch.nn.RNNBase]) -> Case:
    """A recurrent layer that was made before it is captured."""
    layer = kind(7, 11).double()
    return case(lambda x: layer(x)[0], (5, 3, 7))


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("lstm", recurrent(torch.nn.LSTM)),
        ("gru", recurrent(torch.nn.GRU)),
        ("cross_entropy_loss", case(lambda x: F.cross_entropy(x, torch.tensor([1, 0, 2])), (3, 5))),
        ("as_strided", case(lambda x: x.as_strided((3, 2), (5, 1)), (3, 5))),
        ("masked_select", case(lambda x: x.masked_select(x > 0), (3, 5))),
    ],
)
def test_an_op_that_must_stay_whole_says_why_in_its_own_words(name: str, use: Case) -> None:
    ax = analyse(use)
    assert free_dims(ax) == ""
    assert f"{name}: {WHOLE[name]}" in {blocked.why for _, blocked in ax.blocks}


def test_a_view_as_another_dtype_blocks() -> None:
    assert free_dims(analyse(case(lambda x: x.view(torch.int64), (3, 5)))) == ""
