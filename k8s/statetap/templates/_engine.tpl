{{/* The pods of an engine: of a StatefulSet, or on several hosts leader and further hosts (`member`) of a LeaderWorkerSet's group. */}}

{{- define "statetap.engine.severalHosts" -}}
{{- if gt (int .Values.engine.hosts) 1 }}true{{ end -}}
{{- end }}

{{- /* StatefulSet and LeaderWorkerSet have names of their own: the latter makes a StatefulSet of its name, which must not meet the former */}}
{{- define "statetap.engine.set" -}}
{{ include "statetap.fullname" . }}-engine{{ if include "statetap.engine.severalHosts" . }}s{{ end }}
{{- end }}

{{- /* Selects all pods of engines over several hosts. */}}
{{- define "statetap.engine.hosts" -}}
matchLabels:
  {{- include "statetap.selector" . | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [engine, engine-host]}
{{- end }}

{{- /* (root member): what is written to an emptyDir in memory counts against the container that wrote it; the engine writes tap and shm,
       a further host has no tap */}}
{{- define "statetap.engine.memory" -}}
{{- $e := .root.Values.engine -}}
{{- if lt (include "statetap.mib" $e.memory | int64) (include "statetap.mib" $e.ring | int64) -}}
{{- fail (printf "engine.memory (%s) holds the ring: it must be above engine.ring (%s)" $e.memory $e.ring) -}}
{{- end -}}
{{- $tap := ternary 0 (include "statetap.mib" $e.tap | int64) .member -}}
{{- printf "%dMi" (add (include "statetap.mib" $e.memory | int64) $tap (include "statetap.mib" $e.shm | int64)) -}}
{{- end }}

{{- /* (root member): an item of containers */}}
{{- define "statetap.engine.container" -}}
{{- $engine := .root.Values.engine }}
{{- $workers := .root.Values.workers }}
{{- $tiny := eq .root.Values.model.name "tiny" }}
{{- $several := include "statetap.engine.severalHosts" .root }}
{{- /* A further host has no READY.json; SGLang answers there when the ranks have loaded. */}}
{{- $ready := ternary "statetap.engine.alive" "statetap.engine.ready" .member -}}
- name: engine
  {{- if not .member }}
  restartPolicy: Always
  {{- end }}
  image: {{ include "statetap.image" (dict "root" .root "image" .root.Values.images.engine) }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  command: [python3, -m, statetap.engine]
  args:
    - --model
    - {{ ternary "/models/tiny" .root.Values.model.name $tiny | quote }}
    - --tap
    - {{ ternary "/tmp/tap" "/tap" .member }}
    - --host
    # Only the workers of this pod speak to it; a scrape of its metrics needs the pod's address.
    - {{ ternary "0.0.0.0" "127.0.0.1" (and .root.Values.monitor.enabled .root.Values.monitor.engines (not .member)) }}
    - --port
    - "30000"
    - --tp
    - {{ mul (max 1 (int $engine.gpus)) (int $engine.hosts) | quote }}
    {{- if $several }}
    - --nnodes
    - {{ $engine.hosts | quote }}
    - --node-rank
    - {{ ternary "$(LWS_WORKER_INDEX)" "0" .member | quote }}
    - --dist-init-addr
    - $(LWS_LEADER_ADDRESS):25000
    {{- end }}
    - --engine-id
    - $(POD_NAME)
    - --boundaries
    - {{ .root.Values.model.boundaries | quote }}
    - --final
    - {{ .root.Values.model.final | quote }}
    - --start-timeout
    - {{ $engine.startTimeoutSeconds | quote }}
    - --grace
    {{- /* A further host serves until node 0 has drained and stopped: that is 15 s less. */}}
    - {{ ternary (sub (include "statetap.engine.grace" .root | int) 10) (int $engine.stopSeconds) .member | quote }}
    {{- if .root.Values.model.trustRemoteCode }}
    - --trust-remote-code
    {{- end }}
    {{- if $engine.cpu }}
    - --cpu
    {{- end }}
    {{- with $engine.sglang }}
    - --
    {{- range . }}
    - {{ . | quote }}
    {{- end }}
    {{- end }}
  env:
    - name: POD_NAME
      valueFrom:
        fieldRef:
          fieldPath: metadata.name
    - name: HOME
      value: /cache
    - name: HF_HOME
      value: /models/hf
    - name: PYTHONUNBUFFERED
      value: "1"
    - name: STATETAP_ENGINE_RING_BYTES
      value: {{ mul (include "statetap.mib" $engine.ring | int64) 1048576 | quote }}
    {{- include "statetap.hubToken" .root | nindent 4 }}
    {{- include "statetap.env" $engine.env | nindent 4 }}
  {{- if not .member }}
  ports:
    - name: engine
      containerPort: 30000
  {{- end }}
  {{- include "statetap.container" .root | nindent 2 }}
  resources:
    requests:
      cpu: {{ $engine.cpus | toString | quote }}
      memory: {{ include "statetap.engine.memory" . }}
    limits:
      memory: {{ include "statetap.engine.memory" . }}
      {{- if not $engine.cpu }}
      {{ $engine.gpuResource }}: {{ $engine.gpus }}
      {{- end }}
  # Ready is what the workers wait for: the self-check passed (READY.json), and the server answers. A minute above the engine's
  # own budget, so that it says itself why it was too slow. /health takes a second at least, and waits for a running prefill.
  startupProbe:
    exec:
      command: [python3, -c, {{ include $ready "9" | quote }}]
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: {{ add (div (add (int $engine.startTimeoutSeconds) 9) 10) 6 }}
  readinessProbe:
    exec:
      command: [python3, -c, {{ include $ready "9" | quote }}]
    periodSeconds: 15
    timeoutSeconds: 10
    failureThreshold: 4
  # SGLang ends a scheduler that hangs itself, and the launcher ends with it; this is for what nobody sees.
  livenessProbe:
    exec:
      command: [python3, -c, {{ include "statetap.engine.alive" "24" | quote }}]
    periodSeconds: 30
    timeoutSeconds: 25
    failureThreshold: {{ max 3 (add (div (int $workers.requestTimeoutSeconds) 30) 1) }}
  volumeMounts:
    {{- if not .member }}
    - name: tap
      mountPath: /tap
    {{- end }}
    - name: shm
      mountPath: /dev/shm
    - name: models
      mountPath: /models
    - name: cache
      mountPath: /cache
    - name: tmp
      mountPath: /tmp
{{- end }}

{{- /* (root member): the pod's spec */}}
{{- define "statetap.engine.pod" -}}
{{- $engine := .root.Values.engine }}
{{- $workers := .root.Values.workers }}
{{- include "statetap.pod" (dict "root" .root "place" $engine) }}
{{- if not .member }}
{{- include "statetap.samples.account" .root | nindent 0 }}
{{- end }}
{{- with $engine.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
terminationGracePeriodSeconds: {{ include "statetap.engine.grace" .root }}
{{- if .member }}
containers:
  # Nobody's sidecar: node 0 ends first, and this one with it.
  {{- include "statetap.engine.container" . | nindent 2 }}
{{- else }}
initContainers:
  {{- if eq .root.Values.model.name "tiny" }}
  - name: tiny-model
    image: {{ include "statetap.image" (dict "root" .root "image" .root.Values.images.engine) }}
    imagePullPolicy: {{ .root.Values.images.pullPolicy }}
    command: [python3, -m, statetap.engine.tiny, /models/tiny]
    env:
      - name: HOME
        value: /cache
    {{- include "statetap.container" .root | nindent 4 }}
    {{- include "statetap.resources" (dict "cpus" 0.5 "memory" "2Gi") | nindent 4 }}
    volumeMounts:
      - name: models
        mountPath: /models
      - name: cache
        mountPath: /cache
      - name: tmp
        mountPath: /tmp
  {{- end }}
  # A native sidecar: the workers start when the engine is READY, and at the end they drain before it stops.
  {{- include "statetap.engine.container" . | nindent 2 }}
containers:
  {{- range $i := until (int $workers.perEngine) }}
  # No liveness: a worker outlives an outage of Redis or engine by itself, and one that ended is started again.
  - name: worker-{{ $i }}
    image: {{ include "statetap.image" (dict "root" $.root "image" $.root.Values.images.control) }}
    imagePullPolicy: {{ $.root.Values.images.pullPolicy }}
    command: [python3, -m, statetap.worker]
    env:
      {{- include "statetap.redis.env" $.root | trim | nindent 6 }}
      - name: STATETAP_STORE
        value: /store
      - name: STATETAP_TAP
        value: /tap
      - name: STATETAP_ENGINE_URL
        value: http://127.0.0.1:30000
      # 80 % of the tap: the rest is for what is being swept.
      - name: STATETAP_TAP_BYTES
        value: {{ div (mul (include "statetap.mib" $engine.tap | int64) 1048576 8) 10 | quote }}
      - name: STATETAP_WORKERS_PER_ENGINE
        value: {{ $workers.perEngine | quote }}
      - name: STATETAP_WINDOW
        value: {{ $workers.window | quote }}
      - name: STATETAP_WRITE_THREADS
        value: {{ $workers.writeThreads | quote }}
      - name: STATETAP_REQUEST_TIMEOUT_S
        value: {{ $workers.requestTimeoutSeconds | quote }}
      - name: STATETAP_READY_TIMEOUT_S
        value: {{ $engine.startTimeoutSeconds | quote }}
      - name: STATETAP_DRAIN_S
        value: {{ $workers.drainSeconds | quote }}
      - name: STATETAP_LOG_LEVEL
        value: {{ $.root.Values.logLevel }}
      - name: HOME
        value: /tmp
      - name: PYTHONUNBUFFERED
        value: "1"
      {{- include "statetap.samples.env" $.root | nindent 6 }}
      {{- include "statetap.env" $workers.env | nindent 6 }}
    {{- include "statetap.container" $.root | nindent 4 }}
    {{- include "statetap.resources" $workers | nindent 4 }}
    {{- include "statetap.registered" $.root | nindent 4 }}
    volumeMounts:
      - name: store
        mountPath: /store
      - name: tap
        mountPath: /tap
      - name: shm
        mountPath: /dev/shm
      - name: tmp
        mountPath: /tmp
  {{- end }}
{{- end }}
volumes:
  {{- if not .member }}
  {{- include "statetap.volume" (dict "root" .root "name" "store" "volume" .root.Values.store) | nindent 2 }}
  {{- end }}
  {{- include "statetap.volume" (dict "root" .root "name" "models" "volume" .root.Values.modelCache) | nindent 2 }}
  {{- if not .member }}
  - name: tap
    emptyDir:
      medium: Memory
      sizeLimit: {{ $engine.tap }}
  {{- end }}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ $engine.shm }}
  - name: cache
    emptyDir:
      sizeLimit: {{ $engine.cacheSize }}
  - name: tmp
    emptyDir:
      sizeLimit: {{ $engine.cacheSize }}
{{- end }}
