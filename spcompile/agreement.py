"""What ranks must agree on: the graph before it first runs, and the values they are given.

Graphs are compared through the group's store, not by a collective: a rank that is busy elsewhere, or gone, must not
hang the others. Values are compared by digests, one small all-gather.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.distributed.distributed_c10d import _get_process_group_store

from spcompile.alarm import alarm_of, count_failure
from spcompile.capture import parts_of
from spcompile.errors import RankMismatchError, SPError, VerificationError
from spcompile.ops import running

_REFUSED = "refused"
"""The fact that stands for why a rank has no graph."""
_AGREED, _GIVEN_UP = "agreed", "given up"

_turns: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many agreements a group has had. One that was given up counts too: who comes late passes over it."""


def agree(
    group: dist.ProcessGroup,
    facts: Mapping[str, str],
    what: str,
    timeout: float | None = None,
    *,
    compiled: bool = False,
    described: Callable[[], Sequence[str]] | None = None,
) -> None:
    """Compare ``facts`` with those of all ranks of the group. Every rank gets here, or an error.

    Args:
        group: ranks that compile the same graphs in the same order.
        facts: what must be equal, by name.
        what: names the graph in errors.
        timeout: seconds to wait for the others; None: the group's own timeout.
        compiled: the second time for a graph: all ranks have come, and compile.
        described: the graph as lines, of which the first that differs is told.
    Raises:
        RankMismatchError: on every rank, with what differs; or on those that are here, if a rank does not come.
    """
    if dist.get_backend(group) == "fake":
        return
    store, size = _get_process_group_store(group), group.size()
    turn = _come(group, {**facts}, passes_over=not compiled)
    keys = [_key(turn, r) for r in range(size)]
    wait = timedelta(seconds=timeout) if timeout is not None and not compiled else _timeout_of(group)
    try:
        store.wait(keys, wait)
        all_came = True
    except RuntimeError:
        all_came = False
    missing = [] if all_came else [r for r, key in enumerate(keys) if not store.check([key])]
    verdict = store.compare_set(_key(turn, "verdict"), "", _GIVEN_UP if missing else _AGREED).decode()
    if verdict == _GIVEN_UP:
        _give_up(group, missing, what, wait, compiled)
    told = [json.loads(store.get(key)) for key in keys]
    alarm = alarm_of(group)
    if alarm is not None:
        alarm.number = max(t["number"] for t in told)
    everyone = [t["facts"] for t in told]
    if turn:  # all have read the one before, since all are here
        store.delete_key(_key(turn - 1, group.rank()))
    refused = [(r, facts[_REFUSED]) for r, facts in enumerate(everyone) if _REFUSED in facts]
    if refused:
        count_failure(group)
        first, why = refused[0]
        raise RankMismatchError("SP303", f"rank {first} of the group cannot run {what}, so no rank does: {why}")
    if any(other != everyone[0] for other in everyone):
        count_failure(group)
        details = _first_difference(group, turn, everyone, described) if described is not None else ""
        raise RankMismatchError(
            "SP302",
            f"the ranks compiled different graphs for {what}:\n{_differences(everyone)}\n{details}"
            "Call the model with inputs of the same shapes and dtypes, in the same modes and with the same options on "
            "every rank, in the same order",
        )


def _come(group: dist.ProcessGroup, facts: dict[str, str], passes_over: bool) -> int:
    """Say that this rank is here, with its facts. Returns which agreement of the group this is."""
    store, turn = _get_process_group_store(group), _turns.get(group, 0)
    while passes_over and store.check([verdict := _key(turn, "verdict")]) and store.get(verdict) == _GIVEN_UP.encode():
        turn += 1
    _turns[group] = turn + 1
    alarm = alarm_of(group)
    number = alarm.number if alarm is not None else 0
    store.set(_key(turn, group.rank()), json.dumps({"facts": facts, "number": number}))
    return turn


def _key(turn: int, what: int | str) -> str:
    return f"spcompile/{turn}/{what}"


def _give_up(group: dist.ProcessGroup, missing: Sequence[int], what: str, wait: timedelta, compiled: bool) -> NoReturn:
    """Raise for ranks that did not come, and free those from the calls they are in."""
    waited = f"rank {group.rank()} of the group waited {wait.total_seconds():g} s for this rank to compile {what}"
    count_failure(group, missing, f"{waited}, and gave up while this rank ran a graph that it has already. {_SAME}")
    if not missing:
        text = f"another rank of the group gave up waiting for {what} before this one came. {_SAME}"
    elif compiled:
        text = f"rank {_list(missing)} of the group did not finish compiling {what} within {wait.total_seconds():g} s"
    else:
        text = (
            f"rank {_list(missing)} of the group did not compile {what} within {wait.total_seconds():g} s: it runs a "
            "graph that it has already, still compiles, is past Dynamo's recompile limit, has sp=1, failed, or never "
            f"called the model. {_SAME}"
        )
    raise RankMismatchError("SP301", text)


