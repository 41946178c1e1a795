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

{{- define "anychip.image" -}}
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
