"""`python -m multiring`: the same as the `multiring` command."""

import sys

from multiring_command import main

if __name__ == "__main__":
    sys.exit(main())
