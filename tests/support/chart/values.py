"""The values of the chart k8s/statetap, typed. values.schema.json, values.yaml and docs/reference/chart.md are written from these models
(generate.py), and a test holds them equal.

Invariant: a value set that cannot work is refused here, by the schema, before anything is rendered; nothing is corrected in silence.
(Sums and comparisons of two values are beyond a schema: the templates fail on those.)
"""
# ruff: noqa: N815  (values of a chart are camelCase by Helm's convention)

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from statetap.engine.flags import OURS, REFUSED
from tests.support.chart.rules import (
    NONEMPTY,
    FolderPath,
    Labels,
    Name,
    Quantity,
    SecretKey,
    Section,
    Strings,
    const,
    env_field,
    has,
    secret,
    when,
)


class Image(Section):
    repository: str = Field(min_length=1, description="Image name without registry and tag.")
    tag: str = Field(default="", description="Tag; empty: the version of the chart.")
    digest: str = Field(default="", pattern=r"^(sha256:[0-9a-f]{64})?$", description="Digest; goes before the tag.")


class Images(Section):
    registry: str = Field(default="", description="Registry that goes before all three image names.")
    pullPolicy: Literal["IfNotPresent", "Always", "Never"] = Field(default="IfNotPresent", description="When images are pulled.")
    pullSecrets: list[Name] = Field(default_factory=list, description="Names of image pull Secrets.")
    control: Image = Field(default=Image(repository="statetap/control"), description="Coordinator, ingestion, workers, command line.")
    engine: Image = Field(
        default=Image(repository="statetap/engine"), description="SGLang with the capture plugin; for engine.cpu statetap/engine-cpu."
    )
    redis: Image = Field(default=Image(repository="redis", tag="7.4-bookworm"), description="Redis, unless it is external.")


class Model(Section):
    name: str = Field(
        min_length=1, description="Model: a hub id, or a folder below /models. With engine.cpu also `tiny`, made on the spot."
    )
    trustRemoteCode: bool = Field(default=False, description="Let the model folder's own code run in the engine.")
    boundaries: str = Field(default="default", pattern=r"^(default|[0-9]+(,[0-9]+)*)$", description="Boundaries; default: [2, L//2, L-3].")
    final: Literal["pre", "post", "both", "none"] = Field(default="pre", description="Final state to capture.")
    tokenSecret: SecretKey = secret("token", "Hub token (HF_TOKEN) of engines and ingestion.")


class Placement(Section):
    """Where the pods of one component go; beside what holds for all."""

    nodeSelector: Labels = Field(default_factory=dict, description="Added to the nodeSelector of all pods.")
    tolerations: list[dict[str, Any]] = Field(default_factory=list, description="Added to the tolerations of all pods.")
    affinity: dict[str, Any] = Field(default_factory=dict, description="Affinity of the pod.")
    priorityClassName: Name = Field(default="", description="Priority class; empty: the one of all pods.")
    podAnnotations: Strings = Field(default_factory=dict, description="Annotations of the pods.")
    podLabels: Labels = Field(default_factory=dict, description="Further labels of the pods.")


_flags = "|".join(sorted(REFUSED | OURS))


SEVERAL_HOSTS = has(hosts={"minimum": 2})


