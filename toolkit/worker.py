"""``python -m toolkit.worker HOME JOB``: do one started job, alone, and write down how it ended.

The job waits for its turn (one started job at a time in a home) and then runs the verb in this very process, with its
progress recorded under the job's id. Ctrl-C (what a cancel sends) ends it like any verb: what was made stays.
"""

from __future__ import annotations

import fcntl
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.cli import INTERRUPTED, end_on_sigterm, run_command
from toolkit.home import Home
from toolkit.jobs import JobTable, folder_of


@contextmanager
def _turn(home: Home) -> Iterator[None]:
    with (folder_of(home) / ".turn").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(home: Home, job: str) -> int:
    """The exit code of the verb."""
    # A server started in the background ignores Ctrl-C, and its children with it: no job could be cancelled.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_on_sigterm()
    code = INTERRUPTED
    with JobTable(home.store) as table:
        work = table.find(job)
        table.adopt(job, "waiting")
        try:
            with _turn(home):
                table.adopt(job, "running")
                code = run_command([work.verb, *work.arguments, "--home", str(home.path), "--recorded-as", job,
                                    "--json"])
        except KeyboardInterrupt:
            code = INTERRUPTED
        finally:
            table.finish(job, code)
    return code


if __name__ == "__main__":
    sys.exit(main(Home(Path(sys.argv[1])), sys.argv[2]))
