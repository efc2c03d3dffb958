"""What the models of the zoo share: sizes, widths, and the inputs that many of them take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Size:
    """Lengths of one label, in tokens (latents are twice as high and wide where a patch is 2)."""

    batch: int
    frames: int
    h: int
    w: int
    text: int

    @property
    def hw(self) -> int:
        return self.h * self.w

    @property
    def fhw(self) -> int:
        return self.frames * self.hw


SIZES = {
    "even": Size(batch=1, frames=16, h=4, w=10, text=48),
    "odd": Size(batch=1, frames=3, h=5, w=7, text=13),
    "batch2": Size(batch=2, frames=3, h=5, w=11, text=7),
}

HEADS, HEAD_DIM = 24, 8  # 2, 3, 4 and 8 ranks can share the heads
HIDDEN = HEADS * HEAD_DIM  # 192
CIN, COUT, PATCH = 5, 7, 2  # latent channels in and out
PIN = CIN * PATCH**2  # 20: channels of models that take tokens patchified by the pipeline
TEXT, POOLED = 44, 36  # widths of the text and the pooled text embeddings
ROPE3 = (2, 2, 4)  # rotary axes; they sum to HEAD_DIM
ATTN = dict(num_attention_heads=HEADS, attention_head_dim=HEAD_DIM)


@dataclass(frozen=True)
class Entry:
    """One class: ``make(size) -> (config, inputs)``, where ``inputs(randn)`` gives the kwargs of one call."""

    cls: str
    blocks: int
    heads: int
    labels: tuple[str, ...]
    make: Callable[[Size], tuple[dict, Callable[..., dict]]]
    prepare: Callable[[torch.nn.Module], None] | None
    return_dict: bool = True  # whether its forward takes return_dict
    tolerance: float = 1e-5  # of the output's scale


MODELS: dict[str, Entry] = {}


def model(
    cls: str,
    blocks: int,
    heads: int = HEADS,
    labels: tuple[str, ...] = tuple(SIZES),
    prepare: Callable[[torch.nn.Module], None] | None = None,
    return_dict: bool = True,
    tolerance: float = 1e-5,
) -> Callable:
    """Register ``f(size) -> (config, inputs)`` under the function's name, less leading underscores.

    ``prepare(model)`` runs last in building it, for what a config cannot say.
    """

    def register(make: Callable) -> Callable:
        MODELS[make.__name__.lstrip("_")] = Entry(cls, blocks, heads, labels, make, prepare, return_dict, tolerance)
        return make

    return register


# Times and guidance are small, and exact in binary: sin(1000 t) is the better conditioned for it.


def time(s: Size, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.tensor([1 / 16, 3 / 16])[: s.batch]


def guidance(s: Size, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.tensor([1 / 4, 1 / 8])[: s.batch]


def mask(s: Size, length: int | None = None) -> torch.Tensor:
    """Keep-mask [batch, length], as a tokenizer gives it; element i has 1 + 3i padding tokens."""
    length = length or s.text
    return torch.stack([(torch.arange(length) < length - 1 - 3 * i).long() for i in range(s.batch)])


def optional(mask: torch.Tensor) -> torch.Tensor | None:
    """For models that also do without a mask: one at batch 2 only, so both ways are covered."""
    return mask if len(mask) > 1 else None


def ids(axes: int, *shape: int) -> torch.Tensor:
    """Position ids [prod(shape), axes] of a grid, in the last axes; leading ones are 0."""
    grid = torch.cartesian_prod(*map(torch.arange, shape)).reshape(math.prod(shape), -1)
    return torch.nn.functional.pad(grid, (axes - grid.shape[1], 0)).float()


def rope(randn: Callable, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [length, HEAD_DIM], at random angles."""
    angle = randn(length, HEAD_DIM // 2).repeat_interleave(2, dim=1)
    return angle.cos(), angle.sin()
