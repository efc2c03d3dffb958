"""Steps that begin a stream of tokens, and give it positions."""

from __future__ import annotations

import math

from graphs.program import Code, Rng, Step, kinds, op, require


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