class Engine(Placement):
    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                when(has(cpu=const(True)), has(gpus=const(0)), {"properties": {"gpus": {"minimum": 1}}}),
                when(SEVERAL_HOSTS, {"properties": {"cpu": const(False)}}),
            ]
        },
    )

    replicas: int = Field(
        default=1, ge=0, le=1000, description="Engines; each is a pod with its workers. Left to KEDA where autoscaling is on."
    )
    hosts: int = Field(
        default=1,
        ge=1,
        le=32,
        description="Hosts of an engine. Above 1 an engine is a group of so many pods, by a LeaderWorkerSet, whose controller the cluster then needs.",
    )
    gpus: int = Field(
        default=1, ge=0, le=16, description="GPUs of a pod; times engine.hosts they are the tensor parallel size. 0 with engine.cpu only."
    )
    gpuResource: str = Field(
        default="nvidia.com/gpu", pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", description="Resource name of a GPU (a MIG slice has its own)."
    )
    cpu: bool = Field(default=False, description="Real SGLang without a GPU, for trying everything.")
    sglang: list[Annotated[str, Field(json_schema_extra={"not": {"pattern": f"^({_flags})(=|$)"}})]] = Field(
        default_factory=list, description="Flags for SGLang. Those that break capture are refused here, as the engine does."
    )
    cpus: float = Field(default=8, ge=0.01, le=1024, description="CPUs requested. No limit: throttled schedulers stall the GPU.")
    memory: Quantity = Field(default="64Gi", description="Memory of the engine's processes, the ring included. The limit adds tap and shm.")
    tap: Quantity = Field(default="32Gi", description="Size of the tap, in memory. At least the bytes of a window of prefills a worker.")
    shm: Quantity = Field(default="8Gi", description="Size of /dev/shm (NCCL and SGLang's processes), in memory.")
    ring: Quantity = Field(default="4Gi", description="Pinned ring of captured rows on their way to the tap; a part of engine.memory.")
    cacheSize: Quantity = Field(default="20Gi", description="Limit of /cache (HOME, compiled kernels) and /tmp each, on the node's disk.")
    startTimeoutSeconds: int = Field(
        default=3600,
        ge=60,
        le=86_400,
        description="Budget from the start until READY: download, load, self-check. Startup probe and engine have it.",
    )
    stopSeconds: int = Field(default=30, ge=1, le=3600, description="Seconds that SGLang may take to stop once the workers have ended.")
    runtimeClassName: Name = Field(default="", description="Runtime class, for clusters where `nvidia` is not the default.")
    maxUnavailable: int = Field(
        default=1, ge=0, le=1000, description="Of the disruption budget: engines that may be evicted at a time. 0 blocks drains."
    )
    env: Strings = env_field("engine")


class Workers(Section):
    perEngine: int = Field(default=2, ge=1, le=8, description="Workers beside one engine; two, so that one fills while one drains.")
    window: int = Field(default=32, ge=1, le=4096, description="Prefills in flight a worker.")
    writeThreads: int = Field(default=2, ge=1, le=64, description="Threads a worker that check and write samples.")
    cpus: float = Field(default=2, ge=0.01, le=1024, description="CPUs requested, a worker.")
    memory: Quantity = Field(default="4Gi", description="Memory limit and request, a worker.")
    requestTimeoutSeconds: int = Field(
        default=300, ge=1, le=86_400, description="Seconds after which a prefill is given up and tried again."
    )
    drainSeconds: int = Field(
        default=60, ge=1, le=86_400, description="Seconds after SIGTERM in which prefills in flight may end: more than the longest."
    )
    commitSeconds: int = Field(default=60, ge=1, le=86_400, description="Seconds added to it for checking and committing what came.")
    env: Strings = env_field("worker")


class Coordinator(Placement):
    model_config = ConfigDict(
        json_schema_extra={
            # Not both: keys that nobody is asked for would look like a closed door.
            "oneOf": [has(keysSecret=has(name=NONEMPTY)), has(allowNoAuth=const(True))]
        },
    )

    replicas: int = Field(
        default=1, ge=1, le=3, description="Coordinators. One is enough; more bridge a node's loss (the store is their truth)."
    )
    keysSecret: SecretKey = secret("keys.txt", "Keys file (`statetap keys add`). Needed unless allowNoAuth.")
    allowNoAuth: bool = Field(default=False, description="Serve the cluster without keys: everybody who reaches it may do everything.")
    allowRemoteCode: bool = Field(default=False, description="Let anyone who may submit a dataset run its tokenizer's own code.")
    metricsOpen: bool = Field(default=False, description="Answer /metrics without a key.")
    cpus: float = Field(default=0.5, ge=0.01, le=1024, description="CPUs requested.")
    memory: Quantity = Field(default="1Gi", description="Memory limit and request.")
    env: Strings = env_field("coordinator")


class Ingest(Placement):
    replicas: int = Field(default=1, ge=1, le=100, description="Ingestion processes; each takes one dataset at a time.")
    cpus: float = Field(default=1, ge=0.01, le=1024, description="CPUs requested.")
    memory: Quantity = Field(default="2Gi", description="Memory limit and request.")
    env: Strings = env_field("ingest")


