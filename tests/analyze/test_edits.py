"""Which integers of the user's modules are divided, and which never are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import hf_models
from tests.analyze.test_flow import core, cut, planned
from tests.models import MODELS
from tests.zoo.frame import Framed, floats, seeded
from tpconvert.analyze.capture.run import capture
from tpconvert.analyze.rewrite.edits import spell
from tpconvert.analyze.trace.provenance import Attribute, Formulas, Int, attributes, evaluate, expression, remembering
from tpconvert.parallel import Mesh
from tpconvert.spec.layout import local_size
from tpconvert.spec.plan import Plan
from tpconvert.verify import Result, compare_on_rank


def edited(plan: Plan) -> dict[str, int]:
    """``module.attribute`` -> its value on rank 0."""
    out = {}
    for e in plan.edits:
        per = local_size(e.per, 0, plan.tp) if e.per else 1
        out[f"{e.module}.{e.attribute}"] = local_size(e.blocks, 0, plan.tp) // per
    return out


class Heads(nn.Module):
    """Attention of 12 heads of 5 on a width of 22; subclasses read its sizes in different ways."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.head_dim = 12, 5
        self.qkv, self.out = nn.Linear(width, 180, bias=False), nn.Linear(60, width, bias=False)
        self.more()

    def more(self) -> None:
        """Attributes of a subclass."""

    def parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.split(self.heads * self.head_dim, dim=-1)

    def shape(self, x: Tensor) -> tuple[int, ...]:
        return (*x.shape[:2], self.heads, self.head_dim)

    def scale(self) -> float:
        return 0.4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(self.shape(x)).transpose(1, 2) for t in self.parts(self.qkv(x)))
        y = F.scaled_dot_product_attention(q, k, v, scale=self.scale())
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


def test_the_number_of_heads_is_divided_and_the_size_of_a_head_is_not() -> None:
    plan = core(Heads)
    assert edited(plan) == {"core.heads": 6}
    assert not plan.rewrites


class Width(Heads):
    """Parts and heads from a width that is an attribute."""

    def more(self) -> None:
        self.width = 60

    def parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.split(self.width, dim=-1)


def test_several_attributes_of_one_forward_are_divided_together() -> None:
    plan = core(Width)
    assert edited(plan) == {"core.heads": 6, "core.width": 30}
    assert not plan.rewrites


class Tuple(Heads):
    """Parts from a tuple."""

    def more(self) -> None:
        self.sizes = (60, 60, 60)

    def parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.split(self.sizes, dim=-1)


def test_items_of_a_tuple_are_divided_one_by_one() -> None:
    plan = core(Tuple)
    assert edited(plan) == {"core.heads": 6, "core.sizes.0": 30, "core.sizes.1": 30, "core.sizes.2": 30}


class Formula(Heads):
    """The number of heads in a formula as well."""

    def scale(self) -> float:
        return self.heads**-0.5


class Drawn(Heads):
    """The number of heads as a value of an op."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.full((1,), self.heads)


class Divided(Heads):
    """A formula of the width of all heads."""

    def more(self) -> None:
        self.width = 60

    def scale(self) -> float:
        return 1 / (self.width / self.heads) ** 0.5


class Inverse(Heads):
    """A formula that begins with a float, which no integer can notice."""

    def scale(self) -> float:
        return 1.0 / self.heads


class Slopes(Heads):
    """A list of numbers as long as there are heads, as ALiBi's slopes."""

    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.tensor([2.0 ** (-8.0 / self.heads * (i + 1)) for i in range(self.heads)])
        qkv = self.qkv(x) * slopes.to(x.dtype).repeat_interleave(self.head_dim).repeat(3)
        q, k, v = (t.view(self.shape(x)).transpose(1, 2) for t in self.parts(qkv))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class MeanByHand(Heads):
    """A sum over a cut width, divided by the width that the tensor tells."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)[..., : self.heads * self.head_dim].relu()
        return self.out(y - y.sum(-1, keepdim=True) / y.size(-1))


class MeanOfPart(Heads):
    """The same, joined by nothing that is not linear before the sum is complete."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x).relu()
        return self.out(y[..., :60]) + y.sum(-1, keepdim=True) / y.size(-1)


FORMULAS = [Formula, Drawn, Divided, Inverse, Slopes, MeanOfPart]


@pytest.mark.parametrize("make", [f for f in FORMULAS if f is not Slopes])
def test_an_attribute_that_feeds_a_formula_too_is_not_divided(make) -> None:
    plan = core(make)
    assert "core.heads" not in edited(plan)
    assert {r.module for r in plan.rewrites} == {"core"}
    assert "core.qkv.weight" in cut(plan)


class Literal(Heads):
    """Sizes that are numbers in the code."""

    def shape(self, x: Tensor) -> tuple[int, ...]:
        return (*x.shape[:2], 12, 5)


def test_a_size_that_is_a_number_in_the_code_has_the_forward_rewritten_and_named() -> None:
    plan = core(Literal)
    (rewrite,) = plan.rewrites
    assert rewrite.module == "core"
    assert "view in its forward is given the literal 12" in rewrite.reason
    assert "core.heads" not in edited(plan)


class Holder:
    """A plain object with sizes, as a config is."""

    def __init__(self) -> None:
        self.heads = 12


