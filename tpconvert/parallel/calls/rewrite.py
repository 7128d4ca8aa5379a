"""A module's forward, replaced by the graph that a plan holds for it.

The graph is data from a file, so an op is taken only from a closed list: torch's own tensor functions and methods,
``operator`` and ``torch.ops.aten``.  A node is ``{"name": "n3", "op": ..., ...}``:

==========================================  ==================================================================
``call``, ``target``, ``args``, ``kwargs``  ``torch.nn.functional.linear``, ``torch.Tensor.view``, ``operator.mul``
``module``, ``target``, ...                 a child's call; its hooks run
``"grad": false`` with either               under ``no_grad``
``param``, ``target``                       ``weight``, ``out.weight``: read as the forward reads it
``size``, ``args: [tensor, dim]``           a size, of whatever comes in
``item``, ``args: [sequence, index]``       one of several results
``training``                                whether the module is in training mode
``training_else``, ``args: [a, b]``         ``a`` in training mode, else ``b``
``limit``, ``target``, ``args: [tensor]``   ``min``, ``max``, ``eps`` or ``tiny`` of the tensor's dtype
``check``, ``target``, ``args``, ``value``  a comparison that must come out as recorded; ``says`` it in words
``draw``, ``cut``                           a switch of random numbers, as :class:`~tpconvert.spec.plan.Switch`
``copy`` ``reduce`` ``gather`` ...          a collective, with ``dim``, ``blocks``, ``span`` where it needs them
``local``, ``value``, ``blocks``, ``per``   an integer that counts something cut: its value on this rank
``lookup``, ``args: [weight, ids]``         rows of a weight that is cut by rows as ``blocks`` say; ``padding_idx``
==========================================  ==================================================================

Arguments are JSON, with ``{"$": "n2"}`` for a node's value or an input slot's (``{"$": "args.0"}``),
``{"slice": [0, null, 2]}``, ``{"ellipsis": 1}``, ``{"dtype": "float32"}``, ``{"device": 1}`` (of the first tensor
input), ``{"float": "-inf"}``,
``{"memory_format": "contiguous_format"}``, ``{"tuple": [...]}`` and ``{"dict": {...}}``.
"""

from __future__ import annotations

import json
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import get_overridable_functions

from tpconvert.errors import PlanError, RewriteError
from tpconvert.parallel.calls.signature import Signature
from tpconvert.parallel.comm import collectives
from tpconvert.parallel.comm.collectives import Parts, parts_of
from tpconvert.parallel.comm.mesh import Mesh
from tpconvert.parallel.comm.random import turn
from tpconvert.parallel.layers.linear import lookup
from tpconvert.spec.layout import Block, local_size
from tpconvert.spec.plan import Rewrite

MAKERS = frozenset(
    [
        "arange",
        "empty",
        "empty_like",
        "eye",
        "full",
        "full_like",
        "linspace",
        "ones",
        "ones_like",
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "tensor",
        "zeros",
        "zeros_like",
    ]
)
"""Functions of ``torch`` that make tensors out of numbers."""

SPACES = frozenset(
    ("torch", "torch.functional", "torch.nn.functional", "torch.Tensor", "torch.linalg", "torch.fft", "torch.special")
)

UNLISTED = frozenset(
    (
        "torch.Tensor.new_empty",
        "torch.Tensor.new_full",
        "torch.Tensor.new_ones",
        "torch.Tensor.new_tensor",
        "torch.Tensor.new_zeros",
        "torch.Tensor.unflatten",
        "torch._grouped_mm",
    )
)
"""Tensor functions that torch does not list as overridable."""

NOT_OPERATORS = frozenset(("attrgetter", "itemgetter", "methodcaller", "call"))


class RewrittenForward:
    """Stands in for ``forward``: checks that the call is of the recorded kind, then runs the graph."""

    def __init__(self, signature: Signature, rewrite: Rewrite, mesh: Mesh, graph: fx.GraphModule | None = None) -> None:
        self.signature, self.rewrite, self.mesh = signature, rewrite, mesh
        if graph is None:
            graph = fx.GraphModule(nn.Module(), GraphBuilder(rewrite, mesh).build(signature), type(self).__name__)
        self.graph = graph

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns on this rank."""
        return self.graph(module, *self.signature.tensors(args, kwargs))

    def __reduce__(self) -> Any:
        return type(self), (self.signature, self.rewrite, self.mesh)

    @property
    def code(self) -> str:
        """The Python text of the graph."""
        return self.graph.code


def rewritten_forward(
    module: nn.Module, rewrite: Rewrite, mesh: Mesh, graphs: dict[str, fx.GraphModule] | None = None
) -> RewrittenForward:
    """The forward that the plan gives ``module``, to be called with the module first.

    ``graphs`` are those made before: layers that are alike share one, so that compiling them gives one too.
    """
    graphs = {} if graphs is None else graphs
    alike = _but_for_names(rewrite)
    made = RewrittenForward(Signature.of(module, rewrite), rewrite, mesh, graphs.get(alike))
    graphs[alike] = made.graph
    module.__dict__["_tp_where"] = rewrite.module
    return made


class RewrittenForms:
    """Stands in for a ``forward`` that was recorded in several kinds of calls: the first that a call is of runs."""

    def __init__(self, forms: tuple[RewrittenForward, ...]) -> None:
        self.forms = forms

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns on this rank; a call of no kind is refused as the first form refuses it."""
        for form in self.forms:
            if form.signature.fits(args, kwargs):
                return form(module, args, kwargs)
        return self.forms[0](module, args, kwargs)


