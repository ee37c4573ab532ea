"""`python -m sparkled.front`: run the front daemon in this process."""

from sparkle import lifecycle
from sparkled.front.service import FrontDaemon

if __name__ == "__main__":
    raise SystemExit(lifecycle.main(FrontDaemon))
