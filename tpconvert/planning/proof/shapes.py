"""The shape proof: run the converted module itself as each rank, dry, and compare every op with what the axes predict.

Dry collectives change shapes only, so one process stands for any rank of any degree, on meta too.  An op that comes
out in another shape, or a forward that fails, names the module at fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor, fx, nn

from tpconvert.analyze.axes.run import is_many, tensors
from tpconvert.analyze.axes.terms import Term, leaves
from tpconvert.analyze.capture.run import Call, Inputs, Trace, capture
from tpconvert.analyze.choice.choose import Choice
from tpconvert.analyze.trace.copies import copied
from tpconvert.analyze.watch.shadow import Shadow, needs_shadow
from tpconvert.errors import RewriteError, SourceError
from tpconvert.parallel import parallelize
from tpconvert.parallel.comm.mesh import dry_mesh
from tpconvert.parallel.layers.linear import RowParallelLinear
from tpconvert.planning.proof.training import constants, own_ops
from tpconvert.spec.plan import Plan
from tpconvert.spec.sliced import sliced_form

COUNTS = frozenset(["tolist", "item", "__int__", "__index__"])
"""Questions that make numbers of values."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A module whose forward does not run, or not in the planned shapes, on some rank."""

    module: str
    why: str


def prove_shapes(
    module: nn.Module,
    inputs: Inputs,
    trace: Trace,
    choice: Choice,
    plan: Plan,
    training: bool = False,
    among: Set[Term] | None = None,
) -> list[Fault]:
    """The modules at fault, none when the plan holds; its sliced form where the flow of ``choice`` has slices.

    Ranks differ only where something is dealt unevenly, so the first and the last stand for all; ``among`` are the
    axes in question, where not all are.
    """
    if not choice.chosen or plan.tp == 1:  # on one rank nothing is converted
        return []
    ranks = sorted({0, plan.tp - 1}) if _uneven(choice, plan.tp, among) else [0]
    for rank in ranks:
        faults = _prove_rank(module, inputs, trace, choice, plan, rank, training)
        if faults:
            return faults
    return []


def _uneven(choice: Choice, tp: int, among: Set[Term] | None) -> bool:
    asked = [c for c in choice.chosen if among is None or among & {c.atom, *c.inner}]
    return any(choice.deal.size(c.atom, 0) != choice.deal.size(c.atom, tp - 1) for c in asked)


def _prove_rank(
    module: nn.Module, inputs: Inputs, trace: Trace, choice: Choice, plan: Plan, rank: int, training: bool
) -> list[Fault]:
    from tpconvert.planning.make import eval_mode

    local = copied(module)
    whole = [*_tensors(module), *_tensors(local)]
    sliced = bool(choice.flow.sliced_dims)
    try:
        parallelize(local, plan, dry_mesh(rank, plan.tp), sequence_parallel=sliced)
    except RewriteError as error:
        return [Fault(error.module, error.message)]
    try:
        with eval_mode(local, training):
            shadow = Shadow() if needs_shadow(local) else None
            found = capture(
                local,
                inputs,
                shadow=shadow,
                rules=trace.rules,
                drawn=trace.drawn,
                apart=trace.apart,
                turned=trace.turned,
            )
    except SourceError as error:
        return [Fault(getattr(error, "module", ""), f"its forward fails on rank {rank}: {error.message}")]
    shapes = _compare(trace, found, local, choice, {r.module for r in plan.rewrites}, rank)
    return shapes or _stood_in(trace, found) or _reads_past(found, local, sliced_form(plan) if sliced else plan, whole)


def _compare(
    trace: Trace, found: Trace, local: nn.Module, choice: Choice, rewritten: set[str], rank: int
) -> list[Fault]:
    expected, have = own_ops(trace), own_ops(found)
    faults: dict[str, Fault] = {}
    by_data = trace.by_data
    counting = bool(by_data) or any(c.asked in COUNTS for c in trace.calls)
    for path, calls in expected.items():
        if path.startswith("?") or path in rewritten or _is_ours(local.get_submodule(path)):
            continue
        for both in zip(calls, have.get(path, ()), strict=False):
            # what only hands on what it is given is no op, and what a conversion adds is none of the forward's
            nodes, others = ([n for n in side if not n.meta.keys() & {"passed", "added"}] for side in both)
            if choice.flow.sliced_dims and _parts_by_values(nodes, others, by_data):
                continue  # as it may without slices, where this was looked at
            counted = counting and _counts_values(nodes, others)
            for node, other in _counterparts(nodes, others, by_data):
                if (node is None or other is None) and counted:
                    break
                if node is None or other is None:
                    how = f"without {node.meta['op']}" if node is not None else f"with {other.meta['op']}"  # type: ignore[union-attr]
                    faults.setdefault(path, Fault(path, f"on rank {rank} it takes another path, {how}"))
                    break
                why = _differs(node, other, choice, rank, _unsure(choice, counted or node in by_data, counting))
                why = why or (None if counted else _reads_differ(node, other, choice, rank, by_data))
                if why is None and len(others) < len(nodes):
                    why = _left_out_differs(node, other, choice, rank)
                if why is not None:
                    faults.setdefault(path, Fault(path, why))
                    break
    for call, other in _paired_calls(trace, found):
        for slot, node in call.outputs.items():
            if slot not in other.outputs or (call.parent is None and node in choice.flow.sliced):
                continue  # slices are put together as the model returns them
            returned = not _gathered_around(choice, node, call)
            unsure = _unsure(choice, node in by_data or (counting and _given_others(call, other)), counting)
            if (why := _differs(node, other.outputs[slot], choice, rank, unsure, returned)) is not None:
                faults.setdefault(call.module, Fault(call.module, why))
    inner = {p for p in faults if not any(q != p and q.startswith(f"{p}.") for q in faults)}
    return [faults[p] for p in faults if p in inner]


