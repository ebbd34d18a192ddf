"""A process that answers: kind 1 with the value of a variable, 2 with the same, 3 never again."""

import os
import sys
import time

from rollpacker.workers.line import LineEnded, inherited_line

line = inherited_line()
try:
    while True:
        message = line.receive()
        if message.kind == 3:
            time.sleep(600)
        said = message.payload
        if message.kind == 1:
            said = os.environ.get(said.decode(), "").encode()
        line.send(message.kind, message.number, said)
except LineEnded:
    sys.exit(0)
