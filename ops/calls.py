"""One form for every attention call that a graph may hold, whatever op it was."""

from __future__ import annotations

import torch
from torch import Tensor

from spcompile.ops.kernels import attend


@torch.library.custom_op("spcompile::attention_call", mutates_args=())
def attention_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float
) -> Tensor:
    """A recognised attention call on canonical operands. It stands in captured graphs only.

    Args:
        q: [..., H, S, D]; k: [..., G, T, D]; v: [..., G, T, E].
        mask: None, bool or additive, broadcast to [..., H, S, T].
        dropout: probability; only 0 can be computed.
        causal: query i sees keys 0 to i.
        scale: factor of the scores.
    Returns:
        [..., H, S, E], contiguous.
    Raises:
        ValueError: dropout that is not 0.
    """
    if dropout:
        raise ValueError(f"dropout={dropout}: only the captured op can draw it")
    out, _ = attend("math", q, k, v, mask, causal, scale, False)
    return out.contiguous()


@attention_call.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float) -> Tensor:
    return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
