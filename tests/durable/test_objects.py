"""Object storage: directories, buckets and tables keep bytes by their digests."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from weakincentives.durable import (
    BucketObjects,
    CollectableObjects,
    DatabaseObjects,
    LocalObjects,
    collect,
    open_objects,
)
from weakincentives.errors import ObjectMissing, StorageUnavailable
from weakincentives.filesystem import (
    Branch,
    BranchUpload,
    line_keys,
    materialize,
    store_tree,
    stored_keys,
    unpack_branch,
)
from weakincentives.runtime.stores.database import Database

KINDS = (
    "directory",
    "bucket",
    "memory",
    "sqlite",
    pytest.param("postgres", marks=pytest.mark.heavy),
)


@pytest.fixture(params=KINDS)
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CollectableObjects]:
    """Each kind of storage."""
    match request.param:
        case "directory":
            yield open_objects(str(tmp_path / "objects"))
        case "bucket":
            yield open_objects((tmp_path / "objects").as_uri())
        case "memory":
            yield open_objects("memory:///")
        case kind:
            url = f"sqlite:///{tmp_path}/objects.db"
            if kind == "postgres":
                url = request.getfixturevalue("postgres").new_database()
            with closing(Database(url)) as database:
                yield open_objects("database:", database)


def key_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_an_object_is_returned_as_it_was_stored(objects: CollectableObjects) -> None:
    for data in (b"", b"\0\xff" * 1000, os.urandom(3 << 20)):
        objects.put(key_of(data), data)
        objects.put(key_of(data), data)
        assert objects.get(key_of(data)) == data


def test_what_is_missing_can_be_told(objects: CollectableObjects) -> None:
    known, unknown = key_of(b"known"), [key_of(b"%d" % n) for n in range(700)]
    objects.put(known, b"known")

    assert objects.missing([known]) == set()
    assert objects.missing([]) == set()
    assert objects.missing([known, *unknown]) == set(unknown)
    with pytest.raises(ObjectMissing, match=unknown[0]):
        objects.get(unknown[0])


def test_only_digests_are_keys(objects: CollectableObjects) -> None:
    for key in ("", "../x", "A" * 64, key_of(b"")[:-1], key_of(b"") + "/"):
        for use in (
            objects.get,
            lambda key: objects.put(key, b""),
            lambda key: objects.missing([key]),
        ):
            with pytest.raises(ValueError, match="not the digest"):
                use(key)


def test_what_nothing_needs_is_collected_when_it_is_old(objects: CollectableObjects) -> None:
    needed, unneeded = key_of(b"needed"), key_of(b"unneeded")
    objects.put(needed, b"needed")
    objects.put(unneeded, b"unneeded")

    assert collect(objects, [needed]) == 0, "an upload may be about to refer to it"
    assert collect(objects, [needed], older_than=-60) == 1

    assert objects.missing([needed, unneeded]) == {unneeded}
    assert [key for key, _ in objects.ages()] == [needed]
    assert collect(objects, [needed], older_than=-60) == 0


def test_a_branch_moves_through_every_storage(objects: CollectableObjects, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "large").write_bytes(os.urandom(5 << 20))
    (root / "a").write_text("text")
    base = store_tree(root, objects)
    branch = Branch.create(root, "x")
    branch.write("a", "changed")
    lines = BranchUpload(branch, objects).pending()
    branch.close()
    objects.put(key_of(b"unneeded"), b"unneeded")
    collect(objects, stored_keys(objects, base) | line_keys(lines), older_than=-60)

    there = materialize(base, tmp_path / "there", objects)
    with closing(unpack_branch(there, "x", lines, objects)) as moved:
        assert moved.read("a") == "changed"
        assert moved.read_bytes("large") == (root / "large").read_bytes()


def test_a_url_chooses_the_storage(tmp_path: Path) -> None:
    assert isinstance(open_objects(f"dir:{tmp_path}/a"), LocalObjects)
    assert isinstance(open_objects(f"{tmp_path}/b"), LocalObjects)
    assert isinstance(open_objects("memory:///"), BucketObjects)
    with closing(Database(f"sqlite:///{tmp_path}/c.db")) as database:
        assert isinstance(open_objects("database:", database), DatabaseObjects)
    with pytest.raises(ValueError, match="need a database"):
        open_objects("database:")
    with pytest.raises(ValueError, match="got nothing"):
        open_objects("")


def test_an_unknown_bucket_is_an_error() -> None:
    with pytest.raises(StorageUnavailable, match="cannot be used"):
        open_objects("nonsense://bucket")


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageUnavailable, match="Not a directory"):
        LocalObjects(tmp_path / "file" / "objects")


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """The disk is a small one of its own, in a mount namespace."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this user cannot make mount namespaces")
    script = """
import hashlib, os, sys
from weakincentives.durable import LocalObjects
from weakincentives.errors import StorageUnavailable
objects = LocalObjects(sys.argv[1])
small, large = b"small", os.urandom(1 << 20)
objects.put(hashlib.sha256(small).hexdigest(), small)
try:
    objects.put(hashlib.sha256(large).hexdigest(), large)
except StorageUnavailable as error:
    assert "No space left" in str(error)
else:
    raise AssertionError("it should be full")
assert objects.get(hashlib.sha256(small).hexdigest()) == small
assert [key for key, _ in objects.ages()] == [hashlib.sha256(small).hexdigest()]
assert not any(name.startswith("new-") for name in os.listdir(sys.argv[1]))
"""
    mounted = 'mount -t tmpfs -o size=256k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, "sh", str(tmp_path), sys.executable, script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_leftovers_of_killed_uploads_are_removed_when_collecting(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    for name in ("new-old", "new-young"):
        (tmp_path / name).write_bytes(b"half")
    os.utime(tmp_path / "new-old", (0, 0))

    collect(objects, [])

    assert os.listdir(tmp_path) == ["new-young"]


def test_an_object_that_is_asked_for_again_stays(tmp_path: Path) -> None:
    """An upload finds it there, and refers to it next."""
    objects = LocalObjects(tmp_path)
    key = key_of(b"old")
    objects.put(key, b"old")
    os.utime(tmp_path / key[:2] / key[2:], (0, 0))

    assert objects.missing([key]) == set()

    assert collect(objects, []) == 0
    assert objects.get(key) == b"old"


def test_an_old_object_of_a_bucket_is_stored_again(tmp_path: Path) -> None:
    objects = BucketObjects(tmp_path.as_uri())
    key = key_of(b"old")
    objects.put(key, b"old")
    os.utime(tmp_path / key[:2] / key[2:], (0, 0))

    assert objects.missing([key]) == {key}
    assert objects.get(key) == b"old"

    objects.put(key, b"old")
    assert objects.missing([key]) == set()


def test_an_s3_server_keeps_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server_module = pytest.importorskip(
        "moto.server", reason="no S3 server: pip install moto[server]"
    )
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        import boto3

        boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="wink")
        objects = open_objects("s3://wink/some/prefix")
        test_an_object_is_returned_as_it_was_stored(objects)
        test_what_is_missing_can_be_told(objects)
        test_a_branch_moves_through_every_storage(objects, tmp_path)
    finally:
        server.stop()