class ExternalRedis(Section):
    url: str = Field(
        default="",
        pattern=r"^(rediss?://[^@\s]+)?$",
        description="redis://host:port/db, without a password: that one comes with the Secret.",
    )
    port: int = Field(default=6379, ge=1, le=65535, description="Its port, for the network policy.")
    urlSecret: SecretKey = secret("url", "The whole URL, password included, in place of url.")


class Redis(Placement):
    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                when(
                    has(own=const(False)),
                    has(external={"anyOf": [has(url=NONEMPTY), has(urlSecret=has(name=NONEMPTY))]}),
                    {"properties": {"external": {"properties": {"url": const(""), "urlSecret": {"properties": {"name": const("")}}}}}},
                )
            ]
        },
    )

    own: bool = Field(default=True, description="Run a Redis of its own: append-only file on, no eviction.")
    external: ExternalRedis = Field(default=ExternalRedis(), description="The Redis to use where own is false: AOF on, noeviction.")
    passwordSecret: SecretKey = secret(
        "password", "Password of the own Redis, of characters that need no escape in a URL. None: no password."
    )
    memory: Quantity = Field(default="1Gi", description="Memory limit and request; Redis keeps to three quarters of it.")
    cpus: float = Field(default=0.25, ge=0.01, le=1024, description="CPUs requested.")
    size: Quantity = Field(default="8Gi", description="Size of its volume.")
    storageClass: str = Field(default="", description="Storage class of its volume; empty: the cluster's default.")


_S3 = "claim, existingClaim or hostPath (samples go to S3 by samples.url; the records beside them stay on a volume)"
_STORE_KINDS = [
    when(has(kind=const("existingClaim")), has(claim=NONEMPTY)),
    when(has(kind=const("hostPath")), has(path=NONEMPTY)),
]
AccessMode = Literal["ReadWriteMany", "ReadWriteOnce"]


class Samples(Section):
    model_config = ConfigDict(
        json_schema_extra={
            # Half of it would be taken for all of it.
            "allOf": [
                when(
                    {"properties": {"url": const("")}},
                    {"properties": {n: const("") for n in ("endpoint", "region", "secret", "serviceAccount")}},
                )
            ]
        },
    )

    url: str = Field(
        default="",
        pattern=r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?#]*)?)?$",
        description="s3://bucket or s3://bucket/prefix for the sample files of new jobs; records stay on the store's volume. Empty: all of it does.",
    )
    endpoint: str = Field(default="", pattern=r"^(https?://\S+)?$", description="URL of the service, where it is not Amazon's.")
    region: str = Field(default="", description="Its region.")
    secret: Name = Field(default="", description="Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.")
    serviceAccount: Name = Field(
        default="", description="Service account of coordinator and engines, for clouds that let it into the bucket (IRSA, Pod Identity)."
    )
    port: int = Field(default=443, ge=1, le=65535, description="Its port, for the network policy.")


class Store(Section):
    # The enum alone would refuse s3 as well, with less of a reason.
    model_config = ConfigDict(json_schema_extra={"allOf": [*_STORE_KINDS, when(has(kind=const("s3")), has(kind=const(_S3)))]})

    kind: Literal["claim", "existingClaim", "hostPath"] = Field(
        default="claim",
        description="claim: made by the chart; existingClaim: named in claim; hostPath: a folder of one node. For S3 see samples.",
    )
    size: Quantity = Field(default="1Ti", description="Size of the claim.")
    accessMode: AccessMode = Field(default="ReadWriteMany", description="Once: all pods on one node, which nodeSelector must then name.")
    storageClass: str = Field(default="", description="Storage class; empty: the cluster's default.")
    keep: bool = Field(default=True, description="Keep the claim when the release is uninstalled.")
    claim: Name = Field(default="", description="Name of the claim that exists already.")
    path: FolderPath = Field(default="", description="Folder of the node, writable by gid 10001.")
    samples: Samples = Field(default=Samples(), description="Samples in a bucket.")


