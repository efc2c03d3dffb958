"""Stage 6: gathers start as soon as their keys and values are there, and what does not need them is computed meanwhile.

On GPUs, where what travels takes no time of the cores that compute. Between ranks on CPUs it takes theirs: measured on
two cores, starting early made a step 5% slower.

The order of the calls changes and nothing else: projections of the query, and whatever else stands free of the
gathered keys and values (a parallel feed-forward layer), move between the start of a gather and its end.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from spcompile import ops
from spcompile.infer import is_compute, is_random
from spcompile.rewrite import KEPT_META

_GATHER = ops.kv_gather._opoverload
_START = ops.kv_gather_start._opoverload


def overlap(graph: fx.Graph) -> int:
    """Split K/V gathers where there is something to compute meanwhile. Returns how many were split."""
    region = _free(graph)
    position = {n: i for i, n in enumerate(region)}
    order = [n for n in region if n.op != "call_function"]
    done = set(order)
    starts: dict[fx.Node, int] = {}
    for gather in [n for n in region if n.target is _GATHER and travels_aside(n)]:
        order += _behind(gather.args[:2], done, position)
        starts[gather] = len(order)
    order += [n for n in region if n not in done]
    at = {n: i for i, n in enumerate(order)}
    split = [g for g, first in starts.items() if any(map(_takes_time, order[first : at[g]]))]
    if not split:
        return 0
    behind = region[-1].next
    for n in order:
        behind.prepend(n)
    for gather in split:
        k, v, _, *rest = gather.args
        latest = max((k, v), key=lambda n: at[n])  # type: ignore[index]
        with graph.inserting_after(latest):  # type: ignore[arg-type]
            start = graph.call_function(_START, (k, v, *rest))
        start.meta.update({key: gather.meta[key] for key in KEPT_META if key in gather.meta})
        start.meta["val"] = k.meta["val"].new_zeros(1, dtype=torch.uint8)  # type: ignore[union-attr]
        gather.args = (k, v, start, *rest)
    graph.lint()
    return len(split)


def travels_aside(gather: fx.Node) -> bool:
    """Is the transfer done by something else than what computes?"""
    return gather.args[0].meta["val"].device.type != "cpu"  # type: ignore[union-attr]


def _free(graph: fx.Graph) -> list[fx.Node]:
    """The nodes up to the first whose place matters for more than its operands: it writes, draws, or sets a mode."""
    region = []
    for node in graph.nodes:
        if node.op == "output" or (node.op == "call_function" and not _is_function(node)):
            break
        region.append(node)
    return region


def _is_function(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not node.target._schema.is_mutable and not is_random(node)


def _takes_time(node: fx.Node) -> bool:
    return is_compute(node) or node.target in ops.PROGRAMS


def _behind(wanted: Sequence[Any], done: set[fx.Node], position: dict[fx.Node, int]) -> list[fx.Node]:
    """What ``wanted`` are computed from and is not ``done``, in order."""
    found: set[fx.Node] = set()
    pending = [n for n in wanted if isinstance(n, fx.Node)]
    while pending:
        node = pending.pop()
        if node not in found and node not in done:
            found.add(node)
            pending += node.all_input_nodes
    done |= found
    return sorted(found, key=position.__getitem__)
