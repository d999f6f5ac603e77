use super::*;

#[track_caller]
fn good(file: Value) -> MeshConfig {
    parse(&file)
        .unwrap_or_else(|errors| panic!("{file}: {errors:?}"))
        .config
}

#[test]
fn defaults_are_parsed_without_loss() {
    let config = defaults();
    assert_eq!(good(Value::Null), config);
    assert_eq!(good(json!({})), config);
    assert_eq!(
        from_json::<MeshConfig>(&default_values(), Unknown::Deny).unwrap(),
        config
    );
    assert_eq!(config.proxy_inbound_listen_port, 15006);
    assert_eq!(config.extension_providers.len(), 3);
    assert_eq!(
        default_proxy_config().discovery_address,
        "istiod.istio-system.svc:15012"
    );
}

#[test]
fn field_in_file_replaces_the_whole_default() {
    let config = good(
        json!({"enableTracing": false, "connectTimeout": "1500ms", "localityLbSetting": {"failoverPriority": ["a"]},
        "defaultServiceExportTo": ["."], "ingressClass": null}),
    );
    assert!(!config.enable_tracing);
    assert_eq!(config.connect_timeout.unwrap().nanos, 500_000_000);
    assert_eq!(config.locality_lb_setting.unwrap().enabled, None);
    assert_eq!(config.default_service_export_to, ["."]);
    assert_eq!(config.ingress_class, "istio");
}

#[test]
fn proxy_config_is_merged_by_field() {
    let first = good(
        json!({"defaultConfig": {"meshId": "m", "proxyMetadata": {"A": "1", "B": "2"},
        "proxyHeaders": {"server": {"value": "s"}, "requestId": {"disabled": true}, "preserveHttp1HeaderCase": true}}}),
    );
    let second = lay_over(
        &first,
        &json!({"defaultConfig": {"tracingServiceName": "CANONICAL_NAME_ONLY", "drain_duration": "5s",
        "proxy_metadata": {"B": "3"},
        "proxyHeaders": {"server": {"disabled": true}, "attempt_count": {"disabled": true}}}}),
    )
    .unwrap();
    let config = second.default_config.unwrap();
    let metadata: Vec<_> = config
        .proxy_metadata
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    assert_eq!(metadata, ["A=1", "B=3"]);
    let headers = config.proxy_headers.unwrap();
    let server = headers.server.unwrap();
    assert_eq!((server.value.as_str(), server.disabled), ("", Some(true)));
    assert_eq!(headers.request_id.unwrap().disabled, Some(true));
    assert_eq!(headers.attempt_count.unwrap().disabled, Some(true));
    assert_eq!(
        headers.preserve_http1_header_case, None,
        "fields without a merge are reset"
    );
    assert_eq!(config.drain_duration.unwrap().seconds, 5);
    assert_eq!((config.mesh_id.as_str(), config.status_port), ("m", 15020));
    assert_eq!(
        values(
            &good(json!({"defaultConfig": {"tracingServiceName": "CANONICAL_NAME_ONLY"}}))
                .default_config
                .unwrap()
        )
        .get("serviceCluster"),
        None
    );
}

#[test]
fn merged_fields_have_one_spelling() {
    let parsed = parse(&json!({"default_config": {"meshId": "m"}, "default_providers": {"metrics": ["prometheus"]}}));
    let parsed = parsed.expect("a mesh config with warnings");
    let warned: Vec<&str> = parsed.warnings.iter().map(|warning| warning.field.as_str()).collect();
    assert_eq!(warned, ["default_config", "default_providers"]);
    assert_eq!(parsed.config, defaults());
}

/// Istio takes the field that is declared last.
#[test]
fn fields_that_exclude_each_other_are_warnings() {
    let tracing = json!({"zipkin": {"address": "z:9411"}, "datadog": {"address": "d:8126"}});
    let file = json!({"defaultConfig": {"tracing": tracing}, "extensionProviders": [
        {"name": "x", "zipkin": {"service": "z", "port": 1}, "opentelemetry": {"service": "o", "port": 2}}]});
    let parsed = parse(&file).expect("a mesh config with warnings");
    let warned: Vec<&str> = parsed.warnings.iter().map(|warning| warning.field.as_str()).collect();
    assert_eq!(warned, ["defaultConfig.tracing.zipkin", "extensionProviders[0].zipkin"]);
    let config = to_json(&parsed.config);
    assert_eq!(
        config["defaultConfig"]["tracing"]["datadog"]["address"], "d:8126",
        "{config}"
    );
    assert_eq!(config["extensionProviders"][3]["opentelemetry"]["service"], "o");
    let laid = lay_over_proxy_config(&default_proxy_config(), &json!({"tracing": tracing})).unwrap();
    assert_eq!(to_json(&laid)["tracing"]["datadog"]["address"], "d:8126");
}

