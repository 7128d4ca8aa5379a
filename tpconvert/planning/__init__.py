"""Making a plan: capture, choose, write, prove, and again until every rank's forward runs with the planned shapes."""

from tpconvert.planning.make import make_plan

__all__ = ["make_plan"]
