"""The rule table, one call at a time: a plan's local computation must give the shares of the global result.

Every rule is asked about every operand sharded along every dim, in several forms (two segments, outer and inner
factors, padding). Where it has a plan, the plan is carried out for all ranks with NaN in the padding; what the
ranks hold must join to the result on full tensors. `carries` lists the dims of operand 0 for which there must be
a plan. The tests of whole graphs are in test_infer.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from spcompile import ops
from spcompile.call import Call
from spcompile.infer import Inference
from spcompile.layout import REPLICATED, Layout, Origin, Segment, Sharded
from spcompile.ops import chunks
from spcompile.rewrite import _Emitter
from spcompile.rules import RULES, Plan, rule_for

aten = torch.ops.aten


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


X = x(4, 6, 8)
Z = torch.view_as_complex(x(4, 6, 8, 2))
W, BIAS = x(5, 8), x(5)
MASK = x(4, 6, 8) > 0
IMAGE, KERNEL = x(4, 6, 8, 8), x(5, 6, 3, 3)

# name -> (op, arguments, dims of operand 0 that must pass)
CALLS: dict[str, tuple[Any, tuple[Any, ...], set[int]]] = {
    # elementwise
    "add": (aten.add.Tensor, (X, X), {0, 1, 2}),
    "add, broadcast": (aten.add.Tensor, (X, x(6, 1)), {0, 1, 2}),
    "add, both broadcast": (aten.add.Tensor, (x(4, 1, 8), x(6, 8)), {0, 2}),
    "add a number": (aten.add.Tensor, (X, 2), {0, 1, 2}),
    "mul by a scalar tensor": (aten.mul.Tensor, (X, torch.tensor(2.0)), {0, 1, 2}),
    "gelu": (aten.gelu.default, (X,), {0, 1, 2}),
    "to": (aten.to.dtype, (X, torch.float64), {0, 1, 2}),
    "_to_copy": (aten._to_copy.default, (X,), {0, 1, 2}),
    "clone": (aten.clone.default, (X,), {0, 1, 2}),
    "detach": (aten.detach.default, (X,), {0, 1, 2}),
    "alias": (aten.alias.default, (X,), {0, 1, 2}),
    "contiguous": (aten.contiguous.default, (X.transpose(0, 1),), {0, 1, 2}),
    "lift_fresh_copy": (aten.lift_fresh_copy.default, (X,), {0, 1, 2}),
    "copy": (aten.copy.default, (X, x(6, 8)), {0, 1, 2}),
    "where": (aten.where.self, (MASK, X, x(8)), {0, 1, 2}),
    "where, numbers": (aten.where.ScalarOther, (MASK, X, 0.0), {0, 1, 2}),
    "masked_fill": (aten.masked_fill.Scalar, (X, x(6, 1) > 0, -1.0), {0, 1, 2}),
    "zeros_like": (aten.zeros_like.default, (X,), {0, 1, 2}),
    "ones_like": (aten.ones_like.default, (X,), {0, 1, 2}),
    "full_like": (aten.full_like.default, (X, 3.0), {0, 1, 2}),
    "dropout in eval": (aten.dropout.default, (X, 0.5, False), {0, 1, 2}),
    "feature_dropout in eval": (aten.feature_dropout.default, (X, 0.5, False), {0, 1, 2}),
    "alpha_dropout in eval": (aten.alpha_dropout.default, (X, 0.5, False), {0, 1, 2}),
    "fill": (aten.fill.Scalar, (X, 2.0), {0, 1, 2}),
    "conj": (aten._conj.default, (Z,), {0, 1, 2}),
    "conj, resolved": (aten.resolve_conj.default, (Z.conj(),), {0, 1, 2}),
    "conj, whole": (aten.conj.default, (Z,), {0, 1, 2}),
    "real": (aten.real.default, (Z,), {0, 1, 2}),
    "imag": (aten.imag.default, (Z,), {0, 1, 2}),
    "complex": (aten.complex.default, (X, X), {0, 1, 2}),
    "polar": (aten.polar.default, (X.abs(), X), {0, 1, 2}),
    "and": (aten.__and__.Tensor, (X > 0, X < 1), {0, 1, 2}),
    "or": (aten.__or__.Tensor, (X > 0, X < 1), {0, 1, 2}),
    "xor": (aten.__xor__.Tensor, (X > 0, X < 1), {0, 1, 2}),
    "lshift": (aten.__lshift__.Scalar, (X.long(), 1), {0, 1, 2}),
    "rshift": (aten.__rshift__.Scalar, (X.long(), 1), {0, 1, 2}),
    "rsub": (aten.rsub.Scalar, (X, 1), {0, 1, 2}),
    "float_power": (aten.float_power.Tensor_Scalar, (X.abs(), 0.5), {0, 1, 2}),
    # dims change places
    "permute": (aten.permute.default, (X, [2, 0, -2]), {0, 1, 2}),
    "transpose": (aten.transpose.int, (X, -1, 1), {0, 1, 2}),
    "swapaxes": (aten.swapaxes.default, (X, 0, 1), {0, 1, 2}),
    "swapdims": (aten.swapdims.default, (X, 0, 2), {0, 1, 2}),
    "t": (aten.t.default, (W,), {0, 1}),
    "t of a vector": (aten.t.default, (BIAS,), {0}),
    "T": (aten.numpy_T.default, (X,), {0, 1, 2}),
    "mT": (aten.mT.default, (X,), {0, 1, 2}),
    "adjoint": (aten.adjoint.default, (Z,), {0, 1, 2}),
    "movedim": (aten.movedim.intlist, (x(2, 3, 4, 6), [0, 1], [-1, 0]), {0, 1, 2, 3}),
    # dims are merged and split; (S C) and the like only where the token factor stays whole
    "view heads": (aten.view.default, (X, [4, 6, 2, 4]), {0, 1}),
    "view merged": (aten.view.default, (X, [24, 8]), {0, 1, 2}),
    "view flat": (aten.view.default, (X, [192]), {0, 1, 2}),
    "view across": (aten.view.default, (X, [8, 3, 8]), {2}),
    "view frames": (aten.view.default, (x(12, 8), [6, 2, 8]), {0, 1}),
    "flatten": (aten.flatten.using_ints, (X, 1, 2), {0, 1, 2}),
    "unflatten": (aten.unflatten.int, (X, 2, [2, -1]), {0, 1}),
    "reshape": (aten.reshape.default, (X.transpose(1, 2), [4, 48]), {0, 1, 2}),
    "_unsafe_view": (aten._unsafe_view.default, (X, [24, 8]), {0, 1, 2}),
    "view_as": (aten.view_as.default, (X, x(24, 8)), {0, 1, 2}),
    "reshape_as": (aten.reshape_as.default, (X, x(24, 8)), {0, 1, 2}),
    "squeeze": (aten.squeeze.dim, (x(4, 1, 8), 1), {0, 2}),
    "squeeze, all": (aten.squeeze.default, (x(4, 1, 8),), {0, 2}),
    "unsqueeze": (aten.unsqueeze.default, (X, -1), {0, 1, 2}),
    "view_as_real": (aten.view_as_real.default, (Z,), {0, 1, 2}),
    "view_as_complex": (aten.view_as_complex.default, (x(4, 6, 8, 2),), {0, 1, 2}),
    # dims are taken out, put in, repeated
    "cat": (aten.cat.default, ([X, x(4, 5, 8)], 1), {0, 1, 2}),
    "cat of equal lengths": (aten.cat.default, ([X, -X], 1), {0, 1, 2}),
    "cat, one twice": (aten.cat.default, ([X, X], -1), {0, 1, 2}),
    "cat of nothing": (aten.cat.default, ([x(0), X], 1), set()),
    "concat": (aten.concat.default, ([X, x(4, 6, 3)], 2), {0, 1, 2}),
    "stack": (aten.stack.default, ([X, X], -1), {0, 1, 2}),
    "slice": (aten.slice.Tensor, (X, 1, 2, 5), {0, 1, 2}),
    "slice from the end": (aten.slice.Tensor, (X, -1, -3, 1 << 62), {0, 1, 2}),
    "slice of nothing": (aten.slice.Tensor, (X, 1, 3, 3), {0, 2}),
    "slice with steps": (aten.slice.Tensor, (X, 1, 0, 6, 2), {0, 2}),
    "narrow": (aten.narrow.default, (X, 1, -4, 3), {0, 1, 2}),
    "split": (aten.split.Tensor, (X, 4, 1), {0, 1, 2}),
    "split_with_sizes": (aten.split_with_sizes.default, (X, [1, 0, 5], 1), {0, 1, 2}),
    "chunk": (aten.chunk.default, (X, 4, -1), {0, 1, 2}),
    "unsafe_split": (aten.unsafe_split.Tensor, (X, 3, 1), {0, 1, 2}),
    "unsafe_chunk": (aten.unsafe_chunk.default, (X, 2, 1), {0, 1, 2}),
    "tensor_split": (aten.tensor_split.sections, (X, 4, 1), {0, 1, 2}),
    "select": (aten.select.int, (X, -1, 3), {0, 1}),
    "unbind": (aten.unbind.int, (X, 1), {0, 2}),
    "select_scatter": (aten.select_scatter.default, (X, x(4, 8), 1, 2), {0, 2}),
    "slice_scatter": (aten.slice_scatter.default, (X, x(4, 3, 8), 1, 2, 5), {0, 1, 2}),
    "slice_scatter with steps": (aten.slice_scatter.default, (X, x(4, 3, 8), 1, 0, 6, 2), {0, 2}),
    "expand": (aten.expand.default, (x(4, 1, 8), [3, 4, 6, -1]), {0, 2}),
    "repeat": (aten.repeat.default, (X, [2, 1, 3, 1]), {0, 2}),
    "tile": (aten.tile.default, (X, [2, 1]), {0, 2}),
    "repeat_interleave": (aten.repeat_interleave.self_int, (X, 2, 2), {0, 1}),
    "repeat_interleave, flat": (aten.repeat_interleave.self_int, (X, 2), set()),
    "constant_pad_nd": (aten.constant_pad_nd.default, (X, [1, 0, 0, 0]), {0, 1, 2}),
    "pad": (aten.pad.default, (X, [0, 0, 2, 1]), {0, 1, 2}),
    "pad all sides": (aten.pad.default, (X, [1, 2, 0, 1, 2, 0], "constant", 3.0), {0, 1, 2}),
    "pad with less": (aten.pad.default, (X, [0, 0, -2, 1]), {0, 2}),
    "pad by reflection": (aten.pad.default, (X, [1, 2], "reflect"), {0, 1}),
    "pad around": (aten.pad.default, (X, [2, 1], "circular"), {0, 1}),
    "index_select": (aten.index_select.default, (X, 1, ints(6, 3)), {0, 2}),
    "gather": (aten.gather.default, (X, 2, ints(8, 4, 6, 3)), {0, 1}),
    "gather, short index": (aten.gather.default, (X, 2, ints(8, 4, 5, 3)), {0}),
    "index_select of few": (aten.index_select.default, (x(2, 9, 8), 1, ints(9, 3)), {0, 1, 2}),
    "gather of few": (aten.gather.default, (x(2, 9, 8), 1, ints(9, 2, 3, 8)), {0, 1, 2}),
    "scatter": (aten.scatter.src, (X, 2, ints(8, 4, 6, 3), x(4, 6, 3)), {0, 1, 2}),
    "scatter a number": (aten.scatter.value, (X, 2, ints(8, 4, 6, 3), 1.0), {0, 1, 2}),
    "scatter along fewer": (aten.scatter.src, (X, 2, ints(8, 4, 5, 3), x(4, 5, 3)), {0}),
    "scatter_add": (aten.scatter_add.default, (X, 1, ints(6, 4, 3, 8), x(4, 3, 8)), {0, 1, 2}),
    "index_add": (aten.index_add.default, (X, 1, ints(6, 4), x(4, 4, 8)), {0, 1, 2}),
    "index_copy": (aten.index_copy.default, (X, 1, torch.tensor([3, 5, 0]), x(4, 3, 8)), {0, 1, 2}),
    "index_put": (aten.index_put.default, (X, [None, ints(6, 5)], x(4, 5, 8), True), {1}),
    "index_put by two": (aten.index_put.default, (X, [ints(4, 5), ints(6, 5)], x(5, 8), True), set()),
    "one_hot": (aten.one_hot.default, (ints(5, 4, 6), 5), {0, 1}),
    # contractions
    "_int_mm": (aten._int_mm.default, (ints(9, 17, 32).to(torch.int8), ints(9, 32, 8).to(torch.int8)), {0}),
    "linear": (aten.linear.default, (X, W, BIAS), {0, 1}),
    "linear of a vector": (aten.linear.default, (x(8), W), set()),
    "matmul": (aten.matmul.default, (X, x(8, 5)), {0, 1}),
    "matmul, batches": (aten.matmul.default, (x(4, 1, 6, 8), x(3, 8, 5)), {0, 2}),
    "matmul, one batch": (aten.matmul.default, (x(1, 6, 8), x(4, 8, 5)), {1}),
    "matmul from a vector": (aten.matmul.default, (x(8), x(4, 8, 5)), set()),
    "matmul to a vector": (aten.matmul.default, (X, x(8)), {0, 1}),
    "mm": (aten.mm.default, (W, x(8, 3)), {0}),
    "bmm": (aten.bmm.default, (X, x(4, 8, 5)), {0, 1}),
    "mv": (aten.mv.default, (W, x(8)), {0}),
    "addmm": (aten.addmm.default, (BIAS, x(6, 8), x(8, 5)), set()),
    "addmm, row": (aten.addmm.default, (x(6, 1), x(6, 8), x(8, 5)), {0}),
    "baddbmm": (aten.baddbmm.default, (x(4, 6, 5), X, x(4, 8, 5)), {0, 1, 2}),
    "einsum": (aten.einsum.default, ("bsc, dc -> bds", [X, W]), {0, 1}),
    "einsum over tokens": (aten.einsum.default, ("bsc,bsd->bcd", [X, x(4, 6, 5)]), {0, 2}),
    "einsum, broadcast": (aten.einsum.default, ("bsc,bsd->bscd", [X, x(1, 6, 5)]), {0, 1, 2}),
    "einsum, ellipsis": (aten.einsum.default, ("...c,dc->...d", [X, W]), {0, 1}),
    "einsum, diagonal": (aten.einsum.default, ("bss->bs", [x(4, 6, 6)]), {0}),
    "einsum, implied result": (aten.einsum.default, ("ba", [W]), set()),
    "embedding": (aten.embedding.default, (W, ints(5, 4, 6)), set()),
    # ops that mix along some dims
    "layer_norm": (aten.layer_norm.default, (X, [8], x(8), x(8)), {0, 1}),
    "layer_norm, two dims": (aten.layer_norm.default, (X, [6, 8]), {0}),
    "native_layer_norm": (aten.native_layer_norm.default, (X, [8], None, None, 1e-5), {0, 1}),
    "rms_norm": (aten.rms_norm.default, (X, [8], x(8)), {0, 1}),
    "_fused_rms_norm": (aten._fused_rms_norm.default, (X, [8], x(8), 1e-5), {0, 1}),
    "group_norm": (aten.group_norm.default, (X, 3), {0}),
    "batch_norm": (aten.batch_norm.default, (X, None, None, x(6), x(6).abs(), False, 0.1, 1e-5, False), {0, 2}),
    "batch_norm, live": (aten.batch_norm.default, (X, x(6), x(6), None, None, True, 0.1, 1e-5, False), {0, 2}),
    "batch_norm, live, followed": (
        aten._native_batch_norm_legit_functional.default, (X, x(6), x(6), x(6), x(6).abs(), True, 0.3, 1e-5), {0, 2}
    ),
    "batch_norm, live, in place": (
        aten.batch_norm.default, (X, None, None, x(6), x(6).abs(), True, 0.1, 1e-5, False), set()
    ),
    "batch_norm, dead": (
        aten._native_batch_norm_legit_functional.default, (X, x(6), x(6), x(6), x(6).abs(), False, 0.3, 1e-5), {0, 2}
    ),
    "batch_norm, dead, as traced": (
        aten._native_batch_norm_legit_no_training.default, (X, x(6), x(6), x(6), x(6).abs(), 0.3, 1e-5), {0, 2}
    ),
    "batch_norm, live, as traced": (
        aten._native_batch_norm_legit.no_stats, (X, x(6), x(6), True, 0.3, 1e-5), {0, 2}
    ),
    "batch_norm of rows": (aten.batch_norm.default, (IMAGE, None, x(6), None, None, True, 0.1, 1e-5, False), {0, 2, 3}),
    "batch_norm as CUDA": (
        aten._batch_norm_with_update_functional.default, (X, x(6), x(6), x(6), x(6).abs(), 0.3, 1e-5), {0, 2}
    ),
    "native_batch_norm": (aten.native_batch_norm.default, (X, None, None, x(6), x(6).abs(), False, 0.1, 1e-5), {0, 2}),
    "softmax": (aten.softmax.int, (X, -1), {0, 1}),
    "_softmax": (aten._softmax.default, (X, 1, False), {0, 2}),
    "log_softmax": (aten.log_softmax.int, (X, 0), {1, 2}),
    "_log_softmax": (aten._log_softmax.default, (X, 2, False), {0, 1}),
    "cumsum": (aten.cumsum.default, (X, 1), {0, 2}),
    "cumprod": (aten.cumprod.default, (X, 1), {0, 2}),
    "logcumsumexp": (aten.logcumsumexp.default, (X, -1), {0, 1}),
    "sort": (aten.sort.default, (X, 1), {0, 2}),
    "argsort": (aten.argsort.default, (X,), {0, 1}),
    "topk": (aten.topk.default, (X, 2, 1), {0, 2}),
    "glu": (aten.glu.default, (X, 1), {0, 2}),
    "flip": (aten.flip.default, (X, [-1]), {0, 1}),
    "roll": (aten.roll.default, (X, [2], [1]), {0, 2}),
    "roll, flat": (aten.roll.default, (X, [2]), set()),
    "sum": (aten.sum.dim_IntList, (X, [1]), {0, 2}),
    "sum over no named dim": (aten.sum.dim_IntList, (X, []), set()),
    "sum, all": (aten.sum.default, (X,), set()),
    "mean": (aten.mean.dim, (X, [0, -1], True), {1}),
    "amax": (aten.amax.default, (X, [2]), {0, 1}),
    "amax, all": (aten.amax.default, (X,), set()),
    "amin": (aten.amin.default, (X, [1], True), {0, 2}),
    "prod": (aten.prod.dim_int, (X, 1), {0, 2}),
    "any": (aten.any.dim, (MASK, 1), {0, 2}),
    "all": (aten.all.dims, (MASK, [0, 1]), {2}),
    "logsumexp": (aten.logsumexp.default, (X, [1]), {0, 2}),
    "kthvalue": (aten.kthvalue.default, (X, 2, 1), {0, 2}),
    "argmax": (aten.argmax.default, (X, -1, True), {0, 1}),
    "argmax, all": (aten.argmax.default, (X,), set()),
    "argmin": (aten.argmin.default, (X, 0), {1, 2}),
    "std": (aten.std.correction, (X, [1]), {0, 2}),
    "var": (aten.var.dim, (X, [2], True, True), {0, 1}),
    "var_mean": (aten.var_mean.correction, (X, [-1]), {0, 1}),
    "std_mean": (aten.std_mean.dim, (X, [1]), {0, 2}),
    "norm": (aten.norm.ScalarOpt_dim, (X, 2, [2]), {0, 1}),
    "norm, all": (aten.norm.Scalar, (X, 2), set()),
    "linalg_vector_norm, all": (aten.linalg_vector_norm.default, (X,), set()),
    "linalg_vector_norm": (aten.linalg_vector_norm.default, (X, 2, [1], True), {0, 2}),
    "median": (aten.median.dim, (X, 1), {0, 2}),
    "max": (aten.max.dim, (X, 1), {0, 2}),
    "max, all": (aten.max.default, (X,), set()),
    "min": (aten.min.dim, (X, -1, True), {0, 1}),
    # tokens are mixed, on chunks
    "sum of many": (aten.sum.dim_IntList, (x(2, 9, 8), [1]), {0, 1, 2}),
    "sum in another dtype": (aten.sum.dim_IntList, (x(2, 9, 8), [1], True), {0, 1, 2}),
    "sum of ints": (aten.sum.dim_IntList, (ints(9, 2, 9, 8), [1]), {0, 1, 2}),
    "count": (aten.sum.default, (x(2, 9, 8) > 0,), {0, 1, 2}),
    "mean of many": (aten.mean.dim, (x(2, 9, 8), [1, 2]), {0, 1, 2}),
    "amax of many": (aten.amax.default, (x(2, 9, 8), [1]), {0, 1, 2}),
    "amin of ints": (aten.amin.default, (ints(9, 2, 9, 8), [1], True), {0, 1, 2}),
    "any of many": (aten.any.dim, (x(2, 9, 8) > 1, 1), {0, 1, 2}),
    "all of many": (aten.all.dims, (x(2, 9, 8) > -1, [1]), {0, 1, 2}),
    "logsumexp of many": (aten.logsumexp.default, (x(2, 9, 8), [1], True), {0, 1, 2}),
    "std of many": (aten.std.correction, (x(2, 9, 8), [1]), {0, 1, 2}),
    "var of many": (aten.var.correction, (x(2, 9, 8), [1, 2]), {0, 1, 2}),
    "var_mean of many": (aten.var_mean.correction, (x(2, 9, 8), [1]), {0, 1, 2}),
    "length of many": (aten.linalg_vector_norm.default, (x(2, 9, 8), 2, [1]), {0, 1, 2}),
    "softmax of many": (aten.softmax.int, (x(2, 9, 3), 1), {0, 1, 2}),
    "log_softmax of many": (aten.log_softmax.int, (x(2, 9, 3), 1), {0, 1, 2}),
    "cumsum of ints": (aten.cumsum.default, (ints(9, 2, 9, 3), 1), {0, 1, 2}),
    "matmul over many": (aten.matmul.default, (x(2, 3, 9), x(2, 9, 4)), {0, 1, 2}),
    "bmm over many": (aten.bmm.default, (x(2, 3, 9), x(2, 9, 4)), {0, 1, 2}),
    "einsum over many": (aten.einsum.default, ("bsc,bsd->bcd", [x(2, 9, 3), x(2, 9, 4)]), {0, 1, 2}),
    "linear over many": (aten.linear.default, (x(2, 3, 9), x(2, 9), x(2)), {0, 1, 2}),
    "mv over many": (aten.mv.default, (x(2, 9), x(9)), {0, 1}),
    "dot": (aten.dot.default, (x(9), x(9)), {0}),
    "group_norm of many": (aten.group_norm.default, (x(2, 6, 9), 3, x(6), x(6)), {0, 2}),
    "group_norm of rows": (aten.group_norm.default, (x(2, 6, 9, 4), 2), {0, 2, 3}),
    "instance_norm": (aten.instance_norm.default, (x(2, 6, 9), x(6), None, None, None, True, 0.1, 1e-5, False), {0, 2}),
    "roll back": (aten.roll.default, (X, [-2], [1]), {0, 1, 2}),
    "instance_norm, dead": (
        aten.instance_norm.default, (X, x(6), None, x(6), x(6).abs(), False, 0.1, 1e-5, False), {0, 2}
    ),
    "every other": (aten.slice.Tensor, (x(2, 12, 3), 1, 0, 100, 2), {0, 1, 2}),
    "every other, from the second": (aten.slice.Tensor, (x(2, 12, 3), 1, 1, 12, 2), {0, 1, 2}),
    "every third": (aten.slice.Tensor, (x(2, 18, 3), 1, 2, 18, 3), {0, 1, 2}),
    "every other, but for the end": (aten.slice.Tensor, (x(2, 12, 3), 1, 0, 9, 2), {0, 2}),
    "every other of an odd number": (aten.slice.Tensor, (x(2, 9, 3), 1, 0, 9, 2), {0, 2}),
    "roll far": (aten.roll.default, (X, [3], [1]), {0, 1, 2}),
    "roll of two dims": (aten.roll.default, (x(2, 8, 9), [1, 2], [1, 2]), {0, 1, 2}),
    "roll of two dims back": (aten.roll.default, (x(2, 12, 9), [-1, 4], [1, 2]), {0, 1, 2}),
    "roll of one dim twice": (aten.roll.default, (x(2, 8, 9), [1, 2], [1, -2]), {0, 1, 2}),
    "roll of everything": (aten.roll.default, (X, [1]), set()),
    "roll once around": (aten.roll.default, (X, [6], [1]), {0, 1, 2}),
    "select the last": (aten.select.int, (X, 1, -1), {0, 1, 2}),
    "index": (aten.index.Tensor, (X, [None, ints(6, 3)]), {0, 2}),
    "index, apart": (aten.index.Tensor, (X, [ints(4, 3), None, ints(8, 3)]), {1}),
    "index, matrix": (aten.index.Tensor, (X, [ints(4, 3, 2)]), {1, 2}),
    "index by truth": (aten.index.Tensor, (X, [x(4) > 0]), set()),
    "conv of rows": (aten.conv2d.default, (IMAGE, KERNEL, BIAS, [1, 1], [1, 1]), {0, 2, 3}),
    "conv of rows, dilated": (aten.conv2d.default, (IMAGE, KERNEL, BIAS, [1, 1], [2, 2], [2, 2]), {0, 2, 3}),
    "conv, depthwise": (aten.conv1d.default, (X, x(6, 1, 3), None, [1], [1], [1], 6), {0, 2}),
    "conv, one wide": (aten.conv1d.default, (X, x(5, 6, 1)), {0, 2}),
    "conv, wide and lopsided": (aten.conv1d.padding, (X, x(5, 6, 4), None, [1], "same"), {0}),
    "conv in patches": (aten.conv2d.default, (x(2, 3, 12, 12), x(5, 3, 2, 2), None, [2, 2]), {0, 2, 3}),
    "conv, strided": (aten.conv1d.default, (X, x(5, 6, 3), None, [2], [1]), {0, 2}),
    "conv, strided, wide": (aten.conv1d.default, (x(2, 6, 24), x(5, 6, 4), None, [2], [1]), {0, 2}),
    "conv, strided, narrow": (aten.conv1d.default, (x(2, 6, 24), x(5, 6, 1), None, [2]), {0, 2}),
    "conv, strided, far": (aten.conv1d.default, (x(2, 6, 24), x(5, 6, 3), None, [2], [2], [2]), {0, 2}),
    "conv, strided, more": (aten.conv1d.default, (x(2, 6, 24), x(5, 6, 2), None, [2], [1]), {0}),
    "conv back": (aten.conv_transpose1d.default, (X, x(6, 5, 2), None, [2]), {0, 2}),
    "conv back to rows": (aten.conv_transpose2d.input, (IMAGE, x(6, 5, 2, 2), BIAS, [2, 2]), {0, 2, 3}),
    "conv back, overlapping": (aten.conv_transpose3d.input, (x(2, 3, 4, 4, 4), x(3, 5, 3, 3, 3), None, [2]), {0}),
    # only samples of the batch are independent
    "conv1d": (aten.conv1d.default, (X, x(5, 6, 3)), {0}),
    "conv1d without batch": (aten.conv1d.default, (x(6, 8), x(5, 6, 3)), set()),
    "conv2d": (aten.conv2d.padding, (IMAGE, KERNEL, BIAS, [1, 1], "same"), {0, 2, 3}),
    "conv3d": (aten.conv3d.default, (x(4, 2, 3, 4, 4), x(5, 2, 1, 3, 3)), {0}),
    "convolution": (aten.convolution.default, (X, x(5, 6, 3), None, [1], [1], [1], False, [0], 1), {0}),
    "upsample_nearest1d": (aten.upsample_nearest1d.vec, (X, [16], None), {0, 2}),
    "upsample_nearest2d": (aten.upsample_nearest2d.vec, (IMAGE, None, [2.0, 4.0]), {0, 2, 3}),
    "upsample_nearest2d, size": (aten.upsample_nearest2d.vec, (IMAGE, [16, 32], None), {0, 2, 3}),
    "upsample_nearest2d, unlike": (aten.upsample_nearest2d.vec, (IMAGE, [15, 16], None), {0, 3}),
    "upsample_nearest2d, by three": (aten.upsample_nearest2d.vec, (IMAGE, None, [3.0, 3.0]), {0}),
    "upsample_nearest2d, about two": (aten.upsample_nearest2d.vec, (IMAGE, None, [2.0, 2.1]), {0, 2}),
    "upsample_nearest2d, by size and scale": (aten.upsample_nearest2d.default, (IMAGE, [16, 16], 2.0, None), {0, 2, 3}),
    "upsample_nearest2d, by size and others": (aten.upsample_nearest2d.default, (IMAGE, [16, 16], 2.1, 2.0), {0, 3}),
    "avg_pool2d, unlike": (aten.avg_pool2d.default, (x(3, 12, 12), [2, 4], [2, 2], [0, 1]), {0}),
    "avg_pool2d, once": (aten.avg_pool2d.default, (x(3, 12, 12), [2], [2]), {0, 2}),
    "avg_pool2d, up": (aten.avg_pool2d.default, (x(2, 3, 13, 12), [2, 2], [2, 2], [0, 0], True), {0, 1, 3}),
    "avg_pool1d": (aten.avg_pool1d.default, (X, [2]), {0, 1, 2}),
    "avg_pool2d": (aten.avg_pool2d.default, (x(2, 3, 12, 12), [2, 2]), {0, 1, 2, 3}),
    "avg_pool2d without batch": (aten.avg_pool2d.default, (x(3, 12, 12), [2, 2]), {0}),
    "avg_pool2d, overlapping": (aten.avg_pool2d.default, (x(2, 3, 12, 12), [3, 3], [2, 2], [1, 1]), {0, 1}),
    "avg_pool3d": (aten.avg_pool3d.default, (x(2, 3, 4, 4, 4), [2, 2, 2], [2, 2, 2]), {0, 1, 2, 3, 4}),
    "adaptive_avg_pool1d": (aten.adaptive_avg_pool1d.default, (x(2, 6, 9), [1]), {0, 1, 2}),
    "adaptive_avg_pool1d to two": (aten.adaptive_avg_pool1d.default, (x(2, 6, 9), [2]), {0, 1}),
    "adaptive_avg_pool2d": (aten.adaptive_avg_pool2d.default, (IMAGE, [1, 1]), {0, 1, 2, 3}),
    "adaptive_avg_pool2d of rows": (aten.adaptive_avg_pool2d.default, (IMAGE, [1, 2]), {0, 1}),
    "max_pool1d": (aten.max_pool1d.default, (X, [2]), {0, 1, 2}),
    "max_pool2d": (aten.max_pool2d.default, (x(2, 3, 12, 12), [2, 2]), {0, 1, 2, 3}),
    "max_pool3d": (aten.max_pool3d.default, (x(2, 3, 4, 4, 4), [2, 2, 2]), {0, 1, 2, 3, 4}),
    "upsample_bilinear2d": (aten.upsample_bilinear2d.vec, (IMAGE, None, False, [2.0, 2.0]), {0}),
    "upsample_nearest3d": (aten.upsample_nearest3d.vec, (x(4, 2, 3, 4, 4), None, [2.0, 2.0, 2.0]), {0, 2, 3, 4}),
    # an operand lends dtype, device or shape
    "new_zeros": (aten.new_zeros.default, (X, [3]), {0, 1, 2}),
    "new_ones": (aten.new_ones.default, (X, [3]), {0, 1, 2}),
    "new_full": (aten.new_full.default, (X, [3], 2.0), {0, 1, 2}),
    "type_as": (aten.type_as.default, (X, x(2, 2).double()), {0, 1, 2}),
    "to another's dtype": (aten.to.other, (X, x(2, 2).double()), {0, 1, 2}),
}  # fmt: skip

EMPTY = {aten.empty_like, aten.new_empty}  # their values mean nothing

every_call = pytest.mark.parametrize(("op", "args", "carries"), CALLS.values(), ids=CALLS.keys())
two_or_three_ranks = pytest.mark.parametrize("degree", [2, 3])
# how a call is asked about, and how a plan is carried out


def traced(op: Any, args: tuple[Any, ...], degree: int) -> Call:
    """The call as a node whose operands are placeholders; a tensor that is given twice is one operand twice."""
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}

    def operand(value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) not in nodes:
            nodes[id(value)] = graph.placeholder(f"x{len(nodes)}")
            nodes[id(value)].meta["val"] = value
        return nodes.get(id(value), value) if isinstance(value, Tensor) else value

    node = graph.call_function(op, pytree.tree_map(operand, args))
    node.meta["val"] = op(*args)
    return Call(node, degree, lambda key, tokens: segments("new", 0, tokens))


def segments(root: object, *borders: int, balanced: bool = False) -> tuple[Segment, ...]:
    """Runs of tokens between borders; ``balanced``: each in two halves, the second mirrored, for a causal ring."""
    found = []
    for start, end in pairwise(borders):
        whole = Segment(end - start, Origin(root, start))
        head, tail = whole.split(-(-whole.tokens // 2))
        found += [head, replace(tail, mirrored=True)] if balanced and tail.tokens else [whole]
    return tuple(found)


def layouts_along(dim: int, extent: int) -> Iterator[Sharded]:
    """Ways in which ``dim`` may be sharded."""
    if extent < 2:
        return
    yield Sharded(dim, segments("x", 0, extent))
    yield Sharded(dim, segments("x", 0, extent, balanced=True))
    if extent > 2:
        yield Sharded(dim, segments("x", 0, 2, extent))
    for factor in {n for n in (2, 3) if extent % n == 0 and extent > n}:
        yield Sharded(dim, segments("x", 0, extent // factor), outer=factor)
        yield Sharded(dim, segments("x", 0, extent // factor), inner=factor)


def planned(call: Call, operand: int, layout: Sharded) -> Plan | None:
    """The rule's plan with that operand sharded, and the cuts that the rule asks for made."""
    rule = rule_for(call.node.target)
    assert rule is not None
    balanced = any(s.mirrored for s in layout.segments)
    cuts: dict[object, set[int]] = {"x": set(layout.borders()), "new": set()}

    def new_root(key: object, tokens: int) -> tuple[Segment, ...]:
        return segments("new", *sorted({0, tokens, *cuts["new"]}), balanced=balanced)

    for _ in range(4):
        call = Call(call.node, call.degree, new_root)
        layout = replace(layout, segments=segments("x", *sorted(cuts["x"]), balanced=balanced))
        have = [layout if node is call.operands[operand] else REPLICATED for node in call.operands]
        plan = rule.forward(call, have)
        if plan is None or not plan.cuts:
            return plan
        for root, at in plan.cuts:
            cuts[root].add(at)
    raise AssertionError(f"{plan.cuts} are asked for again and again")


