"""`python -m weakincentives.cli` is `wink`."""

from weakincentives.cli.entry import main

if __name__ == "__main__":
    main()
