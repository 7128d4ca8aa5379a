"""On meta, questions about known values have true answers, and others are guessed aloud."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.hf_models import build
from tests.models import MODELS
from tpconvert.analyze.capture.run import capture
from tpconvert.analyze.trace.call import Trace
from tpconvert.analyze.watch.shadow import Shadow, largest, needs_shadow


class Asks(nn.Module):
    """A forward that is a function of it and its inputs, with a weight that has no values."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.empty(7, 5, device="meta"))
        self.register_buffer("table", torch.tensor([3, 1, 4, 1, 5]))
        self.answers: list[object] = []

    def forward(self, **inputs: Tensor) -> Tensor:
        out = self.function(self, **inputs)
        return self.weight.sum() if out is None else out


IDS = torch.tensor([[1, 4, 2, 0], [6, 0, 0, 0]])


def asked(function, **inputs: Tensor) -> tuple[list[object], Trace]:
    """What the function noted, and the trace."""
    module = Asks(lambda self, **kw: self.answers.append(function(self, **kw)))
    trace = capture(module, inputs, shadow=Shadow())
    return module.answers, trace


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (lambda self, ids: bool((ids > -1).all()), True),
        (lambda self, ids: bool((ids > 1).all()), False),
        (lambda self, ids: ids.max().item(), 6),
        (lambda self, ids: (ids != 0).sum(-1).tolist(), [3, 1]),
        (lambda self, ids: int(ids[0, 1]), 4),
        (lambda self, ids: (ids == 0).nonzero().tolist(), [[0, 3], [1, 1], [1, 2], [1, 3]]),
        (lambda self, ids: len((ids == 0).nonzero()), 4),
        (lambda self, ids: self.table.sum().item(), 14),
        (lambda self, ids: list(range(ids[0, 2])), [0, 1]),
        (lambda self, ids: torch.arange(ids.max()).shape[0], 6),
        (lambda self, ids: torch.equal(ids, ids.clone()), True),
        (lambda self, ids: 6 in ids, True),
        (lambda self, ids: ids.cumsum(-1)[:, -1].tolist(), [7, 6]),
        (lambda self, ids: torch.ones(ids.shape, dtype=torch.bool).tril().sum().item(), 3),
        (lambda self, ids: torch.nn.functional.one_hot(ids, 7).sum().item(), 8),
        (lambda self, ids: torch.unique(ids).tolist(), [0, 1, 2, 4, 6]),
        (lambda self, ids: self.weight[ids.reshape(-1)[:7] > 1].shape, (3, 5)),
        (lambda self, ids: self.weight[(ids[0] > 0).repeat(2)[:7, None].expand_as(self.weight)].numel(), 30),
        (lambda self, ids: ids.to(ids.device).contiguous().tolist(), IDS.tolist()),
        (lambda self, ids: (ids[0, :, None] > 0).expand(4, 200_000).sum(0).amax().item(), 3),
        (lambda self, ids: [p.tolist() for p in ids.split([1, 3], -1)], [[[1], [6]], [[4, 2, 0], [0, 0, 0]]]),
    ],
)
def test_a_question_about_known_values_has_the_true_answer(function, answer) -> None:
    answers, trace = asked(function, ids=IDS)
    assert answers == [answer]
    assert trace.notes == []


def test_a_write_to_a_known_tensor_is_seen_through_its_views() -> None:
    def write(self, ids):
        mask = torch.zeros(2, 3, dtype=torch.long)
        row = mask[1]
        row.fill_(5)
        mask[0, 2] = ids.max()
        return mask.tolist()

    assert asked(write, ids=IDS)[0] == [[[0, 0, 6], [5, 5, 5]]]


@pytest.mark.parametrize("through", ["itself", "a view", "its base"])
def test_what_was_written_with_unknown_values_is_no_longer_known(through: str) -> None:
    def write(self, ids):
        mask = torch.zeros(7, 5, dtype=torch.bool)
        view = mask[:]
        target, read = {"itself": (mask, mask), "a view": (view, mask), "its base": (mask, view)}[through]
        target.copy_(self.weight > 0)
        return bool(read.any())

    answers, trace = asked(write, ids=IDS)
    assert answers == [True]  # the guess; the stale value says False
    assert len(trace.notes) == 1


def test_shadows_leave_the_inputs_as_they_were() -> None:
    ids = IDS.clone()
    asked(lambda self, ids: (ids * 2).tolist(), ids=ids)
    assert torch.equal(ids, IDS)


