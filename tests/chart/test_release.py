"""The release as a whole: security of every pod, references that lead somewhere, storage, Redis, images."""

from __future__ import annotations

import re
from typing import Any

import pytest

from statetap import __version__
from tests.chart.sets import GOOD, typed
from tests.support.chart.helm import RELEASE, ROOT
from tests.support.chart.objects import Typed, container, environment


@pytest.mark.parametrize("name", GOOD)
def test_every_pod_is_restricted_and_has_no_token(name: str) -> None:
    """What the Pod Security Standard `restricted` asks for, and a root that cannot be written."""
    pods = list(typed(name).pods())
    assert len(pods) >= 3
    for _, _, spec in pods:
        assert spec.automountServiceAccountToken is False and spec.enableServiceLinks is False
        context = spec.securityContext
        assert context.runAsNonRoot and (context.runAsUser, context.runAsGroup, context.fsGroup) == (10001, 10001, 10001)
        assert context.seccompProfile.type == "RuntimeDefault" and context.fsGroupChangePolicy == "OnRootMismatch"
        assert not (spec.hostNetwork or spec.hostPID or spec.hostIPC or spec.shareProcessNamespace)
        host_paths = [v.hostPath.path for v in spec.volumes or () if v.hostPath]
        assert not host_paths or name == "a folder of one node"
    for _, c in typed(name).containers():
        context = c.securityContext
        assert context.allowPrivilegeEscalation is False and context.readOnlyRootFilesystem is True
        assert context.capabilities.drop == ["ALL"] and context.capabilities.add is None and context.privileged is None
        assert c.resources.limits["memory"] == c.resources.requests["memory"] and c.resources.requests["cpu"]
        assert c.terminationMessagePolicy == "FallbackToLogsOnError"


def test_an_engine_has_a_cache_where_the_image_looks_for_it() -> None:
    """Kernels are compiled at the first start, and the root is read-only: what images/engine points at /cache is a volume."""
    text = (ROOT / "images" / "engine" / "Dockerfile").read_text()
    folders = set(re.findall(r"\b[A-Z_]+=(/[a-z]+)", text)) - {"/home", "/opt"}
    assert folders == {"/models", "/cache"}
    engine = container(typed("least").one("StatefulSet", "engine").spec.template.spec, "engine")
    assert folders <= {m.mountPath for m in engine.volumeMounts}
    for _, c in typed("least").containers():
        assert environment(c).get("HF_HOME", "/models/hf") == re.findall(r"HF_HOME=(\S+)", text)[0]


@pytest.mark.parametrize("name", GOOD)
def test_a_root_that_cannot_be_written_has_a_home_and_a_tmp_that_can(name: str) -> None:
    for _, _, spec in typed(name).pods():
        volumes = {v.name: v for v in spec.volumes or ()}
        for c in [*(spec.initContainers or ()), *spec.containers]:
            mounts = {m.mountPath: m for m in c.volumeMounts or ()}
            # Redis' data is a claim of its StatefulSet.
            assert {m.name for m in mounts.values()} - ({"data"} if c.name == "redis" else set()) <= set(volumes)
            home = environment(c).get("HOME")
            assert (home is None) == (c.name in ("redis", "ready"))
            for path in {home, "/tmp"} if home else set():
                assert volumes[mounts[path].name].emptyDir is not None and not mounts[path].readOnly


@pytest.mark.parametrize("name", GOOD)
def test_selectors_ports_and_claims_lead_somewhere(name: str) -> None:
    release = typed(name)
    pods = list(release.pods())

    def chosen(selector: dict[str, str]) -> list[Any]:
        return [spec for _, labels, spec in pods if selector.items() <= labels.items()]

    for service in release.of("Service"):
        (spec,) = chosen(service.spec.selector)
        ports = {p.name for c in [*(spec.initContainers or ()), *spec.containers] for p in c.ports or ()}
        assert {p.targetPort for p in service.spec.ports} <= ports
    for kind in ("Deployment", "StatefulSet"):
        for item in release.of(kind):
            assert item.spec.selector.matchLabels.items() <= item.spec.template.metadata.labels.items()
            assert len(chosen(item.spec.selector.matchLabels)) == 1, "one component a selector"
            if kind == "StatefulSet":
                assert item.spec.serviceName in {s.metadata.name for s in release.of("Service")}
    made = {c.metadata.name for c in release.of("PersistentVolumeClaim")}
    used = {v.persistentVolumeClaim.claimName for _, _, s in pods for v in s.volumes or () if v.persistentVolumeClaim}
    assert made <= used
    for claim in used - made:
        assert claim in {GOOD[name].get(s, {}).get("claim") for s in ("store", "modelCache", "data")}
    for item in release.all:
        assert item.metadata.labels["app.kubernetes.io/instance"] == RELEASE


