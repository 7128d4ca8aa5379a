"""From axes to a plan: a verdict with a reason for every parameter and buffer, and what the runtime must do."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

from torch import fx

from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.axes.terms import Term, blocks, leaves
from tpconvert.analyze.capture.run import Call
from tpconvert.analyze.choice.choose import DEAR, Candidate, Choice
from tpconvert.analyze.choice.patterns import Classifier
from tpconvert.analyze.choice.siblings import among_terms, siblings_of, twins, unknown, with_siblings
from tpconvert.analyze.flow.randoms import switches
from tpconvert.analyze.flow.run import Flow, Placed
from tpconvert.analyze.rewrite.alike import same_forward
from tpconvert.analyze.rewrite.edits import solve_edits
from tpconvert.analyze.rewrite.write import UnsupportedError, rewrite
from tpconvert.spec.layout import Layout
from tpconvert.spec.plan import Axis, Boundary, Kind, Plan, Rewrite, Verdict


@dataclass(eq=False)
class Draft:
    """A plan in the making, or why it cannot be: axes that must be given up."""

    plan: Plan
    forbidden: dict[Term, str] = field(default_factory=dict)
    early: set[str] = field(default_factory=set)
    """Modules whose forwards cannot be written anew, and would not have to be if they saw no pending sums."""


class Planner:
    """Writes the plan of one choice."""

    def __init__(self, ax: Axes, classifier: Classifier, choice: Choice, tp: int) -> None:
        self.ax, self.classifier, self.choice, self.tp = ax, classifier, choice, tp
        self.flow = choice.flow
        self.module = ax.trace.module
        self.nested: dict[Term, Term] = {i: c.atom for c in choice.chosen for i in c.inner}
        self.chosen = {*self.nested, *(c.atom for c in choice.chosen)}
        self.names = {c: self.axis_name(c) for c in choice.chosen}
        self.candidates = {a: c for c in choice.chosen for a in (c.atom, *c.inner)}

    def draft(self, rewritten: dict[str, str], training: Any) -> Draft:
        """The plan with the forwards of ``rewritten`` modules (path -> reason) written from their graph.

        ``training`` tells what differs in train mode and at other sizes, and which modules cannot be rewritten since
        their forwards do something else there.
        """
        wanted = {path: why for path, why in rewritten.items() if self.meets_parts(path)}  # or its axis was given up
        for placed in self.flow.placed:
            if placed.host is None and placed.call is not None:
                wanted.setdefault(
                    placed.call.module, f"a {placed.kind} has its place inside its forward, at {placed.node.meta['op']}"
                )
        for node in self.ax.means:
            if node in self.flow.partial and node.meta["call"] is not None and self.sums_cut(node):
                wanted.setdefault(
                    node.meta["call"].module, "its mean runs over a cut dim, and each rank has a part of it"
                )
        edits, calls, unmet = solve_edits(self.flow, self.choice.deal, self.nested, set(wanted))
        for call in calls:
            wanted.setdefault(call.module, unmet[call])
        forbidden: dict[Term, str] = {}
        early: set[str] = set()
        rewrites = []
        for path, why in sorted(wanted.items()):
            try:
                rewrites.append(self.rewrite(path, why, training))
            except UnsupportedError as error:
                early |= {path} if self.adds_up(path) else set()
                atoms = self.atoms_inside(path)
                if not atoms and path in rewritten:
                    continue  # it was for an axis that has been given up since
                atoms = atoms or set(self.chosen)
                forbidden |= dict.fromkeys(
                    atoms, f"{path or 'the model'}: {why}, and its forward cannot be written anew: {error}"
                )
        edits = [e for e in edits if e.module not in wanted]
        random = switches(self.flow, training)
        for path, why in random.refused.items():
            forbidden |= dict.fromkeys(self.atoms_inside(path) or self.chosen, f"{path or 'the model'}: {why}")
        plan = Plan(
            tp=self.tp,
            verdicts=tuple(self.verdicts()),
            boundaries=tuple(self.boundaries()),
            edits=tuple(edits),
            rewrites=tuple(rewrites),
            switches=tuple(random.switches),
            axes=tuple(self.axes()),
            notes=tuple(self.ax.trace.notes),
        )
        self.traced, self.last = plan, self.with_siblings(plan, self.flow)
        return Draft(self.last, forbidden, early)

    def sliced(self, flow: Flow, training: Any) -> tuple[Plan, dict[str, str]]:
        """The sliced form of the last draft, by its flow; the modules that cannot draw numbers so, and why."""
        other = copy.copy(self)
        other.flow = flow
        random = switches(flow, training)
        plan = replace(
            self.traced,
            verdicts=tuple(other.verdicts()),
            boundaries=tuple(other.boundaries()),
            switches=tuple(random.switches),
        )
        return other.with_siblings(plan, flow), random.refused

    def adds_up(self, path: str) -> bool:
        """Whether a module's own forward computes with pending sums, and has copies inside for that."""
        inside = any(p.host is None and p.kind == "copy" and p.call and p.call.module == path for p in self.flow.copies)
        return inside and any(n.meta["call"] and n.meta["call"].module == path for n in self.flow.partial)

    def sums_cut(self, node: fx.Node) -> bool:
        """Whether a mean runs over a cut dim, rather than over a whole dim of a pending sum."""
        return any(leaves(t) & self.flow.cut_atoms for t in self.ax.means[node])

    def rewrite(self, path: str, why: str, training: Any) -> Rewrite:
        """The forward of a module, when each of its calls has one and the same."""
        if path.startswith("?"):
            raise UnsupportedError("it is not a registered module")
        if refusal := training.refusal(path):
            raise UnsupportedError(refusal)
        constants = training.constants(path)
        calls = [c for c in self.ax.trace.calls if c.module == path]
        written = [rewrite(self.flow, c, self.nested, why, constants, training.fixed) for c in calls]
        if any(not same_forward(written[0], other) for other in written[1:]):
            raise UnsupportedError("its calls differ")
        return written[0]

    def atoms_inside(self, path: str) -> set[Term]:
        """The chosen atoms that the ops of a module's own forward carry, or that made the sums pending there."""
        out: set[Term] = set()
        for node in self.ax.trace.nodes:
            call = node.meta["call"]
            if call is not None and call.module == path:
                for n in (node, *node.all_input_nodes):
                    if n in self.flow.cut or n in self.flow.partial or n in self.flow.gathered:
                        out |= self.flow.atoms(n)
        out |= self.summed_over([p.node for p in self.flow.placed if p.host is None and _is_at(p.call, path)])
        return {c.atom for a, c in self.candidates.items() if a in out}

    def meets_parts(self, path: str) -> bool:
        """Whether the own forward of a module is given, makes or hands on a rank's part of anything."""
        calls = self.ax.trace.calls
        own = [c for c in calls if c.module == path]
        near = [*own, *(c for c in calls if c.parent in own)]
        values = {n for c in near for n in (*c.inputs.values(), *c.outputs.values())}
        return bool(self.atoms_inside(path)) or any(
            n in self.flow.cut or n in self.flow.partial or n in self.flow.gathered for n in values
        )

    def summed_over(self, nodes: Iterable[fx.Node]) -> set[Term]:
        """The cut atoms that values are sums over, from where each sum began."""
        out: set[Term] = set()
        pending = [n for n in nodes if n in self.flow.partial]
        seen = set(pending)
        while pending:
            node = pending.pop()
            out |= {a for t in self.contracting.get(node, ()) for a in leaves(t) & self.flow.cut_atoms}
            for n in node.all_input_nodes:
                if n in self.flow.partial and n not in self.flow.reduced and n not in seen:
                    seen.add(n)
                    pending.append(n)
        return out

    @cached_property
    def contracting(self) -> dict[fx.Node, list[Term]]:
        """Op -> the dims it sums over."""
        out: dict[fx.Node, list[Term]] = defaultdict(list)
        for term, node in self.ax.contracts:
            out[node].append(term)
        return out

    def touching(self, path: str) -> set[Term]:
        """The chosen atoms that a module's own forward carries or hands on, or that are closed at such values."""
        handled: set[fx.Node] = set()
        for call in self.ax.trace.calls:
            if call.module == path or (call.parent is not None and call.parent.module == path):
                handled |= {*call.inputs.values(), *call.outputs.values()}
        names = {self.axis_of(p) for p in self.flow.placed if p.node in handled}
        carried = {a for n in handled if n in self.flow.cut for a in self.flow.atoms(n)}
        names |= {self.names[self.candidates[a]] for a in carried}
        return self.atoms_inside(path) | {c.atom for c, name in self.names.items() if name in names}

    # -- axes ---------------------------------------------------------------------------------------------

    def axis_name(self, candidate: Candidate) -> str:
        """The modules that carry it, and its pattern: ``model.layers.0.mlp:gated-mlp``."""
        paths = [n.split(".")[:-1] for n, _ in self.ax.carriers[candidate.atom] if self.classifier.is_weight(n)]
        common = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        return f"{'.'.join(common)}:{self.classifier.pattern(candidate.atom).name}"

    def axes(self) -> Iterable[Axis]:
        """The chosen axes, each under a name of its own."""
        counts: dict[str, int] = defaultdict(int)
        for c, name in self.names.items():
            counts[name] += 1
            if counts[name] > 1:
                self.names[c] = f"{name}-{counts[name]}"
            parameters = tuple(dict.fromkeys(n for n, _ in self.ax.carriers[c.atom]))
            yield Axis(self.names[c], self.classifier.pattern(c.atom).name, c.atom.n, parameters)

    # -- verdicts -----------------------------------------------------------------------------------------

    def verdicts(self) -> Iterable[Verdict]:
        """One for every name of every parameter and buffer."""
        list(self.axes())  # gives axes their final names
        persistent = set(self.module.state_dict(keep_vars=True))
        first: dict[int, str] = {}
        for kind, named in (("parameter", self.module.named_parameters), ("buffer", self.module.named_buffers)):
            for name, tensor in named(remove_duplicate=False):
                known = self.ax.trace.names.get(id(tensor), name)
                node = self.ax.trace.parameters.get(known)
                verdict = self.verdict(name, node) if node is not None else _unused(name)
                yield replace(
                    verdict,
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    kind=kind,  # type: ignore[arg-type]
                    tied_to=first.setdefault(id(tensor), name) if id(tensor) in first else "",
                    persistent=kind == "parameter" or name in persistent,
                )
                first.setdefault(id(tensor), name)

    def verdict(self, name: str, node: fx.Node) -> Verdict:
        """What happens to one parameter or buffer the forward used."""
        base = Verdict(name, (), "", Layout(), "", sum_grad=node in self.flow.sum_grad, once=node in self.flow.once)
        dims = self.ax.of(node)
        if node in self.flow.cut:
            dim = next(i for i, t in enumerate(dims) if leaves(t) & self.flow.cut_atoms)
            atom = next(iter(leaves(dims[dim]) & self.flow.cut_atoms))
            candidate = self.candidates[atom]
            pattern = self.classifier.pattern(candidate.atom)
            role = self.classifier.role(str(node.target), dim, atom)
            return replace(
                base,
                layout=Layout(dim, blocks(dims[dim], self.chosen)),
                axis=self.names[candidate],
                pattern=pattern.name,
                role=role,
                reason=f"cut along dim {dim}: {role} in {pattern.name}, {candidate.atom.n} units",
            )
        return replace(base, reason=f"whole: {self.why_whole(dims)}")

    def why_whole(self, dims: list[Term]) -> str:
        """The reason of each dim in words, the first that says most."""
        reasons = []
        for i, term in enumerate(dims):
            # that cutting a factor would not pay says less than why the axis around it cannot be cut
            for atom in sorted(leaves(term), key=lambda a: (self.choice.rejected.get(a) == DEAR, -a.n)):
                why = ""
                if self.choice.rejected.get(atom):
                    why = self.choice.rejected[atom]
                elif self.ax.blocked.get(atom):
                    blocked = self.ax.blocked[atom][0]
                    call = blocked.node.meta["call"]
                    why = f"{blocked.why}{f' (in {call.module})' if call is not None and call.module else ''}"
                elif len(dims) == 1:
                    why = "nothing cut carries it"
                if why:
                    reasons.append(f"dim {i}: {why}" if len(dims) > 1 else why)
                    break
        return "; ".join(dict.fromkeys(reasons)) or (
            "it is a scalar" if not dims else "no axis that could be cut carries it"
        )

    # -- boundaries ---------------------------------------------------------------------------------------

    def boundaries(self) -> Iterable[Boundary]:
        """The collectives at module boundaries, those of every call of a module written once."""
        calls: dict[str, int] = defaultdict(int)
        for call in self.ax.trace.calls:
            calls[call.module] += 1
        groups: dict[Boundary, list[tuple[int, Boundary]]] = defaultdict(list)
        for placed in sorted(self.flow.placed, key=lambda p: (_position(p), get_args(Kind).index(p.kind))):
            if placed.host is not None:
                boundary = replace(self.boundary(placed), calls=calls[placed.host.call.module])
                groups[replace(boundary, shape=())].append((placed.host.call.index, boundary))
        for group in groups.values():
            by_call = dict(sorted(group, key=lambda item: item[0]))
            if len(by_call) == group[0][1].calls:
                yield by_call[0]
            else:
                yield from (replace(boundary, call=i) for i, boundary in by_call.items())

    def boundary(self, placed: Placed) -> Boundary:
        """A hosted collective as the plan holds it."""
        assert placed.host is not None
        node = placed.node
        base = Boundary(
            placed.kind,  # type: ignore[arg-type]
            placed.host.call.module,
            placed.host.side,  # type: ignore[arg-type]
            placed.host.slots,
            axis=self.axis_of(placed),
            shape=tuple(node.meta["shape"]),
            dtype=str(node.meta["val"].dtype).removeprefix("torch."),
        )
        if placed.sliced is not None:
            return replace(base, dim=placed.sliced)
        if placed.kind in ("gather", "scatter"):
            dims = self.ax.of(node)
            dim = next(i for i, t in enumerate(dims) if leaves(t) & self.flow.cut_atoms)
            return replace(base, dim=dim, blocks=blocks(self.ax.period(dims[dim]) or dims[dim], self.chosen))
        if placed.span is not None:
            return replace(base, dim=placed.span[0], span=placed.span[1:])
        return base

    def axis_of(self, placed: Placed) -> str:
        """The axis that asks for a collective."""
        node = placed.node
        found = {self.candidates[a] for a in self.flow.atoms(node)}
        if placed.kind in ("reduce", "reduce_scatter"):
            upstream = node
            while not found and upstream is not None:
                hits = [t for t, n in self.ax.contracts if n is upstream]
                found = {self.candidates[a] for t in hits for a in leaves(t) & self.flow.cut_atoms}
                upstream = next((n for n in upstream.all_input_nodes if n in self.flow.partial), None)  # type: ignore[assignment]
            found = found or {self.candidates[a] for a in self.summed_over([node])}
        if placed.kind in ("copy", "all_gather"):
            pending = list(node.users)
            for user in pending[:64]:
                if user.op != "output":
                    found |= {self.candidates[a] for a in self.flow.atoms(user)}
                    pending += list(user.users) if not found else []
        return self.names[min(found, key=self.choice.chosen.index)] if found else ""

    # -- what was not traced ------------------------------------------------------------------------------

    def with_siblings(self, plan: Plan, flow: Flow) -> Plan:
        """Parameters the forward did not reach (an expert that got no token) are treated as their siblings are."""
        found = twins(self.module, plan.verdicts, self.used_names())
        verdicts = []
        for v in plan.verdicts:
            twin = found.get(v.name)
            if twin is not None:
                reason = f"{twin.reason}; as {twin.name}, its sibling"
                v = replace(twin, name=v.name, tied_to=v.tied_to, reason=reason)
            verdicts.append(v)
        idle = {path for path, _ in self.module.named_modules(remove_duplicate=False)}
        idle -= {call.module for call in self.ax.trace.calls}
        siblings = siblings_of(self.ax.trace, found, idle)
        anew = {rewrite.module for rewrite in plan.rewrites}
        unreached = among_terms(flow, unknown(self.ax.trace, siblings), anew)
        return with_siblings(replace(plan, verdicts=tuple(verdicts), unreached=unreached), siblings, idle)

    def used_names(self) -> set[str]:
        """Names of parameters and buffers the forward used."""
        out = set()
        for kind in (self.module.named_parameters, self.module.named_buffers):
            for name, tensor in kind(remove_duplicate=False):
                if self.ax.trace.names.get(id(tensor), name) in self.ax.trace.parameters:
                    out.add(name)
        return out


def _unused(name: str) -> Verdict:
    return Verdict(name, (), "", Layout(), "whole: the traced forward does not use it")


def _is_at(call: Call | None, path: str) -> bool:
    return call is not None and call.module == path


def _position(placed: Placed) -> int:
    assert placed.host is None or isinstance(placed.host.call, Call)
    return placed.host.call.position if placed.host is not None else -1
