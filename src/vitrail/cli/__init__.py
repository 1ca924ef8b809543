"""The command line: `vitrail VERB what --options`.

Results go to stdout, everything else to stderr. A verb's module is imported when tyro needs its signature, torch only
when the verb runs: `--help` and a typo are answered without it.
"""

import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from vitrail.cli.convert import convert
from vitrail.cli.demo import demo
from vitrail.cli.info import info
from vitrail.cli.listing import list_known
from vitrail.errors import UsageError, VitrailError

VERBS: dict[str, Callable[..., Any]] = {"convert": convert, "demo": demo, "info": info, "list": list_known}
OUT_OF_SPACE = 5
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            VERBS,
            prog="vitrail",
            description="Vision Transformers, whole.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        sys.stdout.flush()
    except VitrailError as error:
        print(f"vitrail: {error}", file=sys.stderr)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        print("vitrail: out of memory", file=sys.stderr)
        return OUT_OF_SPACE
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        print(f"vitrail: {'no space left on the disk: ' if full else ''}{error}", file=sys.stderr)
        return OUT_OF_SPACE if full else UsageError.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