def test_all_services_have_the_same_store_and_redis() -> None:
    for name in ("least", "example external-redis-s3", "redis with a password", "redis by its url", "a folder of one node"):
        stores, urls = set(), set()
        for _, _, spec in typed(name).pods():
            for c in [*(spec.initContainers or ()), *spec.containers]:
                env = {e.name: e for e in c.env or ()}
                if "STATETAP_STORE" in env:
                    (mount,) = (m for m in c.volumeMounts if m.mountPath == env["STATETAP_STORE"].value)
                    (volume,) = (v for v in spec.volumes if v.name == mount.name)
                    assert not mount.readOnly
                    stores.add(repr(volume))
                    urls.add(repr(env["STATETAP_REDIS_URL"]))
        assert len(stores) == len(urls) == 1, name


def coordinator(release: Typed) -> Any:
    return container(release.one("Deployment", "coordinator").spec.template.spec, "coordinator")


def test_the_address_of_redis_holds_no_password_of_the_values() -> None:
    url = environment(coordinator(typed("least")))["STATETAP_REDIS_URL"]
    assert url == "redis://st-statetap-redis:6379/0"
    assert "st-statetap-redis" in {s.metadata.name for s in typed("least").of("Service")}
    with_password = coordinator(typed("redis with a password"))
    assert environment(with_password)["STATETAP_REDIS_URL"] == "redis://:$(REDIS_PASSWORD)@st-statetap-redis:6379/0"
    names = [e.name for e in with_password.env]
    assert names.index("REDIS_PASSWORD") < names.index("STATETAP_REDIS_URL"), "a variable is expanded by those before it"
    (url_of_secret,) = (e for e in coordinator(typed("example external-redis-s3")).env if e.name == "STATETAP_REDIS_URL")
    assert (url_of_secret.valueFrom.secretKeyRef.name, url_of_secret.valueFrom.secretKeyRef.key) == ("shared-redis", "url")
    for name in ("example external-redis-s3", "redis by its url"):
        assert not [o for o in typed(name).all if "redis" in o.metadata.name and o.kind in ("StatefulSet", "Service")]


