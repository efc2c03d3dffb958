"""Attention kernels: what each can do, declared, and one way to call them.

Shapes: B batch, H query heads, G key/value heads, S queries, T keys, D / E head dims. Every kernel takes
q [B, H, S, D], k [B, G, T, D], v [B, G, T, E] and a mask [B or 1, H or 1, S or 1, T], and returns the output
[B, H, S, E] and, if it can, the log-sum-exp of the scaled and masked scores: float32 (float64 for float64),
[B, H, S], natural logarithm. Nobody lists kernel names at call sites: what a kernel may be used for follows from
its declaration.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
Attended = tuple[Tensor, Tensor | None]
HALF = frozenset({torch.float16, torch.bfloat16})
FLOATS = HALF | {torch.float32, torch.float64}


@runtime_checkable
class AttentionKernel(Protocol):
    """What spcompile asks of a kernel. `Kernel` implements it; any object with these members will do.

    ``masks`` may hold ``"bool"`` and ``"additive"``; ``causal`` means aligned squares (S = T); ``gqa`` that G < H
    needs no expansion; ``any_value_dim`` that E may differ from D; ``varlen`` packed sequences;
    ``output_buffer`` that it can write into a given tensor; ``capturable`` in a CUDA graph; ``keys_multiple`` is
    what the number of keys must divide by where the call is not causal.
    """

    name: str
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    head_dims: Container[int]
    masks: frozenset[str]
    causal: bool
    gqa: bool
    any_value_dim: bool
    returns_lse: bool
    varlen: bool
    output_buffer: bool
    capturable: bool
    keys_multiple: int

    def missing(self) -> str | None:
        """Why the kernel cannot run here (a package that is not installed), or None."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool
    ) -> Attended:
        """Attention; the second result is None unless ``lse`` is asked for and can be given."""


@dataclass
class Kernel:
    """A declaration and a function. ``package`` (and its ``major`` version) must be installed.

    ``lse_of_bias``: its log-sum-exp also serves rows that an additive mask puts at a number of large magnitude.
    """

    name: str
    run: Callable[..., Attended]
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    head_dims: Container[int] = range(1, 1 << 30)
    masks: frozenset[str] = frozenset()
    causal: bool = True
    gqa: bool = False
    any_value_dim: bool = False
    returns_lse: bool = True
    lse_of_bias: bool = False
    varlen: bool = False
    output_buffer: bool = False
    capturable: bool = True
    keys_multiple: int = 1
    package: str | None = None
    major: str = ""

    def missing(self) -> str | None:
        """Why the kernel cannot run here, or None."""
        if self.package is None:
            return None
        if not _installed(self.package):
            return f"package {self.package} is not installed"
        if self.major and not (found := version(self.package)).startswith(f"{self.major}."):
            return f"package {self.package} {self.major} is not installed, {found} is"
        return None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool
    ) -> Attended:
        """Attention."""
        return self.run(q, k, v, mask, causal, scale, lse)


def _installed(package: str) -> bool:
    parent, _, _ = package.rpartition(".")
    return (not parent or _installed(parent)) and importlib.util.find_spec(package) is not None


# ---- helpers -----------------------------------------------------------------------------------------------


def expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, G, ...] -> [B, H, ...]: each key/value head once per query head that attends to it."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1)


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A bool mask as 0 and -inf."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which log-sum-exps and merged outputs are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_keys(mask: Tensor | None) -> Tensor | None:
    """Rows that a mask leaves no key, [..., S]: kernels disagree on their log-sum-exp, which must be -inf."""
    if mask is None:
        return None
    return ~mask.any(-1) if mask.dtype == torch.bool else (mask == -math.inf).all(-1)


# ---- kernels -----------------------------------------------------------------------------------------------


