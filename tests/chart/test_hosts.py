"""An engine over several hosts: the leader's pod is that of one host, the others hold ranks and nothing else, and they find each other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from statetap.engine.hosts import Nodes, differences
from statetap.engine.launcher import parse_args
from tests.chart.sets import GOOD, merged, rendered, typed
from tests.chart.test_engine_pod import size, values
from tests.chart.test_network import OURS, PROMETHEUS, STRANGER, Peer, component, matches, may
from tests.chart.test_running import answering, probe
from tests.support.chart.helm import VERSIONS, render
from tests.support.chart.objects import Typed, container, environment, problems
from tests.support.redis import free_port

HOSTS = ("two hosts", "many hosts, scaled")


def group(name: str) -> dict[str, Any]:
    (found,) = typed(name).custom("LeaderWorkerSet")
    return found


def further(name: str) -> Any:
    """Spec of the pod of every host but the first."""
    (found,) = (spec for _, labels, spec in typed(name).pods() if labels["app.kubernetes.io/component"] == "engine-host")
    return found


def arguments(name: str, host: int) -> tuple[Any, list[str]]:
    """The launcher's arguments on one host, with what LeaderWorkerSet's webhook puts into every container."""
    c = container(typed(name).engine() if host == 0 else further(name), "engine")
    injected = {"LWS_WORKER_INDEX": str(host), "LWS_LEADER_ADDRESS": "st-statetap-engines-0.st-statetap-engines.capture", "POD_NAME": "x"}
    args = c.args
    for variable, value in injected.items():
        args = [a.replace(f"$({variable})", value) for a in args]
    assert "$(" not in "".join(args)
    return parse_args(args)


@pytest.mark.parametrize("name", HOSTS)
def test_the_pod_with_the_first_ranks_is_the_pod_of_an_engine_on_one_host(name: str) -> None:
    """Seen to fail with a leader that had the tap of a further host, off the volume that its workers mount."""
    one = merged(GOOD[name], {"engine": {"hosts": 1}})
    (alone,) = (o for o in render(one) if o["kind"] == "StatefulSet" and o["metadata"]["name"].endswith("engine"))
    leader = copy.deepcopy(group(name)["spec"]["leaderWorkerTemplate"]["leaderTemplate"])
    args = leader["spec"]["initContainers"][0]["args"]
    at = args.index("--tp")
    gpus, hosts = (values(name)["engine"][k] for k in ("gpus", "hosts"))
    assert args[at + 1 : at + 8] == [
        str(gpus * hosts), "--nnodes", str(hosts), "--node-rank", "0", "--dist-init-addr", "$(LWS_LEADER_ADDRESS):25000",
    ]  # fmt: skip
    args[at + 1 : at + 8] = [str(gpus)]
    assert leader == alone["spec"]["template"]


@pytest.mark.parametrize("name", HOSTS)
def test_launchers_of_one_group_are_told_the_same_and_know_who_they_are(name: str) -> None:
    """Seen to fail with ``--tp`` of one pod's GPUs."""
    given = values(name)["engine"]
    (first, flags), (last, others) = arguments(name, 0), arguments(name, given["hosts"] - 1)
    told = [{k: v for k, v in vars(a).items() if k not in ("node_rank", "tap", "grace", "engine_id", "host")} for a in (first, last)]
    assert differences(*told) == "" and flags == others == given["sglang"]
    for args, rank in ((first, 0), (last, given["hosts"] - 1)):
        nodes = Nodes(count=args.nnodes, rank=args.node_rank, address=args.dist_init_addr)
        nodes.check(args.tp)
        assert (nodes.count, nodes.rank, args.tp) == (given["hosts"], rank, given["hosts"] * given["gpus"])
        assert nodes.link == ("st-statetap-engines-0.st-statetap-engines.capture", 25001)
    assert last.host == "127.0.0.1", "nobody asks it anything"
    assert last.tap.is_relative_to(Path("/tmp")) and first.tap == Path("/tap")


@pytest.mark.parametrize("name", HOSTS)
def test_a_further_host_has_gpus_and_models_and_neither_tap_nor_store_nor_workers(name: str) -> None:
    pod, given = further(name), values(name)["engine"]
    (c,) = pod.containers
    assert not pod.initContainers and c.restartPolicy is None
    assert {v.name for v in pod.volumes} == {"models", "shm", "cache", "tmp"} == {m.name for m in c.volumeMounts}
    assert c.resources.limits[given["gpuResource"]] == given["gpus"]
    assert size(c.resources.limits["memory"]) == size(given["memory"]) + size(given["shm"])
    assert pod.serviceAccountName is None, "it has nothing to do with the bucket"
    leader = container(typed(name).engine(), "engine")
    assert environment(c) == environment(leader) and c.image == leader.image
    labels = group(name)["spec"]["leaderWorkerTemplate"]["workerTemplate"]["metadata"]["labels"]
    assert given["podLabels"].items() <= labels.items()


@pytest.mark.parametrize("name", HOSTS)
def test_a_further_host_serves_until_the_first_has_drained_and_says_its_end_before_it_is_killed(name: str) -> None:
    """All pods of a group are told to end at once. Seen to fail with ``engine.stopSeconds`` for all."""
    given = values(name)
    drained = given["workers"]["drainSeconds"] + given["workers"]["commitSeconds"] + given["engine"]["stopSeconds"]
    assert drained < arguments(name, 1)[0].grace < further(name).terminationGracePeriodSeconds
    assert further(name).terminationGracePeriodSeconds == typed(name).engine().terminationGracePeriodSeconds


