"""Budgets, Ingress, monitoring, dashboards, scaling and the pod of `helm test`."""

from __future__ import annotations

import json
import re

import pytest

from statetap.coordinator.metrics import METRICS
from statetap.engine.metrics import METRICS as ENGINE
from tests.chart.sets import typed
from tests.support.chart.helm import CHART, NAMESPACE

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))


def exported() -> set[str]:
    names = {m.name for m in ENGINE.values()}
    for m in METRICS:
        names |= {m.name} if m.type in ("gauge", "counter") else {f"{m.name}_{end}" for end in ("bucket", "sum", "count")}
    return names


def named(query: str) -> set[str]:
    return set(re.findall(r"\b(?:statetap|process)_[a-z_]+\b", query))


def labels_of(metric: str) -> set[str]:
    """Of the code, and those that Prometheus adds."""
    base = re.sub(r"_(bucket|sum|count)$", "", metric)
    mine = [set(m.labels) for m in METRICS if m.name in (metric, base)] + [{m.label} for m in ENGINE.values() if m.name == metric]
    return set.union({"le", "namespace", "service", "instance"}, *mine)


def test_every_component_has_a_budget() -> None:
    budgets = {b.metadata.name.removeprefix("st-statetap-"): b.spec for b in typed("least").of("PodDisruptionBudget")}
    assert {c: b.maxUnavailable for c, b in budgets.items()} == {"coordinator": 1, "ingest": 1, "engine": 1, "redis": 1}
    pods = {labels["app.kubernetes.io/component"]: labels for _, labels, _ in typed("least").pods()}
    for component, budget in budgets.items():
        assert budget.selector.matchLabels.items() <= pods[component].items()
    assert typed("example kimi-k2.5-8gpu").one("PodDisruptionBudget", "engine").spec.maxUnavailable == 0
    assert not typed("no policies, no budgets, no test").of("PodDisruptionBudget")
    assert len(typed("example external-redis-s3").of("PodDisruptionBudget")) == 3


def test_the_ingress_leads_to_the_coordinator() -> None:
    (ingress,) = typed("example external-redis-s3").of("Ingress")
    (rule,) = ingress.spec.rules
    (path,) = rule.http.paths
    service = typed("example external-redis-s3").one("Service", "coordinator")
    assert (rule.host, path.path, path.pathType) == ("statetap.example.com", "/", "Prefix")
    assert path.backend.service.name == service.metadata.name and path.backend.service.port.name in {p.name for p in service.spec.ports}
    assert (ingress.spec.tls[0].hosts, ingress.spec.tls[0].secretName) == (["statetap.example.com"], "statetap-tls")
    assert not typed("least").of("Ingress")


def test_monitors_choose_one_service_each_and_a_port_that_it_has() -> None:
    release = typed("everything watched")
    monitors = {m["metadata"]["name"]: m for m in release.custom("ServiceMonitor")}
    assert set(monitors) == {"st-statetap-coordinator", "st-statetap-engine"}
    for name, monitor in monitors.items():
        (service,) = (s for s in release.of("Service") if monitor["spec"]["selector"]["matchLabels"].items() <= s.metadata.labels.items())
        (endpoint,) = monitor["spec"]["endpoints"]
        assert service.metadata.name == name and endpoint["port"] in {p.name for p in service.spec.ports}
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        assert monitor["spec"]["namespaceSelector"]["matchNames"] == [NAMESPACE]
    assert monitors["st-statetap-coordinator"]["spec"]["endpoints"][0]["path"] == "/metrics"
    assert monitors["st-statetap-engine"]["spec"]["endpoints"][0]["path"] == "/statetap/metrics"
    (one,) = typed("example external-redis-s3").custom("ServiceMonitor")
    assert one["spec"]["endpoints"][0]["authorization"]["credentials"] == {"name": "statetap-metrics-key", "key": "key"}
    assert not typed("least").custom("ServiceMonitor")


def test_engines_scale_by_a_metric_that_the_coordinator_exports() -> None:
    release = typed("example external-redis-s3")
    (scaled,) = release.custom("ScaledObject")
    target = release.one("StatefulSet", "engine")
    assert scaled["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": target.metadata.name}
    (trigger,) = scaled["spec"]["triggers"]
    assert named(trigger["metadata"]["query"]) == {"statetap_outstanding_batches"} <= exported()
    assert f'service="{release.one("Service", "coordinator").metadata.name}"' in trigger["metadata"]["query"]
    assert f'namespace="{NAMESPACE}"' in trigger["metadata"]["query"]
    (own,) = typed("scaled").custom("ScaledObject")
    assert own["spec"]["triggers"][0]["metadata"]["query"] == "sum(up)"
    assert (own["spec"]["minReplicaCount"], own["spec"]["maxReplicaCount"]) == (2, 2)


def test_a_full_engine_asks_for_one_more_and_an_idle_one_does_not() -> None:
    """The threshold against what the reconciler really keeps outstanding."""
    from statetap.coordinator.reconciler import BATCHES_A_WORKER, MIN_OUTSTANDING

    (scaled,) = typed("example external-redis-s3").custom("ScaledObject")
    threshold = float(scaled["spec"]["triggers"][0]["metadata"]["threshold"])
    pod = typed("example external-redis-s3").one("StatefulSet", "engine").spec.template.spec
    full = BATCHES_A_WORKER * len(pod.containers)
    assert full / threshold > 1, "never one engine more"
    assert MIN_OUTSTANDING / threshold <= 1, "the least feed would ask for a second engine"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_a_dashboard_asks_for_exported_metrics_and_their_labels_only(path: object) -> None:
    board = json.loads(path.read_text())  # type: ignore[attr-defined]
    panels = [p for p in board["panels"] if p["type"] != "row"]
    assert len(panels) > 15 and len({p["id"] for p in board["panels"]}) == len(board["panels"])
    seen = set()
    for panel in panels:
        assert panel["targets"] and panel["title"]
        for target in panel["targets"]:
            metrics = named(target["expr"])
            assert metrics and metrics <= exported(), target["expr"]
            seen |= metrics
            known = set.union(*(labels_of(m) for m in metrics))
            for group in re.findall(r"(?:by|without|ignoring|on) \(([^)]*)\)", target["expr"]):
                assert {g.strip() for g in group.split(",")} <= known, target["expr"]
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known, target["legendFormat"]
            assert 'namespace=~"$namespace"' in target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            assert named(variable["query"]["query"]) <= exported()
    assert "statetap_outstanding_batches" in seen and any(m.startswith("statetap_engine_") for m in seen)


def test_a_dashboard_is_a_config_map_as_it_lies_in_the_tree() -> None:
    maps = typed("everything watched").of("ConfigMap")
    assert [m.metadata.name for m in maps] == [f"st-statetap-{p.stem}" for p in DASHBOARDS]
    for made, path in zip(maps, DASHBOARDS, strict=True):
        assert made.metadata.labels["grafana_dashboard"] == "1"
        assert json.loads(made.data[path.name]) == json.loads(path.read_text())
    assert not typed("least").of("ConfigMap")


def test_helm_test_is_a_pod_that_goes_when_it_has_passed() -> None:
    (pod,) = typed("least").of("Pod")
    assert pod.metadata.annotations["helm.sh/hook"] == "test" and pod.spec.restartPolicy == "Never"
    service = typed("least").one("Service", "coordinator")
    assert pod.spec.containers[0].args[-1] == f"http://{service.metadata.name}:{service.spec.ports[0].port}/readyz"
    assert not typed("no policies, no budgets, no test").of("Pod")