class ModelCache(Section):
    model_config = ConfigDict(json_schema_extra={"allOf": _STORE_KINDS})

    kind: Literal["claim", "existingClaim", "hostPath", "emptyDir"] = Field(
        default="claim", description="Where /models lies. emptyDir: every pod downloads for itself, again after each start."
    )
    size: Quantity = Field(default="200Gi", description="Size of the claim, or limit of the emptyDir.")
    accessMode: AccessMode = Field(default="ReadWriteMany", description="Once: all pods on one node, which nodeSelector must then name.")
    storageClass: str = Field(default="", description="Storage class; empty: the cluster's default.")
    keep: bool = Field(default=True, description="Keep the claim when the release is uninstalled.")
    claim: Name = Field(default="", description="Name of the claim that exists already.")
    path: FolderPath = Field(default="", description="Folder of the node.")


class Data(Section):
    claim: Name = Field(default="", description="Claim that is mounted read-only at /data: datasets may be submitted by path below it.")


class Ingress(Section):
    model_config = ConfigDict(json_schema_extra={"allOf": [when(has(enabled=const(True)), has(host=NONEMPTY))]})

    enabled: bool = Field(default=False, description="Make an Ingress to the coordinator.")
    className: Name = Field(default="", description="Ingress class.")
    host: str = Field(default="", pattern=r"^([a-z0-9*]([a-z0-9.-]*[a-z0-9])?)?$", description="Host name.")
    tlsSecret: Name = Field(default="", description="Secret with the certificate. With it the page's cookie is marked Secure.")
    annotations: Strings = Field(default_factory=dict, description="Annotations: body size above 64 MiB, no buffering of event streams.")


class Peers(Section):
    namespaceSelector: Labels = Field(default_factory=dict, description="Labels of their namespaces; empty: this namespace.")
    podSelector: Labels = Field(default_factory=dict, description="Labels of the pods; empty: all.")


class NetworkPolicy(Section):
    enabled: bool = Field(default=True, description="Deny everything but what the services need.")
    clients: list[Peers] = Field(
        default_factory=list,
        description='Who reaches the coordinator, beside the pods with the label `statetap.io/client: "true"` in this namespace.',
    )
    monitoring: list[Peers] = Field(
        default_factory=list, description="Who reaches the metrics of coordinator and engines; entries as of clients."
    )
    hub: bool = Field(default=True, description="Let engines and ingestion reach port 443 anywhere, for models and tokenizers of the hub.")


class ServiceMonitor(Section):
    enabled: bool = Field(default=False, description="Make a ServiceMonitor (Prometheus operator).")
    engines: bool = Field(
        default=False, description="Scrape the engines too. They then listen on the pod's address, for networkPolicy.monitoring alone."
    )
    interval: str = Field(default="15s", pattern=r"^[0-9]+(ms|s|m)$", description="Time between scrapes.")
    labels: Labels = Field(default_factory=dict, description="Labels by which the Prometheus finds it.")
    keySecret: SecretKey = secret("key", "Key with scope read, for /metrics of the coordinator.")


class Dashboards(Section):
    enabled: bool = Field(default=False, description="Make a ConfigMap a dashboard, for Grafana's sidecar.")
    labels: Labels = Field(default={"grafana_dashboard": "1"}, description="Labels by which the sidecar finds them.")


class Autoscaling(Section):
    model_config = ConfigDict(json_schema_extra={"allOf": [when(has(enabled=const(True)), has(prometheus=NONEMPTY))]})

    enabled: bool = Field(default=False, description="Scale the engines by a KEDA ScaledObject on outstanding batches.")
    minReplicas: int = Field(default=1, ge=1, le=1000, description="Least engines. Not 0: without a live engine no batch is given out.")
    maxReplicas: int = Field(default=4, ge=1, le=1000, description="Most engines.")
    batchesPerEngine: int = Field(
        default=2,
        ge=1,
        le=32,
        description="Outstanding batches an engine above which one more is started. A full engine has 2 x workers.perEngine.",
    )
    prometheus: str = Field(default="", pattern=r"^(https?://\S+)?$", description="URL of the Prometheus that scrapes the coordinator.")
    query: str = Field(default="", description="PromQL in place of the chart's own.")
    pollingSeconds: int = Field(default=30, ge=5, le=3600, description="Time between two looks.")
    scaleDownSeconds: int = Field(
        default=1800, ge=0, le=3600, description="Seconds that fewer engines must be enough before one is stopped."
    )


