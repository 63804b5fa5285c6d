"""The ``statetap`` command: its verbs, and how an error ends it.

Invariant: a StatetapError ends a command with its code, its sentence and the next step on stderr (as JSON with ``--json``), and exit
code 1; wrong usage ends it with 2.
"""

from __future__ import annotations

import json
import sys

import typer

from ..contracts.errors import StatetapError
from .commands import checks, datasets, exporting, jobs, serving
from .exits import Exit
from .keys import keys_app
from .output import error_document, error_lines, write

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Taps hidden states out of a running SGLang server and keeps them as checked training data.",
)
for _module in (serving, jobs, datasets, checks, exporting):
    app.add_typer(_module.app)
app.add_typer(keys_app, name="keys")


def main() -> None:
    """Entry point."""
    # Everything after -- is SGLang's.
    ours = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    as_json = "--json" in ours
    try:
        # Typer draws a box around wrong usage; for a program the same is one JSON document.
        code = app(prog_name="statetap", standalone_mode=not as_json)
    except StatetapError as e:
        if as_json:
            print(json.dumps(error_document(e)), file=sys.stderr, flush=True)
        else:
            for text in error_lines(e):
                write(sys.stderr, text)
        sys.exit(int(Exit.ERROR))
    except typer.TyperException as e:
        usage = {"code": "usage", "message": e.format_message(), "next_step": "Add --help to the command.", "retryable": False}
        print(json.dumps({"error": usage}), file=sys.stderr, flush=True)
        sys.exit(e.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(int(Exit.INTERRUPTED))
    sys.exit(code)


if __name__ == "__main__":
    main()
