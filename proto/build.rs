//! Generates the messages of Envoy, xDS and Istio, and their descriptor set.
//!
//! Envoy's .proto files come from the registry package `envoy-types`, which is in the lock file but never compiled;
//! `cargo metadata` returns its path. All files in `proto/contrib`, `proto/istio`, `proto/udpa` and `proto/xds` are our
//! own.
//!
//! The descriptor set has all messages, so that JSON of any Envoy type can be read and written. Rust types are
//! generated only for the packages that the daemon builds itself (`TYPED`), as they dominate the build time.

#![allow(clippy::disallowed_methods, reason = "cargo passes its settings in the environment")]

#[path = "build/fields.rs"]
mod fields;

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use prost::Message;
use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet, UninterpretedOption};
use protox::file::{ChainFileResolver, File, FileResolver, GoogleFileResolver};

/// The import roots in the package `envoy-types`.
const SHIPPED_ROOTS: &[&str] = &[
    "cel-spec/proto",
    "client_model",
    "data-plane-api",
    "googleapis",
    "opentelemetry-proto",
    "xds",
];

/// Large fields that many objects lack, of messages that a mesh has by the thousand. Boxed, they take 8 bytes where
/// they are absent: a route has 216 bytes instead of 952, a destination 72 instead of 208, a subset 56 instead of 896,
/// and a policy 360 instead of 848.
const BOXED: &[&str] = &[
    ".istio.networking.v1alpha3.DestinationRule.traffic_policy",
    ".istio.networking.v1alpha3.HTTPRoute.cors_policy",
    ".istio.networking.v1alpha3.HTTPRoute.delegate",
    ".istio.networking.v1alpha3.HTTPRoute.direct_response",
    ".istio.networking.v1alpha3.HTTPRoute.fault",
    ".istio.networking.v1alpha3.HTTPRoute.headers",
    ".istio.networking.v1alpha3.HTTPRoute.mirror",
    ".istio.networking.v1alpha3.HTTPRoute.redirect",
    ".istio.networking.v1alpha3.HTTPRoute.retries",
    ".istio.networking.v1alpha3.HTTPRoute.rewrite",
    ".istio.networking.v1alpha3.HTTPRouteDestination.headers",
    ".istio.networking.v1alpha3.Subset.traffic_policy",
    ".istio.networking.v1alpha3.TrafficPolicy.PortTrafficPolicy.load_balancer",
    ".istio.networking.v1alpha3.TrafficPolicy.PortTrafficPolicy.tls",
    ".istio.networking.v1alpha3.TrafficPolicy.load_balancer",
    ".istio.networking.v1alpha3.TrafficPolicy.tls",
    ".istio.networking.v1alpha3.TrafficPolicy.tunnel",
];

