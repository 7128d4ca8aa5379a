"""What goes over the wire: collectives of a forward and a backward by kind and bytes, for each layer as by hand."""

from collections import Counter

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from tpconvert.parallel import parallelize
from tpconvert.planning import make_plan
from tpconvert.spec.plan import Plan

KINDS = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}
WIDTH, TOKENS, WORDS = 32, (2, 12), 40
HIDDEN = 4 * WIDTH * TOKENS[0] * TOKENS[1]
"""Bytes of the hidden states of all tokens."""

MODELS = {
    "llama": ("Llama", {"intermediate_size": 48, "num_key_value_heads": 2}),
    "llama_mha": ("Llama", {"intermediate_size": 48}),
    "qwen3": ("Qwen3", {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}),
    "gpt2": ("GPT2", {"n_inner": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "mixtral": ("Mixtral", {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4}),
}


def model_of(name: str, layers: int, attention: str = "sdpa") -> torch.nn.Module:
    family, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_hidden_layers=layers,
        use_cache=False,
        attn_implementation=attention,
        **sizes,
    )
    torch.manual_seed(0)
    return getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)


class Wire(TorchDispatchMode):
    """Counts collectives, and the bytes of the larger of what each takes and gives."""

    def __init__(self):
        super().__init__()
        self.counts, self.bytes, self.when = Counter(), Counter(), "forward"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            kind = KINDS[func._schema.name.split("::")[1]]
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
            size = max(t.numel() * t.element_size() for t in tensors)
            self.counts[self.when, kind] += 1
            self.bytes[self.when, kind] += size
        return func(*args, **(kwargs or {}))


def counted(mesh, name, layers, plan, sliced):
    model = parallelize(
        model_of(name, layers), Plan.loads(plan), mesh, gather_output=False, sequence_parallel=sliced
    ).train()
    with Wire() as wire:
        out = model(input_ids=torch.arange(TOKENS[0] * TOKENS[1]).view(TOKENS) % WORDS).logits
        wire.when = "backward"
        out.square().sum().backward()
    return wire.counts, wire.bytes


def on_the_wire(run_ranks, name: str, layers: int, sliced: bool) -> tuple[Counter, Counter]:
    inputs = {"input_ids": torch.randint(0, WORDS, TOKENS)}
    plan = make_plan(model_of(name, layers), inputs, tp=2).dumps()
    first, second = run_ranks(counted, 2, name, layers, plan, sliced, timeout=240)
    assert first == second
    return first


PLAIN = {("forward", "all-reduce"): 2, ("backward", "all-reduce"): 2}
SLICED = {(when, kind): 2 for when in ("forward", "backward") for kind in ("all-gather", "reduce-scatter")}


AGAIN = {"llama": 2, "qwen3": 2, "gpt2": 0, "mixtral": 1}
"""Gathers of a layer that its backward makes again."""


@pytest.mark.parametrize("name", AGAIN)
@pytest.mark.parametrize("sliced", [False, True], ids=["plain", "sliced"])
def test_a_layer_costs_what_it_costs_by_hand(run_ranks, name, sliced):
    two, four = on_the_wire(run_ranks, name, 2, sliced), on_the_wire(run_ranks, name, 4, sliced)
    layers = Counter({what: 2 * n for what, n in (SLICED if sliced else PLAIN).items()})
    bytes_of = Counter({what: n * HIDDEN for what, n in layers.items()})
    if name == "mixtral":  # weights of experts are whole where experts are cut, and their gradients small
        layers["backward", "all-reduce"] += 2
        bytes_of["backward", "all-reduce"] += 2 * 4 * TOKENS[0] * TOKENS[1] * 2
    if sliced:  # linear layers keep their slice and gather it again, as by hand; experts and transposed layers do not
        layers["backward", "all-gather"] += 2 * AGAIN[name]
        bytes_of["backward", "all-gather"] += 2 * AGAIN[name] * HIDDEN
    if name == "qwen3" and not sliced:  # norms of whole heads, of which a rank has some: their gradients go in one
        assert two[0]["backward", "all-reduce"] == 1 + 1 + 2 * 2
        bytes_of["backward", "all-reduce"] += 2 * 2 * 4 * 8
    if sliced:  # all gradients of norms and of other whole parameters go in one
        assert two[0]["backward", "all-reduce"] == 1 + 2 * (name == "mixtral")
        bytes_of["backward", "all-reduce"] = four[1]["backward", "all-reduce"] - two[1]["backward", "all-reduce"]
        assert bytes_of["backward", "all-reduce"] < HIDDEN
    assert four[0] - two[0] == layers
    assert four[1] - two[1] == bytes_of