#[test]
fn named_lists_are_merged() {
    let config = good(json!({"trustDomainAliases": ["z", "a", "a"],
        "defaultProviders": {"metrics": ["prometheus"], "accessLogging": ["envoy"]},
        "extensionProviders": [{"name": "otel", "opentelemetry": {"service": "o", "port": 4317}},
            {"name": "envoy", "envoyFileAccessLog": {"path": "/tmp/log"}}]}));
    let providers: Vec<_> = config
        .extension_providers
        .iter()
        .map(|provider| provider.name.as_str())
        .collect();
    assert_eq!(providers, ["prometheus", "stackdriver", "envoy", "otel"]);
    assert_eq!(
        to_json(&config.extension_providers[2])["envoyFileAccessLog"]["path"],
        "/tmp/log"
    );
    assert_eq!(config.trust_domain_aliases, ["a", "z"]);
    let both = lay_over(
        &config,
        &json!({"trustDomainAliases": ["b"], "defaultProviders": {"tracing": ["otel"], "access_logging": ["otel"]}}),
    )
    .unwrap();
    assert_eq!(both.trust_domain_aliases, ["a", "b", "z"]);
    let providers = both.default_providers.unwrap();
    assert_eq!(
        (&providers.metrics[0], &providers.access_logging[0]),
        (&"prometheus".to_owned(), &"otel".to_owned())
    );
}

#[test]
fn problems_are_reported() {
    for (file, field) in [
        (json!({"connectTimeout": "2h"}), "connectTimeout"),
        (json!({"connectTimeout": "soon"}), "connectTimeout"),
        (json!({"connectTimeout": "1000500us"}), "connectTimeout"),
        (json!({"proxyListenPort": 70000}), "proxyListenPort"),
        (json!({"proxyListenPort": 0}), "proxyListenPort"),
        (json!({"ingressControllerMode": "LOOSE"}), "ingressControllerMode"),
        (
            json!({"defaultConfig": {"drainDuration": "1500ms"}}),
            "defaultConfig.drainDuration",
        ),
        (
            json!({"defaultConfig": {"discoveryAddress": "istiod"}}),
            "defaultConfig.discoveryAddress",
        ),
        (
            json!({"defaultConfig": {"discoveryAddress": ""}}),
            "defaultConfig.discoveryAddress",
        ),
        (
            json!({"defaultConfig": {"envoyAccessLogService": {"address": "als"}}}),
            "defaultConfig.envoyAccessLogService.address",
        ),
        (
            json!({"defaultConfig": {"envoyMetricsService": {"address": "ms:0"}}}),
            "defaultConfig.envoyMetricsService.address",
        ),
        (
            json!({"defaultConfig": {"tracing": {"zipkin": {}}}}),
            "defaultConfig.tracing",
        ),
        (
            json!({"defaultConfig": {"tracing": {"lightstep": {"address": "collector:443"}}}}),
            "defaultConfig.tracing.lightstep.accessToken",
        ),
        (
            json!({"defaultConfig": {"privateKeyProvider": {"cryptomb": {}}}}),
            "defaultConfig.privateKeyProvider",
        ),
        (
            json!({"defaultConfig": {"privateKeyProvider": {}}}),
            "defaultConfig.privateKeyProvider",
        ),
        (
            json!({"defaultConfig": {"tracing": {"tlsSettings": {"mode": "MUTUAL", "privateKey": "/key"}}}}),
            "defaultConfig.tracing.tlsSettings.clientCertificate",
        ),
        (
            json!({"defaultConfig": {"tracing": {"tlsSettings": {"credentialName": "configmap://a/b"}}}}),
            "defaultConfig.tracing.tlsSettings.credentialName",
        ),
        (json!({"meshMTLS": {"ecdhCurves": ["P-256"]}}), "meshMTLS.ecdhCurves"),
        (json!({"defaultConfig": []}), "defaultConfig"),
        (
            json!({"serviceSettings": [{"hosts": ["a b"]}]}),
            "serviceSettings[0].hosts[0]",
        ),
        (
            json!({"localityLbSetting": {"distribute": [{"from": "a", "to": {"b": 1}}]}}),
            "localityLbSetting.distribute[0].to",
        ),
        (json!({"trustDomain": ""}), "trustDomain"),
        (json!({"trustDomain": "a..b"}), "trustDomain"),
        (json!([]), ""),
    ] {
        let errors = parse(&file).unwrap_err();
        assert_eq!(errors[0].field, field, "{file}");
    }
    let warnings = parse(&json!({"enableTracingg": true, "extensionProviders": [{"name": "x"}]}))
        .unwrap()
        .warnings;
    let fields: Vec<_> = warnings.iter().map(|warning| warning.field.as_str()).collect();
    assert_eq!(fields, ["enableTracingg", "extensionProviders[3]"]);
}

