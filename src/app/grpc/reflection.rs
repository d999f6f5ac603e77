//! gRPC reflection (`v1` and `v1alpha`), as grpcurl uses it: names of services, and descriptors by file or symbol.
//!
//! Note: a descriptor comes without those that it imports, so that answers to unauthenticated callers are small.
//! Clients request the others by their file names.

use bytes::Bytes;
use prost::Message;
use prost_reflect::FileDescriptor;
use tonic::{Code, Status};

use super::DISCOVERY;
use crate::{proto::descriptor_pool, rpc::Exchange};

const PATHS: [&str; 2] = [
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];
const CERTIFICATES: &str = "istio.v1.auth.IstioCertificateService";

#[derive(Clone, PartialEq, Message)]
struct ServerReflectionRequest {
    #[prost(string, tag = "1")]
    host: String,
    #[prost(oneof = "Requested", tags = "3, 4, 5, 6, 7")]
    requested: Option<Requested>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Requested {
    #[prost(string, tag = "3")]
    FileByFilename(String),
    #[prost(string, tag = "4")]
    FileContainingSymbol(String),
    #[prost(bytes = "bytes", tag = "5")]
    FileContainingExtension(Bytes),
    #[prost(string, tag = "6")]
    AllExtensionNumbersOfType(String),
    #[prost(string, tag = "7")]
    ListServices(String),
}

#[derive(Clone, PartialEq, Message)]
struct ServerReflectionResponse {
    #[prost(string, tag = "1")]
    valid_host: String,
    #[prost(message, optional, tag = "2")]
    original_request: Option<ServerReflectionRequest>,
    #[prost(oneof = "Answer", tags = "4, 6, 7")]
    answer: Option<Answer>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Answer {
    #[prost(message, tag = "4")]
    File(FileDescriptorResponse),
    #[prost(message, tag = "6")]
    Services(ListServiceResponse),
    #[prost(message, tag = "7")]
    Error(ErrorResponse),
}

#[derive(Clone, PartialEq, Message)]
struct FileDescriptorResponse {
    #[prost(bytes = "vec", repeated, tag = "1")]
    files: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct ListServiceResponse {
    #[prost(message, repeated, tag = "1")]
    services: Vec<ServiceResponse>,
}

#[derive(Clone, PartialEq, Message)]
struct ServiceResponse {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct ErrorResponse {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
}

/// The reflection service of one port.
pub(in crate::app) struct Reflection {
    /// True if the port serves certificates.
    pub(in crate::app) has_certificates: bool,
}

impl Exchange for Reflection {
    fn has_method(&self, path: &str) -> bool {
        PATHS.contains(&path)
    }

    fn answer(&self, request: Bytes) -> Result<Bytes, Status> {
        let request = ServerReflectionRequest::decode(request)
            .map_err(|error| Status::invalid_argument(format!("cannot decode the request: {error}")))?;
        let answer = match &request.requested {
            Some(Requested::ListServices(_)) => Ok(Answer::Services(self.services())),
            Some(Requested::FileByFilename(name)) => file(descriptor_pool().get_file_by_name(name)),
            Some(Requested::FileContainingSymbol(symbol)) => file(containing(symbol)),
            Some(Requested::FileContainingExtension(_) | Requested::AllExtensionNumbersOfType(_)) => {
                Err((Code::NotFound, "there are no extensions"))
            }
            None => Err((Code::InvalidArgument, "nothing is requested")),
        };
        let answer = answer.unwrap_or_else(|(code, message)| {
            Answer::Error(ErrorResponse {
                code: code as i32,
                message: message.to_owned(),
            })
        });
        let response = ServerReflectionResponse {
            valid_host: request.host.clone(),
            original_request: Some(request),
            answer: Some(answer),
        };
        Ok(response.encode_to_vec().into())
    }
}

impl Reflection {
    fn services(&self) -> ListServiceResponse {
        let certificates = self.has_certificates.then_some(CERTIFICATES);
        let names = std::iter::once(DISCOVERY).chain(certificates);
        ListServiceResponse {
            services: names.map(|name| ServiceResponse { name: name.to_owned() }).collect(),
        }
    }
}

/// Returns the file that declares a service, method, message or enum.
fn containing(symbol: &str) -> Option<FileDescriptor> {
    let pool = descriptor_pool();
    let service = |name: &str| pool.get_service_by_name(name).map(|service| service.parent_file());
    let message = pool.get_message_by_name(symbol).map(|message| message.parent_file());
    let of_enum = || pool.get_enum_by_name(symbol).map(|found| found.parent_file());
    let of_method = || symbol.rsplit_once('.').and_then(|(parent, _)| service(parent));
    message.or_else(of_enum).or_else(|| service(symbol)).or_else(of_method)
}

fn file(found: Option<FileDescriptor>) -> Result<Answer, (Code, &'static str)> {
    let file = found.ok_or((Code::NotFound, "there is no such file or symbol"))?;
    Ok(Answer::File(FileDescriptorResponse {
        files: vec![file.encode_to_vec()],
    }))
}

#[cfg(test)]
mod tests {
    use prost_types::FileDescriptorProto;

    use super::*;

    fn ask(requested: Requested) -> Answer {
        let request = ServerReflectionRequest {
            host: String::new(),
            requested: Some(requested),
        };
        let reflection = Reflection { has_certificates: true };
        let answer = reflection.answer(request.encode_to_vec().into()).expect("an answer");
        let response = ServerReflectionResponse::decode(answer).expect("a response");
        assert_eq!(response.original_request, Some(request));
        response.answer.expect("an answer")
    }

    fn file_name(answer: Answer) -> String {
        let Answer::File(response) = answer else {
            panic!("{answer:?}");
        };
        let file = FileDescriptorProto::decode(response.files[0].as_slice()).expect("a descriptor");
        file.name().to_owned()
    }

    /// A client that describes the discovery service needs all files that it imports.
    #[test]
    fn a_client_finds_every_descriptor_of_the_services() {
        let Answer::Services(list) = ask(Requested::ListServices(String::new())) else {
            panic!("no services");
        };
        let names: Vec<&str> = list.services.iter().map(|service| service.name.as_str()).collect();
        assert_eq!(names, [DISCOVERY, CERTIFICATES]);
        for name in names {
            let mut waiting = vec![file_name(ask(Requested::FileContainingSymbol(name.to_owned())))];
            let mut seen = std::collections::BTreeSet::new();
            while let Some(name) = waiting.pop() {
                if !seen.insert(name.clone()) {
                    continue;
                }
                let Answer::File(response) = ask(Requested::FileByFilename(name.clone())) else {
                    panic!("{name} is missing");
                };
                let file = FileDescriptorProto::decode(response.files[0].as_slice()).expect("a descriptor");
                waiting.extend(file.dependency);
            }
        }
        let method = format!("{DISCOVERY}.StreamAggregatedResources");
        assert_eq!(
            file_name(ask(Requested::FileContainingSymbol(method))),
            "envoy/service/discovery/v3/ads.proto"
        );
    }

    #[test]
    fn unknown_symbols_are_reported_in_the_answer() {
        let Answer::Error(error) = ask(Requested::FileContainingSymbol("a.B".to_owned())) else {
            panic!("an error");
        };
        assert_eq!(error.code, Code::NotFound as i32);
    }
}
