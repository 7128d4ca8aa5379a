"""Cached functions that a forward gives sizes to: what one layer's gave is not another's."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equal import difference
from tests.ranks import Pool
from tpconvert.planning import make_plan

MODEL, HEADS = 24, 4


@functools.lru_cache(64)
def parted(shape: tuple[int, ...], heads: int) -> tuple[int, ...]:
    """The shape whose last dim is (heads, size of one)."""
    return (*shape[:-1], heads, shape[-1] // heads)


class ByFunction(nn.Module):
    """Attention that asks a cached function for its shapes, as libraries of notations do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = HEADS
        self.qkv, self.out = nn.Linear(MODEL, 3 * MODEL), nn.Linear(MODEL, MODEL)

    def parted(self, x: Tensor) -> tuple[int, ...]:
        return parted(x.shape, self.count)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(self.parted(t)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ByMethod(ByFunction):
    """The same by a cached method, of the layer and of the class."""

    @staticmethod
    @functools.cache
    def apart(width: int, heads: int) -> int:
        return width // heads

    def parted(self, x: Tensor) -> tuple[int, ...]:
        return (*x.shape[:-1], self.count, self.kept(x.shape[-1], self.count))

    @functools.lru_cache(64)  # noqa: B019  (what is tested)
    def kept(self, width: int, heads: int) -> int:
        return self.apart(width, heads)


class ByTable(ByFunction):
    """The same by a table that all layers share and nothing clears."""

    table: ClassVar[dict[int, int]] = {}

    def parted(self, x: Tensor) -> tuple[int, ...]:
        self.table.setdefault(x.shape[-1], x.shape[-1] // self.count)
        return (*x.shape[:-1], self.count, self.table[x.shape[-1]])


def built(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layer = {"function": ByFunction, "method": ByMethod, "table": ByTable}[kind]
    return nn.Sequential(layer(), nn.LayerNorm(MODEL), layer()), (torch.randn(2, 13, MODEL),)


@pytest.mark.parametrize("kind", ["function", "method"])
def test_each_layer_divides_its_own_heads(pool: Pool, kind: str) -> None:
    module, inputs = built(kind)
    module(*inputs)  # after which plain numbers are in the cache
    plan = make_plan(module, inputs, tp=2)
    assert {(e.module, e.attribute) for e in plan.edits} == {("0", "count"), ("2", "count")}
    assert all(plan[f"{i}.{name}.weight"].layout.cut for i in (0, 2) for name in ("qkv", "out"))
    assert not plan.rewrites
    found = pool.run(difference, 2, __name__, plan.dumps(), kind)
    assert found[0] is None


def test_what_a_table_kept_of_an_earlier_capture_is_a_number(pool: Pool) -> None:
    ByTable.table.clear()
    module, inputs = built("table")
    first = make_plan(module, inputs, tp=2)
    again = make_plan(module, inputs, tp=2)
    assert [v.layout for v in again.verdicts] == [v.layout for v in first.verdicts]
    assert pool.run(difference, 2, __name__, again.dumps(), "table")[0] is None


def test_a_cache_is_as_it_was_after_planning() -> None:
    parted.cache_clear()
    module, inputs = built("function")
    make_plan(module, inputs, tp=2)
    assert type(parted) is type(functools.lru_cache(parted.__wrapped__))
    given = parted((2, 13, MODEL), HEADS)
    assert given == (2, 13, HEADS, MODEL // HEADS) and {type(n) for n in given} == {int}
