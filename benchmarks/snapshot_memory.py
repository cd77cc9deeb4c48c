"""Snapshot a workspace in memory, write one file, roll back; beside the write alone."""

from timing import compare, emit, is_quick
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.resources import Binding, ResourceRegistry
from weakincentives.runtime import Session, create_snapshot, restore_snapshot

BODY = "x" * 1024


def measure(files: int, batches: int) -> None:
    fs = MemoryFilesystem({f"d{i // 100}/f{i}.txt": BODY for i in range(files)})
    session = Session()
    resources = ResourceRegistry.of(Binding.instance(Filesystem, fs)).open()
    resources.get(Filesystem)

    def write() -> None:
        fs.write("d0/f1.txt", "changed")

    def through_filesystem() -> None:
        before = fs.snapshot()
        write()
        fs.restore(before)

    def through_session() -> None:
        before = create_snapshot(session, resources)
        write()
        restore_snapshot(session, resources, before)

    start = fs.read("d0/f1.txt")
    through_session()
    assert fs.read("d0/f1.txt") == start
    samples = compare(
        {"write": write, "filesystem": through_filesystem, "session": through_session},
        times=20,
        batches=batches,
    )
    figures = {name: taken.figures() for name, taken in samples.items()}
    for way in ("filesystem", "session"):
        emit(
            f"snapshot {way}",
            files=files,
            cycle=figures[way],
            write=figures["write"],
            over_bare=round(figures[way]["cpu"] - figures["write"]["cpu"], 3),
            over_bare_wall=round(figures[way]["wall"] - figures["write"]["wall"], 3),
            ratio=round(figures[way]["cpu"] / figures["write"]["cpu"], 1),
        )


if __name__ == "__main__":
    quick = is_quick()
    for files in (100, 1_000, 10_000):
        measure(files, 30 if quick else 300)
