"""agent/host/environments: what a host makes of the files of an environment."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launchpad.agent.host import environments
from launchpad.protocol.commands import HERE, MakeEnvironment


def test_hosts_that_share_a_home_may_make_the_same_one_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environments, "_try", lambda *_: "")
    (tmp_path / "launchpad").mkdir(mode=0o700)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    texts = [[f"lib/{name}.pth", 0o644, HERE * 100] for name in range(20)]
    command = MakeEnvironment("env-venv-1", "here:/venv", version, sys.executable, True, texts, [])
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: environments.make(command), range(64)))
    folder = tmp_path / "launchpad" / "env-venv-1"
    assert {(one.python, one.problem) for one in made} == {(str(folder / "bin" / "python"), "")}
    assert (folder / "bin" / "python").readlink() == Path(sys.executable)
    assert {path.read_text() for path in (folder / "lib").iterdir()} == {str(folder) * 100}
    assert len(list((folder / "lib").iterdir())) == 20, "nothing else is left"
