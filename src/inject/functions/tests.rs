//! Unit tests of Istio's functions.

use super::super::environment::reflected;
use super::*;
use crate::{
    proto::istio::mesh::v1alpha1::ProxyConfig,
    template::{Limits, NoHost, Templates},
};

fn render(template: &str) -> String {
    let port = serde_json::json!({"containerPort": 53, "protocol": "UDP"});
    let proxy = ProxyConfig {
        proxy_metadata: [("OPTS".to_owned(), "a&<b>".to_owned())].into(),
        ..ProxyConfig::default()
    };
    let data = Value::map([
        ("nil", Value::Nil),
        ("proxy", data::message(&reflected(&proxy))),
        ("port", data::kube_value("ContainerPort", &port)),
        ("map", Map::of_strings([("a", "1"), ("b", "2")]).into()),
        (
            "nested",
            Value::map([("a", Value::Nil), ("b", Value::map([("c", Value::Nil)]))]),
        ),
    ]);
    let mut templates = Templates::new(functions(), Limits::default());
    templates.parse("test", template).expect("the template is valid");
    templates
        .render("test", &data, &NoHost)
        .unwrap_or_else(|error| error.to_string())
}

#[test]
fn functions_render() {
    for (template, expected) in [
        ("{{ contains \"a\" \"banana\" }}", "true"),
        ("{{ contains \"banana\" \"a\" }}", "false"),
        ("{{ indent 2 \"a\\nb\" }}", "a\n  b"),
        ("{{ directory \"/etc/certs/ca.pem\" }}", "/etc/certs/"),
        (
            "{{ valueOrDefault .nil \"d\" }}{{ valueOrDefault \"\" 1 }}{{ valueOrDefault 0 2 }}",
            "d10",
        ),
        ("{{ isset .map \"a\" }} {{ isset .map \"c\" }}", "true false"),
        (
            "{{ toJsonMap .map (strdict \"b\" \"3\" \"c\" \"4\") }}",
            "{\"a\":\"1\",\"b\":\"3\",\"c\":\"4\"}",
        ),
        ("{{ toJSON (omit .map \"a\") }}", "{\"b\":\"2\"}"),
        ("{{ (mergeMaps .map (strdict \"a\" \"9\")).a }}", "9"),
        ("{{ toYaml (omitNil .nested) }}", "null\n"),
        (
            "{{ toYaml (omitNil (fromJSON `[null, {\"a\": 1, \"b\": [null]}, {}, [], [{\"c\": null}]]`)) }}",
            "- a: 1\n- {}\n- []\n",
        ),
        (
            "{{ protoToJSON .proxy }}",
            "{\"proxyMetadata\":{\"OPTS\":\"a\\u0026\\u003cb\\u003e\"}}",
        ),
        ("{{ toYaml .map }}", "a: \"1\"\nb: \"2\"\n"),
        ("{{ fromJSON \"[1, true]\" }} {{ fromJSON \"no\" }}", "[1 true] {}"),
        ("{{ env \"HOME\" \"none\" }}", "none"),
        ("{{ structToJSON .map }}", "{\"a\":\"1\",\"b\":\"2\"}"),
        (
            "{{ structToJSON .port }}",
            "{\"containerPort\":53,\"protocol\":\"UDP\"}",
        ),
    ] {
        assert_eq!(render(template), expected, "{template}");
    }
}

#[test]
fn indentation_is_paid_for() {
    assert_eq!(render("{{ indent 9223372036854775807 \"a\" }}"), "a");
    let error = render("{{ indent 9223372036854775807 \"a\\nb\" }}");
    assert!(error.contains("values take more than 67108864 bytes"), "{error}");
}

#[test]
fn parsed_documents_are_paid_for() {
    let nested = "{{ $x := list 0 }}{{ range until 19 }}{{ $x = list $x $x }}{{ end }}";
    for call in ["toYaml $x | len", "toJson $x | fromJSON | len"] {
        let error = render(&format!("{nested}{{{{ {call} }}}}"));
        assert!(
            error.contains("values take more than 67108864 bytes"),
            "{call}: {error}"
        );
    }
    // Each of 262144 small maps takes a node of a tree.
    let wide = "{{ $x := dict `a` 0 }}{{ range until 6 }}{{ $x = list $x $x $x $x $x $x $x $x }}{{ end }}";
    let error = render(&format!("{wide}{{{{ toYaml $x | len }}}}"));
    assert!(error.contains("values take more than 67108864 bytes"), "{error}");
}

/// All values of a chart are about this large.
#[test]
fn ordinary_documents_are_admitted() {
    let document = "{{ $x := dict }}{{ range $i := until 100 }}\
                    {{ $_ := set $x (toString $i) (dict `a` (list 1 2) `b` (dict `c` `text` `d` true)) }}{{ end }}";
    let length = render(&format!(
        "{document}{{{{ range until 20 }}}}{{{{ toYaml $x | len }}}} {{{{ end }}}}"
    ));
    assert_eq!(length.split_whitespace().count(), 20, "{length}");
}
