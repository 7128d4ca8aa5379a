"""What verify says of models whose layers are compiled, as ``compile_layers`` orders their graphs."""

import pytest
import torch
from torch import nn

from tests.parallel.test_schedule import passes_alone
from tests.verify.frame import built, planned
from tpconvert.parallel import Mesh
from tpconvert.parallel.compiled.layers import layers_of
from tpconvert.spec.plan import Plan
from tpconvert.verify import Result, compare_on_rank


def with_compiled_layers(model: nn.Module, mesh: Mesh) -> None:
    torch.compiler.reset()
    for layer in layers_of(model):
        layer.compile(backend=passes_alone)


def compared(mesh: Mesh, name: str, plan: str, sequence_parallel: bool) -> Result | None:
    module, inputs = built(name)
    return compare_on_rank(
        module, inputs, Plan.loads(plan), mesh, sequence_parallel=sequence_parallel, disturb=with_compiled_layers
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sequence_parallel"), [("llama", True), ("gpt2", False)])
def test_a_model_with_compiled_layers_is_equal(run_ranks, name, sequence_parallel):
    result = run_ranks(compared, 2, name, planned(name, 2).dumps(), sequence_parallel, timeout=300)[0]
    assert result.equal, result.verdict()