def test_coordinator_and_workers_have_the_bucket_and_nobody_else_its_keys() -> None:
    seen = {}
    for _, _, spec in typed("example external-redis-s3").pods():
        assert spec.serviceAccountName is None
        for c in [*(spec.initContainers or ()), *spec.containers]:
            env = {e.name: e for e in c.env or ()}
            if "AWS_SECRET_ACCESS_KEY" in env:
                secrets = {
                    (n, env[n].valueFrom.secretKeyRef.name, env[n].valueFrom.secretKeyRef.key)
                    for n in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
                }
                assert secrets == {(n, "statetap-bucket", n) for n in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
                assert env["AWS_ENDPOINT_URL_S3"].value == "https://s3.example.com:9000"
                seen[c.name] = env["STATETAP_SAMPLES"].value if "STATETAP_SAMPLES" in env else ""
    assert seen == {"coordinator": "s3://drafts/statetap", "worker-0": "", "worker-1": ""}, "a worker has it from the job"
    accounts = {component: spec.serviceAccountName for component, _, spec in typed("a bucket by the cloud's identity").pods()}
    assert sorted(map(str, accounts.values())) == ["None"] * (len(accounts) - 2) + ["drafts"] * 2
    for _, _, spec in typed("a bucket by the cloud's identity").pods():
        assert spec.automountServiceAccountToken is False


def test_keys_come_as_a_folder_so_that_a_change_arrives() -> None:
    c = coordinator(typed("least"))
    spec = typed("least").one("Deployment", "coordinator").spec.template.spec
    (volume,) = (v for v in spec.volumes if v.secret)
    assert volume.secret.secretName == "keys"
    assert volume.secret.defaultMode == 0o440, "the coordinator warns of keys that others can read"
    (mount,) = (m for m in c.volumeMounts if m.name == volume.name)
    assert environment(c)["STATETAP_KEYS_FILE"] == f"{mount.mountPath}/keys.txt" and mount.subPath is None and mount.readOnly
    assert "STATETAP_ALLOW_NO_AUTH" not in environment(c)
    opened = environment(coordinator(typed("open")))
    assert opened["STATETAP_ALLOW_NO_AUTH"] == "true" and "STATETAP_KEYS_FILE" not in opened


def test_the_coordinator_is_asked_for_what_each_probe_means() -> None:
    c = coordinator(typed("least"))
    paths = [p.httpGet.path for p in (c.startupProbe, c.livenessProbe, c.readinessProbe)]
    assert paths == ["/healthz", "/healthz", "/readyz"], "an outage of Redis must not restart it"
    assert c.readinessProbe.timeoutSeconds > 6, "readyz gives Redis and store 3 s each"


def test_the_cookie_is_secure_behind_tls() -> None:
    assert environment(coordinator(typed("example external-redis-s3")))["STATETAP_COOKIE_SECURE"] == "true"
    assert environment(coordinator(typed("least")))["STATETAP_COOKIE_SECURE"] == "false"


def test_data_by_path_is_mounted_read_only_where_it_is_looked_at() -> None:
    release = typed("models for each pod, data by path")
    for end in ("coordinator", "ingest"):
        c = container(release.one("Deployment", end).spec.template.spec, end)
        (mount,) = (m for m in c.volumeMounts if m.mountPath == "/data")
        assert mount.readOnly
    assert environment(coordinator(release))["STATETAP_DATA_DIR"] == "/data"
    assert "STATETAP_DATA_DIR" not in environment(coordinator(typed("least")))


def test_models_are_mounted_where_they_are_looked_for_and_written_by_who_downloads() -> None:
    release = typed("least")
    c = coordinator(release)
    (mount,) = (m for m in c.volumeMounts if m.mountPath == environment(c)["STATETAP_MODEL_DIRS"])
    assert mount.name == "models" and mount.readOnly
    for end, kind in (("ingest", "Deployment"), ("engine", "StatefulSet")):
        c = container(release.one(kind, end).spec.template.spec, end)
        (mount,) = (m for m in c.volumeMounts if environment(c)["HF_HOME"].startswith(f"{m.mountPath}/"))
        assert mount.name == "models" and not mount.readOnly


def test_claims_stay_when_the_release_goes() -> None:
    claims = {c.metadata.name: c for c in typed("least").of("PersistentVolumeClaim")}
    assert set(claims) == {"st-statetap-store", "st-statetap-models"}
    for claim in claims.values():
        assert claim.metadata.annotations == {"helm.sh/resource-policy": "keep"} and claim.spec.accessModes == ["ReadWriteMany"]
    assert claims["st-statetap-store"].spec.resources.requests == {"storage": "1Ti"}
    (redis,) = typed("redis with a password").one("StatefulSet", "redis").spec.volumeClaimTemplates
    assert redis.spec.accessModes == ["ReadWriteOnce"] and redis.spec.storageClassName == "fast"


def test_images_have_the_charts_version_unless_a_tag_or_digest_is_given() -> None:
    images = {c.name: c.image for _, c in typed("least").containers()}
    assert images["coordinator"] == images["ingest"] == images["worker-0"] == images["ready"] == f"statetap/control:{__version__}"
    assert images["engine"] == f"statetap/engine:{__version__}" and images["redis"].startswith("redis:")
    elsewhere = {c.name: c.image for _, c in typed("images elsewhere").containers()}
    assert elsewhere["coordinator"] == "registry.example.com/ml/statetap/control:x"
    assert elsewhere["engine"] == "registry.example.com/ml/statetap/engine@sha256:" + "0" * 64
    for _, _, spec in typed("images elsewhere").pods():
        assert [s.name for s in spec.imagePullSecrets] == ["pull"]


def test_images_are_those_that_compose_builds_and_runs() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for name in ("least", "example cpu-demo"):
        for _, c in typed(name).containers():
            image, _, tag = c.image.partition(":")
            assert f" {image}:{'${STATETAP_VERSION' if tag == __version__ else tag}" in text, c.image
    assert "./k8s/statetap/dashboards:" in text, "one dashboard for both"


def test_the_hubs_token_goes_to_who_asks_the_hub() -> None:
    having = {c.name for _, c in typed("images elsewhere").containers() for e in c.env or () if e.name == "HF_TOKEN"}
    assert having == {"engine", "ingest"}
