"""Join a formation of the job: the ranks that are left and newcomers, with a secret of its own."""

import logging
import os
from dataclasses import replace
from functools import partial

from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.failures.formation_place import FormationPlace, intake_proof
from multiring._runtime.failures.intake_channel import IntakeChannel
from multiring._runtime.job.joining import join_job
from multiring._runtime.job.world import World
from multiring._settings import Settings, intake_address
from multiring.errors import LaunchError, RendezvousError

_log = logging.getLogger("multiring")


def intake_of(settings: Settings) -> IntakeChannel | None:
    """Return a new channel for newcomers of this process's job; None if the job lets nobody in.

    Raises:
        LaunchError: this process is a newcomer, and the launcher does not answer.
    """
    if settings.intake is None or settings.reports is None or settings.size is None:
        return None
    secret, job = (settings.secret or "").encode(), settings.job or ""
    try:
        proof = intake_proof(secret, job, settings.intake)
        return IntakeChannel(intake_address(settings.reports), settings.intake, proof)
    except OSError as error:
        if is_newcomer(settings):
            raise LaunchError(
                f"process {settings.intake} of the job came, and the launcher refused it: {error}"
            ) from None
        _log.warning("process %d lets no newcomers in: the launcher does not answer (%s)", settings.intake, error)
        return None


def is_newcomer(settings: Settings) -> bool:
    """Return whether the launcher started this process after the job's start."""
    return settings.intake is not None and settings.size is not None and settings.intake >= settings.size


def alone(settings: Settings) -> Identity:
    """Return the identity of a newcomer that is not let in yet."""
    secret, job = (settings.secret or "").encode(), settings.job or ""
    return Identity(
        rank=0, size=1, local_rank=0, local_size=1, rendezvous="@", secret=secret, job=job, source="multiring"
    )


def join_formation(settings: Settings, intake: IntakeChannel, place: FormationPlace) -> tuple[World, FormationPlace]:
    """Meet the others as told, until all who are admitted have met; return the job and the last place.

    Raises:
        StateError: the launcher does not answer.
    """
    while True:
        identity = Identity(
            rank=place.rank,
            size=place.size,
            local_rank=None,
            local_size=None,
            rendezvous=place.rendezvous,
            secret=place.secret.encode(),
            job=place.job,
            source="multiring",
            votes=place.votes,
            is_withdrawn=partial(intake.is_withdrawn, place),
        )
        try:
            world = join_job(replace(settings, rank=None, size=None), identity)
        except RendezvousError as error:
            _log.info("process %d meets others again: %s", os.getpid(), error)
            place = intake.failed(place, str(error))
            continue
        later = intake.opened(place)
        if later is None:
            return world, place
        world.close(0.0, announce=False)
        place = later
