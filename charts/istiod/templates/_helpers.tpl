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

{{/* True if a control plane runs in this cluster. */}}
{{- define "istiod.isLocal" -}}
{{- if or (not .Values.istiodRemote.enabled) .Values.istiodRemote.enabledLocalInjectorIstiod }}true{{ end -}}
{{- end -}}

{{/* True if a control plane reads its configuration from this cluster. */}}
{{- define "istiod.isConfigCluster" -}}
{{- if or (include "istiod.isLocal" .) .Values.global.configCluster }}true{{ end -}}
{{- end -}}

{{/* The name of the Service, in this cluster, of a control plane in another one. */}}
{{- define "istiod.remoteName" -}}
istiod{{ include "istiod.suffix" . }}{{ if .Values.istiodRemote.enabledLocalInjectorIstiod }}-remote{{ end }}
{{- end -}}

{{/* IPv4 or IPv6 if the address of the control plane is an IP address. */}}
{{- define "istiod.remoteFamily" -}}
{{- if regexMatch "^[0-9]+(\\.[0-9]+){3}$" .Values.global.remotePilotAddress -}}
IPv4
{{- else if regexMatch "^[0-9a-fA-F:]*:[0-9a-fA-F:.]*$" .Values.global.remotePilotAddress -}}
IPv6
{{- end -}}
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
install.operator.istio.io/owning-resource: {{ .Values.ownerName | default "unknown" }}
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

{{/* The image. Values of a release of Istio's chart name Istio's images, which would run with the roles of this chart. */}}
{{- define "istiod.image" -}}
{{- $image := .Values.image -}}
{{- if not (contains "/" $image) -}}
{{- $tag := include "istio.text" (.Values.tag | default .Values.global.tag) -}}
{{- with .Values.variant | default .Values.global.variant -}}
{{- $tag = printf "%v-%s" $tag . -}}
{{- end -}}
{{- $image = printf "%s/%s:%s" (.Values.hub | default .Values.global.hub) ($image | default "pilot") $tag -}}
{{- end -}}
{{- if regexMatch "^((docker\\.io/)?istio|gcr\\.io/istio-release|registry\\.istio\\.io/release)/" $image -}}
{{- fail (printf "chart istiod: the image %q is that of Istio's own control plane; set image, hub or global.hub to that of this one" $image) -}}
{{- end -}}
{{ $image }}
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

{{/* The Service of the revision, or of a tag. Parameters: root, tag (empty for the revision). */}}
{{- define "istiod.service" -}}
{{- $values := .root.Values -}}
apiVersion: v1
kind: Service
metadata:
  {{- with .tag }}
  name: istiod-revision-tag-{{ . }}
  {{- else }}
  name: istiod{{ include "istiod.suffix" .root }}
  {{- end }}
  namespace: {{ .root.Release.Namespace }}
  {{- with $values.serviceAnnotations }}
  annotations:
    {{- include "istio.texts" . | nindent 4 }}
  {{- end }}
  labels:
    istio: pilot
    {{- with .tag }}
    istio.io/tag: {{ . | quote }}
    {{- end }}
    {{- include "istiod.revisionLabels" .root | nindent 4 }}
spec:
  ports:
    {{- include "istiod.ports" .root | nindent 4 }}
  selector:
    {{- include "istiod.selector" .root | nindent 4 }}
  {{- with $values.ipFamilyPolicy }}
  ipFamilyPolicy: {{ . }}
  {{- end }}
  {{- with $values.ipFamilies }}
  ipFamilies:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.trafficDistribution }}
  trafficDistribution: {{ . }}
  {{- end }}
{{- end -}}

{{/* The API group of ServiceExport and ServiceImport; `*` if it is not known here. */}}
{{- define "istiod.mcsGroup" -}}
{{- $group := include "istiod.variable" (list . "MCS_API_GROUP") -}}
{{ ternary "*" $group (eq $group "?") | default "multicluster.x-k8s.io" | quote }}
{{- end -}}

{{/* The ConfigMap with the root certificate in every namespace. */}}
{{- define "istiod.rootName" -}}
{{- $name := include "istiod.variable" (list . "PILOT_CA_CERT_CONFIGMAP") -}}
{{ ternary "" $name (eq $name "?") | default "istio-ca-root-cert" }}
{{- end -}}

{{/* The names of the ConfigMaps with the root certificate and with revoked certificates in every namespace, to which a
rule is limited; none if they are not known here. */}}
{{- define "istiod.trustNames" -}}
{{- $revoked := include "istiod.variable" (list . "PILOT_CRL_CONFIGMAP") -}}
{{- if not (has "?" (list $revoked (include "istiod.variable" (list . "PILOT_CA_CERT_CONFIGMAP")))) -}}
resourceNames: [{{ include "istiod.rootName" . }}, {{ $revoked | default "istio-ca-crl" }}]
{{- end -}}
{{- end -}}

