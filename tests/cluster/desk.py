"""Asks a cluster's service behind ray, from a host of it, for who is outside: a question a line.

python -m tests.cluster.desk FOLDER      # {"kind": ..., "facts": ...} -> the answer's facts
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rollpacker.cluster.commands.desk import Desk


def main(folder: Path) -> None:
    desk = Desk(folder)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = desk.ask(question["kind"], question["facts"])
        except ValueError as error:
            answer = {"refused": str(error)}
        print(f"\n=> {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