def _math(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool,
    shift: Tensor | None = None,
) -> Attended:  # fmt: skip
    """Plain torch, in float32 or wider: the reference with a log-sum-exp, less ``shift``.

    A row whose scores are all near a number of large magnitude (masked by -1e9, say) would lose the size of its sum in
    that number; ``shift`` takes it off.
    """
    high = wide(q.dtype)
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    scores = q.to(high) @ k.to(high).transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        extra = additive(mask, high)
        assert extra is not None
        scores = scores + extra
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top == -math.inf, 0)).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights @ v.to(high)) / total.masked_fill(total == 0, 1)
    norm = (top.squeeze(-1) if shift is None else top.squeeze(-1) - shift.to(high)) + total.squeeze(-1).log()
    return out.to(q.dtype), norm


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool) -> Attended:
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped), None


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool) -> Attended:
    mask = additive(mask, q.dtype)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _cuda_flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool
) -> Attended:
    out, norm, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, norm[..., : q.shape[2]]


def _cuda_efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool
) -> Attended:
    bias = additive(mask, q.dtype)
    if bias is not None:  # rows must start at multiples of 16 bytes
        keys = k.shape[2]
        bias = F.pad(bias.expand(*bias.shape[:-1], keys), (0, -keys % 16))[..., :keys]
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], keys)
    out, norm, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, norm[..., : q.shape[2]]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool) -> Attended:
    bias = additive(mask, q.dtype)
    out, norm, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, False, scale=scale)
    return out, norm.reshape(q.shape[:-1])


def _flash_2(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool) -> Attended:
    from flash_attn import flash_attn_func

    out, norm, _ = flash_attn_func(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        softmax_scale=scale, causal=causal, return_attn_probs=True,
    )  # fmt: skip
    return out.transpose(1, 2), norm[..., : q.shape[2]]


def _flash_3(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool) -> Attended:
    from flash_attn_interface import flash_attn_func

    out, norm, *_ = flash_attn_func(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        softmax_scale=scale, causal=causal, return_attn_probs=True,
    )  # fmt: skip
    return out.transpose(1, 2), norm[..., : q.shape[2]]


def _flash_4(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool) -> Attended:
    from flash_attn.cute import flash_attn_func

    out, norm = flash_attn_func(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), softmax_scale=scale, causal=causal, return_lse=True
    )
    return out.transpose(1, 2), norm[..., : q.shape[2]]


def _sage_1(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool) -> Attended:
    """SageAttention 1.0.6 by its parts: its own entry subtracts K's mean from the caller's tensor.

    Its kernel works on 64 keys at a time and, unless causal, counts what the last 64 lack as keys with score 0.
    """
    from sageattention import core

    k = k - k.mean(2, keepdim=True)
    quantise, attend_all, attend_causal = (
        (core.per_block_int8_hd96, core.attn_h96_false, core.attn_h96_true)
        if q.shape[-1] == 96
        else (core.per_block_int8, core.attn_false, core.attn_true)
    )
    q8, q_scale, k8, k_scale = quantise(q.contiguous(), k, sm_scale=scale, tensor_layout="HND")
    run = attend_causal if causal else attend_all
    v = v.to(torch.float16).contiguous()
    return run(q8, k8, v, q_scale, k_scale, tensor_layout="HND", output_dtype=q.dtype), None


def _sage_2(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool) -> Attended:
    """SageAttention 2: its log-sum-exp is natural and already corrected for the mean it takes off K."""
    from sageattention import sageattn

    out, norm = sageattn(q, k.clone(), v, tensor_layout="HND", is_causal=causal, sm_scale=scale, return_lse=True)
    return out, norm[..., : q.shape[2]]


CPU, CUDA = frozenset({"cpu"}), frozenset({"cuda"})
TRITON = CPU | CUDA if os.environ.get("TRITON_INTERPRET") == "1" else CUDA
ANY_MASK = frozenset({"bool", "additive"})

