//! Generates the field constants of the messages that the daemon writes by hand.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use heck::{ToShoutySnakeCase, ToSnakeCase, ToUpperCamelCase};
use prost_types::{
    DescriptorProto, FieldDescriptorProto, FileDescriptorSet, MessageOptions,
    field_descriptor_proto::{Label, Type},
};

use super::{Error, scoped};

/// The messages with field constants. Their last names are distinct.
const WRITTEN: &[&str] = &[
    "envoy.config.cluster.v3.Cluster",
    "envoy.config.cluster.v3.Cluster.EdsClusterConfig",
    "envoy.config.cluster.v3.Cluster.TransportSocketMatch",
    "envoy.config.core.v3.Address",
    "envoy.config.core.v3.Locality",
    "envoy.config.core.v3.Metadata",
    "envoy.config.core.v3.SocketAddress",
    "envoy.config.core.v3.TransportSocket",
    "envoy.config.endpoint.v3.ClusterLoadAssignment",
    "envoy.config.endpoint.v3.Endpoint",
    "envoy.config.endpoint.v3.Endpoint.AdditionalAddress",
    "envoy.config.endpoint.v3.LbEndpoint",
    "envoy.config.endpoint.v3.LocalityLbEndpoints",
    "envoy.config.listener.v3.Filter",
    "envoy.config.listener.v3.FilterChain",
    "envoy.config.listener.v3.Listener",
    "envoy.config.route.v3.Decorator",
    "envoy.config.route.v3.Route",
    "envoy.config.route.v3.RouteAction",
    "envoy.config.route.v3.RouteConfiguration",
    "envoy.config.route.v3.VirtualHost",
    "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
    "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager.Tracing",
    "envoy.extensions.filters.network.http_connection_manager.v3.Rds",
    "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
    "envoy.extensions.transport_sockets.tls.v3.CertificateValidationContext",
    "envoy.extensions.transport_sockets.tls.v3.CommonTlsContext",
    "envoy.extensions.transport_sockets.tls.v3.CommonTlsContext.CombinedCertificateValidationContext",
    "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
    "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
    "envoy.service.discovery.v3.DeltaDiscoveryResponse",
    "envoy.service.discovery.v3.Resource",
    "envoy.type.matcher.v3.StringMatcher",
    "envoy.type.tracing.v3.CustomTag",
    "envoy.type.tracing.v3.CustomTag.Literal",
    "google.protobuf.Any",
    "google.protobuf.ListValue",
    "google.protobuf.Struct",
    "google.protobuf.Value",
    "istio.networking.nds.v1.NameTable",
    "istio.networking.nds.v1.NameTable.NameInfo",
];

/// Wrappers of a number that is encoded as a varint.
const WRAPPERS: &[&str] = &["google.protobuf.BoolValue", "google.protobuf.UInt32Value"];

/// The file of all wrappers. prost represents them by the plain types, not by messages.
const WRAPPER_FILE: &str = "google/protobuf/wrappers.proto";

/// Returns the source of one module for each message.
pub(super) fn modules(files: &FileDescriptorSet) -> Result<String, Error> {
    let mut messages = BTreeMap::new();
    for file in files.file.iter().filter(|file| file.name() != WRAPPER_FILE) {
        for message in &file.message_type {
            collect(file.package(), file.package(), message, &mut messages);
        }
    }
    let mut out = String::new();
    let mut modules = BTreeSet::new();
    for name in WRITTEN {
        let message = messages
            .get(*name)
            .ok_or_else(|| format!("there is no message {name}"))?;
        let module = escaped(&message.descriptor.name().to_snake_case());
        if !modules.insert(module.clone()) {
            return Err(format!(
                "two messages with field constants are named {}",
                message.descriptor.name()
            )
            .into());
        }
        write_module(&mut out, name, &module, message, &messages)?;
    }
    Ok(out)
}

struct Message<'a> {
    descriptor: &'a DescriptorProto,
    /// The Rust type.
    path: String,
}

fn collect<'a>(package: &str, scope: &str, descriptor: &'a DescriptorProto, all: &mut BTreeMap<String, Message<'a>>) {
    let name = scoped(scope, descriptor.name());
    for nested in &descriptor.nested_type {
        collect(package, &name, nested, all);
    }
    let path = rust_path(package, &name);
    all.insert(name, Message { descriptor, path });
}

