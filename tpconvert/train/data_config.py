"""The ``data`` section: where the text is and what is learned from it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from tpconvert.train.section import Section, one_or_many


class Data(Section):
    """Where the text is and what is learned from it."""

    path: tuple[str, ...] = Field(min_length=1, json_schema_extra=one_or_many)
    """Files, folders or globs, relative to the current folder."""
    objective: Literal["causal", "masked"] = "causal"
    format: Literal["auto", "text", "jsonl"] = "auto"
    """auto: by the file's ending."""
    documents: Literal["file", "line"] = "file"
    """What one document of a plain text file is. Each line of JSONL is one."""
    field: str = "text"
    """The key of the text in JSONL."""
    tokenizer: str | None = None
    """A folder or hub name, or ``bytes``. Default: the tokenizer of the sharded folder."""
    pack: bool = True
    """Join documents and cut them into full sequences; otherwise one document a sequence, padded or cut off."""
    mask_probability: float = Field(0.15, gt=0, lt=1)
    """For masked: how many tokens are asked for; of these 80 % masked, 10 % random, 10 % as they are."""
    cache: str | None = None
    """Folder of the tokenized text. Default: OUTPUT/data."""

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value
