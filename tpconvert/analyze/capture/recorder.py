"""The mode under which a forward writes itself down, op by op."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from tpconvert.analyze.capture.by_values import UNFILLED, is_written, shaped_by_values
from tpconvert.analyze.capture.parts import APART, in_parts
from tpconvert.analyze.capture.told import GRADED, Told
from tpconvert.analyze.trace.call import Call, Noted, Turn
from tpconvert.analyze.trace.entering import Entered
from tpconvert.analyze.trace.provenance import Int
from tpconvert.analyze.trace.trees import Held, constant_slots, fresh, is_plain, tensor_slots, tensors_in
from tpconvert.analyze.watch import running
from tpconvert.analyze.watch.gradients import is_foreign, mark_differentiable, showing_functions, watch, watches
from tpconvert.analyze.watch.hooks import hooked, sees_inputs, sees_outputs, standing_inside
from tpconvert.analyze.watch.running import descending_into_functionals, forward_failed, marks, runs_in
from tpconvert.analyze.watch.shadow import QUESTIONS
from tpconvert.analyze.watch.state import parameters_of, stand_ins
from tpconvert.analyze.watch.unseen import Below, storage_of, transforming

Inputs = Mapping[str, Any] | tuple[Any, ...]

CONCRETE = QUESTIONS | {"__len__", "__hash__"}
"""Asks for Python values, of the tensor's entries or of the tensor itself; they leave no node."""

EXPORTS = frozenset(["untyped_storage", "storage", "__dlpack__", "__array__", "data_ptr"])
"""Give the memory itself away, to code that no mode sees."""

_PLAIN = int | float | complex | str | torch.dtype | torch.device | torch.layout | torch.memory_format


