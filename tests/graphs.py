"""Random models like diffusion transformers, each compared with its own eager run; failures are made small.

A `Program` is plain data: sizes, degrees and steps. Its steps write the source of an ``nn.Module``, which is run,
and printed where a program fails.

    python tests/graphs.py --count 200 --seed 0
    python tests/graphs.py --count 1 --seed 17 --show

Shapes: B batch, S tokens, T keys, C = H * D channels, grid frames x height x width.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import linecache
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

import spcompile
from spcompile.testing import simulate

Step = dict[str, Any]
Rng = random.Random


@dataclass(frozen=True)
class Program:
    seed: int
    batch: int
    heads: int
    head_dim: int
    dtype: str
    degrees: dict[str, int]
    steps: list[Step]

    @property
    def ranks(self) -> int:
        return math.prod(self.degrees.values())


class Inapplicable(Exception):
    """A step cannot follow the steps before it."""


def require(condition: object) -> None:
    if not condition:
        raise Inapplicable


# ---- source ------------------------------------------------------------------------------------------------


class Code:
    """The module that a program describes, as text, and what is known of its streams after the steps so far."""

    def __init__(self, program: Program) -> None:
        self.B, self.H, self.D, self.C = (
            program.batch, program.heads, program.head_dim, program.heads * program.head_dim
        )  # fmt: skip
        self.init: list[str] = []
        self.body: list[str] = []
        self.inputs: dict[str, str] = {}
        self.tokens: dict[str, int] = {}
        self.grid: dict[str, tuple[int, int, int]] = {}
        self.saved: dict[str, int] = {}
        self.known: dict[str, str] = {}
        self.ordered = False  # order of values decides: not in bfloat16, where ties are common
        self.returned: str | None = None
        self.count = 0
        for step in program.steps:
            OPS[step["op"]].emit(self, **{k: v for k, v in step.items() if k != "op"})
            require(all(1 <= n <= 96 for n in self.tokens.values()) and self.tokens)

    def __call__(self, *lines: str) -> None:
        require(self.returned is None)
        self.body += lines

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def let(self, stem: str, expression: str) -> str:
        name = self.fresh(stem)
        self(f"{name} = {expression}")
        return name

    def module(self, expression: str) -> str:
        name = f"self.m{len(self.init)}"
        self.init.append(f"{name} = {expression}")
        return name

    def linear(self, inside: int | None = None, out: int | None = None) -> str:
        return self.module(f"nn.Linear({inside or self.C}, {out or self.C})")

    def param(self, *shape: int, scale: float = 0.3) -> str:
        return self.module(f"nn.Parameter({scale} * torch.randn({', '.join(map(str, shape))}))")

    def given(self, stem: str, expression: str) -> str:
        name = self.fresh(stem)
        self.inputs[name] = expression
        return name

    def randn(self, stem: str, *shape: int) -> str:
        return self.given(stem, f"torch.randn({', '.join(map(str, shape))})")

    def once(self, key: str, make: Callable[[], str]) -> str:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def size(self, x: str) -> int:
        require(x in self.tokens)
        return self.tokens[x]

    def cells(self, x: str) -> tuple[int, int, int]:
        require(x in self.grid and math.prod(self.grid[x]) == self.size(x))
        return self.grid[x]

    def resize(self, x: str, tokens: int, grid: tuple[int, int, int] | None = None) -> None:
        self.tokens[x] = tokens
        self.grid.pop(x, None)
        if grid is not None:
            self.grid[x] = grid

    def cond(self) -> str:
        """A conditioning vector [B, C] of a timestep."""

        def make() -> str:
            t, half = self.given("t", f"torch.rand({self.B})"), self.C // 2
            a = self.let("a", f"{t}[:, None] * torch.arange(1, {half + 1}, device={t}.device)")
            return self.let("c", f"F.silu({self.linear(2 * half)}(torch.cat([{a}.sin(), {a}.cos()], -1)))")

        return self.once("cond", make)

    def source(self) -> str:
        body = [*self.body, f"return {self.returned or '(' + ', '.join(self.tokens) + ',)'}"]
        indent = "\n        "
        return (
            "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()"
            + "".join(indent + line for line in self.init)
            + f"\n\n    def forward(self, {', '.join(self.inputs)}):"
            + "".join(indent + line for line in body)
            + "\n"
        )


HEADER = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"


def script(program: Program) -> str:
    """The program as a file that can be run: it prints each rank's largest error."""
    code = Code(program)
    options = ", ".join(f"{k}={v}" for k, v in program.degrees.items())
    cast = "" if program.dtype == "float32" else f".to(torch.{program.dtype})"
    inputs = "".join(f"    {expression},  # {name}\n" for name, expression in code.inputs.items())
    lines = [
        "torch.manual_seed(0)",
        f"model = Model(){cast}.requires_grad_(False)",
        f"inputs = [\n{inputs}]",
        *([f"inputs = [x{cast} if x.is_floating_point() else x for x in inputs]"] if cast else []),
        "want = torch.utils._pytree.tree_leaves(model(*copy.deepcopy(inputs)))",
        f"for out in simulate(model, inputs, {options}).outputs:",
        "    for a, b in zip(torch.utils._pytree.tree_leaves(out), want):",
        "        print(a.shape, b.shape, (a.double() - b.double()).abs().max().item() if a.shape == b.shape else None)",
    ]
    header = "import copy\n\n" + HEADER.replace("nn\n\n\n", "nn\n\nfrom spcompile.testing import simulate\n\n\n")
    helpers = [f for f in PRELUDE.split("\n\n\n") if f and f[4 : f.index("(")] in code.source()]
    return header + "\n\n\n".join([*helpers, code.source()]) + "\n\n" + "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Op:
    emit: Callable[..., None]
    draw: Callable[[Rng, Code], Step]
    weight: float


OPS: dict[str, Op] = {}


