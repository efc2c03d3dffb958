"""The store protocol by which ranks agree, with two ranks as threads: however they come, they end alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import spcompile
from spcompile.agreement import agree, or_decline


class Group:
    """One rank's view of a group of two."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self._rank, self.store, self.group_name = rank, store, "two"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2


class Slow:
    """A store whose ``compare_set`` waits for ``until`` before it is called; ``reached``: it would be called now."""

    def __init__(self, store: dist.Store, until: threading.Event) -> None:
        self.store, self.until, self.reached = store, until, threading.Event()

    def __getattr__(self, name: str) -> Any:
        if name == "compare_set":
            self.reached.set()
            assert self.until.wait(10)
        return getattr(self.store, name)


@pytest.fixture
def ranks():
    """Both ranks' groups, on one store."""
    store = dist.HashStore()
    patches = (
        mock.patch("spcompile.agreement._get_process_group_store", lambda group: group.store),
        mock.patch("spcompile.agreement.alarm_of", return_value=None),
        mock.patch("spcompile.alarm.alarm_of", return_value=None),
        mock.patch("torch.distributed.get_backend", return_value="gloo"),
    )
    for p in patches:
        p.start()
    yield Group(0, store), Group(1, store)
    for p in patches:
        p.stop()


def outcome(call: Callable[[], None]) -> str:
    try:
        call()
    except spcompile.SPError as error:
        return error.code
    return "agreed"


def together(*calls: Callable[[], None]) -> list[str]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def both(ranks: tuple[Group, Group], *facts: str) -> list[str]:
    pairs = zip(ranks, facts, strict=True)
    return together(*(lambda g=g, f=f: agree(g, {"graph": f}, "graph 0", 10) for g, f in pairs))


def test_equal_facts_are_agreed_on_and_others_are_not(ranks):
    assert both(ranks, "a", "a") == ["agreed", "agreed"]
    assert both(ranks, "a", "b") == ["SP302", "SP302"]
    assert both(ranks, "a", "a") == ["agreed", "agreed"]


def test_who_comes_after_the_other_has_given_up_meets_it_in_its_next_attempt(ranks):
    assert outcome(lambda: agree(ranks[0], {}, "graph 0", 0.1)) == "SP301"
    assert outcome(lambda: agree(ranks[0], {}, "graph 0", 0.1)) == "SP301"
    assert both(ranks, "a", "a") == ["agreed", "agreed"]


def test_one_that_comes_as_the_other_gives_up_ends_as_that_one_does(ranks):
    """Rank 1 has seen both keys; rank 0, which has not, is the first to say what came of it."""
    given_up = threading.Event()
    real = ranks[0].store
    other = Slow(real, given_up)

    class GivesUp(Slow):
        def __getattr__(self, name: str) -> Any:
            if name == "wait":
                return mock.Mock(side_effect=RuntimeError("in time"))
            if name == "check":
                return lambda keys: real.check(keys) and not keys[0].endswith("/1")
            return super().__getattr__(name)

    def first() -> None:
        try:
            agree(ranks[0], {}, "graph 0", 0.1)
        finally:
            given_up.set()

    ranks[0].store, ranks[1].store = GivesUp(real, other.reached), other
    assert together(first, lambda: agree(ranks[1], {}, "graph 0", 10)) == ["SP301", "SP301"]
    ranks[0].store = ranks[1].store = real
    assert both(ranks, "a", "a") == ["agreed", "agreed"]


def test_one_whose_time_is_up_as_the_other_agrees_agrees_too(ranks):
    """Rank 0 times out, but rank 1 has seen both by then and says so first."""
    agreed = threading.Event()
    real = ranks[0].store

    class TimesOut(Slow):
        def __getattr__(self, name: str) -> Any:
            if name == "wait":
                real.wait([f"spcompile/0/{r}" for r in (0, 1)], timedelta(seconds=10))
                return mock.Mock(side_effect=RuntimeError("in time"))
            if name == "check":  # as it looked a moment ago
                return lambda keys: real.check(keys) and not keys[0].endswith("/1")
            return super().__getattr__(name)

    def second() -> None:
        agree(ranks[1], {}, "graph 0", 10)
        agreed.set()

    ranks[0].store = TimesOut(real, agreed)
    assert together(lambda: agree(ranks[0], {}, "graph 0", 0.1), second) == ["agreed", "agreed"]


def test_a_refusal_is_told_to_the_other(ranks):
    def refuse() -> None:
        with or_decline(ranks[1]):
            raise spcompile.UnsupportedGraphError("SP208", "dropout")

    assert together(lambda: agree(ranks[0], {}, "graph 0", 10), refuse) == ["SP303", "SP208"]
    assert both(ranks, "a", "a") == ["agreed", "agreed"]


def test_what_is_said_while_compiling_is_no_answer_to_another_graph(ranks):
    """Rank 0 waits for rank 1 to finish compiling and gives up; rank 1 then finds that it has."""
    assert both(ranks, "a", "a") == ["agreed", "agreed"]
    with mock.patch("spcompile.agreement._timeout_of", return_value=timedelta(seconds=0.1)):
        assert outcome(lambda: agree(ranks[0], {}, "graph 0", compiled=True)) == "SP301"
        assert outcome(lambda: agree(ranks[1], {}, "graph 0", compiled=True)) == "SP301"
    assert both(ranks, "a", "a") == ["agreed", "agreed"]