def _counterparts(
    nodes: list[fx.Node], others: list[fx.Node], by_data: set[fx.Node]
) -> Iterator[tuple[fx.Node | None, fx.Node | None]]:
    """Each op with the one that the rank ran for it; None in the place of what only one of the two ran.

    A rank may leave out what keeps its entries as they are, as repeating them once does: of two paths that are alike
    but for such ops, the others are compared.  Where data takes another path, the values proof decides.
    """
    mine, theirs = ([n for n in side if not _keeps(n)] for side in (nodes, others))
    if _parts_by_values(nodes, others, by_data):  # from where they part they are not the same ops
        yield from takewhile(lambda pair: pair[0].meta["op"] == pair[1].meta["op"], zip(nodes, others, strict=False))
        return
    if len(others) < len(nodes) and [n.meta["op"] for n in mine] == [n.meta["op"] for n in theirs]:
        yield from zip(mine, theirs, strict=True)
        return
    at = iter(others)
    for node in nodes:
        other = next(at, None)
        while other is not None and other.meta["op"] != node.meta["op"]:
            if not _keeps(other):
                yield None, other
            other = next(at, None)
        yield node, other
        if other is None:
            return
    yield from ((None, o) for o in at if not _keeps(o))


def _keeps(node: fx.Node) -> bool:
    """Whether an op gives the entries that it is given in the order in which they were, where it makes no more."""
    if node.meta["op"] == "__getitem__":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return all(i is None or i is ... or i == slice(None) for i in index)
    return node.meta["op"] in ("unsqueeze", "expand", "reshape", "view", "contiguous", "alias")


def _left_out_differs(node: fx.Node, other: fx.Node, choice: Choice, rank: int) -> str | None:
    """How what an op is given differs in size, where the rank may have left out what made it."""
    mine, theirs = node.all_input_nodes, other.all_input_nodes
    for given, here in zip(mine, theirs, strict=False):
        made_elsewhere = not _keeps(given) or _keeps(here) or given in choice.flow.sliced_dims
        if made_elsewhere or len(mine) != len(theirs) or is_many(choice.flow.ax.dims[given]):
            continue
        dims = choice.flow.ax.of(given)
        want = math.prod(choice.deal.size(t, rank) if given in choice.flow.cut else t.n for t in dims)
        if (have := math.prod(here.meta["shape"])) != want:
            return f"{node.meta['op']} is given {have} entries on rank {rank} where the plan needs {want}"
    return None


def _gathered_around(choice: Choice, node: fx.Node, call: Call) -> bool:
    """Whether what a call returns is put together further out only, as the model returns it."""
    gather = choice.flow.gathered.get(node)
    return gather is not None and gather.host is not None and call is not gather.call and call.inside(gather.host.call)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _stood_in(trace: Trace, found: Trace) -> list[Fault]:
    """The modules that put what they read into the place it was read from, where it is read, and changed, once more."""
    before = {(c.module, c.index) for c in trace.calls if c.stand_ins}
    faults: dict[str, Fault] = {}
    for call in found.calls:
        if call.stand_ins and call.parent is not None and (call.module, call.index) not in before:
            path = call.parent.module
            faults.setdefault(path, Fault(path, f"it runs {call.module} on parameters that were read before"))
    return list(faults.values())


def _reads_past(found: Trace, local: nn.Module, plan: Plan, whole: list[tuple[str, Tensor]]) -> list[Fault]:
    """The modules that reach, not as its module's attribute, what such a read changes or what a part replaced.

    A list of its own holds the tensor itself, a closure even that of the module this is a copy of.
    """
    read = {v.name for v in plan.verdicts if v.sum_grad or v.once}
    past = {node: name for name, node in found.parameters.items() if name in read}
    read |= {v.name for v in plan.verdicts if v.layout.cut}
    stale = {id(t): name for name, t in whole if name in read}
    for node in found.nodes:
        if node.meta["op"] == "constant" and id(node.meta["val"]) in stale:
            past[node] = stale[id(node.meta["val"])]
    faults: dict[str, Fault] = {}
    for node, name in past.items():
        for user in node.users:
            call = user.meta.get("call")
            if call is not None and _adds_own(local, call.module, node):
                continue
            while call is not None and node in call.inputs.values():
                call = call.parent
            path = call.module if call is not None else ""
            faults.setdefault(path, Fault(path, f"it reads {name} not as its module's attribute"))
    return list(faults.values())