_SAME = "Every rank must make the same calls in the same order"


def _first_difference(
    group: dist.ProcessGroup,
    turn: int,
    everyone: Sequence[Mapping[str, str]],
    described: Callable[[], Sequence[str]],
) -> str:
    """The first line of the graph that rank 0 and the first rank unlike it do not share; a line of text, or none."""
    store = _get_process_group_store(group)
    pair = (0, next(r for r, facts in enumerate(everyone) if facts != everyone[0]))
    keys = [_key(turn, f"{r} described") for r in pair]
    if group.rank() in pair:
        store.set(keys[pair.index(group.rank())], "\n".join(described()))
    store.wait(keys, _timeout_of(group))
    a, b = (store.get(key).decode().split("\n") for key in keys)
    for mine, other in zip_longest(a, b, fillvalue="nothing"):
        if mine != other:
            return f"  first in: {mine} on rank {pair[0]}; {other} on rank {pair[1]}\n"
    return ""


@contextlib.contextmanager
def or_decline(group: dist.ProcessGroup, *, compiled: bool = False) -> Iterator[None]:
    """Whatever is raised inside is told to the others too, so that none waits for this rank."""
    try:
        yield
    except Exception as error:
        if dist.get_backend(group) != "fake":
            reason = str(error) if isinstance(error, SPError) else f"{type(error).__name__}: {error}"
            _come(group, {_REFUSED: reason}, passes_over=not compiled)
            count_failure(group)
        raise


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):
            return group._get_backend(torch.device(device)).options._timeout
    return timedelta(minutes=30)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _differences(everyone: Sequence[Mapping[str, str]]) -> str:
    """A line for each fact that differs: who has what."""
    lines = []
    for name in sorted({name for facts in everyone for name in facts}):
        by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            by_value.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(by_value) > 1:
            told = "; ".join(f"{value} on rank {_list(ranks)}" for value, ranks in by_value.items())
            lines.append(f"  {name}: {told}")
    return "\n".join(lines)


# ---- values


