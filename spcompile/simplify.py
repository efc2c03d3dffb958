"""Attention that Dynamo's graph hides behind more than it needs is called plainly, before the capture.

- ``flex_attention`` that modifies nothing is ``scaled_dot_product_attention``. Its block mask is built by vmap,
  which the capture cannot trace; where the mask hides nothing it goes too.
- ``nn.TransformerEncoderLayer`` calls one fused op in eval mode. It is written out.
- ``nn.MultiheadAttention`` computes its weights by hand if asked for them, and it is by default. Where nobody uses
  them it is not asked.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention
import torch.nn.functional as F
from torch import Tensor, fx
from torch._functorch import predispatch
from torch.nn.attention.flex_attention import _LARGE_SPARSE_BLOCK_SIZE

from spcompile.errors import UnsupportedGraphError
from spcompile.source import place

flex_attention = torch.ops.higher_order.flex_attention
_FLEX_FILE = inspect.getfile(torch.nn.attention.flex_attention)


def simplify(module: fx.GraphModule) -> fx.GraphModule:
    """``module`` with such calls replaced; ``module`` itself if it has none."""
    for n in module.graph.nodes:
        if n.target is flex_attention and not _modifies_nothing(module, n):
            raise UnsupportedGraphError(
                "SP206",
                f"{place(n)}: flex_attention with a score_mod, or a block mask that may leave keys out, cannot be "
                "distributed yet. Use scaled_dot_product_attention with attn_mask, or put torch.compiler.disable on "
                "the function that calls it: it then runs on full tensors.",
            )
    found = {n.name: replace for n in module.graph.nodes if (replace := _simpler(module, n)) is not None}
    if not found:
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for old, new in list(copies.items()):
        if hasattr(old, "_dynamo_source"):  # AOTAutograd asks every placeholder for it
            new._dynamo_source = old._dynamo_source
        if old.name in found:
            found[old.name](new)
    _erase_block_masks(graph)
    return fx.GraphModule(module, graph)


def _erase_block_masks(graph: fx.Graph) -> None:
    """Erase what flex_attention made for itself and nobody uses any more, and nothing else."""
    levels: list[fx.Node] = []
    ours: set[fx.Node] = set()
    for node in graph.nodes:
        if _FLEX_FILE in (node.meta.get("stack_trace") or ""):
            ours.add(node)
        if node.target is predispatch._vmap_increment_nesting:
            levels.append(node)
        elif node.target is predispatch._vmap_decrement_nesting and levels.pop() in ours:
            ours.add(node)  # leaving a level has no source line of its own
    for node in reversed(graph.nodes):
        if node in ours and not node.users:
            graph.erase_node(node)


def _simpler(module: fx.GraphModule, node: fx.Node) -> Callable[[fx.Node], None] | None:
    """What to do to the copy of a node, if anything."""
    if node.target is flex_attention and _modifies_nothing(module, node):
        return _as_sdpa
    if node.target is torch._transformer_encoder_layer_fwd:
        return _written_out
    if node.target is F.multi_head_attention_forward and node.kwargs.get("need_weights", True) and _only_first(node):
        return _without_weights
    return None


def _written_out(node: fx.Node) -> None:
    node.target = _encoder_layer


def _encoder_layer(
    x: Tensor, width: int, heads: int, qkv_weight: Tensor, qkv_bias: Tensor, out_weight: Tensor, out_bias: Tensor,
    use_gelu: bool, norm_first: bool, eps: float, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor,
    up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor,
    mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """What ``torch._transformer_encoder_layer_fwd`` computes. x [B, S, C].

    ``mask`` is true, or any number but 0, where keys hide. ``mask_type``: 0 [S, S], 1 [B, S] of keys, 2 [B, H, S, S].
    """

    def attend(x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in F.linear(x, qkv_weight, qkv_bias).chunk(3, -1))
        keep = None if mask is None else mask.to(torch.bool).logical_not()  # the op takes any number for true
        keep = keep[:, None, None] if keep is not None and mask_type == 1 else keep
        out = F.scaled_dot_product_attention(q, k, v, keep)
        return F.linear(out.transpose(1, 2).flatten(2), out_weight, out_bias)

    def feed_forward(x: Tensor) -> Tensor:
        y = F.linear(x, up_weight, up_bias)
        return F.linear(F.gelu(y) if use_gelu else F.relu(y), down_weight, down_bias)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight_1, bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight_2, bias_2, eps)

    if norm_first:
        x = x + attend(norm_1(x))
        return x + feed_forward(norm_2(x))
    x = norm_1(x + attend(x))
    return norm_2(x + feed_forward(x))


def _only_first(node: fx.Node) -> bool:
    """Is the first of several results the only one that is used?"""
    return all(u.target is operator.getitem and u.args[1] == 0 for u in node.users if u.users)


def _without_weights(node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "need_weights": False}


def _as_sdpa(node: fx.Node) -> None:
    arguments: Any = node.args
    query, key, value = arguments[:3]
    heads = [x.meta["example_value"].shape[1] for x in (query, key)]
    with node.graph.inserting_before(node):
        kwargs = {"scale": arguments[5], "enable_gqa": heads[0] != heads[1]}
        call = node.graph.call_function(F.scaled_dot_product_attention, (query, key, value), kwargs)
    call.meta.update(node.meta)
    for user in list(node.users):
        user.replace_all_uses_with(call)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _modifies_nothing(module: fx.GraphModule, node: fx.Node) -> bool:
    """Score and mask are left alone, and nobody uses the log-sum-exp."""
    arguments: Any = node.args
    score, mask = getattr(module, arguments[3].target), getattr(module, arguments[4][-1].target)
    return _only_first(node) and _returns_score(score) and _returns_true(mask) and _lists_all_blocks(arguments[4])


def _lists_all_blocks(block_mask: Any) -> bool:
    """Is it the mask of one block that flex_attention makes for itself? Lists of blocks may leave some out.

    Kernels for GPUs read the lists even where the mask function alone hides nothing.
    """
    return all(size == _LARGE_SPARSE_BLOCK_SIZE for size in block_mask[-3:-1])


def _returns_score(score_mod: fx.GraphModule) -> bool:
    nodes: list[Any] = list(score_mod.graph.nodes)
    return nodes[-1].args[0] is nodes[0]


def _returns_true(mask_mod: fx.GraphModule) -> bool:
    result: Any = mask_mod.graph.output_node().args[0]
    return getattr(result, "target", None) in ("new_ones", torch.ones) and result.kwargs.get("dtype") is torch.bool
