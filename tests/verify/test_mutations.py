"""verify is only as good as the faults it finds: each is planted, and each must turn the verdict red."""

import pytest

from tests.ranks import RankFailedError
from tests.verify.faults import FAULTS, base, planted
from tests.verify.frame import proved


@pytest.fixture(scope="module")
def found(pool):
    """A function: the kinds of the checks that a fault fails, each with how often."""
    seen = {}

    def find(name):
        if name not in seen:
            fault = FAULTS[name]
            plan = base(fault.model, fault.tp)
            try:
                result = pool.run(planted, fault.tp, name, fault.plan(plan).dumps())[0]
            except RankFailedError as error:  # a missing copy need not come so far as to be compared
                assert "PlanError: " in str(error) and "whose gradient nobody sums over ranks" in str(error)
                return seen.setdefault(name, {"refused": 1})
            failing = [c for c in result.checks if not c.equal]
            assert result.equal is not bool(failing)
            seen[name] = {c.kind: sum(f.kind == c.kind for f in failing) for c in failing}
        return seen[name]

    return find


@pytest.mark.parametrize(("model", "tp"), sorted({(f.model, f.tp) for f in FAULTS.values()}))
def test_the_models_are_equal_without_a_fault(run_ranks, model, tp):
    result = run_ranks(proved, tp, model, base(model, tp).dumps())[0]
    assert result.equal, result.verdict()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(found, name):
    assert found(name), f"{name}: the verdict stayed equal"


def test_the_score(found, record_property):
    score = {name: found(name) for name in FAULTS}
    killed = sum(map(bool, score.values()))
    record_property("mutations", f"{killed} of {len(score)}")
    print(f"\nmutations found: {killed} of {len(score)}")
    for name, kinds in score.items():
        print(f"  {name:55} {', '.join(f'{kind} {n}' for kind, n in kinds.items()) or 'NOT FOUND'}")
    assert killed == len(score) >= 24
