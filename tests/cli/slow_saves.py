"""`longspan` as one rank of a world that the environment describes, with saves that take their time.

A test can then kill it in the middle of one. Usage: python -m tests.cli.slow_saves SECONDS WORDS...
"""

import sys
import time
from typing import Any

from longspan.cli import main
from longspan.train.checkpoint import writing


def slow_down(seconds: float) -> None:
    """Wait between the folder and its files, and between the files and the manifest."""
    write_files, finish = writing._write_files, writing.Writer._finish

    def slow_write_files(*arguments: Any) -> Any:
        time.sleep(seconds / 2)
        return write_files(*arguments)

    def slow_finish(*arguments: Any) -> Any:
        time.sleep(seconds / 2)
        return finish(*arguments)

    writing._write_files, writing.Writer._finish = slow_write_files, slow_finish


if __name__ == "__main__":
    slow_down(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
