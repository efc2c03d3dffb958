"""Attention that a model computes by hand: softmax(scale * q k^T + mask) v, spelled as matmul, bmm, baddbmm or einsum.

Found by its softmax: back from there through scaling, masking, casts and views to the product with the keys, on from
there to the product with the values. Such a call becomes one `spcompile.ops.attention_call`, so that it is a site like
any other; what ranks compute is the same formula on their own tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch._guards import tracing

from spcompile import ops
from spcompile.call import bind, tensor_of
from spcompile.capture import Captured

aten = torch.ops.aten

_SOFTMAX = {aten.softmax.int, aten._softmax.default}
_CASTS = {aten._to_copy.default, aten.to.dtype, aten.type_as.default}
_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unflatten.int,
    aten.flatten.using_ints,
}
_COPIES = {aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default}
_PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default, aten.mm.default}


@dataclass(frozen=True)
class HandwrittenCall:
    """What a rank computes: ``fill`` replaces masked scores (None: the mask is added), ``dtype`` is the softmax's."""

    scale: float
    dtype: torch.dtype
    fill: float | None
    masked: bool

    @property
    def name(self) -> str:
        return "handwritten"

    @property
    def fixed_lengths(self) -> bool:
        """Does it take these lengths only?"""
        return False

    @property
    def only_captured(self) -> str | None:
        """Why no kernel may stand in for the formula."""
        if not self.masked:
            return None
        return (
            "the model's own attention with a mask gives rows without keys what kernels do not (NaN, or equal weights)"
        )

    def emit(
        self, emit: Callable[..., fx.Node], tensors: Mapping[str, Any], other: Callable[[fx.Node], fx.Node]
    ) -> fx.Node:
        """The formula on other q, k, v and mask."""
        q, k, v, mask = (tensors[n] for n in ("q", "k", "v", "mask"))
        dtype = q.meta["val"].dtype
        scores = emit(aten.matmul.default, q, emit(aten.transpose.int, k, -2, -1))
        if self.scale != 1:
            scores = emit(aten.mul.Tensor, scores, self.scale)
        if dtype != self.dtype:
            scores = emit(aten._to_copy.default, scores, dtype=self.dtype)
        if mask is not None and self.fill is None:
            scores = emit(aten.add.Tensor, scores, mask)
        elif mask is not None:
            scores = emit(aten.where.ScalarOther, mask, scores, self.fill)
        weights = emit(aten.softmax.int, scores, -1)
        if weights.meta["val"].dtype != dtype:
            weights = emit(aten._to_copy.default, weights, dtype=dtype)
        out = emit(aten.matmul.default, weights, v)
        out.meta["handwritten"] = True
        return out


@dataclass(frozen=True)
class _View:
    """A node with its dims in another order."""

    node: fx.Node
    order: tuple[int, ...]

    @property
    def lead(self) -> tuple[int, ...]:
        """All dims but the last two."""
        return tuple(_shape(self.node)[d] for d in self.order[:-2])


@dataclass(frozen=True)
class _Mask:
    """``node`` is added to the scores; or scores become ``fill``, where it is true (``keep``: where it is not).

    ``scale`` is what masked scores are multiplied by afterwards.
    """

    node: fx.Node
    scale: float
    fill: float | None = None
    keep: bool = True

    @property
    def adds(self) -> bool:
        """Is it the same as adding something?"""
        return self.fill is None or (self.fill == -math.inf and self.scale > 0)

    @property
    def filled(self) -> float | None:
        return None if self.fill is None else self.fill * self.scale


