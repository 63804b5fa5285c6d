{{/* Names, labels and images. */}}

{{- define "statetap.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- /* 40: names of StatefulSets are in labels, with a hash, and those end at 63 */ -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" | trimSuffix "." -}}
{{- end }}

{{- define "statetap.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* (root component) */}}
{{- define "statetap.labels" -}}
{{ include "statetap.selector" .root }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* (root image): registry/repository:tag, or @digest */}}
{{- define "statetap.image" -}}
{{- $at := ternary (printf "@%s" .image.digest) (printf ":%s" (default .root.Chart.AppVersion .image.tag)) (ne .image.digest "") -}}
{{- printf "%s%s%s" (ternary (printf "%s/" .root.Values.images.registry) "" (ne .root.Values.images.registry "")) .image.repository $at -}}
{{- end }}

{{/* Sizes. The schema lets Mi, Gi and Ti pass only. */}}

{{- define "statetap.mib" -}}
{{- $n := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "Ti" . }}{{ mul $n 1048576 }}{{ else if hasSuffix "Gi" . }}{{ mul $n 1024 }}{{ else }}{{ $n }}{{ end -}}
{{- end }}

{{- /* Workers drain and commit, then the engine stops (sidecars end last), then what is left of a margin. */}}
{{- define "statetap.engine.grace" -}}
{{- add (int .Values.workers.drainSeconds) (int .Values.workers.commitSeconds) (int .Values.engine.stopSeconds) 15 -}}
{{- end }}

{{/* Pods. */}}

{{- /* (root place): what every pod has; `place` is the component's section of the values */}}
{{- define "statetap.pod" -}}
automountServiceAccountToken: false
# A Service `statetap` would otherwise set STATETAP_PORT=tcp://… in every pod of the namespace, and that is a setting.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # A store of millions of files: changing the owner of each at every start takes hours.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with merge (dict) .place.nodeSelector .root.Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat .root.Values.tolerations .place.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with default .root.Values.priorityClassName .place.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- /* (root component place): labels and annotations of a pod template */}}
{{- define "statetap.podMetadata" -}}
labels:
  {{- include "statetap.labels" (dict "root" .root "component" .component) | nindent 2 }}
  {{- with .place.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .place.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "statetap.container" -}}
# The end of the log stands in the pod's status when a container ends with an error.
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- /* (cpus memory): memory is reserved in full, CPUs are not limited */}}
{{- define "statetap.resources" -}}
resources:
  requests:
    cpu: {{ .cpus | toString | quote }}
    memory: {{ .memory }}
  limits:
    memory: {{ .memory }}
{{- end }}

{{- /* (env): further variables */}}
{{- define "statetap.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "statetap.hubToken" -}}
{{- with .Values.model.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end }}

{{- define "statetap.redis.password" -}}
{{- with .Values.redis.passwordSecret }}
{{- if .name }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end }}

{{- /* STATETAP_REDIS_URL, and REDIS_PASSWORD where it is a part of it */}}
{{- define "statetap.redis.env" -}}
{{- $redis := .Values.redis -}}
{{- if $redis.own }}
{{- include "statetap.redis.password" . }}
- name: STATETAP_REDIS_URL
  value: redis://{{ if $redis.passwordSecret.name }}:$(REDIS_PASSWORD)@{{ end }}{{ include "statetap.fullname" . }}-redis:6379/0
{{- else if $redis.external.urlSecret.name }}
- name: STATETAP_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ $redis.external.urlSecret.name }}
      key: {{ $redis.external.urlSecret.key }}
{{- else }}
- name: STATETAP_REDIS_URL
  value: {{ $redis.external.url | quote }}
{{- end }}
{{- end }}

{{- /* How coordinator and workers reach the bucket of the samples */}}
{{- define "statetap.samples.env" -}}
{{- with .Values.store.samples }}
{{- if .endpoint }}
- name: AWS_ENDPOINT_URL_S3
  value: {{ .endpoint | quote }}
{{- end }}
{{- if .region }}
- name: AWS_DEFAULT_REGION
  value: {{ .region | quote }}
{{- end }}
{{- $secret := .secret }}
{{- if $secret }}
{{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
- name: {{ . }}
  valueFrom:
    secretKeyRef:
      name: {{ $secret }}
      key: {{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "statetap.samples.account" -}}
{{- with .Values.store.samples.serviceAccount }}
# The cloud's own token is mounted by its webhook; the cluster's is not (above).
serviceAccountName: {{ . }}
{{- end }}
{{- end }}

{{- /* (root name volume): the store or the model cache */}}
{{- define "statetap.volume" -}}
- name: {{ .name }}
  {{- if eq .volume.kind "hostPath" }}
  hostPath:
    path: {{ .volume.path }}
    type: Directory
  {{- else if eq .volume.kind "emptyDir" }}
  emptyDir:
    sizeLimit: {{ .volume.size }}
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ ternary .volume.claim (printf "%s-%s" (include "statetap.fullname" .root) .name) (eq .volume.kind "existingClaim") }}
  {{- end }}
{{- end }}

{{/* What the probes of an engine run; the argument is the time it has, in seconds. */}}

{{- define "statetap.engine.alive" -}}
import urllib.request; urllib.request.urlopen("http://127.0.0.1:30000/health", timeout={{ . }})
{{- end }}

{{- define "statetap.engine.ready" -}}
import os; os.stat("/tap/READY.json"); {{ include "statetap.engine.alive" . }}
{{- end }}

{{- define "statetap.redis.probe" -}}
{{ if .Values.redis.passwordSecret.name }}REDISCLI_AUTH="$REDIS_PASSWORD" {{ end }}redis-cli ping | grep -qx PONG
{{- end }}

{{- /* (list of peers): entries of a policy's `from` */}}
{{- define "statetap.peers" -}}
{{- range . }}
{{- if .podSelector }}
- podSelector:
    matchLabels:
      {{- toYaml .podSelector | nindent 6 }}
{{- else }}
- podSelector: {}
{{- end }}
  {{- with .namespaceSelector }}
  namespaceSelector:
    matchLabels:
      {{- toYaml . | nindent 6 }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* Ready is who is registered in Redis: a rollout waits for it, and nothing else hangs on it. */}}
{{- define "statetap.registered" -}}
readinessProbe:
  exec:
    command: [python3, -m, statetap.alive]
  periodSeconds: 30
  timeoutSeconds: 10
{{- end }}
