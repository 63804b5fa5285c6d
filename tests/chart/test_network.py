"""Who may speak to whom: the rendered policies, read as a cluster reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.chart.sets import GOOD, typed
from tests.support.chart.helm import NAMESPACE, RELEASE
from tests.support.chart.objects import Typed

OURS = {"app.kubernetes.io/name": "statetap", "app.kubernetes.io/instance": RELEASE}


@dataclass(frozen=True, kw_only=True)
class Peer:
    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = NAMESPACE


def component(name: str) -> Peer:
    return Peer(labels={**OURS, "app.kubernetes.io/component": name})


INTERNET = Peer(namespace="")
STRANGER = Peer(labels={"app": "notebook"})
CLIENT = Peer(labels={"statetap.io/client": "true"})
PROMETHEUS = Peer(labels={"app": "prometheus"}, namespace="monitoring")
PORTS = {"coordinator": "http", "engine": "engine", "redis": "redis"}


def matches(selector: Any, labels: dict[str, str]) -> bool:
    if not (selector.matchLabels or {}).items() <= labels.items():
        return False
    for e in selector.matchExpressions or ():
        assert e.operator == "In"
        if labels.get(e.key) not in e.values:
            return False
    return True


def is_peer(rule: Any, peer: Peer) -> bool:
    """One entry of from/to, which holds no address blocks here."""
    assert rule.ipBlock is None
    if peer is INTERNET:
        return False
    if rule.namespaceSelector is None:
        if peer.namespace != NAMESPACE:
            return False
    elif not matches(rule.namespaceSelector, {"kubernetes.io/metadata.name": peer.namespace}):
        return False
    return rule.podSelector is None or matches(rule.podSelector, peer.labels)


def one_side(release: Typed, direction: str, of: Peer, other: Peer, port: Any) -> bool:
    """Whether the policies that choose ``of`` let it through; a pod that none chooses is open."""
    policies = [p for p in release.of("NetworkPolicy") if direction in p.spec.policyTypes and matches(p.spec.podSelector, of.labels)]
    if of.namespace != NAMESPACE or not policies:
        return True
    for policy in policies:
        for rule in (policy.spec.ingress if direction == "Ingress" else policy.spec.egress) or ():
            peers = (rule.from_ if direction == "Ingress" else rule.to) or ()
            ports = [p.port for p in rule.ports or ()]
            if (not ports or port in ports) and (not peers or any(is_peer(p, other) for p in peers)):
                return True
    return False


def may(name: str, source: Peer, to: Peer, port: Any) -> bool:
    release = typed(name)
    out = source in (INTERNET,) or one_side(release, "Egress", source, to, port)
    return out and (to is INTERNET or one_side(release, "Ingress", to, source, port))


def reached(name: str, source: Peer) -> set[str]:
    return {c for c, port in PORTS.items() if may(name, source, component(c), port)}


def test_each_service_reaches_what_it_needs_and_nothing_else() -> None:
    assert {c: reached("least", component(c)) for c in ("coordinator", "ingest", "engine", "redis", "test")} == {
        "coordinator": {"redis"},
        "ingest": {"redis"},
        "engine": {"redis"},
        "redis": set(),
        "test": {"coordinator"},
    }


def test_strangers_reach_nothing_and_clients_the_coordinator_alone() -> None:
    for outside in (STRANGER, PROMETHEUS, INTERNET, Peer(labels=CLIENT.labels, namespace="elsewhere")):
        assert reached("least", outside) == set()
    assert reached("least", CLIENT) == {"coordinator"}


def test_the_ingress_and_the_monitoring_come_by_selector() -> None:
    assert reached("example external-redis-s3", Peer(namespace="ingress-nginx")) == {"coordinator"}
    assert reached("example external-redis-s3", PROMETHEUS) == {"coordinator"}
    assert reached("example external-redis-s3", STRANGER) == set()
    assert reached("everything watched", PROMETHEUS) == {"coordinator", "engine"}
    assert reached("everything watched", STRANGER) == set()
    # The second peer of that set has no namespace: it is a pod of this one.
    assert reached("everything watched", Peer(labels=PROMETHEUS.labels)) == {"coordinator", "engine"}
    assert reached("everything watched", Peer(labels={"app": "other"})) == set()


def test_only_what_loads_models_and_tokenizers_reaches_the_hub() -> None:
    def hub(name: str) -> set[str]:
        return {c for c in ("coordinator", "ingest", "engine", "redis", "test") if may(name, component(c), INTERNET, 443)}

    assert hub("least") == {"ingest", "engine"}
    assert hub("example kimi-k2.5-8gpu") == set()
    assert all(may("least", component(c), INTERNET, 53) for c in ("coordinator", "ingest", "engine"))
    assert not may("least", component("engine"), INTERNET, 22)


def test_an_external_redis_is_reached_at_its_port() -> None:
    for c in ("coordinator", "ingest", "engine"):
        assert may("example external-redis-s3", component(c), INTERNET, 6380)
        assert not may("example external-redis-s3", component(c), INTERNET, 6379)


def test_a_bucket_is_reached_at_its_port_by_who_reads_and_writes_samples() -> None:
    def reach(name: str, port: int) -> set[str]:
        return {c for c in ("coordinator", "ingest", "engine", "redis", "test") if may(name, component(c), INTERNET, port)}

    assert reach("example external-redis-s3", 9000) == {"coordinator", "engine"} and reach("least", 9000) == set()
    assert reach("a bucket by the cloud's identity", 443) == {"coordinator", "ingest", "engine"}
    assert reach("a bucket by the cloud's identity", 80) == {"coordinator", "engine"}


def test_without_policies_everybody_reaches_everything() -> None:
    """The reading above is not simply deaf."""
    assert reached("no policies, no budgets, no test", STRANGER) == set(PORTS)


@pytest.mark.parametrize("name", GOOD)
def test_every_pod_is_chosen_by_the_policy_that_denies(name: str) -> None:
    policies = typed(name).of("NetworkPolicy")
    if name == "no policies, no budgets, no test":
        assert not policies
        return
    (deny,) = (p for p in policies if p.metadata.name.endswith("-default"))
    assert deny.spec.policyTypes == ["Ingress", "Egress"] and not deny.spec.ingress
    for _, labels, _ in typed(name).pods():
        assert matches(deny.spec.podSelector, labels)
