"""How paths are spelled, and that none of them leads out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import KINDS, ON_DISK, filesystem

from weakincentives.errors import FilesystemError, PathEscapesRoot
from weakincentives.filesystem import HostFilesystem

PIECES = st.sampled_from(
    ["a", "b.txt", "..", ".", "", "/", "/workspace", "workspace", "\\", "..\\", "é", "\0", "\ud800"]
)
PATHS = st.lists(PIECES, max_size=8).map("/".join) | st.text(max_size=30)


@pytest.mark.parametrize(
    "path",
    [
        "a.txt",
        "./a.txt",
        "x/../a.txt",
        "/workspace/a.txt",
        "/workspace/./x/../a.txt",
        "//workspace//a.txt",
        "a.txt/",
    ],
)
def test_every_spelling_reaches_the_one_file(make, path):
    fs = make({"a.txt": "one"})

    assert fs.normalize(path) == "a.txt"
    assert fs.read(path) == "one"


def test_files_on_disk_are_also_found_by_their_own_path(tmp_path):
    """Commands and error messages name them so; a link to the directory may be part of it."""
    (tmp_path / "real/x").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    with HostFilesystem(tmp_path / "link") as fs:
        for place in (tmp_path / "real", tmp_path / "link"):
            fs.write(f"{place}/x/../a.txt", str(place))

            assert fs.read("a.txt") == str(place)
            assert fs.glob(f"{place}/*.txt") == ("a.txt",)
            for path in (f"{place}/../secret", f"{place}.wink/a", str(tmp_path)):
                with pytest.raises(PathEscapesRoot):
                    fs.read(path)


@pytest.mark.parametrize("path", ["", ".", "/workspace", "/workspace/", "x/..", "./."])
def test_root_has_one_spelling_too(make, path):
    fs = make(["a.txt"])

    assert fs.normalize(path) == "."
    assert [entry.path for entry in fs.list(path)] == ["a.txt"]


@pytest.mark.parametrize(
    "path",
    ["..", "../a", "a/../../b", "/", "/etc/passwd", "/workspace/../etc", "/workspaces/a", "/../a"],
)
def test_path_outside_the_root_is_refused_and_says_where_to_look(make, path):
    fs = make()

    with pytest.raises(PathEscapesRoot, match="below /workspace") as refusal:
        fs.write(path, "x")
    assert path in str(refusal.value)
    assert isinstance(refusal.value, PermissionError)
    assert fs.list() == ()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("a\0b", "NUL"),
        ("x" * 256, "255 bytes"),
        ("é" * 128, "255 bytes"),
        ("\ud800.txt", "surrogate"),
        ("/".join(["ab"] * 2000), "4096 bytes"),
    ],
)
def test_path_that_no_filesystem_could_hold_is_refused(make, path, why):
    fs = make()

    with pytest.raises(FilesystemError, match=why) as refusal:
        fs.write(path, "x")
    message = str(refusal.value)
    assert message.encode()
    assert message.isprintable()
    assert len(message) < 400


def test_longest_name_is_accepted(make):
    fs = make()

    fs.write("é" * 127 + "x", "fits")

    assert fs.read("é" * 127 + "x") == "fits"


def test_backslash_is_an_ordinary_character(make):
    fs = make({"a\\..\\b": "x"})

    assert [entry.path for entry in fs.list()] == ["a\\..\\b"]


def test_prefix_can_be_chosen(make):
    fs = make({"/srv/data/a": "x"}, root="/srv/data")

    assert fs.read("a") == "x"
    with pytest.raises(PathEscapesRoot, match="/srv/data"):
        fs.read("/workspace/a")


def test_prefix_can_be_the_slash(make):
    fs = make({"/etc/passwd": "x"}, root="/")

    assert fs.read("etc/passwd") == "x"


@pytest.mark.parametrize("root", ["", "workspace", "/a/../..", "/a\0"])
def test_prefix_must_be_absolute(make, root):
    with pytest.raises(ValueError, match="root"):
        make(root=root)


@pytest.mark.parametrize("kind", KINDS)
@ON_DISK
@given(PATHS)
def test_paths_never_escape_and_normalising_again_changes_nothing(kind, path):
    with filesystem(kind) as fs:
        try:
            normal = fs.normalize(path)
        except FilesystemError:
            return

        assert fs.normalize(normal) == normal
        assert fs.normalize(f"/workspace/{normal}") == normal
        assert not normal.startswith("/")
        assert normal == "." or not {"", ".", ".."} & set(normal.split("/"))


@pytest.mark.parametrize("kind", KINDS)
@ON_DISK
@given(PATHS, st.text(alphabet="x", max_size=3))
def test_whatever_is_written_is_found_where_it_was_put(kind, path, content):
    with filesystem(kind) as fs:
        try:
            fs.write(path, content)
        except FilesystemError:
            assert fs.list() == ()
        else:
            assert fs.glob("**") == (fs.normalize(path),)
            assert fs.read(path) == content
