"""Checks on this machine before anything is started: the target, the interpreter, the variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from launchpad.errors import UsageError
from launchpad.job.environment import forwarded, parse_file, parse_option
from launchpad.job.spec import Target
from launchpad.runner import function_target

_PYTHON_SUFFIXES = (".py", ".pyz", ".pyc")


def working_folder(requested: str | None, *, here: bool = True) -> str:
    """Change to the ranks' working folder. Returns its absolute path. Raises UsageError if it can't be entered.

    If no rank runs `here`, it need not exist on this machine.
    """
    if requested is not None:
        if not here and not os.path.isdir(requested):
            if not os.path.isabs(requested):
                raise UsageError(f"--wdir {requested}: no such folder on this machine; give an absolute path")
            return os.path.normpath(requested)
        try:
            os.chdir(requested)
        except OSError as error:
            raise UsageError(f"--wdir {requested}: {error.strerror}; give a folder that can be entered") from None
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(f"the current folder is gone ({error.strerror}); cd to one that exists") from None


def find_target(
    words: Sequence[str], *, module: bool, no_python: bool, script: bool = False, here: bool = True
) -> Target:
    """The program or function that the command line names. With `script`, it is a Python file, whatever its name.

    Raises UsageError if it can't be run. If no rank runs `here`, it need not exist on this machine.
    """
    if not words:
        raise UsageError("nothing to run; write launchpad run [OPTIONS] script.py [ARGS…]")
    name, args = words[0], tuple(words[1:])
    for word in words:
        if "\0" in word:
            raise UsageError("the command line contains a NUL byte, which can't be passed to a program")
    if module and no_python:
        raise UsageError("-m runs a Python module, --no-python a program; give only one of them")
    function = function_target.split(name)
    if module:
        if function and not function_target.is_file(function[0]):
            function_target.check(name, here=here)
            return Target("function", name, args)
        if function or name.endswith(".py") or "/" in name:
            raise UsageError(f"-m {name}: module names have dots (package.module); for a file, leave -m out")
        return Target("module", name, args)
    if script or (not no_python and (name.endswith(_PYTHON_SUFFIXES) or os.path.isdir(name))):
        return Target("script", _check_script(name) if here else name, args)
    if function and not no_python and not _exists(name):
        if function_target.is_file(function[0]) and here:
            _check_script(function[0])
        function_target.check(name, here=here)
        return Target("function", name, args)
    return Target("program", _check_program(name) if here else name, args)


def _exists(name: str) -> bool:
    """Whether this is a file or a program on PATH whose name only looks like a function's."""
    if os.path.exists(name):
        return True
    from shutil import which

    return "/" not in name and which(name) is not None


def _check_script(path: str) -> str:
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            raise UsageError(f"{path} is a folder without a __main__.py; name the script in it")
    elif not os.path.exists(path):
        raise UsageError(f"no such script: {path} (looked in {os.getcwd()})")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{path} can't be read; check its permissions")
    return path


def _check_program(name: str) -> str:
    if "/" in name:
        if not os.path.exists(name):
            raise UsageError(f"no such program: {name} (looked in {os.getcwd()})")
        if os.path.isdir(name):
            raise UsageError(f"{name} is a folder; name a program")
        if not os.access(name, os.X_OK):
            raise UsageError(f"{name} is not executable; chmod +x it, or give a Python script a name that ends in .py")
        return name
    from shutil import which

    found = which(name)
    if found:
        return found
    if os.path.exists(name):
        hint = f"write ./{name}" if os.access(name, os.X_OK) else f"chmod +x it and write ./{name}"
        raise UsageError(f"{name} is here, but not on PATH; {hint}, or give a Python script a name that ends in .py")
    raise UsageError(f"no such program: {name} (it is neither a .py file nor on PATH)")


def find_python(requested: str | None, environ: Mapping[str, str], own: str, *, here: bool = True) -> str:
    """The ranks' interpreter: --python, PYTHON_EXEC (as torchrun), the active venv's or conda's, else `own`.

    If no rank runs `here`, --python need not exist on this machine.
    """
    if requested and not here:
        return requested
    for source, name in (("--python", requested), ("PYTHON_EXEC", environ.get("PYTHON_EXEC"))):
        if name:
            from shutil import which

            found = which(name)
            if not found:
                raise UsageError(f"{source} {name}: no such interpreter, or not executable; give its path")
            return found if "/" not in name else name
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        candidate = os.path.join(environ.get(variable, ""), "bin", "python")
        if environ.get(variable) and os.access(candidate, os.X_OK):
            return candidate
    return own


def collect_environ(
    options: Sequence[str], files: Sequence[str], environ: Mapping[str, str], *, far: bool = False
) -> dict[str, str]:
    """The user's own variables. Options override files. Raises UsageError.

    `far`: some ranks run on other machines, so the variables in job/environment.py's FORWARDED are added.
    """
    found: dict[str, str] = forwarded(environ) if far else {}
    for path in files:
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise UsageError(f"--env-file {path}: {error.strerror}; give a file of VAR=VALUE lines") from None
        except UnicodeDecodeError as error:
            raise UsageError(f"--env-file {path}: not UTF-8 text (byte {error.start}); give VAR=VALUE lines") from None
        found.update(parse_file(text, path, environ))
    for option in options:
        found.update(parse_option(option, environ))
    return found
