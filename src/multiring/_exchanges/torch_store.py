"""torchrun's own store. It is the only module outside the adapters that imports torch, once it is used.

A store may live longer than a run of the ranks: after a restart, and where hosts join or leave, the ranks of the next
run can find what the former run has left. So a rank draws a number and asks with it; rank 0 answers under this number.
"""

import json
import secrets
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from multiring._exchanges.contract import ExchangeError, PlaceExchange

_CONNECT_S = 60.0  # the store's host may start later
_STOP_S = 5.0
_LOOK_S = 0.05  # how often rank 0 looks for new questions


class TorchStoreExchange(PlaceExchange):
    """Rank 0 answers the other ranks' questions in torch's store.

    Args:
        host: the store's host, MASTER_ADDR.
        port: the store's port, MASTER_PORT.
        job: a text that is the same on all ranks of the job, and not of another job with the same store.
        is_served: whether torchrun's agent serves the store. Otherwise rank 0 serves it, for torch too.
        limit_s: how long a rank tries to reach the store.
    """

    name = "torch's store"

    def __init__(self, host: str, port: int, job: str, *, is_served: bool, limit_s: float) -> None:
        super().__init__()
        self._place, self._job, self._is_served = (host, port), job, is_served
        self._limit_s = limit_s
        self._store: Any = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._number = secrets.token_hex(16)
        self._answered: set[str] = set()

    def publish(self, text: str) -> bool:
        """Answer from a thread until `close`."""
        self._open(serves=not self._is_served)
        self._thread = threading.Thread(target=self._answer, args=(text,), daemon=True)
        self._thread.start()
        return False

    def fetch(self, wait_s: float) -> str | None:
        """Ask once, and look for the answer."""
        is_new = self._store is None
        try:
            self._open(serves=False)
            if is_new:
                self._store.set(self._key("question", self._store.add(self._key("questions"), 1)), self._number)
            key = self._key("answer", self._number)
            latest = time.monotonic() + wait_s
            while not self._store.check([key]):
                if time.monotonic() > latest:
                    self.waits_for = f"rank 0 does not answer in the store at {self._place[0]}:{self._place[1]}"
                    return None
                time.sleep(_LOOK_S)
            answer = json.loads(self._store.get(key))
            self._store.delete_key(key)
        except RuntimeError as error:  # torch's DistError is one
            raise ExchangeError(f"{self._place[0]}:{self._place[1]}: {error}") from None
        return str(answer["text"])

    def close(self) -> None:
        """Stop to answer."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
            # The store may have ended with its host; then nothing can be removed.
            with suppress(RuntimeError):
                for number in () if self._thread.is_alive() else self._answered:  # a killed rank has not removed it
                    self._store.delete_key(self._key("answer", number))
            self._thread = None
        self._store = None

    def _open(self, *, serves: bool) -> None:
        if self._store is not None:
            return
        try:
            from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415 -- torch is there if torchrun has started the rank
        except ImportError as error:
            raise ExchangeError(f"torch cannot be imported: {error}") from None
        host, port = self._place
        try:
            self._store = TCPStore(
                host,
                port,
                None,
                serves,
                timeout=timedelta(seconds=min(self._limit_s, _CONNECT_S)),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            raise ExchangeError(f"{host}:{port}: {str(error).splitlines()[0]}") from None

    def _answer(self, text: str) -> None:
        store, told, seen = self._store, json.dumps({"text": text}), 0
        # The store may end before the last question is answered.
        with suppress(RuntimeError):
            while not self._stop.wait(_LOOK_S):
                for question in range(seen + 1, store.add(self._key("questions"), 0) + 1):
                    key = self._key("question", question)
                    if not store.check([key]):  # it is asked at this moment, or was never asked by a killed rank
                        continue
                    seen = question if question == seen + 1 else seen
                    number = store.get(key).decode()
                    if number not in self._answered:
                        self._answered.add(number)
                        store.set(self._key("answer", number), told)

    def _key(self, *words: object) -> str:
        return "/".join(map(str, ("multiring", self._job, *words)))
