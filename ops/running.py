"""Which call of which graph this rank is in, so that exchanges of different calls are told apart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _State(threading.local):
    call = (0, 0)


_state = _State()
_in_sockets = 0


def call() -> tuple[int, int]:
    """A number for the graph, and how many calls of graphs there were before on this group; (0, 0) outside of one."""
    return _state.call


@contextmanager
def within(graph: int, number: int) -> Iterator[None]:
    """In a call of a graph."""
    before, _state.call = _state.call, (graph, number)
    try:
        yield
    finally:
        _state.call = before


@contextmanager
def sockets() -> Iterator[None]:
    """While this rank may wait for others in a collective of c10d."""
    global _in_sockets
    _in_sockets += 1
    try:
        yield
    finally:
        _in_sockets -= 1


def in_sockets() -> bool:
    """Does a thread of this rank wait in a collective of c10d?"""
    return _in_sockets > 0
