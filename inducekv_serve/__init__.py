"""`inducekv-serve`, before anything of our package `server` is used: other packages have this name too.

Where another one comes first on `sys.path`, the command could not be imported, and vLLM would only log that its plugin
cannot be. So the command itself has a name that nobody else has.
"""

import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> None:
    """Run `server.launcher.main`; exits with status 2 if `server` is another one than that beside this package."""
    import server

    ours, found = Path(__file__).parents[1] / "server", Path(server.__file__ or next(iter(server.__path__)))
    if not found.resolve().is_relative_to(ours.resolve()):
        sys.exit(_refused(ours, found))

    from server import launcher

    launcher.main(argv)


def _refused(ours: Path, found: Path) -> int:
    print(
        f"inducekv-serve: error: the package `server` must be {ours}, found {found}, which comes first on sys.path: "
        "rename it, or take its folder out of PYTHONPATH",
        file=sys.stderr,
    )
    return 2
