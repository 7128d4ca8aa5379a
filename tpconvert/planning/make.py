"""``make_plan``: the loop around the analysis.

A choice of axes gives a draft.  The draft is proved by running the converted module itself, dry, as each rank.  A
module whose forward does not come out in the planned shapes has its forward rewritten; where that is not possible
the axes inside it are given up, with the reason, and the loop goes on.  It ends, since each round rewrites a module
or gives up an axis.
"""

from __future__ import annotations

import difflib
import fnmatch
import gc
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpconvert.analyze.axes.run import Axes
from tpconvert.analyze.axes.terms import Term
from tpconvert.analyze.capture.run import Inputs, Trace, capture
from tpconvert.analyze.choice.choose import Choice, choose
from tpconvert.analyze.choice.patterns import Classifier, load_patterns
from tpconvert.analyze.choice.planner import Planner
from tpconvert.analyze.ops.rules import load_rules
from tpconvert.analyze.trace.copies import copied, light
from tpconvert.analyze.trace.trees import map_tensors
from tpconvert.analyze.watch.shadow import Shadow, needs_shadow
from tpconvert.errors import PlanError, RuleError, VerifyError
from tpconvert.parallel.calls.kept import refuse_converted
from tpconvert.parallel.calls.slots import kind_of
from tpconvert.planning.calls.otherwise import Otherwise
from tpconvert.planning.calls.sizes import by_chance
from tpconvert.planning.layers import cut_parameters, inner_norms, norms_apart, whole_layers
from tpconvert.planning.proof.held import NotWrittenError, hold
from tpconvert.planning.proof.shapes import Fault, prove_shapes
from tpconvert.planning.proof.training import Training
from tpconvert.planning.reproduce import NotHeldError
from tpconvert.planning.slices import SlicedForm
from tpconvert.spec.plan import Plan, Slices

RANKS = "asks torch.distributed for ranks: once converted, it is shown those of dp, since those of tp hold the same"
SEEDS = "takes seeds from the machine (torch.seed): once converted, all ranks of tp take the same"