/// Istio logs these mistakes, and each feature treats such a provider in its own way.
#[test]
fn invalid_extension_providers_are_warnings() {
    let host = "ns/a.ns.svc.cluster.local";
    let file = json!({"extensionProviders": [
        {"name": "good", "envoyExtAuthzHttp": {"service": host, "port": 80, "pathPrefix": "/check"}},
        {"name": "service", "zipkin": {"service": "ns/a", "port": 80}},
        {"name": "port", "datadog": {"service": "a", "port": 70000}},
        {"name": "token", "lightstep": {"service": "a", "port": 1}},
        {"name": "prefix", "envoyExtAuthzHttp": {"service": "a", "port": 1, "pathPrefix": "/%zz"}},
        {"name": "path", "opentelemetry": {"service": "10.0.0.1", "port": 1, "http": {"path": "/%zz"}}},
        {"name": "both", "opentelemetry": {"service": "a", "port": 1, "http": {"path": "/"}, "grpc": {}}}]});
    let parsed = parse(&file).expect("a mesh config with warnings");
    let warned: Vec<&str> = parsed.warnings.iter().map(|warning| warning.field.as_str()).collect();
    assert_eq!(
        warned,
        [
            "extensionProviders[4].zipkin.service",
            "extensionProviders[5].datadog.port",
            "extensionProviders[6].lightstep.accessToken",
            "extensionProviders[7].envoyExtAuthzHttp.pathPrefix",
            "extensionProviders[8].opentelemetry.http.path",
            "extensionProviders[9].opentelemetry"
        ]
    );
}

#[test]
fn resources_change_the_config_of_a_proxy() {
    let resource = |value: Value| from_json::<ProxyConfigResource>(&value, Unknown::Deny).unwrap();
    let mesh = resource(json!({"concurrency": 2, "environmentVariables": {"A": "1", "B": "1"}}));
    let own =
        resource(json!({"concurrency": 0, "environmentVariables": {"B": "2"}, "image": {"imageType": "distroless"}}));
    let config = effective_proxy_config(&default_proxy_config(), &[&mesh, &own]);
    assert_eq!(
        (
            config.concurrency,
            config.proxy_metadata["A"].as_str(),
            config.proxy_metadata["B"].as_str()
        ),
        (Some(0), "1", "2")
    );
    assert_eq!(config.image.unwrap().image_type, "distroless");
    let alone = node_proxy_config(&json!({"meshId": "m"})).unwrap();
    assert_eq!((alone.mesh_id.as_str(), alone.status_port), ("m", 0));
    let laid = lay_over_proxy_config(&default_proxy_config(), &json!({"statusPort": 1})).unwrap();
    assert_eq!((laid.status_port, laid.proxy_admin_port), (1, 15000));
}

