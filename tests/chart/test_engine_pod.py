"""The pod of an engine: shared memory, memory sums, order of start and end, probes, GPUs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from statetap.cli.stack import TAP_SHARE
from tests.chart.sets import GOOD, merged, typed
from tests.support.chart.generate import defaults
from tests.support.chart.objects import container, environment

UNITS = {"Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
MANY = ("least", "example kimi-k2.5-8gpu", "example cpu-demo", "three workers", "slow", "scaled")


def size(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)(Mi|Gi|Ti)", quantity)
    assert match, quantity
    return int(match[1]) * UNITS[match[2]]


def values(name: str) -> dict[str, Any]:
    return merged(defaults(), GOOD[name])


def engine_pod(name: str) -> Any:
    return typed(name).engine()


@pytest.mark.parametrize("name", MANY)
def test_engine_and_workers_share_one_tap_and_one_dev_shm_in_memory(name: str) -> None:
    pod, given = engine_pod(name), values(name)
    volumes = {v.name: v for v in pod.volumes}
    for volume, path in (("tap", "/tap"), ("shm", "/dev/shm")):
        assert volumes[volume].emptyDir.medium == "Memory"
        assert volumes[volume].emptyDir.sizeLimit == given["engine"][volume]
        for c in [container(pod, "engine"), *pod.containers]:
            (mount,) = (m for m in c.volumeMounts if m.name == volume)
            assert mount.mountPath == path and not mount.readOnly
    assert len(pod.containers) == given["workers"]["perEngine"] and all(c.name.startswith("worker-") for c in pod.containers)


@pytest.mark.parametrize("name", MANY)
def test_the_engines_limit_is_its_own_memory_and_both_volumes(name: str) -> None:
    """The kernel charges a file in memory to the container that wrote it."""
    given = values(name)["engine"]
    resources = container(engine_pod(name), "engine").resources
    assert size(resources.limits["memory"]) == size(given["memory"]) + size(given["tap"]) + size(given["shm"])
    assert resources.requests["memory"] == resources.limits["memory"]
    assert "cpu" not in resources.limits


@pytest.mark.parametrize("name", MANY)
def test_workers_may_fill_four_fifths_of_the_tap(name: str) -> None:
    given = values(name)
    for c in engine_pod(name).containers:
        env = environment(c)
        assert int(env["STATETAP_TAP_BYTES"]) == size(given["engine"]["tap"]) * TAP_SHARE // 1
        assert env["STATETAP_WORKERS_PER_ENGINE"] == str(given["workers"]["perEngine"])
        assert c.resources.limits == {"memory": given["workers"]["memory"]}


@pytest.mark.parametrize("name", MANY)
def test_the_engine_starts_before_the_workers_and_ends_after_them(name: str) -> None:
    pod = engine_pod(name)
    assert pod.initContainers[-1].name == "engine" and pod.initContainers[-1].restartPolicy == "Always", "a native sidecar"
    assert pod.initContainers[-1].startupProbe is not None, "it is what the workers wait for"
    assert pod.terminationGracePeriodSeconds is not None


@pytest.mark.parametrize("name", MANY)
def test_the_grace_period_is_above_one_prefill_its_commit_and_the_engines_stop(name: str) -> None:
    given = values(name)
    pod = engine_pod(name)
    worker, engine = given["workers"], given["engine"]
    drain = float(environment(pod.containers[0])["STATETAP_DRAIN_S"])
    assert drain == worker["drainSeconds"]
    assert pod.terminationGracePeriodSeconds > drain + worker["commitSeconds"] + engine["stopSeconds"]
    args = container(pod, "engine").args
    assert args[args.index("--grace") + 1] == str(engine["stopSeconds"])


@pytest.mark.parametrize("name", MANY)
def test_the_startup_probe_has_the_budget_of_the_engine_and_a_bit_more(name: str) -> None:
    """Else the kubelet would end a big model that loads, without the engine's own word of why it was late."""
    engine = container(engine_pod(name), "engine")
    budget = values(name)["engine"]["startTimeoutSeconds"]
    probe = engine.startupProbe
    assert budget + 60 <= probe.periodSeconds * probe.failureThreshold <= budget + 120
    assert engine.args[engine.args.index("--start-timeout") + 1] == str(budget)
    assert environment(engine_pod(name).containers[0])["STATETAP_READY_TIMEOUT_S"] == str(budget)


