import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpconvert.errors import CheckpointError
from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.manifest import Entry, File, Manifest, Original, OriginalFile, safe_path
from tpconvert.spec.recipe import Join, Narrow, Reshape, Take

GATE_UP = Take("gate_up", (8, 4))
MANIFEST = Manifest(
    2,
    {"gate_up": Entry((8, 4), "bfloat16", Layout(0, (Block(4), Block(4)))), "norm": Entry((4,), "float32")},
    tied={"head": "norm"},
    groups={"optimizer.exp_avg": {"norm": Entry((4,), "float32"), "step": Entry((), "float32")}},
    files={"rank-00000-of-00002/model.safetensors": File(100, "blake3:ab"), "config.json": File(3, "sha256:cd")},
    original=Original(
        files=(OriginalFile("model.safetensors", '{"gate":{}} '),),
        recipes={"gate": Narrow(GATE_UP, 0, 0, 4), "up": Reshape(Narrow(GATE_UP, 0, 4, 8), (2, 8))},
        extra=("pooler",),
        copied={"config.json": "config.json", "model.safetensors.index.json": "source/model.safetensors.index.json"},
        left_out=("flax.msgpack",),
    ),
    source={"name": "bert", "fingerprint": "ef"},
)


def test_the_text_gives_the_manifest_back():
    assert Manifest.loads(MANIFEST.dumps()) == MANIFEST


def test_the_text_has_one_line_a_tensor_and_a_file():
    lines = MANIFEST.dumps().splitlines()
    assert (
        '  "gate_up": {"shape": [8, 4], "dtype": "bfloat16", "layout": {"dim": 0, "blocks": [[4, 1], [4, 1]]}},'
        in lines
    )
    assert '  "config.json": [3, "sha256:cd"],' in lines


def test_format_1_had_sha256_without_its_name():
    data = json.loads(MANIFEST.dumps())
    before = {"format": 1, "files": {name: [size, "ef"] for name, (size, _) in data["files"].items()}}
    assert {file.digest for file in Manifest.from_json(data | before).files.values()} == {"sha256:ef"}


def damaged(path, value):
    data = json.loads(MANIFEST.dumps())
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (["format"], 3, "format 3; this version of tpconvert reads format 2"),
        (["tp"], -1, "tp is -1"),
        (["tensors", "norm", "shape"], [-4], "the shape"),
        (["tensors", "gate_up", "layout", "dim"], 2, "the layout"),
        (["tensors", "gate_up", "layout", "blocks"], [[3, 1]], "the layout"),
        (["tied", "head"], "nothing", "head is tied to nothing, which is not stored"),
        (["files", "config.json"], [-1, "sha256:cd"], "the file entry"),
        (["files", "config.json"], [3, "cd"], "the file entry"),
        (["files", "../config.json"], [1, "x"], "outside its folder"),
        (["original", "copied", "/etc/passwd"], "x", "outside its folder"),
        (["original", "copied", "x"], "../../x", "outside its folder"),
        (["original", "recipes", "gate"], ["narrow", "gate_up", 0, 0, 9], "takes 0:9"),
        (["original", "recipes", "gate"], "none", "which the manifest does not have"),
        (["original", "recipes", "gate"], ["exec", "x"], "recipe that cannot be read"),
        (["original", "files"], [], "damaged"),
        (["tensors"], 3, "damaged"),
    ],
)
def test_a_damaged_manifest_says_what_is_wrong(path, value, text):
    with pytest.raises(CheckpointError, match=text) as caught:
        Manifest.from_json(damaged(path, value), "DIR/manifest.json")
    assert str(caught.value).startswith("DIR/manifest.json: ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PATHS = [[key] for key in json.loads(MANIFEST.dumps())] + [
    ["original", "files"],
    ["original", "recipes"],
    ["original", "recipes", "gate"],
    ["original", "extra"],
    ["original", "copied"],
    ["tensors", "norm"],
    ["tensors", "gate_up", "layout"],
    ["tensors", "gate_up", "layout", "blocks"],
    ["groups", "optimizer.exp_avg"],
    ["files", "config.json"],
]


@given(st.sampled_from(PATHS), JSON)
def test_any_damage_is_one_kind_of_error(path, value):
    try:
        made = Manifest.from_json(damaged(path, value))
    except CheckpointError:
        return
    assert isinstance(made.dumps(), str)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", "[" * 5000])
def test_text_that_is_no_manifest_is_refused(text):
    with pytest.raises(CheckpointError, match=r"^manifest\.json: "):
        Manifest.loads(text)


@pytest.mark.parametrize("path", ["", "/a", "../a", "a/../b", "a//b", "./a", "a\\b", "a/.."])
def test_paths_out_of_the_folder_are_refused(path):
    with pytest.raises(CheckpointError, match="outside its folder: refused"):
        safe_path(path)


def test_a_recipe_that_joins_is_read_back():
    data = damaged(["original", "recipes", "gate"], ["join", 0, "gate_up", "gate_up"])
    assert Manifest.from_json(data).original.recipes["gate"] == Join(0, (GATE_UP, GATE_UP))