/// Folders (with subfolders) and files that become Rust types, together with all their imports.
const TYPED: &[&str] = &[
    "istio",
    "udpa/type",
    "xds/core",
    "xds/type",
    "google/rpc",
    "envoy/admin/v3/config_dump",
    "envoy/config",
    "envoy/type",
    "envoy/service/discovery",
    "envoy/service/status",
    "envoy/extensions/access_loggers/file",
    "envoy/extensions/access_loggers/filters/cel",
    "envoy/extensions/access_loggers/grpc",
    "envoy/extensions/access_loggers/open_telemetry",
    "envoy/extensions/bootstrap/internal_listener",
    "envoy/extensions/clusters/aggregate",
    "envoy/extensions/clusters/common",
    "envoy/extensions/clusters/dns",
    "envoy/extensions/clusters/dynamic_forward_proxy",
    "envoy/extensions/common/dynamic_forward_proxy",
    "envoy/extensions/filters/common",
    "envoy/extensions/filters/http/buffer",
    "envoy/extensions/filters/http/cors",
    "envoy/extensions/filters/http/dynamic_forward_proxy",
    "envoy/extensions/filters/http/ext_authz",
    "envoy/extensions/filters/http/ext_proc",
    "envoy/extensions/filters/http/fault",
    "envoy/extensions/filters/http/grpc_stats",
    "envoy/extensions/filters/http/grpc_web",
    "envoy/extensions/filters/http/header_mutation",
    "envoy/extensions/filters/http/jwt_authn",
    "envoy/extensions/filters/http/lua",
    "envoy/extensions/filters/http/rbac",
    "envoy/extensions/filters/http/router",
    "envoy/extensions/filters/http/set_filter_state",
    "envoy/extensions/filters/http/set_metadata",
    "envoy/extensions/filters/http/stateful_session",
    "envoy/extensions/filters/http/wasm",
    "envoy/extensions/filters/listener/http_inspector",
    "envoy/extensions/filters/listener/original_dst",
    "envoy/extensions/filters/listener/original_src",
    "envoy/extensions/filters/listener/proxy_protocol",
    "envoy/extensions/filters/listener/set_filter_state",
    "envoy/extensions/filters/listener/tls_inspector",
    "envoy/extensions/filters/network/connection_limit",
    "envoy/extensions/filters/network/direct_response",
    "envoy/extensions/filters/network/echo",
    "envoy/extensions/filters/network/ext_authz",
    "envoy/extensions/filters/network/http_connection_manager",
    "envoy/extensions/filters/network/mongo_proxy",
    "envoy/extensions/filters/network/rbac",
    "envoy/extensions/filters/network/redis_proxy",
    "envoy/extensions/filters/network/set_filter_state",
    "envoy/extensions/filters/network/sni_dynamic_forward_proxy",
    "envoy/extensions/filters/network/tcp_proxy",
    "envoy/extensions/filters/network/wasm",
    "envoy/extensions/formatter/cel",
    "envoy/extensions/formatter/metadata",
    "envoy/extensions/formatter/req_without_query",
    "envoy/extensions/http/header_formatters/preserve_case",
    "envoy/extensions/http/stateful_session",
    "envoy/extensions/load_balancing_policies",
    "envoy/extensions/matching/common_inputs",
    "envoy/extensions/network/dns_resolver",
    "envoy/extensions/path",
    "envoy/extensions/private_key_providers",
    "envoy/extensions/request_id",
    "envoy/extensions/retry",
    "envoy/extensions/tracers/opentelemetry",
    "envoy/extensions/transport_sockets/internal_upstream",
    "envoy/extensions/transport_sockets/proxy_protocol",
    "envoy/extensions/transport_sockets/quic",
    "envoy/extensions/transport_sockets/raw_buffer",
    "envoy/extensions/transport_sockets/tls/v3",
    "envoy/extensions/upstreams/http/v3",
    "envoy/extensions/wasm",
];

/// The files whose services get gRPC clients and servers.
const SERVICES: &[&str] = &["envoy/service/discovery/v3/ads.proto", "istio/"];

/// Files that only declare options. They are omitted: options do not reach the descriptors.
const OPTION_FILES: &[&str] = &[
    "validate/",
    "udpa/annotations/",
    "xds/annotations/",
    "envoy/annotations/",
    "google/api/annotations.proto",
    "google/api/field_behavior.proto",
    "google/api/http.proto",
    "google/protobuf/descriptor.proto",
];

/// Options that affect the wire form or the JSON form.
const KEPT_OPTIONS: &[&str] = &["packed", "allow_alias", "json_name"];

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let own = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let out = PathBuf::from(env::var("OUT_DIR")?);
    for path in ["build", "build.rs", "Cargo.toml", "contrib", "istio", "udpa", "xds"] {
        println!("cargo::rerun-if-changed={path}");
    }

    let mut sources = Sources::default();
    let shipped = shipped_protos(&own)?;
    for root in SHIPPED_ROOTS {
        sources.add_tree(&shipped.join(root), &shipped.join(root))?;
    }
    for folder in ["istio", "udpa", "xds"] {
        sources.add_tree(&own, &own.join(folder))?;
    }
    let contrib = own.join("contrib");
    sources.add_tree(&contrib, &contrib)?;
    sources.qualify_names();

    let names: Vec<String> = sources.files.keys().cloned().collect();
    let mut resolver = ChainFileResolver::new();
    resolver.add(sources);
    resolver.add(GoogleFileResolver::new());
    let mut compiler = protox::Compiler::with_file_resolver(resolver);
    compiler.include_imports(true).open_files(&names)?;
    let all = compiler.file_descriptor_set();

    fs::write(out.join("descriptors.bin"), all.encode_to_vec())?;
    let istio = with_imports(all.clone(), |name| name.starts_with("istio/"));
    fs::write(out.join("istio.bin"), istio.encode_to_vec())?;
    fs::write(out.join("fields.rs"), fields::modules(&all)?)?;
    generate(with_imports(all, is_typed))
}