class Configured(nn.Module):
    """Two attentions that read one config, of which only one may be cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        config = Holder()
        self.a, self.b = ReadsConfig(width, config), ReadsConfig(width, config)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x + self.a(x))


class ReadsConfig(Heads):
    def __init__(self, width: int, config: Holder) -> None:
        super().__init__(width)
        self.config = config

    def parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.split(self.config.heads * self.head_dim, dim=-1)

    def shape(self, x: Tensor) -> tuple[int, ...]:
        return (*x.shape[:2], self.config.heads, self.head_dim)


def test_an_attribute_of_a_config_is_divided_for_the_module_that_reads_it_alone() -> None:
    plan = core(Configured, overrides=["core.a=whole"])
    assert edited(plan) == {"core.b.config.heads": 6}
    assert edited(core(Configured)) == {"core.a.config.heads": 6, "core.b.config.heads": 6}


def compared(mesh: Mesh, make, plan: str) -> Result | None:
    module = seeded(lambda: Framed(make(22), 22))
    return compare_on_rank(module, {"x": floats(3, 7, 22)}, Plan.loads(plan), mesh)


@pytest.mark.parametrize("make", [*FORMULAS, MeanByHand, Tuple, Width, Literal, Configured])
def test_the_converted_forward_gives_the_values_of_the_whole_one(run_ranks, make) -> None:
    result = run_ranks(compared, 2, make, core(make).dumps())[0]
    assert result.equal, result.verdict()


def test_uneven_heads_are_divided_by_whole_heads() -> None:
    plan = planned(MODELS["attention_odd"](), 2)
    (heads,) = {e.value for e in plan.edits if e.attribute == "heads"}
    assert edited(plan)["core.heads"] == (heads + 1) // 2


def test_real_classes_are_edited_or_rewritten_and_plans_of_them_stay_small() -> None:
    plan = planned(hf_models.build("bloom_eight"), 2)
    assert {e.attribute for e in plan.edits} >= {"num_heads"}


# -- integers that remember ----------------------------------------------------------------------------------------


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width, self.one, self.pair = 12, 60, 1, (3, 4)


def test_arithmetic_on_attributes_can_be_done_again_with_other_values() -> None:
    module, formulas = Sizes(), Formulas()
    with remembering(module, formulas) as owners:
        made = (module.width // module.heads + 2) * module.pair[1] - 3 % module.heads
        assert type(module.one) is int
    assert isinstance(made, Int)
    assert int(made) == (60 // 12 + 2) * 4 - 3
    names = {(a.name, a.item) for a in attributes(expression(made))}
    assert names == {("width", None), ("heads", None), ("pair", 1)}
    assert set(owners.values()) == {module}

    def halved(a: Attribute) -> int:
        whole = getattr(module, a.name)
        return (whole if a.item is None else whole[a.item]) // 2

    assert evaluate(expression(made), halved, lambda node, i: 0) == (30 // 6 + 2) * 2 - 3 % 6
    assert formulas == []


@pytest.mark.parametrize(
    "use",
    [
        lambda n: n**2,
        lambda n: 2**n,
        lambda n: n / 2,
        lambda n: 1 / n,
        float,
        lambda n: n * 0.5,
        lambda n: n + 1.5,
    ],
)
def test_a_number_that_leaves_the_integers_is_known_as_a_formula(use) -> None:
    module, formulas = Sizes(), Formulas()
    with remembering(module, formulas):
        use(module.heads)
    assert [a.name for f in formulas for a in attributes(f)] == ["heads"]


@pytest.mark.parametrize(
    "use", [lambda n: n >> 1, lambda n: 7 & n, lambda n: divmod(n, 5), lambda n: divmod(5, n), lambda n: n.bit_length()]
)
def test_an_integer_that_forgets_is_known_as_a_formula(use) -> None:
    module, formulas = Sizes(), Formulas()
    with remembering(module, formulas):
        assert use(module.heads) == use(12)
    assert [a.name for f in formulas for a in attributes(f)] == ["heads"]


class Decides(nn.Module):
    """Compares sizes in its own forward, and in no child's."""

    def __init__(self) -> None:
        super().__init__()
        self.limit, self.inner = 6, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if x.shape[1] and max(x.shape[1] * 2, self.limit) == 14 and x.shape[0] < 2.5:
            return x
        return -x


def test_what_a_forward_decides_by_integers_is_known() -> None:
    trace = capture(Decides(), (torch.ones(3, 7),))
    outer, inner = trace.calls
    assert inner.decided == {}
    spelled = {
        (q.__name__, spell(a), str(b) if isinstance(b, int | float) else spell(b)): v
        for (q, a, b), v in outer.decided.items()
    }
    assert spelled == {
        ("ne", "size(1)", "0"): True,
        ("gt", "limit", "size(1) * the literal 2"): False,
        ("eq", "size(1) * the literal 2", "14"): True,
        ("lt", "size(0)", "2.5"): False,
    }


def test_a_copied_or_pickled_integer_is_a_plain_one() -> None:
    import copy
    import pickle

    number = Int(3, Attribute(0, "n"), Formulas())
    for other in (copy.copy(number), copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
        assert type(other) is int
