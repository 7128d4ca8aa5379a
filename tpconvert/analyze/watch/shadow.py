"""Running on meta with the true values of small tensors beside it.

Token ids, positions, masks and grids are small, and what a forward branches on is computed from them alone.  Each
such tensor keeps a *shadow*, a real tensor of the same shape that every op is applied to as well, so that
``mask.all()``, ``.item()``, ``.tolist()`` and data-dependent shapes have true answers while the weights have no values.
Where there is no shadow a question is answered by a fixed guess, and the trace says so in its notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tpconvert.analyze.trace.entering import Alias
from tpconvert.analyze.trace.trees import map_tensors, tensors_in

LIMIT = 300_000
"""Entries of the largest tensor that is shadowed."""

FACTORIES = frozenset(
    [
        "arange",
        "zeros",
        "ones",
        "full",
        "tensor",
        "as_tensor",
        "linspace",
        "logspace",
        "eye",
        "empty",
        "scalar_tensor",
        "tril_indices",
        "triu_indices",
        "from_numpy",
        "randperm",
    ]
)
CHOICES = frozenset(["topk", "argmax", "argmin", "sort", "argsort", "kthvalue", "multinomial"])
"""Ops that choose by values, as routers do."""
SHAPED = {"expand_as": "expand", "view_as": "view", "reshape_as": "reshape"}
"""Ops that take nothing of their second operand but its shape."""
QUESTIONS = frozenset(
    [
        "item",
        "tolist",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "numpy",
        "equal",
        "allclose",
        "is_nonzero",
        "__contains__",
    ]
)
"""Ask for the values themselves, as Python ones."""


def needs_shadow(module: nn.Module) -> bool:
    """Whether any parameter has no value."""
    return any(p.is_meta for p in module.parameters())


class Shadow:
    """The shadows of one capture."""

    def __init__(self) -> None:
        self.real: dict[int, torch.Tensor] = {}  # id(meta tensor) -> its shadow
        self.metas: dict[int, torch.Tensor] = {}  # id(real tensor) -> its meta twin
        self.alive: list[torch.Tensor] = []

    def enter(self, tree: Any) -> Any:
        """Inputs on meta, their values kept as shadows."""
        return map_tensors(self.twin, tree)

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The meta twin of a real tensor, always the same one."""
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self.metas:
            with torch._C.DisableTorchFunction():
                meta = tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
                meta = meta if tensor.is_leaf else Alias.apply(meta)  # which may be written into
            self.metas[id(tensor)] = meta
            self.alive += [tensor, meta]
            if tensor.numel() <= LIMIT:
                self.real[id(meta)] = tensor.detach()
        return self.metas[id(tensor)]

    @contextmanager
    def active(self, recorder: Any) -> Iterator[None]:
        """Keep what answers scalars read below the torch-function level."""
        self.scalars = _Scalars(self, recorder)
        yield

    def lift(self, recorder: Any, tree: Any) -> Any:
        """Arguments with meta twins in place of real tensors, known to the recorder as the same values."""

        def up(t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or t.is_meta:
                return t
            meta = self.twin(t)
            if id(meta) not in recorder.nodes:
                recorder.nodes[id(meta)] = recorder.node_for(t)
                recorder.alive.append(meta)
            return meta

        if all(t.is_meta for t in tensors_in(tree)):
            return tree
        return _map(up, tree)

    def execute(self, recorder: Any, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """An op on meta, and on the shadows where every operand has one."""
        meta_args, meta_kwargs = self.lift(recorder, args), self.lift(recorder, kwargs)
        if name in CHOICES:
            self.draw(recorder, name, meta_args, meta_kwargs)
        shadow = self.on_shadows(func, name, meta_args, meta_kwargs)
        if name in QUESTIONS:
            return shadow if shadow is not None else self.guess(recorder, func, name, meta_args, meta_kwargs)
        try:
            out = self.picked(name, meta_args)
            out = self.on_meta(func, name, meta_args, meta_kwargs) if out is None else out
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            out = self.without_meta(recorder, func, name, meta_args, meta_kwargs, shadow)
            out = differentiable(out, (meta_args, meta_kwargs))
        self.remember(out, shadow, name, meta_args)
        return out

    def draw(self, recorder: Any, name: str, args: Any, kwargs: Any) -> None:
        """Give unknown scores that something is chosen by (a router's) random values, the same ones each time."""
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) not in self.real and tensor.is_floating_point() and tensor.numel() <= LIMIT:
                generator = torch.Generator().manual_seed(tensor.numel())
                with torch._C.DisableTorchFunction():
                    self.real[id(tensor)] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                self.alive.append(tensor)
                self.note(recorder, f"{name} of values that are not known: taken as a random draw")

    def on_meta(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """The op itself; a factory makes its tensor on meta."""
        if (name in FACTORIES and name != "from_numpy") or kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        if any(t.dim() == 0 for t in tensors_in((args, kwargs))):
            with self.scalars:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def on_shadows(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """The op on real values; None where an operand has none."""
        if name in SHAPED:
            func, args = getattr(torch.Tensor, SHAPED[name]), (args[0], args[1].shape)
        found = tensors_in((args, kwargs))
        if not found and name not in FACTORIES:
            return None
        if any(id(t) not in self.real for t in found):
            return None

        def down(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return self.real[id(x)]
            if isinstance(x, torch.device) or x == "meta":
                return torch.device("cpu")
            return x

        real_args, real_kwargs = _map(down, args), _map(down, kwargs)
        if name in FACTORIES and name != "from_numpy":
            real_kwargs = {**real_kwargs, "device": "cpu"}
        try:
            with torch.no_grad():
                out = func(*real_args, **real_kwargs)
            return real_args[0] if name == "__setitem__" else out
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            return None

    def remember(self, out: Any, shadow: Any, name: str, args: Any) -> None:
        """Keep the shadow of a result; a tensor written to by what has no shadow loses its own."""
        if shadow is not None:
            for meta, real in zip(tensors_in(out), tensors_in(shadow), strict=False):
                if meta.is_meta and meta.shape == real.shape and entries(real) <= LIMIT:
                    self.real[id(meta)] = real
                    self.alive.append(meta)
        elif (
            args
            and isinstance(args[0], torch.Tensor)
            and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__")))
        ):
            self.forget(args[0])

    def renamed(self, old: Any, new: Any) -> None:
        """Let other tensor objects for the same values have the shadows of the first."""
        for a, b in zip(tensors_in(old), tensors_in(new), strict=True):
            if a is not b and id(a) in self.real:
                self.real[id(b)] = self.real[id(a)]
                self.alive.append(b)

    def forget(self, meta: torch.Tensor) -> None:
        """Drop the shadow of a tensor, and of all that share its memory."""
        real = self.real.get(id(meta))
        if real is not None:
            with torch._C.DisableTorchFunction():
                memory = real.untyped_storage()._cdata
                self.real = {k: t for k, t in self.real.items() if t.untyped_storage()._cdata != memory}

    def without_meta(
        self, recorder: Any, func: Callable[..., Any], name: str, args: Any, kwargs: Any, shadow: Any
    ) -> Any:
        """A result for an op that meta cannot run: that of the shadows, or one of the largest possible shape."""
        if any(t.dim() == 0 and id(t) in self.real for t in tensors_in((args, kwargs))):
            plain = _map(
                lambda t: (
                    self.real[id(t)].item()
                    if isinstance(t, torch.Tensor) and t.dim() == 0 and id(t) in self.real
                    else t
                ),
                (args, kwargs),
            )
            try:
                return func(*plain[0], **plain[1])
            except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
                pass
        if shadow is not None:
            return _map(lambda t: torch.empty_like(t, device="meta") if isinstance(t, torch.Tensor) else t, shadow)
        out = largest(name, args, kwargs)
        if out is None:
            return func(*args, **kwargs)  # fails again, with its own message
        self.note(recorder, f"{name}: its result depends on values; the largest shape was taken")
        return out

    def picked(self, name: str, args: Any) -> Any:
        """The rows that a known mask picks, which meta would take to be all of them; None for any other op."""
        mask = args[1] if name == "__getitem__" and len(args) > 1 else None
        real = self.real.get(id(mask)) if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool else None
        if real is None:
            return None
        rows = torch.zeros(int(real.sum()), dtype=torch.long, device="meta")
        return args[0].reshape(-1, *args[0].shape[real.dim() :])[rows]

    def guess(self, recorder: Any, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """The fixed answer to a question about values that are not known: yes, or one."""
        tensor = next(iter(tensors_in((args, kwargs))), None)
        if tensor is None or not tensor.is_meta:
            return func(*args, **kwargs)
        self.note(
            recorder, f"{name} of a value that is not known: taken as {'true' if tensor.dtype == torch.bool else '1'}"
        )
        if name in ("__bool__", "is_nonzero", "equal", "allclose", "__contains__"):
            return True
        if name == "tolist":
            return _ones(tuple(tensor.shape), True if tensor.dtype == torch.bool else 1)
        if tensor.dtype == torch.bool and name == "item":
            return True
        return 1.0 if tensor.is_floating_point() and name not in ("__int__", "__index__") else 1

    def note(self, recorder: Any, text: str) -> None:
        """Flag a guess."""
        where = recorder.stack[-1].module if recorder.stack else ""
        line = f"guess in {where or 'the model'}: {text}"
        if line not in recorder.notes:
            recorder.notes.append(line)


class _Scalars(TorchDispatchMode):
    """Answers ``torch.arange(t)``, ``range(t)`` and their like, which read a scalar below torch functions."""

    def __init__(self, shadow: Shadow, recorder: Any) -> None:
        super().__init__()
        self.shadow, self.recorder = shadow, recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default) and args[0].is_meta:
            real = self.shadow.real.get(id(args[0]))
            if real is not None:
                return real.item()
            self.shadow.note(self.recorder, "a scalar whose value is not known: taken as 1")
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


def entries(tensor: torch.Tensor) -> int:
    """How many entries a tensor holds in memory: one that is expanded holds few."""
    return min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())


def differentiable(out: Any, operands: Any) -> Any:
    """Results made up in place of an op's, differentiable where the op's would be."""
    given = tensors_in(operands)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in given):
        return out

    def up(x: Any) -> Any:
        made_up = isinstance(x, torch.Tensor) and x.is_floating_point() and not x.requires_grad
        made_up = made_up and not any(x is t for t in given)
        return x.requires_grad_(True).clone() if made_up else x  # no leaf, or writing into it would fail

    return _map(up, out)


def largest(name: str, args: Any, kwargs: Any) -> Any:
    """A result of the largest possible shape for an op whose shape depends on values; None for any other op."""
    tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if tensor is None:
        return None
    if name in ("nonzero", "argwhere") or (name == "where" and len(args) == 1):
        if name == "where" or kwargs.get("as_tuple"):
            return tuple(tensor.new_zeros(tensor.numel(), dtype=torch.long) for _ in range(tensor.dim()))
        return tensor.new_zeros((tensor.numel(), tensor.dim()), dtype=torch.long)
    if name in ("masked_select", "unique", "unique_consecutive") or (
        name == "repeat_interleave" and kwargs.get("dim") is None and len(args) < 3
    ):
        return tensor.reshape(-1).clone()
    if name == "repeat_interleave":
        return tensor.clone()
    if name == "bincount":
        return tensor.new_zeros(max(int(kwargs.get("minlength", 0)), 1), dtype=torch.long)
    if name == "histc":
        return tensor.new_zeros(int(kwargs.get("bins", args[1] if len(args) > 1 else 100)))
    if name == "__getitem__" and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
        return tensor.reshape((-1, *tensor.shape[args[1].dim() :])).clone()
    if name == "__getitem__" and isinstance(args[1], tuple):
        items = [
            i
            for a in args[1]
            for i in (
                [tensor.new_zeros(a.numel(), dtype=torch.long)] * a.dim()
                if isinstance(a, torch.Tensor) and a.dtype == torch.bool
                else [a]
            )
        ]
        return tensor[tuple(items)]
    if name in ("grouped_mm", "_grouped_mm"):
        return tensor.new_empty((*tensor.shape[:-1], args[1].shape[-1]))
    if name == "masked_scatter_":
        return tensor
    return None


def _ones(shape: tuple[int, ...], one: Any) -> Any:
    return [_ones(shape[1:], one) for _ in range(shape[0])] if shape else one


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, slice):
        return slice(*(_map(function, x) for x in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(_map(function, x) for x in tree)
    if isinstance(tree, list):
        return [_map(function, x) for x in tree]
    if type(tree) is dict:
        return {k: _map(function, v) for k, v in tree.items()}
    return function(tree)
