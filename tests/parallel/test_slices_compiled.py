"""Compiled layers with slices of a batch copy nothing to gather and scatter, and keep slices of what they gather."""

import dataclasses
import math
from functools import partial

import pytest
import torch

from tests.parallel.test_schedule import passes_alone, results
from tests.parallel.test_wire import TOKENS, WIDTH, WORDS, model_of
from tpconvert.parallel import parallelize
from tpconvert.parallel.compiled.layers import layers_of
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan

aten = torch.ops.aten
SHAPE = 3, 10


def compiled_layers(mesh, name, plan, rows):
    """Widths of what is copied, and what of the model's width a forward keeps of all tokens; the numbers are equal."""
    torch.compiler.reset()
    made = Plan.loads(plan)
    assert made.slices.rows is rows
    model = parallelize(model_of(name, 2).double(), made, mesh, sequence_parallel=True).train()
    ids = torch.arange(math.prod(SHAPE)).view(SHAPE) % WORDS
    eager, copied, kept = results(model, ids), [], []

    def look(graph):
        if not any(n.target in (aten.mm.default, aten.addmm.default) for n in graph.nodes):
            return  # what stands around the layers
        clones = [n for n in graph.nodes if n.target is aten.clone.default]
        copied.extend(n.args[0].meta["val"].shape[-1] for n in clones)
        outputs = next(n for n in graph.nodes if n.op == "output").args[0]
        shapes = [n.meta["val"].shape for n in outputs if isinstance(n, torch.fx.Node)]
        kept.extend(s for s in shapes if math.prod(s[:-1]) == ids.numel() and s[-1:] == (WIDTH,))

    for layer in layers_of(model):
        layer.compile(fullgraph=True, backend=partial(passes_alone, look=look))
    found = results(model, ids)
    for what, value in eager.items():
        torch.testing.assert_close(found[what], value, rtol=1e-11, atol=1e-11, msg=lambda m, w=what: f"{w}: {m}")
    return WIDTH in copied, kept


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "of each sequence"])
def test_layers_copy_nothing_of_the_models_width_and_keep_slices_of_it(run_ranks, name, rows):
    plan = make_plan(model_of(name, 2), {"input_ids": torch.randint(0, WORDS, TOKENS)}, tp=2)
    if not rows:
        plan = dataclasses.replace(plan, slices=dataclasses.replace(plan.slices, rows=False))
    for copied, kept in run_ranks(compiled_layers, 2, name, plan.dumps(), rows, timeout=240):
        assert copied is not rows
        assert not kept
