"""The one family of errors a user sees: what, where, the numbers, and the way out."""

from __future__ import annotations


class TPConvertError(Exception):
    """Something the user can mend.  ``hint`` says how; the CLI prints one line and exits with ``exit_code``."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class SourceError(TPConvertError):
    """The model named as SOURCE cannot be opened, built or traced."""


class PlanError(TPConvertError):
    """A plan cannot be made, read or applied."""


class RewriteError(PlanError):
    """The forward that a plan gives one module cannot be built; ``module`` is its path."""

    def __init__(self, module: str, message: str) -> None:
        super().__init__(f"{module or 'the root module'}: {message}")
        self.module = module


class RuleError(TPConvertError):
    """A rule file or a ``--set`` override is wrong, or matches nothing."""


class CheckpointError(TPConvertError):
    """A folder of tensors is missing, incomplete, damaged, or would be overwritten."""


class ConfigError(TPConvertError):
    """A training configuration is wrong."""


class VerifyError(TPConvertError):
    """The converted model is not equal to the whole one."""

    exit_code = 1


class NotRunError(TPConvertError):
    """A verification could not be run, so it says nothing."""


class TrainError(TPConvertError):
    """A training run went wrong."""

    exit_code = 1