def test_a_further_host_is_ready_when_its_ranks_have_loaded(tmp_path: Path) -> None:
    """SGLang's stand-in for the HTTP server answers there from then on; READY.json is the first host's."""
    c = container(further("two hosts"), "engine")
    leader = container(typed("two hosts").engine(), "engine")
    for mine, of_leader in ((c.startupProbe, leader.startupProbe), (c.readinessProbe, leader.readinessProbe)):
        assert (mine.periodSeconds, mine.failureThreshold) == (of_leader.periodSeconds, of_leader.failureThreshold)
    with answering(200) as (port, _):
        for p in (c.startupProbe, c.readinessProbe, c.livenessProbe):
            assert probe(p.exec.command, port, tmp_path) == 0
    assert probe(c.readinessProbe.exec.command, free_port(), tmp_path) != 0


def test_hosts_of_engines_reach_each_other_at_any_port_and_nobody_else_does() -> None:
    """Seen to fail without the policy ``engine-hosts``: NCCL was shut out."""
    pair = (component("engine"), component("engine-host"))
    for source in pair:
        for to in pair:
            assert all(may("two hosts", source, to, port) for port in (25000, 25001, 51234))
    other = Peer(labels={**OURS, "app.kubernetes.io/instance": "other", "app.kubernetes.io/component": "engine"})
    for source in (STRANGER, PROMETHEUS, component("coordinator"), component("ingest"), other):
        assert not any(may("two hosts", source, to, port) for to in pair for port in (25000, 25001, 51234))
    host = component("engine-host")
    assert not any(may("two hosts", host, component(c), port) for c, port in (("redis", "redis"), ("coordinator", "http")))
    assert may("two hosts", PROMETHEUS, component("engine"), "engine") and not may("two hosts", PROMETHEUS, host, "engine")
    assert may("two hosts", host, Peer(namespace=""), 53)
    assert not may("least", component("engine"), component("engine"), 25000), "of one host they know nothing of each other"


def test_a_host_may_load_the_model_from_the_hub() -> None:
    from tests.chart.test_network import INTERNET

    assert may("two hosts", component("engine-host"), INTERNET, 443) and not may("two hosts", component("engine-host"), INTERNET, 22)


def test_a_budget_counts_all_hosts_and_the_scrape_the_first_alone() -> None:
    """A budget of leaders alone would let a drain take a host of each engine."""
    release = typed("two hosts")
    budget = release.one("PodDisruptionBudget", "engine").spec
    chosen = {labels["app.kubernetes.io/component"] for _, labels, _ in release.pods() if matches(budget.selector, labels)}
    assert chosen == {"engine", "engine-host"} and budget.maxUnavailable == 1
    assert typed("many hosts, scaled").one("PodDisruptionBudget", "engine").spec.maxUnavailable == 0
    service = release.one("Service", "engine")
    chosen = {labels["app.kubernetes.io/component"] for _, labels, _ in release.pods() if service.spec.selector.items() <= labels.items()}
    assert chosen == {"engine"}
    assert service.metadata.name != group("two hosts")["metadata"]["name"], "the controller makes a Service of that name"


def test_replicas_are_engines_and_keda_scales_the_group_set() -> None:
    assert (group("two hosts")["spec"]["replicas"], group("two hosts")["spec"]["leaderWorkerTemplate"]["size"]) == (3, 2)
    name = "many hosts, scaled"
    (scaled,) = typed(name).custom("ScaledObject")
    ref = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": group(name)["metadata"]["name"]}
    assert scaled["spec"]["scaleTargetRef"] == ref and "replicas" not in group(name)["spec"]


@pytest.mark.parametrize("name", HOSTS)
def test_names_that_the_controller_makes_fit_into_labels(name: str) -> None:
    """A worker StatefulSet has its leader's name, and its pods a label of that name and a hash of ten."""
    longest = f"{group(name)['metadata']['name']}-99-{'0' * 10}"
    assert len(longest) <= 63
    assert not [o for o in typed(name).of("StatefulSet") if o.metadata.name.endswith(("-engine", "-engines"))]


def test_one_host_is_a_stateful_set() -> None:
    for name in GOOD:
        groups = [o for o in rendered(name) if o["kind"] == "LeaderWorkerSet"]
        assert len(groups) == (name in HOSTS)
        assert not groups or not [o for o in Typed(rendered(name)).of("NetworkPolicy") if not o.spec.podSelector.matchLabels]


def test_a_wrong_field_in_a_group_or_in_its_pods_is_seen() -> None:
    """The check itself can fail."""
    for version in VERSIONS:
        assert problems(group("two hosts"), version) == []
        for path, change in (
            (("spec",), {"replica": 1}),
            (("spec", "leaderWorkerTemplate"), {"size": 1}),
            (("spec", "leaderWorkerTemplate", "leaderTemplate", "spec"), {"container": []}),
            (("spec", "leaderWorkerTemplate", "workerTemplate", "spec"), {"terminationGracePeriodSeconds": "long"}),
            (("spec", "leaderWorkerTemplate", "workerTemplate", "spec"), {"volumes": None}),
        ):
            broken = copy.deepcopy(group("two hosts"))
            at = broken
            for key in path:
                at = at[key]
            at.update(change)
            assert problems(broken, version), (path, change)
