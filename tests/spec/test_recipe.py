import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpconvert.checkpoint.tensors.compose import compose, full
from tpconvert.errors import CheckpointError
from tpconvert.spec.recipe import Join, Narrow, Permute, Reshape, Take, from_json, invert, takes, to_json

Q, K = Take("q", (8, 4)), Take("k", (2, 4))


def test_what_is_joined_is_narrowed_back():
    assert invert({"qk": Join(0, (Q, K))}) == {
        "q": Narrow(Take("qk", (10, 4)), 0, 0, 8),
        "k": Narrow(Take("qk", (10, 4)), 0, 8, 10),
    }


def test_what_is_chunked_is_joined_back():
    whole = Take("qkv", (6, 4))
    made = {name: Narrow(whole, 0, i * 2, i * 2 + 2) for i, name in enumerate("qkv")}
    assert invert(made) == {"qkv": Join(0, tuple(Take(n, (2, 4)) for n in "qkv"))}


def test_rows_that_are_dropped_cannot_be_given_back():
    with pytest.raises(CheckpointError, match="Only rows 0:6 of 8 of q are used"):
        invert({"m": Narrow(Q, 0, 0, 6)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Narrow(Q, 2, 0, 1),
        lambda: Narrow(Q, 0, 3, 2),
        lambda: Permute(Q, (0, 0)),
        lambda: Reshape(Q, (3, 3)),
        lambda: Join(1, (Q, K)),
        lambda: Join(0, ()),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(make):
    with pytest.raises(CheckpointError, match="A recipe"):
        make()


@st.composite
def fusions(draw):
    """A tensor made of stored ones by stacking, joining, permuting, reshaping, and chunking again."""
    e, f, d = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    names = iter("abcdefghijklmnopqrstuvwxyz")
    shape = (f, 2 * d)

    def stacked():
        return Join(0, tuple(Reshape(Take(next(names), shape), (1, *shape)) for _ in range(e)))

    node = Join(1, tuple(stacked() for _ in range(draw(st.integers(1, 2)))))
    for _ in range(draw(st.integers(0, 2))):
        match draw(st.integers(0, 2)):
            case 0:
                node = Permute(node, tuple(draw(st.permutations(range(3)))))
            case 1:
                a, b, c = node.shape
                node = Reshape(Permute(Reshape(node, (a, b * c, 1)), (1, 0, 2)), (b, c, a))
            case 2:
                a, b, c = node.shape
                node = Reshape(node, (a * b, 1, c))
    dim = draw(st.integers(0, 2))
    at = draw(st.integers(0, node.shape[dim]))
    made = {"one": Narrow(node, dim, 0, at), "two": Narrow(node, dim, at, node.shape[dim])}
    return made if 0 < at < node.shape[dim] else {"one": node}


@given(fusions(), st.integers(0, 99))
def test_the_inverse_gives_every_stored_tensor_back(made, seed):
    generator = torch.Generator().manual_seed(seed)
    stored = {take.name: torch.rand(take.shape, generator=generator) for r in made.values() for take in takes(r)}
    fused = {name: compose(r, full(r.shape), stored.__getitem__) for name, r in made.items()}
    inverse = invert(made)
    assert set(inverse) == set(stored)
    for name, recipe in inverse.items():
        got = compose(recipe, full(recipe.shape), fused.__getitem__).contiguous().view(torch.float32)
        assert torch.equal(got, stored[name])


@given(st.data(), fusions())
def test_a_box_is_that_part_of_the_whole(data, made):
    recipe = made["one"]
    stored = {take.name: torch.rand(take.shape) for take in takes(recipe)}
    box = []
    for size in recipe.shape:
        start = data.draw(st.integers(0, size))
        box.append((start, data.draw(st.integers(start, size))))
    whole = compose(recipe, full(recipe.shape), stored.__getitem__)
    part = compose(recipe, tuple(box), stored.__getitem__)
    assert torch.equal(part, whole[tuple(slice(a, b) for a, b in box)])


@given(fusions())
def test_json_gives_the_recipe_back(made):
    for recipe in made.values():
        assert from_json(to_json(recipe), {take.name: take.shape for take in takes(recipe)}) == recipe
