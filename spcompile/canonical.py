"""A graph as text that is the same on every rank that computes the same.

Left out is what may differ and means nothing: names, the numbers of devices, and inputs that nothing reads. A rank
that has compiled other resolutions before gets sizes as inputs of Dynamo's graph, which the capture has made plain
numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from spcompile.agreement import digest
from spcompile.source import source_of


def canonical(module: fx.GraphModule, with_source: bool = False) -> list[str]:
    """A line for each node, with its operands by number; constants by their values."""
    numbers: dict[fx.Node, int] = {}
    lines = []
    for node in module.graph.nodes:
        if node.op == "placeholder" and not node.users:
            continue
        numbers[node] = len(numbers)
        source = f" at {source_of(node)}" if with_source else ""
        lines.append(f"{_target(module, node) or node.op} {_arguments(node, numbers)}{source}")
    return lines


def reads(module: fx.GraphModule) -> list[bool]:
    """Which of the inputs the graph reads."""
    return [bool(node.users) for node in module.graph.find_nodes(op="placeholder")]


def _target(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "placeholder":
        return ""
    if node.op != "get_attr":
        return torch.fx.node._get_qualified_name(node.target) if callable(node.target) else str(node.target)
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    if isinstance(value, fx.GraphModule):
        return "; ".join(canonical(value))
    return f"{list(value.shape)} {value.dtype} {int(digest(value))}" if isinstance(value, Tensor) else repr(value)


def _arguments(node: fx.Node, numbers: dict[fx.Node, int]) -> str:
    def plain(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return f"%{numbers[x]}"
        return x.type if isinstance(x, torch.device) else x

    return str(fx.node.map_aggregate((node.args, dict(node.kwargs)), plain))
