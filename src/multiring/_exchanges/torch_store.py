"""torchrun's own store. It is the only module outside the adapters that imports torch, once it is used.

A store may live longer than a run of the ranks: after a restart, and where hosts join or leave, the ranks of the next
run can find what the former run has left. So a rank draws a number and asks with it; rank 0 answers under this number.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from multiring._exchanges.background_call import BackgroundCall
from multiring._exchanges.contract import ExchangeError, PlaceExchange

_CONNECT_S = 60.0  # one attempt; the store's host may start later
_PAUSE_S = 0.5  # between two attempts
_STOP_S = 5.0
_LOOK_S = 0.05  # how often rank 0 looks for new questions


class TorchStoreExchange(PlaceExchange):
    """Rank 0 answers the other ranks' questions in torch's store.

    Args:
        host: the store's host, MASTER_ADDR.
        port: the store's port, MASTER_PORT.
        job: a text that is the same on all ranks of the job, and not of another job with the same store.
        is_served: whether torchrun's agent serves the store. Otherwise rank 0 serves it, for torch too.
        limit_s: how long a rank tries to reach the store, in seconds.
    """

    name = "torch's store"

    def __init__(self, host: str, port: int, job: str, *, is_served: bool, limit_s: float) -> None:
        super().__init__()
        self._place, self._job, self._is_served = (host, port), job, is_served
        self._limit_s = limit_s
        self._stop = threading.Event()
        self._is_removing = False  # whether `close` has been called; a killed rank 0 removes nothing
        self._asking: BackgroundCall[str | None] | None = None
        self._answering: BackgroundCall[None] | None = None
        self._number = secrets.token_hex(16)
        self.waits_for = f"the store at {host}:{port} does not answer"

    def publish(self, text: str) -> bool:
        """Answer from a thread until `close`."""
        make = _store_class()
        opening = BackgroundCall(lambda: self._connected(make, serves=not self._is_served))
        if not opening.is_over(self._limit_s + _STOP_S):
            raise ExchangeError(self.waits_for)
        store = opening.result()
        self._answering = BackgroundCall(lambda: self._answer(store, text))
        return False

    def fetch(self, wait_s: float) -> str | None:
        """Ask once, and look for the answer."""
        if self._asking is None:
            make = _store_class()
            self._asking = BackgroundCall(lambda: self._ask(make))
        return self._asking.result() if self._asking.is_over(wait_s) else None

    def close(self) -> None:
        """Stop to answer."""
        self._is_removing = True
        self._stop.set()
        if self._answering is not None:
            self._answering.is_over(_STOP_S)
            self._answering = None

    # -- in threads: a call of the store may last for ever if its host is silent

    def _connected(self, make: Callable[..., Any], *, serves: bool) -> Any:
        (host, port), latest = self._place, time.monotonic() + self._limit_s
        while True:
            wait_s = min(max(latest - time.monotonic(), 0.1), _CONNECT_S)
            try:
                return make(
                    host,
                    port,
                    None,
                    serves,
                    timeout=timedelta(seconds=wait_s),
                    wait_for_workers=False,
                    multi_tenant=True,
                )
            except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
                self.waits_for = f"{host}:{port}: {str(error).splitlines()[0]}"
                # A port that is taken, or a host that comes later than torch's own patience.
                if serves or time.monotonic() + _PAUSE_S > latest or self._stop.wait(_PAUSE_S):
                    raise ExchangeError(self.waits_for) from None

    def _ask(self, make: Callable[..., Any]) -> str | None:
        store = self._connected(make, serves=False)
        host, port = self._place
        try:
            store.set(self._key("question", store.add(self._key("questions"), 1)), self._number)
            self.waits_for = f"rank 0 does not answer in the store at {host}:{port}"
            key = self._key("answer", self._number)
            while not store.check([key]):
                if self._stop.wait(_LOOK_S):
                    return None
            answer = json.loads(store.get(key))
            store.delete_key(key)
        except RuntimeError as error:
            raise ExchangeError(f"{host}:{port}: {error}") from None
        return str(answer["text"])

    def _answer(self, store: Any, text: str) -> None:
        told, seen, answered = json.dumps({"text": text}), 0, set[str]()
        # The store may end before the last question is answered; then nothing can be removed, either.
        with suppress(RuntimeError):
            while not self._stop.wait(_LOOK_S):
                for question in range(seen + 1, store.add(self._key("questions"), 0) + 1):
                    key = self._key("question", question)
                    if not store.check([key]):  # it is asked at this moment, or was never asked by a killed rank
                        continue
                    seen = question if question == seen + 1 else seen
                    number = store.get(key).decode()
                    if number not in answered:
                        answered.add(number)
                        store.set(self._key("answer", number), told)
            for number in answered if self._is_removing else ():  # a killed rank has not removed it
                store.delete_key(self._key("answer", number))

    def _key(self, *words: object) -> str:
        return "/".join(map(str, ("multiring", self._job, *words)))


def _store_class() -> Any:
    try:
        from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415 -- torch is there if torchrun has started the rank
    except ImportError as error:
        raise ExchangeError(f"torch cannot be imported: {error}") from None
    return TCPStore