def rewritten_forms(
    module: nn.Module, rewrites: Sequence[Rewrite], mesh: Mesh, graphs: dict[str, fx.GraphModule] | None = None
) -> RewrittenForward | RewrittenForms:
    """As :func:`rewritten_forward`, of all the forms that the plan has for ``module``."""
    forms = tuple(rewritten_forward(module, rewrite, mesh, graphs) for rewrite in rewrites)
    return forms[0] if len(forms) == 1 else RewrittenForms(forms)


def _but_for_names(rewrite: Rewrite) -> str:
    """What a rewrite does, its values numbered in order: layers name theirs as they came in the whole model's trace."""
    number = {node["name"]: i for i, node in enumerate(rewrite.nodes)}

    def plain(data: Any) -> Any:
        if isinstance(data, Mapping):
            named = ("$", "name")
            return {k: number.get(v, v) if k in named and isinstance(v, str) else plain(v) for k, v in data.items()}
        return [plain(item) for item in data] if isinstance(data, tuple | list) else data

    return json.dumps([rewrite.signature, plain(rewrite.nodes), plain(rewrite.output)])


class GraphBuilder:
    """Turns the nodes of one rewrite into an fx graph whose first input is the module."""

    def __init__(self, rewrite: Rewrite, mesh: Mesh) -> None:
        self.rewrite, self.mesh = rewrite, mesh
        self.graph = fx.Graph()
        self.values: dict[str, Any] = {}
        self.first: fx.Node | None = None

    def build(self, signature: Signature) -> fx.Graph:
        """The graph; raises PlanError for what is not allowed or not understood."""
        self.module = self.graph.placeholder("module")
        for slot in signature.slots:
            self.values[slot] = self.graph.placeholder(slot.replace(".", "_"))
            self.first = self.first or self.values[slot]
        for data in self.rewrite.nodes:
            try:
                self.values[data["name"]] = self.node(data)
            except (KeyError, TypeError, ValueError) as error:
                text = f"node {data} of its forward cannot be read: {error!r}."
                raise RewriteError(self.rewrite.module, text) from None
        self.graph.output(self.argument(self.rewrite.output))
        self.graph.lint()
        return self.graph

    def node(self, data: Mapping[str, Any]) -> Any:
        """One node's value."""
        op, target = data["op"], data.get("target", "")
        args = tuple(self.argument(a) for a in data.get("args", ()))
        kwargs = {k: self.argument(v) for k, v in data.get("kwargs", {}).items()}
        off = data.get("grad") is False
        if op == "call":
            function = resolve(target, self.rewrite.module)
            return self.call(_ungraded(function) if off else function, *args, **kwargs)
        if op == "check":
            found = self.call(resolve(target, self.rewrite.module), *args)
            return self.call(expect, found, data["value"], self.module, data["says"])
        if op == "module":
            return self.call(_ungraded(call_child) if off else call_child, self.module, target, *args, **kwargs)
        if op == "param":
            return self.call(read, self.module, target)
        if op == "size":
            return self.call(torch.Tensor.size, *args)
        if op == "item":
            return self.call(operator.getitem, *args)
        if op == "training":
            return self.call(read, self.module, "training")
        if op == "training_else":
            return self.call(choose, self.call(read, self.module, "training"), *args)
        if op == "limit" and target in ("min", "max", "eps", "tiny"):
            return self.call(_named(op, lambda x: getattr(torch.finfo(x.dtype), target)), *args)
        if op == "draw":
            cut, mesh = bool(data["cut"]), self.mesh
            return self.call(_named(op, lambda module: turn(mesh, cut) if module.training else None), self.module)
        if op == "local":
            return self.local(data)
        return self.call(self.collective(op, data), *args)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A node for a call."""
        return self.graph.call_function(function, args, kwargs)

    def local(self, data: Mapping[str, Any]) -> int:
        """The value on this rank of an integer that counts something cut."""
        blocks, per = (tuple(map(Block.from_json, data.get(k, ()))) for k in ("blocks", "per"))
        scale = (sum(b.size for b in blocks), sum(b.size for b in per) or 1)
        if scale[0] // scale[1] != data["value"]:
            raise ValueError(f"{data['value']} is not {scale[0]} // {scale[1]}")
        rank, degree = self.mesh.rank, self.mesh.degree
        return local_size(blocks, rank, degree) // (local_size(per, rank, degree) if per else 1)

    def collective(self, op: str, data: Mapping[str, Any]) -> Callable[..., Any]:
        """A function of tensors alone that does the collective."""
        mesh, dim = self.mesh, data.get("dim")
        parts: Parts | None = None
        if op in ("gather", "scatter", "lookup"):
            parts = parts_of(0 if op == "lookup" else dim, tuple(map(Block.from_json, data["blocks"])), mesh)
        if op == "copy" and "span" in data:
            span = tuple(data["span"])
            return _named(op, lambda x: collectives.copy_span(x, dim, span, mesh))
        if op == "lookup":
            padding = data.get("padding_idx")
            return _named(op, lambda weight, ids: collectives.reduce(lookup(ids, weight, parts, padding), mesh))
        if op in ("copy", "reduce", "once"):
            function = getattr(collectives, op)
            return _named(op, lambda x: function(x, mesh))
        if op in ("gather", "scatter"):
            function = getattr(collectives, op)
            return _named(op, lambda x: function(x, parts, mesh))
        raise ValueError(f"there is no op {op!r}")

    def argument(self, data: Any) -> Any:
        """An argument from its JSON form."""
        if isinstance(data, list):
            return [self.argument(item) for item in data]
        if not isinstance(data, Mapping):
            return data
        if len(data) != 1:
            raise ValueError(f"{data} is not an argument")
        ((key, value),) = data.items()
        if key == "$":
            return self.values[value]
        if key == "tuple":
            return tuple(self.argument(item) for item in value)
        if key == "dict":
            return {k: self.argument(v) for k, v in value.items()}
        if key == "slice":
            return slice(*(self.argument(item) for item in value))
        if key == "ellipsis":
            return ...
        if key == "float":
            return float(value)
        if key == "device":
            if self.first is None:
                raise ValueError("there is no tensor input to take the device of")
            return self.call(read, self.first, "device")
        if key in ("dtype", "memory_format") and isinstance(found := getattr(torch, value, None), getattr(torch, key)):
            return found
        raise ValueError(f"{data} is not an argument")


def resolve(target: str, where: str) -> Callable[..., Any]:
    """The function of that name, from the closed list; PlanError for any other."""
    space, _, name = target.rpartition(".")
    if space in ("operator", "_operator") and name in operator.__all__ and name not in NOT_OPERATORS:
        return getattr(operator, name)
    if space == "torch" and name in MAKERS:
        return getattr(torch, name)
    if space in SPACES:
        owner: Any = {"torch": torch, "torch.nn.functional": F, "torch.Tensor": torch.Tensor}.get(space)
        owner = owner or getattr(torch, space.removeprefix("torch."))
        function, known = getattr(owner, name, None), get_overridable_functions()
        if owner is torch.Tensor and isinstance(function, types.GetSetDescriptorType | property):
            return _named(name, lambda x: getattr(x, name))
        if any(function is f for functions in known.values() for f in functions) or target in UNLISTED:
            return _under(name, function)
    if target.startswith("torch.ops.aten."):
        names = target.split(".")[3:]
        found: Any = getattr(torch.ops.aten, names[0], None)
        found = getattr(found, names[1], None) if found is not None and len(names) == 2 else found
        if isinstance(found, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return found
    raise RewriteError(where, f"the plan's graph calls {target!r}, which is not an op of torch.")


def call_child(module: nn.Module, path: str, *args: Any, **kwargs: Any) -> Any:
    """Call a child by its dotted path."""
    return read(module, path)(*args, **kwargs)


def choose(condition: bool, yes: Any, no: Any) -> Any:
    """One of two values."""
    return yes if condition else no


def read(owner: Any, path: str) -> Any:
    """An attribute by its dotted path."""
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def expect(found: bool, wanted: bool, module: nn.Module, says: str) -> None:
    """Refuse a call that is not of the recorded kind."""
    if (not found) if wanted else found:  # torch.compile guards what is asked so
        where = module._tp_where
        raise PlanError(
            f"{where or 'the root module'}: its forward was regenerated for calls where {says} is {wanted}; "
            f"here it is {not wanted}.",
            hint=f"Plan again with such inputs, or with --set '{where}.*=whole'.",
        )


def _under(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the name it was found by: ``Tensor.__pow__`` goes by ``pow`` where there is none."""
    if function.__name__ == name:
        return function
    return _named(name, lambda *args, **kwargs: function(*args, **kwargs))


def _ungraded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under ``no_grad``."""

    def ungraded(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return _named(function.__name__, ungraded)


def _named(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, going by ``name`` in the printed code."""
    function.__name__ = function.__qualname__ = name
    return function
