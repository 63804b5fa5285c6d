"""The custom resources that the chart makes, strictly typed after their public API documents: the fields that are used here, no others.

ServiceMonitor: the Prometheus operator's API reference, monitoring.coreos.com/v1. ScaledObject: KEDA's "ScaledObject specification" and
"Prometheus scaler", keda.sh/v1alpha1; behavior is Kubernetes' own autoscaling/v2. LeaderWorkerSet: api/leaderworkerset/v1 of
kubernetes-sigs/lws; its pod templates are Kubernetes' own, and held against those (objects.py).
"""
# ruff: noqa: N815  (their names)

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str
    labels: dict[str, str]


class LabelSelector(Strict):
    matchLabels: dict[str, str] = Field(min_length=1)


class NamespaceSelector(Strict):
    matchNames: list[str] = Field(min_length=1)


class SecretKeySelector(Strict):
    name: str = Field(min_length=1)
    key: str = Field(min_length=1)


class Authorization(Strict):
    type: Literal["Bearer"]
    credentials: SecretKeySelector


class Endpoint(Strict):
    port: str
    path: str
    interval: Annotated[str, Field(pattern=r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$")]
    authorization: Authorization | None = None


class ServiceMonitorSpec(Strict):
    selector: LabelSelector
    namespaceSelector: NamespaceSelector
    endpoints: list[Endpoint] = Field(min_length=1)


class ServiceMonitor(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["ServiceMonitor"]
    metadata: Metadata
    spec: ServiceMonitorSpec


class ScaleTarget(Strict):
    apiVersion: str
    kind: str
    name: str


class ScalingPolicy(Strict):
    type: Literal["Pods", "Percent"]
    value: int = Field(gt=0)
    periodSeconds: int = Field(gt=0, le=1800)


class ScalingRules(Strict):
    stabilizationWindowSeconds: int = Field(ge=0, le=3600)
    policies: list[ScalingPolicy]


class Behavior(Strict):
    scaleDown: ScalingRules


class HorizontalPodAutoscalerConfig(Strict):
    behavior: Behavior


class Advanced(Strict):
    horizontalPodAutoscalerConfig: HorizontalPodAutoscalerConfig


class PrometheusMetadata(Strict):
    """All values of a trigger's metadata are text."""

    serverAddress: str = Field(min_length=1)
    query: str = Field(min_length=1)
    threshold: Annotated[str, Field(pattern=r"^[0-9.]+$")]


class Trigger(Strict):
    type: Literal["prometheus"]
    metricType: Literal["AverageValue", "Value"]
    metadata: PrometheusMetadata


class ScaledObjectSpec(Strict):
    scaleTargetRef: ScaleTarget
    minReplicaCount: int = Field(ge=0)
    maxReplicaCount: int = Field(ge=1)
    pollingInterval: int = Field(ge=1)
    advanced: Advanced
    triggers: list[Trigger] = Field(min_length=1)


class ScaledObject(Strict):
    apiVersion: Literal["keda.sh/v1alpha1"]
    kind: Literal["ScaledObject"]
    metadata: Metadata
    spec: ScaledObjectSpec


class LeaderWorkerTemplate(Strict):
    size: int = Field(ge=2)
    restartPolicy: Literal["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
    leaderTemplate: dict[str, Any]
    workerTemplate: dict[str, Any]


class LeaderWorkerSetSpec(Strict):
    replicas: int | None = Field(default=None, ge=0, le=1_000_000)
    startupPolicy: Literal["LeaderCreated", "LeaderReady"]
    leaderWorkerTemplate: LeaderWorkerTemplate


class LeaderWorkerSet(Strict):
    apiVersion: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: Metadata
    spec: LeaderWorkerSetSpec


def _checker(model: type[Strict]) -> Callable[[dict[str, Any]], list[str]]:
    def check(item: dict[str, Any]) -> list[str]:
        try:
            model.model_validate(item)
        except ValidationError as e:
            return [f"{'/'.join(map(str, p['loc']))}: {p['msg']}" for p in e.errors()]
        return []

    return check


CRDS = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _checker(ServiceMonitor),
    ("keda.sh/v1alpha1", "ScaledObject"): _checker(ScaledObject),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _checker(LeaderWorkerSet),
}
