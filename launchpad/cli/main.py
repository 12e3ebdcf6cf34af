"""The `launchpad` command: finds the sub-command, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import importlib
import os
import sys

import click

from launchpad import __version__
from launchpad.errors import LaunchpadError
from launchpad.transport import Link

# A command's module is imported when the command is used: start-up time is the launcher's own product.
_COMMANDS = {
    "run": "launchpad.cli.run",
    "smoke": "launchpad.cli.smoke",
    "bench": "launchpad.cli.bench",
    "why": "launchpad.cli.why",
    "stacks": "launchpad.cli.stacks",
    "logs": "launchpad.cli.logs",
    "jobs": "launchpad.cli.past",
}


_EPILOG = """\b
Examples:
  launchpad run --nproc 4 train.py --lr 0.1
  launchpad run --help
  launchpad smoke configs/smoke.toml
  launchpad why
  launchpad bench -H a:4,b:4
  launchpad stacks
"""


class Commands(click.Group):
    """A group that imports its commands late."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The commands, in the order of --help."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of that name."""
        module = _COMMANDS.get(cmd_name)
        command: click.Command | None = importlib.import_module(module).command if module else None
        return command


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EPILOG,
)
@click.version_option(__version__, message="launchpad %(version)s")
def cli() -> None:
    """Turn one command into N supervised ranks of a distributed program, and say what happened."""


def main(link: Link | None) -> None:
    """Run the command that sys.argv names, with `link` to this node's agent if one was started; never returns."""
    try:
        code = cli.main(prog_name="launchpad", standalone_mode=False, obj=link)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        code = 2
    except click.ClickException as error:
        code = _fail(_in_one_sentence(error), 2)
    except LaunchpadError as error:
        code = _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        code = 130
    finally:
        if link is not None:
            link.close()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # its reader has left: nothing to say to anybody
            pass
        except OSError as error:
            code = code or _fail(f"{stream.name}: {error.strerror}", 1)
    os._exit(code or 0)  # taking the interpreter down takes 10 ms, and nothing here needs it


def _in_one_sentence(error: click.ClickException) -> str:
    if isinstance(error, click.BadParameter) and error.param is not None:
        name = next((name for name in error.param.opts if name.startswith("--")), error.param.opts[0])
        return f"{name}: {error.message}"
    command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "launchpad"
    message = error.format_message().rstrip(".")
    return f"{message[:1].lower()}{message[1:]}; see {command} --help"


def _fail(message: str, code: int) -> int:
    from launchpad.report.console import message_line, wants_colour

    print(message_line(f"error: {message}", wants_colour(2, os.environ), bad=True), file=sys.stderr)
    return code
