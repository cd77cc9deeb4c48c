"""Started by an agent at each event: hands it to the process that records, or records it itself."""

import sys

if __name__ == "__main__":
    import posix

    package = sys.argv[0].rpartition("/weakincentives/")[0]
    posix.execv(
        sys.executable, [sys.executable, "-P", "-m", "weakincentives.cli", "hook", "run", *sys.argv[1:]]
    )
