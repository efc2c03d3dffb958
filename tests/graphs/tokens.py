"""Steps within a token, and those that mix tokens without attention."""

from __future__ import annotations

import math

from graphs.attention import draw_pre, enter, leave
from graphs.program import Code, Rng, Step, kinds, one, op, require


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


@op(2.5, kinds("depthwise", "dense", "glu", "volume", "merge", "upsample", "causal", "norm", "down", "pool", "pixels"))
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
    if kind in ("down", "pool", "pixels"):
        require(h % 2 == 0 and v % 2 == 0 and S >= 8)
        down = {
            "down": lambda: w.module(f"nn.Conv2d({C}, {C}, 3, stride=2, padding=1)"),
            "pool": lambda: "F.avg_pool2d",
            "pixels": lambda: "F.pixel_unshuffle",
        }[kind]()
        y = f"{x}.reshape({B * f}, {h}, {v}, {C}).permute(0, 3, 1, 2)"
        y = w.let("y", f"{down}({y}{'' if kind == 'down' else ', 2'}).permute(0, 2, 3, 1)")
        w(f"{x} = {w.linear(4 * C if kind == 'pixels' else C, C)}({y}).reshape({B}, {S // 4}, {C})")
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


@op(1.5, kinds("group", "instance", "batch", "both", "manual", "softmax", "channels first"))
def normed(w: Code, x: str, kind: str) -> None:
    """Statistics over tokens, or over channels that come first."""
    S, C = w.size(x), w.C
    w(f"{x} = {x} + 0.5 * " + {
        "group": lambda: f"F.group_norm({x}.transpose(1, 2), {w.H}).transpose(1, 2)",
        "instance": lambda: f"F.instance_norm({x}.mT).mT" if S > 1 else x,
        "batch": lambda: f"F.batch_norm({x}.mT, None, None, training=True).mT" if w.B * S > 1 else x,
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
