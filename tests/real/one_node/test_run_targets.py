"""What can be run: scripts, modules, folders, programs; with which interpreter, arguments and environment."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import Launchpad
from tests.support.targets import shown

pytestmark = pytest.mark.usefixtures("from_image")

CONTRACT = (
    "RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE "
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID "
    "TORCHELASTIC_USE_AGENT_STORE TORCH_NCCL_ASYNC_ERROR_HANDLING TORCHELASTIC_ERROR_FILE OMP_NUM_THREADS"
)


def test_script_gets_everything_after_it(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "show_env.py", "--nproc", "9", "--", "-x", "a b", "")
    assert (done.returncode, done.stderr) == (0, "")
    for got in shown(done.stdout).values():
        assert got["argv"][1:] == ["--nproc", "9", "--", "-x", "a b", ""]
        assert got["cwd"] == str(launchpad.folder)


def test_double_dash_only_ends_the_options(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n1", "--", "show_env.py", "--", "x")
    assert shown(done.stdout)[0]["argv"][1:] == ["--", "x"]


@pytest.mark.parametrize("option", ["-n", "-np", "--nproc", "--nproc-per-node", "--nproc_per_node"])
def test_every_spelling_of_the_rank_count(launchpad: Launchpad, option: str) -> None:
    assert set(shown(launchpad.run("run", option, 3, "show_env.py").stdout)) == {0, 1, 2}


def test_contract_of_torchrun(launchpad: Launchpad) -> None:
    launchpad.environ["SHOW"] = CONTRACT
    done = launchpad.run("run", "-n", 2, "show_env.py")
    ranks = shown(done.stdout)
    for rank, got in ranks.items():
        env = dict(got["env"])
        run_id, port, error_file = (env.pop(f"TORCHELASTIC_{n}", None) for n in ("RUN_ID", "PORT", "ERROR_FILE"))
        assert run_id
        assert port is None
        assert error_file
        assert 1024 <= int(env.pop("MASTER_PORT")) < 65536
        assert int(env.pop("OMP_NUM_THREADS")) == max(1, len(os.sched_getaffinity(0)) // 2)
        assert env == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "ROLE_NAME": "default",
            "LOCAL_WORLD_SIZE": "2",
            "WORLD_SIZE": "2",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
    assert ranks[0]["env"]["TORCHELASTIC_RUN_ID"] == ranks[1]["env"]["TORCHELASTIC_RUN_ID"]
    assert ranks[0]["env"]["TORCHELASTIC_ERROR_FILE"] != ranks[1]["env"]["TORCHELASTIC_ERROR_FILE"]


def test_thread_variable_of_the_user_is_kept(launchpad: Launchpad) -> None:
    launchpad.environ |= {"SHOW": "OMP_NUM_THREADS", "OMP_NUM_THREADS": "5"}
    assert shown(launchpad.run("run", "show_env.py").stdout)[0]["env"] == {"OMP_NUM_THREADS": "5"}


def test_variables_from_options_and_files(launchpad: Launchpad) -> None:
    (launchpad.folder / "vars").write_text("# of the job\nexport A=from file\nB='quoted = x'\nHERE\n")
    launchpad.environ |= {"SHOW": "A B C HERE", "HERE": "passed on", "C": "replaced"}
    done = launchpad.run("run", "--env-file", "vars", "-x", "A=from option", "--env", "C=", "show_env.py")
    assert shown(done.stdout)[0]["env"] == {
        "A": "from option",
        "B": "quoted = x",
        "C": "",
        "HERE": "passed on",
    }


def test_module_with_its_package(launchpad: Launchpad) -> None:
    package = launchpad.folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    done = launchpad.run("run", "-m", "package.train", "-m", "x")
    assert done.stdout == "[0] __main__ package ['-m', 'x']\n"


def test_folder_with_main(launchpad: Launchpad) -> None:
    (launchpad.folder / "app").mkdir()
    (launchpad.folder / "app" / "__main__.py").write_text("print('main of the folder')")
    assert launchpad.run("run", "app").stdout == "[0] main of the folder\n"


def test_program_on_path(launchpad: Launchpad) -> None:
    assert launchpad.run("run", "-n", 2, "echo", "-n", "-x").stdout in ("[0] -x\n[1] -x\n", "[1] -x\n[0] -x\n")


def test_program_by_its_path_and_by_no_python(launchpad: Launchpad) -> None:
    program = launchpad.folder / "prog.py"
    program.write_text("#!/bin/sh\necho shell runs $1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert launchpad.run("run", "--no-python", "./prog.py", "this").stdout == "[0] shell runs this\n"
    os.rename(program, launchpad.folder / "prog")
    assert launchpad.run("run", "./prog", "that").stdout == "[0] shell runs that\n"


def make_python(path: Path) -> Path:
    """An interpreter of its own at this path, as in a virtual environment."""
    path.parent.mkdir(parents=True)
    path.symlink_to(sys.executable)
    return path


def test_interpreter_is_the_active_environments_else_our_own(launchpad: Launchpad) -> None:
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        launchpad.environ.pop(name, None)
    assert shown(launchpad.run("run", "show_env.py").stdout)[0]["executable"] == sys.executable
    conda = make_python(launchpad.folder / "conda" / "bin" / "python")
    launchpad.environ["CONDA_PREFIX"] = str(conda.parent.parent)
    assert shown(launchpad.run("run", "show_env.py").stdout)[0]["executable"] == str(conda)
    venv = make_python(launchpad.folder / "venv" / "bin" / "python")
    launchpad.environ["VIRTUAL_ENV"] = str(venv.parent.parent)
    assert shown(launchpad.run("run", "show_env.py").stdout)[0]["executable"] == str(venv)
    other = make_python(launchpad.folder / "other" / "bin" / "python")
    done = launchpad.run("run", "--python", other, "show_env.py")
    assert shown(done.stdout)[0]["executable"] == str(other)


def test_standard_input_goes_to_rank_0_alone(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "-n", 3, "prompt.py", stdin=-1)
    out, err = process.communicate(b"Ada\n", timeout=60)
    assert sorted(out.decode().splitlines()) == ["[0] name? hello Ada", "[1] stdin gives ''", "[2] stdin gives ''"]
    assert (process.returncode, err) == (0, b"")


def test_closed_standard_descriptors(launchpad: Launchpad) -> None:
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        words = shlex.join(launchpad.argv("run", "-n", "2", "exits.py", "0", "3"))
        command = ["sh", "-c", f"{words} {closed}"]
        done = subprocess.run(command, env=launchpad.environ, cwd=launchpad.folder, capture_output=True, timeout=60)
        assert done.returncode == 3, (closed, done)


def test_dry_run_prints_what_is_run(launchpad: Launchpad) -> None:
    launchpad.environ["SHOW"] = CONTRACT
    words = ("-n", 2, "-x", "TOKEN=secret-value", "show_env.py", "--flag")
    plan = json.loads(launchpad.run("run", "--dry-run", "--json", *words).stdout)
    assert plan["world_size"] == 2
    assert plan["forwarded"] == ["TOKEN"]
    (node,) = plan["nodes"]
    assert node["cwd"] == str(launchpad.folder)
    ran = shown(launchpad.run("run", *words).stdout)
    for planned in node["ranks"]:
        rank = planned["rank"]
        assert planned["argv"][0] == ran[rank]["executable"]
        assert planned["argv"][-2:] == ran[rank]["argv"]
        differing = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        for name, value in {**node["environ_where_unset"], **planned["environ"]}.items():
            assert name in differing or ran[rank]["env"][name] == value
    text = launchpad.run("run", "--dry-run", *words)
    assert "secret-value" not in text.stdout + json.dumps(plan)
    assert "TOKEN=***" in text.stdout
    assert "RANK=1 LOCAL_RANK=1" in text.stdout
    assert (text.returncode, text.stderr) == (0, "")


def test_variables_from_the_environment_are_there_unasked(launchpad: Launchpad) -> None:
    launchpad.environ |= {"SHOW": "MINE", "MINE": "yes"}
    assert shown(launchpad.run("run", "show_env.py").stdout)[0]["env"] == {"MINE": "yes"}
