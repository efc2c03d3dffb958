"""Tiny random-weight diffusers transformers, with inputs, for exactness tests.

Each :class:`Case` is one diffusers class plus one input.  ``build()`` makes the model from config
kwargs alone (nothing is downloaded) and ``inputs()`` the kwargs of one forward call; both are
deterministic and leave the global RNG alone.  Every class comes at three sizes, its labels:

``even``    batch 1; frames, tokens per frame and text length are all divisible by 8
``odd``     batch 1; image (35), video (105) and text (13) lengths that no even world size divides
``batch2``  batch 2; uneven lengths again (55, 165, 7), with a text mask, whose true length differs
            per element, wherever the model takes one

A model that always needs a text mask gets one, with some padding, at the other two labels as well.

Sizes are chosen so that a tensor dimension tells what it is: batch, heads, head dim, hidden size,
channels, text widths and the sequence lengths are all different numbers.

diffusers starts AdaLN gates, output layers and the like at zero, which would hide most of a model
from a test, so ``build()`` redraws every parameter at a scale that keeps activations of order one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

__all__ = ["CASES", "Case", "case", "names"]


@dataclass(frozen=True)
class Case:
    """One model and one input."""

    name: str  # short model name, e.g. "flux"
    cls: str  # diffusers class name
    label: str  # "even", "odd" or "batch2"
    heads: int  # heads of the main self attention
    num_blocks: int  # transformer blocks in the main stack (HunyuanVideo's text refiner is apart)
    build: Callable[[], torch.nn.Module]  # the model: float32, CPU, eval mode
    inputs: Callable[[], dict]  # forward kwargs, return_dict=False among them


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

_MODELS: dict[str, tuple[str, int, Callable]] = {}  # name -> class, blocks, Size -> (config, inputs)


def _model(cls: str, blocks: int):
    """Register ``f(size) -> (config, inputs)``, where ``inputs(randn)`` gives the forward kwargs."""

    def register(f):
        _MODELS[f.__name__.lstrip("_")] = (cls, blocks, f)
        return f

    return register


# Times and guidance are small, and exact in binary: sin(1000 t) is the better conditioned for it.


def _time(s: Size, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.tensor([1 / 16, 3 / 16])[: s.batch]


def _guidance(s: Size, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.tensor([1 / 4, 1 / 8])[: s.batch]


def _mask(s: Size, length: int | None = None) -> torch.Tensor:
    """Keep-mask [batch, length], as a tokenizer gives it; element i has 1 + 3i padding tokens."""
    length = length or s.text
    return torch.stack([(torch.arange(length) < length - 1 - 3 * i).long() for i in range(s.batch)])


def _optional(mask: torch.Tensor) -> torch.Tensor | None:
    """For models that also do without a mask: one at batch 2 only, so both ways are covered."""
    return mask if len(mask) > 1 else None


def _ids(axes: int, *shape: int) -> torch.Tensor:
    """Position ids [prod(shape), axes] of a grid, in the last axes; leading ones are 0."""
    grid = torch.cartesian_prod(*map(torch.arange, shape)).reshape(math.prod(shape), -1)
    return torch.nn.functional.pad(grid, (axes - grid.shape[1], 0)).float()


def _rope(randn: Callable, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [length, HEAD_DIM], at random angles."""
    angle = randn(length, HEAD_DIM // 2).repeat_interleave(2, dim=1)
    return angle.cos(), angle.sin()


# --- the models --------------------------------------------------------------------------------


@_model("FluxTransformer2DModel", blocks=4)
def _flux(s: Size):
    config = dict(
        ATTN, in_channels=PIN, out_channels=4 * COUT, num_layers=2, num_single_layers=2, guidance_embeds=True,
        joint_attention_dim=TEXT, pooled_projection_dim=POOLED, axes_dims_rope=ROPE3,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        pooled_projections=randn(s.batch, POOLED),
        timestep=_time(s),
        guidance=_guidance(s),
        img_ids=_ids(3, s.h, s.w),
        txt_ids=torch.zeros(s.text, 3),
    )


@_model("Flux2Transformer2DModel", blocks=4)
def _flux2(s: Size):
    config = dict(
        ATTN, in_channels=PIN, out_channels=4 * COUT, num_layers=2, num_single_layers=2,
        joint_attention_dim=TEXT, axes_dims_rope=(2, 2, 2, 2),
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=_time(s),
        guidance=_guidance(s),
        # ids carry a batch dimension, as from the pipeline: (t, h, w, text position)
        img_ids=_ids(4, s.h, s.w, 1).expand(s.batch, -1, -1),
        txt_ids=_ids(4, s.text).expand(s.batch, -1, -1),
    )


@_model("WanTransformer3DModel", blocks=2)
def _wan(s: Size):
    config = dict(ATTN, in_channels=CIN, out_channels=COUT, text_dim=TEXT, ffn_dim=400, num_layers=2)
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=_time(s, 1000),
    )


