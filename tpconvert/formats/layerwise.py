"""A plan told layer by layer: which modules are column-, row- or vocabulary-parallel, as other libraries say it.

Other libraries know a fixed set of styles.  A style names a module or parameter and implies its collectives: a
column-parallel layer sums the gradient of its input, a row-parallel one sums its output.  A plan can be told so only
where nothing else is needed.  Here each part of a plan is matched with a style on the recorded graph, and what has
none is a :class:`Misfit`, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import fx, nn

from tpconvert.analyze.axes.terms import Term
from tpconvert.analyze.capture.run import Call, Trace
from tpconvert.analyze.flow.run import Flow, Placed, involved
from tpconvert.analyze.flow.states import is_op
from tpconvert.formats.dealt import Dealt, dealt, undealt
from tpconvert.planning.proof.training import own_ops
from tpconvert.spec.plan import Plan, Verdict

Style = Literal[
    "column", "column-gathered", "packed-column", "row", "vocabulary", "sum-grad", "experts", "parts", "segment",
    "rows", "packed-rows", "features", "lent",
]  # fmt: skip
"""Of a module: ``column``, ``column-gathered`` (its output is joined), ``packed-column`` (two layers in one), ``row``,
``vocabulary``; ``sum-grad`` (its parameters are whole and have their gradients summed), ``experts`` (its output is
summed, as are the gradients of what goes in), ``parts`` (its own parameters are parts, nothing more), ``segment`` (the
gradient of the end of its output is summed).

