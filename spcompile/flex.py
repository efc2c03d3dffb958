"""flex_attention that modifies nothing is ``scaled_dot_product_attention``: recognised in Dynamo's graph.

Its block mask is built by vmap, which the capture cannot trace; where the mask hides nothing it is dropped.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

flex_attention = torch.ops.higher_order.flex_attention


def without_plain_flex(module: fx.GraphModule) -> fx.GraphModule:
    """``module`` with every plain flex_attention replaced; ``module`` itself if it has none."""
    plain = {n.name for n in module.graph.find_nodes(op="call_function", target=flex_attention) if _is_plain(module, n)}
    if not plain:
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, copies)
    graph.output(output)
    pairs: Any = copies.items()
    for old, new in pairs:
        if old.name not in plain:
            continue
        (
            query,
            key,
            value,
            *_,
        ) = new.args
        with graph.inserting_before(new):
            grouped = _heads(old.args[0]) != _heads(old.args[1])
            kwargs = {"scale": new.args[5], "enable_gqa": grouped}
            call = graph.call_function(F.scaled_dot_product_attention, (query, key, value), kwargs)
        call.meta.update(new.meta)
        for user in list(new.users):
            user.replace_all_uses_with(call)
            graph.erase_node(user)
        graph.erase_node(new)
    graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    return fx.GraphModule(module, graph)


def _heads(node: Any) -> int:
    return node.meta["example_value"].shape[1]


def _is_plain(module: fx.GraphModule, node: Any) -> bool:
    """Score and mask are left alone, nothing is captured, and nobody uses the log-sum-exp."""
    _, _, _, score_mod, block_mask, *_ = node.args
    score, mask = getattr(module, score_mod.target), getattr(module, block_mask[-1].target)
    only_output = all(u.target is operator.getitem and u.args[1] == 0 for u in node.users if u.users)
    return only_output and _returns_score(score) and _returns_true(mask)


def _returns_score(score_mod: fx.GraphModule) -> bool:
    nodes: list[Any] = list(score_mod.graph.nodes)
    return nodes[-1].args[0] is nodes[0]


def _returns_true(mask_mod: fx.GraphModule) -> bool:
    result: Any = mask_mod.graph.output_node().args[0]
    return getattr(result, "target", None) in ("new_ones", torch.ones) and result.kwargs.get("dtype") is torch.bool