def op(weight: float, draw: Callable[[Rng, Code], Step]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a step: ``draw`` picks its parameters, the function writes its lines."""

    def register(emit: Callable[..., None]) -> Callable[..., None]:
        OPS[emit.__name__] = Op(emit, draw, weight)
        return emit

    return register


def one(r: Rng, w: Code) -> Step:
    return {"x": r.choice(list(w.tokens))}


def two(r: Rng, w: Code) -> Step:
    require(len(w.tokens) > 1)
    x, y = r.sample(list(w.tokens), 2)
    return {"x": x, "y": y}


def kinds(*values: Any, base: Callable[[Rng, Code], Step] = one, **others: Any) -> Callable[[Rng, Code], Step]:
    """Draws ``kind`` from ``values``, and every other parameter from its own."""
    return lambda r, w: {**base(r, w), "kind": r.choice(values), **{k: r.choice(v) for k, v in others.items()}}


# ---- streams and positions ---------------------------------------------------------------------------------


def draw_stream(r: Rng, w: Code) -> Step:
    """``w`` has no steps yet, or a first stream."""
    name = next(n for n in ("image", "text", "audio") if n not in w.tokens)
    if name == "image" or r.random() < 0.2:
        if r.random() < 0.55:
            frames = r.choice([1, 1, 1, 2, 3, 4, 5])
            size = [frames, r.randint(1, 6), r.choice([2, 2, 3, 4, 5, 6, 7])]
            while math.prod(size) > 48:
                size[0], size[1] = max(1, size[0] - 1), max(1, size[1] - 1)
            flat = ["conv2d", "unfold"] if frames == 1 else ["conv3d", "conv3d", "frames"]
            return {"name": name, "kind": r.choice([*flat, "linear"]), "size": size}
        length = r.choice([r.randint(2, 40), 2 * r.randint(1, 14) + 1, w.C, w.H, w.B, 8, 16])
        return {"name": name, "kind": r.choice(["linear", "transposed", "conv1d", "ids"]), "size": [max(2, length)]}
    length = r.choice([r.randint(1, 12), 2 * r.randint(0, 8) + 1, w.H, w.B, w.D, *w.tokens.values()])
    return {"name": name, "kind": r.choice(["linear", "ids", "latents", "conv1d", "transposed"]), "size": [length]}


@op(0, draw_stream)
def stream(w: Code, name: str, kind: str, size: list[int]) -> None:
    B, C, n = w.B, w.C, math.prod(size)
    require(name not in w.tokens)
    if kind == "linear":
        w(f"{name} = {w.linear(5)}({w.randn(name, B, n, 5)})")
    elif kind == "ids":
        ids = w.given("ids", f"torch.randint(0, 11, ({B}, {n}))")
        w(f"{name} = {w.module(f'nn.Embedding(11, {C})')}({ids})")
    elif kind == "transposed":
        w(f"{name} = {w.linear(5)}({w.randn(name, n, B, 5)}).transpose(0, 1)")
    elif kind == "latents":
        w(f"{name} = {w.param(1, n, C, scale=1)}.expand({B}, -1, -1)")
    elif kind == "conv1d":
        conv = w.module(f"nn.Conv1d(3, {C}, 3, padding=1)")
        w(f"{name} = {conv}({w.randn('wave', B, 3, n)}).transpose(1, 2)")
    else:
        require(len(size) == 3)
        f, h, v = size
        if kind == "conv2d":
            require(f == 1)
            conv = w.module(f"nn.Conv2d(3, {C}, 2, stride=2)")
            w(f"{name} = {conv}({w.randn('pixels', B, 3, 2 * h, 2 * v)}).flatten(2).transpose(1, 2)")
        elif kind == "conv3d":
            conv = w.module(f"nn.Conv3d(3, {C}, (1, 2, 2), stride=(1, 2, 2))")
            w(f"{name} = {conv}({w.randn('pixels', B, 3, f, 2 * h, 2 * v)}).flatten(2).transpose(1, 2)")
        elif kind == "frames":  # video as a batch of images
            conv = w.module(f"nn.Conv2d(3, {C}, 2, stride=2)")
            pixels = w.randn("pixels", B, f, 3, 2 * h, 2 * v)
            w(f"{name} = {conv}({pixels}.flatten(0, 1)).flatten(2).transpose(1, 2).reshape({B}, {n}, {C})")
        else:
            require(kind == "unfold" and f == 1)
            pixels = w.randn("pixels", B, 3, 2 * h, 2 * v)
            w(f"{name} = {pixels}.reshape({B}, 3, {h}, 2, {v}, 2).permute(0, 2, 4, 1, 3, 5).reshape({B}, {n}, 12)")
            w(f"{name} = {w.linear(12)}({name})")
    w.resize(name, n, tuple(size) if len(size) == 3 else None)  # type: ignore[arg-type]


@op(1, kinds("batch", "plain", "slice", "sincos", "grid", "lookup", "resized"))
def position(w: Code, x: str, kind: str) -> None:
    S, C = w.size(x), w.C
    if kind == "batch":
        w(f"{x} = {x} + {w.param(1, S, C)}")
    elif kind == "plain":
        w(f"{x} = {x} + {w.param(S, C)}")
    elif kind == "slice":
        w(f"{x} = {x} + {w.param(1, S + 5, C)}[:, :{S}]")
    elif kind == "sincos":
        a = w.let("a", f"angles({x}, {S}, {C})")
        w(f"{x} = {x} + torch.cat([{a}.sin(), {a}.cos()], -1)")
    elif kind == "grid":
        f, h, v = w.cells(x)
        w(f"{x} = {x} + ({w.param(f, 1, 1, C)} + {w.param(h, 1, C)} + {w.param(v, C)}).flatten(0, 2)")
    elif kind == "lookup":
        w(f"{x} = {x} + {w.module(f'nn.Embedding({S + 3}, {C})')}(torch.arange({S}, device={x}.device))")
    else:
        w(f"{x} = {x} + F.interpolate({w.param(1, C, 5)}, size={S}, mode='linear').transpose(1, 2)")


PRELUDE = '''def angles(x, tokens, channels):
    """[tokens, channels // 2]"""
    rates = 1 / torch.arange(1, channels // 2 + 1, device=x.device).to(x.dtype)
    return torch.arange(tokens, device=x.device).to(x.dtype)[:, None] * rates


def turn_halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def turn_pairs(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def turn_complex(x, turns):
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


'''


# ---- around a sub-layer ------------------------------------------------------------------------------------

PLAIN = {"norm": "none", "mod": "none"}


def draw_pre(r: Rng) -> Step:
    return {
        "norm": r.choice(["layer", "layer", "affine", "rms", "double", "none"]),
        "mod": r.choice(["none", "none", "sample", "sample", "early", "token", "frame", "table"]),
    }


def enter(w: Code, x: str, pre: Step) -> tuple[str, str | None]:
    """x normed and modulated, and the gate of the residual."""
    B, C, S = w.B, w.C, w.size(x)
    norms = {
        "none": x,
        "layer": f"F.layer_norm({x}, ({C},))",
        "affine": "" if pre["norm"] != "affine" else f"{w.module(f'nn.LayerNorm({C})')}({x})",
        "rms": "" if pre["norm"] != "rms" else f"{w.module(f'nn.RMSNorm({C})')}({x})",
        "double": f"F.layer_norm({x}.double(), ({C},)).type_as({x})",
    }
    h = w.let("h", norms[pre["norm"]])
    mod = pre["mod"]
    if mod == "none":
        return h, None
    shift, scale, gate = w.fresh("shift"), w.fresh("scale"), w.fresh("gate")
    names = f"{shift}, {scale}, {gate}"
    if mod in ("sample", "early"):
        c = w.cond()
        if mod == "sample":
            w(f"{names} = ({w.linear(C, 3 * C)}({c})).chunk(3, -1)")
            w(f"{h} = {h} * (1 + {scale}[:, None]) + {shift}[:, None]")
            return h, f"{gate}[:, None]"
        w(f"{names} = {w.linear(C, 3 * C)}({c}).unsqueeze(1).chunk(3, -1)")
    elif mod == "table":
        w(f"{names} = ({w.param(1, 3, C)} + {w.linear(C, 3 * C)}({w.cond()}).unflatten(1, (3, {C}))).chunk(3, 1)")
    elif mod == "token":
        t = w.once(f"times {x} {S}", lambda: w.given("times", f"torch.rand({B}, {S})"))
        e = w.let("e", f"F.silu({w.linear(1, C)}({t}[..., None]))")
        w(f"{names} = {w.linear(C, 3 * C)}({e}).chunk(3, -1)")
    else:
        f, height, width = w.cells(x)
        t = w.once(f"frames {f}", lambda: w.given("frame_times", f"torch.rand({B}, {f})"))
        e = w.let("e", f"F.silu({w.linear(1, C)}({t}[..., None]))")
        w(f"{names} = {w.linear(C, 3 * C)}({e})[:, :, None].chunk(3, -1)")
        w(f"{h} = ({h}.unflatten(1, ({f}, -1)) * (1 + {scale}) + {shift}).flatten(1, 2)")
        return h, f"{gate}.expand(-1, -1, {height * width}, -1).flatten(1, 2)"
    w(f"{h} = {h} * (1 + {scale}) + {shift}")
    return h, gate


def leave(w: Code, x: str, h: str, gate: str | None) -> None:
    w(f"{x} = {x} + {h}" if gate is None else f"{x} = {x} + {gate} * {h}")


# ---- attention ---------------------------------------------------------------------------------------------


def draw_attention(r: Rng, w: Code) -> Step:
    causal = r.random() < 0.12
    divisors = [d for d in range(1, w.H + 1) if w.H % d == 0]
    return {
        "how": r.choices(["sdpa", "mha", *BY_HAND], [20, 1, 1, 1, 1, 1])[0],
        "project": r.choice(["fused", "separate", "chunk"]),
        "layout": r.choice(["view", "unflatten", "reshape", "strided"]),
        "qk": r.choice(["none", "none", "rms", "layer", "wide"]),
        "rope": r.choice(["none", "none", "halves", "pairs", "batch", "complex", "given", "early"]),
        "kv_heads": w.H if r.random() < 0.8 else r.choice(divisors),
        "gqa": r.choice(["flag", "repeat", "expand"]),
        "mask": "causal" if causal else r.choice(["none"] * 12 + MASKS),
        "keys": r.choice(["all"] * 8 + ["stride", "pool", "sink"]),
        "merge": r.choice(["flatten", "reshape", "contiguous"]),
    }


BY_HAND = ["hand", "hand wide", "hand einsum", "hand bmm"]
MASKS = ["keys", "keys added", "square", "tril", "heads", "bias", "batch", "batch heads", "segments"]


def attention_mask(w: Code, x: str, S: int, T: int, b: int, kind: str) -> str:
    B, H = w.B, w.H
    if kind in ("keys", "keys added"):
        require(b == B)
        keep = w.given("keep", f"(torch.rand({B}, {T}) > 0.3) | (torch.arange({T}) == {T // 2})")
        if kind == "keys":
            return f"{keep}[:, None, None, :]"
        return f"(1 - {keep}.to({x}.dtype))[:, None, None, :] * -10000.0"
    if kind == "square":
        i, j = f"torch.arange({S}, device={x}.device)[:, None]", f"torch.arange({T}, device={x}.device)"
        return f"(({i} - {j}) % 3 != 1) | ({j} == 0)"
    if kind == "tril":
        return f"torch.ones({S}, {T}, dtype=torch.bool, device={x}.device).tril()"
    if kind == "heads":
        return w.param(H, S, T)
    if kind == "bias":  # by relative position
        i, j = f"torch.arange({S}, device={x}.device)[:, None]", f"torch.arange({T}, device={x}.device)"
        table = w.module(f"nn.Embedding({S + T}, {H})")
        return f"{table}({i} - {j} + {T - 1}).permute(2, 0, 1)[None]"
    require(b == B)
    if kind == "batch":
        return w.randn("bias", B, 1, S, T)
    if kind == "batch heads":
        return w.randn("bias", B, H, S, T)
    require(kind == "segments" and S == T)
    ids = w.given("segments", f"torch.randint(0, 3, ({B}, {S}))")
    return f"{ids}[:, None, :, None] == {ids}[:, None, None, :]"


def turned(w: Code, q: str, S: int, b: int, kind: str) -> None:
    """Rotary positions on q [b, H, S, D]."""
    D = w.D
    if kind == "none":
        return
    require(D % 2 == 0)
    if kind in ("halves", "pairs"):
        a = w.let("a", f"angles({q}, {S}, {D})")
        whole = f"torch.cat([{a}, {a}], -1)" if kind == "halves" else a
        w(f"{q} = turn_{kind}({q}, {whole}.cos(), {whole}.sin())")
    elif kind == "batch":
        require(b == w.B)
        positions = w.once(f"positions {S}", lambda: w.given("positions", f"torch.rand({b}, {S}) * 9"))
        a = w.let("a", f"({positions}[..., None] / torch.arange(1, {D // 2 + 1}, device={q}.device))[:, None]")
        w(f"{q} = turn_pairs({q}, {a}.cos(), {a}.sin())")
    elif kind == "complex":
        a = w.let("a", f"angles({q}, {S}, {D}).double()")
        w(f"{q} = turn_complex({q}, torch.polar(torch.ones_like({a}), {a}))")
    else:
        table = w.once(f"table {S}", lambda: w.randn("table", S, D))
        w(f"{q} = turn_halves({q}, {table}.cos(), {table}.sin())")


def heads_of(w: Code, x: str, n: int, S: int, b: int, layout: str) -> str:
    D = w.D
    if layout == "view":
        return f"{x}.view({b}, {S}, {n}, {D}).transpose(1, 2)"
    if layout == "unflatten":
        return f"{x}.unflatten(-1, ({n}, -1)).transpose(1, 2)"
    if layout == "reshape":
        return f"{x}.reshape({b}, -1, {n}, {D}).permute(0, 2, 1, 3)"
    return f"{x}.reshape({b}, {S}, {D}, {n}).permute(0, 3, 1, 2)"


def projected(w: Code, x: str, y: str, S: int, T: int, b: int, o: Step, joint: bool = False) -> tuple[str, str, str]:
    """q [b, H, S, D] of x, and k, v [b, kv, T, D] of y."""
    H, D, C, n = w.H, w.D, w.C, o["kv_heads"]
    require(H % n == 0)
    q, k, v = w.fresh("q"), w.fresh("k"), w.fresh("v")
    early = o["rope"] == "early" and o["project"] != "fused" and not joint
    if o["project"] == "fused" and x == y and n == H:
        w(f"{q}, {k}, {v} = {w.linear(C, 3 * C)}({x}).reshape({b}, {S}, 3, {H}, {D}).permute(2, 0, 3, 1, 4)")
    else:
        if o["project"] == "chunk" and x == y and n == H:
            w(f"{q}, {k}, {v} = {w.linear(C, 3 * C)}({x}).chunk(3, dim=-1)")
        else:
            w(f"{q} = {w.linear()}({x})", f"{k} = {w.linear(C, n * D)}({y})", f"{v} = {w.linear(C, n * D)}({y})")
        if o["qk"] == "wide":
            w(f"{q}, {k} = F.rms_norm({q}, ({C},)), F.rms_norm({k}, ({n * D},))")
        for z, count, size in ((q, H, S), (k, n, T), (v, n, T)):
            if early and z != v:  # positions before the heads move ahead of the tokens
                require(D % 2 == 0)
                a = w.let("a", f"angles({z}, {size}, {D})[:, None]")
                w(f"{z} = turn_pairs({z}.unflatten(-1, ({count}, {D})), {a}.cos(), {a}.sin()).transpose(1, 2)")
            else:
                w(f"{z} = {heads_of(w, z, count, size, b, o['layout'])}")
    if o["qk"] == "rms":
        norm = w.module(f"nn.RMSNorm({D})")
        w(f"{q}, {k} = {norm}({q}), {norm}({k})")
    elif o["qk"] == "layer":
        w(f"{q}, {k} = F.layer_norm({q}, ({D},)), F.layer_norm({k}, ({D},))")
    if o["rope"] != "early" and not joint:
        turned(w, q, S, b, o["rope"])
        turned(w, k, T, b, o["rope"])
    return q, k, v


def attended(w: Code, q: str, k: str, v: str, S: int, T: int, b: int, o: Step) -> str:
    """[b, S, C]"""
    H, D, C, n = w.H, w.D, w.C, o["kv_heads"]
    if o["keys"] == "stride":
        w(f"{k}, {v} = {k}[:, :, ::2], {v}[:, :, ::2]")
        T = -(-T // 2)
    elif o["keys"] == "sink":
        for z in (k, v):
            w(f"{z} = torch.cat([{w.param(1, n, 2, D)}.expand({b}, -1, -1, -1), {z}], 2)")
        T += 2
    options = ""
    if n != H:
        if o["gqa"] == "flag" and o["how"] not in BY_HAND:
            options = ", enable_gqa=True"
        elif o["gqa"] == "expand":
            for z in (k, v):
                w(f"{z} = {z}[:, :, None].expand(-1, -1, {H // n}, -1, -1).reshape({b}, {H}, {T}, {D})")
        else:
            w(f"{k}, {v} = {k}.repeat_interleave({H // n}, 1), {v}.repeat_interleave({H // n}, dim=1)")
    mask = None if o["mask"] in ("none", "causal") else attention_mask(w, q, S, T, b, o["mask"])
    if o["how"] in BY_HAND:
        require(o["mask"] != "causal")
        scores = {
            "hand": f"{q} @ {k}.transpose(-1, -2) * {D**-0.5:.4f}",
            "hand wide": f"({q} * {D**-0.5:.4f}).double() @ {k}.double().mT",
            "hand einsum": f"torch.einsum('bhsd,bhtd->bhst', {q}, {k}) / {D**0.5:.4f}",
            "hand bmm": f"torch.bmm({q}.flatten(0, 1), {k}.flatten(0, 1).transpose(1, 2)).view({b}, {H}, {S}, {T})",
        }[o["how"]]
        if mask is not None:
            added = o["mask"] in ("keys added", "heads", "bias", "batch", "batch heads")
            scores = f"({scores} + {mask})" if added else f"({scores}).masked_fill(~({mask}), -10000.0)"
        else:
            scores = f"({scores})"
        p = w.let("p", f"{scores}.softmax(-1).type_as({v})")
        a = w.let("o", f"torch.einsum('bhst,bhtd->bhsd', {p}, {v})" if o["how"] == "hand einsum" else f"{p} @ {v}")
    else:
        options += f", attn_mask={mask}" if mask is not None else ""
        options += ", is_causal=True" if o["mask"] == "causal" else ""
        a = w.let("o", f"F.scaled_dot_product_attention({q}, {k}, {v}{options})")
    merge = {
        "flatten": "transpose(1, 2).flatten(2)",
        "reshape": f"transpose(1, 2).reshape({b}, {S}, {C})",
        "contiguous": f"permute(0, 2, 1, 3).contiguous().view({b}, -1, {C})",
    }
    w(f"{a} = {a}.{merge[o['merge']]}")
    return a


def attention(w: Code, x: str, y: str, S: int, T: int, b: int, o: Step) -> str:
    """x [b, S, C] attends to y [b, T, C]; with its output projection."""
    if o["how"] == "mha":
        options = ""
        if o["mask"] == "keys" and b == w.B:
            keep = w.given("keep", f"(torch.rand({b}, {T}) > 0.3) | (torch.arange({T}) == {T // 2})")
            options = f", key_padding_mask=~{keep}"
        mha = w.module(f"nn.MultiheadAttention({w.C}, {w.H}, batch_first=True)")
        return w.let("o", f"{mha}({x}, {y}, {y}, need_weights=False{options})[0]")
    if o["keys"] == "pool":
        require(T > 1)
        y, T = w.let("y", f"F.avg_pool1d({y}.transpose(1, 2), 2).transpose(1, 2)"), T // 2
    q, k, v = projected(w, x, y, S, T, b, o)
    a = attended(w, q, k, v, S, T, b, o)
    return w.let("o", f"{w.linear()}({a})")


def with_attention(base: Callable[[Rng, Code], Step] = one, **others: Any) -> Callable[[Rng, Code], Step]:
    def draw(r: Rng, w: Code) -> Step:
        return {
            **base(r, w), "pre": draw_pre(r), "attn": draw_attention(r, w),
            **{k: r.choice(v) for k, v in others.items()},
        }  # fmt: skip

    return draw


@op(9, with_attention())
def self_attention(w: Code, x: str, pre: Step, attn: Step) -> None:
    h, gate = enter(w, x, pre)
    leave(w, x, attention(w, h, h, w.size(x), w.size(x), w.B, attn), gate)


@op(3, with_attention(two))
def cross_attention(w: Code, x: str, y: str, pre: Step, attn: Step) -> None:
    T = w.size(y)
    h, gate = enter(w, x, pre)
    leave(w, x, attention(w, h, y, w.size(x), T, w.B, attn), gate)


@op(2, with_attention(length=[1, 3, 4, 7, 12], kind=["given", "one", "repeated", "scalar", "doubled"]))
def context_attention(w: Code, x: str, pre: Step, attn: Step, length: int, kind: str) -> None:
    """To a context that is an input."""
    B = w.B
    if kind in ("one", "repeated"):
        y = w.randn("context", 1, length, 6)
        y += f".expand({B}, -1, -1)" if kind == "one" else f".repeat({B}, 1, 1)"
    else:
        y = w.randn("context", B, length, 6)
    y = w.let("y", f"{w.linear(6)}({y})")
    if kind == "scalar":
        y, length = w.let("y", f"torch.cat([{w.cond()}[:, None], {y}], 1)"), length + 1
    elif kind == "doubled":
        y, length = w.let("y", f"{y}.repeat_interleave(2, 1)"), 2 * length
    h, gate = enter(w, x, pre)
    leave(w, x, attention(w, h, y, w.size(x), length, B, attn), gate)


@op(5, with_attention(two, take=["slice", "split", "narrow", "tail", "tensor_split"], cat=["heads", "tokens", "after"]))
def joint_attention(w: Code, x: str, y: str, pre: Step, attn: Step, take: str, cat: str) -> None:
    """Two streams attend to all their tokens."""
    S, T, B = w.size(x), w.size(y), w.B
    both = S + T
    (h, gate), (g, other) = enter(w, x, pre), enter(w, y, pre)
    require(attn["how"] == "sdpa" and attn["keys"] != "pool")
    if cat == "tokens":
        z = w.let("z", f"torch.cat([{h}, {g}], 1)")
        q, k, v = projected(w, z, z, both, both, B, attn, joint=True)
    else:
        a = projected(w, h, h, S, S, B, attn, joint=True)
        b = projected(w, g, g, T, T, B, attn, joint=True)
        order = [a, b] if cat == "heads" else [b, a]
        if cat == "after":
            S, T, x, y, gate, other = T, S, y, x, other, gate
        q, k, v = (w.let(s, f"torch.cat([{order[0][i]}, {order[1][i]}], 2)") for i, s in enumerate("qkv"))
    if attn["rope"] != "early":
        turned(w, q, both, B, attn["rope"])
        turned(w, k, both, B, attn["rope"])
    o = attended(w, q, k, v, both, both, B, attn)
    first, second = {
        "slice": (f"{o}[:, :{S}]", f"{o}[:, {S}:]"),
        "split": (f"{o}.split([{S}, {T}], 1)[0]", f"torch.split({o}, [{S}, {T}], dim=1)[1]"),
        "narrow": (f"{o}.narrow(1, 0, {S})", f"{o}.narrow(1, {S}, {T})"),
        "tail": (f"{o}[:, :-{T}]", f"{o}[:, -{T}:]"),
        "tensor_split": (f"{o}.tensor_split(({S},), 1)[0]", f"{o}.tensor_split(({S},), 1)[1]"),
    }[take]
    leave(w, x, f"{w.linear()}({first})", gate)
    leave(w, y, f"{w.linear()}({second})", other)


@op(2, with_attention(axis=["space", "time"], kind=["reshape", "unflatten", "rest"]))
def factorised_attention(w: Code, x: str, pre: Step, attn: Step, axis: str, kind: str) -> None:
    """Over space within a frame, or over time at a place."""
    f, height, width = w.cells(x)
    n, B, C = height * width, w.B, w.C
    h, gate = enter(w, x, pre)
    if axis == "space":
        folded = (
            f"{h}.reshape({B * f}, {n}, {C})" if kind != "unflatten" else f"{h}.unflatten(1, ({f}, -1)).flatten(0, 1)"
        )
        z, size, batch, back = w.let("z", folded), n, B * f, f"reshape({B}, {f * n}, {C})"
    else:
        z = w.let("z", f"{h}.unflatten(1, ({f}, {n})).transpose(1, 2).reshape({B * n}, {f}, {C})")
        size, batch, back = f, B * n, f"reshape({B}, {n}, {f}, {C}).transpose(1, 2).flatten(1, 2)"
        if kind == "rest":
            back = f"unflatten(0, ({B}, {n})).permute(0, 2, 1, 3).reshape({B}, -1, {C})"
    o = attention(w, z, z, size, size, batch, attn)
    leave(w, x, f"{o}.{back}", gate)


@op(2, with_attention(rows=[1, 2, 2, 3], columns=[1, 2, 2, 3], shift=[0, 0, 1]))
def window_attention(w: Code, x: str, pre: Step, attn: Step, rows: int, columns: int, shift: int) -> None:
    f, height, width = w.cells(x)
    B, C = w.B, w.C
    require(height % rows == 0 and width % columns == 0 and rows * columns > 1)
    h, gate = enter(w, x, pre)
    z = w.let("z", f"{h}.reshape({B * f}, {height}, {width}, {C})")
    if shift:
        w(f"{z} = torch.roll({z}, (-1, -1), (1, 2))")
    a, b = height // rows, width // columns
    w(f"{z} = {z}.view({B * f}, {a}, {rows}, {b}, {columns}, {C}).transpose(2, 3).reshape(-1, {rows * columns}, {C})")
    n = rows * columns
    o = attention(w, z, z, n, n, B * f * a * b, attn)
    w(f"{o} = {o}.view({B * f}, {a}, {b}, {rows}, {columns}, {C}).permute(0, 1, 3, 2, 4, 5)")
    w(f"{o} = {o}.reshape({B * f}, {height}, {width}, {C})")
    if shift:
        w(f"{o} = torch.roll({o}, (1, 1), (1, 2))")
    leave(w, x, f"{o}.reshape({B}, -1, {C})", gate)


@op(1, with_attention(length=[2, 3, 4, 5], padded=[0, 1]))
def chunk_attention(w: Code, x: str, pre: Step, attn: Step, length: int, padded: int) -> None:
    """Windows along the tokens, padded to whole ones."""
    S, B, C = w.size(x), w.B, w.C
    missing = -S % length
    require(length < S and (padded or not missing))
    h, gate = enter(w, x, pre)
    z = w.let("z", f"F.pad({h}, (0, 0, 0, {missing}))" if missing else h)
    n = (S + missing) // length
    w(f"{z} = {z}.reshape({B * n}, {length}, {C})")
    o = attention(w, z, z, length, length, B * n, attn)
    leave(w, x, f"{o}.reshape({B}, {S + missing}, {C})[:, :{S}]", gate)


@op(1, with_attention(length=[1, 2, 5], kind=["head", "tail", "strided"]))
def query_subset(w: Code, x: str, pre: Step, attn: Step, length: int, kind: str) -> None:
    """Some tokens attend to all, and replace what they were."""
    S = w.size(x)
    require(length < S)
    h, gate = enter(w, x, pre)
    require(gate is None)
    if kind == "strided":
        o = attention(w, w.let("z", f"{h}[:, ::2]"), h, -(-S // 2), S, w.B, attn)
        w(f"{x} = {x}.clone()", f"{x}[:, ::2] = {o}")
        return
    part = f"[:, :{length}]" if kind == "head" else f"[:, {S - length}:]"
    o = attention(w, w.let("z", f"{h}{part}"), h, length, S, w.B, attn)
    rest = f"{x}[:, {length}:]" if kind == "head" else f"{x}[:, :{S - length}]"
    pair = f"{x}{part} + {o}, {rest}" if kind == "head" else f"{rest}, {x}{part} + {o}"
    w(f"{x} = torch.cat([{pair}], dim=1)")


@op(2.5, lambda r, w: {**one(r, w), "pre": draw_pre(r), "kind": r.choice(BARE), "scale": r.choice([0, 0, 3])})
def bare_attention(w: Code, x: str, pre: Step, kind: str, scale: int) -> None:
    """Calls of attention with heads, batch and tokens elsewhere than usual."""
    B, S, C, H, D = w.B, w.size(x), w.C, w.H, w.D
    h, gate = enter(w, x, pre)
    sdpa = "F.scaled_dot_product_attention"
    more = f", scale={scale / 10}" if scale else ""
    qkv = "qkv"
    if kind in ("headless", "raw", "channels", "shared"):
        q, k, v = (h, h, h) if kind == "raw" else (w.let(z, f"{w.linear()}({h})") for z in qkv)
        if kind == "shared":
            k = v
        if kind == "channels":
            q, k, v = (w.let(z, f"{z}.view({B}, {S}, {H}, {D}).permute(0, 2, 3, 1)") for z in (q, k, v))
            o = f"{sdpa}({q}, {k}, {v}{more}).permute(0, 3, 1, 2).flatten(2)"
        else:
            o = f"{sdpa}({q}, {k}, {v}{more})"
    elif kind == "narrow values":
        q, k = (w.let(z, f"{w.linear()}({h}).view({B}, {S}, {H}, {D}).transpose(1, 2)") for z in "qk")
        v = w.let("v", f"{w.linear(C, 3 * H)}({h}).view({B}, {S}, {H}, 3).transpose(1, 2)")
        o = f"{w.linear(3 * H, C)}({sdpa}({q}, {k}, {v}{more}).transpose(1, 2).reshape({B}, {S}, -1))"
    elif kind in ("heads first", "tokens first", "folded heads", "heads as tokens"):
        there, back = {
            "heads first": ("permute(2, 0, 1, 3)", "permute(1, 2, 0, 3).flatten(2)"),
            "tokens first": (
                "transpose(0, 1).contiguous().permute(1, 2, 0, 3)",
                "permute(2, 0, 1, 3).transpose(0, 1).flatten(2)",
            ),
            "folded heads": (
                f"transpose(1, 2).reshape({B * H}, {S}, {D})",
                f"view({B}, {H}, {S}, {D}).transpose(1, 2).flatten(2)",
            ),
            "heads as tokens": (f"reshape({B}, 1, {S * H}, {D})", f"reshape({B}, {S}, {C})"),
        }[kind]
        q, k, v = (w.let(z, f"{w.linear()}({h}).view({B}, {S}, {H}, {D}).{there}") for z in qkv)
        o = f"{sdpa}({q}, {k}, {v}{more}).{back}"
    else:
        f, height, width = w.cells(x)
        n = height * width
        there = f"view({B}, {f}, {n}, {H}, {D}).transpose(2, 3)"
        back = "transpose(2, 3).flatten(3).flatten(1, 2)"
        if kind == "time of five":
            there, back = (
                f"view({B}, {f}, {n}, {H}, {D}).permute(0, 2, 3, 1, 4)",
                "permute(0, 3, 1, 2, 4).flatten(3).flatten(1, 2)",
            )
        if kind == "rows":
            there = f"reshape({B * f}, {height}, {width}, {H}, {D}).permute(0, 1, 3, 2, 4).flatten(0, 1)"
            back = f"unflatten(0, ({B}, -1)).transpose(2, 3).reshape({B}, {S}, {C})"
        if kind == "columns":
            there = f"reshape({B * f}, {height}, {width}, {H}, {D}).permute(0, 2, 3, 1, 4).flatten(0, 1)"
            back = f"unflatten(0, ({B * f}, -1)).permute(0, 3, 1, 2, 4).reshape({B}, {S}, {C})"
        q, k, v = (w.let(z, f"{w.linear()}({h}).{there}") for z in qkv)
        o = f"{sdpa}({q}, {k}, {v}{more}).{back}"
    leave(w, x, o, gate)


BARE = ("headless", "raw", "channels", "shared", "narrow values", "heads first", "tokens first", "folded heads",
        "heads as tokens", "space of five", "time of five", "rows", "columns")  # fmt: skip


@op(1, with_attention(two))
def frame_context_attention(w: Code, x: str, y: str, pre: Step, attn: Step) -> None:
    """Each frame attends to itself and to all of y."""
    f, height, width = w.cells(x)
    n, T, B, C = height * width, w.size(y), w.B, w.C
    h, gate = enter(w, x, pre)
    context = w.let("y", f"{y}[:, None].expand(-1, {f}, -1, -1)")
    z = w.let("z", f"torch.cat([{h}.unflatten(1, ({f}, {n})), {context}], 2).flatten(0, 1)")
    o = attention(w, z, z, n + T, n + T, B * f, attn)
    leave(w, x, f"{o}.view({B}, {f}, {n + T}, {C})[:, :, :{n}].flatten(1, 2)", gate)


@op(1, with_attention(parts=[2, 3], kind=["order", "reversed"]))
def parts_attention(w: Code, x: str, pre: Step, attn: Step, parts: int, kind: str) -> None:
    """Each part of the tokens attends to all of them, or to its predecessor."""
    S = w.size(x)
    require(2 * parts <= S)
    h, gate = enter(w, x, pre)
    n = -(-S // parts)
    sizes = [n] * (S // n) + ([S % n] if S % n else [])
    names = [w.fresh("z") for _ in sizes]
    w(f"{', '.join(names)} = {h}.split({n}, 1)")
    found = []
    for i, z in enumerate(names):
        over, T = (h, S) if kind == "order" else (names[i - 1], sizes[i - 1])
        found.append(attention(w, z, over, sizes[i], T, w.B, {**attn, "mask": "none"}))
    leave(w, x, f"torch.cat([{', '.join(found)}], 1)", gate)


@op(1, with_attention())
def guided_attention(w: Code, x: str, pre: Step, attn: Step) -> None:
    """Twice the batch, combined again."""
    S = w.size(x)
    h, gate = enter(w, x, pre)
    require(attn["mask"] not in ("keys", "keys added", "batch", "batch heads", "segments") and attn["rope"] != "batch")
    z = w.let("z", f"torch.cat([{h}, {h} + {w.param(w.C)}], 0)")
    o = attention(w, z, z, S, S, 2 * w.B, attn)
    a, b = w.fresh("a"), w.fresh("b")
    w(f"{a}, {b} = {o}.chunk(2)")
    leave(w, x, f"({a} + 1.5 * ({b} - {a}))", gate)


@op(1.5, lambda r, w: {**one(r, w), "pre": draw_pre(r), "kind": r.choice(["matmul", "einsum", "softmax"])})
def linear_attention(w: Code, x: str, pre: Step, kind: str) -> None:
    S, H, B, C = w.size(x), w.H, w.B, w.C
    h, gate = enter(w, x, pre)
    q, k, v = w.fresh("q"), w.fresh("k"), w.fresh("v")
    w(f"{q}, {k}, {v} = {w.linear(C, 3 * C)}({h}).reshape({B}, {S}, 3, {H}, -1).permute(2, 0, 3, 1, 4)")
    if kind == "softmax":
        w(f"{k} = {k}.softmax(2)")
    else:
        w(f"{q}, {k} = F.relu({q}), F.relu({k})")
    if kind == "einsum":
        kv = w.let("kv", f"torch.einsum('bhsd,bhse->bhde', {k}, {v}) / {S}")
        o = w.let("o", f"torch.einsum('bhsd,bhde->bhse', {q}, {kv})")
    else:
        kv = w.let("kv", f"{k}.transpose(-1, -2) @ {v} / {S}")
        o = w.let("o", f"{q} @ {kv}")
        if kind == "matmul":
            w(f"{o} = {o} / ({q} @ {k}.mean(2, keepdim=True).transpose(-1, -2) + 1)")
    leave(w, x, f"{w.linear()}({o}.transpose(1, 2).reshape({B}, {S}, {C}))", gate)


# ---- what stays within a token -----------------------------------------------------------------------------


@op(6, lambda r, w: {**one(r, w), "pre": draw_pre(r), "kind": r.choice(["gelu", "swiglu", "chunked", "flat", "seq"])})
def feed_forward(w: Code, x: str, pre: Step, kind: str) -> None:
    S, B, C = w.size(x), w.B, w.C
    h, gate = enter(w, x, pre)
    if kind == "swiglu":
        a, b = w.fresh("a"), w.fresh("b")
        w(f"{a}, {b} = {w.linear(C, 4 * C)}({h}).chunk(2, -1)")
        o = f"{w.linear(2 * C, C)}(F.silu({a}) * {b})"
    else:
        ff = w.module(f"nn.Sequential(nn.Linear({C}, {2 * C}), nn.GELU(), nn.Linear({2 * C}, {C}))")
        o = {
            "gelu": f"{ff}({h})",
            "chunked": f"torch.cat([{ff}(part) for part in {h}.chunk(3, 1)], 1)",
            "flat": f"{ff}({h}.reshape({B * S}, {C})).view({B}, {S}, {C})",
            "seq": f"{ff}({h}.transpose(0, 1).contiguous()).transpose(0, 1)",
        }[kind]
    leave(w, x, o, gate)


@op(2, kinds("flat", "seq", "heads", "bmm", "einsum", "norm heads", "squeeze", "stack", "complex", "moved"))
def reshaped(w: Code, x: str, kind: str) -> None:
    """Dims merged, moved and split around something local."""
    S, B, C, H, D = w.size(x), w.B, w.C, w.H, w.D
    y = {
        "flat": lambda: f"{w.linear()}({x}.flatten(0, 1)).tanh().unflatten(0, ({B}, {S}))",
        "seq": lambda: f"({x}.permute(1, 0, 2) * {w.param(B, C)}).permute(1, 0, 2)",
        "heads": lambda: f"({x}.view({B}, {S}, {H}, {D}).softmax(-1) * {w.param(H, 1)}).view({B}, {S}, {C})",
        "bmm": lambda: f"torch.bmm({x}, {w.param(1, C, C, scale=0.2)}.expand({B}, -1, -1)).tanh()",
        "einsum": lambda: (
            f"torch.einsum('bshd,hde->bshe', {x}.unflatten(-1, ({H}, {D})), {w.param(H, D, D)}).flatten(2)"
        ),
        "norm heads": lambda: f"F.group_norm({x}.reshape({B * S}, {C}), {H}).reshape({B}, {S}, {C})",
        "squeeze": lambda: f"({x}.unsqueeze(2) * {w.param(1, 1, 3, C)}).sum(2)",
        "stack": lambda: f"torch.stack([{x}, {x}.sin(), {x} * 0.5], 2).mean(2)",
        "complex": lambda: (
            f"(torch.view_as_complex({x}.double().reshape({B}, {S}, -1, 2).contiguous()).abs() + 0.1)"
            f".log().repeat_interleave(2, -1).type_as({x})"
        ),
        "moved": lambda: f"{w.linear()}({x}.movedim(1, 0)).cos().swapaxes(0, 1)",
    }[kind]()
    w(f"{x} = {x} + 0.5 * {y}")


@op(1.5, kinds("given", "where", "fill", "scaled", "late"))
def masked_tokens(w: Code, x: str, kind: str) -> None:
    """Tokens replaced or zeroed by a mask that is an input."""
    B, S, C = w.B, w.size(x), w.C
    keep = w.given("keep", f"torch.rand({B}, {S}) > 0.3")
    w({
        "given": lambda: f"{x} = {x} * {keep}[..., None]",
        "where": lambda: f"{x} = torch.where({keep}[:, :, None], {x}, {w.param(C)})",
        "fill": lambda: f"{x} = {x}.masked_fill(~{keep}.unsqueeze(-1), 0.1)",
        "scaled": lambda: f"{x} = {x} * {keep}.to({x}.dtype).unsqueeze(2) + {w.param(1, 1, C)}",
        "late": lambda: f"{x} = {x} * (torch.arange({S}, device={x}.device) < {max(1, S - 2)})[:, None]",
    }[kind]())  # fmt: skip


# ---- what mixes tokens -------------------------------------------------------------------------------------


def pooled(w: Code, x: str, kind: str) -> str:
    """[B, C]"""
    B, S = w.B, w.size(x)
    if kind == "masked":
        keep = w.given("keep", f"((torch.rand({B}, {S}) > 0.3) | (torch.arange({S}) == 0)).float()")
        return w.let("p", f"({x} * {keep}[..., None]).sum(1) / {keep}.sum(1, keepdim=True)")
    if kind == "softmax":
        score = w.let("a", f"{w.linear(w.C, 1)}({x}).softmax(1)")
        return w.let("p", f"({score} * {x}).sum(1)")
    if kind == "scores":
        score = w.let("a", f"{w.linear(w.C, 1)}({x}).squeeze(-1).softmax(-1)")
        return w.let("p", f"({score}[:, None] @ {x}).squeeze(1)")
    return w.let("p", {
        "mean": f"{x}.mean(1)",
        "kept": f"{x}.mean(dim=1, keepdim=True).squeeze(1)",
        "max": f"{x}.amax(1)",
        "max values": f"{x}.max(1)[0]",
        "sum": f"{x}.sum(1) / {S}",
        "first": f"{x}[:, 0]",
        "last": f"{x}[:, -1]",
        "adaptive": f"F.adaptive_avg_pool1d({x}.transpose(1, 2), 1).flatten(1)",
        "norm": f"torch.linalg.vector_norm({x}, dim=1) / {S}",
        "lse": f"{x}.logsumexp(1)",
        "std": f"({x}.var(1, correction=0) + 0.01).sqrt()",
    }[kind])  # fmt: skip


POOLS = ("mean", "mean", "kept", "max", "max values", "sum", "first", "last", "adaptive", "norm", "lse", "std",
         "masked", "softmax", "scores")  # fmt: skip


def any_two(r: Rng, w: Code) -> Step:
    return {"x": r.choice(list(w.tokens)), "y": r.choice(list(w.tokens))}


@op(2, kinds(*POOLS, base=any_two))
def pool_modulates(w: Code, x: str, y: str, kind: str) -> None:
    p = pooled(w, x, kind)
    w.size(y)
    w(f"{y} = {y} * (1 + 0.5 * {w.linear()}({p}).tanh()[:, None])")


@op(1, kinds(*POOLS, base=any_two))
def pool_prepended(w: Code, x: str, y: str, kind: str) -> None:
    p = pooled(w, x, kind)
    w(f"{y} = torch.cat([{w.linear()}({p})[:, None], {y}], dim=1)")
    w.resize(y, w.size(y) + 1)


@op(1.5, kinds("head", "tail", length=[1, 2, 4]))
def registers(w: Code, x: str, kind: str, length: int) -> None:
    """Learned tokens join."""
    r = w.let("r", f"{w.param(1, length, w.C)}.expand({w.B}, -1, -1)")
    w(f"{x} = torch.cat([{r}, {x}] if {kind == 'head'} else [{x}, {r}], 1)")
    w.resize(x, w.size(x) + length)


@op(1.5, kinds("head", "tail", "stride", "offset stride", "half", length=[1, 2, 4]))
def dropped(w: Code, x: str, kind: str, length: int) -> None:
    S = w.size(x)
    require(length + 1 < S and S > 4)
    part, left = {
        "head": (f"{length}:", S - length),
        "tail": (f":-{length}", S - length),
        "stride": ("::2", -(-S // 2)),
        "offset stride": ("1::2", S // 2),
        "half": (f":{S // 2}", S // 2),
    }[kind]
    w(f"{x} = {x}[:, {part}]")
    w.resize(x, left)


@op(
    2,
    kinds("cumsum", "cummean", "flip", "roll", "roll back", "token shift", "mean shift", "diff", "normalised", "lerp"),
)
def moved(w: Code, x: str, kind: str) -> None:
    """Order matters."""
    S = w.size(x)
    i = f"torch.arange(1, {S + 1}, device={x}.device)[:, None]"
    shifted = f"torch.cat([torch.zeros_like({x}[:, :1]), {x}[:, :-1]], 1)"
    w(f"{x} = {x} + 0.5 * " + {
        "cumsum": f"({x}.cumsum(1) / {S})",
        "cummean": f"({x}.cumsum(dim=1) / {i})",
        "flip": f"{x}.flip(1)",
        "roll": f"{x}.roll(1, 1)",
        "roll back": f"torch.roll({x}, shifts=-3, dims=1)",
        "token shift": shifted,
        "mean shift": f"F.pad({x}, (0, 0, 1, -1))",
        "diff": f"F.pad({x}[:, 1:] - {x}[:, :-1], (0, 0, 0, 1))",
        "normalised": f"F.normalize({x}, dim=1)",
        "lerp": f"torch.lerp({x}, {shifted}, {w.param(w.C)})" if kind == "lerp" else "",
    }[kind])  # fmt: skip


@op(1.5, kinds("sort", "topk", "shuffle", "index", "advanced", "select", "reverse", "take", "scatter", "index_add"))
def picked(w: Code, x: str, kind: str) -> None:
    B, S, C = w.B, w.size(x), w.C
    if kind in ("sort", "topk"):
        w.ordered = True
        score = w.let("a", f"{w.linear(C, 1)}({x}).squeeze(-1)")
        n = S if kind == "sort" else max(1, S // 2)
        order = f"{score}.argsort(1)" if kind == "sort" else f"{score}.topk({n}, 1)[1].sort(1)[0]"
        i = w.let("i", order)
        w(f"{x} = {x}.gather(1, {i}[..., None].expand(-1, -1, {C}))")
        w.resize(x, n)
    elif kind == "shuffle":  # and back, as masked autoencoders do
        i = w.let("i", f"{w.given('noise', f'torch.rand({B}, {S})')}.argsort(1)")
        y = w.let("y", f"torch.gather({x}, 1, {i}[..., None].expand(-1, -1, {C})) + {w.param(S, C)}")
        w(f"{x} = torch.gather({y}, 1, {i}.argsort(1)[..., None].expand(-1, -1, {C}))")
    elif kind in ("index", "advanced", "select"):
        n = max(1, S - 1)
        i = w.given("order", f"torch.randperm({S})[:{n}]")
        w(f"{x} = " + {"index": f"{x}[:, {i}]", "advanced": f"{x}[torch.arange({B})[:, None], {i}]",
                       "select": f"{x}.index_select(1, {i})"}[kind])  # fmt: skip
        w.resize(x, n)
    elif kind == "reverse":
        w(f"{x} = {x}[:, torch.arange({S} - 1, -1, -1, device={x}.device)]")
    elif kind == "take":
        i = w.given("order", f"torch.randint(0, {S}, ({B}, {S}))")
        w(f"{x} = {x} + torch.take_along_dim({x}, {i}[:, :, None], 1)")
    elif kind == "scatter":
        i = w.given("order", f"torch.stack([torch.randperm({S}) for _ in range({B})])")
        w(f"{x} = torch.zeros_like({x}).scatter(1, {i}[..., None].expand(-1, -1, {C}), {x})")
    else:
        i = w.given("order", f"torch.randint(0, {S}, ({S},))")
        w(f"{x} = {x}.index_add(1, {i}, {x}, alpha=0.3)")


@op(2, kinds("same", "causal", "dense", "strided", "pool", "max", size=[3, 3, 5, 2]))
def conv_tokens(w: Code, x: str, kind: str, size: int) -> None:
    S, C = w.size(x), w.C
    if kind == "causal":
        conv = w.module(f"nn.Conv1d({C}, {C}, {size}, groups={C})")
        w(f"{x} = {x} + {conv}(F.pad({x}.transpose(1, 2), ({size - 1}, 0))).transpose(1, 2)")
    elif kind == "strided":
        require(size < S)
        conv = w.module(f"nn.Conv1d({C}, {C}, {size}, stride=2)")
        w(f"{x} = {conv}({x}.transpose(1, 2)).transpose(1, 2)")
        w.resize(x, (S - size) // 2 + 1)
    else:
        require(size % 2)
        if kind in ("pool", "max"):
            conv = f"F.{'avg' if kind == 'pool' else 'max'}_pool1d"
            w(f"{x} = {x} + {conv}({x}.transpose(1, 2), {size}, 1, {size // 2}).transpose(1, 2)")
            return
        groups = f", groups={C}" if kind == "same" else ""
        conv = w.module(f"nn.Conv1d({C}, {C}, {size}, padding={size // 2}{groups})")
        w(f"{x} = {x} + {conv}({x}.transpose(1, 2)).transpose(1, 2)")


@op(2, kinds("depthwise", "dense", "glu", "volume", "merge", "upsample", "causal", "norm"))
def conv_grid(w: Code, x: str, kind: str) -> None:
    """Tokens as an image."""
    f, h, v = w.cells(x)
    B, C, S = w.B, w.C, w.size(x)
    if kind in ("volume", "causal"):
        y = w.let("y", f"{x}.transpose(1, 2).reshape({B}, {C}, {f}, {h}, {v})")
        if kind == "volume":
            y = f"{w.module(f'nn.Conv3d({C}, {C}, 3, padding=1, groups={C})')}({y})"
        else:
            y = f"{w.module(f'nn.Conv3d({C}, {C}, (2, 1, 1), groups={C})')}(F.pad({y}, (0, 0, 0, 0, 1, 0)))"
        w(f"{x} = {x} + {y}.flatten(2).transpose(1, 2)")
        return
    if kind == "merge":
        require(h % 2 == 0 and v % 2 == 0 and S >= 8)
        y = f"{x}.view({B}, {f}, {h // 2}, 2, {v // 2}, 2, {C}).permute(0, 1, 2, 4, 3, 5, 6)"
        w(f"{x} = {w.linear(4 * C, C)}({y}.reshape({B}, {S // 4}, {4 * C}))")
        w.resize(x, S // 4, (f, h // 2, v // 2))
        return
    if kind == "upsample":
        require(f == 1 and S <= 12)
        y = f"{x}.transpose(1, 2).unflatten(2, ({h}, {v}))"
        w(f"{x} = F.interpolate({y}, scale_factor=2, mode='nearest').flatten(2).transpose(1, 2)")
        w.resize(x, 4 * S, (1, 2 * h, 2 * v))
        return
    y = w.let("y", f"{x}.reshape({B * f}, {h}, {v}, {C}).permute(0, 3, 1, 2)")
    if kind == "glu":
        conv = w.module(f"nn.Conv2d({C}, {2 * C}, 3, padding=1, groups={C})")
        a, b = w.fresh("a"), w.fresh("b")
        w(f"{a}, {b} = {conv}({y}).chunk(2, 1)", f"{y} = {a} * F.silu({b})")
    elif kind == "norm":
        w(f"{y} = F.silu({w.module(f'nn.GroupNorm({w.H}, {C})')}({y}))")
    else:
        groups = f", groups={C}" if kind == "depthwise" else ""
        w(f"{y} = {w.module(f'nn.Conv2d({C}, {C}, 3, padding=1{groups})')}({y})")
    w(f"{x} = {x} + {y}.permute(0, 2, 3, 1).reshape({B}, {S}, {C})")


@op(1.5, kinds("matmul", "einsum", "linear", "mlp", "gram", "between"))
def mixed(w: Code, x: str, kind: str) -> None:
    """Matrices over tokens."""
    S, C = w.size(x), w.C
    w({
        "matmul": lambda: f"{x} = {x} + {w.param(S, S)} @ {x}",
        "einsum": lambda: f"{x} = {x} + torch.einsum('ts,bsc->btc', {w.param(S, S)}, {x})",
        "linear": lambda: f"{x} = {x} + {w.linear(S, S)}({x}.transpose(1, 2)).transpose(1, 2)",
        "mlp": lambda: f"{x} = {x} + {w.linear(2 * S, S)}(F.gelu({w.linear(S, 2 * S)}({x}.mT))).mT",
        "gram": lambda: f"{x} = {x} + ({x} @ {x}.transpose(1, 2) / {C}).tanh() @ {x} / {S}",
        "between": lambda: f"{x} = {x} + torch.einsum('bsc,btc->bst', {x}, {x}).softmax(-1).mean(1)[..., None]",
    }[kind]())  # fmt: skip


@op(1.5, kinds("group", "instance", "both", "manual", "softmax", "channels first"))
def normed(w: Code, x: str, kind: str) -> None:
    """Statistics over tokens, or over channels that come first."""
    S, C = w.size(x), w.C
    w(f"{x} = {x} + 0.5 * " + {
        "group": lambda: f"F.group_norm({x}.transpose(1, 2), {w.H}).transpose(1, 2)",
        "instance": lambda: f"F.instance_norm({x}.mT).mT" if S > 1 else x,
        "both": lambda: f"F.layer_norm({x}, ({S}, {C}))",
        "manual": lambda: f"({x} - {x}.mean(1, keepdim=True)) / ({x}.std(1, keepdim=True, correction=0) + 0.1)",
        "softmax": lambda: f"{x}.softmax(1)",
        "channels first": lambda: f"F.layer_norm({x}.transpose(1, 2).transpose(1, 2), ({C},))",
    }[kind]())  # fmt: skip


@op(1.5, kinds("slice", "scaled", "stride", "zero", "first", "fill", "view", "channels", "add", "copy"))
def written(w: Code, x: str, kind: str) -> None:
    """In place, on a clone."""
    C, n = w.C, max(1, w.size(x) // 3)
    w(f"{x} = {x}.clone()", {
        "slice": lambda: f"{x}[:, :{n}] = {w.param(1, n, C)}",
        "scaled": lambda: f"{x}[:, {n}:] *= 0.5",
        "stride": lambda: f"{x}[:, ::2] = {x}[:, ::2].sin()",
        "zero": lambda: f"{x}[:, -{n}:].zero_()",
        "first": lambda: f"{x}[:, 0] = {w.cond()}",
        "fill": lambda: f"{x}[:, {n}:, 0].fill_(0.5)",
        "view": lambda: f"{x}.flatten(0, 0).mul_(0.9)",
        "channels": lambda: f"{x}[..., :{max(1, C // 2)}] += {w.param(max(1, C // 2))}",
        "add": lambda: f"{x}.add_({w.cond()}[:, None]).tanh_()",
        "copy": lambda: f"{x}[:, :{n}].copy_({x}[:, -{n}:].clone())",
    }[kind]())  # fmt: skip


@op(2.5, kinds("transpose", "flip rows", "roll columns", "snake", "crop", "first frame", "frames", "reversed frames",
               "frame mean", "row sum", "halves", "interleave halves", "repeat", "doubled", "pad", "unfold",
               "tile"))  # fmt: skip
def arranged(w: Code, x: str, kind: str) -> None:
    """Tokens of a grid in another order or number."""
    B, S, C = w.B, w.size(x), w.C
    if kind in ("halves", "interleave halves", "repeat", "doubled", "pad", "unfold", "tile"):
        if kind in ("halves", "interleave halves"):
            require(S % 2 == 0)
            if kind == "halves":
                w(f"{x} = {x}.unflatten(1, (2, {S // 2})).flip(1).flatten(1, 2)")
            else:
                w(f"{x} = torch.stack([{x}[:, :{S // 2}], {x}[:, {S // 2}:]], 2).flatten(1, 2)")
        elif kind == "unfold":
            require(S > 3)
            w(f"{x} = {x} + F.pad({x}, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1)")
        elif kind == "pad":
            n = -S % 8
            require(n)
            w(f"{x} = F.pad({x}, (0, 0, 0, {n}))")
            w.resize(x, S + n)
        else:
            require(S <= 20)
            w(f"{x} = " + {"repeat": f"{x}.repeat(1, 2, 1)", "doubled": f"{x}.repeat_interleave(2, dim=1)",
                           "tile": f"{x}[:, None].expand(-1, 2, -1, -1).reshape({B}, {2 * S}, {C})"}[kind])  # fmt: skip
            w.resize(x, 2 * S)
        return
    f, h, v = w.cells(x)
    g = f"{x}.reshape({B}, {f}, {h}, {v}, {C})"
    grid = (f, h, v)
    if kind == "transpose":
        y, grid = f"{g}.transpose(2, 3)", (f, v, h)
    elif kind == "flip rows":
        y = f"{g}.flip(2)"
    elif kind == "roll columns":
        y = f"{g}.roll((1, -1), (2, 3))"
    elif kind == "snake":
        y = f"torch.stack([row if i % 2 else row.flip(2) for i, row in enumerate({g}.unbind(2))], 2)"
    elif kind == "crop":
        require(h > 2 and v > 2)
        y, grid = f"{g}[:, :, 1:, :-1]", (f, h - 1, v - 1)
    elif kind == "first frame":
        require(f > 1)
        y = f"({g}[:, :1] + {g})"
    elif kind == "frames":
        require(f > 2)
        y, grid = f"{g}[:, ::2]", (-(-f // 2), h, v)
    elif kind == "reversed frames":
        y = f"torch.cat([{g}[:, 1:], {g}[:, :1]], 1)"
    elif kind == "frame mean":
        y = f"({g} - {g}.mean((2, 3), keepdim=True))"
    else:
        y = f"({g} + {g}.sum(3, keepdim=True) / {v})"
    w(f"{x} = {y}.reshape({B}, -1, {C})")
    w.resize(x, math.prod(grid), grid)


@op(0.5, lambda r, w: {})
def graph_break(w: Code) -> None:
    w("torch._dynamo.graph_break()")


# ---- several streams ---------------------------------------------------------------------------------------


@op(1.5, lambda r, w: {**two(r, w), "keep": r.choice([0, 1])})
def joined(w: Code, x: str, y: str, keep: int) -> None:
    """x becomes x and y."""
    total = w.size(x) + w.size(y)
    w(f"{x} = torch.cat([{y}, {x}], dim=1)")
    w.resize(x, total)
    if not keep:
        del w.tokens[y]
        w.grid.pop(y, None)


@op(1.5, lambda r, w: {**one(r, w), "length": r.randint(1, 9), "kind": r.choice(["slice", "split", "chunk", "narrow"])})
def parted(w: Code, x: str, length: int, kind: str) -> None:
    """A new stream is the first tokens of x."""
    S = w.size(x)
    require(length + 1 < S and len(w.tokens) < 4)
    y = w.fresh("part")
    if kind == "chunk":
        length = -(-S // 2)
        w(f"{y}, {x} = {x}.chunk(2, 1)")
    else:
        w({
            "slice": f"{y}, {x} = {x}[:, :{length}], {x}[:, {length}:]",
            "split": f"{y}, {x} = torch.split({x}, [{length}, {S - length}], 1)",
            "narrow": f"{y}, {x} = {x}.narrow(1, 0, {length}), {x}.narrow(1, {length}, {S - length})",
        }[kind])  # fmt: skip
    w.resize(x, S - length)
    w.resize(y, length)


@op(
    1,
    lambda r, w: {
        **two(r, w),
        "kind": r.choice(PAIRINGS),
    },
)
def paired(w: Code, x: str, y: str, kind: str) -> None:
    """Two streams of one length as one tensor, and apart again."""
    S, C, B = w.size(x), w.C, w.B
    if kind == "swap":
        w(f"{x}, {y} = {y}, {x}")
        w.tokens[x], w.tokens[y] = w.tokens[y], w.tokens[x]
        w.grid.pop(x, None), w.grid.pop(y, None)
        return
    require(w.size(y) == S)
    if kind == "stack":
        w(f"{x}, {y} = ({w.linear()}(torch.stack([{x}, {y}], 0)) * {w.param(2, 1, 1, C, scale=1)}).unbind(0)")
    elif kind == "batch":
        w(f"{x}, {y} = {w.linear()}(torch.cat([{x}, {y}], 0)).split({B}, 0)")
    elif kind == "interleave":
        z = w.let("z", f"{w.linear()}(torch.stack([{x}, {y}], 2).flatten(1, 2))")
        w(f"{x}, {y} = {z}[:, ::2], {z}[:, 1::2]")
    elif kind == "beside":
        f, h, v = w.cells(x)
        z = w.let("z", f"torch.cat([{x}.view({B}, {f}, {h}, {v}, {C}), {y}.reshape({B}, {f}, {h}, {v}, {C})], 3)")
        z = w.let("z", f"{w.linear()}({z}).flatten(1, 3)")
        w(f"{x}, {y} = ({z}.view({B}, {f}, {h}, 2, {v}, {C})[:, :, :, i].reshape({B}, {S}, {C}) for i in range(2))")
    elif kind == "flat":
        z = w.let("z", f"{w.linear()}(torch.cat([{x}.flatten(0, 1), {y}.flatten(0, 1)], 0))")
        w(f"{x}, {y} = {z}[:{B * S}].view({B}, {S}, {C}), {z}[{B * S}:].unflatten(0, ({B}, {S}))")
    elif kind == "channels":
        w(f"{x} = {x} + {w.linear(2 * C, C)}(torch.cat([{x}, {y}], -1))")
    else:
        w(f"{x} = {x} + 0.5 * {y}")


PAIRINGS = ("stack", "batch", "channels", "swap", "add", "interleave", "beside", "flat")


@op(1, one)
def save(w: Code, x: str) -> None:
    w(f"saved_{x} = {x}")
    w.saved[x] = w.size(x)


@op(4, lambda r, w: {"x": r.choice(sorted(w.saved)) if w.saved else "", "kind": r.choice(["add", "cat", "gate"])})
def restore(w: Code, x: str, kind: str) -> None:
    """A long skip connection."""
    require(x in w.saved and w.saved[x] == w.size(x))
    w({
        "add": lambda: f"{x} = {x} + saved_{x}",
        "cat": lambda: f"{x} = {w.linear(2 * w.C, w.C)}(torch.cat([{x}, saved_{x}], -1))",
        "gate": lambda: f"{x} = torch.lerp({x}, saved_{x}, {w.linear()}({x}).sigmoid())",
    }[kind]())  # fmt: skip


# ---- outputs -----------------------------------------------------------------------------------------------

FINISHES = ("plain", "head", "head", "unpatchify", "unpatchify", "shuffle", "transposed", "heads", "slice", "pooled",
            "flat", "select", "int", "adaln", "saved", "length", "input", "reversed", "sorted", "columns")  # fmt: skip


def draw_output(r: Rng, w: Code) -> Step:
    names = list(w.tokens)
    count = r.choice([1, 1, 1, 2, 2, 3])
    parts = [[r.choice(names), r.choice(FINISHES)] for _ in range(count)]
    form = "single" if count == 1 and r.random() < 0.5 else r.choice(["tuple", "list", "dict", "nested"])
    return {"parts": parts, "form": form}


@op(0, draw_output)
def output(w: Code, parts: list[list[str]], form: str) -> None:
    found = [finished(w, x, kind) for x, kind in parts]
    require(found)
    if form == "single":
        require(len(found) == 1)
        w.returned = found[0]
    elif form == "dict":
        w.returned = "{" + ", ".join(f'"out{i}": {e}' for i, e in enumerate(found)) + "}"
    else:
        inner = ", ".join(found)
        w.returned = {"tuple": f"({inner},)", "list": f"[{inner}]", "nested": f"([{inner}], None, 3)"}[form]


def finished(w: Code, x: str, kind: str) -> str:
    B, C, S = w.B, w.C, w.size(x)
    if kind in ("unpatchify", "shuffle"):
        f, h, v = w.cells(x)
        y = w.let("y", f"{w.linear(C, 12)}(F.layer_norm({x}, ({C},)))")
        if kind == "shuffle":
            return f"F.pixel_shuffle({y}.transpose(1, 2).reshape({B}, 12, {f * h}, {v}), 2)"
        return (
            f"{y}.view({B}, {f}, {h}, {v}, 3, 2, 2).permute(0, 4, 1, 2, 5, 3, 6).reshape({B}, 3, {f}, {2 * h}, {2 * v})"
        )
    if kind == "adaln":
        a, b = w.fresh("a"), w.fresh("b")
        w(f"{a}, {b} = {w.linear(C, 2 * C)}({w.cond()}).chunk(2, 1)")
        return f"{w.linear(C, 7)}(F.layer_norm({x}, ({C},)) * (1 + {a}[:, None]) + {b}[:, None])"
    if kind == "head":
        return f"{w.linear(C, 7)}({x})"
    if kind == "pooled":
        return pooled(w, x, "mean")
    if kind == "int":
        w.ordered = True
        return f"{x}.argmax(-1)"
    if kind == "saved":
        require(x in w.saved)
        return f"saved_{x} * 2"
    if kind == "input":
        require(w.inputs)
        return next(iter(w.inputs))
    if kind == "columns":
        f, h, v = w.cells(x)
        return f"{x}.view({B}, {f}, {h}, {v}, {C})[:, :, :, {v // 2}]"
    if kind == "slice":
        require(S > 2)
        return f"{x}[:, 1:-1]"
    return {
        "plain": x,
        "transposed": f"{x}.transpose(1, 2)",
        "heads": f"{x}.unflatten(-1, ({w.H}, {w.D}))",
        "flat": f"{x}.flatten(0, 1)",
        "select": f"{x}[:, {S // 2}]",
        "reversed": f"{x}.flip(1)",
        "sorted": f"{x}.sort(1)[0]",
        "length": f"torch.full(({B},), {x}.shape[1], device={x}.device)",
    }[kind]


# ---- programs ----------------------------------------------------------------------------------------------


def generate(seed: int) -> Program:
    r = Rng(seed)
    heads, head_dim = r.choice([(1, 8), (2, 4), (2, 8), (3, 4), (4, 4), (4, 6), (5, 4), (6, 4), (7, 2), (8, 4), (9, 2),
                                (10, 4), (12, 4), (12, 2), (8, 2)])  # fmt: skip
    dtype = r.choices(["float32", "float64", "bfloat16"], [16, 3, 1])[0]
    program = Program(seed, r.choice([1, 1, 2, 2, 3]), heads, head_dim, dtype, draw_degrees(r), [])
    for _ in range(r.choice([1, 1, 2, 2, 2, 3])):
        program = extended(r, program, "stream")
        if r.random() < 0.5:
            program = extended(r, program, "position")
    names = [n for n in OPS if OPS[n].weight]
    weights = [OPS[n].weight for n in names]
    program = extended(r, program, r.choice(["self_attention", "self_attention", "joint_attention"]))
    if program.steps[-1]["op"] in ("stream", "position"):
        program = extended(r, program, "self_attention")
    for _ in range(r.choice([1, 2, 2, 3, 3, 4, 5, 7])):
        program = extended(r, program, r.choices(names, weights)[0])
    return extended(r, program, "output")


def extended(r: Rng, program: Program, name: str) -> Program:
    """With one more step; without it where no draw fits."""
    for _ in range(8):
        with contextlib.suppress(Inapplicable):
            step = {"op": name, **OPS[name].draw(r, Code(program) if program.steps else _Empty(program))}
            longer = replace(program, steps=[*program.steps, step])
            code = Code(longer)
            require(not (code.ordered and program.dtype == "bfloat16"))
            return longer
    return program


class _Empty(Code):
    """A program before its first stream."""

    def __init__(self, program: Program) -> None:
        super().__init__(replace(program, steps=[{"op": "stream", "name": "_", "kind": "linear", "size": [2]}]))
        self.tokens, self.grid = {}, {}


def draw_degrees(r: Rng) -> dict[str, int]:
    ranks = r.choice([2, 2, 3, 4, 4, 5, 6, 7, 8])
    if r.random() < 0.6:
        return {"sp": ranks}
    if r.random() < 0.6:
        return {r.choice(["ulysses", "kv_gather", "ring"]): ranks}
    first = r.choice([2, 2, 3, 4])
    a, b = r.sample(["ulysses", "kv_gather", "ring"], 2)
    return {a: first, b: 2}


def build(program: Program) -> tuple[torch.nn.Module, list[Tensor]]:
    """The module and its inputs, in the program's dtype."""
    code = Code(program)
    text = HEADER + PRELUDE + code.source()
    name = f"<program {program.seed} {abs(hash(text)):x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict[str, Any] = {}
    exec(compile(text, name, "exec"), space)
    torch.manual_seed(0)
    model = space["Model"]().eval().requires_grad_(False)
    inputs = [eval(expression, {"torch": torch}) for expression in code.inputs.values()]
    return model, inputs


# ---- checks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """``kind``: right, refused, skipped, or what is wrong."""

    kind: str
    detail: str = ""
    distributed: int = 0
    local: int = 0
    replicated: int = 0
    regathers: int = 0

    @property
    def failed(self) -> bool:
        return self.kind not in ("right", "refused", "skipped")


def check(program: Program, seconds: int = 60) -> Outcome:
    torch._dynamo.reset()
    dtype = getattr(torch, program.dtype)
    try:
        model, inputs = build(program)
        wide = model.double()
        exact = wide(*cast(inputs, torch.float64))
        rounded, given = model.to(dtype), cast(inputs, dtype)
        eager = rounded(*copy.deepcopy(given))
    except Exception as error:
        return Outcome("skipped", f"eager: {type(error).__name__}: {error}")
    try:
        with at_most(seconds):
            run = simulate(rounded, given, **program.degrees)
    except spcompile.SPError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome(f"crash {type(error).__name__}", f"{error}")
    exchanges = [entry.exchange for entry in run.report.attention]
    counts = {
        "local": exchanges.count("local"),
        "replicated": exchanges.count("replicated"),
        "distributed": len([e for e in exchanges if e not in ("local", "replicated")]),
        "regathers": len(run.report.regathers),
    }
    for rank, out in enumerate(run.outputs):
        kind, detail = compared(out, eager, exact)
        if kind == "wrong value" and dtype != torch.float64 and not check(replace(program, dtype="float64")).failed:
            return Outcome("skipped", f"rounding: {detail}", **counts)
        if kind != "right":
            return Outcome(kind, f"rank {rank}: {detail}", **counts)
    return Outcome("right", **counts)


def cast(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype) if x.is_floating_point() else x.clone() for x in inputs]


def compared(out: Any, eager: Any, exact: Any) -> tuple[str, str]:
    leaves, tree = pytree.tree_flatten(out)
    wanted, shape = pytree.tree_flatten(eager)
    if tree != shape:
        return "structure", f"{tree}, not {shape}"
    for i, (a, b, best) in enumerate(zip(leaves, wanted, pytree.tree_leaves(exact), strict=True)):
        if not isinstance(b, Tensor):
            if a != b:
                return "structure", f"leaf {i}: {a!r}, not {b!r}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return "structure", f"leaf {i}: {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}"
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return "wrong value", f"leaf {i}: {int((a != b).sum())} of {b.numel()} integers"
            continue
        best = best.double()
        scale, own = best.abs().max().item(), (b.double() - best).abs().max().item()
        if not math.isfinite(scale) or not math.isfinite(own):
            return "skipped", f"leaf {i} is not finite"
        eps = torch.finfo(b.dtype).eps
        if own > 1e4 * eps * scale:
            return "skipped", f"leaf {i}: chaotic, {own:.1e} of {scale:.1e}"
        slack = {torch.float32: 1e-5, torch.float64: 1e-10}.get(b.dtype, 16 * eps)
        error = (a.double() - b.double()).abs().max().item()
        if not error <= 4 * own + slack * scale:
            return "wrong value", f"leaf {i}: off by {error:.1e} of {scale:.1e}, own rounding {own:.1e}"
    return "right", ""


class Hang(Exception):
    """A run took too long."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- shrinking ---------------------------------------------------------------------------------------------

DEFAULTS = {
    "norm": "none", "mod": "none", "how": "sdpa", "project": "fused", "layout": "view", "qk": "none", "rope": "none",
    "mask": "none", "keys": "all", "merge": "flatten", "gqa": "flag", "dtype": "float64",
}  # fmt: skip


def shrink(program: Program, kind: str, runs: int = 60) -> Program:
    """A smaller program that fails the same way."""
    tried: set[str] = set()
    left = runs

    def fails(candidate: Program) -> bool:
        nonlocal left
        key = json.dumps(asdict(candidate), sort_keys=True)
        if left <= 0 or key in tried:
            return False
        tried.add(key)
        try:
            Code(candidate)
        except (Inapplicable, KeyError, ZeroDivisionError):
            return False
        left -= 1
        return check(candidate).kind == kind

    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate_of in (fewer_steps, simpler, smaller_sizes):
            again = True
            while again and left > 0:
                again = False
                for candidate in candidate_of(program):
                    if fails(candidate):
                        program, again, smaller = candidate, True, True
                        break
    return program


def fewer_steps(program: Program) -> Iterator[Program]:
    steps, n = program.steps, len(program.steps)
    for size in (n // 2, n // 4, 1):
        if size >= 1:
            for start in range(n - size, -1, -size):
                yield replace(program, steps=steps[:start] + steps[start + size :])
    for i, step in enumerate(steps):
        if step["op"] == "output" and len(step["parts"]) > 1:
            for part in step["parts"]:
                yield replace(program, steps=[*steps[:i], {**step, "parts": [part]}, *steps[i + 1 :]])


def simpler(program: Program) -> Iterator[Program]:
    """All options at their defaults, then one by one."""
    if program.dtype != "float64":
        yield replace(program, dtype="float64")
    for i, step in enumerate(program.steps):
        for group in ("attn", "pre"):
            if group not in step:
                continue
            options = step[group]
            plain = {k: DEFAULTS.get(k, v) for k, v in options.items()}
            if "kv_heads" in plain:
                plain["kv_heads"] = program.heads
            singles = [{**options, k: v} for k, v in plain.items() if options[k] != v]
            for changed in [plain, *singles] if len(singles) > 1 else singles:
                steps = [*program.steps[:i], {**step, group: changed}, *program.steps[i + 1 :]]
                yield replace(program, steps=steps)


def smaller_sizes(program: Program) -> Iterator[Program]:
    if program.ranks > 2 or "sp" not in program.degrees:
        yield replace(program, degrees={"sp": 2})
        yield replace(program, degrees={"sp": program.ranks})
        for name, n in program.degrees.items():
            yield replace(program, degrees={name: 2})
            yield replace(program, degrees={**program.degrees, name: max(1, n - 1)})
    for name in ("batch", "heads", "head_dim"):
        value = getattr(program, name)
        for less in {1 if name == "batch" else 2, value // 2}:
            if 0 < less < value and (name != "head_dim" or less % 2 == 0):
                changed = replace(program, **{name: less})
                yield replace(changed, steps=[with_kv_heads(s, program.heads, changed.heads) for s in program.steps])
    for i, step in enumerate(program.steps):
        for key, value in step.items():
            if key == "size":
                options = [[*value[:d], n, *value[d + 1 :]] for d in range(len(value)) for n in fewer(value[d])]
            elif isinstance(value, int):
                options = fewer(value)
            else:
                continue
            for less in options:
                yield replace(program, steps=[*program.steps[:i], {**step, key: less}, *program.steps[i + 1 :]])


def fewer(n: int) -> list[int]:
    return sorted({m for m in (1, 2, 3, n // 2, n - 1) if 0 < m < n})


def with_kv_heads(step: Step, before: int, after: int) -> Step:
    if "attn" not in step:
        return step
    kv = step["attn"]["kv_heads"]
    return {**step, "attn": {**step["attn"], "kv_heads": after if kv == before else 1}}


# ---- counts ------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """``good`` are right programs with attention that no rank computes whole."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Program, Outcome]] = field(default_factory=list)

    def add(self, program: Program, outcome: Outcome) -> None:
        self.counts["failed" if outcome.failed else outcome.kind] += 1
        if outcome.failed:
            self.failures.append((program, outcome))
        if outcome.kind == "right" and outcome.distributed + outcome.local:
            self.counts["right and distributed"] += 1
            self.counts["exchanges"] += outcome.distributed
            self.counts["local"] += outcome.local
            self.counts["replicated"] += outcome.replicated
            self.counts["regathers"] += outcome.regathers
        if outcome.kind in ("refused", "skipped"):
            self.refusals[f"{outcome.kind}: {outcome.detail.splitlines()[0][-150:]}"] += 1

    @property
    def total(self) -> int:
        return sum(self.counts[k] for k in ("right", "refused", "skipped", "failed"))


def sweep(seeds: range, until: float = math.inf, show: bool = False) -> Tally:
    tally = Tally()
    for seed in seeds:
        if time.monotonic() > until:
            break
        program = generate(seed)
        outcome = check(program)
        if show and outcome.failed:
            print(f"seed {seed}: {outcome.kind}: {outcome.detail[:300]}", flush=True)
        tally.add(program, outcome)
    return tally


def describe(program: Program, outcome: Outcome) -> str:
    return f"# seed {program.seed}: {outcome.kind}: {outcome.detail[:600]}\n{script(program)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--shrink", type=int, default=60, help="runs spent on each failure")
    parser.add_argument("--show", action="store_true", help="print every program")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    start = time.monotonic()
    seeds = range(options.seed, options.seed + options.count)
    if options.show:
        for seed in seeds:
            print(script(generate(seed)))
    print(spcompile.__file__)
    tally = sweep(seeds, start + options.seconds, show=True)
    print(f"{tally.total} programs in {time.monotonic() - start:.0f} s: {dict(tally.counts)}")
    for text, n in tally.refusals.most_common(15):
        print(f"{n:5} {text}")
    for program, outcome in tally.failures:
        small = shrink(program, outcome.kind, options.shrink)
        print(describe(small, check(small)), flush=True)


if __name__ == "__main__":
    main()
