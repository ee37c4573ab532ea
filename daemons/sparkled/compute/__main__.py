"""Run the compute daemon: python -m sparkled.compute."""

from sparkle import lifecycle
from sparkled.compute.service import ComputeDaemon

raise SystemExit(lifecycle.main(ComputeDaemon))
