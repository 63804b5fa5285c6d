"""Value sets: good ones that must render, bad ones that the schema must refuse, and for the right reason."""

from __future__ import annotations

import copy
import functools
from typing import Any

import yaml

from tests.support.chart.helm import EXAMPLES, VERSIONS, render
from tests.support.chart.objects import Objects, Typed

Values = dict[str, Any]

LEAST: Values = {"model": {"name": "Qwen/Qwen3-8B"}, "coordinator": {"keysSecret": {"name": "keys"}}}
PEER = {"namespaceSelector": {"kubernetes.io/metadata.name": "monitoring"}}


def merged(base: Values, *changes: Values) -> Values:
    """As helm merges: maps in depth, all else replaced."""
    made = copy.deepcopy(base)
    for change in changes:
        for key, value in change.items():
            both = isinstance(value, dict) and isinstance(made.get(key), dict)
            made[key] = merged(made[key], value) if both else copy.deepcopy(value)
    return made


def with_(*changes: Values) -> Values:
    return merged(LEAST, *changes)


GOOD: dict[str, Values] = {
    **{f"example {p.stem}": yaml.safe_load(p.read_text()) for p in sorted(EXAMPLES.glob("*.yaml"))},
    "least": LEAST,
    "open": {"model": {"name": "/models/m"}, "coordinator": {"allowNoAuth": True}},
    "redis with a password": with_({"redis": {"passwordSecret": {"name": "redis"}, "storageClass": "fast", "memory": "512Mi"}}),
    "redis by its url": with_({"redis": {"own": False, "external": {"url": "rediss://redis.elsewhere:6390/3", "port": 6390}}}),
    "a folder of one node": with_(
        {"store": {"kind": "hostPath", "path": "/data/states"}, "modelCache": {"kind": "hostPath", "path": "/data/models"}},
        {"nodeSelector": {"kubernetes.io/hostname": "gpu-1"}},
    ),
    "models for each pod, data by path": with_({"modelCache": {"kind": "emptyDir", "size": "100Gi"}, "data": {"claim": "raw"}}),
    "three workers": with_(
        {
            "workers": {"perEngine": 3, "cpus": 1.5, "env": {"STATETAP_CIRCUIT_FAILURES": "50"}},
            "engine": {"gpus": 4, "memory": "1Ti", "tap": "1536Mi"},
        }
    ),
    "a slice of a GPU": with_(
        {"engine": {"gpuResource": "nvidia.com/mig-3g.71gb", "runtimeClassName": "nvidia", "env": {"NCCL_DEBUG": "INFO"}}}
    ),
    "no policies, no budgets, no test": with_(
        {"networkPolicy": {"enabled": False}, "disruptionBudgets": False, "test": {"enabled": False}},
        {"ingress": {"enabled": True, "host": "statetap.example.com"}},
    ),
    "everything watched": with_(
        {"monitor": {"enabled": True, "engines": True, "labels": {"release": "prometheus"}}, "dashboards": {"enabled": True}},
        {"coordinator": {"metricsOpen": True}, "networkPolicy": {"monitoring": [PEER, {"podSelector": {"app": "prometheus"}}]}},
    ),
    "placed": with_(
        {
            "nodeSelector": {"pool": "all"},
            "tolerations": [{"key": "all", "operator": "Exists"}],
            "priorityClassName": "low",
            "engine": {
                "nodeSelector": {"pool": "gpu"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                "priorityClassName": "high",
                "affinity": {"podAntiAffinity": {}},
                "podAnnotations": {"a": "b"},
                "podLabels": {"team": "x"},
            },
        }
    ),
    "images elsewhere": with_(
        {"images": {"registry": "registry.example.com/ml", "pullSecrets": ["pull"], "control": {"tag": "x"}}},
        {"images": {"engine": {"digest": "sha256:" + "0" * 64}, "pullPolicy": "Always"}, "model": {"tokenSecret": {"name": "hf"}}},
    ),
    "another name": with_({"fullnameOverride": "capture-" + "x" * 60, "model": {"boundaries": "2,16,29", "final": "both"}}),
    "slow": with_(
        {"engine": {"startTimeoutSeconds": 86_400, "stopSeconds": 3600}},
        {"workers": {"drainSeconds": 86_400, "commitSeconds": 86_400, "requestTimeoutSeconds": 86_400, "window": 4096, "cpus": 0.01}},
    ),
    "scaled": with_(
        {"autoscaling": {"enabled": True, "minReplicas": 2, "maxReplicas": 2, "prometheus": "http://prometheus:9090", "query": "sum(up)"}}
    ),
    "a bucket by the cloud's identity": with_(
        {"store": {"samples": {"url": "s3://drafts", "region": "eu-west-1", "serviceAccount": "drafts"}}}
    ),
    "two hosts": with_(
        {
            "model": {"name": "/models/m", "trustRemoteCode": True},
            "engine": {"hosts": 2, "gpus": 8, "replicas": 3, "env": {"NCCL_DEBUG": "INFO"}},
        },
        {"engine": {"sglang": ["--chunked-prefill-size", "8192"], "podLabels": {"team": "x"}}},
        {"store": {"samples": {"url": "s3://drafts", "serviceAccount": "drafts"}}},
        {"monitor": {"enabled": True, "engines": True}, "coordinator": {"metricsOpen": True}, "networkPolicy": {"monitoring": [PEER]}},
    ),
    "many hosts, scaled": with_(
        {"engine": {"hosts": 4, "gpus": 1, "maxUnavailable": 0}, "modelCache": {"kind": "emptyDir"}},
        {"autoscaling": {"enabled": True, "prometheus": "http://prometheus:9090"}, "fullnameOverride": "capture-" + "x" * 60},
    ),
    "under another chart": with_({"global": {"storageClass": "x"}}),
}

BAD: dict[str, tuple[Values, str]] = {
    "nothing given": ({}, "missing property 'name'"),
    "no model": (with_({"model": {"name": ""}}), "/model/name"),
    "neither keys nor open": (with_({"coordinator": {"keysSecret": {"name": ""}}}), "/coordinator"),
    "keys and open": (with_({"coordinator": {"allowNoAuth": True}}), "/coordinator"),
    "open to an Ingress": (
        {
            "model": {"name": "m"},
            "coordinator": {"allowNoAuth": True},
            "ingress": {"enabled": True, "host": "a.b"},
            "networkPolicy": {"clients": [PEER]},
        },
        "/coordinator/allowNoAuth",
    ),
    "an Ingress without a host": (with_({"ingress": {"enabled": True}, "networkPolicy": {"clients": [PEER]}}), "/ingress/host"),
    "an Ingress whose controller is shut out": (with_({"ingress": {"enabled": True, "host": "a.b"}}), "/networkPolicy/clients"),
    "all of the store on S3": (with_({"store": {"kind": "s3"}}), "samples go to S3 by samples.url"),
    "a bucket": (with_({"store": {"bucket": "states"}}), "additional properties 'bucket'"),
    "a bucket by http": (with_({"store": {"samples": {"url": "https://s3.example.com/drafts"}}}), "/store/samples/url"),
    "an endpoint without a bucket": (with_({"store": {"samples": {"endpoint": "https://s3.example.com"}}}), "/store/samples/endpoint"),
    "a key of the bucket in a value": (
        with_({"store": {"samples": {"url": "s3://drafts", "secretKey": "x"}}}),
        "additional properties 'secretKey'",
    ),
    "a variable of the bucket twice": (with_({"workers": {"env": {"AWS_ACCESS_KEY_ID": "x"}}}), "AWS_ACCESS_KEY_ID"),
    "decimal units": (with_({"engine": {"tap": "32G"}}), "/engine/tap"),
    "a size without unit": (with_({"engine": {"shm": 8589934592}}), "/engine/shm"),
    "an empty size": (with_({"engine": {"memory": "0Gi"}}), "/engine/memory"),
    "a unit that is none": (with_({"store": {"size": "1TB"}}), "/store/size"),
    "no GPU and no cpu mode": (with_({"engine": {"gpus": 0}}), "/engine/gpus"),
    "a GPU in cpu mode": (with_({"engine": {"cpu": True}}), "/engine/gpus"),
    "half a GPU": (with_({"engine": {"gpus": 0.5}}), "/engine/gpus"),
    "the tiny model on a GPU": (with_({"model": {"name": "tiny"}}), "/engine/cpu"),
    "two engines that make the tiny model": (
        with_({"model": {"name": "tiny"}, "engine": {"cpu": True, "gpus": 0, "replicas": 2}}),
        "/engine/replicas",
    ),
    "a timeout of weeks": (with_({"engine": {"startTimeoutSeconds": 1_000_000}}), "/engine/startTimeoutSeconds"),
    "a flag that breaks capture": (with_({"engine": {"sglang": ["--enable-torch-compile"]}}), "/engine/sglang/0"),
    "an engine over two hosts": (with_({"engine": {"sglang": ["--context-length", "8192", "--nnodes=2"]}}), "/engine/sglang/2"),
    "which host by a flag": (with_({"engine": {"hosts": 2, "sglang": ["--node-rank=1"]}}), "/engine/sglang/0"),
    "no host": (with_({"engine": {"hosts": 0}}), "/engine/hosts"),
    "several hosts without a GPU": (with_({"engine": {"hosts": 2, "cpu": True, "gpus": 0}}), "/engine/cpu"),
    "the tiny model on several hosts": (with_({"model": {"name": "tiny"}, "engine": {"hosts": 2}}), "/engine/cpu"),
    "several hosts and a model on one": (
        with_({"engine": {"hosts": 2}, "modelCache": {"accessMode": "ReadWriteOnce"}, "nodeSelector": {"a": "b"}}),
        "/modelCache/accessMode",
    ),
    "tensor parallel by a flag": (with_({"engine": {"sglang": ["--tp", "2"]}}), "/engine/sglang/0"),
    "flags in one text": (with_({"engine": {"sglang": "--context-length 8192"}}), "/engine/sglang"),
    "boundaries in words": (with_({"model": {"boundaries": "first,last"}}), "/model/boundaries"),
    "a final state that is none": (with_({"model": {"final": "last"}}), "/model/final"),
    "no worker": (with_({"workers": {"perEngine": 0}}), "/workers/perEngine"),
    "a variable that the chart sets": (with_({"workers": {"env": {"STATETAP_TAP": "/elsewhere"}}}), "STATETAP_TAP"),
    "a variable that is no text": (with_({"engine": {"env": {"NCCL_DEBUG": 1}}}), "/engine/env/NCCL_DEBUG"),
    "a misspelt value": (with_({"engine": {"replica": 2}}), "additional properties 'replica'"),
    "a misspelt section": (with_({"engines": {"replicas": 2}}), "additional properties 'engines'"),
    "a volume of one node without the node": (with_({"store": {"accessMode": "ReadWriteOnce"}}), "/nodeSelector"),
    "models on one node without the node": (with_({"modelCache": {"kind": "hostPath", "path": "/m"}}), "/nodeSelector"),
    "a claim without its name": (with_({"store": {"kind": "existingClaim"}}), "/store/claim"),
    "a folder without its path": (with_({"store": {"kind": "hostPath"}, "nodeSelector": {"a": "b"}}), "/store/path"),
    "a folder by a relative path": (with_({"store": {"kind": "hostPath", "path": "data"}, "nodeSelector": {"a": "b"}}), "/store/path"),
    "no Redis": (with_({"redis": {"own": False}}), "/redis/external"),
    "two Redis": (with_({"redis": {"external": {"url": "redis://other:6379/0"}}}), "/redis/external/url"),
    "a password in a value": (with_({"redis": {"own": False, "external": {"url": "redis://:secret@other:6379/0"}}}), "/redis/external/url"),
    "a scrape without a key": (with_({"monitor": {"enabled": True}}), "/monitor/keySecret/name"),
    "bare engines on the network": (
        with_({"monitor": {"enabled": True, "engines": True}, "coordinator": {"metricsOpen": True}, "networkPolicy": {"enabled": False}}),
        "/networkPolicy/enabled",
    ),
    "scaling by nothing": (with_({"autoscaling": {"enabled": True}}), "/autoscaling/prometheus"),
    "scaling to nothing": (with_({"autoscaling": {"minReplicas": 0}}), "/autoscaling/minReplicas"),
    "a port that is none": (with_({"redis": {"external": {"port": 87000}}}), "/redis/external/port"),
    "a log level that is none": (with_({"logLevel": "TRACE"}), "/logLevel"),
    "a digest that is none": (with_({"images": {"engine": {"digest": "sha256:abc"}}}), "/images/engine/digest"),
}

FAILS: dict[str, tuple[Values, str]] = {
    "a ring above the engine's memory": (with_({"engine": {"memory": "2Gi"}}), "must be above engine.ring (4Gi)"),
    "fewer engines at most than at least": (
        with_({"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 4, "prometheus": "http://p"}}),
        "autoscaling.minReplicas (5) is above autoscaling.maxReplicas (4)",
    ),
    "a threshold that is never reached": (
        with_({"autoscaling": {"enabled": True, "batchesPerEngine": 4, "prometheus": "http://p"}}),
        "must be below 2 x workers.perEngine (4)",
    ),
}
"""What two values together make impossible: beyond a schema, the templates say it."""


@functools.cache
def _rendered(name: str, kubernetes: str) -> Objects:
    return render(GOOD[name], kubernetes)


def rendered(name: str, kubernetes: str = VERSIONS[-1]) -> Objects:
    return _rendered(name, kubernetes)


@functools.cache
def typed(name: str) -> Typed:
    return Typed(rendered(name))
