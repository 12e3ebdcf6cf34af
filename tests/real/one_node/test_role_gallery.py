"""The verdict over several worlds, on jobs of which it is known who is to blame."""

from __future__ import annotations

import pytest

from tests.support.command import Launchpad
from tests.support.role_gallery import CLIENT, PLAYS, Play, job_file, service

pytestmark = pytest.mark.usefixtures("from_image")


@pytest.mark.parametrize("play", PLAYS, ids=lambda play: play.name)
def test_who_is_to_blame(launchpad: Launchpad, play: Play) -> None:
    (launchpad.folder / "job.toml").write_text(job_file(play))
    (launchpad.folder / "serve.py").write_text(service(play))
    (launchpad.folder / "train.py").write_text(CLIENT + play.client + "\n")
    done = launchpad.run("run", "--config", "job.toml", "--job", "j")
    said = [line.removeprefix("launchpad: ") for line in done.stderr.splitlines() if line.startswith("launchpad: ")]
    notes = ("failed: ", "train waits for ")
    verdict = [line for line in said if not line.startswith(notes) and not line.endswith("sent SIGKILL")]
    assert done.returncode == play.code, done.stderr
    if not play.blamed:
        assert verdict == [], done.stderr
        return
    assert verdict[0].startswith(play.blamed), done.stderr
    if play.restarts and play.victim:
        assert "and was being started again" in verdict[0], done.stderr
    victims = [line for line in verdict if line.startswith("failed because of it: train rank")]
    if play.restarts or not play.victim:  # else the clients may have been stopped before they noticed
        assert bool(victims) == play.victim, done.stderr
