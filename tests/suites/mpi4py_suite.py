"""mpi4py's tests under launchpad and under mpiexec: python tests/suites/mpi4py_suite.py DIR [--np N,…] [--mpi LIBRARY]

DIR is mpi4py's source (pip download --no-binary mpi4py --no-deps mpi4py, unpacked), of the version that is installed.
A case is a module of the tests on a number of ranks.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from side_by_side import Case, Verdict, compare, parser

from launchpad.mpi_library import MPICH, OPEN_MPI, of_python


def main() -> int:
    """Run the suite."""
    made = parser(__doc__)
    made.add_argument("--np", default="1,2,3", metavar="N,…", help="numbers of ranks (1,2,3)")
    made.add_argument("--mpi", choices=[MPICH, OPEN_MPI], help="instead of what mpi4py would load")
    options = made.parse_args()
    main_py = options.folder.resolve() / "test" / "main.py"
    if not main_py.exists():
        made.error(f"{options.folder} is not mpi4py's source: it has no test/main.py")
    mpi = of_python(sys.executable, os.environ)
    if options.mpi not in (None, mpi.library):
        os.environ["MPI4PY_MPIABI"] = options.mpi
        mpi = of_python(sys.executable, os.environ)
    if not mpi.path:
        made.error(f"no library was found: {mpi.why}")
    with tempfile.TemporaryDirectory() as folder:
        return compare(mpi, _cases(main_py, [int(np) for np in options.np.split(",")], Path(folder)), options)


def _cases(main_py: Path, sizes: list[int], folder: Path) -> Iterator[Case]:
    for np in sizes:
        for module in sorted(main_py.parent.glob("test_*.py")):
            command = [sys.executable, str(main_py), "--no-builddir", module.stem]
            yield Case(module.stem, np, command, folder, {"TMPDIR": str(folder)}, _judge)


def _judge(code: int, output: str) -> Verdict:
    """What unittest says on the ranks."""
    ran, skipped = (
        "/".join(sorted(set(re.findall(pattern, output)), key=int)) or "0"
        for pattern in (r"\bRan (\d+) tests?\b", r"\bskipped=(\d+)")
    )
    failed = frozenset(re.findall(r"\b(?:FAIL|ERROR): \S+ \((\S+)\)", output))
    what = f"exit code {code}, {ran} tests, {skipped} skipped, {len(failed)} failed"
    return Verdict(code == 0 and ran != "0", what, failed)


if __name__ == "__main__":
    sys.exit(main())
