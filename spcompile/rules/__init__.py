"""Stage 3, the table: for each op family, which dims of operands and results are the same.

A rule answers two questions about a call. *Forward*: given the operands' layouts, how must the operands lie
and how do the results then lie (a `Plan`), or None if the op mixes tokens. *Backward*: if a result is to
be sharded along a dim, which operand dims does that dim come from. Most ops only carry dims through, so most
rules are one small function that gives every dim a name (`names`). `pieces` has the rules about parts of dims (view,
cat, slice), `mixing`, `convolutions` and `rows` those of ops that mix or move tokens and are computed on chunks all
the same. The table is below; an op that is not in it is computed on full tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from spcompile.call import Call
from spcompile.rules import convolutions, mixing, names, rows
from spcompile.rules.base import Carry, Plan, Rule
from spcompile.rules.mixing import Contract, Mixing
from spcompile.rules.pieces import NARROW, SLICE, SPLIT, Concatenate, Like, Regroup, SliceScatter
from spcompile.rules.rows import OneToken, Written

__all__ = ["RULES", "Plan", "Rule", "rule_for"]

aten = torch.ops.aten

POINTWISE = Carry(names.pointwise)


def _dim(call: Call) -> int:
    return call.dim("dim")


def _carry(family: Callable[[Call], tuple[names.Names, names.Names]], *packets: Any) -> dict[OpOverload, Rule]:
    return _same(Carry(family), *packets)


def _mixing(mixed: Callable[..., Plan | None], family: Any, *packets: Any) -> dict[OpOverload, Rule]:
    return _same(Mixing(Carry(family), mixed), *packets)


def _same(rule: Rule, *packets: Any) -> dict[OpOverload, Rule]:
    """One rule for every overload of some ops."""
    return {getattr(p, name): rule for p in packets for name in p.overloads() if not name.endswith("out")}


RULES: dict[OpOverload, Rule] = {
    # elementwise, beyond what carries torch's own `pointwise` tag
    **_same(POINTWISE, aten._to_copy, aten.to, aten.clone, aten.detach, aten.alias, aten.contiguous),
    **_same(POINTWISE, aten.lift_fresh_copy, aten.copy, aten.where, aten.masked_fill),
    **_same(POINTWISE, aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like),
    **_same(POINTWISE, aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.fill, aten._conj, aten.conj),
    **_same(POINTWISE, aten.resolve_conj, aten.real, aten.imag, aten.complex, aten.polar, aten.rsub, aten.float_power),
    **_same(POINTWISE, aten.__and__, aten.__or__, aten.__xor__, aten.__lshift__, aten.__rshift__),
    # dims change places
    **_same(Carry(names.permuted(lambda c: c.arguments["dims"])), aten.permute),
    **_same(
        Carry(names.permuted(lambda c: names.swapped(c, c.arguments["dim0"], c.arguments["dim1"]))), aten.transpose
    ),
    aten.swapaxes.default: Carry(
        names.permuted(lambda c: names.swapped(c, c.arguments["axis0"], c.arguments["axis1"]))
    ),
    aten.swapdims.default: Carry(names.permuted(lambda c: names.swapped(c, c.arguments["dim0"], c.arguments["dim1"]))),
    **_same(Carry(names.permuted(lambda c: list(range(c.rank(0)))[::-1])), aten.t, aten.numpy_T),
    **_same(Carry(names.permuted(lambda c: names.swapped(c, -1, -2))), aten.mT, aten.adjoint),
    aten.movedim.intlist: Carry(names.permuted(names.moved)),
    # dims are merged and split
    aten.view.default: Regroup(),  # view.dtype reads other bytes
    aten.flatten.using_ints: Regroup(),
    aten.unflatten.int: Regroup(),
    **_same(Regroup(), aten.reshape, aten._unsafe_view, aten.view_as, aten.reshape_as, aten.squeeze, aten.unsqueeze),
    **_same(Carry(names.complex_pair(0)), aten.view_as_real),
    **_same(Carry(names.complex_pair(1)), aten.view_as_complex),
    # dims are taken out, put in, repeated
    **_same(Concatenate(), aten.cat, aten.concat),
    **_carry(names.stack, aten.stack),
    **_same(OneToken(SLICE), aten.slice),
    aten.narrow.default: NARROW,
    **_same(SPLIT, aten.split, aten.split_with_sizes, aten.chunk, aten.unsafe_split, aten.unsafe_chunk),
    aten.tensor_split.sections: SPLIT,
    **_mixing(rows.one_token, names.taken_apart, aten.select),
    **_carry(names.taken_apart, aten.unbind),
    aten.index.Tensor: Carry(names.indexed),
    **_carry(names.select_scatter, aten.select_scatter),
    **_same(SliceScatter(), aten.slice_scatter),
    aten.expand.default: Carry(names.expand, sized=aten.expand.default),
    **_carry(names.repeat, aten.repeat, aten.tile),
    aten.repeat_interleave.self_int: Carry(names.repeat_interleaved),
    **_mixing(rows.padded, names.padded, aten.constant_pad_nd, aten.pad),
    **_mixing(rows.looked_up, names.picked, aten.index_select),
    **_mixing(rows.looked_up, names.gathered, aten.gather),
    **dict.fromkeys(
        (aten.scatter.src, aten.scatter.value, aten.scatter_add.default), Written(Carry(names.scattered), _dim)
    ),
    **dict.fromkeys((aten.index_add.default, aten.index_copy.default), Written(Carry(names.rows_added), _dim)),
    aten.index_put.default: Written(None, rows.indexed_dim, wraps=True),
    **_carry(names.one_hot, aten.one_hot),
    **_carry(names.embedding, aten.embedding),
    # contractions
    **_same(Contract(names.linear, bias="bias"), aten.linear),
    **_same(Contract(names.matmul), aten.matmul, aten.mm, aten.bmm, aten.mv, aten.dot, aten._int_mm),
    **_same(Contract(names.einsum), aten.einsum),
    **_carry(names.add_matmul, aten.addmm, aten.baddbmm),
    # sums and statistics
    **_mixing(mixing.summed, names.reduced, aten.sum, aten.mean),
    **_mixing(mixing.pooled_to_one, names.pooled, aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d),
    **_mixing(mixing.extreme, names.reduced, aten.amax, aten.amin),
    **dict.fromkeys((aten.max.default, aten.min.default), Mixing(Carry(names.reduced), mixing.extreme)),
    **_mixing(mixing.anywhere, names.reduced, aten.any, aten.all),
    **_mixing(mixing.log_sum_exp, names.reduced, aten.logsumexp),
    **_mixing(mixing.length, names.reduced, aten.linalg_vector_norm),
    **_mixing(mixing.spread, names.reduced, aten.var, aten.std, aten.var_mean, aten.std_mean),
    **_carry(names.reduced, aten.prod, aten.kthvalue, aten.argmax, aten.argmin, aten.norm, aten.median),
    **dict.fromkeys((aten.max.dim, aten.min.dim), Carry(names.reduced)),
    # norms and other ops that mix entries along some dims
    **_carry(names.last_dims, aten.layer_norm, aten.rms_norm, aten.native_layer_norm, aten._fused_rms_norm),
    **_mixing(mixing.normalised_groups, names.only_first_dim, aten.group_norm),
    **_mixing(mixing.normalised_groups, names.instance_norm, aten.instance_norm),
    **_mixing(mixing.normalised_batch, names.batch_norm, aten.batch_norm, aten.native_batch_norm),
    **_mixing(mixing.normalised_batch, names.batch_norm, aten._native_batch_norm_legit_functional),
    **_mixing(mixing.normalised_batch, names.batch_norm, aten._native_batch_norm_legit_no_training),
    **_mixing(mixing.normalised_batch, names.batch_norm, aten._batch_norm_with_update_functional),
    aten._native_batch_norm_legit.no_stats: Mixing(Carry(names.batch_norm), mixing.normalised_batch),
    **_mixing(mixing.softmax, names.along("dim"), aten.softmax, aten._softmax, aten.log_softmax, aten._log_softmax),
    **_mixing(mixing.running_sum, names.along("dim"), aten.cumsum),
    **_carry(names.along("dim"), aten.cumprod, aten.logcumsumexp, aten.sort, aten.argsort, aten.topk, aten.glu),
    **_mixing(rows.rolled, names.along("dims"), aten.roll),
    **_carry(names.along("dims"), aten.flip),
    # convolutions: samples of the batch are independent, and tokens as far as the kernel reaches
    **_mixing(convolutions.convolved, names.conv, aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution),
    **_mixing(convolutions.convolved_back, names.conv, aten.conv_transpose1d, aten.conv_transpose2d),
    **_mixing(convolutions.convolved_back, names.conv, aten.conv_transpose3d),
    **_mixing(convolutions.pooled, names.pooled, aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d),
    **_mixing(convolutions.pooled, names.pooled, aten.max_pool1d, aten.max_pool2d, aten.max_pool3d),
    **_mixing(convolutions.enlarged, names.only_first_dim, aten.upsample_nearest1d, aten.upsample_nearest2d),
    **_mixing(convolutions.enlarged, names.only_first_dim, aten.upsample_nearest3d),
    **_carry(names.only_first_dim, aten.upsample_bilinear2d),
    # an operand lends dtype, device or shape and none of its values
    **_same(Like(0), aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty),
    **_same(Like(1), aten.type_as),
    aten.to.other: Like(1),
}


def rule_for(target: Any) -> Rule | None:
    """The rule of an op, None if it has none."""
    if target in RULES:
        return RULES[target]
    if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not target._schema.is_mutable:
        return POINTWISE
    return None
