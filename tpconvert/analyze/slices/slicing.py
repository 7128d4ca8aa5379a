"""Sequence parallelism: which whole values need not be whole, and the collectives that follow.

Between cut regions a flow has whole values, the same on every rank.  Where ops take the tokens of a sequence one by
one, a rank can as well hold a *slice* of such a value along the sequence: a region's end then sums and slices
(``reduce_scatter`` in the place of a ``reduce``), its start puts the slices together (``all_gather`` in the place of a
``copy``), and what lies between is computed and kept once rather than on every rank.

All whole values whose gradient is whole are taken to be sliced at first.  Then each is given up that would have to
be whole where no collective can stand, until none is left that would; what gains nothing is given up too.
"""

from __future__ import annotations

from torch import fx

from tpconvert.analyze.axes.run import inplace_target, is_many
from tpconvert.analyze.capture.run import Call
from tpconvert.analyze.flow.states import Flow, Host, Hosts, Placed, differentiable, is_op
from tpconvert.analyze.slices.placing import Placing
from tpconvert.analyze.slices.tokens import Tokens, Use, givens, shared_dims


def slice_flow(flow: Flow, whole: frozenset[str] = frozenset(), sequences: bool = False) -> tuple[Flow | None, str]:
    """``(the flow with slices, "")``, or ``(None, why there are none)``.

    The forwards of ``whole`` modules are to see no slices.  Slices are of tokens, or with ``sequences`` whole sequences
    of a batch; all that is said of tokens here holds of those.
    """
    keys = shared_dims(flow, sequences)
    if not keys:
        return None, f"no sum over ranks is of a value with a dim for its {'sequences' if sequences else 'tokens'}"
    slicer = Slicer(Tokens(flow, keys, whole))
    slicer.settle()
    if not slicer.local:
        return None, slicer.reason()
    return Placing(slicer).flow(), ""


def is_odd(flow: Flow, tp: int) -> bool:
    """Whether there is a number of tokens that ranks cannot share equally, whatever the model is called with."""
    crossed = [flow.ax.of(p.node)[p.sliced] for p in flow.placed if p.sliced is not None]
    is_given = givens(flow)
    return any(t.n % tp and not is_given(t) for t in crossed)


