"""What an environment holds: packages and megabytes, with and without byte code.

Standard library only: it also runs in the peers' environments.
"""

from importlib.metadata import distributions

from timing import emit

LEFT_OUT = {"pip", "setuptools", "wheel"}
"""What a fresh environment brings along."""


def measure() -> None:
    packages, code, total = 0, 0, 0
    for distribution in distributions():
        if distribution.metadata["Name"].lower() in LEFT_OUT:
            continue
        packages += 1
        for file in distribution.files or ():
            path = file.locate()
            if not path.is_file():
                continue
            size = path.stat().st_size
            total += size
            if path.suffix != ".pyc":
                code += size
    emit("size", packages=packages, mb=round(total / 1e6, 1), mb_no_bytecode=round(code / 1e6, 1))


if __name__ == "__main__":
    measure()
