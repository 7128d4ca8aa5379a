"""What the checkpoint tests share: hashes of folders, plans written by hand, layouts of every kind."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch import Tensor

from tpconvert.checkpoint.files.header import dtype_name
from tpconvert.checkpoint.tensors.weights import Weights
from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.plan import Plan, Verdict


def hashes(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file."""
    files = (path for path in sorted(Path(folder).rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def plan_of(weights: Weights, tp: int, layouts: Mapping[str, Layout] | None = None) -> Plan:
    """A plan that cuts what ``layouts`` names and leaves the rest whole."""
    layouts = layouts or {}
    verdicts = []
    for name in (*weights.names(), *weights.tied):
        first = weights.tied.get(name, "")
        shape, dtype = weights.info(name)
        layout = layouts.get(first or name, Layout())
        verdicts.append(Verdict(name, shape, dtype_name(dtype), layout, "by hand", tied_to=first))
    return Plan(tp, tuple(verdicts))


def rows(shape: tuple[int, ...], dim: int = 0) -> Layout:
    """The layout that deals every row of a dim by itself."""
    return Layout(dim, (Block(shape[dim]),))


def cut_all(weights: Weights, least: int = 1) -> dict[str, Layout]:
    """Every tensor cut along its longest dim, where that has at least ``least`` rows."""
    out = {}
    for name in weights.names():
        shape, _ = weights.info(name)
        if shape and max(shape) >= least:
            out[name] = rows(shape, shape.index(max(shape)))
    return out


def menagerie() -> dict[str, Tensor]:
    """One tensor of every kind that a checkpoint may hold."""
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(24, 10, generator=g)
    out = {f"float.{d}": noise.to(d) for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    out |= {f"float.{d}": noise.abs().to(d) for d in fp8}
    whole = torch.randint(0, 100, (24, 10), generator=g)
    ints = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    out |= {f"int.{d}": whole.to(d) for d in ints}
    out |= {"bool": noise > 0, "complex": torch.complex(noise, noise)}
    out |= {
        "scalar": torch.tensor(3.5),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "thin": torch.ones(24, 0),
    }
    return out | {
        "nan": torch.full((24,), float("nan")),
        "-0": torch.full((24,), -0.0),
        "experts": noise.reshape(4, 6, 10).clone(),
    }


@st.composite
def blocks(draw: st.DrawFn, degree: int, depth: int = 2) -> Block:
    """A block that ``degree`` ranks can be dealt: units enough, or shared by equally many ranks."""
    shared = [n for n in range(1, degree) if degree % n == 0]
    count = draw(
        st.one_of(st.integers(degree, 2 * degree + 1), st.sampled_from(shared)) if shared else st.integers(1, 5)
    )
    if depth and draw(st.booleans()):
        inner = degree // count if count < degree else 1
        return Block(count, tuple(draw(st.lists(blocks(inner, depth - 1), min_size=1, max_size=3))))
    return Block(count, draw(st.integers(1, 3)))


@st.composite
def layouts(draw: st.DrawFn, degrees: tuple[int, ...]) -> tuple[Layout, tuple[int, ...]]:
    """A layout that all the degrees can be dealt, and a shape it fits."""
    dim = draw(st.integers(0, 2))
    common = draw(st.lists(blocks(max(degrees)), min_size=1, max_size=3))
    layout = Layout(dim, tuple(common))
    shape = tuple(layout_size(layout) if i == dim else draw(st.integers(1, 3)) for i in range(3))
    return layout, shape


def layout_size(layout: Layout) -> int:
    """Rows of the cut dim."""
    return sum(block.size for block in layout.blocks)


def fits(layout: Layout, degree: int) -> bool:
    """Whether the degree can be dealt."""
    from tpconvert.errors import PlanError

    try:
        return all(layout.local_size(rank, degree) >= 0 for rank in range(degree))
    except PlanError:
        return False
