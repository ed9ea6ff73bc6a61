"""`python -m dropq` is the command `dropq`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; imported here, so that importing this module costs nothing."""
    from dropq.cli.main import main as command

    sys.exit(command())


if __name__ == "__main__":
    main()
