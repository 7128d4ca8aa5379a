"""One op as a module, every way of cutting it, and the comparison of each with the whole op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.analyze.axes.dealing import Deal
from tpconvert.analyze.axes.run import Axes, tensors
from tpconvert.analyze.axes.terms import Term, leaves
from tpconvert.analyze.capture.run import capture
from tpconvert.analyze.emulate.run import Lockstep
from tpconvert.analyze.flow.run import ConflictError, Flow, trace_flow
from tpconvert.analyze.ops.rules import Rules, load_rules

RANDOM = frozenset(
    [
        "rand_like",
        "randn_like",
        "bernoulli",
        "bernoulli_",
        "normal_",
        "uniform_",
        "exponential_",
        "multinomial",
        "rand",
        "randn",
        "randint",
        "randperm",
        "empty_like",
    ]
)
TERMS = 5


@dataclass(frozen=True, slots=True)
class Case:
    """A use of an op: a function and its operands."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    """A shape is a parameter of mixed signs; a tensor is itself: a parameter if it is floating, else a buffer."""

    @property
    def floating(self) -> list[int]:
        """The operands that are parameters."""
        return [
            i
            for i, o in enumerate(self.operands)
            if isinstance(o, tuple) or (isinstance(o, Tensor) and o.is_floating_point())
        ]


def case(function: Callable[..., Any], *operands: Any) -> Case:
    """A use of an op."""
    return Case(function, operands)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A floating operand that is not differentiated."""

    value: Tensor


def tensor_of(operand: Any) -> Tensor:
    """The tensor an operand is."""
    return operand.value if isinstance(operand, Buffer) else operand


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Seeded numbers between -0.9 and 0.9, none near zero."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    size = 0.1 + 0.8 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return size * (2 * torch.randint(0, 2, shape, generator=generator) - 1)


def positive(*shape: int) -> Tensor:
    """The same without signs."""
    return numbers(*shape).abs()


def places(*shape: int, below: int) -> Tensor:
    """Seeded integers from 0 to ``below`` - 1, the last one among them."""
    out = torch.randint(0, below, shape, generator=torch.Generator().manual_seed(sum(shape)))
    out.view(-1)[-1] = below - 1
    return out


def bits(*shape: int) -> Tensor:
    """Seeded truth values."""
    return numbers(*shape, seed=1) > 0


class OneOp(nn.Module):
    """The op, each floating result of which meets a parameter of its own shape.

    With ``summed``, those operands are sums over a dim of their own that all of them share.
    """

    def __init__(self, case: Case, summed: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.function, self.summed, self.count = case.function, summed, len(case.operands)
        for i, operand in enumerate(case.operands):
            value = numbers(*operand, seed=i) if isinstance(operand, tuple) else tensor_of(operand).clone()
            if i in summed:
                value = torch.stack([value * (0.3 + 0.2 * j) for j in range(TERMS)])
            if (value.is_floating_point() or value.is_complex()) and not isinstance(operand, Buffer):
                self.register_parameter(f"a{i}", nn.Parameter(value))
            else:
                self.register_buffer(f"a{i}", value)
        self.terms = nn.Parameter(numbers(TERMS))
        with torch.no_grad():
            results = tensors(self.results())
        for i, result in enumerate(results):
            self.register_parameter(f"r{i}", nn.Parameter(numbers(*result.shape, seed=9)))

    def operand(self, i: int) -> Tensor:
        value = getattr(self, f"a{i}")
        return (value * self.terms.view(-1, *[1] * (value.dim() - 1))).sum(0) if i in self.summed else value

    def results(self) -> Any:
        return self.function(*(self.operand(i) for i in range(self.count)))

    def forward(self) -> tuple[Tensor, ...]:
        out = tensors(self.results())
        out = [torch.view_as_real(x).sum(-1) if x.is_complex() else x for x in out]
        return tuple(x * getattr(self, f"r{i}") for i, x in enumerate(out))


class Compared(Lockstep):
    """Lockstep that does not expect ranks to draw the same numbers, up to where they are multiplied by zero."""

    def __init__(self, flow: Flow, deal: Deal) -> None:
        super().__init__(flow, deal)
        self.random: set[Any] = set()

    def compare(self, node: Any) -> None:
        if node.meta["op"] in RANDOM or (self.random & set(node.all_input_nodes) and 0 not in node.args):
            self.random.add(node)
        else:
            super().compare(node)


def analyse(case: Case, summed: frozenset[int] = frozenset(), rules: Rules | None = None) -> Axes:
    """The axes of a case."""
    return Axes(capture(OneOp(case, summed), {}, values=True), load_rules() if rules is None else rules)


def flow_of(ax: Axes, *atoms: Term) -> Flow | None:
    """The flow when these atoms alone are cut; None where it is refused."""
    try:
        return trace_flow(ax, set(atoms), frozenset(ax.lookups))
    except ConflictError:
        return None


def agrees(flow: Flow, tp: int, *atoms: Term) -> bool:
    """Whether every op and every gradient is right when the atoms are dealt to ``tp`` ranks."""
    error = Compared(flow, Deal(tp, dict.fromkeys(atoms, (tp, 1)))).run(0).worst()
    return error <= (2e-2 if narrow(flow.ax) else 1e-8)


def narrow(ax: Axes) -> bool:
    """Whether something in a trace has few digits."""
    values = [t for n in ax.trace.nodes for t in tensors(n.meta.get("val"))]
    return any(t.is_floating_point() and t.dtype != torch.float64 for t in values)


def parameter_atoms(ax: Axes) -> list[Term]:
    """Every atom of every parameter and buffer that nothing blocks, once."""
    seen: dict[Term, None] = {}
    for node in ax.trace.parameters.values():
        for term in ax.of(node):
            seen |= dict.fromkeys(sorted((a for a in leaves(term) if not ax.blocked.get(a)), key=lambda a: a.n))
    return list(seen)


def free_dims(ax: Axes) -> str:
    """The operand dims that hold an atom which can be cut, as ``operand.dim``."""
    free = {atom for atom in parameter_atoms(ax) if flow_of(ax, atom) is not None}
    nodes = sorted((name, node) for name, node in ax.trace.parameters.items() if name.startswith("a"))
    return " ".join(f"{name[1:]}.{d}" for name, node in nodes for d, t in enumerate(ax.of(node)) if leaves(t) & free)


def shared_sum(ax: Axes) -> Term:
    """The atom that the summed operands share."""
    (atom,) = leaves(ax.of(ax.trace.parameters["terms"])[0])
    return atom
