"""What a program returns."""

from __future__ import annotations

from graphs.program import Code, Rng, Step, op, require
from graphs.tokens import pooled

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
