"""One ATen call as the rules see it: operands by number, arguments by schema name, shapes of everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from spcompile.layout import Segment


def tensor_of(value: Any) -> Tensor | None:
    """The fake tensor a node stands for, or None if it stands for something else."""
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return found if isinstance(found, Tensor) else None


def bind(node: fx.Node) -> dict[str, Any]:
    """The call's arguments by the names of its schema, in its order, defaults included."""
    bound: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(node.args):
            bound[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


@dataclass(frozen=True)
class Call:
    """``new_root(key, tokens)`` gives the segments of tokens that begin to be sharded at this call: one, uncut."""

    node: fx.Node
    degree: int
    new_root: Callable[[object, int], tuple[Segment, ...]] = lambda key, tokens: (Segment(tokens),)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        if not isinstance(self.node.target, torch._ops.OpOverload):
            return {f"_{i}": a for i, a in enumerate([*self.node.args, *self.node.kwargs.values()])}
        return bind(self.node)

    @cached_property
    def operands(self) -> list[fx.Node]:
        """Every tensor argument, in schema order; a list of tensors counts one by one."""
        found: list[fx.Node] = []
        for value in self.arguments.values():
            fx.map_arg(value, lambda n: found.append(n) if tensor_of(n) is not None else None)
        return found

    def shape(self, operand: int) -> tuple[int, ...]:
        return tuple(self.operands[operand].meta["val"].shape)

    def rank(self, operand: int) -> int:
        return len(self.shape(operand))

    def dim(self, name: str, operand: int = 0) -> int:
        """The dim argument ``name``, counted from the front of ``operand``."""
        return self.arguments[name] % max(self.rank(operand), 1)

    def dim_at(self, name: str, position: int) -> int:
        """The entry of a list of dims, counted from the front of the first operand."""
        return self.arguments[name][position] % max(self.rank(0), 1)

    def index(self, name: str) -> int | None:
        """The operand number of the tensor argument ``name``, None if it was not given."""
        value = self.arguments.get(name)
        return self.operands.index(value) if isinstance(value, fx.Node) and value in self.operands else None

    @cached_property
    def outputs(self) -> list[tuple[int, ...]]:
        """Shapes of the tensor outputs, in order."""
        value = self.node.meta["val"]
        values = value if isinstance(value, (tuple, list)) else [value]
        return [tuple(v.shape) for v in values if isinstance(v, Tensor)]