{{/* True if a Kubernetes signer signs certificates of workloads or of istiod. */}}
{{- define "istiod.signsByKubernetes" -}}
{{- $provider := include "istiod.variable" (list . "PILOT_CERT_PROVIDER") -}}
{{- $isSigner := or (eq $provider "?") (hasPrefix "k8s.io/" $provider) -}}
{{- if or $isSigner (include "istiod.variable" (list . "EXTERNAL_CA")) }}true{{ end -}}
{{- end -}}

{{/* The Kubernetes signers whose requests istiod approves: those of values, and those that variables name. */}}
{{- define "istiod.signers" -}}
{{- $signers := .Values.global.certSigners | default list -}}
{{- $provider := include "istiod.variable" (list . "PILOT_CERT_PROVIDER") -}}
{{- if hasPrefix "k8s.io/" $provider -}}
{{- $signers = append $signers (trimPrefix "k8s.io/" $provider) -}}
{{- end -}}
{{- if include "istiod.variable" (list . "EXTERNAL_CA") -}}
{{- $signers = append $signers (include "istiod.variable" (list . "K8S_SIGNER")) -}}
{{- end -}}
{{ without $signers "" "?" | uniq | toYaml }}
{{- end -}}

{{/* The platform of the cluster, or an empty string. */}}
{{- define "istiod.platform" -}}
{{ .Values.global.platform | default .Values.platform | default "" }}
{{- end -}}

{{/* Environment variables with plain values: those that follow from other values, and `env`, which replaces them. */}}
{{- define "istiod.environment" -}}
{{- $namespace := .Values.trustedZtunnelNamespace | default .Release.Namespace -}}
{{- $environment := dict
  "CA_TRUSTED_NODE_ACCOUNTS" (printf "%s/%s" $namespace (.Values.trustedZtunnelName | default "ztunnel"))
  "CLUSTER_ID" (.Values.global.multiCluster.clusterName | default "Kubernetes")
  "KUBECONFIG" "/var/run/secrets/remote/config"
  "PILOT_CERT_PROVIDER" .Values.global.pilotCertProvider
  "PLATFORM" (include "istiod.platform" .)
  "REVISION" (.Values.revision | default "default")
  "TOKEN_AUDIENCES" .Values.global.sds.token.aud
-}}
{{- if not (kindIs "invalid" .Values.traceSampling) -}}
{{- $_ := set $environment "PILOT_TRACE_SAMPLING" .Values.traceSampling -}}
{{- end -}}
{{- if .Values.global.externalIstiod -}}
{{- $_ := set $environment "EXTERNAL_ISTIOD" true -}}
{{- end -}}
{{- with .Values.global.trustBundleName -}}
{{- $_ := set $environment "PILOT_CA_CERT_CONFIGMAP" . -}}
{{- end -}}
{{- with .Values.crlConfigMapName -}}
{{- $_ := set $environment "PILOT_CRL_CONFIGMAP" . -}}
{{- end -}}
{{- if .Values.global.istiod.enableAnalysis -}}
{{- $_ := set $environment "PILOT_ENABLE_ANALYSIS" true -}}
{{- end -}}
{{- if .Values.taint.enabled -}}
{{- $_ := set $environment "PILOT_ENABLE_NODE_UNTAINT_CONTROLLERS" true -}}
{{- $_ := set $environment "PILOT_NODE_UNTAINT_CONTROLLERS_TAINT_NAME" .Values.taint.name -}}
{{- end -}}
{{ mustMergeOverwrite $environment .Values.env | toYaml }}
{{- end -}}