class HelmTest(Section):
    enabled: bool = Field(default=True, description="Make the pod of `helm test`, which asks /readyz.")


ONE_NODE = {
    "anyOf": [
        has(**{volume: one})
        for volume in ("store", "modelCache")
        for one in (has(kind=const("claim"), accessMode=const("ReadWriteOnce")), has(kind=const("hostPath")))
    ]
}
SCRAPED = {
    "anyOf": [
        has(monitor=has(keySecret=has(name=NONEMPTY))),
        has(coordinator=has(metricsOpen=const(True))),
        has(coordinator=has(allowNoAuth=const(True))),
    ]
}


class Values(Section):
    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                when(ONE_NODE, has(nodeSelector={"minProperties": 1})),
                when(has(monitor=has(enabled=const(True))), SCRAPED),
                # Without it the Ingress would be there and its controller shut out.
                when(
                    has(ingress=has(enabled=const(True)), networkPolicy=has(enabled=const(True))),
                    has(networkPolicy=has(clients={"minItems": 1})),
                ),
                # SGLang has no key of its own: on the pod's address only the policy stands before it.
                when(
                    has(monitor=has(enabled=const(True), engines=const(True))),
                    {"properties": {"networkPolicy": {"properties": {"enabled": const(True)}}}},
                ),
                # An open coordinator is for a closed network; an Ingress is the opposite.
                when(has(ingress=has(enabled=const(True))), {"properties": {"coordinator": {"properties": {"allowNoAuth": const(False)}}}}),
                # The pods of a group are on hosts of their own, and all of them read the model.
                when(has(engine=SEVERAL_HOSTS), {"properties": {"modelCache": {"properties": {"accessMode": const("ReadWriteMany")}}}}),
                # Two pods at once would make the model in one place.
                when(has(model=has(name=const("tiny"))), has(engine=has(cpu=const(True), replicas={"maximum": 1}))),
            ]
        },
    )

    nameOverride: Name = Field(default="", description="In place of the chart's name.")
    fullnameOverride: Name = Field(default="", description="In place of release and chart name, before the names of all objects.")
    model: Model = Field(description="What is captured.")
    engine: Engine = Field(default=Engine(), description="The engine of a pod.")
    workers: Workers = Field(default=Workers(), description="The workers beside each engine.")
    coordinator: Coordinator = Field(default=Coordinator(), description="The API and the reconciler.")
    ingest: Ingest = Field(default=Ingest(), description="The ingestion of datasets.")
    redis: Redis = Field(default=Redis(), description="Redis: queues and locks. What must not be lost lies on the store.")
    store: Store = Field(default=Store(), description="The store: datasets and jobs. All services mount it.")
    modelCache: ModelCache = Field(default=ModelCache(), description="Models and tokenizers, mounted at /models.")
    data: Data = Field(default=Data(), description="Data that lies in the cluster already.")
    ingress: Ingress = Field(default=Ingress(), description="The way in from outside.")
    networkPolicy: NetworkPolicy = Field(default=NetworkPolicy(), description="Who may speak to whom.")
    monitor: ServiceMonitor = Field(default=ServiceMonitor(), description="Scraping by the Prometheus operator.")
    dashboards: Dashboards = Field(default=Dashboards(), description="Dashboards for Grafana.")
    autoscaling: Autoscaling = Field(default=Autoscaling(), description="More engines when there is more to do.")
    images: Images = Field(default=Images(), description="Images of the containers.")
    nodeSelector: Labels = Field(default_factory=dict, description="Node labels for all pods.")
    tolerations: list[dict[str, Any]] = Field(default_factory=list, description="Tolerations of all pods.")
    priorityClassName: Name = Field(default="", description="Priority class of all pods.")
    logLevel: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO", description="Least level that the services log.")
    disruptionBudgets: bool = Field(default=True, description="Make a PodDisruptionBudget a component.")
    test: HelmTest = Field(default=HelmTest(), description="`helm test`.")
    globals_: dict[str, Any] = Field(default_factory=dict, alias="global", description="Helm's own; not used.")
