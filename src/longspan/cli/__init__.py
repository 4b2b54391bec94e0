"""The command line. One file for each verb; a new one is imported and registered here.

A verb is a function whose signature and docstring are its options and help. It returns its exit code, or None
for 0, and raises a LongspanError for input that cannot be used. It imports torch inside its body, so that
`--help` does not.
"""

import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

from longspan import __version__
from longspan.cli import explain
from longspan.cli.demo import demo
from longspan.cli.export import export
from longspan.cli.groups import groups
from longspan.cli.train import train
from longspan.cli.verify import verify
from longspan.errors import LongspanError

__all__ = ["main"]


def main(tokens: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        tokens: the words after the program's name; those of this process when left out.

    Returns:
        Exit code: 0 done, 1 differs, 2 cannot run, with one line on stderr that names the value and the fix;
        a traceback only for a fault of Longspan's own.
    """
    try:
        code = _app()(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, LongspanError, OSError) as error:
        print("longspan:", " ".join(str(error).split()), file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        return 2
    except Exception:
        # A fault of Longspan's own; Python's exit code 1 would read as "differs".
        traceback.print_exc()
        return 2
    return code or 0


def _app() -> App:
    app = App(
        name="longspan",
        version=__version__,
        help="Train transformers on sequences too long for one device, and prove that the run is right.",
        default_parameter=Parameter(negative=()),
    )
    app.command(demo)
    app.command(train)
    app.command(verify)
    app.command(export)
    app.command(groups)
    app.command(topics := App(name="explain", help="Say what a run file means, before it runs."))
    topics.command(explain.layout)
    topics.command(explain.config)
    return app
