"""Steps with attention, spelled in many ways, and what stands around a sub-layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphs.program import Code, Rng, Step, one, op, require, two

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
