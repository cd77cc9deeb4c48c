"""Commands find the project's own environment, and a project cannot name anything else to see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ordinary_user import place_for_others
from weakincentives.contrib.tools import (
    PodmanSandboxConfig,
    PodmanSandboxSection,
    Sandbox,
    SandboxSettings,
    find_sandbox,
)
from weakincentives.contrib.tools.sandbox.environment import (
    ProjectEnvironment,
    project_environment,
)
from weakincentives.core.state import state_directory
from weakincentives.errors import SandboxUnavailable
from weakincentives.filesystem import CommandResult, HostFilesystem

ENGINES = [
    pytest.param("podman", marks=pytest.mark.heavy),
    pytest.param("bubblewrap", marks=pytest.mark.heavy),
    "namespaces",
]
PROGRAM = Path(os.path.realpath("/bin/true"))
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


class Project:
    """A workspace, and the variables of the process that works on it."""

    def __init__(self, place: Path) -> None:
        self.root = place / "project"
        self.home = place / "home"
        self.root.mkdir()
        self.home.mkdir()
        self.variables = {"HOME": str(self.home), "PATH": "/usr/bin:/bin"}
        self.store = place / "store"

    def seen(self, **settings: object) -> ProjectEnvironment:
        return project_environment(
            SandboxSettings(**settings),  # type: ignore[arg-type]
            self.root,
            store=self.store,
            environment=self.variables,
        )

    def names(self) -> list[str]:
        return [each.name for each in self.seen().toolchains]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(PROGRAM, path)
    return path


def interpreter(prefix: Path) -> Path:
    """Make what looks like an installation of Python."""
    write(prefix / "lib/python3.12/os.py")
    program(prefix / "bin/python3.12")
    (prefix / "bin/python").symlink_to("python3.12")
    return prefix


def venv(place: Path, home: Path | str, python: Path | str | None = None) -> Path:
    """Make what looks like a virtual environment of an interpreter in a directory."""
    write(place / "pyvenv.cfg", f"version = 3.12\nhome = {home}\n")
    (place / "bin").mkdir()
    (place / "bin/python").symlink_to(python or f"{home}/python3.12")
    return place


def redirected(place: Path, programs: Path) -> None:
    """Make a virtual environment whose directory of programs is a link."""
    write(place / "pyvenv.cfg", "home = /usr/bin\n")
    (place / "bin").symlink_to(programs)


def made_venv(place: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return place


# In the sandbox


class Box:
    def __init__(self, sandbox: Sandbox, files: HostFilesystem) -> None:
        self.sandbox, self.files, self.root = sandbox, files, files.root

    def run(self, command: str | list[str]) -> CommandResult:
        return self.sandbox.run(self.files, command, timeout=600)


def usable(settings: SandboxSettings) -> Sandbox:
    try:
        return find_sandbox(settings)
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=ENGINES)
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    (tmp_path / "work").mkdir()
    made_venv(tmp_path / "work/.venv")
    with HostFilesystem(tmp_path / "work") as files:
        yield Box(usable(SandboxSettings(engine=request.param)), files)


def test_programs_of_the_projects_environment_run(box: Box):
    """Their first line names the interpreter by the path of the project outside."""
    script = box.root / ".venv/bin/hello"
    write(script, f"#!{box.root}/.venv/bin/python\nimport sys\nprint(sys.prefix)\n").chmod(0o755)

    done = box.run("hello; .venv/bin/hello; python -c 'import sys; print(sys.prefix)'; pwd")

    assert done.ok, done.stderr
    assert done.stdout.splitlines() == [*[f"{box.root}/.venv"] * 3, str(box.root)]


def test_both_paths_of_the_workspace_are_one_directory(box: Box):
    both = f"echo 1 >/workspace/a; echo 2 >{box.root}/b; cat {box.root}/a /workspace/b"

    assert box.run(f"{both}; exit 1").stdout == "1\n2\n"
    assert not (box.root / "a").exists()
    assert not (box.root / "b").exists()

    assert box.run(both).stdout == "1\n2\n"
    assert (box.root / "a").read_text() + (box.root / "b").read_text() == "1\n2\n"


def test_toolchains_are_read_only_and_what_is_beside_them_is_hidden(box: Box):
    base = Path(sys.base_prefix)
    attack = f"touch {base}/planted || touch {base}/bin/planted; ls -A {Path.home()}/.ssh"

    assert not box.run(attack).ok
    assert not list(base.glob("planted*"))


def test_python_leaves_no_byte_code_behind(box: Box):
    box.files.write("module.py", "x = 1\n")

    assert box.run("python -c 'import module'").ok
    assert not (box.root / "__pycache__").exists()


def test_settings_apply_in_the_sandbox(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache outlives the command that fails; a secret is passed on only if it is named."""
    outside = write(tmp_path / "outside/data", "shared").parent
    (tmp_path / "cache").mkdir()
    program(tmp_path / "outside/bin/mine")
    monkeypatch.setenv("TOKEN", "given")
    monkeypatch.setenv("OTHER", "kept back")
    settings = SandboxSettings(
        engine=box.sandbox.name,
        read=(str(outside),),
        write=("../cache",),
        path=("../outside/bin",),
        env=("TOKEN", "MODE=test"),
    )
    sandbox = usable(settings)

    done = sandbox.run(
        box.files,
        f"cat {outside}/data; echo $TOKEN $MODE $OTHER; mine && echo x >{tmp_path}/cache/kept"
        f" && echo y >gone; touch {outside}/data; exit 1",
    )

    assert done.stdout == "shared" + "given test\n"
    assert (tmp_path / "cache/kept").read_text() == "x\n"
    assert not (box.root / "gone").exists()


