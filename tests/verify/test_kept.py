"""What modules keep besides parameters and buffers: weights put together before each call, results for later,
compiled parts, parts in another dtype.  Each plans, and is equal where it runs.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.zoo.frame import FFN, floats, seeded, words
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank

WIDTH = 12


class Mlp(nn.Module):
    """Two linears, with something done to each."""

    def __init__(self, to_up=lambda linear: None, to_down=lambda linear: None):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)
        to_up(self.up)
        to_down(self.down)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class KeepsLoss(Mlp):
    """A loss for whoever trains it."""

    def forward(self, x):
        y = super().forward(x)
        self.loss, self.seen = y.square().mean(), [y]
        return y


class Other(nn.Module):
    """The weight of another module, which is not its child."""

    def __init__(self, module):
        super().__init__()
        self.module = (module,)

    def forward(self, weight: Tensor) -> Tensor:
        return self.module[0].weight


class Tied(nn.Module):
    """A head whose weight a parametrization takes from the embedding."""

    def __init__(self):
        super().__init__()
        self.words, self.mlp, self.head = nn.Embedding(600, WIDTH), Mlp(), nn.Linear(WIDTH, 600, bias=False)
        parametrize.register_parametrization(self.head, "weight", Other(self.words))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mlp(self.words(ids)))


class Around(nn.Module):
    """One part before an MLP, which is one in another dtype or of another kind."""

    def __init__(self, part, enter=lambda x: x, leave=lambda y: y):
        super().__init__()
        self.part, self.mlp, self.enter, self.leave = part(), Mlp(), enter, leave

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.leave(self.part(self.enter(x))))


class Complex(Mlp):
    """Complex weights between the linears."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(FFN, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.up(x) * self.turn).abs())


def old(norm):
    """A deprecated norm, without its warning."""

    def apply(linear):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            norm(linear)

    return apply


def scripted():
    """A compiled part, with parameters whose gradients come from a cut part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(WIDTH, WIDTH))


V, G = "parametrizations.weight.original1", "parametrizations.weight.original0"
MODELS = {  # name -> (what builds it, parameters that are cut, parameters that are whole)
    "keeps its loss": (KeepsLoss, {"up.weight", "down.weight"}, set()),
    "old weight_norm": (
        lambda: Mlp(old(nn.utils.weight_norm)),
        {"up.weight_g", "up.weight_v", "up.bias", "down.weight"},
        set(),
    ),
    "old weight_norm of a row": (lambda: Mlp(to_down=old(nn.utils.weight_norm)), {"down.weight_v"}, {"up.weight"}),
    "old spectral_norm": (lambda: Mlp(old(nn.utils.spectral_norm)), {"down.weight"}, {"up.weight_orig"}),
    "weight_norm": (lambda: Mlp(parametrizations.weight_norm), {f"up.{V}", f"up.{G}", "down.weight"}, set()),
    "spectral_norm": (
        lambda: Mlp(parametrizations.spectral_norm),
        {"down.weight"},
        {"up.parametrizations.weight.original"},
    ),
    "orthogonal": (
        lambda: Mlp(to_down=parametrizations.orthogonal),
        {"up.weight"},
        {"down.parametrizations.weight.original"},
    ),
    "tied by a parametrization": (Tied, {"words.weight", "mlp.up.weight"}, set()),
    "a compiled part": (lambda: Around(scripted), {"mlp.up.weight"}, {"part.weight"}),
    "a part of torch.compile": (
        lambda: Around(lambda: torch.compile(Mlp(), backend="eager")),
        {"part._orig_mod.up.weight", "mlp.up.weight"},
        set(),
    ),
    "a part in bfloat16": (
        lambda: Around(lambda: Mlp().bfloat16(), lambda x: x.bfloat16(), lambda y: y.float()),
        {"part.up.weight", "mlp.up.weight"},
        set(),
    ),
    "all in float16": (
        lambda: Around(nn.Tanh, lambda x: x.to(torch.float16)).half(),
        {"mlp.up.weight"},
        set(),
    ),
    "complex": (Complex, {"up.weight", "turn", "down.weight"}, set()),
}


def built(name):
    """The model and its inputs."""
    make, _, _ = MODELS[name]
    return seeded(make), (words(2, 5, vocab=600) if make is Tied else floats(2, 5, WIDTH),)


def proved(mesh, name, plan):
    """What the comparison finds."""
    return compare_on_rank(*built(name), Plan.loads(plan), mesh)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_it_is_cut_and_equal(run_ranks, name):
    plan = make_plan(*built(name), tp=2)
    is_cut = {v.name: v.layout.cut for v in plan.verdicts}
    _, cut, whole = MODELS[name]
    assert {n for n in cut if not is_cut[n]} == set() == {n for n in whole if is_cut[n]}
    result = run_ranks(proved, 2, name, plan.dumps())[0]
    assert result.equal, result.verdict()
    assert result.tolerance.bound == 1e-9