def test_liveness_outlasts_the_longest_prefill_and_workers_have_none() -> None:
    pod = engine_pod("least")
    probe = container(pod, "engine").livenessProbe
    assert probe.periodSeconds * (probe.failureThreshold - 1) >= values("least")["workers"]["requestTimeoutSeconds"]
    ingest = container(typed("least").one("Deployment", "ingest").spec.template.spec, "ingest")
    for c in [*pod.containers, ingest]:
        assert (c.livenessProbe, c.startupProbe) == (None, None), "an outage of Redis must not restart them"
        assert c.readinessProbe.exec.command == ["python3", "-m", "statetap.alive"]


def test_gpus_are_the_engines_alone_and_their_number_is_tensor_parallel() -> None:
    for name, resource, count in (
        ("least", "nvidia.com/gpu", 1),
        ("example kimi-k2.5-8gpu", "nvidia.com/gpu", 8),
        ("a slice of a GPU", "nvidia.com/mig-3g.71gb", 1),
    ):
        pod = engine_pod(name)
        engine = container(pod, "engine")
        assert engine.resources.limits[resource] == count and engine.args[engine.args.index("--tp") + 1] == str(count)
        assert "--cpu" not in engine.args
        assert all(set(c.resources.limits) == {"memory"} for c in pod.containers)
    engine = container(engine_pod("example cpu-demo"), "engine")
    assert set(engine.resources.limits) == {"memory"} and "--cpu" in engine.args and engine.args[engine.args.index("--tp") + 1] == "1"


def test_an_engine_has_the_name_of_its_pod_and_listens_for_its_own_pod_only() -> None:
    for name in ("least", "example external-redis-s3"):  # the second is scraped, but for its engines
        engine = container(engine_pod(name), "engine")
        assert engine.args[engine.args.index("--host") + 1] == "127.0.0.1"
    assert engine.args[engine.args.index("--engine-id") + 1] == "$(POD_NAME)"
    (name,) = (e for e in engine.env if e.name == "POD_NAME")
    assert name.valueFrom.fieldRef.fieldPath == "metadata.name"
    watched = container(engine_pod("everything watched"), "engine")
    assert watched.args[watched.args.index("--host") + 1] == "0.0.0.0"
    assert all(environment(c)["STATETAP_ENGINE_URL"] == "http://127.0.0.1:30000" for c in engine_pod("everything watched").containers)


def test_replicas_are_left_to_keda_where_it_scales() -> None:
    assert typed("least").one("StatefulSet", "engine").spec.replicas == 1
    assert typed("scaled").one("StatefulSet", "engine").spec.replicas is None
    assert typed("least").one("StatefulSet", "engine").spec.podManagementPolicy == "Parallel"


def test_the_tiny_model_is_made_before_the_engine_starts() -> None:
    pod = engine_pod("example cpu-demo")
    assert [c.name for c in pod.initContainers] == ["tiny-model", "engine"]
    engine = container(pod, "engine")
    assert pod.initContainers[0].command[-1] == engine.args[engine.args.index("--model") + 1] == "/models/tiny"
    assert [c.name for c in engine_pod("least").initContainers] == ["engine"]


def test_pods_go_where_all_pods_and_their_component_are_sent() -> None:
    pods = {name: spec for name, _, spec in typed("placed").pods()}
    engine, coordinator = pods["st-statetap-engine"], pods["st-statetap-coordinator"]
    assert (engine.nodeSelector, coordinator.nodeSelector) == ({"pool": "gpu"}, {"pool": "all"})
    assert [t.key for t in engine.tolerations] == ["all", "nvidia.com/gpu"] and [t.key for t in coordinator.tolerations] == ["all"]
    assert (engine.priorityClassName, coordinator.priorityClassName) == ("high", "low")
    assert engine.affinity is not None and coordinator.affinity is None
    meta = typed("placed").one("StatefulSet", "engine").spec.template.metadata
    assert meta.labels["team"] == "x" and meta.annotations == {"a": "b"}
    assert engine_pod("a slice of a GPU").runtimeClassName == "nvidia"
