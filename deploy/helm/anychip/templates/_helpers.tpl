{{- define "anychip.name" -}}
{{- .Chart.Name -}}
{{- end -}}

{{- define "anychip.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "anychip.selector" -}}
app.kubernetes.io/name: {{ include "anychip.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "anychip.labels" -}}
{{ include "anychip.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
anychip/flavour: {{ .Values.flavour }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "anychip.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "anychip.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Both are asked for again by an upgrade that forgets the values of the release: it stops before it touches a pod. */}}
{{- define "anychip.image" -}}
{{- if not .Values.flavour -}}
{{- fail "flavour is empty: add -f values-cuda.yaml (or -rocm, -ascend, -mlu, -dcu, -cpu); when you upgrade, add --reset-then-reuse-values" -}}
{{- end -}}
{{- if not .Values.image.repository -}}
{{- fail "image.repository is empty: add --set image.repository=REGISTRY/anychip; when you upgrade, add --reset-then-reuse-values" -}}
{{- end -}}
{{- $tag := default (printf "%s-%s" .Chart.AppVersion .Values.flavour) .Values.image.tag -}}
{{- printf "%s:%s" .Values.image.repository $tag -}}
{{- end -}}

{{- define "anychip.claim" -}}
{{- if .Values.cache.existingClaim -}}
{{- .Values.cache.existingClaim -}}
{{- else if .Values.cache.persistent -}}
{{- printf "%s-cache" (include "anychip.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* All that a shutdown may take, one after the other. */}}
{{- define "anychip.terminationSeconds" -}}
{{- with .Values.shutdown -}}
{{- add (int .preStopSeconds) (int .graceSeconds) (int .drainSeconds) (int .slackSeconds) -}}
{{- end -}}
{{- end -}}

{{/* Fewest pods that there are. */}}
{{- define "anychip.replicas" -}}
{{- if eq .Values.autoscaling.mode "none" -}}{{ int .Values.replicas }}{{- else -}}{{ int .Values.autoscaling.minReplicas }}{{- end -}}
{{- end -}}

{{/* How an update goes: one pod less for a moment where others serve on, else one more, which needs a spare card. */}}
{{- define "anychip.rollingUpdate" -}}
{{- if .Values.rollingUpdate -}}
{{- toYaml .Values.rollingUpdate -}}
{{- else if and .Values.accelerator.resource (gt (int (include "anychip.replicas" .)) 1) -}}
maxSurge: 0
maxUnavailable: 1
{{- else -}}
maxSurge: 1
maxUnavailable: 0
{{- end -}}
{{- end -}}

{{/* True where an update takes away the only pod before there is another. */}}
{{- define "anychip.updatePauses" -}}
{{- $update := fromYaml (include "anychip.rollingUpdate" .) -}}
{{- if and (eq (toString $update.maxSurge) "0") (le (int (include "anychip.replicas" .)) 1) -}}true{{- end -}}
{{- end -}}

{{/* Whether the service speaks TLS: "true" or empty. */}}
{{- define "anychip.tls" -}}
{{- if or .Values.access.tlsSecret .Values.settings.tls_cert }}true{{ end -}}
{{- end -}}

{{/* Whether a caller needs a key: "true" or empty. */}}
{{- define "anychip.keys" -}}
{{- if or .Values.access.keysSecret .Values.settings.api_keys_file }}true{{ end -}}
{{- end -}}

{{/* Whether a connection needs a certificate: "true" or empty. */}}
{{- define "anychip.mtls" -}}
{{- if or .Values.access.clientCertificates .Values.settings.tls_client_ca }}true{{ end -}}
{{- end -}}

{{/* Names by which the service is asked: its own in the cluster, and those that are given. */}}
{{- define "anychip.hosts" -}}
{{- $name := include "anychip.fullname" . -}}
{{- $below := printf "%s.%s" $name .Release.Namespace -}}
{{- join "," (compact (list $name $below (printf "%s.svc" $below) (printf "%s.svc.cluster.local" $below) (ternary .Values.ingress.host "" .Values.ingress.enabled) .Values.settings.allowed_hosts)) -}}
{{- end -}}

{{/* How a probe asks; a list of the root and "ready" or "live". The kubelet has no certificate: with mTLS the container asks itself. */}}
{{- define "anychip.probe" -}}
{{- $root := index . 0 -}}
{{- if include "anychip.mtls" $root -}}
exec: {command: [/opt/anychip/libexec/healthcheck.py, {{ index . 1 }}]}
{{- else -}}
httpGet: {path: /v2/health/{{ index . 1 }}, port: http, scheme: {{ ternary "HTTPS" "HTTP" (eq (include "anychip.tls" $root) "true") }}}
{{- end -}}
{{- end -}}