/// Istio accepts these values, which must not cost the rest of the mesh config.
#[test]
fn values_that_istio_accepts_and_proxies_reject_are_replaced() {
    let file = json!({"dnsRefreshRate": "0s", "protocolDetectionTimeout": "-5s", "trustDomain": "t",
        "proxyInboundListenPort": 70000, "proxyHttpPort": -1,
        "discoverySelectors": [{"matchLabels": {"a": "b"}}, {"matchExpressions": [{"key": "a", "operator": "NotIn"}]}],
        "defaultConfig": {"tracing": {"sampling": 150, "customTags": {"a": {}, "b": {"literal": {"value": "x"}}}},
            "proxyHeaders": {"server": {"value": "a\n"}}}});
    let parsed = parse(&file).expect("a mesh config with warnings");
    let warned: Vec<&str> = parsed.warnings.iter().map(|warning| warning.field.as_str()).collect();
    assert_eq!(
        warned,
        [
            "proxyInboundListenPort",
            "proxyHttpPort",
            "protocolDetectionTimeout",
            "dnsRefreshRate",
            "discoverySelectors[1]",
            "defaultConfig.tracing.customTags.a",
            "defaultConfig.tracing.sampling",
            "defaultConfig.proxyHeaders.server.value"
        ]
    );
    let config = parsed.config;
    assert_eq!(config.trust_domain, "t");
    assert_eq!((config.proxy_inbound_listen_port, config.proxy_http_port), (15006, 0));
    assert_eq!(config.dns_refresh_rate, None);
    assert!(config.discovery_selectors.is_empty(), "all namespaces are selected");
    let headers = config.default_config.unwrap().proxy_headers.unwrap();
    assert_eq!(headers.server.unwrap().value, "");
    assert_eq!(
        config.protocol_detection_timeout,
        Some(prost_types::Duration::default())
    );
}

/// Istio does not check these values.
#[test]
fn unusual_values_are_accepted() {
    for file in [
        json!({"defaultConfig": {"terminationDrainDuration": "0s"}}),
        json!({"defaultConfig": {"terminationDrainDuration": "1500ms", "zipkinAddress": "zipkin"}}),
        json!({"trustDomain": "123456789012", "trustDomainAliases": ["mesh.1", "old."]}),
        json!({"defaultHttpRetryPolicy": {"attempts": 2, "retryOn": "5xx, reset"}}),
        json!({"defaultConfig": {"envoyMetricsService": {}, "envoyAccessLogService": {"address": "als:1"},
            "proxyStatsMatcher": {"inclusionRegexps": ["a".repeat(2000)]}}}),
    ] {
        let parsed = parse(&file).unwrap_or_else(|errors| panic!("{file}: {errors:?}"));
        assert!(parsed.warnings.is_empty(), "{file}: {:?}", parsed.warnings);
    }
    let file = json!({"serviceSettings": [{"settings": {"clusterLocal": true}}], "proxyInboundListenPort": 0,
        "defaultConfig": {"concurrency": -1, "proxyStatsMatcher": {"inclusionRegexps": ["("]},
            "tracing": {"sampling": -0.5, "customTags": {"a": null}}}});
    let warnings = parse(&file).expect("a mesh config with warnings").warnings;
    let fields: Vec<&str> = warnings.iter().map(|warning| warning.field.as_str()).collect();
    assert_eq!(
        fields,
        [
            "defaultConfig.proxyStatsMatcher.inclusionRegexps[0]",
            "defaultConfig.tracing.customTags.a",
            "defaultConfig.tracing.sampling",
            "proxyInboundListenPort",
            "serviceSettings[0].hosts",
            "defaultConfig.concurrency"
        ]
    );
}

#[test]
fn unknown_curves_and_deprecated_variables_are_warned_of() {
    let file = json!({"tlsDefaults": {"ecdhCurves": ["P-256", "P-257", "P-256"]},
        "defaultConfig": {"proxyMetadata": {"ISTIO_META_DNS_AUTO_ALLOCATE": "true"}}});
    let warnings = parse(&file).expect("a mesh config with warnings").warnings;
    let fields: Vec<&str> = warnings.iter().map(|warning| warning.field.as_str()).collect();
    assert_eq!(
        fields,
        [
            "tlsDefaults.ecdhCurves[1]",
            "tlsDefaults.ecdhCurves[2]",
            "defaultConfig.proxyMetadata.ISTIO_META_DNS_AUTO_ALLOCATE"
        ]
    );
}

#[test]
fn the_map_is_named_after_the_revision() {
    assert_eq!(["", "default", "v2"].map(map_name), ["istio", "istio", "istio-v2"]);
}
