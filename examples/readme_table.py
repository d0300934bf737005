"""Write the newest run of a job into a Markdown file's marked section: ``python examples/readme_table.py FILE JOB``.

Everything between the two markers is replaced, so the table in README is always a measured one. The run is read through
``toolkit runs export``, as a user would.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

BEGIN, END = "<!-- demo table: begin -->", "<!-- demo table: end -->"


def exported(job: str, home: list[str]) -> tuple[dict[str, object], str]:
    """(facts, Markdown) of the job's newest run."""
    with tempfile.TemporaryDirectory() as folder:
        parts = {}
        for kind in ("json", "md"):
            path = Path(folder) / f"run.{kind}"
            command = [sys.executable, "-m", "toolkit", "runs", "export", job, "--format", kind, "--quiet"]
            subprocess.run([*command, "--out", str(path), *home], check=True, stdout=subprocess.DEVNULL)
            parts[kind] = path.read_text(encoding="utf-8")
    return json.loads(parts["json"]), parts["md"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("job")
    parser.add_argument("--home")
    options = parser.parse_args()
    text = options.file.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"{options.file} needs one {BEGIN} and one {END}")
    run, table = exported(options.job, ["--home", options.home] if options.home else [])
    facts = run["facts"]
    assert isinstance(facts, dict)
    heading = f"Run `{run['run']}`, {str(run['finished'])[:10]}, {facts['device']}.\n\n"
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    options.file.write_text(f"{head}{BEGIN}\n{heading}{table}{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
