"""Files that a call makes or replaces have the access that they would have without us.

The group of a directory with setgid, and the access list that a directory has for what is made in
it, decide who else can read a file. They come from the file's directory, never from the store's.
"""

from __future__ import annotations

import os
import struct

import pytest

from weakincentives.filesystem import HostFilesystem

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
SOMEBODY = 12345
NOBODY = 0xFFFFFFFF
# user::rwx user:12345:rwx group::r-x mask::rwx other::r-x
ENTRIES = (
    *((0x01, 7, NOBODY), (0x02, 7, SOMEBODY), (0x04, 5, NOBODY)),
    *((0x10, 7, NOBODY), (0x20, 5, NOBODY)),
)
ACL = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in ENTRIES)


def access(path) -> tuple[int, int, bytes | None]:
    """Who may do what with a file: mode, group and access list."""
    status = os.stat(path)
    acl = os.getxattr(path, ACCESS) if ACCESS in os.listxattr(path) else None
    return status.st_mode, status.st_gid, acl


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "workspace"
    (root / "plain").mkdir(parents=True)
    (root / "plain/old").write_text("old")
    return root


def shared(directory) -> None:
    """Give a directory an access list for what is made in it."""
    try:
        os.setxattr(directory, DEFAULT, ACL)
    except (AttributeError, OSError):
        pytest.skip("needs a filesystem with access lists")


@pytest.mark.parametrize("durability", ["fast", "safe"])
def test_access_list_of_the_directory_beside_the_workspace_reaches_no_file(root, durability):
    shared(root.parent)
    before = access(root / "plain/old")
    with HostFilesystem(root, durability=durability) as host:
        host.write("plain/old", "new")
        host.write("plain/new", "new")
        host.run("echo changed >> plain/old; echo new > plain/by_command")

    (root / "plain/plainly").write_text("new")
    assert access(root / "plain/old") == before
    assert access(root / "plain/new") == access(root / "plain/plainly")
    assert access(root / "plain/by_command") == access(root / "plain/plainly")


def test_new_file_has_the_access_list_of_its_directory(root):
    shared(root / "plain")
    with HostFilesystem(root) as host:
        host.write("plain/new", "new")
        host.mkdir("plain/made")
        host.write("plain/made/new", "new")

    (root / "plain/plainly").write_text("new")
    assert access(root / "plain/new") == access(root / "plain/plainly")
    assert access(root / "plain/made/new") == access(root / "plain/plainly")
    assert access(root / "plain/plainly")[2] is not None


def test_new_file_has_the_group_of_a_directory_with_setgid(root):
    try:
        os.chown(root / "plain", -1, 4242)
    except PermissionError:
        pytest.skip("needs to be root")
    (root / "plain").chmod(0o2775)
    with HostFilesystem(root) as host:
        host.write("plain/new", "new")
        view = host.fork()
        view.write("plain/in_a_view", "new")
        host.merge(view)

    assert os.stat(root / "plain/new").st_gid == 4242
    assert os.stat(root / "plain/in_a_view").st_gid == 4242


def test_access_list_that_a_file_has_stays_when_it_is_written(root):
    shared(root / "plain")
    (root / "plain/listed").write_text("old")
    before = access(root / "plain/listed")
    with HostFilesystem(root) as host:
        host.write("plain/listed", "new")

    assert access(root / "plain/listed") == before
    assert before[2] is not None
