"""What a rule is, and the rule of most ops: dims are carried through by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx
from torch._ops import OpOverload

from spcompile.call import Call
from spcompile.layout import REPLICATED, Layout, Sharded

Name = Hashable | None
Names = list[list[Name]]


@dataclass(frozen=True)
class Plan:
    """How a call is computed on chunks.

    ``operands`` and ``outputs`` are layouts; where sizes change, ``target`` with ``arguments`` (by schema name)
    replaces the call; where it takes several calls, ``build`` emits them, given the arguments on chunks by schema name,
    and returns the result (a list of several). ``cuts`` are cut points ``(root, token)`` without which the plan does
    not hold.
    """

    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    target: OpOverload | None = None
    cuts: tuple[tuple[object, int], ...] = ()
    build: Callable[[Build, dict[str, Any]], Any] | None = None

    def layout_of(self, value: Any) -> Any:
        """The result's layout; for several results a tuple, replicated where a result is no tensor."""
        if isinstance(value, torch.Tensor):
            return self.outputs[0]
        left = iter(self.outputs)
        return tuple(next(left) if isinstance(v, torch.Tensor) else REPLICATED for v in value)


class Build(Protocol):
    """What a `Plan.build` can emit. Layouts are those of the values given."""

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call."""
        ...

    def cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node: ...

    def filled(self, value: fx.Node, lay: Sharded, fill: float) -> fx.Node:
        """``value`` with ``fill`` in place of padding; ``value`` itself if it has none."""
        ...

    def all_reduce(self, value: fx.Node, how: str) -> fx.Node: ...

    def cumsum(self, value: fx.Node, lay: Sharded) -> fx.Node: ...

    def halo(self, value: fx.Node, lay: Sharded, before: int, after: int, wraps: bool = False) -> fx.Node:
        """``value`` with rows of both neighbours; zeros for padding and, unless it wraps, at the ends."""
        ...

    def pick(self, value: fx.Node, index: fx.Node, lay: Sharded) -> fx.Node:
        """``torch.gather`` of the whole value, by a whole index."""
        ...

    def local_rows(self, index: fx.Node, lay: Sharded, wraps: bool) -> fx.Node:
        """Where tokens of a whole index lie in a chunk, one past it for those of other ranks."""
        ...

    def unshard(self, value: fx.Node, lay: Sharded) -> fx.Node:
        """All of ``value`` on every rank."""
        ...


class Rule(Protocol):
    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None: ...

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]: ...


def first_only(first: Layout, call: Call) -> tuple[Layout, ...]:
    """Layouts of the operands: the first as given, all others whole."""
    others: list[Layout] = [REPLICATED] * (len(call.operands) - 1)
    return (first, *others)


def by_size(call: Call, layouts: Sequence[Layout]) -> list[tuple[int, Sharded]]:
    """The sharded operands, largest first: the others follow its layout."""
    found = [(i, lay) for i, lay in enumerate(layouts) if isinstance(lay, Sharded)]
    return sorted(found, key=lambda f: -math.prod(call.shape(f[0])))


def cheaper_reduced(call: Call, sharded: Sequence[int]) -> bool:
    """Does an all-reduce of the results send less than an all-gather of the operands?"""
    results = sum(math.prod(o) for o in call.outputs)
    return 2 * results <= sum(math.prod(call.shape(i)) for i in sharded)


def value_dtype(call: Call, output: int = 0) -> torch.dtype:
    value: Any = call.node.meta["val"]
    return (value[output] if isinstance(value, (tuple, list)) else value).dtype


@dataclass(frozen=True)
class Carry:
    """Dims pass through by name. ``sized`` is the op that takes the operand and the result's shape as ``size``."""

    names: Callable[[Call], tuple[Names, Names]]
    sized: OpOverload | None = None

    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None:
        ins, outs = self.names(call)
        if any(len(n) != call.rank(i) for i, n in enumerate(ins)) or len(ins) != len(layouts):
            return None
        for i, lead in by_size(call, layouts):
            name = ins[i][lead.dim]
            if name is not None and outs and all(o.count(name) == 1 for o in outs):
                break
        else:
            return None
        if any(names.count(name) > 1 for names in ins):
            return None
        operands = tuple(lead.at(names.index(name)) if name in names else REPLICATED for names in ins)
        outputs = tuple(lead.at(names.index(name)) for names in outs)
        if self.sized is None:
            return Plan(operands, outputs)
        size = outputs[0].local_shape(call.outputs[0], call.degree)
        return Plan(operands, outputs, {"self": call.operands[0], "size": size}, self.sized)

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]:
        ins, outs = self.names(call)
        name = outs[output][want.dim]
        if name is None:
            return []
        return [(i, want.at(names.index(name))) for i, names in enumerate(ins) if name in names]
