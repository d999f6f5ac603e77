{{/* True if the chart installs the injector's webhooks. */}}
{{- define "istiod.hasInjectors" -}}
{{- if and (not .Values.global.operatorManageWebhooks) (include "istiod.inCluster" .) }}true{{ end -}}
{{- end -}}

{{/* The webhooks that inject pods by labels of the namespace or the pod: those of the revision, or of a tag.
Parameters: root, tag (empty for the revision). */}}
{{- define "istiod.injector" -}}
{{- $root := .root -}}
{{- $outside := ternary "" (printf "-%s" $root.Release.Namespace) (eq $root.Release.Namespace "istio-system") -}}
{{- $name := printf "istio-sidecar-injector%s" (include "istiod.suffix" $root) -}}
{{- $label := $root.Values.revision | default "default" -}}
{{- $isDefault := not $root.Values.revision -}}
{{- with .tag -}}
{{- $name = printf "istio-revision-tag-%s" . -}}
{{- $label = . -}}
{{- $isDefault = eq . "default" -}}
{{- end -}}
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata:
  name: {{ $name }}{{ $outside }}
  labels:
    {{- with .tag }}
    istio.io/tag: {{ . | quote }}
    {{- end }}
    {{- include "istiod.revisionLabels" $root | fromYaml | merge (dict "app" "sidecar-injector") | toYaml | nindent 4 }}
  {{- with $root.Values.sidecarInjectorWebhookAnnotations }}
  annotations:
    {{- include "istio.texts" . | nindent 4 }}
  {{- end }}
webhooks:
{{- $absent := "operator: DoesNotExist" }}
{{- $wanted := "{key: sidecar.istio.io/inject, operator: NotIn, values: [\"false\"]}" }}
- name: rev.namespace.sidecar-injector.istio.io
  {{- include "istiod.injection" $root | nindent 2 }}
  namespaceSelector:
    matchExpressions:
    - {key: istio.io/rev, operator: In, values: [{{ $label | quote }}]}
    - {key: istio-injection, {{ $absent }}}
  objectSelector:
    matchExpressions:
    - {{ $wanted }}
- name: rev.object.sidecar-injector.istio.io
  {{- include "istiod.injection" $root | nindent 2 }}
  namespaceSelector:
    matchExpressions:
    - {key: istio.io/rev, {{ $absent }}}
    - {key: istio-injection, {{ $absent }}}
  objectSelector:
    matchExpressions:
    - {{ $wanted }}
    - {key: istio.io/rev, operator: In, values: [{{ $label | quote }}]}
{{- if $isDefault }}
- name: namespace.sidecar-injector.istio.io
  {{- include "istiod.injection" $root | nindent 2 }}
  namespaceSelector:
    matchExpressions:
    - {key: istio-injection, operator: In, values: [enabled]}
  objectSelector:
    matchExpressions:
    - {{ $wanted }}
- name: object.sidecar-injector.istio.io
  {{- include "istiod.injection" $root | nindent 2 }}
  namespaceSelector:
    matchExpressions:
    - {key: istio-injection, {{ $absent }}}
    - {key: istio.io/rev, {{ $absent }}}
  objectSelector:
    matchExpressions:
    - {key: sidecar.istio.io/inject, operator: In, values: ["true"]}
    - {key: istio.io/rev, {{ $absent }}}
{{- if $root.Values.sidecarInjectorWebhook.enableNamespacesByDefault }}
- name: auto.sidecar-injector.istio.io
  {{- include "istiod.injection" $root | nindent 2 }}
  namespaceSelector:
    matchExpressions:
    - {key: istio-injection, {{ $absent }}}
    - {key: istio.io/rev, {{ $absent }}}
    - key: kubernetes.io/metadata.name
      operator: NotIn
      values: [kube-system, kube-public, kube-node-lease, local-path-storage]
  objectSelector:
    matchExpressions:
    - {key: sidecar.istio.io/inject, {{ $absent }}}
    - {key: istio.io/rev, {{ $absent }}}
{{- end }}
{{- end }}
{{- end -}}
