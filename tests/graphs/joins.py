"""Steps that join, part and pair streams."""

from __future__ import annotations

from graphs.program import Code, one, op, require, two


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