@dataclass
class _Found:
    """One attention: q [..., S, D], k [..., T, D], v [..., T, E], and how scores become weights.

    ``last`` is the product with the values, whose dims are those of [..., S, E] in the order ``out``. ``lead`` are
    the leading dims of the scores where the mask meets them, which may be grouped otherwise elsewhere
    (``regrouped``). ``casts`` are the dtypes that scores and weights go through.
    """

    last: fx.Node
    v: _View
    out: tuple[int, ...] | None = None
    scale: float = 1.0
    factors: list[tuple[Any, fx.Node]] = field(default_factory=list)
    dtype: torch.dtype | None = None
    masks: list[_Mask] = field(default_factory=list)
    lead: tuple[int, ...] = ()
    casts: set[torch.dtype] = field(default_factory=set)
    regrouped: bool = False
    q: _View = field(init=False)
    k: _View = field(init=False)

    def fits(self, view: _View) -> bool:
        """Has it the leading dims of the scores, grouped alike or otherwise, or shared by several heads?"""
        return math.prod(view.lead) == math.prod(self.lead) or self.shares(view)

    def shares(self, view: _View) -> bool:
        pairs = zip(view.lead, self.lead, strict=False)
        alike = len(view.lead) == len(self.lead) and not self.regrouped
        return alike and all(a in (b, 1) for a, b in pairs) and view.lead != self.lead

    def masked(self, node: fx.Node, mask: _Mask) -> bool:
        """Note a mask that meets the scores at ``node``, before those noted already."""
        lead = _shape(node)[:-2]
        if not isinstance(mask.node, fx.Node) or len(_shape(mask.node)) > len(_shape(node)):
            return False
        if self.masks and (lead != self.lead or not all(m.adds for m in (mask, *self.masks))):
            return False
        self.masks.insert(0, mask)
        self.lead = lead
        return True


def canonicalise_handwritten(captured: Captured) -> int:
    """Put every hand-written attention in canonical form. Returns how many there were."""
    count = 0
    for node in list(captured.graph.nodes):
        if node.target is aten.dropout.default and not node.users and not (node.args[1] and node.args[2]):
            captured.graph.erase_node(node)  # left behind by tracing: it would count as another user
    for node in list(captured.graph.nodes):
        if node.target in _SOFTMAX:
            _without_largest(node)
            found = _match(node)
            if found is not None:
                with tracing(None), captured.fake_mode:
                    _replace(captured.graph, node, found)
                count += 1
    return count


def _without_largest(softmax: fx.Node) -> None:
    """softmax(s - max(s)) is softmax(s), which subtracts it itself; in less than 32 bits the rounding would differ."""
    difference: Any = softmax.args[0]
    value = tensor_of(difference)
    if difference.target is not aten.sub.Tensor or difference.kwargs or value is None or value.dtype.itemsize < 4:
        return
    scores, largest = difference.args
    while isinstance(largest, fx.Node) and largest.target in _COPIES:
        largest = largest.args[0]
    if isinstance(largest, fx.Node) and largest.target is operator.getitem and largest.args[1] == 0:
        largest = largest.args[0]
    if not isinstance(largest, fx.Node) or largest.target not in (aten.amax.default, aten.max.dim):
        return
    operand, dims, keeps, *_ = (*largest.args, False, False)
    last = {-1, value.dim() - 1}
    if operand is scores and keeps is True and (dims in last or (isinstance(dims, list) and {*dims} <= last)):
        softmax.update_arg(0, scores)
        softmax.graph.eliminate_dead_code(lambda n: n.is_impure() or "_assert_" in str(n.target))


def _match(softmax: fx.Node) -> _Found | None:
    """The attention around a softmax over its last dim, if that is what it is."""
    value = tensor_of(softmax.args[0])
    if value is None or value.dim() < 2 or softmax.args[1] not in (-1, value.dim() - 1):
        return None
    found = _with_values(softmax)
    if found is None or not _with_keys(softmax, found):
        return None
    dtypes = {tensor_of(n).dtype for n in (found.q.node, found.k.node, found.v.node, found.last)}  # type: ignore[union-attr]
    fit = all(found.fits(view) for view in (found.q, found.k, found.v))
    (dtype, *others) = dtypes
    assert found.dtype is not None
    wide_enough = torch.promote_types(dtype, found.dtype) == found.dtype and found.casts <= {dtype, found.dtype}
    return found if not others and fit and wide_enough else None


def _shape(node: Any) -> tuple[int, ...]:
    value = tensor_of(node)
    return tuple(value.shape) if value is not None else ()


