"""MPICH's tests under launchpad and under mpiexec or mpirun: python tests/suites/mpich_suite.py DIR

DIR is a folder in which test/mpi of MPICH's source has been configured for the MPI to test, whichever it is:

    mkdir DIR && cd DIR && mpich-4.0.2/test/mpi/configure MPICC=mpicc --disable-fortran --disable-cxx

with --enable-strictmpi for an MPI that is not MPICH. The programs are built there, and what `testlist` names is run.
For an Open MPI without MPI-1, CPPFLAGS has to rename the functions that the suite still calls:

    -DOMPI_OMIT_MPI1_COMPAT_DECLS=1 -DOMPI_REMOVED_USE_STATIC_ASSERT=0 -DMPI_Type_hvector=MPI_Type_create_hvector
    -DMPI_Type_hindexed=MPI_Type_create_hindexed -DMPI_Type_struct=MPI_Type_create_struct
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from side_by_side import Case, Verdict, compare, parser

from launchpad.mpi_library import which

SKIPPED = ("f77", "f90", "f08", "cxx", "ckpoint", "ft", "perf")


def main() -> int:
    """Build the suite and run it."""
    made = parser(__doc__)
    options = made.parse_args()
    folder = options.folder.resolve()
    if not (folder / "config.status").exists():
        made.error(f"{options.folder} is not configured: it has no config.status")
    print("making the programs, which takes minutes the first time; what make says is in make.log", flush=True)
    with open(folder / "make.log", "w") as log:
        cores = len(os.sched_getaffinity(0))
        subprocess.run(["make", "-k", f"-j{cores}"], cwd=folder, stdout=log, stderr=log, check=False)
    source = re.search(r"^abs_srcdir = (.*)", (folder / "Makefile").read_text(), re.M)
    cases = list(_cases(folder, Path(source.group(1) if source else folder)))
    built = [case for case in cases if (case.folder / case.command[0]).exists()]
    if not built:
        made.error(f"no program could be built; see {folder / 'make.log'}")
    missing = {case.name for case in cases} - {case.name for case in built}
    print(f"{len(missing)} programs can't be built with this MPI: {' '.join(sorted(missing))}")
    mpi = which([str(built[0].folder / built[0].command[0])], os.environ, "")
    if not mpi.library:
        made.error(mpi.why)
    return compare(mpi, built, options)


def _cases(folder: Path, source: Path, name: str = "") -> Iterator[Case]:
    """What a folder's testlist names: programs with their ranks and options, and folders. Its form: test/mpi/README."""
    lists = [place / name / "testlist" for place in (folder, source)]
    for line in next((one for one in lists if one.exists()), Path(os.devnull)).read_text().splitlines():
        words = line.partition("#")[0].split()
        if not words or words[0] in SKIPPED:
            continue
        program = os.path.join(name, words[0])
        if (folder / program).is_dir():
            yield from _cases(folder, source, program)
            continue
        np = int(words[1]) if len(words) > 1 else 2
        options = [word.partition("=")[::2] for word in words[2:]]
        if any(key == "xfail" for key, _ in options):
            continue
        arguments = [value for key, value in options if key == "arg"]
        environ = dict(value.split("=", 1) for key, value in options if key == "env")
        judge = functools.partial(_judge, dict(options).get("resultTest", ""))
        name_of_case = " ".join([program, *arguments, *(f"{key}={value}" for key, value in environ.items())])
        at = folder / program
        yield Case(name_of_case, np, [f"./{at.name}", *arguments], at.parent, environ, judge)


def _judge(wanted: str, code: int, output: str) -> Verdict:
    """`wanted` is the testlist's resultTest: some programs are to fail."""
    printed = re.search(r"\bNo [Ee]rrors *$", output, re.M) is not None
    passed = {"": code == 0 and printed, "TestStatusNoErrors": code != 0 and printed}.get(wanted, code != 0)
    return Verdict(passed, f"exit code {code}" + (", no errors" if printed else ""))


if __name__ == "__main__":
    sys.exit(main())