def test_our_state_stays_hidden_in_what_is_read(box: Box, tmp_path: Path):
    (tmp_path / "unrelated").write_text("seen")
    settings = SandboxSettings(engine=box.sandbox.name, read=(str(tmp_path),))
    state = os.environ["XDG_STATE_HOME"]

    script = f"cat {tmp_path}/unrelated; ls -A {state} {state}/wink {box.files.store}; true"
    done = usable(settings).run(box.files, script)

    assert done.stdout == "seen"
    assert done.ok


def test_a_store_that_is_made_later_is_hidden_as_well(tmp_path: Path):
    (tmp_path / "work").mkdir()
    sandbox = usable(SandboxSettings(engine="namespaces", read=(str(tmp_path),)))
    sandbox.environment(tmp_path / "work")  # as when the prompt is rendered

    with HostFilesystem(tmp_path / "work", store=tmp_path / "kept") as files:
        assert sandbox.run(files, f"ls -A {tmp_path}/kept", timeout=600).stdout == ""


def test_a_writable_directory_cannot_redirect_what_is_shown_next(box: Box, tmp_path: Path):
    """Poetry, for example, has its environments in the user's cache."""
    secret = write(tmp_path / "secret/key", "top secret").parent
    place = made_venv(tmp_path / "cache/env")
    settings = SandboxSettings(
        engine=box.sandbox.name, write=(str(tmp_path / "cache"),), read=(str(place),)
    )
    sandbox = usable(settings)

    attack = f"rm -rf {place} && ln -s {secret} {place}"
    assert sandbox.run(box.files, attack).ok
    assert sandbox.run(box.files, f"cat {place}/key").stdout == ""


