"""The launcher's point where newcomers come in, beside its point for votes: what it waits for."""

from multiring._agreement.vote_messages import PROMISE, VoteMessage, encode
from multiring._agreement.votes import Vote
from multiring._launch.intake_point import FormationOpening, IntakePoint
from multiring._launch.vote_point import VotePoint
from multiring._runtime.failures.formation_place import intake_proof
from multiring._runtime.failures.intake_channel import ADMITTED, READY
from multiring._runtime.failures.launcher_channel import ALIVE, HELLO, KEEP, proof_of

SECRET, JOB = "a secret", "a job"


class Relay:
    """A process of another host, as the launcher sees it."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self.is_killed = False

    def send(self, line: bytes) -> None:
        self.told.append(line)

    def kill(self) -> None:
        self.is_killed = True

    def close(self) -> None:
        """Do nothing."""


def test_newcomers_come_in_after_those_that_are_out_have_been_killed() -> None:
    said: list[str] = []
    votes = VotePoint(None, SECRET.encode(), JOB, [f"rank {rank}" for rank in range(3)], said.append)
    intake = IntakePoint(None, JOB, [(SECRET, JOB)] * 3, 3, FormationOpening(lambda *_: None), said.append)
    voters, comers = [], []
    for rank in range(3):
        voters.append((relay := Relay(), votes.meet(relay, 1000 + rank)))
        proof = proof_of(SECRET.encode(), JOB, rank)
        for line in (f"{HELLO} {rank} {proof}", ALIVE):
            votes.hear(voters[rank][1], line.encode())
        comers.append((relay := Relay(), intake.meet(relay, 1000 + rank)))
        for line in (f"{HELLO} {rank} {intake_proof(SECRET.encode(), JOB, rank)}", ALIVE):
            intake.hear(comers[rank][1], line.encode())
    decided = VoteMessage(PROMISE, 1, vote=Vote(1, (0, 1)))
    for rank in (0, 1):
        votes.hear(voters[rank][1], f"{KEEP} ".encode() + encode(decided))
        intake.hear(comers[rank][1], f"{READY} 0 1 told".encode())
    intake.act(votes)
    assert intake.is_open, "rank 2 has not ended, and may end by itself"
    votes._doomed = dict.fromkeys(votes._doomed, 0.0)  # its time is over
    votes.act()
    assert [relay.is_killed for relay, _ in voters] == [False, False, True]
    intake.act(votes)
    assert [any(line.startswith(ADMITTED.encode()) for line in relay.told) for relay, _ in comers] == [
        True,
        True,
        False,
    ]
