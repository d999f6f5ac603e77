{{/* This file is the same in the charts base and istiod. */}}
{{/* The failurePolicy of a validation webhook; none in an upgrade, as istiod may have raised it. */}}
{{- define "istio.validationPolicy" -}}
{{- if .Values.base.validationCABundle -}}
Fail
{{- else if .Values.base.validationFailurePolicy -}}
{{ .Values.base.validationFailurePolicy }}
{{- else if not .Release.IsUpgrade -}}
Ignore
{{- end -}}
{{- end -}}

{{/*
Refusals of objects and fields outside the stable channel of Istio's API. Parity
(manifests/charts/istio-control/istio-discovery/templates/validatingadmissionpolicy.yaml).
*/}}
{{- define "istio.stablePolicy" -}}
failurePolicy: Fail
variables:
- name: kind
  expression: object.kind
- name: sources
  expression: >-
    variables.kind == 'AuthorizationPolicy'
    ? object.?spec.rules.orValue([]).map(rule, rule.?from.orValue([]).map(from, from.?source.orValue({})))
    : []
validations:
- expression: "!(variables.kind in ['EnvoyFilter', 'ProxyConfig', 'WasmPlugin'])"
  messageExpression: variables.kind + ' is not in the stable channel'
- expression: >-
    variables.kind != 'Telemetry'
    || !object.?spec.tracing.orValue([]).exists(tracing, has(tracing.useRequestIdForTraceSampling))
  message: spec.tracing[].useRequestIdForTraceSampling is not in the stable channel
- expression: >-
    variables.kind != 'Telemetry'
    || !object.?spec.metrics.orValue([]).exists(metrics, has(metrics.reportingInterval))
  message: spec.metrics[].reportingInterval is not in the stable channel
- expression: >-
    variables.kind != 'Telemetry'
    || !object.?spec.accessLogging.orValue([]).exists(logging, has(logging.filter))
  message: spec.accessLogging[].filter is not in the stable channel
- expression: >-
    !variables.sources.exists(sources, sources.exists(source,
    has(source.trustDomains) || has(source.notTrustDomains)))
  message: spec.rules[].from[].source.trustDomains and notTrustDomains are not in the stable channel
matchConstraints:
  resourceRules:
  - operations: [CREATE, UPDATE]
    apiGroups: [security.istio.io, networking.istio.io, telemetry.istio.io, extensions.istio.io]
    apiVersions: ["*"]
    resources: ["*"]
{{- end -}}
