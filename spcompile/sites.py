"""Stage 2: every attention call of the graph, as one canonical record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from spcompile import ops
from spcompile.call import bind
from spcompile.errors import UnsupportedGraphError
from spcompile.recognise import adapter_of
from spcompile.source import place

aten = torch.ops.aten


@dataclass(frozen=True)
class Site:
    """One attention call: q [..., H, S, D], k [..., G, T, D], v [..., G, T, E], mask broadcast to [..., H, S, T].

    ``fixed_lengths``: the captured op takes these S and T only. ``only_captured``: why no kernel may stand in for it.
    """

    node: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    mask: fx.Node | None
    dropout: float
    causal: bool
    scale: float
    fixed_lengths: bool = False
    only_captured: str | None = None

    def shape(self, which: str) -> tuple[int, ...]:
        return tuple(getattr(self, which).meta["val"].shape)

    @property
    def num_query_tokens(self) -> int:
        return self.shape("q")[-2]

    @property
    def op_name(self) -> str:
        """The captured op, as the report names it."""
        call = self.node.meta.get("captured_call")
        name = call.name if call else str(self.node.target)
        return name.removeprefix("aten.").removesuffix(".default").replace("scaled_dot_product_attention", "sdpa")

    @property
    def cost(self) -> int:
        """Multiply-adds of the scores: which site matters most."""
        q = self.shape("q")
        return torch.Size(q).numel() * self.shape("k")[-2]


def _sdpa(node: fx.Node) -> dict[str, Any]:
    arguments = bind(node)
    default = arguments["query"].meta["val"].shape[-1] ** -0.5
    return {
        "q": arguments["query"],
        "k": arguments["key"],
        "v": arguments["value"],
        "mask": arguments["attn_mask"],
        "dropout": arguments["dropout_p"],
        "causal": arguments["is_causal"],
        "scale": default if arguments["scale"] is None else arguments["scale"],
    }


def _recognised(node: fx.Node) -> dict[str, Any]:
    call = node.meta["captured_call"]
    return bind(node) | {"fixed_lengths": call.fixed_lengths, "only_captured": call.only_captured}


ATTENTION = {
    aten.scaled_dot_product_attention.default: _sdpa,
    ops.attention_call._opoverload: _recognised,
}
"""Attention op -> from a call to the fields of a `Site`."""


def has_attention(module: fx.GraphModule) -> bool:
    """Is there an attention call anywhere, nested graphs included?"""
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    return any(n.target in ATTENTION or adapter_of(n) for g in graphs for n in g.nodes)


def names_attention(dynamo: fx.GraphModule) -> bool:
    """Does Dynamo's graph call anything by the name of attention, or a softmax, which may be part of one?"""
    graphs = [m.graph for m in dynamo.modules() if isinstance(m, fx.GraphModule)]
    return any(may_be_attention(n) for g in graphs for n in g.nodes)


def may_be_attention(node: fx.Node) -> bool:
    """Is the call attention by its name, or a softmax?"""
    name = str(node.target)
    called = any(word in name for word in ("attention", "softmax", "transformer_encoder_layer"))
    return called or adapter_of(node) is not None


def weighs_values(node: fx.Node) -> bool:
    """Does a call that is named like attention give weights for a product, if it is but a softmax?"""
    if "softmax" not in str(node.target):
        return True
    near, seen = [node], {node}
    for _ in range(8):
        near = [user for n in near for user in n.users if user not in seen]
        seen |= {*near}
        if any(word in str(n.target) for n in near for word in ("matmul", "bmm", "einsum")):
            return True
    return False


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order op calls."""
    module = node.graph.owning_module
    attributes = [getattr(module, str(a.target)) for a in node.all_input_nodes if a.op == "get_attr"]
    return [a for a in attributes if isinstance(a, fx.GraphModule)]


def find_sites(module: fx.GraphModule) -> list[Site]:
    """All sites of a captured graph, in order. Raises `UnsupportedGraphError` for one inside control flow."""
    for node in module.graph.nodes:
        hidden = isinstance(node.target, torch._ops.HigherOrderOperator) and any(map(has_attention, bodies(node)))
        if hidden:
            raise UnsupportedGraphError(
                "SP205",
                f"{place(node)}: attention inside `{node.target}`, whose branches are compiled apart. "
                "Move the attention out of it, or decide in Python before the compiled model is called.",
            )
    return [Site(node, **ATTENTION[node.target](node)) for node in module.graph.nodes if node.target in ATTENTION]
