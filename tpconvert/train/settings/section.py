"""What every section of the configuration is made from."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A part of the configuration: frozen, closed to keys it does not know, and without numbers that are none."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """``true`` is no 1, though Python thinks so, and an empty text no name: as a path it would be any folder."""
        field = cls.model_fields[str(info.field_name)]
        kind = field.annotation
        if "" in (value if isinstance(value, list | tuple) else (value,)) and field.default != "":
            raise ValueError("an empty text; leave it out")
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:
            raise ValueError(f"{str(value).lower()} is no number")
        return value


def one_or_many(schema: dict[str, Any]) -> None:
    """Change the JSON Schema of a list so that it takes one item without the brackets too."""
    many = dict(schema)
    schema.clear()
    schema["anyOf"] = [many["items"], many]
