"""Run a module's own forward once and write down every torch-level op as an ``fx.Graph``.

Tensor identity gives the edges, so any Python control flow works.  Module hooks give the module tree: which call
of which module an op belongs to, and which values went in and came out.  In-place ops give their target, and every
live tensor on the same storage, a new version.

Each node carries in ``meta``:

=========  =======================================================================================
``op``     the op's torch-level name: ``linear``, ``view``, ``__getitem__``, ``add_``
``val``    what it returned: a tensor, or a tuple or list of them
``call``   the :class:`Call` whose own forward ran it
``grad``   whether its value takes part in differentiation
``value``  a copy of the value, when captured with ``values=True``
``added``  it is none of a forward's own but of what a conversion adds: a collective, and what it moves
=========  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.analyze.capture.idle import without_idle
from tpconvert.analyze.capture.recorder import Inputs, Recorder, is_inplace, mutated_alias
from tpconvert.analyze.trace.call import Call, Trace, Turn
from tpconvert.analyze.trace.draws import settled
from tpconvert.analyze.trace.entering import has_floats
from tpconvert.analyze.trace.provenance import remembering
from tpconvert.analyze.trace.trees import map_tensors
from tpconvert.analyze.watch.running import descending_into_functionals
from tpconvert.analyze.watch.state import kept, watching
from tpconvert.analyze.watch.unseen import storage_of
from tpconvert.errors import SourceError

__all__ = [
    "Call",
    "Inputs",
    "Recorder",
    "Trace",
    "capture",
    "descending_into_functionals",
    "is_inplace",
    "mutated_alias",
]


def capture(
    module: nn.Module,
    inputs: Inputs,
    *,
    values: bool = False,
    shadow: Any = None,
    rules: Any = None,
    drawn: float | None = None,
    apart: Set[str] = frozenset(),
    turned: Set[Turn] = frozenset(),
    most: int | None = None,
) -> Trace:
    """Record ``module(**inputs)`` (or ``module(*inputs)``) and return its trace.

    ``values`` keeps a copy of every op's result.  ``shadow`` answers value questions on meta tensors
    (:class:`tpconvert.analyze.watch.shadow.Shadow`).  ``rules`` say which custom autograd functions are one op, the
    shipped ones unless given.  Floating inputs take part in differentiation: a whole model gives them a gradient.
    ``apart`` are modules whose norms are recorded as the means and products they are made of.  Where a forward asks
    values for yes, no or a number, ``turned`` says what it is told, so that other branches are seen; one that does more
    than ``most`` ops fails.
    Random numbers come from a fixed state; a single one that the forward draws from [0, 1) is ``drawn`` if given.
    Raises SourceError, with the failing line of the module's own code, where the forward fails.
    """
    from tpconvert.analyze.ops.rules import load_rules

    known = load_rules() if rules is None else rules

    def recorder(input_gradients: bool) -> Recorder:
        return Recorder(module, values, shadow, known, input_gradients, apart, turned, most)

    try:
        with settled(drawn):
            return _captured(module, inputs, recorder(True), drawn)
    except SourceError:
        if not has_floats(inputs):
            raise
        # a forward that does to its inputs what cannot be differentiated has no gradients of them
        with settled(drawn):
            return _captured(module, inputs, recorder(False), drawn)


def _captured(module: nn.Module, inputs: Inputs, recorder: Recorder, drawn: float | None) -> Trace:
    formulas = recorder.formulas
    with (
        remembering(module, formulas) as owners,
        watching(module, recorder.stack, recorder.calls),
        _all_floats_need_grad(module),
    ):
        output = recorder.run(inputs)
    outputs = dict(recorder.slots(output))
    recorder.graph.output(tuple(outputs.values()))
    trace = Trace(
        module,
        recorder.graph,
        recorder.parameters,
        recorder.names,
        recorder.calls,
        outputs,
        owners,
        formulas,
        recorder.notes,
        recorder.read,
        recorder.computed(kept(module)),
        recorder.by_data,
        recorder.rules,
        drawn,
        recorder.told.turned,
        frozenset(recorder.apart),
        tuple(recorder.asked["ranks"]),
        tuple(recorder.asked["seeds"]),
    )
    if not recorder.values:
        _let_go(recorder)
    return without_idle(trace)


def _let_go(recorder: Recorder) -> None:
    """Keep of what the forward computed no more than its shapes and dtypes: all activations, and their graph, are much.

    What is on the memory of a parameter or of another tensor that was there before is kept, since it is asked which.
    """
    lasting = {storage_of(n.meta["val"]) for n in recorder.graph.nodes if n.op in ("get_attr", "placeholder")}

    def light(x: Any) -> Any:
        if type(x) is not Tensor or x.is_meta or x.layout is not torch.strided or storage_of(x) in lasting:
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    for node in recorder.graph.nodes:
        if node.op == "call_function":
            node.meta["val"] = map_tensors(light, node.meta["val"])
    for table in (recorder.alive, recorder.nodes, recorder.storages):
        table.clear()


@contextmanager
def _all_floats_need_grad(module: nn.Module) -> Iterator[None]:
    """Differentiate through every parameter while capturing: a frozen one may be unfrozen later."""
    frozen = [p for p in module.parameters() if not p.requires_grad and p.is_floating_point()]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)
