{{/*
Merges the values below `pilot` into the top level. Every template begins with it, as Helm chooses the order
of templates.
*/}}
{{- define "istiod.values" -}}
{{- $_ := mustMergeOverwrite .Values (.Values.pilot | default dict) -}}
{{- range list .Values.profile .Values.global.profile .Values.compatibilityVersion -}}
{{- if . -}}
{{- fail (printf "profile and compatibilityVersion are not supported, but %q was requested" .) -}}
{{- end -}}
{{- end -}}
{{- if (.Values.istiodRemote).enabled -}}
{{- fail "istiodRemote.enabled is not supported: this chart always installs a control plane" -}}
{{- end -}}
{{- end -}}

{{/* -REVISION, or an empty string. */}}
{{- define "istiod.suffix" -}}
{{- with .Values.revision }}-{{ . }}{{ end -}}
{{- end -}}

{{- define "istiod.inNamespace" -}}
{{- if has .Values.global.resourceScope (list "all" "namespace") }}true{{ end -}}
{{- end -}}

{{- define "istiod.inCluster" -}}
{{- if has .Values.global.resourceScope (list "all" "cluster") }}true{{ end -}}
{{- end -}}

{{/* Labels of every object. */}}
{{- define "istiod.common" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
app.kubernetes.io/part-of: istio
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- end -}}

{{/* Labels of objects without a revision: service accounts and roles. */}}
{{- define "istiod.labels" -}}
app: istiod
release: {{ .Release.Name }}
app.kubernetes.io/name: istiod
{{ include "istiod.common" . }}
{{- end -}}

{{/* Labels of the objects of a revision. */}}
{{- define "istiod.revisionLabels" -}}
{{ include "istiod.labels" . }}
istio.io/rev: {{ .Values.revision | default "default" | quote }}
operator.istio.io/component: Pilot
{{- end -}}

{{/* Labels of the reader role for other clusters. */}}
{{- define "istiod.readerLabels" -}}
app: istio-reader
release: {{ .Release.Name }}
app.kubernetes.io/name: istio-reader
{{ include "istiod.common" . }}
{{- end -}}

{{/* The selector of the Service. The default revision selects only its own pods, so that a canary gets no traffic. */}}
{{- define "istiod.selector" -}}
app: istiod
{{- if .Values.revision }}
istio.io/rev: {{ .Values.revision | quote }}
{{- else }}
istio: pilot
{{- end }}
{{- end -}}

{{- define "istiod.image" -}}
{{- if contains "/" .Values.image -}}
{{ .Values.image }}
{{- else -}}
{{- $variant := .Values.variant | default .Values.global.variant -}}
{{ .Values.hub | default .Values.global.hub }}/{{ .Values.image }}:{{ .Values.tag | default .Values.global.tag }}{{ with $variant }}-{{ . }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "istiod.ports" -}}
- name: grpc-xds
  port: 15010
  protocol: TCP
- name: https-dns
  port: 15012
  protocol: TCP
- name: https-webhook
  port: 443
  targetPort: 15017
  protocol: TCP
- name: http-monitoring
  port: 15014
  protocol: TCP
{{- end -}}

{{/* The API group of ServiceExport and ServiceImport. */}}
{{- define "istiod.mcsGroup" -}}
{{ .Values.env.MCS_API_GROUP | default "multicluster.x-k8s.io" }}
{{- end -}}

{{/* The ConfigMap with the root certificate in every namespace. */}}
{{- define "istiod.rootName" -}}
{{ .Values.env.PILOT_CA_CERT_CONFIGMAP | default .Values.global.trustBundleName | default "istio-ca-root-cert" }}
{{- end -}}

{{/* The ConfigMap with revoked certificates in every namespace. */}}
{{- define "istiod.revokedName" -}}
{{ .Values.env.PILOT_CRL_CONFIGMAP | default .Values.crlConfigMapName | default "istio-ca-crl" }}
{{- end -}}

{{/* True if a Kubernetes signer signs certificates of workloads or of istiod. */}}
{{- define "istiod.signsByKubernetes" -}}
{{- if or .Values.env.EXTERNAL_CA (hasPrefix "k8s.io/" .Values.global.pilotCertProvider) }}true{{ end -}}
{{- end -}}

{{/* MeshConfig: settings that follow from other values, with meshConfig merged over them. */}}
{{- define "istiod.mesh" -}}
{{- $name := printf "istiod%s" (include "istiod.suffix" .) -}}
{{- $proxies := dict "discoveryAddress" (printf "%s.%s.svc:15012" $name .Release.Namespace) -}}
{{- with .Values.global.meshID -}}
{{- $_ := set $proxies "meshId" . -}}
{{- end -}}
{{- $tracer := .Values.global.proxy.tracer -}}
{{- if and $tracer (ne $tracer "none") -}}
{{- $zipkin := dict "address" (printf "zipkin.%s:9411" .Values.global.istioNamespace) -}}
{{- $usual := dict "zipkin" $zipkin "datadog" (dict "address" "$(HOST_IP):8126") -}}
{{- $given := get .Values.global.tracer $tracer | default dict -}}
{{- $_ := set $proxies "tracing" (dict $tracer (merge (dict) $given (get $usual $tracer | default dict))) -}}
{{- end -}}
{{- $mesh := dict "trustDomain" "cluster.local" "rootNamespace" .Values.global.istioNamespace "defaultConfig" $proxies -}}
{{- $telemetry := .Values.telemetry -}}
{{- if and $telemetry.enabled $telemetry.v2.enabled $telemetry.v2.prometheus.enabled (not .Values.meshConfig.defaultProviders) -}}
{{- $_ := set $mesh "defaultProviders" (dict "metrics" (list "prometheus")) -}}
{{- end -}}
{{ mustMergeOverwrite $mesh .Values.meshConfig | toYaml }}
{{- end -}}

{{/* The values that injection templates read, as JSON: what Istio's chart passes, at the same places. */}}
{{- define "istiod.injectionValues" -}}
{{- $pilot := dict "cni" .Values.cni "env" .Values.env "crlConfigMapName" .Values.crlConfigMapName -}}
{{- dict
  "global" .Values.global
  "gateways" .Values.gateways
  "pilot" $pilot
  "revision" .Values.revision
  "sidecarInjectorWebhook" .Values.sidecarInjectorWebhook
  | mustToPrettyJson -}}
{{- end -}}

{{/* The common part of the injector's webhooks. istiod adds the caBundle. */}}
{{- define "istiod.injection" -}}
clientConfig:
  service:
    name: istiod{{ include "istiod.suffix" . }}
    namespace: {{ .Release.Namespace }}
    path: /inject
    port: 443
rules:
- operations: [CREATE]
  apiGroups: [""]
  apiVersions: [v1]
  resources: [pods]
failurePolicy: Fail
reinvocationPolicy: {{ .Values.sidecarInjectorWebhook.reinvocationPolicy }}
sideEffects: None
admissionReviewVersions: [v1]
{{- end -}}
