"""What may be in the files of deploy/, as types: unknown fields, wrong types and bad values are refused.

Only what the files use, from the references of Kubernetes 1.33, KubeRay 1.4 and the Compose specification.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Quantity = int | Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|Mi|Gi|Ti)?$")]
Labels = dict[str, str]
Path = Annotated[str, Meta(pattern=r"^/")]


class Strict(Struct, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """Fields as Kubernetes writes them."""


class Metadata(Strict):
    name: Name
    labels: Labels = {}


class PodMetadata(Strict):
    labels: Labels = {}
    annotations: Labels = {}


class HttpGet(Strict):
    path: Path
    port: Name | Port


class Probe(Strict):
    http_get: HttpGet
    period_seconds: Positive
    timeout_seconds: Positive = 1
    failure_threshold: Positive = 3


class Exec(Strict):
    command: list[str]


class PreStop(Strict):
    exec: Exec


class Lifecycle(Strict):
    pre_stop: PreStop


class Resources(Strict):
    limits: dict[str, Quantity]
    requests: dict[str, Quantity] = {}


class Capabilities(Strict):
    drop: list[str]


class ContainerSecurity(Strict):
    allow_privilege_escalation: bool
    read_only_root_filesystem: bool
    capabilities: Capabilities


class ContainerPort(Strict):
    name: Annotated[Name, Meta(max_length=15)]
    container_port: Port


class Mount(Strict):
    name: Name
    mount_path: Path
    read_only: bool = False


class SecretKeyRef(Strict):
    name: Name
    key: str


class ValueFrom(Strict):
    secret_key_ref: SecretKeyRef


class Variable(Strict):
    name: Annotated[str, Meta(pattern=r"^[A-Z_][A-Z0-9_]*$")]
    value: str | None = None
    value_from: ValueFrom | None = None


class Container(Strict):
    name: Name
    image: str
    resources: Resources
    args: list[str] = []
    env: list[Variable] = []
    ports: list[ContainerPort] = []
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None
    lifecycle: Lifecycle | None = None
    security_context: ContainerSecurity | None = None
    volume_mounts: list[Mount] = []


class SeccompProfile(Strict):
    type: Literal["RuntimeDefault", "Unconfined", "Localhost"]


class PodSecurity(Strict):
    run_as_non_root: bool
    run_as_user: Positive
    fs_group: Positive
    seccomp_profile: SeccompProfile


class Secret(Strict):
    secret_name: Name
    default_mode: int


class EmptyDir(Strict):
    medium: Literal["", "Memory"] = ""
    size_limit: Quantity | None = None


class Volume(Strict):
    name: Name
    secret: Secret | None = None
    empty_dir: EmptyDir | None = None


class PodSpec(Strict):
    containers: Annotated[list[Container], Meta(min_length=1)]
    # Kubernetes' default is true.
    enable_service_links: Literal[False]
    termination_grace_period_seconds: Positive = 30
    automount_service_account_token: bool = True
    security_context: PodSecurity | None = None
    volumes: list[Volume] = []


class Template(Strict):
    spec: PodSpec
    metadata: PodMetadata | None = None


class Strategy(Strict):
    type: Literal["Recreate", "RollingUpdate"]


class Selector(Strict):
    match_labels: Labels


class DeploymentSpec(Strict):
    replicas: Positive
    strategy: Strategy
    selector: Selector
    template: Template


class Deployment(Strict, tag_field="kind"):
    api_version: Literal["apps/v1"]
    metadata: Metadata
    spec: DeploymentSpec


class ServicePort(Strict):
    name: Name
    port: Port
    target_port: Name | Port


class ServiceSpec(Strict):
    selector: Labels
    ports: list[ServicePort]


class Service(Strict, tag_field="kind"):
    api_version: Literal["v1"]
    metadata: Metadata
    spec: ServiceSpec


class Head(Strict):
    ray_start_params: dict[str, str]
    template: Template


class Workers(Strict):
    group_name: Name
    replicas: Positive
    min_replicas: int
    max_replicas: Positive
    ray_start_params: dict[str, str]
    template: Template


class RayCluster(Strict):
    ray_version: str
    head_group_spec: Head
    worker_group_specs: list[Workers]


class RayServiceSpec(Strict):
    serve_config: Annotated[str, Meta(min_length=1)] = field(name="serveConfigV2")
    ray_cluster_config: RayCluster


class RayService(Strict, tag_field="kind"):
    api_version: Literal["ray.io/v1"]
    metadata: Metadata
    spec: RayServiceSpec


class Build(Struct, forbid_unknown_fields=True):
    context: str
    dockerfile: str
    args: dict[str, str] = {}


class ComposeService(Struct, forbid_unknown_fields=True):
    """A service of Compose; see https://docs.docker.com/reference/compose-file/services."""

    build: Build | None = None
    image: str | None = None
    command: list[str] = []
    environment: dict[str, str] = {}
    ports: list[Annotated[str, Meta(pattern=r"^127\.0\.0\.1:\d+:\d+$")]] = []
    volumes: list[Annotated[str, Meta(pattern=r"^[^:]+(:-[^:}]+})?:/[^:]+(:ro)?$")]] = []
    stop_grace_period: Annotated[str, Meta(pattern=r"^\d+(s|m)$")] = "10s"
    restart: Literal["no", "always", "on-failure", "unless-stopped"] = "no"
    read_only: bool = False
    tmpfs: list[str] = []
    shm_size: Annotated[str, Meta(pattern=r"^\d+(b|kb|mb|gb)$")] | None = None
    cap_drop: list[str] = []
    security_opt: list[str] = []
    depends_on: list[str] = []


class Compose(Struct, forbid_unknown_fields=True):
    services: dict[str, ComposeService]
    volumes: dict[str, Any] = {}


Manifest = Deployment | Service | RayService
