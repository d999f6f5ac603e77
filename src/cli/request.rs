//! `istiod request METHOD PATH [BODY]`: queries the running istiod on this machine.

use std::{process::ExitCode, time::Duration};

use bytes::Bytes;
use clap::Args;
use http_body_util::{BodyExt, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};

use super::{FAILURE, print};

/// Arguments of `request`.
#[derive(Args)]
pub struct RequestFlags {
    /// HTTP method, such as GET.
    method: String,
    /// Path, such as /debug/syncz.
    path: String,
    /// Request body.
    body: Option<String>,
    /// Port of the monitoring address.
    #[arg(long, default_value_t = 15014)]
    port: u16,
}

const TIMEOUT: Duration = Duration::from_mins(1);

/// Reason why there is no response to print.
#[derive(Debug, thiserror::Error)]
enum RequestError {
    #[error("invalid method or path {0:?}: {1}")]
    Invalid(String, http::Error),
    #[error("no response from {0}: {1}; hint: check that istiod runs on this machine")]
    Unreachable(String, String),
    #[error("no response from istiod within {} s", TIMEOUT.as_secs())]
    Timeout,
    #[error("received unsuccessful status code {0}: {1}")]
    Status(u16, String),
}

/// Sends the request and prints the response.
pub fn run(flags: &RequestFlags) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let answer = match runtime {
        Ok(runtime) => runtime.block_on(async {
            tokio::time::timeout(TIMEOUT, send(flags))
                .await
                .unwrap_or(Err(RequestError::Timeout))
        }),
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(FAILURE);
        }
    };
    match answer {
        Ok(body) => print(&format!("{body}\n"), ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(FAILURE)
        }
    }
}

async fn send(flags: &RequestFlags) -> Result<String, RequestError> {
    let uri = format!("http://127.0.0.1:{}/{}", flags.port, flags.path.trim_start_matches('/'));
    let request = http::Request::builder()
        .method(flags.method.as_str())
        .uri(&uri)
        .body(Full::new(Bytes::from(flags.body.clone().unwrap_or_default())))
        .map_err(|error| RequestError::Invalid(format!("{} {}", flags.method, flags.path), error))?;
    let client = Client::builder(TokioExecutor::new()).build_http();
    let response = client
        .request(request)
        .await
        .map_err(|error| RequestError::Unreachable(uri.clone(), error.to_string()))?;
    let status = response.status().as_u16();
    let body = response
        .into_body()
        .collect()
        .await
        .map_err(|error| RequestError::Unreachable(uri, error.to_string()))?;
    let text = String::from_utf8_lossy(&body.to_bytes()).into_owned();
    // Parity (pilot/pkg/request/command.go): the response for a missing page is printed, not an error.
    if status > 399 && status != 404 {
        Err(RequestError::Status(status, text))
    } else {
        Ok(text)
    }
}