Of a parameter that no layer owns: ``rows`` (cut along the last dim but one, or the only one), ``packed-rows`` (both
halves of it), ``features`` (along the last), ``lent`` (as ``rows``, by a layer that has another name for it)."""

IN_EXPERTS = ("args.0", "args.2")
"""What goes into experts whose gradient their style sums: the hidden states, and after the choice, its weights."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """Cut parameters that no style can treat as the plan does, and why."""

    parameters: frozenset[str]
    why: str


@dataclass(frozen=True, slots=True)
class Layers:
    """The styles of one plan by module or parameter name, in the order of the model, and what has none."""

    styles: dict[str, Style]
    misfits: tuple[Misfit, ...]
    segments: dict[str, int]
    """Module with the style ``segment`` -> how many features at the end of its output."""


def layers(module: nn.Module, plan: Plan, flow: Flow) -> Layers:
    """The plan, whose flow on ``module`` is ``flow``, told layer by layer; edits are not looked at."""
    teller = _Teller(module, plan, flow)
    teller.tell()
    order = {name: i for i, (name, _) in enumerate([*module.named_modules(), *module.named_parameters()])}
    styles = dict(sorted(teller.styles.items(), key=lambda item: order.get(item[0], 0)))
    return Layers(styles, tuple(dict.fromkeys(teller.misfits)), teller.segments)


class _Teller:
    """One plan being told."""

    def __init__(self, module: nn.Module, plan: Plan, flow: Flow) -> None:
        self.module, self.plan, self.flow = module, plan, flow
        self.trace = flow.ax.trace
        self.ops = own_ops(self.trace)
        self.calls: dict[str, list[Call]] = {}
        for call in self.trace.calls:
            self.calls.setdefault(call.module, []).append(call)
        self.gathering = {p.call.module for p in flow.gathered.values() if p.call is not None}
        self.closing: dict[fx.Node, list[Placed]] = {}
        for placed in flow.copies:
            self.closing.setdefault(placed.node, []).append(placed)
        self.owned: dict[str, list[Verdict]] = {}
        self.owners: dict[str, set[str]] = {}  # first name of a tensor -> the modules that own it
        for v in plan.verdicts:
            path = v.name.rpartition(".")[0]
            self.owned.setdefault(path, []).append(v)
            self.owners.setdefault(v.tied_to or v.name, set()).add(path)
        self.of_parameters = _of_parameters(self.trace)
        self.styles: dict[str, Style] = {}
        self.misfits: list[Misfit] = []
        self.segments: dict[str, int] = {}

    def tell(self) -> None:
        """Find a style for everything that is cut, and see that the styles say all that the plan does."""
        for rewrite in self.plan.rewrites:
            self.misfit(self.cut_within(rewrite.module), f"the forward of {rewrite.module} is written anew")
        for path, verdicts in self.owned.items():
            lent = [v for v in verdicts if v.layout.cut and self.lent(path, v)]
            held = [v for v in verdicts if v not in lent]
            if any(v.layout.cut for v in held):
                self.owner(path, held)
            for v in lent:
                self.styles[v.name] = "lent"
                if v.layout.dim != max(len(v.shape) - 2, 0):
                    self.misfit(self.axis(v), f"{v.name} is cut along dim {v.layout.dim} of {len(v.shape)}")
        for path, verdicts in self.owned.items():
            if any(v.sum_grad for v in verdicts):
                self.summed(path, verdicts)
        for node in self.trace.nodes:
            self.uses(node)
            self.entries(node)
        for placed in (*self.flow.counted.values(), *self.flow.scatters, *self.flow.gathered.values()):
            self.crossing(placed)

    # -- what is cut --------------------------------------------------------------------------------------

    def owner(self, path: str, verdicts: list[Verdict]) -> None:
        """The style of a module that holds parts."""
        cut = {v.name: dealt(v.shape, v.layout, self.plan.tp) for v in verdicts if v.layout.cut}
        for v in verdicts:
            if v.name not in cut:
                continue
            if v.kind == "buffer":
                self.misfit(self.axis(v), f"{v.name}, a buffer, is cut with it")
            elif cut[v.name] is None:
                self.misfit(self.axis(v), f"{v.name} {undealt(v.shape, v.layout, self.plan.tp)}")
        layer = self.module.get_submodule(path)
        if isinstance(layer, nn.Linear | nn.Embedding):
            self.layer(path, layer, cut)
        else:
            self.bare(path, verdicts, cut)

    def lent(self, path: str, verdict: Verdict) -> bool:
        """Whether a module only has a name for a tensor that others use, and it does not."""
        first = verdict.tied_to or verdict.name
        users = {u.meta["call"].module for u in self.trace.parameters[first].users if is_op(u) and u.meta["call"]}
        return path not in users and bool(users & self.owners[first])

    def layer(self, path: str, layer: nn.Linear | nn.Embedding, cut: dict[str, Dealt | None]) -> None:
        """A linear layer or an embedding."""
        weight = self.plan[f"{path}.weight"]
        packed = any(d.packed for d in cut.values() if d is not None)
        if not all(self.plain(call) for call in self.ops.get(path, ())):
            self.misfit(self.names(cut), f"{path}, a {type(layer).__name__}, does more than a layer does")
        elif any("args.0" not in call.inputs for call in self.calls.get(path, ())):
            self.misfit(self.names(cut), f"{path} is given its input by name")
        elif isinstance(layer, nn.Embedding) and weight.layout.dim == 0 and not packed:
            self.styles[path] = "vocabulary"
        elif isinstance(layer, nn.Linear) and packed and weight.layout.dim == 0 and len(cut) == 1:
            self.styles[path] = "packed-column"
        elif isinstance(layer, nn.Linear) and weight.layout.cut and not packed:
            row = weight.layout.dim == 1
            self.styles[path] = "row" if row else "column-gathered" if path in self.gathering else "column"
        else:
            self.misfit(self.names(cut), f"{path} is not cut as a layer is")

    def plain(self, ops: list[fx.Node]) -> bool:
        """Whether a forward is that of a layer: one op, and then at most a product with a number."""
        made = [n for n in ops if n.meta["op"] in ("linear", "embedding")]
        after = [n for n in ops if n not in made and not self.is_number(n)]
        scaled = all(
            n.meta["op"] == "mul" and all(o in made or self.is_number(o) for o in n.all_input_nodes) for n in after
        )
        return len(made) == 1 and (not after or (made[0].meta["op"] == "embedding" and scaled))

    def is_number(self, node: fx.Node) -> bool:
        """Whether a value is one number that is not trained."""
        return node.meta.get("shape") == () and not node.meta.get("grad")

    def bare(self, path: str, verdicts: list[Verdict], cut: dict[str, Dealt | None]) -> None:
        """Parameters that a module uses in a forward of its own: experts, or parts that meet no sum."""
        own = [n for call in self.ops.get(path, ()) for n in call]
        style: Style = "experts" if any(map(self.contracted, own)) else "parts"
        for v in verdicts:
            how = cut.get(v.name)
            if how is None:
                continue
            if how.dim == max(len(v.shape) - 2, 0) and (not how.packed or len(v.shape) > 1):
                self.styles[v.name] = "packed-rows" if how.packed else "rows"
            elif how.dim == len(v.shape) - 1 and not how.packed:
                self.styles[v.name] = "features"
            else:
                self.misfit(self.axis(v), f"{v.name} is cut along dim {how.dim} of {len(v.shape)}")
        self.styles[path] = style
        if style == "experts" and (why := self.no_experts(path, verdicts)):
            self.misfit(self.names(cut), why)

    def contracted(self, node: fx.Node) -> bool:
        """Whether an op makes a term of a sum of parts."""
        return node in self.flow.partial and any(n in self.flow.cut for n in node.all_input_nodes)

    def no_experts(self, path: str, verdicts: list[Verdict]) -> str:
        """Why a module that returns terms of a sum does not do what the style of experts does."""
        for call in self.calls[path]:
            inside = [n for n in self.trace.nodes if n.meta["call"] is not None and n.meta["call"].inside(call)]
            if set(call.outputs) != {""}:
                return f"{path} returns more than the sum"
            if any(n in self.flow.reduced and n not in call.outputs.values() for n in inside):
                return f"{path} sums within"
        if any(v.once or v.sum_grad for v in verdicts):
            return f"{path} adds a whole parameter to the sum"
        return ""

    def summed(self, path: str, verdicts: list[Verdict]) -> None:
        """Whole parameters whose gradients are summed."""
        nodes = [self.trace.parameters[v.tied_to or v.name] for v in verdicts if v.sum_grad]
        mixed = [v.name for v in verdicts if v.kind == "parameter" and not v.sum_grad]
        if path in self.styles or mixed or any(v.layout.cut for v in verdicts):
            self.misfit(self.carrying(involved(self.flow, nodes[0])), f"only part of {path} has its gradient summed")
            return
        for node in nodes:
            if not self.meets_parts(node):  # a layer sums further on, so that here there is nothing left to sum
                why = f"{node.target} works on a whole value whose gradient is summed elsewhere"
                self.misfit(self.carrying(involved(self.flow, node)), why)
        self.styles[path] = "sum-grad"

    def meets_parts(self, value: fx.Node) -> bool:
        """Whether a value made of parameters alone is used with parts only."""
        users = [u for u in value.users if is_op(u) and _differentiable(u)]
        return all(u in self.flow.cut or (u in self.of_parameters and self.meets_parts(u)) for u in users)

    # -- what the styles must say -------------------------------------------------------------------------

    def uses(self, node: fx.Node) -> None:
        """A part, and a parameter whose gradient is summed, must be used within a forward of its owner."""
        if node.meta["op"] != "parameter" or not (node in self.flow.cut or node in self.flow.sum_grad):
            return
        owners = self.owners[str(node.target)]
        for user in node.users:
            if not is_op(user) or not self.within(user.meta["call"], owners):
                atoms = self.flow.atoms(node) or involved(self.flow, node)
                self.misfit(self.carrying(atoms), f"{node.target} is used outside its own module")

    def entries(self, node: fx.Node) -> None:
        """A whole value whose gradient is a term of a sum must enter by a layer that sums it; a sum is a layer's."""
        if node.op != "call_function" or node.meta["op"] in ("item", "alias"):
            return
        contracted = self.contracted(node)
        style, experts = self.around(node)
        if contracted and style != ("vocabulary" if node in self.flow.ax.lookups else "row") and experts is None:
            self.misfit(self.near(node), f"{self.place(node)} sums over parts ({node.meta['op']}), which no layer does")
        summed = contracted or (node in self.flow.partial and experts is not None)
        if not (summed or node in self.flow.cut or node in self.flow.gathered):
            return
        for operand in node.all_input_nodes:
            entering = operand.meta.get("grad") and self.flow.whole(operand) and operand not in self.of_parameters
            if entering and not self.sums(operand, style, experts):
                why = f"{self.place(node)} gives parts a whole value ({node.meta['op']}) whose gradient no layer sums"
                self.misfit(self.near(node), why)

    def around(self, node: fx.Node) -> tuple[str, Call | None]:
        """The style of the module that runs an op, and the call of experts it is in, if it is."""
        call = node.meta["call"]
        style = self.styles.get(call.module, "") if call is not None else ""
        while call is not None and self.styles.get(call.module) != "experts":
            call = call.parent
        return style, None if call is not None and node in self.flow.ax.lookups else call

    def place(self, node: fx.Node) -> str:
        """The module that runs an op, in words."""
        call = node.meta["call"]
        return call.module if call is not None and call.module else "the model"

    def near(self, node: fx.Node) -> list[str]:
        """The parameters of the axes an op is about."""
        return self.carrying(self.flow.atoms(node) or involved(self.flow, node))

    def sums(self, operand: fx.Node, style: str, experts: Call | None) -> bool:
        """Whether a style sums the gradient that comes back to ``operand``."""
        if style in ("column", "column-gathered", "packed-column"):
            return True
        return self.goes_into(operand, experts) if experts is not None else self.ends_segment(operand)

    def goes_into(self, value: fx.Node, call: Call) -> bool:
        """Whether a value in a call of experts is made only of what goes in at the slots whose gradient is summed."""
        slots = {n: slot for slot, n in call.inputs.items()}
        if value in slots:
            return slots[value] in IN_EXPERTS
        made = value.meta["call"]
        if made is None or not made.inside(call):
            return False
        return all(self.goes_into(n, call) for n in value.all_input_nodes if _differentiable(n))

    def ends_segment(self, value: fx.Node) -> bool:
        """Whether the sum of a value's gradient is that of the end of what one linear layer returns."""
        found = self.closed_by(value, set())
        for placed in found:
            path = placed.host.call.module if placed.host is not None else ""
            size = placed.node.meta["shape"][-1]
            last = placed.span is not None and placed.span[0] == len(placed.node.meta["shape"]) - 1
            plain = [[n.meta["op"] for n in c] for c in self.ops.get(path, ())] == [["linear"]]
            if not last or placed.span[2] != size or not plain or self.styles.get(path, "segment") != "segment":  # type: ignore[index]
                return False
        for placed in found:
            self.styles[placed.host.call.module] = "segment"  # type: ignore[union-attr]
            self.segments[placed.host.call.module] = placed.span[2] - placed.span[1]  # type: ignore[union-attr,index]
        return bool(found)

    def closed_by(self, value: fx.Node, seen: set[fx.Node]) -> list[Placed]:
        """The copies upstream at which the gradient of a value is summed."""
        if value in seen:
            return []
        seen.add(value)
        if value in self.closing:
            return self.closing[value]
        return [p for n in value.all_input_nodes if _differentiable(n) for p in self.closed_by(n, seen)]

    def crossing(self, placed: Placed) -> None:
        """A gather or scatter must be one that a style makes."""
        path = placed.call.module if placed.call is not None else ""
        if placed.kind == "gather" and self.styles.get(path) == "column-gathered" and placed.host is not None:
            return
        what = {"gather": "joined", "scatter": "taken in part", "once": "counted on one rank"}[placed.kind]
        names = self.carrying(self.flow.atoms(placed.node) or involved(self.flow, placed.node))
        self.misfit(names, f"a value is {what} in {path or 'the model'} where no layer does it")

    # -- names --------------------------------------------------------------------------------------------

    def misfit(self, parameters: Iterable[str], why: str) -> None:
        """Note what has no style; the first reason is the one to tell."""
        found = frozenset(parameters)
        if not any(found <= m.parameters for m in self.misfits):
            self.misfits.append(Misfit(found, why))

    def axis(self, verdict: Verdict) -> tuple[str, ...]:
        """All parameters of the axis one is cut along."""
        found = next((a.parameters for a in self.plan.axes if a.name == verdict.axis), ())
        return (*found, verdict.name)

    def names(self, names: Iterable[str]) -> list[str]:
        """All parameters of the axes these are cut along."""
        return [n for name in names for n in self.axis(self.plan[name])]

    def carrying(self, atoms: Iterable[Term]) -> list[str]:
        """All parameters that carry one of these axes."""
        return [name for atom in atoms for name, _ in self.flow.ax.carriers[atom]]

    def cut_within(self, path: str) -> list[str]:
        """All parameters of the axes of a module."""
        return cut_within(self.plan, path)

    def within(self, call: Call | None, owners: set[str]) -> bool:
        """Whether a call is one of these modules', or within one."""
        while call is not None:
            if call.module in owners:
                return True
            call = call.parent
        return False


def _of_parameters(trace: Trace) -> set[fx.Node]:
    """The values made of parameters, buffers and constants alone."""
    found: set[fx.Node] = set()
    for node in trace.nodes:
        made_of = [n for n in node.all_input_nodes if n.meta["op"] != "constant"]
        if node.meta["op"] == "parameter" or (made_of and found.issuperset(made_of)):
            found.add(node)
    return found


def _differentiable(node: fx.Node) -> bool:
    """Whether a value, or one of several that an op returns, takes part in differentiation."""
    return bool(node.meta.get("grad")) or any(u.meta.get("grad") for u in node.users if u.meta.get("op") == "item")


def cut_within(plan: Plan, path: str) -> list[str]:
    """The parameters of all axes with a part in a module, or in the innermost one around it that has any."""
    while True:
        axes = {v.axis for v in plan.verdicts if v.layout.cut and (not path or v.name.startswith(f"{path}."))}
        if axes or not path:
            return [name for axis in plan.axes if axis.name in axes for name in axis.parameters]
        path = path.rpartition(".")[0]
