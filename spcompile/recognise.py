"""Attention calls other than ``scaled_dot_product_attention``, and how users name their own.

A recognised call is put in one canonical form before layouts are inferred: its operands are viewed as
[..., H, S, D], the call becomes `spcompile.ops.attention_call` on them, and the result is viewed back. The views
obey the ordinary rules, so no later stage knows of other shapes. What is computed stays the captured op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx
from torch._guards import tracing

from spcompile import ops
from spcompile.call import bind
from spcompile.capture import Captured
from spcompile.errors import SPConfigError

aten = torch.ops.aten
Shape = Literal["bhsd", "bshd", "varlen"]


@dataclass(frozen=True)
class AttentionCall:
    """Where an op keeps what: argument names of its schema, and how its tensors are shaped.

    ``shape``: ``"bhsd"`` [B, H, S, D], ``"bshd"`` [B, S, H, D], or ``"varlen"`` [B * S, H, D] with sequences of one
    length, given by ``lengths``: (offsets of the queries [B + 1], longest query, the same two for keys).
    ``result`` is the position of the output if the op returns several values; calls of which another value is
    used are not recognised. ``plain`` maps further arguments to the values under which the op is plain attention.
    """

    q: str = "q"
    k: str = "k"
    v: str = "v"
    shape: Shape = "bhsd"
    mask: str | None = None
    causal: str | None = None
    scale: str | None = None
    dropout: str | None = None
    result: int | None = None
    plain: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    lengths: tuple[str, str, str, str] | None = None


@dataclass(frozen=True)
class CapturedCall:
    """What a canonical call stands for: the op, its arguments by name, and the number of varlen sequences."""

    target: torch._ops.OpOverload
    arguments: Mapping[str, Any]
    adapter: AttentionCall
    sequences: int

    @property
    def name(self) -> str:
        return str(self.target)

    @property
    def fixed_lengths(self) -> bool:
        """Does it take these lengths only?"""
        return self.adapter.lengths is not None

    @property
    def only_captured(self) -> str | None:
        """Why no kernel may stand in for it."""
        return None

    def emit(
        self, emit: Callable[..., fx.Node], tensors: Mapping[str, Any], other: Callable[[fx.Node], fx.Node]
    ) -> fx.Node:
        """The op on other canonical ``tensors`` (q, k, v, mask); ``other`` maps its further arguments."""
        adapter = self.adapter
        new = {getattr(adapter, n): from_canonical(emit, tensors[n], adapter.shape) for n in ("q", "k", "v")}
        if adapter.mask is not None:
            new[adapter.mask] = tensors["mask"]
        arguments = {n: new[n] if n in new else fx.map_arg(value, other) for n, value in self.arguments.items()}
        by_name = {a.name for a in self.target._schema.arguments if a.kwarg_only}
        args = [value for n, value in arguments.items() if n not in by_name]
        out = emit(self.target, *args, **{n: value for n, value in arguments.items() if n in by_name})
        if adapter.result is not None:
            out = emit(operator.getitem, out, adapter.result)
        return to_canonical(emit, out, adapter.shape, self.sequences)


_FLASH = {
    "window_size_left": (-1, None),
    "window_size_right": (-1, None),
    "softcap": (0.0,),
    "alibi_slopes": (None,),
}
_FLASH_3 = {
    **dict.fromkeys(("qv", "q_descale", "k_descale", "v_descale"), (None,)),
    **{"attention_chunk": (0,), "softcap": (0.0,), "window_size_left": (-1,), "window_size_right": (-1,)},
}

CALLS: dict[str, AttentionCall] = {
    "flash_attn::_flash_attn_forward": AttentionCall(
        shape="bshd", causal="causal", scale="softmax_scale", dropout="dropout_p", result=0, plain=_FLASH
    ),
    "flash_attn::_flash_attn_varlen_forward": AttentionCall(
        shape="varlen", causal="causal", scale="softmax_scale", dropout="dropout_p", result=0,
        lengths=("cu_seqlens_q", "max_seqlen_q", "cu_seqlens_k", "max_seqlen_k"),
        plain={**_FLASH, "block_table": (None,), "leftpad_k": (None,), "seqused_k": (None,)},
    ),
    "flash_attn_3::fwd": AttentionCall(
        shape="bshd", causal="is_causal", scale="softmax_scale", result=0,
        plain={**_FLASH_3, **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "page_table", "seqused_q"), (None,))},
    ),
    "_diffusers_flash_attn_3::_flash_attn_forward": AttentionCall(
        shape="bshd", causal="causal", scale="softmax_scale", result=0, plain=_FLASH_3
    ),
}  # fmt: skip
"""Qualified op name -> how to read it."""


def register_attention(op: Any, adapter: AttentionCall) -> None:
    """Tell spcompile that a custom op is attention, so that it is distributed instead of run on gathered tensors.

    Args:
        op: an ``OpOverload`` or a ``torch.library.custom_op``.
        adapter: where its arguments are. The op must be functional, take any lengths and heads, and mean softmax
            attention: softmax(scale * q k^T + mask) v.
    Raises:
        SPConfigError: not an op, or an argument that its schema does not have.

    Example::

        call = spcompile.AttentionCall(q="query", k="key", v="value", shape="bshd")
        spcompile.register_attention(my_ops.attend, call)
    """
    overload = getattr(op, "_opoverload", op)
    if not isinstance(overload, torch._ops.OpOverload):
        raise SPConfigError("SP109", f"register_attention wants an OpOverload or a torch.library.custom_op, not {op!r}")
    names = [a.name for a in overload._schema.arguments]
    asked = [adapter.q, adapter.k, adapter.v, adapter.mask, adapter.causal, adapter.scale, adapter.dropout]
    unknown = [n for n in (*asked, *adapter.plain, *(adapter.lengths or ())) if n is not None and n not in names]
    if unknown:
        raise SPConfigError(
            "SP109", f"{overload} has no argument {', '.join(unknown)}; its arguments are {', '.join(names)}"
        )
    CALLS[overload._schema.name] = adapter


def adapter_of(node: fx.Node) -> AttentionCall | None:
    """How to read a call, if its op is a known attention op."""
    return CALLS.get(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else None


def canonicalise(captured: Captured) -> int:
    """Put every recognised call in canonical form. Returns how many there were."""
    count = 0
    for node in list(captured.graph.nodes):
        adapter = adapter_of(node)
        if adapter is not None and _is_plain(node, adapter):
            with tracing(None), captured.fake_mode:
                _Canonical(captured, node, adapter).replace()
            count += 1
    return count


def _is_plain(node: fx.Node, adapter: AttentionCall) -> bool:
    """Nothing but attention, and nothing but its output is used."""
    arguments = bind(node)
    plain = all(arguments.get(name) in allowed for name, allowed in adapter.plain.items())
    users = [u for u in node.users if u.users]
    output_only = adapter.result is None or all(u.args[1:] == (adapter.result,) for u in users)
    return plain and output_only and (adapter.lengths is None or _equal_lengths(arguments, adapter))


def _equal_lengths(arguments: Mapping[str, Any], adapter: AttentionCall) -> bool:
    """B sequences of at most n tokens that are B * n together are all n long."""
    assert adapter.lengths is not None
    queries, longest_query, keys, longest_key = adapter.lengths
    for tensor, offsets, longest in ((adapter.q, queries, longest_query), (adapter.k, keys, longest_key)):
        count = arguments[offsets].meta["val"].shape[0] - 1
        length = arguments[longest]
        if not isinstance(length, int) or arguments[tensor].meta["val"].shape[0] != count * length:
            return False
    return True


@dataclass
class _Canonical:
    captured: Captured
    node: fx.Node
    adapter: AttentionCall

    def emit(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        new = self.captured.graph.call_function(target, args)
        new.meta.update({k: v for k, v in self.node.meta.items() if k != "val"})
        new.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return new

    def replace(self) -> None:
        a, given = self.adapter, bind(self.node)
        with self.captured.graph.inserting_before(self.node):
            q, k, v = (to_canonical(self.emit, given[n], a.shape, self.sequences(given)) for n in (a.q, a.k, a.v))
            scale = given.get(a.scale) if a.scale else None
            call = self.emit(
                ops.attention_call._opoverload, q, k, v,
                given.get(a.mask) if a.mask else None,
                float(given.get(a.dropout) or 0.0) if a.dropout else 0.0,
                bool(given.get(a.causal)) if a.causal else False,
                float(scale) if scale is not None else q.meta["val"].shape[-1] ** -0.5,
            )  # fmt: skip
            assert isinstance(self.node.target, torch._ops.OpOverload)
            call.meta["captured_call"] = CapturedCall(self.node.target, given, a, self.sequences(given))
            out = from_canonical(self.emit, call, a.shape)
        for user in [self.node] if a.result is None else [u for u in self.node.users if u.args[1] == a.result]:
            user.replace_all_uses_with(out)
        for node in [*self.node.users, self.node]:
            self.captured.graph.erase_node(node)

    def sequences(self, given: Mapping[str, Any]) -> int:
        if self.adapter.lengths is None:
            return 1
        return int(given[self.adapter.lengths[0]].meta["val"].shape[0]) - 1


def to_canonical(emit: Callable[..., fx.Node], x: fx.Node, shape: Shape, sequences: int) -> fx.Node:
    """[..., H, S, D] from the op's own shape."""
    if shape == "bhsd":
        return x
    if shape == "varlen":
        total, heads, width = x.meta["val"].shape
        x = emit(aten.reshape.default, x, [sequences, total // sequences, heads, width])
    return emit(aten.permute.default, x, [0, 2, 1, 3])


def from_canonical(emit: Callable[..., fx.Node], x: fx.Node, shape: Shape) -> fx.Node:
    """The op's own shape from [..., H, S, D]."""
    if shape == "bhsd":
        return x
    x = emit(aten.permute.default, x, [0, 2, 1, 3])
    if shape == "varlen":
        batch, tokens, heads, width = x.meta["val"].shape
        x = emit(aten.reshape.default, x, [batch * tokens, heads, width])
    return x
