"""What a forward asks of the world around it: ranks that hold other data, seeds that ranks of tp share."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tpconvert.errors import PlanError
from tpconvert.parallel import dry_mesh, parallelize
from tpconvert.parallel.comm.random import CUT, SEEDS
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan
from tpconvert.verify import compare_on_rank


class Contrast(nn.Module):
    """How alike each example is to all examples of all ranks, which ``how`` gathers."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, ours, theirs):
        everyone, first = theirs, 0
        if dist.is_initialized():
            first = dist.get_rank() * theirs.shape[0]
            everyone = torch.cat(self.gathered(theirs))
        if self.how == "fails":
            raise ArithmeticError("this head cannot add")
        return F.cross_entropy(ours @ everyone.T, first + torch.arange(ours.shape[0]))

    def gathered(self, x):
        if self.how == "detached":
            every = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(every, x.detach())
            every[dist.get_rank()] = x
            return every
        from torch.distributed.nn import functional

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and what models call
            return functional.all_gather(x)


class Towers(nn.Module):
    def __init__(self, how="differentiable"):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.right = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.head = Contrast(how)

    def forward(self, x, y):
        return self.head(F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1))


def towers(how="differentiable"):
    torch.manual_seed(0)
    return Towers(how).double(), {"x": torch.randn(4, 6).double(), "y": torch.randn(4, 6).double()}


def proved(mesh, build, plan, *args):
    result = compare_on_rank(*build(*args), Plan.loads(plan), mesh)
    return "" if result is None or result.equal else result.verdict()


@pytest.mark.parametrize("how", ["differentiable", "detached"])
@pytest.mark.parametrize("tp", [2, 3])
def test_a_loss_over_the_examples_of_all_ranks_does_not_count_those_of_tp(run_ranks, how, tp):
    plan = make_plan(*towers(), tp=tp)
    assert plan.ranks == ("head",) and plan["left.0.weight"].layout.cut
    assert "head: its forward asks torch.distributed for ranks" in plan.notes[0]
    assert run_ranks(proved, tp, towers, plan.dumps(), how)[0] == ""


def of_each_dp_rank(mesh, plan):
    """The loss of this rank's half of the examples, and how its gradients differ from the mean of both halves'."""
    module, inputs = towers()
    halves = [{n: x[i : i + 2] for n, x in inputs.items()} for i in (0, 2)]
    module = parallelize(module, Plan.loads(plan), mesh)
    loss = module(**halves[mesh.dp_rank])
    loss.backward()
    grad = dict(module.named_parameters())["left.2.bias"].grad
    dist.all_reduce(grad, group=mesh.dp_group)
    return loss.item(), grad, dist.get_world_size()


def test_a_loss_over_the_examples_of_all_ranks_counts_those_of_dp(run_ranks):
    found = run_ranks(of_each_dp_rank, 2, make_plan(*towers(), tp=2).dumps(), dp=2)
    module, inputs = towers()
    ours, theirs = F.normalize(module.left(inputs["x"]), dim=-1), F.normalize(module.right(inputs["y"]), dim=-1)
    losses = [F.cross_entropy(ours[i : i + 2] @ theirs.T, torch.arange(i, i + 2)) for i in (0, 2)]
    sum(losses).backward()
    for rank, (loss, grad, world) in enumerate(found):
        assert loss == pytest.approx(losses[rank // 2].item(), rel=1e-12) and world == 4
        torch.testing.assert_close(grad, module.left[2].bias.grad)


def after_a_failure(mesh, plan):
    module, inputs = towers("fails")
    module = parallelize(module, Plan.loads(plan), mesh)
    world, apply = dist.group.WORLD, torch.autograd.Function.apply
    with pytest.raises(ArithmeticError, match="this head cannot add"):
        module(**inputs)
    from torch.distributed.nn import functional

    kinds = [functional._AllGather, functional._AllReduce]
    return dist.group.WORLD is world and all("apply" not in vars(k) for k in kinds) and apply.__name__ == "apply"


def test_a_forward_that_fails_leaves_the_world_as_it_was(run_ranks):
    assert run_ranks(after_a_failure, 2, make_plan(*towers(), tp=2).dumps()) == [True, True]


class Seeding(nn.Module):
    """Layers whose noise is seeded by the machine, on a whole value and on a cut one."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        if self.training:
            torch.manual_seed(torch.seed() % 2**32)
            x = F.dropout(x + torch.randn_like(x), 0.5)
        return self.down(self.up(x).relu())


def seeding():
    torch.manual_seed(0)
    return nn.Sequential(Seeding(), Seeding()), (torch.randn(5, 6),)


@pytest.mark.parametrize("tp", [2, 3])
def test_seeds_from_the_machine_are_the_same_on_all_ranks(run_ranks, tp):
    plan = make_plan(*seeding(), tp=tp)
    assert plan.seeds == ("0", "1") and plan["1.up.weight"].layout.cut
    assert "0: its forward takes seeds from the machine" in plan.notes[0]
    assert run_ranks(proved, tp, seeding, plan.dumps())[0] == ""


class Within(nn.Module):
    """A cut value's noise, seeded by the machine twice: ranks draw unequally many numbers in between."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4, bias=False)

    def forward(self, x):
        self.seeds = [torch.seed()]
        h = F.dropout(self.up(x), 0.5, self.training)
        self.seeds.append(torch.seed())
        torch.manual_seed(7)
        return self.down(h)


def streams(mesh, plan):
    module = parallelize(nn.Sequential(Within(), nn.Identity()), Plan.loads(plan), mesh)
    cut = []
    module[0].down.register_forward_hook(lambda *_: cut.append(torch.initial_seed()))
    module[0].register_forward_hook(lambda *_: cut.append(torch.initial_seed()))
    seeds = []
    for _ in range(2):
        module(torch.ones(2, 4))
        seeds += module[0].seeds
    return seeds, cut[-1] // SEEDS == CUT, torch.rand(4).tolist()


def test_seeds_are_the_same_also_where_each_rank_draws_its_own_numbers(run_ranks):
    torch.manual_seed(0)
    plan = make_plan(nn.Sequential(Within(), nn.Identity()), (torch.ones(2, 4),), tp=2)
    assert any(s.cut for s in plan.switches) and plan.seeds == ("0",)
    (seeds, cut, after), other = run_ranks(streams, 2, plan.dumps())
    assert (seeds, cut, after) == other
    assert len(set(seeds)) == 4 and not cut


def seeded_and_restored(mesh, plan):
    module = parallelize(seeding()[0], Plan.loads(plan), mesh)
    before = torch.seed, torch.random.seed, torch.cuda.seed, torch.cuda.default_generators
    module(*seeding()[1])
    return before == (torch.seed, torch.random.seed, torch.cuda.seed, torch.cuda.default_generators)


def test_torch_seed_is_its_own_again(run_ranks):
    assert run_ranks(seeded_and_restored, 2, make_plan(*seeding(), tp=2).dumps()) == [True, True]


def test_a_plan_of_modules_that_are_not_there_is_refused():
    plan = make_plan(*towers(), tp=2).dumps().replace('"ranks": [\n  "head"', '"ranks": [\n  "haed"')
    with pytest.raises(PlanError, match=r"ranks.*has no part haed.*head"):
        parallelize(towers()[0], Plan.loads(plan), dry_mesh(0, 2))