{{/* The text of a variable of istiod; `?` if it is not known here. An entry of `envVarFrom` replaces `env`. Parameters:
root, name. */}}
{{- define "istiod.variable" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $value := get (include "istiod.environment" $root | fromYaml) $name -}}
{{- $text := ternary "" (include "istio.text" $value) (kindIs "invalid" $value) -}}
{{- range $root.Values.envVarFrom -}}
{{- if eq (toString .name) $name -}}
{{- $text = ternary "?" (toString (get . "value")) (hasKey . "valueFrom") -}}
{{- end -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{/* True if a boolean variable of istiod is on, in all spellings that istiod reads. One that is not known here is on.
Parameters: root, name, default. */}}
{{- define "istiod.isOn" -}}
{{- $text := include "istiod.variable" (list (index . 0) (index . 1)) -}}
{{- if has $text (list "?" "1" "t" "T" "TRUE" "true" "True") -}}
true
{{- else if and (index . 2) (not (has $text (list "0" "f" "F" "FALSE" "false" "False"))) -}}
true
{{- end -}}
{{- end -}}

{{/* MeshConfig: settings that follow from other values, with meshConfig merged over them. */}}
{{- define "istiod.mesh" -}}
{{- $name := printf "istiod%s" (include "istiod.suffix" .) -}}
{{- if and .Values.global.remotePilotAddress .Values.istiodRemote.enabled -}}
{{- $name = include "istiod.remoteName" . -}}
{{- end -}}
{{- $proxies := dict "discoveryAddress" (printf "%s.%s.svc:15012" $name .Release.Namespace) -}}
{{- with .Values.global.meshID -}}
{{- $_ := set $proxies "meshId" . -}}
{{- end -}}
{{- with .Values.global.proxy.variant | default .Values.global.variant -}}
{{- $_ := set $proxies "image" (dict "imageType" .) -}}
{{- end -}}
{{- $tracer := .Values.global.proxy.tracer -}}
{{- if and $tracer (ne $tracer "none") -}}
{{- $zipkin := dict "address" (printf "zipkin.%s:9411" .Values.global.istioNamespace) -}}
{{- $usual := dict "zipkin" $zipkin "datadog" (dict "address" "$(HOST_IP):8126") -}}
{{- $given := get .Values.global.tracer $tracer | default dict -}}
{{- $_ := set $proxies "tracing" (dict $tracer (merge (dict) $given (get $usual $tracer | default dict))) -}}
{{- end -}}
{{- $root := .Values.global.istioNamespace -}}
{{- $mesh := dict "trustDomain" "cluster.local" "rootNamespace" $root "defaultConfig" $proxies -}}
{{- $telemetry := .Values.telemetry -}}
{{- if and $telemetry.enabled $telemetry.v2.enabled (not .Values.meshConfig.defaultProviders) -}}
{{- $metrics := ternary (list "prometheus") list $telemetry.v2.prometheus.enabled -}}
{{- $providers := dict -}}
{{- if $telemetry.v2.stackdriver.enabled -}}
{{- $metrics = append $metrics "stackdriver" -}}
{{- $_ := set $providers "accessLogging" (list "stackdriver") -}}
{{- end -}}
{{- if $metrics -}}
{{- $_ := set $mesh "defaultProviders" (set $providers "metrics" $metrics) -}}
{{- end -}}
{{- end -}}
{{- $mesh = mustMergeOverwrite $mesh .Values.meshConfig -}}
{{- if and (eq $tracer "lightstep") (not (dig "defaultConfig" "tracing" "lightstep" "address" "" $mesh)) -}}
{{- fail "chart istiod: global.proxy.tracer is lightstep, which needs global.tracer.lightstep.address" -}}
{{- end -}}
{{ toYaml $mesh }}
{{- end -}}

{{/* The values that injection templates read, as JSON: what Istio's chart passes, at the same places. Templates know one
spelling of the variable that decides what pods mount. */}}
{{- define "istiod.injectionValues" -}}
{{- $bundles := "ENABLE_CLUSTER_TRUST_BUNDLE_API" -}}
{{- $environment := omit .Values.env $bundles -}}
{{- if include "istiod.isOn" (list . $bundles false) -}}
{{- $_ := set $environment $bundles true -}}
{{- end -}}
{{- $pilot := dict "cni" .Values.cni "env" $environment "crlConfigMapName" .Values.crlConfigMapName -}}
{{- $global := deepCopy .Values.global -}}
{{- /* Pods mount the ConfigMaps that istiod writes. */ -}}
{{- $revoked := include "istiod.variable" (list . "PILOT_CRL_CONFIGMAP") -}}
{{- if ne $revoked "?" -}}
{{- $_ := set $pilot "crlConfigMapName" $revoked -}}
{{- end -}}
{{- $roots := include "istiod.variable" (list . "PILOT_CA_CERT_CONFIGMAP") -}}
{{- if ne $roots "?" -}}
{{- $_ := set $global "trustBundleName" $roots -}}
{{- end -}}
{{- $_ := set $global "platform" (include "istiod.platform" .) -}}
{{- /* Image types apply to names without a hub only, so the default image is one, with its hub and tag. */ -}}
{{- $given := mustMergeOverwrite (deepCopy .GivenValues) (.GivenValues.pilot | default dict) -}}
{{- if not (hasKey (dig "global" "proxy" dict $given) "image") -}}
{{- $image := $global.proxy.image -}}
{{- $last := splitList "/" $image | last -}}
{{- $tag := splitList ":" $last | last -}}
{{- $name := trimSuffix (print ":" $tag) $last -}}
{{- $_ := set $global "hub" (trimSuffix (print "/" $last) $image) -}}
{{- $_ := set $global "tag" $tag -}}
{{- if eq $global.proxy_init.image $image -}}
{{- $_ := set $global.proxy_init "image" $name -}}
{{- end -}}
{{- $_ := set $global.proxy "image" $name -}}
{{- end -}}
{{- dict
  "global" $global
  "gateways" (pick .Values.gateways "securityContext" "seccompProfile")
  "pilot" $pilot
  "revision" .Values.revision
  "sidecarInjectorWebhook" .Values.sidecarInjectorWebhook
  | mustToPrettyJson -}}
{{- end -}}

{{/* The common part of the injector's webhooks. istiod adds a missing caBundle. */}}
{{- define "istiod.injection" -}}
clientConfig:
  {{- with .Values.istiodRemote.injectionURL }}
  url: {{ . | quote }}
  {{- else }}
  service:
    name: istiod{{ include "istiod.suffix" . }}
    namespace: {{ .Release.Namespace }}
    path: {{ .Values.istiodRemote.injectionPath | quote }}
    port: 443
  {{- end }}
  {{- with .Values.istiodRemote.injectionCABundle }}
  caBundle: {{ . | quote }}
  {{- end }}
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
