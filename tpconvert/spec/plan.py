"""The plan: what is cut and why, and what the runtime must do about it.  Complete: nothing is traced again later.

A plan holds, for one module and one tp degree,

* a :class:`Verdict` for every parameter and buffer,
* the :class:`Boundary` list: the collectives, each at a module's input or output,
* the :class:`Edit` list: integer attributes that count something cut,
* the :class:`Switch` list: where random numbers begin to differ between ranks, and where they end to,
* the :class:`Rewrite` list: modules whose forward is replaced by their own recorded graph,
* the :class:`Slices`: what differs where values between regions are slices of the tokens,
* the modules that are ``unreached``: what they would do among terms of sums is not known,
* the slots of what the model ``returns``: what it returns elsewhere was not looked at,
* the modules that ask for ``ranks``, and those that take ``seeds`` from the machine.

It is JSON that a person can read, diff and edit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from tpconvert.errors import PlanError
from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.reading.consistent import refuse_inconsistent
from tpconvert.spec.reading.typed import WrongError, reader

FORMAT = 1
NAME = "plan.json"
REPORT = "report"
"""What ``tpconvert plan --json`` prints besides."""
MEND = "Correct the entry, or make the plan again."
AGAIN = "Make one with: tpconvert plan SOURCE --tp N -o plan.json."

Kind = Literal["reduce", "reduce_scatter", "gather", "all_gather", "once", "copy", "single", "scatter"]
"""In the order in which those at one place happen."""
Side = Literal["input", "output"]
UNKNOWN = "its plan was made without looking for slices"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens to one parameter or buffer, and why."""

    name: str
    """Its name in ``named_parameters(remove_duplicate=False)`` or ``named_buffers``."""
    shape: tuple[int, ...]
    dtype: str
    """As torch spells it without the prefix: ``float32``, ``bfloat16``."""
    layout: Layout
    reason: str
    kind: Literal["parameter", "buffer"] = "parameter"
    axis: str = ""
    """The axis it is cut along (:attr:`Axis.name`), empty when whole."""
    pattern: str = ""
    """The pattern it was found in: ``gated-mlp``, ``attention``, ``vocabulary``, ..."""
    role: str = ""
    """Its part in that pattern: ``column``, ``row``, ``vocabulary``, ``per-head``, ..."""
    sum_grad: bool = False
    """Each rank holding a row of it computes a term of that row's gradient: reads sum the gradient over them."""
    once: bool = False
    """A whole value added to a partial one (the bias of a row-parallel layer): it counts on one rank only."""
    on_slices: bool = False
    """In the sliced form its gradient is summed over ranks too, since it is used on slices (:class:`Slices`)."""
    tied_to: str = ""
    """The first name of the same tensor, when this is a later one."""
    persistent: bool = True
    """Whether it is part of the state dict."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """One collective where a value crosses into or out of a cut region.

    ==============  ====================================  ====================================
    kind            forward                               backward
    ==============  ====================================  ====================================
    copy            identity                              sum over ranks
    reduce          sum over ranks                        identity
    gather          parts joined along ``dim``            this rank's part
    scatter         this rank's part along ``dim``        parts joined
    once            identity on rank 0, zeros on others   identity
    all_gather      slices joined along ``dim``           this rank's slice of the sum
    reduce_scatter  this rank's slice of the sum          slices joined
    single          identity                              identity on rank 0, zeros on others
    ==============  ====================================  ====================================

    ``all_gather`` and ``reduce_scatter`` are of the sliced form only (:class:`Slices`).  A gather or scatter without
    ``blocks`` is of slices.
    """

    kind: Kind
    module: str
    """Dotted path of the module; empty for the root."""
    side: Side
    slots: tuple[str, ...]
    """Where the tensor is. Input: ``args.0``, ``kwargs.hidden_states``, ``args.0.1`` (nested). Output: ``""`` for the
    output itself, ``0``, ``logits``, ``0.1``.  Several slots hold one and the same tensor and share one collective."""
    axis: str = ""
    shape: tuple[int, ...] = ()
    """Shape of the whole tensor when traced, for counting bytes."""
    dtype: str = ""
    dim: int | None = None
    """gather, scatter: the dim that is cut. copy: the dim of ``span``."""
    blocks: tuple[Block, ...] = ()
    """gather, scatter: how that dim is dealt."""
    span: tuple[int, int] | None = None
    """copy: only this range of ``dim`` has a partial gradient; the rest is left alone."""
    call: int = -1
    """Which call of the module in one forward, for modules called more than once; -1 is every call."""
    calls: int = 1
    """How often the forward called the module when it was planned."""
    sliced: int | None = None
    """copy, reduce: in the sliced form it is an all_gather or reduce_scatter along this dim."""
    moved: bool = False
    """In the sliced form it is not here; what is there instead is in :attr:`Slices.boundaries`."""


@dataclass(frozen=True, slots=True)
class Edit:
    """An integer attribute the forward reads, which counts something cut.

    Its value on a rank is ``local_size(blocks) // local_size(per)``, an empty ``per`` counting as 1.
    """

    module: str
    attribute: str
    """``num_heads``; ``config.num_attention_heads`` edits a copy of the config that only this module sees;
    ``sizes.1`` edits an item of a tuple or list."""
    value: int
    """The whole value, checked before it is replaced."""
    blocks: tuple[Block, ...]
    per: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Switch:
    """A point of the forward from which random numbers are drawn cut, or whole again.

    Cut: each rank its own, as dropout of a cut value needs.  Whole: the same on all ranks.  A forward begins whole.
    A module with opposite switches at its input and its output draws as the first says and then as around it, so
    modules with switches may lie within each other; other switches hold until the next.
    """

    module: str
    side: Side
    cut: bool
    always: bool = False
    """Also in a forward no part of which is in training mode."""


@dataclass(frozen=True, slots=True)
class Slices:
    """The sliced form of a plan, for sequence parallelism: between regions each rank has a slice of the tokens.

    It is told as what differs from the plain form: here, in :attr:`Boundary.sliced`, :attr:`Boundary.moved` and
    :attr:`Verdict.on_slices`.
    """

    reason: str = ""
    """Why there is none; empty where there is."""
    inputs: tuple[tuple[str, int], ...] = ()
    """``(slot, dim)`` of the tokens in what the model is called with."""
    boundaries: tuple[Boundary, ...] = ()
    """Those that the plain form has not."""
    whole: tuple[str, ...] = ()
    """Modules whose forwards see no slices, since they would not run on them, or not on slices of rows."""
    switches: tuple[Switch, ...] | None = None
    """Those in the place of the plain ones, where they differ."""
    unreached: tuple[str, ...] | None = None
    """Those in the place of the plain ones, where they differ."""
    rows: bool = False
    """Whether a slice is a run of the tokens of all sequences, one sequence after the other, in the shape of a share of
    each: what lies between regions takes token by token, whichever sequence it is of.  Such a slice lies in one run of
    memory, so nothing is copied to gather it.  Else it is a run of each sequence."""
    sequences: bool = False
    """Whether a slice is some of the sequences of a batch, each with all its tokens, which are too odd a number for the
    ranks, whatever the model is called with: 197 of a picture, say.  :attr:`inputs` are the dims of the sequences."""
    common: tuple[str, ...] = ()
    """Then the slots of inputs that were one for all sequences, in their first dim, and so have to be again."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A module whose forward is replaced by its recorded graph, where a size or a collective fits no other way.

    A module has one for each kind of call that takes a path of its own, which their signatures tell apart.
    """

    module: str
    reason: str
    signature: dict[str, Any]
    """What the forward was called with: slot -> ``tensor``, or the constant it was given."""
    nodes: tuple[dict[str, Any], ...]
    output: Any


@dataclass(frozen=True, slots=True)
class Axis:
    """Dims that are cut together."""

    name: str
    """Like ``model.layers.0.mlp:ffn``; unique in the plan."""
    pattern: str
    size: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the runtime, the checkpoint and the reader need to know about one conversion."""

    tp: int
    verdicts: tuple[Verdict, ...]
    boundaries: tuple[Boundary, ...] = ()
    edits: tuple[Edit, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    switches: tuple[Switch, ...] = ()
    axes: tuple[Axis, ...] = ()
    slices: Slices = Slices(UNKNOWN)
    unreached: tuple[str, ...] = ()
    """Modules that no captured forward called, held by one whose own forward sees terms of sums: not to be called."""
    returns: tuple[str, ...] = ()
    """Slots of the tensors that captured calls returned, numbers further in ``*``; empty where that is not known."""
    ranks: tuple[str, ...] = ()
    """Modules whose own forward asks torch.distributed for ranks: they are shown those of dp alone, since the others
    hold the same data."""
    seeds: tuple[str, ...] = ()
    """Modules whose own forward takes seeds from the machine: all ranks of tp take the same."""
    notes: tuple[str, ...] = ()
    """Guesses and warnings, in words."""
    source: dict[str, Any] = field(default_factory=dict)
    """What was planned: its name, class, input shapes, versions."""
    _by_name: dict[str, Verdict] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {v.name: v for v in self.verdicts}
        if len(by_name) < len(self.verdicts):
            twice = Counter(v.name for v in self.verdicts).most_common(1)[0][0]
            raise PlanError(f"The plan has two verdicts for {twice}.")
        object.__setattr__(self, "_by_name", by_name)

    def __getitem__(self, name: str) -> Verdict:
        if name not in self._by_name:
            raise PlanError(f"The plan has no parameter or buffer named {name}.")
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def layouts(self) -> dict[str, Layout]:
        """Name -> layout of every parameter and buffer."""
        return {v.name: v.layout for v in self.verdicts}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; defaults are left out."""
        data: dict[str, Any] = _plain(self)
        return {"format": FORMAT} | data

    def dumps(self) -> str:
        """The text of ``plan.json``: one line an entry."""
        return _dumps(self.to_json())

    @classmethod
    def from_json(cls, data: Any, where: str = NAME) -> Plan:
        """The inverse of :meth:`to_json`; anything else is a :class:`PlanError` that names ``where`` and the entry."""
        if not isinstance(data, Mapping) or "format" not in data:
            raise PlanError(f"{where}: not a plan of tpconvert.", hint=AGAIN)
        if data["format"] != FORMAT or type(data["format"]) is not int:
            raise PlanError(
                f"{where}: format {data['format']!r}; this version of tpconvert reads format {FORMAT}.",
                hint="Use the version of tpconvert that wrote it, or make the plan again.",
            )
        own = {Layout: _own(Layout.from_json), Block: _own(Block.from_json)}
        try:
            _refuse_degree(data.get("tp"))
            made: Plan = reader(cls, own)({key: value for key, value in data.items() if key not in ("format", REPORT)})
            refuse_inconsistent(made)
        except WrongError as error:
            raise PlanError(f"{where}: {error.sentence}", hint=MEND) from None
        except PlanError as error:
            raise PlanError(f"{where}: {error.message}", hint=MEND) from None
        except RecursionError:
            raise PlanError(f"{where}: nested too deeply.", hint=AGAIN) from None
        return made

    @classmethod
    def loads(cls, text: str, where: str = NAME) -> Plan:
        """A plan from the text of ``plan.json``."""
        try:
            data = json.loads(text, object_pairs_hook=no_duplicates)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{where}: not JSON ({error}).", hint=AGAIN) from None
        return cls.from_json(data, where)


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of JSON, each of whose keys must occur once: Python would keep the last one in silence."""
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {twice!r} occurs twice")
    return out


def _own(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrapped(data: Any) -> Any:
        try:
            return read(data)
        except ValueError as error:
            raise WrongError(str(error)) from None

    return wrapped


def _refuse_degree(tp: Any) -> None:
    if type(tp) is not int or tp < 1:
        raise WrongError(f"tp is {tp!r}, not a whole number from 1")


def _plain(item: Any) -> Any:
    """A dataclass as JSON data, without the fields that hold their default."""
    if isinstance(item, Block | Layout):
        return item.to_json()
    if is_dataclass(item):
        values = ((f, getattr(item, f.name)) for f in fields(item) if f.init)
        return {f.name: _plain(value) for f, value in values if value != _default(f)}
    if isinstance(item, dict):
        return {k: _plain(v) for k, v in item.items()}
    if isinstance(item, tuple | list):
        return [_plain(v) for v in item]
    return item


def _default(f: Field[Any]) -> Any:
    """The default of a field, or a value equal to nothing."""
    return f.default if f.default_factory is MISSING else f.default_factory()


def _dumps(data: dict[str, Any], indent: str = "") -> str:
    lines = []
    for key, value in data.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            body = ",\n".join(f"{indent}  {json.dumps(v)}" for v in value)
            text = f"[\n{body}\n{indent} ]"
        elif key == "slices":
            text = _dumps(value, f"{indent} ").rstrip()
        lines.append(f"{indent} {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}\n"
