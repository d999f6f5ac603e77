//! Objects: files of a mesh folder, and objects from an API server, which may be that of an untrusted remote cluster.

use istiod::{
    api::{Kind, document, folder::FileContent, yaml},
    base::ClusterId,
    kube::object::Object,
};

use super::{Target, class_of};

/// A file of a mesh folder.
pub(super) const YAML: Target = Target {
    name: "yaml",
    run: yaml_file,
    words: WORDS,
};

/// An object as JSON, parsed as each kind.
pub(super) const OBJECT: Target = Target {
    name: "object",
    run: object,
    words: WORDS,
};

const WORDS: &[&[u8]] = &[
    b"---\n",
    b"...\n",
    b"&a ",
    b"*a",
    b"<<: *a",
    b"!!binary ",
    b"'",
    b"\"",
    b"null",
    b"{}",
    b"[]",
    b"-1",
    b"0",
    b"4294967296",
    b"1e400",
    b"99999999999999999999",
    b"\"\"",
    b"*",
    b"*.",
    b"~",
    b".",
    b"/",
    b"0s",
    b"1ns",
    b"-1s",
    b"315576000001s",
    b"::/0",
    b"0.0.0.0/0",
    b"apiVersion",
    b"kind",
    b"metadata",
    b"spec",
    b"List",
    b"items",
    b"@type",
    b"type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
    b"type.googleapis.com/udpa.type.v1.TypedStruct",
    b"typed_config",
    b"\\u0000",
    b"\xf0\x9f\x98\x80",
];

fn yaml_file(bytes: &[u8]) -> u64 {
    let read = FileContent::read("objects.yaml", bytes, &ClusterId::new("c"));
    outcome(
        read.objects.len(),
        read.diagnostics.iter().map(|diagnostic| diagnostic.message.as_str()),
    )
}

fn object(bytes: &[u8]) -> u64 {
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(bytes) else {
        return 0;
    };
    let cluster = ClusterId::new("c");
    // Formatted objects must be parsed again.
    if value.is_object() {
        for document in yaml::documents(&yaml::to_text(&value)) {
            let _ = document.parse();
        }
    }
    let _ = Object::from_value(value.clone());
    let mut sort = 0;
    for kind in Kind::ALL.iter().filter(|kind| kind.is_object()) {
        let parsed = document::parse_object(&cluster, *kind, &value);
        let messages = parsed.diagnostics.iter().map(|diagnostic| diagnostic.message.as_str());
        sort ^= outcome(parsed.rows.len(), messages).rotate_left(*kind as u32);
    }
    sort
}

fn outcome<'a>(rows: usize, messages: impl Iterator<Item = &'a str>) -> u64 {
    messages.fold(rows.min(2) as u64, |sort, message| {
        sort.rotate_left(1) ^ class_of(message)
    })
}