def share(value: Tensor, layout: Layout, rank: int, degree: int) -> Tensor:
    """What a rank holds; padding is NaN, which must never reach a real token."""
    if not isinstance(layout, Sharded):
        return value
    mine = chunks.take(value.resolve_conj(), layout.dim, layout.spec(), rank, degree)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        shape = [1] * value.dim()
        shape[layout.dim] = -1
        mine = mine.masked_fill(padding(layout, rank, degree).reshape(shape), torch.nan)
    return mine.conj_physical().conj() if value.is_conj() else mine


def padding(layout: Sharded, rank: int, degree: int) -> Tensor:
    """Which entries of the rank's dim are padding."""
    in_segments = [
        torch.arange(chunks.chunk_tokens(n, degree)) >= chunks.first_token(n, degree, 1, rank)[1]
        for n in layout.spec()[2:]
    ]
    return torch.cat(in_segments).repeat_interleave(layout.inner).repeat(layout.outer)


def carried_out(call: Call, plan: Plan) -> list[list[Tensor]]:
    """Every rank's results of the plan."""
    by_operand = dict(zip(call.operands, plan.operands, strict=True))
    if plan.build is not None:
        return built(call, plan, by_operand)

    def of_rank(rank: int) -> list[Tensor]:
        layouts = iter(plan.operands)

        def local(node: fx.Node) -> Tensor:
            layout = by_operand[node] if plan.target is not None else next(layouts)
            return share(node.meta["val"], layout, rank, call.degree)

        arguments = fx.map_arg(plan.arguments if plan.target is not None else call.arguments, local)
        target: Any = plan.target or call.node.target
        names = [a.name for a in target._schema.arguments]
        result = target(**{name: arguments[name] for name in names if name in arguments})
        return [r for r in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(r, Tensor)]

    return [of_rank(rank) for rank in range(call.degree)]


