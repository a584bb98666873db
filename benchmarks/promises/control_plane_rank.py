"""Run one rank of a job for control_plane.py.

    python control_plane_rank.py FILE OPERATIONS ROUNDS

First, all ranks submit the same operations, each in its own order. From then on, the ranks must agree on every
operation. Then come rounds with one operation each, whose messages are counted. Rank 0 writes the largest counts of a
round on any rank to FILE. The rank needs only NumPy.
"""

import json
import sys
from pathlib import Path

import numpy as np

import multiring
from multiring._native import ControlMessage
from multiring._runtime.named import named
from multiring._runtime.named.channel import ControlChannel, Message, MessageKind
from multiring._runtime.named.named import NamedOperations

_STEP_BYTES = 4


class CountedLine(ControlChannel):
    """A control channel that counts the messages of the agreement.

    Each message carries its position in the chain of messages.
    """

    sent, taken, steps, longest_bytes = 0, 0, 0, 0

    def begin(self) -> None:
        """Reset the counts to zero."""
        self.sent, self.taken, self.steps, self.longest_bytes = 0, 0, 0, 0

    def send(self, to: int, generation: int, kind: MessageKind, payload: bytes) -> None:
        """Send a message, and count it if it belongs to the agreement."""
        if kind is MessageKind.AGREEMENT:
            self.sent += 1
            self.longest_bytes = max(self.longest_bytes, len(payload))
            payload = (self.steps + 1).to_bytes(_STEP_BYTES, "little") + payload
        super().send(to, generation, kind, payload)

    def receive(self, notice: ControlMessage) -> Message | None:
        """Receive a message, and count it if it belongs to the agreement."""
        message = super().receive(notice)
        if message is None or message.kind is not MessageKind.AGREEMENT:
            return message
        self.taken += 1
        self.steps = max(self.steps, int.from_bytes(message.payload[:_STEP_BYTES], "little"))
        return message._replace(payload=message.payload[_STEP_BYTES:])


def main() -> None:
    """Run this rank."""
    file, operations, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    vars(named)["ControlChannel"] = CountedLine
    group = multiring.init()
    agreed = NamedOperations(group)
    line = vars(agreed)["_channel"]
    names = [f"DistributedOptimizer.gradient.{number}" for number in range(operations)]
    turn = group.rank % operations
    come_to(agreed, [*names[turn:], *names[:turn]], group)
    most, messages = np.zeros(4, np.int64), np.zeros(1, np.int64)
    for number in range(rounds):
        group.barrier()
        line.begin()
        group.barrier()  # no rank sends before all ranks count
        come_to(agreed, [f"round {number}"], group)
        most = np.maximum(most, [line.sent, line.taken, line.steps, line.longest_bytes])
        messages += line.sent
    group.all_reduce(most, "max")
    group.all_reduce(messages)
    if group.rank == 0:
        fields = ("most_sent", "most_taken", "steps", "longest_bytes")
        found = dict(zip(fields, most.tolist(), strict=True), messages=int(messages[0]) // rounds)
        file.write_text(json.dumps(found), encoding="utf-8")
    agreed.close()
    multiring.shutdown()


def come_to(agreed: NamedOperations, names: list[str], group: multiring.Group) -> None:
    """Submit a sum for each name, in this order; wait for all and check the results."""
    arrays = [np.full(8, group.rank) for _ in names]
    handles = [
        agreed.submit(name, (), lambda own, label, array=array: own.all_reduce_async(array, label=label))  # type: ignore[misc]
        for name, array in zip(names, arrays, strict=True)
    ]
    for handle, array in zip(handles, arrays, strict=True):
        handle.wait()
        assert (array == group.size * (group.size - 1) // 2).all()


if __name__ == "__main__":
    main()