@_model("QwenImageTransformer2DModel", blocks=2)
def _qwenimage(s: Size):
    config = dict(
        ATTN, in_channels=PIN, out_channels=COUT, num_layers=2, joint_attention_dim=TEXT, axes_dims_rope=ROPE3
    )
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.hw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_hidden_states_mask=_optional(_mask(s)),
        timestep=_time(s),
        img_shapes=[[(1, s.h, s.w)]] * s.batch,
    )


@_model("SD3Transformer2DModel", blocks=3)
def _sd3(s: Size):
    # one block with a second, image-only attention (SD3.5), one plain, and the text-discarding last
    config = dict(
        ATTN, sample_size=26, patch_size=PATCH, in_channels=CIN, out_channels=COUT, num_layers=3,
        joint_attention_dim=TEXT, caption_projection_dim=HIDDEN, pooled_projection_dim=POOLED,
        pos_embed_max_size=12, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        pooled_projections=randn(s.batch, POOLED),
        timestep=_time(s, 1000),
    )


@_model("PixArtTransformer2DModel", blocks=2)
def _pixart(s: Size):
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, sample_size=26, patch_size=PATCH,
        cross_attention_dim=HIDDEN, caption_channels=TEXT,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=_optional(_mask(s)),
        timestep=_time(s, 1000),
        added_cond_kwargs=dict(resolution=None, aspect_ratio=None),
    )


@_model("CogVideoXTransformer3DModel", blocks=2)
def _cogvideox(s: Size):
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, time_embed_dim=52, text_embed_dim=TEXT,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.frames, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=_time(s, 1000),
        image_rotary_emb=_rope(randn, s.fhw),
    )


@_model("HunyuanVideoTransformer3DModel", blocks=4)
def _hunyuanvideo(s: Size):
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, num_single_layers=2, num_refiner_layers=2,
        text_embed_dim=TEXT, pooled_projection_dim=POOLED, rope_axes_dim=ROPE3,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=_mask(s),
        pooled_projections=randn(s.batch, POOLED),
        timestep=_time(s, 1000),
        guidance=_guidance(s, 1000),
    )


@_model("LTXVideoTransformer3DModel", blocks=2)
def _ltx(s: Size):
    config = dict(
        ATTN, in_channels=PIN, out_channels=4 * COUT, num_layers=2, cross_attention_dim=HIDDEN, caption_channels=TEXT
    )
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, s.fhw, PIN),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=_mask(s),
        timestep=_time(s, 1000),
        num_frames=s.frames,
        height=s.h,
        width=s.w,
        rope_interpolation_scale=(1.25, 32, 32),  # frame 1/16 and row 1/64: exact in floating point
    )


@_model("AuraFlowTransformer2DModel", blocks=4)
def _auraflow(s: Size):
    config = dict(
        ATTN, sample_size=26, patch_size=PATCH, in_channels=CIN, out_channels=COUT, num_mmdit_layers=2,
        num_single_dit_layers=2, joint_attention_dim=TEXT, caption_projection_dim=HIDDEN, pos_embed_max_size=144,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        timestep=_time(s),
    )