class Slicer:
    """Finds the largest set of sliced values."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens, self.flow, self.ax, self.trace = tokens, tokens.flow, tokens.ax, tokens.trace
        self.dims, self.odd, self.uses, self.why = tokens.dims, tokens.odd, tokens.uses, tokens.why
        self.hosts, self.makers = Hosts(self.ax), Hosts(self.ax, tokens.whole)
        self.root = next((c for c in self.trace.calls if c.parent is None), None)
        self.returned = set(self.trace.outputs.values())
        self.sliced = {n for n in self.dims if self.may_be_sliced(n)}
        """Values of which consumers see slices."""
        self.local = {n for n in self.sliced if n not in tokens.bad and n not in self.flow.reduced}
        """Those computed from slices; the others are sliced when they are there."""
        self.sums: set[fx.Node] = set()
        """Parameters whose gradient is partial because of that."""
        self.copies: list[Placed] = []
        """Where the gradients of other values are summed because of that."""

    def may_be_sliced(self, node: fx.Node) -> bool:
        """Whether a value is whole and so is its gradient."""
        flow = self.flow
        if node in self.trace.read:
            return False
        if node.meta["op"] == "input":
            return bool(node.meta["val"].is_floating_point()) and self.own_host(node, True) is not None
        if node.op != "call_function" or not node.meta.get("grad"):
            return False
        if node in flow.zone or node in flow.gathered or not flow.whole(node):
            return False
        return node not in flow.reduced or flow.reduced[node].host is not None

    # -- giving up ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give values up until all that are left can be."""
        while True:
            before = len(self.sliced), len(self.local)
            for node in self.trace.nodes:
                if node in self.local:
                    self.check_operands(node)
                if node in self.dims:
                    self.check_uses(node)
            for node in reversed(self.trace.nodes):
                if node in self.dims:
                    self.check_uses(node)
            self.check_gradients()
            if before == (len(self.sliced), len(self.local)) and not self.drop_useless():
                return

    def give_up(self, node: fx.Node, why: str, *, sliced: bool = True) -> None:
        """Compute a value whole; with ``sliced`` it stays whole for its consumers."""
        self.local.discard(node)
        self.why.setdefault(node, why)
        if sliced or self.own_host(node, True) is None:
            self.sliced.discard(node)

    def check_operands(self, node: fx.Node) -> None:
        """An op that works on slices has slices to work on, and nothing with tokens in another place."""
        operands = node.all_input_nodes
        has_tokens = any(n in self.sliced or (n in self.dims and n.meta.get("grad")) for n in operands)
        if not has_tokens and not self.spread(node):
            self.give_up(node, "nothing it is computed from has tokens", sliced=False)
        elif odd := next((n for n in operands if n in self.odd), None):
            self.give_up(node, f"it is computed from tokens in another order ({odd.name})", sliced=False)
        target = inplace_target(node)
        if target is not None and target not in self.sliced:
            self.give_up(node, "it is written into a whole value")

    def spread(self, node: fx.Node) -> bool:
        """Whether an op gives all tokens the same, as many as there are of something of which ranks have slices."""
        counted = self.tokens.counted.get(node, ())
        return node.meta["op"] == "expand" and bool(counted) and all(n in self.sliced for n in counted)

    def check_uses(self, node: fx.Node) -> None:
        """Each use can be given what it needs."""
        wholes, slices = self.wanted(node)
        if node not in self.sliced:
            if slices:
                _, left = self.covered(node, slices, wholes)
                for use in left:
                    self.give_up(use.user, f"no module boundary could slice {node.name} for it", sliced=False)  # type: ignore[arg-type]
            return
        if node not in self.local and self.own_host(node) is None:
            self.give_up(node, self.why.get(node, "no module returns it"))
            return
        if any(u.user is not None and is_op(u.user) and inplace_target(u.user) is node for u in wholes):
            self.give_up(node, "it is written into where it has to be whole")
            return
        if slices and self.copied_at_output(node):
            for use in slices:
                self.give_up(use.user, f"part of the gradient of {node.name} is summed", sliced=False)  # type: ignore[arg-type]
            return
        _, left = self.covered(node, wholes, slices)
        if not left or (not slices and self.hosts.output(node) is not None) or self.at_end(node, left):
            return
        inner = [self.entered(node, use.call) for use in left]
        if None in inner:
            at = left[inner.index(None)]
            self.give_up(node, self.needs(at))
            return
        for use in slices:
            if any(use.call is not None and use.call.inside(c) for c in inner if c is not None):
                self.give_up(use.user, "its forward needs the same value whole elsewhere", sliced=False)  # type: ignore[arg-type]

    def copied_at_output(self, node: fx.Node) -> bool:
        """Whether a gradient is summed where the value is returned."""
        return any(p.node is node and p.host is not None and p.host.side == "output" for p in self.flow.copies)

    def needs(self, use: Use) -> str:
        """Why a value has to be whole, in words."""
        where = f" in {use.call.module or 'the model'}" if use.call is not None else ""
        if use.size:
            return f"the number of all its tokens is used{where}"
        if use.user is None or not is_op(use.user):
            return "it is returned"
        return f"{self.why.get(use.user, use.user.meta['op'] + ' needs it whole')}{where}"

    def wanted(self, node: fx.Node) -> tuple[list[Use], list[Use]]:
        """``(uses that need the whole value, uses that need slices)``."""
        slices = [u for u in self.uses[node] if u.user in self.local and (not u.size or u.exact)]
        wholes = [u for u in self.uses[node] if u not in slices]
        host = self.own_host(node)
        if host is not None and host.side == "output":  # within the call that returns it, it is whole yet
            wholes = [u for u in wholes if not (u.size and u.call is not None and u.call.inside(host.call))]
        return wholes, slices

    def own_host(self, node: fx.Node, any_value: bool = False) -> Host | None:
        """Where a sliced value that is computed whole, or any value if it were, becomes sliced."""
        if not any_value and (node not in self.sliced or node in self.local):
            return None
        if node.meta["op"] == "input":
            slots = tuple(s for s, n in self.root.inputs.items() if n is node) if self.root is not None else ()
            return Host(self.root, "input", slots) if self.root is not None and slots else None
        reduced = self.flow.reduced.get(node)
        return reduced.host if reduced is not None else self.makers.output(node)

    def covered(
        self, node: fx.Node, wanted: list[Use], others: list[Use]
    ) -> tuple[list[tuple[Call, list[Use]]], list[Use]]:
        """``(outermost calls that node enters and that hold none of others, with theirs; those left)``."""
        found = []
        left = list(wanted)
        made = node.meta["call"]
        for call in sorted(self.hosts.inputs[node], key=lambda c: c.position):
            inside = [u for u in left if u.call is not None and u.call.inside(call)]
            if not inside or call.module.startswith("?") or (made is not None and made.inside(call)):
                continue
            if call is self.root and node in self.sliced:  # an input, which is sliced there
                continue
            if any(u.call is not None and u.call.inside(call) for u in others):
                continue
            found.append((call, inside))
            left = [u for u in left if u not in inside]
        return found, left

    def entered(self, node: fx.Node, at: Call | None) -> Call | None:
        """The innermost call that ``node`` enters and that ``at`` lies in."""
        made = node.meta["call"]
        fit = [c for c in self.hosts.inputs[node] if at is not None and at.inside(c)]
        fit = [
            c
            for c in fit
            if c is not self.root and not c.module.startswith("?") and not (made is not None and made.inside(c))
        ]
        return max(fit, key=lambda c: c.position, default=None)

    def at_end(self, node: fx.Node, left: list[Use]) -> bool:
        """Whether all that is left is that the model returns it."""
        return all(u.user is not None and not is_op(u.user) for u in left) and self.root is not None

    # -- gradients ----------------------------------------------------------------------------------------------

    def check_gradients(self) -> None:
        """Values without tokens that meet slices get a term of their gradient; sum it, or give those ops up."""
        self.sums.clear()
        self.copies.clear()
        zone: set[fx.Node] = set()
        made_of_parameters = self.static()
        for node in reversed(self.trace.nodes):
            users = [u for u in node.users if is_op(u) and differentiable(self.ax, u)]
            if is_many(self.ax.dims[node]):
                if (partial := [u for u in users if u in zone]) and len(partial) == len(users):
                    zone.add(node)
                elif partial:
                    self.conflict(node, partial, zone)
                continue
            partial = [u for u in users if u in self.local or u in zone]
            if not partial or node in self.dims or not node.meta.get("grad"):
                continue
            everywhere = len(partial) == len(users) and node not in self.returned
            if node.meta["op"] == "parameter":
                if everywhere and node not in self.flow.cut and node not in self.flow.sum_grad:
                    self.sums.add(node)
                else:
                    self.conflict(node, partial, zone)
            elif node in made_of_parameters and everywhere:
                zone.add(node)
            elif not self.copy(node, partial, users):
                self.conflict(node, partial, zone)

    def static(self) -> set[fx.Node]:
        """Values made of parameters alone."""
        out: set[fx.Node] = set()
        for node in self.trace.nodes:
            made = node.op == "call_function" and bool(node.all_input_nodes)
            if node.meta["op"] == "parameter" or (made and all(n in out for n in node.all_input_nodes)):
                out.add(node)
        return out

    def copy(self, node: fx.Node, partial: list[fx.Node], users: list[fx.Node]) -> bool:
        """Place the sum of the gradient of a value without tokens; False where there is no place."""
        if node in self.flow.zone or any(p.node is node for p in self.flow.copies):
            return False
        host = self.hosts.output(node)
        if len(partial) == len(users) and node not in self.returned and host is not None:
            self.copies.append(Placed("copy", node, host, host.call))
            return True
        covered, left = self.hosts.covering(node, set(partial), {u for u in users if u not in partial})
        if left:
            return False
        self.copies += [Placed("copy", node, host, host.call) for host, _ in covered]
        return True

    def conflict(self, node: fx.Node, partial: list[fx.Node], zone: set[fx.Node]) -> None:
        """Give up the ops on slices that a value reaches."""
        pending, seen = list(partial), set()
        while pending:
            user = pending.pop()
            if user in self.local:
                self.give_up(
                    user, f"it is computed with {node.target or node.name}, which is used elsewhere too", sliced=False
                )
            elif user in zone and user not in seen:
                seen.add(user)
                pending += [u for u in user.users if is_op(u)]

    # -- what it is good for ------------------------------------------------------------------------------------

    def drop_useless(self) -> bool:
        """Give up values that are sliced only to be put together again; True when there were some."""
        group: dict[fx.Node, set[fx.Node]] = {}
        for node in self.trace.nodes:
            if node not in self.sliced:
                continue
            mine = {node}
            if node in self.local:
                for operand in node.all_input_nodes:  # sliced already, or for this op and others
                    if operand in self.dims and group.setdefault(operand, {operand}) is not mine:
                        mine |= group[operand]
            for member in mine:
                group[member] = mine
        sums = self.flow.reduced
        useless = {n for n, mine in group.items() if not mine & self.local or not any(m in sums for m in mine)}
        useless &= self.sliced
        self.sliced -= useless
        self.local -= useless
        return bool(useless)

    def reason(self) -> str:
        """Why nothing is left."""
        for node in (*self.flow.reduced, *(n for n in self.dims if n.meta["op"] != "input")):
            for here in (node, *(u for u in node.users if is_op(u))):
                if here in self.why:
                    call = here.meta["call"]
                    return f"{here.meta['op']}{f' in {call.module}' if call and call.module else ''}: {self.why[here]}"
        return "no op between its regions works on tokens one by one"
