"""Rendered objects: held against Kubernetes' strict schemas, and read back as typed ones.

Invariant: an object of a kind that nobody here knows is an error, and so is a field that its kind has not.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
from lightkube import codecs
from lightkube.models.core_v1 import PodTemplateSpec

from tests.support.chart.crds import CRDS
from tests.support.chart.helm import definitions

Objects = list[dict[str, Any]]
POD_TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"


@functools.cache
def _names(kubernetes: str) -> dict[tuple[str, str], str]:
    """(apiVersion, kind) -> name of the definition."""
    found = {}
    for name, definition in definitions(kubernetes).items():
        for gvk in definition.get("x-kubernetes-group-version-kind", ()):
            found["/".join(filter(None, (gvk["group"], gvk["version"]))), gvk["kind"]] = name
    return found


@functools.cache
def _validator(kubernetes: str, name: str) -> Any:
    """With the definitions that it needs: all of them take a second to compile."""
    every, needed, waiting = definitions(kubernetes), dict[str, Any](), [name]
    while waiting:
        if (here := waiting.pop()) not in needed:
            needed[here] = every[here]
            waiting += re.findall(r'"#/\$defs/([^"]+)"', json.dumps(every[here]))
    return jsonschema_rs.validator_for({"$ref": f"#/$defs/{name}", "$defs": needed})


def problems(item: dict[str, Any], kubernetes: str) -> list[str]:
    """What is wrong with an object, by path."""
    where = f"{item.get('kind')}/{item.get('metadata', {}).get('name')}"
    key = (item.get("apiVersion", ""), item.get("kind", ""))
    if key in CRDS:
        found = [f"{where}: {e}" for e in CRDS[key](item)]
        for name, template in pod_templates(item):
            errors = _validator(kubernetes, POD_TEMPLATE).iter_errors(template)
            found += [f"{where}: {name}/{'/'.join(map(str, e.instance_path))}: {e.message[:300]}" for e in errors]
            found += [f"{where}: {name}{path} is empty" for path in _nulls(template)]
        return found
    if key not in _names(kubernetes):
        return [f"{where}: {key[0]} {key[1]} is not of Kubernetes {kubernetes}"]
    errors = _validator(kubernetes, _names(kubernetes)[key]).iter_errors(item)
    found = [f"{where}: {'/'.join(map(str, e.instance_path))}: {e.message[:300]}" for e in errors]
    # The schemas let null stand for anything; what a template leaves empty is a mistake of ours.
    return found + [f"{where}: {path} is empty" for path in _nulls(item)]


def pod_templates(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, template) of the pods of a LeaderWorkerSet's group: leader, then further hosts. Of another kind nothing."""
    if item["kind"] == "LeaderWorkerSet":
        group = item["spec"]["leaderWorkerTemplate"]
        yield from ((name, group[name]) for name in ("leaderTemplate", "workerTemplate"))


def _nulls(node: Any, path: str = "") -> Iterator[str]:
    if node is None:
        yield path
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from _nulls(value, f"{path}/{key}")


class Typed:
    """The built-in objects of a release, typed (lightkube's models), by kind and name without the release's."""

    def __init__(self, objects: Objects) -> None:
        self.plain = objects
        self.all: list[Any] = [codecs.from_dict(o) for o in objects if (o["apiVersion"], o["kind"]) not in CRDS]

    def of(self, kind: str) -> list[Any]:
        return [o for o in self.all if o.kind == kind]

    def one(self, kind: str, end: str) -> Any:
        (found,) = (o for o in self.of(kind) if o.metadata.name.endswith(f"-{end}"))
        return found

    def custom(self, kind: str) -> Objects:
        return [o for o in self.plain if o["kind"] == kind]

    def engine(self) -> Any:
        """Spec of the pod with an engine's HTTP service and workers: of the StatefulSet, or the leader of a LeaderWorkerSet."""
        (found,) = (spec for _, labels, spec in self.pods() if labels["app.kubernetes.io/component"] == "engine")
        return found

    def pods(self) -> Iterator[tuple[str, Any, Any]]:
        """(name, labels, spec) of every pod that the release makes."""
        for item in self.plain:
            for _, template in pod_templates(item):
                made = PodTemplateSpec.from_dict(template)
                yield item["metadata"]["name"], made.metadata.labels, made.spec
        for o in self.all:
            if o.kind in ("Deployment", "StatefulSet"):
                yield o.metadata.name, o.spec.template.metadata.labels, o.spec.template.spec
            elif o.kind == "Pod":
                yield o.metadata.name, o.metadata.labels, o.spec

    def containers(self) -> Iterator[tuple[str, Any]]:
        for name, _, spec in self.pods():
            for container in [*(spec.initContainers or ()), *spec.containers]:
                yield f"{name}/{container.name}", container


def container(spec: Any, name: str) -> Any:
    (found,) = (c for c in [*(spec.initContainers or ()), *spec.containers] if c.name == name)
    return found


def environment(c: Any) -> dict[str, str]:
    """Variables with a value of their own (not from a Secret or field)."""
    return {e.name: e.value for e in c.env or () if e.valueFrom is None}