class Recorder(TorchFunctionMode):
    """Writes a node for each torch function called while it is active."""

    def __init__(
        self,
        module: nn.Module,
        values: bool,
        shadow: Any,
        rules: Any,
        input_gradients: bool,
        apart: Set[str] = frozenset(),
        turned: Set[Turn] = frozenset(),
        most: int | None = None,
    ) -> None:
        super().__init__()
        self.module, self.values, self.shadow, self.apart = module, values, shadow, apart
        self.most = most or sys.maxsize
        self.rules, self.input_gradients = rules, input_gradients
        self.below = Below(self)
        self.hiding = 0  # more than 0 while the inside of an op is run, which a rule speaks for
        self.graph = fx.Graph()
        self.calls: list[Call] = []
        self.stack: list[Call] = []
        self.told = Told(turned, self.stack, self.blind)
        self.parameters: dict[str, fx.Node] = {}
        self.names: dict[int, str] = {}
        for name, tensor in _named_tensors(module):
            self.names.setdefault(id(tensor), name)
        self.own = parameters_of(module)
        self.formulas = Noted(self.stack)
        self.notes: list[str] = []
        self.asked: dict[str, list[str]] = {"ranks": [], "seeds": []}  # what is another thing on each rank -> modules
        self.counts: dict[str, int] = {}
        self.nodes: dict[int, fx.Node] = {}  # id(tensor) -> its newest node
        self.reads: list[tuple[Call | None, fx.Node, torch.dtype]] = []  # dtypes asked for, oldest first
        self.read: set[fx.Node] = set()  # values that Python read
        self.by_data: set[fx.Node] = set()  # values whose shape hangs on other values
        self.alive: list[Any] = []  # keeps tensors alive, so that ids stay unique
        self.storages: dict[int, list[torch.Tensor]] = {}  # storage -> tensors on it

    # -- running ------------------------------------------------------------------------------------------

    def run(self, inputs: Inputs) -> Any:
        """Call the module under the recorder."""
        entered = Entered(inputs, self.input_gradients)
        args, kwargs = ((), dict(entered.tree)) if isinstance(inputs, Mapping) else (tuple(entered.tree), {})
        if self.shadow is not None:
            args, kwargs = self.shadow.enter(args), self.shadow.enter(kwargs)
        for prefix, tree in (("args", args), ("kwargs", kwargs)):
            for slot, tensor in tensor_slots(tree, prefix):
                node = self.graph.create_node("placeholder", f"input_{slot.replace('.', '_')}")
                node.meta.update(op="input", slot=slot, call=None, val=entered.given.get(id(tensor), tensor))
                self.bind(tensor, node)
        with ExitStack() as stack:
            stack.enter_context(self.following_calls())
            stack.enter_context(descending_into_functionals())
            stack.enter_context(running.seeing_casts(self.stack))
            stack.enter_context(running.seeing_ranks(self.stack, self.asked))
            stack.enter_context(running.seeing_gradients(self.told.of_gradients))
            if self.shadow is not None:
                stack.enter_context(self.shadow.active(self))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(showing_functions(self))
            stack.enter_context(self.below)
            stack.enter_context(self)
            try:
                return self.module(*args, **kwargs)
            except Exception as error:
                failure = forward_failed(self.module, error)
                failure.module = self.stack[-1].module if self.stack else ""  # type: ignore[attr-defined]
                raise failure from error

    @contextmanager
    def following_calls(self) -> Iterator[None]:
        """Keep the stack of module calls by hooks."""
        path_of: dict[int, str] = {}
        for path, module in self.module.named_modules(remove_duplicate=False):
            path_of.setdefault(id(module), path)
        seen_in = {m for m in self.module.modules() if sees_inputs(m)}
        seen_out = {m for m in self.module.modules() if sees_outputs(m)}

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.blind():
                return
            path = path_of.get(id(module), f"?{type(module).__name__}")
            call = Call(path, self.counts.get(path, 0), self.stack[-1] if self.stack else None)
            self.counts[path] = call.index + 1
            call.position = len(self.graph.nodes)
            call.inputs = dict(self.slots(args, "args")) | dict(self.slots(kwargs, "kwargs"))
            call.constants = dict(constant_slots(args, "args")) | dict(constant_slots(kwargs, "kwargs"))
            call.arguments = (self.map(args), self.map(kwargs))
            call.stand_ins = [self.node_for(t) for t in stand_ins(module, self.own)]
            call.grad = torch.is_grad_enabled()
            call.hooked = hooked(module)
            if module in seen_in:
                self.read |= set(call.inputs.values())
            self.calls.append(call)
            self.stack.append(call)

        def given(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.blind():
                self.read |= {node for _, node in self.slots((args, kwargs))}

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if self.blind():
                return None
            output = self.returned(output)
            call = self.stack.pop()
            call.outputs = dict(self.slots(output))
            call.end = len(self.graph.nodes)
            call.result = self.map(output)
            call.plain = is_plain(output)
            if module in seen_out:
                self.read |= set(call.outputs.values())
            return output

        with ExitStack() as stack:
            for module in self.module.modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                if module in seen_in:
                    stack.callback(module.register_forward_pre_hook(given, prepend=True, with_kwargs=True).remove)
                stack.enter_context(standing_inside(module, before, after))
            yield

    def returned(self, output: Any) -> Any:
        """What the call under way returns, which is a value of its own even if it is what it was given.

        So is what stochastic depth returns in training, and a boundary stands there in both modes.
        """
        given = self.stack[-1].inputs.values()
        if type(output) is not torch.Tensor or not output.is_floating_point() or self.node_for(output) not in given:
            return output
        with torch.set_grad_enabled(torch.is_grad_enabled() or output.requires_grad):
            output = torch.positive(output)
        self.nodes[id(output)].meta["passed"] = True
        return output

    # -- recording ----------------------------------------------------------------------------------------

    def blind(self) -> bool:
        """Whether what runs now is not recorded op by op."""
        return self.hiding > 0 or transforming()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.blind():
            return self.unrecorded(func, op_name(func), args, kwargs or {})
        self.below.covered += 1
        try:
            return self.seen(func, op_name(func), args, kwargs or {})
        finally:
            self.below.covered -= 1

    def unrecorded(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An op of which only what it computes from what is noted, below."""
        if name in QUESTIONS:
            self.read |= set(self.below.of_all((args, kwargs)))
        if name in (".shape", "size", ".dtype"):
            return func(*args, **kwargs)
        return self.executed(func, name, args, kwargs)

    def executed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What an op returns, or its shadow's part of that on meta."""
        if self.shadow is None:
            return func(*args, **kwargs)
        return self.shadow.execute(self, func, name, args, kwargs)

    def seen(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run and record an op."""
        if name in QUESTIONS and self.stack:
            asked = {self.node_for(t) for t in tensors_in((args, kwargs))}
            self.read |= asked
            if not all(map(is_written, asked)):
                self.stack[-1].asked = self.stack[-1].asked or name
            if not all(is_written(n, sizes=True) for n in asked):
                return self.told.of_values(self.executed(func, name, args, kwargs))
        if name in GRADED and self.stack and running.asks():
            return self.told.of_gradients(func(*args, **kwargs))
        if name in EXPORTS or (name == "__set__" and func.__self__.__name__ == "data"):
            self.read |= {self.node_for(t) for t in tensors_in((args, kwargs))}
        if name in ("__len__", "numel", "nelement") and self.stack:
            node = self.node_for(args[0])
            self.stack[-1].sized += [(node, i) for i in range(1 if name == "__len__" else len(node.meta["shape"]))]
        if name in (".shape", "size"):
            return self.sizes(func, args, kwargs)
        if name == ".dtype":
            self.reads.append((self.stack[-1] if self.stack else None, self.node_for(args[0]), args[0].dtype))
            return args[0].dtype
        if name in CONCRETE and self.shadow is None:
            return func(*args, **kwargs)
        if name in APART:
            with self:
                parts = in_parts(name, args, kwargs, bool(self.stack) and self.stack[-1].module in self.apart)
            if parts is not None:
                return parts
        if self.values and is_inplace(name, kwargs):
            self.map((tuple(args), kwargs))  # a buffer met here first has the value it had before
        out = self.executed(func, name, args, kwargs)
        if self.values and name in UNFILLED:
            out.zero_()
        if watches(func, name):
            watch(self, func, name, args, kwargs)
        if name in CONCRETE or name == ".grad_fn":
            return out
        if not (inplace := is_inplace(name, kwargs)):
            returned, out = out, fresh(out, args, kwargs)
            if self.shadow is not None:
                self.shadow.renamed(returned, out)
        outs = tensors_in(out)
        if outs or inplace:
            self.record(func, name, args, kwargs, out, outs, inplace)
        return out

    def record(
        self, func: Any, name: str, args: Any, kwargs: Any, out: Any, outs: list[torch.Tensor], inplace: bool
    ) -> None:
        """Write one op."""
        call = self.stack[-1] if self.stack else None
        if len(self.graph.nodes) > self.most:
            raise RuntimeError(f"more than {self.most} ops")
        node = self.graph.create_node("call_function", func, self.map(tuple(args)), self.map(kwargs))
        node.meta.update(op=name, call=call, val=out, own_backward=is_foreign(func) and self.rules.get(name) is None)
        node.meta |= marks()
        if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
            node.meta["dtypes"] = [(n, d) for c, n, d in reversed(self.reads) if c is call]
        if name == "embedding":
            node.meta["layer"] = runs_in(nn.Embedding.forward)
        if shaped_by_values(node, inplace, self.by_data):
            self.by_data.add(node)
        if inplace:
            target = kwargs["out"] if kwargs.get("out") is not None else [*args, *kwargs.values()][0]
            for tensor in tensors_in(target):
                self.mutated(tensor, node)
                node.meta["val"] = tensor
        else:
            for tensor, result in self.results(node, out, outs):
                self.bind(tensor, result)

    def results(self, node: fx.Node, out: Any, outs: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, fx.Node]]:
        """Each tensor an op returned with its node."""
        if isinstance(out, torch.Tensor):
            yield out, node
            return
        for i, tensor in enumerate(outs):
            item = self.graph.create_node("call_function", operator.getitem, (node, i))
            item.meta.update(op="item", call=node.meta["call"])
            if node in self.by_data:
                self.by_data.add(item)
            yield tensor, item

    def sizes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``x.shape`` and ``x.size()`` whose integers remember the tensor and the dim."""
        out = func(*args, **kwargs)
        if self.shadow is not None:
            args = self.shadow.lift(self, args)
        node = self.node_for(args[0])
        if isinstance(out, torch.Size):
            return torch.Size([Int(n, ("dim", node, i), self.formulas) for i, n in enumerate(out)])
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return Int(out, ("dim", node, int(dim) % args[0].dim()), self.formulas)

    def mutated(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Give ``tensor``, and everything on its storage, a version after ``node``."""
        with torch._C.DisableTorchFunction():
            others = [t for t in self.storages.get(storage_of(tensor), ()) if t is not tensor]
        self.bind(tensor, node)
        for other in others:
            if (old := self.nodes.get(id(other))) is not None:
                alias = self.graph.create_node("call_function", mutated_alias, (old, node))
                alias.meta.update(op="alias", call=self.stack[-1] if self.stack else None)
                self.bind(other, alias)

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """``node`` is now what ``tensor`` is."""
        with torch._C.DisableTorchFunction():
            if id(tensor) not in self.nodes:
                self.alive.append(tensor)
                self.storages.setdefault(storage_of(tensor), []).append(tensor)
            self.nodes[id(tensor)] = node
            node.meta.setdefault("val", tensor)
            node.meta["grad"] = tensor.requires_grad
            node.meta["shape"] = tuple(tensor.shape)
            if self.values and tensor.device.type != "meta":
                self.below.covered += 1
                node.meta["value"] = tensor.detach().clone()
                self.below.covered -= 1

    def node_for(self, tensor: torch.Tensor) -> fx.Node:
        """The node of ``tensor``; one not recorded yet is a parameter, a buffer, computed unseen, or a constant."""
        node = self.nodes.get(id(tensor))
        if node is None:
            name = self.names.get(id(tensor))
            if name is not None:
                node = self.parameters[name] = self.graph.create_node("get_attr", name)
                node.meta.update(op="parameter", call=None)
            elif sources := self.below.of(tensor):
                node = self.below.node(tensor, sources)
            else:
                node = self.graph.create_node("placeholder", f"constant_{len(self.alive)}")
                node.meta.update(op="constant", call=self.stack[-1] if self.stack else None)
            self.bind(tensor, node)
        elif tensor.requires_grad and not node.meta["grad"]:
            mark_differentiable(node)  # what activation checkpointing returns: it ran without grad
        return node

    def map(self, tree: Any) -> Any:
        """``tree`` with nodes in place of tensors, in types fx accepts."""
        if isinstance(tree, torch.Tensor):
            return self.node_for(tree)
        if isinstance(tree, torch.Size):
            return tuple(tree)
        if isinstance(tree, tuple):
            return tuple(map(self.map, tree))
        if isinstance(tree, list):
            return list(map(self.map, tree))
        if isinstance(tree, Mapping):
            return {str(k): self.map(v) for k, v in tree.items()}
        if isinstance(tree, Int) and tree.formulas is not self.formulas:
            return int(tree)  # something kept it from a capture before
        if isinstance(tree, slice):
            return slice(self.map(tree.start), self.map(tree.stop), self.map(tree.step))
        if tree is None or tree is ... or isinstance(tree, _PLAIN):
            return tree
        return Held(tree)

    def computed(self, tensors: Iterable[torch.Tensor]) -> set[fx.Node]:
        """Those of ``tensors`` that the forward computed or wrote to."""
        nodes = {self.nodes[id(t)] for t in tensors if id(t) in self.nodes}
        return {n for n in nodes if n.op == "call_function"}

    def slots(self, tree: Any, prefix: str = "") -> Iterator[tuple[str, fx.Node]]:
        """``(slot, node)`` of each tensor in ``tree``."""
        for slot, tensor in tensor_slots(tree, prefix):
            yield slot, self.node_for(tensor)


def mutated_alias(old: Any, by: Any) -> Any:
    """The new version of a tensor whose storage ``by`` wrote to."""
    return old


def op_name(func: Any) -> str:
    """The torch-level name; property reads start with a dot."""
    name = getattr(func, "__name__", str(func))
    return f".{func.__self__.__name__}" if name == "__get__" else name


def is_inplace(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether an op writes into one of its arguments."""
    if name == "__setitem__" or kwargs.get("out") is not None:
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    return name.endswith("_")


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
