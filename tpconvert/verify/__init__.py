"""The proof: whole and converted side by side, outputs, every gradient, steps, and every byte."""

from tpconvert.verify.compare.checks import compare_on_rank
from tpconvert.verify.result import Check, Result, Tolerance
from tpconvert.verify.run import emulate_module, verify, verify_emulated
from tpconvert.verify.text import proof_text

__all__ = [
    "Check",
    "Result",
    "Tolerance",
    "compare_on_rank",
    "emulate_module",
    "proof_text",
    "verify",
    "verify_emulated",
]
