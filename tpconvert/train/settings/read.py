"""YAML as people mean it: a key once, and numbers that are no times of day and not to the base of eight."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from tpconvert.errors import ConfigError

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_KINDS = {dict: "a mapping", list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """First letter -> what a plain word that begins with it may be; as yaml has it, but for numbers."""
    numbers = {
        _INT: re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"),
        _FLOAT: re.compile(
            r"[-+]?(?:(?:[0-9][0-9_]*)?\.[0-9]+|[0-9][0-9_]*\.?)(?:[eE][-+]?[0-9]+)?$"
            r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
        ),
    }
    usual = yaml.SafeLoader.yaml_implicit_resolvers
    others = {first: [(t, p) for t, p in pairs if t not in numbers] for first, pairs in usual.items()}
    return others | {first: [*numbers.items(), *others.get(first, ())] for first in "-+0123456789."}


class Loader(yaml.SafeLoader):
    """Plain data only.  Of a key that occurs twice yaml would keep the last in silence; 010 would be 8, 1:30 be 90."""

    yaml_implicit_resolvers: ClassVar = _resolvers()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping whose keys occur once."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"the key {key.value} occurs twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; empty where there is nothing in it."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).", hint=_HINT) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not YAML: byte {error.start} is no UTF-8.", hint=_HINT) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not YAML: {_told(error)}.") from None
    data = {} if data is None else data
    if not isinstance(data, dict):
        kind = _KINDS.get(type(data), "a number")
        raise ConfigError(f"{path}: a mapping of sections is needed, but this is {kind}.", hint=_HINT)
    return data


_HINT = "docs/training.md has one to start from."


def _told(error: Exception) -> str:
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
    return f"{problem or ' '.join(str(error).split())}{where}"
