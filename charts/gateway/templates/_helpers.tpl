{{/* The name of the objects, unless a value gives another. */}}
{{- define "gateway.name" -}}
{{- .Values.name | default .Release.Name -}}
{{- end -}}

{{/* Labels that select the pods. Gateway objects select them by the label `istio`. */}}
{{- define "gateway.selector" -}}
{{- $name := include "gateway.name" . -}}
app: {{ include "istio.text" (.Values.labels.app | default $name) | quote }}
istio: {{ include "istio.text" (.Values.labels.istio | default (trimPrefix "istio-" $name)) | quote }}
{{- end -}}

{{/* Labels of every object and of the pods. */}}
{{- define "gateway.labels" -}}
app.kubernetes.io/name: {{ include "gateway.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
app.kubernetes.io/part-of: istio
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{ include "gateway.selector" . }}
{{- with include "istio.texts" (omit .Values.labels "app" "istio") }}
{{ . }}
{{- end }}
{{- end -}}

{{/* Name, namespace, labels and annotations of an object. Parameters: root, name, labels, annotations. */}}
{{- define "gateway.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "gateway.labels" .root | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .annotations }}
annotations:
  {{- include "istio.texts" . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "gateway.account" -}}
{{- $usual := ternary (include "gateway.name" .) "default" .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default $usual -}}
{{- end -}}

{{/* The ports of the Service. */}}
{{- define "gateway.ports" -}}
{{- if .Values.networkGateway -}}
{{- $ports := list -}}
{{- range $name := list "status-port" "tls" "tls-istiod" "tls-webhook" -}}
{{- $port := get $.Values.networkGatewayPorts $name -}}
{{- $ports = append $ports (merge (dict "name" $name) $port (dict "protocol" "TCP")) -}}
{{- end -}}
{{ toYaml $ports }}
{{- else -}}
{{- if not .Values.service.ports -}}
{{- fail "chart gateway: service.ports is empty; without networkGateway, list the ports" -}}
{{- end -}}
{{ toYaml .Values.service.ports }}
{{- end -}}
{{- end -}}