def built(call: Call, plan: Plan, by_operand: dict[fx.Node, Layout]) -> list[list[Tensor]]:
    """What the calls that a plan emits give, all ranks in lockstep."""
    emitter = _Emitter(None, {}, Inference(), call.degree, "ranks")  # type: ignore[arg-type]
    emitter.origin = call.node
    shares = {n: [share(n.meta["val"], by_operand[n], r, call.degree) for r in range(call.degree)] for n in by_operand}
    env: dict[fx.Node, list[Any]] = {}
    with FakeTensorMode() as fake:
        local = {}
        for node, tensors in shares.items():
            local[node] = emitter.graph.placeholder(node.name)
            local[node].meta["val"] = fake.from_tensor(tensors[0])
            env[local[node]] = tensors
        given = {name: fx.map_arg(value, lambda n: local[n]) for name, value in call.arguments.items()}
        results = plan.build(emitter, given)
    for node in emitter.graph.nodes:
        if node.op == "placeholder":
            continue
        per_rank = [fx.map_arg((node.args, node.kwargs), lambda n, r=r: env[n][r]) for r in range(call.degree)]
        if node.target in ops.PROGRAMS:
            programs = [ops.PROGRAMS[node.target](r, *args[:-1]) for r, (args, _) in enumerate(per_rank)]
            env[node] = ops.wire.in_lockstep(programs, node.args[-2])
        else:
            env[node] = [node.target(*args, **kwargs) for args, kwargs in per_rank]
    nodes = results if isinstance(results, list) else [results]
    return [[env[n][r] for n in nodes] for r in range(call.degree)]