def make_plan(
    module: nn.Module,
    inputs: Inputs,
    *,
    tp: int,
    overrides: Sequence[str] = (),
    rules: Sequence[Path | str] = (),
    source: Mapping[str, Any] | None = None,
    branches: bool = False,
) -> Plan:
    """The plan that cuts ``module`` on ``tp`` ranks.

    ``inputs`` are example inputs, a dict of keyword arguments or a tuple; their values matter only where the forward
    branches on them.  Parameters may be on meta.  ``overrides`` are ``PATTERN=whole``, patterns of parameter or module
    names with ``*``, or ``PATTERN=gathered``: layers of these that would stay whole are cut by themselves, and what
    they return is gathered; ``rules`` are TOML files that add op rules and patterns.  ``source`` is kept in the plan as
    it is.  A plan is held to the sides of branches on values that the example inputs do not take, of forwards that meet
    what is cut; with ``branches`` of all forwards, and on sizes as well, which takes 1.5 to 4 times as long.

    Raises PlanError where nothing can be planned, RuleError for an override or rule that is wrong or matches
    nothing, SourceError where the forward fails.
    """
    with collector_paused(), torch.inference_mode(False), torch.enable_grad():  # gradients tell where sums are
        given = map_tensors(lambda x: x.clone() if x.is_inference() else x, inputs)
        files = [Path(r) for r in rules]
        return Planning(module, given, tp, overrides, files, dict(source or {}), branches).run()


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection but where much is copied: planning makes some hundred thousand objects that all
    live until it is done, and the collector would look at them again and again, which costs a fifth of the time.

    What was there before is not looked at even then.
    """
    running, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    if running and not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if running:
            gc.enable()
        if running and not frozen:
            gc.unfreeze()


class Planning:
    """One run of the loop, and what it has learnt."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Inputs,
        tp: int,
        overrides: Sequence[str],
        rules: Sequence[Path],
        source: dict[str, Any],
        branches: bool = False,
    ) -> None:
        if tp < 1:
            raise PlanError(f"tp={tp} is no number of ranks.", hint="Use --tp 2 or more.")
        refuse_converted(module)
        self.module, self.inputs, self.tp, self.source = light(module), inputs, tp, source
        module = self.module
        named = named_by(module, overrides)
        self.pinned, self.gathered = named["whole"], named["gathered"] - named["whole"]
        self.trace = captured(module, inputs, load_rules(rules))
        self.rules, self.otherwise = rules, Otherwise(rules, branches)
        ax = Axes(self.trace, self.trace.rules)
        if norms := inner_norms(ax):
            self.trace = captured(module, inputs, self.trace.rules, norms)
            ax = Axes(self.trace, self.trace.rules)
        self.begin(ax)

    def begin(self, ax: Axes, known: Training | None = None) -> None:
        """Know nothing but these axes, and what was captured of training for others."""
        self.ax = ax
        self.classifier = Classifier(ax, load_patterns(self.rules))
        self.training = Training(self.module, self.inputs, ax, known)
        self.rewritten: dict[str, str] = {}
        chance = by_chance(ax, self.inputs, partial(self.training.captured, training=False))
        self.forbidden: dict[Term, str] = self._policy() | chance
        self.early: frozenset[str] = frozenset()
        self.inline = frozenset(n for n in ax.lookups if not n.meta.get("layer"))

    def run(self) -> Plan:
        """The plan that holds; layers that it leaves whole are then cut by themselves, where asked for and worth it."""
        plan = self.with_few_apart()
        layers = whole_layers(self.flow, plan, self.gathered)
        if not layers:
            return plan
        self.begin(Axes(self.trace, self.trace.rules, layers), self.training)
        try:
            other = self.with_few_apart(layers)
        except PlanError:
            return plan
        return max(plan, other, key=cut_parameters)

    def with_few_apart(self, layers: frozenset[str] = frozenset()) -> Plan:
        """A plan that holds, and no norms apart but those in forwards that it writes anew.

        Whoever reads the plan takes these apart too, and knows of no others.
        """
        while True:
            plan = self.with_others(self.settle())
            kept = norms_apart(plan) & self.trace.apart
            if kept == self.trace.apart:
                return plan
            self.trace = captured(self.module, self.inputs, self.trace.rules, kept)
            self.otherwise = Otherwise(self.rules, self.otherwise.branches)
            self.begin(Axes(self.trace, self.trace.rules, layers))

    def with_others(self, plan: Plan) -> Plan:
        """The plan with what is known of all calls that were captured: what they reach, return and ask for."""
        asked = plan.unreached or plan.slices.unreached
        trained = self.training.other if asked else vars(self.training).get("other")  # not captured for this alone
        traces = [t for t in (self.trace, trained, *self.otherwise.traces) if t is not None]
        called = {c.module for trace in traces for c in trace.calls}

        def left(paths: Sequence[str]) -> tuple[str, ...]:
            return tuple(p for p in paths if not any(c == p or c.startswith(f"{p}.") for c in called))

        if plan.slices.unreached is not None:
            plan = replace(plan, slices=replace(plan.slices, unreached=left(plan.slices.unreached)))
        returns = {kind_of(slot) for trace in traces for slot in trace.outputs}
        plan = replace(plan, unreached=left(plan.unreached), returns=tuple(sorted(returns)))
        return with_asked(plan, traces)

    def settle(self) -> Plan:
        """Draft and prove until a plan holds."""
        while True:
            choice = choose(
                self.ax, self.tp, forbidden=self.forbidden, pinned=self.pinned, inline=self.inline, early=self.early
            )
            self.flow = choice.flow
            planner = Planner(self.ax, self.classifier, choice, self.tp)
            draft = planner.draft(self.rewritten, self.training)
            if draft.early - self.early:
                self.early |= draft.early
                continue
            if draft.forbidden:
                self.give_up(draft.forbidden, choice)
                continue
            plan = self.held_otherwise(replace(draft.plan, source=self.source), planner, choice)
            if plan is not None and (proved := self.proved(plan, planner, choice)) is not None:
                return proved

    def proved(self, plan: Plan, planner: Planner, choice: Choice) -> Plan | None:
        """The plan with its sliced form, where it holds; None where something was learnt of why it does not."""
        both = self.in_both_forms(plan, planner, choice)
        faults = [] if both is not None else prove_shapes(self.module, self.inputs, self.trace, choice, plan)
        held = both
        if not faults and both is None and (held := self.held_in_training(plan, planner, choice)) is None:
            return None
        known = set(self.forbidden)
        for fault in faults or (self.otherwise.faults(plan, self.training) if choice.chosen else []):
            self.learn(fault, planner, choice, known)
            held = None
        return self.with_slices(held, planner, choice) if held is not None and both is None else held

    def held_otherwise(self, plan: Plan, planner: Planner, choice: Choice) -> Plan | None:
        """The plan, with what other calls need; None where something was learnt of what they do elsewhere."""
        if not choice.chosen or self.tp == 1:
            return plan
        try:
            held = self.otherwise.held(plan, self.training, choice.flow)
        except VerifyError as error:
            atoms, seen = _asked_by(error, planner), self.otherwise.at
            if isinstance(error, NotWrittenError) and not seen.branched:
                self.learn(Fault(error.module, error.why), planner, choice)
                return None
            self.give_up_elsewhere(atoms, error.message, seen.differs, seen.way.name, planner, choice)
            return None
        notes = [f"not planned {why}" for why in self.otherwise.failures]
        return replace(held, notes=(*held.notes, *notes))

    def held_in_training(self, plan: Plan, planner: Planner, choice: Choice) -> Plan | None:
        """The plan, with what only training needs; None where axes were given up for what training does elsewhere."""
        paths = self.training.elsewhere()
        other = self.training.other
        if other is None:
            return replace(plan, notes=(*plan.notes, f"planned in evaluation alone: {self.training.failure}"))
        plan = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *other.notes))))
        if not paths or not choice.chosen:
            return plan
        try:
            held = hold(plan, self.trace, other, self.rules)
            faults = prove_shapes(self.module, self.inputs, other, held.choice, held.plan, training=True)
            if not faults:
                return held.plan
            why = "; ".join(f"{f.module or 'the model'}: {f.why}" for f in faults)
            atoms: set[Term] = set().union(*(planner.atoms_inside(f.module) for f in faults))
        except VerifyError as error:
            atoms, why = _asked_by(error, planner), error.message
        self.give_up_elsewhere(atoms, why, paths, "in training", planner, choice)
        return None

    def give_up_elsewhere(
        self, atoms: set[Term], why: str, paths: Sequence[str], how: str, planner: Planner, choice: Choice
    ) -> None:
        """Forbid the axes that another path asks something else of: ``atoms``, or all that the modules on it touch."""
        inner = [path for path in paths if planner.atoms_inside(path)]
        atoms = atoms or set().union(*map(planner.touching, inner or paths)) or {c.atom for c in choice.chosen}
        where = (inner or list(paths) or [""])[0] or "the model"
        why = f"{where} takes another path {how}, where this does not hold: {why.rstrip('.')}"
        self.give_up(dict.fromkeys(atoms, why), choice)

    def in_both_forms(self, plan: Plan, planner: Planner, choice: Choice) -> Plan | None:
        """The plan with its sliced form, where that holds at once; None where the two have to be proved one by one.

        Both forms compute the same between a gather and the next sum, where shapes can be wrong; the sliced one is
        held to more in between.  So one proof is enough for most models.
        """
        if not choice.chosen or self.tp == 1 or self.training.other is None or self.training.elsewhere():
            return None
        form = self.sliced(choice, planner, plan)
        found, _ = form.once(form.shares_sequences())
        return found

    def sliced(self, choice: Choice, planner: Planner, plan: Plan) -> SlicedForm:
        """What the sliced form of a plan is found and proved by."""
        flows = self.otherwise.flows
        return SlicedForm(self.module, self.inputs, self.trace, choice, planner, plan, self.training, flows)

    def with_slices(self, plan: Plan, planner: Planner, choice: Choice) -> Plan:
        """The plan with its sliced form."""
        if not choice.chosen:
            return replace(plan, slices=Slices("nothing of it is cut"))
        if paths := self.training.elsewhere():
            why = f"the forward of {paths[0] or 'the model'} takes another path in training"
            return replace(plan, slices=Slices(why))
        return self.sliced(choice, planner, plan).found()

    def learn(self, fault: Fault, planner: Planner, choice: Choice, known: Set[Term] | None = None) -> None:
        """A module that came out wrong is rewritten, and if it was already, its axes are given up.

        Those ``known`` before are what was forbidden when the plan was found that has this fault and others.  Where all
        of the module's are among them, it is other axes that what it does hangs on: values decide.
        """
        if fault.module not in self.rewritten and not any(r.module == fault.module for r in planner.last.rewrites):
            self.rewritten[fault.module] = fault.why
            return
        inside = planner.atoms_inside(fault.module)
        atoms = inside if inside - (known or set()) else {c.atom for c in choice.chosen}
        self.give_up(dict.fromkeys(atoms, f"{fault.module or 'the model'}: {fault.why}"), choice, known)

    def give_up(self, atoms: Mapping[Term, str], choice: Choice, known: Set[Term] | None = None) -> None:
        """Forbid axes; at least one must be new since the plan was found, or the loop would not end."""
        if not set(atoms) - (set(self.forbidden) if known is None else known):
            raise PlanError("The plan does not settle: " + "; ".join(dict.fromkeys(atoms.values())) + ".")
        self.forbidden = dict(atoms) | self.forbidden

    def _policy(self) -> dict[Term, str]:
        """Axes that the policy of their pattern leaves whole."""
        out: dict[Term, str] = {}
        for atom in self.ax.carriers:
            if self.ax.blocked.get(atom):
                continue
            pattern = self.classifier.pattern(atom)
            if not pattern.cut:
                out[atom] = f"the rules leave {pattern.name} whole"
            elif not pattern.uneven and atom.n % self.tp:
                out[atom] = f"the rules cut {pattern.name} evenly only, and {atom.n} % {self.tp} = {atom.n % self.tp}"
        return out