def _keeps_rows(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Are only leading dims regrouped?"""
    return len(before) >= 2 and len(after) >= 2 and before[-2:] == after[-2:]


# ---- from the weights to the product with the values


def _with_values(softmax: fx.Node) -> _Found | None:
    node, flipped = softmax, False
    casts: set[torch.dtype] = set()
    regrouped = False
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target in _PRODUCTS:
            by_letters = user.target is aten.einsum.default and not flipped
            found = _values_by_letters(node, user) if by_letters else _values(node, user, flipped)
            if found is not None:
                found.dtype = tensor_of(softmax).dtype  # type: ignore[union-attr]
                found.lead = _shape(softmax)[:-2]
                found.casts, found.regrouped = casts, regrouped
            return found
        if _flips(user):
            flipped = not flipped
        elif not _passes(user, node):
            return None
        casts |= {tensor_of(user).dtype} if user.target in _CASTS else set()  # type: ignore[union-attr]
        regrouped |= user.target in _VIEWS
        node = user
    return None


def _flips(node: fx.Node) -> bool:
    """Do the last two dims change places?"""
    rank = len(_shape(node))
    if node.target is aten.permute.default:
        dims: Any = node.args[1]
        return [d % rank for d in dims] == [*range(rank - 2), rank - 1, rank - 2]
    if node.target is aten.transpose.int:
        return {d % rank for d in node.args[1:]} == {rank - 1, rank - 2}  # type: ignore[operator]
    return node.target is aten.mT.default


def _passes(user: fx.Node, node: fx.Node) -> bool:
    """Does ``user`` leave the values of ``node`` as they are?"""
    if user.target is aten.dropout.default:
        return not (user.args[1] and user.args[2])
    views = user.target in _VIEWS and _keeps_rows(_shape(node), _shape(user))
    return user.args[:1] == (node,) and (user.target in _CASTS | _COPIES or views)


def _values(weights: fx.Node, product: fx.Node, flipped: bool) -> _Found | None:
    """weights @ v, or v^T @ weights^T."""
    if product.target in (aten.baddbmm.default, aten.einsum.default):
        return None
    a, b = product.args[:2][:: -1 if flipped else 1]
    rank = len(_shape(b))
    if a is not weights or b is weights or not _broadcasts(b, _shape(product)) or not _same_lead(a, product):
        return None
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    straight = tuple(range(rank))
    return _Found(product, v=_View(b, swapped if flipped else straight), out=swapped if flipped else None)  # type: ignore[arg-type]


def _values_by_letters(weights: fx.Node, product: fx.Node) -> _Found | None:
    terms = _terms(product)
    if terms is None or product.args[1][0] is not weights:  # type: ignore[index]
        return None
    left, right, out = terms
    lead, rows, keys = left[:-2], left[-2], left[-1]
    width = set(right) - set(left)
    if len(width) != 1 or set(right) != {*lead, keys, *width} or set(out) != {*lead, rows, *width}:
        return None
    natural, order = (*lead, rows, *width), (*lead, keys, *width)
    v = _View(cast(Any, product.args)[1][1], tuple(right.index(c) for c in order))
    return _Found(product, v=v, out=tuple(natural.index(c) for c in out))


def _terms(product: fx.Node) -> tuple[str, str, str] | None:
    """Letters of an einsum of two different tensors, each letter once per tensor."""
    given = bind(product)
    left, arrow, out = given["equation"].replace(" ", "").partition("->")
    if not arrow or "." in left + out or left.count(",") != 1 or len(set(given["tensors"])) != 2:
        return None
    terms = (*left.split(","), out)
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, given["tensors"], strict=False):
        for letter, size in zip(term, _shape(operand), strict=False):
            if sizes.setdefault(letter, size) != size:  # one is broadcast
                return None
    return terms if all(len(set(t)) == len(t) for t in terms) else None


# ---- from the scores back to the product with the keys


def _with_keys(softmax: fx.Node, found: _Found) -> bool:
    node: Any = softmax.args[0]
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.target in _PRODUCTS:
            return _keys_by_letters(node, found) if node.target is aten.einsum.default else _keys(node, found)
        behind = _step(node, found)
        if behind is None:
            return False
        node = behind
    return False


def _step(node: fx.Node, found: _Found) -> Any:
    """What one op does to the scores, noted in ``found``; the scores before it, or None."""
    target, args = node.target, cast(Any, node.args)
    if target in _CASTS | _COPIES:
        found.casts |= {tensor_of(node).dtype} if target in _CASTS else set()  # type: ignore[union-attr]
        return args[0]
    if target in _VIEWS and _keeps_rows(_shape(args[0]), _shape(node)):
        if not found.masks and not found.factors:
            found.lead = _shape(args[0])[:-2]
        found.regrouped = True
        return args[0]
    if target in (aten.mul.Tensor, aten.div.Tensor):
        return _scaled(node, found)
    if found.factors:  # by head: they come before the mask
        return None
    if target is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
        scores, mask = args if _leads_to_product(args[0]) else args[::-1]
        added = tensor_of(mask)
        fits = added is not None and added.dtype.is_floating_point and _shape(scores) == _shape(node)
        return scores if fits and found.masked(node, _Mask(mask, found.scale)) else None
    if target is aten.masked_fill.Scalar and _shape(args[0]) == _shape(node):
        mask = _Mask(args[1], found.scale, float(args[2]), keep=False)
        return args[0] if found.masked(node, mask) else None
    if target is aten.where.ScalarOther and _shape(args[1]) == _shape(node):
        mask = _Mask(args[0], found.scale, float(args[2]), keep=True)
        return args[1] if found.masked(node, mask) else None
    return None


def _leads_to_product(node: Any) -> bool:
    """Is this side of a sum the scores?"""
    while isinstance(node, fx.Node):
        if node.target in _PRODUCTS:
            return len(node.users) == 1
        passes = node.target in _CASTS | _COPIES | _VIEWS | {aten.mul.Tensor, aten.div.Tensor}
        node = node.args[0] if passes else None
    return False


def _scaled(node: fx.Node, found: _Found) -> Any:
    """A factor of all scores of a head: a number, or a tensor with nothing in the last two dims."""
    a, b = cast(Any, node.args)[:2]
    if node.target is aten.mul.Tensor and _shape(a) != _shape(node):
        a, b = b, a
    if isinstance(b, (int, float)):
        found.scale = found.scale * b if node.target is aten.mul.Tensor else found.scale / b
        return a
    factor = tensor_of(b)
    lead = _shape(node)[:-2]
    scores = tensor_of(a)
    if factor is None or scores is None or factor.dtype != scores.dtype or scores.shape != tensor_of(node).shape:  # type: ignore[union-attr]
        return None
    if any(n != 1 for n in factor.shape[-2:]) or (found.masks and lead != found.lead):
        return None
    found.factors.append((node.target, b))
    found.lead = lead
    return a


def _keys(product: fx.Node, found: _Found) -> bool:
    given = bind(product)
    if product.target is aten.baddbmm.default:
        bias = _Mask(given["self"], found.scale * given["beta"])
        if given["beta"] != 0 and (found.factors or not found.masked(product, bias)):
            return False
        q, k = given["batch1"], given["batch2"]
        found.scale *= given["alpha"]
    else:
        q, k = product.args[:2]
    rank = len(_shape(q))
    if not all(_broadcasts(x, _shape(product)) for x in (q, k)) or not (
        _same_lead(q, product) or _same_lead(k, product)
    ):
        return False
    found.q, found.k = _View(q, tuple(range(rank))), _View(k, (*range(rank - 2), rank - 1, rank - 2))
    return rank >= 2


def _same_lead(x: Any, product: fx.Node) -> bool:
    return _shape(x)[:-2] == _shape(product)[:-2]


def _broadcasts(x: Any, shape: tuple[int, ...]) -> bool:
    """Has it the leading dims of ``shape``, or 1 in their place?"""
    return len(_shape(x)) == len(shape) and all(a in (1, b) for a, b in zip(_shape(x)[:-2], shape[:-2], strict=True))


def _keys_by_letters(product: fx.Node, found: _Found) -> bool:
    terms = _terms(product)
    if terms is None:
        return False
    left, right, out = terms
    q, k = cast(Any, product.args)[1]
    lead, rows, keys = out[:-2], out[-2], out[-1]
    if rows in right:
        left, right, q, k = right, left, k, q
    width = (set(left) & set(right)) - set(out)
    if len(width) != 1 or set(left) != {*lead, rows, *width} or set(right) != {*lead, keys, *width}:
        return False
    found.q = _View(q, tuple(left.index(c) for c in (*lead, rows, *width)))
    found.k = _View(k, tuple(right.index(c) for c in (*lead, keys, *width)))
    return True


# ---- in place of it


def _replace(graph: fx.Graph, softmax: fx.Node, found: _Found) -> None:
    last = found.last

    def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        new.meta.update({k: v for k, v in softmax.meta.items() if k != "val"})
        new.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return new

    def shaped(x: fx.Node, shape: Sequence[int]) -> fx.Node:
        return x if _shape(x) == tuple(shape) else emit(aten.reshape.default, x, list(shape))

    def ordered(x: fx.Node, order: tuple[int, ...] | None) -> fx.Node:
        return x if order is None or order == tuple(range(len(order))) else emit(aten.permute.default, x, list(order))

    def canonical(view: _View) -> fx.Node:
        x = ordered(view.node, view.order)
        if found.shares(view):
            x = emit(aten.expand.default, x, [*found.lead, *_shape(x)[-2:]])
        return shaped(x, (*(found.lead or (1,)), *_shape(x)[-2:]))  # one head at least

    def combined(masks: list[_Mask]) -> fx.Node | None:
        """One mask: true where scores are kept, or what is added to them."""
        if len(masks) == 1 and masks[0].fill is not None:
            node = two_dims(masks[0].node)
            return node if masks[0].keep else emit(aten.logical_not.default, node)
        total: fx.Node | None = None
        for m in masks:
            if m.fill is not None:
                zero = emit(aten.zeros_like.default, m.node, dtype=found.dtype)
                kept = m.node if m.keep else emit(aten.logical_not.default, m.node)
                added = emit(aten.where.ScalarOther, kept, zero, -math.inf)
            else:
                added = m.node if m.scale == 1 else emit(aten.mul.Tensor, m.node, m.scale)
            total = two_dims(added) if total is None else emit(aten.add.Tensor, total, added)
        return total

    def two_dims(x: fx.Node) -> fx.Node:
        return shaped(x, (1,) * (2 - len(_shape(x))) + _shape(x))

    with graph.inserting_before(last):
        q, k, v = canonical(found.q), canonical(found.k), canonical(found.v)
        for op, factor in found.factors:
            q = emit(op, q, factor)
        mask = combined(found.masks)
        fill = found.masks[0].filled if len(found.masks) == 1 else None
        call = emit(ops.attention_call._opoverload, q, k, v, mask, 0.0, False, float(found.scale))
        call.meta["captured_call"] = HandwrittenCall(float(found.scale), found.dtype, fill, mask is not None)  # type: ignore[arg-type]
        want = _shape(last)
        natural = want if found.out is None else [want[found.out.index(i)] for i in range(len(want))]
        out = ordered(shaped(call, natural), found.out)
    last.replace_all_uses_with(out)
    _erase(graph, last)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase the steps of the formula that nobody uses any more."""
    steps = _PRODUCTS | _SOFTMAX | _CASTS | _COPIES | _VIEWS
    steps |= {aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.masked_fill.Scalar, aten.where.ScalarOther}
    pending = [node]
    while pending:
        node = pending.pop()
        if not node.users and node.target in steps | {aten.dropout.default, aten.transpose.int, aten.permute.default}:
            pending += node.all_input_nodes
            graph.erase_node(node)