def assert_right(call: Call, plan: Plan) -> None:
    """The ranks' results have the promised local shapes and join to the global ones."""
    value = call.node.meta["val"]
    expected = [v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, Tensor)]
    ranks = carried_out(call, plan)
    for i, (layout, whole) in enumerate(zip(plan.outputs, expected, strict=True)):
        parts = [results[i] for results in ranks]
        for part in parts:
            assert list(part.shape) == layout.local_shape(whole.shape, call.degree), layout
        if isinstance(layout, Sharded):
            parts = [
                chunks.join(torch.stack([p.resolve_conj() for p in parts]), layout.dim, layout.spec(), call.degree)
            ]
        for part in parts:
            torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-6, check_stride=False)


# the tests


@every_call
@two_or_three_ranks
def test_a_plan_on_chunks_gives_the_shares_of_the_whole_result(op, args, carries, degree):
    call = traced(op, args, degree)
    for operand in range(len(call.operands)):
        for dim, extent in enumerate(call.shape(operand)):
            for layout in layouts_along(dim, extent):
                plan = planned(call, operand, layout)
                if plan is not None:
                    assert_right(call, plan)


@every_call
def test_these_dims_are_carried(op, args, carries):
    call = traced(op, args, degree=2)
    for dim in carries:
        plan = planned(call, 0, next(layouts_along(dim, call.shape(0)[dim])))
        assert plan is not None, f"dim {dim}"
        assert any(isinstance(layout, Sharded) for layout in plan.operands), f"dim {dim}"


