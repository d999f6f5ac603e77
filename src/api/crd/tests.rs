use super::*;
use crate::proto::message_descriptor;

fn schema_of(kind: &str) -> Value {
    let of_kind = |definition: &Value| definition["spec"]["names"]["kind"] == kind;
    let definition = definitions()
        .into_iter()
        .find(of_kind)
        .expect("the kind has a definition");
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

#[test]
fn one_version_is_stored_and_all_are_served() {
    for definition in definitions() {
        let versions = definition["spec"]["versions"].as_array().expect("a list").clone();
        let stored = versions.iter().filter(|version| version["storage"] == true).count();
        assert_eq!(stored, 1, "{}", definition["metadata"]["name"]);
        assert!(versions.iter().all(|version| version["served"] == true));
    }
}

#[test]
fn constraints_name_existing_messages_and_fields() {
    for name in schema::constrained() {
        assert!(message_descriptor(name).is_some(), "{name}");
    }
    // A patch of an unknown field would leave a property without a type.
    for definition in definitions() {
        typed(
            &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"],
            &definition["metadata"]["name"].to_string(),
        );
    }
}

fn typed(schema: &Value, path: &str) {
    let int_or_string = schema["x-kubernetes-int-or-string"] == true;
    assert!(schema["type"].is_string() || int_or_string, "{path}: {schema}");
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        typed(property, &format!("{path}.{name}"));
    }
    for inner in ["items", "additionalProperties"] {
        if !schema[inner].is_null() {
            typed(&schema[inner], &format!("{path}.{inner}"));
        }
    }
}

#[test]
fn types_match_the_json_form_of_messages() {
    let rule = schema_of("DestinationRule");
    let policy = &rule["properties"]["spec"]["properties"]["trafficPolicy"]["properties"];
    let balancer = &policy["loadBalancer"];
    assert_eq!(balancer["oneOf"][1], json!({ "required": ["simple"] }));
    assert_eq!(balancer["properties"]["simple"]["enum"][4], "ROUND_ROBIN");
    assert_eq!(
        balancer["properties"]["consistentHash"]["allOf"]
            .as_array()
            .map(Vec::len),
        Some(2)
    );
    let cookie = &balancer["properties"]["consistentHash"]["properties"]["httpCookie"];
    assert_eq!(cookie["properties"]["ttl"], json!({ "type": "string" }));
    assert_eq!(
        policy["tls"]["properties"]["insecureSkipVerify"],
        json!({ "type": "boolean", "nullable": true })
    );
    assert_eq!(
        rule["properties"]["status"]["x-kubernetes-preserve-unknown-fields"],
        true
    );
}
