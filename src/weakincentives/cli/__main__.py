"""`python -m weakincentives.cli` runs `wink`."""

from weakincentives.cli.entry import main

if __name__ == "__main__":
    main()