@every_call
def test_walking_back_from_a_result_finds_dims_that_the_plan_carries(op, args, carries):
    """If a result's dim is said to come from an operand's dim, then that operand sharded so has a plan for it."""
    call = traced(op, args, degree=2)
    rule = rule_for(op)
    for output, shape in enumerate(call.outputs):
        for dim, extent in enumerate(shape):
            if extent < 2:
                continue
            for operand, layout in rule.backward(call, output, Sharded(dim, (Segment(extent),))):
                assert layout.extent == call.shape(operand)[layout.dim]
                plan = planned(call, operand, layout)
                if plan is not None and isinstance(plan.outputs[output], Sharded):
                    assert plan.outputs[output].dim == dim


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.instance_norm.default, (X, None, None, x(6), x(6).abs(), True, 0.1, 1e-5, False)),
        (aten.batch_norm.default, (X, None, None, x(6), x(6).abs(), True, 0.1, 1e-5, False)),
        (aten.native_batch_norm.default, (X, None, None, x(6), x(6).abs(), True, 0.1, 1e-5)),
    ],
    ids=["instance_norm", "batch_norm", "native_batch_norm"],
)
def test_running_statistics_that_an_op_writes_in_place_are_of_all_its_input(op, args):
    call = traced(op, args, degree=2)
    for dim, extent in enumerate(X.shape):
        assert all(planned(call, 0, layout) is None for layout in layouts_along(dim, extent))


def test_every_op_of_the_table_has_an_example():
    tensor_ops = {op.overloadpacket for op in RULES if any("Tensor" in str(r.type) for r in op._schema.returns)}
    missing = tensor_ops - EMPTY - {op.overloadpacket for op, _, _ in CALLS.values()}
    assert not missing, sorted(map(str, missing))


@pytest.mark.parametrize("op", [aten.nonzero.default, operator.getitem, aten.add_.Tensor])
def test_an_op_outside_the_table_has_no_rule(op):
    assert rule_for(op) is None


def test_the_check_notices_a_wrong_plan():
    call = traced(aten.cumprod.default, (X, 1), 2)
    along_tokens = Sharded(1, (Segment(6),))
    with pytest.raises(AssertionError):
        assert_right(call, Plan((along_tokens,), (along_tokens,)))
