"""sandlock: a command that changes one file, beside a bare subprocess.

Without namespaces: Landlock and seccomp. ``copy`` is with its copy-on-write layer, committed at the
end, which is the nearest to what ours does.

``--serve WAY DIRECTORY`` runs one for each line of its input, and prints how long it took: so
``sandbox.py`` measures it in turn with ours.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

from sandlock import BranchAction, Sandbox

CHANGE = "printf changed-$$ >a.txt"
READ = ["/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/dev"]
TIMES = 10 if "--quick" in sys.argv else 150


def confined(root, **options):
    readable = [path for path in READ if os.path.exists(path)]
    limits = {"max_processes": 128, "max_memory": "1G"}
    box = Sandbox(fs_readable=readable, fs_writable=[root], cwd=root, **limits, **options)
    done = box.run(["sh", "-c", CHANGE], timeout=60)
    assert done.success, done


def bare(root):
    subprocess.run(["sh", "-c", CHANGE], cwd=root, check=True, capture_output=True)


def figures(taken):
    ordered = sorted(taken)
    middle, tenth = ordered[len(ordered) // 2], ordered[len(ordered) // 10]
    return {"wall": round(middle * 1e6, 1), "wall_p10": round(tenth * 1e6, 1)}


def ways_in(root):
    return {
        "bare": lambda: bare(root),
        "command": lambda: confined(root),
        "copy": lambda: confined(root, workdir=root, on_exit=BranchAction.COMMIT),
    }


def timed(way):
    began = time.perf_counter()
    way()
    return time.perf_counter() - began


def serve(name, root):
    way = ways_in(root)[name]
    for _ in sys.stdin:
        print(timed(way), flush=True)


def main():
    with tempfile.TemporaryDirectory() as root:
        ways = ways_in(root)
        for rest in (0.0, 0.015):
            taken = {name: [] for name in ways}
            for _ in range(TIMES):
                for name, way in ways.items():
                    time.sleep(rest)
                    taken[name].append(timed(way))
            row = {name: figures(each) for name, each in taken.items()}
            print(json.dumps({"what": "sandlock pace", "rest": rest, **row}), flush=True)


if "--serve" in sys.argv:
    serve(*sys.argv[-2:])
else:
    main()
