"""`python -m longspan`."""

import sys

from longspan.cli import main

if __name__ == "__main__":
    sys.exit(main())