def test_a_toolchain_that_goes_away_does_not_stop_all_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Python is upgraded while an agent works, for example."""
    place = made_venv(tmp_path / "env")
    monkeypatch.setenv("VIRTUAL_ENV", str(place))
    (tmp_path / "work").mkdir()
    sandbox = usable(SandboxSettings(engine="namespaces"))
    with HostFilesystem(tmp_path / "work") as files:
        assert sandbox.run(files, 'test -x "$VIRTUAL_ENV/bin/python"', timeout=600).ok
        shutil.rmtree(place)
        assert sandbox.run(files, "echo x", timeout=600).stdout == "x\n"


@pytest.mark.parametrize("root", ["/", "/proc", "/proc/sys/kernel", "/sys"])
def test_a_workspace_with_the_kernels_files_is_refused(root: str):
    """Root could change how core dumps are handled, for example: by a program outside."""
    sandbox = usable(SandboxSettings(engine="namespaces"))

    with pytest.raises(ValueError, match="cannot be confined"):
        sandbox.environment(Path(root))


def test_a_workspace_below_var_tmp_works(request: pytest.FixtureRequest, box: Box):
    """In there, that is a link to the scratch directory."""
    root = Path(tempfile.mkdtemp(dir="/var/tmp"), "work")
    request.addfinalizer(lambda: shutil.rmtree(root.parent))
    root.mkdir()
    with HostFilesystem(root) as files:
        done = box.sandbox.run(files, f"echo x >{root}/made; cat /workspace/made", timeout=600)
        assert (done.stdout, done.stderr) == ("x\n", "")
        assert files.read("made") == "x\n"


def test_without_a_sandbox_the_active_environment_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place = made_venv(tmp_path / "elsewhere/env")
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("VIRTUAL_ENV", str(place))
    monkeypatch.setenv("WINK_TEST_SECRET", "hunter2")

    with HostFilesystem(tmp_path / "work") as files:
        code = "import os, sys; print(sys.prefix, os.environ['HOME'], *sorted(os.environ))"
        done = find_sandbox("none").run(files, ["python", "-c", code])

    prefix, home, *names = done.stdout.split()
    assert (prefix, home) == (str(place), os.environ["HOME"])
    assert "VIRTUAL_ENV" in names
    assert "WINK_TEST_SECRET" not in names


def test_the_model_is_told_where_it_is_and_what_it_has(tmp_path: Path):
    root = tmp_path / "work"
    made_venv(root / ".venv")
    (tmp_path / "cache").mkdir()
    settings = SandboxSettings(engine="namespaces", write=(str(tmp_path / "cache"),))
    usable(settings)
    config = PodmanSandboxConfig(workspace=root, sandbox=settings)
    section = PodmanSandboxSection(config=config)

    told = section.body(None, None)

    assert f"Commands start in {root}, the workspace. /workspace is the same directory." in told
    assert "The project's own tools are in PATH: virtual environment (.venv)" in told
    assert f"{tmp_path}/cache is writable as well, and changes there are never undone." in told
    [shell] = [tool for tool in section.tools if tool.name == "shell_execute"]
    assert shell.reach is None


def test_settings_are_given_in_one_place():
    with pytest.raises(ValueError, match="env is a part of SandboxSettings: give it there"):
        PodmanSandboxConfig(sandbox=SandboxSettings(), env={"A": "1"})


# What is detected


def test_the_active_environment_comes_before_those_of_the_project(project: Project, tmp_path: Path):
    base = interpreter(tmp_path / "pythons/3.12")
    local = venv(project.root / ".venv", base / "bin")
    active = venv(tmp_path / "envs/active", base / "bin")

    assert project.seen().toolchains[0].place == str(local)
    project.variables["VIRTUAL_ENV"] = str(active)
    seen = project.seen()

    assert seen.toolchains[0].place == seen.env["VIRTUAL_ENV"] == str(active)
    assert seen.env["PATH"].startswith(f"{active}/bin:")
    assert {target for _, _, target in seen.mounts} == {str(active), str(base)}


def test_our_own_environment_is_used_if_there_is_no_other(project: Project, tmp_path: Path):
    project.variables["VIRTUAL_ENV"] = sys.prefix
    assert project.seen().toolchains[0].source == "VIRTUAL_ENV"

    local = venv(project.root / "venv", interpreter(tmp_path / "pythons/3.12") / "bin")
    assert project.seen().toolchains[0].place == str(local)


def test_links_on_the_way_to_an_interpreter_are_shown(project: Project, tmp_path: Path):
    """uv names its interpreters by a link without the last part of the version."""
    base = interpreter(tmp_path / "uv/cpython-3.12.4")
    (tmp_path / "uv/cpython-3.12").symlink_to("cpython-3.12.4")
    venv(project.root / ".venv", tmp_path / "uv/cpython-3.12/bin")

    assert set(project.seen().mounts) == {
        ("read", str(base), str(base)),
        ("link", "cpython-3.12.4", str(tmp_path / "uv/cpython-3.12")),
    }


def test_an_environment_whose_interpreter_is_gone_is_reported(project: Project, tmp_path: Path):
    venv(project.root / ".venv", tmp_path / "pythons/3.9/bin")

    seen = project.seen()

    assert seen.toolchains == ()
    assert seen.refused[0][0] == str(project.root / ".venv")
    assert "make the environment again" in seen.refused[0][1]


def test_conda_environments_are_found(project: Project, tmp_path: Path):
    place = interpreter(tmp_path / "conda/envs/science")
    (place / "conda-meta").mkdir()
    project.variables["CONDA_PREFIX"] = str(place)

    seen = project.seen()

    assert [each.name for each in seen.toolchains] == ["conda"]
    assert (seen.env["CONDA_PREFIX"], seen.env["CONDA_DEFAULT_ENV"]) == (str(place), "science")


@pytest.mark.parametrize("chosen", ["3.12", "3.12.1\n", "# ours\n3.12.1 3.11"])
def test_pyenv_finds_the_version_of_the_project(project: Project, chosen: str):
    versions = project.home / ".pyenv/versions"
    for name in ("3.9.2", "3.12.1", "3.120.0"):
        interpreter(versions / name)
    write(project.root / ".python-version", chosen.replace("# ours\n", ""))

    assert project.seen().toolchains[0].place == str(versions / "3.12.1")


def test_node_cargo_and_go_are_found(project: Project):
    home = project.home
    node = program(home / ".nvm/versions/node/v20.1.0/bin/node").parents[1]
    (node / "lib/node_modules").mkdir(parents=True)
    program(home / ".nvm/versions/node/v18.0.0/bin/node")
    (project.root / "node_modules/.bin").mkdir(parents=True)
    program(home / ".cargo/bin/cargo")
    write(home / ".cargo/credentials.toml", "token")
    write(home / ".cargo/registry/index")
    write(home / ".rustup/settings.toml")
    write(program(home / "sdk/go/bin/go").parents[1] / "VERSION", "go1.22")
    (home / "go/pkg/mod").mkdir(parents=True)
    project.variables["PATH"] = f"{home}/sdk/go/bin"

    seen = project.seen()

    names = [each.name for each in seen.toolchains]
    assert names == ["Node packages", "Node", "Cargo", "Go"]
    shown = [os.path.relpath(target, home) for _, _, target in seen.mounts]
    assert sorted(shown) == [
        ".cargo/bin",
        ".cargo/registry",
        ".nvm/versions/node/v20.1.0",
        ".rustup",
        "go/pkg/mod",
        "sdk/go",
    ]
    assert seen.env["CARGO_NET_OFFLINE"] == "true"
    assert seen.env["PATH"].split(":")[0] == f"{project.root}/node_modules/.bin"


def test_volta_finds_its_default_version(project: Project):
    volta = project.home / ".volta"
    image = program(volta / "tools/image/node/20.1.0/bin/node").parents[1]
    (image / "lib/node_modules").mkdir(parents=True)
    write(volta / "tools/user/platform.json", '{"node": {"runtime": "20.1.0", "npm": null}}')
    program(volta / "bin/volta-shim")
    (volta / "bin/node").symlink_to("volta-shim")
    project.variables["PATH"] = f"{volta}/bin"

    assert project.seen().toolchains[0].place == str(image)


def test_detection_can_be_disabled(project: Project, tmp_path: Path):
    venv(project.root / ".venv", interpreter(tmp_path / "pythons/3.12") / "bin")

    assert project.seen(detect=False).mounts == ()
    assert project.seen(image="localhost/tools").mounts == ()


# What a hostile project names


def test_a_home_directory_is_never_an_interpreter(project: Project):
    """Not even one with a Python in its bin."""
    interpreter(project.home)
    venv(project.root / ".venv", project.home / "bin")

    seen = project.seen()

    assert seen.mounts == ()
    assert f"it contains {project.home}" in seen.refused[0][1]


def test_nor_is_that_of_somebody_else(project: Project, tmp_path: Path):
    interpreter(tmp_path / "alice")
    (tmp_path / "alice/.ssh").mkdir()
    venv(project.root / ".venv", tmp_path / "alice/bin")

    seen = project.seen()

    assert seen.mounts == ()
    assert "looks like a home directory" in seen.refused[0][1]


@pytest.mark.parametrize(
    "plant",
    [
        lambda root, private: venv(root / ".venv", private),
        lambda root, private: venv(root / ".venv", "/"),
        lambda root, private: venv(root / ".venv", private / "bin"),
        lambda root, private: venv(root / ".venv", "/usr/bin", private / "bin/python3"),
        lambda root, private: redirected(root / ".venv", private / "bin"),
        lambda root, private: redirected(root / ".venv", private),
        lambda root, private: (root / ".venv").symlink_to(private),
        lambda root, private: (root / ".venv").symlink_to(".venv"),
        lambda root, private: write(root / ".python-version", str(private)),
        lambda root, private: write(root / ".python-version", "../../private"),
        lambda root, private: os.mkfifo(write(root / ".venv/x").parent / "pyvenv.cfg"),
        lambda root, private: write(root / ".nvmrc", "../../../private"),
        lambda root, private: (root / "venv").symlink_to("/proc/self/root"),
        lambda root, private: (root / ".python-version").symlink_to("/proc/kmsg"),
    ],
)
def test_a_project_cannot_name_what_is_not_a_toolchain(project: Project, tmp_path: Path, plant):
    private = write(tmp_path / "private/bin/python3", "#!/bin/sh\n").parents[1]
    write(private / "key", "top secret")
    (private / "bin/python3").chmod(0o755)
    program(private / "bin/python")
    program(private / "python")
    (project.home / ".pyenv/versions").mkdir(parents=True)
    (project.home / ".nvm/versions/node").mkdir(parents=True)
    plant(project.root, private)

    assert all(kind == "link" for kind, _, _ in project.seen().mounts)


@given(data=st.data())
def test_no_toolchain_shows_anything_private(tmp_path_factory: pytest.TempPathFactory, data):
    """Whatever an environment says, the home, the workspace and the store are in no mount."""
    project = Project(tmp_path_factory.mktemp("place"))
    place = project.root.parent
    project.store.mkdir()
    prefixes = [place, project.home, project.store, project.root, project.home / "pythons"]
    for prefix in prefixes:
        if not (prefix / "bin/python").exists():
            interpreter(prefix)
    spelled = st.sampled_from([*prefixes, Path("/"), Path("/etc"), Path("/proc/self/cwd")])
    home = data.draw(spelled) / data.draw(st.sampled_from(["bin", "lib", "bin/..", "."]))
    python = data.draw(spelled) / data.draw(st.sampled_from(["bin/python3.12", "bin", "x"]))
    if data.draw(st.booleans()):
        venv(project.root / ".venv", home, python)
    else:
        redirected(
            project.root / ".venv",
            data.draw(spelled) / data.draw(st.sampled_from(["x", "bin", "."])),
        )
        program(place / "x/python")
    if data.draw(st.booleans()):
        project.variables["VIRTUAL_ENV"] = str(data.draw(spelled))

    bound = [Path(source) for kind, source, _ in project.seen().mounts if kind != "link"]

    private = (project.home, project.root, project.store, place)
    assert not [each for each in bound if any(path.is_relative_to(each) for path in private)]


def test_what_the_owner_of_the_workspace_cannot_read_is_not_shown():
    """Commands of root run as the owner of the files."""
    if os.geteuid() != 0:
        pytest.skip("only root can work for others")
    with place_for_others() as place:
        project = Project(place)
        base = interpreter(place / "private/3.12")
        (place / "private").chmod(0o700)
        venv(project.root / ".venv", base / "bin")

        seen = project_environment(
            SandboxSettings(), project.root, user=65534, environment=project.variables
        )

    assert seen.mounts == ()
    assert "cannot read it" in seen.refused[0][1]


# Another project beside this one


def other_project(place: Path) -> Path:
    """Make a project that is itself an environment, with a secret."""
    write(place / ".env", "TOKEN=top secret")
    write(place / "src/app.py", "x = 1")
    interpreter(place)
    return place


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("inner", ["", ".venv", "env"])
def test_a_link_does_not_show_the_environment_of_another_project(
    project: Project, tmp_path: Path, inner: str, active: bool
):
    """Not even if a shell has followed the link, and says that the environment is active."""
    other = other_project(tmp_path / "other")
    place = venv(other / inner, "/usr/bin") if inner else other
    if not inner:
        write(other / "pyvenv.cfg", "home = /usr/bin\n")
    (project.root / ".venv").symlink_to(f"../other/{inner}")
    if active:
        project.variables["VIRTUAL_ENV"] = str(project.root / ".venv")

    seen = project.seen()

    assert [mount for mount in seen.mounts if mount[0] != "link"] == []
    assert seen.refused[0][0] == str(project.root / ".venv")
    assert f"it leads to {place}, which is not in the workspace" in seen.refused[0][1]


@pytest.mark.parametrize(
    "name",
    [
        lambda root, other: venv(root / ".venv", other / "bin"),
        lambda root, other: venv(root / ".venv", "/usr/bin", other / "bin/python3.12"),
        lambda root, other: venv(root / ".venv", other / "src", "/usr/bin/python3"),
        lambda root, other: venv(root / ".venv", other / "bin/../src", "/usr/bin/python3"),
        lambda root, other: redirected(root / ".venv", other / "bin"),
        lambda root, other: (other / "conda-meta").mkdir() or (root / "env").symlink_to(other),
    ],
)
@pytest.mark.parametrize("place", ["other", "3.12", "home/3.12"])
def test_the_interpreter_of_a_project_is_never_another_project(
    project: Project, tmp_path: Path, name, place: str
):
    name(project.root, other_project(tmp_path / place))

    seen = project.seen()

    assert [mount for mount in seen.mounts if mount[0] != "link"] == []
    assert seen.refused


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, "home/.virtualenvs/shop"),
        ({}, "home/.cache/pypoetry/virtualenvs/shop-py3.12"),
        ({"WORKON_HOME": "{}/envs"}, "envs/shop"),
        ({"PYENV_ROOT": "{}/pyenv"}, "pyenv/versions/shop"),
    ],
)
def test_a_link_may_lead_to_where_environments_usually_are(
    project: Project, tmp_path: Path, variables: dict[str, str], place: str
):
    project.variables |= {name: text.format(tmp_path) for name, text in variables.items()}
    real = venv(tmp_path / place, "/usr/bin")
    (project.root / ".venv").symlink_to(real)

    assert project.seen().toolchains[0].place == str(project.root / ".venv")
    assert set(project.seen().mounts) == {("read", str(real), str(real))}


def test_of_an_environment_only_its_own_parts_are_shown(project: Project, tmp_path: Path):
    """Some people make one at the top of a project, and activate it."""
    other = other_project(tmp_path / "other")
    write(other / "pyvenv.cfg", "home = /usr/bin\n")
    (other / "lib64").symlink_to("lib")
    (other / "include").symlink_to(write(tmp_path / "private/key").parent)
    project.variables["VIRTUAL_ENV"] = str(other)

    seen = project.seen()

    assert seen.toolchains[0].place == str(other)
    shown = {Path(target).name for kind, _, target in seen.mounts if kind == "read"}
    assert shown == {"bin", "lib", "pyvenv.cfg"}
    assert ("link", "lib", f"{other}/lib64") in seen.mounts


def test_an_interpreter_in_its_usual_place_shows_only_its_own_parts(project: Project):
    base = other_project(project.home / ".pyenv/versions/3.12.1")
    venv(project.root / ".venv", base / "bin")

    shown = {os.path.relpath(target, base) for _, _, target in project.seen().mounts}

    assert shown == {"bin", "lib"}


def test_commands_do_not_see_another_project(box: Box, tmp_path: Path):
    other = other_project(tmp_path / "other")
    write(other / "pyvenv.cfg", "home = /usr/bin\n")
    shutil.rmtree(box.root / ".venv")
    (box.root / ".venv").symlink_to("../other")

    done = box.run("cat ../other/.env .venv/.env; ls ..")

    assert "top secret" not in done.stdout
    assert done.stdout.split() == ["work"]


# Settings that cannot be met


@pytest.mark.parametrize("name", ["home", "project", "store", "state", "ours", "usr", "tmp"])
def test_what_must_stay_as_it_is_cannot_be_writable(project: Project, name: str):
    places = {
        "home": project.root.parent,
        "project": project.root,
        "store": project.store,
        "state": state_directory(),
        "ours": Path(sys.prefix) / "lib",
        "usr": Path("/usr/share"),
        "tmp": Path("/tmp"),
    }
    project.store.mkdir()

    with pytest.raises(ValueError, match=r"sandbox\.write: .* (must not be|is in the workspace)"):
        project.seen(write=(str(places[name]),))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"read": ("/nowhere",)}, r"sandbox\.read: there is no /nowhere"),
        ({"write": ("nowhere",)}, r"sandbox\.write: there is no .*/project/nowhere"),
        ({"read": ("/",)}, r"sandbox\.read: / contains /usr"),
        ({"read": "/usr"}, "read takes several values"),
        ({"env": ("A B",)}, "env takes NAME or NAME=VALUE"),
        ({"engine": "docker"}, "sandbox must be one of"),
        ({"engine": "bubblewrap", "image": "x"}, "an image needs podman"),
        ({"engine": "none", "network": ("packages.example.org",)}, "needs a sandbox"),
        (
            {"network": ("https://packages.example.org/simple",)},
            "https://packages.example.org/simple",
        ),
        ({"timeout": 0}, "timeout must be positive"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(project: Project, settings, said: str):
    with pytest.raises(ValueError, match=said):
        project.seen(**settings)


@pytest.mark.parametrize("key", ["read", "write"])
def test_no_link_that_commands_can_change_decides_what_they_see(
    project: Project, tmp_path: Path, key: str
):
    """They could make it lead to anything, and the next run would mount that."""
    (tmp_path / "cache/inner").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (project.root / "cache").symlink_to(tmp_path / "cache")
    (tmp_path / "cache/link").symlink_to(tmp_path / "mine")
    (project.home / "cache").symlink_to(tmp_path / "cache")
    through = str(project.home / "cache/link")

    for named in ("cache", "cache/inner"):
        with pytest.raises(
            ValueError, match=rf"sandbox\.{key}: .* a link that commands can change"
        ):
            project.seen(**{key: (named,)})
    settings = {"write": (str(tmp_path / "cache"),)}
    settings[key] = (*settings.get(key, ()), through)
    with pytest.raises(ValueError, match="a link that commands can change"):
        project.seen(**settings)
    assert project.seen(**{key: (str(project.home / "cache"),)}).mounts  # a link of the user


def test_our_own_state_cannot_be_read(project: Project):
    with pytest.raises(ValueError, match="WINK's own state"):
        project.seen(read=(str(state_directory()),))


@pytest.mark.parametrize(
    ("root", "places"),
    [
        ("/home/you/project", ("/home/you/project", "/workspace")),
        ("/workspace", ("/workspace",)),
        ("/workspace/project", ("/workspace/project",)),
        ("/workspaces/project", ("/workspaces/project", "/workspace")),
        ("/usr/src/project", ("/usr/src/project", "/workspace")),
        ("/", ("/workspace",)),
        ("/usr", ("/workspace",)),
        ("/var", ("/workspace",)),
        ("/tmp", ("/workspace",)),
        ("/proc/1/cwd", ("/workspace",)),
    ],
)
def test_the_path_of_the_workspace_never_covers_the_system(root: str, places: tuple[str, ...]):
    assert project_environment(SandboxSettings(detect=False), Path(root)).places == places