/// Returns the Rust type of a message, as prost names it.
fn rust_path(package: &str, name: &str) -> String {
    match (name, name.strip_prefix("google.protobuf.")) {
        ("google.protobuf.Any", _) => return "crate::Any".to_owned(),
        ("google.protobuf.Empty", _) => return "()".to_owned(),
        (_, Some(well_known)) => return format!("::prost_types::{well_known}"),
        _ => {}
    }
    let own = name.strip_prefix(package).unwrap_or(name).trim_start_matches('.');
    let (outer, last) = own.rsplit_once('.').unwrap_or(("", own));
    let modules = package
        .split('.')
        .chain(outer.split('.').filter(|module| !module.is_empty()));
    let modules = modules.map(|module| escaped(&module.to_snake_case()) + "::");
    format!("crate::{}{}", modules.collect::<String>(), last.to_upper_camel_case())
}

fn escaped(name: &str) -> String {
    match name {
        "type" | "struct" | "match" => format!("r#{name}"),
        _ => name.to_owned(),
    }
}

fn write_module(
    out: &mut String,
    name: &str,
    module: &str,
    message: &Message,
    all: &BTreeMap<String, Message>,
) -> Result<(), Error> {
    let path = &message.path;
    let fields = &message.descriptor.field;
    writeln!(out, "/// Fields of `{name}`.\npub mod {module} {{")?;
    writeln!(out, "use super::*;\ntype Message = {path};")?;
    for field in fields {
        writeln!(
            out,
            "/// Field `{}`.\npub const {}: Field<Message, {}> = Field::new({}, {});",
            field.name(),
            field.name().to_shouty_snake_case(),
            kind(field, message.descriptor, all),
            field.number(),
            position(field, fields),
        )?;
    }
    writeln!(out, "impl MessageFields for Message {{")?;
    writeln!(out, "const TYPE_URL: &'static str = \"type.googleapis.com/{name}\";")?;
    writeln!(out, "fn position(number: u32) -> u32 {{ match number {{")?;
    for field in fields {
        if position(field, fields) != field.number() {
            writeln!(out, "{} => {},", field.number(), position(field, fields))?;
        }
    }
    writeln!(out, "_ => number }} }} }} }}")?;
    Ok(())
}

/// Returns the position at which prost encodes a field: members of a oneof are encoded at the position of the member
/// with the lowest number.
fn position(field: &FieldDescriptorProto, fields: &[FieldDescriptorProto]) -> i32 {
    if !is_oneof_member(field) {
        return field.number();
    }
    let members = fields.iter().filter(|other| other.oneof_index == field.oneof_index);
    members
        .map(FieldDescriptorProto::number)
        .min()
        .unwrap_or(field.number())
}

fn is_oneof_member(field: &FieldDescriptorProto) -> bool {
    field.oneof_index.is_some() && !field.proto3_optional()
}

/// Returns the kind of a field's values, a type of `proto/src/field.rs` or of a message.
fn kind(field: &FieldDescriptorProto, message: &DescriptorProto, all: &BTreeMap<String, Message>) -> String {
    let repeated = field.label() == Label::Repeated;
    let explicit = repeated || field.oneof_index.is_some();
    let entry = message.nested_type.iter().find(|nested| {
        let is_entry = nested.options.as_ref().is_some_and(MessageOptions::map_entry);
        is_entry
            && field
                .type_name()
                .ends_with(&format!(".{}.{}", message.name(), nested.name()))
    });
    if let Some(entry) = entry {
        let value = entry.field.iter().find(|field| field.number() == 2);
        let value = value.and_then(|value| all.get(value.type_name().trim_start_matches('.')));
        return value.map_or_else(|| "Unsupported".to_owned(), |value| format!("Map<{}>", value.path));
    }
    let kind = match field.r#type() {
        Type::String if explicit => "ExplicitText",
        Type::String => "Text",
        Type::Bytes if !explicit => "Blob",
        Type::Bool | Type::Enum | Type::Uint32 if repeated => "Unsupported",
        Type::Bool | Type::Enum | Type::Uint32 if explicit => "ExplicitNumber",
        Type::Bool | Type::Enum | Type::Uint32 => "Number",
        Type::Message => match field.type_name().trim_start_matches('.') {
            name if WRAPPERS.contains(&name) => "Wrapper",
            name => all.get(name).map_or("Unsupported", |message| &message.path),
        },
        _ => "Unsupported",
    };
    kind.to_owned()
}
