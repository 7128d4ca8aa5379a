"""Uses of every op that has a rule: sizes are distinct primes, so that no two dims are equal by accident."""

from tests.rules.elementwise import elementwise
from tests.rules.lookups import LOOKUPS, space
from tests.rules.one import Case
from tests.rules.products import NORMS, PRODUCTS, reductions
from tests.rules.shapes import made, shapes

CASES: dict[str, list[Case]] = {
    **PRODUCTS,
    **NORMS,
    **reductions(),
    **elementwise(),
    **LOOKUPS,
    **space(),
    **shapes(),
    **made(),
}

SPELLINGS = {
    "__abs__": "abs",
    "__div__": "div",
    "__iadd__": "add",
    "__imul__": "mul",
    "__ipow__": "pow",
    "__isub__": "sub",
    "__itruediv__": "div",
    "__matmul__": "matmul",
    "_pad": "pad",
    "alias": "clone",
    "cuda": "cpu",
    "from_numpy": "tensor",
    "grouped_mm": "_grouped_mm",
    "interpolate": "upsample_nearest1d",
    "log_sigmoid": "sigmoid",
    "softmin": "softmax",
    "trunc_normal_": "normal_",
    "type_": "type",
    "vector_norm": "linalg_vector_norm",
}
"""Rules under a name that no case can bring about, and the name whose rule they must share."""