@pytest.mark.parametrize(
    ("function", "answer", "note"),
    [
        (lambda self, ids: bool((self.weight > 0).all()), True, "__bool__"),
        (lambda self, ids: self.weight.sum().item(), 1.0, "item"),
        (lambda self, ids: (self.weight > 0).any(-1).tolist(), [True] * 7, "tolist"),
        (lambda self, ids: int(self.weight.sum()), 1, "__int__"),
        (lambda self, ids: 0 <= int(self.weight.argmax()) < 35, True, "argmax of values that are not known"),
        (lambda self, ids: tuple((self.weight > 0).nonzero().shape), (35, 2), "nonzero"),
        (lambda self, ids: tuple(self.weight[self.weight > 0].shape), (35,), "__getitem__"),
    ],
)
def test_a_question_about_unknown_values_is_guessed_and_the_guess_is_noted(function, answer, note: str) -> None:
    answers, trace = asked(function, ids=IDS)
    assert answers == [answer]
    (line,) = trace.notes
    assert line.startswith("guess in the model: ")
    assert note in line


def test_an_op_that_fails_on_real_values_too_fails_with_its_own_message() -> None:
    from tpconvert.errors import SourceError

    with pytest.raises(SourceError, match=r"test_shadow\.py:\d+ in <lambda>: .*size"):
        asked(lambda self, ids: ids.view(3, 5), ids=IDS)


def test_an_op_of_no_special_shape_has_no_largest_result() -> None:
    assert largest("softmax", (torch.zeros(3),), {}) is None
    assert largest("nonzero", (), {}) is None
    assert largest("repeat_interleave", (torch.zeros(3, 2), torch.ones(3)), {}).shape == (6,)


def test_a_result_made_up_for_an_op_is_differentiable_as_the_ops_own_would_be() -> None:
    def pick(self, ids):
        rows = self.weight[self.weight > 0]
        places = (self.weight > 0).nonzero()
        rows.mul_(2.0)
        return rows.requires_grad, places.requires_grad

    assert asked(pick, ids=IDS)[0] == [(True, False)]


def test_only_modules_without_values_need_shadows() -> None:
    assert needs_shadow(Asks(None))
    assert not needs_shadow(nn.Linear(2, 2))


def without_weights(module: nn.Module) -> nn.Module:
    """The module with parameters on meta, tied where they were tied, and real buffers."""
    moved: dict[int, nn.Parameter] = {}
    kept = list(module.parameters())  # or their ids would be used again
    for part in module.modules():
        for key, p in part._parameters.items():
            if p is not None:
                part._parameters[key] = moved.setdefault(id(p), nn.Parameter(p.to("meta"), p.requires_grad))
    assert len(moved) == len(kept)
    return module


# -- the same trace with and without weights -----------------------------------------------------------------------


def written(trace: Trace) -> list[tuple[object, ...]]:
    """Every op with its module, its operands by number, and its shape."""
    number = {node: i for i, node in enumerate(trace.nodes)}
    return [
        (
            node.meta["op"],
            str(node.target),
            node.meta["call"] and (node.meta["call"].module, node.meta["call"].index),
            tuple(number[n] for n in node.all_input_nodes),
            node.meta.get("shape"),
            node.meta.get("grad"),
        )
        for node in trace.nodes
    ]


@pytest.mark.parametrize("name", ["llama", "llama_padded", "gemma2", "bart", "bert", "t5", "mamba", "gpt_oss_loop"])
def test_a_model_without_weights_is_traced_op_by_op_as_the_real_one(name: str) -> None:
    module, inputs = build(name)
    real = capture(module, inputs)
    meta_module = without_weights(build(name)[0])
    meta = capture(meta_module, inputs, shadow=Shadow())
    if any("topk" in line for line in meta.notes):  # tokens went to other experts
        assert written(meta)[: len(written(real)) // 4] == written(real)[: len(written(real)) // 4]
    else:
        assert meta.notes == []
        assert written(meta) == written(real)


@pytest.mark.parametrize("name", ["nanogpt", "gqa_expand", "alibi_computed", "translator", "relative_bias"])
def test_a_plain_model_without_weights_is_traced_as_the_real_one(name: str) -> None:
    real_module, inputs = MODELS[name]()
    meta_module = without_weights(MODELS[name]()[0])
    assert written(capture(meta_module.eval(), inputs, shadow=Shadow())) == written(capture(real_module.eval(), inputs))
