"""Whether two forwards that are written anew do the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tpconvert.spec.plan import Rewrite


def same_forward(one: Rewrite, other: Rewrite) -> bool:
    """Whether two do the same, called in the same way."""
    return _shape_of(one) == _shape_of(other)


def stricter(one: Rewrite, other: Rewrite) -> Rewrite | None:
    """Of two that do the same but for what they check, the one that checks all that the other does; else None."""
    if not same_forward(_unchecked(one), _unchecked(other)):
        return None
    mine, theirs = (sorted(n["says"] for n in r.nodes if n["op"] == "check") for r in (one, other))
    few, many = sorted((mine, theirs), key=len)
    left = list(many)
    for says in few:
        if says not in left:
            return None
        left.remove(says)
    return one if many is mine else other


def _unchecked(rewrite: Rewrite) -> Rewrite:
    """A forward without its checks and the sizes that only they read."""
    nodes = [n for n in rewrite.nodes if n["op"] != "check"]
    while True:
        read = {name for n in nodes for name in _read(n)} | set(_read(rewrite.output))
        kept = [n for n in nodes if n["name"] in read or not _is_number(n)]
        if len(kept) == len(nodes):
            return replace(rewrite, nodes=tuple(kept))
        nodes = kept


def _is_number(node: dict[str, Any]) -> bool:
    return node["op"] == "size" or str(node.get("target", "")).startswith("operator.")


def _read(tree: Any) -> Iterator[str]:
    """The names of the nodes that an argument is made of."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == "$":
                yield value
            else:
                yield from _read(value)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _read(item)


def _shape_of(written: Rewrite) -> str:
    """A rewrite without the names of its nodes."""
    names: dict[str, str] = {}

    def plain(tree: Any) -> Any:
        if isinstance(tree, dict):
            if set(tree) == {"$"}:
                return names.get(tree["$"], tree["$"])
            return {k: plain(v) for k, v in sorted(tree.items()) if k != "name"}
        return [plain(t) for t in tree] if isinstance(tree, list | tuple) else tree

    out = []
    for i, node in enumerate(written.nodes):
        out.append(plain(node))
        names[node["name"]] = str(i)
    return repr((out, plain(written.output), sorted(written.signature.items(), key=str)))