/// Returns the folder of .proto files in the package `envoy-types`.
fn shipped_protos(own: &Path) -> Result<PathBuf, Error> {
    let output = Command::new(env::var("CARGO")?)
        .args(["metadata", "--format-version=1", "--locked", "--manifest-path"])
        .arg(own.join("Cargo.toml"))
        .output()?;
    if !output.status.success() {
        return Err(format!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let manifest = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|package| package["name"] == "envoy-types")
        .and_then(|package| package["manifest_path"].as_str())
        .ok_or("the package envoy-types is not in the lock file")?;
    Ok(Path::new(manifest).with_file_name("proto"))
}

/// Parsed files by the name in import statements.
#[derive(Default)]
struct Sources {
    files: BTreeMap<String, FileDescriptorProto>,
}

impl Sources {
    /// Parses all .proto files below `folder`; their names are relative to `root`.
    fn add_tree(&mut self, root: &Path, folder: &Path) -> Result<(), Error> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                self.add_tree(root, &path)?;
            } else if path.extension().is_some_and(|extension| extension == "proto") {
                let name = import_name(root, &path)?;
                if !is_option_file(&name) {
                    let mut file = protox_parse::parse(&name, &fs::read_to_string(&path)?)?;
                    strip_file(&mut file);
                    self.files.insert(name, file);
                }
            }
        }
        Ok(())
    }

    /// Replaces each relative type name by the absolute one.
    ///
    /// A relative name such as `config.core.v3.HttpUri` means the innermost scope that has the whole name. protox
    /// instead takes the innermost scope that has a package or message `config` in any file, and then fails.
    fn qualify_names(&mut self) {
        let mut known = BTreeSet::new();
        for file in self.files.values() {
            for message in &file.message_type {
                collect_names(&scoped(file.package(), message.name()), message, &mut known);
            }
            for item in &file.enum_type {
                known.insert(scoped(file.package(), item.name()));
            }
        }
        for file in self.files.values_mut() {
            let package = file.package().to_owned();
            for message in &mut file.message_type {
                qualify_message(&scoped(&package, message.name()), message, &known);
            }
            for method in file.service.iter_mut().flat_map(|service| &mut service.method) {
                qualify(&package, method.input_type.as_mut(), &known);
                qualify(&package, method.output_type.as_mut(), &known);
            }
        }
    }
}

impl FileResolver for Sources {
    fn resolve_path(&self, path: &Path) -> Option<String> {
        path.to_str().map(str::to_owned)
    }

    fn open_file(&self, name: &str) -> Result<File, protox::Error> {
        match self.files.get(name) {
            Some(file) => Ok(File::from_file_descriptor_proto(file.clone())),
            None => Err(protox::Error::file_not_found(name)),
        }
    }
}

fn import_name(root: &Path, path: &Path) -> Result<String, Error> {
    let parts: Option<Vec<&str>> = path.strip_prefix(root)?.iter().map(|part| part.to_str()).collect();
    Ok(parts.ok_or("the name of a .proto file is not Unicode")?.join("/"))
}

fn is_option_file(name: &str) -> bool {
    OPTION_FILES.iter().any(|prefix| name.starts_with(prefix))
}

/// Removes all that neither the wire form nor the JSON form needs. This shrinks the descriptors from 3.4
/// MB to 0.4 MB (sum of `encoded_len` of all files before and after).
fn strip_file(file: &mut FileDescriptorProto) {
    // Public imports refer to positions, which the removal shifts; generated code does not need them.
    file.public_dependency.clear();
    file.weak_dependency.clear();
    file.dependency.retain(|name| !is_option_file(name));
    file.options = None;
    file.source_code_info = None;
    file.extension.clear();
    if !SERVICES.iter().any(|prefix| file.name().starts_with(prefix)) {
        file.service.clear();
    }
    for method in file.service.iter_mut().flat_map(|service| &mut service.method) {
        method.options = None;
    }
    file.message_type.iter_mut().for_each(strip_message);
    file.enum_type.iter_mut().for_each(strip_enum);
}

