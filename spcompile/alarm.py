"""Calls of graphs are counted, and a rank in a call that another will not join is freed, between ranks on CPUs.

One rank compiles a new graph and gives up waiting, or raises in the middle of a call; another is in that call and waits
in an exchange that nobody joins. So every rank has a thread that sleeps until it is called through the group's store,
for a call by its number. It ends that call's exchange: in memory that the ranks share as if it had never begun, else by
breaking the group's connections. A call of a graph costs some additions for that.

All ranks count alike: each call of a graph that began, and each compilation that failed.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from spcompile.errors import RankMismatchError, VerificationError
from spcompile.ops import hostmem, running, wire

HEARD_S = 3.0
"""How long a rank waits until those it called for have left the call."""
_POLL_S = 0.01
_FOREVER = timedelta(days=1000)
BROKEN = ". The connections of this process group are broken; go on with a new one"


class Alarm:
    """Of one group.

    ``number`` counts; ``inside`` says that this rank is in the call of that number. ``called_off`` is the last call
    that another rank has left or will not join, ``reason`` why, and ``ended`` is set when this rank was freed from it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)  # a group that is destroyed must take its store with it
        self.rank, self.size = group.rank(), group.size()
        self.number, self.inside = 0, False
        self.called_off, self.reason, self.ended = 0, "", ""
        self.stopped = False
        store: Any = _get_process_group_store(group)
        self.store: Any = store.clone()  # a connection waits for one thing at a time: one to wait, one for the rest
        self.thread = Thread(target=self.watch, args=(store.clone(),), daemon=True, name="spcompile alarm")
        self.store.set(_key(self.rank, "on"), "")
        self.thread.start()
        weakref.finalize(group, self.stop)

    def stop(self) -> None:
        """End the thread, with its group or at exit: one that waits for a store would take the interpreter down."""
        self.stopped = True
        if self.thread.is_alive():
            with contextlib.suppress(dist.DistError, RuntimeError):  # no store, no wait
                self.store.set(_key(self.rank), "")
            self.thread.join(1.0)
        self.store = None  # what Dynamo keeps of this must not keep a connection

    # the thread

    def watch(self, store: dist.Store) -> None:
        """What the thread does. ``store`` is its own connection."""
        key = _key(self.rank)
        while True:
            try:
                store.wait([key], _FOREVER)
                message = store.get(key).decode()
                store.delete_key(key)
            except (dist.DistError, RuntimeError):  # the store is gone, and the group with it
                return
            group = self.group()
            if self.stopped or group is None:
                return
            told = json.loads(message)
            if told["number"] > self.called_off:
                self.called_off, self.reason = told["number"], told["reason"]
            self.end(group)
            with contextlib.suppress(dist.DistError, RuntimeError):
                store.set(_key(self.rank, "heard"), "")
            del group

    def end(self, group: dist.ProcessGroup) -> None:
        """End the call that was called off, if this rank is in it: when it comes to wait for others."""
        parts = (group, *wire.sub_groups(group))
        while self.inside and self.number <= self.called_off and not self.stopped:
            self.ended = self.reason
            if any(hostmem.interrupt(part) for part in parts):
                return
            if running.in_sockets():
                self.ended = self.reason + BROKEN
                for part in parts:
                    _break(part)
                return
            time.sleep(_POLL_S)

    # the rank

    def guard(self, compiled: Callable[..., Any], graph: int) -> Callable[..., Any]:
        """``compiled``, whose calls are counted and can be ended. ``graph`` tells it from others, alike on all."""

        def call(*inputs: Any) -> Any:
            self.number += 1
            self.ended = ""
            if self.number <= self.called_off:
                raise RankMismatchError("SP307", self.reason)
            self.inside = True
            try:
                with running.within(graph, self.number):
                    return compiled(*inputs)
            except BaseException as error:
                self.inside = False
                self.failed(error)
                raise
            finally:
                self.inside = False

        return call

    def failed(self, error: BaseException) -> None:
        """A call raised: settle what was on its way, and tell the others unless it was they who ended it."""
        group = self.group()
        if group is None:
            return
        for part in (group, *wire.sub_groups(group)):
            hostmem.settle(part)
        if isinstance(error, (RankMismatchError, VerificationError)):
            return  # on all alike, or after the last exchange
        if self.ended and isinstance(error, RuntimeError):
            raise RankMismatchError("SP307", self.ended) from error
        why = f"rank {self.rank} of the group raised in the middle of this call: {type(error).__name__}: {error}"
        self.call_for([r for r in range(self.size) if r != self.rank], why, wait=isinstance(error, Exception))
        if isinstance(error, hostmem.OutOfStep):
            raise RankMismatchError("SP307", f"{error}. {_SAME_CALLS}") from error

    def call_for(self, ranks: Sequence[int], reason: str, wait: bool = True) -> None:
        """Free these ranks from all calls up to this rank's number, and wait until they have left them."""
        message = json.dumps({"number": self.number, "reason": reason})
        with contextlib.suppress(dist.DistError, RuntimeError):  # no store, nobody to tell
            ranks = [r for r in ranks if self.store.check([_key(r, "on")])]
            heard = [_key(r, "heard") for r in ranks]
            for rank in ranks:
                self.store.set(_key(rank), message)
            if heard and wait:
                self.store.wait(heard, timedelta(seconds=HEARD_S))
            for key in heard:
                self.store.delete_key(key)


_SAME_CALLS = (
    "Every rank must make the same calls in the same order, also after one of them has raised in the middle of a call"
)

_alarms: weakref.WeakKeyDictionary[dist.ProcessGroup, Alarm] = weakref.WeakKeyDictionary()


def alarm_of(group: dist.ProcessGroup) -> Alarm | None:
    """The alarm of a group; None if its ranks wait elsewhere than on their CPUs."""
    if dist.get_backend(group) != "gloo":
        return None
    if group not in _alarms:
        _alarms[group] = Alarm(group)
    return _alarms[group]


def count_failure(group: dist.ProcessGroup, missing: Sequence[int] = (), reason: str = "") -> None:
    """A compilation failed on this rank, and so it does on all but those ``missing``, which are freed."""
    alarm = alarm_of(group)
    if alarm is not None:
        alarm.number += 1
        if missing:
            alarm.call_for(missing, reason)


def _key(rank: int, what: str = "call") -> str:
    return f"spcompile/alarm/{rank}/{what}"


def _break(group: dist.ProcessGroup) -> None:
    """End all that a group waits for: a receive that times out closes gloo's connections."""
    backend: Any = group._get_backend(torch.device("cpu"))
    peer = (group.rank() + 1) % group.size()
    with contextlib.suppress(RuntimeError):  # as it should
        backend.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


_UNUSED_TAG = 0x5C0
