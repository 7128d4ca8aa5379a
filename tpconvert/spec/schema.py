"""JSON Schemas of ``plan.json`` and ``manifest.json``, made of the dataclasses that read and write them.

``python -m tpconvert.spec.schema docs/schemas`` writes them; a test holds the files to what this gives.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tpconvert.spec import manifest, plan
from tpconvert.spec.layout import Block, Layout

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
COUNT: Schema = {"type": "integer", "minimum": 0}
PATH: Schema = {"type": "string", "pattern": r"^(?!/)(?!(.*/)?\.{0,2}(/|$))[^\\\u0000]+$"}
"""A plain relative path that stays inside its folder."""


def names() -> dict[str, Schema]:
    """File name -> schema."""
    return {
        f"plan-{plan.FORMAT}.schema.json": plan_schema(),
        **{f"manifest-{form}.schema.json": manifest_schema(form) for form in manifest.READ},
    }


def plan_schema() -> Schema:
    """Of ``plan.json``."""
    body = _of_class(plan.Plan, "The plan: what is cut and why, and what is done about it.")
    found = _head("plan.json", plan.FORMAT, body)
    found["properties"] = {"format": {"const": plan.FORMAT}} | body["properties"]
    kinds = [kind for kind in _classes(plan.Plan) if kind not in (Block, Layout)]
    return found | {"$defs": {kind.__name__: _of_class(kind, _doc(kind)) for kind in kinds} | _layouts()}


def manifest_schema(form: int = manifest.FORMAT) -> Schema:
    """Of ``manifest.json``."""
    digest, said = "[a-z0-9]+:[0-9a-f]{64}", "size, and the hash after its kind"
    if form == 1:
        digest, said = "[0-9a-f]{64}", "size and sha256"
    entries = _map({"$ref": "#/$defs/Entry"})
    properties = {
        "format": {"const": form},
        "tp": {"type": "integer", "minimum": 1},
        "source": {"type": "object"},
        "tensors": entries,
        "tied": _map({"type": "string"}),
        "groups": _map(entries),
        "files": {
            "type": "object",
            "propertyNames": PATH,
            "additionalProperties": {
                "description": said,
                "type": "array",
                "prefixItems": [COUNT, {"type": "string", "pattern": f"^{digest}$"}],
                "minItems": 2,
                "maxItems": 2,
            },
        },
        "original": {"$ref": "#/$defs/Original"},
    }
    body: Schema = {
        "description": "What a folder of rank files holds, how it is cut, and how the source's files are made of it.",
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    entry: Schema = {
        "description": _doc(manifest.Entry),
        "type": "object",
        "properties": {
            "shape": {"type": "array", "items": COUNT},
            "dtype": {"type": "string"},
            "layout": {"$ref": "#/$defs/Layout"},
        },
        "required": ["shape", "dtype"],
        "additionalProperties": False,
    }
    definitions = {"Entry": entry, "Original": _original(), "Recipe": _recipe()} | _layouts()
    return _head("manifest.json", form, body) | {"$defs": definitions}


def _head(name: str, version: int, body: Schema) -> Schema:
    return {"$schema": DIALECT, "title": f"{name} of tpconvert, format {version}"} | body


def _of_class(kind: Any, text: str) -> Schema:
    """The object a dataclass is written as: its fields, those at their default left out."""
    hints = get_type_hints(kind)
    written = [f for f in fields(kind) if f.init]
    required = [f.name for f in written if f.default is MISSING and f.default_factory is MISSING]
    if kind is plan.Plan:
        required = ["format", *required]
    return {
        "description": text,
        "type": "object",
        "properties": {f.name: _field(f.name, hints[f.name]) for f in written},
        "required": required,
        "additionalProperties": False,
    }


def _classes(kind: Any) -> list[Any]:
    """The dataclasses that one is made of, and those that they are, each once."""
    found: dict[Any, None] = {}
    pending = [get_type_hints(kind)[f.name] for f in fields(kind) if f.init]
    while pending:
        hint = pending.pop(0)
        if is_dataclass(hint) and hint not in found:
            found[hint] = None
            pending += [get_type_hints(hint)[f.name] for f in fields(hint) if f.init]
        pending += get_args(hint)
    return [*found]


def _field(name: str, hint: Any) -> Schema:
    if name == "tp":
        return {"type": "integer", "minimum": 1}
    if name in ("shape", "span"):
        return _of_type(hint) | {"items": COUNT}
    return _of_type(hint)


def _of_type(hint: Any) -> Schema:
    """The schema of a type hint of the dataclasses."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, UnionType):
        return {"anyOf": [_of_type(a) for a in args]}
    if origin is tuple and args[-1] is ...:
        return {"type": "array", "items": _of_type(args[0])}
    if origin is tuple:
        items = [_of_type(a) for a in args]
        return {"type": "array", "prefixItems": items, "minItems": len(args), "maxItems": len(args)}
    if origin is dict or hint is dict:
        return {"type": "object"}
    plain = {str: "string", int: "integer", bool: "boolean", type(None): "null"}
    return {"type": plain[hint]} if hint in plain else {"$ref": f"#/$defs/{hint.__name__}"}


def _layouts() -> dict[str, Schema]:
    block: Schema = {
        "description": _doc(Block),
        "type": "array",
        "prefixItems": [COUNT, {"anyOf": [COUNT, {"type": "array", "items": {"$ref": "#/$defs/Block"}}]}],
        "minItems": 2,
        "maxItems": 2,
    }
    layout: Schema = {
        "description": _doc(Layout),
        "type": "object",
        "properties": {"dim": COUNT, "blocks": {"type": "array", "items": {"$ref": "#/$defs/Block"}}},
        "dependentRequired": {"dim": ["blocks"], "blocks": ["dim"]},
        "additionalProperties": False,
    }
    return {"Block": block, "Layout": layout}


def _original() -> Schema:
    texts: Schema = {"type": "array", "items": {"type": "string"}}
    properties: Schema = {
        "files": _map({"type": "string"}) | {"propertyNames": PATH},
        "recipes": _map({"$ref": "#/$defs/Recipe"}),
        "extra": texts,
        "copied": {"type": "object", "propertyNames": PATH, "additionalProperties": PATH},
        "left_out": texts,
    }
    return {
        "description": _doc(manifest.Original),
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _recipe() -> Schema:
    """A name, or a list that begins with a verb."""
    of: Schema = {"$ref": "#/$defs/Recipe"}
    counts: Schema = {"type": "array", "items": COUNT}

    def verb(name: str, *rest: Schema, more: Schema | None = None) -> Schema:
        size = 1 + len(rest)
        found: Schema = {"type": "array", "prefixItems": [{"const": name}, *rest], "minItems": size}
        return found | ({"items": more} if more is not None else {"maxItems": size})

    return {
        "description": "How one stored tensor is made of the module's: a name, or a verb with what it works on.",
        "anyOf": [
            {"type": "string"},
            verb("narrow", of, COUNT, COUNT, COUNT),
            verb("permute", of, counts),
            verb("reshape", of, counts),
            verb("join", COUNT, more=of),
        ],
    }


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _doc(kind: Any) -> str:
    """The first line of a class's docstring."""
    return str(kind.__doc__).strip().splitlines()[0]


def text(schema: Schema) -> str:
    """A schema as its file holds it."""
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in names().items():
        (folder / name).write_text(text(schema), "utf-8")
