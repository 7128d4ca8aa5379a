"""What is written validates, and what is damaged does not."""

import json
from pathlib import Path

import jsonschema
import pytest

from tests.models import MODELS
from tpconvert.planning import make_plan
from tpconvert.spec.schema import manifest_schema, names, plan_schema, text

SCHEMAS = Path(__file__).parents[2] / "docs/schemas"
PLAN = jsonschema.Draft202012Validator(plan_schema())
MANIFEST = jsonschema.Draft202012Validator(manifest_schema())


def test_the_schemas_in_docs_are_what_the_code_writes():
    written = {path.name: path.read_text() for path in SCHEMAS.glob("*-[0-9].schema.json")}
    assert written == {name: text(schema) for name, schema in names().items()}, (
        "Run: python -m tpconvert.spec.schema docs/schemas"
    )


@pytest.mark.parametrize("schema", names().values(), ids=names())
def test_they_are_schemas(schema):
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_of_each_model_validates(name):
    module, inputs = MODELS[name]()
    PLAN.validate(json.loads(make_plan(module, inputs, tp=2).dumps()))


@pytest.mark.parametrize("name", ["phi3", "gpt2", "deepseek_v3", "olmo2"])
def test_the_plan_of_a_model_with_edits_spans_and_rewrites_validates(name):
    from tests.hf_models import build as build_real

    module, inputs = build_real(name)
    PLAN.validate(json.loads(make_plan(module, inputs, tp=2).dumps()))


def test_the_plan_and_the_manifest_of_a_folder_validate(sharded):
    PLAN.validate(json.loads((sharded / "plan.json").read_text()))
    MANIFEST.validate(json.loads((sharded / "manifest.json").read_text()))


def test_the_manifest_of_a_source_that_is_stored_otherwise_validates(tmp_path):
    from tests.hf_models import build as build_real
    from tpconvert.checkpoint import shard
    from tpconvert.source import open_source

    build_real("mixtral")[0].save_pretrained(tmp_path / "whole")
    source = open_source(str(tmp_path / "whole"))
    shard(source.weights(), make_plan(source.module, source.inputs, tp=2), tmp_path / "cut")
    data = json.loads((tmp_path / "cut/manifest.json").read_text())
    assert any(not isinstance(recipe, str) for recipe in data["original"]["recipes"].values())
    MANIFEST.validate(data)


def damaged(path, *keys, value=None, drop=False):
    data = json.loads(path.read_text())
    at = data
    for key in keys[:-1]:
        at = at[key]
    if drop:
        del at[keys[-1]]
    else:
        at[keys[-1]] = value
    return data


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("format",), 0),
        (("tp",), 0),
        (("tp",), "2"),
        (("verdicts", 0, "kind"), "gradient"),
        (("verdicts", 0, "shape"), [-1]),
        (("verdicts", 0, "layout"), {"dim": 0}),
        (("verdicts", 0, "layout"), {"dim": 0, "blocks": [[1]]}),
        (("verdicts", 0, "why"), "an unknown key"),
        (("boundaries", 0, "side"), "inside"),
        (("boundaries", 0, "span"), [1]),
    ],
)
def test_a_damaged_plan_does_not_validate(sharded, keys, value):
    assert not PLAN.is_valid(damaged(sharded / "plan.json", *keys, value=value))


def test_the_sliced_form_is_in_the_schema(sharded):
    data = json.loads((sharded / "plan.json").read_text())
    assert "reason" not in data["slices"]
    data["slices"]["inputs"] = [["kwargs.input_ids", "one"]]
    assert not PLAN.is_valid(data)


@pytest.mark.parametrize("keys", [("format",), ("verdicts",), ("verdicts", 0, "reason")])
def test_a_plan_with_something_missing_does_not_validate(sharded, keys):
    assert not PLAN.is_valid(damaged(sharded / "plan.json", *keys, drop=True))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("format",), 1),
        (("tensors", "lm_head.weight", "shape"), ["2"]),
        (("files", "../config.json"), [1, "sha256:" + "0" * 64]),
        (("files", "/etc/passwd"), [1, "sha256:" + "0" * 64]),
        (("files", "a/../b"), [1, "sha256:" + "0" * 64]),
        (("files", "a//b"), [1, "sha256:" + "0" * 64]),
        (("files", "config.json"), [1, "no hash"]),
        (("files", "config.json"), [-1, "sha256:" + "0" * 64]),
        (("original", "recipes", "lm_head.weight"), ["narrow", "lm_head.weight", 0]),
        (("original", "recipes", "lm_head.weight"), ["exec", "x"]),
        (("original", "copied", "x"), "../x"),
        (("more",), 1),
    ],
)
def test_a_damaged_manifest_does_not_validate(sharded, keys, value):
    assert not MANIFEST.is_valid(damaged(sharded / "manifest.json", *keys, value=value))
