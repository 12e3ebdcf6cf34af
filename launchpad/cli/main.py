"""The `launchpad` command: runs the subcommand, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

import click

from launchpad._version import __version__
from launchpad.errors import LaunchpadError
from launchpad.runner.links import LocalAgent

if TYPE_CHECKING:
    from launchpad.image.keeper_link import KeeperLink
    from launchpad.transport.local import LocalLink

# A command's module is imported only when the command is used, to keep start-up fast.
COMMANDS = {
    "run": "launchpad.cli.run",
    "launch": "launchpad.cli.launch",
    "attach": "launchpad.cli.attach",
    "resume": "launchpad.cli.resume",
    "wait": "launchpad.cli.wait",
    "stop": "launchpad.cli.stop",
    "restart": "launchpad.cli.restart",
    "join": "launchpad.cli.join",
    "smoke": "launchpad.cli.smoke",
    "bench": "launchpad.cli.bench",
    "warm": "launchpad.cli.warm",
    "clean": "launchpad.cli.clean",
    "gpus": "launchpad.cli.gpus",
    "doctor": "launchpad.cli.doctor",
    "why": "launchpad.cli.why",
    "stacks": "launchpad.cli.stacks",
    "top": "launchpad.cli.top",
    "debug": "launchpad.cli.debug",
    "profile": "launchpad.cli.profile",
    "logs": "launchpad.cli.logs",
    "jobs": "launchpad.cli.jobs",
    "report": "launchpad.cli.report",
    "trace": "launchpad.cli.trace",
    "bundle": "launchpad.cli.bundle",
    "completion": "launchpad.cli.completion",
    "help": "launchpad.cli.help",
}


_EPILOG = """\b
Examples:
  launchpad run --nproc 4 train.py --lr 0.1
  launchpad run --help
  launchpad smoke configs/smoke.toml
  launchpad why
  launchpad bench -H a:4,b:4
  launchpad stacks
  launchpad top
  launchpad help quickstart
"""


class Commands(click.Group):
    """A group that imports its commands lazily."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The commands, in the order of --help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of that name, or None."""
        module = COMMANDS.get(cmd_name)
        command: click.Command | None = importlib.import_module(module).command if module else None
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first word names. Raises UsageError, which says what may have been meant."""
        if not args[0].startswith("-") and args[0] not in COMMANDS:
            raise click.UsageError(f"no such command {args[0]!r}{_meant(args[0])}", ctx)
        return super().resolve_command(ctx, args)


def _meant(word: str) -> str:
    if os.path.exists(word):
        return f"; did you mean launchpad run {word}?"
    import difflib  # 4 ms

    near = difflib.get_close_matches(word, COMMANDS, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EPILOG,
)
@click.version_option(__version__, message="launchpad %(version)s")
def cli() -> None:
    """Run N supervised ranks of a distributed program with one command, and say what happened."""


def main(link: LocalLink | None, keeper: KeeperLink | None) -> None:
    """Run the command that sys.argv names; never returns.

    `link`: to this node's agent if one was started; `keeper`: of images to fork it from.
    """
    local = LocalAgent(link, keeper)
    try:
        code = cli.main(prog_name="launchpad", standalone_mode=False, obj=local)
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
        local.close()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # the reader is gone
            pass
        except OSError as error:
            code = code or _fail(f"{stream.name}: {error.strerror}", 1)
    os._exit(code or 0)  # skips 10 ms of interpreter shutdown that nothing here needs


def _in_one_sentence(error: click.ClickException) -> str:
    missing = isinstance(error, click.MissingParameter)
    if isinstance(error, click.BadParameter) and error.param is not None and not missing:
        name = next((name for name in error.param.opts if name.startswith("--")), error.param.opts[0])
        return f"{name}: {error.message}"
    command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "launchpad"
    message = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption):
        near = f"; did you mean {' or '.join(sorted(error.possibilities))}?" if error.possibilities else ""
        message = f"no such option {error.option_name!r}{near}"
    if message.endswith("?"):
        return message
    return f"{message[:1].lower()}{message[1:]}; see {command} --help"


def _fail(message: str, code: int) -> int:
    from launchpad.console.message import message_line, wants_colour

    print(message_line(f"error: {message}", wants_colour(2, os.environ), bad=True), file=sys.stderr)
    return code
