"""The container files keep their promises; where there is podman or docker, the image is built and started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from fedpews.cli import app

ROOT = Path(__file__).parents[2]
yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return loaded


def instructions(name: str) -> list[str]:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(f"{name} ")]


@pytest.mark.parametrize("service", ["coordinator", "site"])
def test_a_container_has_no_root_no_capabilities_and_a_read_only_disk(service: str, compose: Any) -> None:
    made = compose["services"][service]
    assert made["user"] == "${USER_ID:-10001}:${GROUP_ID:-10001}"
    assert (made["read_only"], made["cap_drop"], made["tmpfs"]) == (True, ["ALL"], ["/tmp"])
    assert made["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in made


@pytest.mark.parametrize("service", ["coordinator", "site"])
def test_secrets_are_files_and_never_in_the_environment_or_the_image(service: str, compose: Any) -> None:
    made = compose["services"][service]
    assert "environment" not in made
    assert "env_file" not in made
    for name in made["secrets"]:
        assert set(compose["secrets"][name]) == {"file"}
        assert f"/run/secrets/{name}" in made["command"]
    assert not re.search(r"(?i)secret|token|password", " ".join(instructions("ENV") + instructions("ARG")))
    assert (ROOT / ".dockerignore").read_text().startswith("*\n")


def test_a_site_opens_no_port_to_the_network_and_its_data_is_read_only(compose: Any) -> None:
    site, coordinator = compose["services"]["site"], compose["services"]["coordinator"]
    assert all(port.startswith("127.0.0.1:") for port in site["ports"])
    assert [port for port in coordinator["ports"] if not port.startswith("127.0.0.1:")] == ["8443:8443"]
    assert "./data:/srv/data:ro" in site["volumes"]
    assert all("./app:/srv/app:ro" in made["volumes"] for made in (site, coordinator))


@pytest.mark.parametrize("service", ["coordinator", "site"])
def test_the_commands_are_commands_of_this_version(service: str, compose: Any) -> None:
    words = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in compose["services"][service]["command"]]
    group: Any = typer.main.get_command(app)
    while words[0] in getattr(group, "commands", {}):
        group = group.commands[words.pop(0)]
    known = {option for parameter in group.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_the_image_runs_as_a_user_and_installs_extras_that_exist() -> None:
    import tomllib

    assert instructions("USER") == ["10001:10001"]
    extras = re.search(r"/src\[(.*?)\]", " ".join(instructions("RUN")))
    assert extras is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras[1].split(",")) <= project["optional-dependencies"].keys()
    for file in instructions("COPY"):
        assert all((ROOT / name).exists() for name in file.split()[:-1])


def test_a_hospital_types_at_most_four_commands() -> None:
    text = (ROOT / "docs" / "how-to" / "containers.md").read_text()
    block = text.split("## Commands at a hospital\n", 1)[1].split("\n## ", 1)[0]
    commands = [line for line in re.findall(r"^    (\S.*)$", block, re.MULTILINE) if not line.startswith("#")]
    assert 1 <= len(commands) <= 4
    assert any("docker compose --profile site up" in line for line in commands)


def engine() -> tuple[str, str]:
    """A container engine that works here, and why there is none."""
    why = "neither podman nor docker is installed (apt-get install podman)"
    for name in ("podman", "docker"):
        if shutil.which(name):
            done = subprocess.run([name, "info"], capture_output=True, text=True, check=False, timeout=60)
            if done.returncode == 0:
                return name, ""
            why = f"{name} does not work here: {(done.stderr or done.stdout).strip().splitlines()[-1]:.150}"
    return "", why


@pytest.mark.slow
def test_the_image_is_built_and_its_container_runs_without_root() -> None:
    """FEDPEWS_BASE names a base image that is here already; FEDPEWS_PIP has options for pip."""
    name, why = engine()
    if not name:
        pytest.skip(why)
    build = [name, "build", "-t", "fedpews-test", *os.environ.get("FEDPEWS_BUILD", "").split()]
    base = os.environ.get("FEDPEWS_BASE")
    build += ["--build-arg", f"BASE={base}"] if base else []
    build += ["--build-arg", f"PIP_OPTIONS={os.environ.get('FEDPEWS_PIP', '')}", str(ROOT)]
    made = subprocess.run(build, capture_output=True, text=True, check=False)
    if made.returncode and not base:
        pytest.skip(f"the base image cannot be had here: {made.stderr.strip().splitlines()[-1]:.200}")
    assert made.returncode == 0, made.stderr[-2000:]
    run = [name, "run", "--rm", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    run += os.environ.get("FEDPEWS_RUN", "").split()
    run += ["--tmpfs", "/tmp"]
    version = subprocess.run([*run, "fedpews-test", "--version"], capture_output=True, text=True, check=False)
    assert version.stdout.startswith("fedpews "), version.stderr
    who = subprocess.run(
        [*run, "--entrypoint", "id", "fedpews-test", "-u"], capture_output=True, text=True, check=False
    )
    assert who.stdout.strip() == "10001"
    touch = [*run, "--entrypoint", "touch", "fedpews-test", "/srv/state/x"]
    assert subprocess.run(touch, capture_output=True, check=False).returncode != 0