fn strip_message(message: &mut DescriptorProto) {
    message.extension.clear();
    if let Some(options) = &mut message.options {
        options.uninterpreted_option.clear();
    }
    for field in &mut message.field {
        keep_options(field.options.as_mut().map(|options| &mut options.uninterpreted_option));
    }
    for oneof in &mut message.oneof_decl {
        oneof.options = None;
    }
    message.nested_type.iter_mut().for_each(strip_message);
    message.enum_type.iter_mut().for_each(strip_enum);
}

fn strip_enum(item: &mut EnumDescriptorProto) {
    keep_options(item.options.as_mut().map(|options| &mut options.uninterpreted_option));
    for value in &mut item.value {
        value.options = None;
    }
}

fn keep_options(options: Option<&mut Vec<UninterpretedOption>>) {
    if let Some(options) = options {
        options.retain(|option| match option.name.as_slice() {
            [name] => !name.is_extension && KEPT_OPTIONS.contains(&name.name_part.as_str()),
            _ => false,
        });
    }
}

fn scoped(scope: &str, name: &str) -> String {
    if scope.is_empty() {
        name.to_owned()
    } else {
        format!("{scope}.{name}")
    }
}

fn collect_names(full_name: &str, message: &DescriptorProto, known: &mut BTreeSet<String>) {
    known.insert(full_name.to_owned());
    for nested in &message.nested_type {
        collect_names(&scoped(full_name, nested.name()), nested, known);
    }
    for item in &message.enum_type {
        known.insert(scoped(full_name, item.name()));
    }
}

fn qualify_message(full_name: &str, message: &mut DescriptorProto, known: &BTreeSet<String>) {
    for field in &mut message.field {
        qualify(full_name, field.type_name.as_mut(), known);
    }
    for nested in &mut message.nested_type {
        qualify_message(&scoped(full_name, nested.name()), nested, known);
    }
}

fn qualify(scope: &str, name: Option<&mut String>, known: &BTreeSet<String>) {
    let Some(name) = name.filter(|name| !name.starts_with('.')) else {
        return;
    };
    let mut scope = scope;
    loop {
        let candidate = scoped(scope, name);
        // The well-known types are not among the parsed files.
        if known.contains(&candidate) || candidate.starts_with("google.protobuf.") {
            *name = format!(".{candidate}");
            return;
        }
        if scope.is_empty() {
            return;
        }
        scope = scope.rsplit_once('.').map_or("", |(outer, _)| outer);
    }
}

/// Returns true for a file in `TYPED`, which becomes Rust types.
fn is_typed(name: &str) -> bool {
    TYPED.iter().any(|path| {
        name.strip_prefix(path)
            .is_some_and(|rest| rest.starts_with('/') || rest == ".proto")
    })
}

/// Returns the chosen files and all their imports.
fn with_imports(all: FileDescriptorSet, is_chosen: impl Fn(&str) -> bool) -> FileDescriptorSet {
    let imports: BTreeMap<&str, &[String]> = all
        .file
        .iter()
        .map(|file| (file.name(), file.dependency.as_slice()))
        .collect();
    let mut wanted: BTreeSet<String> = BTreeSet::new();
    let mut open: Vec<&str> = imports.keys().copied().filter(|name| is_chosen(name)).collect();
    while let Some(name) = open.pop() {
        if wanted.insert(name.to_owned()) {
            open.extend(imports[name].iter().map(String::as_str));
        }
    }
    FileDescriptorSet {
        file: all
            .file
            .into_iter()
            .filter(|file| wanted.contains(file.name()))
            .collect(),
    }
}

/// Writes one Rust file per package and the module tree that includes them.
fn generate(files: FileDescriptorSet) -> Result<(), Error> {
    let services = tonic_prost_build::configure()
        .build_transport(false)
        .disable_comments(["."])
        .service_generator();
    let mut config = prost_build::Config::new();
    for field in BOXED {
        config.boxed(field);
    }
    config
        // Only the compiler reads these 1.6 MB, and an unoptimised formatter takes seconds for them.
        .format(false)
        .btree_map(["."])
        .bytes(["."])
        .disable_comments(["."])
        .enable_type_names()
        .type_name_domain(["."], "type.googleapis.com")
        .extern_path(".google.protobuf.Any", "crate::Any")
        .service_generator(services)
        .include_file("modules.rs")
        .compile_fds(files)?;
    Ok(())
}
