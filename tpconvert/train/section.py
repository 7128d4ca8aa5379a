"""What every section of the configuration is made from."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def one_or_many(schema: dict[str, Any]) -> None:
    """Change the JSON Schema of a list so that it takes one item without the brackets too."""
    many = dict(schema)
    schema.clear()
    schema["anyOf"] = [many["items"], many]
