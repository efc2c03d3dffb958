"""Outputs that share memory with inputs or with each other must do so again in the rewritten graph.

A caller may write into one and look at the other. In the functional graph such an output is a chain of view ops
from a root. The chain is copied to the end of the graph, for this output alone, and computed there on the whole
root: on the input itself, or on one whole value for all outputs that share it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten


def keep_sharing(graph: fx.Graph, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[str]:
    """Copy the view chains of outputs that share memory. ``outputs`` and ``inputs`` are those of an eager run.

    Returns why a written input's memory could not be followed to an output, if so.
    """
    storages = {_storage(x) for x in inputs if isinstance(x, Tensor)}
    count: dict[int, int] = defaultdict(int)
    for out in outputs:
        if isinstance(out, Tensor):
            count[_storage(out)] += 1
    written = {n.args[1]: n.args[0] for n in graph.find_nodes(op="call_function", target=aten.copy_.default)}
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    refusals: list[str] = []
    for i, out in enumerate(outputs):
        if not isinstance(out, Tensor) or (_storage(out) not in storages and count[_storage(out)] == 1):
            continue
        chain, root = _view_chain(results[i])
        if root in written.values():
            refusals.append(f"output {i} shares memory with an input that is written in place; return a clone")
        elif root in written and _storage(out) in storages:
            results[i] = _copy_chain(graph, output, chain, root, written[root])
        elif root.op == "placeholder" or count[_storage(out)] > 1:
            root.meta["shared"] = True
            results[i] = _copy_chain(graph, output, chain, root, root)
    output.args = (tuple(results),)
    return refusals


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns)


def _view_chain(node: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """The view ops that lead to ``node``, first to last, and what they start from."""
    chain: list[fx.Node] = []
    while True:
        source = node.args[0] if node.target is operator.getitem else node
        if not (isinstance(source, fx.Node) and _is_view(source)):
            return chain, node
        chain[:0] = [source, node] if source is not node else [node]
        node = source.all_input_nodes[0]


def _copy_chain(
    graph: fx.Graph, before: fx.Node, chain: Sequence[fx.Node], old_root: fx.Node, root: fx.Node
) -> fx.Node:
    """The chain again, from ``root``, as the last thing the graph does."""
    copies = {old_root: root}
    with graph.inserting_before(before):
        for node in chain:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta["whole"] = True
    return copies[chain[-1]] if chain else root
