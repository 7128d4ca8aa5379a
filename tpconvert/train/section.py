"""What every section of the configuration is made from."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)