def _adds_own(local: nn.Module, path: str, node: fx.Node) -> bool:
    """Whether a layer of ours adds its own bias, after its sum."""
    module = None if path.startswith("?") else local.get_submodule(path)
    if not isinstance(module, RowParallelLinear) or not module.tp_sums:
        return False
    return node.meta["val"] is module._parameters.get("bias")


def _paired_calls(trace: Trace, found: Trace):  # type: ignore[no-untyped-def]
    others = {(c.module, c.index): c for c in found.calls}
    return [(c, others[c.module, c.index]) for c in trace.calls if (c.module, c.index) in others]


def _unsure(choice: Choice, counted: bool, counting: bool) -> Callable[[Term], bool]:
    """Which dims that are not cut may have another size in a dry run, which does not have the whole model's values.

    Those of what is ``counted`` by values; where anything is, those that no parameter has.
    """
    ax = choice.flow.ax
    return lambda term: (
        counted or (counting and not any(a in ax.input_atoms or ax.carriers.get(a) for a in leaves(term)))
    )


def _counts_values(nodes: list[fx.Node], others: list[fx.Node]) -> bool:
    """Whether a forward was given numbers that somebody counted by values, which a dry run does not have."""
    calls = [n.meta["call"] for n in (*nodes[:1], *others[:1])]
    return len(calls) == 2 and None not in calls and _given_others(*calls)


def _given_others(call: Call, other: Call) -> bool:
    """Whether two calls were given lists of other integers."""
    mine, theirs = (
        {s: v for s, v in c.constants.items() if s.count(".") > 1 and type(v) is int} for c in (call, other)
    )
    return mine != theirs


def _differs(
    node: fx.Node, other: fx.Node, choice: Choice, rank: int, unsure: Callable[[Term], bool], returned: bool = False
) -> str | None:
    """How an op's shape differs from the predicted one."""
    ax = choice.flow.ax
    if is_many(ax.dims[node]) or node.meta["op"] == "alias":
        return None
    shapes = [tuple(t.shape) for t in tensors(other.meta["val"])]
    if len(shapes) != 1:
        return None
    cut = node in choice.flow.cut or (node in choice.flow.gathered and not returned)
    want = tuple(choice.deal.size(t, rank) if cut else t.n for t in ax.of(node))
    sliced = choice.flow.sliced if returned else dict.fromkeys(choice.flow.local)
    if node in sliced:  # a slice on a dry mesh is all but the last token
        want = tuple(n - (i == choice.flow.sliced_dims[node]) for i, n in enumerate(want))
    whole = tuple(t.n for t in ax.of(node))
    if len(shapes[0]) == len(want):
        pairs = zip(ax.of(node), want, whole, shapes[0], strict=True)
        want = tuple(have if w == n and unsure(t) else w for t, w, n, have in pairs)
    if shapes[0] == want:
        return None
    return f"{node.meta['op']} gives {list(shapes[0])} on rank {rank} where the plan needs {list(want)}"


def _reads_differ(node: fx.Node, other: fx.Node, choice: Choice, rank: int, by_data: set[fx.Node]) -> str | None:
    """A number an op is given that counts the rank's part though it is no size: shapes are right and values wrong.

    Numbers read from data are left to the values proof: dry values are not the whole model's.
    """
    if node in by_data or (node.meta["call"] is not None and node.meta["call"].asked):
        return None
    sites = {s.path for s in choice.flow.ax.sites.get(node, ())}
    mine, theirs = constants((node.args, dict(node.kwargs))), constants((other.args, dict(other.kwargs)))
    for path, value in mine.items():
        here = theirs.get(path)
        if path not in sites and isinstance(value, int | float) and isinstance(here, int | float) and here != value:
            return f"{node.meta['op']} is given {here} on rank {rank} where the whole model gives {value}"
    return None


def _by_values(node: fx.Node, by_data: set[fx.Node]) -> bool:
    """Whether the forward that ran an op branches on values, which a dry run does not have."""
    call = node.meta["call"]
    return call is None or bool(call.asked) or node in by_data


def _parts_by_values(nodes: list[fx.Node], others: list[fx.Node], by_data: set[fx.Node]) -> bool:
    """Whether a forward that branches on values took another path."""
    same = [n.meta["op"] for n in nodes] == [n.meta["op"] for n in others]
    return not same and any(_by_values(n, by_data) for n in nodes)


def _is_ours(module: nn.Module) -> bool:
    return any(c.__module__.startswith("tpconvert.parallel.layers.linear") for c in type(module).__mro__)