def _asked_by(error: VerifyError, planner: Planner) -> set[Term]:
    """The chosen axes that an error is about, where it says so."""
    axes = error.axes if isinstance(error, NotHeldError) else frozenset()
    return {c.atom for c, name in planner.names.items() if name in axes}


def with_asked(plan: Plan, traces: Sequence[Trace]) -> Plan:
    """The plan with the modules that ask for what is another thing on each rank, and a note of each."""
    ranks = tuple(dict.fromkeys(path for trace in traces for path in trace.ranks))
    seeds = tuple(dict.fromkeys(path for trace in traces for path in trace.seeds))
    notes = [f"{path or 'the model'}: its forward {RANKS}" for path in ranks]
    notes += [f"{path or 'the model'}: its forward {SEEDS}" for path in seeds]
    return replace(plan, ranks=ranks, seeds=seeds, notes=(*plan.notes, *notes))


def captured(module: nn.Module, inputs: Inputs, rules: Any = None, apart: Set[str] = frozenset()) -> Trace:
    """The trace of a copy of a module, since forwards may change what they belong to; with shadow values on meta."""
    module = copied(module)
    with eval_mode(module):
        return capture(module, inputs, shadow=Shadow() if needs_shadow(module) else None, rules=rules, apart=apart)


class eval_mode:
    """Every part of a module in evaluation mode, and back as it was."""

    def __init__(self, module: nn.Module, training: bool = False) -> None:
        self.modules = [(m, m.training) for m in module.modules()]
        self.training = training

    def __enter__(self) -> None:
        for m, _ in self.modules:
            m.training = self.training

    def __exit__(self, *error: object) -> None:
        for m, training in self.modules:
            m.training = training


VALUES = ("whole", "gathered")


def named_by(module: nn.Module, overrides: Sequence[str]) -> dict[str, set[str]]:
    """The parameters that overrides name, by their first names, for each of :data:`VALUES`."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for source in (module.named_parameters, module.named_buffers):
        for name, tensor in source(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    out: dict[str, set[str]] = {value: set() for value in VALUES}
    for text in overrides:
        pattern, _, value = text.partition("=")
        if value not in VALUES:
            raise RuleError(
                f"--set {text}: only PATTERN=whole and PATTERN=gathered are known.",
                hint="For example --set 'model.layers.*.mlp.*=whole'.",
            )
        found = {
            first
            for name, first in names.items()
            if fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, f"{pattern}.*")
        }
        if not found:
            near = closest(pattern, names)
            raise RuleError(
                f"--set {text}: no parameter or buffer matches {pattern!r}.",
                hint=f"Did you mean {near}?" if near else "",
            )
        out[value] |= found
    return out


def closest(pattern: str, names: Mapping[str, Any]) -> str:
    """The name most like a pattern."""
    return next(iter(difflib.get_close_matches(pattern, list(names), 1, 0.4)), "")