KERNELS: dict[str, AttentionKernel] = {
    k.name: k
    for k in (
        Kernel("sdpa", _sdpa, CPU | CUDA, FLOATS, masks=ANY_MASK, gqa=True, any_value_dim=True, returns_lse=False),
        Kernel("cpu_flash", _cpu_flash, CPU, FLOATS, masks=ANY_MASK),
        Kernel("cuda_flash", _cuda_flash, CUDA, HALF, range(8, 257, 8)),
        Kernel("cudnn", _cudnn, CUDA, HALF, range(8, 129, 8), masks=ANY_MASK),
        Kernel("cuda_efficient", _cuda_efficient, CUDA, HALF | {torch.float32}, range(8, 1 << 16, 8), masks=ANY_MASK),
        Kernel("math", _math, CPU | CUDA, FLOATS, masks=ANY_MASK, gqa=True, any_value_dim=True, lse_of_bias=True),
        Kernel("flash_attn_2", _flash_2, CUDA, HALF, range(8, 257, 8), gqa=True, varlen=True, package="flash_attn"),
        Kernel(
            "flash_attn_3",
            _flash_3,
            CUDA,
            HALF,
            range(8, 257, 8),
            gqa=True,
            varlen=True,
            package="flash_attn_interface",
        ),
        Kernel(
            "flash_attn_4", _flash_4, CUDA, HALF, range(8, 129, 8), gqa=True, varlen=True, package="flash_attn.cute"
        ),
        Kernel(
            "sage_1",
            _sage_1,
            TRITON,
            HALF | {torch.float32},
            (64, 96, 128),
            gqa=True,
            returns_lse=False,
            keys_multiple=64,
            package="sageattention",
            major="1",
        ),
        Kernel("sage_2", _sage_2, CUDA, HALF, range(8, 129, 8), gqa=True, package="sageattention", major="2"),
    )
}
"""Kernels by name, in the order in which ``kernel="auto"`` considers them where it needs a log-sum-exp."""


AUTOMATIC = ("sdpa", "cpu_flash", "cuda_flash", "cudnn", "cuda_efficient", "math")
"""What ``kernel="auto"`` may use: kernels that compute what ``scaled_dot_product_attention`` computes."""


def attend(
    name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool,
    shift: Tensor | None = None,
) -> Attended:  # fmt: skip
    """Call a kernel on any number of leading dims.

    Key/value heads are expanded for kernels without GQA. A row without a valid key has log-sum-exp -inf. ``shift``,
    broadcast to [..., H, S, 1], is taken off the log-sum-exp; for the kernel ``math`` only.
    """
    kernel = KERNELS[name]
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q4, k4, v4 = (x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    if not kernel.gqa:
        k4, v4 = expand_heads(k4, q4.shape[1]), expand_heads(v4, q4.shape[1])
    # kernels called below SDPA read the last dim as dense, and nobody checks
    q4, k4, v4 = (x if x.stride(-1) == 1 else x.contiguous() for x in (q4, k4, v4))
    mask4 = None if mask is None else _four_dims(mask, batch)
    if shift is None:
        out, norm = kernel(q4, k4, v4, mask4, causal, scale, lse)
    else:
        assert name == "math"
        out, norm = _math(q4, k4, v4, mask4, causal, scale, lse, _four_dims(shift, batch).squeeze(-1))
    out = out.reshape(*batch, *out.shape[1:])
    if not lse or norm is None:
        return out, None
    empty = without_keys(mask4)
    norm = norm.to(wide(q.dtype)) if empty is None else norm.to(wide(q.dtype)).masked_fill(empty, -math.inf)
    return out, norm.reshape(*batch, *norm.shape[1:])


def _four_dims(mask: Tensor, batch: Sequence[int]) -> Tensor:
    """A mask that is broadcast to [*batch, H, S, T] as [B or 1, H or 1, S or 1, T]."""
    padded = mask.reshape((1,) * (len(batch) + 3 - mask.dim()) + tuple(mask.shape))
    lead = batch if any(n != 1 for n in padded.shape[:-3]) else padded.shape[:-3]
    flat = padded.expand(*lead, *padded.shape[-3:]).reshape(-1, *padded.shape[-3:])
    return flat
