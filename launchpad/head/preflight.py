"""What is checked on this machine before anything is started: the target, the interpreter, the variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from launchpad.errors import UsageError
from launchpad.head import functions
from launchpad.job.environ import parse_file, parse_option, travelling
from launchpad.job.spec import Target

_PYTHON_SUFFIXES = (".py", ".pyz", ".pyc")


def working_folder(asked: str | None, *, here: bool = True) -> str:
    """The folder that the ranks run in, absolute; it becomes the current one. UsageError where it can't be entered.

    Where no rank runs `here`, it need not be on this machine.
    """
    if asked is not None:
        if not here and not os.path.isdir(asked):
            if not os.path.isabs(asked):
                raise UsageError(f"--wdir {asked}: there is no such folder here; give it as an absolute path")
            return os.path.normpath(asked)
        try:
            os.chdir(asked)
        except OSError as error:
            raise UsageError(f"--wdir {asked}: {error.strerror}; name a folder that can be entered") from None
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(f"the current folder is gone ({error.strerror}); cd to one that exists") from None


def find_target(
    words: Sequence[str], *, module: bool, no_python: bool, script: bool = False, here: bool = True
) -> Target:
    """The program, or the function, that the command line means; `script`: a Python file, whatever its name.

    Raises UsageError where there is none that could be run. Where no rank runs `here`, it need not be on this machine.
    """
    if not words:
        raise UsageError("nothing to run; write launchpad run [OPTIONS] script.py [ARGS…]")
    name, args = words[0], tuple(words[1:])
    for word in words:
        if "\0" in word:
            raise UsageError("the command line has a NUL byte in it, which no program can be given")
    if module and no_python:
        raise UsageError("-m runs a Python module and --no-python a program: give one of them")
    function = functions.split(name)
    if module:
        if function and not functions.is_file(function[0]):
            functions.check(name, here=here)
            return Target("function", name, args)
        if function or name.endswith(".py") or "/" in name:
            raise UsageError(f"-m {name}: a module is named with dots (package.module); for a file leave -m out")
        return Target("module", name, args)
    if script or (not no_python and (name.endswith(_PYTHON_SUFFIXES) or os.path.isdir(name))):
        return Target("script", _check_script(name) if here else name, args)
    if function and not no_python and not _exists(name):
        if functions.is_file(function[0]) and here:
            _check_script(function[0])
        functions.check(name, here=here)
        return Target("function", name, args)
    return Target("program", _check_program(name) if here else name, args)


def _exists(name: str) -> bool:
    """Whether it is a file, or a program on PATH, whose name just looks like a function's."""
    if os.path.exists(name):
        return True
    from shutil import which

    return "/" not in name and which(name) is not None


def _check_script(path: str) -> str:
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            raise UsageError(f"{path} is a folder without a __main__.py; name the script in it that is to run")
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
        mend = f"write ./{name}" if os.access(name, os.X_OK) else f"chmod +x it and write ./{name}"
        raise UsageError(f"{name} is here, but not on PATH; {mend}, or give a Python script a name that ends in .py")
    raise UsageError(f"no such program: {name} (it is neither a .py file nor on PATH)")


def find_python(asked: str | None, environ: Mapping[str, str], own: str, *, here: bool = True) -> str:
    """The ranks' interpreter: --python, PYTHON_EXEC (as torchrun), the active venv's or conda's, else `own`.

    Where no rank runs `here`, --python need not be on this machine.
    """
    if asked and not here:
        return asked
    for source, name in (("--python", asked), ("PYTHON_EXEC", environ.get("PYTHON_EXEC"))):
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
    """The user's own variables, files first, so that an option overrides a file. Raises UsageError.

    `far`: some ranks run on other machines, to which the variables of job/environ.py's TRAVEL go by themselves.
    """
    found: dict[str, str] = travelling(environ) if far else {}
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
