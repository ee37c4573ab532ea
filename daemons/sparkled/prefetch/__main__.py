"""Run the prefetch daemon: python -m sparkled.prefetch."""

from sparkle import lifecycle
from sparkled.prefetch.service import PrefetchDaemon

raise SystemExit(lifecycle.main(PrefetchDaemon))
