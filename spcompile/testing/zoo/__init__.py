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

from spcompile.testing.zoo import audio, core, images, others, pictures, video, worlds  # noqa: F401
from spcompile.testing.zoo.common import MODELS, SIZES, Entry

__all__ = ["CASES", "CORE", "SIZES", "Case", "case", "names"]


@dataclass(frozen=True)
class Case:
    """One model and one input."""

    name: str  # short model name, e.g. "flux"
    cls: str  # diffusers class name
    label: str  # "even", "odd" or "batch2"
    heads: int  # heads of the main self attention
    num_blocks: int  # transformer blocks in the main stack (HunyuanVideo's text refiner is apart)
    build: Callable[[], torch.nn.Module]  # the model: float32, CPU, eval mode
    inputs: Callable[[], dict]  # forward kwargs, return_dict=False among them where the class takes it
    tolerance: float  # largest difference to accept in float32, as a share of the output's scale


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


def _build(entry: Entry, config: dict) -> torch.nn.Module:
    import diffusers  # slow to import, so only on use

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(diffusers, entry.cls)(**config)
    _redraw(model, seed=0)
    if entry.prepare is not None:
        entry.prepare(model)
    return model.eval()


def _inputs(make: Callable, return_dict: bool) -> dict:
    return make(_randn(1)) | (dict(return_dict=False) if return_dict else {})


def _case(name: str, label: str) -> Case:
    entry = MODELS[name]
    config, make = entry.make(SIZES[label])
    build, inputs = partial(_build, entry, config), partial(_inputs, make, entry.return_dict)
    return Case(name, entry.cls, label, entry.heads, entry.blocks, build, inputs, entry.tolerance)


CASES: dict[str, list[Case]] = {name: [_case(name, label) for label in MODELS[name].labels] for name in MODELS}
"""All classes that diffusers exports, by short name."""

CORE = [name for name, entry in MODELS.items() if entry.make.__module__ == core.__name__]
"""The twelve that the default tests take at all labels."""


def names() -> list[str]:
    """Model names, in order."""
    return list(CASES)


def case(name: str, label: str) -> Case:
    """The case of one model at one label."""
    return next(c for c in CASES[name] if c.label == label)
