"""Run the compute daemon: python -m sparkled.compute."""

import logging
import os
import sys

from sparkle import lifecycle
from sparkled.compute.service import ComputeDaemon

if __name__ == "__main__":
    code = lifecycle.main(ComputeDaemon)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed. Tearing down the machine-learning libraries would take half a second of CPU more (3 to 4 s
    # on a busy machine, of the 5 that honcho gives), and would meet a step that did not end in time.
    os._exit(code)