def digest(x: Tensor) -> Tensor:
    """A 64-bit digest of a tensor's bytes, in order; int64 scalar on the tensor's device. NaN counts like any bits."""
    x = x.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    raw = x.contiguous().view(-1).view(torch.uint8) if x.numel() else x.new_zeros(1, dtype=torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for number, part in enumerate(raw.split(_BLOCK)):
        padded = torch.nn.functional.pad(part, (0, -part.numel() % 8)).view(torch.int64)
        places = torch.arange(1, 2 * padded.numel(), 2, dtype=torch.int64, device=x.device) * _ODD
        total = total * _ODD + ((padded ^ (padded >> 29)) * places).sum() + number
    return total


_BLOCK = 1 << 26
"""Bytes that are looked at together."""
_ODD = 0x9E3779B97F4A7C1 | 1


class SameInputs:
    """Calls ``compiled``, and compares the inputs of all ranks before the first call, or before each.

    ``names`` are those to compare, by place, as the user knows them. ``draws``: the graph draws random numbers, so
    generators count.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        group: dist.ProcessGroup,
        names: Mapping[int, str],
        draws: bool,
        always: bool,
    ) -> None:
        self.compiled, self.names, self.draws, self.always = compiled, names, draws, always
        self.group = weakref.ref(group)  # what Dynamo keeps must not keep the group
        self.checked = False

    def __call__(self, *inputs: Any) -> Any:
        if self.always or not self.checked:
            self.compare(inputs)
            self.checked = True
        return self.compiled(*inputs)

    def compare(self, inputs: Sequence[Any]) -> None:
        """Raises `RankMismatchError` on every rank if an input differs."""
        pairs = [(name, part) for i, name in self.names.items() for part in parts_of(inputs[i])]
        named = [(n, x) for n, x in pairs if isinstance(x, Tensor)]
        tensors = [x for _, x in named]
        names = [n for n, _ in named]
        if self.draws:
            names.append(_GENERATOR)
            tensors.append(_generator_state(tensors))
        if not tensors:
            return
        group = self.group()
        if group is None:
            raise RuntimeError("the process group that this graph was compiled for is gone: call torch._dynamo.reset()")
        device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
        mine = torch.stack([digest(x).to(device) for x in tensors])
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        with running.sockets():
            dist.all_gather(everyone, mine, group=group)
        differ = [i for i, name in enumerate(names) if any(other[i] != everyone[0][i] for other in everyone)]
        if differ:
            weights = [isinstance(x, torch.nn.Parameter) for x in tensors]
            raise RankMismatchError(*_unequal(names, differ, everyone, weights[differ[0]]))


_GENERATOR = "the random generator"


def _generator_state(tensors: Sequence[Tensor]) -> Tensor:
    cuda = any(x.is_cuda for x in tensors)
    return torch.cuda.get_rng_state() if cuda else torch.get_rng_state()


def _unequal(names: Sequence[str], differ: Sequence[int], everyone: Sequence[Tensor], weight: bool) -> tuple[str, str]:
    """The code and the text of the error."""
    first = differ[0]
    groups: dict[int, list[int]] = {}
    for rank, values in enumerate(everyone):
        groups.setdefault(int(values[first]), []).append(rank)
    ranks = " / ".join(f"rank {_list(r)}" for r in groups.values())
    others = f" (and {len(differ) - 1} more: {', '.join(names[i] for i in differ[1:4])})" if len(differ) > 1 else ""
    if names[first] == _GENERATOR:
        return "SP305", (
            f"the model draws random numbers, and the generators of {ranks} differ: every rank would draw its own. "
            "Call torch.manual_seed with the same seed on every rank before the model, or draw outside and pass it in"
        )
    if weight or names[first].startswith("model."):
        help = "Load the same checkpoint, or call torch.manual_seed with the same seed, before the model is built"
    else:
        help = (
            "Every rank must pass the same full tensor. If it is noise, draw it with the same seed on every rank "
            "(torch.manual_seed(0), or generator=torch.Generator().manual_seed(0)), or draw it once and "
            "torch.distributed.broadcast it"
        )
    return (
        "SP304",
        f"`{names[first]}`{others} differs between ranks: {ranks}. {help}. check='off' skips this comparison",
    )


def input_names(dynamo: fx.GraphModule) -> list[str]:
    """Dynamo's inputs as the user knows them: ``hidden_states``, ``model.proj.weight``."""
    return [_name_of(n) for n in dynamo.graph.find_nodes(op="placeholder")]


def _name_of(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    text = source.name if source is not None else node.name
    text = text() if callable(text) else text
    for found, put in (("L['self']", "model"), ("._modules", ""), ("._parameters", ""), ("._buffers", "")):
        text = text.replace(found, put)
    text = text[3:].replace("']", "", 1) if text.startswith(("L['", "G['")) else text
    return text.replace("['", ".").replace("']", "")


# ---- against the unsharded graph


class Verified:
    """Calls ``compiled``; the first call also runs ``whole``, the graph as it was, and compares.

    ``keep(error)`` gets the largest difference as a share of the largest value.
    """

    def __init__(self, compiled: Callable[..., Any], whole: Callable[..., Any], keep: Callable[[float], None]) -> None:
        self.compiled, self.whole, self.keep = compiled, whole, keep
        self.done = False

    def __call__(self, *inputs: Any) -> Any:
        if self.done:
            return self.compiled(*inputs)
        copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in inputs]
        out = self.compiled(*inputs)
        want = self.whole(*copies)
        self.done = True
        pairs = zip(pytree.tree_leaves(out), pytree.tree_leaves(want), strict=True)
        for index, (got, expected) in enumerate(p for p in pairs if isinstance(p[1], Tensor)):
            self.compare(index, got, expected)
        return out

    def compare(self, index: int, got: Tensor, want: Tensor) -> None:
        if not want.numel():
            return
        if want.is_complex():
            got, want = torch.view_as_real(got), torch.view_as_real(want)
        a, b = got.double(), want.double()
        scale = float(b.abs().nan_to_num(0.0, 0.0, 0.0).max()) or 1.0
        error = float(((a - b).abs() / scale).nan_to_num(0.0).max())
        self.keep(error)
        bound = TOLERANCE.get(want.dtype, 0.0)
        if error > bound or not torch.equal(a.isnan(), b.isnan()):
            raise VerificationError(
                "SP306",
                f"output {index} differs from the unsharded graph by {error:.1e} of its largest value; {bound:.0e} is "
                f"rounding in {want.dtype}. This is a defect of spcompile; please report it, with dump= of the graph",
            )


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}
"""Largest difference between two orders of summing, as a share of the largest value; other dtypes must be equal."""