@_model("HunyuanDiT2DModel", blocks=6)
def _hunyuandit(s: Size):
    t5 = 56  # width of the second text, twice as long as the first; its pooler needs a multiple of 8
    # six layers: the last two take skip connections from the first two
    config = dict(
        ATTN, in_channels=CIN, patch_size=PATCH, sample_size=26, hidden_size=HIDDEN, num_layers=6,
        cross_attention_dim=TEXT, cross_attention_dim_t5=t5, pooled_projection_dim=POOLED,
        text_len=s.text, text_len_t5=2 * s.text, learn_sigma=False,
    )  # fmt: skip
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_hidden_states_t5=randn(s.batch, 2 * s.text, t5),
        text_embedding_mask=_mask(s),
        text_embedding_mask_t5=_mask(s, 2 * s.text),
        timestep=_time(s, 1000),
        image_meta_size=torch.tensor([[96, 128, 96, 128, 0, 0]] * s.batch).float(),
        style=torch.zeros(s.batch, dtype=torch.long),
        image_rotary_emb=_rope(randn, s.hw),
    )


@_model("LatteTransformer3DModel", blocks=4)
def _latte(s: Size):
    config = dict(
        ATTN, in_channels=CIN, out_channels=COUT, num_layers=2, cross_attention_dim=HIDDEN, attention_bias=True,
        sample_size=26, patch_size=PATCH, activation_fn="gelu-approximate", num_embeds_ada_norm=1000,
        norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6, caption_channels=TEXT,
        video_length=s.frames,
    )  # fmt: skip
    # Unlike its docstring, the forward takes no keep-mask, only a bias with one row per frame.
    bias = ((1 - _mask(s).float()) * -10000.0).repeat_interleave(s.frames, dim=0).unsqueeze(1)
    return config, lambda randn: dict(
        hidden_states=randn(s.batch, CIN, s.frames, PATCH * s.h, PATCH * s.w),
        encoder_hidden_states=randn(s.batch, s.text, TEXT),
        encoder_attention_mask=bias if s.batch > 1 else None,
        timestep=_time(s, 1000),
    )


# --- building ----------------------------------------------------------------------------------


def _randn(seed: int) -> Callable:
    return partial(torch.randn, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _redraw(model: torch.nn.Module, seed: int) -> None:
    """Redraw every parameter at a scale that keeps activations of order one."""
    randn = _randn(seed)
    tokens = ("table", "tokens", "pos_embed", "positional_embedding", "padding")  # added to activations
    for name, p in model.named_parameters():
        noise = randn(p.shape)
        if p.ndim == 1:
            p.copy_(0.1 * noise + name.endswith("weight"))  # a 1-D weight is a norm's, about one
        elif name.endswith(tokens):
            p.copy_(0.5 * noise)
        else:
            # 1 / sqrt(fan in); attention averages values down, so these start larger
            gain = 4 if name.endswith(("to_v.weight", "add_v_proj.weight")) else 1
            p.copy_(gain * noise / math.sqrt(p[0].numel()))


def _build(cls: str, config: dict) -> torch.nn.Module:
    import diffusers  # slow to import, so only on use

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(diffusers, cls)(**config)
    _redraw(model, seed=0)
    return model.eval()


def _inputs(make: Callable) -> dict:
    return dict(make(_randn(1)), return_dict=False)


def _case(name: str, label: str) -> Case:
    cls, blocks, f = _MODELS[name]
    config, make = f(SIZES[label])
    return Case(name, cls, label, HEADS, blocks, partial(_build, cls, config), partial(_inputs, make))


CASES: dict[str, list[Case]] = {name: [_case(name, label) for label in SIZES] for name in _MODELS}


def names() -> list[str]:
    """Model names, in order."""
    return list(CASES)


def case(name: str, label: str) -> Case:
    """The case of one model at one label."""
    return next(c for c in CASES[name] if c.label == label)