def gradients(model, ids):
    model.zero_grad()
    model(input_ids=ids).logits.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def alike(mesh, plan):
    """By one collective or by many, the gradients are the same, and those of two backwards add up."""
    ids = torch.arange(TOKENS[0] * TOKENS[1]).view(TOKENS) % WORDS
    model = parallelize(model_of("qwen3", 2).double(), Plan.loads(plan), mesh, sequence_parallel=True)
    together = gradients(model, ids)
    for part in model.modules():
        if "_tp_summed" in vars(part):
            assert part._tp_summed == {}
    model._forward_pre_hooks.clear()  # what is left sums each by itself
    with Wire() as wire:
        wire.when = "backward"
        alone = gradients(model, ids)
    assert wire.counts["backward", "all-reduce"] > 4
    for name, grad in together.items():
        torch.testing.assert_close(grad, alone[name], rtol=1e-12, atol=1e-12)
    return True


def test_gradients_summed_together_are_those_summed_alone(run_ranks):
    plan = make_plan(model_of("qwen3", 2), {"input_ids": torch.randint(0, WORDS, TOKENS)}, tp=2).dumps()
    run_ranks(alike, 2, plan, timeout=240)


def accumulated(mesh, plan):
    ids = torch.arange(TOKENS[0] * TOKENS[1]).view(TOKENS) % WORDS
    model = parallelize(model_of("qwen3", 2).double(), Plan.loads(plan), mesh, sequence_parallel=True)
    first, second = gradients(model, ids), gradients(model, ids.flip(1))
    model.zero_grad()
    losses = [model(input_ids=i).logits.square().sum() for i in (ids, ids.flip(1))]  # both before any backward
    sum(losses).backward()
    with torch.no_grad():
        model(input_ids=ids)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, first[name] + second[name], rtol=1e-12, atol=1e-12)
    norm = dict(model.named_parameters())["model.norm.weight"]
    (one,) = torch.autograd.grad(model(input_ids=ids).logits.square().sum(), norm)
    torch.testing.assert_close(one, first["model.norm.weight"], rtol=1e-12, atol=1e-12)
    return True


def test_gradients_of_two_forwards_are_summed_each(run_ranks):
    plan = make_plan(model_of("qwen3", 2), {"input_ids": torch.randint(0, WORDS, TOKENS)}, tp=2).dumps()
    run_ranks(accumulated, 2, plan, timeout=240)


def kept_of(model) -> int:
    """Bytes that a forward keeps for its backward, parameters not counted."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, so that no other gets its address
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        logits = model(input_ids=torch.zeros(TOKENS, dtype=torch.long)).logits
    assert logits.requires_grad
    return sum(storage.nbytes() for at, storage in kept.items() if at not in parameters)


def kept(mesh, layers, plan):
    model = model_of("llama_mha", layers)
    return kept_of(parallelize(model, Plan.loads(plan), mesh, gather_output=False, sequence_parallel=True))


@pytest.mark.parametrize("tp", [2, 4])
def test_all_that_a_layer_keeps_for_its_backward_is_divided_by_the_degree(run_ranks, tp):
    """As Korthikanti et al. count it (arXiv 2205.05198, section 4.2.2): sequence parallel layers keep 1 / t of all."""
    of_whole = kept_of(model_of("llama_mha", 4)) - kept_of(model_of("llama_mha", 2))
    plan = {n: make_plan(model_of("llama_mha", n), {"input_ids": torch.zeros(TOKENS).long()}, tp=tp) for n in (2, 4)}
    two, four = (run_ranks(kept, tp, n, plan[n].dumps(), timeout=240) for n in (2, 4))
    assert {b - a for a, b in zip(two, four, strict=True)} == {of_whole // tp}
