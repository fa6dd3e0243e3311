"""deploy/: its files are read as the programs that run them would, and what they name exists."""

import configparser
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from deploy_schema import Compose, Deployment, Manifest, Service
from test_http_metrics import EXPECTED, OTHERS

from octavo.cli.command_line import app
from octavo.server.app import ROUTES

DEPLOY = Path(__file__).parents[3] / "deploy"
POD = next(iter(yaml.safe_load_all((DEPLOY / "kubernetes" / "octavo.yaml").read_text())))["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
REPLICAS_POD, REPLICAS_SERVICE = yaml.safe_load_all((DEPLOY / "kubernetes" / "replicas.yaml").read_text())
REPLICAS = REPLICAS_POD["spec"]["template"]["spec"]["containers"][0]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
UNIT = configparser.ConfigParser(strict=False, interpolation=None)
UNIT.optionxform = str  # type: ignore[method-assign, assignment]
UNIT.read(DEPLOY / "octavo.service")
FLAGS = {name for argument in app["serve"].assemble_argument_collection() for name in argument.names}


def dockerfile(word: str) -> str:
    """Return what follows a word at the beginning of a line, continued lines joined."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    (found,) = re.findall(rf"^{word} (.*)$", text, re.MULTILINE)
    return found


COMMANDS = {
    "Dockerfile": [*json.loads(dockerfile("ENTRYPOINT"))[2:], *json.loads(dockerfile("CMD"))],
    "compose.yaml": COMPOSE["services"]["octavo"]["command"],
    "octavo.service": shlex.split(UNIT["Service"]["ExecStart"])[2:],
    "kubernetes": CONTAINER["args"],
    "replicas": REPLICAS["args"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_exists(name: str) -> None:
    flags = {word for word in COMMANDS[name] if word.startswith("--")}
    assert flags
    assert flags <= FLAGS


def option(name: str, flag: str) -> str:
    words = COMMANDS[name]
    return words[words.index(flag) + 1]


def exported() -> set[str]:
    """Names of samples, with the endings that Prometheus sees."""
    ends = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    kinds = {name: kind for name, (kind, _) in EXPECTED.items()} | OTHERS
    return {name + end for name, kind in kinds.items() for end in ends[kind]}


def expressions() -> Iterator[str]:
    for panel in json.loads((DEPLOY / "grafana" / "octavo.json").read_text())["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def test_dashboards_and_alerts_ask_for_metrics_that_exist() -> None:
    asked = {name for text in expressions() for name in re.findall(r"(?:vllm|octavo):\w+", text)}
    assert len(asked) > 25
    assert asked <= exported()


def test_panels_do_not_overlap() -> None:
    panels = json.loads((DEPLOY / "grafana" / "octavo.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells, panel["title"]
        cells |= own


def test_probes_ask_for_routes_that_exist() -> None:
    routes = {path for method, path, _ in ROUTES if method == "GET"}
    names = ("startup", "readiness", "liveness")
    paths = {name: CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in names}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert {*paths.values()} <= routes
    assert "127.0.0.1:8000/ready" in dockerfile("HEALTHCHECK")
    assert CONTAINER["ports"][0]["containerPort"] == int(option("Dockerfile", "--port"))


def test_nothing_is_killed_while_it_drains() -> None:
    seconds = POD["spec"]["terminationGracePeriodSeconds"]
    (sleep,) = CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1:]
    assert seconds > int(sleep) + int(option("kubernetes", "--shutdown-timeout"))
    assert int(UNIT["Service"]["TimeoutStopSec"]) > int(option("octavo.service", "--shutdown-timeout"))
    grace = COMPOSE["services"]["octavo"]["stop_grace_period"].removesuffix("s")
    assert int(grace) > int(option("compose.yaml", "--shutdown-timeout"))


def test_nothing_runs_as_root_or_has_a_key_in_its_flags() -> None:
    assert dockerfile("USER") == "octavo"
    assert POD["spec"]["securityContext"]["runAsNonRoot"]
    assert CONTAINER["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    service = UNIT["Service"]
    assert service["DynamicUser"] == service["NoNewPrivileges"] == "yes"
    assert (service["ProtectSystem"], service["EnvironmentFile"]) == ("strict", "/etc/octavo/environment")
    for words in COMMANDS.values():
        assert "--api-key" not in words
        assert "--insecure" not in words


def test_files_that_compose_mounts_are_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).is_file(), source
    for path in (DEPLOY / "prometheus.yml", *(DEPLOY / "grafana").glob("*.yaml")):
        assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_a_pod_of_replicas_has_a_gpu_for_each() -> None:
    assert int(option("replicas", "--replicas")) == REPLICAS["resources"]["limits"]["nvidia.com/gpu"]
    labels = REPLICAS_POD["spec"]["template"]["metadata"]["labels"]
    assert REPLICAS_SERVICE["spec"]["selector"] == REPLICAS_POD["spec"]["selector"]["matchLabels"] == labels
    assert {name: REPLICAS[name] for name in REPLICAS if name.endswith("Probe")} == {
        name: CONTAINER[name] for name in CONTAINER if name.endswith("Probe")
    }


def test_a_ray_service_serves_our_app_on_the_ray_that_is_tested() -> None:
    spec = yaml.safe_load((DEPLOY / "kubernetes" / "rayservice.yaml").read_text())["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert application["import_path"] == "octavo.ray:app"
    cluster = spec["rayClusterConfig"]
    assert f"ray[serve]=={cluster['rayVersion']}" in (DEPLOY.parent / "pyproject.toml").read_text()
    (worker,) = (group["template"]["spec"]["containers"][0] for group in cluster["workerGroupSpecs"])
    names = {variable["name"].removeprefix("OCTAVO_") for variable in worker["env"]}
    assert {"--" + name.lower().replace("_", "-") for name in names} <= FLAGS


@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_have_the_fields_that_kubernetes_knows(path: Path) -> None:
    manifests = [msgspec.convert(found, Manifest) for found in yaml.safe_load_all(path.read_text())]
    services = [manifest.spec for manifest in manifests if isinstance(manifest, Service)]
    for manifest in manifests:
        if not isinstance(manifest, Deployment):
            continue
        pod = manifest.spec.template
        (container,) = pod.spec.containers
        labels = manifest.spec.selector.match_labels
        assert pod.metadata is not None
        assert labels == pod.metadata.labels
        assert all(service.selector == labels for service in services)
        ports = {port.name for port in container.ports}
        probes = (container.startup_probe, container.readiness_probe, container.liveness_probe)
        assert {probe.http_get.port for probe in probes if probe is not None} <= ports
        assert {port.target_port for service in services for port in service.ports} <= ports
        mounted = {mount.name for mount in container.volume_mounts}
        assert mounted == {volume.name for volume in pod.spec.volumes}


def pods(found: object) -> Iterator[dict]:
    """Every pod, whatever kind of manifest holds it."""
    for value in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from pods(value)
    if isinstance(found, dict) and "containers" in found:
        yield found


@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda path: path.name)
def test_pods_know_no_services_and_have_shared_memory(path: Path) -> None:
    """A service `octavo` would set OCTAVO_PORT; NCCL and Ray need more than 64 MiB of /dev/shm."""
    found = [pod for manifest in yaml.safe_load_all(path.read_text()) for pod in pods(manifest)]
    assert found
    for pod in found:
        assert pod["enableServiceLinks"] is False
        memory = {
            volume["name"]
            for volume in pod["volumes"]
            if volume.get("emptyDir", {}).get("medium") == "Memory"
        }
        for container in pod["containers"]:
            mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert mounted["/dev/shm"] in memory


def test_grafana_takes_whatever_prometheus_there_is() -> None:
    """A data source that somebody else made has another uid."""
    text = (DEPLOY / "grafana" / "octavo.json").read_text()
    (variable,) = json.loads(text)["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    uids = {panel["datasource"]["uid"] for panel in json.loads(text)["panels"] if panel["type"] != "row"}
    assert uids == {"${" + variable["name"] + "}"}
    assert "uid" not in (DEPLOY / "grafana" / "datasource.yaml").read_text()


@pytest.mark.parametrize(
    ("old", "new"),
    [("readinessProbe", "readynessProbe"), ("8000}", '"8000"}'), ("Recreate", "Rolling"), ("8Gi", "8GB")],
)
def test_a_mistake_in_a_manifest_is_found(old: str, new: str) -> None:
    text = (DEPLOY / "kubernetes" / "octavo.yaml").read_text()
    deployment = next(iter(yaml.safe_load_all(text.replace(old, new, 1))))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(deployment, Manifest)


def test_compose_has_the_fields_that_it_knows() -> None:
    compose = msgspec.convert(COMPOSE, Compose)
    for name, service in compose.services.items():
        assert (service.build is None) != (service.image is None), name
        assert set(service.depends_on) <= set(compose.services)
        assert service.build is None or service.shm_size, "NCCL needs more than 64 MiB"
        named = {volume.split(":")[0] for volume in service.volumes if not volume.startswith((".", "$"))}
        assert named <= set(compose.volumes)


def test_the_unit_has_the_sections_and_settings_of_systemd() -> None:
    assert UNIT.sections() == ["Unit", "Service", "Install"]
    known = {
        "Unit": "Description After Wants StartLimitIntervalSec StartLimitBurst",
        "Install": "WantedBy",
        "Service": "Type EnvironmentFile ExecStart WorkingDirectory Restart RestartSec "
        "RestartPreventExitStatus TimeoutStopSec KillMode LimitNOFILE DynamicUser StateDirectory "
        "CacheDirectory CacheDirectoryMode Environment "
        "NoNewPrivileges ProtectSystem ProtectHome PrivateTmp ProtectKernelTunables "
        "ProtectKernelModules ProtectKernelLogs ProtectControlGroups ProtectClock ProtectHostname "
        "RestrictAddressFamilies RestrictNamespaces RestrictRealtime RestrictSUIDSGID LockPersonality "
        "CapabilityBoundingSet SystemCallArchitectures SystemCallFilter UMask",
    }
    for section, names in known.items():
        assert set(UNIT[section]) <= set(names.split()), section
    assert UNIT["Service"]["Type"] in ("exec", "notify", "simple")
    assert UNIT["Service"]["KillMode"] in ("control-group", "mixed", "process")


def test_the_dockerfile_copies_from_its_stages_what_there_is() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    words = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK"}
    assert {line[0] for line in lines} <= words | {"ENTRYPOINT", "CMD"}
    stages = {line[line.index("AS") + 1] for line in lines if line[0] == "FROM" and "AS" in line}
    for line in lines:
        if line[0] == "COPY" and line[1].startswith("--from="):
            assert line[1].removeprefix("--from=") in stages
        elif line[0] == "COPY":
            assert all((DEPLOY.parent / source).exists() for source in line[1:-1])


def test_ray_is_asked_for_deployments_that_there_are() -> None:
    config = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    (application,) = config["applications"]
    assert application["import_path"] == "octavo.ray:app"
    assert {deployment["name"] for deployment in application["deployments"]} <= {"octavo", "front"}
    names = {name.removeprefix("OCTAVO_") for name in application["runtime_env"]["env_vars"]}
    assert {"--" + name.lower().replace("_", "-") for name in names} <= FLAGS
